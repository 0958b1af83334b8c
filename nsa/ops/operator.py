"""Registers operators with torch.library. Their backward has no derivative of its own: a second
derivative is an error, never a silent 0.

An operator is opaque to torch.compile. It is defined one layer below `torch.library.custom_op`,
whose first call imports all of Dynamo, compiled or not. PyTorch's `once_differentiable` notices a
second derivative by the incoming gradient alone, and not by what else the gradients depend on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_LIBRARY = torch.library.Library("nsa", "FRAGMENT")
Grad = Tensor | list[Tensor] | list[None] | None
Gradients = tuple[Grad, ...]


@dataclass(frozen=True, slots=True)
class Backward:
    """The gradient of an operator NAME: an operator NAME_backward, and what autograd makes of it.

    ``schema``, ``run`` and ``fake`` as of `define_operator`. ``save(ctx, inputs, output)`` keeps
    what ``gradients(ctx, *grad_outputs)`` needs to call the operator; that returns one gradient an
    input.
    """

    schema: str
    run: Callable[..., Any]
    fake: Callable[..., Any]
    save: Callable[..., None]
    gradients: Callable[..., Gradients]


def define_operator(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    backward: Backward | None = None,
) -> None:
    """Register `torch.ops.nsa.NAME`: ``schema`` without the name, ``run`` for every device,
    ``fake`` for its outputs' shapes and dtypes.

    With a ``backward`` also NAME_backward, and the gradient; a second derivative is a RuntimeError.
    """
    _define(name, schema, run, fake)
    if backward is None:
        return
    _define(f"{name}_backward", backward.schema, backward.run, backward.fake)
    torch.library.register_autograd(
        f"nsa::{name}", no_double_backward(backward.gradients), setup_context=backward.save
    )


def define_formula(name: str, schema: str, run: Callable[..., Any]) -> None:
    """Register `torch.ops.nsa.NAME` as a formula in PyTorch: it is differentiated through, and a
    profiler shows the name around what it calls.

    Costs 5 us a call. Where `is_transformed`, call ``run`` itself.
    """
    _LIBRARY.define(f"{name}{schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CompositeImplicitAutograd")


def is_transformed() -> bool:
    """Whether a compiler traces the formula, which would lose sight of it inside an operator, or a
    function transform such as vmap, which would run the operator once a slice.
    """
    return torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` the current one where it is another GPU: Triton launches on the current."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


def _on_its_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with the device of its first tensor as the current one."""

    @functools.wraps(run)
    def guarded(*arguments: Any, **options: Any) -> Any:
        first = next(x for x in map(_first_tensor, arguments) if x is not None)
        with device_guard(first.device):
            return run(*arguments, **options)

    return guarded


def _first_tensor(argument: object) -> Tensor | None:
    if isinstance(argument, list | tuple):
        return next((x for x in argument if isinstance(x, Tensor)), None)
    return argument if isinstance(argument, Tensor) else None


def _define(name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    torch.library.define(f"nsa::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"nsa::{name}", "default", _on_its_device(run))
    torch.library.register_fake(f"nsa::{name}", fake)


def of_attention(schema: str, run: Callable[..., Any], name: str, num_inputs: int) -> Backward:
    """The Backward of an operator NAME whose ``num_inputs`` inputs begin with q, k, v and two more
    tensors, and which returns (o, lse without gradient).

    ``schema`` and ``run`` are of (do, o, lse, *inputs) -> (dq, dk, dv).
    """

    def gradients(ctx: Any, do: Tensor | None, _: Tensor | None) -> Gradients:
        if do is None:
            return (None,) * num_inputs
        o, lse, *inputs = ctx.saved_tensors
        operator = getattr(torch.ops.nsa, f"{name}_backward")
        return (*operator(do, o, lse, *inputs, *ctx.options), *(None,) * (num_inputs - 3))

    return Backward(schema, run, _fake_attention_backward, _save_attention, gradients)


def fake_attention(q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """o [B, T, Q, DV] in q's dtype and lse [B, T, Q] fp32, of q [B, T, Q, D] and v [..., DV]."""
    return q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)


def _fake_attention_backward(
    do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, *inputs[:5])
    ctx.options = inputs[5:]


def int_and_tensor(q_start: int | Tensor) -> tuple[int, Tensor | None]:
    """``q_start`` as a schema takes it: (position, None), or (0, those of each row)."""
    return (0, q_start) if isinstance(q_start, Tensor) else (q_start, None)


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Tensor:
        raise RuntimeError(
            "got a request to differentiate twice through NSA's kernels, whose gradients have none"
            " of their own; wanted one derivative; drop create_graph"
        )


def no_double_backward(backward: Callable[..., Gradients]) -> Callable[..., Gradients]:
    """``backward`` of an operator, run without a graph. With create_graph, differentiating the
    returned gradients raises a RuntimeError.
    """

    @functools.wraps(backward)
    def wrapped(ctx: Any, *gradients: Tensor | None) -> Gradients:
        create_graph = torch.is_grad_enabled()
        with torch.no_grad():
            input_gradients = backward(ctx, *gradients)
        if not create_graph:
            return input_gradients
        return tuple(_refusing(x) for x in input_gradients)

    return wrapped


def _refusing(gradient: Any) -> Any:
    if isinstance(gradient, list):  # of an input that is a list
        return [_refusing(x) for x in gradient]
    return None if gradient is None else _Refused.apply(gradient.detach().requires_grad_())
