"""Interleaved pairs of one commit with itself, for `calibrate`: nothing planted, or real extra work
planted in side b.

They show on real processes what the certificate simulates: the confirmation stays silent, and finds
what was put in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from perfbench.calibration.certify import Rate
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import CellVerdict, compare
from perfbench.matrix import Policies, policies, stored_matrix
from perfbench.records import Run, Verdict
from perfbench.runner import Pair, is_pair, parse_injection, read_pair


@dataclass(frozen=True, slots=True)
class RealPair:
    """One cell of one pair. ``extra_work_pct``: of a step's time, planted in side b; 0 in an A/A.

    ``expected_pct`` is the change of tok/s that such work makes, -100 x / (100 + x); ``change_pct``
    what was measured, between
    ``lower_pct`` and ``upper_pct`` at the confirmation's alpha; null with a verdict that is not of
    speed, whose ``reason`` says why.
    """

    run_id: str
    cell_id: str
    extra_work_pct: float
    expected_pct: float
    verdict: str
    pairs: int
    change_pct: float | None
    lower_pct: float | None
    upper_pct: float | None
    reason: str


def read(folders: Sequence[Path], gpu_slug: str) -> list[RealPair]:
    """Every cell of the pairs in ``folders``, each judged by its own matrix's rule, the most extra
    work last.

    PerfbenchError(USAGE): a folder that is no pair, sides of different or unknown code, another
    kind of machine than ``gpu_slug``, another fault than a slowdown, a matrix that this perfbench
    cannot read, or a pair named twice.
    """
    found: list[RealPair] = []
    for folder in folders:
        if not is_pair(folder):
            raise PerfbenchError(
                Exit.USAGE,
                f"--pair got {folder}, wanted the folder of a `perfbench ab`, with a/ and b/ in it;"
                " name one",
            )
        one = read_pair(folder)
        _same_code(one.base, one.candidate, folder)
        if one.candidate.manifest.environment.gpu_slug != gpu_slug:
            got = one.candidate.manifest.environment.gpu_slug
            raise PerfbenchError(
                Exit.USAGE,
                f"--pair {folder} was measured on {got}, the runs on {gpu_slug}; calibrate each by"
                " itself",
            )
        if one.candidate.manifest.run_id in {known.run_id for known in found}:
            raise PerfbenchError(
                Exit.USAGE,
                f"--pair names {one.candidate.manifest.run_id} twice; name each pair once",
            )
        found += _cells(one)
    return sorted(found, key=lambda one: (one.extra_work_pct, one.run_id, one.cell_id))


def false_alarms(found: Sequence[RealPair]) -> Rate:
    """REGRESSED cells of those with nothing planted, and with a speed to judge."""
    plain = [one for one in found if one.extra_work_pct == 0 and one.change_pct is not None]
    return Rate(sum(one.verdict == Verdict.REGRESSED for one in plain), len(plain))


def _cells(one: Pair) -> list[RealPair]:
    planted = _planted(one.candidate)
    judgement = compare(
        one.base,
        one.candidate,
        _policies(one.candidate),
        paired=True,
        resume_command=f"perfbench ab --resume {one.folder}",
    )
    return [
        _real(cell, one.candidate.manifest.run_id, planted.get(cell.cell_id, 0.0))
        for cell in judgement.cells
    ]


def _policies(run: Run) -> Policies:
    """Those of the matrix that the run holds."""
    return policies(stored_matrix(run.manifest))


def _planted(run: Run) -> Mapping[str, float]:
    cells = [cell.cell_id for cell in run.manifest.cells]
    made = [parse_injection(text, cells) for text in run.manifest.injections]
    for one in made:
        if one.percent is None:
            raise PerfbenchError(
                Exit.USAGE,
                f"{run.manifest.run_id} has the fault {one.kind}, wanted slowdowns alone; leave"
                " that pair out",
            )
    return {one.cell_id: one.percent or 0.0 for one in made}


def _real(cell: CellVerdict, run_id: str, extra_pct: float) -> RealPair:
    wall = next((one for one in cell.evidence if one.metric == "tok_per_s" and one.paired), None)
    return RealPair(
        run_id=run_id,
        cell_id=cell.cell_id,
        extra_work_pct=extra_pct,
        expected_pct=-100 * extra_pct / (100 + extra_pct),
        verdict=cell.verdict.value if cell.verdict else "",
        pairs=0 if wall is None else len(wall.base),
        change_pct=None if wall is None else wall.change_pct,
        lower_pct=None if wall is None else wall.lower_pct,
        upper_pct=None if wall is None else wall.upper_pct,
        reason=cell.reason,
    )


def _same_code(base: Run, candidate: Run, folder: Path) -> None:
    one, other = base.manifest.source, candidate.manifest.source
    if one.commit is None or (one.commit, one.dirty_sha256) != (other.commit, other.dirty_sha256):
        text = (
            f"--pair {folder} has sides of {one.commit or 'unknown code'} and"
            f" {other.commit or 'unknown code'}"
        )
        raise PerfbenchError(
            Exit.USAGE,
            f"{text}; wanted one commit twice: `perfbench ab HEAD HEAD MATRIX`, with --inject or"
            " without",
        )
