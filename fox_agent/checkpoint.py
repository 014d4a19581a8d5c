"""Writing and reading what a run keeps: never half-written, never code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fox_env.files import write_atomic

SCHEMA = 1


def save_state(path: str | os.PathLike, state: Mapping[str, Any]) -> None:
    """Save nested dicts of tensors and plain values."""
    write_atomic(path, lambda partial: torch.save({"schema": SCHEMA, **state}, partial))


def load_state(path: str | os.PathLike) -> dict[str, Any]:
    """Read what `save_state` wrote, onto the CPU, with ``weights_only=True``.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a checkpoint, or one of another schema.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"checkpoint {path} does not exist")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        what = (str(error) or type(error).__name__).splitlines()[0]
        raise ValueError(f"{path} is not a checkpoint: {what}") from error
    if not isinstance(state, dict) or state.get("schema") != SCHEMA:
        found = state.get("schema") if isinstance(state, dict) else None
        raise ValueError(f"checkpoint {path} has schema {found}, expected {SCHEMA}")
    return state
