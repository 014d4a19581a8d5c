"""The mirror universe: the market as it looks when up and down are exchanged, p -> p0²/p.

Playing uses the maps alone: the features of the original market are transformed by their declared parity and never
computed again. `mirror_bars` makes the mirrored market itself, to check the declarations against.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fox_env.data.bars import Bars
from fox_env.data.features import Feature, check_names_and_partners


def mirror_map(features: Sequence[Feature]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The mirror of raw features: ``x[..., perm] * sign + offset``, an involution.

    Returns:
        perm int32 [F], sign float32 [F] (+1 or −1), offset float32 [F] in the features' units.

    Raises:
        ValueError: a duplicate name, or a partner that is missing or does not point back.
    """
    check_names_and_partners(features)
    row = {feature.name: index for index, feature in enumerate(features)}
    perm = [row[feature.parity.partner or feature.name] for feature in features]
    sign = [1 if feature.parity.kind in ("even", "swap") else -1 for feature in features]
    offset = [feature.parity.total for feature in features]
    return np.array(perm, np.int32), np.array(sign, np.float32), np.array(offset, np.float32)


def normalized_mirror_map(features: Sequence[Feature]) -> tuple[np.ndarray, np.ndarray]:
    """The mirror of features about their centres, as a market shows them: ``x[..., perm] * sign``, without rounding.

    Returns:
        perm int32 [F], sign float32 [F] (+1 or −1).

    Raises:
        ValueError: as `mirror_map`.
    """
    return mirror_map(features)[:2]


def mirror_bars(bars: Bars, p0: float | None = None) -> Bars:
    """The mirrored market: p becomes p0²/p, high and low change places, and so do bid and ask with their sizes.

    Args:
        bars: the original; prices must be positive.
        p0: the price that stays, in points; the first close if None.

    Raises:
        ValueError: the bars have extra columns, whose parity is not known.
    """
    if bars.extra:
        raise ValueError(f"the bars have extra columns ({', '.join(bars.extra)}), whose parity mirror_bars cannot know")
    square = float(bars.close[0] if p0 is None else p0) ** 2
    return replace(
        bars,
        open=square / bars.open,
        high=square / bars.low,
        low=square / bars.high,
        close=square / bars.close,
        bid=None if bars.ask is None else square / bars.ask,
        ask=None if bars.bid is None else square / bars.bid,
        bid_size=bars.ask_size,
        ask_size=bars.bid_size,
    )
