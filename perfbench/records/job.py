"""What a measuring process receives: one cell, one replicate, nothing from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from perfbench.records.peers import Peer
from perfbench.records.rows import Expect, ParityLine, Replicate, RouteLine, Status, StoredCell
from perfbench.records.trained_blocks import TrainedBlocks

# What a sentinel's rate counts, by its name. Its work is in perfbench/worker/sentinels.py.
SENTINEL_UNITS: Mapping[str, str] = MappingProxyType(
    {"gemm": "FLOP", "copy": "byte", "sdpa_frozen": "FLOP", "all_reduce": "byte"}
)
OF_RANKS = frozenset({"all_reduce"})  # measured by as many ranks as the matrix has at most

MAX_WARMUP_S = 5.0


class MeasureOptions(BaseModel):
    """How long and how often to time; the matrix's `measure:` section.

    ``warmup_s`` lasts until the step time is stable, up to ``longest_warmup_s``.
    ``prepare_together`` processes prove and load at the same time; each is timed alone. ``samples``
    is a fixed number of samples instead of filling ``max_s``, the timed window of one replicate.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    warmup_s: float = Field(default=2.0, ge=0)
    min_sample_ms: float = Field(default=50.0, gt=0)
    processes: int = Field(default=5, ge=1)  # replicates of every cell
    prepare_together: int = Field(default=1, ge=1, le=64)
    max_s: float = Field(default=10.0, gt=0)
    samples: int | None = Field(default=None, ge=1)
    # Which replicates profile one step: host-bound cells are judged by it.
    profile: Literal["first", "every"] = "first"
    # Times that a throttled replicate is measured again.
    throttle_retries: int = Field(default=2, ge=0)

    @property
    def longest_warmup_s(self) -> float:
        """Where a warm-up ends although the step is not level yet."""
        return min(MAX_WARMUP_S, 4 * self.warmup_s)

    @property
    def shortest_warmup_s(self) -> float:
        """Where a warm-up ends whose step is level."""
        return min(self.warmup_s, self.longest_warmup_s)


class Injection(BaseModel):
    """A planted fault, for demonstrations: stored in the manifest, never promotable."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)
    kind: str  # slowdown | oom | hang | segv
    percent: float | None = None  # slowdown only
    cell_id: str


class Job(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        defer_build=True,
        populate_by_name=True,
        serialize_by_alias=True,
    )
    cell_id: str
    replicate: int
    axes: StoredCell
    config_sha256: str
    model: dict[str, Any]  # ModelConfig.to_mapping(), resolved
    measure: MeasureOptions
    timeout_s: float
    plan: RouteLine
    expect: Expect
    device: str  # 'cpu' or 'cuda'
    seed: int
    # of the cell's replicate 0, whose inputs at the timed length every replicate repeats; None:
    # ``seed``
    proof_seed: int | None = None
    profile: bool  # one untimed step under torch.profiler
    injection: Injection | None = None
    # Other processes that prepare at the same time, then wait while this one is timed.
    waiting_peers: int = Field(
        default=0, ge=0, validation_alias="company", serialization_alias="company"
    )
    # Of the same route, workload and dtype, made earlier in this run on this card.
    proof: ParityLine | None = None
    sentinel: str | None = None  # measure this frozen work in place of a cell
    # of selection=trained; its path is absolute
    trained_blocks: TrainedBlocks | None = None
    # of a user's own step: the folder in which its module is looked for first, absolute
    own_step_folder: str | None = None
    peer: Peer | None = None  # what serves a cell whose path is a peer
    # Time nothing, and write the profile of one step to this file (.json.gz).
    trace: str | None = None


def failed(
    job: Job, status: Status, reason: str, *, wall_s: float = 0.0, started_utc: str | None = None
) -> Replicate:
    """A replicate without a speed."""
    return Replicate(
        cell_id=job.cell_id,
        replicate=job.replicate,
        axes=job.axes,
        config_sha256=job.config_sha256,
        status=status,
        reason=reason,
        started_utc=started_utc or utc_now(),
        wall_s=wall_s,
        route=job.plan,
        waiting_peers=job.waiting_peers,
    )


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
