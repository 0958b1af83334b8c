"""Fixtures that several test files share."""

from pathlib import Path

import pytest

from tests.perfbench.ab_bench import bench, template

__all__ = ["bench", "template"]


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small GEMM in place of the one that takes a second on a CPU; use it with ``one_thread``,
    which restores the threads.
    """
    from perfbench.worker import gemm

    real = gemm.gemm
    monkeypatch.setattr(gemm, "gemm", lambda size, job: real(min(size, 32), job))


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables as a terminal of 120 columns shows them, whatever runs the tests: a worker of
    pytest-xdist says 80.
    """
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture(autouse=True)
def _no_look_at_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that measures looks at the load for a third of a second, and says what it finds."""
    monkeypatch.setattr("perfbench.machine.load.WINDOW_S", 0.0)
    monkeypatch.setattr("perfbench.machine.load.PROC", Path(__file__).parent)
