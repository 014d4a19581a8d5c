"""Databento files (DBN) of OHLCV bars: reading any version, and writing."""

from __future__ import annotations

import datetime as dt
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import numpy as np

from fox_env.data.bars import INTERVALS_NS, Bars, Chunk
from fox_env.data.rolls import outright

if TYPE_CHECKING:
    from databento import DBNStore

SCHEMAS = {f"ohlcv-{interval}": INTERVALS_NS[interval] for interval in ("1s", "1m", "1h", "1d")}
PRICE_SCALE = 1e9

_RECORDS = 1 << 20  # records decoded at a time
_DAY_NS = 86_400_000_000_000
_EPOCH = dt.date(1970, 1, 1)
_CONTINUOUS = re.compile(r"([A-Z0-9]+)\.[cvn]\.\d+")
_ZSTD, _DBZ = b"\x28\xb5\x2f\xfd", b"DBZ"
_OHLCV = np.dtype(
    [
        ("length", "u1"), ("rtype", "u1"), ("publisher_id", "<u2"), ("instrument_id", "<u4"), ("ts_event", "<u8"),
        ("open", "<i8"), ("high", "<i8"), ("low", "<i8"), ("close", "<i8"), ("volume", "<u8"),
    ]
)  # fmt: skip
_RTYPES = {"ohlcv-1s": 32, "ohlcv-1m": 33, "ohlcv-1h": 34, "ohlcv-1d": 35}


def read_ohlcv(files: Sequence[Path], *, symbol: str, quality: dict[str, int | str]) -> tuple[list[Chunk], str]:
    """The outright contracts, or the continuous symbol, of one root in OHLCV files.

    A record is mapped to its symbol by instrument id and UTC date, as the file's metadata say. Chunks of a continuous
    symbol are named ``symbol:instrument_id``, those of outrights by contract with a two-digit year.

    Args:
        files: DBN files of one schema, plain or zstd.
        symbol: a root (``"ES"``), parent (``"ES.FUT"``), contract (``"ESH4"``) or continuous symbol (``"ES.c.0"``).
        quality: counts are added to ``rows_read``, ``rows_spreads`` (with a hyphen in the symbol),
            ``rows_other_symbols``, ``rows_unmapped`` and ``files_without_records``.

    Returns:
        The chunks, and the schema.

    Raises:
        ValueError: a file that cannot be read, is of another kind, holds no record or lacks what was asked for.
    """
    counts = Counter(rows_read=0, rows_spreads=0, rows_other_symbols=0, rows_unmapped=0, files_without_records=0)
    symbols: Counter[str] = Counter()
    chunks: list[Chunk] = []
    schemas: dict[str, Path] = {}
    for file in files:
        store = _open(file)
        schemas.setdefault(str(store.schema), file)
        if len(schemas) > 1:
            (a, first), (b, second) = schemas.items()
            raise ValueError(f"{first} holds {a} and {second} holds {b}, expected one schema")
        intervals = _intervals(store)
        row = 1
        for records in _records(store, file):
            for identifier, rows in _groups(records["instrument_id"]):
                mapped = 0
                for begin, end, raw in intervals.get(identifier, ()):
                    time = records["ts_event"][rows]
                    own = rows if begin <= time.min() and time.max() < end else rows[(time >= begin) & (time < end)]
                    if not len(own):
                        continue
                    mapped += len(own)
                    symbols[raw] += len(own)
                    name = _wanted(raw, symbol, int(records["ts_event"][own[0]]))
                    if name is None:
                        counts["rows_spreads" if "-" in raw else "rows_other_symbols"] += len(own)
                        continue
                    if _CONTINUOUS.fullmatch(raw):
                        name = f"{raw}:{identifier}"
                    chunks.append(Chunk(name, _bars(records[own], SCHEMAS[store.schema]), own + row, file.name))
                counts["rows_unmapped"] += len(rows) - mapped
            counts["rows_read"] += len(records)
            row += len(records)
        counts["files_without_records"] += row == 1
    where = str(files[0]) if len(files) == 1 else f"{files[0].parent} ({len(files)} files)"
    if not counts["rows_read"]:
        raise ValueError(f"{where} holds no records, only a header")
    if not chunks:
        held = ", ".join(name for name, _ in symbols.most_common(5)) or "instruments without a symbol"
        raise ValueError(f"{where} holds no bars of {symbol!r} but of {held}{', …' if len(symbols) > 5 else ''}")
    series = {chunk.contract.partition(":")[0] for chunk in chunks}
    if len(series) > 1 and any(_CONTINUOUS.fullmatch(name) for name in series):
        raise ValueError(f"{where} holds {', '.join(sorted(series))} for {symbol!r}, expected one continuous symbol")
    for key, count in counts.items():
        quality[key] = int(quality.get(key, 0)) + count
    return chunks, next(iter(schemas))


def write_ohlcv(
    path: str | Path,
    contracts: Mapping[str, Bars],
    *,
    schema: str = "ohlcv-1m",
    symbol: str = "ES.FUT",
    dataset: str = "GLBX.MDP3",
    version: int = 3,
) -> None:
    """Write bars as one DBN file, compressed with zstd where the name ends in ``.zst``.

    Instruments are numbered from 1. Contract names are written as Databento writes them, with one year digit; other
    names, such as those of spreads, as they are. Records are in time order. Starts keep every nanosecond, prices every
    1e-9 point, volumes are whole numbers; ends are not stored, they follow from the schema.

    Args:
        path: the file.
        contracts: bars by contract name.
        schema: one of `SCHEMAS`.
        symbol: what was asked for, as the metadata note it: a parent symbol, a continuous one, which then stands for
            the contracts one after the other by UTC date, or ``""`` for the contracts' own symbols.
        dataset, version: of the metadata; DBN versions 1 to 3.

    Raises:
        ValueError: an unknown schema, or no bars.
    """
    from databento_dbn import Metadata, Schema, SType

    if schema not in SCHEMAS:
        raise ValueError(f"schema {schema!r} is unknown, expected one of {', '.join(SCHEMAS)}")
    total = sum(len(bars) for bars in contracts.values())
    if not total:
        raise ValueError(f"{path}: there are no bars to write")
    continuous = _CONTINUOUS.fullmatch(symbol) is not None
    mappings: dict[str, list[SimpleNamespace]] = {}
    parts = []
    for identifier, (name, bars) in enumerate(contracts.items(), start=1):
        if not len(bars):
            continue
        part = np.zeros(len(bars), _OHLCV)
        part["length"] = _OHLCV.itemsize // 4
        part["rtype"] = _RTYPES[schema]
        part["publisher_id"] = 1
        part["instrument_id"] = identifier
        part["ts_event"] = bars.start
        for column in ("open", "high", "low", "close"):
            part[column] = np.round(getattr(bars, column) * PRICE_SCALE)
        part["volume"] = bars.volume
        parts.append(part)
        contract = outright(name, int(bars.start[0]))
        raw = symbol if continuous else f"{contract.name[:-2]}{contract.name[-1]}" if contract else name
        first, last = (_EPOCH + dt.timedelta(int(bars.start[k] // _DAY_NS)) for k in (0, -1))
        interval = SimpleNamespace(start_date=first, end_date=last + dt.timedelta(1), symbol=str(identifier))
        mappings.setdefault(raw, []).append(interval)
    records = np.concatenate(parts)
    records = records[np.argsort(records["ts_event"], kind="stable")]
    stype = SType.CONTINUOUS if continuous else SType.PARENT if symbol else SType.RAW_SYMBOL
    metadata = Metadata(
        dataset=dataset,
        start=int(records["ts_event"][0]),
        end=int(records["ts_event"][-1]) + SCHEMAS[schema],
        stype_in=stype,
        stype_out=SType.INSTRUMENT_ID,
        schema=Schema.from_str(schema),
        symbols=[symbol] if symbol else list(mappings),
        mappings=[SimpleNamespace(raw_symbol=raw, intervals=intervals) for raw, intervals in mappings.items()],
        version=version,
    )
    with open(path, "wb") as file:
        if str(path).endswith(".zst"):
            import zstandard

            with zstandard.ZstdCompressor(write_checksum=True).stream_writer(file) as stream:
                stream.write(bytes(metadata))
                stream.write(records.view(np.uint8).data)
        else:
            file.write(bytes(metadata))
            file.write(records.view(np.uint8).data)


def _open(file: Path) -> DBNStore:
    """Open an OHLCV file, or say in one sentence why it is none."""
    from databento import DBNStore

    with open(file, "rb") as stream:
        head = stream.read(12)
    if not head:
        raise ValueError(f"{file} is empty")
    if _DBZ in head:
        raise ValueError(f"{file} is in the legacy DBZ format, expected DBN: convert it with Databento's dbn command")
    if head.startswith(_ZSTD):
        head = _check_zstd(file)
    if not head.startswith(b"DBN"):
        raise ValueError(f"{file} has no DBN metadata at its start, so it is a fragment or a file of another format")
    try:
        store = DBNStore.from_file(file)
        schema = store.schema
    except Exception as error:  # the library raises whatever its decoder meets
        raise ValueError(f"{file} cannot be read as DBN: {_one_line(error)}") from error
    if schema not in SCHEMAS:
        held = f"holds {schema}" if schema else "holds several kinds of records, as a live capture does"
        raise ValueError(f"{file} {held}, expected bars: {', '.join(SCHEMAS)}")
    return store


def _check_zstd(file: Path) -> bytes:
    """Decompress the whole file, which the library would silently cut at the damage, and return how it begins."""
    import zstandard

    begins, frame = b"", None
    try:
        with open(file, "rb") as stream:
            while data := stream.read(1 << 20):
                while data:
                    frame = frame or zstandard.ZstdDecompressor().decompressobj()
                    text = frame.decompress(data)
                    begins = begins or text[:12]
                    data = b""
                    if frame.eof:
                        data, frame = frame.unused_data, None
    except zstandard.ZstdError as error:
        raise ValueError(f"{file} is corrupt: {_one_line(error)}") from error
    if frame is not None:
        raise ValueError(f"{file} is truncated: its zstd stream has no end")
    return begins


def _records(store: DBNStore, file: Path) -> Iterator[np.ndarray]:
    """The records, some at a time."""
    from databento.common.error import BentoWarning

    parts = None
    while True:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", BentoWarning)
                parts = parts or iter(store.to_ndarray(count=_RECORDS))
                records = next(parts, None)
        except Exception as error:
            raise ValueError(f"{file} is truncated or corrupt: {_one_line(error)}") from error
        if records is None:
            return
        yield records


def _intervals(store: DBNStore) -> dict[int, list[tuple[int, int, str]]]:
    """By instrument id: (from, to, symbol), in UTC nanoseconds, `to` exclusive."""
    found: dict[int, list[tuple[int, int, str]]] = {}
    by_id = store.metadata.stype_out == "raw_symbol"  # then the keys are ids and the intervals hold symbols
    for key, intervals in store.metadata.mappings.items():
        for interval in intervals:
            identifier, raw = (key, interval["symbol"]) if by_id else (interval["symbol"], key)
            if identifier.isdigit():
                begin, end = ((interval[name] - _EPOCH).days * _DAY_NS for name in ("start_date", "end_date"))
                found.setdefault(int(identifier), []).append((begin, end, raw))
    return found


def _groups(identifiers: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each instrument id with the rows that have it, in order."""
    if not len(identifiers):
        return
    order = np.argsort(identifiers, kind="stable")
    edges = np.flatnonzero(np.diff(identifiers[order])) + 1
    for rows in np.split(order, edges):
        yield int(identifiers[rows[0]]), rows


def _wanted(raw: str, symbol: str, near: int) -> str | None:
    """The name under which a raw symbol's rows are kept, None if `symbol` does not ask for them."""
    root = symbol.removesuffix(".FUT")
    continuous = _CONTINUOUS.fullmatch(raw)
    if continuous:
        return raw if symbol == raw or root == continuous[1] else None
    contract = outright(raw, near)
    return contract.name if contract and root in (contract.root, raw, contract.name) else None


def _bars(records: np.ndarray, interval: int) -> Bars:
    start = records["ts_event"].astype(np.int64)
    prices = {}
    for name in ("open", "high", "low", "close"):
        raw = records[name]
        prices[name] = np.where(raw == np.iinfo(np.int64).max, np.nan, raw / PRICE_SCALE)
    return Bars(start=start, ts=start + interval, volume=records["volume"].astype(np.float64), **prices)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
