"""The machine starts in A/A runs: a start is one card (or processor) in one run file.

What is no A/A is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import usable
from perfbench.records import Replicate, Run

Start = tuple[str, str]  # run id, hash of the card's UUID ('' on a processor)
Rows = Mapping[tuple[Start, str], list[Replicate]]  # by start and cell id, in the order of time


@dataclass(frozen=True, slots=True)
class StartCount:
    """One machine start: its run, the hash of its card's UUID (null on a processor), and what was
    measured in it.
    """

    run_id: str
    device_uuid_sha256: str | None
    cells: int
    replicates: int


def read(runs: Sequence[Run]) -> Rows:
    """The usable rows of ``runs`` by start and cell.

    PerfbenchError(USAGE): no run, another commit, environment or config of a cell among them,
    injected slowness, one named twice, or no cell with two replicates in one start.
    """
    _same_code(runs)
    _same_work(runs)
    return _starts(runs)


def counts(starts: Rows) -> list[StartCount]:
    """What each start measured, in the order of their names."""
    found = []
    for start in sorted({start for start, _ in starts}):
        mine = [rows for (where, _), rows in starts.items() if where == start]
        found.append(StartCount(start[0], start[1] or None, len(mine), sum(map(len, mine))))
    return found


def _same_code(runs: Sequence[Run]) -> None:
    if not runs:
        raise PerfbenchError(
            Exit.USAGE,
            "got no run to calibrate from, wanted A/A runs of one commit; name run folders",
        )
    first = runs[0].manifest
    for run in runs:
        manifest = run.manifest
        if manifest.injections:
            raise PerfbenchError(
                Exit.USAGE,
                f"{manifest.run_id} has injections {manifest.injections}; measure without --inject",
            )
        if (manifest.source.commit, manifest.source.dirty_sha256) != (
            first.source.commit,
            first.source.dirty_sha256,
        ):
            text = (
                f"{manifest.run_id} measured {_code(run)}, {first.run_id} {_code(runs[0])}; A/A"
                " needs the same code"
            )
            raise PerfbenchError(Exit.USAGE, f"{text}: measure again, or name runs of one commit")
        if manifest.environment.fingerprint() != first.environment.fingerprint():
            text = f"{manifest.run_id} was made in another environment than {first.run_id}"
            raise PerfbenchError(Exit.USAGE, f"{text}; calibrate each environment by itself")
    if len({run.manifest.run_id for run in runs}) < len(runs):
        raise PerfbenchError(
            Exit.USAGE,
            "the same run was named twice, and would count as two machine starts; name each once",
        )


def _same_work(runs: Sequence[Run]) -> None:
    """A cell's id says its axes, not its model: two matrices may mean different work by it."""
    known: dict[str, tuple[str, str]] = {}
    for run in runs:
        for cell in run.manifest.cells:
            config, where = known.setdefault(
                cell.cell_id, (cell.config_sha256, run.manifest.run_id)
            )
            if config != cell.config_sha256:
                text = (
                    f"{cell.cell_id} has config {cell.config_sha256[:12]} in {run.manifest.run_id},"
                    f" {config[:12]} in {where}"
                )
                raise PerfbenchError(
                    Exit.USAGE, f"{text}; A/A needs the same work: name runs of one matrix"
                )


def _code(run: Run) -> str:
    source = run.manifest.source
    changes = " with changes" if source.dirty_sha256 else ""
    return f"{(source.commit or 'an unknown commit')[:12]}{changes}"


def _starts(runs: Sequence[Run]) -> Rows:
    rows: dict[tuple[Start, str], list[Replicate]] = {}
    for run in runs:
        for cell_id in sorted({row.cell_id for row in run.replicates}):
            for row in sorted(
                usable(run.of_cell(cell_id)), key=lambda one: (one.started_utc, one.replicate)
            ):
                rows.setdefault(
                    ((run.manifest.run_id, row.device_uuid_sha256 or ""), cell_id), []
                ).append(row)
    most = max((len(found) for found in rows.values()), default=0)
    if most < 2:
        ids = ", ".join(run.manifest.run_id for run in runs)
        text = (
            f"{ids}: at most {most} usable replicates of a cell in one machine start, wanted two or"
            " more"
        )
        raise PerfbenchError(Exit.USAGE, f"{text}; measure with processes: 5")
    return rows
