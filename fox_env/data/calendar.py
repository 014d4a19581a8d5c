"""Sessions of CME equity-index futures (ES, MES, NQ, MNQ), date-effective, 2008 to 2035. All clock times are Chicago's.

A session is named by its trade date, the date on which it closes. It opens at 17:00 on the calendar day before and
closes at 16:00, at 16:15 through 2015-09-18; through 2012-11-16 at 16:30 and on Fridays at 15:15. From 15:15 to 15:30
trading halts, through 2021-06-25. Early closes: 12:00 on the holidays of the stock market (10:30 through 2014-02-17),
12:15 on the days beside them, 08:15 on a Good Friday with a payroll report, 08:30 on days of mourning, 08:15 on the two
days of the storm of 2012. No session at all: other Good Fridays, Christmas, New Year's Day. An early close shortens a
session; trading resumes at 17:00 as the next trade date, which the exchange books together with the holiday and Fox
counts as a session of its own.

Sources: the exchange's holiday notices as summarized by users of exchange_calendars and pandas_market_calendars,
checked bar by bar against 5-minute data of 2014-12 to 2021-12 and 1-minute data of 2024-12 to 2025-12. The 10:30 closes
are in the exchange's notices of Labor Day 2003 and 2007 and of Martin Luther King and Presidents Day 2006, in a
broker's of July 4, 2013, and in the LEAN project's market-hours table, which has them from 2009 to 2014-02-17 and 12:00
from 2014-05-26 on; the storm in the exchange's notice of 2012-10-29. No bars of those years were at hand. Unscheduled
stops (limit halts, outages) end no session and are not in here.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from functools import lru_cache
from zoneinfo import ZoneInfo

import numpy as np

CHICAGO = ZoneInfo("America/Chicago")
FIRST_YEAR, LAST_YEAR = 2008, 2035
HOURS = ("all", "rth")

_DAY = dt.timedelta(days=1)
_EPOCH = dt.date(1970, 1, 1)
_MINUTE_NS = 60_000_000_000
_FOUR_THIRTY_UNTIL = dt.date(2012, 11, 16)
_FOUR_FIFTEEN_UNTIL = dt.date(2015, 9, 18)
_HALT_UNTIL = dt.date(2021, 6, 25)
_NOON_FROM = dt.date(2014, 5, 26)
_STOCKS_SHUT = {  # with the stock market, for the storm in New York and for days of mourning
    dt.date(2012, 10, 29): (8, 15),
    dt.date(2012, 10, 30): (8, 15),
    dt.date(2018, 12, 5): (8, 30),
    dt.date(2025, 1, 9): (8, 30),
}
_JUNETEENTH_FROM = 2022


@dataclass(frozen=True)
class Sessions:
    """Where bars lie in their sessions; every array is [T].

    Args:
        session: int32, trade date of the session, as days since 1970-01-01.
        is_open: bool, some of the bar lies in trading hours.
        fraction_left: float32 in [0, 1], (session close - ts) / (session close - session open).
        minutes_left: float32, minutes from ts to the session's close, at least 0.
        after_break: bool, a session break or an intraday halt lies between the row before and this one; the first row
            is True.
    """

    session: np.ndarray
    is_open: np.ndarray
    fraction_left: np.ndarray
    minutes_left: np.ndarray
    after_break: np.ndarray


@dataclass(frozen=True)
class TradeDates:
    """Sessions in order; every array is [D].

    Args:
        date: int32, trade date as days since 1970-01-01.
        open, close: int64, UTC nanoseconds.
        halt_start, halt_end: int64, UTC nanoseconds of the intraday halt; both equal `close` where there is none.
    """

    date: np.ndarray
    open: np.ndarray
    close: np.ndarray
    halt_start: np.ndarray
    halt_end: np.ndarray


def sessions(start: np.ndarray, ts: np.ndarray, *, hours: str = "all") -> Sessions:
    """Place bars in their sessions.

    A bar belongs to the session that was the last to open before the bar's end, so a daily bar that ends at midnight
    UTC belongs to the session under way at that moment. A bar counts as open if any of it lies in trading hours: the
    trades of a bar that reaches over a close or a halt were all made on its open side.

    Args:
        start, ts: int64 [T], UTC nanoseconds; a bar holds the trades of [start, ts).
        hours: ``"all"``, or ``"rth"`` for 08:30 to 15:00 or the early close.

    Raises:
        ValueError: unknown `hours`, or a bar outside the table's years.
    """
    start, ts = np.asarray(start, np.int64), np.asarray(ts, np.int64)
    table, period_open, period_close, period_session = _table(hours)
    if len(ts) and (start.min() < table.open[0] or ts.max() > table.close[-1]):
        bad = ts.max() if start.min() >= table.open[0] else start.min()
        day = np.datetime64(int(bad), "ns").astype("datetime64[D]")
        raise ValueError(f"a bar on {day} lies outside the session calendar, which covers {FIRST_YEAR} to {LAST_YEAR}")
    last = np.searchsorted(period_open, ts, side="left") - 1  # the last trading period that opened before the bar's end
    first = np.searchsorted(period_close, start, side="right")  # the first that closes after the bar's start
    row = period_session[last]
    left = np.maximum(table.close[row] - ts, 0)
    length = (table.close - table.open)[row]
    after_break = np.ones(len(ts), bool)
    after_break[1:] = first[1:] != last[:-1]
    return Sessions(
        session=table.date[row],
        is_open=first <= last,
        fraction_left=np.minimum(left / length, 1.0).astype(np.float32),
        minutes_left=(left / _MINUTE_NS).astype(np.float32),
        after_break=after_break,
    )


def trade_dates(first_ns: int, last_ns: int, *, hours: str = "all") -> TradeDates:
    """The sessions that have any time in [first_ns, last_ns), UTC nanoseconds.

    Raises:
        ValueError: unknown `hours`.
    """
    table = _table(hours)[0]
    first = int(np.searchsorted(table.close, first_ns, side="right"))
    rows = slice(first, int(np.searchsorted(table.open, last_ns, side="left")))
    return TradeDates(*(getattr(table, name)[rows] for name in ("date", "open", "close", "halt_start", "halt_end")))


def trading_periods(*, hours: str = "all") -> tuple[np.ndarray, np.ndarray]:
    """Open and close of every stretch of uninterrupted trading, int64 [P] UTC ns; a halt makes two of a session.

    Raises:
        ValueError: unknown `hours`.
    """
    return _table(hours)[1:3]


def special_days(first: dt.date, last: dt.date) -> list[tuple[dt.date, str]]:
    """Weekdays from `first` to `last`, both included, that have no session or an early close.

    Returns:
        Trade date and ``"closed"`` or, in Chicago's clock time, such as ``"closes 12:00"``, in order.

    Raises:
        ValueError: dates outside the table's years.
    """
    for day in (first, last):
        if not FIRST_YEAR <= day.year <= LAST_YEAR:
            raise ValueError(f"{day} lies outside the session calendar, which covers {FIRST_YEAR} to {LAST_YEAR}")
    return [
        (day, "closed" if closing is None else "closes {:02d}:{:02d}".format(*closing))
        for year in range(first.year, last.year + 1)
        for day, closing in sorted(_short_days(year).items())
        if first <= day <= last and day.weekday() < 5 and day.year == year
    ]


def third_friday(year: int, month: int) -> dt.date:
    """The third Friday of the month, on which quarterly contracts expire unless it is a holiday."""
    return _nth(year, month, 4, 3)


def expiration_ns(year: int, month: int) -> int:
    """UTC nanoseconds at which the contract of that month stops trading.

    08:30 on the third Friday, or on the business day before where the stock market keeps a holiday on that Friday.
    """
    day = third_friday(year, month)
    if day == _easter(year) - 2 * _DAY or (year >= _JUNETEENTH_FROM and day == _observed(dt.date(year, 6, 19))):
        day -= _DAY
    return clock_ns(day, 8, 30)


@lru_cache(maxsize=len(HOURS))
def _table(hours: str) -> tuple[TradeDates, np.ndarray, np.ndarray, np.ndarray]:
    """The sessions, and their trading periods (a halt makes two of one session): open, close, row of the session."""
    if hours not in HOURS:
        raise ValueError(f"hours {hours!r} is unknown, expected one of {', '.join(HOURS)}")
    rows, periods = [], []
    for year in range(FIRST_YEAR, LAST_YEAR + 1):
        short = _short_days(year)
        day = dt.date(year, 1, 1)
        while day.year == year:
            closing = short.get(day, _regular_close(day)) if day.weekday() < 5 else None
            if closing is not None and hours == "rth":
                closing = min(closing, (15, 0))
            if closing is not None and (hours == "all" or closing > (8, 30)):
                opens = clock_ns(day - _DAY, 17, 0) if hours == "all" else clock_ns(day, 8, 30)
                closes = clock_ns(day, *closing)
                halted = day <= _HALT_UNTIL and closing > (15, 30)
                halt = (clock_ns(day, 15, 15), clock_ns(day, 15, 30)) if halted else (closes, closes)
                periods.append((opens, halt[0], len(rows)))
                if halted:
                    periods.append((halt[1], closes, len(rows)))
                rows.append(((day - _EPOCH).days, opens, closes, *halt))
            day += _DAY
    date, *times = np.array(rows, np.int64).T.copy()
    return TradeDates(date.astype(np.int32), *times), *np.array(periods, np.int64).T.copy()


def _regular_close(day: dt.date) -> tuple[int, int]:
    if day <= _FOUR_THIRTY_UNTIL:
        return (15, 15) if day.weekday() == 4 else (16, 30)
    return (16, 15) if day <= _FOUR_FIFTEEN_UNTIL else (16, 0)


def _short_days(year: int) -> dict[dt.date, tuple[int, int] | None]:
    """Closing time of each weekday that has not the regular one; None for no session."""
    good_friday = _easter(year) - 2 * _DAY
    thanksgiving = _nth(year, 11, 3, 4)
    independence = dt.date(year, 7, 4)
    christmas = dt.date(year, 12, 25)
    holidays = [
        _nth(year, 1, 0, 3),  # Martin Luther King
        _nth(year, 2, 0, 3),  # Presidents
        dt.date(year, 5, 31) - _DAY * dt.date(year, 5, 31).weekday(),  # Memorial
        _observed(independence),
        _nth(year, 9, 0, 1),  # Labor
        thanksgiving,
    ]
    if year >= _JUNETEENTH_FROM:
        holidays.append(_observed(dt.date(year, 6, 19)))
    days: dict[dt.date, tuple[int, int] | None] = {day: (12, 0) if day >= _NOON_FROM else (10, 30) for day in holidays}
    days[thanksgiving + _DAY] = (12, 15)
    if independence.weekday() in (1, 2, 3, 4):  # July 3 is the weekday before a holiday kept on its own date
        days[independence - _DAY] = (12, 15)
    days[christmas - _DAY] = (12, 15)
    days[_observed(christmas)] = None
    days[_observed(dt.date(year, 1, 1))] = None  # of a Saturday: a day of the year before, which does not keep it
    # The payroll report comes out on the first Friday of a month; on that Good Friday futures trade until 08:15.
    days[good_friday] = (8, 15) if good_friday.day <= 7 and good_friday.month == 4 else None
    days.update((day, closing) for day, closing in _STOCKS_SHUT.items() if day.year == year)
    return days


def _observed(day: dt.date) -> dt.date:
    """The weekday on which a holiday of that date is kept: Friday for Saturday, Monday for Sunday."""
    return day + _DAY * {5: -1, 6: 1}.get(day.weekday(), 0)


def _nth(year: int, month: int, weekday: int, n: int) -> dt.date:
    first = dt.date(year, month, 1)
    return first + _DAY * ((weekday - first.weekday()) % 7 + 7 * (n - 1))


def _easter(year: int) -> dt.date:
    """Easter Sunday of a year from 1900 to 2099 (Gauss's rule with that period's constants, 24 and 5)."""
    moon = (19 * (year % 19) + 24) % 30
    shift = (2 * (year % 4) + 4 * (year % 7) + 6 * moon + 5) % 7
    days = moon + shift
    if days == 35 or (days == 34 and moon == 28 and year % 19 > 10):
        days -= 7
    return dt.date(year, 3, 22) + _DAY * days


def clock_ns(day: dt.date, hour: int, minute: int) -> int:
    """UTC nanoseconds of a Chicago clock time; no opening or close falls into a switch of daylight saving time."""
    seconds = dt.datetime(day.year, day.month, day.day, hour, minute, tzinfo=CHICAGO).timestamp()
    return int(seconds) * 1_000_000_000
