"""The arguments and options that commands share: how each is spelled, and what its help says."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from perfbench.commands import names
from perfbench.errors import Exit, PerfbenchError

if TYPE_CHECKING:
    from nsa.settings import Settings
    from perfbench.matrix import Matrix
    from perfbench.runner.fleet import FleetOptions

RUNS = names.RUNS
SECRET_OPTIONS = ("--history", "--webhook")
MatrixArg = Annotated[
    Path,
    typer.Argument(
        metavar="MATRIX",
        help="A matrix file, e.g. matrices/cpu.yaml, or @NAME of a shipped one, e.g. @cpu.",
    ),
]
RunArg = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run folder, or its run.jsonl or run.jsonl.gz; `latest` of reports/runs.",
        callback=names.newest_run,
        autocompletion=names.complete_run,
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="AXIS=V",
        help="Cells to keep: the same axis repeated is `or`, other axes are `and`; cell=AXIS=V,...",
        autocompletion=names.complete_only,
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
        help="Default: reports/baselines/<gpu>/<matrix>.json as the default branch has it.",
        show_default=False,
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="RUN",
        help="Resume this run; its finished replicates stay.",
        callback=names.newest_run,
        autocompletion=names.complete_run,
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="TIME",
        help="Start no replicate after this time, e.g. 90s, 30m, 1.5h; what the baseline knows"
        " least comes first.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", min=0, help="Seed of the order and the inputs; random and stored by default."
    ),
]
ExecutorName = Annotated[
    str,
    typer.Option(
        "--executor",
        metavar="WHERE",
        help="local, or the cards of a cluster that match the target: ray or slurm.",
    ),
]
Cards = Annotated[
    int | None,
    typer.Option(
        "--cards",
        min=1,
        metavar="N",
        help="Of a fleet at most so many; by default all of Ray's, and one of Slurm's.",
        show_default=False,
    ),
]
ExecutorOption = Annotated[
    list[str] | None,
    typer.Option(
        "--executor-option",
        metavar="KEY=VALUE",
        help="For the cluster: address=HOST:PORT of Ray; of Slurm submitit's parameters, e.g."
        " slurm_partition=gpu; wait_s=600 for a card in a queue.",
    ),
]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the run's folder is made.")]
HistoryUrl = Annotated[
    str | None,
    typer.Option(
        "--history",
        metavar="URL",
        help="A history's file or postgresql:// URL. Default: PERFBENCH_HISTORY, else"
        " reports/history.sqlite where it exists; `none`: no history.",
        show_default=False,
    ),
]
WebhookUrl = Annotated[
    str | None,
    typer.Option(
        "--webhook",
        metavar="URL",
        help="POST verdict.json there. Default: PERFBENCH_WEBHOOK. No output and no run holds it.",
        show_default=False,
    ),
]
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
        autocompletion=names.complete_fault,
    ),
]
NoConfirm = Annotated[
    bool,
    typer.Option(
        "--no-confirm",
        help="Do not confirm what looks slower against the baseline's commit: it stays SUSPECT.",
    ),
]
Pairs = Annotated[
    int | None,
    typer.Option(
        "--pairs",
        "--blocks",
        min=1,
        metavar="N",
        help="Pairs of each cell, four a block; the policy's confirm_pairs by default. --blocks is"
        " the older name.",
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
        metavar="BASE",
        help="A run folder, or the folder of a `perfbench ab`, which holds both.",
        callback=names.newest_run,
        autocompletion=names.complete_run,
    ),
]
CandArg = Annotated[
    Path | None,
    typer.Argument(
        metavar="CAND",
        help="A run folder; none where BASE holds both.",
        show_default=False,
        callback=names.newest_run,
        autocompletion=names.complete_run,
    ),
]
PairOut = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="Where the folder with a/ and b/ is made.")
]
PairResume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="PAIR",
        help="Resume this folder; its finished pairs stay.",
        callback=names.newest_run,
        autocompletion=names.complete_run,
    ),
]
PairInject = Annotated[
    list[str] | None,
    typer.Option(
        "--inject",
        metavar="FAULT@CELL",
        help="As for `run`; the fault goes to side b alone.",
        autocompletion=names.complete_fault,
    ),
]

TraceArg = Annotated[
    Path,
    typer.Argument(
        metavar="RUN",
        help="A run folder, or that of a `perfbench ab`; `latest` of reports/runs.",
        callback=names.newest_run,
        autocompletion=names.complete_run,
    ),
]
CellArg = Annotated[
    str,
    typer.Argument(
        metavar="CELL",
        help="A cell's id, or AXIS=V,... of any axes that name one cell, in any order.",
        autocompletion=names.complete_cell,
    ),
]


@dataclass(frozen=True, slots=True)
class TypedOptions:
    """The options of `run` and `check` that say what is measured, as a user gives them."""

    only: list[str] | None = None
    resume: Path | None = None
    budget: str | None = None
    seed: int | None = None
    out: Path = RUNS
    source_commit: str | None = None
    inject: list[str] | None = None
    executor: str = "local"
    cards: int | None = None
    executor_option: list[str] | None = None


@dataclass(frozen=True, slots=True)
class RunOptions:
    """The parsed options of a command that measures a matrix; ``argv`` goes into the manifest."""

    argv: list[str]
    only: list[str] = field(default_factory=list)
    resume: Path | None = None
    budget_s: float | None = None
    seed: int | None = None
    out: Path = RUNS
    source_commit: str | None = None
    inject: list[str] = field(default_factory=list)
    fleet: FleetOptions | None = None  # None: this machine
    baseline: Path | None = None  # that a budget is spent by, if not the matrix's own

    @classmethod
    def parsed(cls, matrix: Matrix, argv: list[str], typed: TypedOptions) -> Self:
        """``typed`` for the cells of ``matrix``; USAGE where a value is not valid, and for a fleet
        and cells of several ranks.
        """
        fleet, only = fleet_options(typed), names.named_cells(matrix, typed.only, "cell=")
        if fleet is not None:
            _refuse_ranks(matrix, only, typed.executor)
        return cls(
            argv,
            only,
            typed.resume,
            seconds(typed.budget),
            typed.seed,
            typed.out,
            typed.source_commit,
            names.named_cells(matrix, typed.inject, "@"),
            fleet,
        )


def _refuse_ranks(matrix: Matrix, only: list[str], executor: str) -> None:
    """A job of a fleet has one card, and the ranks of a cell are of one machine."""
    from perfbench.matrix import cells_of

    largest = max(cell.world_size for cell in cells_of(matrix, only))
    if largest > 1:
        raise PerfbenchError(
            Exit.USAGE,
            f"got --executor {executor} and {matrix.path} with a cell of world_size"
            f" {largest}; wanted world_size 1 in every cell, since a job of a fleet has one card."
            f" Next: --only world_size=1, or --executor local on a machine of {largest} cards",
        )


def fleet_options(typed: TypedOptions) -> FleetOptions | None:
    """None for this machine; USAGE where an option is not valid, or would be ignored."""
    words = typed.executor_option or []
    if typed.executor == "local" and typed.cards is None and not words:
        return None
    from perfbench.runner.fleet import FleetOptions

    found = FleetOptions.parsed(typed.executor, typed.cards, words, typed.out)
    return found if found.is_fleet else None


def argv() -> list[str]:
    """The command line as a user would type it, without --history and --webhook: a URL may hold a
    password, and where a run or its verdict goes is no part of it.
    """
    words, skip = ["perfbench"], False
    for word in sys.argv[1:]:
        if not skip and word.partition("=")[0] not in SECRET_OPTIONS:
            words.append(word)
        skip = not skip and word in SECRET_OPTIONS
    return words


def nsa_settings() -> Settings:
    """What the environment sets for `nsa`, without the table of thresholds of the user's home;
    USAGE where a value is not valid.
    """
    import nsa.settings

    try:
        return nsa.settings.load(nsa.settings.current().given())
    except ValueError as error:
        raise PerfbenchError(Exit.USAGE, str(error)) from None


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
