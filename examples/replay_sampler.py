"""Prioritized replay for any TorchRL program: Fox's sampler in the place of `torchrl.data.PrioritizedSampler`.

    python examples/replay_sampler.py [--steps 300] [--device cuda]

A network learns f(x) = sin 3x, with a narrow spike that few of the stored points lie on. Its errors are the priorities,
so the spike is drawn far more often than its share. On a CUDA storage the priorities live on the GPU, with any build of
TorchRL.
"""

from __future__ import annotations

import argparse

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

from fox_agent import CudaPrioritizedSampler

CAPACITY = 10_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    torch.manual_seed(0)

    # The sampler needs the storage's capacity and the exponents; the buffer is TorchRL's own.
    sampler = CudaPrioritizedSampler(CAPACITY, alpha=0.6, beta=0.4, eps=1e-6)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(CAPACITY, device=device),
        sampler=sampler,
        batch_size=256,
        priority_key="td_error",
        generator=torch.Generator(device).manual_seed(0),
    )

    # New items get the largest priority known, so that each is likely to be seen soon.
    x = 2 * torch.rand(CAPACITY, 1, device=device) - 1
    spike = (x - 0.5).abs() < 0.01
    buffer.extend(TensorDict({"x": x, "y": torch.sin(3 * x) + 2 * spike}, batch_size=[CAPACITY], device=device))

    network = torch.nn.Sequential(torch.nn.Linear(1, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    on_spike = []
    for step in range(arguments.steps):
        # β rises to 1; `sampler.alpha` can be set as well, which rebuilds the tree.
        sampler.beta = 0.4 + 0.6 * step / arguments.steps
        batch = buffer.sample()
        error = (network(batch["x"]) - batch["y"]).squeeze(1)
        loss = (batch["priority_weight"] * error.square()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        # The priority is the error itself, not the weighted one.
        batch["td_error"] = error.detach().abs()
        buffer.update_tensordict_priority(batch)
        on_spike.append(spike[batch["index"].to(device)].float().mean())

    print(f"share of the spike among the stored points: {spike.float().mean():.2%}")
    print(f"among those drawn in the last 100 steps:    {torch.stack(on_spike[-100:]).mean():.2%}")
    print(f"priorities replaced (NaN, infinite, negative): {int(sampler.replaced)}")


if __name__ == "__main__":
    main()
