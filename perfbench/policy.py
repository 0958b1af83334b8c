"""What the gate demands: the matrix's `gate:` section."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class GatePolicy(BaseModel):
    """Percentages are of tok/s; a cell needs ``min_replicates`` on both sides, fewer are WATCH.

    ``min_effect_pct``: a change within it is proved to be none (SAME), or cannot be (BLIND). ``tolerance_pct``: a drop below
    it is never REGRESSED, however certain. ``alpha_screen`` is one-sided for each cell against the stored baseline,
    ``alpha_confirm`` for the family of the confirmed cells (Holm), which are measured in ``confirm_blocks`` pairs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    metric: Literal["tok_per_s"] = "tok_per_s"
    min_effect_pct: float = Field(default=3.0, gt=0, lt=100)
    tolerance_pct: float = Field(default=1.0, gt=0, lt=100)
    alpha_screen: float = Field(default=0.02, gt=0, lt=0.5)
    alpha_confirm: float = Field(default=0.001, gt=0, lt=0.5)
    power: float = Field(default=0.99, gt=0.5, lt=1)
    confirm_blocks: int = Field(default=8, ge=2)
    sentinel_band_pct: float = Field(default=3.0, gt=0, lt=100)
    min_replicates: int = Field(default=3, ge=1)
    missing: Literal["fail", "warn"] = "fail"
    new: Literal["fail", "warn"] = "warn"
