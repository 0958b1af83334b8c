"""limits.oom: find_boundary: the largest batch that fits is measured, what is beyond is no
failure.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from perfbench.errors import Exit
from perfbench.gate.boundary import boundaries
from perfbench.gate.coverage import rows_by_cell
from perfbench.gate.judgement import Judgement
from perfbench.gate.judging import judge
from perfbench.matrix.matrix import parse_matrix, policies
from perfbench.records.baseline_file import Baseline
from perfbench.records.job import Job, failed
from perfbench.records.rows import Replicate, Run, Status
from perfbench.records.verdict import Verdict
from perfbench.report import boundary
from perfbench.report.rows import rows_of
from tests.perfbench import builders as b
from tests.perfbench import runner_cases as cases
from tests.perfbench.plan_cases import planned_from

TEXT = """\
version: 1
name: t
target: {gpu: none}
model: tiny
axes:
  workload: [train]
  seq_len: [128, 256]
  path: [v2, dense]
  fa2: [off]
  dtype: [fp32]
  batch: [1, 2, 4, 8, 16]
measure: {processes: 2}
limits: {timeout_s: 30, oom: find_boundary}
gate: {min_replicates: 2}
"""
MATRIX, PLAN = planned_from(TEXT)
CELLS = {cell.cell_id: cell for cell in PLAN.cells}
TOKENS = {"v2": 1024, "dense": 2048}  # batch x length that fits, at most


class SmallMemory(cases.FakeExecutor):
    """Runs out of memory beyond so many tokens of a path, as `fits` says."""

    def __init__(self, fits: dict[str, int]) -> None:
        super().__init__()
        self.fits = fits

    def execute(self, job: Job) -> Replicate:
        self.jobs.append(job)
        if job.axes.batch * job.axes.seq_len > self.fits[job.axes.path]:
            return failed(job, Status.OOM, "planted")
        return b.replicate(CELLS[job.cell_id], job.replicate, gpu=False)


def measured(folder: Path, fits: dict[str, int] = TOKENS, text: str = TEXT, seed: int = 7) -> Run:
    matrix = parse_matrix(text, "m.yaml")
    return cases.run(folder, SmallMemory(fits), matrix=matrix, plan=PLAN, seed=seed).run


def judged(run: Run, baseline: Baseline | None = None) -> Judgement:
    return judge(run, baseline, policies(parse_matrix(run.manifest.matrix_text, "m.yaml")))


@pytest.mark.parametrize("seed", range(5))
def test_each_path_tries_one_batch_too_many_and_no_more(tmp_path: Path, seed: int) -> None:
    run = measured(tmp_path, seed=seed)
    out = {
        (r.axes.path, r.axes.seq_len, r.axes.batch)
        for r in run.replicates
        if r.status is Status.OOM
    }
    # 256 x 8 is longer and larger than 128 x 16 where that came first, and is then not tried
    assert ("v2", 128, 16) in out and len([one for one in out if one[0] == "v2"]) <= 2
    assert {one for one in out if one[0] == "dense"} == {("dense", 256, 16)}
    found = {
        (one.like.path, one.like.seq_len): one for one in boundaries(PLAN.cells, rows_by_cell(run))
    }
    fits = {key: one.fits.axes.batch for key, one in found.items() if one.fits is not None}
    assert fits == {("v2", 128): 8, ("v2", 256): 4, ("dense", 128): 16, ("dense", 256): 8}
    assert [cell.axes.batch for cell in found["v2", 256].beyond] == [8, 16]
    assert found["dense", 128].beyond == ()


def test_what_fits_is_judged_and_what_does_not_is_no_failure(tmp_path: Path) -> None:
    run = measured(tmp_path)
    judgement = judged(run)
    assert judgement.exit_code is Exit.OK
    assert {
        cell.axes.batch
        for cell in judgement.cells
        if cell.axes.path == "v2" and cell.axes.seq_len == 128
    } == {1, 2, 4, 8}
    strict = run.manifest.matrix_text.replace("find_boundary", "record_and_skip_larger")
    assert judged(b.with_manifest(run, matrix_text=strict)).exit_code is Exit.FAILED


def test_a_boundary_that_moved_down_is_red(tmp_path: Path) -> None:
    """The baseline fits batch 8 of v2 at 128 tokens, the candidate 4: a leak of memory."""
    baseline = b.baseline_of(measured(tmp_path / "a"))
    assert judged(measured(tmp_path / "b"), baseline).exit_code is Exit.OK
    judgement = judged(measured(tmp_path / "c", {**TOKENS, "v2": 512}), baseline)
    lost = {c.cell_id: c.verdict for c in judgement.cells if c.verdict is Verdict.FAILED}
    assert judgement.exit_code is Exit.FAILED
    assert {CELLS[name].axes.batch * CELLS[name].axes.seq_len for name in lost} == {1024}


def test_a_path_that_fits_nowhere_is_a_failure(tmp_path: Path) -> None:
    judgement = judged(measured(tmp_path, {**TOKENS, "v2": 1}))
    assert judgement.exit_code is Exit.FAILED
    assert {cell.axes.path for cell in judgement.cells if cell.verdict is Verdict.FAILED} == {"v2"}


def test_the_report_names_the_largest_batch_and_the_first_that_does_not_fit(tmp_path: Path) -> None:
    run = measured(tmp_path)
    table = boundary.table(run, rows_of(run, judged(run)))
    assert table is not None and len(table.lines) == 3
    (v2,) = [line for line in table.lines if "path=v2, seq_len=128" in line[0]]
    assert (v2[1], v2[4]) == ("8", "16")
    everything = measured(tmp_path / "all", {"v2": 10**9, "dense": 10**9})
    assert boundary.table(everything, rows_of(everything, judged(everything))) is None
