"""Steps a second of the environments on the CPU, beside other projects' in the same run.

Actions are random and drawn beforehand; positions are open, and episodes of 1,000 bars end and start while the clock
runs. Every figure is the best of several runs, since other work on the machine only makes a run slower.

    python benchmarks/env.py                    print the table
    python benchmarks/env.py --save NAME        and keep it as benchmarks/results/NAME.txt
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib.util
import io
import os
import platform
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import gymnasium as gym
import numpy as np
import pandas as pd
import rich.box
import torch
from rich.console import Console
from rich.table import Table
from saving import publish
from torch import nn

import fox_env
from fox_env.engine import Engine, game_of

RUNS = 20
BATCHES = (64, 1_024, 16_384)
DRAWN = 64  # sets of actions drawn beforehand
TRAIN_EVERY = 32
EPISODE = 1_000
PACKAGES = ("numpy", "numba", "torch", "gymnasium", "gym-trading-env", "gym-anytrading")


def best_rate(call: Callable[[], int], seconds: float) -> float:
    """Steps a second of `call`, which returns the steps it took: the best of `RUNS` that fill `seconds`."""
    call()
    best = 0.0
    for _ in range(RUNS):
        steps = 0
        start = time.perf_counter()
        while (spent := time.perf_counter() - start) < seconds / RUNS:
            steps += call()
        best = max(best, steps / spent)
    return best


def mlp(inputs: int, outputs: int) -> nn.Module:
    """A policy of the usual size."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)
    ).requires_grad_(False)  # fmt: skip


class Training:
    """A policy-gradient step on all that was seen in the last `TRAIN_EVERY` steps, after so many of them.

    Args:
        policy: the policy, whose last layer has `levels` outputs a branch.
        levels: of a branch.
    """

    def __init__(self, policy: nn.Module, levels: int) -> None:
        self.policy, self.levels = policy.requires_grad_(True), levels
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=1e-5)
        self.seen: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []

    def add(self, observations: np.ndarray, actions: np.ndarray, rewards: np.ndarray) -> None:
        """Observations [N, D], actions [N, branches] and rewards [N] of a step."""
        self.seen.append((observations, actions, rewards))
        if len(self.seen) < TRAIN_EVERY:
            return
        observed, taken, paid = (torch.from_numpy(np.concatenate(column)) for column in zip(*self.seen, strict=True))
        self.seen.clear()
        logits = self.policy(observed).unflatten(-1, (-1, self.levels)).log_softmax(-1)
        chosen = logits.gather(-1, taken.long().unsqueeze(-1)).sum((1, 2))
        self.optimizer.zero_grad()
        (-(chosen * paid.float()).mean()).backward()
        self.optimizer.step()


def greedy(policy: nn.Module, observations: np.ndarray, levels: int) -> np.ndarray:
    """The greedy level of each branch, int64 [N, branches]."""
    with torch.no_grad():
        return policy(torch.from_numpy(observations)).unflatten(-1, (-1, levels)).argmax(-1).numpy()


def single(env: gym.Env, seconds: float) -> tuple[float, float, float]:
    """Steps a second of one environment: alone, with a policy's inference, with its training as well."""
    multi = isinstance(env.action_space, gym.spaces.MultiDiscrete)
    levels = int(env.action_space.nvec[0]) if multi else int(env.action_space.n)
    env.action_space.seed(0)
    drawn = [env.action_space.sample() for _ in range(1_000)]
    policy = mlp(int(np.prod(env.observation_space.shape)), levels * (4 if multi else 1))
    env.reset(seed=0)

    def alone() -> int:
        step = env.step
        for action in drawn:
            _, _, terminated, truncated, _ = step(action)
            if terminated or truncated:
                env.reset()
        return len(drawn)

    observation = env.reset()[0]

    def with_policy() -> int:
        nonlocal observation
        for _ in range(100):
            chosen = greedy(policy, np.asarray(observation, np.float32).reshape(-1), levels)
            observation, _, terminated, truncated, _ = env.step(chosen if multi else int(chosen[0]))
            if terminated or truncated:
                observation = env.reset()[0]
        return 100

    training = Training(mlp(int(np.prod(env.observation_space.shape)), levels * (4 if multi else 1)), levels)

    def with_training() -> int:
        nonlocal observation
        for _ in range(100):
            seen = np.array(observation, np.float32).reshape(1, -1)
            chosen = greedy(training.policy, seen, levels)
            observation, reward, terminated, truncated, _ = env.step(chosen[0] if multi else int(chosen[0, 0]))
            training.add(seen, chosen, np.array([reward]))
            if terminated or truncated:
                observation = env.reset()[0]
        return 100

    return best_rate(alone, seconds), best_rate(with_policy, seconds), best_rate(with_training, seconds)


def batch(
    step: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]],
    restart: Callable[[np.ndarray], object],
    shape: tuple[int, int],
    dtype: type,
    seconds: float,
) -> tuple[float, float, float]:
    """Steps a second of a batch: alone, with a policy's inference, with its training as well.

    Args:
        step: takes actions [N, 4] and returns observations [N, D] and rewards [N].
        restart: starts new episodes in the accounts of a mask [N].
        shape: (N, D).
        dtype: of the actions.
        seconds: a figure.
    """
    num_envs, features = shape
    rng = np.random.default_rng(0)
    drawn = [rng.integers(0, 3, (num_envs, 4), dtype) for _ in range(DRAWN)]
    calls = max(1, 20_000 // num_envs)
    turn = 0
    # Episodes that began together would end together: let them begin at different times.
    groups = 50
    for group in range(groups):
        restart(np.arange(num_envs) % groups == group)
        for _ in range(EPISODE // groups):
            step(drawn[turn % DRAWN])
            turn += 1

    def alone() -> int:
        nonlocal turn
        for _ in range(calls):
            step(drawn[turn % DRAWN])
            turn += 1
        return calls * num_envs

    policy = mlp(features, 12)
    observations = step(drawn[0])[0]

    def with_policy() -> int:
        nonlocal observations
        for _ in range(calls):
            observations = step(greedy(policy, observations, 3).astype(dtype, copy=False))[0]
        return calls * num_envs

    training = Training(mlp(features, 12), 3)

    def with_training() -> int:
        nonlocal observations
        for _ in range(calls):
            seen = observations.copy()
            chosen = greedy(training.policy, seen, 3).astype(dtype, copy=False)
            observations, rewards = step(chosen)
            training.add(seen, chosen, rewards.copy())
        return calls * num_envs

    return best_rate(alone, seconds), best_rate(with_policy, seconds), best_rate(with_training, seconds)


def batch_rows(market: fox_env.Market, seconds: float) -> Iterator[tuple[str, int, tuple[float, float, float], str]]:
    """The vector environment and the engine below it."""
    for num_envs, copy in [(n, True) for n in BATCHES] + [(n, False) for n in BATCHES]:
        venv = gym.make_vec("FoxES-v0", num_envs, "vector_entry_point", market=market, episode_bars=EPISODE, copy=copy)
        venv.reset(seed=0)
        rates = batch(
            lambda actions, venv=venv: venv.step(actions)[:2],
            lambda mask, venv=venv: venv.reset(options={"reset_mask": mask}),
            venv.observation_space.shape,
            np.int64,
            seconds,
        )
        name = f"FoxES-v0 make_vec{'' if copy else ' copy=False'}"
        yield name, num_envs, rates, f"checked actions, {'copies, ' if copy else ''}infos"
    for num_envs in BATCHES:
        engine = Engine(market, game_of(market, {"episode_bars": EPISODE}), num_envs)
        engine.reset()

        def step(actions: np.ndarray, engine: Engine = engine) -> tuple[np.ndarray, np.ndarray]:
            engine.step(actions)
            return engine.obs, engine.reward

        rates = batch(step, engine.reset, engine.obs.shape, np.int32, seconds)
        yield "Engine.step", num_envs, rates, "the compiled call alone"


def gym_trading_env(market: fox_env.Market) -> gym.Env:
    """gym-trading-env on the same bars and features."""
    import gym_trading_env  # noqa: F401

    frame = pd.DataFrame(
        {name: getattr(market.bars, name) for name in ("open", "high", "low", "close")}
        | {f"feature_{name}": market.observed[:, j] for j, name in enumerate(market.feature_names)},
        index=pd.DatetimeIndex(market.ts),
    )
    with warnings.catch_warnings():  # its module turns every warning of the process into an error
        return gym.make(
            "TradingEnv", df=frame, positions=[-1, 0, 1], trading_fees=1e-5, max_episode_duration=EPISODE, verbose=0
        )


def gym_anytrading(market: fox_env.Market) -> gym.Env:
    """gym-anytrading on a thousand of the same bars."""
    import gym_anytrading  # noqa: F401

    frame = pd.DataFrame({"Close": market.bars.close})
    return gym.make("stocks-v0", df=frame, window_size=17, frame_bound=(17, 17 + EPISODE))


def single_rows(
    market: fox_env.Market, seconds: float
) -> Iterator[tuple[str, int, tuple[float, float, float] | None, str]]:
    """One environment through gym.make, and its peers; rates are None where a peer is not installed."""
    yield "FoxES-v0 gym.make", 1, single(gym.make("FoxES-v0"), seconds), "fills, costs, margin, rolls; 34 features"
    yield "CartPole-v1 gym.make", 1, single(gym.make("CartPole-v1"), seconds), "no market"
    peers = (
        ("gym-trading-env", gym_trading_env, "close fills, proportional fees; same features"),
        ("gym-anytrading", gym_anytrading, "no fills, no costs in the reward; observes a view of 17 prices"),
    )
    for name, make, note in peers:
        if importlib.util.find_spec(name.replace("-", "_")) is None:
            yield name, 1, None, note
        else:
            yield f"{name} gym.make", 1, single(make(market), seconds), note


def header(seconds: float) -> str:
    """Machine, versions and method."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    root = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(("git", *arguments), cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    commit = git("rev-parse", "--short", "HEAD") or "unknown"
    if git("status", "--porcelain", "--untracked-files=no"):
        commit += " with changes"
    packages = [
        f"{name} {version(name)}" for name in PACKAGES if importlib.util.find_spec(name.replace("-", "_")) is not None
    ]
    return (
        f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, "
        f"{dt.datetime.now(dt.UTC):%Y-%m-%d}, commit {commit}\n"
        f"Python {platform.python_version()}, {', '.join(packages)}\n"
        f"Steps a second: random actions drawn beforehand, positions open, resets included, market in memory; best of\n"
        f"{RUNS} runs of {seconds / RUNS:g} s. With policy: actions of a 64-64 MLP (torch), batched, greedy. With\n"
        f"training: a policy-gradient step on all that was seen, every {TRAIN_EVERY} steps."
    )


def main() -> None:
    """Measure, print and, if asked, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=2.0, help="time of a figure (default 2)")
    parser.add_argument("--save", metavar="NAME", help="keep the table as benchmarks/results/NAME.txt")
    arguments = parser.parse_args()

    # Gymnasium's checker says of gym-anytrading at each step what the table says once.
    warnings.filterwarnings("ignore", message=".*share an object")
    market = fox_env.synthetic_market("planted")
    table = Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("environment")
    for column in ("batch", "step alone", "with policy", "with training"):
        table.add_column(column, justify="right")
    table.add_column("what a step has")
    for rows in (single_rows, batch_rows):
        for name, num_envs, rates, note in rows(market, arguments.seconds):
            figures = ("not installed", "", "") if rates is None else (f"{rate:,.0f}" for rate in rates)
            table.add_row(name, f"{num_envs:,}", *figures, note)
    text = io.StringIO()
    console = Console(file=text, width=150)
    console.print(header(arguments.seconds), highlight=False)
    console.print(table)
    report = "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
    publish(report, arguments.save)


if __name__ == "__main__":
    main()
