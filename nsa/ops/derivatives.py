"""What may be differentiated, and which transforms of `torch.func` run: one derivative, backwards;
vmap as a loop over slices.

A second derivative and forward mode are errors in our own words on every path, never a silent 0.
PyTorch's `once_differentiable` notices a second derivative by the incoming gradient alone, and not
by what else the gradients depend on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from nsa.ops.exporting import is_exporting

Grad = Tensor | list[Tensor] | list[None] | None
Gradients = tuple[Grad, ...]


def has_transforms() -> bool:
    """Whether a transform of `torch.func` or a level of forward mode is active."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    )


def has_slices(x: Tensor) -> bool:
    """Whether vmap runs over ``x`` at any level: its contents cannot be read on the host."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        if functorch.is_batchedtensor(x):
            return True
        x = functorch.get_unwrapped(x)
    return False


def check_readable(path: str, *read: object) -> None:
    """ValueError where path ``path`` cannot read tensors on the host: vmap runs over them, or
    torch.export traces the call. Under torch.compile the graph ends here; with fullgraph=True that
    is Dynamo's error, with this reason.
    """
    if is_exporting():
        raise ValueError(
            f"got torch.export of path={path!r}, which reads the chosen blocks on the host; wanted"
            " masked or v2; set path"
        )
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(
            msg=f"got torch.compile(fullgraph=True) of path={path!r}, which reads the chosen blocks"
            " on the host; wanted masked, v2 or triton; set path, or compile with fullgraph=False"
        )
    if has_transforms() and any(isinstance(x, Tensor) and has_slices(x) for x in read):
        raise ValueError(
            f"got vmap over path={path!r}, which reads the chosen blocks on the host; wanted"
            " masked, v2 or triton; or fold the mapped dimension into the batch"
        )


def once(*tensors: Tensor) -> tuple[Tensor, ...]:
    """``tensors`` as they are; a second derivative or a forward one through them is a RuntimeError.

    Costs one node of the graph, and nothing where no gradient is recorded.
    """
    if torch.compiler.is_compiling():  # whose backward has no derivative either, and says so
        return tensors
    recorded = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if not recorded and not has_transforms():
        return tensors
    return tuple(_Once.apply(*tensors))  # type: ignore[no-untyped-call]


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
        return refusing(input_gradients, *gradients, *ctx.saved_tensors)

    return wrapped


def refusing(gradients: Gradients, *sources: Tensor | None) -> Gradients:
    """``gradients`` with a graph to those of ``sources`` that have one themselves, along which
    every derivative is refused.
    """
    recorded = [x for x in sources if x is not None and x.requires_grad]
    return tuple(_refusing(x, recorded) for x in gradients)


def refused_at(*sources: Tensor) -> Tensor:
    """An empty tensor with a graph to ``sources``, along which every derivative is refused."""
    made: Tensor = _Refused.apply(sources[0].new_empty(0), *sources)  # type: ignore[no-untyped-call]
    return made


def function_of(
    name: str,
    run: Callable[..., Any],
    save: Callable[..., None] | None,
    gradients: Callable[..., Gradients] | None,
) -> Any:
    """``run`` as a torch.autograd.Function that transforms of `torch.func` take, which an operator
    of torch.library is not. vmap calls it once a slice.

    ``save`` and ``gradients`` as of `nsa.ops.operator.Backward`; None: without gradient.
    """

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        if save is None:
            ctx.mark_non_differentiable(*([output] if isinstance(output, Tensor) else output))
            ctx.num_inputs = len(inputs)
        else:
            save(ctx, inputs, output)

    def backward(ctx: Any, *grads: Tensor | None) -> Gradients:
        return (None,) * ctx.num_inputs if gradients is None else gradients(ctx, *grads)

    def jvp(*_: object) -> NoReturn:
        _refuse_forward_mode()

    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Any, Any]:
        results = [made.apply(*_slice(inputs, in_dims, i)) for i in range(info.batch_size)]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
        return stacked, (0,) * len(stacked)

    members: dict[str, Any] = {
        "forward": run,
        "setup_context": setup_context,
        "backward": backward,
        "jvp": jvp,
        "vmap": vmap,
    }
    body = {key: staticmethod(member) for key, member in members.items()}
    made: Any = type(name, (torch.autograd.Function,), body)
    return made


def eager_function_of(
    name: str,
    run: Callable[..., Any],
    save: Callable[..., None],
    gradients: Callable[..., Gradients],
) -> Any:
    """``run`` as a torch.autograd.Function for `apply`; arguments as of `function_of`."""

    def forward(ctx: Any, *inputs: Any) -> Any:
        output = run(*inputs)
        save(ctx, inputs, output)
        return output

    body = {"forward": staticmethod(forward), "backward": staticmethod(gradients)}
    made: Any = type(name, (torch.autograd.Function,), body)
    return made


def apply(function: Any, *inputs: Any) -> Any:
    """``function.apply(*inputs)`` of a torch.autograd.Function, where no transform is active, nor
    any input a tensor of one: without looking for them, which takes half of the time.
    """
    return super(torch.autograd.Function, function).apply(*inputs)


def _slice(inputs: Sequence[Any], dims: Sequence[int | None], i: int) -> list[Any]:
    return [x if d is None else x.select(d, i) for x, d in zip(inputs, dims, strict=True)]


def _refusing(gradient: Any, sources: Sequence[Tensor]) -> Any:
    """``gradient`` with a graph to ``sources``, along which every derivative is refused."""
    if isinstance(gradient, list):  # of an input that is a list
        return [_refusing(x, sources) for x in gradient]
    if gradient is None:
        return None
    return _Refused.apply(gradient, *sources)  # type: ignore[no-untyped-call]


def _refuse_forward_mode() -> NoReturn:
    raise RuntimeError(
        "got forward-mode AD (jvp, jacfwd, dual tensors) of NSA's attention, which has no forward"
        " derivative; wanted reverse mode; use torch.func.grad, vjp or jacrev"
    )


class _Refused(torch.autograd.Function):
    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        raise RuntimeError(
            "got a request to differentiate twice through NSA's attention, whose gradients have"
            " none of their own; wanted one derivative; drop create_graph, or the outer grad"
        )

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        _refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Tensor) -> tuple[Any, Any]:
        return _Refused.apply(*inputs), in_dims[0]  # type: ignore[no-untyped-call]


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, ...]) -> None:
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return gradients
        return tuple(_refusing(x, ()) for x in gradients)

    @staticmethod
    def jvp(ctx: Any, *_: Any) -> Any:
        _refuse_forward_mode()

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *tensors: Tensor) -> tuple[Any, Any]:
        return _Once.apply(*tensors), in_dims  # type: ignore[no-untyped-call]
