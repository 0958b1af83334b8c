"""What the doctor asks of the driver: NVML, the GPU that CUDA will see, and the state that it is
in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from perfbench.machine import gpu, nvml
from perfbench.machine.clock_events import THROTTLING, reason_names
from perfbench.machine.doctor.findings import DoctorLine, Level
from perfbench.machine.gpu import GpuHandle

ABSENT = (
    9,
    12,
    # no driver at all: a machine without a GPU, which is no fault; a driver that cannot be asked is
    # one
)
_UNCORRECTED, _VOLATILE = 1, 0  # NVML's enums: errors since the driver was loaded
_STATE = (
    "MIG",
    "other processes",
    "persistence mode",
    "clocks",
    "clock events",
    "ECC",
    "power limit",
)
_LEAST_LIMIT = 0.99  # of the default power limit


@dataclass(frozen=True, slots=True)
class Sight:
    """What NVML answered: the GPUs that CUDA will see under ``listed`` and ``order``, or why there
    is none.
    """

    source: str  # 'CUDA_VISIBLE_DEVICES', or what stands in for it
    listed: str | None
    order: str | None
    visible: list[GpuHandle]
    reason: str
    unavailable: nvml.NvmlUnavailable | None = None
    driver: str = ""
    no_driver: str = ""  # NVML's name for why the version is not known
    driver_cuda: tuple[int, int] | None = None  # the newest CUDA that the driver serves
    count: int | None = None  # GPUs that NVML counts, visible or not

    @property
    def gpu(self) -> GpuHandle | None:
        return self.visible[0] if self.visible else None


def look(source: str, listed: str | None, order: str | None, module: Any | None = None) -> Sight:
    """Ask NVML once for everything that other lines depend on."""
    visible, reason = gpu.visible(listed, order, module)
    try:
        with nvml.nvml_session(module) as opened:
            driver, no_driver = nvml.nvml_query(opened, "nvmlSystemGetDriverVersion")
            newest, _ = nvml.nvml_query(opened, "nvmlSystemGetCudaDriverVersion")
            count, _ = nvml.nvml_query(opened, "nvmlDeviceGetCount")
    except nvml.NvmlUnavailable as error:
        return Sight(source, listed, order, visible, reason, unavailable=error)
    cuda = (newest // 1000, newest % 1000 // 10) if newest else None
    return Sight(
        source,
        listed,
        order,
        visible,
        reason,
        None,
        nvml.text(driver or ""),
        no_driver,
        cuda,
        count,
    )


def lines(sight: Sight, module: Any | None = None) -> Iterator[DoctorLine]:
    """NVML, driver, GPU, CUDA_VISIBLE_DEVICES, then the state of the first visible GPU, if any."""
    yield from _nvml_lines(sight)
    yield _gpu_line(sight)
    yield _visible_line(sight)
    if sight.gpu is None:
        return
    try:
        with nvml.nvml_session(module) as opened:
            handle, missing = nvml.nvml_query(opened, "nvmlDeviceGetHandleByUUID", sight.gpu.uuid)
            found = [] if missing else list(_state_lines(sight.gpu, opened, handle, module))
    except nvml.NvmlUnavailable as error:  # it answered a moment ago
        missing, found = str(error), []
    yield from found or (DoctorLine(Level.INFO, what, missing) for what in _STATE)


def _nvml_lines(sight: Sight) -> Iterator[DoctorLine]:
    error = sight.unavailable
    if error is not None:
        level = Level.INFO if error.code in ABSENT else Level.BAD
        code = f" (code {error.code})" if error.code is not None else ""
        yield DoctorLine(level, "NVML", f"{error.name}{code}: {error.meaning}", error.advice)
        yield DoctorLine(level, "driver", "not known", "see NVML above")
        return
    yield DoctorLine(Level.GOOD, "NVML", "answers")
    if sight.no_driver:
        yield DoctorLine(
            Level.BAD,
            "driver",
            sight.no_driver,
            "the driver does not report its version: reinstall it",
        )
        return
    cuda = (
        f", CUDA up to {sight.driver_cuda[0]}.{sight.driver_cuda[1]}" if sight.driver_cuda else ""
    )
    yield DoctorLine(Level.GOOD, "driver", f"{sight.driver}{cuda}")


def _gpu_line(sight: Sight) -> DoctorLine:
    found = sight.gpu
    if found is None:
        why = "" if sight.unavailable else f": {sight.reason}"
        return DoctorLine(
            Level.INFO, "GPU", f"none{why}", "only matrices with `gpu: none` can run here"
        )
    others = f", first of {len(sight.visible)} visible" if len(sight.visible) > 1 else ""
    where = f"NVML index {found.index}, UUID {found.uuid[:12]}..."
    return DoctorLine(
        Level.GOOD, "GPU", f"{found.name} ({where}{others}), reports/baselines/{found.slug}"
    )


def _visible_line(sight: Sight) -> DoctorLine:
    """Every way in which CUDA reads less out of the variable than somebody wrote into it."""
    what, listed = sight.source, sight.listed
    order = sight.order or "FASTEST_FIRST (default)"
    value = f"{'unset: every GPU' if listed is None else repr(listed)}, order {order}"
    if listed is not None and (not listed.strip() or listed.strip().startswith("-")):
        meant = (
            f"it hides every GPU{f' of {sight.count}' if sight.count else ''}: unset it, unless a"
            " CPU is meant to be measured"
        )
        return DoctorLine(Level.WARN if sight.count else Level.INFO, what, value, meant)
    if sight.unavailable or not sight.count:
        return DoctorLine(Level.INFO, what, f"{value}; there is no GPU to compare it with")
    if not sight.visible:
        return DoctorLine(Level.BAD, what, value, sight.reason)
    named = 0 if listed is None else len(listed.split(","))
    if named > len(sight.visible):
        advice = (
            f"CUDA stops at the first entry that it does not know, and shows {len(sight.visible)}"
            f" of the {named} named"
        )
        return DoctorLine(Level.WARN, what, value, f"{advice}; `nvidia-smi -L` lists what there is")
    return DoctorLine(Level.GOOD, what, value)


def _state_lines(
    found: GpuHandle, opened: Any, handle: Any, module: Any | None
) -> Iterator[DoctorLine]:
    yield _mig_line(found, opened, handle)
    yield _company_line(found, module)
    yield _persistence_line(opened, handle)
    yield from _clock_lines(opened, handle)
    yield _ecc_line(opened, handle)
    yield _power_line(opened, handle)


def _mig_line(found: GpuHandle, opened: Any, handle: Any) -> DoctorLine:
    if found.uuid.startswith("MIG-"):
        advice = (
            "NVML gives no utilisation, and clocks and power are the whole card's: compare such"
            " numbers with the same slice only"
        )
        return DoctorLine(Level.INFO, "MIG", "this is a slice of a card", advice)
    mode, missing = nvml.nvml_query(opened, "nvmlDeviceGetMigMode", handle)
    if missing:
        return DoctorLine(
            Level.INFO,
            "MIG",
            missing,
            "this card has no MIG" if missing == nvml.error_name(3) else "",
        )
    current, pending = mode
    if current:
        return DoctorLine(
            Level.BAD,
            "MIG",
            "on, without a slice",
            "CUDA can use no part of the card: `nvidia-smi mig -cgi`, or `nvidia-smi -mig 0`",
        )
    if pending:
        return DoctorLine(
            Level.WARN,
            "MIG",
            "off, and on after the next reset of the card",
            "`sudo nvidia-smi -mig 0` takes it back",
        )
    return DoctorLine(Level.GOOD, "MIG", "off")


def _company_line(found: GpuHandle, module: Any | None) -> DoctorLine:
    others, missing = gpu.busy_processes(found.uuid, module)
    if missing:
        return DoctorLine(
            Level.INFO,
            "other processes",
            missing,
            "other processes would go unseen: make sure that nothing else runs, or look outside the"
            " container",
        )
    if not others:
        return DoctorLine(Level.GOOD, "other processes", "none")
    advice = "a run refuses (8) while they compute on the GPU: wait for them or stop them"
    return DoctorLine(
        Level.BAD, "other processes", ", ".join(str(process) for process in others), advice
    )


def _persistence_line(opened: Any, handle: Any) -> DoctorLine:
    mode, missing = nvml.nvml_query(opened, "nvmlDeviceGetPersistenceMode", handle)
    if missing:
        return DoctorLine(Level.INFO, "persistence mode", missing)
    if mode:
        return DoctorLine(Level.GOOD, "persistence mode", "on")
    return DoctorLine(
        Level.WARN,
        "persistence mode",
        "off",
        "the driver starts anew for each process: `sudo nvidia-smi -pm 1`",
    )


def _clock_lines(opened: Any, handle: Any) -> Iterator[DoctorLine]:
    """Clocks against their highest, then why they are lower.

    NVML does not report whether clocks are locked; the noise shows it.
    """
    sm, memory = getattr(opened, "NVML_CLOCK_SM", 1), getattr(opened, "NVML_CLOCK_MEM", 2)
    now, missing = nvml.nvml_query(opened, "nvmlDeviceGetClockInfo", handle, sm)
    highest, no_highest = nvml.nvml_query(opened, "nvmlDeviceGetMaxClockInfo", handle, sm)
    memory_mhz, no_memory = nvml.nvml_query(opened, "nvmlDeviceGetClockInfo", handle, memory)
    value = (
        f"SM {missing or now} of {no_highest or highest} MHz, memory {no_memory or memory_mhz} MHz"
    )
    application, no_application = nvml.nvml_query(
        opened, "nvmlDeviceGetApplicationsClock", handle, sm
    )
    default, no_default = nvml.nvml_query(
        opened, "nvmlDeviceGetDefaultApplicationsClock", handle, sm
    )
    if not (no_application or no_default) and application != default:
        held = (
            f"somebody set it (default {default} MHz), and work runs at it: `sudo nvidia-smi -rac`"
            " takes it back"
        )
        yield DoctorLine(
            Level.WARN, "clocks", f"{value}, application clock {application} MHz", held
        )
    else:
        unlocked = (
            "NVML cannot say whether they are locked; `sudo nvidia-smi -lgc MHZ` locks them, and"
            " numbers repeat better"
        )
        yield DoctorLine(Level.INFO, "clocks", value, "" if missing else unlocked)
    newer = "nvmlDeviceGetCurrentClocksEventReasons"
    bits, missing = nvml.nvml_query(
        opened,
        newer if hasattr(opened, newer) else "nvmlDeviceGetCurrentClocksThrottleReasons",
        handle,
    )
    yield (
        DoctorLine(Level.INFO, "clock events", missing)
        if missing
        else _events_line(reason_names(int(bits)))
    )


def _events_line(reasons: list[str]) -> DoctorLine:
    listed = ", ".join(reasons) or "none"
    if hot := sorted(THROTTLING & set(reasons)):
        advice = (
            f"the card slows itself down ({', '.join(hot)}), and a run would be UNSTABLE or ENV:"
            " see to cooling and the power supply"
        )
        return DoctorLine(Level.BAD, "clock events", listed, advice)
    if "sw_power_cap" in reasons:
        return DoctorLine(
            Level.WARN,
            "clock events",
            listed,
            "the power limit holds the clocks down: see the power limit below, and other load",
        )
    return DoctorLine(Level.GOOD, "clock events", listed)


def _ecc_line(opened: Any, handle: Any) -> DoctorLine:
    mode, missing = nvml.nvml_query(opened, "nvmlDeviceGetEccMode", handle)
    if missing:
        return DoctorLine(
            Level.INFO,
            "ECC",
            missing,
            "this card has none" if missing == nvml.error_name(3) else "",
        )
    current, pending = mode
    change = (
        ""
        if bool(current) == bool(pending)
        else f", {'on' if pending else 'off'} after the next reboot"
    )
    if not current:
        return DoctorLine(
            Level.WARN if change else Level.INFO,
            "ECC",
            f"off{change}",
            "memory is faster without it: compare with runs without it only",
        )
    errors, unknown = nvml.nvml_query(
        opened, "nvmlDeviceGetTotalEccErrors", handle, _UNCORRECTED, _VOLATILE
    )
    counted = (
        f"uncorrected errors not known ({unknown})"
        if unknown
        else f"{errors} uncorrected errors since the driver started"
    )
    value = f"on{change}, {counted}"
    if errors:
        return DoctorLine(
            Level.BAD,
            "ECC",
            value,
            "memory is failing and results may be wrong: reset the card, and have it exchanged if"
            " they return",
        )
    return DoctorLine(
        Level.WARN if change else Level.GOOD,
        "ECC",
        value,
        "speeds before and after that reboot differ" if change else "",
    )


def _power_line(opened: Any, handle: Any) -> DoctorLine:
    limit_mw, missing = nvml.nvml_query(opened, "nvmlDeviceGetPowerManagementLimit", handle)
    default_mw, no_default = nvml.nvml_query(
        opened, "nvmlDeviceGetPowerManagementDefaultLimit", handle
    )
    if missing or no_default:
        return DoctorLine(
            Level.INFO,
            "power limit",
            missing or f"{limit_mw / 1e3:.0f} W, its default is not known ({no_default})",
        )
    value = f"{limit_mw / 1e3:.0f} W, default {default_mw / 1e3:.0f} W"
    if limit_mw < _LEAST_LIMIT * default_mw:
        return DoctorLine(
            Level.WARN,
            "power limit",
            value,
            f"heavy work runs at lower clocks: `sudo nvidia-smi -pl {default_mw / 1e3:.0f}`",
        )
    return DoctorLine(Level.GOOD, "power limit", value)
