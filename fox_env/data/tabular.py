"""Bars in text files (CSV and its like), JSON and Parquet: which columns, whose contract, what numbers."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import numpy as np

from fox_env.data import dbn
from fox_env.data.bars import Bars, Chunk
from fox_env.data.tables import Columns, NoBarsError, TableFile, is_table, open_table
from fox_env.data.times import Texts, Times, looks_whole, plain, shown, shown_time

if TYPE_CHECKING:
    import pyarrow as pa

__all__ = ["ALIASES", "STAMPS", "Table", "is_table", "read_tabular"]

STAMPS = ("start", "end")

ALIASES = {
    "time": ("timestamp", "datetime", "tsevent", "date", "time", "ts", "t", "opentime", "index", ""),
    "clock": ("time", "timeofday", "clock"),
    "open": ("open", "o"),
    "high": ("high", "h"),
    "low": ("low", "l"),
    "close": ("close", "last", "c"),
    "volume": ("volume", "vol", "v", "totalvolume"),
    "trades": ("numberoftrades", "trades", "tradecount"),
    "bid_volume": ("bidvolume",),
    "ask_volume": ("askvolume",),
    "symbol": ("symbol", "contract", "rawsymbol", "ticker"),
    "instrument_id": ("instrumentid",),
}
"""Names of columns in lower case, letters and digits alone; of several, the first here counts, and of columns with the
same name the first in the file. Of several columns of time it is the first that holds moments, else the first, whose
days the clock completes. A column without a name is a time if it is the first one and no other is."""

_PRICES = ("open", "high", "low", "close")
_EXTRA = ("trades", "bid_volume", "ask_volume")
_FIXED_POINT = 1e9  # Databento's prices as whole numbers, and the least that are taken for such
_UNDEFINED = 2.0**63  # Databento's absent price, INT64_MAX, as float64
_CONTRACT_IN_NAME = r"(?<![A-Za-z0-9])({root}[HMUZ])(?:20(?=\d\d))?(\d{{1,2}})(?![A-Za-z0-9])"
_NINJATRADER_NAME = re.compile(r"([A-Z0-9]{1,4}) (03|06|09|12)-(\d\d)(?!\d)")
_MONTHS = {"03": "H", "06": "M", "09": "U", "12": "Z"}
_THOUSANDS = r"^[+-]?\d{1,3}(,\d{3})+(\.\d*)?$"
_DECIMAL_COMMA = r"^[+-]?[\d.]*,\d+$"
_FLOAT = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$"


@dataclass(frozen=True)
class Table:
    """Bars read from tables.

    Args:
        chunks: the rows of each file and contract.
        length: of a bar in nanoseconds, the most frequent distance of two rows.
        stamp: whether the files' times were taken as the bars' ``"start"`` or ``"end"``.
    """

    chunks: list[Chunk]
    length: int
    stamp: str


@dataclass(frozen=True)
class _Rows:
    """The rows of one file: UTC nanoseconds and whether there is a time; columns; groups of rows; row numbers; and
    `Times.order`."""

    time: np.ndarray
    known: np.ndarray
    values: dict[str, np.ndarray]
    groups: list[tuple[str, int | None, np.ndarray | slice]]
    number: np.ndarray
    order: str


def read_tabular(
    files: Sequence[Path],
    *,
    symbol: str,
    tz: str | None = None,
    stamp: str | None = None,
    columns: Columns | None = None,
    bars: int | None = None,
    quality: dict[str, int | str],
) -> Table:
    """Bars of text, JSON and Parquet files.

    `tables.open_table` tells which forms of files are read, `times.Times` which forms of times. Times with an offset
    and epoch numbers are UTC whatever `tz` says.

    The contract is what a symbol column says, else the file's name if a contract's name stands in it
    (``ESH15-CME.txt``, ``CME_ESH2015.csv``, NinjaTrader's ``ES 03-15.Last.txt``), else the rows are one series, named
    `symbol`. Where there are instrument ids, each is a contract of its own within a series: ``ES.c.0:118``.

    Numbers may be quoted and have commas between thousands; a decimal comma is an error. What is no number is NaN.
    Prices that are whole numbers of at least 1e9 throughout a file are Databento's, of 1e-9 points. Columns of trades,
    bid and ask volume go to `Bars.extra` if all files have them.

    Rows are dropped and counted: ``rows_broken`` (with too many or too few cells, of which more than
    `tables.REFUSED_SHARE` are an error), ``rows_bad_time`` (without a time), ``rows_nonexistent_time`` (a clock that
    the beginning of daylight saving time skips), ``rows_spreads`` (a hyphen in the symbol), ``rows_unmapped`` (an empty
    symbol) and ``rows_other_symbols``. Counted too: ``rows_read``, ``rows_ambiguous_time`` (a clock that the end of
    daylight saving time repeats, read as the first of the two) and ``files_without_bars`` (JSON documents that are no
    lists of bars, and texts with neither a header nor a row of numbers).

    Args:
        files: the files.
        symbol: root, parent, contract or continuous symbol, see `dbn.wanted`.
        tz: time zone of times without an offset, such as ``"America/Chicago"``.
        stamp: whether times are the bars' ``"start"`` or ``"end"``; None means start, but for NinjaTrader's form, whose
            times are ends.
        columns: for any of the names in `ALIASES` the name or the position, from 0, of the file's column, where the
            aliases do not find it; or names for all columns in the file's order, instead of a header.
        bars: length of a bar in nanoseconds for files that do not show it, those of one row.
        quality: counts are added to those above.

    Raises:
        ValueError: a file that cannot be read, lacks a column, has times or numbers that cannot be read, or no time
            zone, or whose bars are of another length than the first file's; dates that do not tell the day from the
            month beside a file with the day first; no row of `symbol`; an unknown `stamp`, `tz` or name in `columns`.
    """
    if stamp is not None and stamp not in STAMPS:
        raise ValueError(f"stamp {stamp!r} is unknown, expected 'start' or 'end'")
    zone = None if tz is None else _zone(tz)
    columns = _given(columns)
    counts = Counter(
        read=0, broken=0, bad_time=0, nonexistent_time=0, ambiguous_time=0, spreads=0, unmapped=0, other_symbols=0
    )  # fmt: skip
    without: list[ValueError] = []
    seen: Counter[str] = Counter()
    lengths: dict[int, Path] = {}
    stamps: dict[str, Path] = {}
    orders: dict[str, Path] = {}
    chunks: list[Chunk] = []
    for file in files:
        try:
            table = open_table(file, columns, lambda cells: _is_header(cells, columns))
            if table is None:
                raise NoBarsError(f"{file} holds no list of bars")
            found, times = _columns(table, columns, file)
        except NoBarsError as error:
            without.append(error)
            continue
        stamps.setdefault(stamp or table.stamp, file)
        rows = _read(table, found, times, zone, file, symbol, counts)
        orders.setdefault(rows.order, file)
        if length := _length(rows.time[rows.known]):
            lengths.setdefault(length, file)
        if len(lengths) > 1:
            (a, first), (b, second) = lengths.items()
            raise ValueError(
                f"{first} holds bars of {a / 1e9:g} s and {second} of {b / 1e9:g} s, expected one length of bar"
            )
        chunks += _chunks(rows, symbol, file, counts, seen)
    if "day" in orders and "either" in orders:
        raise ValueError(
            f"{orders['day']} has dates with the day first, and in {orders['either']} nothing tells the day from the "
            "month: write dates with the year first"
        )
    if len(stamps) > 1:
        raise ValueError(
            f"{stamps['end']} has times of bars' ends, as NinjaTrader writes them, and {stamps['start']} has not: "
            "give stamp='start' or 'end'"
        )
    if without and len(without) == len(files):
        raise without[0]
    _check_found(files, chunks, symbol, seen)
    length = next(iter(lengths), bars)
    if length is None:
        raise ValueError(f"{dbn.where(files)} has too few rows to tell the length of its bars, give bars=")
    dbn.add_counts(quality, "rows", counts)
    quality["files_without_bars"] = int(quality.get("files_without_bars", 0)) + len(without)
    used = next(iter(stamps))
    return Table(_stamped(chunks, length, used), length, used)


def _given(columns: Columns | None) -> Columns | None:
    """The argument `columns`, checked."""
    if columns is None:
        return None
    if isinstance(columns, Mapping):
        for name, column in columns.items():
            if name not in ALIASES:
                raise ValueError(f"columns names {name!r}, expected one of {', '.join(ALIASES)}")
            if not isinstance(column, str) and (type(column) is not int or column < 0):
                raise ValueError(f"columns gives {column!r} for {name!r}, expected a column's name or position from 0")
        return columns
    if isinstance(columns, str) or not all(column is None or isinstance(column, str) for column in columns):
        raise ValueError(f"columns is {shown(columns)}, expected names, or names and positions by meaning")
    return [column or f"column {k}" for k, column in enumerate(columns)]


def _find(names: Sequence[str], given: Columns | None) -> dict[str, list[int]]:
    """Positions of the columns that may have each meaning, the best first."""
    plain_names = [re.sub(r"[^a-z0-9]", "", name.lower()) for name in names]
    first = {name: k for k, name in reversed(list(enumerate(plain_names))) if name or k == 0}
    found = {name: [first[a] for a in aliases if a in first] for name, aliases in ALIASES.items()}
    if isinstance(given, Mapping):
        for name, column in given.items():
            if isinstance(column, int):
                found[name] = [column] if column < len(names) else []
            else:
                found[name] = [names.index(column.strip())] if column.strip() in names else []
    return {name: positions for name, positions in found.items() if positions}


def _is_header(cells: Sequence[str], given: Columns | None) -> bool:
    """Whether cells name the columns that must be there, as far as these are not given by position."""
    by_name = {"time", *_PRICES}
    if isinstance(given, Mapping):
        by_name -= {name for name, column in given.items() if isinstance(column, int)}
    return bool(by_name) and by_name <= set(_find(cells, given))


def _columns(table: TableFile, given: Columns | None, file: Path) -> tuple[dict[str, int], list[int]]:
    """The position of the column for each name in `ALIASES` but the time, and those that may be the time."""
    found = _find(table.names, given)
    kind = NoBarsError if table.is_json else ValueError
    if isinstance(given, Mapping):
        for name, column in given.items():
            if name not in found:
                raise kind(f"{file} has no column {column!r}, which columns gives for {name!r}")
    if "time" not in found and len(table.moments) == 1:
        found["time"] = list(table.moments)
    if lacking := [repr(name) for name in ("time", *_PRICES) if name not in found]:
        held = textwrap.shorten(", ".join(filter(None, table.names)), 120, placeholder=" …")
        raise kind(f"{file} has no column for {', '.join(lacking)} among {held}, name it with columns=")
    times = found.pop("time")
    return {name: positions[0] for name, positions in found.items()}, times


def _read(
    table: TableFile, found: dict[str, int], candidates: Sequence[int], zone: ZoneInfo | None, file: Path, symbol: str,
    counts: Counter[str],
) -> _Rows:  # fmt: skip
    """Read a file's rows."""
    count = 0
    times: Times | None = None
    clock: int | None = None
    parts: dict[str, list[np.ndarray]] = {name: [] for name in (*_PRICES, "volume", *_EXTRA) if name in found}
    symbols = Texts() if "symbol" in found else None
    ids: list[np.ndarray] = []
    for batch in table.read(sorted({*found.values(), *candidates})):
        if times is None:
            whole = [k for k in candidates if looks_whole(batch[k])]
            time = whole[0] if whole else candidates[0]
            clock = None if whole or found.get("clock") == time else found.get("clock")
            times = Times(file, table.names[time] or "index", table.number)
        times.add(batch[time], None if clock is None else batch[clock])
        for name, part in parts.items():
            part.append(_numbers(batch[found[name]], table, found[name], file, count))
        if symbols:
            symbols.add(_text(batch[found["symbol"]]))
        if "instrument_id" in found:
            ids.append(_numbers(batch[found["instrument_id"]], table, found["instrument_id"], file, count))
        count += len(batch[time])
    counts["read"] += count + len(table.broken)
    counts["broken"] += len(table.broken)
    utc, known = times.finish(zone, counts)
    if count > 1 and known.all() and symbols is None and (utc == utc[0]).all():
        raise ValueError(f"{file} has the same time in all of its {count} rows, {shown_time(utc[0])} UTC")
    values = {name: np.concatenate(parts.pop(name)) for name in list(parts)}
    for name in _PRICES:
        if np.isnan(values[name]).all():
            raise ValueError(f"{file} has no number in its column {table.names[found[name]]!r} for {name!r}")
    return _Rows(utc, known, values, _groups(symbols, ids, count, file, symbol), table.numbers(count), times.order)


def _groups(
    symbols: Texts | None, ids: Sequence[np.ndarray], count: int, file: Path, symbol: str
) -> list[tuple[str, int | None, np.ndarray | slice]]:
    """The rows of each symbol and, within a series, of each instrument id."""
    if symbols:
        which, labels = symbols.finish()
    else:
        which, labels = np.zeros(count, np.int32), [_contract_in(file.name, symbol) or symbol]
    if not ids:
        return [(labels[code], None, rows) for code, rows in _runs(which)]
    number = np.clip(np.nan_to_num(np.concatenate(ids)), 0, 2**32).astype(np.int64)
    if not symbols and "." not in symbol.removesuffix(".FUT") and (number != number[0]).any():
        raise ValueError(
            f"{file} has several instrument ids and no column of symbols, which would tell contracts from spreads"
        )
    groups = []
    for code, rows in _runs(which):
        for identifier, own in _runs(number[rows]):
            groups.append((labels[code], identifier, own if isinstance(rows, slice) else rows[own]))
    return groups


def _contract_in(name: str, symbol: str) -> str | None:
    """The contract that a file's name tells; that of another root only in capital letters."""
    if match := _NINJATRADER_NAME.match(name):
        return f"{match[1]}{_MONTHS[match[2]]}{match[3]}"
    root = re.escape(symbol.removesuffix(".FUT"))
    match = re.search(_CONTRACT_IN_NAME.format(root=root), name, re.IGNORECASE)
    match = match or re.search(_CONTRACT_IN_NAME.format(root="[A-Z0-9]{1,3}"), name)
    return f"{match[1]}{match[2]}".upper() if match else None


def _runs(key: np.ndarray) -> Iterator[tuple[int, np.ndarray | slice]]:
    """Each value with the rows that have it, in order."""
    if (key == key[0]).all():
        yield int(key[0]), slice(None)
        return
    order = np.argsort(key, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(key[order])) + 1):
        yield int(key[rows[0]]), rows


def _chunks(rows: _Rows, symbol: str, file: Path, counts: Counter[str], seen: Counter[str]) -> list[Chunk]:
    """A file's rows by contract, each from its time on as if it were the bar's start."""
    naming = dbn.wanted(symbol)
    root = symbol.removesuffix(".FUT")
    kept: list[tuple[str, np.ndarray | slice]] = []
    for label, identifier, own in rows.groups:
        own = own if rows.known.all() else np.arange(len(rows.time))[own][rows.known[own]]
        time = rows.time[own]
        if not len(time):
            continue
        if not label:
            counts["unmapped"] += len(time)
            continue
        seen[label] += len(time)
        name = naming(label, identifier or 0, int(time[0]))
        if name is None and label in (symbol, root):
            name = f"{root}:{identifier}"
        if name is None:
            counts["spreads" if "-" in label else "other_symbols"] += len(time)
            continue
        kept.append((name if identifier is not None else name.partition(":")[0], own))
    prices = [[rows.values[name][own] for name in _PRICES] for _, own in kept]
    if kept and all(_is_fixed_point(price) for columns in prices for price in columns):
        prices = [[_points(price) for price in columns] for columns in prices]
    chunks = []
    for (name, own), columns in zip(kept, prices, strict=True):
        time = rows.time[own]
        volume = rows.values["volume"][own] if "volume" in rows.values else np.full(len(time), np.nan)
        extra = {key: rows.values[key][own] for key in _EXTRA if key in rows.values}
        chunks.append(Chunk(name, Bars(time, time, *columns, volume=volume, extra=extra), rows.number[own], file.name))
    return chunks


def _is_fixed_point(price: np.ndarray) -> bool:
    return bool(np.all(np.isnan(price) | ((price >= _FIXED_POINT) & (price == np.floor(price)))))


def _points(price: np.ndarray) -> np.ndarray:
    return np.where(price == _UNDEFINED, np.nan, price / _FIXED_POINT)


def _stamped(chunks: Sequence[Chunk], length: int, stamp: str) -> list[Chunk]:
    """The chunks with the bars' true starts and ends, and the extra columns that all of them have."""
    shared = set.intersection(*(set(chunk.bars.extra) for chunk in chunks))
    stamped = []
    for chunk in chunks:
        start = chunk.bars.start - (length if stamp == "end" else 0)
        extra = {name: column for name, column in chunk.bars.extra.items() if name in shared}
        bars = Bars(**{**chunk.bars.__dict__, "start": start, "ts": start + length, "extra": extra})
        stamped.append(Chunk(chunk.contract, bars, chunk.row, chunk.file))
    return stamped


def _check_found(files: Sequence[Path], chunks: Sequence[Chunk], symbol: str, seen: Counter[str]) -> None:
    """Whether there are bars of `symbol`, and not several series of it."""
    if not chunks:
        held = ", ".join(shown(name)[1:-1] for name, _ in seen.most_common(5))
        raise ValueError(f"{dbn.where(files)} holds no bars of {symbol!r}" + (f" but of {held}" if held else ""))
    series = {chunk.contract.partition(":")[0] for chunk in chunks}
    if len(series) > 1 and any("." in name for name in series):
        raise ValueError(f"{dbn.where(files)} holds {', '.join(sorted(series))}, expected one continuous symbol")


def _text(column: pa.Array) -> pa.Array:
    """Strings without spaces around them, empty where there is none."""
    import pyarrow as pa
    import pyarrow.compute as pc

    return pc.utf8_trim(plain(column).cast(pa.string()), ' \t"').fill_null("")


def _numbers(column: pa.Array, table: TableFile, position: int, file: Path, before: int) -> np.ndarray:
    """Float64 [T], NaN for what is no number; `before` rows were read before these."""
    import pyarrow as pa
    import pyarrow.compute as pc

    name = table.names[position]
    column = plain(column)
    if pa.types.is_timestamp(column.type):
        raise ValueError(f"{file} has times in its column {name!r}, expected numbers")
    if pa.types.is_string(column.type):
        column = _text(column)
        column = pc.if_else(pc.equal(column, ""), None, column)
        try:
            column = column.cast(pa.float64())
        except pa.ArrowInvalid:
            thousands = pc.match_substring_regex(column, _THOUSANDS)
            comma = pc.index(pc.and_not(pc.match_substring_regex(column, _DECIMAL_COMMA), thousands), True).as_py()
            if comma >= 0:
                value, row = shown(column[comma].as_py()), table.number(before + comma)
                raise ValueError(
                    f"{file} has {value} in its column {name!r} in row {row}, expected a decimal point"
                ) from None
            column = pc.if_else(thousands, pc.replace_substring(column, ",", ""), column)
            column = pc.if_else(pc.match_substring_regex(column, _FLOAT), column, None).cast(pa.float64())
    return column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)


def _length(time: np.ndarray) -> int | None:
    """The most frequent distance of two rows, None for fewer than two."""
    steps = np.diff(time)
    if len(steps) and steps.min() <= 0:
        steps = np.diff(np.unique(time))
    if not len(steps):
        return None
    values, count = np.unique(steps, return_counts=True)
    return int(values[np.argmax(count)])


def _zone(tz: str) -> ZoneInfo:
    try:
        return ZoneInfo(tz)
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(f"tz {tz!r} is not the name of a time zone, such as 'America/Chicago' or 'UTC'") from error
