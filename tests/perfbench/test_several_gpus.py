"""world_size in a matrix, what the gate wants of a row of several ranks, and how cells scale in the
report; no process is started.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nsa.config import preset
from perfbench.commands.options import RunOptions, TypedOptions
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate.judging import judge
from perfbench.gate.several_ranks import rank_findings
from perfbench.matrix import load_matrix
from perfbench.matrix.attention_calls import why_not
from perfbench.matrix.matrix import cells_of, config_sha256, parse_matrix, sentinels_of
from perfbench.matrix.policy import GatePolicy
from perfbench.records import Cell, Replicate, Run, Status, StepProof, Verdict
from perfbench.records.ranks import RankLine, RanksLine
from perfbench.report import several_gpus
from perfbench.report.rows import rows_of
from tests.perfbench import builders as b
from tests.perfbench.report_cases import alone, section
from tests.perfbench.schedule_cases import Executor, run

MATRIX = """\
version: 1
name: t
target: {gpu: none, count: 2}
model: tiny
axes:
  {workload: [train], seq_len: [128], path: [v2], fa2: [off], world_size: [1, 2],
   parallel: [ddp, fsdp]}
"""
ONE = Cell("train", 8192, "v2", "on")
TWO = Cell("train", 8192, "v2", "on", world_size=2)


def row_of(cell: Any, number: int = 0, *, exposed_s: float = 0.25, **changes: Any) -> Replicate:
    row = b.replicate(cell, number, **changes)
    if cell.axes.world_size == 1:
        return row
    faster = [0.9 * seconds for seconds in row.samples_s]
    lines = [
        RankLine(
            rank=rank,
            samples_s=row.samples_s if rank == 1 else faster,
            engaged=row.engaged,
            route=cell.route.counters,
            device_uuid_sha256=("ab" if rank == 0 else "cd") * 32,
            peak_memory_bytes=(rank + 1) * 2**30,
        )
        for rank in range(cell.axes.world_size)
    ]
    ranks = RanksLine(
        parallel="ddp",
        backend="nccl",
        ranks=lines,
        unsynchronised_step_s=0.75,
        exposed_s=exposed_s,
    )
    return row.model_copy(update={"ranks": ranks})


def with_line(row: Replicate, rank: int, **changes: Any) -> Replicate:
    assert row.ranks is not None
    lines = [one.model_copy(update=changes) if one.rank == rank else one for one in row.ranks.ranks]
    return row.model_copy(update={"ranks": row.ranks.model_copy(update={"ranks": lines})})


def found(row: Replicate) -> dict[Verdict, str]:
    return {one.verdict: one.reason for one in rank_findings(b.planned_cell(TWO), row)}


def test_one_process_is_one_cell_and_the_hash_of_a_cell_knows_no_such_axis() -> None:
    matrix = parse_matrix(MATRIX, "m.yaml")
    names = [cell.cell_id for cell in cells_of(matrix)]
    plain = "fa2=off,path=v2,seq_len=128,workload=train"
    assert names == [
        plain,
        f"{plain},world_size=2",
        plain.replace("path", "parallel=fsdp,path") + ",world_size=2",
    ]
    older = parse_matrix(MATRIX.replace(", world_size: [1, 2],\n   parallel: [ddp, fsdp]", ""), "m")
    assert config_sha256(matrix, plain) == config_sha256(older, plain)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (
            "count: 2",
            "count: 1",
            "m.yaml:3: target: got count: 1 and a cell of world_size 2, wanted",
        ),
        ("[1, 2]", "[0]", "got 0, wanted a whole number >= 1"),
        ("[ddp, fsdp]", "[fsdp2]", "did you mean 'fsdp'"),
        (
            "world_size: [1, 2],\n   parallel: [ddp, fsdp]}",
            "world_size: [1]}\nsentinels: [all_reduce]",
            "m.yaml:7: sentinels[0]: got all_reduce and no cell of several ranks, wanted",
        ),
    ],
)
def test_a_matrix_is_refused_with_its_line(old: str, new: str, words: str) -> None:
    with pytest.raises(PerfbenchError) as caught:
        parse_matrix(MATRIX.replace(old, new), "m.yaml")
    assert caught.value.exit_code is Exit.USAGE and words in str(caught.value)


@pytest.mark.parametrize("executor", ["ray", "slurm"])
def test_a_fleet_takes_no_matrix_of_several_ranks(executor: str) -> None:
    """A job of a fleet is of one card."""
    parsed = partial(RunOptions.parsed, argv=["perfbench"], typed=TypedOptions(executor=executor))
    with pytest.raises(PerfbenchError) as caught:
        parsed(parse_matrix(MATRIX, "m.yaml"))
    said = str(caught.value)
    assert caught.value.exit_code is Exit.USAGE and "\n" not in said
    assert said.startswith(f"got --executor {executor} and m.yaml with a cell of world_size 2")
    assert "wanted world_size 1 in every cell" in said and "--executor local" in said
    assert parsed(parse_matrix(MATRIX.replace("[1, 2]", "[1]"), "m.yaml")).fleet is not None
    one = TypedOptions(executor=executor, only=["world_size=1"])
    assert parsed(parse_matrix(MATRIX, "m.yaml"), typed=one).fleet is not None


def test_the_link_is_measured_by_the_most_ranks_and_the_card_by_one(tmp_path: Path) -> None:
    executor = Executor()
    run(tmp_path, executor, f"{MATRIX}sentinels: [gemm, all_reduce]\n")
    asked = [(job.sentinel, job.axes.world_size) for job in executor.jobs if job.sentinel]
    assert asked[:2] == [("gemm", 1), ("all_reduce", 2)]


@pytest.mark.parametrize(
    ("kept", "measured"), [(1, ["gemm"]), (2, ["gemm"]), (4, ["gemm", "all_reduce"])]
)
def test_a_part_without_the_most_ranks_leaves_the_link_out(kept: int, measured: list[str]) -> None:
    """Two ranks would else be compared with four of a baseline, and one has no link: ENV."""
    more = MATRIX.replace("[1, 2]", "[1, 2, 4]").replace("count: 2", "count: 4")
    matrix = parse_matrix(f"{more}sentinels: [gemm, all_reduce]\n", "m.yaml")
    planned = [b.planned_cell(cell) for cell in cells_of(matrix, [f"world_size={kept}"])]
    assert sentinels_of(matrix, planned) == measured
    planned += [b.planned_cell(cell) for cell in cells_of(matrix)]
    assert sentinels_of(matrix, planned) == ["gemm", "all_reduce"]


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (Cell("forward", 128, "v2", world_size=2), "wanted workload=train"),
        (Cell("train_loop", 128, "v2", world_size=2), "wanted workload=train"),
        (Cell("my.module:step", 128, "v2", world_size=2), "wanted workload=train"),
        (
            Cell("train", 128, "v2", cuda_graph="on", world_size=4, parallel="fsdp"),
            "wanted parallel=ddp",
        ),
        (Cell("train", 128, "v2", cuda_graph="on", world_size=4), None),
        (Cell("train", 128, "v2", compile="on", world_size=2, parallel="fsdp"), None),
        (TWO, None),
    ],
)
def test_what_several_ranks_do_not_serve_is_refused(cell: Cell, words: str | None) -> None:
    reason = why_not(cell, preset("tiny"))
    assert reason is None if words is None else words in (reason or "")


@pytest.mark.parametrize("name", ["ddp-cpu", "ddp-h200"])
def test_the_committed_matrices_hold_every_world_size_and_both_strategies(name: str) -> None:
    cells = cells_of(load_matrix(f"matrices/{name}.yaml"))
    sizes = {1, 2} if name == "ddp-cpu" else {1, 2, 4}
    shapes = {(cell.batch, cell.seq_len) for cell in cells}
    assert shapes == ({(1, 128)} if name == "ddp-cpu" else {(8, 2048), (1, 32768)})
    assert {(c.batch, c.seq_len, c.world_size, c.parallel) for c in cells} == {
        (*shape, size, parallel)
        for shape in shapes
        for size in sizes
        for parallel in (("ddp", "fsdp") if size > 1 else ("ddp",))
    }
    graphs = {(c.compile, c.cuda_graph, c.parallel) for c in cells if c.world_size > 1}
    eager = {("off", "off", "ddp"), ("off", "off", "fsdp")}
    compiled = {("on", "off", "ddp"), ("on", "off", "fsdp")}
    captured = {("off", "on", "ddp"), ("on", "on", "ddp")}
    assert graphs == (eager if name == "ddp-cpu" else eager | compiled | captured)


def test_the_gate_takes_a_row_with_every_rank_and_refuses_each_one_that_is_otherwise() -> None:
    good = row_of(b.planned_cell(TWO), 1)
    assert found(good) == {}
    assert "ranks none" in found(good.model_copy(update={"ranks": None}))[Verdict.FAILED]
    assert good.ranks is not None
    half = good.ranks.model_copy(update={"ranks": good.ranks.ranks[:1]})
    assert "ranks 0, wanted" in found(good.model_copy(update={"ranks": half}))[Verdict.FAILED]
    other = with_line(good, 1, engaged={**good.engaged, "sel.masked": 1})
    assert found(other)[Verdict.WRONG_PATH].startswith("rank 1 engaged")
    routed = with_line(good, 0, route=["sel.masked"])
    assert found(routed)[Verdict.WRONG_PATH].startswith("rank 0 engaged")
    shared = with_line(good, 1, device_uuid_sha256="ab" * 32)
    assert list(found(shared)) == [Verdict.ENV]
    faster = with_line(good, 1, samples_s=[0.5 * s for s in good.samples_s])
    assert list(found(faster)) == [Verdict.IMPOSSIBLE]
    fewer = with_line(good, 0, samples_s=good.samples_s[1:])
    assert list(found(fewer)) == [Verdict.IMPOSSIBLE]
    failed = good.model_copy(update={"status": Status.CRASH, "ranks": None})
    assert found(failed) == {}


def test_the_gate_judges_ranks_of_a_run() -> None:
    good = run_of(TWO)
    (cell,) = judge(good, None, GatePolicy()).cells
    assert cell.exit_code is Exit.OK, cell
    rows = [with_line(one, 1, engaged={"sel.masked": 1}) for one in good.replicates]
    (cell,) = judge(b.with_rows(good, rows), None, GatePolicy()).cells
    assert cell.verdict is Verdict.WRONG_PATH and "rank 1 engaged" in str(cell)


@pytest.mark.parametrize(
    "proof, words",
    [
        (None, "none was recorded"),
        (StepProof(ok=None, absent="older nsa, which shows no blocks"), "older nsa, which shows"),
        (StepProof(ok=None), "no reason was recorded"),
    ],
)
def test_a_step_without_proof_has_no_number(proof: StepProof | None, words: str) -> None:
    """Red as a cell without parity is; what the other replicates hold does not stand in for it."""
    good = run_of(TWO)
    rows = [
        one.model_copy(update={"step_proof": proof}) if one.replicate == 0 else one
        for one in good.replicates
    ]
    judgement = judge(b.with_rows(good, rows), None, GatePolicy())
    (cell,) = judgement.cells
    assert cell.verdict is Verdict.PARITY and judgement.exit_code is Exit.NOT_TRUE, cell
    assert cell.cand_tok_per_s is None and "no proof of the step" in cell.reason
    assert words in cell.reason
    stopped = {"status": Status.PARITY, "reason": "rank 1: no proof of the step: full"}
    rows = [one.model_copy(update={**stopped, "step_proof": proof}) for one in rows]
    (cell,) = judge(b.with_rows(good, rows), None, GatePolicy()).cells
    assert cell.verdict is Verdict.PARITY and cell.reason.startswith(stopped["reason"]), cell
    rest = [one for one in good.replicates if one.replicate > 0]
    (cell,) = judge(b.with_rows(good, rest), None, GatePolicy()).cells
    assert cell.verdict is Verdict.PARITY and "replicate 0 is not in the run" in cell.reason


NO_MEMORY = "the twin does not fit into memory next to the step"


@pytest.mark.parametrize(
    "proof, is_red",
    [
        (StepProof(ok=None, absent=NO_MEMORY), True),
        (StepProof(ok=None), True),
        (StepProof(ok=None, absent="not recorded: older nsa, which shows no blocks"), False),
        (StepProof(ok=True), False),
        (None, False),  # an older file
    ],
)
def test_a_step_of_one_process_without_its_proof_has_no_number(
    proof: StepProof | None, is_red: bool
) -> None:
    """The attention's proof says nothing of the rest of the step."""
    good = run_of(ONE)
    later = StepProof(ok=None, absent="replicate 0 proves it")
    rows = [
        one.model_copy(update={"step_proof": later if one.replicate else proof})
        for one in good.replicates
    ]
    judgement = judge(b.with_rows(good, rows), None, GatePolicy())
    (cell,) = judgement.cells
    assert judgement.exit_code is (Exit.NOT_TRUE if is_red else Exit.OK), cell
    assert (cell.cand_tok_per_s is None) is is_red
    if is_red and proof is not None:
        assert cell.verdict is Verdict.PARITY and "compared with nothing" in cell.reason
        assert (proof.absent or "no reason was recorded") in cell.reason


def run_of(*cells: Cell) -> Run:
    planned = [b.planned_cell(cell) for cell in cells]
    run = b.make_run(planned)
    rows = []
    for cell in planned:
        speed = 1000.0 if cell.axes.world_size == 1 else 1900.0
        for number in range(5):
            row = row_of(cell, number, tok_per_s=speed)
            if cell.axes.world_size > 1:
                row = row.model_copy(update={"step_proof": StepProof(ok=True)})
            rows.append(row)
    return b.with_rows(run, rows)


def table_of(run: Run) -> Any:
    return several_gpus.table(run, rows_of(run, judge(run, None, GatePolicy())))


def test_a_step_that_is_slower_without_collectives_shows_no_negative_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As FSDP2 of a host-bound step did on two H200s: -9.7 %."""
    for exposed_s, cells in (
        (-0.0125, ("-12.50", "-1.7 %")),
        (-0.06, ("not seen", "without collectives 8.7 % longer: not what binds")),
    ):
        monkeypatch.setitem(row_of.__kwdefaults__, "exposed_s", exposed_s)
        found = table_of(run_of(ONE, TWO))
        line = dict(zip(found.head, found.lines[0], strict=True))
        assert (line["exposed ms"], line["of the step"]) == cells


def test_efficiency_is_stated_where_one_rank_is_in_the_run_and_nowhere_else() -> None:
    found = table_of(run_of(ONE, TWO))
    line = dict(zip(found.head, found.lines[0], strict=True))
    assert len(found.lines) == 1
    assert line["efficiency"] == "95.0 %" and line["tok/s"] == "1,900"
    assert line["exposed ms"] == "250.00" and line["of the step"] == "25.0 %"
    assert line["slowest rank"] == "1" and line["GiB a rank"] == "2.0"
    without_one = table_of(run_of(TWO))
    assert dict(zip(without_one.head, without_one.lines[0], strict=True))["efficiency"] == "-"
    other_shape = table_of(run_of(Cell("train", 2048, "v2", "on"), TWO))
    assert dict(zip(other_shape.head, other_shape.lines[0], strict=True))["efficiency"] == "-"
    assert table_of(run_of(ONE)) is None


def test_the_report_says_how_it_was_measured() -> None:
    text = section(alone(run_of(ONE, TWO)), several_gpus.TITLE)
    assert "95.0 %" in text and "no_sync" in text and "slowest rank" in text
