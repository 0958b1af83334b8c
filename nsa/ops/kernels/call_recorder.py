"""What an operator's body does in one call: which memory it makes, and what it launches.

`CallRecorder` sees every function of PyTorch that the body calls. Of those it knows, metadata
depends on a plan's key alone, memory is made anew by each call, and a view is an offset. Any other
function refuses a plan, so that what reads a value, copies or computes runs in every call. So does
a launch that went Triton's way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nsa.ops.kernels import launch as door

# What depends on a key alone; of an address only whether it is a multiple of 16 may be asked.
_METADATA = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,  # type: ignore[attr-defined]
    Tensor.stride,
    Tensor.get_device,
    Tensor.data_ptr,
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.is_cpu.__get__,  # type: ignore[attr-defined]
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.element_size,
    Tensor.is_contiguous,
    torch.sym_max,  # of numbers, here
    torch.sym_min,
}
MAKES = {Tensor.new_empty, torch.empty, torch.empty_like, torch.empty_strided}
_VIEWS = {
    Tensor.__getitem__,
    Tensor.contiguous,  # of what is contiguous
    Tensor.detach,
    Tensor.narrow,
    Tensor.select,
    Tensor.view,
}
Place = tuple[int, int]  # (number of an input, or of memory made, which come behind them; bytes)
Layout = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # size, strides, dtype


class Refused(Exception):
    """There can be no plan; says why. ``passes``: perhaps at the next call."""

    def __init__(self, why: str, *, passes: bool = False) -> None:
        super().__init__(why)
        self.passes = passes


class CallRecorder(TorchFunctionMode):
    """Within, in this thread: what makes memory and what is launched, in order."""

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.why: Refused | None = None
        self.num_inputs = len(inputs)
        self.made: list[Layout] = []
        # a number of what was made, or a launch with the places of its head, of descriptors without
        # their tensors; it holds none of them, so that the body frees them as ever
        self.steps: list[int | tuple[door.Launched, list[Place | None]]] = []
        self._known: dict[int, tuple[Callable[[], Tensor | None], Place]] = {}
        for i, x in reversed([*enumerate(inputs)]):  # of one that is given twice, the first
            self._keep(x, (i, 0))

    def _keep(self, x: Tensor, place: Place) -> None:
        self._known[id(x)] = ref(x), place

    def place_of(self, x: Tensor) -> Place:
        """Refused for a tensor from elsewhere."""
        known, place = self._known.get(id(x), (None, None))
        if known is None or known() is not x or place is None:
            raise Refused("a tensor is neither an input nor made here")
        return place

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        try:
            self._see(func, args, result)
        except Refused as why:
            self.why = self.why or why
        return result

    def _see(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        name = getattr(func, "__name__", func)
        if func in _METADATA:
            return
        if func in MAKES:
            number = self.num_inputs + len(self.made)
            self._keep(result, (number, 0))
            self.made.append(layout_of(result))
            self.steps.append(number)
            return
        if func not in _VIEWS:
            raise Refused(f"{name} is no metadata, memory or view")
        if result is args[0]:
            return
        number, at = self.place_of(args[0])
        if result.untyped_storage()._cdata != args[0].untyped_storage()._cdata:
            raise Refused(f"{name} copies")
        if not result.numel():
            raise Refused("a part is empty")  # its address says nothing
        self._keep(result, (number, at + result.data_ptr() - args[0].data_ptr()))

    def launched(self, launch: door.Launched | None) -> None:
        """The next launch, as `launch` notes it; None where Triton launched it."""
        if launch is None:
            self.why = self.why or Refused("a launch went Triton's way", passes=True)
            return
        tensors = [x if x is None or isinstance(x, Tensor) else x.base for x in launch.head]
        try:
            places = [None if x is None else self.place_of(x) for x in tensors]
        except Refused as why:
            self.why = self.why or why
            return
        described = [
            None if x is tensor else _without_base(x)
            for x, tensor in zip(launch.head, tensors, strict=True)
        ]
        self.steps.append((replace(launch, head=described), places))


def _without_base(descriptor: Any) -> Any:
    one = copy(descriptor)
    one.base = None
    return one


def layout_of(x: Tensor) -> Layout:
    return tuple(x.shape), x.stride(), x.dtype
