"""A user's own step is judged by what it declares: its comparisons, what the profiler saw, its
file; what it does not declare is named with its verdict, and never passes for proved.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from perfbench.gate.judgement import Finding
from perfbench.records import (
    Baseline,
    OwnStepLine,
    PlannedCell,
    Replicate,
    Run,
    Status,
    Verdict,
)

SHOWN = 12  # characters of a digest


def own_line(rows: Iterable[Replicate]) -> OwnStepLine | None:
    """What a cell's processes say of its step: the word of one that was profiled, else of any; what
    another did not prove is not proved.
    """
    known = [(row.own_step, row.profile) for row in rows if row.own_step is not None]
    if not known:
        return None
    line = next((line for line, profile in known if profile is not None), known[0][0])
    not_proved = dict.fromkeys(word for one, _ in known for word in one.not_proved)
    lacking = {_subject(word) for word in [*not_proved] if word not in line.not_proved}
    return line.model_copy(
        update={
            "proved": [word for word in line.proved if _subject(word) not in lacking],
            "not_proved": list(dict.fromkeys([*line.not_proved, *not_proved])),
        }
    )


def _subject(word: str) -> str:
    """'parity' of 'parity (none declared)', and of 'parity by its own reference ...'."""
    return word.partition(" ")[0].rstrip(":")


def own_findings(cell: PlannedCell, row: Replicate, files: Mapping[str, str]) -> Iterator[Finding]:
    """What is wrong with a row of an own step, besides what is asked of every row; ``files`` are
    the digests that the manifest has, by workload.
    """
    line = row.own_step
    if line is None:
        if row.status is Status.OK:
            text = "no record of what the step declares: measure again"
            yield Finding(Verdict.FAILED, "own step", text)
        return
    over = {name: ratio for name, ratio in line.comparisons.items() if not ratio <= 1}
    if over and row.status is Status.OK:
        said = "; ".join(f"{name} {ratio:.3g} x tolerance" for name, ratio in sorted(over.items()))
        yield Finding(Verdict.PARITY, "parity", f"differs from the step's own reference: {said}")
    planned = files.get(cell.axes.workload)
    if line.sha256 != planned:
        text = (
            f"its process loaded a file with sha256 {line.sha256[:SHOWN]}, and the manifest says"
            f" {planned[:SHOWN] if planned else 'none'}: it changed while the run was measured;"
            " measure again"
        )
        yield Finding(Verdict.ENV, "own step", text)


def own_path_problems(cell: PlannedCell, row: Replicate) -> list[str]:
    """Counters of nsa that the matrix's `expect` names and that did not run, or the reverse; no
    other is planned.
    """
    ran = {name for name, count in row.engaged.items() if count > 0}
    problems = [f"expected {name} never ran" for name in cell.expect.engaged if name not in ran]
    problems += [
        f"{name} ran, which is forbidden here" for name in cell.expect.forbidden if name in ran
    ]
    if row.config_sha256 != cell.config_sha256:
        problems.append(
            f"measured config {row.config_sha256[:12]}, planned {cell.config_sha256[:12]}"
        )
    return problems


def files_of(run: Run) -> dict[str, str]:
    """Workload -> sha256 of its file, as the manifest has it."""
    return {one.workload: one.sha256 for one in run.manifest.own_steps}


def changed_files(run: Run, baseline: Baseline) -> list[str]:
    """A note for each own step whose file is another than the baseline's: its speed is of other
    code of the user's.
    """
    now = files_of(run)
    then: dict[str, set[str]] = {}
    for cell in baseline.cells.values():
        if cell.own_step_sha256 is not None:
            then.setdefault(cell.axes.workload, set()).add(cell.own_step_sha256)
    return [
        f"the file of {workload} is not the baseline's: sha256"
        f" {', '.join(sorted(one[:SHOWN] for one in then[workload]))}, now {sha256[:SHOWN]}"
        for workload, sha256 in sorted(now.items())
        if workload in then and then[workload] != {sha256}
    ]
