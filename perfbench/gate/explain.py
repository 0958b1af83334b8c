"""Why a cell got its verdict, in plain words, with every number between the rows and the word.

The same inputs, the same text.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import geometric_mean
from typing import TYPE_CHECKING

from nsa.config import nearest_name
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import stats
from perfbench.gate.coverage import rows_by_cell, usable
from perfbench.gate.evidence import WALL, Evidence, pct, shown
from perfbench.gate.judgement import CellVerdict, Judgement
from perfbench.matrix import GatePolicy, Policies
from perfbench.records import (
    EXIT_OF,
    FAIL_UNDER_STRICT,
    BaselineProblem,
    Replicate,
    Run,
    Status,
    Verdict,
)

if TYPE_CHECKING:
    from perfbench.records import Baseline, BaselineCell

_NEXT: dict[Verdict, str] = {
    Verdict.SAME: "Nothing is to be done.",
    Verdict.FASTER: "Promote this run, so that a later loss of the gain is seen.",
    Verdict.NEW: "Promote a run that has this cell.",
    Verdict.SUSPECT: (
        "Confirm or clear it: the reason names the command. `perfbench check` does it by itself,"
        " with time and the base's commit at hand."
    ),
    Verdict.BLIND: (
        "More processes do not help. Judge the cell on another metric (compiled, or as a CUDA"
        " graph), or give it an override."
    ),
    Verdict.UNSTABLE: "Cool the card or lock its clocks, then measure again.",
    Verdict.REGRESSED: "Find the commit, or promote a baseline if the loss was meant.",
    Verdict.WRONG_PATH: (
        "The speed is of other code than planned: `perfbench plan` shows the route and its reasons."
    ),
    Verdict.OVER_BOUND: (
        "The speed is true, and a step costs more than `expect` allows: `perfbench trace` shows its"
        " kernels."
    ),
    Verdict.PARITY: "The result is wrong; no speed is believed until it agrees with the oracle.",
    Verdict.IMPOSSIBLE: "The clock or the arithmetic is wrong; no speed is believed.",
    Verdict.FAILED: "See the reason and the row's stderr_tail in run.jsonl.",
    Verdict.MISSING: "Finish it with --resume, or promote a baseline without this cell.",
    Verdict.ENV: (
        "Measure again on a machine that is whole and idle; `perfbench doctor` looks at this one."
    ),
    Verdict.INCOMPARABLE: "Promote a run made here, or gate on the machine of the baseline.",
    Verdict.NO_BASELINE: (
        "Promote a green run (`perfbench baseline promote RUN`), or name a baseline with"
        " --baseline."
    ),
    Verdict.LOOSENED: "Undo what the matrix loosens, or promote a run with it for review.",
    Verdict.CORRUPT: "Restore the baseline's file from git, or promote a green run anew.",
}


def explain_cell(
    run: Run,
    judgement: Judgement,
    cell_id: str,
    policy: GatePolicy | Policies,
    baseline: Baseline | BaselineProblem | None,
) -> str:
    """The explanation of one cell of ``judgement``; PerfbenchError(USAGE) for a cell that it does
    not have.
    """
    cell = next((one for one in judgement.cells if one.cell_id == cell_id), None)
    if cell is None:
        near = nearest_name(cell_id, [one.cell_id for one in judgement.cells][:1000])
        raise PerfbenchError(
            Exit.USAGE,
            f"got cell {cell_id[:150]!r}, wanted one of the {len(judgement.cells)} judged"
            f" cells{near}",
        )
    policies = Policies.over(policy)
    mine = policies.of(cell_id)
    lines = [
        f"{cell_id}: {'MEASURED' if cell.verdict is None else cell.verdict.value}",
        "",
        f"Why: {cell.reason}",
        "",
    ]
    if cell.own is not None:
        lines += [
            f"Not proved: {'; '.join(cell.own.not_proved) or 'nothing'}.",
            f"Proved: {'; '.join(cell.own.proved) or 'nothing'}.",
            "",
        ]
    if planted := run.manifest.injections:
        lines += [f"INJECTED FAULTS, a demonstration: {', '.join(planted)}"]
    lines += [
        f"The run: {finding.verdict.value}: {finding.reason}" for finding in judgement.findings
    ]
    lines += _rows(rows_by_cell(run).get(cell_id, []))
    lines += _base(cell, baseline)
    lines += _policy(mine, cell_id in policies.by_cell)
    for evidence in cell.evidence:
        lines += ["", *_evidence(evidence, mine)]
    lines += ["", *_otherwise(cell, mine)]
    lines += ["", _exit(cell, judgement), _next(cell, judgement, mine)]
    lines += [f"Measure it again: {cell.reproduce}"] if cell.reproduce else []
    return "\n".join(lines) + "\n"


def _rows(rows: list[Replicate]) -> Iterator[str]:
    good = usable(rows)
    numbers = {row.replicate for row in rows}
    hot = sum(row.status is Status.OK and row.is_throttled for row in rows)
    ended = sorted({row.status.value for row in rows if row.status is not Status.OK})
    otherwise = f", ended {', '.join(ended)}" if ended else ""
    yield (
        f"Rows: {len(rows)} of {len(numbers)} replicates; {len(good)} count, {hot}"
        f" throttled{otherwise}."
    )
    for row in good:
        tries = f", attempt {row.attempt}" if row.attempt else ""
        level = {True: "", None: "", False: ", warm-up not level"}[row.steady]
        yield (
            f"  #{row.replicate}: {row.tok_per_s:,.1f} tok/s, {len(row.samples_s)}"
            f" samples{tries}{level}"
        )


def _base(cell: CellVerdict, baseline: Baseline | BaselineProblem | None) -> Iterator[str]:
    if baseline is None:
        yield "Baseline: none was asked for."
    elif cell.confirmed:
        yield "Base: measured interleaved with the candidate, pair by pair, in one session."
    elif isinstance(baseline, BaselineProblem):
        yield f"Baseline: {baseline.message}"
    elif (base := baseline.cells.get(cell.cell_id)) is not None:
        speeds = ", ".join(f"{speed:,.1f}" for speed in base.tok_per_s)
        yield f"Baseline: run {base.run_id}, {len(base.tok_per_s)} replicates: {speeds} tok/s."
        yield (
            f"Between-session sd: tok/s {_between_sessions(base.night_log_sd, base)}, device time"
            f" {_between_sessions(base.device_night_log_sd, base)}."
        )
    else:
        yield "Baseline: it has no cell of this name."


def _between_sessions(sd: float | None, base: BaselineCell) -> str:
    if sd is None:
        return f"{100 * stats.ASSUMED_BETWEEN_SESSION_SD:g} %, assumed (no calibration measured it)"
    return f"{100 * sd:.2g} %, " + (
        f"from {base.night_starts} machine starts" if base.night_starts else "from a calibration"
    )


def _policy(policy: GatePolicy, overridden: bool) -> Iterator[str]:
    own = " (an override of the matrix)" if overridden else ""
    yield (
        f"Policy{own}: min_effect {policy.min_effect_pct:g} %, tolerance {policy.tolerance_pct:g}"
        f" %, alpha {policy.alpha_screen:g} to screen and {policy.alpha_confirm:g} to confirm,"
        f" power {policy.power:g}, at least {policy.min_replicates} replicates a side."
    )


def _evidence(evidence: Evidence, policy: GatePolicy) -> Iterator[str]:
    c = evidence.comparison
    unit = "tok/s" if evidence.metric == WALL else "s on the device a step"
    yield (
        f"{'Pairs' if evidence.paired else 'Two sessions'}, {evidence.metric}; all sd are of its"
        " natural logarithm:"
    )
    for name, values in (("base", evidence.base), ("candidate", evidence.candidate)):
        yield f"  {name}: n {len(values)}, geometric mean {geometric_mean(values):,.6g} {unit}"
    yield f"  change: ln {c.estimate:+.6f} = {shown(evidence.change_pct)} of speed"
    what = "of the differences" if evidence.paired else "within the sides"
    yield (
        f"  sd {what}: {evidence.sd:.6f} (df {evidence.sd_df:g}); moderated"
        f" {evidence.moderated_sd:.6f} (df {evidence.moderated_df:.4g})"
    )
    if not evidence.paired:
        yield f"  sd between sessions: {evidence.between_session_sd:.6f}, counted for each side"
    yield f"  standard error: {c.standard_error:.6f} (df {c.df:.4g})"
    t = evidence.t
    adjusted = "" if evidence.adjusted_p is None else f"; adjusted {evidence.adjusted_p:.4g}"
    yield (
        f"  t: {'-' if t is None else f'{t:+.4f}'}, p that it is no slower:"
        f" {c.p_slower:.4g}{adjusted}"
    )
    yield (
        f"  bounds at alpha {evidence.alpha:g}: {shown(evidence.lower_pct)} and"
        f" {shown(evidence.upper_pct)}"
    )
    mde = "none" if evidence.mde_pct is None else f"{evidence.mde_pct:.2f} %"
    yield f"  smallest drop that this finds: {mde} (power {_power(evidence, policy):g})"
    yield f"  a drop within {evidence.tolerance_pct:g} % is never red"


def _power(evidence: Evidence, policy: GatePolicy) -> float:
    return stats.confirm_power(policy) if evidence.paired else policy.power


def _otherwise(cell: CellVerdict, policy: GatePolicy) -> Iterator[str]:
    """What would have changed the verdict."""
    if not cell.evidence:
        yield "No speed was compared, so no speed would have changed this verdict."
        return
    evidence = cell.evidence[0]
    c = evidence.comparison
    if not math.isfinite(c.standard_error):
        yield "With more replicates there would be a noise to compare the change with."
        return
    reach = c.estimate - c.lower
    same = math.log1p(-policy.min_effect_pct / 100) + reach
    faster = math.log1p(policy.tolerance_pct / 100) + reach
    yield "With this noise it would have been:"
    yield f"  SAME with a change above {shown(pct(same))}; FASTER above {shown(pct(faster))}"
    if evidence.paired:
        beyond = math.log1p(-evidence.tolerance_pct / 100)
        # of a pair that was cut short the corrected one
        far = -stats.t_quantile(1 - evidence.alpha, c.df) * c.standard_error
        yield (
            f"  REGRESSED with a change below {shown(pct(min(beyond, far)))}, were it the only cell"
            " tested; more cells ask for more"
        )
    else:
        far = -stats.t_quantile(1 - policy.alpha_screen, c.df) * c.standard_error
        yield (
            f"  tested slower with a change below {shown(pct(far))}; REGRESSED only after base and"
            " candidate were measured interleaved"
        )


def _exit(cell: CellVerdict, judgement: Judgement) -> str:
    if cell.verdict is None:
        return "Exit: 0, nothing was compared."
    strict = "; 7 under --strict" if cell.verdict in FAIL_UNDER_STRICT else ""
    return (
        f"Exit: {int(EXIT_OF[cell.verdict])} by this cell alone{strict}; {int(judgement.exit_code)}"
        " for the whole run."
    )


def _next(cell: CellVerdict, judgement: Judgement, policy: GatePolicy) -> str:
    """What to do about this verdict."""
    if cell.verdict is Verdict.WATCH:
        return _of_watch(cell, policy)
    if cell.verdict is not None:
        return _NEXT[cell.verdict]
    problem = next(
        (
            one.verdict
            for one in judgement.findings
            if one.verdict in (Verdict.NO_BASELINE, Verdict.CORRUPT)
        ),
        None,
    )
    return "Gate it against a baseline to compare its speed." if problem is None else _NEXT[problem]


def _of_watch(cell: CellVerdict, policy: GatePolicy) -> str:
    if cell.cut_short:
        return (
            f"Measure the pairs that are missing ({cell.cut_short} were measured): the reason names"
            " the command."
        )
    if cell.confirmed:
        return (
            "Measure more pairs: `perfbench ab BASE CANDIDATE MATRIX --pairs N`; the report says"
            " how many would do."
        )
    if cell.screened:
        return (
            "`perfbench check` confirms it, in turns with the base's commit; nothing is slower"
            " before that."
        )
    return (
        f"Measure more processes, at least {policy.min_replicates} on each side that count; then"
        " judge again."
    )
