"""The command `perfbench tune`: what it takes.

Like `cli`, it imports nothing before it is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from perfbench.commands import options as opt

Stored = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="RUN",
        help="Decide again from this run of it; measures nothing.",
        show_default=False,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model", help="A preset; m7c_125m by default, tiny for a CPU.", show_default=False
    ),
]
Lengths = Annotated[
    str | None,
    typer.Option(
        "--lengths",
        metavar="N,N",
        help="256 to 8192, doubling, by default: 256,512,...",
        show_default=False,
    ),
]
Processes = Annotated[
    int | None,
    typer.Option(
        "--processes",
        min=2,
        metavar="N",
        help="Fresh ones of each cell; 3 by default.",
        show_default=False,
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="TIME",
        help="Start no replicate after this time; 5m by default.",
        show_default=False,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Where the run's folder is made; reports/runs by default.",
        show_default=False,
    ),
]


def tune(
    stored: Stored = None,
    model: Model = None,
    lengths: Lengths = None,
    processes: Processes = None,
    resume: opt.Resume = None,
    budget: Budget = None,
    seed: opt.Seed = None,
    out: Out = None,
    source_commit: opt.Commit = None,
    as_json: opt.Json = False,
) -> None:
    """Measure from which lengths which path is the fastest: the table that path=auto reads."""
    from perfbench.commands import session
    from perfbench.commands import tune as tuning

    if stored is not None:
        given = {
            "model": model,
            "lengths": lengths,
            "processes": processes,
            "resume": resume,
            "budget": budget,
            "seed": seed,
        }
        tuning.refuse_measuring_options({**given, "source-commit": source_commit})
        text, code = tuning.tell(stored, out, as_json)
    else:
        argv, budget_s = ["perfbench", *sys.argv[1:]], opt.seconds(budget or tuning.DEFAULT_BUDGET)
        options = session.RunOptions(
            argv, [], resume, budget_s, seed, out or tuning.DEFAULT_OUT, source_commit
        )
        text, code = tuning.tune(tuning.TuneOptions(model, lengths, processes), options, as_json)
    typer.echo(text.rstrip("\n"))
    raise typer.Exit(code)
