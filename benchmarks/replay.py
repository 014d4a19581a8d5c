"""Rate of prioritized replay beside TorchRL's own sampler, on one storage in one run.

    python benchmarks/replay.py [--capacity 1000000] [--save NAME]

Two paths, each for batches of 256 and 8,192: the sampler alone (`sample`, then `update_priority`), and a
`TensorDictReplayBuffer` end to end (`sample` with its gather of 64 bytes an item, then `update_tensordict_priority`).
The samplers take turns, call by call; the figure is the best of all calls, with the median beside it, and waits for the
device. On CPU, and on CUDA where there is a GPU: there TorchRL's own sampler needs its CUDA wheel, or trees on the CPU.
`--save NAME` keeps the table as benchmarks/results/NAME.txt. On a busy machine set OMP_NUM_THREADS=1, or the gather's
threads wait for one another and hide the rest.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("RL_WARNINGS", "0")

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, PrioritizedSampler, TensorDictReplayBuffer

from fox_agent import CudaPrioritizedSampler

BATCHES = (256, 8192)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--capacity", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=2.0, help="of measurement per line")
    parser.add_argument("--save", metavar="NAME")
    arguments = parser.parse_args()
    lines = []

    def say(line: str) -> None:
        print(line, flush=True)
        lines.append(line)

    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "torchrl", "tensordict", "numba"))
    say(f"{date.today()}, {packages}, Python {platform.python_version()}")
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    for device in devices:
        say(torch.cuda.get_device_name() if device == "cuda" else f"{processor()}, threads: {torch.get_num_threads()}")
        say(f"{'path':8} {'batch':>6} {'sampler':22} {'best':>9} {'median':>9} {'M items/s':>10} {'x first':>10}")
        for batch in BATCHES:
            for path in ("sampler", "buffer"):
                measure(path, device, arguments.capacity, batch, arguments.seconds, say)
    if arguments.save:
        folder = Path(__file__).parent / "results"
        folder.mkdir(exist_ok=True)
        (folder / f"{arguments.save}.txt").write_text("\n".join(lines) + "\n")


def measure(path: str, device: str, capacity: int, batch: int, seconds: float, say: Callable[[str], None]) -> None:
    storage = LazyTensorStorage(capacity, device=device)
    items = TensorDict({"obs": torch.zeros(capacity, 16, device=device)}, [capacity], device=device)
    storage.set(torch.arange(capacity), items)
    candidates = {"TorchRL": PrioritizedSampler(capacity, alpha=0.6, beta=0.4)}
    if device == "cuda":
        candidates["TorchRL, trees on CPU"] = PrioritizedSampler(capacity, alpha=0.6, beta=0.4, device="cpu")
    candidates["Fox"] = CudaPrioritizedSampler(capacity, alpha=0.6, beta=0.4)
    calls = {}
    for name, sampler in candidates.items():
        try:
            calls[name] = prepare(path, sampler, storage, batch)
            calls[name]()
        except RuntimeError as error:
            calls.pop(name, None)
            say(f"{path:8} {batch:6,} {name:22} {str(error).splitlines()[0]}")
    times = {name: [] for name in calls}
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            if device == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - began)
    peer = min(next(iter(times.values())))
    for name, seen in times.items():
        best, median = min(seen), statistics.median(seen)
        say(
            f"{path:8} {batch:6,} {name:22} {best * 1e6:6.0f} us {median * 1e6:6.0f} us {batch / best / 1e6:10.2f} "
            f"{peer / best:10.2f}"
        )


def prepare(path: str, sampler: PrioritizedSampler, storage: LazyTensorStorage, batch: int) -> Callable[[], None]:
    """One call of the path, with priorities drawn once."""
    capacity = len(storage)
    buffer = TensorDictReplayBuffer(storage=storage, sampler=sampler, batch_size=batch, priority_key="td_error")
    sampler.update_priority(torch.arange(capacity), torch.rand(capacity) + 1e-3, storage=storage)
    sampler._rng = torch.Generator(sampler.device).manual_seed(0)
    priority_B = (torch.rand(batch) + 1e-3).to(storage.device)

    def alone() -> None:
        index_B, _ = sampler.sample(storage, batch)
        sampler.update_priority(index_B, priority_B, storage=storage)

    def end_to_end() -> None:
        data = buffer.sample()
        data["td_error"] = priority_B
        buffer.update_tensordict_priority(data)

    return alone if path == "sampler" else end_to_end


def processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    return next((row.split(":", 1)[1].strip() for row in text.splitlines() if row.startswith("model name")), "CPU")


if __name__ == "__main__":
    main()
