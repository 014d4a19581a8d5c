"""Back-tests: a policy played once through a market, deterministically, without mirror and shaping."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from importlib import metadata as packages
from typing import Any, NamedTuple

import numpy as np

from fox_env import dynamics, metrics
from fox_env.baselines import as_policy, oracle_policy
from fox_env.engine import Engine, Game, game_of, to_numpy
from fox_env.gym_env import as_market
from fox_env.market import Market
from fox_env.report import BacktestReport, iso_time, policy_figures

__all__ = ["BacktestReport", "Lanes", "Player", "Record", "evaluate"]

MOST_LANES = 64
LANE_SESSIONS = 5
"""By default a lane is a week at least, so that starting flat and closing weigh little, and there are 64 at most."""

BASELINES = ("flat", "long", "short", "random")
_PACKAGES = ("fox-es", "numpy", "numba")


@dataclass(frozen=True, eq=False)
class Lanes:
    """A market cut into L contiguous stretches of whole sessions, about equally long.

    A step leads from one decision bar to the next and belongs to the session that it ends in. Lane k observes its first
    bar and is marked at its last, which is the first bar of lane k + 1; so each of the n steps is played by one lane.

    Attributes:
        market: the market.
        start, stop: int32 [L], first and last bar of each lane.
        steps: int64 [L], steps of each lane; their sum is n.
        bar: int64 [n], bar at whose close each step is decided, in time order.
        session: int64 [n], number of each step's session, from 0.
        days: int32 [m], trade date of each session, days since 1970-01-01.
    """

    market: Market
    start: np.ndarray
    stop: np.ndarray
    steps: np.ndarray
    bar: np.ndarray
    session: np.ndarray
    days: np.ndarray

    @classmethod
    def cut(cls, market: Market, lanes: int | None = None) -> Lanes:
        """Cut a market into `lanes` stretches; None takes one for every five sessions, 1 to 64.

        Raises:
            ValueError: fewer than two bars to decide at, or not from 1 to as many lanes as sessions.
        """
        decisions = np.flatnonzero(market.decision)
        if len(decisions) < 2:
            raise ValueError(f"the market has {len(decisions)} bars to decide at, expected at least 2")
        bar = decisions[:-1]
        days, first, session = np.unique(market.session[bar + 1], return_index=True, return_inverse=True)
        count = min(MOST_LANES, max(1, len(days) // LANE_SESSIONS)) if lanes is None else lanes
        if not isinstance(count, (int, np.integer)) or isinstance(count, bool) or not 1 <= count <= len(days):
            raise ValueError(f"lanes is {lanes!r}, expected an integer from 1 to the market's {len(days)} sessions")
        cuts = [0]
        for k in range(1, count):
            nearest = int(np.abs(first - len(bar) * k / count).argmin())
            # Every lane before has a session at least, and every one to come.
            cuts.append(min(max(nearest, cuts[-1] + 1), len(days) - (count - k)))
        edges = np.append(first[cuts], len(bar))
        start, stop = (decisions[at].astype(np.int32) for at in (edges[:-1], edges[1:]))
        return cls(market, start, stop, np.diff(edges), bar, session, days)

    def __len__(self) -> int:
        return len(self.start)


class Trades(NamedTuple):
    """Round trips, K of them: each from the order that opens a position to the one that closes or reverses it.

    net: float64 [K], net points; a reversal's costs are shared by contracts. bars: int64 [K], closes that the position
    was held at. The last one may be open, and is then marked.
    """

    net: np.ndarray
    bars: np.ndarray


@dataclass(frozen=True, eq=False)
class Record:
    """What one policy did: n steps in time order, lane after lane. Steps after a margin call are flat.

    Attributes:
        lanes: the lanes that were played.
        game: the settings.
        gross, cost: float64 [n], points of the step.
        position: int32 [n], contracts after the step.
        filled: int32 [n], signed contracts of the policy's own order.
        forced: int32 [n], signed contracts closed by the rules.
        rolled: int32 [n], contracts carried into a new contract.
        action: int8 [n, 4], what the policy asked for.
        can_trade: bool [n], an order could be sent.
        side_cost: float64 [n], what closing one contract costs by force: half the spread and a commission, points.
        commission: float64 [n], commission of one contract and side, points.
        margin_calls: lanes that ended so.
    """

    lanes: Lanes
    game: Game
    gross: np.ndarray
    cost: np.ndarray
    position: np.ndarray
    filled: np.ndarray
    forced: np.ndarray
    rolled: np.ndarray
    action: np.ndarray
    can_trade: np.ndarray
    side_cost: np.ndarray
    commission: np.ndarray
    margin_calls: int

    def __len__(self) -> int:
        return len(self.gross)

    @cached_property
    def net(self) -> np.ndarray:
        """Net points of each step, float64 [n]."""
        return self.gross - self.cost

    @cached_property
    def before(self) -> np.ndarray:
        """Contracts before each step, int32 [n]. Several lanes end flat, so that the next starts flat."""
        return np.concatenate([[0], self.position[:-1]]).astype(np.int32)

    @cached_property
    def session_pnl_usd(self) -> np.ndarray:
        """Net dollars of each session, float64 [m]."""
        sums = np.bincount(self.lanes.session, self.net, len(self.lanes.days))
        return sums * self.lanes.market.contract.multiplier

    @property
    def net_pnl_usd(self) -> float:
        """Net dollars in all."""
        return float(self.session_pnl_usd.sum())

    @property
    def edge_t(self) -> float:
        """Net profit over its own session-block standard error; the deployment gate asks for more than 3."""
        return metrics.edge_t(self.session_pnl_usd)

    @cached_property
    def costs(self) -> dict[str, np.ndarray]:
        """Where the costs of each step come from, float64 [n] points each; their sum is `cost`.

        ``commission`` and ``spread_slippage`` are of the policy's own orders; ``roll`` and ``forced`` hold the spread
        and the commission of those.
        """
        parts = {
            "commission": np.abs(self.filled) * self.commission,
            "roll": 2.0 * self.rolled * self.side_cost,
            "forced": np.abs(self.forced) * self.side_cost,
        }
        own = self.cost - parts["commission"] - parts["roll"] - parts["forced"]
        return {"commission": parts.pop("commission"), "spread_slippage": own, **parts}

    @cached_property
    def trades(self) -> Trades:
        """The round trips."""
        market, bar, before = self.lanes.market, self.lanes.bar, self.before
        between = self.position - self.forced  # after the policy's order, before a forced close
        opened = (between != 0) & (np.sign(before) != np.sign(between))
        number = np.cumsum(opened) - 1
        count = int(opened.sum())
        net = self.net.copy()
        # A reversal belongs to two trades; its reference price, from gross, tells the new position's part.
        turned = np.flatnonzero(opened & (before != 0))
        at = bar[turned]
        move = market.bars.close[at + 1] - market.bars.close[at] - market.gap[at + 1]
        since_fill = (self.gross[turned] - before[turned] * move) / self.filled[turned]
        own = self.costs["commission"][turned] + self.costs["spread_slippage"][turned]
        share = between[turned] / self.filled[turned]
        opening = between[turned] * since_fill - own * share - self.costs["forced"][turned]
        closing = net[turned] - opening
        net[turned] = opening
        held = (before != 0) | (between != 0)
        totals = np.bincount(number[held], net[held], count) + np.bincount(number[turned] - 1, closing, count)
        return Trades(totals, np.bincount(number[self.position != 0], minlength=count))

    def expected_net_points(self) -> float | None:
        """Expected net points of the positions and orders under the market's known drift, adverse selection included.

        None where the truth is not known, or the game has rules that expectations leave out.
        """
        from fox_env.oracle import expected_step

        lanes, truth = self.lanes, self.lanes.market.truth
        if truth is None:
            return None
        try:
            step = expected_step(truth, self.game.rules(lanes.market), self.game.spread_ticks)
        except ValueError:
            return None
        may_send = self.can_trade.copy()
        if len(lanes) > 1:
            may_send[np.cumsum(lanes.steps) - 1] = False  # the lane closes
        earned = step(
            truth.state[lanes.bar], self.before, self.action, may_send, lanes.market.after_break[lanes.bar + 1]
        )
        return float(earned.sum() - self.costs["forced"].sum() - self.costs["roll"].sum())


class Player:
    """Plays policies through one market. Building it costs milliseconds a thousand bars, `play` only the steps.

    Args:
        market: the market.
        lanes: stretches played side by side, each starting flat with fresh equity. With more than one, each is closed
            with its costs at its last bar; a single one is the whole market in one pass, marked at its end. None takes
            one for every five sessions, 1 to 64.
        device: where the game is stepped, ``"cpu"`` or a CUDA device. Policies get numpy observations either way.
        **settings: fields of `fox_env.Game`. Episodes have no other end, no mirror and no shaping whatever it says.

    Attributes:
        lanes: `Lanes`.
        game: the settings in force.

    Raises:
        ValueError, TypeError: a setting out of range or unknown, too few bars, or more lanes than sessions.
    """

    def __init__(self, market: Market, lanes: int | None = None, device: object = "cpu", **settings: Any) -> None:
        self.market = market
        self.lanes = Lanes.cut(market, lanes)
        self.game = replace(game_of(market, settings), episode_bars=0, mirror_prob=0.0, shaping={})
        self._engine = Engine(
            market, self.game, len(self.lanes), device, dynamics.DISABLED, close_at_stop=len(self.lanes) > 1
        )
        rules, rows = self._engine.rules, to_numpy(self._engine.tape[self.lanes.bar])
        self._commission = rules.commission_points + rules.commission_rate * rows[:, dynamics.CLOSE]
        self._side_cost = 0.5 * (rows[:, dynamics.ASK] - rows[:, dynamics.BID]) + self._commission

    def play(self, policy: object, seed: int = 0) -> Record:
        """Play a policy once through the market.

        Args:
            policy: as `fox_env.baselines.as_policy` takes it. It sees all lanes as the rows of one batch, those that
                have ended too.
            seed: of the policy ``"random"``.

        Raises:
            ValueError, TypeError: no policy, or actions of a wrong shape, not integral, or out of range.
        """
        policy = as_policy(policy, seed)
        policy.reset()
        engine, lanes = self._engine, self.lanes
        width, longest = len(lanes), int(lanes.steps.max())
        action = np.zeros((longest, width, 4), np.int8)
        points = engine._upload(np.zeros((longest, 2, width)))
        flags = engine._upload(np.zeros((longest, dynamics.FLAGS_ROWS, width), np.int32))
        engine.place(lanes.start, lanes.stop)
        for step in range(longest):
            if engine.count[dynamics.DONE].all():
                break
            chosen = policy(np.array(to_numpy(engine.obs)))
            action[step] = chosen
            engine.step(engine._upload(chosen))
            points[step] = engine.points[dynamics.GROSS : dynamics.COST + 1]
            flags[step] = engine.flags
        points, flags, played = (to_numpy(a) for a in (points, flags, engine.count[dynamics.STEPS]))
        number = np.arange(longest)[:, None]
        can_trade = np.ones((longest, width), bool)
        can_trade[1:] = flags[:-1, dynamics.CAN_TRADE] != 0
        can_trade &= number < played
        # [steps, lanes] to time order, without the padding of the shorter lanes.
        planned = (number < lanes.steps).T
        in_order: Callable[[np.ndarray], np.ndarray] = lambda array: array.swapaxes(0, 1)[planned]  # noqa: E731
        return Record(
            lanes, self.game,
            gross=in_order(points[:, 0]), cost=in_order(points[:, 1]),
            position=in_order(flags[:, dynamics.HELD]), filled=in_order(flags[:, dynamics.FILLED]),
            forced=in_order(flags[:, dynamics.FORCED]), rolled=in_order(flags[:, dynamics.ROLLED]),
            action=in_order(action), can_trade=in_order(can_trade),
            side_cost=self._side_cost, commission=self._commission,
            margin_calls=int((flags[:, dynamics.END] == dynamics.MARGIN_CALL).sum()),
        )  # fmt: skip


def evaluate(
    policy: object,
    market: Market,
    *,
    name: str = "agent",
    seed: int = 0,
    lanes: int | None = None,
    device: object = "cpu",
    in_sample: bool = False,
    baselines: bool = True,
    others: Mapping[str, object] | None = None,
    trials: int = 1,
    **settings: Any,
) -> BacktestReport:
    """Play a policy once through a market, and say what it earned and how sure that is.

    Args:
        policy: a callable from observations [N, D] to actions [N, 4], a Stable-Baselines3 model, a TensorDictModule, or
            ``"flat"``, ``"long"``, ``"short"``, ``"random"``; see `fox_env.baselines.as_policy`.
        market: the market, best a part that nothing was fitted on.
        name: of the policy in the report.
        seed: of the random baseline and of the bootstrap, zero or positive. The game itself has nothing to draw.
        lanes, device, settings: as `Player` takes them.
        in_sample: allow a market that its normalizer was fitted on.
        baselines: play flat, long, short and random beside it, and the oracle where it is known.
        others: more policies to play beside it, by their names in the report.
        trials: how many policies this one is the best of, for its deflated Sharpe ratio.

    Returns:
        `BacktestReport`: ``print(report)`` for the table, ``report.policies`` for the figures.

    Raises:
        ValueError, TypeError: a market that is too short or that the normalizer was fitted on, a setting or an action
            out of range, named in one sentence.
    """
    market = as_market(market)
    for what, value, least in (("seed", seed, 0), ("trials", trials, 1)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not least <= value < 1 << 63:
            raise ValueError(f"{what} is {value!r}, expected an integer of at least {least}")
    fitted = market.normalizer
    if fitted is not None and not in_sample and fitted.first_ts <= market.ts[-1] and fitted.last_ts >= market.ts[0]:
        fit, own = (
            f"{iso_time(a)} to {iso_time(b)}" for a, b in ((fitted.first_ts, fitted.last_ts), market.ts[[0, -1]])
        )
        raise ValueError(
            f"the market ({own}) overlaps the bars that its normalizer was fitted on ({fit}); take another part "
            "or pass in_sample=True"
        )
    player = Player(market, lanes, device, **settings)
    players: dict[str, object] = {name: policy}
    for other, one in (others or {}).items():
        if other in (name, *BASELINES, "oracle"):
            raise ValueError(f"others names a policy {other!r}, expected a name that the report does not have already")
        players[other] = one
    if baselines:
        players |= {baseline: baseline for baseline in BASELINES if baseline != name}
        oracle = oracle_policy(market, player.game.rules(market), player.game.spread_ticks)
        if oracle is not None:
            players["oracle"] = oracle
    records = {key: player.play(one, seed) for key, one in players.items()}
    figures = {key: policy_figures(record, seed, trials if key == name else 1) for key, record in records.items()}
    return BacktestReport(figures, _provenance(player, seed, trials, device, in_sample), records)


def _provenance(player: Player, seed: int, trials: int, device: object, in_sample: bool) -> dict[str, Any]:
    market, lanes = player.market, player.lanes
    return {
        "market": market.fingerprint, "contract": market.contract.name, "interval_s": market.interval_ns / 1e9 or None,
        "bars": len(market), "sessions": len(lanes.days),
        "first": iso_time(market.ts[0]), "last": iso_time(market.ts[-1]),
        "source": dict(market.provenance), "quality": dict(market.quality), "in_sample": in_sample,
        "seed": seed, "trials": trials, "lanes": len(lanes), "device": str(device), "game": asdict(player.game),
        "versions": {"python": platform.python_version()} | {package: _version(package) for package in _PACKAGES},
    }  # fmt: skip


def _version(package: str) -> str | None:
    try:
        return packages.version(package)
    except packages.PackageNotFoundError:
        return None  # run from a checkout that is not installed
