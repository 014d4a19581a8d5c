"""`CudaPrioritizedSampler` inside TorchRL's replay buffers."""

from __future__ import annotations

import copy
import doctest
import pickle
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch
from scipy import stats
from tensordict import TensorDict
from torchrl.data import (
    LazyMemmapStorage,
    LazyTensorStorage,
    PrioritizedReplayBuffer,
    ReplayBuffer,
    TensorDictMaxValueWriter,
    TensorDictReplayBuffer,
)
from torchrl.data.replay_buffers.scheduler import LinearScheduler

import fox_agent
from fox_agent import replay, sampler
from fox_agent.ops import priority as tree_ops
from fox_agent.sampler import CudaPrioritizedSampler

ROOT = Path(__file__).parents[2]
STORAGES = (LazyTensorStorage, LazyMemmapStorage)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def make_buffer(capacity=100, *, batch_size=32, storage=LazyTensorStorage, ndim=1, buffer_options=None, **options):
    options = {"alpha": 0.7, "beta": 0.5, "eps": 0.01, **options}
    buffer = TensorDictReplayBuffer(
        storage=storage(capacity, ndim=ndim),
        sampler=CudaPrioritizedSampler(capacity, **options),
        batch_size=batch_size,
        priority_key="td_error",
        generator=generator(),
        **(buffer_options or {}),
    )
    return buffer, buffer.sampler


def rows(count, start=0):
    return TensorDict({"obs": torch.arange(start, start + count).float()}, [count])


def filled(priority_N, **options):
    """A sampler whose leaves are exactly those priorities, and its storage."""
    options = {"alpha": 1.0, "beta": 0.5, "eps": 0.0, **options}
    buffer, own = make_buffer(len(priority_N), **options)
    buffer.extend(rows(len(priority_N)))
    own.update_priority(torch.arange(len(priority_N)), priority_N)
    return buffer, own


def leaf(raw: float, *, alpha: float, eps: float) -> torch.Tensor:
    return (torch.tensor(raw, dtype=torch.float32).double() + eps) ** alpha


def rebuilt(own: CudaPrioritizedSampler) -> torch.Tensor:
    core = own._priorities
    return tree_ops.build(core._tree[: core.capacity + 1].clone())


def test_one_class_under_all_its_names():
    assert fox_agent.CudaPrioritizedSampler is replay.CudaPrioritizedSampler is sampler.CudaPrioritizedSampler
    assert replay.Priorities is sampler.Priorities


# ---- priorities of new and of updated items ----


@pytest.mark.parametrize("storage", STORAGES)
def test_sampled_errors_become_leaves_and_new_items_get_the_largest(storage):
    buffer, own = make_buffer(storage=storage)
    buffer.extend(rows(40))
    assert own.leaves[:40].eq(leaf(1.0, alpha=0.7, eps=0.01)).all()
    batch = buffer.sample()
    batch["td_error"] = batch["obs"] / 10
    buffer.update_tensordict_priority(batch)
    for value in batch["obs"].unique().tolist():
        assert own.leaves[int(value)] == leaf(value / 10, alpha=0.7, eps=0.01)
    buffer.extend(rows(5, start=40))
    largest = leaf(batch["obs"].max().item() / 10, alpha=0.7, eps=0.01)
    assert own.leaves[40:45].eq(largest).all()  # bitwise: transformed once
    assert own.leaves[45:].eq(0).all()
    torch.testing.assert_close(own._priorities.total, own.leaves.sum())


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)])
def test_storages_of_several_dimensions(shape):
    # TorchRL stores along the last dimension, time: [.., 4] becomes 4 rows of a storage of rows x the others.
    count = torch.Size(shape).numel()
    obs = torch.arange(count).reshape(shape).float()
    buffer, own = make_buffer(2 * count, ndim=len(shape), alpha=1.0, eps=0.0, batch_size=400)
    buffer.extend(TensorDict({"obs": obs}, shape))
    batch = buffer.sample()
    assert batch["index"].shape == (400, len(shape))
    batch["td_error"] = batch["obs"] + 1
    buffer.update_tensordict_priority(batch)
    stored = buffer.storage[:]["obs"][: shape[-1]].flatten()  # in the order of the leaves
    assert sorted(stored.tolist()) == list(range(count))
    assert set(batch["obs"].tolist()) == set(range(count))
    assert torch.equal(own.leaves[:count], stored.double() + 1)
    assert own.leaves[count:].eq(0).all()
    buffer.extend(TensorDict({"obs": obs, "td_error": obs + 5}, shape))
    assert torch.equal(own.leaves[count:], stored.double() + 5)


def test_the_last_of_equal_indices_wins():
    _, own = filled(torch.ones(10))
    own.update_priority(torch.tensor([3, 8, 3, 8, 3]), torch.tensor([5.0, 4.0, 9.0, 2.0, 0.5]))
    assert own.leaves.tolist() == [1, 1, 1, 0.5, 1, 1, 1, 1, 2, 1]
    assert own._priorities.total == 10.5
    own.alpha = 2.0  # from the raw priorities
    assert own.leaves.tolist() == [1, 1, 1, 0.25, 1, 1, 1, 1, 4, 1]


def test_items_stored_before_the_buffer_was_made_are_not_measured():
    # TorchRL hands the default of 1 to them; errors of 1e-3 must not stay a thousand times less likely.
    storage = LazyTensorStorage(50)
    storage.set(torch.arange(20), rows(20))
    own = CudaPrioritizedSampler(50, alpha=1.0, beta=0.5, eps=0.0)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=own, batch_size=4)
    assert own.leaves[:20].eq(1).all()
    buffer.update_priority(torch.tensor([0, 1]), torch.tensor([1e-3, 2e-3]))
    assert own.leaves[:20].tolist() == pytest.approx([1e-3] + [2e-3] * 19, rel=1e-6)


def test_ones_that_were_measured_stay():
    buffer, own = make_buffer(alpha=1.0, eps=0.0)
    buffer.extend(rows(4))
    buffer.update_priority(torch.arange(2), torch.ones(2))
    buffer.update_priority(torch.tensor([2]), torch.tensor([0.1]))
    assert own.leaves[:4].tolist() == pytest.approx([1, 1, 0.1, 1])


@pytest.mark.parametrize("bulk", [True, False])
def test_first_visits_weigh_between_a_tenth_and_one_when_errors_are_small(bulk):
    buffer, own = make_buffer(300, alpha=0.6, beta=1.0, eps=1e-8)
    errors = generator(1)
    visited = torch.zeros(300, dtype=torch.bool)
    first_weights = []
    for _ in range(60):
        if bulk:
            index_B = buffer.extend(rows(10))
        else:
            index_B = torch.tensor([int(buffer.add(row)) for row in rows(10)])
        visited[index_B] = False
        batch = buffer.sample()
        index_B = batch["index"]
        first_weights.append(batch["priority_weight"][~visited[index_B]])
        visited[index_B] = True
        batch["td_error"] = 1e-3 * (0.5 + torch.rand(32, generator=errors))
        buffer.update_tensordict_priority(batch)
    first_weights = torch.cat(first_weights)
    assert len(first_weights) > 200
    assert first_weights.min() >= 0.1
    assert first_weights.max() <= 1
    assert own.leaves.max() < 0.021  # 0.0015 ** 0.6: no default of 1 is left


def test_bad_errors_are_replaced_counted_and_harmless():
    buffer, own = filled(torch.tensor([1.0, 2.0, 3.0, 1.0, 1.0]), batch_size=200)
    data = TensorDict(
        {"index": torch.arange(4), "td_error": torch.tensor([float("nan"), float("inf"), -float("inf"), -0.5])}, [4]
    )
    buffer.update_tensordict_priority(data)
    assert own.leaves.tolist() == [3, 3, 3, 0.5, 1]
    assert own.replaced == 4
    assert own._priorities.total == 10.5
    assert torch.isfinite(buffer.sample()["priority_weight"]).all()
    buffer.extend(rows(1))  # overwrites item 0
    assert own.leaves[0] == 3


def test_a_priority_may_carry_a_gradient_and_be_of_any_type():
    _, own = filled(torch.ones(4))
    own.update_priority(0, torch.tensor(2.0, requires_grad=True))
    own.update_priority(torch.tensor([1]), torch.tensor([3]))
    own.update_priority(torch.tensor([2], dtype=torch.int32), torch.tensor([4.0], dtype=torch.bfloat16))
    own.update_priority(3, 5)
    assert own.leaves.tolist() == [2, 3, 4, 5]


def test_a_sampler_smaller_than_its_storage_is_refused():
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(11), sampler=CudaPrioritizedSampler(10, alpha=1.0, beta=1.0), batch_size=4
    )
    buffer.extend(rows(10))
    with pytest.raises(ValueError, match="max_capacity is 10, expected at least the 11 items"):
        buffer.extend(rows(1))


# ---- draws ----


@pytest.mark.parametrize("capacity", [3, 100, 1000, 2**10, 2**10 - 1, 2**10 + 1, 2**15, 2**15 - 1, 2**15 + 1])
def test_items_are_drawn_in_proportion_to_their_priorities(capacity):
    raw_N = 0.2 + torch.rand(capacity, generator=generator(capacity))
    raw_N[capacity // 2] = 0
    buffer, own = filled(raw_N, alpha=0.6)
    own._rng = generator(7)
    count = max(100_000, 30 * capacity)
    index_B, info = own.sample(buffer.storage, count)
    observed_N = torch.bincount(index_B, minlength=capacity)
    assert observed_N[capacity // 2] == 0
    share_N = raw_N.double() ** 0.6
    positive = share_N > 0
    expected_N = share_N / share_N.sum() * count
    assert stats.chisquare(observed_N[positive].numpy(), expected_N[positive].numpy()).pvalue > 1e-4
    weight_B = (capacity * share_N[index_B] / share_N.sum()) ** -0.5
    torch.testing.assert_close(info["priority_weight"], (weight_B / weight_B.max()).float(), rtol=1e-5, atol=0)


def test_items_are_drawn_with_replacement():
    buffer, own = filled(torch.tensor([1.0, 1e-3, 1.0]))
    index_B, _ = own.sample(buffer.storage, 1000)
    assert len(index_B) == 1000
    assert torch.bincount(index_B, minlength=3).max() > 300
    # Independent draws: of 1,000 pairs of neighbours about half are equal; stratified ones would be sorted.
    assert 350 < (index_B[1:] == index_B[:-1]).sum() < 650


def test_a_zero_leaf_is_never_drawn():
    raw_N = torch.zeros(4097)
    raw_N[5::64] = 10.0 ** torch.randint(-6, 7, (64,), generator=generator(3)).float()
    buffer, own = filled(raw_N, alpha=1.0)
    own._rng = generator(4)
    for _ in range(10):
        index_B, info = own.sample(buffer.storage, 200_000)
        assert (raw_N[index_B] > 0).all()
        assert (info["priority_weight"] > 0).all()


def test_the_root_is_the_sum_after_a_million_updates():
    capacity = 50_001
    buffer, own = filled(torch.ones(capacity), alpha=0.8)
    source = generator(5)
    for _ in range(125):
        index_B = torch.randint(capacity, (8192,), generator=source)
        own.update_priority(index_B, 10 ** (8 * torch.rand(8192, generator=source) - 4), storage=buffer.storage)
    total = own._priorities.total
    assert abs(total - own.leaves.sum()) <= 1e-12 * total
    assert torch.equal(own._priorities._tree, rebuilt(own))


@pytest.mark.parametrize("seeded", ["generator", "globally"])
def test_a_seed_fixes_the_draws(seeded):
    runs = []
    for seed in (0, 0, 1):
        buffer, _ = filled(torch.rand(50, generator=generator()) + 0.1)
        if seeded == "generator":
            buffer.set_rng(generator(seed))
        else:
            buffer.set_rng(None)
            torch.manual_seed(seed)
        drawn = []
        for _ in range(3):
            batch = buffer.sample()
            drawn.append(batch["index"])
            batch["td_error"] = batch["obs"] * batch["priority_weight"]
            buffer.update_tensordict_priority(batch)
        runs.append(torch.cat(drawn))
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weights_have_the_type_asked_for(dtype):
    buffer, own = filled(torch.rand(20, generator=generator()) + 0.1, dtype=dtype)
    _, info = own.sample(buffer.storage, 64)
    assert info["priority_weight"].dtype == dtype
    assert info["priority_weight"].max() == 1


# ---- exponents ----


def test_any_path_of_alpha_ends_as_if_it_had_always_been_there():
    raw_N = torch.rand(333, generator=generator(2))
    _, changed = filled(raw_N, alpha=0.3, eps=1e-3)
    for alpha in (0.0, 2.5, 0.9):
        changed.alpha = alpha
    _, fresh = filled(raw_N, alpha=0.9, eps=1e-3)
    assert torch.equal(changed._priorities._tree, fresh._priorities._tree)


def test_torchrls_schedulers_change_the_exponents():
    buffer, own = make_buffer(3, alpha=1.0, beta=0.5, eps=0.0, batch_size=100)
    buffer.extend(rows(3))
    buffer.update_priority(torch.arange(3), torch.tensor([1.0, 4.0, 9.0]))
    schedules = [
        LinearScheduler(own, "beta", final_value=1.0, num_steps=5),
        LinearScheduler(own, "alpha", final_value=0.5, num_steps=5),
    ]
    for _ in range(5):
        for each in schedules:
            each.step()
    assert (own.alpha, own.beta) == pytest.approx((0.5, 1.0))
    assert own.leaves.tolist() == pytest.approx([1, 2, 3])
    batch = buffer.sample()
    torch.testing.assert_close(batch["priority_weight"], 1 / (batch["index"] + 1.0))


# ---- kinds of buffers ----


@pytest.mark.parametrize("storage", STORAGES)
def test_prefetched_batches_are_whole_and_their_updates_arrive(storage):
    buffer, own = make_buffer(64, storage=storage, batch_size=16, buffer_options={"prefetch": 2}, alpha=1.0, eps=0.0)
    buffer.extend(rows(64))
    seen = set()
    for _ in range(40):
        batch = buffer.sample()
        assert torch.equal(batch["obs"], batch["index"].float())
        seen.update(batch["index"].tolist())
        batch["td_error"] = batch["obs"] + 1
        buffer.update_tensordict_priority(batch)
    assert len(seen) > 30
    for index in seen:
        assert own.leaves[index] == index + 1
    assert torch.equal(own._priorities._tree, rebuilt(own))


def test_a_buffer_that_keeps_its_sampler_at_the_learner():
    own = CudaPrioritizedSampler(20, alpha=1.0, beta=0.5, eps=0.0)
    buffer = PrioritizedReplayBuffer(
        alpha=1.0, beta=0.5, storage=LazyTensorStorage(20), sampler=own, batch_size=8, sync=False
    )
    buffer.extend(torch.arange(10))
    buffer.sample()
    assert own.leaves[:10].eq(1).all()
    buffer.update_priority(torch.arange(10), torch.arange(10).float())
    buffer.extend(torch.arange(15))
    buffer.sample()
    # Items 10 to 19 and, once around, 0 to 4.
    assert own.leaves.tolist() == [9, 9, 9, 9, 9, 5, 6, 7, 8, 9] + [9] * 10
    buffer.empty()
    assert own.leaves.eq(0).all()


def test_a_writer_that_keeps_the_best():
    buffer, own = make_buffer(
        4, alpha=1.0, eps=0.0, buffer_options={"writer": TensorDictMaxValueWriter(rank_key="obs")}
    )
    buffer.extend(rows(10))
    assert sorted(buffer[:]["obs"].tolist()) == [6, 7, 8, 9]
    assert own.leaves.eq(1).all()
    data = rows(3)
    data["td_error"] = torch.tensor([5.0, 6.0, 7.0])
    buffer.extend(data)  # none is kept: their index is -1
    assert own.leaves.eq(1).all()
    assert buffer.add(rows(1)[0]) is None


def test_lists_of_anything():
    own = CudaPrioritizedSampler(10, alpha=1.0, beta=1.0, eps=0.0)
    buffer = ReplayBuffer(sampler=own, batch_size=50, collate_fn=list)
    buffer.extend(["a", "b", "c"])
    buffer.update_priority(torch.arange(3), torch.tensor([0.0, 1.0, 0.0]))
    assert set(buffer.sample()) == {"b"}


# ---- state ----


def trained(storage=LazyTensorStorage, **options):
    buffer, own = make_buffer(60, storage=storage, **options)
    buffer.extend(rows(50))
    for _ in range(3):
        batch = buffer.sample()
        batch["td_error"] = batch["obs"].sin()
        buffer.update_tensordict_priority(batch)
    own.alpha, own.beta = 0.55, 0.8
    return buffer, own


def continued(buffer, steps=4):
    """What a buffer does next, from a fixed seed."""
    buffer.set_rng(generator(9))
    results = []
    for step in range(steps):
        buffer.extend(rows(7, start=50 + step))
        batch = buffer.sample()
        batch["td_error"] = batch["obs"].cos()
        buffer.update_tensordict_priority(batch)
        results += [batch["index"], batch["priority_weight"], batch["obs"]]
    core = buffer.sampler._priorities
    return [*results, core._tree.clone(), core.replaced.clone()]


def test_the_state_is_tensors_and_plain_values_with_a_schema():
    _, own = trained()
    state = own.state_dict()
    for key, value in state.items():
        assert isinstance(key, str)
        assert type(value) in (torch.Tensor, int, float, bool, str), key
    assert [value for key, value in state.items() if key.endswith("schema")] == [1]
    before = own.leaves.clone()
    own.update_priority(torch.arange(50), torch.zeros(50))
    own.load_state_dict(state)  # a copy: what happened since is not in it
    assert torch.equal(own.leaves, before)


@pytest.mark.parametrize("way", ["torch.save", "dumps", "pickle", "deepcopy"])
@pytest.mark.parametrize("storage", STORAGES)
def test_a_restored_buffer_continues_bit_for_bit(tmp_path, storage, way):
    buffer, own = trained(storage)
    other, other_own = make_buffer(60, storage=storage, alpha=0.1, beta=0.1, eps=0.5)
    if way == "dumps":
        buffer.dumps(tmp_path)
        other.loads(tmp_path)
    else:
        other.extend(rows(50))
        if way == "torch.save":
            torch.save(own.state_dict(), tmp_path / "sampler.pt")
            other_own.load_state_dict(torch.load(tmp_path / "sampler.pt", weights_only=True))
        else:
            copied = copy.deepcopy(own) if way == "deepcopy" else pickle.loads(pickle.dumps(own))
            other.set_sampler(copied)
    assert (other.sampler.alpha, other.sampler.beta) == (0.55, 0.8)
    for mine, theirs in zip(continued(buffer), continued(other), strict=True):
        assert torch.equal(mine, theirs)


def test_a_restored_sampler_takes_ones_as_measured():
    buffer, own = make_buffer(4)
    buffer.extend(rows(4))
    other = CudaPrioritizedSampler(4, alpha=1.0, beta=0.5)
    other.load_state_dict(own.state_dict())
    other.alpha = 1.0
    other.update_priority(torch.arange(2), torch.ones(2))
    other.update_priority(torch.tensor([2]), torch.tensor([0.1]))
    assert other.leaves.tolist() == pytest.approx([1.01, 1.01, 0.11, 1.01])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [("priorities.schema", 2, "schema 2, expected 1"), ("priorities.capacity", 61, "capacity 61, expected 60")],
)
def test_a_foreign_state_is_refused(key, value, message):
    _, own = trained()
    with pytest.raises(ValueError, match=message):
        own.load_state_dict({**own.state_dict(), key: value})


# ---- the examples ----


def test_the_docstrings_example_runs():
    result = doctest.testmod(sampler)
    assert result.failed == 0
    assert result.attempted > 5


def test_the_example_draws_what_it_has_not_learned(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["replay_sampler.py", "--steps", "120"])
    runpy.run_path(str(ROOT / "examples" / "replay_sampler.py"), run_name="__main__")
    stored, drawn = map(float, re.findall(r"([\d.]+)%", capsys.readouterr().out))
    assert drawn > 2 * stored
