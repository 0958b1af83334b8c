"""A launch that goes straight to a launcher is the one that Triton would have made: the same
compiled variant, given the same arguments.

No GPU is needed: `tests.nsa.absent_gpu`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import triton.language as tl
from triton import __version__ as version
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime.jit import JITFunction, KernelInterface
from triton.tools.tensor_descriptor import TensorDescriptor

import nsa
from nsa.ops.kernels import launch as door
from nsa.ops.kernels.launch import LaunchedKernel, launch, representative
from tests.nsa import absent_gpu
from tests.nsa.absent_gpu import Gpu

NSA = Path(nsa.__file__).parent
SCALE = tl.constexpr(8)


def add(X, Y, OUT, START, n, stride, scale, flag, BLOCK: tl.constexpr, NAME: tl.constexpr):
    tl.store(OUT + tl.arange(0, BLOCK), tl.load(X) + tl.load(Y) + n + stride + scale + SCALE)


def fetch(X, OUT, n, BLOCK: tl.constexpr):
    tl.store(OUT + tl.arange(0, BLOCK), X.load([0, 0]))


def kernel(function: Any = add, **options: Any) -> Any:
    """Never the interpreter's, whatever the session asks for."""
    return JITFunction(function, **options)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return absent_gpu.installed(monkeypatch)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Grids of the launches that went Triton's way."""
    grids: list[Any] = []
    subscript = KernelInterface.__getitem__

    def counted(self: Any, grid: Any) -> Any:
        grids.append(grid)
        return subscript(self, grid)

    monkeypatch.setattr(KernelInterface, "__getitem__", counted)
    return grids


SPACE = torch.zeros(4096)
INTS = (0, 1, 2, 3, 16, 17, 48, -16, -1, 2**31 - 16, 2**31, 2**31 + 1, 2**33, -(2**40) + 3, 2**63)


def arguments(random: Random) -> list[Any]:
    """A list for `add`: values seldom are alike, and classes often."""
    dtype = random.choice((torch.float32, torch.bfloat16))
    tensors = [SPACE.view(dtype)[16 * random.randrange(9) :] for _ in range(4)]
    if random.random() < 0.2:  # a multiple of 16 bytes, or not
        tensors[random.randrange(4)] = SPACE.view(torch.int32)[random.choice((4, 1)) :]
    if random.random() < 0.5:
        tensors[3] = None
    numbers = [random.choice((random.randrange(60), 16 * random.randrange(60))) for _ in range(2)]
    if random.random() < 0.2:
        numbers[random.randrange(2)] = random.choice((*INTS, True, False, None, 1.0, 0.0))
    scale = random.choice((0.5, 0.25, 1.0, 1)) if random.random() < 0.2 else random.random()
    return [
        *tensors,
        *numbers,
        scale,
        random.random() < 0.9,
        random.choice((1, 64, True) if random.random() < 0.1 else (64,)),
        random.choice(("b", None, 1, 1.0, True) if random.random() < 0.1 else ("a",)),
    ]


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "numbers are not specialised": {"do_not_specialize": ["n", "stride"]},
    "nor by 16": {"do_not_specialize_on_alignment": ["X", "n"]},
}


@pytest.mark.parametrize("form", FORMS)
def test_the_variant_is_the_one_that_triton_would_take(
    form: str, gpu: Gpu, slow: list[Any]
) -> None:
    one, random, lists = kernel(**FORMS[form]), Random(form), 1500
    for _ in range(lists):
        given, options = arguments(random), random.choice(({}, {"num_warps": 8}))
        grid = random.choice(((3,), (3, 2), (3, 2, 5)))
        launch(one, grid, *given, **options)
        got = gpu.last()
        one[grid](*given, **options)
        assert got == gpu.last(), given
    by_launch = len(slow) - lists
    variants = len({id(made) for made, _ in gpu.records})
    assert variants > 100 and by_launch < lists - 300, (variants, by_launch)


@pytest.mark.parametrize(
    "alike",
    [
        [(SPACE, None, 1, 64), (SPACE, None, True, 64), (SPACE, None, 1.0, 64)],
        [(SPACE, None, 0, 64), (SPACE, None, False, 64), (SPACE, None, 0.0, 64)],
        [(SPACE, None, None, 64), (SPACE, None, 0, 64)],
        [(SPACE, None, 3, 1), (SPACE, None, 3, True), (SPACE, None, 3, 1.0)],
        [(SPACE, None, 3, 64), (None, SPACE, 3, 64)],
        [(SPACE, None, (16, 3), 64), (SPACE, None, (1, 3), 64), (SPACE, None, (17, 3), 64)],
        [(SPACE, SPACE.int(), 3, 64), (SPACE.int(), SPACE, 3, 64)],
        [(SPACE, SPACE[1:], 3, 64), (SPACE[1:], SPACE, 3, 64), (SPACE[1:], SPACE[1:], 3, 64)],
    ],
)
def test_arguments_that_are_nearly_equal_are_distinguished(alike: list[Any], gpu: Gpu) -> None:
    def two(X, Y, n, BLOCK: tl.constexpr):
        tl.store(X + tl.arange(0, BLOCK), n)

    one = kernel(two)
    for given in [*alike, *alike, *reversed(alike)]:
        launch(one, (1,), *given)
        got = gpu.last()
        one[(1,)](*given)
        assert got == gpu.last(), given


@pytest.mark.parametrize("number", [*INTS, 5, -32, 2**64 - 16, 2**64 - 15, -(2**63), 2**63 + 8])
def test_a_representative_is_specialised_alike(number: int) -> None:
    from triton.backends.compiler import BaseBackend
    from triton.runtime.jit import native_specialize_impl

    found = representative(number)
    want = native_specialize_impl(BaseBackend, number, False, True, True)
    assert native_specialize_impl(BaseBackend, found, False, True, True) == want
    assert representative(found) == found
    assert len({representative(x) for x in (number, *INTS)}) <= 7


def test_values_that_are_new_are_known_by_their_classes(gpu: Gpu, slow: list[Any]) -> None:
    one, x = kernel(), SPACE
    for n in (17, 33, 35, 1023):
        launch(one, (1,), x, x, x, None, n, 16, 0.5, True, 64, "a")
    assert len(slow) == 1
    for n in (32, 1, 2**31):
        launch(one, (1,), x, x, x, None, n, 16, 0.5, True, 64, "a")
    assert len(slow) == 4
    launch(one, (1,), x, x, x, None, 1, 16, -0.25, True, 64, "a")
    assert len(slow) == 4 and -0.25 in (
        gpu.last()[1][-1] if door.CHECKED[version] else gpu.last()[1]
    )


def test_what_is_remembered_is_bounded(gpu: Gpu, slow: list[Any]) -> None:
    one, x = kernel(), SPACE
    for n in range(0, 16 * 3 * door.MOST_VALUES, 16):
        launch(one, (1,), x, x, x, None, n, 16, 0.5, True, 64, "a")
    assert len(slow) == 1
    known: LaunchedKernel = door._KERNELS[id(one)]
    assert len(known.by_values) <= door.MOST_VALUES and len(known.by_classes) == 1


def test_stream_and_grid_are_of_each_call(gpu: Gpu, slow: list[Any]) -> None:
    one, given = kernel(), (SPACE, SPACE, SPACE, None, 3, 16, 0.5, True, 64, "a")
    for stream, grid in ((7, (3,)), (8, (5, 2)), (9, (1, 2, 3))):
        gpu.stream = stream
        launch(one, grid, *given)
        assert gpu.last()[1][:4] == (*(*grid, 1, 1)[:3], stream)
    assert len(slow) == 1


def test_keywords_and_defaults_are_bound(gpu: Gpu, slow: list[Any]) -> None:
    def with_defaults(X, n, BLOCK: tl.constexpr = 32, NAME: tl.constexpr = "a"):
        tl.store(X, n)

    one = kernel(with_defaults)
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {"n": 3, "BLOCK": 64, "num_warps": 2}),
        ((3,), {"NAME": "b"}),
        ((3, 64), {}),
        ((3,), {"num_stages": 2, "BLOCK": 16}),
    ]
    for rest, options in [*calls, *calls]:
        launch(one, (1,), SPACE, *rest, **options)
        got = gpu.last()
        one[(1,)](SPACE, *rest, **options)
        assert got == gpu.last()
    assert len(slow) == 2 * len(calls) + len(calls)
    for rest, options, message in (
        ((3, 64, "a", 5), {}, "positional"),
        ((3,), {"n": 4}, "multiple values"),
        ((), {}, "missing"),
        ((3,), {"num_wraps": 4}, "num_wraps"),
    ):
        with pytest.raises((TypeError, KeyError), match=message):
            launch(one, (1,), SPACE, *rest, **options)


def test_a_dtype_as_a_constexpr_goes_tritons_way(gpu: Gpu, slow: list[Any]) -> None:
    def convert(X, n, KIND: tl.constexpr = tl.float32):
        tl.store(X, n.to(KIND))

    one = kernel(convert)
    for n, kind in enumerate(((), (tl.float16,), (), (tl.float16,)), 1):
        launch(one, (1,), SPACE, 3, *kind)
        assert len(slow) == n
    assert len({id(made) for made, _ in gpu.records}) == 2


def test_descriptors_are_described_to_the_launcher(gpu: Gpu, slow: list[Any]) -> None:
    one, half = kernel(fetch), SPACE.view(torch.float16)
    for rows, block in ((64, 16), (32, 16), (64, 32), (16, 32)):
        for start in (0, 1024):
            x = half[start : start + rows * 32].view(rows, 32)
            described = TensorDescriptor(x, [rows, 32], [32, 1], [block, 16])
            launch(one, (1,), described, half, rows, 16)
            got = gpu.last()
            one[(1,)](described, half, rows, 16)
            assert got == gpu.last() and str(x.data_ptr()) in str(got)
    launch(one, (1,), half, half, 64, 16)  # a kernel may be given either
    assert len(slow) == 8 + 2 + 1


def tensor_maps(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Callable[..., None], Any]:
    """(addresses of the tensor maps that were made, a launcher as Triton wraps it, what each call
    gave the launcher); kernel arguments 0 and 2 are descriptors.
    """
    made: list[Any] = []
    seen: list[Any] = []
    monkeypatch.setattr(
        nvidia,
        "make_tensordesc_arg",
        lambda x, meta: [
            made.append(x.base.data_ptr()) or ("map", x.base.data_ptr(), meta),
            *x.shape,
            *x.strides,
        ],
    )
    signature = {"X": "tensordesc<fp16[16,16]>", "n": "i32", "Y": "tensordesc<fp16[16,16]>"}
    wrapped = nvidia.wrap_handle_tensordesc(lambda *x: seen.append(x), signature, ["a", "b"])
    return made, wrapped, seen


def given(*arguments: Any) -> tuple[Any, ...]:
    """A launcher's arguments: the kernel's own are the last one, or the last ones."""
    if door.CHECKED[version]:
        return (1, 1, 1, "stream", arguments)
    return (*range(nvidia._BASE_ARGS_FORMAT_LEN), *arguments)


def test_tensor_maps_are_kept_and_are_those_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    made, theirs, seen = tensor_maps(monkeypatch)
    ours = door.with_kept_maps(theirs)
    assert ours is not theirs
    half = SPACE.view(torch.float16)
    y = TensorDescriptor(half[2048:], [64, 32], [32, 1], [16, 16])
    for start, rows, stride, wanted in (
        (0, 64, 32, 2),
        (1024, 64, 32, 1),  # another address
        (0, 64, 32, 0),
        (0, 32, 32, 1),  # other sizes
        (0, 64, 64, 1),  # other strides
        (1024, 64, 32, 0),
    ):
        x = TensorDescriptor(half[start:], [rows, 32], [stride, 1], [16, 16])
        before = len(made)
        ours(*given(x, 7, y, 8))
        assert len(made) - before == wanted, (start, rows, stride)
        theirs(*given(x, 7, y, 8))
        assert str(seen[-1]) == str(seen[-2]) and f"('map', {x.base.data_ptr()}" in str(seen[-1])


def test_kept_maps_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MOST_VALUES", 3)
    made, theirs, _ = tensor_maps(monkeypatch)
    ours = door.with_kept_maps(theirs)
    half = SPACE.view(torch.float16)
    for start in (0, 8, 16, 0):
        x = TensorDescriptor(half[start:], [4, 32], [32, 1], [4, 16])
        ours(*given(x, 7, x, 8))
    assert len(made) == 8  # two of each, of which the fourth call finds none


def test_a_kernel_that_takes_descriptors_apart_keeps_no_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    signature = {"X": "tensordesc<fp16[16,16]>"}
    theirs = nvidia.wrap_handle_tensordesc(print, signature, None)
    assert door.with_kept_maps(theirs) is theirs
    assert door.with_kept_maps(given) is given  # type: ignore[arg-type,comparison-overlap]


def hooked(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, one: Any) -> None:
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [lambda _: None])


def hooked_after(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, one: Any) -> None:
    monkeypatch.setattr(knobs.runtime.launch_exit_hook, "calls", [lambda _: None])


def hooked_by_function(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, one: Any) -> None:
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda _: None)


def hooked_before_run(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, one: Any) -> None:
    one.add_pre_run_hook(lambda *_, **__: None)


def stages_inspected(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, one: Any) -> None:
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", lambda *_: ("key", "hash"))


def run_replaced(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, one: Any) -> None:
    run = JITFunction.run
    monkeypatch.setattr(JITFunction, "run", lambda self, *x, **o: run(self, *x, **o))


def turned_off(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, one: Any) -> None:
    monkeypatch.setattr(door, "enabled", False)


def another_device(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, one: Any) -> None:
    gpu.device = 0  # and the tensors are the CPU's


def one_tensor_elsewhere(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, one: Any) -> None:
    devices = cycle((-1, 1, -1))  # of the three
    monkeypatch.setattr(door, "_get_device", lambda _: next(devices))


@pytest.mark.parametrize(
    "why",
    [
        hooked,
        hooked_after,
        hooked_by_function,
        hooked_before_run,
        stages_inspected,
        run_replaced,
        turned_off,
        another_device,
        one_tensor_elsewhere,
    ],
)
def test_what_is_not_known_to_be_right_goes_tritons_way(
    why: Callable[..., None], gpu: Gpu, slow: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, given = kernel(), (SPACE, SPACE, SPACE, None, 3, 16, 0.5, True, 64, "a")
    launch(one, (1,), *given)
    launch(one, (1,), *given)
    assert len(slow) == 1
    why(monkeypatch, gpu, one)
    for n in range(2, 5):
        launch(one, (1,), *given)
        assert len(slow) == n
    assert len(gpu.records) == 5


def test_a_setting_of_the_compiler_is_another_variant(
    gpu: Gpu, slow: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, given = kernel(), (SPACE, SPACE, SPACE, None, 3, 16, 0.5, True, 64, "a")
    found = []
    for debug in (False, True, False, True):
        monkeypatch.setattr(knobs.runtime, "debug", debug)
        launch(one, (1,), *given)
        found.append(gpu.last()[0])
    assert found[0] is found[2] is not found[1] is found[3] and len(slow) == 2


def test_a_global_that_has_changed_is_refused(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    one, given = kernel(), (SPACE, SPACE, SPACE, None, 3, 16, 0.5, True, 64, "a")
    assert one.cache_key  # as compiling asks for it
    launch(one, (1,), *given)
    launch(one, (1,), *given)
    monkeypatch.setitem(one.fn.__globals__, "SCALE", tl.constexpr(16))
    with pytest.raises(RuntimeError, match="SCALE has changed"):
        launch(one, (1,), *given)


def test_threads_launch_what_they_ask_for(gpu: Gpu) -> None:
    one = kernel()
    lists = [arguments(Random(seed)) for seed in range(40)]
    for given in lists:
        one[(1,)](*given)
    want = {i: made for i, (made, _) in enumerate(gpu.records)}
    gpu.records.clear()

    def ask(worker: int) -> None:
        order = list(range(40))
        Random(worker).shuffle(order)
        for i in order:
            launch(one, (i + 1,), *lists[i])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, range(8)))
    assert len(gpu.records) == 320
    assert all(made is want[given[0] - 1] for made, given in gpu.records)


def jitted(tree: ast.Module) -> set[str]:
    """Names of a file's kernels and of their parts."""
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def direct_launches(tree: ast.Module, kernels: set[str]) -> list[int]:
    """Lines that launch one of ``kernels`` without `launch`, by `kernel[grid](` or `.run(`."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript | ast.Attribute):
            name = ast.unparse(node.value).rpartition(".")[2]
            run = isinstance(node, ast.Subscript) or node.attr in ("run", "warmup", "__getitem__")
            if name in kernels and run:
                found.append(node.lineno)
    return found


TREES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(NSA.glob("**/*.py"))
    if path.name != "launch.py" or path.parent.name != "kernels"
}
# as a profiler shows them; others are parts of these
JITTED = {name for tree in TREES.values() for name in jitted(tree) if name.startswith("nsa_")}


def test_every_launch_goes_through_the_one_door() -> None:
    assert len(JITTED) > 20
    found = {path.name: direct_launches(tree, JITTED) for path, tree in TREES.items()}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "launched",
    ["nsa_x[(1,)](a)", "one = kernels.nsa_x[grid]", "nsa_x.run(a, grid=grid, warmup=False)"],
)
def test_a_direct_launch_is_seen(launched: str) -> None:
    assert direct_launches(ast.parse(launched), {"nsa_x"}) == [1]


def test_an_autotuned_or_unusual_kernel_is_launched_as_it_wants() -> None:
    grids: list[Any] = []

    class Unusual:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *given, **options: grids.append((grid, given, options))

    launch(Unusual(), (3,), 1, 2, num_warps=4)
    assert grids == [((3,), (1, 2), {"num_warps": 4})]
