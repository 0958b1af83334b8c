"""What a measuring process is told: one cell, one replicate, nothing from the environment."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from perfbench.records.rows import Expect, ParityLine, Replicate, RouteLine, Status, StoredCell

# What a sentinel's rate counts, by its name. Its work is in perfbench/sentinels.py.
SENTINEL_UNITS: Mapping[str, str] = MappingProxyType(
    {"gemm": "FLOP", "copy": "byte", "sdpa_frozen": "FLOP"}
)


class MeasureOptions(BaseModel):
    """How long and how often to time; the matrix's `measure:` section."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    warmup_s: float = Field(
        default=2.0, ge=0
    )  # goes on until steady, at most 4 times as long and 5 s
    min_sample_ms: float = Field(default=50.0, gt=0)
    processes: int = Field(default=5, ge=1)  # replicates of every cell
    prepare_together: int = Field(
        default=1, ge=1, le=64
    )  # processes that prove and load side by side; each is timed alone
    max_s: float = Field(default=10.0, gt=0)  # timed window of one replicate
    samples: int | None = Field(
        default=None, ge=1
    )  # a fixed number of samples instead of filling max_s
    profile: Literal["first", "every"] = (
        "first"  # which replicates profile one step: host-bound cells are judged by it
    )
    throttle_retries: int = Field(
        default=2, ge=0
    )  # times that a throttled replicate is measured again


class Injection(BaseModel):
    """A planted fault, for demonstrations: stored in the manifest, never promotable."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: str  # slowdown | oom | hang | segv
    percent: float | None = None  # slowdown only
    cell_id: str


class Job(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
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
    profile: bool  # one untimed step under torch.profiler
    injection: Injection | None = None
    company: int = Field(
        default=0, ge=0
    )  # other processes that prepare beside this one, then wait while it is timed
    proof: ParityLine | None = (
        None  # of the same route, workload and dtype, made earlier in this run on this card
    )
    sentinel: str | None = None  # measure this frozen work in place of a cell
    trace: str | None = (
        None  # time nothing, and write the profile of one step to this file (.json.gz)
    )


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
        company=job.company,
    )


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
