"""Exploration of the four branches and its schedules."""

from __future__ import annotations

import math

import pytest
import torch

from fox_agent.exploration import Schedule, select_actions


def select(q_BKM, epsilon, *, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return select_actions(q_BKM, epsilon=torch.tensor(epsilon), generator=generator, **options)


def greedy_at(*best: int, batch: int) -> torch.Tensor:
    """Q that is 1 at the given action of each branch and 0 elsewhere."""
    return torch.nn.functional.one_hot(torch.tensor(best), 3).float().expand(batch, 4, 3)


def within_five_sigma(count: int, total: int, probability: float) -> bool:
    return abs(count - total * probability) <= 5 * math.sqrt(total * probability * (1 - probability))


def test_greedy_actions_are_each_branchs_own_best():
    action_BK, non_greedy = select(greedy_at(2, 0, 1, 2, batch=5), 0.0)
    assert action_BK.dtype == torch.int64
    assert action_BK.tolist() == [[2, 0, 1, 2]] * 5
    assert non_greedy == 0


def test_of_equal_values_the_first_is_greedy():
    q_BKM = torch.tensor([[[1.0, 1, 1], [0, 1, 1], [1, 0, 1], [0, 0, 0]]])
    assert select(q_BKM, 0.0)[0].tolist() == [[0, 1, 0, 0]]


def test_full_exploration_of_all_branches_covers_every_combination_evenly():
    total = 81_000
    action_BK, _ = select(greedy_at(2, 2, 0, 1, batch=total), 1.0, single_branch_share=0.0)
    combination_B = (action_BK * torch.tensor([27, 9, 3, 1])).sum(1)
    counts = torch.bincount(combination_B, minlength=81)
    assert len(counts) == 81
    assert all(within_five_sigma(count, total, 1 / 81) for count in counts.tolist())


def test_single_branch_exploration_changes_one_branch_at_most():
    total = 60_000
    best = torch.tensor([2, 2, 0, 1])
    action_BK, non_greedy = select(greedy_at(*best.tolist(), batch=total), 1.0, single_branch_share=1.0)
    changed_BK = action_BK != best
    assert changed_BK.sum(1).max() == 1
    # A branch is chosen with 1/4, and its new value differs from the greedy one with 2/3.
    for k in range(4):
        assert within_five_sigma(int(changed_BK[:, k].sum()), total, 1 / 6)
        for value in range(3):
            if value != best[k]:
                assert within_five_sigma(int((action_BK[:, k] == value).sum()), total, 1 / 12)
    assert non_greedy.item() == pytest.approx(changed_BK.any(1).float().mean().item())


def test_rate_of_non_greedy_actions_at_the_default_share():
    # ε · (½ · 2/3 + ½ · (1 − 3⁻⁴)) = 0.3 · (1/3 + 40/81)
    total = 100_000
    _, non_greedy = select(greedy_at(0, 1, 2, 0, batch=total), 0.3)
    assert within_five_sigma(round(non_greedy.item() * total), total, 0.3 * (1 / 3 + 40 / 81))


def test_boltzmann_draws_follow_the_softmax():
    total = 90_000
    q_KM = torch.tensor([[0.0, 0.1, 0.3], [0.2, 0.2, 0.2], [1.0, 0.0, 0.0], [-5.0, -5.1, -4.9]])
    action_BK, _ = select(q_KM.expand(total, 4, 3), 1.0, temperature=0.2, single_branch_share=0.0)
    probability_KM = torch.softmax(q_KM / 0.2, dim=1)
    for k in range(4):
        for value in range(3):
            count = int((action_BK[:, k] == value).sum())
            assert within_five_sigma(count, total, probability_KM[k, value].item())


def test_rows_explore_independently_of_their_neighbours():
    total = 40_000
    action_BK, _ = select(greedy_at(0, 0, 0, 0, batch=total), 0.5, single_branch_share=0.0)
    moved_B = action_BK.any(1)
    p = 0.5 * (1 - 3**-4)
    assert within_five_sigma(int((moved_B[1:] & moved_B[:-1]).sum()), total - 1, p * p)


def test_the_generator_alone_decides_and_advances_alike_for_any_epsilon():
    q_BKM = torch.randn(50, 4, 3, generator=torch.Generator().manual_seed(1))
    first, again, other = (select(q_BKM, 0.5, seed=seed)[0] for seed in (7, 7, 8))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    states = []
    for epsilon in (0.0, 1.0):
        generator = torch.Generator().manual_seed(3)
        select_actions(q_BKM, epsilon=torch.tensor(epsilon), generator=generator)
        states.append(generator.get_state())
    assert torch.equal(*states)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"single_branch_share": 1.5}, "single_branch_share is 1.5"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        select(torch.zeros(2, 4, 3), 0.1, **options)


def test_a_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"q_BKM has shape \(4, 3\)"):
        select(torch.zeros(4, 3), 0.1)


def test_schedules_are_linear_and_then_constant():
    schedule = Schedule(1.0, 0.1, 1500)
    assert schedule.value(0) == 1.0
    assert schedule.value(500) == pytest.approx(0.7)
    assert schedule.value(1500) == schedule.value(10**9) == 0.1
    assert Schedule(0.4, 1.0, 0).value(0) == 1.0
    with pytest.raises(ValueError, match="steps is -1"):
        Schedule(0.0, 1.0, -1)
