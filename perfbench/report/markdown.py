"""report.md: what the template needs, prepared; the order of the sections is the template's."""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from nsa.routing import DENSE_KINDS
from perfbench.errors import Exit
from perfbench.gate import EARLY_DROP_PCT, LOOKS, Judgement
from perfbench.records import (
    BUILT_IN,
    CACHED_DENSE,
    FAIL_UNDER_STRICT,
    LoadedPeer,
    Run,
    Source,
    Verdict,
    injection_words,
    revisions_to_type,
    shared_axes,
    typed_revisions,
    without_resume,
)
from perfbench.report import (
    boundary,
    cost,
    expectations,
    failures,
    machine,
    own_steps,
    pages,
    scaling,
    several_gpus,
    tables,
    workloads,
)
from perfbench.report.context import ReportContext
from perfbench.report.rows import PATH_ORDER, Row, launch_bound, null_reasons
from perfbench.text import NULL, block, cell_code, code, escape, plain, table_cell, visible

if TYPE_CHECKING:
    import jinja2


@dataclass(frozen=True, slots=True)
class Picture:
    """One PNG next to the report; where it was not drawn, ``why`` stands in its place."""

    name: str
    drawn: bool
    what: str
    why: str


def text(
    run: Run,
    judgement: Judgement,
    rows: list[Row],
    pictures: list[Picture],
    context: ReportContext | None = None,
) -> str:
    """The whole report as Markdown that GitHub renders; the same inputs, the same bytes."""
    rendered = _template().render(
        _context(run, judgement, rows, pictures, context or ReportContext())
    )
    return _squeeze(visible(rendered))


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    """Compiled once: 0.07 s, which `history add --all` would pay for each run."""
    import jinja2

    source = (
        resources.files("perfbench.report").joinpath("report.md.j2").read_text(encoding="utf-8")
    )
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters.update(md=escape, code=code, cell=cell_code, block=block, bar=table_cell)
    return environment.from_string(source)


def _costs(run: Run, judgement: Judgement, context: ReportContext) -> list[workloads.Table]:
    """None of one side of an A/B: the card was the other side's for half of the time."""
    found = None if context.paired else cost.table(run, judgement, context.pairs)
    return [] if found is None else [_shown(found)]


def _squeeze(rendered: str) -> str:
    """At most one empty line in a row, outside fenced blocks or in."""
    lines: list[str] = []
    for line in rendered.splitlines():
        if line.strip() or (lines and lines[-1]):
            lines.append(line.rstrip())
    return "\n".join(lines).strip("\n") + "\n"


def _context(
    run: Run, judgement: Judgement, rows: list[Row], pictures: list[Picture], context: ReportContext
) -> dict[str, Any]:
    sentinel_head, sentinel_lines = machine.sentinels(run, judgement, context)
    growths = scaling.growths(run, rows)
    further = [
        own_steps.table(run, rows),
        boundary.table(run, rows),
        scaling.table(growths),
        several_gpus.table(run, rows),
        pages.table(rows),
        expectations.table(run, rows),
    ]
    return {
        "manifest": run.manifest,
        "resumed": run.resumed,
        "torn": run.torn,
        "judgement": judgement,
        "light": _light(judgement),
        "glance": _glance(run, judgement, rows, context),
        "machine": machine.facts(run, judgement, context),
        "sentinel_head": sentinel_head,
        "sentinel_lines": sentinel_lines,
        "no_sentinels": machine.no_sentinels(context),
        **_changed(run, judgement, rows, context),
        **_all_cells(rows, judgement),
        "workload_tables": [
            *map(_shown, workloads.tables(run, rows)),
            *(_shown(table) for table in further if table is not None),
        ],
        "costs": _costs(run, judgement, context),
        "pictures": pictures,
        "physics": _physics(rows) + scaling.notes(growths),
        "excluded": [
            (str(one.get("cell_id", NULL)), str(one.get("reason", "")))
            for one in run.manifest.excluded
        ],
        "header_facts": _header(run, context),
        "argv": shlex.join(plain(part) for part in run.manifest.argv),
        "proves_step": any(row.step_proof and row.step_proof.ok for row in run.replicates),
        "proves_length": any(row.length_proof is not None for row in run.replicates),
        "policy": judgement.policy,
        "looks": f"{', '.join(map(str, LOOKS[:-1]))} and {LOOKS[-1]}",
        "early_drop_pct": EARLY_DROP_PCT,
        "paths": ", ".join(_paths(rows)),
        "null": NULL,
    }


def _paths(rows: list[Row]) -> list[str]:
    """The paths of nsa, and the built-in peers that this run has."""
    ran = {row.cell.axes.path for row in rows}
    named = {*BUILT_IN, *CACHED_DENSE} - {*DENSE_KINDS}  # only where they ran
    return [path for path in PATH_ORDER if path in ran or path not in named]


def _shown(table: workloads.Table) -> workloads.Table:
    """Without columns of dashes alone, and without what explains a dash where none is left."""
    if not table.lines:
        return table
    head, lines = tables.without_empty(table.head, table.lines, table.left)
    dashed = any(value == NULL for line in lines for value in line)
    note = table.note if dashed else table.note.removesuffix(workloads.NO_NUMBER).rstrip()
    return replace(table, head=head, lines=lines, note=note)


def _changed(
    run: Run, judgement: Judgement, rows: list[Row], context: ReportContext
) -> dict[str, Any]:
    """What is not as it was, by urgency."""
    # many at once, with one reason: listed in groups
    elsewhere = (Verdict.INCOMPARABLE, Verdict.MISSING)
    failed = [
        row
        for row in rows
        if row.cell.exit_code is not Exit.OK and row.cell.verdict not in elsewhere
    ]
    reds = [failures.red(row, run, judgement, context) for row in failures.by_severity(failed)]
    return {
        "findings": [(finding.verdict.value, finding.reason) for finding in judgement.findings],
        "missing": len(judgement.of(Verdict.MISSING)),
        "reds": [one for one in reds if one["verdict"] != Verdict.WRONG_PATH.value],
        "violations": [one for one in reds if one["verdict"] == Verdict.WRONG_PATH.value],
        "traces": context.traces.strip("\n"),
        "open": failures.open_cells(rows, run, judgement, context),
        "incomparable": tables.listed(rows, (Verdict.INCOMPARABLE,)),
        "new": tables.listed(rows, (Verdict.NEW, Verdict.MISSING)),
        "renamed": sorted(context.renamed.items()),
        "faster": tables.listed(rows, (Verdict.FASTER,), or_looks_faster=True),
    }


def _all_cells(rows: list[Row], judgement: Judgement) -> dict[str, Any]:
    shown = tables.columns(rows, judgement.baseline is not None)
    fastest_head, fastest = tables.fastest(rows)
    return {
        "fastest_head": fastest_head,
        "fastest": fastest,
        "columns": shown,
        "tables": tables.tables(rows, shown),
        "shared": shared_axes(row.cell.axes for row in rows),
        "nulls": [
            (column, reason, tables.ids(cells, len(rows)))
            for column, reason, cells in null_reasons(rows, tables.null_names(shown))
        ],
    }


def _light(judgement: Judgement) -> str:
    if judgement.exit_code is not Exit.OK:
        return "🔴"
    is_open = judgement.of(*FAIL_UNDER_STRICT) or judgement.findings or judgement.is_too_noisy
    return "🟡" if is_open else "🟢"


def _processes(run: Run) -> str:
    """How many processes a cell was measured in; fewer than planned where a run was cut off or a
    budget ended.
    """
    counts = Counter(replicate.cell_id for replicate in run.replicates if replicate.status == "ok")
    planned, least, most = (
        run.manifest.replicates,
        min(counts.values(), default=0),
        max(counts.values(), default=0),
    )
    if least == most == planned or not counts:
        return f"{planned} processes"
    measured = f"{least}" if least == most else f"{least} to {most}"
    return f"{measured} of {planned} processes"


def _glance(
    run: Run, judgement: Judgement, rows: list[Row], context: ReportContext
) -> list[tuple[str, str]]:
    """The questions of a hurried reader, answered in a line each; every value is Markdown
    already.
    """
    manifest, env = run.manifest, run.manifest.environment
    machine_ = f"{escape(env.device_name)}, torch {escape(env.torch)}" + (
        f", driver {escape(env.driver)}" if env.driver else ""
    )
    processes = f"{len(rows)} {'cell' if len(rows) == 1 else 'cells'} x {_processes(run)}"
    counts = (
        ", ".join(f"{count} {name}" for name, count in judgement.counts.items())
        or "no cell was judged"
    )
    return [
        ("Is it right?", _right(judgement, rows)),
        (
            "What ran?",
            (
                f"{processes} of matrix {code(manifest.matrix_name)} on {machine_};"
                f" {_commit(manifest.source)}"
            ),
        ),
        ("What changed?", f"{counts} ({_against(run, judgement, context)})"),
        ("What binds?", _bound(rows)),
        ("Again?", f"{code(_command_of(run, context))}, one cell: add {code('--only cell=ID')}"),
    ]


def _command_of(run: Run, context: ReportContext) -> str:
    """The command with its seed and its faults; of an A/B with the commits, since a branch or HEAD
    moves on.
    """
    words = list(without_resume(run.manifest.argv))
    if context.base_run is not None and typed_revisions(words) is not None:
        words[2:4] = revisions_to_type(context.base_run, run)
    words += [*injection_words(run), "--seed", str(run.manifest.seed)]
    return shlex.join(plain(word) for word in words)


def _right(judgement: Judgement, rows: list[Row]) -> str:
    ratios = [row.parity_ratio for row in rows if row.parity_ratio is not None]
    untrue = judgement.of(Verdict.PARITY, Verdict.IMPOSSIBLE, Verdict.WRONG_PATH)
    ours = [row for row in rows if not row.cell.axes.is_own_step]
    proved = sum(row.tok_per_s is not None for row in ours)
    worst = f"; worst parity error {max(ratios):.2g} of its tolerance" if ratios else ""
    text_ = (
        f"{proved} of {len(ours)} cells ran the planned path, agree with the fp64 oracle and stay"
        " within the hardware's known limits"
    )
    own = len(rows) - len(ours)
    if own:
        mine = f"{own} {'is a' if own == 1 else 'are'} user's own step{'' if own == 1 else 's'}"
        mine += f": the table {own_steps.TITLE} says what is proved of each and what is not"
        text_ = f"{text_}; {mine}" if ours else mine
    return (
        text_
        + worst
        + (f"; **not proved, so without a number here: {len(untrue)}**" if untrue else "")
    )


def _commit(source: Source) -> str:
    commit = f"commit {code(source.commit[:12])}" if source.commit else "commit"
    commit += (
        f"{', ' if source.commit else ' '}**{escape(why)}**" if (why := source.unproved) else ""
    )
    return commit + (" **with uncommitted changes**" if source.dirty_sha256 else "")


def _against(run: Run, judgement: Judgement, context: ReportContext) -> str:
    base = judgement.baseline
    if (sides := failures.sides(run, context)) is not None and context.base_run is not None:
        there = context.base_run.manifest
        return (
            f"candidate {code(sides[1])} against base {code(sides[0])}, {_commit(there.source)},"
            f" run {code(there.run_id)}"
        )
    if base is not None:
        itself = (
            "; **this very run is the baseline: it is compared with itself**"
            if base.run_id == run.manifest.run_id
            else ""
        )
        return f"against run {code(base.run_id)} of {escape(base.promoted_utc)}{itself}"
    if any(f.verdict in (Verdict.NO_BASELINE, Verdict.CORRUPT) for f in judgement.findings):
        return "the baseline cannot be used"
    return "no baseline was asked for"


def _bound(rows: list[Row]) -> str:
    host, gpu = (sum(row.bound == name for row in rows) for name in ("host", "GPU"))
    if not host + gpu:
        return "not known: no cell was profiled on a GPU"
    host_text = (
        f"**the host in {host}** (their tok/s follows the CPU: read the device time), "
        if host
        else ""
    )
    return f"{host_text}the GPU in {gpu} of {len(rows)} cells"


def _physics(rows: list[Row]) -> list[str]:
    notes = Counter(note for row in rows for note in row.physics_notes)
    lines = [f"{escape(note)} ({count} cells)" for note, count in notes.items()]
    return lines + [
        f"time does not grow with the length (launch bound): {escape(line)}"
        for line in launch_bound(rows)
    ]


def _peer(peer: LoadedPeer) -> str:
    """Whose it is, and which: its package, or the file with the commit of its checkout."""
    which = peer.version or PurePath(peer.file).name
    commit = f" at {peer.commit[:12]}" if peer.commit else ""
    changed = " with changes" if peer.dirty_sha256 else ""
    return f"{peer.name} {which}{commit}{changed}"


def _header(run: Run, context: ReportContext) -> list[tuple[str, str]]:
    """What it takes to do it again, as (name, Markdown)."""
    manifest, env = run.manifest, run.manifest.environment
    source = manifest.source
    commit = (
        code(source.commit)
        if source.commit
        else f"{NULL} ({escape(source.reason or 'no reason was recorded')})"
    )
    dirty = f"yes, sha256 {code(source.dirty_sha256[:16])}" if source.dirty_sha256 else "no"
    if source.unproved and not source.dirty_sha256:
        dirty = f"unknown ({escape(source.reason or 'no reason was recorded')})"
    only = ", ".join(manifest.only) or "every cell"
    settings = (
        ", ".join(f"{name}={value}" for name, value in sorted(env.nsa_settings.items()))
        or "defaults"
    )
    uuid = f" (uuid sha256 {env.gpu_uuid_sha256[:16]})" if env.gpu_uuid_sha256 else ""
    facts: list[tuple[str, object]] = [
        ("run", f"{manifest.run_id}, {manifest.created_utc}"),
        (
            "matrix",
            f"{manifest.matrix_path} ({manifest.matrix_name}), sha256 {manifest.matrix_sha256}",
        ),
        ("cells", f"{only}, {manifest.replicates} processes each, seed {manifest.seed}"),
        ("time", cost.shown(run, context.pairs)),
        ("device", f"{env.device_name}{uuid}, clocks {env.clock_policy}"),
        ("host", f"{env.cpu_name}, {env.cpu_count} CPUs, {env.platform}"),
        ("driver, CUDA", f"{env.driver or NULL}, {env.cuda or NULL}"),
        ("torch, triton, python", f"{env.torch}, {env.triton or NULL}, {env.python}"),
        ("flash provider", env.flash_provider or f"{NULL} (none serves here)"),
        ("NSA settings", settings),
        ("injections", ", ".join(manifest.injections) or "none"),
        ("schema, method", f"{manifest.schema_version}, {manifest.method_version}"),
    ]
    if loaded := {one.peer.name: one.peer for one in run.replicates if one.peer is not None}:
        facts.append(("peers", "; ".join(_peer(one) for _, one in sorted(loaded.items()))))
    known = [
        ("branch, commit", f"{escape(source.branch or NULL)}, {commit}"),
        ("uncommitted changes", dirty),
    ]
    return known + [(name, escape(value)) for name, value in facts]
