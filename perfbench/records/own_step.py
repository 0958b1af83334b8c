"""A user's own training step as a workload: how a matrix names it, which file it is of, and what a
process proved of it.
"""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict

# A module's dotted name and a function in it.
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
OWN_STEP_PATTERN = rf"^{_NAME}(\.{_NAME})*:{_NAME}$"
OWN_STEP_FORM = "module:function"
_OWN_STEP = re.compile(OWN_STEP_PATTERN)


def is_own_step(workload: str) -> bool:
    """Whether a workload is ``module:function``, and none of the harness's own."""
    return _OWN_STEP.fullmatch(workload) is not None


class OwnStepFile(BaseModel):
    """The file behind ``workload`` when a run was planned: relative to the matrix's folder where it
    lies there, else where it is installed. ``sha256`` is of this file alone, not of what it
    imports.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)
    workload: str
    file: str
    sha256: str


class OwnStepLine(BaseModel):
    """What one process saw of a user's own step: ``proved`` and ``not_proved`` are sentences.

    ``comparisons``: name -> error / tolerance, of the step's own ``parity``.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)
    sha256: str  # of the module's file, as this process loaded it
    proved: list[str] = []
    not_proved: list[str] = []
    comparisons: dict[str, float] = {}
