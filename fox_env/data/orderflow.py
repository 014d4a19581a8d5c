"""Order flow of one contract from its order book: what arrives and leaves at the best levels during each bar.

The flow of an event, the change from one book to the next, at one level with bid price P, bid size q and ask price A,
ask size r is (Cont, Kukanov & Stoikov 2014, "The price impact of order book events", eq. 3)

    e = q·1{P ≥ P'} − q'·1{P ≤ P'} − r·1{A ≤ A'} + r'·1{A ≥ A'}

with primes for the book before: the inequalities are not strict, so that at an unchanged price e is the change in size.
The order-flow imbalance (OFI) of a bar is the sum of e over its events. Over several levels Fox sums e over the levels
of the same number (Xu, Gould & Howison 2019, arXiv:1907.06230).

Rules:

- The time of a record is its ``ts_recv``. One earlier than a record before it, or without a time, counts as received
  with that record: nothing is ever moved to an earlier bar.
- A record belongs to the bar with start <= time < ts. One in a gap between two bars of the same trading period belongs
  to the later bar, so that a bar's OFI is that since the close of the bar before. All others (before the first bar,
  after the last, between two periods) are left out.
- A side of a level is there if it has a price and a size above zero. After a clear (action R) nothing is there.
- A book is masked if its best level lacks a side or both, if its bid is above its ask, or if Databento flags that it
  may be bad (``F_MAYBE_BAD_BOOK``). A masked book is no event, and the next good one only seeds: no difference is ever
  taken across a masked book, nor across two trading periods.
- A deeper level that lacks a side, before or after, has e = 0. A side that is not there has size 0.
- The action plays no further part: e comes from the books that the records show, trades among them.
"""

from __future__ import annotations

import functools

import numpy as np

DEPTHS = (1, 5, 10)
"""Numbers of levels, from the best on, that the columns are made for."""

_UNDEFINED_PRICE = np.iinfo(np.int64).max
_PRICE_UNIT = 1_000_000_000
_MAYBE_BAD_BOOK = 1 << 2
_CLEAR = ord("R")

# Rows of the counts; all before the last add up to the records.
_OUTSIDE, _EMPTY, _ONE_SIDED, _CROSSED, _MAYBE_BAD, _SEED, _EVENT, _UNORDERED = range(8)
_AT_CLOSE = ("bid", "ask", "bid_size", "ask_size", "microprice_offset", "spread_ticks")


class BookFlow:
    """Sums the records of one contract's book into its bars, in memory that grows with the bars alone.

    Args:
        start, ts: int64 [T], UTC nanoseconds, start and end of the bars, in time order, none overlapping another.
        period: int [T], number of the trading period (what lies between two breaks or halts) of each bar.
        levels: levels of the book to read: 1, 5 or 10.
        tick: smallest price change, in points.

    Raises:
        ValueError: arrays of different lengths, bars that overlap or go back in time, another number of levels, or a
            tick that is no positive number.
    """

    def __init__(self, start: np.ndarray, ts: np.ndarray, period: np.ndarray, *, levels: int, tick: float) -> None:
        self._start, self._ts, self._period = (np.ascontiguousarray(a, np.int64) for a in (start, ts, period))
        if not len(self._start) == len(self._ts) == len(self._period):
            raise ValueError(
                f"start, ts and period have {len(self._start)}, {len(self._ts)} and {len(self._period)} rows, expected "
                "as many of each"
            )
        wrong = self._start > self._ts
        wrong[1:] |= self._start[1:] < self._ts[:-1]
        if wrong.any():
            raise ValueError(
                f"bar {int(np.argmax(wrong))} ends before it starts, or starts before the bar in front of it ends, "
                "expected bars in time order"
            )
        if levels not in DEPTHS:
            raise ValueError(f"levels is {levels}, expected one of {', '.join(map(str, DEPTHS))}")
        self._tick = round(tick * _PRICE_UNIT) if np.isfinite(tick) else 0
        if self._tick <= 0:
            raise ValueError(f"tick is {tick}, expected a positive number of points")
        self._levels = levels
        self._depths = np.array([depth for depth in DEPTHS if depth <= levels], np.int64)
        self._names = (
            *_AT_CLOSE,
            *(f"{name}_{depth}" for name in ("ofi", "depth", "imbalance") for depth in self._depths),
        )
        # Of the current bar and the book before: bar, time, whether there is a book to take a difference from, whether
        # the period has had a good book, good records of the bar; prices and sizes [bid or ask, level]; the bar's sums.
        self._state = np.zeros(5, np.int64)
        self._price, self._size = np.zeros((2, 2, levels), np.int64)
        self._flow, self._total = np.zeros((2, len(self._depths)), np.int64)
        self._counts = np.zeros(8, np.int64)
        self._columns = np.full((len(self._names), len(self._ts)), np.nan)

    @property
    def counts(self) -> dict[str, int]:
        """Records so far, by what became of them.

        ``book_records`` are all; they are ``book_outside_bars`` (in no bar's trading period), ``book_empty``,
        ``book_one_sided``, ``book_crossed`` and ``book_maybe_bad`` (masked, the first that applies), ``book_seeds``
        (good, without a book before to take a difference from) and ``book_events`` (good, with one). Apart from that,
        ``book_unordered`` are those with a time earlier than one before them, or with none.
        """
        counts = [int(count) for count in self._counts]
        return {
            "book_records": sum(counts[:_UNORDERED]),
            "book_outside_bars": counts[_OUTSIDE],
            "book_empty": counts[_EMPTY],
            "book_one_sided": counts[_ONE_SIDED],
            "book_crossed": counts[_CROSSED],
            "book_maybe_bad": counts[_MAYBE_BAD],
            "book_seeds": counts[_SEED],
            "book_events": counts[_EVENT],
            "book_unordered": counts[_UNORDERED],
        }

    def add(self, records: np.ndarray) -> None:
        """Read the next records; how the stream is cut into calls changes no bit of the result.

        Args:
            records: structured [N] as `databento` makes them, of one instrument and of a schema with a book (mbp-10,
                mbp-1, tbbo, bbo-1s, bbo-1m), in time order.

        Raises:
            ValueError: the records have no book of as many levels.
        """
        names = records.dtype.names or ()
        needed = ("ts_recv", "flags", f"bid_px_{self._levels - 1:02d}")
        for name in needed:
            if name not in names:
                raise ValueError(
                    f"the records have no field {name!r}, expected records with a book of {self._levels} levels"
                )
        if not records["ts_recv"].flags.aligned:  # compiled code takes it for granted
            records = records.copy()
        action = records["action"].view(np.uint8) if "action" in names else np.zeros(len(records), np.uint8)
        levels = [self._levels_of(records, side) for side in ("bid_px", "ask_px", "bid_sz", "ask_sz")]
        self._advance(records["ts_recv"].view(np.int64), records["flags"], action, *levels, until=0)

    def finish(self) -> dict[str, np.ndarray]:
        """Close the bars that are still open; nothing can be added then. The order flow of every bar, float64 [T].

        ``bid``, ``ask`` (points), ``bid_size``, ``ask_size`` (contracts): the best quotes at the close, i.e. of the
        last record before ``ts`` in the same trading period. ``microprice_offset``: points by which the mean of bid and
        ask, each weighted by the other's size, lies above the mid. ``spread_ticks``: ask − bid. And for the first
        n = 1, 5, 10 levels that are read: ``imbalance_n``, (bid sizes − ask sizes) / (bid sizes + ask sizes). All of
        these are NaN where that record is masked or there is none.

        ``ofi_n``: sum of e over the bar's events and the first n levels, contracts; NaN where the period has had no
        good book by the close. ``depth_n``: mean size of a side of a level over the bar's good records, contracts; NaN
        without one.
        """
        nothing = np.zeros(0, np.uint8)
        no_level = np.zeros((0, self._levels), np.int64)
        no_size = np.zeros((0, self._levels), np.uint32)
        until = np.iinfo(np.int64).max
        self._advance(np.zeros(0, np.int64), nothing, nothing, no_level, no_level, no_size, no_size, until=until)
        return dict(zip(self._names, self._columns, strict=True))

    def _levels_of(self, records: np.ndarray, side: str) -> np.ndarray:
        """The field of every level, [N, levels], without a copy: the levels lie at equal distances in a record."""
        offsets = [records.dtype.fields[f"{side}_{level:02d}"][1] for level in range(self._levels)]
        step = offsets[-1] - offsets[-2] if self._levels > 1 else 0
        return np.lib.stride_tricks.as_strided(
            records[f"{side}_00"], (len(records), self._levels), (records.strides[0], step), writeable=False
        )

    def _advance(self, *fields: np.ndarray, until: int) -> None:
        _kernel()(
            *fields, until, self._start, self._ts, self._period, self._depths, self._tick, self._state, self._price,
            self._size, self._flow, self._total, self._counts, self._columns,
        )  # fmt: skip


def _accumulate(
    time, flags, action, bid_px, ask_px, bid_sz, ask_sz, until, start, ts, period, depths, tick, state, price, size,
    flow, total, counts, columns,
):  # fmt: skip
    """Read the records, then close the bars that end by `until`. Sums are of integers, so that no bit is ever lost."""
    bar, now, chained, seen, held = state
    for record in range(len(time) + 1):
        if record == len(time):
            now = max(now, until)
        elif time[record] < now:
            counts[_UNORDERED] += 1
        else:
            now = time[record]

        while bar < len(ts) and ts[bar] <= now:
            if chained:
                spread, top = price[1, 0] - price[0, 0], size[0, 0] + size[1, 0]
                for side in range(2):
                    columns[side, bar] = price[side, 0] / _PRICE_UNIT
                    columns[2 + side, bar] = size[side, 0]
                columns[4, bar] = spread / (2 * _PRICE_UNIT) * ((size[0, 0] - size[1, 0]) / top)
                columns[5, bar] = spread / tick
            bids = asks = np.int64(0)
            begin = np.int64(0)
            for row in range(len(depths)):
                if seen:
                    columns[6 + row, bar] = flow[row]
                if held:
                    columns[6 + len(depths) + row, bar] = total[row] / (2 * depths[row] * held)
                for level in range(begin, depths[row]):
                    bids += size[0, level]
                    asks += size[1, level]
                begin = depths[row]
                if chained:
                    columns[6 + 2 * len(depths) + row, bar] = (bids - asks) / (bids + asks)
            flow[:] = 0
            total[:] = 0
            held = 0
            bar += 1
            if bar < len(ts) and period[bar] != period[bar - 1]:
                chained = seen = 0

        if record == len(time):
            break
        if bar == len(ts) or (now < start[bar] and (bar == 0 or period[bar] != period[bar - 1])):
            counts[_OUTSIDE] += 1
            continue
        cleared = action[record] == _CLEAR
        has_bid = not cleared and 0 < bid_px[record, 0] < _UNDEFINED_PRICE and bid_sz[record, 0] > 0
        has_ask = not cleared and 0 < ask_px[record, 0] < _UNDEFINED_PRICE and ask_sz[record, 0] > 0
        if not (has_bid and has_ask):
            counts[_ONE_SIDED if has_bid or has_ask else _EMPTY] += 1
            chained = 0
            continue
        if bid_px[record, 0] > ask_px[record, 0]:
            counts[_CROSSED] += 1
            chained = 0
            continue
        if flags[record] & _MAYBE_BAD_BOOK:
            counts[_MAYBE_BAD] += 1
            chained = 0
            continue
        counts[_EVENT if chained else _SEED] += 1
        e = q = np.int64(0)
        row = 0
        for level in range(price.shape[1]):
            bid, ask = bid_px[record, level], ask_px[record, level]
            bids, asks = np.int64(bid_sz[record, level]), np.int64(ask_sz[record, level])
            if not 0 < bid < _UNDEFINED_PRICE:
                bids = 0
            if not 0 < ask < _UNDEFINED_PRICE:
                asks = 0
            old_bid, old_ask, old_bids, old_asks = price[0, level], price[1, level], size[0, level], size[1, level]
            if chained and bids > 0 and asks > 0 and old_bids > 0 and old_asks > 0:
                if bid >= old_bid:
                    e += bids
                if bid <= old_bid:
                    e -= old_bids
                if ask <= old_ask:
                    e -= asks
                if ask >= old_ask:
                    e += old_asks
            price[0, level], price[1, level], size[0, level], size[1, level] = bid, ask, bids, asks
            q += bids + asks
            if level + 1 == depths[row]:
                flow[row] += e
                total[row] += q
                row += 1
        chained = seen = 1
        held += 1
    state[:] = bar, now, chained, seen, held


@functools.cache
def _kernel():
    import numba
    from numba.types import Array, float64, int64, uint8, uint32, void

    def read_only(kind, dimensions: int):
        return Array(kind, dimensions, "A", readonly=True)

    # Given and not inferred: whether a piece of a stream is contiguous or writable must not mean another compilation.
    signature = void(
        read_only(int64, 1), read_only(uint8, 1), read_only(uint8, 1),
        read_only(int64, 2), read_only(int64, 2), read_only(uint32, 2), read_only(uint32, 2),
        int64, int64[::1], int64[::1], int64[::1], int64[::1], int64,
        int64[::1], int64[:, ::1], int64[:, ::1], int64[::1], int64[::1], int64[::1], float64[:, ::1],
    )  # fmt: skip
    return numba.njit(signature, cache=True, nogil=True, error_model="numpy")(_accumulate)
