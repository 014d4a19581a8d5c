"""Fox's compact replay buffer, which keeps where an observation is instead of the observation.

Suffixes: B batch, C capacity, D observation, F features, K = 4 branches, T bars, W window.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fox_agent.ops import priority as tree_ops
from fox_agent.sampler import SCHEMA, CudaPrioritizedSampler, Priorities, check_state, prefixed, under

__all__ = ["CudaPrioritizedSampler", "Priorities", "TransitionReplay", "pack_flags", "unpack_flags"]

BYTES_PER_TRANSITION = 64


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
            **prefixed("fields.", {name: field.clone() for name, field in self._fields.items()}),
            **prefixed("priorities.", self.priorities.state_dict()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore in place; what follows equals, bit for bit, what would have followed `state_dict`.

        Raises:
            ValueError: the state is of another schema or capacity.
        """
        check_state("replay", state, capacity=self.capacity)
        self._written.copy_(state["written"])
        self._generator.set_state(state["generator"].cpu())  # wherever the checkpoint was mapped to
        for name, value in under("fields.", state).items():
            self._fields[name].copy_(value)
        self.priorities.load_state_dict(under("priorities.", state))

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
