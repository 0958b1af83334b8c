"""A rank's heartbeat: one page of shared memory that its trainer writes and any process reads.

Writer and reader share no lock. Each of the two parts, the beat and the last report, has a counter
and two slots: a write fills the slot that the counter does not name, then moves the counter, so a
reader always finds a whole slot, also of a writer that was killed in the middle. A checksum in each
slot makes the reader try again where it met a write, on machines that reorder stores as well.

Little-endian, SIZE bytes. A file system that several hosts share shows another host's beats late.
"""

from __future__ import annotations

import math
import mmap
import os
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

from nsa.train.records import Phase, StepRecord

MAGIC = b"NSABEAT\0"
VERSION = 1
SIZE = 4096
SLOW_BYTES = 64
BRANCHES = ("cmp", "sel", "win")
_TRIES = 100  # a write takes microseconds; a read that fails so often meets damage, not a writer
_FIRST_PHASES = (Phase.BUILD, Phase.DATA, Phase.STEP)

# magic, version, size, rank, world size, pid, ticks at its start, pid namespace, steps, boot id
_HEADER = Struct("<8sIIqqqqqq36s")
# monotonic ns, wall ns, beats, step, first step, its monotonic ns, phase
_BEAT = Struct("<qqqqqqi")
_NUMBERS = (
    "loss_nats",
    "gradient_norm",
    "tokens_per_s",
    "gate_entropy_nats",
    "cmp_share",
    "sel_share",
    "win_share",
    "learning_rate",
    "memory_allocated_bytes",
    "entropy_floor_nats",
)
# reports, wall ns, step, bad steps, rss bytes, presence bits, numbers, slow path
_REPORT = Struct(f"<qqqqqI{len(_NUMBERS)}d{SLOW_BYTES}s")
_CHECKSUM_BYTES = 4
_BEAT_AT, _REPORT_AT = 256, 1024


@dataclass(frozen=True, slots=True)
class LastReport:
    """What a heartbeat keeps of the newest line of a rank's log. None: not measured.

    ``number`` and ``bad_steps``: since the process began. ``*_share``: mean share of a branch in
    the gates, of 1. ``slow``: the slow path that is engaged, "" for none. Other names as in
    StepRecord.
    """

    number: int
    wall_ns: int
    step: int
    bad_steps: int
    memory_rss_bytes: int
    loss_nats: float | None
    gradient_norm: float | None
    tokens_per_s: float | None
    gate_entropy_nats: float | None
    cmp_share: float | None
    sel_share: float | None
    win_share: float | None
    learning_rate: float | None
    memory_allocated_bytes: float | None
    entropy_floor_nats: float | None
    slow: str

    @property
    def shares(self) -> dict[str, float]:
        """Of the branches that have one."""
        named = {name: getattr(self, f"{name}_share") for name in BRANCHES}
        return {name: share for name, share in named.items() if share is not None}


@dataclass(frozen=True, slots=True)
class Beat:
    """A consistent snapshot of a heartbeat.

    ``monotonic_ns``: CLOCK_MONOTONIC of the last beat, comparable within one ``boot_id``.
    ``first_step``: the step of the first beat in BUILD, DATA or STEP, -1 before it; what was
    resumed from. ``born_ticks``: the start of ``pid`` as /proc has it, -1 where there is none.
    ``steps``: planned, 0 where not known.
    """

    rank: int
    world_size: int
    pid: int
    born_ticks: int
    pid_namespace: int
    boot_id: str
    steps: int
    monotonic_ns: int
    wall_ns: int
    beats: int
    step: int
    first_step: int
    first_step_monotonic_ns: int
    phase: Phase
    report: LastReport | None

    def age_s(self, clock: MachineClock) -> float:
        """Seconds since the last beat; by the wall clock where the writer ran in another boot."""
        if self.boot_id == clock.boot_id:
            return max(0.0, (clock.monotonic_ns - self.monotonic_ns) / 1e9)
        return max(0.0, (clock.wall_ns - self.wall_ns) / 1e9)

    def eta_s(self, clock: MachineClock) -> float | None:
        """Seconds until the last step at the mean pace since ``first_step``, pauses included."""
        done = self.step - self.first_step
        if self.first_step < 0 or done <= 0 or not self.steps or self.boot_id != clock.boot_id:
            return None
        elapsed_s = (clock.monotonic_ns - self.first_step_monotonic_ns) / 1e9
        return max(0.0, elapsed_s / done * (self.steps - self.step))


@dataclass(frozen=True, slots=True)
class MachineClock:
    """A reading of this machine's clocks."""

    monotonic_ns: int
    wall_ns: int
    boot_id: str

    @classmethod
    def now(cls) -> MachineClock:
        return cls(time.monotonic_ns(), time.time_ns(), boot_id())


def boot_id() -> str:
    """What Linux calls this boot; "" where there is no /proc."""
    return _text_of("/proc/sys/kernel/random/boot_id").strip()


def born_ticks(pid: int) -> int:
    """When ``pid`` started, in ticks since the boot; -1 where no such process runs (a zombie does
    not run).
    """
    # "pid (name) state ...": a name may hold spaces and brackets
    after_name = _text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if len(after_name) < 20 or after_name[0] in "ZX":
        return -1
    return int(after_name[19])


def pid_namespace() -> int:
    """Identifies the PID namespace: pids of two containers differ in meaning; 0: unknown."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class HeartbeatWriter:
    """Writes ``path``, which is made anew; its folder too. One thread of one process writes.

    A beat says that the trainer made progress: nothing may beat from a timer, or while it waits.
    ``steps``: planned. OSError where the file cannot be made.
    """

    def __init__(
        self, path: Path, *, rank: int, pid: int, world_size: int = 1, steps: int = 0
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        beginning = path.with_name(f"{path.name}.{pid}")
        with beginning.open("w+b") as file:
            # not a hole: a store to one ends the process by SIGBUS where the disk is full
            file.write(bytes(SIZE))
            file.flush()
            self._memory = mmap.mmap(file.fileno(), SIZE)
        header = _HEADER.pack(
            MAGIC,
            VERSION,
            SIZE,
            rank,
            world_size,
            pid,
            born_ticks(pid),
            pid_namespace(),
            steps,
            boot_id().encode(),
        )
        self._memory[: len(header)] = header
        beginning.replace(path)
        self._beat = _Latch(self._memory, _BEAT_AT, _BEAT)
        self._report = _Latch(self._memory, _REPORT_AT, _REPORT)
        self._beats = 0
        self._reports = 0
        self._first_step = -1
        self._first_step_ns = 0

    def beat(self, phase: Phase, step: int) -> None:
        """Publish progress: ``step`` steps are done, and ``phase`` begins or goes on."""
        now_ns = time.monotonic_ns()
        self._beats += 1
        if self._first_step < 0 and phase in _FIRST_PHASES:
            self._first_step, self._first_step_ns = step, now_ns
        self._beat.publish(
            now_ns,
            time.time_ns(),
            self._beats,
            step,
            self._first_step,
            self._first_step_ns,
            phase,
        )

    def report(self, record: StepRecord, *, entropy_floor_nats: float | None, slow: str) -> None:
        """Publish what the watchdog judges of ``record``; ``slow``: the slow path that is engaged,
        cut to SLOW_BYTES bytes of UTF-8.
        """
        values = {
            "loss_nats": record.loss_nats,
            "gradient_norm": record.gradient_norm,
            "tokens_per_s": record.tokens_per_s,
            "learning_rate": record.learning_rate,
            "memory_allocated_bytes": record.memory_allocated_bytes,
            "entropy_floor_nats": entropy_floor_nats,
            **_gates_of(record.statistics),
        }
        numbers = [values[name] for name in _NUMBERS]
        present = sum(1 << at for at, value in enumerate(numbers) if value is not None)
        self._reports += 1
        self._report.publish(
            self._reports,
            time.time_ns(),
            record.step,
            record.bad_steps,
            record.memory_rss_bytes,
            present,
            *(math.nan if value is None else float(value) for value in numbers),
            slow.encode()[:SLOW_BYTES],
        )

    def close(self) -> None:
        self._memory.close()


class HeartbeatReader:
    """Reads ``path``, which may not exist yet and may be made anew at any time."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._memory: mmap.mmap | None = None
        self._identity = (0, 0)

    def read(self) -> Beat | None:
        """The newest snapshot; None while nothing was written.

        ValueError where the file is no heartbeat, of another version, or damaged.
        """
        memory = self._opened()
        if memory is None:
            return None
        magic, version, size, *who, boot = _HEADER.unpack_from(memory)
        if magic == bytes(len(MAGIC)):
            return None
        if (magic, version, size) != (MAGIC, VERSION, SIZE):
            raise ValueError(
                f"{self.path} has magic {magic!r}, version {version}; wanted {MAGIC!r}, version"
                f" {VERSION}; read it with the nsa that wrote it"
            )
        beat = self._part(_Latch(memory, _BEAT_AT, _BEAT))
        if beat is None:
            return None
        report = self._part(_Latch(memory, _REPORT_AT, _REPORT))
        rank, world_size, pid, born, namespace, steps = who
        now_ns, wall_ns, beats, step, first_step, first_ns, phase = beat
        return Beat(
            rank,
            world_size,
            pid,
            born,
            namespace,
            boot.rstrip(b"\0").decode(),
            steps,
            now_ns,
            wall_ns,
            beats,
            step,
            first_step,
            first_ns,
            Phase(phase),
            None if report is None else _report_of(report),
        )

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def _opened(self) -> mmap.mmap | None:
        try:
            now = self.path.stat()
        except FileNotFoundError:
            return self._memory
        if self._memory is not None and (now.st_dev, now.st_ino) == self._identity:
            return self._memory
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_size != SIZE:
                    raise ValueError(
                        f"{self.path} has {found.st_size:,} bytes; wanted {SIZE:,}, a heartbeat;"
                        " remove it, and the next run makes it"
                    )
                memory = mmap.mmap(file.fileno(), SIZE, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            return self._memory
        self.close()
        self._memory, self._identity = memory, (found.st_dev, found.st_ino)
        return memory

    def _part(self, latch: _Latch) -> tuple[Any, ...] | None:
        for _ in range(_TRIES):
            if latch.count() == 0:
                return None
            if (values := latch.read()) is not None:
                return values
            time.sleep(0)
        raise ValueError(
            f"{self.path}: no checksum fits in {_TRIES} readings; wanted a whole slot; another"
            " program wrote into it, so start the run anew"
        )


class _Latch:
    """A counter and two slots; the counter's last bit names the slot that is whole."""

    def __init__(self, memory: mmap.mmap, at: int, body: Struct) -> None:
        self._memory, self._at, self._body = memory, at, body
        self._bytes = body.size + _CHECKSUM_BYTES
        self._count = 0

    def publish(self, *values: Any) -> None:
        self._count += 1
        payload = self._body.pack(*values)
        slot = self._at + 8 + (self._count & 1) * self._bytes
        # bytes at once: struct would write a number byte by byte
        self._memory[slot : slot + self._bytes] = payload + zlib.crc32(payload).to_bytes(
            _CHECKSUM_BYTES, "little"
        )
        self._memory[self._at : self._at + 8] = self._count.to_bytes(8, "little")

    def count(self) -> int:
        return int.from_bytes(self._memory[self._at : self._at + 8], "little")

    def read(self) -> tuple[Any, ...] | None:
        """The whole slot; None where a write was met."""
        slot = self._at + 8 + (self.count() & 1) * self._bytes
        found = self._memory[slot : slot + self._bytes]
        payload, checksum = found[: self._body.size], found[self._body.size :]
        if zlib.crc32(payload).to_bytes(_CHECKSUM_BYTES, "little") != checksum:
            return None
        return self._body.unpack(payload)


def _report_of(values: tuple[Any, ...]) -> LastReport:
    number, wall_ns, step, bad_steps, rss, present, *numbers, slow = values
    named = {
        name: value if present >> at & 1 else None
        for at, (name, value) in enumerate(zip(_NUMBERS, numbers, strict=True))
    }
    return LastReport(
        number=number,
        wall_ns=wall_ns,
        step=step,
        bad_steps=bad_steps,
        memory_rss_bytes=rss,
        slow=slow.rstrip(b"\0").decode(errors="ignore"),  # a cut may halve a letter
        **named,
    )


def _gates_of(statistics: Mapping[str, Any] | None) -> dict[str, float | None]:
    """Gate entropy and shares of a Summary's mapping; None each where a probe saw none."""
    found = statistics or {}
    shares = found.get("branch_share") or {}
    return {
        "gate_entropy_nats": found.get("gate_entropy"),
        **{f"{name}_share": shares.get(name) for name in BRANCHES},
    }


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""
