"""Stable-Baselines3's DQN on `FoxES-Discrete-v0`.

python examples/sb3_dqn.py
"""

import gymnasium as gym
import planted
import torch
from stable_baselines3 import DQN
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

import fox_env

STEPS = 1_500_000
NUM_ENVS = 64
GAMMA = 0.9


def train(market: fox_env.Market, steps: int, seed: int) -> DQN:
    env = make_vec_env(
        lambda: gym.make("FoxES-Discrete-v0", market=market, mirror_prob=planted.MIRROR), n_envs=NUM_ENVS, seed=seed
    )
    # A reward is a return of a few 1e-4. Observations are normalized already.
    env = VecNormalize(env, norm_obs=False, gamma=GAMMA)
    model = DQN(
        "MlpPolicy",
        env,
        buffer_size=1_000_000,
        learning_starts=20_000,
        batch_size=1024,
        train_freq=4,
        gradient_steps=2,
        target_update_interval=25_600,
        n_steps=10,  # the bars that an order stands at least
        learning_rate=5e-4,
        gamma=GAMMA,
        exploration_fraction=0.7,
        exploration_final_eps=0.2,
        # Without decay a replay of a market so noisy is learned by heart.
        policy_kwargs={"optimizer_class": torch.optim.AdamW, "optimizer_kwargs": {"weight_decay": 1.0}},
        seed=seed,
        device="cpu",
    )
    return model.learn(steps)


if __name__ == "__main__":
    planted.run(train, STEPS)
