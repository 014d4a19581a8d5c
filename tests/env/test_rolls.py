"""Contract names, and the chain of front contracts on markets small enough to follow by hand."""

from __future__ import annotations

import datetime as dt
from itertools import pairwise
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fox_env.data import rolls
from fox_env.data.bars import Bars
from fox_env.data.calendar import sessions
from fox_env.data.rolls import ROLL_RULES, chain, follow, outright, roll_date
from tests.env.games import make_market, play

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


@pytest.mark.parametrize(
    ("year", "month", "expected"),
    [
        (2020, 3, "2020-03-12 Thu"),
        (2015, 12, "2015-12-10 Thu"),
        (2008, 3, "2008-03-13 Thu"),  # Good Friday moves the expiry to Thursday the 20th, not the roll
        (2022, 3, "2022-03-10 Thu"),
        (2022, 6, "2022-06-13 Mon"),
        (2024, 3, "2024-03-11 Mon"),
        (2026, 6, "2026-06-15 Mon"),  # expires on Thursday the 18th
        (2027, 6, "2027-06-14 Mon"),
    ],
)
def test_roll_dates(year, month, expected):
    assert roll_date(year, month).strftime("%Y-%m-%d %a") == expected


# ESH20 rolls on Thursday 2020-03-12 and expires on Friday the 20th at 08:30, ESM20 rolls on 2020-06-11.
MARCH_2020 = ["2020-03-10", "2020-03-11", "2020-03-12", "2020-03-13", "2020-03-19", "2020-03-20", "2020-03-23"]


def march_2020(near_days, far_days, near_volume=10.0, far_volume=10.0):
    near = day_bars(dict.fromkeys(near_days, near_volume), 2800)
    # On Friday the 20th the second of two bars from 09:00 lies after the expiry, and so does the first.
    start = near.start - 3 * HOUR
    near = Bars(start, start + HOUR, near.open, near.high, near.low, near.close, near.volume)
    far = day_bars(dict.fromkeys(far_days, far_volume), 2810)
    start = far.start - 3 * HOUR
    return {"ESH20": near, "ESM20": Bars(start, start + HOUR, far.open, far.high, far.low, far.close, far.volume)}


def test_calendar_rolls_on_its_date_whatever_the_volume():
    for near_volume, far_volume in ((1000.0, 1.0), (1.0, 1000.0)):
        contracts = march_2020(MARCH_2020[:-1], MARCH_2020, near_volume, far_volume)
        segments = chain(contracts, rule="calendar", quality={})
        assert fronts(segments) == {"ESH20": MARCH_2020[:2], "ESM20": MARCH_2020[2:]}
        assert segments[1].gap == 10


def test_expiry_keeps_the_contract_to_its_last_session():
    for near_volume, far_volume in ((1000.0, 1.0), (1.0, 1000.0)):
        contracts = march_2020(MARCH_2020[:-1], MARCH_2020, near_volume, far_volume)
        segments = chain(contracts, rule="expiry", quality={})
        assert fronts(segments) == {"ESH20": MARCH_2020[:6], "ESM20": MARCH_2020[6:]}
        # 06:00 and 07:00 on the 20th are bars 11 and 12: 2811 and 2821.
        assert segments[1].gap == 10


def test_calendar_passes_over_a_contract_without_bars():
    # ESM20 has none on the roll date itself: ESH20 stays a day longer.
    segments = chain(march_2020(MARCH_2020[:-1], MARCH_2020[3:]), rule="calendar", quality={})
    assert fronts(segments) == {"ESH20": MARCH_2020[:3], "ESM20": MARCH_2020[3:]}
    # ESH20 ends before its date: ESM20 takes over early, and ESH20's late bars are never gone back to.
    contracts = march_2020([MARCH_2020[0], MARCH_2020[2]], MARCH_2020)
    for rule in ("calendar", "expiry"):
        assert fronts(chain(contracts, rule=rule, quality={})) == {"ESH20": MARCH_2020[:1], "ESM20": MARCH_2020[1:]}


def test_calendar_begins_after_the_roll():
    # From the 12th on the first session is ESM20's, though ESH20 trades.
    contracts = march_2020(MARCH_2020[2:4], MARCH_2020[2:])
    quality = {}
    assert fronts(chain(contracts, rule="calendar", quality=quality)) == {"ESM20": MARCH_2020[2:]}
    assert quality["contracts_never_front"] == 1
    # Alone it stays the front: there is no other.
    alone = {"ESH20": contracts["ESH20"]}
    assert fronts(chain(alone, rule="calendar", quality={})) == {"ESH20": MARCH_2020[2:4]}


def test_calendar_with_a_contract_missing():
    # ESH20 to ESU20, without the June contract between them.
    contracts = march_2020(MARCH_2020, MARCH_2020)
    segments = chain({"ESU20": contracts["ESM20"], "ESH20": contracts["ESH20"]}, rule="calendar", quality={})
    assert fronts(segments) == {"ESH20": MARCH_2020[:2], "ESU20": MARCH_2020[2:]}


def spread_bars(dates: list[str], offset: float, seed: int) -> Bars:
    """Six five-minute bars from 06:00 on each date on a random path, the same for each offset but shifted by it."""
    start = np.array([ns(f"{date} 06:00") + k * HOUR // 12 for date in dates for k in range(6)], np.int64)
    rng = np.random.default_rng(seed)
    close = 2800.0 + 0.25 * np.cumsum(rng.integers(-9, 10, len(start))) + offset
    open_ = close + 0.25 * rng.integers(-4, 5, len(start))
    high, low = np.maximum(open_, close) + 0.25, np.minimum(open_, close) - 0.5
    return Bars(start, start + HOUR // 12, open_, high, low, close, np.full(len(start), 10.0))


@pytest.mark.parametrize("rule", ROLL_RULES)
@pytest.mark.parametrize("offset", [12.5, -13.75])
def test_a_constant_spread_costs_its_costs_and_nothing_else(rule, offset):
    near = spread_bars(MARCH_2020, 0.0, seed=4)
    far = spread_bars(MARCH_2020, offset, seed=4)
    # For the volume rule ESM20 trades more on the 11th.
    more = np.where(far.start >= ns("2020-03-11 00:00"), 90.0, 1.0)
    far = Bars(far.start, far.ts, far.open, far.high, far.low, far.close, more)
    segments = chain({"ESH20": near, "ESM20": far}, rule=rule, quality={})
    sessions_of_near = {"volume": 2, "calendar": 2, "expiry": 6}[rule]
    assert list(fronts(segments)["ESH20"]) == MARCH_2020[:sessions_of_near]
    assert segments[1].gap == offset

    market = make_market(segments)
    long_four = (2, 2, 0, 1)
    infos = play(market, [long_four] * (len(market) - 1), initial_equity_usd=1e9)
    rolled = [k for k, info in enumerate(infos) if info["rolled"]]
    assert rolled == [6 * sessions_of_near - 1]  # the step into the new front's first bar
    # Four contracts: a market order at 0.125 + 0.045 each, and the roll at 2 x 0.125 + 2 x 0.045.
    costs = [0.68] + [0.0] * (len(infos) - 1)
    costs[rolled[0]] = 1.36
    assert [info["cost_points"] for info in infos] == pytest.approx(costs, abs=1e-9)
    # Bought at the open of bar 1, held to the end, in one contract's prices: the offset is nowhere in the gross.
    assert sum(info["gross_points"] for info in infos) == pytest.approx(4 * (near.close[-1] - near.open[1]), abs=1e-9)
    moves = np.diff(near.close)[rolled[0]]
    assert infos[rolled[0]]["gross_points"] == pytest.approx(4 * moves, abs=1e-9)
    assert infos[-1]["equity_usd"] - 1e9 == pytest.approx(50 * (4 * (near.close[-1] - near.open[1]) - 2.04), abs=1e-3)


@pytest.mark.parametrize("rule", ROLL_RULES)
def test_a_roll_that_cannot_be_measured_is_flat(rule):
    near, far = spread_bars(MARCH_2020[:2], 0.0, seed=4), spread_bars(MARCH_2020[2:4], 12.5, seed=5)
    segments = chain({"ESH20": near, "ESM20": far}, rule=rule, quality={})
    assert np.isnan(segments[1].gap)
    infos = play(make_market(segments), [(2, 2, 0, 1)] * 14)
    # Twelve bars of ESH20; the step into the 13th closes four contracts at 0.125 + 0.045 each and orders nothing.
    assert [k for k, info in enumerate(infos) if info["forced"]] == [11]
    assert infos[11]["forced"] == -4
    assert (infos[11]["gross_points"], infos[11]["filled"], infos[11]["position"]) == (0.0, 0, 0)
    assert infos[11]["cost_points"] == pytest.approx(0.68)
    assert infos[12]["filled"] == 4


def test_bars_of_uneven_length():
    # Volume bars: ESH20's end at 06:07:03 and 06:40 and so on, ESM20's where they will.
    def volume_bars(days, ends, price):
        edges = [ns(f"{day} 06:00") + int(60e9 * m) for day in days for m in (0.0, *ends)]
        starts = np.array([e for k, e in enumerate(edges) if (k + 1) % (len(ends) + 1)], np.int64)
        ts = np.array([e for k, e in enumerate(edges) if k % (len(ends) + 1)], np.int64) + 1
        close = price + np.arange(len(ts))
        return Bars(starts, ts, close, close, close, close, np.full(len(ts), 500.0))

    near = volume_bars(MARCH_2020[:4], (7.05, 40.0, 55.2), 2800.0)  # three a day
    far = volume_bars(MARCH_2020[:4], (3.0, 6.0, 21.0, 55.1, 58.0), 2810.0)  # five a day
    segments = chain({"ESH20": near, "ESM20": far}, quality={})
    assert fronts(segments) == {"ESH20": MARCH_2020[:1], "ESM20": MARCH_2020[1:4]}
    assert (segments[1].first, len(segments[1].bars)) == (5, 20)
    # ESH20's last bar of the 10th closes at 06:55:12 at 2802; ESM20's fourth, of 06:55:06, at 2813 is the last before.
    assert segments[1].gap == 2813 - 2802
    assert fronts(chain({"ESH20": near, "ESM20": far}, rule="calendar", quality={})) == {
        "ESH20": MARCH_2020[:2],
        "ESM20": MARCH_2020[2:4],
    }


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


def test_names_of_every_contract_across_the_decades():
    """Each contract of 2008 to 2035, told by one digit from one day to five years before it expires, and just after."""
    for year in range(2008, 2036):
        for letter, month in (("H", 3), ("M", 6), ("U", 9), ("Z", 12)):
            wanted = outright(f"ES{letter}{year % 100:02d}")
            assert (wanted.name, wanted.root) == (f"ES{letter}{year % 100:02d}", "ES")
            assert wanted.roll == roll_date(year, month)
            at = dt.datetime.fromtimestamp(wanted.expiry // 10**9, ZoneInfo("America/Chicago"))
            assert (at.year, at.month, at.hour, at.minute) == (year, month, 8, 30)
            for days in (1, 90, 365, 3 * 365, 5 * 365, -1, -300):
                near = wanted.expiry - days * 24 * HOUR
                assert outright(f"ES{letter}{year % 10}", near) == wanted, (year, letter, days)


@pytest.mark.parametrize("name", ["ES", "ESH4-ESM4", "ESM4 P5230", "ES.c.0", "ES.FUT", "ESF24", "ESH2024", "H24", ""])
def test_names_that_are_no_outright(name):
    assert outright(name, ns("2024-01-09 09:00")) is None


# Weekdays about the rolls and expiries of ESH19 (roll 2019-03-07, expiry 03-15) and ESM19 (06-13, 06-21).
WEEKS = ["2019-03-06", "2019-03-07", "2019-03-08", "2019-03-15", "2019-03-18", "2019-06-12", "2019-06-13", "2019-06-24"]
NAMES = ["ESH19", "ESM19", "ESU19", "ESZ19"]
VOLUMES = st.lists(st.lists(st.integers(0, 5), min_size=len(WEEKS), max_size=len(WEEKS)), min_size=1, max_size=4)


def random_contracts(volumes: list[list[int]]) -> dict[str, Bars]:
    """Two bars from 06:00 in each session of each contract; 0 for none."""
    contracts = {}
    for k, (name, row) in enumerate(zip(NAMES, volumes, strict=False)):
        bars = day_bars({date: float(v) for date, v in zip(WEEKS, row, strict=True) if v}, 1000.0 * (k + 1))
        start = bars.start - 3 * HOUR
        if len(start):
            contracts[name] = Bars(start, start + HOUR, bars.open, bars.high, bars.low, bars.close, bars.volume)
    return {name: bars for name, bars in contracts.items() if (bars.start < outright(name).expiry).any()}


@pytest.mark.parametrize("rule", ROLL_RULES)
@settings(max_examples=60, deadline=None)
@given(volumes=VOLUMES)
def test_chain_properties(rule, volumes):
    """Every session at most once, expiries in order, no bar lost or altered, gaps as they were."""
    contracts = random_contracts(volumes)
    if not contracts:
        return
    quality = {}
    segments = chain(contracts, rule=rule, quality=quality)
    expiries = [outright(s.instrument).expiry for s in segments]
    assert expiries == sorted(set(expiries))
    front = [s.bars.take(slice(s.first, None)) for s in segments]
    assert all(len(bars) for bars in front)
    start = np.concatenate([bars.start for bars in front])
    assert np.all(np.diff(start) > 0)
    alive = [bars.start[bars.start < outright(name).expiry] for name, bars in contracts.items()]
    assert quality["rows_after_expiry"] == sum(map(len, contracts.values())) - sum(map(len, alive))
    missing = np.setdiff1d(np.concatenate(alive), start)
    assert (quality.get("rows_behind_front", 0) > 0) == bool(len(missing))
    for segment in segments:
        own = contracts[segment.instrument]
        rows = np.isin(own.start, segment.bars.start)
        assert np.array_equal(own.take(rows).close, segment.bars.close)
    for old, new in pairwise(segments):
        if np.isfinite(new.gap):
            last = old.bars.ts[-1]
            assert new.gap == new.bars.close[np.flatnonzero(new.bars.ts <= last)[-1]] - old.bars.close[-1]
        assert new.bars.start[new.first] > old.bars.ts[-1]


@pytest.mark.parametrize("rule", ROLL_RULES)
@settings(max_examples=60, deadline=None)
@given(volumes=VOLUMES, changed=VOLUMES, cut=st.integers(0, len(WEEKS) - 1))
def test_chain_is_causal(rule, volumes, changed, cut):
    """Volumes traded after a session change neither its front nor the next one's."""
    later = [
        [new if k > cut and old and new else old for k, (old, new) in enumerate(zip(row, other, strict=True))]
        for row, other in zip(volumes, [*changed, *volumes[len(changed) :]], strict=False)
    ]
    contracts, altered = random_contracts(volumes), random_contracts(later)
    if not contracts:
        return

    def until(given_contracts) -> list[tuple[str, str]]:
        found = fronts(chain(given_contracts, rule=rule, quality={}))
        last = WEEKS[min(cut + 1, len(WEEKS) - 1)]
        return [(name, day) for name, days in found.items() for day in days if day <= last]

    assert until(contracts) == until(altered)
    if rule != "volume":
        assert fronts(chain(contracts, rule=rule, quality={})) == fronts(chain(altered, rule=rule, quality={}))
