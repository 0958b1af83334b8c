"""On CUDA: launches that go straight to a launcher leave the bits that Triton's own leave, on every
stream, captured, and with a profiler's hook.
"""

from __future__ import annotations

import pytest
import torch
import triton
from torch import Tensor

from nsa import NSAConfig, nsa_attention
from nsa.ops.gated_sum import kernels as gated_sum
from nsa.ops.kernels import launch as door
from tests.cases import randn

PAPER = NSAConfig()


def inputs(tokens: int) -> list[Tensor]:
    heads = (12, 2, 2)
    made = [
        randn(1, tokens, h, 64, seed=i, dtype=torch.bfloat16, device="cuda")
        for i, h in enumerate(heads)
    ]
    gates = randn(1, tokens, 12, 3, seed=3, dtype=torch.bfloat16, device="cuda").sigmoid()
    return [x.requires_grad_() for x in (*made, gates)]


def step(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> tuple[Tensor, ...]:
    """The output and every gradient."""
    o = nsa_attention(
        q, (k, v), (k, v), (k, v), gates, config=PAPER, path="triton", nonnegative_gates=True
    )
    return o.detach(), *torch.autograd.grad(o.float().square().sum(), (q, k, v, gates))


def test_this_version_of_triton_is_known() -> None:
    """Where it is not, launches are slow and this file tests nothing."""
    assert triton.__version__ in door.CHECKED


@pytest.mark.parametrize("tokens", [700, 2048, 2049])
def test_bits_are_those_of_tritons_own_launches(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = inputs(tokens)
    monkeypatch.setattr(door, "enabled", False)
    want = step(*x)
    monkeypatch.setattr(door, "enabled", True)
    side = torch.cuda.Stream()
    for stream in (torch.cuda.current_stream(), side, side, torch.cuda.current_stream()):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            got = step(*x)
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    seen: list[object] = []
    triton.knobs.runtime.launch_enter_hook.add(seen.append)
    try:
        got = step(*x)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(seen.append)
    assert len(seen) > 10 and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_launch_is_captured() -> None:
    gates, o = inputs(64)[3].detach(), randn(1, 64, 12, 64, seed=1, device="cuda")
    want = gated_sum.forward(gates, (o, o, o))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = gated_sum.forward(gates, (o, o, o))
    got.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(got, want)


def test_a_tensor_of_the_cpu_is_refused() -> None:
    gates, o = inputs(64)[3].detach(), randn(1, 64, 12, 64, seed=1, device="cuda")
    for _ in range(2):
        gated_sum.forward(gates, (o, o, o))
    with pytest.raises(ValueError, match="cpu tensor"):
        gated_sum.forward(gates.cpu(), (o, o, o))
