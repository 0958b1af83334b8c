"""Two runs against each other: what `compare` and `ab` judge, by the gate's own engine."""

from __future__ import annotations

from dataclasses import replace

from perfbench.errors import Exit
from perfbench.gate.baseline import baseline_of_run
from perfbench.gate.comparable import unverified
from perfbench.gate.confirmation import judge_pairs
from perfbench.gate.judgement import CellVerdict, Finding, Judgement, resummarise
from perfbench.gate.judging import judge
from perfbench.gate.suspicion import without_suspicion
from perfbench.matrix import GatePolicy, Policies
from perfbench.records import Manifest, Run, Verdict

SPEED_ONLY = (
    Verdict.SAME,
    Verdict.FASTER,
    Verdict.WATCH,
    Verdict.SUSPECT,
    Verdict.BLIND,
    Verdict.UNSTABLE,
)


def compare(
    base: Run,
    candidate: Run,
    policy: GatePolicy | Policies,
    *,
    paired: bool,
    strict: bool = False,
    resume_command: str = "",
) -> Judgement:
    """The verdict of ``candidate`` against ``base``.

    ``paired``: the runs are the two sides of one interleaved measurement, replicate r next
    to replicate r, so a drop can be REGRESSED (Holm over all cells). Otherwise they are two
    sessions, and a drop is at most SUSPECT, to be confirmed by `ab`. The hard gates hold for both:
    a base cell that fails one is not compared, and says why; a base run that is wrong as a whole
    (throttled, two machines, no sentinel, edited) makes every comparison INCOMPARABLE, and its
    finding is reported.
    ``resume_command``: the command that measures the planned pairs that are missing.
    """
    policies = Policies.over(policy)
    alone = judge(base, None, policies)
    red = {cell.cell_id: cell for cell in alone.cells if cell.exit_code is not Exit.OK}
    judgement = judge(
        candidate, baseline_of_run(base, red), policies, strict=strict, same_route=False
    )
    wrong = _of_base(alone.findings)
    cells = [_with_base_reason(cell, red) for cell in judgement.cells]
    if wrong:
        cells = [_incomparable(cell) for cell in cells]
    own = unverified(candidate)
    notes = [note for note in judgement.notes if note not in own]
    judgement = resummarise(
        judgement,
        cells,
        findings=[*judgement.findings, *wrong],
        notes=(*unverified(candidate, base), *notes, *_origin_notes(base.manifest)),
    )
    if not paired:
        return judgement
    # The same rows unpaired are no screen of another session: only the pairs judge.
    judgement = resummarise(judgement, [without_suspicion(cell) for cell in judgement.cells])
    compared = [
        cell.cell_id for cell in judgement.cells if cell.compared and cell.verdict in SPEED_ONLY
    ]
    return judge_pairs(judgement, base, candidate, policies, compared, resume_command)


def _with_base_reason(cell: CellVerdict, red: dict[str, CellVerdict]) -> CellVerdict:
    base = red.get(cell.cell_id)
    if base is None or cell.verdict is not Verdict.NEW:
        return cell
    return replace(
        cell, reason=f"the base's speed is not to be believed ({base.verdict}: {base.reason})"
    )


def _of_base(findings: list[Finding]) -> list[Finding]:
    """The base run's own findings, as they bear on a comparison: whatever is wrong with the base is
    no failure of the candidate.
    """
    # Without a speed the base is NO_BASELINE already.
    reported = [one for one in findings if one.rule != "nothing"]
    return [
        Finding(
            one.verdict if one.verdict is Verdict.ENV else Verdict.INCOMPARABLE,
            f"base {one.rule}",
            f"the base run: {one.reason}",
        )
        for one in reported
    ]


def _incomparable(cell: CellVerdict) -> CellVerdict:
    if cell.verdict not in SPEED_ONLY or not cell.compared:
        return cell
    reason = "not compared: the base run is not to be believed (see the run's findings)"
    return replace(
        cell,
        verdict=Verdict.INCOMPARABLE,
        reason=reason,
        evidence=(),
        screened=False,
        suspicion="",
    )


def _origin_notes(base: Manifest) -> list[str]:
    """What a reader of the change must know of the base, and what no verdict hangs on: an
    uncommitted base may be meant.
    """
    found = []
    if base.source.dirty_sha256 is not None:
        found.append(
            f"the base {base.run_id} measured uncommitted changes ({base.source.dirty_sha256[:8]}),"
            " not its commit alone"
        )
    if base.injections:
        found.append(
            f"the base {base.run_id} was made with injected faults ({', '.join(base.injections)}):"
            " a demonstration"
        )
    return found
