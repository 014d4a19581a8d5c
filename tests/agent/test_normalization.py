"""Reward scale and adaptive support."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fox_agent.normalization import AdaptiveSupport, RewardScale


def updated(kind: str, *batches) -> RewardScale:
    scale = RewardScale(kind)
    for batch in batches:
        scale.update(torch.as_tensor(batch))
    return scale


def test_the_market_scale_is_the_root_mean_square():
    # returns 3, 4, 0, 0 (in 1e-4): mean square (9 + 16) / 4 = 6.25, root 2.5
    scale = updated("market", [3e-4, 4e-4], [[0.0], [0.0]])
    assert scale.scale().item() == pytest.approx(2.5e-4)


def test_the_reward_scale_is_the_standard_deviation():
    # 1, 2, 3, 6: mean 3, variance (4 + 1 + 0 + 9) / 4 = 3.5
    assert updated("reward", [1.0, 2.0], [3.0, 6.0]).variance().item() == pytest.approx(3.5, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    offset=st.sampled_from([0.0, 1e-6, 1.0, -1e6, 1e9]),
    spread=st.sampled_from([1e-3, 1.0, 1e5]),
    seed=st.integers(0, 2**31),
)
def test_merged_moments_equal_those_of_all_values(sizes, offset, spread, seed):
    rng = np.random.default_rng(seed)
    batches = [offset + spread * rng.standard_normal(size) for size in sizes]
    everything = np.concatenate(batches)
    reward = updated("reward", *batches).variance().item()
    # The input's own rounding, offset · 2^-52, is the best that any order of summation can do.
    exact = np.var(everything.astype(np.longdouble))
    assert reward == pytest.approx(max(float(exact), 1e-8), rel=1e-9, abs=4 * abs(offset) * 2.0**-52 * spread)
    market = updated("market", *batches).variance().item()
    assert market == pytest.approx(np.mean(everything**2), rel=1e-9)


def test_rewards_count_from_the_first_step():
    # σ = 1e-3 is used as it is: neither a warm-up nor a floor of 0.01 hides it.
    scale = updated("reward", 1e-3 * torch.randn(4096, generator=torch.Generator().manual_seed(0)))
    assert scale.scale().item() == pytest.approx(1e-3, rel=0.05)


def test_constant_rewards_meet_the_floor():
    scale = updated("reward", [0.5, 0.5, 0.5])
    assert scale.variance().item() == pytest.approx(1e-8)
    assert scale.scale().item() == pytest.approx(1e-4)


def test_the_market_scale_has_no_floor_that_matters():
    assert updated("market", [5e-7, 5e-7]).scale().item() == pytest.approx(5e-7)
    assert updated("market", [0.0]).scale().item() == pytest.approx(1e-8)


@pytest.mark.parametrize("kind", ["market", "reward"])
def test_nothing_seen_scales_by_one(kind):
    scale = updated(kind, torch.empty(0))
    assert scale.scale() == 1


@pytest.mark.parametrize("kind", ["market", "reward"])
def test_a_reset_scale_is_a_fresh_one(kind):
    values = torch.rand(100, generator=torch.Generator().manual_seed(0))
    scale = updated(kind, 1000 * values)
    scale.jumped(2.0)
    scale.reset()
    fresh = RewardScale(kind)
    assert scale.state_dict() == fresh.state_dict()
    for each in (scale, fresh):
        each.update(values)
    assert scale.scale() == fresh.scale()
    assert not scale.jumped(2.0)


def test_jumps_are_measured_against_the_last_look():
    scale = updated("reward", [1.0, -1.0])  # variance 1
    assert not scale.jumped(2.0)
    scale.update(torch.tensor([1.2, -1.2]))  # (2 + 2.88) / 4 = 1.22
    assert not scale.jumped(2.0)
    scale.update(torch.tensor([3.0, -3.0]))  # (4.88 + 18) / 6 = 3.8, three times 1.22
    assert scale.jumped(2.0)
    assert not scale.jumped(2.0)
    scale.update(torch.zeros(20))  # 22.88 / 26 = 0.88
    assert scale.jumped(2.0)
    with pytest.raises(ValueError, match="ratio is 1"):
        scale.jumped(1.0)


@pytest.mark.parametrize("kind", ["market", "reward"])
def test_a_restored_scale_continues_bit_for_bit(kind, tmp_path):
    scale = updated(kind, [1.0, 2.0, 4.0])
    scale.jumped(2.0)
    torch.save(scale.state_dict(), tmp_path / "scale.pt")
    other = RewardScale(kind)
    other.load_state_dict(torch.load(tmp_path / "scale.pt", weights_only=True))
    for each in (scale, other):
        each.update(torch.tensor([0.1, 7.0, 9.0]))
    assert scale.state_dict() == other.state_dict()
    assert scale.jumped(3.0) == other.jumped(3.0)


def test_wrong_scales_are_refused():
    with pytest.raises(ValueError, match="kind is 'popart'"):
        RewardScale("popart")
    with pytest.raises(ValueError, match="kind 'market', expected 'reward'"):
        RewardScale("reward").load_state_dict(RewardScale("market").state_dict())
    with pytest.raises(ValueError, match="schema None"):
        RewardScale("reward").load_state_dict({})


# ---- support ----


def run(support: AdaptiveSupport, steps: int, outside: float, tau: float = 1.0) -> None:
    for _ in range(steps):
        support.step(torch.full((8,), outside), tau)


def test_initial_bounds():
    # 4 / √(1 − 0.95²) = 4 / √0.0975 = 12.81
    assert AdaptiveSupport("auto", gamma=0.95).bounds.tolist() == pytest.approx([-12.8103, 12.8103], abs=1e-4)
    assert AdaptiveSupport("auto", gamma=0.0, sigma=0.5).bounds.tolist() == [-2, 2]
    assert AdaptiveSupport("unit", gamma=0.99).bounds.tolist() == [-1, 1]


def test_bounds_grow_at_multiples_of_fifty_steps_only():
    support = AdaptiveSupport("unit", gamma=0.9)
    history = []
    for _ in range(160):
        run(support, 1, 0.02)
        history.append(support.bounds[1].item())
    assert history[48] == 1
    assert history[49] == history[98] == pytest.approx(1.1)
    assert history[99] == pytest.approx(1.21)
    assert history[159] == pytest.approx(1.331)
    assert support.bounds[0] == -support.bounds[1]


@pytest.mark.parametrize(("outside", "grown"), [(0.0, False), (0.0049, False), (0.0051, True), (1.0, True)])
def test_the_threshold_is_half_a_percent(outside, grown):
    support = AdaptiveSupport("unit", gamma=0.9)
    run(support, 50, outside)
    assert (support.bounds[1] > 1).item() == grown


def test_the_rule_reads_the_mean_of_its_fifty_steps():
    support = AdaptiveSupport("unit", gamma=0.9)
    run(support, 49, 0.0)
    run(support, 1, 0.3)  # 0.3 / 50 = 0.6 %
    assert support.bounds[1].item() == pytest.approx(1.1)
    run(support, 49, 0.0)
    run(support, 1, 0.2)  # 0.4 %: what the fifty steps before held doesn't count
    assert support.bounds[1].item() == pytest.approx(1.1)


def test_quiet_windows_do_not_add_up():
    support = AdaptiveSupport("unit", gamma=0.9)
    run(support, 500, 0.003)
    assert support.bounds[1] == 1


def test_growth_rests_until_the_target_network_has_followed():
    # τ = 0.005: 2.5 / τ = 500 steps between growths.
    support = AdaptiveSupport("unit", gamma=0.9)
    grown_at = []
    last = 1.0
    for step in range(1, 1201):
        run(support, 1, 0.5, tau=0.005)
        if support.bounds[1].item() != last:
            last = support.bounds[1].item()
            grown_at.append(step)
    assert grown_at == [50, 550, 1050]


def test_bounds_never_shrink():
    support = AdaptiveSupport("auto", gamma=0.9)
    generator = torch.Generator().manual_seed(0)
    last = support.bounds.clone()
    for _ in range(1000):
        support.step(0.02 * torch.rand(4, generator=generator).square(), 0.05)
        assert support.bounds[0] <= last[0]
        assert support.bounds[1] >= last[1]
        last = support.bounds.clone()


def test_bounds_keep_their_address():
    support = AdaptiveSupport("unit", gamma=0.9)
    address = support.bounds.data_ptr()
    run(support, 50, 1.0)
    support.load_state_dict(support.state_dict())
    assert support.bounds.data_ptr() == address


def test_bounds_reach_a_value_far_outside():
    # A one-state chain with true Q of 30: all mass lies outside ±1 until the bounds pass it; 1.1^36 = 30.9.
    support = AdaptiveSupport("unit", gamma=0.99)
    for _ in range(60 * 50):
        support.step((support.bounds[1] < 30).float(), 1.0)
    assert support.bounds[1].item() == pytest.approx(1.1**36, rel=1e-4)
    assert math.ceil(math.log(30, 1.1)) == 36


def test_a_restored_support_continues_bit_for_bit(tmp_path):
    support = AdaptiveSupport("auto", gamma=0.95)
    run(support, 75, 0.02, tau=0.05)
    torch.save(support.state_dict(), tmp_path / "support.pt")
    other = AdaptiveSupport("unit", gamma=0.5)
    other.load_state_dict(torch.load(tmp_path / "support.pt", weights_only=True))
    for each in (support, other):
        run(each, 80, 0.006, tau=0.05)
    for key, value in support.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(other.state_dict()[key])), key
    assert support.bounds[1].item() == pytest.approx(12.8103 * 1.1**3, rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"initial": "wide", "gamma": 0.9}, "initial is 'wide'"),
        ({"initial": "auto", "gamma": 1.0}, "gamma is 1.0"),
        ({"initial": "auto", "gamma": 0.9, "sigma": 0.0}, "sigma is 0.0"),
    ],
)
def test_wrong_supports_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        AdaptiveSupport(**arguments)
    with pytest.raises(ValueError, match="schema None"):
        AdaptiveSupport("unit", gamma=0.9).load_state_dict({})
