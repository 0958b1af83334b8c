"""The report of learning, from four runs of a tiny model: its numbers are those of the logs."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from nsa.train import cli
from nsa.train.run_folder import write_resolved
from tests.nsa.train.test_loop import config_of, log_of, trained
from tools.studies import learning

SEEDS = (0, 1)


def run(out: Path, **train: Any) -> Path:
    config = config_of(train={"eval_every": 4, "steps": 8, **train}, checkpoint={"every": 0})
    out.mkdir()
    write_resolved(out, config)
    trained(config, out)
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("learning")
    return [
        run(root / f"{attention}-{seed}", attention=attention, seed=seed)
        for attention in ("nsa", "dense")
        for seed in SEEDS
    ]


def bits(out: Path, step: int) -> float:
    return next(
        float(line["bits_per_byte"])
        for line in log_of(out)
        if line.get("kind") == "eval" and line["step"] == step
    )


def test_the_report_states_the_means_of_the_last_evaluations(
    runs: list[Path], tmp_path: Path
) -> None:
    stored = tmp_path / "runs.json.gz"
    assert learning.main(["collect", *map(str, runs), "--out", str(stored)]) == 0
    assert learning.main(["render", str(stored), "--out", str(tmp_path / "report")]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    nsa, dense = fmean(bits(out, 8) for out in runs[:2]), fmean(bits(out, 8) for out in runs[2:])
    change = 100 * (nsa / dense - 1)
    assert text.startswith(f"# NSA {nsa:.4f} and dense {dense:.4f} held-out bits a byte")
    assert f"({change:+.2f} %), {'within' if change <= 2 else 'NOT within'} 2 %" in text
    for out in runs:
        sha256 = json.loads((out / "config.json").read_text())["sha256"]
        assert sha256[:12] in text
    assert (tmp_path / "report" / "learning.png").stat().st_size > 10_000


def test_the_report_shows_the_blocks_of_a_run(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, file = tmp_path / "runs.json.gz", tmp_path / "b.npz"
    words = ["blocks", str(runs[1]), "--out", str(file), "--tokens", "300", "--json"]
    assert cli.invoke(words) == 0
    about = json.loads(capsys.readouterr().out)
    collect = ["collect", *map(str, runs), "--out", str(stored)]
    assert learning.main([*collect, "--blocks", str(file)]) == 0
    assert learning.main(["render", str(stored), "--out", str(tmp_path / "report")]) == 0
    text = (tmp_path / "report" / "report.md").read_text()
    head = "## Chosen blocks of run nsa-1, step 8: 300 tokens (held out), "
    assert f"{head}{about['held_out']['loss_nats']:.4f} nats a token\n" in text
    blocks = about["layers"]["0"]["blocks"]
    assert f"| queries that choose | {blocks['queries_that_choose']} |\n" in text
    shared = blocks["shared_with_previous_share"]
    assert f"| free blocks shared with it | {100 * shared:.1f} % |\n" in text
    for octave, share in blocks["distance_share"].items():
        assert f"| free blocks {octave} back | {100 * share:.1f} % |\n" in text


def test_blocks_of_no_collected_run_are_refused(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored, file = tmp_path / "runs.json.gz", tmp_path / "b.npz"
    words = ["blocks", str(runs[1]), "--out", str(file), "--tokens", "300"]
    assert cli.invoke(words) == 0
    collect = ["collect", str(runs[0]), "--out", str(stored), "--blocks"]
    assert learning.main([*collect, str(file)]) == 2
    assert f"--blocks {file} is of the run nsa-1 (config " in capsys.readouterr().err
    file.write_bytes(b"no zip")
    assert learning.main([*collect, str(file)]) == 2
    assert f"--blocks {file} is no file of blocks" in capsys.readouterr().err
    assert not stored.exists()


def test_runs_of_unlike_settings_are_not_compared(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = run(tmp_path / "other", lr=1e-3)
    stored = tmp_path / "runs.json.gz"
    assert learning.main(["collect", str(runs[0]), str(other), "--out", str(stored)]) == 0
    assert learning.main(["render", str(stored), "--out", str(tmp_path / "report")]) == 2
    assert "got runs of 2 settings" in capsys.readouterr().err


def test_a_run_without_evaluations_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = run(tmp_path / "blind", eval_every=0)
    assert learning.main(["collect", str(out), "--out", str(tmp_path / "x.gz")]) == 2
    assert "has no evaluation" in capsys.readouterr().err
