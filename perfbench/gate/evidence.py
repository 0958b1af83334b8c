"""One comparison of two sides with every number that it rests on: what verdicts, reports and
`explain` print.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from perfbench.gate.stats import Prior, SpeedChange

WALL, DEVICE, HOST = "tok_per_s", "device_time_s", "host_time_s"
SPEED_WORDS = {WALL: "", DEVICE: "device speed ", HOST: "host speed "}


def pct(ln_ratio: float) -> float | None:
    """The change in per cent that a difference of logarithms is; null where nothing bounds it."""
    if not math.isfinite(ln_ratio) or ln_ratio > 50:
        return None
    # exactly the tolerance is not beyond it, and no negative zero
    return round(100 * math.expm1(ln_ratio), 9) + 0.0


@dataclass(frozen=True, slots=True)
class Evidence:
    """``comparison`` of ln speed.

    Device and host time count as speed, 1 / seconds, so below zero is slower in each metric.

    ``sd`` is of ln speed as sampled, with ``sd_df`` degrees of freedom: within the sides, or of the
    differences where
    ``paired``; ``moderated_sd`` after shrinking to the family, whose variance is ``prior``.
    ``between_session_sd`` is between sessions; verdict.json calls it
    ``night_sd``.
    ``alpha`` is that of the bounds.
    """

    metric: str
    paired: bool
    comparison: SpeedChange
    alpha: float
    tolerance_pct: float
    sd: float
    sd_df: float
    prior: Prior | None
    moderated_sd: float
    moderated_df: float
    between_session_sd: float
    base: tuple[float, ...]
    candidate: tuple[float, ...]
    adjusted_p: float | None = None

    @property
    def change_pct(self) -> float | None:
        return pct(self.comparison.estimate)

    @property
    def lower_pct(self) -> float | None:
        return pct(self.comparison.lower)

    @property
    def upper_pct(self) -> float | None:
        return pct(self.comparison.upper)

    @property
    def mde_pct(self) -> float | None:
        """The smallest drop, positive, that this comparison would find; null where it finds
        none.
        """
        drop = pct(-self.comparison.mde)
        return None if drop is None else -drop

    @property
    def is_beyond_tolerance(self) -> bool:
        """Whether the estimate is a drop by more than the tolerance."""
        return self.change_pct is not None and self.change_pct < -self.tolerance_pct

    @property
    def is_gain_beyond_tolerance(self) -> bool:
        """Whether a gain by more than the tolerance is proved at this alpha."""
        return self.lower_pct is not None and self.lower_pct > self.tolerance_pct

    def refutes(self, drop_pct: float) -> bool:
        """Whether a drop of as much, or of what this metric tolerates, is refuted at this alpha."""
        return self.comparison.lower > math.log1p(-max(drop_pct, self.tolerance_pct) / 100)

    def looks_slower(self, alpha: float) -> bool:
        """Whether the estimate is a drop beyond the tolerance, and chance that in less than
        ``alpha`` of the cases.
        """
        return self.is_beyond_tolerance and self.comparison.p_slower < alpha

    @property
    def t(self) -> float | None:
        error = self.comparison.standard_error
        return self.comparison.estimate / error if math.isfinite(error) and error > 0 else None

    def __str__(self) -> str:
        c, what = self.comparison, SPEED_WORDS[self.metric]
        if not math.isfinite(c.standard_error):
            return (
                f"{what}{self.change_pct:+.2f} %, with nothing to estimate its noise from"
                f" (n {c.n_base} and {c.n_candidate})"
            )
        count = f"{c.n_base} pairs" if self.paired else f"n {c.n_base} and {c.n_candidate}"
        p = f"p {c.p_slower:.2g}" + (
            f", adjusted {self.adjusted_p:.2g}" if self.adjusted_p is not None else ""
        )
        mde = "none" if self.mde_pct is None else f"{self.mde_pct:.2f} %"
        return (
            f"{what}{self.change_pct:+.2f} % (bounds {shown(self.lower_pct)} and"
            f" {shown(self.upper_pct)}; {p}; MDE {mde}; {count})"
        )

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; what is infinite is null."""
        numbers = {name: _finite(value) for name, value in asdict(self.comparison).items()}
        own = {
            "metric": self.metric,
            "paired": self.paired,
            "alpha": self.alpha,
            "adjusted_p": self.adjusted_p,
        }
        own |= {
            "change_pct": self.change_pct,
            "lower_pct": self.lower_pct,
            "upper_pct": self.upper_pct,
            "mde_pct": self.mde_pct,
        }
        own |= {
            "tolerance_pct": self.tolerance_pct,
            "sd": self.sd,
            "moderated_sd": self.moderated_sd,
            "night_sd": _finite(self.between_session_sd),
        }
        return {**own, "ln": numbers}


def shown(value: float | None) -> str:
    """A signed per cent, or a dash."""
    return "-" if value is None else f"{value:+.2f} %"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
