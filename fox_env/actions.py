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

import numpy as np

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


def parse_actions(actions: object, num_envs: int | None, discrete: bool = False) -> np.ndarray:
    """Check actions and return them as int32 branches [4] or [num_envs, 4].

    Raises:
        ValueError: a wrong shape, a value that is not integral, or one out of range. Nothing is wrapped or clipped.
    """
    array = np.asarray(actions)
    shape = (() if discrete else (4,)) if num_envs is None else ((num_envs,) if discrete else (num_envs, 4))
    if array.shape != shape:
        raise ValueError(f"actions have shape {array.shape}, expected {shape}")
    if array.dtype.kind not in "iu":
        if array.dtype.kind != "f" or not np.array_equal(array, np.trunc(array)):
            raise ValueError(f"actions must be integers, got {_first(array, ~_integral(array))}")
        array = array.astype(np.int64)
    limit = NUM_ACTIONS if discrete else 3
    bad = (array < 0) | (array >= limit)
    if bad.any():
        raise ValueError(f"action {_first(array, bad)} is out of range, expected integers in [0, {limit})")
    return (decode(array) if discrete else array).astype(np.int32)


def locked_mask(position: int, max_contracts: int) -> tuple[int, int, int, int]:
    """The one action that a locked state leaves unmasked: the current side, the nearest magnitude, Market, Normal."""
    side = (position > 0) - (position < 0)
    if side == 0:
        return BASELINES["flat"]
    targets = [abs(target_position(LONG, magnitude, max_contracts) - abs(position)) for magnitude in range(3)]
    return side + 1, targets.index(min(targets)), MARKET, NORMAL


def _integral(array: np.ndarray) -> np.ndarray:
    if array.dtype.kind != "f":
        return np.zeros(array.shape, bool)
    return np.isfinite(array) & (array == np.trunc(array))


def _first(array: np.ndarray, bad: np.ndarray) -> object:
    return array[bad].flat[0] if array.ndim else array[()]
