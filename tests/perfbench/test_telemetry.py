"""NVML sampling with a stand-in for pynvml: what is unsupported is null plus NVML's reason, and
never 0.
"""

import time

import pytest

from perfbench.machine.clock_events import THROTTLING
from perfbench.records.rows import Telemetry
from perfbench.worker.telemetry import VALUES, NullSampler, NvmlSampler, Sampler, sampler_for
from tests.perfbench.fake_nvml import Card, FakeNvml, sampled
from tests.perfbench.fakes import FakeSampler

UUID = Card().uuid


def sample(nvml: FakeNvml, seconds: float = 0.45, hertz: float = 50.0) -> Telemetry:
    return sampled(nvml, UUID, seconds, hertz)


def test_every_value_of_a_healthy_card() -> None:
    nvml = FakeNvml(Card(name="other", uuid="GPU-0"), Card())
    seen = sample(nvml)
    assert (seen.utilisation_pct, seen.memory_utilisation_pct) == (90, 40)
    assert (seen.sm_clock_mhz, seen.memory_clock_mhz, seen.power_w, seen.temperature_c) == (
        1755,
        2619,
        512.0,
        58,
    )
    assert seen.memory_used_bytes == 3 * 2**30
    assert seen.energy_j == 7.0
    assert seen.throttled is False and seen.clock_event_reasons == []
    assert seen.window_s == 0.45
    assert seen.num_samples == 23, "at 0 s and every fiftieth of a second"
    assert seen.absent == {}
    assert nvml.opened == 0, "NVML must be shut down"


def test_the_card_is_found_by_uuid_and_never_by_index() -> None:
    nvml = FakeNvml(Card(uuid="GPU-0"), Card())
    sample(nvml, 0.01)
    assert ("nvmlDeviceGetHandleByUUID", (UUID,)) in nvml.calls
    assert not [name for name, _ in nvml.calls if name == "nvmlDeviceGetHandleByIndex"]


@pytest.mark.parametrize(
    ("code", "name"),
    [
        (4, "NO_PERMISSION"),
        (9, "DRIVER_NOT_LOADED"),
        (12, "LIBRARY_NOT_FOUND"),
        (18, "LIB_RM_VERSION_MISMATCH"),
    ],
)
def test_nvml_that_cannot_be_opened_leaves_nulls_with_the_reason(code: int, name: str) -> None:
    seen = sample(FakeNvml(Card(), fails={"nvmlInit": code}), 0.02)
    assert all(getattr(seen, key) is None for key in VALUES)
    assert set(seen.absent) == set(VALUES)
    assert all(name in reason for reason in seen.absent.values())
    assert seen.window_s == 0.02


def test_a_card_that_nvml_does_not_find() -> None:
    with NvmlSampler("GPU-nowhere", module=FakeNvml(Card())).window() as window:
        pass
    assert "NVML_ERROR_NOT_FOUND" in window.result.absent["power_w"]


def test_mig_utilisation_is_null_and_not_zero() -> None:
    seen = sample(FakeNvml(Card(), fails={"nvmlDeviceGetUtilizationRates": 3}), 0.3)
    assert seen.utilisation_pct is None and seen.memory_utilisation_pct is None
    assert seen.absent == {
        "utilisation_pct": "NVML_ERROR_NOT_SUPPORTED",
        "memory_utilisation_pct": "NVML_ERROR_NOT_SUPPORTED",
    }
    assert seen.power_w == 512.0


def test_what_failed_once_is_not_asked_again() -> None:
    nvml = FakeNvml(Card(), fails={"nvmlDeviceGetPowerUsage": 3})
    assert sample(nvml, 0.2).num_samples > 3
    assert [name for name, _ in nvml.calls].count("nvmlDeviceGetPowerUsage") == 1


def test_a_window_shorter_than_nvmls_own_has_no_utilisation() -> None:
    seen = sample(FakeNvml(Card()), 0.05)
    assert seen.utilisation_pct is None
    assert (
        "shorter than NVML's own" in seen.absent["utilisation_pct"]
        and "shorter" in seen.absent["memory_utilisation_pct"]
    )
    assert seen.sm_clock_mhz == 1755


@pytest.mark.parametrize(
    ("bits", "names", "throttled"),
    [
        (0x4, ["sw_power_cap"], False),
        (0x1, ["gpu_idle"], False),
        (0x8, ["hw_slowdown"], True),
        (0x20, ["sw_thermal_slowdown"], True),
        (0x40 | 0x4, ["sw_power_cap", "hw_thermal_slowdown"], True),
        (0x80, ["hw_power_brake_slowdown"], True),
        (0x2000, ["unknown_0x2000"], False),
    ],
)
@pytest.mark.parametrize("lacks", [(), ("nvmlDeviceGetCurrentClocksEventReasons",)])
def test_clock_event_reasons(
    bits: int, names: list[str], throttled: bool, lacks: tuple[str, ...]
) -> None:
    nvml = FakeNvml(Card(), lacks=lacks)
    nvml.reasons = bits
    seen = sample(nvml, 0.01)
    assert (seen.clock_event_reasons, seen.throttled) == (names, throttled)


def test_unsupported_reasons_are_not_taken_for_an_unthrottled_card() -> None:
    seen = sample(FakeNvml(Card(), fails={"nvmlDeviceGetCurrentClocksEventReasons": 3}), 0.01)
    assert seen.throttled is None and seen.absent["throttled"] == "NVML_ERROR_NOT_SUPPORTED"


def test_energy_needs_a_counter() -> None:
    seen = sample(FakeNvml(Card(), fails={"nvmlDeviceGetTotalEnergyConsumption": 3}), 0.01)
    assert seen.energy_j is None and seen.absent["energy_j"] == "NVML_ERROR_NOT_SUPPORTED"


def test_a_call_that_the_binding_lacks() -> None:
    seen = sample(FakeNvml(Card(), lacks=("nvmlDeviceGetTemperature",)), 0.01)
    assert (
        seen.temperature_c is None
        and seen.absent["temperature_c"] == "NVML_ERROR_FUNCTION_NOT_FOUND"
    )


def test_the_sampler_states_its_own_cost() -> None:
    nvml = FakeNvml(Card())
    with NvmlSampler(UUID, module=nvml, hertz=20.0).window() as window:
        begun = len(nvml.calls)
        while len(nvml.calls) < begun + 8:
            time.sleep(0.01)
    seen = window.result
    # the stand-in logs every call
    assert seen.sampler_cost_pct is not None and 0 < seen.sampler_cost_pct < 5


def test_an_error_of_the_measured_code_passes_through_and_ends_the_thread() -> None:
    nvml = FakeNvml(Card())
    with pytest.raises(RuntimeError, match="boom"), NvmlSampler(UUID, module=nvml).window():
        raise RuntimeError("boom")
    assert nvml.opened == 0


def test_null_and_fake_samplers() -> None:
    with NullSampler("no GPU here").window() as window:
        pass
    assert (
        set(window.result.absent.values()) == {"no GPU here"}
        and window.result.utilisation_pct is None
    )
    canned = Telemetry(power_w=3.0)
    sampler: Sampler = FakeSampler(canned)
    with sampler.window() as window, pytest.raises(ValueError, match="still open"):
        _ = window.result
    assert window.result is canned


def test_sampler_for_each_device() -> None:
    assert isinstance(sampler_for("cpu", None), NullSampler)
    assert isinstance(sampler_for("cuda", UUID), NvmlSampler)
    assert isinstance(sampler_for("cuda", None, "why"), NullSampler)
    assert "sw_power_cap" not in THROTTLING and "gpu_idle" not in THROTTLING
