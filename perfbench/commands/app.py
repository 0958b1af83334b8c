"""The command line: the commands, the exit codes, and what becomes of an error.

Nothing is imported before it is needed.
"""

from __future__ import annotations

import errno
import signal
import sys
import tempfile
import traceback
from collections.abc import Sequence
from functools import lru_cache
from types import FrameType, TracebackType
from typing import Annotated, Any

import typer

from perfbench.commands import baseline, history
from perfbench.commands.ab import ab
from perfbench.commands.bisect import bisect
from perfbench.commands.calibrate import calibrate
from perfbench.commands.check import check
from perfbench.commands.codegen import codegen
from perfbench.commands.comment import comment
from perfbench.commands.compare import compare
from perfbench.commands.console import drop_stdout, print_text, say
from perfbench.commands.detect import detect
from perfbench.commands.doctor import doctor
from perfbench.commands.explain import explain
from perfbench.commands.export import export
from perfbench.commands.gap import gap
from perfbench.commands.gate import gate
from perfbench.commands.import_ import import_
from perfbench.commands.init import init
from perfbench.commands.plan import plan
from perfbench.commands.prune import prune
from perfbench.commands.report import report
from perfbench.commands.run import run
from perfbench.commands.schema import schema
from perfbench.commands.site import site
from perfbench.commands.trace import trace
from perfbench.commands.triage import triage
from perfbench.commands.tune import tune
from perfbench.errors import Exit, PerfbenchError

EXIT_CODES = """\b
Exit codes (several at once: the first of 1 2 5 4 6 9 3 8 7):
  0 fine (warnings are printed)         6 failed or missing cells
  1 internal error                      7 a warning under --strict
  2 usage, matrix or policy             8 environment: GPU, throttling, comparability
  3 slower, or worse code               9 baseline missing, damaged or newer
  4 another path ran than planned     130 interrupted (143: terminated); --resume resumes
  5 wrong or impossible numbers
"""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
app = typer.Typer(
    help="Measure Native Sparse Attention: tokens per second, each with the proof of what ran.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    rich_markup_mode=None,  # rich costs more than the rest of --help together
    pretty_exceptions_enable=False,
)
app.command()(init)
app.command()(plan)
app.command()(run)
app.command()(check)
app.command()(gate)
app.command()(ab)
app.command()(bisect)
app.command()(compare)
app.command()(report)
app.command()(comment)
app.command()(explain)
app.command()(gap)
app.command()(trace)
app.command()(calibrate)
app.command()(tune)
app.command()(detect)
app.command()(triage)
app.command()(codegen)
app.command()(doctor)
app.command()(schema)
app.command(name="import")(import_)
app.command()(export)
app.command()(site)
app.command()(prune)
app.add_typer(baseline.app, name="baseline")
app.add_typer(history.app, name="history")


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and leave.")
    ] = False,
) -> None:
    if version:
        from importlib.metadata import version as installed

        print_text(f"perfbench {installed('nsa-perfbench')}")
        raise typer.Exit


@lru_cache(maxsize=1)
def _command() -> Any:
    """Built once for callers of many commands, such as tests: 0.1 s."""
    return typer.main.get_command(app)


def invoke(argv: Sequence[str]) -> int:
    """Run one command line and return its exit code; a user's error is one line on stderr."""
    try:
        _command().main(args=list(argv), prog_name="perfbench")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except PerfbenchError as error:
        say(str(error))
        return int(error.exit_code)
    except OSError as error:
        if error.errno not in NO_ROOM or error.filename is not None:
            raise
        drop_stdout()  # typer's own help; what commands print goes through `print_text`
        say(f"stdout cannot be written: {error.strerror}")
        return int(Exit.USAGE)
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
    say(f"internal error, {kind.__name__}: {error}; please report the traceback in {file.name}")
