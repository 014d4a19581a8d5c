"""Writing Databento files (DBN): bars, trades, books and definitions, and live captures.

`write_dbn` writes records of one schema, `write_ohlcv` bars, `write_synthetic` a synthetic market, `write_live` a
capture of many schemas. `ohlcv_records`, `trade_records`, `book_records` and `definition_records` make records from
arrays, `from_books` those of every thinner schema from MBP-10. The layout of a record is the `databento_dbn` library's.

The clock of a record is ``ts_recv``, and ``ts_event``, a bar's start, for OHLCV. Prices are written in units of 1e-9
point, NaN as UNDEF_PRICE.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from fox_env.contracts import Contract, get_contract
from fox_env.data.bars import INTERVALS_NS, Bars
from fox_env.data.dbn import (
    BAR_SCHEMAS,
    BOOK_SCHEMAS,
    CONTINUOUS,
    DEFINITIONS,
    PRICE_SCALE,
    RTYPES,
    SCHEMAS,
    UNDEF_PRICE,
    record_dtype,
)
from fox_env.data.rolls import outright
from fox_env.files import write_atomic

if TYPE_CHECKING:
    from databento_dbn import DBNRecord

    Records = np.ndarray | Iterable[np.ndarray]
    Interval = tuple[int, str | dt.date, str | dt.date]

LAST_OF_EVENT = 130
"""Flags F_LAST and F_PUBLISHER_SPECIFIC, which the last record of a CME event carries."""

_CHUNK = 1 << 18
_DAY_NS = 86_400_000_000_000
_EPOCH = dt.date(1970, 1, 1)
_DISPLAY_FACTOR = 0.01
_SPREAD_TICK = 0.05
_SYMBOL_CHARACTERS = {1: 21, 2: 70, 3: 70}
_LISTED_NS = 5 * 365 * _DAY_NS


def write_dbn(
    path: str | Path,
    schema: str,
    contracts: Mapping[str, Records],
    *,
    symbol: str = "ES.FUT",
    intervals: Mapping[str, Sequence[Interval]] | None = None,
    dataset: str = "GLBX.MDP3",
    version: int = 3,
) -> int:
    """Write records of one schema as one DBN file, whole or not at all; with zstd where the name ends in ``.zst``.

    The contracts' records are merged by their clock, those of one time in the order of `contracts`. Memory holds one
    chunk of each contract. `length`, `rtype` and `instrument_id` are set, every other field is written as it is.

    Args:
        path: the file.
        schema: one of `fox_env.data.dbn.SCHEMAS`.
        contracts: by name, an array of records in the layout of `record_dtype`, or an iterable of such arrays; in
            order of the clock. Outright contracts are written as Databento names them, with one year digit; other
            names, such as those of spreads, as they are.
        symbol: what was asked for, as the metadata note it: a parent symbol, a continuous one, which then stands for
            all contracts by UTC date, or ``""`` for the contracts' own symbols.
        intervals: by name, ``(instrument id, first UTC date, UTC date after the last)`` rows; needed with iterables.
            None numbers the contracts from 1, each over the dates of its records.
        dataset, version: of the metadata; DBN versions 1 to 3.

    Returns:
        Number of records written.

    Raises:
        ValueError: an unknown schema or version, no records, records of another layout or out of order, an iterable
            without intervals, a record outside its intervals, or a symbol too long for the version.
    """
    if schema not in SCHEMAS:
        raise ValueError(f"schema {schema!r} is unknown, expected one of {', '.join(SCHEMAS)}")
    clock, dtype = _clock(schema), record_dtype(schema, version)
    if intervals is not None:
        if missing := [name for name in contracts if not intervals.get(name)]:
            raise ValueError(f"{path}: intervals has no row of {missing[0]!r}")
        days = {name: [(int(i), _day(a), _day(b)) for i, a, b in intervals[name]] for name in contracts}
        ends = [day for rows in days.values() for _, *pair in rows for day in pair]
        span = (min(ends) * _DAY_NS, max(ends) * _DAY_NS) if ends else (0, 0)
    else:
        times = {}
        for name, records in contracts.items():
            if not isinstance(records, np.ndarray):
                raise ValueError(f"{path}: {name!r} comes in parts, so its intervals must be given")
            _check(path, name, records, dtype)
            if len(records):
                times[name] = int(records[clock][0]), int(records[clock][-1]) + BAR_SCHEMAS.get(schema, 1)
        days, span = _number(contracts, times)
    streams = {name: [part] if isinstance(part, np.ndarray) else part for name, part in contracts.items()}
    return _write(path, schema, streams, days, span, symbol=symbol, dataset=dataset, version=version)


def write_ohlcv(
    path: str | Path,
    contracts: Mapping[str, Bars],
    *,
    schema: str = "ohlcv-1m",
    symbol: str = "ES.FUT",
    dataset: str = "GLBX.MDP3",
    version: int = 3,
) -> int:
    """Write bars as one DBN file, compressed with zstd where the name ends in ``.zst``.

    Instruments are numbered from 1. Records are in time order. Starts keep every nanosecond, prices every 1e-9 point,
    volumes are whole numbers; ends are not stored, they follow from the schema.

    Args:
        path: the file.
        contracts: bars by contract name.
        schema: ``ohlcv-1s``, ``ohlcv-1m``, ``ohlcv-1h`` or ``ohlcv-1d``.
        symbol, dataset, version: as `write_dbn` takes them.

    Returns:
        Number of records written.

    Raises:
        ValueError: an unknown schema, no bars, or bars out of order.
    """
    if schema not in BAR_SCHEMAS:
        raise ValueError(f"schema {schema!r} is unknown, expected one of {', '.join(BAR_SCHEMAS)}")
    if not any(len(bars) for bars in contracts.values()):
        raise ValueError(f"{path}: there are no bars to write")
    streams = {name: _bar_chunks(schema, bars) for name, bars in contracts.items()}
    times = {
        name: (int(bars.start[0]), int(bars.start[-1]) + BAR_SCHEMAS[schema])
        for name, bars in contracts.items()
        if len(bars)
    }
    days, span = _number(contracts, times)
    return _write(path, schema, streams, days, span, symbol=symbol, dataset=dataset, version=version)


def write_synthetic(
    path: str | Path,
    kind: str,
    bars: int,
    seed: int = 0,
    *,
    schema: str = "ohlcv-1m",
    interval: str = "1m",
    start: str | None = None,
    contracts: bool = False,
    version: int = 3,
) -> int:
    """Write a synthetic market as one DBN file, in memory that holds the bars and one chunk of records.

    Args:
        path: the file.
        kind, bars, seed, start: as `fox_env.data.synthetic.synthetic_bars` takes them; None for its own start.
        schema: one of `fox_env.data.dbn.SCHEMAS` but ``definition``.
        interval: length of the bars that the records make up; an OHLCV schema has its own.
        contracts: write a chain of quarterly contracts and the spreads between them, as ``ES.FUT``, instead of one
            series as ``ES.c.0``.
        version: DBN version 1 to 3.

    Returns:
        Number of records written.

    Raises:
        ValueError: as `synthetic_bars` and `write_dbn`.
    """
    from fox_env.data import synthetic

    if schema not in SCHEMAS or schema == DEFINITIONS:
        raise ValueError(f"schema {schema!r} cannot be made, expected one of {', '.join(SCHEMAS[:-1])}")
    interval = schema.removeprefix("ohlcv-") if schema in BAR_SCHEMAS else interval
    arguments = {"interval": interval, "start": start or synthetic.START_DATE}
    drawn = synthetic.synthetic_bars(kind, bars, seed, **arguments).bars
    made = synthetic.synthetic_contracts(drawn, spreads=True) if contracts else {"ES": drawn}
    symbol = "ES.FUT" if contracts else "ES.c.0"
    if schema in BAR_SCHEMAS:
        return write_ohlcv(path, made, schema=schema, symbol=symbol, version=version)
    intervals = {
        # A sampled quote is stamped at the end of its interval, which may be the next midnight.
        name: [(k, _date(int(own.start[0]) // _DAY_NS), _date(int(own.ts[-1]) // _DAY_NS + 1))]
        for k, (name, own) in enumerate(made.items(), start=1)
    }
    if contracts:
        draw = synthetic.ticks_from_bars if schema == "trades" else synthetic.books_from_bars
        streams = {name: draw(own, seed + k) for k, (name, own) in enumerate(made.items())}
    else:
        del drawn, made  # they are drawn again
        draw = synthetic.synthetic_ticks if schema == "trades" else synthetic.synthetic_books
        streams = {"ES": draw(kind, bars, seed, **arguments)}
    if schema not in ("trades", "mbp-10"):
        streams = {name: from_books(schema, chunks) for name, chunks in streams.items()}
    return write_dbn(path, schema, streams, symbol=symbol, intervals=intervals, version=version)


def write_live(
    path: str | Path, symbols: Mapping[int, str], *records: np.ndarray, messages: Iterable[DBNRecord] = ()
) -> int:
    """Write a live capture: DBN version 3 without a schema, records of many schemas in the order of their arrival.

    It begins with a symbol mapping message of each instrument. A record arrives at its clock, a bar at its end.

    Args:
        path: the file, compressed with zstd where the name ends in ``.zst``.
        symbols: raw symbol by instrument id.
        records: arrays of version 3 with `instrument_id`, `length` and `rtype` set, as the makers here set them.
        messages: `databento_dbn` records of other kinds, such as ``SystemMsg``, ``ErrorMsg`` or a later
            ``SymbolMappingMsg``, which arrive at their ``ts_event``.

    Returns:
        Number of records written, messages included.
    """
    from databento_dbn import UNDEF_TIMESTAMP, Metadata, SType, SymbolMappingMsg

    bar_ns = {RTYPES[schema]: length for schema, length in BAR_SCHEMAS.items()}
    arrivals = [(int(message.ts_event), bytes(message)) for message in messages]
    for part in records:
        clock = "ts_recv" if "ts_recv" in part.dtype.names else "ts_event"
        arrivals += [(int(row[clock]) + bar_ns.get(int(row["rtype"]), 0), row.tobytes()) for row in part]
    arrivals.sort(key=lambda arrival: arrival[0])
    begin = arrivals[0][0] if arrivals else 0
    raw = SType.RAW_SYMBOL
    mappings = [
        bytes(SymbolMappingMsg(0, identifier, begin, raw, name, raw, name, UNDEF_TIMESTAMP, UNDEF_TIMESTAMP))
        for identifier, name in symbols.items()
    ]
    metadata = Metadata(
        dataset="GLBX.MDP3", start=begin, end=None, stype_in=None, stype_out=SType.INSTRUMENT_ID, schema=None,
        symbols=[], mappings=[], version=3,
    )  # fmt: skip
    _save(path, iter([bytes(metadata), *mappings, *(record for _, record in arrivals)]))
    return len(mappings) + len(arrivals)


def new_records(schema: str, count: int, *, instrument_id: int = 0, version: int = 3) -> np.ndarray:
    """`count` records, zero but for their header: length, rtype, publisher 1 and the instrument id."""
    records = np.zeros(count, record_dtype(schema, version))
    records["length"] = records.itemsize // 4
    records["rtype"] = RTYPES[schema]
    records["publisher_id"] = 1
    records["instrument_id"] = instrument_id
    return records


def ohlcv_records(schema: str, bars: Bars, *, instrument_id: int = 0) -> np.ndarray:
    """Records of T bars; a NaN price is written as UNDEF_PRICE."""
    records = new_records(schema, len(bars), instrument_id=instrument_id)
    records["ts_event"] = bars.start
    for column in ("open", "high", "low", "close"):
        records[column] = _fixed(getattr(bars, column))
    records["volume"] = bars.volume
    return records


def trade_records(
    ts_recv: np.ndarray,
    price: np.ndarray,
    size: np.ndarray,
    side: np.ndarray | bytes,
    *,
    ts_event: np.ndarray | None = None,
    sequence: np.ndarray | int = 0,
    flags: np.ndarray | int = 0,
    instrument_id: int = 0,
) -> np.ndarray:
    """Records of T trades.

    Args:
        ts_recv: int64 [T], UTC nanoseconds.
        price: float64 [T], points.
        size: [T], contracts.
        side: of the aggressor, S1 [T] or one byte: ``b"B"`` a buyer, ``b"A"`` a seller, ``b"N"`` unknown.
        ts_event: int64 [T], the exchange's time; None for `ts_recv`.
        sequence, flags, instrument_id: as the record has them.
    """
    records = new_records("trades", len(ts_recv), instrument_id=instrument_id)
    _fill_message(records, ts_recv, ts_event, price, size, side, flags, sequence)
    records["action"] = b"T"
    return records


def book_records(
    schema: str,
    ts_recv: np.ndarray,
    bid: np.ndarray,
    ask: np.ndarray,
    bid_size: np.ndarray,
    ask_size: np.ndarray,
    *,
    action: np.ndarray | bytes = b"A",
    side: np.ndarray | bytes = b"N",
    price: np.ndarray | float = np.nan,
    size: np.ndarray | int = 0,
    depth: np.ndarray | int = 0,
    ts_event: np.ndarray | None = None,
    sequence: np.ndarray | int = 0,
    flags: np.ndarray | int = LAST_OF_EVENT,
    instrument_id: int = 0,
) -> np.ndarray:
    """Records of T books after, and for trades before, an event.

    Args:
        schema: ``mbp-10``, ``mbp-1``, ``tbbo``, ``bbo-1s`` or ``bbo-1m``; the last two have neither action nor depth.
        ts_recv: int64 [T], UTC nanoseconds.
        bid, ask: float64 [T] or [T, L], points, NaN for an empty level; levels that are not given are empty.
        bid_size, ask_size: [T] or [T, L], contracts; a level has one order where its size is not zero.
        action, side, price, size, depth: of the event: an order added (A), modified (M), cancelled (C), the book
            cleared (R) or a trade (T); ``bbo`` has the last trade's there.
        ts_event: int64 [T], the exchange's time; None for `ts_recv`.
        sequence, flags, instrument_id: as the record has them.

    Raises:
        ValueError: another schema, or more levels than it has.
    """
    if schema not in BOOK_SCHEMAS:
        raise ValueError(f"schema {schema!r} holds no books, expected one of {', '.join(BOOK_SCHEMAS)}")
    records = new_records(schema, len(ts_recv), instrument_id=instrument_id)
    _fill_message(records, ts_recv, ts_event, price, size, side, flags, sequence)
    if "action" in records.dtype.names:
        records["action"], records["depth"] = action, depth
    levels = book_levels(records)
    levels["bid_px"] = levels["ask_px"] = UNDEF_PRICE
    for own, prices, sizes in (("bid", bid, bid_size), ("ask", ask, ask_size)):
        prices, sizes = (np.asarray(column).reshape(len(records), -1) for column in (prices, sizes))
        given = slice(prices.shape[1])
        if given.stop > levels.shape[1]:
            raise ValueError(f"{own} has {given.stop} levels, expected at most the {levels.shape[1]} of {schema}")
        levels[f"{own}_px"][:, given] = _fixed(prices)
        levels[f"{own}_sz"][:, given] = sizes
        levels[f"{own}_ct"][:, given] = sizes > 0
    return records


def book_levels(records: np.ndarray) -> np.ndarray:
    """The levels of T book records as one array [T, L] with fields bid_px, ask_px, bid_sz, ask_sz, bid_ct, ask_ct.

    It is a view: writing to it writes to the records.
    """
    level = np.dtype(
        [
            ("bid_px", "<i8"),
            ("ask_px", "<i8"),
            ("bid_sz", "<u4"),
            ("ask_sz", "<u4"),
            ("bid_ct", "<u4"),
            ("ask_ct", "<u4"),
        ]
    )
    first = records.dtype.fields["bid_px_00"][1]
    shape = len(records), (records.itemsize - first) // level.itemsize
    return np.ndarray(shape, level, records, first, (records.itemsize, level.itemsize))


def from_books(schema: str, books: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """Records of a thinner schema from MBP-10 records of one instrument, chunk by chunk.

    ``trades`` and ``tbbo`` keep the trades, ``mbp-1`` what touches the first level. ``bbo-1s`` and ``bbo-1m`` keep the
    last book of each interval that has a record, stamped at the interval's end, with the last trade before it.

    Args:
        schema: ``trades``, ``tbbo``, ``mbp-1``, ``bbo-1s``, ``bbo-1m`` or ``mbp-10``.
        books: MBP-10 records in order of ``ts_recv``.
    """
    if schema.startswith("bbo-"):
        yield from _sampled(schema, books)
        return
    for chunk in books:
        kept = chunk
        if schema in ("trades", "tbbo"):
            kept = chunk[chunk["action"] == b"T"]
        elif schema == "mbp-1":
            kept = chunk[chunk["depth"] == 0]
        yield _convert(schema, kept)


def definition_records(
    contract: str | Contract, names: Sequence[str], ts_recv: np.ndarray, *, version: int = 3
) -> dict[str, np.ndarray]:
    """Instrument definitions of futures and their calendar spreads, by name, as `write_dbn` takes them.

    As at CME, the dollars a point are in `unit_of_measure_qty`, while `contract_multiplier` is undefined.

    Args:
        contract: terms of the outright contracts, or their root symbol.
        names: contracts such as ``"ESH24"``, or ``"ESH4-ESM4"`` for a spread.
        ts_recv: int64 [T], UTC nanoseconds, each time at which every definition is sent.
        version: DBN version, which decides the layout.

    Raises:
        ValueError: a name that is neither a quarterly contract nor a spread of two.
    """
    contract, ts_recv = get_contract(contract), np.asarray(ts_recv, np.int64)
    near = int(ts_recv[0])
    undefined = ("high_limit_price", "low_limit_price", "trading_reference_price", "price_ratio", "strike_price")
    made = {}
    for name in names:
        legs = [outright(leg, near) for leg in name.split("-")]
        if None in legs or len(legs) > 2:
            raise ValueError(f"{name!r} is neither a quarterly contract, such as 'ESH24', nor a spread, as 'ESH4-ESM4'")
        first, is_spread = legs[0], len(legs) == 2
        month = int(np.datetime64(first.expiry, "ns").astype("datetime64[M]").astype(np.int64))  # since January 1970
        fields = dict.fromkeys((*undefined, "leg_price", "leg_delta"), UNDEF_PRICE)
        fields |= dict.fromkeys(
            ("contract_multiplier", "decay_quantity", "original_contract_size"), np.iinfo(np.int32).max
        )
        fields |= dict.fromkeys(
            (
                "md_security_trading_status",
                "main_fraction",
                "price_display_format",
                "sub_fraction",
                "maturity_day",
                "maturity_week",
                "tick_rule",
            ),
            255,
        )
        fields |= {
            "ts_event": ts_recv,
            "ts_recv": ts_recv,
            "raw_symbol": name if is_spread else _raw(name, near),
            "asset": contract.name,
            "group": contract.name,
            "exchange": "XCME",
            "currency": "USD",
            "security_type": "FUT",
            "instrument_class": "S" if is_spread else "F",
            "cfi": "FMIXSX" if is_spread else "FFIXSX",
            "secsubtype": "EQ" if is_spread else "",
            "security_update_action": "A",
            "user_defined_instrument": "N",
            "match_algorithm": "F",
            "leg_side": "N",
            "leg_instrument_class": " ",
            "min_price_increment": _fixed(_SPREAD_TICK if is_spread else contract.tick),
            "display_factor": _fixed(_DISPLAY_FACTOR),
            "max_price_variation": _fixed(1.5 if is_spread else 6.0),
            "unit_of_measure": "CTRCT" if is_spread else "IPNT",
            "unit_of_measure_qty": _fixed(np.nan if is_spread else contract.multiplier),
            "min_price_increment_amount": _fixed(np.nan if is_spread else contract.tick_usd * _DISPLAY_FACTOR),
            "expiration": first.expiry,
            "activation": first.expiry - _LISTED_NS,
            "maturity_year": 1970 + month // 12,
            "maturity_month": month % 12 + 1,
            "market_depth": 10,
            "market_segment_id": 64,
            "max_trade_vol": 3_000,
            "min_trade_vol": 1,
            "appl_id": 310,
            "underlying_product": 5,
            "decay_start_date": np.iinfo(np.uint16).max,
            "contract_multiplier_unit": 127,
            "flow_schedule_type": 127,
        }
        records = new_records(DEFINITIONS, len(ts_recv), version=version)
        for field, value in fields.items():
            if field in records.dtype.names:
                records[field] = value
        made[name] = records
    return made


def _fill_message(
    records: np.ndarray,
    ts_recv: np.ndarray,
    ts_event: np.ndarray | None,
    price: np.ndarray | float,
    size: np.ndarray | int,
    side: np.ndarray | bytes,
    flags: np.ndarray | int,
    sequence: np.ndarray | int,
) -> None:
    """The fields that trades and books share."""
    records["ts_recv"] = ts_recv
    records["ts_event"] = ts_recv if ts_event is None else ts_event
    records["price"] = _fixed(price)
    records["size"] = size
    records["side"] = side
    records["flags"] = flags
    records["sequence"] = sequence


def _fixed(price: np.ndarray | float) -> np.ndarray:
    """Points as int64 units of 1e-9, UNDEF_PRICE for NaN."""
    price = np.asarray(price, np.float64)
    known = ~np.isnan(price)
    return np.where(known, np.rint(np.where(known, price, 0.0) * PRICE_SCALE).astype(np.int64), UNDEF_PRICE)


def _convert(schema: str, records: np.ndarray) -> np.ndarray:
    """Records in the layout of another schema: the fields that both have."""
    made = new_records(schema, len(records))
    for name in made.dtype.names:
        if name in records.dtype.names and name not in ("length", "rtype"):
            made[name] = records[name]
    return made


def _sampled(schema: str, books: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
    """The last book of each interval, and the last trade."""
    length = INTERVALS_NS[schema.removeprefix("bbo-")]
    held = np.empty(0, record_dtype("mbp-10"))  # the last trade and the last record, of an interval not yet over
    done = 0
    for chunk in books:
        rows = np.concatenate([held, chunk])
        if not len(rows):
            continue
        ends = (rows["ts_recv"] // length + 1).astype(np.int64)
        is_trade = rows["action"] == b"T"
        trade = np.maximum.accumulate(np.where(is_trade, np.arange(len(rows)), -1))
        last = np.flatnonzero(np.diff(ends))
        last = last[ends[last] > done]
        yield _quotes(schema, rows, last, trade[last], ends[last] * length)
        done = int(ends[last[-1]]) if len(last) else done
        held = rows[sorted({int(trade[-1]), len(rows) - 1} - {-1})]
    if len(held):
        trade = 0 if held["action"][0] == b"T" else -1
        end = int(held["ts_recv"][-1]) // length + 1
        yield _quotes(schema, held, np.array([len(held) - 1]), np.array([trade]), np.array([end * length]))


def _quotes(schema: str, rows: np.ndarray, at: np.ndarray, trade: np.ndarray, stamp: np.ndarray) -> np.ndarray:
    """Sampled quotes: the books of rows `at`, the last trades of rows `trade`, -1 for none."""
    made = _convert(schema, rows[at])
    made["ts_recv"] = stamp
    traded = trade >= 0
    for name, none in (("ts_event", np.iinfo(np.uint64).max), ("price", UNDEF_PRICE), ("size", 0), ("side", b"N")):
        made[name] = np.where(traded, rows[name][trade], none)
    return made


def _bar_chunks(schema: str, bars: Bars) -> Iterator[np.ndarray]:
    for first in range(0, len(bars), _CHUNK):
        yield ohlcv_records(schema, bars.take(slice(first, first + _CHUNK)))


def _clock(schema: str) -> str:
    return "ts_event" if schema in BAR_SCHEMAS else "ts_recv"


def _day(date: str | dt.date) -> int:
    return int(np.datetime64(date, "D").astype(np.int64))


def _date(day: int) -> dt.date:
    return _EPOCH + dt.timedelta(day)


def _raw(name: str, near: int) -> str:
    """A contract's name as Databento writes it, with one year digit; any other name as it is."""
    contract = outright(name, near)
    return f"{contract.name[:-2]}{contract.name[-1]}" if contract else name


def _number(
    contracts: Iterable[str], times: Mapping[str, tuple[int, int]]
) -> tuple[dict[str, list[tuple[int, int, int]]], tuple[int, int]]:
    """Ids from 1 over the days of each contract's records, and the time from the first record to the last one's end."""
    days = {
        name: [(k, times[name][0] // _DAY_NS, (times[name][1] - 1) // _DAY_NS + 1)]
        for k, name in enumerate(contracts, start=1)
        if name in times
    }
    span = (min(a for a, _ in times.values()), max(b for _, b in times.values())) if times else (0, 0)
    return days, span


def _write(
    path: str | Path,
    schema: str,
    streams: Mapping[str, Iterable[np.ndarray]],
    days: Mapping[str, list[tuple[int, int, int]]],
    span: tuple[int, int],
    *,
    symbol: str,
    dataset: str,
    version: int,
) -> int:
    """Metadata and merged records; `days` has (instrument id, first day, day after the last) by contract."""
    from databento_dbn import Metadata, Schema, SType

    continuous = CONTINUOUS.fullmatch(symbol) is not None
    mappings: dict[str, list[SimpleNamespace]] = {}
    for name, rows in days.items():
        raw = symbol if continuous else _raw(name, rows[0][1] * _DAY_NS)
        for identifier, first, end in rows:
            interval = SimpleNamespace(start_date=_date(first), end_date=_date(end), symbol=str(identifier))
            mappings.setdefault(raw, []).append(interval)
    longest, limit = max([symbol, *mappings], key=len), _SYMBOL_CHARACTERS[version]
    if len(longest) > limit:
        raise ValueError(
            f"{path}: symbol {longest!r} is too long, expected at most {limit} characters in DBN {version}"
        )
    metadata = Metadata(
        dataset=dataset,
        start=span[0],
        end=span[1],
        stype_in=SType.CONTINUOUS if continuous else SType.PARENT if symbol else SType.RAW_SYMBOL,
        stype_out=SType.INSTRUMENT_ID,
        schema=Schema.from_str(schema),
        symbols=[symbol] if symbol else list(mappings),
        mappings=[SimpleNamespace(raw_symbol=raw, intervals=intervals) for raw, intervals in mappings.items()],
        version=version,
    )
    count = 0

    def parts() -> Iterator[bytes | memoryview]:
        nonlocal count
        yield bytes(metadata)
        own = [_numbered(path, schema, name, stream, days.get(name, []), version) for name, stream in streams.items()]
        for records in _merged(own, _clock(schema)):
            count += len(records)
            yield records.view(np.uint8).data
        if not count:
            raise ValueError(f"{path}: there are no records to write")

    _save(path, parts())
    return count


def _numbered(
    path: str | Path,
    schema: str,
    name: str,
    stream: Iterable[np.ndarray],
    days: list[tuple[int, int, int]],
    version: int,
) -> Iterator[np.ndarray]:
    """The records of one contract, checked, with their header."""
    clock, dtype, rtype = _clock(schema), record_dtype(schema, version), RTYPES[schema]
    before = 0
    for part in stream:
        _check(path, name, part, dtype)
        if not len(part):
            continue
        time = part[clock].astype(np.int64)
        if time[0] < before or (np.diff(time) < 0).any():
            raise ValueError(f"{path}: the records of {name!r} are out of order, expected them by {clock}")
        before = int(time[-1])
        records = np.array(part)
        records["length"], records["rtype"] = dtype.itemsize // 4, rtype
        inside = np.zeros(len(records), bool)
        for identifier, first, end in days:
            own = (time >= first * _DAY_NS) & (time < end * _DAY_NS)
            records["instrument_id"][own] = identifier
            inside |= own
        if not inside.all():
            date = np.datetime64(int(time[~inside][0]), "ns").astype("datetime64[D]")
            raise ValueError(f"{path}: {name!r} has a record on {date}, outside its intervals")
        yield records


def _check(path: str | Path, name: str, records: np.ndarray, dtype: np.dtype) -> None:
    if records.dtype != dtype:
        raise ValueError(
            f"{path}: the records of {name!r} have {records.itemsize} bytes each, expected the layout of record_dtype"
        )


def _merged(streams: Sequence[Iterator[np.ndarray]], clock: str) -> Iterator[np.ndarray]:
    """Records of several streams in order of time, those of one time in the order of the streams within a chunk."""
    heads = [(stream, head) for stream in streams if (head := next(stream, None)) is not None]
    while heads:
        if len(heads) == 1:
            stream, head = heads[0]
            yield head
            yield from stream
            return
        until = min(head[clock][-1] for _, head in heads)
        cuts = [int(np.searchsorted(head[clock], until, side="right")) for _, head in heads]
        ready = np.concatenate([head[:cut] for (_, head), cut in zip(heads, cuts, strict=True)])
        yield ready[np.argsort(ready[clock], kind="stable")]
        rest = [
            (stream, head[cut:] if cut < len(head) else next(stream, None))
            for (stream, head), cut in zip(heads, cuts, strict=True)
        ]
        heads = [(stream, head) for stream, head in rest if head is not None]


def _save(path: str | Path, parts: Iterator[bytes | memoryview]) -> None:
    """Write the parts one after the other, through zstd where the name asks for it."""

    def write(partial: Path) -> None:
        with open(partial, "wb") as file:
            if str(path).endswith(".zst"):
                import zstandard

                with zstandard.ZstdCompressor(write_checksum=True).stream_writer(file) as stream:
                    _copy(stream, parts)
            else:
                _copy(file, parts)

    write_atomic(path, write)


def _copy(file: BinaryIO, parts: Iterator[bytes | memoryview]) -> None:
    for part in parts:
        file.write(part)
