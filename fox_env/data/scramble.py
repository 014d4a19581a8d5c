"""What a market is built of, with its future replaced: whatever then changes in the past has read it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from fox_env import dynamics
from fox_env.data.bars import Bars
from fox_env.data.rolls import Segment
from fox_env.market import Market

if TYPE_CHECKING:
    import pandas as pd

PRICES = ("open", "high", "low", "close")
COLUMNS = (*PRICES, "volume", "bid", "ask", "bid_size", "ask_size")


class FrameRows:
    """The rows of a DataFrame. Each is known when as much time has passed since its start as `length` says.

    Args:
        frame: UTC index of the rows' starts.
        length: nanoseconds; None takes the time between the nearest two rows.

    Raises:
        ValueError: the index is not UTC, or holds fewer than two times.
    """

    def __init__(self, frame: pd.DataFrame, length: int | None = None) -> None:
        if str(getattr(frame.index, "tz", None)) != "UTC":
            zone = getattr(frame.index, "tz", None)
            raise ValueError(f"the frame's index has time zone {zone}, expected UTC starts of its rows")
        self.frame, self.start = frame, frame.index.as_unit("ns").asi8
        if length is None:
            steps = np.diff(np.unique(self.start))
            if not len(steps):
                raise ValueError("the frame's index holds fewer than two times, expected a row for each bar")
            length = int(steps.min())
        self.length, self.known = length, self.start + length

    @property
    def raw(self) -> pd.DataFrame:
        """A copy, since whoever builds of it may add columns."""
        return self.frame.copy()

    def rows(self, after: float, until: float) -> FrameRows:
        """The rows that became known in (after, until], nanoseconds."""
        return FrameRows(self.frame[(self.known > after) & (self.known <= until)], self.length)

    def scrambled(self, cut: int, rng: np.random.Generator) -> pd.DataFrame:
        """The frame with other numbers in the rows that are known after `cut`; `instrument_id` stays."""
        frame, later = self.raw, self.known > cut
        columns = {
            name: frame[name].to_numpy()[later]
            for name in frame.columns
            if frame[name].dtype.kind in "biuf" and name != "instrument_id"
        }
        for name, values in _scramble(columns, rng).items():
            column = frame[name].to_numpy(values.dtype, copy=True)
            column[later] = values
            frame[name] = column
        return frame

    def bars(self) -> dict[str, np.ndarray] | None:
        """Columns start, ts, high, low, close of the rows in time order; None if the frame has no such prices."""
        names = _by_meaning(self.frame.columns)
        if not all(name in names for name in PRICES[1:]):
            return None
        order = np.argsort(self.start, kind="stable")
        prices = {name: self.frame[names[name]].to_numpy(np.float64)[order] for name in PRICES[1:]}
        return {"start": self.start[order], "ts": self.known[order], **prices}


class ChainRows:
    """The bars of a chain of contracts, each known at its `ts`."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self.raw = list(segments)

    def rows(self, after: float, until: float) -> ChainRows:
        """The bars that became known in (after, until], nanoseconds."""
        kept = []
        for segment in self.raw:
            begin, stop = np.searchsorted(segment.bars.ts, [after, until], side="right").tolist()
            first = max(segment.first - begin, 0)
            if first < stop - begin:
                kept.append(replace(segment, bars=segment.bars.take(slice(begin, stop)), first=first))
        return ChainRows(kept)

    def scrambled(self, cut: int, rng: np.random.Generator) -> list[Segment]:
        """The chain with other numbers in the bars that are known after `cut`."""
        return [replace(s, bars=_scrambled_bars(s.bars, s.bars.ts > cut, rng)) for s in self.raw]

    def bars(self) -> dict[str, np.ndarray]:
        """Columns start, ts, high, low, close of the front bars in time order."""
        fronts = [segment.bars.take(slice(segment.first, None)) for segment in self.raw]
        names = ("start", "ts", *PRICES[1:])
        return {name: np.concatenate([getattr(bars, name) for bars in fronts]) for name in names}


def as_rows(data: object) -> FrameRows | ChainRows:
    """A DataFrame or segments as rows.

    Raises:
        TypeError: something else.
        ValueError: as `FrameRows`.
    """
    if hasattr(data, "columns") and hasattr(data, "index"):
        return FrameRows(data)
    if isinstance(data, Sequence) and data and all(isinstance(segment, Segment) for segment in data):
        return ChainRows(data)
    raise TypeError(f"data is of type {type(data).__name__}, expected a DataFrame, a list of Segments or a Market")


def scrambled_market(market: Market, row: int, rng: np.random.Generator) -> Market:
    """The market with all but the times and the rolls of the bars after `row` replaced; steps lead where they led."""
    later = np.arange(len(market)) > row
    count = int(later.sum())
    drawn = {
        "features": rng.normal(0.0, 3.0, (count, market.features.shape[1])),
        "volatility": rng.uniform(0.5, 50.0, count),
        "fraction_left": rng.random(count),
        "after_break": rng.random(count) < 0.5,
        "session_last": rng.random(count) < 0.5,
        "lock": rng.integers(-1, 2, count),
        "gap": np.where(market.roll[later] == dynamics.MEASURED, rng.normal(0.0, 50.0, count), 0.0),
    }
    full = {name: getattr(market, name).copy() for name in drawn}
    for name, values in drawn.items():
        full[name][later] = values
    return replace(market, bars=_scrambled_bars(market.bars, later, rng), **full)


def _scrambled_bars(bars: Bars, later: np.ndarray, rng: np.random.Generator) -> Bars:
    columns = {name: getattr(bars, name) for name in COLUMNS if getattr(bars, name) is not None}
    full = {name: column.copy() for name, column in (columns | bars.extra).items()}
    if later.any():
        for name, values in _scramble({name: column[later] for name, column in full.items()}, rng).items():
            full[name][later] = values
    return replace(bars, **{name: full[name] for name in columns}, extra={name: full[name] for name in bars.extra})


def _scramble(columns: Mapping[str, np.ndarray], rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Other values of every column: prices as bars can have them, the rest shuffled and scaled, flags inverted."""
    made: dict[str, np.ndarray] = {}
    names = _by_meaning(columns)
    if all(name in names for name in PRICES):
        close = np.asarray(columns[names["close"]], np.float64)
        level = np.nanmedian(close) if np.isfinite(close).any() else 1.0
        drawn = level * rng.uniform(0.5, 1.5, (4, len(close)))
        spread = 1e-3 * level * rng.random((2, len(close)))
        values = dict(zip(PRICES, (drawn[0], drawn.max(0), drawn.min(0), drawn[1]), strict=True))
        values |= {"bid": drawn[1] - spread[0], "ask": drawn[1] + spread[1]}
        made = {names[name]: value for name, value in values.items() if name in names}
    for name, column in columns.items():
        if name not in made:
            flags = column.dtype.kind == "b"
            scaled = None if flags else rng.permutation(np.asarray(column, np.float64))
            made[name] = ~column if flags else scaled * rng.uniform(0.5, 3.0, len(column))
    return made


def _by_meaning(columns: Iterable[object]) -> dict[str, object]:
    return {str(name).strip().lower(): name for name in columns}
