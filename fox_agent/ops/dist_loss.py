"""Distributional (C51) loss of a dueling, branching Q-network: operators `branch_dist_loss` and `expected_q`.

The functions here are their references, that is, the specification of the CUDA kernels.

Shape suffixes: B batch, K branches, M actions of a branch, N atoms, E = M*M exposures (M * direction + magnitude).

Notation is that of Bellemare, Dabney and Munos (2017, "A Distributional Perspective on Reinforcement Learning"):
atoms z_j = v_min + j dz, probabilities p_j, target reward + discount * z_j projected back onto the atoms. Dueling is
that of Wang et al. (2016), branching of Tavakoli et al. (2018), double Q of van Hasselt et al. (2016), CQL of Kumar et
al. (2020).

bfloat16 and float32 inputs are computed in float32, float64 in float64. Nothing here waits for the device, except
`check_support`, which is for construction time.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fox_agent.ops.registry import define_operator

SmoothingKind = Literal["none", "stencil", "uniform"]
SMOOTHING_KINDS = ("none", "stencil", "uniform")

_FLAT = 1  # index of Flat in the direction branch
_OUTSIDE_TOLERANCE = 1e-3  # atoms; a target on the end atom is inside however it was rounded


class BranchDistLoss(NamedTuple):
    """Result of `branch_dist_loss`; "mean" is over the sample's live branches. Only ``loss_B`` carries a gradient.

    Attributes:
        loss_B: importance-weighted loss of each sample.
        ce_B: mean cross-entropy, in nats.
        ce_clamped_B: ``ce_B``, at most ``ce_clamp``.
        td_B: mean absolute TD error |E[Q] - y|, in reward units.
        greedy_BK: int64, the online network's greedy actions at the next state.
        outside_B: mean share of the unclipped target's mass that lies outside the support.
        mse_B: mean of (E[Q] - y)^2 / 2.
        cql_B: mean of logsumexp Q - Q(action).
        entropy_B: mean entropy of the chosen action's distribution, in nats.
    """

    loss_B: Tensor
    ce_B: Tensor
    ce_clamped_B: Tensor
    td_B: Tensor
    greedy_BK: Tensor
    outside_B: Tensor
    mse_B: Tensor
    cql_B: Tensor
    entropy_B: Tensor


def check_shape(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless ``tensor`` has exactly this shape."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected {shape}.")


def check_networks(**outputs: Tensor) -> tuple[int, int, int, int]:
    """Check (value, advantage) pairs of one dtype, device and size; return B, K, M and the last size.

    Raises:
        TypeError: the dtypes differ, or are not bfloat16, float32 or float64.
        ValueError: the shapes do not fit [B, N] and [B, K, M, N].
    """
    (first_name, first), (second_name, second) = list(outputs.items())[:2]
    if first.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"{first_name} has dtype {first.dtype}, expected bfloat16, float32 or float64.")
    if second.dim() != 4:
        raise ValueError(f"{second_name} has shape {tuple(second.shape)}, expected [B, K, M, N].")
    B, K, M, N = second.shape
    for i, (name, tensor) in enumerate(outputs.items()):
        if tensor.dtype != first.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype}, expected {first.dtype} as {first_name}.")
        check_shape(name, tensor, (B, K, M, N) if i % 2 else (B, N))
    return B, K, M, N


def check_batch(
    B: int, K: int, reward_B: Tensor, discount_B: Tensor, weight_B: Tensor, branch_weight_BK: Tensor, **indices: Tensor
) -> None:
    """Check the tensors of a sampled batch against the networks' sizes.

    Raises:
        TypeError: an action index is not int64.
        ValueError: a shape does not fit.
    """
    check_shape("reward_B", reward_B, (B,))
    check_shape("discount_B", discount_B, (B,))
    check_shape("weight_B", weight_B, (B,))
    check_shape("branch_weight_BK", branch_weight_BK, (B, K))
    for name, index_BK in indices.items():
        if index_BK.dtype != torch.int64:
            raise TypeError(f"{name} has dtype {index_BK.dtype}, expected torch.int64.")
        check_shape(name, index_BK, (B, K))


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 stays float64 (for gradient checks); everything else is computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _mean_over_actions(adv_BKMN: Tensor) -> Tensor:
    # A sum of M slices: a reduction over a short middle axis is several times slower on CPU.
    return sum(adv_BKMN.unbind(2)).div_(adv_BKMN.shape[2])


def dueling(value_BN: Tensor, adv_BKMN: Tensor) -> Tensor:
    """V + A - mean_a A, atom by atom, the mean over the M actions of each branch.

    Args:
        value_BN: state value, [B, N].
        adv_BKMN: advantages, [B, K, M, N].

    Returns:
        [B, K, M, N], float32 (float64 if the inputs are).
    """
    dtype = compute_dtype(adv_BKMN.dtype)
    value_BN, adv_BKMN = value_BN.to(dtype), adv_BKMN.to(dtype)
    return adv_BKMN + (value_BN[:, None] - _mean_over_actions(adv_BKMN))[:, :, None]


def dueling_chosen(value_BN: Tensor, adv_BKMN: Tensor, action_BK: Tensor) -> Tensor:
    """`dueling` for one action of each branch only: [B, K, N]."""
    dtype = compute_dtype(adv_BKMN.dtype)
    value_BN, adv_BKMN = value_BN.to(dtype), adv_BKMN.to(dtype)
    return value_BN[:, None] - _mean_over_actions(adv_BKMN) + _choose(adv_BKMN, action_BK)


def dueling_gradient(grad_BKMN: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `dueling`'s inputs from that of its output: [B, N] and [B, K, M, N]."""
    mean_BKN = _mean_over_actions(grad_BKMN)
    return mean_BKN.sum(1).mul_(grad_BKMN.shape[2]), grad_BKMN - mean_BKN[:, :, None]


def _choose(x_BKMN: Tensor, action_BK: Tensor) -> Tensor:
    index = action_BK[:, :, None, None].expand(-1, -1, 1, x_BKMN.shape[-1])
    return x_BKMN.gather(2, index).squeeze(2)


def one_hot(action_BK: Tensor, num_actions: int, dtype: torch.dtype) -> Tensor:
    """[B, K, M] with 1 at the action."""
    return (action_BK[:, :, None] == torch.arange(num_actions, device=action_BK.device)).to(dtype)


def support_atoms(support_2: Tensor, num_atoms: int) -> Tensor:
    """The atoms z_j = v_min + j (v_max - v_min) / (N - 1), both bounds exact.

    Args:
        support_2: [v_min, v_max].
        num_atoms: N, at least 2.
    """
    j_N = torch.arange(num_atoms, dtype=support_2.dtype, device=support_2.device) / (num_atoms - 1)
    return torch.lerp(support_2[0], support_2[1], j_N)


def check_support(support_2: Tensor, num_atoms: int) -> None:
    """Refuse a support that cannot carry a distribution. Reads the values, so not for the hot path.

    Raises:
        ValueError: fewer than two atoms, a bound that is not finite, v_min >= v_max, or bounds so close (or so far
            apart) that neighbouring atoms coincide (or overflow) in the tensor's dtype.
    """
    if num_atoms < 2:
        raise ValueError(f"num_atoms is {num_atoms}, expected at least 2.")
    check_shape("support_2", support_2, (2,))
    low, high = support_2.tolist()
    atoms_N = support_atoms(support_2, num_atoms)
    steps = atoms_N.diff()
    if not (torch.isfinite(support_2[1] - support_2[0]) and torch.isfinite(atoms_N).all() and (steps > 0).all()):
        raise ValueError(
            f"support_2 is ({low}, {high}), expected finite v_min < v_max with {num_atoms} distinct atoms "
            f"in {support_2.dtype}."
        )


def _target_position(reward_B: Tensor, discount_B: Tensor, support_2: Tensor, num_atoms: int) -> Tensor:
    """Position of reward + discount * z_j on the support, in atoms, not clipped: [B, N].

    Written so that discount 1 and reward 0 give exactly j, which (reward + discount * z_j - v_min) / dz does not.
    """
    dz = (support_2[1] - support_2[0]) / (num_atoms - 1)
    shift_B = (reward_B + (discount_B - 1) * support_2[0]) / dz
    j_N = torch.arange(num_atoms, dtype=shift_B.dtype, device=shift_B.device)
    return shift_B[:, None] + discount_B[:, None] * j_N


def _project_from(position_BN: Tensor, probs_BKN: Tensor) -> Tensor:
    # The paper's clip(1 - |T z_j - z_i| / dz, 0, 1) as a matrix over (j, i), shared by the branches. It has no indices,
    # so that no rounding can write outside, and needs no atomics.
    num_atoms = position_BN.shape[-1]
    i_N = torch.arange(num_atoms, dtype=position_BN.dtype, device=position_BN.device)
    distance_BNN = (position_BN.clamp(0, num_atoms - 1)[:, :, None] - i_N).abs_()
    mass_BKN = probs_BKN @ distance_BNN.neg_().add_(1).clamp_(min=0)
    return mass_BKN.div_(mass_BKN.sum(-1, keepdim=True))  # the product's float32 sums alone can be off by 1e-6


def project(probs_BKN: Tensor, reward_B: Tensor, discount_B: Tensor, support_2: Tensor) -> Tensor:
    """C51 projection of the distribution of reward + discount * Z onto the support's own atoms.

    Each target atom gives its mass to its two neighbours in proportion to nearness; what falls outside is put on the
    end atom. The result's mass is 1 within 1e-6, and the mean is kept as long as nothing falls outside.

    Args:
        probs_BKN: probabilities, [B, K, N], of mass 1.
        reward_B: (n-step) reward.
        discount_B: gamma^k of each sample; 0 after a terminal step.
        support_2: [v_min, v_max], one that `check_support` accepts.

    Returns:
        [B, K, N].
    """
    return _project_from(_target_position(reward_B, discount_B, support_2, probs_BKN.shape[-1]), probs_BKN)


def _unknown_smoothing(kind: str) -> str:
    return f"smoothing_kind is {kind!r}, expected one of {', '.join(SMOOTHING_KINDS)}."


def smooth(target_BKN: Tensor, kind: SmoothingKind, s: Tensor | float) -> Tensor:
    """Smooth target distributions.

    Args:
        target_BKN: probabilities, [..., N].
        kind: ``"stencil"``: every inner atom gives s/2 to either neighbour, which keeps mean and mass; ``"uniform"``:
            (1 - s) p + s/N (label smoothing, which pulls the mean to the middle of the support); ``"none"``.
        s: strength, in [0, 1].

    Raises:
        ValueError: unknown kind.
    """
    if kind == "none":
        return target_BKN
    if kind == "uniform":
        return target_BKN * (1 - s) + s / target_BKN.shape[-1]
    if kind == "stencil":
        given = target_BKN[..., 1:-1] * (s / 2)
        smoothed = target_BKN.clone()
        smoothed[..., 1:-1] -= 2 * given
        smoothed[..., :-2] += given
        smoothed[..., 2:] += given
        return smoothed
    raise ValueError(_unknown_smoothing(kind))


def _expected_q(value_BN: Tensor, adv_BKMN: Tensor, support_2: Tensor) -> Tensor:
    logits_BKMN = dueling(value_BN, adv_BKMN)
    return (logits_BKMN.softmax(-1) @ support_atoms(support_2.to(logits_BKMN.dtype), adv_BKMN.shape[-1])).contiguous()


def _expected_q_fake(value_BN: Tensor, adv_BKMN: Tensor, support_2: Tensor) -> Tensor:
    return adv_BKMN.new_empty(adv_BKMN.shape[:3], dtype=compute_dtype(adv_BKMN.dtype))


def _expected_q_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _expected_q_backward(ctx, grad_BKM: Tensor) -> tuple[Tensor, Tensor, None]:
    value_BN, adv_BKMN, support_2 = ctx.saved_tensors
    p_BKMN = dueling(value_BN, adv_BKMN).softmax(-1)
    z_N = support_atoms(support_2.to(p_BKMN.dtype), adv_BKMN.shape[-1])
    # dQ/dlogit_j = p_j (z_j - Q)
    grad_value_BN, grad_adv_BKMN = dueling_gradient(
        grad_BKM[..., None] * p_BKMN * (z_N - (p_BKMN @ z_N)[..., None])
    )  # fmt: skip
    return grad_value_BN.to(value_BN.dtype), grad_adv_BKMN.to(adv_BKMN.dtype), None


_expected_q_operator = define_operator(
    "expected_q",
    "(Tensor value_BN, Tensor adv_BKMN, Tensor support_2) -> Tensor",
    _expected_q,
    _expected_q_fake,
    setup_context=_expected_q_context,
    backward=_expected_q_backward,
)


def expected_q(value_BN: Tensor, adv_BKMN: Tensor, support_2: Tensor) -> Tensor:
    """E[Q] = sum_j softmax(V + A - mean_a A)_j z_j: [B, K, M], in reward units. Differentiable in the logits.

    Args:
        value_BN, adv_BKMN: a network's logits, [B, N] and [B, K, M, N], of one dtype: bfloat16, float32 or float64.
        support_2: [v_min, v_max].

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit.
    """
    check_networks(value_BN=value_BN, adv_BKMN=adv_BKMN)
    check_shape("support_2", support_2, (2,))
    return _expected_q_operator(value_BN, adv_BKMN, support_2)


def live_branches(action_BK: Tensor, send_BE: Tensor) -> Tensor:
    """Which of Fox's four branches can affect the transition, given the actions chosen.

    Direction always can; magnitude unless the direction is Flat; order type and urgency if the exposure sends an order.

    Args:
        action_BK: int64 [B, 4]: direction, magnitude, order type, urgency.
        send_BE: bool [B, 9]: would exposure 3 * direction + magnitude send an order?

    Returns:
        bool [B, 4].

    Raises:
        ValueError: a shape does not fit.
    """
    B = action_BK.shape[0]
    check_shape("action_BK", action_BK, (B, 4))
    check_shape("send_BE", send_BE, (B, 9))
    direction_B, magnitude_B = action_BK[:, 0], action_BK[:, 1]
    send_B = send_BE.gather(1, (3 * direction_B + magnitude_B)[:, None]).squeeze(1)
    return torch.stack((torch.ones_like(send_B), direction_B != _FLAT, send_B, send_B), 1)


def live_or_direction(x_BKX: Tensor, live_BK: Tensor) -> Tensor:
    """Each branch's own values, or those of direction, branch 0, where the branch is not live.

    A branch is never trained where it cannot act, so that its value there means nothing; direction's always does.
    """
    return torch.where(live_BK[:, :, None], x_BKX, x_BKX[:, :1])


def normalize_branch_weights(branch_weight_BK: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights that sum to 1 over the branches of each sample; a sample without a live branch keeps all zeros."""
    weight_BK = branch_weight_BK.to(dtype)
    return weight_BK / weight_BK.sum(1, keepdim=True).clamp_min(torch.finfo(dtype).tiny)


def _branch_dist_loss(
    value_BN: Tensor,
    adv_BKMN: Tensor,
    next_value_BN: Tensor,
    next_adv_BKMN: Tensor,
    target_value_BN: Tensor,
    target_adv_BKMN: Tensor,
    action_BK: Tensor,
    reward_B: Tensor,
    discount_B: Tensor,
    weight_B: Tensor,
    branch_weight_BK: Tensor,
    next_send_BE: Tensor | None,
    support_2: Tensor,
    coef_4: Tensor,
    smoothing_kind: int,
    ce_clamp: float,
) -> tuple[Tensor, ...]:
    M, N = adv_BKMN.shape[2:]
    input_dtype, dtype = value_BN.dtype, compute_dtype(value_BN.dtype)
    support_2, reward_B, discount_B = support_2.to(dtype), reward_B.to(dtype), discount_B.to(dtype)
    alpha, lambda_cql, lambda_ent, smoothing = coef_4.to(dtype).unbind()
    z_N = support_atoms(support_2, N)
    w_BK = normalize_branch_weights(branch_weight_BK, dtype)

    # Target: the online network chooses, the target network values (double Q).
    greedy_BK = _expected_q(next_value_BN, next_adv_BKMN, support_2).argmax(2)
    target_p_BKN = dueling_chosen(target_value_BN, target_adv_BKMN, greedy_BK).softmax(-1)
    target_q_BK = target_p_BKN @ z_N
    if next_send_BE is None:
        next_q_B = target_q_BK.mean(1)
    else:
        next_live_BK = live_branches(greedy_BK, next_send_BE)
        next_q_B = (target_q_BK * next_live_BK).sum(1) / next_live_BK.sum(1)
        target_p_BKN = live_or_direction(target_p_BKN, next_live_BK)
    y_B = reward_B + discount_B * next_q_B
    position_BN = _target_position(reward_B, discount_B, support_2, N)
    t_BKN = smooth(_project_from(position_BN, target_p_BKN), SMOOTHING_KINDS[smoothing_kind], smoothing)
    outside_BN = (position_BN < -_OUTSIDE_TOLERANCE) | (position_BN > N - 1 + _OUTSIDE_TOLERANCE)
    outside_BK = (target_p_BKN @ outside_BN.to(dtype)[:, :, None]).squeeze(2)

    # Online distributions.
    logp_BKMN = dueling(value_BN, adv_BKMN).log_softmax(-1)
    p_BKMN = logp_BKMN.exp()
    q_BKM = p_BKMN @ z_N
    chosen_BKM = one_hot(action_BK, M, dtype)
    logp_BKN = _choose(logp_BKMN, action_BK)
    p_BKN = logp_BKN.exp()
    q_BK = (q_BKM * chosen_BKM).sum(2)
    td_BK = q_BK - y_B[:, None]
    ce_BK = -(t_BKN * logp_BKN).sum(2)
    entropy_BK = -(p_BKN * logp_BKN).sum(2)
    cql_BK = q_BKM.logsumexp(2) - q_BK

    def mean(x_BK: Tensor) -> Tensor:
        return (w_BK * x_BK).sum(1)

    mse_B, ce_B, cql_B, entropy_B = mean(td_BK.square() / 2), mean(ce_BK), mean(cql_BK), mean(entropy_BK)
    ce_clamped_B = ce_B.clamp(max=ce_clamp)
    loss_B = weight_B.to(dtype) * (
        (1 - alpha) * mse_B + alpha * ce_clamped_B + lambda_cql * cql_B - lambda_ent * entropy_B
    )

    # Gradient in the logits. Through an expectation: dQ/dlogit_j = p_j (z_j - Q). Cross-entropy: p - t, clamped or not.
    # Entropy: -dH/dlogit_j = p_j (log p_j + H).
    scale_BK1 = (weight_B.to(dtype)[:, None] * w_BK)[:, :, None]
    slope_BKM = lambda_cql * (q_BKM.softmax(2) - chosen_BKM) + (1 - alpha) * td_BK[:, :, None] * chosen_BKM
    grad_BKMN = (z_N - q_BKM[..., None]).mul_(p_BKMN).mul_((slope_BKM * scale_BK1)[..., None])
    direct_BKN = alpha * (p_BKN - t_BKN) + lambda_ent * p_BKN * (logp_BKN + entropy_BK[:, :, None])
    grad_BKMN.addcmul_((chosen_BKM * scale_BK1)[..., None], direct_BKN[:, :, None])
    grad_value_BN, grad_adv_BKMN = dueling_gradient(grad_BKMN)

    return (
        loss_B,
        ce_B,
        ce_clamped_B,
        mean(td_BK.abs()),
        greedy_BK.contiguous(),
        mean(outside_BK),
        mse_B,
        cql_B,
        entropy_B,
        grad_value_BN.to(input_dtype).contiguous(),
        grad_adv_BKMN.to(input_dtype).contiguous(),
    )


def _branch_dist_loss_fake(value_BN: Tensor, adv_BKMN: Tensor, *rest: Tensor | float | None) -> tuple[Tensor, ...]:
    B, K = adv_BKMN.shape[:2]

    def per_sample() -> Tensor:
        return value_BN.new_empty((B,), dtype=compute_dtype(value_BN.dtype))

    return (
        *(per_sample() for _ in range(4)),
        value_BN.new_empty((B, K), dtype=torch.int64),
        *(per_sample() for _ in range(4)),
        value_BN.new_empty(value_BN.shape),
        adv_BKMN.new_empty(adv_BKMN.shape),
    )


def loss_context(ctx, inputs, output) -> None:
    """`setup_context` of a loss: of its outputs the first is differentiable, the last two are its gradients."""
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[-2:])
    ctx.num_rest = len(inputs) - 2


@once_differentiable
def loss_backward(ctx, grad_loss_B: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    """`backward` of a loss whose gradients, those of each sample's loss in its own logits, are known already."""
    rest = [None] * ctx.num_rest
    if grad_loss_B is None:
        return (None, None, *rest)
    grad_value_BN, grad_adv_BKMN = ctx.saved_tensors
    scale_B = grad_loss_B.to(grad_adv_BKMN.dtype)
    return (scale_B[:, None] * grad_value_BN, scale_B[:, None, None, None] * grad_adv_BKMN, *rest)


_branch_dist_loss_operator = define_operator(
    "branch_dist_loss",
    "(Tensor value_BN, Tensor adv_BKMN, Tensor next_value_BN, Tensor next_adv_BKMN, Tensor target_value_BN, "
    "Tensor target_adv_BKMN, Tensor action_BK, Tensor reward_B, Tensor discount_B, Tensor weight_B, "
    "Tensor branch_weight_BK, Tensor? next_send_BE, Tensor support_2, Tensor coef_4, int smoothing, float ce_clamp) -> "
    "(Tensor loss_B, Tensor ce_B, Tensor ce_clamped_B, Tensor td_B, Tensor greedy_BK, Tensor outside_B, Tensor mse_B, "
    "Tensor cql_B, Tensor entropy_B, Tensor grad_value_BN, Tensor grad_adv_BKMN)",
    _branch_dist_loss,
    _branch_dist_loss_fake,
    setup_context=loss_context,
    backward=loss_backward,
)


def branch_dist_loss_with_gradients(
    value_BN: Tensor,
    adv_BKMN: Tensor,
    next_value_BN: Tensor,
    next_adv_BKMN: Tensor,
    target_value_BN: Tensor,
    target_adv_BKMN: Tensor,
    action_BK: Tensor,
    reward_B: Tensor,
    discount_B: Tensor,
    weight_B: Tensor,
    branch_weight_BK: Tensor,
    next_send_BE: Tensor | None,
    support_2: Tensor,
    coef_4: Tensor,
    smoothing_kind: SmoothingKind = "stencil",
    ce_clamp: float = 50.0,
) -> tuple[BranchDistLoss, Tensor, Tensor]:
    """`branch_dist_loss` together with the gradients of each ``loss_B`` in its own value and advantage logits.

    Returns:
        The result, grad_value_BN and grad_adv_BKMN (in the inputs' dtype), which are not differentiable themselves.
    """
    B, K, M, _ = check_networks(
        value_BN=value_BN,
        adv_BKMN=adv_BKMN,
        next_value_BN=next_value_BN,
        next_adv_BKMN=next_adv_BKMN,
        target_value_BN=target_value_BN,
        target_adv_BKMN=target_adv_BKMN,
    )
    check_batch(B, K, reward_B, discount_B, weight_B, branch_weight_BK, action_BK=action_BK)
    check_shape("support_2", support_2, (2,))
    check_shape("coef_4", coef_4, (4,))
    if next_send_BE is not None and (K, M) != (4, 3):
        raise ValueError(f"next_send_BE is for 4 branches of 3 actions, adv_BKMN has {K} of {M}; expected None.")
    if smoothing_kind not in SMOOTHING_KINDS:
        raise ValueError(_unknown_smoothing(smoothing_kind))
    *result, grad_value_BN, grad_adv_BKMN = _branch_dist_loss_operator(
        value_BN,
        adv_BKMN,
        next_value_BN,
        next_adv_BKMN,
        target_value_BN,
        target_adv_BKMN,
        action_BK,
        reward_B,
        discount_B,
        weight_B,
        branch_weight_BK,
        next_send_BE,
        support_2,
        coef_4,
        SMOOTHING_KINDS.index(smoothing_kind),
        ce_clamp,
    )
    return BranchDistLoss(*result), grad_value_BN, grad_adv_BKMN


def branch_dist_loss(
    value_BN: Tensor,
    adv_BKMN: Tensor,
    next_value_BN: Tensor,
    next_adv_BKMN: Tensor,
    target_value_BN: Tensor,
    target_adv_BKMN: Tensor,
    action_BK: Tensor,
    reward_B: Tensor,
    discount_B: Tensor,
    weight_B: Tensor,
    branch_weight_BK: Tensor,
    next_send_BE: Tensor | None,
    support_2: Tensor,
    coef_4: Tensor,
    smoothing_kind: SmoothingKind = "stencil",
    ce_clamp: float = 50.0,
) -> BranchDistLoss:
    """Loss of a dueling, branching C51 network with double-Q targets.

    With w_k = branch_weight / its sum over the sample's branches (all zero: the sample contributes nothing) ::

        loss_B = weight_B * [ (1 - alpha) sum_k w_k (E[Q_k] - y)^2 / 2  +  alpha min(sum_k w_k CE_k, ce_clamp)
                              + lambda_cql sum_k w_k (logsumexp_a Q_k(a) - Q_k(a_k))
                              - lambda_ent sum_k w_k H(p_k(a_k)) ]
        y_B    = reward + discount * mean over the branches that are live at s' of E[Q_target,k](s', greedy_k)

    CE_k is against the smoothed projection of branch k's own target distribution at its own greedy action, or, where it
    is not live at s', of direction's: a branch learns nothing where it cannot act. The clamp acts on the value only;
    the cross-entropy's gradient, bounded by construction, is not cut.

    Args:
        value_BN, adv_BKMN: online network at s, [B, N] and [B, K, M, N]; the only inputs with a gradient.
        next_value_BN, next_adv_BKMN: online network at s'.
        target_value_BN, target_adv_BKMN: target network at s'. All six of one dtype: bfloat16, float32 or float64.
        action_BK: int64, the actions taken, in 0..M-1.
        reward_B: n-step reward, in the loss's reward units.
        discount_B: gamma^k (1 - terminated), each sample's own k.
        weight_B: importance weights.
        branch_weight_BK: 0 for a branch that could not affect the transition, else positive (usually 1).
        next_send_BE: see `live_branches`; None takes all branches as live at s' (action spaces other than Fox's).
        support_2: [v_min, v_max].
        coef_4: [alpha, lambda_cql, lambda_ent, smoothing strength].
        smoothing_kind: see `smooth`.
        ce_clamp: largest reported cross-entropy.

    Raises:
        TypeError: a dtype does not fit.
        ValueError: a shape does not fit, or the smoothing kind is unknown.
    """
    result, _, _ = branch_dist_loss_with_gradients(
        value_BN,
        adv_BKMN,
        next_value_BN,
        next_adv_BKMN,
        target_value_BN,
        target_adv_BKMN,
        action_BK,
        reward_B,
        discount_B,
        weight_B,
        branch_weight_BK,
        next_send_BE,
        support_2,
        coef_4,
        smoothing_kind,
        ce_clamp,
    )
    return result
