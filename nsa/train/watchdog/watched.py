"""A rank as its heartbeat shows it to a process that polls."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nsa.train.config import WatchdogConfig
from nsa.train.heartbeat import (
    Beat,
    HeartbeatReader,
    MachineClock,
    boot_id,
    born_ticks,
    pid_namespace,
)
from nsa.train.records import Phase
from nsa.train.watchdog import detect
from nsa.train.watchdog.detect import Alarm

# A poll takes 0.2 s; a longer gap is the watcher's own pause (a frozen container, a suspend), in
# which nobody knows what the trainer did.
LONGEST_GAP_S = 2.0


@dataclass(frozen=True, slots=True)
class Glance:
    """One look at a rank. ``silent_s``: since its last beat, as far as it was watched. ``beat`` is
    None before the first.
    """

    beat: Beat | None
    silent_s: float
    alarms: tuple[Alarm, ...]

    @property
    def phase(self) -> Phase:
        return Phase.START if self.beat is None else self.beat.phase

    @property
    def step(self) -> int:
        return 0 if self.beat is None else self.beat.step


class WatchedRank:
    """Polls one heartbeat and judges it."""

    def __init__(self, path: Path, config: WatchdogConfig) -> None:
        self._reader = HeartbeatReader(path)
        self._config = config
        self._history = detect.ReportHistory(config)
        self._newest: Beat | None = None
        self._process = (0, 0)
        self._beats = -1
        self._silent_s = 0.0
        self._looked_ns: int | None = None
        self._found: tuple[Alarm, ...] = ()

    def look(self, clock: MachineClock) -> Glance:
        """Read it now. A heartbeat that cannot be read is one that is silent."""
        with suppress(ValueError):
            self._newest = self._reader.read()
        beat = self._newest
        self._listen(beat, clock)
        if beat is not None and self._history.add(beat):
            self._found = tuple(detect.of_reports(self._history))
        phase, step = (beat.phase, beat.step) if beat is not None else (Phase.START, 0)
        stalled = detect.stall(phase, step, self._silent_s, self._config)
        return Glance(beat, self._silent_s, ((stalled,) if stalled else ()) + self._found)

    def close(self) -> None:
        self._reader.close()

    def _listen(self, beat: Beat | None, clock: MachineClock) -> None:
        gap_s = None
        if self._looked_ns is not None:
            gap_s = min((clock.monotonic_ns - self._looked_ns) / 1e9, LONGEST_GAP_S)
        self._looked_ns = clock.monotonic_ns
        process, beats = ((beat.pid, beat.born_ticks), beat.beats) if beat else ((0, 0), -1)
        if beat is not None and process != self._process:
            self._history, self._found = detect.ReportHistory(self._config), ()
        if (process, beats) == (self._process, self._beats):
            self._silent_s += gap_s or 0.0
        else:
            age_s = beat.age_s(clock) if beat is not None else 0.0
            self._silent_s = age_s if gap_s is None else min(age_s, gap_s)
        self._process, self._beats = process, beats


def has_died(beat: Beat) -> bool:
    """Whether the writer's process has ended without DONE, as far as this process can know: it
    sees processes of its own boot and pid namespace.
    """
    if beat.phase is Phase.DONE or beat.born_ticks < 0:
        return False
    if beat.boot_id != boot_id() or beat.pid_namespace != pid_namespace():
        return False
    return born_ticks(beat.pid) != beat.born_ticks
