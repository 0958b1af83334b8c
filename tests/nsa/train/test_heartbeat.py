"""The heartbeat: what a reader sees of a writer, also of one that writes, dies or is another's."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nsa.train.heartbeat import (
    SIZE,
    Beat,
    HeartbeatReader,
    HeartbeatWriter,
    MachineClock,
    boot_id,
    born_ticks,
)
from nsa.train.records import Phase
from tests.nsa.train.stand_in import record

ROOT = Path(__file__).parents[3]
NUMBERS = ("loss_nats", "gradient_norm", "tokens_per_s", "memory_allocated_bytes")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "heartbeat" / "rank3.bin"


def writer(path: Path) -> HeartbeatWriter:
    return HeartbeatWriter(path, rank=3, pid=os.getpid(), world_size=8, steps=1000)


def seen(path: Path) -> Beat:
    beat = HeartbeatReader(path).read()
    assert beat is not None
    return beat


def test_a_beat_is_read_as_it_was_written(path: Path) -> None:
    heart = writer(path)
    before = time.monotonic_ns()
    heart.beat(Phase.LOAD, 0)
    heart.beat(Phase.BUILD, 500)
    heart.beat(Phase.STEP, 501)
    beat = seen(path)
    assert (beat.rank, beat.world_size, beat.pid, beat.steps) == (3, 8, os.getpid(), 1000)
    assert (beat.phase, beat.step, beat.beats, beat.report) == (Phase.STEP, 501, 3, None)
    assert before <= beat.first_step_monotonic_ns <= beat.monotonic_ns <= time.monotonic_ns()
    assert beat.first_step == 500
    assert beat.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    ticks = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19]
    assert beat.born_ticks == int(ticks) == born_ticks(os.getpid())


def test_a_report_keeps_its_numbers(path: Path) -> None:
    heart = writer(path)
    heart.beat(Phase.STEP, 7)
    line = record(step=7, bad_steps=2, loss_nats=2.5, gradient_norm=0.0)
    heart.report(line, entropy_floor_nats=1.25, slow="sel.v1")
    report = seen(path).report
    assert report is not None
    assert (report.number, report.step, report.bad_steps) == (1, 7, 2)
    for name in (*NUMBERS, "learning_rate", "memory_rss_bytes"):
        assert getattr(report, name) == getattr(line, name)
    assert report.entropy_floor_nats == 1.25
    assert report.gate_entropy_nats == 1.0
    assert report.shares == {"cmp": 0.3, "sel": 0.3, "win": 0.4}
    assert report.slow == "sel.v1"


def test_absence_is_none_and_neither_0_nor_nan(path: Path) -> None:
    heart = writer(path)
    heart.beat(Phase.STEP, 1)
    absent = record(**dict.fromkeys(NUMBERS), statistics=None)
    heart.report(absent, entropy_floor_nats=None, slow="")
    report = seen(path).report
    assert report is not None
    assert [getattr(report, name) for name in NUMBERS] == [None] * len(NUMBERS)
    assert (report.gate_entropy_nats, report.shares, report.entropy_floor_nats) == (None, {}, None)
    assert report.slow == ""

    heart.report(record(loss_nats=math.nan, gradient_norm=0.0), entropy_floor_nats=None, slow="")
    report = seen(path).report
    assert report is not None
    assert math.isnan(report.loss_nats or 0.0) and report.gradient_norm == 0.0


def test_a_long_slow_path_is_cut_to_64_bytes(path: Path) -> None:
    heart = writer(path)
    heart.beat(Phase.STEP, 1)
    heart.report(record(), entropy_floor_nats=None, slow="a" * 63 + "ü" + "b")
    report = seen(path).report
    assert report is not None and report.slow == "a" * 63


def test_nothing_written_is_none(path: Path) -> None:
    reader = HeartbeatReader(path)
    assert reader.read() is None
    heart = writer(path)
    assert reader.read() is None
    heart.beat(Phase.START, 0)
    assert reader.read() is not None


def test_a_reader_follows_a_file_that_is_made_anew(path: Path) -> None:
    reader = HeartbeatReader(path)
    old = writer(path)
    old.beat(Phase.DONE, 1000)
    assert reader.read() is not None
    new = writer(path)
    assert reader.read() is None
    new.beat(Phase.LOAD, 3)
    old.beat(Phase.DONE, 1001)
    beat = reader.read()
    assert beat is not None and (beat.phase, beat.step) == (Phase.LOAD, 3)
    path.unlink()
    assert reader.read() == beat


def test_the_layout_is_fixed(path: Path) -> None:
    """Read with numbers from the format alone, as a program in another language would."""
    heart = writer(path)
    heart.beat(Phase.STEP, 41)
    heart.beat(Phase.EVAL, 42)
    data = path.read_bytes()
    assert len(data) == SIZE == 4096
    assert data[:8] == b"NSABEAT\0"
    assert struct.unpack_from("<IIqq", data, 8) == (1, 4096, 3, 8)
    (count,) = struct.unpack_from("<Q", data, 256)
    assert count == 2
    slot = 256 + 8 + (count & 1) * (6 * 8 + 4 + 4)
    beats, step, first = struct.unpack_from("<qqq", data, slot + 16)
    assert (beats, step, first) == (2, 42, 41)
    assert struct.unpack_from("<i", data, slot + 48) == (Phase.EVAL,)


def test_a_writer_that_is_killed_in_a_write_leaves_the_beat_before(path: Path) -> None:
    heart = writer(path)
    heart.beat(Phase.STEP, 5)
    before = seen(path)
    data = bytearray(path.read_bytes())
    (count,) = struct.unpack_from("<Q", data, 256)
    other = 256 + 8 + ((count + 1) & 1) * (6 * 8 + 4 + 4)
    with path.open("r+b") as file:
        file.seek(other)
        file.write(b"\xff" * 20)
    assert seen(path) == before


@pytest.mark.parametrize(
    ("at", "written", "match"),
    [
        (0, b"ANOTHER\0", "has magic"),
        (8, b"\x09\0\0\0", "version 9; wanted"),
        (264, b"\xee" * 112, "no checksum fits"),
    ],
)
def test_what_is_no_heartbeat_is_refused(path: Path, at: int, written: bytes, match: str) -> None:
    heart = writer(path)
    heart.beat(Phase.STEP, 5)
    with path.open("r+b") as file:
        file.seek(at)
        file.write(written)
    with pytest.raises(ValueError, match=match):
        HeartbeatReader(path).read()


def test_a_file_of_another_size_is_refused(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"NSABEAT\0")
    with pytest.raises(ValueError, match="has 8 bytes; wanted 4,096"):
        HeartbeatReader(path).read()


HAMMER = """
import os, sys
from pathlib import Path
from nsa.train.heartbeat import HeartbeatWriter
from nsa.train.records import Phase
from tests.nsa.train.stand_in import record
heart = HeartbeatWriter(Path(sys.argv[1]), rank=0, pid=os.getpid())
step = 0
while True:
    step += 1
    heart.beat(Phase(step % 10), step)
    if step % 10 == 0:
        heart.report(record(step=step, bad_steps=step, loss_nats=float(step)),
                     entropy_floor_nats=float(step), slow=str(step))
"""


def test_every_snapshot_of_a_writer_that_hammers_is_consistent(path: Path) -> None:
    """Its fields are functions of one counter; a torn read would mix two values of it."""
    process = subprocess.Popen([sys.executable, "-c", HAMMER, str(path)], cwd=ROOT)
    try:
        reader, seen_steps, reports = HeartbeatReader(path), set(), set()
        end = time.monotonic() + 60
        while len(seen_steps) < 3000 and time.monotonic() < end:
            beat = reader.read()
            if beat is None:
                continue
            assert (beat.phase, beat.beats) == (beat.step % 10, beat.step)
            seen_steps.add(beat.step)
            if (report := beat.report) is not None:
                values = (report.loss_nats, report.entropy_floor_nats, float(report.slow))
                assert {report.step, report.bad_steps, 10 * report.number, *values} == {report.step}
                reports.add(report.step)
        assert len(seen_steps) == 3000 and len(reports) > 100
    finally:
        process.kill()
        process.wait()
    assert reader.read() is not None  # killed wherever it was


def test_age_is_by_the_monotonic_clock_of_one_boot_and_else_by_the_wall(path: Path) -> None:
    heart = writer(path)
    heart.beat(Phase.STEP, 5)
    beat = seen(path)
    here = MachineClock(beat.monotonic_ns + 3 * 10**9, beat.wall_ns + 50 * 10**9, boot_id())
    assert beat.age_s(here) == 3.0
    assert beat.age_s(replace(here, boot_id="another")) == 50.0
    assert beat.age_s(replace(here, monotonic_ns=0)) == 0.0


def test_eta_is_the_pace_since_the_resume(path: Path) -> None:
    heart = writer(path)
    heart.beat(Phase.BUILD, 500)
    heart.beat(Phase.STEP, 600)
    beat = seen(path)
    clock = MachineClock(beat.first_step_monotonic_ns + 50 * 10**9, beat.wall_ns, boot_id())
    assert beat.eta_s(clock) == 200.0  # 100 steps took 50 s, 400 are left
    assert replace(beat, step=500).eta_s(clock) is None
    assert replace(beat, steps=0).eta_s(clock) is None
    assert beat.eta_s(replace(clock, boot_id="another")) is None


def test_who_watches_needs_no_torch() -> None:
    code = (
        "import sys, json, nsa.train.watchdog, nsa.train.display, nsa.train.log, nsa.train.stacks;"
        "print(json.dumps([m for m in ('torch', 'numpy', 'rich', 'pydantic') if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, check=True)
    assert json.loads(done.stdout) == []
