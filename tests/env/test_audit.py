"""`fox_env.audit`: six leaks, built as one builds them by mistake, are found by the right check, clean builds pass."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest

import fox_env
from fox_env import Feature, FoxES, FoxESDiscrete, Market, dynamics, leaks
from fox_env.data.features import EVEN, ODD, select
from fox_env.data.normalize import Normalizer
from fox_env.data.rolls import Segment, chain
from fox_env.data.scramble import ChainRows, FrameRows
from fox_env.data.synthetic import synthetic_bars, synthetic_contracts
from fox_env.market import build_market
from tests.env.games import make_bars, make_market

FIVE_MINUTES = 300_000_000_000
FIVE = pd.Timedelta(minutes=5)
BARS = 2_500
COLUMNS = ("open", "high", "low", "close", "volume")
OHLCV = {"open": "first", "high": "max", "low": "min", "close": "last", "volume": "sum"}
FEATURES = ["return_1", "return_3", "close_location", "volatility_ratio_10"]


def make_frame(seed: int = 0, bars: int = BARS, interval: str = "5m", kind: str = "garch") -> pd.DataFrame:
    made = synthetic_bars(kind, bars, seed, interval=interval).bars
    return pd.DataFrame({name: getattr(made, name) for name in COLUMNS}, pd.to_datetime(made.start, utc=True))


def with_quotes(frame: pd.DataFrame, seed: int = 0) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    bid = frame.close - 0.25 * rng.integers(0, 2, len(frame))
    bid[rng.random(len(frame)) < 0.05] = np.nan
    sizes = {name: rng.integers(1, 60, len(frame)) for name in ("bid_size", "ask_size")}
    return frame.assign(bid=bid, ask=bid + 0.25 * rng.integers(1, 3, len(frame)), **sizes)


def from_frame(*features: str | Feature, interval: str = "5m"):
    return lambda frame: Market.from_bars(frame, interval=interval, features=[*FEATURES, *features])


@pytest.fixture(autouse=True)
def shorter(monkeypatch):
    """A tenth of the usual steps on martingales; what they are compared with is in standard errors."""
    monkeypatch.setattr(leaks, "_MARTINGALE_STEPS", 2_000)


def alarms(report: fox_env.AuditReport) -> list[str]:
    return [check.name for check in report.alarms]


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    return make_frame()


@pytest.fixture(scope="module")
def market(frame) -> Market:
    return from_frame()(frame)


# --- Clean builds give no alarm ---------------------------------------------------------------------------------------


def planted(seed: int):
    made = synthetic_bars("planted", BARS, seed).bars
    own = [Feature(name, ODD, 0, lambda x, name=name: x.bars.extra[name], needs=(name,)) for name in made.extra]
    features = [*select([made], fox_env.data.features.DEFAULT_FEATURES), *own]
    return [Segment("X", made, 0, 0.0)], lambda segments: build_market(
        segments, "ES", FIVE_MINUTES, features=features, truth=None
    )


def quoted(seed: int):
    return with_quotes(make_frame(seed), seed), lambda frame: Market.from_bars(frame, interval="5m")


def rolled(seed: int):
    made = synthetic_bars("garch", 4_000, seed, start="2023-03-01").bars
    segments = chain(synthetic_contracts(made), rule="volume", quality={})
    assert len(segments) == 2
    assert (build_market(segments, "ES", FIVE_MINUTES).roll == dynamics.MEASURED).sum() == 1
    assert np.isfinite(segments[1].gap)
    return segments, None


def rolled_unmeasured(seed: int):
    frame = make_frame(seed, 1_200)
    return frame.assign(instrument_id=np.repeat([1, 2, 3], 400)), from_frame()


def resampled(seed: int):
    """Minutes made into five minutes, and hours beside them, each known when it is over."""

    def build(frame: pd.DataFrame) -> Market:
        five = frame.resample("5min").agg(OHLCV).dropna()
        hours = frame.resample("1h", label="right").close.last().dropna().pct_change()
        ends = hours.reindex(five.index + FIVE, method="ffill").fillna(0.0).to_numpy()
        hour = Feature("hour", ODD, 0, lambda x: 100 * x.bars.extra["hour"], needs=("hour",))
        return from_frame(hour)(five.assign(hour=ends))

    return make_frame(seed, 6_000, "1m"), build


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("case", [planted, quoted, rolled, rolled_unmeasured, resampled], ids=lambda f: f.__name__)
def test_clean_builds_give_no_alarm(case, seed):
    data, build = case(seed)
    report = fox_env.audit(data, build, seed=seed)
    assert report.passed, str(report)
    # Only what such data cannot tell is left out.
    assert {check.name for check in report.checks if check.status == "skipped"} <= {"normalizer"}, str(report)


@pytest.mark.parametrize("make_env", [FoxES, FoxESDiscrete, lambda m, **s: gym.wrappers.ClipReward(FoxES(m, **s), -1)])
def test_clean_games_give_no_alarm(market, make_env):
    shaping = {"entropy": 0.1, "hindsight": 0.5, "micro": 0.01, "drawdown": 0.2}
    game = {"window": 3, "shaping": shaping, "flat_at_close": True, "max_contracts": 2, "min_hold_bars": 3,
            "mirror_prob": 0.5, "depth_contracts": 1, "fill_rule": "touch", "episode_bars": 100}  # fmt: skip
    report = fox_env.audit(market, make_env=make_env, **game)
    assert report.passed, str(report)
    assert "the hindsight term, made of them, is left out" in report["future observation"].finding


def test_some_hours_of_the_day_give_no_alarm(monkeypatch):
    """Whether a bar is its session's last is not known at its close; cuts at such bars are no leaks."""
    monkeypatch.setattr(leaks, "_CUTS", 60)
    frame = make_frame(0, 12_000).between_time("14:30", "16:00")
    seen = []

    def build(raw: pd.DataFrame) -> Market:
        market = from_frame()(raw)
        seen.append(market.fraction_left[-1] > 0 and market.session_last[:-1].any() and len(raw) % 19 == 0)
        return market

    report = fox_env.audit(frame, build)
    assert report.passed, str(report)
    assert any(seen)


def test_hours_of_a_session_give_no_alarm():
    """Bars of one hour from 08:00 to 15:00 in Chicago end an hour before the exchange closes."""
    frame = make_frame(0, 5_000, "1h").tz_convert("America/Chicago").between_time("08:00", "14:00").tz_convert("UTC")
    report = fox_env.audit(frame, from_frame(interval="1h"))
    assert report.passed, str(report)
    assert report["time order"].figures["end_early"] == 0


def test_volume_bars_give_no_alarm(market):
    """Those that one trade makes have no length. What only bars of equal length tell is left out."""
    start = market.bars.start.copy()
    start[500::100] = market.ts[500::100]
    volume_bars = replace(market, interval_ns=0, bars=replace(market.bars, start=start))
    report = fox_env.audit(volume_bars)
    assert report.passed, str(report)
    assert "sessions" not in report["time order"].figures
    start[500] += 1
    assert alarms(fox_env.audit(volume_bars)) == ["time order"]


def test_a_finished_market_and_the_embedded_one():
    report = fox_env.audit(fox_env.synthetic_market("planted", 3_000))
    assert report.passed, str(report)
    skipped = {check.name: check.finding for check in report.checks if check.status == "skipped"}
    assert set(skipped) == {"future rebuild", "stamps"}
    assert "build=" in skipped["future rebuild"]


def test_figures_of_a_clean_build(frame):
    report = fox_env.audit(frame, from_frame())
    figures = {check.name: check.figures for check in report.checks}
    # Until the first bar to decide at there are too few rows, with the later ones left out.
    assert figures["future rebuild"] == {"cuts": 25, "rebuilt": 49, "refused": 1, "leaking": []}
    assert figures["stamps"] == {"shift_s": 0.0, "share_equal": 1.0, "share_equal_unshifted": 1.0}
    assert figures["present observation"] == {"changed": 8, "least_bars_late": 0, "most_bars_late": 0}
    assert figures["fill timing"] == {"orders": 48, "wrong": 0}  # 8 bars, 2 sides, 3 urgencies
    mirror = figures["mirror sum"]
    assert mirror["error"] <= 1e-9
    assert mirror["net"] == pytest.approx(-mirror["cost"], rel=1e-12)
    assert mirror["cost"] > 10
    assert abs(figures["martingale"]["random_t"]) < 3
    assert figures["reward"]["correlation"] == pytest.approx(1.0, abs=1e-3)


# --- 1. Off-by-one observations ---------------------------------------------------------------------------------------


def next_return(x) -> np.ndarray:
    """``close.pct_change().shift(-1)``."""
    return pd.Series(x.bars.close).pct_change().shift(-1).fillna(0.0).to_numpy()


def test_a_feature_shifted_the_wrong_way(frame):
    report = fox_env.audit(frame, from_frame(Feature("signal", ODD, 1, next_return)))
    assert alarms(report) == ["future rebuild"]
    assert report["future rebuild"].figures["leaking"] == ["feature 'signal'"]
    assert "feature 'signal' read the future" in report["future rebuild"].finding


def whole_z_score(x) -> np.ndarray:
    close = pd.Series(x.bars.close)
    return ((close - close.mean()) / close.std()).to_numpy()


def test_a_score_over_all_bars(frame):
    report = fox_env.audit(frame, from_frame(Feature("score", EVEN, 0, whole_z_score)))
    assert alarms(report) == ["future rebuild"]
    assert report["future rebuild"].figures["leaking"] == ["feature 'score'"]


def progress(x) -> np.ndarray:
    return np.arange(len(x.bars)) / len(x.bars)


def test_a_share_of_all_bars(frame):
    """Other prices do not change it, fewer bars do."""
    report = fox_env.audit(frame, from_frame(Feature("progress", EVEN, 0, progress)))
    assert alarms(report) == ["future rebuild"]
    assert "feature 'progress' read the future" in report["future rebuild"].finding
    assert "are left out" in report["future rebuild"].finding


def ahead(market: Market, **settings) -> FoxES:
    """Rows of features that begin one too late."""
    return FoxES(replace(market, features=np.roll(market.features, -1, axis=0)), **settings)


def test_an_observation_of_the_next_bar(frame):
    report = fox_env.audit(frame, from_frame(), ahead)
    assert alarms(report) == ["future observation", "present observation"]
    assert "observed 'return_1'" in report["future observation"].finding
    assert report["present observation"].figures["least_bars_late"] == -1
    assert "are seen 1 bars before it closes" in report["present observation"].finding


class Late(gym.Wrapper):
    """`step` returns what was seen before it."""

    def reset(self, **arguments):
        self._seen, info = self.env.reset(**arguments)
        return self._seen, info

    def step(self, action):
        before = self._seen
        self._seen, *rest = self.env.step(action)
        return before, *rest


def test_an_observation_of_the_previous_bar(frame):
    report = fox_env.audit(frame, from_frame(), lambda market, **settings: Late(FoxES(market, **settings)))
    assert alarms(report) == ["present observation"]
    assert report["present observation"].figures["least_bars_late"] == 1
    assert "first seen 1 bars after it closed" in report["present observation"].finding


def test_a_build_that_needs_many_rows():
    """Where the rows around a bar do not make it, all rows are taken."""
    frame = make_frame(0, 5_000)
    late = frame.index[3_500].value
    feature = Feature("signal", ODD, 1, lambda x: np.where(x.bars.ts > late, next_return(x), 0.0))

    def refuses(raw: pd.DataFrame) -> Market:
        if len(raw) < 2_000:
            raise ValueError("too few rows")
        return from_frame(feature)(raw)

    for build in (refuses, lambda raw: from_frame(feature)(raw[1_250:])):
        report = fox_env.audit(frame, build)
        assert report["future rebuild"].figures["leaking"] == ["feature 'signal'"]
    # Of 1,300 rows before a bar 50 are left, too few for the features, so these were not taken.
    assert report["future rebuild"].figures["rebuilt"] == 49
    # What the user's code raises when it meets few rows is the user's.
    report = fox_env.audit(frame, lambda raw: from_frame(feature)(raw if len(raw) > 2_000 else raw.iloc[[2_000]]))
    assert report["future rebuild"].figures["leaking"] == ["feature 'signal'"]


def test_a_warm_up_filled_in_backwards(frame):
    """Only the first bars hold the future, which no bar in the middle shows."""
    slow = Feature("slow", ODD, 0, lambda x: 10 * pd.Series(x.bars.close).pct_change(300).bfill().to_numpy())
    report = fox_env.audit(frame, from_frame(slow))
    assert alarms(report) == ["future rebuild"]
    assert report["future rebuild"].figures["leaking"] == ["feature 'slow'"]


def test_a_value_of_every_twelfth_bar_taken_from_the_nearest():
    """The leak shows at cuts at half of twelve places, and the rows around them must not begin at always the same."""

    def nearest(x) -> np.ndarray:
        close, k = x.bars.close, np.arange(len(x.bars))
        return close[np.minimum((k + 6) // 12 * 12, len(k) - 1)] / close - 1

    for seed in range(3):
        report = fox_env.audit(make_frame(seed, 4_000), from_frame(Feature("slow", ODD, 0, nearest)), seed=seed)
        assert alarms(report) == ["future rebuild"]


def test_a_value_known_one_bar_early_in_one_bar_of_twelve():
    def early(x) -> np.ndarray:
        close = pd.Series(x.bars.close, pd.to_datetime(x.bars.ts, utc=True))
        hours = close.resample("1h", label="right", closed="right").last()
        return hours.reindex(close.index + FIVE, method="ffill").ffill().bfill().to_numpy() / close.to_numpy() - 1

    for seed in range(3):
        report = fox_env.audit(make_frame(seed, 4_000), from_frame(Feature("hour", ODD, 0, early)), seed=seed)
        assert alarms(report) == ["future rebuild"]


# --- 2. Start-labelled resampling -------------------------------------------------------------------------------------


def hourly(frame: pd.DataFrame) -> Market:
    """The hour's return joined by the hour's label, its start."""
    hours = frame.resample("1h").agg(OHLCV).dropna()
    move = hours.close / hours.open - 1
    extra = move.reindex(frame.index, method="ffill").fillna(0.0)
    hour = Feature("hour", ODD, 0, lambda x: 1_000 * x.bars.extra["hour"], needs=("hour",))
    return from_frame(hour)(frame.assign(hour=extra))


def test_longer_bars_joined_by_their_start(frame):
    report = fox_env.audit(frame, hourly)
    assert alarms(report) == ["future rebuild"]
    assert report["future rebuild"].figures["leaking"] == ["feature 'hour'", "bars.extra['hour']"]


def five_minutes_as_minutes(frame: pd.DataFrame) -> Market:
    return from_frame(interval="1m")(frame.resample("5min").agg(OHLCV).dropna())


def test_longer_bars_known_at_their_start():
    report = fox_env.audit(make_frame(0, 6_000, "1m"), five_minutes_as_minutes)
    assert {"future rebuild", "time order"} <= set(alarms(report))
    assert "bars start 5 min or multiples of it apart, but count as known 1 min" in report["time order"].finding
    assert "bars.close" in report["future rebuild"].figures["leaking"]


def test_the_default_interval_on_longer_bars(frame):
    """`Market.from_bars` takes minutes if it is not told."""
    assert {"future rebuild", "time order"} <= set(alarms(fox_env.audit(frame)))


# --- 3. Fills in the bar of the decision ------------------------------------------------------------------------------


def with_opens(market: Market, opens: np.ndarray) -> Market:
    bars = market.bars
    return replace(
        market,
        bars=replace(bars, open=opens, high=np.maximum(bars.high, opens), low=np.minimum(bars.low, opens)),
    )


def filled_at_the_close_seen(market: Market, **settings) -> FoxES:
    """``open = close.shift(1)``: orders fill at the close that they were decided at."""
    return FoxES(with_opens(market, np.append(market.bars.open[:1], market.bars.close[:-1])), **settings)


def filled_at_the_open_seen(market: Market, **settings) -> FoxES:
    """``open.shift(1)``."""
    return FoxES(with_opens(market, np.append(market.bars.open[:1], market.bars.open[:-1])), **settings)


def test_a_fill_at_the_close_seen(frame):
    report = fox_env.audit(frame, from_frame(), filled_at_the_close_seen)
    assert alarms(report) == ["fill timing"]
    assert "which prices of the next bar do not move; the close of the bar already seen is" in (
        report["fill timing"].finding
    )
    # 8 bars, 2 sides: Market Normal. Patient takes the open into its mean, so it moves too little.
    assert report["fill timing"].figures["wrong"] == 32


def test_a_fill_at_the_open_seen(frame):
    report = fox_env.audit(frame, from_frame(), filled_at_the_open_seen)
    assert alarms(report) == ["fill timing", "martingale", "reward"]
    assert report["martingale"].figures["momentum_t"] > 10
    assert "momentum Market and IOC orders net" in report["martingale"].finding


# --- 4. Bars stamped early --------------------------------------------------------------------------------------------


def test_starts_read_as_ends(frame):
    """The frame itself is wrong, so only the exchange's hours tell."""
    report = fox_env.audit(frame.set_axis(frame.index - FIVE), from_frame())
    assert alarms(report) == ["time order"]
    assert "sessions end one bar before the exchange closes: bars are stamped early" in report["time order"].finding
    assert report["time order"].figures["with_closed_hours"] > 5


def test_starts_read_as_ends_beside_finer_bars():
    minutes = make_frame(0, 6_000, "1m")
    wrong = minutes.resample("5min").agg(OHLCV).dropna()
    wrong.index -= FIVE
    report = fox_env.audit(wrong, from_frame(), finer=minutes)
    assert alarms(report) == ["time order", "stamps"]
    assert report["stamps"].figures == {
        "shift_s": 300.0,
        "share_equal": 1.0,
        "share_equal_unshifted": pytest.approx(0, abs=0.05),
    }
    assert "the prices of 5 min after their time" in report["stamps"].finding
    finer = Market.from_bars(minutes, features=FEATURES)
    assert fox_env.audit(wrong, from_frame(), finer=finer)["stamps"] == report["stamps"]
    right = wrong.set_axis(wrong.index + FIVE)
    assert fox_env.audit(right, from_frame(), finer=minutes)["stamps"].status == "passed"


def test_a_build_that_stamps_early(frame):
    report = fox_env.audit(frame, lambda frame: from_frame()(frame.set_axis(frame.index - FIVE)))
    assert {"future rebuild", "time order", "stamps"} <= set(alarms(report))


def test_ends_read_as_starts_are_late_and_no_leak(frame):
    report = fox_env.audit(frame, lambda frame: from_frame()(frame.set_axis(frame.index + FIVE)))
    assert alarms(report) == ["time order", "stamps"]
    assert "begin one bar after the exchange opens: bars are stamped late" in report["time order"].finding
    assert "before their time" in report["stamps"].finding


def test_bars_out_of_order(market):
    bars = market.bars
    for name, change, words in (
        ("start", 1, "reach into the next one"), ("ts", -2, "are known before they have begun"),
        ("ts", 2, "are known after the next one"),
    ):  # fmt: skip
        column = getattr(bars, name).copy()
        column[700] += (change if name == "ts" else -change) * FIVE_MINUTES
        broken = replace(market, bars=replace(bars, **{name: column}))
        assert words in fox_env.audit(broken)["time order"].finding


# --- 5. The normalizer ------------------------------------------------------------------------------------------------


def with_normalizer(parts, fitted: Normalizer) -> list[Market]:
    return [replace(part, normalizer=fitted) for part in parts]


def fit(market: Market, **window) -> Normalizer:
    return replace(Normalizer.fit(market.features, market.columns, market.ts, market.decision), **window)


@pytest.fixture(scope="module")
def drifting(frame) -> Market:
    """A market with a feature whose mean differs between the parts."""
    return from_frame(Feature("drift", EVEN, 0, lambda x: np.linspace(-1, 1, len(x.bars))))(frame)


def test_a_normalizer_over_everything(drifting):
    report = fox_env.audit(drifting, split=lambda m: with_normalizer(m.split(), fit(m)))
    assert alarms(report) == ["normalizer"]
    assert "evaluated part 2 was fitted on" in report["normalizer"].finding
    assert "centre and scale are those of all parts" in report["normalizer"].finding


def test_a_normalizer_of_the_test_part(drifting):
    def split(market: Market) -> list[Market]:
        train, valid, test = market.split()
        return [train, valid, replace(test, normalizer=fit(test))]

    report = fox_env.audit(drifting, split=split)
    assert alarms(report) == ["normalizer"]
    assert "centre and scale are those of evaluated part 2" in report["normalizer"].finding


def test_a_normalizer_that_names_other_bars_than_it_was_fitted_on(drifting):
    def split(market: Market) -> list[Market]:
        parts = market.split()
        own = parts[0].normalizer
        return with_normalizer(parts, fit(market, first_ts=own.first_ts, last_ts=own.last_ts))

    report = fox_env.audit(drifting, split=split)
    assert report["normalizer"].finding == "centre and scale are those of all parts, whatever bars the normalizer names"


@pytest.mark.parametrize("rows", [slice(0, 500), slice(500, 1_000), slice(-400, None)])
def test_a_normalizer_of_some_bars_of_the_training_part_is_no_leak(rows, market):
    """A rolling window: by chance it lies nearer to other parts than to the whole of the training part."""
    train, valid, test = market.split()
    window = Market.slice(train, *rows.indices(len(train))[:2])
    for fitted in (fit(window), replace(fit(window), center=fit(window).center + 0.3 * fit(window).scale)):
        report = fox_env.audit(market, split=lambda m, own=fitted: with_normalizer((train, valid, test), own))
        assert report["normalizer"].status == "passed", report["normalizer"].finding


def test_parts_that_overlap(drifting):
    report = fox_env.audit(drifting, split=lambda m: [m.split()[0], *m.split(0.4, 0.3)[1:]])
    assert "evaluated part 1 overlaps the training part" in report["normalizer"].finding


def test_the_normalizer_that_a_market_came_with(drifting):
    train, valid, _ = drifting.split()
    assert fox_env.audit(valid)["normalizer"].status == "passed"
    assert fox_env.audit(train)["normalizer"].status == "skipped"
    over = replace(valid, normalizer=fit(drifting))
    assert "which this market overlaps" in fox_env.audit(over)["normalizer"].finding


# --- 6. Prices carried forward ----------------------------------------------------------------------------------------


def thinned(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[np.random.default_rng(1).random(len(frame)) < 0.97]


def test_bars_filled_forward(frame):
    """``asfreq().ffill()`` in trading hours: a bar in which nothing traded repeats the one before."""
    build = lambda raw: from_frame()(raw.reindex(frame.index[frame.index <= raw.index[-1]]).ffill().dropna())  # noqa: E731
    report = fox_env.audit(thinned(frame), build)
    assert alarms(report) == ["stale prices"]
    assert "bars repeat the one before" in report["stale prices"].finding
    assert "orders fill at them" in report["stale prices"].finding


def test_bars_filled_forward_through_closed_hours(frame):
    report = fox_env.audit(thinned(frame), lambda raw: from_frame()(raw.asfreq("5min").ffill()))
    assert {"time order", "stale prices"} <= set(alarms(report))
    assert "hours in which the exchange is closed" in report["time order"].finding


def test_closes_filled_forward_without_volume(frame):
    def build(raw: pd.DataFrame) -> Market:
        whole = raw.reindex(frame.index[frame.index <= raw.index[-1]])
        close = whole.close.ffill()
        prices = {name: whole[name].fillna(close) for name in ("open", "high", "low", "close")}
        return from_frame()(whole.assign(**prices, volume=whole.volume.fillna(0.0)).dropna())

    report = fox_env.audit(thinned(frame), build)
    assert alarms(report) == ["stale prices"]
    assert "bars have no volume" in report["stale prices"].finding


def test_quotes_filled_forward(frame):
    quotes = with_quotes(frame)
    quotes.loc[np.random.default_rng(2).random(len(frame)) < 0.3, ["bid", "ask"]] = np.nan
    quotes[["bid", "ask"]] = quotes[["bid", "ask"]].ffill()
    report = fox_env.audit(quotes.dropna(), from_frame())
    assert "stale prices" in alarms(report)
    assert "quotes are carried forward" in report["stale prices"].finding


def filled_at_a_price_carried_forward(market: Market, **settings) -> FoxES:
    """Opens known every fourth bar only, ``ffill`` between: most orders fill at an old price."""
    opens = pd.Series(market.bars.open).where(np.arange(len(market)) % 4 == 0).ffill().bfill().to_numpy()
    return FoxES(with_opens(market, opens), **settings)


def test_a_fill_price_carried_forward(frame):
    report = fox_env.audit(frame, from_frame(), filled_at_a_price_carried_forward)
    assert {"fill timing", "martingale"} <= set(alarms(report))
    assert "which prices of the next bar do not move" in report["fill timing"].finding


def test_quiet_markets_are_not_stale():
    """Flat bars without volumes, and a locked market with them, repeat prices without being carried forward."""
    flat = make_bars([(4000.0,) * 4] * 400)
    volume = np.random.default_rng(0).integers(1, 9, 400).astype(float)
    for volumes in (np.zeros(400), volume):
        market = make_market(replace(flat, volume=volumes))
        assert fox_env.audit(market)["stale prices"].status == "passed"


# --- Accounts, mirror and reward --------------------------------------------------------------------------------------


class Changed(gym.Wrapper):
    """Changes what a step returns."""

    def step(self, action):
        observation, reward, terminated, truncated, info = self.env.step(action)
        reward, info = self.change(reward, dict(info))
        return observation, reward, terminated, truncated, info


class BuysBetter(Changed):
    """A tick of luck for each contract bought."""

    def reset(self, **arguments):
        self.luck = 0.0
        return self.env.reset(**arguments)

    def change(self, reward, info):
        points = 0.25 * max(0, info["filled"])
        self.luck += points
        info["pnl_points"] += points
        info["gross_points"] += points
        info["equity_usd"] += 50.0 * self.luck
        return reward, info


def test_luck_in_one_direction(market):
    report = fox_env.audit(market, make_env=lambda m, **s: BuysBetter(FoxES(m, **s)))
    assert alarms(report) == ["mirror sum", "martingale"]
    assert report["martingale"].figures["random_t"] > 10


class Improves(Changed):
    """Fills half a point better than the bar trades."""

    def change(self, reward, info):
        info["fill_price"] -= 0.5 * np.sign(info["filled"])
        return reward, info


def test_prices_that_nobody_asked(market):
    """h is an eighth of a point, so that only Aggressive orders, which pay a tick more, are not better by 0.375."""
    report = fox_env.audit(market, make_env=lambda m, **s: Improves(FoxES(m, **s)))
    assert alarms(report) == ["fill timing"]
    assert "better than" in report["fill timing"].finding
    assert report["fill timing"].figures == {"orders": 48, "wrong": 48}


class Forgetful(Changed):
    """Equity that leaves out commissions."""

    paid = 0.0

    def change(self, reward, info):
        self.paid += 2.25 * abs(info["filled"])
        info["equity_usd"] += self.paid
        return reward, info


def test_equity_that_is_not_the_sum(market):
    report = fox_env.audit(market, make_env=lambda m, **s: Forgetful(FoxES(m, **s)))
    assert alarms(report) == ["accounts"]
    assert "Σ pnl_points is not the change of equity_usd, first in the step to" in report["accounts"].finding


@pytest.mark.parametrize(
    ("key", "by", "words"),
    [("position", 1, "the position's change is not filled + forced"), ("ts", 1, "ts is not the close"),
     ("cost_points", -9.0, "cost_points are negative"), ("gross_points", 1.0, "not gross_points − cost_points")],
)  # fmt: skip
def test_infos_that_do_not_add_up(market, key, by, words):
    class Wrong(Changed):
        def change(self, reward, info):
            info[key] += by
            return reward, info

    assert words in fox_env.audit(market, make_env=lambda m, **s: Wrong(FoxES(m, **s)))["accounts"].finding


class Gross(Changed):
    """A reward before costs, with a bonus for trading."""

    def change(self, reward, info):
        return info["gross_points"] / 4000.0 + 1e-4 * abs(info["filled"]), info


class Delayed(Changed):
    """The reward of the step before."""

    before = 0.0

    def change(self, reward, info):
        reward, self.before = self.before, reward
        return reward, info


class Foresees(Changed):
    """The position times the next bar's move."""

    def change(self, reward, info):
        market = self.unwrapped.market
        row = int(np.searchsorted(market.ts, info["ts"]))
        ahead = market.bars.close[min(row + 1, len(market) - 1)] - market.bars.close[row]
        return reward + info["position"] * ahead / 4000.0, info


def test_rewards_that_are_not_the_accounts(market):
    def run(wrapper):
        return fox_env.audit(market, make_env=lambda m, **s: wrapper(FoxES(m, **s)))

    gross = run(Gross)
    assert alarms(gross) == ["reward"]
    assert "is positive" in gross["reward"].finding
    late = run(Delayed)
    assert alarms(late) == ["reward"]
    assert "with those 1 earlier 1.00" in late["reward"].finding
    assert alarms(run(Foresees)) == ["future observation"]
    assert run(Foresees)["future observation"].figures["leaking"] == ["the reward"]


# --- What is refused, skipped and said --------------------------------------------------------------------------------


def test_a_build_that_draws(frame):
    rng = np.random.default_rng(0)
    report = fox_env.audit(frame, from_frame(Feature("noise", ODD, 0, lambda x: rng.normal(size=len(x.bars)))))
    assert report["future rebuild"].finding == "feature 'noise' differ between two builds of the same rows"


def test_a_build_that_refuses_other_rows(frame):
    def build(raw: pd.DataFrame) -> Market:
        # The whole, some rows, the same again; then replaced, left out, and some rows of the next cut, in turn.
        number = len(calls)
        calls.append(len(raw))
        if number > 2 and number % 3 != 2:
            raise ValueError("no such rows")
        return from_frame()(raw)

    calls: list[int] = []
    check = fox_env.audit(frame, build)["future rebuild"]
    assert check.status == "skipped"
    assert "no such rows" in check.finding


class Silent(Changed):
    def change(self, reward, info):
        return reward, {key: value for key, value in info.items() if key != "fill_price"}


def test_an_environment_without_infos_is_skipped(market):
    report = fox_env.audit(market, make_env=lambda m, **s: Silent(FoxES(m, **s)))
    assert report["fill timing"].status == "skipped"
    assert report["fill timing"].finding == "the environment's infos have no 'fill_price'"


def test_bad_input_is_refused(frame, market):
    with pytest.raises(ValueError, match="the frame's index has time zone None, expected UTC"):
        fox_env.audit(frame.tz_localize(None))
    with pytest.raises(TypeError, match="data is of type int"):
        fox_env.audit(3)
    with pytest.raises(TypeError, match="data is a Market and build is given"):
        fox_env.audit(market, from_frame())
    with pytest.raises(TypeError, match="build gives a DataFrame, expected a Market"):
        fox_env.audit(frame, lambda raw: raw)
    with pytest.raises(ValueError, match=r"^seed is -1, expected an integer in"):
        fox_env.audit(market, seed=-1)
    with pytest.raises(TypeError, match="unknown setting 'contracts'"):
        fox_env.audit(market, contracts=3)


def test_the_report(market):
    report = fox_env.audit(market, make_env=filled_at_the_close_seen)
    lines = str(report).split("\n")
    assert max(map(len, lines)) <= 100
    assert lines[-1] == "9 passed, 1 failed, 2 skipped"
    assert sum(line.startswith("fill timing          failed   a Market") for line in lines) == 1
    assert not report.passed
    told = json.loads(json.dumps(report.to_dict()))
    assert (told["schema"], told["passed"], len(told["checks"])) == (1, False, 12)
    assert told["checks"][6]["name"] == "fill timing"
    assert set(told["checks"][6]) == {"name", "status", "finding", "figures"}
    again = fox_env.audit(market, make_env=filled_at_the_close_seen)
    assert again.to_dict() == report.to_dict()


def test_scrambled_rows_are_other_rows_after_the_cut_only(frame):
    rng = np.random.default_rng(0)
    quotes = with_quotes(frame).assign(flag=np.arange(BARS) % 2 == 0, name="x", instrument_id=7)
    cut = int(quotes.index[1_000].value) + FIVE_MINUTES
    other = FrameRows(quotes).scrambled(cut, rng)
    pd.testing.assert_frame_equal(other[:1_001], quotes[:1_001], check_dtype=False)
    pd.testing.assert_frame_equal(FrameRows(quotes).rows(cut - 2 * FIVE_MINUTES, cut).raw, quotes[999:1_001])
    later, was = other[1_001:], quotes[1_001:]
    for name in (*COLUMNS, "bid", "ask", "bid_size", "ask_size", "flag"):
        assert (later[name].to_numpy() != was[name].to_numpy()).mean() > 0.95, name
    assert (later.instrument_id == 7).all()
    assert (later.name == "x").all()
    assert (later.high >= later[["open", "low", "close"]].max(axis=1)).all()
    assert (later.low <= later[["open", "high", "close"]].min(axis=1)).all()
    assert (later.low > 0).all()
    segments, _ = rolled(0)
    rows = ChainRows(segments)
    cut = int(segments[1].bars.ts[segments[1].first + 50])
    for kept in (rows.rows(-np.inf, cut).raw, rows.scrambled(cut, rng)):
        for a, b in zip(kept, segments, strict=True):
            until = b.bars.ts <= cut
            np.testing.assert_array_equal(a.bars.close[: until.sum()], b.bars.close[until])
    window = rows.rows(int(segments[1].bars.ts[segments[1].first - 10]), cut).raw
    assert [len(s.bars) - s.first for s in window][-1] == 51
    assert window[-1].first == 9


def test_importing_the_package_loads_none_of_it():
    code = "import sys, fox_env; assert 'fox_env.leaks' not in sys.modules; fox_env.audit; " \
           "from fox_env.leaks import Check; assert callable(fox_env.audit); " \
           "assert not {'torch', 'pandas', 'numba'} & set(sys.modules)"  # fmt: skip
    subprocess.run([sys.executable, "-c", code], check=True)
