"""Prioritized replay: a drop-in sampler for TorchRL and Fox's own compact buffer, on one core of priorities.

Proportional prioritization (Schaul et al. 2016, arXiv 1511.05952): P(i) = l_i / Σ l with the leaf l_i = (p_i + ε)^α,
and importance weights (N·P(i))^−β, divided by the largest of the batch.

Suffixes: B batch, C capacity, D observation, F features, K = 4 branches, T bars, W window.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchrl.data import PrioritizedSampler
from torchrl.data.replay_buffers import Storage
from torchrl.data.replay_buffers.utils import unravel_index

from fox_agent.ops import priority as tree_ops

SCHEMA = 1
FIRST_PRIORITY = 1.0  # of items stored before anything has been learned
EMPTY = -1.0
BYTES_PER_TRANSITION = 64


class Priorities:
    """Raw priorities, their sum tree, and the sampling rule; everything on one device.

    An item *waits* from `insert` until its first `update`. A waiting item carries the largest raw priority known when
    it was inserted. Only updates count as known: items stored before the first update carry 1 until that update, which
    revalues them to what it found (otherwise a 1 that nobody measured dwarfs errors of 1e-3 for good).

    Args:
        capacity: number of items C.
        alpha, beta: exponents of priority and of the importance weight, not negative.
        eps: added to each raw priority, not negative.
        device: where the tensors live.
        max_within_buffer: take the largest priority of the items now stored, rather than of all ever stored.

    Raises:
        ValueError: an argument is out of range.
    """

    def __init__(
        self, capacity: int, *, alpha: float, beta: float, eps: float, device: torch.device, max_within_buffer: bool
    ) -> None:
        for name, value in (("alpha", alpha), ("beta", beta), ("eps", eps)):
            _check_not_negative(name, value)
        self.capacity = capacity
        self.eps = eps
        self.device = torch.device(device)
        self.max_within_buffer = max_within_buffer
        self._learned = False
        # The leaf after the last item takes the rows that are to be ignored, and stays empty.
        self._slots = capacity + 1
        self._tree = torch.zeros(sum(tree_ops.level_sizes(self._slots)), dtype=torch.float64, device=self.device)
        self._raw_C = torch.full((self._slots,), EMPTY, device=self.device)
        self._waits_C = torch.zeros(self._slots, dtype=torch.bool, device=self.device)
        self._known_max = torch.tensor(EMPTY, device=self.device)
        self._replaced = torch.zeros((), dtype=torch.int64, device=self.device)
        self._alpha = torch.tensor(float(alpha), dtype=torch.float64, device=self.device)
        self._beta = torch.tensor(float(beta), dtype=torch.float64, device=self.device)

    @property
    def leaf_C(self) -> Tensor:
        """(p + ε)^α of each item, 0 where there is none: float64 [C], a view."""
        return self._tree[: self.capacity]

    @property
    def total(self) -> Tensor:
        """Sum of the leaves: float64 []."""
        return self._tree[-1]

    @property
    def replaced(self) -> Tensor:
        """Number of NaN, infinite and negative priorities given so far: int64 []."""
        return self._replaced

    @property
    def nbytes(self) -> int:
        """Bytes of memory held."""
        return sum(value.nbytes for value in self._tensors().values())

    def set_alpha(self, alpha: float) -> None:
        """Change the exponent; every leaf is rebuilt from its raw priority.

        Raises:
            ValueError: `alpha` is negative or not finite.
        """
        _check_not_negative("alpha", alpha)
        self._alpha.fill_(alpha)
        self._rebuild()

    def set_beta(self, beta: float) -> None:
        """Change the exponent of the importance weights.

        Raises:
            ValueError: `beta` is negative or not finite.
        """
        _check_not_negative("beta", beta)
        self._beta.fill_(beta)

    def clear(self) -> None:
        """Forget all items and what was learned; α and β stay."""
        self._tree.zero_()
        self._raw_C.fill_(EMPTY)
        self._waits_C.fill_(False)
        self._known_max.fill_(EMPTY)
        self._replaced.zero_()
        self._learned = False

    def max_raw(self) -> Tensor:
        """The raw priority of a new item: float32 []."""
        if self.max_within_buffer and self._learned:
            stored = torch.where(self._waits_C, EMPTY, self._raw_C).amax()
            self._known_max.copy_(torch.where(stored < 0, self._known_max, stored))
        return self._known_or_first()

    def insert(self, index_B: Tensor) -> None:
        """Give new items their first priority; rows with a negative index are ignored.

        Args:
            index_B: int64 [B], below C.
        """
        slot_B = torch.where(index_B < 0, self.capacity, index_B)
        self._write(slot_B, self.max_raw().expand(len(slot_B)))
        self._waits_C.index_fill_(0, slot_B, True)

    def update(self, index_B: Tensor, priority_B: Tensor, *, echoes: bool = False) -> None:
        """Set raw priorities; of equal indices the last in batch order wins, rows with a negative index are ignored.

        A negative priority is replaced by its magnitude, NaN and infinities by the largest raw priority known; both
        are counted in `replaced`.

        Args:
            index_B: int64 [B], below C.
            priority_B: float [B], raw priorities: unweighted losses or |TD errors|.
            echoes: priorities equal to `max_raw` may be the sampler's own default handed back: such rows keep waiting.

        Raises:
            ValueError: the shapes differ.
        """
        if priority_B.shape != index_B.shape:
            raise ValueError(f"priority_B has shape {tuple(priority_B.shape)}, expected {tuple(index_B.shape)}")
        slot_B = torch.where(index_B < 0, self.capacity, index_B)
        raw_B = torch.where(index_B < 0, 0.0, priority_B.to(torch.float32))
        finite_B = torch.isfinite(raw_B)
        self._replaced += raw_B.numel() - (finite_B & (raw_B >= 0)).sum()
        default = self.max_raw() if echoes else self._known_or_first()
        raw_B = torch.where(finite_B, raw_B.abs(), default)
        echo_B = (raw_B == default) & echoes
        largest = torch.where((index_B < 0) | ~finite_B | echo_B, EMPTY, raw_B).amax()
        torch.maximum(self._known_max, largest, out=self._known_max)
        if not self._learned and (not echoes or largest >= 0):
            self._learned = True
            self._raw_C.copy_(torch.where(self._raw_C < 0, EMPTY, self.max_raw()))  # all items still wait
            self._rebuild()
        self._write(slot_B, raw_B)
        tree_ops.scatter_last_(self._waits_C, slot_B, self._waits_C[slot_B] & echo_B)

    def sample(self, u_B: Tensor) -> tuple[Tensor, Tensor]:
        """Draw items.

        Args:
            u_B: float64 [B] in [0, 1).

        Returns:
            ``(index_B, weight_B)``: int64, and float64 importance weights in (0, 1], the largest 1.

        Raises:
            ValueError: all leaves are 0 (found on CPU only).
        """
        if self._tree.is_cpu and not self.total > 0:
            raise ValueError("the sum of the priorities is 0, expected at least one item with a positive priority")
        index_B = tree_ops.sample(self._tree, self._slots, u_B)
        leaf_B = self._tree[index_B]
        return index_B, (leaf_B / leaf_B.amin()) ** -self._beta

    def state_dict(self) -> dict[str, Any]:
        """Tensors (copies) and plain values from which `load_state_dict` continues bit for bit."""
        tensors = {name: value.clone() for name, value in self._tensors().items()}
        return {"schema": SCHEMA, "capacity": self.capacity, "eps": self.eps, "learned": self._learned, **tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore in place.

        Raises:
            ValueError: the state is of another schema or capacity.
        """
        _check_state("priorities", state, capacity=self.capacity)
        self.eps = state["eps"]
        self._learned = state["learned"]
        for name, value in self._tensors().items():
            value.copy_(state[name])

    def _tensors(self) -> dict[str, Tensor]:
        return {
            "tree": self._tree,
            "raw": self._raw_C,
            "waits": self._waits_C,
            "known_max": self._known_max,
            "replaced": self._replaced,
            "alpha": self._alpha,
            "beta": self._beta,
        }

    def _known_or_first(self) -> Tensor:
        return torch.where(self._known_max < 0, FIRST_PRIORITY, self._known_max)

    def _leaf(self, raw: Tensor) -> Tensor:
        return torch.where(raw < 0, 0.0, (raw.double() + self.eps) ** self._alpha)

    def _write(self, slot_B: Tensor, raw_B: Tensor) -> None:
        raw_B = torch.where(slot_B == self.capacity, EMPTY, raw_B)
        tree_ops.scatter_last_(self._raw_C, slot_B, raw_B)
        tree_ops.update(self._tree, self._slots, slot_B, self._leaf(raw_B))

    def _rebuild(self) -> None:
        self._tree.copy_(tree_ops.build(self._leaf(self._raw_C)))


class CudaPrioritizedSampler(PrioritizedSampler):
    """TorchRL's prioritized sampler on Fox's sum tree, for CPU and CUDA storages.

    It takes the place of `torchrl.data.PrioritizedSampler` in any replay buffer and needs neither TorchRL's C++ trees
    nor its CUDA wheel. Without an explicit `device` it follows a CUDA storage. It differs from the base class in that

    - a new item's leaf is (max raw + ε)^α, the maximum being over priorities that were given, not over defaults;
    - changing α equals a rebuild, from α = 0 too, because raw priorities are kept;
    - ``priority_weight`` is divided by the largest of the batch;
    - NaN, infinite and negative priorities are replaced and counted (`replaced`);
    - tree nodes are float64 whatever `dtype` is, which is that of ``priority_weight``;
    - nothing waits for the device on the way from `sample` to `update_priority`.

    Args:
        max_capacity, alpha, beta, eps, dtype, reduction, max_priority_within_buffer, device: as in the base class.

    Example:
        >>> import torch
        >>> from tensordict import TensorDict
        >>> from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
        >>> buffer = TensorDictReplayBuffer(
        ...     storage=LazyTensorStorage(1000), sampler=CudaPrioritizedSampler(1000, alpha=0.6, beta=0.4), batch_size=4
        ... )
        >>> index = buffer.extend(TensorDict({"reward": torch.zeros(8)}, [8]))
        >>> batch = buffer.sample()
        >>> batch["td_error"] = batch["priority_weight"] * 0 + 2.0
        >>> buffer.update_tensordict_priority(batch)
    """

    def _init(self) -> None:
        self._priorities = Priorities(
            self._max_capacity,
            alpha=self._alpha,
            beta=self._beta,
            eps=self._eps,
            device=self._device or torch.device("cpu"),
            max_within_buffer=self._max_priority_within_buffer,
        )
        self._was_added = False

    def _empty(self) -> None:
        self._priorities.clear()
        self._was_added = False

    @property
    def device(self) -> torch.device:
        """Where the tree lives."""
        return self._priorities.device

    @property
    def leaves(self) -> Tensor:
        """(p + ε)^α of each item, 0 where there is none: float64 [max_capacity], a view."""
        return self._priorities.leaf_C

    @property
    def replaced(self) -> Tensor:
        """Number of NaN, infinite and negative priorities given so far: int64 []."""
        return self._priorities.replaced

    @property
    def default_priority(self) -> float | Tensor:
        """The raw priority of a new item."""
        value = self._priorities.max_raw()
        return value.item() if value.is_cpu else value.clone()

    @property
    def alpha(self) -> float:
        """Exponent of the priority; setting it rebuilds the tree."""
        return self._alpha

    @alpha.setter
    def alpha(self, value: float) -> None:
        self._priorities.set_alpha(float(value))
        self._alpha = float(value)

    @property
    def beta(self) -> float:
        """Exponent of the importance weight."""
        return self._beta

    @beta.setter
    def beta(self, value: float) -> None:
        self._priorities.set_beta(float(value))
        self._beta = float(value)

    def add(self, index: Tensor | int) -> None:
        """Called by a buffer after it has stored one item, which `mark_update` has given its priority."""
        # TensorDictReplayBuffer.add next hands the default priority back through update_priority.
        self._was_added = True

    def extend(self, index: Tensor | tuple) -> None:
        """Called by a buffer after it has stored items, which `mark_update` has given their priority."""

    def mark_update(self, index: Tensor | tuple[Tensor, ...] | int, *, storage: Storage | None = None) -> None:
        """Give new items their first priority.

        Args:
            index: int, int [B], or for a storage of N dimensions int [B, N] or N times int [B]; negative ones are
                ignored.
            storage: needed for N-dimensional indices.
        """
        self._follow(storage)
        self._priorities.insert(self._flat(index, storage))

    @torch.no_grad()
    def update_priority(
        self,
        index: Tensor | tuple[Tensor, ...] | int,
        priority: Tensor | float,
        *,
        storage: Storage | None = None,
    ) -> None:
        """Set priorities; of equal indices the last wins.

        Args:
            index: int, int [B], or for a storage of N dimensions int [B, N] or N times int [B]; negative ones are
                ignored.
            priority: one number, or as many as there are indices.
            storage: needed for N-dimensional indices.

        Raises:
            ValueError: the numbers of indices and priorities differ.
        """
        self._follow(storage)
        echoes, self._was_added = self._was_added, False
        index_B = self._flat(index, storage)
        priority_B = torch.as_tensor(priority, device=self.device).detach().reshape(-1)
        if priority_B.numel() not in (1, index_B.numel()):
            raise ValueError(f"priority has {priority_B.numel()} elements, expected 1 or {index_B.numel()}")
        if index_B.numel():
            self._priorities.update(index_B, priority_B.expand(index_B.numel()), echoes=echoes)

    def sample(self, storage: Storage, batch_size: int) -> tuple[Tensor | tuple[Tensor, ...], dict[str, Tensor]]:
        """Draw `batch_size` items with replacement.

        Returns:
            ``(index, {"priority_weight": weight_B})``; the index is int64 [B], or a tuple of them for a storage of
            several dimensions.

        Raises:
            RuntimeError: the storage is empty.
        """
        if len(storage) == 0:
            raise RuntimeError("the storage is empty, expected at least one item to sample from")
        self._follow(storage)
        u_B = tree_ops.uniform(batch_size, generator=self._rng, device=self.device, stratified=False)
        index_B, weight_B = self._priorities.sample(u_B)
        index = unravel_index(index_B, storage.shape) if storage.ndim > 1 else index_B
        return index, {"priority_weight": weight_B.to(self.dtype)}

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values, safe for ``torch.load(weights_only=True)``."""
        return {"alpha": self._alpha, "beta": self._beta, **_prefixed("priorities.", self._priorities.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            ValueError: the state is of another schema or capacity.
        """
        self._priorities.load_state_dict(_under("priorities.", state_dict))
        self._alpha, self._beta, self._eps = state_dict["alpha"], state_dict["beta"], self._priorities.eps

    def dumps(self, path: str | Path) -> None:
        """Write the state into the folder `path`, which is made if it doesn't exist."""
        path = Path(path)
        path.mkdir(exist_ok=True)
        torch.save(self.state_dict(), path / "sampler.pt")

    def loads(self, path: str | Path) -> None:
        """Restore what `dumps` wrote into the folder `path`."""
        self.load_state_dict(torch.load(Path(path) / "sampler.pt", map_location=self.device, weights_only=True))

    def _follow(self, storage: Storage | None) -> None:
        """Move to the storage's CUDA device, with all priorities, unless a device was asked for."""
        device = self._tree_device_from_storage(storage)
        if device is not None and device != self.device:
            state = self._priorities.state_dict()
            self._device = device
            self._init()
            self._priorities.load_state_dict(state)

    def _flat(self, index: Tensor | tuple[Tensor, ...] | int, storage: Storage | None) -> Tensor:
        if isinstance(index, tuple):
            index = torch.stack(index, -1)
        index = torch.as_tensor(index, dtype=torch.int64, device=self.device)
        if index.ndim > 1:
            if storage is None:
                raise ValueError(f"storage is None, expected the storage that indices of shape {index.shape} are for")
            shape = storage.shape
            strides = [shape[dim + 1 :].numel() for dim in range(len(shape))]
            index = sum(part * stride for part, stride in zip(index.unbind(-1), strides, strict=True))
        return index.reshape(-1)


class TransitionReplay:
    """Ring buffer of decisions that stores where an observation is, not the observation.

    A transition goes from one decision to the next, over the whole lock between them. Of each state it keeps the bar
    and the position fields; market features are gathered from the market's own table when a batch is used. Sampling is
    stratified: one draw in each batch-th of the total priority. Everything lives on the device of `features`, and no
    call but `len` waits for it.

    Fields (all of length B in a batch):

    - ``bar``, ``next_bar`` int32: rows of `features`.
    - ``position_state``, ``next_position_state`` float32 [B, 4]: exposure, unrealized, age, drawdown, as in the
      original market (the exposure not negated in a mirrored episode).
    - ``action`` uint8 [B, 4]: as the agent gave it, hence in the mirror's frame in a mirrored episode.
    - ``reward`` float32: discounted sum of raw rewards, not normalized.
    - ``discount`` float32: γᵏ(1 − terminated).
    - ``flags`` uint8: see `pack_flags`.

    Args:
        capacity: transitions C.
        batch_size: the default, and the largest, batch of `sample`.
        features: float32 [T, F], as observed (normalized and clipped).
        fraction_left: float32 [T], fraction of the session left at each bar.
        mirror: float32 [2, F]; mirrored feature j = mirror[1, j] · features[·, mirror[0, j]].
        window: bars of features W in an observation, oldest first.
        first_bar: int [T], the earliest bar that a window ending at a bar may show (its contract's first); earlier
            ones are replaced by it. Needed when window > 1.
        alpha, beta, eps: of the priorities; alpha 0 samples uniformly.
        seed: of the draws.

    Raises:
        ValueError: capacity < batch_size, more than fits in free memory, or a table of the wrong shape.
    """

    def __init__(
        self,
        capacity: int,
        batch_size: int,
        features: Tensor,
        fraction_left: Tensor,
        *,
        mirror: Tensor,
        window: int = 1,
        first_bar: Tensor | None = None,
        alpha: float = 0.6,
        beta: float = 0.4,
        eps: float = 1e-6,
        seed: int = 0,
    ) -> None:
        if batch_size < 1 or capacity < batch_size:
            raise ValueError(f"capacity is {capacity}, expected at least the batch size, {batch_size}")
        _check_memory(capacity, features.device)
        bars, width = features.shape
        for name, table, shape in (("fraction_left", fraction_left, (bars,)), ("mirror", mirror, (2, width))):
            if table.shape != shape:
                raise ValueError(f"{name} has shape {tuple(table.shape)}, expected {shape}")
        if window < 1 or (window > 1 and first_bar is None):
            raise ValueError(f"window is {window}, expected 1, or more together with first_bar")
        self.capacity = capacity
        self.batch_size = batch_size
        self.device = features.device
        self._features_TF = features
        self._fraction_T = fraction_left.to(self.device, torch.float32)
        source_F, self._sign_F = mirror.to(self.device, torch.float32)
        self._source_F = source_F.long()
        self._first_T = None if first_bar is None else first_bar.to(self.device, torch.int64)
        self._back_W = torch.arange(1 - window, 1, device=self.device)
        self._fields = {
            name: torch.zeros((capacity, *shape), dtype=dtype, device=self.device)
            for name, shape, dtype in (
                ("bar", (), torch.int32),
                ("position_state", (4,), torch.float32),
                ("next_bar", (), torch.int32),
                ("next_position_state", (4,), torch.float32),
                ("action", (), torch.uint8),  # four base-3 digits
                ("reward", (), torch.float32),
                ("discount", (), torch.float32),
                ("flags", (), torch.uint8),
            )
        }
        self._written = torch.zeros((), dtype=torch.int64, device=self.device)
        self._digit_K = torch.tensor([27, 9, 3, 1], dtype=torch.uint8, device=self.device)
        self._generator = torch.Generator(self.device).manual_seed(seed)
        self.priorities = Priorities(
            capacity, alpha=alpha, beta=beta, eps=eps, device=self.device, max_within_buffer=True
        )

    def __len__(self) -> int:
        """Transitions stored (waits for the device)."""
        return min(int(self._written), self.capacity)

    @property
    def bytes_per_transition(self) -> float:
        """Memory of fields, priorities and tree over the capacity."""
        return (sum(field.nbytes for field in self._fields.values()) + self.priorities.nbytes) / self.capacity

    def extend(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Store transitions over the oldest ones, with the priority of new items.

        Args:
            batch: a dict or TensorDict of the fields above, each of length n ≤ capacity.

        Returns:
            int64 [n], where they were stored.

        Raises:
            ValueError: a field is missing, unknown or of the wrong shape, or n > capacity.
        """
        if set(batch.keys()) != set(self._fields):
            raise ValueError(f"batch has the fields {sorted(batch.keys())}, expected {sorted(self._fields)}")
        n = len(batch["bar"])
        if n > self.capacity:
            raise ValueError(f"batch has {n} transitions, expected at most the capacity, {self.capacity}")
        for name, field in self._fields.items():
            shape = (n, 4) if name == "action" else (n, *field.shape[1:])
            if batch[name].shape != shape:
                raise ValueError(f"{name} has shape {tuple(batch[name].shape)}, expected {shape}")
        index_B = (self._written + torch.arange(n, device=self.device)) % self.capacity
        for name, field in self._fields.items():
            value = batch[name].to(self.device, field.dtype)
            if name == "action":
                value = (value * self._digit_K).sum(1, dtype=torch.uint8)
            field[index_B] = value
        self._written += n
        self.priorities.insert(index_B)
        return index_B

    def sample(self, batch_size: int | None = None) -> tuple[dict[str, Tensor], Tensor, Tensor]:
        """Draw transitions by priority.

        Returns:
            ``(batch, index_B, weight_B)``: the fields above, int64, and float32 importance weights, the largest 1.

        Raises:
            ValueError: `batch_size` is above that of the constructor, or (found on CPU only) nothing is stored.
        """
        batch_size = self.batch_size if batch_size is None else batch_size
        if not 1 <= batch_size <= self.batch_size:
            raise ValueError(f"batch_size is {batch_size}, expected 1 to {self.batch_size}")
        u_B = tree_ops.uniform(batch_size, generator=self._generator, device=self.device, stratified=True)
        index_B, weight_B = self.priorities.sample(u_B)
        batch = {name: field[index_B] for name, field in self._fields.items()}
        batch["action"] = batch["action"].unsqueeze(1) // self._digit_K % 3
        return batch, index_B, weight_B.float()

    def update(self, index_B: Tensor, priority_B: Tensor) -> None:
        """Set the raw priorities of sampled transitions, as `Priorities.update`."""
        self.priorities.update(index_B, priority_B)

    def gather(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Observations of the states where the batch's actions were chosen: float32 [B, W·F + 6]."""
        return self._observe(batch["bar"], batch["position_state"], batch["flags"])

    def gather_next(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Observations of the states of the next decision: float32 [B, W·F + 6]."""
        return self._observe(batch["next_bar"], batch["next_position_state"], batch["flags"])

    def state_dict(self) -> dict[str, Any]:
        """Everything but the market tables, as tensors (copies) and plain values."""
        return {
            "schema": SCHEMA,
            "capacity": self.capacity,
            "written": self._written.clone(),
            "generator": self._generator.get_state(),
            **_prefixed("fields.", {name: field.clone() for name, field in self._fields.items()}),
            **_prefixed("priorities.", self.priorities.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore in place; what follows equals, bit for bit, what would have followed `state_dict`.

        Raises:
            ValueError: the state is of another schema or capacity.
        """
        _check_state("replay", state, capacity=self.capacity)
        self._written.copy_(state["written"])
        self._generator.set_state(state["generator"].cpu())  # wherever the checkpoint was mapped to
        for name, value in _under("fields.", state).items():
            self._fields[name].copy_(value)
        self.priorities.load_state_dict(_under("priorities.", state))

    def _observe(self, bar_B: Tensor, position_B4: Tensor, flags_B: Tensor) -> Tensor:
        bar_B = bar_B.long()
        mirrored_B, _ = unpack_flags(flags_B)
        row_BW = bar_B.unsqueeze(1) + self._back_W
        if self._first_T is not None:
            row_BW = torch.maximum(row_BW, self._first_T[bar_B].unsqueeze(1))
        plain_BWF = self._features_TF[row_BW]
        mirror_BWF = plain_BWF[..., self._source_F] * self._sign_F
        market_BWF = torch.where(mirrored_B[:, None, None], mirror_BWF, plain_BWF)
        exposure_B, unrealized_B, age_B, drawdown_B = position_B4.unbind(1)
        exposure_B = torch.where(mirrored_B, -exposure_B, exposure_B)
        can_trade_B = torch.ones_like(exposure_B)
        position_B6 = torch.stack(
            (exposure_B, unrealized_B, age_B, drawdown_B, can_trade_B, self._fraction_T[bar_B]), dim=1
        )
        return torch.cat((market_BWF.flatten(1), position_B6), dim=1)


def pack_flags(mirrored_B: Tensor, live_BK: Tensor) -> Tensor:
    """Flags of transitions: bit 0 is set if mirrored, bit 1 + k if branch k could affect the transition.

    Args:
        mirrored_B: bool [B].
        live_BK: bool [B, 4].

    Returns:
        uint8 [B].
    """
    bits_B5 = torch.cat((mirrored_B.unsqueeze(1), live_BK), dim=1).to(torch.uint8)
    return (bits_B5 << torch.arange(5, dtype=torch.uint8, device=live_BK.device)).sum(1, dtype=torch.uint8)


def unpack_flags(flags_B: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_flags`: ``(mirrored_B, live_BK)``, bool."""
    shift_K = torch.arange(1, 5, dtype=torch.uint8, device=flags_B.device)
    return (flags_B & 1).bool(), (flags_B.unsqueeze(1) >> shift_K & 1).bool()


def _check_memory(capacity: int, device: torch.device) -> None:
    """Refuse a buffer beyond the free memory of a GPU, or all that the CPU has."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if capacity * BYTES_PER_TRANSITION > free:
        raise ValueError(
            f"capacity is {capacity:,} transitions of {BYTES_PER_TRANSITION} bytes, expected at most the "
            f"{free / 1e9:.1f} GB that {device.type} has"
        )


def _check_not_negative(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} is {value}, expected a finite number of at least 0")


def _check_state(what: str, state: Mapping[str, Any], *, capacity: int) -> None:
    for key, expected in (("schema", SCHEMA), ("capacity", capacity)):
        if state.get(key) != expected:
            raise ValueError(f"the state of the {what} has {key} {state.get(key)}, expected {expected}")


def _prefixed(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + key: value for key, value in state.items()}


def _under(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
