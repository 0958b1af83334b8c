"""A machine on which the Gluon kernels run on a CPU: `nsa.ops.selected.triton.warp_roles`,
`nsa.ops.scores.passing_keys` and those of `nsa.ops.interval`.

Triton interprets no Gluon. Here each role is a Python thread, a tensor is PyTorch's, a barrier
counts arrivals, and shared memory is NaN until it is written. Layouts, registers and the order of
memory accesses of real warps are not modelled: only the GPU shows those.
"""

from __future__ import annotations

import builtins
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import nsa.ops.selected.triton

SOURCE = Path(nsa.ops.selected.triton.__file__).with_name("warp_roles.py")
FETCHING_THREADS = 128
PATIENCE_S = 60.0  # for a barrier: longer is a deadlock
GLUON = "triton.experimental.gluon"


class Pointer:
    def __init__(self, memory: Tensor, at: Any = 0) -> None:
        self.memory, self.at = memory, at
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.memory, self.at + offset)

    def whole(self) -> Tensor:
        """The storage that ``at`` counts in, from the tensor's first element on."""
        x = self.memory
        size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
        return x.as_strided((size,), (1,))


class Shared:
    def __init__(self, data: Tensor) -> None:
        self.data, self.dtype = data, data.dtype
        self.type = SimpleNamespace(shape=list(data.shape))

    def index(self, i: Any) -> Shared:
        return Shared(self.data[int(i)])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def reshape(self, shape: Sequence[int]) -> Shared:
        return Shared(self.data.view(*shape))

    def store(self, value: Tensor) -> None:
        self.data.copy_(value)

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()


class Barrier:
    """As mbarrier: a wait for a phase ends once the phase that runs has the other parity."""

    def __init__(self) -> None:
        self.due = self.left = self.done = self.bytes = 0
        self.changed = threading.Condition()

    def arrive(self, count: int, expected: int = 0) -> None:
        """``expected`` bytes are still to be copied; less than 0 are those that were."""
        with self.changed:
            self.left -= count
            self.bytes += expected
            assert self.left >= 0, "more arrivals than the phase has"
            if self.left == 0 and self.bytes == 0:
                self.left, self.done = self.due, self.done + 1
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.done % 2 != parity, PATIENCE_S), "a deadlock"


class Descriptor:
    """Of a tensor in tiles, for the copy engine."""

    def __init__(self, described: Any) -> None:
        self.memory, self.dtype, self.layout = described.base, described.base.dtype, None
        shape = list(described.block_shape)
        size = self.dtype.itemsize
        self.block_type = SimpleNamespace(shape=shape, nbytes=size * math.prod(shape))

    def copy(self, first: Sequence[Any], barrier: Barrier, to: Shared) -> None:
        """0 beyond the tensor."""
        tile = torch.zeros_like(to.data)
        bounds = zip(first, self.block_type.shape, self.memory.shape, strict=True)
        begins = [(int(a), min(int(a) + n, size)) for a, n, size in bounds]
        found = self.memory[tuple(slice(a, b) for a, b in begins)]
        tile[tuple(slice(0, n) for n in found.shape)] = found
        to.data.copy_(tile)
        barrier.arrive(0, -self.block_type.nbytes)


class Barriers:
    def __init__(self, count: int) -> None:
        self.each = [Barrier() for _ in range(count)]
        self.type = SimpleNamespace(shape=[count, 1])

    def index(self, i: Any) -> Barrier:
        return self.each[int(i)]


def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Tensor:
    at = torch.as_tensor(pointer.at)
    there = torch.as_tensor(True if mask is None else mask)
    at, there = torch.broadcast_tensors(at, there)
    memory = pointer.whole()
    assert not there.any() or (at[there].min() >= 0 and at[there].max() < memory.numel())
    found = memory[torch.where(there, at, 0).long()]
    return found if mask is None else torch.where(there, found, 0 if other is None else other)


def store(
    pointer: Pointer, value: Tensor, mask: Any = None, eviction_policy: str | None = None
) -> None:
    there = torch.as_tensor(True if mask is None else mask)
    at, there, value = torch.broadcast_tensors(torch.as_tensor(pointer.at), there, value)
    pointer.whole()[at[there].long()] = value[there]


def copy(shared: Shared, pointer: Pointer, mask: Any = None) -> None:
    """What the mask leaves out is 0, as cp.async with a source of 0 bytes has it."""
    shared.data.copy_(load(pointer, True if mask is None else mask))


def multiply(
    a: Any, b: Any, acc: Tensor, *, use_acc: bool = True, is_async: bool = False
) -> Tensor:
    a, b = (x.data if isinstance(x, Shared) else x for x in (a, b))
    return a.float() @ b.float() + (acc if use_acc else 0)


def allocate(dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared | Barriers:
    if dtype == torch.int64:
        return Barriers(shape[0])
    return Shared(torch.full([int(n) for n in shape], torch.nan, dtype=dtype))


def init(barrier: Barrier, count: int) -> None:
    barrier.due = barrier.left = count


def specialize(roles: Sequence[tuple[Callable[..., None], tuple[Any, ...]]], *_: Any) -> None:
    failed: list[BaseException] = []

    def run(role: Callable[..., None], given: tuple[Any, ...]) -> None:
        try:
            role(*given)
        except (AssertionError, RuntimeError, TypeError, AttributeError, IndexError) as error:
            failed.append(error)

    threads = [threading.Thread(target=run, args=one) for one in roles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _check(true: bool, message: str = "") -> None:
    assert true, message


class Kernel:
    """``kernel[grid](arguments)``, one program after the other."""

    def __init__(self, function: Callable[..., None], language: Any) -> None:
        self.function, self.language = function, language

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        def launch(*args: Any, **_: Any) -> None:
            given = [_given(x) for x in args]
            self.language.grid = grid
            for program in itertools.product(*map(range, grid)):
                self.language.program = program
                self.function(*given)

        return launch


def _given(x: Any) -> Any:
    if isinstance(x, Tensor):
        return Pointer(x)
    return Descriptor(x) if hasattr(x, "block_shape") else x


def language() -> Any:
    """What stands for `triton.experimental.gluon.language`."""
    gl: Any = SimpleNamespace(program=(0,), grid=(1,))

    def nothing(*_: Any, **__: Any) -> None:
        """A layout."""

    for name in ("Blocked", "Slice", "DotOperand", "NVMMADistributed", "DistributedLinear"):
        setattr(gl, f"{name}Layout", nothing)
    gl.SwizzledSharedLayout = nothing
    gl.NVMMASharedLayout = SimpleNamespace(get_default_for=nothing)
    for name in ("int32", "int64", "float32"):
        setattr(gl, name, getattr(torch, name))
    gl.constexpr = None
    gl.static_range, gl.static_assert = range, _check
    gl.arange = lambda begin, end, layout=None: torch.arange(begin, end, dtype=torch.int32)
    gl.zeros = lambda shape, dtype, layout=None: torch.zeros(shape, dtype=dtype)
    gl.full = lambda shape, value, dtype, layout=None: torch.full(shape, value, dtype=dtype)
    gl.convert_layout = lambda x, layout: x
    gl.load, gl.store, gl.allocate_shared_memory = load, store, allocate
    gl.where, gl.exp2, gl.log2 = torch.where, torch.exp2, torch.log2
    gl.max = torch.amax
    gl.maximum = lambda x, y: torch.fmax(torch.as_tensor(x), torch.as_tensor(y))  # NaN loses
    gl.split, gl.join = lambda x: x.unbind(-1), lambda a, b: torch.stack((a, b), -1)
    gl.gather = lambda x, index, axis: x.gather(axis, index.long())
    gl.sum = lambda x, axis: x.sum(axis, dtype=x.dtype)
    gl.minimum = lambda a, b: torch.minimum(torch.as_tensor(a), torch.as_tensor(b))
    gl.program_id = lambda axis: torch.tensor(gl.program[axis])
    gl.num_programs = lambda axis: gl.grid[axis]
    gl.warp_specialize = specialize
    return gl


def kernels(
    needed: Sequence[str], source: Path = SOURCE, fetching_threads: int = FETCHING_THREADS
) -> Mapping[str, Kernel]:
    """The kernels of the source file, by name, for this machine."""
    gl = language()
    hopper: Any = SimpleNamespace()
    hopper.async_copy = SimpleNamespace(
        async_copy_global_to_shared=copy,
        mbarrier_arrive=lambda barrier, increment_count: barrier.arrive(fetching_threads),
        commit_group=lambda: None,
        wait_group=lambda outstanding: None,
    )
    hopper.mbarrier = SimpleNamespace(
        MBarrierLayout=lambda: None,
        init=init,
        wait=lambda barrier, parity: barrier.wait(int(parity)),
        arrive=lambda barrier, count: barrier.arrive(count),
        expect=lambda barrier, size: barrier.arrive(1, size),
    )
    hopper.tma = SimpleNamespace(
        async_copy_global_to_shared=lambda of, first, barrier, to: of.copy(first, barrier, to)
    )
    hopper.fence_async_shared = lambda: None
    hopper.warpgroup_mma = multiply
    hopper.warpgroup_mma_wait = lambda outstanding, deps: deps[0] if len(deps) == 1 else deps
    stand_ins: dict[str, Any] = {
        "triton.experimental": SimpleNamespace(
            gluon=SimpleNamespace(
                jit=lambda function=None, **_: function or (lambda named: named),
                constexpr_function=lambda function: function,
            )
        ),
        GLUON: SimpleNamespace(language=gl),
        f"{GLUON}.language.nvidia.hopper": hopper,
    }

    def imported(name: str, *where: Any) -> Any:
        return stand_ins[name] if name in stand_ins else builtins.__import__(name, *where)

    found: dict[str, Any] = {
        "__name__": "warp_roles_on_a_cpu",
        "__builtins__": {**vars(builtins), "__import__": imported},
    }
    exec(compile(source.read_text(encoding="utf-8"), str(source), "exec"), found)
    return {name: Kernel(found[name], gl) for name in needed}
