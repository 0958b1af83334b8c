"""perfbench: a number is published only with its proof. A room imports only rooms above it here.

- ``errors``, ``older_nsa``: exit codes and the error that carries one; the one seam to another
  commit of `nsa`, which `ab` measures.
- ``text``: numbers and names as tables print them.
- ``records``: the nouns that every room shares, and the files they are stored in.
- ``roofline``: the work of a step in closed form, and the hardware's limits.
- ``machine``, ``matrix``: what this computer is; a matrix file in, a Plan out.
- ``worker``: measures one cell inside a process of its own.
- ``gate``: judges; rows in, verdicts out.
- ``runner``: decides which job is next, in which process.
- ``report``: prints a judged run, and gives runs as a DataFrame: ``perfbench.load``.
- ``calibration``, ``tracing``, ``tuning``: certify the gate, profile a red cell, tune routes.
- ``history``: a database of judged runs: ``perfbench.open_history``, ``perfbench.history_frame``.
- ``commands``: one module a command, and two of them as functions: ``perfbench.run``,
  ``perfbench.check``.
- ``pytest_plugin``: the fixture of the same name as this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfbench.commands import CellResult, RunResult
    from perfbench.commands import check_here as check
    from perfbench.commands import run_here as run
    from perfbench.errors import Exit, PerfbenchError
    from perfbench.history import history_frame, open_history
    from perfbench.report import load

__all__ = [
    "CellResult",
    "Exit",
    "PerfbenchError",
    "RunResult",
    "check",
    "history_frame",
    "load",
    "open_history",
    "run",
]


def __getattr__(name: str) -> Any:
    """The public names, each imported at its first use: `import perfbench` loads nothing heavy."""
    if name not in __all__:
        raise AttributeError(
            f"module 'perfbench' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    if name == "load":
        from perfbench import report

        return report.load
    if name in ("history_frame", "open_history"):
        from perfbench import history

        return getattr(history, name)
    if name in ("Exit", "PerfbenchError"):
        from perfbench import errors

        return getattr(errors, name)
    from perfbench import commands

    return getattr(commands, {"check": "check_here", "run": "run_here"}.get(name, name))
