"""Philox words against published answers, and the noise made from them."""

from __future__ import annotations

import math

import pytest
import torch

from fox_agent.ops import advantage_noise, normals, philox_4x32
from fox_agent.ops.noise import ADVANTAGE_STREAM, WEIGHT_STREAM, box_muller


def seed_offset(seed: int = 7, offset: int = 0) -> torch.Tensor:
    return torch.tensor([seed, offset])


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # known-answer vectors published with Random123
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_known_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    words = torch.tensor(counter)[:, None].expand(4, 3)  # three columns alike
    out = philox_4x32(words, torch.tensor(key))
    assert out.T.tolist() == [expected] * 3


def test_box_muller_by_hand() -> None:
    # u = (0 + 1) / 2^24, v = 1/4: the angle is pi / 2. Then u = 1 (the largest word): radius 0.
    words = torch.tensor([[0], [1 << 30], [0xFFFFFFFF], [12345678]])
    largest = math.sqrt(2 * 24 * math.log(2))
    assert box_muller(words)[:, 0].tolist() == pytest.approx([0.0, largest, 0.0, 0.0], abs=1e-6)


def test_a_draw_is_blocks_of_philox_laid_out_as_documented() -> None:
    seed, offset = (5 << 32) | 17, (3 << 32) | 2
    x = normals((2, 5), torch.tensor([seed, offset]), stream=9)
    blocks = torch.arange(3)
    counter = torch.stack((blocks, torch.full((3,), 9), torch.full((3,), 2), torch.full((3,), 3)))
    expected = box_muller(philox_4x32(counter, torch.tensor([17, 5]))).T.flatten()[:10]
    assert torch.equal(x.flatten(), expected)


def test_normals_are_standard() -> None:
    x = normals((200_000,), seed_offset(), ADVANTAGE_STREAM).double()
    n = len(x)
    assert x.mean().item() == pytest.approx(0, abs=4 / math.sqrt(n))
    assert x.var().item() == pytest.approx(1, abs=4 * math.sqrt(2 / n))
    assert (x**3).mean().item() == pytest.approx(0, abs=4 * math.sqrt(15 / n))
    assert (x**4).mean().item() == pytest.approx(3, abs=4 * math.sqrt(96 / n))
    # Kolmogorov-Smirnov distance; 1.95 / sqrt(n) is passed by chance once in a thousand
    cdf = torch.special.ndtr(x.sort().values)
    assert (cdf - (torch.arange(n) + 0.5) / n).abs().max() < 1.95 / math.sqrt(n)
    pairs = x.view(-1, 2)
    assert (pairs[:, 0] * pairs[:, 1]).mean().abs() < 4 / math.sqrt(n / 2)
    assert (x[1:] * x[:-1]).mean().abs() < 4 / math.sqrt(n)


def test_same_state_same_noise_and_every_part_of_it_matters() -> None:
    x = normals((3, 4, 3), seed_offset(1, 5), ADVANTAGE_STREAM)
    assert torch.equal(x, normals((3, 4, 3), seed_offset(1, 5), ADVANTAGE_STREAM))
    for other in (seed_offset(2, 5), seed_offset(1, 6), seed_offset(1 + (1 << 32), 5), seed_offset(1, 5 + (1 << 32))):
        y = normals((3, 4, 3), other, ADVANTAGE_STREAM)
        assert not (x == y).any()
    assert not (x == normals((3, 4, 3), seed_offset(1, 5), WEIGHT_STREAM)).any()


def test_an_environment_keeps_its_noise_when_others_are_added() -> None:
    few, many = normals((3, 4, 3), seed_offset(), 1), normals((100, 4, 3), seed_offset(), 1)
    assert torch.equal(few, many[:3])


def test_negative_and_large_seeds() -> None:
    for seed in (-1, -(2**63), 2**63 - 1):
        assert torch.isfinite(normals((64,), seed_offset(seed, 2**62), 1)).all()


def test_r16_absolute_noise_differs_per_sample_and_action() -> None:
    state = seed_offset()
    q = torch.full((5000, 4, 3), 0.02)
    noise = advantage_noise(q, state, 0.1, relative=False) - q
    assert noise.std().item() == pytest.approx(0.1, rel=0.05)
    assert noise.flatten().unique().numel() > 0.99 * noise.numel()
    assert state.tolist() == [7, 0]  # read only
    assert (q == 0.02).all()


def test_relative_noise_follows_the_spread_of_each_branch() -> None:
    # Branch k has Q = +-s_k around a mean that differs by state: its spread is s_k * sqrt(2/3) with (-s, 0, s).
    s = torch.tensor([1.0, 0.1, 10.0, 1e-3])
    q = torch.tensor([-1.0, 0.0, 1.0])[None, None] * s[None, :, None] + torch.linspace(-50, 50, 4000)[:, None, None]
    noise = advantage_noise(q.double().float(), seed_offset(), 0.5, relative=True) - q
    expected = 0.5 * s * math.sqrt(2 / 3)
    assert noise[:, :3].std((0, 2)).tolist() == pytest.approx(expected[:3].tolist(), rel=0.03)


def test_relative_noise_without_spread_is_negligible_and_finite() -> None:
    q = torch.zeros(10, 4, 3)
    noise = advantage_noise(q, seed_offset(), 1.0, relative=True)
    assert torch.isfinite(noise).all()
    assert 0 < noise.abs().max() < 1e-6


def test_sigma_may_live_in_a_tensor() -> None:
    q = torch.randn(8, 4, 3)
    a = advantage_noise(q, seed_offset(), torch.tensor(0.3), relative=True)
    assert torch.equal(a, advantage_noise(q, seed_offset(), 0.3, relative=True))


def test_bad_arguments_are_named() -> None:
    with pytest.raises(TypeError, match=r"seed_offset has dtype torch.int32"):
        normals((3,), seed_offset().int(), 1)
    with pytest.raises(ValueError, match=r"seed_offset has shape \(3,\)"):
        normals((3,), torch.zeros(3, dtype=torch.int64), 1)
    with pytest.raises(ValueError, match=r"q_BKM has shape \(4, 3\)"):
        advantage_noise(torch.zeros(4, 3), seed_offset(), 0.1, relative=False)
