"""How well `perfbench detect` finds what was planted, next to Apache Otava: reports/detect.md.

    python -m tools.detect_study --seed 18 --series 200 --otava /tmp/otava-venv/bin/python \\
        --public ../../shared/data --out reports/detect.md

Otava runs in a Python of its own, because it pins another numpy; series and what it found pass
through pipes as JSON. Without --otava or --public, their columns and tables are left out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from perfbench.history import ChangeKind
from perfbench.history.detection import Shift, find_shifts
from tools.detect_public import public_series
from tools.detect_report import report_of
from tools.detect_series import DRIFT_POINTS, NOISES, SD, Planted, silent, with_drift, with_steps

N = 200  # points of a series
YEAR = 365
YEAR_NOISES = ("normal", "heavy-tailed", "correlated 0.4", "outliers", "a rare mode", "weekly")
FIRST_LOOK = 10  # points
NEAR = 3  # points, within which a place is found
SIZES = (0.01, 0.02, 0.03, 0.05, 0.1, 0.2)
LATE = 30  # points after a step at which one that is not found counts as missed
GOING = tuple((size, sd) for size in (0.05, 0.1, 0.2) for sd in (0.0025, 0.005, 0.01))
BASES = (20, 40, 100)  # points before a drift that is looked at while it goes on
AFTER = 50  # points after its end, until which it is looked at
EVERY = 5  # points between two of those looks
BEFORE = 150  # points before a step whose delay is measured
SHORT = (12, 20, 30, 40, 60)  # points of a short series, whose step is in its middle
SHORT_NOISES = ("normal", "heavy-tailed", "correlated 0.4", "outliers", "a rare mode")
YOUNG, OF_AGE = 6, 60  # points of its daily looks
YOUNG_BEFORE = (10, 20, 30)  # points before a step whose delay is measured
OTAVA = """
import json, sys
from otava.analysis import compute_change_points
for line in sys.stdin:
    found = [[int(one.index) for one in compute_change_points(v)[0]] for v in json.loads(line)]
    print(json.dumps(found), flush=True)
"""


@dataclass(frozen=True, slots=True)
class Study:
    """What is asked for: seed, series of each kind, Otava's Python, the public data."""

    seed: int
    series: int
    otava: Path | None
    public: Path | None

    def rng(self, *of: object) -> np.random.Generator:
        """A stream of its own for each question, whichever others are asked."""
        return np.random.default_rng([self.seed, *"/".join(map(str, of)).encode()])


@dataclass(slots=True)
class Score:
    """Found, missed and false, over series."""

    planted: int = 0
    found: int = 0
    reported: int = 0
    true: int = 0
    silent_alarms: int = 0
    covered: int = 0

    @property
    def recall(self) -> str:
        return share(self.found, self.planted)

    @property
    def precision(self) -> str:
        return share(self.true, self.reported)


def share(part: int, whole: int) -> str:
    return "-" if whole == 0 else f"{100 * part / whole:.1f} %"


def found_here(planted: Planted) -> list[Shift]:
    """What perfbench finds, on the scale that a series of speeds is looked at."""
    return find_shifts(np.log(planted.values), planted.days)


@cache
def otava_process(python: Path) -> subprocess.Popen[str]:
    """Otava, that reads a line of series and answers a line of indexes; it ends with this one."""
    pipe = subprocess.PIPE
    return subprocess.Popen([str(python), "-c", OTAVA], stdin=pipe, stdout=pipe, text=True)


def found_by_otava(python: Path, series: Sequence[Sequence[float]]) -> list[list[int]]:
    """The indexes that Otava reports, with its own defaults."""
    process = otava_process(python)
    assert process.stdin is not None and process.stdout is not None  # both are pipes
    process.stdin.write(json.dumps([list(map(float, one)) for one in series]) + "\n")
    process.stdin.flush()
    return list(json.loads(process.stdout.readline()))


def scored(planted: Sequence[Planted], places: Sequence[Sequence[int]]) -> Score:
    """Each planted place is found by one report at most NEAR points away, and each report counts
    for one place.
    """
    score = Score()
    for one, found in zip(planted, places, strict=True):
        left = list(found)
        score.planted += len(one.places)
        score.reported += len(left)
        score.silent_alarms += bool(left)
        for place in one.places:
            near = [other for other in left if abs(other - place) <= NEAR]
            if near:
                left.remove(min(near, key=lambda other: abs(other - place)))
                score.found += 1
                score.true += 1
    return score


def both(study: Study, planted: Sequence[Planted]) -> tuple[Score, Score | None]:
    """perfbench's score, and Otava's."""
    ours = [found_here(one) for one in planted]
    score = scored(planted, [[shift.place for shift in one] for one in ours])
    for one, shifts in zip(planted, ours, strict=True):
        for place, size in zip(one.places, one.sizes, strict=False):
            near = [shift for shift in shifts if abs(shift.place - place) <= NEAR]
            score.covered += any(shift.low <= size <= shift.high for shift in near[:1])
    if study.otava is None:
        return score, None
    theirs = found_by_otava(study.otava, [one.values.tolist() for one in planted])
    return score, scored(planted, theirs)


def table(head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(value) for value in row) + " |" for row in rows)


def theirs(score: Score | None, of: Callable[[Score], str]) -> str:
    return "-" if score is None else of(score)


@cache
def silent_scores(study: Study, noise: str) -> tuple[Score, Score | None]:
    rng = study.rng("silent", noise)
    return both(study, [silent(rng, noise, N) for _ in range(study.series)])


@cache
def step_scores(study: Study, noise: str, size: float) -> tuple[Score, Score | None]:
    """Of one step a series, up or down, at least 20 points from its ends."""
    rng = study.rng("steps", noise, size)
    made = [
        with_steps(
            rng, noise, N, (int(rng.integers(20, N - 20)),), (float(rng.choice([-1, 1])) * size,)
        )
        for _ in range(study.series // 2)
    ]
    return both(study, made)


def goals_table(study: Study) -> str:
    """The goals of issue 18: in normal noise, and in the kind of noise where it is worst."""
    alarms = {noise: silent_scores(study, noise)[0].silent_alarms for noise in NOISES}
    steps = {noise: step_scores(study, noise, 3 * SD)[0] for noise in NOISES}
    drifts = {noise: drift_score(study, noise) for noise in NOISES}
    worst = {
        "alarms": max(NOISES, key=lambda noise: alarms[noise]),
        "steps": min(NOISES, key=lambda noise: steps[noise].found),
        "drifts": min(NOISES, key=lambda noise: drifts[noise].found),
    }

    def line(goal: str, kind: str, of: Callable[[str], str]) -> list[str]:
        return [goal, of("normal"), f"{of(worst[kind])} ({worst[kind]})"]

    lines = [
        line(
            f"at most 5 % of silent series of {N} points have an alarm",
            "alarms",
            lambda noise: share(alarms[noise], study.series),
        ),
        line(
            f"a step of 3 noise sd is found, at most {NEAR} points from its place",
            "steps",
            lambda noise: steps[noise].recall,
        ),
        line(
            "a drift of 5 % over 50 points is found",
            "drifts",
            lambda noise: share(drifts[noise].found, drifts[noise].planted),
        ),
    ]
    return table(["goal", "normal noise", "the worst of all kinds"], lines)


def silent_table(study: Study) -> str:
    lines = []
    for noise in NOISES:
        ours, other = silent_scores(study, noise)
        alarms = theirs(other, lambda score: share(score.silent_alarms, study.series))
        lines.append([noise, share(ours.silent_alarms, study.series), alarms])
    return table(["noise", "perfbench", "Otava"], lines)


def steps_table(study: Study) -> str:
    lines = []
    for noise in NOISES:
        for size in SIZES:
            ours, other = step_scores(study, noise, size)
            line = [noise, f"{100 * size:.0f} %", ours.recall, ours.precision]
            line += [share(ours.covered, ours.found), theirs(other, lambda score: score.recall)]
            lines.append([*line, theirs(other, lambda score: score.precision)])
    head = ["noise", "step", "recall", "precision", "interval holds it"]
    return table([*head, "Otava: recall", "Otava: precision"], lines)


def shapes_table(study: Study) -> str:
    """Several steps, bumps, and steps near the ends, in normal noise."""
    ends: dict[str, Callable[[np.random.Generator], tuple[tuple[int, ...], tuple[float, ...]]]] = {
        "3 steps of 3 %, up, down, up": lambda rng: ((50, 100, 150), (0.03, -0.03, 0.03)),
        "3 steps of 3 %, all down": lambda rng: ((50, 100, 150), (-0.03,) * 3),
        "5 steps of 5 %, at random": lambda rng: (
            tuple(int(20 + 35 * at + rng.integers(0, 15)) for at in range(5)),
            tuple(float(size) for size in rng.choice([-0.05, 0.05], size=5)),
        ),
        "5 % down, and back 10 points on": lambda rng: ((100, 110), (-0.05, 0.05)),
        "3 % at the 10th point": lambda rng: ((10,), (0.03,)),
        "3 %, 3 points before the end": lambda rng: ((N - 3,), (0.03,)),
        "3 %, 5 points before the end": lambda rng: ((N - 5,), (0.03,)),
        "3 %, 10 points before the end": lambda rng: ((N - 10,), (0.03,)),
        "5 %, 3 points before the end": lambda rng: ((N - 3,), (0.05,)),
    }
    lines = []
    for name, shape in ends.items():
        rng = study.rng("shapes", name)
        made = [with_steps(rng, "normal", N, *shape(rng)) for _ in range(study.series // 2)]
        ours, other = both(study, made)
        values: list[object] = [name, ours.recall, ours.precision]
        values += [theirs(other, lambda score: score.recall)]
        lines.append([*values, theirs(other, lambda score: score.precision)])
    return table(["steps", "recall", "precision", "Otava: recall", "Otava: precision"], lines)


@dataclass(slots=True)
class DriftScore:
    """``found``: something is reported in the drift's time; ``drifts``: as a drift."""

    planted: int = 0
    found: int = 0
    drifts: int = 0
    covered: int = 0
    otava: str = "-"


@cache
def drift_score(study: Study, noise: str) -> DriftScore:
    rng = study.rng("drift", noise)
    made = [with_drift(rng, noise, N, int(rng.integers(10, 141))) for _ in range(study.series)]
    score = DriftScore(len(made))
    for one in made:
        start, end = one.places
        inside = [
            shift for shift in found_here(one) if shift.before <= end and shift.place >= start
        ]
        drifts = [shift for shift in inside if shift.kind is ChangeKind.DRIFT]
        score.found += bool(inside)
        score.drifts += bool(drifts)
        score.covered += any(shift.low <= one.sizes[0] <= shift.high for shift in drifts)
    if study.otava is not None:
        places = found_by_otava(study.otava, [one.values.tolist() for one in made])
        pairs = zip(made, places, strict=True)
        found = sum(any(m.places[0] <= p <= m.places[1] for p in some) for m, some in pairs)
        score.otava = share(found, len(made))
    return score


def drifts_table(study: Study) -> str:
    lines = []
    for noise in NOISES:
        score = drift_score(study, noise)
        line = [noise, share(score.found, score.planted), share(score.drifts, score.planted)]
        lines.append([*line, share(score.covered, score.drifts), score.otava])
    head = ["noise", "found", "as a drift", "interval holds it", "Otava: found, as steps"]
    return table(head, lines)


def seen_drift(planted: Planted) -> bool:
    """Whether something of its direction is reported within the drift's time."""
    start, end = planted.places
    return any(
        one.before <= end and one.place >= start and one.size * planted.sizes[0] > 0
        for one in found_here(planted)
    )


def going_table(study: Study) -> str:
    """Drifts of several sizes and noises: seen first, as they end, and at every later look."""
    lines: list[list[object]] = []
    count = max(study.series // 2, 1)
    for size, sd in GOING:
        for base in BASES:
            rng = study.rng("going", size, sd, base)
            n = base + DRIFT_POINTS + AFTER
            first, at_end, stayed = list[float](), 0, 0
            for _ in range(count):
                sign = float(rng.choice([-1, 1]))
                made = with_drift(rng, "normal", n, base, sign * size, sd=sd)
                seen = [seen_drift(one) for one in list(looks(made, base + EVERY))[::EVERY]]
                late = seen[DRIFT_POINTS // EVERY - 1 :]  # from its last point on
                first.append(EVERY * (seen.index(True) + 1) if any(seen) else math.inf)
                at_end += late[0]
                stayed += all(late)
            middle = float(np.sort(first)[(count - 1) // 2])
            line: list[object] = [f"{100 * size:.0f} %", f"{100 * sd:g} %", base]
            lines.append([*line, f"{middle:.0f}", share(at_end, count), share(stayed, count)])
    head = ["drift", "noise sd", "points before it", "first seen after, median"]
    return table([*head, "seen as it ends", "and at each look from then on"], lines)


def looks(planted: Planted, first: int) -> Iterator[Planted]:
    """The series as it is at each daily look, from its ``first`` points on."""
    for end in range(first, len(planted.values) + 1):
        yield Planted(planted.values[:end], planted.days[:end], planted.places, planted.sizes)


def delay(planted: Planted) -> int | None:
    """Points after the step until it is reported; None: not within LATE."""
    (place,) = planted.places
    for after, seen in enumerate(looks(planted, place + 1), 1):
        for shift in found_here(seen):
            if abs(shift.place - place) <= max(NEAR, shift.slack):
                return after
    return None


def delays_table(study: Study) -> str:
    lines: list[list[object]] = []
    for noise in NOISES:
        for size in (0.02, 0.03, 0.05, 0.1):
            rng = study.rng("delay", noise, size)
            made = [
                with_steps(rng, noise, BEFORE + LATE, (BEFORE,), (-size,))
                for _ in range(study.series // 4)
            ]
            ours = summary([delay(one) for one in made])
            lines.append([noise, f"{100 * size:.0f} %", *ours, *otava_delay(study, made)])
    head = ["noise", "step", "median", "90 %", "by 3 points", "by 30 points"]
    return table([*head, "Otava: median", "90 %", "by 3 points", "by 30 points"], lines)


def otava_delay(study: Study, made: Sequence[Planted]) -> list[str]:
    if study.otava is None:
        return ["-"] * 4
    seen = [list(looks(one, BEFORE + 1)) for one in made]
    flat = found_by_otava(study.otava, [look.values.tolist() for some in seen for look in some])
    found = iter(flat)
    delays: list[int | None] = []
    for some in seen:
        first = None
        for after, _ in enumerate(some, 1):
            if any(abs(place - BEFORE) <= NEAR for place in next(found)) and first is None:
                first = after
        delays.append(first)
    return summary(delays)


def short_table(study: Study) -> str:
    """Steps in the middle of short series, and alarms where there is none."""
    lines: list[list[object]] = []
    for noise in SHORT_NOISES:
        for n in SHORT:
            rng = study.rng("short", noise, n)
            recalls = []
            for size in (0.05, 0.1, 0.4):
                some = [with_steps(rng, noise, n, (n // 2,), (size,)) for _ in range(study.series)]
                score = scored(some, [[one.place for one in found_here(made)] for made in some])
                recalls.append(score.recall)
            alarms = sum(bool(found_here(silent(rng, noise, n))) for _ in range(study.series))
            lines.append([noise, n, *recalls, share(alarms, study.series)])
    return table(["noise", "points", "5 sd", "10 sd", "40 sd", "alarm where silent"], lines)


def young_table(study: Study) -> str:
    """Daily looks at a series that has just begun: delays of steps of 10 sd, and alarms."""
    lines: list[list[object]] = []
    count = max(study.series // 2, 1)
    for noise in SHORT_NOISES:
        rng = study.rng("young", noise)
        alarms = sum(
            any(found_here(seen) for seen in looks(silent(rng, noise, OF_AGE), YOUNG))
            for _ in range(count)
        )
        for base in YOUNG_BEFORE:
            made = (with_steps(rng, noise, base + LATE, (base,), (-0.1,)) for _ in range(count))
            words = summary([delay(one) for one in made])
            lines.append([noise, base, *words, share(alarms, count)])
    head = ["noise", "points before", "median", "90 %", "by 3 points", "by 30 points"]
    return table([*head, "silent: alarm in looks from 6 to 60"], lines)


def summary(delays: Sequence[int | None]) -> list[str]:
    numbers = np.array([math.inf if one is None else one for one in delays])
    median, most = (float(np.sort(numbers)[int(q * (len(numbers) - 1))]) for q in (0.5, 0.9))
    words = [f"{one:.0f}" if math.isfinite(one) else f"> {LATE}" for one in (median, most)]
    return [
        *words,
        share(int(np.sum(numbers <= NEAR)), len(numbers)),
        share(int(np.sum(np.isfinite(numbers))), len(numbers)),
    ]


def alarm_in_a_year(study: Study, question: tuple[str, int]) -> bool:
    """Whether a silent series has any alarm at any of its daily looks."""
    noise, number = question
    made = silent(study.rng("year", noise, number), noise, YEAR)
    return any(found_here(seen) for seen in looks(made, FIRST_LOOK))


def year_table(study: Study) -> str:
    count = max(study.series // 2, 1)
    lines = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for noise in YEAR_NOISES:
            questions = [(noise, number) for number in range(count)]
            found = sum(pool.map(partial(alarm_in_a_year, study), questions, chunksize=4))
            lines.append([noise, share(found, count), f"{count}"])
    return table(["noise", "series with an alarm in the year", "series"], lines)


def speed() -> str:
    """Time of 300 cells x 13 metrics x 365 points on one core, from a tenth of them."""
    rng = np.random.default_rng(0)
    names = list(NOISES)
    made = [silent(rng, names[at % len(names)], YEAR) for at in range(390)]
    began = time.process_time()
    for one in made:
        found_here(one)
    return f"{10 * (time.process_time() - began):.0f} s"


def public_table(study: Study) -> str:
    if study.public is None:
        return "Not run: no --public."
    series = list(public_series(study.public))
    found = [[shift.place for shift in _found_in_public(one.values)] for one in series]
    others: list[list[int]] | None = None
    if study.otava is not None:
        others = found_by_otava(study.otava, [one.values for one in series])
    lines: list[list[object]] = []
    for at, one in enumerate(series):
        line: list[object] = [one.name, len(one.values), one.count]
        for places in (found[at], others[at] if others else None):
            line += ["-", "-"] if places is None else [len(places), _met(one.labels, places)]
        lines.append(line)
    head = ["series", "points", "labels", "perfbench reports", "labels within 5 points"]
    return table([*head, "Otava reports", "labels within 5 points"], lines)


def _found_in_public(values: Sequence[float]) -> list[Shift]:
    numbers = np.asarray(values, dtype=np.float64)
    return find_shifts(np.log(numbers) if float(numbers.min()) > 0 else numbers)


def _met(labels: Sequence[int] | None, places: Sequence[int]) -> str:
    if labels is None:
        return "-"
    return str(sum(any(abs(place - label) <= 5 for place in places) for label in labels))


PARTS: Mapping[str, Callable[[Study], str]] = {
    "goals": goals_table,
    "silent": silent_table,
    "year": year_table,
    "steps": steps_table,
    "shapes": shapes_table,
    "delays": delays_table,
    "short": short_table,
    "young": young_table,
    "drifts": drifts_table,
    "going": going_table,
    "public": public_table,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write reports/detect.md.")
    parser.add_argument("--seed", type=int, default=18)
    parser.add_argument("--series", type=int, default=200, help="of each kind, about")
    parser.add_argument("--otava", type=Path, metavar="PYTHON", help="that imports apache-otava")
    parser.add_argument("--public", type=Path, metavar="FOLDER", help="e.g. ../shared/data")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    study = Study(asked.seed, asked.series, asked.otava, asked.public)
    tables = {}
    for name, make in PARTS.items():
        began = time.monotonic()
        tables[name] = make(study)
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    asked.out.write_text(report_of(" ".join(sys.argv[1:]), speed(), tables), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
