"""`perfbench tune`: a matrix of its own measured, or such a run read, and from which lengths which
path is the fastest.

It changes no code: a person commits the line for nsa/routing/thresholds.py, with the run. With
--apply it writes the user's own table, which `auto` reads in every process but perfbench's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

import nsa
from perfbench.commands import options as opt
from perfbench.commands.console import print_first, print_text, say, warn
from perfbench.errors import Exit, PerfbenchError, unwritable

if TYPE_CHECKING:
    from nsa.routing import UserTable
    from perfbench.commands.outcome import Outcome
    from perfbench.tuning import Machine, TunedRun

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
Apply = Annotated[
    bool,
    typer.Option(
        "--apply",
        help="Write what is decided into your own table, which path=auto reads on this card.",
    ),
]
Show = Annotated[bool, typer.Option("--show", help="Print your own table, and where it lies.")]
Reset = Annotated[
    bool, typer.Option("--reset", help="Take what is of this machine's card out of your own table.")
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
    apply: Apply = False,
    show: Show = False,
    reset: Reset = False,
) -> None:
    """Measure from which lengths which path is the fastest: the table that path=auto reads."""
    if show or reset:
        _own_table_alone(apply or stored is not None or (show and reset), show)
        return
    if apply:
        _own_table()  # before minutes of measuring
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
        _decide(stored, out, as_json, apply)
    budget_s = opt.seconds(budget or DEFAULT_BUDGET)
    options = opt.RunOptions(opt.argv(), [], resume, budget_s, seed, out or opt.RUNS, source_commit)
    run = _measure(model or DEFAULT_MODEL, lengths, processes or DEFAULT_PROCESSES, options)
    _decide(run, None, as_json, apply)


def _decide(run_path: Path, out: Path | None, as_json: bool, apply: bool) -> NoReturn:
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
    if apply:
        _apply(outcome, tuned)
    raise typer.Exit(tuned.exit_code)


def _own_table() -> tuple[Path, UserTable | None]:
    """Where the user's own table is, and what it holds; None where there is none.

    USAGE where there is no place for it, or where the file there is no table: it may be anything.
    """
    from nsa.settings import table_file
    from nsa.thresholds_file import bytes_of, parse

    try:
        path = table_file()
        return path, parse(bytes_of(path), str(path)) if path.exists() else None
    except OSError as error:
        problem = f"{path} cannot be read: {error.strerror or error}"
    except ValueError as error:
        problem = str(error)
    raise PerfbenchError(Exit.USAGE, f"{problem}. Next: mend it, or move the file away")


def _apply(outcome: Outcome, tuned: TunedRun) -> None:
    """Write the user's own table from a proved run of this very card, and say what changes; USAGE
    with every reason for any other run.
    """
    from nsa.thresholds_file import kernels_sha256, parse, table_text
    from perfbench.commands.outcome import matrix_of
    from perfbench.machine import package_sha256
    from perfbench.tuning import changes, entry_of, refusals, with_entry

    here = _machine().capability
    if reasons := refusals(tuned, here, package_sha256(Path(nsa.__file__).parent)):
        text = f"this run decides no table: {'; '.join(reasons)}"
        raise PerfbenchError(Exit.USAGE, f"{text}. Next: `perfbench tune --apply` on an idle card")
    path, before = _own_table()
    model = matrix_of(outcome.run).model
    entry = entry_of(tuned, model, kernels_sha256())
    text = table_text(with_entry(() if before is None else before.entries, entry))
    after = parse(text.encode(), str(path))
    _write(path, text, "name a file that you may write in NSA_THRESHOLDS")
    for line in changes(before, after, model, tuned.lengths, entry, here):
        say(f"path=auto, {line}")


def _own_table_alone(is_mixed: bool, show: bool) -> None:
    """--show or --reset, which measure nothing."""
    from nsa.thresholds_file import table_text
    from perfbench.tuning import shown

    if is_mixed:
        raise PerfbenchError(
            Exit.USAGE, "--show and --reset stand alone. Next: give one of them, without others"
        )
    path, table = _own_table()
    if table is None:
        say(f"there is no table at {path}; `perfbench tune --apply` writes it")
    elif show:
        print_text("\n".join([f"{path}, sha256 {table.sha256}", *shown(table)]))
    else:
        here = _machine().capability
        gone = () if here.sm is None else table.of_card(here.device_name, here.sm)
        if not gone:
            say(f"{path} holds nothing of {here.device_name}")
            return
        _write(path, table_text(tuple(one for one in table.entries if one not in gone)))


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


def _write(
    path: Path, text: str, step: str = "choose a folder that you may write to with --out DIR"
) -> None:
    from perfbench.records import whole_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as partial:
            partial.write_text(text, encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error, step) from None
    say(f"wrote {path}")
