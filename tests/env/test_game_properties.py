"""What must hold of the game for any market and any actions."""

from __future__ import annotations

import copy
import math
import weakref
from dataclasses import replace
from fractions import Fraction

import gymnasium as gym
import numpy as np
import pandas as pd
import pytest
from gymnasium.vector import AutoresetMode
from hypothesis import given, settings
from hypothesis import strategies as st

from fox_env import Contract, FoxES, FoxESDiscrete, FoxESVectorEnv, Market, dynamics, evaluate
from fox_env.data.bars import Bars
from fox_env.data.features import ODD, Feature, complement
from fox_env.data.rolls import Segment
from fox_env.engine import Game, compile_rule
from fox_env.files import write_arrays
from fox_env.market import build_market
from tests.env.games import MINUTES, MORNING, ZERO, make_bars, make_market, play, random_market

seeds = st.integers(0, 2**31)
games = st.fixed_dictionaries(
    {
        "max_contracts": st.sampled_from([1, 2, 3, 4, 7]),
        "min_hold_bars": st.sampled_from([0, 1, 3, 10]),
        "fill_rule": st.sampled_from(["through", "touch"]),
        "depth_contracts": st.sampled_from([None, 1, 2]),
        "flat_at_close": st.booleans(),
        "spread_ticks": st.sampled_from([0.0, 1.0, 2.0]),
        "initial_equity_usd": st.sampled_from([3_000.0, 60_000.0, 200_000.0]),
        "commission_bps_round_trip": st.sampled_from([None, 0.18]),
    }
)


def random_actions(rng, *shape):
    return rng.integers(0, 3, (*shape, 4)).astype(np.int32)


@given(seeds, games)
@settings(max_examples=60, deadline=None)
def test_accounts_balance(seed, game):
    rng = np.random.default_rng(seed)
    market = random_market(rng)
    infos = []
    env = FoxES(market, episode_bars=0, **game)
    observation, _ = env.reset(seed=seed)
    assert observation in env.observation_space
    while True:
        observation, reward, terminated, truncated, info = env.step(rng.integers(0, 3, 4))
        infos.append(info)
        assert observation in env.observation_space
        assert math.isfinite(reward)
        assert abs(info["position"]) <= game["max_contracts"]
        assert info["cost_points"] >= 0.0
        assert type(info["position"]) is int
        if terminated or truncated:
            break
    net = np.array([i["pnl_points"] for i in infos])
    change = (infos[-1]["equity_usd"] - game["initial_equity_usd"]) / 50
    assert abs(math.fsum(net) - change) <= 1e-9 * max(1.0, np.abs(net).sum())
    # Positions change by what is filled and what is forced, and by nothing else.
    moved = sum(i["filled"] + i["forced"] for i in infos)
    assert moved == infos[-1]["position"]
    if game["max_contracts"] == 1 and not game["flat_at_close"]:
        assert {abs(i["position"]) for i in infos} <= {0, 1}


@given(seeds, games)
@settings(max_examples=25, deadline=None)
def test_batch_equals_single(seed, game):
    """numba's batch and plain Python agree bit for bit, mirrored episodes and windows included."""
    rng = np.random.default_rng(seed)
    market = random_market(rng)
    game = {**game, "mirror_prob": 0.5, "window": 3, "episode_bars": 50,
            "shaping": {"entropy": 0.1, "micro": 0.01, "hindsight": 0.2, "drawdown": 0.3}}  # fmt: skip
    seeds_ = rng.integers(0, 1000, 3).tolist()
    vector = FoxESVectorEnv(3, market, autoreset_mode=AutoresetMode.DISABLED, **game)
    singles = [FoxES(market, **game) for _ in seeds_]
    observations, infos = vector.reset(seed=seeds_)
    for i, single in enumerate(singles):
        observation, info = single.reset(seed=seeds_[i])
        np.testing.assert_array_equal(observation, observations[i])
        assert info["ts"] == infos["ts"][i]
    for _ in range(120):
        action = random_actions(rng, 3)
        observations, rewards, terminated, truncated, infos = vector.step(action)
        for i, single in enumerate(singles):
            observation, reward, end, cut, info = single.step(action[i])
            np.testing.assert_array_equal(observation, observations[i])
            assert reward == rewards[i]
            assert (end, cut) == (terminated[i], truncated[i])
            for name, value in info.items():
                if name == "reward_terms":
                    assert value == {key: infos[name][key][i] for key in value}
                else:
                    np.testing.assert_equal(infos[name][i], value, err_msg=name)
        done = terminated | truncated
        if done.any():
            observations, infos = vector.reset(options={"reset_mask": done})
            for i in np.flatnonzero(done):
                np.testing.assert_array_equal(singles[i].reset()[0], observations[i])


@given(seeds, games)
@settings(max_examples=25, deadline=None)
def test_the_mirror_earns_the_same(seed, game):
    """Direction-swapped actions in the mirror earn the same rewards, bit for bit, and see the mirrored observation."""
    rng = np.random.default_rng(seed)
    market = random_market(rng)
    plain = FoxES(market, episode_bars=0, **game)
    mirrored = FoxES(market, episode_bars=0, mirror_prob=1.0, **game)
    first, _ = plain.reset(seed=1, options={"start": 5})
    second, _ = mirrored.reset(seed=1, options={"start": 5})
    features = market.features.shape[1]
    assert plain.action_masks().sum() == 12
    while True:
        assert second[0] == -first[0]  # odd
        assert second[1] == -first[1]  # complement(1), seen about its centre
        assert (second[2], second[3]) == (first[3], first[2])  # swap
        assert second[features] == -first[features]  # exposure
        np.testing.assert_array_equal(second[features + 1 :], first[features + 1 :])
        action = rng.integers(0, 3, 4)
        swapped = action.copy()
        swapped[0] = 2 - swapped[0]
        first, reward, end, cut, info = plain.step(action)
        second, same, *_, other = mirrored.step(swapped)
        assert reward == same
        np.testing.assert_equal(other, info)
        if end or cut:
            break


@given(seeds)
@settings(max_examples=20, deadline=None)
def test_equity_falls_linearly_in_fees(seed):
    """For fixed actions and without margin, each dollar a side costs a dollar a contract traded."""
    rng = np.random.default_rng(seed)
    market = random_market(rng)
    actions = [tuple(a) for a in rng.integers(0, 3, (300, 4))]
    ends = []
    for fee in (0.0, 1.0, 2.0, 10.0):
        infos = play(market, actions, start=2, margin=False, commission_usd_per_side=fee, min_hold_bars=2)
        ends.append(infos[-1]["equity_usd"])
    contracts = sum(abs(i["filled"]) + abs(i["forced"]) + 2 * i["rolled"] for i in infos)
    np.testing.assert_allclose(np.subtract(ends[0], ends), np.array([0.0, 1.0, 2.0, 10.0]) * contracts, atol=1e-6)


@given(
    st.tuples(*[st.integers(-12, 12)] * 5), st.integers(0, 3),
    st.tuples(*[st.sampled_from([0, 1, 2, 5, math.nan])] * 2),
    st.tuples(*[st.integers(0, 2)] * 4), st.integers(-4, 4), st.sampled_from([0, 1]), st.sampled_from([0, 2]),
    st.sampled_from([0, 1]),
)  # fmt: skip
@settings(max_examples=400, deadline=None)
def test_a_sell_is_a_reflected_buy(ticks, spread, sizes, action, position, touch, depth, after_break):
    """Prices p → 8000 − p with bid and ask exchanged turn every buy into the same sell."""
    rules = Game(fill_rule="touch" if touch else "through", depth_contracts=depth or None).rules(
        make_market(make_bars([(4000.0,) * 4] * 2))
    )
    close, opening, end, up, down = (0.25 * t for t in ticks)
    half = 0.125 * spread

    def rows(sign):
        bar, nxt = [0.0] * 16, [0.0] * 16
        bar[dynamics.CLOSE] = 4000 + sign * close
        bid, ask = bar[dynamics.CLOSE] - half, bar[dynamics.CLOSE] + half
        bar[dynamics.BID], bar[dynamics.ASK] = bid, ask
        bar[dynamics.BID_SIZE], bar[dynamics.ASK_SIZE] = sizes if sign > 0 else sizes[::-1]
        nxt[dynamics.OPEN], nxt[dynamics.CLOSE] = 4000 + sign * opening, 4000 + sign * end
        high, low = max(opening, end) + abs(up), min(opening, end) - abs(down)
        nxt[dynamics.HIGH] = 4000 + (high if sign > 0 else -low)
        nxt[dynamics.LOW] = 4000 + (low if sign > 0 else -high)
        nxt[dynamics.AFTER_BREAK] = after_break
        return bar, nxt

    direction, magnitude, order, urgency = action
    one = dynamics.Step(
        *dynamics.step_one(
            *rows(1), position, 20, 0.0, position * 4000.0, direction, magnitude, order, urgency, 0, rules
        )
    )
    two = dynamics.Step(
        *dynamics.step_one(
            *rows(-1), -position, 20, 0.0, -position * 4000.0, 2 - direction, magnitude, order, urgency, 0, rules
        )
    )
    assert two.position == -one.position
    assert two.filled == -one.filled
    assert two.gross == pytest.approx(one.gross, abs=1e-9)
    assert two.cost == pytest.approx(one.cost, abs=1e-9)
    if one.filled:
        assert two.fill_price == pytest.approx(8000 - one.fill_price, abs=1e-9)
    if one.filled > 0 and order > 0:
        # No order pays more than its limit.
        bar = rows(1)[0]
        limit = (
            bar[dynamics.ASK] + 0.25 * urgency
            if order == 2
            else np.floor(bar[dynamics.BID] / 0.25) * 0.25 + 0.25 * (urgency - 1)
        )
        assert one.fill_price <= limit + 1e-9


def test_a_million_random_steps():
    """64 accounts, margin calls and resets included: observations finite and in space, accounts exact."""
    rng = np.random.default_rng(0)
    market = random_market(rng, 3_000)
    env = FoxESVectorEnv(64, market, episode_bars=200, mirror_prob=0.5, initial_equity_usd=20_000.0, copy=False)
    low, high = env.single_observation_space.low, env.single_observation_space.high
    env.reset(seed=0)
    engine = env.engine
    total, absolute, ended = np.zeros(64), np.zeros(64), 0
    actions = random_actions(rng, 500, 64)
    for step in range(1_000_000 // 64):
        done = engine.count[dynamics.DONE] != 0
        total[done] = absolute[done] = 0.0
        engine.step(actions[step % 500])
        assert np.isfinite(engine.obs).all()
        assert (engine.obs >= low).all()
        assert (engine.obs <= high).all()
        net = engine.points[dynamics.PNL]
        total += net
        absolute += np.abs(net)
        change = (engine.points[dynamics.EQUITY] - 20_000.0) / 50
        assert (np.abs(total - change) <= 1e-9 * np.maximum(1.0, absolute)).all()
        ended += np.count_nonzero(engine.flags[dynamics.END] == dynamics.MARGIN_CALL)
    assert ended > 100


def test_a_million_steps_sum_to_the_cent():
    """Float64 holds a million one-tick wins with costs exactly enough for cents (MES: $5 a point, $0.62 a side)."""
    import numba

    step_one = compile_rule(numba.njit)["step_one"]

    @numba.njit
    def run(up, down, rules, steps):
        position, age, net, basis = 0, 2, 0.0, 0.0
        for step in range(steps):
            bar, nxt = (up, down) if step % 2 == 0 else (down, up)
            result = step_one(bar, nxt, position, age, net, basis, 2 * (step % 2), 2, 0, 1, 0, rules)
            position, age, net, basis = result[:4]
        return net

    market = make_market(make_bars([(4000.0,) * 4, (4000.25,) * 4, (4000.0,) * 4]), "MES")
    game = Game(min_hold_bars=0, margin=False, initial_equity_usd=100_000.0)
    down, up = (tuple(row) for row in market.tape()[1:])
    net = run(up, down, game.rules(market), 1_000_000)
    # Trades are at the open, which is the bar's close, so that only carried positions move: −4 into each bar that falls
    # from 4000.25 to 4000, +4 into each that rises: 999,999 × 1 point. Four contracts in the first step, eight in each
    # other one, cost 0.125 + 0.62 / 5 = 0.249 points each.
    exact = Fraction(999_999) - (4 + 8 * 999_999) * Fraction(249, 1000)
    assert round(100 * 5 * net) == round(100 * 5 * exact)


def test_philox_known_answers():
    """Vectors of the Random123 distribution (Salmon et al. 2011)."""
    assert dynamics.philox(0, 0, 0, 0, 0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    ones = 0xFFFFFFFF
    assert dynamics.philox(*[ones] * 6) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)
    assert dynamics.philox(*pi) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@given(seeds, st.integers(0, 2**63 - 1))
@settings(max_examples=10, deadline=None)
def test_environment_does_not_depend_on_the_batch(seed, key):
    """Account i plays (seed, i), whatever the number of accounts; equal seeds give equal games, others differ."""
    rng = np.random.default_rng(seed)
    market = random_market(rng)
    actions = random_actions(rng, 60, 8)
    runs = []
    for n in (8, 3, 8):
        env = FoxESVectorEnv(n, market, episode_bars=20)
        first, _ = env.reset(seed=key)
        runs.append([first[:3], *(env.step(a[:n])[0][:3] for a in actions)])
    np.testing.assert_array_equal(runs[0], runs[1])
    np.testing.assert_array_equal(runs[0], runs[2])
    assert not np.array_equal(np.asarray(runs[0])[:, 0], np.asarray(runs[0])[:, 1])


def test_starts_are_uniform_over_whole_episodes():
    market = make_market(make_bars([(4000.0,) * 4] * 21))
    env = FoxES(market, episode_bars=10)
    env.reset(seed=3)
    first = market.ts[0]
    counts = np.zeros(21, int)
    for _ in range(2_200):
        _, info = env.reset()
        counts[(info["ts"] - first) // (market.ts[1] - first)] += 1
    # Bars 0 to 10 have ten bars after them. χ² with 10 degrees of freedom: 29.6 is its .999 quantile.
    assert counts[11:].sum() == 0
    assert ((counts[:11] - 200.0) ** 2 / 200).sum() < 29.6


def test_a_new_contract_without_history_is_skipped_until_warm():
    market = random_market(np.random.default_rng(5), quotes=False)
    cold = np.flatnonzero(~market.decision)
    roll = int(np.flatnonzero(market.roll == dynamics.UNMEASURED)[0])
    assert cold.tolist() == [0, 1, roll, roll + 1]
    env = FoxES(market, episode_bars=0, margin=False)
    env.reset(seed=0, options={"start": roll - 1})
    _, _, _, _, info = env.step(np.array([2, 2, 0, 1]))
    assert info["ts"] == market.ts[roll + 2]
    assert info["position"] == 0


def test_a_part_ends_at_its_last_decision_bar():
    """A part that stops inside the cold bars of a new contract is cut before them, so that no step leaves it."""
    market = random_market(np.random.default_rng(5), quotes=False)
    roll = int(np.flatnonzero(market.roll == dynamics.UNMEASURED)[0])
    assert not market.decision[roll : roll + 2].any()
    for stop in (roll, roll + 1, roll + 2):
        part = market.slice(10, stop)
        assert len(part) == len(part.land) == len(part.tape()) == roll - 10
        infos = play(part, [(1, 0, 0, 0)] * 2, start=len(part) - 3)
        assert [info.get("end_reason") for info in infos] == [None, "end_of_data"]
    assert len(market.slice(10, roll + 3)) == roll - 7


def test_what_the_mirror_shows_is_in_the_space_without_a_normalizer():
    """complement(30) is seen about 15, clipped: 2 − 15 = −13 as −10, 20 − 15 = 5, 30 − 15 as 10; mirrored negated."""
    level = Feature("level", complement(30.0), 0, lambda x: np.resize([2.0, 20.0, 30.0], len(x.bars)))
    market = make_market(make_bars([(4000.0,) * 4] * 9), features=[level])
    for mirrored in (0, 1):
        sign = -1 if mirrored else 1
        game = {"episode_bars": 0, "mirror_prob": float(mirrored)}
        single, many = FoxES(market, **game), FoxESVectorEnv(2, market, **game)
        seen = [(single.reset(seed=0, options={"start": 3})[0], many.reset(seed=0, options={"start": 3})[0])]
        seen += [(single.step([1, 0, 0, 0])[0], many.step([[1, 0, 0, 0]] * 2)[0]) for _ in range(2)]
        for (one, two), expected in zip(seen, (-10.0, 5.0, 10.0), strict=True):
            assert one[0] == two[0, 0] == two[1, 0] == sign * expected
            assert one in single.observation_space
            assert two in many.observation_space


def test_environments_on_a_market_share_its_arrays():
    market = random_market(np.random.default_rng(4))
    assert market.tape(1.0) is market.tape(1)
    assert market.tape(1.0) is not market.tape(2.0)
    assert market.tape(1.0) is not market.tape(1.0, 10)
    assert copy.deepcopy(market) is market
    game = {"episode_bars": 20}
    one, two, many = FoxES(market, **game), FoxES(market, spread_ticks=1, **game), FoxESVectorEnv(2, market, **game)
    assert one._tape is two._tape is many.engine.tape is market.tape()
    assert one._table is two._table is market.padded
    np.testing.assert_array_equal(market.padded, np.pad(market.observed, ((0, 0), (0, 6))))
    assert gym.make("FoxES-v0", market=market, **game).unwrapped.market is market
    # What is derived from a market is built anew.
    part, other = market.slice(0, 100), replace(market, features=market.features + 1, volatility=market.volatility * 2)
    np.testing.assert_array_equal(part.tape(), market.tape()[:100])
    np.testing.assert_array_equal(other.tape()[:, dynamics.VOLATILITY], 2 * market.volatility)
    assert len(part.padded) == len(part.observed) == 100
    assert not np.array_equal(other.padded, market.padded)


@pytest.mark.parametrize("size", [math.inf, math.nan])
def test_a_size_that_is_not_finite_is_unknown(size):
    sizes = {"bid_size": [size] * 3, "ask_size": [size] * 3}
    market = make_market(make_bars([(4000.0,) * 4] * 3, bid=[3999.75] * 3, ask=[4000.0] * 3, **sizes))
    assert play(market, [(2, 2, 2, 1)])[0]["filled"] == 4


def test_price_gap_between_contracts_is_never_earned():
    """On constant prices with a constant spread between contracts every roll costs exactly its costs."""
    old = make_bars([(4000.0,) * 4] * 10)
    new = make_bars([(4031.5,) * 4] * 10, start=MORNING + 25 * MINUTES)
    market = make_market([Segment("A", old, 0, 0.0), Segment("B", new, 5, 31.5)])
    infos = play(market, [(2, 2, 0, 1)] * (len(market) - 1))
    assert sum(i["gross_points"] for i in infos) == 0.0
    rolled = [i for i in infos if i["rolled"]]
    assert len(rolled) == 1
    assert rolled[0]["cost_points"] == pytest.approx(4 * (0.25 + 0.09))


def test_shaping_is_reported_apart_from_the_return():
    market = random_market(np.random.default_rng(1))
    actions = [tuple(a) for a in np.random.default_rng(2).integers(0, 3, (100, 4))]
    plain = play(market, actions, start=2)
    shaped = play(market, actions, start=2, shaping={"entropy": 0.5, "hindsight": 1.0, "micro": 0.1, "drawdown": 2.0})
    for one, two in zip(plain, shaped, strict=True):
        assert one["pnl_points"] == two["pnl_points"]
        assert two["reward"] == pytest.approx(one["reward"] + sum(two["reward_terms"].values()), abs=1e-15)
        assert one["reward_terms"] == {}
    # The entropy term telescopes to coefficient × entropy of the visits, the drawdown term to the final drawdown.
    visits = [sum(np.sign(i["position"]) == s for i in shaped) for s in (-1, 0, 1)]
    shares = np.array([v for v in visits if v]) / 100
    entropy = -(shares * np.log(shares)).sum() / np.log(3)
    assert sum(i["reward_terms"]["entropy"] for i in shaped) == pytest.approx(0.5 * entropy)
    equity = np.array([200_000.0, *(i["equity_usd"] for i in shaped)])
    drawdown = equity.max() - equity[-1]
    assert sum(i["reward_terms"]["drawdown"] for i in shaped) == pytest.approx(-2.0 * drawdown / 200_000, abs=1e-12)


def test_hindsight_never_looks_past_the_end_or_into_a_roll_gap():
    market = random_market(np.random.default_rng(3))
    ahead = market.tape(1.0, 10)[:, dynamics.AHEAD]
    assert ahead[-1] == 0.0
    closes = market.bars.close
    roll = int(np.flatnonzero(market.roll == dynamics.MEASURED)[0])
    assert ahead[roll - 1] == pytest.approx(closes[roll + 9] - closes[roll - 1] - market.gap[roll])
    half = market.slice(0, 100).tape(1.0, 10)[:, dynamics.AHEAD]
    assert half[95] == pytest.approx(closes[99] - closes[95])


def test_damaged_files_are_no_saved_market(tmp_path):
    path = tmp_path / "market"
    market = random_market(np.random.default_rng(4), 50)
    market.save(path)
    assert [p.name for p in tmp_path.iterdir()] == ["market"]
    data = path.read_bytes()
    damaged = [b"", b"no", *(data[:length] for length in (10, len(data) // 2, len(data) - 1))]
    for at in np.random.default_rng(0).integers(0, len(data), 60).tolist():
        damaged.append(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
    for content in damaged:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"market is not a file of arrays"):
            Market.load(path)
    with path.open("wb") as file:
        np.savez(file, meta=np.zeros(3, np.uint8))
    with pytest.raises(ValueError, match=r"market is not a file of arrays"):
        Market.load(path)
    arrays, texts = market.to_arrays()
    for changed, message in (
        ({"schema": "1"}, r"market has schema 1, expected schema 2$"),
        ({"market": "{}"}, r"market is not a saved market \(KeyError\('contract'\)\)$"),
        ({"market": "[]"}, r"market is not a saved market \(TypeError\("),
        (
            {"market": texts["market"].replace('"tick": 0.25', '"tick": -1')},
            r"market is not a saved market \(ValueError",
        ),
    ):
        write_arrays(path, arrays, texts | changed)
        with pytest.raises(ValueError, match=message):
            Market.load(path)
    write_arrays(path, arrays, {})
    with pytest.raises(ValueError, match=r"market is not a saved market, expected schema 2$"):
        Market.load(path)
    del arrays["gap"]
    write_arrays(path, arrays, texts)
    with pytest.raises(ValueError, match=r"market is not a saved market \(KeyError\('gap'\)\)$"):
        Market.load(path)
    with pytest.raises(FileNotFoundError):
        Market.load(tmp_path / "none")


def test_fingerprints_tell_games_apart():
    """Whatever a step reads changes it: quotes, sizes, locks, sessions; extra columns do not."""
    market = random_market(np.random.default_rng(4), 60)

    def with_column(name: str, column: np.ndarray) -> Market:
        return replace(market, bars=replace(market.bars, **{name: column}))

    prints = [market.fingerprint]
    for name in ("ts", "open", "volume", "bid", "ask", "bid_size", "ask_size"):
        changed = getattr(market.bars, name).copy()
        changed[7] += 1
        changed[np.isnan(changed)] = 0
        prints.append(with_column(name, changed).fingerprint)
    prints.append(with_column("ask_size", None).fingerprint)
    for name in ("features", "session", "after_break", "session_last", "fraction_left", "roll", "gap", "lock",
                 "decision", "volatility", "instrument"):  # fmt: skip
        changed = getattr(market, name).copy()
        changed[7] = ~changed[7] if changed.dtype == bool else changed[7] + 1
        prints.append(replace(market, **{name: changed}).fingerprint)
    assert len(set(prints)) == len(prints)
    assert replace(market, bars=replace(market.bars, extra={})).fingerprint == market.fingerprint


def test_volatility_is_a_root_mean_square_with_falling_weights():
    """Span 100, so a change weighs 99/101 of the one after it: closes 0, 3, 3 give √(9·99/101 / (1 + 99/101))."""
    market = make_market(make_bars([(c,) * 4 for c in (4000.0, 4003.0, 4003.0, 4003.25)], bid=[1.0] * 4))
    w = 99 / 101
    expected = [0.25, 3.0, np.sqrt(9 * w / (1 + w)), np.sqrt((9 * w**2 + 0.0625) / (1 + w + w**2))]
    np.testing.assert_allclose(market.volatility, expected, rtol=1e-14)
    closes = 4000 + np.cumsum(np.random.default_rng(0).integers(-8, 9, 5_000)) * 0.25
    frame = pd.Series(np.diff(closes) ** 2)
    market = make_market(make_bars([(c,) * 4 for c in closes]))
    np.testing.assert_allclose(market.volatility[1:], np.sqrt(frame.ewm(span=100).mean()), rtol=1e-12)


def test_bars_of_a_chain_are_joined():
    """The front bars of each contract; a column that one of them lacks is NaN there, and its own arrays stay as is."""
    a = make_bars([(4000.0,) * 4] * 3, bid=[3999.0, 3999.25, 3999.5])
    b = make_bars([(4010.0,) * 4] * 4, start=MORNING + 10 * MINUTES)
    b = replace(b, extra={"x": np.arange(4.0)})
    c = make_bars([(4020.0,) * 4] * 2, start=MORNING + 30 * MINUTES)
    given = [Segment("A", a, 0, 0.0), Segment("B", b, 1, 10.0), Segment("C", c, 0, np.nan)]
    market = make_market(given)
    assert len(given) == 3
    assert market.bars.close.tolist() == [4000.0] * 3 + [4010.0] * 3 + [4020.0] * 2
    assert market.bars.start.dtype == market.bars.ts.dtype == np.int64
    assert (np.diff(market.ts) == 5 * MINUTES).all()
    np.testing.assert_array_equal(market.bars.bid, [3999.0, 3999.25, 3999.5] + [np.nan] * 5)
    np.testing.assert_array_equal(market.bars.extra["x"], [np.nan] * 3 + [1.0, 2.0, 3.0] + [np.nan] * 2)
    assert market.bars.ask is None
    assert market.instrument.tolist() == [0] * 3 + [1] * 3 + [2] * 2
    assert (market.roll.tolist(), market.gap[3]) == ([0, 0, 0, 1, 0, 0, 2, 0], 10.0)
    # A feature that is warm after two bars of a contract: bars 2, then 4 and 5 (B has one bar before it is the front).
    slow = Feature("slow", ODD, 2, lambda x: np.arange(1.0, len(x.bars) + 1))
    market = make_market(given, features=[slow])
    assert market.features[:, 0].tolist() == [0, 0, 3, 0, 3, 4]  # C is never warm, and left out
    assert market.decision.tolist() == [False, False, True, False, True, True]
    assert market.roll.tolist() == [0, 0, 0, 2, 0, 0]
    assert market.quality["warmup_bars"] == 3
    with pytest.raises(ValueError, match=r"^8 bars are too few: the features need 3 bars to warm up, so at least 5 of"):
        make_market(given, features=[replace(slow, warmup=3)])


def test_segments_handed_over_are_let_go():
    """Each contract's bars can be freed before the next one is used."""
    alive: list[weakref.ref] = []
    seen = []

    def count(x) -> np.ndarray:
        seen.append(sum(ref() is not None for ref in alive))
        return np.zeros(len(x.bars))

    segments = []
    for k in range(3):
        bars = make_bars([(4000.0,) * 4] * 3, start=MORNING + 15 * k * MINUTES)
        alive.append(weakref.ref(bars.close))
        segments.append(Segment(f"C{k}", bars, 0, 0.0))
    del bars
    handed_over = (segments.pop(0) for _ in range(3))
    build_market(handed_over, "ES", 5 * MINUTES, features=[Feature("count", ODD, 0, count)])
    assert seen == [3, 2, 1]


def volume_market(rng: np.random.Generator, bars: int = 900) -> Market:
    """Bars of 100 contracts: as long as they take, several at one instant, none over a session break."""
    wait = np.where(rng.random(bars) < 0.2, 0, rng.integers(1, 400 * 1_000_000_000, bars))
    ts = MORNING + np.cumsum(wait)
    for day in range(3):  # sessions end at 16:00, and the next open an hour later
        ts = np.where(ts >= MORNING + (7 + 24 * day) * 60 * MINUTES, ts + 61 * MINUTES, ts)
    start = np.concatenate([ts[:1], ts[:-1]])
    start = np.where(np.diff(ts, prepend=ts[0]) > 60 * MINUTES, ts - MINUTES // 2, start)
    close = 4000 + 0.25 * np.cumsum(rng.integers(-3, 4, bars))
    open_ = np.concatenate([close[:1], close[:-1]])
    made = Bars(start, ts, open_, np.maximum(open_, close), np.minimum(open_, close), close, np.full(bars, 100.0))
    return build_market([Segment("ESH24", made, 0, 0.0)], "ES", 0, provenance={"bars": "vol:100"})


def test_volume_bars_play(tmp_path):
    market = volume_market(np.random.default_rng(1))
    assert market.interval_ns == 0
    assert "900 bars of vol:100, 2024-03-05 to 2024-03-" in repr(market)
    assert (np.diff(market.ts) == 0).sum() > 100
    assert (np.diff(market.ts) >= 0).all()
    # A bar after the daily close follows a break, and the one before it ends its session.
    later = np.flatnonzero(np.diff(market.ts) > 60 * MINUTES) + 1
    assert len(later) >= 2
    np.testing.assert_array_equal(np.flatnonzero(market.after_break), [0, *later])
    np.testing.assert_array_equal(np.flatnonzero(market.session_last), later - 1)
    env = FoxES(market, episode_bars=0, min_hold_bars=1, margin=False)
    first = int(np.flatnonzero(market.decision)[0])
    _, info = env.reset(seed=0, options={"start": first})
    path = [info["ts"]]
    rng, done = np.random.default_rng(2), False
    pnl, equity = 0.0, 200_000.0
    while not done:
        observation, _, _, done, info = env.step(rng.integers(0, 3, 4))
        assert observation in env.observation_space
        path.append(info["ts"])
        pnl += info["pnl_points"]
        equity = info["equity_usd"]
    np.testing.assert_array_equal(path, market.ts[first:])
    assert equity == pytest.approx(200_000 + 50 * pnl, abs=1e-6)
    train, valid, test = market.split(0.4, 0.3)
    assert [p.session[0] for p in (valid, test)] > [p.session[-1] for p in (train, valid)]
    report = evaluate("long", test, seed=0).to_dict()
    assert report["provenance"]["interval_s"] is None
    market.save(tmp_path / "market")
    assert repr(Market.load(tmp_path / "market")) == repr(market)
    many = FoxESVectorEnv(3, train, episode_bars=20)
    many.reset(seed=0)
    assert many.step([[2, 2, 0, 1]] * 3)[4]["ts"].shape == (3,)


def test_frames_of_bars():
    index = pd.date_range("2024-03-05 15:00", periods=200, freq="5min", tz="UTC")
    frame = pd.DataFrame(4000.0, index, ["open", "high", "low", "close"])
    assert len(Market.from_bars(frame, interval="5m", features=[ZERO])) == 200
    assert len(Market.from_bars(frame, interval="1m", features=[ZERO])) == 200  # minutes may be missing
    with pytest.raises(ValueError, match=r"^frame\.index has bars 300 s apart, expected at least 1h as interval says$"):
        Market.from_bars(frame, interval="1h", features=[ZERO])
    for column in ("volume", "note"):
        with pytest.raises(ValueError, match=f"^frame column '{column}' is of type .*, expected numbers$"):
            Market.from_bars(frame.assign(**{column: "few"}), interval="5m", features=[ZERO])


def test_windows_end_at_the_contract():
    market = random_market(np.random.default_rng(6))
    env = FoxES(market, window=4, episode_bars=0)
    roll = int(np.flatnonzero(market.roll == dynamics.UNMEASURED)[0])
    start = roll + 3  # the contract's second warm bar
    observation, _ = env.reset(seed=0, options={"start": start})
    rows = observation[:16].reshape(4, 4)
    np.testing.assert_array_equal(rows, market.observed[[roll + 2, roll + 2, roll + 2, roll + 3]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_contracts": 0}, "max_contracts is 0"),
        ({"max_contracts": 2.5}, "max_contracts is 2.5"),
        ({"min_hold_bars": -1}, "min_hold_bars is -1"),
        ({"fill_rule": "best"}, "fill_rule is 'best'"),
        ({"mirror_prob": 1.5}, "mirror_prob is 1.5"),
        ({"spread_ticks": math.nan}, "spread_ticks is nan"),
        ({"initial_equity_usd": 0.0}, "initial_equity_usd is 0.0"),
        ({"commission_usd_per_side": -1.0}, "commission_usd_per_side is -1.0"),
        ({"commission_usd_per_side": 1.0, "commission_bps_round_trip": 0.18}, "exclude each other"),
        ({"shaping": {"luck": 1.0}}, "shaping luck"),
        ({"episode_bars": 500}, "the market has 9 bars"),
        ({"depth_contracts": 0}, "depth_contracts is 0"),
        ({"depth_contracts": True}, "depth_contracts is True"),
        ({"depth_contracts": 2.0}, "depth_contracts is 2.0"),
        ({"flat_at_close": "no"}, "flat_at_close is 'no', expected True or False"),
        ({"margin": 1}, "margin is 1, expected True or False"),
        ({"spread_ticks": "1"}, "spread_ticks is '1', expected zero or a positive number"),
        ({"spread_ticks": True}, "spread_ticks is True"),
        ({"initial_equity_usd": True}, "initial_equity_usd is True"),
        ({"mirror_prob": "0.5"}, "mirror_prob is '0.5'"),
        ({"commission_usd_per_side": "x"}, "commission_usd_per_side is 'x'"),
        ({"commission_bps_round_trip": True}, "commission_bps_round_trip is True"),
        ({"shaping": {"micro": "1"}}, "shaping micro='1'"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        FoxES(make_market(make_bars([(4000.0,) * 4] * 9)), **{"episode_bars": 2, **settings})


def test_numpys_numbers_are_numbers():
    market = make_market(make_bars([(4000.0,) * 4] * 9))
    game = {"depth_contracts": np.int64(3), "spread_ticks": np.float32(2), "margin": np.bool_(False)}
    rules = FoxES(market, episode_bars=2, **game).rules
    assert (rules.depth, type(rules.depth), rules.margin) == (3, int, 0)


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_maintenance_margins_are_checked(rate):
    with pytest.raises(ValueError, match=f"contract X: maintenance_usd of 2020-01-01 is {rate}"):
        Contract("X", 0.25, 50.0, 2.25, 500.0, (("2012-01-01", 1_000.0), ("2020-01-01", rate)))


def test_unknown_settings_and_markets_are_refused():
    with pytest.raises(TypeError, match="unknown setting 'leverage'"):
        FoxES(make_market(make_bars([(4000.0,) * 4] * 9)), leverage=2)
    with pytest.raises(TypeError, match="market is 3"):
        FoxES(3)


@pytest.mark.parametrize(
    "action",
    [
        [0, 0, 0, 3], [-1, 0, 0, 0], [0.5, 0, 0, 0], [0, 0, 0], 5, [[0, 0, 0, 0]], [np.nan, 0, 0, 0], ["a"] * 4,
        [np.inf, 0, 0, 0], [0, 0, 0, -1e30], [True] * 4,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_bad_actions_are_refused(action):
    env = FoxES(make_market(make_bars([(4000.0,) * 4] * 9)), episode_bars=2)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="action"):
        env.step(action)


@pytest.mark.parametrize("action", [81, -1, np.int64(81), 1.5, np.inf, 1e30, True, np.bool_(True), [3], "3", None])
@pytest.mark.filterwarnings("error")
def test_bad_indices_are_refused(action):
    env = FoxESDiscrete(make_market(make_bars([(4000.0,) * 4] * 9)), episode_bars=2)
    env.reset(seed=0)
    with pytest.raises(ValueError, match="action"):
        env.step(action)


def test_an_index_names_its_branches():
    env = FoxESDiscrete(make_market(make_bars([(4000.0,) * 4] * 9)), episode_bars=2)
    for index in range(81):
        branches = [index // 27, index // 9 % 3, index // 3 % 3, index % 3]
        for action in (index, np.int64(index), np.uint8(index), np.array(index), float(index)):
            assert env._branches(action) == branches


def test_stepping_after_the_end_is_refused():
    env = FoxES(make_market(make_bars([(4000.0,) * 4] * 9)), episode_bars=1)
    with pytest.raises(RuntimeError, match="reset"):
        env.step([0, 0, 0, 0])
    env.reset(seed=0)
    env.step([0, 0, 0, 0])
    with pytest.raises(RuntimeError, match="reset"):
        env.step([0, 0, 0, 0])


def test_two_resets_with_one_seed_are_one_game():
    market = random_market(np.random.default_rng(7))
    env = FoxES(market, episode_bars=30, mirror_prob=0.5)
    actions = np.random.default_rng(8).integers(0, 3, (1_000, 4))

    def rollout():
        seen = [env.reset(seed=11)[0]]
        for action in actions:
            observation, reward, end, cut, _ = env.step(action)
            seen.append(np.append(observation, reward))
            if end or cut:
                seen.append(env.reset()[0])
        return np.concatenate(seen)

    np.testing.assert_array_equal(rollout(), rollout())


def test_returned_observations_are_not_overwritten():
    market = random_market(np.random.default_rng(9))
    env = FoxES(market, episode_bars=30)
    first, _ = env.reset(seed=0)
    kept = first.copy()
    second = env.step([2, 2, 0, 1])[0]
    env.step([0, 2, 0, 1])
    np.testing.assert_array_equal(first, kept)
    vector = FoxESVectorEnv(2, market, episode_bars=30)
    first, _ = vector.reset(seed=0)
    kept = first.copy()
    second = vector.step([[2, 2, 0, 1]] * 2)
    saved = [np.copy(x) for x in second[:4]]
    vector.step([[0, 2, 0, 1]] * 2)
    np.testing.assert_array_equal(first, kept)
    for array, kept in zip(second[:4], saved, strict=True):
        np.testing.assert_array_equal(array, kept)


def test_split_normalizes_on_the_training_part_only():
    market = random_market(np.random.default_rng(10), 3_000)
    train, valid, test = market.split(0.5, 0.25)
    assert len(train) + len(valid) + len(test) == len(market)
    assert train.normalizer is valid.normalizer is test.normalizer
    assert train.normalizer.last_ts == train.ts[-1] < valid.ts[0]
    for before, after in ((train, valid), (valid, test)):
        assert before.session[-1] != after.session[0]
    changed = replace(
        market, features=np.concatenate([market.features[: len(train)], market.features[len(train) :] * 7])
    )
    np.testing.assert_array_equal(changed.split(0.5, 0.25)[0].normalizer.scale, train.normalizer.scale)
    day = np.datetime64(0, "D") + int(valid.session[0])
    end = np.datetime64(0, "D") + int(test.session[0])
    by_date = market.split(train_end=str(day), valid_end=str(end))
    assert [len(p) for p in by_date] == [len(train), len(valid), len(test)]
    assert train.fingerprint != market.slice(0, len(train)).fingerprint  # which is seen without a normalizer
    for name in ("center", "scale"):
        other = replace(train.normalizer, **{name: getattr(train.normalizer, name) + 1})
        assert replace(train, normalizer=other).fingerprint != train.fingerprint
    with pytest.raises(ValueError, match="train_end is 20230101, expected a date such as 2020-01-31"):
        market.split(train_end=20230101, valid_end=20230102)
    with pytest.raises(ValueError, match="train_end is 'soon'"):
        market.split(train_end="soon", valid_end="later")
    with pytest.raises(ValueError, match="leaves a part empty"):
        market.split(train_end="1999-01-01", valid_end="2000-01-01")
    with pytest.raises(ValueError, match="sum under 1"):
        market.split(0.9, 0.2)
