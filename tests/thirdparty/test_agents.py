"""Agents of other projects play the game, unmodified, as the files in `examples/` have them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

import fox_env

pytestmark = pytest.mark.thirdparty

EXAMPLES = Path(__file__).parents[2] / "examples"
# What each example needs, and the fewest environment steps with a few updates in them.
AGENTS = {
    "sb3_ppo": ("stable_baselines3", 8_192),
    "sb3_dqn": ("stable_baselines3", 20_480),
    "sb3_contrib_qrdqn": ("sb3_contrib", 20_480),
    "torchrl_ppo": ("torchrl", 8_192),
    "cleanrl_ppo": ("torch", 8_192),
    "skrl_ppo": ("skrl", 8_192),
}


@pytest.fixture(scope="module")
def parts():
    return fox_env.synthetic_market("planted", 6_000).split()


@pytest.fixture
def example(monkeypatch):
    """Imports an example as its own command does."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name, library):
        pytest.importorskip(library, reason=f"examples/{name}.py needs {library}")
        return importlib.import_module(name)

    # torch's single thread makes sums the same in every run.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load
    torch.set_num_threads(threads)
    for name in ("planted", *AGENTS):
        sys.modules.pop(name, None)


def answers(policy, market):
    """What a policy does in the test, int8 [n, 4]."""
    report = fox_env.evaluate(policy, market, baselines=False)
    return report.records["agent"].action


def weights(policy):
    """The parameters of an example's policy, float32 [K]."""
    module = getattr(policy, "policy", None) or getattr(policy, "__self__", policy)
    return torch.cat([value.detach().flatten() for value in module.parameters()])


@pytest.mark.parametrize("name", AGENTS)
def test_an_example_trains_a_policy_that_is_evaluated_and_repeats_with_its_seed(name, example, parts):
    library, steps = AGENTS[name]
    module = example(name, library)
    train, _, test = parts
    first, again, other = (module.train(train, steps, seed) for seed in (3, 3, 4))
    assert torch.equal(weights(first), weights(again))
    assert not torch.equal(weights(first), weights(other))
    assert torch.isfinite(weights(first)).all()
    np.testing.assert_array_equal(answers(first, test), answers(again, test))


def test_ppo_written_out_beats_flat_and_random(example):
    module, planted = (example(name, "torch") for name in ("cleanrl_ppo", "planted"))
    train, valid, _ = planted.parts()
    report = fox_env.evaluate(module.train(train, 1_000_000, 0), valid)
    standing = planted.standings(report)["agent"]
    assert standing.t > 2.5
    assert standing.p_random < 0.001
    assert standing.expected > 0.25


def test_the_bootstrap_tells_a_lead_from_chance(example):
    planted = example("planted", "torch")
    noise = np.random.default_rng(0).normal(size=(200, 2, 60))
    p = np.array([planted.p_no_lead(mine, other, 499) for mine, other in noise])
    assert np.mean(p < 0.05) < 0.12  # a test of 5 %, the bootstrap of 60 sessions being a little bold
    assert planted.p_no_lead(noise[0, 0] + 2.0, noise[0, 1]) == 1 / 10_000
    assert planted.p_no_lead(noise[0, 0], noise[0, 0]) == 1.0


# --- Stable-Baselines3 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sb3_ppo", "sb3_dqn", "sb3_contrib_qrdqn"])
def test_a_saved_model_plays_the_same(name, example, parts, tmp_path):
    library, steps = AGENTS[name]
    train, _, test = parts
    model = example(name, library).train(train, steps, 0)
    model.save(tmp_path / "model.zip")
    loaded = type(model).load(tmp_path / "model.zip", device="cpu")
    np.testing.assert_array_equal(answers(loaded, test), answers(model, test))


@pytest.mark.parametrize("id_", ["FoxES-v0", "FoxES-Discrete-v0"])
def test_make_vec_env_builds_it_from_its_name(id_, parts):
    env_util = pytest.importorskip("stable_baselines3.common.env_util")
    env = env_util.make_vec_env(id_, 3, seed=0, env_kwargs={"market": parts[0], "episode_bars": 5})
    env.reset()
    for _ in range(6):
        _, _, dones, infos = env.step([env.action_space.sample() for _ in range(3)])
        if dones.all():
            assert all(info["episode"]["l"] == 5 and info["TimeLimit.truncated"] for info in infos)
            assert all(info["terminal_observation"].shape == env.observation_space.shape for info in infos)
            break
    else:
        pytest.fail("no episode ended")


@pytest.mark.parametrize("id_", ["FoxES-v0", "FoxES-Discrete-v0"])
def test_maskable_ppo_finds_the_masks(id_, parts):
    maskable = pytest.importorskip("sb3_contrib", reason="MaskablePPO is sb3-contrib's").MaskablePPO
    from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported
    from stable_baselines3.common.env_util import make_vec_env

    train, _, test = parts
    env = make_vec_env(lambda: gym.make(id_, market=train), 2, seed=0)
    assert is_masking_supported(env)
    model = maskable("MlpPolicy", env, n_steps=64, batch_size=64, seed=0, device="cpu").learn(256)
    # A locked account is told its position's only action, and takes it.
    env = gym.make(id_, market=train)
    obs, _ = env.reset(seed=0)
    long = np.array([2, 2, 0, 1])
    obs, *_, info = env.step(int(long @ [27, 9, 3, 1]) if "Discrete" in id_ else long)
    assert (info["position"], info["can_trade"]) == (4, False)
    masks = get_action_masks(env)
    for deterministic in (True, False):
        action, _ = model.predict(obs, action_masks=masks, deterministic=deterministic)
        obs, *_, info = env.step(action)
        assert masks.sum() < len(masks)
        branches = np.unravel_index(int(action), (3, 3, 3, 3)) if "Discrete" in id_ else action
        assert tuple(branches[:2]) == (2, 2)
    assert answers(model, test).shape[1] == 4
