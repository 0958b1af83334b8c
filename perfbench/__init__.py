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
- ``commands``: one module a command.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perfbench.report import load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    if name != "load":
        raise AttributeError(
            f"module 'perfbench' has no attribute {name!r}; it has {', '.join(__all__)}"
        )
    from perfbench.report import load

    return load
