"""A calibration: the noise of each cell on one machine, what the rule made of real A/A runs, and
the certificate; and as the JSON file that `baseline promote` reads.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from perfbench.calibration.aa_pairs import RealPair
from perfbench.calibration.aa_runs import StartCount
from perfbench.calibration.between_starts import StartVariance
from perfbench.calibration.certify import Certificate, Rate
from perfbench.matrix import GatePolicy
from perfbench.records import AXES, Cell

# Field -> its name in calibration.json, where it is older than the field's.
STORED_NAMES = {
    "between_starts": "night",
    "device_between_starts": "device_night",
    "between_start_sd_pct": "night_sd_pct",
    "session_shared_pct": "night_shared_pct",
    "session_own_pct": "night_own_pct",
    "session_state_pct": "night_state_pct",
    "assumed_session_pct": "assumed_night_pct",
}


@dataclass(frozen=True, slots=True)
class CellNoise:
    """One cell on this machine; sd of ln speed in per cent (in ``between_starts`` and
    ``device_between_starts`` as they are), null where unknown.

    ``config_sha256``: of the work that was measured. ``within_sd_pct``: between processes of one
    start, ``within_df`` its degrees of freedom; ``moderated_sd_pct``: shrunk to the cells that are
    bound like it. ``between_starts`` and ``device_between_starts``: tok/s and device time,
    from two starts on. ``blocks``: pairs that confirm min_effect with the policy's power; null:
    BLIND.
    ``judged_drop_pct``: the smallest drop that `stats.MAX_PAIRS` pairs confirm, min_effect where
    the cell is not BLIND.
    ``tolerance_pct`` grows like it; a matrix takes both by the overrides that the report prints.
    """

    cell_id: str
    config_sha256: str
    axes: Cell
    host_bound: bool | None
    starts: int
    replicates: int
    within_sd_pct: float | None
    within_df: int
    moderated_sd_pct: float | None
    between_starts: StartVariance | None
    device_sd_pct: float | None
    device_between_starts: StartVariance | None
    blocks: int | None
    judged_drop_pct: float | None
    tolerance_pct: float


@dataclass(frozen=True, slots=True)
class Calibration:
    """``screened`` and ``red``: what the rule made of real A/A pairs of starts, and of pairs of
    processes within starts.

    ``most_replicates``: the most that one cell has in one start. ``pairs``: what it made of
    interleaved pairs of one commit with itself, ``pairs_red`` of those with nothing planted.
    """

    runs: list[str]
    commit: str | None
    gpu_slug: str
    gpu_name: str  # of the processor where there is no GPU
    environment: dict[str, str | None]  # its fingerprint, the same for all runs
    starts: list[StartCount]
    most_replicates: int
    seed: int
    policy: GatePolicy
    cells: list[CellNoise]
    # pooled over the cells that are bound alike: 'GPU bound', 'host bound'
    between_start_sd_pct: dict[str, float | None]
    screened: Rate
    significant: Rate
    red: Rate
    pairs: list[RealPair]
    pairs_red: Rate
    certificate: Certificate


def calibration_json(calibration: Calibration) -> str:
    """The text of calibration.json, a line for each field; bounds and shares next to the counts."""
    lines = (
        f"{json.dumps(name)}:{json.dumps(value, separators=(',', ':'), allow_nan=False)}"
        for name, value in _plain(calibration).items()
    )
    return "{" + ",\n".join(lines) + "}\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Rate):
        share = value.share if value.trials else None
        return {
            "hits": value.hits,
            "trials": value.trials,
            "share": share,
            "lower": value.lower,
            "upper": value.upper,
        }
    if isinstance(value, Cell):
        return {name: value.value(name) for name in AXES}
    if isinstance(value, GatePolicy):
        return value.model_dump()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            STORED_NAMES.get(field.name, field.name): _plain(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value
