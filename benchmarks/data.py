"""How large inputs are read: time, memory, and the rate beside the `databento` library's own on the same file.

    python benchmarks/data.py [--rows 20000000] [--folder DIR]

Writes a synthetic year of one-second bars and as many trades as DBN into the folder (a temporary one by default), then,
each in a fresh process: builds a market with features into a cache, opens it from there, and makes volume bars of the
trades, beside the library's `to_ndarray`, which only reads, in pieces of a million records.
"""

from __future__ import annotations

import argparse
import platform
import resource
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

VOLUME = "vol:1000"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=20_000_000)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--step", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.step:
        globals()[f"step_{arguments.step}"](arguments.folder, arguments.rows)
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(f"    peak memory {used:.2f} GiB", flush=True)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"{date.today()}, {platform.machine()}, Python {platform.python_version()}", flush=True)
        for step in ("write_bars", "build", "open", "write_trades", "volume_bars"):
            command = [sys.executable, __file__, "--step", step, "--folder", str(folder), "--rows", str(arguments.rows)]
            subprocess.run(command, check=True)


def timed(what: str, count: int, began: float) -> float:
    took = time.perf_counter() - began
    print(f"{what}: {count:,} in {took:.2f} s, {count / took / 1e6:.2f} M/s", flush=True)
    return took


def step_write_bars(folder: Path, rows: int) -> None:
    from fox_env.data.dbn_write import write_synthetic

    began = time.perf_counter()
    file = folder / "bars.dbn.zst"
    timed(f"one-second bars written as {file.name}", write_synthetic(file, "garch", rows, schema="ohlcv-1s"), began)


def step_build(folder: Path, rows: int) -> None:
    from fox_env import load_market

    began = time.perf_counter()
    market = load_market(folder / "bars.dbn.zst", cache=folder)
    timed(f"market with {len(market.feature_names)} features built into the cache", len(market), began)


def step_open(folder: Path, rows: int) -> None:
    from fox_env import load_market

    began = time.perf_counter()
    market = load_market(folder / "bars.dbn.zst", cache=folder)
    timed("market opened from the cache, imports included", len(market), began)


def step_write_trades(folder: Path, rows: int) -> None:
    from fox_env.data.dbn_write import write_synthetic

    began = time.perf_counter()
    file = folder / "trades.dbn.zst"
    timed(f"trades written as {file.name}", write_synthetic(file, "planted", rows // 17, schema="trades"), began)


def step_volume_bars(folder: Path, rows: int) -> None:
    from databento import DBNStore

    from fox_env.data.load import load_segments
    from fox_env.data.ticks import TradeBars

    file = folder / "trades.dbn.zst"
    first = next(iter(DBNStore.from_file(file).to_ndarray(count=1000)))
    TradeBars(contracts=10, tick=0.25).add(first)  # compiles
    for _ in range(2):
        began = time.perf_counter()
        segments, _, quality, _ = load_segments(file, bars=VOLUME)
        read = int(quality["trades_read"])
        own = timed(f"trades made into {len(segments[0].bars):,} bars of {VOLUME}", read, began)
        began = time.perf_counter()
        count = sum(len(part) for part in DBNStore.from_file(file).to_ndarray(count=1 << 20))
        library = timed("trades read by the library's to_ndarray", count, began)
        print(f"    rate beside the library's: {library / own:.2f}")


if __name__ == "__main__":
    main()
