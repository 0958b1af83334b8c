"""Measures one version's `nsa`, by this harness."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import TargetFit
from perfbench.records import Job, Replicate, Status
from perfbench.runner.ab.checkout import CannotBuild, Checkout
from perfbench.runner.executor import Executor, ForkServerExecutor, prepared_executors
from perfbench.worker import MEASURE, NSA_WITNESS


class VersionExecutor(ForkServerExecutor):
    """Measures one version's `nsa`.

    CannotBuild where its server does not start; a row of any other `nsa` is a bug, not a result.
    """

    def __init__(self, one: Checkout, measure: str = MEASURE, **seams: Any) -> None:
        super().__init__(measure, arguments=["--nsa", str(one.folder)], **seams)
        self._version = one

    def prepare(self, jobs: Sequence[Job]) -> None:
        if self._server is None:
            self.new_block()  # a busy GPU is no fault of this version
        try:
            super().prepare(jobs)
        except PerfbenchError as error:
            raise CannotBuild(
                f"{self._version.name} cannot be measured by this harness: {error}",
                self._version.name,
            ) from None

    def execute(self, job: Job) -> Replicate:
        row = super().execute(job)
        measured_by = (row.model_extra or {}).get(NSA_WITNESS)
        if row.status is Status.OK and measured_by != str(self._version.folder):
            problem = (
                f"got a row of {measured_by or 'an unknown nsa'}, wanted one of"
                f" {self._version.folder} ({self._version.name})"
            )
            raise PerfbenchError(
                Exit.INTERNAL,
                f"{problem}. Next: report it, this A/B would have compared a version with itself",
            )
        return row


def prepared_versions(
    fit: TargetFit, versions: Sequence[Checkout], measure: str = MEASURE, *, module: Any = None
) -> AbstractContextManager[tuple[Executor, ...]]:
    """The executor of each version, as `prepared_executors`."""
    makers = [partial(VersionExecutor, one, measure) for one in versions]
    return prepared_executors(fit, makers, module=module)
