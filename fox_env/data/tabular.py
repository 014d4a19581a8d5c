"""Bars in text files (CSV and its like) and Parquet."""

from __future__ import annotations

import re
import textwrap
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo

import numpy as np

from fox_env.data.bars import Bars, Chunk
from fox_env.data.rolls import outright

if TYPE_CHECKING:
    import pandas as pd

TEXT_ENDINGS = (".csv", ".txt", ".tsv")
PARQUET_ENDINGS = (".parquet", ".pq")
STAMPS = ("start", "end")

ALIASES = {
    "time": ("timestamp", "datetime", "tsevent", "date", "time", "ts", "index"),
    "open": ("open", "o"),
    "high": ("high", "h"),
    "low": ("low", "l"),
    "close": ("close", "last", "c"),
    "volume": ("volume", "vol", "v", "totalvolume"),
    "trades": ("numberoftrades", "trades", "tradecount"),
    "bid_volume": ("bidvolume",),
    "ask_volume": ("askvolume",),
    "symbol": ("symbol", "contract", "rawsymbol", "ticker"),
}
"""Names of columns, in lower case without spaces, hyphens and underscores; of several, the first here counts. A clock
time beside a date is found by its look."""

_EXTRA = ("trades", "bid_volume", "ask_volume")
_NAME_IN_FILE = re.compile(r"(?<![A-Za-z0-9])([A-Z0-9]{1,3}[HMUZ]\d{1,2})(?![A-Za-z0-9])")
_CLOCK = re.compile(r"\s*\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?\s*([AaPp][Mm])?\s*")
_OFFSET = re.compile(r".*\d(Z|[+-]\d{2}:?\d{2})\s*")
_EPOCH_UNITS = ((1e8, 1e10, 1_000_000_000), (1e11, 1e13, 1_000_000), (1e14, 1e16, 1_000), (1e17, 1e19, 1))


def read_tabular(
    files: Sequence[Path],
    *,
    symbol: str,
    tz: str | None,
    stamp: str,
    columns: Mapping[str, str] | None,
    bars: int | None,
    quality: dict[str, int | str],
) -> tuple[list[Chunk], int]:
    """Bars of text and Parquet files.

    The contract is what a symbol column says, else the file's name if a contract's name stands in it
    (``ESH15-CME.txt``), else the rows are one series, named `symbol`. Times with an offset and epoch numbers (seconds,
    milli-, micro- or nanoseconds) are UTC whatever `tz` says; dates with slashes and the year last are month first.
    A clock time that a switch of daylight saving time repeats is read as the first of the two and counted in
    ``rows_ambiguous_time``; one that it skips is dropped and counted in ``rows_nonexistent_time``. A row without a time
    is dropped and counted in ``rows_bad_time``. Prices and volumes that are no numbers are NaN. Columns of trades, bid
    and ask volume go to `Bars.extra`.

    Args:
        files: the files.
        symbol: root, parent or contract; rows of other symbols are dropped and counted in ``rows_other_symbols``.
        tz: time zone of times without an offset, such as ``"America/Chicago"``.
        stamp: whether times are the bars' ``"start"`` or ``"end"``.
        columns: the file's column for any of the names in `ALIASES`, where the aliases do not find it.
        bars: length of a bar in nanoseconds for files that do not show it, those of one row.
        quality: counts are added to ``rows_read`` and those above.

    Returns:
        The chunks, and the length of a bar in nanoseconds: the most frequent distance of two rows.

    Raises:
        ValueError: a file that cannot be read, lacks a column, has times that cannot be read or no time zone, or whose
            bars are of another length than the first file's; no row of `symbol`; an unknown `stamp` or `tz`.
    """
    if stamp not in STAMPS:
        raise ValueError(f"stamp {stamp!r} is unknown, expected 'start' or 'end'")
    zone = None if tz is None else _zone(tz)
    counts = Counter(rows_read=0, rows_other_symbols=0, rows_bad_time=0, rows_ambiguous_time=0, rows_nonexistent_time=0)
    seen: Counter[str] = Counter()
    lengths: dict[int, Path] = {}
    read: list[tuple[str, dict[str, np.ndarray], np.ndarray, str]] = []
    for file in files:
        frame = _frame(file)
        found = _columns(frame, columns or {}, file)
        time, known = _times(frame, found, zone, file, counts)
        counts["rows_read"] += len(frame)
        if length := _length(time[known]):
            lengths.setdefault(length, file)
        if len(lengths) > 1:
            (a, first), (b, second) = lengths.items()
            raise ValueError(
                f"{first} holds bars of {a / 1e9:g} s and {second} of {b / 1e9:g} s, expected one length of bar"
            )
        values = {
            name: _numbers(frame[found[name]], file)
            for name in ("open", "high", "low", "close", "volume", *_EXTRA)
            if name in found
        }
        values["time"] = time
        row = np.arange(1, len(frame) + 1)
        for label, rows in _labels(frame, found, file, symbol):
            mine = rows & known
            if not mine.any():
                continue
            seen[label] += int(mine.sum())
            contract = _wanted(label, symbol, int(time[mine][0]))
            if contract is None:
                counts["rows_other_symbols"] += int(mine.sum())
                continue
            read.append((contract, {name: column[mine] for name, column in values.items()}, row[mine], file.name))
    where = str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"
    if not read:
        held = ", ".join(name for name, _ in seen.most_common(5))
        raise ValueError(f"{where} holds no bars of {symbol!r}" + (f" but of {held}" if held else ""))
    length = next(iter(lengths), bars)
    if length is None:
        raise ValueError(f"{where} has too few rows to tell the length of its bars, give bars=")
    for key, count in counts.items():
        quality[key] = int(quality.get(key, 0)) + count
    chunks = []
    for contract, values, row, name in read:
        start = values.pop("time") - (length if stamp == "end" else 0)
        extra = {key: values.pop(key) for key in _EXTRA if key in values}
        volume = values.pop("volume", np.full(len(start), np.nan))
        chunks.append(Chunk(contract, Bars(start, start + length, volume=volume, **values, extra=extra), row, name))
    return chunks, length


def _frame(file: Path) -> pd.DataFrame:
    """The file's rows, with its index, if it has one, as a column."""
    import pandas as pd

    if file.stat().st_size == 0:
        raise ValueError(f"{file} is empty")
    try:
        if file.suffix.lower() in PARQUET_ENDINGS:
            frame = pd.read_parquet(file)
            if not isinstance(frame.index, pd.RangeIndex):
                frame = frame.rename_axis(frame.index.name or "index").reset_index()
        else:
            with open(file, encoding="utf-8", errors="replace") as stream:
                header = stream.readline()
            separator = max(",;\t", key=header.count)
            frame = pd.read_csv(file, sep=separator, skipinitialspace=True)
    except (OSError, ValueError, OverflowError) as error:  # what pandas and pyarrow raise, by version
        raise ValueError(f"{file} cannot be read as a table: {' '.join(str(error).split())}") from error
    if not len(frame):
        raise ValueError(f"{file} holds no rows, only a header")
    return frame


def _columns(frame: pd.DataFrame, given: Mapping[str, str], file: Path) -> dict[str, object]:
    """The frame's column for each name in `ALIASES` that it has."""
    plain = {re.sub(r"[\s_-]", "", str(column)).lower(): column for column in reversed(frame.columns)}
    found = {name: plain[alias] for name, aliases in ALIASES.items() for alias in reversed(aliases) if alias in plain}
    for name, column in given.items():
        if name not in ALIASES:
            raise ValueError(f"columns names {name!r}, expected one of {', '.join(ALIASES)}")
        if column not in frame:
            raise ValueError(f"{file} has no column {column!r}, which columns gives for {name!r}")
        found[name] = column
    for name in ("time", "open", "high", "low", "close"):
        if name not in found:
            held = textwrap.shorten(", ".join(str(column).strip() for column in frame.columns), 120, placeholder=" …")
            raise ValueError(f"{file} has no column for {name!r} among {held}, name it with columns=")
    return found


def _times(
    frame: pd.DataFrame, found: Mapping[str, object], zone: ZoneInfo | None, file: Path, counts: Counter[str]
) -> tuple[np.ndarray, np.ndarray]:
    """UTC nanoseconds of each row, and which rows have one."""
    import pandas as pd

    column = frame[found["time"]]
    if pd.api.types.is_numeric_dtype(column):
        known = column.notna().to_numpy()
        counts["rows_bad_time"] += int((~known).sum())
        time = np.zeros(len(column), np.int64)
        time[known] = _epoch(column[known], found["time"], file)
        return time, known
    if pd.api.types.is_datetime64_any_dtype(column):
        moment = column
    else:
        moment = _parse(column, file)
        clock = _clock_column(frame, found["time"])
        if clock is not None:
            moment = moment + (_parse(frame[clock], file, "1970-01-01 ") - pd.Timestamp("1970-01-01"))
    counts["rows_bad_time"] += int(moment.isna().sum())
    moment = _nanoseconds(moment, file)
    if moment.dt.tz is None:
        if zone is None:
            raise ValueError(
                f"{file} has times without a time zone, such as {moment.min()}: give tz=, such as 'America/Chicago'"
            )
        local = moment.dt.tz_localize(zone, ambiguous=np.ones(len(moment), bool), nonexistent="NaT")
        later = moment.dt.tz_localize(zone, ambiguous=np.zeros(len(moment), bool), nonexistent="NaT")
        counts["rows_nonexistent_time"] += int((moment.notna() & local.isna()).sum())
        counts["rows_ambiguous_time"] += int((local.notna() & (local != later)).sum())
        moment = local
    return moment.dt.tz_convert("UTC").astype("int64").to_numpy(), moment.notna().to_numpy()


def _nanoseconds(moment: pd.Series, file: Path) -> pd.Series:
    """Times in nanoseconds, which reach from 1677 to 2262."""
    outside = ((moment.dt.year < 1678) | (moment.dt.year > 2261)).to_numpy()
    if outside.any():
        row = int(outside.argmax())
        raise ValueError(f"{file} has the time {moment.iloc[row]} in row {row + 1}, expected years from 1678 to 2261")
    return moment.dt.as_unit("ns")


def _epoch(column: pd.Series, name: object, file: Path) -> np.ndarray:
    """Nanoseconds of epoch numbers, whose size tells their unit."""
    value = column.to_numpy()
    for least, most, factor in _EPOCH_UNITS:
        if np.all((value >= least) & (value < most)):
            whole = value.astype(np.int64)
            return whole * factor + np.round((value - whole) * factor).astype(np.int64)
    bad = value[int(np.argmax(~((value >= 1e8) & (value < 1e19))))]
    raise ValueError(f"{file} has {bad} in its time column {str(name)!r}, expected dates or seconds since 1970")


def _parse(column: pd.Series, file: Path, prefix: str = "") -> pd.Series:
    """Times of a text column, parsed once for each distinct text, NaT where there is none."""
    import pandas as pd

    text = column.astype("string").str.strip()
    codes, texts = pd.factorize(text.mask(text == ""))  # the code of a missing text is -1
    texts = pd.Series(texts)
    offset = texts.map(lambda text: _OFFSET.fullmatch(text) is not None)
    if offset.any() and not offset.all():
        raise ValueError(f"{file} has times with and without an offset, such as {texts[offset.idxmin()]}")
    texts, utc = prefix + texts, bool(offset.all())
    try:
        moments = pd.to_datetime(texts, format="ISO8601", utc=utc)
    except ValueError:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # pandas warns where it would guess text by text
                moments = pd.to_datetime(texts, utc=utc)
        except (ValueError, UserWarning) as error:
            raise ValueError(f"{file} has times that cannot be read, such as {texts.iloc[0]!r}") from error
    return moments.reindex(codes).reset_index(drop=True)


def _clock_column(frame: pd.DataFrame, date: object) -> object | None:
    """The column of clock times beside a column of dates."""

    def first(column: object) -> str:
        return "".join(frame[column].dropna().head(1).astype(str))

    if ":" in first(date):
        return None
    for column in frame.columns:
        if "time" in str(column).lower() and column != date and _CLOCK.fullmatch(first(column)):
            return column
    return None


def _labels(frame: pd.DataFrame, found: Mapping[str, object], file: Path, symbol: str) -> list[tuple[str, np.ndarray]]:
    """Each symbol that the file's rows have, with a mask of them."""
    if "symbol" in found:
        labels = frame[found["symbol"]].astype(str).str.strip()
        return [(str(label), (labels == label).to_numpy()) for label in labels.unique()]
    match = _NAME_IN_FILE.search(file.name)
    return [(match[1] if match else symbol, np.ones(len(frame), bool))]


def _wanted(label: str, symbol: str, near: int) -> str | None:
    """The contract of a label, the label itself for one series of the root, None for what `symbol` does not ask for."""
    root = symbol.removesuffix(".FUT")
    contract, asked = outright(label, near), outright(root, near)
    if contract is None:
        return root if label in (symbol, root) else None
    return contract.name if (asked.name if asked else root) in (contract.root, contract.name) else None


def _numbers(column: pd.Series, file: Path) -> np.ndarray:
    import pandas as pd

    try:
        return pd.to_numeric(column, errors="coerce").to_numpy(np.float64)
    except OverflowError as error:  # whole numbers of more than 308 digits
        raise ValueError(f"{file} has a number in column {str(column.name)!r} that is too large") from error


def _length(time: np.ndarray) -> int | None:
    """The most frequent distance of two rows, None for fewer than two."""
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
