"""The Q-network: a dueling, branching network with a head of atoms and a head of quantiles.

Shape suffixes: B batch, F market features, P position fields, D = F + P, H hidden units, K branches, M actions of a
branch, N atoms, Q quantiles, E exposures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fox_agent.ops.noise import WEIGHT_STREAM, normals

NormKind = Literal["rms", "none"]


class NetworkOutput(NamedTuple):
    """Raw heads, before the dueling combination (`fox_agent.ops.dueling`).

    Attributes:
        value_BN: state value, logits over atoms.
        adv_BKMN: advantages, logits over atoms.
        q_value_BQ: state value, quantiles in reward units; None without a quantile head.
        q_adv_BKMQ: advantages, quantiles in reward units; None without a quantile head.
    """

    value_BN: Tensor
    adv_BKMN: Tensor
    q_value_BQ: Tensor | None
    q_adv_BKMQ: Tensor | None


class NoisyLinear(nn.Module):
    """Linear layer with factorized Gaussian weight noise (Fortunato et al., 2018, "Noisy Networks for Exploration").

    The noise is what `resample` last drew; it starts at zero and `clear` returns it there. Training and evaluation mode
    have no influence on it. The noise buffers are not saved: resample or clear after loading.

    Args:
        in_features, out_features: sizes.
        sigma: initial noise scale, divided by sqrt(in_features).
    """

    def __init__(self, in_features: int, out_features: int, sigma: float = 0.5) -> None:
        super().__init__()
        bound = 1 / math.sqrt(in_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.zeros(out_features))
        self.weight_sigma = nn.Parameter(torch.full((out_features, in_features), sigma * bound))
        self.bias_sigma = nn.Parameter(torch.full((out_features,), sigma * bound))
        self.register_buffer("noise_in", torch.zeros(in_features), persistent=False)
        self.register_buffer("noise_out", torch.zeros(out_features), persistent=False)

    @torch.no_grad()
    def resample(self, seed_offset: Tensor) -> None:
        """Draw new noise from {seed, offset} (int64 [2], read only; see `fox_agent.ops.noise`)."""
        count = self.noise_in.numel()
        x = normals((count + self.noise_out.numel(),), seed_offset, WEIGHT_STREAM)
        x = x.sign() * x.abs().sqrt()
        self.noise_in.copy_(x[:count])
        self.noise_out.copy_(x[count:])

    @torch.no_grad()
    def clear(self) -> None:
        """Set the noise to zero: the layer is then a plain one of the mean weights."""
        self.noise_in.zero_()
        self.noise_out.zero_()

    def forward(self, x_BH: Tensor) -> Tensor:
        """[B, in_features] to [B, out_features]."""
        weight = torch.addcmul(self.weight, self.weight_sigma, torch.outer(self.noise_out, self.noise_in))
        return F.linear(x_BH, weight, torch.addcmul(self.bias, self.bias_sigma, self.noise_out))


class BranchingNetwork(nn.Module):
    """Market features through an optional linear bottleneck, joined by the position state; a trunk; one output matrix.

    A trunk layer is ReLU(norm(linear)), added to its input where ``residual`` and the sizes agree. One matrix gives all
    heads, in the order value atoms, advantage atoms, value quantiles, advantage quantiles. Output weights start small
    and biases at zero, so that all actions start with nearly the same, nearly uniform distribution.

    Gated features read 0 while `set_gate` keeps them hidden. What is shown is a buffer, ``shown_F``, and so part of the
    state that is saved; without gated features there is none.

    Args:
        num_features: F, market features of an observation (all bars of the window).
        num_position: P, position fields, the last of an observation.
        bottleneck: width of the linear layer that reads the market features alone; 0 for none.
        hidden: trunk sizes, at least one.
        residual: add a layer's input to its output where their sizes are equal.
        norm: ``"rms"`` (RMSNorm; Zhang and Sennrich, 2019) or ``"none"``.
        num_atoms: N.
        num_quantiles: Q; 0 for no quantile head.
        num_branches: K.
        num_actions: M, of each branch.
        noisy: make the output matrix a `NoisyLinear`.
        output_scale: factor on the output matrix's initial weights.
        gated: positions of the market features that `set_gate` hides and shows, each below F; shown at first.

    Raises:
        ValueError: an argument is out of range.
    """

    shown_F: Tensor | None

    def __init__(
        self,
        num_features: int,
        num_position: int,
        *,
        bottleneck: int = 16,
        hidden: Sequence[int] = (256, 256),
        residual: bool = True,
        norm: NormKind = "rms",
        num_atoms: int = 52,
        num_quantiles: int = 32,
        num_branches: int = 4,
        num_actions: int = 3,
        noisy: bool = False,
        output_scale: float = 0.1,
        gated: Sequence[int] = (),
    ) -> None:
        super().__init__()
        for name, size, least in (
            ("num_features", num_features, 1),
            ("num_position", num_position, 0),
            ("bottleneck", bottleneck, 0),
            ("num_atoms", num_atoms, 2),
            ("num_quantiles", num_quantiles, 0),
            ("num_branches", num_branches, 1),
            ("num_actions", num_actions, 1),
        ):
            if size < least:
                raise ValueError(f"{name} is {size}, expected at least {least}.")
        if not hidden or min(hidden) < 1:
            raise ValueError(f"hidden is {tuple(hidden)}, expected at least one positive size.")
        if norm not in ("rms", "none"):
            raise ValueError(f"norm is {norm!r}, expected 'rms' or 'none'.")
        if not all(0 <= position < num_features for position in gated):
            raise ValueError(f"gated is {tuple(gated)}, expected positions from 0 to {num_features - 1}.")
        self.num_features, self.num_position = num_features, num_position
        self.num_atoms, self.num_quantiles = num_atoms, num_quantiles
        self.num_branches, self.num_actions = num_branches, num_actions
        self.residual = residual
        self.gated = tuple(gated)
        self.register_buffer("shown_F", torch.ones(num_features) if gated else None)

        self.bottleneck = nn.Linear(num_features, bottleneck) if bottleneck else None
        sizes = ((bottleneck or num_features) + num_position, *hidden)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(sizes))
        self.norms = nn.ModuleList(nn.RMSNorm(size) if norm == "rms" else nn.Identity() for size in hidden)
        heads = 1 + num_branches * num_actions
        outputs = heads * (num_atoms + num_quantiles)
        self.output = (NoisyLinear if noisy else nn.Linear)(hidden[-1], outputs)
        self._split = [s for n in (num_atoms, num_quantiles) for s in (n, (heads - 1) * n)]
        with torch.no_grad():
            self.output.weight.mul_(output_scale)
            self.output.bias.zero_()

    def split_observation(self, obs_BD: Tensor) -> tuple[Tensor, Tensor]:
        """Split observations into market features [B, F] and position state [B, P].

        Raises:
            ValueError: the last size is not F + P.
        """
        expected = self.num_features + self.num_position
        if obs_BD.shape[-1] != expected:
            raise ValueError(
                f"obs_BD has {obs_BD.shape[-1]} fields, expected {self.num_features} market features and "
                f"{self.num_position} position fields."
            )
        return obs_BD[..., : self.num_features], obs_BD[..., self.num_features :]

    @torch.no_grad()
    def set_gate(self, is_open: bool) -> None:
        """Show the gated features, or have the network read 0 in their place, in all that it computes from now on.

        0 is what a normalized feature is in the mean, or, if odd, in balance. The buffer is written in place.
        """
        if self.shown_F is not None:
            self.shown_F[list(self.gated)] = float(is_open)

    def hidden(self, market_BF: Tensor, position_BP: Tensor) -> Tensor:
        """Activation of the trunk's last layer, [B, H]."""
        if self.shown_F is not None:
            market_BF = market_BF * self.shown_F
        x = torch.cat((market_BF if self.bottleneck is None else self.bottleneck(market_BF), position_BP), 1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            y = F.relu(norm(layer(x)))
            x = x + y if self.residual and x.shape == y.shape else y
        return x

    def heads(self, hidden_BH: Tensor) -> NetworkOutput:
        """All heads from the trunk's activation."""
        K, M = self.num_branches, self.num_actions
        value_BN, adv, q_value_BQ, q_adv = self.output(hidden_BH).split(self._split, 1)
        adv_BKMN = adv.unflatten(1, (K, M, self.num_atoms))
        if not self.num_quantiles:
            return NetworkOutput(value_BN, adv_BKMN, None, None)
        return NetworkOutput(value_BN, adv_BKMN, q_value_BQ, q_adv.unflatten(1, (K, M, self.num_quantiles)))

    def forward(self, market_BF: Tensor, position_BP: Tensor) -> NetworkOutput:
        """Heads for market features [B, F] and position state [B, P]."""
        return self.heads(self.hidden(market_BF, position_BP))

    def first_layer_parameters(self) -> Iterator[nn.Parameter]:
        """The one matrix that weight decay acts on: the first to see the market features."""
        yield (self.layers[0] if self.bottleneck is None else self.bottleneck).weight

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Optimizer groups: ``weight_decay`` on `first_layer_parameters`, none on the rest."""
        first = list(self.first_layer_parameters())
        rest = [p for p in self.parameters() if all(p is not f for f in first)]
        return [{"params": first, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]

    def resample_noise(self, seed_offset: Tensor) -> None:
        """Draw new weight noise (`NoisyLinear.resample`); nothing without noisy heads."""
        if isinstance(self.output, NoisyLinear):
            self.output.resample(seed_offset)

    def clear_noise(self) -> None:
        """Remove the weight noise; nothing without noisy heads."""
        if isinstance(self.output, NoisyLinear):
            self.output.clear()


class ExposureHead(nn.Module):
    """Auxiliary classifier of the exposure, for an optimizer of its own: it reads the trunk and sends nothing back.

    Args:
        hidden: H, width of the trunk's last layer.
        num_exposures: E.
    """

    def __init__(self, hidden: int, num_exposures: int = 9) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, num_exposures)

    def forward(self, hidden_BH: Tensor) -> Tensor:
        """Logits [B, E] from `BranchingNetwork.hidden`, which is detached."""
        return self.linear(hidden_BH.detach())


@torch.no_grad()
def soft_update(target: nn.Module, online: nn.Module, tau: float | Tensor) -> None:
    """target += tau (online - target) for every parameter; with tau 1 bit for bit a copy.

    Args:
        target: made by ``copy.deepcopy(online)``.
        online: network in training.
        tau: in [0, 1]; a 0-dimensional tensor stays on its device.
    """
    targets, onlines = list(target.parameters()), list(online.parameters())
    torch._foreach_lerp_(targets, onlines, [tau] * len(targets) if isinstance(tau, Tensor) else tau)
