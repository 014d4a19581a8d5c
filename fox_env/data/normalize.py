"""Centre and scale of features, fitted on one stretch of the market and kept so that parity survives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fox_env.data.features import Feature, check_names_and_partners

CLIP = 10.0
"""Normalized features lie in [−CLIP, CLIP]."""


@dataclass(frozen=True, eq=False)
class Normalizer:
    """(x − center) / scale, clipped to ±`CLIP`.

    Args:
        center, scale: float32 [F].
        first_ts, last_ts: close of the first and of the last bar fitted on, UTC nanoseconds.
    """

    center: np.ndarray
    scale: np.ndarray
    first_ts: int
    last_ts: int

    @classmethod
    def fit(
        cls, x: np.ndarray, features: Sequence[Feature], ts: np.ndarray, rows: slice | np.ndarray = slice(None)
    ) -> Normalizer:
        """Fit on some rows of raw features.

        The scale is a plain root mean square about the centre, in float64: mean and standard deviation for even
        features; about 0 for odd ones; about c/2 for a complement(c). Partners of a swap are pooled into one mean and
        one standard deviation, partners of a neg-swap into one root mean square about 0. A scale that is 0 to float32's
        precision becomes 1.

        Args:
            x: float32 [T, F], raw features.
            features: the F features, in order.
            ts: int64 [T], close of each bar, UTC nanoseconds.
            rows: slice, mask or indices, ascending: the training part without warm-up rows.

        Raises:
            ValueError: shapes that disagree, no row, a value that is not finite, or partners that do not match.
        """
        if x.ndim != 2 or x.shape[1] != len(features):
            raise ValueError(f"x has shape {x.shape}, expected [T, {len(features)}], a column a feature")
        if len(ts) != len(x):
            raise ValueError(f"ts has {len(ts)} rows, expected {len(x)} as x")
        check_names_and_partners(features)
        fitted_ts = ts[rows]
        if not len(fitted_ts):
            raise ValueError("rows selects no bar, expected at least one to fit the normalizer on")
        index = {feature.name: column for column, feature in enumerate(features)}
        center, scale = np.zeros(len(features), np.float32), np.ones(len(features), np.float32)
        for column, feature in enumerate(features):
            own = x[rows, column].astype(np.float64)
            if not np.isfinite(own).all():
                bar = int(np.arange(len(x))[rows][np.argmin(np.isfinite(own))])
                raise ValueError(f"feature {feature.name!r} is {x[bar, column]} at row {bar}, expected a finite number")
            parity = feature.parity
            # Partners are pooled in the order of their columns, so that both get the same bits.
            pool = own
            if parity.partner is not None:
                pair = sorted((column, index[parity.partner]))
                pool = np.concatenate([x[rows, member] for member in pair]).astype(np.float64)
            middle = pool.mean() if parity.kind in ("even", "swap") else parity.total / 2
            spread = np.sqrt(np.mean(np.square(pool - middle)))
            center[column] = middle
            if spread > np.finfo(np.float32).eps * np.abs(pool).max():
                scale[column] = max(spread, np.finfo(np.float32).tiny)
        return cls(center, scale, int(fitted_ts[0]), int(fitted_ts[-1]))

    def apply(self, x: np.ndarray) -> np.ndarray:
        """Normalized features, float32 of the shape of `x` ([..., F]); NaN stays NaN.

        Raises:
            ValueError: another number of features than fitted.
        """
        if x.shape[-1] != len(self.center):
            raise ValueError(f"x has {x.shape[-1]} features, expected {len(self.center)} as fitted")
        with np.errstate(over="ignore"):
            result = np.subtract(x, self.center, dtype=np.float32)
            result /= self.scale
        return np.clip(result, -CLIP, CLIP, out=result)

    def to_dict(self) -> dict[str, np.ndarray]:
        """The four fields as arrays, for saving; `from_dict` is the way back."""
        return {name: np.asarray(value) for name, value in self.__dict__.items()}

    @classmethod
    def from_dict(cls, arrays: dict[str, np.ndarray]) -> Normalizer:
        """A normalizer from what `to_dict` gave."""
        return cls(
            center=np.asarray(arrays["center"], np.float32),
            scale=np.asarray(arrays["scale"], np.float32),
            first_ts=int(arrays["first_ts"]),
            last_ts=int(arrays["last_ts"]),
        )
