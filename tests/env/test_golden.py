"""Episodes worked out by hand. Index points throughout; ES: tick 0.25, $50 a point, $2.25 a side = 0.045 points.

With the default spread of one tick a close C is quoted C − 0.125 bid, C + 0.125 ask, and h = 0.125.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from fox_env.data.rolls import Segment
from tests.env.games import AFTERNOON, MINUTES, MORNING, make_bars, make_market, play

LONG, SHORT, FLAT = 2, 0, 1
FULL, HALF, SMALL = 2, 1, 0
MARKET, LIMIT, IOC = 0, 1, 2
PATIENT, NORMAL, AGGRESSIVE = 0, 1, 2
HOLD = (LONG, FULL, MARKET, NORMAL)
START = (4000.0, 4000.0, 4000.0, 4000.0)


def one_step(nxt, action, bar=START, **settings):
    columns = {k: settings.pop(k) for k in ("bid", "ask", "bid_size", "ask_size") if k in settings}
    return play(make_market(make_bars([bar, nxt], **columns)), [action], **settings)[0]


def check(info, *, filled, price, gross, cost):
    assert info["filled"] == filled
    assert info["fill_price"] == pytest.approx(price, abs=1e-12, nan_ok=True)
    assert info["gross_points"] == pytest.approx(gross, abs=1e-11)
    assert info["cost_points"] == pytest.approx(cost, abs=1e-11)
    assert info["pnl_points"] == info["gross_points"] - info["cost_points"]
    assert info["equity_usd"] == pytest.approx(200_000 + 50 * (gross - cost), abs=1e-9)


NEXT = (4000.5, 4002.0, 3999.0, 4001.0)  # open, high, low, close; their mean is 4000.625


@pytest.mark.parametrize(
    ("action", "filled", "price", "gross", "cost"),
    [
        # Market Patient: 4000.625 + 0.125. Gross 4 × (4001 − 4000.625). Cost 4 × (0.045 + 0.125).
        ((LONG, FULL, MARKET, PATIENT), 4, 4000.75, 1.5, 0.68),
        # Market Normal: 4000.5 + 0.125. Gross 4 × (4001 − 4000.5).
        ((LONG, FULL, MARKET, NORMAL), 4, 4000.625, 2.0, 0.68),
        # Market Aggressive: 4000.125 + 0.25, against the close 4000. Gross 4 × 1. Cost 4 × (0.045 + 0.375).
        ((LONG, FULL, MARKET, AGGRESSIVE), 4, 4000.375, 4.0, 1.68),
        # Limit: the bid 3999.875 is 3999.75 in ticks. Patient 3999.5; the low of 3999 is two ticks below.
        ((LONG, FULL, LIMIT, PATIENT), 4, 3999.5, 6.0, 0.18),
        ((LONG, FULL, LIMIT, NORMAL), 4, 3999.75, 5.0, 0.18),
        ((LONG, FULL, LIMIT, AGGRESSIVE), 4, 4000.0, 4.0, 0.18),
        # IOC: open + h = 4000.625 is within ask + 2 ticks = 4000.625, not within ask + 1.
        ((LONG, FULL, IOC, PATIENT), 0, math.nan, 0.0, 0.0),
        ((LONG, FULL, IOC, NORMAL), 0, math.nan, 0.0, 0.0),
        ((LONG, FULL, IOC, AGGRESSIVE), 4, 4000.625, 2.0, 0.68),
        # Half is two contracts, Small one; the cost is per contract.
        ((LONG, HALF, MARKET, NORMAL), 2, 4000.625, 1.0, 0.34),
        ((LONG, SMALL, MARKET, NORMAL), 1, 4000.625, 0.5, 0.17),
        # Sells. Market Normal 4000.5 − 0.125, gross −4 × (4001 − 4000.5).
        ((SHORT, FULL, MARKET, NORMAL), -4, 4000.375, -2.0, 0.68),
        ((SHORT, FULL, MARKET, PATIENT), -4, 4000.5, -1.5, 0.68),
        ((SHORT, FULL, MARKET, AGGRESSIVE), -4, 3999.625, -4.0, 1.68),
        # A sell limit rests at the ask 4000.125 up to 4000.25, + 1 tick patient; the high 4002 is far beyond.
        ((SHORT, FULL, LIMIT, PATIENT), -4, 4000.5, -2.0, 0.18),
        ((SHORT, FULL, LIMIT, AGGRESSIVE), -4, 4000.0, -4.0, 0.18),
        # A sell IOC with cap 0: open − h = 4000.375 is not below the bid 3999.875, so it fills at 4000.375.
        ((SHORT, FULL, IOC, PATIENT), -4, 4000.375, -2.0, 0.68),
        ((FLAT, FULL, MARKET, AGGRESSIVE), 0, math.nan, 0.0, 0.0),
    ],
)
def test_fill_table(action, filled, price, gross, cost):
    check(one_step(NEXT, action), filled=filled, price=price, gross=gross, cost=cost)


@pytest.mark.parametrize(
    ("low", "rule", "filled"),
    [
        (3999.5, "through", 4),  # one tick through L = 3999.75
        (3999.75, "through", 0),  # touched
        (3999.75, "touch", 4),
        (4000.0, "touch", 0),
    ],
)
def test_resting_limit_is_filled_by_price_beyond_it(low, rule, filled):
    info = one_step((4000.25, 4001.0, low, 4001.0), (LONG, FULL, LIMIT, NORMAL), fill_rule=rule)
    # 4 × (4001 − 3999.75) = 5, and commission alone.
    check(info, filled=filled, price=3999.75 if filled else math.nan, gross=5.0 if filled else 0.0,
          cost=0.18 if filled else 0.0)  # fmt: skip


def test_marketable_limit_takes_the_open():
    # Quoted 4000.00 × 4000.25, h = 0.125. Aggressive: L = 4000 + 0.25 reaches the ask; open + h = 4000.125 ≤ L.
    info = one_step(
        (4000.0, 4001.0, 4000.0, 4001.0), (LONG, FULL, LIMIT, AGGRESSIVE), bid=[4000.0] * 2, ask=[4000.25] * 2
    )
    check(info, filled=4, price=4000.125, gross=4.0, cost=4 * 0.17)


def test_quotes_of_the_market_set_spread_and_size():
    # Quoted 3999.50 × 4000.50: h = 0.5. Market Normal at 4000.5 + 0.5.
    quotes = {"bid": [3999.5] * 2, "ask": [4000.5] * 2}
    info = one_step(NEXT, HOLD, **quotes)
    check(info, filled=4, price=4001.0, gross=2.0, cost=4 * 0.545)
    # Three contracts shown: the fourth pays a tick more, 0.25 / 4 on average.
    info = one_step(NEXT, HOLD, **quotes, ask_size=[3.0] * 2)
    check(info, filled=4, price=4001.0625, gross=2.0, cost=4 * 0.545 + 0.25)
    # An IOC takes the three that are shown, and none of a size of zero.
    info = one_step(NEXT, (LONG, FULL, IOC, AGGRESSIVE), **quotes, ask_size=[3.0] * 2)
    check(info, filled=3, price=4001.0, gross=1.5, cost=3 * 0.545)
    info = one_step(NEXT, (LONG, FULL, IOC, AGGRESSIVE), **quotes, ask_size=[0.0] * 2)
    check(info, filled=0, price=math.nan, gross=0.0, cost=0.0)


def test_crossed_quotes_are_not_used():
    info = one_step(NEXT, HOLD, bid=[4000.5] * 2, ask=[4000.0] * 2)
    check(info, filled=4, price=4000.625, gross=2.0, cost=0.68)


def test_walking_the_book():
    # Two contracts a level: contracts one to four pay 0, 0, 1, 1 ticks more, 0.5 points together.
    info = one_step(NEXT, HOLD, depth_contracts=2)
    check(info, filled=4, price=4000.75, gross=2.0, cost=0.68 + 0.5)


def test_an_order_never_pays_more_than_its_limit():
    # Open 4000: open + h = 4000.125 is the ask itself. Cap 0 allows the first level only, cap +1 the second as well.
    nxt = (4000.0, 4001.0, 4000.0, 4001.0)
    info = one_step(nxt, (LONG, FULL, IOC, PATIENT), depth_contracts=2)
    check(info, filled=2, price=4000.125, gross=2.0, cost=0.34)
    info = one_step(nxt, (LONG, FULL, IOC, NORMAL), depth_contracts=2)
    check(info, filled=4, price=4000.25, gross=4.0, cost=0.68 + 0.5)


def test_the_rest_of_a_marketable_limit_rests():
    # L = 4000.25 takes two contracts at 4000.125 and rests with two, which the low of 4000.0 reaches a tick beyond.
    quotes = {"bid": [4000.0] * 2, "ask": [4000.25] * 2}
    action = (LONG, FULL, LIMIT, AGGRESSIVE)
    info = one_step((4000.0, 4001.0, 4000.0, 4001.0), action, depth_contracts=2, **quotes)
    # Two gain 4001 − 4000 against the open, two 4001 − 4000.25 against L; (2 × 4000.125 + 2 × 4000.25) / 4.
    check(info, filled=4, price=4000.1875, gross=3.5, cost=0.18 + 2 * 0.125)
    info = one_step((4000.125, 4001.0, 4000.125, 4001.0), action, depth_contracts=2, **quotes)
    check(info, filled=2, price=4000.25, gross=1.75, cost=0.09 + 2 * 0.125)


def test_round_trip_costs_the_spread_and_two_commissions():
    # One contract at a constant price: 0.25 + 2 × 0.045 = 0.34 points, $17, of which $4.50 commission.
    flat = [START] * 4
    infos = play(make_market(make_bars(flat)), [(LONG, SMALL, 0, 1), (FLAT, SMALL, 0, 1)], min_hold_bars=1)
    assert sum(i["cost_points"] for i in infos) == pytest.approx(0.34, abs=1e-12)
    assert infos[-1]["equity_usd"] == pytest.approx(200_000 - 17.0, abs=1e-9)
    assert sum(i["gross_points"] for i in infos) == 0.0


def test_commission_in_basis_points_of_the_close():
    # 0.18 bps of 5000 is 0.09 points a round trip, 0.045 a side: what $2.25 is at any price.
    bar = (5000.0,) * 4
    info = one_step(bar, (LONG, SMALL, 0, 1), bar=bar, commission_bps_round_trip=0.18)
    assert info["cost_points"] == pytest.approx(0.125 + 0.045, abs=1e-12)


def test_a_resting_limit_pays_no_spread():
    info = one_step((4000.0, 4000.0, 3999.0, 3999.0), (LONG, SMALL, LIMIT, NORMAL))
    # Bought at 3999.75 in a bar that closes at 3999: adverse selection is in the gross, not in the cost.
    check(info, filled=1, price=3999.75, gross=-0.75, cost=0.045)


def test_min_hold_counts_from_the_bar_of_the_fill():
    # Filled in bar 1 (age 1). With min_hold 3 the order of bar 3's close is the first that may be sent; it works in
    # bar 4. The flat action before is ignored and costs nothing.
    market = make_market(make_bars([START] * 7))
    infos = play(market, [HOLD] + [(FLAT, FULL, 0, 1)] * 5, min_hold_bars=3)
    assert [i["filled"] for i in infos] == [4, 0, 0, -4, 0, 0]
    assert [i["can_trade"] for i in infos] == [False, False, True, False, False, True]
    assert [i["position"] for i in infos] == [4, 4, 4, 0, 0, 0]
    assert [round(float(i["obs"][-4]), 4) for i in infos] == [round(a / 3, 4) for a in (1, 2, 3, 1, 2, 3)]


def test_a_reversal_is_one_order_through_zero():
    market = make_market(make_bars([START] * 4))
    infos = play(market, [HOLD, (SHORT, HALF, 0, 1)], min_hold_bars=1)
    # From +4 to −2 sells six contracts at 4000 − 0.125.
    check(
        {**infos[1], "equity_usd": infos[1]["equity_usd"] + 34.0}, filled=-6, price=3999.875, gross=0.0, cost=6 * 0.17
    )


def test_a_partial_fill_starts_the_lock():
    quotes = {"bid": [3999.875] * 3, "ask": [4000.125] * 3, "ask_size": [1.0] * 3, "bid_size": [1.0] * 3}
    infos = play(make_market(make_bars([START] * 3, **quotes)), [(LONG, FULL, IOC, AGGRESSIVE), HOLD], min_hold_bars=2)
    assert [i["position"] for i in infos] == [1, 1]
    assert not infos[0]["can_trade"]


def test_reward_is_the_return_on_full_exposure():
    info = one_step(NEXT, HOLD)
    assert info["reward"] == pytest.approx(1.32 / (4 * 4000), rel=1e-14)


def roll_market(gap):
    old = make_bars([START, START])
    new = make_bars([(4012.0,) * 4, (4013.0, 4013.5, 4012.0, 4013.0), (4013.0,) * 4], start=MORNING + 5 * MINUTES)
    # The new contract traded at 4012 in bar 1 already, when the old one closed at 4000: g = 12.
    return make_market([Segment("OLD", old, 0, 0.0), Segment("NEW", new, 1, gap)])


def test_a_measured_roll_costs_two_half_spreads_and_two_commissions():
    infos = play(roll_market(12.0), [(LONG, HALF, 0, 1), (LONG, HALF, 0, 1)])
    # Two contracts: 2 × (4013 − 4000 − 12) = 2 gross, 2 × (2 × 0.125 + 2 × 0.045) = 0.68 cost.
    assert infos[1]["rolled"] == 2
    assert infos[1]["gross_points"] == pytest.approx(2.0)
    assert infos[1]["cost_points"] == pytest.approx(0.68)
    assert infos[1]["position"] == 2
    # Unrealized: bought at 4000.125 (+ 12), marked at 4013; over 4 contracts × the contract's own volatility.
    market = roll_market(12.0)
    expected = 2 * (4013 - 4012.125) / (4 * market.volatility[2])
    assert infos[1]["obs"][-5] == pytest.approx(expected, rel=1e-6)


def test_an_order_in_the_roll_bar_works_at_shifted_prices():
    # Flat before. L Normal = floor(3999.875 + 12) = 4011.75; the new contract's low of 4012 does not reach it.
    check(
        play(roll_market(12.0), [(FLAT, 0, 0, 0), (LONG, SMALL, LIMIT, NORMAL)])[1],
        filled=0,
        price=math.nan,
        gross=0,
        cost=0,
    )
    # Market Aggressive: ask 4000.125 + 12 + 0.25, against 4012. Gross 4013 − 4012.
    check(
        play(roll_market(12.0), [(FLAT, 0, 0, 0), (LONG, SMALL, MARKET, AGGRESSIVE)])[1],
        filled=1, price=4012.375, gross=1.0, cost=0.045 + 0.375,
    )  # fmt: skip


def test_an_unmeasured_roll_closes_the_position_and_refuses_the_order():
    infos = play(roll_market(math.nan), [(LONG, HALF, 0, 1), (SHORT, FULL, 0, 1), (SHORT, FULL, 0, 1)])
    # Two contracts closed at 4000 − 0.125 with one commission: 2 × 0.17.
    assert infos[1]["forced"] == -2
    assert infos[1]["filled"] == 0
    assert infos[1]["gross_points"] == 0.0
    assert infos[1]["cost_points"] == pytest.approx(0.34)
    assert infos[1]["can_trade"]
    assert infos[2]["filled"] == -4


def test_margin_call_liquidates_and_terminates():
    # Equity 2,100 against 4 × $500 intraday: 2,100 − 34 (cost of the purchase) is enough at 4000. A fall to 3999 leaves
    # 2,066 − 200 = 1,866 < 2,000: closed at 3999 − 0.125 with commission, 4 × 0.17 more.
    market = make_market(make_bars([START, START, (4000.0, 4000.0, 3999.0, 3999.0), START]))
    infos = play(market, [HOLD, HOLD], initial_equity_usd=2_100.0)
    assert not infos[0]["terminated"]
    assert infos[0]["equity_usd"] == pytest.approx(2_066.0)
    assert infos[1]["terminated"]
    assert infos[1]["end_reason"] == "margin_call"
    assert infos[1]["forced"] == -4
    assert infos[1]["position"] == 0
    assert infos[1]["cost_points"] == pytest.approx(0.68)
    assert infos[1]["equity_usd"] == pytest.approx(2_100 - 34 - 200 - 34)


def test_overnight_margin_at_the_last_bar_of_a_session():
    # 2024: $12,000 a contract overnight. $40,000 holds four contracts until 15:55, and not at 16:00.
    market = make_market(make_bars([START] * 2 + [START], start=AFTERNOON - 5 * MINUTES))
    infos = play(market, [HOLD, HOLD], initial_equity_usd=40_000.0)
    assert [i["terminated"] for i in infos] == [False, True]
    assert market.session_last.tolist() == [False, False, True]


def test_equity_may_fall_below_zero():
    market = make_market(make_bars([START, START, (3900.0,) * 4]))
    infos = play(market, [HOLD, HOLD], initial_equity_usd=5_000.0)
    # 4 × 100 points × $50 = $20,000 of loss.
    assert infos[1]["equity_usd"] == pytest.approx(5_000 - 34 - 20_000 - 34)
    assert infos[1]["terminated"]


def session_end_market():
    first = make_bars([START] * 3, start=AFTERNOON - 5 * MINUTES)  # closes 15:50, 15:55, 16:00
    second = make_bars([(4005.0,) * 4] * 3, start=AFTERNOON + 70 * MINUTES)  # opens 17:00
    joined = {n: np.concatenate([getattr(first, n), getattr(second, n)])
              for n in ("start", "ts", "open", "high", "low", "close", "volume")}  # fmt: skip
    return make_market(type(first)(**joined))


def test_flat_at_close():
    infos = play(session_end_market(), [HOLD, HOLD, HOLD, HOLD], flat_at_close=True)
    # Bought in the bar that closes at 15:55, closed at 16:00: 4 × (0.125 + 0.045).
    assert [i["position"] for i in infos] == [4, 0, 4, 4]
    assert [i["forced"] for i in infos] == [0, -4, 0, 0]
    assert infos[1]["cost_points"] == pytest.approx(0.68)
    assert infos[1]["can_trade"]
    assert not infos[1]["terminated"]
    # An order into the last bar is refused.
    infos = play(session_end_market(), [(FLAT, 0, 0, 0), HOLD], flat_at_close=True)
    assert [i["filled"] for i in infos] == [0, 0]


def test_without_flat_at_close_the_gap_is_earned():
    infos = play(session_end_market(), [HOLD, HOLD, HOLD])
    assert infos[2]["gross_points"] == pytest.approx(4 * 5.0)


def test_after_a_break_aggressive_acts_as_normal_and_a_limit_takes_the_open():
    market = session_end_market()
    assert market.after_break.tolist() == [True, False, False, True, False, False]
    idle = [(FLAT, 0, 0, 0)] * 2
    check(play(market, [*idle, (LONG, SMALL, MARKET, AGGRESSIVE)])[2], filled=1, price=4005.125, gross=0, cost=0.17)
    # A sell limit at 4000.25 opens 4.75 points in the money: filled at the open less h, not at its own price.
    check(play(market, [*idle, (SHORT, SMALL, LIMIT, NORMAL)])[2], filled=-1, price=4004.875, gross=0, cost=0.17)


def test_locked_at_the_limit_nothing_fills_in_that_direction():
    from dataclasses import replace

    market = make_market(make_bars([START, START, START]))
    market = replace(market, lock=np.array([0, 1, -1], np.int8))
    assert play(market, [HOLD])[0]["filled"] == 0
    assert play(market, [(SHORT, FULL, 0, 1)])[0]["filled"] == -4
    assert play(market, [(FLAT, 0, 0, 0), (SHORT, FULL, 0, 1)])[1]["filled"] == 0


def test_episode_ends():
    market = make_market(make_bars([START] * 6))
    infos = play(market, [HOLD] * 5)
    assert [i["truncated"] for i in infos] == [False] * 4 + [True]
    assert infos[-1]["end_reason"] == "end_of_data"
    assert infos[-1]["position"] == 4  # marked, not liquidated
    infos = play(market, [HOLD] * 2, episode_bars=2)
    assert infos[-1]["truncated"]
    assert infos[-1]["end_reason"] == "episode_bars"


def test_multiplier_in_one_place():
    # MES: $5 a point and $0.62 a side = 0.124 points.
    info = play(make_market(make_bars([START, NEXT]), "MES"), [HOLD])[0]
    assert info["gross_points"] == pytest.approx(2.0)
    assert info["cost_points"] == pytest.approx(4 * (0.125 + 0.124))
    assert info["equity_usd"] == pytest.approx(200_000 + 5 * (2.0 - 0.996))
