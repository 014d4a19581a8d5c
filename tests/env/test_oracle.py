"""The oracle against hand-worked bars, brute force, and the game as it is played.

`independent_step` below is the design's fill table written down a second time, for a market without quotes, on purpose:
the oracle runs `dynamics.step_one`, and both must say the same.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from dataclasses import replace
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fox_env import actions, dynamics, oracle
from fox_env.data.synthetic import PLANTED_STATE, Truth, synthetic_bars, synthetic_market
from fox_env.dynamics import Rules
from fox_env.oracle import (
    OraclePolicy,
    SimpleRule,
    best_simple_rule,
    expected_step,
    follow_the_state,
    lattice_law,
    simple_rule_gain,
    solve,
    update_belief,
)

TICK = 0.25
RULES = Rules(
    max_contracts=4,
    tick=TICK,
    multiplier=50.0,
    commission_points=2.25 / 50,
    commission_rate=0.0,
    min_hold=10,
    free_age=20,
    touch=0,
    depth=0,
    flat_at_close=0,
    margin=0,
    intraday_usd=500.0,
    initial_equity_usd=200_000.0,
)


def rules_with(**changes):
    """`RULES` with other values; the age that is free follows from the hold."""
    hold = changes.get("min_hold", RULES.min_hold)
    return RULES._replace(**changes, free_age=2 * max(1, hold))


PLANTED = synthetic_bars("planted", 10).truth
NOISY = synthetic_bars("planted_noisy", 10).truth
MARTINGALE = synthetic_bars("martingale", 10).truth


def tiny_truth(drifts, transition, steps):
    return Truth("planted", np.zeros(0, np.int8), np.array(transition), drifts, (-1.0, 1.0), 0.0, steps, TICK)


def paths(steps, drift):
    """Every path of a bar: probability, low, high, close relative to the open, in points."""
    up = 0.5 * (1 + drift / (steps * TICK))
    for moves in itertools.product((1, -1), repeat=steps):
        at = [0, *itertools.accumulate(moves)]
        ups = moves.count(1)
        yield up**ups * (1 - up) ** (steps - ups), min(at) * TICK, max(at) * TICK, at[-1] * TICK


def independent_step(quantity, order, urgency, bar, rules, spread_ticks, after_break):
    """(contracts filled, net points of the fill) of one order by the design's table; open = last close = 0."""
    low, high, close = bar
    if quantity < 0:  # a sell is the reflection
        filled, net = independent_step(
            -quantity, order, urgency, (-high, -low, -close), rules, spread_ticks, after_break
        )
        return -filled, net
    if quantity == 0:
        return 0, 0.0
    bid, ask, h = -spread_ticks * TICK / 2, spread_ticks * TICK / 2, spread_ticks * TICK / 2
    slip = [((k - 1) // rules.depth if rules.depth else 0) * TICK for k in range(1, quantity + 1)]
    limit = math.inf
    price, reference = 0.0 + h, 0.0
    fills = []  # (price, reference) of each contract
    if order == actions.MARKET:
        if urgency == 0:
            reference = (0.0 + high + low + close) / 4
            price = reference + h
        elif urgency == 2 and not after_break:
            price = ask + TICK
        fills = [(price + s, reference) for s in slip]
    elif order == actions.LIMIT:
        limit = math.floor(bid / TICK) * TICK + (urgency - 1) * TICK
        if (limit >= ask or after_break) and price <= limit:
            fills = [(price + s, reference) for s in slip if price + s <= limit]
        if len(fills) < quantity and low <= limit - (0.0 if rules.touch else TICK):
            fills += [(limit, limit)] * (quantity - len(fills))
    else:
        limit = ask + urgency * TICK
        fills = [(price + s, reference) for s in slip if price + s <= limit]
    gross = sum(close - reference for _, reference in fills)
    cost = sum(rules.commission_points + price - reference for price, reference in fills)
    return len(fills), gross - cost


# ---------------------------------------------------------------------------------------------- the law of a bar


@pytest.mark.parametrize("steps", range(1, 9))
@pytest.mark.parametrize("drift", [-0.1, 0.0, 0.2])
def test_lattice_law_is_that_of_all_paths(steps, drift):
    expected = defaultdict(float)
    for p, low, high, close in paths(steps, drift):
        expected[low, high, close] += p
    law = lattice_law(drift, steps, TICK)
    got = dict(zip(zip(law.low, law.high, law.close, strict=True), law.probability, strict=True))
    assert got.keys() == expected.keys()
    for key, p in expected.items():
        assert got[key] == pytest.approx(p, abs=1e-15)


@pytest.mark.parametrize("depth", range(1, 17))
def test_reflection_principle_gives_the_law_of_the_low(depth):
    # P(min ≤ −a) = P(S ≤ −a) + P(S < −a) for the symmetric walk of 16 steps.
    count = {2 * ups - 16: comb(16, ups) for ups in range(17)}
    expected = sum(n * ((s <= -depth) + (s < -depth)) for s, n in count.items()) / 2**16
    law = lattice_law(0.0, 16, TICK)
    assert law.probability[law.low <= -depth * TICK].sum() == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize("drift", [-0.15, 0.0, 0.15])
def test_moments_of_a_planted_bar(drift):
    law = lattice_law(drift, 16, TICK)
    assert law.probability.sum() == pytest.approx(1.0, abs=1e-14)
    assert law.probability @ law.close == pytest.approx(drift, abs=1e-14)
    # 16 steps of ¼ with mean drift/16 each: 16·(1/16 − (drift/16)²) = 1 − drift²/16.
    assert law.probability @ (law.close - drift) ** 2 == pytest.approx(1 - drift**2 / 16, abs=1e-13)
    mirror = lattice_law(-drift, 16, TICK)
    assert law.probability @ law.mean == pytest.approx(-(mirror.probability @ mirror.mean), abs=1e-14)


def test_unreachable_drift_is_refused():
    with pytest.raises(ValueError, match=r"drift is 0.6 points a bar, but 2 steps of 0.25 points reach 0.5"):
        lattice_law(0.6, 2, TICK)


# ------------------------------------------------------------------------------- one bar of two steps, worked by hand


@pytest.mark.parametrize(
    ("order", "touch", "expected"),
    [
        # Spread one tick, so bid = C − .125 and h = .125; a contract and side costs .045. Paths UU UD DU DD, ¼ each,
        # closes +.5 0 0 −.5, lows 0 0 −.25 −.5.
        ((0, 1), 0, 0.0 - 0.125 - 0.045),
        # Patient: means (0 + .5 + 0 + .5)/4 = .25, (.25)/4 = .0625, −.0625, −.25; Σ(close − mean) = 0.
        ((0, 0), 0, 0.0 - 0.125 - 0.045),
        # Aggressive pays ask + 1 tick = .375 over the close.
        ((0, 2), 0, -0.375 - 0.045),
        # Limit Normal: L = ⌊−.125⌋ = −.25. Through needs low ≤ −.5: DD, ¼, at −.25 with close −.5.
        ((1, 1), 0, 0.25 * (-0.25 - 0.045)),
        # Touch needs low ≤ −.25: DU earns 0 + .25, DD −.5 + .25; they cancel, ½ pays commission.
        ((1, 1), 1, 0.5 * -0.045),
        # Limit Patient: L = −.5, never traded through, touched by DD, which closes there.
        ((1, 0), 0, 0.0),
        ((1, 0), 1, 0.25 * -0.045),
        # Limit Aggressive: L = 0 rests under the ask. Through: DU earns 0, DD −.5.
        ((1, 2), 0, 0.25 * -0.5 + 0.5 * -0.045),
        ((1, 2), 1, -0.045),
        # IOC: open + h = ask, so it fills at any cap.
        ((2, 0), 0, -0.125 - 0.045),
        ((2, 2), 0, -0.125 - 0.045),
    ],
)
def test_expected_step_of_a_martingale_bar_by_hand(order, touch, expected):
    truth = tiny_truth((0.0, 0.0), [[0.5, 0.5], [0.5, 0.5]], 2)
    step = expected_step(truth, rules_with(max_contracts=1, touch=touch))
    # From flat to long one, and to short one, which is the reflection.
    assert step(0, 0, [2, 2, *order], True) == pytest.approx(expected, abs=1e-15)
    assert step(0, 0, [0, 2, *order], True) == pytest.approx(expected, abs=1e-15)


def test_expected_step_adds_the_position_and_sees_the_lock_and_the_break():
    step = expected_step(PLANTED, RULES)
    long_full, state = [2, 2, 0, 1], np.array([0, 1, 2])
    # Locked: 2 contracts earn 2·drift and the order is not sent.
    np.testing.assert_allclose(step(state, 2, long_full, False), 2 * np.array([-0.15, 0, 0.15]), atol=1e-15)
    # Free: 2 more contracts earn the drift and pay 2·(.125 + .045).
    expected = 4 * np.array([-0.15, 0, 0.15]) - 2 * 0.17
    np.testing.assert_allclose(step(state, 2, long_full, True), expected, atol=1e-12)
    # Market Aggressive acts as Normal after a break.
    aggressive = np.array([[2, 2, 0, 2]] * 3)
    np.testing.assert_allclose(step(state, 2, aggressive, True, np.ones(3, bool)), expected, atol=1e-12)
    np.testing.assert_allclose(step(state, 2, aggressive, True), expected - 2 * 0.25, atol=1e-12)


def test_depth_walks_the_book_and_ioc_stops_at_its_cap():
    step = expected_step(MARTINGALE, rules_with(depth=2))
    # −4 to 4: eight contracts, two a level, pay 0 0 1 1 2 2 3 3 = 12 ticks.
    assert step(1, -4, [2, 2, 0, 1], True) == pytest.approx(-8 * 0.17 - 12 * TICK, abs=1e-12)
    # An IOC takes two contracts a tick of cap: 2, 4 and 6 of the eight, for 0, 2 and 6 ticks.
    for urgency, contracts, ticks in ((0, 2, 0), (1, 4, 2), (2, 6, 6)):
        assert step(1, -4, [2, 2, 2, urgency], True) == pytest.approx(-contracts * 0.17 - ticks * TICK, abs=1e-12)


@settings(max_examples=25, deadline=None)
@given(
    steps=st.integers(1, 5),
    tilt=st.floats(-0.9, 0.9),
    spread=st.integers(0, 4),
    depth=st.integers(0, 3),
    touch=st.integers(0, 1),
    most=st.integers(1, 5),
    broken=st.booleans(),
)
def test_expected_step_is_that_of_the_design_table(steps, tilt, spread, depth, touch, most, broken):
    drift = tilt * steps * TICK
    truth = tiny_truth((drift, 0.0), [[0.5, 0.5], [0.5, 0.5]], steps)
    rules = rules_with(max_contracts=most, depth=depth, touch=touch, min_hold=0)
    step = expected_step(truth, rules, spread)
    for action in actions.decode(np.arange(actions.NUM_ACTIONS)).tolist():
        target = actions.target_position(action[0], action[1], most)
        for position in (-most, 0, max(1, most - 1)):
            expected = position * drift + sum(
                p * independent_step(target - position, *action[2:], bar, rules, spread, broken)[1]
                for p, *bar in paths(steps, drift)
            )
            got = step(0, position, action, True, broken)
            assert got == pytest.approx(expected, abs=1e-12)


# --------------------------------------------------------------------------------------------------- the best policy


def test_default_oracle_earns_what_the_design_says():
    best = solve(PLANTED, RULES)
    assert best.gain_points_per_bar == pytest.approx(0.206554, abs=1e-6)
    follow = follow_the_state(PLANTED, RULES)
    assert follow.gain_points_per_bar == pytest.approx(0.140020, abs=1e-6)
    assert follow.gain_points_per_bar / best.gain_points_per_bar == pytest.approx(0.6779, abs=1e-4)


def test_default_policy_is_full_with_the_drift_and_waits_in_state_zero():
    best = solve(PLANTED, RULES)
    for position in range(-4, 5):
        assert best.act(0, position).tolist() == [0, 2, 0, 1]
        assert best.act(2, position).tolist() == [2, 2, 0, 1]
    reachable = np.array([-4, -2, -1, 0, 1, 2, 4])
    waiting = best.act(np.ones(7, int), reachable)
    targets = actions.target_positions(4)[3 * waiting[:, 0] + waiting[:, 1]]
    np.testing.assert_array_equal(targets, reachable)


def test_moves_to_neighbours_only_are_another_game():
    neighbours = replace(PLANTED, transition=np.array([[0.85, 0.15, 0], [0.075, 0.85, 0.075], [0, 0.15, 0.85]]))
    assert solve(neighbours, RULES).gain_points_per_bar == pytest.approx(0.227417, abs=1e-6)


@pytest.mark.parametrize("touch", [0, 1])
def test_martingale_is_not_worth_playing(touch):
    best = solve(MARTINGALE, rules_with(touch=touch))
    assert best.gain_points_per_bar == pytest.approx(0.0, abs=1e-9)
    assert actions.target_positions(4)[best.action[:, 4] // 9].tolist() == [0, 0, 0]
    # Following a state that means nothing stays flat.
    assert follow_the_state(MARTINGALE, RULES).gain_points_per_bar == pytest.approx(0.0, abs=1e-9)


def test_gain_without_costs_or_lock_is_the_mean_size_of_the_drift():
    free = rules_with(commission_points=0.0, min_hold=0)
    assert solve(PLANTED, free, spread_ticks=0.0).gain_points_per_bar == pytest.approx(4 * 0.15 * 2 / 3, abs=1e-8)


@pytest.mark.parametrize(
    ("drift", "touch", "entry"),
    [
        (0.16, 0, [actions.LONG, actions.FULL, actions.MARKET, actions.NORMAL]),
        (0.10, 1, [actions.LONG, actions.FULL, actions.LIMIT, actions.AGGRESSIVE]),
        (0.02, 0, [actions.FLAT, actions.FULL, actions.MARKET, actions.NORMAL]),
    ],
)
def test_solve_finds_what_exhaustive_search_finds(drift, touch, entry):
    """Two states, two steps a bar, one contract, a hold of two bars: all 19³ symmetric policies, each to its limit."""
    rules = rules_with(max_contracts=1, min_hold=2, touch=touch)
    truth = tiny_truth((-drift, drift), [[0.8, 0.2], [0.2, 0.8]], 2)
    targets, kinds = (-1, 0, 1), [(order, urgency) for order in range(3) for urgency in range(3)]

    def options(position):
        moves = [(target, *kind) for target in targets if target != position for kind in kinds]
        return [(position, 0, 1), *moves]

    def node(state, position, locked):
        return (state * 3 + position + 1) * 2 + locked

    rows = {}  # (state, position, option) -> law of the next node, and net points
    for state, position in itertools.product(range(2), targets):
        for number, (target, order, urgency) in enumerate(options(position)):
            law, net = np.zeros(12), 0.0
            for p, *bar in paths(2, truth.drifts[state]):
                filled, earned = independent_step(target - position, order, urgency, bar, rules, 1, False)
                net += p * (position * bar[2] + earned)
                for following in range(2):
                    law[node(following, position + filled, filled != 0)] += p * truth.transition[state, following]
            rows[state, position, number] = law, net
    policies = np.array(list(itertools.product(range(19), repeat=3)))
    step, reward = np.zeros((len(policies), 12, 12)), np.zeros((len(policies), 12))
    # An option's mirror image: the same order to the negated target.
    flipped = {
        (position, number): options(-position).index((-target, order, urgency))
        for position in targets
        for number, (target, order, urgency) in enumerate(options(position))
    }
    for state, (column, position) in itertools.product(range(2), enumerate(targets)):
        for number in range(19):
            if state == 1:
                chosen, where = policies[:, column] == number, (state, position, number)
            else:
                chosen, where = policies[:, 2 - column] == number, (state, position, flipped[-position, number])
            step[chosen, node(state, position, 0)], reward[chosen, node(state, position, 0)] = rows[where]
        # Locked at age 1: nothing is sent, and at age 2 the account is free.
        for following in range(2):
            step[:, node(state, position, 1), node(following, position, 0)] = truth.transition[state, following]
        reward[:, node(state, position, 1)] = position * truth.drifts[state]
    limit = 0.5 * (step + np.eye(12))
    for _ in range(30):
        limit = limit @ limit
    gains = np.einsum("pij,pj->pi", limit, reward)[:, node(1, 0, 0)]
    best = solve(truth, rules)
    assert best.gain_points_per_bar == pytest.approx(gains.max(), abs=1e-8)
    assert best.act(1, 0).tolist() == entry


def test_unsupported_games_are_refused():
    with pytest.raises(ValueError, match="commission_rate is 9e-06, expected 0"):
        solve(PLANTED, rules_with(commission_points=0.0, commission_rate=9e-6))
    with pytest.raises(ValueError, match="flat_at_close is on"):
        expected_step(PLANTED, rules_with(flat_at_close=1))
    with pytest.raises(ValueError, match="3 states read through noise, expected 2"):
        solve(replace(PLANTED, noise=1.0), RULES)


def test_a_chain_that_never_settles_is_said_so(monkeypatch):
    monkeypatch.setattr(oracle, "_MAX_SWEEPS", 200)
    with pytest.raises(RuntimeError, match="not settled after 200 sweeps"):
        solve(tiny_truth((-0.1, 0.1), [[0.0, 1.0], [1.0, 0.0]], 2), RULES)


# ------------------------------------------------------------------------------------------------ beliefs and rules


def test_belief_by_hand():
    # From ½ the chain leaves ½, and a signal of 1 has odds exp(2): 1/(1 + e^−2).
    assert update_belief(np.array(0.5), np.array(1.0), NOISY) == pytest.approx(1 / (1 + math.exp(-2)))
    # Certain of state −1, then no news: the chance of one move.
    assert update_belief(np.array(0.0), np.array(0.0), NOISY) == pytest.approx(1 / 60)


def test_belief_is_calibrated():
    made = synthetic_bars("planted_noisy", 60_000, seed=7)
    belief, seen = np.array(0.5), []
    for signal in made.bars.extra[PLANTED_STATE]:
        belief = update_belief(belief, signal, made.truth)
        seen.append(float(belief))
    seen, state = np.array(seen), made.truth.state
    for low in np.arange(0, 1, 0.1):
        rows = (seen >= low) & (seen < low + 0.1)
        # Errors are shared within a regime; ten bars of it count as one.
        assert abs(state[rows].mean() - seen[rows].mean()) < 4 * np.sqrt(0.25 / (rows.sum() / 10))


def test_with_little_noise_the_belief_oracle_knows_the_state():
    game = rules_with(depth=2)
    exact = solve(replace(NOISY, noise=0.0), game).gain_points_per_bar
    assert solve(replace(NOISY, noise=0.2), game).gain_points_per_bar == pytest.approx(exact, abs=1e-4)
    noisy = solve(NOISY, game).gain_points_per_bar
    assert noisy == pytest.approx(0.14031, abs=1e-4)
    assert noisy < exact < 4 * 0.05


def test_simple_rule_of_the_exact_state_is_the_oracle():
    market = synthetic_market("planted", 6_000, seed=11)
    first = int(np.flatnonzero(market.decision)[0])
    truth = market.truth.take(slice(first, -1))
    rule = best_simple_rule(truth, truth.state - 1.0, RULES, spans=(1, 20), thresholds=(0.5,))
    assert rule.span == 1
    assert rule.gain_points_per_bar == pytest.approx(simple_rule_gain(truth, truth.state - 1.0, RULES, 1, 0.5))
    played = play(market, OraclePolicy(solve(market.truth, RULES), market))
    assert played["expected"].mean() == pytest.approx(rule.gain_points_per_bar, abs=1e-12)


def test_simple_rule_by_hand():
    # Span 3 is weight ½: averages .5 .75 −.125 −.5625 −.78125 against a threshold of .6.
    market = synthetic_market("planted", 500)
    policy = SimpleRule(3, 0.6, math.nan).policy(market, 4)
    obs = np.zeros((1, len(market.feature_names) + dynamics.POSITION_FIELDS), np.float32)
    sides = []
    for signal in (1, 1, -1, -1, -1):
        obs[0, market.feature_names.index(PLANTED_STATE)] = signal
        action = policy(obs)[0]
        sides.append(int(action[0]) - 1)
        assert action[1:].tolist() == [actions.FULL, actions.MARKET, actions.NORMAL]
        obs[0, -dynamics.POSITION_FIELDS] = sides[-1]
    assert sides == [0, 1, 1, 1, -1]


def test_simple_rule_plays_as_it_was_scored():
    market = normalized(synthetic_market("planted_noisy", 4_000, seed=12))
    first = int(np.flatnonzero(market.decision)[0])
    truth, signal = market.truth.take(slice(first, -1)), market.bars.extra[PLANTED_STATE][first:-1]
    rules = rules_with(depth=2)
    rule = best_simple_rule(truth, signal, rules, spans=(5, 12), thresholds=(0.2, 0.5))
    policy = rule.policy(market, 4)
    for _ in range(2):
        played = play(market, policy, rules)
        # float32 observations may tip a moving average over its threshold, but hardly ever.
        assert played["expected"].mean() == pytest.approx(rule.gain_points_per_bar, abs=1e-3)
        policy.reset()
    assert rule.gain_points_per_bar > 0.05


# --------------------------------------------------------------------------------------------------- the real game


def normalized(market):
    return replace(market, normalizer=market.split(0.6, 0.2)[0].normalizer)


def play(market, policy, rules=RULES):
    """Play a market by `step_one` from the first decision bar on: expected and realized net points, order or −1."""
    tape, step = market.tape(1.0), expected_step(market.truth, rules)
    start = int(np.flatnonzero(market.decision)[0])
    position, age = 0, rules.free_age
    net = basis = peak = 0.0
    columns = defaultdict(list)
    for t in range(start, len(market) - 1):
        fields = dynamics.position_fields(tape[t], position, age, net, basis, peak, 0.5, 0, rules)
        obs = np.concatenate([market.observed[t], fields]).astype(np.float32)[None]
        action = np.asarray(policy(obs))[0].tolist()
        can_trade = age >= rules.min_hold
        wanted = actions.target_position(action[0], action[1], rules.max_contracts) != position
        columns["expected"].append((market.truth.state[t], position, action, can_trade, market.after_break[t + 1]))
        columns["order"].append(3 * action[2] + action[3] if can_trade and wanted else -1)
        after = dynamics.Step(*dynamics.step_one(tape[t], tape[t + 1], position, age, net, basis, *action, 0, rules))
        columns["net"].append(after.gross - after.cost)
        position, age, net, basis = after.position, after.age, after.net, after.basis
        peak = max(peak, net)
    states = (np.array(column) for column in zip(*columns["expected"], strict=True))
    return {"expected": step(*states), "net": np.array(columns["net"]), "order": np.array(columns["order"])}


@pytest.mark.parametrize(("kind", "depth", "touch"), [("planted", 0, 0), ("planted", 2, 1), ("planted_noisy", 2, 0)])
def test_a_random_policy_earns_what_expected_step_says(kind, depth, touch):
    market = synthetic_market(kind, 30_000, seed=13, features=[PLANTED_STATE])
    draws = np.random.default_rng(0).integers(0, 3, (30_000, 4)).tolist()
    rules = rules_with(min_hold=1, depth=depth, touch=touch)
    played = play(market, lambda obs: [draws.pop()], rules)
    luck = played["net"] - played["expected"]
    # Given what is known at close t each difference has mean 0, so squares add up.
    assert abs(luck.sum()) < 4 * np.sqrt((luck**2).sum())
    for order in range(-1, 9):
        mine = luck[played["order"] == order]
        assert len(mine) > 500
        assert abs(mine.sum()) < 4 * np.sqrt((mine**2).sum())


def test_the_oracle_plays_to_its_gain_and_follow_the_state_to_its_own():
    market = normalized(synthetic_market("planted", 20_000, seed=14))
    for policy in (solve(market.truth, RULES), follow_the_state(market.truth, RULES)):
        played = play(market, OraclePolicy(policy, market))
        blocks = played["expected"][: len(played["expected"]) // 200 * 200].reshape(-1, 200).mean(axis=1)
        error = blocks.std(ddof=1) / np.sqrt(len(blocks))
        assert abs(played["expected"].mean() - policy.gain_points_per_bar) < 4 * error
        assert error < 0.01


def test_the_belief_oracle_filters_from_observations():
    market = normalized(synthetic_market("planted_noisy", 6_000, seed=15))
    rules = rules_with(depth=2)
    best = solve(market.truth, rules)
    policy = OraclePolicy(best, market)
    first = play(market, policy, rules)
    policy.reset()
    second = play(market, policy, rules)
    np.testing.assert_array_equal(first["net"], second["net"])
    assert first["expected"].mean() == pytest.approx(best.gain_points_per_bar, abs=0.03)


def test_policies_read_the_newest_bar_of_a_window():
    market = synthetic_market("planted", 500, seed=16)
    policy = OraclePolicy(solve(market.truth, RULES), market)
    column = market.feature_names.index(PLANTED_STATE)
    width = len(market.feature_names)
    obs = np.zeros((3, 2 * width + dynamics.POSITION_FIELDS), np.float32)
    obs[:, column] = (1, 1, -1)  # a bar older
    obs[:, width + column] = (-1, 0, 1)
    obs[:, 2 * width] = (0.5, 0.25, -1.0)
    np.testing.assert_array_equal(policy(obs)[:, :2], [[0, 2], [2, 0], [2, 2]])


def test_policies_need_a_synthetic_market_with_the_state():
    best = solve(PLANTED, RULES)
    with pytest.raises(ValueError, match="no truth"):
        OraclePolicy(best, synthetic_market("garch", 500))
    with pytest.raises(ValueError, match="no feature 'planted_state'"):
        OraclePolicy(best, synthetic_market("planted", 500, drop=[PLANTED_STATE]))
