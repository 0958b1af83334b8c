"""What is wrong with a run: pure rules over its newest heartbeat and a bounded history of reports.

A rule gives an Alarm or None. Rules of reports count lines of the log, however often they are read.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from statistics import median

from nsa.train.config import WatchdogConfig
from nsa.train.heartbeat import Beat, LastReport
from nsa.train.records import Phase

FLAT_SPREAD = 1e-6  # of the loss: fp32 rounds a mean so far, and data moves it 1,000 times farther
FLOOR_LINES = 3  # one line of few tokens may lie below the entropy by chance
BASE_LINES = 20  # memory's level is taken after so many lines, or a tenth of the run, ...
FEWEST_BASE_LINES = 5  # ... but of no fewer
SUSTAINED_LINES = 30  # longer than a checkpoint is staged: 300 s at a line in 10 s
RUNGS, CLIMBED_RUNGS = 10, 6  # a creep climbs the growth rung by rung; a new buffer jumps
SPEEDS = 512  # kept of a run's tok/s for its median


class AlarmKind(StrEnum):
    STALL = "stall"
    NOT_FINITE = "not_finite"
    ZERO_GRADIENT = "zero_gradient"
    FLAT_LINE = "flat_line"
    GATE_COLLAPSE = "gate_collapse"
    SPEED_COLLAPSE = "speed_collapse"
    BELOW_FLOOR = "below_floor"
    SLOW_PATH = "slow_path"
    MEMORY_CREEP = "memory_creep"
    DIED = "died"  # of a rank whose process ended without DONE
    REQUEST = "request"  # somebody else wrote halt.json


@dataclass(frozen=True, slots=True)
class Alarm:
    """``detail``: what was got, what was wanted, what to do next, in one line."""

    kind: AlarmKind
    detail: str


@dataclass(slots=True)
class Thinned:
    """At most 2 x SPEEDS numbers of a series, evenly spread over all of it, and its largest."""

    numbers: list[float] = field(default_factory=list)
    largest: float = 0.0
    stride: int = 1
    _passed: int = 0

    def add(self, number: float) -> None:
        self._passed += 1
        self.largest = max(self.largest, number)
        if self._passed % self.stride:
            return
        self.numbers.append(number)
        if len(self.numbers) == 2 * SPEEDS:
            self.numbers = self.numbers[1::2]
            self.stride *= 2


@dataclass(slots=True)
class MemoryLevel:
    """One kind of memory over a run: its level near the start, and how it grew since.

    ``rungs``: tenths of the allowed growth on which some line stood. ``lines_above``: lines in a
    row above all of it, to the newest.
    """

    first: list[float] = field(default_factory=list)
    base: float | None = None
    newest: float = 0.0
    rungs: set[int] = field(default_factory=set)
    lines_above: int = 0

    def add(self, size: float, *, in_first_tenth: bool, allowed_pct: float) -> None:
        self.newest = size
        if self.base is None:
            self.first.append(size)
            lines = len(self.first)
            if lines >= BASE_LINES or (lines >= FEWEST_BASE_LINES and not in_first_tenth):
                self.base = median(self.first[lines // 2 :])
                self.first = []
            return
        rung = (size - self.base) * 100 * RUNGS / (max(self.base, 1.0) * allowed_pct)
        self.lines_above = self.lines_above + 1 if rung >= RUNGS else 0
        if rung >= 1:
            self.rungs.add(min(int(rung), 10 * RUNGS))


class ReportHistory:
    """What the rules need of a process' reports; its size does not grow with the run."""

    def __init__(self, config: WatchdogConfig) -> None:
        longest = max(
            config.flat_lines,
            config.zero_gradient_lines,
            config.slow_lines,
            config.bad_steps,
            FLOOR_LINES,
        )
        self.config = config
        self.recent: deque[LastReport] = deque(maxlen=longest + 1)
        self.gates: deque[LastReport] = deque(maxlen=config.collapse_lines)  # that have shares
        self.speeds = Thinned()
        self.newest_speeds: deque[float] = deque(maxlen=config.slow_lines)
        self.memory = {"rss": MemoryLevel(), "allocated": MemoryLevel()}
        self.first_step = -1

    def add(self, beat: Beat) -> bool:
        """Take in the beat's report; False where there is none, or it is in already."""
        report = beat.report
        if report is None or (self.recent and self.recent[-1].number == report.number):
            return False
        self.recent.append(report)
        if report.shares:
            self.gates.append(report)
        self.first_step = beat.first_step
        if report.tokens_per_s is not None:
            if len(self.newest_speeds) == self.config.slow_lines:
                self.speeds.add(self.newest_speeds[0])
            self.newest_speeds.append(report.tokens_per_s)
        tenth = max(beat.first_step, 0) + (beat.steps - max(beat.first_step, 0)) / 10
        sizes = {"rss": report.memory_rss_bytes, "allocated": report.memory_allocated_bytes}
        for name, size in sizes.items():
            if size is not None and self.config.memory_creep_pct > 0:
                self.memory[name].add(
                    size,
                    in_first_tenth=not beat.steps or report.step < tenth,
                    allowed_pct=self.config.memory_creep_pct,
                )
        return True

    def last(self, lines: int) -> list[LastReport]:
        """The newest ``lines`` reports, oldest first; none where there are fewer."""
        skipped = len(self.recent) - lines
        return list(islice(self.recent, skipped, None)) if skipped >= 0 else []


def stall(phase: Phase, step: int, silent_s: float, config: WatchdogConfig) -> Alarm | None:
    """No beat for longer than the phase's time-out."""
    name, limit_s = limit_of(phase, config)
    if silent_s <= limit_s:
        return None
    return Alarm(
        AlarmKind.STALL,
        f"no progress for {silent_s:.1f} s in phase {phase.name.lower()} at step {step}; wanted a"
        f" beat within watchdog.{name}={limit_s:g}; read the stacks, or raise watchdog.{name} where"
        " the phase may take that long",
    )


def limit_of(phase: Phase, config: WatchdogConfig) -> tuple[str, float]:
    """The name and the seconds of the time-out of ``phase``."""
    name = "step_s" if phase is Phase.DONE else f"{phase.name.lower()}_s"
    return name, float(getattr(config, name))


def not_finite(history: ReportHistory) -> Alarm | None:
    """Steps in a row without a finite loss and gradient, as far as the lines prove it.

    b bad steps among n leave a run of at least b / (n - b + 1): the n - b good ones part them into
    n - b + 1 groups.
    """
    wanted, reports = history.config.bad_steps, history.recent
    newest = reports[-1]
    points = [(one.step, one.bad_steps) for one in reports]
    if reports[0].number == 1 and history.first_step >= 0:
        points.insert(0, (history.first_step, 0))
    in_a_row = 0
    for step, bad in points[:-1]:
        found = newest.bad_steps - bad
        if found == 0:  # nor from later lines on
            break
        in_a_row = max(in_a_row, math.ceil(found / (max(newest.step - step - found, 0) + 1)))
    if in_a_row >= wanted:
        got = f"at least {in_a_row} steps in a row without a finite loss and gradient"
    elif (lines := history.last(wanted)) and all(map(_is_not_finite, lines)):
        got = f"{wanted} lines in a row with a loss or a gradient that is not finite"
    else:
        return None
    return Alarm(
        AlarmKind.NOT_FINITE,
        f"{got} up to step {newest.step}; wanted fewer than watchdog.bad_steps={wanted}; resume"
        " from the last good checkpoint with a lower train.lr, or look at the data of these steps",
    )


def zero_gradient(history: ReportHistory) -> Alarm | None:
    lines = history.last(history.config.zero_gradient_lines)
    if not lines or any(one.gradient_norm != 0 for one in lines):
        return None
    return Alarm(
        AlarmKind.ZERO_GRADIENT,
        f"gradient norm 0 in {len(lines)} lines in a row up to step {lines[-1].step}; wanted > 0;"
        " look whether the loss depends on the weights (frozen, detached, all labels ignored)",
    )


def flat_line(history: ReportHistory) -> Alarm | None:
    losses = [one.loss_nats for one in history.last(history.config.flat_lines)]
    found = [loss for loss in losses if loss is not None and math.isfinite(loss)]
    if not found or len(found) < len(losses):
        return None
    if len(found) < 2 or max(found) - min(found) > FLAT_SPREAD * abs(found[-1]):
        return None
    return Alarm(
        AlarmKind.FLAT_LINE,
        f"loss {found[-1]:.6f} nats in {len(found)} lines in a row; wanted a loss that moves; look"
        " whether the optimizer steps (lr, skipped steps) and the batches differ",
    )


def gate_collapse(history: ReportHistory) -> Alarm | None:
    """The mean share of one branch is above the limit in the newest lines that state gates, one a
    probe; a model of one branch has no choice.
    """
    lines, limit = history.gates, history.config.collapse_share
    if len(lines) < history.config.collapse_lines or len(lines[-1].shares) < 2:
        return None
    shares = lines[-1].shares
    branch, share = max(shares.items(), key=lambda item: item[1])
    if share <= limit or any(one.shares.get(branch, 0.0) <= limit for one in lines):
        return None
    return Alarm(
        AlarmKind.GATE_COLLAPSE,
        f"branch {branch} has {share:.4f} of the gates in {len(lines)} probes in a row; wanted at"
        f" most watchdog.collapse_share={limit:g}; resume from before with a lower train.lr",
    )


def speed_collapse(history: ReportHistory) -> Alarm | None:
    config, newest = history.config, history.newest_speeds
    earlier = history.speeds.numbers
    if len(newest) < config.slow_lines or len(earlier) < config.slow_lines:
        return None
    # the median is at most the largest, which costs less
    if max(newest) >= config.slow_ratio * history.speeds.largest:
        return None
    usual = median(earlier)
    if max(newest) >= config.slow_ratio * usual:
        return None
    return Alarm(
        AlarmKind.SPEED_COLLAPSE,
        f"{newest[-1]:,.0f} tok/s, below {config.slow_ratio:g} of the run's median of"
        f" {usual:,.0f} in {len(newest)} lines in a row; wanted more; look at wait_p95_ms (data),"
        " at the GPU's clock and at other processes",
    )


def below_floor(history: ReportHistory) -> Alarm | None:
    margin = history.config.floor_margin_nats
    lines = history.last(FLOOR_LINES)
    for one in lines:
        if one.loss_nats is None or one.entropy_floor_nats is None:
            return None
        if not one.loss_nats < one.entropy_floor_nats - margin:
            return None
    if not lines:
        return None
    newest = lines[-1]
    return Alarm(
        AlarmKind.BELOW_FLOOR,
        f"loss {newest.loss_nats:.4f} nats in {len(lines)} lines in a row; wanted at least the"
        f" data's entropy {newest.entropy_floor_nats:.4f} -"
        f" watchdog.floor_margin_nats={margin:g}; the model sees its answers: look at labels and"
        " masks",
    )


def slow_path(history: ReportHistory) -> Alarm | None:
    slow = history.recent[-1].slow
    if not slow or not history.config.slow_path:
        return None
    return Alarm(
        AlarmKind.SLOW_PATH,
        f"engaged: {slow}; wanted a fast path; train.path=auto takes one, and"
        " watchdog.slow_path=false allows this one",
    )


def memory_creep(history: ReportHistory) -> Alarm | None:
    allowed_pct = history.config.memory_creep_pct
    for name, level in history.memory.items():
        if level.base is None or level.lines_above < SUSTAINED_LINES:
            continue
        if len(level.rungs) >= CLIMBED_RUNGS:
            return Alarm(
                AlarmKind.MEMORY_CREEP,
                f"{name} memory {level.newest / 2**30:,.3f} GiB for {level.lines_above} lines, from"
                f" {level.base / 2**30:,.3f} GiB near the start; wanted growth below"
                f" watchdog.memory_creep_pct={allowed_pct:g}; look for tensors or batches that are"
                " kept",
            )
    return None


REPORT_RULES: Mapping[AlarmKind, Callable[[ReportHistory], Alarm | None]] = {
    AlarmKind.NOT_FINITE: not_finite,
    AlarmKind.ZERO_GRADIENT: zero_gradient,
    AlarmKind.FLAT_LINE: flat_line,
    AlarmKind.GATE_COLLAPSE: gate_collapse,
    AlarmKind.SPEED_COLLAPSE: speed_collapse,
    AlarmKind.BELOW_FLOOR: below_floor,
    AlarmKind.SLOW_PATH: slow_path,
    AlarmKind.MEMORY_CREEP: memory_creep,
}


def of_reports(history: ReportHistory) -> list[Alarm]:
    """Every alarm of the reports so far; none without a report."""
    if not history.recent:
        return []
    return _given(rule(history) for rule in REPORT_RULES.values())


def _given(alarms: Iterable[Alarm | None]) -> list[Alarm]:
    return [alarm for alarm in alarms if alarm is not None]


def _is_not_finite(report: LastReport) -> bool:
    numbers = (report.loss_nats, report.gradient_norm)
    return any(number is not None and not math.isfinite(number) for number in numbers)
