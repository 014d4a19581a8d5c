"""Statistics of a series of profits, one a session. Plain functions of arrays: no market, no policy.

Where a figure is not defined, as the Sharpe ratio of a series that never moves, it is NaN.
"""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np

SESSIONS_PER_YEAR = 252
"""Sessions that ratios are annualized by."""

_NORMAL = NormalDist()
_STILL = 1e-12  # a spread this small against the values is rounding


def session_sharpe(pnl: np.ndarray) -> np.ndarray | float:
    """Sharpe ratio a session, not annualized: mean over standard deviation (m − 1 in the denominator).

    Args:
        pnl: float64 [..., m], a profit a session in any unit; no risk-free rate, since futures are unfunded.

    Returns:
        float64 [...]; NaN for fewer than two sessions or a series that never moves.
    """
    pnl = np.asarray(pnl, np.float64)
    if pnl.shape[-1] < 2:
        return np.full(pnl.shape[:-1], np.nan)[()]
    spread = pnl.std(axis=-1, ddof=1)
    moves = spread > _STILL * np.abs(pnl).max(axis=-1)
    return np.where(moves, pnl.mean(axis=-1) / np.where(moves, spread, 1.0), np.nan)[()]


def sharpe(pnl: np.ndarray) -> np.ndarray | float:
    """Annualized Sharpe ratio: `session_sharpe` × √252."""
    return session_sharpe(pnl) * math.sqrt(SESSIONS_PER_YEAR)


def sortino(pnl: np.ndarray) -> float:
    """Annualized Sortino ratio about a target of 0: mean over √(mean of min(pnl, 0)²), × √252.

    The downside deviation is taken over all sessions, not the losing ones (Sortino and Price 1994). NaN without a loss.
    """
    pnl = np.asarray(pnl, np.float64)
    if not len(pnl):
        return math.nan
    downside = math.sqrt(np.mean(np.square(np.minimum(pnl, 0.0))))
    return math.nan if downside == 0.0 else float(pnl.mean()) / downside * math.sqrt(SESSIONS_PER_YEAR)


def calmar(pnl: np.ndarray, drawdown: float) -> float:
    """Mean profit of 252 sessions over the largest drawdown (positive, in the unit of `pnl`); NaN without one."""
    return math.nan if not len(pnl) or drawdown <= 0.0 else float(np.mean(pnl)) * SESSIONS_PER_YEAR / drawdown


def max_drawdown(path: np.ndarray) -> tuple[float, int, int]:
    """Largest fall of an account from an earlier peak.

    Args:
        path: float64 [k], the account at k instants, the first one included, k ≥ 1.

    Returns:
        ``(depth ≥ 0, index of the peak, index of the trough)``, the first of equals; ``(0.0, 0, 0)`` if it never falls.
    """
    path = np.asarray(path, np.float64)
    fall = np.maximum.accumulate(path) - path
    trough = int(fall.argmax())
    depth = float(fall[trough])
    return (depth, int(path[: trough + 1].argmax()), trough) if depth > 0.0 else (0.0, 0, 0)


def edge_t(pnl: np.ndarray) -> float:
    """Total profit over its own standard error, sessions taken as independent: session Sharpe × √m.

    0 for a series of zeros, which has no edge; ±inf for one that never moves from another value; NaN for fewer than two
    sessions.
    """
    pnl = np.asarray(pnl, np.float64)
    if len(pnl) < 2:
        return math.nan
    ratio = float(session_sharpe(pnl))
    if math.isnan(ratio):
        mean = float(pnl.mean())
        return math.copysign(math.inf, mean) if mean else 0.0
    return ratio * math.sqrt(len(pnl))


def shape_moments(pnl: np.ndarray) -> tuple[float, float]:
    """Skewness and kurtosis (3 for a normal) of a series, moments over m; ``(0, 3)`` for one that never moves."""
    pnl = np.asarray(pnl, np.float64)
    apart = pnl - pnl.mean()
    spread = math.sqrt(np.mean(apart**2))
    if spread <= _STILL * np.abs(pnl).max():
        return 0.0, 3.0
    scaled = apart / spread
    return float(np.mean(scaled**3)), float(np.mean(scaled**4))


def probabilistic_sharpe(
    ratio: float, observations: int, skewness: float = 0.0, kurtosis: float = 3.0, benchmark: float = 0.0
) -> float:
    """Probability that the true Sharpe ratio exceeds `benchmark`, given an estimate.

    Bailey and López de Prado 2012, "The Sharpe Ratio Efficient Frontier":
    PSR = Φ((SR − SR*)·√(n − 1) / √(1 − γ₃·SR + (γ₄ − 1)/4 · SR²)).

    Args:
        ratio, benchmark: SR and SR*, an observation, not annualized.
        observations: n, at least 2.
        skewness, kurtosis: γ₃ and γ₄ of the observations (0 and 3 for a normal).
    """
    variance = 1.0 - skewness * ratio + (kurtosis - 1.0) / 4.0 * ratio**2
    if observations < 2 or not variance > 0.0:
        return math.nan
    return _NORMAL.cdf((ratio - benchmark) * math.sqrt((observations - 1) / variance))


def expected_best_sharpe(trials: int, variance: float) -> float:
    """Expected best Sharpe ratio of independent trials without skill, whose estimates have that variance; 0 for one.

    Raises:
        ValueError: fewer than one trial, or a negative variance.
    """
    if trials < 1 or not variance >= 0.0:
        raise ValueError(f"trials is {trials} and variance {variance}, expected at least 1 and at least 0")
    if trials == 1:
        return 0.0
    quantiles = (_NORMAL.inv_cdf(1.0 - 1.0 / trials), _NORMAL.inv_cdf(1.0 - 1.0 / (trials * math.e)))
    return math.sqrt(variance) * ((1.0 - np.euler_gamma) * quantiles[0] + np.euler_gamma * quantiles[1])


def deflated_sharpe(
    ratio: float,
    observations: int,
    skewness: float = 0.0,
    kurtosis: float = 3.0,
    trials: int = 1,
    variance: float | None = None,
) -> float:
    """Probability that the true Sharpe ratio of the best of several trials is positive.

    Bailey and López de Prado 2014, "The Deflated Sharpe Ratio": the probabilistic Sharpe ratio against
    `expected_best_sharpe`.

    Args:
        ratio, observations, skewness, kurtosis: of the best trial, as `probabilistic_sharpe` takes them.
        trials: how many were tried, independent ones.
        variance: of the trials' Sharpe ratios; None takes 1 / (n − 1), that of estimates without skill.
    """
    if observations < 2:
        return math.nan
    variance = 1.0 / (observations - 1) if variance is None else variance
    return probabilistic_sharpe(ratio, observations, skewness, kurtosis, expected_best_sharpe(trials, variance))


def stationary_bootstrap(observations: int, resamples: int, mean_block: float, rng: np.random.Generator) -> np.ndarray:
    """Rows of a series, resampled in blocks of geometric length that wrap around (Politis and Romano 1994).

    Args:
        observations: m.
        resamples: R.
        mean_block: mean length of a block, at least 1; 1 draws every row on its own.
        rng: the generator.

    Returns:
        int64 [R, m].
    """
    shape = (resamples, observations)
    first = rng.integers(observations, size=shape)
    begins = rng.random(shape) < 1.0 / mean_block
    begins[:, 0] = True
    column = np.arange(observations)
    begun = np.maximum.accumulate(np.where(begins, column, 0), axis=1)
    return (np.take_along_axis(first, begun, axis=1) + (column - begun)) % observations


def sharpe_interval(
    pnl: np.ndarray, seed: int = 0, resamples: int = 1_000, confidence: float = 0.95, mean_block: float | None = None
) -> tuple[float, float]:
    """Percentile interval of the annualized Sharpe ratio under the stationary bootstrap.

    Args:
        pnl: float64 [m], a profit a session.
        seed: of the resampling, zero or positive.
        resamples: draws.
        confidence: share of them inside the interval.
        mean_block: sessions a block in the mean; None takes m^(1/3), at least 1.

    Returns:
        ``(low, high)``, NaN where the ratio is not defined.
    """
    pnl = np.asarray(pnl, np.float64)
    if np.isnan(session_sharpe(pnl)):
        return math.nan, math.nan
    rng = np.random.Generator(np.random.Philox(seed))
    block = max(1.0, len(pnl) ** (1 / 3)) if mean_block is None else mean_block
    ratios = sharpe(pnl[stationary_bootstrap(len(pnl), resamples, block, rng)])
    ratios = ratios[~np.isnan(ratios)]
    if not len(ratios):
        return math.nan, math.nan
    tail = 50.0 * (1.0 - confidence)
    low, high = np.percentile(ratios, (tail, 100.0 - tail))
    return float(low), float(high)
