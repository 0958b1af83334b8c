"""The one door to a Triton launch. A kernel that was launched before with like arguments goes
straight to its launcher: `kernel[grid](...)` works out anew at each call which compiled variant it
wants, some 25 of its 36 us on an H200's host.

What "like" means is a key. It holds what Triton's specialisation reads: of each tensor its dtype
and whether its address is a multiple of 16, of a descriptor its dtype and its block, of a number
its class (`representative`), of a constexpr its value and type. Numbers are looked up by their
values first, which need no work. What no key knows is launched as Triton does it, which compiles
it.

So is all that this shortcut does not know to be right: another version of Triton, its interpreter,
an autotuner, a profiler's hook, a tensor of another device, a constexpr that is no number or text,
a kernel that needs scratch memory, a GPU that is not NVIDIA's.
"""

from __future__ import annotations

import marshal
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import itemgetter, or_
from types import FunctionType
from typing import Any

import triton
from torch import Tensor
from torch.nn import Parameter
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.jit import JITFunction

# Versions whose JITFunction.run, CudaLauncher and specialize.cc were read, and whether the
# launcher takes the kernel's arguments as one sequence.
CHECKED = {"3.6.0": False, "3.7.1": True}
# False: every launch goes Triton's way; for measurements and tests.
enabled = True
MOST_VALUES = 256  # of a kernel that are remembered: each decoded token may bring new ones

AS_ONE = CHECKED.get(triton.__version__, False)
# what stands in its place, such as a test's recorder, wants to see each launch
_RUN: Any = JITFunction.run if triton.__version__ in CHECKED else object()
# what this process has set: nothing, as a rule
_SET, _SET_TO_COMPILE = vars(knobs.runtime), vars(knobs.compilation)
_ENTER, _EXIT = knobs.runtime_knobs.launch_enter_hook, knobs.runtime_knobs.launch_exit_hook
_TENSORS = {Tensor, Parameter}
_PLAIN = {int, float, bool, str, type(None)}
_DESCRIPTORS = {"triton.tools.tensor_descriptor", "triton.experimental.gluon.nvidia.hopper"}

_data_ptr, _get_device = Tensor.data_ptr, Tensor.get_device
_dtype: Callable[[Tensor], Any] = Tensor.dtype.__get__  # type: ignore[attr-defined]

Picked = Callable[[Sequence[Any]], tuple[Any, ...]]
# names and the values that a kernel was compiled with, in the dictionary that has them
Globals = tuple[tuple[Mapping[str, Any], str, Any], ...]
# a launcher, its arguments between the stream and the kernel's own, what must not have changed, and
# the compiled kernel, whose module has to live as long
CompiledLaunch = tuple[Callable[..., None], tuple[Any, ...], Globals, Any]


def compiled_launch(kernel: Any, compiled: Any) -> CompiledLaunch | None:
    """None for a launcher that is not as expected."""
    if type(compiled) is not CompiledKernel:
        return None
    launcher = compiled.run
    kind = type(launcher)
    if (kind.__module__, kind.__name__) != ("triton.backends.nvidia.driver", "CudaLauncher"):
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    launch_ = launcher.launch
    if isinstance(launch_, FunctionType):  # around a launcher of descriptors
        launch_ = with_kept_maps(launch_)
    how = (compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl)
    packed, hooks, scratch = compiled.packed_metadata, (None, None, None), (None, None)
    between: tuple[Any, ...] = (*how, *scratch, packed, *hooks)
    if AS_ONE:
        signature = (launcher.arg_annotations, launcher.kernel_signature)
        between = (*how, packed, *hooks, *scratch, *signature)
    values = kernel.used_global_vals.items()
    compiled_in = tuple((names, name, names.get(name)) for (name, _), (_, names) in values)
    return launch_, between, compiled_in, compiled


def with_kept_maps(launch_: FunctionType) -> Callable[..., None]:
    """``launch_``, which Triton's `wrap_handle_tensordesc` returned, with the tensor maps that it
    made for an address, sizes and strides kept.

    ``launch_`` itself where it is another function, or its kernel takes descriptors apart.
    """
    if launch_.__code__.co_freevars != ("launcher", "tensordesc_indices", "tensordesc_meta"):
        return launch_
    raw, indices, metas = (cell.cell_contents for cell in launch_.__closure__ or ())
    if any(meta is None for meta in metas):  # it is then passed with its tensor
        return launch_
    scope = launch_.__globals__
    before = 0 if AS_ONE else scope["_BASE_ARGS_FORMAT_LEN"]
    # the last one first, so that places before it stay what they are
    places = tuple(zip(sorted(indices), metas, strict=True))[::-1]
    return KeptMaps(raw, places, scope["make_tensordesc_arg"], before)


class KeptMaps:
    """A launcher of a kernel that takes descriptors: ``raw`` with the tensor map that ``make`` made
    of a descriptor in its place. ``places``: (place among the kernel's arguments, metadata), the
    last first; ``before`` them are so many in one sequence.
    """

    __slots__ = ("before", "made", "make", "places", "raw")

    def __init__(
        self,
        raw: Callable[..., None],
        places: tuple[tuple[int, Any], ...],
        make: Callable[[Any, Any], list[Any]],
        before: int,
    ) -> None:
        self.raw, self.places, self.make, self.before = raw, places, make, before
        self.made: dict[Hashable, list[Any]] = {}

    def __call__(self, *arguments: Any) -> None:
        if AS_ONE:
            self.raw(*arguments[:-1], self.expanded(arguments[-1]))
        else:
            self.raw(*self.expanded(arguments))

    def expanded(self, arguments: Sequence[Any]) -> list[Any]:
        found = list(arguments)
        for place, meta in self.places:
            at = self.before + place
            x = arguments[at]
            key = (at, _data_ptr(x.base), *x.shape, *x.strides, x.padding, _rounds(x))
            tensor_map = self.made.get(key)
            if tensor_map is None:
                if len(self.made) >= MOST_VALUES:
                    self.made.clear()
                tensor_map = self.made[key] = self.make(x, meta)
            found[at : at + 1] = tensor_map
        return found


def _rounds(descriptor: Any) -> bool:
    """Whether it rounds fp32 as it loads, which Triton 3.6 cannot say."""
    return getattr(descriptor, "round_f32_to_tf32", False)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A kernel's first ``length`` arguments: tensors, descriptors and None.

    ``in_order`` puts addresses, None and the descriptors, in this order, in the arguments' places;
    it is None where all are tensors. ``numbers`` and ``constants`` are of the values of all
    parameters, behind the head.
    """

    length: int
    tensors: Picked
    descriptors: Picked
    in_order: Picked | None
    numbers: Picked
    constants: Picked

    @classmethod
    def of(cls, kinds: Sequence[type], params: Sequence[Any]) -> Head | None:
        """None where something else is among them, or a tensor is a constexpr."""
        tensors = [i for i, kind in enumerate(kinds) if kind in _TENSORS]
        descriptors = [i for i, kind in enumerate(kinds) if _is_descriptor(kind)]
        place = {i: n for n, i in enumerate(tensors)}
        place |= {i: len(tensors) + 1 + n for n, i in enumerate(descriptors)}
        absent = [kind for i, kind in enumerate(kinds) if i not in place]
        if {*absent} - {type(None)} or any(params[i].is_constexpr for i in place):
            return None
        order = picker([place.get(i, len(tensors)) for i in range(len(kinds))])
        rest = range(len(kinds), len(params))
        return cls(
            len(kinds),
            picker(tensors),
            picker(descriptors),
            order if absent or descriptors else None,
            picker([i for i in rest if not params[i].is_constexpr]),
            picker([i for i in rest if params[i].is_constexpr]),
        )


class LaunchedKernel:
    """A kernel, and what was compiled of it."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel  # kept alive, so that no other has its id
        self.num_head = 0  # arguments up to the last tensor
        self.heads: dict[tuple[type, ...], Head | None] = {}
        # with the values of the parameters behind the head
        self.by_values: dict[Hashable, tuple[CompiledLaunch, tuple[Any, ...]]] = {}
        self.by_classes: dict[Hashable, CompiledLaunch] = {}
        self._names = frozenset(param.name for param in kernel.params)

    def head(self, arguments: Sequence[Any]) -> Head | None:
        """That of ``arguments``, where it has other types or is longer than those before."""
        kinds, params = list(map(type, arguments)), self.kernel.params
        ends = [i for i, kind in enumerate(kinds, 1) if kind in _TENSORS or _is_descriptor(kind)]
        self.num_head = max([self.num_head, *ends])
        of_head = tuple(kinds[: self.num_head])
        found = Head.of(of_head, params) if len(of_head) <= len(params) else None
        self.heads[of_head] = found
        return found

    def find(
        self, key: tuple[Any, ...], head: Head, arguments: Sequence[Any], options: dict[str, Any]
    ) -> tuple[CompiledLaunch, tuple[Any, ...]] | None:
        """What values that are new want, remembered as ``key``; None where nothing was compiled for
        their classes.
        """
        values = self.values(arguments, options)
        compiled = (
            None if values is None else self.by_classes.get(_classes(key, head, values, options))
        )
        if values is None or compiled is None:
            return None
        if len(self.by_values) >= MOST_VALUES:
            self.by_values.clear()
        self.by_values[key] = found = compiled, values[head.length :]
        return found

    def remember(
        self,
        compiled: Any,
        key: tuple[Any, ...],
        head: Head,
        arguments: Sequence[Any],
        options: dict[str, Any],
    ) -> None:
        """``compiled`` is what Triton launched for these arguments."""
        values, launched = self.values(arguments, options), compiled_launch(self.kernel, compiled)
        if values is None or launched is None:
            return
        device = driver.active.get_current_device()
        others = (*values[head.length :], *options.values())
        bases = (x.base for x in head.descriptors(arguments))
        if all(type(x) in _PLAIN for x in others) and all(
            _get_device(x) == device for x in (*head.tensors(arguments), *bases)
        ):
            self.by_classes[_classes(key, head, values, options)] = launched

    def values(
        self, arguments: Sequence[Any], options: Mapping[str, Any]
    ) -> tuple[Any, ...] | None:
        """A value for each parameter; None where Triton refuses them, or they are unusual."""
        params = self.kernel.params
        if len(arguments) == len(params) and self._names.isdisjoint(options):
            return tuple(arguments)
        named, rest = params[: len(arguments)], params[len(arguments) :]
        if (
            len(arguments) > len(params)
            or any(param.name in options for param in named)
            or not all(param.name in options or param.has_default for param in rest)
        ):
            return None
        others = [options.get(param.name, param.default) for param in rest]
        # a default may be anything, such as a dtype
        return (*arguments, *others) if all(type(x) in _PLAIN for x in others) else None


def representative(number: Any) -> Any:
    """A number that Triton specialises as it does ``number``: 1 apart, by 16 or not, of 32 or 64
    bits, and of 64 without a sign (specialize.cc, handle_long_type). Of no int its type counts.
    """
    if type(number) is not int:
        return None if number is None else type(number).__name__
    if number == 1:
        return 1
    least = 0
    if not -(2**31) <= number < 2**31:
        least = 2**32 if -(2**63) <= number < 2**63 else 2**63
        if not -(2**63) <= number < 2**64:
            return number  # Triton refuses it
    return least + (16 if number % 16 == 0 else 2)


def _classes(
    key: tuple[Any, ...], head: Head, values: Sequence[Any], options: dict[str, Any]
) -> Hashable:
    """``key`` with the classes of numbers in place of their values."""
    classes = tuple(map(representative, head.numbers(values)))
    return marshal.dumps((classes, head.constants(values), options), 2), *key[1:]


_KERNELS: dict[int, LaunchedKernel] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Launched:
    """A launch that went straight to its launcher: what repeats it. ``head``: the arguments up to
    the last tensor, ``fixed`` those behind it.
    """

    kernel: Any
    compiled: CompiledLaunch
    grid: tuple[int, int, int]
    head: Sequence[Any]
    fixed: tuple[Any, ...]


class _Recorded(threading.local):
    """Of this thread: ``note`` is called with each launch, with None where Triton launched it."""

    note: Callable[[Launched | None], None] | None = None


RECORDED = _Recorded()


def goes_straight(kind: type) -> bool:
    """Whether `launch` may go straight to a launcher, of kernels of class ``kind`` that have no
    hooks of their own, with no setting of this process that decides on a variant.
    """
    nothing_set = not (_SET or _SET_TO_COMPILE or _ENTER.calls or _EXIT.calls)
    return enabled and nothing_set and getattr(kind, "run", None) is _RUN


def launch(kernel: Any, grid: Sequence[int], *arguments: Any, **options: Any) -> None:
    """`kernel[grid](*arguments, **options)`, in a fraction of the host's time once its variant is
    compiled.

    On the current device and its current stream. Raises what Triton raises. Tensors, None and
    descriptors come before the first number.
    """
    note = RECORDED.note
    if note is None:
        _launch(kernel, grid, arguments, options)
    else:
        note(_launch(kernel, grid, arguments, options))


def _launch(
    kernel: Any, grid: Sequence[int], arguments: tuple[Any, ...], options: dict[str, Any]
) -> Launched | None:
    """`launch`; what repeats it, where that is recorded and did not go Triton's way."""
    if not enabled or getattr(type(kernel), "run", None) is not _RUN:
        kernel[grid](*arguments, **options)
        return None
    settings: Hashable = ()
    if _SET or _SET_TO_COMPILE or _ENTER.calls or _EXIT.calls or kernel.pre_run_hooks:
        settings = _settings(kernel)
    known = _KERNELS.get(id(kernel))
    if known is None:
        known = _KERNELS[id(kernel)] = LaunchedKernel(kernel)
    head = known.heads.get(tuple(map(type, arguments[: known.num_head])))
    if head is None:
        head = known.head(arguments)
    if head is None or settings is None:
        kernel[grid](*arguments, **options)
        return None
    try:
        # version 2: the bytes depend on types and values alone
        numbers = marshal.dumps((arguments[head.length :], options), 2)
    except ValueError:  # none of these; a tensor among them is in the head from now on
        known.head(arguments)
        kernel[grid](*arguments, **options)
        return None
    active = driver.active
    device = active.get_current_device()
    tensors = head.tensors(arguments)
    values = addresses = tuple(map(_data_ptr, tensors))
    key = (
        numbers,
        head,
        device,
        settings,
        kernel.debug,
        # nearly always all are multiples of 16
        reduce(or_, addresses, 0) % 16 == 0 or tuple(address % 16 == 0 for address in addresses),
        *map(_dtype, tensors),
        *map(_get_device, tensors),
    )
    if head.in_order is not None:
        descriptors = head.descriptors(arguments)
        key = (*key, *map(_described, descriptors))
        values = head.in_order((*addresses, None, *descriptors))
    found = known.by_values.get(key) or known.find(key, head, arguments, options)
    if found is None:
        known.remember(kernel[grid](*arguments, **options), key, head, arguments, options)
        return None
    compiled, fixed = found
    run, between, compiled_in, _ = compiled
    for names, name, value in compiled_in:
        if names.get(name) is not value:
            kernel[grid](*arguments, **options)  # refuses what is not equal, either
            return None
    x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
    stream = active.get_current_stream(device)
    # an address is taken as it is, where of a tensor the driver would be asked
    if AS_ONE:
        run(x, y, z, stream, *between, (*values, *fixed))
    else:
        run(x, y, z, stream, *between, *values, *fixed)
    if RECORDED.note is None:
        return None
    return Launched(kernel, compiled, (x, y, z), arguments[: head.length], fixed)


def _settings(kernel: Any) -> Hashable | None:
    """What besides its arguments decides which variant Triton takes; None where something wants to
    see each launch.
    """
    runtime = knobs.runtime
    for hook in (runtime.launch_enter_hook, runtime.launch_exit_hook):
        if type(hook) is not knobs.HookChain or hook.calls:
            return None
    if runtime.add_stages_inspection_hook is not None or kernel.pre_run_hooks:
        return None
    return runtime.debug, knobs.compilation.instrumentation_mode


def _is_descriptor(kind: type) -> bool:
    return kind.__name__ == "TensorDescriptor" and kind.__module__ in _DESCRIPTORS


def _described(descriptor: Any) -> tuple[Any, ...]:
    """What Triton's specialisation reads of a descriptor; Gluon's alone have a layout."""
    base, layout = descriptor.base, getattr(descriptor, "layout", None)
    shape = tuple(descriptor.block_shape)
    return _dtype(base), _get_device(base), shape, None if layout is None else repr(layout)


def picker(indices: Sequence[int]) -> Picked:
    """Takes the values at ``indices``, always as a tuple."""
    if len(indices) > 1:
        return itemgetter(*indices)
    return lambda values: tuple(values[i] for i in indices)
