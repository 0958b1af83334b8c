"""Fixtures that several test files share."""

import pytest

from tests.perfbench.ab_bench import bench, template

__all__ = ["bench", "template"]


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables as a terminal of 120 columns shows them, whatever runs the tests: beside other workers pytest-xdist says 80."""
    monkeypatch.setenv("COLUMNS", "120")
