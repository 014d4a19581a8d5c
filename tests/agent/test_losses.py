"""Distributional and quantile losses: projection, targets, gradients, live branches, and what the seeds got wrong."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from fox_agent.losses import LossBatch, LossCoefficients, total_loss
from fox_agent.network import NetworkOutput
from fox_agent.ops import (
    branch_dist_loss,
    check_support,
    cvar,
    dueling,
    expected_q,
    live_branches,
    project,
    quantile_huber_loss,
    quantile_midpoints,
    smooth,
    support_atoms,
)

F64 = torch.float64


def support(low: float, high: float, dtype: torch.dtype = F64) -> torch.Tensor:
    return torch.tensor([low, high], dtype=dtype)


def make(
    B: int = 5, K: int = 4, M: int = 3, N: int = 7, seed: int = 0, dtype: torch.dtype = F64, scale: float = 1.0
) -> dict:
    """Random arguments of `branch_dist_loss`."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=g, dtype=F64) * scale).to(dtype)

    heads = {}
    for name in ("", "next_", "target_"):
        heads[f"{name}value_BN"] = normal(B, N)
        heads[f"{name}adv_BKMN"] = normal(B, K, M, N)
    wide = F64 if dtype == F64 else torch.float32
    return heads | {
        "action_BK": torch.randint(0, M, (B, K), generator=g),
        "reward_B": torch.randn(B, generator=g, dtype=wide),
        "discount_B": torch.rand(B, generator=g, dtype=wide),
        "weight_B": torch.rand(B, generator=g, dtype=wide) + 0.1,
        "branch_weight_BK": (torch.rand(B, K, generator=g) < 0.7).to(wide),
        "next_send_BE": torch.rand(B, 9, generator=g) < 0.5 if (K, M) == (4, 3) else None,
        "support_2": support(-2.0, 3.0, wide),
        "coef_4": torch.tensor([0.6, 0.3, 0.2, 0.02], dtype=wide),
    }


def coef(alpha: float = 1.0, cql: float = 0.0, entropy: float = 0.0, smoothing: float = 0.0) -> torch.Tensor:
    return torch.tensor([alpha, cql, entropy, smoothing], dtype=F64)


def slow_project(probs: list[float], reward: float, discount: float, low: float, high: float) -> list[float]:
    n = len(probs)
    dz = (high - low) / (n - 1)
    out = [0.0] * n
    for j, p in enumerate(probs):
        b = (min(max(reward + discount * (low + j * dz), low), high) - low) / dz
        lower = min(max(math.floor(b), 0), n - 1)
        out[lower] += p * (1 - (b - lower))
        if b > lower and lower + 1 < n:
            out[lower + 1] += p * (b - lower)
    return out


def slow_loss(a: dict, kind: str = "stencil") -> torch.Tensor:
    """The documented formula, sample by sample and branch by branch, differentiable by autograd."""
    B, K, M, N = a["adv_BKMN"].shape
    low, high = a["support_2"].tolist()
    z = torch.linspace(low, high, N, dtype=F64)
    alpha, cql, entropy, s = a["coef_4"].tolist()
    losses = []
    for b in range(B):

        def logits(prefix: str, k: int, m: int, b: int = b) -> torch.Tensor:
            adv = a[f"{prefix}adv_BKMN"][b, k]
            return a[f"{prefix}value_BN"][b] + adv[m] - sum(adv[i] for i in range(M)) / M

        def q(prefix: str, k: int, m: int, b: int = b) -> torch.Tensor:
            return (torch.softmax(logits(prefix, k, m), 0) * z).sum()

        greedy = [max(range(M), key=lambda m, k=k: q("next_", k, m).item()) for k in range(K)]
        live = [True] * K
        if a["next_send_BE"] is not None:
            sends = bool(a["next_send_BE"][b, 3 * greedy[0] + greedy[1]])
            live = [True, greedy[0] != 1, sends, sends]
        values = [q("target_", k, greedy[k]).item() for k in range(K) if live[k]]
        reward, discount = a["reward_B"][b].item(), a["discount_B"][b].item()
        y = reward + discount * sum(values) / len(values)
        total_weight = a["branch_weight_BK"][b].sum().item()
        loss = torch.zeros((), dtype=F64)
        for k in range(K):
            if total_weight == 0:
                continue
            w = a["branch_weight_BK"][b, k].item() / total_weight
            own = k if live[k] else 0  # of a branch that cannot act at s', direction's
            p_target = torch.softmax(logits("target_", own, greedy[own]), 0)
            t = slow_project(p_target.tolist(), reward, discount, low, high)
            if kind == "uniform":
                t = [(1 - s) * x + s / N for x in t]
            elif kind == "stencil":
                t = [
                    x - (s * x if 0 < n < N - 1 else 0)
                    + (s / 2 * t[n - 1] if n > 1 else 0)
                    + (s / 2 * t[n + 1] if n < N - 2 else 0)
                    for n, x in enumerate(t)
                ]  # fmt: skip
            action = int(a["action_BK"][b, k])
            logp = torch.log_softmax(logits("", k, action), 0)
            q_all = torch.stack([q("", k, m) for m in range(M)])
            mse = 0.5 * (q_all[action] - y) ** 2
            ce = -(torch.tensor(t, dtype=F64) * logp).sum()
            conservative = torch.log(torch.exp(q_all).sum()) - q_all[action]
            h = -(logp.exp() * logp).sum()
            loss = loss + w * ((1 - alpha) * mse + alpha * ce + cql * conservative - entropy * h)
        losses.append(a["weight_B"][b] * loss)
    return torch.stack(losses)


def gradients(loss_function, a: dict, *names: str) -> list[torch.Tensor]:
    leaves = [a[name].clone().requires_grad_() for name in names]
    loss = loss_function(a | dict(zip(names, leaves, strict=True)))
    return list(torch.autograd.grad(loss, leaves))


# --- projection -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reward", "discount", "probs", "expected"),
    [
        # Atoms -1, 0, 1 (dz = 1).
        (0.0, 1.0, [0.2, 0.5, 0.3], [0.2, 0.5, 0.3]),  # nothing moves: each target is on its atom
        (1.0, 1.0, [0.2, 0.5, 0.3], [0.0, 0.2, 0.8]),  # -1,0,1 -> 0,1,2: the last is clipped to 1, .5 + .3
        (-1.0, 1.0, [0.2, 0.5, 0.3], [0.7, 0.3, 0.0]),  # -> -2,-1,0
        (1.0, 0.0, [0.2, 0.5, 0.3], [0.0, 0.0, 1.0]),  # terminal, exactly on the top atom
        (-1.0, 0.0, [0.2, 0.5, 0.3], [1.0, 0.0, 0.0]),  # terminal, exactly on the bottom atom
        (0.25, 0.0, [0.2, 0.5, 0.3], [0.0, 0.75, 0.25]),  # terminal, a quarter of the way from 0 to 1
        (
            0.25,
            0.5,
            [0.2, 0.5, 0.3],
            [0.05, 0.6, 0.35],
        ),  # -> -.25, .25, .75: .2*.25 | .2*.75+.5*.75+.3*.25 | .5*.25+.3*.75
        (50.0, 0.9, [0.2, 0.5, 0.3], [0.0, 0.0, 1.0]),  # far above
        (-50.0, 0.9, [0.2, 0.5, 0.3], [1.0, 0.0, 0.0]),  # far below
    ],
)
def test_projection_by_hand(reward: float, discount: float, probs: list[float], expected: list[float]) -> None:
    out = project(
        torch.tensor([[probs]]), torch.tensor([reward]), torch.tensor([discount]), support(-1.0, 1.0, torch.float32)
    )
    torch.testing.assert_close(out[0, 0], torch.tensor(expected), rtol=0, atol=1e-7)


@pytest.mark.parametrize("n", [51, 52, 101])
def test_a_target_on_an_atom_stays_there_whole(n: int) -> None:
    bounds = support(-12.8, 12.8, torch.float32)
    z = support_atoms(bounds, n)
    probs = torch.full((n, 1, n), 1 / n)
    out = project(probs, z, torch.zeros(n), bounds)  # terminal, reward = each atom in turn
    torch.testing.assert_close(out[:, 0], torch.eye(n), rtol=0, atol=2e-5)
    torch.testing.assert_close(out.double().sum(2), torch.ones(n, 1, dtype=F64), rtol=0, atol=1e-6)


def test_projection_with_reward_0_and_discount_1_is_the_identity_bit_for_bit() -> None:
    probs = torch.rand(3, 2, 32).softmax(2).mul(2**20).round().div(2**20)
    probs[:, :, 0] += 1 - probs.sum(2)  # multiples of 2^-20 whose sum is exactly 1
    assert torch.equal(project(probs, torch.zeros(3), torch.ones(3), support(-0.34, 16.22, torch.float32)), probs)


def test_a_small_reward_is_not_lost_beside_large_bounds() -> None:
    # float32 values near 1e6 are 1/16 apart; 11 atoms, dz = 1: a reward of .3 moves .3 of the mass one atom up.
    probs = torch.zeros(1, 1, 11)
    probs[0, 0, 4] = 1
    out = project(probs, torch.tensor([0.3]), torch.ones(1), support(1e6, 1e6 + 10, torch.float32))
    assert out[0, 0, 4:6].tolist() == pytest.approx([0.7, 0.3], abs=1e-6)


def test_projection_keeps_the_mass_on_a_hundred_thousand_ugly_supports() -> None:
    g = torch.Generator().manual_seed(1)
    ugly = [
        (-0.34, 16.22, 101),
        (1e6, 1e6 + 10, 52),
        (-1e-6, 1e-6, 51),
        (-3e37, 1e37, 52),
        (-1.0, 1e5, 3),
        (0.1, 0.3, 2),
    ]
    ugly += [(-float(4 * x), float(7 * y), n) for n in range(2, 90) for x, y in [torch.rand(2, generator=g).tolist()]]
    count = 0
    for low, high, n in ugly:
        bounds = support(low, high, torch.float32)
        check_support(bounds, n)
        B = 1100
        reward = torch.randn(B, generator=g) * (high - low)
        reward[:3] = torch.tensor([1e3, -1e3, 0.0])
        reward[3:40] = support_atoms(bounds, n)[torch.randint(0, n, (37,), generator=g)]
        discount = torch.rand(B, generator=g)
        discount[:200] = 0
        discount[200:400] = 1
        probs = torch.randn(B, 1, n, generator=g).mul_(4).softmax(2)
        probs[::7] = 1 / n
        out = project(probs, reward, discount, bounds)
        assert (out >= 0).all()
        error = (out.double().sum(2) - 1).abs().max()
        assert error <= 1e-6, (low, high, n, error)
        count += B
    assert count >= 100_000


def test_a_reward_of_1000_on_the_support_that_overflowed_elsewhere() -> None:
    bounds = support(-0.34, 16.22, torch.float32)
    out = project(torch.full((2, 1, 101), 1 / 101), torch.tensor([1e3, -1e3]), torch.tensor([0.99, 0.99]), bounds)
    assert out[0, 0, -1].item() == pytest.approx(1.0, abs=1e-6)
    assert out[1, 0, 0].item() == pytest.approx(1.0, abs=1e-6)


@settings(max_examples=50, deadline=None)
@given(st.floats(-3, 3), st.floats(0, 1), st.floats(-5, 0), st.floats(0.1, 5), st.integers(2, 60), st.integers(0, 1000))
def test_projection_matches_the_slow_one(
    reward: float, discount: float, low: float, width: float, n: int, seed: int
) -> None:
    probs = torch.rand(1, 2, n, generator=torch.Generator().manual_seed(seed), dtype=F64).softmax(2)
    scalars = torch.tensor([reward], dtype=F64), torch.tensor([discount], dtype=F64)
    out = project(probs, *scalars, support(low, low + width))
    for k in range(2):
        expected = slow_project(probs[0, k].tolist(), reward, discount, low, low + width)
        torch.testing.assert_close(out[0, k], torch.tensor(expected, dtype=F64), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("low", "high", "n"),
    [
        (1.0, 1.0, 52), (2.0, 1.0, 52), (math.nan, 1.0, 52), (-math.inf, 1.0, 52), (-3e38, 3e38, 52),
        (1e8, 1e8 + 16, 52), (0.0, 1.0, 1), (0.0, 1e-44, 52),
    ],
)  # fmt: skip
def test_degenerate_supports_are_refused(low: float, high: float, n: int) -> None:
    with pytest.raises(ValueError, match=r"support_2|num_atoms"):
        check_support(support(low, high, torch.float32), n)


def test_support_bounds_are_exact() -> None:
    z = support_atoms(support(-0.34, 16.22, torch.float32), 101)
    assert z[0] == torch.tensor(-0.34)
    assert z[-1] == torch.tensor(16.22)
    torch.testing.assert_close(support_atoms(support(-1, 1), 5), torch.tensor([-1, -0.5, 0, 0.5, 1], dtype=F64))


# --- smoothing ------------------------------------------------------------------------------------------------------


def test_stencil_by_hand() -> None:
    # Atom 2 holds 1: it gives .1 to either side. Atom 0, an end, gives nothing.
    out = smooth(torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0]), "stencil", 0.2)
    torch.testing.assert_close(out, torch.tensor([0.0, 0.1, 0.8, 0.1, 0.0]))
    end = torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0])
    assert torch.equal(smooth(end, "stencil", 0.2), end)
    out = smooth(torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]), "stencil", 0.2)
    torch.testing.assert_close(out, torch.tensor([0.1, 0.8, 0.1, 0.0, 0.0]))


@settings(max_examples=50, deadline=None)
@given(st.integers(2, 60), st.floats(0, 1), st.integers(0, 1000))
def test_stencil_keeps_mean_and_mass(n: int, s: float, seed: int) -> None:
    p = torch.randn(3, n, generator=torch.Generator().manual_seed(seed), dtype=F64).mul_(3).softmax(1)
    out = smooth(p, "stencil", s)
    z = support_atoms(support(-3.0, 11.0), n)
    torch.testing.assert_close(out @ z, p @ z, rtol=0, atol=1e-13)
    torch.testing.assert_close(out.sum(1), torch.ones(3, dtype=F64), rtol=0, atol=1e-14)
    assert (out >= 0).all()


def test_uniform_smoothing_has_the_floor_of_r22() -> None:
    out = smooth(torch.tensor([0.0, 1.0, 0.0, 0.0]), "uniform", 0.01)
    torch.testing.assert_close(out, torch.tensor([0.0025, 0.9925, 0.0025, 0.0025]))


def test_unknown_smoothing_is_refused() -> None:
    with pytest.raises(ValueError, match="smoothing_kind is 'gauss'"):
        smooth(torch.ones(3), "gauss", 0.1)


def chain_value(kind: str, s: float, reward: float, discount: float, bounds: torch.Tensor) -> float:
    """Fixed point of Z = reward + discount * Z, one state, no learning error."""
    p = torch.full((1, 1, 52), 1 / 52, dtype=F64)
    r, g = torch.tensor([reward], dtype=F64), torch.tensor([discount], dtype=F64)
    for _ in range(2500):
        p = smooth(project(p, r, g, bounds), kind, s)
    return (p[0, 0] @ support_atoms(bounds, 52)).item()


def test_r37_uniform_smoothing_halves_the_value_of_a_chain_and_the_stencil_does_not() -> None:
    bounds, reward, discount, epsilon = support(-80.0, 80.0), 0.2, 0.99, 0.01
    shrunk = (1 - epsilon) * reward / (1 - (1 - epsilon) * discount)
    assert shrunk == pytest.approx(9.95, abs=0.01)
    assert chain_value("uniform", epsilon, reward, discount, bounds) == pytest.approx(shrunk, rel=1e-3)
    assert chain_value("stencil", 0.02, reward, discount, bounds) == pytest.approx(20.0, rel=1e-3)
    assert chain_value("none", 0.0, reward, discount, bounds) == pytest.approx(20.0, rel=1e-3)


# --- dueling, live branches -----------------------------------------------------------------------------------------


def test_dueling_takes_the_mean_over_the_actions_of_each_branch() -> None:
    g = torch.Generator().manual_seed(0)
    for sizes in [(2, 3, 4, 5), (5, 4, 3, 2), (2, 1, 2, 2), (3, 2, 1, 4)]:
        B, K, M, N = sizes
        value, adv = torch.randn(B, N, generator=g), torch.randn(B, K, M, N, generator=g)
        out = dueling(value, adv)
        for b in range(B):
            for k in range(K):
                for n in range(N):
                    mean = sum(adv[b, k, i, n].item() for i in range(M)) / M
                    for m in range(M):
                        expected = value[b, n].item() + adv[b, k, m, n].item() - mean
                        assert out[b, k, m, n].item() == pytest.approx(expected, abs=1e-5)


def test_expected_q_by_hand() -> None:
    # One branch, two actions, atoms -1, 0, 1. Advantages +-ln 2 on the top atom: their mean is 0.
    adv = torch.zeros(1, 1, 2, 3)
    adv[0, 0, 0, 2], adv[0, 0, 1, 2] = math.log(2), -math.log(2)
    q = expected_q(torch.zeros(1, 3), adv, support(-1, 1, torch.float32))
    # (1, 1, 2)/4 -> .25; (1, 1, .5)/2.5 -> -.2
    torch.testing.assert_close(q, torch.tensor([[[0.25, -0.2]]]))


def test_live_branches_by_hand() -> None:
    send = torch.zeros(5, 9, dtype=torch.bool)
    send[0, 3 * 2 + 1] = True  # Long Half sends
    send[2, 3 * 1 + 0] = True  # Flat Small sends: a position is closed
    send[4, 8] = True  # Long Full sends, but Short Full is chosen
    action = torch.tensor([[2, 1, 0, 0], [2, 1, 2, 2], [1, 0, 0, 0], [1, 2, 1, 1], [0, 2, 0, 0]])
    expected = [
        [True, True, True, True],
        [True, True, False, False],
        [True, False, True, True],
        [True, False, False, False],
        [True, True, False, False],
    ]
    assert live_branches(action, send).tolist() == expected


# --- branch_dist_loss -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["none", "stencil", "uniform"])
@pytest.mark.parametrize("sizes", [(6, 4, 3, 7), (3, 2, 5, 4), (2, 1, 2, 2)])
def test_loss_and_gradient_equal_the_slow_formula(kind: str, sizes: tuple[int, ...]) -> None:
    for seed in range(3):
        a = make(*sizes, seed=seed)
        torch.testing.assert_close(branch_dist_loss(**a, smoothing_kind=kind).loss_B, slow_loss(a, kind))
        names = ("value_BN", "adv_BKMN")
        mine = gradients(lambda x: branch_dist_loss(**x, smoothing_kind=kind).loss_B.sum(), a, *names)
        theirs = gradients(lambda x: slow_loss(x, kind).sum(), a, *names)
        for m, t in zip(mine, theirs, strict=True):
            torch.testing.assert_close(m, t)


def test_gradcheck() -> None:
    a = make(B=3, N=5, seed=4)
    heads = a.pop("value_BN").requires_grad_(), a.pop("adv_BKMN").requires_grad_()
    assert torch.autograd.gradcheck(lambda v, adv: branch_dist_loss(v, adv, **a).loss_B, heads)


def test_only_the_loss_and_only_the_online_heads_have_a_gradient() -> None:
    a = make()
    for name in list(a)[:6]:
        a[name] = a[name].requires_grad_()
    out = branch_dist_loss(**a)
    assert out.loss_B.requires_grad
    assert [name for name in out._fields if getattr(out, name).requires_grad] == ["loss_B"]
    out.loss_B.sum().backward()
    assert [name for name in list(a)[:6] if a[name].grad is not None] == ["value_BN", "adv_BKMN"]


def test_c51_gradient_is_p_minus_t() -> None:
    # One action: the dueling mean cancels the advantage, so that the logits are the value.
    g = torch.Generator().manual_seed(0)
    value, target = torch.randn(1, 5, generator=g, dtype=F64), torch.randn(1, 5, generator=g, dtype=F64)
    adv = torch.zeros(1, 1, 1, 5, dtype=F64)
    one = torch.ones(1, dtype=F64)
    a = {
        "value_BN": value, "adv_BKMN": adv, "next_value_BN": value, "next_adv_BKMN": adv, "target_value_BN": target,
        "target_adv_BKMN": adv, "action_BK": torch.zeros(1, 1, dtype=torch.int64), "reward_B": 0.3 * one,
        "discount_B": 0.9 * one, "weight_B": one, "branch_weight_BK": one[:, None], "next_send_BE": None,
        "support_2": support(-1, 1), "coef_4": coef(),
    }  # fmt: skip
    t = project(target.softmax(1)[:, None], 0.3 * one, 0.9 * one, support(-1, 1))[:, 0]
    (grad,) = gradients(lambda x: branch_dist_loss(**x).loss_B.sum(), a, "value_BN")
    torch.testing.assert_close(grad, value.softmax(1) - t)
    a["coef_4"] = coef(alpha=0.0)  # squared error alone: td p_j (z_j - Q), with y from the target network
    z, p = support_atoms(support(-1, 1), 5), value.softmax(1)
    q, y = (p @ z).item(), 0.3 + 0.9 * (target.softmax(1) @ z).item()
    (grad,) = gradients(lambda x: branch_dist_loss(**x).loss_B.sum(), a, "value_BN")
    torch.testing.assert_close(grad, (q - y) * p * (z - q))


def test_double_q_chooses_with_the_online_network_and_values_with_the_target() -> None:
    a = make(B=64, seed=3) | {"next_send_BE": None, "coef_4": coef(alpha=0.0)}
    a["branch_weight_BK"] = torch.ones(64, 4, dtype=F64)
    out = branch_dist_loss(**a)
    q_next = expected_q(a["next_value_BN"], a["next_adv_BKMN"], a["support_2"])
    q_target = expected_q(a["target_value_BN"], a["target_adv_BKMN"], a["support_2"])
    assert torch.equal(out.greedy_BK, q_next.argmax(2))
    y = a["reward_B"] + a["discount_B"] * q_target.gather(2, out.greedy_BK[..., None])[..., 0].mean(1)
    q = expected_q(a["value_BN"], a["adv_BKMN"], a["support_2"]).gather(2, a["action_BK"][..., None])[..., 0]
    torch.testing.assert_close(out.td_B, (q - y[:, None]).abs().mean(1))
    torch.testing.assert_close(out.mse_B, ((q - y[:, None]) ** 2).mean(1) / 2)
    assert not torch.equal(out.greedy_BK, q_target.argmax(2))


def test_a_dead_branch_gets_exactly_no_gradient_and_a_dead_sample_none_at_all() -> None:
    a = make(B=4)
    a["branch_weight_BK"] = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0]], dtype=F64)
    value, adv = gradients(lambda x: branch_dist_loss(**x).loss_B.sum(), a, "value_BN", "adv_BKMN")
    nonzero_BK = (adv != 0).any(3).any(2)
    assert torch.equal(nonzero_BK, a["branch_weight_BK"] > 0)
    assert (value[3] == 0).all()
    assert (value[:3] != 0).any(1).all()
    out = branch_dist_loss(**a)
    assert out.loss_B[3] == 0
    assert out.ce_clamped_B[3] == 0
    assert all(torch.isfinite(x).all() for x in out)


def test_a_sample_with_one_live_branch_counts_as_much_as_one_with_four() -> None:
    a = make(B=1) | {"coef_4": coef(smoothing=0.02)}
    losses = []
    for k in range(4):
        a["branch_weight_BK"] = F.one_hot(torch.tensor([k]), 4).to(F64)
        losses.append(branch_dist_loss(**a).loss_B)
    a["branch_weight_BK"] = torch.ones(1, 4, dtype=F64)
    torch.testing.assert_close(branch_dist_loss(**a).loss_B, sum(losses) / 4)
    a["branch_weight_BK"] *= 5
    torch.testing.assert_close(branch_dist_loss(**a).loss_B, sum(losses) / 4)


def test_the_target_averages_only_branches_live_at_the_next_state() -> None:
    # Greedy at s' is action 1 (Flat) in the direction branch; with no order sent, direction alone is live.
    a = make(B=1, N=3) | {"coef_4": coef(alpha=0.0), "reward_B": torch.zeros(1, dtype=F64)}
    a["next_adv_BKMN"] = torch.zeros(1, 4, 3, 3, dtype=F64)
    a["next_adv_BKMN"][0, :, 1, 2] = 5.0
    a["next_send_BE"] = torch.zeros(1, 9, dtype=torch.bool)
    a["discount_B"], a["branch_weight_BK"] = torch.ones(1, dtype=F64), F.one_hot(torch.tensor([0]), 4).to(F64)
    q_target = expected_q(a["target_value_BN"], a["target_adv_BKMN"], a["support_2"])[0, :, 1]
    q = expected_q(a["value_BN"], a["adv_BKMN"], a["support_2"])[0, 0, a["action_BK"][0, 0]]
    assert branch_dist_loss(**a).td_B.item() == pytest.approx(abs(q - q_target[0]).item())
    a["next_send_BE"][0, 3 * 1 + 1] = True  # closing a position: order type and urgency count, magnitude does not
    y = (q_target[0] + q_target[2] + q_target[3]) / 3
    assert branch_dist_loss(**a).td_B.item() == pytest.approx(abs(q - y).item())


def test_a_branch_that_is_not_live_at_the_next_state_takes_directions_distribution() -> None:
    # Atoms -1, 0, 1; reward 0, discount 1: a target distribution projects onto itself. Every branch is greedy in
    # action 1. The target network's advantages make it (1, 1, 2) / 4 in direction and (2, 1, 1) / 4 in magnitude.
    zero, one = torch.zeros(1, 3, dtype=F64), torch.ones(1, dtype=F64)
    adv, greedy, target = (torch.zeros(1, 4, 3, 3, dtype=F64) for _ in range(3))
    greedy[0, :, 1, 2] = 1.0
    for action, sign in ((1, 1), (0, -1)):  # opposite, so that their mean over the actions is 0
        target[0, 0, action, 2] = sign * math.log(2)
        target[0, 1, action, 0] = sign * math.log(2)
    a = {
        "value_BN": zero, "adv_BKMN": adv, "next_value_BN": zero, "next_adv_BKMN": greedy, "target_value_BN": zero,
        "target_adv_BKMN": target, "action_BK": torch.zeros(1, 4, dtype=torch.int64), "reward_B": 0 * one,
        "discount_B": one, "weight_B": one, "branch_weight_BK": torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=F64),
        "support_2": support(-1, 1), "coef_4": coef(),
    }  # fmt: skip
    # Only magnitude is learned. Its online distribution is uniform: the gradient in its value logits is 1/3 - target.
    for send, expected in ((None, [0.5, 0.25, 0.25]), (torch.zeros(1, 9, dtype=torch.bool), [0.25, 0.25, 0.5])):
        b = a | {"next_send_BE": send}
        (grad,) = gradients(lambda x: branch_dist_loss(**x).loss_B.sum(), b, "value_BN")
        assert grad[0].tolist() == pytest.approx([1 / 3 - t for t in expected])


def test_terminal_steps_take_nothing_from_the_next_state() -> None:
    a = make(B=3) | {"discount_B": torch.zeros(3, dtype=F64)}
    b = a | {name: a[name] + 3 * torch.randn_like(a[name]) for name in ("target_value_BN", "target_adv_BKMN")}
    torch.testing.assert_close(branch_dist_loss(**a).loss_B, branch_dist_loss(**b).loss_B)


def test_cql_is_logsumexp_minus_the_data_action() -> None:
    a = make(B=2, K=1, seed=7) | {"branch_weight_BK": torch.ones(2, 1, dtype=F64)}
    q = expected_q(a["value_BN"], a["adv_BKMN"], a["support_2"])[:, 0]
    expected = [
        math.log(sum(math.exp(x) for x in row)) - row[int(i)]
        for row, i in zip(q.tolist(), a["action_BK"][:, 0], strict=True)
    ]
    assert branch_dist_loss(**a).cql_B.tolist() == pytest.approx(expected)
    base = branch_dist_loss(**a | {"coef_4": coef()}).loss_B
    assert (branch_dist_loss(**a | {"coef_4": coef(cql=2.0)}).loss_B - base).tolist() == pytest.approx(
        [2 * e * w for e, w in zip(expected, a["weight_B"].tolist(), strict=True)]
    )


def test_entropy_is_that_of_the_chosen_action_and_is_rewarded() -> None:
    a = make(B=1, N=4)
    for name in ("value_BN", "adv_BKMN"):
        a[name] = torch.zeros_like(a[name])
    out = branch_dist_loss(**a | {"coef_4": coef(entropy=0.5), "weight_B": torch.ones(1, dtype=F64)})
    assert out.entropy_B.item() == pytest.approx(math.log(4))  # uniform
    assert out.loss_B.item() == pytest.approx(out.ce_B.item() - 0.5 * math.log(4))


def test_clamp_bounds_loss_and_priority_before_the_weight_and_leaves_the_gradient() -> None:
    a = make(B=2, seed=1) | {"coef_4": coef(), "weight_B": torch.tensor([3.0, 0.5], dtype=F64)}
    a["value_BN"] = a["value_BN"] * 0
    a["value_BN"][:, 0] = 1e4  # all online mass on the lowest atom, the target above it
    a["reward_B"] = torch.full((2,), 3.0, dtype=F64)
    out = branch_dist_loss(**a)
    assert (out.ce_B > 1e3).all()
    assert out.ce_clamped_B.tolist() == [50.0, 50.0]
    assert out.loss_B.tolist() == [150.0, 25.0]
    clamped = gradients(lambda x: branch_dist_loss(**x).loss_B.sum(), a, "value_BN", "adv_BKMN")
    free = gradients(lambda x: branch_dist_loss(**x, ce_clamp=math.inf).loss_B.sum(), a, "value_BN", "adv_BKMN")
    for c, f in zip(clamped, free, strict=True):
        assert torch.equal(c, f)
        assert c.abs().max() > 0.1


def test_r22_a_reward_far_outside_a_support_without_online_mass_is_finite() -> None:
    a = make(B=2, N=52, dtype=torch.float32) | {"discount_B": torch.zeros(2), "reward_B": torch.tensor([1e6, -1e6])}
    a["value_BN"] = torch.linspace(-200, 200, 52).repeat(2, 1) * torch.tensor([[-1.0], [1.0]])
    for kind in ("stencil", "uniform", "none"):
        out = branch_dist_loss(**a, smoothing_kind=kind)
        assert torch.isfinite(out.loss_B).all()
        assert (out.ce_clamped_B <= 50).all()
        assert out.outside_B.tolist() == pytest.approx([1.0, 1.0])


def test_outside_is_the_unclipped_share_beyond_the_bounds() -> None:
    # Atoms -1, 0, 1, target uniform, discount 1: reward .5 puts one of three outside; 0 puts none there; -2.5 all.
    zeros, ones = torch.zeros(3, 3), torch.ones(3)
    adv = torch.zeros(3, 1, 2, 3)
    out = branch_dist_loss(
        zeros, adv, zeros, adv, zeros, adv, torch.zeros(3, 1, dtype=torch.int64), torch.tensor([0.5, 0.0, -2.5]), ones,
        ones, ones[:, None], None, support(-1, 1, torch.float32), torch.tensor([1.0, 0, 0, 0]),
    )  # fmt: skip
    torch.testing.assert_close(out.outside_B, torch.tensor([1 / 3, 0.0, 1.0]))


def test_float32_and_bfloat16_are_computed_in_float32() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        a = make(B=32, N=52, scale=2.0, dtype=dtype)
        # float64 on the same rounded inputs: what remains is the arithmetic
        b = {k: v.to(F64) if v.is_floating_point() else v for k, v in a.items()}
        x, y = branch_dist_loss(**a), branch_dist_loss(**b)
        assert x.loss_B.dtype == torch.float32
        torch.testing.assert_close(x.loss_B.to(F64), y.loss_B, rtol=1e-5, atol=1e-5)
        (grad,) = gradients(lambda z: branch_dist_loss(**z).loss_B.sum(), a, "adv_BKMN")
        assert grad.dtype == dtype


def test_bad_arguments_are_named() -> None:
    a = make()
    with pytest.raises(ValueError, match="reward_B has shape"):
        branch_dist_loss(**a | {"reward_B": torch.zeros(3)})
    with pytest.raises(ValueError, match="target_adv_BKMN has shape"):
        branch_dist_loss(**a | {"target_adv_BKMN": torch.zeros(5, 4, 3, 8, dtype=F64)})
    with pytest.raises(TypeError, match=r"action_BK has dtype torch.int32"):
        branch_dist_loss(**a | {"action_BK": a["action_BK"].int()})
    with pytest.raises(TypeError, match=r"next_value_BN has dtype torch.float32, expected torch.float64"):  # R2
        branch_dist_loss(**a | {"next_value_BN": a["next_value_BN"].float()})
    with pytest.raises(ValueError, match="next_send_BE is for 4 branches"):
        branch_dist_loss(**make(K=2) | {"next_send_BE": torch.zeros(5, 9, dtype=torch.bool)})


# --- quantiles ------------------------------------------------------------------------------------------------------


def quantile_arguments(B: int = 4, K: int = 3, M: int = 2, Q: int = 5, seed: int = 0) -> dict:
    g = torch.Generator().manual_seed(seed)
    return {
        "value_BQ": torch.randn(B, Q, generator=g, dtype=F64),
        "adv_BKMQ": torch.randn(B, K, M, Q, generator=g, dtype=F64),
        "target_value_BQ": torch.randn(B, Q, generator=g, dtype=F64),
        "target_adv_BKMQ": torch.randn(B, K, M, Q, generator=g, dtype=F64),
        "action_BK": torch.randint(0, M, (B, K), generator=g),
        "greedy_BK": torch.randint(0, M, (B, K), generator=g),
        "reward_B": torch.randn(B, generator=g, dtype=F64) * 2,
        "discount_B": torch.rand(B, generator=g, dtype=F64),
        "weight_B": torch.rand(B, generator=g, dtype=F64) + 0.1,
        "branch_weight_BK": (torch.rand(B, K, generator=g) < 0.6).to(F64),
        "next_send_BE": torch.rand(B, 9, generator=g) < 0.5 if (K, M) == (4, 3) else None,
    }


@pytest.mark.parametrize("sizes", [(4, 3, 2, 5), (6, 4, 3, 4)])
def test_quantile_loss_equals_a_double_loop(sizes: tuple[int, ...]) -> None:
    a = quantile_arguments(*sizes)
    loss, unweighted = quantile_huber_loss(**a)
    online = dueling(a["value_BQ"], a["adv_BKMQ"])
    target = dueling(a["target_value_BQ"], a["target_adv_BKMQ"])
    B, K, _, Q = online.shape
    for b in range(B):
        expected = 0.0
        greedy = a["greedy_BK"][b].tolist()
        live = [True] * K
        if a["next_send_BE"] is not None:
            sends = bool(a["next_send_BE"][b, 3 * greedy[0] + greedy[1]])
            live = [True, greedy[0] != 1, sends, sends]
        for k in range(K):
            own = k if live[k] else 0
            pairs = 0.0
            for i in range(Q):
                tau = (2 * (i + 1) - 1) / (2 * Q)
                for j in range(Q):
                    y = a["reward_B"][b] + a["discount_B"][b] * target[b, own, greedy[own], j]
                    u = (y - online[b, k, a["action_BK"][b, k], i]).item()
                    huber = 0.5 * u * u if abs(u) <= 1 else abs(u) - 0.5
                    pairs += abs(tau - (u < 0)) * huber
            total = a["branch_weight_BK"][b].sum().item()
            expected += pairs / Q**2 * (a["branch_weight_BK"][b, k].item() / total if total else 0.0)
        assert unweighted[b].item() == pytest.approx(expected, rel=1e-12)
        assert loss[b].item() == pytest.approx(expected * a["weight_B"][b].item(), rel=1e-12)


def test_a_branch_that_is_not_live_at_the_next_state_takes_directions_quantiles() -> None:
    # One quantile at 1/2: the loss is half of Huber's. Target quantiles at s': direction 0.5, magnitude 3; reward 1,
    # discount 0.5, online quantiles 0. Only magnitude is learned, u = 1 + 0.5 x: 2.5 of its own, 1.25 of direction's.
    one, zeros = torch.ones(1, dtype=F64), torch.zeros(1, 4, 3, 1, dtype=F64)
    target = zeros.clone()
    target[0, 0, 1], target[0, 0, 0] = 0.5, -0.5
    target[0, 1, 1], target[0, 1, 0] = 3.0, -3.0
    learned = torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=F64)
    action, greedy = torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 4, dtype=torch.int64)
    args = (0 * one[:, None], zeros, 0 * one[:, None], target, action, greedy, one, 0.5 * one, one, learned)
    assert quantile_huber_loss(*args)[0].item() == pytest.approx((2.5 - 0.5) / 2)
    assert quantile_huber_loss(*args, torch.zeros(1, 9, dtype=torch.bool))[0].item() == pytest.approx((1.25 - 0.5) / 2)


def test_quantile_gradcheck() -> None:
    a = quantile_arguments(seed=2)
    a["branch_weight_BK"][0] = 0
    heads = a.pop("value_BQ").requires_grad_(), a.pop("adv_BKMQ").requires_grad_()
    assert torch.autograd.gradcheck(lambda v, adv: quantile_huber_loss(v, adv, **a)[0], heads)
    assert not quantile_huber_loss(*heads, **a)[1].requires_grad


def test_r23_midpoints_are_fixed_and_the_loss_repeats_bit_for_bit() -> None:
    assert quantile_midpoints(4, F64).tolist() == [0.125, 0.375, 0.625, 0.875]
    a = quantile_arguments(B=64, K=4, M=3, Q=32)
    assert torch.equal(quantile_huber_loss(**a)[0], quantile_huber_loss(**a)[0])


def test_quantile_regression_finds_the_quantiles_of_its_target() -> None:
    # Terminal rewards uniform over {-4, 4}, far apart against kappa: quantiles below 1/2 go to -4, above to 4.
    value, adv = torch.zeros(1, 4, dtype=F64, requires_grad=True), torch.zeros(64, 1, 1, 4, dtype=F64)
    zeros, ones = torch.zeros(64, 1, dtype=torch.int64), torch.ones(64, dtype=F64)
    reward = torch.where(torch.arange(64) % 2 == 0, 4.0, -4.0).to(F64)
    for _ in range(300):
        loss, _ = quantile_huber_loss(
            value.expand(64, 4), adv, torch.zeros(64, 4, dtype=F64), adv, zeros, zeros, reward, 0 * ones, ones,
            ones[:, None],
        )  # fmt: skip
        (grad,) = torch.autograd.grad(loss.mean(), value)
        with torch.no_grad():
            value -= 2 * grad
    # Huber softens: with tau = 1/8, (1 - tau) c(theta + 4) = tau c(4 - theta) at theta = -4 + 1/7.
    assert value[0].tolist() == pytest.approx([-4 + 1 / 7, -4 + 0.6, 4 - 0.6, 4 - 1 / 7], abs=1e-3)


def test_cvar_by_hand() -> None:
    q = torch.tensor([[3.0, -1.0, 1.0, 5.0]])
    assert cvar(q, 1.0).item() == pytest.approx(2.0)
    assert cvar(q, 0.5).item() == pytest.approx(0.0)  # (-1 + 1) / 2
    assert cvar(q, 0.25).item() == pytest.approx(-1.0)
    assert cvar(q, 0.1).item() == pytest.approx(-1.0)
    assert cvar(q, 0.375).item() == pytest.approx((-1 + 0.5 * 1) / 1.5)
    for level in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="level"):
            cvar(q, level)


# --- total_loss -----------------------------------------------------------------------------------------------------


def problem(B: int = 16, N: int = 11, Q: int = 6, seed: int = 0, dtype: torch.dtype = F64) -> tuple:
    g = torch.Generator().manual_seed(seed)

    def output() -> NetworkOutput:
        shapes = ((B, N), (B, 4, 3, N), (B, Q), (B, 4, 3, Q))
        return NetworkOutput(*(torch.randn(*s, generator=g, dtype=F64).to(dtype) for s in shapes))

    batch = LossBatch(
        torch.randint(0, 3, (B, 4), generator=g),
        torch.randn(B, generator=g, dtype=dtype),
        torch.rand(B, generator=g, dtype=dtype),
        torch.rand(B, generator=g, dtype=dtype) + 0.1,
        (torch.rand(B, 4, generator=g) < 0.7).to(dtype),
        torch.rand(B, 9, generator=g) < 0.5,
    )
    return output(), output(), output(), batch


def coefficients(
    dtype: torch.dtype = F64, lambda_iqn: float = 0.25, primary: bool = True, **kwargs
) -> LossCoefficients:
    return LossCoefficients(
        coef(**kwargs).to(dtype), torch.tensor(lambda_iqn, dtype=dtype), support(-2, 2, dtype), "stencil", 50.0, primary
    )


def head_gradients(args: tuple, c: LossCoefficients) -> list[torch.Tensor]:
    online = NetworkOutput(*(x.clone().requires_grad_() for x in args[0]))
    loss = total_loss(online, *args[1:], c).loss
    return [
        torch.zeros_like(x) if g is None else g for x, g in zip(online, torch.autograd.grad(loss, online), strict=True)
    ]


def test_total_loss_adds_its_terms() -> None:
    args = problem()
    args = (*args[:3], args[3]._replace(weight_B=torch.ones(16, dtype=F64)))
    out = total_loss(*args, coefficients(alpha=0.6, cql=0.3, entropy=0.2, smoothing=0.02))
    t = {k: v.item() for k, v in out.terms.items()}
    expected = 0.4 * t["mse"] + 0.6 * t["ce"] + 0.25 * t["quantile"] + 0.3 * t["cql"] - 0.2 * t["entropy"]
    assert out.loss.item() == pytest.approx(expected)
    assert t["loss"] == out.loss.item()
    assert not any(v.requires_grad for v in out.terms.values())


@pytest.mark.parametrize("only", ["ce", "mse", "iqn", "cql", "entropy"])
def test_r3_tiling_the_batch_changes_no_gradient(only: str) -> None:
    base = coefficients(alpha=0.0, lambda_iqn=0.0, smoothing=0.02).coef_4
    parts = {"ce": (1, 0, 0), "mse": (0, 0, 0), "iqn": (0, 0, 0), "cql": (0, 1, 0), "entropy": (0, 0, 1)}[only]
    base[:3] = torch.tensor(parts, dtype=F64)
    c = LossCoefficients(base, torch.tensor(float(only == "iqn"), dtype=F64), support(-2, 2), "stencil", 50.0, True)
    args = problem()
    hidden = torch.randn(16, 3, generator=torch.Generator().manual_seed(9), dtype=F64)

    def weight_gradient(times: int) -> torch.Tensor:
        weight = torch.zeros(3, args[0].value_BN.shape[1], dtype=F64, requires_grad=True)
        quantile = torch.zeros(3, args[0].q_value_BQ.shape[1], dtype=F64, requires_grad=True)
        tile = lambda t: t.repeat(times, *[1] * (t.dim() - 1))  # noqa: E731
        outputs = [NetworkOutput(*map(tile, o)) for o in args[:3]]
        x = tile(hidden)
        outputs[0] = outputs[0]._replace(
            value_BN=outputs[0].value_BN + x @ weight, q_value_BQ=outputs[0].q_value_BQ + x @ quantile
        )
        loss = total_loss(*outputs, LossBatch(*map(tile, args[3])), c).loss
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss, (weight, quantile))])

    once = weight_gradient(1)
    assert once.abs().max() > 1e-4
    torch.testing.assert_close(weight_gradient(50), once, rtol=1e-9, atol=1e-12)


def test_gradient_is_linear_in_the_importance_weights() -> None:
    args = problem()
    c = coefficients(alpha=0.6, cql=0.3, entropy=0.2)
    once = head_gradients(args, c)
    twice = head_gradients((*args[:3], args[3]._replace(weight_B=2 * args[3].weight_B)), c)
    for o, t in zip(once, twice, strict=True):
        torch.testing.assert_close(t, 2 * o)


def test_priorities_are_unweighted_and_come_from_the_head_that_is_named() -> None:
    args = problem()
    other = (*args[:3], args[3]._replace(weight_B=args[3].weight_B * 7))
    by_quantile = total_loss(*args, coefficients(primary=True))
    by_ce = total_loss(*args, coefficients(primary=False))
    assert torch.equal(by_quantile.priority_B, total_loss(*other, coefficients(primary=True)).priority_B)
    assert torch.equal(by_ce.priority_B, total_loss(*other, coefficients(primary=False)).priority_B)
    assert by_quantile.priority_B.mean().item() == pytest.approx(by_quantile.terms["quantile"].item())
    assert by_ce.priority_B.mean().item() == pytest.approx(by_ce.terms["ce"].item())
    assert not by_quantile.priority_B.requires_grad


def test_r21_priority_from_cross_entropy_is_at_most_the_clamp() -> None:
    online, following, target, batch = problem()
    online.value_BN[0, 0] = 1e4
    out = total_loss(online, following, target, batch, coefficients(primary=False))
    assert out.priority_B.max().item() == 50.0


def test_outside_share_is_over_samples_with_a_live_branch() -> None:
    args = problem(B=4)
    reward, discount = torch.tensor([9.0, 9.0, 0.0, 0.0], dtype=F64), torch.zeros(4, dtype=F64)
    live = torch.tensor([[1.0] * 4, [0.0] * 4, [1.0] * 4, [0.0] * 4], dtype=F64)
    batch = args[3]._replace(reward_B=reward, discount_B=discount, branch_weight_BK=live)
    assert total_loss(*args[:3], batch, coefficients()).terms["outside"].item() == pytest.approx(0.5)


def test_the_quantile_loss_uses_the_distributional_heads_greedy_actions() -> None:
    online, following, target, batch = problem()
    out = total_loss(online, following, target, batch, coefficients())
    assert torch.equal(out.greedy_BK, expected_q(following.value_BN, following.adv_BKMN, support(-2, 2)).argmax(2))
    _, unweighted = quantile_huber_loss(*online[2:], *target[2:], batch.action_BK, out.greedy_BK, *batch[1:])
    assert torch.equal(out.priority_B, unweighted)


def test_without_a_quantile_head() -> None:
    args = problem()
    bare = [o._replace(q_value_BQ=None, q_adv_BKMQ=None) for o in args[:3]]
    out = total_loss(*bare, args[3], coefficients(primary=False))
    assert "quantile" not in out.terms
    with pytest.raises(ValueError, match="iqn_primary_loss"):
        total_loss(*bare, args[3], coefficients(primary=True))


def test_nothing_reads_a_value_back_to_the_host() -> None:
    # Meta tensors have no values: .item(), bool() or a data-dependent shape would raise.
    online, following, target, batch = problem(dtype=torch.float32)
    move = lambda t: type(t)(*(x.to("meta") for x in t))  # noqa: E731
    c = coefficients(torch.float32)
    c = LossCoefficients(c.coef_4.to("meta"), c.lambda_iqn.to("meta"), c.support_2.to("meta"), "stencil", 50.0, True)
    online = NetworkOutput(*(x.to("meta").requires_grad_() for x in online))
    out = total_loss(online, move(following), move(target), move(batch), c)
    out.loss.backward()
    assert online.adv_BKMN.grad.shape == online.adv_BKMN.shape


def test_r20_entropy_at_its_default_is_dominated_by_the_td_loss() -> None:
    # Rewards of 1e-3 before normalization are of order 1 in the loss's units.
    args = problem(seed=5)
    td = head_gradients(args, coefficients(alpha=1.0, lambda_iqn=0.0))
    both = head_gradients(args, coefficients(alpha=1.0, lambda_iqn=0.0, entropy=0.001))
    norm = lambda gs: math.sqrt(sum(g.square().sum().item() for g in gs))  # noqa: E731
    assert norm([b - t for b, t in zip(both, td, strict=True)]) < 0.01 * norm(td)


def test_r32_squared_error_still_pushes_when_the_cross_entropy_gradient_vanishes() -> None:
    # The chosen action's distribution equals its projected target, so that p - t is 0; y comes from all branches.
    N = 11
    p = torch.linspace(-1, 1, N, dtype=F64)[None]
    adv, flat = torch.zeros(1, 2, 2, N, dtype=F64), torch.zeros(1, 2, dtype=torch.int64)
    target_adv = adv.clone()
    target_adv[0, 1, 0] = torch.linspace(2, -2, N, dtype=F64)  # the other branch believes in less
    target_adv[0, 1, 1] = -target_adv[0, 1, 0]
    one = torch.ones(1, dtype=F64)
    a = {
        "value_BN": p, "adv_BKMN": adv, "next_value_BN": p, "next_adv_BKMN": adv, "target_value_BN": p,
        "target_adv_BKMN": target_adv, "action_BK": flat, "reward_B": 0 * one, "discount_B": one, "weight_B": one,
        "branch_weight_BK": torch.tensor([[1.0, 0.0]], dtype=F64), "next_send_BE": None, "support_2": support(-1, 1),
    }  # fmt: skip
    (ce,) = gradients(lambda x: branch_dist_loss(**x, coef_4=coef(alpha=1.0)).loss_B.sum(), a, "value_BN")
    (blend,) = gradients(lambda x: branch_dist_loss(**x, coef_4=coef(alpha=0.5)).loss_B.sum(), a, "value_BN")
    assert ce.abs().max() < 1e-12
    assert blend.abs().max() > 1e-3


def train_bandit(c: LossCoefficients, steps: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """Two states, reward 1 where every branch's action equals the state, else -1 (per branch: its own share)."""
    g = torch.Generator().manual_seed(0)
    value, adv = torch.zeros(2, 11, requires_grad=True), torch.zeros(2, 4, 3, 11, requires_grad=True)
    q_value, q_adv = torch.zeros(2, 6, requires_grad=True), torch.zeros(2, 4, 3, 6, requires_grad=True)
    heads = NetworkOutput(value, adv, q_value, q_adv)
    optimizer = torch.optim.Adam(heads, lr=0.05)
    first = None
    for _ in range(steps):
        state = torch.randint(0, 2, (64,), generator=g)
        action = torch.randint(0, 3, (64, 4), generator=g)
        reward = (action == state[:, None]).float().mean(1) * 2 - 1
        ones = torch.ones(64)
        batch = LossBatch(action, reward, 0 * ones, ones, torch.ones(64, 4), None)
        online = NetworkOutput(*(h[state] for h in heads))
        following = NetworkOutput(*(h.detach() for h in online))
        optimizer.zero_grad()
        out = total_loss(online, following, following, batch, c)
        assert torch.isfinite(out.loss)
        out.loss.backward()
        if first is None:
            first = adv.grad.norm()
        optimizer.step()
    return expected_q(value, adv, c.support_2).detach(), first


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
def test_r17_advantages_learn_from_the_first_step(alpha: float) -> None:
    q, first = train_bandit(coefficients(torch.float32, alpha=alpha, smoothing=0.02))
    assert first > 0
    gap = (q.amax(2) - q.mean(2)).mean()
    assert gap > 0.1
    for state in (0, 1):
        assert q[state].argmax(1).tolist() == [state] * 4


def test_r30_cql_of_1_stays_finite() -> None:
    q, _ = train_bandit(coefficients(torch.float32, alpha=1.0, cql=1.0, smoothing=0.02), steps=100)
    assert torch.isfinite(q).all()
