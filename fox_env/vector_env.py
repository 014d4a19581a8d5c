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
_END_REASONS = np.array(dynamics.END_REASONS, object)


class FoxESVectorEnv(VectorEnv):
    """`FoxES` (see its documentation) for N accounts, through ``gymnasium.make_vec``.

    Account i plays the game keyed by (seed, i), whatever N is; with a list of seeds, the game that
    a single environment plays with ``seed[i]``, so that this class gives the observations, rewards,
    flags and infos of ``gymnasium.vector.SyncVectorEnv`` around N `FoxES`, in every autoreset mode.

    Args:
        num_envs: N.
        market: a `Market`, a path, or None for the embedded one.
        device: ``"cpu"`` or a CUDA device, which needs the extra ``fox-es[cuda]``.
        autoreset_mode: as Gymnasium defines them: NEXT_STEP (a finished account starts anew with
            the next call, which pays 0 and ignores its action), SAME_STEP (at once; infos hold
            ``final_obs`` and ``final_info``) or DISABLED (``options={"reset_mask": bool [N]}``
            restarts the masked accounts).
        copy: return arrays of their own. False returns the engine's buffers, infos too, where they
            are of the kind that `output` names; the next call overwrites them.
        output: ``"numpy"``, or ``"torch"`` for tensors on `device`; None takes numpy on the CPU and
            torch on CUDA. Actions and ``reset_mask`` may be of either kind.
        **settings: the fields of `fox_env.Game`.

    Infos are those of `FoxES` as arrays [N], with the mask of the accounts that they are about
    under ``_name`` each: all of them, or those that ``reset_mask`` restarted, beside which the
    others' last reports stand. Integers are int32, ``ts`` int64; rewards are float64, float32 on
    CUDA. ``end_reason`` is an object array on the steps on which an episode ends, None for accounts
    that go on; ``final_info`` holds 0 for them. ``final_obs`` is an object array of observations,
    with torch a tensor [N, D] whose rows count where ``_final_obs`` is set.

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
        output: str | None = None,
        **settings: Any,
    ) -> None:
        if output not in (None, "numpy", "torch"):
            raise ValueError(f"output is {output!r}, expected 'numpy', 'torch' or None")
        mode = AutoresetMode(autoreset_mode)
        self.metadata = {"autoreset_mode": mode, "render_modes": []}
        self.render_mode = None
        self.market = as_market(market)
        self.game = game_of(self.market, settings)
        self.engine = Engine(self.market, self.game, num_envs, device, _MODES[mode])
        self.num_envs = self.engine.num_envs
        self.output = output or ("torch" if self.engine.is_cuda else "numpy")
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
        self._stays = self.engine.is_cuda and self.output == "torch"
        self._ts = self.engine._upload(self.market.ts) if self._stays else self.market.ts

    def reset(self, *, seed: Any = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode in every account, or in those of ``options["reset_mask"]``.

        Args:
            seed: an integer in [0, 2**63), or a sequence of N such integers, some of which may be
                None: these accounts go on with their seed, and draw one at the first reset.
            options: ``start``, a bar or N bars; ``reset_mask``, bool [N], in every autoreset mode.

        Raises:
            ValueError: a seed, an option or a start out of range, or a first reset that leaves out
                an account.
        """
        options = dict(options or {})
        mask, start = options.pop("reset_mask", None), options.pop("start", None)
        if options:
            raise ValueError(f"option {sorted(options)[0]!r} is unknown, expected 'start' or 'reset_mask'")
        if mask is None:
            mask = np.ones(self.num_envs, bool)
        elif hasattr(mask, "detach"):
            mask = to_numpy(mask)
        if not isinstance(mask, np.ndarray) or mask.dtype != bool or mask.shape != (self.num_envs,):
            raise ValueError(f"reset_mask is {mask!r}, expected a bool array of shape ({self.num_envs},)")
        self.engine.check_reset(mask, start)  # a reset that is refused leaves the seeds as they are
        if seed is None and not self._seeded:
            seed = int(self.np_random.integers(SEED_LIMIT))
        if seed is not None:
            self._set_seeds(seed, mask)
        self.engine.reset(mask, start)
        self._seeded = True
        reports = self._reports()
        self._show_starts(*reports)
        mask = self.engine._upload(mask) if self._stays else mask.copy()
        return self._given(self._out(self.engine.obs)), self._given(self._infos(*reports, mask))

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

        Args:
            actions: integers [N, 4], [N] for the discrete game; numpy, torch or lists.

        Returns:
            observations float32 [N, D], rewards [N], terminations and truncations bool [N], infos.

        Raises:
            RuntimeError: before the first reset; or with DISABLED, where an account has finished
                its episode.
            ValueError: an action out of range, named.
        """
        engine = self.engine
        if not self._seeded:
            raise RuntimeError("step() was called before reset()")
        if self._mode is AutoresetMode.DISABLED and (finished := engine.count[dynamics.DONE]).any():
            index = int(finished.nonzero()[0][0])
            raise RuntimeError(f"account {index} has finished its episode; reset it with options={{'reset_mask': ...}}")
        engine.step(self._parse(actions))
        reports = self._reports()
        end = reports[0][dynamics.END]
        ended, terminated, truncated = end != dynamics.RUNNING, end == dynamics.MARGIN_CALL, end > dynamics.MARGIN_CALL
        final: dict[str, Any] = {}
        if ended.any():
            final = {"end_reason": _END_REASONS[to_numpy(end)], "_end_reason": ended}
            if self._mode is AutoresetMode.SAME_STEP:
                final = {
                    "final_obs": self._final_obs(ended), "_final_obs": ended,
                    "final_info": self._final_infos(*reports, ended) | final, "_final_info": ended,
                }  # fmt: skip
                self._show_starts(*reports)
        everyone = end >= dynamics.RUNNING
        infos = self._infos(*reports, everyone) | final
        returned = (self._out(engine.obs), self._out(engine.reward), terminated, truncated, infos)
        return tuple(self._given(value) for value in returned)

    def _parse(self, actions: Any) -> Any:
        if not self.engine.is_cuda:
            return act.parse_actions(to_numpy(actions), self.num_envs, self.discrete)
        import torch

        actions = torch.as_tensor(actions, device=self.engine.device)
        return act.parse_action_tensor(actions, self.num_envs, self.discrete)

    def _shown(self, array: Any) -> Any:
        """An array of the engine in the library that its figures are made with: torch if it stays on the GPU."""
        return array if self._stays else to_numpy(array)

    def _out(self, array: Any) -> Any:
        shown = self._shown(array)
        return copied(shown) if self.copy else shown

    def _given(self, value: Any) -> Any:
        """Arrays, and those of infos, as the caller gets them."""
        if self.output == "numpy":
            return value
        import torch

        if isinstance(value, dict):
            return {name: self._given(item) for name, item in value.items()}
        if isinstance(value, np.ndarray) and value.dtype != object:
            tensor = torch.from_numpy(value)
            return tensor.to(self.engine.device) if self.engine.is_cuda else tensor
        return value

    def _reports(self) -> tuple[Any, Any, Any]:
        """The engine's flags, points and shaping terms of the last step."""
        engine = self.engine
        return self._out(engine.flags), self._out(engine.points), self._out(engine.terms)

    def _show_starts(self, flags: Any, points: Any, terms: Any) -> None:
        """Have the reports say of every account that has not stepped since its reset that it stands at the start."""
        count = self.engine.count
        new = self._shown(count[dynamics.STEPS]) == 0
        flags[:, new] = 0
        flags[dynamics.OBSERVED, new] = self._shown(count[dynamics.BAR])[new]
        flags[dynamics.CAN_TRADE, new] = 1
        points[:, new] = 0.0
        points[dynamics.FILL_PRICE, new] = np.nan
        points[dynamics.EQUITY, new] = self.engine.rules.initial_equity_usd
        if self.game.is_shaped:
            terms[:, new] = 0.0

    def _infos(self, flags: Any, points: Any, terms: Any, mask: Any) -> dict[str, Any]:
        """The reports by name, and `mask` beside each."""
        shaping = dict(zip(rewards.SHAPING_TERMS, terms, strict=True)) if self.game.is_shaped else {}
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
            "reward_terms": shaping | {f"_{name}": mask for name in shaping},
        }
        return fields | {f"_{name}": mask for name in fields}

    def _final_infos(self, flags: Any, points: Any, terms: Any, ended: Any) -> dict[str, Any]:
        flags, points, terms = copied(flags), copied(points), copied(terms)
        others = ~ended
        flags[:, others] = 0
        points[:, others] = 0.0
        if self.game.is_shaped:
            terms[:, others] = 0.0
        infos = self._infos(flags, points, terms, ended)
        infos["ts"][others] = 0
        return infos

    def _final_obs(self, ended: Any) -> Any:
        if self.output == "torch":
            return self._out(self.engine.final_obs)
        rows, final = self._shown(self.engine.final_obs), np.full(self.num_envs, None, object)
        for index in np.flatnonzero(ended):
            final[index] = rows[index].copy()
        return final

    def action_masks(self) -> Any:
        """As `FoxES.action_masks`, bool [N, 12] ([N, 81] for the discrete game)."""
        count = to_numpy(self.engine.count)
        rules = self.engine.rules
        table = act.locked_masks(rules.max_contracts, self.discrete)
        masks = table[count[dynamics.MIRRORED], count[dynamics.POSITION] + rules.max_contracts]
        masks[count[dynamics.AGE] >= rules.min_hold] = True
        return self._given(masks)


class FoxESDiscreteVectorEnv(FoxESVectorEnv):
    """`FoxESVectorEnv` with one action index of 81 an account."""

    discrete = True
