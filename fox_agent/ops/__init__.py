"""Operators of the agent, `torch.ops.fox.*`, behind functions that check their arguments.

Each has a reference in PyTorch, which specifies it and serves wherever no kernel of the device is loaded.
"""

from __future__ import annotations

from fox_agent.ops.dist_loss import (
    SMOOTHING_KINDS,
    BranchDistLoss,
    SmoothingKind,
    branch_dist_loss,
    branch_dist_loss_with_gradients,
    check_support,
    dueling,
    expected_q,
    live_branches,
    project,
    smooth,
    support_atoms,
)
from fox_agent.ops.noise import advantage_noise, normals, philox_4x32
from fox_agent.ops.quantile import (
    cvar,
    quantile_huber_loss,
    quantile_huber_loss_with_gradients,
    quantile_midpoints,
)

__all__ = [
    "SMOOTHING_KINDS",
    "BranchDistLoss",
    "SmoothingKind",
    "advantage_noise",
    "branch_dist_loss",
    "branch_dist_loss_with_gradients",
    "check_support",
    "cvar",
    "dueling",
    "expected_q",
    "live_branches",
    "normals",
    "philox_4x32",
    "project",
    "quantile_huber_loss",
    "quantile_huber_loss_with_gradients",
    "quantile_midpoints",
    "smooth",
    "support_atoms",
]
