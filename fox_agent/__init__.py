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
    value = getattr(importlib.import_module(f"fox_agent.{_PUBLIC[name]}"), name)
    globals()[name] = value
    return value
