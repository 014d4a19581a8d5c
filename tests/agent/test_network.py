"""The network: shapes, initial state, parameters, noise, target updates."""

from __future__ import annotations

import copy

import pytest
import torch

from fox_agent.network import BranchingNetwork, ExposureHead, NoisyLinear, soft_update
from fox_agent.ops import dueling, expected_q

SMALL = {"hidden": (64, 64), "residual": False, "norm": "none", "bottleneck": 16}
PRODUCTION = {"hidden": (256, 256), "residual": True, "norm": "rms", "bottleneck": 16}


def network(F: int = 10, P: int = 6, seed: int = 0, **kwargs) -> BranchingNetwork:
    torch.manual_seed(seed)
    return BranchingNetwork(F, P, **{**SMALL, **kwargs})


def inputs(B: int = 5, F: int = 10, P: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.randn(B, F, generator=g), torch.randn(B, P, generator=g)


@pytest.mark.parametrize("kwargs", [{}, PRODUCTION, {"bottleneck": 0}, {"noisy": True}, {"hidden": (32, 64, 64)}])
def test_shapes(kwargs: dict) -> None:
    out = network(**kwargs)(*inputs())
    assert [tuple(x.shape) for x in out] == [(5, 52), (5, 4, 3, 52), (5, 32), (5, 4, 3, 32)]


def test_other_action_spaces_and_no_quantiles() -> None:
    out = network(num_branches=2, num_actions=5, num_atoms=7, num_quantiles=0)(*inputs())
    assert out.value_BN.shape == (5, 7)
    assert out.adv_BKMN.shape == (5, 2, 5, 7)
    assert out.q_value_BQ is None
    assert out.q_adv_BKMQ is None


def test_each_head_reads_its_own_rows_of_the_output_matrix() -> None:
    net = network(num_atoms=3, num_quantiles=2)
    rows = torch.arange(13 * 5, dtype=torch.float32)
    with torch.no_grad():
        net.output.weight.zero_()
        net.output.bias.copy_(rows)
    out = net(*inputs(B=1))
    assert torch.equal(out.value_BN[0], rows[:3])
    assert torch.equal(out.adv_BKMN[0].flatten(), rows[3:39])
    assert torch.equal(out.q_value_BQ[0], rows[39:41])
    assert torch.equal(out.q_adv_BKMQ[0].flatten(), rows[41:])
    assert out.adv_BKMN[0, 1, 2, 0] == 3 + (1 * 3 + 2) * 3


def test_it_starts_with_nearly_equal_actions_in_the_middle_of_the_support() -> None:
    net = network(F=48)
    market, position = inputs(B=256, F=48)
    q = expected_q(*net(market, position)[:2], torch.tensor([-12.8, 12.8]))
    assert q.abs().max() < 2.0
    full = network(F=48, output_scale=1.0)
    assert torch.equal(net.output.weight, full.output.weight * 0.1)
    assert (net.output.bias == 0).all()


def test_position_state_bypasses_the_bottleneck_and_decay_is_on_the_feature_matrix_alone() -> None:
    net = network()
    assert net.bottleneck.weight.shape == (16, 10)
    assert net.layers[0].weight.shape == (64, 16 + 6)
    (first,) = net.first_layer_parameters()
    assert first is net.bottleneck.weight
    bare = network(bottleneck=0)
    assert next(bare.first_layer_parameters()) is bare.layers[0].weight
    decayed, rest = net.parameter_groups(3.0)
    assert decayed["weight_decay"] == 3.0
    assert [p is net.bottleneck.weight for p in decayed["params"]] == [True]
    assert rest["weight_decay"] == 0
    ids = [id(p) for group in (decayed, rest) for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in net.parameters())
    assert len(set(ids)) == len(ids)


def test_residual_adds_the_input_where_sizes_agree() -> None:
    net = network(hidden=(8, 8), residual=True)
    with torch.no_grad():
        net.layers[1].weight.zero_()
        net.layers[1].bias.zero_()
    market, position = inputs()
    x = torch.cat((net.bottleneck(market), position), 1)
    first = torch.relu(net.layers[0](x))
    torch.testing.assert_close(net.hidden(market, position), first)
    plain = network(hidden=(8, 8), residual=False)
    plain.load_state_dict(net.state_dict())
    assert (plain.hidden(market, position) == 0).all()


def test_rms_norm_bounds_the_trunk() -> None:
    net = network(**PRODUCTION)
    market, position = inputs()
    h, large = net.hidden(market, position), net.hidden(market * 1000, position * 1000)
    assert large.norm(dim=1).max() < 3 * h.norm(dim=1).max()


def test_split_observation() -> None:
    net = network()
    market, position = net.split_observation(torch.arange(32.0).view(2, 16))
    assert market[0].tolist() == list(range(10))
    assert position[1].tolist() == list(range(26, 32))
    with pytest.raises(ValueError, match="obs_BD has 15 fields, expected 10 market features and 6"):
        net.split_observation(torch.zeros(2, 15))


def test_r11_the_target_has_the_online_shapes_and_follows_it() -> None:
    online = network(**PRODUCTION)
    target = copy.deepcopy(online)
    with torch.no_grad():
        for p in online.parameters():
            p.add_(torch.randn_like(p))
    before = [p.clone() for p in target.parameters()]
    soft_update(target, online, 0.25)
    for old, new, o in zip(before, target.parameters(), online.parameters(), strict=True):
        assert new.shape == o.shape
        torch.testing.assert_close(new, 0.75 * old + 0.25 * o)
    soft_update(target, online, 1.0)
    for a, b in zip(target(*inputs()), online(*inputs()), strict=True):
        assert torch.equal(a, b)
    loaded = network(seed=9, **PRODUCTION)
    loaded.load_state_dict(online.state_dict())
    assert torch.equal(loaded(*inputs()).adv_BKMN, online(*inputs()).adv_BKMN)


def test_soft_update_takes_tau_from_a_tensor_and_leaves_no_graph() -> None:
    online, target = network(seed=1), network(seed=2)
    other = copy.deepcopy(target)
    soft_update(target, online, torch.tensor(0.25))
    soft_update(other, online, 0.25)
    for a, b in zip(target.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b)
        assert a.grad_fn is None
    soft_update(target, online, torch.tensor(1.0))
    assert torch.equal(target.output.weight, online.output.weight)


def test_gated_features_read_zero_until_they_are_shown() -> None:
    gated, plain = network(gated=(2, 7)), network()
    (market, position), zeroed = inputs(), inputs()[0]
    zeroed[:, [2, 7]] = 0.0
    assert torch.equal(gated(market, position).adv_BKMN, plain(market, position).adv_BKMN)  # shown at first
    place = gated.shown_F.data_ptr()
    gated.set_gate(False)
    for mine, theirs in zip(gated(market, position), plain(zeroed, position), strict=True):
        assert torch.equal(mine, theirs)
    gated(market, position).adv_BKMN.square().sum().backward()
    moved_F = gated.bottleneck.weight.grad.abs().sum(0) > 0
    assert moved_F.tolist() == [column not in (2, 7) for column in range(10)]
    gated.set_gate(True)
    for mine, theirs in zip(gated(market, position), plain(market, position), strict=True):
        assert torch.equal(mine, theirs)
    assert gated.shown_F.data_ptr() == place  # a captured graph reads it there


def test_the_gate_is_part_of_the_state_of_a_network_that_has_one() -> None:
    closed, other, plain = network(gated=(0,)), network(gated=(0,)), network()
    closed.set_gate(False)
    other.load_state_dict(closed.state_dict())
    assert other.shown_F.tolist() == [0.0, *[1.0] * 9]
    assert copy.deepcopy(closed).shown_F.tolist() == other.shown_F.tolist()
    plain.set_gate(False)  # nothing to hide
    assert "shown_F" not in plain.state_dict()
    assert torch.equal(plain(*inputs()).value_BN, network()(*inputs()).value_BN)


def test_ema_forgets_at_its_rate() -> None:
    online, target = network(seed=1), network(seed=1)
    with torch.no_grad():
        for p in online.parameters():
            p.fill_(1.0)
        for p in target.parameters():
            p.fill_(0.0)
    for _ in range(100):
        soft_update(target, online, 0.005)
    assert target.output.weight.mean().item() == pytest.approx(1 - 0.995**100, abs=1e-6)


def test_noisy_linear_draws_only_when_told() -> None:
    torch.manual_seed(0)
    layer, x = NoisyLinear(6, 200), torch.randn(3, 6)
    state = torch.tensor([3, 0])
    plain = layer(x)
    assert torch.equal(plain, torch.nn.functional.linear(x, layer.weight, layer.bias))
    layer.resample(state)
    first = layer(x)
    assert not torch.equal(first, plain)
    assert torch.equal(first, layer(x))
    assert torch.equal(layer.eval()(x), layer.train()(x))  # the mode has no say
    layer.resample(state)
    assert torch.equal(first, layer(x))  # same {seed, offset}, same noise
    layer.resample(state + torch.tensor([0, 1]))
    assert not torch.equal(first, layer(x))
    layer.clear()
    assert torch.equal(layer(x), plain)


def test_noisy_linear_is_factorized_and_its_scale_learns() -> None:
    torch.manual_seed(0)
    layer = NoisyLinear(64, 300)
    layer.resample(torch.tensor([1, 1]))
    noise = torch.outer(layer.noise_out, layer.noise_in)
    x = torch.randn(2, 64)
    expected = x @ (layer.weight + layer.weight_sigma * noise).T + layer.bias + layer.bias_sigma * layer.noise_out
    torch.testing.assert_close(layer(x), expected)
    # sign(x) sqrt|x| of a standard normal has mean square E|x| = sqrt(2 / pi)
    assert layer.noise_out.square().mean().item() == pytest.approx((2 / torch.pi) ** 0.5, rel=0.15)
    assert layer.weight_sigma.unique().tolist() == pytest.approx([0.5 / 8])
    layer(x).square().sum().backward()
    assert layer.weight_sigma.grad.abs().max() > 0
    assert layer.bias_sigma.grad.abs().max() > 0


def test_a_noisy_network_resamples_and_clears_and_saves_no_noise() -> None:
    net = network(noisy=True)
    plain = net(*inputs()).value_BN
    net.resample_noise(torch.tensor([1, 2]))
    assert not torch.equal(net(*inputs()).value_BN, plain)
    assert not any("noise" in key for key in net.state_dict())
    net.clear_noise()
    assert torch.equal(net(*inputs()).value_BN, plain)
    still = network()
    still.resample_noise(torch.tensor([1, 2]))  # nothing to do


def test_r19_the_exposure_head_sends_nothing_back() -> None:
    net = network()
    head = ExposureHead(64)
    hidden = net.hidden(*inputs())
    logits = head(hidden)
    assert logits.shape == (5, 9)
    (logits * 1e6).sum().backward()
    assert head.linear.weight.grad.abs().max() > 0
    assert all(p.grad is None for p in net.parameters())


def test_every_parameter_gets_a_gradient() -> None:
    net = network(**{**PRODUCTION, "noisy": True})
    net.resample_noise(torch.tensor([1, 2]))
    out = net(*inputs())
    (
        dueling(out.value_BN, out.adv_BKMN).square().sum() + dueling(out.q_value_BQ, out.q_adv_BKMQ).square().sum()
    ).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in net.parameters())


@pytest.mark.parametrize(
    ("kwargs", "name"),
    [
        ({"hidden": ()}, "hidden"), ({"hidden": (64, 0)}, "hidden"), ({"norm": "batch"}, "norm"),
        ({"num_atoms": 1}, "num_atoms"), ({"bottleneck": -1}, "bottleneck"), ({"num_actions": 0}, "num_actions"),
        ({"F": 0}, "num_features"), ({"gated": (3, 10)}, "gated"), ({"gated": (-1,)}, "gated"),
    ],
)  # fmt: skip
def test_bad_arguments_are_named(kwargs: dict, name: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} is"):
        network(**kwargs)
