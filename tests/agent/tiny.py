"""A profile small enough for tests of the learner's upper half, and its market."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import fox_env
from fox_agent.profile import Profile, load_profile
from fox_env import Market

SMOKETEST = Path(__file__).resolve().parents[2] / "configs" / "dqn-smoketest.toml"

TINY = {
    "data.synthetic_bars": 6_000, "game.episode_bars": 60, "game.min_hold_bars": 3, "network.bottleneck": 4,
    "network.hidden": [16], "network.num_atoms": 11, "network.num_quantiles": 4, "replay.capacity": 2_000,
    "replay.min_size": 64, "exploration.epsilon_steps": 20, "collect.num_envs": 12, "train.epochs": 2,
    "train.updates_per_epoch": 6, "train.batch_size": 32, "gate.min_sessions": 0,
}  # fmt: skip


def tiny_profile(**overrides: Any) -> Profile:
    """`TINY` over the smoke test, `overrides` over both; double underscores stand for the dot."""
    return load_profile(SMOKETEST, TINY | {key.replace("__", "."): value for key, value in overrides.items()})


@functools.cache
def parts(kind: str = "planted", bars: int = 6_000, seed: int = 0) -> tuple[Market, Market, Market]:
    """Training, validation and test part of a synthetic market."""
    return fox_env.synthetic_market(kind, bars, seed).split(0.6, 0.22)
