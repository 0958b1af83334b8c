"""The doctor's lines on healthy, broken and absent GPUs."""

import pathlib
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from perfbench import doctor, environment
from perfbench.verdict import Exit, PerfbenchError
from tests.perfbench.fake_nvml import Card, FakeNvml

ROOT = pathlib.Path(__file__).parents[2]


def lines(nvml: FakeNvml, environ: dict[str, str] | None = None) -> dict[str, doctor.Line]:
    return {line.what: line for line in doctor.diagnose(module=nvml, environ=environ or {}, root=ROOT)}


def test_a_healthy_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "torch_cuda", lambda: "13.0")
    found = lines(FakeNvml(Card()))
    for what in ("NVML", "driver", "GPU", "CUDA_VISIBLE_DEVICES", "other processes", "persistence mode", "CUDA of torch"):
        assert found[what].ok is True, found[what]
    assert found["driver"].value == "570.86.10, CUDA up to 12.8"
    assert "h100-80gb-hbm3" in found["GPU"].value and Card().uuid not in found["GPU"].value
    assert 12 <= len(found) <= 16


def test_no_gpu_is_neither_good_nor_bad() -> None:
    found = doctor.diagnose(module=FakeNvml(fails={"nvmlInit": 12}), environ={}, root=ROOT)
    assert doctor.exit_code([line for line in found if line.what not in ("NSA_* settings",)]) is Exit.OK
    assert "gpu: none" in doctor.render_text(found)


@pytest.mark.parametrize(
    ("code", "ok", "words"), [(4, False, "/dev/nvidiactl"), (9, None, "modprobe"), (12, None, "--gpus all"), (18, False, "reboot")]
)
def test_nvml_codes_are_explained(code: int, ok: bool | None, words: str) -> None:
    line = lines(FakeNvml(Card(), fails={"nvmlInit": code}))["NVML"]
    assert line.ok is ok and f"code {code}" in line.value and words in line.advice


def test_faults_carry_advice() -> None:
    busy = Card(processes=[SimpleNamespace(pid=77, usedGpuMemory=None)], persistence=0)
    found = lines(FakeNvml(busy))
    assert found["other processes"].ok is False and "77 (python-77)" in found["other processes"].value
    assert found["persistence mode"].ok is None and "-pm 1" in found["persistence mode"].advice
    assert "unset it" in lines(FakeNvml(Card()), {"CUDA_VISIBLE_DEVICES": ""})["CUDA_VISIBLE_DEVICES"].advice
    assert doctor.exit_code(list(found.values())) is Exit.ENVIRONMENT


def test_a_cpu_build_of_torch_beside_a_gpu_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "torch_cuda", lambda: None)
    assert lines(FakeNvml(Card()))["CUDA of torch"].ok is False


def test_a_setting_that_is_not_known_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise PerfbenchError(Exit.USAGE, "environment variable NSA_USE_FA is not known; did you mean 'NSA_USE_FA2'?")

    monkeypatch.setattr(environment, "nsa_settings", refuse)
    line = lines(FakeNvml(Card()))["NSA_* settings"]
    assert line.ok is False and "NSA_USE_FA2" in line.advice


def test_every_bad_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "version", lambda name: "1.0" if name == "pynvml" else None)
    monkeypatch.setattr(environment, "torch_cuda", lambda: None)
    broken = FakeNvml(Card(processes=[SimpleNamespace(pid=1, usedGpuMemory=1)]))
    bad = [line for line in lines(broken).values() if line.ok is False]
    assert {"torch", "CUDA of torch", "triton", "NVML binding"} <= {line.what for line in bad}
    assert all(line.advice for line in bad)


def test_this_machine_without_importing_torch() -> None:
    code = "import sys; from perfbench import doctor; print(doctor.render_text(doctor.diagnose())); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "FA-2 provider" in done.stdout
