"""Bars of one contract, as arrays, and the intervals that Fox knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

INTERVALS_NS = {
    "1s": 1_000_000_000,
    "1m": 60_000_000_000,
    "5m": 300_000_000_000,
    "1h": 3_600_000_000_000,
    "1d": 86_400_000_000_000,
}


def interval_ns(interval: str) -> int:
    """Length of a bar in nanoseconds.

    Raises:
        ValueError: an interval that Fox does not know.
    """
    if interval not in INTERVALS_NS:
        raise ValueError(f"bars {interval!r} is unknown, expected one of {', '.join(INTERVALS_NS)}")
    return INTERVALS_NS[interval]


def bar_size(bars: str) -> tuple[int, int]:
    """Length in nanoseconds of time bars and size in contracts of volume bars (``"vol:1000"``), one of them 0.

    Raises:
        ValueError: neither.
    """
    if bars.startswith("vol:"):
        contracts = bars.removeprefix("vol:")
        if not (contracts.isascii() and contracts.isdigit() and 0 < int(contracts) < 2**53):
            raise ValueError(f"bars is {bars!r}, expected a number of contracts after 'vol:', such as 'vol:1000'")
        return 0, int(contracts)
    if bars not in INTERVALS_NS:
        raise ValueError(f"bars {bars!r} is unknown, expected one of {', '.join(INTERVALS_NS)} or vol:N")
    return INTERVALS_NS[bars], 0


@dataclass(frozen=True)
class Bars:
    """Bars of one contract in time order.

    `start` and `ts` are int64 [T] UTC nanoseconds: the bar holds trades of [start, ts) and is known from `ts` on.
    Prices are float64 [T] in index points. `bid`, `ask` (points) and `bid_size`, `ask_size` (contracts) are the quotes
    at the close, NaN where there was none, or None where the source has no quotes. `extra` holds further float64 [T]
    columns by name, for features that read them.
    """

    start: np.ndarray
    ts: np.ndarray
    open: np.ndarray
    high: np.ndarray
    low: np.ndarray
    close: np.ndarray
    volume: np.ndarray
    bid: np.ndarray | None = None
    ask: np.ndarray | None = None
    bid_size: np.ndarray | None = None
    ask_size: np.ndarray | None = None
    extra: dict[str, np.ndarray] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ts)

    def take(self, rows: slice | np.ndarray) -> Bars:
        """The bars of `rows`, a slice or an index or mask array."""
        columns = {name: value[rows] for name, value in self.__dict__.items() if isinstance(value, np.ndarray)}
        return replace(self, **columns, extra={name: value[rows] for name, value in self.extra.items()})


@dataclass(frozen=True)
class Chunk:
    """Rows of one contract as one file holds them, in the file's order, nothing repaired.

    Args:
        contract: the contract's name, such as ``"ESH20"``.
        bars: its bars; prices and volumes may be NaN.
        row: int64 [T], number of each row in the file, the first data row being 1.
        file: name of the file.
    """

    contract: str
    bars: Bars
    row: np.ndarray
    file: str


def concatenate(parts: Sequence[Bars]) -> Bars:
    """The rows of `parts`, which have the same columns, one after the other."""
    first = parts[0]
    if len(parts) == 1:
        return first
    columns = {
        name: np.concatenate([getattr(part, name) for part in parts])
        for name, value in first.__dict__.items()
        if isinstance(value, np.ndarray)
    }
    extra = {name: np.concatenate([part.extra[name] for part in parts]) for name in first.extra}
    return replace(first, **columns, extra=extra)


def resample(bars: Bars, start: np.ndarray, ts: np.ndarray) -> Bars:
    """Bars joined into longer ones.

    Args:
        bars: T bars in time order.
        start, ts: int64 [T], UTC nanoseconds, start and end of the longer bar to which each bar belongs, ascending.

    Returns:
        One bar for each distinct `start`: first open, highest high, lowest low, last close and last quotes; volume and
        the extra columns, which count trades or contracts, are summed.
    """
    if not len(bars):
        return bars
    first = np.flatnonzero(np.diff(start, prepend=start[0] - 1))
    last = np.append(first[1:], len(start)) - 1
    quotes = {name: getattr(bars, name) for name in ("bid", "ask", "bid_size", "ask_size")}
    return Bars(
        start=start[first],
        ts=ts[first],
        open=bars.open[first],
        high=np.maximum.reduceat(bars.high, first),
        low=np.minimum.reduceat(bars.low, first),
        close=bars.close[last],
        volume=np.add.reduceat(bars.volume, first),
        **{name: None if column is None else column[last] for name, column in quotes.items()},
        extra={name: np.add.reduceat(column, first) for name, column in bars.extra.items()},
    )
