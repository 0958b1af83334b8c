"""Traces of both versions, one untimed step each: automatically after a red or SUSPECT verdict, or
of one cell by `perfbench trace`.

A trace explains a verdict and never makes one: whatever goes wrong here is a sentence in the
report, not an exit code.
"""

from __future__ import annotations

import hashlib
import random
import string
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from perfbench.errors import PerfbenchError
from perfbench.gate import CellVerdict, Judgement
from perfbench.matrix import model_with, own_folder_for, step_folder, trained_for
from perfbench.records import (
    Injection,
    Job,
    Kernels,
    PlannedCell,
    Status,
    Verdict,
    table_path,
    whole_file,
)
from perfbench.runner import (
    Checkout,
    MeasuringContext,
    checked_out,
    own_checkout,
    parse_injection,
    plan_of_version,
    prepared_versions,
)
from perfbench.tracing import diff
from perfbench.tracing.diff import Traced, TraceDiff
from perfbench.tracing.places import places_in

if TYPE_CHECKING:
    from perfbench.matrix import Matrix
    from perfbench.records import Run
    from perfbench.runner import Executor

TRACE_FOLDER = "traces"
# A name may have 255 bytes almost everywhere, and a complete Windows path 260 characters.
SLUG_CHARS = 150
_PLAIN = frozenset(string.ascii_lowercase + string.digits + "_-")
_RESERVED = frozenset(
    ["con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(1, 10))]
)
TRACED_VERDICTS = (Verdict.REGRESSED, Verdict.WRONG_PATH, Verdict.SUSPECT)


@dataclass(frozen=True, slots=True)
class TracedPair:
    """Both versions behind a judgement, by name.

    ``run`` is the candidate's. ``base``: cell -> revision or folder, None where it is not known.
    ``candidate``: likewise, None for the running checkout.
    """

    run: Run
    matrix: Matrix
    context: MeasuringContext
    base: Mapping[str, str | None]
    candidate: str | None = None


@dataclass(frozen=True, slots=True)
class Tracing:
    """What all traces of one invocation share; ``shown`` is the folder's name in the texts that
    name the files.
    """

    matrix: Matrix
    context: MeasuringContext
    seed: int
    folder: Path
    shown: Path
    injections: Sequence[str] = ()
    stopped: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Version:
    """One side: 'a' or 'b', its name, and the way to its code, which may raise CannotBuild."""

    side: str
    name: str
    open: Callable[[], AbstractContextManager[Checkout]]


def trace_on_red(
    judgement: Judgement, pair: TracedPair, out: Path, *, limit: int = 3
) -> list[TraceDiff]:
    """Trace the ``limit`` largest drops on both sides into ``out``/traces, and write
    ``out``/trace.json: first what is red, then what is SUSPECT and has a base to compare with.
    Empty where neither is.

    Never raises for what a side, the machine or the disk does; the TraceDiff records it. Ctrl-C
    ends the tracing and leaves the verdict. The GPU's lock is free, or held by ``context.fit``.
    """
    found = _worst_first(judgement, pair.base)
    if not found:
        return []
    largest, rest = found[:limit], found[limit:]
    context, manifest = pair.context, pair.run.manifest
    tracing = Tracing(
        pair.matrix,
        context,
        manifest.seed,
        out / TRACE_FOLDER,
        Path(TRACE_FOLDER),
        manifest.injections,
    )
    context.say(
        f"tracing {len(largest)} cell{'s' if len(largest) > 1 else ''}, red or SUSPECT, on both"
        " sides, one step each"
    )
    base = _of_bases([cell.cell_id for cell in largest], pair, tracing)
    candidate = trace_side(_candidate(pair), [cell.cell_id for cell in largest], tracing)
    diffs = [_diff_of(cell, base[cell.cell_id], candidate[cell.cell_id]) for cell in largest]
    diffs += [_diff_of(cell, None, None, left_out=True) for cell in rest]
    try:
        with whole_file(out / diff.FILE_NAME) as partial:
            partial.write_bytes(diff.to_json(diffs))
    except OSError as error:
        context.say(
            f"{out / diff.FILE_NAME} cannot be written: {error.strerror}. The verdict stands"
            " without it"
        )
    return diffs


def _worst_first(judgement: Judgement, base: Mapping[str, str | None]) -> list[CellVerdict]:
    """Confirmed before suspected, then the largest drop."""

    def rank(cell: CellVerdict) -> tuple[bool, float, str]:
        return cell.verdict is Verdict.SUSPECT, cell.change_pct or 0.0, cell.cell_id

    return sorted(
        (
            cell
            for cell in judgement.of(*TRACED_VERDICTS)
            if cell.verdict is not Verdict.SUSPECT or base.get(cell.cell_id) is not None
        ),
        key=rank,
    )


def trace_side(version: Version, cells: Sequence[str], tracing: Tracing) -> dict[str, Traced]:
    """Trace ``cells`` of one version; each gets an answer, if only the reason
    why it was not traced.

    Raises nothing but bugs.
    """
    found: dict[str, Traced] = {}
    reason = tracing.stopped[0] if tracing.stopped else ""
    try:
        if not reason:
            _trace_into(found, version, cells, tracing)
    except PerfbenchError as error:
        reason = str(error)
    except OSError as error:
        reason = f"{error.filename or tracing.folder}: {error.strerror}"
    except KeyboardInterrupt:
        reason = "interrupted; the verdict stands"
        tracing.stopped.append(reason)
    reason = reason or f"{version.name} does not plan this cell"
    return {
        cell_id: found.get(cell_id) or Traced(name=version.name, reason=reason) for cell_id in cells
    }


def slug(cell_id: str) -> str:
    """A file name for any cell id, on any system: percent-encoded with lower-case letters only, at
    most SLUG_CHARS long.

    Different ids have different names, also on a file system that ignores case. What
    is too long is cut and ends with a hash.
    """
    encoded = "".join(char if char in _PLAIN else _percent(char) for char in cell_id)
    if 0 < len(encoded) <= SLUG_CHARS and encoded not in _RESERVED:
        return encoded
    digest = hashlib.sha256(cell_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{encoded[: SLUG_CHARS - len(digest) - 1]}-{digest}"


def _percent(char: str) -> str:
    return "".join(f"%{byte:02x}" for byte in char.encode("utf-8", "surrogatepass"))


def _of_bases(cells: Sequence[str], pair: TracedPair, tracing: Tracing) -> dict[str, Traced]:
    """Cells with one base share its checkout and server."""
    found: dict[str, Traced] = {}
    for revision in dict.fromkeys(pair.base.get(cell_id) for cell_id in cells):
        here = [cell_id for cell_id in cells if pair.base.get(cell_id) == revision]
        if revision is None:
            unknown = Traced(
                name="the base", reason="its commit is not known; promote a run of a git checkout"
            )
            found |= dict.fromkeys(here, unknown)
        else:
            found |= trace_side(_revision("a", revision, pair.context.repository), here, tracing)
    return found


def _candidate(pair: TracedPair) -> Version:
    repository, source = pair.context.repository, pair.run.manifest.source
    if pair.candidate is not None:
        return _revision("b", pair.candidate, repository)
    return Version("b", "this checkout", lambda: own_checkout(repository, source))


def _revision(side: str, revision: str, repository: Path) -> Version:
    return Version(side, revision, lambda: checked_out(revision, repository))


def _trace_into(
    found: dict[str, Traced], version: Version, cells: Sequence[str], tracing: Tracing
) -> None:
    """Fills ``found`` one by one, so that what is done stays done."""
    context = tracing.context
    tracing.folder.mkdir(parents=True, exist_ok=True)
    with version.open() as one:
        planned = plan_of_version(
            one, tracing.matrix, [f"cell={cell_id}" for cell_id in cells], context.capability
        )
        with prepared_versions(context.fit, (one,)) as (executor,):
            executor.new_block()
            executor.prepare([])
            for cell in planned.plan.cells:
                context.say(f"tracing {cell.cell_id} of {version.name}")
                own = own_folder_for(
                    cell.axes, tracing.matrix, one.own_folder(step_folder(tracing.matrix.path))
                )
                traced = _trace_cell(version, cell, planned.model, executor, tracing, own)
                found[cell.cell_id] = _with_places(traced, one)


def _with_places(traced: Traced, one: Checkout) -> Traced:
    rows = () if traced.kernels is None else traced.kernels.rows
    return traced.model_copy(update={"places": places_in(one.folder).of_rows(rows)})


def _trace_cell(
    version: Version,
    cell: PlannedCell,
    model: dict[str, object],
    executor: Executor,
    tracing: Tracing,
    own_folder: str | None,
) -> Traced:
    name = f"{slug(cell.cell_id)}-{version.side}"
    chrome = tracing.folder / f"{name}.json.gz"
    for old in tracing.folder.glob(f"{name}.*"):  # an older trace would pass for this one
        old.unlink()
    job = _job(version, cell, model, tracing, chrome.resolve())
    row = executor.execute(job.model_copy(update={"own_step_folder": own_folder}))
    for left in tracing.folder.glob(f"{name}.*partial.*"):  # of a child that was killed
        left.unlink()
    if row.status is not Status.OK:
        return Traced(name=version.name, reason=f"{row.status}: {row.reason}")
    try:
        kernels = Kernels.model_validate_json(table_path(chrome).read_bytes())
    except (OSError, ValidationError):
        return Traced(
            name=version.name, reason=f"its process left no readable {table_path(chrome).name}"
        )
    return Traced(
        name=version.name,
        kernels=kernels,
        chrome=(tracing.shown / chrome.name).as_posix() if chrome.exists() else None,
    )


def _job(
    version: Version, cell: PlannedCell, model: dict[str, object], tracing: Tracing, chrome: Path
) -> Job:
    """As replicate 0 of a run, its inputs included, but for what it writes."""
    return Job(
        cell_id=cell.cell_id,
        replicate=0,
        axes=cell.axes,
        config_sha256=cell.config_sha256,
        model=model_with(tracing.matrix.peer_of(cell.axes), model),
        measure=tracing.matrix.measure,
        timeout_s=tracing.matrix.limits.timeout_s,
        plan=cell.route,
        expect=cell.expect,
        device="cpu" if tracing.context.fit.gpu is None else "cuda",
        seed=random.Random(f"{tracing.seed}-{cell.cell_id}-0").randrange(2**31),
        profile=False,
        injection=_fault(version, cell, tracing),
        trained_blocks=trained_for(tracing.matrix, cell.axes),
        peer=tracing.matrix.peer_of(cell.axes),
        trace=str(chrome.absolute()),  # the child has a folder of its own
    )


def _fault(version: Version, cell: PlannedCell, tracing: Tracing) -> Injection | None:
    """The candidate's planted fault, so that a demonstration shows in its trace."""
    texts = [text for text in tracing.injections if text.partition("@")[2] == cell.cell_id]
    return parse_injection(texts[0], [cell.cell_id]) if texts and version.side == "b" else None


def _diff_of(
    cell: CellVerdict, base: Traced | None, candidate: Traced | None, *, left_out: bool = False
) -> TraceDiff:
    verdict = cell.verdict.value if cell.verdict else ""
    return TraceDiff(
        cell_id=cell.cell_id,
        verdict=verdict,
        base=base,
        candidate=candidate,
        reproduce=cell.reproduce,
        left_out=left_out,
    )
