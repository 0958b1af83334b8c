"""`perfbench doctor`: what a run would find on this machine, or what went wrong in one."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from perfbench.commands import options as opt
from perfbench.commands.console import print_text
from perfbench.text import plain

Log = Annotated[
    Path | None,
    typer.Option(
        "--log",
        metavar="PATH",
        help="A run folder, a run.jsonl or run.jsonl.gz, or a training log to look at too.",
        show_default=False,
    ),
]
Gpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="ID",
        help="Instead of CUDA_VISIBLE_DEVICES, spelled like it.",
        show_default=False,
    ),
]


def doctor(log: Log = None, gpu: Gpu = None, as_json: opt.Json = False) -> None:
    """Say what a run would find on this machine, or what went wrong in one."""
    from perfbench.commands.outcome import CHECKOUT
    from perfbench.machine.doctor import diagnose, exit_code, log_lines, render_text

    of_log = [] if log is None else log_lines(log)
    here = diagnose(CHECKOUT, gpu=gpu)
    lines = [*of_log, *here]
    if as_json:
        text = json.dumps([asdict(line) for line in lines], indent=2)
    elif log is None:
        text = render_text(here)
    else:
        text = f"{plain(log)}:\n{render_text(of_log)}\nthis machine, now:\n{render_text(here)}"
    print_text(text)
    raise typer.Exit(exit_code(lines))
