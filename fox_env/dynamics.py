"""The rule of the game: fills, costs, holding, rolls, margin. Nothing else moves a position or charges a cost.

`step_one` is the specification. It is plain Python with if and else, in the subset that numba accepts, so that one text
serves a single environment as Python, batches on the CPU through numba and batches on the GPU through numba-cuda
(`fox_env.engine`). Prices are index points, positions signed whole contracts, money float64.

Timing of a step from bar t to bar t+1::

    close t ── observe ── decide ──►  bar t+1: roll, order, mark at its close, session-end flatten, margin  ──► reward
"""

from __future__ import annotations

import math
from typing import NamedTuple

from fox_env.actions import target_position
from fox_env.rewards import base_reward, shaping_terms

# Columns of the tape: float64 [T, 16], one row of 128 bytes a bar.
OPEN, HIGH, LOW, CLOSE = 0, 1, 2, 3
BID, ASK = 4, 5  # quotes at the close, always usable: the market's, or close ∓ spread/2
BID_SIZE, ASK_SIZE = 6, 7  # displayed contracts at the close, NaN where unknown
AFTER_BREAK = 8  # 1: the bar follows a session break or a halt
SESSION_LAST = 9  # 1: the last bar of its session
ROLL = 10  # NO_ROLL, MEASURED or UNMEASURED: how the bar's contract took over from the previous bar's
GAP = 11  # g in points, where MEASURED
LOCK = 12  # +1 locked limit up (no buys fill), −1 locked limit down, 0 neither
MAINTENANCE = 13  # overnight maintenance margin, dollars a contract
VOLATILITY = 14  # EWMA(100) root mean square of close changes about zero, points, at least one tick
AHEAD = 15  # points to the close `hindsight_lookahead` bars later; 0 unless that shaping term is on
TAPE_COLUMNS = 16
NO_ROLL, MEASURED, UNMEASURED = 0, 1, 2

# Rows of the batch's state: `count` int32 [COUNT_ROWS, N] and `money` float64 [3, N].
BAR, POSITION, AGE, STEPS, STOP, MIRRORED, DONE, EPISODE, SHORTS, FLATS, LONGS = range(11)
COUNT_ROWS = 11
MONEY_ROWS, POINTS_ROWS, FLAGS_ROWS = 3, 5, 7
NET, BASIS, PEAK = 0, 1, 2

# Rows of what a batch step reports: `points` float64 [5, N], `flags` int32 [7, N].
PNL, GROSS, COST, FILL_PRICE, EQUITY = 0, 1, 2, 3, 4
FILLED, FORCED, ROLLED, CAN_TRADE, END, OBSERVED, HELD = 0, 1, 2, 3, 4, 5, 6

# Why an episode ended; the first terminates, the others truncate.
END_REASONS = (None, "margin_call", "episode_bars", "end_of_data")
RUNNING, MARGIN_CALL, EPISODE_BARS, END_OF_DATA = 0, 1, 2, 3

NEXT_STEP, SAME_STEP, DISABLED = 0, 1, 2  # autoreset modes, as Gymnasium defines them
POSITION_FIELDS = 6


class Rules(NamedTuple):
    """The game's constants, as `step_one` reads them.

    max_contracts: largest position. tick, multiplier: the contract's. commission_points, commission_rate: a side costs
    commission_points + commission_rate · close. min_hold: bars before the next order. free_age: age of an account that
    may trade at once, where ages stop counting: 2 max(1, min_hold). touch: 1 lets a resting limit fill when touched.
    depth: contracts a level where no size is known, 0 for unlimited. flat_at_close: 1 closes positions at each
    session's last bar. margin: 0 turns the margin test off. intraday_usd: margin a contract inside a session.
    initial_equity_usd: equity at reset.
    """

    max_contracts: int
    tick: float
    multiplier: float
    commission_points: float
    commission_rate: float
    min_hold: int
    free_age: int
    touch: int
    depth: int
    flat_at_close: int
    margin: int
    intraday_usd: float
    initial_equity_usd: float


class Step(NamedTuple):
    """Names for what `step_one` returns: ``Step(*step_one(...))``.

    position: contracts after the step. age: bars since the last change, `Rules.free_age` at most. net: points
    earned since reset. basis: Σ contracts × price of the open position. gross, cost: points of this step. filled:
    signed contracts of the agent's order. fill_price: their average, NaN if none. forced: signed contracts closed by
    the rules. rolled: contracts carried into a new contract. margin_call: 1 if equity fell short.
    """

    position: int
    age: int
    net: float
    basis: float
    gross: float
    cost: float
    filled: int
    fill_price: float
    forced: int
    rolled: int
    margin_call: int


def walk_ticks(contracts: int, depth: int) -> int:
    """Ticks that `contracts` pay together for walking a book of `depth` a level, Σ_k ⌊(k−1)/depth⌋; 0 is endless."""
    if depth <= 0:
        return 0
    levels = contracts // depth
    return depth * (levels * (levels - 1) // 2) + levels * (contracts - levels * depth)


def step_one(bar, nxt, position, age, net, basis, direction, magnitude, order, urgency, closing, rules):
    """One step of one account from the close of `bar` to the close of `nxt`.

    Args:
        bar, nxt: rows of the tape (float64 [16]) of bar t and bar t+1.
        position: signed contracts at close t.
        age: bars since the position last changed.
        net: points earned since reset, costs deducted.
        basis: Σ contracts × price of the open position.
        direction, magnitude, order, urgency: the action, in the original market's terms.
        closing: 1 if the position is to be closed at the close of bar t+1, as `flat_at_close` does.
        rules: `Rules`.

    Returns:
        The fields of `Step`, as a plain tuple, which costs a single environment less.
    """
    tick = rules.tick
    eps = 1e-6 * tick  # prices of a decimal tick are not exact in binary
    true_close = bar[CLOSE]
    half = 0.5 * (bar[ASK] - bar[BID])
    commission = rules.commission_points + rules.commission_rate * true_close
    mark = nxt[CLOSE]
    last = nxt[SESSION_LAST] != 0.0
    flatten = closing != 0 or (rules.flat_at_close != 0 and last)
    may_trade = age >= rules.min_hold and not flatten
    gross = 0.0
    cost = 0.0
    filled = 0
    fill_price = math.nan
    forced = 0
    rolled = 0
    shift = 0.0

    # Roll. A price gap between contracts is never profit and loss.
    if nxt[ROLL] == UNMEASURED:
        if position != 0:
            forced = -position
            cost += abs(position) * (half + commission)
            position = 0
            basis = 0.0
        age = rules.free_age
        may_trade = False
    else:
        if nxt[ROLL] == MEASURED:
            shift = nxt[GAP]
            if position != 0:
                rolled = abs(position)
                cost += rolled * (2.0 * half + 2.0 * commission)
                basis += position * shift
        gross += position * (mark - true_close - shift)
        age = min(age + 1, rules.free_age)

    # The agent's order, in prices times its side: a sell is a buy in the reflected market.
    quantity = target_position(direction, magnitude, rules.max_contracts) - position
    if may_trade and quantity != 0:
        side = 1 if quantity > 0 else -1
        wanted = abs(quantity)
        if side > 0:
            near, far, size, low = bar[BID], bar[ASK], bar[ASK_SIZE], nxt[LOW]
        else:
            near, far, size, low = -bar[ASK], -bar[BID], bar[BID_SIZE], -nxt[HIGH]
        near += side * shift
        far += side * shift
        close = side * (true_close + shift)
        opening = side * nxt[OPEN]
        after_break = nxt[AFTER_BREAK] != 0.0
        depth = rules.depth
        if not math.isnan(size):
            depth = max(1, int(size))

        taking = 0  # contracts that take liquidity, from `price` on, against the reference price `reference`
        resting = 0  # contracts that rest and fill at `limit`
        price = opening + half
        reference = opening
        limit = math.inf
        reached = False  # price came far enough to fill an order resting at `limit`
        if nxt[LOCK] * side > 0.0:
            pass  # nobody sells at limit up
        elif order == 0:
            taking = wanted
            if urgency == 0:
                reference = side * 0.25 * (nxt[OPEN] + nxt[HIGH] + nxt[LOW] + mark)
                price = reference + half
            elif urgency == 2 and not after_break:
                reference = close
                # Never better than the last trade, which a late quote may have left behind.
                price = max(far + tick, close)
        elif order == 1:
            limit = (math.floor(near / tick + 1e-6) + (urgency - 1)) * tick
            reached = low <= limit - (0.0 if rules.touch != 0 else tick) + eps
            if (after_break or limit >= far - eps) and price <= limit + eps:
                taking = wanted
            elif reached:
                resting = wanted
        else:
            limit = far + urgency * tick
            if price <= limit + eps:
                taking = wanted
                if not math.isnan(size):
                    taking = min(taking, int(size))

        # The k-th contract pays ⌊(k−1)/depth⌋ ticks more, but no order pays more than its limit.
        if taking > 0 and depth > 0 and limit < math.inf:
            within = depth * (math.floor((limit - price) / tick + 1e-6) + 1)
            if taking > within:
                if reached:
                    resting = taking - within
                taking = within
        count = taking + resting
        if count > 0:
            walked = walk_ticks(taking, depth) * tick
            filled = side * count
            cost += taking * (price - reference) + walked + count * commission
            # In side prices a bought contract earns side·mark − reference.
            if taking > 0:
                gross += taking * (side * mark - reference)
            if resting > 0:
                gross += resting * (side * mark - limit)
            paid = taking * price + walked
            if resting > 0:
                paid += resting * limit
            fill_price = side * paid / count
            after = position + filled
            if position * filled >= 0:
                basis += side * count * fill_price
            elif position * after > 0:
                basis *= after / position
            else:
                basis = after * fill_price
            position = after
            age = 1

    # Session-end flatten, then margin, both at the close of bar t+1.
    if flatten and position != 0:
        forced -= position
        cost += abs(position) * (half + commission)
        position = 0
        basis = 0.0
        age = rules.free_age
    margin_call = 0
    if rules.margin != 0:
        equity = rules.initial_equity_usd + rules.multiplier * (net + (gross - cost))
        required = nxt[MAINTENANCE] if last else rules.intraday_usd
        if equity < abs(position) * required:
            margin_call = 1
            if position != 0:
                forced -= position
                cost += abs(position) * (half + commission)
                position = 0
                basis = 0.0
                age = rules.free_age
    return (position, age, net + (gross - cost), basis, gross, cost, filled, fill_price, forced, rolled, margin_call)


def position_fields(row, position, age, net, basis, peak, fraction_left, mirrored, rules):
    """The observation's position fields, all bounded.

    Args:
        row: of the tape, the bar observed.

    Returns:
        exposure in [−1, 1] (negated in a mirrored episode); unrealized points over max_contracts × volatility, in
        [−10, 10]; age over min_hold, in [0, 2]; drawdown over initial equity, in [0, 10]; can-trade, 0 or 1; fraction
        of the session left, in [0, 1].
    """
    sign = -1.0 if mirrored != 0 else 1.0
    unrealized = (position * row[CLOSE] - basis) / (rules.max_contracts * row[VOLATILITY])
    drawdown = (peak - net) * rules.multiplier / rules.initial_equity_usd
    return (
        sign * position / rules.max_contracts,
        min(10.0, max(-10.0, unrealized)),
        2.0 * age / rules.free_age,
        min(10.0, max(0.0, drawdown)),
        1.0 if age >= rules.min_hold else 0.0,
        fraction_left,
    )


def philox(counter0, counter1, counter2, counter3, key0, key1):
    """Philox 4×32-10 (Salmon et al. 2011): four random 32-bit words, bit for bit alike on every device."""
    mask = 0xFFFFFFFF
    for _ in range(10):
        product0 = counter0 * 0xD2511F53
        product1 = counter2 * 0xCD9E8D57
        # Masking after the shift keeps the words right in wrapping 64-bit integers as in Python's own.
        high0 = (product0 >> 32) & mask
        high1 = (product1 >> 32) & mask
        counter0, counter2 = high1 ^ counter1 ^ key0, high0 ^ counter3 ^ key1
        counter1, counter3 = product1 & mask, product0 & mask
        key0 = (key0 + 0x9E3779B9) & mask
        key1 = (key1 + 0xBB67AE85) & mask
    return counter0, counter1, counter2, counter3


def draw_episode(seed, env, episode, num_starts, mirror_prob):
    """Draw of an episode, keyed by (seed, environment) and counted by the episode.

    Returns:
        ``(index of the start in [0, num_starts), mirrored 0 or 1)``.
    """
    mask = 0xFFFFFFFF
    words = philox(episode & mask, 0, (seed >> 32) & mask, 0, seed & mask, env & mask)
    mirrored = 1 if words[0] < mirror_prob * 4294967296.0 else 0
    return ((words[1] * num_starts) >> 32) & mask, mirrored


def read_row(tape, bar):
    """Row `bar` of the tape as 16 numbers; a view of the array would cost every thread an atomic reference count."""
    return (
        tape[bar, 0], tape[bar, 1], tape[bar, 2], tape[bar, 3], tape[bar, 4], tape[bar, 5], tape[bar, 6],
        tape[bar, 7], tape[bar, 8], tape[bar, 9], tape[bar, 10], tape[bar, 11], tape[bar, 12], tape[bar, 13],
        tape[bar, 14], tape[bar, 15],
    )  # fmt: skip


def reset_account(i, count, money, start, stop, mirrored, rules):
    """Put account `i` of the batch at bar `start`, flat and unlocked."""
    count[BAR, i] = start
    count[POSITION, i] = 0
    count[AGE, i] = rules.free_age
    count[STEPS, i] = 0
    count[STOP, i] = stop
    count[MIRRORED, i] = mirrored
    count[DONE, i] = 0
    count[SHORTS, i] = 0
    count[FLATS, i] = 0
    count[LONGS, i] = 0
    money[NET, i] = 0.0
    money[BASIS, i] = 0.0
    money[PEAK, i] = 0.0


def reset_random(i, count, money, keys, starts, bars, mirror_prob, rules):
    """Start account `i`'s next episode at a drawn bar."""
    index, mirrored = draw_episode(keys[0, i], keys[1, i], count[EPISODE, i], len(starts), mirror_prob)
    reset_account(i, count, money, starts[index], bars - 1, mirrored, rules)
    count[EPISODE, i] += 1


def window_row(bar, back, first):
    """Bar whose features an observation at `bar` shows `back` bars back: none before the contract's first."""
    return max(bar - back, first[bar]) if back > 0 else bar


def feature(table, mirror, row, j, mirrored):
    """Feature `j` of bar `row`; in a mirrored episode it is ``mirror[1, j] · table[row, mirror[0, j]]``."""
    return mirror[1, j] * table[row, int(mirror[0, j])] if mirrored != 0 else table[row, j]


def write_features(i, obs, table, first, mirror, count, window):
    """Write the features of the last `window` bars into row `i` of `obs` (float32 [N, window·F + 6])."""
    bar = count[BAR, i]
    mirrored = count[MIRRORED, i]
    features = table.shape[1]
    for w in range(window):
        row = window_row(bar, window - 1 - w, first)
        base = w * features
        for j in range(features):
            obs[i, base + j] = feature(table, mirror, row, j, mirrored)


def write_position(fields, seat, base, tape, fraction, bar, position, age, net, basis, peak, mirrored, rules):
    """Write the position fields of an account that stands at `bar` into ``fields[seat, base]`` and what follows."""
    exposure, unrealized, old, drawdown, can_trade, left = position_fields(
        read_row(tape, bar), position, age, net, basis, peak, fraction[bar], mirrored, rules
    )
    fields[seat, base] = exposure
    fields[seat, base + 1] = unrealized
    fields[seat, base + 2] = old
    fields[seat, base + 3] = drawdown
    fields[seat, base + 4] = can_trade
    fields[seat, base + 5] = left


def restart(
    i, fields, seat, base, mask, given, tape, fraction, land, starts, keys, count, money, mirror_prob, rules
):  # fmt: skip
    """Start account `i`'s next episode if it is masked, at bar ``given[i]`` where that is not negative.

    The position fields are written into `fields`, masked or not, see `write_position`.
    """
    if mask[i]:
        reset_random(i, count, money, keys, starts, len(land), mirror_prob, rules)
        if given[i] >= 0:
            count[BAR, i] = given[i]
    write_position(
        fields, seat, base, tape, fraction, count[BAR, i], count[POSITION, i], count[AGE, i], money[NET, i],
        money[BASIS, i], money[PEAK, i], count[MIRRORED, i], rules,
    )  # fmt: skip


def advance(
    i, fields, seat, base, tape, table, fraction, land, first, starts, mirror, keys, count, money, actions, final_obs,
    reward, terms, points, flags, window, episode_bars, mirror_prob, autoreset, close_at_stop, rules, shaping, shaped,
):  # fmt: skip
    """One step of account `i` of a batch: rule, reward, end of episode, autoreset, and of the observation the position
    fields, see `write_position`; `write_features` writes the features.

    Arrays are those of `fox_env.engine.Engine`. `episode_bars` 0 lets episodes run to their last bar; `close_at_stop` 1
    closes the position there, with its costs.
    """
    # Read once, written once: a thread on a GPU waits for memory, and cannot know that arrays do not overlap.
    bar = count[BAR, i]
    position = count[POSITION, i]
    age = count[AGE, i]
    mirrored = count[MIRRORED, i]
    net = money[NET, i]
    basis = money[BASIS, i]
    peak = money[PEAK, i]
    done = count[DONE, i]
    pnl = 0.0
    gross = 0.0
    cost = 0.0
    fill_price = math.nan
    filled = 0
    forced = 0
    rolled = 0
    value = 0.0
    end = RUNNING
    if shaped != 0:
        for j in range(4):
            terms[j, i] = 0.0
    fresh = 0  # the account starts an episode in this step
    if done != 0:
        # A finished episode pays nothing; the next one starts here or waits for the user.
        if autoreset == NEXT_STEP:
            fresh = 1
    else:
        landing = land[bar]
        steps = count[STEPS, i] + 1
        row = read_row(tape, bar)
        nxt = read_row(tape, bar + 1)
        direction = actions[i, 0]
        if mirrored != 0:
            direction = 2 - direction
        closing = 1 if close_at_stop != 0 and bar + 1 == count[STOP, i] else 0
        held, age, earned, basis, gross, cost, filled, fill_price, forced, rolled, margin_call = step_one(
            row, nxt, position, age, net, basis, direction, actions[i, 1], actions[i, 2], actions[i, 3], closing, rules
        )
        pnl = gross - cost
        value = base_reward(pnl, row[CLOSE], rules.max_contracts)
        highest = max(peak, earned)
        if shaped != 0:
            change = ((highest - earned) - (peak - net)) * rules.multiplier / rules.initial_equity_usd
            extra = shaping_terms(
                shaping, count[SHORTS, i], count[FLATS, i], count[LONGS, i], held, nxt[AHEAD], gross,
                row[VOLATILITY], row[CLOSE], rules.max_contracts, change,
            )  # fmt: skip
            for j in range(4):
                terms[j, i] = extra[j]
                value += extra[j]
            if held < 0:
                count[SHORTS, i] += 1
            elif held > 0:
                count[LONGS, i] += 1
            else:
                count[FLATS, i] += 1
        if margin_call != 0:
            end = MARGIN_CALL
        elif episode_bars != 0 and steps >= episode_bars:
            end = EPISODE_BARS
        elif landing >= count[STOP, i]:
            end = END_OF_DATA
        bar = landing
        position = held
        net = earned
        peak = highest
        count[BAR, i] = bar
        count[POSITION, i] = position
        count[AGE, i] = age
        count[STEPS, i] = steps
        money[NET, i] = net
        money[BASIS, i] = basis
        money[PEAK, i] = peak
        if end != RUNNING:
            done = 1
            count[DONE, i] = 1
            if autoreset == SAME_STEP:
                write_features(i, final_obs, table, first, mirror, count, window)
                write_position(
                    final_obs, i, window * table.shape[1], tape, fraction, bar, position, age, net, basis, peak,
                    mirrored, rules,
                )  # fmt: skip
    if fresh != 0:
        reset_random(i, count, money, keys, starts, len(land), mirror_prob, rules)
        bar = count[BAR, i]
        mirrored = count[MIRRORED, i]
        position = 0
        age = rules.free_age
        net = 0.0
        basis = 0.0
        peak = 0.0
    reward[i] = value
    points[PNL, i] = pnl
    points[GROSS, i] = gross
    points[COST, i] = cost
    points[FILL_PRICE, i] = fill_price
    points[EQUITY, i] = rules.initial_equity_usd + rules.multiplier * net
    flags[FILLED, i] = filled
    flags[FORCED, i] = forced
    flags[ROLLED, i] = rolled
    flags[CAN_TRADE, i] = 1 if age >= rules.min_hold else 0
    flags[END, i] = end
    flags[OBSERVED, i] = bar
    flags[HELD, i] = position
    if autoreset == SAME_STEP and done != 0:
        reset_random(i, count, money, keys, starts, len(land), mirror_prob, rules)
        bar = count[BAR, i]
        mirrored = count[MIRRORED, i]
        position = 0
        age = rules.free_age
        net = 0.0
        basis = 0.0
        peak = 0.0
    write_position(fields, seat, base, tape, fraction, bar, position, age, net, basis, peak, mirrored, rules)
