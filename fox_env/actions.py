"""The action: four branches, and the only map from an action to an exposure or a position.

========== ======================================= =======================
branch     levels                                  meaning
========== ======================================= =======================
direction  0 Short, 1 Flat, 2 Long                 sign −1, 0, +1
magnitude  0 Small, 1 Half, 2 Full                 0.25, 0.50, 1.00
order      0 Market, 1 Limit, 2 IOC                order type
urgency    0 Patient, 1 Normal, 2 Aggressive       see `fox_env.dynamics`
========== ======================================= =======================
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

BRANCHES = (3, 3, 3, 3)
NUM_ACTIONS = 81
SHORT, FLAT, LONG = 0, 1, 2
SMALL, HALF, FULL = 0, 1, 2
MARKET, LIMIT, IOC = 0, 1, 2
PATIENT, NORMAL, AGGRESSIVE = 0, 1, 2
MAGNITUDES = (0.25, 0.5, 1.0)

BASELINES = {
    "flat": (FLAT, FULL, MARKET, NORMAL),
    "long": (LONG, FULL, MARKET, NORMAL),
    "short": (SHORT, FULL, MARKET, NORMAL),
}


def target_exposure(direction: int, magnitude: int) -> float:
    """Share of the largest position that the action asks for, in [−1, 1]: sign × magnitude."""
    return (direction - 1) * MAGNITUDES[magnitude]


def target_position(direction: int, magnitude: int, max_contracts: int) -> int:
    """Signed whole contracts that the action asks for: sign × max(1, ⌊magnitude·max_contracts + ½⌋)."""
    # 4·magnitude is 1, 2, 4, so that integers decide the rounding.
    contracts = ((1 << magnitude) * max_contracts + 2) // 4
    return (direction - 1) * max(1, contracts)


def target_positions(max_contracts: int) -> np.ndarray:
    """`target_position` of the nine exposure indices 3·direction + magnitude, int32 [9]."""
    return np.array([target_position(e // 3, e % 3, max_contracts) for e in range(9)], np.int32)


def encode(action: np.ndarray) -> np.ndarray:
    """Branches [..., 4] to the index ((dir·3 + mag)·3 + order)·3 + urgency, int64 [...]."""
    action = np.asarray(action, np.int64)
    return ((action[..., 0] * 3 + action[..., 1]) * 3 + action[..., 2]) * 3 + action[..., 3]


def decode(index: np.ndarray) -> np.ndarray:
    """Index in [0, 81) to branches, int64 [..., 4]."""
    index = np.asarray(index, np.int64)
    return np.stack([index // 27, index // 9 % 3, index // 3 % 3, index % 3], axis=-1)


DECODED = decode(np.arange(NUM_ACTIONS)).tolist()  # the branches of each index


def parse_actions(actions: object, num_envs: int | None, discrete: bool = False) -> np.ndarray:
    """Check actions and return them as int32 branches [4] or [num_envs, 4].

    Raises:
        ValueError: a wrong shape, a value that is not integral, or one out of range. Nothing is wrapped or clipped.
    """
    array = np.asarray(actions)
    shape = (() if discrete else (4,)) if num_envs is None else ((num_envs,) if discrete else (num_envs, 4))
    if array.shape != shape:
        raise ValueError(f"actions have shape {array.shape}, expected {shape}")
    if array.dtype.kind not in "iu" and not (integral := _integral(array)).all():
        raise ValueError(f"actions must be integers, got {_first(array, ~integral)}")
    limit = NUM_ACTIONS if discrete else 3
    bad = (array < 0) | (array >= limit)
    if bad.any():
        raise ValueError(f"action {_first(array, bad)} is out of range, expected integers in [0, {limit})")
    return (decode(array) if discrete else array).astype(np.int32)


def parse_action_tensor(actions: torch.Tensor, num_envs: int, discrete: bool = False) -> torch.Tensor:
    """`parse_actions` for a torch tensor: contiguous int32 branches [num_envs, 4] on its device.

    Raises:
        ValueError: as `parse_actions`.
    """
    import torch

    shape = (num_envs,) if discrete else (num_envs, 4)
    if tuple(actions.shape) != shape:
        raise ValueError(f"actions have shape {tuple(actions.shape)}, expected {shape}")
    if actions.dtype == torch.bool or actions.is_complex():
        raise ValueError(f"actions must be integers, got {actions.dtype}")
    limit = NUM_ACTIONS if discrete else 3
    good = (actions >= 0) & (actions < limit)
    if actions.is_floating_point():
        good &= actions == actions.trunc()
    if not good.all():
        raise ValueError(
            f"action {actions[~good][0].item()} is out of range or not integral, expected integers in [0, {limit})"
        )
    actions = actions.int()
    if discrete:
        actions = torch.stack([actions // 27, actions // 9 % 3, actions // 3 % 3, actions % 3], -1)
    return actions.contiguous()


def locked_mask(position: int, max_contracts: int) -> tuple[int, int, int, int]:
    """The one action that a locked state leaves unmasked: the current side, the nearest magnitude, Market, Normal."""
    side = (position > 0) - (position < 0)
    if side == 0:
        return BASELINES["flat"]
    targets = [abs(target_position(LONG, magnitude, max_contracts) - abs(position)) for magnitude in range(3)]
    return side + 1, targets.index(min(targets)), MARKET, NORMAL


@functools.cache
def locked_masks(max_contracts: int, discrete: bool) -> np.ndarray:
    """Masks of the locked states by mirrored (0 or 1) and position + max_contracts, True where unmasked.

    Returns:
        bool [2, 2·max_contracts + 1, 12], its last axis 81 for the discrete game.
    """
    positions = range(-max_contracts, max_contracts + 1)
    plain = np.array([locked_mask(position, max_contracts) for position in positions])
    named = np.stack([plain, plain])
    named[1, :, 0] = 2 - named[1, :, 0]
    if discrete:
        return encode(named)[..., None] == np.arange(NUM_ACTIONS)
    return (named[..., None] == np.arange(3)).reshape(2, len(positions), 12)


def _integral(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind != "f":
        return np.zeros(array.shape, bool)
    return np.isfinite(array) & (array == np.trunc(array))


def _first(array: np.ndarray, bad: np.ndarray) -> object:
    return array[bad].flat[0] if array.ndim else array[()]
