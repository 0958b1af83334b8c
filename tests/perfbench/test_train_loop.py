"""Workload train_loop: the loop's own loader, step, optimizer and schedule; what a row, a plan and
a report say of them; where it is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.model import DenseLM, TinyLM
from nsa.train.config import RunConfig
from nsa.train.data import load, tokenizer_of
from nsa.train.data.fetching import FetchProcess
from nsa.train.data.loader import Loader
from nsa.train.optimizer import TrainOptimizer, build_optimizer
from nsa.train.parallel import TrainWorld
from nsa.train.records import Batch
from nsa.train.schedule import learning_rate
from nsa.train.step import TrainStep
from perfbench import older_nsa, roofline
from perfbench.errors import PerfbenchError
from perfbench.gate.boundary import boundaries
from perfbench.gate.coverage import rows_by_cell
from perfbench.gate.judging import judge
from perfbench.matrix import GatePolicy, Policies, attention_calls, load_matrix, parse_matrix
from perfbench.matrix.memory import least_bytes
from perfbench.matrix.plan import estimate_s
from perfbench.records import Cell, Job, LoopLine, Replicate, failed
from perfbench.records.rows import Status
from perfbench.report import boundary, workloads
from perfbench.report.rows import rows_of
from perfbench.worker import measure
from perfbench.worker.workloads import train_loop, workload
from perfbench.worker.workloads.workload import Workload
from tests.perfbench import builders as b
from tests.perfbench import loop_cases
from tests.perfbench import runner_cases as cases
from tests.perfbench.jobs import TINY
from tests.perfbench.loop_cases import of
from tests.perfbench.measure_cases import run
from tests.perfbench.plan_cases import planned_from
from tests.perfbench.test_boundary import TEXT, judged
from tests.perfbench.test_plan import CPU, H100, ROOT, build

in_process, graphs = loop_cases.in_process, loop_cases.graphs
pytestmark = pytest.mark.usefixtures("one_thread", "light", "in_process")
ALONE = TrainWorld(0, 1, torch.device("cpu"), "none")


# What a step is.


@pytest.mark.parametrize(("path", "model"), [("masked", TinyLM), ("dense", DenseLM)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_steps_are_those_of_a_run_that_sets_nothing_else(
    path: str, model: type, dtype: str, tmp_path: Path
) -> None:
    """Bit for bit, of parts that are put together here."""
    asked = of(path, dtype=dtype)
    values = {"batch": 2, "seq_len": 112, "seed": asked.seed, "device": "cpu"}
    values |= {} if dtype == "bf16" else {"precision": "fp32"}
    values |= {"attention": "dense"} if path == "dense" else {"path": path, "fa2": "off"}
    sections = {"train": values, "data": {"kind": "synthetic", "seed": asked.seed, "workers": 0}}
    config = replace(RunConfig.from_mapping(sections), model=TINY)
    torch.manual_seed(asked.seed)
    made = DenseLM(TINY) if path == "dense" else TinyLM(TINY, path, "off")
    twin = made.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    step = TrainStep(twin, build_optimizer(twin, config.train), config, ALONE)
    loader = load(
        config, rank=0, world_size=1, split="train", tokenizer=tokenizer_of(config, tmp_path)
    )
    work = workload.build(asked)
    for number, batch in enumerate(islice(loader, 3)):
        step([batch], learning_rate(number, config.train))
        work.step()
    assert type(work.model) is model and work.tokens_per_step == 224
    assert work.loop is not None
    assert isinstance(work.loop.optimizer, TrainOptimizer)
    assert isinstance(work.loop.loader, Loader)
    torch.testing.assert_close(work.model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    state = step.optimizer.state_dict()
    torch.testing.assert_close(work.loop.optimizer.state_dict(), state, rtol=0, atol=0)
    assert set(state["master"]) == (set(twin.state_dict()) if dtype == "bf16" else set())


@pytest.mark.usefixtures("graphs")
def test_the_first_call_of_a_captured_step_captures() -> None:
    work = workload.build(of(cuda_graph="on"))
    assert work.loop is not None and work.captured is work.loop.recorded
    work.step()
    assert work.loop.step.is_captured and work.loop.num_steps == 4
    assert work.engaged_by == "capture"
    assert work.captured.counts == dict.fromkeys(
        ("cmp.sdpa", "sel.masked", "sel.sdpa", "win.sdpa"), TINY.num_layers
    )
    work.step()
    assert work.loop.num_steps == 5


@pytest.mark.parametrize(
    ("path", "compiled", "captured"),
    [("masked", "off", "off"), ("masked", "off", "on"), ("dense", "on", "on")],
)
@pytest.mark.usefixtures("graphs")
def test_a_row_says_how_it_is_known_what_ran(path: str, compiled: str, captured: str) -> None:
    asked = of(path, compile=compiled, cuda_graph=captured)
    asked = asked.model_copy(update={"profile": True})
    row = run(asked)
    assert (row.status, row.reason) == (Status.OK, "")
    how = {"off": "call", "on": "capture"}[captured] if compiled == "off" else "graph"
    assert row.engaged_by == how
    steps = row.steps_per_sample * len(row.samples_s)
    assert row.engaged == dict.fromkeys(asked.plan.counters, steps * TINY.num_layers)
    assert row.profile is not None and row.profile.witness_ok is True
    assert row.step_proof is not None and row.step_proof.ok
    torch._dynamo.reset()


# The loader.


def test_a_row_has_the_waits_of_its_timed_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that the loader turns on: .25 s for each batch, 2 s for the first of the run."""
    clock = [0.0]
    real = Loader.__next__
    slow = iter([2.0])

    def late(self: Any) -> Batch:
        clock[0] += next(slow, 0.25)
        return replace(real(self), fetch_s=0.125)

    monkeypatch.setattr(Loader, "__next__", late)
    monkeypatch.setattr(train_loop.time, "perf_counter", lambda: clock[0])
    work = workload.build(of(dtype="bf16"))
    assert work.loop is not None
    for _ in range(5):
        work.step()
    assert work.loop.line(4) == LoopLine(
        precision="bf16_master",
        batches=4,
        wait_p50_s=0.25,
        wait_p95_s=0.25,
        fetch_p50_s=0.125,
        fetch_p95_s=0.125,
    )
    assert work.loop.line(5).wait_p95_s == 2.0


def test_a_row_keeps_its_line_and_an_older_one_has_none() -> None:
    row = run(of())
    assert row.loop is not None and row.loop.batches == row.steps_per_sample * len(row.samples_s)
    assert Replicate.model_validate_json(row.model_dump_json()) == row
    older = {key: x for key, x in row.model_dump(mode="json").items() if key != "loop"}
    assert Replicate.model_validate(older).loop is None


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Ids of the processes that make batches."""
    found: list[int] = []
    init = FetchProcess.__init__

    def noted(self: Any, *rest: Any, **options: Any) -> None:
        init(self, *rest, **options)
        found.append(self.process.pid)

    monkeypatch.setattr(FetchProcess, "__init__", noted)
    return found


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_process_makes_the_batches_and_ends_with_the_row(
    processes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_loop, "WORKERS", 1)
    alive: list[bool] = []
    real = measure._timed

    def watched(*rest: Any) -> Any:
        found = real(*rest)
        alive.extend(map(is_alive, processes))
        return found

    monkeypatch.setattr(measure, "_timed", watched)
    row = run(of())
    assert row.status is Status.OK and alive == [True]
    assert not any(map(is_alive, processes))


def test_the_process_ends_with_a_step_that_does_not_fit(
    processes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*rest: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(train_loop, "WORKERS", 1)
    monkeypatch.setattr(TrainStep, "_body", full)
    with pytest.raises(torch.OutOfMemoryError, match="20.00 GiB"):
        run(of())
    assert len(processes) == 1 and not is_alive(processes[0])


def test_a_traced_step_ends_its_process(
    processes: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(train_loop, "WORKERS", 1)
    row = run(of().model_copy(update={"trace": str(tmp_path / "one.json.gz")}))
    assert row.status is Status.OK and row.tok_per_s is None
    assert len(processes) == 1 and not is_alive(processes[0])
    assert (tmp_path / "one.json.gz").exists()


def test_a_run_that_sets_none_has_one_process() -> None:
    assert RunConfig.from_mapping({}).data.workers == 1
    text = Path(train_loop.__file__).read_text(encoding="utf-8")
    assert 'WORKERS = DataConfig(kind="synthetic").workers' in text


# Where it is refused.


MATRIX = """\
version: 1
name: t
target: {gpu: H100}
model: {preset: tiny}
axes: {workload: [train_loop], seq_len: [256], path: [v2], fa2: [off]}
measure: {processes: 3}
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fa2: [off]", "fa2: [off], dtype: [fp16]", "the loop scales no loss"),
        ("[v2]", "[dense_flash]", "the loop's dense twin is path=dense"),
        ("preset: tiny", "preset: tiny, vocab_size: 200", "its synthetic text has 256 ids"),
        ("[v2]", "[adaptive], compile: [on]", "its loop runs on the host"),
    ],
    ids=["fp16", "dense_flash", "vocabulary", "adaptive"],
)
def test_what_the_loop_does_not_run_is_refused_before(old: str, new: str, message: str) -> None:
    build(parse_matrix(MATRIX, "t.yaml"))
    text = MATRIX.replace(old, new)
    assert text != MATRIX
    with pytest.raises(PerfbenchError) as caught:
        build(parse_matrix(text, "t.yaml"))
    assert message in str(caught.value) and "; wanted " in str(caught.value)


def test_a_checkpointed_step_is_not_captured() -> None:
    model = replace(TINY, checkpoint_layers=(0, 1))
    cell = Cell("train_loop", 256, "v2", cuda_graph="on")
    assert attention_calls.why_not(cell, TINY) is None
    assert "captures no checkpointed step" in str(attention_calls.why_not(cell, model))
    assert attention_calls.why_not(replace(cell, cuda_graph="off"), model) is None


def test_an_older_nsa_has_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    assert older_nsa.has_training_loop()
    exists = older_nsa._exists
    monkeypatch.setattr(
        older_nsa, "_exists", lambda name: not name.startswith("nsa.train") and exists(name)
    )
    cell = Cell("train_loop", 256, "v2")
    reason = attention_calls.why_not(cell, TINY)
    assert reason is not None and "this nsa has no nsa.train" in reason
    assert attention_calls.why_not(replace(cell, workload="train"), TINY) is None
    with pytest.raises(PerfbenchError, match=r"no nsa\.train, whose loop it is; wanted a newer"):
        build(parse_matrix(MATRIX, "t.yaml"))


# Closed forms.


def test_the_least_work_of_a_step() -> None:
    cell = Cell("train_loop", 128, "v2", batch=4)
    assert least_bytes(cell, TINY) == least_bytes(replace(cell, workload="train"), TINY)
    at = {"batch": 4, "tokens": 128, "dense": False}
    flops = [roofline.step_flops(TINY, workload=w, **at) for w in ("train", "train_loop")]
    assert flops[0] == flops[1]
    weights = roofline.linear_parameters(TINY, dense=False)
    moved = {
        dtype: roofline.step_min_bytes(TINY, workload="train_loop", dtype=dtype, **at)
        for dtype in ("bf16", "fp32")
    }
    # bf16: read and written 2 + 2, master and both moments each 4 + 4
    assert moved == {"bf16": 28 * weights, "fp32": 24 * weights}


def test_a_plan_counts_the_proof_of_a_loop() -> None:
    matrix = parse_matrix(MATRIX, "t.yaml")
    loop = Cell("train_loop", 256, "v2", "off")
    train, forward = (replace(loop, workload=name) for name in ("train", "forward"))
    planned = [estimate_s(matrix, [cell], H100) for cell in (loop, train, forward)]
    assert planned[0] == planned[1] > planned[2]


# Matrices.


def test_the_pairs_of_train_and_loop_differ_in_nothing_else() -> None:
    card = replace(H100, triton_provider="triton 3.7.1", triton_reason="")
    plan = build(load_matrix(ROOT / "matrices/train-loop-h200.yaml"), card)
    cells = {name: set() for name in ("train", "train_loop")}
    for one in plan.cells:
        cells[one.axes.workload].add(replace(one.axes, workload="train"))
    assert cells["train"] == cells["train_loop"] and len(plan.cells) == 8
    assert {(cell.batch, cell.seq_len, cell.cuda_graph) for cell in cells["train"]} == {
        (8, 2048, "on")
    }
    assert plan.warnings == []


def test_the_founding_tables() -> None:
    card = replace(H100, triton_provider="triton 3.7.1", triton_reason="")
    plan = build(load_matrix(ROOT / "matrices/founding-h200.yaml"), card)
    eager = {
        (one.axes.seq_len, one.axes.path) for one in plan.cells if one.axes.cuda_graph == "off"
    }
    paths = ("adaptive", "v1", "v2", "masked", "triton", "dense")
    assert eager == {(2**n, path) for n in range(7, 12) for path in paths}
    on_cpu = build(load_matrix(ROOT / "matrices/founding-cpu.yaml"), CPU)
    assert {one.axes.workload for one in (*plan.cells, *on_cpu.cells)} == {"train_loop"}
    assert plan.warnings == on_cpu.warnings == []
    assert {one.axes.path for one in on_cpu.cells} == {*paths} - {"triton"}


# The largest batch that fits.

MATRIX_OF_BATCHES, PLAN = planned_from(TEXT.replace("[train]", "[train_loop]"))
FITS = {"v2": 1024, "dense": 2048}


class FullCard(cases.FakeExecutor):
    """Holds so many tokens of each path."""

    def execute(self, job: Job) -> Replicate:
        if job.axes.batch * job.axes.seq_len > FITS[job.axes.path]:
            return failed(job, Status.OOM, "planted")
        cell = next(one for one in PLAN.cells if one.cell_id == job.cell_id)
        return b.replicate(cell, job.replicate, gpu=False)


def test_the_largest_batch_of_the_loop(tmp_path: Path) -> None:
    run_ = cases.run(tmp_path, FullCard(), matrix=MATRIX_OF_BATCHES, plan=PLAN, seed=7).run
    found = {
        (one.like.path, one.like.seq_len): one for one in boundaries(PLAN.cells, rows_by_cell(run_))
    }
    fits = {key: one.fits.axes.batch for key, one in found.items() if one.fits is not None}
    assert fits == {("v2", 128): 8, ("v2", 256): 4, ("dense", 128): 16, ("dense", 256): 8}
    table = boundary.table(run_, rows_of(run_, judged(run_)))
    assert table is not None
    (line,) = [one for one in table.lines if "path=v2, seq_len=128" in one[0]]
    assert "workload=train_loop" in line[0] and (line[1], line[4]) == ("8", "16")


# The report.


def test_a_report_holds_the_loop_against_its_step() -> None:
    """97.5 % of the step's tok/s, and waits of the process that waited longest."""
    loop = Cell("train_loop", 2048, "v2", "on", batch=8)
    alone = replace(loop, path="masked")
    axes = (replace(loop, workload="train"), loop, alone)
    rows = []
    for cell in (planned := [b.planned_cell(one) for one in axes]):
        for number in range(3):
            waited = LoopLine(
                precision="bf16_master",
                batches=20,
                wait_p50_s=1e-4,
                wait_p95_s=(number + 1) * 1e-3,
                fetch_p50_s=0.0125,
                fetch_p95_s=0.02,
            )
            is_loop = cell.axes.workload == "train_loop"
            speed, line = (39_000.0, waited) if is_loop else (40_000.0, None)
            rows.append(b.replicate(cell, number, tok_per_s=speed, loop=line))
    run_ = b.with_rows(b.make_run(planned), rows)
    shown = rows_of(run_, judge(run_, None, Policies(GatePolicy())))
    (table,) = workloads.tables(run_, shown)
    assert table.title == "train_loop"
    by_path = {line[0]: dict(zip(table.head, line, strict=True)) for line in table.lines}
    assert by_path["v2"]["% of train"] == "97.5" and by_path["masked"]["% of train"] == "-"
    assert (by_path["v2"]["wait p50 ms"], by_path["v2"]["wait p95 ms"]) == ("0.1", "3")
    assert by_path["v2"]["fetch p50 ms"] == "12.5"


def test_a_cell_whose_batches_repeat_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    real = workload.build

    def spoiled(asked: Job) -> Workload:
        work = real(asked)
        assert work.loop is not None
        work.loop._rows.append(1)
        work.loop._rows.append(1)
        return work

    monkeypatch.setattr(workload, "build", spoiled)
    row = run(of())
    assert row.status is Status.PARITY and "wanted each of them once" in row.reason
    assert row.tok_per_s is None and row.samples_s == []
    assert json.loads(row.model_dump_json())["loop"]["precision"] == "fp32"
