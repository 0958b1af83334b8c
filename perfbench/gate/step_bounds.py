"""The bounds that `expect` sets on what a step costs, held against the rows: hard, without
statistics and without a baseline.
"""

from __future__ import annotations

from collections.abc import Sequence

from perfbench.gate.judgement import Finding
from perfbench.records import BOUNDS, PlannedCell, Replicate, Verdict, bounds_of, measured_of
from perfbench.text import number


def bound_findings(cell: PlannedCell, good: Sequence[Replicate], *, on_gpu: bool) -> list[Finding]:
    """Every bound of ``cell`` that its usable rows break (OVER_BOUND), and every one that nothing
    measured can be held against (FAILED): what was not measured does not pass.
    """
    found = []
    for name, most in bounds_of(cell.expect).items():
        bound = BOUNDS[name]
        values = measured_of(good, bound.measured)
        if not values:
            found.append(Finding(Verdict.FAILED, name, _not_measured(name, most, on_gpu)))
            continue
        if (got := bound.of(values)) <= most:
            continue
        of = f"the {bound.how} of {len(values)} replicates" if len(values) > 1 else "one replicate"
        text = (
            f"got {number(got, 6)} {bound.title} ({of}), wanted at most {most:g} ({name}); look at"
            " what it runs with `perfbench trace`, or raise the bound for review"
        )
        found.append(Finding(Verdict.OVER_BOUND, name, text))
    return found


def _not_measured(name: str, most: float, on_gpu: bool) -> str:
    bound = BOUNDS[name]
    why = (
        "a CPU has no device whose kernels count; measure on a GPU, or narrow the rule's match"
        if bound.needs_gpu and not on_gpu
        else "no replicate has a profiled step that shows it; measure again"
    )
    return f"got no {bound.title}, wanted at most {most:g} ({name}), which is not proved: {why}"
