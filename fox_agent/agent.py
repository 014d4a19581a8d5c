"""A trained agent: a callable policy, with everything that it takes to play."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fox_agent.network import BranchingNetwork
from fox_agent.ops.dist_loss import expected_q
from fox_env import Market, actions, dynamics
from fox_env.data.normalize import Normalizer
from fox_env.files import write_atomic

SCHEMA = 1
FILE = "agent.safetensors"


@dataclass
class Agent:
    """Greedy policy of a branching network over its expected Q.

    Args:
        network: the Q-network.
        support: [v_min, v_max], float32 [2], in the loss's reward units.
        settings: of `BranchingNetwork` and of the game, as they were trained with.
        feature_names: F names, the order of the market's features.
        normalizer: of the market's features, fitted on the training part, or None.
        deployed: False if the gate found no edge; the agent then always asks for Flat.
        trade_margin: keep the position unless Q(best) exceeds Q(keep) by this, in the loss's reward units.
    """

    network: BranchingNetwork
    support: Tensor
    settings: Mapping[str, Any]
    feature_names: tuple[str, ...]
    normalizer: Normalizer | None
    deployed: bool = True
    trade_margin: float = 0.0

    @torch.no_grad()
    def q_values(self, observation: np.ndarray | Tensor) -> Tensor:
        """Expected Q of each branch's actions, float32 [N, 4, 3], for observations [N, D]."""
        device = self.support.device
        obs_BD = torch.as_tensor(observation, dtype=torch.float32, device=device)
        output = self.network(*self.network.split_observation(obs_BD))
        return expected_q(output.value_BN, output.adv_BKMN, self.support)

    def __call__(self, observation: np.ndarray | Tensor) -> np.ndarray | Tensor:
        """Actions int64 [N, 4] for observations float32 [N, D]: numpy for numpy, a tensor for a tensor."""
        if not self.deployed:
            flat = torch.tensor(actions.BASELINES["flat"], device=self.support.device)
            action_BK = flat.expand(len(observation), -1)
        else:
            q_BKM = self.q_values(observation)
            action_BK = q_BKM.argmax(2)
            if self.trade_margin > 0:
                action_BK = self._with_margin(observation, q_BKM, action_BK)
        return action_BK if isinstance(observation, Tensor) else action_BK.cpu().numpy()

    def _with_margin(self, observation: np.ndarray | Tensor, q_BKM: Tensor, action_BK: Tensor) -> Tensor:
        """Replace orders whose direction and magnitude are not worth `trade_margin` more than the position held."""
        num = self.settings["game"]["max_contracts"]
        obs_BD = torch.as_tensor(observation, device=q_BKM.device)
        held_B = (obs_BD[:, -dynamics.POSITION_FIELDS] * num).round().long()
        targets_E = torch.as_tensor(actions.target_positions(num), device=q_BKM.device).long()
        value_BE = (q_BKM[:, 0, :, None] + q_BKM[:, 1, None, :]).flatten(1) / 2
        keeps_BE = targets_E == held_B[:, None]
        keep_B = value_BE.masked_fill(~keeps_BE, -torch.inf).max(1)
        best_B = value_BE.gather(1, (3 * action_BK[:, :1] + action_BK[:, 1:2]))[:, 0]
        # Nothing keeps an odd position after a partial fill: its value is −∞ then, and the order stands.
        stays_B = best_B - keep_B.values <= self.trade_margin
        kept_BK = torch.stack((keep_B.indices // 3, keep_B.indices % 3, action_BK[:, 2], action_BK[:, 3]), 1)
        return torch.where(stays_B[:, None], kept_BK, action_BK)

    @property
    def rejected(self) -> dict[str, Agent]:
        """``{"candidate": …}``, the agent as it would play, if the gate rejected it; else nothing. For reports."""
        return {} if self.deployed else {"candidate": replace(self, deployed=True)}

    def prepare(self, market: Market) -> Market:
        """The market as this agent observes it: its features checked by name, its normalizer attached.

        Raises:
            ValueError: the market has other features than the agent was trained on.
        """
        if market.feature_names != self.feature_names:
            for mine, theirs in zip(self.feature_names, market.feature_names, strict=False):
                if mine != theirs:
                    raise ValueError(f"the market has the feature {theirs!r} where the agent was trained on {mine!r}")
            raise ValueError(
                f"the market has {len(market.feature_names)} features, the agent learned from {len(self.feature_names)}"
            )
        return replace(market, normalizer=self.normalizer)

    def save(self, folder: str | os.PathLike) -> None:
        """Write `agent.safetensors` into `folder`, in one step."""
        meta = {
            "schema": SCHEMA, "settings": self.settings, "feature_names": self.feature_names,
            "deployed": self.deployed, "trade_margin": self.trade_margin,
        }  # fmt: skip
        tensors = {f"network.{k}": v.detach().cpu().contiguous() for k, v in self.network.state_dict().items()}
        tensors["support"] = self.support.cpu()
        if self.normalizer is not None:
            arrays = self.normalizer.to_dict()
            tensors |= {f"normalizer.{k}": torch.from_numpy(np.array(v)) for k, v in arrays.items()}
        write_atomic(
            Path(folder) / FILE,
            lambda partial: safetensors.torch.save_file(tensors, partial, metadata={"fox": json.dumps(meta)}),
        )

    @classmethod
    def load(cls, folder: str | os.PathLike, device: str | torch.device = "cpu") -> Agent:
        """Read an agent from a run's folder, such as ``runs/…/best``.

        Raises:
            FileNotFoundError: no agent there.
            ValueError: the file is not an agent, or of another schema.
        """
        path = Path(folder) / FILE
        if not path.is_file():
            raise FileNotFoundError(f"agent {path} does not exist")
        try:
            with safetensors.safe_open(path, "pt", device=str(device)) as file:
                meta = json.loads((file.metadata() or {})["fox"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            schema = meta["schema"]
            agent = cls._assemble(meta, tensors) if schema == SCHEMA else None
        except (safetensors.SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{path} is not an agent") from error
        if agent is None:
            raise ValueError(f"agent {path} has schema {schema}, expected {SCHEMA}")
        return agent

    @classmethod
    def _assemble(cls, meta: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Agent:
        def under(prefix: str) -> dict[str, Tensor]:
            return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}

        support = tensors["support"]
        network = BranchingNetwork(**meta["settings"]["network"]).to(support.device)
        network.load_state_dict(under("network."))
        fitted = {k: v.cpu().numpy() for k, v in under("normalizer.").items()}
        return cls(
            network, support, meta["settings"], tuple(meta["feature_names"]),
            Normalizer.from_dict(fitted) if fitted else None, meta["deployed"], meta["trade_margin"],
        )  # fmt: skip
