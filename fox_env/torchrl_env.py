"""The game as a batch-locked TorchRL environment."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, Unbounded
from torchrl.envs import EnvBase

from fox_env import actions as act
from fox_env import dynamics
from fox_env.engine import SEED_LIMIT, Engine, game_of, observation_bounds
from fox_env.gym_env import as_market, check_seed


class FoxESTorchEnv(EnvBase):
    """`FoxES` (see its documentation) for N accounts as a TorchRL environment.

    Keys: ``observation`` float32 [N, D], ``can_trade`` bool [N, 1], ``action`` int64 [N, 4]; ``reward`` float32 [N, 1],
    ``done``, ``terminated`` and ``truncated`` bool [N, 1], and ``pnl_points``, ``cost_points``, ``equity_usd`` float64
    [N, 1], ``position`` int64 [N, 1]. Account i plays the game keyed by (seed, i).

    Args:
        market: a `Market`, a path, or None for the embedded one.
        num_envs: N, the locked batch.
        device: ``"cpu"`` or a CUDA device, which needs the extra ``fox-es[cuda]``.
        seed: of the game; None draws one.
        **settings: the fields of `fox_env.Game`.

    Raises:
        ValueError, TypeError: a setting, a market or an action out of range, named in one sentence.
    """

    batch_locked = True

    def __init__(
        self, market: object = None, num_envs: int = 1, device: Any = "cpu", seed: int | None = None, **settings: Any
    ) -> None:
        super().__init__(device=torch.device(device), batch_size=[num_envs])
        self.market = as_market(market)
        self.game = game_of(self.market, settings)
        self.engine = Engine(self.market, self.game, num_envs, device, dynamics.DISABLED)
        low, high = (torch.as_tensor(b).expand(num_envs, -1) for b in observation_bounds(self.market, self.game.window))
        column = (num_envs, 1)
        self.observation_spec = Composite(
            observation=Bounded(low, high, shape=low.shape, dtype=torch.float32, device=self.device),
            can_trade=Binary(1, shape=column, dtype=torch.bool, device=self.device),
            pnl_points=Unbounded(column, dtype=torch.float64, device=self.device),
            cost_points=Unbounded(column, dtype=torch.float64, device=self.device),
            equity_usd=Unbounded(column, dtype=torch.float64, device=self.device),
            position=Unbounded(column, dtype=torch.int64, device=self.device),
            shape=(num_envs,),
        )
        self.action_spec = MultiCategorical([3, 3, 3, 3], shape=(num_envs, 4), dtype=torch.int64, device=self.device)
        self.reward_spec = Unbounded(column, dtype=torch.float32, device=self.device)
        self.done_spec = Composite(
            {
                key: Categorical(2, shape=column, dtype=torch.bool, device=self.device)
                for key in ("done", "terminated", "truncated")
            },
            shape=(num_envs,),
        )
        # Why each account's episode ended, RUNNING until then.
        self._end = torch.zeros(column, dtype=torch.int32, device=self.device)
        self.set_seed(seed if seed is not None else int(np.random.default_rng().integers(SEED_LIMIT)))

    def _set_seed(self, seed: int | None) -> None:
        self.engine.seed(np.full(self.engine.num_envs, check_seed(seed)), np.arange(self.engine.num_envs))

    def _tensor(self, array: Any) -> torch.Tensor:
        """A tensor of its own of an array of the engine."""
        return torch.as_tensor(array, device=self.device).clone()

    def _state(self) -> dict[str, torch.Tensor]:
        """Observation, account and done flags as they stand."""
        engine = self.engine
        count, net = engine.count, self._tensor(engine.money[dynamics.NET])
        return {
            "observation": self._tensor(engine.obs),
            "can_trade": self._tensor(count[dynamics.AGE] >= engine.rules.min_hold)[:, None],
            "equity_usd": (engine.rules.initial_equity_usd + engine.rules.multiplier * net)[:, None],
            "position": self._tensor(count[dynamics.POSITION]).long()[:, None],
        }

    def _flags(self) -> dict[str, torch.Tensor]:
        return {
            "terminated": self._end == dynamics.MARGIN_CALL,
            "truncated": self._end > dynamics.MARGIN_CALL,
            "done": self._end != dynamics.RUNNING,
        }

    def _reset(self, tensordict: TensorDictBase | None, **kwargs: Any) -> TensorDictBase:
        mask = torch.ones(self.batch_size, dtype=torch.bool, device=self.device)
        if tensordict is not None and "_reset" in tensordict:
            mask = tensordict["_reset"].reshape(self.batch_size)
        self.engine.reset(mask.cpu().numpy(), kwargs.get("start"))
        self._end[mask] = dynamics.RUNNING
        zero = torch.zeros(self.batch_size[0], 1, dtype=torch.float64, device=self.device)
        state = self._state() | {"pnl_points": zero, "cost_points": zero.clone()} | self._flags()
        return TensorDict(state, batch_size=self.batch_size, device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        engine = self.engine
        action = act.parse_action_tensor(tensordict["action"], engine.num_envs)
        engine.step(action if engine.is_cuda else action.numpy())
        # A finished account that is stepped again stays finished, though its step reports no end.
        self._end |= torch.as_tensor(engine.flags[dynamics.END])[:, None]
        result = self._state() | {
            "pnl_points": self._tensor(engine.points[dynamics.PNL])[:, None],
            "cost_points": self._tensor(engine.points[dynamics.COST])[:, None],
            "reward": self._tensor(engine.reward).float()[:, None],
        }
        result |= self._flags()
        return TensorDict(result, batch_size=self.batch_size, device=self.device)
