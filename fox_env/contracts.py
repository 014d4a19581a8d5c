"""Contract terms: tick, dollars a point, fees and margins. Nothing else in Fox knows "50 dollars a point".

Sources. Tick and multiplier: the CME contract specifications of ES, MES, NQ and MNQ. Fees: an all-in retail rate
(broker, exchange, clearing, regulator), about $2.25 a side for the minis and $0.62 for the micros in 2024-2026.
Maintenance margin of ES until 2022: the exchange's notices as collected in the LEAN project's margin history; 2023 and
later, and all of NQ: rounded from broker pages, which disagree with one another by some ten percent. Intraday margin is
a broker's rate, not the exchange's.
"""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass

import numpy as np

_DAY_NS = 86_400_000_000_000

# (from this date on, overnight maintenance in dollars a contract); the first row also serves earlier dates.
_ES_MAINTENANCE = (
    ("2012-03-26", 3_500.0), ("2013-10-03", 3_800.0), ("2013-10-15", 4_100.0), ("2014-01-29", 4_325.0),
    ("2014-07-25", 4_600.0), ("2016-01-29", 4_750.0), ("2016-04-08", 4_500.0), ("2016-05-06", 4_200.0),
    ("2016-09-30", 4_500.0), ("2016-11-03", 4_750.0), ("2017-02-24", 5_000.0), ("2017-05-12", 4_600.0),
    ("2017-06-01", 4_400.0), ("2017-06-30", 4_200.0), ("2017-09-11", 4_500.0), ("2018-01-12", 4_800.0),
    ("2018-01-26", 5_050.0), ("2018-02-07", 5_550.0), ("2018-02-09", 5_800.0), ("2018-05-04", 5_400.0),
    ("2018-05-24", 5_600.0), ("2018-08-10", 5_800.0), ("2018-09-20", 6_000.0), ("2019-04-17", 6_300.0),
    ("2019-11-01", 6_000.0), ("2019-11-15", 6_300.0), ("2020-01-09", 6_600.0), ("2020-03-02", 7_200.0),
    ("2020-03-04", 7_600.0), ("2020-03-10", 8_350.0), ("2020-03-13", 9_000.0), ("2020-03-17", 10_600.0),
    ("2020-03-19", 12_000.0), ("2020-12-11", 11_000.0), ("2021-08-18", 11_500.0), ("2022-01-21", 10_800.0),
    ("2023-01-01", 11_200.0), ("2024-01-01", 12_000.0), ("2025-01-01", 21_000.0),
)  # fmt: skip
_NQ_MAINTENANCE = (
    ("2012-03-26", 2_750.0), ("2018-02-09", 6_000.0), ("2020-03-19", 13_500.0), ("2021-01-01", 15_500.0),
    ("2024-01-01", 18_500.0), ("2025-01-01", 30_000.0),
)  # fmt: skip


@dataclass(frozen=True)
class Contract:
    """The terms of one futures contract.

    Args:
        name: root symbol, such as ``"ES"``.
        tick: smallest price change, in index points.
        multiplier: dollars a point.
        commission_usd_per_side: commission and fees of one contract, one side, in dollars.
        intraday_margin_usd: margin of one contract inside a session, in dollars.
        maintenance_usd: ``(ISO date, dollars)`` rows, ascending: overnight maintenance margin in force from that date.

    Raises:
        ValueError: a term is out of range or not finite, or the dates do not ascend.
    """

    name: str
    tick: float
    multiplier: float
    commission_usd_per_side: float
    intraday_margin_usd: float
    maintenance_usd: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        for field in ("tick", "multiplier"):
            value = getattr(self, field)
            if not (np.isfinite(value) and value > 0):
                raise ValueError(f"contract {self.name}: {field} is {value}, expected a positive number")
        for field in ("commission_usd_per_side", "intraday_margin_usd"):
            value = getattr(self, field)
            if not (np.isfinite(value) and value >= 0):
                raise ValueError(f"contract {self.name}: {field} is {value}, expected zero or a positive number")
        dates = [dt.date.fromisoformat(day) for day, _ in self.maintenance_usd]
        if not dates or dates != sorted(set(dates)):
            raise ValueError(f"contract {self.name}: maintenance_usd needs at least one row, its dates ascending")
        for day, rate in self.maintenance_usd:
            if not (np.isfinite(rate) and rate >= 0):
                raise ValueError(
                    f"contract {self.name}: maintenance_usd of {day} is {rate}, expected zero or a positive number"
                )

    @property
    def tick_usd(self) -> float:
        """Dollars a tick."""
        return self.tick * self.multiplier

    def maintenance_at(self, ts: np.ndarray) -> np.ndarray:
        """Overnight maintenance in dollars a contract (float64 [T]) in force at UTC nanoseconds `ts` (int64 [T])."""
        starts = np.array([dt.date.fromisoformat(day).toordinal() for day, _ in self.maintenance_usd])
        rates = np.array([rate for _, rate in self.maintenance_usd], dtype=np.float64)
        day = np.asarray(ts, np.int64) // _DAY_NS + dt.date(1970, 1, 1).toordinal()
        return rates[np.clip(np.searchsorted(starts, day, side="right") - 1, 0, None)]


def _tenth(rows: tuple[tuple[str, float], ...]) -> tuple[tuple[str, float], ...]:
    return tuple((day, rate / 10) for day, rate in rows)


CONTRACTS = {
    "ES": Contract("ES", 0.25, 50.0, 2.25, 500.0, _ES_MAINTENANCE),
    "MES": Contract("MES", 0.25, 5.0, 0.62, 50.0, _tenth(_ES_MAINTENANCE)),
    "NQ": Contract("NQ", 0.25, 20.0, 2.25, 500.0, _NQ_MAINTENANCE),
    "MNQ": Contract("MNQ", 0.25, 2.0, 0.62, 50.0, _tenth(_NQ_MAINTENANCE)),
}


def get_contract(contract: str | Contract) -> Contract:
    """The contract of that root symbol, or the user's own passed through.

    Raises:
        ValueError: an unknown root symbol; the known ones are named.
    """
    if isinstance(contract, Contract):
        return contract
    if contract not in CONTRACTS:
        raise ValueError(f"contract {contract!r} is unknown, expected one of {', '.join(CONTRACTS)} or a Contract")
    return CONTRACTS[contract]
