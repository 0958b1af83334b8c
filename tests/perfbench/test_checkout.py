"""Two versions next to one another: worktrees that leave nothing behind, folders, and every reason
why there is none.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from perfbench.errors import Exit
from perfbench.runner.ab import checkout
from perfbench.runner.ab.checkout import CannotBuild
from perfbench.worker import nsa_version
from tests.perfbench import repositories
from tests.perfbench.repositories import ROOT, git, worktrees


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the sides' folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits of a package of one file, and uncommitted changes."""
    folder = tmp_path / "repository"
    (folder / "nsa").mkdir(parents=True)
    git(folder, "init", "-q")
    for number in (1, 2):
        (folder / "nsa" / "__init__.py").write_text(f"VERSION = {number}\n", encoding="utf-8")
        repositories.commit(folder, f"version {number}")
    (folder / "nsa" / "__init__.py").write_text("VERSION = 'dirty'\n", encoding="utf-8")
    (folder / "untracked.txt").write_text("mine", encoding="utf-8")
    return folder


def version_in(folder: Path) -> str:
    return (folder / "nsa" / "__init__.py").read_text(encoding="utf-8").strip()


def test_a_revision_is_checked_out_next_to_a_dirty_tree_and_gone_afterwards(
    repository: Path, temporary: Path
) -> None:
    before = git(repository, "status", "--porcelain")
    with (
        checkout.checked_out("HEAD~1", repository) as old,
        checkout.checked_out("HEAD", repository) as new,
    ):
        assert (version_in(old.folder), version_in(new.folder)) == ("VERSION = 1", "VERSION = 2")
        assert (
            old.source.commit == git(repository, "rev-parse", "HEAD~1")
            and old.source.dirty_sha256 is None
        )
        # nothing else of that version can be imported
        assert [file.name for file in old.folder.iterdir()] == ["nsa"]
        assert len(worktrees(repository)) == 3
    assert len(worktrees(repository)) == 1
    assert list(temporary.iterdir()) == []
    assert git(repository, "status", "--porcelain") == before
    assert git(repository, "worktree", "prune", "--dry-run", "--verbose") == ""


def test_a_folder_is_taken_as_it_is(repository: Path, temporary: Path, tmp_path: Path) -> None:
    with checkout.checked_out(str(repository), tmp_path) as dirty:
        assert version_in(dirty.folder) == "VERSION = 'dirty'"
        assert dirty.source.dirty_sha256 is not None
    copy = tmp_path / "copy"
    (copy / "nsa").mkdir(parents=True)
    (copy / "nsa" / "__init__.py").write_text("VERSION = 'copy'\n", encoding="utf-8")
    with (
        checkout.checked_out(f"{copy}@{'c' * 40}", tmp_path) as named,
        checkout.checked_out(str(copy), tmp_path) as nameless,
    ):
        assert version_in(named.folder) == "VERSION = 'copy'"
        assert named.source.commit == "c" * 40 and "not proved" in (named.source.reason or "")
        assert nameless.source.commit is None and nameless.source.reason
    assert list(temporary.iterdir()) == [] and version_in(copy) == "VERSION = 'copy'"


def test_the_own_checkout_needs_no_worktree(repository: Path, temporary: Path) -> None:
    from perfbench.machine import source_of

    with checkout.own_checkout(repository, source_of(repository)) as own:
        assert version_in(own.folder) == "VERSION = 'dirty'"
        assert len(worktrees(repository)) == 1
    assert list(temporary.iterdir()) == [] and version_in(repository) == "VERSION = 'dirty'"


def test_a_package_below_the_top_of_its_repository_is_found(
    tmp_path: Path, temporary: Path
) -> None:
    inside = tmp_path / "mono" / "python"
    (inside / "nsa").mkdir(parents=True)
    (inside / "nsa" / "__init__.py").write_text("VERSION = 7\n", encoding="utf-8")
    git(tmp_path / "mono", "init", "-q")
    repositories.commit(tmp_path / "mono", "one")
    with checkout.checked_out("HEAD", inside) as found:
        assert version_in(found.folder) == "VERSION = 7"


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_nothing_is_left_after_an_error(
    repository: Path, temporary: Path, error: type[BaseException]
) -> None:
    with pytest.raises(error), checkout.checked_out("HEAD", repository):
        raise error
    assert len(worktrees(repository)) == 1
    assert list(temporary.iterdir()) == []


def refusal(text: str, repository: Path) -> str:
    with pytest.raises(CannotBuild) as caught, checkout.checked_out(text, repository):
        pass
    assert caught.value.exit_code is Exit.USAGE
    return str(caught.value)


@pytest.mark.parametrize("text", ["nonsense", "-x", "HEAD~9", "0" * 40, "nowhere@abc", ""])
def test_an_unknown_revision_says_what_was_wanted_and_what_is_next(
    repository: Path, temporary: Path, text: str
) -> None:
    message = refusal(text, repository)
    assert (
        repr(text) in message
        and "wanted a commit, branch or tag, or a folder that holds nsa/" in message
        and "Next: " in message
    )
    assert list(temporary.iterdir()) == []


def test_a_shallow_clone_says_how_to_deepen_it(
    repository: Path, temporary: Path, tmp_path: Path
) -> None:
    git(tmp_path, "clone", "-q", "--depth", "1", f"file://{repository}", "shallow")
    message = refusal("HEAD~1", tmp_path / "shallow")
    assert "shallow" in message and "fetch-depth: 0" in message


def test_no_repository_and_no_git(
    repository: Path, temporary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    assert "not a git repository" in refusal("HEAD", bare)
    monkeypatch.setenv("PATH", str(bare))
    assert "git cannot be started" in refusal("HEAD", repository)


def test_a_revision_without_the_package_cannot_be_a_side(repository: Path, temporary: Path) -> None:
    git(repository, "rm", "-rqf", "nsa")
    repositories.commit(repository, "no package")
    assert "nsa/__init__.py" in refusal("HEAD", repository)
    assert len(worktrees(repository)) == 1


def test_what_a_killed_process_left_is_removed_and_what_lives_is_not(
    repository: Path, temporary: Path
) -> None:
    code = (
        "import sys, tempfile, time\nfrom pathlib import Path\ntempfile.tempdir ="
        f" {str(temporary)!r}\nfrom perfbench.runner import checked_out\n"
        f"with checked_out('HEAD', Path({str(repository)!r})):\n"
        "    print('ready', flush=True)\n    time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
        with checkout.checked_out("HEAD", repository):
            assert len(worktrees(repository)) == 3  # the living one keeps its own
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    assert len(worktrees(repository)) == 2
    with checkout.checked_out("HEAD", repository):
        assert len(worktrees(repository)) == 2
    assert len(worktrees(repository)) == 1 and list(temporary.iterdir()) == []


@pytest.fixture
def without_nsa(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which nobody has imported nsa; what is imported meanwhile is forgotten."""
    kept = {
        name: module
        for name, module in sys.modules.items()
        if name == "nsa" or name.startswith("nsa.")
    }
    path = list(sys.path)
    for name in kept:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name == "nsa" or name.startswith("nsa.")]:
        del sys.modules[name]
    sys.modules.update(kept)
    sys.path[:] = path


def test_a_process_imports_its_own_side_before_the_current_folder(
    repository: Path, temporary: Path, without_nsa: None
) -> None:
    with checkout.checked_out("HEAD~1", repository) as old:
        nsa_version.use(old.folder)
        assert sys.modules["nsa"].VERSION == 1


def test_a_process_that_holds_another_nsa_refuses(
    repository: Path, temporary: Path, without_nsa: None
) -> None:
    with (
        checkout.checked_out("HEAD", repository) as one,
        checkout.checked_out("HEAD~1", repository) as other,
    ):
        nsa_version.use(one.folder)
        with pytest.raises(nsa_version.WrongSide, match="imported first"):
            nsa_version.use(other.folder)
        with pytest.raises(nsa_version.WrongSide, match="wanted it from"):
            nsa_version.verify(other.folder)
        foreign = types.ModuleType("nsa.foreign")
        foreign.__file__ = str(ROOT / "nsa" / "config.py")
        sys.modules["nsa.foreign"] = foreign
        with pytest.raises(nsa_version.WrongSide, match=r"nsa\.foreign"):
            nsa_version.verify(one.folder)


def test_a_folder_without_a_package_does_not_fall_back_to_the_installed_one(
    tmp_path: Path, without_nsa: None
) -> None:
    (tmp_path / "nsa").mkdir()  # a bare folder would lose to any real package further down the path
    with pytest.raises(nsa_version.WrongSide):
        nsa_version.use(tmp_path)


@pytest.mark.parametrize(
    "text, named",
    [
        ("4f1c2d3e" * 5, True),
        ("4f1c2d3", True),
        ("4F1C2D3E", True),
        ("main", False),
        ("HEAD~1", False),
        ("../elsewhere", False),
        ("/tmp/elsewhere", False),
        ("4f1c2d3e\n", False),
        ("", False),
        (None, False),
    ],
)
def test_a_stored_file_names_commits_only(text: str | None, named: bool) -> None:
    assert checkout.is_commit(text) is named
