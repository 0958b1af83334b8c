"""The arguments and options that commands share: how each is spelled, and what its help says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from perfbench.errors import Exit, PerfbenchError

MatrixArg = Annotated[
    Path, typer.Argument(metavar="MATRIX", help="A matrix file, e.g. matrices/cpu.yaml.")
]
RunArg = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, or its run.jsonl or run.jsonl.gz.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="AXIS=V",
        help="Cells to keep: the same axis repeated is `or`, other axes are `and`.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of text.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="Warnings (WATCH, BLIND, UNSTABLE) fail with 7.")
]
BaselinePath = Annotated[
    Path | None,
    typer.Option(
        "--baseline",
        metavar="PATH",
        help="Default: reports/baselines/<gpu>/<matrix>.json.",
        show_default=False,
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume", metavar="RUN", help="Go on with this run; its finished replicates stay."
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget", metavar="TIME", help="Start no replicate after this time, e.g. 90s, 30m, 1.5h."
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", min=0, help="Of the order and of the inputs; random and stored by default."
    ),
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the run's folder is made.")]
Commit = Annotated[
    str | None,
    typer.Option(
        "--source-commit", metavar="SHA", help="The measured commit, where git cannot say."
    ),
]
Inject = Annotated[
    list[str] | None,
    typer.Option(
        "--inject",
        metavar="FAULT@CELL",
        help="slowdown=10%, oom, hang or segv: a demonstration, stored and never promotable.",
    ),
]
NoConfirm = Annotated[
    bool,
    typer.Option(
        "--no-confirm",
        help="Do not measure what looks slower again beside the baseline's commit: it stays WATCH.",
    ),
]
Blocks = Annotated[
    int | None,
    typer.Option(
        "--blocks",
        min=2,
        metavar="N",
        help="Pairs of each cell; the policy's confirm_blocks by default.",
    ),
]
REVISION = "A commit, branch or tag, or a folder that holds nsa/ (FOLDER@SHA where git is missing)."
RevA = Annotated[str, typer.Argument(metavar="REV_A", help=f"The base. {REVISION}")]
RevB = Annotated[
    str,
    typer.Argument(
        metavar="REV_B", help="The candidate, likewise; `.` is this folder with its changes."
    ),
]
BaseArg = Annotated[
    Path,
    typer.Argument(
        metavar="BASE", help="A run folder, or the folder of a `perfbench ab`, which holds both."
    ),
]
CandArg = Annotated[
    Path | None,
    typer.Argument(
        metavar="CAND", help="A run folder; none where BASE holds both.", show_default=False
    ),
]
PairOut = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Where the folder with a/ and b/ is made.")
]
PairResume = Annotated[
    Path | None,
    typer.Option(
        "--resume", metavar="PAIR", help="Go on with this folder; its finished pairs stay."
    ),
]
PairInject = Annotated[
    list[str] | None,
    typer.Option(
        "--inject", metavar="FAULT@CELL", help="As for `run`; the fault goes to side b alone."
    ),
]

SchemaKind = Annotated[
    Literal["matrix", "result", "verdict"],
    typer.Argument(help="A matrix file, one line of a run.jsonl, or a verdict.json."),
]
DoctorLog = Annotated[
    Path | None,
    typer.Option(
        "--log",
        metavar="PATH",
        help="A run folder, a run.jsonl or run.jsonl.gz, or a training log to look at too.",
        show_default=False,
    ),
]
DoctorGpu = Annotated[
    str | None,
    typer.Option(
        "--gpu",
        metavar="ID",
        help="Instead of CUDA_VISIBLE_DEVICES, spelled like it.",
        show_default=False,
    ),
]
TraceArg = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run folder, or the folder of a `perfbench ab`, which holds both sides.",
    ),
]
CellArg = Annotated[
    str, typer.Argument(metavar="CELL", help="A cell's id, as the report shows it.")
]
TraceOut = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Where the timelines go; the run's traces/ by default.",
        show_default=False,
    ),
]
TraceSide = Annotated[
    Literal["a", "b", "both"] | None,
    typer.Option(
        "--side", help="a: the base, b: the run; all there are by default.", show_default=False
    ),
]


def seconds(text: str | None) -> float | None:
    """'90', '90s', '30m' or '1.5h' in seconds."""
    if text is None:
        return None
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("s", "m", "h") else (text, "s")
    try:
        seconds = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise PerfbenchError(
            Exit.USAGE, f"--budget {text!r} is not a time; write e.g. 90s, 30m or 1.5h"
        )
    return seconds
