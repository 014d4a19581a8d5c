"""The learner's loss: distributional, quantile, conservative and entropy terms in one call.

Shape suffixes: B batch, K branches, M actions of a branch, N atoms, Q quantiles, E exposures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fox_agent.network import NetworkOutput
from fox_agent.ops.dist_loss import SmoothingKind, branch_dist_loss
from fox_agent.ops.quantile import quantile_huber_loss


class LossBatch(NamedTuple):
    """What a loss needs of the sampled transitions.

    Attributes:
        action_BK: int64, the actions taken.
        reward_B: n-step reward, in the loss's reward units.
        discount_B: gamma^k (1 - terminated), each sample's own k.
        weight_B: importance weights.
        branch_weight_BK: 0 for a branch that could not affect the transition, else positive.
        next_send_BE: bool, would exposure 3 * direction + magnitude send an order at the next state? None: all branches
            count.
    """

    action_BK: Tensor
    reward_B: Tensor
    discount_B: Tensor
    weight_B: Tensor
    branch_weight_BK: Tensor
    next_send_BE: Tensor | None


@dataclass(frozen=True)
class LossCoefficients:
    """Coefficients of `total_loss`. The tensors live on the device and are read at every step.

    Attributes:
        coef_4: [alpha (share of the cross-entropy), lambda_cql, lambda_entropy, smoothing strength].
        lambda_iqn: weight of the quantile loss, 0-dimensional.
        support_2: [v_min, v_max], in the loss's reward units.
        smoothing_kind: ``"stencil"``, ``"uniform"`` or ``"none"``; see `fox_agent.ops.smooth`.
        ce_clamp: largest cross-entropy in the reported loss and the priority, in nats.
        iqn_primary_loss: take priorities from the quantile loss, else from the clamped cross-entropy.
    """

    coef_4: Tensor
    lambda_iqn: Tensor
    support_2: Tensor
    smoothing_kind: SmoothingKind
    ce_clamp: float
    iqn_primary_loss: bool


class TotalLoss(NamedTuple):
    """Result of `total_loss`.

    Attributes:
        loss: mean over the batch, the one output with a gradient.
        terms: detached 0-dimensional tensors: ``loss``; the batch means, without importance weights and coefficients,
            of ``mse``, ``ce`` (clamped), ``cql``, ``entropy``, ``td`` (absolute) and, with a quantile head,
            ``quantile``; ``outside``, the share of the unclipped target's mass outside the support, over the samples
            that have a live branch.
        priority_B: detached, unweighted.
        greedy_BK: int64, the online network's greedy actions at the next state.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    priority_B: Tensor
    greedy_BK: Tensor


def total_loss(
    online: NetworkOutput,
    next_online: NetworkOutput,
    next_target: NetworkOutput,
    batch: LossBatch,
    coefficients: LossCoefficients,
) -> TotalLoss:
    """(1 - alpha) (E[Q] - y)^2 / 2 + alpha CE + lambda_iqn quantile-Huber + lambda_cql CQL - lambda_entropy H.

    Every term is the mean over the batch and, within a sample, over its live branches; see `branch_dist_loss` and
    `quantile_huber_loss`. Without a quantile head its term is left out. Nothing waits for the device.

    Args:
        online: the online network at the state; gradients flow into it alone.
        next_online: the online network at the next state.
        next_target: the target network at the next state.
        batch: sampled transitions.
        coefficients: loss coefficients.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit, the smoothing kind is unknown, or priorities are to come from a quantile head
            that the network does not have.
    """
    dist = branch_dist_loss(
        online.value_BN,
        online.adv_BKMN,
        next_online.value_BN,
        next_online.adv_BKMN,
        next_target.value_BN,
        next_target.adv_BKMN,
        batch.action_BK,
        batch.reward_B,
        batch.discount_B,
        batch.weight_B,
        batch.branch_weight_BK,
        batch.next_send_BE,
        coefficients.support_2,
        coefficients.coef_4,
        coefficients.smoothing_kind,
        coefficients.ce_clamp,
    )
    loss_B, priority_B = dist.loss_B, dist.ce_clamped_B
    per_sample = {
        "mse": dist.mse_B,
        "ce": dist.ce_clamped_B,
        "cql": dist.cql_B,
        "entropy": dist.entropy_B,
        "td": dist.td_B,
    }
    if online.q_value_BQ is not None:
        quantile_B, per_sample["quantile"] = quantile_huber_loss(
            online.q_value_BQ,
            online.q_adv_BKMQ,
            next_target.q_value_BQ,
            next_target.q_adv_BKMQ,
            batch.action_BK,
            dist.greedy_BK,
            batch.reward_B,
            batch.discount_B,
            batch.weight_B,
            batch.branch_weight_BK,
            batch.next_send_BE,
        )
        loss_B = loss_B + coefficients.lambda_iqn * quantile_B
    if coefficients.iqn_primary_loss:
        if "quantile" not in per_sample:
            raise ValueError("iqn_primary_loss is true, expected a network with num_quantiles > 0.")
        priority_B = per_sample["quantile"]
    loss = loss_B.mean()
    terms = dict(zip(per_sample, torch.stack(list(per_sample.values())).mean(1).unbind(), strict=True))
    num_live = (batch.branch_weight_BK.sum(1) > 0).sum().clamp_min(1)
    terms["outside"] = dist.outside_B.sum() / num_live
    terms["loss"] = loss.detach()
    return TotalLoss(loss, terms, priority_B, dist.greedy_BK)
