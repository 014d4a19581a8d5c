"""Statistics of session profits, from examples worked by hand and from the papers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fox_env import metrics

YEAR = math.sqrt(252)


def test_sharpe_by_hand() -> None:
    # Mean 2; squares about it 4 + 0 + 0 + 4 = 8, over m − 1 = 3: standard deviation √(8/3).
    pnl = np.array([0.0, 2.0, 2.0, 4.0])
    assert metrics.session_sharpe(pnl) == pytest.approx(2 / math.sqrt(8 / 3))
    assert metrics.sharpe(pnl) == pytest.approx(2 / math.sqrt(8 / 3) * YEAR)


def test_sharpe_of_rows_is_that_of_each() -> None:
    pnl = np.array([[0.0, 2.0, 2.0, 4.0], [1.0, 1.0, 1.0, 1.0]])
    assert metrics.session_sharpe(pnl) == pytest.approx([2 / math.sqrt(8 / 3), math.nan], nan_ok=True)


@pytest.mark.parametrize("pnl", [[], [5.0], [0.0, 0.0], [0.1, 0.1, 0.1], [1e9 + 0.1] * 7])
def test_sharpe_is_undefined_without_spread(pnl: list[float]) -> None:
    assert math.isnan(metrics.sharpe(np.array(pnl)))
    assert all(math.isnan(end) for end in metrics.sharpe_interval(np.array(pnl)))


def test_sortino_by_hand() -> None:
    # Mean 1; losses −1 and −2 of four sessions: downside deviation √((1 + 4) / 4).
    assert metrics.sortino(np.array([3.0, -1.0, -2.0, 4.0])) == pytest.approx(1 / math.sqrt(5 / 4) * YEAR)
    assert math.isnan(metrics.sortino(np.array([1.0, 2.0])))
    assert math.isnan(metrics.sortino(np.array([])))


def test_drawdown_by_hand() -> None:
    # Peaks 10 and 12; falls 10 → 4 is 6, 12 → 5 is 7.
    path = np.array([0.0, 10.0, 4.0, 12.0, 9.0, 5.0, 11.0])
    assert metrics.max_drawdown(path) == (7.0, 3, 5)
    assert metrics.max_drawdown(np.array([0.0, 1.0, 1.0])) == (0.0, 0, 0)
    assert metrics.max_drawdown(np.array([0.0, -3.0])) == (3.0, 0, 1)


def test_calmar_by_hand() -> None:
    # A mean of 2 a session is 504 a year, over a fall of 7: 72.
    assert metrics.calmar(np.array([0.0, 4.0]), 7.0) == pytest.approx(72.0)
    assert math.isnan(metrics.calmar(np.array([1.0]), 0.0))


def test_edge_by_hand() -> None:
    # Total 8; its standard error √4 · √(8/3).
    assert metrics.edge_t(np.array([0.0, 2.0, 2.0, 4.0])) == pytest.approx(8 / (2 * math.sqrt(8 / 3)))
    assert metrics.edge_t(np.zeros(9)) == 0.0
    assert metrics.edge_t(np.full(9, -2.0)) == -math.inf
    assert math.isnan(metrics.edge_t(np.array([5.0])))


def test_probabilistic_sharpe_of_the_paper() -> None:
    # Bailey and López de Prado 2012: 24 months, Sharpe 1.59 a year (0.458 a month); taken as normal, and as it was.
    assert metrics.probabilistic_sharpe(0.458, 24) == pytest.approx(0.982, abs=5e-4)
    assert metrics.probabilistic_sharpe(0.458, 24, -2.448, 10.164) == pytest.approx(0.913, abs=5e-4)


def test_deflated_sharpe_of_the_paper() -> None:
    # Bailey and López de Prado 2014: 2.5 a year, 1,250 days of 250 a year, skewness −3, kurtosis 10, variance of the
    # trials' annual ratios ½. The best of 100 is expected at 0.1132 a day.
    ratio, variance = 2.5 / math.sqrt(250), 0.5 / 250
    assert metrics.expected_best_sharpe(100, variance) == pytest.approx(0.1132, abs=5e-5)
    assert metrics.deflated_sharpe(ratio, 1_250, -3.0, 10.0, 100, variance) == pytest.approx(0.9004, abs=5e-5)
    # 46 trials would do for 95 %, and 88 were returns normal.
    assert metrics.deflated_sharpe(ratio, 1_250, -3.0, 10.0, 46, variance) == pytest.approx(0.9505, abs=5e-5)
    assert metrics.deflated_sharpe(ratio, 1_250, 0.0, 3.0, 88, variance) == pytest.approx(0.9505, abs=5e-5)


def test_one_trial_is_not_deflated() -> None:
    assert metrics.deflated_sharpe(0.1, 100, -1.0, 5.0) == metrics.probabilistic_sharpe(0.1, 100, -1.0, 5.0)
    with pytest.raises(ValueError, match="trials is 0"):
        metrics.deflated_sharpe(0.1, 100, trials=0)


def test_deflation_finds_the_luck_of_the_best_of_fifty() -> None:
    pnl = np.random.default_rng(1).standard_normal((200, 50, 250))
    best = metrics.session_sharpe(pnl).max(axis=1)
    assert np.mean([metrics.probabilistic_sharpe(ratio, 250) > 0.95 for ratio in best]) > 0.5
    assert np.mean([metrics.deflated_sharpe(ratio, 250, trials=50) > 0.95 for ratio in best]) <= 0.05


@given(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=30))
@settings(max_examples=50, deadline=None)
def test_moments_are_scipys(values: list[float]) -> None:
    pnl = np.array(values)
    if pnl.std() < 1e-6 * max(1.0, np.abs(pnl).max()):
        return
    assert metrics.shape_moments(pnl) == pytest.approx(
        (stats.skew(pnl), stats.kurtosis(pnl, fisher=False)), rel=1e-7, abs=1e-7
    )


def test_moments_of_a_still_series_are_normal() -> None:
    assert metrics.shape_moments(np.full(7, 0.1)) == (0.0, 3.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40))
@settings(max_examples=100, deadline=None)
def test_drawdown_is_the_largest_over_all_pairs(values: list[float]) -> None:
    path = np.array(values)
    depth, peak, trough = metrics.max_drawdown(path)
    assert depth == max(path[i] - path[j] for j in range(len(path)) for i in range(j + 1))
    assert peak <= trough
    assert path[peak] - path[trough] == depth


def test_bootstrap_blocks() -> None:
    rng = np.random.Generator(np.random.Philox(0))
    index = metrics.stationary_bootstrap(50, 4_000, 5.0, rng)
    assert index.shape == (4_000, 50)
    assert index.min() == 0
    assert index.max() == 49
    # A new block starts with probability 1/5, and then meets the next row by chance once in 50.
    follows = (index[:, 1:] == (index[:, :-1] + 1) % 50).mean()
    assert follows == pytest.approx(0.8 + 0.2 / 50, abs=0.004)
    # Every row is drawn alike: 4,000 expected each, blocks of 5 in the mean inflate the variance about ninefold.
    assert np.abs(np.bincount(index.ravel(), minlength=50) - 4_000).max() < 4 * 3 * math.sqrt(4_000)
    with_ones = metrics.stationary_bootstrap(50, 4_000, 1.0, rng)
    assert (with_ones[:, 1:] == (with_ones[:, :-1] + 1) % 50).mean() == pytest.approx(1 / 50, abs=0.002)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    inside = 0
    for sample in range(200):
        low, high = metrics.sharpe_interval(0.1 + rng.standard_normal(150), sample, 300)
        inside += low < 0.1 * YEAR < high
    # 95 % of 200 is 190; blocks of five sessions cost a little coverage.
    assert 176 <= inside <= 199


def test_interval_widens_where_sessions_cluster() -> None:
    shock = np.random.default_rng(4).standard_normal(600)
    pnl = np.convolve(shock, np.ones(5), "valid")  # each session shares four shocks with the next
    widths = [np.diff(metrics.sharpe_interval(pnl, 0, 1_000, mean_block=block))[0] for block in (1.0, 20.0)]
    assert widths[1] > 1.5 * widths[0]


def test_interval_is_the_seeds() -> None:
    pnl = np.random.default_rng(5).standard_normal(80)
    assert metrics.sharpe_interval(pnl, 7) == metrics.sharpe_interval(pnl, 7)
    assert metrics.sharpe_interval(pnl, 7) != metrics.sharpe_interval(pnl, 8)
