"""What is told of a market, on bars made by the session calendar with known holes."""

from __future__ import annotations

import dataclasses
import datetime as dt
import io
import json
import struct
from pathlib import Path
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

import fox_env
from fox_env import Market
from fox_env.data import describe as describe_module
from fox_env.data.bars import Bars
from fox_env.data.calendar import sessions
from fox_env.data.describe import WIDTH, describe, draw_chart, print_description
from fox_env.data.rolls import Segment
from fox_env.market import build_market

MINUTE = 60_000_000_000
CHICAGO = ZoneInfo("America/Chicago")


def utc(text: str) -> int:
    return int(np.datetime64(text, "ns").astype(np.int64))


def trade_date(text: str) -> tuple[int, int]:
    """Open and regular close of a trade date, 17:00 the day before to 16:00 in Chicago."""
    day = dt.datetime.fromisoformat(text)
    ends = ((day - dt.timedelta(hours=7)), day + dt.timedelta(hours=16))
    return tuple(int(end.replace(tzinfo=CHICAGO).timestamp()) * 1_000_000_000 for end in ends)


def whole(first: str, last: str, minutes: int = 5) -> Bars:
    """Every bar in trading hours of these trade dates; prices 4000 and 4000.25 by turns, range 1, volume 10."""
    begin, end = trade_date(first)[0], trade_date(last)[1] + 15 * MINUTE
    start = np.arange(begin, end, minutes * MINUTE)
    start = start[sessions(start, start + minutes * MINUTE).is_open]
    close = 4_000.0 + 0.25 * (np.arange(len(start)) % 2)
    return Bars(
        start, start + minutes * MINUTE, close, close + 0.5, close - 0.5, close.copy(), np.full(len(start), 10.0)
    )


def without(bars: Bars, *holes: tuple[str, str]) -> Bars:
    """The bars but those that start in [from, to), UTC."""
    keep = np.ones(len(bars), bool)
    for begin, end in holes:
        keep &= (bars.start < utc(begin)) | (bars.start >= utc(end))
    return bars.take(keep)


def market(*segments: Segment | Bars, interval: int = 5 * MINUTE, **given: object) -> Market:
    parts = [part if isinstance(part, Segment) else Segment("ESH21", part, 0, 0.0) for part in segments]
    return build_market(parts, "ES", interval, **given)


# Two weeks around Christmas 2020: 12-25 and 01-01 closed, 12-24 until 12:15, halts at 15:15. Chicago is UTC − 6.
CHRISTMAS = whole("2020-12-21", "2021-01-05")


def test_sessions_holidays_and_early_closes() -> None:
    about = describe(market(CHRISTMAS))
    told = about["sessions"]
    # Mon 21 to Thu 24, Mon 28 to Thu 31, Mon 4 and Tue 5.
    assert (told["count"], told["first"], told["last"]) == (10, "2020-12-21", "2021-01-05")
    assert told["closed_weekdays"] == ["2020-12-25", "2021-01-01"]
    assert told["missing"] == told["short"] == told["short_at_roll"] == []
    assert told["early_closes"] == [{"close": "12:15", "sessions": ["2020-12-24"], "last_bar_ends": ["12:15"]}]
    # The halt would be after the early close of 12-24, so nine sessions have it.
    assert told["halt_seen"] == {"sessions": 9, "first": "2020-12-21", "last": "2021-01-05"}
    assert told["after_16_00_seen"] is None
    assert (about["first"], about["last"]) == ("2020-12-20T23:00:00Z", "2021-01-05T22:00:00Z")
    # 9 sessions of 23 h less the halt's 15 min are 273 bars of 5 min, that of 12-24 is 19:15 long, 231 bars.
    assert about["bars"] == 9 * 273 + 231
    assert about["decision_bars"] == about["bars"] - market(CHRISTMAS).quality["warmup_bars"] < about["bars"]
    assert about["volume"] == 10.0 * about["bars"]
    assert (about["interval"], about["hours"], about["contract"]) == ("5m", "all", "ES")


def test_breaks_are_by_the_clock_the_longest_first() -> None:
    told = describe(market(CHRISTMAS))["gaps"]
    assert told["least_s"] == 300.0
    assert told["in_sessions"] == {"count": 0, "trading_s": 0.0, "longest": [], "most": []}
    assert told["beside_breaks"]["count"] == told["at_rolls"]["count"] == 0
    breaks = told["breaks"]
    assert (breaks["count"], breaks["trading_s"]) == (9, 0.0)
    # 12-24 12:15 to Sunday 12-27 17:00 is 3 days 4:45; New Year's weekend 12-31 16:00 to 01-03 17:00 is 3 days 1:00.
    assert breaks["longest"][0] == {
        "from": "2020-12-24T18:15:00Z", "to": "2020-12-27T23:00:00Z", "wall_s": 76.75 * 3_600, "trading_s": 0.0,
    }  # fmt: skip
    assert [gap["wall_s"] / 3_600 for gap in breaks["longest"]] == [76.75, 73.0, *[1.0] * 7]


def test_gaps_are_trading_time_without_a_bar() -> None:
    bars = without(
        CHRISTMAS,
        ("2020-12-29T10:00", "2020-12-29T12:30"),  # 2:30
        ("2020-12-29T14:00", "2020-12-29T14:05"),  # one bar
        ("2020-12-30T21:00", "2020-12-30T21:45"),  # 15:00 to 15:45, of which 15 minutes are the halt
        ("2020-12-30T23:00", "2020-12-31T00:00"),  # the first hour of a session
        ("2021-01-03T23:00", "2021-01-04T23:00"),  # the whole session of 01-04: 23 h less the halt
    )
    about = describe(market(bars))
    gaps = about["gaps"]
    inside = gaps["in_sessions"]
    assert [gap["trading_s"] / 60 for gap in inside["longest"]] == [150.0, 30.0, 5.0]
    assert (inside["count"], inside["trading_s"] / 60) == (3, 185.0)
    assert inside["longest"][1] == {
        "from": "2020-12-30T21:00:00Z", "to": "2020-12-30T21:45:00Z", "wall_s": 2_700.0, "trading_s": 1_800.0,
    }  # fmt: skip
    assert inside["most"] == [
        {"session": "2020-12-29", "trading_s": 155.0 * 60}, {"session": "2020-12-30", "trading_s": 1_800.0},
    ]  # fmt: skip
    beside = gaps["beside_breaks"]
    assert [(gap["from"], gap["trading_s"] / 3_600) for gap in beside["longest"]] == [
        ("2020-12-31T22:00:00Z", 22.75), ("2020-12-30T22:00:00Z", 1.0),
    ]  # fmt: skip
    assert about["sessions"]["missing"] == ["2021-01-04"]
    assert about["sessions"]["closed_weekdays"] == ["2020-12-25", "2021-01-01"]
    assert about["sessions"]["short"] == [
        {"session": "2020-12-31", "first": "2020-12-31T00:00:00Z", "last": "2020-12-31T22:00:00Z"}
    ]


def test_a_bar_that_reaches_over_a_close_leaves_no_gap() -> None:
    # The last hour of 12-24 begins at 12:00 and ends 45 minutes after the close.
    gaps = describe(market(whole("2020-12-21", "2021-01-05", 60), interval=60 * MINUTE))["gaps"]
    assert gaps["breaks"]["longest"][0]["from"] == "2020-12-24T19:00:00Z"
    assert [gaps[name]["trading_s"] for name in ("in_sessions", "beside_breaks", "breaks")] == [0.0, 0.0, 0.0]


def test_a_gap_counts_from_a_bar_and_a_minute_on() -> None:
    day = whole("2021-09-14", "2021-09-15", 1)
    one = describe(market(without(day, ("2021-09-15T10:00", "2021-09-15T10:01")), interval=MINUTE))["gaps"]
    assert (one["least_s"], one["in_sessions"]["count"], one["in_sessions"]["trading_s"]) == (60.0, 1, 60.0)
    seconds = dataclasses.replace(day, ts=day.start + 1_000_000_000)  # a bar of a second each minute: 59 s missing
    assert describe(market(seconds, interval=1_000_000_000))["gaps"]["in_sessions"]["count"] == 0


def test_the_halt_is_seen_until_its_end_and_only_in_the_bars() -> None:
    bars = whole("2021-06-22", "2021-06-30")
    assert describe(market(bars))["sessions"]["halt_seen"] == {
        "sessions": 4, "first": "2021-06-22", "last": "2021-06-25",
    }  # fmt: skip
    # Without bars between 15:15 and 15:30 of 06-29, 20:15 to 20:30 UTC in summer, it looks like a halt.
    quiet = without(bars, ("2021-06-29T20:15", "2021-06-29T20:30"))
    assert describe(market(quiet))["sessions"]["halt_seen"]["last"] == "2021-06-29"
    # Nor is it seen in a session that ends before it or begins after it.
    for hole in (("2021-06-29T20:15", "2021-06-29T21:00"), ("2021-06-28T22:00", "2021-06-29T20:30")):
        assert describe(market(without(bars, hole)))["sessions"]["halt_seen"]["last"] == "2021-06-25"


def test_bars_after_four_are_seen_until_2015() -> None:
    told = describe(market(whole("2015-09-15", "2015-09-23")))["sessions"]
    assert told["after_16_00_seen"] == {"sessions": 4, "first": "2015-09-15", "last": "2015-09-18"}
    # A session that stops in the evening has ended before 16:00 of its trade date.
    bars = whole("2021-09-13", "2021-09-16")
    cut = bars.take(bars.start < utc("2021-09-15T23:00"))
    assert describe(market(cut))["sessions"]["after_16_00_seen"] is None


def test_regular_hours_have_their_own_calendar() -> None:
    start = np.concatenate([utc(f"2021-09-{day}T13:30") + 5 * MINUTE * np.arange(78) for day in (13, 14, 15, 16)])
    flat = np.full(len(start), 4_000.0)
    bars = Bars(start, start + 5 * MINUTE, flat, flat, flat, flat, flat)
    about = describe(market(bars, hours="rth", provenance={"hours": "rth"}))
    assert about["hours"] == "rth"
    assert about["sessions"]["count"] == 4
    assert about["sessions"]["short"] == []
    assert about["gaps"]["beside_breaks"]["count"] == 0
    assert [gap["wall_s"] / 3_600 for gap in about["gaps"]["breaks"]["longest"]] == [17.5] * 3


# --- Contracts --------------------------------------------------------------------------------------------------------


def rolled() -> Market:
    """Three contracts: a measured roll of +12.25 on 12-30, an unmeasured one with a hole before it on 01-04."""
    cuts = [int(np.searchsorted(CHRISTMAS.start, trade_date(day)[0])) for day in ("2020-12-30", "2021-01-04")]
    second = dataclasses.replace(
        CHRISTMAS, **{name: getattr(CHRISTMAS, name) + 12.25 for name in ("open", "high", "low", "close")}
    )
    third = dataclasses.replace(
        CHRISTMAS, **{name: getattr(CHRISTMAS, name) + 300.0 for name in ("open", "high", "low", "close")}
    )
    return market(
        Segment("ESH21", CHRISTMAS.take(slice(0, cuts[0])), 0, 0.0),
        Segment("ESM21", second.take(slice(0, cuts[1] - 100)), cuts[0], 12.25),
        Segment("ESU21", third.take(slice(cuts[1], None)), 0, np.nan),
    )


def test_contracts_and_rolls() -> None:
    about = describe(rolled())
    told = [
        (own["contract"], own["first_session"], own["last_session"], own["roll"], own["gap"])
        for own in about["contracts"]
    ]
    assert told == [
        ("ESH21", "2020-12-21", "2020-12-29", None, None),
        ("ESM21", "2020-12-30", "2020-12-31", "measured", 12.25),
        ("ESU21", "2021-01-04", "2021-01-05", "unmeasured", None),
    ]
    assert sum(own["bars"] for own in about["contracts"]) == about["bars"]
    # The second contract lacks its last 100 bars, 500 minutes: a gap at a roll, and a session that is short there.
    gaps = about["gaps"]
    assert [gap["trading_s"] / 60 for gap in gaps["at_rolls"]["longest"]] == [500.0]
    assert gaps["beside_breaks"]["count"] == 0
    assert gaps["breaks"]["count"] == 9 - 2
    assert [short["session"] for short in about["sessions"]["short_at_roll"]] == ["2020-12-31"]
    assert about["sessions"]["short"] == []


def test_moves_are_those_of_a_position() -> None:
    moved = rolled()
    assert np.abs(np.diff(moved.bars.close)).max() > 280  # the unmeasured roll's, which nobody could hold
    close = moved.bars.close.copy()
    measured = int(np.flatnonzero(moved.roll == 1)[0])
    close[measured - 1] -= 20.0
    close[100] += 3.0
    close[600] -= 30.0
    about = describe(dataclasses.replace(moved, bars=dataclasses.replace(moved.bars, close=close)))
    signs = [round(entry["move"]) for entry in about["largest_moves"]]
    assert signs == [-30, 30, -20, 20, 3]
    # 4000.25 − 20 before the roll and 4012.25 after it, g = 12.25: +19.75 or +20 over the break.
    assert about["largest_moves"][3]["after_break"]
    assert not about["largest_moves"][0]["after_break"]
    assert about["largest_moves"][3]["at"] == "2020-12-29T23:00:00Z"


def test_the_slice_of_a_market_tells_of_itself() -> None:
    full = rolled()
    cut = int(np.searchsorted(full.session, full.session[-1]))
    about = describe(full.slice(cut, len(full)))
    assert [own["contract"] for own in about["contracts"]] == ["ESU21"]
    assert about["sessions"]["count"] == 1


# --- Oddities ---------------------------------------------------------------------------------------------------------


def test_flat_runs_ranges_and_locks() -> None:
    bars = whole("2021-09-13", "2021-09-16")
    high, low, close = bars.high.copy(), bars.low.copy(), bars.close.copy()
    for rows, price in ((slice(300, 307), 3_950.0), (slice(307, 310), 3_951.0), (slice(551, 553), 3_940.0)):
        high[rows] = low[rows] = close[rows] = price
    high[400], high[401], low[401] = 4_020.0, 4_010.0, 3_999.0
    held = market(dataclasses.replace(bars, open=close, high=high, low=low, close=close))
    lock = np.zeros(len(held), np.int8)
    lock[300:305], lock[700] = -1, 1
    about = describe(dataclasses.replace(held, lock=lock))
    assert about["flat_bars"]["count"] == 12
    # Rows 551 and 552 lie on either side of a session's end (276 bars each), so they are no run.
    assert [(run["bars"], run["price"]) for run in about["flat_bars"]["longest_runs"]] == [(7, 3_950.0), (3, 3_951.0)]
    assert about["flat_bars"]["longest_runs"][0]["from"] == iso(bars.start[300])
    assert about["flat_bars"]["longest_runs"][0]["to"] == iso(bars.ts[306])
    assert about["locked_bars"] == {"up": 1, "down": 5, "sessions": ["2021-09-14", "2021-09-15"]}
    # 4020 less low 3999.5, then 4010 − 3999; row 400 is even.
    assert [entry["range"] for entry in about["largest_ranges"]] == [20.5, 11.0, 1.0, 1.0, 1.0]
    assert about["largest_ranges"][0]["at"] == iso(bars.start[400])


def iso(time: int) -> str:
    return f"{np.datetime_as_string(np.datetime64(int(time), 's' if time < 1e12 else 'ns'), unit='s')}Z"


def test_quotes_and_further_columns() -> None:
    bars = whole("2021-09-13", "2021-09-14")
    bid, ask = bars.close - 0.25, bars.close.copy()
    bid[400:410] = np.nan
    ask[405:420] = np.nan
    bid[430] = ask[430] + 0.25  # crossed
    bid[431] = ask[431]  # locked is two-sided
    size = np.ones(len(bars))
    extra = {"ofi_1": np.where(np.arange(len(bars)) < len(bars) // 2, np.nan, 1.0)}
    quoted = dataclasses.replace(bars, bid=bid, ask=ask, bid_size=size, ask_size=size, extra=extra)
    about = describe(market(quoted))
    # Of 552 bars rows 400–404 and 410–419 are one-sided, 405–409 empty, 430 crossed.
    assert about["quotes"] == {
        "two_sided": 552 - 21, "two_sided_share": 531 / 552, "one_sided": 15, "none": 5, "crossed": 1,
    }  # fmt: skip
    assert about["columns"] == {"ofi_1": 0.5}
    assert describe(market(bars))["quotes"] is None


def test_quality_is_told_in_words() -> None:
    quality = {
        "files": 2, "rows_closed_hours": 37, "rows_closed_hours_first": "in row 220 of a.csv", "trades_off_tick": 3,
        "book_crossed": 0, "something_new": 4,
    }  # fmt: skip
    told = {entry["name"]: entry for entry in describe(market(CHRISTMAS, quality=quality))["quality"]}
    assert told["rows_closed_hours"] == {
        "name": "rows_closed_hours", "count": 37, "words": "rows in closed hours, dropped",
        "first": "in row 220 of a.csv",
    }  # fmt: skip
    assert told["trades_off_tick"]["words"] == "trades with a price off the tick, rounded to it"
    assert told["book_crossed"]["words"] == "book records with a crossed book, masked"
    assert told["something_new"]["words"] == "something new"
    assert "rows_closed_hours_first" not in told
    assert told["warmup_bars"]["count"] > 0


def test_features_have_their_parity() -> None:
    told = {entry["name"]: entry["parity"] for entry in describe(market(CHRISTMAS))["features"]}
    assert told["return_1"] == "odd"
    assert told["rsi_14"] == "complement(1)"
    assert told["upper_wick"] == "swap(lower_wick)"
    assert told["cusum_up"] == "neg_swap(cusum_down)"
    assert told["range_ratio_1"] == "even"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.one_of(st.integers(-4, 4).map(float), st.just(np.nan)), max_size=12), st.integers(1, 6))
def test_the_largest_are_a_stable_sort_from_the_top(values: list[float], count: int) -> None:
    array = np.array(values, float)
    expected = sorted(range(len(values)), key=lambda k: (np.isnan(values[k]), -np.nan_to_num(values[k]), k))[:count]
    assert describe_module._largest(array, count).tolist() == expected


# --- Volume bars, page and chart --------------------------------------------------------------------------------------


def volume_bars() -> Market:
    """Bars of 25 contracts that end at odd nanoseconds, some long apart."""
    bars = whole("2021-09-13", "2021-09-15", 1)
    rng = np.random.default_rng(0)
    kept = bars.take(rng.random(len(bars)) < 0.7)
    ts = kept.start + rng.integers(1, MINUTE, len(kept))
    extra = {"ask_volume": np.full(len(kept), 12.0), "bid_volume": np.full(len(kept), 13.0)}
    kept = dataclasses.replace(kept, ts=ts, volume=np.full(len(kept), 25.0), extra=extra)
    return market(kept, interval=0, provenance={"bars": "vol:25"})


def unquoted() -> Market:
    """No volume at all."""
    return market(dataclasses.replace(CHRISTMAS, volume=np.zeros(len(CHRISTMAS))))


MARKETS = {
    "rolled": rolled,
    "volume bars": volume_bars,
    "no volume": unquoted,
    "synthetic": lambda: fox_env.synthetic_market("garch", 3_000, 1),
}


@pytest.fixture(params=MARKETS, scope="module")
def any_market(request: pytest.FixtureRequest) -> Market:
    return MARKETS[request.param]()


def test_volume_bars_have_gaps_from_a_minute_on() -> None:
    about = describe(volume_bars())
    assert about["interval"] == "vol:25"
    assert about["gaps"]["least_s"] == 60.0
    longest = about["gaps"]["in_sessions"]["longest"]
    assert longest
    assert all(gap["trading_s"] >= 60.0 for gap in longest)


def test_all_of_it_is_json(any_market: Market) -> None:
    about = describe(any_market)
    assert json.loads(json.dumps(about, allow_nan=False)) == about


def test_the_page_fits_its_width(any_market: Market) -> None:
    out = io.StringIO()
    print_description(describe(any_market), Console(file=out, width=WIDTH))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= WIDTH == 100
    assert not any("…" in line for line in lines)  # nothing was cut
    assert len(lines) > 40


def test_the_page_tells_the_facts() -> None:
    out = io.StringIO()
    bars = without(CHRISTMAS, ("2020-12-22T10:00", "2020-12-22T12:30"))
    print_description(describe(market(bars)), Console(file=out, width=WIDTH))
    text = " ".join(out.getvalue().split())
    for words in (
        "2: 2020-12-25, 2021-01-01", "close 12:15 1: 2020-12-24; last bars end 12:15",
        "seen in 9 sessions, 2020-12-21 to 2021-01-05", "2020-12-22 10:00 2020-12-22 12:30 02:30 02:30",
        "2020-12-24 18:15 2020-12-27 23:00 3 d 04:45 00:00", "Gaps at rolls: 0",
        "0 up, 0 down; sessions none", "quotes none",
    ):  # fmt: skip
        assert words in text
    print_description(describe(rolled()), Console(file=out, width=WIDTH))
    text = " ".join(out.getvalue().split())
    assert "2020-12-30 ESH21 → ESM21 +12.25 2020-12-31" in text
    assert "2021-01-04 ESM21 → ESU21 unmeasured 2021-01-05" in text


def test_the_chart_is_a_png_of_1200_by_700(any_market: Market, tmp_path: Path) -> None:
    file = tmp_path / "there" / "chart.png"
    draw_chart(any_market, file)
    head = file.read_bytes()[:24]
    assert head.startswith(b"\x89PNG\r\n\x1a\n")
    assert struct.unpack(">II", head[16:24]) == (1200, 700)
    assert [path.name for path in file.parent.iterdir()] == ["chart.png"]


def test_the_chart_shows_what_changes(tmp_path: Path) -> None:
    from matplotlib.image import imread

    pictures = []
    for number, bars in enumerate((CHRISTMAS, without(CHRISTMAS, ("2020-12-29T10:00", "2020-12-29T12:30")))):
        draw_chart(market(bars), tmp_path / f"{number}.png")
        pictures.append(imread(tmp_path / f"{number}.png"))
    changed = np.abs(pictures[0] - pictures[1]).max(axis=2) > 0.1
    assert changed[560:].any()  # the gap's panel


def test_a_chart_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        draw_chart(unquoted(), tmp_path / "file" / "chart.png")
