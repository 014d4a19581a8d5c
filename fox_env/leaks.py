"""Finding leaks: what to run on one's own data, features, environment and reward before believing a result.

`audit` builds the market again with its future replaced, plays the environment on the market and on others made of it,
and says for each check what it measured and where the leak is.

==================== ===============================================================================================
check                an alarm means
==================== ===============================================================================================
future rebuild       something of a bar changes when later raw rows are replaced or left out
future observation   an observation, the account or a reward changes when later bars are replaced
present observation  an observation shows its bar's features too late
time order           bars overlap, are known before they are over, or do not fit the exchange's hours
stamps               bars hold the prices of another time than they say, by the raw rows or by finer bars
stale prices         prices or quotes are carried forward over bars in which nothing traded
fill timing          a Market order is filled at a price that the next bar does not move, or at a better one
accounts             Σ net differs from the change of equity, or fills from the change of position
mirror sum           Market orders, played in the market and unchanged in its mirror, do not net −(both costs)
martingale           Market and IOC orders earn more or less than −costs where there is no edge
reward               the reward is positive where there is no edge, or is that of another step
normalizer           it was fitted on bars that are evaluated
==================== ===============================================================================================
"""

from __future__ import annotations

import datetime as dt
import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from gymnasium import spaces

from fox_env import actions as act
from fox_env import dynamics
from fox_env.contracts import CONTRACTS
from fox_env.data.calendar import sessions, trade_dates
from fox_env.data.normalize import Normalizer
from fox_env.data.rolls import Segment
from fox_env.data.scramble import COLUMNS, PRICES, ChainRows, FrameRows, as_rows, scrambled_market
from fox_env.gym_env import FoxES, check_seed
from fox_env.market import Market, build_market

if TYPE_CHECKING:
    import gymnasium as gym
    import pandas as pd

SCHEMA = 1
STANDARD_ERRORS = 3.0
"""How far a mean may lie from its expectation. Where it lies further, a sample four times as large decides."""

_CUTS = 8  # bars whose future is replaced
_REBUILDS = 24  # the same for rebuilding: a value of a longer bar may leak in one bar of twelve
_BEFORE, _AFTER = 120, 20  # bars that are played before a cut, and kept after it
_STRETCHES, _STRETCH = 8, 2_500  # sequences of orders, and their bars
_MARTINGALE_STEPS, _MARTINGALE_BARS = 20_000, 10_000
_EXACT = 1e-9
_HOUR_NS = 3_600_000_000_000
_WIDTH = 100
_ROW_FIELDS = (
    "session", "after_break", "fraction_left", "session_last", "decision", "volatility", "roll", "gap", "lock",
    "instrument",
)  # fmt: skip
_POSITION_FIELDS = ("exposure", "unrealized profit", "age", "drawdown", "can-trade", "session left")
_INFO = (
    "position", "equity_usd", "pnl_points", "gross_points", "cost_points", "filled", "fill_price", "forced", "rolled",
    "can_trade", "ts",
)  # fmt: skip


@dataclass(frozen=True)
class Check:
    """One check of an audit.

    Attributes:
        name: as in the module's table.
        status: ``"passed"``, ``"failed"``, or ``"skipped"`` where it could not be made.
        finding: one sentence: what was found and where, or why the check was skipped.
        figures: what was measured: numbers, texts, lists of texts.
    """

    name: str
    status: Literal["passed", "failed", "skipped"]
    finding: str
    figures: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AuditReport:
    """What an audit found: ``print(report)`` for the table, ``report["stamps"]`` for one `Check`.

    Attributes:
        checks: in the order of the module's table.
        market: the market in one line.
    """

    checks: tuple[Check, ...]
    market: str

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.alarms

    @property
    def alarms(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.status == "failed")

    def __getitem__(self, name: str) -> Check:
        return {check.name: check for check in self.checks}[name]

    def to_dict(self) -> dict[str, Any]:
        """The report for JSON: ``schema``, ``passed``, ``market``, and ``checks`` with the fields of `Check`."""
        checks = [{**vars(check), "figures": dict(check.figures)} for check in self.checks]
        return {"schema": SCHEMA, "passed": self.passed, "market": self.market, "checks": checks}

    def __str__(self) -> str:
        line = "─" * _WIDTH
        rows = [*textwrap.wrap(self.market, _WIDTH), f"{'check':21}{'result':9}finding", line]
        for check in self.checks:
            first, *others = textwrap.wrap(check.finding, _WIDTH - 30)
            rows += [f"{check.name:21}{check.status:9}{first}", *(" " * 30 + other for other in others)]
        counts = (f"{sum(c.status == s for c in self.checks)} {s}" for s in ("passed", "failed", "skipped"))
        return "\n".join([*rows, line, ", ".join(counts)])


def audit(
    data: Market | pd.DataFrame | Sequence[Segment],
    build: Callable[[Any], Market] | None = None,
    make_env: Callable[..., gym.Env] = FoxES,
    *,
    split: Callable[[Market], Sequence[Market]] | None = None,
    finer: Market | pd.DataFrame | None = None,
    seed: int = 0,
    **settings: Any,
) -> AuditReport:
    """Look for leaks in data, features, environment, reward and normalizer. Takes seconds.

    Args:
        data: what the market is built of: a DataFrame with a UTC index of the starts of its rows, or the segments that
            `fox_env.data.load.load_segments` gives. A row of a frame is taken to be known when as much time has passed
            since its start as lies between the nearest two rows. A finished `Market` will do, but cannot be built
            again, so that its features are not checked.
        build: makes the market of `data`, and of part of its rows. None takes `Market.from_bars` of a frame, with its
            default interval, and the default features of segments of ES.
        make_env: makes the environment, called as `FoxES` is with a market and keyword settings, fields of
            `fox_env.Game`. A subclass of `FoxES` will do, or ``lambda market, **s: Wrapper(FoxES(market, **s))``.
            `reset` takes ``options={"start": bar}``, and infos have the keys of `FoxES`.
        split: makes the training part and then the evaluated parts of the market; None takes `Market.split`.
        finer: shorter bars of the same market, whose stamps are right, to compare the bars' prices with.
        seed: of everything that is drawn.
        **settings: fields of `fox_env.Game`. The checks play without margin and to the end of the data, and choose
            mirror and hold where they need to.

    Raises:
        TypeError: `data` is nothing of these, or `build` gives no market.
        ValueError: a frame without a UTC index, a seed out of range; or what `build`, `split` or `make_env` raises.
    """
    subject = _Subject(data, build, make_env, split, finer, seed, settings)
    checks = []
    for name, check in _CHECKS.items():
        found = _Found()
        try:
            check(subject, found)
        except _Skipped as why:
            checks.append(Check(name, "skipped", str(why)))
            continue
        status = "failed" if found.problems else "passed"
        checks.append(Check(name, status, "; ".join(found.problems) or found.said, found.figures))
    return AuditReport(tuple(checks), repr(subject.market))


class _Skipped(Exception):
    """Why a check cannot be made."""


@dataclass
class _Found:
    """What a check finds: its problems, what to say if there are none, and its figures."""

    problems: list[str] = field(default_factory=list)
    said: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class _Trace:
    """n steps of an environment.

    Attributes:
        bar: int64 [n + 1], row of the market at whose close it stood.
        obs, masks: n + 1 observations and action masks, where they were asked for.
        reward: float64 [n]. terms: n dicts of shaping terms.
        info: arrays [n] by the infos' keys.
        equity: dollars after the reset.
    """

    bar: np.ndarray
    obs: list[np.ndarray]
    masks: list[np.ndarray]
    reward: np.ndarray
    terms: list[Mapping[str, float]]
    info: dict[str, np.ndarray]
    equity: float


class _Subject:
    """What is audited, and how it is played."""

    def __init__(self, data, build, make_env, split, finer, seed, settings) -> None:
        self.make_env, self.split, self.seed = make_env, split, check_seed(seed)
        self.settings = {**settings, "episode_bars": 0, "margin": False, "mirror_prob": 0.0}
        self.finer = finer
        if isinstance(data, Market):
            if build is not None:
                raise TypeError("data is a Market and build is given, expected what build makes the market of")
            self.rows, self.build, self.market = None, None, data
            return
        self.rows = as_rows(data)
        self.build = build or (Market.from_bars if isinstance(self.rows, FrameRows) else _build_chain)
        self.market = self.build(self.rows.raw)
        if not isinstance(self.market, Market):
            raise TypeError(f"build gives a {type(self.market).__name__}, expected a Market")

    def rng(self, *key: int) -> np.random.Generator:
        """A check's own generator."""
        return np.random.default_rng([self.seed, *key])

    def cuts(self, rng: np.random.Generator, count: int = _CUTS) -> list[int]:
        """Rows to look at the future of, ascending: `count` spread over the market, and one before a roll."""
        market = self.market
        decision = market.decision[:-1]
        good = np.flatnonzero(decision & market.decision[1:])
        if not len(good):
            raise _Skipped("the market has no two bars in a row to decide at")
        places = [rng.choice(part) for part in np.array_split(np.arange(len(good)), min(count, len(good)))]
        # At all places modulo their number, since what is made of longer bars may leak in one bar of each only.
        chosen = [good[min(place + (k - place) % len(places), len(good) - 1)] for k, place in enumerate(places)]
        before_rolls = np.flatnonzero(decision & (market.roll[1:] != dynamics.NO_ROLL))
        return np.unique([*chosen, *rng.permutation(before_rolls)[:1]]).astype(int).tolist()

    def part(self, row: int, before: int, after: int) -> tuple[Market, int]:
        """Some bars around `row` as a market, and its row there."""
        begin = max(0, row - before)
        return self.market.slice(begin, min(len(self.market), row + after + 1)), row - begin

    @cached_property
    def stretches(self) -> list[Market]:
        """Parts to play long sequences on, without price limits, at which one direction does not fill."""
        market, parts = self.market, []
        count = min(_STRETCHES, max(1, len(market) // _STRETCH))
        for begin, stop in pairwise(np.linspace(0, len(market), count + 1).astype(int).tolist()):
            stop = min(stop, begin + _STRETCH)
            if np.count_nonzero(market.decision[begin:stop]) > 1:
                parts.append(market.slice(begin, stop))
        return [replace(part, lock=np.zeros_like(part.lock)) for part in parts]

    def play(
        self,
        market: Market,
        script: np.ndarray,
        start: int | None = None,
        stop: int | None = None,
        observe: bool = False,
        **settings: Any,
    ) -> _Trace:
        """Play the actions `script` [T, 4], a row for each bar of the market, from bar `start` to bar `stop`."""
        env = self.make_env(market, **{**self.settings, **settings})
        is_index = isinstance(env.action_space, spaces.Discrete)
        mask = getattr(env.unwrapped, "action_masks", None)
        bar = int(market.decision.argmax()) if start is None else start
        stop = len(market) - 1 if stop is None else stop
        observation, info = env.reset(seed=self.seed, options={"start": bar})
        equity = info.get("equity_usd", math.nan)
        bars, obs, masks, rewards, terms, infos = [bar], [], [], [], [], []

        def look() -> None:
            if observe:
                obs.append(np.array(spaces.flatten(env.observation_space, observation)))
                masks.append(np.array(mask() if mask else ()))

        look()
        is_over = False
        while bar < stop and not is_over:
            action = int(act.encode(script[bar])) if is_index else script[bar]
            observation, reward, terminated, truncated, info = env.step(action)
            bar = int(market.land[bar])
            is_over = terminated or truncated
            bars.append(bar)
            look()
            rewards.append(float(reward))
            terms.append(info.get("reward_terms", {}))
            try:
                infos.append([info[key] for key in _INFO])
            except KeyError as error:
                raise _Skipped(f"the environment's infos have no {error}") from None
        env.close()
        if not rewards:
            raise _Skipped("the environment cannot be played")
        columns = dict(zip(_INFO, map(np.array, zip(*infos, strict=True)), strict=True))
        return _Trace(np.array(bars), obs, masks, np.array(rewards), terms, columns, equity)

    @cached_property
    def martingales(self) -> dict[str, _Plays]:
        """Plays on markets without an edge, by policy."""
        return {policy: _Plays.of(self, policy) for policy in ("random", "momentum")}


def _build_chain(segments: Sequence[Segment]) -> Market:
    lengths = np.unique(np.concatenate([segment.bars.ts - segment.bars.start for segment in segments]))
    return build_market(segments, "ES", int(lengths[0]) if len(lengths) == 1 else 0)


def _random_script(rng: np.random.Generator, bars: int, orders: Sequence[int] = (0, 1, 2)) -> np.ndarray:
    """Random actions with those order types, [bars, 4]."""
    script = rng.integers(0, 3, (bars, 4))
    script[:, 2] = rng.choice(orders, bars)
    return script


def _differs(one: np.ndarray, two: np.ndarray) -> np.ndarray:
    """Where numbers are not the same; NaN is the same as NaN."""
    return (one != two) & ~((one != one) & (two != two))


# --- Data -------------------------------------------------------------------------------------------------------------


def _future_rebuild(subject: _Subject, found: _Found) -> None:
    if subject.rows is None:
        raise _Skipped("a finished market cannot be built again: give raw rows and build=")
    market, rng = subject.market, subject.rng(1)
    warmup = int(market.decision.argmax())
    # The first bar to decide at shows what was filled in backwards over a warm-up.
    cuts = sorted({warmup, *subject.cuts(rng, _REBUILDS)})
    leaking: dict[str, str] = {}
    refused: list[str] = []
    rebuilt = 0
    for number, row in enumerate(cuts):
        cut = int(market.ts[row])
        # Of a changing length, since what is taken of every k-th row may leak at some of k places only.
        rows, base = _rows_around(subject, row, 3 * warmup + 1_000 + int(rng.integers(100)))
        others = {"replaced": rows.scrambled(cut, rng), "left out": rows.rows(-math.inf, cut).raw}
        if number == 0 and (changed := _changes(base, subject.build(rows.raw), cut, 0)):
            found.problems.append(f"{_listed(changed)} differ between two builds of the same rows")
            return
        for what, other in others.items():
            try:
                made = subject.build(other)
            except Exception as error:  # of the user's code, which may not have met so few rows, or such
                refused.append(str(error) or type(error).__name__)
                continue
            # A builder may need the next row to know that a bar is finished.
            changed = _changes(base, made, cut, int(what == "left out"))
            rebuilt += 1
            for name, at in changed.items():
                where = f"that of the bar closing {_time(base.ts[at])}"
                leaking.setdefault(name, f"{where} changes when rows known after {_time(cut)} are {what}")
    if not rebuilt:
        raise _Skipped(f"build refuses rows whose future is replaced: {refused[0]}")
    found.figures = {"cuts": len(cuts), "rebuilt": rebuilt, "refused": len(refused), "leaking": list(leaking)}
    found.said = f"{rebuilt} rebuilds with other rows after {len(cuts)} bars: no bit until them differs"
    if leaking:
        found.problems.append(f"{_listed(leaking)} read the future: {next(iter(leaking.values()))}")


def _rows_around(subject: _Subject, row: int, before: int) -> tuple[FrameRows | ChainRows, Market]:
    """Raw rows around bar `row`, as fast on any length of data, and their market; all rows if they do not make it."""
    market = subject.market
    after = market.ts[row - before] if row > before else -math.inf
    rows = subject.rows.rows(after, market.ts[min(row + 300, len(market) - 1)])
    try:
        base = subject.build(rows.raw)
    except Exception:  # as in `_future_rebuild`
        return subject.rows, market
    is_made = (base.decision & (base.ts == market.ts[row])).any()
    return (rows, base) if is_made else (subject.rows, market)


def _changes(base: Market, other: Market, cut: int, may_lack: int) -> dict[str, int]:
    """What differs in the bars that closed until `cut`: its name, and the first row where it does."""
    if base.feature_names != other.feature_names:
        return {"the choice of features": 0}
    rows, same = (int(np.searchsorted(market.ts, cut, side="right")) for market in (base, other))
    if not rows - may_lack <= same <= rows:
        return {"the number of bars": min(rows, same, len(base) - 1)}
    changed = {}
    others = dict(_columns(other))
    for name, one in _columns(base):
        # Whether a bar was its session's last shows with the next one, and nothing at its close depends on it.
        stop = same - (name == "session_last")
        differs = _differs(one[:stop], others[name][:stop]) if name in others else np.ones(1, bool)
        if differs.any():
            changed[name] = int(differs.argmax())
    return changed


def _columns(market: Market) -> Iterator[tuple[str, np.ndarray]]:
    """Everything that a market says of a bar, by name."""
    bars = market.bars
    yield from ((f"feature {name!r}", market.features[:, j]) for j, name in enumerate(market.feature_names))
    yield from ((name, getattr(market, name)) for name in _ROW_FIELDS)
    known = (name for name in ("start", "ts", *COLUMNS) if getattr(bars, name) is not None)
    yield from ((f"bars.{name}", getattr(bars, name)) for name in known)
    yield from ((f"bars.extra[{name!r}]", column) for name, column in bars.extra.items())


def _time_order(subject: _Subject, found: _Found) -> None:
    market = subject.market
    bars = market.bars
    same = np.diff(market.instrument) == 0

    def report(what: str, bad: np.ndarray) -> None:
        if bad.any():
            found.problems.append(f"{bad.sum()} bars {what}, the first closing {_time(bars.ts[bad.argmax()])}")

    # A large trade makes several volume bars at one instant.
    report("are known before they have begun", bars.start >= bars.ts + (market.interval_ns == 0))
    report("are known after the next one", np.diff(bars.ts) < 0)
    report("reach into the next one", (bars.start[1:] < bars.ts[:-1]) & same)
    length, steps = int(np.median(bars.ts - bars.start)), np.diff(bars.start)[same]
    apart = int(np.gcd.reduce(steps)) if len(steps) else 0
    found.figures = {"bars": len(market), "length_s": length / 1e9, "apart_s": apart / 1e9}
    if market.interval_ns and apart > length and not found.problems:
        found.problems.append(
            f"bars start {_span(apart)} or multiples of it apart, but count as known {_span(length)} after their "
            "start: they carry the start of a longer bar, the rest of which is the future"
        )
    # Volume bars end with a trade, daily ones with the session.
    if market.contract.name in CONTRACTS and 0 < market.interval_ns <= _HOUR_NS:
        _check_hours(market, length, found)
    found.said = f"{len(market):,} bars in order, known when over, in the exchange's hours"


def _check_hours(market: Market, length: int, found: _Found) -> None:
    """Whether bars lie in closed hours, or sessions lack exactly their last or exactly their first bar."""
    hours = str(market.provenance.get("hours", "all"))
    start, ts = market.bars.start, market.ts
    placed, dates = sessions(start, ts, hours=hours), trade_dates(int(start[0]), int(ts[-1]), hours=hours)
    count = len(dates.date)
    # Bars of some hours of the day reach neither end, and tell nothing.
    begins, ends = (
        {k: np.isin(edge + k * length, own) for k in (-1, 0, 1)}
        for edge, own in ((dates.open, start), (dates.close, ts))
    )
    early = int((ends[-1] & ~ends[0] & (begins[-1] | begins[0])).sum())
    late = int((begins[1] & ~begins[0] & (ends[0] | ends[1])).sum())
    closed = len(np.unique(placed.session[~placed.is_open]))
    found.figures |= {"sessions": count, "end_early": early, "begin_late": late, "with_closed_hours": closed}
    for sessions_, what in (
        (early, "end one bar before the exchange closes: bars are stamped early, as when starts are read as ends"),
        (late, "begin one bar after the exchange opens: bars are stamped late, as when ends are read as starts"),
    ):
        if sessions_ >= 2 and sessions_ > count / 2:
            found.problems.append(f"{sessions_} of {count} sessions {what}")
    if closed >= 2 and closed > count / 10:
        found.problems.append(
            f"in {closed} of {count} sessions bars lie in hours in which the exchange is closed: stamps or their "
            "time zone are wrong, or bars were filled in"
        )


def _stamps(subject: _Subject, found: _Found) -> None:
    market = subject.market
    if not market.interval_ns:
        raise _Skipped("volume bars have no length to shift them by")
    if isinstance(subject.finer, Market):
        bars = subject.finer.bars
        rows = {name: getattr(bars, name) for name in ("start", "ts", *PRICES[1:])}
    elif subject.finer is None and subject.rows is None:
        raise _Skipped("a finished market has no rows to compare with: give them or finer=")
    else:
        rows = (subject.rows if subject.finer is None else FrameRows(subject.finer)).bars()
    if rows is None:
        raise _Skipped("the rows have no columns high, low and close to compare with")
    short, length = (int(np.median(b["ts"] - b["start"])) for b in (rows, vars(market.bars)))
    if short > length:
        raise _Skipped(f"the rows to compare with are longer ({_span(short)}) than the bars ({_span(length)})")
    shares = {
        shift: _share_equal(market, rows, shift)
        for shift in sorted({k * step for step in (short, length) for k in range(-2, 3)}, key=abs)
    }
    best = max(shares, key=shares.__getitem__)  # of equals the least shift
    found.figures = {"shift_s": best / 1e9, "share_equal": shares[best], "share_equal_unshifted": shares[0]}
    if shares[best] < 0.5:
        raise _Skipped(f"at most {shares[best]:.0%} of the bars have the prices of the rows to compare with")
    found.said = f"{shares[0]:.1%} of the bars have the prices of the {_span(short)} rows of their time"
    if best:
        found.problems.append(
            f"{shares[best]:.0%} of the bars have the prices of {_span(abs(best))} {'after' if best > 0 else 'before'} "
            f"their time and {shares[0]:.0%} those of their time: they are stamped {'early' if best > 0 else 'late'}"
        )


def _share_equal(market: Market, rows: Mapping[str, np.ndarray], shift: int) -> float:
    """Share of the bars, among those with rows, whose high, low and close are those of the rows `shift` ns later."""
    begin, stop = (np.searchsorted(rows["start"], edge + shift) for edge in (market.bars.start, market.ts))
    held = stop > begin
    if np.count_nonzero(held) < 10:
        return 0.0
    edges = np.stack([begin[held], stop[held]], axis=1).ravel()
    made = {
        # With one more row, which no bar holds, the last edge is a row.
        "high": np.maximum.reduceat(np.append(rows["high"], np.nan), edges)[::2],
        "low": np.minimum.reduceat(np.append(rows["low"], np.nan), edges)[::2],
        "close": rows["close"][stop[held] - 1],
    }
    close_to = [np.abs(prices - getattr(market.bars, name)[held]) for name, prices in made.items()]
    return float((np.max(close_to, axis=0) < market.contract.tick / 4).mean())


def _stale_prices(subject: _Subject, found: _Found) -> None:
    market = subject.market
    bars, tick = market.bars, market.contract.tick
    empty = ~(bars.volume > 0)
    is_known = not empty.all()
    if is_known and empty.any():
        found.problems.append(
            f"{empty.sum()} bars have no volume, the first closing {_time(bars.ts[empty.argmax()])}: their prices are "
            "carried forward, and orders fill at prices at which nobody traded"
        )

    def repeats(lag: int) -> np.ndarray:
        """Whether bars [T − 2] have the volume of the bar `lag` before, and its prices or, being flat, its close."""
        now, then = slice(2, None), slice(2 - lag, len(bars) - lag)
        equal = {n: getattr(bars, n)[now] == getattr(bars, n)[then] for n in (*PRICES, "volume")}
        flat = bars.high[now] == bars.low[now]
        prices = equal["open"] & equal["high"] & equal["low"] & equal["close"] & ~flat
        # Without volume a flat bar says nothing.
        return (prices | (flat & equal["close"])) & equal["volume"] if is_known else prices

    previous, second = repeats(1), repeats(2)
    count, chance = int(previous.sum()), int((second & ~previous).sum())
    found.figures = {"without_volume": int(empty.sum()) if is_known else None, "repeats": count, "by_chance": chance}
    found.said = f"{count} of {len(bars):,} bars repeat the one before, about {chance} by chance"
    if count > 5 + 5 * chance:
        found.problems.append(
            f"{count} bars repeat the one before, some {chance} by chance, the first closing "
            f"{_time(bars.ts[2 + previous.argmax()])}: prices are carried forward, and orders fill at them"
        )
    if bars.bid is None or bars.ask is None:
        return
    still = (np.diff(bars.bid) == 0) & (np.diff(bars.ask) == 0)
    left = (bars.close > bars.ask + 1.5 * tick) | (bars.close < bars.bid - 1.5 * tick)
    stale, quoted = still & left[1:], int(np.isfinite(bars.bid + bars.ask).sum())
    found.figures["stale_quotes"] = int(stale.sum())
    if stale.sum() > max(3, quoted / 200):
        found.problems.append(
            f"{stale.sum()} of {quoted} quotes stand still while the price leaves them by more than a tick, the "
            f"first at {_time(bars.ts[1 + stale.argmax()])}: quotes are carried forward"
        )


# --- The environment --------------------------------------------------------------------------------------------------


def _future_observation(subject: _Subject, found: _Found) -> None:
    rng, leaking, steps, with_hindsight = subject.rng(2), {}, 0, False
    cuts = subject.cuts(rng)
    for cut in cuts:
        part, row = subject.part(cut, _BEFORE, _AFTER)
        script = _random_script(rng, len(part))
        one, two = (
            subject.play(market, script, stop=row + 1, observe=True)
            for market in (part, scrambled_market(part, row, rng))
        )
        names = _observation_names(part, len(one.obs[0]))
        for name, at in _trace_changes(one, two, row, names).items():
            leaking.setdefault(name, f"that at the close of {_time(part.ts[at])} changes with later bars")
        steps += int((one.bar <= row).sum()) - 1
        with_hindsight |= any(terms.get("hindsight") for terms in one.terms)
    found.figures = {"cuts": len(cuts), "steps": steps, "leaking": list(leaking)}
    found.said = f"{steps:,} steps to {len(cuts)} bars: nothing seen or earned hangs on later bars"
    if with_hindsight:
        found.said += "; the hindsight term, made of them, is left out"
    if leaking:
        found.problems.append(f"{_listed(leaking)} read the future: {next(iter(leaking.values()))}")


def _trace_changes(one: _Trace, two: _Trace, row: int, names: Sequence[str]) -> dict[str, int]:
    """What differs up to bar `row`: its name, and the first bar where it does."""
    changed: dict[str, int] = {}
    count = int((one.bar <= row).sum())
    if count != (two.bar <= row).sum():
        return {"the end of the episode": int(min(one.bar[-1], two.bar[-1]))}
    for step, at in enumerate(one.bar[:count].tolist()):
        for entry in np.flatnonzero(_differs(one.obs[step], two.obs[step])):
            changed.setdefault(names[entry], at)
        if not np.array_equal(one.masks[step], two.masks[step]):
            changed.setdefault("action_masks", at)
    n = count - 1
    rewards = [trace.reward[:n] - [terms.get("hindsight", 0.0) for terms in trace.terms[:n]] for trace in (one, two)]
    # Taking the term out of the sum rounds.
    unequal = {"the reward": np.abs(rewards[0] - rewards[1]) > _EXACT * (np.abs(one.reward) + np.abs(two.reward))[:n]}
    unequal |= {f"info[{key!r}]": _differs(one.info[key][:n], two.info[key][:n]) for key in _INFO}
    return changed | {name: int(one.bar[1 + bad.argmax()]) for name, bad in unequal.items() if bad.any()}


def _observation_names(market: Market, width: int) -> list[str]:
    """Names of an observation's entries, those of `FoxES` where it has its width."""
    window, rest = divmod(width - dynamics.POSITION_FIELDS, len(market.columns))
    if window < 1 or rest:
        return [f"observation {entry}" for entry in range(width)]
    return [f"observed {name!r}" for name in (*market.feature_names * window, *_POSITION_FIELDS)]


def _present_observation(subject: _Subject, found: _Found) -> None:
    rng, delays = subject.rng(3), []
    for cut in subject.cuts(rng):
        part, row = subject.part(cut, _BEFORE, _AFTER)
        features = part.features.copy()
        features[row] = 1.0 - features[row]
        script = _random_script(rng, len(part))
        one, two = (subject.play(m, script, observe=True) for m in (part, replace(part, features=features)))
        seen = [bool(_differs(a, b).any()) for a, b in zip(one.obs, two.obs, strict=True)]
        if any(seen):
            delays.append(int(one.bar[seen.index(True)]) - row)
    if not delays:
        raise _Skipped("no observation depends on the market's features")
    found.figures = {"changed": len(delays), "least_bars_late": min(delays), "most_bars_late": max(delays)}
    found.said = f"{len(delays)} changes of one bar's features are first seen at that bar's close"
    if min(delays) < 0:
        found.problems.append(f"the features of a bar are seen {-min(delays)} bars before it closes")
    if max(delays) > 0:
        found.problems.append(
            f"the features of a bar are first seen {max(delays)} bars after it closed: observations are late, as when "
            "a step returns the one before"
        )


def _fill_timing(subject: _Subject, found: _Found) -> None:
    rng, market, orders = subject.rng(4), subject.market, 0
    tick = market.contract.tick
    shift = 64 * tick
    wrong = []
    for cut in subject.cuts(rng):
        if not market.decision[cut + 1] or market.roll[cut + 1] != dynamics.NO_ROLL:
            continue
        part, row = subject.part(cut, 5, 5)
        part = replace(part, lock=np.zeros_like(part.lock))
        moved = replace(part, bars=replace(part.bars, **_shifted(part, row + 1, shift)))
        for direction in (act.SHORT, act.LONG):
            for urgency in (act.PATIENT, act.NORMAL, act.AGGRESSIVE):
                script = np.tile([direction, act.FULL, act.MARKET, urgency], (len(part), 1))
                one, two = (subject.play(m, script, row, row + 1).info for m in (part, moved))
                if not (one["filled"][0] and two["filled"][0]):
                    continue
                orders += 1
                price, other = float(one["fill_price"][0]), float(two["fill_price"][0])
                name = ("Patient", "Normal", "Aggressive")[urgency]
                what = f"a Market {name} order decided at the close of {_time(part.ts[row])} fills at {price:,.2f}"
                # An Aggressive order pays a tick for being there at a price already known.
                is_later = urgency != act.AGGRESSIVE or bool(part.after_break[row + 1])
                best = _best_price(part, row, urgency if is_later else None)
                if is_later and abs(other - price - shift) > _EXACT * price:
                    wrong.append(f"{what}, which prices of the next bar do not move; {_nearest(part, row, price)}")
                elif (price - best) * (direction - 1) < -_EXACT * price:
                    wrong.append(f"{what}, better than {best:,.2f}, the price of its time")
    if not orders:
        raise _Skipped("no Market order was filled")
    found.figures = {"orders": orders, "wrong": len(wrong)}
    found.said = f"{orders} Market orders fill in the next bar, never better than it trades"
    if wrong:
        found.problems.append(f"{wrong[0]} (so {len(wrong)} of {orders} orders)")


def _shifted(market: Market, row: int, shift: float) -> dict[str, np.ndarray]:
    """Prices and quotes, those from `row` on higher by `shift`."""
    names = [name for name in (*PRICES, "bid", "ask") if getattr(market.bars, name) is not None]
    later = np.arange(len(market)) >= row
    return {name: getattr(market.bars, name) + shift * later for name in names}


def _best_price(market: Market, row: int, urgency: int | None) -> float:
    """The price without the spread of an order decided at `row`, None being one that is filled at once."""
    bars = market.bars
    if urgency is None:
        return float(bars.close[row])
    return _mean_price(market, row + 1) if urgency == act.PATIENT else float(bars.open[row + 1])


def _mean_price(market: Market, row: int) -> float:
    return float(np.mean([getattr(market.bars, name)[row] for name in PRICES]))


def _nearest(market: Market, row: int, price: float) -> str:
    """The price of the bar already seen that a fill lies nearest to."""
    known = {name: float(getattr(market.bars, name)[row]) for name in ("close", "open")}
    known["mean price"] = _mean_price(market, row)
    name = min(known, key=lambda name: abs(known[name] - price))
    return f"the {name} of the bar already seen is {known[name]:,.2f}"


def _accounts(subject: _Subject, found: _Found) -> None:
    rng, steps, fills, worst = subject.rng(5), 0, 0, 0.0
    for part in subject.stretches:
        trace = subject.play(part, _random_script(rng, len(part)))
        info, dollars = trace.info, part.contract.multiplier
        net = info["pnl_points"]
        scale = np.maximum(1.0, np.cumsum(np.abs(net)))
        error = np.abs(np.cumsum(net) - (info["equity_usd"] - trace.equity) / dollars) / scale
        steps, fills, worst = steps + len(net), fills + np.count_nonzero(info["filled"]), max(worst, error.max())
        wrong = {
            "Σ pnl_points is not the change of equity_usd": ~(error <= _EXACT),
            "pnl_points are not gross_points − cost_points": ~(
                np.abs(info["gross_points"] - info["cost_points"] - net) <= _EXACT * scale
            ),
            "cost_points are negative": info["cost_points"] < -_EXACT,
            "the position's change is not filled + forced": np.diff(info["position"], prepend=0)
            != info["filled"] + info["forced"],
            "ts is not the close of the bar observed": info["ts"] != part.ts[trace.bar[1:]],
        }
        for what, bad in wrong.items():
            if bad.any() and not any(problem.startswith(what) for problem in found.problems):
                found.problems.append(f"{what}, first in the step to {_time(part.ts[trace.bar[1 + bad.argmax()]])}")
    found.figures = {"steps": steps, "fills": int(fills), "error": float(worst)}
    found.said = f"{steps:,} random steps: Σ net = change of equity to {worst:.0e}"


def _mirror_sum(subject: _Subject, found: _Found) -> None:
    rng, steps, worst, nets, costs = subject.rng(6), 0, 0.0, 0.0, 0.0
    for part in subject.stretches:
        script = _random_script(rng, len(part), [act.MARKET])
        one, two = (subject.play(part, script, mirror_prob=probability) for probability in (0.0, 1.0))
        count = min(len(one.reward), len(two.reward))
        net, cost = (one.info[key][:count] + two.info[key][:count] for key in ("pnl_points", "cost_points"))
        scale = np.maximum(1.0, np.cumsum(np.abs(one.info["pnl_points"])[:count]))
        error = np.abs(np.cumsum(net + cost)) / scale
        steps, nets, costs, worst = steps + count, nets + net.sum(), costs + cost.sum(), max(worst, error.max())
        if (bad := ~(error <= _EXACT)).any() and not found.problems:
            at = int(bad.argmax())
            found.problems.append(
                f"Market orders and the same in the mirror net {net[at]:+.4f} points in the step to "
                f"{_time(part.ts[one.bar[1 + at]])}, expected {-cost[at]:+.4f}, −(both costs)"
            )
    if not costs:
        raise _Skipped("no Market order was filled")
    found.figures = {"steps": steps, "net": float(nets), "cost": float(costs), "error": float(worst)}
    found.said = f"{steps:,} steps twice net {nets:,.2f} points, −costs {-costs:,.2f}, to {worst:.0e}"


@dataclass(frozen=True, eq=False)
class _Plays:
    """Steps where there is no edge: net and gross points, and rewards less the declared shaping terms, float64 [n].

    The first `adjacent` of them followed each other in one episode.
    """

    net: np.ndarray
    gross: np.ndarray
    reward: np.ndarray
    adjacent: int

    @classmethod
    def of(cls, subject: _Subject, policy: str) -> _Plays:
        """Play a policy; if chance alone might explain an alarm, a larger sample decides."""
        plays = cls._played(subject, policy, _MARTINGALE_STEPS, subject.rng(7, len(policy)))
        if abs(_t(plays.gross)) <= STANDARD_ERRORS and _t(plays.reward) <= STANDARD_ERRORS:
            return plays
        return cls._played(subject, policy, 4 * _MARTINGALE_STEPS, subject.rng(8, len(policy)))

    @classmethod
    def _played(cls, subject: _Subject, policy: str, steps: int, rng: np.random.Generator) -> _Plays:
        market, traces = subject.market, []
        length = min(_MARTINGALE_BARS, len(market))
        while sum(len(trace.reward) for trace in traces) < steps:
            begin = int(rng.integers(0, len(market) - length + 1))
            if np.count_nonzero(market.decision[begin : begin + length]) < 2:
                continue
            twin = _martingale_twin(market.slice(begin, begin + length), rng)
            script = _random_script(rng, len(twin), [act.MARKET, act.IOC])
            if policy == "momentum":
                # What pays if orders fill at prices already seen, and on no other account.
                script[:, 0] = 1 + np.sign(twin.bars.close - twin.bars.open)
            traces.append(subject.play(twin, script, min_hold_bars=0))
        net, cost = (np.concatenate([trace.info[key] for trace in traces]) for key in ("pnl_points", "cost_points"))
        shaping = np.concatenate([[sum(terms.values()) for terms in trace.terms] for trace in traces])
        reward = np.concatenate([trace.reward for trace in traces]) - shaping
        return cls(net, net + cost, reward, len(traces[0].reward))


def _martingale_twin(market: Market, rng: np.random.Generator) -> Market:
    """The market with the prices of a random walk and everything else as it is, without rolls and price limits.

    Opens lie up to a tick beside the close before.
    """
    from fox_env.data.synthetic import synthetic_bars

    bars, tick = market.bars, market.contract.tick
    walk = synthetic_bars("martingale", len(bars), int(rng.integers(1 << 31))).bars
    jumps = np.cumsum(rng.integers(-1, 2, len(bars)))
    ticks = {name: getattr(walk, name) * 4 + jumps for name in PRICES}
    lift = max(0.0, 4_000.0 - ticks["low"].min())
    prices = {name: (values + lift) * tick for name, values in ticks.items()}
    quotes = {name: getattr(bars, name) for name in ("bid", "ask") if getattr(bars, name) is not None}
    prices |= {name: quote - bars.close + prices["close"] for name, quote in quotes.items()}
    rows = {name: np.zeros_like(getattr(market, name)) for name in ("roll", "gap", "lock", "instrument")}
    return replace(market, bars=replace(bars, **prices), truth=None, volatility=np.full(len(bars), 4.0 * tick), **rows)


def _martingale(subject: _Subject, found: _Found) -> None:
    said = []
    for policy, plays in subject.martingales.items():
        t, net, cost = _t(plays.gross), float(plays.net.mean()), float((plays.gross - plays.net).mean())
        found.figures |= {f"{policy}_t": t, f"{policy}_net": net, f"{policy}_cost": cost}
        said.append(f"{policy} {net:.3f} = −cost {t:+.1f} s.e.")
        if abs(t) > STANDARD_ERRORS:
            why = (
                "fills know what was already seen" if policy == "momentum" else "fills or accounts are not the prices'"
            )
            found.problems.append(
                f"{policy} Market and IOC orders net {net:+.4f} points a step where there is no edge, expected "
                f"{-cost:+.4f}, −costs ({t:+.1f} standard errors): {why}"
            )
    found.said = f"points a step: {', '.join(said)}"


def _reward(subject: _Subject, found: _Found) -> None:
    for policy, plays in subject.martingales.items():
        found.figures[f"{policy}_t"] = t = _t(plays.reward)
        if t > STANDARD_ERRORS:
            found.problems.append(
                f"the reward of {policy} Market and IOC orders is positive ({t:+.1f} standard errors) where there is "
                f"no edge and the account nets {plays.net.mean():+.3f} points a step"
            )
    plays = subject.martingales["random"]
    net, reward = plays.net[: plays.adjacent], plays.reward[: plays.adjacent]
    by_lag = {lag: _correlation(net, reward, lag) for lag in (0, 1, -1, 2, -2)}
    best = max(by_lag, key=lambda lag: abs(by_lag[lag]))
    found.figures["correlation"] = by_lag[0]
    found.said = f"negative without an edge; correlation with net points {by_lag[0]:.3f}"
    if abs(by_lag[best]) > abs(by_lag[0]) + 0.1:
        found.problems.append(
            f"the reward is that of another step: its correlation with the net points of its own step is "
            f"{by_lag[0]:.2f}, with those {abs(best)} {'earlier' if best > 0 else 'later'} {by_lag[best]:.2f}"
        )


def _correlation(net: np.ndarray, reward: np.ndarray, lag: int) -> float:
    """Correlation of the reward with the net points `lag` steps before; 0 where either is constant."""
    length = len(net) - abs(lag)
    a, b = net[max(0, -lag) :][:length], reward[max(0, lag) :][:length]
    return float(np.corrcoef(a, b)[0, 1]) if length > 2 and a.std() and b.std() else 0.0


def _t(values: np.ndarray) -> float:
    """The mean in standard errors; 0 of zeros."""
    mean, error = values.mean(), values.std() / math.sqrt(len(values))
    return float(mean / error) if error else math.copysign(math.inf, mean) if mean else 0.0


# --- The normalizer ---------------------------------------------------------------------------------------------------


def _normalizer(subject: _Subject, found: _Found) -> None:
    market = subject.market
    if subject.split is None and market.normalizer is not None:
        _check_attached(market, found)
        return
    try:
        parts = list((subject.split or Market.split)(market))
    except ValueError as error:
        if subject.split is not None:
            raise
        raise _Skipped(str(error)) from None
    train, *evaluated = parts
    normalizers = {id(part.normalizer): part.normalizer for part in parts if part.normalizer is not None}
    if not normalizers:
        raise _Skipped("no part has a normalizer")
    named = {"the training part": [train], "all parts": parts}
    for number, part in enumerate(evaluated, 1):
        name, fitted = f"evaluated part {number}", part.normalizer
        named[name] = [part]
        if _overlap((train.ts[0], train.ts[-1]), part):
            found.problems.append(f"{name} overlaps the training part")
        if fitted is not None and _overlap((fitted.first_ts, fitted.last_ts), part):
            found.problems.append(f"the normalizer of {name} was fitted on {_window(fitted)}, which {name} overlaps")
    # What a normalizer says of itself may be wrong, what it is made of shows.
    fits = {name: _fit(pool) for name, pool in named.items()}
    for fitted in normalizers.values():
        distances = {name: _distance(fitted, fit) for name, fit in fits.items()}
        best = min(distances, key=distances.__getitem__)
        found.figures |= {"distance_to_training_part": distances["the training part"], "nearest": best}
        # It may be of some bars of the training part, and one made in another way lies as far from all of them.
        honest = min(distances["the training part"], _distance_to_own(fitted, train))
        if distances[best] < honest / 2:
            found.problems.append(f"centre and scale are those of {best}, whatever bars the normalizer names")
    found.said = f"fitted on {_window(next(iter(normalizers.values())))}, no bar of which is evaluated"
    found.problems = list(dict.fromkeys(found.problems))


def _check_attached(market: Market, found: _Found) -> None:
    """The normalizer that a single market came with."""
    fitted, own = market.normalizer, market.ts[market.decision]
    found.said = f"fitted on {_window(fitted)}, of which this market has no bar"
    if not _overlap((fitted.first_ts, fitted.last_ts), market):
        return
    if (fitted.first_ts, fitted.last_ts) == (own[0], own[-1]):
        raise _Skipped("it was fitted on this very market, so this is a training part: give split= to check others")
    found.problems.append(f"it was fitted on {_window(fitted)}, which this market overlaps")


def _overlap(span: tuple[int, int], market: Market) -> bool:
    return bool(span[0] <= market.ts[-1] and span[1] >= market.ts[0])


def _fit(parts: Sequence[Market]) -> Normalizer:
    x, ts, rows = (np.concatenate([getattr(part, name) for part in parts]) for name in ("features", "ts", "decision"))
    return Normalizer.fit(x, parts[0].columns, ts, rows)


def _distance(one: Normalizer, two: Normalizer) -> float:
    """Mean over the features of the centres' difference in scales and of the scales' in logs."""
    centre = np.abs(one.center.astype(np.float64) - two.center) / two.scale
    return float(np.mean(centre + np.abs(np.log(one.scale.astype(np.float64) / two.scale))))


def _distance_to_own(fitted: Normalizer, train: Market) -> float:
    """`_distance` to a fit on those bars of the training part that the normalizer names; inf if there are none."""
    begin = int(np.searchsorted(train.ts, fitted.first_ts))
    stop = int(np.searchsorted(train.ts, fitted.last_ts, side="right"))
    if not train.decision[begin:stop].any():
        return math.inf
    return _distance(fitted, _fit([train.slice(begin, stop)]))


def _window(fitted: Normalizer) -> str:
    return f"{_time(fitted.first_ts)} to {_time(fitted.last_ts)}"


def _time(ts: int) -> str:
    return dt.datetime.fromtimestamp(int(ts) // 1_000_000_000, dt.UTC).strftime("%Y-%m-%d %H:%M:%S")


def _span(ns: int) -> str:
    for unit, size in (("h", _HOUR_NS), ("min", 60_000_000_000)):
        if ns >= size and ns % size == 0:
            return f"{ns // size} {unit}"
    return f"{ns / 1e9:g} s"


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(list(names)[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_CHECKS: dict[str, Callable[[_Subject, _Found], None]] = {
    "future rebuild": _future_rebuild,
    "future observation": _future_observation,
    "present observation": _present_observation,
    "time order": _time_order,
    "stamps": _stamps,
    "stale prices": _stale_prices,
    "fill timing": _fill_timing,
    "accounts": _accounts,
    "mirror sum": _mirror_sum,
    "martingale": _martingale,
    "reward": _reward,
    "normalizer": _normalizer,
}
