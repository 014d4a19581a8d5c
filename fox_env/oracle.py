"""The exact best policy of a lattice market, and what any step on one is expected to earn.

A lattice bar (`fox_env.data.synthetic`) has few outcomes, so expectations are finite sums: `dynamics.step_one` itself
is run on every outcome of a bar, for every order, and there is no second copy of the fill table. The best policy comes
from relative value iteration on the average-reward Markov decision process over (what is known of the state) ×
(position) × (age); see Puterman, *Markov Decision Processes*, 1994, section 8.5. Margin and session ends are left out:
margin calls are rare, and Market Aggressive, the only order that a session break changes here, is never best.

Where the state is read through noise, what is known is the filter's belief, on a grid. The filter reads the feature and
not the returns, which would tell it 0.25 % as much again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from fox_env import actions, dynamics
from fox_env.data.synthetic import PLANTED_STATE, Truth
from fox_env.dynamics import Rules

if TYPE_CHECKING:
    from fox_env.market import Market

ORDERS = 9  # 3·order type + urgency
BELIEF_POINTS = 201

# Equal orders are told apart by this: the plainest first.
_PLAINEST = (1, 0, 7, 8, 6, 4, 3, 5, 2)
_CLOSE = 4_000.0  # any price will do; the law of a bar is relative to its open
_QUADRATURE_POINTS = 801
_QUADRATURE_REACH = 8.0
_MAX_SWEEPS = 100_000
_TIE = 1e-9


@dataclass(frozen=True)
class LatticeLaw:
    """The law of one bar relative to its open: M outcomes, float64 [M] each, prices in points."""

    low: np.ndarray
    high: np.ndarray
    close: np.ndarray
    probability: np.ndarray

    @property
    def mean(self) -> np.ndarray:
        """Mean of open, high, low and close."""
        return 0.25 * (self.low + self.high + self.close)


def lattice_law(drift: float, steps: int, tick: float) -> LatticeLaw:
    """The exact joint law of low, high and close of a path of `steps` steps of ±`tick`, tilted to `drift` points.

    Raises:
        ValueError: a drift that no tilt reaches.
    """
    up = 0.5 * (1.0 + drift / (steps * tick))
    if not 0.0 <= up <= 1.0:
        raise ValueError(f"drift is {drift} points a bar, but {steps} steps of {tick} points reach {steps * tick}")
    outcomes, paths = _count_paths(steps)
    low, high, close = (outcomes.T * tick).astype(np.float64)
    ups = (steps + outcomes[:, 2]) // 2
    return LatticeLaw(low, high, close, paths * up**ups * (1.0 - up) ** (steps - ups))


@lru_cache
def _count_paths(steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Distinct (low, high, close) in ticks, int64 [M, 3], and how many of the 2^steps paths end so, float64 [M]."""
    paths = Counter({(0, 0, 0): 1})
    for _ in range(steps):
        longer: Counter[tuple[int, int, int]] = Counter()
        for (low, high, close), count in paths.items():
            for at in (close - 1, close + 1):
                longer[min(low, at), max(high, at), at] += count
        paths = longer
    return np.array(list(paths), np.int64), np.array(list(paths.values()), np.float64)


@dataclass(frozen=True)
class _Fills:
    """What orders do in one bar, with Q = 2·max_contracts and q signed contracts at row q + Q.

    `probability` and `net` are float64 [9, 2Q+1, S, Q+1] by order, q, state and contracts filled: the probability of
    that fill, and the expected net points of the filled contracts on it (not divided by the probability).
    """

    probability: np.ndarray
    net: np.ndarray


@lru_cache(maxsize=32)
def _fills(
    drifts: tuple[float, ...], steps: int, tick: float, rules: Rules, spread_ticks: float, after_break: bool
) -> _Fills:
    """Run `step_one` on every outcome of a bar for every order and size that the game can send."""
    rules = rules._replace(margin=0, flat_at_close=0)
    most = 2 * rules.max_contracts
    laws = [lattice_law(drift, steps, tick) for drift in drifts]
    chance = np.stack([law.probability for law in laws])
    law = laws[0]  # the outcomes are those of any drift
    half = 0.5 * spread_ticks * rules.tick
    bar = [0.0] * dynamics.TAPE_COLUMNS
    bar[dynamics.CLOSE], bar[dynamics.BID], bar[dynamics.ASK] = _CLOSE, _CLOSE - half, _CLOSE + half
    bar[dynamics.BID_SIZE] = bar[dynamics.ASK_SIZE] = np.nan
    after = []
    for low, high, close in zip(law.low, law.high, law.close, strict=True):
        nxt = [0.0] * dynamics.TAPE_COLUMNS
        nxt[dynamics.OPEN], nxt[dynamics.HIGH], nxt[dynamics.LOW] = _CLOSE, _CLOSE + float(high), _CLOSE + float(low)
        nxt[dynamics.CLOSE], nxt[dynamics.AFTER_BREAK] = _CLOSE + float(close), float(after_break)
        after.append(nxt)
    shape = (ORDERS, 2 * most + 1, len(drifts), most + 1)
    probability, net = np.zeros(shape), np.zeros(shape)
    probability[:, most, :, 0] = 1.0
    for quantity, (position, direction, magnitude) in _ways_to_send(rules.max_contracts).items():
        for order in range(ORDERS):
            filled = np.empty(len(after), np.int64)
            earned = np.empty(len(after))
            for i, nxt in enumerate(after):
                step = dynamics.Step(*dynamics.step_one(
                    bar, nxt, position, rules.min_hold, 0.0, position * _CLOSE, direction, magnitude, order // 3,
                    order % 3, 0, rules,
                ))  # fmt: skip
                filled[i] = abs(step.filled)
                earned[i] = step.gross - step.cost - position * (nxt[dynamics.CLOSE] - _CLOSE)
            for state, weight in enumerate(chance):
                probability[order, quantity + most, state] = np.bincount(filled, weight, most + 1)
                net[order, quantity + most, state] = np.bincount(filled, weight * earned, most + 1)
    return _Fills(probability, net)


def _ways_to_send(max_contracts: int) -> dict[int, tuple[int, int, int]]:
    """For each signed quantity that can be sent: a position, direction and magnitude that send it."""
    ways = {}
    for exposure, target in enumerate(actions.target_positions(max_contracts).tolist()):
        for position in range(-max_contracts, max_contracts + 1):
            if target != position:
                ways[target - position] = (position, exposure // 3, exposure % 3)
    return ways


def _fills_of(truth: Truth, rules: Rules, spread_ticks: float, after_break: bool = False) -> _Fills:
    if rules.commission_rate:
        raise ValueError(f"commission_rate is {rules.commission_rate}, expected 0: the oracle knows no price level")
    if rules.flat_at_close:
        raise ValueError("flat_at_close is on, expected off: the oracle knows no session ends")
    return _fills(truth.drifts, truth.steps, truth.tick, rules, float(spread_ticks), after_break)


@dataclass(frozen=True)
class ExpectedStep:
    """Expected net points of a step on a lattice market, adverse selection included.

    Args:
        drifts: points a bar in each state, float64 [S].
        net: expected net points of an order's fills, float64 [2, 9, 2Q+1, S]: whether the bar follows a break, order,
            signed contracts + Q, state; Q = 2·max_contracts.
        targets: target position of the nine exposures 3·direction + magnitude.
    """

    drifts: np.ndarray
    net: np.ndarray
    targets: np.ndarray

    def __call__(
        self,
        state: np.ndarray,
        position: np.ndarray,
        action: np.ndarray,
        can_trade: np.ndarray,
        after_break: np.ndarray | bool = False,
    ) -> np.ndarray:
        """Expected net points, float64 [T], of steps from close t.

        Args:
            state: integers [T], `Truth.state` at close t.
            position: integers [T], contracts at close t.
            action: integers [T, 4], branches.
            can_trade: bool [T], whether an order could be sent at close t.
            after_break: bool [T], whether bar t+1 follows a session break or a halt.
        """
        action = np.asarray(action)
        wanted = self.targets[3 * action[..., 0] + action[..., 1]] - position
        sent = np.where(can_trade, wanted, 0)
        order = 3 * action[..., 2] + action[..., 3]
        row = sent + self.net.shape[2] // 2
        return position * self.drifts[state] + self.net[np.asarray(after_break, np.int64), order, row, state]


def expected_step(truth: Truth, rules: Rules, spread_ticks: float = 1.0) -> ExpectedStep:
    """The table of expected net points of `truth`'s bars under `rules`.

    Raises:
        ValueError: a commission in basis points, or `flat_at_close`.
    """
    net = [_fills_of(truth, rules, spread_ticks, broken).net.sum(axis=-1) for broken in (False, True)]
    return ExpectedStep(np.array(truth.drifts), np.stack(net), actions.target_positions(rules.max_contracts))


@dataclass(frozen=True)
class _Information:
    """What can be known of the state: G points.

    `belief` float64 [G, S] is the probability of each state; `move` float64 [S, G, G] the law of the next point, given
    the state that holds now.
    """

    belief: np.ndarray
    move: np.ndarray


def _information(truth: Truth) -> _Information:
    states = len(truth.drifts)
    if not truth.noise:
        return _Information(np.eye(states), np.repeat(truth.transition[:, None, :], states, axis=1))
    if states != 2:
        raise ValueError(f"the truth has {states} states read through noise, expected 2")
    grid = np.linspace(0.0, 1.0, BELIEF_POINTS)
    noise = np.linspace(-_QUADRATURE_REACH, _QUADRATURE_REACH, _QUADRATURE_POINTS)
    weight = np.exp(-0.5 * noise**2)
    weight /= weight.sum()
    seen = np.zeros((states, BELIEF_POINTS, BELIEF_POINTS))  # by the next state: the law of the next belief
    row = np.repeat(np.arange(BELIEF_POINTS), len(noise))
    for state, level in enumerate(truth.levels):
        after = update_belief(grid[:, None], (level + truth.noise * noise)[None, :], truth) * (BELIEF_POINTS - 1)
        left = np.minimum(after.astype(np.int64), BELIEF_POINTS - 2)
        share = after - left
        for column, part in ((left, 1.0 - share), (left + 1, share)):
            cell = row * BELIEF_POINTS + column.ravel()
            seen[state] += np.bincount(cell, (part * weight).ravel(), BELIEF_POINTS**2).reshape(seen[state].shape)
    return _Information(np.stack([1.0 - grid, grid], axis=1), np.tensordot(truth.transition, seen, axes=1))


def update_belief(belief: np.ndarray, signal: np.ndarray, truth: Truth) -> np.ndarray:
    """Probability of the second of two states after one more bar, whose signal is level + N(0, noise²): Bayes' rule."""
    low, high = truth.levels
    prior = truth.transition[0, 1] + belief * (truth.transition[1, 1] - truth.transition[0, 1])
    log_ratio = (high - low) * (signal - 0.5 * (low + high)) / truth.noise**2
    return prior / (prior + (1.0 - prior) * np.exp(-log_ratio))


@dataclass(frozen=True)
class TabularPolicy:
    """A stationary policy of a lattice market.

    Args:
        gain_points_per_bar: what it earns in the long run, net points a bar.
        action: int64 [G, 2·max_contracts + 1], index of the action in [0, 81) by information point and position +
            max_contracts, for accounts that may trade.
        belief: float64 [G, S], probability of each state at the information points.
    """

    gain_points_per_bar: float
    action: np.ndarray
    belief: np.ndarray

    def act(self, point: np.ndarray, position: np.ndarray) -> np.ndarray:
        """Branches [..., 4] at the information points and positions."""
        return actions.decode(self.action[point, np.asarray(position) + self.action.shape[1] // 2])

    def point_of(self, belief: np.ndarray) -> np.ndarray:
        """The nearest information point of a belief in the last state."""
        return np.abs(np.asarray(belief)[..., None] - self.belief[:, -1]).argmin(axis=-1)


def solve(truth: Truth, rules: Rules, spread_ticks: float = 1.0, tolerance: float = 1e-9) -> TabularPolicy:
    """The best policy over all 81 actions, and its gain to within `tolerance` points a bar.

    Raises:
        ValueError: a commission in basis points, `flat_at_close`, or more than two states read through noise.
        RuntimeError: value iteration does not settle.
    """
    return _iterate(truth, rules, spread_ticks, tolerance, None)


def follow_the_state(truth: Truth, rules: Rules, spread_ticks: float = 1.0, tolerance: float = 1e-9) -> TabularPolicy:
    """Full size in the direction of the likelier drift, flat where it is 0, by Market Normal orders; and its gain."""
    drift = _information(truth).belief @ np.array(truth.drifts)
    action = actions.encode(_full(np.where(np.abs(drift) < _TIE, 0.0, np.sign(drift))))
    table = np.repeat(action[:, None], 2 * rules.max_contracts + 1, axis=1)
    return _iterate(truth, rules, spread_ticks, tolerance, table)


def _iterate(
    truth: Truth, rules: Rules, spread_ticks: float, tolerance: float, fixed: np.ndarray | None
) -> TabularPolicy:
    """Relative value iteration, over all actions or along the policy `fixed` (int64 [G, P])."""
    information, fills = _information(truth), _fills_of(truth, rules, spread_ticks)
    belief, move = information.belief, information.move
    drifts, limit = np.array(truth.drifts), rules.max_contracts
    hold = max(1, rules.min_hold)  # an account is of age 1 when it has traded
    position = np.arange(-limit, limit + 1)
    points, places, states = len(belief), len(position), len(drifts)
    choice = _choices(limit)  # [P, C]
    expected_move = np.einsum("gs,sgh->gh", belief, move)
    drift = belief @ drifts

    # Every (position, choice) as a column: `flow` sends the values after it, [unchanged | traded] × state, into it.
    branch = actions.decode(choice)
    quantity = actions.target_positions(limit)[3 * branch[..., 0] + branch[..., 1]] - position[:, None]
    order, row = 3 * branch[..., 2] + branch[..., 3], quantity + 2 * limit
    columns = choice.size
    flow = np.zeros((states, 2, places, columns))
    column = np.arange(columns)
    place = np.repeat(np.arange(places), choice.shape[1])
    for filled in range(2 * limit + 1):
        reached = place + np.sign(quantity).ravel() * filled
        chance = fills.probability[order, row][..., filled].reshape(columns, states)
        used = np.flatnonzero(chance.any(axis=1))
        flow[:, int(filled > 0), reached[used], column[used]] = chance[used].T
    flow = flow.reshape(states * 2 * places, columns)
    earned = belief @ fills.net[order, row].sum(axis=-1).reshape(columns, states).T + drift[:, None] * position[place]

    if fixed is not None:
        column_of = (choice[None] == fixed[:, :, None]).argmax(axis=2) + choice.shape[1] * np.arange(places)
    value = np.zeros((hold, points, places))  # ages 1 … hold; the last may trade
    carry = drift[:, None] * position
    for _ in range(_MAX_SWEEPS):
        swept = np.empty_like(value)
        locked = value[1:].transpose(1, 0, 2).reshape(points, -1)
        swept[:-1] = carry + (expected_move @ locked).reshape(points, hold - 1, places).transpose(1, 0, 2)
        later = np.concatenate([value[-1], value[0]], axis=1)
        weighted = belief[:, :, None] * np.einsum("sgh,hp->gsp", move, later)
        worth = earned + weighted.reshape(points, -1) @ flow
        if fixed is None:
            swept[-1] = worth.reshape(points, places, -1).max(axis=2)
        else:
            swept[-1] = np.take_along_axis(worth, column_of, axis=1)
        change = swept - value
        value = swept - swept[-1, 0, limit]
        if np.ptp(change) < tolerance:
            break
    else:
        raise RuntimeError(f"value iteration has not settled after {_MAX_SWEEPS} sweeps")
    gain = 0.5 * float(change.min() + change.max())
    if fixed is not None:
        return TabularPolicy(gain, fixed, belief)
    worth = worth.reshape(points, places, -1)
    best = (worth >= worth.max(axis=2, keepdims=True) - _TIE).argmax(axis=2)
    return TabularPolicy(gain, choice[np.arange(places), best], belief)


def _choices(max_contracts: int) -> np.ndarray:
    """Actions worth telling apart at each position, int64 [P, C]: first those that send nothing, then the plainest."""
    exposure: dict[int, int] = {}
    for index, target in enumerate(actions.target_positions(max_contracts).tolist()):
        # The last of equals, so that Flat and a one-contract position are Full.
        exposure[target] = index
    rank = {order: i for i, order in enumerate(_PLAINEST)}
    rows = []
    for position in range(-max_contracts, max_contracts + 1):
        ways = [(target, order) for target in exposure for order in range(ORDERS)]
        ways.sort(key=lambda way: (way[0] != position, rank[way[1]], abs(way[0] - position)))
        rows.append([9 * exposure[target] + order for target, order in ways])
    return np.array(rows, np.int64)


class _StateReader:
    """Reads ``planted_state`` and the position from observations, float32 [N, window·F + 6]."""

    def __init__(self, market: Market, max_contracts: int) -> None:
        if market.truth is None:
            raise ValueError("the market has no truth, expected a synthetic one")
        if PLANTED_STATE not in market.feature_names:
            raise ValueError(f"the market has no feature {PLANTED_STATE!r}, which tells the state")
        column = market.feature_names.index(PLANTED_STATE)
        # Counted from the end, where the newest bar's features and the position fields are.
        self._column = column - len(market.feature_names) - dynamics.POSITION_FIELDS
        self._scale = 1.0 if market.normalizer is None else float(market.normalizer.scale[column])
        self._max_contracts = max_contracts

    def signal(self, obs: np.ndarray) -> np.ndarray:
        return np.asarray(obs)[:, self._column].astype(np.float64) * self._scale

    def position(self, obs: np.ndarray) -> np.ndarray:
        exposure = np.asarray(obs)[:, -dynamics.POSITION_FIELDS].astype(np.float64)
        return np.rint(exposure * self._max_contracts).astype(np.int64)


class OraclePolicy:
    """A `TabularPolicy` as a policy on observations: ``obs[N, D] -> actions[N, 4]``.

    Where the state is read through noise it filters, and remembers each row's belief from call to call: it must see
    every bar of an episode once, and `reset` starts it afresh.

    Raises:
        ValueError: a market that is not synthetic, or lacks the feature ``planted_state``.
    """

    def __init__(self, policy: TabularPolicy, market: Market) -> None:
        self._policy, self._truth = policy, market.truth
        self._reader = _StateReader(market, policy.action.shape[1] // 2)
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self._belief = np.array([0.5])

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        signal = self._reader.signal(obs)
        if self._truth.noise:
            self._belief = update_belief(self._belief, signal, self._truth)
            point = self._policy.point_of(self._belief)
        else:
            point = np.abs(signal[:, None] - np.array(self._truth.levels)).argmin(axis=1)
        return self._policy.act(point, self._reader.position(obs))


@dataclass(frozen=True)
class SimpleRule:
    """Full size in the direction of the signal's exponential moving average where that is beyond a threshold.

    Between the thresholds the position is kept. Orders are Market Normal.

    Args:
        span: bars of the moving average, of weight 2 / (span + 1).
        threshold: in the signal's unit.
        gain_points_per_bar: expected net points a bar on the bars that it was chosen on.
    """

    span: int
    threshold: float
    gain_points_per_bar: float

    def policy(self, market: Market, max_contracts: int) -> SimpleRulePolicy:
        """The rule as a policy on observations."""
        return SimpleRulePolicy(self, market, max_contracts)


class SimpleRulePolicy:
    """A `SimpleRule` as a policy on observations; it remembers the moving averages until `reset`.

    Raises:
        ValueError: a market that is not synthetic, or lacks the feature ``planted_state``.
    """

    def __init__(self, rule: SimpleRule, market: Market, max_contracts: int) -> None:
        self._rule, self._reader = rule, _StateReader(market, max_contracts)
        self.reset()

    def reset(self) -> None:
        """Forget what was seen."""
        self._average = np.array([0.0])

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        self._average = _average(self._average, self._reader.signal(obs), self._rule.span)
        side = _side(self._average, self._rule.threshold, np.sign(self._reader.position(obs)))
        return _full(side)


def simple_rule_gain(
    truth: Truth, signal: np.ndarray, rules: Rules, span: int, threshold: float, spread_ticks: float = 1.0
) -> float:
    """Expected net points a bar of the rule on the bars of `truth`, `signal` (float64 [T]) being ``planted_state``."""
    return float(_simple_gains(truth, signal, rules, np.array([span]), np.array([threshold]), spread_ticks)[0])


def best_simple_rule(
    truth: Truth,
    signal: np.ndarray,
    rules: Rules,
    spread_ticks: float = 1.0,
    spans: tuple[int, ...] = (1, 2, 3, 5, 8, 12, 20, 30, 50),
    thresholds: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8),
) -> SimpleRule:
    """The rule of that grid with the largest expected gain on the bars of `truth`, the training part.

    Args:
        truth: T bars.
        signal: float64 [T], the feature ``planted_state`` as it is, not normalized.
        rules, spread_ticks: of the game.
        spans, thresholds: the grid.
    """
    span, threshold = (grid.ravel() for grid in np.meshgrid(spans, thresholds, indexing="ij"))
    gains = _simple_gains(truth, signal, rules, span, threshold, spread_ticks)
    best = int(gains.argmax())
    return SimpleRule(int(span[best]), float(threshold[best]), float(gains[best]))


def _simple_gains(
    truth: Truth, signal: np.ndarray, rules: Rules, span: np.ndarray, threshold: np.ndarray, spread_ticks: float
) -> np.ndarray:
    """Expected net points a bar of R rules, float64 [R]. Market orders always fill, so positions need no prices."""
    average, side = np.zeros(len(span)), np.zeros(len(span))
    age = np.full(len(span), rules.min_hold)
    held, wanted, free = ([] for _ in range(3))
    for value in np.asarray(signal, np.float64):
        average = _average(average, value, span)
        target = _side(average, threshold, side)
        may_trade = age >= rules.min_hold
        held.append(side)
        wanted.append(target)
        free.append(may_trade)
        moved = may_trade & (target != side)
        side = np.where(moved, target, side)
        age = np.where(moved, 1, age + 1)
    position = rules.max_contracts * np.stack(held).astype(np.int64)
    step = expected_step(truth, rules, spread_ticks)
    earned = step(truth.state[:, None], position, _full(np.stack(wanted)), np.stack(free))
    return earned.mean(axis=0)


def _average(average: np.ndarray, signal: np.ndarray, span: np.ndarray | int) -> np.ndarray:
    return average + (signal - average) * 2.0 / (span + 1.0)


def _side(average: np.ndarray, threshold: np.ndarray | float, side: np.ndarray) -> np.ndarray:
    return np.where(average > threshold, 1, np.where(average < -threshold, -1, side))


def _full(side: np.ndarray) -> np.ndarray:
    """Market Normal orders to full size on that side, flat for 0; int64 [..., 4]."""
    direction = np.asarray(side).astype(np.int64) + 1
    rest = (np.full_like(direction, level) for level in (actions.FULL, actions.MARKET, actions.NORMAL))
    return np.stack([direction, *rest], axis=-1)
