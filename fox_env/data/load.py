"""From files to a chain of front contracts: recognize, read, repair, resample, roll, add order flow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np

from fox_env.contracts import CONTRACTS, Contract, get_contract
from fox_env.data import clean, dbn, flow, rolls, sources, tabular
from fox_env.data.bars import INTERVALS_NS, Bars, Chunk, bar_size, concatenate, resample
from fox_env.data.calendar import HOURS, sessions, trade_dates
from fox_env.data.dbn import DbnFile
from fox_env.data.features import Feature
from fox_env.data.rolls import Segment, outright
from fox_env.market import Market, build_market

_DAY_NS = 86_400_000_000_000
_MINUTE_NS = 60_000_000_000


def load_segments(
    path: str | Path,
    *,
    symbol: str = "ES",
    bars: str | None = None,
    tz: str | None = None,
    stamp: str | None = None,
    columns: Mapping[str, str | int] | Sequence[str] | None = None,
    max_bars: int = 0,
    roll: str = "volume",
    hours: str = "all",
    mbp10: str | Path | None = None,
    trades: str | Path | None = None,
    definitions: str | Path | None = None,
    contract: Contract | None = None,
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
    market can have (``impossible_returns``, see `IMPOSSIBLE_STEP` and `IMPOSSIBLE_DAY`). Contradicting, overlapping or
    misaligned bars or impossible returns above `REFUSED_SHARE` of all bars are an error. What happens to trades is
    counted under ``trades_…``, see `ticks.TradeBars`, and to books under ``book_…``, see `orderflow.BookFlow`; of files
    that overlap, trades and books that an earlier file had in time already are dropped (``trades_overlapping``,
    ``book_overlapping``).

    Args:
        path: a file, a glob, or a directory, in which a sub-directory named as `symbol` or its parent symbol comes
            first. DBN of one or several schemas, text (.csv, .txt, .tsv), JSON or Parquet.
        symbol: root (``"ES"``), parent (``"ES.FUT"``), contract (``"ESH4"``) or continuous symbol (``"ES.c.0"``).
        bars: length of the bars, one of `INTERVALS_NS`, or ``"vol:N"`` for bars of N contracts, which are made of
            trades; None leaves bars as they are. Time bars up to one hour start at multiples of their length since 1970
            UTC, daily ones with the session. A last bar that is not over by the end of the data is dropped
            (``bars_unfinished``).
        tz, stamp, columns: of text, JSON and Parquet files, see `tabular.read_tabular`.
        max_bars: keep the first that many front bars; 0 keeps all.
        roll: see `rolls.chain`.
        hours: ``"all"``, or ``"rth"`` for 08:30 to 15:00 in Chicago.
        mbp10: DBN of books of the same contracts, MBP-10 or another of `dbn.BOOK_SCHEMAS`: order flow and the quotes at
            each bar's close. Sessions without them are left out (``bars_without_book``); bars that no record of the
            book reaches have none (``bars_book_stale``). Without `mbp10`, books among the files of `path` serve.
        trades: DBN of trades of the same contracts, for the aggressors' volumes, or for the bars where `path` has none
            of which they can be made. Sessions without them are left out (``bars_without_trades``). Without `trades`,
            the trades among the other files serve if every session has some.
        definitions: DBN of definitions, to be compared with `contract`; those among the files of `path` are too.
        contract: the terms; None takes those of the root that `symbol` begins with, where Fox knows it.

    Returns:
        The segments in time order, the length of a bar in nanoseconds (0 for volume bars), `quality` (counts, and texts
        under ``_first``), and the provenance.

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
    target, size = (None, 0) if bars is None else bar_size(bars)
    contract = contract or CONTRACTS.get(sources.symbol_root(symbol))
    paths, kind = sources.find_files(path, symbol)
    quality: dict[str, int | str] = {"files": len(paths)}
    main = sources.open_all(paths, quality) if kind == "dbn" else []
    further = {
        name: sources.open_all(sources.find_dbn(place, symbol, name), quality)
        for name, place in (("mbp10", mbp10), ("trades", trades), ("definitions", definitions))
        if place is not None
    }
    ticks = sources.distinct([*further.get("trades", ()), *main, *further.get("mbp10", ())])
    books = further.get("mbp10") or main
    _check_terms(main, further.get("definitions"), contract, symbol, quality)

    source = sources.price_source(path, main, ticks, kind, target, size, bars)
    if source in dbn.TRADE_SCHEMAS:
        interval = target if target <= INTERVALS_NS["1h"] else _MINUTE_NS
        contracts, end = _bars_of_trades(path, ticks, source, interval, size, symbol, contract, hours, quality)
        stamp = None
    else:
        if source is not None:
            interval = dbn.BAR_SCHEMAS[source]
            chunks: Iterable[Chunk] = dbn.read_ohlcv(
                sources.holding(main, source), source, symbol=symbol, quality=quality
            )
        else:
            table = tabular.read_tabular(
                paths, symbol=symbol, tz=tz, stamp=stamp, columns=columns, bars=target, quality=quality
            )
            chunks, interval, stamp = table.chunks, table.length, table.stamp
            source = f"{interval / 1e9:g} s"
        if target is not None and target % interval:
            raise ValueError(f"{path} holds bars of {interval / 1e9:g} s, of which {bars} bars cannot be made")
        contracts = _clean_all(path, chunks, symbol, target or interval, contract, hours, quality)
        end = max(int(own.ts[-1]) for own in contracts.values())
    target = interval if target is None else target
    total = sum(len(own) for own in contracts.values())
    clean.refuse_corrupt(str(path), total, bars, quality)

    quality.setdefault("bars_unfinished", 0)
    if target != interval:
        contracts = {name: _resample(own, target, end, hours, quality) for name, own in contracts.items()}
        contracts = {name: own for name, own in contracts.items() if len(own)}
        if not contracts:
            raise ValueError(f"{path} holds no finished {bars} bar of {symbol!r}")
    if all(outright(name) for name in contracts):
        try:
            segments = rolls.chain(contracts, rule=roll, quality=quality)
        except ValueError as error:  # all rows come after their contract's expiry
            raise ValueError(f"{path}: {error}") from None
    elif len(contracts) > 1 and any(outright(name) for name in contracts):
        raise ValueError(f"{path} holds single contracts beside a continuous series: {', '.join(sorted(contracts))}")
    else:
        segments = rolls.follow(_runs(contracts), quality)
    del contracts

    identity = _identity(main)
    flows: dict[str, str] = {}
    tape = further.get("trades") or sources.distinct([*main, *further.get("mbp10", ())])
    for name, given, schema, files in (
        ("trades", trades, sources.best(dbn.TRADE_SCHEMAS, tape, trades), tape),
        ("mbp10", mbp10, sources.best(dbn.BOOK_SCHEMAS, books, mbp10), books),
    ):
        if schema is None or (name == "trades" and source in dbn.TRADE_SCHEMAS):
            continue  # bars of trades have the aggressors' volumes already
        add = flow.add_trades if name == "trades" else partial(flow.add_books, contract=contract, hours=hours)
        joined, lost = add(segments, sources.holding(files, schema), schema, identity, quality=quality)
        kept = sum(len(segment.bars) - segment.first for segment in joined)
        if given is None and schema != source and (lost or not kept):
            # Nobody asked for order flow: it must not cost bars unsaid.
            if kept and name == "mbp10":
                raise ValueError(
                    f"{path} holds {schema} for the sessions of {kept} of {kept + lost} bars: give mbp10= to keep "
                    "these alone, or the path of the bars alone"
                )
            continue
        if not kept:
            names = ", ".join(dict.fromkeys(segment.instrument for segment in segments))
            where, what = path if given is None else f"{name} {given}", "trades" if name == "trades" else "book"
            raise ValueError(f"{where} holds no {what} of {names} in the sessions that have bars")
        quality["bars_without_trades" if name == "trades" else "bars_without_book"] = lost
        segments = joined
        flows[name] = schema
    segments = _first_bars(segments, max_bars)
    provenance = {
        "path": str(path), "files": [file.name for file in paths], "format": kind, "schema": source,
        "order_flow": flows, "mbp10": mbp10 and str(mbp10), "trades": trades and str(trades),
        "definitions": definitions and str(definitions), "symbol": symbol, "bars": bars or source, "tz": tz,
        "stamp": stamp, "roll": roll, "hours": hours, "max_bars": max_bars,
        "contracts": list(dict.fromkeys(segment.instrument for segment in segments)),
    }  # fmt: skip
    return segments, target, quality, provenance


def _check_terms(
    main: Sequence[DbnFile],
    given: Sequence[DbnFile] | None,
    contract: Contract | None,
    symbol: str,
    quality: dict[str, int | str],
) -> None:
    """Compare the definitions that there are with the contract's terms.

    Raises:
        ValueError: they differ, or those that were given are of something else.
    """
    if given is not None:
        sources.best((dbn.DEFINITIONS,), given, dbn.where([file.path for file in given]))
    files = sources.holding(sources.distinct([*main, *(given or ())]), dbn.DEFINITIONS)
    if not files or contract is None:
        return
    # Who plays ES with the terms of MES means to; terms of one's own are of what the symbol asks for.
    asset = contract.name if contract.name in CONTRACTS else sources.symbol_root(symbol)
    compared = dbn.check_definitions(files, contract, asset)
    if given is not None and not compared:
        raise ValueError(f"{dbn.where([file.path for file in given])} holds no definition of a {asset} future")
    quality["definitions"] = compared


def _identity(files: Sequence[DbnFile]) -> dbn.Intervals:
    """Which instrument id was which symbol, in all files together."""
    found: dbn.Intervals = {}
    for file in files:
        for identifier, intervals in file.intervals.items():
            found.setdefault(identifier, []).extend(intervals)
    return found


def _clean_all(
    path: str | Path, chunks: Iterable[Chunk], symbol: str, target: int, contract: Contract | None, hours: str,
    quality: dict[str, int | str],
) -> dict[str, Bars]:  # fmt: skip
    """Repaired bars by contract."""
    by_name: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        by_name.setdefault(chunk.contract, []).append(chunk)
    contracts: dict[str, Bars] = {}
    for name in list(by_name):
        try:
            own = clean.clean(
                by_name.pop(name), tick=contract and contract.tick, hours=hours, target=target, quality=quality
            )
        except ValueError as error:  # the calendar does not know the dates
            raise ValueError(f"{path}: {error}") from error
        if len(own):
            contracts[name] = own
    if not contracts:
        raise ValueError(f"{path} holds no usable bar of {symbol!r} in trading hours")
    return contracts


def _bars_of_trades(
    path: str | Path, files: Sequence[DbnFile], schema: str, interval: int, size: int, symbol: str,
    contract: Contract | None, hours: str, quality: dict[str, int | str],
) -> tuple[dict[str, Bars], int]:  # fmt: skip
    """Bars by contract, and where the data end."""
    from fox_env.data.ticks import TradeBars

    files = sources.holding(files, schema)
    counts, seen = Counter(read=0, spreads=0, other_symbols=0, unmapped=0), Counter()
    makers: dict[str, TradeBars] = {}
    for piece in flow.forward(files, schema, dbn.wanted(symbol), counts, seen):
        if piece.name not in makers:
            makers[piece.name] = TradeBars(
                interval=interval, contracts=size, tick=contract and contract.tick, hours=hours
            )
        try:
            makers[piece.name].add(piece.records)
        except ValueError as error:  # the calendar does not know the dates
            raise ValueError(f"{piece.file.path}: {error}") from error
    dbn.check_found(files, makers, symbol, seen, "trades")
    counts["read"] = 0  # of books, not only trades
    end = max(maker.last for maker in makers.values()) + 1
    contracts: dict[str, Bars] = {}
    unfinished = 0
    for name in list(makers):
        maker = makers.pop(name)
        counts.update(maker.counts)
        own, cut = maker.finish(end)
        unfinished += cut
        if len(own):
            contracts[name] = own
            clean.check_returns(name, own, quality)
    dbn.add_counts(quality, "trades", counts)
    quality["bars_unfinished"] = unfinished
    flow.refuse_unsorted(path, "trades", int(quality["trades_read"]), int(quality["trades_unsorted"]))
    if not contracts:
        raise ValueError(f"{path} holds no trades of {symbol!r} in trading hours that make up a bar")
    return contracts, end


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
    stamp: str | None = None,
    columns: Mapping[str, str | int] | Sequence[str] | None = None,
    max_bars: int = 0,
    roll: str = "volume",
    hours: str = "all",
    mbp10: str | Path | None = None,
    trades: str | Path | None = None,
    definitions: str | Path | None = None,
    contract: str | Contract | None = None,
    features: Sequence[str | Feature] | None = None,
    drop: Sequence[str] = (),
    cache: str | Path | None = None,
) -> Market:
    """A market from files: DBN, text, JSON or Parquet.

    Args:
        path, symbol, bars, tz, stamp, columns, max_bars, roll, hours, mbp10, trades, definitions: as `load_segments`
            takes them, which says what is dropped and repaired; ``market.quality`` counts it.
        contract: a `Contract` or its name; None takes the one that `symbol` begins with.
        features, drop: as `Market.from_bars` takes them.
        cache: folder of built markets. One that was built of the same files with the same arguments is opened, as
            memory maps, else the market is built and kept there.

    Raises:
        FileNotFoundError: nothing is there.
        ValueError: bad input, an unknown contract, or too few bars, in one sentence.
    """
    root = get_contract(sources.symbol_root(symbol) if contract is None else contract)
    options = {
        "symbol": symbol, "bars": bars, "tz": tz, "stamp": stamp, "columns": columns, "max_bars": max_bars,
        "roll": roll, "hours": hours, "mbp10": mbp10, "trades": trades, "definitions": definitions,
    }  # fmt: skip

    def build() -> Market:
        segments, interval, quality, provenance = load_segments(path, contract=root, **options)
        try:
            return build_market(
                # Handed over one after another, so that no contract's bars are held longer than needed.
                (segments.pop(0) for _ in range(len(segments))),
                root, interval, hours=hours, features=features, drop=drop, quality=quality, provenance=provenance,
            )  # fmt: skip
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None

    if cache is None:
        return build()
    from fox_env.data.cache import open_or_build

    files = [*sources.find_files(path, symbol)[0]]
    for name, place in (("mbp10", mbp10), ("trades", trades), ("definitions", definitions)):
        files += [] if place is None else sources.find_dbn(place, symbol, name)
    return open_or_build(
        cache, files=files, options=options | {"contract": root, "features": features, "drop": drop}, build=build,
        # Of features that were chosen by name, none need be of the order flow: the quotes alone may be wanted.
        order_flow=mbp10 is not None and features is None and not drop,
    )  # fmt: skip
