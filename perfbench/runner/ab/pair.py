"""A pair: one folder with two ordinary run files, ``a/run.jsonl`` (the base) and ``b/run.jsonl``
(the candidate).

Replicate r of a is to be compared with replicate r of b: they were measured one after the other.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from perfbench.errors import unwritable
from perfbench.gate import MeasuredPairs, next_looks, paired_rows, rows_by_cell
from perfbench.matrix import Matrix, Policies
from perfbench.records import (
    COMPRESSED_RUN_FILE,
    RUN_FILE,
    ConfirmationPlan,
    Environment,
    Manifest,
    Replicate,
    Resumed,
    Run,
    RunWriter,
    Status,
    new_run_id,
    open_for_resume,
    read_run,
    utc_now,
)
from perfbench.runner.ab.version_plan import VersionPlan
from perfbench.runner.resume import check_cells, check_same_machine
from perfbench.runner.run import RunSpec, parse_injection

NAMES = ("a", "b")
BEGUN_WITHIN_S = 60.0  # the two manifests are written one after the other


@dataclass(frozen=True, slots=True)
class Pair:
    """Both runs of one A/B.

    ``missing``: the (cell, number) of planned pairs that do not count, of cells that no side
    failed: they were not measured, the card throttled, or an interruption came between the two
    rows. A pair with a sequential plan may leave any out: `gate.next_looks` says what it lacks.
    """

    folder: Path
    base: Run
    candidate: Run
    missing: list[tuple[str, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PairSpec:
    """What to measure, and how; a resumed pair keeps its own seed, number of pairs, plan and
    injections (which go to side b).

    ``pairs`` of each cell, at most, where a ``plan`` looks at them before the last. ``name`` begins
    the ids of both runs, and no other pair may have it; by default the name of the pair's folder.
    ``looks``: how many pairs each planned cell must have at its next look, by the gate's rule
    unless a caller has one of its own. ``pair_s``: cell -> about how long one pair takes.
    """

    matrix: Matrix
    only: list[str]
    pairs: int
    seed: int
    argv: list[str]
    injections: list[str] = field(default_factory=list)
    budget_s: float | None = None
    name: str = ""
    plan: ConfirmationPlan | None = None
    policies: Policies | None = None  # that settle a planned cell; the matrix's by default
    looks: Callable[[MeasuredPairs, Policies], dict[str, int]] = next_looks
    pair_s: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Opened:
    """A run file that is being written, and what it held before."""

    writer: RunWriter
    manifest: Manifest
    rows: list[Replicate]
    resumed_utc: list[str] = field(default_factory=list)


def read_pair(folder: Path) -> Pair:
    """A pair from its folder; PerfbenchError(USAGE) where it is none."""
    base, candidate = (read_run(folder / name) for name in NAMES)
    return Pair(folder, base, candidate, _missing(base, candidate))


def is_pair(folder: Path) -> bool:
    """Whether both runs have begun; a process that was killed before that has measured nothing."""
    return all(_has_begun(folder / name) for name in NAMES)


def are_paired(base: Run, candidate: Run) -> bool:
    """Whether these are the two runs of one A/B: one name, seed, number of pairs and matrix, and
    begun together.
    """
    one, other = base.manifest, candidate.manifest
    named = (
        one.run_id.endswith("-a")
        and other.run_id.endswith("-b")
        and one.run_id[:-2] == other.run_id[:-2]
    )
    alike = (one.seed, one.replicates, one.matrix_sha256) == (
        other.seed,
        other.replicates,
        other.matrix_sha256,
    )
    return named and alike and _begun_together(one.created_utc, other.created_utc)


def _begun_together(one_utc: str, other_utc: str) -> bool:
    """Older pairs of a `check` are named after the base's commit alone, which other sessions
    share.
    """
    try:
        apart = datetime.fromisoformat(one_utc) - datetime.fromisoformat(other_utc)
    except (ValueError, TypeError):  # edited by hand
        return False
    return abs(apart.total_seconds()) <= BEGUN_WITHIN_S


def _has_begun(folder: Path) -> bool:
    """A compressed run has ended; what is wrong with its file is for ``read`` to say."""
    if (folder / COMPRESSED_RUN_FILE).is_file():
        return True
    try:
        if not (folder / RUN_FILE).is_file():  # a pipe would wait for its other end
            return False
        with (folder / RUN_FILE).open("rb") as opened:
            return opened.readline().endswith(b"\n")
    except OSError:
        return False


def _missing(base: Run, candidate: Run) -> list[tuple[str, int]]:
    rows, others = rows_by_cell(base), rows_by_cell(candidate)
    planned = {cell.cell_id for cell in candidate.manifest.cells}
    found: list[tuple[str, int]] = []
    if base.manifest.confirmation is not None:
        return found
    for cell_id in (cell.cell_id for cell in base.manifest.cells if cell.cell_id in planned):
        mine, theirs = rows.get(cell_id, []), others.get(cell_id, [])
        if all(row.status is Status.OK for row in [*mine, *theirs]):
            count = paired_rows(base, candidate, mine, theirs)
            found += [
                (cell_id, pair) for pair in range(base.manifest.replicates) if pair not in count
            ]
    return found


def new_pair_folder(out: Path, environment: Environment, commit: str | None) -> Path:
    """Where a new pair goes; nothing is made yet."""
    return out / new_run_id(datetime.now(UTC), environment.gpu_slug, commit)


def create(
    spec: PairSpec, version: VersionPlan, folder: Path, name: str, environment: Environment
) -> Opened:
    """Make ``folder/name/run.jsonl``, which must not exist.

    USAGE where an injection names no cell, or nothing can be written.
    """
    injections = list(spec.injections) if name == "b" else []
    for text in injections:
        parse_injection(text, [cell.cell_id for cell in version.plan.cells])
    one = RunSpec(
        version.plan,
        spec.matrix,
        environment,
        version.checkout.source,
        spec.argv,
        spec.seed,
        list(spec.only),
        injections,
    )
    own = {
        "run_id": f"{spec.name or folder.name}-{name}",
        "replicates": spec.pairs,
        "confirmation": spec.plan,
        "sentinels": [],  # the other side is the sentinel
    }
    manifest = one.manifest().model_copy(update=own)
    home = folder / name
    try:
        home.mkdir(parents=True)
        fd = os.open(home / RUN_FILE, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
    except OSError as error:
        raise unwritable(home, error, "choose another --out DIR") from None
    with ExitStack() as until_written:
        writer = until_written.enter_context(RunWriter(home, fd))
        writer.append(manifest)
        until_written.pop_all()
    return Opened(writer, manifest, [])


def resume(
    spec: PairSpec, version: VersionPlan, folder: Path, name: str, environment: Environment
) -> Opened:
    """Open ``folder/name`` to append; refuses other code, cells, rules, settings or software, as
    any resumed run.
    """
    with ExitStack() as until_checked:
        writer, found = open_for_resume(folder / name)
        until_checked.enter_context(writer)
        check_same_machine(found.manifest, environment, version.checkout.source, writer.path)
        check_cells(found.manifest, version.plan, spec.matrix, spec.only, writer.path)
        writer.append(
            Resumed(
                resumed_utc=utc_now(), argv=spec.argv, environment=environment, only=list(spec.only)
            )
        )
        until_checked.pop_all()
    return Opened(
        writer, found.manifest, list(found.replicates), [one.resumed_utc for one in found.resumed]
    )
