"""The command line.

Each command says what it takes and hands over; nothing is imported before it is needed.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated

import typer

from perfbench.commands import options as opt
from perfbench.commands.cli_tune import tune
from perfbench.errors import Exit, PerfbenchError

if TYPE_CHECKING:
    from perfbench.commands.session import Outcome

EXIT_CODES = """\b
Exit codes (several at once: the first of 1 2 5 4 6 9 3 8 7):
  0 fine (warnings are printed)         6 failed or missing cells
  1 internal error                      7 a warning under --strict
  2 usage, matrix or policy             8 environment: GPU, throttling, comparability
  3 slower than the baseline            9 baseline missing, damaged or newer
  4 another path ran than planned     130 interrupted (143: terminated); --resume goes on
  5 wrong or impossible numbers
"""
app = typer.Typer(
    help="Measure Native Sparse Attention: tokens per second, each with the proof of what ran.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,  # rich costs more than the rest of --help together
    pretty_exceptions_enable=False,
)
baseline_app = typer.Typer(
    help="Show or replace a baseline, which is a file in git.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(baseline_app, name="baseline")
app.command()(tune)

RUNS = Path("reports/runs")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.")
    ] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        _say(f"perfbench {installed('nsa-perfbench')}")
        raise typer.Exit


@app.command()
def plan(
    matrix: opt.MatrixArg,
    only: opt.Only = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            "--gpu", help="Instead of the matrix's target: a100, h100, rtx4090, none, ..."
        ),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Show what a run would do, and why; needs no GPU."""
    from perfbench.commands import session

    _say(session.plan(matrix, only or [], gpu, as_json))


@app.command()
def run(
    matrix: opt.MatrixArg,
    only: opt.Only = None,
    resume: opt.Resume = None,
    budget: opt.Budget = None,
    seed: opt.Seed = None,
    out: opt.Out = RUNS,
    source_commit: opt.Commit = None,
    inject: opt.Inject = None,
    as_json: opt.Json = False,
) -> None:
    """Measure a matrix and write its report."""
    from perfbench.commands import session

    options = session.RunOptions(
        _argv(), only or [], resume, opt.seconds(budget), seed, out, source_commit, inject or []
    )
    folder = session.measure(matrix, options)
    _finish(session.judge(folder) if folder else None, as_json)


@app.command()
def check(
    matrix: opt.MatrixArg,
    only: opt.Only = None,
    baseline: opt.BaselinePath = None,
    strict: opt.Strict = False,
    resume: opt.Resume = None,
    budget: opt.Budget = None,
    seed: opt.Seed = None,
    out: opt.Out = RUNS,
    source_commit: opt.Commit = None,
    inject: opt.Inject = None,
    no_confirm: opt.NoConfirm = False,
    as_json: opt.Json = False,
) -> None:
    """Measure, judge, confirm what is slower: for CI."""
    from perfbench.commands import check as checking
    from perfbench.commands import session

    options = session.RunOptions(
        _argv(), only or [], resume, opt.seconds(budget), seed, out, source_commit, inject or []
    )
    _finish(checking.check(matrix, options, baseline, strict, confirmed=not no_confirm), as_json)


@app.command()
def gate(
    run: opt.RunArg,
    baseline: opt.BaselinePath = None,
    strict: opt.Strict = False,
    as_json: opt.Json = False,
) -> None:
    """Judge a finished run against the baseline."""
    from perfbench.commands import session

    _finish(session.judge_against_baseline(run, baseline, strict), as_json, write=False)


@app.command()
def ab(
    rev_a: opt.RevA,
    rev_b: opt.RevB,
    matrix: opt.MatrixArg,
    blocks: opt.Blocks = None,
    only: opt.Only = None,
    strict: opt.Strict = False,
    resume: opt.PairResume = None,
    budget: opt.Budget = None,
    seed: opt.Seed = None,
    out: opt.PairOut = RUNS,
    inject: opt.PairInject = None,
    as_json: opt.Json = False,
) -> None:
    """Measure two versions in turns and compare them."""
    from perfbench.commands import compare as versions
    from perfbench.commands import session

    options = session.RunOptions(
        _argv(), only or [], resume, opt.seconds(budget), seed, out, None, inject or []
    )
    _finish(versions.ab(matrix, versions.Versions(rev_a, rev_b, blocks), options, strict), as_json)


@app.command()
def compare(
    base: opt.BaseArg,
    cand: opt.CandArg = None,
    strict: opt.Strict = False,
    as_json: opt.Json = False,
) -> None:
    """Judge one run by another, or an `ab` folder."""
    from perfbench.commands import compare as versions

    _finish(versions.compare(base, cand, strict), as_json, write=False)


@app.command()
def explain(
    run: opt.TraceArg,
    cell: opt.CellArg,
    baseline: opt.BaselinePath = None,
    as_json: opt.Json = False,
) -> None:
    """Say in plain words why a cell got its verdict."""
    from perfbench.commands import report as reread

    _say(reread.explain(run, cell, baseline, as_json=as_json))


@app.command()
def trace(
    run: opt.TraceArg,
    cell: opt.CellArg,
    out: opt.TraceOut = None,
    side: opt.TraceSide = None,
    baseline: opt.BaselinePath = None,
    as_json: opt.Json = False,
) -> None:
    """Profile one step of one cell, on every side of a run."""
    from perfbench.commands import trace as tracecommand

    text, code = tracecommand.trace(
        run, cell, out=out, side=side, baseline=baseline, as_json=as_json
    )
    _say(text)
    raise typer.Exit(code)


@app.command()
def calibrate(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders of one matrix and one machine."),
    ],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of the permutations.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="PATH",
            help="Where the report goes too: a folder or a .md file.",
            show_default=False,
        ),
    ] = None,
    pairs: Annotated[
        list[Path] | None,
        typer.Option(
            "--pair",
            metavar="PAIR",
            help="A folder of `ab` of one commit with itself, planted or not.",
            show_default=False,
        ),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Certify the gate on stored runs."""
    from perfbench.commands import session

    _say(session.calibrate(runs, seed, out, pairs=pairs, as_json=as_json))


@app.command()
def report(
    run: opt.TraceArg,
    baseline: opt.BaselinePath = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Where to write; the run's folder by default."),
    ] = None,
    as_json: opt.Json = False,
) -> None:
    """Write a run's report again, with --baseline compared."""
    from perfbench.commands import report as reread

    _finish(reread.report(run, baseline, out), as_json, out)


@baseline_app.command("show")
def baseline_show(
    baseline: Annotated[Path, typer.Argument(metavar="PATH")], as_json: opt.Json = False
) -> None:
    """Print what a baseline file holds."""
    from perfbench.commands import session

    _say(session.show_baseline(baseline, as_json))


@baseline_app.command("promote")
def baseline_promote(
    run: opt.RunArg,
    to: Annotated[
        Path | None,
        typer.Option(
            "--to", metavar="PATH", help="Default: reports/baselines/<gpu>/<matrix>.json."
        ),
    ] = None,
    allow_dirty: Annotated[
        bool,
        typer.Option(
            "--allow-dirty", help="Take a run of uncommitted or unproved code; the file records it."
        ),
    ] = False,
    calibration: Annotated[
        Path | None,
        typer.Option(
            "--calibration",
            metavar="FILE",
            help="calibration.json: the luck between nights of each cell.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Make a green run the baseline."""
    from perfbench.commands import session

    _say(session.promote(run, to, allow_dirty, calibration))


@app.command()
def schema(kind: opt.SchemaKind) -> None:
    """Print the JSON Schema of a file format."""
    from perfbench.commands import session

    _say(json.dumps(session.schema(kind), indent=2))


@app.command()
def doctor(log: opt.DoctorLog = None, gpu: opt.DoctorGpu = None, as_json: opt.Json = False) -> None:
    """Say what a run would find on this machine, or what went wrong in one."""
    from perfbench.commands import session

    text, code = session.doctor(as_json, log, gpu)
    _say(text)
    raise typer.Exit(code)


def _finish(
    outcome: Outcome | None, as_json: bool, out: Path | None = None, write: bool = True
) -> None:
    """Print the verdict, write the report, leave with the verdict's exit code; None is a machine
    that the matrix skips.
    """
    if outcome is None:
        raise typer.Exit(Exit.OK)
    from perfbench.report import announce

    files = outcome.write_report(out) if write else []
    _say(outcome.to_json() if as_json else outcome.table())
    for file in files:
        typer.echo(f"perfbench: wrote {file}", err=True)
    for line in announce(
        outcome.judgement, next((file for file in files if file.name == "report.md"), None)
    ):
        typer.echo(line, err=True)  # stdout is data
    raise typer.Exit(outcome.judgement.exit_code)


def _say(text: str) -> None:
    # An undecodable byte in a name is a lone surrogate here, which no terminal takes.
    typer.echo(text.rstrip("\n").encode("utf-8", "backslashreplace").decode("utf-8"))


def _argv() -> list[str]:
    return ["perfbench", *sys.argv[1:]]


def invoke(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; a user's error is one line on stderr."""
    try:
        typer.main.get_command(app).main(args=list(argv), prog_name="perfbench")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except PerfbenchError as error:
        typer.echo(f"perfbench: {error}", err=True)
        return int(error.exit_code)
    return int(Exit.OK)


def main() -> int:
    """The entry point: SIGTERM stops like Ctrl-C but exits 143; a bug exits 1 with its traceback in
    a file.
    """
    terminated = False

    def terminate(signum: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)
    sys.excepthook = save_traceback
    code = invoke(sys.argv[1:])
    return 128 + signal.SIGTERM if terminated and code == Exit.INTERRUPTED else code


def save_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Python's last stop before exit status 1: the traceback goes to a file, one line says
    where.
    """
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", prefix="perfbench-", suffix=".traceback", delete=False
    ) as file:
        traceback.print_exception(kind, error, trace, file=file)
    print(
        f"perfbench: internal error, {kind.__name__}: {error}; please report the traceback in"
        f" {file.name}",
        file=sys.stderr,
    )
