"""The command line. Each command says what it takes and hands over; nothing is imported before it is needed."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from perfbench.verdict import Exit, PerfbenchError

if TYPE_CHECKING:
    from perfbench.session import Outcome

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
baseline_app = typer.Typer(help="Show or replace a baseline, which is a file in git.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(baseline_app, name="baseline")

MatrixArg = Annotated[Path, typer.Argument(metavar="MATRIX", help="A matrix file, e.g. matrices/cpu.yaml.")]
RunArg = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or its run.jsonl.")]
Only = Annotated[
    list[str] | None, typer.Option("--only", metavar="AXIS=V", help="Cells to keep: the same axis repeated is `or`, other axes are `and`.")
]
Json = Annotated[bool, typer.Option("--json", help="JSON on stdout instead of text.")]
Strict = Annotated[bool, typer.Option("--strict", help="Warnings (WATCH, BLIND, UNSTABLE) fail with 7.")]
BaselinePath = Annotated[
    Path | None, typer.Option("--baseline", metavar="PATH", help="Default: reports/baselines/<gpu>/<matrix>.json.", show_default=False)
]
Resume = Annotated[Path | None, typer.Option("--resume", metavar="RUN", help="Go on with this run; its finished replicates stay.")]
Budget = Annotated[str | None, typer.Option("--budget", metavar="TIME", help="Start no replicate after this time, e.g. 90s, 30m, 1.5h.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Of the order and of the inputs; random and stored by default.")]
Out = Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the run's folder is made.")]
Commit = Annotated[str | None, typer.Option("--source-commit", metavar="SHA", help="The measured commit, where git cannot say.")]
Inject = Annotated[
    list[str] | None,
    typer.Option("--inject", metavar="FAULT@CELL", help="slowdown=10%, oom, hang or segv: a demonstration, stored and never promotable."),
]
RUNS = Path("reports/runs")


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False) -> None:
    if version:
        from importlib.metadata import version as installed

        _say(f"perfbench {installed('nsa-perfbench')}")
        raise typer.Exit


@app.command()
def plan(
    matrix: MatrixArg,
    only: Only = None,
    gpu: Annotated[str | None, typer.Option("--gpu", help="Instead of the matrix's target: a100, h100, rtx4090, none, ...")] = None,
    as_json: Json = False,
) -> None:
    """Show what a run would do, and why; needs no GPU."""
    from perfbench import session

    _say(session.plan(matrix, only or [], gpu, as_json))


@app.command()
def run(
    matrix: MatrixArg,
    only: Only = None,
    resume: Resume = None,
    budget: Budget = None,
    seed: Seed = None,
    out: Out = RUNS,
    source_commit: Commit = None,
    inject: Inject = None,
    as_json: Json = False,
) -> None:
    """Measure a matrix and write its report."""
    from perfbench import session

    options = session.RunOptions(_argv(), only or [], resume, _seconds(budget), seed, out, source_commit, inject or [])
    folder = session.measure(matrix, options)
    _finish(session.judge(folder) if folder else None, as_json)


@app.command()
def check(
    matrix: MatrixArg,
    only: Only = None,
    baseline: BaselinePath = None,
    strict: Strict = False,
    resume: Resume = None,
    budget: Budget = None,
    seed: Seed = None,
    out: Out = RUNS,
    source_commit: Commit = None,
    inject: Inject = None,
    as_json: Json = False,
) -> None:
    """Measure, judge against the baseline, report: for CI."""
    from perfbench import session

    options = session.RunOptions(_argv(), only or [], resume, _seconds(budget), seed, out, source_commit, inject or [])
    session.warn_of_baseline(matrix, baseline)
    folder = session.measure(matrix, options)
    _finish(session.judge_against_baseline(folder, baseline, strict) if folder else None, as_json)


@app.command()
def gate(run: RunArg, baseline: BaselinePath = None, strict: Strict = False, as_json: Json = False) -> None:
    """Judge a finished run against the baseline."""
    from perfbench import session

    _finish(session.judge_against_baseline(run, baseline, strict), as_json, write=False)


@app.command()
def report(
    run: RunArg,
    baseline: BaselinePath = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="DIR", help="Where to write; the run's folder by default.")] = None,
    as_json: Json = False,
) -> None:
    """Write a run's report again, with --baseline compared."""
    from perfbench import session

    _finish(session.judge_against_baseline(run, baseline, strict=False) if baseline else session.judge(run), as_json, out)


@baseline_app.command("show")
def baseline_show(baseline: Annotated[Path, typer.Argument(metavar="PATH")], as_json: Json = False) -> None:
    """Print what a baseline file holds."""
    from perfbench import session

    _say(session.show_baseline(baseline, as_json))


@baseline_app.command("promote")
def baseline_promote(
    run: RunArg,
    to: Annotated[Path | None, typer.Option("--to", metavar="PATH", help="Default: reports/baselines/<gpu>/<matrix>.json.")] = None,
    allow_dirty: Annotated[
        bool, typer.Option("--allow-dirty", help="Take a run of uncommitted or unproved code; the file records it.")
    ] = False,
) -> None:
    """Make a green run the baseline."""
    from perfbench import session

    _say(session.promote(run, to, allow_dirty))


@app.command()
def schema(kind: Annotated[Literal["matrix", "result"], typer.Argument(help="A matrix file, or one line of a run.jsonl.")]) -> None:
    """Print the JSON Schema of a file format."""
    from perfbench import session

    _say(json.dumps(session.schema(kind), indent=2))


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what a run would find on this machine."""
    from perfbench import session

    text, code = session.doctor(as_json)
    _say(text)
    raise typer.Exit(code)


def _finish(outcome: Outcome | None, as_json: bool, out: Path | None = None, write: bool = True) -> None:
    """Print the verdict, write the report, leave with the verdict's exit code; None is a machine that the matrix skips."""
    if outcome is None:
        raise typer.Exit(Exit.OK)
    files = outcome.write_report(out) if write else []
    _say(outcome.to_json() if as_json else outcome.table())
    for file in files:
        typer.echo(f"perfbench: wrote {file}", err=True)
    raise typer.Exit(outcome.judgement.exit_code)


def _say(text: str) -> None:
    typer.echo(text.rstrip("\n"))


def _argv() -> list[str]:
    return ["perfbench", *sys.argv[1:]]


def _seconds(text: str | None) -> float | None:
    """'90', '90s', '30m' or '1.5h' in seconds."""
    if text is None:
        return None
    number, unit = (text[:-1], text[-1]) if text[-1:] in ("s", "m", "h") else (text, "s")
    try:
        seconds = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise PerfbenchError(Exit.USAGE, f"--budget {text!r} is not a time; write e.g. 90s, 30m or 1.5h")
    return seconds


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
    """The entry point: SIGTERM stops like Ctrl-C but exits 143; a bug exits 1 with its traceback in a file."""
    terminated = False

    def terminate(signum: int, frame: FrameType | None) -> None:
        nonlocal terminated
        terminated = True
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, terminate)
    sys.excepthook = save_traceback
    code = invoke(sys.argv[1:])
    return 128 + signal.SIGTERM if terminated and code == Exit.INTERRUPTED else code


def save_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Python's last stop before exit status 1: the traceback goes to a file, one line says where."""
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", prefix="perfbench-", suffix=".traceback", delete=False) as file:
        traceback.print_exception(kind, error, trace, file=file)
    print(f"perfbench: internal error, {kind.__name__}: {error}; please report the traceback in {file.name}", file=sys.stderr)
