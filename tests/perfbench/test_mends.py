"""A message says what to write instead.

Row of the faults: messages.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from nsa.capability import KNOWN_GPUS
from perfbench.commands import app
from perfbench.commands.app import app as typer_app
from tests.perfbench.test_cli import MATRIX, FakeExecutor, executor, run_folder

__all__ = ["executor"]


@pytest.mark.parametrize(
    ("was", "now", "words"),
    [
        ("path: [v2, dense]", "path: v2", "got the text 'v2', wanted a list; write [v2]"),
        ("seq_len: [128, 256]", "seq_len: 128", "got 128, wanted a list; write [128]"),
        ("model: tiny", "model:\n\ttiny", "m.yaml:5: not valid YAML: a TAB; use spaces"),
        ("model: tiny", "model: tiny\nlimits:\n\ttimeout_s: 1", "a TAB; use spaces"),
        ("{processes: 2}", "{processes: '2'}", "got the text '2', wanted a number; write 2"),
        ("{processes: 2}", "{max_s: 1.5h}", "got the text '1.5h', wanted a number; write 5400"),
        ("{processes: 2}", "{min_sample_ms: 1s}", "wanted a number; write 1000"),
        ("model: tiny", "model: tiny\nlimits: {timeout_s: 1m}", "wanted a number; write 60"),
        ("model: tiny", "model: tiny\nlimits: {timeout_s: soon}", "should be a valid number"),
    ],
)
def test_a_matrix_is_mended_as_the_message_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], was: str, now: str, words: str
) -> None:
    assert was in MATRIX
    file = tmp_path / "m.yaml"
    file.write_text(MATRIX.replace(was, now), encoding="utf-8")
    assert app.invoke(["plan", str(file)]) == 2
    assert words in capsys.readouterr().err


def test_several_values_of_only(executor: FakeExecutor, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.invoke(["plan", "small.yaml", "--only", "path=v2,dense"]) == 2
    err = capsys.readouterr().err
    mend = "--only path=v2 --only path=dense"
    assert mend in err
    assert app.invoke(["plan", "small.yaml", *mend.split()]) == 0
    assert app.invoke(["plan", "small.yaml", "--only", "seq_len=128, 256"]) == 2
    assert "--only seq_len=128 --only seq_len=256" in capsys.readouterr().err


def test_the_help_of_gpu_names_every_card() -> None:
    shown = CliRunner().invoke(typer_app, ["plan", "--help"]).output
    assert all(name in shown for name in (*KNOWN_GPUS, "none"))


@pytest.mark.parametrize("command", ["gate", "check"])
def test_a_missing_baseline_is_told_once_with_the_run_that_makes_one(
    executor: FakeExecutor, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert app.invoke(["run" if command == "gate" else "check", "small.yaml"]) in (0, 9)
    if command == "gate":
        capsys.readouterr()
        assert app.invoke(["gate", str(run_folder())]) == 9
    out, err = capsys.readouterr()
    both = " ".join((out + err).split())
    assert both.count("make one from a green run") == 1
    assert f"perfbench baseline promote {run_folder()} --to" in both and "promote RUN" not in both
