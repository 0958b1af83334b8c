"""`perfbench plan`: what a run would do, and why."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from perfbench.commands import options as opt
from perfbench.commands.console import print_text, say
from perfbench.errors import Exit, PerfbenchError

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


def plan(
    matrix: opt.MatrixArg,
    only: opt.Only = None,
    gpu: Gpu = None,
    strict: Strict = False,
    as_json: opt.Json = False,
) -> None:
    """Show what a run would do, and why; needs no GPU."""
    from nsa.capability import assumed
    from perfbench.commands.names import named_cells
    from perfbench.matrix import build_plan, load_matrix, plan_json, plan_text

    loaded = load_matrix(matrix)
    try:
        capability = assumed(gpu or loaded.target.gpu)
    except ValueError as error:
        text = str(error) if str(error).endswith("?") else f"{error}."
        raise PerfbenchError(Exit.USAGE, f"{text} Next: name one of them with --gpu") from None
    settings = opt.nsa_settings()
    chosen = named_cells(loaded, only, "cell=")
    built = build_plan(loaded, only=chosen, capability=capability, settings=settings)
    print_text(json.dumps(plan_json(built), indent=2) if as_json else plan_text(built, loaded))
    if strict and built.wrong_paths:
        say(f"{len(built.wrong_paths)} cell(s) will be WRONG_PATH, first {built.wrong_paths[0]}")
        raise typer.Exit(Exit.WRONG_PATH)
