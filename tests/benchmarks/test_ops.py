"""How long every operation takes, forward and with its backward; and that each timed function is
the right one.

    python -m pytest tests/benchmarks --benchmark-only                  # CPU, fp32, blocks that
    compete at 512 tokens python -m pytest tests/benchmarks --benchmark-only --require gpu    # a
    GPU, bf16, the first implementation's heads at 8,192 tokens

The clock waits for the device before it is read, and a round is many calls, so a round's time is
the device's wherever a call takes it longer than the host takes to launch it; else it is the
host's, which is what a caller waits for. These numbers guide work on one operation. They are no
results: those come with their proof, from perfbench.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from nsa.config import preset
from tests.benchmarks.operations import Call, Shape, blocks_of_oracle, operations
from tests.cases import SMALL, assert_blocks, assert_same_function, leaves, randn

ROUND_S = 0.02  # a round lasts about this long
ROUNDS = 7
WARM_UPS = 3
_FOUNDING = preset("m7c_125m")
ON_CPU = Shape(SMALL, 1, 512, 128, 6, 2, 64, torch.float32, "cpu")
ON_GPU = Shape(
    _FOUNDING.nsa,
    1,
    8192,
    1281,
    _FOUNDING.num_heads,
    _FOUNDING.num_kv_heads,
    _FOUNDING.head_dim,
    torch.bfloat16,
    "cuda",
)
WHAT = ("forward", "both")  # both: the backward, too
TINY = Shape(SMALL, 1, 97, 97, 4, 2, 16, torch.float32, "cpu")


def synchronised() -> float:
    """Seconds, once everything that was launched has ended."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Path triton is no case without a GPU: in its interpreter a time means nothing."""
    known = list(operations(triton=metafunc.config.getoption("--require") == "gpu"))
    if "what" in metafunc.fixturenames:
        metafunc.parametrize(
            "operation, what",
            [
                (one, what)
                for one in known
                for what in WHAT
                if what == "forward" or has_gradient(one)
            ],
        )
    elif "operation" in metafunc.fixturenames:
        metafunc.parametrize("operation", known)


def has_gradient(operation: str) -> bool:
    return not operation.startswith("choose")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> str:
    if request.config.getoption("--require") != "gpu":
        return "cpu"
    if not torch.cuda.is_available():
        pytest.fail(
            "--require gpu was given, and torch sees no CUDA device; run without --require, or on a"
            " machine with a GPU"
        )
    return "cuda"


def call_of(operation: str, shape: Shape) -> Call:
    return operations(triton=shape.device == "cuda")[operation](shape)


def step_of(call: Call, *, backward: bool) -> Callable[[], object]:
    """One call, without a graph; or with the gradient of every input for a fixed dO."""
    if not backward:

        def forward() -> Tensor:
            with torch.no_grad():
                return call.function(*call.tensors)

        return forward
    inputs = leaves(call.tensors)
    o = call.function(*inputs)
    upstream = randn(*o.shape, seed=99, dtype=o.dtype, device=str(o.device))
    return lambda: torch.autograd.grad(call.function(*inputs), inputs, upstream)


@pytest.mark.benchmark(timer=synchronised)
@pytest.mark.usefixtures("one_thread")
def test_time(benchmark: BenchmarkFixture, operation: str, what: str, device: str) -> None:
    shape = ON_GPU if device == "cuda" else ON_CPU
    call = call_of(operation, shape)
    step = step_of(call, backward=what == "both")
    tokens = call.tensors[0].shape[1]
    benchmark.group = f"{operation.split()[0]}, {what}, {tokens:,} tokens"
    benchmark.extra_info |= {
        "tokens": tokens,
        "dtype": str(shape.dtype),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
    }
    for _ in range(WARM_UPS):  # compilation, and the allocator's first blocks
        step()
    begin = synchronised()
    step()
    once_s = synchronised() - begin
    benchmark.pedantic(
        step, rounds=ROUNDS, iterations=max(1, round(ROUND_S / once_s)), warmup_rounds=1
    )


def test_the_timed_function_is_the_right_one(operation: str, device: str, one_thread: None) -> None:
    """Values and every gradient against the oracle on a tiny shape, by the same functions as are
    timed.
    """
    shape = replace(TINY, device=device)
    call = call_of(operation, shape)
    assert (call.reference is not None) == has_gradient(operation)
    if call.reference is not None:
        assert_same_function(call.function, call.reference, call.tensors, call.names)
        given = step_of(call, backward=True)()
        assert (
            isinstance(given, tuple)
            and len(given) == len(call.tensors)
            and all(torch.isfinite(x).all() for x in given)
        )
    else:
        assert_blocks(call.function(*call.tensors), *blocks_of_oracle(call, shape))


def test_every_implementation_is_timed() -> None:
    """A path or a phi that comes later is timed without being named here, and Triton's only on a
    GPU.
    """
    from nsa.config import PHI_KINDS
    from nsa.routing import Path

    everywhere, on_gpu = operations(triton=False), operations(triton=True)
    assert {f"sel {path}" for path in Path} <= on_gpu.keys() and {
        f"compress {phi}" for phi in PHI_KINDS
    } <= everywhere.keys()
    of_triton = ("compress", "cmp", "choose", "sel", "win", "gated-sum", "nsa")
    assert on_gpu.keys() - everywhere.keys() == {f"{one} triton" for one in of_triton}
