"""Order flow beside bars: trades and books, of whichever files, summed into the bars of a chain of contracts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from fox_env.contracts import Contract
from fox_env.data import clean, dbn, rolls
from fox_env.data.bars import INTERVALS_NS, Bars
from fox_env.data.calendar import sessions, trading_periods
from fox_env.data.dbn import DbnFile
from fox_env.data.rolls import Segment


def forward(
    files: Sequence[DbnFile], schema: str, name: dbn.Naming, counts: Counter[str], seen: Counter[str]
) -> Iterator[dbn.Piece]:
    """Pieces of each contract, without what an earlier file had in time already (counted as ``overlapping``)."""
    latest: dict[str, int] = {}
    floor: dict[str, int] = {}
    current: dict[str, DbnFile] = {}
    counts["overlapping"] += 0
    for piece in dbn.pieces(files, (schema,), name, counts, seen):
        if current.get(piece.name) is not piece.file:
            current[piece.name] = piece.file
            floor[piece.name] = latest.get(piece.name, -1)
        if int(piece.time.min()) <= floor[piece.name]:
            later = piece.time > floor[piece.name]
            counts["overlapping"] += int(np.count_nonzero(~later))
            piece = replace(piece, records=piece.records[later], time=piece.time[later], row=piece.row[later])
        if len(piece.records):
            latest[piece.name] = max(latest.get(piece.name, -1), int(piece.time.max()))
            yield piece


def refuse_unsorted(path: object, what: str, read: int, unsorted: int) -> None:
    if unsorted > max(clean.REFUSED_SHARE * read, clean.REFUSED_LEAST):
        raise ValueError(f"{path} is corrupt: {unsorted} of {read} {what} are out of time order")


def _by_instrument(segments: Sequence[Segment], makers: Sequence[object]) -> dict[str, list[object]]:
    """A contract may be the front several times in a continuous series."""
    found: dict[str, list[object]] = {}
    for segment, maker in zip(segments, makers, strict=True):
        found.setdefault(segment.instrument, []).append(maker)
    return found


def add_trades(
    segments: list[Segment], files: Sequence[DbnFile], schema: str, identity: dbn.Intervals,
    quality: dict[str, int | str],
) -> tuple[list[Segment], int]:  # fmt: skip
    """The segments with the aggressors' volumes, in the sessions that have trades, and how many front bars are not."""
    from fox_env.data.ticks import TradeFlow

    flows = [TradeFlow(segment.bars.start, segment.bars.ts) for segment in segments]
    makers = _by_instrument(segments, flows)
    counts, seen = Counter(read=0, spreads=0, other_symbols=0, unmapped=0), Counter()
    for piece in forward(files, schema, dbn.named_as(makers, identity), counts, seen):
        for flow in makers[piece.name]:
            flow.add(piece.records)
    counts["outside_bars"] = sum(flow.outside for flow in flows)
    counts["unsorted"] = sum(own[0].unsorted for own in makers.values())
    dbn.add_counts(quality, "trades", counts)
    refuse_unsorted(
        dbn.where([file.path for file in files]), "trades", sum(own[0].read for own in makers.values()),
        counts["unsorted"],
    )  # fmt: skip
    joined, covered = [], []
    differs = 0
    for segment, flow in zip(segments, flows, strict=True):
        columns, total = flow.finish()
        missing = (total == 0) & (segment.bars.volume > 0)  # a hole in the trades, not a bar without any
        for column in columns.values():
            column[missing] = np.nan
        joined.append(replace(segment, bars=replace(segment.bars, extra=segment.bars.extra | columns)))
        differs += int(np.count_nonzero((total > 0) & (total != segment.bars.volume)))
        covered.append(total > 0)
    quality["bars_volume_differs"] = differs
    return _keep_sessions(joined, covered)


def add_books(
    segments: list[Segment], files: Sequence[DbnFile], schema: str, identity: dbn.Intervals,
    contract: Contract | None, hours: str, quality: dict[str, int | str],
) -> tuple[list[Segment], int]:  # fmt: skip
    """The segments with order flow and quotes, in the sessions that have books, and how many front bars are not."""
    from fox_env.data.orderflow import BookFlow

    opens, _ = trading_periods(hours=hours)
    flows = [
        BookFlow(
            segment.bars.start, segment.bars.ts, np.searchsorted(opens, segment.bars.ts, side="left") - 1,
            levels=10 if schema == "mbp-10" else 1, tick=contract.tick if contract else np.nan,
        )
        for segment in segments
    ]  # fmt: skip
    makers = _by_instrument(segments, flows)
    counts, seen = Counter(read=0, spreads=0, other_symbols=0, unmapped=0), Counter()
    for piece in forward(files, schema, dbn.named_as(makers, identity), counts, seen):
        records = piece.records
        if schema.startswith("bbo"):
            records = records.copy()
            records["ts_recv"] = piece.time
        for flow in makers[piece.name]:
            flow.add(records)
    dbn.add_counts(quality, "book", counts)
    for flow in flows:
        for key, count in flow.counts.items():
            quality[key] = int(quality.get(key, 0)) + count
    refuse_unsorted(
        dbn.where([file.path for file in files]), "books", int(quality["book_records"]), int(quality["book_unordered"])
    )
    joined, covered = [], []
    stale_bars = 0
    for segment, flow in zip(segments, flows, strict=True):
        columns = flow.finish()
        stale = _stale(segment.bars, columns, schema)
        stale_bars += int(np.count_nonzero(stale[segment.first :]))
        for column in columns.values():
            column[stale] = np.nan
        quotes = {name: columns.pop(name) for name in ("bid", "ask", "bid_size", "ask_size")}
        if schema not in ("mbp-1", "mbp-10"):
            # Samples of the book do not show what happened between them.
            columns = {name: c for name, c in columns.items() if not name.startswith(("ofi_", "depth_"))}
        joined.append(replace(segment, bars=replace(segment.bars, **quotes, extra=segment.bars.extra | columns)))
        covered.append(np.isfinite(quotes["bid"]))
    quality["bars_book_stale"] = stale_bars
    return _keep_sessions(joined, covered)


def _stale(bars: Bars, columns: dict[str, np.ndarray], schema: str) -> np.ndarray:
    """Bars, bool [T], with quotes of an earlier bar, since no record came: the books have a hole there, or have ended.

    A sample of the book holds until the next is due.
    """
    length = INTERVALS_NS[schema.removeprefix("bbo-")] if schema.startswith("bbo") else 0
    silent = np.isnan(columns["depth_1"])
    latest = np.maximum.accumulate(np.where(silent, 0, bars.ts))
    # Volume bars may share an instant, and so its records.
    return silent & np.isfinite(columns["bid"]) & (bars.ts - latest > length)


def _keep_sessions(segments: Sequence[Segment], covered: Sequence[np.ndarray]) -> tuple[list[Segment], int]:
    """The bars of the sessions in which some bar is covered, and the number of front bars of the others."""
    kept: list[Segment] = []
    lost = 0
    for segment, known in zip(segments, covered, strict=True):
        session = sessions(segment.bars.start, segment.bars.ts).session
        keep = np.isin(session, session[known])
        lost += int(np.count_nonzero(~keep[segment.first :]))
        if keep[segment.first :].any():
            bars = segment.bars if keep.all() else segment.bars.take(keep)
            first = int(np.count_nonzero(keep[: segment.first]))
            gap = rolls.measure_gap(kept[-1].bars, bars) if kept and np.isfinite(segment.gap) else segment.gap
            kept.append(Segment(segment.instrument, bars, first, gap if kept else 0.0))
    return kept, lost
