"""`FoxES-v0` and `FoxES-Discrete-v0`: one account as a Gymnasium environment, plain Python."""

from __future__ import annotations

import math
from typing import Any

import gymnasium as gym
import numpy as np

from fox_env import actions as act
from fox_env import dynamics, rewards
from fox_env.engine import SEED_LIMIT, game_of, observation_bounds
from fox_env.market import Market


def as_market(market: object) -> Market:
    """A market as given, or loaded from a path; None is the embedded one.

    Raises:
        TypeError: neither a `Market`, nor a path, nor None.
    """
    if isinstance(market, Market):
        return market
    if market is None:
        from fox_env.data.synthetic import synthetic_market

        return synthetic_market("planted")
    if isinstance(market, (str, bytes)) or hasattr(market, "__fspath__"):
        from fox_env.data.load import load_market

        return load_market(market)
    raise TypeError(f"market is {market!r}, expected a Market, a path or None")


def check_seed(seed: object) -> int:
    """A seed of the game, as Python's integer.

    Raises:
        ValueError: it is not an integer in [0, 2**63).
    """
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"seed is {seed!r}, expected an integer in [0, 2**63)")
    return int(seed)


class FoxES(gym.Env[np.ndarray, np.ndarray]):
    """E-mini S&P 500 futures, one account, a decision a bar.

    **Timing.** The agent sees bar t when it has closed; its order works during bar t+1; the reward is the account's
    change from close t to close t+1. Nothing of bar t+1 is in the observation of bar t. Within a step: roll, order,
    mark at close t+1, session-end flatten, margin.

    **Action.** ``MultiDiscrete([3, 3, 3, 3])``: direction {Short, Flat, Long}, magnitude {Small .25, Half .5, Full 1},
    order {Market, Limit, IOC}, urgency {Patient, Normal, Aggressive}; `FoxES-Discrete-v0` takes
    ``((dir·3 + mag)·3 + order)·3 + urgency``. It names the position wanted, in contracts:
    sign × max(1, ⌊magnitude·max_contracts + ½⌋). While ``min_hold_bars`` have not passed since the last change, actions
    are ignored; see `action_masks`.

    **Fills** of a buy, h half the spread, a sell being its reflection:

    ======================= =========================================================================================
    Market Patient          always, at mean(open, high, low, close of t+1) + h
    Market Normal           always, at open t+1 + h
    Market Aggressive       always, at max(ask t + 1 tick, close t)
    Limit −1, 0, +1 tick    L = bid t down to a tick, + offset. If L ≥ ask t and open t+1 + h ≤ L: at open + h. Else if
                            low t+1 ≤ L − 1 tick: at L. Else not
    IOC cap 0, +1, +2       if open t+1 + h ≤ ask t + cap: at open + h, at most the size shown at close t; where none
                            is shown, all of it, or with `depth_contracts` as much as the book holds within the cap
    ======================= =========================================================================================

    Orders larger than the size shown walk the book a tick a level, never beyond their limit. What did not fill is
    cancelled. After a session break or a halt Market Aggressive acts as Normal, and a limit fills at open + h when
    that is within L.

    **Observation.** float32 [W·F + 6]: the market's F features of the last W = `window` bars, oldest first, each in
    [−10, 10]; then

    ===== ============================== ============ ================================================================
    index field                          range        unit
    ===== ============================== ============ ================================================================
    W·F   exposure                       [−1, 1]      position / max_contracts
    +1    unrealized profit and loss     [−10, 10]    max_contracts × volatility
    +2    age of the position            [0, 2]       min_hold_bars
    +3    drawdown                       [0, 10]      initial equity
    +4    can trade                      {0, 1}
    +5    fraction of the session left   [0, 1]
    ===== ============================== ============ ================================================================

    Volatility is the EWMA(100) root mean square of close changes about zero, in points, at least one tick.

    **Reward.** Net points of the step / (max_contracts × close t): a return on full exposure, costs deducted; plus the
    shaping terms that are switched on.

    **Episode end.** Terminated when equity falls short of the margin: the position is closed with its costs in that
    step. Truncated after `episode_bars`, or at the end of the data: marked, not closed.

    **Info.** ``ts`` (ns, close of the bar observed), ``position``, ``equity_usd``, ``pnl_points``, ``gross_points``,
    ``cost_points``, ``filled`` (signed contracts of the agent's order), ``fill_price`` (NaN if none), ``forced``
    (signed contracts closed by the rules), ``rolled`` (contracts), ``can_trade``, ``reward_terms``, and on the last
    step ``end_reason``: ``"margin_call"``, ``"episode_bars"`` or ``"end_of_data"``. All in the original market's terms,
    also in a mirrored episode.

    **Reset.** Uniformly over the bars with a whole episode ahead, or ``options={"start": bar}``. The game's randomness
    is Philox keyed by the seed and counted by the episode, the same on every device.

    Args:
        market: a `Market`, a path that `load_market` reads, or None for the embedded synthetic market.
        render_mode: none is supported yet.
        **settings: the fields of `fox_env.Game`, such as ``max_contracts=4``.

    Raises:
        ValueError, TypeError: a setting, a market or an action out of range, named in one sentence.

    Version history: v0, first release.
    """

    metadata = {"render_modes": []}  # noqa: RUF012  Gymnasium's convention
    discrete = False

    def __init__(self, market: object = None, render_mode: str | None = None, **settings: Any) -> None:
        if render_mode is not None:
            raise ValueError(f"render_mode is {render_mode!r}, expected None")
        self.render_mode = None
        self.market = as_market(market)
        self.game = game_of(self.market, settings)
        self.rules = self.game.rules(self.market)
        self._shaping = rewards.Shaping(**self.game.shaping)
        self._shaped = self.game.is_shaped
        self._starts = self.game.starts(self.market)
        self._tape = self.game.tape(self.market)
        self._land = self.market.land
        self._first = self.market.first
        self._fraction = self.market.fraction_left
        self._ts = self.market.ts
        self._mirror = self.market.mirror
        self._features = self.market.features.shape[1]
        # Room for the position fields beside each row's features makes an observation of one bar a single copy.
        self._table = self.market.padded
        low, high = observation_bounds(self.market, self.game.window)
        self.observation_space = gym.spaces.Box(low, high, dtype=np.float32)
        self.action_space = (
            gym.spaces.Discrete(act.NUM_ACTIONS) if self.discrete else gym.spaces.MultiDiscrete([3, 3, 3, 3])
        )
        self._seed: int | None = None
        self._done = True

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode; see the class."""
        options = options or {}
        unknown = set(options) - {"start"}
        if unknown:
            raise ValueError(f"option {sorted(unknown)[0]!r} is unknown, expected 'start'")
        start = options.get("start")
        if start is not None:
            start = self.market.check_start(start)
            if start.ndim:
                raise ValueError(f"start is {start.tolist()}, expected one bar")
        if seed is not None:
            seed = check_seed(seed)
        super().reset(seed=seed)
        if seed is not None or self._seed is None:
            self._seed = int(self.np_random.integers(SEED_LIMIT)) if seed is None else seed
            self._episode = 0
        drawn, self._mirrored = dynamics.draw_episode(
            self._seed, 0, self._episode, len(self._starts), self.game.mirror_prob
        )
        bar = int(self._starts[drawn] if start is None else start)
        self._episode += 1
        self._bar = bar
        self._row = self._tape[bar].tolist()
        self._position = 0
        self._age = self.rules.free_age
        self._net = self._basis = self._peak = 0.0
        self._steps = 0
        self._visits = [0, 0, 0]
        self._done = False
        return self._observe(), self._info(0.0, 0.0, 0, math.nan, 0, 0, {})

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Play one bar; see the class."""
        direction, magnitude, order, urgency = self._branches(action)
        if self._done:
            raise RuntimeError("step() was called on a finished episode; call reset() first")
        if self._mirrored:
            direction = 2 - direction
        rules = self.rules
        row = self._row
        nxt = self._tape[self._bar + 1].tolist()
        step = dynamics.step_one(
            row, nxt, self._position, self._age, self._net, self._basis, direction, magnitude, order, urgency, 0, rules
        )
        position, self._age, net, self._basis, gross, cost, filled, fill_price, forced, rolled, margin_call = step
        reward = rewards.base_reward(gross - cost, row[dynamics.CLOSE], rules.max_contracts)
        peak = max(self._peak, net)
        terms: dict[str, float] = {}
        if self._shaped:
            change = ((peak - net) - (self._peak - self._net)) * rules.multiplier / rules.initial_equity_usd
            values = rewards.shaping_terms(
                self._shaping, *self._visits, position, nxt[dynamics.AHEAD], gross, row[dynamics.VOLATILITY],
                row[dynamics.CLOSE], rules.max_contracts, change,
            )  # fmt: skip
            terms = dict(zip(rewards.SHAPING_TERMS, values, strict=True))
            for value in values:
                reward += value
            self._visits[(position > 0) - (position < 0) + 1] += 1
        self._position, self._net, self._peak = position, net, peak
        self._steps += 1
        bar = self._land.item(self._bar)
        # A skipped warm-up after an unmeasured roll lands further on; the next step needs that bar's row.
        self._row = nxt if bar == self._bar + 1 else self._tape[bar].tolist()
        self._bar = bar
        info = self._info(gross, cost, filled, fill_price, forced, rolled, terms)
        terminated = margin_call != 0
        truncated = False
        if terminated:
            end = dynamics.MARGIN_CALL
        elif self._steps == self.game.episode_bars:
            truncated, end = True, dynamics.EPISODE_BARS
        elif bar >= len(self._land) - 1:
            truncated, end = True, dynamics.END_OF_DATA
        if terminated or truncated:
            self._done = True
            info["end_reason"] = dynamics.END_REASONS[end]
        return self._observe(), reward, terminated, truncated, info

    def action_masks(self) -> np.ndarray:
        """Actions that make a difference, bool [12] ([81] for the discrete game).

        All of them where the account can trade; in a locked state, where actions are ignored, the one that names the
        current position.
        """
        largest = self.rules.max_contracts
        mask = act.locked_masks(largest, self.discrete)[self._mirrored, self._position + largest].copy()
        if self._age >= self.rules.min_hold:
            mask[:] = True
        return mask

    def _branches(self, action: Any) -> list[int]:
        # The common cases, an integer array of four and an integer index, are checked without numpy's overhead.
        if self.discrete:
            if (type(action) is int or isinstance(action, np.integer)) and 0 <= action < act.NUM_ACTIONS:
                return act.DECODED[action]
        elif isinstance(action, np.ndarray) and action.dtype.kind == "i" and action.shape == (4,):
            branches = action.tolist()
            a, b, c, d = branches
            if 0 <= a < 3 and 0 <= b < 3 and 0 <= c < 3 and 0 <= d < 3:
                return branches
        return act.parse_actions(action, None, self.discrete).tolist()

    def _observe(self) -> np.ndarray:
        bar, features, window = self._bar, self._features, self.game.window
        if window == 1:
            observation = self._table[bar].copy()
        else:
            rows = np.maximum(np.arange(bar - window + 1, bar + 1), self._first[bar])
            observation = np.empty(window * features + dynamics.POSITION_FIELDS, np.float32)
            observation[: window * features] = self._table[rows, :features].reshape(-1)
        base = window * features
        if self._mirrored:
            seen = observation[:base].reshape(window, features)
            perm, sign = self._mirror
            seen[:] = sign * seen[:, perm.astype(np.int64)]
        fields = dynamics.position_fields(
            self._row, self._position, self._age, self._net, self._basis, self._peak, self._fraction.item(bar),
            self._mirrored, self.rules,
        )  # fmt: skip
        (
            observation[base], observation[base + 1], observation[base + 2], observation[base + 3],
            observation[base + 4], observation[base + 5],
        ) = fields  # fmt: skip
        return observation

    def _info(
        self,
        gross: float,
        cost: float,
        filled: int,
        fill_price: float,
        forced: int,
        rolled: int,
        terms: dict[str, float],
    ) -> dict[str, Any]:
        rules = self.rules
        return {
            "ts": self._ts.item(self._bar),
            "position": self._position,
            "equity_usd": rules.initial_equity_usd + rules.multiplier * self._net,
            "pnl_points": gross - cost,
            "gross_points": gross,
            "cost_points": cost,
            "filled": filled,
            "fill_price": fill_price,
            "forced": forced,
            "rolled": rolled,
            "can_trade": self._age >= rules.min_hold,
            "reward_terms": terms,
        }


class FoxESDiscrete(FoxES):
    """`FoxES` with one action index of 81, for agents that need it."""

    discrete = True
