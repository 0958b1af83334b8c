"""The proof of the step: a healthy model of any config passes by a factor of three, what it
records, and where it is not made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.config import ModelConfig, preset
from nsa.model import DenseLM, TinyLM
from perfbench import older_nsa
from perfbench.gate import hard_rules
from perfbench.records import Cell, Job, Replicate, StepProof
from perfbench.records.rows import Status
from perfbench.report.rows import _step_ratio
from perfbench.worker.step_proof import attend, shapes, twin
from perfbench.worker.step_proof import prove as proving
from perfbench.worker.step_proof.attend import fa2_of_selected
from perfbench.worker.step_proof.prove import prove
from perfbench.worker.workloads import workload
from perfbench.worker.workloads.graphs import Compiled
from tests.perfbench import builders
from tests.perfbench.jobs import TINY, job
from tests.perfbench.measure_cases import PROOF, run, stub
from tests.perfbench.test_cache_steps import cached
from tests.perfbench.test_graphs import FakeGrapher

pytestmark = pytest.mark.usefixtures("one_thread", "light")
MARGIN = 3.0


def model_of(heads: dict[str, Any] | None = None, **nsa: Any) -> ModelConfig:
    return replace(TINY, **(heads or {}), nsa=replace(TINY.nsa, **nsa))


MODELS = {
    "preset": TINY,
    "shared K and V": model_of(share_kv=True),
    "softmax gate": model_of(gate="softmax", gate_temperature=0.7),
    "linear phi": model_of(phi="linear"),
    "mlp phi": model_of(phi="mlp", phi_hidden=8),
    "rope after compression": model_of(cmp_rope="after"),
    "half rope": model_of(rope="half", rope_scale=0.5),
    "a kv head each": model_of({"num_kv_heads": 4}),
    "one kv head": model_of({"num_kv_heads": 1}),
    "v narrower": model_of({"v_head_dim": 12}),
    "no window": model_of(branches=("cmp", "sel")),
    "no selection": model_of(branches=("cmp", "win")),
    "the window alone": model_of(branches=("win",)),
    "selection alone": model_of(branches=("sel",)),
    "softmax without cmp": model_of(gate="softmax", branches=("sel", "win")),
    "norm of q and k": model_of(qk_norm=True),
    "no rope": model_of(rope="none"),
    "no gate": model_of(gate="none"),
    "full attention": replace(TINY, nsa=TINY.nsa.full_attention()),
    "hierarchical": model_of(selection="hierarchical", num_selected=8),
    "scores in bf16": model_of(score_dtype="bfloat16"),
    "adaptive": model_of(adaptive_num_selected=True, num_selected=12),
    "checkpointed": replace(TINY, checkpoint_layers=(0, 1)),
}


def of(kind: str = "train", path: str = "masked", seq_len: int = 112, **axes: Any) -> Job:
    asked = job(path, kind, seq_len, proof=PROOF)
    return asked.model_copy(update={"axes": replace(asked.axes, **axes)})


def step_of(asked: Job, model: ModelConfig = TINY) -> StepProof:
    asked = asked.model_copy(update={"model": model.to_mapping()})
    work = workload.build(asked)
    work.step()
    return prove(work, asked, model)


def assert_clear(line: StepProof, *kinds: str) -> None:
    assert set(line.tensors) == set(kinds), line
    assert line.ok is True and max(line.tensors.values()) <= 1 / MARGIN, line


LEARNING = ("logits", "loss", "gradients", "optimizer")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_training_step(name: str, dtype: str) -> None:
    model = MODELS[name]
    line = step_of(of(dtype=dtype), model)
    assert_clear(line, *LEARNING, *(["blocks"] if "sel" in model.nsa.branches else []))
    assert (line.num_layers, line.tokens, line.blocks) == (2, 112, "given")


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["preset", "mlp phi", "hierarchical"])
@pytest.mark.parametrize("kind", ["forward", "decode", "chunked_prefill"])
def test_a_healthy_step_without_a_backward(kind: str, name: str, dtype: str) -> None:
    asked = of(kind) if kind == "forward" else cached("v2", kind, batch=2)
    asked = asked.model_copy(update={"axes": replace(asked.axes, dtype=dtype)})
    assert_clear(step_of(asked, MODELS[name]), "logits", "blocks")


@pytest.mark.parametrize("path", ["v1", "v2", "dense"])
@pytest.mark.parametrize("seq_len", [5, 64])
def test_other_paths_and_lengths(path: str, seq_len: int) -> None:
    """Shorter than a compressed block, and where every block is selected."""
    line = step_of(of(path=path, seq_len=seq_len))
    assert_clear(line, *LEARNING, *([] if path == "dense" else ["blocks"]))


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the logits were too many to be made."""
    monkeypatch.setattr(attend, "PLAIN_LOGITS", 0)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("name", ["preset", "mlp phi", "half rope", "adaptive", "no window"])
def test_the_functions_of_a_long_step(name: str) -> None:
    kinds = ["blocks"] if "sel" in MODELS[name].nsa.branches else []
    assert_clear(step_of(of(), MODELS[name]), *LEARNING, *kinds)


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("path", ["reference", "v1", "v2", "dense"])
def test_the_functions_of_each_path(path: str) -> None:
    assert step_of(of("forward", path)).tensors["logits"] <= 1 / MARGIN
    if path != "dense":
        assert step_of(cached(path, "decode", batch=2)).tensors["logits"] <= 1 / MARGIN


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize("path", ["dense_triton", "dense_fa3"])
def test_a_long_prefill_by_a_kernel_of_caches_alone(path: str) -> None:
    """Its twin is by SDPA: the kernel takes no sequence without a cache."""
    asked = cached("dense", "chunked_prefill", batch=2)
    work = workload.build(asked)
    line = prove(work, asked.model_copy(update={"axes": replace(asked.axes, path=path)}), TINY)
    assert_clear(line, "logits")


def test_a_layer_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twin, "TOKENS_TO_RECOMPUTE", 1)
    assert_clear(step_of(of()), *LEARNING, "blocks")


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "CudaGrapher", FakeGrapher)
    monkeypatch.setattr(workload, "Compiled", lambda module: Compiled(module, backend="eager"))


@pytest.mark.usefixtures("graphs")
@pytest.mark.parametrize("kind", ["train", "forward"])
@pytest.mark.parametrize("axes", [{"compile": "on"}, {"cuda_graph": "on"}], ids=str)
def test_a_healthy_step_in_a_graph(axes: dict[str, str], kind: str) -> None:
    line = step_of(of(kind, **axes))
    seen = [] if "compile" in axes else ["blocks"]
    assert_clear(line, *(LEARNING if kind == "train" else ["logits"]), *seen)
    assert line.blocks == ("given" if seen else "own")


@pytest.mark.usefixtures("graphs")
def test_a_captured_decode_step() -> None:
    asked = cached("masked", batch=2)
    asked = asked.model_copy(update={"axes": replace(asked.axes, cuda_graph="on")})
    assert_clear(step_of(asked), "logits", "blocks")
    assert run(asked.model_copy(update={"proof": PROOF})).status is Status.OK


@pytest.mark.usefixtures("graphs")
def test_blocks_that_cannot_be_seen_get_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """A near tie that falls otherwise in the twin is gone with the next batch; a fault is not."""
    tries: list[Any] = []
    compare = proving._ModelStep.compare

    def tied(self: Any, ratios: Any) -> None:
        compare(self, ratios)
        if not tries:
            ratios.add("logits", 2.0, "a tie")
        tries.append(ratios)

    monkeypatch.setattr(proving._ModelStep, "compare", tied)
    assert step_of(of("forward", compile="on")).ok and len(tries) == 2
    tries.clear()
    assert step_of(of("forward")).ok is False and len(tries) == 1


@pytest.mark.parametrize("other_is_wrong", [False, True])
@pytest.mark.parametrize("ok", [False, True])
def test_ranks_take_another_try_together(
    ok: bool, other_is_wrong: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one would wait for a step that another does not take."""

    class Two:
        def agree(self, value: float) -> float:
            return max(value, float(other_is_wrong))

    assert proving._agreed(ok) is ok
    monkeypatch.setattr(proving, "current", Two)
    assert proving._agreed(ok) is (ok and not other_is_wrong)


@pytest.mark.usefixtures("graphs")
def test_a_rank_that_is_right_steps_again_with_one_that_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[Any] = []
    compare = proving._ModelStep.compare

    def counted(self: Any, ratios: Any) -> None:
        compare(self, ratios)
        steps.append(ratios.ok)

    monkeypatch.setattr(proving._ModelStep, "compare", counted)
    monkeypatch.setattr(proving, "_agreed", lambda ok: ok and len(steps) > 1)
    assert step_of(of("forward", compile="on")).ok and steps == [True, True]


# Attention alone.


@pytest.mark.parametrize("kind", ["attention", "attention_forward", "selected", "selected_forward"])
@pytest.mark.parametrize("path", ["v2", "dense"])
def test_attention_alone(kind: str, path: str) -> None:
    if path == "dense" and kind.startswith("selected"):
        path = "masked"
    axes = {"selection": "random"} if kind.startswith("selected") else {}
    line = step_of(of(kind, path, **axes))
    assert_clear(line, "output", *([] if kind.endswith("forward") else ["gradients"]))
    assert line.num_layers == 1


def spoiled(change: Callable[[Tensor], Tensor]) -> Callable[[Any], Compiled]:
    def compiled(module: Any) -> Compiled:
        made = Compiled(module, backend="eager")
        inner = made.run
        made.run = lambda *x: change(inner(*x))
        return made

    return compiled


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda o: o * 1.001, {"output", "gradients"}),
        (lambda o: 2 * o - o.detach(), {"gradients"}),
        (lambda o: o * (torch.arange(o.shape[1]) != 7)[:, None, None], {"output", "gradients"}),
    ],
    ids=["a little larger", "twice the gradient", "a row of zeros"],
)
def test_a_graph_of_another_attention(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Tensor], Tensor], wrong: set[str]
) -> None:
    monkeypatch.setattr(workload, "Compiled", spoiled(change))
    line = step_of(of("attention", compile="on"))
    assert {kind for kind, ratio in line.tensors.items() if ratio > 10} == wrong and not line.ok


# What a model of a config has.


@pytest.mark.parametrize("name", MODELS)
def test_parameters_of_a_config(name: str) -> None:
    model = MODELS[name]
    for made, dense in ((TinyLM(model), False), (DenseLM(model), True)):
        wanted = shapes.parameter_shapes(model, dense=dense)
        assert {n: tuple(p.shape) for n, p in made.named_parameters()} == wanted


def test_the_number_of_parameters() -> None:
    """In closed form, by hand: 12 layers of 768."""
    m7c = preset("m7c_125m")
    count = sum(torch.Size(s).numel() for s in shapes.parameter_shapes(m7c, dense=False).values())
    attention = 768 * 768 * 2 + 2 * 768 * 3 * 2 * 64 + 2 * 64 * (64 + 3)
    assert count == 12 * (attention + 8 * 768**2 + 2 * 768) + 768 + 2 * 256 * 768 == 78_372_096
    assert step_of(of()).num_parameters == sum(p.numel() for p in TinyLM(TINY).parameters())


# Where it is not made, and what becomes of it.


def test_an_older_nsa_has_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    first = older_nsa._first
    monkeypatch.setattr(
        older_nsa,
        "_first",
        lambda *places: None if places[0][0] == "nsa.chosen_blocks" else first(*places),
    )
    row = run(of())
    assert row.status is Status.OK and row.step_proof is not None
    assert row.step_proof.ok is None
    assert row.step_proof.absent == "not recorded: older nsa, which shows no blocks"
    assert step_of(of("attention")).ok is True, "which needs none"


def test_only_the_first_replicate_proves_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    later = of().model_copy(update={"replicate": 1})
    assert step_of(later).ok is True
    monkeypatch.setattr(proving, "TOKENS_OF_ALL_REPLICATES", 100)
    assert (step_of(later).ok, step_of(later).absent) == (None, "replicate 0 proves it")
    assert step_of(of()).ok is True


def test_a_workload_that_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)
    line = run(job("v2", proof=PROOF)).step_proof
    assert line is not None and line.ok is None and "keeps nothing" in line.absent


def test_a_row_keeps_its_proof_and_an_older_one_has_none() -> None:
    row = run(of())
    assert row.status is Status.OK and row.step_proof is not None and row.step_proof.seconds > 0
    assert Replicate.model_validate_json(row.model_dump_json()) == row
    older = {key: x for key, x in row.model_dump(mode="json").items() if key != "step_proof"}
    assert Replicate.model_validate(older).step_proof is None


def test_a_failed_proof_in_a_row_is_a_finding() -> None:
    row = builders.replicate(builders.cpu_cells()[0])
    bad = StepProof(
        ok=True, tensors={"gradients": 3.0}, worst="gradients: the gradient of x is off"
    )
    (found,) = hard_rules._parity(row.model_copy(update={"step_proof": bad}))
    assert "the step differs from its plain twin: gradients: the gradient of x" in found.reason
    good = StepProof(ok=True, tensors={"gradients": 0.3}, worst="gradients")
    assert list(hard_rules._parity(row.model_copy(update={"step_proof": good}))) == []


def test_a_report_has_the_worst_step_or_the_reason() -> None:
    row = builders.replicate(builders.cpu_cells()[0])
    with_line = [
        row.model_copy(update={"step_proof": StepProof(ok=True, tensors={"logits": x}, worst="l")})
        for x in (0.2, 0.3)
    ]
    none = row.model_copy(update={"step_proof": StepProof(ok=None, absent="replicate 0 proves it")})
    assert _step_ratio([*with_line, none]) == (0.3, "")
    assert _step_ratio([none]) == (None, "the step was not proved: replicate 0 proves it")
    assert _step_ratio([row]) == (None, "")


def test_the_selected_branch_alone_is_asked_of_fa2_what_it_can_serve() -> None:
    """On a card with FA-2, path masked serves fa2=on by its window, and refuses it alone."""
    from nsa.capability import assumed
    from nsa.routing import Problem, Request, RouteError, route
    from perfbench.matrix import of_selected

    card = replace(assumed("h200"), fa2_provider="torch.varlen 2.11.0")
    whole = Problem.of(TINY, batch=1, tokens=256, dtype="bfloat16")
    for path in ("masked", "v2", "v1", "reference"):
        for fa2 in ("on", "off", "auto"):
            cell = Cell("train", 256, path, fa2)
            try:
                route(Request(path, fa2), whole, card)
            except RouteError:
                continue  # no such cell
            route(Request(path, fa2_of_selected(cell)), of_selected(whole), card)
    with pytest.raises(RouteError):
        route(Request("masked", "on"), of_selected(whole), card)
