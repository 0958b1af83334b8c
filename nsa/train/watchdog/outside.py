"""``python -m nsa.train watch DIR``: looks at a run from another shell."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import TextIO

from nsa.train.config import WatchdogConfig
from nsa.train.display import duration, show_text, table
from nsa.train.errors import TrainExit
from nsa.train.heartbeat import MachineClock
from nsa.train.log import utc_now
from nsa.train.records import Phase
from nsa.train.watchdog import halt as files
from nsa.train.watchdog.detect import Alarm, AlarmKind
from nsa.train.watchdog.halt import Halt
from nsa.train.watchdog.watched import Glance, WatchedRank, has_died

HEADER = ("rank", "phase", "step", "beat", "loss_nats", "tok/s", "state")
LOOK_S = 0.5


def watch(
    out: Path,
    *,
    once: bool = False,
    halt: bool = False,
    every_s: float = 10.0,
    config: WatchdogConfig | None = None,
    stream: TextIO | None = None,
) -> int:
    """Show each rank's heartbeat in ``out``, and judge it, until every rank has ended; the exit
    code of the worst that was found: 0, UNHEALTHY, STALLED (also a rank that died); DATA for a
    folder without heartbeats.

    ``once``: one table. ``halt``: write halt.json for what is found, and the trainers end.
    ``config``: as the run's config.json has it by default. A table every ``every_s`` seconds.
    """
    show = sys.stdout if stream is None else stream
    config = config_of(out) if config is None else config
    ranks: dict[int, WatchedRank] = {}
    worst, shown_at, reported = int(TrainExit.OK), float("-inf"), set[tuple[int, str]]()
    try:
        while True:
            seen = _look(out, ranks, config)
            if not seen:
                show_text(f"{out} has no heartbeat/rank*.bin; wanted the folder of a run", show)
                return TrainExit.DATA
            halted = files.read_halt(out)
            found = {rank: _alarms(glance, halted) for rank, glance in seen.items()}
            if halted is not None:
                where = halted.rank if halted.rank in seen else min(seen)
                found[where] = [_of_halt(halted)]
            worst = max([worst, *(_code(one) for alarms in found.values() for one in alarms)])
            if once or time.monotonic() - shown_at >= every_s:
                show_text(_table(seen, found), show)
                shown_at = time.monotonic()
            for rank, alarm in _new(found, reported):
                show_text(f"rank {rank}: {alarm.kind}: {alarm.detail}", show)
                if halt:
                    files.write_halt(out, _halt_of(rank, seen[rank], alarm))
            if once or all(_is_over(glance) for glance in seen.values()):
                return worst
            time.sleep(LOOK_S)
    except KeyboardInterrupt:
        return worst
    finally:
        for one in ranks.values():
            one.close()


def config_of(out: Path) -> WatchdogConfig:
    """The watchdog's section of ``out``/config.json; the defaults where there is none."""
    try:
        found = json.loads((out / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return WatchdogConfig()
    section = found.get("config", found).get("watchdog", {})
    return WatchdogConfig(**section)


def _look(out: Path, ranks: dict[int, WatchedRank], config: WatchdogConfig) -> dict[int, Glance]:
    """Every rank's heartbeat; those of ranks that a smaller world has left behind are not read."""
    for path in (out / "heartbeat").glob("rank*.bin"):
        if (name := re.fullmatch(r"rank(\d+)", path.stem)) and int(name[1]) not in ranks:
            ranks[int(name[1])] = WatchedRank(path, config)
    clock = MachineClock.now()
    seen = {rank: ranks[rank].look(clock) for rank in sorted(ranks)}
    beats = [glance.beat for glance in seen.values() if glance.beat is not None]
    if not beats:
        return seen
    world_size = max(beats, key=lambda beat: beat.wall_ns).world_size
    return {rank: glance for rank, glance in seen.items() if rank < world_size}


def _alarms(glance: Glance, halted: Halt | None) -> list[Alarm]:
    """Of a rank that has ended nothing stalls; one that left because of a halt has not died."""
    beat = glance.beat
    rest = [one for one in glance.alarms if one.kind is not AlarmKind.STALL]
    if glance.phase is Phase.DONE:
        return rest
    if beat is None or not has_died(beat):
        return list(glance.alarms)
    if halted is not None:
        return rest
    detail = (
        f"process {beat.pid} ended in phase {beat.phase.name.lower()} at step {beat.step}; wanted"
        " phase done; read its output and its log, then start the run again: it resumes"
    )
    return [Alarm(AlarmKind.DIED, detail), *rest]


def _of_halt(halt: Halt) -> Alarm:
    known = halt.kind in set(AlarmKind)
    return Alarm(AlarmKind(halt.kind) if known else AlarmKind.REQUEST, f"halted: {halt.detail}")


def _is_over(glance: Glance) -> bool:
    return glance.phase is Phase.DONE or (glance.beat is not None and has_died(glance.beat))


def _code(alarm: Alarm) -> int:
    if alarm.kind in (AlarmKind.STALL, AlarmKind.DIED):
        return TrainExit.STALLED
    return TrainExit.UNHEALTHY


def _new(found: dict[int, list[Alarm]], reported: set[tuple[int, str]]) -> list[tuple[int, Alarm]]:
    """Alarms whose kind was not reported of that rank; they are from now on."""
    new = []
    for rank, alarms in found.items():
        for alarm in alarms:
            if (rank, alarm.kind) not in reported:
                reported.add((rank, alarm.kind))
                new.append((rank, alarm))
    return new


def _halt_of(rank: int, glance: Glance, alarm: Alarm) -> Halt:
    detail = f"rank {rank}, seen from outside: {alarm.detail}"
    phase = glance.phase.name.lower()
    return Halt(alarm.kind, detail, rank, glance.step, phase, utc_now())


def _table(seen: dict[int, Glance], found: dict[int, list[Alarm]]) -> str:
    rows = []
    for rank, glance in seen.items():
        beat = glance.beat
        report = None if beat is None else beat.report
        loss = None if report is None else report.loss_nats
        speed = None if report is None else report.tokens_per_s
        state = ", ".join(one.kind for one in found[rank])
        state = state or ("finished" if glance.phase is Phase.DONE else "healthy")
        rows.append(
            (
                str(rank),
                "no beat yet" if beat is None else beat.phase.name.lower(),
                "n/a" if beat is None else f"{beat.step:,}",
                "n/a" if beat is None else f"{duration(glance.silent_s)} ago",
                "n/a" if loss is None else f"{loss:.4f}",
                "n/a" if speed is None else f"{speed:,.0f}",
                state,
            )
        )
    return table(HEADER, rows)
