"""The session table: dated facts, clock changes, the bar-by-bar answers, and two calendar libraries as cross-checks."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fox_env.data import calendar

CHICAGO = ZoneInfo("America/Chicago")
MINUTE = 60_000_000_000
HOUR = 60 * MINUTE
EPOCH = dt.date(1970, 1, 1)


def ns(clock: str, zone=CHICAGO) -> int:
    return int(dt.datetime.fromisoformat(clock).replace(tzinfo=zone).timestamp()) * 1_000_000_000


def clock(value: int) -> str:
    return dt.datetime.fromtimestamp(value // 1_000_000_000, CHICAGO).strftime("%Y-%m-%d %H:%M")


def day_number(date: str) -> int:
    return (dt.date.fromisoformat(date) - EPOCH).days


def one_date(date: str, hours: str = "all"):
    """Opening and closing clock time of the session with that trade date, or None."""
    table = calendar.trade_dates(ns("2008-01-02 17:00"), ns("2035-12-01 17:00"), hours=hours)
    row = np.flatnonzero(table.date == day_number(date))
    return None if not len(row) else (clock(table.open[row[0]]), clock(table.close[row[0]]))


def bars(first: str, last: str, minutes: int = 5):
    start = np.arange(ns(first), ns(last), minutes * MINUTE)
    return start, start + minutes * MINUTE


@pytest.mark.parametrize(
    ("date", "opens", "closes"),
    [
        ("2012-11-15", "2012-11-14 17:00", "2012-11-15 16:30"),
        ("2012-11-16", "2012-11-15 17:00", "2012-11-16 15:15"),
        ("2012-11-19", "2012-11-18 17:00", "2012-11-19 16:15"),
        ("2015-09-18", "2015-09-17 17:00", "2015-09-18 16:15"),
        ("2015-09-21", "2015-09-20 17:00", "2015-09-21 16:00"),
        ("2015-04-03", "2015-04-02 17:00", "2015-04-03 08:15"),
        ("2021-04-02", "2021-04-01 17:00", "2021-04-02 08:15"),
        ("2023-04-07", "2023-04-06 17:00", "2023-04-07 08:15"),
        ("2018-12-05", "2018-12-04 17:00", "2018-12-05 08:30"),
        ("2025-01-09", "2025-01-08 17:00", "2025-01-09 08:30"),
        ("2018-12-06", "2018-12-05 17:00", "2018-12-06 16:00"),
        ("2020-01-20", "2020-01-19 17:00", "2020-01-20 12:00"),  # Martin Luther King
        ("2020-01-21", "2020-01-20 17:00", "2020-01-21 16:00"),
        ("2020-02-17", "2020-02-16 17:00", "2020-02-17 12:00"),  # Presidents
        ("2020-05-25", "2020-05-24 17:00", "2020-05-25 12:00"),  # Memorial
        ("2021-06-18", "2021-06-17 17:00", "2021-06-18 16:00"),  # Juneteenth not kept yet
        ("2022-06-20", "2022-06-19 17:00", "2022-06-20 12:00"),  # kept on Monday
        ("2027-06-18", "2027-06-17 17:00", "2027-06-18 12:00"),  # kept on Friday
        ("2019-07-03", "2019-07-02 17:00", "2019-07-03 12:15"),
        ("2019-07-04", "2019-07-03 17:00", "2019-07-04 12:00"),
        ("2020-07-02", "2020-07-01 17:00", "2020-07-02 16:00"),
        ("2020-07-03", "2020-07-02 17:00", "2020-07-03 12:00"),  # July 4 on a Saturday
        ("2021-07-05", "2021-07-04 17:00", "2021-07-05 12:00"),  # July 4 on a Sunday
        ("2021-07-02", "2021-07-01 17:00", "2021-07-02 16:00"),
        ("2016-07-01", "2016-06-30 17:00", "2016-07-01 16:00"),  # the Friday before a Monday July 4
        ("2019-09-02", "2019-09-01 17:00", "2019-09-02 12:00"),  # Labor
        ("2019-11-28", "2019-11-27 17:00", "2019-11-28 12:00"),  # Thanksgiving
        ("2019-11-29", "2019-11-28 17:00", "2019-11-29 12:15"),
        ("2020-12-24", "2020-12-23 17:00", "2020-12-24 12:15"),
        ("2020-12-28", "2020-12-27 17:00", "2020-12-28 16:00"),
        ("2021-12-23", "2021-12-22 17:00", "2021-12-23 16:00"),
        ("2021-12-31", "2021-12-30 17:00", "2021-12-31 16:00"),  # New Year's Day on a Saturday is not kept
        ("2014-12-26", "2014-12-25 17:00", "2014-12-26 16:15"),
    ],
)
def test_dated_hours(date, opens, closes):
    assert one_date(date) == (opens, closes)


@pytest.mark.parametrize(
    "date",
    [
        "2014-04-18", "2016-03-25", "2019-04-19", "2020-04-10", "2024-03-29", "2025-04-18",  # Good Friday, no payrolls
        "2018-12-25", "2016-12-26", "2021-12-24", "2022-12-26",  # Christmas, on Sunday and Saturday too
        "2019-01-01", "2017-01-02", "2023-01-02", "2020-03-14", "2020-03-15",
    ],
)  # fmt: skip
def test_no_session(date):
    assert one_date(date) is None


def test_halt_is_date_effective():
    for date, halted in (("2014-06-02", True), ("2021-06-25", True), ("2021-06-28", False)):
        start, ts = bars(f"{date} 15:00", f"{date} 15:45")
        got = calendar.sessions(start, ts)
        expected_open = [True, True, True, not halted, not halted, not halted, True, True, True]
        assert got.is_open.tolist() == expected_open, date
        kept = got.is_open
        after = calendar.sessions(start[kept], ts[kept]).after_break.tolist()
        # first row always; then the 15:30 bar where the halt lies between it and the 15:10 bar
        assert after == ([True, False, False, True, False, False] if halted else [True] + [False] * 8)


def test_no_halt_on_an_early_close():
    table = calendar.trade_dates(ns("2019-11-28 17:00"), ns("2019-11-29 12:00"))
    assert table.date.tolist() == [day_number("2019-11-29")]
    assert table.halt_start[0] == table.halt_end[0] == table.close[0] == ns("2019-11-29 12:15")


def test_fields_by_hand():
    # Wednesday 2023-08-09: 17:00 the day before to 16:00, 23 h. At 10:00, 6 h remain: 6/23 of it.
    got = calendar.sessions(np.array([ns("2023-08-09 09:55")]), np.array([ns("2023-08-09 10:00")]))
    assert got.session[0] == day_number("2023-08-09")
    assert got.minutes_left[0] == 360
    assert got.fraction_left[0] == np.float32(6 / 23)
    # The session's last bar has nothing left; the next bar, at 17:00, is the next trade date's with all but 5 minutes.
    got = calendar.sessions(
        np.array([ns("2023-08-09 15:55"), ns("2023-08-09 17:00")]),
        np.array([ns("2023-08-09 16:00"), ns("2023-08-09 17:05")]),
    )
    assert got.fraction_left.tolist() == [0, np.float32((23 * 60 - 5) / (23 * 60))]
    assert got.session.tolist() == [day_number("2023-08-09"), day_number("2023-08-10")]
    assert got.after_break.tolist() == [True, True]
    assert got.session.dtype == np.int32
    assert got.fraction_left.dtype == got.minutes_left.dtype == np.float32


def test_closed_bars_stay_with_the_session_just_closed():
    start, ts = bars("2023-08-11 15:50", "2023-08-11 17:20")  # a Friday: nothing trades until Sunday
    got = calendar.sessions(start, ts)
    assert got.is_open.tolist() == [True, True] + [False] * 16
    assert set(got.session.tolist()) == {day_number("2023-08-11")}
    assert got.minutes_left.tolist() == [5] + [0] * 17


def test_bars_that_reach_over_a_close_are_open():
    # One-hour bars of 2019-11-29 (early close 12:15): 12:00 holds a quarter of an hour of trading, 13:00 holds none.
    start = np.array([ns("2019-11-29 11:00"), ns("2019-11-29 12:00"), ns("2019-11-29 13:00")])
    assert calendar.sessions(start, start + HOUR).is_open.tolist() == [True, True, False]
    # An hour with the halt inside follows no break, and neither does the hour after it.
    start = np.array([ns("2015-06-02 14:00"), ns("2015-06-02 15:00"), ns("2015-06-02 16:00")])
    assert calendar.sessions(start, start + HOUR).after_break.tolist() == [True, False, False]


def test_daily_bars_belong_to_the_session_under_way_at_their_end():
    # UTC days; midnight UTC is 18:00 or 19:00 in Chicago, when the next trade date has opened, except on Fridays.
    start = np.array([ns(f"2023-08-{day:02d} 00:00", dt.UTC) for day in (9, 10, 11, 13)])
    got = calendar.sessions(start, start + 24 * HOUR)
    assert got.is_open.all()
    expected = ["2023-08-10", "2023-08-11", "2023-08-11", "2023-08-14"]
    assert got.session.tolist() == [day_number(date) for date in expected]


@pytest.mark.parametrize(
    ("dates", "utc_opens"),
    [
        # Monday's session opens on Sunday 17:00: 23:00 UTC in winter, 22:00 UTC in summer time.
        (("2020-03-06", "2020-03-09"), ("2020-03-05 23:00", "2020-03-08 22:00")),
        (("2020-10-30", "2020-11-02"), ("2020-10-29 22:00", "2020-11-01 23:00")),
    ],
)
def test_clock_changes(dates, utc_opens):
    for date, utc in zip(dates, utc_opens, strict=True):
        opening = ns(utc, dt.UTC)
        table = calendar.trade_dates(opening, opening + 1)
        assert (table.date[0], table.open[0]) == (day_number(date), opening)
        assert table.close[0] - table.open[0] == 23 * HOUR


def test_rth():
    assert one_date("2020-01-21", "rth") == ("2020-01-21 08:30", "2020-01-21 15:00")
    assert one_date("2020-01-20", "rth") == ("2020-01-20 08:30", "2020-01-20 12:00")
    assert one_date("2021-04-02", "rth") is None
    assert one_date("2018-12-05", "rth") is None
    start, ts = bars("2020-01-21 08:20", "2020-01-21 08:40")
    got = calendar.sessions(start, ts, hours="rth")
    assert got.is_open.tolist() == [False, False, True, True]
    assert got.minutes_left.tolist()[2:] == [385, 380]  # 6.5 h are 390 minutes


@pytest.mark.parametrize(
    ("year", "month", "expected"),
    [
        (2026, 6, "2026-06-18 08:30"),  # Juneteenth is the third Friday
        (2027, 6, "2027-06-17 08:30"),  # Juneteenth, a Saturday, is kept on the third Friday
        (2008, 3, "2008-03-20 08:30"),  # Good Friday is the third Friday
        (2021, 6, "2021-06-18 08:30"),
        (2015, 3, "2015-03-20 08:30"),
        (2024, 12, "2024-12-20 08:30"),
    ],
)
def test_expiration(year, month, expected):
    assert clock(calendar.expiration_ns(year, month)) == expected


@pytest.mark.parametrize("clock_time", ["2007-06-01 10:00", "2036-02-01 10:00"])
def test_outside_the_table(clock_time):
    start = np.array([ns(clock_time)])
    with pytest.raises(ValueError, match=rf"{clock_time[:10]} lies outside the session calendar.*2008 to 2035"):
        calendar.sessions(start, start + MINUTE)


def test_unknown_hours():
    with pytest.raises(ValueError, match="hours 'eth' is unknown"):
        calendar.sessions(np.array([0]), np.array([1]), hours="eth")


def test_no_bars():
    got = calendar.sessions(np.empty(0, np.int64), np.empty(0, np.int64))
    assert len(got.session) == len(got.after_break) == 0


@settings(max_examples=60, deadline=None)
@given(
    minute=st.integers(0, 27 * 365 * 1440),
    count=st.integers(1, 50),
    length=st.sampled_from([1, 5, 15, 60]),
    hours=st.sampled_from(["all", "rth"]),
)
def test_against_a_slow_reading_of_the_table(minute, count, length, hours):
    start = ns("2008-06-02 17:00") + (minute + length * np.arange(count)) * MINUTE
    ts = start + length * MINUTE
    got = calendar.sessions(start, ts, hours=hours)
    table = calendar.trade_dates(int(start[0]) - 5 * 24 * HOUR, int(ts[-1]) + 1, hours=hours)
    rows = list(zip(table.date, table.open, table.close, table.halt_start, table.halt_end, strict=True))
    for i in range(count):
        date, opens, closes, *_ = [row for row in rows if row[1] < ts[i]][-1]
        assert got.session[i] == date
        minutes_open = sum(
            any(o <= m and m + MINUTE <= c and not (h0 <= m < h1) for _, o, c, h0, h1 in rows)
            for m in range(int(start[i]), int(ts[i]), MINUTE)
        )
        assert got.is_open[i] == (minutes_open > 0)
        assert got.minutes_left[i] == max(closes - ts[i], 0) / MINUTE
        assert got.fraction_left[i] == pytest.approx(max(closes - ts[i], 0) / (closes - opens), abs=1e-6)
    assert np.all(np.diff(got.session) >= 0)


# Cross-checks. What each library has otherwise, date by date, 2012 to 2026.

PAYROLL_GOOD_FRIDAYS = ["2012-04-06", "2015-04-03", "2021-04-02", "2023-04-07", "2026-04-03"]
MOURNING = ["2018-12-05", "2025-01-09"]
JUNETEENTH = ["2022-06-20", "2023-06-19", "2024-06-19", "2025-06-19", "2026-06-19"]
BEFORE_INDEPENDENCE = [
    "2012-07-03", "2013-07-03", "2014-07-03", "2017-07-03", "2018-07-03", "2019-07-03", "2023-07-03", "2024-07-03",
    "2025-07-03",
]  # fmt: skip
AFTER_THANKSGIVING = [
    "2012-11-23", "2013-11-29", "2014-11-28", "2015-11-27", "2016-11-25", "2017-11-24", "2018-11-23", "2019-11-29",
    "2020-11-27", "2021-11-26", "2022-11-25", "2023-11-24", "2024-11-29", "2025-11-28", "2026-11-27",
]  # fmt: skip
CHRISTMAS_EVE = [
    "2012-12-24", "2013-12-24", "2014-12-24", "2015-12-24", "2018-12-24", "2019-12-24", "2020-12-24", "2024-12-24",
    "2025-12-24", "2026-12-24",
]  # fmt: skip


def closes_2012_to_2026() -> dict[str, str]:
    table = calendar.trade_dates(ns("2012-01-02 17:00"), ns("2027-01-01 00:00"))
    return {str(EPOCH + dt.timedelta(int(d))): clock(c)[-5:] for d, c in zip(table.date, table.close, strict=True)}


def library_closes(closes) -> dict[str, str]:
    local = closes.dt.tz_convert("America/Chicago")
    return dict(zip(closes.index.strftime("%Y-%m-%d"), local.dt.strftime("%H:%M"), strict=True))


def test_cross_check_exchange_calendars():
    library = pytest.importorskip("exchange_calendars").get_calendar("CMES", start="2012-01-01", end="2026-12-31")
    theirs, ours = library_closes(library.schedule["close"]), closes_2012_to_2026()
    assert set(theirs) - set(ours) == set()
    # It drops days that traded.
    assert sorted(set(ours) - set(theirs)) == sorted(PAYROLL_GOOD_FRIDAYS + MOURNING)
    # Its full days end at 17:00, with the maintenance break inside.
    differing = {date for date in theirs if theirs[date] != ours[date] and theirs[date] != "17:00"}
    assert differing == set(AFTER_THANKSGIVING + CHRISTMAS_EVE)  # it has 12:00 for 12:15
    missing_early_close = {date for date in theirs if theirs[date] == "17:00" and ours[date] < "15:15"}
    assert missing_early_close == set(JUNETEENTH + BEFORE_INDEPENDENCE)


def test_cross_check_pandas_market_calendars():
    library = pytest.importorskip("pandas_market_calendars").get_calendar("CME_Equity")
    theirs, ours = library_closes(library.schedule("2012-01-01", "2026-12-31")["market_close"]), closes_2012_to_2026()
    assert sorted(set(ours) - set(theirs)) == MOURNING
    # It has early closes on Good Fridays without a payroll report, when nothing traded.
    assert sorted(set(theirs) - set(ours)) == ["2024-03-29", "2025-04-18"]
    differing = {date for date in set(theirs) & set(ours) if theirs[date] != ours[date]}
    quarter_past = set(BEFORE_INDEPENDENCE + AFTER_THANKSGIVING + CHRISTMAS_EVE)  # it has 12:00 for 12:15
    assert quarter_past <= differing
    # Its trade date ends at 15:15 through 2012-11-16; the 15:30 to 16:30 trading that followed is ours.
    old_days = {date for date in differing - quarter_past if date <= "2012-11-16"}
    assert {(theirs[date], ours[date]) for date in old_days} == {("15:15", "16:30")}
    # It has 16:00 before 2015-09-21 too.
    late_days = differing - quarter_past - old_days
    assert {(theirs[date], ours[date]) for date in late_days} == {("16:00", "16:15")}
    assert (min(late_days), max(late_days)) == ("2012-11-19", "2015-09-18")
