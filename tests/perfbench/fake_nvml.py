"""A stand-in for the pynvml module: cards given as data, failures by function name and NVML's error
code.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from perfbench.records import Telemetry
from perfbench.worker.telemetry import NvmlSampler


class WindowClock:
    """Time that passes while the sampling thread waits, until ``window_s`` of it are over."""

    def __init__(self, window_s: float) -> None:
        self._now_s, self._window_s = 0.0, window_s
        self._over = threading.Event()

    def now(self) -> float:
        return self._now_s

    def wait(self, stop: threading.Event, seconds: float) -> bool:
        self._now_s = min(self._now_s + max(0.0, seconds), self._window_s)
        if self._now_s < self._window_s:
            return False
        self._over.set()
        return stop.wait()

    def until_over(self) -> None:
        """Let it pass, also where nothing samples."""
        if not any(one.name == "nvml-sampler" for one in threading.enumerate()):
            self._now_s = self._window_s
        else:
            self._over.wait()


def sampled(nvml: FakeNvml, uuid: str, window_s: float, hertz: float = 50.0) -> Telemetry:
    """The telemetry of a window of ``window_s``, on the sampler's own clock."""
    clock = WindowClock(window_s)
    sampler = NvmlSampler(uuid, module=nvml, hertz=hertz, now=clock.now, wait=clock.wait)
    with sampler.window() as window:
        clock.until_over()
    return window.result


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


@dataclass
class Card:
    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-8f3a0001-0000-0000-0000-000000000000"
    mig: list[Card] = field(default_factory=list)
    mig_mode: bool = False
    processes: list[SimpleNamespace] = field(default_factory=list)
    used: int = 3 * 2**30
    persistence: int = 1
    application_clock: int = 1755
    ecc: tuple[int, int] = (1, 1)  # now, and after the next reboot
    ecc_errors: int = 0
    power_limit_mw: int = 700_000


class FakeNvml:
    """``fails`` maps a function's name to the error code that it raises; 'nvmlInit' is one of
    them.
    """

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(
        self,
        *cards: Card,
        fails: dict[str, int] | None = None,
        lacks: tuple[str, ...] = (),
        gpu_pct: int = 90,
    ) -> None:
        self.gpu_pct = gpu_pct
        self.cards = list(cards)
        self.fails = fails or {}
        self.lacks = lacks
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.energy_mj = 1_000_000
        self.reasons = 0
        self.opened = 0

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("nvml"):
            if name in self.lacks:
                raise AttributeError(name)
            return self._guarded(name, object.__getattribute__(self, name))
        return object.__getattribute__(self, name)

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.calls.append((name, args))
            if name in self.fails:
                raise NVMLError(self.fails[name])
            return function(*args)

        return call

    def nvmlInit(self) -> None:
        self.opened += 1

    def nvmlShutdown(self) -> None:
        self.opened -= 1

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"570.86.10"  # older bindings return bytes

    def nvmlSystemGetCudaDriverVersion(self) -> int:
        return 12080

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        return f"python-{pid}"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Card:
        for card in [*self.cards, *(mig for owner in self.cards for mig in owner.mig)]:
            if card.uuid == uuid:
                return card
        raise NVMLError(6)

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid

    def nvmlDeviceGetName(self, card: Card) -> str:
        return card.name

    def nvmlDeviceGetMigMode(self, card: Card) -> tuple[int, int]:
        return int(card.mig_mode), int(card.mig_mode)

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, index: int) -> Card:
        if index >= len(card.mig):
            raise NVMLError(6)
        return card.mig[index]

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[SimpleNamespace]:
        return card.processes

    def nvmlDeviceGetPersistenceMode(self, card: Card) -> int:
        return card.persistence

    def nvmlDeviceGetMaxClockInfo(self, card: Card, kind: int) -> int:
        return 1980

    def nvmlDeviceGetApplicationsClock(self, card: Card, kind: int) -> int:
        return card.application_clock

    def nvmlDeviceGetDefaultApplicationsClock(self, card: Card, kind: int) -> int:
        return 1755

    def nvmlDeviceGetEccMode(self, card: Card) -> list[int]:
        return list(card.ecc)

    def nvmlDeviceGetTotalEccErrors(self, card: Card, error_type: int, counter: int) -> int:
        # uncorrected, volatile
        return card.ecc_errors if (error_type, counter) == (1, 0) else 10_000

    def nvmlDeviceGetPowerManagementLimit(self, card: Card) -> int:
        return card.power_limit_mw

    def nvmlDeviceGetPowerManagementDefaultLimit(self, card: Card) -> int:
        return 700_000

    def nvmlDeviceGetUtilizationRates(self, card: Card) -> SimpleNamespace:
        return SimpleNamespace(gpu=self.gpu_pct, memory=40)

    def nvmlDeviceGetClockInfo(self, card: Card, kind: int) -> int:
        return {1: 1755, 2: 2619}[kind]

    def nvmlDeviceGetPowerUsage(self, card: Card) -> int:
        return 512_000

    def nvmlDeviceGetTemperature(self, card: Card, sensor: int) -> int:
        return 58

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> SimpleNamespace:
        return SimpleNamespace(used=card.used, total=80 * 2**30)

    def nvmlDeviceGetTotalEnergyConsumption(self, card: Card) -> int:
        self.energy_mj += 7_000
        return self.energy_mj

    def nvmlDeviceGetCurrentClocksEventReasons(self, card: Card) -> int:
        return self.reasons

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card: Card) -> int:
        return self.reasons
