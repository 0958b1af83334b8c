"""Why the driver lowered a clock: NVML's clock event reasons by name, and those that throttle."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

REASON_BITS: Mapping[int, str] = MappingProxyType(
    {
        0x001: "gpu_idle",
        0x002: "applications_clocks_setting",
        0x004: "sw_power_cap",
        0x008: "hw_slowdown",
        0x010: "sync_boost",
        0x020: "sw_thermal_slowdown",
        0x040: "hw_thermal_slowdown",
        0x080: "hw_power_brake_slowdown",
        0x100: "display_clock_setting",
    }
)


THROTTLING = frozenset(
    {"hw_slowdown", "hw_thermal_slowdown", "sw_thermal_slowdown", "hw_power_brake_slowdown"}
)


def reason_names(bits: int) -> list[str]:
    names = [name for bit, name in REASON_BITS.items() if bits & bit]
    unknown = bits & ~sum(REASON_BITS)
    return [*names, f"unknown_{unknown:#x}"] if unknown else names
