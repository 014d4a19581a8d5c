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
from fox_env.render import FPS, RENDER_MODES, Renderer


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

    **Timing.** The agent sees bar t when it has closed, its order works during bar t+1, and the
    reward is the account's change from close t to close t+1::

        close t                open t+1        bar t+1                close t+1
        ───┬──────────────────────┬──────────────────────────────────────┬────────────────► time
           │ 1 observe bar t      │ 3 roll: a new contract takes over    │ 5 mark the position
           │ 2 decide: `step`     │ 4 fill, or cancel at the close       │ 6 session-end flatten
           │                      │                                      │ 7 margin
           │                      │                                      │ 8 reward, observe t+1

    Nothing of bar t+1 is in the observation of bar t.

    **Action.** ``MultiDiscrete([3, 3, 3, 3])``; `FoxES-Discrete-v0` takes the index
    ``((direction·3 + magnitude)·3 + order)·3 + urgency`` of 81:

    ========= ===================================== ===============================================
    branch    levels 0, 1, 2
    ========= ===================================== ===============================================
    direction Short, Flat, Long                     sign −1, 0, +1 of the position wanted
    magnitude Small .25, Half .5, Full 1            its size, max(1, ⌊magnitude·max_contracts + ½⌋)
    order     Market, Limit, IOC                    how to get there; see the fills
    urgency   Patient, Normal, Aggressive           and how eagerly
    ========= ===================================== ===============================================

    A position that is held already sends no order and costs nothing. While ``min_hold_bars`` have
    not passed since the last change, actions are ignored; see `action_masks`.

    **Fills** of a buy, h half the spread at close t, a sell being its reflection:

    ==================== ==========================================================================
    Market Patient       always, at mean(open, high, low, close of t+1) + h
    Market Normal        always, at open t+1 + h
    Market Aggressive    always, at max(ask t + 1 tick, close t)
    Limit −1, 0, +1 tick L = bid t down to a tick, + offset. If L ≥ ask t and open t+1 + h ≤ L: at
                         open + h. Else if low t+1 ≤ L − 1 tick: at L. Else not
    IOC cap 0, +1, +2    if open t+1 + h ≤ ask t + cap: at open + h, at most the size shown at
                         close t; where none is shown, all of it, or with `depth_contracts` as
                         much as the book holds within the cap
    ==================== ==========================================================================

    Orders larger than the size shown walk the book a tick a level, never beyond their limit. What
    did not fill is cancelled. After a session break or a halt Market Aggressive acts as Normal,
    and a limit fills at open + h when that is within L.

    **Observation.** float32 [W·F + 6]: the market's F features (`Market.feature_names`) of the
    last W = `window` bars, oldest first, each in [−10, 10]; then the account:

    ===== ============================ ============ ===============================================
    index field                        range        unit
    ===== ============================ ============ ===============================================
    W·F   exposure                     [−1, 1]      position / max_contracts
    +1    unrealized profit and loss   [−10, 10]    max_contracts × volatility
    +2    age of the position          [0, 2]       min_hold_bars
    +3    drawdown                     [0, 10]      initial equity
    +4    can trade                    {0, 1}       1 where an order may be sent
    +5    fraction of the session left [0, 1]       of the session's length
    ===== ============================ ============ ===============================================

    Volatility is the EWMA(100) root mean square of close changes about zero, in points, at least
    one tick.

    **Reward.** Net points of the step / (max_contracts × close t): a return on full exposure,
    costs deducted; plus the shaping terms that are switched on.

    **Episode end.** *Terminated* when equity falls short of the margin: the position is closed
    with its costs in that step. *Truncated* after `episode_bars`, or at the end of the data:
    marked, not closed.

    **Info**, of reset and of every step, in the original market's terms also in a mirrored
    episode:

    ============== ======================= ========================================================
    key            unit
    ============== ======================= ========================================================
    `ts`           ns since 1970, UTC      close of the bar observed
    `position`     signed contracts        held after the step
    `equity_usd`   dollars                 at that close, costs deducted
    `pnl_points`   points × contracts      gross − cost of the step
    `gross_points` points × contracts
    `cost_points`  points × contracts      commission, spread and slippage; never negative
    `filled`       signed contracts        of the agent's own order
    `fill_price`   points                  its average; NaN if none
    `forced`       signed contracts        closed by the rules
    `rolled`       contracts               carried into a new contract
    `can_trade`    bool                    as observed
    `reward_terms` of the reward           each shaping term by name; empty where all are off
    `end_reason`                           on the last step only: ``"margin_call"``,
                                           ``"episode_bars"`` or ``"end_of_data"``
    ============== ======================= ========================================================

    **Reset.** At a bar drawn uniformly from those with a whole episode ahead, or at
    ``options={"start": bar}``. The game's randomness is Philox keyed by the seed and counted by
    the episode, the same on every device; no global generator is touched.

    **Render.** ``"rgb_array"`` is a picture of the last 200 bars with fills, position, equity and
    costs, made without a display; ``"ansi"`` a chart of 100 columns; ``"human"`` shows one or the
    other, in a window where matplotlib has an interactive backend and a display, else in the
    terminal. A mirrored episode is shown as the original market.

    Args:
        market: a `Market`, a path that `load_market` reads, or None for the embedded synthetic
            market.
        render_mode: ``"human"``, ``"rgb_array"``, ``"ansi"`` or None.
        **settings: fields of `fox_env.Game`; a market may bring defaults of its own
            (`Market.game`):

            ============================= ========= ===============================================
            ``max_contracts``             4         contracts of a Full position
            ``min_hold_bars``             10        bars between a change and the next order
            ``spread_ticks``              1.0       spread where the market has no quotes
            ``commission_usd_per_side``   None      dollars a contract; None takes the contract's
            ``commission_bps_round_trip`` None      instead of dollars, basis points of the close
            ``fill_rule``                 'through' 'touch' fills a limit when touched: optimistic
            ``depth_contracts``           None      contracts a level where no size is shown
            ``initial_equity_usd``        200000.0  equity at reset
            ``episode_bars``              1000      steps until truncation; 0 plays to the end
            ``flat_at_close``             False     close positions at each session's last bar
            ``margin``                    True      test margin after each step
            ``mirror_prob``               0.0       probability of a mirrored episode
            ``window``                    1         bars of features in an observation
            ``shaping``                   {}        coefficients, see `fox_env.rewards.Shaping`
            ``hindsight_lookahead``       10        bars ahead of the hindsight term
            ============================= ========= ===============================================

    Raises:
        ValueError, TypeError: a setting, a market or an action out of range, named in one sentence.

    Version history:
        v0: first release.
    """

    metadata = {"render_modes": list(RENDER_MODES), "render_fps": FPS}  # noqa: RUF012  Gymnasium's convention
    discrete = False

    def __init__(self, market: object = None, render_mode: str | None = None, **settings: Any) -> None:
        if render_mode not in (None, *RENDER_MODES):
            raise ValueError(f"render_mode is {render_mode!r}, expected one of {', '.join(RENDER_MODES)} or None")
        self.render_mode = render_mode
        self.market = as_market(market)
        self.game = game_of(self.market, settings)
        self.rules = self.game.rules(self.market)
        self._shaping = rewards.Shaping(**self.game.shaping)
        self._shaped = self.game.is_shaped
        self._no_terms = dict.fromkeys(rewards.SHAPING_TERMS, 0.0) if self._shaped else {}
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
        self._renderer = None if render_mode is None else Renderer(self.market, self.rules, render_mode)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """Start an episode.

        Args:
            seed: of the game, in [0, 2**63), begun from its first episode; None goes on with the
                next one.
            options: ``{"start": bar}`` starts there, at a decision bar with one more ahead.

        Returns:
            observation, info; see the class.

        Raises:
            ValueError: a seed, an option or a start out of range.
        """
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
        info = self._info(0.0, 0.0, 0, math.nan, 0, 0, dict(self._no_terms))
        if self._renderer is not None:
            self._renderer.reset(bar, self._mirrored, info)
        return self._observe(), info

    def step(self, action: Any) -> tuple[np.ndarray, float, bool, bool, dict[str, Any]]:
        """Play one bar.

        Args:
            action: integers [4], or an index for the discrete game.

        Returns:
            observation, reward, terminated, truncated, info; see the class.

        Raises:
            ValueError: an action of another shape, not integral or out of range.
            RuntimeError: the episode has finished.
        """
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
        if self._renderer is not None:
            self._renderer.add(bar, info)
        return self._observe(), reward, terminated, truncated, info

    def render(self) -> np.ndarray | str | None:
        """The chart that ``render_mode`` names; see the class.

        Returns:
            uint8 [640, 960, 3], a string, or None for ``"human"``, which is shown at each reset and
            step anyway.

        Raises:
            RuntimeError: before the first reset.
        """
        if self._renderer is None:
            gym.logger.warn("render() does nothing without a render_mode, such as gym.make(..., render_mode='ansi')")
            return None
        return self._renderer.render()

    def close(self) -> None:
        """Close the window of ``render_mode="human"``; closing twice does nothing more."""
        if self._renderer is not None:
            self._renderer.close()

    def action_masks(self) -> np.ndarray:
        """Actions that make a difference, bool [12] ([81] for the discrete game).

        All of them where the account can trade; in a locked state, where actions are ignored, the
        one that names the current position.
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
