"""skrl's PPO on the vector environment.

python examples/skrl_ppo.py
"""

import tempfile
from collections.abc import Callable

import gymnasium as gym
import numpy as np
import planted
import torch
from skrl.agents.torch.ppo import PPO, PPO_CFG
from skrl.envs.wrappers.torch import wrap_env
from skrl.memories.torch import RandomMemory
from skrl.models.torch import DeterministicMixin, Model, MultiCategoricalMixin
from skrl.trainers.torch import SequentialTrainer
from skrl.utils import set_seed
from torch import nn

import fox_env

STEPS = 2_000_000
NUM_ENVS = 256
NUM_STEPS = 32
GAMMA = 0.9


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


class Policy(MultiCategoricalMixin, Model):
    def __init__(self, **spaces) -> None:
        Model.__init__(self, **spaces)
        MultiCategoricalMixin.__init__(self)
        self.net = mlp(self.num_observations, self.num_actions)

    def compute(self, inputs: dict, role: str = "") -> tuple[torch.Tensor, dict]:
        return self.net(inputs["observations"]), {}

    @torch.no_grad()
    def best(self, obs: np.ndarray) -> np.ndarray:
        """The most probable actions, [N, 4]."""
        return self.net(torch.as_tensor(obs)).unflatten(-1, (4, 3)).argmax(-1).numpy()


class Value(DeterministicMixin, Model):
    def __init__(self, **spaces) -> None:
        Model.__init__(self, **spaces)
        DeterministicMixin.__init__(self)
        self.net = mlp(self.num_observations, 1)

    def compute(self, inputs: dict, role: str = "") -> tuple[torch.Tensor, dict]:
        return self.net(inputs["observations"]), {}


def train(market: fox_env.Market, steps: int, seed: int) -> Callable[[np.ndarray], np.ndarray]:
    set_seed(seed)
    envs = gym.make_vec(
        "FoxES-v0", NUM_ENVS, vectorization_mode="vector_entry_point", market=market, mirror_prob=planted.MIRROR
    )
    env = wrap_env(gym.wrappers.vector.NormalizeReward(envs, gamma=GAMMA), verbose=False)
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space, "device": "cpu"}
    policy, value = Policy(**spaces), Value(**spaces)
    with tempfile.TemporaryDirectory() as logs:
        agent = PPO(
            models={"policy": policy, "value": value},
            memory=RandomMemory(memory_size=NUM_STEPS, num_envs=NUM_ENVS, device="cpu"),
            cfg=PPO_CFG(
                rollouts=NUM_STEPS,
                learning_epochs=3,
                mini_batches=8,
                discount_factor=GAMMA,
                gae_lambda=0.8,
                learning_rate=3e-3,
                value_loss_scale=0.5,
                value_clip=0.0,
                experiment={"directory": logs, "write_interval": 0, "checkpoint_interval": 0},
            ),
            **spaces,
        )
        trainer = SequentialTrainer(
            env=env,
            agents=agent,
            cfg={
                "timesteps": max(NUM_STEPS, steps // NUM_ENVS),
                "headless": True,
                "disable_progressbar": True,
                "close_environment_at_exit": False,
            },
        )
        trainer.train()
    env.close()
    return policy.best


if __name__ == "__main__":
    planted.run(train, STEPS)
