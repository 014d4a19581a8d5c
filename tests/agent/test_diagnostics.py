"""Statistics of Q by hand, means of an epoch, and the verdict of each case."""

from __future__ import annotations

import math

import pytest
import torch

from fox_agent.diagnostics import DEAD_GAP, SATURATED, Averages, q_statistics, verdict


def test_q_statistics_by_hand() -> None:
    # Atoms -1, 0, 1. In state 0 advantages of +-ln 2 on the top atom of direction's actions 0 and 1 give the
    # distributions (1, 1, 2) / 4, (1, 1, 1/2) / 2.5 and (1, 1, 1) / 3, so Q = .25, -.2, 0; the other branches are
    # uniform. In state 1 the value puts ln 2 on the top atom: every Q is .25.
    value, adv = torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2, 4, 3, 3, dtype=torch.float64)
    adv[0, 0, 0, 2], adv[0, 0, 1, 2] = math.log(2), -math.log(2)
    value[1, 2] = math.log(2)
    found = q_statistics(value, adv, torch.tensor([-1.0, 1.0], dtype=torch.float64))
    mean = 0.05 / 12  # over the actions of state 0
    gap = 0.25 - 0.05 / 3  # of direction in state 0
    # Mass on the end atoms of the greedy actions: 3/4 and three times 2/3; in state 1 four times 3/4.
    ends = (3 / 4 + 3 * 2 / 3 + 4 * 3 / 4) / 8
    expected = {
        "q_min": -0.2, "q_max": 0.25, "q_mean": (mean + 0.25) / 2, "q_gap": gap / 8, "q_gap_direction": gap / 2,
        "q_gap_magnitude": 0.0, "q_gap_order": 0.0, "q_gap_urgency": 0.0, "q_var": (0.25 - mean) ** 2 / 2,
        "end_atom_mass": ends,
    }  # fmt: skip
    assert {name: statistic.item() for name, statistic in found.items()} == pytest.approx(expected)
    assert all(statistic.ndim == 0 for statistic in found.values())


def test_branches_without_effect_do_not_count_in_the_gaps() -> None:
    # The state above twice: the greedy exposure 0 (Short, Small) sends an order in the first, none in the second.
    value, adv = torch.zeros(2, 3), torch.zeros(2, 4, 3, 3)
    adv[:, 0, 0, 2] = adv[:, 2, 1, 2] = math.log(2)
    send = torch.zeros(2, 9, dtype=torch.bool)
    send[0, 0] = True
    found = q_statistics(value, adv, torch.tensor([-1.0, 1.0]), send)
    # A logit of ln 2 for one action of three: after the mean is taken off, 2^(2/3) on its top atom against 2^(-1/3) on
    # the others'. The gap of direction is that of order, which counts in the first state only.
    up, down = 2 ** (2 / 3), 2 ** (-1 / 3)
    q = [(top - 1) / (top + 2) for top in (up, down, down)]
    gap = q[0] - sum(q) / 3
    assert found["q_gap_direction"].item() == pytest.approx(gap, rel=1e-5)
    assert found["q_gap_order"].item() == pytest.approx(gap, rel=1e-5)
    # Live: direction and magnitude twice, order and urgency once; direction twice and order once have the gap.
    assert found["q_gap"].item() == pytest.approx(3 * gap / 6, rel=1e-5)


def test_averages_are_means_since_the_last_read() -> None:
    averages = Averages()
    averages.add({"a": torch.tensor(1.0, requires_grad=True), "b": torch.tensor(5.0)})
    averages.add({"a": torch.tensor(2.0)})
    state = averages.state_dict()
    averages.add({"a": torch.tensor(6.0)})
    assert averages.read() == {"a": 3.0, "b": 5.0}
    assert averages.read() == {}
    averages.load_state_dict(state)
    averages.add({"a": torch.tensor(9.0)})
    assert averages.read() == {"a": 4.0, "b": 5.0}
    other = Averages()
    other.load_state_dict(state)
    assert other.read() == {"a": 1.5, "b": 5.0}


HEALTHY = {
    "loss": 1.0, "q_gap": 0.1, "q_var": 0.04, "valid_sharpe": 2.5, "valid_mean_abs_exposure": 0.5, "end_atom_mass": 1e-4
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, "healthy: the Q-gap is 0.50 of the spread of Q"),
        ({"loss": math.nan}, "exploding: a figure is not finite"),
        ({"grad_norm": math.inf}, "exploding: a figure is not finite"),
        ({"q_gap": 1e-4, "valid_sharpe": 2.5}, "mechanical bias: Sharpe 2.50 with a Q-gap of 1.0e-04"),
        ({"q_gap": 1e-4, "valid_sharpe": 1.0}, "dead advantage: the Q-gap is 5.0e-04 of the spread of Q"),
        ({"q_gap": 0.0, "q_var": 0.0, "valid_sharpe": 0.0}, "dead advantage: the Q-gap is 0.0e+00 of the spread of Q"),
        ({"q_gap": 9e-8, "q_var": 0.0, "valid_sharpe": 9.0}, "mechanical bias: Sharpe 9.00 with a Q-gap of 9.0e-08"),
        ({"q_gap": 1.01 * DEAD_GAP * 0.2}, "healthy: the Q-gap is 0.00 of the spread of Q"),
        (
            {"end_atom_mass": 1.01 * SATURATED},
            f"saturated support: {1.01 * SATURATED:.1%} of the mass on the end atoms",
        ),
        ({"end_atom_mass": SATURATED}, "healthy: the Q-gap is 0.50 of the spread of Q"),
        ({"valid_mean_abs_exposure": 0.009}, "collapsed to flat: mean exposure 0.009"),
        # The graver finding comes first.
        ({"loss": math.inf, "q_gap": 0.0}, "exploding: a figure is not finite"),
        ({"q_gap": 1e-5, "end_atom_mass": 0.5}, "mechanical bias: Sharpe 2.50 with a Q-gap of 1.0e-05"),
        (
            {"end_atom_mass": 0.5, "valid_mean_abs_exposure": 0.0},
            "saturated support: 50.0% of the mass on the end atoms",
        ),
    ],
)
def test_the_verdict_of_each_case(change: dict, expected: str) -> None:
    assert verdict(HEALTHY | change) == expected
