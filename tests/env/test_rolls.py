"""Contract names, and the chain of front contracts on markets small enough to follow by hand."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fox_env.data import rolls
from fox_env.data.bars import Bars
from fox_env.data.calendar import sessions
from fox_env.data.rolls import chain, follow, outright

HOUR = 3_600_000_000_000


def ns(clock: str) -> int:
    return int(dt.datetime.fromisoformat(clock).replace(tzinfo=ZoneInfo("America/Chicago")).timestamp()) * 10**9


def day_bars(volumes: dict[str, float], price: float = 100.0, per_day: int = 2) -> Bars:
    """`per_day` hourly bars from 09:00 on each date, sharing its volume; closes rise by one from bar to bar."""
    start = np.array([ns(f"{date} 09:00") + k * HOUR for date in volumes for k in range(per_day)], np.int64)
    close = price + np.arange(len(start))
    volume = np.repeat(np.array(list(volumes.values()), float) / per_day, per_day)
    return Bars(start, start + HOUR, close, close, close, close, volume)


DATES = ["2019-03-11", "2019-03-12", "2019-03-13", "2019-03-14"]


def fronts(segments) -> dict[str, list[str]]:
    """Dates on which each contract is the front."""
    found = {}
    for segment in segments:
        front = segment.bars.take(slice(segment.first, None))
        days = np.unique(sessions(front.start, front.ts).session)
        found[segment.instrument] = [str(np.datetime64(int(day), "D")) for day in days]
    return found


def test_front_follows_yesterdays_volume():
    # ESM19 trades more than ESH19 on the 12th, so it is the front from the 13th on, not on the 12th itself.
    near = day_bars({DATES[0]: 900, DATES[1]: 400, DATES[2]: 300, DATES[3]: 950}, 2800)
    far = day_bars({DATES[0]: 100, DATES[1]: 600, DATES[2]: 700, DATES[3]: 50}, 2810)
    quality = {}
    segments = chain({"ESM19": far, "ESH19": near}, quality=quality)
    assert fronts(segments) == {"ESH19": DATES[:2], "ESM19": DATES[2:]}  # and never back
    # Two bars a day: ESM19's own bars of the 11th and 12th stay as history.
    assert [(s.first, len(s.bars)) for s in segments] == [(0, 4), (4, 8)]
    # Closes at the end of the 12th, each contract's fourth bar: 2803 and 2813.
    assert [s.gap for s in segments] == [0, 10]
    assert quality == {
        "rows_after_expiry": 0, "contracts": 2, "contracts_never_front": 0, "rolls": 1, "rolls_unmeasured": 0,
    }  # fmt: skip


def test_what_trades_after_a_session_does_not_change_its_front():
    near = day_bars(dict.fromkeys(DATES, 500.0), 2800)
    for day, expected in ((0, 1), (1, 2), (2, 3)):
        far = day_bars({date: 1000.0 if k >= day else 10.0 for k, date in enumerate(DATES)}, 2810)
        segments = chain({"ESH19": near, "ESM19": far}, quality={})
        assert fronts(segments) == {"ESH19": DATES[:expected], "ESM19": DATES[expected:]}


def test_of_three_the_largest_of_yesterday():
    near = day_bars(dict.fromkeys(DATES, 100.0))
    second = day_bars({DATES[0]: 300, DATES[1]: 10, DATES[2]: 10, DATES[3]: 10})
    third = day_bars({DATES[0]: 200, DATES[1]: 900, DATES[2]: 5, DATES[3]: 5})
    segments = chain({"ESH19": near, "ESM19": second, "ESU19": third}, quality={})
    assert fronts(segments) == {"ESH19": DATES[:1], "ESM19": DATES[1:2], "ESU19": DATES[2:]}


def test_a_tie_keeps_the_front_and_the_rest_is_never_front():
    near, far = day_bars(dict.fromkeys(DATES, 500.0)), day_bars(dict.fromkeys(DATES, 500.0))
    quality = {}
    segments = chain({"ESH19": near, "ESM19": far}, quality=quality)
    assert list(fronts(segments)) == ["ESH19"]
    assert quality["contracts_never_front"] == 1


def test_first_session_takes_the_nearest_contract_that_trades():
    near = day_bars({DATES[1]: 1.0, DATES[2]: 1.0})
    far = day_bars({DATES[0]: 1.0, DATES[1]: 1.0})
    quality = {}
    segments = chain({"ESH19": near, "ESM19": far}, quality=quality)
    # ESM19 alone trades on the first day; ESH19, an earlier expiry, is never gone back to.
    assert fronts(segments) == {"ESM19": DATES[:2]}
    assert quality["rows_behind_front"] == 2


def test_a_front_without_bars_hands_over():
    near, far = day_bars({DATES[0]: 900, DATES[1]: 900}, 2800), day_bars({DATES[2]: 10, DATES[3]: 10}, 2900)
    quality = {}
    segments = chain({"ESH19": near, "ESM19": far}, quality=quality)
    assert fronts(segments) == {"ESH19": DATES[:2], "ESM19": DATES[2:]}
    assert np.isnan(segments[1].gap)
    assert (quality["rolls"], quality["rolls_unmeasured"]) == (1, 1)


def test_a_larger_contract_without_bars_is_waited_for():
    near = day_bars(dict.fromkeys(DATES, 100.0))
    far = day_bars({DATES[0]: 900.0, DATES[2]: 900.0, DATES[3]: 900.0})
    assert fronts(chain({"ESH19": near, "ESM19": far}, quality={})) == {"ESH19": DATES[:3], "ESM19": DATES[3:]}


def test_gap_needs_a_price_of_the_same_session():
    near = day_bars({DATES[0]: 100, DATES[1]: 1}, 2800)
    # ESM19 trades on the first day, then not on the second, the old front's last; its price is a day old.
    far = day_bars({DATES[0]: 50, DATES[2]: 50}, 2810)
    assert np.isnan(chain({"ESH19": near, "ESM19": far}, quality={})[1].gap)
    # With one bar on the second day, an hour before the old front's last close, it is that bar's close: 2812 - 2803.
    far = day_bars({DATES[0]: 50, DATES[1]: 50, DATES[2]: 50}, 2810)
    far = far.take(np.array([0, 1, 2, 4, 5]))
    assert chain({"ESH19": near, "ESM19": far}, quality={})[1].gap == 2812 - 2803


def test_rows_after_expiry_are_dropped():
    # ESH19 expires on 2019-03-15 at 08:30.
    start = np.array([ns("2019-03-15 06:00"), ns("2019-03-15 07:30"), ns("2019-03-15 08:30"), ns("2019-03-15 09:30")])
    price = np.full(4, 2800.0)
    quality = {}
    segments = chain({"ESH19": Bars(start, start + HOUR, price, price, price, price, price)}, quality=quality)
    assert segments[0].bars.start.tolist() == start[:2].tolist()
    assert quality["rows_after_expiry"] == 2
    late = Bars(start[2:], start[2:] + HOUR, *[price[2:]] * 5)
    with pytest.raises(ValueError, match="every row of ESH19 comes after"):
        chain({"ESH19": late}, quality={})


def test_history_is_bounded(monkeypatch):
    monkeypatch.setattr(rolls, "HISTORY_BARS", 3)
    near = day_bars({DATES[0]: 900, DATES[1]: 1, DATES[2]: 1})
    far = day_bars({DATES[0]: 1, DATES[1]: 900, DATES[2]: 900})
    last = chain({"ESH19": near, "ESM19": far}, quality={})[1]
    assert (last.first, len(last.bars)) == (3, 5)
    assert last.bars.start[last.first] == ns(f"{DATES[2]} 09:00")


@pytest.mark.parametrize(("names", "rule", "match"), [
    (["ES"], "volume", "'ES' is not the name of a quarterly contract"),
    (["ESH9"], "volume", "'ESH9' is not"),
    (["ESH19"], "calender", "roll 'calender' is unknown"),
])  # fmt: skip
def test_refusals(names, rule, match):
    with pytest.raises(ValueError, match=match):
        chain({name: day_bars({DATES[0]: 1}) for name in names}, rule=rule, quality={})


def test_follow_counts_unmeasured_rolls():
    quality = {}
    runs = [("ES.c.0:1", day_bars({DATES[0]: 1})), ("ES.c.0:2", day_bars({DATES[1]: 1}))]
    segments = follow(runs, quality)
    assert segments[0].gap == 0
    assert np.isnan(segments[1].gap)
    assert [s.first for s in segments] == [0, 0]
    assert (quality["rolls"], quality["rolls_unmeasured"]) == (1, 1)


@pytest.mark.parametrize(
    ("name", "near", "expected"),
    [
        ("ESH15", None, ("ES", "ESH15", "2015-03-20 08:30")),
        ("ESH0", "2010-01-04 09:00", ("ES", "ESH10", "2010-03-19 08:30")),
        ("ESH0", "2019-12-30 09:00", ("ES", "ESH20", "2020-03-20 08:30")),
        ("ESH0", "2010-03-19 07:00", ("ES", "ESH10", "2010-03-19 08:30")),
        ("ESZ5", "2025-12-19 09:00", ("ES", "ESZ25", "2025-12-19 08:30")),  # rows that go on after the expiry
        ("ESZ4", "2020-01-06 09:00", ("ES", "ESZ24", "2024-12-20 08:30")),  # listed five years ahead
        ("MESM6", "2026-01-09 09:00", ("MES", "MESM26", "2026-06-18 08:30")),
        ("ZMH4", "2024-01-09 09:00", ("ZM", "ZMH24", "2024-03-15 08:30")),
    ],
)
def test_contract_names(name, near, expected):
    got = outright(name, None if near is None else ns(near))
    assert (got.root, got.name, got.expiry) == (*expected[:2], ns(expected[2]))


@pytest.mark.parametrize("name", ["ES", "ESH4-ESM4", "ESM4 P5230", "ES.c.0", "ES.FUT", "ESF24", "ESH2024", "H24", ""])
def test_names_that_are_no_outright(name):
    assert outright(name, ns("2024-01-09 09:00")) is None


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), min_size=6, max_size=6), min_size=1, max_size=4))
def test_chain_properties(volumes):
    """Random volumes by contract and session, 0 for no bars: every session once, expiries in order, no bar lost."""
    dates = ["2019-03-04", "2019-03-05", "2019-03-06", "2019-03-07", "2019-03-08", "2019-03-11"]
    names = ["ESH19", "ESM19", "ESU19", "ESZ19"]
    given_bars = {
        name: day_bars({date: float(v) for date, v in zip(dates, row, strict=True) if v}, 1000.0 * (k + 1))
        for k, (name, row) in enumerate(zip(names, volumes, strict=False))
    }
    given_bars = {name: bars for name, bars in given_bars.items() if len(bars)}
    if not given_bars:
        return
    quality = {}
    segments = chain(given_bars, quality=quality)
    expiries = [outright(s.instrument).expiry for s in segments]
    assert expiries == sorted(set(expiries))
    front = [s.bars.take(slice(s.first, None)) for s in segments]
    start = np.concatenate([bars.start for bars in front])
    assert np.all(np.diff(start) > 0)
    days = set(sessions(start, start + HOUR).session.tolist())
    everything = np.concatenate([bars.start for bars in given_bars.values()])
    missing = set(sessions(everything, everything + HOUR).session.tolist()) - days
    assert (quality.get("rows_behind_front", 0) > 0) == bool(missing)
    for segment in segments:
        own = given_bars[segment.instrument]
        rows = np.isin(own.start, segment.bars.start)
        assert np.array_equal(own.take(rows).close, segment.bars.close)
