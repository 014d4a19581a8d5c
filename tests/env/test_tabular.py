"""Text and Parquet bars: the forms that people have, time zones, and what is refused."""

from __future__ import annotations

import bz2
import datetime as dt
import decimal
import gzip
import io
import json
import lzma
import zipfile
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fox_env.data.load import load_market, load_segments
from fox_env.data.tabular import is_table, read_tabular
from fox_env.data.times import to_utc
from tests.env.games import ZERO

MINUTE = 60_000_000_000


def ns(clock: str, zone: str = "America/Chicago") -> int:
    return int(dt.datetime.fromisoformat(clock).replace(tzinfo=ZoneInfo(zone)).timestamp()) * 10**9


def read(path, **options):
    quality = {}
    files = path if isinstance(path, list) else [path]
    table = read_tabular(files, **({"symbol": "ES"} | options), quality=quality)
    return table.chunks, table.length, quality


def rows(times, separator=","):
    """Rows with OHLCV 100, 101, 99, 100.5, 7."""
    return "\n".join(separator.join([str(time), "100", "101", "99", "100.5", "7"]) for time in times) + "\n"


SIERRA = """Date, Time, Open, High, Low, Last, Volume, NumberOfTrades, BidVolume, AskVolume
2015/3/9, 08:30:00, 2070.25, 2071.00, 2070.00, 2070.75, 129, 80, 60, 69
2015/3/9, 08:35:00, 2070.75, 2071.25, 2070.50, 2071.00, 145, 84, 48, 97
"""


def test_sierra_form(tmp_path):
    path = tmp_path / "ESH15-CME.scid_BarData__5m.txt"
    path.write_text(SIERRA)
    (chunk,), length, quality = read(path, tz="America/Chicago")
    assert (chunk.contract, length, quality["rows_read"]) == ("ESH15", 5 * MINUTE, 2)
    bars = chunk.bars
    assert bars.start.tolist() == [ns("2015-03-09 08:30"), ns("2015-03-09 08:35")]
    assert bars.ts.tolist() == [ns("2015-03-09 08:35"), ns("2015-03-09 08:40")]
    assert [bars.open[0], bars.high[0], bars.low[0], bars.close[0]] == [2070.25, 2071.0, 2070.0, 2070.75]
    assert bars.volume.tolist() == [129, 145]
    assert {name: column.tolist() for name, column in bars.extra.items()} == {
        "trades": [80, 84], "bid_volume": [60, 48], "ask_volume": [69, 97],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("header", "times"),
    [
        ("timestamp,open,high,low,close,volume", ["2024-01-09T15:00:00Z", "2024-01-09T15:01:00Z"]),
        ("time,Open,High,Low,Close,Vol", ["2024-01-09 09:00:00-06:00", "2024-01-09 09:01:00-06:00"]),
        ("DateTime,O,H,L,Last,V", ["2024-01-09T10:00:00-0500", "2024-01-09T15:01:00Z"]),
        ("ts_event,open,high,low,close,volume", [1704812400, 1704812460]),
        ("date,open,high,low,close,volume", [1704812400000, 1704812460000]),
        ("ts,open,high,low,close,volume", [1704812400000000, 1704812460000000]),
        ("Time Stamp,open,high,low,close,Total Volume", [1704812400000000000, 1704812460000000000]),
        ("timestamp,open,high,low,close,volume", [1704812400.0, 1704812460.0]),
    ],
)
def test_times_that_carry_their_zone(tmp_path, header, times):
    path = tmp_path / "es.csv"
    path.write_text(header + "\n" + rows(times))
    for tz in (None, "Asia/Tokyo"):
        (chunk,), length, _ = read(path, tz=tz)
        assert chunk.bars.start.tolist() == [ns("2024-01-09 09:00"), ns("2024-01-09 09:01")]
        assert (chunk.contract, length) == ("ES", MINUTE)
        assert (chunk.bars.close.tolist(), chunk.bars.volume.tolist()) == ([100.5, 100.5], [7, 7])


@pytest.mark.parametrize(
    "times",
    [
        ["2024-01-09 09:00:00", "2024-01-09 09:01:00"],
        ["1/9/2024 9:00", "1/9/2024 9:01"],
        ["2024/1/9 09:00", "2024/1/9 09:01"],
        ["20240109 090000", "20240109 090100"],
    ],
)
@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_wall_clock_times_need_a_zone(tmp_path, times, separator):
    path = tmp_path / "es.txt"
    path.write_text(separator.join(["date", "open", "high", "low", "close", "volume"]) + "\n" + rows(times, separator))
    (chunk,), _, _ = read(path, tz="America/Chicago")
    assert chunk.bars.start.tolist() == [ns("2024-01-09 09:00"), ns("2024-01-09 09:01")]
    with pytest.raises(ValueError, match=r"es\.txt has times without a time zone, such as 2024-01-09 09:00:00"):
        read(path)


@pytest.mark.parametrize("clocks", [["09:00", "09:01"], ["9:00:00", "9:01:00"], ["9:00 AM", "9:01 AM"]])
def test_date_and_clock_columns(tmp_path, clocks):
    path = tmp_path / "es.csv"
    path.write_text("Date,Time,open,high,low,close,volume\n" + rows([f"1/9/2024,{clock}" for clock in clocks]))
    (chunk,), _, _ = read(path, tz="America/Chicago")
    assert chunk.bars.start.tolist() == [ns("2024-01-09 09:00"), ns("2024-01-09 09:01")]


def test_clock_changes(tmp_path):
    path = tmp_path / "es.csv"
    header = "date,open,high,low,close,volume\n"
    # 02:30 does not exist on 2024-03-10; 01:30 happens twice on 2024-11-03 and is read as the first, 06:30 UTC.
    path.write_text(header + rows(["2024-03-10 01:30", "2024-03-10 02:30", "2024-03-10 03:30", "2024-11-03 01:30"]))
    (chunk,), _, quality = read(path, tz="America/Chicago", bars=MINUTE)
    assert chunk.bars.start.tolist() == [
        ns("2024-03-10 07:30", "UTC"), ns("2024-03-10 08:30", "UTC"), ns("2024-11-03 06:30", "UTC"),
    ]  # fmt: skip
    assert chunk.row.tolist() == [1, 3, 4]
    assert (quality["rows_nonexistent_time"], quality["rows_ambiguous_time"]) == (1, 1)


@pytest.mark.parametrize(
    ("header", "times", "tz"),
    [
        ("time", ["2024-01-09 09:00", "", "2024-01-09 09:02"], "America/Chicago"),
        ("time", ["", "2024-01-09 09:00", "2024-01-09 09:02"], "America/Chicago"),
        ("time", ["2024-01-09T15:00:00Z", "  ", "2024-01-09T15:02:00Z"], None),
        ("time", [1704812400, "", 1704812520], None),
        ("time", [1704812400000000000, "", 1704812520000000000], None),
        ("date,time", ["1/9/2024,09:00", ",09:01", "1/9/2024,09:02"], "America/Chicago"),
        ("date,time", ["1/9/2024,", "1/9/2024,09:00", "1/9/2024,09:02"], "America/Chicago"),
    ],
)
def test_a_row_without_a_time_is_dropped(tmp_path, header, times, tz):
    path = tmp_path / "es.csv"
    path.write_text(f"{header},open,high,low,close,volume\n" + rows(times))
    (chunk,), _, quality = read(path, tz=tz)
    assert chunk.bars.start.tolist() == [ns("2024-01-09 09:00"), ns("2024-01-09 09:02")]
    assert (quality["rows_read"], quality["rows_bad_time"], quality["rows_nonexistent_time"]) == (3, 1, 0)


@pytest.mark.parametrize("kind", ["zoned", "naive", "whole", "text"])
def test_a_parquet_row_without_a_time_is_dropped(tmp_path, kind):
    times = pd.date_range("2024-01-09 15:00", periods=4, freq="min", tz="UTC").to_series(index=range(4))
    times[1] = pd.NaT
    forms = {
        "zoned": times,
        "naive": times.dt.tz_localize(None),
        "whole": pd.array([1704812400, None, 1704812520, 1704812580], dtype="Int64"),
        "text": times.dt.strftime("%Y-%m-%d %H:%M:%S").astype(object).where(times.notna(), None),
    }
    frame(range(4)).assign(time=forms[kind]).to_parquet(tmp_path / "es.parquet")
    (chunk,), _, quality = read(tmp_path / "es.parquet", tz="UTC")
    assert chunk.bars.start.tolist() == [ns("2024-01-09 09:00") + k * MINUTE for k in (0, 2, 3)]
    assert (quality["rows_bad_time"], quality["rows_nonexistent_time"]) == (1, 0)


def test_times_alone_that_are_missing(tmp_path):
    path = tmp_path / "es.parquet"
    frame(range(2)).assign(time=pd.array([pd.NaT] * 2, dtype="datetime64[ns]")).to_parquet(path)
    with pytest.raises(ValueError, match=r"es\.parquet holds no bars of 'ES'$"):
        read(path, tz="UTC")


def test_stamps_at_the_end(tmp_path):
    path = tmp_path / "es.csv"
    path.write_text("time,open,high,low,close,volume\n" + rows(["2024-01-09T15:01:00Z", "2024-01-09T15:02:00Z"]))
    (chunk,), _, _ = read(path, stamp="end")
    assert chunk.bars.start.tolist() == [ns("2024-01-09 09:00"), ns("2024-01-09 09:01")]
    assert chunk.bars.ts.tolist() == [ns("2024-01-09 09:01"), ns("2024-01-09 09:02")]
    with pytest.raises(ValueError, match="stamp 'close' is unknown"):
        read(path, stamp="close")


def frame(index):
    return pd.DataFrame({"open": 100.0, "high": 101.0, "low": 99.0, "close": 100.5, "volume": 7}, index=index)


def test_parquet_with_the_times_in_the_index_or_a_column(tmp_path):
    times = pd.date_range("2024-01-09 09:00", periods=3, freq="min", tz="America/Chicago", name="datetime")
    expected = [ns("2024-01-09 09:00") + k * MINUTE for k in range(3)]
    frame(times).to_parquet(tmp_path / "a.parquet")
    frame(times).reset_index().to_parquet(tmp_path / "b.parquet")
    frame(times.tz_localize(None)).to_parquet(tmp_path / "c.parquet")
    frame(times).to_parquet(tmp_path / "D.PARQUET")
    for name in ("a.parquet", "b.parquet", "D.PARQUET"):
        (chunk,), _, _ = read(tmp_path / name)
        assert chunk.bars.start.tolist() == expected
    with pytest.raises(ValueError, match=r"c\.parquet has times without a time zone"):
        read(tmp_path / "c.parquet")
    (chunk,), _, _ = read(tmp_path / "c.parquet", tz="America/Chicago")
    assert chunk.bars.start.tolist() == expected


def test_symbol_column(tmp_path):
    times = ["2024-01-09T15:00:00Z", "2024-01-09T15:01:00Z"]
    path = tmp_path / "all.csv"
    labels = ["ESH4", "ESM24", "NQH4", "ESH4-ESM4"]
    lines = [line for label in labels for line in rows([f"{label},{time}" for time in times]).splitlines()]
    path.write_text("symbol,time,open,high,low,close,volume\n" + "\n".join(lines))
    chunks, _, quality = read(path)
    assert [(chunk.contract, chunk.row.tolist()) for chunk in chunks] == [("ESH24", [1, 2]), ("ESM24", [3, 4])]
    assert (quality["rows_other_symbols"], quality["rows_spreads"], quality["rows_unmapped"]) == (2, 2, 0)
    for symbol in ("ESM24", "ESM4"):
        assert [(chunk.contract, chunk.row.tolist()) for chunk in read(path, symbol=symbol)[0]] == [("ESM24", [3, 4])]
    with pytest.raises(ValueError, match=r"all\.csv holds no bars of 'MES' but of ESH4, ESM24, NQH4, ESH4-ESM4"):
        read(path, symbol="MES")
    path.write_text("symbol,time,open,high,low,close,volume\n" + rows([f"ES,{time}" for time in times]))
    assert read(path)[0][0].contract == "ES"


def test_named_columns(tmp_path):
    path = tmp_path / "es.csv"
    path.write_text("when,open,high,low,Settle,volume\n" + rows(["2024-01-09T15:00:00Z", "2024-01-09T15:01:00Z"]))
    (chunk,), _, _ = read(path, columns={"time": "when", "close": "Settle"})
    assert chunk.bars.close.tolist() == [100.5, 100.5]
    with pytest.raises(
        ValueError, match=r"es\.csv has no column for 'time', 'close' among when, open, high, low, Settle"
    ):
        read(path)
    with pytest.raises(ValueError, match="has no column 'When', which columns gives for 'time'"):
        read(path, columns={"time": "When"})
    with pytest.raises(ValueError, match="columns names 'settle', expected one of time"):
        read(path, columns={"settle": "Settle"})


@pytest.mark.parametrize(
    ("text", "options", "match"),
    [
        ("", {}, "is empty"),
        ("time,open,high,low,close\n", {}, "holds no rows, only a header"),
        ("time,open,high,low\n1,2,3,4\n", {}, "has no column for 'close' among time, open, high, low"),
        ("time,open,high,low,close\n1,2,3,1,2\n1,2,3,1,2\n", {},
         "has '1' in its time column 'time' in row 1, expected dates"),
        ("time,open,high,low,close\nnoon,2,3,1,2\n", {},
         "has 'noon' in its time column 'time' in row 1, expected dates"),
        ("time,open,high,low,close\n2024-01-09T15:00:00Z,2,3,1,2\n2024-01-09T15:00:00,2,3,1,2\n", {},
         "has no offset from UTC in its time column 'time' in row 2, expected one"),
        ("time,open,high,low,close\n2024-01-09T15:00:00Z,2,3,1,2\n1601-01-09T15:01:00Z,2,3,1,2\n", {},
         "has '1601-01-09' in its time column 'time' in row 2, which is no date from 1678 to 2261"),
        ("time,open,high,low,close\n3023-01-09T15:00:00Z,2,3,1,2\n", {},
         "has '3023-01-09' in its time column 'time' in row 1"),
        ("time,open,high,low,close\n2024-01-09 15:00,2,3,1,2\n", {"tz": "Chicago"}, "tz 'Chicago' is not the name"),
        ("time,open,high,low,close\n2024-01-09T15:00:00Z,2,3,1,2\n", {}, "too few rows to tell the length of its bars"),
    ],
)  # fmt: skip
def test_refusals_are_one_sentence(tmp_path, text, options, match):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=match) as error:
        read(path, **options)
    assert "\n" not in str(error.value)
    assert "tz" in options or str(path) in str(error.value)


def test_a_file_that_is_no_parquet(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read: "):
        read(tmp_path / "a.parquet")


def test_files_of_different_bar_lengths(tmp_path):
    for name, times in (("a", ["15:00", "15:01"]), ("b", ["15:00", "15:05"])):
        text = rows([f"2024-01-09T{time}:00Z" for time in times])
        (tmp_path / f"{name}.csv").write_text("time,open,high,low,close,volume\n" + text)
    with pytest.raises(ValueError, match=r"a\.csv holds bars of 60 s and .*b\.csv of 300 s, expected one length"):
        read([tmp_path / "a.csv", tmp_path / "b.csv"])


def test_a_file_that_does_not_tell_day_from_month_beside_one_with_the_day_first(tmp_path):
    header = "time,open,high,low,close,volume\n"
    a, b, c = (tmp_path / f"{name}.csv" for name in "abc")
    a.write_text(header + rows(["31/01/2024 15:00", "31/01/2024 15:01"]))
    b.write_text(header + rows(["01/02/2024 15:00", "01/02/2024 15:01"]))
    c.write_text(header + rows(["01/31/2024 15:00", "01/31/2024 15:01"]))
    with pytest.raises(ValueError, match=r"a\.csv has dates with the day first, and in .*b\.csv nothing tells"):
        read([b, a], tz="UTC")
    chunks, *_ = read([b, c], tz="UTC")
    assert [str(np.datetime64(int(chunk.bars.start[0]), "ns"))[:10] for chunk in chunks] == ["2024-01-02", "2024-01-31"]


def write_market(path, close, first="2024-01-09 09:00", volume=None, minutes=1):
    """A series of bars that open at the close before."""
    start = pd.to_datetime(ns(first) + minutes * MINUTE * np.arange(len(close)), utc=True)
    opening = np.concatenate([close[:1], close[:-1]])
    high, low = np.maximum(opening, close), np.minimum(opening, close)
    data = {"time": start, "open": opening, "high": high, "low": low, "close": close}
    pd.DataFrame(data | ({} if volume is None else {"volume": volume})).to_csv(path, index=False)


@pytest.mark.parametrize(
    ("name", "contract"),
    [
        ("ESH24.csv", "ESH24"), ("ESH2024.csv", "ESH24"), ("ESH2020.csv", "ESH20"), ("ESH20.csv", "ESH20"),
        ("CME_MINI_ESM2024, 1.csv", "ESM24"), ("esz24.csv", "ESZ24"), ("ESH4.csv", "ESH24"),
        ("ES 03-24.Last.txt", "ESH24"), ("ES 06-24.csv", "ESM24"), ("ES 09-24.csv", "ESU24"),
        ("ES 12-24.csv", "ESZ24"),
        ("ES 01-24.csv", "ES"), ("ES_M5.csv", "ES"), ("mesh24.csv", "ES"), ("ES1!, 1.csv", "ES"), ("bars_u5.csv", "ES"),
    ],
)  # fmt: skip
def test_a_contract_is_told_by_the_files_name(tmp_path, name, contract):
    write_market(tmp_path / name, np.full(10, 5100.0))
    (chunk,), *_ = read(tmp_path / name)
    assert chunk.contract == contract


@pytest.mark.parametrize("name", ["MESH24.csv", "NQH2024.csv", "NQ 03-24.Last.txt"])
def test_a_file_named_after_another_root_is_refused(tmp_path, name):
    write_market(tmp_path / name, np.full(10, 5100.0))
    with pytest.raises(ValueError, match=r"holds no bars of 'ES' but of (MES|NQ)H24"):
        read(tmp_path / name)


def test_contracts_that_no_name_tells_apart_are_refused(tmp_path):
    """Twelve minutes are in both files, with prices 60 points apart."""
    write_market(tmp_path / "ES_H24.csv", np.full(20, 5100.0))
    write_market(tmp_path / "ES_M24.csv", np.full(20, 5160.0), "2024-01-09 09:08")
    with pytest.raises(ValueError, match=r"12 of 28 bars contradict .* the first in row 1 of ES_M24\.csv"):
        load_segments(tmp_path)


def test_a_directory_of_contract_files_becomes_one_chain(tmp_path):
    write_market(tmp_path / "ESH24.csv", np.full(10, 5100.0), "2024-03-14 09:00", np.full(10, 5))
    write_market(tmp_path / "ESM24.csv", np.full(10, 5160.0), "2024-03-18 09:00", np.full(10, 5))
    segments, interval, quality, provenance = load_segments(tmp_path)
    assert [(s.instrument, s.first, len(s.bars)) for s in segments] == [("ESH24", 0, 10), ("ESM24", 0, 10)]
    assert interval == MINUTE
    assert np.isnan(segments[1].gap)
    assert (quality["files"], quality["rolls"], quality["rolls_unmeasured"]) == (2, 1, 1)
    assert provenance["contracts"] == ["ESH24", "ESM24"]
    segments, *_ = load_segments(tmp_path, max_bars=12)
    assert [len(s.bars) for s in segments] == [10, 2]


def test_missing_volume_is_zero_and_counted(tmp_path):
    write_market(tmp_path / "es.csv", np.full(4, 5000.0))
    segments, _, quality, _ = load_segments(tmp_path / "es.csv")
    assert segments[0].bars.volume.tolist() == [0, 0, 0, 0]
    assert (segments[0].instrument, quality["rows_without_volume"], quality["rows_zero_volume"]) == ("ES", 4, 0)


def test_two_interleaved_series_are_refused_with_count_and_first_row(tmp_path):
    close = np.tile([5000.0, 5000.0, 5100.0, 5100.0], 50)
    path = tmp_path / "two.csv"
    write_market(path, close)
    text = pd.read_csv(path)
    text["open"] = text["close"]  # each bar opens on its own series, 2 % away from the bar before at every switch
    text.to_csv(path, index=False)
    # Switches at rows 3, 5, 7, ... 199 (counted from 1): 99 of them.
    with pytest.raises(
        ValueError, match=r"two\.csv is corrupt: 99 of 200 bars have impossible returns.*in row 3 of two\.csv"
    ):
        load_segments(path)


def test_a_single_slip_is_reported(tmp_path):
    path = tmp_path / "slip.csv"
    write_market(path, np.full(600, 5000.0))
    text = pd.read_csv(path)
    text.loc[299, ["open", "high", "low", "close"]] = 500.0
    text.to_csv(path, index=False)
    _, _, quality, _ = load_segments(path)
    assert quality["impossible_returns"] == 2  # in and out
    assert quality["impossible_returns_first"] == "in row 300 of slip.csv (2024-01-09T19:59:00 UTC)"


def test_reopening_after_a_halt_is_no_impossible_return(tmp_path):
    # A limit halt of a quarter of an hour, then 3 % lower: 2020-03-16.
    path = tmp_path / "halt.csv"
    write_market(path, np.repeat([2700.0, 2619.0], 10), "2020-03-16 08:10")
    text = pd.read_csv(path)
    text.loc[10, ["open", "high"]] = 2619.0
    text = text.drop(index=range(7, 10))
    text.to_csv(path, index=False)
    assert load_segments(path)[2]["impossible_returns"] == 0


def test_overlapping_bars(tmp_path):
    start = ns("2024-01-09 09:00") + np.concatenate([5 * MINUTE * np.arange(400), [12 * MINUTE]])
    table = frame(pd.to_datetime(np.sort(start), utc=True).rename("time"))
    table.to_csv(tmp_path / "one.csv")
    segments, interval, quality, _ = load_segments(tmp_path / "one.csv")
    assert interval == 5 * MINUTE
    assert quality["rows_overlapping"] == 1  # 09:12 starts before 09:10's end; 09:15 follows 09:10, the last one kept
    assert quality["rows_overlapping_first"].startswith("in row 4 of one.csv")
    assert np.all(np.diff(segments[0].bars.start) >= 5 * MINUTE)
    assert segments[0].bars.start[3] == ns("2024-01-09 09:15")
    # Of 09:12, 09:13, 09:14, 09:15, 09:17 and 09:19 after 09:10, only 09:15 is left; 09:20 is then its successor.
    minutes = [0, 5, 10, 12, 13, 14, 15, 17, 19, *range(20, 2000, 5)]
    frame(pd.to_datetime(ns("2024-01-09 09:00") + MINUTE * np.array(minutes), utc=True).rename("time")).to_csv(
        tmp_path / "run.csv"
    )
    segments, _, quality, _ = load_segments(tmp_path / "run.csv")
    assert quality["rows_overlapping"] == 5
    assert segments[0].bars.start[:5].tolist() == [ns("2024-01-09 09:00") + k * 5 * MINUTE for k in range(5)]
    start = np.sort(np.concatenate([start, ns("2024-01-09 09:02") + 50 * MINUTE * np.arange(30)]))
    frame(pd.to_datetime(start, utc=True).rename("time")).to_csv(tmp_path / "many.csv")
    with pytest.raises(ValueError, match="start before the one before has ended"):
        load_segments(tmp_path / "many.csv")


def test_contradicting_rows_keep_the_first(tmp_path):
    path = tmp_path / "es.csv"
    write_market(path, np.array([5000.0, 5000.25, 5000.5, 5000.75]))
    text = pd.read_csv(path)
    again = text.iloc[[1]].assign(close=5000.0)
    pd.concat([text, again, text.iloc[[2]]]).to_csv(path, index=False)
    segments, _, quality, _ = load_segments(path)
    assert segments[0].bars.close.tolist() == [5000.0, 5000.25, 5000.5, 5000.75]
    assert (quality["rows_conflicting"], quality["rows_duplicate"], quality["rows_unsorted"]) == (1, 1, 2)
    assert quality["rows_conflicting_first"].startswith("in row 5 of es.csv")


def test_single_contracts_beside_a_series_are_refused(tmp_path):
    write_market(tmp_path / "ESH24.csv", np.full(5, 5000.0))
    write_market(tmp_path / "es.csv", np.full(5, 5000.0))
    with pytest.raises(ValueError, match="holds single contracts beside a continuous series: ES, ESH24"):
        load_segments(tmp_path)


def test_minutes_that_reach_over_the_end_of_a_longer_bar(tmp_path):
    path = tmp_path / "es.csv"
    write_market(path, 5000 + 0.25 * np.arange(420))
    text = pd.read_csv(path)
    text["time"] = pd.to_datetime(text["time"], utc=True)
    text.loc[4, "time"] += pd.Timedelta(30, "s")  # 09:04:30 to 09:05:30, and the minute 09:05 left out
    text.drop(index=5).to_csv(path, index=False)
    segments, _, quality, _ = load_segments(path, bars="5m")
    assert (quality["rows_misaligned"], quality["rows_overlapping"]) == (1, 0)
    assert quality["rows_misaligned_first"] == "in row 5 of es.csv (2024-01-09T15:04:30 UTC)"
    assert segments[0].bars.close[:2].tolist() == [5000.75, 5002.25]  # of the minutes 09:03 and 09:09
    assert load_segments(path)[2]["rows_misaligned"] == 0  # single minutes stay where they are
    # All half a minute late: every fifth would bring prices of the next five minutes into these.
    text["time"] = pd.to_datetime(ns("2024-01-09 09:00") + MINUTE * np.arange(420) + MINUTE // 2, utc=True)
    text.to_csv(path, index=False)
    with pytest.raises(ValueError, match=r"84 of 336 bars reach over the end of the 5m bar .* in row 5 of es\.csv"):
        load_segments(path, bars="5m")
    assert load_segments(path, bars="1d")[0][0].bars.close.tolist() == [5104.75]


def test_regular_hours_end_a_markets_sessions(tmp_path):
    # Tuesday 2024-01-09 14:00 to Wednesday 16:00; one day's hours are 08:30 to 15:00, 390 minutes.
    write_market(tmp_path / "es.csv", np.full(26 * 60, 5000.0), "2024-01-09 14:00", np.full(26 * 60, 5))
    market = load_market(tmp_path / "es.csv", hours="rth", features=[ZERO])
    ends = np.flatnonzero(market.session_last)
    assert market.ts[ends].tolist() == [ns("2024-01-09 15:00"), ns("2024-01-10 15:00")]
    assert market.fraction_left[ends].tolist() == [0, 0]
    opening = ends[0] + 1
    assert market.ts[opening] == ns("2024-01-10 08:31")
    assert market.fraction_left[opening] == np.float32(389 / 390)
    assert market.after_break[opening]
    assert market.fraction_left[np.flatnonzero(market.ts == ns("2024-01-09 14:30"))] == np.float32(30 / 390)


NINE = [ns("2024-01-09 09:00"), ns("2024-01-09 09:01")]
UTC_ROWS = rows(["2024-01-09T15:00:00Z", "2024-01-09T15:01:00Z"])
HEADER = "time,open,high,low,close,volume\n"


def starts(path, **options):
    (chunk,), _, _ = read(path, **options)
    return chunk.bars.start.tolist()


@pytest.mark.parametrize(
    "above",
    [
        "# ES, 1 minute, Chicago; 5 columns, 2 rows\n",
        "// exported 2024-01-10\n\n; by hand\n",
        "ES futures\nbars of one minute, times in UTC, prices in points, volumes in contracts, no gaps\n",
        "#" + 30_000 * "-" + "\n",
    ],
)
def test_lines_above_the_header(tmp_path, above):
    path = tmp_path / "es.csv"
    for header in (HEADER, "# " + HEADER, "\n\n" + HEADER):
        path.write_text(above + header + UTC_ROWS)
        (chunk,), _, quality = read(path)
        assert (chunk.bars.start.tolist(), chunk.row.tolist()) == (NINE, [1, 2])
        assert (quality["rows_read"], quality["rows_broken"]) == (2, 0)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "latin-1"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("block", [160, 1 << 22])
def test_encodings_and_line_ends(tmp_path, monkeypatch, encoding, line_end, block):
    monkeypatch.setattr("fox_env.data.tables._BLOCK_BYTES", block)
    path = tmp_path / "es.csv"
    lines = rows([f"2024-01-09T15:{minute:02}:00Z" for minute in range(20)]).replace("7\n", "7,CME\n")
    text = "# Kurse für ES\n" + HEADER.replace("\n", ",Börse\n") + lines.replace("CME", "CME Größe", 1)
    path.write_bytes(text.replace("\n", line_end).encode(encoding))
    assert starts(path) == [NINE[0] + k * MINUTE for k in range(20)]


@pytest.mark.parametrize(
    "header",
    [
        "<DATE>\t<OPEN>\t<HIGH>\t<LOW>\t<CLOSE>\t<VOL>\n",
        ' "Timestamp" ; "Open";"High" ;"Low";"Last";"Volume"\n',
        ",Open,High,Low,Close,Volume\n",  # pandas writes an index without a name so
        "time,open,high,low,close,volume,close,open\n",  # of two columns with one name the first counts
    ],
)
def test_headers(tmp_path, header):
    path = tmp_path / "es.csv"
    separator = next(s for s in "\t;," if s in header)
    text = rows(["2024-01-09T15:00:00Z", "2024-01-09T15:01:00Z"], separator)
    if "close,open" in header:
        text = text.replace("7\n", "7,8,9\n")
    path.write_text(header + text)
    (chunk,), _, _ = read(path)
    assert chunk.bars.start.tolist() == NINE
    assert (chunk.bars.open[0], chunk.bars.close[0], chunk.bars.volume[0]) == (100, 100.5, 7)


@pytest.mark.parametrize(("header", "row"), [(",", ""), ("", ","), (",", ","), (",,", ",")])
def test_separators_at_the_end_of_lines(tmp_path, header, row):
    path = tmp_path / "es.csv"
    path.write_text(HEADER.replace("\n", header + "\n") + UTC_ROWS.replace("\n", row + "\n"))
    assert starts(path) == NINE


def test_no_header(tmp_path):
    path = tmp_path / "es.csv"
    path.write_text("# no header\n" + UTC_ROWS)
    names = ["time", "open", "high", "low", "close", "volume"]
    (chunk,), _, _ = read(path, columns=names)
    assert (chunk.bars.start.tolist(), chunk.row.tolist()) == (NINE, [1, 2])
    assert (chunk.bars.close.tolist(), chunk.bars.volume.tolist()) == ([100.5, 100.5], [7, 7])
    (chunk,), _, _ = read(path, columns={"time": 0, "open": 1, "high": 2, "low": 3, "close": 4})
    assert (chunk.bars.close.tolist(), np.isnan(chunk.bars.volume).all()) == ([100.5, 100.5], True)
    assert starts(path, columns=["Date", "O", "H", "L", "Last", None]) == NINE
    for columns in (None, {"time": "time"}):
        with pytest.raises(ValueError, match=r"es\.csv has no header above its first row '2024-.*name its columns in"):
            read(path, columns=columns)
    with pytest.raises(ValueError, match=r"es\.csv has 6 cells in its rows and 7 in columns="):
        read(path, columns=[*names, "trades"])
    with pytest.raises(ValueError, match=r"es\.csv has no column 9, which columns gives for 'open'"):
        read(path, columns={"time": 0, "open": 9, "high": 2, "low": 3, "close": 4})
    # Names for all columns replace a header, here a wrong one: high and low are exchanged.
    path.write_text("time,open,low,high,close,volume\n" + UTC_ROWS)
    (chunk,), _, _ = read(path, columns=names)
    assert (chunk.bars.high.tolist(), chunk.row.tolist()) == ([101, 101], [1, 2])
    # Positions work beside a header, too.
    (chunk,), _, _ = read(path, columns={"high": 2, "low": 3})
    assert (chunk.bars.high[0], chunk.bars.low[0]) == (101, 99)


@pytest.mark.parametrize("columns", ["time", [1, 2], {"time": 1.5}, {"time": -1}, {"time": True}])
def test_columns_of_a_wrong_kind(tmp_path, columns):
    path = tmp_path / "es.csv"
    path.write_text(HEADER + UTC_ROWS)
    with pytest.raises(ValueError, match=r"columns (is|gives) .*, expected "):
        read(path, columns=columns)


NINJATRADER = "20240109 090100;100;101;99;100.5;7\n20240109 090200;100;101;99;100.5;7\n"


def test_ninjatraders_form_has_ends_of_bars(tmp_path):
    path = tmp_path / "ES 03-24.Last.txt"
    path.write_text(NINJATRADER)
    table = read_tabular([path], symbol="ES", tz="America/Chicago", quality={})
    assert (table.stamp, table.length, table.chunks[0].bars.start.tolist()) == ("end", MINUTE, NINE)
    table = read_tabular([path], symbol="ES", tz="America/Chicago", stamp="start", quality={})
    assert (table.stamp, table.chunks[0].bars.start.tolist()) == ("start", [t + MINUTE for t in NINE])
    with pytest.raises(ValueError, match=r"Last\.txt has times without a time zone, such as 2024-01-09 09:01:00"):
        read(path)
    # A whole day is named by its date: it would not be over when that day begins.
    path.write_text("20240108;100;101;99;100.5;7\n20240109;100;101;99;100.5;7\n")
    table = read_tabular([path], symbol="ES", tz="America/Chicago", quality={})
    assert (table.stamp, table.length) == ("start", 1440 * MINUTE)
    assert table.chunks[0].bars.start.tolist() == [ns("2024-01-08 00:00"), ns("2024-01-09 00:00")]


def test_stamps_of_several_forms_must_be_told(tmp_path):
    (tmp_path / "a.txt").write_text(NINJATRADER)
    (tmp_path / "b.csv").write_text(HEADER + UTC_ROWS)
    files = [tmp_path / "a.txt", tmp_path / "b.csv"]
    with pytest.raises(ValueError, match=r"a\.txt has times of bars' ends.* and .*b\.csv has not: give stamp="):
        read(files, tz="America/Chicago")
    assert len(read(files, tz="America/Chicago", stamp="start")[0]) == 2


@pytest.mark.parametrize(
    ("header", "times"),
    [
        ("time", ["20240109090000", "20240109090100"]),
        ("time", ["202401090900", "202401090901"]),
        ("time", ["2024.01.09 09:00", "2024.01.09 09:01"]),
        ("time", ["01/09/2024 9:00:00 AM", "01/09/2024 9:01:00 AM"]),
        ("time", ["2024-01-09T09:00:00.000000000", "2024-01-09T09:01:00.000000000"]),
        ("Date,Time", ["20240109,90000", "20240109,90100"]),  # HHmmss that lost its zeros as a number
        ("Date,Time", ["20240109,0900", "20240109,0901"]),
        ("Date,Time", ["20240109,900", "20240109,901"]),
        ("Date, Time", ["2024/1/9, 09:00:00", "2024/1/9, 09:01:00"]),
        ("Date,Time", ["2024-01-09,2024-01-09 09:00", "2024-01-09,2024-01-09 09:01"]),
        ("Date,Time", ["2024-01-09 09:00,x", "2024-01-09 09:01,x"]),
    ],
)
def test_more_forms_of_wall_clock_times(tmp_path, header, times):
    path = tmp_path / "es.csv"
    path.write_text(f"{header},open,high,low,close,volume\n" + rows(times))
    assert starts(path, tz="America/Chicago") == NINE


def test_month_first_with_slashes(tmp_path):
    path = tmp_path / "es.csv"
    path.write_text(HEADER + rows(["9/1/2019 0:05", "9/1/2019 0:10"]))
    assert starts(path, tz="UTC") == [ns("2019-09-01 00:05", "UTC"), ns("2019-09-01 00:10", "UTC")]
    path.write_text(HEADER + rows(["2015/3/20 0:05", "2015/3/20 0:10"]))
    assert starts(path, tz="UTC") == [ns("2015-03-20 00:05", "UTC"), ns("2015-03-20 00:10", "UTC")]
    # 13 cannot be a month, so the whole column has the day first.
    path.write_text(HEADER + rows(["9/1/2019 0:05", "13/1/2019 0:05"]))
    assert starts(path, tz="UTC", bars=MINUTE) == [ns("2019-01-09 00:05", "UTC"), ns("2019-01-13 00:05", "UTC")]


def test_days_and_months_that_nothing_tells_apart(tmp_path):
    path = tmp_path / "es.csv"
    for date, expected in (("13.02.2024", "2024-02-01"), ("02.13.2024", "2024-01-02")):
        path.write_text(HEADER + rows(["01.02.2024 00:05", f"{date} 00:05"]))
        assert starts(path, tz="UTC")[0] == ns(f"{expected} 00:05", "UTC")
    path.write_text(HEADER + rows(["01.02.2024 00:05", "01.02.2024 00:10"]))
    with pytest.raises(ValueError, match=r"has '01\.02\.2024' in its time column 'time' in row 1, of which nothing"):
        read(path, tz="UTC")
    path.write_text(HEADER + rows(["01.02.2024", "02.13.2024", "13.02.2024"]))
    with pytest.raises(
        ValueError, match=r"has '13\.02\.2024' .* in row 3, where the day comes first, and '02\.13\.2024"
    ):
        read(path, tz="UTC")


def test_offsets_that_change_with_daylight_saving_time(tmp_path):
    path = tmp_path / "es.csv"
    # 01:30 happens twice, and 30 minutes lie between the two stamps around the change at 02:00 EDT = 06:00 UTC.
    path.write_text(HEADER + rows(["2024-11-03 01:30:00-04:00", "2024-11-03 01:00:00-05:00", "2024-11-03T06:30:00Z"]))
    assert starts(path) == [ns(f"2024-11-03 {clock}", "UTC") for clock in ("05:30", "06:00", "06:30")]


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
@pytest.mark.parametrize("per_second", [1, 10**3, 10**6, 10**9])
def test_epoch_numbers(tmp_path, kind, text, per_second):
    times = [1704812400 * per_second, 1704812460 * per_second]
    first, second = (f'"{time}"' if text else str(time) for time in times)
    path = tmp_path / f"es.{kind}"
    if kind == "csv":
        path.write_text(HEADER + rows([first, second]))
    elif kind == "json":
        values = '"open": 100, "high": 101, "low": 99, "close": 100.5, "volume": 7'
        path.write_text(f'[{{"time": {first}, {values}}}, {{"time": {second}, {values}}}]')
    else:
        frame(range(2)).assign(time=list(map(str, times)) if text else times).to_parquet(path)
    assert starts(path) == NINE


def test_fractions_of_seconds(tmp_path):
    path = tmp_path / "es.csv"
    path.write_text(HEADER + rows(["1704812400.5", "1.70481246050e9", "1704812520.50"]))
    assert starts(path) == [NINE[0] + k * MINUTE + 500_000_000 for k in range(3)]


def test_nanoseconds_are_exact(tmp_path):
    odd = [1704812400000000001, 1704812400000000007, 1704812400000000013]  # float64 knows multiples of 256 here
    for name, write in (
        ("a.csv", lambda path: path.write_text(HEADER + rows([*odd, ""]))),
        ("a.parquet", lambda path: frame(range(3)).assign(time=odd).to_parquet(path)),
        ("b.parquet", lambda path: frame(pd.DatetimeIndex(odd, tz="UTC")).to_parquet(path)),
        ("b.csv", lambda path: path.write_text(HEADER + rows([f"2024-01-09T15:00:00.{k:09}Z" for k in (1, 7, 13)]))),
    ):
        write(tmp_path / name)
        (chunk,), length, _ = read(tmp_path / name)
        assert (chunk.bars.start.tolist(), length) == (odd, 6)


@pytest.mark.parametrize("value", [2**63 - 1, 2**63, 2**64 - 1, 10**30, 1, 1e14, -1704812400])
@pytest.mark.parametrize("kind", ["csv", "json", "parquet"])
def test_numbers_that_are_no_times(tmp_path, value, kind):
    path = tmp_path / f"es.{kind}"
    if kind == "csv":
        path.write_text(HEADER + rows([1704812400000000000, 1704812460000000000, value]))
    elif kind == "json":
        values = '"open": 100, "high": 101, "low": 99, "close": 100.5'
        path.write_text(f'[{{"time": 1704812400, {values}}},\n {{"time": {value}, {values}}}]')
    elif abs(value) < 2**64:
        dtype = np.uint64 if value > 2**62 else None
        frame(range(2)).assign(time=np.array([1704812400000000000, value], dtype)).to_parquet(path)
    else:
        pytest.skip("not in Parquet")
    with pytest.raises(ValueError, match=r"has '.*' in its time column 'time' in row \d, expected dates such as"):
        read(path, bars=MINUTE)


def test_changing_kinds_of_times(tmp_path, monkeypatch):
    monkeypatch.setattr("fox_env.data.tables._BLOCK_BYTES", 100)
    path = tmp_path / "es.csv"
    path.write_text(HEADER + rows(10 * [1704812400] + 20 * [""] + 10 * [1704812400000]))
    with pytest.raises(ValueError, match="another kind of time in its time column 'time' in row 31, expected one"):
        read(path)


@pytest.mark.parametrize("times", [["2024-01-09 15:00"] * 3, ["2024-01-09"] * 3])
def test_one_time_in_all_rows(tmp_path, times):
    path = tmp_path / "es.csv"
    path.write_text(HEADER + rows(times))
    with pytest.raises(ValueError, match=r"es\.csv has the same time in all of its 3 rows, 2024-01-09 .* UTC"):
        read(path, tz="UTC", bars=MINUTE)


@settings(max_examples=200, deadline=None)
@given(
    zone=st.sampled_from(["America/Chicago", "Europe/London", "Australia/Lord_Howe", "America/Havana", "Asia/Kolkata"]),
    seconds=st.lists(st.integers(946_684_800, 1_893_456_000), min_size=1, max_size=20),
)
def test_wall_clocks_against_the_standard_library(zone, seconds):
    zone = ZoneInfo(zone)
    moments = [dt.datetime.fromtimestamp(s, zone).replace(fold=0) for s in seconds]
    moments += [dt.datetime(2024, 3, 10, 2, 30, tzinfo=zone), dt.datetime(2024, 11, 3, 1, 30, tzinfo=zone)]
    utc, skipped, repeated = to_utc(
        np.array([int(m.replace(tzinfo=dt.UTC).timestamp()) * 10**9 for m in moments]), zone
    )
    for k, moment in enumerate(moments):
        assert utc[k] == int(moment.timestamp()) * 10**9
        back = moment.astimezone(dt.UTC).astimezone(zone)
        assert skipped[k] == (back.replace(tzinfo=None) != moment.replace(tzinfo=None))
        later = moment.replace(fold=1)
        assert repeated[k] == (not skipped[k] and later.utcoffset() != moment.utcoffset())


@pytest.mark.parametrize("zone", ["America/Chicago", "Australia/Lord_Howe", "America/Havana"])
def test_every_minute_of_the_days_on_which_clocks_change(zone):
    zone = ZoneInfo(zone)
    days = [d for d in range(19_700, 20_450) if dt_offset(d, zone) != dt_offset(d + 1, zone)]
    assert len(days) == 4
    for day in days:
        local = np.array([(day * 1440 + minute) * MINUTE for minute in range(-1440, 2880)])
        utc, skipped, repeated = to_utc(local, zone)
        moments = [dt.datetime(1970, 1, 1, tzinfo=zone) + dt.timedelta(minutes=int(t // MINUTE)) for t in local]
        assert utc.tolist() == [int(m.timestamp()) * 10**9 for m in moments]
        change = abs(dt_offset(day + 1, zone) - dt_offset(day, zone)) // 60
        assert sorted([int(skipped.sum()), int(repeated.sum())]) == [0, change]


def dt_offset(day, zone):
    moment = dt.datetime(1970, 1, 1, tzinfo=zone) + dt.timedelta(day)
    return int(moment.utcoffset().total_seconds())


JSON_ROWS = [
    {"time": 1704812400, "open": 100.0, "high": 101.0, "low": 99.0, "close": 100.5},
    {"time": 1704812460, "open": 100.5, "high": 101.0, "low": 99.0, "close": 100},
]


def test_json_lists_and_lines(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(JSON_ROWS, indent=1))
    (tmp_path / "b.jsonl").write_text("\n\n".join(map(json.dumps, JSON_ROWS)) + "\n")
    (tmp_path / "c.json.gz").write_bytes(gzip.compress(json.dumps(JSON_ROWS).encode()))
    (tmp_path / "d.json").write_text("".join(json.dumps(row) + "\n" for row in JSON_ROWS))
    for name in ("a.json", "b.jsonl", "c.json.gz", "d.json"):
        (chunk,), length, quality = read(tmp_path / name)
        assert (chunk.bars.start.tolist(), length, quality["files_without_bars"]) == (NINE, MINUTE, 0)
        assert (chunk.bars.close.tolist(), chunk.row.tolist()) == ([100.5, 100], [1, 2])
        assert np.isnan(chunk.bars.volume).all()


def test_texts_that_are_no_tables_of_bars_are_passed_over_beside_bars(tmp_path):
    bars = tmp_path / "a.csv"
    bars.write_text("time,open,high,low,close,volume\n" + rows(["2024-01-09T15:00:00Z", "2024-01-09T15:01:00Z"]))
    (tmp_path / "README.txt").write_text("Bars of ES.\nFrom the exchange, with thanks.\n")
    (tmp_path / "symbology.csv").write_text("raw_symbol,instrument_id,date\nESH4,17,2024-01-09\n")
    (chunk,), _, quality = read(sorted(tmp_path.iterdir()))
    assert (chunk.bars.start.tolist(), quality["files_without_bars"], quality["rows_read"]) == (NINE, 2, 2)
    for name in ("README.txt", "symbology.csv"):
        with pytest.raises(ValueError, match=rf"{name} has no header with time, open, high, low and close"):
            read(tmp_path / name)
    # Numbers that may be prices are not passed over.
    (tmp_path / "b.csv").write_text("time,p,q,r,s\n2024-01-09T15:02:00Z,100,101,99,100\n")
    with pytest.raises(ValueError, match=r"b\.csv has no column for 'open', 'high', 'low', 'close' among time, p"):
        read(sorted(tmp_path.iterdir()))


def test_json_documents_that_are_no_bars_are_passed_over(tmp_path):
    later = [row | {"time": row["time"] - 3600} for row in JSON_ROWS]
    for name, document in (
        ("chunk_0", JSON_ROWS), ("chunk_1", later), ("condition", [{"date": "2024-01-09", "condition": "available"}]),
        ("empty", []), ("meta", {"ticker": "ES1", "chunks": [1]}), ("note", "text"),
    ):  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(document, indent=2))
    segments, interval, quality, _ = load_segments(tmp_path)
    assert (quality["files_without_bars"], quality["rows_read"], interval) == (4, 4, MINUTE)
    assert segments[0].bars.start.tolist() == [NINE[0] - 60 * MINUTE, NINE[1] - 60 * MINUTE, *NINE]
    for name in ("empty", "meta", "note"):
        with pytest.raises(ValueError, match=rf"{name}\.json holds no list of bars"):
            read(tmp_path / f"{name}.json")
    match = r"condition\.json has no column for 'open', 'high', 'low', 'close' among date, condition"
    with pytest.raises(ValueError, match=match):
        read(tmp_path / "condition.json")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ('[{"time": 1704812400,', "cannot be read: "),
        ("[" * 100_000, "cannot be read: "),
        ('{"a":' * 100_000, "cannot be read: "),
        (json.dumps(JSON_ROWS[0]) + "\n" + '{"a":' * 100_000, 'has \'{"a":.*in row 2, which is no JSON'),
        (
            '{"time": 1, "open": 1, "high": 1, "low": 1, "close": 1}\n{"time":\n',
            "has '{\"time\":' in row 2, which is no",
        ),
        ('[{"time": 1704812400, "open": 1, "high": 1, "low": 1, "close": 1}, 5]', "has 5 in row 2, expected an object"),
    ],
)
def test_broken_json(tmp_path, text, match):
    path = tmp_path / "es.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=match):
        read(path)


def test_json_values_of_several_kinds(tmp_path):
    path = tmp_path / "es.json"
    path.write_text(json.dumps([JSON_ROWS[0] | {"volume": "7", "open": None}, JSON_ROWS[1] | {"volume": 2.5}]))
    (chunk,), _, _ = read(path)
    assert chunk.bars.volume.tolist() == [7, 2.5]
    assert np.isnan(chunk.bars.open[0])
    path.write_text(json.dumps([JSON_ROWS[0] | {"volume": [7]}, JSON_ROWS[1] | {"volume": 10**400}]))
    assert not np.isfinite(read(path)[0][0].bars.volume).any()


def zipped(data, *names):
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in names:
            archive.writestr(name, data)
    return stream.getvalue()


COMPRESS = {
    "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress,
    "zip": lambda data: zipped(data, "es.csv", "readme.md", "__MACOSX/._es.csv"),
}  # fmt: skip


@pytest.mark.parametrize("ending", COMPRESS)
def test_compressed_text(tmp_path, ending):
    path = tmp_path / f"ESH24.csv.{ending}"
    whole = COMPRESS[ending]((HEADER + UTC_ROWS).encode())
    path.write_bytes(whole)
    (chunk,), _, _ = read(path)
    assert (chunk.contract, chunk.bars.start.tolist(), chunk.file) == ("ESH24", NINE, path.name)
    for data in (whole[: len(whole) * 2 // 3], whole[: len(whole) - 5], b"nonsense"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="cannot be read: "):
            read(path)


def test_several_compressed_parts_are_one_text(tmp_path):
    for ending in ("gz", "bz2", "xz", "zst"):
        path = tmp_path / f"es.csv.{ending}"
        path.write_bytes(b"".join(COMPRESS[ending](part.encode()) for part in (HEADER, UTC_ROWS)))
        assert starts(path) == NINE


def test_archives_of_several_tables(tmp_path):
    path = tmp_path / "es.zip"
    path.write_bytes(zipped("x", "a.csv", "b.txt", "c.md"))
    with pytest.raises(ValueError, match=r"es\.zip holds 2 tables among 3 files, expected one"):
        read(path)
    path.write_bytes(zipped(json.dumps(JSON_ROWS), "bars.json"))
    assert starts(path) == NINE


def test_tables_by_name():
    yes = (
        "a.csv B.CSV a.b.txt a.tsv a.json a.jsonl a.json.gz a.csv.zst a.txt.xz a.tsv.bz2 a.csv.zip a.zip a.parquet a.pq"
    )
    no = "a a.gz a.dbn a.dbn.zst a.parquet.gz a.md csv a.csv.7z a.zst"
    assert [name for name in (yes + " " + no).split() if is_table(Path(name))] == yes.split()


DATABENTO = "ts_event,rtype,publisher_id,instrument_id,open,high,low,close,volume,symbol\n"


def databento_row(minute, identifier, price, symbol):
    prices = ",".join(str(round((price + d) * 10**9)) for d in (0, 1, -1, 0.25))
    return f"{NINE[0] + minute * MINUTE},33,1,{identifier},{prices},7,{symbol}\n"


def test_databentos_csv_of_a_parent(tmp_path):
    path = tmp_path / "glbx.csv"
    lines = [
        databento_row(0, 17, 5000, "ESH4"), databento_row(0, 18, 50.05, "ESH4-ESM4"),
        databento_row(0, 19, 5050, "ESM4"),
        databento_row(1, 17, 5000.5, "ESH4"), databento_row(1, 20, 17000, "NQH4"), databento_row(1, 21, 5100, ""),
        f"{NINE[1]},33,1,19,{','.join(4 * ['9223372036854775807'])},7,ESM4\n",
    ]  # fmt: skip
    path.write_text(DATABENTO + "".join(lines))
    chunks, length, quality = read(path, symbol="ES.FUT")
    assert [(chunk.contract, chunk.row.tolist()) for chunk in chunks] == [("ESH24", [1, 4]), ("ESM24", [3, 7])]
    bars = chunks[0].bars
    assert (bars.open.tolist(), bars.high.tolist()) == ([5000, 5000.5], [5001, 5001.5])
    assert (bars.low.tolist(), bars.close.tolist()) == ([4999, 4999.5], [5000.25, 5000.75])
    assert chunks[1].bars.open[0] == 5050
    assert np.isnan(chunks[1].bars.open[1])
    assert (bars.start.tolist(), length) == (NINE, MINUTE)
    assert {name: quality[f"rows_{name}"] for name in ("read", "spreads", "unmapped", "other_symbols", "bad_time")} == {
        "read": 7, "spreads": 1, "unmapped": 1, "other_symbols": 1, "bad_time": 0,
    }  # fmt: skip


def test_databentos_csv_of_a_continuous_symbol(tmp_path):
    path = tmp_path / "glbx.csv"
    lines = [databento_row(k, 17 + k // 2, 5000 + 40 * (k // 2), "ES.c.0") for k in range(4)]
    path.write_text(DATABENTO + "".join(lines))
    for symbol in ("ES", "ES.c.0"):
        chunks, _, _ = read(path, symbol=symbol)
        assert [(chunk.contract, chunk.row.tolist()) for chunk in chunks] == [
            ("ES.c.0:17", [1, 2]),
            ("ES.c.0:18", [3, 4]),
        ]
    with pytest.raises(ValueError, match=r"holds no bars of 'ES\.v\.0' but of ES\.c\.0"):
        read(path, symbol="ES.v.0")
    path.write_text(DATABENTO + "".join(lines) + databento_row(4, 20, 5000, "ES.v.0"))
    with pytest.raises(ValueError, match=r"holds ES\.c\.0, ES\.v\.0, expected one continuous symbol"):
        read(path)


def test_instrument_ids_without_symbols(tmp_path):
    path = tmp_path / "glbx.csv"
    text = DATABENTO + databento_row(0, 17, 5000, "") + databento_row(1, 18, 5000, "")
    path.write_text(text.replace(",symbol\n", "\n").replace("7,\n", "7\n"))
    with pytest.raises(ValueError, match="several instrument ids and no column of symbols"):
        read(path)
    assert [chunk.contract for chunk in read(path, symbol="ES.c.0")[0]] == ["ES.c.0:17", "ES.c.0:18"]
    path.write_text(path.read_text().replace(",18,", ",17,"))
    assert [chunk.contract for chunk in read(path)[0]] == ["ES:17"]


def test_prices_in_points_are_left_alone(tmp_path):
    path = tmp_path / "es.csv"
    path.write_text(HEADER + f"{NINE[0]},5000000000,5000000000.5,5000000000,5000000000,1\n{NINE[1]},1,1,1,1,1\n")
    assert read(path)[0][0].bars.open.tolist() == [5e9, 1]


def test_numbers_as_people_write_them(tmp_path):
    path = tmp_path / "es.csv"
    path.write_text(
        HEADER
        + '2024-01-09T15:00:00Z,"5,000.25", 5001 ,"4999.",+5000.5,"12,345"\n'
        + '2024-01-09T15:01:00Z,"5,000.25",5.001e3,n/a,5000.5,-\n'
    )
    bars = read(path)[0][0].bars
    assert [bars.open[0], bars.high[0], bars.low[0], bars.close[0], bars.volume[0]] == [
        5000.25,
        5001,
        4999,
        5000.5,
        12345,
    ]
    assert bars.high[1] == 5001
    assert np.isnan([bars.low[1], bars.volume[1]]).all()


@pytest.mark.parametrize("number", ["5000,25", "5.000,25", "-5000,5"])
def test_decimal_commas_are_refused(tmp_path, number):
    path = tmp_path / "es.csv"
    text = (
        HEADER.replace(",", ";")
        + f"2024-01-09T15:00:00Z;5000;5001;4999;5000;7\n2024-01-09T15:01:00Z;1;2;1;{number};7\n"
    )
    path.write_text(text)
    with pytest.raises(
        ValueError, match=rf"es\.csv has '{number}' in its column 'close' in row 2, expected a decimal p"
    ):
        read(path)


def test_a_column_without_numbers(tmp_path):
    path = tmp_path / "es.csv"
    path.write_text(HEADER + UTC_ROWS.replace("100.5", "abc"))
    with pytest.raises(ValueError, match=r"es\.csv has no number in its column 'close' for 'close'"):
        read(path)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.decimals(min_value="0.01", max_value="99999", places=9), min_size=2, max_size=30))
def test_prices_are_those_that_python_reads(tmp_path, prices):
    path = tmp_path / "es.csv"
    path.write_text(HEADER + "".join(f"{NINE[0] + k * MINUTE},{p},{p},{p},{p},1\n" for k, p in enumerate(prices)))
    assert read(path)[0][0].bars.open.tolist() == [float(str(p)) for p in prices]


def test_rows_with_other_numbers_of_cells(tmp_path):
    path = tmp_path / "es.csv"
    lines = rows([f"2024-01-09T15:{minute:02}:00Z" for minute in range(60)]).splitlines()
    lines[2] += ",8,9"
    lines[10] = "# a remark"
    lines[59] = lines[59][:-8]
    path.write_text("# ES\n" + HEADER + "\n".join(lines))
    (chunk,), _, quality = read(path)
    assert chunk.row.tolist() == [k for k in range(1, 60) if k not in (3, 11)]
    assert ((chunk.bars.start - NINE[0]) // MINUTE + 1).tolist() == chunk.row.tolist()
    assert (quality["rows_read"], quality["rows_broken"]) == (60, 3)
    lines[20:40] = [line.replace(".", ",") for line in lines[20:40]]
    path.write_text(HEADER + "\n".join(lines))
    with pytest.raises(
        ValueError, match=r"es\.csv has 23 of 60 rows with another number of cells .* 8 in row 3 where 6"
    ):
        read(path)
    path.write_text(HEADER + UTC_ROWS.replace("100.5", "100,5"))
    with pytest.raises(ValueError, match=r"es\.csv has 7 cells in its rows and 6 in its header"):
        read(path)


def test_a_row_number_after_broken_rows(tmp_path):
    path = tmp_path / "es.csv"
    lines = rows([f"2024-01-09T15:{minute:02}:00Z" for minute in range(9)]).splitlines()
    lines[1], lines[4] = "x", lines[4].replace("T15", "T25")
    path.write_text(HEADER + "\n".join(lines))
    with pytest.raises(ValueError, match="has '25:04:00' in its time column 'time' in row 5, which is no clock time"):
        read(path)


def test_a_quotation_mark_that_is_not_closed(tmp_path):
    path = tmp_path / "es.csv"
    lines = rows([f"2024-01-09T15:{minute:02}:00Z" for minute in range(9)]).splitlines()
    lines[4] = lines[4].replace(",7", ',"7')
    path.write_text(HEADER + "\n".join(lines))
    with pytest.raises(ValueError, match=r"es\.csv has a quotation mark near row 5 that is not closed"):
        read(path)


def test_a_header_repeated_among_the_rows(tmp_path):
    path = tmp_path / "es.csv"
    path.write_text(HEADER + rows(["2024-01-09T15:00:00Z"]) + HEADER + rows(["2024-01-09T15:01:00Z"]))
    (chunk,), _, quality = read(path)
    assert (chunk.bars.start.tolist(), chunk.row.tolist(), quality["rows_bad_time"]) == (NINE, [1, 3], 1)


@pytest.mark.parametrize("form", ["text", "epoch", "missing first"])
def test_batches_give_what_one_batch_gives(tmp_path, monkeypatch, form):
    path = tmp_path / "es.csv"
    times = [1704812400 + 60 * k for k in range(400)]
    if form == "text":
        times = [dt.datetime.fromtimestamp(t, dt.UTC).strftime("%Y/%m/%d %H:%M") for t in times]
    if form == "missing first":
        times[:50] = 50 * [""]
    lines = rows(times).splitlines()
    lines[77] = "short"
    path.write_text(
        "symbol," + HEADER + "\n".join(("ESH4," if k % 3 else "ESM4,") + line for k, line in enumerate(lines))
    )
    whole = read(path, tz="UTC")
    monkeypatch.setattr("fox_env.data.tables._BLOCK_BYTES", 200)
    parts = read(path, tz="UTC")
    assert whole[1:] == parts[1:]
    for a, b in zip(whole[0], parts[0], strict=True):
        assert (a.contract, a.row.tolist(), a.bars.start.tolist()) == (
            b.contract,
            b.row.tolist(),
            b.bars.start.tolist(),
        )
        assert a.bars.close.tolist() == b.bars.close.tolist()


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
def test_parquet_index_of_any_name_and_unit(tmp_path, unit):
    for name, zone in (("bar", "UTC"), (None, "America/Chicago")):
        index = pd.DatetimeIndex(pd.to_datetime(NINE, utc=True)).as_unit(unit).tz_convert(zone).rename(name)
        frame(index).to_parquet(tmp_path / "a.parquet")
        assert starts(tmp_path / "a.parquet") == NINE


def test_parquet_types(tmp_path):
    path = tmp_path / "es.parquet"
    prices = pa.array([decimal.Decimal("5000.250000000"), decimal.Decimal("5000.500000000")], pa.decimal128(18, 9))
    table = {
        "date": pa.array([dt.date(2024, 1, 8), dt.date(2024, 1, 9)]), "open": prices, "high": prices, "low": prices,
        "close": prices, "volume": pa.array([7, None], pa.uint32()),
        "symbol": pa.array(["ESH4", "ESH4"]).dictionary_encode(),
    }  # fmt: skip
    pq.write_table(pa.table(table), path)
    (chunk,), length, _ = read(path, tz="America/Chicago")
    assert (chunk.contract, length) == ("ESH24", 1440 * MINUTE)
    assert chunk.bars.start.tolist() == [ns("2024-01-08 00:00"), ns("2024-01-09 00:00")]
    assert (chunk.bars.open.tolist(), chunk.bars.volume[0], np.isnan(chunk.bars.volume[1])) == (
        [5000.25, 5000.5],
        7,
        True,
    )
    table["date"] = pa.array([20240108, 20240109])
    pq.write_table(pa.table(table), path)
    assert starts(path, tz="America/Chicago") == [ns("2024-01-08 00:00"), ns("2024-01-09 00:00")]
    table["volume"] = pa.array([[7], [8]])
    table["low"] = pa.array(NINE, pa.timestamp("ns"))
    pq.write_table(pa.table(table), path)
    with pytest.raises(ValueError, match=r"es\.parquet has times in its column 'low', expected numbers"):
        read(path, tz="America/Chicago")
    table["date"] = pa.array([10**16, 10**16], pa.timestamp("ms"))
    pq.write_table(pa.table(table), path)
    with pytest.raises(ValueError, match=r"has '10000000000000000 ms since 1970' in its time column 'date' in row 1"):
        read(path, tz="America/Chicago")


def test_extra_columns_that_not_all_files_have(tmp_path):
    text = SIERRA.splitlines(keepends=True)
    (tmp_path / "ESH15.txt").write_text("".join(text))
    (tmp_path / "ESM15.txt").write_text("".join(line.rpartition(",")[0] + "\n" for line in text))
    chunks, _, _ = read([tmp_path / "ESH15.txt", tmp_path / "ESM15.txt"], tz="America/Chicago")
    assert [list(chunk.bars.extra) for chunk in chunks] == [["trades", "bid_volume"]] * 2


def seed_files():
    """A file of each form, by ending."""
    table = frame(pd.DatetimeIndex(pd.to_datetime(NINE, utc=True), name="time")).assign(symbol="ESH4")
    parquet = io.BytesIO()
    table.to_parquet(parquet)
    databento = DATABENTO + databento_row(0, 17, 5000, "ESH4") + databento_row(1, 18, 50.05, "ESH4-ESM4")
    text = [SIERRA, "# ES\n" + HEADER + UTC_ROWS, NINJATRADER, databento, HEADER + rows(['"1704812400"', 1704812460.5])]
    return [
        *(("csv", part.encode()) for part in text), ("csv", text[0].encode("utf-16")),
        *((f"csv.{ending}", compress(SIERRA.encode())) for ending, compress in COMPRESS.items()),
        ("json", json.dumps(JSON_ROWS).encode()), ("jsonl", "\n".join(map(json.dumps, JSON_ROWS)).encode()),
        ("parquet", parquet.getvalue()),
    ]  # fmt: skip


SEEDS = seed_files()


def read_or_refuse(path):
    """Read a file; what is no bars is a ValueError of one line."""
    refused = ""
    try:
        chunks, length, _ = read(path, tz="America/Chicago", bars=MINUTE)
    except ValueError as error:
        refused = str(error)
    if refused:
        assert "\n" not in refused
        assert str(path) in refused
        return False
    assert length > 0
    for chunk in chunks:
        assert len(chunk.bars) == len(chunk.row) > 0
        assert np.all(chunk.bars.ts - chunk.bars.start == length)
    return True


def test_files_that_the_fuzz_begins_with(tmp_path):
    for k, (ending, data) in enumerate(SEEDS):
        path = tmp_path / f"{k}.{ending}"
        path.write_bytes(data)
        assert read_or_refuse(path), path


@st.composite
def mutated(draw):
    """A file of `SEEDS` with a few bytes changed, cut out, or put in."""
    ending, data = draw(st.sampled_from(SEEDS))
    data = bytearray(data)
    tokens = st.sampled_from(
        [b"\n", b",", b";", b'"', b"\x00", b"\xff", b"-", b"1e999", b"2024", b"[", b"}", b"#", b"\r"]
    )
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        length = draw(st.sampled_from([0, 0, 1, 1, 5, 50]))
        data[place : place + length] = draw(st.one_of(st.just(b""), tokens, st.binary(max_size=8)))
    return ending, bytes(data)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(mutated())
def test_mutated_files_give_bars_or_one_line(tmp_path, file):
    ending, data = file
    path = tmp_path / f"es.{ending}"
    path.write_bytes(data)
    read_or_refuse(path)
