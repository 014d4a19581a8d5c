"""Tables in files as Arrow columns: text (CSV and its like), JSON and Parquet, batch by batch."""

from __future__ import annotations

import codecs
import csv
import io
import json
import lzma
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from fox_env.data.times import shown

if TYPE_CHECKING:
    import pyarrow as pa

TEXT_ENDINGS = (".csv", ".txt", ".tsv")
JSON_ENDINGS = (".json", ".jsonl", ".ndjson")
PARQUET_ENDINGS = (".parquet", ".pq")
COMPRESSED_ENDINGS = (".gz", ".zst", ".bz2", ".xz", ".zip")

REFUSED_SHARE = 0.01
"""Share of rows with another number of cells than the header above which a file is corrupt."""

_REFUSED_LEAST = 5  # so that a few slips do not condemn a short file
_HEAD_BYTES = 1 << 16  # the header is sought in these
_BLOCK_BYTES = 1 << 22  # of text that is parsed at a time
_ROWS = 1 << 18  # of JSON or Parquet that are read at a time
_SEPARATORS = ",;\t|"
_NUMBER = re.compile(r"[+-]?[\d.,]+([eE][+-]?\d+)?")  # or a date: what no header has
_NINJATRADER = re.compile(r"\d{8}( \d{6})?(;\d+(\.\d+)?){4};\d+")
_NINJATRADER_NAMES = ["time", "open", "high", "low", "close", "volume"]

Columns = Mapping[str, str | int] | Sequence[str]


class NoBarsError(ValueError):
    """A file of something else, such as a vendor's description of the bars beside it."""


@dataclass(frozen=True)
class TableFile:
    """A file whose columns are known and whose rows can be read.

    Args:
        names: the columns' names in the file's order, without spaces around them.
        read: gives batches of the columns at some positions, ``{position: array}``. Arrays may be of any type.
        stamp: whether the form of the file says that times are bars' ``"start"`` or ``"end"``.
        moments: positions of the columns whose type says that they are times.
        is_json: whether it may as well be a description of other files.
        broken: fills while reading: numbers of the rows that were dropped since they have too many or too few cells.
    """

    names: list[str]
    read: Callable[[Sequence[int]], Iterator[dict[int, pa.Array]]]
    stamp: str = "start"
    moments: Sequence[int] = ()
    is_json: bool = False
    broken: list[int] = field(default_factory=list)

    def numbers(self, count: int) -> np.ndarray:
        """Numbers in the file of the first `count` rows that were read, int64 [count], the first data row being 1."""
        broken = np.sort(np.array(self.broken, np.int64))
        return np.delete(np.arange(1, count + len(broken) + 1), broken[broken <= count + len(broken)] - 1)[:count]

    def number(self, k: int) -> int:
        """Number in the file of the k-th row that was read, k from 0."""
        return int(self.numbers(k + 1)[k])


def is_table(path: Path) -> bool:
    """Whether a file is a table, by its name: text or JSON, compressed or not, or Parquet."""
    return _ending(path) in (*TEXT_ENDINGS, *JSON_ENDINGS, *PARQUET_ENDINGS, ".zip")


def open_table(file: Path, given: Columns | None, is_header: Callable[[Sequence[str]], bool]) -> TableFile | None:
    """Find a file's columns.

    Text may be UTF-8 or UTF-16, its columns separated by comma, semicolon, tab or bar. The header is the first line
    that `is_header` accepts, a comment sign before it left aside, or else the line above the first row of numbers that
    has as many cells. Where there is none, `given` tells the names, or the file has NinjaTrader's form:
    ``yyyyMMdd HHmmss;open;high;low;close;volume``, its stamps being ends of bars, or ``yyyyMMdd;…`` for whole days,
    whose stamps name the day.

    JSON is a list of objects, or an object a line.

    Args:
        file: its ending tells what it is; a .zip holds one table.
        given: names of the columns in order, which replace a header, or names and positions by meaning.
        is_header: whether cells are those of a header.

    Returns:
        None for a JSON document that is no list of objects.

    Raises:
        NoBarsError: a text without a header and without a row of numbers.
        ValueError: a file that is empty or cannot be read, or whose columns cannot be told.
    """
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is empty")
    ending = _ending(file)
    if ending == ".zip":
        ending = Path(_member(file).filename).suffix.lower()
    if ending in PARQUET_ENDINGS:
        return _parquet(file)
    return _json(file) if ending in JSON_ENDINGS else _text(file, given, is_header)


def _ending(file: Path) -> str:
    endings = [ending.lower() for ending in file.suffixes[-2:]]
    if len(endings) == 2 and endings[1] in COMPRESSED_ENDINGS and endings[0] in (*TEXT_ENDINGS, *JSON_ENDINGS):
        return endings[0]
    return endings[-1] if endings else ""


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Around what libraries do with a file's bytes: they raise whatever their decoders meet."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split()) or type(error).__name__}") from error


def _member(file: Path) -> zipfile.ZipInfo:
    """The table in a ZIP file."""
    with _reading(file), zipfile.ZipFile(file) as archive:
        held = [item for item in archive.infolist() if not item.is_dir() and not item.filename.startswith("__MACOSX/")]
    tables = [item for item in held if Path(item.filename).suffix.lower() in (*TEXT_ENDINGS, *JSON_ENDINGS)]
    if len(tables) != 1:
        raise ValueError(f"{file} holds {len(tables)} tables among {len(held)} files, expected one .csv, .txt or .json")
    return tables[0]


@contextmanager
def _bytes(file: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, decompressed."""
    import pyarrow as pa

    ending = file.suffix.lower()
    with ExitStack() as stack:
        with _reading(file):
            if ending == ".zip":
                archive = stack.enter_context(zipfile.ZipFile(file))
                stream = stack.enter_context(archive.open(_member(file)))
            elif ending == ".xz":
                stream = stack.enter_context(lzma.open(file))
            elif ending in COMPRESSED_ENDINGS:  # Arrow tells a stream that ends too early
                kind = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}[ending]
                stream = stack.enter_context(pa.input_stream(str(file), compression=kind))
            else:
                stream = stack.enter_context(open(file, "rb"))
        yield stream


def _head(file: Path) -> tuple[bytes, str]:
    """The first bytes of a file, and their encoding."""
    with _bytes(file) as stream, _reading(file):
        head = bytes(stream.read(_HEAD_BYTES))
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        return head, "utf-16"
    if head.count(0) * 3 > len(head):
        return head, "utf-16-be" if head[0] == 0 else "utf-16-le"
    return head, "utf-8-sig"


# Text


@dataclass(frozen=True)
class _Layout:
    """Lines to skip, the separator, the columns' names, one for each cell of a row, and the stamp."""

    skip: int
    separator: str
    names: list[str]
    stamp: str = "start"


class _Ascii:
    """A stream of text as ASCII, other characters being question marks; notes whether it has quotation marks."""

    def __init__(self, stream: IO[bytes], encoding: str) -> None:
        self._stream, self.quoted, self.closed = stream, False, False
        self._decoder = codecs.getincrementaldecoder(encoding)(errors="replace")
        self._plain = False  # whether the next bytes may be ASCII as they are: UTF-8, after the byte order mark
        self._is_utf8 = encoding == "utf-8-sig"

    def read(self, size: int) -> bytes:
        text = b""
        while not text:
            data = bytes(self._stream.read(size))
            if self._plain and data.isascii():
                text = data  # most text is, so it is not decoded
            else:
                text = self._decoder.decode(data, final=not data).encode("ascii", errors="replace")
                self._plain = self._is_utf8 and not self._decoder.getstate()[0]
            if not data:
                break
        self.quoted = self.quoted or b'"' in text
        return text

    def close(self) -> None:
        self.closed = True


def _text(file: Path, given: Columns | None, is_header: Callable[[Sequence[str]], bool]) -> TableFile:
    head, encoding = _head(file)
    lines = re.split(r"\r\n|\r|\n", head.decode(encoding, errors="replace"))
    if len(head) == _HEAD_BYTES and len(lines) > 1:
        lines.pop()  # it may go on
    layout = _layout(file, lines, given, is_header)
    broken: list[int] = []

    def read(positions: Sequence[int]) -> Iterator[dict[int, pa.Array]]:
        import pyarrow as pa
        import pyarrow.csv as arrow_csv

        broken.clear()

        def note(row: arrow_csv.InvalidRow) -> str:
            if not broken:
                first[:] = [row.number - layout.skip, row.actual_columns]
            broken.append(row.number - layout.skip)
            return "skip"

        first: list[int] = []
        names = [str(k) for k in range(len(layout.names))]
        total = 0
        with _bytes(file) as stream:
            text = _Ascii(stream, encoding)
            with _reading(file):
                batches = arrow_csv.open_csv(
                    pa.PythonFile(text, mode="r"),
                    arrow_csv.ReadOptions(
                        use_threads=False,  # else rows have no numbers
                        block_size=_BLOCK_BYTES,
                        skip_rows=layout.skip,
                        column_names=names,
                    ),
                    arrow_csv.ParseOptions(delimiter=layout.separator, invalid_row_handler=note),
                    arrow_csv.ConvertOptions(
                        column_types={
                            name: pa.string() if k in positions else pa.binary() for k, name in enumerate(names)
                        },
                        quoted_strings_can_be_null=True,
                    ),
                )
            with batches:
                while True:
                    with _reading(file):
                        batch = next(batches, None)
                    if batch is None:
                        break
                    if text.quoted:
                        _check_quotes(file, batch, total + len(broken))
                    total += len(batch)
                    if len(batch):
                        yield {k: batch.column(k) for k in positions}
        if not total and not broken:
            raise ValueError(f"{file} holds no rows, only a header")
        if not total or len(broken) > max(REFUSED_SHARE * total, _REFUSED_LEAST):
            raise ValueError(
                f"{file} has {len(broken)} of {total + len(broken)} rows with another number of cells than its header, "
                f"{first[1]} in row {first[0]} where {len(names)} are expected"
            )

    return TableFile(layout.names, read, layout.stamp, broken=broken)


def _check_quotes(file: Path, batch: pa.RecordBatch, before: int) -> None:
    """Refuse a cell that spans lines: a quotation mark that is not closed swallows the rows after it."""
    import pyarrow.compute as pc

    for column in batch.columns:
        swallowed = pc.index(pc.match_substring_regex(column, "[\r\n]"), True).as_py()
        if swallowed >= 0:
            raise ValueError(f"{file} has a quotation mark near row {before + swallowed + 1} that is not closed")


def _layout(
    file: Path, lines: Sequence[str], given: Columns | None, is_header: Callable[[Sequence[str]], bool]
) -> _Layout:
    """Where the header is, and where the rows begin."""
    listed = given is not None and not isinstance(given, Mapping)
    positions = isinstance(given, Mapping) and all(isinstance(column, int) for column in given.values())
    above: tuple[int, str, list[str]] | None = None
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        comment = re.match(r"\s*(#+|//+|;+)\s*", line)
        for text in (line, line[comment.end() :]) if comment else (line,):
            for separator in _SEPARATORS:
                names = _cells(text, separator)
                if is_header(names):
                    names = list(given) if listed else names
                    return _fitted(file, _Layout(number + 1, separator, names), lines, listed)
        if comment:
            continue
        separator = max(_SEPARATORS, key=line.count)
        cells = _cells(line, separator)
        if sum(_NUMBER.fullmatch(cell) is not None for cell in cells) < 3:
            above = number, separator, cells
            continue
        if listed:
            return _fitted(file, _Layout(number, separator, list(given)), lines, listed)
        if above and above[1] == separator and len(above[2]) == len(cells):
            return _fitted(file, _Layout(above[0] + 1, separator, above[2]), lines, listed)
        if positions:
            return _Layout(number, separator, [""] * len(cells))
        if match := _NINJATRADER.fullmatch(line.strip()):
            return _Layout(number, ";", _NINJATRADER_NAMES, "end" if match[1] else "start")
        raise ValueError(
            f"{file} has no header above its first row {shown(line)}: name its columns in order with columns=, "
            "such as ['time', 'open', 'high', 'low', 'close', 'volume']"
        )
    begins = next((line.strip() for line in lines if line.strip()), "")
    raise NoBarsError(
        f"{file} has no header with time, open, high, low and close, and no row of numbers, but begins {shown(begins)}"
    )


def _fitted(file: Path, layout: _Layout, lines: Sequence[str], listed: bool) -> _Layout:
    """The layout with as many names as the rows have cells, which may differ by empty cells at the end."""
    names = layout.names
    rows = [_cells(line, layout.separator) for line in islice(filter(str.strip, lines[layout.skip :]), 100)]
    if not rows:
        return layout
    count = Counter(map(len, rows)).most_common(1)[0][0]
    further = [cell for cells in rows if len(cells) == count for cell in cells[len(names) :]]
    if any(names[count:]) or (any(further) and not listed):
        source = "columns=" if listed else "its header"
        raise ValueError(f"{file} has {count} cells in its rows and {len(names)} in {source}")
    return _Layout(layout.skip, layout.separator, (names + [""] * count)[:count], layout.stamp)


def _cells(line: str, separator: str) -> list[str]:
    """The cells of a line."""
    try:
        return [cell.strip() for cell in next(csv.reader([line], delimiter=separator, skipinitialspace=True), [])]
    except csv.Error:
        return [cell.strip() for cell in line.split(separator)]


# JSON


def _json(file: Path) -> TableFile | None:
    head, encoding = _head(file)
    start = head.decode(encoding, errors="replace").lstrip()
    lines = start.startswith("{") and _is_object(start.partition("\n")[0])
    if lines:
        rows = _json_lines(file, encoding)
    else:
        with _bytes(file) as stream, _reading(file):
            document = json.loads(stream.read().decode(encoding))
        if not isinstance(document, list) or not document or not isinstance(document[0], dict):
            return None
        rows = iter(document)
    first = next(rows)
    names = list(first)

    def read(positions: Sequence[int]) -> Iterator[dict[int, pa.Array]]:
        whole = _json_lines(file, encoding) if lines else iter(document)
        row = 1
        while batch := list(islice(whole, _ROWS)):
            for k, item in enumerate(batch):
                if not isinstance(item, dict):
                    raise ValueError(f"{file} has {shown(item)} in row {row + k}, expected an object")
            row += len(batch)
            with _reading(file):
                columns = {k: _array([item.get(names[k]) for item in batch]) for k in positions}
            yield columns

    return TableFile([name.strip() for name in names], read, is_json=True)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _json_lines(file: Path, encoding: str) -> Iterator[object]:
    with _bytes(file) as stream, io.TextIOWrapper(stream, encoding=encoding) as text:
        row = 0
        while True:
            with _reading(file):
                line = text.readline()
            if not line:
                return
            if not line.strip():
                continue
            row += 1
            try:
                item = json.loads(line)
            except (ValueError, RecursionError):
                raise ValueError(f"{file} has {shown(line.strip())} in row {row}, which is no JSON") from None
            yield item


def _array(values: list[object]) -> pa.Array:
    """Numbers as they are; texts, and columns of several kinds, as texts."""
    import pyarrow as pa

    kinds = set(map(type, values)) - {type(None)}
    if kinds <= {int, float}:
        try:
            return pa.array(values, pa.float64() if float in kinds else pa.int64())
        except (OverflowError, pa.ArrowInvalid):  # of more than 64 bits
            pass
    return pa.array([None if value is None else str(value) for value in values], pa.string())


# Parquet


def _parquet(file: Path) -> TableFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _reading(file), pq.ParquetFile(file) as parquet:
        schema, count = parquet.schema_arrow, parquet.metadata.num_rows
    if not count:
        raise ValueError(f"{file} holds no rows")

    def read(positions: Sequence[int]) -> Iterator[dict[int, pa.Array]]:
        names = [schema.names[k] for k in positions]
        with ExitStack() as stack:
            with _reading(file):
                parquet = stack.enter_context(pq.ParquetFile(file))
                batches = parquet.iter_batches(_ROWS, columns=list(dict.fromkeys(names)))
            while True:
                with _reading(file):
                    batch = next(batches, None)
                if batch is None:
                    return
                found = batch.schema.names
                if len(batch):
                    yield {k: batch.column(found.index(name)) for k, name in zip(positions, names, strict=True)}

    return TableFile(
        [name.strip() for name in schema.names],
        read,
        moments=[k for k, kind in enumerate(schema.types) if pa.types.is_timestamp(kind)],
    )
