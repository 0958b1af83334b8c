"""Measures the cells of one run file, and stores each row before the next one is measured.

What throttled is measured again after a pause; all rows stay, the last one counts.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfbench.matrix import Matrix, model_with, own_folder_for, trained_for
from perfbench.records import (
    OF_RANKS,
    SENTINEL_UNITS,
    Cell,
    Expect,
    Injection,
    Job,
    Manifest,
    ParityLine,
    PlannedCell,
    ProofKey,
    Replicate,
    RouteLine,
    RunWriter,
    SentinelLine,
    Status,
    failed,
    proof_key,
)
from perfbench.runner.attempts import Ledger
from perfbench.runner.executor import Executor
from perfbench.runner.loop import Budget
from perfbench.runner.progress import Progress

# A card that is too hot cools within tens of seconds without work; each retry waits twice as long
# as the one before.
PAUSE_S, LONGEST_PAUSE_S = 10.0, 60.0


@dataclass
class Recorder:
    """One version of the code while it is measured: its executor, its run file and what that holds.

    ``card`` is the hash of the GPU's UUID in this session, None on a CPU; ``node`` the node of a
    fleet. ``model`` is the matrix's model as this version's own `nsa` resolves it.
    """

    manifest: Manifest
    matrix: Matrix
    executor: Executor
    writer: RunWriter
    ledger: Ledger
    faults: list[Injection]
    progress: Progress
    card: str | None
    budget: Budget
    model: dict[str, Any]
    pause: Callable[[float], None] = time.sleep
    proofs: dict[ProofKey, ParityLine] = field(default_factory=dict)
    own_folder: Path | None = None  # of the user's own steps; None: the matrix's
    node: str | None = None

    def is_due(self, cell: PlannedCell, block: int) -> bool:
        return self.ledger.next_attempt(cell.cell_id, block) is not None

    def measure(self, cell: PlannedCell, job: Job, later: int) -> None:
        """Measure until a row counts; ``later`` blocks hold this cell too, and end with it where it
        fails.
        """
        attempt = self.ledger.next_attempt(job.cell_id, job.replicate)
        while attempt is not None:
            if attempt > 0:
                self._cool_down(f"{job.cell_id} #{job.replicate}", attempt)
            row = (self.smaller_ran_out(job) or self.executor.execute(job)).model_copy(
                update={"attempt": attempt}
            )
            self._store(row)
            self._keep_proof(cell, row)
            attempt = self.ledger.attempt_after(row)
        self.progress.finished(row, covers=1 + (later if row.status is not Status.OK else 0))

    def measure_sentinels(self, block: int) -> None:
        """Each sentinel that this block lacks on this card, in a process of its own."""
        measured = []
        for name in self.manifest.sentinels:
            attempt = self.ledger.next_sentinel_attempt(name, block, self.card or self.node)
            while attempt is not None:
                self.progress.begin(f"sentinel {name}", block)
                if attempt > 0:
                    self._cool_down(f"sentinel {name} of block {block}", attempt)
                line = self._sentinel_line(name, block, attempt)
                self._store(line)
                measured.append(
                    f"{name} {line.rate_per_s:.4g} {line.unit}/s"
                    if line.rate_per_s
                    else f"{name} {line.status}: {line.reason}"
                )
                attempt = self.ledger.attempt_after(line)
        if measured:
            self.progress.note(f"sentinels of block {block}: {'; '.join(measured)}")
            self.budget.check()

    def job(self, cell: PlannedCell, replicate: int, *, waiting_peers: int = 0) -> Job:
        """What the measuring process gets; ``waiting_peers`` others prepare next to it."""
        return Job(
            cell_id=cell.cell_id,
            replicate=replicate,
            axes=cell.axes,
            config_sha256=cell.config_sha256,
            model=model_with(self.matrix.peer_of(cell.axes), self.model),
            measure=self.matrix.measure,
            timeout_s=self.matrix.limits.timeout_s,
            plan=cell.route,
            expect=cell.expect,
            device=self._device,
            seed=self._seed(cell, replicate),
            proof_seed=self._seed(cell, 0),
            profile=replicate == 0 or self.matrix.measure.profile == "every",
            injection=next((fault for fault in self.faults if fault.cell_id == cell.cell_id), None),
            waiting_peers=waiting_peers,
            proof=self._proof(cell),
            trained_blocks=trained_for(self.matrix, cell.axes),
            own_step_folder=own_folder_for(cell.axes, self.matrix, self.own_folder),
            peer=self.matrix.peer_of(cell.axes),
        )

    def _seed(self, cell: PlannedCell, replicate: int) -> int:
        return random.Random(f"{self.manifest.seed}-{cell.cell_id}-{replicate}").randrange(2**31)

    def smaller_ran_out(self, job: Job) -> Replicate | None:
        """A SKIPPED row where a smaller cell of the same path ran out of memory, and this one has
        never succeeded.
        """
        rule = self.matrix.limits.oom
        if rule == "record":
            return None
        smaller = self.ledger.smaller_ran_out(job.cell_id, job.axes)
        reason = f"not tried: {smaller} ran out of memory (limits.oom: {rule})"
        return failed(job, Status.SKIPPED, reason) if smaller else None

    def _store(self, row: Replicate | SentinelLine) -> None:
        self.ledger.add(row)
        self.writer.append(row)

    def _sentinel_line(self, name: str, block: int, attempt: int) -> SentinelLine:
        row = self.executor.execute(self._sentinel_job(name, block))
        return SentinelLine(
            name=name,
            block=block,
            attempt=attempt,
            status=row.status,
            reason=row.reason,
            started_utc=row.started_utc,
            samples_s=row.samples_s,
            steps_per_sample=row.steps_per_sample,
            other_clocks=row.other_clocks,
            rate_per_s=row.tok_per_s,
            unit=SENTINEL_UNITS[name],
            telemetry=row.telemetry,
            # A process that died did not say on which card; the session has only one.
            device_uuid_sha256=row.device_uuid_sha256 or self.card,
            node=self.node,
        )

    def _cool_down(self, what: str, attempt: int) -> None:
        """Wait before a throttled measurement is repeated; the budget must hold the pause."""
        seconds = min(PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S)
        self.budget.check(seconds)
        self.progress.note(
            f"{what}: the card throttled; attempt {attempt} of"
            f" {self.matrix.measure.throttle_retries} to repeat it follows in {seconds:g} s"
        )
        self.pause(seconds)

    def _keep_proof(self, cell: PlannedCell, row: Replicate) -> None:
        """A proof holds for its route (and for a length only where it was made at the cell's own),
        and for the card of this session only.

        It costs 7 s of a fresh process on an H100 (cuDNN loads, and builds a plan for each shape),
        so it is made once.
        """
        if row.status is Status.WRONG_PATH:
            return  # it proved what ran, which is not what was planned
        if row.parity is not None and row.parity.ok and row.parity.proved_in is None:
            proof = row.parity.model_copy(update={"proved_in": f"{row.cell_id} #{row.replicate}"})
            self.proofs.setdefault(
                proof_key(cell.axes, cell.route.counters, own_length=row.parity.own_length), proof
            )

    def _proof(self, cell: PlannedCell) -> ParityLine | None:
        keys = (
            proof_key(cell.axes, cell.route.counters, own_length=own_length)
            for own_length in (False, True)
        )
        return next((self.proofs[key] for key in keys if key in self.proofs), None)

    def _sentinel_job(self, name: str, block: int) -> Job:
        ranks = max(cell.axes.world_size for cell in self.manifest.cells) if name in OF_RANKS else 1
        return Job(
            cell_id=f"sentinel {name}",
            replicate=block,
            # no point of the matrix: the axes only name it, and say how many ranks it takes
            axes=Cell("sentinel", 1, name, world_size=ranks),
            config_sha256="",
            model={},
            measure=self.matrix.measure,
            timeout_s=self.matrix.limits.timeout_s,
            plan=RouteLine(branches=[], counters=[]),
            expect=Expect(),
            device=self._device,
            seed=0,
            profile=False,
            sentinel=name,
        )

    @property
    def _device(self) -> str:
        return "cpu" if self.manifest.environment.gpu_slug == "cpu" else "cuda"
