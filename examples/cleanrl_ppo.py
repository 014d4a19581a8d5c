"""PPO in one file, in the manner of CleanRL: PyTorch and Gymnasium's vector environment, nothing else.

python examples/cleanrl_ppo.py
"""

import gymnasium as gym
import numpy as np
import planted
import torch
from gymnasium.vector import AutoresetMode
from torch import nn
from torch.distributions import Categorical

import fox_env

STEPS = 2_000_000
NUM_ENVS = 256
NUM_STEPS = 32
EPOCHS = 3
MINIBATCH = 1024
GAMMA = 0.9
GAE_LAMBDA = 0.8
CLIP = 0.2
VALUE_COEF = 0.5
MAX_GRAD_NORM = 0.5
LEARNING_RATE = 3e-3


def layer(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    linear = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    return nn.Sequential(layer(inputs, 64), nn.Tanh(), layer(64, 64), nn.Tanh(), layer(64, outputs, gain))


class Agent(nn.Module):
    def __init__(self, envs: gym.vector.VectorEnv) -> None:
        super().__init__()
        inputs = envs.single_observation_space.shape[0]
        self.branches = envs.single_action_space.nvec.tolist()
        self.actor = mlp(inputs, sum(self.branches), gain=0.01)
        self.critic = mlp(inputs, 1, gain=1.0)

    def value(self, obs: torch.Tensor) -> torch.Tensor:
        return self.critic(obs).squeeze(-1)

    def distributions(self, obs: torch.Tensor) -> list[Categorical]:
        return [Categorical(logits=logits) for logits in self.actor(obs).split(self.branches, dim=-1)]

    def act(self, obs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        distributions = self.distributions(obs)
        action = torch.stack([one.sample() for one in distributions], dim=-1)
        return action, self.log_prob(distributions, action)

    @staticmethod
    def log_prob(distributions: list[Categorical], action: torch.Tensor) -> torch.Tensor:
        return sum(one.log_prob(column) for one, column in zip(distributions, action.unbind(-1), strict=True))

    @torch.no_grad()
    def forward(self, obs: np.ndarray) -> np.ndarray:
        """The most probable actions, [N, 4]."""
        return torch.stack([one.probs.argmax(-1) for one in self.distributions(torch.as_tensor(obs))], dim=-1).numpy()


def train(market: fox_env.Market, steps: int, seed: int) -> Agent:
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    envs = gym.make_vec(
        "FoxES-v0",
        NUM_ENVS,
        vectorization_mode="vector_entry_point",
        autoreset_mode=AutoresetMode.SAME_STEP,
        market=market,
        mirror_prob=planted.MIRROR,
    )
    envs = gym.wrappers.vector.NormalizeReward(envs, gamma=GAMMA)
    agent = Agent(envs)
    optimizer = torch.optim.Adam(agent.parameters(), lr=LEARNING_RATE, eps=1e-5)
    size = (NUM_STEPS, NUM_ENVS)
    observations = torch.zeros(*size, *envs.single_observation_space.shape)
    actions = torch.zeros(*size, *envs.single_action_space.shape, dtype=torch.int64)
    log_probs, rewards, dones, values = (torch.zeros(size) for _ in range(4))
    obs = torch.as_tensor(envs.reset(seed=seed)[0])
    for _ in range(max(1, steps // (NUM_STEPS * NUM_ENVS))):
        for step in range(NUM_STEPS):
            observations[step] = obs
            with torch.no_grad():
                actions[step], log_probs[step] = agent.act(obs)
                values[step] = agent.value(obs)
            obs, reward, terminated, truncated, infos = envs.step(actions[step].numpy())
            obs = torch.as_tensor(obs)
            rewards[step] = torch.as_tensor(reward)
            dones[step] = torch.as_tensor(terminated | truncated)
            if truncated.any():  # the game would have gone on from the final observation
                final = torch.as_tensor(np.stack(infos["final_obs"][truncated]))
                with torch.no_grad():
                    rewards[step, truncated] += GAMMA * agent.value(final)

        with torch.no_grad():
            next_value = agent.value(obs)
        advantages = torch.zeros(size)
        last = torch.zeros(NUM_ENVS)
        for step in reversed(range(NUM_STEPS)):
            going = 1.0 - dones[step]
            delta = rewards[step] + GAMMA * going * next_value - values[step]
            advantages[step] = last = delta + GAMMA * GAE_LAMBDA * going * last
            next_value = values[step]
        batch = [part.flatten(0, 1) for part in (observations, actions, log_probs, advantages, advantages + values)]

        for _ in range(EPOCHS):
            for rows in np.split(rng.permutation(NUM_STEPS * NUM_ENVS), NUM_STEPS * NUM_ENVS // MINIBATCH):
                seen, action, old, advantage, target = (part[rows] for part in batch)
                ratio = (agent.log_prob(agent.distributions(seen), action) - old).exp()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
                gain = torch.min(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                value_loss = (agent.value(seen) - target).square().mean()
                optimizer.zero_grad()
                (VALUE_COEF * value_loss - gain).backward()
                nn.utils.clip_grad_norm_(agent.parameters(), MAX_GRAD_NORM)
                optimizer.step()
    return agent


if __name__ == "__main__":
    planted.run(train, STEPS)
