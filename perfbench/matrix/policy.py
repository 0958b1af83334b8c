"""What the gate demands: the matrix's `gate:` section, its `overrides` and its `aliases`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field


class GatePolicy(BaseModel):
    """Percentages are of tok/s; a cell needs ``min_replicates`` on both sides, fewer are WATCH.

    ``min_effect_pct``: a change within it is proved to be none (SAME), or cannot be (BLIND).
    ``tolerance_pct``: a drop below it is never REGRESSED, however certain. ``alpha_screen`` is
    one-sided for each cell against the stored baseline,
    ``alpha_confirm`` for all confirmed cells together, which `ab` measures in
    ``confirm_pairs`` pairs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    metric: Literal["tok_per_s"] = "tok_per_s"
    min_effect_pct: float = Field(default=3.0, gt=0, lt=100)
    tolerance_pct: float = Field(default=1.0, gt=0, lt=100)
    alpha_screen: float = Field(default=0.02, gt=0, lt=0.5)
    alpha_confirm: float = Field(default=0.001, gt=0, lt=0.5)
    power: float = Field(default=0.99, gt=0.5, lt=1)
    confirm_pairs: int = Field(default=8, ge=4, multiple_of=4)
    sentinel_band_pct: float = Field(default=3.0, gt=0, lt=100)
    min_replicates: int = Field(default=3, ge=1)
    missing: Literal["fail", "warn"] = "fail"
    new: Literal["fail", "warn"] = "warn"


@dataclass(frozen=True, slots=True)
class Alias:
    """A renamed cell.

    Its id is part of its config's hash, so both hashes are those of the same work.
    """

    cell_id: str
    config_sha256: str
    former_config_sha256: str


@dataclass(frozen=True, slots=True)
class Policies:
    """The policy of every cell.

    ``aliases`` maps a cell's former id to what it is now, so that it keeps its baseline.
    ``finds_boundary``: a batch that does not fit, where a smaller one does, is no failure.
    """

    whole: GatePolicy
    by_cell: Mapping[str, GatePolicy] = field(default_factory=dict)  # those of an override
    aliases: Mapping[str, Alias] = field(default_factory=dict)
    finds_boundary: bool = False

    def of(self, cell_id: str) -> GatePolicy:
        return self.by_cell.get(cell_id, self.whole)

    @classmethod
    def over(cls, policy: GatePolicy | Self) -> Self:
        """``policy`` itself, or one GatePolicy for every cell."""
        return cls(policy) if isinstance(policy, GatePolicy) else policy
