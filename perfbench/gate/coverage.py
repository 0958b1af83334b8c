"""What a run was asked to measure and what it holds: the selection, the rows that count, what is
missing.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from perfbench.errors import Exit, PerfbenchError
from perfbench.gate.evidence import WALL
from perfbench.gate.judgement import CellVerdict, Finding
from perfbench.matrix import GatePolicy
from perfbench.records import EXIT_OF, Cell, Replicate, Run, Status, Verdict, select_cells

if TYPE_CHECKING:
    from perfbench.records import Baseline, BaselineCell


def rows_by_cell(run: Run) -> dict[str, list[Replicate]]:
    rows: dict[str, list[Replicate]] = {}
    for row in run.replicates:
        rows.setdefault(row.cell_id, []).append(row)
    return rows


def usable(rows: Iterable[Replicate]) -> list[Replicate]:
    """Finished, unthrottled replicates with a speed, by number; of a repeated replicate only the
    last row counts.
    """
    last = {row.replicate: row for row in rows}
    kept = (last[number] for number in sorted(last))
    return [
        row
        for row in kept
        if row.status is Status.OK and row.tok_per_s is not None and not row.is_throttled
    ]


def paired_rows(
    base: Run, candidate: Run, base_rows: Sequence[Replicate], rows: Sequence[Replicate]
) -> dict[int, tuple[Replicate, Replicate]]:
    """Replicate number -> both usable rows of one cell, without those that an interruption
    separates.
    """
    theirs, ours = ({row.replicate: row for row in usable(found)} for found in (base_rows, rows))
    resumed = [one.resumed_utc for run in (base, candidate) for one in run.resumed]
    both = {number: (theirs[number], ours[number]) for number in sorted(set(theirs) & set(ours))}
    return {number: pair for number, pair in both.items() if are_adjacent(*pair, resumed)}


def are_adjacent(one: Replicate, other: Replicate, resumed_utc: Iterable[str]) -> bool:
    """Whether two rows may be compared as a pair: on one card, and not interrupted between."""
    return one.card == other.card and not interrupted_between(one, other, resumed_utc)


def interrupted_between(one: Replicate, other: Replicate, resumed_utc: Iterable[str]) -> bool:
    """Whether the measurement was resumed between the two rows: the machine may have changed in
    between.
    """
    first, last = sorted((one.started_utc, other.started_utc))
    return any(first < again <= last for again in resumed_utc)


def clock_events(rows: Iterable[Replicate]) -> str:
    events = sorted(
        {event for row in rows if row.telemetry for event in row.telemetry.clock_event_reasons}
    )
    return ", ".join(events) or "no clock event was recorded"


def selected_ids(run: Run, axes_of: Mapping[str, Cell]) -> set[str]:
    """Which of the named cells this run was asked to measure, over all its slices.

    A plan that holds only its own selection cannot be widened by a later ``--resume``, so later
    selections count only where the plan holds more.
    """
    first = _ids_of(axes_of, run.manifest.only)
    if all(cell.cell_id in first for cell in run.manifest.cells):
        return first
    return first.union(*(_ids_of(axes_of, slice_.only) for slice_ in run.resumed))


def _ids_of(axes_of: Mapping[str, Cell], only: list[str]) -> set[str]:
    if not only:
        return set(axes_of)
    try:
        chosen = set(select_cells(axes_of.values(), only))
    except ValueError as error:
        raise PerfbenchError(
            Exit.USAGE, f"the run file's own selection cannot be read: {error}; measure again"
        ) from error
    return {cell_id for cell_id, cell in axes_of.items() if cell in chosen}


def reproduce(run: Run, cell_id: str) -> str:
    """The command that measures this one cell again."""
    matrix, only = shlex.quote(run.manifest.matrix_path), shlex.quote(f"cell={cell_id}")
    return f"perfbench run {matrix} --only {only}"


def missing(run: Run, policy: GatePolicy, cell_id: str, base: BaselineCell) -> CellVerdict:
    """The verdict on a cell of the baseline that was selected, and is not in the plan."""
    why = next(
        (
            str(one.get("reason", ""))
            for one in run.manifest.excluded
            if one.get("cell_id") == cell_id
        ),
        "",
    )
    reason = (
        f"in the baseline, but not in the plan{f' (excluded: {why})' if why else ''}: measure it,"
        " or promote a baseline without it"
    )
    verdict = Verdict.MISSING if policy.missing == "fail" else Verdict.WATCH
    return CellVerdict(
        cell_id,
        base.axes,
        verdict,
        reason,
        base.speed,
        reproduce=reproduce(run, cell_id),
        metric=WALL,
    )


def nothing_compared(
    run: Run, baseline: Baseline | None, cells: list[CellVerdict], findings: list[Finding]
) -> list[Finding]:
    """A gate that compared nothing is not green."""
    if not run.replicates:
        return [
            Finding(
                Verdict.FAILED,
                "nothing",
                f"nothing was measured: {len(run.manifest.cells)} cells planned, no replicate"
                " recorded",
            )
        ]
    red = any(EXIT_OF[f.verdict] is not Exit.OK for f in findings) or any(
        cell.exit_code is not Exit.OK for cell in cells
    )
    if baseline is None or red or any(cell.compared for cell in cells):
        return []
    text = (
        f"nothing was compared: none of the {len(cells)} cells is in the baseline"
        f" ({len(baseline.cells)} cells)"
    )
    if any(cell.verdict is Verdict.UNSTABLE for cell in cells):
        text = (
            f"nothing was compared: {sum(cell.verdict is Verdict.UNSTABLE for cell in cells)} of"
            f" {len(cells)} cells are UNSTABLE"
        )
        return [
            Finding(
                Verdict.FAILED,
                "nothing",
                f"{text} and none has a speed that counts; cool the card, then measure again",
            )
        ]
    return [Finding(Verdict.FAILED, "nothing", f"{text}; is it the baseline of this matrix?")]
