"""What a run cost, what that bought, and what the next one like it will cost.

A card is occupied from the start of a session to the end of its last process. What processes did
alone (warm-up, timing, witness) is theirs; what they did next to each other (imports, proofs, first
steps) is divided by how long each took, so that the minutes of the cells are those of the card.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from perfbench.gate import Judgement
from perfbench.records import Replicate, Run, Status, Verdict
from perfbench.report.tables import without_empty
from perfbench.report.workloads import Table
from perfbench.text import NULL, cell_code, fixed, shorten

TITLE = "Costs"
ALONE = ("warmup", "timing", "witness")
PARTS = ("setup", "proof", *ALONE)
MAX_CELLS = 12  # lines; the others are one
SETTLED = (Verdict.SAME, Verdict.FASTER, Verdict.REGRESSED)
# Runs of reports/ and tests/data against the one before them, of the same cells: median and worst
# of 8 (tests/perfbench/test_cost.py).
USUAL_ERROR_PCT, WORST_ERROR_PCT = 10.0, 31.0


def shown(run: Run, pairs: Sequence[Run]) -> str:
    """'12.3 minutes of processes, 4.1 of them timed samples (33 %)'; ``pairs``: the runs of a
    confirmation, whose part is said.

    A process's time goes from its start to its last row: import, proofs, warm-up, samples.
    """
    text = _minutes([run, *pairs])
    return f"{text}; of the confirmation's pairs {_minutes(pairs)}" if pairs else text


@dataclass(frozen=True, slots=True)
class CellCost:
    """Seconds of a card; ``parts`` by PARTS, `other` what older rows do not divide. ``pairs_s`` of
    its confirmation.
    """

    cell_id: str
    parts: Mapping[str, float]
    pairs_s: float = 0.0

    @property
    def seconds(self) -> float:
        return math.fsum(self.parts.values()) + self.pairs_s


def parts_of(row: Replicate) -> dict[str, float]:
    """Seconds of one process by what they were for; of an older row what it knows."""
    found = dict(row.phases_s)
    if not found:
        proofs = [one.seconds for one in (row.step_proof, row.length_proof) if one is not None]
        found = {"proof": math.fsum(proofs), "timing": math.fsum(row.samples_s)}
    left = row.wall_s - math.fsum(found.values())
    return {**found, "other": max(left, 0.0)}


def cell_costs(run: Run, pairs: Sequence[Run] = ()) -> list[CellCost]:
    """The most expensive first; what the card spent between processes is no cell's."""
    of_pairs: dict[str, float] = {}
    for side in pairs:
        for row in side.replicates:
            of_pairs[row.cell_id] = of_pairs.get(row.cell_id, 0.0) + row.wall_s
    share = _share(run)
    parts: dict[str, dict[str, float]] = {}
    for row in run.replicates:
        mine = parts.setdefault(row.cell_id, {})
        for name, seconds in parts_of(row).items():
            mine[name] = mine.get(name, 0.0) + seconds * (1.0 if name in ALONE else share)
    found = [
        CellCost(cell_id, parts.get(cell_id, {}), of_pairs.get(cell_id, 0.0))
        for cell_id in {**parts, **of_pairs}
    ]
    return sorted(found, key=lambda one: (-one.seconds, one.cell_id))


def occupied_s(run: Run) -> float:
    """How long the run had its cards, without the pauses between its sessions."""
    return math.fsum(max(end - begin, 0.0) for begin, end in _sessions(run))


def next_run_s(run: Run) -> float:
    """What the same cells and replicates will occupy: the time of this run, and where it is not
    complete its cells' own mean for each replicate that is missing.
    """
    planned = run.manifest.replicates
    spent = {one.cell_id: one.seconds for one in cell_costs(run)}
    missing = 0.0
    for cell_id, seconds in spent.items():
        rows = run.of_cell(cell_id)
        count = len({row.replicate for row in rows})
        if all(row.status is Status.OK for row in rows) and count < planned:
            missing += (planned - count) * seconds / count
    return occupied_s(run) + missing


def table(run: Run, judgement: Judgement, pairs: Sequence[Run]) -> Table | None:
    """GPU minutes by cell, and a sentence on what they bought; None where nothing was measured."""
    costs = cell_costs(run, pairs)
    if not costs:
        return None
    verdicts = {cell.cell_id: cell for cell in judgement.cells}
    names = [name for name in (*PARTS, "other") if any(one.parts.get(name) for one in costs)]
    lines = []
    for one in costs[:MAX_CELLS]:
        cell = verdicts.get(one.cell_id)
        verdict = "MEASURED" if cell is None or cell.verdict is None else cell.verdict.value
        width = None if cell is None else cell.mde_pct if cell.compared else cell.half_pct
        known = NULL if width is None else f"{width:.1f} %"
        lines.append([verdict, cell_code(one.cell_id), *_line([one], names), known])
    if rest := costs[MAX_CELLS:]:
        lines.append(["", f"{len(rest)} more cells", *_line(rest, names), NULL])
    note = " ".join(
        filter(None, (_spent(run, costs), _bought(judgement, costs), _next(run, costs)))
    )
    head = ["verdict", "cell", "minutes", *names, "pairs", "MDE, or ±"]
    head, lines = without_empty(head, lines, left=2)
    return Table(TITLE, head, lines, note, left=2)


def _line(costs: Sequence[CellCost], names: Sequence[str]) -> list[str]:
    parts = [math.fsum(one.parts.get(name, 0.0) for one in costs) for name in names]
    seconds = [math.fsum(one.seconds for one in costs), *parts]
    seconds.append(math.fsum(one.pairs_s for one in costs))
    return [fixed(one / 60, 2) for one in seconds]


def _spent(run: Run, costs: Sequence[CellCost]) -> str:
    device = "CPU" if run.manifest.environment.gpu_slug == "cpu" else "GPU"
    cells = math.fsum(one.seconds - one.pairs_s for one in costs)
    pairs = math.fsum(one.pairs_s for one in costs)
    between = max(occupied_s(run) - cells, 0.0)
    return (
        f"{(cells + between + pairs) / 60:.1f} {device} minutes: {cells / 60:.1f} of the cells'"
        f" processes, {between / 60:.1f} of sentinels and the starts of servers,"
        f" {pairs / 60:.1f} of pairs. What prepares side by side is divided among its cells."
    )


def _bought(judgement: Judgement, costs: Sequence[CellCost]) -> str:
    judged = [cell for cell in judgement.cells if cell.verdict is not None]
    if judgement.baseline is None or not judged:
        return ""
    spent = math.fsum(one.seconds for one in costs) / 60
    settled = [cell for cell in judged if cell.verdict in SETTLED]
    text = f"They settled {len(settled)} of {len(judged)} verdicts"
    if settled:
        text += f", {spent / len(settled):.2f} minutes each"
    left = [cell for cell in judged if cell.verdict not in SETTLED]
    names = ", ".join(shorten(f"{cell.cell_id} {cell.verdict}", 80) for cell in left[:3])
    more = f" and {len(left) - 3} more" if len(left) > 3 else ""
    return f"{text}{f'; not {names}{more}' if left else ''}."


def _next(run: Run, costs: Sequence[CellCost]) -> str:
    pairs = math.fsum(one.pairs_s for one in costs)
    again = f", and {pairs / 60:.1f} for as many pairs" if pairs else ""
    return (
        f"The next run of these cells: about {next_run_s(run) / 60:.1f} minutes{again}; of the"
        f" stored runs one differed from the one before by {USUAL_ERROR_PCT:g} % in the median,"
        f" {WORST_ERROR_PCT:g} % at most."
    )


def _minutes(runs: Sequence[Run]) -> str:
    rows = [row for run in runs for row in run.replicates]
    spent = math.fsum(row.wall_s for row in rows) / 60
    timed = math.fsum(second for row in rows for second in row.samples_s) / 60
    share = f" ({100 * timed / spent:.0f} %)" if spent > 0 else ""
    return f"{spent:.1f} minutes of processes, {timed:.1f} of them timed samples{share}"


def _share(run: Run) -> float:
    """Of a second that a process prepares, how much of the card's is its own: below 1 where several
    prepare side by side.
    """
    every = [parts_of(row) for row in run.replicates]
    alone = math.fsum(parts.get(name, 0.0) for parts in every for name in ALONE)
    together = math.fsum(
        seconds for parts in every for name, seconds in parts.items() if name not in ALONE
    )
    return min(1.0, max(occupied_s(run) - alone, 0.0) / together) if together > 0 else 1.0


def _sessions(run: Run) -> Iterable[tuple[float, float]]:
    """(begin, end) of each session on each card, in seconds since the epoch."""
    began = [_moment(run.manifest.created_utc)]
    began += [_moment(one.resumed_utc) for one in run.resumed if not one.moved]
    ends: dict[tuple[int, str | None], float] = {}
    card = (lambda row: row.card) if run.manifest.cards else (lambda row: None)
    for row in run.replicates:
        begin = _moment(row.started_utc)
        session = max(sum(start <= begin for start in began), 1) - 1
        key = (session, card(row))
        ends[key] = max(ends.get(key, 0.0), begin + row.wall_s)
    return [(began[session], end) for (session, _), end in ends.items()]


def _moment(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
