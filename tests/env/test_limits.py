"""Locked bars, against limits that the exchange published and limits worked out by hand."""

from __future__ import annotations

import dataclasses
import datetime as dt
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fox_env.contracts import get_contract
from fox_env.data.bars import Bars, concatenate
from fox_env.data.limits import locks
from fox_env.data.rolls import Segment
from fox_env.data.synthetic import synthetic_bars
from fox_env.gym_env import FoxES
from fox_env.market import build_market

CHICAGO = ZoneInfo("America/Chicago")
MINUTE = 60_000_000_000


def rows(*table: tuple, minutes: int = 5) -> Bars:
    """Bars from (Chicago clock time of the start, high, low), opened at the high and closed at the low."""
    start = np.array(
        [int(dt.datetime.fromisoformat(row[0]).replace(tzinfo=CHICAGO).timestamp()) * 10**9 for row in table], np.int64
    )
    high, low = (np.array([row[k] for row in table], float) for k in (1, 2))
    return Bars(start, start + minutes * MINUTE, high, high, low, low, np.ones(len(table)))


def flat(clock: str, price: float) -> tuple:
    return clock, price, price


def locked_at(fixing: str, price: float, clock: str, limit: float, tick: float = 0.25) -> int:
    """Lock of a flat bar at `limit` that follows one that came down (or up) to it, after a fixing at `price`."""
    towards = limit - (limit - price) * 0.2
    begin = dt.datetime.fromisoformat(clock) - dt.timedelta(minutes=5)
    before = (begin.isoformat(" "), max(limit, towards), min(limit, towards))
    return int(locks(rows(flat(fixing, price), before, flat(clock, limit)), tick)[-1])


# E-mini S&P 500 from the exchange's price-limit guide of trade date 2014-10-23: reference 1920.50 and 1912.50 for the
# contract after it; and from 2020-04-14, 2752.50 for the fixing of the 13th. E-mini Nasdaq-100: 3941.00.
@pytest.mark.parametrize(
    ("fixing", "price", "overnight", "down", "levels"),
    [
        ("2014-10-22 14:55", 1920.5, 2016.5, 1824.5, (1786.0, 1670.0, 1535.5)),
        ("2014-10-22 14:55", 1912.5, 2008.5, 1816.5, (1778.0, 1662.0, 1527.5)),
        ("2020-04-13 14:55", 2752.5, 2890.5, 2614.5, (2559.5, 2393.5, 2200.5)),
        ("2014-10-22 14:55", 3941.0, 4138.25, 3743.75, (3664.75, 3427.75, 3151.25)),
    ],
)
def test_published_limits(fixing, price, overnight, down, levels):
    day = dt.date.fromisoformat(fixing[:10])
    night, morning, late = f"{day} 22:00", f"{day + dt.timedelta(1)} 10:00", f"{day + dt.timedelta(1)} 14:40"
    assert locked_at(fixing, price, night, overnight) == 1
    assert locked_at(fixing, price, night, down) == -1
    assert locked_at(fixing, price, f"{day} 15:10", down) == -1  # the fixing's own afternoon
    assert [locked_at(fixing, price, morning, level) for level in levels] == [-1, -1, -1]
    # While stocks trade there is no limit up and no limit of 5 %; from 14:25 on the 20 % remain.
    assert locked_at(fixing, price, morning, overnight) == 0
    assert locked_at(fixing, price, morning, down) == 0
    assert [locked_at(fixing, price, late, level) for level in levels] == [0, 0, -1]
    edge = [f"{day + dt.timedelta(1)} {at}" for at in ("08:30", "14:20", "14:25", "14:55")]
    assert [locked_at(fixing, price, at, levels[0]) for at in edge] == [-1, -1, 0, 0]
    # Overnight there are no levels.
    assert [locked_at(fixing, price, night, level) for level in levels] == [0, 0, 0]


def test_bracket_by_hand():
    # Fixing 3000 exactly. The index lies within 1.5 %, so 5 % of it is 147.75 to 152.25, and half a point of slack:
    # limits down from 2847.25 to 2852.75, up from 3147.25 to 3152.75.
    def lock(limit):
        return locked_at("2019-08-06 14:55", 3000.0, "2019-08-06 22:00", limit)

    assert [lock(p) for p in (2847.0, 2847.25, 2850.0, 2852.75, 2853.0)] == [0, -1, -1, -1, 0]
    assert [lock(p) for p in (3147.0, 3147.25, 3150.0, 3152.75, 3153.0)] == [0, 1, 1, 1, 0]

    # With trades between 2990 and 3010 in the fixing bar: down 2990 - 152.7575 - .5 to 3010 - 147.2575 + .5.
    def wide(limit):
        bars = rows(
            ("2019-08-06 14:55", 3010.0, 2990.0), ("2019-08-06 21:55", 2900.0, limit), flat("2019-08-06 22:00", limit)
        )
        return int(locks(bars, 0.25)[-1])

    assert [wide(p) for p in (2836.5, 2836.75, 2863.0, 2863.25)] == [0, -1, -1, 0]


def test_dates():
    def overnight(fixing, share):
        night = dt.datetime.fromisoformat(fixing) + dt.timedelta(hours=7)
        price = 4000.0 * (1 + share)
        return locked_at(fixing, 4000.0, night.isoformat(" "), price)

    assert [overnight("2020-09-29 14:55", s) for s in (-0.05, 0.05, -0.07, 0.07)] == [-1, 1, 0, 0]
    assert [overnight("2020-10-14 14:55", s) for s in (-0.05, 0.05, -0.07, 0.07)] == [0, 0, 0, 0]
    assert [overnight("2020-11-03 14:55", s) for s in (-0.05, 0.05, -0.07, 0.07)] == [0, 0, -1, 1]
    assert [overnight("2013-04-09 14:55", s) for s in (-0.05, 0.05)] == [-1, 1]
    assert [overnight("2013-04-03 14:55", s) for s in (-0.05, 0.05)] == [0, 0]
    # The first trade dates of each row, from five in the afternoon on Sunday.
    assert locked_at("2013-04-05 14:55", 4000.0, "2013-04-07 17:05", 3800.0) == -1
    assert locked_at("2020-09-30 14:55", 4000.0, "2020-09-30 17:05", 3800.0) == 0
    assert locked_at("2020-10-30 14:55", 4000.0, "2020-10-30 15:10", 3720.0) == 0
    assert locked_at("2020-10-30 14:55", 4000.0, "2020-11-01 17:05", 3720.0) == -1
    assert locked_at("2013-04-03 14:55", 4000.0, "2013-04-04 10:00", 3720.0) == 0
    assert locked_at("2020-10-14 14:55", 4000.0, "2020-10-15 10:00", 3720.0) == -1  # the levels stayed


def test_a_bar_on_the_way_to_the_limit_is_not_locked():
    # 2850.50, 2850.25 and 2850.00 all lie in the bracket of 3000 less 5 %. The first two are new lows and passed later;
    # the third is at last held.
    bars = rows(
        flat("2019-08-06 14:55", 3000.0),
        ("2019-08-06 21:50", 2900.0, 2860.0),
        flat("2019-08-06 21:55", 2850.5),
        flat("2019-08-06 22:00", 2850.25),
        flat("2019-08-06 22:05", 2850.0),
        flat("2019-08-06 22:10", 2850.0),
        ("2019-08-06 22:15", 2850.25, 2850.0),
        flat("2019-08-06 22:20", 2850.25),
        flat("2019-08-06 22:25", 2850.0),
    )
    assert locks(bars, 0.25).tolist() == [0, 0, 0, 0, 0, -1, 0, 0, -1]


def test_the_first_bar_of_a_session_may_be_locked():
    # Sunday evening, straight to the limit from Friday's fixing of 2700: 2565.
    bars = rows(flat("2020-03-13 14:55", 2700.0), flat("2020-03-13 15:55", 2710.0), flat("2020-03-15 17:00", 2565.0))
    assert locks(bars, 0.25).tolist() == [0, 0, -1]


def test_bars_shorter_than_a_minute_lock_when_a_minute_has_passed_at_the_price():
    """Two minutes of one second bars at the limit; and a fall through it, whose bars have no range either."""
    before = [flat("2019-08-06 14:55", 3000.0), ("2019-08-06 21:55", 2900.0, 2850.0)]
    seconds = [flat(f"2019-08-06 22:{k // 60:02d}:{k % 60:02d}", 2850.0) for k in range(120)]
    late = [flat("2019-08-06 22:02:00", 2850.0), flat("2019-08-06 22:02:01", 2850.25)]

    def short(table):
        bars = rows(*before, *table)
        length = np.where(np.arange(len(bars)) < 2, 5 * MINUTE, MINUTE // 60)
        return locks(dataclasses.replace(bars, ts=bars.start + length), 0.25)[2:]

    assert short([*seconds, *late]).tolist() == [0] * 59 + [-1] * 62 + [0]
    falling = [(clock, 2853.0 - k // 8 * 0.25, 2853.0 - k // 8 * 0.25) for k, (clock, *_) in enumerate(seconds)]
    assert not short(falling).any()


def test_limits_follow_the_fixing():
    # On Tuesday stocks end at 2800; from 15:00 the limit is 5 % below 2800, not below Monday's 3000.
    bars = rows(
        flat("2019-08-05 14:55", 3000.0),
        flat("2019-08-06 14:55", 2800.0),
        ("2019-08-06 15:00", 2800.0, 2660.0),
        flat("2019-08-06 15:05", 2660.0),
        flat("2019-08-07 08:25", 2660.0),
        flat("2019-08-07 08:30", 2604.0),  # the first bar of the day, 7 % below
        flat("2019-08-07 08:35", 2604.0),
    )
    assert locks(bars, 0.25).tolist() == [0, 0, 0, -1, -1, -1, -1]


def test_holidays():
    # Thanksgiving 2019-11-28: futures close at 12:00 without a fixing; Wednesday's holds until Friday's 12:00.
    price, limit = 3000.0, 2850.0
    fixing = "2019-11-27 14:55"
    assert locked_at(fixing, price, "2019-11-28 04:00", limit) == -1
    assert locked_at(fixing, price, "2019-11-28 10:00", limit) == 0
    assert locked_at(fixing, price, "2019-11-28 10:00", 2790.0) == 0  # the 7 % of other days
    assert locked_at(fixing, price, "2019-11-28 22:00", limit) == -1
    assert locked_at(fixing, price, "2019-11-29 10:00", 2790.0) == -1
    assert locked_at(fixing, price, "2019-11-29 11:35", 2790.0) == 0  # 7 % until 11:25
    assert locked_at(fixing, price, "2019-11-29 11:35", 2400.0) == -1
    assert locked_at("2019-11-29 11:55", price, "2019-11-29 12:05", limit) == -1
    assert locked_at("2019-11-29 11:55", price, "2019-12-01 22:00", limit) == -1


def test_an_unknown_fixing_gives_no_lock():
    night, limit = "2019-08-06 22:00", 2850.0
    assert locked_at("2019-08-06 14:55", 3000.0, night, limit) == -1
    # Nothing was traded in the half minute to 15:00, or not on the day before.
    assert locked_at("2019-08-06 14:50", 3000.0, night, limit) == 0
    assert locked_at("2019-08-06 15:00", 3000.0, night, limit) == 0
    assert locked_at("2019-08-05 14:55", 3000.0, night, limit) == 0
    assert locks(rows(flat(night, limit), flat("2019-08-06 22:05", limit)), 0.25).tolist() == [0, 0]
    assert locks(rows(), 0.25).tolist() == []


def test_fixing_of_bars_of_any_length():
    # One bar from 14:59:45 to 15:00:07 holds trades of the half minute; one that ended at 14:59:30 doesn't.
    held = locked_at("2019-08-06 14:59:45", 3000.0, "2019-08-06 22:00", 2850.0)
    bars = rows(
        flat("2019-08-06 14:55", 2900.0), flat("2019-08-06 14:59:45", 3000.0), ("2019-08-06 22:00", 2900.0, 2850.0),
        flat("2019-08-06 22:05", 2850.0),
    )  # fmt: skip
    ts = bars.ts.copy()
    ts[0] = bars.start[1] - 15 * 10**9
    ts[1] = bars.start[1] + 22 * 10**9
    assert (held, locks(dataclasses.replace(bars, ts=ts), 0.25)[-1]) == (-1, -1)
    # Had the earlier bar been counted, the bracket would have reached up to 2900 - 5 %.
    off = dataclasses.replace(bars, ts=ts, low=bars.low - [0, 0, 15, 15], high=bars.high - [0, 0, 15, 15])
    assert locks(off, 0.25)[-1] == 0
    ts[0] += 1
    assert locks(dataclasses.replace(off, ts=ts), 0.25)[-1] == -1


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-20, 4), min_size=2, max_size=40), st.integers(0, 39), st.integers(0, 2**32 - 1))
def test_causal_and_symmetric(steps, cut, seed):
    """Bars about a limit down of 2850: later bars change nothing; overnight the mirror image locks the other way."""
    price = 2851.5 + 0.25 * np.minimum.accumulate(np.cumsum(steps) % 9)
    start = 1_565_132_400_000_000_000 + 5 * MINUTE * np.arange(len(steps))  # Tuesday 2019-08-06 18:00
    rng = np.random.default_rng(seed)
    high = price + 0.25 * rng.integers(0, 2, len(steps))
    night = Bars(start, start + 5 * MINUTE, high, high, price, price, np.ones(len(steps)))
    bars = concatenate([rows(flat("2019-08-06 14:55", 3000.0), flat("2019-08-06 15:00", 2990.0)), night])
    lock = locks(bars, 0.25)
    assert set(lock.tolist()) <= {0, -1}
    assert lock.dtype == np.int8
    cut = min(cut, len(bars) - 1)
    garbage = bars.low.copy()
    garbage[cut + 1 :] = rng.choice([1.0, 2850.0, 9e9], len(bars) - cut - 1)
    later = dataclasses.replace(bars, low=garbage, high=np.where(np.arange(len(bars)) > cut, garbage, bars.high))
    assert np.array_equal(locks(later, 0.25)[: cut + 1], lock[: cut + 1])
    mirrored = dataclasses.replace(bars, high=6000.0 - bars.low, low=6000.0 - bars.high)
    assert np.array_equal(locks(mirrored, 0.25), -lock)


@pytest.mark.parametrize("kind", ["planted", "martingale", "garch"])
def test_synthetic_markets_never_lock(kind):
    bars = synthetic_bars(kind, 70_000).bars
    assert not locks(bars, 0.25).any()
    # Nor do they where every bar is a single trade at its close.
    assert not locks(dataclasses.replace(bars, high=bars.close, low=bars.close), 0.25).any()


def test_bars_in_closed_hours_alone_never_lock():
    """A Saturday, as made-up frames often begin with."""
    assert locks(rows(flat("2022-01-01 09:00", 4000.0), flat("2022-01-01 09:05", 4000.0)), 0.25).tolist() == [0, 0]


def test_a_market_knows_its_locks_and_no_sale_into_one_is_filled():
    """After a fixing at 3000 the market falls to 2850, 5 % below, and stays there locked for ten bars."""
    day = synthetic_bars("planted", 300, start="2019-08-05").bars
    fixed = rows(flat("2019-08-06 14:55", 3000.0))
    quiet = day.take(day.ts <= fixed.start[0])
    shift = 3000.0 - quiet.close[-1]
    quiet = dataclasses.replace(
        quiet, extra={}, **{name: getattr(quiet, name) + shift for name in ("open", "high", "low", "close")}
    )
    night = [("2019-08-06 21:55", 3000.0, 2850.0), *(flat(f"2019-08-06 22:{5 * k:02d}", 2850.0) for k in range(10))]
    bars = concatenate([quiet, fixed, rows(*night)])
    market = build_market([Segment("ESU19", bars, 0, 0.0)], "ES", 5 * MINUTE)
    assert np.flatnonzero(market.lock == -1).tolist() == list(range(len(bars) - 10, len(bars)))
    assert market.quality["locked_bars"] == 10
    at = len(bars) - 5
    for direction, filled in ((0, 0), (2, 1)):
        env = FoxES(market, max_contracts=1, episode_bars=3)
        env.reset(options={"start": at})
        info = env.step((direction, 2, 0, 1))[-1]
        assert info["filled"] == filled
    # Terms of one's own are not the exchange's.
    own = dataclasses.replace(get_contract("ES"), name="MINE")
    assert not build_market([Segment("ESU19", bars, 0, 0.0)], own, 5 * MINUTE).lock.any()
