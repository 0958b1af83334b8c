"""Each detection, provoked in the real trainer: what the supervisor finds, and how the run ends."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nsa.config import preset
from nsa.train.config import RunConfig
from nsa.train.errors import TrainExit
from nsa.train.run_folder import write_resolved
from nsa.train.watchdog import supervise

WORKER = Path(__file__).with_name("faulty_worker.py")
ROOT = Path(__file__).parents[3]
MODEL = replace(preset("tiny"), dim=32, head_dim=8, num_layers=1)
STALL_S = 2.0
# Growth is over sooner than by the 50 % of the default, for which the machine has to find 1 GiB.
CREEP = {"watchdog": {"memory_creep_pct": 25.0}}


def config_of(out: Path, **sections: dict[str, Any]) -> RunConfig:
    mapping: dict[str, Any] = {
        "data": {"kind": "synthetic", "workers": 0},
        "train": {
            "steps": 400,
            "batch": 1,
            "seq_len": 96,
            "precision": "fp32",
            "warmup_steps": 0,
            "lr": 1e-3,
            "device": "cpu",
        },
        "checkpoint": {"every": 3},
        "log": {"every": 1, "probe_every": 1},
        "watchdog": {"grace_s": 2.0, "slow_lines": 400, "flat_lines": 400},
        "out": str(out),
    }
    for name, values in sections.items():
        mapping[name] = {**mapping.get(name, {}), **values}
    return replace(RunConfig.from_mapping(mapping), model=MODEL)


def ended(
    fault: str, out: Path, monkeypatch: pytest.MonkeyPatch, **sections: dict[str, Any]
) -> tuple[int, dict[str, Any]]:
    """The exit code of a run with ``fault``, and its halt; ``resume``: {"from": a checkpoint}."""
    resume = sections.pop("resume", {})
    config = config_of(out, **sections)
    out.mkdir()
    write_resolved(out, config)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    argv = [sys.executable, str(WORKER), fault, str(out), *resume.values()]
    code = supervise(argv, out, config.watchdog, 0)
    path = out / "halt.json"
    return code, json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.parametrize(
    "fault, phase, sections",
    [
        ("hang in load", "load", {}),
        ("hang in data", "data", {}),
        ("hang in step", "step", {}),
        ("hang with the gil", "step", {}),
        ("stop", "step", {}),
        ("hang in eval", "eval", {"train": {"eval_every": 5}}),
        ("hang in save", "save", {}),
    ],
)
def test_a_hang_ends_with_stacks_and_a_checkpoint(
    fault: str,
    phase: str,
    sections: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit_s = {"load": 10.0}.get(phase, STALL_S)  # a load has torch's own start in it
    sections = {**sections, "watchdog": {"grace_s": 1.0, f"{phase}_s": limit_s}}
    out = tmp_path / "run"
    code, halt = ended(fault, out, monkeypatch, **sections)
    assert code == TrainExit.STALLED
    assert (halt["kind"], halt["phase"], halt["rank"]) == ("stall", phase, 0)
    stacks = (out / "stacks" / "rank0.txt").read_text()
    if fault == "stop":
        assert "stopped by a signal" in stacks
    else:
        assert "faulty_worker.py" in stacks and "loop.py" in stacks
    if phase != "load":
        assert (out / "checkpoints" / "last-good").read_text().startswith("step-0000000")


@pytest.mark.parametrize(
    "fault, kind, sections",
    [
        ("nan", "not_finite", {}),
        ("zero gradient", "zero_gradient", {}),
        ("flat line", "flat_line", {"watchdog": {"flat_lines": 6}}),
        ("gate collapse", "gate_collapse", {"watchdog": {"collapse_lines": 3}}),
        ("below the floor", "below_floor", {}),
        ("slow path", "slow_path", {}),
        ("slow", "speed_collapse", {"watchdog": {"slow_lines": 3}}),
        ("memory creep", "memory_creep", {"train": {"steps": 200}, **CREEP}),
    ],
)
def test_what_is_unhealthy_ends_the_run(
    fault: str,
    kind: str,
    sections: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trainer obeys the halt and leaves by itself, with its last good checkpoint as it was."""
    out = tmp_path / "run"
    # On a busy machine the trainer may need longer than 2 s to leave.
    sections = {**sections, "watchdog": {"grace_s": 60.0, **sections.get("watchdog", {})}}
    code, halt = ended(fault, out, monkeypatch, **sections)
    assert code == TrainExit.UNHEALTHY
    assert (halt["kind"], halt["rank"]) == (kind, 0)
    if fault not in ("below the floor", "slow path"):  # which end it before the first save
        assert (out / "checkpoints" / "last-good").read_text().startswith("step-00000")
    log = (out / "log" / "rank0.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["reason"] == "unhealthy"
    # A process with busy threads ended with SIGSEGV within 411 requests for its stacks.
    assert not (out / "stacks" / "rank0.txt").read_bytes()


@pytest.mark.parametrize(
    "fault, code", [("killed", 137), ("segfault", 139), ("ends early", TrainExit.UNHEALTHY)]
)
def test_a_death_has_the_code_of_its_signal(
    fault: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = ended(fault, tmp_path / "run", monkeypatch)
    assert found == code


def test_a_sound_run_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, halt = ended("none", tmp_path / "run", monkeypatch, train={"steps": 30})
    assert (code, halt) == (TrainExit.OK, {})
