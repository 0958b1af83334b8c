"""A pair: one folder with two ordinary run files, ``a/run.jsonl`` (the base) and ``b/run.jsonl`` (the candidate).

Replicate r of a is to be compared with replicate r of b: they were measured one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from perfbench import runfile, runner
from perfbench.checkout import Side
from perfbench.isolate import utc_now
from perfbench.matrix import Matrix
from perfbench.result import Environment, Manifest, Replicate, Resumed, Run
from perfbench.resumable import check_cells, check_same_ground
from perfbench.runfile import FILE_NAME, RunWriter
from perfbench.sideplan import SidePlan
from perfbench.verdict import Exit, PerfbenchError

NAMES = ("a", "b")


@dataclass(frozen=True, slots=True)
class Pair:
    """Both runs of one A/B; ``missing`` are the (cell, block) that the budget left out."""

    folder: Path
    base: Run
    candidate: Run
    missing: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Task:
    """What to measure, and how; of a resumed pair its own seed, blocks and injections (which go to side b) stay."""

    matrix: Matrix
    only: list[str]
    blocks: int
    seed: int
    argv: list[str]
    injections: list[str] = field(default_factory=list)
    budget_s: float | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A run file that is being written, and the rows that it held before."""

    writer: RunWriter
    manifest: Manifest
    rows: list[Replicate]


def read(folder: Path, missing: Sequence[tuple[str, int]] = ()) -> Pair:
    """A pair from its folder; PerfbenchError(USAGE) where it is none."""
    return Pair(folder, runfile.read(folder / "a"), runfile.read(folder / "b"), list(missing))


def is_pair(folder: Path) -> bool:
    return all((folder / name / FILE_NAME).is_file() for name in NAMES)


def are_paired(base: Run, candidate: Run) -> bool:
    """Whether these are the two runs of one A/B, by the name that they share."""
    one, other = base.manifest.run_id, candidate.manifest.run_id
    return one.endswith("-a") and other.endswith("-b") and one[:-2] == other[:-2]


def new_folder(out: Path, environment: Environment, commit: str | None) -> Path:
    """Where a new pair goes; nothing is made yet."""
    return out / runfile.new_run_id(datetime.now(UTC), environment.gpu_slug, commit)


def create(task: Task, side: Side, plan: SidePlan, folder: Path, name: str, environment: Environment) -> Opened:
    """Make ``folder/name/run.jsonl``, which must not exist. USAGE where an injection names no cell, or nothing can be written."""
    cells = [cell.cell_id for cell in plan.plan.cells]
    injections = list(task.injections) if name == "b" else []
    for text in injections:
        runner.parse_injection(text, cells)
    made = runner.manifest_of(plan.plan, task.matrix, environment, side.source, task.argv, task.seed, list(task.only), injections, [])
    manifest = made.model_copy(update={"run_id": f"{folder.name}-{name}", "replicates": task.blocks})
    home = folder / name
    try:
        home.mkdir(parents=True)
        fd = os.open(home / FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
    except OSError as error:
        raise PerfbenchError(Exit.USAGE, f"{home} cannot be written: {error.strerror}. Next: choose another --out DIR") from None
    with ExitStack() as until_written:
        writer = until_written.enter_context(RunWriter(home, fd))
        writer.append(manifest)
        until_written.pop_all()
    return Opened(writer, manifest, [])


def go_on(task: Task, side: Side, plan: SidePlan, folder: Path, name: str, environment: Environment) -> Opened:
    """Open ``folder/name`` to append; refuses other code, cells, rules, settings or software, as any resumed run."""
    with ExitStack() as until_checked:
        writer, found = runfile.open_for_resume(folder / name)
        until_checked.enter_context(writer)
        check_same_ground(found.manifest, environment, side.source, writer.path)
        check_cells(found.manifest, plan.plan, task.matrix, task.only, writer.path)
        writer.append(Resumed(resumed_utc=utc_now(), argv=task.argv, environment=environment, only=list(task.only)))
        until_checked.pop_all()
    return Opened(writer, found.manifest, list(found.replicates))
