"""The proof of the step is red for a fault planted in any part of the model, the loss, the backward
or the optimizer, each of which the proof of the attention function passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa import attention as nsa_attention
from nsa import chosen_blocks, selection
from nsa.attention import NSAAttention
from nsa.model import Block, TinyLM, _Decoder
from nsa.ops.selected import PATHS
from nsa.routing import Path
from perfbench.records import Job, StepProof
from perfbench.records.rows import Status
from perfbench.worker.step_proof import attend
from perfbench.worker.step_proof.prove import prove
from perfbench.worker.workloads import workload
from tests.perfbench.jobs import TINY, job
from tests.perfbench.measure_cases import PROOF, assert_no_speed, run
from tests.perfbench.test_cache_steps import cached
from tests.perfbench.test_graphs import FakeGrapher

pytestmark = pytest.mark.usefixtures("one_thread", "light")
Plant = Callable[[pytest.MonkeyPatch], None]


def step_of(asked: Job) -> StepProof:
    work = workload.build(asked)
    for _ in range(2):  # the optimizer's state is there from the first step on
        work.step()
    return prove(work, asked, TINY)


def of(kind: str = "train", path: str = "masked", seq_len: int = 112, **axes: Any) -> Job:
    asked = job(path, kind, seq_len, proof=PROOF)
    return asked.model_copy(update={"axes": replace(asked.axes, **axes)})


def wrong(line: StepProof) -> set[str]:
    assert line.ok is all(ratio <= 1 for ratio in line.tensors.values())
    return {name for name, ratio in line.tensors.items() if ratio > 1}


def far(line: StepProof, kind: str, by: float = 10.0) -> bool:
    return line.ok is False and line.tensors[kind] >= by


# The model.


def hidden_states_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = _Decoder._logits

    def detached(self: Any, ids: Tensor, *rest: Any) -> Tensor:
        head = self.norm.register_forward_pre_hook(lambda _, args: (args[0].detach(),))
        try:
            return logits(self, ids, *rest)
        finally:
            head.remove()

    monkeypatch.setattr(_Decoder, "_logits", detached)


def attention_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = NSAAttention.forward
    monkeypatch.setattr(NSAAttention, "forward", lambda *x, **o: forward(*x, **o).detach())


def attention_function_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = nsa_attention.attend_view
    monkeypatch.setattr(nsa_attention, "attend_view", lambda *x, **o: attend(*x, **o).detach())


def layers_without_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Block, "forward", torch.no_grad()(Block.forward))


def query_detached(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = nsa_attention.rotate

    def detached(x: Tensor, *rest: Any, **options: Any) -> Tensor:
        turned = rotate(x, *rest, **options)
        return turned.detach() if x.shape[2] == TINY.num_heads else turned

    monkeypatch.setattr(nsa_attention, "rotate", detached)


def mlp_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor, **options: Any) -> Tensor:
        return x + self.attention(self.attention_norm(x), **options)

    monkeypatch.setattr(Block, "forward", forward)


def last_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = _Decoder._logits

    def last(self: Any, ids: Tensor, *rest: Any) -> Tensor:
        found = logits(self, ids, *rest)
        return found[:, -1:].expand_as(found)

    monkeypatch.setattr(_Decoder, "_logits", last)


def no_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsa_attention, "rotate", lambda x, *rest, **options: x)


def gate_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = nsa_attention.attend_view
    monkeypatch.setattr(
        nsa_attention,
        "attend_view",
        lambda q, gates, *x, **o: attend(q, torch.full_like(gates, 0.5), *x, **o),
    )


def last_layer_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = Block.forward
    count = iter(range(10**9))

    def skipping(self: Any, x: Tensor, **options: Any) -> Tensor:
        return x if next(count) % TINY.num_layers else forward(self, x, **options)

    monkeypatch.setattr(Block, "forward", skipping)


def no_final_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    init = _Decoder.__init__

    def without(self: Any, *rest: Any) -> None:
        init(self, *rest)
        self.norm.forward = lambda x: x * self.norm.weight

    monkeypatch.setattr(_Decoder, "__init__", without)


def no_residual(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor, **options: Any) -> Tensor:
        x = self.attention(self.attention_norm(x), **options)
        return x + self.mlp(self.mlp_norm(x))

    monkeypatch.setattr(Block, "forward", forward)


def one_row_off(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = _Decoder._logits

    def bumped(self: Any, ids: Tensor, *rest: Any) -> Tensor:
        found = logits(self, ids, *rest)
        here = torch.arange(found.shape[1])[:, None] == found.shape[1] // 2
        return found + 2.0 * here

    monkeypatch.setattr(_Decoder, "_logits", bumped)


BACKWARD_ALONE = {  # fault -> a gradient that is lost
    hidden_states_detached: "gradients",
    attention_detached: "gradients",
    attention_function_detached: "gradients",
    layers_without_gradient: "gradients",
    query_detached: "gradients",
}
FORWARD = [
    mlp_skipped,
    last_token_alone,
    no_rope,
    gate_ignored,
    last_layer_skipped,
    no_final_norm,
    no_residual,
    one_row_off,
]
DTYPES = pytest.mark.parametrize("dtype", ["fp32", "bf16"])
named = {"ids": lambda fault: fault.__name__}


@DTYPES
@pytest.mark.parametrize("fault", BACKWARD_ALONE, **named)
def test_a_backward_that_is_cut(monkeypatch: pytest.MonkeyPatch, fault: Plant, dtype: str) -> None:
    fault(monkeypatch)
    line = step_of(of(dtype=dtype))
    assert wrong(line) == {"gradients"} and far(line, "gradients")
    assert "blocks.0." in line.worst or "embedding" in line.worst
    assert step_of(of("forward", dtype=dtype)).ok, "the forward is right"


@DTYPES
@pytest.mark.parametrize("fault", FORWARD, **named)
def test_a_forward_that_leaves_something_out(
    monkeypatch: pytest.MonkeyPatch, fault: Plant, dtype: str
) -> None:
    fault(monkeypatch)
    by = 10.0 if dtype == "fp32" else 2.0  # of bf16 a change of 3 % may be rounding
    for kind in ("train", "forward"):
        line = step_of(of(kind, dtype=dtype))
        assert line.ok is False
        assert "blocks" in wrong(line) or far(line, "logits", by), line


def test_a_head_for_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a decode step might have it: fewer logits are a fault of their own, not a crash."""
    logits = _Decoder._logits
    monkeypatch.setattr(_Decoder, "_logits", lambda *x: logits(*x)[:, -1:])
    line = step_of(of("forward"))
    assert line.ok is False and "logits are (1, 1, 256); wanted (1, 112, 256)" in line.worst


@pytest.mark.parametrize("logits", [0, attend.PLAIN_LOGITS], ids=["halves", "plain"])
def test_a_memoised_branch(monkeypatch: pytest.MonkeyPatch, logits: int) -> None:
    """It answers every later call of a shape with the first one's: also the twin's, were its calls
    of the step's shape.
    """
    known: dict[Any, Any] = {}
    real = PATHS[Path.MASKED]

    def memoised(q: Tensor, *rest: Any, **options: Any) -> Any:
        if q.shape not in known:
            known[q.shape] = real(q, *rest, **options)
        return known[q.shape]

    monkeypatch.setattr(attend, "PLAIN_LOGITS", logits)
    monkeypatch.setitem(PATHS, Path.MASKED, memoised)
    line = step_of(of("forward"))
    assert "logits" in wrong(line) and far(line, "logits")


@pytest.mark.parametrize("axes", [{"compile": "on"}, {"cuda_graph": "on"}], ids=str)
@pytest.mark.parametrize("fault", [mlp_skipped, attention_detached, no_rope], **named)
def test_a_fault_in_a_graph(
    monkeypatch: pytest.MonkeyPatch, fault: Plant, axes: dict[str, str], graphs: None
) -> None:
    assert step_of(of(**axes)).ok
    torch._dynamo.reset()
    fault(monkeypatch)
    assert step_of(of(**axes)).ok is False


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    compiled = workload.Compiled
    monkeypatch.setattr(workload, "CudaGrapher", FakeGrapher)
    monkeypatch.setattr(workload, "Compiled", lambda module: compiled(module, backend="eager"))
    yield
    torch._dynamo.reset()


# What a model has.


def narrow_mlp(block: Any) -> None:
    block.mlp = nn.Sequential(
        nn.Linear(TINY.dim, 8, bias=False), nn.SiLU(), nn.Linear(8, TINY.dim, bias=False)
    )


def build_with(monkeypatch: pytest.MonkeyPatch, change: Callable[[TinyLM], object]) -> None:
    init = TinyLM.__init__

    def changed(self: Any, *rest: Any, **options: Any) -> None:
        init(self, *rest, **options)
        change(self)

    monkeypatch.setattr(TinyLM, "__init__", changed)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda m: narrow_mlp(m.blocks[1]), "blocks.1.mlp.0.weight is (8, 64); wanted (256, 64)"),
        (lambda m: m.blocks.pop(1), "the model lacks blocks.1.attention_norm.weight and"),
        (lambda m: m.blocks.append(m.blocks[0].__class__(TINY, nn.Linear(2, 2))), "the model has"),
        (lambda m: setattr(m.head, "weight", m.embedding.weight), "the model lacks head.weight"),
        (lambda m: m.head.requires_grad_(False), "head.weight wants no gradient"),
        (lambda m: setattr(m, "more", nn.Linear(1, 1, bias=False)), "the model has more.weight"),
    ],
    ids=["narrow", "a layer fewer", "a layer more", "tied", "frozen", "unknown"],
)
def test_another_model(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], object], sentence: str
) -> None:
    build_with(monkeypatch, change)
    asked = of("train")
    line = prove(workload.build(asked), asked, TINY)
    assert line.ok is False and sentence in line.worst


# The loss and the optimizer.


def loss_of(monkeypatch: pytest.MonkeyPatch, change: Callable[..., Tensor]) -> None:
    real = nn.functional.cross_entropy
    monkeypatch.setattr(
        nn.functional, "cross_entropy", lambda logits, labels: change(real, logits, labels)
    )


LOSSES: dict[str, tuple[Callable[..., Tensor], set[str]]] = {
    "labels are the inputs": (lambda f, x, y: f(x, y.roll(1)), {"loss", "gradients"}),
    "in bf16": (lambda f, x, y: f(x.bfloat16(), y), {"loss", "gradients"}),
    "a sum": (lambda f, x, y: f(x, y) * len(y), {"loss", "gradients"}),
    "a gradient twice as large": (
        lambda f, x, y: 2 * f(x, y) - f(x, y).detach(),
        {"gradients"},
    ),
    "of the last tokens alone": (lambda f, x, y: f(x[50:], y[50:]), {"loss", "gradients"}),
}


@pytest.mark.parametrize("name", LOSSES)
def test_another_loss(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    change, due = LOSSES[name]
    loss_of(monkeypatch, change)
    line = step_of(of())
    assert wrong(line) == due and all(far(line, kind) for kind in due)


class Skipping(torch.optim.AdamW):
    """Does not step the last parameter."""

    def step(self, closure: Any = None) -> Any:
        last = self.param_groups[0]["params"][-1]
        grad, last.grad = last.grad, None
        super().step(closure)
        last.grad = grad


class Undecayed(torch.optim.AdamW):
    """Says that it decays weights, and does not."""

    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        said, group["weight_decay"] = group["weight_decay"], 0.0
        super().step(closure)
        group["weight_decay"] = said


class Faster(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        (group,) = self.param_groups
        said, group["lr"] = group["lr"], 2 * group["lr"]
        super().step(closure)
        group["lr"] = said


class Forgetful(torch.optim.AdamW):
    """Its second moment is never kept."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for state in self.state.values():
            state["exp_avg_sq"].zero_()


class Idle(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        if not self.state:
            super().step(closure)


def changed(**options: Any) -> type[torch.optim.AdamW]:
    class Changed(torch.optim.AdamW):
        def __init__(self, params: Any, **given: Any) -> None:
            super().__init__(params, **{**given, **options})

    return Changed


@DTYPES
@pytest.mark.parametrize(
    ("optimizer", "sentence"),
    [
        (Skipping, "head.weight"),
        (Faster, "the update of"),
        (Forgetful, "exp_avg_sq of"),
        (Idle, "a step count of 1 after 1"),
        (changed(lr=1e-3), "the optimizer's lr is 0.001; wanted 0.0001"),
        (changed(weight_decay=0.0), "the optimizer's weight_decay is 0.0; wanted 0.01"),
        (changed(weight_decay=2e-2), "the optimizer's weight_decay is 0.02; wanted 0.01"),
    ],
    ids=["skips", "faster", "forgets", "idle", "lr", "no decay", "twice the decay"],
)
def test_another_optimizer(
    monkeypatch: pytest.MonkeyPatch, optimizer: type, sentence: str, dtype: str
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", optimizer)
    line = step_of(of(dtype=dtype))
    assert wrong(line) == {"optimizer"} and sentence in line.worst
    assert far(line, "optimizer", 10.0 if optimizer is not Faster or dtype == "fp32" else 2.0)


def test_a_decay_that_is_only_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """1e-6 of a weight: eight times what fp32 rounds; below bf16's rounding it changes nothing."""
    monkeypatch.setattr(torch.optim, "AdamW", Undecayed)
    line = step_of(of())
    assert wrong(line) == {"optimizer"} and far(line, "optimizer", 2.0)


def test_an_optimizer_without_a_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    class Without(torch.optim.AdamW):
        def __init__(self, params: Any, **options: Any) -> None:
            super().__init__(list(params)[:-1], **options)

    monkeypatch.setattr(torch.optim, "AdamW", Without)
    line = step_of(of())
    # whose gradients add up, since nobody drops them
    assert wrong(line) == {"optimizer", "gradients"} and line.tensors["optimizer"] == 1e9


# The blocks, and steps through a cache.


@DTYPES
def test_blocks_that_are_not_the_best(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """Attention over them is correct, and the twin is given the same ones."""
    scores = selection.block_scores
    monkeypatch.setattr(selection, "block_scores", lambda *x: -scores(*x))
    line = step_of(of("forward", dtype=dtype))
    assert wrong(line) == {"blocks"} and far(line, "blocks", 10.0 if dtype == "fp32" else 1.5)


def test_blocks_beyond_the_query(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = selection.choose
    monkeypatch.setattr(
        selection, "choose", lambda *x, **o: torch.where((b := choose(*x, **o)) < 0, b, b + 1)
    )
    line = step_of(of("forward"))
    assert "blocks" in wrong(line) and "malformed" in line.worst


def test_a_layer_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    last_layer_skipped(monkeypatch)
    assert "1 calls of the attention in a step; wanted 2" in step_of(of("forward")).worst


def cache_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = NSAAttention.forward

    def alone(self: Any, x: Tensor, **options: Any) -> Tensor:
        if options.get("cache") is None:
            return forward(self, x, **options)
        forward(self, x, **options)  # so that the cache takes the token
        return forward(self, x)

    monkeypatch.setattr(NSAAttention, "forward", alone)


def position_off(monkeypatch: pytest.MonkeyPatch) -> None:
    rotate = nsa_attention.rotate
    monkeypatch.setattr(
        nsa_attention,
        "rotate",
        lambda x, by, **o: rotate(x, by if x.shape[2] == 6 else by * by, **o),
    )


@pytest.mark.parametrize("fault", [cache_ignored, position_off, mlp_skipped, gate_ignored], **named)
@pytest.mark.parametrize("kind", ["decode", "chunked_prefill"])
def test_a_fault_in_a_step_through_a_cache(
    monkeypatch: pytest.MonkeyPatch, kind: str, fault: Plant
) -> None:
    asked = cached("v2", kind, seq_len=100, batch=2)
    assert step_of(asked).ok
    fault(monkeypatch)
    line = step_of(asked)
    assert line.ok is False
    assert "blocks" in wrong(line) or far(line, "logits")


def test_a_fault_in_a_captured_decode_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "CudaGrapher", FakeGrapher)
    asked = cached("masked", "decode", seq_len=100, batch=2)
    asked = asked.model_copy(update={"axes": replace(asked.axes, cuda_graph="on")})
    assert step_of(asked).ok
    cache_ignored(monkeypatch)
    assert step_of(asked).ok is False


# What becomes of it.


def test_a_cell_whose_step_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_detached(monkeypatch)
    row = run(of())
    assert row.status is Status.PARITY and row.step_proof is not None and not row.step_proof.ok
    assert "the step differs from its plain twin: gradients: blocks." in row.reason
    assert "has no gradient" in row.reason
    assert_no_speed(row)


def test_a_step_without_memory_for_the_twin_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*rest: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr("perfbench.worker.step_proof.twin.step", full)
    line = step_of(of())
    assert line.ok is None and "does not fit into memory" in line.absent


def test_not_finite_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    build_with(monkeypatch, lambda m: m.head.register_forward_hook(lambda *x: x[2] * math.nan))
    line = step_of(of("forward"))
    assert line.tensors["logits"] == 1e9 and StepProof.model_validate_json(line.model_dump_json())


def test_only_branches_record_blocks() -> None:
    """One record a call, and none of a layer that is computed again in the backward."""
    model = TinyLM(replace(TINY, checkpoint_layers=(0, 2)), "masked")
    with chosen_blocks.collect() as seen:
        model(torch.zeros(1, 112, dtype=torch.int64)).sum().backward()
        model(torch.zeros(1, 16, dtype=torch.int64))
    assert [None if x is None else tuple(x.shape) for x in seen] == [(1, 112, 2, 5)] * 2 + [
        (1, 16, 2, 5)
    ] * 2
