"""What Fox makes of every DBN file in some folders, and whether it reads what the `databento` library reads.

    python benchmarks/dbn_files.py FOLDER...

A line a file: the records that `fox_env.data.dbn` read, equal byte by byte to the library's or not; and what
`fox_env.data.load.load_segments` makes of it: bars, trades, quotes, or the sentence with which it is refused. Bars are
compared with the library's too, and so are trades, which become bars of one contract each.
"""

from __future__ import annotations

import argparse
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
from databento import DBNStore
from rich.console import Console
from rich.table import Table

from fox_env.contracts import CONTRACTS
from fox_env.data import dbn
from fox_env.data.load import load_segments
from fox_env.data.rolls import Segment, outright


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folders", nargs="+", type=Path)
    folders = parser.parse_args().folders
    warnings.simplefilter("ignore")  # the library warns of what it leaves out
    table = Table(show_lines=False)
    for name in ("file", "records", "as the library", "result"):
        table.add_column(name, overflow="fold")
    totals: Counter[str] = Counter()
    for folder in folders:
        for path in sorted(file for file in folder.iterdir() if file.is_file()):
            row, kind = describe(path)
            totals[kind] += 1
            table.add_row(path.name, *row)
    Console(width=160).print(table)
    print(", ".join(f"{kind}: {count}" for kind, count in sorted(totals.items())))


def describe(path: Path) -> tuple[tuple[str, str, str], str]:
    """The cells of a file's line, and the kind of result."""
    try:
        file = dbn.open_file(path)
        read = {kind: np.concatenate([part for _, part in dbn.read(file, (kind,))]) for kind in file.kinds}
    except ValueError as error:
        return ("", "", str(error).replace(str(path), "…")), "refused"
    counts = ", ".join(f"{len(records)} {kind}" for kind, records in read.items()) or "none"
    same = all(equal(path, file, kind, records) for kind, records in read.items())
    agreement = "" if not read else "equal" if same else "DIFFERENT"
    result, kind = load(path, file)
    return (counts, agreement, result), "DIFFERENT" if "DIFFERENT" in agreement + result else kind


def equal(path: Path, file: dbn.DbnFile, kind: str, records: np.ndarray) -> bool:
    """Whether the library reads the same records."""
    library = DBNStore.from_file(path).to_ndarray(schema=kind)
    if file.schema is None:
        library = library.astype(records.dtype)  # of a live capture the library brings records to the latest version
    return records.tobytes() == library.tobytes()


def load(path: Path, file: dbn.DbnFile) -> tuple[str, str]:
    """What becomes of it, and the kind of result."""
    symbols = [raw for intervals in file.intervals.values() for _, _, raw in intervals]
    roots = [contract.root for contract in (outright(raw, file.first) for raw in symbols) if contract]
    symbol = next((root for root in roots if root in CONTRACTS), "ES")
    if file.kinds == (dbn.DEFINITIONS,):
        try:
            count = dbn.check_definitions([file], CONTRACTS[symbol], symbol)
        except ValueError as error:
            return str(error).replace(str(path), "…"), "refused"
        return f"{count} definitions of {symbol} futures agree with the contract table", "definitions"
    has_bars = any(kind in dbn.BAR_SCHEMAS for kind in file.kinds)
    bars = "vol:1" if not has_bars else "1m" if file.schema is None else None
    try:
        segments, interval, quality, provenance = load_segments(path, symbol=symbol, bars=bars)
    except ValueError as error:
        kind = "quotes alone" if set(file.kinds) & set(dbn.BOOK_SCHEMAS) - set(dbn.TRADE_SCHEMAS) else "refused"
        return str(error).replace(str(path), "…"), kind
    front = sum(len(segment.bars) - segment.first for segment in segments)
    names = ", ".join(segment.instrument for segment in segments)
    size = f"bars of {interval / 1e9:g} s" if interval else "trades"
    result = f"{front} {size} of {provenance['schema']}: {names}"
    if "mbp10" in provenance["order_flow"]:
        result += f", quotes of {quality['book_records']} books"
    return result + ("" if agree(path, segments, provenance["schema"], quality) else ": DIFFERENT"), size.partition(
        " "
    )[0]


def agree(path: Path, segments: list[Segment], schema: str, quality: dict) -> bool:
    """Whether these are the bars, or the trades one by one, that the library reads."""
    frame = DBNStore.from_file(path).to_df(schema=schema, pretty_ts=False, price_type="fixed").reset_index()
    for segment in segments:
        bars = segment.bars.take(slice(segment.first, None))
        named = [outright(str(raw), int(bars.start[0])) for raw in frame["symbol"]]
        own = frame[[contract is not None and contract.name == segment.instrument for contract in named]]
        have = [np.round(getattr(bars, name) * 1e9) for name in ("open", "high", "low", "close")]
        if schema in dbn.BAR_SCHEMAS:
            want = own[own["ts_event"].isin(bars.start)][["open", "high", "low", "close", "volume"]].to_numpy().T
        else:
            if "action" in own:
                own = own[own["action"] == "T"]
            if len(bars) + quality["trades_closed_hours"] != len(own):
                return False
            want = own[own["ts_recv"] + 1 >= bars.ts[0]][["price"] * 4 + ["size"]].to_numpy().T
        if not np.array_equal(want, [*have, bars.volume]):
            return False
    return True


if __name__ == "__main__":
    main()
