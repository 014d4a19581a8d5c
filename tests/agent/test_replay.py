"""The sum tree, the priorities, TorchRL's drop-in sampler and the compact buffer."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSampler, ReplayBuffer, TensorDictReplayBuffer

from fox_agent.ops import priority as tree_ops
from fox_agent.replay import CudaPrioritizedSampler, Priorities, TransitionReplay, pack_flags, unpack_flags

CPU = torch.device("cpu")


def draws(count: int, seed: int = 0) -> torch.Tensor:
    return tree_ops.uniform(count, generator=torch.Generator().manual_seed(seed), device=CPU, stratified=False)


# ---- tree ----


@pytest.mark.parametrize(
    ("capacity", "sizes"), [(1, (32, 1)), (32, (32, 1)), (33, (64, 32, 1)), (1025, (1056, 64, 32, 1))]
)
def test_levels_are_padded_to_whole_nodes(capacity, sizes):
    assert tree_ops.level_sizes(capacity) == sizes


def test_levels_hold_a_power_of_two_without_waste():
    assert tree_ops.level_sizes(2**20) == (2**20, 2**15, 2**10, 32, 1)


def test_draws_invert_the_cumulative_sum():
    # Leaves 1, 0, 2, 5: the cumulative shares end at 1/8, 1/8, 3/8, 1.
    tree = tree_ops.build(torch.tensor([1.0, 0.0, 2.0, 5.0], dtype=torch.float64))
    u_B = torch.tensor([0.0, 0.124, 0.125, 0.374, 0.375, 1 - 2**-53], dtype=torch.float64)
    assert tree[-1] == 8
    assert tree_ops.sample(tree, 4, u_B).tolist() == [0, 0, 2, 2, 3, 3]


@pytest.mark.parametrize("capacity", [3, 100, 1000, 1023, 1024, 1025])
def test_sampling_frequencies_are_the_priorities(capacity):
    generator = torch.Generator().manual_seed(capacity)
    leaf_N = torch.rand(capacity, dtype=torch.float64, generator=generator) + 0.05
    leaf_N[1] = 0
    tree = tree_ops.build(leaf_N)
    count = 1_000_000
    observed = torch.bincount(tree_ops.sample(tree, capacity, draws(count)), minlength=capacity).numpy()
    assert observed[1] == 0
    keep = np.arange(capacity) != 1
    expected = (leaf_N / leaf_N.sum()).numpy()[keep] * count
    assert stats.chisquare(observed[keep], expected).pvalue > 1e-4


def test_zero_leaves_are_never_drawn():
    leaf_N = torch.zeros(5000, dtype=torch.float64)
    leaf_N[::7] = 10.0 ** torch.randint(-12, 12, (715,), generator=torch.Generator().manual_seed(0)).double()
    tree = tree_ops.build(leaf_N)
    edges = leaf_N.cumsum(0) / leaf_N.sum()  # the draws where rounding could step over a border
    u_B = torch.cat((draws(1_000_000), edges.clamp(max=1 - 2**-53), torch.tensor([0.0, 1 - 2**-53]).double()))
    assert (leaf_N[tree_ops.sample(tree, 5000, u_B)] > 0).all()
    assert (leaf_N[tree_ops._sample_torch(tree, tree_ops.level_sizes(5000), u_B[-6000:])] > 0).all()


def test_a_draw_at_the_total_takes_the_last_positive_leaf():
    tree = tree_ops.build(torch.tensor([0.0, 3.0, 0.0, 0.0], dtype=torch.float64))
    assert tree_ops.sample(tree, 4, torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)).tolist() == [1, 1, 1]


def test_the_last_of_equal_indices_wins():
    leaf_N = torch.ones(40, dtype=torch.float64)
    tree = tree_ops.build(leaf_N)
    tree_ops.update(
        tree, 40, torch.tensor([7, 35, 7, 7, 35]), torch.tensor([9.0, 8.0, 7.0, 6.0, 5.0], dtype=torch.float64)
    )
    assert tree[7] == 6
    assert tree[35] == 5
    assert tree[-1] == 38 + 6 + 5


@settings(max_examples=60, deadline=None)
@given(capacity=st.integers(1, 3000), batch=st.integers(1, 200), seed=st.integers(0, 2**31))
def test_both_implementations_agree_bit_for_bit(capacity, batch, seed):
    generator = torch.Generator().manual_seed(seed)
    leaf_N = torch.rand(capacity, dtype=torch.float64, generator=generator) ** 20
    index_B = torch.randint(capacity, (batch,), generator=generator)
    value_B = torch.rand(batch, dtype=torch.float64, generator=generator) ** 20
    sizes = tree_ops.level_sizes(capacity)
    tree = tree_ops.build(leaf_N)
    other = tree.clone()
    tree_ops.update(tree, capacity, index_B, value_B)
    other[index_B] = value_B[tree_ops._last_of_equals(index_B)]
    tree_ops._update_torch(other, sizes, index_B)
    assert torch.equal(tree, other)
    for index, value in zip(index_B.tolist(), value_B.tolist(), strict=True):
        leaf_N[index] = value
    assert torch.equal(tree, tree_ops.build(leaf_N))
    u_B = draws(batch, seed)
    assert torch.equal(tree_ops.sample(tree, capacity, u_B), tree_ops._sample_torch(tree, sizes, u_B))


def test_the_root_is_the_sum_after_many_updates():
    capacity = 1025
    generator = torch.Generator().manual_seed(0)
    tree = tree_ops.build(torch.rand(capacity, dtype=torch.float64, generator=generator))
    for _ in range(1000):  # 10^5 leaf updates over 24 orders of magnitude
        index_B = torch.randint(capacity, (100,), generator=generator)
        value_B = 10 ** (24 * torch.rand(100, dtype=torch.float64, generator=generator) - 18)
        tree_ops.update(tree, capacity, index_B, value_B)
    tree_ops.update(tree, capacity, torch.arange(capacity), torch.rand(capacity, dtype=torch.float64))
    assert abs(tree[-1] - tree[:capacity].sum()) < 1e-9


def test_stratified_draws_lie_one_in_each_stratum():
    u_B = tree_ops.uniform(8, generator=torch.Generator().manual_seed(3), device=CPU, stratified=True)
    assert (u_B * 8).floor().tolist() == list(range(8))


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        ([0.0], [1.0], "index_B"),
        ([[0]], [[1.0]], "index_B"),
        ([0, 1], [1.0], "value_B"),
        ([3], [1.0], r"spans 3 to 3, expected \[0, 3\)"),
        ([-1], [1.0], r"spans -1 to -1, expected \[0, 3\)"),
    ],
)
def test_wrong_updates_are_refused(index, value, message):
    tree = tree_ops.build(torch.ones(3, dtype=torch.float64))
    with pytest.raises(ValueError, match=message):
        tree_ops.update(tree, 3, torch.tensor(index), torch.tensor(value, dtype=torch.float64))


def test_wrong_trees_are_refused():
    with pytest.raises(ValueError, match="expected a float64 vector"):
        tree_ops.build(torch.ones(3))
    with pytest.raises(ValueError, match="for 40 leaves"):
        tree_ops.sample(tree_ops.build(torch.ones(3, dtype=torch.float64)), 40, draws(2))
    with pytest.raises(ValueError, match="capacity is 0"):
        tree_ops.level_sizes(0)


# ---- priorities ----


def make_priorities(capacity=100, *, alpha=0.6, beta=0.4, eps=1e-6, max_within_buffer=True) -> Priorities:
    return Priorities(capacity, alpha=alpha, beta=beta, eps=eps, device=CPU, max_within_buffer=max_within_buffer)


def test_a_new_leaf_is_the_largest_raw_priority_transformed_once():
    core = make_priorities(alpha=0.5, eps=0.01)
    core.insert(torch.arange(3))
    assert core.leaf_C[:3].tolist() == pytest.approx([1.01**0.5] * 3, rel=1e-12)
    core.update(torch.tensor([0, 1, 2]), torch.tensor([4.0, 2.0, 0.5]))
    core.insert(torch.tensor([3]))
    assert core.leaf_C[3].item() == pytest.approx(4.01**0.5, rel=1e-12)
    assert core.leaf_C[4:].eq(0).all()


def test_the_largest_priority_is_that_of_the_items_stored():
    for within, expected in ((True, 2.0), (False, 4.0)):
        core = make_priorities(alpha=1.0, eps=0.0, max_within_buffer=within)
        core.insert(torch.arange(3))
        core.update(torch.tensor([0, 1, 2]), torch.tensor([4.0, 2.0, 0.5]))
        core.update(torch.tensor([0]), torch.tensor([0.25]))
        core.insert(torch.tensor([3]))
        assert core.leaf_C[3] == expected


def test_a_default_nobody_measured_does_not_outlive_the_first_update():
    # Ten items wait at 1; the first errors are 1e-3, so the others are worth 1e-3 as well.
    core = make_priorities(alpha=1.0, eps=0.0)
    core.insert(torch.arange(10))
    core.update(torch.tensor([0, 1]), torch.tensor([1e-3, 5e-4]))
    assert core.leaf_C[:10].tolist() == pytest.approx([1e-3, 5e-4] + [1e-3] * 8, rel=1e-6)


def test_a_priority_that_was_given_is_not_revalued():
    # Ones that were measured are known, unlike the default of 1.
    core = make_priorities(alpha=1.0, eps=0.0, max_within_buffer=False)
    core.insert(torch.arange(4))
    core.update(torch.arange(4), torch.ones(4))
    core.update(torch.tensor([2]), torch.tensor([0.1]))
    core.insert(torch.tensor([4]))
    assert core.leaf_C[:5].tolist() == pytest.approx([1, 1, 0.1, 1, 1])


@pytest.mark.parametrize("beta", [0.4, 1.0])
def test_weights_of_first_visits_are_not_tiny_when_errors_are(beta):
    core = make_priorities(1000, beta=beta)
    visited = torch.zeros(1000, dtype=torch.bool)
    generator = torch.Generator().manual_seed(0)
    lowest = 1.0
    for step in range(300):
        index_B = torch.arange(step * 10, step * 10 + 10) % 1000
        core.insert(index_B)
        visited[index_B] = False
        index_B, weight_B = core.sample(draws(32, seed=step))
        assert weight_B.max() == 1
        lowest = min(lowest, weight_B[~visited[index_B]].min().item() if (~visited[index_B]).any() else 1.0)
        visited[index_B] = True
        core.update(index_B, 1e-3 * (0.5 + torch.rand(32, generator=generator)))
    assert 0.1 <= lowest < 1


def test_bad_priorities_are_replaced_and_counted():
    core = make_priorities(alpha=1.0, eps=0.0)
    core.insert(torch.arange(6))
    core.update(torch.arange(2), torch.tensor([3.0, 2.0]))
    core.update(torch.arange(1, 6), torch.tensor([float("nan"), float("inf"), -float("inf"), -2.5, 0.5]))
    assert core.leaf_C[:6].tolist() == [3, 3, 3, 3, 2.5, 0.5]
    assert core.replaced == 4
    assert core.total == 15
    core.update(torch.tensor([0]), torch.tensor([float("nan")]))
    core.insert(torch.tensor([7]))
    assert core.leaf_C[7] == 3


def test_a_first_update_of_nothing_but_nan_teaches_nothing():
    core = make_priorities(alpha=1.0, eps=0.0, max_within_buffer=False)
    core.insert(torch.arange(4))
    core.update(torch.tensor([0]), torch.tensor([float("nan")]))
    core.update(torch.tensor([0]), torch.tensor([1e-3]))
    core.insert(torch.tensor([5]))
    assert core.leaf_C[5].item() == pytest.approx(1e-3, rel=1e-6)


def test_rows_with_a_negative_index_are_ignored():
    core = make_priorities(32, alpha=1.0, eps=0.5)
    core.insert(torch.tensor([-1, 4]))
    assert core.total == 1.5
    core.update(torch.tensor([-1, -1]), torch.tensor([9.0, float("nan")]))
    core.insert(torch.tensor([-1, 5]))
    assert core.total == 3
    core.update(torch.tensor([-1, 4, -1]), torch.tensor([9.0, 2.0, float("nan")]))
    core.insert(torch.tensor([6]))
    assert core.leaf_C[4:7].tolist() == [2.5, 1.5, 2.5]
    assert core.total == 6.5
    assert core.replaced == 0


def test_changing_alpha_equals_a_rebuild():
    raw_B = torch.rand(50, generator=torch.Generator().manual_seed(1))
    cores = [make_priorities(alpha=alpha) for alpha in (0.0, 0.9)]
    for core in cores:
        core.insert(torch.arange(60))
        core.update(torch.arange(50), raw_B)
    cores[0].set_alpha(0.9)
    assert torch.equal(cores[0]._tree, cores[1]._tree)
    assert cores[0].leaf_C[60:].eq(0).all()


def test_an_alpha_of_zero_samples_uniformly():
    core = make_priorities(alpha=0.0)
    core.insert(torch.arange(60))
    core.update(torch.arange(30), torch.logspace(-6, 6, 30))
    assert core.leaf_C[:60].eq(1).all()
    index_B, weight_B = core.sample(draws(1000))
    assert weight_B.eq(1).all()
    assert index_B.max() < 60


def test_weights_are_the_formula_divided_by_the_largest():
    core = make_priorities(alpha=0.7, beta=0.5, eps=0.1)
    raw_B = torch.tensor([0.2, 1.0, 4.0])
    core.insert(torch.arange(3))
    core.update(torch.arange(3), raw_B)
    index_B, weight_B = core.sample(draws(64))
    probability_3 = (raw_B.double() + 0.1) ** 0.7
    probability_3 /= probability_3.sum()
    expected_B = (3 * probability_3[index_B]) ** -0.5
    assert index_B.unique().tolist() == [0, 1, 2]
    torch.testing.assert_close(weight_B, expected_B / expected_B.max(), rtol=1e-6, atol=0)


def test_the_priority_feedback_loop_is_bounded():
    # One sample's loss is 1e4 for ever, clamped at 50 in the priority: neither priority nor weighted loss runs away.
    core = make_priorities(64, beta=1.0)
    core.insert(torch.arange(64))
    for step in range(100):
        index_B, weight_B = core.sample(draws(16, seed=step))
        loss_B = torch.where(index_B == 3, 1e4, 1.0)
        core.update(index_B, loss_B.clamp(max=50.0))
        assert (weight_B * loss_B).mean() <= 1e4
    assert core._raw_C.max() <= 50
    assert core.leaf_C.max() <= (50 + 1e-6) ** 0.6


def test_sampling_from_nothing_is_refused():
    with pytest.raises(ValueError, match="sum of the priorities is 0"):
        make_priorities().sample(draws(3))


@pytest.mark.parametrize("name", ["alpha", "beta", "eps"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_exponents_out_of_range_are_refused(name, value):
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        make_priorities(**{name: value})


def test_priorities_continue_bit_for_bit_from_their_state(tmp_path):
    core = make_priorities(257)
    core.insert(torch.arange(200))
    core.update(torch.arange(150), torch.rand(150, generator=torch.Generator().manual_seed(2)))
    torch.save(core.state_dict(), tmp_path / "state.pt")
    other = make_priorities(257, alpha=0.1, beta=0.9, eps=0.5)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for each in (core, other):
        each.insert(torch.arange(190, 257))
        index_B, each.weight_B = each.sample(draws(64))
        each.update(index_B, torch.linspace(0, 3, 64))
    assert torch.equal(core.weight_B, other.weight_B)
    assert torch.equal(core._tree, other._tree)
    with pytest.raises(ValueError, match="capacity 257, expected 100"):
        make_priorities(100).load_state_dict(core.state_dict())
    with pytest.raises(ValueError, match="schema None"):
        make_priorities(257).load_state_dict({})


# ---- TorchRL ----


def make_buffer(capacity=100, *, batch_size=32, ndim=1, priority_key="td_error", **options):
    sampler = CudaPrioritizedSampler(capacity, **{"alpha": 0.7, "beta": 0.5, "eps": 0.01, **options})
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(capacity, ndim=ndim),
        sampler=sampler,
        batch_size=batch_size,
        priority_key=priority_key,
        generator=torch.Generator().manual_seed(0),
    )
    return buffer, sampler


def rows(count, start=0):
    return TensorDict({"obs": torch.arange(start, start + count).float()}, [count])


def test_the_sampler_builds_no_cpp_tree_and_is_a_prioritized_sampler():
    sampler = CudaPrioritizedSampler(10, alpha=0.5, beta=0.5)
    assert isinstance(sampler, PrioritizedSampler)
    assert not any("SegmentTree" in type(value).__name__ for value in vars(sampler).values())


def test_extending_without_priorities_gives_the_default_once():
    buffer, sampler = make_buffer()
    buffer.extend(rows(40))
    assert sampler.leaves[:40].tolist() == pytest.approx([1.01**0.7] * 40, rel=1e-12)
    assert sampler.leaves[40:].eq(0).all()
    assert sampler.default_priority == 1.0


def test_update_tensordict_priority_reaches_the_leaves():
    buffer, sampler = make_buffer()
    buffer.extend(rows(40))
    batch = buffer.sample()
    assert batch["priority_weight"].dtype == torch.float32
    assert batch["priority_weight"].max() == 1
    batch["td_error"] = batch["obs"] / 10
    buffer.update_tensordict_priority(batch)
    index_B = batch["index"]
    expected_B = (index_B.double() / 10 + 0.01) ** 0.7
    torch.testing.assert_close(sampler.leaves[index_B], expected_B, rtol=1e-6, atol=0)
    buffer.extend(rows(1))
    assert sampler.leaves[40].item() == pytest.approx((index_B.max().item() / 10 + 0.01) ** 0.7, rel=1e-6)


def test_extending_with_priorities():
    buffer, sampler = make_buffer(alpha=1.0, eps=0.0, batch_size=500)
    data = rows(4)
    data["td_error"] = torch.tensor([0.0, 1.0, 2.0, float("nan")])
    buffer.extend(data)
    assert sampler.leaves[:4].tolist() == [0, 1, 2, 1]  # nothing was known yet when the NaN came: the first default
    assert sampler.replaced == 1
    assert (buffer.sample()["index"] > 0).all()


def test_adding_one_by_one_does_not_freeze_the_default():
    # TensorDictReplayBuffer.add hands the sampler's default back as if it were measured.
    buffer, sampler = make_buffer(alpha=1.0, eps=0.0)
    for i in range(10):
        buffer.add(TensorDict({"obs": torch.tensor(float(i))}, []))
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([1e-3, 2e-3]))
    buffer.add(TensorDict({"obs": torch.tensor(11.0)}, []))
    assert sampler.leaves[:11].tolist() == pytest.approx([1e-3] + [2e-3] * 10, rel=1e-6)
    buffer.add(TensorDict({"obs": torch.tensor(12.0), "td_error": torch.tensor(7.0)}, []))
    assert sampler.leaves[11] == 7


def test_a_full_buffer_wraps_around():
    buffer, sampler = make_buffer(10, alpha=1.0, eps=0.0, batch_size=2000)
    buffer.extend(rows(10))
    buffer.update_priority(torch.arange(10), torch.arange(10).float())
    buffer.extend(rows(4, start=10))
    assert sampler.leaves.tolist() == [9, 9, 9, 9, 4, 5, 6, 7, 8, 9]
    batch = buffer.sample()
    assert set(batch["obs"].tolist()) == {10.0, 11, 12, 13, 4, 5, 6, 7, 8, 9}


def test_plain_replay_buffers_and_scalars():
    sampler = CudaPrioritizedSampler(5, alpha=1.0, beta=1.0, eps=0.0)
    buffer = ReplayBuffer(storage=LazyTensorStorage(5), sampler=sampler, batch_size=4)
    buffer.extend(torch.arange(5))
    buffer.update_priority(3, 4.0)
    buffer.update_priority(torch.tensor([0, 1]), 2.0)
    buffer.update_priority(torch.tensor([-1, 2]), torch.tensor([50.0, 1.0]))
    assert sampler.leaves.tolist() == [2, 2, 1, 4, 4]
    sample, info = buffer.sample(return_info=True)
    assert sample.shape == info["priority_weight"].shape == (4,)
    buffer.mark_update(2)
    assert sampler.leaves[2] == 4
    with pytest.raises(ValueError, match="priority has 3 elements, expected 1 or 2"):
        sampler.update_priority(torch.tensor([0, 1]), torch.ones(3))


def test_storages_of_two_dimensions():
    # TorchRL extends such a storage along time: [3 environments, 4 steps] becomes 4 rows of a storage of 8 × 3.
    buffer, sampler = make_buffer(24, ndim=2, batch_size=64, alpha=1.0, eps=0.0)
    buffer.extend(TensorDict({"obs": torch.arange(12).reshape(3, 4).float()}, [3, 4]))
    assert sampler.leaves[:12].eq(1).all()
    assert sampler.leaves[12:].eq(0).all()
    batch, info = buffer.sample(return_info=True)
    index = info["index"]
    assert torch.equal(batch["obs"], (index[0] + index[1] * 4).float())
    buffer.update_priority((torch.tensor([0, 2]), torch.tensor([1, 2])), torch.tensor([5.0, 6.0]))
    assert sampler.leaves[[1, 8]].tolist() == [5, 6]
    with pytest.raises(ValueError, match="storage is None"):
        sampler.update_priority(torch.tensor([[0, 1]]), 1.0)


def test_prefetching_buffers():
    sampler = CudaPrioritizedSampler(100, alpha=0.6, beta=0.4)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(100), sampler=sampler, batch_size=16, prefetch=3)
    buffer.extend(rows(60))
    for _ in range(20):
        batch = buffer.sample()
        batch["td_error"] = batch["obs"] + 1
        buffer.update_tensordict_priority(batch)
    assert torch.allclose(sampler._priorities.total, sampler.leaves.sum())


def test_exponents_are_settable():
    buffer, sampler = make_buffer(alpha=0.0, eps=0.0, batch_size=500)
    buffer.extend(rows(3))
    buffer.update_priority(torch.arange(3), torch.tensor([1.0, 4.0, 9.0]))
    assert sampler.leaves[:3].tolist() == [1, 1, 1]
    sampler.alpha = 0.5
    sampler.beta = 1.0
    assert (sampler.alpha, sampler.beta) == (0.5, 1.0)
    assert sampler.leaves[:3].tolist() == [1, 2, 3]
    batch = buffer.sample()
    torch.testing.assert_close(batch["priority_weight"], 1 / (batch["index"] + 1.0))
    with pytest.raises(ValueError, match="alpha is -1"):
        sampler.alpha = -1


def test_emptying_forgets_priorities():
    buffer, sampler = make_buffer(alpha=1.0, eps=0.0)
    buffer.extend(rows(3))
    buffer.update_priority(torch.arange(3), torch.tensor([1.0, 4.0, 9.0]))
    buffer.empty()
    assert sampler.leaves.eq(0).all()
    assert sampler.default_priority == 1
    with pytest.raises(RuntimeError, match="empty"):
        buffer.sample()


@pytest.mark.parametrize("way", ["state_dict", "dumps"])
def test_a_restored_buffer_continues_bit_for_bit(tmp_path, way):
    buffer, sampler = make_buffer()
    buffer.extend(rows(70))
    buffer.update_priority(torch.arange(50), torch.rand(50, generator=torch.Generator().manual_seed(0)))
    other, other_sampler = make_buffer(alpha=0.1, beta=0.1)
    if way == "state_dict":
        torch.save(sampler.state_dict(), tmp_path / "sampler.pt")
        other.extend(rows(70))
        other_sampler.load_state_dict(torch.load(tmp_path / "sampler.pt", weights_only=True))
    else:
        buffer.dumps(tmp_path)
        other.loads(tmp_path)
    assert (other_sampler.alpha, other_sampler.beta) == (0.7, 0.5)
    for each in (buffer, other):
        each.set_rng(torch.Generator().manual_seed(5))
        each.extend(rows(40, start=70))
    for _ in range(3):
        batches = [each.sample() for each in (buffer, other)]
        assert torch.equal(batches[0]["index"], batches[1]["index"])
        assert torch.equal(batches[0]["priority_weight"], batches[1]["priority_weight"])
        for each, batch in zip((buffer, other), batches, strict=True):
            each.update_priority(batch["index"], batch["obs"])
    assert torch.equal(sampler._priorities._tree, other_sampler._priorities._tree)


# ---- compact buffer ----

BARS, WIDTH = 60, 5
# Features: odd, even, odd, and two that the mirror exchanges.
MIRROR = torch.tensor([[0.0, 1, 2, 4, 3], [-1, 1, -1, 1, 1]])


def make_replay(capacity=64, batch_size=16, *, window=1, seed=0, **options) -> TransitionReplay:
    generator = torch.Generator().manual_seed(99)
    features = torch.randn(BARS, WIDTH, generator=generator)
    fraction_left = torch.rand(BARS, generator=generator)
    first_bar = torch.where(torch.arange(BARS) < 20, 0, 20)  # a second contract from bar 20
    return TransitionReplay(
        capacity,
        batch_size,
        features,
        fraction_left,
        mirror=MIRROR,
        window=window,
        first_bar=first_bar,
        seed=seed,
        **options,
    )


def make_batch(count, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def integers(high, *shape):
        return torch.randint(high, (count, *shape), generator=generator)

    return {
        "bar": integers(BARS).int(),
        "position_state": torch.randn(count, 4, generator=generator),
        "next_bar": integers(BARS).int(),
        "next_position_state": torch.randn(count, 4, generator=generator),
        "action": integers(3, 4).to(torch.uint8),
        "reward": torch.randn(count, generator=generator),
        "discount": torch.rand(count, generator=generator),
        "flags": integers(32).to(torch.uint8),
    }


def test_stored_fields_come_back_unchanged():
    replay = make_replay()
    batch = make_batch(50)
    index_B = replay.extend(batch)
    assert index_B.tolist() == list(range(50))
    assert len(replay) == 50
    sample, index_B, weight_B = replay.sample()
    assert weight_B.dtype == torch.float32
    assert len(index_B) == len(weight_B) == 16
    assert set(sample) == set(batch)
    for name, value in sample.items():
        assert value.dtype == batch[name].dtype
        assert torch.equal(value, batch[name][index_B]), name


def test_every_action_survives_packing():
    replay = make_replay(81, 81, alpha=0.0)
    batch = make_batch(81)
    batch["action"] = torch.cartesian_prod(*[torch.arange(3)] * 4).to(torch.uint8)
    replay.extend(TensorDict(batch, [81]))
    sample, index_B, _ = replay.sample()
    assert torch.equal(index_B, torch.arange(81))  # equal leaves and one draw a stratum: each once
    assert torch.equal(sample["action"], batch["action"])


def test_the_oldest_transitions_are_overwritten():
    replay = make_replay(10, 10, alpha=0.0)
    for start in (0, 7, 14):
        batch = make_batch(7)
        batch["reward"] = torch.arange(start, start + 7).float()
        index_B = replay.extend(batch)
    assert index_B.tolist() == [4, 5, 6, 7, 8, 9, 0]
    assert len(replay) == 10
    assert sorted(replay.sample()[0]["reward"].tolist()) == list(range(11, 21))


def test_memory_of_a_transition():
    replay = make_replay(2**17, 256)
    assert 58 < replay.bytes_per_transition <= 64


@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("state", ["", "next_"])
def test_gathered_observations_equal_a_slow_reading(window, state):
    replay = make_replay(window=window)
    batch = make_batch(40)
    obs_BD = (replay.gather_next if state else replay.gather)(batch)
    assert obs_BD.shape == (40, window * WIDTH + 6)
    seen = set()
    for b in range(40):
        bar = int(batch[state + "bar"][b])
        mirrored = int(batch["flags"][b]) % 2 == 1
        expected = []
        for back in range(window - 1, -1, -1):
            row = max(bar - back, 0 if bar < 20 else 20)
            values = replay._features_TF[row].tolist()
            if mirrored:
                values = [-values[0], values[1], -values[2], values[4], values[3]]
            expected += values
        exposure, unrealized, age, drawdown = batch[state + "position_state"][b].tolist()
        expected += [-exposure if mirrored else exposure, unrealized, age, drawdown, 1.0]
        expected.append(replay._fraction_T[bar].item())
        assert obs_BD[b].tolist() == pytest.approx(expected, abs=1e-6)
        seen.add(mirrored)
    assert seen == {True, False}


def test_flags_keep_mirror_and_live_branches():
    mirrored_B = torch.tensor([True, False, True])
    live_BK = torch.tensor([[True, True, True, True], [True, False, True, False], [False, False, False, False]])
    flags_B = pack_flags(mirrored_B, live_BK)
    assert flags_B.tolist() == [1 + 2 + 4 + 8 + 16, 2 + 8, 1]
    assert flags_B.dtype == torch.uint8
    unpacked = unpack_flags(flags_B)
    assert torch.equal(unpacked[0], mirrored_B)
    assert torch.equal(unpacked[1], live_BK)


def test_sampling_follows_updated_priorities():
    replay = make_replay(64, 64, alpha=1.0, eps=0.0)
    replay.extend(make_batch(64))
    priority_B = torch.zeros(64)
    priority_B[5], priority_B[9] = 3, 1
    replay.update(torch.arange(64), priority_B)
    _, index_B, weight_B = replay.sample()
    assert torch.bincount(index_B, minlength=10)[[5, 9]].tolist() == [48, 16]  # stratified: exact shares
    assert weight_B[index_B == 9].eq(1).all()
    torch.testing.assert_close(weight_B[index_B == 5], torch.full((48,), 3.0**-0.4))


def test_a_restored_replay_continues_bit_for_bit(tmp_path):
    replay = make_replay(seed=3)
    replay.extend(make_batch(50))
    replay.update(torch.arange(40), torch.linspace(0, 2, 40))
    replay.sample()
    torch.save(replay.state_dict(), tmp_path / "replay.pt")
    other = make_replay(seed=4, alpha=0.2)
    other.load_state_dict(torch.load(tmp_path / "replay.pt", weights_only=True))
    for step in range(3):
        results = []
        for each in (replay, other):
            each.extend(make_batch(30, seed=step))
            batch, index_B, weight_B = each.sample()
            each.update(index_B, batch["reward"].abs())
            results.append((index_B, weight_B, each.gather(batch)))
        for mine, theirs in zip(*results, strict=True):
            assert torch.equal(mine, theirs)
    state, other_state = replay.state_dict(), other.state_dict()
    assert state.keys() == other_state.keys()
    for key, value in state.items():
        assert torch.equal(value, other_state[key]) if torch.is_tensor(value) else value == other_state[key], key


@pytest.mark.parametrize(("batch_size", "capacity"), [(64, 5000), (32, 1024), (64, 64)])
def test_everything_is_finite_at_any_batch_and_capacity(batch_size, capacity):
    replay = make_replay(capacity, batch_size)
    replay.extend(make_batch(batch_size))
    for step in range(100):
        replay.extend(make_batch(7, seed=step))
        batch, index_B, weight_B = replay.sample()
        assert torch.isfinite(weight_B).all()
        assert torch.isfinite(replay.gather(batch)).all()
        assert index_B.max() < len(replay)
        replay.update(index_B, batch["reward"].abs())


def test_a_capacity_below_the_batch_is_refused():
    with pytest.raises(ValueError, match="capacity is 31, expected at least the batch size, 32"):
        make_replay(31, 32)
    assert make_replay(32, 32).capacity == 32


def test_wrong_use_is_refused():
    replay = make_replay(8, 4)
    with pytest.raises(ValueError, match="sum of the priorities is 0"):
        replay.sample()
    with pytest.raises(ValueError, match="batch_size is 5, expected 1 to 4"):
        replay.sample(5)
    with pytest.raises(ValueError, match="9 transitions, expected at most the capacity, 8"):
        replay.extend(make_batch(9))
    with pytest.raises(ValueError, match=r"priority_B has shape \(2, 1\), expected \(2,\)"):
        replay.update(torch.tensor([0, 1]), torch.ones(2, 1))
    batch = make_batch(4)
    with pytest.raises(ValueError, match=r"action has shape \(4, 3\), expected \(4, 4\)"):
        replay.extend({**batch, "action": batch["action"][:, :3]})
    del batch["flags"]
    with pytest.raises(ValueError, match="batch has the fields"):
        replay.extend(batch)
    features, fraction_left = torch.zeros(5, 2), torch.zeros(5)
    mirror = torch.tensor([[0.0, 1], [1, 1]])
    with pytest.raises(ValueError, match="fraction_left has shape"):
        TransitionReplay(8, 4, features, fraction_left[:4], mirror=mirror)
    with pytest.raises(ValueError, match="window is 2"):
        TransitionReplay(8, 4, features, fraction_left, mirror=mirror, window=2)
    with pytest.raises(ValueError, match="capacity 8, expected 16"):
        make_replay(16, 4).load_state_dict(replay.state_dict())
