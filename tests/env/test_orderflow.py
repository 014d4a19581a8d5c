"""Order flow: values worked by hand, a slow recomputation from the definitions, causality, symmetry, errors."""

from __future__ import annotations

from fractions import Fraction

import databento_dbn as dbn
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fox_env.data.orderflow import DEPTHS, BookFlow

MBP10, MBP1, BBO = (np.dtype(message._dtypes) for message in (dbn.MBP10Msg, dbn.MBP1Msg, dbn.BBOMsg))
UNDEFINED = 2**63 - 1
NO_TIME = 2**64 - 1
MAYBE_BAD = 4
TICK = 250_000_000
PRICE = 20_000  # in ticks: 5000 points
MASKED = ("book_empty", "book_one_sided", "book_crossed", "book_maybe_bad")


def book(time, bids, asks, *, flags=130, action="A", dtype=MBP10) -> np.ndarray:
    """One record. `bids` and `asks` are (price in ticks, size) from the best level on, None where nothing is there."""
    record = np.zeros(1, dtype)
    record["ts_recv"], record["flags"] = time, flags
    if "action" in dtype.names:
        record["action"] = action
    for level in range(sum(name.startswith("bid_px") for name in dtype.names)):
        for side, quotes in (("bid", bids), ("ask", asks)):
            quote = quotes[level] if level < len(quotes) else None
            record[f"{side}_px_{level:02d}"] = UNDEFINED if quote is None else quote[0] * TICK
            record[f"{side}_sz_{level:02d}"] = 0 if quote is None else quote[1]
    return record


def flow_of(records, start, ts, period=None, *, levels=1, pieces=()) -> tuple[dict[str, np.ndarray], dict[str, int]]:
    records = np.concatenate(records) if isinstance(records, list) else records
    flow = BookFlow(start, ts, np.zeros(len(ts), int) if period is None else period, levels=levels, tick=0.25)
    for piece in np.split(records, sorted(pieces)):
        flow.add(piece)
    return flow.finish(), flow.counts


# --- by hand ---------------------------------------------------------------------------------------------------------


def test_every_kind_of_event_by_hand():
    # A bar for each event: e = q·1{P ≥ P'} − q'·1{P ≤ P'} − r·1{A ≤ A'} + r'·1{A ≥ A'}.
    books = [
        ((100, 5), (101, 7)),  # seeds
        ((100, 8), (101, 7)),  # bid grows:          8 − 5 − 7 + 7 = 3
        ((100, 8), (101, 3)),  # ask shrinks:        8 − 8 − 3 + 7 = 4
        ((101, 2), (102, 9)),  # both rise:          2 − 0 − 0 + 3 = 5
        ((100, 6), (102, 9)),  # bid falls:          0 − 2 − 9 + 9 = −2
        ((100, 6), (101, 4)),  # ask falls:          6 − 6 − 4 + 0 = −4
        ((100, 6), (101, 4)),  # nothing changes:    6 − 6 − 4 + 4 = 0
        ((99, 1), (100, 1)),   # both fall:          0 − 6 − 1 + 0 = −7
    ]  # fmt: skip
    records = [book(10 * n + 5, [bid], [ask], dtype=MBP1) for n, (bid, ask) in enumerate(books)]
    start = 10 * np.arange(len(books))
    columns, counts = flow_of(records, start, start + 10)
    assert columns["ofi_1"].tolist() == [0, 3, 4, 5, -2, -4, 0, -7]
    assert columns["depth_1"].tolist() == [6, 7.5, 5.5, 5.5, 7.5, 5, 5, 1]
    assert columns["imbalance_1"].tolist() == [-2 / 12, 1 / 15, 5 / 11, -7 / 11, -3 / 15, 2 / 10, 2 / 10, 0]
    assert counts["book_seeds"] == 1
    assert counts["book_events"] == 7


def test_the_quotes_at_the_close_by_hand():
    records = [book(3, [(PRICE, 30)], [(PRICE + 2, 10)]), book(9, [(PRICE + 1, 4)], [(PRICE + 2, 12)])]
    columns, _ = flow_of(records, np.array([0, 9]), np.array([9, 20]))
    assert list(columns) == [
        "bid", "ask", "bid_size", "ask_size", "microprice_offset", "spread_ticks", "ofi_1", "depth_1", "imbalance_1",
    ]  # fmt: skip
    assert all(column.dtype == np.float64 and column.shape == (2,) for column in columns.values())
    assert columns["bid"].tolist() == [5000.0, 5000.25]  # the record at 9 is not before the first bar's end
    assert columns["ask"].tolist() == [5000.5, 5000.5]
    assert columns["bid_size"].tolist() == [30, 4]
    assert columns["ask_size"].tolist() == [10, 12]
    assert columns["spread_ticks"].tolist() == [2, 1]
    # (5000·10 + 5000.5·30) / 40 = 5000.375 against a mid of 5000.25; (5000.25·12 + 5000.5·4) / 16 against 5000.375
    assert columns["microprice_offset"].tolist() == [0.125, -0.0625]


def test_levels_by_hand():
    levels = [(100 - n, 10 + n) for n in range(10)], [(101 + n, 20 + n) for n in range(10)]
    grown = [[(p, q + 1) for p, q in levels[0]], [(p, q + 2) for p, q in levels[1]]]
    columns, _ = flow_of([book(1, *levels), book(2, *grown)], np.array([0]), np.array([3]), levels=10)
    # every level: +1 on the bid, −2 on the ask
    assert [columns[f"ofi_{n}"][0] for n in DEPTHS] == [-1, -5, -10]
    # (10 + 20 + 11 + 22) / 4; levels 0 … 4: 60 + 110, then 5 and 10 more, over 20; 0 … 9: 145 + 245, then …, over 40
    assert [columns[f"depth_{n}"][0] for n in DEPTHS] == [63 / 4, (170 + 185) / 20, (390 + 420) / 40]
    assert [columns[f"imbalance_{n}"][0] for n in DEPTHS] == [-11 / 33, -55 / 185, -110 / 420]
    first_only, _ = flow_of([book(1, *levels), book(2, *grown)], np.array([0]), np.array([3]), levels=1)
    assert {name: column.tolist() for name, column in first_only.items()} == {
        name: columns[name].tolist() for name in first_only
    }


def test_a_deeper_level_that_lacks_a_side_counts_from_when_it_is_back():
    whole = [(100, 5), (99, 5)], [(101, 5), (102, 5)]
    records = [
        book(1, *whole),
        book(2, [(100, 5)], whole[1]),  # the second bid is gone: e = 0 there, though five contracts left
        book(3, [(100, 5), (99, 9)], whole[1]),  # it is back: nothing before to compare with
        book(4, [(100, 5), (99, 10)], whole[1]),  # +1
    ]
    columns, _ = flow_of(records, np.array([0]), np.array([5]), levels=5)
    assert (columns["ofi_1"][0], columns["ofi_5"][0]) == (0, 1)
    assert columns["depth_5"][0] == (20 + 15 + 24 + 25) / (4 * 2 * 5)
    assert columns["imbalance_5"][0] == (15 - 10) / 25


@pytest.mark.parametrize(
    ("middle", "count"),
    [
        (book(2, [], [(101, 5)]), "book_one_sided"),
        (book(2, [(100, 5)], [(101, 0)]), "book_one_sided"),
        (book(2, [(100, 5)], [(-5, 3)]), "book_one_sided"),
        (book(2, [], []), "book_empty"),
        (book(2, [(100, 5)], [(101, 5)], action="R"), "book_empty"),
        (book(2, [(102, 5)], [(101, 5)]), "book_crossed"),
        (book(2, [(100, 5)], [(101, 5)], flags=128 | MAYBE_BAD), "book_maybe_bad"),
    ],
)
def test_a_masked_book_is_counted_and_no_difference_crosses_it(middle, count):
    before, after = book(1, [(100, 5)], [(101, 5)]), book(12, [(100, 50)], [(101, 5)])
    last = book(13, [(100, 52)], [(101, 5)])
    columns, counts = flow_of([before, middle, after, last], np.array([0, 10]), np.array([10, 20]))
    assert columns["ofi_1"].tolist() == [0, 2]
    assert columns["depth_1"].tolist() == [5, (50 + 5 + 52 + 5) / 4]
    for name in ("bid", "ask", "bid_size", "ask_size", "microprice_offset", "spread_ticks", "imbalance_1"):
        assert np.isnan(columns[name]).tolist() == [True, False]
    assert {name: counts[name] for name in MASKED} == dict.fromkeys(MASKED, 0) | {count: 1}
    assert counts["book_seeds"] == 2


def test_a_locked_book_is_good():
    columns, counts = flow_of([book(1, [(100, 3)], [(100, 1)])], np.array([0]), np.array([10]))
    assert (columns["bid"][0], columns["spread_ticks"][0], columns["microprice_offset"][0]) == (25.0, 0, 0)
    assert counts["book_seeds"] == 1


def test_gaps_and_periods_by_hand():
    # Bars [10, 20), [30, 40) of one period, [40, 50), [60, 70) of the next, which begins in the same nanosecond.
    start, period = np.array([10, 30, 40, 60]), np.array([7, 7, 8, 8])
    sizes = {5: 1, 15: 2, 25: 5, 35: 6, 39: 10, 45: 20, 46: 23, 75: 30}
    records = [book(time, [(100, size)], [(101, 1)]) for time, size in sizes.items()]
    columns, counts = flow_of(records, start, start + 10, period)
    # 5 is before the first bar, so 15 seeds. 25 lies in a gap and belongs to [30, 40): (5 − 2) + (6 − 5) + (10 − 6).
    # 45 seeds the next period; the last bar has no record and the quotes of 46. 75 is after it.
    assert columns["ofi_1"].tolist() == [0, 8, 3, 0]
    assert columns["bid_size"].tolist() == [2, 10, 23, 23]
    np.testing.assert_array_equal(columns["depth_1"], [1.5, (5 + 6 + 10 + 3) / 6, (20 + 23 + 2) / 4, np.nan])
    assert counts["book_outside_bars"] == 2
    assert counts["book_seeds"] == 2


def test_a_record_between_two_periods_belongs_to_none():
    records = [book(time, [(100, size)], [(101, 1)]) for time, size in ((15, 2), (25, 5), (35, 6), (36, 7))]
    columns, counts = flow_of(records, np.array([10, 30]), np.array([20, 40]), np.array([1, 2]))
    assert columns["ofi_1"].tolist() == [0, 1]
    assert (counts["book_outside_bars"], counts["book_seeds"]) == (1, 2)


def test_what_is_not_known_yet_is_nan():
    # The book begins in the second bar of three, and in a second period not at all.
    start = np.array([0, 10, 20, 30])
    columns, _ = flow_of([book(12, [(100, 1)], [(101, 1)])], start, start + 10, np.array([0, 0, 0, 1]))
    assert np.isnan(columns["ofi_1"]).tolist() == [True, False, False, True]
    assert np.isnan(columns["bid"]).tolist() == [True, False, False, True]
    assert np.isnan(columns["depth_1"]).tolist() == [True, False, True, True]


def test_a_late_record_is_never_moved_back():
    records = [book(time, [(100, size)], [(101, 1)]) for time, size in ((5, 1), (12, 2), (6, 7), (NO_TIME, 9))]
    columns, counts = flow_of(records, np.array([0, 10]), np.array([10, 20]))
    assert columns["ofi_1"].tolist() == [0, 8]
    assert columns["bid_size"].tolist() == [1, 9]
    assert counts["book_unordered"] == 2


def test_no_bars_and_no_records():
    columns, counts = flow_of(book(5, [(100, 1)], [(101, 1)]), np.zeros(0, int), np.zeros(0, int), levels=10)
    assert len(columns) == 15
    assert all(column.shape == (0,) for column in columns.values())
    assert (counts["book_records"], counts["book_outside_bars"]) == (1, 1)
    columns, counts = flow_of(np.zeros(0, MBP10), np.array([0]), np.array([10]))
    assert all(np.isnan(column).all() for column in columns.values())
    assert set(counts.values()) == {0}


def test_the_largest_sizes_overflow_nothing():
    most = 2**32 - 1
    side = [[(PRICE + sign * n, most) for n in range(1, 11)] for sign in (-1, 1)]
    higher = [[(PRICE + 5 + sign * n, most) for n in range(1, 11)] for sign in (-1, 1)]
    columns, _ = flow_of(
        [book(n, *(side, higher)[n % 2]) for n in range(100)], np.array([0]), np.array([100]), levels=10
    )
    # up: +q and +r' at every level, down: the same, negative; the first seeds, so that there is one more up than down
    assert columns["ofi_10"][0] == 20 * most
    assert columns["depth_10"][0] == most
    wide = book(1, [(1, most)], [(2**62 // TICK, 1)])
    columns, _ = flow_of(wide, np.array([0]), np.array([100]))
    assert columns["microprice_offset"][0] == pytest.approx(2**61 / 1e9, rel=1e-9)


# --- the definitions, slowly -----------------------------------------------------------------------------------------


def by_definition(records, start, ts, period, levels) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Columns and counts by plain loops over records and bars."""
    counts = dict.fromkeys(
        ["book_records", "book_outside_bars", *MASKED, "book_seeds", "book_events", "book_unordered"], 0
    )
    bars = range(len(ts))
    latest, before = 0, {}  # the last book of each period, None if it is masked
    entries = []  # (time, bar, book or None, e a level or None)
    for record in records:
        counts["book_records"] += 1
        time = int(record["ts_recv"])
        if time < latest or time >= 2**63:
            counts["book_unordered"] += 1
        else:
            latest = time
        inside = [i for i in bars if start[i] <= latest < ts[i]]
        gap = [i for i in bars if i > 0 and period[i] == period[i - 1] and ts[i - 1] <= latest < start[i]]
        if not inside + gap:
            counts["book_outside_bars"] += 1
            continue
        (bar,) = inside + gap

        quotes = {}
        for side in ("bid", "ask"):
            for level in range(levels):
                price, size = (int(record[f"{side}_{field}_{level:02d}"]) for field in ("px", "sz"))
                if 0 < price < UNDEFINED and size > 0:
                    quotes[side, level] = price, size
        if "action" in records.dtype.names and record["action"] == b"R":
            quotes = {}
        top = [("bid", 0) in quotes, ("ask", 0) in quotes]
        if not any(top):
            state = "book_empty"
        elif not all(top):
            state = "book_one_sided"
        elif quotes["bid", 0][0] > quotes["ask", 0][0]:
            state = "book_crossed"
        elif int(record["flags"]) & MAYBE_BAD:
            state = "book_maybe_bad"
        else:
            state = "book_seeds" if before.get(period[bar]) is None else "book_events"
        counts[state] += 1
        if state in MASKED:
            entries.append((latest, bar, None, None))
            before[period[bar]] = None
            continue
        e = []
        old = before.get(period[bar])
        for level in range(levels) if old else ():
            e.append(0)
            if all((side, level) in b for side in ("bid", "ask") for b in (quotes, old)):
                (p, q), (p_old, q_old) = quotes["bid", level], old["bid", level]
                (a, r), (a_old, r_old) = quotes["ask", level], old["ask", level]
                e[-1] = q * (p >= p_old) - q_old * (p <= p_old) - r * (a <= a_old) + r_old * (a >= a_old)
        entries.append((latest, bar, quotes, e))
        before[period[bar]] = quotes

    depths = [n for n in DEPTHS if n <= levels]
    names = ["bid", "ask", "bid_size", "ask_size", "microprice_offset", "spread_ticks"]
    columns = {name: [np.nan] * len(ts) for name in names}
    columns |= {f"{name}_{n}": [np.nan] * len(ts) for name in ("ofi", "depth", "imbalance") for n in depths}
    for i in bars:
        known = [entry for entry in entries if entry[0] < ts[i] and period[entry[1]] == period[i]]
        mine = [quotes for _, bar, quotes, _ in known if bar == i and quotes]
        flows = [e for _, bar, quotes, e in known if bar == i and quotes and e]
        last = known[-1][2] if known else None
        if last:
            (bid, bid_size), (ask, ask_size) = last["bid", 0], last["ask", 0]
            micro = Fraction(bid * ask_size + ask * bid_size, bid_size + ask_size)
            row = (bid / 10**9, ask / 10**9, bid_size, ask_size, float(micro - Fraction(bid + ask, 2)) / 1e9)
            for name, value in zip(names, (*row, (ask - bid) / TICK), strict=True):
                columns[name][i] = value
        for n in depths:
            sizes = {side: [[b.get((side, k), (0, 0))[1] for k in range(n)] for b in mine] for side in ("bid", "ask")}
            if any(quotes for _, _, quotes, _ in known):
                columns[f"ofi_{n}"][i] = sum(sum(e[:n]) for e in flows)
            if mine:
                columns[f"depth_{n}"][i] = sum(map(sum, sizes["bid"] + sizes["ask"])) / (2 * n * len(mine))
            if last:
                bids, asks = (sum(last.get((side, k), (0, 0))[1] for k in range(n)) for side in ("bid", "ask"))
                columns[f"imbalance_{n}"][i] = (bids - asks) / (bids + asks)
    return columns, counts


def ugly_records(rng: np.random.Generator, rows: int, last_time: int) -> np.ndarray:
    """Books of few prices and sizes; some empty, one-sided, crossed, flagged, cleared, late, or with holes below."""
    records = np.zeros(rows, MBP10)
    time = np.sort(rng.integers(1, last_time, rows))
    records["ts_recv"] = time - rng.integers(0, time) * (rng.random(rows) < 0.05)
    records["ts_recv"][rng.random(rows) < 0.02] = NO_TIME
    records["flags"] = np.where(rng.random(rows) < 0.05, 128 | MAYBE_BAD, 130)
    records["action"] = np.where(rng.random(rows) < 0.03, b"R", rng.choice([b"A", b"C", b"M", b"T"], rows))
    mid = PRICE + np.cumsum(rng.integers(-1, 2, rows))
    bid, ask = mid - rng.integers(0, 2, rows), mid + rng.integers(-1 if rng.random() < 0.5 else 0, 3, rows)
    for level in range(10):
        for side, price in (("bid", bid - level), ("ask", ask + level)):
            gone = rng.random(rows) < (0.06 if level == 0 else 0.1)
            size = rng.integers(0 if level else 1, 6, rows)
            records[f"{side}_px_{level:02d}"] = np.where(gone, UNDEFINED, price * TICK)
            records[f"{side}_sz_{level:02d}"] = np.where(gone & (rng.random(rows) < 0.9), 0, size)
    return records


def ugly_bars(rng: np.random.Generator, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bars of 0 to 9 ns, with gaps, in periods that may follow one another without one."""
    length = rng.integers(0, 10, rows)
    gap = rng.integers(0, 8, rows) * (rng.random(rows) < 0.5)
    ts = 5 + np.cumsum(length + gap)
    return ts - length, ts, 3 + np.cumsum(rng.random(rows) < 0.2)


def same_bits(a: dict[str, np.ndarray], b: dict[str, np.ndarray], rows=slice(None)) -> bool:
    return list(a) == list(b) and all(a[name][rows].tobytes() == b[name][rows].tobytes() for name in a)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.integers(0, 60),
    bars=st.integers(0, 12),
    levels=st.sampled_from(DEPTHS),
    pieces=st.lists(st.integers(0, 60), max_size=5),
)
def test_equals_the_definitions_whatever_the_pieces(seed, size, bars, levels, pieces):
    rng = np.random.default_rng(seed)
    start, ts, period = ugly_bars(rng, bars)
    records = ugly_records(rng, size, 12 + (int(ts[-1]) if bars else 0))
    whole, counts = flow_of(records, start, ts, period, levels=levels)
    want, want_counts = by_definition(records, start, ts, period, levels)
    assert counts == want_counts
    assert counts["book_records"] == sum(
        n for name, n in counts.items() if name not in ("book_records", "book_unordered")
    )
    for name, column in want.items():
        rtol = 1e-12 if name == "microprice_offset" else 0
        np.testing.assert_allclose(whole[name], column, rtol=rtol, atol=0, err_msg=name)
    piecewise, piecewise_counts = flow_of(records, start, ts, period, levels=levels, pieces=pieces)
    assert same_bits(piecewise, whole)
    assert piecewise_counts == counts


def test_the_ugly_streams_have_everything():
    """What the test above is worth: each kind of record is in its streams."""
    rng = np.random.default_rng(0)
    start, ts, period = ugly_bars(rng, 200)
    columns, counts = flow_of(ugly_records(rng, 2000, int(ts[-1]) + 20), start, ts, period, levels=10)
    assert min(counts.values()) > 10
    assert all(0 < np.isnan(column).sum() < 150 for column in columns.values())
    assert np.unique(columns["ofi_10"]).size > 50


# --- causality and symmetry ------------------------------------------------------------------------------------------


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), cut=st.integers(0, 200))
def test_what_comes_later_changes_no_bit(seed, cut):
    rng = np.random.default_rng(seed)
    start, ts, period = ugly_bars(rng, 40)
    records = ugly_records(rng, 200, int(ts[-1]) + 5)
    columns, _ = flow_of(records, start, ts, period, levels=10)
    time = np.maximum.accumulate(np.where(records["ts_recv"] == NO_TIME, 0, records["ts_recv"]).astype(np.int64))
    now = int(time[cut - 1]) if cut else 0
    closed = int(np.searchsorted(ts, now, side="right"))  # the bars that end by then

    scrambled = records.copy()
    scrambled[cut:] = np.frombuffer(rng.bytes(scrambled[cut:].nbytes), MBP10)
    other, _ = flow_of(scrambled, start, ts, period, levels=10)
    assert same_bits(other, columns, slice(closed))

    later = np.arange(len(ts)) >= closed
    new_start, new_ts = start + later * 3, ts + later * 1000
    new_start[later] = np.maximum(new_start[later], np.append(0, new_ts)[:-1][later])
    other, _ = flow_of(scrambled, new_start, new_ts, np.where(later, -5, period), levels=10)
    assert same_bits(other, columns, slice(closed))


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_upside_down_the_flow_is_exactly_negated(seed):
    """Prices p -> C − p, bids and asks exchanged: any map that reverses their order does the same to OFI."""
    rng = np.random.default_rng(seed)
    start, ts, period = ugly_bars(rng, 40)
    records = ugly_records(rng, 300, int(ts[-1]) + 5)
    flipped = records.copy()
    for level in range(10):
        for side, other in (("bid", "ask"), ("ask", "bid")):
            price = records[f"{other}_px_{level:02d}"]
            flipped[f"{side}_px_{level:02d}"] = np.where(price == UNDEFINED, UNDEFINED, 3 * PRICE * TICK - price)
            flipped[f"{side}_sz_{level:02d}"] = records[f"{other}_sz_{level:02d}"]
    a, counts = flow_of(records, start, ts, period, levels=10)
    b, flipped_counts = flow_of(flipped, start, ts, period, levels=10)
    assert flipped_counts == counts
    for name in a:
        if name.startswith(("ofi", "imbalance", "microprice")):
            np.testing.assert_array_equal(b[name], -a[name], err_msg=name)
        elif name.startswith(("depth", "spread")):
            np.testing.assert_array_equal(b[name], a[name], err_msg=name)
    np.testing.assert_array_equal(b["bid_size"], a["ask_size"])
    np.testing.assert_array_equal(b["bid"], 15_000 - a["ask"])


# --- layouts and errors ----------------------------------------------------------------------------------------------


def as_dtype(records: np.ndarray, dtype: np.dtype) -> np.ndarray:
    result = np.zeros(len(records), dtype)
    for name in set(dtype.names) & set(MBP10.names):
        result[name] = records[name]
    return result


def test_every_schema_and_layout_gives_the_same():
    rng = np.random.default_rng(1)
    start, ts, period = ugly_bars(rng, 60)
    records = ugly_records(rng, 400, int(ts[-1]))
    records["action"][records["action"] == b"R"] = b"A"  # bbo has no action
    want, want_counts = flow_of(records, start, ts, period)
    spread_out = np.zeros(800, MBP10)
    spread_out[::2] = records
    odd = np.zeros(records.nbytes + 1, np.uint8)
    odd[1:] = records.view(np.uint8)
    read_only = records.copy()
    read_only.flags.writeable = False
    for layout in (as_dtype(records, MBP1), as_dtype(records, BBO), spread_out[::2], odd[1:].view(MBP10), read_only):
        columns, counts = flow_of(layout, start, ts, period, pieces=range(399))  # pieces of one record are contiguous
        assert same_bits(columns, want)
        assert counts == want_counts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ts": [10, 20, 30]}, "start, ts and period have 2, 3 and 2 rows"),
        ({"start": [0, 9]}, "bar 1 ends before it starts, or starts before the bar in front of it ends"),
        ({"start": [11, 12]}, "bar 0 ends before it starts"),
        ({"levels": 3}, "levels is 3, expected one of 1, 5, 10"),
        ({"tick": 0.0}, "tick is 0.0, expected a positive number of points"),
        ({"tick": np.nan}, "tick is nan, expected a positive"),
    ],
)
def test_errors_of_the_bars(change, message):
    given = {"start": [0, 10], "ts": [10, 20], "period": [0, 0], "levels": 1, "tick": 0.25} | change
    arrays = [np.array(given[name]) for name in ("start", "ts", "period")]
    with pytest.raises(ValueError, match=message):
        BookFlow(*arrays, levels=given["levels"], tick=given["tick"])


@pytest.mark.parametrize(
    ("dtype", "levels", "missing"),
    [(MBP1, 10, "bid_px_09"), (np.dtype(dbn.TradeMsg._dtypes), 1, "bid_px_00"), (np.dtype(np.int64), 1, "ts_recv")],
)
def test_records_without_a_book_are_refused(dtype, levels, missing):
    flow = BookFlow(np.array([0]), np.array([10]), np.array([0]), levels=levels, tick=0.25)
    with pytest.raises(ValueError, match=f"the records have no field '{missing}', expected records with a book of"):
        flow.add(np.zeros(1, dtype))
