"""What an epoch says of the learner's health: figures accumulated on the device, and a verdict in words."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fox_agent.ops.dist_loss import dueling, live_branches, support_atoms

# A Q-gap below this share of the spread of Q over states tells actions apart by rounding only.
DEAD_GAP = 1e-3
GOOD_SHARPE = 1.0
# Untrained, uniform distributions over 52 atoms have 0.038 on the two ends.
SATURATED = 0.05


class Averages:
    """Means of named 0-dimensional tensors since the last `read`; nothing waits for the device before that."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Take in one value of each name."""
        for name, value in values.items():
            value = value.detach().double()
            self._sums[name] = self._sums[name] + value if name in self._sums else value.clone()
            self._counts[name] = self._counts.get(name, 0) + 1

    def state_dict(self) -> dict[str, object]:
        """Sums and counts."""
        return {"sums": {name: total.clone() for name, total in self._sums.items()}, "counts": dict(self._counts)}

    def load_state_dict(self, state: Mapping[str, dict]) -> None:
        """Go on from `state_dict`."""
        self._sums, self._counts = dict(state["sums"]), dict(state["counts"])

    def read(self) -> dict[str, float]:
        """The means, and start anew."""
        means = {name: float(total) / self._counts[name] for name, total in self._sums.items()}
        self._sums, self._counts = {}, {}
        return means


@torch.no_grad()
def q_statistics(
    value_BN: Tensor, adv_BKMN: Tensor, support_2: Tensor, send_BE: Tensor | None = None
) -> dict[str, Tensor]:
    """Statistics of Q over states in which the agent can trade, in the loss's reward units.

    Args:
        value_BN, adv_BKMN: the network's heads.
        support_2: [v_min, v_max].
        send_BE: as `live_branches` takes it; a branch that the greedy action leaves without effect does not count in
            the gaps. None counts all.

    Returns:
        0-dimensional tensors: q_min, q_max, q_mean; q_gap, the mean of max_a Q − mean_a Q, and q_gap of each branch;
        q_var, the variance over states of the mean over actions; end_atom_mass, the mass of the greedy actions'
        distributions on the two end atoms.
    """
    probs_BKMN = dueling(value_BN, adv_BKMN).softmax(-1)
    q_BKM = probs_BKMN @ support_atoms(support_2, probs_BKMN.shape[-1])
    gap_BK = q_BKM.amax(2) - q_BKM.mean(2)
    live_BK = torch.ones_like(gap_BK) if send_BE is None else live_branches(q_BKM.argmax(2), send_BE).to(gap_BK.dtype)
    gap_K = (gap_BK * live_BK).sum(0) / live_BK.sum(0).clamp(min=1)
    ends_BKM = probs_BKMN[..., 0] + probs_BKMN[..., -1]
    greedy_BK1 = q_BKM.argmax(2, keepdim=True)
    statistics = {
        "q_min": q_BKM.amin(), "q_max": q_BKM.amax(), "q_mean": q_BKM.mean(),
        "q_gap": (gap_BK * live_BK).sum() / live_BK.sum(),
        "q_var": q_BKM.mean((1, 2)).var(), "end_atom_mass": ends_BKM.gather(2, greedy_BK1).mean(),
    }  # fmt: skip
    branches = ("direction", "magnitude", "order", "urgency")
    return statistics | {f"q_gap_{name}": gap for name, gap in zip(branches, gap_K, strict=False)}


def verdict(metrics: Mapping[str, float]) -> str:
    """One line on an epoch's metrics, with the figure it rests on.

    Args:
        metrics: q_gap, q_var, end_atom_mass, valid_sharpe, valid_mean_abs_exposure, and others, which are to be finite.
    """
    if not all(value == value and abs(value) < float("inf") for value in metrics.values()):
        return "exploding: a figure is not finite"
    relative = metrics["q_gap"] / max(metrics["q_var"] ** 0.5, 1e-12)
    if relative < DEAD_GAP or metrics["q_gap"] < 1e-7:
        if metrics["valid_sharpe"] > GOOD_SHARPE:
            return f"mechanical bias: Sharpe {metrics['valid_sharpe']:.2f} with a Q-gap of {metrics['q_gap']:.1e}"
        return f"dead advantage: the Q-gap is {relative:.1e} of the spread of Q"
    if metrics["end_atom_mass"] > SATURATED:
        return f"saturated support: {metrics['end_atom_mass']:.1%} of the mass on the end atoms"
    if metrics["valid_mean_abs_exposure"] < 0.01:
        return f"collapsed to flat: mean exposure {metrics['valid_mean_abs_exposure']:.3f}"
    return f"healthy: the Q-gap is {relative:.2f} of the spread of Q"
