"""Bars made of trades, and trades counted into bars; every function reads a stream once, in pieces of any size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numba
import numpy as np

from fox_env.data.bars import Bars
from fox_env.data.calendar import FIRST_YEAR, LAST_YEAR, sessions, trading_periods
from fox_env.data.dbn import PRICE_SCALE, UNDEF_PRICE

_TRADE, _BUYER, _SELLER = ord("T"), ord("B"), ord("A")

# Columns of a bar under way and of a finished one, all int64; prices in 1e-9 points.
_START, _END, _OPEN, _HIGH, _LOW, _CLOSE, _VOLUME, _BOUGHT, _SOLD = range(9)
_COLUMNS = 9
# What is carried on beside it: whether there is one, the trading period of the last trade, the time of the last trade.
_UNDER_WAY, _PERIOD, _LAST = range(9, 12)
_STATE = 12

_COUNTS = ("bad_price", "zero_size", "bad_time", "unsorted", "closed_hours", "off_tick", "read")
_BAD_PRICE, _ZERO_SIZE, _BAD_TIME, _UNSORTED, _CLOSED_HOURS, _OFF_TICK, _READ = range(7)
_options = {"cache": True, "nogil": True, "error_model": "numpy"}


class TradeBars:
    """The bars of one contract's trades.

    Time bars start at multiples of their length since 1970 UTC. A volume bar ends with the trade that brings it to the
    number of contracts, which stays in it whole, or with its trading period: none spans a session break or a halt. It
    starts with its first trade, or, where bars share an instant, with the end of the bar before.
    Trades without a price, size or time and those in closed hours are left out; a price off the tick is rounded to it;
    a trade that is out of time order counts as made at the latest time seen.

    Args:
        interval: length of time bars in nanoseconds, 0 for volume bars.
        contracts: size of volume bars.
        tick: smallest price change in points, None to leave prices as they are.
        hours: see `calendar.sessions`.
    """

    def __init__(self, *, interval: int = 0, contracts: int = 0, tick: float | None = None, hours: str = "all") -> None:
        self._interval, self._contracts = interval, contracts
        self._tick = 0 if tick is None else round(tick * PRICE_SCALE)
        self._hours = hours
        self._open, self._close = trading_periods(hours=hours)
        self._state = np.zeros(_STATE, np.int64)
        self._counts = np.zeros(len(_COUNTS), np.int64)
        self._made: list[np.ndarray] = []

    @property
    def last(self) -> int:
        """Time of the last trade, UTC nanoseconds, 0 before any."""
        return int(self._state[_LAST])

    @property
    def counts(self) -> Counter[str]:
        """Trades read and left out or changed, by reason."""
        return Counter(dict(zip(_COUNTS, self._counts.tolist(), strict=True)))

    def add(self, records: np.ndarray) -> None:
        """Go on with further records of any schema that holds trades, in time order.

        Raises:
            ValueError: a trade outside the session calendar.
        """
        if not len(records):
            return
        out = np.empty((len(records) + 1, _COLUMNS), np.int64)
        made = _trade_bars(
            records["ts_recv"].view(np.int64), records["price"], records["size"], _bytes(records["side"]),
            _bytes(records["action"]), self._interval, self._contracts, self._tick, self._open, self._close,
            self._state, self._counts, out,
        )  # fmt: skip
        if made < 0:
            day = np.datetime64(self.last, "ns").astype("datetime64[D]")
            raise ValueError(f"a trade on {day} lies outside the session calendar, {FIRST_YEAR} to {LAST_YEAR}")
        if made:
            self._made.append(out[:made].copy())

    def finish(self, end: int) -> tuple[Bars, bool]:
        """The bars, and whether an unfinished last one was left out.

        Args:
            end: where the data end, UTC nanoseconds: a bar that would go on beyond is unfinished.
        """
        state = self._state
        unfinished = False
        if state[_UNDER_WAY]:
            bar = state[:_COLUMNS].copy()
            if self._interval:
                bar[_END] = bar[_START] + self._interval
                over = (
                    bar[_END] <= end
                    or not sessions(np.array([end]), bar[_END : _END + 1], hours=self._hours).is_open[0]
                )
            else:
                over = self._close[state[_PERIOD]] <= end
            unfinished = not over
            if over:
                self._made.append(bar[None])
        rows = np.concatenate(self._made) if self._made else np.zeros((0, _COLUMNS), np.int64)
        prices = {
            name: rows[:, column] / PRICE_SCALE
            for name, column in (("open", _OPEN), ("high", _HIGH), ("low", _LOW), ("close", _CLOSE))
        }
        floats = {column: rows[:, column].astype(np.float64) for column in (_VOLUME, _BOUGHT, _SOLD)}
        return Bars(
            start=rows[:, _START].copy(), ts=rows[:, _END].copy(), volume=floats[_VOLUME], **prices,
            extra={"ask_volume": floats[_BOUGHT], "bid_volume": floats[_SOLD]},
        ), unfinished  # fmt: skip


class TradeFlow:
    """The aggressors' volumes of one contract's trades, in given bars.

    Args:
        start, ts: int64 [T], UTC nanoseconds, bars in time order.
    """

    def __init__(self, start: np.ndarray, ts: np.ndarray) -> None:
        self._start, self._ts = np.ascontiguousarray(start), np.ascontiguousarray(ts)
        self._volume = np.zeros((3, len(ts)), np.int64)
        # Bar, trades outside the bars, time of the last trade, trades, those that are out of time order.
        self._state = np.zeros(5, np.int64)
        self._span = (np.iinfo(np.int64).max, 0)

    @property
    def last(self) -> int:
        """Time of the last trade, UTC nanoseconds, 0 before any."""
        return int(self._state[2])

    @property
    def outside(self) -> int:
        """Trades that lie in no bar."""
        return int(self._state[1])

    @property
    def read(self) -> int:
        """Trades read."""
        return int(self._state[3])

    @property
    def unsorted(self) -> int:
        """Trades out of time order; each counts as made at the latest time seen."""
        return int(self._state[4])

    def add(self, records: np.ndarray) -> None:
        """Go on with further records of any schema that holds trades, in time order."""
        if not len(records):
            return
        time = records["ts_recv"].view(np.int64)
        self._span = (min(self._span[0], int(time[0])), max(self._span[1], int(time[-1])))
        _trade_flow(
            time, records["price"], records["size"], _bytes(records["side"]), _bytes(records["action"]),
            self._start, self._ts, self._volume, self._state,
        )  # fmt: skip

    def finish(self) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """``ask_volume`` and ``bid_volume`` (contracts bought and sold by the aggressor), float64 [T], NaN outside the
        time that the trades cover; and the volume of all trades alike."""
        covered = (self._ts > self._span[0]) & (self._start <= self._span[1])
        total, bought, sold = np.where(covered, self._volume, np.nan)
        return {"ask_volume": bought, "bid_volume": sold}, total


def group(identifiers: np.ndarray) -> Iterator[tuple[int, slice | np.ndarray]]:
    """Each instrument id with the rows that have it, in order; one alone has all of them."""
    if not len(identifiers):
        return
    found = _distinct(identifiers)
    if len(found) == 1:
        yield int(found[0]), slice(None)
        return
    for identifier in found:
        yield int(identifier), np.flatnonzero(identifiers == identifier)


def record_offsets(data: np.ndarray) -> tuple[np.ndarray, int]:
    """Where each whole DBN record begins in bytes that begin with one.

    Returns:
        int64 offsets, and the number of bytes that whole records take, −1 if a record is shorter than a header.
    """
    offset = np.empty(len(data) // 16 + 1, np.int64)
    count, used = _walk(data, offset)
    return offset[:count], used


def _bytes(column: np.ndarray) -> np.ndarray:
    return column.view(np.uint8)


@numba.njit(**_options)
def _walk(data, offset):
    at, count = 0, 0
    while at + 16 <= len(data):
        length = 4 * data[at]
        if length < 16:
            return count, -1
        if at + length > len(data):
            break
        offset[count] = at
        count += 1
        at += length
    return count, at


@numba.njit(**_options)
def _distinct(identifiers):
    found = [identifiers[0]]
    latest = identifiers[0]
    for value in identifiers:
        if value != latest:
            latest = value
            known = False
            for other in found:
                known = known or other == value
            if not known:
                found.append(value)
    return found


@numba.njit(**_options)
def _trade_bars(time, price, size, side, action, interval, contracts, tick, opens, closes, state, counts, out):
    """Finished bars into `out`; returns their number, −1 where a trade lies outside the calendar."""
    made = 0
    last = state[_LAST]
    period = state[_PERIOD]
    for i in range(len(time)):
        if action[i] != _TRADE:
            continue
        counts[_READ] += 1
        at, paid, lots = time[i], price[i], np.int64(size[i])
        if paid == UNDEF_PRICE or paid <= 0:
            counts[_BAD_PRICE] += 1
            continue
        if lots == 0:
            counts[_ZERO_SIZE] += 1
            continue
        if at <= 0:
            counts[_BAD_TIME] += 1
            continue
        if at < last:
            counts[_UNSORTED] += 1
            at = last
        last = at
        if at < opens[0] or at >= closes[-1]:
            state[_LAST] = last
            return -1
        if closes[period] <= at:
            if closes[min(period + 1, len(closes) - 1)] > at:
                period += 1
            else:
                period = np.searchsorted(closes, at, side="right")
        if at < opens[period]:
            counts[_CLOSED_HOURS] += 1
            continue
        if tick:
            off = paid % tick
            if off:
                counts[_OFF_TICK] += 1
                paid += tick - off if 2 * off >= tick else -off
        start = at - at % interval if interval else at
        if state[_UNDER_WAY] and (start != state[_START] if interval else period != state[_PERIOD]):
            out[made] = state[:_COLUMNS]
            if interval:
                out[made, _END] = state[_START] + interval
            made += 1
            state[_UNDER_WAY] = 0
        state[_PERIOD] = period
        if not state[_UNDER_WAY]:
            state[_UNDER_WAY] = 1
            # The state still holds the end of the bar before.
            state[_START] = start if interval else max(start, state[_END])
            state[_OPEN], state[_HIGH], state[_LOW] = paid, paid, paid
            state[_VOLUME], state[_BOUGHT], state[_SOLD] = 0, 0, 0
        state[_HIGH] = max(state[_HIGH], paid)
        state[_LOW] = min(state[_LOW], paid)
        state[_CLOSE] = paid
        state[_END] = at + 1
        state[_VOLUME] += lots
        if side[i] == _BUYER:
            state[_BOUGHT] += lots
        elif side[i] == _SELLER:
            state[_SOLD] += lots
        if not interval and state[_VOLUME] >= contracts:
            out[made] = state[:_COLUMNS]
            made += 1
            state[_UNDER_WAY] = 0
    state[_LAST] = last
    return made


@numba.njit(**_options)
def _trade_flow(time, price, size, side, action, start, ts, volume, state):
    bar, last = state[0], state[2]
    for i in range(len(time)):
        if action[i] != _TRADE or price[i] == UNDEF_PRICE or price[i] <= 0:
            continue
        state[3] += 1
        if time[i] < last:
            state[4] += 1
        at = max(time[i], last)
        last = at
        while bar < len(ts) and ts[bar] <= at:
            bar += 1
        if bar == len(ts) or at < start[bar]:
            state[1] += 1
            continue
        lots = np.int64(size[i])
        volume[0, bar] += lots
        if side[i] == _BUYER:
            volume[1, bar] += lots
        elif side[i] == _SELLER:
            volume[2, bar] += lots
    state[0], state[2] = bar, last
