"""Fixtures that several test files share."""

import pytest

from tests.perfbench.ab_bench import bench, template

__all__ = ["bench", "template"]


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small GEMM in place of the one that takes a second on a CPU; use it with ``one_thread``,
    which restores the threads.
    """
    from perfbench.worker import measure

    real = measure._gemm
    monkeypatch.setattr(measure, "_gemm", lambda size, job: real(min(size, 32), job))


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables as a terminal of 120 columns shows them, whatever runs the tests: a worker of
    pytest-xdist says 80.
    """
    monkeypatch.setenv("COLUMNS", "120")
