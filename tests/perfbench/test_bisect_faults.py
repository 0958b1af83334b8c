"""What is no fault of a commit ends a bisect, which is then resumed: it skips no commit."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from perfbench.commands import app
from perfbench.errors import Exit, PerfbenchError, unwritable
from perfbench.machine.environment import TargetFit
from perfbench.records import Status
from perfbench.runner.ab import bisect_pairs, checkout, schedule, version_executor
from tests.perfbench.ab_bench import SHORT, FakeSide
from tests.perfbench.bisect_bench import marked_sides
from tests.perfbench.test_bisect import bisect, folder, here, history

__all__ = ["here", "history"]  # fixtures


def full(good: str) -> PerfbenchError:
    return unwritable(Path("run.jsonl"), OSError(errno.ENOSPC, "disk full"), "free space")


def busy(good: str) -> PerfbenchError:
    return PerfbenchError(Exit.ENVIRONMENT, "GPU 0 is busy. Next: wait")


def of_git(good: str) -> PerfbenchError:
    return checkout.CannotBuild("git says: fatal: no space left")


def of_good(good: str) -> PerfbenchError:
    return checkout.CannotBuild("the good commit does not start", good)


@pytest.mark.parametrize("fault", [full, busy, of_git, of_good])
def test_a_fault_of_the_machine_ends_the_bisect_and_is_resumed(
    here: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, fault
) -> None:  # type: ignore[no-untyped-def]
    measure = bisect_pairs.measure_pair

    def refuse(spec, *arguments, **options):  # type: ignore[no-untyped-def]
        if not spec.name.endswith("-whole"):
            raise fault(here[0])
        return measure(spec, *arguments, **options)

    monkeypatch.setattr(bisect_pairs, "measure_pair", refuse)
    assert bisect("--good", here[0], "--bad", "HEAD", SHORT) == fault(here[0]).exit_code
    err = capsys.readouterr().err
    assert str(fault(here[0])) in err and f"perfbench bisect --resume {folder()}" in err
    assert "skipped" not in err
    monkeypatch.setattr(bisect_pairs, "measure_pair", measure)
    assert app.invoke(["bisect", "--resume", str(folder())]) == 3
    assert here[7][:12] in capsys.readouterr().out


def test_a_good_commit_that_fails_in_a_step_skips_no_commit(
    here: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def failing(
        fit: TargetFit, versions: Sequence[checkout.Checkout]
    ) -> Iterator[tuple[FakeSide, ...]]:
        with marked_sides(fit, versions) as sides:
            if versions[1].name != here[8]:
                sides[0].ends[SHORT] = Status.OOM
            yield sides

    monkeypatch.setattr(schedule, "prepared_versions", failing)
    assert bisect("--good", here[0], "--bad", "HEAD", SHORT) == 8
    err = capsys.readouterr().err
    assert "the base gave no speed to compare with" in err and "skipped: " not in err
    assert f"perfbench bisect --resume {folder()}" in err
    monkeypatch.setattr(schedule, "prepared_versions", marked_sides)
    assert app.invoke(["bisect", "--resume", str(folder())]) == 3


def test_a_commit_whose_own_cell_fails_is_skipped(
    here: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def failing(
        fit: TargetFit, versions: Sequence[checkout.Checkout]
    ) -> Iterator[tuple[FakeSide, ...]]:
        with marked_sides(fit, versions) as sides:
            if versions[1].name in (here[3], here[4]):
                sides[1].ends[SHORT] = Status.OOM
            yield sides

    monkeypatch.setattr(schedule, "prepared_versions", failing)
    assert bisect("--good", here[0], "--bad", "HEAD", SHORT) == 3
    assert "skipped: while confirming: " in capsys.readouterr().err


def test_a_busy_gpu_before_a_server_starts_is_no_fault_of_the_version(tmp_path: Path) -> None:
    from perfbench.records import Source

    def refuse() -> None:
        raise busy("")

    source = Source(commit=None, dirty_sha256=None, reason="a folder")
    one = checkout.Checkout("b", tmp_path, source)
    with (
        version_executor.VersionExecutor(one, before_block=refuse) as side,
        pytest.raises(PerfbenchError) as caught,
    ):
        side.prepare([])
    assert caught.value.exit_code is Exit.ENVIRONMENT
