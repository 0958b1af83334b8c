"""A run or a baseline that was edited after it was written is CORRUPT, exit 9; one of an older
schema, which has no digests, is read and called unverified.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perfbench.commands import app
from perfbench.errors import Exit
from perfbench.records import load_baseline, read_run
from perfbench.records.run_file import open_for_resume
from tests.perfbench.ab_bench import LONG, SHORT, Bench
from tests.perfbench.digested import edit_baseline, edit_run, run_bytes

HOME = Path(__file__).parents[1] / "data" / "written-by-0a70f94"
Lines = list[bytes]
BASELINE = Path("baseline.json")


@pytest.fixture
def run(bench: Bench, capsys: pytest.CaptureFixture[str]) -> Path:
    """The run file of two cells and four replicates, which BASELINE was promoted from."""
    assert bench.run("run", "small.yaml") == 0
    (folder,) = Path("reports/runs").iterdir()
    assert bench.run("baseline", "promote", str(folder), "--to", str(BASELINE)) == 0
    assert gate(folder, capsys)[0] == 0
    return folder / "run.jsonl"


def gate(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = app.invoke(["gate", str(path), "--baseline", str(BASELINE)])
    out, err = capsys.readouterr()
    return code, out if code == 0 else err


def doubled(line: bytes) -> bytes:
    """A row twice as fast, its samples and its speed alike."""
    row = json.loads(line)
    row["samples_s"] = [s / 2 for s in row["samples_s"]]
    row["tok_per_s"] *= 2
    return json.dumps(row).encode()


def of(cell: str, line: bytes) -> bool:
    return json.loads(line).get("cell_id") == cell


def without_digest(line: bytes) -> bytes:
    row = json.loads(line)
    del row["line_sha256"]
    return json.dumps(row).encode()


EDITS: dict[str, Callable[[Lines], Lines]] = {
    "samples and tok/s alike": lambda lines: [*lines[:-1], doubled(lines[-1])],
    "one digit": lambda lines: [*lines[:-1], lines[-1].replace(b"5.0", b"5.1", 1)],
    "a space": lambda lines: [*lines[:-1], lines[-1].replace(b": ", b":  ", 1)],
    "a cell removed": lambda lines: [line for line in lines if not of(SHORT, line)],
    "a replicate removed": lambda lines: [*lines[:3], *lines[4:]],
    "a replicate copied": lambda lines: [*lines, lines[-1]],
    "two lines exchanged": lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]],
    "the matrix": lambda lines: (
        [lines[0].replace(b"min_effect_pct: 5", b"min_effect_pct: 9"), *lines[1:]]
    ),
    "another run's manifest": lambda lines: [lines[0].replace(b"small", b"large"), *lines[1:]],
    "no digest in one line": lambda lines: [*lines[:-1], without_digest(lines[-1])],
    "no digest at all": lambda lines: [without_digest(line) for line in lines],
    "called older": lambda lines: [
        lines[0].replace(b'"schema_version": 3', b'"schema_version": 2'),
        *lines[1:],
    ],
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gz"])
@pytest.mark.parametrize("edit", EDITS)
def test_an_edited_run_is_corrupt(
    run: Path, edit: str, packed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    before = run.read_bytes()
    data = b"\n".join([*EDITS[edit](before.splitlines()), b""])
    assert data != before
    if packed:
        run.with_name("run.jsonl.gz").write_bytes(gzip.compress(data))
        run.unlink()
    else:
        run.write_bytes(data)
    code, err = gate(run.parent, capsys)
    assert code == Exit.BASELINE == 9 and "CORRUPT" in err and err.count("\n") == 1


def edited_matrix(records: list[dict[str, Any]]) -> None:
    records[0]["matrix_text"] = records[0]["matrix_text"].replace("min_effect_pct: 5", "")


def renamed_config(records: list[dict[str, Any]]) -> None:
    for record in [*records[0]["cells"], *records[1:]]:
        record["config_sha256"] = "0" * 64


@pytest.mark.parametrize(
    "change, words",
    [
        (edited_matrix, "the matrix's text is not that of its sha256"),
        (lambda records: records.append(records[-1]), "a replicate was copied"),
        (renamed_config, "config"),
    ],
)
def test_digests_made_again_do_not_hide_what_contradicts_itself(
    run: Path,
    change: Callable[[list[dict[str, Any]]], object],
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    edit_run(run, change)
    code, err = gate(run.parent, capsys)
    assert code == Exit.BASELINE and words in err and err.count("\n") == 1


def test_a_speed_that_its_samples_do_not_give_is_impossible(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also within the per cent that was allowed once."""
    edit_run(run, lambda records: records[-1].update(tok_per_s=records[-1]["tok_per_s"] * 1.005))
    assert gate(run.parent, capsys)[0] == Exit.NOT_TRUE


def test_a_run_of_an_older_schema_is_read_and_called_unverified(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "unverified" not in gate(run.parent, capsys)[1]
    old = HOME / "runs" / "small"
    assert read_run(old).sha256 is None and not read_run(old).torn
    assert app.invoke(["gate", str(old), "--baseline", str(HOME / "baselines/small.json")]) == 0
    out = " ".join(capsys.readouterr().out.split())
    run_id = read_run(old).manifest.run_id
    assert f"unverified, written without digests: run {run_id}, the baseline of {run_id}" in out
    pair = str(HOME / "runs" / "small-ab")
    app.invoke(["compare", pair])
    assert "unverified" in capsys.readouterr().out
    app.invoke(["compare", pair, "--json"])
    assert any("unverified" in note for note in json.loads(capsys.readouterr().out)["notes"])


def test_an_older_run_is_resumed_in_its_own_schema(tmp_path: Path) -> None:
    folder = shutil.copytree(HOME / "runs" / "small", tmp_path / "r")
    last = read_run(folder).replicates[-1]
    writer, _ = open_for_resume(folder)
    with writer:
        writer.append(last.model_copy(update={"attempt": 9}))
    found = read_run(folder)
    assert found.sha256 is None and found.replicates[-1].attempt == 9


def test_a_resumed_run_goes_on_with_the_chain(run: Path) -> None:
    """After a torn line, twice, and on another card."""
    whole = run.read_bytes()
    for _ in range(2):
        run.write_bytes(run.read_bytes() + b'{"kind": "repl')
        writer, found = open_for_resume(run.parent)
        with writer:
            assert found.torn
            row = found.replicates[-1]
            writer.append(row.model_copy(update={"attempt": row.attempt + 1}))
    found = read_run(run.parent)
    assert len(found.replicates) == 10 and run.read_bytes().startswith(whole)
    assert found.sha256 == json.loads(run.read_bytes().splitlines()[-1])["line_sha256"]


def test_gzip_keeps_the_digests(run: Path) -> None:
    plain = read_run(run.parent)
    run.with_name("run.jsonl.gz").write_bytes(gzip.compress(run.read_bytes()))
    run.unlink()
    assert read_run(run.parent) == plain and plain.sha256


def test_a_newer_schema_is_refused_before_its_digests(run: Path) -> None:
    edit_run(run, lambda records: records[0].update(schema_version=99))
    assert app.invoke(["gate", str(run.parent)]) == Exit.USAGE


def test_injections_are_no_edit(bench: Bench, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.run("run", "small.yaml", "--inject", f"slowdown=10%@{LONG}") == 0
    (folder,) = Path("reports/runs").iterdir()
    assert read_run(folder).sha256 and app.invoke(["report", str(folder)]) == 0


# --- baselines


def test_a_baseline_names_its_run_and_carries_its_digest(run: Path) -> None:
    found = load_baseline(BASELINE)
    assert found.run_sha256 == read_run(run).sha256 and found.is_verified


@pytest.mark.parametrize(
    "change",
    [
        lambda content: content["cells"][LONG].update(tok_per_s=[500.0] * 4),
        lambda content: content["cells"].pop(SHORT),
        lambda content: content["source"].update(commit="0" * 40),
        lambda content: content.pop("content_sha256"),
        lambda content: content.update(schema_version=2),
    ],
    ids=["slower", "a cell removed", "commit", "no digest", "called older"],
)
def test_an_edited_baseline_is_corrupt(
    run: Path, change: Callable[[dict[str, Any]], object], capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(BASELINE.read_text())
    change(content)
    BASELINE.write_text(json.dumps(content))
    capsys.readouterr()
    assert app.invoke(["gate", str(run.parent), "--baseline", str(BASELINE)]) == Exit.BASELINE
    assert "CORRUPT" in capsys.readouterr().out


def test_a_baseline_written_with_other_spaces_is_the_same(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(BASELINE.read_text())
    BASELINE.write_text(json.dumps(dict(reversed(content.items())), separators=(",", ":")))
    assert gate(run.parent, capsys)[0] == 0


# --- what is no file


@pytest.fixture
def odd(tmp_path: Path) -> dict[str, Path]:
    """Paths that no run is."""
    found = {"zero": Path("/dev/zero"), "fifo": tmp_path / "fifo", "socket": tmp_path / "socket"}
    os.mkfifo(found["fifo"])
    server = socket.socket(socket.AF_UNIX)
    with server:
        server.bind(str(found["socket"]))
    found["folder"] = tmp_path / "folder"
    found["folder"].mkdir()
    found["fifo inside"] = tmp_path / "inside"
    found["fifo inside"].mkdir()
    os.mkfifo(found["fifo inside"] / "run.jsonl")
    found["pair of fifos"] = tmp_path / "pair"
    for side in "ab":
        (found["pair of fifos"] / side).mkdir(parents=True)
        os.mkfifo(found["pair of fifos"] / side / "run.jsonl")
    found["huge"] = tmp_path / "huge.jsonl"
    with found["huge"].open("wb") as file:
        file.truncate(2**40)
    return found


KINDS = ("zero", "fifo", "socket", "folder", "fifo inside", "pair of fifos", "huge")


@pytest.mark.parametrize("command", ["gate", "report", "compare", "baseline promote"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_in_a_line(
    odd: dict[str, Path], command: str, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert app.invoke([*command.split(), str(odd[kind])]) in (Exit.USAGE, Exit.BASELINE)
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("perfbench: ") and err.count("\n") == 1
    if kind in ("zero", "fifo") and command == "gate":  # before a byte of it is read
        assert "wanted a regular file" in err


@pytest.mark.parametrize("kind", KINDS)
def test_no_such_file_is_a_baseline_or_a_matrix(
    odd: dict[str, Path], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    old = HOME / "runs" / "small"
    assert app.invoke(["gate", str(old), "--baseline", str(odd[kind])]) == Exit.BASELINE
    assert app.invoke(["baseline", "show", str(odd[kind])]) == Exit.BASELINE
    capsys.readouterr()
    assert app.invoke(["plan", str(odd[kind])]) == Exit.USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_an_absurdly_long_line_is_refused(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("perfbench.records.run_file.MAX_LINE_BYTES", 5000)
    line = run.read_bytes().splitlines()[0]
    run.write_bytes(run_bytes([line[:-1] + b', "later": "' + b"x" * 5000 + b'"}']))
    assert app.invoke(["gate", str(run)]) == Exit.BASELINE


def test_an_older_baseline_can_be_edited_and_says_that_nobody_can_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = shutil.copy(HOME / "baselines" / "small.json", tmp_path / "b.json")
    edit_baseline(Path(path), lambda content: content.update(later=1))
    assert app.invoke(["gate", str(HOME / "runs" / "small"), "--baseline", str(path)]) == 0
    assert "unverified" in capsys.readouterr().out


def test_the_schema_of_a_line_names_its_digest(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert app.invoke(["schema", "result"]) == 0
    defined = json.loads(capsys.readouterr().out)["$defs"]
    for line in run.read_bytes().splitlines():
        row = json.loads(line)
        assert "line_sha256" in row
        assert "line_sha256" in defined[row["kind"].capitalize()]["properties"]
