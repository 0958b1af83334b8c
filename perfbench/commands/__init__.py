"""One module a command: options in, one room called, text and exit code out."""

from perfbench.commands.app import main
from perfbench.commands.library import CellResult, RunResult
from perfbench.commands.library import check as check_here, run as run_here
