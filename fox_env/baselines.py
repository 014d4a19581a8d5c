"""Policies by name, and every kind of policy as one kind: a `Policy` from observations to checked actions."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from fox_env import actions
from fox_env.dynamics import Rules
from fox_env.engine import to_numpy

if TYPE_CHECKING:
    from fox_env.market import Market
    from fox_env.oracle import OraclePolicy

NAMES = (*actions.BASELINES, "random")
"""Policies known by name."""

_BLOCK = 256  # steps drawn at once


class Policy:
    """Maps observations float32 [N, D] to actions int32 [N, 4], checked; row i is the same account in every call."""

    def reset(self) -> None:
        """Forget what was seen; the next call is the first of its episodes."""

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        raise NotImplementedError


class FixedPolicy(Policy):
    """The same action always, given as its four branches."""

    def __init__(self, action: tuple[int, int, int, int]) -> None:
        self._action = np.array([action], np.int32)

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        return np.repeat(self._action, len(obs), axis=0)


class RandomPolicy(Policy):
    """Uniform over the 81 actions. Row i draws from Philox keyed by (seed, i), whatever the number of rows.

    Args:
        seed: zero or positive, less than 2⁶⁴.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = int(seed)
        self.reset()

    def reset(self) -> None:
        self._generators: list[np.random.Generator] = []
        self._step = 0

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        if len(obs) != len(self._generators):
            self._generators = [np.random.Generator(np.random.Philox(key=[self._seed, i])) for i in range(len(obs))]
            self._step = 0
        row = self._step % _BLOCK
        if row == 0:
            index = [generator.integers(actions.NUM_ACTIONS, size=_BLOCK) for generator in self._generators]
            self._drawn = actions.decode(np.stack(index, axis=1)).astype(np.int32)
        self._step += 1
        return self._drawn[row]


class _Checked(Policy):
    """Somebody's policy, its actions checked."""

    def __init__(self, call: Callable[[np.ndarray], Any], reset: Callable[[], Any] | None, discrete: bool) -> None:
        self._call, self._reset, self._discrete = call, reset, discrete

    def reset(self) -> None:
        if self._reset is not None:
            self._reset()

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        chosen = self._call(obs)
        try:
            chosen = to_numpy(chosen)
        except ValueError:
            raise ValueError(
                f"the policy's actions are a ragged {type(chosen).__name__}, expected shape ({len(obs)}, 4)"
            ) from None
        try:
            return actions.parse_actions(chosen, len(obs), self._discrete)
        except ValueError as error:
            raise ValueError(f"the policy's {error}") from None


class _Predictor:
    """A Stable-Baselines3 model or policy, recurrent ones included."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.reset()

    def reset(self) -> None:
        self._state, self._begins = None, True

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        begins = np.full(len(obs), self._begins)
        chosen, self._state = self._model.predict(obs, state=self._state, episode_start=begins, deterministic=True)
        self._begins = False
        return chosen


class _TensorDictPolicy:
    """A module from the key ``observation`` to the key ``action``, on the device of its parameters."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def __call__(self, obs: np.ndarray) -> Any:
        import torch
        from tensordict import TensorDict
        from tensordict.nn import InteractionType, set_interaction_type

        parameter = next(self._module.parameters(), None)
        device = None if parameter is None else parameter.device
        given = TensorDict({"observation": torch.as_tensor(obs, device=device)}, batch_size=[len(obs)], device=device)
        with torch.no_grad(), set_interaction_type(InteractionType.DETERMINISTIC):
            chosen = self._module(given).get("action", None)
        if chosen is None:
            raise ValueError("the policy's module wrote no key 'action'")
        return chosen


def as_policy(policy: object, seed: int = 0) -> Policy:
    """Any kind of policy as a `Policy`.

    Args:
        policy: ``"flat"``, ``"long"``, ``"short"`` or ``"random"``; a Stable-Baselines3 model, deterministic,
            whose action space is the environment's, ``MultiDiscrete([3, 3, 3, 3])`` or ``Discrete(81)``; a
            TensorDictModule from ``observation`` to ``action`` [N, 4], in the mode that it is in, called without
            gradients and with deterministic interaction; or a callable from numpy observations [N, D] to actions
            [N, 4], whose method `reset()`, if it has one, is called before each pass.
        seed: of ``"random"``.

    Raises:
        ValueError: an unknown name, or a model with another action space; when called, actions of a wrong shape, not
            integral, or out of range.
        TypeError: no policy at all.
    """
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str):
        if policy not in NAMES:
            raise ValueError(
                f"policy {policy!r} is unknown, expected one of {', '.join(NAMES)}, or a callable or model"
            )
        return RandomPolicy(seed) if policy == "random" else FixedPolicy(actions.BASELINES[policy])
    modules = sys.modules.get("tensordict.nn")  # whoever has such a module has loaded it
    if modules is not None and isinstance(policy, modules.TensorDictModuleBase):
        return _Checked(_TensorDictPolicy(policy), None, False)
    if hasattr(policy, "predict") and hasattr(policy, "action_space"):
        model = _Predictor(policy)
        return _Checked(model, model.reset, _is_discrete(policy.action_space))
    if callable(policy):
        return _Checked(policy, getattr(policy, "reset", None), False)
    raise TypeError(
        f"policy is {policy!r}, expected a callable, a Stable-Baselines3 model, a TensorDictModule or one of "
        f"{', '.join(NAMES)}"
    )


def oracle_policy(market: Market, rules: Rules, spread_ticks: float) -> OraclePolicy | None:
    """The best policy of a synthetic market, or None where it is not known or the market does not show the state."""
    from fox_env.oracle import OraclePolicy, solve

    if market.truth is None:
        return None
    try:
        return OraclePolicy(solve(market.truth, rules, spread_ticks), market)
    except ValueError:
        return None


def _is_discrete(space: Any) -> bool:
    """Whether a model chooses an index of 81 rather than four branches."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete) and space.n == actions.NUM_ACTIONS and space.start == 0:
        return True
    if isinstance(space, spaces.MultiDiscrete) and space.nvec.tolist() == list(actions.BRANCHES):
        return False
    raise ValueError(f"the model's action space is {space}, expected MultiDiscrete([3 3 3 3]) or Discrete(81)")
