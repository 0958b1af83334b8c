"""Workload decode with cuda_graph=on: what is captured, what a replay does, what is counted, proved
and refused.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.decode import Steps
from nsa.routing import RouteError
from nsa.settings import Settings, load
from perfbench.errors import PerfbenchError
from perfbench.matrix import attention_calls, named_calls
from perfbench.matrix import matrix as matrices
from perfbench.records.cells import Cell, settings_of, why_not_here
from perfbench.records.job import Job
from perfbench.records.rows import Replicate, Status
from perfbench.worker import measure, profile
from perfbench.worker.parity import proof
from perfbench.worker.parity.claim import Claim
from perfbench.worker.workloads import workload
from perfbench.worker.workloads.workload import NUM_BATCHES, Workload
from tests.perfbench.jobs import TINY
from tests.perfbench.measure_cases import run
from tests.perfbench.test_cache_steps import cached, keys_at
from tests.perfbench.test_graphs import FakeGrapher
from tests.perfbench.test_plan import BARE, H100, build

pytestmark = pytest.mark.usefixtures("one_thread", "light")
ROOT = pathlib.Path(__file__).parents[2]
PATHS = pytest.mark.parametrize("path", ["v2", "masked"])


@pytest.fixture(autouse=True)
def _fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "CudaGrapher", FakeGrapher)


def captured(path: str = "masked", seq_len: int = 100, **changes: Any) -> Job:
    planned_job = cached(path, seq_len=seq_len, **changes)
    return planned_job.model_copy(update={"axes": replace(planned_job.axes, cuda_graph="on")})


def seen(work: Workload, steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(ids, position of each row on the device, logits) of each forward in ``steps`` steps."""
    calls_: list[tuple[Tensor, Tensor, Tensor]] = []
    positions: list[Tensor] = []
    hooks = [
        work.model.register_forward_pre_hook(
            lambda _, args, options: positions.append(options["cache"][0].steps.length_B.clone()),
            with_kwargs=True,
        ),
        work.model.register_forward_hook(
            lambda _, args, logits: calls_.append((args[0].clone(), positions[-1], logits.clone()))
        ),
    ]
    for _ in range(steps):
        work.step()
    for hook in hooks:
        hook.remove()
    return calls_


@PATHS
@pytest.mark.parametrize("seq_len", [32, 99, 100])
def test_every_replay_is_the_eager_cells_step(path: str, seq_len: int) -> None:
    """The same weights, cache, ids and position give the same logits; and a replay leaves no
    trace.
    """
    graph, eager = (
        workload.build(captured(path, seq_len, batch=2)),
        workload.build(cached(path, seq_len=seq_len, batch=2)),
    )
    wanted: list[Tensor] = []
    hook = eager.model.register_forward_hook(lambda _, args, logits: wanted.append(logits.clone()))
    for _ in range(NUM_BATCHES):
        eager.step()
    hook.remove()
    held = seq_len - (seq_len + 1 >= 8 and (seq_len + 1 - 8) % 4 == 0)
    warm, capture, *replays = seen(graph, 2 * NUM_BATCHES)
    assert len(replays) == 2 * NUM_BATCHES and graph.tokens_per_step == 2
    for i, (ids, position_B, logits) in enumerate([warm, capture, *replays]):
        assert (
            ids.shape == (2, 1)
            and position_B.tolist() == [held, held]
            and logits.shape == (2, 1, TINY.vocab_size)
        ), i
    torch.testing.assert_close(warm[2], wanted[0], rtol=1e-4, atol=1e-5)
    for i, (_, _, logits) in enumerate(replays):  # the capture took the first batch
        torch.testing.assert_close(logits, wanted[(i + 1) % NUM_BATCHES], rtol=1e-4, atol=1e-5)
    assert torch.equal(replays[0][2], replays[NUM_BATCHES][2])


@PATHS
def test_a_row_says_what_was_captured_and_read(path: str) -> None:
    planned_job = captured(path, batch=2)
    row = run(planned_job)
    assert (row.status, row.reason, row.engaged_by) == (Status.OK, "", "capture")
    assert row.engaged == dict.fromkeys(
        planned_job.plan.counters, TINY.num_layers * row.steps_per_sample * len(row.samples_s)
    )
    assert row.cache is not None and row.cache.tokens == 100 and row.cache.keys_read == keys_at(100)
    eager = run(cached(path, batch=2))
    assert eager.cache is not None and eager.engaged_by == "call"
    ring = 2 * TINY.nsa.cmp_block * TINY.num_kv_heads * (TINY.head_dim + TINY.value_dim) * 4
    assert row.cache.memory_bytes == eager.cache.memory_bytes + TINY.num_layers * ring
    assert row.parity is not None and {"o", "layer", "blocks"} == set(row.parity.tensors)
    assert Replicate.model_validate_json(row.model_dump_json()) == row


def test_a_replay_that_moves_on_is_seen_in_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the token were kept, each replay would run at a new position, until the cache is full."""
    monkeypatch.setattr(Steps, "forget_last", lambda self: None)
    with pytest.raises(ValueError, match="would hold 102 tokens"):
        run(captured())


class HollowGrapher(FakeGrapher):
    """A graph that holds nothing: what the capture left stays for ever."""

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        super().capture(work)
        return lambda: None


def test_a_replay_that_is_not_the_step_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its logits are those of the capture's ids; the counters cannot tell."""
    monkeypatch.setattr(workload, "CudaGrapher", HollowGrapher)
    row = run(captured())
    assert row.status is Status.PARITY and row.tok_per_s is None and row.samples_s == []
    assert (
        row.reason.startswith("a replay's logits differ by ")
        and "the same step launched by the host" in row.reason
    )


def blocks_over_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """A completed compressed block, and what a step without one computes, goes to the wrong row."""
    real = Steps.next

    def early(self: Steps, config: NSAConfig) -> Any:
        step = real(self, config)
        step.cmp_BM11.clamp_(max=3)
        return step

    monkeypatch.setattr(Steps, "next", early)


def short_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A query passes over the last slot of its ring."""
    real = Steps.next

    def short(self: Steps, config: NSAConfig) -> Any:
        step = real(self, config)
        step.win_start_B.sub_(1)
        return step

    monkeypatch.setattr(Steps, "next", short)


@pytest.mark.parametrize(
    "fault", [blocks_over_another, short_window], ids=lambda fault: fault.__name__
)
def test_a_step_that_is_wrong_is_never_timed(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    """The proof goes through the steps that are captured: what is wrong with them alone turns this
    cell red, and not the eager one.
    """
    fault(monkeypatch)
    row = run(captured("v2"))
    assert (
        row.status is Status.PARITY
        and row.tok_per_s is None
        and row.samples_s == []
        and row.cache is None
    )
    assert run(cached("v2")).status is Status.OK


def test_the_proof_is_asked_to_step(monkeypatch: pytest.MonkeyPatch) -> None:
    claims: list[Claim] = []
    monkeypatch.setattr(measure, "prove", lambda claim: claims.append(claim) or proof.prove(claim))
    run(captured())
    run(cached())
    assert [claim.stepping for claim in claims] == [True, False]
    assert {claim.chunk for claim in claims} == {1}


def test_a_captured_dense_step_is_proved_and_says_what_it_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = run(captured("dense", batch=2))
    assert (row.status, row.reason, row.engaged_by) == (Status.OK, "", "capture")
    assert set(row.engaged) == {"dense.sdpa"}
    assert row.step_proof is not None and row.step_proof.ok
    assert row.cache is not None and row.cache.keys_read == {"dense": 101}
    real = Steps.next_dense

    def late(self: Steps) -> Any:
        step = real(self)
        return replace(step, row_BT11=(step.row_BT11 - 1).clamp(min=0))

    monkeypatch.setattr(Steps, "next_dense", late)
    wrong = run(captured("dense"))
    assert wrong.status is Status.PARITY and wrong.tok_per_s is None
    assert run(cached("dense")).status is Status.OK


# Routes and refusals.


def axes(path: str, **more: Any) -> Cell:
    return Cell("decode", 2048, path, cuda_graph="on", **more)


def test_a_captured_step_is_routed_as_rows_that_may_differ() -> None:
    fused = attention_calls.route_of(axes("triton"), TINY, Settings(), H100)
    assert set(fused.counters) == {"cmp.triton", "score.triton", "sel.triton", "win.triton"}
    assert attention_calls.route_of(axes("auto"), TINY, Settings(), H100).counters == fused.counters
    assert (
        attention_calls.problems(axes("v2"), TINY)[0].ragged
        and not attention_calls.problems(replace(axes("v2"), cuda_graph="off"), TINY)[0].ragged
    )
    assert (
        "win.sdpa"
        in attention_calls.route_of(axes("v2", fa2="off"), TINY, Settings(), BARE).counters
    )
    with pytest.raises(RouteError):
        attention_calls.route_of(axes("v2", fa2="on"), TINY, Settings(), BARE)


MATRIX = """\
version: 1
name: t
target: {gpu: H100}
model: m7c_125m
axes: {workload: [decode], seq_len: [256], path: [PATH], fa2: [FA2], AXIS: [on]}
measure: {processes: 3}
"""


def planned(path: str, fa2: str, axis: str = "cuda_graph") -> Any:
    text = MATRIX.replace("PATH", path).replace("FA2", fa2).replace("AXIS", axis)
    return build(matrices.parse_matrix(text, "t.yaml"))


@pytest.mark.parametrize(
    ("path", "fa2", "axis", "message"),
    [
        (
            "v2",
            "auto",
            "cuda_graph",
            (
                "cuda_graph=on with workload=decode, path=v2 and fa2=auto: a captured step's"
                " positions are on the"
            ),
        ),
        ("masked", "on", "cuda_graph", "wanted fa2=off or path=triton; name one of them"),
        ("v1", "off", "cuda_graph", "its loop runs on the host, which no graph holds"),
        (
            "v2",
            "off",
            "compile",
            "compile=on with workload=decode: the lengths of a cache are the host's",
        ),
    ],
)
def test_what_no_graph_holds_is_refused_before(
    path: str, fa2: str, axis: str, message: str
) -> None:
    with pytest.raises(PerfbenchError) as caught:
        planned(path, fa2, axis)
    assert message in str(caught.value)


def test_the_fast_paths_are_planned_and_a_cpu_is_refused() -> None:
    for path, fa2 in (("v2", "off"), ("masked", "off")):
        assert [c.axes.cuda_graph for c in planned(path, fa2).cells] == ["on"]
    refused = why_not_here(Cell("decode", 256, "v2", "off", cuda_graph="on"), on_gpu=False)
    assert refused is not None and "cuda_graph=on needs a GPU" in refused


def test_the_decode_matrices_time_both_the_host_and_the_graph() -> None:
    cells = build(
        matrices.load_matrix(ROOT / "matrices" / "decode-h100.yaml"),
        replace(H100, triton_provider="triton 3.6.0"),
    ).cells
    grids: dict[Any, set[Any]] = {"off": set(), "on": set()}
    for axes_ in (c.axes for c in cells if (c.axes.workload, c.axes.path) == ("decode", "triton")):
        grids[axes_.cuda_graph].add((axes_.batch, axes_.seq_len))
    assert (
        grids["on"]
        == grids["off"]
        == {(b, s) for b in (1, 8, 64) for s in (2048, 8192, 32768, 65536)}
    )


def test_one_operator_a_layer_is_due_of_a_captured_step_of_path_triton() -> None:
    """And its kernels: a launch of both intervals vouches for two branches, and no fewer do."""
    here = replace(H100, triton_provider="triton 3.6.0")
    model = matrices.load_matrix(ROOT / "matrices" / "decode-h100.yaml").model
    one = {"nsa::decode_step": 12, "nsa::linear_step": 48}
    many = {
        "nsa::interval": 24,
        **dict.fromkeys(("nsa::choose", "nsa::gated_sum", "nsa::selected_triton"), 12),
    }
    for cell, due in (
        (axes("triton"), one),
        (axes("triton", batch=128), {"nsa::decode_step": 12}),
        (replace(axes("triton"), cuda_graph="off"), many),
        (axes("triton", without="split"), many),
    ):
        route = attention_calls.route_of(cell, model, load(settings_of(cell)), here)
        calls = named_calls.operator_calls(route, cell, model, workspace_bytes=1 << 30)
        assert calls.exact == due
    route = attention_calls.route_of(axes("triton"), model, Settings(), here)
    names = ("nsa_choose_step", "nsa_selected_forward_split", "nsa_sum_step")
    kernels = {profile.BOTH + "_split": 12, **dict.fromkeys(names, 12)}
    assert profile.testify(route, kernels, {}, True, 12)[0] is True
    ok, why = profile.testify(route, {**kernels, profile.BOTH + "_split": 11}, {}, True, 12)
    assert ok is False and "names triton for 24 launches" in why
