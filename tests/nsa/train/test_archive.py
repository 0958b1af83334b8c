"""A run folder: one run at a time, and nothing is overwritten."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nsa.train import archive
from nsa.train.archive import LOCK, prepare_run_folder
from nsa.train.errors import TrainError, TrainExit

HOLD = """
import sys, time
from nsa.train.archive import prepare_run_folder
held = prepare_run_folder(sys.argv[1], resume=True)
print("held", flush=True)
time.sleep(600)
"""


def refused(out: Path, *, resume: bool = False) -> str:
    with pytest.raises(TrainError) as caught:
        prepare_run_folder(out, resume=resume)
    assert caught.value.code is TrainExit.USAGE
    message = str(caught.value)
    assert "\n" not in message and str(out) in message
    return message


def finished_run(out: Path, text: str) -> None:
    with prepare_run_folder(out, resume=False) as run:
        (run.path / "config.json").write_text(text)


def test_a_rerun_archives_and_resume_keeps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        archive.time, "gmtime", lambda: time.struct_time((2026, 1, 2, 3, 4, 5, 4, 2, 0))
    )
    out = tmp_path / "deep" / "run"
    for text in ("first", "second", "third"):
        finished_run(out, text)
    kept = {one.name: (one / "config.json").read_text() for one in out.parent.iterdir()}
    assert kept == {
        "run": "third",
        "run.archived-20260102T030405Z": "first",
        "run.archived-20260102T030405Z-1": "second",
    }
    with prepare_run_folder(out, resume=True) as run:
        assert run.path == out and (out / "config.json").read_text() == "third"
    assert len(list(out.parent.iterdir())) == 3


def test_the_archive_is_named_by_the_utc_second(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", "")
    before = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    prepare_run_folder(tmp_path / "run", resume=False).release()
    after = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    (name,) = {one.name for one in tmp_path.iterdir()} - {"run"}
    stamp = re.fullmatch(r"run\.archived-(\d{8}T\d{6}Z)", name)
    assert stamp is not None and before <= stamp[1] <= after


def test_a_run_that_wrote_nothing_leaves_no_archive(tmp_path: Path) -> None:
    for _ in range(2):
        prepare_run_folder(tmp_path / "run", resume=False).release()
    assert [one.name for one in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("resume", [False, True])
def test_what_no_run_made_is_left_alone(tmp_path: Path, resume: bool) -> None:
    thesis = tmp_path / "thesis"
    thesis.mkdir()
    prepare_run_folder(thesis, resume=resume).release()  # an empty folder will do
    (thesis / LOCK).unlink()
    (thesis / "chapter1.tex").write_text("years")
    assert "chapter1.tex" in refused(thesis, resume=resume)
    assert "is a file" in refused(thesis / "chapter1.tex", resume=resume)
    assert [one.name for one in tmp_path.rglob("*")] == ["thesis", "chapter1.tex"]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refused(tmp_path / "file" / "run")
    assert "No such file or directory" in refused(Path("/proc/run"))


def test_a_run_that_cannot_be_renamed_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read_only(path: Path, target: Path) -> None:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    out = tmp_path / "run"
    finished_run(out, "old")
    monkeypatch.setattr(Path, "rename", read_only)
    assert "Read-only file system" in refused(out)
    assert (out / "config.json").read_text() == "old"


def test_a_link_stays_and_its_target_is_archived(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "run")
    finished_run(tmp_path / "run", "first")
    finished_run(tmp_path / "run", "second")
    assert (tmp_path / "run").is_symlink() and len(list((tmp_path / "disk").iterdir())) == 2


@pytest.mark.parametrize("resume", [False, True])
def test_a_living_run_is_refused_and_a_dead_ones_lock_is_taken(
    tmp_path: Path, resume: bool
) -> None:
    out = tmp_path / "run"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(out)], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    with other:
        try:
            assert other.stdout.readline() == "held\n"
            (out / "config.json").write_text("theirs")
            assert f"process {other.pid}" in refused(out, resume=resume)
            assert (out / "config.json").read_text() == "theirs"
        finally:
            other.send_signal(signal.SIGKILL)
    assert (out / LOCK).read_text() == f"{other.pid}\n"
    with prepare_run_folder(out, resume=resume):
        assert (out / LOCK).read_text() == f"{os.getpid()}\n"
        assert (out / "config.json").exists() == resume


def test_the_rerun_holds_its_new_folder_and_a_released_one_is_free(tmp_path: Path) -> None:
    finished_run(tmp_path / "run", "old")
    with prepare_run_folder(tmp_path / "run", resume=False) as run:
        assert os.fstat(run.fileno()).st_ino == (tmp_path / "run" / LOCK).stat().st_ino
        refused(tmp_path / "run")
    run.release()
    with pytest.raises(ValueError, match="released"):
        run.fileno()
    prepare_run_folder(tmp_path / "run", resume=True).release()


def test_a_folder_archived_between_open_and_lock_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"
    finished_run(out, "old")
    flock = archive.fcntl.flock

    def archived_first(descriptor: int, flags: int) -> None:
        out.rename(tmp_path / "archived")
        flock(descriptor, flags)

    monkeypatch.setattr(archive.fcntl, "flock", archived_first)
    refused(out, resume=True)


def test_needs_no_torch() -> None:
    code = "import sys, nsa.train.archive; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
