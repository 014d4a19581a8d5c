"""A market: bars of one chain of front contracts with features, sessions and rolls, as numpy arrays."""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fox_env import dynamics
from fox_env.contracts import Contract, get_contract
from fox_env.data import features as feature_lib
from fox_env.data.bars import Bars, interval_ns
from fox_env.data.calendar import sessions
from fox_env.data.normalize import Normalizer
from fox_env.data.rolls import Segment
from fox_env.files import write_atomic
from fox_env.mirror import normalized_mirror_map

if TYPE_CHECKING:
    import pandas as pd

    from fox_env.data.synthetic import Truth

VOLATILITY_SPAN = 100
SCHEMA = 1
_DAY_NS = 86_400_000_000_000
_COLUMNS = ("start", "ts", "open", "high", "low", "close", "volume", "bid", "ask", "bid_size", "ask_size")
_ROWS = ("features", "session", "after_break", "session_last", "fraction_left", "roll", "gap", "lock", "decision",
         "volatility", "instrument")  # fmt: skip


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
        interval_ns: length of a bar.
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

    def __repr__(self) -> str:
        first, last = (dt.datetime.fromtimestamp(t / 1e9, dt.UTC).date() for t in (self.ts[0], self.ts[-1]))
        return (
            f"Market({self.contract.name}, {len(self):,} bars of {self.interval_ns / 1e9:g} s, {first} to {last}, "
            f"{len(np.unique(self.instrument))} contracts, {len(self.feature_names)} features)"
        )

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the F features."""
        return tuple(column.name for column in self.columns)

    @property
    def ts(self) -> np.ndarray:
        """Close of each bar, int64 [T] UTC nanoseconds."""
        return self.bars.ts

    @functools.cached_property
    def observed(self) -> np.ndarray:
        """Features as the agent sees them, float32 [T, F], clipped to ±10.

        Normalized where there is a normalizer; else as they are, complement(c) centred at c/2 so that the mirror of
        what is seen is in the same range.
        """
        if self.normalizer is not None:
            return self.normalizer.apply(self.features)
        center = np.array([column.parity.total / 2 for column in self.columns], np.float32)
        return np.clip(self.features - center, -10.0, 10.0)

    @functools.cached_property
    def padded(self) -> np.ndarray:
        """`observed` with room for the position fields beside each row, float32 [T, F + 6]."""
        padded = np.zeros((len(self), len(self.columns) + dynamics.POSITION_FIELDS), np.float32)
        padded[:, : len(self.columns)] = self.observed
        return padded

    @functools.cached_property
    def mirror(self) -> np.ndarray:
        """Map of observed features to the mirror, float32 [2, F]: row 0 partner, row 1 sign."""
        perm, sign = normalized_mirror_map(self.columns)
        return np.stack([perm.astype(np.float32), sign])

    @functools.cached_property
    def land(self) -> np.ndarray:
        """Bar at which a step from bar t ends: the next decision bar, T after the last; int32 [T]."""
        rows = np.where(self.decision, np.arange(len(self)), len(self))
        following = np.minimum.accumulate(rows[::-1])[::-1]
        return np.append(following[1:], len(self)).astype(np.int32)

    @functools.cached_property
    def first(self) -> np.ndarray:
        """First decision bar of each bar's contract, where windows of features end; int32 [T]."""
        before = np.concatenate([[False], self.decision[:-1]])
        rows = np.flatnonzero(self.decision & (~before | (np.diff(self.instrument, prepend=-1) != 0)))
        return rows[np.clip(np.searchsorted(rows, np.arange(len(self)), side="right") - 1, 0, None)].astype(np.int32)

    @functools.cached_property
    def fingerprint(self) -> str:
        """SHA-256 of bars, features, rolls and the normalizer."""
        digest = hashlib.sha256()
        arrays = [self.ts, *(getattr(self.bars, n) for n in _COLUMNS[2:7]), self.features, self.roll, self.gap]
        if self.normalizer is not None:
            arrays += [self.normalizer.center, self.normalizer.scale]
        for array in arrays:
            digest.update(np.ascontiguousarray(array).tobytes())
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

    @functools.cached_property
    def _quotes(self) -> tuple[np.ndarray, np.ndarray]:
        bid, ask = self.bars.bid, self.bars.ask
        if bid is None or ask is None:
            return np.full(len(self), np.nan), np.full(len(self), np.nan)
        good = np.isfinite(bid) & np.isfinite(ask) & (ask >= bid)
        return np.where(good, bid, np.nan), np.where(good, ask, np.nan)

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
        bars = self.bars
        tape = np.zeros((len(self), dynamics.TAPE_COLUMNS))
        for column, name in (
            (dynamics.OPEN, "open"),
            (dynamics.HIGH, "high"),
            (dynamics.LOW, "low"),
            (dynamics.CLOSE, "close"),
        ):
            tape[:, column] = getattr(bars, name)
        half = spread_ticks * self.contract.tick / 2
        bid, ask = self._quotes
        quoted = ~np.isnan(bid)
        tape[:, dynamics.BID] = np.where(quoted, bid, bars.close - half)
        tape[:, dynamics.ASK] = np.where(quoted, ask, bars.close + half)
        for column, size in ((dynamics.BID_SIZE, bars.bid_size), (dynamics.ASK_SIZE, bars.ask_size)):
            tape[:, column] = (
                np.nan if size is None else np.where(quoted & (size >= 0) & np.isfinite(size), size, np.nan)
            )
        tape[:, dynamics.AFTER_BREAK] = self.after_break
        tape[:, dynamics.SESSION_LAST] = self.session_last
        tape[:, dynamics.ROLL] = self.roll
        tape[:, dynamics.GAP] = self.gap
        tape[:, dynamics.LOCK] = self.lock
        tape[:, dynamics.MAINTENANCE] = self.contract.maintenance_at(self.ts)
        tape[:, dynamics.VOLATILITY] = self.volatility
        if lookahead:
            change = np.diff(bars.close, prepend=bars.close[0])
            change[self.roll == dynamics.MEASURED] -= self.gap[self.roll == dynamics.MEASURED]
            change[self.roll == dynamics.UNMEASURED] = 0.0
            path = np.cumsum(change)
            tape[:, dynamics.AHEAD] = path[np.minimum(np.arange(len(self)) + lookahead, len(self) - 1)] - path
        return tape

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
        """Write the market to one file (numpy's npz), atomically."""
        arrays = {f"bars.{n}": getattr(self.bars, n) for n in _COLUMNS if getattr(self.bars, n) is not None}
        arrays |= {f"extra.{n}": column for n, column in self.bars.extra.items()}
        arrays |= {name: getattr(self, name) for name in _ROWS}
        meta = {
            "schema": SCHEMA, "contract": {f.name: getattr(self.contract, f.name) for f in fields(Contract)},
            "interval_ns": self.interval_ns, "columns": [(name, vars(parity)) for name, parity in self.columns],
            "instruments": self.instruments,
            "game": dict(self.game), "quality": dict(self.quality), "provenance": dict(self.provenance),
        }  # fmt: skip
        if self.normalizer is not None:
            state = self.normalizer.to_dict()
            arrays |= {f"normalizer.{k}": np.asarray(v) for k, v in state.items()}
        if self.truth is not None:
            arrays |= {f"truth.{k}": np.asarray(v) for k, v in self.truth.to_dict().items()}
        arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)

        def write(partial: Path) -> None:
            with partial.open("wb") as file:
                np.savez(file, **arrays)

        write_atomic(path, write)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Market:
        """Read a market that `save` wrote.

        Raises:
            FileNotFoundError: nothing is there.
            ValueError: the file is not one, damaged, or of another schema.
        """
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays = {name: file[name] for name in file.files}
            meta = json.loads(arrays.pop("meta").tobytes())
            schema = meta["schema"]
            market = cls._restore(arrays, meta) if schema == SCHEMA else None
        except FileNotFoundError:
            raise
        except Exception as error:  # zipfile, zlib and numpy raise whatever they meet in a damaged file
            raise ValueError(f"{path} is not a saved market") from error
        if market is None:
            raise ValueError(f"{path} has schema {schema}, expected {SCHEMA}")
        return market

    @classmethod
    def _restore(cls, arrays: Mapping[str, np.ndarray], meta: Mapping) -> Market:
        from fox_env.data.synthetic import Truth

        group = lambda prefix: {k[len(prefix) :]: v for k, v in arrays.items() if k.startswith(prefix)}  # noqa: E731
        terms = {**meta["contract"], "maintenance_usd": tuple(map(tuple, meta["contract"]["maintenance_usd"]))}
        normalizer, truth = group("normalizer."), group("truth.")
        return cls(
            contract=Contract(**terms), interval_ns=meta["interval_ns"],
            bars=Bars(**group("bars."), extra=group("extra.")),
            columns=tuple(Column(name, feature_lib.Parity(**parity)) for name, parity in meta["columns"]),
            instruments=tuple(meta["instruments"]), game=meta["game"], quality=meta["quality"],
            provenance=meta["provenance"], normalizer=Normalizer.from_dict(normalizer) if normalizer else None,
            truth=Truth.from_dict(truth) if truth else None, **{name: arrays[name] for name in _ROWS},
        )  # fmt: skip


def build_market(
    segments: Sequence[Segment],
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
        segments: the chain, in time order.
        contract: root symbol or a `Contract`.
        interval: length of a bar in nanoseconds.
        hours: the sessions' hours, see `calendar.sessions`.
        features, drop: as `Market.from_bars` takes them. Features whose input is missing are left out.
        truth: of a synthetic market.
        game: default settings of the game.
        quality, provenance: what the loader noted.

    Raises:
        ValueError: no segment has bars to decide at, with the number that the features need.
    """
    root = get_contract(contract)
    inputs = [
        feature_lib.FeatureInput(s.bars, sessions(s.bars.start, s.bars.ts, hours=hours), interval) for s in segments
    ]
    chosen = feature_lib.resolve(features, drop, bars_list=[segment.bars for segment in segments])
    warmup = feature_lib.warmup(chosen)
    columns: dict[str, list[np.ndarray]] = {name: [] for name in _ROWS if name != "session_last"}
    counts = dict(quality or {})
    unmeasured = 0
    for number, (segment, given) in enumerate(zip(segments, inputs, strict=True)):
        front = slice(segment.first, None)
        length = len(segment.bars) - segment.first
        decision = np.arange(segment.first, len(segment.bars)) >= warmup
        values = feature_lib.compute(given, chosen)[front]
        values[~decision] = 0.0
        roll = np.full(length, dynamics.NO_ROLL, np.int8)
        gap = np.zeros(length)
        if number:
            # A position can only be carried into a contract whose features are warm.
            measured = np.isfinite(segment.gap) and segment.first >= warmup
            roll[0] = dynamics.MEASURED if measured else dynamics.UNMEASURED
            gap[0] = segment.gap if measured else 0.0
            unmeasured += not measured
        part = {
            "features": values,
            "session": given.sessions.session[front],
            "after_break": given.sessions.after_break[front],
            "fraction_left": given.sessions.fraction_left[front],
            "roll": roll,
            "gap": gap,
            "lock": np.zeros(length, np.int8),
            "decision": decision,
            "volatility": _volatility(segment.bars.close, root.tick)[front],
            "instrument": np.full(length, number, np.int32),
        }
        for name, column in part.items():
            columns[name].append(column)
    rows = {name: np.concatenate(parts) for name, parts in columns.items()}
    decisions = np.flatnonzero(rows["decision"])
    if len(decisions) < 2:
        raise ValueError(
            f"{len(rows['decision'])} bars are too few: the features need {warmup} bars to warm up, so at least "
            f"{warmup + 2} of one contract are needed"
        )
    length = int(decisions[-1]) + 1
    rows = {name: column[:length] for name, column in rows.items()}
    bars = _join([s.bars.take(slice(s.first, None)) for s in segments]).take(slice(0, length))
    last = np.append(np.diff(rows["session"]) != 0, False)
    # The data may end inside a session; its last bar is then no session's end.
    last[-1] = rows["fraction_left"][-1] <= 0
    counts["rolls"] = int(np.count_nonzero(rows["roll"]))
    counts["rolls_unmeasured"] = int(np.count_nonzero(rows["roll"] == dynamics.UNMEASURED))
    counts["warmup_bars"] = int(np.count_nonzero(~rows["decision"]))
    counts["flat_bars"] = int(np.count_nonzero(bars.high == bars.low))
    return Market(
        contract=root, interval_ns=interval, bars=bars, columns=tuple(Column(f.name, f.parity) for f in chosen),
        session_last=last, instruments=tuple(s.instrument for s in segments),
        truth=truth, game=dict(game or {}), quality=counts, provenance=dict(provenance or {}), **rows,
    )  # fmt: skip


def _volatility(close: np.ndarray, tick: float) -> np.ndarray:
    """EWMA(100) root mean square of close changes in points, at least one tick; float64 [T]."""
    alpha = 2.0 / (VOLATILITY_SPAN + 1)
    squares = np.diff(close) ** 2
    sums = accumulate(map(float, squares), lambda total, square: (1.0 - alpha) * total + alpha * square)
    # Early on the average has less than its full weight behind it.
    weight = -np.expm1(np.arange(1, len(close)) * np.log1p(-alpha))
    variance = np.fromiter(sums, np.float64, len(squares)) / weight
    # accumulate starts with the first square itself instead of alpha times it.
    variance += squares[:1] * (1.0 - alpha) ** np.arange(1, len(close)) / weight if len(squares) else 0.0
    return np.maximum(np.sqrt(np.concatenate([[0.0], variance])), tick)


def _join(parts: Sequence[Bars]) -> Bars:
    """Bars one after another; a column that some part lacks is NaN there, or absent if all lack it."""

    def column(get) -> np.ndarray | None:
        arrays = [get(part) for part in parts]
        if all(array is None for array in arrays):
            return None
        return np.concatenate([np.full(len(p), np.nan) if a is None else a for p, a in zip(parts, arrays, strict=True)])

    extra = {
        name: column(lambda part, name=name: part.extra.get(name))
        for name in dict.fromkeys(n for p in parts for n in p.extra)
    }
    return Bars(**{name: column(lambda part, name=name: getattr(part, name)) for name in _COLUMNS}, extra=extra)


def _floats(column: pd.Series, name: object) -> np.ndarray:
    try:
        return column.to_numpy(np.float64)
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
