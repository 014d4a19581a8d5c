"""Definition of the operators `torch.ops.fox.*`.

Python owns all of an operator but its CUDA kernel: the schema, the reference in PyTorch, the fake and the gradient. A
shared object may add kernels beside them at any time, before or after, with ``STABLE_TORCH_LIBRARY_IMPL(fox, CUDA, m)``
and nothing else. The dispatcher prefers a kernel of the device's own key to the reference, which is registered as
``CompositeExplicitAutograd``, hence serves every device that has none; gradients sit above both.

Every output is contiguous and shares no memory with an input or another output. An operator that writes to an argument
says so in its schema, ``Tensor(a!)``, and returns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "fox"


def define_operator(
    name: str,
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    setup_context: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> torch._ops.OpOverload:
    """Define ``torch.ops.fox.<name>``, unless this process has it already.

    Args:
        name: of the operator.
        schema: arguments, without defaults, and results; only types that the stable ABI can pass (int rather than
            SymInt, no str).
        reference: what the operator computes, in the schema's order of arguments.
        fake: results for tensors without data, as `torch.library.register_fake` asks.
        setup_context, backward: gradient, as `torch.library.register_autograd` asks for it.

    Returns:
        The overload, which costs less to call than ``torch.ops.fox.<name>``.
    """
    # The functions of torch.library without a Library of ours: their registrations last as long as the process, so that
    # a second import of this package (a reload, a copy under another name) finds the operators in place and cannot take
    # away a schema that CUDA kernels are bound to. custom_op would do all of this too, but looks for aliases in every
    # call, which costs the small operators more than the rest of the dispatch.
    qualified = f"{NAMESPACE}::{name}"
    known = hasattr(getattr(torch.ops, NAMESPACE), name)
    if not known:
        torch.library.define(qualified, schema, tags=(torch.Tag.pt2_compliant_tag,))
    overload = getattr(getattr(torch.ops, NAMESPACE), name).default
    if not known:
        torch.library.impl(qualified, "default", reference)
        torch.library.register_fake(qualified, fake)
        if backward is not None:
            torch.library.impl(qualified, "Autograd", _autograd_kernel(overload, setup_context, backward))
    return overload


def _autograd_kernel(
    overload: torch._ops.OpOverload, setup_context: Callable[..., None], backward: Callable[..., Any]
) -> Callable[..., Any]:
    # What torch.library.register_autograd makes, but for its search for left-out defaults: with the loss's 16 arguments
    # that costs 50 us a call, an eighth of a small loss.
    def forward(ctx, *args):
        with torch._C._AutoDispatchBelowAutograd():
            outputs = overload(*args)
        setup_context(ctx, args, outputs)
        return outputs

    function = type(
        f"{overload.__name__}_gradient",
        (torch.autograd.Function,),
        {"forward": staticmethod(forward), "backward": staticmethod(backward)},
    )

    def kernel(*args):
        if torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            return function.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return overload(*args)

    return kernel
