"""A distributional, dueling, branching DQN for `fox_env`."""

from __future__ import annotations

import importlib

_PUBLIC = {
    "Agent": "agent", "BranchingNetwork": "network", "CudaPrioritizedSampler": "replay", "Profile": "profile",
    "Trainer": "trainer", "load_profile": "profile",
}  # fmt: skip
__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fox_agent' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(f"fox_agent.{_PUBLIC[name]}"), name)
    except AttributeError as error:
        # `from fox_agent import name` would say that there is no such name, and hide what went wrong.
        raise ImportError(f"fox_agent.{_PUBLIC[name]} cannot be loaded: {error}") from error
    globals()[name] = value
    return value
