"""What the ranks of a row showed, and the telemetry that a row of one process has as well."""

from __future__ import annotations

from pydantic import BaseModel

from perfbench.records.line_settings import LINE_SETTINGS


class Telemetry(BaseModel):
    """NVML during the timed window; every null has its reason in ``absent``."""

    model_config = LINE_SETTINGS
    utilisation_pct: float | None = None
    memory_utilisation_pct: float | None = None
    sm_clock_mhz: float | None = None
    memory_clock_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    memory_used_bytes: int | None = None
    energy_j: float | None = None
    clock_event_reasons: list[str] = []  # e.g. 'sw_power_cap', 'hw_thermal_slowdown'
    throttled: bool | None = None  # thermal or hardware slowdown while timing
    num_samples: int = 0
    window_s: float = 0.0
    sampler_cost_pct: float | None = None  # thread CPU time over wall time
    # that CPU time by value asked for; energy_j is read outside the window
    sampler_query_s: dict[str, float] = {}
    absent: dict[str, str] = {}


class RankLine(BaseModel):
    """What one rank of a step on several ranks showed; of an untimed one the numbers are empty."""

    model_config = LINE_SETTINGS
    rank: int
    samples_s: list[float] = []  # by its own clock; the row's are the largest of all ranks
    engaged: dict[str, int] = {}  # while timing
    route: list[str] = []  # its counters
    telemetry: Telemetry | None = None
    peak_memory_bytes: int | None = None  # null on a CPU
    device_uuid_sha256: str | None = None


class RanksLine(BaseModel):
    """Of a cell with world_size > 1: its ranks, and what their communication costs.

    ``unsynchronised_step_s``: median seconds of the same step, slowest rank, without collectives,
    after the timed samples of the same processes: gradients stay where they are, under fsdp weights
    are those gathered before. ``exposed_s``: the timed step's seconds above those; below 0 it is
    noise, or the step without collectives has work of its own where the host sets the pace.
    """

    model_config = LINE_SETTINGS
    parallel: str
    backend: str  # nccl | gloo
    ranks: list[RankLine]
    unsynchronised_step_s: float | None = None
    exposed_s: float | None = None
    absent: dict[str, str] = {}  # why a value is null
