"""DBN bars: written, read back bit by bit, selected by symbol, refused in one sentence, and loaded."""

from __future__ import annotations

import datetime as dt
import re
import warnings
from types import SimpleNamespace
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fox_env.data import dbn
from fox_env.data.bars import Bars, concatenate
from fox_env.data.dbn import open_file, read_ohlcv, record_dtype
from fox_env.data.dbn_write import ohlcv_records, write_ohlcv
from fox_env.data.load import load_market, load_segments
from fox_env.data.sources import symbol_root

MINUTE = 60_000_000_000
COLUMNS = ("start", "ts", "open", "high", "low", "close", "volume")


def ns(clock: str) -> int:
    return int(dt.datetime.fromisoformat(clock).replace(tzinfo=ZoneInfo("America/Chicago")).timestamp()) * 10**9


def walk(first: str, count: int, price: float = 4000.0, seed: int = 0, step: int = MINUTE) -> Bars:
    """Bars on the tick, every bar opening at the close before."""
    rng = np.random.default_rng(seed)
    close = price + 0.25 * np.cumsum(rng.integers(-3, 4, count))
    opening = np.concatenate([[price], close[:-1]])
    high, low = np.maximum(opening, close) + 0.25, np.minimum(opening, close) - 0.25
    start = ns(first) + step * np.arange(count)
    return Bars(start, start + step, opening, high, low, close, rng.integers(1, 500, count).astype(float))


def read(path, symbol="ES"):
    quality = {}
    files = [open_file(place) for place in (path if isinstance(path, list) else [path])]
    chunks = list(read_ohlcv(files, files[0].schema, symbol=symbol, quality=quality))
    names = dict.fromkeys(chunk.contract for chunk in chunks)
    return {n: concatenate([c.bars for c in chunks if c.contract == n]) for n in names}, files[0].schema, quality


def assert_equal(a: Bars, b: Bars):
    for name in COLUMNS:
        assert np.array_equal(getattr(a, name), getattr(b, name)), name


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize("ending", ["dbn", "dbn.zst"])
@pytest.mark.parametrize("schema", list(dbn.BAR_SCHEMAS))
def test_round_trip(tmp_path, version, ending, schema):
    step = dbn.BAR_SCHEMAS[schema]
    market = {"ESH24": walk("2024-01-09 09:00", 5, step=step), "ESM24": walk("2024-01-09 09:00", 4, 4050.0, 1, step)}
    path = tmp_path / f"bars.{ending}"
    write_ohlcv(path, market, schema=schema, version=version)
    got, got_schema, quality = read(path)
    assert got_schema == schema
    assert list(got) == ["ESH24", "ESM24"]
    for name, bars in market.items():
        assert_equal(got[name], bars)
    assert quality["rows_read"] == 9


def test_the_library_reads_the_same(tmp_path):
    import databento

    market = {"ESH24": walk("2024-01-09 09:00", 7), "ESM24": walk("2024-01-09 09:00", 6, 4050.0, 1)}
    write_ohlcv(tmp_path / "bars.dbn.zst", market)
    store = databento.DBNStore.from_file(tmp_path / "bars.dbn.zst")
    assert store.metadata.stype_in == "parent"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        frame = store.to_df()
    for name, raw in (("ESH24", "ESH4"), ("ESM24", "ESM4")):
        own = frame[frame.symbol == raw]
        assert own.index.astype("int64").tolist() == market[name].start.tolist()
        for column in ("open", "high", "low", "close", "volume"):
            assert own[column].tolist() == getattr(market[name], column).tolist()


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    offsets=st.lists(st.integers(0, 10**15), min_size=1, max_size=20, unique=True),
    nanos=st.integers(1, 10**15),  # up to a million points
    zst=st.booleans(),
)
def test_odd_nanoseconds_and_prices_survive(tmp_path, offsets, nanos, zst):
    start = ns("2024-01-09 09:00") + np.sort(np.array(offsets))
    price = (nanos + np.arange(len(start))) / 1e9
    bars = Bars(start, start + MINUTE, price, price + 1, price / 2, price, np.arange(len(start), dtype=float))
    path = tmp_path / ("odd.dbn.zst" if zst else "odd.dbn")
    write_ohlcv(path, {"ESM24": bars})
    got = read(path)[0]["ESM24"]
    for name in ("start", "ts", "open", "close", "volume"):
        assert np.array_equal(getattr(got, name), getattr(bars, name)), name
    np.testing.assert_allclose(got.low, bars.low, rtol=0, atol=0.6e-9)  # half a price may need a tenth decimal


def test_spreads_and_other_roots_are_dropped_and_counted(tmp_path):
    es = walk("2024-01-09 09:00", 5)
    market = {"ESH24": es, "ESH4-ESM4": walk("2024-01-09 09:00", 3, 50.0), "NQH24": walk("2024-01-09 09:00", 4),
              "MESH24": walk("2024-01-09 09:00", 2)}  # fmt: skip
    write_ohlcv(tmp_path / "a.dbn", market)
    for symbol in ("ES", "ES.FUT", "ESH4", "ESH24"):
        got, _, quality = read(tmp_path / "a.dbn", symbol)
        assert list(got) == ["ESH24"]
        assert_equal(got["ESH24"], es)
        assert (quality["rows_read"], quality["rows_spreads"], quality["rows_other_symbols"]) == (14, 3, 6)
    assert list(read(tmp_path / "a.dbn", "MES")[0]) == ["MESH24"]
    with pytest.raises(ValueError, match=r"a\.dbn holds no bars of 'MNQ' but of ESH4, NQH4, ESH4-ESM4, MESH4$"):
        read(tmp_path / "a.dbn", "MNQ")


def test_one_other_root_is_an_error_too(tmp_path):
    write_ohlcv(tmp_path / "nq.dbn", {"NQH24": walk("2024-01-09 09:00", 4)})
    with pytest.raises(ValueError, match=r"nq\.dbn holds no bars of 'ES' but of NQH4$"):
        read(tmp_path / "nq.dbn")


def test_one_year_digit_across_decades(tmp_path):
    market = {"ESH10": walk("2010-01-05 09:00", 3, 1100.0), "ESH20": walk("2020-01-07 09:00", 3, 3200.0)}
    write_ohlcv(tmp_path / "a.dbn", market)
    got = read(tmp_path / "a.dbn")[0]
    assert list(got) == ["ESH10", "ESH20"]
    assert_equal(got["ESH20"], market["ESH20"])


def test_an_id_means_what_the_metadata_say_on_the_day(tmp_path, monkeypatch):
    """Number 1 is ESH4 until the 9th and NQH4 from the 10th on; on the 11th it has no symbol."""
    from databento_dbn import Metadata

    def mapping(raw, first, last):
        interval = SimpleNamespace(start_date=dt.date(2024, 1, first), end_date=dt.date(2024, 1, last), symbol="1")
        return SimpleNamespace(raw_symbol=raw, intervals=[interval])

    def two_meanings(**fields):
        return Metadata(**fields | {"mappings": [mapping("ESH4", 9, 10), mapping("NQH4", 10, 11)]})

    days = [walk(f"2024-01-{day:02d} 09:00", 2) for day in (9, 10, 11)]
    monkeypatch.setattr("databento_dbn.Metadata", two_meanings)
    write_ohlcv(tmp_path / "a.dbn", {"ESH24": concatenate(days)})
    got, _, quality = read(tmp_path / "a.dbn")
    assert_equal(got["ESH24"], days[0])
    assert (quality["rows_other_symbols"], quality["rows_unmapped"]) == (2, 2)


def test_continuous_symbols_roll_unmeasured_where_the_id_changes(tmp_path):
    market = {"ESH24": walk("2024-03-14 09:00", 3), "ESM24": walk("2024-03-15 09:00", 4, 4060.0)}
    write_ohlcv(tmp_path / "c.dbn.zst", market, symbol="ES.c.0")
    for symbol in ("ES", "ES.c.0"):
        segments, _, quality, _ = load_segments(tmp_path / "c.dbn.zst", symbol=symbol)
        assert [s.instrument for s in segments] == ["ES.c.0:1", "ES.c.0:2"]
        assert np.isnan(segments[1].gap)
        assert (quality["rolls"], quality["rolls_unmeasured"]) == (1, 1)
        assert_equal(segments[1].bars, market["ESM24"])
    with pytest.raises(ValueError, match=r"holds no bars of 'NQ' but of ES\.c\.0"):
        read(tmp_path / "c.dbn.zst", "NQ")
    write_ohlcv(tmp_path / "c1.dbn.zst", market, symbol="ES.c.1")
    with pytest.raises(ValueError, match=r"holds ES\.c\.0, ES\.c\.1 for 'ES', expected one continuous symbol"):
        read([tmp_path / "c.dbn.zst", tmp_path / "c1.dbn.zst"])


def test_one_id_under_two_continuous_symbols(tmp_path):
    """A file of ES.c.0 and ES.v.0, which are one contract on that day: no row counts twice."""
    from databento_dbn import Metadata, Schema, SType

    bars = walk("2024-01-09 09:00", 5)
    span = [SimpleNamespace(start_date=dt.date(2024, 1, 9), end_date=dt.date(2024, 1, 10), symbol="7")]
    metadata = Metadata(
        dataset="GLBX.MDP3", start=int(bars.start[0]), end=int(bars.ts[-1]), stype_in=SType.CONTINUOUS,
        stype_out=SType.INSTRUMENT_ID, schema=Schema.OHLCV_1M, symbols=["ES.c.0", "ES.v.0"], version=3,
        mappings=[SimpleNamespace(raw_symbol=symbol, intervals=span) for symbol in ("ES.c.0", "ES.v.0")],
    )  # fmt: skip
    records = ohlcv_records("ohlcv-1m", bars, instrument_id=7)
    (tmp_path / "two.dbn").write_bytes(bytes(metadata) + records.tobytes())
    segments, _, quality, _ = load_segments(tmp_path / "two.dbn", symbol="ES.v.0")
    assert_equal(segments[0].bars, bars)
    assert (quality["rows_read"], quality["rows_unmapped"]) == (5, 0)


def test_rows_after_expiry_alone_are_refused_with_the_path(tmp_path):
    write_ohlcv(tmp_path / "late.dbn", {"ESH24": walk("2024-03-18 09:00", 3)})
    with pytest.raises(ValueError, match=r"late\.dbn: every row of ESH24 comes after its contract's expiry"):
        load_segments(tmp_path / "late.dbn")


@pytest.mark.parametrize("ending", ["dbn", "dbn.zst"])
def test_records_are_read_in_blocks(tmp_path, monkeypatch, ending):
    monkeypatch.setattr(dbn, "_PIECE_BYTES", 4 * 56)
    market = {"ESH24": walk("2024-01-09 09:00", 7), "ESM24": walk("2024-01-09 09:00", 6, 4050.0, 1)}
    write_ohlcv(tmp_path / f"a.{ending}", market)
    monkeypatch.setattr(dbn, "_READ_BYTES", 50)
    chunks = list(read_ohlcv([open_file(tmp_path / f"a.{ending}")], "ohlcv-1m", symbol="ES", quality={}))
    assert len(chunks) == (6 if ending == "dbn" else 2)  # zstd unpacks a block at a time
    assert np.sort(np.concatenate([chunk.row for chunk in chunks])).tolist() == list(range(1, 14))
    for name, bars in market.items():
        assert_equal(concatenate([chunk.bars for chunk in chunks if chunk.contract == name]), bars)


def broken(tmp_path, kind):
    path = tmp_path / f"{kind}.dbn.zst"
    write_ohlcv(path, {"ESH24": walk("2024-01-09 09:00", 500)})
    data = bytearray(path.read_bytes())
    if kind == "cut":
        data = data[:-300]
    elif kind == "flipped":
        data[len(data) // 2] ^= 255
    elif kind == "plain_cut":
        path = tmp_path / "plain_cut.dbn"
        write_ohlcv(path, {"ESH24": walk("2024-01-09 09:00", 5)})
        data = path.read_bytes()[:-20]
    elif kind == "header_cut":
        path = tmp_path / "header_cut.dbn"
        write_ohlcv(path, {"ESH24": walk("2024-01-09 09:00", 5)})
        data = path.read_bytes()[:60]
    elif kind == "fragment":
        path = tmp_path / "fragment.dbn.frag"
        write_ohlcv(tmp_path / "whole.dbn", {"ESH24": walk("2024-01-09 09:00", 5)})
        data = (tmp_path / "whole.dbn").read_bytes()[-5 * 56 :]
    elif kind == "header_only":
        path = tmp_path / "header_only.dbn"
        write_ohlcv(path, {"ESH24": walk("2024-01-09 09:00", 5)})
        data = path.read_bytes()[: -5 * 56]
    elif kind == "empty":
        data = b""
    elif kind == "csv":
        data = b"time,open\n1,2\n" * 10
    elif kind == "legacy":
        path = tmp_path / "legacy.dbz"
        data = b"P*M\x18\x90\x00\x00\x00DBZ\x01" + bytes(100)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        ("cut", "is truncated"),
        ("flipped", "is corrupt"),
        ("plain_cut", "is truncated"),
        ("header_cut", "cannot be read as DBN"),
        ("fragment", "has no DBN metadata at its start"),
        ("header_only", "holds no records, only a header"),
        ("empty", "is empty"),
        ("csv", "has no DBN metadata at its start"),
        ("legacy", "is in the legacy DBZ format"),
    ],
)
def test_broken_files_give_one_sentence(tmp_path, kind, match):
    path = broken(tmp_path, kind)
    with pytest.raises(ValueError, match=match) as error:
        load_segments(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_another_schema_is_named(tmp_path):
    from databento_dbn import Metadata, Schema, SType

    path = tmp_path / "mbo.dbn"
    metadata = Metadata("GLBX.MDP3", 0, SType.RAW_SYMBOL, SType.INSTRUMENT_ID, Schema.from_str("mbo"), end=1)
    path.write_bytes(bytes(metadata))
    with pytest.raises(ValueError, match=r"mbo\.dbn holds mbo, expected one of ohlcv-1s, ohlcv-1m"):
        load_segments(path)
    path.write_bytes(bytes(Metadata("GLBX.MDP3", 0, None, SType.INSTRUMENT_ID, None)))
    with pytest.raises(ValueError, match="holds no records, only a header"):
        load_segments(path)


def test_of_bars_of_two_lengths_one_must_be_chosen(tmp_path):
    write_ohlcv(tmp_path / "a.dbn", {"ESH24": walk("2024-01-09 09:00", 4)})
    write_ohlcv(tmp_path / "b.dbn", {"ESH24": walk("2024-01-09 09:00", 4, step=10**9)}, schema="ohlcv-1s")
    with pytest.raises(ValueError, match=r"bars of several lengths, ohlcv-1s, ohlcv-1m: say which with bars="):
        load_segments(tmp_path)
    segments, interval, _, _ = load_segments(tmp_path, bars="1m")
    assert (interval, len(segments[0].bars)) == (MINUTE, 4)
    assert load_segments(tmp_path, bars="1s")[1] == 10**9


def test_directory_glob_and_symbol_directory(tmp_path):
    bars = walk("2024-01-09 09:00", 30)
    inner = tmp_path / "ES.FUT"
    inner.mkdir()
    # Later file first by name, an overlap of five bars, and a file without records.
    write_ohlcv(inner / "a.dbn.zst", {"ESH24": bars.take(slice(15, 30))})
    write_ohlcv(inner / "b.dbn", {"ESH24": bars.take(slice(0, 20))})
    (inner / "c.dbn").write_bytes((inner / "b.dbn").read_bytes()[: -20 * 56])
    (inner / "manifest.json").write_text("{}")
    write_ohlcv(tmp_path / "other.dbn", {"ESH24": walk("2024-01-10 09:00", 3)})
    for path, symbol in ((tmp_path, "ES"), (tmp_path, "ES.FUT"), (inner, "ES"), (inner / "*.dbn*", "ES")):
        segments, interval, quality, provenance = load_segments(path, symbol=symbol)
        assert interval == MINUTE
        assert_equal(segments[0].bars, bars)
        assert quality["rows_duplicate"] == 5
        assert quality["rows_duplicate_first"] == "in row 1 of a.dbn.zst (2024-01-09T15:15:00 UTC)"
        assert quality["files_without_records"] == 1
        assert provenance["files"] == ["a.dbn.zst", "b.dbn", "c.dbn"]


def test_parent_file_rolls_by_volume(tmp_path):
    def days(volumes, price):
        parts = [walk(f"2019-03-{11 + k} 09:00", 10, price, k) for k in range(len(volumes))]
        bars = concatenate(parts)
        return Bars(*[getattr(bars, name) for name in COLUMNS[:6]], np.repeat(volumes, 10).astype(float))

    near, far = days([90, 40, 30], 2800.0), days([10, 60, 70], 2803.0)
    write_ohlcv(tmp_path / "es.dbn.zst", {"ESM19": far, "ESH19": near, "ESH9-ESM9": days([1, 1, 1], 3.0)})
    segments, _, quality, _ = load_segments(tmp_path / "es.dbn.zst")
    assert [(s.instrument, s.first, len(s.bars)) for s in segments] == [("ESH19", 0, 20), ("ESM19", 20, 30)]
    assert segments[1].gap == far.close[19] - near.close[19]
    assert (quality["rolls"], quality["rolls_unmeasured"], quality["rows_spreads"]) == (1, 0, 30)


def raw_records(path, change):
    """Rewrite a plain file's records through `change`."""
    data = path.read_bytes()
    count = 10
    head, records = data[: -count * 56], np.frombuffer(data[-count * 56 :], record_dtype("ohlcv-1m")).copy()
    path.write_bytes(head + change(records).tobytes())


def test_repairs_are_counted(tmp_path):
    path = tmp_path / "bad.dbn"
    bars = walk("2024-01-09 09:00", 10)
    write_ohlcv(path, {"ESH24": bars})

    def change(r):
        r["close"][1] = np.iinfo(np.int64).max  # undefined: dropped
        r["low"][2] = 0  # not positive: dropped
        r["high"][3], r["low"][3] = r["low"][3], r["high"][3]  # widened back
        r["close"][4] += 60_000_000  # 0.06 points off the tick: rounded
        r["volume"][5] = 0
        return np.concatenate([r[:7], r[8:], r[7:8], r[:1]])  # one late record and one repeated

    raw_records(path, change)
    segments, _, quality, _ = load_segments(path)
    kept = np.array([0, 3, 4, 5, 6, 7, 8, 9])
    expected = bars.take(kept)
    got = segments[0].bars
    for name in ("start", "open", "high", "low", "close"):
        assert np.array_equal(getattr(got, name), getattr(expected, name)), name
    counts = {key: value for key, value in quality.items() if value and not key.endswith("_first")}
    assert counts == {
        "files": 1, "rows_read": 11, "rows_bad_price": 2, "rows_range_widened": 1, "rows_off_tick": 1,
        "rows_zero_volume": 1, "rows_unsorted": 2, "rows_duplicate": 1, "contracts": 1,
    }  # fmt: skip
    assert quality["rows_bad_price_first"] == "in row 2 of bad.dbn (2024-01-09T15:01:00 UTC)"
    assert quality["rows_unsorted_first"] == "in row 10 of bad.dbn (2024-01-09T15:07:00 UTC)"


def test_bars_in_closed_hours_are_dropped(tmp_path):
    write_ohlcv(tmp_path / "a.dbn", {"ESH24": walk("2024-01-09 15:55", 70)})  # 16:00 to 17:00 is the break
    segments, _, quality, _ = load_segments(tmp_path / "a.dbn")
    assert quality["rows_closed_hours"] == 60
    assert segments[0].bars.start.tolist() == [ns("2024-01-09 15:55") + k * MINUTE for k in [*range(5), *range(65, 70)]]
    segments, _, quality, _ = load_segments(tmp_path / "a.dbn", max_bars=3)
    assert len(segments[0].bars) == 3
    with pytest.raises(ValueError, match="no usable bar of 'ES' in trading hours"):
        load_segments(tmp_path / "a.dbn", hours="rth")


def test_resampling_by_hand(tmp_path):
    bars = walk("2024-01-09 09:00", 13)
    write_ohlcv(tmp_path / "a.dbn", {"ESH24": bars.take(np.array([0, 1, 4, 5, 6, 7, 8, 9, 10, 11, 12]))})
    segments, interval, quality, _ = load_segments(tmp_path / "a.dbn", bars="5m")
    got = segments[0].bars
    # 09:00 from rows 0, 1, 4; 09:05 from 5 to 9; 09:10 ends at 09:15, after the last minute, and is not over.
    assert interval == 5 * MINUTE
    assert got.start.tolist() == [ns("2024-01-09 09:00"), ns("2024-01-09 09:05")]
    assert got.ts.tolist() == [ns("2024-01-09 09:05"), ns("2024-01-09 09:10")]
    assert got.open.tolist() == [bars.open[0], bars.open[5]]
    assert got.high.tolist() == [bars.high[[0, 1, 4]].max(), bars.high[5:10].max()]
    assert got.low.tolist() == [bars.low[[0, 1, 4]].min(), bars.low[5:10].min()]
    assert got.close.tolist() == [bars.close[4], bars.close[9]]
    assert got.volume.tolist() == [bars.volume[[0, 1, 4]].sum(), bars.volume[5:10].sum()]
    assert quality["bars_unfinished"] == 1


def test_a_bar_that_the_close_ends_is_finished(tmp_path):
    # 2019-11-29 closes at 12:15: the hour from 12:00 is over, and so is the day.
    write_ohlcv(tmp_path / "a.dbn", {"ESZ19": walk("2019-11-29 11:30", 45)})
    segments, _, quality, _ = load_segments(tmp_path / "a.dbn", bars="1h")
    hours = [ns("2019-11-29 11:00"), ns("2019-11-29 12:00")]
    assert (segments[0].bars.start.tolist(), quality["bars_unfinished"]) == (hours, 0)
    segments, _, quality, _ = load_segments(tmp_path / "a.dbn", bars="1d")
    assert segments[0].bars.start.tolist() == [ns("2019-11-28 17:00")]
    assert segments[0].bars.ts.tolist() == [ns("2019-11-29 12:15")]
    # A minute earlier the hour and the day are not over: the day has no finished bar left.
    write_ohlcv(tmp_path / "b.dbn", {"ESZ19": walk("2019-11-29 11:30", 44)})
    segments, _, quality, _ = load_segments(tmp_path / "b.dbn", bars="1h")
    assert (segments[0].bars.start.tolist(), quality["bars_unfinished"]) == (hours[:1], 1)
    with pytest.raises(ValueError, match="holds no finished 1d bar of 'ES'"):
        load_segments(tmp_path / "b.dbn", bars="1d")


def test_finer_bars_cannot_be_made(tmp_path):
    write_ohlcv(tmp_path / "a.dbn", {"ESH24": walk("2024-01-09 09:00", 4)})
    with pytest.raises(ValueError, match=r"a\.dbn holds ohlcv-1m, of which 1s bars cannot be made"):
        load_segments(tmp_path / "a.dbn", bars="1s")
    with pytest.raises(ValueError, match="bars '2m' is unknown"):
        load_segments(tmp_path / "a.dbn", bars="2m")


def test_missing_and_unknown_paths(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing does not exist"):
        load_segments(tmp_path / "nothing")
    with pytest.raises(ValueError, match="holds no file with market data"):
        load_segments(tmp_path)
    (tmp_path / "a.doc").write_text("x")
    with pytest.raises(ValueError, match=r"a\.doc is of an unknown kind"):
        load_segments(tmp_path / "a.doc")
    write_ohlcv(tmp_path / "a.dbn", {"ESH24": walk("2024-01-09 09:00", 4)})
    (tmp_path / "b.csv").write_text("time,open\n")
    with pytest.raises(ValueError, match=re.escape("a.dbn and ") + r".*b\.csv are of different kinds"):
        load_segments(tmp_path)


@pytest.mark.parametrize(("option", "match"), [
    ({"hours": "eth"}, "hours 'eth' is unknown"),
    ({"roll": "open"}, "roll 'open' is unknown"),
    ({"max_bars": -1}, "max_bars is -1"),
])  # fmt: skip
def test_unknown_options(tmp_path, option, match):
    with pytest.raises(ValueError, match=match):
        load_segments(tmp_path / "a.dbn", **option)


def test_dates_outside_the_calendar_name_the_file(tmp_path):
    write_ohlcv(tmp_path / "old.dbn", {"ESH99": walk("1999-01-05 09:00", 4)})
    with pytest.raises(ValueError, match=r"old\.dbn: a bar on 1999-01-05 lies outside the session calendar"):
        load_segments(tmp_path / "old.dbn")


@pytest.mark.parametrize(
    ("symbol", "root"),
    [("ES", "ES"), ("ES.FUT", "ES"), ("ES.c.0", "ES"), ("ESH4", "ES"), ("ESH24", "ES"), ("MNQZ9", "MNQ")],
)
def test_symbol_root(symbol, root):
    assert symbol_root(symbol) == root


def test_a_market_of_one_contract(tmp_path):
    (tmp_path / "ES.FUT").mkdir()
    market = {"ESM24": walk("2024-05-09 09:00", 200), "ESU24": walk("2024-05-09 09:00", 200, 4060.0, 1)}
    write_ohlcv(tmp_path / "ES.FUT" / "a.dbn", market)
    loaded = load_market(tmp_path, symbol="ESM4")
    assert (loaded.contract.name, loaded.instruments, len(loaded)) == ("ES", ("ESM24",), 200)
    assert np.array_equal(loaded.bars.close, market["ESM24"].close)


def test_nothing_to_write(tmp_path):
    with pytest.raises(ValueError, match="no bars to write"):
        write_ohlcv(tmp_path / "a.dbn", {})
    with pytest.raises(ValueError, match="schema 'ohlcv-5m' is unknown"):
        write_ohlcv(tmp_path / "a.dbn", {"ESH24": walk("2024-01-09 09:00", 4)}, schema="ohlcv-5m")


def test_record_types_are_the_library_s():
    from databento_dbn import RType, Schema

    assert {schema: int(RType.from_schema(Schema.from_str(schema))) for schema in dbn.SCHEMAS} == dbn.RTYPES
