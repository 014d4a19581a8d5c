"""The reward of a step: the return on full exposure, and optional shaping terms whose coefficients default to 0.

Plain scalar functions in the subset of Python that numba compiles; back-tests never call `shaping_terms`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

SHAPING_TERMS = ("entropy", "hindsight", "micro", "drawdown")


class Shaping(NamedTuple):
    """Coefficients of the shaping terms, all dimensionless.

    entropy: of the growth of the entropy of the episode's short/flat/long visits, in units of ln 3. It telescopes, so
        a whole episode earns at most the coefficient; it works against a collapse to Flat.
    hindsight: of position × the move over the next `hindsight_lookahead` bars, as a return on full exposure
        (Sun et al. 2022, arXiv 2201.09058, with the market's end as its limit). For training only: it sees the future.
    micro: of the step's gross move in units of the recent volatility.
    drawdown: of the change of the drawdown over initial equity, subtracted; it telescopes as well.
    """

    entropy: float = 0.0
    hindsight: float = 0.0
    micro: float = 0.0
    drawdown: float = 0.0


def base_reward(net: float, close: float, max_contracts: int) -> float:
    """Net points of the step over max_contracts × the true close: a return on full exposure."""
    return net / (max_contracts * close)


def visit_entropy(short: int, flat: int, long: int) -> float:
    """Entropy of the visit counts in units of ln 3, in [0, 1]; 0 without visits."""
    total = short + flat + long
    entropy = 0.0
    for count in (short, flat, long):
        if count > 0:
            entropy -= count / total * math.log(count / total)
    return entropy / math.log(3.0)


def shaping_terms(
    shaping: Shaping,
    short: int,
    flat: int,
    long: int,
    position: int,
    ahead: float,
    gross: float,
    volatility: float,
    close: float,
    max_contracts: int,
    drawdown_change: float,
) -> tuple[float, float, float, float]:
    """The four terms of a step, in the order of `SHAPING_TERMS`, already multiplied by their coefficients.

    Args:
        shaping: the coefficients.
        short, flat, long: visits of the episode before this step.
        position: contracts at the end of the step.
        ahead: points from close t+1 to the close `hindsight_lookahead` bars later.
        gross: gross points of the step.
        volatility: recent root mean square of close changes about zero, in points.
        close: true close t in points.
        max_contracts: the largest position.
        drawdown_change: change of the drawdown in this step over initial equity.
    """
    before = visit_entropy(short, flat, long)
    after = visit_entropy(short + (position < 0), flat + (position == 0), long + (position > 0))
    return (
        shaping.entropy * (after - before),
        shaping.hindsight * position * ahead / (max_contracts * close),
        shaping.micro * gross / (max_contracts * volatility),
        -shaping.drawdown * drawdown_change,
    )
