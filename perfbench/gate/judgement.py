"""What the gate found, as data: findings, one verdict for each cell, and the sentence that heads
the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Self

from perfbench.errors import SEVERITY, Exit, worst
from perfbench.gate.evidence import SPEED_WORDS, WALL, Evidence
from perfbench.matrix import GatePolicy
from perfbench.records import (
    AXES,
    EXIT_OF,
    FAIL_UNDER_STRICT,
    NOT_APPLICABLE,
    Cell,
    OwnStepLine,
    Replicate,
    Verdict,
    measured_of,
    short_ids,
    varying_axes,
)
from perfbench.text import counted, number, shorten

TOO_WIDE_PCT = 50.0  # of half the interval: twice the speed, or half of it, is then no surprise
# What a comparison of speeds says; where anything else is wrong, no number of the cell counts.
COMPARED = (
    Verdict.REGRESSED,
    Verdict.SUSPECT,
    Verdict.WATCH,
    Verdict.BLIND,
    Verdict.UNSTABLE,
    Verdict.SAME,
    Verdict.FASTER,
)


def severity(verdict: Verdict) -> tuple[int, int]:
    """Sort key of verdicts, worst first."""
    code = EXIT_OF[verdict]
    return (SEVERITY.index(code) if code in SEVERITY else len(SEVERITY)), list(Verdict).index(
        verdict
    )


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong; ``rule`` groups the same trouble of several replicates."""

    verdict: Verdict
    rule: str
    reason: str


@dataclass(frozen=True, slots=True)
class StepCost:
    """What a step costs besides wall time: medians over the replicates that were profiled, null
    where none shows it.
    """

    device_ms: float | None = None
    host_ms: float | None = None
    launches: float | None = None

    @classmethod
    def of(cls, good: Iterable[Replicate]) -> Self:
        rows = list(good)
        found = {name: measured_of(rows, name) for name in ("device_ms", "host_ms", "launches")}
        return cls(**{name: median(values) for name, values in found.items() if values})


@dataclass(frozen=True, slots=True)
class BaselineOrigin:
    """Which promoted run the candidate was compared with."""

    matrix_name: str
    run_id: str
    promoted_utc: str
    commit: str | None
    dirty: bool
    proved: bool  # git itself named the commit and its changes


@dataclass(frozen=True, slots=True)
class CellVerdict:
    """One cell, judged.

    ``verdict`` is null where nothing was compared and nothing is wrong; ``reason`` says why.

    Speeds are geometric means over the usable replicates. ``screened``: WATCH or
    SUSPECT until base and candidate were measured interleaved. ``evidence`` holds the comparisons,
    that of ``metric`` first; ``notes`` what explains a change.
    """

    cell_id: str
    axes: Cell
    verdict: Verdict | None
    reason: str
    base_tok_per_s: float | None = None
    cand_tok_per_s: float | None = None
    change_pct: float | None = None
    replicates: int = 0
    spread_pct: float | None = None
    reproduce: str = ""
    metric: str = WALL
    screened: bool = False
    confirmed: bool = False  # judged on interleaved pairs
    evidence: tuple[Evidence, ...] = ()
    notes: tuple[str, ...] = ()
    cut_short: str = ""  # '3 of 6 planned pairs', where the others were never measured
    suspicion: str = ""  # why the screen rejects the cell, and the command that settles it
    work: tuple[str, ...] = ()  # launches and host syncs that rose, where they decided
    half_pct: float | None = None  # of the 95 % interval of its speed, where nothing was compared
    host_bound: bool = False
    step: StepCost = StepCost()
    own: OwnStepLine | None = None  # what is proved of a user's own step, and what is not

    @property
    def change(self) -> str:
        """What changed, and from how many measurements: '-81.9 % (2,711 -> 491 tok/s), 11 pairs';
        empty where no speed was compared.
        """
        one = self.evidence[0] if self.evidence and self.verdict in COMPARED else None
        if one is None or one.change_pct is None or not self.compared:
            return ""
        c, speeds = one.comparison, (self.base_tok_per_s, self.cand_tok_per_s)
        count = f"{c.n_base} pairs" if one.paired else f"{c.n_base} and {c.n_candidate} processes"
        was, is_ = map(number, speeds)
        pct = f"{round(one.change_pct, 1) + 0.0:+.1f} %"
        return ", ".join(
            [*self.work, f"{SPEED_WORDS[one.metric]}{pct} ({was} -> {is_} tok/s)", count]
        )

    @property
    def is_too_noisy(self) -> bool:
        """Whether nothing was compared, and the interval is too wide to use the number."""
        return self.verdict is None and (self.half_pct or 0.0) > TOO_WIDE_PCT

    @property
    def mde_pct(self) -> float | None:
        return self.evidence[0].mde_pct if self.evidence else None

    @property
    def looks_faster(self) -> bool:
        """Whether the screen alone finds a gain beyond the tolerance, which no pairs confirmed."""
        one = self.evidence[0] if self.evidence else None
        return (
            one is not None
            and self.verdict is Verdict.SAME
            and not one.paired
            and one.is_gain_beyond_tolerance
        )

    @property
    def exit_code(self) -> Exit:
        return Exit.OK if self.verdict is None else EXIT_OF[self.verdict]

    @property
    def compared(self) -> bool:
        return self.base_tok_per_s is not None and self.cand_tok_per_s is not None


@dataclass(frozen=True, slots=True)
class Judgement:
    """Everything that ``gate`` prints; ``findings`` are those of the run as a whole."""

    exit_code: Exit
    headline: str
    cells: list[CellVerdict]
    findings: list[Finding]
    policy: GatePolicy
    strict: bool = False
    baseline: BaselineOrigin | None = None
    counts: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def is_too_noisy(self) -> bool:
        """Whether some number of the run is too noisy to use."""
        return any(cell.is_too_noisy for cell in self.cells)

    @property
    def to_confirm(self) -> list[str]:
        """Cells that base and candidate must measure interleaved before anything is called
        slower.
        """
        return [cell.cell_id for cell in self.cells if cell.screened and not cell.confirmed]

    def of(self, *verdicts: Verdict) -> list[CellVerdict]:
        return [cell for cell in self.cells if cell.verdict in verdicts]


def summarise(
    cells: list[CellVerdict],
    findings: list[Finding],
    policy: GatePolicy,
    strict: bool,
    baseline: BaselineOrigin | None,
    notes: tuple[str, ...] = (),
) -> Judgement:
    """Derive the exit code and the headline from the findings."""
    verdicts = [cell.verdict for cell in cells if cell.verdict is not None] + [
        f.verdict for f in findings
    ]
    exits = [EXIT_OF[verdict] for verdict in verdicts]
    if strict and any(verdict in FAIL_UNDER_STRICT for verdict in verdicts):
        exits.append(Exit.STRICT)
    code = worst(exits)
    tally = Counter(cell.verdict for cell in cells)
    counts = {
        "MEASURED" if verdict is None else verdict.value: tally[verdict]
        for verdict in (None, *Verdict)
        if tally[verdict]
    }
    headline = _headline(code, cells, findings, policy, baseline) + _not_proved(cells)
    return Judgement(code, headline, cells, findings, policy, strict, baseline, counts, notes)


def resummarise(
    judgement: Judgement,
    cells: list[CellVerdict],
    *,
    findings: list[Finding] | None = None,
    notes: tuple[str, ...] | None = None,
) -> Judgement:
    """``judgement`` with other cells: its exit code and headline follow them."""
    return summarise(
        cells,
        judgement.findings if findings is None else findings,
        judgement.policy,
        judgement.strict,
        judgement.baseline,
        judgement.notes if notes is None else notes,
    )


def _headline(
    code: Exit,
    cells: list[CellVerdict],
    findings: list[Finding],
    policy: GatePolicy,
    baseline: BaselineOrigin | None,
) -> str:
    """What changed and by how much, then how that was judged; where no change of speed decides,
    the verdict and its reason.
    """
    if code is Exit.STRICT and any(cell.verdict is Verdict.SUSPECT for cell in cells):
        return _of_cells([Verdict.SUSPECT], "exit 7", cells)
    if code is Exit.STRICT:
        return _of_cells(FAIL_UNDER_STRICT, "exit 7 (warnings fail under --strict)", cells)
    if code is not Exit.OK:
        return _red(code, cells, findings)
    if any(cell.verdict in FAIL_UNDER_STRICT for cell in cells):
        return _of_cells(FAIL_UNDER_STRICT, "exit 0 (a warning; --strict fails)", cells)
    if baseline is None:
        own = sum(cell.axes.is_own_step for cell in cells)
        said = []
        if len(cells) > own:
            ran = counted(len(cells) - own, "cell")
            said.append(f"{ran} ran as planned, each proved by parity, route and physics")
        if own:
            said.append(f"{counted(own, 'cell')} of the user's own steps, by what these declare")
        return f"{_too_noisy(cells)}MEASURED, exit 0: {'; '.join(said)}; speed not compared"
    return _green(cells, policy)


def _not_proved(cells: list[CellVerdict]) -> str:
    """What no headline may leave out: of the user's own steps, all that none of them declares."""
    lines = [cell.own for cell in cells if cell.own is not None and cell.own.not_proved]
    words = dict.fromkeys(word for line in lines for word in line.not_proved)
    return f"; not proved of {len(lines)} own steps: {', '.join(words)}" if lines else ""


def _too_noisy(cells: list[CellVerdict]) -> str:
    """What heads a run whose numbers cannot all be used, the worst by name; else nothing."""
    noisy = [cell for cell in cells if cell.is_too_noisy]
    if not noisy:
        return ""
    far = max(noisy, key=lambda cell: (cell.half_pct or 0.0, cell.cell_id))
    number_ = f"{number(far.cand_tok_per_s)} ± {far.half_pct:,.0f} % tok/s"
    count = f"{len(noisy)} of {len(cells)} cells"
    then = (
        "their wall time follows the host: capture the step, or read its device time"
        if all(cell.host_bound for cell in noisy)
        else "close what else runs here, or raise measure.processes"
    )
    return f"too noisy to use: {_name(far, cells)} {number_} ({count}); {then}: "


def _green(cells: list[CellVerdict], policy: GatePolicy) -> str:
    compared = sum(cell.compared for cell in cells)
    faster, new = (
        sum(cell.verdict is verdict for cell in cells) for verdict in (Verdict.FASTER, Verdict.NEW)
    )
    word = "FASTER" if faster else "SAME"
    extra = (f", {faster} faster" if faster else "") + (f", {new} NEW" if new else "")
    judged = (
        f"{word}, exit 0: {compared} of {len(cells)} cells compared, none slower by"
        f" {policy.min_effect_pct:g} % or more{extra}"
    )
    changed = [cell for cell in cells if cell.change]
    if not changed:
        return judged
    gained = [cell for cell in changed if cell.verdict is Verdict.FASTER]
    by_change = sorted(gained or changed, key=lambda cell: (cell.change_pct or 0.0, cell.cell_id))
    return f"{_named(by_change[-1 if gained else 0], cells)}: {judged}"


def _red(code: Exit, cells: list[CellVerdict], findings: list[Finding]) -> str:
    here = [f for f in findings if EXIT_OF[f.verdict] is code]
    verdicts = [verdict for verdict in Verdict if EXIT_OF[verdict] is code]
    if not here:
        return _of_cells(verdicts, f"exit {int(code)}", cells)
    names = " + ".join(_present(verdicts, [f.verdict for f in here] + [c.verdict for c in cells]))
    return f"{names}, exit {int(code)}: {here[0].reason}{_others(verdicts, cells)}"


def _of_cells(verdicts: Iterable[Verdict], exit_text: str, cells: list[CellVerdict]) -> str:
    verdicts = tuple(verdicts)
    found = [cell for cell in cells if cell.verdict in verdicts]
    names = " + ".join(_present(verdicts, [cell.verdict for cell in found]))
    judged = f"{names}, {exit_text}: {len(found)} of {len(cells)} cells"
    others = _others(verdicts, cells)
    if changed := [cell for cell in found if cell.change]:
        # The worst first: a hurried reader sees the largest drop.
        worst_ = min(
            changed,
            key=lambda cell: (
                verdicts.index(cell.verdict) if cell.verdict else 0,
                cell.change_pct or 0.0,
                cell.cell_id,
            ),
        )
        return f"{_named(worst_, cells)}: {judged}{_how(worst_)}{others}"
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    name = short_ids(one.axes for one in cells).get(found[0].cell_id, found[0].cell_id)
    return f"{judged}: {name}: {shorten(found[0].reason)}{more}{others}"


def _how(cell: CellVerdict) -> str:
    """How the change that heads the report was judged."""
    one = cell.evidence[0]
    if cell.verdict is Verdict.REGRESSED:
        p = "" if one.adjusted_p is None else f", adjusted p {one.adjusted_p:.2g}"
        return f", confirmed in turns{p}"
    if cell.verdict is Verdict.SUSPECT:
        return ", neither confirmed nor cleared" if one.paired else ", not confirmed"
    if cell.verdict is Verdict.BLIND:
        return ", too noisy to see a drop"
    if cell.verdict is Verdict.WATCH:
        return ", not settled by its pairs" if one.paired else ", not confirmed"
    return ""


def _named(cell: CellVerdict, cells: list[CellVerdict]) -> str:
    """'auto 512 forward -81.9 % (2,711 -> 491 tok/s), 11 pairs'; of a cell that is one of several
    with the axes in which they differ.
    """
    return f"{_name(cell, cells)} {cell.change}"


def _name(cell: CellVerdict, cells: list[CellVerdict]) -> str:
    kept = {"path", "seq_len", "workload", *varying_axes(one.axes for one in cells)}
    axes = cell.axes.to_mapping()
    shown = {key: value for key, value in axes.items() if value != NOT_APPLICABLE}
    return short_name({key: one for key, one in shown.items() if key in kept or len(cells) == 1})


def short_name(axes: Mapping[str, str | int]) -> str:
    """'auto 512 forward', then every other axis that is not at its default."""
    first = ("path", "seq_len", "workload")
    others = [
        f"{name}={value}"
        for name, value in axes.items()
        if name not in first
        and (name not in AXES or value not in (AXES[name].default, NOT_APPLICABLE))
    ]
    return " ".join([*(str(axes[name]) for name in first if name in axes), *others])


def _present(order: Iterable[Verdict], found: Iterable[Verdict | None]) -> list[str]:
    seen = set(found)
    return [verdict.value for verdict in order if verdict in seen]


def _others(named: Iterable[Verdict], cells: list[CellVerdict]) -> str:
    passing = {Verdict.SAME, Verdict.FASTER, *named}
    rest = Counter(
        cell.verdict for cell in cells if cell.verdict is not None and cell.verdict not in passing
    )
    order = sorted(rest, key=severity)
    return (
        "; also " + ", ".join(f"{rest[verdict]} {verdict.value}" for verdict in order)
        if order
        else ""
    )
