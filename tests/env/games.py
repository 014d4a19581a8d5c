"""Small markets and a way to play them, for tests of the game."""

from __future__ import annotations

import numpy as np

from fox_env import Contract, FoxES
from fox_env.data.bars import Bars
from fox_env.data.features import ODD, Feature, complement, swap
from fox_env.data.rolls import Segment
from fox_env.market import Market, build_market

MINUTES = 60_000_000_000
# Tuesday 2024-03-05 09:00 in Chicago.
MORNING = 1_709_650_800_000_000_000
# The same day 15:50: a bar of five minutes from here closes at 15:55, the next one at the session's end.
AFTERNOON = MORNING + 410 * MINUTES

ZERO = Feature("zero", ODD, 0, lambda x: np.zeros(len(x.bars)))


def make_bars(prices: list[tuple], start: int = MORNING, minutes: int = 5, **columns: list[float]) -> Bars:
    """Bars from (open, high, low, close) rows, one after another."""
    table = np.array(prices, float).T
    begin = start + minutes * MINUTES * np.arange(table.shape[1])
    columns = {name: np.array(column, float) for name, column in columns.items()}
    return Bars(begin, begin + minutes * MINUTES, *table, np.full(table.shape[1], 100.0), **columns)


def make_market(bars: Bars | list[Segment], contract: str | Contract = "ES", **options: object) -> Market:
    """A market whose only feature is zero, so that every bar is a decision bar."""
    segments = bars if isinstance(bars, list) else [Segment("X", bars, 0, 0.0)]
    return build_market(segments, contract, 5 * MINUTES, **{"features": [ZERO], **options})


def play(market: Market, actions: list[tuple[int, int, int, int]], start: int = 0, **settings: object) -> list[dict]:
    """Infos of the steps, with the step's reward and end flags added."""
    env = FoxES(market, **{"episode_bars": 0, **settings})
    env.reset(seed=0, options={"start": start})
    infos = []
    for action in actions:
        observation, reward, terminated, truncated, info = env.step(np.array(action))
        infos.append({**info, "reward": reward, "terminated": terminated, "truncated": truncated, "obs": observation})
    return infos


def random_market(rng: np.random.Generator, length: int = 400, quotes: bool = True) -> Market:
    """An ugly market: jumps, flat bars, missing and crossed quotes, zero sizes, a measured and an unmeasured roll."""
    tick = 0.25
    segments = []
    begin, close = MORNING, 4000.0
    for number in range(3):
        bars = length // 3
        move = rng.integers(-8, 9, bars) * (rng.random(bars) < 0.9) + rng.integers(-200, 201, bars) * (
            rng.random(bars) < 0.02
        )
        closes = np.maximum(close + tick * np.cumsum(move), 100.0)
        opens = np.concatenate([[closes[0]], closes[:-1]]) + tick * rng.integers(-2, 3, bars)
        high = np.maximum(opens, closes) + tick * rng.integers(0, 6, bars)
        low = np.minimum(opens, closes) - tick * rng.integers(0, 6, bars)
        start = begin + 5 * MINUTES * np.arange(bars)
        columns = {}
        if quotes:
            bid = closes - tick * rng.integers(0, 4, bars)
            ask = bid + tick * rng.integers(-1, 5, bars)
            bid[rng.random(bars) < 0.2] = np.nan
            sizes = rng.integers(0, 6, (2, bars)).astype(float)
            sizes[rng.random((2, bars)) < 0.3] = np.nan
            columns = {"bid": bid, "ask": ask, "bid_size": sizes[0], "ask_size": sizes[1]}
        made = Bars(start, start + 5 * MINUTES, opens, high, low, closes, np.full(bars, 10.0), **columns,
                    extra={"signal": rng.standard_normal(bars)})  # fmt: skip
        gap = 0.0 if number == 0 else (float(tick * rng.integers(-40, 41)) if number == 1 else np.nan)
        segments.append(Segment(f"C{number}", made, 2 if number == 1 else 0, gap))
        begin, close = int(start[-1]) + 5 * MINUTES, closes[-1] + tick * rng.integers(-40, 41)
    odd = Feature("signal", ODD, 2, lambda x: x.bars.extra["signal"])
    location = Feature(
        "location", complement(1.0), 0, lambda x: (x.bars.close - x.bars.low) / (x.bars.high - x.bars.low + 1.0)
    )
    up = Feature("up", swap("down"), 0, lambda x: x.bars.high - x.bars.close)
    down = Feature("down", swap("up"), 0, lambda x: x.bars.close - x.bars.low)
    return build_market(segments, "ES", 5 * MINUTES, features=[odd, location, up, down])
