"""Synthetic bars: markets whose best policy is known, one without any edge, and one that looks like ES.

The lattice kinds (``planted``, ``planted_noisy``, ``martingale``) draw every bar as a path of K = 16 steps of one tick
up or down, so that σ is one point a bar. The open is the close before; high and low are the path's own, open included.
Drift comes from tilting the steps, p_up = ½(1 + drift / (K·tick)). A resting order meets the same paths that move the
close, so its adverse selection is honest. `fox_env.oracle` knows the law of such a bar exactly.

========================== ============================ =============================== =======================
kind                       states, drift a bar          chain                           ``planted_state`` reads
========================== ============================ =============================== =======================
``planted``                −1, 0, 1: −.15, 0, .15       stay .85, else one of the other the state
                                                        two alike
``martingale``             the same states, no drift    the same                        the state
``planted_noisy``          −1, 1: −.05, .05             stay 59/60 (60 bars on average) the state + N(0, 1)
========================== ============================ =============================== =======================

The state at close t drives bar t+1. ``distractor_chain`` is read like the state from an independent chain of the same
law, ``distractor_noise`` is N(0, 1), and ``distractor_slow`` its mean over 20 bars, scaled to N(0, 1).

``garch`` has volatility clustering (GARCH(1,1), Student t of 5 degrees), a volume and volatility smile over the day and
gaps over session breaks; its volatility is that of ES in a quiet year, 1 % a day.

`synthetic_ticks` and `synthetic_books` draw trades and MBP-10 books that make up these bars, `synthetic_contracts` cuts
them into a chain of quarterly contracts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fox_env.contracts import get_contract
from fox_env.data.bars import Bars, interval_ns
from fox_env.data.calendar import expiration_ns, sessions, trade_dates
from fox_env.data.rolls import Segment

if TYPE_CHECKING:
    from fox_env.data.features import Feature
    from fox_env.market import Market

KINDS = ("planted", "planted_noisy", "martingale", "garch")
PLANTED_STATE = "planted_state"
DISTRACTORS = ("distractor_chain", "distractor_noise", "distractor_slow")

STEPS = 16
START_DATE = "2023-01-02"
START_PRICE = 4_000.0

_TICK = get_contract("ES").tick
_LOWEST_PRICE = 1_000.0
_SLOW_BARS = 20
_CHUNK = 1 << 20
_MINUTE_NS = 60_000_000_000
_DAY_NS = 86_400_000_000_000
_FIVE_MINUTES_NS = 300_000_000_000

_GARCH_ALPHA, _GARCH_BETA, _STUDENT_DF = 0.06, 0.93, 5.0
_FIVE_MINUTE_SIGMA = 6e-4
_FIVE_MINUTE_VOLUME = 5_400.0
_GAP_SIGMA = 1.5e-3

_POINTS = STEPS + 1  # trades of a bar at most
_TICK_BARS = 1 << 12  # bars whose trades are drawn at a time
_TICK_1E9 = round(_TICK * 1e9)
_LEVELS = 10
_LEVEL_SIZES = 60

_ROLL_FROM_DAYS, _ROLL_DAYS = 10.0, 7.0  # days before expiry at which the volume begins to move, and how long it does
_FIRST_SHARE = 0.02


@dataclass(frozen=True)
class Truth:
    """What a lattice market hides: T bars, S states.

    Args:
        kind: one of `KINDS`.
        state: int8 [T], row of `transition`; the state at close t, which drives bar t+1.
        transition: float64 [S, S], rows sum to 1.
        drifts: expected points of the next bar in each state, S values.
        levels: the feature ``planted_state`` without noise in each state, S values.
        noise: standard deviation of the noise on that feature; 0 where it is exact.
        steps: K, steps of a bar's path.
        tick: points of a step.
    """

    kind: str
    state: np.ndarray
    transition: np.ndarray
    drifts: tuple[float, ...]
    levels: tuple[float, ...]
    noise: float
    steps: int
    tick: float

    @property
    def drift(self) -> np.ndarray:
        """Expected points of bar t+1 given the state at close t, float64 [T]."""
        return np.array(self.drifts)[self.state]

    def take(self, rows: slice | np.ndarray) -> Truth:
        """The truth of `rows`, a slice or an index or mask array."""
        return replace(self, state=self.state[rows])

    def to_dict(self) -> dict[str, np.ndarray]:
        """The fields as arrays, for saving; `from_dict` is the way back."""
        return {name: np.asarray(value) for name, value in self.__dict__.items()}

    @classmethod
    def from_dict(cls, arrays: Mapping[str, np.ndarray]) -> Truth:
        """A truth from what `to_dict` gave."""
        return cls(
            kind=str(arrays["kind"]),
            state=arrays["state"],
            transition=arrays["transition"],
            drifts=tuple(arrays["drifts"].tolist()),
            levels=tuple(arrays["levels"].tolist()),
            noise=float(arrays["noise"]),
            steps=int(arrays["steps"]),
            tick=float(arrays["tick"]),
        )


@dataclass(frozen=True)
class SyntheticBars:
    """Bars, and what they hide where that is known."""

    bars: Bars
    truth: Truth | None


def synthetic_bars(
    kind: str, bars: int = 70_000, seed: int = 0, *, interval: str = "5m", start: str = START_DATE
) -> SyntheticBars:
    """Draw synthetic bars; the same arguments give the same bars.

    Bars lie in the trading hours of the session calendar, whatever the interval, and prices on ES's tick. They start at
    4,000 points; a lattice path that would come below 1,000 is moved up as a whole.

    Args:
        kind: one of `KINDS`.
        bars: number of bars.
        seed: zero or positive.
        interval: length of a bar, one of `fox_env.data.bars.INTERVALS_NS`.
        start: ISO date, UTC; the first bar is the first in trading hours from then on.

    Raises:
        ValueError: an unknown kind or interval, fewer than one bar, a negative seed, or bars beyond the calendar.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown, expected one of {', '.join(KINDS)}")
    if bars < 1:
        raise ValueError(f"bars is {bars}, expected at least 1")
    if seed < 0:
        raise ValueError(f"seed is {seed}, expected zero or a positive number")
    length = interval_ns(interval)
    begin = _trading_starts(bars, length, start)
    streams = _streams(kind, seed)
    smile = _smile(begin)
    if kind == "garch":
        open_, high, low, close, activity = _garch_prices(begin, length, smile, streams.price)
        smile *= _FIVE_MINUTE_VOLUME * length / _FIVE_MINUTES_NS
        smile *= activity
        truth, extra = None, {}
    else:
        truth, before = _draw_truth(kind, bars, streams.state)
        open_, high, low, close = _lattice_prices(truth, before, streams.price)
        smile *= _FIVE_MINUTE_VOLUME * length / _FIVE_MINUTES_NS
        extra = _extra(truth, streams.extra)
    volume = smile  # its mean so far
    for rows in _chunks(bars):
        drawn = volume[rows]
        drawn *= np.exp(0.35 * streams.volume.standard_normal(len(drawn)))
        np.maximum(np.rint(drawn), 1.0, out=drawn)
    return SyntheticBars(
        Bars(start=begin, ts=begin + length, open=open_, high=high, low=low, close=close, volume=volume, extra=extra),
        truth,
    )


def synthetic_market(
    kind: str = "planted",
    bars: int = 70_000,
    seed: int = 0,
    *,
    interval: str = "5m",
    start: str = START_DATE,
    features: Sequence[str | Feature] | None = None,
    drop: Sequence[str] = (),
) -> Market:
    """A market of `synthetic_bars`, which takes the same arguments.

    ``planted_noisy`` is played with two contracts a price level unless the game is told otherwise.

    Args:
        kind, bars, seed, interval, start: as `synthetic_bars` takes them.
        features: features by name or `Feature`; None takes the ordinary ones, ``planted_state`` and the distractors.
        drop: names of features to leave out.

    Raises:
        ValueError: as `synthetic_bars`, an unknown feature, or too few bars for the features to warm up.
    """
    from fox_env.data.features import DEFAULT_FEATURES, ODD, Feature, select
    from fox_env.market import build_market

    made = synthetic_bars(kind, bars, seed, interval=interval, start=start)
    own = {
        name: Feature(name, ODD, 0, lambda x, name=name: x.bars.extra[name], needs=(name,)) for name in made.bars.extra
    }
    if features is None:
        chosen = [*select([made.bars], DEFAULT_FEATURES), *own.values()]
    else:
        chosen = [own.get(entry, entry) if isinstance(entry, str) else entry for entry in features]
    return build_market(
        [Segment("SYNTHETIC", made.bars, 0, 0.0)],
        "ES",
        interval_ns(interval),
        features=chosen,
        drop=drop,
        truth=made.truth,
        game={"depth_contracts": 2} if kind == "planted_noisy" else None,
        provenance={
            "source": "synthetic",
            "kind": kind,
            "bars": bars,
            "seed": seed,
            "interval": interval,
            "start": start,
        },
    )


class _Trades(NamedTuple):
    """Trades of some bars, arrays [N].

    UTC ns, UTC ns, ticks, contracts, whether the buyer is the aggressor, start of the bar's trading time in UTC ns.
    """

    ts_recv: np.ndarray
    ts_event: np.ndarray
    price: np.ndarray
    size: np.ndarray
    buy: np.ndarray
    since: np.ndarray


def synthetic_ticks(
    kind: str, bars: int = 70_000, seed: int = 0, *, interval: str = "5m", start: str = START_DATE
) -> Iterator[np.ndarray]:
    """Trades that make up the bars of `synthetic_bars`, which takes the same arguments.

    A bar's trades are its open and the K steps of its path; the path of a ``garch`` bar goes from the open to one
    extreme, the other and the close. A bar of fewer contracts than that has a trade a contract, always with the open,
    the high, the low and the close among them; where even these, at most four, are more than its contracts, it trades
    as many contracts as it needs: `traded_volume`. Bars made of the trades by ``ts_recv`` are otherwise equal to
    `synthetic_bars`. The aggressor buys on an up-tick and sells on a down-tick; at an unchanged price it is the one
    before (tick rule). Times are odd nanoseconds in trading hours, ``ts_event`` 80 to 300 µs before ``ts_recv``.

    Returns:
        An iterator of arrays of Databento's trades records, instrument id 0, some 70,000 at most at a time.

    Raises:
        ValueError: as `synthetic_bars`.
    """
    return _trade_records(_synthetic_trades(kind, bars, seed, interval, start))


def ticks_from_bars(bars: Bars, seed: int = 0) -> Iterator[np.ndarray]:
    """Trades that make up any bars on ES's tick, as `synthetic_ticks` draws them for ``garch``.

    Raises:
        ValueError: a price off the tick, when its bar is reached.
    """
    streams = _streams("garch", seed)
    return _trade_records(_bar_trades(bars, _drawn_paths(bars, streams.path), streams.ticks))


def synthetic_books(
    kind: str, bars: int = 70_000, seed: int = 0, *, interval: str = "5m", start: str = START_DATE
) -> Iterator[np.ndarray]:
    """MBP-10 books around the trades of `synthetic_ticks`, which takes the same arguments.

    Before a trade the book moves to it, one level a record: the best ask is cancelled and a bid added above the others,
    or the reverse, so that the spread is one tick, and two in between. Then contracts are added to the level to be
    traded where it has too few, else another level is modified; the trade shows the book before it, and a cancel takes
    its contracts away. A buyer pays the ask, a seller gets the bid; each level has at least one contract.

    Returns:
        An iterator of arrays of Databento's mbp-10 records, instrument id 0. Those of action ``T`` are the trades,
        their sequence numbers apart.

    Raises:
        ValueError: as `synthetic_bars`.
    """
    return _book_records(_synthetic_trades(kind, bars, seed, interval, start), _streams(kind, seed).books)


def books_from_bars(bars: Bars, seed: int = 0) -> Iterator[np.ndarray]:
    """MBP-10 books around the trades of `ticks_from_bars`, as `synthetic_books` draws them.

    Raises:
        ValueError: a price off the tick, when its bar is reached.
    """
    streams = _streams("garch", seed)
    return _book_records(_bar_trades(bars, _drawn_paths(bars, streams.path), streams.ticks), streams.books)


def traded_volume(bars: Bars) -> np.ndarray:
    """Contracts that the trades of T bars sum to, float64 [T].

    The volume, or one for each of the open, the close and the extremes beyond them where that is more.
    """
    outer, inner = np.maximum(bars.open, bars.close), np.minimum(bars.open, bars.close)
    points = 2.0 + (bars.high > outer) + (bars.low < inner)
    return np.maximum(bars.volume, np.where(bars.high == bars.low, 1.0, points))


def synthetic_contracts(
    bars: Bars, *, spread: float = 12.0, root: str = "ES", spreads: bool = False
) -> dict[str, Bars]:
    """Cut one series of bars into a chain of quarterly contracts with a constant calendar spread.

    At any time two contracts trade, the front, which is the next to expire, and the one after it. Its share of the
    volume rises from 2 % ten days before the front's expiry to 98 % three days before it; it is half at 6.5 days. Bars
    of which a contract trades nothing are absent.

    Args:
        bars: T bars, the prices those of the first contract.
        spread: points by which each contract is above the one before.
        root: root symbol.
        spreads: add the calendar spread of each pair, such as ``"ESH4-ESM4"``, which trades a twentieth of what its far
            contract does before the near one expires.

    Returns:
        Bars by name, such as ``"ESH24"``, in order of expiry, then the spreads. Volumes of the contracts sum to those
        of `bars`.
    """
    names, expiries = [], []
    year, month = int(np.datetime64(int(bars.start[0]), "ns").astype("datetime64[Y]").astype(int)) + 1970, 3
    while len(expiries) < 2 or expiries[-2] <= bars.start[-1]:
        expiry = expiration_ns(year, month)
        if expiry > bars.start[0]:
            names.append(f"{root}{'HMUZ'[month // 3 - 1]}{year % 100:02d}")
            expiries.append(expiry)
        year, month = (year, month + 3) if month < 12 else (year + 1, 3)
    front = np.searchsorted(expiries, bars.start, side="right")
    days_left = (np.array(expiries)[front] - bars.start) / _DAY_NS
    share = np.clip((_ROLL_FROM_DAYS - days_left) / _ROLL_DAYS, _FIRST_SHARE, 1.0 - _FIRST_SHARE)
    next_volume = np.floor(bars.volume * share)
    made, pairs = {}, {}
    for k, name in enumerate(names):
        is_next = front == k - 1
        volume = np.where(front == k, bars.volume - next_volume, np.where(is_next, next_volume, 0.0))
        made[name] = _shifted(bars, k * spread, volume)
        if spreads and k:
            pair = f"{names[k - 1][:-2]}{names[k - 1][-1]}-{name[:-2]}{name[-1]}"
            far = _shifted(bars, 0.0, np.where(is_next, np.floor(next_volume / 20.0), 0.0))
            price = np.full(len(far), spread)
            pairs[pair] = replace(far, open=price, high=price, low=price, close=price)
    return {name: own for name, own in (made | pairs).items() if len(own)}


class _Streams(NamedTuple):
    """One stream of random numbers a purpose, so that a further distractor changes no price."""

    price: np.random.Generator
    state: np.random.Generator
    extra: np.random.Generator
    volume: np.random.Generator
    path: np.random.Generator
    ticks: np.random.Generator
    books: np.random.Generator


def _streams(kind: str, seed: int) -> _Streams:
    children = np.random.SeedSequence([seed, KINDS.index(kind)]).spawn(len(_Streams._fields))
    return _Streams(*(np.random.Generator(np.random.Philox(child)) for child in children))


def _shifted(bars: Bars, points: float, volume: np.ndarray) -> Bars:
    """The bars that have volume, with that volume and moved by `points`."""
    prices = {name: getattr(bars, name) + points for name in ("open", "high", "low", "close")}
    return replace(bars, **prices, volume=volume).take(volume > 0)


def _synthetic_trades(kind: str, bars: int, seed: int, interval: str, start: str) -> Iterator[_Trades]:
    """The trades of `synthetic_bars`; the lattice kinds draw their paths again from the same stream."""
    made, streams = synthetic_bars(kind, bars, seed, interval=interval, start=start).bars, _streams(kind, seed)
    if kind == "garch":
        paths = _drawn_paths(made, streams.path)
    else:
        paths = _lattice_paths(*_draw_truth(kind, bars, streams.state), streams.price)
    return _bar_trades(made, paths, streams.ticks)


def _lattice_paths(truth: Truth, before: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """The paths of `_lattice_steps` as int32 [n, K + 1], the open included, `_TICK_BARS` rows at a time."""
    for _, steps in _lattice_steps(truth, before, rng):
        for first in range(0, steps.shape[1], _TICK_BARS):
            part = steps[:, first : first + _TICK_BARS]
            path = np.zeros((part.shape[1], _POINTS), np.int32)
            path[:, 1:] = part.T
            yield path


def _drawn_paths(bars: Bars, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Paths of K steps from the open to one extreme, the other and the close, int32 [n, K + 1] ticks from the open."""
    for rows in _tick_rows(len(bars)):
        open_, high, low, close = _ticks(bars, rows)
        n = len(open_)
        high_first = rng.random(n) < 0.5
        first = rng.integers(1, STEPS - 1, n)  # two different points strictly inside
        second = rng.integers(first + 1, STEPS)
        at = np.stack([np.zeros(n, np.int64), first, second, np.full(n, STEPS)])
        one, two = np.where(high_first, high, low), np.where(high_first, low, high)
        price = np.stack([np.zeros(n, np.int64), one - open_, two - open_, close - open_])
        path = np.zeros((n, _POINTS), np.int32)
        point = np.arange(_POINTS)
        for leg in range(3):
            begin, end = at[leg][:, None], at[leg + 1][:, None]
            share = (point - begin) / (end - begin)
            rise = np.rint(share * (price[leg + 1] - price[leg])[:, None]) + price[leg][:, None]
            path = np.where((point >= begin) & (point <= end), rise.astype(np.int32), path)
        yield path


def _bar_trades(bars: Bars, paths: Iterator[np.ndarray], rng: np.random.Generator) -> Iterator[_Trades]:
    """Trades of the bars along their paths."""
    fill = _compiled(_fill_trades)
    last = np.zeros(2, np.int64)  # price and side of the last trade
    for rows, path in zip(_tick_rows(len(bars)), paths, strict=True):
        n = len(path)
        part = bars.take(rows)
        open_, high, low, _ = _ticks(bars, rows)
        since, until = _trading_time(part.start, part.ts)
        volume, traded = part.volume.astype(np.int64), traded_volume(part).astype(np.int64)
        pick, weight = rng.random((2, n, _POINTS), dtype=np.float32)
        spacing = rng.random((n, _POINTS + 1), dtype=np.float32)
        ts, price, size = (np.empty(n * _POINTS, np.int64) for _ in range(3))
        buy, bar = np.empty(n * _POINTS, bool), np.empty(n * _POINTS, np.int64)
        if rows.start == 0:
            last[:] = open_[0], 1
        count = fill(
            path, open_, high - open_, low - open_, volume, traded, since, until, pick, weight, spacing, last,
            ts, price, size, buy, bar,
        )  # fmt: skip
        ts = ts[:count]
        delay = rng.integers(80_000, 300_000, count)
        yield _Trades(ts, ts - delay, price[:count], size[:count], buy[:count], since[bar[:count]])


def _fill_trades(
    path, open_, high, low, volume, traded, since, until, pick, weight, spacing, last, ts, price, size, buy, bar
):
    """The trades of n bars into the last five arrays, [17 n]; their number. Compiled by numba."""
    count = 0
    points = path.shape[1]
    chosen = np.empty(points, np.bool_)
    for i in range(len(path)):
        chosen[:] = False
        trades = min(max(volume[i], 1), points)
        chosen[0] = True
        keys = 1
        if trades > 1 or high[i] > low[i]:
            chosen[points - 1] = True
            keys += 1
            move = path[i, points - 1]
            above, below = high[i] > max(0, move), low[i] < min(0, move)
            for j in range(1, points - 1):
                if (above and path[i, j] == high[i]) or (below and path[i, j] == low[i]):
                    chosen[j] = True
                    keys += 1
                    above = above and path[i, j] != high[i]
                    below = below and path[i, j] != low[i]
        trades = max(trades, keys)
        left, free = trades - keys, points - keys
        for j in range(points):
            if not chosen[j]:
                if pick[i, j] * free < left:
                    chosen[j] = True
                    left -= 1
                free -= 1
        # Gaps of at least a twentieth of the mean largest one keep the trades apart and off the edges.
        total_gap, total_weight = 0.0, 0.0
        for j in range(trades + 1):
            total_gap += 0.05 + spacing[i, j]
        for j in range(trades):
            total_weight += 0.02 + weight[i, j]
        gap, share, dealt, k = 0.0, 0.0, 0, 0
        extra = traded[i] - trades  # contracts beyond one a trade
        for j in range(points):
            if not chosen[j]:
                continue
            gap += 0.05 + spacing[i, k]
            share += 0.02 + weight[i, k]
            k += 1
            until_now = extra if k == trades else int(extra * (share / total_weight))
            now = open_[i] + path[i, j]
            if now != last[0]:
                last[1] = now > last[0]
            last[0] = now
            ts[count] = (since[i] + int((until[i] - since[i]) * (gap / total_gap))) | 1
            price[count] = now
            size[count] = 1 + until_now - dealt
            buy[count] = last[1]
            bar[count] = i
            dealt = until_now
            count += 1
    return count


def _trade_records(trades: Iterator[_Trades]) -> Iterator[np.ndarray]:
    from fox_env.data.dbn_write import new_records

    sequence = 0
    for part in trades:
        records = new_records("trades", len(part.size))
        _fill_message(records, part.ts_recv, part.ts_event, sequence)
        records["price"] = part.price * _TICK_1E9
        records["size"] = part.size
        records["action"] = b"T"
        records["side"] = np.where(part.buy, b"B", b"A")
        sequence += len(records)
        yield records


def _fill_message(records: np.ndarray, ts_recv: np.ndarray, ts_event: np.ndarray, sequence: int) -> None:
    records["ts_recv"] = ts_recv
    records["ts_event"] = ts_event
    records["ts_in_delta"] = 15_000
    records["sequence"] = (sequence + np.arange(1, len(records) + 1)) % (1 << 32)


def _book_records(trades: Iterator[_Trades], rng: np.random.Generator) -> Iterator[np.ndarray]:
    from fox_env.data.dbn_write import LAST_OF_EVENT, book_levels, new_records

    fill = _compiled(_fill_books)
    book = rng.integers(1, _LEVEL_SIZES + 1, (2, _LEVELS))  # sizes of bids and asks, the best first
    last = np.zeros(2, np.int64)  # best bid in ticks, the ask being one above it; time
    sequence = 0
    level = np.arange(_LEVELS)
    for part in trades:
        if not sequence:
            last[:] = part.price[0] - part.buy[0], part.since[0]
        # Every trade comes with a change before it and one after, and the book moves in two changes a tick.
        bid = np.concatenate(([last[0]], part.price - part.buy))
        count = 3 * len(part.size) + 2 * int(np.abs(np.diff(bid)).sum())
        noise = rng.integers(0, 1 << 31, count, dtype=np.int64)
        best = np.empty((count, 2), np.int64)
        sizes = np.empty((count, 2, _LEVELS), np.uint32)
        ts, event, price, size = (np.empty(count, np.int64) for _ in range(4))
        action, side, depth = (np.empty(count, np.uint8) for _ in range(3))
        fill(*part, noise, book, last, best, sizes, ts, event, price, size, action, side, depth)
        records = new_records("mbp-10", count)
        _fill_message(records, ts, event, sequence)
        records["price"] = price * _TICK_1E9
        records["size"] = size
        records["action"], records["side"] = action.view("S1"), side.view("S1")
        records["depth"] = depth
        records["flags"] = np.where(action == ord("T"), 0, LAST_OF_EVENT)
        levels = book_levels(records)
        for k, (own, away) in enumerate((("bid", -1), ("ask", 1))):
            levels[f"{own}_px"] = (best[:, k, None] + away * level) * _TICK_1E9
            levels[f"{own}_sz"] = sizes[:, k]
            levels[f"{own}_ct"] = 1 + sizes[:, k] * 2 // 3
        sequence += count
        yield records


def _fill_books(
    trade_ts, trade_event, trade_price, trade_size, trade_buy, since, noise, book, last,
    best, sizes, ts, event, price, size, action, side, depth,
):  # fmt: skip
    """The events around N trades into the arrays from `best` on; `book` and `last` go on. Compiled by numba."""
    bid_side, ask_side = ord("B"), ord("A")
    add, cancel, modify, trade = ord("A"), ord("C"), ord("M"), ord("T")
    n, up = 0, False
    bid, ask, clock = last[0], last[0] + 1, last[1]
    levels = book.shape[1]
    for i in range(len(trade_ts)):
        target = trade_price[i] - 1 if trade_buy[i] else trade_price[i]
        begin = max(clock, since[i])
        steps = 2 * abs(target - bid) + 1
        for j in range(steps):
            draw = 1 + noise[n] % _LEVEL_SIZES
            if j == steps - 1:
                own = 1 if trade_buy[i] else 0
                if book[own, 0] <= trade_size[i]:
                    action[n], depth[n], size[n] = add, 0, trade_size[i] + draw
                    book[own, 0] += size[n]
                else:
                    own = (noise[n] >> 20) & 1
                    action[n], depth[n], size[n] = modify, 1 + (noise[n] >> 21) % (levels - 1), draw
                    book[own, depth[n]] = draw
                price[n] = ask + depth[n] if own else bid - depth[n]
            else:
                # The side that gives way first loses its best level, then the other gains one.
                if j % 2 == 0:
                    up = target > bid
                    own = 1 if up else 0
                    action[n], depth[n], size[n] = cancel, 0, book[own, 0]
                    price[n] = ask if own else bid
                    for k in range(levels - 1):
                        book[own, k] = book[own, k + 1]
                    book[own, levels - 1] = draw
                    if own:
                        ask += 1
                    else:
                        bid -= 1
                else:
                    own = 0 if up else 1
                    action[n], depth[n], size[n] = add, 0, draw
                    for k in range(levels - 1, 0, -1):
                        book[own, k] = book[own, k - 1]
                    book[own, 0] = draw
                    if own:
                        ask -= 1
                        price[n] = ask
                    else:
                        bid += 1
                        price[n] = bid
            ts[n] = (begin + (trade_ts[i] - begin) * (j + 1) // (steps + 1)) | 1
            event[n] = ts[n] - 80_000 - noise[n] % 200_000
            side[n] = ask_side if own else bid_side
            best[n, 0], best[n, 1] = bid, ask
            sizes[n] = book
            n += 1
        own = 1 if trade_buy[i] else 0
        for after in range(2):
            action[n] = cancel if after else trade
            side[n] = ask_side if (own == 1) == (after == 1) else bid_side
            depth[n], size[n], price[n] = 0, trade_size[i], trade_price[i]
            ts[n] = (trade_ts[i] + after * (2_000 + noise[n] % 8_000)) | 1
            event[n] = trade_event[i]
            if after:
                book[own, 0] -= trade_size[i]
                clock = ts[n]
            best[n, 0], best[n, 1] = bid, ask
            sizes[n] = book
            n += 1
    last[0], last[1] = bid, clock


def _ticks(bars: Bars, rows: slice) -> tuple[np.ndarray, ...]:
    """Open, high, low, close in whole ticks, int64 [n] each."""
    made = []
    for name in ("open", "high", "low", "close"):
        points = getattr(bars, name)[rows]
        ticks = np.rint(points / _TICK)
        if (off := ticks * _TICK != points).any():
            raise ValueError(f"{name} is {points[off][0]}, expected a multiple of {_TICK}")
        made.append(ticks.astype(np.int64))
    return tuple(made)


def _trading_time(start: np.ndarray, ts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The part of each bar that lies in its first trading period, int64 [n] from and until; all of a closed bar."""
    dates = trade_dates(int(start[0]) - 7 * _DAY_NS, int(ts[-1]) + 7 * _DAY_NS)
    opens = np.stack([dates.open, dates.halt_end], axis=1).ravel()
    closes = np.stack([dates.halt_start, dates.close], axis=1).ravel()
    period = np.searchsorted(closes, start, side="right")
    since, until = np.maximum(start, opens[period]), np.minimum(ts, closes[period])
    inside = since < until
    return np.where(inside, since, start), np.where(inside, until, ts)


def _tick_rows(bars: int) -> Iterator[slice]:
    """The rows whose trades are drawn at a time; they meet at the seams of `_chunks`."""
    for rows in _chunks(bars):
        stop = min(rows.stop, bars)
        for first in range(rows.start, stop, _TICK_BARS):
            yield slice(first, min(first + _TICK_BARS, stop))


@lru_cache
def _compiled(function: Callable) -> Callable:
    import numba

    return numba.njit(cache=True)(function)


def _trading_starts(bars: int, length: int, start: str) -> np.ndarray:
    """Starts of the first bars in trading hours from that date on, int64 [bars]."""
    try:
        first = int(np.datetime64(start, "ns").astype(np.int64))
    except ValueError:
        raise ValueError(f"start is {start!r}, expected an ISO date such as {START_DATE!r}") from None
    first = -(-first // length) * length
    found, missing = [], bars
    while missing:
        # No more than are missing, not to run into the calendar's end; but enough to get over a closed weekend.
        candidates = first + length * np.arange(min(max(missing, 5 * _DAY_NS // length), _CHUNK), dtype=np.int64)
        inside = candidates[sessions(candidates, candidates + length).is_open][:missing]
        found.append(inside)
        missing -= len(inside)
        first = int(candidates[-1]) + length
    return np.concatenate(found)


def _smile(start: np.ndarray) -> np.ndarray:
    """Relative activity of a bar by time of day, float64 [T], mean near 1: a quiet night, a U over 08:30 to 15:00."""
    opens = trade_dates(int(start[0]), int(start[-1]) + 1).open
    smile = np.empty(len(start))
    for rows in _chunks(len(start)):
        opened = opens[np.maximum(np.searchsorted(opens, start[rows], side="right") - 1, 0)]
        minute = (start[rows] - opened) / _MINUTE_NS  # since 17:00 in Chicago
        day_share = (minute - 930.0) / 390.0  # 0 at 08:30, 1 at 15:00
        in_day = (day_share >= 0.0) & (day_share < 1.0)
        smile[rows] = np.where(in_day, 1.7 + 12.0 * (day_share - 0.5) ** 2, 0.3)
    return smile


def _draw_truth(kind: str, bars: int, rng: np.random.Generator) -> tuple[Truth, int]:
    """The hidden chain, and the state that drives bar 0."""
    if kind == "planted_noisy":
        stay, drifts, levels, noise = 1.0 - 1.0 / 60.0, (-0.05, 0.05), (-1.0, 1.0), 1.0
    else:
        stay, levels, noise = 0.85, (-1.0, 0.0, 1.0), 0.0
        drifts = (-0.15, 0.0, 0.15) if kind == "planted" else (0.0, 0.0, 0.0)
    states = len(levels)
    transition = np.full((states, states), (1.0 - stay) / (states - 1))
    np.fill_diagonal(transition, stay)
    chain = _chain(bars + 1, states, stay, rng)
    return Truth(kind, chain[1:], transition, drifts, levels, noise, STEPS, _TICK), int(chain[0])


def _chain(length: int, states: int, stay: float, rng: np.random.Generator) -> np.ndarray:
    """A stationary chain that stays with probability `stay`, else moves to any other state alike, int8 [length]."""
    moves = np.empty(length, bool)
    for rows in _chunks(length):
        moves[rows] = rng.random(len(moves[rows])) >= stay
    chain = np.where(moves, rng.integers(1, states, length, dtype=np.int8), np.int8(0))
    chain[0] = rng.integers(states)
    last = 0
    for rows in _chunks(length):
        chain[rows] = (last + np.cumsum(chain[rows], dtype=np.int64)) % states
        last = int(chain[rows][-1])
    return chain


def _lattice_steps(truth: Truth, before: int, rng: np.random.Generator) -> Iterator[tuple[slice, np.ndarray]]:
    """Chunks of rows and their paths: int8 [K, rows], ticks from the open after each step."""
    reach = truth.steps * truth.tick
    tilt = (0.5 * (1.0 + np.array(truth.drifts) / reach)).astype(np.float32)
    driver = np.concatenate(([np.int8(before)], truth.state[:-1]))
    for rows in _chunks(len(driver)):
        p_up = tilt[driver[rows]]
        up = rng.random((truth.steps, len(p_up)), dtype=np.float32) < p_up
        steps = up.view(np.int8)
        steps += steps
        steps -= np.int8(1)
        yield rows, np.cumsum(steps, axis=0, dtype=np.int8, out=steps)


def _lattice_prices(truth: Truth, before: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Open, high, low, close in points, float64 [T] each."""
    bars = len(truth.state)
    move, above, below = (np.empty(bars, np.int8) for _ in range(3))
    for rows, path in _lattice_steps(truth, before, rng):
        move[rows] = path[-1]
        above[rows] = np.maximum(path.max(axis=0), 0)
        below[rows] = np.minimum(path.min(axis=0), 0)
    # Whole ticks are integers, so sums are exact.
    close = np.cumsum(move, dtype=np.int64)
    lowest = min(int((close[rows] - move[rows] + below[rows]).min()) for rows in _chunks(bars))
    base = max(round(START_PRICE / truth.tick), round(_LOWEST_PRICE / truth.tick) - lowest)
    prices = np.empty((4, bars))
    for rows in _chunks(bars):
        open_ = base + close[rows] - move[rows]
        for price, ticks in zip(
            prices, (open_, open_ + above[rows], open_ + below[rows], base + close[rows]), strict=True
        ):
            np.multiply(ticks, truth.tick, out=price[rows])
    return tuple(prices)


def _extra(truth: Truth, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The feature that reads the state, and the distractors, float64 [T] each."""
    bars, levels = len(truth.state), np.array(truth.levels)
    decoy = _chain(bars, len(levels), float(truth.transition[0, 0]), rng)
    columns = {PLANTED_STATE: levels[truth.state], DISTRACTORS[0]: levels[decoy]}
    if truth.noise:
        columns = {name: value + truth.noise * rng.standard_normal(bars) for name, value in columns.items()}
    noise = rng.standard_normal(bars + _SLOW_BARS - 1)
    total = np.concatenate(([0.0], np.cumsum(noise)))
    slow = total[_SLOW_BARS:] - total[:-_SLOW_BARS]
    slow /= np.sqrt(_SLOW_BARS)
    return columns | {DISTRACTORS[1]: noise[_SLOW_BARS - 1 :], DISTRACTORS[2]: slow}


def _garch_prices(
    start: np.ndarray, length: int, smile: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Open, high, low, close in points and relative activity, float64 [T] each."""
    bars = len(start)
    shock = rng.standard_t(_STUDENT_DF, bars)
    shock *= np.sqrt((_STUDENT_DF - 2.0) / _STUDENT_DF)
    sigma = _garch_sigma(shock)
    gaps = rng.standard_normal(bars)
    open_, high, low, close = prices = np.empty((4, bars))

    def scale(rows: slice) -> np.ndarray:
        return _FIVE_MINUTE_SIGMA * np.sqrt(length / _FIVE_MINUTES_NS) * sigma[rows] * np.sqrt(smile[rows])

    level = 0.0
    for rows in _chunks(bars):
        gap = np.where(_after_break(start, rows, length), _GAP_SIGMA * sigma[rows] * gaps[rows], 0.0)
        if rows.start == 0:
            gap[0] = 0.0
        returns = scale(rows) * shock[rows]
        path = np.cumsum(np.concatenate(([level], gap + returns)))[1:]
        level = path[-1]
        log_close = np.log(START_PRICE) + path
        jitter = rng.choice(np.array([-1.0, 0.0, 1.0]), len(path), p=(0.15, 0.7, 0.15))
        close[rows] = np.maximum(np.rint(np.exp(log_close) / _TICK), 1.0)
        open_[rows] = np.maximum(np.rint(np.exp(log_close - returns) / _TICK) + jitter, 1.0)
    del gaps
    # Extremes of a Brownian bridge from open to close; high and low are drawn apart, which ES-likeness does not miss.
    for extreme, sign, outer in ((high, 1.0, np.maximum), (low, -1.0, np.minimum)):
        for rows in _chunks(bars):
            move, spread = close[rows] - open_[rows], 2.0 * (scale(rows) * close[rows]) ** 2
            reach = sign * np.sqrt(move**2 + spread * -np.log1p(-rng.random(len(move))))
            bound = outer(open_[rows], close[rows])
            extreme[rows] = np.maximum(outer(np.rint(open_[rows] + 0.5 * (move + reach)), bound), 1.0)
    prices *= _TICK
    activity = np.abs(shock, out=shock)
    activity *= 0.5
    activity += 0.5
    activity *= sigma
    return open_, high, low, close, activity


def _after_break(start: np.ndarray, rows: slice, length: int) -> np.ndarray:
    """Whether a session break or a halt lies before each of the rows; the very first row is True."""
    first = max(rows.start - 1, 0)
    own = start[first : rows.stop]
    return sessions(own, own + length).after_break[rows.start - first :]


def _garch_sigma(shock: np.ndarray) -> np.ndarray:
    """Volatility of a GARCH(1,1) of unit mean variance, float64 [T]."""
    variance = np.empty(len(shock))
    value = 1.0
    for rows in _chunks(len(shock)):
        path = []
        for squared in np.square(shock[rows]).tolist():
            path.append(value)
            value = 1.0 - _GARCH_ALPHA - _GARCH_BETA + value * (_GARCH_BETA + _GARCH_ALPHA * squared)
        variance[rows] = path
    return np.sqrt(variance)


def _chunks(length: int) -> Iterator[slice]:
    """Slices that bound the memory of temporary arrays."""
    return (slice(first, first + _CHUNK) for first in range(0, length, _CHUNK))
