"""kill -9 of the trainer, and `--resume`, by the command that a user types."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from nsa.train.heartbeat import HeartbeatReader
from tests.nsa.train.supervised import wait_for

ROOT = Path(__file__).parents[3]
SETS = (
    "train.steps=40",
    "checkpoint.every=8",
    "log.every=2",
    "train.eval_every=0",
    "data.workers=1",
    "log.tensorboard=true",
)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def start(out: Path, *more: str) -> subprocess.Popen[str]:
    sets = [word for one in SETS for word in ("--set", one)]
    command = [sys.executable, "-m", "nsa.train", "configs/tiny-cpu.yaml", "--out", str(out)]
    return subprocess.Popen(
        [*command, *sets, *more],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def saved(out: Path, step: int) -> dict[str, object]:
    """Every tensor of a checkpoint, read by PyTorch's own converter."""
    whole = out / "whole.pt"
    dcp_to_torch_save(out / "checkpoints" / f"step-{step:08d}", whole)
    loaded: dict[str, object] = torch.load(whole, weights_only=True)
    return loaded


def test_a_killed_run_resumes_bit_for_bit(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    sound, killed = tmp_path / "sound", tmp_path / "killed"
    whole = start(sound)
    cut = start(killed)
    reader = HeartbeatReader(killed / "heartbeat" / "rank0.bin")
    beat = wait_for(lambda: (b := reader.read()) and b.step >= 18 and b, 120.0)
    os.kill(beat.pid, signal.SIGKILL)
    assert cut.wait(60) == 128 + signal.SIGKILL
    assert (killed / "checkpoints" / "last-good").read_text().strip() in (
        "step-00000008",
        "step-00000016",
    )
    again = start(killed, "--resume")
    out, _ = again.communicate(timeout=200)
    assert again.returncode == 0, out
    assert "resumed at step" in out
    assert whole.wait(200) == 0
    torch.testing.assert_close(saved(killed, 40), saved(sound, 40), rtol=0, atol=0)
    last = [json.loads(t) for t in (killed / "log" / "rank0.jsonl").read_text().splitlines()][-1]
    assert (last["kind"], last["step"]) == ("done", 40)
    with (killed / "log" / "training.csv").open(encoding="utf-8", newline="") as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(2, 41, 2))
    events = EventAccumulator(str(killed / "log" / "tensorboard"))
    events.Reload()
    assert [one.step for one in events.Tensors("loss_nats")] == list(range(2, 41, 2))
