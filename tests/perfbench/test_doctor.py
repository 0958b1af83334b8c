"""The doctor's lines on healthy, broken and absent GPUs, on installations that do not fit, and on
runs and logs.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from nsa.retired import RETIRED
from perfbench.commands import app
from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import environment, source_of
from perfbench.machine.doctor import diagnose_here, install, log_lines
from perfbench.machine.doctor.findings import DoctorLine, Level, exit_code, render_text
from perfbench.records.rows import Run, Source, Status
from tests.perfbench import builders as b
from tests.perfbench import edits
from tests.perfbench.digested import write_run
from tests.perfbench.fake_nvml import Card, FakeNvml

ROOT = pathlib.Path(__file__).parents[2]
ONE, TWO = "GPU-1a2b0000-0000-0000-0000-000000000001", "GPU-1a2c0000-0000-0000-0000-000000000002"
TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"
NONE = FakeNvml(fails={"nvmlInit": 12})


def lines(
    module: FakeNvml,
    environ: dict[str, str] | None = None,
    root: pathlib.Path = ROOT,
    log: pathlib.Path | None = None,
    **options: Any,
) -> dict[str, DoctorLine]:
    of_log = [] if log is None else log_lines(log)
    here = diagnose_here.diagnose(root, module=module, environ=environ or {}, **options)
    return {line.what: line for line in (*of_log, *here)}


@cache
def _of_this_checkout() -> Source:
    return source_of(ROOT)


@pytest.fixture(autouse=True)
def _one_look_at_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which no test edits: hashing its packages and asking git takes 0.1 s of each."""
    monkeypatch.setattr(
        install, "source_of", lambda root: _of_this_checkout() if root == ROOT else source_of(root)
    )


@pytest.fixture(autouse=True)
def _fitting_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "torch_cuda", lambda: "12.8")


# The driver and the card.


def test_a_healthy_card() -> None:
    found = lines(FakeNvml(Card()))
    state = ("MIG", "other processes", "persistence mode", "clock events", "ECC", "power limit")
    for what in ("NVML", "driver", "GPU", "CUDA_VISIBLE_DEVICES", *state, "CUDA of torch"):
        assert found[what].level is Level.GOOD, found[what]
    assert found["driver"].value == "570.86.10, CUDA up to 12.8"
    assert "h100-80gb-hbm3" in found["GPU"].value and Card().uuid not in found["GPU"].value
    assert (
        found["clocks"].value == "SM 1755 of 1980 MHz, memory 2619 MHz"
        and "-lgc" in found["clocks"].advice
    )
    assert found["power limit"].value == "700 W, default 700 W"
    assert exit_code(found.values()) is Exit.OK


def test_no_gpu_is_no_fault() -> None:
    found = lines(NONE)
    assert exit_code(found.values()) is Exit.OK and "MIG" not in found
    assert "gpu: none" in found["GPU"].advice and found["CUDA_VISIBLE_DEVICES"].level is Level.INFO


@pytest.mark.parametrize(
    ("code", "level", "words"),
    [
        (4, Level.BAD, "/dev/nvidiactl"),
        (9, Level.INFO, "modprobe"),
        (12, Level.INFO, "--gpus all"),
        (18, Level.BAD, "reboot"),
        (15, Level.BAD, "reboot"),
        (777, Level.BAD, "NVML's reference"),
    ],
)
def test_nvml_codes_are_explained(code: int, level: Level, words: str) -> None:
    found = lines(FakeNvml(Card(), fails={"nvmlInit": code}))
    assert (
        found["NVML"].level is level
        and f"code {code}" in found["NVML"].value
        and words in found["NVML"].advice
    )
    assert exit_code(found.values()) is (Exit.ENVIRONMENT if level is Level.BAD else Exit.OK)


def test_a_binding_that_is_missing_is_bad(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name: (_ for _ in ()).throw(ImportError(f"No module named {name!r}")),
    )
    line = next(line for line in diagnose_here.diagnose(ROOT, environ={}) if line.what == "NVML")
    assert line.level is Level.BAD and "pip install nvidia-ml-py" in line.advice


@pytest.mark.parametrize(
    ("listed", "level", "words"),
    [
        (None, Level.GOOD, "unset: every GPU"),
        ("0", Level.GOOD, "'0'"),
        ("1,0", Level.GOOD, "'1,0'"),
        (ONE, Level.GOOD, ONE),
        ("GPU-1a2b", Level.GOOD, "GPU-1a2b"),
        ("", Level.WARN, "hides every GPU of 2"),
        ("-1", Level.WARN, "hides every GPU of 2"),
        ("7", Level.BAD, "'7' is none of the 2 GPUs"),
        ("0,7,1", Level.WARN, "shows 1 of the 3 named"),
        ("0,0", Level.BAD, "repeats a GPU"),
        ("GPU-1a2", Level.BAD, "fits 2 GPUs"),
        ("GPU-ffff", Level.BAD, "fits no GPU"),
        ("MIG-ffff", Level.BAD, "fits no GPU"),
    ],
)
def test_forms_of_cuda_visible_devices(listed: str | None, level: Level, words: str) -> None:
    environ = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    found = lines(FakeNvml(Card(uuid=ONE), Card(uuid=TWO)), environ)
    line = found["CUDA_VISIBLE_DEVICES"]
    assert line.level is level and words in f"{line.value} {line.advice}", line
    assert (level in (Level.GOOD, Level.INFO)) or line.advice
    if listed == "1,0":
        assert "NVML index 1" in found["GPU"].value and "first of 2" in found["GPU"].value


def test_different_cards_need_an_order() -> None:
    cards = FakeNvml(Card(uuid=ONE), Card(uuid=TWO, name="NVIDIA A100-SXM4-80GB"))
    line = lines(cards)["CUDA_VISIBLE_DEVICES"]
    assert (
        line.level is Level.BAD
        and "CUDA_DEVICE_ORDER=PCI_BUS_ID" in line.advice
        and "FASTEST_FIRST" in line.value
    )
    assert (
        lines(cards, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"})["CUDA_VISIBLE_DEVICES"].level
        is Level.GOOD
    )


def test_one_gpu_can_be_named() -> None:
    found = lines(
        FakeNvml(Card(uuid=ONE), Card(uuid=TWO, persistence=0)),
        {"CUDA_VISIBLE_DEVICES": "0"},
        gpu=TWO,
    )
    assert "NVML index 1" in found["GPU"].value and found["persistence mode"].level is Level.WARN
    assert found["--gpu"].level is Level.GOOD and "CUDA_VISIBLE_DEVICES" not in found
    assert lines(FakeNvml(Card(uuid=ONE)), gpu="5")["--gpu"].level is Level.BAD


BUSY = SimpleNamespace(pid=77, usedGpuMemory=3 * 2**30)
SLICE = Card(name="NVIDIA H100 MIG 1g.10gb", uuid="MIG-5e6f0000-0000-0000-0000-000000000000")


@pytest.mark.parametrize(
    ("card", "what", "level", "words"),
    [
        (Card(processes=[BUSY]), "other processes", Level.BAD, "77 (python-77, 3072 MiB)"),
        (Card(persistence=0), "persistence mode", Level.WARN, "-pm 1"),
        (Card(mig_mode=True), "MIG", Level.BAD, "nvidia-smi mig -cgi"),
        (Card(mig_mode=True, mig=[SLICE]), "MIG", Level.INFO, "slice of a card"),
        (Card(application_clock=1200), "clocks", Level.WARN, "application clock 1200 MHz"),
        (Card(ecc=(0, 0)), "ECC", Level.INFO, "faster without it"),
        (Card(ecc=(1, 0)), "ECC", Level.WARN, "off after the next reboot"),
        (Card(ecc_errors=2), "ECC", Level.BAD, "on, 2 uncorrected errors"),
        (Card(power_limit_mw=350_000), "power limit", Level.WARN, "350 W, default 700 W"),
    ],
)
def test_the_state_of_a_card(card: Card, what: str, level: Level, words: str) -> None:
    line = lines(FakeNvml(card))[what]
    assert line.level is level and words in f"{line.value} {line.advice}" and line.advice, line


@pytest.mark.parametrize(
    ("bits", "level", "words"),
    [
        (0x1, Level.GOOD, "gpu_idle"),
        (0x4, Level.WARN, "sw_power_cap"),
        (0x44, Level.BAD, "hw_thermal_slowdown"),
        (0x8, Level.BAD, "hw_slowdown"),
    ],
)
def test_clock_events(bits: int, level: Level, words: str) -> None:
    card = FakeNvml(Card())
    card.reasons = bits
    line = lines(card)["clock events"]
    assert (
        line.level is level
        and words in line.value
        and bool(line.advice) is (level is not Level.GOOD)
    )
    card.lacks = ("nvmlDeviceGetCurrentClocksEventReasons",)
    assert lines(card)["clock events"] == line, "older bindings call them throttle reasons"


def test_what_a_card_does_not_offer_is_said_and_is_no_fault() -> None:
    """Every question but those that find the card fails, one error for each."""
    asked = FakeNvml(Card())
    lines(asked)
    finding = (
        "nvmlInit",
        "nvmlShutdown",
        "nvmlDeviceGetCount",
        "nvmlDeviceGetHandleBy",
        "nvmlDeviceGetUUID",
        "nvmlDeviceGetName",
        "nvmlSystem",
    )
    fails = {name: 3 for name, _ in asked.calls if not name.startswith(finding)}
    assert len(fails) >= 10
    found = lines(FakeNvml(Card(), fails=fails))
    for what in (
        "MIG",
        "other processes",
        "persistence mode",
        "clocks",
        "clock events",
        "ECC",
        "power limit",
    ):
        assert (
            found[what].level is Level.INFO and "NVML_ERROR_NOT_SUPPORTED" in found[what].value
        ), found[what]


def test_a_card_that_is_lost_between_two_questions() -> None:
    found = lines(FakeNvml(Card(), fails={"nvmlDeviceGetHandleByUUID": 15}))
    assert found["ECC"].value == "NVML_ERROR_GPU_IS_LOST" and found["ECC"].level is Level.INFO


def test_a_driver_without_a_version_is_bad() -> None:
    assert (
        lines(FakeNvml(Card(), fails={"nvmlSystemGetDriverVersion": 999}))["driver"].level
        is Level.BAD
    )


# The installation.


@pytest.mark.parametrize(
    ("built", "level", "words"),
    [
        ("12.8", Level.GOOD, "12.8"),
        ("11.8", Level.GOOD, "11.8"),
        ("12.9", Level.WARN, "upgrade the driver"),
        ("13.0", Level.BAD, "torch will not find the GPU"),
        (None, Level.BAD, "a CPU build, next to a GPU"),
    ],
)
def test_torch_and_the_driver(
    monkeypatch: pytest.MonkeyPatch, built: str | None, level: Level, words: str
) -> None:
    monkeypatch.setattr(environment, "torch_cuda", lambda: built)
    line = lines(FakeNvml(Card()))["CUDA of torch"]
    assert line.level is level and words in f"{line.value} {line.advice}", line


def versions(monkeypatch: pytest.MonkeyPatch, **found: str) -> None:
    monkeypatch.setattr(environment, "version", lambda name: found.get(name.replace("-", "_")))


def requires(monkeypatch: pytest.MonkeyPatch, *requirements: str) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: list(requirements))


@pytest.mark.parametrize(
    ("torch", "triton", "pin", "level", "words"),
    [
        (
            "2.13.0+cu130",
            "3.7.1",
            'triton==3.7.1; platform_system == "Linux"',
            Level.GOOD,
            "as torch 2.13.0+cu130 wants",
        ),
        (
            "2.11.0+cu128",
            "3.7.1",
            'triton==3.6.0; platform_system == "Linux"',
            Level.BAD,
            "pip install 'triton==3.6.0'",
        ),
        (
            "2.12.0.dev1+cu130",
            "3.7.0+git9844da95",
            "pytorch-triton==3.7.0+git9844da95",
            Level.GOOD,
            "wants",
        ),
        ("2.13.0+cpu", "3.7.1", "filelock", Level.GOOD, "names no version of its own"),
        ("2.13.0+cpu", "3.5.0", "filelock", Level.WARN, "was tried with 3.7.1"),
        ("2.11.0+cpu", "3.5.0", "filelock", Level.GOOD, "names no version of its own"),
    ],
)
def test_torch_and_triton_are_a_pair(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: pathlib.Path,
    torch: str,
    triton: str,
    pin: str,
    level: Level,
    words: str,
) -> None:
    versions(monkeypatch, torch=torch, triton=triton)
    requires(monkeypatch, "sympy>=1.13.3", pin)
    (tmp_path / "constraints.txt").write_text(
        "torch==2.13.0\ntriton==3.7.1 ; platform_system == 'Linux'\n"
    )
    line = lines(FakeNvml(Card()), root=tmp_path)["triton"]
    assert line.level is level and words in f"{line.value} {line.advice}", line


def test_a_flash_attn_that_cannot_load(monkeypatch: pytest.MonkeyPatch) -> None:
    versions(monkeypatch, torch="2.13.0", flash_attn="2.8.3")
    line = lines(FakeNvml(Card()))["FA-2 provider"]
    assert line.level is Level.BAD and "without flash_attn_2_cuda" in line.value
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: SimpleNamespace(origin=f"/x/{name}.py")
    )
    url = "https://example.org/flash_attn-2.8.3%2Bcu12torch2.8cxx11abiTRUE-cp312-cp312-linux_x86_64.whl"
    monkeypatch.setattr(install, "_direct_url", lambda name: json.dumps({"url": url}))
    line = lines(FakeNvml(Card()))["FA-2 provider"]
    assert line.level is Level.BAD and "built for torch 2.8, next to torch 2.13.0" in line.value
    versions(monkeypatch, torch="2.8.1", flash_attn="2.8.3")
    assert lines(FakeNvml(Card()))["FA-2 provider"].level is Level.GOOD
    assert (
        install.torch_of_wheel("2.8.3+cu12torch2.10cxx11abiTRUE", "") == "2.10"
        and install.torch_of_wheel("2.8.3", "") is None
    )


@pytest.mark.parametrize(
    ("binding", "wrong", "file", "level", "words"),
    [
        ("13.615.71", None, "/x/pynvml.py", Level.GOOD, "nvidia-ml-py 13.615.71"),
        ("13.615.71", "11.5.0", "/x/pynvml/__init__.py", Level.BAD, "it shadows nvidia-ml-py"),
        ("13.615.71", "12.0.0", "/x/pynvml.py", Level.WARN, "leaves the module alone"),
        (None, "11.5.0", "/x/pynvml/__init__.py", Level.BAD, "pip uninstall -y pynvml"),
        (None, None, "", Level.BAD, "pip install nvidia-ml-py"),
    ],
)
def test_the_two_distributions_that_serve_pynvml(
    monkeypatch: pytest.MonkeyPatch,
    binding: str | None,
    wrong: str | None,
    file: str,
    level: Level,
    words: str,
) -> None:
    monkeypatch.setattr(
        environment, "version", lambda name: {"nvidia-ml-py": binding, "pynvml": wrong}.get(name)
    )
    monkeypatch.setattr(install, "module_file", lambda name: file)
    line = lines(NONE)["NVML binding"]
    assert line.level is level and words in f"{line.value} {line.advice}", line


def test_the_binding_that_is_installed_here_is_the_right_one() -> None:
    assert (
        pathlib.Path(install.module_file("pynvml")).name == "pynvml.py"
        and install.module_file("no.such") == ""
    )
    assert lines(NONE)["NVML binding"].level is Level.GOOD


@pytest.mark.parametrize(
    ("environ", "what", "level", "words"),
    [
        ({}, "NSA_* settings", Level.GOOD, "none set"),
        ({"NSA_USE_FA2": "1"}, "NSA_USE_FA2", Level.INFO, "an explicit fa2=on"),
        ({"NSA_SEL_RANGES_V2": "0"}, "NSA_SEL_RANGES_V2", Level.WARN, "explicit request for v1"),
        ({"NSA_STRICT_ASSERTS": "1"}, "NSA_STRICT_ASSERTS", Level.WARN, "synchronises"),
        ({"NSA_USE_FA": "1"}, "NSA_* settings", Level.BAD, "did you mean 'NSA_USE_FA2'"),
        ({"NSA_SEL_VARLEN_V2": "1"}, "NSA_* settings", Level.BAD, RETIRED["NSA_SEL_VARLEN_V2"]),
        ({"NSA_USE_FA2": "2"}, "NSA_* settings", Level.BAD, "must be 1 or 0"),
    ],
)
def test_settings(environ: dict[str, str], what: str, level: Level, words: str) -> None:
    line = lines(NONE, environ)[what]
    assert line.level is level and words in f"{line.value} {line.advice}", line


def git(folder: pathlib.Path, *args: str) -> None:
    subprocess.run(
        ["git", "-c", "user.name=x", "-c", "user.email=x@y", *args],
        cwd=folder,
        check=True,
        capture_output=True,
    )


def test_the_checkout(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines(NONE, root=tmp_path)["measured code"].level is Level.WARN
    whole, shallow = tmp_path / "whole", tmp_path / "shallow"
    whole.mkdir()
    git(whole, "init", "-q")
    for number in "12":
        (whole / "a").write_text(number)
        git(whole, "add", "a")
        git(whole, "commit", "-qm", number)
    git(tmp_path, "clone", "-q", "--depth", "1", whole.as_uri(), str(shallow))
    assert lines(NONE, root=whole)["measured code"].level is Level.GOOD
    line = lines(NONE, root=shallow)["measured code"]
    assert line.level is Level.WARN and "git fetch --unshallow" in line.advice
    monkeypatch.setenv("PATH", str(tmp_path))
    line = lines(NONE, root=whole)["measured code"]
    assert (
        line.level is Level.WARN
        and "git cannot be started" in line.value
        and "baseline" in line.advice
    )


@pytest.mark.parametrize(
    ("free", "level"), [(2**40, Level.GOOD), (2**30, Level.WARN), (2**20, Level.BAD)]
)
def test_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, free: int, level: Level
) -> None:
    """Of the working directory, below which `perfbench run` writes, whatever the checkout is."""
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free))
    monkeypatch.chdir(tmp_path)
    line = lines(NONE, root=ROOT)["disk"]
    assert (
        line.level is level
        and str(tmp_path) in line.value
        and bool(line.advice) is (level is not Level.GOOD)
    )


# A run that was made, or a log.


def test_what_is_of_the_log_and_what_of_this_machine_have_headings(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = logged(tmp_path, b.small_run())
    app.invoke(["doctor", "--log", str(log)])
    of_log, here = capsys.readouterr().out.split("\nthis machine, now:\n")
    assert of_log.startswith(f"{log}:\n") and "CPU bound" not in here
    assert next(line.split()[1] for line in of_log.splitlines()[1:] if line[0] != " ") == "run"
    assert "driver" in here or "NVML" in here
    app.invoke(["doctor"])
    assert "this machine" not in capsys.readouterr().out


def logged(tmp_path: pathlib.Path, run: Run, tail: bytes = b"") -> pathlib.Path:
    (tmp_path / "r").mkdir(exist_ok=True)
    write_run(tmp_path / "r" / "run.jsonl", run, tail)
    return tmp_path / "r"


def test_a_good_run_says_so(tmp_path: pathlib.Path) -> None:
    folder = logged(tmp_path, b.small_run())
    for log in (folder, folder / "run.jsonl"):
        found = lines(NONE, log=log)
        for topic in ("endings", "slow path", "utilisation", "CPU bound", "throttling"):
            assert found[f"run: {topic}"].level is Level.GOOD, found[f"run: {topic}"]
        assert (
            found["run"].value.endswith("12 replicates of 4 cells")
            and "93 %" in found["run: utilisation"].value
        )


LOOPS: dict[str, Any] = {"engaged": {"sel.v1": 12}}
WARNED: dict[str, Any] = {
    "stderr_tail": "x\nUsing slow _sdpa_over_ranges: path=reference, 256 rows\n"
}


@pytest.mark.parametrize(
    ("topic", "change", "words"),
    [
        ("slow path", lambda run: edits.edit(run, TRAIN, **LOOPS), "1 cell ran a slow path"),
        ("slow path", lambda run: edits.edit(run, TRAIN, **WARNED), "1 cell ran a slow path"),
        (
            "utilisation",
            lambda run: edits.edit(run, TRAIN, telemetry=b.telemetry(utilisation_pct=29.0)),
            "1 cell stayed below 30 % (least 29 %)",
        ),
        (
            "CPU bound",
            lambda run: edits.edit(
                run, TRAIN, host_bound=True, profile=b.profile(busy_fraction=0.12)
            ),
            "1 cell waited for the host (GPU busy 12 % of a step)",
        ),
        ("throttling", lambda run: edits.throttle(run, TRAIN, {1}), "1 cell throttled"),
        ("endings", lambda run: edits.fail(run, TRAIN, Status.OOM), "ended oom"),
    ],
)
def test_what_was_wrong_with_a_run_names_the_cell(
    tmp_path: pathlib.Path, topic: str, change: Callable[[Run], Run], words: str
) -> None:
    line = lines(NONE, log=logged(tmp_path, change(b.small_run())))[f"run: {topic}"]
    assert (
        line.level is Level.WARN and words in line.value and TRAIN in line.value and line.advice
    ), line


def test_a_run_without_a_gpu_or_without_rows(tmp_path: pathlib.Path) -> None:
    found = lines(NONE, log=logged(tmp_path, b.make_run(b.cpu_cells()[:2], gpu=False)))
    assert (
        found["run: utilisation"].level is Level.INFO
        and "no NVIDIA GPU" in found["run: utilisation"].value
    )
    assert "not known" in found["run: CPU bound"].value
    assert (
        lines(NONE, log=logged(tmp_path, b.with_rows(b.small_run(), []), tail=b'{"kind": "rep'))[
            "run"
        ].level
        is Level.WARN
    )


def test_both_sides_of_a_pair(tmp_path: pathlib.Path) -> None:
    for side in "ab":
        logged(tmp_path, b.small_run())
        (tmp_path / "r").rename(tmp_path / side)
    assert {"run a", "run b", "run b: CPU bound"} <= set(lines(NONE, log=tmp_path))


TRAINING = """\
step 1 | loss 10.8 | tok/s 5,210 | gpu_util: 12% | gradient_checkpointing=True
WARNING Using slow _sdpa_over_ranges: path=reference, 4096 rows
step 2 | loss 10.7 | tok/s 5,212 | gpu_util: 14% | use_fa2=False
{"step": 3, "utilisation_pct": 13.5, "host_bound": true}
WARNING Using slow _sdpa_over_ranges: path=reference, 4096 rows
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB
"""


def test_a_training_log(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(TRAINING)
    found = lines(NONE, log=log)
    expected = {
        "log": (Level.INFO, "6 lines"),
        "log: slow path": (Level.WARN, "'Using slow _sdpa_over_ranges' 2 times, first in line 2"),
        "log: utilisation": (Level.WARN, "14 % in the median of 3 readings, below 30 %"),
        "log: out of memory": (Level.BAD, "1 times, first in line 6"),
        "log: CPU bound": (Level.WARN, "1 times, first in line 4"),
        "log: checkpointing": (Level.INFO, "1 times, first in line 1"),
        "log: FA-2 off": (Level.INFO, "1 times, first in line 3"),
    }
    assert {
        what: (line.level, line.value) for what, line in found.items() if what.startswith("log")
    } == expected


SIGNS = {
    "flags": (
        "CUDA_LAUNCH_BLOCKING=1",
        "NSA_STRICT_ASSERTS: true",
        'NSA_SEL_RANGES_V2="0"',
        "NSA_TRITON_COPY=0",
        "set_detect_anomaly(True)",
        "allow_tf32 = False",
    ),
    "checkpointing": ("Gradient checkpointing: enabled", "gradient-checkpointing is on"),
    "FA-2 off": ("FA-2 off", "flash attention disabled", "flash_attn not installed, using SDPA"),
    "CPU bound": ("the run is CPU-bound", "dataloader is the bottleneck"),
    "utilisation": ("GPU-Util: 12%", "gpu utilization 7.5 %"),
    "slow path": ("WARNING Using slow _sdpa_over_ranges", "path=v1"),
}


@pytest.mark.parametrize(
    ("sign", "line"), [(sign, line) for sign, lines_ in SIGNS.items() for line in lines_]
)
def test_each_sign_of_a_slow_run_is_found_alone(
    sign: str, line: str, tmp_path: pathlib.Path
) -> None:
    """Six signs: settings, checkpointing, FA-2 off, a busy host, an idle GPU, a slow path."""
    log = tmp_path / "train.log"
    log.write_text(f"step 1 | loss 10.7\n{line}\nstep 2 | loss 10.6\n")
    found = lines(NONE, log=log)
    told = {what for what, one in found.items() if what.startswith("log: ") and one.advice}
    assert told - {"log: utilisation"} <= {f"log: {sign}"} and f"log: {sign}" in told
    assert found[f"log: {sign}"].advice


@pytest.mark.parametrize(
    "line",
    [
        "CUDA_LAUNCH_BLOCKING=0",
        "NSA_SEL_RANGES_V2=1",
        "gradient_checkpointing: false",
        "checkpoint saved to out/step_1",
        "flash_attn: 2.8.3",
        "fa2: on",
        "not CPU_bound: false",
        "detect_anomaly(False)",
        "checkpointing disabled",
    ],
)
def test_what_is_as_it_should_be_is_no_sign(line: str, tmp_path: pathlib.Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(f"util 95%\n{line}\n")
    found = {what for what in lines(NONE, log=log) if what.startswith("log: ")}
    assert found == {"log: slow path", "log: utilisation"}


def test_a_quiet_log(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("util 95%\nhost_bound: false, gradient_checkpointing: off, use_fa2=True\n")
    found = {
        what: line.level for what, line in lines(NONE, log=log).items() if what.startswith("log")
    }
    assert found == {
        "log": Level.INFO,
        "log: slow path": Level.GOOD,
        "log: utilisation": Level.GOOD,
    }


def test_what_the_slow_path_says_is_what_the_doctor_looks_for() -> None:
    from perfbench.machine.doctor.log import SLOW_WARNING

    assert f'"{SLOW_WARNING}: ' in (ROOT / "nsa/ops/selected/reference.py").read_text()


def test_any_bytes_are_a_log(tmp_path: pathlib.Path) -> None:
    log = tmp_path / "x.log"
    for raw, count in (
        (b"", 0),
        (b"\xff\xfe\x00" * 99, 1),
        (b"a" * 200_000 + b"\nutil 5%\n", 2),
        (b"\r\n\r\n", 2),
    ):
        log.write_bytes(raw)
        found = lines(NONE, log=log)
        assert found["log"].value == f"{count} lines"
        render_text(list(found.values())).encode()
    log.write_bytes(b'{"kind": "manifest"}\n')
    with pytest.raises(PerfbenchError, match=r"x\.log:1: "):
        lines(NONE, log=log)
    for missing in (tmp_path / "no", tmp_path, pathlib.Path("a\0b")):
        with pytest.raises(PerfbenchError) as caught:
            lines(NONE, log=missing)
        assert caught.value.exit_code is Exit.USAGE and "\n" not in str(caught.value)


# All of it.


def test_every_warning_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(environment, "version", lambda name: "1.0" if name == "pynvml" else None)
    monkeypatch.setattr(environment, "torch_cuda", lambda: None)
    broken = FakeNvml(Card(processes=[BUSY], persistence=0, ecc_errors=1, power_limit_mw=1))
    found = lines(broken, {"NSA_X": "1", "CUDA_VISIBLE_DEVICES": "0,9"}, root=tmp_path)
    wrong = [line for line in found.values() if line.level in (Level.WARN, Level.BAD)]
    assert {
        "torch",
        "CUDA of torch",
        "triton",
        "NVML binding",
        "other processes",
        "ECC",
        "NSA_* settings",
    } <= {line.what for line in wrong}
    assert all(line.advice for line in wrong) and exit_code(wrong) is Exit.ENVIRONMENT


def test_odd_characters_stay_on_their_line() -> None:
    text = render_text(
        [
            DoctorLine(Level.WARN, "x", "a\nb\x1b[31m \ud800", "do\nthis"),
            DoctorLine(Level.BAD, "yy", "z"),
        ]
    )
    escaped = r"a b\u001b[31m \ud800"
    assert text == f"warn  x   {escaped}\n          -> do this\nBAD   yy  z\n" and text.encode()


QUICK = """
import sys
waits = []
sys.addaudithook(lambda name, given: waits.append((name, given)) if name in {AUDITED} else None)
from perfbench.machine.doctor import diagnose, render_text
print(render_text(diagnose()))
heavy = {"torch", "triton", "scipy", "pandas", "matplotlib", "numpy", "ruamel.yaml"}
assert not heavy & set(sys.modules), sorted(sys.modules)
assert {given[0] for _, given in waits} <= {"git"} and len(waits) <= 10, waits
"""


def test_this_machine_quickly_and_without_torch() -> None:
    """Quick without a stopwatch: nothing large is imported, no process started but a few of git's,
    nothing slept on and nobody asked over a network.
    """
    audited = {"subprocess.Popen", "os.system", "time.sleep", "socket.connect"}
    done = subprocess.run(
        [sys.executable, "-c", QUICK.replace("{AUDITED}", repr(audited))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "FA-2 provider" in done.stdout
