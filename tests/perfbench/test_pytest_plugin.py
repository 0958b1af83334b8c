"""The fixture `perfbench` of pytest: a red verdict fails the test with the verdict's own lines."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pandas
import pytest
import scipy.stats

from nsa.installing import pip_install
from tests.perfbench.ab_bench import MATRIX, Bench

pytest_plugins = ["pytester"]
# pytester forgets what was imported inside; these cannot be loaded twice in a process.
LOADED_ONCE = (pandas, scipy.stats)
ROOT = Path(__file__).parents[2]
# Whether this environment was installed with the entry point or not: the same fixture.
CONFTEST = "from perfbench.pytest_plugin.fixture import perfbench\n"
TESTS = """
def test_check(perfbench):
    perfbench.check("small.yaml", baseline="base.json", no_confirm=True)

def test_run(perfbench):
    found = perfbench.run("small.yaml", only="seq_len=128")
    assert found.ok and len(found.rows) == 4

def test_wrong_use(perfbench):
    perfbench.check("small.yaml", only="path=v9")
"""


@pytest.fixture
def tests_of_a_user(bench: Bench, pytester: pytest.Pytester) -> pytest.Pytester:
    """small.yaml with a baseline of 1000 tok/s, in a folder with three tests."""
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(TESTS)
    (pytester.path / "small.yaml").write_text(MATRIX, encoding="utf-8")
    assert bench.run("run", "small.yaml", "--out", "first") == 0
    (first,) = Path("first").iterdir()
    assert bench.run("baseline", "promote", str(first), "--to", "base.json") == 0
    return pytester


def ran(tests: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return tests.runpytest_inprocess("-p", "no:cacheprovider", "-p", "no:xdist", *arguments)


def test_green_verdicts_pass_and_errors_are_no_verdicts(tests_of_a_user: pytest.Pytester) -> None:
    found = ran(tests_of_a_user)
    found.assert_outcomes(passed=2, failed=1)
    found.stdout.fnmatch_lines(["*PerfbenchError: *v9*"])


def test_a_red_verdict_is_the_message(bench: Bench, tests_of_a_user: pytest.Pytester) -> None:
    bench.current.speed = 500.0
    found = ran(tests_of_a_user, "-k", "test_check")
    found.assert_outcomes(failed=1)
    found.stdout.fnmatch_lines(
        [
            "E*AssertionError: v2 * forward -* SUSPECT, exit 7: *",
            "E*SUSPECT seq_len=128: -* % (* -> 500 tok/s)*",
            "E*report: reports/runs/*/report.md",
        ]
    )
    assert "fixture.py" not in found.stdout.str()  # the line shown is the user's own


def test_a_matrix_that_skips_this_machine_is_a_skip(tests_of_a_user: pytest.Pytester) -> None:
    matrix = MATRIX.replace("gpu: none", "gpu: H100, on_mismatch: skip")
    (tests_of_a_user.path / "small.yaml").write_text(matrix, encoding="utf-8")
    found = ran(tests_of_a_user, "-k", "test_run", "-rs")
    found.assert_outcomes(skipped=1)
    found.stdout.fnmatch_lines(["*the matrix skips this machine: nothing was measured*"])


PROBE = """
import sys

def test_nothing_heavy_is_loaded():
    heavy = {"torch", "typer", "pydantic", "pandas", "numpy"}
    assert not heavy & {name.partition(".")[0] for name in sys.modules}
"""
WITHOUT = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "typer":
            raise ModuleNotFoundError("No module named 'typer'", name="typer")
sys.meta_path.insert(0, Absent())
"""


def alone(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """pytest in a process of its own, with the plugin and no other."""
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    plugin = ("-p", "perfbench.pytest_plugin.fixture", "-p", "no:cacheprovider")
    command = [sys.executable, "-m", "pytest", "-q", *plugin, *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def test_a_suite_that_does_not_use_it_pays_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_probe.py").write_text(PROBE, encoding="utf-8")
    done = alone(tmp_path)
    assert done.returncode == 0, done.stdout


def test_without_the_extra_only_its_users_fail(tmp_path: Path) -> None:
    """`pip install nsa-perfbench` brings nsa alone, and the plugin is registered all the same."""
    (tmp_path / "conftest.py").write_text(WITHOUT, encoding="utf-8")
    (tmp_path / "test_it.py").write_text(TESTS + "\ndef test_mine(): ...\n", encoding="utf-8")
    done = alone(tmp_path)
    assert "3 failed, 1 passed" in done.stdout
    assert f"Next: {pip_install('perfbench')}" in done.stdout
