"""Sum tree of prioritized replay (Schaul et al. 2016, arXiv 1511.05952): operators `priority_build`,
`priority_update`, `priority_sample`, and `scatter_last_`.

Layout. A tree is one flat float64 tensor: the leaves, then the sums of every 32 of them, then the sums of every 32 of
those, and so on; the last element is the root. Each level is padded with zeros to whole nodes of 32. The 32 children of
a node are added as a balanced binary tree over neighbours (0+1, 2+3, ...; then those in pairs), so that a sum depends
on its children alone, and any implementation that keeps this order gives the same bits. An update recomputes parents
from their children; no difference is ever accumulated, hence nothing drifts.

Sampling walks from the root down and turns right only into a positive sum. A leaf of 0, or the padding, is therefore
never drawn as long as the root is positive; with a root of 0 the draw is leaf 0.

On CPU the loops run under numba, elsewhere as level-by-level PyTorch without host synchronization; both give equal
bits. Suffixes: B batch, N nodes, C = 32 children.
"""

from __future__ import annotations

from itertools import pairwise

import numba
import numpy as np
import torch
from torch import Tensor

from fox_agent.ops.registry import define_operator

FANOUT = 32


def level_sizes(capacity: int) -> tuple[int, ...]:
    """Elements of each level of a tree of `capacity` leaves, leaves first, root (1) last, padding included.

    Raises:
        ValueError: `capacity` is not positive.
    """
    if capacity < 1:
        raise ValueError(f"capacity is {capacity}, expected at least 1")
    sizes = []
    nodes = capacity
    while nodes > 1 or not sizes:
        nodes = -(-nodes // FANOUT)
        sizes.append(nodes * FANOUT)
    return (*sizes, 1)


def build(leaf_N: Tensor) -> Tensor:
    """A new tree over the leaves, which are finite and not negative.

    Args:
        leaf_N: float64 [N].

    Returns:
        float64 [sum of `level_sizes(N)`]; the leaves are its first N elements, the total is its last.

    Raises:
        ValueError: `leaf_N` is not a float64 vector of at least one element.
    """
    if leaf_N.ndim != 1 or leaf_N.dtype != torch.float64:
        raise ValueError(f"leaf_N is {leaf_N.dtype} of shape {tuple(leaf_N.shape)}, expected a float64 vector")
    tree = leaf_N.new_empty(sum(level_sizes(len(leaf_N))))
    _build_operator(tree, leaf_N)
    return tree


def update(tree: Tensor, capacity: int, index_B: Tensor, value_B: Tensor) -> None:
    """Set leaves in place and recompute the sums above them; of equal indices the last in batch order wins.

    Args:
        tree: as made by `build` over `capacity` leaves.
        index_B: int64 [B], each in [0, capacity).
        value_B: float64 [B], finite and not negative.

    Raises:
        ValueError: a shape or dtype is wrong, or (found on CPU only) an index is out of range.
    """
    _check(tree, capacity)
    if index_B.ndim != 1 or index_B.dtype != torch.int64:
        raise ValueError(f"index_B is {index_B.dtype} of shape {tuple(index_B.shape)}, expected an int64 vector")
    if value_B.shape != index_B.shape or value_B.dtype != torch.float64:
        raise ValueError(
            f"value_B is {value_B.dtype} of shape {tuple(value_B.shape)}, expected float64 of shape "
            f"{tuple(index_B.shape)}"
        )
    _update_operator(tree, capacity, index_B, value_B)


def sample(tree: Tensor, capacity: int, u_B: Tensor) -> Tensor:
    """Leaves drawn with probability leaf ÷ root, by inverting the cumulative sum at u · root.

    Args:
        tree: as made by `build` over `capacity` leaves.
        u_B: float64 [B] in [0, 1), as from `uniform`.

    Returns:
        int64 [B], each in [0, capacity).

    Raises:
        ValueError: a shape or dtype is wrong.
    """
    _check(tree, capacity)
    if u_B.ndim != 1 or u_B.dtype != torch.float64:
        raise ValueError(f"u_B is {u_B.dtype} of shape {tuple(u_B.shape)}, expected a float64 vector")
    return _sample_operator(tree, capacity, u_B)


def uniform(batch: int, *, generator: torch.Generator | None, device: torch.device, stratified: bool) -> Tensor:
    """Draws for `sample`, float64 [batch] of 53 random bits; stratified ones lie one in each batch-th of [0, 1)."""
    source = device if generator is None else generator.device
    u_B = torch.rand(batch, dtype=torch.float64, generator=generator, device=source).to(device)
    if stratified:
        u_B = (torch.arange(batch, dtype=torch.float64, device=device) + u_B) / batch
    return u_B


def scatter_last_(target_N: Tensor, index_B: Tensor, value_B: Tensor) -> None:
    """`target_N[index_B] = value_B` in place where, of equal indices, the last in batch order wins on every device.

    Args:
        target_N: of any dtype.
        index_B: int64 [B], each in [0, N).
        value_B: [B], of the target's dtype.

    Raises:
        ValueError: a shape or dtype is wrong, or (found on CPU only) an index is out of range.
    """
    for name, tensor in (("target_N", target_N), ("index_B", index_B)):
        if tensor.ndim != 1:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, expected a vector")
    if index_B.dtype != torch.int64:
        raise ValueError(f"index_B is {index_B.dtype}, expected torch.int64")
    if value_B.shape != index_B.shape or value_B.dtype != target_N.dtype:
        raise ValueError(
            f"value_B is {value_B.dtype} of shape {tuple(value_B.shape)}, expected {target_N.dtype} of shape "
            f"{tuple(index_B.shape)}"
        )
    _scatter_last_operator(target_N, index_B, value_B)


def _check(tree: Tensor, capacity: int) -> None:
    sizes = level_sizes(capacity)
    if tree.dtype != torch.float64 or tree.shape != (sum(sizes),):
        raise ValueError(
            f"tree is {tree.dtype} of shape {tuple(tree.shape)}, expected float64 of shape ({sum(sizes)},) for "
            f"{capacity} leaves"
        )


def _last_of_equals(index_B: Tensor) -> Tensor:
    """For each row, the position of the last row with the same index: int64 [B]."""
    # A stable sort keeps equal indices in batch order; every row of a group then reads the group's last position, so
    # that duplicates write one value and the order in which the device writes them doesn't matter.
    sorted_B, order_B = index_B.sort(stable=True)
    return order_B[torch.searchsorted(sorted_B, index_B, right=True) - 1]


def _pair_sums(child_NC: Tensor) -> list[Tensor]:
    """The children and their sums by pairs, fours, ... down to the node's total: [N, 32], [N, 16], ..., [N, 1]."""
    sums = [child_NC]
    while sums[-1].shape[1] > 1:
        sums.append(sums[-1][:, 0::2] + sums[-1][:, 1::2])
    return sums


def _update_torch(tree: Tensor, sizes: tuple[int, ...], index_B: Tensor) -> None:
    levels = tree.split(sizes)
    node_B = index_B
    for below, above in pairwise(levels):
        node_B = node_B // FANOUT
        above[node_B] = _pair_sums(below.view(-1, FANOUT)[node_B])[-1].squeeze(1)


def _sample_torch(tree: Tensor, sizes: tuple[int, ...], u_B: Tensor) -> Tensor:
    levels = tree.split(sizes)
    mass_B1 = (u_B * levels[-1]).unsqueeze(1)
    node_B = torch.zeros_like(u_B, dtype=torch.int64)
    for level in reversed(levels[:-1]):
        child_B1 = torch.zeros_like(node_B).unsqueeze(1)
        for sums in reversed(_pair_sums(level.view(-1, FANOUT)[node_B])[:-1]):
            left_B1 = sums.gather(1, 2 * child_B1)
            right_B1 = sums.gather(1, 2 * child_B1 + 1)
            turn_right_B1 = (right_B1 > 0) & (mass_B1 >= left_B1)
            mass_B1 = torch.where(turn_right_B1, mass_B1 - left_B1, mass_B1)
            child_B1 = 2 * child_B1 + turn_right_B1
        node_B = node_B * FANOUT + child_B1.squeeze(1)
    return node_B


@numba.njit(cache=True)
def _scatter_last_cpu(target, index, value):
    for b in range(len(index)):
        if index[b] < 0 or index[b] >= len(target):
            return False
    for b in range(len(index)):
        target[index[b]] = value[b]
    return True


@numba.njit(cache=True)
def _pair_sums_cpu(sum32, sum16, sum8, sum4, sum2):
    """Fill the sums by pairs of a node's 32 children, as `_pair_sums`; loops of fixed length become vector code."""
    for i in range(16):
        sum16[i] = sum32[2 * i] + sum32[2 * i + 1]
    for i in range(8):
        sum8[i] = sum16[2 * i] + sum16[2 * i + 1]
    for i in range(4):
        sum4[i] = sum8[2 * i] + sum8[2 * i + 1]
    for i in range(2):
        sum2[i] = sum4[2 * i] + sum4[2 * i + 1]


@numba.njit(cache=True)
def _update_cpu(tree, sizes, index):
    sum16, sum8, sum4, sum2 = np.empty(16), np.empty(8), np.empty(4), np.empty(2)
    node = index // FANOUT
    base = 0
    for level in range(len(sizes) - 1):
        above = base + sizes[level]
        nodes = sizes[level] // FANOUT
        every = nodes <= len(node)  # fewer nodes than updates: each once
        for b in range(nodes if every else len(node)):
            n = b if every else node[b]
            first = base + n * FANOUT
            _pair_sums_cpu(tree[first : first + FANOUT], sum16, sum8, sum4, sum2)
            tree[above + n] = sum2[0] + sum2[1]
        node //= FANOUT
        base = above


@numba.njit(cache=True)
def _turn_cpu(sums, left, rest):
    """Go left or right between `sums[left]` and its neighbour: the side's position and the mass left there."""
    right = (sums[left + 1] > 0) & (rest >= sums[left])
    return left + right, rest - sums[left] * right


@numba.njit(cache=True)
def _sample_cpu(tree, sizes, u):
    # Level by level and without branches, so that the cache misses of many draws overlap.
    sum16, sum8, sum4, sum2 = np.empty(16), np.empty(8), np.empty(4), np.empty(2)
    node = np.zeros(len(u), np.int64)
    mass = u * tree[-1]
    base = len(tree) - 1
    for level in range(len(sizes) - 2, -1, -1):
        base -= sizes[level]
        for b in range(len(u)):
            first = base + node[b] * FANOUT
            sum32 = tree[first : first + FANOUT]
            _pair_sums_cpu(sum32, sum16, sum8, sum4, sum2)
            side, rest = _turn_cpu(sum2, 0, mass[b])
            side, rest = _turn_cpu(sum4, 2 * side, rest)
            side, rest = _turn_cpu(sum8, 2 * side, rest)
            side, rest = _turn_cpu(sum16, 2 * side, rest)
            side, rest = _turn_cpu(sum32, 2 * side, rest)
            mass[b] = rest
            node[b] = node[b] * FANOUT + side
    return node


def _build(tree: Tensor, leaf_N: Tensor) -> None:
    tree.zero_()
    tree[: len(leaf_N)] = leaf_N
    for below, above in pairwise(tree.split(level_sizes(len(leaf_N)))):
        sum_N = _pair_sums(below.view(-1, FANOUT))[-1].squeeze(1)
        above[: len(sum_N)] = sum_N


def _update(tree: Tensor, capacity: int, index_B: Tensor, value_B: Tensor) -> None:
    _scatter_last(tree[:capacity], index_B, value_B)
    sizes = level_sizes(capacity)
    if tree.is_cpu:
        _update_cpu(tree.numpy(), np.asarray(sizes), index_B.contiguous().numpy())
    else:
        _update_torch(tree, sizes, index_B)


def _sample(tree: Tensor, capacity: int, u_B: Tensor) -> Tensor:
    sizes = level_sizes(capacity)
    if tree.is_cpu:
        return torch.from_numpy(_sample_cpu(tree.numpy(), np.asarray(sizes), u_B.contiguous().numpy()))
    return _sample_torch(tree, sizes, u_B)


def _scatter_last(target_N: Tensor, index_B: Tensor, value_B: Tensor) -> None:
    if not target_N.is_cpu:
        target_N[index_B] = value_B[_last_of_equals(index_B)]
    elif not _scatter_last_cpu(target_N.numpy(), index_B.contiguous().numpy(), value_B.contiguous().numpy()):
        raise ValueError(f"index_B spans {index_B.min()} to {index_B.max()}, expected [0, {len(target_N)})")


def _nothing(*args: Tensor | int) -> None:
    """Fake of an operator that only writes."""


_build_operator = define_operator("priority_build", "(Tensor(a!) tree, Tensor leaf_N) -> ()", _build, _nothing)
_update_operator = define_operator(
    "priority_update", "(Tensor(a!) tree, int capacity, Tensor index_B, Tensor value_B) -> ()", _update, _nothing
)
_sample_operator = define_operator(
    "priority_sample",
    "(Tensor tree, int capacity, Tensor u_B) -> Tensor",
    _sample,
    lambda tree, capacity, u_B: u_B.new_empty(u_B.shape, dtype=torch.int64),
)
_scatter_last_operator = define_operator(
    "scatter_last_", "(Tensor(a!) target_N, Tensor index_B, Tensor value_B) -> ()", _scatter_last, _nothing
)
