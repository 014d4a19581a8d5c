"""Commission and fees, in index points a contract and side. Spread and slippage live in fill prices, never here."""

from __future__ import annotations

import math
from numbers import Real

from fox_env.contracts import Contract


def commission_terms(
    contract: Contract, usd_per_side: float | None = None, bps_round_trip: float | None = None
) -> tuple[float, float]:
    """``(fixed, rate)``: one contract pays ``fixed + rate · close`` points a side.

    Args:
        contract: its multiplier turns dollars into points, here and nowhere else.
        usd_per_side: dollars a contract and side; None takes the contract's own ($2.25 for ES).
        bps_round_trip: instead of dollars, basis points of the true close for a round trip; a side pays half.

    Raises:
        ValueError: both are given, or one is negative or not finite.
    """
    if bps_round_trip is not None:
        if usd_per_side is not None:
            raise ValueError("commission_usd_per_side and commission_bps_round_trip exclude each other, got both")
        return 0.0, _cost("commission_bps_round_trip", bps_round_trip) * 1e-4 / 2
    if usd_per_side is None:
        usd_per_side = contract.commission_usd_per_side
    return _cost("commission_usd_per_side", usd_per_side) / contract.multiplier, 0.0


def _cost(name: str, value: float) -> float:
    if isinstance(value, bool) or not (isinstance(value, Real) and math.isfinite(value) and value >= 0):
        raise ValueError(f"{name} is {value!r}, expected zero or a positive number")
    return float(value)
