"""The game through Gymnasium, its vector interface and TorchRL: one game behind all of them."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import subprocess
import sys
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode
from gymnasium.wrappers.vector import NormalizeObservation, RecordEpisodeStatistics
from stable_baselines3.common.env_checker import check_env as sb3_check_env
from torchrl.collectors import Collector
from torchrl.envs.utils import check_env_specs

import fox_env
from fox_env import FoxES, FoxESTorchEnv, FoxESVectorEnv, dynamics
from fox_env.actions import parse_action_tensor, parse_actions
from fox_env.data.features import ODD, Feature
from fox_env.data.rolls import Segment
from tests.env.games import AFTERNOON, MINUTES, MORNING, make_bars, make_market, play, random_market

IDS = ("FoxES-v0", "FoxES-Discrete-v0", "fox_env:FoxES-v0", "fox_env:FoxES-Discrete-v0")
FLAT, LONG, SHORT = 1, 2, 0
# Accounts that start with 20,000 dollars meet margin calls, so that they end at different times.
UGLY = {"episode_bars": 25, "min_hold_bars": 2, "initial_equity_usd": 20_000.0, "mirror_prob": 0.5}
N = 6


@pytest.fixture(scope="module")
def market():
    return random_market(np.random.default_rng(5))


@pytest.fixture(scope="module")
def actions():
    return np.random.default_rng(6).integers(0, 3, (150, N, 4))


@pytest.fixture
def no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --- The checkers of the libraries ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("id_", IDS)
def test_checkers_of_gymnasium_and_stable_baselines3(id_, window, market):
    env = gym.make(id_, market=market, episode_bars=20, window=window)
    check_env(env.unwrapped)
    sb3_check_env(env.unwrapped)


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("num_envs", [1, 3])
def test_checker_of_torchrl(num_envs, market):
    check_env_specs(FoxESTorchEnv(market, num_envs, seed=0, episode_bars=20))


@pytest.mark.usefixtures("no_warnings")
@pytest.mark.parametrize("id_", IDS)
def test_make_vec_gives_the_native_environment(id_, market):
    env = gym.make_vec(id_, num_envs=3, vectorization_mode="vector_entry_point", market=market, episode_bars=5)
    assert isinstance(env.unwrapped, FoxESVectorEnv)
    assert env.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    observation, infos = env.reset(seed=0)
    assert observation in env.observation_space
    assert observation.dtype == np.float32
    assert set(infos) == {f"{mark}{name}" for name in infos if name[0] != "_" for mark in ("", "_")}
    for _ in range(12):
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        assert observation in env.observation_space
        assert (reward.shape, reward.dtype) == ((3,), np.float64)
        assert (terminated.shape, terminated.dtype) == (truncated.shape, truncated.dtype) == ((3,), bool)
    env.close()


def test_the_discrete_game_is_the_same_game(market, actions):
    plain = FoxESVectorEnv(N, market, **UGLY)
    discrete = fox_env.vector_env.FoxESDiscreteVectorEnv(N, market, **UGLY)
    single, other = FoxES(market, **UGLY), fox_env.FoxESDiscrete(market, **UGLY)
    np.testing.assert_array_equal(plain.reset(seed=2)[0], discrete.reset(seed=2)[0])
    np.testing.assert_array_equal(single.reset(seed=2)[0], other.reset(seed=2)[0])
    weights = np.array([27, 9, 3, 1])
    for action in actions[:20]:
        for one, two in zip(plain.step(action)[:4], discrete.step(action @ weights)[:4], strict=True):
            np.testing.assert_array_equal(one, two)
        results = single.step(action[0]), other.step(int(action[0] @ weights))
        np.testing.assert_array_equal(results[0][0], results[1][0])
        assert results[0][1:4] == results[1][1:4]
        if results[0][2] or results[0][3]:
            break


# --- Autoreset --------------------------------------------------------------------------------------------------------


def twin(market, mode, **settings):
    env = FoxESVectorEnv(N, market, autoreset_mode=mode, **{**UGLY, **settings})
    return env, env.reset(seed=9)[0]


def test_same_step_returns_the_terminal_observation(market, actions):
    env, first = twin(market, AutoresetMode.SAME_STEP)
    other, same = twin(market, AutoresetMode.DISABLED)
    np.testing.assert_array_equal(first, same)
    reasons = set()
    for action in actions:
        observation, reward, terminated, truncated, infos = env.step(action)
        last, *results, last_infos = other.step(action)
        for one, two in zip((reward, terminated, truncated), results, strict=True):
            np.testing.assert_array_equal(one, two)
        done = terminated | truncated
        assert ("final_obs" in infos) == done.any()
        restarted = other.reset(options={"reset_mask": done}) if done.any() else (last, last_infos)
        np.testing.assert_array_equal(observation, restarted[0])
        for name in ("ts", "position", "equity_usd", "can_trade"):
            np.testing.assert_array_equal(infos[name], restarted[1][name])
        if done.any():
            np.testing.assert_array_equal(infos["_final_obs"], done)
            np.testing.assert_array_equal(infos["_final_info"], done)
            for i in np.flatnonzero(done):
                np.testing.assert_array_equal(infos["final_obs"][i], last[i])
                for name in ("ts", "position", "equity_usd", "pnl_points", "forced", "end_reason"):
                    assert infos["final_info"][name][i] == last_infos[name][i]
            reasons |= set(last_infos["end_reason"][done])
    assert reasons == {"margin_call", "episode_bars"}


def test_next_step_pays_nothing_for_the_reset_and_ignores_its_action(market, actions):
    env, first = twin(market, AutoresetMode.NEXT_STEP)
    odd, _ = twin(market, AutoresetMode.NEXT_STEP)
    other, same = twin(market, AutoresetMode.DISABLED)
    np.testing.assert_array_equal(first, same)
    done = np.zeros(N, bool)
    resets = 0
    for action in actions:
        observation, reward, terminated, truncated, infos = env.step(action)
        changed = np.where(done[:, None], 2 - action, action)
        np.testing.assert_array_equal(odd.step(changed)[0], observation)
        if done.any():
            # The twin restarts by hand; its other accounts play on.
            assert (reward[done] == 0).all()
            assert not (terminated | truncated)[done].any()
            assert (infos["position"][done] == 0).all()
            assert (infos["equity_usd"][done] == 20_000.0).all()
            np.testing.assert_array_equal(observation[done], other.reset(options={"reset_mask": done})[0][done])
            resets += done.sum()
            # Put the twin's restarted accounts where they are after its step: at the start again.
            kept = other.engine.state_dict()
        expected = other.step(action)
        if done.any():
            for name in ("count", "money"):
                getattr(other.engine, name)[:, done] = kept[name][:, done]
        for one, two in zip((observation, reward, terminated, truncated), expected[:4], strict=True):
            np.testing.assert_array_equal(one[~done], two[~done])
        done = terminated | truncated
    assert resets > 10


def test_without_autoreset_a_finished_account_must_be_reset(market):
    env = FoxESVectorEnv(2, market, autoreset_mode=AutoresetMode.DISABLED, episode_bars=1)
    with pytest.raises(RuntimeError, match=r"before reset\(\)"):
        env.step([[1, 0, 0, 0]] * 2)
    env.reset(seed=0)
    _, _, _, truncated, infos = env.step([[1, 0, 0, 0]] * 2)
    assert truncated.all()
    assert infos["end_reason"].tolist() == ["episode_bars"] * 2
    env.reset(options={"reset_mask": np.array([True, False])})
    with pytest.raises(RuntimeError, match="account 1 has finished"):
        env.step([[1, 0, 0, 0]] * 2)


# --- Resets and seeds -------------------------------------------------------------------------------------------------


def test_a_partial_reset_leaves_the_others_alone_and_is_deterministic(market, actions):
    mask = np.array([True, False, False, True, False, False])

    def run(partial):
        env = FoxESVectorEnv(N, market, mirror_prob=0.5, episode_bars=60)
        seen = [env.reset(seed=4)[0]]
        for t, action in enumerate(actions[:50]):
            if t == 20 and partial:
                seen[-1] = env.reset(options={"reset_mask": mask})[0]
            seen.append(env.step(action)[0])
        return np.array(seen)

    one, two, whole = run(True), run(True), run(False)
    np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(one[:, ~mask], whole[:, ~mask])
    np.testing.assert_array_equal(one[:20], whole[:20])
    assert not np.array_equal(one[20:, mask], whole[20:, mask])
    # The restarted accounts are flat, unlocked and at their initial equity.
    np.testing.assert_array_equal(one[20, mask, -6:-1], [[0.0, 0.0, 2.0, 0.0, 1.0]] * 2)


def test_a_partial_reset_reports_what_the_others_hold(market):
    env = FoxESVectorEnv(2, market, episode_bars=60)
    env.reset(seed=4)
    infos = env.step([[LONG, 2, 0, 1], [SHORT, 2, 0, 1]])[4]
    _, after = env.reset(options={"reset_mask": np.array([True, False])})
    assert after["position"].tolist() == [0, -4]
    assert after["equity_usd"][0] == 200_000.0
    for name in ("ts", "equity_usd", "pnl_points", "filled", "fill_price"):
        assert after[name][1] == infos[name][1]


def test_seeds_and_starts_of_single_accounts(market):
    env = FoxESVectorEnv(3, market, episode_bars=20)
    first, _ = env.reset(seed=[7, 7, 8])
    np.testing.assert_array_equal(first[0], first[1])
    assert not np.array_equal(first[0], first[2])
    again, _ = env.reset(seed=[7, None, 8])
    np.testing.assert_array_equal(again[[0, 2]], first[[0, 2]])
    # Without a seed account 1 goes on to the second episode of seed 7, which a single environment plays as well.
    single = FoxES(market, episode_bars=20)
    np.testing.assert_array_equal(single.reset(seed=7)[0], first[1])
    np.testing.assert_array_equal(single.reset()[0], again[1])
    _, infos = env.reset(options={"start": [5, 6, 7]})
    np.testing.assert_array_equal(infos["ts"], market.ts[[5, 6, 7]])
    _, infos = env.reset(options={"start": 9})
    np.testing.assert_array_equal(infos["ts"], market.ts[[9, 9, 9]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": [1, 2]}, "seed has 2 entries, expected num_envs = 3"),
        ({"options": {"stop": 3}}, "option 'stop' is unknown"),
        ({"options": {"start": 0}}, "start is 0, expected a decision bar"),
        ({"options": {"start": 10_000}}, "start is 10000"),
        ({"options": {"reset_mask": [True, False, False]}}, "reset_mask is"),
        ({"options": {"reset_mask": np.ones(2, bool)}}, "reset_mask is"),
        ({"options": {"reset_mask": np.array([True, False, True])}}, "leaves out accounts that have never been reset"),
        ({"seed": None, "options": {"reset_mask": np.zeros(3, bool)}}, "leaves out accounts"),
        ({"options": {"start": 7.9}}, "start is 7.9, expected a decision bar"),
        ({"options": {"start": "7"}}, "start is '7', expected a decision bar"),
        ({"options": {"start": [7, 8, 9.5]}}, "start is 7.0, expected a decision bar"),
        ({"options": {"start": [7, 8]}}, r"start has shape \(2,\)"),
        ({"seed": -1}, r"seed is -1, expected an integer in \[0, 2\*\*63\)"),
        ({"seed": 1 << 63}, "seed is 9223372036854775808, expected"),
        ({"seed": 7.5}, "seed is 7.5"),
        ({"seed": [1, -2, 3]}, "seed is -2"),
        ({"seed": [1, None, 1 << 63]}, "seed is 9223372036854775808"),
    ],
)
def test_bad_resets_are_refused(arguments, message, market):
    with pytest.raises(ValueError, match=message):
        FoxESVectorEnv(3, market, episode_bars=20).reset(**{"seed": 0, **arguments})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seed": -1}, r"seed is -1, expected an integer in \[0, 2\*\*63\)"),
        ({"seed": 1 << 63}, "seed is 9223372036854775808, expected"),
        ({"seed": True}, "seed is True"),
        ({"options": {"start": 7.9}}, "start is 7.9, expected a decision bar"),
        ({"options": {"start": "7"}}, "start is '7', expected a decision bar"),
        ({"options": {"start": [7, 8]}}, r"start is \[7, 8\], expected one bar"),
    ],
)
def test_bad_resets_of_one_account_are_refused(arguments, message, market):
    with pytest.raises(ValueError, match=message):
        FoxES(market, episode_bars=20).reset(**arguments)


def test_the_largest_seed_is_one_game(market):
    seed = (1 << 63) - 1
    one, _ = FoxES(market, episode_bars=20).reset(seed=seed)
    many, _ = FoxESVectorEnv(2, market, episode_bars=20).reset(seed=[seed, np.int64(seed)])
    np.testing.assert_array_equal(many, [one, one])


def test_missing_seeds_are_drawn_at_the_first_reset(market):
    """Accounts without a seed play games of their own, another one in each environment."""
    envs = [FoxESVectorEnv(3, market, episode_bars=20) for _ in range(2)]
    for env in envs:
        env.reset(seed=[None, 7, None])
    one, two = (env.engine.keys for env in envs)
    assert one[0, 1] == two[0, 1] == 7
    assert len({*one[0].tolist(), *two[0].tolist()}) == 5
    assert (one[1] == 0).all()
    kept = one.copy()
    envs[0].reset(seed=[None, None, 9])
    np.testing.assert_array_equal(envs[0].engine.keys[0], [*kept[0, :2], 9])


def test_a_refused_first_reset_is_none(market):
    env = FoxESVectorEnv(2, market, episode_bars=20)
    with pytest.raises(ValueError, match="start"):
        env.reset(seed=1, options={"start": -1})
    with pytest.raises(RuntimeError, match=r"before reset\(\)"):
        env.step([[1, 0, 0, 0]] * 2)


# --- Wrappers, copies, fresh processes --------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP])
def test_record_episode_statistics(mode, market, actions):
    plain = FoxESVectorEnv(N, market, autoreset_mode=mode, **UGLY)
    env = RecordEpisodeStatistics(FoxESVectorEnv(N, market, autoreset_mode=mode, **UGLY))
    plain.reset(seed=3)
    env.reset(seed=3)
    total, length, done, checked = np.zeros(N), np.zeros(N, int), np.zeros(N, bool), 0
    for action in actions:
        _, reward, terminated, truncated, _ = plain.step(action)
        infos = env.step(action)[4]
        counted = ~done if mode is AutoresetMode.NEXT_STEP else np.ones(N, bool)
        total, length = np.where(counted, total + reward, 0.0), np.where(counted, length + 1, 0)
        done = terminated | truncated
        for i in np.flatnonzero(done):
            # Where the episode's infos go in SAME_STEP is the wrapper's choice.
            where = infos if "episode" in infos else infos["final_info"]
            assert where["episode"]["l"][i] == length[i]
            assert where["episode"]["r"][i] == pytest.approx(total[i], rel=1e-5, abs=1e-9)
            checked += 1
        if mode is AutoresetMode.SAME_STEP:
            total[done], length[done] = 0.0, 0
    assert checked > 10


def test_normalize_observation(market, actions):
    env = NormalizeObservation(FoxESVectorEnv(N, market, **UGLY))
    env.reset(seed=3)
    seen = np.array([env.step(action)[0] for action in actions])
    assert np.isfinite(seen).all()
    assert np.abs(seen[50:].mean((0, 1))).max() < 1.0
    assert env.env.step(actions[0])[0] in env.env.observation_space


@pytest.mark.parametrize("how", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"])
@pytest.mark.parametrize("make", [FoxES, lambda market, **kw: FoxESVectorEnv(N, market, **kw)], ids=["one", "many"])
def test_a_copy_goes_on_by_itself(make, how, market, actions):
    env = make(market, **{**UGLY, "initial_equity_usd": 1e6})
    pick = (lambda a: a[0]) if isinstance(env, FoxES) else (lambda a: a)
    env.reset(seed=1)
    for action in actions[:10]:
        env.step(pick(action))
    other = how(env)
    expected = [other.step(pick(a))[:2] for a in actions[10:20]]
    for (observation, reward), action in zip(expected, actions[10:20], strict=True):
        mine = env.step(pick(action))
        np.testing.assert_array_equal(observation, mine[0])
        np.testing.assert_array_equal(reward, mine[1])


def test_a_fresh_process_needs_no_heavy_library():
    code = """
import sys
import fox_env
heavy = {"torch", "torchrl", "tensordict", "databento", "numba"}
# TA-Lib, which the features need, imports pandas by itself.
late = heavy | {"pandas", "talib"}
assert not late & set(sys.modules), late & set(sys.modules)
import gymnasium as gym
env = gym.make("fox_env:FoxES-v0")
assert len(env.unwrapped.market) == 70_000
env.reset(seed=0)
env.step(env.action_space.sample())
assert not heavy & set(sys.modules), heavy & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("package", "module", "name"), [("fox_env", "gym_env", "FoxES"), ("fox_agent", "agent", "Agent")]
)
@pytest.mark.parametrize("error", ["AttributeError", "ImportError", "RuntimeError"])
def test_what_fails_while_loading_is_shown(package, module, name, error):
    """Python says of an AttributeError in `from package import name` that it cannot import the name."""
    code = f"""
import importlib, {package}
def fails(name): raise {error}("numpy has no attribute row_stack")
importlib.import_module = fails
try:
    from {package} import {name}
except Exception as error:
    assert "numpy has no attribute row_stack" in str(error), error
    assert {error!r} in (type(error).__name__, type(error.__cause__).__name__)
else:
    raise SystemExit("nothing was raised")
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_gymnasium_imports_the_package_by_itself():
    code = """
import gymnasium as gym
env = gym.make("fox_env:FoxES-Discrete-v0", episode_bars=5)
env.reset(seed=0)
assert [env.step(0)[3] for _ in range(5)] == [False] * 4 + [True]
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_batch_leaves_torchs_number_of_threads_alone():
    code = """
import numpy as np, torch
import fox_env
torch.set_num_threads(3)
market = fox_env.synthetic_market("planted", 3_000)
for size in (64, 1024):
    env = fox_env.FoxESVectorEnv(size, market)
    env.reset(seed=0)
    env.step(np.ones((size, 4), int))
    assert torch.get_num_threads() == 3, torch.get_num_threads()
"""
    # A second process loads the kernels from the cache, and starts numba's threads at another time.
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# --- Masks ------------------------------------------------------------------------------------------------------------


def branches(mask):
    """The unmasked levels of each branch."""
    return [np.flatnonzero(row).tolist() for row in mask.reshape(4, 3)]


@pytest.mark.parametrize("mirrored", [0, 1])
@pytest.mark.parametrize(
    ("action", "shown"),
    [
        ((LONG, 1, 0, 1), [[LONG], [1], [0], [1]]),
        ((SHORT, 2, 0, 1), [[SHORT], [2], [0], [1]]),
        ((LONG, 0, 0, 1), [[LONG], [0], [0], [1]]),
    ],
)
def test_masks(action, shown, mirrored):
    """All actions while unlocked; while locked the one that names the position, in the agent's terms."""
    market = make_market(make_bars([(4000.0,) * 4] * 12))
    settings = {"episode_bars": 0, "mirror_prob": float(mirrored), "min_hold_bars": 3}
    index = int(np.array(action) @ [27, 9, 3, 1])
    named = np.ravel([[level in levels for level in range(3)] for levels in shown])
    for env, chosen in (
        (FoxES(market, **settings), np.array(action)),
        (fox_env.FoxESDiscrete(market, **settings), index),
    ):
        env.reset(seed=0, options={"start": 0})
        assert env.action_masks().dtype == bool
        assert env.action_masks().all()
        sizes = [env.action_masks().size]
        for _ in range(3):
            *_, info = env.step(chosen)
            sizes.append(int(env.action_masks().sum()))
            if not info["can_trade"]:
                mask = env.action_masks()
                if isinstance(env, fox_env.FoxESDiscrete):
                    assert np.flatnonzero(mask).tolist() == [index]
                else:
                    assert branches(mask) == shown
        # Filled at age 1, locked at 1 and 2, free at 3.
        assert sizes == ([81, 1, 1, 81] if env.discrete else [12, 4, 4, 12])
    assert (info["position"] > 0) == ((action[0] == LONG) != bool(mirrored))

    many = FoxESVectorEnv(2, market, **settings)
    discrete = fox_env.vector_env.FoxESDiscreteVectorEnv(2, market, **settings)
    for env, chosen in ((many, [action, (FLAT, 2, 0, 1)]), (discrete, [index, (FLAT * 3 + 2) * 9 + 1])):
        env.reset(seed=0, options={"start": 0})
        assert env.action_masks().all()
        env.step(chosen)
        mask = env.action_masks()
        assert mask.shape == (2, 81 if env.discrete else 12)
        assert mask[1].all()  # stayed flat: nothing changed, nothing locked
        assert np.flatnonzero(mask[0]).tolist() == ([index] if env.discrete else np.flatnonzero(named).tolist())


def test_mask_of_a_locked_flat_account():
    market = make_market(make_bars([(4000.0,) * 4] * 12))
    env = FoxES(market, episode_bars=0, min_hold_bars=2)
    env.reset(seed=0, options={"start": 0})
    for action in ((LONG, 2, 0, 1), (LONG, 2, 0, 1), (FLAT, 0, 0, 1)):
        *_, info = env.step(np.array(action))
    assert (info["position"], info["can_trade"]) == (0, False)
    assert branches(env.action_masks())[0] == [FLAT]
    assert env.action_masks().sum() == 4


@pytest.mark.parametrize("discrete", [False, True])
def test_masks_of_many_accounts_are_those_of_single_ones(discrete, market, actions):
    game = {"episode_bars": 100, "mirror_prob": 0.5, "min_hold_bars": 3, "max_contracts": 7}
    kind = fox_env.vector_env.FoxESDiscreteVectorEnv if discrete else FoxESVectorEnv
    many = kind(N, market, **game)
    singles = [(fox_env.FoxESDiscrete if discrete else FoxES)(market, **game) for _ in range(N)]
    many.reset(seed=list(range(N)))
    for i, single in enumerate(singles):
        single.reset(seed=i)
    assert len({single._mirrored for single in singles}) == 2
    locked = set()
    for action in actions[:90]:
        chosen = action @ [27, 9, 3, 1] if discrete else action
        many.step(chosen)
        for i, single in enumerate(singles):
            single.step(chosen[i])
        masks = many.action_masks()
        np.testing.assert_array_equal(masks, [single.action_masks() for single in singles])
        named = masks.sum(1) == (1 if discrete else 4)
        locked |= {int(single._position) for single, one in zip(singles, named, strict=True) if one}
        masks[:] = False  # the caller's own
    assert locked >= {-7, -4, -2, 0, 2, 4, 7}


# --- TorchRL ----------------------------------------------------------------------------------------------------------


class Script(torch.nn.Module):
    """Plays given actions, step after step."""

    def __init__(self, actions):
        super().__init__()
        self.actions, self.step = torch.as_tensor(actions), 0

    def forward(self, tensordict):
        tensordict["action"] = self.actions[self.step]
        self.step += 1
        return tensordict


def test_torchrl_plays_what_the_vector_environment_plays(market, actions):
    """A rollout that restarts finished accounts on the way equals the vector environment's, account by account."""
    tenv = FoxESTorchEnv(market, N, seed=9, **UGLY)
    rollout = tenv.rollout(len(actions), Script(actions), break_when_any_done=False)
    env, observation = twin(market, AutoresetMode.DISABLED)
    equity, position, pnl, ended = np.full(N, 20_000.0), np.zeros(N), np.zeros(N), 0
    for t, action in enumerate(actions):
        now, then = rollout[:, t], rollout[:, t]["next"]
        # What an account that goes on was told after a step stands when others restart.
        np.testing.assert_array_equal(now["observation"], observation)
        np.testing.assert_array_equal(now["equity_usd"][:, 0], equity)
        np.testing.assert_array_equal(now["position"][:, 0], position)
        np.testing.assert_array_equal(now["pnl_points"][:, 0], pnl)
        np.testing.assert_array_equal(now["can_trade"][:, 0], observation[:, -2] == 1)
        observation, reward, terminated, truncated, infos = env.step(action)
        np.testing.assert_array_equal(then["observation"], observation)
        np.testing.assert_array_equal(then["reward"][:, 0], reward.astype(np.float32))
        np.testing.assert_array_equal(then["terminated"][:, 0], terminated)
        np.testing.assert_array_equal(then["truncated"][:, 0], truncated)
        np.testing.assert_array_equal(then["done"][:, 0], terminated | truncated)
        for name in ("pnl_points", "cost_points", "equity_usd", "position"):
            np.testing.assert_array_equal(then[name][:, 0], infos[name])
        equity, position, pnl = (infos[name].copy() for name in ("equity_usd", "position", "pnl_points"))
        done = terminated | truncated
        if done.any():
            observation, _ = env.reset(options={"reset_mask": done})
            equity[done], position[done], pnl[done] = 20_000.0, 0, 0.0
            ended += done.sum()
    assert ended > 10


def test_torchrl_seeds(market, actions):
    def play(seed, n=N):
        env = FoxESTorchEnv(market, n, seed=seed, **UGLY)
        return env.rollout(40, Script(actions[:, :n]), break_when_any_done=False)["next", "observation"]

    assert torch.equal(play(1), play(1))
    assert torch.equal(play(1)[:3], play(1, 3))
    assert not torch.equal(play(1), play(2))
    assert not torch.equal(play(1)[0], play(1)[1])
    state = torch.get_rng_state()
    FoxESTorchEnv(market, 1, episode_bars=20)
    assert torch.equal(torch.get_rng_state(), state)


def test_torchrl_refuses_bad_actions(market):
    env = FoxESTorchEnv(market, 2, seed=0, episode_bars=20)
    for level in (3, -1):
        with pytest.raises(ValueError, match="out of range"):
            env.step(env.reset().set("action", torch.full((2, 4), level)))
    for action in (torch.zeros(2, 2, dtype=torch.int64), torch.full((2, 4), 0.5), torch.ones(2, 4, dtype=torch.bool)):
        with pytest.raises(ValueError, match="action"):
            env.step(env.reset().set("action", action))


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("value", [0, 2, 1.0, True, -1, 3, 80, 81, 0.5, np.nan, np.inf, -1e30, 1j])
def test_tensors_and_arrays_are_checked_alike(value, discrete):
    """The check of tensors accepts what that of arrays accepts, and reads the same branches from it."""
    for shape in [(3,), (3, 4), (3, 3), (2, 4), (4,), (2,)]:
        tensor = torch.full(shape, value)
        try:
            expected = parse_actions(tensor.numpy(), 3, discrete)
        except ValueError:
            with pytest.raises(ValueError, match="action"):
                parse_action_tensor(tensor, 3, discrete)
        else:
            parsed = parse_action_tensor(tensor, 3, discrete)
            assert parsed.dtype == torch.int32
            assert parsed.is_contiguous()
            np.testing.assert_array_equal(parsed, expected)


def test_torchrl_finished_accounts_stay_finished(market):
    """Stepping a finished account by hand pays nothing and reports its end again, until it is reset."""
    env = FoxESTorchEnv(market, 2, seed=0, episode_bars=3)
    flat = torch.tensor([[FLAT, 0, 0, 0]] * 2)
    td = env.reset()
    for step in range(6):
        td = env.step(td.set("action", flat))["next"]
        for key in ("done", "truncated"):
            assert td[key][:, 0].tolist() == [step >= 2] * 2
        assert not td["terminated"].any()
    assert (td["reward"] == 0).all()
    td = env.reset(td.set("_reset", torch.tensor([[True], [False]])))
    assert td["done"][:, 0].tolist() == [False, True]
    td = env.step(td.set("action", flat))["next"]
    assert td["done"][:, 0].tolist() == td["truncated"][:, 0].tolist() == [False, True]
    assert not env.reset()["done"].any()


def test_torchrl_a_margin_call_stays_one(market, actions):
    env = FoxESTorchEnv(market, 2, seed=0, **{**UGLY, "episode_bars": 0, "initial_equity_usd": 3_000.0})
    td = env.reset()
    for t in range(100):
        td = env.step(td.set("action", torch.as_tensor(actions[t, :2])))["next"]
        if td["terminated"].any():
            break
    ended = td["terminated"].clone()
    assert ended.any()
    td = env.step(td.set("action", torch.as_tensor(actions[0, :2])))["next"]
    assert td["terminated"][ended].all()
    assert not td["truncated"][ended].any()


@pytest.mark.parametrize("break_when", ["any", "all"])
def test_torchrl_rollouts_end(break_when, market, actions):
    env = FoxESTorchEnv(market, N, seed=9, **UGLY)
    rollout = env.rollout(60, Script(actions), **{f"break_when_{break_when}_done": True, "break_when_any_done":
                          break_when == "any"})  # fmt: skip
    done = rollout["next", "done"][:, :, 0]
    assert getattr(done[:, -1], break_when)()
    assert not getattr(done[:, :-1], break_when)(0).any()


def test_torchrl_collectors_restart_finished_accounts(market):
    env = FoxESTorchEnv(market, N, seed=9, **UGLY)
    collector = Collector(env, None, frames_per_batch=N * 60, total_frames=N * 120)
    ended = 0
    for batch in collector:
        done, truncated = batch["next", "done"][:, :, 0], batch["next", "truncated"][:, :, 0]
        # An episode has at most 25 steps, and the step after its last one begins another.
        assert not (done[:, 1:] & done[:, :-1] & truncated[:, 1:]).any()
        ended += int(done.sum())
    assert ended >= 4 * N
    collector.shutdown()


def test_torchrl_refuses_a_partial_first_reset_and_bad_seeds(market):
    env = FoxESTorchEnv(market, 2, seed=0, episode_bars=20)
    partial = env.reset().set("_reset", torch.tensor([[True], [False]]))
    env.reset(partial.clone())  # TorchRL takes the mask out
    with pytest.raises(ValueError, match="never been reset"):
        FoxESTorchEnv(market, 2, seed=0, episode_bars=20).reset(partial)
    for seed in (-1, 1 << 63):
        with pytest.raises(ValueError, match=f"seed is {seed}, expected"):
            FoxESTorchEnv(market, 2, seed=seed, episode_bars=20)
    with pytest.raises(ValueError, match=r"start is 7.5"):
        env.reset(start=7.5)


def test_the_cpu_has_a_number(market, actions):
    plain, numbered = FoxESVectorEnv(N, market, **UGLY), FoxESVectorEnv(N, market, device="cpu:0", **UGLY)
    np.testing.assert_array_equal(plain.reset(seed=1)[0], numbered.reset(seed=1)[0])
    for one, two in zip(plain.step(actions[0])[:4], numbered.step(actions[0])[:4], strict=True):
        np.testing.assert_array_equal(one, two)
        assert type(two) is np.ndarray
    assert FoxESTorchEnv(market, 2, "cpu:0", seed=0, episode_bars=5).rollout(3).shape == (2, 3)


def test_torchrl_starts(market):
    env = FoxESTorchEnv(market, 2, seed=0, episode_bars=20)
    first = env.reset(start=[5, 9])["observation"].numpy()
    expected, _ = FoxESVectorEnv(2, market, episode_bars=20).reset(seed=0, options={"start": [5, 9]})
    np.testing.assert_array_equal(first, expected)


# --- The market's edges -----------------------------------------------------------------------------------------------


def test_nothing_after_the_observed_bar_is_seen():
    """Every price, volume, quote and session end after bar t replaced: what was seen and paid until t is the same."""
    rng = np.random.default_rng(8)
    closes = 4000 + 0.25 * np.cumsum(rng.integers(-8, 9, 420))
    opens = np.concatenate([closes[:1], closes[:-1]])

    def build(cut):
        close, open_ = closes.copy(), opens.copy()
        noise = np.random.default_rng(cut)
        close[cut:] = 3000 + 1000 * noise.random(420 - cut)
        open_[cut:] = close[cut:] + noise.integers(-9, 9, 420 - cut)
        rows = list(zip(open_, np.maximum(open_, close) + 1, np.minimum(open_, close) - 1, close, strict=True))
        return make_market(make_bars(rows, bid=close - 0.25, ask=close + 0.25), features=None)

    script = np.random.default_rng(2).integers(0, 3, (420, 4))

    def play(market, cut):
        env = FoxES(market, episode_bars=0, window=2, min_hold_bars=2, flat_at_close=True)
        seen = [env.reset(seed=0, options={"start": 130})[0]]
        for t in range(130, cut - 1):
            observation, reward, *_ = env.step(script[t])
            seen.append(np.append(observation, reward))
        return np.concatenate(seen)

    whole = build(420)
    for cut in (132, 150, 201, 333, 400):
        np.testing.assert_array_equal(play(whole, cut), play(build(cut), cut))


def test_action_masks_and_flags_do_not_tell_of_the_next_roll(market):
    """The bar before an unmeasured roll looks like any other: the order is refused only when it comes."""
    roll = int(np.flatnonzero(market.roll == dynamics.UNMEASURED)[0])
    env = FoxES(market, episode_bars=0, margin=False, min_hold_bars=0)
    _, info = env.reset(seed=0, options={"start": roll - 1})
    assert info["can_trade"]
    assert env.action_masks().all()
    *_, info = env.step(np.array([LONG, 2, 0, 1]))
    assert (info["filled"], info["position"]) == (0, 0)


# --- The timing diagram of FoxES: what happens at each instant, and nothing of it earlier -----------------------------

HOLD, AWAY = (LONG, 2, 0, 1), (FLAT, 2, 0, 1)
STILL = (4000.0,) * 4
NEXT = (4000.5, 4002.0, 3999.0, 4001.0)  # open, high, low, close; their mean is 4000.625
MOVE = Feature("move", ODD, 0, lambda x: np.diff(x.bars.close, prepend=x.bars.close[0]))


def test_instant_1_the_observation_of_bar_t_ends_at_its_close():
    """Bar t's own close is in it; whatever bar t+1 becomes, the observation, the masks and the info are the same."""
    seen = []
    for nxt in (NEXT, (3000.0, 3100.0, 2900.0, 2950.0)):
        env = FoxES(make_market(make_bars([STILL, (4000.0, 4002.0, 4000.0, 4002.0), nxt]), features=[MOVE]),
                    episode_bars=0, margin=False)  # fmt: skip
        env.reset(seed=0, options={"start": 0})
        observation, reward, *_, info = env.step(np.array(AWAY))
        assert observation[0] == 2.0
        seen.append((observation.tobytes(), reward, str(info), env.action_masks().tobytes()))
        later, *_ = env.step(np.array(AWAY))
        assert later[0] == max(nxt[3] - 4002.0, -10.0)
    assert seen[0] == seen[1]


def test_instant_2_an_order_is_sent_at_close_t_and_works_during_bar_t_plus_1_alone():
    """A buy limit at 3999.75: bar 0 went far below before the order was sent, bar 2 after it had been cancelled."""
    rows = [(4000.0, 4000.0, 3990.0, 4000.0), STILL, (4000.0, 4000.0, 3990.0, 4000.0)]
    infos = play(make_market(make_bars(rows)), [(LONG, 2, 1, 1), AWAY])
    assert [info["filled"] for info in infos] == [0, 0]
    # Sent a bar later it fills in bar 2.
    infos = play(make_market(make_bars(rows)), [AWAY, (LONG, 2, 1, 1)])
    assert [info["fill_price"] for info in infos[1:]] == [3999.75]


def test_instant_3_a_roll_comes_before_the_order():
    """Two contracts are carried and pay 2 × 0.34 for it, though the order of the same step sells them, for 2 × 0.17."""
    old = make_bars([STILL, STILL])
    new = make_bars([(4012.0,) * 4, (4013.0, 4013.5, 4012.0, 4013.0)], start=MORNING + 5 * MINUTES)
    market = make_market([Segment("OLD", old, 0, 0.0), Segment("NEW", new, 1, 12.0)])
    info = play(market, [(LONG, 1, 0, 1), AWAY], min_hold_bars=1)[1]
    assert (info["rolled"], info["filled"], info["position"]) == (2, -2, 0)
    assert info["fill_price"] == 4013.0 - 0.125
    assert info["gross_points"] == pytest.approx(2 * (4013 - 4000 - 12))
    assert info["cost_points"] == pytest.approx(2 * 0.34 + 2 * 0.17)


@pytest.mark.parametrize(
    ("order", "urgency", "price"),
    [
        (0, 1, 4000.5 + 0.125),  # Market Normal: the open of bar t+1
        (0, 0, 4000.625 + 0.125),  # Patient: the mean of its four prices
        (0, 2, 4000.125 + 0.25),  # Aggressive: ask t and a tick, at once
        (1, 1, 3999.75),  # a limit rests, and bar t+1 trades through it
        (2, 2, 4000.5 + 0.125),  # an IOC takes the open
    ],
)
def test_instant_4_fills_of_bar_t_plus_1(order, urgency, price):
    assert play(make_market(make_bars([STILL, NEXT])), [(LONG, 2, order, urgency)])[0]["fill_price"] == price


def test_instant_5_the_position_is_marked_at_close_t_plus_1():
    """Bought at the open of 4000.5 it earns the rest of that bar, then whole bars from close to close."""
    rows = [STILL, NEXT, (4010.0, 4020.0, 3990.0, 4003.0)]
    infos = play(make_market(make_bars(rows)), [HOLD, HOLD])
    assert [info["gross_points"] for info in infos] == [4 * (4001.0 - 4000.5), 4 * (4003.0 - 4001.0)]


def test_instant_6_a_session_ends_after_the_mark():
    """The last bar is earned whole, then the position is closed at its close less 0.125, with commission."""
    rows = [STILL, (4001.0,) * 4, (4003.0,) * 4]  # close at 15:50, 15:55 and 16:00
    market = make_market(make_bars(rows, start=AFTERNOON - 5 * MINUTES))
    info = play(market, [HOLD, HOLD], flat_at_close=True)[1]
    assert (info["forced"], info["position"]) == (-4, 0)
    assert info["gross_points"] == 4 * (4003.0 - 4001.0)
    assert info["cost_points"] == pytest.approx(4 * 0.17)
    assert info["obs"][-6] == 0.0


def test_instant_7_margin_comes_last():
    """It is tested after fills, mark, costs and session end: $500 a contract by day, $12,000 overnight."""
    market = make_market(make_bars([STILL, STILL]))
    # Four contracts need $2,000 and cost 4 × 0.17 × $50 = $34.
    for equity, called in ((2_034.0, False), (2_033.5, True)):
        info = play(market, [HOLD], initial_equity_usd=equity)[0]
        assert (info["terminated"], info["forced"]) == (called, -4 if called else 0)
        assert info["cost_points"] == pytest.approx((8 if called else 4) * 0.17)
    evening = make_market(make_bars([STILL] * 3, start=AFTERNOON - 5 * MINUTES))
    for flat_at_close in (False, True):
        infos = play(evening, [HOLD, HOLD], initial_equity_usd=5_000.0, flat_at_close=flat_at_close)
        assert [info["terminated"] for info in infos] == [False, not flat_at_close]


def test_instant_8_the_reward_is_the_change_from_close_to_close():
    """Net of the step over 4 × close t, whatever was done in it; the observation is of the account after all of it."""
    market = random_market(np.random.default_rng(1))
    script = [tuple(a) for a in np.random.default_rng(2).integers(0, 3, (120, 4))]
    start = int(np.flatnonzero(market.decision)[0])
    infos = play(market, script, start, min_hold_bars=1, flat_at_close=True, margin=False)
    before, bar, forced, rolled = 200_000.0, start, 0, 0
    for info in infos:
        change = (info["equity_usd"] - before) / 50
        assert info["reward"] == pytest.approx(change / (4 * market.bars.close[bar]), abs=1e-12)
        assert info["obs"][-6] == np.float32(info["position"] / 4)
        assert info["obs"][-2] == info["can_trade"]
        before, bar = info["equity_usd"], int(market.land[bar])
        assert info["ts"] == market.ts[bar]
        forced, rolled = forced + abs(info["forced"]), rolled + info["rolled"]
    assert forced > 0


# --- The documentation ------------------------------------------------------------------------------------------------


def rows_of(text, heading):
    """Rows of the first table of `text` after `heading`, cut into its columns."""
    lines = text[text.index(heading) :].splitlines()
    rules = [i for i, line in enumerate(lines) if re.fullmatch(r" *=+( =+)+", line)]
    spans = [match.span() for match in re.finditer("=+", lines[rules[0]])]
    first = rules[1] + 1 if rules[1] == rules[0] + 2 else rules[0] + 1
    last = rules[2] if rules[1] == rules[0] + 2 else rules[1]
    return [[line[a:b].strip().strip("`") for a, b in spans] for line in lines[first:last]]


def test_the_documented_settings_are_the_games():
    documented = {name: default for name, default, _ in rows_of(inspect.getdoc(FoxES), "**settings")}
    fields = fox_env.Game.__dataclass_fields__
    assert documented == {name: repr(getattr(fox_env.Game(), name)) for name in fields}


def test_the_documented_infos_are_the_steps(market):
    rows = rows_of(inspect.getdoc(FoxES), "**Info**")
    env = FoxES(market, episode_bars=1)
    env.reset(seed=0)
    assert [name for name, *_ in rows if name] == list(env.step(np.array(HOLD))[4])


def test_the_documented_observation_is_the_space(market):
    rows = rows_of(inspect.getdoc(FoxES), "**Observation.**")
    space = FoxES(market, episode_bars=20, window=2).observation_space
    assert space.shape == (2 * len(market.feature_names) + len(rows),)
    for (_, _, interval, _), low, high in zip(rows, space.low[-len(rows) :], space.high[-len(rows) :], strict=True):
        assert [float(number.replace("−", "-")) for number in re.findall(r"−?[0-9]+", interval)] == [low, high]


@pytest.mark.parametrize("kind", [FoxES, FoxESVectorEnv])
def test_help_fits_a_hundred_columns(kind):
    methods = [one for name, one in vars(kind).items() if inspect.isfunction(one) and name[0] != "_"]
    for thing, margin in [(kind, 4), *((method, 8) for method in methods)]:
        for line in inspect.getdoc(thing).splitlines():
            assert len(line) + margin <= 100, line
    assert "Version history:\n    v0" in inspect.getdoc(FoxES)
