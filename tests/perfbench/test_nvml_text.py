"""What NVML answers may be no UTF-8: null and a reason, for every query.

Row of the faults: what NVML answers is trusted.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from perfbench.machine import environment, nvml
from perfbench.machine.gpu import busy_processes, visible
from tests.perfbench.fake_nvml import Card, FakeNvml, sampled

BAD = b"NVIDIA \xff\xfe"
TEXTS = ("nvmlSystemGetDriverVersion", "nvmlSystemGetProcessName", "nvmlDeviceGetName")
EVERY = sorted(
    name
    for name, _ in inspect.getmembers(FakeNvml, inspect.isfunction)
    if name.startswith("nvml") and name not in ("nvmlInit", "nvmlShutdown")
)


class Garbled(FakeNvml):
    """Answers one call with bytes that are no UTF-8, or as a newer binding does, which decodes."""

    def __init__(self, name: str, raises: bool) -> None:
        other = SimpleNamespace(pid=2**22 + 1, usedGpuMemory=2**30)
        super().__init__(Card(processes=[other]))
        self.garbled, self.raises = name, raises

    def _guarded(self, name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            return BAD.decode("utf-8") if self.raises else BAD

        return call if name == self.garbled else super()._guarded(name, function)


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("name", EVERY)
def test_every_query_gives_null_and_a_reason(name: str, raises: bool) -> None:
    value, why = nvml.nvml_query(Garbled(name, raises), name, 1)
    assert value is None and why.startswith(f"what {name} answered is not UTF-8")
    assert "\\xff" in why and "\ufffd" not in why


@pytest.mark.parametrize("raises", [True, False])
@pytest.mark.parametrize("name", TEXTS)
def test_the_machine_is_described_all_the_same(name: str, raises: bool) -> None:
    module = Garbled(name, raises)
    gpus, reason = visible(None, None, module)
    assert len(gpus) == 1 and reason == ""
    assert ("is not UTF-8" in gpus[0].name) == (name == "nvmlDeviceGetName")
    assert gpus[0].slug in ("h100-80gb-hbm3", "unknown-gpu")
    found = environment.collect_environment("cuda", module=module, environ={})
    assert (found.driver is None) == (name == "nvmlSystemGetDriverVersion")
    (other,), missing = busy_processes(gpus[0].uuid, module)
    assert missing == "" and other.pid == 2**22 + 1
    assert ("is not UTF-8" in other.name) == (name == "nvmlSystemGetProcessName")


@pytest.mark.parametrize("name", ["nvmlDeviceGetUtilizationRates", "nvmlDeviceGetPowerUsage"])
def test_the_sampler_stores_the_reason(name: str) -> None:
    module = Garbled(name, raises=True)
    told = sampled(module, module.cards[0].uuid, 0.5)
    assert any("is not UTF-8" in why for why in told.absent.values())
    assert told.temperature_c == 58


def test_plain_bytes_are_text() -> None:
    assert nvml.nvml_query(FakeNvml(Card()), "nvmlSystemGetDriverVersion") == ("570.86.10", "")
