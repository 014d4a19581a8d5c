"""Market features: what the agent sees of the bars, and how each behaves in the mirror universe.

Everything is computed on log price, so that a feature of the mirrored market (p -> p0²/p, high and low exchanged) is
the declared parity of the feature of the original. Everything is scale-free: moves are divided by σ, the root mean
square of the last 100 one-bar log returns, ranges by the root mean square of the last 100 log ranges, volume by its
mean over the last 100 bars. These windows include the current bar, so that even a jump out of a still market gives
numbers of the order of 10 and not more.

Order flow is measured so too: OFI against the mean depth and then against its own root mean square over the last 100
bars, the microprice and the spread against σ. What it is made of, `fox_env.data.orderflow` says.

Indicators come from TA-Lib. Three sums are Fox's own, since TA-Lib's running sums keep a residue of what has left the
window, and a residue in a denominator turns a constant price into noise: σ, the Bollinger deviation, the mean volume.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal

import numpy as np

from fox_env.data.bars import Bars
from fox_env.data.calendar import CHICAGO, Sessions
from fox_env.data.orderflow import DEPTHS

SCALE_BARS = 100
"""Bars in the trailing windows of volatility, range and volume that the features are measured in."""

_VOLUMES = ("volume", "ask_volume", "bid_volume")
_CUSUM_ALLOWANCE = 0.25
_CHUNK_ROWS = 65_536
_DAY_NS = 86_400_000_000_000
_MINUTE_NS = 60_000_000_000


@dataclass(frozen=True)
class Parity:
    """What a feature x becomes in the mirror universe.

    Args:
        kind: ``"even"``: x; ``"odd"``: −x; ``"complement"``: total − x; ``"swap"``: the partner's value;
            ``"neg_swap"``: minus the partner's value.
        total: c of a complement, in the feature's unit.
        partner: name of the partner of a swap, which must name this feature in turn.
    """

    kind: Literal["even", "odd", "complement", "swap", "neg_swap"]
    total: float = 0.0
    partner: str | None = None


EVEN = Parity("even")
ODD = Parity("odd")


def complement(total: float) -> Parity:
    """Mirrored to `total` − x, as an RSI is."""
    return Parity("complement", total=total)


def swap(partner: str) -> Parity:
    """Mirrored to the value of `partner`, as the two wicks are."""
    return Parity("swap", partner=partner)


def neg_swap(partner: str) -> Parity:
    """Mirrored to minus the value of `partner`, as the two sides of a CUSUM are."""
    return Parity("neg_swap", partner=partner)


@dataclass(frozen=True, eq=False)
class FeatureInput:
    """What a feature function may read: the bars of one contract from its first on, T rows.

    Args:
        bars: the contract's own bars.
        sessions: where these bars lie in their sessions.
        interval_ns: length of a bar in nanoseconds, 0 for volume bars.
    """

    bars: Bars
    sessions: Sessions
    interval_ns: int

    def log(self, price: np.ndarray) -> np.ndarray:
        """log(price / first close), float64 [T]. Against the first close it keeps more digits than log(price)."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.log(price / self.bars.close[0])

    @cached_property
    def log_close(self) -> np.ndarray:
        """log(close / first close), float64 [T]."""
        return self.log(self.bars.close)

    # What is quickly made again is not kept: each column of a year of seconds takes 160 MB.
    @property
    def log_return(self) -> np.ndarray:
        """Change of `log_close` from the bar before, session breaks included; NaN in the first row. float64 [T]."""
        change = np.full(len(self.bars), np.nan)
        np.subtract(self.log_close[1:], self.log_close[:-1], out=change[1:])
        return change

    @property
    def log_range(self) -> np.ndarray:
        """log(high / low), float64 [T]."""
        return self.log(self.bars.high) - self.log(self.bars.low)

    @cached_property
    def log_spread(self) -> np.ndarray:
        """log(ask / bid) at the close, float64 [T], NaN where the book there is masked or unknown."""
        bid, ask = self.bars.bid, self.bars.ask
        quoted = (bid > 0) & (ask >= bid) & (ask < np.inf)
        return np.log(np.divide(ask, bid, out=np.full(len(bid), np.nan), where=quoted))

    @cached_property
    def volatility(self) -> np.ndarray:
        """σ: root mean square of the last `SCALE_BARS` log returns, float64 [T], valid from row `SCALE_BARS` on."""
        return rolling_rms(self.log_return, SCALE_BARS)

    @cached_property
    def range_scale(self) -> np.ndarray:
        """Root mean square of the last `SCALE_BARS` log ranges, float64 [T], valid from row `SCALE_BARS` − 1 on."""
        return rolling_rms(self.log_range, SCALE_BARS)


@dataclass(frozen=True)
class Feature:
    """One column of the market's features.

    Args:
        name: unique in a market.
        parity: what the feature becomes in the mirror universe.
        warmup: bars of the contract's own history before the first valid value, i.e. the first valid row.
        function: maps a `FeatureInput` of T rows to float64 [T]. Causal: row t reads no row after t. Rows before
            `warmup` may hold anything; from there on every value is finite.
        needs: the bar columns it reads beyond open, high, low and close: ``"volume"``, ``"bid"``, ``"ask"``,
            ``"bid_size"``, ``"ask_size"`` or names in `Bars.extra`.

    Raises:
        ValueError: an empty name or a negative warm-up.
    """

    name: str
    parity: Parity
    warmup: int
    function: Callable[[FeatureInput], np.ndarray]
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("a feature's name is empty, expected a word")
        if self.warmup < 0:
            raise ValueError(f"feature {self.name!r}: warmup is {self.warmup}, expected a number of bars, 0 or more")


def rolling_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of the last `window` values, float64 [T], NaN before row `window` − 1.

    Every window is summed afresh: a window of zeros has mean exactly 0 whatever came before it.
    """
    result = np.full(len(values), np.nan)
    weights = np.full(window, 1 / window)
    for begin in range(0, len(values) - window + 1, _CHUNK_ROWS):
        part = values[begin : begin + _CHUNK_ROWS + window - 1]
        result[begin + window - 1 :][:_CHUNK_ROWS] = np.convolve(part, weights, mode="valid")
    return result


def rolling_rms(values: np.ndarray, window: int) -> np.ndarray:
    """Root mean square of the last `window` values, float64 [T], NaN before row `window` − 1."""
    result = rolling_mean(np.square(values), window)
    return np.sqrt(result, out=result)


def ratio(numerator: np.ndarray, denominator: np.ndarray, otherwise: float) -> np.ndarray:
    """numerator / denominator, and `otherwise`, the value that parity fixes, where the denominator is 0."""
    return np.divide(numerator, denominator, out=np.full(len(numerator), otherwise), where=denominator != 0)


def _return(x: FeatureInput, bars: int) -> np.ndarray:
    moved = np.full(len(x.bars), np.nan)
    moved[bars:] = x.log_close[bars:] - x.log_close[:-bars]
    return ratio(moved, x.volatility * np.sqrt(bars), 0.0)


def _macd(x: FeatureInput, output: int) -> np.ndarray:
    """Of the log price in σ; `output` counts TA-Lib's line, signal and histogram."""
    import talib

    return ratio(talib.MACD(x.log_close, 12, 26, 9)[output], x.volatility, 0.0)


def _bollinger(x: FeatureInput, bars: int) -> np.ndarray:
    """(x − mean) / 2 standard deviations. Each window is taken relative to its last value, exactly 0 if it is flat."""
    result = np.full(len(x.bars), np.nan)
    windows = np.lib.stride_tricks.sliding_window_view(x.log_close, bars)
    for begin in range(0, len(windows), _CHUNK_ROWS):
        rows = windows[begin : begin + _CHUNK_ROWS]
        relative = rows - rows[:, -1:]
        position = ratio(-relative.mean(axis=1), 2 * relative.std(axis=1), 0.0)
        result[begin + bars - 1 :][: len(rows)] = position
    return result


def _sma_ratio(x: FeatureInput, bars: int) -> np.ndarray:
    import talib

    return ratio(x.log_close - talib.SMA(x.log_close, bars), x.volatility * np.sqrt(bars), 0.0)


def _slope(x: FeatureInput, bars: int) -> np.ndarray:
    """The least-squares slope of n steps of a random walk has a standard deviation of σ√(6/5n)."""
    import talib

    return ratio(talib.LINEARREG_SLOPE(x.log_close, bars) * np.sqrt(bars), x.volatility, 0.0)


def _cusum(x: FeatureInput, side: int) -> np.ndarray:
    """Page's (1954) sums of z = return / σ from where σ is valid: S⁺ ← max(0, S⁺ + z − k), S⁻ ← min(0, S⁻ + z + k).

    Never reset, since a threshold makes rounding visible. Times 2k: on a random walk S⁺ is then about exponential with
    mean 1. `side` is +1 or −1. The recursion is solved by S⁺ = Y − min(0, running minimum of Y), Y the sum of z − k.
    """
    result = np.full(len(x.bars), np.nan)
    z = side * ratio(x.log_return, x.volatility, 0.0)[SCALE_BARS:]
    total = np.cumsum(z - _CUSUM_ALLOWANCE)
    lowest = np.minimum(np.minimum.accumulate(total), 0.0)
    result[SCALE_BARS:] = side * 2 * _CUSUM_ALLOWANCE * (total - lowest)
    return result


def _rsi(x: FeatureInput) -> np.ndarray:
    """Wilder's RSI of the log price in [0, 1].

    From Chande's oscillator, (gain − loss) / (gain + loss) over the same averages, which is 0 where TA-Lib's RSI of a
    constant price is 0 too, and so gives ½.
    """
    import talib

    return (1 + talib.CMO(x.log_close, 14) / 100) / 2


def _close_location(x: FeatureInput) -> np.ndarray:
    return ratio(x.log_close - x.log(x.bars.low), x.log_range, 0.5)


def _upper_wick(x: FeatureInput) -> np.ndarray:
    return ratio(x.log(x.bars.high) - x.log(np.maximum(x.bars.open, x.bars.close)), x.range_scale, 0.0)


def _lower_wick(x: FeatureInput) -> np.ndarray:
    return ratio(x.log(np.minimum(x.bars.open, x.bars.close)) - x.log(x.bars.low), x.range_scale, 0.0)


def _volatility_ratio(x: FeatureInput, bars: int) -> np.ndarray:
    return ratio(rolling_rms(x.log_return, bars), x.volatility, 1.0)


def _range_ratio(x: FeatureInput, bars: int) -> np.ndarray:
    """Parkinson's (1980) volatility over `bars` bars to that over `SCALE_BARS`; its constant 1 / 4 log 2 cancels."""
    return ratio(rolling_rms(x.log_range, bars), x.range_scale, 1.0)


def _volume_ratio(x: FeatureInput, bars: int) -> np.ndarray:
    """log2(1 + mean volume over `bars` bars / that over `SCALE_BARS`): 1 at the usual volume, 0 without any."""
    volume = x.bars.volume
    return np.log2(1 + ratio(rolling_mean(volume, bars), rolling_mean(volume, SCALE_BARS), 1.0))


def _minutes_since_previous(x: FeatureInput) -> np.ndarray:
    """log(1 + minutes from the close of the bar before to this one's)."""
    return np.log1p(np.diff(x.bars.ts, prepend=x.bars.ts[0]) / _MINUTE_NS)


def _clock(x: FeatureInput, wave: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Chicago's time of day at the bar's close, as an angle."""
    import pandas as pd

    local = pd.DatetimeIndex(x.bars.ts, tz="UTC").tz_convert(CHICAGO).tz_localize(None).asi8
    return wave(2 * np.pi * (local % _DAY_NS) / _DAY_NS)


def _zero_where_unknown(values: np.ndarray) -> np.ndarray:
    """What an odd feature is where its input is masked or unknown: the one value that is its own mirror image."""
    return np.where(np.isfinite(values), values, 0.0)


def _ofi(x: FeatureInput, levels: int) -> np.ndarray:
    """OFI over the mean depth of its levels (Cont, Cucuringu & Zhang 2023), over its own root mean square.

    They weight the levels by a principal component, which would have to be fitted; here all weigh the same.
    """
    flow, depth = x.bars.extra[f"ofi_{levels}"], x.bars.extra[f"depth_{levels}"]
    known = np.isfinite(flow) & (depth > 0)
    relative = np.divide(flow, depth, out=np.zeros(len(flow)), where=known)
    return ratio(relative, rolling_rms(relative, SCALE_BARS), 0.0)


def _depth_imbalance(x: FeatureInput, levels: int) -> np.ndarray:
    return _zero_where_unknown(x.bars.extra[f"imbalance_{levels}"])


def _trade_imbalance(x: FeatureInput) -> np.ndarray:
    """(bought − sold) / (bought + sold) by the aggressor's side; trades without a side count on neither."""
    bought, sold = x.bars.extra["ask_volume"], x.bars.extra["bid_volume"]
    return _zero_where_unknown(ratio(bought - sold, bought + sold, 0.0))


def _microprice_offset(x: FeatureInput) -> np.ndarray:
    """How far log bid and log ask, each weighted by the other's size, lie above their middle: ½ log(ask / bid)·I in σ.

    I is (bid size − ask size) / (bid size + ask size). In logs, since the middle of the prices is not mirrored exactly.
    """
    bid_size, ask_size = x.bars.bid_size, x.bars.ask_size
    offset = 0.5 * x.log_spread * ratio(bid_size - ask_size, bid_size + ask_size, 0.0)
    return ratio(_zero_where_unknown(offset), x.volatility, 0.0)


def _spread(x: FeatureInput) -> np.ndarray:
    """log(ask / bid) in σ: what crossing costs against what a bar moves. 0 if σ is 0, and before the first known book.

    Where the book at the close is masked or unknown, the last known log(ask / bid) stands. In ticks, which say little
    about that and are almost always 1, the spread is in ``bars.extra["spread_ticks"]``.
    """
    known = np.isfinite(x.log_spread)
    last = np.maximum.accumulate(np.where(known, np.arange(len(known)), -1))
    return ratio(np.where(last >= 0, x.log_spread[last], 0.0), x.volatility, 0.0)


def _over(
    name: str,
    parity: Parity,
    first: int,
    function: Callable[..., np.ndarray],
    windows: tuple[int, ...],
    needs: tuple[str, ...] = (),
) -> tuple[Feature, ...]:
    """The same feature over several windows."""
    return tuple(Feature(f"{name}_{n}", parity, first, partial(function, bars=n), needs) for n in windows)


DEFAULT_FEATURES: tuple[Feature, ...] = (
    # 17 directional ones, in six families.
    *_over("return", ODD, SCALE_BARS, _return, (1, 3, 10, 30, 100)),
    Feature("macd", ODD, SCALE_BARS, partial(_macd, output=0)),
    Feature("macd_histogram", ODD, SCALE_BARS, partial(_macd, output=2)),
    Feature("bollinger_20", ODD, 19, partial(_bollinger, bars=20)),
    Feature("bollinger_50", ODD, 49, partial(_bollinger, bars=50)),
    *_over("sma_ratio", ODD, SCALE_BARS, _sma_ratio, (5, 20, 100)),
    *_over("slope", ODD, SCALE_BARS, _slope, (10, 30, 100)),
    # 20 bars more than σ needs, so that the sums have left their start at 0.
    Feature("cusum_up", neg_swap("cusum_down"), SCALE_BARS + 20, partial(_cusum, side=1)),
    Feature("cusum_down", neg_swap("cusum_up"), SCALE_BARS + 20, partial(_cusum, side=-1)),
    # The oscillator and the bar's own shape.
    Feature("rsi_14", complement(1.0), 14, _rsi),
    Feature("close_location", complement(1.0), 0, _close_location),
    Feature("upper_wick", swap("lower_wick"), SCALE_BARS - 1, _upper_wick),
    Feature("lower_wick", swap("upper_wick"), SCALE_BARS - 1, _lower_wick),
    # Volatility, range, volume, time.
    *_over("volatility_ratio", EVEN, SCALE_BARS, _volatility_ratio, (10, 30)),
    *_over("range_ratio", EVEN, SCALE_BARS - 1, _range_ratio, (1, 10)),
    *_over("volume_ratio", EVEN, SCALE_BARS - 1, _volume_ratio, (1, 10), needs=("volume",)),
    Feature("minutes_since_previous", EVEN, 1, _minutes_since_previous),
    Feature("time_sin", EVEN, 0, partial(_clock, wave=np.sin)),
    Feature("time_cos", EVEN, 0, partial(_clock, wave=np.cos)),
    # Order flow, from the book and from the sides of the trades.
    *(
        Feature(f"ofi_{n}", ODD, SCALE_BARS - 1, partial(_ofi, levels=n), needs=(f"ofi_{n}", f"depth_{n}"))
        for n in DEPTHS
    ),
    *(
        Feature(f"depth_imbalance_{n}", ODD, 0, partial(_depth_imbalance, levels=n), needs=(f"imbalance_{n}",))
        for n in DEPTHS
    ),
    Feature("trade_imbalance", ODD, 0, _trade_imbalance, needs=("ask_volume", "bid_volume")),
    Feature("microprice_offset", ODD, SCALE_BARS, _microprice_offset, needs=("bid", "ask", "bid_size", "ask_size")),
    Feature("spread", EVEN, SCALE_BARS, _spread, needs=("bid", "ask")),
)
"""The features of a market that names none: those of them whose inputs its bars have."""

ORDER_FLOW = (
    *(f"{name}_{n}" for name in ("ofi", "depth_imbalance") for n in DEPTHS),
    "trade_imbalance",
    "microprice_offset",
    "spread",
)
"""Names of the features that come from the book or from the sides of the trades."""


def warmup(features: Sequence[Feature]) -> int:
    """Bars of a contract's own history before the first row in which all `features` are valid."""
    return max((feature.warmup for feature in features), default=0)


def compute(inputs: FeatureInput, features: Sequence[Feature]) -> np.ndarray:
    """The features of one contract, float32 [T, F]; the rows before ``warmup(features)`` are NaN, all others finite.

    Raises:
        ValueError: a function returns another shape than [T], or a value that is not finite in float32 after its
            warm-up.
    """
    rows = len(inputs.bars)
    valid_from = warmup(features)
    result = np.full((rows, len(features)), np.nan, np.float32)
    if rows <= valid_from:
        return result
    for column, feature in enumerate(features):
        values = feature.function(inputs)
        if np.shape(values) != (rows,):
            raise ValueError(
                f"feature {feature.name!r} has shape {np.shape(values)}, expected ({rows},), a value a bar"
            )
        with np.errstate(over="ignore"):
            result[:, column] = values
        finite = np.isfinite(result[feature.warmup :, column])
        if not finite.all():
            bar = feature.warmup + int(np.argmin(finite))
            raise ValueError(
                f"feature {feature.name!r} is {result[bar, column]} at bar {bar}, expected a finite number from bar "
                f"{feature.warmup} on"
            )
    result[:valid_from] = np.nan
    return result


def select(bars_list: Sequence[Bars], features: Sequence[Feature]) -> tuple[Feature, ...]:
    """Those of `features` whose inputs every contract of the market has.

    A column counts as missing where it is None or not in `Bars.extra`, where it holds no finite number, and, for
    volumes, where it holds none above zero. A feature without its input is left out, never filled with zeros.
    """
    return tuple(feature for feature in features if _missing(bars_list, feature) is None)


def _missing(bars_list: Sequence[Bars], feature: Feature) -> str | None:
    """The first column that `feature` needs and some contract lacks."""
    for name in feature.needs:
        for bars in bars_list:
            column = bars.extra.get(name, getattr(bars, name, None))
            if column is None or not np.any(column > 0 if name in _VOLUMES else np.isfinite(column)):
                return name
    return None


def resolve(
    features: Sequence[str | Feature] | None = None,
    drop: Sequence[str] = (),
    *,
    bars_list: Sequence[Bars] = (),
    known: Sequence[Feature] = DEFAULT_FEATURES,
) -> tuple[Feature, ...]:
    """The features of a market, in order.

    Args:
        features: names in `known`, or the user's own; None for those of `known` whose inputs `bars_list` has.
        drop: names to leave out.
        bars_list: the bars of each contract of the market.
        known: the features that names refer to.

    Raises:
        TypeError: a single string for `features` or `drop`, or an entry that is neither a name nor a Feature.
        ValueError: an unknown or duplicate name, a feature asked for whose input is missing, a partner that is missing
            or does not point back, or nothing left.
    """
    by_name = {feature.name: feature for feature in known}
    for argument, value in (("features", features), ("drop", drop)):
        if isinstance(value, str):
            raise TypeError(f"{argument} is the string {value!r}, expected a list of names")
    if features is None:
        chosen = select(bars_list, known)
    else:
        for entry in features:
            if not isinstance(entry, str | Feature):
                raise TypeError(f"features holds {entry!r}, expected names and Features")
            if isinstance(entry, str) and entry not in by_name:
                raise ValueError(f"feature {entry!r} is unknown, expected one of {', '.join(by_name)} or a Feature")
        chosen = tuple(by_name[entry] if isinstance(entry, str) else entry for entry in features)
        for feature in chosen:
            if (column := _missing(bars_list, feature)) is not None:
                raise ValueError(f"feature {feature.name!r} needs {column!r}, which the bars do not have")
    names = {*by_name, *(feature.name for feature in chosen)}
    for name in drop:
        if name not in names:
            raise ValueError(f"drop names the feature {name!r}, which is unknown, expected one of {', '.join(names)}")
    chosen = tuple(feature for feature in chosen if feature.name not in set(drop))
    if not chosen:
        raise ValueError("no feature is left, expected at least one")
    check_names_and_partners(chosen)
    return chosen


def check_names_and_partners(features: Sequence[Feature]) -> None:
    """Whether the features mirror onto themselves.

    Raises:
        ValueError: a duplicate name, or a partner that is missing or does not point back.
    """
    by_name: dict[str, Feature] = {}
    for feature in features:
        if feature.name in by_name:
            raise ValueError(f"feature {feature.name!r} is there twice, expected different names")
        by_name[feature.name] = feature
    for feature in features:
        kind, partner = feature.parity.kind, feature.parity.partner
        if kind not in ("swap", "neg_swap"):
            continue
        if partner not in by_name:
            raise ValueError(f"feature {feature.name!r} mirrors into {partner!r}, which is missing: keep or drop both")
        if by_name[partner].parity != Parity(kind, partner=feature.name):
            raise ValueError(f"feature {feature.name!r} mirrors into {partner!r}, which does not mirror into it")
