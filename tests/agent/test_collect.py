"""Transitions against accounts that are played one by one, step by step, and summed by hand."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch

from fox_agent.collect import Collector, full_exposure_returns, sends_order
from fox_agent.replay import unpack_flags
from fox_env import FoxES, dynamics
from fox_env.actions import FLAT, LONG, target_position
from fox_env.data.rolls import Segment
from fox_env.engine import game_of
from tests.env.games import MINUTES, MORNING, make_bars, make_market, random_market

GAMMA = 0.9
SEED = 11
# Accounts of 20,000 dollars meet margin calls in this market, and episodes of 25 bars end in locks.
UGLY = {"episode_bars": 25, "min_hold_bars": 4, "initial_equity_usd": 20_000.0, "mirror_prob": 0.5}


@pytest.fixture(scope="module")
def market():
    return random_market(np.random.default_rng(5))


def collector(
    market, num_envs: int, *, n_step: int = 1, share: float = 0.0, gamma: float = GAMMA, **settings
) -> Collector:
    game = game_of(market, {**UGLY, **settings})
    return Collector(
        market, game, num_envs, gamma=gamma, n_step=n_step, counterfactual_share=share, device="cpu", seed=SEED
    )


class Actor:
    """Random actions, of which most branches are greedy; keeps what it saw and said."""

    def __init__(self, seed: int = 3, greedy_share: float = 0.7) -> None:
        self.rng = np.random.default_rng(seed)
        self.greedy_share = greedy_share
        self.seen: list[np.ndarray] = []
        self.said: list[tuple[np.ndarray, np.ndarray]] = []

    def __call__(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.seen.append(obs.numpy().copy())
        action = self.rng.integers(0, 3, (len(obs), 4))
        greedy = np.where(
            self.rng.random(action.shape) < self.greedy_share, action, self.rng.integers(0, 3, action.shape)
        )
        self.said.append((action, greedy))
        return torch.from_numpy(action), torch.from_numpy(greedy)


# --- The oracle -------------------------------------------------------------------------------------------------------


class Account:
    """One account of the batch as `FoxES`; episodes start where the game's generator says for its number."""

    def __init__(self, market, number: int, settings: dict[str, Any]) -> None:
        self.market, self.number = market, number
        self.mirror_prob = settings["mirror_prob"]
        self.starts = game_of(market, settings).starts(market)
        self.envs = [FoxES(market, **{**settings, "mirror_prob": p}) for p in (0.0, 1.0)]
        self.episode = 0
        self.reset()

    def reset(self) -> None:
        index, self.mirrored = dynamics.draw_episode(
            SEED, self.number, self.episode, len(self.starts), self.mirror_prob
        )
        self.episode += 1
        self.env = self.envs[self.mirrored]
        self.obs, self.info = self.env.reset(seed=0, options={"start": int(self.starts[index])})
        self.done = False
        self.open: list[dict[str, Any]] = []

    @property
    def bar(self) -> int:
        return int(np.searchsorted(self.market.ts, self.info["ts"]))

    def state(self) -> tuple[float, ...]:
        """Bar, exposure as in the original market, unrealized, age, drawdown."""
        return (self.bar, self.info["position"] / self.env.game.max_contracts, *map(float, self.obs[-5:-2]))

    def frame_position(self) -> int:
        return -self.info["position"] if self.mirrored else self.info["position"]

    def live(self, action: np.ndarray) -> list[bool]:
        direction, magnitude = int(action[0]), int(action[1])
        sends = target_position(direction, magnitude, self.env.game.max_contracts) != self.frame_position()
        return [True, direction != FLAT, sends, sends]

    def flags(self, action: np.ndarray, greedy: np.ndarray) -> tuple[int, ...]:
        """Mirrored, and for each branch: can it act, and are all others that can act greedy?"""
        live = self.live(action)
        bits = [
            live[k] and all(action[i] == greedy[i] for i in range(4) if i != k and live[i])
            for k in range(4)
        ]  # fmt: skip
        return (self.mirrored, *map(int, bits))

    def row(self, window: dict[str, Any], terminated: bool, gamma: float) -> tuple[float, ...]:
        rewards = window["rewards"]
        total = sum(gamma**j * r for j, r in enumerate(rewards))
        discount = 0.0 if terminated else gamma ** len(rewards)
        return (*window["state"], *window["action"], *window["flags"], total, discount, *self.state())


def slow_transitions(market, actor: Actor, num_envs: int, n_step: int, settings: dict) -> list[tuple[list, list, set]]:
    """For each step what finishes before it, what finishes in it, and the kinds of ends that there were."""
    settings = {**UGLY, **settings}
    accounts = [Account(market, number, settings) for number in range(num_envs)]
    steps = []
    for seen, (actions, greedy) in zip(actor.seen, actor.said, strict=True):
        at_decision, at_end, kinds = [], [], set()
        for i, account in enumerate(accounts):
            np.testing.assert_array_equal(seen[i], account.obs)
            if account.done:
                account.reset()
                continue
            if account.info["can_trade"]:
                if len(account.open) == n_step:
                    at_decision.append(account.row(account.open.pop(0), False, GAMMA))
                account.open.append({
                    "state": account.state(), "action": actions[i].tolist(),
                    "flags": account.flags(actions[i], greedy[i]), "rewards": [],
                })  # fmt: skip
            account.obs, reward, terminated, truncated, account.info = account.env.step(actions[i])
            for window in account.open:
                window["rewards"].append(reward)
            account.done = terminated or truncated
            if account.done:
                free = account.info["can_trade"]
                kinds.add("terminated" if terminated else "truncated free" if free else "truncated locked")
                if terminated or free:
                    at_end += [account.row(window, terminated, GAMMA) for window in account.open]
                account.open = []
        steps.append((at_decision, at_end, kinds))
    return steps


def rows(transitions: dict[str, torch.Tensor]) -> list[tuple[float, ...]]:
    if not transitions:
        return []
    mirrored, live = unpack_flags(transitions["flags"])
    columns = [
        transitions["bar"][:, None], transitions["position_state"], transitions["action"], mirrored[:, None], live,
        transitions["reward"][:, None], transitions["discount"][:, None], transitions["next_bar"][:, None],
        transitions["next_position_state"],
    ]  # fmt: skip
    return [tuple(row) for row in torch.cat([c.double() for c in columns], 1).tolist()]


def assert_same_rows(mine: list, theirs: list) -> None:
    assert len(mine) == len(theirs)
    if mine:
        # The exposure is a float32 in transitions.
        np.testing.assert_allclose(np.array(sorted(mine)), np.array(sorted(theirs)), rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(
    ("n_step", "settings"),
    [
        (1, {}),
        (3, {}),
        (3, {"min_hold_bars": 0}),
        (1, {"window": 2, "depth_contracts": 1, "shaping": {"drawdown": 0.5}}),
    ],
)
def test_every_transition_is_that_of_accounts_played_one_by_one(market, n_step: int, settings: dict) -> None:
    num_envs, actor = 7, Actor()
    played = collector(market, num_envs, n_step=n_step, **settings)
    finished = [played.step(actor)[0] for _ in range(120)]
    expected = slow_transitions(market, actor, num_envs, n_step, settings)
    count, kinds = 0, set()
    for (before, after), (at_decision, at_end, kind) in zip(finished, expected, strict=True):
        assert_same_rows(rows(before), at_decision)
        assert_same_rows(rows(after), at_end)
        count += len(at_decision) + len(at_end)
        kinds |= kind
    assert count > 100
    assert kinds >= ({"terminated", "truncated free"} if settings.get("min_hold_bars") == 0 else {
        "terminated", "truncated free", "truncated locked"
    })  # fmt: skip


def test_the_reward_spans_the_lock_and_the_discount_counts_its_bars() -> None:
    # Closes 100, 101, 103, 103; half a spread of .5, no commission, one contract, held for three bars.
    prices = [(100, 100, 100, 100), (100, 101, 100, 101), (101, 103, 101, 103), (103, 103, 103, 103)] + [(103,) * 4] * 4
    market = make_market(make_bars(prices))
    settings = {"max_contracts": 1, "min_hold_bars": 3, "spread_ticks": 4.0, "commission_usd_per_side": 0.0}
    game = game_of(market, {**settings, "episode_bars": 7})
    played = Collector(market, game, 1, gamma=0.5, n_step=1, counterfactual_share=0.0, device="cpu", seed=0)
    long = torch.tensor([[LONG, 2, 0, 1]])
    found = [played.step(lambda obs: (long, long))[0] for _ in range(4)]
    assert [len(rows(before)) + len(rows(after)) for before, after in found] == [0, 0, 0, 1]
    (transition,) = rows(found[3][0])
    # Bought at 100 + .5: 101 - 100 - .5, then 103 - 101, then nothing, as returns on the closes 100, 101 and 103.
    assert transition[14] == pytest.approx(0.5 / 100 + 0.5 * 2 / 101)
    assert transition[15] == 0.5**3
    assert transition[0] == 0
    assert transition[16] == 3
    assert transition[10:14] == (1, 1, 1, 1)


# --- What another action would have earned ----------------------------------------------------------------------------


def test_counterfactuals_are_what_a_copied_account_earns(market) -> None:
    num_envs, actor, settings = 7, Actor(), dict(UGLY)
    played = collector(market, num_envs, share=0.6)  # 4 copies
    accounts = [Account(market, number, settings) for number in range(num_envs)]
    seen_branches, spans, found, dropped, mirrored, terminal = set(), set(), 0, 0, 0, 0
    for _ in range(90):
        parts, _ = played.step(actor)
        actions, greedy = actor.said[-1]
        deciding = [a for a in accounts if not a.done and a.info["can_trade"]]
        made = rows(parts[1])
        assert len(made) <= min(4, len(deciding))
        used = set()
        for row in made:
            state, action, flags = row[:5], np.array(row[5:9], int), [int(x) for x in row[9:14]]
            matches = [
                a for a in deciding
                if np.allclose(a.state(), state, rtol=1e-6) and a.mirrored == flags[0]
                and (action != greedy[a.number]).sum() == 1 and a.number not in used
            ]  # fmt: skip
            assert matches
            account = matches[0]
            used.add(account.number)
            (branch,) = np.flatnonzero(action != greedy[account.number])
            assert account.live(action)[branch]
            assert flags[1:] == [int(k == branch) for k in range(4)]
            copied = copy.deepcopy(account)
            rewards, terminated = [], False
            while True:
                copied.obs, reward, terminated, truncated, copied.info = copied.env.step(action)
                rewards.append(reward)
                if terminated or copied.info["can_trade"]:
                    break
                assert not truncated
            window = {"state": state, "action": action, "flags": flags, "rewards": rewards}
            np.testing.assert_allclose(row, copied.row(window, terminated, GAMMA), rtol=1e-6, atol=1e-12)
            seen_branches.add((branch, (action[branch] - greedy[account.number][branch]) % 3))
            spans.add(len(rewards))
            found += 1
            mirrored += flags[0]
            terminal += terminated
        dropped += min(4, len(deciding)) - len(made)
        for account in accounts:
            if account.done:
                account.reset()
            else:
                account.obs, _, terminated, truncated, account.info = account.env.step(actions[account.number])
                account.done = terminated or truncated
    assert found > 60
    assert dropped > 0
    assert mirrored > 0
    assert terminal > 0
    assert seen_branches == {(branch, change) for branch in range(4) for change in (1, 2)}
    assert {1, 4} <= spans <= {1, 2, 3, 4}


def calm_market(length: int = 300):
    return make_market(make_bars([(4000, 4001, 3999, 4000)] * length))


def all_live(obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Short Full is played; greedy is Long Half: whatever one branch is changed to, an order is sent."""
    return torch.tensor([[0, 2, 0, 1]]).expand(len(obs), -1), torch.tensor([[2, 1, 0, 1]]).expand(len(obs), -1)


@pytest.mark.parametrize(("num_envs", "share"), [(7, 0.3), (10, 0.25), (16, 1.0), (9, 0.0), (3, 0.1)])
def test_r34_the_number_of_counterfactuals_is_that_of_the_config(num_envs: int, share: float) -> None:
    # One bar of hold: every account decides at every bar. The first bar is left out: a flat account is not yet short.
    played = collector(
        calm_market(), num_envs, share=share, min_hold_bars=1, mirror_prob=0.0, episode_bars=50,
        initial_equity_usd=1e6,
    )  # fmt: skip
    steps = 40
    made = [played.step(all_live)[0] for _ in range(steps)]
    counts = [len(rows(parts[1])) if len(parts) == 3 else 0 for parts in made]
    assert counts[1:] == [round(share * num_envs)] * (steps - 1)


def test_counterfactuals_are_of_deciding_accounts_only() -> None:
    played = collector(
        calm_market(), 8, share=1.0, min_hold_bars=5, mirror_prob=0.0, episode_bars=50, initial_equity_usd=1e6
    )
    greedy = torch.tensor([[2, 1, 0, 1]]).expand(8, -1)
    sizes = [torch.tensor([[0, size, 0, 1]]).expand(8, -1) for size in (2, 1)]
    # A change of size every fifth bar: in between nobody decides, and what is said does not matter.
    counts = [len(rows(played.step(lambda obs, t=t: (sizes[t // 5 % 2], greedy))[0][1])) for t in range(20)]
    assert counts == [8 if t % 5 == 0 else 0 for t in range(20)]


def test_counterfactuals_leave_the_accounts_alone(market) -> None:
    plain, with_copies = collector(market, 6), collector(market, 6, share=0.5)
    one, other = Actor(), Actor()
    for _ in range(60):
        a, b = plain.step(one)[0], with_copies.step(other)[0]
        for x, y in zip(a, (b[0], b[-1]), strict=True):
            assert rows(x) == rows(y)


# --- Full-exposure returns --------------------------------------------------------------------------------------------


def rolled_market(gap: float):
    first, second = make_bars([(100,) * 4, (102,) * 4, (101,) * 4]), make_bars(
        [(140,) * 4, (143,) * 4, (150,) * 4], start=MORNING + 15 * MINUTES
    )  # fmt: skip
    return make_market([Segment("A", first, 0, 0.0), Segment("B", second, 0, gap)])


def test_full_exposure_returns_by_hand() -> None:
    # 100, 102, 101 | 140, 143, 150; a measured gap of 38 leaves 140 - 101 - 38 = 1 of the 39 points.
    measured = full_exposure_returns(rolled_market(38.0))
    np.testing.assert_allclose(measured[:-1], [2 / 100, 1 / 102, 1 / 101, 3 / 140, 7 / 143])
    assert math.isnan(measured[-1])
    unmeasured = full_exposure_returns(rolled_market(math.nan))
    np.testing.assert_allclose(unmeasured[:-1], [2 / 100, 1 / 102, math.nan, 3 / 140, 7 / 143])


def test_returns_are_those_of_the_bars_played_and_know_no_gap() -> None:
    market = rolled_market(math.nan)
    played = collector(market, 3, episode_bars=5, min_hold_bars=1, mirror_prob=0.0, initial_equity_usd=1e6)
    returns = [played.step(Actor())[1].tolist() for _ in range(6)]
    # All start at bar 0. In the third bar an unmeasured roll leaves nothing to tell; in the sixth nobody plays.
    for found, expected in zip(returns, (2 / 100, 1 / 102, None, 3 / 140, 7 / 143, None), strict=True):
        assert found == pytest.approx([] if expected is None else [expected] * 3)


# --- State ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_step", [1, 3])
def test_a_restored_collector_goes_on_bit_for_bit(market, n_step: int) -> None:
    script = Actor()
    first = collector(market, 6, n_step=n_step, share=0.5)
    for _ in range(23):
        first.step(script)
    state = first.state_dict()
    after = copy.deepcopy(script), copy.deepcopy(script)
    kept = {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in state.items()}
    second = collector(market, 6, n_step=n_step, share=0.5)
    for _ in range(5):
        second.step(Actor(seed=99))
    second.load_state_dict(state)
    for _ in range(40):
        (mine, a), (theirs, b) = first.step(after[0]), second.step(after[1])
        assert torch.equal(a, b)
        assert [list(part) for part in mine] == [list(part) for part in theirs]
        for x, y in zip(mine, theirs, strict=True):
            assert all(torch.equal(x[name], y[name]) for name in x)
    assert np.array_equal(np.stack(after[0].seen), np.stack(after[1].seen))
    for name, value in state.items():  # the state was a copy
        assert torch.equal(value, kept[name]) if isinstance(value, torch.Tensor) else value == kept[name]


def test_a_state_of_another_kind_is_refused(market) -> None:
    played = collector(market, 3)
    with pytest.raises(ValueError, match="schema 7, expected 1"):
        played.load_state_dict(played.state_dict() | {"schema": 7})
    with pytest.raises(ValueError, match="shape"):
        played.load_state_dict(collector(market, 4).state_dict())


def test_sends_order_by_hand() -> None:
    # 4 contracts: exposures are -1 -2 -4 | 0 0 0 | 1 2 4.
    sends = sends_order(torch.tensor([0, 2, 3]), 4)
    assert sends.tolist() == [
        [True, True, True, False, False, False, True, True, True],
        [True, True, True, True, True, True, True, False, True],
        [True] * 9,
    ]
