"""`perfbench init`, and `@NAME` wherever a matrix is taken."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from perfbench.commands import app
from perfbench.matrix import load_matrix, shipped_file, shipped_names

ROOT = Path(__file__).parents[2]
WRITTEN = {"matrices/cpu.yaml", "matrices/README.md", ".github/workflows/perfbench-cpu.yml"}


def files(folder: Path) -> set[str]:
    return {one.relative_to(folder).as_posix() for one in folder.rglob("*") if one.is_file()}


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_it_writes_a_matrix_a_workflow_and_a_readme(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """FAULTS.md, "installed from the wheel": examples named files that no wheel had."""
    assert app.invoke(["init", "cpu"]) == 0
    said = capsys.readouterr()
    assert files(tmp_path) == WRITTEN
    assert all(f"wrote {name}" in said.err for name in WRITTEN)
    steps = [line.split()[1] for line in said.out.splitlines() if line.startswith("  perfbench ")]
    assert steps == ["plan", "run", "baseline", "check"]
    assert Path("matrices/cpu.yaml").read_bytes() == (ROOT / "matrices/cpu.yaml").read_bytes()
    assert app.invoke(["plan", "matrices/cpu.yaml"]) == 0


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_matrix_can_be_taken(name: str, tmp_path: Path) -> None:
    """Its workflow is YAML that checks it; one of a GPU never runs on pull requests."""
    assert app.invoke(["init", name]) == 0
    text = (tmp_path / f".github/workflows/perfbench-{name}.yml").read_text(encoding="utf-8")
    workflow = YAML(typ="safe").load(text)
    job = workflow["jobs"]["check"]
    (check,) = (step["run"] for step in job["steps"] if step.get("name") == "Check")
    assert check == f".venv/bin/perfbench check matrices/{name}.yaml"
    assert load_matrix(f"matrices/{name}.yaml").name == name
    gpu = load_matrix(f"@{name}").target.gpu
    assert ("pull_request" in workflow["on"]) == (gpu == "none")
    assert "<<" not in text and ">>" not in text and "${{ secrets.PERFBENCH_HISTORY }}" in text
    if gpu == "none":
        comment = workflow["jobs"]["comment"]
        assert comment["permissions"] == {"pull-requests": "write"} and "permissions" not in job
        assert "checkout" not in str(comment)  # its token never meets code of the change
        said = f".venv/bin/perfbench comment runs --post --expect {name}"
        assert comment["steps"][-1]["run"] == said
    else:
        assert "comment" not in workflow["jobs"]
        assert job["runs-on"] == ["self-hosted", "gpu", gpu.lower()] and "if" in job


def test_a_card_without_a_matrix_of_its_name_is_its_gate(tmp_path: Path) -> None:
    assert app.invoke(["init", "h200"]) == 0
    assert (tmp_path / "matrices/h200-gate.yaml").is_file()


def test_a_second_matrix_joins_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is there with the same lines is kept, and not said to be written."""
    assert app.invoke(["init", "cpu"]) == app.invoke(["init", "a100"]) == 0
    capsys.readouterr()
    assert app.invoke(["init", "cpu"]) == 0
    assert "wrote" not in capsys.readouterr().err
    assert len(files(tmp_path)) == 5


def test_a_readme_that_was_edited_stays(tmp_path: Path) -> None:
    assert app.invoke(["init", "cpu"]) == 0
    mine = tmp_path / "matrices/README.md"
    mine.write_text("mine", encoding="utf-8")
    assert app.invoke(["init", "a100"]) == 0
    assert mine.read_text(encoding="utf-8") == "mine" and len(files(tmp_path)) == 5


@pytest.mark.parametrize("name", sorted(WRITTEN - {"matrices/README.md"}))
def test_nothing_is_overwritten(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file is named, what to do next is said, and no other file is written."""
    mine = tmp_path / name
    mine.parent.mkdir(parents=True)
    mine.write_bytes(b"mine \xff")
    assert app.invoke(["init", "cpu"]) == 2
    said = capsys.readouterr().err
    assert name in said and "nothing was written" in said and "Next: " in said
    assert mine.read_bytes() == b"mine \xff" and files(tmp_path) == {name}


def test_a_link_to_nowhere_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "matrices").mkdir()
    (tmp_path / "matrices/cpu.yaml").symlink_to(tmp_path / "elsewhere.yaml")
    assert app.invoke(["init", "cpu"]) == 2
    assert not (tmp_path / "elsewhere.yaml").exists()


def test_a_file_where_a_folder_must_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "matrices").write_text("")
    assert app.invoke(["init", "cpu"]) == 2
    assert "Next: " in capsys.readouterr().err


def test_a_shipped_matrix_is_that_of_the_checkout(capsys: pytest.CaptureFixture[str]) -> None:
    """Named anywhere, with the same cells, hashes and name; a file in the way does not count."""
    Path("@cpu").write_text("no matrix")
    assert app.invoke(["plan", "@cpu", "--json"]) == 0
    here = json.loads(capsys.readouterr().out)
    assert app.invoke(["plan", str(ROOT / "matrices/cpu.yaml"), "--json"]) == 0
    there = json.loads(capsys.readouterr().out)
    assert here["cells"] == there["cells"] and here["cells"]
    assert load_matrix("@cpu").path == "@cpu"  # what reports tell the reader to type
    assert load_matrix("@h200").path == "@h200-gate"


@pytest.mark.parametrize(
    ("name", "near"),
    [("@cpux", "'cpu'"), ("@nightly-gate-h20", "'nightly-gate-h200'"), ("@H100", "'h100'")],
)
@pytest.mark.parametrize("command", [["plan"], ["run"], ["check"], ["ab", "a", "b"]])
def test_an_unknown_name_lists_the_nearest(
    command: list[str], name: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.invoke([*command, name]) == 2
    said = capsys.readouterr().err
    assert f"did you mean {near}?" in said and "Next: " in said


@pytest.mark.parametrize("name", ["@", "@../matrices/cpu", "@/etc/passwd", "@zzzzzz", "@" * 5000])
def test_a_name_like_none_lists_them_all(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.invoke(["plan", name]) == 2
    said = capsys.readouterr().err
    assert all(one in said for one in shipped_names()) and len(said) < 1500


def test_there_is_one_copy() -> None:
    """The build takes the checkout's folder (tests/test_wheel.py compares what a wheel holds)."""
    assert {ROOT / "matrices" / f"{name}.yaml" for name in shipped_names()} == set(
        (ROOT / "matrices").glob("*.yaml")
    )
    assert shipped_file("cpu") == ROOT / "matrices/cpu.yaml"
    assert not (ROOT / "perfbench/matrices").exists()


def test_a_shell_completes_shipped_names(tmp_path: Path) -> None:
    """And the axes of a matrix that is named so."""
    program = tmp_path / "perfbench"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m perfbench "$@"\n')
    program.chmod(0o755)

    def completed(line: str) -> list[str]:
        words = {"_PERFBENCH_COMPLETE": "complete_bash", "COMP_WORDS": line}
        words["COMP_CWORD"] = str(len(line.split(" ")) - 1)
        env = {**words, "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        done = subprocess.run([program], env=env, capture_output=True, text=True, check=False)
        return done.stdout.split()

    assert completed("perfbench init cp") == ["cpu", "cpu-gate"]
    assert "path=v1" in completed("perfbench run @cpu --only path=v")
