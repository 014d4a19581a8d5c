"""The agent: saved and loaded it plays the same, on the same features, and it leaves small edges alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

import fox_env
from fox_agent import Agent
from fox_agent.agent import FILE
from fox_agent.network import BranchingNetwork
from fox_env.actions import BASELINES, target_position
from fox_env.data.normalize import Normalizer
from tests.agent.tiny import parts

NAMES = ("up", "down", "age of the bar")
SETTINGS = {
    "network": {
        "num_features": 3, "num_position": 6, "bottleneck": 16, "hidden": [8, 8], "residual": True, "norm": "rms",
        "num_atoms": 11, "num_quantiles": 5, "noisy": True, "output_scale": 5.0,
    },
    "game": {"max_contracts": 4, "min_hold_bars": 3},
}  # fmt: skip


def make(**changes: object) -> Agent:
    torch.manual_seed(0)
    network = BranchingNetwork(**SETTINGS["network"])
    for parameter in network.parameters():  # the biases too
        torch.nn.init.normal_(parameter)
    normalizer = Normalizer.fit(
        np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32), fox_env.synthetic_market(
            "planted", 1_000).columns[:3], np.arange(50), np.ones(50, bool),
    )  # fmt: skip
    arguments = {"deployed": True, "trade_margin": 0.25} | changes
    return Agent(network, torch.tensor([-3.3, 4.7]), SETTINGS, NAMES, normalizer, **arguments)


def observations(count: int = 64, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 9)).astype(np.float32)


# --- Saving and loading (R11, R14) ------------------------------------------------------------------------------------


def test_r11_r14_a_loaded_agent_has_the_same_q_bit_for_bit(tmp_path: Path) -> None:
    agent = make()
    agent.save(tmp_path / "best")
    loaded = Agent.load(tmp_path / "best")
    assert torch.equal(loaded.q_values(observations()), agent.q_values(observations()))
    assert loaded.q_values(observations()).std() > 0.1
    assert loaded.support.tolist() == agent.support.tolist()
    assert (loaded.feature_names, loaded.deployed, loaded.trade_margin) == (NAMES, True, 0.25)
    assert loaded.settings == SETTINGS
    for name, value in agent.normalizer.to_dict().items():
        np.testing.assert_array_equal(loaded.normalizer.to_dict()[name], value)
    for name, value in agent.network.state_dict().items():
        assert torch.equal(loaded.network.state_dict()[name], value)


def test_r14_a_fresh_process_has_the_same_q(tmp_path: Path) -> None:
    agent = make()
    agent.save(tmp_path)
    np.save(tmp_path / "obs.npy", observations())
    code = (
        "import sys, numpy, torch; from fox_agent import Agent; torch.set_num_threads(1); folder = sys.argv[1];"
        "q = Agent.load(folder).q_values(numpy.load(folder + '/obs.npy')); numpy.save(folder + '/q.npy', q.numpy())"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
    torch.set_num_threads(1)
    np.testing.assert_array_equal(np.load(tmp_path / "q.npy"), agent.q_values(observations()).numpy())


@pytest.mark.parametrize("deployed", [True, False])
def test_an_agent_without_a_normalizer_and_the_gates_answer_survive(tmp_path: Path, deployed: bool) -> None:
    agent = make(deployed=deployed)
    agent.normalizer = None
    agent.save(tmp_path)
    loaded = Agent.load(tmp_path)
    assert loaded.normalizer is None
    assert loaded.deployed is deployed


def test_saving_replaces_what_was_there(tmp_path: Path) -> None:
    make().save(tmp_path)
    make(trade_margin=0.5).save(tmp_path)
    assert Agent.load(tmp_path).trade_margin == 0.5
    assert [file.name for file in tmp_path.iterdir()] == [FILE]


def broken(tmp_path: Path, kind: str) -> None:
    agent = make()
    agent.save(tmp_path)
    file = tmp_path / FILE
    whole = file.read_bytes()
    tensors = safetensors.torch.load_file(file)
    with safetensors.safe_open(file, "pt") as opened:
        meta = json.loads(opened.metadata()["fox"])

    def save(changes: dict, drop: str = "") -> None:
        kept = {name: value for name, value in tensors.items() if not drop or not name.startswith(drop)}
        safetensors.torch.save_file(kept, file, metadata={"fox": json.dumps(meta | changes)})

    {
        "empty": lambda: file.write_bytes(b""),
        "garbage": lambda: file.write_bytes(b"garbage" * 100),
        "truncated": lambda: file.write_bytes(whole[: len(whole) // 2]),
        "no metadata": lambda: safetensors.torch.save_file(tensors, file),
        "metadata of others": lambda: safetensors.torch.save_file(tensors, file, metadata={"format": "pt"}),
        "not JSON": lambda: safetensors.torch.save_file(tensors, file, metadata={"fox": "{"}),
        "no schema": lambda: safetensors.torch.save_file(tensors, file, metadata={"fox": "{}"}),
        "no weights": lambda: save({}, "network.output"),
        "no support": lambda: save({}, "support"),
        "another size": lambda: save(
            {"settings": {**SETTINGS, "network": {**SETTINGS["network"], "num_atoms": 12}}}
        ),
        "another schema": lambda: save({"schema": 99}),
    }[kind]()  # fmt: skip


@pytest.mark.parametrize(
    "kind",
    ["empty", "garbage", "truncated", "no metadata", "metadata of others", "not JSON", "no schema", "no weights",
     "no support", "another size"],
)  # fmt: skip
def test_a_bad_file_is_one_sentence(tmp_path: Path, kind: str) -> None:
    broken(tmp_path, kind)
    with pytest.raises(ValueError, match=f"{FILE} is not an agent") as caught:
        Agent.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_another_schema_and_a_missing_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"nowhere/agent\.safetensors does not exist"):
        Agent.load(tmp_path / "nowhere")
    broken(tmp_path, "another schema")
    with pytest.raises(ValueError, match="has schema 99, expected 1"):
        Agent.load(tmp_path)


# --- Playing ----------------------------------------------------------------------------------------------------------


def test_actions_are_the_greedy_ones_of_each_branch() -> None:
    agent = make(trade_margin=0.0)
    q = agent.q_values(observations())
    assert q.shape == (64, 4, 3)
    chosen = agent(observations())
    assert isinstance(chosen, np.ndarray)
    assert chosen.dtype == np.int64
    np.testing.assert_array_equal(chosen, q.argmax(2).numpy())
    assert len(np.unique(chosen, axis=0)) > 4
    assert torch.equal(agent(torch.from_numpy(observations())), q.argmax(2))


def test_an_agent_that_is_not_deployed_is_flat() -> None:
    agent = make(deployed=False)
    assert agent(observations(3)).tolist() == [list(BASELINES["flat"])] * 3
    assert isinstance(agent(torch.from_numpy(observations(3))), torch.Tensor)


class Fixed(Agent):
    """The same Q everywhere: direction (Short, Flat, Long) and magnitude (Small, Half, Full)."""

    def q_values(self, observation: object) -> torch.Tensor:
        q = torch.zeros(len(observation), 4, 3)
        q[:, 0], q[:, 1] = torch.tensor([-1.0, 0.0, 1.0]), torch.tensor([0.0, 0.5, 0.2])
        q[:, 2, 1] = q[:, 3, 2] = 1.0
        return q


def play_fixed(margin: float, positions: list[int]) -> list[int]:
    """Positions asked for by an agent that holds `positions`."""
    agent = make()
    fixed = Fixed(agent.network, agent.support, SETTINGS, NAMES, None, True, margin)
    obs = np.zeros((len(positions), 9), np.float32)
    obs[:, -6] = np.array(positions) / 4
    action = fixed(obs)
    assert (action[:, 2:] == (1, 2)).all()
    return [target_position(int(d), int(m), 4) for d, m, _, _ in action]


def test_a_margin_keeps_positions_that_are_nearly_as_good() -> None:
    # The best is Long Half, 2 contracts, (1 + .5) / 2 = .75. Worth less by: Long Full .15, Long Small .25,
    # Flat (0 + .5) / 2 by .5, Short Half by 1. A position of 3 contracts is no action's.
    held = [2, 4, 1, 0, -2, 3, -3]
    assert play_fixed(0.0, held) == [2] * 7
    assert play_fixed(0.1, held) == [2] * 7
    assert play_fixed(0.2, held) == [2, 4, 2, 2, 2, 2, 2]
    assert play_fixed(0.3, held) == [2, 4, 1, 2, 2, 2, 2]
    assert play_fixed(0.6, held) == [2, 4, 1, 0, 2, 2, 2]
    assert play_fixed(9.0, held) == [2, 4, 1, 0, -2, 2, 2]


def test_an_exact_margin_is_not_exceeded() -> None:
    assert play_fixed(0.5, [0]) == [0]
    assert play_fixed(0.499, [0]) == [2]


def test_a_rejected_agent_can_still_be_asked() -> None:
    assert make(deployed=True).rejected == {}
    agent = make(deployed=False, trade_margin=0.0)
    ((name, candidate),) = agent.rejected.items()
    assert name == "candidate"
    np.testing.assert_array_equal(candidate(observations()), make(trade_margin=0.0)(observations()))
    assert (agent(observations()) == BASELINES["flat"]).all()
    assert not agent.deployed


# --- The market that it sees ------------------------------------------------------------------------------------------


def agent_for(market: fox_env.Market) -> Agent:
    agent = make()
    return Agent(agent.network, agent.support, SETTINGS, market.feature_names, market.normalizer)


def test_prepare_attaches_the_normalizer_of_the_training_part() -> None:
    train, _, test = parts()
    fresh = fox_env.synthetic_market("planted", 2_000, seed=9)
    assert fresh.normalizer is None
    prepared = agent_for(train).prepare(fresh)
    assert prepared.normalizer is train.normalizer
    np.testing.assert_array_equal(prepared.observed, train.normalizer.apply(fresh.features))
    assert prepared.bars is fresh.bars
    assert agent_for(train).prepare(test).normalizer is train.normalizer


def test_prepare_refuses_other_features_by_name() -> None:
    train = parts()[0]
    agent = agent_for(train)
    names = train.feature_names
    with pytest.raises(ValueError, match=f"has the feature '{names[3]}' where the agent was trained on '{names[2]}'"):
        agent.prepare(fox_env.synthetic_market("planted", 1_000, drop=[names[2]]))
    with pytest.raises(ValueError, match=f"has {len(names) - 1} features, the agent learned from {len(names)}"):
        agent.prepare(fox_env.synthetic_market("planted", 1_000, drop=[names[-1]]))
    swapped = [names[1], names[0], *names[2:]]
    with pytest.raises(ValueError, match=f"'{names[1]}' where the agent was trained on '{names[0]}'"):
        agent.prepare(fox_env.synthetic_market("planted", 1_000, features=swapped))
