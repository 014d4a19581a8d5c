"""From files to a chain of front contracts: recognize, read, repair, resample, roll."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from fox_env.contracts import CONTRACTS, Contract, get_contract
from fox_env.data import dbn, rolls, tabular
from fox_env.data.bars import Bars, Chunk, concatenate, interval_ns, resample
from fox_env.data.calendar import HOURS, sessions, trade_dates
from fox_env.data.features import Feature
from fox_env.data.rolls import Segment, outright
from fox_env.market import Market, build_market

IMPOSSIBLE_STEP = 0.01
"""Share of the price by which a bar may open away from the close of a bar that ends where it starts. Real 5-minute bars
of 2014-2021 reach 0.0064 and 1-minute bars of 2025 0.003."""

IMPOSSIBLE_DAY = 0.20
"""Share by which a price may lie away from the close before it: the price limit of a whole day."""

REFUSED_SHARE = 0.01
"""Share of bars above which impossible returns, overlapping or misaligned bars are no slips but a corrupt series."""

_REFUSED_LEAST = 5  # so that a single slip does not condemn a short file
_DAY_NS = 86_400_000_000_000
_PRICES = ("open", "high", "low", "close")
_DBN_ENDINGS = (".dbn", ".dbz", ".frag")


def load_segments(
    path: str | Path,
    *,
    symbol: str = "ES",
    bars: str | None = None,
    tz: str | None = None,
    stamp: str = "start",
    columns: Mapping[str, str] | None = None,
    max_bars: int = 0,
    roll: str = "volume",
    hours: str = "all",
) -> tuple[list[Segment], int, dict[str, int | str], dict[str, object]]:
    """Load bars as a chain of front contracts.

    Each repair is counted in `quality` under the name given here, and the first row concerned is described under that
    name with ``_first`` appended. Dropped: rows with a price that is missing, infinite or not positive
    (``rows_bad_price``); a row that repeats an earlier one (``rows_duplicate``) or contradicts it, the first in the
    files' order being kept (``rows_conflicting``); a bar that starts before the one before it ends
    (``rows_overlapping``); a bar wholly in closed hours (``rows_closed_hours``); a bar that reaches over the end of the
    longer intraday bar that it starts in, where longer ones are made (``rows_misaligned``). Repaired: a price off the
    tick is rounded to it (``rows_off_tick``), a high or low that does not enclose the four prices is widened to do so
    (``rows_range_widened``), a missing or negative volume is 0 (``rows_without_volume``), rows out of time order are
    sorted (``rows_unsorted``). Only counted: bars with a volume of zero (``rows_zero_volume``) and returns that no
    market can have (``impossible_returns``, see `IMPOSSIBLE_STEP` and `IMPOSSIBLE_DAY`). Overlapping or misaligned bars
    or impossible returns above `REFUSED_SHARE` of all bars are an error.

    Args:
        path: a file, a glob, or a directory, in which a sub-directory named as `symbol` or its parent symbol comes
            first. DBN, text (.csv, .txt, .tsv) or Parquet, all files of one kind.
        symbol: root (``"ES"``), parent (``"ES.FUT"``), contract (``"ESH4"``) or continuous symbol (``"ES.c.0"``).
        bars: length of the bars, one of `INTERVALS_NS`; None leaves them as they are. Bars up to one hour start at
            multiples of their length since 1970 UTC, daily ones with the session. A last bar that is not over by the
            end of the data is dropped (``bars_unfinished``).
        tz, stamp, columns: of text and Parquet files, see `tabular.read_tabular`.
        max_bars: keep the first that many front bars; 0 keeps all.
        roll: see `rolls.chain`.
        hours: ``"all"``, or ``"rth"`` for 08:30 to 15:00 in Chicago.

    Returns:
        The segments in time order, the length of a bar in nanoseconds, `quality` (counts, and texts under ``_first``),
        and the provenance.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: bad input, in one sentence that names the file.
    """
    if max_bars < 0:
        raise ValueError(f"max_bars is {max_bars}, expected 0 for all or a positive number")
    if hours not in HOURS:
        raise ValueError(f"hours {hours!r} is unknown, expected one of {', '.join(HOURS)}")
    if roll not in rolls.ROLL_RULES:
        raise ValueError(f"roll {roll!r} is unknown, expected one of {', '.join(rolls.ROLL_RULES)}")
    wanted = None if bars is None else interval_ns(bars)
    files, kind = find_files(path, symbol)
    quality: dict[str, int | str] = {"files": len(files)}
    if kind == "dbn":
        chunks, schema = dbn.read_ohlcv(files, symbol=symbol, quality=quality)
        interval = dbn.SCHEMAS[schema]
    else:
        chunks, interval = tabular.read_tabular(
            files, symbol=symbol, tz=tz, stamp=stamp, columns=columns, bars=wanted, quality=quality
        )
        schema = f"{interval / 1e9:g} s"
    target = wanted or interval
    if target % interval:
        raise ValueError(f"{path} holds bars of {interval / 1e9:g} s, of which {bars} bars cannot be made")

    root = next((c.root for c in map(outright, (chunk.contract for chunk in chunks)) if c), symbol_root(symbol))
    tick = CONTRACTS[root].tick if root in CONTRACTS else None
    contracts: dict[str, Bars] = {}
    by_name: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        by_name.setdefault(chunk.contract, []).append(chunk)
    del chunks
    for name in list(by_name):
        try:
            cleaned = _clean(by_name.pop(name), tick=tick, hours=hours, target=target, quality=quality)
        except ValueError as error:  # the calendar does not know the dates
            raise ValueError(f"{path}: {error}") from error
        if len(cleaned):
            contracts[name] = cleaned
    total = sum(len(own) for own in contracts.values())
    if not total:
        raise ValueError(f"{path} holds no usable bar of {symbol!r} in trading hours")
    for key, what in (
        (
            "impossible_returns",
            f"have impossible returns (over {IMPOSSIBLE_STEP:.0%} between a close and the next open)",
        ),
        ("rows_overlapping", "start before the one before has ended"),
        ("rows_misaligned", f"reach over the end of the {bars} bar that they start in"),
    ):
        count = int(quality[key])
        if count > max(REFUSED_SHARE * total, _REFUSED_LEAST):
            raise ValueError(f"{path} is corrupt: {count} of {total} bars {what}, the first {quality[f'{key}_first']}")

    quality["bars_unfinished"] = 0
    if target != interval:
        end = max(int(own.ts[-1]) for own in contracts.values())
        contracts = {name: _resample(own, target, end, hours, quality) for name, own in contracts.items()}
        contracts = {name: own for name, own in contracts.items() if len(own)}
        if not contracts:
            raise ValueError(f"{path} holds no finished {bars} bar of {symbol!r}")
    if all(outright(name) for name in contracts):
        segments = rolls.chain(contracts, rule=roll, quality=quality)
    elif len(contracts) > 1 and any(outright(name) for name in contracts):
        raise ValueError(f"{path} holds single contracts beside a continuous series: {', '.join(sorted(contracts))}")
    else:
        segments = rolls.follow(_runs(contracts), quality)
    segments = _first_bars(segments, max_bars)
    provenance = {
        "path": str(path), "files": [file.name for file in files], "format": kind, "schema": schema, "symbol": symbol,
        "bars": bars or schema, "tz": tz, "stamp": stamp, "roll": roll, "hours": hours, "max_bars": max_bars,
        "contracts": list(dict.fromkeys(segment.instrument for segment in segments)),
    }  # fmt: skip
    return segments, target, quality, provenance


def find_files(path: str | Path, symbol: str) -> tuple[list[Path], str]:
    """The files of a path and their kind, ``"dbn"`` or ``"table"``.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: no file of a known kind, or files of both kinds.
    """
    place = Path(path)
    if place.is_dir():
        root = symbol_root(symbol)
        inner = [place / name for name in dict.fromkeys((symbol, f"{root}.FUT", root)) if (place / name).is_dir()]
        place = inner[0] if inner else place
        found = sorted(file for file in place.iterdir() if file.is_file() and _kind(file))
        if not found:
            raise ValueError(f"{place} holds no file with bars: .dbn, .dbn.zst, .csv, .txt, .tsv or .parquet")
    elif place.exists():
        found = [place]
    else:
        found = sorted(Path(name) for name in glob.glob(str(path)) if Path(name).is_file())
        if not found:
            raise FileNotFoundError(f"{path} does not exist")
    kinds: dict[str, Path] = {}
    for file in found:
        kind = _kind(file)
        if kind is None:
            raise ValueError(f"{file} is of an unknown kind, expected .dbn, .dbn.zst, .csv, .txt, .tsv or .parquet")
        kinds.setdefault(kind, file)
    if len(kinds) > 1:
        raise ValueError(f"{kinds['dbn']} and {kinds['table']} are of different kinds, expected DBN or tables alone")
    return found, next(iter(kinds))


def _kind(file: Path) -> str | None:
    endings = [ending.lower() for ending in file.suffixes]
    if any(ending in _DBN_ENDINGS for ending in endings):
        return "dbn"
    known = tabular.TEXT_ENDINGS + tabular.PARQUET_ENDINGS
    return "table" if endings and endings[-1] in known else None


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


def _clean(chunks: list[Chunk], *, tick: float | None, hours: str, target: int, quality: dict[str, int | str]) -> Bars:
    """One contract's rows, repaired by the rules that `load_segments` states, ready for bars of `target` ns."""
    bars = concatenate([chunk.bars for chunk in chunks])
    origin = _Origin(
        [chunk.file for chunk in chunks],
        np.repeat(np.arange(len(chunks), dtype=np.int32), [len(chunk.row) for chunk in chunks]),
        np.concatenate([chunk.row for chunk in chunks]),
    )
    running = [np.maximum.accumulate(chunk.bars.start) > chunk.bars.start for chunk in chunks]
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
        found[1:] = ((wait == 0) & step) | ((wait < 4 * _DAY_NS) & day)
    return found


def _resample(bars: Bars, target: int, end: int, hours: str, quality: dict[str, int | str]) -> Bars:
    """Longer bars; the last is dropped if trading goes on between the end of the data and its own."""
    if target < _DAY_NS:
        start = bars.start // target * target
        ts = start + target
    else:
        day = sessions(bars.start, bars.ts, hours=hours).session
        table = trade_dates(int(bars.start[0]) - 7 * _DAY_NS, int(bars.ts[-1]), hours=hours)
        row = np.searchsorted(table.date, day)
        start, ts = table.open[row], table.close[row]
    joined = resample(bars, start, ts)
    last = int(joined.ts[-1])
    if last > end and sessions(np.array([end]), np.array([last]), hours=hours).is_open[0]:
        quality["bars_unfinished"] = int(quality["bars_unfinished"]) + 1
        return joined.take(slice(0, -1))
    return joined


def _runs(contracts: Mapping[str, Bars]) -> list[tuple[str, Bars]]:
    """The stretches of a continuous series in which the instrument stays the same, in time order."""
    names = list(contracts)
    bars = concatenate(list(contracts.values()))
    who = np.repeat(np.arange(len(names)), [len(own) for own in contracts.values()])
    order = np.argsort(bars.start, kind="stable")
    bars, who = bars.take(order), who[order]
    edges = [0, *(np.flatnonzero(np.diff(who)) + 1).tolist(), len(bars)]
    return [(names[who[a]], bars.take(slice(a, b))) for a, b in pairwise(edges)]


def _first_bars(segments: list[Segment], max_bars: int) -> list[Segment]:
    """The segments up to their first `max_bars` front bars."""
    if not max_bars:
        return segments
    kept, left = [], max_bars
    for segment in segments:
        length = min(left, len(segment.bars) - segment.first)
        if length <= 0:
            break
        bars = segment.bars.take(slice(0, segment.first + length))
        kept.append(Segment(segment.instrument, bars, segment.first, segment.gap))
        left -= length
    return kept


def load_market(
    path: str | Path,
    *,
    symbol: str = "ES",
    bars: str | None = None,
    tz: str | None = None,
    stamp: str = "start",
    columns: Mapping[str, str] | None = None,
    max_bars: int = 0,
    roll: str = "volume",
    hours: str = "all",
    contract: str | Contract | None = None,
    features: Sequence[str | Feature] | None = None,
    drop: Sequence[str] = (),
) -> Market:
    """A market from files: DBN of the ohlcv schemas, text or Parquet.

    Args:
        path, symbol, bars, tz, stamp, columns, max_bars, roll, hours: as `load_segments` takes them, which says what is
            dropped and repaired; ``market.quality`` counts it.
        contract: a `Contract` or its name; None takes the one that `symbol` begins with.
        features, drop: as `Market.from_bars` takes them.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: bad input, an unknown contract, or too few bars, in one sentence.
    """
    root = get_contract(symbol_root(symbol) if contract is None else contract)
    segments, interval, quality, provenance = load_segments(
        path, symbol=symbol, bars=bars, tz=tz, stamp=stamp, columns=columns, max_bars=max_bars, roll=roll, hours=hours
    )
    try:
        return build_market(
            segments, root, interval, hours=hours, features=features, drop=drop, quality=quality, provenance=provenance
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def symbol_root(symbol: str) -> str:
    """``"ES"`` of ``"ES"``, ``"ES.FUT"``, ``"ES.c.0"`` and ``"ESH4"``."""
    name = outright(symbol, near=0)  # the year does not matter
    return name.root if name else symbol.partition(".")[0]
