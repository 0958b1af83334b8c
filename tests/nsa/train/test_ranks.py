"""Two ranks of which one dies or hangs: the job ends, each rank's stacks are there, and what it had
saved resumes, also in one process.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from nsa.train.errors import TrainExit
from tests.nsa.train.test_provoked import ROOT, ended

PARENT = Path(__file__).with_name("rank_parent.py")


def launched(fault: str, out: Path, *rest: str) -> subprocess.CompletedProcess[str]:
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    command = [sys.executable, "-m", *launcher, sys.executable, str(PARENT), fault, str(out), *rest]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("PYTHONPATH", str(ROOT))
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=400, check=False
        )


def exit_code(out: Path, rank: int) -> int:
    return int(json.loads((out / "heartbeat" / f"rank{rank}.exit").read_text())["code"])


Ended = tuple[subprocess.CompletedProcess[str], Path]


@pytest.fixture(scope="module")
def hung_in_step(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    """Two tests read this job: how it ended, and what it had saved."""
    out = tmp_path_factory.mktemp("hung") / "run"
    return launched("hang in step", out), out


@pytest.mark.parametrize(
    "fault, code, halted_by",
    [
        ("killed", 137, "died"),
        ("hang in load", TrainExit.STALLED, "stall"),
        ("hang in data", TrainExit.STALLED, "stall"),
        ("hang in save", TrainExit.STALLED, "stall"),
        ("hang in step", TrainExit.STALLED, "stall"),  # last, next to the test that shares its job
    ],
)
def test_one_rank_ends_the_job(
    fault: str,
    code: int,
    halted_by: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """With stacks, and a checkpoint that one process takes up."""
    if fault == "hang in step":
        done, out = request.getfixturevalue("hung_in_step")
    else:
        out = tmp_path / "run"
        done = launched(fault, out)
    assert done.returncode != 0
    halt = json.loads((out / "halt.json").read_text())
    assert (halt["kind"], halt["rank"]) == (halted_by, 1), done.stderr[-3000:]
    assert exit_code(out, 1) == code
    assert exit_code(out, 0) == TrainExit.PEER
    assert "loop.py" in (out / "stacks" / "rank0.txt").read_text()
    if fault == "killed":  # which the other rank's line names, also where it was saving
        assert "another rank" in done.stderr, done.stderr[-3000:]
        assert "mend the disk" not in done.stderr
    else:  # of a killed one gloo ends rank 0 with an error before it is asked for its flight
        assert "faulty_worker.py" in (out / "stacks" / "rank1.txt").read_text()
        trace = json.loads((out / "stacks" / "rank0.flight.json").read_text())
        assert any("gloo" in one["profiling_name"] for one in trace["entries"])
    if fault in ("killed", "hang in data"):
        resumes_alone(out / "checkpoints" / "step-00000003", tmp_path, monkeypatch)


def resumes_alone(saved: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process goes on from the step after ``saved``, to the end."""
    given = {"from": str(saved)}
    code, _ = ended("none", folder / "alone", monkeypatch, train={"steps": 9}, resume=given)
    assert code == TrainExit.OK
    log = (folder / "alone" / "log" / "rank0.jsonl").read_text().splitlines()
    assert json.loads(log[1])["step"] == 4  # the line after the event "start"


def test_what_two_ranks_saved_resumes_in_two_and_in_one(
    hung_in_step: Ended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, hung = hung_in_step
    assert done.returncode != 0
    out = shutil.copytree(hung, tmp_path / "run")  # the job's own folder stays as it ended
    saved = out / "checkpoints" / (out / "checkpoints" / "last-good").read_text().strip()
    assert saved.name == "step-00000003"
    copied = shutil.copytree(saved, tmp_path / "copied" / saved.name)  # the next run prunes its own
    again = launched("none", out, str(saved))
    assert again.returncode == 0, again.stderr[-3000:]
    assert exit_code(out, 0) == exit_code(out, 1) == TrainExit.OK
    resumes_alone(copied, tmp_path, monkeypatch)
