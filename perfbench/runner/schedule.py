"""One sitting of a run: the missing replicates block by block, each row on the disk before the next
one is measured.

Block r holds replicate r of every cell, in a random order from the stored seed, so that a drift of
the machine meets all cells alike; the sentinels come first. What throttled is measured again after
a pause; all rows stay, the last one counts.
"""

from __future__ import annotations

import random
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import Matrix
from perfbench.records import (
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
from perfbench.runner.progress import Progress

# A card that is too hot cools within tens of seconds without work; each retry waits twice as long
# as the one before.
PAUSE_S, LONGEST_PAUSE_S = 10.0, 60.0


class BudgetSpent(Exception):
    """The sitting ends here."""


@dataclass
class Sweep:
    """``card`` is the hash of this sitting's GPU UUID, None on a CPU; ``deadline`` is a reading of
    ``now``, which never steps back.
    """

    manifest: Manifest
    matrix: Matrix
    executor: Executor
    writer: RunWriter
    ledger: Ledger
    faults: list[Injection]
    progress: Progress
    card: str | None
    now: Callable[[], float]
    pause: Callable[[float], None]
    deadline: float | None = None
    proofs: dict[ProofKey, ParityLine] = field(default_factory=dict)

    def run(self, chosen: Collection[str]) -> list[tuple[str, int]]:
        """Returns the replicates that the budget left unmeasured."""
        blocks = self._blocks(chosen)
        total = len(chosen) * self.manifest.replicates
        self.progress.start(total, total - sum(map(len, blocks.values())))
        left = Counter(cell.cell_id for cells in blocks.values() for cell in cells)
        try:
            for block, cells in blocks.items():
                self._measure_block(block, cells, left)
            return []
        except BudgetSpent:
            return self._over_budget(blocks)
        except KeyboardInterrupt:
            raise PerfbenchError(
                Exit.INTERRUPTED, f"interrupted with {self._kept()}. Next: {self._go_on()}"
            ) from None
        except (
            PerfbenchError
        ) as error:  # the machine can no longer measure, e.g. another process came to the GPU
            raise PerfbenchError(
                error.exit_code, f"{error}, then go on with {self._kept()}: {self._go_on()}"
            ) from None
        finally:
            self.progress.stop()

    def _blocks(self, chosen: Collection[str]) -> dict[int, list[PlannedCell]]:
        """What is due, by block, each block in its own order."""
        blocks: dict[int, list[PlannedCell]] = {}
        for block in range(self.manifest.replicates):
            # All cells are shuffled, not only the chosen, so that a resumed or sliced run keeps the
            # order of a whole one.
            shuffled = list(self.manifest.cells)
            random.Random(f"{self.manifest.seed}-{block}").shuffle(shuffled)
            blocks[block] = [
                cell for cell in shuffled if cell.cell_id in chosen and self._is_due(cell, block)
            ]
        return blocks

    def _is_due(self, cell: PlannedCell, block: int) -> bool:
        return self.ledger.next_attempt(cell.cell_id, block) is not None

    def _measure_block(self, block: int, cells: list[PlannedCell], left: Counter[str]) -> None:
        began = False
        jobs: dict[str, Job] = {}
        for place, cell in enumerate(cells):
            left[cell.cell_id] -= 1
            if not self._is_due(cell, block):
                # it failed in an earlier block: one row says it, and repeating it would only cost
                # GPU minutes
                continue
            self._check_budget()
            if not began:
                self.executor.new_block()
                began = True
                self._measure_sentinels(block)
            self.progress.begin(cell.cell_id, block)
            if cell.cell_id not in jobs:
                jobs = self._prepare(block, cells, place)
            self._measure_cell(cell, jobs[cell.cell_id], left[cell.cell_id])

    def _measure_cell(self, cell: PlannedCell, job: Job, later: int) -> None:
        """Measure until a row counts; ``later`` blocks hold this cell too, and are settled with it
        where it fails.
        """
        attempt = self.ledger.next_attempt(job.cell_id, job.replicate)
        while attempt is not None:
            if attempt > 0:
                self._cool_down(f"{job.cell_id} #{job.replicate}", attempt)
            row = (self._smaller_ran_out(job) or self.executor.execute(job)).model_copy(
                update={"attempt": attempt}
            )
            self.ledger.add(row)
            self.writer.append(row)
            self._keep_proof(cell, row)
            attempt = self.ledger.attempt_after(row)
        self.progress.finished(row, covers=1 + (later if row.status is not Status.OK else 0))

    def _prepare(self, block: int, cells: Sequence[PlannedCell], place: int) -> dict[str, Job]:
        """The next jobs of this block, preparing side by side where the matrix allows it."""
        due = (cells[i] for i in range(place, len(cells)) if self._is_due(cells[i], block))
        chosen = list(islice(due, self.matrix.measure.prepare_together))
        jobs = [self._job(cell, block, waiting_peers=len(chosen) - 1) for cell in chosen]
        if len(jobs) > 1:
            self.executor.prepare([job for job in jobs if not self._smaller_ran_out(job)])
        return {job.cell_id: job for job in jobs}

    def _measure_sentinels(self, block: int) -> None:
        """Each sentinel that this block lacks on this card, in a process of its own."""
        said = []
        for name in self.manifest.sentinels:
            attempt = self.ledger.next_sentinel_attempt(name, block, self.card)
            while attempt is not None:
                self.progress.begin(f"sentinel {name}", block)
                if attempt > 0:
                    self._cool_down(f"sentinel {name} of block {block}", attempt)
                line = self._sentinel_line(name, block, attempt)
                self.ledger.add(line)
                self.writer.append(line)
                said.append(
                    f"{name} {line.rate_per_s:.4g} {line.unit}/s"
                    if line.rate_per_s
                    else f"{name} {line.status}: {line.reason}"
                )
                attempt = self.ledger.attempt_after(line)
        if said:
            self.progress.note(f"sentinels of block {block}: {'; '.join(said)}")
            self._check_budget()

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
            rate_per_s=row.tok_per_s,
            unit=SENTINEL_UNITS[name],
            telemetry=row.telemetry,
            # A process that died did not say on which card; the sitting has only one.
            device_uuid_sha256=row.device_uuid_sha256 or self.card,
        )

    def _cool_down(self, what: str, attempt: int) -> None:
        """Wait before a throttled measurement is repeated; the budget must hold the pause."""
        seconds = min(PAUSE_S * 2 ** (attempt - 1), LONGEST_PAUSE_S)
        self._check_budget(seconds)
        self.progress.note(
            f"{what}: the card throttled; attempt {attempt} of"
            f" {self.matrix.measure.throttle_retries} to repeat it follows in {seconds:g} s"
        )
        self.pause(seconds)

    def _check_budget(self, ahead_s: float = 0.0) -> None:
        if self.deadline is not None and self.now() + ahead_s >= self.deadline:
            raise BudgetSpent

    def _over_budget(self, blocks: dict[int, list[PlannedCell]]) -> list[tuple[str, int]]:
        missing = [
            (cell.cell_id, block)
            for block, cells in blocks.items()
            for cell in cells
            if self._is_due(cell, block)
        ]
        shown = ", ".join(f"{cell_id} #{block}" for cell_id, block in missing[:10])
        more = f" and {len(missing) - 10} more" if len(missing) > 10 else ""
        self.progress.note(
            f"the budget is spent; not measured: {shown}{more}. Go on with --resume"
            f" {shlex.quote(str(self.writer.folder))}"
        )
        return missing

    def _keep_proof(self, cell: PlannedCell, row: Replicate) -> None:
        """A proof holds for its route (and for a length only where it was made at the cell's own),
        and for this sitting's card only.

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

    def _smaller_ran_out(self, job: Job) -> Replicate | None:
        """A SKIPPED row where a shorter sequence of the same path ran out of memory, and this one
        has never succeeded.
        """
        if self.matrix.limits.oom != "record_and_skip_larger":
            return None
        shorter = self.ledger.smaller_ran_out(job.cell_id, job.axes)
        reason = f"not tried: {shorter} ran out of memory (limits.oom: record_and_skip_larger)"
        return failed(job, Status.SKIPPED, reason) if shorter else None

    def _job(self, cell: PlannedCell, replicate: int, *, waiting_peers: int) -> Job:
        return Job(
            cell_id=cell.cell_id,
            replicate=replicate,
            axes=cell.axes,
            config_sha256=cell.config_sha256,
            model=self.matrix.model.to_mapping(),
            measure=self.matrix.measure,
            timeout_s=self.matrix.limits.timeout_s,
            plan=cell.route,
            expect=cell.expect,
            device=self._device,
            seed=random.Random(f"{self.manifest.seed}-{cell.cell_id}-{replicate}").randrange(2**31),
            profile=replicate == 0 or self.matrix.measure.profile == "every",
            injection=next((fault for fault in self.faults if fault.cell_id == cell.cell_id), None),
            waiting_peers=waiting_peers,
            proof=self._proof(cell),
        )

    def _sentinel_job(self, name: str, block: int) -> Job:
        return Job(
            cell_id=f"sentinel {name}",
            replicate=block,
            axes=Cell("sentinel", 1, name),  # no point of the matrix: the axes only name it
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

    def _kept(self) -> str:
        return f"{self.ledger.num_replicates} finished replicates in {self.writer.folder}"

    def _go_on(self) -> str:
        return shlex.join(
            [*without_resume(self.manifest.argv), "--resume", str(self.writer.folder)]
        )


def without_resume(argv: Sequence[str]) -> Iterator[str]:
    """The command without what a resumed run brings along itself."""
    skip = False
    for word in argv:
        if skip:
            skip = False
        elif word in ("--resume", "--inject", "--seed"):
            skip = True
        elif not word.startswith(("--resume=", "--inject=", "--seed=")):
            yield word
