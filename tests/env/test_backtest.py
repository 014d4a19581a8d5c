"""Back-tests: lanes, costs, trades, baselines, every kind of policy, reports."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fox_env import FoxES, Market, actions, dynamics, evaluate, metrics, synthetic_market
from fox_env.backtest import Lanes, Player, Record
from fox_env.baselines import RandomPolicy, as_policy
from fox_env.data.rolls import Segment
from fox_env.engine import Engine, game_of
from fox_env.oracle import OraclePolicy, follow_the_state, solve
from fox_env.report import policy_figures, to_plain
from tests.env.games import MINUTES, MORNING, make_bars, make_market, random_market

HALF, FEE = 0.125, 2.25 / 50  # half the spread and a side's commission, points
FLAT, LONG, SHORT = (actions.BASELINES[name] for name in ("flat", "long", "short"))
SMALL = [(4000, 4000, 4000, 4000), (4000, 4002, 3999, 4001), (4001, 4004, 4001, 4003), (4003, 4003, 4001, 4002),
         (4002, 4005, 4002, 4004)]  # fmt: skip


class Script:
    """One action a step, the same in every lane."""

    def __init__(self, *script: tuple[int, int, int, int]) -> None:
        self.script, self.step, self.resets = script, 0, 0

    def reset(self) -> None:
        self.step, self.resets = 0, self.resets + 1

    def __call__(self, obs: np.ndarray) -> np.ndarray:
        self.step += 1
        return np.tile(self.script[min(self.step, len(self.script)) - 1], (len(obs), 1))


def scatter(obs: np.ndarray) -> np.ndarray:
    """Actions that look random but depend on nothing but each row of the observation."""
    bits = np.ascontiguousarray(obs, np.float32).view(np.uint32).astype(np.uint64)
    weight = np.arange(1, bits.shape[1] + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return actions.decode(((bits * weight).sum(axis=1) >> np.uint64(40)) % np.uint64(81))


@pytest.fixture(scope="module")
def garch() -> Market:
    return synthetic_market("garch", bars=3_000, seed=3)


@pytest.fixture(scope="module")
def planted() -> Market:
    return synthetic_market("planted", bars=40_000, seed=5, features=["planted_state"])


def test_long_is_arithmetic() -> None:
    record = Player(make_market(make_bars(SMALL)), lanes=1).play("long")
    # Four contracts at 4000 + h, marked at 4004, not closed.
    assert record.net.sum() == pytest.approx(4 * (4004 - 4000 - HALF - FEE), abs=1e-9)
    assert record.gross.sum() == pytest.approx(4 * 4, abs=1e-9)
    assert record.position.tolist() == [4, 4, 4, 4]
    assert record.trades.bars.tolist() == [4]


def test_trades_by_hand() -> None:
    policy = Script(LONG, SHORT, FLAT, FLAT)
    record = Player(make_market(make_bars(SMALL)), lanes=1, min_hold_bars=0).play(policy)
    # Buy 4 at 4000.125; sell 8 at 4000.875; buy 4 at 4003.125.
    first = 4 * (4000.875 - 4000.125) - 8 * FEE
    second = 4 * (4000.875 - 4003.125) - 8 * FEE
    assert record.trades.net == pytest.approx([first, second], abs=1e-9)
    assert record.trades.bars.tolist() == [1, 1]
    assert record.costs["commission"].sum() == pytest.approx(16 * FEE)
    assert record.costs["spread_slippage"].sum() == pytest.approx(16 * HALF)
    report = evaluate(policy, record.lanes.market, lanes=1, min_hold_bars=0, baselines=False)
    figures = report.policies["agent"]
    assert figures["trades"] == 2
    assert figures["hit_rate"] == 0.5
    assert figures["mean_holding_bars"] == 1.0
    assert figures["turnover_contracts"] == 16
    assert figures["exposure_histogram"] == {"-4": 0.25, "0": 0.5, "4": 0.25}
    assert figures["mean_abs_exposure"] == 0.5
    assert figures["fills_by_order_type"] == {"market": 3, "limit": 0, "ioc": 0}
    # Account by close: 0, 4·(4001 − 4000.125 − fee), then 4·(4000.875 − 4003) − 12 fees further on, …
    first_mark = 4 * (4001 - 4000.125) - 4 * FEE
    assert figures["max_drawdown_usd"] == pytest.approx(50 * (first_mark - first - second))
    assert figures["max_drawdown_start"] == "2024-03-05T15:10:00Z"
    assert figures["max_drawdown_end"] == "2024-03-05T15:20:00Z"


def test_dollars_are_points_times_the_multiplier() -> None:
    for contract, dollars in (("ES", 50.0), ("MES", 5.0)):
        report = evaluate("long", make_market(make_bars(SMALL), contract), lanes=1)
        for figures in report.policies.values():
            assert figures["net_pnl_usd"] == pytest.approx(dollars * figures["net_pnl_points"], abs=1e-9)
            assert figures["cost_usd"] == pytest.approx(dollars * figures["cost_points"], abs=1e-9)


def test_costs_of_a_roll_by_hand() -> None:
    later = make_bars([(4010, 4012, 4009, 4011), (4011, 4012, 4010, 4012)], start=MORNING + 5 * len(SMALL) * MINUTES)
    market = make_market([Segment("A", make_bars(SMALL), 0, 0.0), Segment("B", later, 0, 6.0)])
    record = Player(market, lanes=1).play("long")
    # From 4000 + h to 4004, then the new contract from 4004 + 6 to 4012; the roll sells four and buys four.
    assert record.gross.sum() == pytest.approx(4 * (4 + 2), abs=1e-9)
    assert {part: points.sum() for part, points in record.costs.items()} == pytest.approx(
        {"commission": 4 * FEE, "spread_slippage": 4 * HALF, "roll": 4 * 2 * (HALF + FEE), "forced": 0.0}, abs=1e-9
    )
    assert evaluate("long", market, lanes=1).policies["agent"]["turnover_contracts"] == 4 + 8


def test_margin_call_ends_the_lane() -> None:
    prices = [(4000, 4000, 4000, 4000), (4000, 4000, 3999, 3999), (3999, 4100, 3999, 4100), (4100, 4100, 4100, 4100)]
    player = Player(make_market(make_bars(prices)), lanes=1, initial_equity_usd=2_100.0)
    record = player.play("long")
    # 2,100 − 50·4.68 = 1,866 is short of four intraday margins of 500: closed at 3999 − h, and flat from then on.
    assert record.margin_calls == 1
    assert record.net.tolist() == pytest.approx([4 * (3999 - 4000 - 2 * HALF - 2 * FEE), 0.0, 0.0], abs=1e-9)
    assert record.position.tolist() == [0, 0, 0]
    assert record.can_trade.tolist() == [True, False, False]
    assert record.costs["forced"].sum() == pytest.approx(4 * (HALF + FEE))
    assert (len(record.trades.net), record.trades.bars.tolist()) == (1, [0])
    assert player.play("flat").margin_calls == 0


@given(st.integers(1, 12))
@settings(max_examples=12, deadline=None)
def test_lanes_are_whole_sessions_and_share_no_step(garch: Market, count: int) -> None:
    lanes = Lanes.cut(garch, count)
    decisions = np.flatnonzero(garch.decision)
    assert len(lanes) == count
    assert (lanes.start[0], lanes.stop[-1]) == (decisions[0], decisions[-1])
    assert (lanes.start[1:] == lanes.stop[:-1]).all()
    assert lanes.bar.tolist() == decisions[:-1].tolist()
    assert lanes.steps.sum() == len(lanes.bar)
    assert garch.session_last[lanes.stop[:-1]].all()
    lane_of_step = np.repeat(np.arange(count), lanes.steps)
    for session in range(len(lanes.days)):
        assert len(set(lane_of_step[lanes.session == session])) == 1
    # Half a session beside the equal share, at either end.
    assert np.abs(lanes.steps - len(lanes.bar) / count).max() <= 276


def test_default_lanes() -> None:
    assert len(Lanes.cut(make_market(make_bars(SMALL)))) == 1
    market = synthetic_market("martingale", bars=276 * 30, features=["planted_state"])
    assert len(Lanes.cut(market)) == 30 // 5


def test_lanes_pay_for_their_close(garch: Market) -> None:
    player = Player(garch, lanes=4)
    record = player.play("long")
    assert record.margin_calls == 0
    lanes, at = player.lanes, 0
    for start, stop, steps in zip(lanes.start, lanes.stop, lanes.steps, strict=True):
        mine = record.net[at : at + steps].sum()
        moved = garch.bars.close[stop] - garch.bars.open[start + 1]
        assert mine == pytest.approx(4 * (moved - 2 * (HALF + FEE)), abs=1e-9)
        at += steps
    assert len(record.trades.net) == 4


@pytest.mark.parametrize("make", [lambda: synthetic_market("garch", bars=3_000, seed=3), None])
def test_lanes_together_equal_lanes_alone(make: object) -> None:
    market = make() if make else random_market(np.random.default_rng(1))
    player = Player(market, lanes=5 if make else 2, min_hold_bars=3)
    together = player.play(scatter)
    at = 0
    for start, stop, steps in zip(player.lanes.start, player.lanes.stop, player.lanes.steps, strict=True):
        alone = Engine(market, player.game, 1, autoreset=dynamics.DISABLED, close_at_stop=True)
        alone.place([start], [stop])
        for step in range(at, at + steps):
            alone.step(scatter(alone.obs).astype(np.int32))
            assert alone.points[dynamics.GROSS, 0] == together.gross[step]
            assert alone.points[dynamics.COST, 0] == together.cost[step]
            assert alone.flags[dynamics.HELD, 0] == together.position[step]
        assert alone.count[dynamics.DONE, 0] == 1
        at += steps
    assert np.count_nonzero(together.filled) > 20


def test_single_pass_equals_the_environment() -> None:
    market = random_market(np.random.default_rng(2))
    record = Player(market, lanes=1, min_hold_bars=2).play(scatter)
    env = FoxES(market, episode_bars=0, min_hold_bars=2)
    obs, _ = env.reset(seed=0, options={"start": int(record.lanes.bar[0])})
    for step in range(len(record)):
        obs, _, terminated, truncated, info = env.step(scatter(obs[None])[0])
        assert info["gross_points"] == record.gross[step]
        assert info["cost_points"] == record.cost[step]
        assert info["position"] == record.position[step]
        assert info["can_trade"] or step + 1 == len(record) or not record.can_trade[step + 1]
    assert terminated or truncated
    assert np.count_nonzero(record.rolled) + np.count_nonzero(record.forced) > 0


@given(st.integers(0, 1_000), st.integers(1, 2), st.sampled_from([0, 3]), st.booleans())
@settings(max_examples=12, deadline=None)
def test_accounts_add_up(seed: int, lanes: int, hold: int, flat_at_close: bool) -> None:
    market = random_market(np.random.default_rng(seed))
    player = Player(market, lanes, min_hold_bars=hold, flat_at_close=flat_at_close, depth_contracts=2)
    record = player.play("random", seed)
    scale = max(1.0, np.abs(record.net).sum())
    assert record.net == pytest.approx(record.gross - record.cost, abs=0)
    assert np.abs(sum(record.costs.values()) - record.cost).max() < 1e-9
    assert all(part.min() > -1e-9 for part in record.costs.values())
    assert abs(record.session_pnl_usd.sum() - 50 * record.net.sum()) < 1e-9 * scale * 50
    assert abs(record.trades.net.sum() - record.net.sum()) < 1e-9 * scale
    assert record.trades.bars.sum() == np.count_nonzero(record.position)
    assert (record.position == record.before + record.filled + record.forced).all()


def test_settings_of_training_do_not_reach_a_back_test(garch: Market) -> None:
    plain = Player(garch, 3).play(scatter)
    trained = Player(
        garch, 3, mirror_prob=1.0, episode_bars=7, shaping={"drawdown": 1.0, "hindsight": 1.0}
    ).play(scatter)  # fmt: skip
    assert (plain.net == trained.net).all()
    assert trained.game == plain.game


def test_play_repeats_itself(garch: Market) -> None:
    player, policy = Player(garch, 3), Script(LONG, SHORT)
    first, again = player.play(policy), player.play(policy)
    assert policy.resets == 2
    assert (first.net == again.net).all()
    assert (player.play("random", 1).net == player.play("random", 1).net).all()
    assert (player.play("random", 1).net != player.play("random", 2).net).any()


def test_random_is_uniform_and_a_row_stands_alone() -> None:
    few, many = (RandomPolicy(3), RandomPolicy(3))
    drawn = np.stack([many(np.zeros((40, 1))) for _ in range(600)])
    assert (np.stack([few(np.zeros((7, 1))) for _ in range(600)]) == drawn[:, :7]).all()
    # Chi-square of 81 cells, 80 degrees: mean 80, standard deviation √160.
    counts = np.bincount(actions.encode(drawn).ravel(), minlength=81)
    expected = counts.sum() / 81
    assert abs((np.square(counts - expected) / expected).sum() - 80) < 4 * math.sqrt(160)
    assert not (drawn[:, 0] == drawn[:, 1]).all()


def test_random_on_a_martingale_earns_minus_its_costs() -> None:
    # A limit filled when touched loses nothing more, so that gross is luck alone; lanes are independent stretches.
    market = synthetic_market("martingale", bars=30_000, seed=2, features=["planted_state"])
    record = Player(market, 60, fill_rule="touch").play("random", 4)
    ends = np.cumsum(record.lanes.steps)[:-1]
    gross = np.array([part.sum() for part in np.split(record.gross, ends)])
    assert abs(metrics.edge_t(gross)) < 3
    assert metrics.edge_t(gross - np.array([part.sum() for part in np.split(record.cost, ends)])) < -4


def test_oracle_earns_what_is_expected(planted: Market) -> None:
    player = Player(planted, 60)
    rules = player.game.rules(planted)
    best = player.play(OraclePolicy(solve(planted.truth, rules), planted))
    follow = player.play(OraclePolicy(follow_the_state(planted.truth, rules), planted))
    for record in (best, follow):
        error = 50 * math.sqrt(len(record.lanes.days)) * (record.session_pnl_usd / 50).std(ddof=1)
        assert abs(50 * (record.net.sum() - record.expected_net_points())) < 4 * error
    # The program's gain a bar, and follow-the-state's 67.7 % of it, less what 60 closes cost.
    assert best.expected_net_points() / len(best) == pytest.approx(0.2066, abs=0.02)
    assert follow.expected_net_points() / best.expected_net_points() == pytest.approx(0.677, abs=0.03)


def test_expectation_counts_closes_and_leaves_out_ended_lanes(planted: Market) -> None:
    player = Player(planted, 60)
    record = player.play("long")
    # Long from every lane's first bar on, since bars open at the close before; twice 4 × (h + fee) a lane.
    drift = planted.truth.drift[record.lanes.bar].sum()
    costs = 60 * 2 * 4 * (HALF + FEE)
    assert record.expected_net_points() == pytest.approx(4 * drift - costs, abs=1e-6)
    # No order is expected to be sent in a lane that a margin call has ended.
    short = Player(planted, 60, initial_equity_usd=2_100.0)
    called = short.play("long")
    assert called.margin_calls > 30
    before = 4 * planted.truth.drift[called.lanes.bar][called.before != 0].sum()
    assert abs(called.expected_net_points() - before) < 60 * 4 * (2 * (HALF + FEE) + 0.15)


def test_expectation_knows_that_a_closing_lane_takes_no_order(planted: Market) -> None:
    market = planted.slice(0, 3_000)
    sessions = len(Lanes.cut(market).days)

    def at_the_end(obs: np.ndarray) -> np.ndarray:
        """Long at the last bar but one of each session, of which 5 minutes of 23 hours are left."""
        return np.where((obs[:, -1:] > 0) & (obs[:, -1:] < 0.006), LONG, FLAT)

    record = Player(market, sessions, min_hold_bars=0).play(at_the_end)
    assert np.count_nonzero(record.action[:, 0] == actions.LONG) >= sessions - 1
    assert record.expected_net_points() == 0.0
    assert record.net.sum() == 0.0


def test_expectation_is_left_out_where_it_is_not_known(planted: Market, garch: Market) -> None:
    assert Player(garch, 2).play("long").expected_net_points() is None
    assert Player(planted, 2, flat_at_close=True).play("long").expected_net_points() is None
    report = evaluate("flat", planted.slice(0, 3_000), commission_bps_round_trip=0.18)
    assert list(report.policies) == ["agent", "flat", "long", "short", "random"]
    assert "expected_net_pnl_points" not in report.policies["agent"]


def test_noisy_oracle_plays_in_lanes() -> None:
    market = synthetic_market("planted_noisy", bars=2_000, seed=1, features=["planted_state"])
    game = game_of(market, {})
    # The filter's belief is one a row: three lanes at once are three accounts that see their own signals.
    policy = OraclePolicy(follow_the_state(market.truth, game.rules(market)), market)
    player = Player(market, 3)
    together, at = player.play(policy), 0
    for start, stop, steps in zip(player.lanes.start, player.lanes.stop, player.lanes.steps, strict=True):
        alone = Engine(market, player.game, 1, autoreset=dynamics.DISABLED, close_at_stop=True)
        alone.place([start], [stop])
        policy.reset()
        for step in range(at, at + steps):
            alone.step(policy(alone.obs).astype(np.int32))
            assert alone.flags[dynamics.HELD, 0] == together.position[step]
        at += steps
    assert len(together.trades.net) > 10


def assert_same(first: Record, second: Record) -> None:
    assert (first.action == second.action).all()
    assert (first.net == second.net).all()
    assert len(np.unique(actions.encode(first.action))) > 1


@pytest.mark.parametrize("kind", ["multi", "discrete"])
def test_stable_baselines_models(garch: Market, kind: str) -> None:
    sb3 = pytest.importorskip("stable_baselines3")
    from fox_env import FoxESDiscrete

    if kind == "multi":
        model = sb3.PPO("MlpPolicy", FoxES(garch), n_steps=16, batch_size=16, seed=0, device="cpu")
    else:
        model = sb3.DQN("MlpPolicy", FoxESDiscrete(garch), buffer_size=10, seed=0, device="cpu")
    player = Player(garch.slice(0, 500), 2)

    def call(obs: np.ndarray) -> np.ndarray:
        chosen = model.predict(obs, deterministic=True)[0]
        return chosen if kind == "multi" else actions.decode(chosen)

    assert_same(player.play(model), player.play(call))
    assert_same(player.play(model.policy), player.play(call))


def test_model_of_another_environment_is_refused() -> None:
    from gymnasium import spaces

    class Model:
        action_space = spaces.Discrete(3)

        def predict(self) -> None: ...

    with pytest.raises(ValueError, match=r"action space is Discrete\(3\), expected MultiDiscrete"):
        as_policy(Model())


def test_tensordict_modules(garch: Market) -> None:
    torch = pytest.importorskip("torch")
    from tensordict.nn import TensorDictModule

    torch.manual_seed(0)
    net = torch.nn.Linear(garch.features.shape[1] + 6, 12)

    def choose(obs: torch.Tensor) -> torch.Tensor:
        assert not torch.is_grad_enabled()
        return net(obs).view(-1, 4, 3).argmax(-1)

    class Choose(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, obs: torch.Tensor) -> torch.Tensor:
            return choose(obs)

    player = Player(garch.slice(0, 900), 2)
    module = TensorDictModule(Choose(), in_keys=["observation"], out_keys=["action"])

    @torch.no_grad()
    def call(obs: np.ndarray) -> torch.Tensor:
        return choose(torch.as_tensor(obs))

    assert_same(player.play(module), player.play(call))
    with pytest.raises(ValueError, match="wrote no key 'action'"):
        player.play(TensorDictModule(Choose(), in_keys=["observation"], out_keys=["other"]))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (np.zeros((2, 3), int), r"the policy's actions have shape \(2, 3\), expected \(2, 4\)"),
        (None, r"the policy's actions have shape \(\), expected \(2, 4\)"),
        (np.full((2, 4), np.nan), "the policy's actions must be integers, got nan"),
        (np.full((2, 4), 0.5), "the policy's actions must be integers, got 0.5"),
        (np.full((2, 4), 3), "the policy's action 3 is out of range"),
        (np.full((2, 4), -1), "the policy's action -1 is out of range"),
        ([[1, 1, 1, 1], [1]], "the policy's actions are a ragged list"),
    ],
)
def test_bad_actions(garch: Market, answer: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Player(garch, 2).play(lambda obs: answer)


def test_bad_input(garch: Market) -> None:
    with pytest.raises(ValueError, match="policy 'lnog' is unknown, expected one of flat, long, short, random"):
        evaluate("lnog", garch)
    with pytest.raises(TypeError, match="policy is 7, expected a callable"):
        evaluate(7, garch)
    with pytest.raises(ValueError, match="lanes is 13, expected an integer from 1 to the market's 12 sessions"):
        evaluate("flat", garch, lanes=13)
    with pytest.raises(ValueError, match="lanes is 0"):
        evaluate("flat", garch, lanes=0)
    with pytest.raises(ValueError, match="seed is -1"):
        evaluate("flat", garch, seed=-1)
    with pytest.raises(ValueError, match="trials is 0"):
        evaluate("flat", garch, trials=0)
    with pytest.raises(TypeError, match="unknown setting 'max_contract'"):
        evaluate("flat", garch, max_contract=1)
    with pytest.raises(ValueError, match="the market has 1 bars to decide at, expected at least 2"):
        evaluate("flat", replace(garch, decision=np.arange(len(garch)) == 200))


def test_normalizer_must_not_have_seen_the_market(garch: Market) -> None:
    train, valid, test = garch.split(0.5, 0.25)
    for part in (valid, test):
        evaluate("flat", part, baselines=False)
    with pytest.raises(ValueError, match="overlaps the bars that its normalizer was fitted on"):
        evaluate("flat", train)
    assert evaluate("flat", train, in_sample=True, baselines=False).provenance["in_sample"] is True


def test_report(planted: Market, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    market = planted.slice(0, 6_000)
    report = evaluate("random", market, seed=3, lanes=8)
    report.save(tmp_path / "report.json")
    loaded = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert loaded == report.to_dict()
    assert list(tmp_path.iterdir()) == [tmp_path / "report.json"]
    assert set(loaded) == {"schema", "policies", "provenance"}
    assert loaded["schema"] == 1
    assert list(loaded["policies"]) == ["agent", "flat", "long", "short", "random", "oracle"]
    for figures in loaded["policies"].values():
        assert {"net_pnl_points", "net_pnl_usd", "cost_usd", "sharpe", "max_drawdown_usd", "trades",
                "mean_abs_exposure", "expected_net_pnl_points"} <= set(figures)  # fmt: skip
        assert sum(figures["cost_breakdown_usd"].values()) == pytest.approx(figures["cost_usd"], abs=1e-6)
        assert figures["net_pnl_usd"] == pytest.approx(figures["gross_pnl_usd"] - figures["cost_usd"], abs=1e-6)
        assert sum(figures["session_pnl_usd"]) == pytest.approx(figures["net_pnl_usd"], abs=1e-6)
        assert sum(figures["exposure_histogram"].values()) == pytest.approx(1.0)
    flat = loaded["policies"]["flat"]
    assert (flat["net_pnl_usd"], flat["cost_usd"], flat["trades"], flat["sharpe"]) == (0.0, 0.0, 0, None)
    assert loaded["policies"]["agent"] == loaded["policies"]["random"]
    provenance = loaded["provenance"]
    assert provenance["market"] == market.fingerprint
    assert (provenance["seed"], provenance["lanes"], provenance["game"]["max_contracts"]) == (3, 8, 4)
    assert provenance["first"] < provenance["last"]
    lines = str(report).splitlines()
    assert max(map(len, lines)) <= 100
    assert "…" not in "".join(line for line in lines if "interval" not in line)  # nothing is cut short
    assert any("Net P&L, USD" in line for line in lines)
    report.print()
    assert capsys.readouterr().out == str(report)


def test_trials_deflate_the_agent_alone(planted: Market) -> None:
    market = planted.slice(0, 6_000)
    once, often = (evaluate("long", market, lanes=8, trials=trials).policies for trials in (1, 50))
    assert often["agent"]["deflated_sharpe"] < once["agent"]["deflated_sharpe"]
    assert often["long"] == once["long"] == once["agent"]


def test_other_policies_play_beside_the_evaluated_one(planted: Market) -> None:
    market = planted.slice(0, 6_000)
    report = evaluate("flat", market, lanes=8, others={"candidate": "long"}, trials=9)
    assert list(report.policies) == ["agent", "candidate", "flat", "long", "short", "random", "oracle"]
    assert report.policies["candidate"] == report.policies["long"]  # not one of the trials
    alone = evaluate("flat", market, lanes=8, trials=9).policies
    assert {name: figures for name, figures in report.policies.items() if name != "candidate"} == alone
    text = str(report)
    assert max(map(len, text.splitlines())) <= 120
    assert "…" not in "".join(line for line in text.splitlines() if "interval" not in line)  # nothing is cut short
    for name in ("agent", "flat", "oracle"):
        with pytest.raises(ValueError, match=f"others names a policy '{name}'"):
            evaluate("flat", market, others={name: "long"})


def test_figures_without_a_bootstrap(planted: Market) -> None:
    record = Player(planted.slice(0, 6_000)).play("long")
    whole, without = policy_figures(record), policy_figures(record, resamples=0)
    assert whole.pop("sharpe_interval") != [None, None]
    assert without.pop("sharpe_interval") == [None, None]
    assert whole == without


def test_nothing_that_is_no_json() -> None:
    value = {"a": np.float64("nan"), 2: [np.int32(1), math.inf, np.array([1.5, np.nan])], "b": np.True_, "c": Path("x")}
    assert to_plain(value) == {"a": None, "2": [1, None, [1.5, None]], "b": True, "c": "x"}


def test_evaluation_needs_no_torch() -> None:
    heavy = {"torch", "torchrl", "pandas", "rich"}
    code = f"import sys, fox_env; fox_env.evaluate; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
