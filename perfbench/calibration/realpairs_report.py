"""Interleaved pairs of one commit with itself in the calibration's Markdown: what the gate made of
real processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfbench.calibration.certificate import bounded, table
from perfbench.records import Verdict
from perfbench.text import NULL, cell_code, escape

if TYPE_CHECKING:
    from perfbench.calibration.aa_pairs import RealPair
    from perfbench.calibration.calibrate import Calibration

REASON_CHARS = 90  # of a cell without a speed; its run has the whole
HOW = (
    "`perfbench ab HEAD HEAD MATRIX`, planted with `--inject slowdown=3%@CELL`; `--pair FOLDER`"
    " tells it to `perfbench calibrate`"
)


def headline(c: Calibration) -> str:
    if not c.pairs:
        return (
            "**No real pair was given**: every drop in these numbers is simulated, no kernel got"
            f" slower. {HOW}."
        )
    planted = [one for one in c.pairs if one.extra_work_pct > 0 and one.change_pct is not None]
    red = [f"{one.extra_work_pct:g} %" for one in planted if one.verdict == Verdict.REGRESSED]
    rest = [
        f"{one.extra_work_pct:g} % ({escape(one.verdict)})"
        for one in planted
        if one.verdict != Verdict.REGRESSED
    ]
    said = (
        [f"**Real interleaved pairs**: with nothing planted {bounded(c.pairs_red)} cells REGRESSED"]
        if c.pairs_red.trials
        else []
    )
    said += [f"real extra work found REGRESSED at {', '.join(red)}"] if red else []
    said += [f"and not called slower at {', '.join(rest)}"] if rest else []
    wrong = sum(one.change_pct is None for one in c.pairs)
    said += [f"{wrong} cell{'s' if wrong > 1 else ''} gave no speed to judge"] if wrong else []
    return "; ".join(said) + "."


def section(c: Calibration) -> list[str]:
    head = ["## Real pairs", ""]
    if not c.pairs:
        return [*head, f"None was given: {HOW}.", ""]
    rows = [
        [
            f"{one.extra_work_pct:g}",
            cell_code(one.cell_id),
            f"{one.pairs}",
            _pct(one.expected_pct),
            _pct(one.change_pct),
            _bounds(one),
            _verdict(one),
            escape(one.run_id),
        ]
        for one in c.pairs
    ]
    columns = [
        "extra work, %",
        "cell",
        "pairs",
        "expected, %",
        "measured, %",
        "bounds, %",
        "verdict",
        "run",
    ]
    return [
        *head,
        (
            "One commit against itself, in turns on one machine; 0 is an A/A, elsewhere side b did"
            " that much more work in each step. Work of x % of a step lowers tok/s by x / (100 +"
            " x). The bounds are at the confirmation's alpha. Each pair is judged by its own"
            " matrix: a drop below its min_effect_pct need not be found, and one below its"
            " tolerance_pct must not be called REGRESSED."
        ),
        "",
        *table(columns, rows),
        "",
    ]


def _verdict(one: RealPair) -> str:
    return escape(
        one.verdict if one.change_pct is not None else f"{one.verdict}: {one.reason[:REASON_CHARS]}"
    )


def _pct(value: float | None) -> str:
    return NULL if value is None else f"{value or 0.0:+.2f}"


def _bounds(one: RealPair) -> str:
    return NULL if one.change_pct is None else f"{_pct(one.lower_pct)} to {_pct(one.upper_pct)}"
