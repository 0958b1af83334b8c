"""On CUDA: calls that a launch plan repeats leave the bits that the operators' bodies leave, eager,
compiled and captured, on every stream and of other tensors; what they hold at once is no more.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from nsa import NSAConfig, engagement, nsa_attention
from nsa.ops.kernels import plans
from nsa.ops.kernels.launch_plan import LaunchPlan
from tests.cases import randn

PAPER = NSAConfig()
Step = Callable[..., tuple[Tensor, ...]]
CASES = {
    "short": (1, 700, None),
    "2,048": (1, 2048, None),
    "batch": (3, 2048, None),
    "documents": (1, 4096, [0, 700, 700, 2500, 4096]),
    "long": (1, 16384, None),
}


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    plans.forget()
    yield
    plans.enabled = True
    plans.forget()


def inputs(batch: int, tokens: int, seed: int) -> list[Tensor]:
    made = [
        randn(batch, tokens, h, 64, seed=10 * seed + i, dtype=torch.bfloat16, device="cuda")
        for i, h in enumerate((12, 2, 2, 2, 2, 2, 2))
    ]
    gates = randn(batch, tokens, 12, 3, seed=seed, dtype=torch.bfloat16, device="cuda").sigmoid()
    return [x.requires_grad_() for x in (*made, gates)]


def step_of(bounds: list[int] | None) -> Step:
    cu_seqlens = None if bounds is None else torch.tensor(bounds, device="cuda")

    def attend(q: Tensor, *rest: Tensor) -> Tensor:
        k_cmp, v_cmp, k_sel, v_sel, k_win, v_win, gates = rest
        return nsa_attention(
            q,
            (k_cmp, v_cmp),
            (k_sel, v_sel),
            (k_win, v_win),
            gates,
            config=PAPER,
            path="triton",
            nonnegative_gates=True,
            cu_seqlens=cu_seqlens,
        )

    return attend  # type: ignore[return-value]


def both(attend: Any, x: list[Tensor]) -> tuple[Tensor, ...]:
    """The output and every gradient."""
    o = attend(*x)
    return o.detach(), *torch.autograd.grad(o.float().square().sum(), x)


def by_bodies(attend: Any, x: list[Tensor]) -> tuple[Tensor, ...]:
    plans.enabled = False
    try:
        return both(attend, x)
    finally:
        plans.enabled = True


def equal(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def made() -> list[object]:
    return [plan for one in plans._ALL for plan in one.plans.values()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_bits_are_those_of_the_bodies(case: str, compiled: bool) -> None:
    batch, tokens, bounds = CASES[case]
    attend: Any = step_of(bounds)
    if compiled:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend="aot_eager", dynamic=False)
    sets = [inputs(batch, tokens, seed) for seed in range(3)]
    wanted = [by_bodies(attend, x) for x in sets]
    for _ in range(2 * plans.MOST_TRIES):
        both(attend, sets[0])
    # packed documents meet operators of PyTorch between launches, which refuse a plan
    assert len(made()) > 6 and sum(type(plan) is LaunchPlan for plan in made()) > 6, made()
    for _ in range(2):
        got = [both(attend, x) for x in sets]
        assert all(map(equal, got, wanted))


def test_every_operator_of_a_step_has_a_plan() -> None:
    attend, x = step_of(None), inputs(1, 2048, 0)
    for _ in range(2 * plans.MOST_TRIES):
        both(attend, x)
    assert len(made()) == 9 and all(type(plan) is LaunchPlan for plan in made()), made()


def test_streams_are_those_of_each_call() -> None:
    attend, sets = step_of(None), [inputs(1, 2048, seed) for seed in range(2)]
    wanted = [by_bodies(attend, x) for x in sets]
    for _ in range(2 * plans.MOST_TRIES):
        both(attend, sets[0])
    streams, got = [torch.cuda.Stream() for _ in sets], []
    torch.cuda.synchronize()
    for _ in range(5):
        for stream, x in zip(streams, sets, strict=True):
            with torch.cuda.stream(stream):
                got.append(both(attend, x))
    torch.cuda.synchronize()
    assert all(equal(found, wanted[i % 2]) for i, found in enumerate(got))


@pytest.mark.parametrize("known", [False, True], ids=["recorded while captured", "planned"])
def test_a_call_is_captured(known: bool) -> None:
    attend, x, other = step_of(None), inputs(1, 2048, 0), inputs(1, 2048, 1)
    wanted = [by_bodies(attend, one) for one in (x, other)]
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2 * plans.MOST_TRIES if known else 1):
            both(attend, x)
    torch.cuda.synchronize()
    graphs, outputs = [torch.cuda.CUDAGraph() for _ in range(2)], []
    for graph in graphs:
        with torch.cuda.graph(graph):
            outputs.append(both(attend, x))
    both(attend, other)  # after the capture, outside of its pool
    for values, want in ((other, wanted[1]), (x, wanted[0])):
        kept = [one.detach().clone() for one in x]
        with torch.no_grad():
            for one, value in zip(x, values, strict=True):
                one.copy_(value)
        for graph, found in zip(graphs, outputs, strict=True):
            graph.replay()
            torch.cuda.synchronize()
            assert equal(found, want)
        with torch.no_grad():
            for one, value in zip(x, kept, strict=True):
                one.copy_(value)


@pytest.mark.parametrize("tokens", [2048, 16384])
def test_the_peak_is_no_higher(tokens: int) -> None:
    attend, x = step_of(None), inputs(1, tokens, 0)
    peaks = {False: 0, True: 0}  # the recorded call's, too
    for enabled in (False, True):
        plans.enabled = enabled
        for _ in range(2 * plans.MOST_TRIES + 1):
            gc.collect()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            both(attend, x)
            torch.cuda.synchronize()
            peaks[enabled] = max(peaks[enabled], torch.cuda.max_memory_allocated() - before)
    assert peaks[True] <= peaks[False], peaks


def test_a_step_is_counted_and_named_as_before() -> None:
    attend, x = step_of(None), inputs(1, 2048, 0)
    for _ in range(2 * plans.MOST_TRIES):
        both(attend, x)
    found = []
    for enabled in (False, True):
        plans.enabled = enabled
        with engagement.collect() as ran, torch.profiler.profile() as profile:
            both(attend, x)
        torch.cuda.synchronize()
        names = {e.key: e.count for e in profile.key_averages() if "nsa" in e.key}
        found.append((ran.counts, names))
    assert found[0] == found[1] and any(name.startswith("nsa::") for name in found[0][1])


def test_a_hook_sees_every_launch() -> None:
    attend, x = step_of(None), inputs(1, 2048, 0)
    for _ in range(2 * plans.MOST_TRIES):
        both(attend, x)
    seen: list[object] = []
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        both(attend, x)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) > 10
