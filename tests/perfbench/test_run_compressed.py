"""run.jsonl.gz: read wherever a run is taken, appended to nowhere, and refused in one line where it
is damaged.
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from perfbench import calibration
from perfbench.calibration import aa_pairs, aa_runs
from perfbench.commands import app
from perfbench.errors import Exit, PerfbenchError
from perfbench.records import run_file

DATA = Path(__file__).parents[1] / "data"
RUNS = DATA / "runs"
BASELINES = DATA / "written-by-0a70f94" / "baselines"
GREEN = RUNS / "h100-demo" / "green"
PACKED = (GREEN / "run.jsonl.gz").read_bytes()
PLAIN = gzip.decompress(PACKED)
CELL = "batch=8,path=dense,seq_len=4096,workload=train"


def laid(folder: Path, **files: bytes) -> Path:
    """``folder`` with the files of these kinds: plain, packed."""
    folder.mkdir(exist_ok=True)
    for kind, data in files.items():
        (folder / {"plain": "run.jsonl", "packed": "run.jsonl.gz"}[kind]).write_bytes(data)
    return folder


def refused(path: Path, read: Callable[[Path], object] = run_file.read_run) -> str:
    with pytest.raises(PerfbenchError) as caught:
        read(path)
    assert caught.value.exit_code is Exit.USAGE and "\n" not in str(caught.value)
    return str(caught.value)


def plain_copy(packed: Path, to: Path) -> Path:
    """``packed`` with every run.jsonl.gz decompressed by the standard library."""
    shutil.copytree(packed, to)
    for file in to.rglob("run.jsonl.gz"):
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        file.unlink()
    return to


def test_a_compressed_run_is_the_same_run(tmp_path: Path) -> None:
    plain = run_file.read_run(laid(tmp_path / "r", plain=PLAIN))
    assert run_file.read_run(GREEN) == run_file.read_run(GREEN / "run.jsonl.gz") == plain
    assert len(plain.replicates) == 10 and not plain.torn


def test_a_torn_last_line_is_dropped_as_in_a_plain_file(tmp_path: Path) -> None:
    cut = PLAIN[:-20]
    run = run_file.read_run(laid(tmp_path / "r", packed=gzip.compress(cut)))
    assert run.torn and len(run.replicates) == 9


def test_damage_inside_is_reported_with_its_line(tmp_path: Path) -> None:
    lines = PLAIN.splitlines(keepends=True)
    folder = laid(tmp_path / "r", packed=gzip.compress(lines[0] + b"{]\n" + lines[1]))
    assert f"{folder / 'run.jsonl.gz'}:2: not a JSON record" in refused(folder)


@pytest.mark.parametrize(
    "data, problem",
    [
        (PACKED[: len(PACKED) // 2], f"{len(PACKED) // 2} bytes of gzip data that was cut off"),
        (PACKED[:-4], "gzip data that was cut off"),
        (PACKED[:5], "gzip data that was cut off"),
        (PACKED[:3000] + b"\x00" * 50 + PACKED[3050:], "damaged gzip data"),
        (PACKED[:-8] + b"\x00" * 8, "damaged gzip data (CRC check failed"),
        (PACKED + b"more", "damaged gzip data"),
        (PLAIN, "no gzip data"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path: Path, data: bytes, problem: str) -> None:
    text = refused(laid(tmp_path / "r", packed=data))
    assert problem in text and "wanted a whole run file" in text and "Next: restore the" in text


def test_an_empty_file_holds_no_run(tmp_path: Path) -> None:
    for data in (b"", gzip.compress(b"")):
        assert "run.jsonl.gz:1: got an empty file" in refused(laid(tmp_path / "r", packed=data))


def test_a_file_that_grows_without_end_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_file, "MAX_BYTES", len(PLAIN))
    assert run_file.read_run(GREEN).replicates
    grown = laid(tmp_path / "r", packed=gzip.compress(PLAIN + PLAIN.splitlines()[1] + b"\n"))
    assert f"more than {len(PLAIN)} bytes once decompressed" in refused(grown)


def test_gzip_data_under_the_plain_name(tmp_path: Path) -> None:
    text = refused(laid(tmp_path / "r", plain=PACKED))
    assert "holds gzip data" in text and "Next: rename it to run.jsonl.gz" in text


def test_both_files_in_one_folder_are_refused(tmp_path: Path) -> None:
    folder = laid(tmp_path / "r", plain=PLAIN, packed=PACKED)
    for read in (run_file.read_run, run_file.open_for_resume):
        text = refused(folder, read)
        assert f"{folder} holds both run.jsonl and run.jsonl.gz" in text and "Next:" in text
    assert run_file.read_run(folder / "run.jsonl") == run_file.read_run(folder / "run.jsonl.gz")


def test_a_compressed_run_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = laid(tmp_path / "r", packed=PACKED)
    for path in (folder, folder / "run.jsonl.gz"):
        text = refused(path, run_file.open_for_resume)
        assert "only run.jsonl can be appended to" in text and "Next: `gunzip " in text
    assert (folder / "run.jsonl.gz").read_bytes() == PACKED
    small = DATA / "written-by-0a70f94" / "runs" / "small" / "run.jsonl"
    laid(folder, packed=gzip.compress(small.read_bytes()))
    matrix = DATA / "written-by-0a70f94" / "matrices" / "small.yaml"
    code = app.invoke(["run", str(matrix), "--resume", str(folder)])
    assert code == Exit.USAGE and "is a compressed run" in capsys.readouterr().err
    assert [file.name for file in folder.iterdir()] == ["run.jsonl.gz"]


# The same command on the packed and on the plain copy, without what names the place.
COMMANDS: dict[str, list[str]] = {
    "gate": ["gate", "RUN", "--baseline", str(BASELINES / "h100-demo.json"), "--json"],
    "explain": ["explain", "RUN", CELL, "--baseline", str(BASELINES / "h100-demo.json"), "--json"],
    "compare": ["compare", str(RUNS / "h100-demo" / "base"), "RUN", "--json"],
    "doctor": ["doctor", "--log", "RUN", "--json"],
}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("file", ["", "run.jsonl.gz"], ids=["folder", "file"])
def test_every_command_takes_it(
    command: str, file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed = shutil.copytree(GREEN, tmp_path / "packed")
    plain = plain_copy(GREEN, tmp_path / "plain")
    found = []
    for run in (packed / file, plain / file.removesuffix(".gz")):
        code = app.invoke([str(run) if one == "RUN" else one for one in COMMANDS[command]])
        said = json.loads(capsys.readouterr().out)
        lines = (
            [one for one in said if one["what"].startswith("run")] if command == "doctor" else {}
        )
        found.append((code, lines or {**said, "run_dir": ""}))
    assert found[0] == found[1]


def test_reports_are_written_next_to_it(tmp_path: Path) -> None:
    packed = shutil.copytree(GREEN, tmp_path / "packed")
    plain = plain_copy(GREEN, tmp_path / "plain")
    # a run of `check`, whose baseline does not lie here
    written = [app.invoke(["report", str(folder)]) for folder in (packed, plain)]
    assert written == [Exit.BASELINE, Exit.BASELINE]
    names = sorted(file.name for file in packed.iterdir())
    assert {"report.md", "throughput.png", "run.jsonl.gz"} <= set(names)
    for name in set(names) - {"run.jsonl.gz"}:
        assert (packed / name).read_bytes() == (plain / name).read_bytes(), name


def test_promote_takes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = plain_copy(GREEN, tmp_path / "plain")
    said = []
    for number, run in enumerate((GREEN, plain)):
        to = tmp_path / f"{number}.json"
        assert app.invoke(["baseline", "promote", str(run), "--to", str(to), "--allow-dirty"]) == 0
        said.append({**json.loads(to.read_bytes()), "promoted_utc": "", "content_sha256": ""})
    assert said[0] == said[1] and len(said[0]["cells"]) == 5


def test_calibrate_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(calibration, "calibrate", lambda paths, **_: read.extend(paths))
    monkeypatch.setattr(calibration, "render_calibration", str)
    run = RUNS / "h100-gate" / "start-1"
    assert app.invoke(["calibrate", str(run), str(run / "run.jsonl.gz")]) == Exit.OK
    assert read == [run, run / "run.jsonl.gz"]
    one, *_ = aa_runs.counts(aa_runs.read([run_file.read_run(read[0])]))
    assert one.replicates == 20
    assert {cell.verdict for cell in aa_pairs.read([RUNS / "h200-drop"], "h200")} == {"REGRESSED"}


def test_trace_takes_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.invoke(["trace", str(GREEN), CELL.replace("8", "9")]) == Exit.USAGE
    assert CELL in capsys.readouterr().err  # the nearest cell that the file holds


def test_a_pair_of_compressed_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = shutil.copytree(RUNS / "h200-drop", tmp_path / "pair")
    assert app.invoke(["compare", str(packed)]) == Exit.REGRESSED
    assert app.invoke(["doctor", "--log", str(packed), "--json"]) in (Exit.OK, Exit.ENVIRONMENT)
    assert "run a" in capsys.readouterr().out
    (packed / "a" / "run.jsonl.gz").write_bytes(PACKED[:100])
    assert app.invoke(["compare", str(packed)]) == Exit.USAGE
    err = capsys.readouterr().err
    assert f"{packed / 'a' / 'run.jsonl.gz'} holds 100 bytes of gzip data that was cut off" in err
    laid(packed / "b", plain=PLAIN)
    (packed / "a" / "run.jsonl.gz").write_bytes(PACKED)
    assert app.invoke(["compare", str(packed)]) == Exit.USAGE
    assert f"{packed / 'b'} holds both" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["gate"], ["calibrate"], ["baseline", "promote"]])
def test_a_pair_is_no_run(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """The folder of an `ab` has no run file of its own; the message names what may be given."""
    pair = RUNS / "h200-drop"
    assert app.invoke([*command, str(pair)]) == Exit.USAGE
    (said,) = capsys.readouterr().err.splitlines()
    assert "both sides of an A/B" in said and f"perfbench compare {pair}" in said
    assert str(pair / "a") in said and str(pair / "b") in said
