"""Count the watchdog's false alarms over simulated months of healthy training, and how late it is.

    python tools/watchdog_month.py --seeds 10 --days 30

A virtual clock: a line about every 10 s for a month, with what healthy runs do: warm-up, a decaying
rate, noise, loss spikes, a bad step now and then, evaluations, saves that stage memory, a file
system that is slow for minutes, garbage that comes and goes, restarts from a checkpoint. Every line
passes the rules that judge a real run, every pause the stall rule. Exit 1 for any false alarm.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from random import Random

from nsa.train.config import WatchdogConfig
from nsa.train.heartbeat import Beat, LastReport
from nsa.train.records import Phase
from nsa.train.watchdog import detect
from nsa.train.watchdog.detect import AlarmKind

GIB = 2**30
DAY_S = 86_400.0
STEPS_A_LINE = 10
LINE_S = 10.0
EVAL_STEPS, SAVE_STEPS = 5000, 1000
ENTROPY_NATS = 1.8  # of the simulated data, which the loss approaches and never crosses for long
TOKENS_A_LINE = 16_384 * STEPS_A_LINE


@dataclass(frozen=True, slots=True)
class MonthEvent:
    """A pause of ``seconds`` without a beat in ``phase``, then perhaps a line in ``beat``."""

    phase: Phase
    seconds: float
    beat: Beat


@dataclass(slots=True)
class HealthyRun:
    """A healthy trainer, line by line. ``wrong`` changes the reports of a run that is not."""

    seed: int
    days: float = 30.0
    random: Random = field(init=False)
    step: int = 0
    now_s: float = 0.0
    number: int = 0
    bad_steps: int = 0
    first_step: int = 0
    spike: float = 0.0
    slow_until_s: float = 0.0
    slow_factor: float = 1.0
    plateau: float = 1.0
    share: float = 0.4

    def __post_init__(self) -> None:
        self.random = Random(self.seed)

    @property
    def steps(self) -> int:
        return int(self.days * DAY_S / LINE_S) * STEPS_A_LINE

    def events(self) -> Iterator[MonthEvent]:
        """Until ``days`` have passed; pauses and lines in the order of the real loop."""
        yield from self._started()
        next_eval, next_save = EVAL_STEPS, SAVE_STEPS
        while self.now_s < self.days * DAY_S:
            yield self._line()
            if self.step >= next_eval:
                next_eval += EVAL_STEPS
                yield self._pause(Phase.EVAL, 120 * self.random.lognormvariate(0, 0.5), 900)
            if self.step >= next_save:
                next_save += SAVE_STEPS
                yield self._pause(Phase.SAVE, 20 * self.random.lognormvariate(0, 0.9), 1200)
            if self.random.random() < 1e-3:
                yield self._pause(Phase.DATA, 10 * self.random.lognormvariate(0, 0.8), 200)
            if self.random.random() < 3e-4:  # a slow file system, or a neighbour on the machine
                self.slow_until_s = self.now_s + self.random.uniform(30, 3000)
                self.slow_factor = self.random.uniform(0.6, 0.95)
            if self.random.random() < 4e-5:  # about ten restarts a month
                yield from self._resumed()

    def _started(self) -> Iterator[MonthEvent]:
        for phase, seconds in (
            (Phase.START, 20),
            (Phase.CONNECT, 30),
            (Phase.LOAD, 200),
            (Phase.BUILD, 150),
        ):
            yield self._pause(phase, seconds * self.random.lognormvariate(0, 0.3), 0.8 * 300)

    def _resumed(self) -> Iterator[MonthEvent]:
        self.step -= self.step % SAVE_STEPS  # the last checkpoint
        self.first_step, self.number, self.bad_steps = self.step, 0, 0
        self.plateau = 1.0
        yield from self._started()

    def _pause(self, phase: Phase, seconds: float, most: float) -> MonthEvent:
        seconds = min(seconds, most)
        self.now_s += seconds
        if phase in (Phase.EVAL, Phase.SAVE):  # each finds its buffers once, a third more memory
            self.plateau = max(self.plateau, 1.3)
        return MonthEvent(phase, seconds, self._beat(None))

    def _line(self) -> MonthEvent:
        speed = self.random.lognormvariate(0, 0.03)
        if self.now_s < self.slow_until_s:
            speed *= self.slow_factor
        if self.random.random() < 5e-3:  # a line that holds a pause, or several
            speed *= self.random.uniform(0.05, 0.5)
        seconds = min(LINE_S / speed, 250.0)
        self.now_s += seconds
        self.step += STEPS_A_LINE
        self.number += 1
        bad = 1 if self.random.random() < 1e-3 else 0
        self.bad_steps += bad + (1 if bad and self.random.random() < 0.2 else 0)
        return MonthEvent(Phase.STEP, seconds, self._beat(self._report(speed)))

    def _report(self, speed: float) -> LastReport:
        random, progress = self.random, self.step / self.steps
        self.spike *= 0.8
        if random.random() < 2e-4:
            self.spike = random.uniform(0.3, 4.0)
        learned = 9.0 * math.exp(-self.step / 3000) + 1.2 / (1 + self.step / 20_000)
        noise = random.gauss(0, 0.7 / math.sqrt(TOKENS_A_LINE))
        warm = min(1.0, self.step / 2000)
        self.share = min(0.93, max(0.2, self.share + random.gauss(0, 0.004)))
        rest = 1 - self.share
        staged = random.uniform(1.0, 1.15) if random.random() < 0.1 else 1.0
        return LastReport(
            number=self.number,
            wall_ns=int(self.now_s * 1e9),
            step=self.step,
            bad_steps=self.bad_steps,
            memory_rss_bytes=int(
                5 * GIB * self.plateau * staged * (1 + 0.08 * progress + 0.02 * random.random())
            ),
            loss_nats=ENTROPY_NATS + learned + noise + self.spike,
            gradient_norm=0.3 * random.lognormvariate(0, 0.4) * (1 + 3 * self.spike),
            tokens_per_s=439_000.0 * speed,
            gate_entropy_nats=0.9 + random.gauss(0, 0.01),
            cmp_share=rest * 0.4,
            sel_share=self.share,
            win_share=rest * 0.6,
            learning_rate=6e-4 * warm * (0.1 + 0.45 * (1 + math.cos(math.pi * min(1, progress)))),
            memory_allocated_bytes=30 * GIB * (1.0 if self.number > 3 else 0.9),
            entropy_floor_nats=ENTROPY_NATS,
            slow="",
        )

    def _beat(self, report: LastReport | None) -> Beat:
        return Beat(
            rank=0,
            world_size=1,
            pid=1000,
            born_ticks=1,
            pid_namespace=1,
            boot_id="virtual",
            steps=self.steps,
            monotonic_ns=int(self.now_s * 1e9),
            wall_ns=int(self.now_s * 1e9),
            beats=self.number,
            step=self.step,
            first_step=self.first_step,
            first_step_monotonic_ns=0,
            phase=Phase.STEP,
            report=report,
        )


@dataclass(slots=True)
class MonthCount:
    """What the rules made of a run."""

    lines: int = 0
    pauses: int = 0
    longest_pause_s: float = 0.0
    alarms: Counter[str] = field(default_factory=Counter)
    first_s: float | None = None
    first_line: int | None = None


def spoiled(report: LastReport, kind: AlarmKind, lines: int) -> LastReport:
    """``report`` as it is ``lines`` lines after the fault of ``kind`` began."""
    changes: dict[AlarmKind, dict[str, object]] = {
        AlarmKind.NOT_FINITE: {
            "bad_steps": report.bad_steps + STEPS_A_LINE * lines,
            "loss_nats": None,
        },
        AlarmKind.ZERO_GRADIENT: {"gradient_norm": 0.0},
        AlarmKind.FLAT_LINE: {"loss_nats": math.log(32_768)},
        AlarmKind.GATE_COLLAPSE: {"cmp_share": 0.001, "sel_share": 0.998, "win_share": 0.001},
        AlarmKind.SPEED_COLLAPSE: {"tokens_per_s": 0.3 * (report.tokens_per_s or 0.0)},
        AlarmKind.BELOW_FLOOR: {"loss_nats": ENTROPY_NATS - 0.2},
        AlarmKind.SLOW_PATH: {"slow": "sel.v1"},
        # 1 % of the level a line: 50 MiB in 10 s
        AlarmKind.MEMORY_CREEP: {
            "memory_rss_bytes": int(report.memory_rss_bytes * (1 + 0.01 * lines))
        },
    }
    return replace(report, **changes[kind])  # type: ignore[arg-type]


def judged(
    run: HealthyRun, config: WatchdogConfig, *, wrong: AlarmKind | None = None, after: int = 2000
) -> MonthCount:
    """Every alarm of a run; with ``wrong`` its reports are spoiled after so many lines, and the
    first alarm of that kind ends it.
    """
    count, history, began_s = MonthCount(), detect.ReportHistory(config), 0.0
    for event in run.events():
        beat = event.beat
        stalled = detect.stall(event.phase, beat.step, event.seconds, config)
        count.longest_pause_s = max(count.longest_pause_s, event.seconds)
        found = [stalled] if stalled else []
        if beat.report is None:
            count.pauses += 1
        else:
            count.lines += 1
            if beat.report.number == 1:  # a new process
                history = detect.ReportHistory(config)
            if wrong is not None and count.lines > after:
                began_s = began_s or run.now_s - event.seconds
                beat = replace(beat, report=spoiled(beat.report, wrong, count.lines - after))
            history.add(beat)
            found += detect.of_reports(history)
        count.alarms.update(alarm.kind.value for alarm in found)
        if wrong is not None and wrong in (alarm.kind for alarm in found) and began_s:
            count.first_s, count.first_line = run.now_s - began_s, count.lines - after
            return count
    return count


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--days", type=float, default=30.0)
    asked = parser.parse_args(argv)
    config, false = WatchdogConfig(), 0
    for seed in range(asked.seeds):
        count = judged(HealthyRun(seed, asked.days), config)
        false += sum(count.alarms.values())
        print(
            f"seed {seed}: {count.lines:,} lines, {count.pauses:,} pauses (longest"
            f" {count.longest_pause_s:.0f} s), false alarms {dict(count.alarms) or 0}",
            flush=True,
        )
    print(f"false alarms in {asked.seeds} runs of {asked.days:g} days: {false}")
    for kind in detect.REPORT_RULES:
        count = judged(HealthyRun(0, asked.days), config, wrong=kind)
        if count.first_s is None:
            print(f"{kind.value}: not detected")
            false += 1
        else:
            print(f"{kind.value}: after {count.first_line} lines, {count.first_s:.0f} s")
    return 1 if false else 0


if __name__ == "__main__":
    sys.exit(main())
