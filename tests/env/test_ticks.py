"""Bars of trades: by hand, against a slow loop, in any pieces, and never past their time."""

from __future__ import annotations

import datetime as dt
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fox_env.data.bars import bar_size
from fox_env.data.dbn_write import trade_records
from fox_env.data.ticks import TradeBars, TradeFlow, group, record_offsets

SECOND, MINUTE = 10**9, 60 * 10**9
COLUMNS = ("start", "ts", "open", "high", "low", "close", "volume")


def ns(clock: str) -> int:
    return int(dt.datetime.fromisoformat(clock).replace(tzinfo=ZoneInfo("America/Chicago")).timestamp()) * SECOND


def trades(rows):
    """Records of (ns, price, size, side)."""
    time, price, size, side = zip(*rows, strict=True)
    return trade_records(np.array(time), np.array(price, float), np.array(size), np.array(side, "S1"))


def made(records, end=None, **options):
    maker = TradeBars(tick=0.25, **options)
    maker.add(records)
    bars, unfinished = maker.finish(maker.last + 1 if end is None else end)
    return bars, unfinished, maker.counts


NINE = ns("2024-01-09 09:00")
TAPE = [
    (NINE + 1, 4000.00, 3, "B"),
    (NINE + 30 * SECOND, 4000.50, 2, "B"),
    (NINE + 59 * SECOND, 3999.75, 4, "A"),
    (NINE + MINUTE, 4000.25, 1, "N"),
    (NINE + 3 * MINUTE + 5, 4001.00, 9, "A"),
    (NINE + 4 * MINUTE, 4001.25, 1, "B"),
]


def test_time_bars_by_hand():
    """Minute 0 holds three trades, minute 1 the one at its very start, minute 2 none; the last is not over."""
    bars, unfinished, counts = made(trades(TAPE), interval=MINUTE)
    assert ((bars.start - NINE) // MINUTE).tolist() == [0, 1, 3]
    assert (bars.ts - bars.start).tolist() == [MINUTE] * 3
    assert bars.open.tolist() == [4000.0, 4000.25, 4001.0]
    assert bars.high.tolist() == [4000.5, 4000.25, 4001.0]
    assert bars.low.tolist() == [3999.75, 4000.25, 4001.0]
    assert bars.close.tolist() == [3999.75, 4000.25, 4001.0]
    assert bars.volume.tolist() == [9, 1, 9]
    assert bars.extra["ask_volume"].tolist() == [5, 0, 0]
    assert bars.extra["bid_volume"].tolist() == [4, 0, 9]
    assert unfinished
    assert counts["read"] == 6


def test_volume_bars_by_hand():
    """Bars of 5: 3 + 2; 4 + 1; 9, overshoot and all; the last trade makes no bar."""
    bars, unfinished, _ = made(trades(TAPE), contracts=5)
    assert bars.volume.tolist() == [5, 5, 9]
    assert bars.open.tolist() == [4000.0, 3999.75, 4001.0]
    assert bars.close.tolist() == [4000.5, 4000.25, 4001.0]
    assert bars.start.tolist() == [TAPE[0][0], TAPE[2][0], TAPE[4][0]]
    assert bars.ts.tolist() == [TAPE[1][0] + 1, TAPE[3][0] + 1, TAPE[4][0] + 1]
    assert unfinished


def test_a_volume_bar_ends_with_its_trading_period():
    """In 2021 trading halts from 15:15 to 15:30 and stops at 16:00: 4 + 4 + 4 contracts never make one bar of 10."""
    rows = [(ns(f"2021-03-09 {clock}"), 3900.0, 4, "B") for clock in ("15:14", "15:31", "15:59", "17:00")]
    bars, unfinished, _ = made(trades(rows), contracts=10)
    assert bars.volume.tolist() == [4, 8]
    assert bars.ts.tolist() == [rows[0][0] + 1, rows[2][0] + 1]
    assert unfinished
    # What a session holds in the end is a bar once the session is known to be over.
    assert made(trades(rows[:3]), contracts=10)[0].volume.tolist() == [4]
    assert made(trades(rows[:3]), end=ns("2021-03-09 16:00"), contracts=10)[0].volume.tolist() == [4, 8]


def test_bars_of_one_instant():
    """Three trades of one nanosecond make two bars; the second begins where the first ends."""
    rows = [(NINE, 4000.0, 5, "B"), (NINE, 4000.25, 3, "B"), (NINE, 4000.5, 2, "B"), (NINE + 9, 4000.0, 5, "A")]
    bars, unfinished, _ = made(trades(rows), contracts=5)
    assert bars.close.tolist() == [4000.0, 4000.5, 4000.0]
    assert bars.start.tolist() == [NINE, NINE + 1, NINE + 9]
    assert bars.ts.tolist() == [NINE + 1, NINE + 1, NINE + 10]
    assert not unfinished


def test_what_is_left_out_or_changed_is_counted():
    rows = [
        (NINE + 0, np.nan, 1, "B"),
        (NINE + 1, 4000.0, 0, "B"),
        (0, 4000.0, 1, "B"),
        (NINE + 20, 4000.10, 1, "B"),  # nearest to 4000.00
        (NINE + 10, 4000.40, 1, "B"),  # nearest to 4000.50, and late: it counts at NINE + 20
        (ns("2024-01-09 16:30"), 4000.0, 1, "B"),
        (ns("2024-01-09 17:00"), 4001.0, 1, "B"),
    ]
    bars, _, counts = made(trades(rows), interval=MINUTE)
    assert bars.open.tolist() == [4000.0]
    assert bars.close.tolist() == [4000.5]
    assert bars.volume.tolist() == [2]
    assert counts == {
        "read": 7, "bad_price": 1, "zero_size": 1, "bad_time": 1, "off_tick": 2, "unsorted": 1, "closed_hours": 1,
    }  # fmt: skip


def test_a_trade_outside_the_calendar():
    with pytest.raises(ValueError, match="a trade on 1999-01-05 lies outside the session calendar, 2008 to 2035"):
        made(trades([(ns("1999-01-05 09:00"), 1000.0, 1, "B")]), interval=MINUTE)


def slow_bars(rows, interval, contracts):
    """One trade after another, as the definition says; all rows are good and of one trading period."""
    bars, current = [], None
    for time, price, size, _ in rows:
        start = time - time % interval if interval else time
        if current and interval and start != current["start"]:
            current["ts"] = current["start"] + interval
            bars.append(current)
            current = None
        if current is None:
            if not interval and bars:
                start = max(start, bars[-1]["ts"])
            current = {"start": start, "open": price, "high": price, "low": price, "volume": 0}
        current["high"], current["low"] = max(current["high"], price), min(current["low"], price)
        current["close"], current["ts"] = price, time + 1
        current["volume"] += size
        if not interval and current["volume"] >= contracts:
            bars.append(current)
            current = None
    if current and interval and current["start"] + interval == rows[-1][0] + 1:
        current["ts"] = current["start"] + interval
        bars.append(current)
        current = None
    left = current["volume"] if current else 0
    return bars, left


tapes = st.lists(
    st.tuples(st.integers(0, 3 * MINUTE), st.integers(-8, 8), st.integers(1, 9), st.sampled_from("BAN")),
    min_size=1, max_size=60,
).map(lambda rows: [(NINE + t, 4000 + p / 4, q, s) for t, p, q, s in sorted(rows, key=lambda row: row[0])])  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(rows=tapes, spec=st.sampled_from(["1s", "1m", "vol:1", "vol:7", "vol:40"]), cuts=st.sets(st.integers(0, 60)))
def test_against_a_slow_loop_in_any_pieces(rows, spec, cuts):
    interval, contracts = bar_size(spec)
    expected, left = slow_bars(rows, interval, contracts)
    maker = TradeBars(interval=interval, contracts=contracts, tick=0.25)
    for part in np.split(trades(rows), sorted(cuts)):
        maker.add(part)
    bars, unfinished = maker.finish(maker.last + 1)
    for name in COLUMNS:
        assert getattr(bars, name).tolist() == [bar[name] for bar in expected], name
    assert unfinished == (left > 0)
    # Nothing is lost: the tape is the bars and the remainder.
    assert bars.volume.sum() + left == sum(size for _, _, size, _ in rows)


@settings(max_examples=60, deadline=None)
@given(rows=tapes, spec=st.sampled_from(["1s", "vol:7"]), at=st.integers(0, 59), seed=st.integers(0, 99))
def test_later_trades_change_no_bar_that_has_closed(rows, spec, at, seed):
    interval, contracts = bar_size(spec)
    records = trades(rows)
    at = min(at, len(rows) - 1)
    now = rows[at][0]
    garbage = records.copy()
    rng = np.random.default_rng(seed)
    later = np.arange(len(records)) > at
    garbage["price"][later] = rng.integers(1, 9000, later.sum()) * 250_000_000
    garbage["size"][later] = rng.integers(1, 99, later.sum())
    (a, _, _), (b, _, _) = (made(r, interval=interval, contracts=contracts) for r in (records, garbage))
    closed = int(np.searchsorted(a.ts, now, side="right"))
    for name in COLUMNS:
        assert np.array_equal(getattr(a, name)[:closed], getattr(b, name)[:closed])


def test_hours():
    rows = [(ns(f"2024-01-09 {clock}"), 4000.0, 1, "B") for clock in ("08:29", "08:30", "14:59", "15:00", "17:01")]
    bars, _, counts = made(trades(rows), interval=MINUTE, hours="rth", end=ns("2024-01-09 15:00"))
    assert bars.start.tolist() == [rows[1][0], rows[2][0]]
    assert counts["closed_hours"] == 3


def test_aggressors_in_given_bars():
    start = NINE + MINUTE * np.array([0, 1, 3, 5])
    flow = TradeFlow(start, start + MINUTE)
    for record in np.split(trades([*TAPE[:5], (NINE + 4 * MINUTE, 4000.0, 6, "B")]), 6):
        flow.add(record)
    columns, total = flow.finish()
    assert columns["ask_volume"].tolist()[:3] == [5, 0, 0]
    assert columns["bid_volume"].tolist()[:3] == [4, 0, 9]
    assert total.tolist()[:3] == [9, 1, 9]
    assert np.isnan([*total[3:], columns["ask_volume"][3]]).all()  # the trades end before
    assert flow.outside == 1


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=40))
def test_group(identifiers):
    identifiers = np.array(identifiers, np.uint32)
    found = {identifier: np.arange(len(identifiers))[rows].tolist() for identifier, rows in group(identifiers)}
    assert found == {int(k): np.flatnonzero(identifiers == k).tolist() for k in np.unique(identifiers)}


def test_record_offsets():
    record = lambda words: bytes([words, 0]) + bytes(4 * words - 2)  # noqa: E731
    data = np.frombuffer(record(4) + record(20) + record(5)[:-1], np.uint8)
    offset, used = record_offsets(data)
    assert offset.tolist() == [0, 16]
    assert used == 96
    assert record_offsets(np.frombuffer(record(4) + bytes(16), np.uint8))[1] == -1


@pytest.mark.parametrize("bars", ["vol:0", "vol:", "vol:-5", "vol:1.5", "2m", "", "vol:²"])
def test_bar_size_refuses(bars):
    with pytest.raises(ValueError, match="bars"):
        bar_size(bars)
