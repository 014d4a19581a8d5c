"""Text and Parquet bars: the forms that people have, time zones, and what is refused."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest

from fox_env.data.load import load_segments
from fox_env.data.tabular import read_tabular

MINUTE = 60_000_000_000


def ns(clock: str, zone: str = "America/Chicago") -> int:
    return int(dt.datetime.fromisoformat(clock).replace(tzinfo=ZoneInfo(zone)).timestamp()) * 10**9


def read(path, **options):
    quality = {}
    settings = {"symbol": "ES", "tz": None, "stamp": "start", "columns": None, "bars": None} | options
    files = path if isinstance(path, list) else [path]
    chunks, length = read_tabular(files, **settings, quality=quality)
    return chunks, length, quality


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
    for name in "ab":
        (chunk,), _, _ = read(tmp_path / f"{name}.parquet")
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
    assert quality["rows_other_symbols"] == 4
    with pytest.raises(ValueError, match=r"all\.csv holds no bars of 'MES' but of ESH4, ESM24, NQH4, ESH4-ESM4"):
        read(path, symbol="MES")
    path.write_text("symbol,time,open,high,low,close,volume\n" + rows([f"ES,{time}" for time in times]))
    assert read(path)[0][0].contract == "ES"


def test_named_columns(tmp_path):
    path = tmp_path / "es.csv"
    path.write_text("when,open,high,low,Settle,volume\n" + rows(["2024-01-09T15:00:00Z", "2024-01-09T15:01:00Z"]))
    (chunk,), _, _ = read(path, columns={"time": "when", "close": "Settle"})
    assert chunk.bars.close.tolist() == [100.5, 100.5]
    with pytest.raises(ValueError, match=r"es\.csv has no column for 'time' among when, open, high, low, Settle"):
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
        ("time,open,high,low,close\n1,2,3,1,2\n1,2,3,1,2\n", {}, "has 1 in its time column 'time', expected dates"),
        ("time,open,high,low,close\nnoon,2,3,1,2\n", {}, "has times that cannot be read, such as 'noon'"),
        ("time,open,high,low,close\n2024-01-09T15:00:00Z,2,3,1,2\n2024-01-09T15:00:00,2,3,1,2\n", {},
         "has times with and without an offset, such as 2024-01-09T15:00:00"),
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
    with pytest.raises(ValueError, match=r"a\.parquet cannot be read as a table"):
        read(tmp_path / "a.parquet")


def test_files_of_different_bar_lengths(tmp_path):
    for name, times in (("a", ["15:00", "15:01"]), ("b", ["15:00", "15:05"])):
        text = rows([f"2024-01-09T{time}:00Z" for time in times])
        (tmp_path / f"{name}.csv").write_text("time,open,high,low,close,volume\n" + text)
    with pytest.raises(ValueError, match=r"a\.csv holds bars of 60 s and .*b\.csv of 300 s, expected one length"):
        read([tmp_path / "a.csv", tmp_path / "b.csv"])


def write_market(path, close, first="2024-01-09 09:00", volume=None, minutes=1):
    """A series of bars that open at the close before."""
    start = pd.to_datetime(ns(first) + minutes * MINUTE * np.arange(len(close)), utc=True)
    opening = np.concatenate([close[:1], close[:-1]])
    high, low = np.maximum(opening, close), np.minimum(opening, close)
    data = {"time": start, "open": opening, "high": high, "low": low, "close": close}
    pd.DataFrame(data | ({} if volume is None else {"volume": volume})).to_csv(path, index=False)


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
    assert quality["rows_overlapping"] == 2  # 09:12 starts before 09:10's end, and 09:15 before 09:12's
    assert quality["rows_overlapping_first"].startswith("in row 4 of one.csv")
    assert np.all(np.diff(segments[0].bars.start) >= 5 * MINUTE)
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
