"""The rows of an interleaved base and candidate by cell, pair by pair, each side with its own hard
gates.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from perfbench.gate.cell_sides import CellSides, side_of_rows
from perfbench.gate.comparable import comparability_key, environment_differences
from perfbench.gate.coverage import are_adjacent, paired_rows, rows_by_cell
from perfbench.gate.hard_rules import ProofIndex, cell_findings
from perfbench.gate.judgement import Finding
from perfbench.matrix import Policies
from perfbench.records import ConfirmationPlan, PlannedCell, Replicate, Run, Verdict


@dataclass(frozen=True, slots=True)
class MeasuredPairs:
    """``cell_ids`` are judged by the pairs of these two runs: replicate r of both was measured one
    after the other.
    """

    base: Run
    candidate: Run
    cell_ids: Collection[str]

    @property
    def plan(self) -> ConfirmationPlan | None:
        """When its cells are looked at; None: once, after all pairs."""
        return self.base.manifest.confirmation


@dataclass(frozen=True, slots=True)
class NoPairs:
    """Why a cell has nothing to compare; ``verdict`` where the candidate's own rows are red.

    ``not_candidate``: the machine or the base is at fault.
    """

    reason: str
    verdict: Verdict | None = None
    more_may_help: bool = False
    not_candidate: bool = False


class PairRows:
    """What `MeasuredPairs` hold of each cell."""

    def __init__(self, measured: MeasuredPairs, policies: Policies) -> None:
        self._policies = policies
        self._runs = (measured.base, measured.candidate)
        self._changed = environment_differences(
            comparability_key(measured.candidate.manifest),
            comparability_key(measured.base.manifest),
        )
        self._planned = tuple(
            {cell.cell_id: cell for cell in run.manifest.cells} for run in self._runs
        )
        self._rows = tuple(rows_by_cell(run) for run in self._runs)
        self._proofs = tuple(ProofIndex.of(run) for run in self._runs)
        self.planned = min(run.manifest.replicates for run in self._runs)

    def of(self, cell_id: str, pairs: int | None = None) -> CellSides | NoPairs:
        """Both sides of a cell, from its first ``pairs`` pairs (all by default)."""
        if self._changed:
            return NoPairs(
                f"base and candidate were not measured alike (base -> candidate): {self._changed}",
                not_candidate=True,
            )
        base, candidate = (planned.get(cell_id) for planned in self._planned)
        base_rows, rows = (
            [row for row in found.get(cell_id, []) if pairs is None or row.replicate < pairs]
            for found in self._rows
        )
        if base is None or candidate is None:
            return NoPairs(f"the {'base' if base is None else 'candidate'} has no such cell")
        if hard := self._hard(1, candidate, rows):
            if hard.verdict is Verdict.MISSING:
                return NoPairs("the confirmation has no row of the candidate", more_may_help=True)
            return NoPairs(f"while confirming: {hard.reason}", hard.verdict)
        if hard := self._hard(0, base, base_rows):
            return NoPairs(
                f"the base gave no speed to compare with ({hard.verdict.value}: {hard.reason})",
                more_may_help=hard.verdict is Verdict.MISSING,
                not_candidate=True,
            )
        if base.config_sha256 != candidate.config_sha256:
            return NoPairs(
                f"another config in the base ({base.config_sha256[:12]}, here"
                f" {candidate.config_sha256[:12]})"
            )
        both = list(paired_rows(*self._runs, base_rows, rows).values())
        if not both:
            return NoPairs(
                f"no pair is left of {len(base_rows)} base and {len(rows)} candidate rows"
                " (throttled, or interrupted between?)",
                more_may_help=True,
            )
        left = side_of_rows(base, [theirs for theirs, _ in both])
        right = side_of_rows(candidate, [ours for _, ours in both])
        device, host = (
            [pair for pair in both if _time_s(pair[0], name) and _time_s(pair[1], name)]
            for name in ("device_time_s", "host_time_s")
        )
        left, right = (
            replace(
                side,
                device_time_s=tuple(_time_s(pair[place], "device_time_s") for pair in device),
                host_time_s=tuple(_time_s(pair[place], "host_time_s") for pair in host),
            )
            for place, side in enumerate((left, right))
        )
        return CellSides(cell_id, self._policies.of(cell_id), left, right)

    def count(self, cell_id: str, pairs: int) -> int:
        """How many of a cell's first ``pairs`` pairs were measured, throttled or not, with no
        interruption between their rows.

        A run file does not distinguish Ctrl-C from a budget that ended.
        """
        # the last one counts
        theirs, ours = (
            {row.replicate: row for row in found.get(cell_id, [])} for found in self._rows
        )
        resumed = [one.resumed_utc for run in self._runs for one in run.resumed]
        both = set(theirs) & set(ours) & set(range(pairs))
        return sum(are_adjacent(theirs[number], ours[number], resumed) for number in both)

    def cut_short(self, cell_id: str, pairs: int) -> str:
        """'3 of 6 planned pairs' where the others were never measured, or were interrupted
        between; empty where all were.
        """
        measured = self.count(cell_id, pairs)
        return f"{measured} of {pairs} planned pairs" if measured < pairs else ""

    def _hard(self, side: int, planned: PlannedCell, rows: list[Replicate]) -> Finding | None:
        found = cell_findings(planned, rows, None, self._proofs[side])
        return found[0] if found else None


def _time_s(row: Replicate, name: str) -> float:
    """One of the profile's times; 0 where it has none."""
    return 0.0 if row.profile is None else getattr(row.profile, name) or 0.0
