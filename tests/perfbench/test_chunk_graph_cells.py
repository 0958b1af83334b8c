"""Workload chunked_prefill with cuda_graph=on: all chunks in one graph, what is counted, proved and
refused.
"""

from __future__ import annotations

import pathlib
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.decode import Steps
from perfbench import older_nsa
from perfbench.gate.judging import judge
from perfbench.matrix import attention_calls, load_matrix
from perfbench.matrix.policy import GatePolicy
from perfbench.records.job import Job
from perfbench.records.rows import Status
from perfbench.report.rows import rows_of
from perfbench.worker import measure, operators
from perfbench.worker.workloads import workload
from tests.perfbench import builders as b
from tests.perfbench.jobs import TINY
from tests.perfbench.measure_cases import run
from tests.perfbench.test_cache_steps import cached
from tests.perfbench.test_decode_graph import HollowGrapher, captured
from tests.perfbench.test_graphs import FakeGrapher
from tests.perfbench.test_plan import H100, build

pytestmark = pytest.mark.usefixtures("one_thread", "light")
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "CudaGrapher", FakeGrapher)


def prompt(path: str = "masked", *, graph: bool = True, seq_len: int = 120, chunk: int = 40) -> Job:
    made = captured if graph else cached
    return made(path, kind="chunked_prefill", seq_len=seq_len, chunk=chunk, batch=2)


def test_a_row_is_the_eager_cells_but_for_what_ran_it() -> None:
    row, eager = run(prompt()), run(prompt(graph=False))
    assert (row.status, row.reason, row.engaged_by) == (Status.OK, "", "capture")
    assert row.engaged == dict.fromkeys(
        prompt().plan.counters, 3 * TINY.num_layers * row.steps_per_sample * len(row.samples_s)
    )
    assert row.cache is not None and eager.cache is not None
    assert (row.cache.tokens, row.cache.keys_read) == (120, eager.cache.keys_read)
    assert row.cache.memory_bytes > eager.cache.memory_bytes, "room for a chunk in the rings"
    assert row.parity is not None and {"o", "layer", "blocks"} == set(row.parity.tensors)
    assert row.step_proof is not None and row.step_proof.ok


def test_the_dense_twin_is_proved_and_timed_from_a_graph_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row, eager = run(prompt("dense")), run(prompt("dense", graph=False))
    assert (row.status, row.reason, row.engaged_by) == (Status.OK, "", "capture")
    due = 3 * TINY.num_layers * row.steps_per_sample * len(row.samples_s)
    assert row.engaged == {"dense.sdpa": due}
    assert row.cache == eager.cache, "which needs no rings"
    assert row.parity is not None and {"o", "layer"} == set(row.parity.tensors)
    assert row.step_proof is not None and row.step_proof.ok
    real = Steps.next_dense

    def late(self: Steps) -> Any:
        step = real(self)
        return replace(step, row_BT11=(step.row_BT11 - 1).clamp(min=0))

    monkeypatch.setattr(Steps, "next_dense", late)
    wrong = run(prompt("dense"))
    assert wrong.status is Status.PARITY and wrong.tok_per_s is None


@pytest.mark.parametrize("path", ["masked", "dense"])
def test_each_replay_begins_with_empty_caches(path: str) -> None:
    work = workload.build(prompt(path))
    lengths: list[list[int]] = []
    logits: list[Tensor] = []
    hooks = [
        work.model.register_forward_pre_hook(
            lambda _, args, options: lengths.append(options["cache"][0].steps.length_B.tolist()),
            with_kwargs=True,
        ),
        work.model.register_forward_hook(lambda _, args, out: logits.append(out.clone())),
    ]
    for _ in range(2):
        work.step()
    for hook in hooks:
        hook.remove()
    assert lengths == [[at, at] for at in (0, 40, 80)] * (len(lengths) // 3) and len(lengths) >= 9
    assert work.steps is not None and work.made.inputs[0].shape == (2, 120)
    whole = work.model(work.made.inputs[0])
    torch.testing.assert_close(torch.cat(logits[-3:], 1), whole, rtol=1e-4, atol=1e-5)


def test_the_operators_of_every_chunk_are_due() -> None:
    asked = prompt().model_copy(update={"profile": True})
    work = workload.build(asked)
    work.step()
    due = operators.due(asked, TINY, measure.actual_route(asked, TINY))
    assert due is not None and work.captured is not None
    assert operators.Calls(due).fault(work.captured.operators) == ""
    assert work.captured.operators["nsa::selected_masked"] == 3 * TINY.num_layers


def test_a_replay_that_is_not_the_step_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "CudaGrapher", HollowGrapher)
    row = run(prompt())
    assert row.status is Status.PARITY and row.tok_per_s is None
    assert row.reason.startswith("a replay's logits differ by ")


def test_a_nan_in_the_last_chunk_of_a_replay_is_a_difference() -> None:
    """The largest of 0.0 and NaN is 0.0 in Python."""
    work = workload.build(prompt())

    def poisoned() -> None:
        work.step()
        work.made.outputs[-1][0, 0, 0] = torch.nan

    assert work.steps is not None
    found = work.steps.how_a_replay_differs(poisoned, lambda: work.made.inputs)
    assert found.startswith("a replay's logits differ by nan")


def test_chunks_that_forget_the_window_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ring keeps a chunk less than the first query of a chunk looks back."""
    real = Steps.append

    def emptied(self: Steps, cache: object, *kv: object, **options: object) -> object:
        for ring in cache.win:  # type: ignore[attr-defined]
            ring.zero_()
        return real(self, cache, *kv, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Steps, "append", emptied)
    row = run(prompt())
    assert row.status is Status.PARITY and row.tok_per_s is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"seq_len": 100}, "seq_len=100 and chunk=40: a graph holds whole chunks alone"),
        ({"path": "dense_flash", "fa2": "n/a"}, "FA-2 takes no positions that are on the device"),
        ({"path": "dense_cudnn", "fa2": "n/a"}, "path=dense_cudnn: it keeps no cache"),
        ({"path": "v2", "fa2": "on"}, "where FA-2's window takes none; wanted fa2=off"),
        ({"path": "v1", "fa2": "off"}, "its loop runs on the host, which no graph holds"),
        ({"compile": "on"}, "compile=on with workload=chunked_prefill: the lengths of a cache"),
    ],
)
def test_what_no_graph_of_chunks_serves(changes: dict[str, object], why: str) -> None:
    cell = replace(prompt().axes, **changes)  # type: ignore[arg-type]
    assert why in (attention_calls.why_not(cell, TINY) or "served")


def test_an_older_nsa_is_not_asked_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert older_nsa.steps_in_chunks() and attention_calls.why_not(prompt().axes, TINY) is None
    monkeypatch.setattr(attention_calls, "steps_in_chunks", lambda: False)
    reason = attention_calls.why_not(prompt().axes, TINY) or "served"
    assert "this nsa has no nsa.decode.ChunkGraph; wanted a newer revision" in reason


@pytest.mark.parametrize("path", ["dense", "dense_triton", "dense_fa3"])
def test_an_older_dense_twin_is_not_asked_for_it(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    cell = replace(prompt("dense").axes, path=path)
    assert older_nsa.dense_steps_in_chunks() and attention_calls.why_not(cell, TINY) is None

    @dataclass(frozen=True)
    class DenseStep:  # of one token
        position_B: Tensor
        row_B111: Tensor

    monkeypatch.setattr("nsa.decode.DenseStep", DenseStep)
    assert not older_nsa.dense_steps_in_chunks()
    reason = attention_calls.why_not(cell, TINY) or "served"
    assert f"path={path}: the dense twin of this nsa takes one token a captured step" in reason
    monkeypatch.delattr("nsa.decode.DenseStep")
    assert not older_nsa.dense_steps_in_chunks()


def test_captured_chunks_of_the_decode_matrix_have_a_dense_twin() -> None:
    """And x dense is against it, not against the eager one, however fast."""
    made = build(load_matrix(str(ROOT / "matrices" / "decode-h100.yaml")), H100)
    lengths, asked = (
        (8192, 65536),
        "cuda_graph=on,path=dense_fa3,seq_len={},workload=chunked_prefill",
    )
    assert {asked.format(n) for n in lengths} <= {one.cell_id for one in made.excluded}, (
        "where fa3-fwd is not installed"
    )
    cells = [cell for cell in made.cells if cell.axes.workload == "chunked_prefill"]
    speeds = {"triton": 1000.0, "dense_flash": 4000.0, "dense_triton": 500.0}
    rows = [b.replicate(cell, 0, tok_per_s=speeds[cell.axes.path]) for cell in cells]
    found = b.with_rows(b.make_run(cells), rows)
    x_dense = {
        row.cell.axes.seq_len: row.x_dense
        for row in rows_of(found, judge(found, None, GatePolicy()))
        if (row.cell.axes.path, row.cell.axes.cuda_graph) == ("triton", "on")
    }
    assert x_dense == dict.fromkeys(lengths, pytest.approx(2.0))
