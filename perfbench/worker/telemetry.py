"""What the GPU did while it was timed: NVML read in a thread, on the device found by its UUID,
never by an index.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from perfbench.machine import THROTTLING, NvmlUnavailable, nvml_query, nvml_session, reason_names
from perfbench.records import Telemetry

# 0.5 % of a core is the limit. Asking for everything 10 times a second cost 0.24 % in the median of
# 171 windows of 0.7 s on an H100's host, and 0.51 % in the worst; so what NVML itself renews more
# slowly is asked for more slowly.
HERTZ = 10.0
SLOW_PERIOD_S = 1.0
# NVML's utilisation is an average over its own past window (1/6 s to 1 s by card), so a shorter
# window of ours would report what ran before it.
UTILISATION_WINDOW_S = 0.2
VALUES = (
    "utilisation_pct",
    "memory_utilisation_pct",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "power_w",
    "temperature_c",
    "memory_used_bytes",
    "energy_j",
    "throttled",
    "sampler_cost_pct",
)


class Window:
    """A timed window; ``result`` is there once the ``with`` block has ended."""

    def __init__(self) -> None:
        self._result: Telemetry | None = None

    @property
    def result(self) -> Telemetry:
        if self._result is None:
            raise ValueError(
                "the telemetry of a window that is still open; read it after the `with` block"
            )
        return self._result

    def close(self, result: Telemetry) -> None:
        self._result = result


class Sampler(Protocol):
    def window(self) -> AbstractContextManager[Window]: ...


class NullSampler:
    """For machines without a GPU to sample: every value is null, with one reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    @contextmanager
    def window(self) -> Iterator[Window]:
        opened, begin = Window(), time.monotonic()
        try:
            yield opened
        finally:
            absent = dict.fromkeys(VALUES, self._reason)
            opened.close(Telemetry(window_s=time.monotonic() - begin, absent=absent))


class NvmlSampler:
    """Samples the GPU ``uuid`` ``hertz`` times a second while a window is open.

    ``module`` stands in for pynvml, ``now`` for the monotonic clock, ``wait`` for the thread's wait
    until it is stopped or so many seconds have passed (True: stopped).
    """

    def __init__(
        self,
        uuid: str,
        *,
        module: Any | None = None,
        hertz: float = HERTZ,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[threading.Event, float], bool] = threading.Event.wait,
    ) -> None:
        self._uuid, self._module, self._period_s = uuid, module, 1.0 / hertz
        self._now, self._wait = now, wait

    @contextmanager
    def window(self) -> Iterator[Window]:
        opened, begin = Window(), self._now()
        try:
            with nvml_session(self._module) as module:
                handle, missing = nvml_query(module, "nvmlDeviceGetHandleByUUID", self._uuid)
                if not missing:
                    yield from self._sample(opened, module, handle)
                    return
                reason = f"{missing}: NVML does not find the GPU that is measured"
        except NvmlUnavailable as error:
            reason = str(error)
        with NullSampler(reason).window() as blind:
            yield opened
        opened.close(blind.result.model_copy(update={"window_s": self._now() - begin}))

    def _sample(self, opened: Window, module: Any, handle: Any) -> Iterator[Window]:
        recorder = _Recorder(module, handle, self._period_s, self._now, self._wait)
        recorder.start()
        try:
            yield opened
        finally:
            opened.close(recorder.stop())


class _Recorder:
    """The sampling thread and what it has seen."""

    def __init__(
        self,
        module: Any,
        handle: Any,
        period_s: float,
        now: Callable[[], float],
        wait: Callable[[threading.Event, float], bool],
    ) -> None:
        self._nvml, self._handle, self._period_s = module, handle, period_s
        self._now, self._wait = now, wait
        self._seen: dict[str, list[float]] = {}
        self._query_s: dict[str, float] = {}
        self._absent: dict[str, str] = {}
        self._reason_bits = 0
        self._num_samples = 0
        self._utilisation_due_s = UTILISATION_WINDOW_S
        self._slow_due_s = UTILISATION_WINDOW_S  # by then the clocks have come up
        self._cpu_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="nvml-sampler", daemon=True)

    def start(self) -> None:
        self._prime()
        self._read_energy()  # outside the window, where its cost disturbs nothing
        self._begin = self._now()
        self._thread.start()

    def stop(self) -> Telemetry:
        self._stop.set()
        self._thread.join()
        window_s = self._now() - self._begin
        self._read_energy()
        return self._summary(window_s)

    def _prime(self) -> None:
        """Ask everything once and forget the answers: the first call of each query binds it, and
        pays for that.
        """
        self._call("utilisation_pct", "nvmlDeviceGetUtilizationRates")
        self._read_slow()
        self._read_reasons()
        self._seen.clear()
        self._query_s.clear()
        self._reason_bits = 0

    def _loop(self) -> None:
        cpu_begin = time.thread_time()
        due = self._begin
        while True:
            self._once()
            due = max(due + self._period_s, self._now())  # late samples are not made up for
            if self._wait(self._stop, due - self._now()):
                break
        if "power_w" not in self._seen:
            self._read_slow()
        self._cpu_s = time.thread_time() - cpu_begin

    def _once(self) -> None:
        elapsed_s = self._now() - self._begin
        if elapsed_s >= self._utilisation_due_s:
            self._read_utilisation()
            self._utilisation_due_s = elapsed_s + UTILISATION_WINDOW_S
        if elapsed_s >= self._slow_due_s:
            self._read_slow()
            self._slow_due_s = elapsed_s + SLOW_PERIOD_S
        self._read_reasons()
        self._num_samples += 1

    def _read_utilisation(self) -> None:
        rates = self._call("utilisation_pct", "nvmlDeviceGetUtilizationRates")
        if rates is not None:
            self._keep("utilisation_pct", rates.gpu)
            self._keep("memory_utilisation_pct", rates.memory)

    def _read_energy(self) -> None:
        self._read(
            "energy_j", "nvmlDeviceGetTotalEnergyConsumption", lambda millijoules: millijoules / 1e3
        )

    def _read_slow(self) -> None:
        module = self._nvml
        self._read(
            "sm_clock_mhz", "nvmlDeviceGetClockInfo", float, getattr(module, "NVML_CLOCK_SM", 1)
        )
        self._read(
            "memory_clock_mhz",
            "nvmlDeviceGetClockInfo",
            float,
            getattr(module, "NVML_CLOCK_MEM", 2),
        )
        self._read("power_w", "nvmlDeviceGetPowerUsage", lambda milliwatts: milliwatts / 1e3)
        self._read(
            "temperature_c",
            "nvmlDeviceGetTemperature",
            float,
            getattr(module, "NVML_TEMPERATURE_GPU", 0),
        )
        self._read("memory_used_bytes", "nvmlDeviceGetMemoryInfo", lambda info: float(info.used))

    def _read_reasons(self) -> None:
        newer = "nvmlDeviceGetCurrentClocksEventReasons"
        name = newer if hasattr(self._nvml, newer) else "nvmlDeviceGetCurrentClocksThrottleReasons"
        bits = self._call("throttled", name)
        if bits is not None:
            self._reason_bits |= int(bits)
            self._keep("throttled", 0.0)

    def _call(self, key: str, function: str, *args: Any) -> Any:
        """The value, or None; what failed once is not asked again."""
        if key in self._absent:
            return None
        begin = time.thread_time()
        value, missing = nvml_query(self._nvml, function, self._handle, *args)
        self._query_s[key] = self._query_s.get(key, 0.0) + time.thread_time() - begin
        if missing:
            self._absent[key] = missing
        return value

    def _read(self, key: str, function: str, convert: Callable[[Any], float], *args: Any) -> None:
        value = self._call(key, function, *args)
        if value is not None:
            self._keep(key, convert(value))

    def _keep(self, key: str, value: float) -> None:
        self._seen.setdefault(key, []).append(float(value))

    def _summary(self, window_s: float) -> Telemetry:
        values: dict[str, Any] = {}
        for key in (
            "utilisation_pct",
            "memory_utilisation_pct",
            "sm_clock_mhz",
            "memory_clock_mhz",
            "power_w",
        ):
            seen = self._seen.get(key, [])
            values[key] = sum(seen) / len(seen) if seen else None
        for key in ("temperature_c", "memory_used_bytes"):
            values[key] = max(self._seen.get(key, []), default=None)
        energy = self._seen.get("energy_j", [])
        values["energy_j"] = energy[-1] - energy[0] if len(energy) > 1 else None
        reasons = reason_names(self._reason_bits)
        values["throttled"] = bool(THROTTLING & set(reasons)) if "throttled" in self._seen else None
        values["sampler_cost_pct"] = 100.0 * self._cpu_s / window_s if window_s > 0 else None
        values["sampler_query_s"] = dict(self._query_s)
        absent = {key: self._why(key, window_s) for key in VALUES if values[key] is None}
        return Telemetry(
            **values,
            clock_event_reasons=reasons,
            num_samples=self._num_samples,
            window_s=window_s,
            absent=absent,
        )

    def _why(self, key: str, window_s: float) -> str:
        source = "utilisation_pct" if key == "memory_utilisation_pct" else key
        if source in self._absent:
            return self._absent[source]
        if source == "utilisation_pct":
            return (
                f"the window of {window_s:.3f} s is shorter than NVML's own averaging window"
                f" ({UTILISATION_WINDOW_S} s)"
            )
        return "NVML gave no value while the window was open"


def sampler_for(device: str, uuid: str | None, reason: str = "") -> Sampler:
    """NVML for a CUDA device whose UUID is known; else nulls with the reason."""
    if not device.startswith("cuda"):
        return NullSampler("no GPU: measured on the CPU")
    return NvmlSampler(uuid) if uuid else NullSampler(reason or "the UUID of the GPU is not known")
