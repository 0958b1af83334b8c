"""A file is complete or absent, whatever ends its writer."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from perfbench.records import whole_file


@pytest.mark.parametrize(
    ("name", "partial_name"),
    [
        ("a.json", "a.partial.json"),
        ("a.b-c.json.gz", "a.b-c.partial.json.gz"),  # a format that is known by both its endings
        ("a.kernels.json", "a.kernels.partial.json"),
        ("plain", "plain.partial"),
    ],
)
def test_it_appears_when_the_block_ends(tmp_path: Path, name: str, partial_name: str) -> None:
    path = tmp_path / name
    path.write_text("old")
    with whole_file(path) as partial:
        assert partial == tmp_path / partial_name
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new" and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("stop", [OSError, KeyboardInterrupt])
def test_a_block_that_raises_leaves_the_old_file_alone(
    tmp_path: Path, stop: type[BaseException]
) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")

    def write_half() -> None:
        with whole_file(path) as partial:
            partial.write_text("half")
            raise stop

    with pytest.raises(stop):
        write_half()
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_absent_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), whole_file(tmp_path / "absent" / "a.json") as partial:
        partial.write_text("new")


@pytest.mark.parametrize("kind", ["pipe", "link to a pipe", "folder", "device"])
def test_what_is_no_file_stays_what_it_is(tmp_path: Path, kind: str) -> None:
    """Of root a rename would replace /dev/full for every process of the machine."""
    path = tmp_path / "out.json"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/null")
    else:
        os.mkfifo(tmp_path / "pipe")
        path.symlink_to(tmp_path / "pipe")
    before, names = path.lstat(), sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="no regular file"), whole_file(path) as partial:
        partial.write_text("new")
    after = path.lstat()
    assert (after.st_ino, stat.S_IFMT(after.st_mode)) == (
        before.st_ino,
        stat.S_IFMT(before.st_mode),
    )
    assert sorted(tmp_path.iterdir()) == names
