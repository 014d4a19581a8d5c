"""Counter-based Gaussian noise on Q values: operator `advantage_noise`.

Shape suffixes: B batch, K branches, M actions of a branch.

Philox 4x32-10 (Salmon, Moraes, Dror and Shaw, 2011, "Parallel random numbers: as easy as 1, 2, 3") and Box-Muller.
There is no hidden state: a device tensor int64[2] = {seed, offset} decides everything, the functions here only read it,
and the caller adds 1 to the offset once a draw.

Element e of a draw (row-major) is normal e % 4 of block e // 4. A block is Philox with key (seed low, seed high) and
counter (block, stream, offset low, offset high), so that streams never share words. Words w0, w1 give normals 0 and 1,
words w2, w3 normals 2 and 3: with u = ((w_even >> 8) + 1) / 2^24 and v = (w_odd >> 8) / 2^24 they are sqrt(-2 ln u)
times cos(2 pi v) and sin(2 pi v). 24 bits, so that u and v are exact in float32 on every device.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fox_agent.ops.registry import define_operator

ADVANTAGE_STREAM = 1
WEIGHT_STREAM = 2

_MASK32 = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_SMALLEST_SPREAD = 1e-8


def _column(pair: tuple[int, int], device: torch.device) -> Tensor:
    # Filled on the device: torch.tensor(pair, device=...) would copy from the host, which a captured step must not do.
    return torch.stack([torch.full((1,), word, dtype=torch.int64, device=device) for word in pair])


def philox_4x32(counter_4X: Tensor, key_2: Tensor) -> Tensor:
    """Philox 4x32-10.

    Args:
        counter_4X: int64 [4, X], each a 32-bit word.
        key_2: int64 [2], each a 32-bit word.

    Returns:
        int64 [4, X], each a 32-bit word.
    """
    # Both multiplications of a round at once: words 0 and 2 are multiplied, words 1 and 3 mixed in. An int64 product
    # wraps, which leaves its 64 bits right; the shift copies the sign, which the mask removes.
    multiplier_21 = _column(_MULTIPLIERS, counter_4X.device)
    weyl_21 = _column(_WEYL, counter_4X.device)
    key_21 = key_2[:, None]
    even_2X, odd_2X = counter_4X[0::2], counter_4X[1::2]
    for _ in range(_ROUNDS):
        product_2X = (even_2X * multiplier_21).flip(0)
        even_2X, odd_2X = ((product_2X >> 32) & _MASK32) ^ odd_2X ^ key_21, product_2X & _MASK32
        key_21 = (key_21 + weyl_21) & _MASK32
    return torch.stack((even_2X, odd_2X), 1).flatten(0, 1)


def box_muller(word_4X: Tensor) -> Tensor:
    """Four float32 standard normals from four 32-bit words: [4, X] to [4, X], as the module's text says."""
    bits_4X = (word_4X >> 8).float()
    radius_2X = ((bits_4X[0::2] + 1) * 2.0**-24).log().mul(-2).sqrt()
    angle_2X = bits_4X[1::2] * (2 * math.pi * 2.0**-24)
    return torch.stack((radius_2X * angle_2X.cos(), radius_2X * angle_2X.sin()), 1).flatten(0, 1)


def _check_seed_offset(seed_offset: Tensor) -> None:
    if seed_offset.dtype != torch.int64:
        raise TypeError(f"seed_offset has dtype {seed_offset.dtype}, expected torch.int64.")
    if tuple(seed_offset.shape) != (2,):
        raise ValueError(f"seed_offset has shape {tuple(seed_offset.shape)}, expected (2,).")


def normals(shape: tuple[int, ...], seed_offset: Tensor, stream: int) -> Tensor:
    """Standard normals, float32, decided by {seed, offset} and stream alone. Element e does not depend on the shape.

    Args:
        shape: any, of at most 2^34 elements.
        seed_offset: int64 [2], read only.
        stream: word that keeps the users of one {seed, offset} apart.

    Raises:
        TypeError: seed_offset is not int64.
        ValueError: seed_offset has not two elements.
    """
    _check_seed_offset(seed_offset)
    count = math.prod(shape)
    block_X = torch.arange((count + 3) // 4, device=seed_offset.device)
    low_2, high_2 = seed_offset & _MASK32, (seed_offset >> 32) & _MASK32
    counter_4X = torch.stack(
        (
            block_X,
            torch.full_like(block_X, stream),
            low_2[1].expand_as(block_X),
            high_2[1].expand_as(block_X),
        )
    )
    key_2 = torch.stack((low_2[0], high_2[0]))
    return box_muller(philox_4x32(counter_4X, key_2)).T.flatten()[:count].view(shape)


def advantage_spread(q_BKM: Tensor) -> Tensor:
    """Spread of Q over each branch's actions: root mean square over batch and actions of Q - mean_a Q, [K]."""
    return (q_BKM - q_BKM.mean(2, keepdim=True)).square().mean((0, 2)).sqrt()


def _advantage_noise(q_BKM: Tensor, seed_offset: Tensor, sigma: Tensor, relative: bool) -> Tensor:
    q_BKM, scale = q_BKM.float(), sigma.float()
    if relative:
        scale = scale * advantage_spread(q_BKM).clamp_min(_SMALLEST_SPREAD)[:, None]
    return (q_BKM + scale * normals(tuple(q_BKM.shape), seed_offset, ADVANTAGE_STREAM)).contiguous()


def _advantage_noise_fake(q_BKM: Tensor, seed_offset: Tensor, sigma: Tensor, relative: bool) -> Tensor:
    return q_BKM.new_empty(q_BKM.shape, dtype=torch.float32)


_advantage_noise_operator = define_operator(
    "advantage_noise",
    "(Tensor q_BKM, Tensor seed_offset, Tensor sigma, bool relative) -> Tensor",
    _advantage_noise,
    _advantage_noise_fake,
)


def advantage_noise(q_BKM: Tensor, seed_offset: Tensor, sigma: Tensor | float, relative: bool) -> Tensor:
    """Q plus Gaussian noise, its own draw for every sample and action. For action selection while collecting only.

    Args:
        q_BKM: expected Q, [B, K, M].
        seed_offset: int64 [2], read only; add 1 to the offset for the next draw.
        sigma: standard deviation; in Q's units, or, if ``relative``, as a multiple of the branch's `advantage_spread`
            (at least 1e-8, so that ties are broken even where all Q are equal). A tensor has no dimensions.
        relative: see sigma.

    Returns:
        [B, K, M], float32, without a gradient.

    Raises:
        TypeError, ValueError: as `normals`; q_BKM has not three dimensions, sigma has any.
    """
    if q_BKM.dim() != 3:
        raise ValueError(f"q_BKM has shape {tuple(q_BKM.shape)}, expected [B, K, M].")
    _check_seed_offset(seed_offset)
    if not isinstance(sigma, Tensor):
        sigma = torch.full((), sigma, dtype=torch.float32, device=q_BKM.device)
    if sigma.dim():
        raise ValueError(f"sigma has shape {tuple(sigma.shape)}, expected ().")
    return _advantage_noise_operator(q_BKM.detach(), seed_offset, sigma.detach(), relative)
