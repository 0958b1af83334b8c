"""report.md: what the template needs, prepared; the order of the sections is the template's."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from typing import Any

from perfbench.judgement import CellVerdict, Judgement, unproved
from perfbench.report.rows import PATH_ORDER, Row, launch_bound, null_reasons
from perfbench.report.text import NULL, block, cell_code, code, escape, fixed, number, plain, ratio, signed_pct
from perfbench.result import Run
from perfbench.verdict import EXIT_OF, FAIL_UNDER_STRICT, Exit, Verdict

# Column and whether it is right-aligned.
HEADER = (
    ("cell", False), ("tok/s", True), ("change", True), ("spread", True), ("x dense", True), ("% of floor", True), ("bound", False),
    ("utilisation", True), ("memory, GiB", True), ("parity error / tolerance", True), ("verdict", False),
    ("counters (calls while timing)", False),
)  # fmt: skip
MAX_IDS = 6  # cells named for one reason; the table has all


@dataclass(frozen=True, slots=True)
class Picture:
    """One PNG beside the report; where it was not drawn, ``why`` stands in its place."""

    name: str
    drawn: bool
    what: str
    why: str


def text(run: Run, judgement: Judgement, rows: list[Row], pictures: list[Picture]) -> str:
    """The whole report as Markdown that GitHub renders."""
    import jinja2

    source = resources.files("perfbench.report").joinpath("report.md.j2").read_text(encoding="utf-8")
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
    environment.filters.update(md=escape, code=code, cell=cell_code, block=block)
    rendered = environment.from_string(source).render(_context(run, judgement, rows, pictures))
    return _squeeze(rendered)


def _squeeze(rendered: str) -> str:
    """At most one empty line in a row, outside fenced blocks or in."""
    lines: list[str] = []
    for line in rendered.splitlines():
        if line.strip() or (lines and lines[-1]):
            lines.append(line.rstrip())
    return "\n".join(lines).strip("\n") + "\n"


def _context(run: Run, judgement: Judgement, rows: list[Row], pictures: list[Picture]) -> dict[str, Any]:
    elsewhere = (Verdict.INCOMPARABLE, Verdict.MISSING)  # many at once, with one reason: listed in groups
    reds = [row for row in rows if row.cell.exit_code is not Exit.OK and row.cell.verdict not in elsewhere]
    compared = judgement.baseline is not None
    cells = [row.cell for row in rows]
    return {
        "manifest": run.manifest,
        "environment": run.manifest.environment,
        "resumed": run.resumed,
        "torn": run.torn,
        "judgement": judgement,
        "light": _light(judgement),
        "glance": _glance(run, judgement, rows),
        "fastest": _fastest(rows),
        "findings": [(finding.verdict.value, finding.reason) for finding in judgement.findings],
        "missing": len(judgement.of(Verdict.MISSING)),
        "reds": [_red(row) for row in _by_severity(reds) if row.cell.verdict is not Verdict.WRONG_PATH],
        "violations": [_red(row) for row in reds if row.cell.verdict is Verdict.WRONG_PATH],
        "warnings": _listed(cells, FAIL_UNDER_STRICT),
        "incomparable": _listed(cells, (Verdict.INCOMPARABLE,)),
        "new": _listed(cells, (Verdict.NEW, Verdict.MISSING)),
        "faster": _listed(cells, (Verdict.FASTER,)),
        "header": [column for column in HEADER if compared or column[0] != "change"],
        "tables": _tables(rows, compared),
        "nulls": [(column, reason, _ids(cells, len(rows))) for column, reason, cells in null_reasons(rows)],
        "pictures": pictures,
        "physics": _physics(rows),
        "excluded": [(str(one.get("cell_id", NULL)), str(one.get("reason", ""))) for one in run.manifest.excluded],
        "header_facts": _header(run),
        "argv": shlex.join(plain(part) for part in run.manifest.argv),
        "policy": judgement.policy,
        "paths": ", ".join(PATH_ORDER),
        "null": NULL,
    }


def _light(judgement: Judgement) -> str:
    if judgement.exit_code is not Exit.OK:
        return "🔴"
    return "🟡" if judgement.of(*FAIL_UNDER_STRICT) or judgement.findings else "🟢"


def _glance(run: Run, judgement: Judgement, rows: list[Row]) -> list[tuple[str, str]]:
    """The questions of a hurried reader, answered in a line each; every value is Markdown already."""
    manifest, env = run.manifest, run.manifest.environment
    ratios = [row.parity_ratio for row in rows if row.parity_ratio is not None]
    untrue = judgement.of(Verdict.PARITY, Verdict.IMPOSSIBLE, Verdict.WRONG_PATH)
    proved = sum(row.tok_per_s is not None for row in rows)
    worst = f"; worst parity error {max(ratios):.2g} of its tolerance" if ratios else ""
    right = f"{proved} of {len(rows)} cells ran the planned path, agree with the fp64 oracle and stay within the hardware's known limits"
    right += worst + (f"; **not proved, so without a number here: {len(untrue)}**" if untrue else "")
    commit = f"commit {code(manifest.source.commit[:12])}" if manifest.source.commit else "commit"
    commit += f"{', ' if manifest.source.commit else ' '}**{escape(why)}**" if (why := unproved(manifest.source)) else ""
    commit += " **with uncommitted changes**" if manifest.source.dirty_sha256 else ""
    machine = f"{escape(env.device_name)}, torch {escape(env.torch)}" + (f", driver {escape(env.driver)}" if env.driver else "")
    processes = f"{len(rows)} cells x {manifest.replicates} processes"
    counts = ", ".join(f"{count} {name}" for name, count in judgement.counts.items()) or "no cell was judged"
    base = judgement.baseline
    against = "no baseline was asked for" if base is None else f"against run {code(base.run_id)} of {escape(base.promoted_utc)}"
    if base is None and any(f.verdict in (Verdict.NO_BASELINE, Verdict.CORRUPT) for f in judgement.findings):
        against = "the baseline cannot be used"
    return [
        ("Is it right?", right),
        ("What ran?", f"{processes} of matrix {code(manifest.matrix_name)} on {machine}; {commit}"),
        ("What changed?", f"{counts} ({against})"),
        ("Again?", f"{code(f'perfbench run {shlex.quote(plain(manifest.matrix_path))}')}, one cell: add {code('--only cell=ID')}"),
    ]


def _fastest(rows: list[Row]) -> list[list[str]]:
    """For each workload and length (batch, dtype): the fastest path that is not dense, and the dense twin."""
    groups: dict[tuple[tuple[str, str | int], ...], list[Row]] = {}
    for row in rows:
        if row.tok_per_s is not None:
            key = tuple((name, value) for name, value in row.cell.axes.items() if name not in ("path", "fa2"))
            groups.setdefault(key, []).append(row)
    several = {name for key in groups for name, value in key if any(dict(other).get(name) != value for other in groups)}
    found = []
    for key, members in groups.items():
        best = max((row for row in members if not row.is_dense), key=lambda row: row.tok_per_s or 0.0, default=None)
        dense = next((row for row in members if row.cell.axes.get("path") == "dense"), None)
        if best is None:
            continue
        shown = [value for name, value in key if name in several or name == "workload"]
        where = ", ".join(f"{value:,}" if isinstance(value, int) else value for value in shown)
        which = f"{best.cell.axes.get('path')}, FA-2 {best.cell.axes.get('fa2')}"
        values = [number(best.tok_per_s), number(dense.tok_per_s if dense else None), ratio(best.x_dense), fixed(best.floor_pct, 1)]
        found.append([escape(where), escape(which), *values, best.bound or NULL])
    return found


def _by_severity(rows: Iterable[Row]) -> list[Row]:
    order = [Exit.NOT_TRUE, Exit.FAILED, Exit.REGRESSED, Exit.ENVIRONMENT]

    def key(row: Row) -> tuple[int, float, str]:
        code_ = row.cell.exit_code
        return (order.index(code_) if code_ in order else len(order), row.cell.change_pct or 0.0, row.cell.cell_id)

    return sorted(rows, key=key)


def _red(row: Row) -> dict[str, Any]:
    planned = " ".join(row.planned.route.counters) if row.planned else ""
    route = row.planned.route if row.planned else None
    return {
        "verdict": row.verdict,
        "exit": int(EXIT_OF[Verdict(row.verdict)]),
        "cell": row.cell.cell_id,
        "reason": row.cell.reason,
        "statuses": ", ".join(f"{count} {name}" for name, count in row.statuses.items()),
        "planned": planned,
        "rejected": [f"not {r['alternative']}: {r['reason']}" for r in route.rejected] + route.notes if route else [],
        "engaged": " ".join(f"{name}={count}" for name, count in sorted(row.engaged.items())),
        "reproduce": row.cell.reproduce,
        "stderr": row.stderr_tail if row.cell.verdict is Verdict.FAILED else "",
    }


def _listed(cells: list[CellVerdict], verdicts: tuple[Verdict, ...]) -> list[tuple[str, str, str]]:
    """(verdict, cells as Markdown, reason); cells with the same reason share a line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if cell.verdict is not None and cell.verdict in verdicts:
            groups.setdefault((cell.verdict.value, cell.reason), []).append(cell.cell_id)
    return [(verdict, _ids(ids, len(cells)), reason) for (verdict, reason), ids in groups.items()]


def _tables(rows: list[Row], compared: bool) -> list[tuple[str, list[str]]]:
    """One table for each workload, its lines ready."""
    groups: dict[str, list[str]] = {}
    for row in rows:
        groups.setdefault(str(row.cell.axes.get("workload", NULL)), []).append(f"| {' | '.join(_values(row, compared))} |")
    return list(groups.items())


def _values(row: Row, compared: bool) -> list[str]:
    spread = (f"{row.cell.spread_pct:.2f} %" if row.cell.spread_pct is not None else NULL) + f" of {row.cell.replicates}"
    verdict = row.verdict if row.cell.verdict in (None, Verdict.SAME) else f"**{row.verdict}**"
    bad = [f"{count} {name}" for name, count in row.statuses.items() if name != "ok"]
    return [
        cell_code(row.cell.cell_id),
        number(row.tok_per_s),
        *([signed_pct(row.cell.change_pct)] if compared else []),
        spread if row.tok_per_s is not None else NULL,
        ratio(row.x_dense),
        fixed(row.floor_pct, 1),
        row.bound or NULL,
        NULL if row.utilisation_pct is None else f"{row.utilisation_pct:.0f} %",
        fixed(row.memory_gib, 2),
        number(row.parity_ratio, 2),
        verdict + (f" ({', '.join(bad)})" if bad else ""),
        escape(", ".join(f"{name} {count}" for name, count in sorted(row.engaged.items()))) or NULL,
    ]


def _ids(cells: list[str], total: int) -> str:
    if len(cells) == total > 1:
        return f"every cell, {total} of them"
    named = ", ".join(code(cell) for cell in cells[:MAX_IDS])
    return named if len(cells) <= MAX_IDS else f"{len(cells)} cells: {named}, ..."


def _physics(rows: list[Row]) -> list[str]:
    notes = Counter(note for row in rows for note in row.physics_notes)
    lines = [f"{escape(note)} ({count} cells)" for note, count in notes.items()]
    return lines + [f"time does not grow with the length (launch bound): {escape(line)}" for line in launch_bound(rows)]


def _header(run: Run) -> list[tuple[str, str]]:
    """What it takes to do it again, as (name, Markdown)."""
    manifest, env = run.manifest, run.manifest.environment
    source = manifest.source
    commit = code(source.commit) if source.commit else f"{NULL} ({escape(source.reason or 'no reason was recorded')})"
    dirty = f"yes, sha256 {code(source.dirty_sha256[:16])}" if source.dirty_sha256 else "no"
    only = ", ".join(manifest.only) or "every cell"
    settings = ", ".join(f"{name}={value}" for name, value in sorted(env.nsa_settings.items())) or "defaults"
    uuid = f" (uuid sha256 {env.gpu_uuid_sha256[:16]})" if env.gpu_uuid_sha256 else ""
    facts: list[tuple[str, object]] = [
        ("run", f"{manifest.run_id}, {manifest.created_utc}"),
        ("matrix", f"{manifest.matrix_path} ({manifest.matrix_name}), sha256 {manifest.matrix_sha256}"),
        ("cells", f"{only}, {manifest.replicates} processes each, seed {manifest.seed}"),
        ("device", f"{env.device_name}{uuid}, clocks {env.clock_policy}"),
        ("host", f"{env.cpu_name}, {env.cpu_count} CPUs, {env.platform}"),
        ("driver, CUDA", f"{env.driver or NULL}, {env.cuda or NULL}"),
        ("torch, triton, python", f"{env.torch}, {env.triton or NULL}, {env.python}"),
        ("flash provider", env.flash_provider or f"{NULL} (none serves here)"),
        ("NSA settings", settings),
        ("injections", ", ".join(manifest.injections) or "none"),
        ("schema, method", f"{manifest.schema_version}, {manifest.method_version}"),
    ]
    known = [("branch, commit", f"{escape(source.branch or NULL)}, {commit}"), ("uncommitted changes", dirty)]
    return known + [(name, escape(value)) for name, value in facts]
