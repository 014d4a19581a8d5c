"""Text and Parquet bars: the forms that people have, time zones, and what is refused."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pytest

from fox_env.data.load import load_market, load_segments
from fox_env.data.tabular import read_tabular
from tests.env.games import ZERO

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
    with pytest.raises(ValueError, match=r"es\.parquet has times without a time zone"):
        read(path)


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
    assert quality["rows_other_symbols"] == 4
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
        ("time,open,high,low,close\n2024-01-09T15:00:00Z,2,3,1,2\n1601-01-09T15:01:00Z,2,3,1,2\n", {},
         r"has the time 1601-01-09 15:01:00\+00:00 in row 2, expected years from 1678 to 2261"),
        ("time,open,high,low,close\n3023-01-09T15:00:00Z,2,3,1,2\n", {}, "has the time 3023-01-09 15:00:00"),
        ("time,open,high,low,close,vol\n2024-01-09T15:00:00Z,2,3,1,2,1" + 400 * "0" + "\n", {},
         "too large"),
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
