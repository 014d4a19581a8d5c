"""TorchRL's PPO, its own collector, advantage and loss, on `FoxESTorchEnv`.

python examples/torchrl_ppo.py
"""

import planted
import torch
from tensordict.nn import TensorDictModule
from torch.distributions import Categorical, Independent
from torchrl.collectors import Collector
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.data.replay_buffers import SamplerWithoutReplacement
from torchrl.envs import Compose, InitTracker, RewardScaling, TransformedEnv
from torchrl.modules import MLP, ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

import fox_env

STEPS = 2_000_000
NUM_ENVS = 256
FRAMES = 32 * NUM_ENVS
EPOCHS = 3
MINIBATCH = 1024
REWARD_SCALE = 3_000.0  # a reward is a return of a few 1e-4
GAMMA = 0.9


class FourBranches(Independent):
    """A categorical distribution for each branch of the action: logits [..., 12] to actions [..., 4]."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__(Categorical(logits=logits.unflatten(-1, (4, 3))), 1)

    @property
    def deterministic_sample(self) -> torch.Tensor:
        return self.mode


def train(market: fox_env.Market, steps: int, seed: int) -> ProbabilisticActor:
    torch.manual_seed(seed)
    env = TransformedEnv(
        fox_env.FoxESTorchEnv(market, num_envs=NUM_ENVS, seed=seed, mirror_prob=planted.MIRROR),
        Compose(InitTracker(), RewardScaling(loc=0.0, scale=REWARD_SCALE)),
    )
    inputs = env.observation_spec["observation"].shape[-1]
    network = {"in_features": inputs, "num_cells": [64, 64], "activation_class": torch.nn.Tanh}
    actor = ProbabilisticActor(
        TensorDictModule(MLP(out_features=12, **network), in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=FourBranches,
        return_log_prob=True,
    )
    critic = ValueOperator(MLP(out_features=1, **network), in_keys=["observation"])
    loss = ClipPPOLoss(
        actor, critic, entropy_bonus=False, critic_coeff=0.5, loss_critic_type="l2", normalize_advantage=True
    )
    advantage = GAE(gamma=GAMMA, lmbda=0.8, value_network=critic)
    optimizer = torch.optim.Adam(loss.parameters(), lr=3e-3, eps=1e-5)
    buffer = TensorDictReplayBuffer(
        storage=LazyTensorStorage(FRAMES), sampler=SamplerWithoutReplacement(), batch_size=MINIBATCH
    )
    collector = Collector(env, actor, frames_per_batch=FRAMES, total_frames=-(-steps // FRAMES) * FRAMES)
    for data in collector:
        with torch.no_grad():
            advantage(data)
        buffer.extend(data.reshape(-1))
        for _ in range(EPOCHS):
            for batch in buffer:
                losses = loss(batch)
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"]).backward()
                torch.nn.utils.clip_grad_norm_(loss.parameters(), 0.5)
                optimizer.step()
    collector.shutdown()
    return actor


if __name__ == "__main__":
    planted.run(train, STEPS)
