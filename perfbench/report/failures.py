"""What a reader must act on: red cells with their numbers, and open ones with what would settle
them.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable
from typing import Any

from perfbench.errors import Exit
from perfbench.gate import DEVICE, HOST, PAIRS_PER_BLOCK, CellVerdict, Evidence, Judgement, stats
from perfbench.matrix import GatePolicy
from perfbench.records import (
    EXIT_OF,
    FAIL_UNDER_STRICT,
    Run,
    Verdict,
    injection_words,
    revisions_to_type,
    source_name,
    typed_revisions,
)
from perfbench.report.context import ReportContext
from perfbench.report.rows import Row
from perfbench.report.tables import mde
from perfbench.text import NULL, cell_code, code, escape, plain, signed_pct

ORDER = (Exit.NOT_TRUE, Exit.FAILED, Exit.REGRESSED, Exit.ENVIRONMENT)
FOLD = 15  # rows from which a table of open cells is folded: the report is read from the top
REASONS = 5  # of a group: dozens of host-bound cells say the same with other numbers
MOST_PAIRS = 10 * stats.MAX_PAIRS  # nobody measures more
METRICS = {DEVICE: "device time", HOST: "host time"}


def by_severity(rows: Iterable[Row]) -> list[Row]:
    def key(row: Row) -> tuple[int, float, str]:
        code_ = row.cell.exit_code
        return (
            ORDER.index(code_) if code_ in ORDER else len(ORDER),
            row.cell.change_pct or 0.0,
            row.cell.cell_id,
        )

    return sorted(rows, key=key)


def red(row: Row, run: Run, judgement: Judgement, context: ReportContext) -> dict[str, Any]:
    """What the template prints of one failed cell."""
    route = row.planned.route if row.planned else None
    return {
        "verdict": row.verdict,
        "exit": int(EXIT_OF[Verdict(row.verdict)]),
        "cell": row.cell.cell_id,
        "change": row.cell.change,
        "reason": row.cell.reason,
        "line": _overview(row.cell),
        "numbers": [_numbers(evidence) for evidence in row.cell.evidence],
        "statuses": ", ".join(f"{count} {name}" for name, count in row.statuses.items()),
        "planned": " ".join(route.counters) if route else "",
        "rejected": (
            [f"not {r['alternative']}: {r['reason']}" for r in route.rejected] + route.notes
            if route
            else []
        ),
        "engaged": " ".join(f"{name}={count}" for name, count in sorted(row.engaged.items())),
        "reproduce": row.cell.reproduce,
        "side_by_side": (
            ab_command(run, judgement, context, row.cell.cell_id)
            if row.cell.verdict in (Verdict.REGRESSED, Verdict.SUSPECT)
            else ""
        ),
        "stderr": row.stderr_tail if row.cell.verdict is Verdict.FAILED else "",
    }


def ab_command(
    run: Run, judgement: Judgement, context: ReportContext, cell: str, shown: str | None = None
) -> str:
    """The A/B that settles one cell, with the faults planted in it; empty where the base's commit
    is not known.

    ``shown`` stands for the cell where the command is for several.
    """
    base = judgement.baseline.commit if judgement.baseline else None
    source = run.manifest.source
    here = (
        source.commit
        if source.commit and source.commit != base and source.dirty_sha256 is None
        else None
    )
    named: tuple[str | None, str] = (base and base[:12], here[:12] if here else ".")
    if context.base_run is not None:
        named = revisions_to_type(context.base_run, run)
    if named[0] is None:
        return ""
    words = [
        "perfbench",
        "ab",
        *map(str, named),
        run.manifest.matrix_path,
        "--only",
        f"cell={shown or cell}",
    ]
    return shlex.join(plain(word) for word in [*words, *injection_words(run, cell, shown)])


def sides(run: Run, context: ReportContext) -> tuple[str, str] | None:
    """What the user called base and candidate of an A/B or a comparison; None with one side."""
    if context.base_run is None:
        return None
    names = (
        source_name(context.base_run.manifest.source),
        source_name(run.manifest.source),
    )
    return typed_revisions(run.manifest.argv) or names


def open_cells(
    rows: list[Row], run: Run, judgement: Judgement, context: ReportContext
) -> list[dict[str, Any]]:
    """WATCH, BLIND and UNSTABLE in groups, each with what would settle it."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for verdict in FAIL_UNDER_STRICT:
        for row in rows:
            if row.cell.verdict is verdict:
                groups.setdefault(
                    (verdict.value, _settles(row, run, judgement, context)), []
                ).append(row)
    return [
        {
            "verdict": verdict,
            "count": len(members),
            "settles": settles,
            "lines": [
                _open_line(row.cell, _policy(row.cell, judgement, context)) for row in members
            ],
            "reasons": _reasons(members),
            "fold": len(members) >= FOLD,
        }
        for (verdict, settles), members in groups.items()
    ]


def _overview(cell: CellVerdict) -> str:
    adjusted = cell.evidence[0].adjusted_p if cell.evidence else None
    values = [
        signed_pct(cell.change_pct),
        NULL if adjusted is None else _p(adjusted),
        mde(cell.mde_pct),
    ]
    return f"| {' | '.join([cell_code(cell.cell_id), str(cell.verdict), *values])} |"


def _numbers(evidence: Evidence) -> str:
    c = evidence.comparison
    bounds = (
        f"{_pct(evidence.lower_pct)} to {_pct(evidence.upper_pct)} (alpha {evidence.alpha:.3g})"
    )
    count = f"{c.n_base} pairs" if evidence.paired else f"{c.n_base} and {c.n_candidate}"
    metric = METRICS.get(evidence.metric, "tok/s")
    p, adjusted = _p(c.p_slower), NULL if evidence.adjusted_p is None else _p(evidence.adjusted_p)
    change, smallest = signed_pct(evidence.change_pct), mde(evidence.mde_pct)
    return f"| {' | '.join([metric, change, bounds, p, adjusted, smallest, count])} |"


def _open_line(cell: CellVerdict, policy: GatePolicy) -> str:
    if not cell.evidence:
        change = signed_pct(cell.change_pct)
        return f"| {' | '.join([cell_code(cell.cell_id), NULL, change, NULL, NULL, NULL])} |"
    one = cell.evidence[0]
    bounds = f"{_pct(one.lower_pct)} to {_pct(one.upper_pct)}"
    values = [
        METRICS.get(one.metric, "tok/s"),
        signed_pct(one.change_pct),
        bounds,
        mde(one.mde_pct),
        _pairs(one, policy),
    ]
    return f"| {' | '.join([cell_code(cell.cell_id), *values])} |"


def _reasons(members: list[Row]) -> list[tuple[str, str]]:
    """(cells, reason), the first few; cells with the same reason share a line."""
    groups: dict[str, list[str]] = {}
    for row in members:
        groups.setdefault(row.cell.reason, []).append(row.cell.cell_id)
    found = [(", ".join(code(cell) for cell in cells), reason) for reason, cells in groups.items()]
    if len(found) <= REASONS:
        return found
    left = sum(len(cells) for cells in list(groups.values())[REASONS:])
    return [
        *found[:REASONS],
        (f"and {left} more cells", "perfbench explain RUN CELL explains each"),
    ]


def _pairs(evidence: Evidence, policy: GatePolicy) -> str:
    """How many interleaved pairs, in whole blocks, show a drop of min_effect in this noise, were it
    the only cell confirmed.
    """
    sd = evidence.moderated_sd * (1 if evidence.paired else math.sqrt(2))
    if not 0 < sd < math.inf:
        return NULL
    drop, power = -math.log1p(-policy.min_effect_pct / 100), stats.confirm_power(policy)
    found = stats.pairs_for(sd, drop=drop, alpha=policy.alpha_confirm, power=power, most=MOST_PAIRS)
    if found is None:
        return f"over {MOST_PAIRS}"
    return str(-(-found // PAIRS_PER_BLOCK) * PAIRS_PER_BLOCK)


def _settles(row: Row, run: Run, judgement: Judgement, context: ReportContext) -> str:
    """Markdown: what would turn this into a verdict."""
    cell, policy = row.cell, _policy(row.cell, judgement, context)
    by_hand = ab_command(run, judgement, context, cell.cell_id, "ID")
    in_turns = (
        f"by hand {code(f'{by_hand} --pairs N')}"
        if by_hand
        else "by hand an A/B; the base's commit is not known"
    )
    if cell.verdict is Verdict.UNSTABLE:
        return (
            "Cool the card or lock its clocks, then measure again; two speeds within a process are"
            " explained by `perfbench explain`."
        )
    if cell.cut_short:
        return (
            f"The other pairs of the plan ({cell.cut_short} were measured): the reason says how to"
            f" resume; or a new A/B, {in_turns}."
        )
    if not cell.evidence:
        return "No speed was compared: the reason says what is missing."
    if cell.verdict is Verdict.WATCH and cell.screened and not cell.confirmed:
        return (
            f"Base and candidate in turns: {code('perfbench check')} does it by itself, {in_turns}."
        )
    if cell.verdict is Verdict.WATCH:
        return (
            f"More of the same, at least {policy.min_replicates} replicates a side; {in_turns},"
            " with the pairs below."
        )
    if row.bound == "host" or cell.metric in METRICS:
        judged = (
            "Device time, host time, launches and syncs were judged instead"
            if cell.metric in METRICS
            else _unjudged()
        )
        return (
            f"More processes do not help, because wall time follows the CPU. {judged}. Compiled, or"
            " as a CUDA graph, it is GPU bound."
        )
    return (
        "Less noise: locked clocks, an idle host; or an override with a larger min_effect than"
        f" {policy.min_effect_pct:g} %."
    )


def _unjudged() -> str:
    return (
        f"{code('measure: {profile: every}')}, here and in the baseline, lets device time, host"
        " time, launches and syncs judge it"
    )


def _policy(cell: CellVerdict, judgement: Judgement, context: ReportContext) -> GatePolicy:
    return judgement.policy if context.policies is None else context.policies.of(cell.cell_id)


def _pct(value: float | None) -> str:
    return "unbounded" if value is None else f"{value:+.2f} %"


def _p(value: float) -> str:
    return escape(f"{value:.2g}")
