"""Cards that Slurm gives, one job each, through submitit; what is said goes through a folder that
the nodes share.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from perfbench.errors import Exit, PerfbenchError, unwritable
from perfbench.runner.executor import CardLost
from perfbench.runner.fleet.mailbox import HOST, LEAVE_S, SILENT_S, MailboxClient, serve
from perfbench.runner.fleet.wanted import CardsWanted, missing_package

LOCAL = "local"  # submitit's own processes instead of Slurm


class SlurmLink:
    """A job, and the mailbox of its agent."""

    def __init__(self, job: Any, box: MailboxClient, *, is_local: bool) -> None:
        self._job, self._box, self._is_local = job, box, is_local
        self._name = f"job {job.job_id}"
        self._is_lost = self._is_closed = False
        self.cpu_card = self._name if is_local else ""

    @property
    def node(self) -> str:
        """The host, once the job runs; of submitit's local executor its job, which stands for a
        node.
        """
        with suppress(OSError):
            host, _ = self._host_and_pid()
            return f"{host}-{self._job.job_id}" if self._is_local else host
        return self._name

    def _host_and_pid(self) -> tuple[str, int]:
        host, _, pid = (self._box.folder / HOST).read_text(encoding="utf-8").rpartition(" ")
        return host, int(pid)

    def ask(self, text: str, timeout_s: float) -> str:
        try:
            return self._box.ask(text, timeout_s)
        except CardLost as lost:
            self._is_lost = True
            self.close()
            raise CardLost(f"{lost} (job {self._job.job_id}, {self._job.state})") from None

    def ended(self) -> str:
        if not self._job.done():
            return ""
        lines = (self._job.stderr() or "").strip().splitlines()
        last = f": {' '.join(lines[-1].split())[:200]}" if lines else ""
        return f"its job has ended{last}"

    def stop(self) -> None:
        """Tell the agent to leave, and wait for nothing."""
        self._box.stop()

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._box.stop()
        if self._box.has_left(0.0 if self._is_lost else LEAVE_S):
            return
        self._job.cancel(check=False)
        if self._is_local:  # submitit ends its own process alone
            with suppress(OSError):
                os.kill(self._host_and_pid()[1], signal.SIGKILL)


@contextmanager
def slurm_links(
    wanted: CardsWanted, folder: Path, options: Mapping[str, str]
) -> Iterator[list[SlurmLink]]:
    """One job for each of ``wanted.cards`` cards, which may still wait in the queue; the jobs end
    with the block. ``options`` are submitit's parameters; `cluster`: `local` needs no Slurm.
    """
    try:
        import submitit
    except ImportError as error:
        raise missing_package("submitit", "slurm", error) from None
    given = dict(options)
    cluster, silent_s = given.pop("cluster", "slurm"), float(given.pop("silent_s", SILENT_S))
    spool = folder / f".fleet-{secrets.token_hex(4)}"
    try:
        spool.mkdir(parents=True)
    except OSError as error:
        raise unwritable(spool, error, "choose another --out DIR, which the nodes share") from None
    links: list[SlurmLink] = []
    try:
        submit = _submitter(submitit, spool, cluster, _parameters(wanted, given, cluster))
        for number in range(wanted.cards or 1):
            home = spool / f"card-{number}"
            home.mkdir()
            links.append(_link(submit, home, silent_s, is_local=cluster == LOCAL))
        yield links
    finally:
        for link in links:
            link.stop()
        for link in links:
            link.close()
        shutil.rmtree(spool, ignore_errors=True)


def _link(submit: Callable[..., Any], home: Path, silent_s: float, *, is_local: bool) -> SlurmLink:
    found: list[SlurmLink] = []
    box = MailboxClient(home, lambda: found[0].ended(), silent_s=silent_s)
    try:
        found.append(
            SlurmLink(submit(serve, str(home.resolve()), silent_s), box, is_local=is_local)
        )
    finally:
        if not found:
            box.stop()
    return found[0]


def _submitter(
    submitit: Any, spool: Path, cluster: str, parameters: Mapping[str, Any]
) -> Callable[..., Any]:
    """ENVIRONMENT where there is no Slurm, or it refuses the job."""

    def refused(error: Exception, step: str) -> PerfbenchError:
        why = " ".join(str(error).split())[:300]
        return PerfbenchError(
            Exit.ENVIRONMENT, f"Slurm gives no card: {why}, wanted a job. Next: {step}"
        )

    try:
        executor = submitit.AutoExecutor(folder=spool / "jobs-%j", cluster=cluster)
        executor.update_parameters(**parameters)
    except RuntimeError as error:  # no srun here
        raise refused(error, "run it where `sbatch` works, or leave --executor out") from None
    except (NameError, TypeError, ValueError) as error:  # of an option
        why = " ".join(str(error).split())[:300]
        raise PerfbenchError(
            Exit.USAGE,
            f"--executor-option: submitit says {why}. Next: name one that submitit takes",
        ) from None

    def submit(*words: Any) -> Any:
        try:
            return executor.submit(*words)
        except submitit.core.utils.FailedJobError as error:
            raise refused(error, "mend the --executor-option that it names") from None

    return submit


def _parameters(wanted: CardsWanted, given: Mapping[str, str], cluster: str) -> dict[str, Any]:
    """What submitit is asked for: the target's cards on one node, and what the user gives."""
    found: dict[str, Any] = {"timeout_min": 24 * 60, "tasks_per_node": 1, "nodes": 1}
    found["name"] = "perfbench"
    if cluster != LOCAL:
        if wanted.is_cpu:
            found["slurm_exclusive"] = True  # nobody else on the CPUs that are measured
        else:
            card = "".join(wanted.gpu.lower().split())
            found["slurm_gres"] = f"gpu:{card}:{wanted.count}"
    return found | {name: int(text) if text.isdigit() else text for name, text in given.items()}
