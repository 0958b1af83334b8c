"""Two ranks of which one dies or hangs: the job ends in time, each rank's stacks are there, and
what it had saved resumes, also in one process.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from nsa.train.config import RunConfig
from nsa.train.data import load, tokenizer_of
from nsa.train.data.loader import Loader
from nsa.train.errors import TrainExit
from nsa.train.loop import Trainer
from nsa.train.records import Batch
from tests.nsa.train.rank_parent import GRACE_S, LIMITS_S, run_config
from tests.nsa.train.test_provoked import ROOT

PARENT = Path(__file__).with_name("rank_parent.py")
SAVED = "step-00000003"


def launched(fault: str, out: Path, *rest: str) -> subprocess.CompletedProcess[str]:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command = [sys.executable, "-m", *launcher, sys.executable, str(PARENT), fault, str(out), *rest]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(ROOT))
        began = time.time()
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
        )
    if fault != "none":
        ended_in_time(fault, out, began, time.time())
    return done


def ended_in_time(fault: str, out: Path, began: float, ended: float) -> None:
    """Within its phase's limit and the grace. Polls, stacks and torchrun's own end may take three
    times what torchrun took to start rank 1's parent, the speed of this machine at this time: they
    took 0.1 to 1.2 of it.
    """
    started_s = (out / "heartbeat" / "rank1.parent").stat().st_mtime - began
    took_s = ended - (out / "fault").stat().st_mtime
    assert took_s < LIMITS_S[fault] + GRACE_S + 3 * started_s


def exit_code(out: Path, rank: int) -> int:
    return int(json.loads((out / "heartbeat" / f"rank{rank}.exit").read_text())["code"])


@pytest.mark.parametrize(
    "fault, code, halted_by",
    [
        ("killed", 137, "died"),
        ("hang in connect", TrainExit.STALLED, "stall"),
        ("hang in load", TrainExit.STALLED, "stall"),
        ("hang in data", TrainExit.STALLED, "stall"),
        ("hang in step", TrainExit.STALLED, "stall"),
        ("hang in save", TrainExit.STALLED, "stall"),
    ],
)
@pytest.mark.usefixtures("one_thread")
def test_one_rank_ends_the_job(
    fault: str, code: int, halted_by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stacks, and a checkpoint that two processes take up, and one."""
    out = tmp_path / "run"
    done = launched(fault, out)
    assert done.returncode != 0
    halt = json.loads((out / "halt.json").read_text())
    assert (halt["kind"], halt["rank"]) == (halted_by, 1), done.stderr[-3000:]
    assert exit_code(out, 1) == code
    assert exit_code(out, 0) == TrainExit.PEER
    stacks = out / "stacks"
    assert "loop.py" in (stacks / "rank0.txt").read_text()
    if fault == "killed":  # which the other rank's line names, also where it was saving
        assert "another rank" in done.stderr, done.stderr[-3000:]
        assert "mend the disk" not in done.stderr
    else:
        assert halt["phase"] == fault.removeprefix("hang in ")
        assert "faulty_worker.py" in (stacks / "rank1.txt").read_text()
    if fault == "hang in connect":
        assert "init_process_group" in (stacks / "rank0.txt").read_text()
    else:
        trace = json.loads((stacks / "rank0.flight.json").read_text())
        assert any("gloo" in one["profiling_name"] for one in trace["entries"])
    if fault in ("hang in connect", "hang in load"):
        return
    assert (out / "checkpoints" / "last-good").read_text().strip() == SAVED
    saved = shutil.copytree(out / "checkpoints" / SAVED, tmp_path / "saved" / SAVED)
    resumes_alone(saved, tmp_path / "alone", monkeypatch)
    if fault == "hang in step":
        resumes_in_two(saved, out)


def resumes_alone(saved: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process goes on from the step after ``saved`` with the documents that it would have had
    if it had trained alone on those of both ranks, too.
    """
    seen: list[Batch] = []
    before = Trainer._run_step

    def run_step(self: Trainer, batches: list[Batch]) -> None:
        seen.extend(batches)
        before(self, batches)

    monkeypatch.setattr(Trainer, "_run_step", run_step)
    out.mkdir()
    trainer = Trainer(run_config(out), out, resume=saved)
    assert trainer.run() is TrainExit.OK
    log = (out / "log" / "rank0.jsonl").read_text().splitlines()
    assert json.loads(log[1])["step"] == 4  # the line after the event "start"
    wanted = loader_alone(trainer.config, out)
    of_both_ranks = list(islice(wanted, 2 * 3))
    for batch, want in zip(seen, islice(wanted, 6), strict=True):
        assert torch.equal(batch.ids, want.ids)
        assert not any(torch.equal(batch.ids, one.ids) for one in of_both_ranks)
    assert trainer.loader.state_dict() == wanted.state_dict()


def resumes_in_two(saved: Path, out: Path) -> None:
    again = launched("none", out, str(saved))
    assert again.returncode == 0, again.stderr[-3000:]
    assert exit_code(out, 0) == exit_code(out, 1) == TrainExit.OK
    wanted = loader_alone(run_config(out), out)
    for _ in range(2 * 9):
        next(wanted)
    last = out / "checkpoints" / "step-00000009"
    states = [extra_of(last, rank)["loader"] for rank in range(2)]
    assert Loader.merge(states) == wanted.state_dict()


def loader_alone(config: RunConfig, out: Path) -> Loader:
    tokenizer = tokenizer_of(config, out)
    return load(config, rank=0, world_size=1, split="train", tokenizer=tokenizer)


def extra_of(saved: Path, rank: int) -> dict[str, Any]:
    extra: dict[str, Any] = json.loads((saved / f"extra-rank{rank}.json").read_text())
    return extra
