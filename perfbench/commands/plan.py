"""`perfbench plan`: what a run would do, and why; with a baseline, whether it is what that ran."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from perfbench.commands import options as opt
from perfbench.commands.console import print_commands, print_text, say
from perfbench.errors import Exit, PerfbenchError, worst

if TYPE_CHECKING:
    from nsa.routing import Capability
    from perfbench.gate import Judgement
    from perfbench.matrix import Matrix, Plan
    from perfbench.records import Baseline

Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu", help="Instead of the matrix's target: a100, h100, h200, l40s, rtx4090, none."
    ),
]
Strict = Annotated[
    bool,
    typer.Option("--strict", help="Exit 4 where the Route of a cell violates the matrix's expect."),
]
PlannedLike = Annotated[
    Path | None,
    typer.Option(
        "--baseline",
        metavar="PATH",
        help="Judge the plan by it: exit 4 where a Route is another one (and --strict), 6 where a"
        " cell is gone, 8 for another config, 2 for looser rules.",
        show_default=False,
    ),
]


def plan(
    matrix: opt.MatrixArg,
    only: opt.Only = None,
    gpu: Gpu = None,
    baseline: PlannedLike = None,
    strict: Strict = False,
    as_json: opt.Json = False,
) -> None:
    """Show what a run would do, and why; needs no GPU."""
    from perfbench.commands.names import named_cells
    from perfbench.matrix import build_plan, load_matrix, plan_json, plan_text
    from perfbench.records import load_baseline

    loaded = load_matrix(matrix)
    base = None if baseline is None else load_baseline(baseline)
    capability = _assumed(gpu or loaded.target.gpu, base)
    settings = opt.nsa_settings()
    chosen = named_cells(loaded, only, "cell=")
    built = build_plan(loaded, only=chosen, capability=capability, settings=settings)
    judged = None if base is None else judged_plan(loaded, built, base, chosen)
    if as_json:
        found = plan_json(built)
        print_text(json.dumps(found | ({} if judged is None else _json_of(judged)), indent=2))
    else:
        print_text(plan_text(built, loaded))
    codes = [Exit.OK]
    if (strict or judged) and built.wrong_paths:
        say(f"{len(built.wrong_paths)} cell(s) will be WRONG_PATH, first {built.wrong_paths[0]}")
        codes.append(Exit.WRONG_PATH)
    if judged is not None:
        _report(judged, quiet=as_json)
        codes.append(judged.exit_code)
    if code := worst(codes):
        raise typer.Exit(code)


def judged_plan(matrix: Matrix, plan: Plan, baseline: Baseline, only: list[str]) -> Judgement:
    """The plan by the baseline and the rules that it holds; a retired one judges here, too."""
    from perfbench.gate import joint_rules, judge_plan
    from perfbench.matrix import JudgeRules, policies
    from perfbench.records import select_cells

    findings = []
    if baseline.rules is not None:
        try:
            rules = JudgeRules.from_stored(baseline.rules)
        except ValueError as error:
            text = f"the baseline's rules cannot be read: {' '.join(str(error).split())[:200]}"
            raise PerfbenchError(Exit.BASELINE, f"{text}. Next: promote it again") from None
        joint = joint_rules(JudgeRules.of(matrix), rules, policies(matrix), baseline.cells)
        findings = joint.findings()
    axes = [*(one.axes for one in plan.cells), *(one.axes for one in baseline.cells.values())]
    selected = {cell.cell_id for cell in select_cells(axes, only)} if only else None
    excluded = {one.cell_id: one.reason for one in plan.excluded}
    return judge_plan(
        plan.cells,
        excluded,
        baseline,
        policies(matrix),
        selected=selected,
        findings=findings,
    )


def _assumed(gpu: str, baseline: Baseline | None) -> Capability:
    """The card that ``gpu`` names, with the software that the baseline was measured with: what a
    hosted runner has installed decides no Route of a GPU.
    """
    from nsa.capability import assumed

    try:
        found = assumed(gpu)
    except ValueError as error:
        text = str(error) if str(error).endswith("?") else f"{error}."
        raise PerfbenchError(Exit.USAGE, f"{text} Next: name one of them with --gpu") from None
    if baseline is None:
        return found
    had = baseline.environment
    flash, triton = had.get("flash_provider"), had.get("triton")
    absent = "the baseline's environment had none"
    return replace(
        found,
        fa2_provider=flash,
        fa2_reason="" if flash else absent,
        torch_version=had.get("torch") or "0",
        triton_provider=f"triton {triton}" if triton else None,
        triton_reason="" if triton else absent,
    )


def _json_of(judged: Judgement) -> dict[str, object]:
    from perfbench.report import to_json

    return {"judged": to_json(judged)}


def _report(judged: Judgement, *, quiet: bool) -> None:
    """The headline, each cell that is not as in the baseline, and annotations where GitHub runs."""
    from perfbench.gate import severity
    from perfbench.records import Verdict
    from perfbench.report import announce

    if not quiet:
        lines = [f"{f.verdict.value}: {f.reason}" for f in judged.findings]
        lines += [
            f"{verdict.value} {cell.cell_id}: {cell.reason}"
            for verdict in sorted(Verdict, key=severity)  # what is red before what is new
            for cell in judged.cells
            if cell.verdict is verdict
        ]
        print_text("\n".join([judged.headline, *(f"  {line}" for line in lines)]))
    print_commands(announce(judged, None))
