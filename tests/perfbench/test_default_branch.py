"""The commit whose files judge: where HEAD forked off the default branch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from perfbench.machine.default_branch import DEFAULT_BRANCHES, JudgingCommit, judging_commit
from tests.perfbench.repositories import commit, git


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit on main, and a folder in it that is the current one."""
    git(tmp_path, "init", "-q")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "f").write_text("old", encoding="utf-8")
    commit(tmp_path, "one")
    monkeypatch.chdir(tmp_path / "sub")
    return tmp_path


def found(home: Path) -> JudgingCommit:
    answer = judging_commit(home)
    assert isinstance(answer, JudgingCommit)
    return answer


def test_on_the_default_branch_it_is_head_and_not_the_working_copy(home: Path) -> None:
    Path("f").write_text("edited", encoding="utf-8")
    Path("new").write_text("untracked", encoding="utf-8")
    one = found(home)
    assert one.commit == one.head and "HEAD, which is on the default branch main" in one.name
    assert one.read(Path("f")) == b"old" and one.read(Path("new")) is None
    assert one.files(Path(".")) == [Path("f")]


def test_on_a_branch_it_is_where_it_forked_off(home: Path) -> None:
    base = git(home, "rev-parse", "HEAD")
    git(home, "checkout", "-q", "-b", "change")
    Path("f").write_text("changed", encoding="utf-8")
    commit(home, "two")
    git(home, "checkout", "-q", "main")
    Path("g").write_text("later on main", encoding="utf-8")
    commit(home, "three")
    git(home, "checkout", "-q", "change")
    one = found(home)
    assert (one.commit, one.name) == (base, "the merge base of HEAD with main")
    assert one.read(Path("f")) == b"old" and one.read(Path("g")) is None
    assert one.read(Path("../sub/f")) == b"old" and one.read(home / "sub" / "f") == b"old"


@pytest.mark.parametrize("first", range(len(DEFAULT_BRANCHES)))
def test_the_first_branch_that_exists_is_the_default(home: Path, first: int) -> None:
    git(home, "checkout", "-q", "--detach")
    git(home, "branch", "-q", "-D", "main")
    tip = git(home, "rev-parse", "HEAD")
    for name in DEFAULT_BRANCHES[first:]:
        kind = "remotes" if name.startswith("origin/") else "heads"
        git(home, "update-ref", f"refs/{kind}/{name}", tip)
    Path("f").write_text("changed", encoding="utf-8")
    commit(home, "two")
    assert found(home).name == f"the merge base of HEAD with {DEFAULT_BRANCHES[first]}"


def test_no_default_branch_is_head_and_says_so(home: Path) -> None:
    git(home, "checkout", "-q", "-b", "other")
    git(home, "branch", "-q", "-D", "main")
    one = found(home)
    assert one.commit == one.head and "none of origin/HEAD, origin/main" in one.name


def test_a_branch_without_a_common_commit_is_judged_by_the_default_branch(home: Path) -> None:
    """As in a shallow clone."""
    tip = git(home, "rev-parse", "HEAD")
    git(home, "checkout", "-q", "--orphan", "lone")
    Path("f").write_text("changed", encoding="utf-8")
    commit(home, "lone")
    one = found(home)
    assert one.commit == tip and "main itself" in one.name and one.read(Path("f")) == b"old"


def test_a_link_that_the_change_put_there_is_not_followed(home: Path) -> None:
    git(home, "checkout", "-q", "-b", "change")
    (home / "sub").rename(home / "real")
    os.symlink("real", home / "sub")
    os.chdir(home)
    (home / "real" / "f").write_text("changed", encoding="utf-8")
    commit(home, "a link")
    assert found(home).read(Path("sub/f")) == b"old"
    assert found(home).read(Path("real/f")) is None and found(home).read(Path("sub")) is None
    assert found(home).read(Path("/etc/passwd")) is None


def test_without_git_it_is_a_reason(tmp_path: Path) -> None:
    assert "not a git repository" in str(judging_commit(tmp_path))
    git(tmp_path, "init", "-q")
    assert judging_commit(tmp_path) == "the repository has no commit"
