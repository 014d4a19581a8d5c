"""Stable-Baselines3's PPO on `FoxES-v0`.

python examples/sb3_ppo.py
"""

import gymnasium as gym
import planted
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
from stable_baselines3.common.vec_env import VecNormalize

import fox_env

STEPS = 2_000_000
NUM_ENVS = 64
GAMMA = 0.9  # an order stands for ten bars; what comes much later is noise


def train(market: fox_env.Market, steps: int, seed: int) -> PPO:
    env = make_vec_env(
        lambda: gym.make("FoxES-v0", market=market, mirror_prob=planted.MIRROR), n_envs=NUM_ENVS, seed=seed
    )
    # A reward is a return of a few 1e-4. Observations are normalized already.
    env = VecNormalize(env, norm_obs=False, gamma=GAMMA)
    model = PPO(
        "MlpPolicy",
        env,
        n_steps=128,
        batch_size=1024,
        n_epochs=3,
        learning_rate=2e-3,
        gamma=GAMMA,
        gae_lambda=0.8,
        seed=seed,
        device="cpu",
    )
    return model.learn(steps)


if __name__ == "__main__":
    planted.run(train, STEPS)
