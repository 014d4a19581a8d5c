"""Exploration: which actions are taken while experience is collected, and the schedules of its strength.

Suffixes: B batch, K branches, M actions of a branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Schedule:
    """A value that moves linearly from `start` to `end` over `steps` steps and stays there; 0 steps give `end` at once.

    Raises:
        ValueError: `steps` is negative.
    """

    start: float
    end: float
    steps: int

    def __post_init__(self) -> None:
        if self.steps < 0:
            raise ValueError(f"steps is {self.steps}, expected at least 0")

    def value(self, step: int) -> float:
        """The value at `step`, counted from 0."""
        if step >= self.steps:
            return self.end
        return self.start + (self.end - self.start) * max(step, 0) / self.steps


@torch.no_grad()
def select_actions(
    q_BKM: Tensor,
    *,
    epsilon: Tensor,
    temperature: Tensor | float | None = None,
    single_branch_share: float = 0.5,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Actions by ε-greedy or Boltzmann exploration over all branches.

    With probability ε a row explores: it draws new actions, uniformly, or from softmax(Q / temperature) if a
    temperature is given (ε = 1 and a share of 0 are plain Boltzmann exploration). A share of the exploring rows draws
    in one uniformly chosen branch and keeps the others greedy, since a magnitude that is only ever seen with random
    directions is worth nothing; the other exploring rows draw in all branches. All other actions are greedy; of equal
    values the first is.

    The number of random draws depends on the shape of `q_BKM` only, and nothing waits for the device.

    Args:
        q_BKM: float [B, K, M], expected Q, noise included where it is wanted.
        epsilon: float [], on the device of `q_BKM`.
        temperature: positive, in units of Q.
        single_branch_share: in [0, 1].
        generator: on the device of `q_BKM`.

    Returns:
        ``(action_BK, non_greedy)``: int64 [B, K], and the share of rows whose action isn't the greedy one, float32 [].

    Raises:
        ValueError: the shape is wrong, or `single_branch_share` or a `temperature` given as a number is out of range.
    """
    if q_BKM.ndim != 3:
        raise ValueError(f"q_BKM has shape {tuple(q_BKM.shape)}, expected [batch, branches, actions]")
    if not 0 <= single_branch_share <= 1:
        raise ValueError(f"single_branch_share is {single_branch_share}, expected a share in [0, 1]")
    if isinstance(temperature, int | float) and not temperature > 0:
        raise ValueError(f"temperature is {temperature}, expected a positive number or None")
    batch, branches, actions = q_BKM.shape

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=q_BKM.device)

    greedy_BK = q_BKM.argmax(dim=2)
    # Gumbel-max: the arg max of logits plus -log(-log u) is a draw from their softmax; equal logits draw uniformly.
    gumbel_BKM = -torch.log(-torch.log(uniform(batch, branches, actions)))
    drawn_BK = (gumbel_BKM if temperature is None else q_BKM.float() / temperature + gumbel_BKM).argmax(dim=2)
    explores_B1 = uniform(batch, 1) < epsilon
    single_B1 = uniform(batch, 1) < single_branch_share
    chosen_B1 = uniform(batch, branches).argmax(dim=1, keepdim=True)
    redrawn_BK = explores_B1 & (~single_B1 | (chosen_B1 == torch.arange(branches, device=q_BKM.device)))
    action_BK = torch.where(redrawn_BK, drawn_BK, greedy_BK)
    return action_BK, (action_BK != greedy_BK).any(dim=1).float().mean()
