"""Reading Databento's files (DBN): any version, plain or zstd, of one schema or a live capture of several.

Files are read in pieces of a few megabytes, so that memory does not grow with their size. A record's time is `ts_recv`,
when it could be known, and `ts_event`, the start of the interval, for bars: Databento makes its bars by `ts_recv` too.
"""

from __future__ import annotations

import datetime as dt
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fox_env.contracts import Contract
from fox_env.data.bars import INTERVALS_NS, Bars, Chunk
from fox_env.data.rolls import Outright, outright

if TYPE_CHECKING:
    from databento import DBNStore

BAR_SCHEMAS = {f"ohlcv-{interval}": INTERVALS_NS[interval] for interval in ("1s", "1m", "1h", "1d")}
TRADE_SCHEMAS = ("trades", "tbbo", "mbp-1", "mbp-10")
"""Schemas that hold every trade, best first."""
BOOK_SCHEMAS = ("mbp-10", "mbp-1", "tbbo", "bbo-1s", "bbo-1m")
"""Schemas that hold quotes, best first."""
DEFINITIONS = "definition"
SCHEMAS = (*BAR_SCHEMAS, "trades", *BOOK_SCHEMAS, DEFINITIONS)
PRICE_SCALE = 1e9
UNDEF_PRICE = np.iinfo(np.int64).max
VERSIONS = (1, 2, 3)
CONTINUOUS = re.compile(r"([A-Z0-9]+)\.[cvn]\.\d+")

RTYPES = {
    "trades": 0, "tbbo": 1, "mbp-1": 1, "mbp-10": 10, DEFINITIONS: 19, "ohlcv-1s": 32, "ohlcv-1m": 33, "ohlcv-1h": 34,
    "ohlcv-1d": 35, "bbo-1s": 195, "bbo-1m": 196,
}  # fmt: skip
_SYMBOL_MAPPING = 22
_LIVE_KINDS = {rtype: schema for schema, rtype in RTYPES.items() if schema != "tbbo"}  # in a live capture both look so
_PIECE_BYTES = 1 << 22
_READ_BYTES = 1 << 16  # of compressed data, which may be a thousand times as large unpacked
_DAY_NS = 86_400_000_000_000
_EPOCH = dt.date(1970, 1, 1)
_FOREVER = np.iinfo(np.int64).max
_ZSTD, _DBZ = b"\x28\xb5\x2f\xfd", b"DBZ"

Intervals = dict[int, list[tuple[int, int, str]]]
"""By instrument id: from and to in UTC nanoseconds, `to` exclusive, and the symbol in that time."""


@dataclass(frozen=True)
class DbnFile:
    """A file whose metadata have been read.

    Args:
        path: the file.
        schema: of its records, None for a live capture.
        version: of the format, 1 to 3.
        offset: length of the metadata in bytes.
        ts_out: whether each record ends with the time at which it was sent.
        intervals: which instrument id is which symbol, as the metadata, or a live capture's own records, say.
        kinds: the schemas of `SCHEMAS` of which it holds records.
        first: time of its first record of these, UTC nanoseconds; 0 if it holds none.
    """

    path: Path
    schema: str | None
    version: int
    offset: int
    ts_out: bool
    intervals: Intervals
    kinds: tuple[str, ...] = ()
    first: int = 0


def open_file(path: Path) -> DbnFile:
    """Read the metadata of a file, and of a live capture the kinds of its records and its symbols.

    Raises:
        ValueError: a file that is empty, damaged, of another format or without metadata.
    """
    from databento import DBNStore

    with open(path, "rb") as stream:
        head = stream.read(12)
    if not head:
        raise ValueError(f"{path} is empty")
    if _DBZ in head:
        raise ValueError(f"{path} is in the legacy DBZ format, expected DBN: convert it with Databento's dbn command")
    if head.startswith(_ZSTD):
        head = next(_blocks(path), b"")
    if not head.startswith(b"DBN"):
        raise ValueError(f"{path} has no DBN metadata at its start, so it is a fragment or a file of another format")
    try:
        store = DBNStore.from_file(path)
        schema = store.schema
        version, ts_out = store.metadata.version, store.metadata.ts_out
        file = DbnFile(
            path, None if schema is None else str(schema), version, _offset(path), ts_out, _mapped_symbols(store)
        )
    except Exception as error:  # the library raises whatever its decoder meets
        raise ValueError(f"{path} cannot be read as DBN: {_one_line(error)}") from error
    if version not in VERSIONS:
        raise ValueError(f"{path} is of DBN version {version}, expected 1 to 3")
    if file.schema is None:
        return _scan(file)
    if file.schema not in SCHEMAS:
        return file
    records = next((records for _, records in read(file, (file.schema,))), None)
    if records is None:
        return file
    return replace(file, kinds=(file.schema,), first=int(times(file.schema, records[:1])[0]))


def _offset(path: Path) -> int:
    """Length of the metadata, the eight bytes that say so included."""
    head = b""
    for block in _blocks(path):
        head += block[:8]
        if len(head) >= 8:
            break
    return int.from_bytes(head[4:8], "little") + 8


def _mapped_symbols(store: DBNStore) -> Intervals:
    found: Intervals = {}
    by_id = store.metadata.stype_out == "raw_symbol"  # then the keys are ids and the intervals hold symbols
    for key, intervals in store.metadata.mappings.items():
        for interval in intervals:
            identifier, raw = (key, interval["symbol"]) if by_id else (interval["symbol"], key)
            if identifier.isdigit():
                begin, end = ((interval[name] - _EPOCH).days * _DAY_NS for name in ("start_date", "end_date"))
                found.setdefault(int(identifier), []).append((begin, end, raw))
    return found


def _scan(file: DbnFile) -> DbnFile:
    """The kinds of a live capture's records, the time of the first, and the symbols that its own records map."""
    kinds: dict[str, int] = {}
    mapped: dict[int, list[tuple[int, str]]] = {}
    for data, offset, rtype in _mixed(file):
        for kind in np.unique(rtype).tolist():
            rows = offset[rtype == kind]
            if kind == _SYMBOL_MAPPING:
                records = _gather(file, data, rows, _mapping_dtype(file.version, file.ts_out), "symbol mappings")
                for identifier, when, raw in zip(
                    records["instrument_id"].tolist(), records["ts_event"].astype(np.int64).tolist(),
                    records["stype_out_symbol"].tolist(), strict=True,
                ):  # fmt: skip
                    known = mapped.setdefault(identifier, [])
                    symbol = raw.decode(errors="replace")
                    if not known or known[-1][1] != symbol:
                        known.append((when, symbol))
            elif kind in _LIVE_KINDS and _LIVE_KINDS[kind] not in kinds:
                schema = _LIVE_KINDS[kind]
                records = _gather(file, data, rows[:1], _dtype(schema, file), schema)
                kinds[schema] = int(times(schema, records)[0])
    intervals: Intervals = {}
    for identifier, changes in mapped.items():
        # A capture is told a symbol once, before the records that it replays, which may be older.
        starts = [0, *(when for when, _ in changes[1:]), _FOREVER]
        intervals[identifier] = [(starts[k], starts[k + 1], symbol) for k, (_, symbol) in enumerate(changes)]
    return replace(file, kinds=tuple(kinds), first=min(kinds.values(), default=0), intervals=intervals)


def read(file: DbnFile, schemas: Collection[str]) -> Iterator[tuple[str, np.ndarray]]:
    """The file's records of these schemas, in pieces of one schema, each a structured array with Databento's fields.

    Raises:
        ValueError: the file is damaged or cut short.
    """
    if file.schema is None:
        for data, offset, rtype in _mixed(file):
            for schema in schemas:
                rows = offset[rtype == RTYPES[schema]]
                if len(rows):
                    yield schema, _gather(file, data, rows, _dtype(schema, file), schema)
    elif file.schema in schemas:
        dtype = _dtype(file.schema, file)
        row = 1
        for data in _pieces(file, dtype.itemsize):
            records = np.frombuffer(data, dtype)
            wrong = (records["length"] != dtype.itemsize // 4) | (records["rtype"] != RTYPES[file.schema])
            if wrong.any():
                raise ValueError(
                    f"{file.path} is corrupt: record {row + int(wrong.argmax())} is not of {file.schema}, as the "
                    "metadata say"
                )
            yield file.schema, records
            row += len(records)


def times(schema: str, records: np.ndarray) -> np.ndarray:
    """When each record was known, the start of the interval for bars; int64 UTC nanoseconds.

    A sample of the quotes (bbo) is stamped at the end of its interval, at which the state was known, and so belongs to
    the bar that ends there.
    """
    time = records["ts_event" if schema in BAR_SCHEMAS else "ts_recv"].view(np.int64)
    return time - 1 if schema.startswith("bbo") else time


def _blocks(path: Path) -> Iterator[bytes]:
    """The file's content, unpacked."""
    import zstandard

    with open(path, "rb") as stream:
        data = stream.read(_READ_BYTES)
        if not data.startswith(_ZSTD):
            while data:
                yield data
                data = stream.read(_PIECE_BYTES)
            return
        frame = None
        try:
            while data:
                # A file may hold several frames, one after another.
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                if text := frame.decompress(data):
                    yield text
                if frame.eof:
                    data, frame = frame.unused_data, None
                else:
                    data = b""
                data = data or stream.read(_READ_BYTES)
        except zstandard.ZstdError as error:
            raise ValueError(f"{path} is corrupt: {_one_line(error)}") from error
        if frame is not None:
            raise ValueError(f"{path} is truncated: its zstd stream has no end")


def _pieces(file: DbnFile, size: int) -> Iterator[bytes]:
    """The records' bytes in pieces of whole records of `size` bytes."""
    held: list[bytes] = []
    length, skip = 0, file.offset
    for block in _blocks(file.path):
        if skip:
            block, skip = block[skip:], max(0, skip - len(block))
        held.append(block)
        length += len(block)
        if length >= max(_PIECE_BYTES, size):
            data = b"".join(held)
            whole = length - length % size
            yield data[:whole] if whole < length else data
            held, length = [data[whole:]], length - whole
    data = b"".join(held)
    if len(data) % size:
        raise ValueError(f"{file.path} is truncated: its last record is incomplete")
    if data:
        yield data


def _mixed(file: DbnFile) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """A live capture's bytes in pieces, with the offset and type of each whole record in them."""
    held = b""
    skip = file.offset
    for block in _blocks(file.path):
        if skip:
            block, skip = block[skip:], max(0, skip - len(block))
        held += block
        if len(held) >= _PIECE_BYTES:
            data, offset, rtype, used = _walk(file, held)
            yield data, offset, rtype
            held = held[used:]
    data, offset, rtype, used = _walk(file, held)
    if used < len(held):
        raise ValueError(f"{file.path} is truncated: its last record is incomplete")
    yield data, offset, rtype


def _walk(file: DbnFile, content: bytes) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    from fox_env.data.ticks import record_offsets

    data = np.frombuffer(content, np.uint8)
    offset, used = record_offsets(data)
    if used < 0:
        raise ValueError(f"{file.path} is corrupt: it holds a record shorter than its header")
    return data, offset, data[offset + 1], used


def _gather(file: DbnFile, data: np.ndarray, offset: np.ndarray, dtype: np.dtype, what: str) -> np.ndarray:
    """Records of one kind from between others."""
    if (data[offset] != dtype.itemsize // 4).any():
        raise ValueError(f"{file.path} is corrupt: it holds a record of {what} that has another length than these have")
    return data[offset[:, None] + np.arange(dtype.itemsize)].reshape(-1).view(dtype)


@lru_cache
def record_dtype(schema: str, version: int = 3) -> np.dtype:
    """The layout of a schema's records, as the `databento_dbn` library states it.

    Raises:
        ValueError: an unknown schema or version.
    """
    import databento_dbn as dbn

    if version not in VERSIONS:
        raise ValueError(f"version is {version}, expected a DBN version: 1, 2 or 3")
    if schema not in SCHEMAS:
        raise ValueError(f"schema {schema!r} is unknown, expected one of {', '.join(SCHEMAS)}")
    struct = {
        "trades": dbn.TradeMsg, "tbbo": dbn.MBP1Msg, "mbp-1": dbn.MBP1Msg, "mbp-10": dbn.MBP10Msg,
        "bbo-1s": dbn.BBOMsg, "bbo-1m": dbn.BBOMsg, DEFINITIONS: getattr(dbn, f"v{version}").InstrumentDefMsg,
    }.get(schema, dbn.OHLCVMsg)  # fmt: skip
    return np.dtype(struct._dtypes)


def _dtype(schema: str, file: DbnFile) -> np.dtype:
    """The layout of the records in a file, which may have one more field."""
    dtype = record_dtype(schema, file.version)
    return np.dtype([*dtype.descr, ("ts_out", "<u8")]) if file.ts_out else dtype


@lru_cache
def _mapping_dtype(version: int, ts_out: bool) -> np.dtype:
    import databento_dbn as dbn

    fields = (dbn.v1 if version == 1 else dbn).SymbolMappingMsg._dtypes
    return np.dtype([*fields, ("ts_out", "<u8")] if ts_out else fields)


@dataclass(frozen=True)
class Piece:
    """Some records of one contract, in the file's order.

    Args:
        name: the contract.
        schema: of the records.
        records: structured array of N records.
        time: int64 [N], see `times`.
        row: int64 [N], number of each record among the file's of this schema, the first being 1.
        file: where they come from.
    """

    name: str
    schema: str
    records: np.ndarray
    time: np.ndarray
    row: np.ndarray
    file: DbnFile


Naming = Callable[[str, int, int], str | None]
"""From a raw symbol, the instrument id and a time to the name under which records are kept, or None."""


def pieces(
    files: Sequence[DbnFile], schemas: Collection[str], name: Naming, counts: Counter[str], seen: Counter[str]
) -> Iterator[Piece]:
    """The records of these schemas by contract.

    A record is mapped to its symbol by instrument id and time.

    Args:
        files: the files, in the order in which they are read.
        schemas: which records.
        name: which symbols are wanted, and how they are called.
        counts: counts are added to ``read``, ``spreads`` (with a hyphen in the symbol), ``other_symbols`` and
            ``unmapped``.
        seen: records by symbol are added.
    """
    from fox_env.data.ticks import group

    for file in files:
        row = Counter(dict.fromkeys(schemas, 1))
        for schema, records in read(file, schemas):
            time = times(schema, records)
            counts["read"] += len(records)
            for identifier, rows in group(records["instrument_id"]):
                own_time = time[rows]
                mapped = np.zeros(len(own_time), bool)
                for begin, end, raw in file.intervals.get(identifier, ()):
                    inside = (own_time >= begin) & (own_time < end)
                    count = int(np.count_nonzero(inside))
                    if not count:
                        continue
                    mapped |= inside  # a file of several continuous symbols maps an id more than once
                    seen[raw] += count
                    own = rows if count == len(own_time) else np.arange(len(records))[rows][inside]
                    kept = name(raw, identifier, int(time[own][0]))
                    if kept is None:
                        counts["spreads" if "-" in raw else "other_symbols"] += count
                        continue
                    numbers = np.arange(row[schema], row[schema] + len(records))[own]
                    yield Piece(kept, schema, records[own], time[own], numbers, file)
                counts["unmapped"] += int(np.count_nonzero(~mapped))
            row[schema] += len(records)


def wanted(symbol: str) -> Naming:
    """The outright contracts, or the continuous symbol, that `symbol` asks for: a root (``"ES"``), parent
    (``"ES.FUT"``), contract (``"ESH4"``) or continuous symbol (``"ES.c.0"``).

    Outrights are named with a two-digit year, the contracts of a continuous symbol ``symbol:instrument_id``.
    """
    root = symbol.removesuffix(".FUT")

    def name(raw: str, identifier: int, near: int) -> str | None:
        continuous = CONTINUOUS.fullmatch(raw)
        if continuous:
            return f"{raw}:{identifier}" if symbol == raw or root == continuous[1] else None
        contract, asked = outright(raw, near), outright(root, near)
        if contract is None:
            return None
        return contract.name if (asked.name if asked else root) in (contract.root, contract.name) else None

    return name


def named_as(names: Collection[str], identity: Intervals) -> Naming:
    """The contracts that are already there under these names, whichever kind of symbol a further file uses.

    Args:
        names: contracts (``"ESH24"``), or those of a continuous symbol (``"ES.c.0:118"``).
        identity: which instrument id was which symbol in the files that they come from.
    """
    by_id = {int(name.partition(":")[2]): name for name in names if ":" in name}

    def name(raw: str, identifier: int, near: int) -> str | None:
        if identifier in by_id and "-" not in raw:
            return by_id[identifier]
        symbols = [raw]
        if CONTINUOUS.fullmatch(raw):
            symbols = [symbol for begin, end, symbol in identity.get(identifier, ()) if begin <= near < end]
        contracts = [contract.name for symbol in symbols if (contract := outright(symbol, near))]
        return next((contract for contract in contracts if contract in names), None)

    return name


def read_ohlcv(files: Sequence[DbnFile], schema: str, *, symbol: str, quality: dict[str, int | str]) -> Iterator[Chunk]:
    """Bars of the outright contracts, or of the continuous symbol, of one root, in pieces.

    Args:
        files: files that hold `schema`.
        schema: one of `BAR_SCHEMAS`.
        symbol: see `wanted`.
        quality: counts are added to ``rows_read``, ``rows_spreads``, ``rows_other_symbols`` and ``rows_unmapped``.

    Raises:
        ValueError: a damaged file, none that holds what was asked for, or several continuous symbols.
    """
    counts = Counter(read=0, spreads=0, other_symbols=0, unmapped=0)
    seen: Counter[str] = Counter()
    found: set[str] = set()
    for piece in pieces(files, (schema,), wanted(symbol), counts, seen):
        found.add(piece.name)
        yield Chunk(piece.name, _bars(piece.records, BAR_SCHEMAS[schema]), piece.row, piece.file.path.name)
    check_found(files, found, symbol, seen, "bars")
    add_counts(quality, "rows", counts)


def check_found(files: Sequence[DbnFile], found: Collection[str], symbol: str, seen: Counter[str], what: str) -> None:
    """Whether there was anything of `symbol`, and not several series of it.

    Raises:
        ValueError: what was found instead.
    """
    place = where([file.path for file in files])
    if not found:
        held = ", ".join(name for name, _ in seen.most_common(5)) or "instruments without a symbol"
        raise ValueError(f"{place} holds no {what} of {symbol!r} but of {held}{', …' if len(seen) > 5 else ''}")
    series = {name.partition(":")[0] for name in found}
    if len(series) > 1 and any(":" in name for name in found):
        raise ValueError(f"{place} holds {', '.join(sorted(series))} for {symbol!r}, expected one continuous symbol")


def add_counts(quality: dict[str, int | str], prefix: str, counts: Mapping[str, int]) -> None:
    """Add counts to `quality` under ``prefix_name``."""
    for key, count in counts.items():
        quality[f"{prefix}_{key}"] = int(quality.get(f"{prefix}_{key}", 0)) + int(count)


def where(paths: Sequence[Path]) -> str:
    """Some files in words."""
    return str(paths[0]) if len(paths) == 1 else f"{paths[0].parent} ({len(paths)} files)"


def check_definitions(files: Sequence[DbnFile], contract: Contract, asset: str) -> int:
    """Compare the definitions of an asset's outrights with a contract's terms and their expiry.

    `contract_multiplier` is not set for these futures; what a point is worth is `unit_of_measure_qty`.

    Args:
        files: files that hold definitions.
        contract: the terms that the game would use.
        asset: root symbol.

    Returns:
        The number of definitions that were compared.

    Raises:
        ValueError: a definition says otherwise.
    """
    compared = 0
    for file in files:
        for _, records in read(file, (DEFINITIONS,)):
            mine = records[(records["asset"] == asset.encode()) & (records["instrument_class"] == b"F")]
            # Definitions are repeated day by day.
            terms = mine[["raw_symbol", "min_price_increment", "unit_of_measure_qty", "currency", "expiration"]]
            for record in np.unique(terms).tolist():
                symbol, increment, quantity, currency, expiration = record
                symbol = symbol.decode(errors="replace")
                named = outright(symbol, expiration - _DAY_NS if expiration < UNDEF_PRICE else None)
                if named is not None:
                    _compare(file, contract, named, symbol, increment, quantity, currency.decode(), expiration)
            compared += len(mine)
    return compared


def _compare(
    file: DbnFile, contract: Contract, named: Outright, symbol: str, increment: int, quantity: int, currency: str,
    expiration: int,
) -> None:  # fmt: skip
    for term, value, expected in (
        ("a tick of", increment / PRICE_SCALE, contract.tick),
        ("dollars a point of", quantity / PRICE_SCALE, contract.multiplier),
        ("the currency", currency, "USD"),
        ("an expiry of", _utc(expiration), _utc(named.expiry)),
    ):
        if value != expected:
            raise ValueError(f"{file.path} defines {symbol} with {term} {value}, but {contract.name} has {expected}")


def _utc(time: int) -> str:
    return f"{np.datetime64(time, 'ns').astype('datetime64[s]')} UTC"


def _bars(records: np.ndarray, interval: int) -> Bars:
    start = records["ts_event"].astype(np.int64)
    prices = {}
    for name in ("open", "high", "low", "close"):
        raw = records[name]
        prices[name] = raw / PRICE_SCALE
        if (undefined := raw == UNDEF_PRICE).any():
            prices[name][undefined] = np.nan
    return Bars(start=start, ts=start + interval, volume=records["volume"].astype(np.float64), **prices)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
