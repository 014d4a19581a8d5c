"""Files of arrays, and the cache of built markets: whole or not there, whoever is killed and however many build."""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file

import fox_env.files
from fox_env import CONTRACTS, Feature, Market, load_market, synthetic_market
from fox_env.data import cache
from fox_env.data.bars import Bars
from fox_env.data.cache import cache_key, open_or_build
from fox_env.data.dbn_write import book_records, write_dbn, write_ohlcv
from fox_env.data.features import ODD
from fox_env.data.synthetic import synthetic_bars
from fox_env.files import read_arrays, write_arrays, write_atomic
from tests.env.games import make_bars, make_market, random_market

ARRAYS = {
    "flags": np.array([True, False, True]),
    "small": np.arange(-3, 4, dtype=np.int8),
    "prices": np.array([4000.25, np.nan, np.inf, -0.0]),
    "table": np.arange(12, dtype=np.float32).reshape(3, 4)[:, ::2],  # not contiguous
    "times": np.array([1_709_650_800_000_000_001, 2**62 + 1]),
    "one": np.array(7, np.int32),
    "none": np.empty((0, 3)),
}


def hidden(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir() if p.name.startswith(".") and not p.name.endswith(".lock"))


# Files of arrays


def test_arrays_survive_and_safetensors_reads_them(tmp_path):
    path = tmp_path / "new" / "arrays"
    write_arrays(path, ARRAYS, {"note": "ü"})
    read, texts = read_arrays(path)
    others = load_file(path)
    assert texts == {"note": "ü"}
    assert set(read) == set(others) == set(ARRAYS)
    for name, array in ARRAYS.items():
        for got in (read[name], others[name]):
            assert got.dtype == array.dtype
            np.testing.assert_array_equal(got, array)
        assert type(read[name]) is np.ndarray
        assert read[name].flags.aligned
        assert not read[name].flags.writeable
    assert np.signbit(read["prices"][3])
    with safe_open(path, "numpy") as file:
        assert file.metadata()["note"] == "ü"
    assert [p.name for p in path.parent.iterdir()] == ["arrays"]


def test_arrays_of_other_dtypes_are_refused(tmp_path):
    with pytest.raises(TypeError, match=r"^array 'names' has dtype <U1, expected one of float64, "):
        write_arrays(tmp_path / "a", {"names": np.array(["x"])}, {})
    with pytest.raises(TypeError, match=r"^array 'big' has dtype >f8"):
        write_arrays(tmp_path / "a", {"big": np.zeros(3, ">f8")}, {})
    assert not list(tmp_path.iterdir())


def test_every_damaged_byte_and_every_truncation_is_noticed(tmp_path):
    path = tmp_path / "arrays"
    write_arrays(path, ARRAYS, {})
    data = path.read_bytes()
    for content in [*(data[:n] for n in range(len(data))), data + b"\0"]:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"^.*arrays is not a file of arrays.*[^.]$"):
            read_arrays(path)
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(ValueError, match=r"is not a file of arrays"):
            read_arrays(path)


def made_file(path: Path, header: object, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        (b"[" * 100_000, b"", "its header is no JSON"),
        (b"{" + b"\xff" * 7, b"", "its header is no JSON"),
        ([1, 2, 3, 4], b"", "its header has another form"),
        ({"__metadata__": {}, "a": 1}, b"", "its header has another form"),
        ({"__metadata__": {"sha256": ""}, "a": {"dtype": "F16", "shape": [1], "data_offsets": [0, 2]}}, b"12",
         "its header has another form"),
        ({"__metadata__": {"sha256": ""}, "a": {"dtype": "U8", "shape": [2], "data_offsets": [1, 3]}}, b"123",
         "array 'a' does not lie where it should"),
        ({"__metadata__": {"sha256": ""}, "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 2]}}, b"12",
         "array 'a' does not lie where it should"),
        ({"__metadata__": {"sha256": ""}, "a": {"dtype": "U8", "shape": [-1, -2], "data_offsets": [0, 2]}}, b"12",
         "array 'a' has a shape or an offset that is not a whole number"),
        ({"__metadata__": {"sha256": ""}, "a": {"dtype": "U8", "shape": [2.0], "data_offsets": [0, 2]}}, b"12",
         "array 'a' has a shape or an offset that is not a whole number"),
        ({"__metadata__": {"sha256": ""}, "a": {"dtype": "U8", "shape": [2**70], "data_offsets": [0, 2**70]}}, b"12",
         f"array 'a' ends at byte {2**70} of 2"),
        ({"__metadata__": {"sha256": ""}, "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}, b"12",
         "1 bytes follow the last array"),
        ({"__metadata__": {"sha256": ""}, "a": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]}}, b"12",
         "its digest is that of another content"),
    ],
)  # fmt: skip
def test_foreign_files_are_refused_in_a_sentence(tmp_path, header, data, why):
    path = tmp_path / "foreign"
    made_file(path, header, data)
    with pytest.raises(ValueError, match="foreign") as caught:
        read_arrays(path)
    assert str(caught.value).endswith(f": {why}")


def test_a_header_longer_than_the_format_allows_is_not_read(tmp_path):
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(100_000_100)
    with pytest.raises(ValueError, match=r"its 100000100 bytes do not begin with the length of a header$"):
        read_arrays(path)


def test_large_files_are_covered_in_pieces(tmp_path, monkeypatch):
    """Of 256 bytes the digest covers 4 pieces of 16, the first and the last bytes among them."""
    for name, value in (("_WHOLE", 64), ("_PIECES", 4), ("_PIECE", 16)):
        monkeypatch.setattr(fox_env.files, name, value)
    path = tmp_path / "large"
    write_arrays(path, {"a": np.arange(256, dtype=np.int64).astype(np.uint8)}, {})
    data = path.read_bytes()
    begin = len(data) - 256
    noticed = []
    for at in range(begin, len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            read_arrays(path)
        except ValueError:
            noticed.append(at - begin)
    # Pieces begin at 0, 80, 160 and 240, evenly spread from 0 to 256 − 16.
    assert noticed == [first + k for first in (0, 80, 160, 240) for k in range(16)]


@given(st.integers(1, 7), st.integers(0, 40), st.sampled_from(["C", "F"]))
def test_blocks_hold_the_bytes_in_order(block, rows, order):
    array = np.asarray(np.arange(rows * 3, dtype=np.int16).reshape(rows, 3), order=order)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fox_env.files, "_BLOCK", block * 6)
        blocks = [bytes(b) for b in fox_env.files.byte_blocks(array)]
    assert b"".join(blocks) == array.tobytes()
    assert all(0 < len(b) <= block * 6 for b in blocks)


# Atomic writing


def test_a_failing_writer_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    path.write_text("old")

    def fail(partial: Path) -> None:
        partial.write_text("half")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        write_atomic(path, fail)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_threads_writing_one_file_do_not_meet(tmp_path):
    path = tmp_path / "file"
    barrier = threading.Barrier(4)

    def write(partial: Path, letter: str) -> None:
        partial.write_text(letter * 10)
        barrier.wait(10)
        partial.write_text(partial.read_text() * 100)

    threads = [
        threading.Thread(target=write_atomic, args=(path, lambda partial, letter=letter: write(partial, letter)))
        for letter in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_text() in {letter * 1000 for letter in "abcd"}
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_what_killed_writers_left_is_removed_and_nothing_else(tmp_path):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    seen = []
    write_atomic(tmp_path / "a.b", lambda partial: (seen.append(partial.name), partial.write_text("x")))
    _, _, _, computer, pid, _ = seen[0].split(".")
    assert pid == str(os.getpid())
    keep = [
        f".a.b.{computer}.{os.getpid()}.00000000",  # its writer runs
        f".a.b.{computer}.{os.getppid()}.00000000",
        f".a.b.00000000.{gone.pid}.00000000",  # of another computer
        f".a.b.c.{computer}.{gone.pid}.00000000",  # of another file
        f".axb.{computer}.{gone.pid}.00000000",
    ]
    orphan = f".a.b.{computer}.{gone.pid}.00000000"
    for name in (*keep, orphan):
        (tmp_path / name).write_text("half")
    write_atomic(tmp_path / "a.b", lambda partial: partial.write_text("y"))
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*keep, "a.b"])


# The cache


def write_csv(path: Path, rows: int = 1_500, shift: float = 0.0) -> Path:
    """Five-minute bars from Tuesday 2024-03-05 on, as text; a trading day has 276 of them."""
    made = synthetic_market("garch", rows, start="2024-03-05", features=[ODD_ONE]).bars
    lines = ["timestamp,open,high,low,close,volume"]
    for k in range(rows):
        values = [made.open[k], made.high[k], made.low[k], made.close[k]]
        lines.append(",".join(map(str, [made.start[k], *(v + shift for v in values), made.volume[k]])))
    path.write_text("\n".join(lines))
    return path


ODD_ONE = Feature("one", ODD, 0, lambda x: np.ones(len(x.bars)))
OPTIONS = {"tz": "UTC", "bars": "5m"}


def cached(folder: Path, file: Path, order_flow: bool = False, **options: object) -> tuple[Market, int]:
    """The market, and how many times it was built."""
    built = []

    def build() -> Market:
        built.append(1)
        return load_market(file, **OPTIONS, **options)

    market = open_or_build(
        folder, files=[file], options=OPTIONS | options, build=build, order_flow=order_flow
    )  # fmt: skip
    return market, len(built)


def assert_same(one: Market, two: Market) -> None:
    for field in fields(Market):
        mine, theirs = getattr(one, field.name), getattr(two, field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype, field.name
            np.testing.assert_array_equal(mine, theirs, err_msg=field.name)
        elif field.name not in ("bars", "normalizer", "truth"):
            assert mine == theirs, field.name
    for name in (f.name for f in fields(Bars) if f.name != "extra"):
        np.testing.assert_array_equal(getattr(one.bars, name), getattr(two.bars, name), err_msg=name)
    assert list(one.bars.extra) == list(two.bars.extra)
    for name, column in one.bars.extra.items():
        np.testing.assert_array_equal(column, two.bars.extra[name])
    assert one.fingerprint == two.fingerprint


@pytest.mark.parametrize("max_bars", [0, 400])
def test_the_cache_gives_what_the_files_give(tmp_path, max_bars):
    file = write_csv(tmp_path / "bars.csv", 700)
    market, builds = cached(tmp_path / "cache", file, max_bars=max_bars)
    again, more = cached(tmp_path / "cache", file, max_bars=max_bars)
    assert (builds, more) == (1, 0)
    assert len(market) == (max_bars or 700)
    direct = load_market(file, **OPTIONS, max_bars=max_bars)
    for other in (market, again):
        assert_same(other, direct)
        assert [type(v) for v in other.quality.values()] == [type(v) for v in direct.quality.values()]
    (path,) = (tmp_path / "cache").glob("bars-*.fxcache")
    assert_same(Market.load(path), direct)
    assert hidden(tmp_path / "cache") == []


def test_texts_and_counts_of_quality_keep_their_types(tmp_path):
    quality = {"rows": 3, "rows_first": "in row 7", "numpy": np.int64(5)}
    market = make_market(make_bars([(4000.0,) * 4] * 9), quality=quality, provenance={"files": ["a"], "x": None})
    market.save(tmp_path / "market")
    loaded = Market.load(tmp_path / "market")
    assert {k: loaded.quality[k] for k in quality} == {"rows": 3, "rows_first": "in row 7", "numpy": 5}
    assert loaded.provenance == {"files": ["a"], "x": None}


def test_another_file_or_option_is_another_market(tmp_path):
    file = write_csv(tmp_path / "bars.csv", 400)
    folder = tmp_path / "cache"
    stat = file.stat()
    assert cached(folder, file)[1] == 1
    assert cached(folder, file, max_bars=300)[1] == 1
    assert cached(folder, file, drop=["rsi_14"])[1] == 1
    assert "rsi_14" not in cached(folder, file, drop=["rsi_14"])[0].feature_names
    assert cached(folder, file)[1] == 0
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert cached(folder, file)[1] == 1
    write_csv(file, 400, shift=1.0)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert cached(folder, file)[1] == 0  # same size and time: nothing else tells them apart
    write_csv(file, 401)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert cached(folder, file)[1] == 1


def test_the_key_knows_code_paths_and_order_flow(tmp_path, monkeypatch):
    files = [tmp_path / name for name in "ab"]
    for file in files:
        file.write_text("x")
        os.utime(file, ns=(0, 0))
    keys = {cache_key([file], {"bars": "1m"}, flow) for file in files for flow in (False, True)}
    keys |= {cache_key(files, {"bars": "1m"}, False), cache_key(files[:1], {"bars": "5m"}, False)}
    keys |= {cache_key(files[:1], {"contract": CONTRACTS["ES"]}, False), cache_key(files[:1], {"x": files[1]}, False)}
    monkeypatch.setattr(cache, "_builder", lambda: ["0.2.0", ""])
    keys.add(cache_key(files[:1], {"bars": "1m"}, False))
    monkeypatch.setattr(cache.market_module, "SCHEMA", 99)
    keys.add(cache_key(files[:1], {"bars": "1m"}, False))
    assert len(keys) == 10
    assert cache_key(files, {"a": 1, "b": 2}, False) == cache_key(files, {"b": 2, "a": 1}, False)


def test_what_cannot_be_recognised_again_is_refused(tmp_path):
    file = write_csv(tmp_path / "bars.csv", 300)
    with pytest.raises(ValueError, match=r"^feature 'one' is a Feature, which the cache cannot recognise again"):
        cached(tmp_path, file, features=[ODD_ONE])
    with pytest.raises(ValueError, match=r"^option .* is of type set, which the cache cannot recognise again$"):
        cached(tmp_path, file, drop={"a"})
    with pytest.raises(FileNotFoundError):
        cached(tmp_path, tmp_path / "none.csv")
    assert not list(tmp_path.glob("*.fxcache"))


def test_a_file_that_changes_while_it_is_read_is_not_cached(tmp_path):
    file = write_csv(tmp_path / "bars.csv", 300)

    def build() -> Market:
        market = load_market(file, **OPTIONS)
        write_csv(file, 301)
        return market

    with pytest.raises(ValueError, match=r"bars\.csv or another file of the market changed while it was read"):
        open_or_build(tmp_path, files=[file], options=OPTIONS, build=build, order_flow=False)
    assert not list(tmp_path.glob("*.fxcache"))


def test_a_damaged_or_foreign_cache_is_built_anew(tmp_path):
    file = write_csv(tmp_path / "bars.csv", 400)
    folder = tmp_path / "cache"
    market, _ = cached(folder, file)
    (path,) = folder.glob("*.fxcache")
    expected, data = market.fingerprint, path.read_bytes()
    other = tmp_path / "other"
    cached(other, file, max_bars=300)
    (elsewhere,) = other.glob("*.fxcache")
    rng = np.random.default_rng(0)
    damaged = [b"", b"no", data[:100], data[:-1], data[: len(data) // 2], elsewhere.read_bytes()]
    for at in rng.integers(0, len(data), 5).tolist():
        damaged.append(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
    for content in damaged:
        path.unlink()
        path.write_bytes(content)
        again, builds = cached(folder, file)
        assert builds == 1
        assert again.fingerprint == expected
        assert path.read_bytes() == data
    arrays, texts = read_arrays(path)
    for changed in ({"key": "0" * 64}, {"schema": "1"}):  # the first digits of the name may be the same
        write_arrays(path, arrays, texts | changed)
        assert cached(folder, file)[1] == 1


def flow_market(flow: bool) -> Market:
    """Six bars; with `flow`, one of their features is called as an order-flow feature is."""
    name = "depth_imbalance_1" if flow else "one"
    return make_market(make_bars([(4000.0,) * 4] * 6), features=[Feature(name, ODD, 0, ODD_ONE.function)])


def test_order_flow_is_never_missing_where_it_is_asked_for(tmp_path):
    """R36. Also where a file without it lies under the right name with the right key."""
    (tmp_path / "file").write_text("x")
    files = [tmp_path / "file"]

    def opened(flow: bool, built: bool) -> Market:
        return open_or_build(tmp_path, files=files, options={}, build=lambda: flow_market(built), order_flow=flow)

    assert not opened(False, False).has_order_flow
    with pytest.raises(ValueError, match=r"file has no order flow, which was asked for$"):
        opened(True, False)
    assert opened(True, True).has_order_flow
    assert not opened(False, False).has_order_flow
    key = cache_key(files, {}, True)
    arrays, texts = flow_market(False).to_arrays()
    write_arrays(tmp_path / f"file-{key[:16]}.fxcache", arrays, texts | {"key": key})
    assert opened(True, True).has_order_flow


def test_features_chosen_by_name_need_not_be_of_the_order_flow(tmp_path):
    """Books may be wanted for the quotes at the close alone."""
    bars = synthetic_bars("planted", 200, interval="1m", start="2024-01-09").bars
    write_ohlcv(tmp_path / "bars.dbn", {"ESH24": bars})
    books = book_records("bbo-1m", bars.ts, bars.close, bars.close + 0.25, np.full(200, 5), np.full(200, 5))
    write_dbn(tmp_path / "bbo.dbn", "bbo-1m", {"ESH24": books})
    for chosen in ({"features": ["rsi_14"]}, {"drop": ["spread", "microprice_offset", "depth_imbalance_1"]}):
        market = load_market(tmp_path / "bars.dbn", mbp10=tmp_path / "bbo.dbn", cache=tmp_path / "cache", **chosen)
        assert not market.has_order_flow
        assert np.array_equal(market.bars.bid, bars.close)


BUILDER = """
import sys, time
from pathlib import Path
from fox_env import synthetic_market
from fox_env.data.cache import open_or_build

folder = Path(sys.argv[1])

def build():
    with (folder / "builds").open("a") as log:
        log.write("x")
    time.sleep(0.3)
    return synthetic_market("garch", 3_000)

(folder / f"ready{sys.argv[2]}").touch()
while not (folder / "go").exists():
    time.sleep(0.002)
market = open_or_build(folder, files=[folder / "file"], options={}, build=build, order_flow=False)
print(market.fingerprint)
"""


def test_of_several_builders_one_builds(tmp_path):
    (tmp_path / "file").write_text("x")
    processes = [
        subprocess.Popen([sys.executable, "-c", BUILDER, tmp_path, str(k)], stdout=subprocess.PIPE, text=True)
        for k in range(4)
    ]
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("ready*"))) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    (tmp_path / "go").touch()
    prints = {process.communicate(timeout=60)[0] for process in processes}
    assert prints == {synthetic_market("garch", 3_000).fingerprint + "\n"}
    assert (tmp_path / "builds").read_text() == "x"
    assert hidden(tmp_path) == []


def in_child(act) -> int:
    """Run `act` in a forked process and return its number."""
    pid = os.fork()
    if not pid:
        try:
            act()
        finally:
            os._exit(0)
    return pid


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_killed_builder_leaves_no_wrong_cache(tmp_path):
    (tmp_path / "file").write_text("x")
    made = synthetic_market("garch", 20_000)
    expected = made.fingerprint

    def open_it() -> Market:
        return open_or_build(
            tmp_path, files=[tmp_path / "file"], options={}, build=lambda: made, order_flow=False
        )  # fmt: skip

    begin = time.perf_counter()
    open_it()
    took = time.perf_counter() - begin
    (path,) = tmp_path.glob("*.fxcache")

    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_at(name: str) -> None:
        setattr(os, name, die)
        open_it()

    rng = random.Random(0)
    orphans = 0
    points = ["fsync", "replace", *(rng.random() * 1.2 * took for _ in range(12))]
    for point in points:
        path.unlink(missing_ok=True)
        if isinstance(point, str):
            pid = in_child(lambda point=point: die_at(point))
        else:
            pid = in_child(open_it)
            time.sleep(point)
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        orphans += len(hidden(tmp_path))
        if path.exists():
            assert Market.load(path).fingerprint == expected
        assert open_it().fingerprint == expected
        if not isinstance(point, float):
            assert hidden(tmp_path) == []
    assert orphans >= 2  # kills did strike while a file was being written
    path.unlink()
    open_it()
    assert hidden(tmp_path) == []


# Markets that are mapped from a file


def test_a_loaded_market_does_everything(tmp_path, recwarn):
    import copy

    from fox_env import FoxES, FoxESTorchEnv, FoxESVectorEnv, evaluate

    market = synthetic_market("planted", 1_500)
    market.save(tmp_path / "market")
    loaded = Market.load(tmp_path / "market")
    assert_same(loaded, market)
    assert not loaded.bars.close.flags.writeable
    np.testing.assert_array_equal(loaded.truth.drift, market.truth.drift)
    np.testing.assert_array_equal(loaded.truth.transition, market.truth.transition)
    assert loaded.truth.drifts == market.truth.drifts
    for name in ("observed", "padded", "mirror", "land", "first"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(market, name))
    np.testing.assert_array_equal(loaded.tape(1.0, 10), market.tape(1.0, 10))
    assert copy.deepcopy(loaded) is loaded
    sent = pickle.dumps(loaded)
    assert len(sent) < 2 * sum(a.nbytes for a in market.to_arrays()[0].values())  # nothing that is derived
    assert_same(pickle.loads(sent), market)
    assert_same(loaded.slice(200, 900), market.slice(200, 900))
    parts = list(zip(loaded.split(0.5, 0.25), market.split(0.5, 0.25), strict=True))
    for k, (one, two) in enumerate(parts):
        assert_same(one, two)
        one.save(tmp_path / f"part{k}")
        part = Market.load(tmp_path / f"part{k}")
        assert_same(part, two)
        np.testing.assert_array_equal(part.observed, two.observed)
    test = Market.load(tmp_path / "part2")
    game = {"episode_bars": 20, "min_hold_bars": 1}
    many = FoxESVectorEnv(3, test, **game)
    assert many.engine.fraction.flags.writeable  # or the kernels are compiled once more
    for env in (FoxES(test, **game), many):
        env.reset(seed=0)
        action = [[2, 2, 0, 1]] * 3 if isinstance(env, FoxESVectorEnv) else [2, 2, 0, 1]
        env.step(action)
    FoxESTorchEnv(test, 2, **game).rollout(3)
    assert evaluate("long", test, seed=0).to_dict()["policies"]["long"]["trades"] > 0
    assert [w for w in recwarn if "writable" in str(w.message)] == []


def test_an_ugly_market_survives(tmp_path):
    market = random_market(np.random.default_rng(4))
    market.save(tmp_path / "market")
    assert_same(Market.load(tmp_path / "market"), market)
