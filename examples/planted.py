"""What the examples of other projects' agents share: the market, the test, and the lines that they print.

The market hides a drift that one of its 34 features shows; the best policy for it is known (`fox_env.oracle`), so what
an agent earned can be told as a share of what could be earned. The agents train on the first 70 % of the sessions and
are tested on the last 15 %; the settings in the examples were chosen on the part between.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import fox_env
from fox_env import BacktestReport, Market, metrics

BARS = 200_000
MIRROR = 0.5
"""Probability of a mirrored episode in training: what holds for long holds for short."""

Train = Callable[[Market, int, int], Any]
"""From the training part, the environment steps and a seed to a policy that `fox_env.evaluate` takes."""


def parts() -> tuple[Market, Market, Market]:
    """Training, validation and test part of the planted market."""
    return fox_env.synthetic_market("planted", BARS, seed=0).split(0.7, 0.15)


@dataclass(frozen=True)
class Standing:
    """What a policy earned in the test, after costs.

    Attributes:
        expected: expected net profit, luck taken out, as a share of the oracle's.
        realized: net profit as a share of the oracle's.
        t: net profit over its standard error by sessions; above 2 it beats flat, which earns nothing.
        p_random: how probable a lead over random as large as this is without one; NaN for random itself.
    """

    expected: float
    realized: float
    t: float
    p_random: float

    def __str__(self) -> str:
        p = "" if np.isnan(self.p_random) else f"  p against random {self.p_random:.4f}"
        return f"expected {self.expected:+.2f}, realized {self.realized:+.2f} of the oracle's, t {self.t:+.1f}{p}"


def standings(report: BacktestReport) -> dict[str, Standing]:
    """Where each policy of a report stands."""
    oracle, random = report.policies["oracle"], report.policies["random"]
    return {
        name: Standing(
            figures["expected_net_pnl_points"] / oracle["expected_net_pnl_points"],
            figures["net_pnl_points"] / oracle["net_pnl_points"],
            figures["edge_t"],
            p_no_lead(figures["session_pnl_usd"], random["session_pnl_usd"]) if name != "random" else np.nan,
        )
        for name, figures in report.policies.items()
    }


def p_no_lead(mine: list[float], other: list[float], resamples: int = 9_999) -> float:
    """One-sided p of the same sessions' profits: that `mine` leads `other` by chance, by paired block bootstrap."""
    lead = np.subtract(mine, other)
    rng = np.random.Generator(np.random.Philox(0))
    rows = metrics.stationary_bootstrap(len(lead), resamples, len(lead) ** (1 / 3), rng)
    by_chance = (lead - lead.mean())[rows].mean(axis=1)
    return (1 + np.count_nonzero(by_chance >= lead.mean())) / (1 + resamples)


def run(train: Train, steps: int) -> None:
    """Train, test and print; the whole of an example's command line.

    Args:
        train: of the example.
        steps: environment steps by default.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=steps, help="environment steps (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="file to save the test's report in, as JSON")
    args = parser.parse_args()
    training, _, test = parts()
    started = time.perf_counter()
    policy = train(training, args.steps, args.seed)
    print(f"trained on {args.steps:,} steps in {time.perf_counter() - started:.0f} s")
    report = fox_env.evaluate(policy, test)
    report.print()
    for name, standing in standings(report).items():
        print(f"{name:7}{standing}")
    if args.out:
        report.save(args.out)
