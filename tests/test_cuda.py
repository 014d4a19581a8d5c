"""The same game and the same learner on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fox_env import FoxESTorchEnv, FoxESVectorEnv, dynamics, evaluate, synthetic_market
from fox_env.engine import Engine, game_of, observation_bounds
from tests.env.games import random_market

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

GAMES = [
    {},
    {"max_contracts": 7, "min_hold_bars": 1, "depth_contracts": 2, "fill_rule": "touch", "mirror_prob": 0.5,
     "window": 3},
    {"flat_at_close": True, "initial_equity_usd": 20_000.0, "min_hold_bars": 2, "commission_bps_round_trip": 0.18,
     "shaping": {"entropy": 0.1, "micro": 0.01, "hindsight": 0.2, "drawdown": 0.3}},
]  # fmt: skip


@pytest.mark.parametrize("settings", GAMES)
@pytest.mark.parametrize("num_envs", [1, 100, 1000])
def test_gpu_and_cpu_play_the_same_game(settings, num_envs):
    market = random_market(np.random.default_rng(0), 3_000)
    game = game_of(market, {"episode_bars": 100, **settings})
    engines = [Engine(market, game, num_envs, device, dynamics.SAME_STEP) for device in ("cpu", "cuda")]
    actions = np.random.default_rng(1).integers(0, 3, (300, num_envs, 4)).astype(np.int32)
    for engine in engines:
        engine.seed(np.full(num_envs, 5), np.arange(num_envs))
        engine.reset()
    worst = 0.0
    for action in actions:
        cpu, gpu = engines
        cpu.step(action)
        gpu.step(torch.from_numpy(action).cuda())
        for name in ("count", "flags"):
            np.testing.assert_array_equal(getattr(gpu, name).cpu().numpy(), getattr(cpu, name))
        for name in ("money", "points"):
            mine, theirs = getattr(gpu, name).cpu().numpy(), getattr(cpu, name)
            np.testing.assert_allclose(mine, theirs, rtol=1e-9, atol=1e-9)
            worst = max(worst, np.nanmax(np.abs(mine - theirs)))
        np.testing.assert_allclose(gpu.reward.cpu().numpy(), cpu.reward, rtol=1e-6, atol=1e-12)
        np.testing.assert_allclose(gpu.obs.cpu().numpy(), cpu.obs, rtol=1e-6, atol=1e-6)
    print(f"largest difference of money: {worst:.1e}")


def test_ten_million_steps():
    """4,096 accounts: what they see is finite and in its space, the books balance, and the CPU plays the same."""
    market = random_market(np.random.default_rng(4), 5_000)
    game = game_of(market, {"episode_bars": 500, "mirror_prob": 0.5})
    low, high = (torch.from_numpy(bound).cuda() for bound in observation_bounds(market, game.window))
    gpu, cpu = (Engine(market, game, n, device) for n, device in ((4_096, "cuda"), (256, "cpu")))
    for engine in (gpu, cpu):
        engine.seed(np.full(engine.num_envs, 11), np.arange(engine.num_envs))
        engine.reset()
    steps = 10_000_000 // 4_096 + 1
    generator = torch.Generator("cuda").manual_seed(0)
    paid = torch.zeros(4_096, dtype=torch.float64, device="cuda")
    scale = torch.zeros_like(paid)
    for _ in range(steps):
        action = torch.randint(0, 3, (4_096, 4), device="cuda", dtype=torch.int32, generator=generator)
        fresh = gpu.count[dynamics.DONE] != 0
        gpu.step(action)
        cpu.step(action[:256].cpu().numpy())
        assert ((gpu.obs >= low) & (gpu.obs <= high)).all()  # not so for NaN
        assert torch.isfinite(gpu.reward).all()
        # Of each episode, the sum of what its steps earned is what the account holds.
        paid = torch.where(fresh, 0.0, paid + gpu.points[dynamics.PNL])
        scale = torch.where(fresh, 0.0, scale + gpu.points[dynamics.PNL].abs())
        assert ((paid - gpu.money[dynamics.NET]).abs() <= 1e-9 * scale.clamp(min=1.0)).all()
        # The first 256 of 4,096 are the 256 of 256.
        assert np.array_equal(gpu.flags[:, :256].cpu().numpy(), cpu.flags)
        np.testing.assert_allclose(gpu.money[:, :256].cpu().numpy(), cpu.money, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_envs", [1, 31, 33, 4_097, 16_385, 131_073])
def test_every_account_of_any_batch_is_played(num_envs):
    """Blocks hold 32 to 128 accounts: the last one of a batch may be cut anywhere."""
    market = random_market(np.random.default_rng(5), 1_000)
    game = game_of(market, {"episode_bars": 40, "mirror_prob": 0.5, "window": 2})
    engines = [Engine(market, game, num_envs, device) for device in ("cpu", "cuda")]
    rng = np.random.default_rng(6)
    for engine in engines:
        engine.seed(np.full(num_envs, 5), np.arange(num_envs))
        engine.reset()
    for _ in range(5):
        action = rng.integers(0, 3, (num_envs, 4)).astype(np.int32)
        engines[0].step(action)
        engines[1].step(torch.from_numpy(action).cuda())
        for name in ("count", "flags"):
            assert np.array_equal(getattr(engines[1], name).cpu().numpy(), getattr(engines[0], name))
        np.testing.assert_allclose(engines[1].obs.cpu().numpy(), engines[0].obs, rtol=1e-6, atol=1e-6)


def test_faces_on_the_gpu():
    market = random_market(np.random.default_rng(2), 2_000)
    vector = FoxESVectorEnv(64, market, device="cuda", episode_bars=50)
    observation, _ = vector.reset(seed=1)
    assert observation.is_cuda
    for _ in range(120):
        observation, *_, infos = vector.step(torch.randint(0, 3, (64, 4), device="cuda"))
    assert torch.isfinite(observation).all()
    assert infos["equity_usd"].is_cuda
    with pytest.raises(ValueError, match="out of range"):
        vector.step(torch.full((64, 4), 3, device="cuda"))
    from torchrl.envs.utils import check_env_specs

    env = FoxESTorchEnv(market, num_envs=8, device="cuda", seed=0, episode_bars=20)
    check_env_specs(env)
    assert env.rollout(60, break_when_any_done=False)["observation"].is_cuda


def test_a_step_can_be_captured_in_a_graph():
    market = random_market(np.random.default_rng(3), 2_000)
    game = game_of(market, {"episode_bars": 100})
    engines = [Engine(market, game, 256, "cuda", dynamics.NEXT_STEP) for _ in range(2)]
    action = torch.randint(0, 3, (256, 4), device="cuda", dtype=torch.int32)
    for engine in engines:
        engine.seed(np.full(256, 9), np.arange(256))
        engine.reset()
        engine.step(action)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        engines[1].step(action)
    for _ in range(150):
        engines[0].step(action)
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(engines[0].money, engines[1].money)
    assert torch.equal(engines[0].obs, engines[1].obs)


def test_evaluation_agrees():
    _, _, test = synthetic_market("planted", 12_000, 1).split(0.5, 0.2)
    cpu, gpu = (
        evaluate("random", test, device=device, baselines=False).policies["agent"] for device in ("cpu", "cuda")
    )
    assert gpu["net_pnl_points"] == pytest.approx(cpu["net_pnl_points"], rel=1e-9)
    assert gpu["trades"] == cpu["trades"]


def test_training_on_the_gpu_resumes_bitwise(tmp_path):
    from fox_agent import Trainer, load_profile

    profile = load_profile(
        "configs/dqn-smoketest.toml",
        {
            "train.epochs": 2, "train.updates_per_epoch": 20, "replay.min_size": 512, "replay.capacity": 4_096,
            "collect.num_envs": 64, "game.episode_bars": 200, "network.residual": True, "network.norm": "rms",
        },
    )  # fmt: skip
    train, valid, _ = synthetic_market("planted", 12_000, 1).split(0.5, 0.25)
    whole = Trainer(profile, train, valid, out=tmp_path / "whole", device="cuda")
    whole.fit()
    part = Trainer(profile, train, valid, out=tmp_path / "part", device="cuda")
    with pytest.raises(KeyboardInterrupt):
        part.fit(on_update=lambda t: t.stop() if t.update_count == 25 else None)
    resumed = Trainer(profile, train, valid, out=tmp_path / "part", device="cuda")
    resumed.fit(resume=True)
    for mine, theirs in zip(resumed.network.parameters(), whole.network.parameters(), strict=True):
        assert torch.isfinite(mine).all()
        assert torch.equal(mine, theirs)
