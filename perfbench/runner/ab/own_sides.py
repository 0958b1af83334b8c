"""Which of the user's own steps pairs cannot settle: those whose file both sides would share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from perfbench.gate import files_of
from perfbench.matrix import step_folder
from perfbench.records import Baseline, BaselineProblem, Run


def shared_steps(
    run: Run, cells: Iterable[str], baseline: Baseline | BaselineProblem, repository: Path
) -> dict[str, str]:
    """Cell -> why pairs with the baseline's commit would say nothing: its step's file lies outside
    of ``repository``, so that both sides would run today's, and the baseline's was another.
    """
    if isinstance(baseline, BaselineProblem):
        return {}
    folder = step_folder(run.manifest.matrix_path).resolve()
    now = files_of(run)
    file_of = {one.workload: one.file for one in run.manifest.own_steps}
    found = {}
    for cell_id in cells:
        then = baseline.cells.get(cell_id)
        workload = "" if then is None else then.axes.workload
        if then is None or workload not in now or now[workload] == then.own_step_sha256:
            continue
        file = (folder / file_of[workload]).resolve()
        if not file.is_relative_to(repository.resolve()):
            found[cell_id] = (
                f"{file_of[workload]} of {workload} is not the baseline's and lies outside of"
                f" {repository}, so that both sides of a pair would run today's; keep it in the"
                " repository, or promote a run with it"
            )
    return found
