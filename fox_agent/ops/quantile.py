"""Quantile-regression loss (QR-DQN) of a dueling, branching Q-network: operator `quantile_huber_loss`, and CVaR.

Shape suffixes: B batch, K branches, M actions of a branch, Q quantiles.

Dabney, Rowland, Bellemare and Munos (2018, "Distributional Reinforcement Learning with Quantile Regression"): quantiles
theta_i at the fixed midpoints tau_i = (2i - 1) / 2Q; nothing is sampled. Dtypes as in `dist_loss`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fox_agent.ops.dist_loss import (
    check_batch,
    check_networks,
    compute_dtype,
    dueling_chosen,
    dueling_gradient,
    live_branches,
    live_or_direction,
    loss_backward,
    loss_context,
    normalize_branch_weights,
    one_hot,
)
from fox_agent.ops.registry import define_operator


def quantile_midpoints(num_quantiles: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """tau_i = (2i - 1) / 2Q for i = 1..Q."""
    return (2 * torch.arange(num_quantiles, dtype=dtype, device=device) + 1) / (2 * num_quantiles)


def _huber_sums(target_BQ: Tensor, theta_BQ: Tensor, skew_Q: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over targets j of rho(u_ij) and of its derivative in u_ij = target_j - theta_i, each [B, Q].

    rho(u) = |tau_i - 1{u<0}| H(u), where H is Huber's function with kappa = 1: with c = clip(u, -1, 1), H = c (u - c/2)
    and H' = c. The factor is 1/2 + sign(u) (tau_i - 1/2): tau_i - 1/2, ``skew_Q``, enters after the sum over j.
    """
    u_BQQ = target_BQ[:, None, :] - theta_BQ[:, :, None]
    c_BQQ = u_BQQ.clamp(-1, 1)
    abs_c_BQQ = c_BQQ.abs()
    slope_BQ = c_BQQ.sum(2) / 2 + skew_Q * abs_c_BQQ.sum(2)
    u_BQQ.sub_(c_BQQ, alpha=0.5)
    rho_BQ = c_BQQ.mul_(u_BQQ).sum(2) / 2 + skew_Q * abs_c_BQQ.mul_(u_BQQ).sum(2)
    return rho_BQ, slope_BQ


def _quantile_huber_loss(
    value_BQ: Tensor,
    adv_BKMQ: Tensor,
    target_value_BQ: Tensor,
    target_adv_BKMQ: Tensor,
    action_BK: Tensor,
    greedy_BK: Tensor,
    reward_B: Tensor,
    discount_B: Tensor,
    weight_B: Tensor,
    branch_weight_BK: Tensor,
    next_send_BE: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, K, M, Q = adv_BKMQ.shape
    input_dtype, dtype = value_BQ.dtype, compute_dtype(value_BQ.dtype)
    w_BK = normalize_branch_weights(branch_weight_BK, dtype)
    theta_BKQ = dueling_chosen(value_BQ, adv_BKMQ, action_BK)
    target_BKQ = dueling_chosen(target_value_BQ, target_adv_BKMQ, greedy_BK)
    if next_send_BE is not None:
        target_BKQ = live_or_direction(target_BKQ, live_branches(greedy_BK, next_send_BE))
    target_BKQ = reward_B.to(dtype)[:, None, None] + discount_B.to(dtype)[:, None, None] * target_BKQ

    skew_Q = quantile_midpoints(Q, dtype, value_BQ.device) - 0.5
    # A branch at a time: with all pairs at once the CPU's allocator gets and returns the pages in every call.
    rho_BKQ, slope_BKQ = (
        torch.stack(parts, 1)
        for parts in zip(*(_huber_sums(target_BKQ[:, k], theta_BKQ[:, k], skew_Q) for k in range(K)), strict=True)
    )
    unweighted_B = (w_BK * rho_BKQ.sum(2)).sum(1) / Q**2
    scale_BK = weight_B.to(dtype)[:, None] * w_BK / -(Q**2)
    grad_BKQ = slope_BKQ * scale_BK[:, :, None]
    grad_value_BQ, grad_adv_BKMQ = dueling_gradient(one_hot(action_BK, M, dtype)[..., None] * grad_BKQ[:, :, None])
    loss_B = weight_B.to(dtype) * unweighted_B
    return (
        loss_B,
        unweighted_B,
        grad_value_BQ.to(input_dtype).contiguous(),
        grad_adv_BKMQ.to(input_dtype).contiguous(),
    )


def _quantile_huber_loss_fake(value_BQ: Tensor, adv_BKMQ: Tensor, *rest: Tensor | None) -> tuple[Tensor, ...]:
    dtype = compute_dtype(value_BQ.dtype)
    return (
        value_BQ.new_empty((value_BQ.shape[0],), dtype=dtype),
        value_BQ.new_empty((value_BQ.shape[0],), dtype=dtype),
        value_BQ.new_empty(value_BQ.shape),
        adv_BKMQ.new_empty(adv_BKMQ.shape),
    )


_quantile_huber_loss_operator = define_operator(
    "quantile_huber_loss",
    "(Tensor value_BQ, Tensor adv_BKMQ, Tensor target_value_BQ, Tensor target_adv_BKMQ, Tensor action_BK, "
    "Tensor greedy_BK, Tensor reward_B, Tensor discount_B, Tensor weight_B, Tensor branch_weight_BK, "
    "Tensor? next_send_BE) -> (Tensor loss_B, Tensor unweighted_B, Tensor grad_value_BQ, Tensor grad_adv_BKMQ)",
    _quantile_huber_loss,
    _quantile_huber_loss_fake,
    setup_context=loss_context,
    backward=loss_backward,
)


def quantile_huber_loss_with_gradients(
    value_BQ: Tensor,
    adv_BKMQ: Tensor,
    target_value_BQ: Tensor,
    target_adv_BKMQ: Tensor,
    action_BK: Tensor,
    greedy_BK: Tensor,
    reward_B: Tensor,
    discount_B: Tensor,
    weight_B: Tensor,
    branch_weight_BK: Tensor,
    next_send_BE: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`quantile_huber_loss` together with the gradients of each ``loss_B`` in its own value and advantage quantiles.

    Returns:
        loss_B, unweighted_B, grad_value_BQ, grad_adv_BKMQ (gradients in the inputs' dtype, not
        differentiable themselves).
    """
    B, K, M, _ = check_networks(
        value_BQ=value_BQ, adv_BKMQ=adv_BKMQ, target_value_BQ=target_value_BQ, target_adv_BKMQ=target_adv_BKMQ
    )
    check_batch(
        B, K, reward_B, discount_B, weight_B, branch_weight_BK, action_BK=action_BK, greedy_BK=greedy_BK
    )  # fmt: skip
    if next_send_BE is not None and (K, M) != (4, 3):
        raise ValueError(f"next_send_BE is for 4 branches of 3 actions, adv_BKMQ has {K} of {M}; expected None.")
    return _quantile_huber_loss_operator(
        value_BQ,
        adv_BKMQ,
        target_value_BQ,
        target_adv_BKMQ,
        action_BK,
        greedy_BK,
        reward_B,
        discount_B,
        weight_B,
        branch_weight_BK,
        next_send_BE,
    )


def quantile_huber_loss(
    value_BQ: Tensor,
    adv_BKMQ: Tensor,
    target_value_BQ: Tensor,
    target_adv_BKMQ: Tensor,
    action_BK: Tensor,
    greedy_BK: Tensor,
    reward_B: Tensor,
    discount_B: Tensor,
    weight_B: Tensor,
    branch_weight_BK: Tensor,
    next_send_BE: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantile-Huber loss (kappa = 1) of a dueling, branching network: the mean over pairs and over live branches.

    Each branch's target is reward + discount * the target network's quantiles of that branch at its greedy action; of
    direction, where the branch is not live at s'.

    Args:
        value_BQ, adv_BKMQ: online quantile head at s, [B, Q] and [B, K, M, Q]; the only inputs with a gradient.
        target_value_BQ, target_adv_BKMQ: target network's quantile head at s'. All four of one dtype.
        action_BK: int64, the actions taken.
        greedy_BK: int64, the online network's greedy actions at s' (`BranchDistLoss.greedy_BK`).
        reward_B, discount_B, weight_B, branch_weight_BK, next_send_BE: as in `branch_dist_loss`.

    Returns:
        loss_B = weight_B * unweighted_B, the one output with a gradient, and unweighted_B.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit.
    """
    return quantile_huber_loss_with_gradients(
        value_BQ,
        adv_BKMQ,
        target_value_BQ,
        target_adv_BKMQ,
        action_BK,
        greedy_BK,
        reward_B,
        discount_B,
        weight_B,
        branch_weight_BK,
        next_send_BE,
    )[:2]


def cvar(quantiles: Tensor, level: float) -> Tensor:
    """Conditional value at risk: the mean of the lowest ``level`` share of the distribution.

    Args:
        quantiles: [..., Q], each of mass 1/Q, in any order (a network's quantiles may cross).
        level: in (0, 1]; 1 is the mean.

    Returns:
        [...].

    Raises:
        ValueError: level is outside (0, 1].
    """
    if not 0 < level <= 1:
        raise ValueError(f"level is {level}, expected a share in (0, 1].")
    Q = quantiles.shape[-1]
    i_Q = torch.arange(Q, dtype=quantiles.dtype, device=quantiles.device)
    mass_Q = (level * Q - i_Q).clamp(0, 1) / (level * Q)
    return quantiles.sort(-1).values @ mass_Q
