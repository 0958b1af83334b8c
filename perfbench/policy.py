"""What the gate demands: the matrix's `gate:` section."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class GatePolicy(BaseModel):
    """Percentages are of tok/s; a cell needs ``min_replicates`` on both sides, fewer are WATCH."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    metric: Literal["tok_per_s"] = "tok_per_s"
    tolerance_pct: float = Field(default=3.0, gt=0, lt=100)
    min_replicates: int = Field(default=3, ge=1)
    missing: Literal["fail", "warn"] = "fail"
    new: Literal["fail", "warn"] = "warn"
