"""Registers operators with torch.library, and calls them. Their backward has no derivative of its
own: a second derivative is an error, never a silent 0.

An operator is opaque to torch.compile. It is defined one layer below `torch.library.custom_op`,
whose first call imports all of Dynamo, compiled or not.

Where nothing but autograd looks at a call (`is_plain`), an operator runs without PyTorch's
dispatcher, whose autograd of a library's operator takes the host 150 us a call more than a
torch.autograd.Function. A profiler sees its name all the same.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._device import DeviceContext

from nsa.ops import derivatives
from nsa.ops.derivatives import Gradients as Gradients

_LIBRARY = torch.library.Library("nsa", "FRAGMENT")
_FUNCTIONS: dict[str, Any] = {}  # the operators, for transforms
_RUNS: dict[str, Callable[..., Any]] = {}  # what each operator runs
_DIFFERENTIABLE: dict[str, Any] = {}  # that, with its gradient
_NO_GUARD = nullcontext()
# How many `through_dispatcher` and `shown_to_observers` are open, in any thread: a backward runs in
# threads of autograd's own.
_OPEN = {"dispatcher": 0, "observers": 0}


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
    *,
    only_launches: bool = True,
) -> None:
    """Register `torch.ops.nsa.NAME`: ``schema`` without the name, ``run`` for every device,
    ``fake`` for its outputs' shapes and dtypes.

    With a ``backward`` also NAME_backward, and the gradient; a second derivative is a RuntimeError.
    ``only_launches``: on a GPU ``run`` does nothing but make memory and launch kernels of ours, so
    that a like call may repeat it (`nsa.ops.kernels.plans`).
    """
    _define(name, schema, run, fake, only_launches)
    operator = getattr(torch.ops.nsa, name)
    if backward is None:
        _FUNCTIONS[name] = derivatives.function_of(name, operator, None, None)
        return
    gradients = derivatives.no_double_backward(backward.gradients)
    _FUNCTIONS[name] = derivatives.function_of(name, operator, backward.save, gradients)
    _DIFFERENTIABLE[name] = derivatives.eager_function_of(
        name, functools.partial(run_by_itself, name), backward.save, gradients
    )
    define_operator(
        f"{name}_backward",
        backward.schema,
        backward.run,
        backward.fake,
        only_launches=only_launches,
    )
    torch.library.register_autograd(f"nsa::{name}", gradients, setup_context=backward.save)


def call(name: str, *inputs: Any) -> Any:
    """`torch.ops.nsa.NAME` of ``inputs``, in a form that the active transforms take; what it runs,
    without the dispatcher, where `is_plain`.
    """
    if torch.compiler.is_compiling():
        return getattr(torch.ops.nsa, name)(*inputs)
    if _HERE.is_plain:
        return run_by_itself(name, *inputs)
    if derivatives.has_transforms():
        return _FUNCTIONS[name].apply(*inputs)
    if not is_plain(*inputs):
        return getattr(torch.ops.nsa, name)(*inputs)
    if name not in _DIFFERENTIABLE or not _is_recorded(inputs):
        return run_by_itself(name, *inputs)
    if any(isinstance(x, list) for x in inputs):  # a Function records no lists
        return getattr(torch.ops.nsa, name)(*inputs)
    return derivatives.apply(_DIFFERENTIABLE[name], *inputs)


def is_plain(*inputs: object) -> bool:
    """Whether only autograd looks at a call of ``inputs``, so that no operator need be seen: eager,
    on tensors of PyTorch's own class with memory, and no transform, tracer or mode is active.

    A mode (of `torch.utils._python_dispatch` or `torch.overrides`: fake tensors, counters of flops,
    selective checkpointing) sees what goes through the dispatcher, so it gets operators. The mode
    of `torch.set_default_device` looks at none.
    """
    if torch.compiler.is_compiling() or derivatives.has_transforms() or _OPEN["dispatcher"]:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_function_stack() and not _only_sets_a_device():
        return False
    is_wrapper = torch._C._functorch.is_functorch_wrapped_tensor  # it may outlive its transform
    for x in inputs:
        kind = type(x)
        if kind is Tensor or kind is torch.nn.Parameter:
            if not (x.is_cuda or x.is_cpu) or is_wrapper(x):  # type: ignore[attr-defined,arg-type]
                return False
        elif kind is list:
            if not is_plain(*x):  # type: ignore[misc]
                return False
        elif isinstance(x, Tensor):
            return False
    return True


class _Here(threading.local):
    is_plain = False


_HERE = _Here()


class Plainly:
    """In this thread, `call` asks no more whether a call `is_plain`, nor records any gradient: for
    whoever asked for all tensors of several calls, and has the gradient of them.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before, _HERE.is_plain = _HERE.is_plain, True

    def __exit__(self, *_: object) -> None:
        _HERE.is_plain = self._before


def _only_sets_a_device() -> bool:
    stack = torch.overrides._get_current_function_mode_stack()
    return all(type(mode) is DeviceContext for mode in stack)


def _is_recorded(inputs: tuple[Any, ...]) -> bool:
    return torch.is_grad_enabled() and any(
        _is_recorded(tuple(x)) if isinstance(x, list) else isinstance(x, Tensor) and x.requires_grad
        for x in inputs
    )


def run_by_itself(name: str, *inputs: Any) -> Any:
    """What `torch.ops.nsa.NAME` runs, without the dispatcher and without a gradient; under its name
    where a profiler runs or `shown_to_observers` is open.
    """
    run = _RUNS[name]
    if _OPEN["observers"]:
        with torch.profiler.record_function(f"nsa::{name}"):
            return run(*inputs)
    if torch._C._autograd._profiler_enabled():
        with torch._C._profiler._RecordFunctionFast(f"nsa::{name}"):
            return run(*inputs)
    return run(*inputs)


@contextmanager
def through_dispatcher() -> Iterator[None]:
    """Every operator of the process goes through PyTorch's dispatcher, as under a mode: for
    comparisons.
    """
    with _opened("dispatcher"):
        yield


@contextmanager
def shown_to_observers() -> Iterator[None]:
    """Operators that run without the dispatcher bear their names for every observer, such as
    `torch.profiler.ExecutionTraceObserver`, whose presence PyTorch does not tell; a profiler needs
    this not. Some 20 us an operator.
    """
    with _opened("observers"):
        yield


@contextmanager
def _opened(what: str) -> Iterator[None]:
    _OPEN[what] += 1
    try:
        yield
    finally:
        _OPEN[what] -= 1


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
    return torch.compiler.is_compiling() or derivatives.has_transforms()


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Makes ``device`` the current one where it is another GPU: Triton launches on the current."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NO_GUARD
    return torch.cuda.device(device)


def _on_its_device(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with the device of its first tensor as the current one."""

    @functools.wraps(run)
    def guarded(*arguments: Any, **options: Any) -> Any:
        first = arguments[0]
        if not isinstance(first, Tensor):
            first = next(x for x in map(_first_tensor, arguments) if x is not None)
        with device_guard(first.device):
            return run(*arguments, **options)

    return guarded


def _first_tensor(argument: object) -> Tensor | None:
    if isinstance(argument, list | tuple):
        return next((x for x in argument if isinstance(x, Tensor)), None)
    return argument if isinstance(argument, Tensor) else None


def _on_gpu(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_cuda


def _planned(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run``, by a launch plan where a call is like an earlier one on a GPU."""
    call: Callable[[Sequence[Any]], Any] | None = None

    @functools.wraps(run)
    def planned(*arguments: Any, **options: Any) -> Any:
        nonlocal call
        if options or not _on_gpu(arguments[0]):
            return run(*arguments, **options)
        if call is None:
            from nsa.ops.kernels.plans import Plans  # Triton

            call = Plans(run).call
        return call(arguments)

    return planned


def _define(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    only_launches: bool,
) -> None:
    torch.library.define(f"nsa::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    run = _on_its_device(run)
    _RUNS[name] = _planned(run) if only_launches else run
    torch.library.impl(f"nsa::{name}", "default", _RUNS[name])
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
        found = call(f"{name}_backward", do, o, lse, *inputs, *ctx.options)
        return (*found, *(None,) * (num_inputs - 3))

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
