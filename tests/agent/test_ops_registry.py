"""`torch.ops.fox.*`: what PyTorch asks of operators that are compiled, differentiated and given kernels elsewhere."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.library import opcheck

from fox_agent import ops
from fox_agent.ops import priority as tree_ops
from tests.agent.test_losses import F64, make, quantile_arguments

SIZES = [(5, 4, 3, 7), (1, 1, 1, 2), (3, 2, 5, 33), (0, 4, 3, 5)]  # B, K, M, N
NAMES = [
    "branch_dist_loss", "quantile_huber_loss", "expected_q", "advantage_noise", "priority_build", "priority_update",
    "priority_sample", "scatter_last_",
]  # fmt: skip


def operator(name: str) -> torch._ops.OpOverload:
    return getattr(torch.ops.fox, name).default


def awkward(x: Tensor) -> Tensor:
    """Equal values, the first dimension innermost and every second element of the memory not used."""
    order = (*range(1, x.dim()), 0)
    memory = torch.zeros(*(x.shape[i] for i in order), 2, dtype=x.dtype)[..., 1]
    return memory.permute(x.dim() - 1, *range(x.dim() - 1)).copy_(x)


def dist_arguments(sizes: tuple[int, ...], dtype: torch.dtype = F64, smoothing: int = 1) -> list:
    return [*make(*sizes, dtype=dtype).values(), smoothing, 50.0]


def quantile_list(sizes: tuple[int, ...]) -> list:
    return list(quantile_arguments(*sizes).values())


def leaves(capacity: int) -> Tensor:
    return torch.rand(capacity, dtype=F64, generator=torch.Generator().manual_seed(capacity))


def seed_offset() -> Tensor:
    return torch.tensor([7, 3])


def with_gradients(arguments: list, *positions: int) -> list:
    return [x.requires_grad_() if i in positions else x for i, x in enumerate(arguments)]


# --- opcheck --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_distributional_loss_passes_opcheck(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    arguments = dist_arguments(sizes, dtype, smoothing=sizes[0] % 3)
    opcheck(operator("branch_dist_loss"), with_gradients(arguments, 0, 1))
    opcheck(operator("branch_dist_loss"), [awkward(x) if isinstance(x, Tensor) else x for x in dist_arguments(sizes)])


@pytest.mark.parametrize("sizes", SIZES)
def test_the_quantile_loss_passes_opcheck(sizes: tuple[int, ...]) -> None:
    opcheck(operator("quantile_huber_loss"), with_gradients(quantile_list(sizes), 0, 1))
    opcheck(operator("quantile_huber_loss"), [awkward(x) if isinstance(x, Tensor) else x for x in quantile_list(sizes)])


@pytest.mark.parametrize("sizes", SIZES)
def test_expected_q_passes_opcheck(sizes: tuple[int, ...]) -> None:
    a = make(*sizes)
    value, adv, bounds = a["value_BN"], a["adv_BKMN"], a["support_2"]
    opcheck(operator("expected_q"), (awkward(value), awkward(adv), bounds))
    opcheck(operator("expected_q"), (value.requires_grad_(), adv.requires_grad_(), bounds))


@pytest.mark.parametrize("relative", [False, True])
@pytest.mark.parametrize("shape", [(5, 4, 3), (1, 1, 1), (3, 2, 7)])
def test_the_noise_passes_opcheck(shape: tuple[int, ...], relative: bool) -> None:
    for q in (torch.randn(shape), awkward(torch.randn(shape)), torch.randn(shape, dtype=torch.bfloat16)):
        opcheck(operator("advantage_noise"), (q, seed_offset(), torch.tensor(0.3), relative))


@pytest.mark.parametrize("capacity", [1, 31, 32, 33, 1025])
def test_the_tree_passes_opcheck(capacity: int) -> None:
    tree = tree_ops.build(leaves(capacity))
    u_B, index_B = leaves(6), torch.tensor([0, capacity - 1, capacity // 2, 0])
    opcheck(operator("priority_build"), (torch.full_like(tree, torch.nan), leaves(capacity)))
    opcheck(operator("priority_update"), (tree, capacity, index_B, leaves(4)))
    opcheck(operator("priority_sample"), (tree, capacity, u_B))
    opcheck(operator("priority_sample"), (tree, capacity, leaves(12)[::2]))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, F64, torch.int64])
def test_scatter_last_passes_opcheck(dtype: torch.dtype) -> None:
    index_B, value_B = torch.tensor([2, 0, 2, 4]), torch.tensor([1, 0, 0, 1]).to(dtype)
    opcheck(operator("scatter_last_"), (torch.ones(5, dtype=dtype), index_B, value_B))


# --- schemas, kernels -----------------------------------------------------------------------------------------------


def test_schemas_list_what_is_written() -> None:
    written = {
        name: [a.name for a in operator(name)._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        for name in NAMES
    }
    assert {name: w for name, w in written.items() if w} == {
        "priority_build": ["tree"], "priority_update": ["tree"], "scatter_last_": ["target_N"],
    }  # fmt: skip
    for name, w in written.items():
        assert bool(w) == (not operator(name)._schema.returns)


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_serves_every_device_and_leaves_cuda_free(name: str) -> None:
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    assert has_kernel(f"fox::{name}", "CompositeExplicitAutograd")
    assert not has_kernel(f"fox::{name}", "CPU")


def test_a_kernel_of_the_device_takes_the_place_of_the_reference_and_keeps_the_gradient() -> None:
    # On the CPU's key, as a shared object will do on CUDA's.
    a = make()
    value, adv = a["value_BN"].requires_grad_(), a["adv_BKMN"].requires_grad_()

    def kernel(value_BN: Tensor, adv_BKMN: Tensor, *rest: object) -> tuple[Tensor, ...]:
        B, K = adv_BKMN.shape[:2]
        eight = [value_BN.new_full((B,), 2.0) for _ in range(8)]
        greedy_BK = value_BN.new_zeros((B, K), dtype=torch.int64)
        return *eight[:4], greedy_BK, *eight[4:], torch.full_like(value_BN, 3.0), torch.full_like(adv_BKMN, 4.0)

    with torch.library._scoped_library("fox", "IMPL") as library:
        library.impl("branch_dist_loss", kernel, "CPU")
        loss_B = ops.branch_dist_loss(**a).loss_B
        assert (loss_B == 2).all()
        (5 * loss_B).sum().backward()
    assert (value.grad == 15).all()
    assert (adv.grad == 20).all()
    assert not (ops.branch_dist_loss(**a).loss_B == 2).any()


def test_importing_again_keeps_the_operators() -> None:
    program = """
        import gc, importlib, sys
        import torch
        import fox_agent.ops, fox_agent.ops.priority
        first = torch.ops.fox.expected_q.default
        importlib.reload(fox_agent.ops.dist_loss)
        for name in [name for name in sys.modules if name.startswith("fox_agent")]:
            del sys.modules[name]
        del fox_agent
        gc.collect()
        import fox_agent.ops
        from fox_agent.ops.priority import build
        value, adv = torch.zeros(1, 3), torch.zeros(1, 1, 2, 3, requires_grad=True)
        fox_agent.ops.expected_q(value, adv, torch.tensor([-1.0, 2.0])).sum().backward()
        print(build(torch.ones(5, dtype=torch.float64))[-1].item(), torch.ops.fox.expected_q.default is first)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["5.0", "True"], done.stderr


# --- gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(3, 4, 3, 5), (2, 2, 5, 4), (2, 1, 1, 2)])
def test_gradcheck_through_the_operators(sizes: tuple[int, ...]) -> None:
    for name, arguments in (("branch_dist_loss", dist_arguments(sizes)), ("quantile_huber_loss", quantile_list(sizes))):
        value, adv, *rest = arguments
        heads = (value.requires_grad_(), adv.requires_grad_())
        assert torch.autograd.gradcheck(lambda v, a, name=name, rest=rest: operator(name)(v, a, *rest)[0], heads)
    a = make(*sizes)
    heads = (a["value_BN"].requires_grad_(), a["adv_BKMN"].requires_grad_())
    assert torch.autograd.gradcheck(lambda v, adv: operator("expected_q")(v, adv, a["support_2"]), heads)


@pytest.mark.parametrize("name", ["branch_dist_loss", "quantile_huber_loss"])
def test_the_gradients_among_the_outputs_are_those_of_autograd(name: str) -> None:
    arguments = dist_arguments(SIZES[0]) if name == "branch_dist_loss" else quantile_list(SIZES[0])
    outputs = operator(name)(*with_gradients(arguments, 0, 1))
    assert [x.requires_grad for x in outputs] == [True] + [False] * (len(outputs) - 1)
    for mine, theirs in zip(torch.autograd.grad(outputs[0].sum(), arguments[:2]), outputs[-2:], strict=True):
        assert torch.equal(mine, theirs)
    assert not operator(name)(*(x.detach() if isinstance(x, Tensor) else x for x in arguments))[0].requires_grad


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    a = make()
    loss = ops.branch_dist_loss(**a | {"value_BN": a["value_BN"].requires_grad_()}).loss_B
    (grad,) = torch.autograd.grad(loss.square().sum(), a["value_BN"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_noise_carries_no_gradient() -> None:
    q = torch.randn(2, 4, 3, requires_grad=True)
    assert not ops.advantage_noise(q, seed_offset(), 0.1, relative=True).requires_grad


# --- fakes ----------------------------------------------------------------------------------------------------------


def calls(B: int) -> dict[str, tuple]:
    """Arguments of the operators that return something, of batch B."""
    sizes = (B, 4, 3, 7)
    return {
        "branch_dist_loss": tuple(dist_arguments(sizes, torch.bfloat16)),
        "quantile_huber_loss": tuple(quantile_list(sizes)),
        "expected_q": (torch.randn(B, 7), awkward(torch.randn(sizes)), torch.tensor([-1.0, 1.0])),
        "advantage_noise": (torch.randn(B, 4, 3, dtype=F64), seed_offset(), torch.tensor(0.1), True),
        "priority_sample": (tree_ops.build(leaves(50)), 50, leaves(B)),
    }


@pytest.mark.parametrize("name", list(calls(2)))
def test_fakes_are_as_the_results(name: str) -> None:
    arguments = calls(6)[name]
    mode = FakeTensorMode()
    fake_arguments = [mode.from_tensor(x) if isinstance(x, Tensor) else x for x in arguments]
    with mode:
        fakes = operator(name)(*fake_arguments)
    results = operator(name)(*arguments)
    fakes, results = ((x,) if isinstance(x, Tensor) else x for x in (fakes, results))
    assert [(x.shape, x.dtype, x.stride()) for x in fakes] == [(x.shape, x.dtype, x.stride()) for x in results]
    assert all(x.is_contiguous() for x in results)


@pytest.mark.parametrize("name", list(calls(2)))
def test_fakes_follow_a_symbolic_batch(name: str) -> None:
    def call(*tensors: Tensor) -> Tensor | tuple[Tensor, ...]:
        given = iter(tensors)
        return operator(name)(*(next(given) if isinstance(x, Tensor) else x for x in calls_6[name]))

    calls_6, calls_9 = calls(6), calls(9)
    trace = make_fx(call, tracing_mode="symbolic")(*(x for x in calls_6[name] if isinstance(x, Tensor)))
    (node,) = (node for node in trace.graph.nodes if node.target is operator(name))
    fakes = node.meta["val"]
    assert all(isinstance(x.shape[0], torch.SymInt) for x in ([fakes] if isinstance(fakes, Tensor) else fakes))
    assert not trace.shape_env.guards
    tensors = [x for x in calls_9[name] if isinstance(x, Tensor)]
    torch.testing.assert_close(trace(*tensors), call(*tensors), rtol=0, atol=0)


# --- compiled -------------------------------------------------------------------------------------------------------


def compiled(function):
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def losses(heads: dict[str, Tensor], dist_rest: dict, quantile_rest: dict) -> tuple[Tensor, ...]:
    value, adv, q_value, q_adv = heads.values()
    dist = ops.branch_dist_loss(value, adv, **dist_rest)
    quantile_rest = quantile_rest | {"greedy_BK": dist.greedy_BK}
    quantile_B, unweighted_B = ops.quantile_huber_loss(q_value, q_adv, **quantile_rest)
    q_BKM = ops.expected_q(value, adv, dist_rest["support_2"])
    noisy_BKM = ops.advantage_noise(q_BKM, seed_offset(), 0.2, relative=True)
    return (dist.loss_B + quantile_B + q_BKM.sum((1, 2))).mean(), unweighted_B, noisy_BKM, dist.greedy_BK


def test_compiled_losses_and_gradients_equal_eager_ones() -> None:
    fast = compiled(losses)
    for B in (5, 9, 14):  # the second batch size makes it symbolic
        dist = make(B, dtype=torch.float32)
        quantile = {k: v.float() if v.is_floating_point() else v for k, v in quantile_arguments(B, 4, 3, 6).items()}
        heads = {
            name: arguments.pop(name).requires_grad_()
            for arguments in (dist, quantile) for name in list(arguments)[:2]
        }  # fmt: skip
        results = []
        for function in (losses, fast):
            outputs = function(heads, dist, quantile)
            results.append([*outputs, *torch.autograd.grad(outputs[0], list(heads.values()))])
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def replay_step(tree: Tensor, flag_N: Tensor, u_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    first_B = tree_ops.sample(tree, 1000, u_B)
    tree_ops.update(tree, 1000, first_B, torch.zeros_like(u_B))
    tree_ops.scatter_last_(flag_N, first_B, u_B > 0.5)
    second_B = tree_ops.sample(tree, 1000, u_B)
    return first_B, second_B, tree[-1] + tree_ops.build(tree[:1000])[-1]


def test_a_compiled_function_that_samples_updates_and_samples_again_equals_eager() -> None:
    results = []
    for function in (replay_step, compiled(replay_step)):
        tree, flag_N = tree_ops.build(leaves(1000)), torch.zeros(1000, dtype=torch.bool)
        outputs = [x for _ in range(2) for x in function(tree, flag_N, leaves(200))]
        assert not torch.isin(outputs[1], outputs[0]).any()  # what was set to 0 is not drawn
        results.append([*outputs, tree, flag_N])
    for mine, theirs in zip(*results, strict=True):
        assert torch.equal(mine, theirs)


# --- errors ---------------------------------------------------------------------------------------------------------


def test_wrappers_name_the_argument() -> None:
    a = make()
    with pytest.raises(ValueError, match="smoothing_kind is 'gauss'"):
        ops.branch_dist_loss(**a, smoothing_kind="gauss")
    with pytest.raises(ValueError, match=r"support_2 has shape \(3,\)"):
        ops.expected_q(a["value_BN"], a["adv_BKMN"], torch.zeros(3))
    with pytest.raises(TypeError, match=r"value_BN has dtype torch.int64"):
        ops.expected_q(a["value_BN"].long(), a["adv_BKMN"].long(), a["support_2"])
    with pytest.raises(ValueError, match="next_send_BE is for 4 branches"):
        ops.quantile_huber_loss(**quantile_arguments() | {"next_send_BE": torch.zeros(4, 9, dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"sigma has shape \(4,\)"):
        ops.advantage_noise(torch.zeros(2, 4, 3), seed_offset(), torch.ones(4), relative=True)
    for target, index, value, name in (
        (torch.zeros(2, 2), torch.zeros(1).long(), torch.zeros(1), "target_N"),
        (torch.zeros(2), torch.zeros(1).int(), torch.zeros(1), "index_B"),
        (torch.zeros(2), torch.zeros(1).long(), torch.zeros(2), "value_B"),
        (torch.zeros(2), torch.zeros(1).long(), torch.zeros(1).double(), "value_B"),
        (torch.zeros(2), torch.tensor([2]), torch.zeros(1), r"index_B spans 2 to 2, expected \[0, 2\)"),
    ):
        with pytest.raises(ValueError, match=name):
            tree_ops.scatter_last_(target, index, value)
