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
        ("2010-04-02", "2010-04-01 17:00", "2010-04-02 08:15"),
        ("2012-10-29", "2012-10-28 17:00", "2012-10-29 08:15"),  # the storm in New York
        ("2012-10-30", "2012-10-29 17:00", "2012-10-30 08:15"),
        ("2012-10-31", "2012-10-30 17:00", "2012-10-31 16:30"),
        ("2013-07-04", "2013-07-03 17:00", "2013-07-04 10:30"),  # holidays of the stock market until 2014-02
        ("2013-07-03", "2013-07-02 17:00", "2013-07-03 12:15"),
        ("2011-09-05", "2011-09-04 17:00", "2011-09-05 10:30"),
        ("2014-02-17", "2014-02-16 17:00", "2014-02-17 10:30"),
        ("2014-05-26", "2014-05-25 17:00", "2014-05-26 12:00"),
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


def test_a_year_with_both_switches():
    # 2021: Chicago is UTC - 6 until March 14 and from November 7 on, UTC - 5 between; 17:00 opens, 16:00 closes. The
    # opening and close of Friday, of Monday after the switch, and of a later one, with Europe switched too.
    for date, opens, closes in (
        ("2021-03-12", "2021-03-11 23:00", "2021-03-12 22:00"),
        ("2021-03-15", "2021-03-14 22:00", "2021-03-15 21:00"),
        ("2021-03-29", "2021-03-28 22:00", "2021-03-29 21:00"),
        ("2021-11-05", "2021-11-04 22:00", "2021-11-05 21:00"),
        ("2021-11-08", "2021-11-07 23:00", "2021-11-08 22:00"),
        ("2021-11-15", "2021-11-14 23:00", "2021-11-15 22:00"),
    ):
        opening, close = ns(opens, dt.UTC), ns(closes, dt.UTC)
        start = np.array([opening - MINUTE, opening, close - MINUTE, close])
        got = calendar.sessions(start, start + MINUTE)
        assert got.is_open.tolist() == [False, True, True, False], date
        assert got.session[1:].tolist() == [day_number(date)] * 3
        assert got.minutes_left.tolist()[1:] == [23 * 60 - 1, 0, 0]
        # The halt of March, 15:15 to 15:30 in Chicago, was over in November.
        table = calendar.trade_dates(opening, close)
        assert (table.halt_end - table.halt_start).tolist() == [15 * MINUTE if date < "2021-06-26" else 0]
        assert table.halt_start[0] == close - (45 * MINUTE if date < "2021-06-26" else 0)


def test_special_days():
    def text(first, last):
        days = calendar.special_days(dt.date.fromisoformat(first), dt.date.fromisoformat(last))
        return [f"{day} {what}" for day, what in days]

    assert text("2021-01-01", "2021-12-31") == [
        "2021-01-01 closed", "2021-01-18 closes 12:00", "2021-02-15 closes 12:00", "2021-04-02 closes 08:15",
        "2021-05-31 closes 12:00", "2021-07-05 closes 12:00", "2021-09-06 closes 12:00", "2021-11-25 closes 12:00",
        "2021-11-26 closes 12:15", "2021-12-24 closed",
    ]  # fmt: skip
    # Both ends belong to the range; a Saturday's New Year (2022) is no weekday without a session.
    assert text("2021-11-25", "2021-11-26") == ["2021-11-25 closes 12:00", "2021-11-26 closes 12:15"]
    assert text("2021-11-26", "2021-11-25") == []
    assert text("2021-12-25", "2022-01-14") == []
    assert text("2012-10-20", "2012-10-31") == ["2012-10-29 closes 08:15", "2012-10-30 closes 08:15"]
    with pytest.raises(ValueError, match="2036-01-01 lies outside the session calendar, which covers 2008 to 2035"):
        calendar.special_days(dt.date(2020, 1, 1), dt.date(2036, 1, 1))


def test_special_days_are_what_the_table_lacks():
    special = dict(calendar.special_days(dt.date(2008, 1, 1), dt.date(2035, 12, 31)))
    table = calendar.trade_dates(-(2**62), 2**62)
    closes = {EPOCH + dt.timedelta(int(d)): clock(c)[-5:] for d, c in zip(table.date, table.close, strict=True)}
    day = dt.date(2008, 1, 1)
    while day.year < 2036:
        if day.weekday() < 5:
            expected = f"closes {closes[day]}" if closes.get(day, "closed") < "15:15" else "closed"
            assert special.get(day) == (expected if day not in closes or closes[day] < "15:15" else None), day
        day += dt.timedelta(1)
    assert all(day.weekday() < 5 for day in special)


def test_trading_periods():
    opens, closes = calendar.trading_periods()
    assert np.all(opens[1:] >= closes[:-1])
    assert np.all(closes > opens)
    first = int(np.searchsorted(opens, ns("2021-06-24 17:00")))
    assert [(clock(o), clock(c)) for o, c in zip(opens[first : first + 3], closes[first : first + 3], strict=True)] == [
        ("2021-06-24 17:00", "2021-06-25 15:15"),
        ("2021-06-25 15:30", "2021-06-25 16:00"),
        ("2021-06-27 17:00", "2021-06-28 16:00"),
    ]


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


# Cross-checks, 2008 to 2035: what each library has otherwise, date by date or by a rule that is stated.

PAYROLL_GOOD_FRIDAYS = [
    "2010-04-02", "2012-04-06", "2015-04-03", "2021-04-02", "2023-04-07", "2026-04-03", "2034-04-07",
]  # fmt: skip
STORM = ["2012-10-29", "2012-10-30"]
MOURNING = ["2018-12-05", "2025-01-09"]
JUNETEENTH = [
    "2022-06-20", "2023-06-19", "2024-06-19", "2025-06-19", "2026-06-19", "2027-06-18", "2028-06-19", "2029-06-19",
    "2030-06-19", "2031-06-19", "2032-06-18", "2033-06-20", "2034-06-19", "2035-06-19",
]  # fmt: skip
BEFORE_INDEPENDENCE = [
    "2008-07-03", "2012-07-03", "2013-07-03", "2014-07-03", "2017-07-03", "2018-07-03", "2019-07-03", "2023-07-03",
    "2024-07-03", "2025-07-03", "2028-07-03", "2029-07-03", "2030-07-03", "2031-07-03", "2034-07-03", "2035-07-03",
]  # fmt: skip
AFTER_THANKSGIVING = [
    "2008-11-28", "2009-11-27", "2010-11-26", "2011-11-25", "2012-11-23", "2013-11-29", "2014-11-28", "2015-11-27",
    "2016-11-25", "2017-11-24", "2018-11-23", "2019-11-29", "2020-11-27", "2021-11-26", "2022-11-25", "2023-11-24",
    "2024-11-29", "2025-11-28", "2026-11-27", "2027-11-26", "2028-11-24", "2029-11-23", "2030-11-29", "2031-11-28",
    "2032-11-26", "2033-11-25", "2034-11-24", "2035-11-23",
]  # fmt: skip
CHRISTMAS_EVE = [
    "2008-12-24", "2009-12-24", "2012-12-24", "2013-12-24", "2014-12-24", "2015-12-24", "2018-12-24", "2019-12-24",
    "2020-12-24", "2024-12-24", "2025-12-24", "2026-12-24", "2029-12-24", "2030-12-24", "2031-12-24", "2035-12-24",
]  # fmt: skip
UNTIL_2014 = [
    f"{year}-{day}"
    for year, days in {
        2008: "01-21 02-18 05-26 07-04 09-01 11-27", 2009: "01-19 02-16 05-25 07-03 09-07 11-26",
        2010: "01-18 02-15 05-31 07-05 09-06 11-25", 2011: "01-17 02-21 05-30 07-04 09-05 11-24",
        2012: "01-16 02-20 05-28 07-04 09-03 11-22", 2013: "01-21 02-18 05-27 07-04 09-02 11-28",
        2014: "01-20 02-17",
    }.items()
    for day in days.split()
]  # fmt: skip


def our_closes() -> dict[str, str]:
    table = calendar.trade_dates(-(2**62), 2**62)
    return {str(EPOCH + dt.timedelta(int(d))): clock(c)[-5:] for d, c in zip(table.date, table.close, strict=True)}


def library_closes(closes) -> dict[str, str]:
    local = closes.dt.tz_convert("America/Chicago")
    return dict(zip(closes.index.strftime("%Y-%m-%d"), local.dt.strftime("%H:%M"), strict=True))


def differences(theirs: dict[str, str], ours: dict[str, str]) -> dict[tuple[str, str], list[str]]:
    """Dates of each pair of closing times, theirs and ours, that are not the same."""
    found: dict[tuple[str, str], list[str]] = {}
    for date in sorted(set(theirs) & set(ours)):
        if theirs[date] != ours[date]:
            found.setdefault((theirs[date], ours[date]), []).append(date)
    return found


def test_cross_check_exchange_calendars():
    library = pytest.importorskip("exchange_calendars").get_calendar("CMES", start="2008-01-01", end="2035-12-31")
    theirs, ours = library_closes(library.schedule["close"]), our_closes()
    assert set(theirs) - set(ours) == set()
    # It drops days that traded.
    assert sorted(set(ours) - set(theirs)) == sorted(PAYROLL_GOOD_FRIDAYS + MOURNING)
    found = differences(theirs, ours)
    # Its full days end at 17:00, with the maintenance break inside.
    for full in ("15:15", "16:00", "16:15", "16:30"):
        del found["17:00", full]
    assert found == {
        ("12:00", "12:15"): sorted(AFTER_THANKSGIVING + CHRISTMAS_EVE),
        ("12:00", "10:30"): UNTIL_2014,
        ("17:00", "12:15"): BEFORE_INDEPENDENCE,
        ("17:00", "12:00"): JUNETEENTH,
        ("17:00", "08:15"): STORM,
    }


def test_cross_check_pandas_market_calendars():
    library = pytest.importorskip("pandas_market_calendars").get_calendar("CME_Equity")
    theirs, ours = library_closes(library.schedule("2008-01-01", "2035-12-31")["market_close"]), our_closes()
    assert sorted(set(ours) - set(theirs)) == MOURNING
    # It has early closes on Good Fridays without a payroll report, when nothing trades, from 2024 on.
    assert sorted(set(theirs) - set(ours)) == [
        "2024-03-29", "2025-04-18", "2027-03-26", "2028-04-14", "2029-03-30", "2030-04-19", "2031-04-11", "2032-03-26",
        "2033-04-15", "2035-03-23",
    ]  # fmt: skip
    found = differences(theirs, ours)
    # Its trade date ends at 15:15 through 2012-11-16; the 15:30 to 16:30 trading that followed is ours. It has 16:00
    # before 2015-09-21 too.
    half_past, quarter_past = found.pop(("15:15", "16:30")), found.pop(("16:00", "16:15"))
    assert (half_past[0], half_past[-1]) == ("2008-01-02", "2012-11-15")
    assert (quarter_past[0], quarter_past[-1]) == ("2012-11-19", "2015-09-18")
    assert found == {
        ("12:00", "12:15"): sorted(BEFORE_INDEPENDENCE + AFTER_THANKSGIVING + CHRISTMAS_EVE),
        ("12:00", "10:30"): UNTIL_2014,
        ("15:15", "08:15"): STORM,
    }
