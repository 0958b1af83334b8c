"""The fixture `perfbench`: `def test_step(perfbench): perfbench.check("matrices/cpu.yaml")`.

Every pytest that has this wheel installed imports this module, so it imports nothing but pytest.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from nsa.installing import pip_install

if TYPE_CHECKING:
    from perfbench.commands import RunResult


class Measuring:
    """`perfbench.run` and `perfbench.check`, whose red verdict is an AssertionError."""

    def run(self, matrix: str, **options: Any) -> RunResult:
        """`perfbench.run`, with its options; AssertionError with the verdict's lines where its exit
        code is not 0. PerfbenchError: as there.
        """
        __tracebackhide__ = True
        return _green("run", matrix, options)

    def check(self, matrix: str, **options: Any) -> RunResult:
        """`perfbench.check`, likewise: a missing baseline fails, too."""
        __tracebackhide__ = True
        return _green("check", matrix, options)


@pytest.fixture
def perfbench() -> Measuring:
    """Measure in a test: `perfbench.check(MATRIX, only="path=auto")` fails where the command would
    exit with another code than 0.
    """
    return Measuring()


def _green(command: str, matrix: str, options: dict[str, Any]) -> RunResult:
    __tracebackhide__ = True
    try:
        from perfbench.commands import check_here, run_here
    except ModuleNotFoundError as error:
        pytest.fail(
            f"the harness is not installed: {error}. Next: {pip_install('perfbench')}",
            pytrace=False,
        )
    result = (check_here if command == "check" else run_here)(matrix, **options)
    if result.folder is None:
        # The matrix itself asks to skip other machines. A pass would claim a measurement, a failure
        # a regression; pytest reports a skip with its reason.
        pytest.skip(f"{result.headline}: nothing was measured. Next: run it where its target is")
    if not result.ok:
        report = f"\nreport: {result.folder}/report.md" if result.folder else ""
        raise AssertionError(result.text + report)
    return result
