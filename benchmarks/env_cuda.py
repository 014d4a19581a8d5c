"""Steps a second of the engine on a GPU, one step a launch inside a CUDA graph.

Actions are random and read from memory, observations have 48 floats, positions are open, and episodes of 1,000 bars end
and start while the clock runs. Beside each rate stand the bytes that a step must move and which share of the card's
copy bandwidth, measured in the same run, they make.

    python benchmarks/env_cuda.py               print the table
    python benchmarks/env_cuda.py --save NAME   and keep it as benchmarks/results/NAME.txt
"""

from __future__ import annotations

import argparse
import datetime as dt
import platform
from collections.abc import Callable
from importlib.metadata import version

import numpy as np
import torch
from saving import publish
from torch import nn

import fox_env
from fox_env import dynamics
from fox_env.data.features import DEFAULT_FEATURES, EVEN, Feature, FeatureInput, select
from fox_env.data.rolls import Segment
from fox_env.data.synthetic import synthetic_bars
from fox_env.engine import Engine, game_of
from fox_env.market import build_market

BATCHES = (4_096, 65_536, 1_048_576)
OBSERVED = 48
EPISODE = 1_000
STEPS = 64  # in a graph, each with actions of its own
TRAIN_EVERY = 16
RUNS = 5


def market_of(columns: int) -> fox_env.Market:
    """The embedded market's bars with as many features."""
    made = synthetic_bars("planted")
    chosen = list(select([made.bars], DEFAULT_FEATURES))

    def noise(number: int) -> Feature:
        def draw(given: FeatureInput) -> np.ndarray:
            return np.random.default_rng(number).standard_normal(len(given.bars))

        return Feature(f"noise_{number}", EVEN, 0, draw)

    chosen += [noise(k) for k in range(columns - len(chosen))]
    return build_market([Segment("SYNTHETIC", made.bars, 0, 0.0)], "ES", 300_000_000_000, features=chosen)


def seconds_of(call: Callable[[], object]) -> float:
    """Best of several runs, timed on the device."""
    call()
    best = float("inf")
    for _ in range(RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end) / 1_000)
    return best


def copy_bandwidth() -> float:
    """Bytes a second read and written by a copy of one GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / seconds_of(lambda: target.copy_(source))


def bytes_a_step(engine: Engine) -> int:
    """What a step of an account reads and writes in memory that it shares with no other account.

    Rows of the tape and of the features are shared: on a market that fits into the cache they are read from there.
    """
    written = engine.obs.shape[1] * 4 + 4 + dynamics.POINTS_ROWS * 8 + dynamics.FLAGS_ROWS * 4
    account = 4 * 4 + 3 * 8  # bar, position, age and steps; net, basis and peak
    read_only = 3 * 4 + 4 * 4  # stop, mirrored and done; the action
    return written + 2 * account + read_only


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """`work` as one graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def engine_of(market: fox_env.Market, num_envs: int) -> Engine:
    """An engine whose episodes end at different times."""
    engine = Engine(market, game_of(market, {"episode_bars": EPISODE}), num_envs, "cuda", dynamics.NEXT_STEP)
    engine.reset()
    engine.count[dynamics.STEPS] = torch.arange(num_envs, device="cuda", dtype=torch.int32) % EPISODE
    return engine


def rates(market: fox_env.Market, num_envs: int) -> tuple[float, float, float, Engine]:
    """Steps a second: alone, with a policy's inference, with training as well."""
    torch.manual_seed(0)
    engine = engine_of(market, num_envs)
    pool = min(STEPS, max(4, (1 << 30) // (16 * num_envs)))
    actions = [torch.randint(0, 3, (num_envs, 4), device="cuda", dtype=torch.int32) for _ in range(pool)]

    def alone() -> None:
        for step in range(STEPS):
            engine.step(actions[step % pool])

    policy = nn.Sequential(
        nn.Linear(engine.obs.shape[1], 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 12)
    ).cuda()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-4, capturable=True)

    def choose() -> torch.Tensor:
        return policy(engine.obs).unflatten(1, (4, 3)).argmax(-1).to(torch.int32)

    def with_policy() -> None:
        with torch.no_grad():
            for _ in range(STEPS):
                engine.step(choose())

    def with_training() -> None:
        for step in range(STEPS):
            with torch.no_grad():
                chosen = choose()
                seen = engine.obs.clone() if step % TRAIN_EVERY == 0 else None
                engine.step(chosen)
            if seen is not None:  # one policy-gradient step on the whole batch
                logits = policy(seen).unflatten(1, (4, 3)).log_softmax(-1)
                taken = logits.gather(-1, chosen.long().unsqueeze(-1)).sum((1, 2))
                loss = -(taken * engine.reward).mean()
                optimizer.zero_grad(set_to_none=False)
                loss.backward()
                optimizer.step()

    figures = []
    for work in (alone, with_policy, with_training):
        replay = captured(work)
        for _ in range(3):
            replay()
        figures.append(num_envs * STEPS / seconds_of(replay))
    return (*figures, engine)


def main() -> None:
    """Measure, print and, if asked, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", metavar="NAME", help="keep the table as benchmarks/results/NAME.txt")
    arguments = parser.parse_args()
    market = market_of(OBSERVED - dynamics.POSITION_FIELDS)
    bandwidth = copy_bandwidth()
    lines = [
        f"{torch.cuda.get_device_name()}, {dt.datetime.now(dt.UTC):%Y-%m-%d}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, numba {version('numba')}, numba-cuda {version('numba-cuda')}",
        f"Copy bandwidth: {bandwidth / 1e12:.2f} TB/s read and written. {STEPS} steps in a graph, best of {RUNS} runs;",
        f"policy: 64-64 MLP in float32; training: one policy-gradient step on the batch every {TRAIN_EVERY} steps.",
        "",
        f"{'accounts':>10} {'step alone':>15} {'with policy':>15} {'with training':>15}   steps a second",
    ]
    for num_envs in BATCHES:
        alone, policy, training, engine = rates(market, num_envs)
        moved = bytes_a_step(engine)
        lines.append(
            f"{num_envs:>10,} {alone / 1e9:>13.2f} G {policy / 1e9:>13.2f} G {training / 1e9:>13.2f} G   "
            f"{moved} bytes a step: {alone * moved / bandwidth:.0%} of the copy bandwidth; "
            f"{num_envs / alone * 1e6:.1f} us a step"
        )
        del engine
        torch.cuda.empty_cache()
    report = "\n".join(lines) + "\n"
    publish(report, arguments.save)


if __name__ == "__main__":
    main()
