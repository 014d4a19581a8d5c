"""Many accounts as one Gymnasium vector environment, stepped by one compiled call."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from fox_env import actions as act
from fox_env import dynamics, rewards
from fox_env.engine import SEED_LIMIT, Engine, copied, game_of, observation_bounds, to_numpy
from fox_env.gym_env import as_market, check_seed

_MODES = {
    AutoresetMode.NEXT_STEP: dynamics.NEXT_STEP,
    AutoresetMode.SAME_STEP: dynamics.SAME_STEP,
    AutoresetMode.DISABLED: dynamics.DISABLED,
}


class FoxESVectorEnv(VectorEnv):
    """`FoxES` (see its documentation) for N accounts, through ``gymnasium.make_vec``.

    Account i plays the game keyed by (seed, i), whatever N is; with a list of seeds, the game that a single environment
    plays with ``seed[i]``. Arrays are numpy on the CPU and torch tensors on a CUDA device.

    Args:
        num_envs: N.
        market: a `Market`, a path, or None for the embedded one.
        device: ``"cpu"`` or a CUDA device, which needs the extra ``fox-es[cuda]``.
        autoreset_mode: as Gymnasium defines them: NEXT_STEP (a finished account starts anew with the next call, which
            pays 0 and ignores its action), SAME_STEP (at once; ``infos`` hold ``final_obs`` and ``final_info``) or
            DISABLED (``options={"reset_mask": bool [N]}`` restarts the masked accounts).
        copy: return arrays of their own; False returns the engine's buffers, which the next call overwrites.
        **settings: the fields of `fox_env.Game`.

    Infos are those of `FoxES`, arrays [N] with a mask under ``_name`` each.

    Raises:
        ValueError, TypeError: a setting, a market or an action out of range, named in one sentence.
    """

    discrete = False

    def __init__(
        self,
        num_envs: int = 1,
        market: object = None,
        device: str = "cpu",
        autoreset_mode: AutoresetMode | str = AutoresetMode.NEXT_STEP,
        copy: bool = True,
        **settings: Any,
    ) -> None:
        mode = AutoresetMode(autoreset_mode)
        self.metadata = {"autoreset_mode": mode, "render_modes": []}
        self.render_mode = None
        self.num_envs = int(num_envs)
        self.market = as_market(market)
        self.game = game_of(self.market, settings)
        self.engine = Engine(self.market, self.game, self.num_envs, device, _MODES[mode])
        self.copy = copy
        low, high = observation_bounds(self.market, self.game.window)
        self.single_observation_space = gym.spaces.Box(low, high, dtype=np.float32)
        self.single_action_space = (
            gym.spaces.Discrete(act.NUM_ACTIONS) if self.discrete else gym.spaces.MultiDiscrete([3, 3, 3, 3])
        )
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._mode = mode
        self._seeded = False
        self._all = np.ones(self.num_envs, bool)
        self._ts = self.engine._upload(self.market.ts)

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode in every account, or in those of ``options["reset_mask"]``.

        Args:
            seed: an integer in [0, 2**63), or a sequence of N such integers, some of which may be None: these accounts
                go on with their seed, and draw one at the first reset.
            options: ``start``, a bar or N bars; ``reset_mask``, bool [N].

        Raises:
            ValueError: a seed, an option or a start out of range, or a first reset that leaves out an account.
        """
        options = dict(options or {})
        mask, start = options.pop("reset_mask", None), options.pop("start", None)
        if options:
            raise ValueError(f"option {sorted(options)[0]!r} is unknown, expected 'start' or 'reset_mask'")
        if mask is not None and (
            not isinstance(mask, np.ndarray) or mask.dtype != bool or mask.shape != (self.num_envs,)
        ):
            raise ValueError(f"reset_mask is {mask!r}, expected a bool array of shape ({self.num_envs},)")
        mask = self._all if mask is None else mask
        if seed is None and not self._seeded:
            seed = int(self.np_random.integers(SEED_LIMIT))
        if seed is not None:
            self._set_seeds(seed, mask)
        self.engine.reset(mask, start)
        self._seeded = True
        return self._out(self.engine.obs), self._restarted(self._fields(), self.engine._upload(mask))

    def _set_seeds(self, seed: Any, mask: np.ndarray) -> None:
        """Key the masked accounts anew and start them from their first episode."""
        if np.ndim(seed) == 0:
            seed = check_seed(seed)
            super().reset(seed=seed)
            seeds, numbers = np.full(self.num_envs, seed), np.arange(self.num_envs)
        else:
            seed = list(seed)
            if len(seed) != self.num_envs:
                raise ValueError(f"seed has {len(seed)} entries, expected num_envs = {self.num_envs}")
            if self._seeded:
                mask = mask & np.array([one is not None for one in seed])
            drawn = self.np_random.integers(SEED_LIMIT, size=self.num_envs)
            seeds = np.array([check_seed(drawn[i] if one is None else one) for i, one in enumerate(seed)])
            numbers = np.zeros(self.num_envs, np.int64)
        self.engine.seed(seeds, numbers, mask)

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Play one bar in every account; see `FoxES`.

        Returns:
            observations float32 [N, D], rewards [N], terminations and truncations bool [N], infos.
        """
        engine = self.engine
        if not self._seeded:
            raise RuntimeError("step() was called before reset()")
        if self._mode is AutoresetMode.DISABLED and (finished := engine.count[dynamics.DONE]).any():
            index = int(finished.nonzero()[0][0])
            raise RuntimeError(f"account {index} has finished its episode; reset it with options={{'reset_mask': ...}}")
        engine.step(self._parse(actions))
        end = engine.flags[dynamics.END]
        terminated = end == dynamics.MARGIN_CALL
        truncated = end > dynamics.MARGIN_CALL
        return self._out(engine.obs), self._out(engine.reward), terminated, truncated, self._step_infos()

    def _parse(self, actions: Any) -> Any:
        if not self.engine.is_cuda:
            return act.parse_actions(actions, self.num_envs, self.discrete)
        import torch

        actions = torch.as_tensor(actions, device=self.engine.device)
        return act.parse_action_tensor(actions, self.num_envs, self.discrete)

    def _out(self, array: Any) -> Any:
        return copied(array) if self.copy else array

    def _step_infos(self) -> dict[str, Any]:
        infos = self._fields()
        ended = self.engine.flags[dynamics.END] != dynamics.RUNNING
        if not ended.any():
            return infos
        if self._mode is not AutoresetMode.SAME_STEP:
            return infos | self._end_reasons(ended)
        return self._restarted(infos, ended) | {
            "final_obs": self._final_obs(ended), "_final_obs": ended,
            "final_info": infos | self._end_reasons(ended), "_final_info": ended,
        }  # fmt: skip

    def _fields(self) -> dict[str, Any]:
        """Infos of the last step, arrays of their own."""
        flags, points = copied(self.engine.flags), copied(self.engine.points)
        fields = {
            "ts": self._ts[flags[dynamics.OBSERVED]],
            "position": flags[dynamics.HELD],
            "equity_usd": points[dynamics.EQUITY],
            "pnl_points": points[dynamics.PNL],
            "gross_points": points[dynamics.GROSS],
            "cost_points": points[dynamics.COST],
            "filled": flags[dynamics.FILLED],
            "fill_price": points[dynamics.FILL_PRICE],
            "forced": flags[dynamics.FORCED],
            "rolled": flags[dynamics.ROLLED],
            "can_trade": flags[dynamics.CAN_TRADE] != 0,
        }
        terms = copied(self.engine.terms) if self.game.is_shaped else ()
        fields["reward_terms"] = dict(zip(rewards.SHAPING_TERMS, terms, strict=False))
        return fields | {f"_{name}": self._all for name in fields}

    def _restarted(self, infos: dict[str, Any], mask: Any) -> dict[str, Any]:
        """`infos` in which the masked accounts stand at the start of an episode."""
        fresh = {
            "ts": self._ts[self.engine.count[dynamics.BAR]], "position": 0,
            "equity_usd": self.engine.rules.initial_equity_usd, "pnl_points": 0.0, "gross_points": 0.0,
            "cost_points": 0.0, "filled": 0, "fill_price": np.nan, "forced": 0, "rolled": 0, "can_trade": True,
        }  # fmt: skip
        infos = dict(infos)
        for name, value in fresh.items():
            column = copied(infos[name])
            column[mask] = value[mask] if name == "ts" else value
            infos[name] = column
        infos["reward_terms"] = {name: copied(column) for name, column in infos["reward_terms"].items()}
        for column in infos["reward_terms"].values():
            column[mask] = 0.0
        return infos

    def _end_reasons(self, ended: Any) -> dict[str, Any]:
        reasons = np.full(self.num_envs, None, object)
        end = to_numpy(self.engine.flags[dynamics.END])
        for index in np.flatnonzero(end):
            reasons[index] = dynamics.END_REASONS[end[index]]
        return {"end_reason": reasons, "_end_reason": ended}

    def _final_obs(self, ended: Any) -> np.ndarray:
        final = np.full(self.num_envs, None, object)
        for index in np.flatnonzero(to_numpy(ended)):
            final[index] = copied(self.engine.final_obs[index])
        return final

    def action_masks(self) -> np.ndarray:
        """As `FoxES.action_masks`, bool [N, 12] ([N, 81] for the discrete game)."""
        count = to_numpy(self.engine.count)
        rules = self.engine.rules
        table = act.locked_masks(rules.max_contracts, self.discrete)
        masks = table[count[dynamics.MIRRORED], count[dynamics.POSITION] + rules.max_contracts]
        masks[count[dynamics.AGE] >= rules.min_hold] = True
        return masks


class FoxESDiscreteVectorEnv(FoxESVectorEnv):
    """`FoxESVectorEnv` with one action index of 81 an account."""

    discrete = True
