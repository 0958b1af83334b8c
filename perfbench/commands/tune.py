"""`perfbench tune`: a matrix of its own measured, or such a run read, and from which lengths which
path is the fastest.

It changes no code: a person commits the line for nsa/routing/thresholds.py, with the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from perfbench.commands import options as opt
from perfbench.commands.console import print_first, say, warn
from perfbench.errors import Exit, PerfbenchError, unwritable

if TYPE_CHECKING:
    from perfbench.tuning import Machine

DEFAULT_MODEL = "m7c_125m"
DEFAULT_BUDGET = "5m"
DEFAULT_PROCESSES = 3
Stored = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="RUN",
        help="Decide again from this stored run of it; measures nothing.",
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
        help="Fresh processes of each cell; 3 by default.",
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
    if stored is not None:
        measuring = {
            "model": model,
            "lengths": lengths,
            "processes": processes,
            "resume": resume,
            "budget": budget,
            "seed": seed,
            "source-commit": source_commit,
        }
        _refuse_measuring_options(measuring)
        _decide(stored, out, as_json)
    budget_s = opt.seconds(budget or DEFAULT_BUDGET)
    options = opt.RunOptions(opt.argv(), [], resume, budget_s, seed, out or opt.RUNS, source_commit)
    run = _measure(model or DEFAULT_MODEL, lengths, processes or DEFAULT_PROCESSES, options)
    _decide(run, None, as_json)


def _decide(run_path: Path, out: Path | None, as_json: bool) -> NoReturn:
    """Decide from a stored run, write tune.json and tune.md to ``out``, by default next to the run
    file, print one of them and exit.
    """
    from perfbench.commands.judging import judge_alone
    from perfbench.tuning import decide_run, tuning_json, tuning_markdown

    outcome = judge_alone(run_path)
    try:
        tuned = decide_run(outcome.run, outcome.judgement)
    except ValueError as error:
        raise PerfbenchError(
            Exit.USAGE, f"{error}. Next: name the folder of one, or measure without --from"
        ) from None
    texts = {"tune.json": tuning_json(tuned), "tune.md": tuning_markdown(tuned)}
    files = {(out or outcome.folder) / name: text for name, text in texts.items()}
    print_first(
        texts["tune.json" if as_json else "tune.md"],
        *(partial(_write, path, text) for path, text in files.items()),
    )
    raise typer.Exit(tuned.exit_code)


def _refuse_measuring_options(values: Mapping[str, object]) -> None:
    """PerfbenchError(USAGE) where an option of measuring comes with --from."""
    if useless := [f"--{name}" for name, value in values.items() if value is not None]:
        raise PerfbenchError(
            Exit.USAGE,
            f"--from measures nothing, so {', '.join(useless)} would do nothing. Next: omit it",
        )


def _measure(name: str, lengths: str | None, processes: int, options: opt.RunOptions) -> Path:
    """The run's folder under ``options.out``, where the matrix is written too, so that `perfbench
    run` can measure a cell of it again.
    """
    from nsa.config import preset
    from perfbench.commands.measuring import measure, measuring_context
    from perfbench.matrix import load_matrix
    from perfbench.tuning import (
        DEFAULT_LENGTHS,
        parse_lengths,
        refuse_settings,
        tuning_matrix,
    )

    tokens = DEFAULT_LENGTHS if lengths is None else parse_lengths(lengths)
    try:
        model = preset(name)
    except ValueError as error:
        raise PerfbenchError(Exit.USAGE, str(error)) from None
    settings = opt.nsa_settings()
    refuse_settings(settings)
    machine = _machine()
    path = options.out / f"{machine.matrix_name}.yaml"
    _write(path, tuning_matrix(machine, name, model, tokens, processes, settings))
    matrix = load_matrix(path)
    context = measuring_context(matrix.target)
    assert context is not None  # the matrix names this very machine
    return measure(matrix, options, context)


def _machine() -> Machine:
    from perfbench.machine import capability_here, check_target, visible_gpu
    from perfbench.matrix import Target
    from perfbench.tuning import Machine

    gpu, reason = visible_gpu()
    if gpu is None:
        warn(f"no GPU ({reason}): path triton and FA-2 cannot be judged here")
    fit = check_target(Target(gpu="none" if gpu is None else gpu.name))
    return Machine(None if gpu is None else gpu.name, capability_here(fit))


def _write(path: Path, text: str) -> None:
    from perfbench.records import whole_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        step = "choose a folder that you may write to with --out DIR"
        raise unwritable(path, error, step) from None
    say(f"wrote {path}")
