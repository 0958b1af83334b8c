"""What one replicate measured, by name: the numbers that tables of runs and a history share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from perfbench.records.rows import Replicate


def _step_ms(row: Replicate) -> float | None:
    if row.tok_per_s is None or not row.tokens_per_step:
        return None
    return 1e3 * row.tokens_per_step / row.tok_per_s


def _device_ms(row: Replicate) -> float | None:
    if row.profile is None or row.profile.device_time_s <= 0:
        return None
    return 1e3 * row.profile.device_time_s


def _host_ms(row: Replicate) -> float | None:
    if row.profile is None or row.profile.host_time_s is None:
        return None
    return 1e3 * row.profile.host_time_s


def _launches(row: Replicate) -> int | None:
    return None if row.profile is None else row.profile.kernel_count or None


def _host_syncs(row: Replicate) -> int | None:
    if row.profile is None or row.profile.device_time_s <= 0:
        return None
    return row.profile.host_syncs


def _of_telemetry(row: Replicate, name: str) -> float | None:
    found: float | None = None if row.telemetry is None else getattr(row.telemetry, name)
    return found


# A CPU's profile has no time on a device, no kernel and nothing to wait for: null.
MEASURED: Mapping[str, Callable[[Replicate], float | None]] = MappingProxyType(
    {
        "tok_per_s": lambda row: row.tok_per_s,
        "step_ms": _step_ms,
        "device_ms": _device_ms,
        "host_ms": _host_ms,
        "launches": _launches,
        "host_syncs": _host_syncs,
        "peak_memory_bytes": lambda row: row.peak_memory_bytes,
        "cold_start_s": lambda row: row.cold_start_s,
        "wall_s": lambda row: row.wall_s,
        "energy_j_per_token": lambda row: row.energy_j_per_token,
        "floor_fraction": lambda row: None if row.physics is None else row.physics.floor_fraction,
        "utilisation_pct": lambda row: _of_telemetry(row, "utilisation_pct"),
        "sm_clock_mhz": lambda row: _of_telemetry(row, "sm_clock_mhz"),
    }
)
