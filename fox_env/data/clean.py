"""Repairing the bars of one contract: every rule that `load.load_segments` states for rows is applied here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from fox_env.data.bars import Bars, Chunk, concatenate
from fox_env.data.calendar import sessions

IMPOSSIBLE_STEP = 0.01
"""Share of the price by which a bar may open away from the close of the bar before it, where no more than
`IMPOSSIBLE_STEP_NS` lies between them. Real 5-minute bars of 2014-2021 reach 0.0064 and 1-minute bars of 2025 0.003."""

IMPOSSIBLE_STEP_NS = 1_000_000_000

IMPOSSIBLE_DAY = 0.20
"""Share by which a price may lie away from the close before it: the price limit of a whole day."""

REFUSED_SHARE = 0.01
"""Share of bars above which impossible returns, contradicting, overlapping or misaligned bars are no slips but a
corrupt series; and share of trades or book records out of time order."""

REFUSED_LEAST = 5  # so that a single slip does not condemn a short file
_DAY_NS = 86_400_000_000_000
_PRICES = ("open", "high", "low", "close")


@dataclass(frozen=True)
class _Origin:
    """Where rows come from: [T] indices of chunks and row numbers."""

    files: Sequence[str]
    file: np.ndarray
    row: np.ndarray

    def take(self, rows: np.ndarray) -> _Origin:
        return _Origin(self.files, self.file[rows], self.row[rows])

    def note(self, quality: dict[str, int | str], key: str, rows: np.ndarray, start: np.ndarray) -> None:
        """Count `rows`, a mask, under `key`, and describe the first of them if it is the first of its kind."""
        count = int(np.count_nonzero(rows))
        quality[key] = int(quality.get(key, 0)) + count
        if count and f"{key}_first" not in quality:
            k = int(np.argmax(rows))
            when = np.datetime_as_string(np.datetime64(int(start[k]), "ns"), unit="s")
            quality[f"{key}_first"] = f"in row {self.row[k]} of {self.files[self.file[k]]} ({when} UTC)"


def clean(chunks: list[Chunk], *, tick: float | None, hours: str, target: int, quality: dict[str, int | str]) -> Bars:
    """One contract's bars, repaired and ready to be joined into bars of `target` nanoseconds.

    Args:
        chunks: the contract's rows in the files' order; the list is emptied, since both may not fit in memory.
        tick: smallest price change in points, None to leave prices as they are.
        hours: see `calendar.sessions`.
        quality: counts are added.
    """
    bars = concatenate([chunk.bars for chunk in chunks])
    origin = _Origin(
        [chunk.file for chunk in chunks],
        np.repeat(np.arange(len(chunks), dtype=np.int32), [len(chunk.row) for chunk in chunks]),
        np.concatenate([chunk.row for chunk in chunks]),
    )
    running = [np.maximum.accumulate(chunk.bars.start) > chunk.bars.start for chunk in chunks]
    chunks.clear()
    origin.note(quality, "rows_unsorted", np.concatenate(running), bars.start)

    def drop(key: str, bad: np.ndarray) -> None:
        nonlocal bars, origin
        origin.note(quality, key, bad, bars.start)
        if bad.any():
            bars, origin = bars.take(~bad), origin.take(~bad)

    prices = [getattr(bars, name) for name in _PRICES]
    drop("rows_bad_price", ~np.logical_and.reduce([np.isfinite(price) & (price > 0) for price in prices]))
    columns = {name: getattr(bars, name) for name in _PRICES}
    if tick is not None:
        on_tick = {name: np.round(price / tick) * tick for name, price in columns.items()}
        off = np.logical_or.reduce([np.abs(on_tick[name] - columns[name]) > 1e-6 * tick for name in _PRICES])
        origin.note(quality, "rows_off_tick", off, bars.start)
        columns = on_tick
    highest, lowest = np.maximum.reduce(list(columns.values())), np.minimum.reduce(list(columns.values()))
    wrong = (columns["high"] < highest) | (columns["low"] > lowest)
    origin.note(quality, "rows_range_widened", wrong, bars.start)
    columns |= {"high": highest, "low": lowest}
    missing = ~(bars.volume >= 0) | np.isinf(bars.volume)
    origin.note(quality, "rows_without_volume", missing, bars.start)
    origin.note(quality, "rows_zero_volume", bars.volume == 0, bars.start)
    bars = Bars(bars.start, bars.ts, **columns, volume=np.where(missing, 0.0, bars.volume), extra=bars.extra)

    if np.any(np.diff(bars.start) < 0):
        order = np.argsort(bars.start, kind="stable")
        bars, origin = bars.take(order), origin.take(order)
    repeats = np.zeros(len(bars), bool)
    repeats[1:] = bars.start[1:] == bars.start[:-1]
    same = repeats.copy()
    for name in (*_PRICES, "volume"):
        column = getattr(bars, name)
        same[1:] &= column[1:] == column[:-1]
    origin.note(quality, "rows_duplicate", same, bars.start)
    origin.note(quality, "rows_conflicting", repeats & ~same, bars.start)
    if repeats.any():
        bars, origin = bars.take(~repeats), origin.take(~repeats)
    drop("rows_overlapping", _overlapping(bars))
    drop("rows_closed_hours", ~sessions(bars.start, bars.ts, hours=hours).is_open)
    joined = (bars.ts - bars.start < target) & (target < _DAY_NS)
    drop("rows_misaligned", joined & (bars.start // target != (bars.ts - 1) // target))
    origin.note(quality, "impossible_returns", _impossible(bars), bars.start)
    return bars


def check_returns(name: str, bars: Bars, quality: dict[str, int | str]) -> None:
    """Count the returns that no market can have, of bars that were made of a contract's trades."""
    rows = np.arange(1, len(bars) + 1)
    origin = _Origin([f"the bars of {name}"], np.zeros(len(bars), np.int32), rows)
    origin.note(quality, "impossible_returns", _impossible(bars), bars.start)


def refuse_corrupt(where: str, total: int, bars: str | None, quality: Mapping[str, int | str]) -> None:
    """Refuse a series with more than `REFUSED_SHARE` of faulty bars.

    Args:
        where: the files, in words.
        total: number of bars.
        bars: what was asked for.

    Raises:
        ValueError: with the first such row.
    """
    step = f"{IMPOSSIBLE_STEP:.0%} between a close and the next open"
    for key, what in (
        ("impossible_returns", f"have impossible returns (over {step})"),
        ("rows_conflicting", "contradict an earlier one of the same time, as those of several contracts would"),
        ("rows_overlapping", "start before the one before has ended"),
        ("rows_misaligned", f"reach over the end of the {bars} bar that they start in"),
    ):  # fmt: skip
        count = int(quality.get(key, 0))
        if count > max(REFUSED_SHARE * total, REFUSED_LEAST):
            raise ValueError(f"{where} is corrupt: {count} of {total} bars {what}, the first {quality[f'{key}_first']}")


def _overlapping(bars: Bars) -> np.ndarray:
    """Bars that start before the last bar that is none of these has ended."""
    found = np.zeros(len(bars), bool)
    kept = 0
    for row in np.flatnonzero(bars.start[1:] < bars.ts[:-1]) + 1:
        if not found[row - 1]:
            kept = row - 1
        found[row] = bars.start[row] < bars.ts[kept]
    return found


def _impossible(bars: Bars) -> np.ndarray:
    """Bars that no market can have after the bar before them."""
    found = np.zeros(len(bars), bool)
    if len(bars) > 1:
        before = bars.close[:-1]
        wait = bars.start[1:] - bars.ts[:-1]
        step = np.abs(bars.open[1:] / before - 1) > IMPOSSIBLE_STEP
        day = np.maximum(bars.high[1:] / before - 1, 1 - bars.low[1:] / before) > IMPOSSIBLE_DAY
        found[1:] = ((wait <= IMPOSSIBLE_STEP_NS) & step) | ((wait < 4 * _DAY_NS) & day)
    return found
