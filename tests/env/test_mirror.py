"""The mirror universe: declared parities against features computed again on mirrored bars."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fox_env.data.features import (
    DEFAULT_FEATURES,
    EVEN,
    ODD,
    Feature,
    FeatureInput,
    complement,
    compute,
    neg_swap,
    resolve,
    swap,
    warmup,
)
from fox_env.data.normalize import Normalizer
from fox_env.mirror import mirror_bars, mirror_map, normalized_mirror_map
from tests.env.test_features import make_bars, make_input, random_bars, reflected, ugly_closes

FIRST = warmup(DEFAULT_FEATURES)


def mirrored_input(inputs: FeatureInput) -> FeatureInput:
    return FeatureInput(reflected(inputs.bars), inputs.sessions, inputs.interval_ns)


def expected(feature: Feature, inputs: FeatureInput) -> np.ndarray:
    """The feature in the mirror by its declared parity, in float64, written out from the definitions."""
    own = feature.function(inputs)
    partner = {f.name: f for f in DEFAULT_FEATURES}.get(feature.parity.partner)
    match feature.parity.kind:
        case "even":
            return own
        case "odd":
            return -own
        case "complement":
            return feature.parity.total - own
        case "swap":
            return partner.function(inputs)
        case "neg_swap":
            return -partner.function(inputs)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_every_default_feature_has_its_declared_parity(seed):
    inputs = make_input(random_bars(seed, 300))
    mirror = mirrored_input(inputs)
    for feature in DEFAULT_FEATURES:
        got, want = feature.function(mirror)[feature.warmup :], expected(feature, inputs)[feature.warmup :]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-9, err_msg=feature.name)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_the_map_is_the_mirror_of_the_raw_features(seed):
    inputs = make_input(random_bars(seed, 300))
    perm, sign, offset = mirror_map(DEFAULT_FEATURES)
    x, mirror = compute(inputs, DEFAULT_FEATURES), compute(mirrored_input(inputs), DEFAULT_FEATURES)
    np.testing.assert_allclose((x[:, perm] * sign + offset)[FIRST:], mirror[FIRST:], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "case", ["constant", "constant after a walk", "one tick in a flat market", "huge gaps", "only up"]
)
def test_parity_holds_where_denominators_vanish(case):
    inputs = make_input(make_bars(ugly_closes()[case]))
    mirror = mirrored_input(inputs)
    for feature in DEFAULT_FEATURES:
        got, want = feature.function(mirror)[feature.warmup :], expected(feature, inputs)[feature.warmup :]
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-9, err_msg=feature.name)


def test_a_wrong_parity_is_seen():
    """The checks above can fail: no default feature that moves also has another parity."""
    inputs = make_input(random_bars(1))
    mirror = mirrored_input(inputs)
    for feature in DEFAULT_FEATURES:
        got = feature.function(mirror)[FIRST:]
        for parity in {EVEN, ODD, complement(1.0)} - {feature.parity}:
            assert np.abs(got - expected(replace(feature, parity=parity), inputs)[FIRST:]).max() > 1e-3, feature.name


def test_map_by_hand():
    features = [
        Feature(name, parity, 0, np.zeros)
        for name, parity in (
            ("even", EVEN), ("plus", neg_swap("minus")), ("up", swap("low")), ("rsi", complement(100.0)),
            ("low", swap("up")), ("odd", ODD), ("minus", neg_swap("plus")),
        )
    ]  # fmt: skip
    perm, sign, offset = mirror_map(features)
    assert perm.tolist() == [0, 6, 4, 3, 2, 5, 1]
    assert sign.tolist() == [1, -1, 1, -1, 1, -1, -1]
    assert offset.tolist() == [0, 0, 0, 100, 0, 0, 0]
    assert (perm.dtype, sign.dtype, offset.dtype) == (np.int32, np.float32, np.float32)
    x = np.array([1, 2, 3, 30, 5, 6, -7], np.float32)
    assert (x[perm] * sign + offset).tolist() == [1, 7, 5, 70, 3, -6, -2]
    assert [a.tolist() for a in normalized_mirror_map(features)] == [perm.tolist(), sign.tolist()]


def test_twice_is_the_identity():
    perm, sign, offset = mirror_map(DEFAULT_FEATURES)
    # x_j -> s_j x_p(j) + o_j -> s_j (s_p(j) x_p(p(j)) + o_p(j)) + o_j
    assert (perm[perm] == np.arange(len(perm))).all()
    assert (sign * sign[perm] == 1).all()
    assert (sign * offset[perm] + offset == 0).all()
    x = np.random.default_rng(0).normal(size=(100, len(perm))).astype(np.float32)
    assert ((x[:, perm] * sign)[:, perm] * sign).tobytes() == x.tobytes()


def test_a_missing_partner_is_an_error():
    without = [feature for feature in DEFAULT_FEATURES if feature.name != "lower_wick"]
    with pytest.raises(ValueError, match="'upper_wick' mirrors into 'lower_wick', which is missing"):
        mirror_map(without)


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_normalizing_commutes_with_mirroring(seed):
    inputs = make_input(random_bars(seed, 400))
    x, mirror = compute(inputs, DEFAULT_FEATURES), compute(mirrored_input(inputs), DEFAULT_FEATURES)
    fitted = Normalizer.fit(x, DEFAULT_FEATURES, inputs.bars.ts, slice(FIRST, 300))
    of_mirror = Normalizer.fit(mirror, DEFAULT_FEATURES, inputs.bars.ts, slice(FIRST, 300))
    np.testing.assert_allclose(of_mirror.scale, fitted.scale, rtol=1e-5)
    np.testing.assert_allclose(of_mirror.center, fitted.center, rtol=1e-5, atol=1e-6)
    perm, sign = normalized_mirror_map(DEFAULT_FEATURES)
    np.testing.assert_allclose(
        (fitted.apply(x)[:, perm] * sign)[FIRST:], fitted.apply(mirror)[FIRST:], rtol=1e-5, atol=1e-5
    )


def test_partners_share_centre_and_scale_to_the_bit():
    inputs = make_input(random_bars(4))
    x = compute(inputs, DEFAULT_FEATURES)
    fitted = Normalizer.fit(x, DEFAULT_FEATURES, inputs.bars.ts, slice(FIRST, None))
    perm, sign, offset = mirror_map(DEFAULT_FEATURES)
    assert fitted.scale[perm].tobytes() == fitted.scale.tobytes()
    # The mirror of the centre is the centre.
    assert (fitted.center[perm] * sign + offset == fitted.center).all()


def test_mirror_bars_by_hand():
    bars = replace(
        make_bars([100.0, 125.0], open=[100.0, 100.0], high=[200.0, 160.0], low=[80.0, 100.0], volume=[3, 4]),
        bid=np.array([99.0, 125.0]),
        ask=np.array([101.0, 128.0]),
        bid_size=np.array([1.0, 2.0]),
        ask_size=np.array([5.0, 6.0]),
        extra={},
    )
    mirror = mirror_bars(bars)  # p -> 10,000 / p
    assert mirror.open.tolist() == [100.0, 100.0]
    assert mirror.high.tolist() == [125.0, 100.0]
    assert mirror.low.tolist() == [50.0, 62.5]
    assert mirror.close.tolist() == [100.0, 80.0]
    np.testing.assert_allclose(mirror.bid, [10_000 / 101, 78.125])
    np.testing.assert_allclose(mirror.ask, [10_000 / 99, 80.0])
    assert mirror.bid_size.tolist() == [5.0, 6.0]
    assert mirror.ask_size.tolist() == [1.0, 2.0]
    assert mirror.volume.tolist() == [3.0, 4.0]
    assert mirror.ts.tolist() == bars.ts.tolist()
    assert mirror_bars(bars, p0=200.0).close.tolist() == [400.0, 320.0]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), p0=st.floats(1.0, 1e5))
def test_mirror_bars_twice_is_the_original(seed, p0):
    bars = replace(random_bars(seed, 50), extra={})
    twice = mirror_bars(mirror_bars(bars, p0), p0)
    for name in ("open", "high", "low", "close", "bid", "ask", "bid_size", "ask_size"):
        np.testing.assert_allclose(getattr(twice, name), getattr(bars, name), rtol=1e-14)
    assert (mirror_bars(bars, p0).high >= mirror_bars(bars, p0).low).all()


def test_mirror_bars_refuses_columns_of_unknown_parity():
    bars = replace(random_bars(1, 5), extra={"ofi": np.zeros(5)})
    with pytest.raises(ValueError, match=r"extra columns \(ofi\)"):
        mirror_bars(bars)


def test_a_choice_of_features_has_its_own_map():
    perm, sign, _ = mirror_map(resolve(["lower_wick", "return_1", "upper_wick"]))
    assert perm.tolist() == [2, 1, 0]
    assert sign.tolist() == [1, -1, 1]
