"""`FoxESVectorEnv` against Gymnasium's own vector environment, what it returns, its wrappers, and global state."""

from __future__ import annotations

import subprocess
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from gymnasium.wrappers import vector as wrappers

import fox_env
from fox_env import FoxES, FoxESDiscrete, FoxESVectorEnv
from fox_env.vector_env import FoxESDiscreteVectorEnv
from tests.env.games import random_market

N = 6
# Accounts that start with 3,500 dollars meet margin calls, so that they end at different times.
UGLY = {"episode_bars": 25, "min_hold_bars": 2, "initial_equity_usd": 3_500.0, "mirror_prob": 0.5}
SHAPED = {**UGLY, "shaping": {"entropy": 0.1, "micro": 0.01, "drawdown": 0.3}, "window": 2}
MODES = list(AutoresetMode)
KINDS = [(FoxES, FoxESVectorEnv), (FoxESDiscrete, FoxESDiscreteVectorEnv)]
ROWS = 120


@pytest.fixture(scope="module")
def market():
    return random_market(np.random.default_rng(5))


@pytest.fixture(scope="module")
def actions():
    return np.random.default_rng(6).integers(0, 3, (ROWS, N, 4))


def coded(env, action):
    return action @ [27, 9, 3, 1] if env.single_action_space.shape == () else action


# --- Against Gymnasium ------------------------------------------------------------------------------------------------


def assert_same_infos(native, sync, masked=False):
    """The same keys, masks and values; with `masked`, values where the masks are set."""
    assert set(native) == set(sync)
    for name, theirs in sync.items():
        mine = native[name]
        if isinstance(theirs, dict):
            assert_same_infos(mine, theirs, masked)
            continue
        assert type(mine) is np.ndarray
        assert mine.shape == theirs.shape == (N,)
        assert mine.dtype.kind == theirs.dtype.kind, name
        shown = sync[f"_{name}"] if masked and not name.startswith("_") else np.ones(N, bool)
        if theirs.dtype == object:
            for one, two in zip(mine[shown], theirs[shown], strict=True):
                assert type(one) is type(two)
                np.testing.assert_array_equal(one, two)
        else:
            np.testing.assert_array_equal(mine[shown], theirs[shown], err_msg=name)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("game", [UGLY, SHAPED], ids=["plain", "shaped"])
@pytest.mark.parametrize("kinds", KINDS, ids=["branches", "discrete"])
def test_equals_gymnasiums_vector_environment_key_by_key(mode, game, kinds, market, actions):
    single, many = kinds
    sync = SyncVectorEnv([lambda: single(market, **game)] * N, autoreset_mode=mode)
    native = many(N, market, autoreset_mode=mode, **game)
    seeds = list(range(40, 40 + N))
    (theirs, their_infos), (mine, infos) = sync.reset(seed=seeds), native.reset(seed=seeds)
    np.testing.assert_array_equal(mine, theirs)
    assert_same_infos(infos, their_infos)
    reasons, partial = set(), 0
    for action in actions:
        expected, got = sync.step(coded(sync, action)), native.step(coded(native, action))
        for one, two in zip(got[:4], expected[:4], strict=True):
            assert one.dtype == two.dtype
            np.testing.assert_array_equal(one, two)
        assert_same_infos(got[4], expected[4])
        done = expected[2] | expected[3]
        if done.any():
            ends = expected[4]["final_info"] if mode is AutoresetMode.SAME_STEP else expected[4]
            reasons |= set(ends["end_reason"][done])
        if mode is AutoresetMode.DISABLED and done.any():
            (theirs, their_infos), (mine, infos) = (
                env.reset(options={"reset_mask": done.copy()}) for env in (sync, native)
            )
            np.testing.assert_array_equal(mine, theirs)
            assert_same_infos(infos, their_infos, masked=True)
            partial += 1
    assert reasons == {"margin_call", "episode_bars"}
    assert (partial > 5) == (mode is AutoresetMode.DISABLED)


@pytest.mark.parametrize("mode", MODES)
def test_reset_masks_in_every_mode(mode, market, actions):
    """Accounts 0 and 3 restart in the middle of their episodes; seeds of the others are not looked at."""
    mask = np.array([True, False, False, True, False, False])
    sync = SyncVectorEnv([lambda: FoxES(market, **UGLY)] * N, autoreset_mode=mode)
    native = FoxESVectorEnv(N, market, autoreset_mode=mode, **UGLY)
    for env in (sync, native):
        env.reset(seed=list(range(N)))
        env.step(actions[0])
    seeds = list(range(50, 50 + N))
    expected, got = (env.reset(seed=seeds, options={"reset_mask": mask.copy()}) for env in (sync, native))
    np.testing.assert_array_equal(got[0], expected[0])
    assert_same_infos(got[1], expected[1], masked=True)
    for action in actions[1:10]:
        for one, two in zip(native.step(action)[:4], sync.step(action)[:4], strict=True):
            np.testing.assert_array_equal(one, two)
        if mode is AutoresetMode.DISABLED and sync._autoreset_envs.any():
            break


def test_a_refused_reset_leaves_the_seeds_as_they_are(market):
    env, other = (FoxESVectorEnv(N, market, **UGLY) for _ in range(2))
    for one in (env, other):
        one.reset(seed=1)
    for seed in (2, list(range(N))):
        with pytest.raises(ValueError, match="start is -1"):
            env.reset(seed=seed, options={"start": -1})
    np.testing.assert_array_equal(env.reset()[0], other.reset()[0])


@pytest.mark.parametrize("num_envs", [0, -1, 2.5, True, "3"])
def test_the_number_of_accounts_is_a_positive_integer(num_envs, market):
    with pytest.raises(ValueError, match=f"num_envs is {num_envs!r}, expected an integer of at least 1"):
        FoxESVectorEnv(num_envs, market)


@pytest.mark.parametrize("device", ["gpu", "mps", "meta", 0, None])
def test_other_devices_are_refused(device, market):
    with pytest.raises(ValueError, match=f"device is '{device}', expected 'cpu' or a CUDA device"):
        FoxESVectorEnv(N, market, device=device)


def test_without_numba_cuda_a_gpu_says_what_to_install(market, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"device is 'cuda:0', which needs numba-cuda: pip install fox-es\[cuda\]"):
        FoxESVectorEnv(N, market, device="cuda:0")


def test_options_are_left_as_they_were(market):
    env = FoxESVectorEnv(N, market, **UGLY)
    options = {"reset_mask": np.ones(N, bool), "start": 9}
    env.reset(seed=0, options=options)
    assert set(options) == {"reset_mask", "start"}


@pytest.mark.parametrize("mode", ["sync", "async", "vector_entry_point"])
@pytest.mark.parametrize("id_", ["FoxES-v0", "FoxES-Discrete-v0"])
def test_make_vec_in_every_mode(id_, mode, market):
    env = gym.make_vec(id_, num_envs=3, vectorization_mode=mode, market=market, **UGLY)
    reference = (FoxESDiscreteVectorEnv if "Discrete" in id_ else FoxESVectorEnv)(3, market, **UGLY)
    np.testing.assert_array_equal(env.reset(seed=[1, 2, 3])[0], reference.reset(seed=[1, 2, 3])[0])
    env.action_space.seed(0)
    for _ in range(30):
        action = env.action_space.sample()
        for one, two in zip(env.step(action)[:4], reference.step(action)[:4], strict=True):
            np.testing.assert_array_equal(one, two)
    env.close()
    env.close()
    assert env.closed


@pytest.mark.parametrize("make", [FoxES, FoxESVectorEnv, FoxESDiscreteVectorEnv])
def test_closing_twice_is_closing_once(make, market):
    env = make(market=market, episode_bars=20)
    env.reset(seed=0)
    env.close()
    env.close()


# --- What is returned -------------------------------------------------------------------------------------------------


def arrays(value):
    """All arrays in nested tuples and dicts, by path."""
    if isinstance(value, dict):
        return {(name, *path): a for name, item in value.items() for path, a in arrays(item).items()}
    if isinstance(value, tuple):
        return {(index, *path): a for index, item in enumerate(value) for path, a in arrays(item).items()}
    return {(): value}


def as_numpy(array):
    return array.numpy() if isinstance(array, torch.Tensor) else array


def held(array):
    """A copy that nothing can change."""
    if isinstance(array, np.ndarray) and array.dtype == object:
        return [None if one is None else np.array(one) for one in array]
    return np.array(as_numpy(array))


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_torch_returns_what_numpy_returns(mode, copy, market, actions):
    plain = FoxESVectorEnv(N, market, autoreset_mode=mode, **SHAPED)
    env = FoxESVectorEnv(N, market, autoreset_mode=mode, output="torch", copy=copy, **SHAPED)

    def same(got, expected):
        got, expected = arrays(got), arrays(expected)
        assert set(got) == set(expected)
        for path, one in got.items():
            two = expected[path]
            if path[-1] == "final_obs":
                # With torch a tensor [N, D], its rows valid where the mask is set.
                assert isinstance(one, torch.Tensor)
                for i in np.flatnonzero(expected[*path[:-1], "_final_obs"]):
                    np.testing.assert_array_equal(one[i], two[i])
            elif two.dtype == object:
                np.testing.assert_array_equal(one, two)
            else:
                assert isinstance(one, torch.Tensor)
                assert one.device.type == "cpu"
                assert one.numpy().dtype == two.dtype
                np.testing.assert_array_equal(one, two)

    same(env.reset(seed=3), plain.reset(seed=3))
    ended = 0
    for action in actions:
        got, expected = env.step(torch.as_tensor(action)), plain.step(action)
        same(got, expected)
        done = expected[2] | expected[3]
        ended += done.sum()
        if mode is AutoresetMode.DISABLED and done.any():
            same(env.reset(options={"reset_mask": torch.as_tensor(done)}), plain.reset(options={"reset_mask": done}))
    assert ended > 10
    for kind, one in ((np.ndarray, plain), (torch.Tensor, env)):
        assert type(one.action_masks()) is kind
    np.testing.assert_array_equal(env.action_masks(), plain.action_masks())


@pytest.mark.parametrize("output", ["numpy", "torch"])
def test_without_copies_the_engines_memory_is_returned(output, market, actions):
    shared, own = (FoxESVectorEnv(N, market, output=output, copy=copy, **SHAPED) for copy in (False, True))
    for env in (shared, own):
        env.reset(seed=3)
        observation, reward, _, _, infos = env.step(actions[0])
        pairs = [
            (observation, env.engine.obs), (reward, env.engine.reward), (infos["pnl_points"], env.engine.points),
            (infos["position"], env.engine.flags), (infos["reward_terms"]["micro"], env.engine.terms),
        ]  # fmt: skip
        for returned, buffer in pairs:
            assert np.shares_memory(as_numpy(returned), buffer) == (env is shared)


def test_the_kinds_of_actions_and_outputs(market, actions):
    """numpy, torch and lists are accepted whatever is returned; numpy is the default on the CPU."""
    seen = []
    for output in (None, "numpy", "torch"):
        for kind in (np.asarray, torch.as_tensor, list):
            env = FoxESVectorEnv(N, market, output=output, **UGLY)
            env.reset(seed=3)
            observation = env.step(kind(actions[0]))[0]
            assert type(observation) is (torch.Tensor if output == "torch" else np.ndarray)
            seen.append(np.asarray(observation))
    assert all((one == seen[0]).all() for one in seen)
    with pytest.raises(ValueError, match="output is 'jax', expected 'numpy', 'torch' or None"):
        FoxESVectorEnv(N, market, output="jax")
    with pytest.raises(ValueError, match="out of range"):
        env.step(torch.full((N, 4), 3))


def test_numpy_needs_no_torch():
    code = """
import sys
import numpy as np
import fox_env
env = fox_env.FoxESVectorEnv(4, fox_env.synthetic_market("planted", 3_000))
env.reset(seed=0)
env.step(np.ones((4, 4), int))
assert "torch" not in sys.modules
env = fox_env.FoxESVectorEnv(4, fox_env.synthetic_market("planted", 3_000), output="torch")
env.reset(seed=0)
assert "torch" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_market_mapped_from_a_file_gives_tensors(tmp_path, market, recwarn):
    market.save(tmp_path / "market")
    mapped = fox_env.Market.load(tmp_path / "market")
    env = FoxESVectorEnv(N, mapped, output="torch", **UGLY)
    _, infos = env.reset(seed=3)
    np.testing.assert_array_equal(infos["ts"], FoxESVectorEnv(N, market, **UGLY).reset(seed=3)[1]["ts"])
    infos["ts"][:] = 0
    np.testing.assert_array_equal(mapped.ts, market.ts)
    assert not [w for w in recwarn if "writable" in str(w.message)]


# --- What was returned is not overwritten -----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("output", ["numpy", "torch"])
@pytest.mark.parametrize("many", [FoxESVectorEnv, FoxESDiscreteVectorEnv])
def test_what_was_returned_stays(mode, output, many, market, actions):
    env = many(N, market, autoreset_mode=mode, output=output, **SHAPED)
    returned = [env.reset(seed=1)]
    kept = [{path: held(a) for path, a in arrays(returned[0]).items()}]

    def keep(result):
        returned.append(result)
        kept.append({path: held(a) for path, a in arrays(result).items()})

    for action in actions[:100]:
        result = env.step(coded(env, action))
        keep(result)
        done = as_numpy(result[2] | result[3])
        if mode is AutoresetMode.DISABLED and done.any():
            keep(env.reset(options={"reset_mask": done}))
    for result, before in zip(returned, kept, strict=True):
        for path, array in arrays(result).items():
            for one, two in zip(held(array), before[path], strict=True):
                np.testing.assert_array_equal(one, two, err_msg=str(path))


@pytest.mark.parametrize("kind", [FoxES, FoxESDiscrete])
@pytest.mark.parametrize("window", [1, 3])
def test_what_a_single_environment_returned_stays(kind, window, market, actions):
    env, twin = (kind(market, **{**SHAPED, "window": window, "episode_bars": 100, "margin": False}) for _ in range(2))

    def play(env):
        yield env.reset(seed=1)
        for action in actions[:100, 0]:
            yield env.step(int(action @ [27, 9, 3, 1]) if env.discrete else action)

    whole = list(play(env))
    for result, fresh in zip(whole, play(twin), strict=True):
        np.testing.assert_array_equal(result[0], fresh[0])
        assert str(result[1:]) == str(fresh[1:])


def test_what_the_caller_writes_changes_nothing(market, actions):
    """The caller may write to all that was returned, masks too."""
    one, two = (FoxESVectorEnv(N, market, autoreset_mode="SameStep", **UGLY) for _ in range(2))

    def spoil(result):
        for array in arrays(result).values():
            array[:] = 1

    spoil(one.reset(seed=1))
    two.reset(seed=1)
    for action in actions:
        got, expected = one.step(action), two.step(action)
        for path, array in arrays(got).items():
            for mine, theirs in zip(array, arrays(expected)[path], strict=True):
                np.testing.assert_array_equal(mine, theirs, err_msg=str(path))
        spoil(got)


# --- Global state -----------------------------------------------------------------------------------------------------


def test_no_global_state_is_touched():
    """Generators, warnings, threads, locale, signals, environment, numpy's and matplotlib's settings."""
    code = """
import decimal, locale, os, random, signal, sys, threading, warnings
import gymnasium as gym, matplotlib, numpy as np, torch
import numba, pandas, talib  # what these libraries set when they are imported is theirs
numba.get_num_threads()


def state():
    return {
        "random": random.getstate(),
        "numpy": str(np.random.get_state()),
        "torch": torch.get_rng_state().numpy().tobytes(),
        "warnings": list(warnings.filters),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "torch defaults": (torch.get_default_dtype(), torch.is_grad_enabled()),
        "locale": locale.setlocale(locale.LC_ALL),
        "signals": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "environment": dict(os.environ),
        "numpy settings": (np.geterr(), str(np.get_printoptions())),
        "decimal": str(decimal.getcontext()),
        "hooks": (sys.excepthook, sys.displayhook, threading.excepthook, sys.getrecursionlimit()),
        "streams": (sys.stdout, sys.stderr),
        "matplotlib": dict(matplotlib.rcParams),
        "modules": "matplotlib.pyplot" in sys.modules,
        "cwd": os.getcwd(),
    }


before = state()
import fox_env

assert state() == before
for name in fox_env.__all__:
    if name != "FoxESTorchEnv":  # torchrl sets what it likes
        getattr(fox_env, name)
market = fox_env.synthetic_market("planted", 3_000)
for id_ in ("FoxES-v0", "FoxES-Discrete-v0"):
    for mode in (None, "rgb_array", "ansi"):
        env = gym.make(id_, market=market, render_mode=mode)
        env.reset()
        env.reset(seed=0)
        env.step(env.action_space.sample())
        if mode:
            env.render()
        env.close()
    for output in ("numpy", "torch"):
        env = gym.make_vec(id_, num_envs=600, vectorization_mode="vector_entry_point", market=market, output=output)
        env.reset()
        env.reset(seed=0)
        env.step(env.action_space.sample())
        env.close()
after = state()
assert after == before, [name for name in before if before[name] != after[name]]
"""
    subprocess.run([sys.executable, "-W", "default", "-c", code], check=True, timeout=120)


# --- Gymnasium's vector wrappers --------------------------------------------------------------------------------------


def twins(market, mode=AutoresetMode.NEXT_STEP):
    return (FoxESVectorEnv(N, market, autoreset_mode=mode, **UGLY) for _ in range(2))


def test_normalize_reward(market, actions):
    plain, env = twins(market)
    env = wrappers.NormalizeReward(env)
    plain.reset(seed=3)
    env.reset(seed=3)
    raw, scaled = np.array([(plain.step(a)[1], env.step(a)[1]) for a in actions]).transpose(1, 0, 2)
    assert np.isfinite(scaled).all()
    np.testing.assert_array_equal(np.sign(scaled), np.sign(raw))
    # Rewards of 1e-4 are brought to the order of 1.
    assert np.abs(raw).max() < 0.05
    assert 0.05 < scaled[50:].std() < 20


def test_reward_wrappers(market, actions):
    plain, env = twins(market)
    env = wrappers.ClipReward(wrappers.TransformReward(env, lambda reward: 1e4 * reward), -1.0, 1.0)
    plain.reset(seed=3)
    env.reset(seed=3)
    for action in actions[:30]:
        np.testing.assert_array_equal(env.step(action)[1], np.clip(1e4 * plain.step(action)[1], -1.0, 1.0))


def test_flatten_observation(market, actions):
    """Observations are flat, and stay as they are."""
    plain, env = twins(market)
    env = wrappers.FlattenObservation(env)
    assert env.observation_space == plain.observation_space
    np.testing.assert_array_equal(env.reset(seed=3)[0], plain.reset(seed=3)[0])
    np.testing.assert_array_equal(env.step(actions[0])[0], plain.step(actions[0])[0])


def test_rescale_and_clip_action_say_that_actions_are_discrete(market):
    for make in (lambda env: wrappers.RescaleAction(env, -1.0, 1.0), wrappers.ClipAction):
        with pytest.raises((AssertionError, TypeError, ValueError), match="Box"):
            make(FoxESVectorEnv(N, market, **UGLY))


@pytest.mark.parametrize("mode", MODES[:2])
def test_dict_info_to_list(mode, market, actions):
    """A list of the infos that single environments give."""
    env = wrappers.DictInfoToList(FoxESVectorEnv(N, market, autoreset_mode=mode, **UGLY))
    singles = [FoxES(market, **UGLY) for _ in range(N)]
    _, infos = env.reset(seed=list(range(N)))
    for seed, (single, info) in enumerate(zip(singles, infos, strict=True)):
        assert str({k: float(v) for k, v in single.reset(seed=seed)[1].items() if k != "reward_terms"}) == str(
            {k: float(v) for k, v in info.items() if k != "reward_terms"}
        )
    ended = 0
    for action in actions[:40]:
        *_, terminated, truncated, infos = env.step(action)
        for i, info in enumerate(infos):
            *_, single_terminated, single_truncated, expected = singles[i].step(action[i])
            done = single_terminated or single_truncated
            assert done == (terminated | truncated)[i]
            if done:
                ended += 1
                last = info["final_info"] if mode is AutoresetMode.SAME_STEP else info
                assert last["end_reason"] == expected["end_reason"]
                assert last["equity_usd"] == expected["equity_usd"]
            else:
                assert set(info) == set(expected)
                assert info["equity_usd"] == expected["equity_usd"]
        if ended:
            break
    assert ended


def test_numpy_to_torch(market, actions):
    """The wrapper works until an episode ends: it cannot carry text, of `SyncVectorEnv` either, as `output` can."""
    pytest.importorskip("array_api_compat")
    game = {**UGLY, "margin": False}
    plain, env = FoxESVectorEnv(N, market, **game), wrappers.NumpyToTorch(FoxESVectorEnv(N, market, **game))
    np.testing.assert_array_equal(env.reset(seed=3)[0], plain.reset(seed=3)[0])
    for action in actions[:24]:
        got, expected = env.step(torch.as_tensor(action)), plain.step(action)
        for one, two in zip(got[:4], expected[:4], strict=True):
            assert isinstance(one, torch.Tensor)
            np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(got[4]["equity_usd"], expected[4]["equity_usd"])


# --- On a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("output", ["numpy", "torch"])
@pytest.mark.parametrize("mode", MODES)
def test_a_gpu_returns_what_the_cpu_returns(mode, output, copy, market, actions):
    cpu = FoxESVectorEnv(N, market, autoreset_mode=mode, output=output, **SHAPED)
    gpu = FoxESVectorEnv(N, market, "cuda", mode, copy, output, **SHAPED)

    def same(got, expected):
        got, expected = arrays(got), arrays(expected)
        assert set(got) == set(expected)
        for path, one in got.items():
            two = expected[path]
            assert type(one) is type(two)
            if isinstance(one, torch.Tensor):
                assert one.is_cuda
                one = one.cpu()
            rows = np.arange(N)
            if path[-1] == "final_obs":
                rows = np.flatnonzero(expected[*path[:-1], "_final_obs"])
            for i in rows:
                if two.dtype == object and path[-1] != "final_obs":
                    assert one[i] == two[i]
                else:
                    np.testing.assert_allclose(one[i], two[i], rtol=1e-6, atol=1e-6, err_msg=str(path))

    same(gpu.reset(seed=3), cpu.reset(seed=3))
    for action in actions:
        expected = cpu.step(action)
        same(gpu.step(torch.as_tensor(action, device="cuda")), expected)
        done = as_numpy(expected[2] | expected[3])
        if mode is AutoresetMode.DISABLED and done.any():
            same(gpu.reset(options={"reset_mask": done}), cpu.reset(options={"reset_mask": done}))
    np.testing.assert_array_equal(torch.as_tensor(gpu.action_masks()).cpu(), cpu.action_masks())
    # A tensor on the GPU is an action for the CPU as well.
    cpu.reset(seed=3)
    cpu.step(torch.as_tensor(actions[0], device="cuda"))
