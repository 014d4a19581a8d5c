"""The scale of rewards and the support of the value distribution, both adapted on the device.

Nothing here waits for the device. Suffix: B batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

SCHEMA = 1
# One tick of ES in each bar is a variance of 2.5e-9: the floor of a market's must lie far below that of rewards.
_VARIANCE_FLOOR = {"market": 1e-16, "reward": 1e-8}


class RewardScale:
    """Running σ by which rewards are divided. They are never shifted, and heads are not rescaled: this is not PopArt.

    ``"market"``: σ is the root mean square of the returns that full exposure would have earned on the collected bars,
    |Δclose| / close, which the policy cannot influence. ``"reward"``: σ is the standard deviation of the collected
    rewards, with a variance floor of 1e-8; it falls with the exposure, and with it the rewards grow.

    Moments are kept in float64 and merged batch by batch (Chan, Golub and LeVeque 1979). Before the first batch σ is 1.

    Args:
        kind: which of the two.
        device: where the statistics live.

    Raises:
        ValueError: `kind` is unknown.
    """

    def __init__(self, kind: Literal["market", "reward"], device: torch.device | str = "cpu") -> None:
        if kind not in ("market", "reward"):
            raise ValueError(f"kind is {kind!r}, expected 'market' or 'reward'")
        self.kind = kind
        self._count, self._mean, self._m2, self._last_variance = torch.zeros(4, dtype=torch.float64, device=device)

    def update(self, value_B: Tensor) -> None:
        """Take in a batch, float of any shape: full-exposure returns for ``"market"``, raw rewards for ``"reward"``."""
        if value_B.numel() == 0:
            return
        value_B = value_B.to(self._count.device, torch.float64)
        count = value_B.numel()
        mean = value_B.mean()
        total = self._count + count
        delta = mean - self._mean
        self._m2 += (value_B - mean).square().sum() + delta.square() * self._count * count / total
        self._mean += delta * count / total
        self._count.copy_(total)

    def variance(self) -> Tensor:
        """σ²: float64 []."""
        variance = self._m2 / self._count.clamp(min=1)
        if self.kind == "market":
            variance = variance + self._mean.square()
        return torch.where(self._count > 0, variance.clamp(min=_VARIANCE_FLOOR[self.kind]), 1.0)

    def scale(self) -> Tensor:
        """σ: float32 []."""
        return self.variance().sqrt().float()

    def jumped(self, ratio: float) -> Tensor:
        """Whether the variance has changed by more than `ratio` times, up or down, since the last call: bool [].

        The first call after a reset answers no.

        Raises:
            ValueError: `ratio` is not above 1.
        """
        if not ratio > 1:
            raise ValueError(f"ratio is {ratio}, expected more than 1")
        variance, last = self.variance(), self._last_variance.clone()
        self._last_variance.copy_(variance)
        return (last > 0) & ((variance > ratio * last) | (last > ratio * variance))

    def reset(self) -> None:
        """Forget everything, as at the start of a fold."""
        for value in self._tensors().values():
            value.zero_()

    def state_dict(self) -> dict[str, Any]:
        """Tensors (copies) and plain values."""
        tensors = {name: value.clone() for name, value in self._tensors().items()}
        return {"schema": SCHEMA, "kind": self.kind, **tensors}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore in place.

        Raises:
            ValueError: the state is of another schema or kind.
        """
        for key, expected in (("schema", SCHEMA), ("kind", self.kind)):
            if state.get(key) != expected:
                raise ValueError(f"the state of the reward scale has {key} {state.get(key)!r}, expected {expected!r}")
        for name, value in self._tensors().items():
            value.copy_(state[name])

    def _tensors(self) -> dict[str, Tensor]:
        return {"count": self._count, "mean": self._mean, "m2": self._m2, "last_variance": self._last_variance}


class AdaptiveSupport:
    """Bounds of the value distribution's support, which grow when targets fall outside and never shrink.

    Every 50 learner steps: if more than 0.5 % of the unclipped target mass of those steps lay outside, both bounds grow
    by 10 %, but at most once in 2.5/τ steps, the time in which the target network takes up the last growth. The rule
    reads targets and never Q, which cannot leave the support and hence says nothing of what lies outside.

    `bounds` keeps its address, so that captured graphs see every change.

    Args:
        initial: ``"auto"``, ±4σ/√(1−γ²), four standard deviations of a return of independent rewards, or ``"unit"``,
            ±1.
        gamma: discount of one step, in [0, 1).
        sigma: standard deviation of a reward in the loss's units, 1 where rewards are normalized.
        device: where everything lives.

    Raises:
        ValueError: an argument is out of range.
    """

    EVERY = 50  # learner steps
    OUTSIDE_SHARE = 0.005
    GROWTH = 1.1
    REST = 2.5  # in units of 1/τ

    def __init__(
        self,
        initial: Literal["auto", "unit"],
        *,
        gamma: float,
        sigma: float = 1.0,
        device: torch.device | str = "cpu",
    ) -> None:
        if initial not in ("auto", "unit"):
            raise ValueError(f"initial is {initial!r}, expected 'auto' or 'unit'")
        if not 0 <= gamma < 1:
            raise ValueError(f"gamma is {gamma}, expected a discount in [0, 1)")
        if not 0 < sigma < float("inf"):
            raise ValueError(f"sigma is {sigma}, expected a positive number")
        bound = 4 * sigma / (1 - gamma**2) ** 0.5 if initial == "auto" else 1.0
        self.bounds = torch.tensor([-bound, bound], device=device)
        self._outside = torch.zeros((), dtype=torch.float64, device=device)
        self._step = torch.zeros((), dtype=torch.int64, device=device)
        self._grown_at = torch.full((), -torch.inf, dtype=torch.float64, device=device)

    def step(self, outside_B: Tensor, tau: Tensor | float) -> None:
        """Count one learner step.

        Args:
            outside_B: float [B] (or any shape), the share in [0, 1] of each sample's unclipped target mass that lies
                outside the bounds.
            tau: rate of the target network's average, in (0, 1].
        """
        self._step += 1
        self._outside += outside_B.double().mean()
        due = self._step % self.EVERY == 0
        exceeds = self._outside > self.OUTSIDE_SHARE * self.EVERY
        rested = self._step - self._grown_at >= self.REST / tau
        grows = due & exceeds & rested
        self.bounds.mul_(torch.where(grows, self.GROWTH, 1.0))
        self._grown_at.copy_(torch.where(grows, self._step.double(), self._grown_at))
        self._outside.copy_(torch.where(due, 0.0, self._outside))

    def state_dict(self) -> dict[str, Any]:
        """Tensors (copies) and plain values."""
        return {"schema": SCHEMA, **{name: value.clone() for name, value in self._tensors().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore in place.

        Raises:
            ValueError: the state is of another schema.
        """
        if state.get("schema") != SCHEMA:
            raise ValueError(f"the state of the support has schema {state.get('schema')!r}, expected {SCHEMA!r}")
        for name, value in self._tensors().items():
            value.copy_(state[name])

    def _tensors(self) -> dict[str, Tensor]:
        return {"bounds": self.bounds, "outside": self._outside, "step": self._step, "grown_at": self._grown_at}
