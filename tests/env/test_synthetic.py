"""Synthetic bars have exactly the law that the oracle assumes, and nothing else."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fox_env.data import synthetic
from fox_env.data.bars import Bars, interval_ns
from fox_env.data.calendar import CHICAGO, expiration_ns, sessions
from fox_env.data.dbn_write import book_levels
from fox_env.data.synthetic import (
    DISTRACTORS,
    KINDS,
    PLANTED_STATE,
    Truth,
    books_from_bars,
    synthetic_bars,
    synthetic_books,
    synthetic_contracts,
    synthetic_market,
    synthetic_ticks,
    ticks_from_bars,
    traded_volume,
)
from fox_env.oracle import lattice_law

LATTICE = ("planted", "planted_noisy", "martingale")
T = 70_000


@pytest.fixture(scope="module")
def made():
    return {kind: synthetic_bars(kind, T, seed=1) for kind in KINDS}


def ticks(price):
    return np.rint(price / 0.25).astype(np.int64)


@pytest.mark.parametrize("kind", KINDS)
def test_prices_are_positive_on_tick_and_inside_the_range(made, kind):
    bars = made[kind].bars
    for price in (bars.open, bars.high, bars.low, bars.close):
        assert price.dtype == np.float64
        assert (price > 0).all()
        np.testing.assert_array_equal(price, ticks(price) * 0.25)
    assert (bars.high >= np.maximum(bars.open, bars.close)).all()
    assert (bars.low <= np.minimum(bars.open, bars.close)).all()


@pytest.mark.parametrize("kind", LATTICE)
def test_a_lattice_bar_is_a_path_of_sixteen_ticks_from_the_close_before(made, kind):
    bars = made[kind].bars
    assert bars.open[0] == 4_000.0
    np.testing.assert_array_equal(bars.open[1:], bars.close[:-1])
    open_, high, low, close = map(ticks, (bars.open, bars.high, bars.low, bars.close))
    # Sixteen odd steps end an even number of ticks away, and one step at least leaves the open.
    assert ((close - open_) % 2 == 0).all()
    assert (high > low).all()
    # Going to one extreme, then to the other, then to the close, takes at most sixteen steps.
    via_low = (open_ - low) + (high - low) + (high - close)
    via_high = (high - open_) + (high - low) + (close - low)
    shortest = np.minimum(via_low, via_high)
    assert shortest.max() == 16


@pytest.mark.parametrize("kind", LATTICE)
def test_drift_by_state_and_sigma(made, kind):
    bars, truth = made[kind].bars, made[kind].truth
    move = bars.close - bars.open
    for state, drift in enumerate(truth.drifts):
        after = move[1:][truth.state[:-1] == state]
        assert abs(after.mean() - drift) < 4 * after.std() / np.sqrt(len(after))
        # Var = K·tick²·(1 − (drift/4)²); the variance of a sample variance of near-normal values is 2σ⁴/n.
        assert abs(after.var() - (1 - (drift / 4) ** 2)) < 4 * np.sqrt(2 / len(after))
    np.testing.assert_array_equal(truth.drift, np.array(truth.drifts)[truth.state])


def test_bar_zero_is_driven_by_the_state_before_it():
    first = np.array([b.bars.close[0] - b.bars.open[0] for b in (synthetic_bars("planted", 1, s) for s in range(300))])
    # Stationary over the three states: mean 0, σ near 1.
    assert abs(first.mean()) < 4 / np.sqrt(300)
    assert 0.8 < first.std() < 1.2


@pytest.mark.parametrize(("kind", "state"), [("planted", 0), ("planted", 2), ("planted_noisy", 1), ("martingale", 1)])
def test_joint_law_of_low_high_close_is_the_exact_one(made, kind, state):
    bars, truth = made[kind].bars, made[kind].truth
    law = lattice_law(truth.drifts[state], truth.steps, truth.tick)
    expected = {
        key: p
        for *key, p in zip(ticks(law.low), ticks(law.high), ticks(law.close), law.probability, strict=True)
        for key in [tuple(map(int, key))]
    }
    rows = np.flatnonzero(truth.state[:-1] == state) + 1
    seen = np.stack([ticks(getattr(bars, name)[rows] - bars.open[rows]) for name in ("low", "high", "close")], axis=1)
    outcomes, counts = np.unique(seen, axis=0, return_counts=True)
    observed = dict(zip(map(tuple, outcomes.tolist()), counts.tolist(), strict=True))
    assert observed.keys() <= expected.keys()
    common = [key for key, p in expected.items() if p * len(rows) >= 5]
    rare = 1 - sum(expected[key] for key in common)
    f_obs = [observed.get(key, 0) for key in common]
    f_obs.append(len(rows) - sum(f_obs))
    f_exp = np.array([expected[key] for key in common] + [rare]) * len(rows)
    assert len(common) > 100
    assert stats.chisquare(f_obs, f_exp).pvalue > 1e-4


def test_planted_chain_stays_with_85_percent_and_moves_to_either_other_state_alike(made):
    state, n = made["planted"].truth.state.astype(int), T - 1
    counts = np.zeros((3, 3))
    np.add.at(counts, (state[:-1], state[1:]), 1)
    expected = np.full((3, 3), 0.075) + np.eye(3) * 0.775
    np.testing.assert_allclose(made["planted"].truth.transition, expected, atol=1e-15)
    share = counts / counts.sum(axis=1, keepdims=True)
    assert (np.abs(share - expected) < 4 * np.sqrt(expected * (1 - expected) / (n / 3))).all()


def test_noisy_chain_stays_sixty_bars_on_average(made):
    state = made["planted_noisy"].truth.state
    assert set(np.unique(state)) == {0, 1}
    moves = np.count_nonzero(np.diff(state))
    assert abs(moves - T / 60) < 4 * np.sqrt(T / 60)


def test_the_feature_reads_the_state(made):
    for kind in ("planted", "martingale"):
        np.testing.assert_array_equal(made[kind].bars.extra[PLANTED_STATE], made[kind].truth.state - 1.0)
    noisy = made["planted_noisy"]
    noise = noisy.bars.extra[PLANTED_STATE] - (2.0 * noisy.truth.state - 1.0)
    assert stats.kstest(noise, "norm").pvalue > 1e-4
    assert abs(np.corrcoef(noise[1:], noise[:-1])[0, 1]) < 4 / np.sqrt(T)


def test_distractors_look_alike_and_tell_nothing(made):
    bars = made["planted"].bars
    assert set(bars.extra) == {PLANTED_STATE, *DISTRACTORS}
    move = (bars.close - bars.open)[1:]
    for name in DISTRACTORS:
        signal = bars.extra[name]
        assert abs(signal.mean()) < 0.1
        # The slow one repeats itself for 20 bars, but moves do hardly, so that the plain standard error serves.
        assert abs(np.corrcoef(signal[:-1], move)[0, 1]) < 4 / np.sqrt(T)
    chain = bars.extra["distractor_chain"]
    assert abs(np.mean(chain[1:] == chain[:-1]) - 0.85) < 4 * np.sqrt(0.85 * 0.15 / T)
    slow = bars.extra["distractor_slow"]
    assert abs(np.corrcoef(slow[1:], slow[:-1])[0, 1] - 0.95) < 0.01
    signal = bars.extra[PLANTED_STATE]
    assert np.corrcoef(signal[:-1], move)[0, 1] > 0.1


def test_martingale_is_not_predicted_by_its_own_feature(made):
    bars = made["martingale"].bars
    move = (bars.close - bars.open)[1:]
    assert abs(np.corrcoef(bars.extra[PLANTED_STATE][:-1], move)[0, 1]) < 4 / np.sqrt(T)


@pytest.mark.parametrize("kind", KINDS)
def test_same_arguments_same_bars_other_seed_other_bars(kind):
    np.random.seed(0)  # noqa: NPY002  the global generator has no say
    one = synthetic_bars(kind, 3_000, seed=5)
    np.random.seed(1)  # noqa: NPY002
    two, other = synthetic_bars(kind, 3_000, seed=5), synthetic_bars(kind, 3_000, seed=6)
    for name in ("start", "ts", "open", "high", "low", "close", "volume"):
        np.testing.assert_array_equal(getattr(one.bars, name), getattr(two.bars, name))
    assert one.bars.extra.keys() == two.bars.extra.keys()
    for name, value in one.bars.extra.items():
        np.testing.assert_array_equal(value, two.bars.extra[name])
    assert (one.bars.close != other.bars.close).any()
    assert (one.bars.volume != other.bars.volume).any()


def test_chunks_leave_no_seam(monkeypatch):
    monkeypatch.setattr(synthetic, "_CHUNK", 99_991)
    made = synthetic_bars("planted", 1_200_000, seed=2, interval="1s")
    bars, truth = made.bars, made.truth
    np.testing.assert_array_equal(bars.open[1:], bars.close[:-1])
    move = bars.close - bars.open
    for state, drift in enumerate(truth.drifts):
        after = move[1:][truth.state[:-1] == state]
        assert abs(after.mean() - drift) < 4 / np.sqrt(len(after))  # .0063
    np.testing.assert_array_equal(synthetic_bars("planted", 300_000, interval="1s").bars.start, bars.start[:300_000])


@settings(max_examples=20, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    bars=st.integers(1, 3_000),
    seed=st.integers(0, 2**70),
    interval=st.sampled_from(("1s", "1m", "5m", "1h")),
)
def test_bars_lie_in_trading_hours_in_order(kind, bars, seed, interval):
    made = synthetic_bars(kind, bars, seed, interval=interval).bars
    assert len(made) == bars
    length = {"1s": 1, "1m": 60, "5m": 300, "1h": 3_600}[interval] * 10**9
    np.testing.assert_array_equal(made.ts - made.start, length)
    assert (made.start % length == 0).all()
    assert (np.diff(made.start) > 0).all()
    placed = sessions(made.start, made.ts)
    assert placed.is_open.all()
    # Inside a session no bar is missing.
    step = np.diff(made.start)
    assert (step[~placed.after_break[1:]] == length).all()


def test_default_calendar_year(made):
    import datetime as dt

    bars = made["planted"].bars
    first = dt.datetime.fromtimestamp(bars.start[0] / 1e9, CHICAGO)
    assert (first.date(), first.hour, first.minute) == (dt.date(2023, 1, 2), 17, 0)
    hours = {dt.datetime.fromtimestamp(t / 1e9, CHICAGO).hour for t in bars.start[::7].tolist()}
    assert hours == set(range(24)) - {16}
    placed = sessions(bars.start, bars.ts)
    # A whole session has 276 bars of five minutes; the embedded year has some 250 of them.
    assert np.bincount(placed.session - placed.session[0]).max() == 276
    assert 250 <= len(np.unique(placed.session)) <= 260


def test_daily_bars_and_the_last_years_of_the_calendar():
    bars = synthetic_bars("martingale", 300, interval="1d").bars
    assert (np.diff(bars.start) > 0).all()
    late = synthetic_bars("planted", 250, start="2035-12-01").bars
    assert sessions(late.start, late.ts).is_open.all()


@pytest.mark.parametrize("kind", KINDS)
def test_volume_is_whole_and_smiles(made, kind):
    bars = made[kind].bars
    assert (bars.volume >= 1).all()
    np.testing.assert_array_equal(bars.volume, np.rint(bars.volume))
    minute = np.array([(t // 60_000_000_000) % 1_440 for t in bars.start.tolist()])
    july = (bars.start > np.datetime64("2023-06-01", "ns").astype(int)) & (
        bars.start < np.datetime64("2023-09-01", "ns").astype(int)
    )  # Chicago is UTC − 5 then

    def mean_at(first, last):
        return bars.volume[july & (minute >= first * 60) & (minute < last * 60)].mean()

    opening, noon, closing, night = mean_at(13.5, 14), mean_at(16.5, 17), mean_at(19.5, 20), mean_at(6, 7)
    assert opening > 1.5 * noon
    assert closing > 1.5 * noon
    assert noon > 3 * night


def test_garch_looks_like_es(made):
    bars = made["garch"].bars
    assert made["garch"].truth is None
    assert bars.extra == {}
    move = np.log(bars.close / bars.open)
    assert stats.kurtosis(move) > 3
    size = np.abs(move)
    # Clustering beyond the time of day: one day later, at the same time, calm days are still calm.
    assert np.corrcoef(size[1:], size[:-1])[0, 1] > 0.2
    assert abs(np.corrcoef(move[1:], move[:-1])[0, 1]) < 0.05
    broken = sessions(bars.start, bars.ts).after_break[1:]
    gap = np.abs(bars.open[1:] - bars.close[:-1])
    assert np.median(gap[broken]) > 1.0
    assert gap[~broken].max() <= 0.5  # a jittered tick, and rounding
    daily = np.log(bars.close[276::276] / bars.close[:-276:276])
    assert 0.006 < daily.std() < 0.016
    assert np.corrcoef(size, bars.volume)[0, 1] > 0.3


def test_a_sinking_path_is_moved_up_as_a_whole(monkeypatch):
    plain = synthetic_bars("martingale", 2_000, seed=3).bars
    lowest = plain.low.min()
    monkeypatch.setattr(synthetic, "_LOWEST_PRICE", lowest + 7.0)
    moved = synthetic_bars("martingale", 2_000, seed=3).bars
    assert moved.low.min() == lowest + 7.0
    np.testing.assert_array_equal(moved.close, plain.close + 7.0)


def test_seventy_thousand_bars_take_under_150_ms():
    synthetic_bars("planted", 1_000)
    best = min(_seconds(lambda seed=seed: synthetic_bars("planted", T, seed)) for seed in range(5))
    assert best < 0.15


def _seconds(work):
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def test_truth_is_cut_and_saved_with_its_rows(made):
    truth = made["planted"].truth
    part = truth.take(slice(10, 20))
    np.testing.assert_array_equal(part.state, truth.state[10:20])
    np.testing.assert_array_equal(part.drift, truth.drift[10:20])
    back = Truth.from_dict(part.to_dict())
    np.testing.assert_array_equal(back.state, part.state)
    np.testing.assert_array_equal(back.transition, part.transition)
    same = replace(back, state=part.state, transition=part.transition)
    assert vars(same) == vars(part)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"kind": "plantd"}, "kind 'plantd' is unknown, expected one of planted"),
        ({"kind": "planted", "bars": 0}, "bars is 0, expected at least 1"),
        ({"kind": "planted", "seed": -1}, "seed is -1, expected zero or"),
        ({"kind": "planted", "interval": "7m"}, "'7m'"),
        ({"kind": "planted", "start": "yesterday"}, "start is 'yesterday', expected an ISO date"),
        ({"kind": "planted", "start": "2036-02-01"}, "2035"),
    ],
)
def test_bad_arguments_are_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        synthetic_bars(**{"bars": 10, **arguments})


def test_synthetic_market_carries_truth_and_features():
    market = synthetic_market("planted", 3_000, seed=4)
    names = market.feature_names
    assert names[-4:] == (PLANTED_STATE, *DISTRACTORS)
    assert len(names) > 20
    assert len(market.truth.state) == len(market) == 3_000
    warm = market.decision
    column = market.features[:, names.index(PLANTED_STATE)]
    np.testing.assert_array_equal(column[warm], market.truth.state[warm] - 1.0)
    _, _, test = market.split(0.6, 0.22)
    np.testing.assert_array_equal(test.truth.state, market.truth.state[-len(test) :])
    few = synthetic_market("planted", 500, features=[PLANTED_STATE, "return_1", "distractor_slow"], drop=["return_1"])
    assert few.feature_names == (PLANTED_STATE, "distractor_slow")
    assert synthetic_market("planted_noisy", 500).game == {"depth_contracts": 2}
    assert synthetic_market("garch", 500).truth is None
    with pytest.raises(ValueError, match="nonsense"):
        synthetic_market("planted", 500, features=["nonsense"])


@pytest.mark.parametrize(
    ("kind", "digest"),
    [
        ("planted", "2f25d75a1daf1ea2"),
        ("planted_noisy", "9e93557172049772"),
        ("martingale", "3580d4eab05fad1f"),
        ("garch", "04b0d38141d71419"),
    ],
)
def test_the_bars_of_known_arguments_never_change(made, kind, digest):
    whole = hashlib.sha256()
    for bars in (made[kind].bars, synthetic_bars(kind, 3_000, 7, interval="1d", start="2012-03-05").bars):
        for column in (
            bars.start,
            *map(ticks, (bars.open, bars.high, bars.low, bars.close)),
            bars.volume.astype(np.int64),
        ):
            whole.update(column.astype("<i8").tobytes())
        for name in sorted(bars.extra):
            whole.update(np.rint(bars.extra[name] * 1e6).astype("<i8").tobytes())
    assert whole.hexdigest()[:16] == digest


def test_chunks_change_nothing_but_the_lattice_paths(monkeypatch):
    plain = synthetic_bars("garch", 5_000, seed=2)
    monkeypatch.setattr(synthetic, "_CHUNK", 997)
    parts = synthetic_bars("garch", 5_000, seed=2)
    for name in ("start", "ts", "open", "high", "low", "close", "volume"):
        np.testing.assert_array_equal(getattr(parts.bars, name), getattr(plain.bars, name))
    states = synthetic_bars("planted", 5_000, seed=2)
    monkeypatch.setattr(synthetic, "_CHUNK", 1_001)
    for name, column in synthetic_bars("planted", 5_000, seed=2).bars.extra.items():
        np.testing.assert_array_equal(column, states.bars.extra[name])


def slow_bars(trades, length):
    """Bars of trades by ts_recv, one trade at a time: {start: [open, high, low, close, volume]}."""
    bars = {}
    for ts, price, size in zip(*(trades[name].tolist() for name in ("ts_recv", "price", "size")), strict=True):
        start = ts - ts % length
        if start not in bars:
            bars[start] = [price / 1e9, price / 1e9, price / 1e9, price / 1e9, 0]
        bar = bars[start]
        bar[1], bar[2], bar[3], bar[4] = max(bar[1], price / 1e9), min(bar[2], price / 1e9), price / 1e9, bar[4] + size
    return bars


def assert_trades_make(trades, bars, length):
    got = slow_bars(trades, length)
    columns = (bars.open, bars.high, bars.low, bars.close, traded_volume(bars))
    expected = {
        start: list(row)
        for start, *row in zip(bars.start.tolist(), *(column.tolist() for column in columns), strict=True)
    }
    assert got == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("interval", "count"), [("1s", 5_000), ("1m", 4_500), ("5m", 600), ("1h", 300), ("1d", 60)])
def test_trades_make_up_the_bars(kind, interval, count):
    arguments = {"interval": interval, "start": "2021-03-31"}  # the afternoon halt, Good Friday until 08:15, a weekend
    bars = synthetic_bars(kind, count, 4, **arguments).bars
    trades = np.concatenate(list(synthetic_ticks(kind, count, 4, **arguments)))
    assert_trades_make(trades, bars, interval_ns(interval))
    if interval != "1s":
        np.testing.assert_array_equal(traded_volume(bars), bars.volume)
        assert len(trades) == 17 * count  # the open and sixteen steps
    ts, event = trades["ts_recv"].astype(np.int64), trades["ts_event"].astype(np.int64)
    assert (np.diff(ts) > 0).all()
    assert (ts % 2 == 1).all()
    assert (ts - event >= 80_000).all()
    assert (ts - event < 300_000).all()
    assert sessions(ts, ts + 1).is_open.all()
    assert (trades["size"] >= 1).all()
    # The tick rule: the aggressor by the last change of price.
    price, buys = trades["price"].tolist(), (trades["side"] == b"B").tolist()
    assert set(np.unique(trades["side"])) == {b"A", b"B"}
    assert buys[0]
    for k in range(1, len(price)):
        assert buys[k] == (price[k] > price[k - 1] if price[k] != price[k - 1] else buys[k - 1])


def test_a_lattice_bar_trades_its_own_path():
    bars = synthetic_bars("planted", 500, 9).bars
    trades = np.concatenate(list(synthetic_ticks("planted", 500, 9)))
    path = (trades["price"] / 250_000_000).astype(int).reshape(500, 17)
    assert (np.abs(np.diff(path, axis=1)) == 1).all()
    np.testing.assert_array_equal(path[:, 0], ticks(bars.open))


def test_trades_with_fewer_contracts_than_steps_keep_the_extremes():
    bars = synthetic_bars("planted", 20_000, 2, interval="1s").bars
    trades = np.concatenate(list(synthetic_ticks("planted", 20_000, 2, interval="1s")))
    count = np.unique(trades["ts_recv"] // 10**9, return_counts=True)[1]
    np.testing.assert_array_equal(count, np.minimum(traded_volume(bars), 17))
    raised = traded_volume(bars) != bars.volume
    assert 0.02 < raised.mean() < 0.08
    assert traded_volume(bars)[raised].max() <= 4


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_bars_and_volumes_have_their_trades(data):
    n = data.draw(st.integers(1, 6))
    column = st.lists(st.integers(0, 40), min_size=n, max_size=n)
    four = np.sort(np.array([data.draw(column) for _ in range(4)]), axis=0)
    swap = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))
    low, one, two, high = (4_000.0 + 0.25 * row for row in four)
    volume = np.array(data.draw(st.lists(st.integers(1, 30) | st.integers(1, 4_000_000_000), min_size=n, max_size=n)))
    start = 1_709_562_600_000_000_000 + 60_000_000_000 * np.arange(n)
    bars = Bars(
        start,
        start + 60_000_000_000,
        np.where(swap, two, one),
        high,
        low,
        np.where(swap, one, two),
        volume.astype(float),
    )
    seed = data.draw(st.integers(0, 5))
    trades = np.concatenate(list(ticks_from_bars(bars, seed)))
    assert_trades_make(trades, bars, 60_000_000_000)
    assert (traded_volume(bars)[volume >= 4] == volume[volume >= 4]).all()
    # Contracts that cannot be divided among many trades go to at most seventeen.
    assert len(trades) <= 17 * n
    books = np.concatenate(list(books_from_bars(bars, seed)))
    same = books[books["action"] == b"T"]
    for name in ("ts_recv", "ts_event", "price", "size", "side"):
        np.testing.assert_array_equal(same[name], trades[name])


def test_ticks_of_bars_off_the_tick_are_refused():
    bars = synthetic_bars("garch", 5).bars
    bars.close[3] = 4_000.1
    with pytest.raises(ValueError, match=r"close is 4000\.1, expected a multiple of 0\.25"):
        list(ticks_from_bars(bars))


@pytest.mark.parametrize("draw", [synthetic_ticks, synthetic_books])
def test_ticks_repeat_themselves_and_name_bad_arguments_at_once(draw):
    one, two = (np.concatenate(list(draw("garch", 200, 3))) for _ in range(2))
    assert one.tobytes() == two.tobytes()
    other = np.concatenate(list(draw("garch", 200, 4)))
    assert one.tobytes() != other.tobytes()
    with pytest.raises(ValueError, match="kind 'noise' is unknown"):
        draw("noise", 200)


@pytest.mark.parametrize("kind", ["planted", "garch"])
@pytest.mark.parametrize(("interval", "count"), [("1s", 400), ("5m", 400)])
def test_every_book_follows_from_the_one_before(kind, interval, count):
    bars = synthetic_bars(kind, count, 6, interval=interval, start="2024-03-08").bars
    books = np.concatenate(list(synthetic_books(kind, count, 6, interval=interval, start="2024-03-08")))
    ts = books["ts_recv"].astype(np.int64)
    assert (np.diff(ts) >= 0).all()
    assert sessions(ts, ts + 1).is_open.all()
    assert_trades_make(books[books["action"] == b"T"], bars, interval_ns(interval))
    levels = book_levels(books)
    tick = 250_000_000
    assert set(np.unique(levels["ask_px"][:, 0] - levels["bid_px"][:, 0])) == {tick, 2 * tick}
    assert (np.diff(levels["ask_px"], axis=1) == tick).all()
    assert (np.diff(levels["bid_px"], axis=1) == -tick).all()
    for own in ("bid", "ask"):
        assert (levels[f"{own}_sz"] >= 1).all()
        assert (levels[f"{own}_ct"] >= 1).all()
        assert (levels[f"{own}_ct"] <= levels[f"{own}_sz"]).all()
    assert set(np.unique(books["action"])) == {b"A", b"C", b"M", b"T"}
    assert set(np.unique(books["side"])) == {b"A", b"B"}

    sides = {b"B": ("bid", -1), b"A": ("ask", 1)}
    book = {  # price to size, of each side, as the last record left it
        own: dict(zip(levels[f"{own}_px"][0].tolist(), levels[f"{own}_sz"][0].tolist(), strict=True))
        for own in ("bid", "ask")
    }
    for k in range(1, len(books)):
        action, side, price, size, depth = (books[name][k] for name in ("action", "side", "price", "size", "depth"))
        price, size = int(price), int(size)
        now = {
            own: dict(zip(levels[f"{own}_px"][k].tolist(), levels[f"{own}_sz"][k].tolist(), strict=True))
            for own in ("bid", "ask")
        }
        own, away = sides[side]
        if action == b"T":
            assert now == book  # it shows the book before it
            passive, best = ("ask", min(book["ask"])) if side == b"B" else ("bid", max(book["bid"]))
            assert price == best  # a buyer pays the ask
            assert size < book[passive][price]
            after = books[k + 1]
            assert (after["action"], after["price"], after["size"], after["flags"]) == (b"C", price, size, 130)
            assert after["side"] != side
            assert books["flags"][k] == 0
        else:
            changed = dict(book[own])
            if action == b"A":
                changed[price] = changed.get(price, 0) + size
            elif action == b"C":
                changed[price] -= size
                if not changed[price]:
                    del changed[price]
            else:
                assert price in changed
                changed[price] = size
            ordered = sorted(changed, key=lambda p: away * p)
            assert ordered[depth] == price or action == b"C"
            # At most one level appears or drops out at the far end.
            assert list(now[own])[: len(ordered[:10])] == ordered[:10]
            assert all(now[own][p] == changed[p] for p in ordered[:10])
            other = "ask" if own == "bid" else "bid"
            assert now[other] == book[other]
            assert books["flags"][k] == 130
        book = now


def test_ticks_and_books_are_fast():
    for draw, bars, rate in ((synthetic_ticks, 30_000, 1e6), (synthetic_books, 5_000, 0.3e6)):
        sum(map(len, draw("planted", 100)))  # compiles
        counts = []
        seconds = _seconds(
            lambda draw=draw, bars=bars, counts=counts: counts.append(sum(map(len, draw("planted", bars))))
        )
        assert counts[0] / seconds > rate


def test_contracts_share_the_volume_and_are_a_constant_spread_apart():
    bars = synthetic_bars("garch", 9_000, 1, interval="1h", start="2024-01-02").bars
    chain = synthetic_contracts(bars, spread=11.5)
    assert list(chain)[:6] == ["ESH24", "ESM24", "ESU24", "ESZ24", "ESH25", "ESM25"]
    total = dict.fromkeys(bars.start.tolist(), 0.0)
    row = {start: k for k, start in enumerate(bars.start.tolist())}
    expiries = [expiration_ns(2024 + k // 4, 3 * (k % 4) + 3) for k in range(len(chain))]
    share = {}
    for k, own in enumerate(chain.values()):
        at = np.array([row[start] for start in own.start.tolist()])
        for name in ("open", "high", "low", "close"):
            np.testing.assert_array_equal(getattr(own, name), getattr(bars, name)[at] + 11.5 * k)
        assert (own.volume >= 1).all()
        assert (own.start < expiries[k]).all()
        if k > 1:
            assert (own.start >= expiries[k - 2]).all()
        for start, volume in zip(own.start.tolist(), own.volume.tolist(), strict=True):
            total[start] += volume
            if k == 1:
                share[(expiries[0] - start) / 86_400e9] = volume / bars.volume[row[start]]
    np.testing.assert_array_equal(list(total.values()), bars.volume)
    # Of ESM24 before ESH24 expires: 2 % until ten days before, then a seventh a day, 98 % from three days before.
    for days, expected in ((30, 0.02), (10.1, 0.02), (8.25, 0.25), (6.75, 3.25 / 7), (3.9, 6.1 / 7), (2, 0.98)):
        nearest = min(share, key=lambda left, days=days: abs(left - days))
        assert abs(share[nearest] - expected) < 0.02
    names = list(synthetic_contracts(bars, spreads=True))
    assert names[len(chain) :][:2] == ["ESH4-ESM4", "ESM4-ESU4"]
    spread = synthetic_contracts(bars, spread=11.5, spreads=True)["ESH4-ESM4"]
    assert set(spread.close) == set(spread.high) == {11.5}
    assert spread.start[-1] < expiries[0]
