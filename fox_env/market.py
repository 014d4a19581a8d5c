"""A market: bars of one chain of front contracts with features, sessions and rolls, as numpy arrays."""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fox_env import dynamics
from fox_env.contracts import CONTRACTS, Contract, get_contract
from fox_env.data import features as feature_lib
from fox_env.data.bars import Bars, interval_ns
from fox_env.data.calendar import sessions
from fox_env.data.limits import locks
from fox_env.data.normalize import Normalizer
from fox_env.data.rolls import Segment
from fox_env.files import byte_blocks, read_arrays, write_arrays
from fox_env.mirror import normalized_mirror_map

if TYPE_CHECKING:
    import pandas as pd

    from fox_env.data.synthetic import Truth

VOLATILITY_SPAN = 100
SCHEMA = 2
"""Version of the files that `Market.save` writes."""

_DAY_NS = 86_400_000_000_000
_CHUNK_ROWS = 1 << 18
_FULL_WEIGHT = 2_048  # bars after which the EWMA's weights add up to 1 in float64
_COLUMNS = ("start", "ts", "open", "high", "low", "close", "volume", "bid", "ask", "bid_size", "ask_size")
_ROW_DTYPES = {
    "session": np.int32, "after_break": np.bool_, "session_last": np.bool_, "fraction_left": np.float32,
    "roll": np.int8, "gap": np.float64, "lock": np.int8, "decision": np.bool_, "volatility": np.float64,
    "instrument": np.int32,
}  # fmt: skip
_ROWS = ("features", *_ROW_DTYPES)


class Column(NamedTuple):
    """Name and parity of a feature."""

    name: str
    parity: feature_lib.Parity


@dataclass(frozen=True, eq=False)
class Market:
    """Bars in time order with everything that the game needs. Built by `fox_env.load_market`, `Market.from_bars` or
    `fox_env.synthetic_market`; every array has one row a bar, T rows.

    Attributes:
        contract: terms of the contract.
        interval_ns: length of a bar, 0 for volume bars.
        bars: `Bars`, float64 [T] points, UTC nanoseconds.
        features: float32 [T, F], raw; rows that are no decision bars are 0.
        columns: name and parity of each feature, F of them.
        session: int32, trade date as days since 1970-01-01.
        after_break: bool, the bar follows a session break or a halt.
        session_last: bool, the last bar of its session.
        fraction_left: float32, share of the session that is left at the close.
        roll: int8, how the bar's contract took over: `dynamics.NO_ROLL`, `MEASURED` or `UNMEASURED`.
        gap: float64, g of a measured roll, points.
        lock: int8, +1 locked at limit up, −1 at limit down.
        decision: bool, features are warm, so that a step may start here.
        volatility: float64, EWMA(100) root mean square of close changes in points, at least one tick.
        instrument: int32 index into `instruments`, the contracts' names.
        normalizer: fitted on the training part by `split`, or None.
        truth: of a synthetic market, its drift; else None.
        game: default settings of the game on this market.
        quality: what was dropped or repaired, counts by name.
        provenance: where the bars came from.
    """

    contract: Contract
    interval_ns: int
    bars: Bars
    features: np.ndarray
    columns: tuple[Column, ...]
    session: np.ndarray
    after_break: np.ndarray
    session_last: np.ndarray
    fraction_left: np.ndarray
    roll: np.ndarray
    gap: np.ndarray
    lock: np.ndarray
    decision: np.ndarray
    volatility: np.ndarray
    instrument: np.ndarray
    instruments: tuple[str, ...]
    normalizer: Normalizer | None = None
    truth: Truth | None = None
    game: Mapping[str, object] = field(default_factory=dict)
    quality: Mapping[str, object] = field(default_factory=dict)
    provenance: Mapping[str, object] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.bars)

    def __deepcopy__(self, memo: object) -> Market:
        return self  # frozen, and large

    def __getstate__(self) -> dict[str, object]:
        return {f.name: getattr(self, f.name) for f in fields(self)}  # without what is derived

    def __repr__(self) -> str:
        first, last = (dt.datetime.fromtimestamp(t / 1e9, dt.UTC).date() for t in (self.ts[0], self.ts[-1]))
        size = f"{self.interval_ns / 1e9:g} s" if self.interval_ns else self.provenance.get("bars", "volume")
        return (
            f"Market({self.contract.name}, {len(self):,} bars of {size}, {first} to {last}, "
            f"{self.instrument[-1] - self.instrument[0] + 1} contracts, {len(self.feature_names)} features)"
        )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the F features."""
        return tuple(column.name for column in self.columns)

    @property
    def ts(self) -> np.ndarray:
        """Close of each bar, int64 [T] UTC nanoseconds. Volume bars may close at the same instant."""
        return self.bars.ts

    @property
    def has_order_flow(self) -> bool:
        """Whether any feature comes from the book or from the sides of the trades."""
        return any(name in feature_lib.ORDER_FLOW for name in self.feature_names)

    @functools.cached_property
    def observed(self) -> np.ndarray:
        """Features as the agent sees them, float32 [T, F], clipped to ±10.

        Normalized where there is a normalizer; else as they are, complement(c) centred at c/2 so that the mirror of
        what is seen is in the same range.
        """
        return self._observe(np.empty(self.features.shape, np.float32))

    @functools.cached_property
    def padded(self) -> np.ndarray:
        """`observed` with room for the position fields beside each row, float32 [T, F + 6]."""
        return self._observe(np.zeros((len(self), len(self.columns) + dynamics.POSITION_FIELDS), np.float32))

    def _observe(self, table: np.ndarray) -> np.ndarray:
        """Write what the agent sees of the features into the first F columns of `table`."""
        center = np.array([column.parity.total / 2 for column in self.columns], np.float32)
        for begin in range(0, len(self), _CHUNK_ROWS):
            raw = self.features[begin : begin + _CHUNK_ROWS]
            seen = np.clip(raw - center, -10.0, 10.0) if self.normalizer is None else self.normalizer.apply(raw)
            table[begin : begin + _CHUNK_ROWS, : len(self.columns)] = seen
        return table

    @functools.cached_property
    def mirror(self) -> np.ndarray:
        """Map of observed features to the mirror, float32 [2, F]: row 0 partner, row 1 sign."""
        perm, sign = normalized_mirror_map(self.columns)
        return np.stack([perm.astype(np.float32), sign])

    @functools.cached_property
    def land(self) -> np.ndarray:
        """Bar at which a step from bar t ends: the next decision bar, T after the last; int32 [T]."""
        rows = np.where(self.decision, np.arange(len(self), dtype=np.int32), np.int32(len(self)))
        following = np.minimum.accumulate(rows[::-1])[::-1]
        return np.append(following[1:], np.int32(len(self)))

    @functools.cached_property
    def first(self) -> np.ndarray:
        """First decision bar of each bar's contract, where windows of features end; int32 [T]."""
        before = np.concatenate([[False], self.decision[:-1]])
        rows = np.flatnonzero(self.decision & (~before | (np.diff(self.instrument, prepend=-1) != 0)))
        return np.repeat(rows.astype(np.int32), np.diff(rows[1:], prepend=0, append=len(self)))

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that the game plays on: bars, quotes, features, sessions, rolls, normalizer."""
        arrays = {name: getattr(self.bars, name) for name in _COLUMNS if getattr(self.bars, name) is not None}
        arrays |= {name: getattr(self, name) for name in _ROWS}
        if self.normalizer is not None:
            arrays |= {"center": self.normalizer.center, "scale": self.normalizer.scale}
        digest = hashlib.sha256()
        for name, array in arrays.items():
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            for block in byte_blocks(array):
                digest.update(block)
        return digest.hexdigest()

    def check_start(self, start: object) -> np.ndarray:
        """Bars as an integer array, those refused at which no step can start.

        Raises:
            ValueError: a bar is not an integer or outside the market, its features are not warm, or nothing follows it.
        """
        bars = np.asarray(start)
        bad = np.ones(bars.shape, bool)
        if bars.dtype.kind in "iu":
            bad = (bars < 0) | (bars >= len(self))
            bars = np.where(bad, 0, bars)
            bad |= ~self.decision[bars] | (self.land[bars] >= len(self))
        if bad.any():
            first = np.asarray(start)[bad].tolist()[0]
            raise ValueError(
                f"start is {first!r}, expected a decision bar of the market's {len(self)} with another after it"
            )
        return bars

    def tape(self, spread_ticks: float = 1.0, lookahead: int = 0) -> np.ndarray:
        """The market as rows for `dynamics.step_one`, float64 [T, 16].

        Args:
            spread_ticks: spread around the close where the market has no two-sided, uncrossed quote, in ticks.
            lookahead: bars of the hindsight term, 0 leaves it out. It never looks past the market's end.

        Built once for each pair of arguments: every environment on the market reads the same array.
        """
        key = (spread_ticks, lookahead)
        if key not in self._tapes:
            self._tapes[key] = self._build_tape(spread_ticks, lookahead)
        return self._tapes[key]

    @functools.cached_property
    def _tapes(self) -> dict[tuple[float, int], np.ndarray]:
        return {}

    def _build_tape(self, spread_ticks: float, lookahead: int) -> np.ndarray:
        tape = np.zeros((len(self), dynamics.TAPE_COLUMNS))
        for begin in range(0, len(self), _CHUNK_ROWS):
            self._write_tape(tape, slice(begin, min(begin + _CHUNK_ROWS, len(self))), spread_ticks)
        bars = self.bars
        if lookahead:
            change = np.diff(bars.close, prepend=bars.close[0])
            change[self.roll == dynamics.MEASURED] -= self.gap[self.roll == dynamics.MEASURED]
            change[self.roll == dynamics.UNMEASURED] = 0.0
            path = np.cumsum(change)
            tape[:, dynamics.AHEAD] = path[np.minimum(np.arange(len(self)) + lookahead, len(self) - 1)] - path
        return tape

    def _write_tape(self, tape: np.ndarray, rows: slice, spread_ticks: float) -> None:
        """Write those rows of the tape, all columns but AHEAD."""
        bars = self.bars.take(rows)
        unknown = np.full(len(bars), np.nan)
        bid, ask = (unknown, unknown) if bars.bid is None or bars.ask is None else (bars.bid, bars.ask)
        quoted = np.isfinite(bid) & np.isfinite(ask) & (ask >= bid)
        half = spread_ticks * self.contract.tick / 2
        columns = {
            dynamics.OPEN: bars.open, dynamics.HIGH: bars.high, dynamics.LOW: bars.low, dynamics.CLOSE: bars.close,
            dynamics.BID: np.where(quoted, bid, bars.close - half),
            dynamics.ASK: np.where(quoted, ask, bars.close + half),
            dynamics.AFTER_BREAK: self.after_break[rows], dynamics.SESSION_LAST: self.session_last[rows],
            dynamics.ROLL: self.roll[rows], dynamics.GAP: self.gap[rows], dynamics.LOCK: self.lock[rows],
            dynamics.MAINTENANCE: self.contract.maintenance_at(bars.ts),
            dynamics.VOLATILITY: self.volatility[rows],
        }  # fmt: skip
        for column, size in ((dynamics.BID_SIZE, bars.bid_size), (dynamics.ASK_SIZE, bars.ask_size)):
            known = False if size is None else quoted & (size >= 0) & np.isfinite(size)
            columns[column] = np.where(known, unknown if size is None else size, np.nan)
        for column, values in columns.items():
            tape[rows, column] = values

    def slice(self, start: int, stop: int) -> Market:
        """Bars [start, stop) as a market of their own, up to the last decision bar among them.

        Features keep the history that they were built on.

        Raises:
            ValueError: the range holds fewer than two decision bars.
        """
        decisions = np.flatnonzero(self.decision[start:stop])
        if start < 0 or stop > len(self) or len(decisions) < 2:
            raise ValueError(f"bars [{start}, {stop}) of {len(self)} hold fewer than two bars to decide at")
        rows = slice(start, start + int(decisions[-1]) + 1)
        arrays = {name: getattr(self, name)[rows] for name in _ROWS}
        part = replace(self, bars=self.bars.take(rows), truth=self.truth and self.truth.take(rows), **arrays)
        if part.roll[0] != dynamics.NO_ROLL:
            part = replace(part, roll=np.concatenate([[dynamics.NO_ROLL], part.roll[1:]]).astype(np.int8))
        return part

    def split(
        self,
        train: float | None = None,
        valid: float | None = None,
        *,
        train_end: str | dt.date | None = None,
        valid_end: str | dt.date | None = None,
    ) -> tuple[Market, Market, Market]:
        """Training, validation and test part, in time order, whole sessions each, up to their last decision bars.

        Either shares of the bars, ``split(0.7, 0.15)``, or dates, ``split(train_end=…, valid_end=…)``: sessions whose
        trade date is before `train_end` train, those before `valid_end` validate. The normalizer is fitted on the
        training part and attached to all three.

        Raises:
            ValueError: shares or dates out of order, no date, or a part without bars.
        """
        if train_end is not None or valid_end is not None:
            if train is not None or valid is not None or train_end is None or valid_end is None:
                raise ValueError("split takes either two shares or both train_end and valid_end")
            days = [_day(train_end, "train_end"), _day(valid_end, "valid_end")]
            cuts = [int(np.searchsorted(self.session, day, side="left")) for day in days]
            what = f"train_end {train_end} and valid_end {valid_end}"
        else:
            train, valid = 0.7 if train is None else train, 0.15 if valid is None else valid
            if not (train > 0 and valid > 0 and train + valid < 1):
                raise ValueError(f"split shares are {train} and {valid}, expected positive ones with a sum under 1")
            edges = np.flatnonzero(np.diff(self.session)) + 1
            if len(edges) < 2:
                raise ValueError("the market has fewer than three sessions, too few for three parts")
            cuts = [int(edges[np.abs(edges - len(self) * share).argmin()]) for share in (train, train + valid)]
            what = f"shares {train} and {valid}"
        if not 0 < cuts[0] < cuts[1] < len(self):
            first, last = (_date(self.session[i]) for i in (0, -1))
            raise ValueError(f"split at {what} leaves a part empty, the market runs from {first} to {last}")
        edges = [0, *cuts, len(self)]
        parts = [self.slice(a, b) for a, b in pairwise(edges)]
        training = parts[0]
        normalizer = Normalizer.fit(training.features, self.columns, training.ts, training.decision)
        train_part, valid_part, test_part = (replace(part, normalizer=normalizer) for part in parts)
        return train_part, valid_part, test_part

    @classmethod
    def from_bars(
        cls,
        frame: pd.DataFrame,
        contract: str | Contract = "ES",
        interval: str = "1m",
        features: Sequence[str | feature_lib.Feature] | None = None,
        drop: Sequence[str] = (),
    ) -> Market:
        """A market from a DataFrame.

        Args:
            frame: UTC index of bar starts, ascending; columns open high low close (points) and, where known, volume,
                bid, ask, bid_size, ask_size, instrument_id. Other columns are at the disposal of features; all but
                instrument_id are numbers. Where it changes, the contract rolls and the roll counts as unmeasured.
            contract: root symbol or a `Contract`.
            interval: length of a bar, one of `fox_env.data.bars.INTERVALS_NS`.
            features: features by name or `Feature`; None takes the default ones.
            drop: names of features to leave out.

        Raises:
            ValueError: a column is missing, not of numbers or holds impossible values, or the index is not UTC, does
                not ascend or holds bars closer than `interval`.
        """
        index = frame.index
        if getattr(index, "tz", None) is None or str(index.tz) != "UTC":
            raise ValueError(f"frame.index has time zone {getattr(index, 'tz', None)}, expected UTC bar starts")
        start = index.as_unit("ns").asi8
        if len(start) < 2 or not (np.diff(start) > 0).all():
            raise ValueError("frame.index holds fewer than two bars, or does not ascend")
        missing = [name for name in ("open", "high", "low", "close") if name not in frame]
        if missing:
            raise ValueError(f"frame lacks column {missing[0]!r}, expected open, high, low and close")
        step = interval_ns(interval)
        if (least := np.diff(start).min()) < step:
            raise ValueError(
                f"frame.index has bars {least / 1e9:g} s apart, expected at least {interval} as interval says"
            )
        numeric = {name: _floats(frame[name], name) for name in frame.columns if name != "instrument_id"}
        known = {name: numeric.pop(name) for name in _COLUMNS[2:] if name in numeric}
        bars = Bars(
            start=start, ts=start + step, volume=known.pop("volume", np.zeros(len(start))), **known, extra=numeric
        )
        prices = np.stack([bars.open, bars.high, bars.low, bars.close])
        bad = (
            ~np.isfinite(prices).all(0)
            | (prices <= 0).any(0)
            | (bars.high < prices.max(0))
            | (bars.low > prices.min(0))
        )
        if bad.any():
            row = int(bad.argmax())
            raise ValueError(f"frame row {row} ({index[row]}) has open, high, low, close {prices[:, row].tolist()}, "
                             "expected positive prices between low and high")  # fmt: skip
        root = get_contract(contract)
        if "instrument_id" in frame:
            identity = frame["instrument_id"].to_numpy()
            edges = [0, *(np.flatnonzero(identity[1:] != identity[:-1]) + 1).tolist(), len(start)]
            segments = [
                Segment(str(identity[a]), bars.take(slice(a, b)), 0, np.nan if a else 0.0) for a, b in pairwise(edges)
            ]
        else:
            segments = [Segment(root.name, bars, 0, 0.0)]
        return build_market(segments, root, step, features=features, drop=drop, provenance={"source": "from_bars"})

    def save(self, path: str | os.PathLike) -> None:
        """Write the market to one file in the safetensors layout, atomically (see `fox_env.files.write_arrays`)."""
        write_arrays(path, *self.to_arrays())

    @classmethod
    def load(cls, path: str | os.PathLike) -> Market:
        """Open a market that `save` wrote. Its arrays are mapped from the file, read when needed, and read-only.

        Raises:
            FileNotFoundError: nothing is there.
            ValueError: the file is not one, damaged, or of another schema.
        """
        arrays, texts = read_arrays(path)
        try:
            return cls.from_arrays(arrays, texts)
        except ValueError as error:
            raise ValueError(f"{path} {error}") from None

    def to_arrays(self) -> tuple[dict[str, np.ndarray], dict[str, str]]:
        """The large arrays by name, not copied, and everything else as texts; `from_arrays` is the way back."""
        arrays = {f"bars.{n}": getattr(self.bars, n) for n in _COLUMNS if getattr(self.bars, n) is not None}
        arrays |= {f"extra.{n}": column for n, column in self.bars.extra.items()}
        arrays |= {name: getattr(self, name) for name in _ROWS}
        small = {
            "contract": vars(self.contract), "interval_ns": self.interval_ns,
            "columns": [(name, vars(parity)) for name, parity in self.columns], "instruments": self.instruments,
            "game": dict(self.game), "quality": dict(self.quality), "provenance": dict(self.provenance),
            "normalizer": self.normalizer and self.normalizer.to_dict(), "truth": None,
        }  # fmt: skip
        if self.truth is not None:
            small["truth"] = self.truth.to_dict()
            arrays["truth.state"] = small["truth"].pop("state")
        return arrays, {"schema": str(SCHEMA), "market": json.dumps(small, default=_plain)}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray], texts: Mapping[str, str]) -> Market:
        """A market from what `to_arrays` gave.

        Raises:
            ValueError: something else, or from another schema.
        """
        from fox_env.data.synthetic import Truth

        if texts.get("schema") != str(SCHEMA):
            found = f"has schema {texts['schema']}" if "schema" in texts else "is not a saved market"
            raise ValueError(f"{found}, expected schema {SCHEMA}")
        group = lambda prefix: {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}  # noqa: E731
        try:
            small = json.loads(texts["market"])
            contract, normalizer, truth = (small.pop(name) for name in ("contract", "normalizer", "truth"))
            maintenance = tuple(map(tuple, contract.pop("maintenance_usd")))
            if truth is not None:
                truth = {k: np.asarray(v) for k, v in truth.items()} | {"state": arrays["truth.state"]}
            return cls(
                contract=Contract(**contract, maintenance_usd=maintenance),
                bars=Bars(**group("bars."), extra=group("extra.")),
                columns=tuple(Column(name, feature_lib.Parity(**parity)) for name, parity in small.pop("columns")),
                instruments=tuple(small.pop("instruments")),
                normalizer=normalizer and Normalizer.from_dict(normalizer), truth=truth and Truth.from_dict(truth),
                **{name: arrays[name] for name in _ROWS}, **small,
            )  # fmt: skip
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"is not a saved market ({error!r})") from None


def build_market(
    segments: Iterable[Segment],
    contract: str | Contract,
    interval: int,
    *,
    hours: str = "all",
    features: Sequence[str | feature_lib.Feature] | None = None,
    drop: Sequence[str] = (),
    truth: Truth | None = None,
    game: Mapping[str, object] | None = None,
    quality: Mapping[str, object] | None = None,
    provenance: Mapping[str, object] | None = None,
) -> Market:
    """Compute features, sessions and rolls of a chain of front contracts.

    Args:
        segments: the chain, in time order; the arrays of a single one are used as they are. Each is let go when it is
            done, so that a caller that hands over its only references, as an iterator, does not hold all bars twice.
        contract: root symbol or a `Contract`.
        interval: length of a bar in nanoseconds, 0 for volume bars.
        hours: the sessions' hours, see `calendar.sessions`.
        features, drop: as `Market.from_bars` takes them. Features whose input is missing are left out.
        truth: of a synthetic market.
        game: default settings of the game.
        quality, provenance: what the loader noted.

    Raises:
        ValueError: no segment has bars to decide at, with the number that the features need.
    """
    root = get_contract(contract)
    segments = list(segments)
    instruments = tuple(segment.instrument for segment in segments)
    chosen = feature_lib.resolve(features, drop, bars_list=[segment.bars for segment in segments])
    warmup = feature_lib.warmup(chosen)
    # The market ends with the last segment that has a bar to decide at, which its last bar then is.
    warm = [len(s.bars) > max(s.first, warmup) for s in segments]
    lengths = [len(s.bars) - s.first for s in segments]
    decisions = sum(len(s.bars) - max(s.first, warmup) for s, is_warm in zip(segments, warm, strict=True) if is_warm)
    if decisions < 2:
        raise ValueError(
            f"{sum(lengths)} bars are too few: the features need {warmup} bars to warm up, so at least "
            f"{warmup + 2} of one contract are needed"
        )
    count = len(warm) - warm[::-1].index(True)
    del segments[count:]
    length = sum(lengths[:count])
    rows = {name: np.zeros(length, dtype) for name, dtype in _ROW_DTYPES.items()}
    rows["features"] = np.zeros((length, len(chosen)), np.float32)
    bars = segments[0].bars if count == 1 and not segments[0].first else _room(segments, length)
    for number, end in enumerate(np.cumsum(lengths[:count]).tolist()):
        segment = segments.pop(0)
        here = slice(end - lengths[number], end)
        front = slice(segment.first, None)
        if bars is not segment.bars:
            _fill(bars, here, segment.bars.take(front))
        rows["instrument"][here] = number
        rows["volatility"][here] = _volatility(segment.bars.close, root.tick)[front]
        if root.name in CONTRACTS:  # the exchange's limits for equity indices, which others do not share
            rows["lock"][here] = locks(segment.bars, root.tick)[front]
        if number:
            # A position can only be carried into a contract whose features are warm.
            measured = np.isfinite(segment.gap) and segment.first >= warmup
            rows["roll"][here.start] = dynamics.MEASURED if measured else dynamics.UNMEASURED
            rows["gap"][here.start] = segment.gap if measured else 0.0
        given = feature_lib.FeatureInput(
            segment.bars, sessions(segment.bars.start, segment.bars.ts, hours=hours), interval
        )
        for name in ("session", "after_break", "fraction_left"):
            rows[name][here] = getattr(given.sessions, name)[front]
        if warm[number]:
            first = max(segment.first, warmup)
            decided = slice(here.start + first - segment.first, end)
            rows["decision"][decided] = True
            for column, feature in enumerate(chosen):  # one at a time: the segment's features never exist twice
                rows["features"][decided, column] = feature_lib.compute(given, (feature,))[first:, 0]
        del segment, given
    rows["session_last"][:-1] = np.diff(rows["session"]) != 0
    # The data may end inside a session; its last bar is then no session's end.
    rows["session_last"][-1] = rows["fraction_left"][-1] <= 0
    counts = dict(quality or {})
    counts["rolls"] = int(np.count_nonzero(rows["roll"]))
    counts["rolls_unmeasured"] = int(np.count_nonzero(rows["roll"] == dynamics.UNMEASURED))
    counts["warmup_bars"] = int(np.count_nonzero(~rows["decision"]))
    counts["flat_bars"] = int(np.count_nonzero(bars.high == bars.low))
    counts["locked_bars"] = int(np.count_nonzero(rows["lock"]))
    return Market(
        contract=root, interval_ns=interval, bars=bars, columns=tuple(Column(f.name, f.parity) for f in chosen),
        instruments=instruments, truth=truth, game=dict(game or {}), quality=counts,
        provenance=dict(provenance or {}), **rows,
    )  # fmt: skip


def _volatility(close: np.ndarray, tick: float) -> np.ndarray:
    """EWMA(100) root mean square of close changes in points, at least one tick; float64 [T]."""
    alpha = 2.0 / (VOLATILITY_SPAN + 1)
    squares = np.square(np.diff(close))
    sums = accumulate(map(float, squares), lambda total, square: (1.0 - alpha) * total + alpha * square, initial=0.0)
    result = np.fromiter(sums, np.float64, len(close))
    # Early on the average has less than its full weight behind it.
    early = result[1:_FULL_WEIGHT]
    early /= -np.expm1(np.arange(1, len(early) + 1) * np.log1p(-alpha))
    np.sqrt(result, out=result)
    return np.maximum(result, tick, out=result)


def _room(segments: Sequence[Segment], length: int) -> Bars:
    """Bars to be filled, with the columns that any of `segments` has."""
    parts = [segment.bars for segment in segments]
    dtypes = {"start": np.int64, "ts": np.int64}
    names = [name for name in _COLUMNS if any(getattr(part, name) is not None for part in parts)]
    extra = dict.fromkeys(name for part in parts for name in part.extra)
    return Bars(
        **{name: np.empty(length, dtypes.get(name, np.float64)) for name in names},
        extra={name: np.empty(length) for name in extra},
    )


def _fill(bars: Bars, rows: slice, part: Bars) -> None:
    """Put `part` into `rows`; a column that it lacks is NaN there."""
    for name in _COLUMNS:
        if (column := getattr(bars, name)) is not None:
            own = getattr(part, name)
            column[rows] = np.nan if own is None else own
    for name, column in bars.extra.items():
        column[rows] = part.extra.get(name, np.nan)


def _plain(value: object) -> object:
    """Numbers and arrays of numpy for JSON."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{value!r} is of type {type(value).__name__}, expected what JSON can hold")


def _floats(column: pd.Series, name: object) -> np.ndarray:
    try:
        return column.to_numpy(np.float64, copy=True)
    except (ValueError, TypeError) as error:
        raise ValueError(f"frame column {name!r} is of type {column.dtype}, expected numbers") from error


def _day(date: str | dt.date, name: str) -> int:
    try:
        day = dt.date.fromisoformat(date) if isinstance(date, str) else date
        return day.toordinal() - dt.date(1970, 1, 1).toordinal()
    except (ValueError, AttributeError):
        raise ValueError(f"{name} is {date!r}, expected a date such as 2020-01-31") from None


def _date(day: int) -> dt.date:
    return dt.date.fromordinal(int(day) + dt.date(1970, 1, 1).toordinal())
