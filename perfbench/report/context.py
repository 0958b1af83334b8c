"""What a run is compared with in its report: the baseline or the base's own run, renamed cells,
kernel tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from perfbench.gate import comparability_key, sentinel_rates
from perfbench.matrix import Policies
from perfbench.records import BaselineProblem, Run

if TYPE_CHECKING:
    from perfbench.records import Baseline


@dataclass(frozen=True, slots=True)
class ReportContext:
    """Everything may be absent.

    ``base_run``: the other side of `compare` and `ab`; ``traces``: Markdown, of
    `diff.traces_markdown`.

    ``paired``: it was measured in turns with the run. ``renamed`` maps the id that the baseline
    knows to the cell's id of today. ``pairs``: both sides of each pair that confirmed the run.
    """

    baseline: Baseline | None = None
    base_run: Run | None = None
    policies: Policies | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    traces: str = ""
    paired: bool = False
    pairs: Sequence[Run] = ()

    @classmethod
    def of(
        cls,
        baseline: Baseline | BaselineProblem | None = None,
        policies: Policies | None = None,
        *,
        base_run: Run | None = None,
        paired: bool = False,
        traces: str = "",
        pairs: Sequence[Run] = (),
    ) -> ReportContext:
        """From what a command has at hand; a baseline that cannot judge stands for none."""
        known = None if isinstance(baseline, BaselineProblem) else baseline
        renamed = {}
        if known is not None and policies is not None:
            there, aliases = set(known.cells), policies.aliases.items()
            renamed = {
                old: alias.cell_id
                for old, alias in aliases
                if old in there and alias.cell_id not in there
            }
        return cls(known, base_run, policies, renamed, traces, paired, pairs)

    @property
    def name(self) -> str:
        """What the other side is called."""
        return "the baseline" if self.base_run is None else "the base"

    @property
    def comparability_key(self) -> Mapping[str, object] | None:
        """Fingerprint and method of the other side."""
        if self.base_run is not None:
            return comparability_key(self.base_run.manifest)
        return (
            None
            if self.baseline is None
            else {**self.baseline.environment, "method_version": self.baseline.method_version}
        )

    @property
    def sentinels(self) -> Mapping[str, list[float]]:
        """Rates of the other side's sentinels by block."""
        if self.base_run is not None:
            return sentinel_rates(self.base_run)
        return {} if self.baseline is None else self.baseline.sentinels
