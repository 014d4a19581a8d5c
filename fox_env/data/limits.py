"""Daily price limits of CME equity-index futures, and the bars in which a market was locked at one.

All clock times are Chicago's. Limits are offsets from the fixing price, the average price of the 30 seconds to 15:00
(to 12:00 on the days that close at 12:15); the offset is a share of the cash index at that time, rounded down. From one
fixing to the next opening of the stock market there is a limit either way, while it is open there are limits below:

| in force                    | 15:00 to 08:30      | 08:30 to 14:25        | 14:25 to 15:00   |
|-----------------------------|---------------------|-----------------------|------------------|
| trade date 2013-04-08 on    | 5 % up and down     | 7 %, 13 %, 20 % down  | 20 % down        |
| October 2020                | not known           | 7 %, 13 %, 20 % down  | 20 % down        |
| trade date 2020-11-02 on    | 7 % up and down     | 7 %, 13 %, 20 % down  | 20 % down        |

On days that close at 12:15 the columns end at 12:00 and 11:25. Before 2013-04-08 limits were points fixed each quarter
for 10, 20 and 30 %; they are not known here, and neither are those of the hours in which futures trade on a holiday of
the stock market after 08:30. Where limits are not known nothing counts as locked. Not modelled: the 20 % limit that
takes precedence after 15:00 on a day that has lost more than 13 %, and the dynamic circuit breakers, which pause.

Sources: CME's special executive report S-6547 (2013-04-08); its price-limit guide of 2014-10-23 (offsets are shares of
the index, in multiples of half a point); its questions and answers on S&P 500 price limits of 2020-09-22 (hours,
fixing, 7 %). That 5 became 7 % in October 2020 is from Dow Jones Newswires of 2020-11-03; the day was not found.
"""

from __future__ import annotations

import datetime as dt

import numpy as np

from fox_env.data.bars import Bars
from fox_env.data.calendar import clock_ns, trade_dates

OVERNIGHT = (("2013-04-08", 0.05), ("2020-10-01", None), ("2020-11-02", 0.07))
"""(From this trade date on, share of the index): the limit either way while stocks do not trade; None not known."""
LEVELS = (0.07, 0.13, 0.20)
"""Shares of the index: the limits below while stocks trade."""
BASIS = 0.015
"""Largest distance of a contract from its index, as a share: three months at 6 %."""

_FIXING_NS = 30_000_000_000
_LAST_LEVEL_NS = 35 * 60_000_000_000  # before the fixing: from then on the last level alone
_SLACK_TICKS = 2  # rounding of the offset
_LEAST_NS = 60_000_000_000
_EPOCH = dt.date(1970, 1, 1)


def locks(bars: Bars, tick: float) -> np.ndarray:
    """Bars in which the market was locked at a limit.

    The fixing price and the index are not in the bars. The fixing lies between the lowest and the highest price of the
    bars that hold trades of its 30 seconds, the index within `BASIS` of it, so each limit lies in a known bracket. A
    bar is locked if all its trades were at one price in the bracket that no earlier trade since the limit came into
    force has passed, and that one has reached: a bar that makes a new low may still be on its way to the limit, unless
    it is the first. The wider the bars, the wider the bracket, and the rarer a bar without range. Bars of seconds, and
    of few contracts, often have no range: of those shorter than a minute, a minute must have passed at that price.

    Args:
        bars: one contract's bars in time order, those before it became the front included; they give the fixing. A
            session whose predecessor has no trades at its fixing has no lock.
        tick: smallest price change in points.

    Returns:
        int8 [T], +1 locked limit up, -1 locked limit down, else 0. What is said of a bar depends on no later bar.

    Raises:
        ValueError: a bar outside the session calendar's years.
    """
    lock = np.zeros(len(bars), np.int8)
    if not len(bars):
        return lock
    slack = _SLACK_TICKS * tick
    periods = _periods(bars)
    if not periods:  # all in closed hours
        return lock
    ends = np.searchsorted(bars.start, [begin for begin, *_ in periods[1:]] + [bars.ts[-1]])
    first = 0
    for (_, limits, (low, high)), end in zip(periods, ends.tolist(), strict=True):
        rows = slice(first, end)
        first = end
        for sign, share in limits if rows.start < rows.stop and low > 0 else ():
            # Mirrored, a limit up is a limit down: both are lower bounds of sign * price.
            least, most = (low, high) if sign < 0 else (-high, -low)
            bottom = least - share * high * (1 + BASIS) - slack
            top = most - share * low * (1 - BASIS) + slack
            lowest = bars.low[rows] if sign < 0 else -bars.high[rows]
            if lowest.min() > top:
                continue
            reached = np.minimum.accumulate(lowest)
            held = lowest == np.append(lowest[0], reached[:-1])  # by the bars before; the first answers for itself
            flat = bars.high[rows] == bars.low[rows]
            stays = np.append(False, flat[1:] & flat[:-1] & (lowest[1:] == lowest[:-1]))
            since = bars.start[rows][np.maximum.accumulate(np.where(stays, 0, np.arange(len(stays))))]
            lasted = bars.ts[rows] - since >= _LEAST_NS
            lock[rows][held & flat & lasted & (lowest >= bottom) & (lowest <= top)] = sign
    return lock


def _periods(bars: Bars) -> list[tuple[int, list[tuple[int, float]], tuple[float, float]]]:
    """The stretches of time in which limits stand still, in order.

    Returns:
        UTC ns of the beginning; (-1 down or +1 up, share of the index) of each limit; lowest and highest price that the
        fixing can have been, NaN where nothing was traded then.
    """
    table = trade_dates(int(bars.start[0]), int(bars.ts[-1]))
    periods = []
    fixed = (np.nan, np.nan)
    for number, opens, closes in zip(table.date.tolist(), table.open.tolist(), table.close.tolist(), strict=True):
        day = _EPOCH + dt.timedelta(number)
        since = [share for start, share in OVERNIGHT if start <= day.isoformat()]
        either = [(-1, since[-1]), (1, since[-1])] if since and since[-1] else []
        below = [(-1, level) for level in LEVELS] if since else []
        morning, noon, quarter_past, three = (clock_ns(day, *at) for at in ((8, 30), (12, 0), (12, 15), (15, 0)))
        periods.append((opens, either, fixed))
        if closes < quarter_past:  # the stock market is shut: there is no fixing, the last one stays
            periods.append((morning, [], fixed))
            continue
        fixing = noon if closes == quarter_past else three
        periods.append((morning, below, fixed))
        periods.append((fixing - _LAST_LEVEL_NS, below[-1:], fixed))
        traded = slice(
            int(np.searchsorted(bars.ts, fixing - _FIXING_NS, side="right")), int(np.searchsorted(bars.start, fixing))
        )
        known = traded.start < traded.stop
        fixed = (float(bars.low[traded].min()), float(bars.high[traded].max())) if known else (np.nan, np.nan)
        periods.append((fixing, either, fixed))
    return periods
