"""The run folder: append-only, one writer, a torn end tolerated, any other bytes a clear error and
never a traceback.
"""

import errno
import json
import os
import pathlib
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfbench.errors import Exit, PerfbenchError
from perfbench.records import run_file
from perfbench.records.cells import Cell
from perfbench.records.rows import SCHEMA_VERSION, Manifest, Replicate, Run
from tests.perfbench import builders
from tests.perfbench.digested import run_bytes

ROOT = pathlib.Path(__file__).parents[2]
CELL = builders.planned_cell(Cell("train", 2048, "v2", "on"))
ROW = builders.replicate(CELL)


def manifest(**changes: Any) -> Manifest:
    return builders.manifest([CELL], **changes)


def written(tmp_path: pathlib.Path, rows: int = 2) -> pathlib.Path:
    with run_file.create_run(tmp_path, manifest()) as writer:
        for number in range(rows):
            writer.append(builders.replicate(CELL, number))
    return writer.path


def refused(path: pathlib.Path, words: str, code: Exit = Exit.USAGE) -> str:
    with pytest.raises(PerfbenchError, match=words) as caught:
        run_file.read_run(path)
    assert caught.value.exit_code is code and "\n" not in str(caught.value)
    return str(caught.value)


def test_round_trip(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path)
    run = run_file.read_run(tmp_path / manifest().run_id)
    assert run == run_file.read_run(path)
    rows = [builders.replicate(CELL, 0), builders.replicate(CELL, 1)]
    assert run == Run(manifest=manifest(), replicates=rows, sha256=run.sha256)
    assert path.read_text().endswith(f', "line_sha256": "{run.sha256}"}}\n')
    assert path.parent.name == manifest().run_id and not run.torn


def test_unknown_fields_survive(tmp_path: pathlib.Path) -> None:
    row = Replicate.model_validate({**ROW.model_dump(), "later": {"a": [1, "b"]}})
    with run_file.create_run(tmp_path, manifest()) as writer:
        writer.append(row)
    assert run_file.read_run(writer.path).replicates[0].model_dump()["later"] == {"a": [1, "b"]}


@pytest.mark.parametrize("reason", ["a\nb", "|/\\", "\u2028", "Zoë \U0001f600", "\x00\x1b[31m"])
def test_every_text_fits_on_one_line(tmp_path: pathlib.Path, reason: str) -> None:
    with run_file.create_run(tmp_path, manifest()) as writer:
        writer.append(ROW.model_copy(update={"reason": reason}))
    assert writer.path.read_bytes().count(b"\n") == 2 and writer.path.read_bytes().isascii()
    assert run_file.read_run(writer.path).replicates[0].reason == reason


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_not_finite_is_not_written(tmp_path: pathlib.Path, value: float) -> None:
    with run_file.create_run(tmp_path, manifest()) as writer:
        with pytest.raises(ValueError, match="JSON compliant"):
            writer.append(ROW.model_copy(update={"wall_s": value}))
        writer.append(ROW)
    assert len(run_file.read_run(writer.path).replicates) == 1


@pytest.mark.parametrize("value", ["NaN", "-Infinity", "1e999"])
@pytest.mark.parametrize("key", ['"wall_s":', '"unknown_key":'])
def test_not_finite_is_not_read(tmp_path: pathlib.Path, key: str, value: str) -> None:
    path = written(tmp_path, rows=1)
    lines = path.read_text().splitlines()
    lines[1] = lines[1].replace('"wall_s": 5.0', f'"wall_s": 5.0, {key} {value}')
    path.write_text("\n".join(lines) + "\n")
    refused(path, rf"run\.jsonl:2: .*({value}|finite)", Exit.BASELINE)


def test_a_torn_last_line_is_dropped_and_flagged_and_cut_off_on_resume(
    tmp_path: pathlib.Path,
) -> None:
    path = written(tmp_path, rows=2)
    whole = path.read_bytes()
    for cut in (1, 2, 40, len(whole.splitlines()[-1])):
        path.write_bytes(whole[:-cut])
        run = run_file.read_run(path)
        assert run.torn and [row.replicate for row in run.replicates] == [0]
    writer, found = run_file.open_for_resume(path.parent)
    with writer:
        assert found.torn
        writer.append(builders.replicate(CELL, 1))
    assert path.read_bytes() == whole


def test_a_torn_line_that_is_not_utf8_at_its_end(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, rows=1)
    path.write_bytes(path.read_bytes() + b'{"kind": "repl\xc3')
    assert run_file.read_run(path).torn


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{broken", "not a JSON record"),
        (b"", "not a JSON record"),
        (b"[]", "got a JSON list"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b'{"kind": "verdict"}', "'verdict' is not one of"),
        (b'{"kind": ["x"]}', "is not one of"),
        (b'{"kind": "replicate"}', "cell_id: Field required"),
        (b"[" * 100_000, "not a JSON record"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not a JSON record"),
    ],
)
def test_a_broken_line_in_the_middle_is_named(
    tmp_path: pathlib.Path, line: bytes, words: str
) -> None:
    path = written(tmp_path, rows=2)
    lines = path.read_bytes().split(b"\n")
    path.write_bytes(b"\n".join([*lines[:2], line, *lines[2:]]))
    assert f"{path}:3: " in refused(path, words, Exit.BASELINE)


def test_what_is_no_run_file(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, rows=1)
    lines = path.read_bytes().splitlines(keepends=True)
    for data, words, code in (
        (b"", "an empty file", Exit.USAGE),
        (lines[0][:-9], "manifest line that was cut off", Exit.USAGE),
        (lines[1] + lines[0], "wanted the manifest first", Exit.USAGE),
        (lines[0] + lines[0], "a second manifest", Exit.BASELINE),
    ):
        path.write_bytes(data)
        refused(path, words, code)
    refused(tmp_path / "missing", "cannot be read")
    refused(tmp_path, "cannot be read")


@pytest.mark.parametrize(
    ("version", "words"),
    [
        (SCHEMA_VERSION + 1, "is newer than"),
        ("1", "wanted a whole number"),
        (True, "wanted"),
        (0, "wanted"),
    ],
)
def test_schema_versions(tmp_path: pathlib.Path, version: object, words: str) -> None:
    path = written(tmp_path, rows=0)
    path.write_text(json.dumps({**json.loads(path.read_text()), "schema_version": version}) + "\n")
    refused(path, words)


@given(st.binary(max_size=300))
def test_no_bytes_give_a_traceback(data: bytes) -> None:
    _read_or_refuse(data)


_WHOLE = run_bytes([r.model_dump() for r in (manifest(), ROW, builders.replicate(CELL, 1))])


@given(st.integers(0, len(_WHOLE) - 1), st.binary(max_size=3), st.integers(0, 3))
def test_no_damage_gives_a_traceback(at: int, inserted: bytes, removed: int) -> None:
    _read_or_refuse(_WHOLE[:at] + inserted + _WHOLE[at + removed :])


def _read_or_refuse(data: bytes) -> None:
    refusal = None
    try:
        run_file.parse(data, "x")
    except PerfbenchError as error:
        refusal = error
    assert refusal is None or str(refusal).startswith("x:")
    assert refusal is None or refusal.exit_code in (Exit.USAGE, Exit.BASELINE)


def test_two_runs_never_share_a_folder(tmp_path: pathlib.Path) -> None:
    before = written(tmp_path).read_bytes()
    with pytest.raises(PerfbenchError, match="exists already") as caught:
        run_file.create_run(tmp_path, manifest())
    assert caught.value.exit_code is Exit.USAGE
    assert (tmp_path / manifest().run_id / "run.jsonl").read_bytes() == before


def test_two_writers_never_share_a_file(tmp_path: pathlib.Path) -> None:
    path = written(tmp_path, rows=1)
    path.write_bytes(path.read_bytes() + b"torn")
    writer, _ = run_file.open_for_resume(path.parent)
    size = path.stat().st_size
    code = (
        "import pathlib; from perfbench.records import run_file;"
        f" run_file.open_for_resume(pathlib.Path({str(path.parent)!r}))"
    )
    with writer:
        with pytest.raises(PerfbenchError, match="another perfbench is writing"):
            run_file.open_for_resume(path.parent)
        other = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert "another perfbench is writing" in other.stderr
        assert path.stat().st_size == size
    again, _ = run_file.open_for_resume(path.parent)
    again.close()


def test_a_damaged_file_is_refused_on_resume_and_left_alone_and_unlocked(
    tmp_path: pathlib.Path,
) -> None:
    path = written(tmp_path, rows=1)
    damaged = path.read_bytes().replace(b'"replicate"', b'"rep', 1) + b"torn"
    path.write_bytes(damaged)
    for _ in range(2):
        with pytest.raises(PerfbenchError, match=r":2: "):
            run_file.open_for_resume(path.parent)
    assert path.read_bytes() == damaged


def test_resume_of_nothing(tmp_path: pathlib.Path) -> None:
    with pytest.raises(PerfbenchError, match="does not exist") as caught:
        run_file.open_for_resume(tmp_path / "missing")
    assert caught.value.exit_code is Exit.USAGE
    (tmp_path / "empty").mkdir()
    with pytest.raises(PerfbenchError, match="does not exist"):
        run_file.open_for_resume(tmp_path / "empty")
    assert list((tmp_path / "empty").iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(PerfbenchError, match="--out DIR") as caught:
        run_file.create_run(tmp_path / "file", manifest())
    assert caught.value.exit_code is Exit.USAGE


def test_a_run_id_is_a_plain_name(tmp_path: pathlib.Path) -> None:
    for run_id in ("../up", "", ".", "a/b", "a\nb"):
        with pytest.raises(ValueError, match="plain folder name"):
            run_file.create_run(tmp_path, manifest(run_id=run_id))
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_loses_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with run_file.create_run(tmp_path, manifest()) as writer:
        writer.append(ROW)
        before = writer.path.read_bytes()
        real_write = os.write

        def full(fd: int, data: Any) -> int:
            if len(data) > 20:
                return real_write(fd, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "write", full)
        with pytest.raises(PerfbenchError, match="No space left.*free space") as caught:
            writer.append(ROW)
        monkeypatch.undo()
        assert caught.value.exit_code is Exit.USAGE
        assert writer.path.read_bytes() == before
        writer.append(builders.replicate(CELL, 1))
    assert [row.replicate for row in run_file.read_run(writer.path).replicates] == [0, 1]


def test_each_line_is_synced(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), real(fd)))
    with run_file.create_run(tmp_path, manifest()) as writer:
        before = len(synced)
        writer.append(ROW)
        assert len(synced) == before + 1


def test_run_ids() -> None:
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    run_id = run_file.new_run_id(now, "h100-80gb-hbm3", "4f1c2d3e9999")
    assert run_id.startswith("20260102T030405Z-h100-80gb-hbm3-4f1c2d3e-")
    assert run_id != run_file.new_run_id(now, "h100-80gb-hbm3", "4f1c2d3e9999")
    assert "-nocommit-" in run_file.new_run_id(now, "cpu", None) and "/" not in run_file.new_run_id(
        now, "cpu", "../../x"
    )
