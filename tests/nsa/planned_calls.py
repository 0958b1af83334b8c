"""Calls of an operator by its body and by a plan, and what they leave.

No GPU is needed: `tests.nsa.absent_gpu`. There a launch computes something that depends on all of
it (`Computing`), so that a wrong address, number or order shows in the outputs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from zlib import crc32

import pytest
import torch
import triton.language as tl
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.backends.nvidia import driver as nvidia
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from nsa.ops.kernels import call_recorder, launch_plan, plans, shares
from nsa.ops.kernels import launch as door
from nsa.ops.kernels.launch import launch
from nsa.ops.kernels.plans import Plans
from tests.cases import randn
from tests.nsa import absent_gpu
from tests.nsa.absent_gpu import Gpu

SCALE = tl.constexpr(8)


class Computing(Gpu):
    """A launch mixes what it is given, and the first 8 bytes at each address, and stores there what
    that gives.
    """

    def compiled(self, function: Any, signature: dict[str, str]) -> Any:
        made = super().compiled(function, signature)
        launcher, kinds = made._run, [str(kind) for kind in signature.values()]

        def compute(*given: Any) -> None:
            before, values = given[:-1], given[-1]
            if not door.AS_ONE:
                first = nvidia._BASE_ARGS_FORMAT_LEN
                before, values = given[:first], given[first:]
            self.records.append((made, given))
            mix(function.__name__, before[:3], kinds, list(values))

        meta = [{**absent_gpu.MAPS} for kind in kinds if kind.startswith("tensordesc")]
        launcher.launch = nvidia.wrap_handle_tensordesc(compute, signature, meta)
        return made


def mix(name: str, grid: tuple[int, ...], kinds: list[str], values: list[Any]) -> None:
    addresses: list[int] = []
    numbers: list[Any] = [name, grid]
    for kind in kinds:
        value = values.pop(0)
        if kind.startswith("tensordesc"):  # a map, then sizes and strides
            sizes = 2 * (kind[kind.index("[") : kind.index("]")].count(",") + 1)
            numbers += [value[2:], [values.pop(0) for _ in range(sizes)]]
            addresses.append(value[1])
        elif kind.startswith("*"):
            addresses.append(value.data_ptr() if isinstance(value, Tensor) else value)
        else:
            numbers.append(value)
    assert not values
    held = [ctypes.c_int64.from_address(address) for address in addresses if address]
    result = crc32(repr((numbers, [x.value for x in held])).encode())
    for i, x in enumerate(held):
        x.value = crc32(b"%d" % i, result)


class Zeroed(TorchFunctionMode):
    """Memory is zero when it is made."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in call_recorder.MAKES else made


def computing_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Computing]:
    """For a fixture: it is there until the test ends."""
    made = Computing()
    absent_gpu.installed(monkeypatch, made)
    monkeypatch.setattr(
        launch_plan,
        "_empty_on",
        lambda device: (
            lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype).zero_()
        ),
    )
    yield made
    plans.forget()


def add(X, Y, OUT, START, n, scale, BLOCK: tl.constexpr):
    tl.store(OUT + tl.arange(0, BLOCK), tl.load(X) + tl.load(Y) + n + scale + SCALE)


def fetch(X, OUT, n, BLOCK: tl.constexpr):
    tl.store(OUT + tl.arange(0, BLOCK), X.load([0, 0]))


class Body:
    """An operator: x and others [N, 16] -> (two of its size, one of half of it); ``calls`` counts
    how often it ran.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.add, self.fetch = JITFunction(add), JITFunction(fetch)

    def __call__(
        self, x: Tensor, others: list[Tensor], start: Tensor | None, n: int, scale: float
    ) -> tuple[Tensor, ...]:
        self.calls += 1
        y, z = torch.empty_like(x), x.new_empty(x.shape, dtype=torch.float32)
        room = x.new_empty(2 * x.numel(), dtype=torch.int32)
        part = room[x.numel() :]
        launch(self.add, (x.shape[0],), x, others[0], room, start, n, scale, 64)
        launch(self.add, (1, 2), part, x[1:], y, None, shares.of_all(n), scale, 64, num_warps=2)
        last = others[-1]
        if last.data_ptr() % 16 == 0 and last.stride(-1) == 1:
            described = TensorDescriptor(last, list(last.shape), list(last.stride()), [16, 16])
            launch(self.fetch, (3,), described, part, n, 16)
        half = x.new_empty(x.shape[0] // 2, 16)
        launch(self.add, (1,), room, y, z, half, n, scale, 64)
        return y, z, half


def inputs(seed: int = 0, rows: int = 64) -> list[Any]:
    """The other tensors are parts of one."""
    x, wide = randn(rows, 16, seed=seed), randn(rows, 48, seed=seed + 1)
    return [x, [wide[:, :16], wide[:, 16:32], wide[:, 32:]], None, 5, 0.5]


def flat(given: Sequence[Any]) -> list[Tensor]:
    parts = [x if isinstance(x, list | tuple) else [x] for x in given]
    return [x for part in parts for x in part if isinstance(x, Tensor)]


def copied(x: Any) -> Any:
    """``x`` in other memory; tensors of one memory have one again."""
    kept: dict[int, Tensor] = {}

    def one(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return type(x)([one(y) for y in x])
        if not isinstance(x, Tensor):
            return x
        storage = x.untyped_storage()
        base = kept.setdefault(storage._cdata, torch.empty(0, dtype=torch.uint8))
        if not base.numel():
            base.set_(storage.clone())
        made = torch.empty(0, dtype=x.dtype)
        return made.set_(base.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    return one(x)


def by_body(run: Callable[..., Any], given: Sequence[Any]) -> list[Tensor]:
    """What ``run`` returns and leaves in ``given``, of a copy of it."""
    own = copied([*given])
    with Zeroed():
        result = run(*own)
    return [*flat([result] if isinstance(result, Tensor) else result), *flat(own)]


def by_plan(operator: Plans, given: Sequence[Any]) -> list[Tensor]:
    own = copied([*given])
    result = operator.call(own)
    return [*flat([result] if isinstance(result, Tensor) else result), *flat(own)]


def bits(x: Tensor) -> Tensor:
    return x.contiguous().flatten().view(torch.uint8) if x.numel() else x.to(torch.uint8)


def same(got: Sequence[Tensor], want: Sequence[Tensor]) -> bool:
    return len(got) == len(want) and all(
        (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        and torch.equal(bits(a), bits(b))
        for a, b in zip(got, want, strict=True)
    )


def planned(given: Sequence[Any] | None = None) -> tuple[Plans, Body]:
    """An operator with a plan for calls like ``given``."""
    body = Body()
    made = Plans(body)
    for _ in range(3 if not made.plans else 1):
        made.call(copied(inputs() if given is None else [*given]))
    return made, body
