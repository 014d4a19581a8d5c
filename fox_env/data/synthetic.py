"""Synthetic bars: markets whose best policy is known, one without any edge, and one that looks like ES.

The lattice kinds (``planted``, ``planted_noisy``, ``martingale``) draw every bar as a path of K = 16 steps of one tick
up or down, so that σ is one point a bar. The open is the close before; high and low are the path's own, open included.
Drift comes from tilting the steps, p_up = ½(1 + drift / (K·tick)). A resting order meets the same paths that move the
close, so its adverse selection is honest. `fox_env.oracle` knows the law of such a bar exactly.

========================== ============================ =============================== =======================
kind                       states, drift a bar          chain                           ``planted_state`` reads
========================== ============================ =============================== =======================
``planted``                −1, 0, 1: −.15, 0, .15       stay .85, else one of the other the state
                                                        two alike
``martingale``             the same states, no drift    the same                        the state
``planted_noisy``          −1, 1: −.05, .05             stay 59/60 (60 bars on average) the state + N(0, 1)
========================== ============================ =============================== =======================

The state at close t drives bar t+1. ``distractor_chain`` is read like the state from an independent chain of the same
law, ``distractor_noise`` is N(0, 1), and ``distractor_slow`` its mean over 20 bars, scaled to N(0, 1).

``garch`` has volatility clustering (GARCH(1,1), Student t of 5 degrees), a volume and volatility smile over the day and
gaps over session breaks; its volatility is that of ES in a quiet year, 1 % a day.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from fox_env.contracts import get_contract
from fox_env.data.bars import Bars, interval_ns
from fox_env.data.calendar import sessions, trade_dates
from fox_env.data.rolls import Segment

if TYPE_CHECKING:
    from fox_env.data.features import Feature
    from fox_env.market import Market

KINDS = ("planted", "planted_noisy", "martingale", "garch")
PLANTED_STATE = "planted_state"
DISTRACTORS = ("distractor_chain", "distractor_noise", "distractor_slow")

STEPS = 16
START_DATE = "2023-01-02"
START_PRICE = 4_000.0

_TICK = get_contract("ES").tick
_LOWEST_PRICE = 1_000.0
_SLOW_BARS = 20
_CHUNK = 1 << 20
_MINUTE_NS = 60_000_000_000
_DAY_NS = 86_400_000_000_000
_FIVE_MINUTES_NS = 300_000_000_000

_GARCH_ALPHA, _GARCH_BETA, _STUDENT_DF = 0.06, 0.93, 5.0
_FIVE_MINUTE_SIGMA = 6e-4
_FIVE_MINUTE_VOLUME = 5_400.0
_GAP_SIGMA = 1.5e-3


@dataclass(frozen=True)
class Truth:
    """What a lattice market hides: T bars, S states.

    Args:
        kind: one of `KINDS`.
        state: int8 [T], row of `transition`; the state at close t, which drives bar t+1.
        transition: float64 [S, S], rows sum to 1.
        drifts: expected points of the next bar in each state, S values.
        levels: the feature ``planted_state`` without noise in each state, S values.
        noise: standard deviation of the noise on that feature; 0 where it is exact.
        steps: K, steps of a bar's path.
        tick: points of a step.
    """

    kind: str
    state: np.ndarray
    transition: np.ndarray
    drifts: tuple[float, ...]
    levels: tuple[float, ...]
    noise: float
    steps: int
    tick: float

    @property
    def drift(self) -> np.ndarray:
        """Expected points of bar t+1 given the state at close t, float64 [T]."""
        return np.array(self.drifts)[self.state]

    def take(self, rows: slice | np.ndarray) -> Truth:
        """The truth of `rows`, a slice or an index or mask array."""
        return replace(self, state=self.state[rows])

    def to_dict(self) -> dict[str, np.ndarray]:
        """The fields as arrays, for saving; `from_dict` is the way back."""
        return {name: np.asarray(value) for name, value in self.__dict__.items()}

    @classmethod
    def from_dict(cls, arrays: Mapping[str, np.ndarray]) -> Truth:
        """A truth from what `to_dict` gave."""
        return cls(
            kind=str(arrays["kind"]),
            state=arrays["state"],
            transition=arrays["transition"],
            drifts=tuple(arrays["drifts"].tolist()),
            levels=tuple(arrays["levels"].tolist()),
            noise=float(arrays["noise"]),
            steps=int(arrays["steps"]),
            tick=float(arrays["tick"]),
        )


@dataclass(frozen=True)
class SyntheticBars:
    """Bars, and what they hide where that is known."""

    bars: Bars
    truth: Truth | None


def synthetic_bars(
    kind: str, bars: int = 70_000, seed: int = 0, *, interval: str = "5m", start: str = START_DATE
) -> SyntheticBars:
    """Draw synthetic bars; the same arguments give the same bars.

    Bars lie in the trading hours of the session calendar, whatever the interval, and prices on ES's tick. They start at
    4,000 points; a lattice path that would come below 1,000 is moved up as a whole.

    Args:
        kind: one of `KINDS`.
        bars: number of bars.
        seed: zero or positive.
        interval: length of a bar, one of `fox_env.data.bars.INTERVALS_NS`.
        start: ISO date, UTC; the first bar is the first in trading hours from then on.

    Raises:
        ValueError: an unknown kind or interval, fewer than one bar, a negative seed, or bars beyond the calendar.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown, expected one of {', '.join(KINDS)}")
    if bars < 1:
        raise ValueError(f"bars is {bars}, expected at least 1")
    if seed < 0:
        raise ValueError(f"seed is {seed}, expected zero or a positive number")
    length = interval_ns(interval)
    begin = _trading_starts(bars, length, start)
    # One stream a purpose: a further distractor changes no price.
    price_rng, state_rng, extra_rng, volume_rng = (
        np.random.Generator(np.random.Philox(child))
        for child in np.random.SeedSequence([seed, KINDS.index(kind)]).spawn(4)
    )
    smile = _smile(begin)
    if kind == "garch":
        open_, high, low, close, activity = _garch_prices(begin, length, smile, price_rng)
        truth, extra = None, {}
    else:
        truth, before = _draw_truth(kind, bars, state_rng)
        open_, high, low, close = _lattice_prices(truth, before, price_rng)
        activity, extra = 1.0, _extra(truth, extra_rng)
    mean_volume = _FIVE_MINUTE_VOLUME * length / _FIVE_MINUTES_NS
    volume = mean_volume * smile * activity * np.exp(0.35 * volume_rng.standard_normal(bars))
    return SyntheticBars(
        Bars(
            start=begin,
            ts=begin + length,
            open=open_,
            high=high,
            low=low,
            close=close,
            volume=np.maximum(np.rint(volume), 1.0),
            extra=extra,
        ),
        truth,
    )


def synthetic_market(
    kind: str = "planted",
    bars: int = 70_000,
    seed: int = 0,
    *,
    interval: str = "5m",
    start: str = START_DATE,
    features: Sequence[str | Feature] | None = None,
    drop: Sequence[str] = (),
) -> Market:
    """A market of `synthetic_bars`, which takes the same arguments.

    ``planted_noisy`` is played with two contracts a price level unless the game is told otherwise.

    Args:
        kind, bars, seed, interval, start: as `synthetic_bars` takes them.
        features: features by name or `Feature`; None takes the ordinary ones, ``planted_state`` and the distractors.
        drop: names of features to leave out.

    Raises:
        ValueError: as `synthetic_bars`, an unknown feature, or too few bars for the features to warm up.
    """
    from fox_env.data.features import DEFAULT_FEATURES, ODD, Feature, select
    from fox_env.market import build_market

    made = synthetic_bars(kind, bars, seed, interval=interval, start=start)
    own = {
        name: Feature(name, ODD, 0, lambda x, name=name: x.bars.extra[name], needs=(name,)) for name in made.bars.extra
    }
    if features is None:
        chosen = [*select([made.bars], DEFAULT_FEATURES), *own.values()]
    else:
        chosen = [own.get(entry, entry) if isinstance(entry, str) else entry for entry in features]
    return build_market(
        [Segment("SYNTHETIC", made.bars, 0, 0.0)],
        "ES",
        interval_ns(interval),
        features=chosen,
        drop=drop,
        truth=made.truth,
        game={"depth_contracts": 2} if kind == "planted_noisy" else None,
        provenance={
            "source": "synthetic",
            "kind": kind,
            "bars": bars,
            "seed": seed,
            "interval": interval,
            "start": start,
        },
    )


def _trading_starts(bars: int, length: int, start: str) -> np.ndarray:
    """Starts of the first bars in trading hours from that date on, int64 [bars]."""
    try:
        first = int(np.datetime64(start, "ns").astype(np.int64))
    except ValueError:
        raise ValueError(f"start is {start!r}, expected an ISO date such as {START_DATE!r}") from None
    first = -(-first // length) * length
    found, missing = [], bars
    while missing:
        # No more than are missing, not to run into the calendar's end; but enough to get over a closed weekend.
        candidates = first + length * np.arange(min(max(missing, 5 * _DAY_NS // length), _CHUNK), dtype=np.int64)
        inside = candidates[sessions(candidates, candidates + length).is_open][:missing]
        found.append(inside)
        missing -= len(inside)
        first = int(candidates[-1]) + length
    return np.concatenate(found)


def _smile(start: np.ndarray) -> np.ndarray:
    """Relative activity of a bar by time of day, float64 [T], mean near 1: a quiet night, a U over 08:30 to 15:00."""
    opens = trade_dates(int(start[0]), int(start[-1]) + 1).open
    opened = opens[np.maximum(np.searchsorted(opens, start, side="right") - 1, 0)]
    minute = (start - opened) / _MINUTE_NS  # since 17:00 in Chicago
    day_share = (minute - 930.0) / 390.0  # 0 at 08:30, 1 at 15:00
    in_day = (day_share >= 0.0) & (day_share < 1.0)
    return np.where(in_day, 1.7 + 12.0 * (day_share - 0.5) ** 2, 0.3)


def _draw_truth(kind: str, bars: int, rng: np.random.Generator) -> tuple[Truth, int]:
    """The hidden chain, and the state that drives bar 0."""
    if kind == "planted_noisy":
        stay, drifts, levels, noise = 1.0 - 1.0 / 60.0, (-0.05, 0.05), (-1.0, 1.0), 1.0
    else:
        stay, levels, noise = 0.85, (-1.0, 0.0, 1.0), 0.0
        drifts = (-0.15, 0.0, 0.15) if kind == "planted" else (0.0, 0.0, 0.0)
    states = len(levels)
    transition = np.full((states, states), (1.0 - stay) / (states - 1))
    np.fill_diagonal(transition, stay)
    chain = _chain(bars + 1, states, stay, rng)
    return Truth(kind, chain[1:], transition, drifts, levels, noise, STEPS, _TICK), int(chain[0])


def _chain(length: int, states: int, stay: float, rng: np.random.Generator) -> np.ndarray:
    """A stationary chain that stays with probability `stay`, else moves to any other state alike, int8 [length]."""
    moves = rng.random(length) >= stay
    steps = np.where(moves, rng.integers(1, states, length, dtype=np.int8), 0)
    steps[0] = rng.integers(states)
    return (np.cumsum(steps, dtype=np.int64) % states).astype(np.int8)


def _lattice_prices(truth: Truth, before: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Open, high, low, close in points, float64 [T] each."""
    reach = truth.steps * truth.tick
    tilt = (0.5 * (1.0 + np.array(truth.drifts) / reach)).astype(np.float32)
    driver = np.concatenate(([before], truth.state[:-1]))
    bars = len(driver)
    move, above, below = (np.zeros(bars, np.int8) for _ in range(3))
    for rows in _chunks(bars):
        p_up = tilt[driver[rows]]
        at, high, low = move[rows], above[rows], below[rows]
        for uniform in rng.random((truth.steps, len(p_up)), dtype=np.float32):
            at += np.where(uniform < p_up, np.int8(1), np.int8(-1))
            np.maximum(high, at, out=high)
            np.minimum(low, at, out=low)
    # Whole ticks are integers, so sums are exact.
    close = np.cumsum(move, dtype=np.int64)
    open_ = close - move
    low = open_ + below
    base = max(round(START_PRICE / truth.tick), round(_LOWEST_PRICE / truth.tick) - int(low.min()))
    return tuple((base + ticks) * truth.tick for ticks in (open_, open_ + above, low, close))


def _extra(truth: Truth, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """The feature that reads the state, and the distractors, float64 [T] each."""
    bars, levels = len(truth.state), np.array(truth.levels)
    decoy = _chain(bars, len(levels), float(truth.transition[0, 0]), rng)
    columns = {PLANTED_STATE: levels[truth.state], DISTRACTORS[0]: levels[decoy]}
    if truth.noise:
        columns = {name: value + truth.noise * rng.standard_normal(bars) for name, value in columns.items()}
    noise = rng.standard_normal(bars + _SLOW_BARS - 1)
    total = np.concatenate(([0.0], np.cumsum(noise)))
    slow = (total[_SLOW_BARS:] - total[:-_SLOW_BARS]) / np.sqrt(_SLOW_BARS)
    return columns | {DISTRACTORS[1]: noise[_SLOW_BARS - 1 :], DISTRACTORS[2]: slow}


def _garch_prices(
    start: np.ndarray, length: int, smile: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, ...]:
    """Open, high, low, close in points and relative activity, float64 [T] each."""
    bars = len(start)
    shock = rng.standard_t(_STUDENT_DF, bars) * np.sqrt((_STUDENT_DF - 2.0) / _STUDENT_DF)
    sigma = _garch_sigma(shock)
    scale = _FIVE_MINUTE_SIGMA * np.sqrt(length / _FIVE_MINUTES_NS) * sigma * np.sqrt(smile)
    gap = np.where(sessions(start, start + length).after_break, _GAP_SIGMA * sigma * rng.standard_normal(bars), 0.0)
    gap[0] = 0.0
    returns = scale * shock
    log_close = np.log(START_PRICE) + np.cumsum(gap + returns)
    jitter = rng.choice(np.array([-1.0, 0.0, 1.0]), bars, p=(0.15, 0.7, 0.15))
    close = np.maximum(np.rint(np.exp(log_close) / _TICK), 1.0)
    open_ = np.maximum(np.rint(np.exp(log_close - returns) / _TICK) + jitter, 1.0)
    # Extremes of a Brownian bridge from open to close; high and low are drawn apart, which ES-likeness does not miss.
    move, spread = close - open_, 2.0 * (scale * close) ** 2
    up, down = -np.log1p(-rng.random((2, bars)))
    high = np.rint(open_ + 0.5 * (move + np.sqrt(move**2 + spread * up)))
    low = np.rint(open_ + 0.5 * (move - np.sqrt(move**2 + spread * down)))
    high = np.maximum(high, np.maximum(open_, close))
    low = np.maximum(np.minimum(low, np.minimum(open_, close)), 1.0)
    return open_ * _TICK, high * _TICK, low * _TICK, close * _TICK, sigma * (0.5 + 0.5 * np.abs(shock))


def _garch_sigma(shock: np.ndarray) -> np.ndarray:
    """Volatility of a GARCH(1,1) of unit mean variance, float64 [T]."""
    variance = np.empty(len(shock))
    value = 1.0
    for rows in _chunks(len(shock)):
        path = []
        for squared in np.square(shock[rows]).tolist():
            path.append(value)
            value = 1.0 - _GARCH_ALPHA - _GARCH_BETA + value * (_GARCH_BETA + _GARCH_ALPHA * squared)
        variance[rows] = path
    return np.sqrt(variance)


def _chunks(length: int) -> Iterator[slice]:
    """Slices that bound the memory of temporary arrays."""
    return (slice(first, first + _CHUNK) for first in range(0, length, _CHUNK))
