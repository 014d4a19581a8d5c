"""Agents of other projects, trained by the files in `examples/`, on the test part of the planted market.

Shares are of what the oracle earns on the same sessions: expected is luck taken out, realized is the account. t is the
net profit over its standard error by sessions, so the test against flat; p is of the paired block bootstrap of the
session profits against random. The settings were chosen on the validation part.

    python benchmarks/thirdparty.py                       every agent, seed 0
    python benchmarks/thirdparty.py --seeds 0 1 --only sb3_ppo cleanrl_ppo
    python benchmarks/thirdparty.py --save NAME           and keep it as benchmarks/results/NAME.txt
"""

from __future__ import annotations

import argparse
import datetime as dt
import importlib
import importlib.util
import io
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import rich.box
import torch
from rich.console import Console
from rich.table import Table
from saving import publish

import fox_env

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import planted

AGENTS = {
    "sb3_ppo": "stable-baselines3",
    "sb3_dqn": "stable-baselines3",
    "sb3_contrib_qrdqn": "sb3-contrib",
    "torchrl_ppo": "torchrl",
    "cleanrl_ppo": "torch",
    "skrl_ppo": "skrl",
}
"""The examples and the package that each needs."""

BESIDE = ("flat", "random", "oracle")


def main() -> None:
    """Train, test, print and, if asked, save."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=AGENTS, default=list(AGENTS), help="agents, all by default")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--save", metavar="NAME", help="keep the table as benchmarks/results/NAME.txt")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    training, _, test = planted.parts()
    table = Table(box=rich.box.SIMPLE_HEAD)
    table.add_column("agent")
    for column in ("seed", "steps", "seconds", "expected", "realized", "t", "p against random"):
        table.add_column(column, justify="right")
    packages = {*AGENTS.values(), "numpy", "gymnasium", "tensordict"}
    git = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    head = (
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, torch on one "
        f"thread, {dt.datetime.now(dt.UTC):%Y-%m-%d}, commit {commit}\nPython {platform.python_version()}, "
        + ", ".join(f"{one} {version(one)}" for one in sorted(packages) if installed(one))
    )
    report = None
    for name in arguments.only:
        if not installed(AGENTS[name]):
            table.add_row(name, "", "", "", f"{AGENTS[name]} is not installed")
            continue
        example = importlib.import_module(name)
        for seed in arguments.seeds:
            began = time.perf_counter()
            policy = example.train(training, example.STEPS, seed)
            seconds = time.perf_counter() - began
            report = fox_env.evaluate(policy, test, seed=seed)
            standing = planted.standings(report)["agent"]
            table.add_row(name, str(seed), f"{example.STEPS:,}", f"{seconds:.0f}", *cells(standing))
            print(f"{name} {seed}: {seconds:.0f} s, {standing}", flush=True)
    if report is not None:
        table.add_section()
        for name, standing in planted.standings(report).items():
            if name in BESIDE:
                table.add_row(name, "", "", "", *cells(standing))
    text = io.StringIO()
    console = Console(file=text, width=150)
    console.print(head, highlight=False)
    console.print(table)
    shown = "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"
    publish(shown, arguments.save)


def installed(library: str) -> bool:
    """Whether a library can be imported, by its package's name."""
    return importlib.util.find_spec(library.replace("-", "_")) is not None


def cells(standing: planted.Standing) -> tuple[str, str, str, str]:
    """A standing's figures, as text."""
    p = f"{standing.p_random:.4f}" if standing.p_random == standing.p_random else "–"
    return f"{standing.expected:.2f}", f"{standing.realized:.2f}", f"{standing.t:.1f}", p


if __name__ == "__main__":
    main()
