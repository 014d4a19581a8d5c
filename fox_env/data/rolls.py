"""From the bars of several contracts to one chain of front contracts."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass

import numpy as np

from fox_env.data.bars import Bars
from fox_env.data.calendar import expiration_ns, sessions, third_friday

HISTORY_BARS = 5_000
"""Bars kept of a contract before it became the front, for the features to warm up on."""

ROLL_RULES = ("volume", "calendar", "expiry")

_NAME = re.compile(r"([A-Z0-9]+?)([HMUZ])(\d{1,2})")
_MONTH = {"H": 3, "M": 6, "U": 9, "Z": 12}
_LISTED_YEARS = 6  # ES is listed five years ahead
_EPOCH = dt.date(1970, 1, 1)


@dataclass(frozen=True)
class Segment:
    """A stretch of time in which one contract was the front.

    Args:
        instrument: the contract's name, such as ``"ESH20"``.
        bars: the contract's own bars, those before it became the front included, which warm up its features.
        first: index in `bars` of the first bar as the front. The segment ends with the last bar of `bars`.
        gap: g in points, the contract's last price at or before the previous front's last close less that close;
            NaN where it cannot be measured, 0 for the first segment.
    """

    instrument: str
    bars: Bars
    first: int
    gap: float


@dataclass(frozen=True)
class Outright:
    """A quarterly futures contract as its name tells it.

    Args:
        root: root symbol.
        name: with a two-digit year.
        expiry: UTC nanoseconds.
        roll: the exchange's roll date, see `roll_date`.
    """

    root: str
    name: str
    expiry: int
    roll: dt.date


def roll_date(year: int, month: int) -> dt.date:
    """The exchange's roll date of the contract of that month: from this trade date on the next contract is the lead.

    The Thursday eight days before the third Friday; from June 2022 on the Monday before it. A holiday that moves the
    expiry does not move the roll.
    """
    return third_friday(year, month) - dt.timedelta(4 if (year, month) >= (2022, 6) else 8)


def outright(name: str, near: int | None = None) -> Outright | None:
    """Read a contract's name.

    Args:
        name: root, month letter H, M, U or Z and year, such as ``"ESH20"`` or ``"ESH0"``.
        near: UTC nanoseconds of the first bar. A name with one year digit means the first such contract to expire after
            it, or, where that one is not listed yet, the one before, whose rows then come after its expiry.

    Returns:
        The contract, or None for anything else: a spread, an option, a continuous symbol, or one year digit without
        `near`.
    """
    match = _NAME.fullmatch(name)
    if match is None or (len(match[3]) == 1 and near is None):
        return None
    root, letter, digits = match.groups()
    month = _MONTH[letter]
    if len(digits) == 2:
        year = 2000 + int(digits)
    else:
        now = dt.datetime.fromtimestamp(near // 1_000_000_000, dt.UTC).year
        year = now - (now - int(digits)) % 10
        if near >= expiration_ns(year, month):
            year += 10
        if year - now > _LISTED_YEARS:
            year -= 10
    return Outright(root, f"{root}{letter}{year % 100:02d}", expiration_ns(year, month), roll_date(year, month))


def chain(contracts: dict[str, Bars], *, rule: str = "volume", quality: dict[str, int | str]) -> list[Segment]:
    """The front contract of each session, causally.

    Each session takes the contract that the rule names:

    - ``"volume"``: the one that had the largest volume in the session before, the present front where that is a tie;
    - ``"calendar"``: the nearest one whose `roll_date` comes after the session's trade date;
    - ``"expiry"``: the present front, as long as it trades.

    It never takes an earlier expiry than the present front. A contract without bars in the session is passed over: the
    present front stays if it has bars, else the next expiry that has them takes over; so the first session takes the
    nearest contract that trades in it, or a later one that the calendar names. A roll thus happens between two
    sessions. Rows that begin at or after the contract's expiry are dropped.

    Args:
        contracts: bars by contract name with a two-digit year, each in time order; their lengths may differ.
        rule: one of `ROLL_RULES`.
        quality: counts are added to ``rows_after_expiry``, ``rows_behind_front`` (in sessions in which only contracts
            nearer than the front have bars), ``contracts``, ``contracts_never_front``, ``rolls`` and
            ``rolls_unmeasured``.

    Raises:
        ValueError: an unknown rule, a name that is no contract's, or no row before its contract's expiry.
    """
    if rule not in ROLL_RULES:
        raise ValueError(f"roll {rule!r} is unknown, expected one of {', '.join(ROLL_RULES)}")
    listed = []
    for name, bars in contracts.items():
        contract = outright(name)
        if contract is None:
            raise ValueError(f"{name!r} is not the name of a quarterly contract with a two-digit year, such as 'ESH20'")
        alive = bars.start < contract.expiry
        _add(quality, "rows_after_expiry", len(bars) - int(alive.sum()))
        if alive.any():
            listed.append((contract, bars if alive.all() else bars.take(alive)))
    if not listed:
        raise ValueError(f"every row of {', '.join(contracts)} comes after its contract's expiry")
    listed.sort(key=lambda item: item[0].expiry)

    # One row a contract, one column a session: the rows it has there, and its volume.
    session_of = [sessions(bars.start, bars.ts).session for _, bars in listed]
    days = np.unique(np.concatenate(session_of))
    first_row = np.array([np.searchsorted(own, days, side="left") for own in session_of])
    end_row = np.array([np.searchsorted(own, days, side="right") for own in session_of])
    has_bars = end_row > first_row
    volume = np.zeros(has_bars.shape)
    for k, (_, bars) in enumerate(listed):
        total = np.concatenate([[0.0], np.cumsum(bars.volume)])
        volume[k] = total[end_row[k]] - total[first_row[k]]

    roll_days = np.array([(contract.roll - _EPOCH).days for contract, _ in listed])
    scheduled = np.searchsorted(roll_days, days, side="right")  # as many contracts have rolled

    runs: list[list[int]] = []  # contract, first session, last session
    front = 0
    for day in range(len(days)):
        named = front
        if rule == "calendar":
            named = min(max(front, int(scheduled[day])), len(listed) - 1)
        elif rule == "volume" and day:
            named = front + int(np.argmax(volume[front:, day - 1]))  # the first of equals
        if has_bars[named, day]:
            front = named
        if not has_bars[front, day]:
            later = np.flatnonzero(has_bars[front:, day])
            if not len(later):
                _add(quality, "rows_behind_front", int((end_row - first_row)[:, day].sum()))
                continue
            front += int(later[0])
        if runs and runs[-1][0] == front:
            runs[-1][2] = day
        else:
            runs.append([front, day, day])

    segments: list[Segment] = []
    for k, first_day, last_day in runs:
        contract, bars = listed[k]
        first = first_row[k, first_day]
        begin = max(0, first - HISTORY_BARS)
        gap = measure_gap(segments[-1].bars, bars) if segments else 0.0
        segments.append(Segment(contract.name, bars.take(slice(begin, end_row[k, last_day])), int(first - begin), gap))
    _add(quality, "contracts", len(contracts))
    _add(quality, "contracts_never_front", len(contracts) - len(segments))
    count_rolls(segments, quality)
    return segments


def follow(runs: list[tuple[str, Bars]], quality: dict[str, int | str]) -> list[Segment]:
    """Segments of a series that changes contracts by itself, such as a continuous symbol: every roll is unmeasured.

    Args:
        runs: instrument and bars of each stretch, in time order.
        quality: counts are added to ``rolls`` and ``rolls_unmeasured``.
    """
    segments = [Segment(name, bars, 0, np.nan if k else 0.0) for k, (name, bars) in enumerate(runs)]
    count_rolls(segments, quality)
    return segments


def count_rolls(segments: list[Segment], quality: dict[str, int | str]) -> None:
    """Add to ``rolls`` and ``rolls_unmeasured``."""
    _add(quality, "rolls", len(segments) - 1)
    _add(quality, "rolls_unmeasured", sum(bool(np.isnan(segment.gap)) for segment in segments))


def measure_gap(old: Bars, new: Bars) -> float:
    """The new contract's last price at or before the old one's last close, of the same session, less that close."""
    row = int(np.searchsorted(new.ts, old.ts[-1], side="right")) - 1
    if row < 0:
        return np.nan
    ends = np.array([new.ts[row], old.ts[-1]])
    session = sessions(np.array([new.start[row], old.start[-1]]), ends).session
    return float(new.close[row] - old.close[-1]) if session[0] == session[1] else np.nan


def _add(quality: dict[str, int | str], key: str, count: int) -> None:
    quality[key] = int(quality.get(key, 0)) + count
