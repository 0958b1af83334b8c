"""The minutes of `plan` against what committed runs took, start to end, by their own lines.

Row of the faults: first run.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import pytest

from nsa.capability import assumed
from perfbench.matrix import parse_matrix
from perfbench.matrix.plan import estimate_s
from perfbench.records import Run, read_run

ROOT = Path(__file__).parents[2]
WITHIN = 1.5


def complete() -> Iterator[Path]:
    """Runs of `run` that were measured from end to end without a pause, with today's proofs where
    they take long; sides of pairs take turns.
    """
    homes = [ROOT / "reports" / "evidence", Path(__file__).parents[1] / "data" / "runs"]
    for path in sorted(file for home in homes for file in home.rglob("run.jsonl*")):
        if path.parent.name in ("a", "b"):
            continue
        run = read_run(path)
        cells = {row.cell_id for row in run.replicates}
        slow = run.manifest.environment.gpu_slug != "cpu" and any(
            row.axes.workload == "train" for row in run.replicates
        )
        if slow and not any(row.step_proof is not None for row in run.replicates):
            continue
        if len(run.replicates) == len(cells) * run.manifest.replicates and not run.resumed:
            yield path


def seconds(run: Run) -> float:
    ends = [moment(row.started_utc) + row.wall_s for row in run.replicates]
    return max(ends) - moment(run.manifest.created_utc)


def moment(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


PATHS = list(complete())


@pytest.mark.parametrize("path", PATHS, ids=lambda path: "-".join(path.parts[-3:-1]))
def test_the_plans_minutes_hold(path: Path) -> None:
    """.7 minutes were planned for what took 3.5: the start of each block and the proofs were not
    counted, nor the compiler.
    """
    run = read_run(path)
    manifest = run.manifest
    matrix = parse_matrix(manifest.matrix_text, manifest.matrix_path)
    ran = {row.cell_id for row in run.replicates}
    cells = [cell.axes for cell in manifest.cells if cell.cell_id in ran]
    slug = manifest.environment.gpu_slug
    capability = assumed("none" if slug == "cpu" else "h200")
    asked = len(run.replicates) / len(cells) / matrix.measure.processes  # --only, or a smaller plan
    estimated = asked * estimate_s(matrix, cells, capability)
    assert estimated / WITHIN < seconds(run) < estimated * WITHIN


def test_runs_of_both_kinds_are_held_against_it() -> None:
    slugs = [read_run(path).manifest.environment.gpu_slug for path in PATHS]
    assert slugs.count("cpu") >= 5 and slugs.count("h200") >= 6
