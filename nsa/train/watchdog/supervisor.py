"""The parent of a rank's trainer: starts it, watches its heartbeat, ends it, names the exit code.

It shares no lock, no GIL and no collective with the trainer, and never waits for the terminal or
the network.
"""

from __future__ import annotations

import http.client
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import FrameType

from nsa.train import stacks
from nsa.train.config import WatchdogConfig
from nsa.train.display import LiveLine
from nsa.train.errors import EXPLAINED, TrainExit
from nsa.train.heartbeat import MachineClock
from nsa.train.log import utc_now
from nsa.train.records import Phase
from nsa.train.watchdog import halt as files
from nsa.train.watchdog.child import Child
from nsa.train.watchdog.detect import Alarm, AlarmKind
from nsa.train.watchdog.halt import Halt
from nsa.train.watchdog.watched import Glance, WatchedRank, has_died

POLL_S = 0.2
STACKS_S = 3.0  # for all stacks of a trainer with its threads
TERM_S = 5.0  # from SIGTERM to SIGKILL
PEER_GRACE_S = 5.0  # without a peer no collective ends, so a long grace serves nothing
PEERS_S = 0.5  # between looks at the other ranks: files, of 1,000 ranks perhaps
PEER_EXIT_S = 2.0  # a dead trainer's parent leaves its exit code so soon
WORKERS_S = 2.0  # for data workers to clean up behind their trainer
WEBHOOK_S = 5.0


def supervise(
    argv: Sequence[str],
    out: Path,
    config: WatchdogConfig,
    rank: int,
    *,
    poll_s: float = POLL_S,
    live_every_s: float = 10.0,
) -> int:
    """Run ``argv``, the trainer of ``rank`` in the folder ``out``, to its end; the exit code.

    STALLED and UNHEALTHY for what this rank's heartbeat shows, PEER for another rank's halt or
    death, 128 + n for death by signal n, UNHEALTHY for a trainer that exits with 0 before DONE,
    else the trainer's own. Not ``config.enabled``: signals, halts and deaths count, alarms do not.
    ``live_every_s``: between lines where stdout is no terminal. For the main thread: it takes over
    SIGINT and SIGTERM meanwhile. OSError where the trainer cannot be started.
    """
    out.mkdir(parents=True, exist_ok=True)
    mark_ns = files.begin(out, rank)
    with _signals() as received:
        line = LiveLine(live=rank == 0, every_s=live_every_s)
        try:
            child = Child(argv, line.line)
        except OSError:
            line.close()
            raise
        watch = _Watch(child, out, config, rank, line, mark_ns)
        try:
            code = watch.run(received, poll_s)
            watch.leave(code)
        finally:
            watch.close()
    return code


class _Watch:
    def __init__(
        self,
        child: Child,
        out: Path,
        config: WatchdogConfig,
        rank: int,
        line: LiveLine,
        mark_ns: int,
    ) -> None:
        self.child, self.out, self.config, self.rank = child, out, config, rank
        self.line, self.mark_ns = line, mark_ns
        self.own = WatchedRank(files.heartbeat_path(out, rank), config)
        self.peers: dict[int, WatchedRank] = {}
        self.peers_due = 0.0
        self.dead_since: dict[int, float] = {}
        self.webhook: threading.Thread | None = None
        self.seen = Glance(None, 0.0, ())
        self.signals: list[int] = []

    def run(self, received: list[int], poll_s: float) -> int:
        while not self.child.has_ended():
            self._look()
            if received:
                self._forward(received)
            halt = self._halt()
            if halt is not None:
                self._end(halt)
                return self._halted(halt)
            self.child.wait(poll_s)
        self._look()
        return self._ended()

    def leave(self, code: int) -> None:
        """Give the other ranks' parents the exit code."""
        with self._reported(str(files.exit_path(self.out, self.rank))):
            files.write_exit(self.out, self.rank, code)

    def close(self) -> None:
        """Leave no process behind, whatever happened."""
        if not self.child.has_ended():
            self.child.kill()
        self.child.reap(WORKERS_S)
        if self.webhook is not None:
            self.webhook.join(WEBHOOK_S + 1)
        self.line.close()
        for one in (self.own, *self.peers.values()):
            one.close()

    def _look(self) -> None:
        clock = MachineClock.now()
        self.seen = self.own.look(clock)
        self.line.show(self.seen.beat, self.seen.silent_s)

    def _forward(self, received: list[int]) -> None:
        """Send on what this process received. A second request to end is SIGTERM, a third SIGKILL;
        SIGTERM leaves the trainer ``grace_s``, after which its stacks are written and it is killed:
        a launcher sends it where another rank has died, whom this one may wait for.
        """
        while received:
            number = received.pop(0)
            self.signals.append(number)
            if len(self.signals) == 1:
                self.child.forward(number)
            elif len(self.signals) == 2:
                self.child.forward(signal.SIGTERM)
            else:
                self.child.kill()
            self._say(f"{signal.Signals(number).name} received and passed on to the trainer")
        if signal.SIGTERM in self.signals and not self.child.wait(self.config.grace_s):
            self._say(f"the trainer outlives SIGTERM by {self.config.grace_s:g} s; it is killed")
            self._write_stacks()
            self.child.kill()

    def _halt(self) -> Halt | None:
        """The halt that holds: one that lies there, or one that this look gives reason for."""
        if self._counts(files.halt_path(self.out)):
            found = files.read_halt(self.out)
            if found is not None:
                return found
        reason = self._own_reason() or self._peers_reason()
        if reason is None:
            return None
        if self._publish(reason):
            return reason
        # an earlier run's that rank 0 has not moved away yet does not count
        first = files.read_halt(self.out) if self._counts(files.halt_path(self.out)) else None
        return first or reason

    def _own_reason(self) -> Halt | None:
        if not self.config.enabled or not self.seen.alarms:
            return None
        alarm: Alarm = self.seen.alarms[0]
        return Halt(
            alarm.kind,
            f"rank {self.rank}: {alarm.detail}",
            self.rank,
            self.seen.step,
            self.seen.phase.name.lower(),
            utc_now(),
        )

    def _peers_reason(self) -> Halt | None:
        """Another rank that has ended other than well; nobody where this run was asked to end,
        since then all ranks were.
        """
        world_size = 1 if self.seen.beat is None else self.seen.beat.world_size
        if self.signals or world_size == 1 or time.monotonic() < self.peers_due:
            return None
        self.peers_due = time.monotonic() + PEERS_S
        for peer in range(world_size):
            if peer == self.rank:
                continue
            found = self._peer_ended(peer)
            if found is not None:
                return Halt(
                    AlarmKind.DIED,
                    f"rank {peer} {found}; wanted all {world_size} ranks alive; read its output,"
                    f" stacks/rank{peer}.txt and log/rank{peer}.jsonl, then start the run again: it"
                    " resumes",
                    peer,
                    self.seen.step,
                    self.seen.phase.name.lower(),
                    utc_now(),
                )
        return None

    def _peer_ended(self, peer: int) -> str | None:
        if self._counts(files.exit_path(self.out, peer)):
            code = files.read_exit(self.out, peer)
            return f"ended with exit code {code}" if code else None
        path = files.heartbeat_path(self.out, peer)
        if not self._is_connected() or not path.exists():
            return None
        watched = self.peers.setdefault(peer, WatchedRank(path, self.config))
        beat = watched.look(MachineClock.now()).beat
        if beat is None or not has_died(beat):
            self.dead_since.pop(peer, None)
            return None
        since = self.dead_since.setdefault(peer, time.monotonic())
        if time.monotonic() - since < PEER_EXIT_S:
            return None
        return f"has lost its process {beat.pid}, and its parent left no exit code"

    def _counts(self, path: Path) -> bool:
        """Whether a file is of this run (nsa.train.watchdog.halt)."""
        return path.exists() if self._is_connected() else files.is_younger(path, self.mark_ns)

    def _is_connected(self) -> bool:
        return self.seen.phase > Phase.CONNECT

    def _end(self, halt: Halt) -> None:
        """Wait for the trainer, then end it. Its stacks are written first where it hangs or a peer
        died, else only if it does not obey: faulthandler reads the frames of threads that run on,
        and a trainer that would have left by itself may end with SIGSEGV.
        """
        self._say(f"halt: {halt.kind}: {halt.detail}")
        is_peer = halt.kind == AlarmKind.DIED
        grace_s = min(self.config.grace_s, PEER_GRACE_S) if is_peer else self.config.grace_s
        if is_stuck := is_peer or halt.kind == AlarmKind.STALL:
            self._write_stacks()
        if not self.child.wait(grace_s):
            self._say(f"the trainer does not obey the halt within {grace_s:g} s; it is ended")
            if not is_stuck:
                self._write_stacks()
            self.child.end(min(TERM_S, grace_s))

    def _write_stacks(self) -> None:
        path = stacks.stacks_path(self.out, self.rank)
        if not self.child.has_ended():
            with self._reported(str(path)):
                answered = stacks.dump(self.child.pid, path, STACKS_S)
                self._say(f"{'stacks' if answered else 'what the kernel knows'}: {path}")

    def _halted(self, halt: Halt) -> int:
        status = self.child.reap(WORKERS_S)
        if status is None:
            self._say(f"pid {self.child.pid} outlives SIGKILL: it waits in the kernel")
        elif status < 0:
            self._say(self.child.ending(status))
        if halt.rank not in (self.rank, -1):
            return TrainExit.PEER
        return TrainExit.STALLED if halt.kind == AlarmKind.STALL else TrainExit.UNHEALTHY

    def _ended(self) -> int:
        """The exit code of a trainer that left by itself."""
        status = self.child.reap(WORKERS_S)
        if status is None:
            raise AssertionError("the trainer was seen to end, and cannot be reaped")
        if self._counts(files.halt_path(self.out)) and (halt := files.read_halt(self.out)):
            self._say(f"halt: {halt.kind}: {halt.detail}")
            return self._halted(halt)
        where = f"in phase {self.seen.phase.name.lower()} at step {self.seen.step}"
        if status == 0 and self.seen.phase is Phase.DONE:
            return TrainExit.OK
        if status == 0 and self.signals:
            return 128 + self.signals[0]
        what = f"{self.child.ending(status)} {where}"
        if status == 0:
            what += f"; wanted phase done; read log/rank{self.rank}.jsonl"
        if status in EXPLAINED and self._is_alone():
            self.line.drop()
        else:  # of several ranks it names the one whose line it is
            self._say(what)
        if self._is_of_another(what):
            return TrainExit.PEER
        if status == 0:
            return TrainExit.UNHEALTHY
        return 128 - status if status < 0 else status

    def _is_of_another(self, what: str) -> bool:
        """Whether another rank's end came before this trainer's: halt.json is the first one's."""
        if self.signals or self._is_alone():
            return False
        phase = self.seen.phase.name.lower()
        own = Halt(
            AlarmKind.DIED, f"rank {self.rank}: {what}", self.rank, self.seen.step, phase, utc_now()
        )
        if self._publish(own):
            return False
        first = files.read_halt(self.out) if self._counts(files.halt_path(self.out)) else None
        return first is not None and first.rank != self.rank

    def _is_alone(self) -> bool:
        """Whether no other rank is known of."""
        return self.seen.beat is None or self.seen.beat.world_size == 1

    def _publish(self, halt: Halt) -> bool:
        """Whether ``halt`` is the one that holds; it does where the disk takes none."""
        with self._reported("halt.json"):
            if not files.write_halt(self.out, halt):
                return False
        self._post(halt)
        return True

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        """A full disk must not keep the watchdog from ending the trainer."""
        try:
            yield
        except OSError as error:
            self._say(f"{what} cannot be written ({error}); the run ends without it")

    def _say(self, text: str) -> None:
        self.line.line(f"nsa.train rank {self.rank}: {text}")

    def _post(self, halt: Halt) -> None:
        if self.config.webhook is None:
            return
        arguments = (self.config.webhook, halt, self.out, self._say)
        self.webhook = threading.Thread(target=_send, args=arguments, daemon=True)
        self.webhook.start()


def _send(url: str, halt: Halt, out: Path, say: Callable[[str], None]) -> None:
    body = json.dumps({**asdict(halt), "out": str(out)}).encode()
    try:
        if not url.startswith(("http://", "https://")):
            raise ValueError("wanted http:// or https://")
        request = urllib.request.Request(
            url, body, {"Content-Type": "application/json"}, method="POST"
        )
        with urllib.request.urlopen(request, timeout=WEBHOOK_S):
            pass
    except (OSError, ValueError, http.client.HTTPException) as error:
        say(f"the webhook {url} failed ({error}); the run ends without it")


@contextmanager
def _signals() -> Iterator[list[int]]:
    """SIGINT and SIGTERM that this process receives, in order; the old handlers return after."""
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    old = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
