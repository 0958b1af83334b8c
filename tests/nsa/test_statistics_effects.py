"""Telemetry has no effect on what it watches: no gradient, no sync, no graph break; what it cannot
see it says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from nsa import TinyLM, statistics
from nsa.config import preset
from tests.cases import randn
from tests.nsa.statistics_cases import (
    ALL,
    SEL_BLOCK,
    assert_equal,
    observe_both,
    random_blocks,
    random_gates,
)


def gradients(model: TinyLM, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad(set_to_none=True)
    logits = model(ids)
    logits.float().logsumexp(-1).sum().backward()
    return logits.detach(), [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("checkpointed", [False, True])
def test_the_model_does_not_notice(checkpointed: bool) -> None:
    config = dataclasses.replace(preset("tiny"), checkpoint_layers=(0, 2) if checkpointed else None)
    torch.manual_seed(0)
    model, ids = TinyLM(config), torch.randint(0, 256, (2, 100))
    plain, plain_grads = gradients(model, ids)
    with statistics.collect() as seen:
        watched, watched_grads = gradients(model, ids)
    assert torch.equal(plain, watched)
    assert len(plain_grads) == len(watched_grads) and all(
        map(torch.equal, plain_grads, watched_grads)
    )
    got = seen.read()
    assert (got.rows, got.gate_rows) == (
        2 * 100 * 2 * 2,
        2 * 100 * 4 * 2,
    ), "layers times heads times queries, once each"


def test_observing_adds_nothing_to_the_graph() -> None:
    gates = random_gates(1, 20, 2, seed=9).requires_grad_()
    with statistics.collect() as seen:
        statistics.observe_gates(gates, ALL)
    assert gates.grad_fn is None and not any(total.requires_grad for total in seen._sums.values())


def test_a_recomputation_is_not_observed_again() -> None:
    def layer(x: Tensor) -> Tensor:
        gates = x.sigmoid()
        statistics.observe_gates(gates, ALL)
        return gates.square()

    x = randn(1, 5, 2, 3, seed=10).requires_grad_()
    with statistics.collect() as seen:
        y = checkpoint(layer, x, use_reentrant=False)
        assert isinstance(y, Tensor)
        y.sum().backward()
    assert seen.read().gate_rows == 10


def test_inference_mode_first_and_then_training() -> None:
    with statistics.collect() as seen:
        with torch.inference_mode():
            first = observe_both(1)
            once = seen.read()
        observe_both(2)
    assert_equal(once, first[0] | first[1])
    assert seen.read().rows == 80


SYNCS = (
    "item",
    "tolist",
    "cpu",
    "numpy",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
    "__len__",
)
SYNCING_OPS = {
    "_local_scalar_dense",
    "nonzero",
    "index",
    "masked_select",
    "equal",
    "is_nonzero",
    "_unique2",
    "bincount",
}


class NoSyncingOps(TorchDispatchMode):
    """Refuses operators that read a tensor on the host, whose output's shape depends on one, or
    that upload a Python list.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        assert name not in SYNCING_OPS, f"{name} syncs"
        return func(*args, **(kwargs or {}))


@contextmanager
def no_syncs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def refuse(name: str) -> Callable[..., Any]:
        def raise_(*args: Any, **kwargs: Any) -> Any:
            raise AssertionError(f"Tensor.{name} syncs")

        return raise_

    with monkeypatch.context() as patch, NoSyncingOps():
        for name in SYNCS:
            patch.setattr(Tensor, name, refuse(name))
        yield


def test_observing_never_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, gates = (
        random_blocks(2, 40, 2, 4, start=[9, 50], seed=11),
        random_gates(2, 40, 4, seed=11),
    )
    present = torch.arange(40)[None] < 35
    q_start = torch.tensor([9, 50])
    with statistics.collect() as seen, no_syncs(monkeypatch):
        for mask in (None, present):
            statistics.observe_selection(blocks, q_start=q_start, sel_block=SEL_BLOCK, present=mask)
            statistics.observe_selection(blocks, q_start=9, sel_block=SEL_BLOCK, present=mask)
            statistics.observe_gates(gates, ALL, present=mask)
            statistics.observe_gates(gates, ("sel",), present=mask)
    assert seen.read().rows == 2 * (2 * 40 * 2 + 2 * 35 * 2)
    with pytest.raises(AssertionError, match="syncs"), no_syncs(monkeypatch):
        blocks.max().item()
    with pytest.raises(AssertionError, match="syncs"), no_syncs(monkeypatch):
        gates[..., [0, 2]]


def test_read_moves_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    moves: list[int] = []
    cpu = Tensor.cpu

    def counting(self: Tensor) -> Tensor:
        moves.append(self.numel())
        return cpu(self)

    with statistics.collect() as seen:
        for seed in range(3):
            observe_both(seed)
    monkeypatch.setattr(Tensor, "cpu", counting)
    monkeypatch.setattr(Tensor, "item", None)
    assert seen.read().rows == 120
    assert len(moves) == 1


def watched(gates: Tensor, blocks: Tensor) -> Tensor:
    statistics.observe_gates(gates, ALL)
    statistics.observe_selection(blocks, q_start=0, sel_block=SEL_BLOCK)
    return (gates * blocks.clamp(min=0).sum()).sum(-1)


@pytest.mark.parametrize("opened", ["while tracing", "after tracing", "never"])
def test_compiled_calls_are_not_observed_and_say_so(opened: str) -> None:
    torch._dynamo.reset()
    gates, blocks = random_gates(1, 20, 2, seed=12), random_blocks(1, 20, 1, 4, start=[0], seed=12)
    compiles: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        compiles.append(len(list(graph.graph.nodes)))
        return graph.forward

    compiled = torch.compile(watched, fullgraph=True, backend=backend)
    if opened != "while tracing":
        assert torch.equal(compiled(gates, blocks), watched(gates, blocks))
    if opened != "never":
        with statistics.collect() as seen:
            got = compiled(gates, blocks)
        assert torch.equal(got, watched(gates, blocks))
        assert seen.read().rows is None and seen.read().gate_rows is None
        assert (
            "torch.compile" in seen.read().reasons["rows"]
            and "profile" in seen.read().reasons["rows"]
        )
    assert torch.equal(compiled(gates, blocks), watched(gates, blocks))
    assert len(compiles) == 1, "opening or closing a collection must not recompile"


def test_eager_backend() -> None:
    torch._dynamo.reset()
    gates, blocks = random_gates(1, 20, 2, seed=13), random_blocks(1, 20, 1, 4, start=[0], seed=13)
    with statistics.collect():
        assert torch.equal(
            torch.compile(watched, fullgraph=True, backend="eager")(gates, blocks),
            watched(gates, blocks),
        )


def test_captured_calls_are_counted_not_observed(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs need a GPU; what is decided from the stream's state does not."""

    class OnCuda(Tensor):
        is_cuda = True  # type: ignore[assignment]

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with statistics.collect() as outer, statistics.collect() as seen:
        statistics.observe_gates(random_gates(1, 4, 2, seed=14).as_subclass(OnCuda), ALL)
    assert seen.read().captured_calls == outer.read().captured_calls == 1
    assert seen.read().gate_rows is None and "captured 1 calls" in seen.read().reasons["gate_rows"]
