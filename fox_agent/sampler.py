"""Prioritized sampling: the core of priorities and a drop-in sampler for TorchRL's replay buffers.

Proportional prioritization (Schaul et al. 2016, arXiv 1511.05952): P(i) = l_i / Σ l with the leaf l_i = (p_i + ε)^α,
and importance weights (N·P(i))^−β, divided by the largest of the batch.

Suffixes: B batch, C capacity.
"""

from __future__ import annotations

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
        slot_B = self._write(index_B, self.max_raw().expand(len(index_B)))
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
        raw_B = priority_B.to(torch.float32).abs()
        bad_B = ~(raw_B < torch.inf)  # NaN too
        ignored_B = index_B < 0
        self._replaced += (((priority_B < 0) | bad_B) > ignored_B).sum()
        default = self.max_raw() if echoes else self._known_or_first()
        raw_B = torch.where(bad_B, default, raw_B)
        unmeasured_B = ignored_B | bad_B
        if echoes:
            unmeasured_B |= raw_B == default
        largest = raw_B.masked_fill(unmeasured_B, EMPTY).amax()
        torch.maximum(self._known_max, largest, out=self._known_max)
        if not self._learned and (not echoes or largest >= 0):
            self._learned = True
            self._raw_C.copy_(torch.where(self._raw_C < 0, EMPTY, self.max_raw()))  # all items still wait
            self._rebuild()
        slot_B = self._write(index_B, raw_B)
        if echoes:
            tree_ops.scatter_last_(self._waits_C, slot_B, self._waits_C[slot_B] & (raw_B == default))
        else:
            self._waits_C.index_fill_(0, slot_B, False)

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
        leaf_B = self._tree.index_select(0, index_B)  # on CPU several times as fast as self._tree[index_B]
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
        check_state("priorities", state, capacity=self.capacity)
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
        return ((raw.double() + self.eps) ** self._alpha).masked_fill_(raw < 0, 0.0)

    def _write(self, index_B: Tensor, raw_B: Tensor) -> Tensor:
        """Store raw priorities and their leaves; returns the slots, the last one for rows to be ignored."""
        ignored_B = index_B < 0
        slot_B = index_B.masked_fill(ignored_B, self.capacity)
        raw_B = raw_B.masked_fill(ignored_B, EMPTY)
        tree_ops.scatter_last_(self._raw_C, slot_B, raw_B)
        tree_ops.update(self._tree, self._slots, slot_B, self._leaf(raw_B))
        return slot_B

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
        >>> sampler = CudaPrioritizedSampler(1000, alpha=0.6, beta=0.4)
        >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(1000), sampler=sampler, batch_size=4)
        >>> index = buffer.extend(TensorDict({"reward": torch.zeros(8)}, [8]))
        >>> batch = buffer.sample()
        >>> batch["td_error"] = torch.full((4,), 2.0)
        >>> buffer.update_tensordict_priority(batch)
        >>> round(sampler.leaves[batch["index"][0]].item(), 4)  # 2 ** 0.6
        1.5157
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
        # A buffer made on a storage that already holds items first hands the default priority to all of them.
        self._echo_expected = True

    def _empty(self) -> None:
        self._priorities.clear()
        self._echo_expected = False

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
        self._echo_expected = True

    def extend(self, index: Tensor | tuple) -> None:
        """Called by a buffer after it has stored items, which `mark_update` has given their priority."""

    def mark_update(self, index: Tensor | tuple[Tensor, ...] | int, *, storage: Storage | None = None) -> None:
        """Give new items their first priority.

        Args:
            index: int, int [B], or for a storage of N dimensions int [B, N] or N times int [B]; negative ones are
                ignored.
            storage: needed for N-dimensional indices.

        Raises:
            ValueError: the storage holds more than `max_capacity` items, or is missing.
        """
        self._follow(storage)
        self._echo_expected = False
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
            ValueError: the numbers of indices and priorities differ, or as in `mark_update`.
        """
        self._follow(storage)
        echoes, self._echo_expected = self._echo_expected, False
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
        return {"alpha": self._alpha, "beta": self._beta, **prefixed("priorities.", self._priorities.state_dict())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave.

        Raises:
            ValueError: the state is of another schema or capacity.
        """
        self._priorities.load_state_dict(under("priorities.", state_dict))
        self._alpha, self._beta, self._eps = state_dict["alpha"], state_dict["beta"], self._priorities.eps
        self._echo_expected = False

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
        if storage is not None and len(storage) > self._max_capacity:
            raise ValueError(
                f"max_capacity is {self._max_capacity}, expected at least the {len(storage)} items of the storage"
            )
        device = self._tree_device_from_storage(storage)
        if device is not None and device != self.device:
            state, echo_expected = self._priorities.state_dict(), self._echo_expected
            self._device = device
            self._init()
            self._priorities.load_state_dict(state)
            self._echo_expected = echo_expected

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


def _check_not_negative(name: str, value: float) -> None:
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} is {value}, expected a finite number of at least 0")


def check_state(what: str, state: Mapping[str, Any], *, capacity: int) -> None:
    for key, expected in (("schema", SCHEMA), ("capacity", capacity)):
        if state.get(key) != expected:
            raise ValueError(f"the state of the {what} has {key} {state.get(key)}, expected {expected}")


def prefixed(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + key: value for key, value in state.items()}


def under(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
