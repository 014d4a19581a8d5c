"""Features: hand-worked values, causality, ugly inputs, the choice of features, the normalizer."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fox_env.data.bars import Bars
from fox_env.data.calendar import sessions
from fox_env.data.features import (
    DEFAULT_FEATURES,
    EVEN,
    ODD,
    ORDER_FLOW,
    Feature,
    FeatureInput,
    complement,
    compute,
    neg_swap,
    resolve,
    select,
    swap,
    warmup,
)
from fox_env.data.normalize import Normalizer
from fox_env.mirror import mirror_bars

MINUTE_NS = 60_000_000_000
MONDAY_NS = np.datetime64("2024-01-08T15:00", "ns").astype(np.int64)  # 09:00 in Chicago
BY_NAME = {feature.name: feature for feature in DEFAULT_FEATURES}
ODD_NAMES = [feature.name for feature in DEFAULT_FEATURES if feature.parity == ODD]


QUOTES = ("bid", "ask", "bid_size", "ask_size")


def make_bars(close, high=None, low=None, open=None, volume=None, minutes=5) -> Bars:
    """Bars with a book in which nothing happens: both sides alike, no order flow."""
    close = np.asarray(close, np.float64)
    start = MONDAY_NS + np.arange(len(close)) * minutes * MINUTE_NS
    still = {"ofi": 0.0, "depth": 40.0, "imbalance": 0.0}
    open = close if open is None else np.asarray(open, np.float64)
    return Bars(
        start=start,
        ts=start + minutes * MINUTE_NS,
        open=open,
        high=np.maximum(open, close) if high is None else np.asarray(high, np.float64),
        low=np.minimum(open, close) if low is None else np.asarray(low, np.float64),
        close=close,
        volume=np.ones(len(close)) if volume is None else np.asarray(volume, np.float64),
        bid=close * (1 - 2e-5),
        ask=close * (1 + 2e-5),
        bid_size=np.full(len(close), 40.0),
        ask_size=np.full(len(close), 40.0),
        extra={f"{name}_{n}": np.full(len(close), value) for name, value in still.items() for n in (1, 5, 10)}
        | {name: np.full(len(close), 7.0) for name in ("ask_volume", "bid_volume")},
    )


def make_input(bars: Bars) -> FeatureInput:
    return FeatureInput(bars, sessions(bars.start, bars.ts), 5 * MINUTE_NS)


def from_path(log_path) -> FeatureInput:
    return make_input(make_bars(4000 * np.exp(np.asarray(log_path, np.float64))))


def random_bars(seed: int, rows: int = 400) -> Bars:
    """A walk in ticks with quiet spells, jumps, session breaks, bars without a range and bars without volume."""
    rng = np.random.default_rng(seed)
    steps = rng.integers(-6, 7, (rows, 4)) * (rng.random((rows, 1)) < 0.8)
    steps[:, 0] += rng.integers(-200, 201, rows) * (rng.random(rows) < 0.02)
    path = 5000 + 0.25 * np.cumsum(steps.ravel()).reshape(rows, 4)
    wait = 5 * MINUTE_NS * np.where(rng.random(rows) < 0.02, rng.integers(2, 200, rows), 1)
    start = MONDAY_NS + np.cumsum(wait)
    volume = rng.integers(0, 5000, rows) * (rng.random(rows) < 0.9)
    prices = path[:, 0], path.max(1), path.min(1), path[:, 3]
    return Bars(start, start + 5 * MINUTE_NS, *prices, volume.astype(np.float64), **random_flow(seed, prices[3]))


def random_flow(seed: int, close: np.ndarray) -> dict:
    """Quotes and order flow: bars whose book is masked at the close, without a record, or not yet known."""
    rng = np.random.default_rng([seed, 1])
    rows = len(close)
    bid = close - 0.25 * rng.integers(0, 3, rows)
    quotes = [bid, bid + 0.25 * rng.integers(0, 4, rows), *rng.integers(1, 500, (2, rows)).astype(np.float64)]
    masked, empty = rng.random(rows) < 0.1, rng.random(rows) < 0.1
    extra = {name: rng.integers(0, 300, rows) * (rng.random(rows) < 0.8) * 1.0 for name in ("ask_volume", "bid_volume")}
    for n in (1, 5, 10):
        extra[f"ofi_{n}"] = np.where(np.arange(rows) < 3, np.nan, rng.integers(-900, 901, rows) * ~empty)
        extra[f"depth_{n}"] = np.where(empty, np.nan, rng.integers(1, 300, rows))
        extra[f"imbalance_{n}"] = np.where(masked, np.nan, rng.uniform(-1, 1, rows))
    return {name: np.where(masked, np.nan, quote) for name, quote in zip(QUOTES, quotes, strict=True)} | {
        "extra": extra
    }


def reflected(bars: Bars) -> Bars:
    """The mirrored market with its order flow: buying is selling, the sizes of the two sides change places."""
    sign = {"ofi": -1, "depth": 1, "imbalance": -1}
    flow = {name: sign[name.split("_")[0]] * column for name, column in bars.extra.items() if "volume" not in name}
    sides = {"ask_volume": bars.extra["bid_volume"], "bid_volume": bars.extra["ask_volume"]}
    return replace(mirror_bars(replace(bars, extra={})), extra=flow | sides)


def value(name: str, inputs: FeatureInput, row: int = -1) -> float:
    return BY_NAME[name].function(inputs)[row]


# --- hand-worked values; s is the size of every one-bar log return, so that σ = s ------------------------------------

S = 0.001
ZIGZAG = [0.0, S] * 60  # rows 0 … 119; the last return is +s


def test_return_is_the_move_in_sigma_and_root_of_time():
    up = [*ZIGZAG, 2 * S, 3 * S]  # the last three returns are +s
    assert value("return_1", from_path(up)) == pytest.approx(1.0, rel=1e-9)
    assert value("return_3", from_path(up)) == pytest.approx(3 / np.sqrt(3), rel=1e-9)
    assert value("return_3", from_path(ZIGZAG)) == pytest.approx(1 / np.sqrt(3), rel=1e-9)


def test_sigma_includes_the_current_return_so_a_jump_out_of_a_flat_market_is_ten():
    assert value("return_1", from_path([0.0] * 150 + [0.3])) == pytest.approx(10.0, rel=1e-9)


def test_macd_of_a_line_is_the_difference_of_the_lags():
    line = from_path(S * np.arange(150))  # an EMA of n lags a line by (n − 1) / 2 bars: 25/2 − 11/2 = 7
    assert value("macd", line) == pytest.approx(7.0, rel=1e-9)
    assert value("macd_histogram", line) == pytest.approx(0.0, abs=1e-9)


def test_bollinger_position_of_one_step_after_a_flat_window():
    # 19 times 0 and once a: mean a/20, variance a²(1/20 − 1/400) = 19a²/400, (a − a/20) / (2·a√19/20) = √19 / 2
    assert value("bollinger_20", from_path([0.0] * 30 + [S])) == pytest.approx(np.sqrt(19) / 2, rel=1e-9)


def test_sma_ratio_of_a_line():
    # x − mean of the last 5 = 2s, over s√5
    assert value("sma_ratio_5", from_path(S * np.arange(150))) == pytest.approx(2 / np.sqrt(5), rel=1e-9)


def test_slope_of_a_line_and_of_a_zigzag():
    assert value("slope_10", from_path(S * np.arange(150))) == pytest.approx(np.sqrt(10), rel=1e-9)
    # 0, s, …, 0, s: Σ(i − 4.5)x = s(1 + 3 + 5 + 7 + 9 − 5·4.5) = 2.5s over Σ(i − 4.5)² = 82.5
    assert value("slope_10", from_path(ZIGZAG)) == pytest.approx(2.5 / 82.5 * np.sqrt(10), rel=1e-9)


def test_cusum_by_hand():
    # Row 100 of the zigzag is a fall (0 after s). z of rows 100 … 105: −, +, +, +, −, −; k = ¼.
    path = [*ZIGZAG[:101], S, 2 * S, 3 * S, 2 * S, S]
    # S⁺: 0, .75, 1.5, 2.25, 1, 0   (max(0, S + z − ¼), the last max(0, 1 − 1.25))
    # S⁻: −.75, 0, 0, 0, −.75, −1.5 (min(0, S + z + ¼))
    up = BY_NAME["cusum_up"].function(from_path(path))[100:]
    down = BY_NAME["cusum_down"].function(from_path(path))[100:]
    np.testing.assert_allclose(up, 0.5 * np.array([0, 0.75, 1.5, 2.25, 1.0, 0.0]), atol=1e-9)
    np.testing.assert_allclose(down, 0.5 * np.array([-0.75, 0, 0, 0, -0.75, -1.5]), atol=1e-9)


def test_cusum_equals_the_recursion():
    inputs = make_input(random_bars(3, 2000))
    z = inputs.log_return / inputs.volatility
    plus, minus, recursion = 0.0, 0.0, []
    for row in range(100, 2000):
        plus, minus = max(0.0, plus + z[row] - 0.25), min(0.0, minus + z[row] + 0.25)
        recursion.append((0.5 * plus, 0.5 * minus))
    features = np.column_stack([BY_NAME[name].function(inputs)[100:] for name in ("cusum_up", "cusum_down")])
    np.testing.assert_allclose(features, recursion, atol=1e-9)


def test_rsi_by_hand():
    changes = np.array([1] * 9 + [-1] * 5) * S
    path = np.concatenate([[0.0], np.cumsum(changes)])
    assert value("rsi_14", from_path(path)) == pytest.approx(9 / 14, rel=1e-9)
    # Wilder: gain (13·9/14 + 2) / 14 = 145/196, loss 13·5/14 / 14 = 65/196
    path = np.append(path, path[-1] + 2 * S)
    assert value("rsi_14", from_path(path)) == pytest.approx(145 / 210, rel=1e-9)


def test_shape_of_the_bar():
    rows = 120
    full = np.full(rows, 1.0)
    bars = make_bars(close=105 * full, open=102 * full, high=110 * full, low=100 * full)
    inputs = make_input(bars)  # every log range is log 1.1, so that the range scale is log 1.1
    assert value("close_location", inputs) == pytest.approx(np.log(1.05) / np.log(1.1), rel=1e-9)
    assert value("upper_wick", inputs) == pytest.approx(np.log(110 / 105) / np.log(1.1), rel=1e-9)
    assert value("lower_wick", inputs) == pytest.approx(np.log(1.02) / np.log(1.1), rel=1e-9)
    assert value("range_ratio_1", inputs) == pytest.approx(1.0, rel=1e-9)


def test_volatility_and_range_ratio():
    # 90 returns of s, then 10 of 2s: √4 / √((90·1 + 10·4) / 100)
    path = np.concatenate([[0.0], np.cumsum([S] * 90 + [2 * S] * 10)])
    assert value("volatility_ratio_10", from_path(path)) == pytest.approx(2 / np.sqrt(1.3), rel=1e-9)
    width = np.array([S] * 90 + [2 * S] * 10)
    bars = make_bars(np.full(100, 4000.0), high=4000 * np.exp(width), low=np.full(100, 4000.0))
    assert value("range_ratio_10", make_input(bars)) == pytest.approx(2 / np.sqrt(1.3), rel=1e-9)


def test_volume_ratio():
    # the last bar has 200, the last ten (9·300 + 200) / 10 = 290
    volume = np.array([100] * 50 + [300] * 49 + [200], np.float64)
    mean = (50 * 100 + 49 * 300 + 200) / 100
    inputs = make_input(make_bars(np.full(100, 4000.0), volume=volume))
    assert value("volume_ratio_1", inputs) == pytest.approx(np.log2(1 + 200 / mean), rel=1e-9)
    assert value("volume_ratio_10", inputs) == pytest.approx(np.log2(1 + 290 / mean), rel=1e-9)


def test_time_features_keep_to_chicago_time_across_the_clock_change():
    # 2024-03-08 22:00 UTC is Friday 16:00 in Chicago; 2024-03-10 22:00 UTC is Sunday 17:00: summer time began.
    ts = np.array(["2024-03-08T22:00", "2024-03-10T22:00"], "datetime64[ns]").astype(np.int64)
    bars = replace(make_bars([4000.0, 4000.0]), start=ts - 5 * MINUTE_NS, ts=ts)
    inputs = make_input(bars)
    angle = 2 * np.pi * np.array([16, 17]) / 24
    np.testing.assert_allclose(BY_NAME["time_sin"].function(inputs), np.sin(angle), atol=1e-12)
    np.testing.assert_allclose(BY_NAME["time_cos"].function(inputs), np.cos(angle), atol=1e-12)
    assert value("minutes_since_previous", inputs) == pytest.approx(np.log(1 + 48 * 60), rel=1e-12)


# --- order flow ------------------------------------------------------------------------------------------------------


def with_extra(bars: Bars, **columns) -> FeatureInput:
    return make_input(
        replace(bars, extra=bars.extra | {name: np.asarray(c, np.float64) for name, c in columns.items()})
    )


def test_ofi_by_hand():
    # An OFI of ±50 at depth 10 is ±5, as ±100 at depth 20 is; one of 100 at depth 10 is 10. 98 bars of ±5, one without
    # a record and the last of 10: 10 / √((98·25 + 0 + 100) / 100) = 10 / √25.5.
    flow = np.array([50.0, -50.0, 100.0, -100.0] * 24 + [50.0, -50.0, 0.0, 100.0])
    depth = np.array([10.0, 10.0, 20.0, 20.0] * 24 + [10.0, 10.0, np.nan, 10.0])
    inputs = with_extra(make_bars(np.full(100, 4000.0)), ofi_5=flow, depth_5=depth)
    assert value("ofi_5", inputs) == pytest.approx(10 / np.sqrt(25.5), rel=1e-9)
    assert value("ofi_1", inputs) == 0.0  # its own columns are still
    # Twice the flow in a book of twice the depth is the same.
    assert value("ofi_5", with_extra(inputs.bars, ofi_5=2 * flow, depth_5=2 * depth)) == value("ofi_5", inputs)


def test_ofi_is_zero_where_it_is_unknown():
    flow, depth = np.full(150, 3.0), np.full(150, 4.0)
    flow[120], depth[[121, 122]] = np.nan, [np.nan, 0.0]
    values = BY_NAME["ofi_1"].function(with_extra(make_bars(np.full(150, 4000.0)), ofi_1=flow, depth_1=depth))
    assert values[[120, 121, 122]].tolist() == [0.0, 0.0, 0.0]
    assert values[123] == pytest.approx(1 / np.sqrt(0.97), rel=1e-9)


def test_imbalances_by_hand():
    bars = make_bars([4000.0] * 4)
    inputs = with_extra(bars, imbalance_10=[0.25, -1, np.nan, 0.5])
    assert BY_NAME["depth_imbalance_10"].function(inputs).tolist() == [0.25, -1.0, 0.0, 0.5]
    inputs = with_extra(bars, ask_volume=[30, 0, 0, np.nan], bid_volume=[10, 5, 0, np.nan])
    assert BY_NAME["trade_imbalance"].function(inputs).tolist() == [0.5, -1.0, 0.0, 0.0]  # (30 − 10) / 40, −5 / 5


def quoted(bid, ask, bid_size=30.0, ask_size=10.0) -> FeatureInput:
    """The zigzag, whose σ is s, with these last quotes and none before."""
    bars = make_bars(4000 * np.exp(np.asarray(ZIGZAG)))
    columns = {name: np.full(len(bars), np.nan) for name in QUOTES}
    for name, last in zip(QUOTES, (bid, ask, bid_size, ask_size), strict=True):
        columns[name][-np.size(last) :] = last
    return make_input(replace(bars, **columns))


def test_microprice_offset_and_spread_by_hand():
    # A spread of 4σ, (30 − 10) / (30 + 10) = ½ of it to the bid's side: ½ · 4 · ½ = 1 above the middle.
    inputs = quoted(4000.0, 4000 * np.exp(4 * S))
    assert value("spread", inputs) == pytest.approx(4.0, rel=1e-9)
    assert value("microprice_offset", inputs) == pytest.approx(1.0, rel=1e-9)
    assert value("microprice_offset", quoted(4000.0, 4000 * np.exp(4 * S), 10.0, 30.0)) == pytest.approx(-1.0, rel=1e-9)


@pytest.mark.parametrize("unknown", [(np.nan, np.nan), (4000.0, np.nan), (4001.0, 4000.0), (0.0, 4000.0), (-2.0, -1.0)])
def test_a_masked_book_has_no_microprice_and_the_spread_before(unknown):
    bid, ask = unknown
    inputs = quoted([4000.0, bid, bid], [4000 * np.exp(2 * S), ask, ask])
    spread = BY_NAME["spread"].function(inputs)
    np.testing.assert_allclose(spread[100:], [0.0] * 17 + [2.0] * 3, rtol=1e-9)
    assert BY_NAME["microprice_offset"].function(inputs)[-2:].tolist() == [0.0, 0.0]


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_order_flow_in_the_mirror_has_its_declared_parity(seed):
    inputs = make_input(random_bars(seed, 300))
    mirror = FeatureInput(reflected(inputs.bars), inputs.sessions, inputs.interval_ns)
    for name in ORDER_FLOW:
        feature = BY_NAME[name]
        own, other = (feature.function(x)[feature.warmup :] for x in (inputs, mirror))
        assert np.abs(own).max() > 1e-3
        sign = {EVEN: 1, ODD: -1}[feature.parity]
        np.testing.assert_allclose(other, sign * own, rtol=0, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("name", ORDER_FLOW)
def test_order_flow_reads_the_columns_that_it_needs(name):
    bars, feature = random_bars(2, 150), BY_NAME[name]
    columns = {need: bars.extra.get(need, getattr(bars, need, None)) for need in feature.needs}
    for left_out in (None, *feature.needs):
        given = {need: column for need, column in columns.items() if need != left_out}
        quotes = {need: given.get(need) for need in QUOTES}
        fewer = replace(bars, **quotes, extra={need: given[need] for need in given if need not in QUOTES})
        if left_out is None:
            got, want = compute(make_input(fewer), [feature]), compute(make_input(bars), [feature])
            np.testing.assert_array_equal(got, want)
        assert select([fewer], [feature]) == (() if left_out else (feature,))


def test_order_flow_is_absent_where_its_columns_are():
    bars = random_bars(1, 50)
    names = [feature.name for feature in DEFAULT_FEATURES]
    assert names[-len(ORDER_FLOW) :] == list(ORDER_FLOW)
    price_only = names[: -len(ORDER_FLOW)]

    def selected(**changes) -> list[str]:
        return [feature.name for feature in select([replace(bars, **changes)], DEFAULT_FEATURES)]

    no_quotes = dict.fromkeys(QUOTES)
    nothing = np.full(50, np.nan)
    first_level = {name: c for name, c in bars.extra.items() if name.endswith("_1")}
    sides = {name: c for name, c in bars.extra.items() if name.endswith("volume")}
    assert selected(**no_quotes, extra={}) == price_only
    assert selected(**dict.fromkeys(QUOTES, nothing), extra=dict.fromkeys(bars.extra, nothing)) == price_only
    assert selected(**no_quotes, extra=sides) == [*price_only, "trade_imbalance"]
    assert selected(**no_quotes, extra=dict.fromkeys(sides, np.zeros(50))) == price_only  # no trade has a side
    assert selected(extra=first_level) == [*price_only, "ofi_1", "depth_imbalance_1", "microprice_offset", "spread"]
    assert selected(bid_size=None, extra={}) == [*price_only, "spread"]


# --- the list --------------------------------------------------------------------------------------------------------


def test_the_default_features_are_the_seventeen_directional_ones_and_the_rest():
    of_price = [feature for feature in DEFAULT_FEATURES if feature.name not in ORDER_FLOW]
    directional = [feature for feature in of_price if feature.parity.kind in ("odd", "neg_swap")]
    assert len(directional) == 17
    families = {name.removesuffix("_histogram").split("_")[0] for name in (f.name for f in directional)}
    assert families == {"return", "macd", "bollinger", "sma", "slope", "cusum"}
    assert BY_NAME["rsi_14"].parity == complement(1.0)
    assert len(DEFAULT_FEATURES) + 6 <= 48
    assert warmup(DEFAULT_FEATURES) == 120


@pytest.mark.parametrize("feature", DEFAULT_FEATURES, ids=lambda feature: feature.name)
def test_the_first_valid_row_is_the_declared_one(feature):
    inputs = make_input(random_bars(11, 200))
    values = compute(inputs, [feature])[:, 0]
    assert np.isnan(values[: feature.warmup]).all()
    assert np.isfinite(values[feature.warmup :]).all()
    if not feature.name.startswith(("cusum", "minutes")):  # which wait longer than they must, and have a 0 there
        assert np.isnan(feature.function(inputs)[: feature.warmup]).all()


# --- causality -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("feature", DEFAULT_FEATURES, ids=lambda feature: feature.name)
def test_what_comes_later_changes_no_bit(feature):
    bars = random_bars(5)
    rng = np.random.default_rng(6)
    full = feature.function(make_input(bars))
    for cut in (feature.warmup + 1, 121, 137, 250, 399):  # rows kept
        prefix = feature.function(make_input(bars.take(slice(cut))))
        assert prefix[feature.warmup :].tobytes() == full[feature.warmup : cut].tobytes()
        other = random_bars(int(rng.integers(1 << 30)))
        later = np.arange(len(bars)) >= cut
        columns = {name: np.where(later, getattr(other, name) * 3, getattr(bars, name)) for name in
                   ("open", "high", "low", "close", "volume", *QUOTES)}  # fmt: skip
        columns["extra"] = {name: np.where(later, other.extra[name] * 3, bars.extra[name]) for name in bars.extra}
        shift = np.where(later, 7 * MINUTE_NS, 0)
        scrambled = replace(bars, **columns, start=bars.start + shift, ts=bars.ts + shift)
        after = feature.function(make_input(scrambled))
        assert after[feature.warmup : cut].tobytes() == full[feature.warmup : cut].tobytes()


def test_a_chunk_boundary_changes_no_bit(monkeypatch):
    inputs = make_input(random_bars(8))
    whole = BY_NAME["bollinger_20"].function(inputs)
    monkeypatch.setattr("fox_env.data.features._CHUNK_ROWS", 7)
    assert BY_NAME["bollinger_20"].function(inputs).tobytes() == whole.tobytes()


# --- ugly inputs -----------------------------------------------------------------------------------------------------


def ugly_closes() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    walk = 5000 + 0.25 * np.cumsum(rng.integers(-4, 5, 300))
    return {
        "constant": np.full(400, 4321.25),
        "constant after a walk": np.concatenate([walk, np.full(300, 5000.25)]),
        "constant after huge numbers": np.concatenate([1e12 * (2 + np.sin(np.arange(300))), np.full(300, 0.25)]),
        "one tick in a flat market": np.where(np.arange(400) < 200, 4000.0, 4000.25),
        "last-digit noise": np.where(rng.random(400) < 0.5, 4000.0, np.nextafter(4000.0, 5000.0)),
        "huge gaps": np.where(np.arange(400) // 50 % 2 == 0, 1e-6, 1e9),
        "only up": 100.0 * 1.01 ** np.arange(400),
        "flat for ten thousand bars": np.concatenate([walk, np.full(10_000, walk[-1])]),
    }


@pytest.mark.parametrize("case", ugly_closes())
@pytest.mark.parametrize("volume", ["none", "one bar"])
def test_ugly_prices_give_finite_features(case, volume):
    close = ugly_closes()[case]
    bars = make_bars(close, volume=(np.arange(len(close)) == 3) * (volume == "one bar") * 1e7)
    with np.errstate(all="raise", under="ignore"):
        result = compute(make_input(bars), DEFAULT_FEATURES)
    assert result.dtype == np.float32
    assert np.isnan(result[:120]).all()
    assert np.isfinite(result[120:]).all()


@pytest.mark.parametrize("case", ["constant", "constant after a walk", "constant after huge numbers"])
def test_a_still_market_has_the_values_that_parity_fixes(case):
    bars = make_bars(ugly_closes()[case], volume=np.zeros(len(ugly_closes()[case])))
    inputs = make_input(bars)
    row = dict(zip(BY_NAME, compute(inputs, DEFAULT_FEATURES)[-1], strict=True))
    assert [row[name] for name in ODD_NAMES] == [0.0] * len(ODD_NAMES)
    assert (row["close_location"], row["upper_wick"], row["lower_wick"]) == (0.5, 0.0, 0.0)
    assert (row["cusum_up"], row["cusum_down"]) == (0.0, 0.0)
    assert [row[name] for name in row if name.startswith(("volatility", "range", "volume"))] == [1.0] * 6
    assert row["spread"] == 0.0
    if case == "constant":
        assert row["rsi_14"] == 0.5


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), scale=st.sampled_from([1e-3, 1.0, 1e3]))
def test_features_do_not_depend_on_the_price_level(seed, scale):
    bars = random_bars(seed, 200)
    prices = ("open", "high", "low", "close", "bid", "ask")
    scaled = replace(bars, **{name: getattr(bars, name) * scale for name in prices})
    np.testing.assert_allclose(
        compute(make_input(scaled), DEFAULT_FEATURES), compute(make_input(bars), DEFAULT_FEATURES), atol=2e-6
    )


def test_fewer_bars_than_the_warm_up_are_all_nan():
    for rows in (0, 1, 5, 120):
        result = compute(make_input(random_bars(1, rows)), DEFAULT_FEATURES)
        assert result.shape == (rows, len(DEFAULT_FEATURES))
        assert np.isnan(result).all()
    assert np.isfinite(compute(make_input(random_bars(1, 121)), DEFAULT_FEATURES)[-1]).all()


# --- errors ----------------------------------------------------------------------------------------------------------


def own(function, parity=EVEN, name="own", warm=3, needs=()):
    return Feature(name, parity, warm, function, needs)


def test_a_wrong_shape_names_the_feature():
    inputs = make_input(random_bars(1, 50))
    with pytest.raises(ValueError, match=r"feature 'own' has shape \(49,\), expected \(50,\)"):
        compute(inputs, [own(lambda x: x.log_close[1:])])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300])
def test_a_value_that_is_not_finite_names_the_feature_and_the_bar(bad):
    inputs = make_input(random_bars(1, 50))

    def function(x):
        values = np.zeros(50)
        values[[1, 17, 20]] = bad  # bar 1 lies in the warm-up
        return values

    with pytest.raises(ValueError, match=r"feature 'own' is (nan|inf) at bar 17, expected a finite number from bar 3"):
        compute(inputs, [own(function)])


def test_a_price_that_is_not_positive_is_an_error_at_its_bar():
    bars = random_bars(1, 200)
    bars.close[130] = -37.63
    with pytest.raises(ValueError, match="feature 'return_1' is nan at bar 130"):
        compute(make_input(bars), resolve(["return_1"]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: resolve(["return_2"]), ValueError, "feature 'return_2' is unknown"),
        (lambda: resolve(["macd", "macd"]), ValueError, "feature 'macd' is there twice"),
        (lambda: resolve(None, ["cusum_up"]), ValueError, "'cusum_down' mirrors into 'cusum_up', which is missing"),
        (lambda: resolve(["upper_wick"]), ValueError, "'upper_wick' mirrors into 'lower_wick', which is missing"),
        (lambda: resolve(None, ["rsi"]), ValueError, "drop names the feature 'rsi', which is unknown"),
        (lambda: resolve(["macd"], ["macd"]), ValueError, "no feature is left"),
        (lambda: resolve("macd"), TypeError, "features is the string 'macd'"),
        (lambda: resolve(None, "macd"), TypeError, "drop is the string 'macd'"),
        (lambda: resolve([3]), TypeError, "features holds 3"),
        (lambda: own(np.zeros, name=""), ValueError, "name is empty"),
        (lambda: own(np.zeros, warm=-1), ValueError, "feature 'own': warmup is -1"),
        (
            lambda: resolve([own(None, swap("b"), "a"), own(None, neg_swap("a"), "b")]),
            ValueError,
            "'a' mirrors into 'b', which does not mirror into it",
        ),
    ],
)
def test_errors_of_the_choice(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_choice_keeps_order_and_takes_the_users_own():
    mine = own(lambda x: x.log_close)
    assert [f.name for f in resolve(["macd", mine, "return_1"])] == ["macd", "own", "return_1"]
    assert resolve() == DEFAULT_FEATURES
    left = resolve(None, ["cusum_up", "cusum_down", "rsi_14"])
    assert [f.name for f in left] == [n for n in BY_NAME if n not in ("cusum_up", "cusum_down", "rsi_14")]
    assert [f.name for f in resolve([mine], known=())] == ["own"]


def test_a_feature_without_its_input_is_absent_and_an_error_if_asked_for():
    with_volume, without = random_bars(1, 50), replace(random_bars(2, 50), volume=np.zeros(50))
    volume_free = [feature for feature in DEFAULT_FEATURES if "volume" not in feature.needs]
    assert select([with_volume], DEFAULT_FEATURES) == DEFAULT_FEATURES
    assert list(select([with_volume, without], DEFAULT_FEATURES)) == volume_free  # one contract without is enough
    assert list(resolve(None, ["volume_ratio_1"], bars_list=[without])) == volume_free
    with pytest.raises(ValueError, match="feature 'volume_ratio_1' needs 'volume', which the bars do not have"):
        resolve(["volume_ratio_1"], bars_list=[without])


def test_quotes_and_extra_columns_as_inputs():
    spread = own(lambda x: x.bars.ask - x.bars.bid, needs=("bid", "ask"))
    flow = own(lambda x: x.bars.extra["ofi"], ODD, "flow", needs=("ofi",))
    bars = replace(random_bars(1, 50), bid=None, ask=None, extra={})
    assert select([bars], [spread, flow]) == ()
    assert select([replace(bars, bid=bars.close, ask=np.full(50, np.nan))], [spread]) == ()
    with_both = replace(bars, bid=bars.close, ask=bars.close + 0.25, extra={"ofi": np.arange(50.0)})
    assert select([with_both], [spread, flow]) == (spread, flow)
    np.testing.assert_array_equal(compute(make_input(with_both), [spread, flow])[3:, 1], np.arange(3.0, 50.0))


def test_importing_the_features_loads_nothing_heavy():
    code = (
        "import sys, fox_env.data.features, fox_env.mirror, fox_env.data.normalize\n"
        "print([m for m in ('torch', 'torchrl', 'pandas', 'talib', 'databento') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# --- the normalizer --------------------------------------------------------------------------------------------------

MIXED = (
    own(None, EVEN, "even"),
    own(None, ODD, "odd"),
    own(None, complement(1.0), "rsi"),
    own(None, swap("low"), "up"),
    own(None, swap("up"), "low"),
    own(None, neg_swap("minus"), "plus"),
    own(None, neg_swap("plus"), "minus"),
)


def test_normalizer_by_hand():
    x = np.array(
        # even  odd  rsi  up  low  plus minus
        [[1.0, 3.0, 0.9, 1.0, 3.0, 1.0, 0.0], [5.0, 4.0, 0.6, 1.0, 3.0, 7.0, 0.0], [99.0] * 7],
        np.float32,
    )
    fitted = Normalizer.fit(x, MIXED, np.array([10, 20, 30]), slice(2))
    # even: mean 3, deviation 2. odd: √((9 + 16) / 2). rsi about ½: √((.16 + .01) / 2). up and low pooled: mean 2,
    # deviation 1. plus and minus pooled about 0: √((1 + 49 + 0 + 0) / 4).
    np.testing.assert_allclose(fitted.center, [3, 0, 0.5, 2, 2, 0, 0], rtol=1e-6)
    np.testing.assert_allclose(fitted.scale, [2, np.sqrt(12.5), np.sqrt(0.085), 1, 1, *[np.sqrt(12.5)] * 2], rtol=1e-6)
    assert (fitted.first_ts, fitted.last_ts) == (10, 20)
    normalized = fitted.apply(x)
    assert normalized.dtype == np.float32
    np.testing.assert_allclose(normalized[0, :3], [-1, 3 / np.sqrt(12.5), 0.4 / np.sqrt(0.085)], rtol=1e-6)
    assert normalized[2].tolist() == [10.0] * 7
    assert fitted.apply(-x)[2].tolist() == [-10.0] * 7


@pytest.mark.parametrize("constant", [0.0, 0.1, -1e-3, 1e30])
def test_a_constant_feature_gets_scale_one(constant):
    x = np.full((1000, 1), constant, np.float32)
    fitted = Normalizer.fit(x, [own(None)], np.arange(1000))
    assert fitted.scale.tolist() == [1.0]
    assert fitted.apply(x).tolist() == [[0.0]] * 1000


def test_last_digit_noise_on_a_constant_is_not_blown_up():
    x = np.full((1000, 1), 0.1, np.float32)
    x[::2] = np.nextafter(np.float32(0.1), np.float32(1))
    assert Normalizer.fit(x, [own(None)], np.arange(1000)).scale.tolist() == [1.0]
    x[::2] = 0.1001
    assert Normalizer.fit(x, [own(None)], np.arange(1000)).scale[0] == pytest.approx(5e-5, rel=1e-3)


def test_normalizer_uses_only_its_rows():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 7)).astype(np.float32)
    mask = np.arange(100) % 3 == 1
    other = np.where(mask[:, None], x, np.nan).astype(np.float32)
    a, b = Normalizer.fit(x, MIXED, np.arange(100), mask), Normalizer.fit(other, MIXED, np.arange(100), mask)
    assert a.center.tobytes() == b.center.tobytes()
    assert a.scale.tobytes() == b.scale.tobytes()
    assert (a.first_ts, a.last_ts) == (1, 97)
    assert np.isnan(a.apply(other)[0]).all()


def test_normalizer_survives_saving(tmp_path):
    rng = np.random.default_rng(0)
    fitted = Normalizer.fit(rng.normal(size=(100, 7)).astype(np.float32), MIXED, 2**60 + np.arange(100))
    np.savez(tmp_path / "n.npz", **fitted.to_dict())
    loaded = Normalizer.from_dict(dict(np.load(tmp_path / "n.npz")))
    assert loaded.center.tobytes() == fitted.center.tobytes()
    assert loaded.scale.tobytes() == fitted.scale.tobytes()
    assert (loaded.first_ts, loaded.last_ts) == (2**60, 2**60 + 99)


def test_normalizer_errors():
    x, ts = np.zeros((5, 7), np.float32), np.arange(5)
    with pytest.raises(ValueError, match=r"x has shape \(5, 6\), expected \[T, 7\]"):
        Normalizer.fit(x[:, :6], MIXED, ts)
    with pytest.raises(ValueError, match="ts has 4 rows, expected 5"):
        Normalizer.fit(x, MIXED, ts[:4])
    with pytest.raises(ValueError, match="rows selects no bar"):
        Normalizer.fit(x, MIXED, ts, np.zeros(5, bool))
    with pytest.raises(ValueError, match="which is missing"):
        Normalizer.fit(x[:, :6], MIXED[:6], ts)
    x[3, 1] = np.nan
    with pytest.raises(ValueError, match="feature 'odd' is nan at row 3"):
        Normalizer.fit(x, MIXED, ts, slice(2, None))
    with pytest.raises(ValueError, match="x has 6 features, expected 7"):
        Normalizer.fit(x[:3], MIXED, ts[:3]).apply(x[:, :6])
