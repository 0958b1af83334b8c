"""The live line: from heartbeats alone, on a terminal and elsewhere, and never in the way."""

from __future__ import annotations

import errno
import io
import os
import pty
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from nsa.train.display import LiveLine, bar, describe, duration, table
from nsa.train.heartbeat import Beat, HeartbeatReader, HeartbeatWriter, MachineClock
from nsa.train.records import Phase
from tests.nsa.train.stand_in import record
from tests.nsa.train.supervised import wait_for


@pytest.fixture
def beat(tmp_path: Path) -> Beat:
    path = tmp_path / "rank0.bin"
    heart = HeartbeatWriter(path, rank=0, pid=os.getpid(), steps=12_000)
    heart.beat(Phase.BUILD, 0)
    heart.report(record(loss_nats=3.25, tokens_per_s=439_120.4), entropy_floor_nats=None, slow="")
    heart.beat(Phase.STEP, 3000)
    found = HeartbeatReader(path).read()
    assert found is not None
    return found


def clock(beat: Beat, after_s: int) -> MachineClock:
    return MachineClock(beat.first_step_monotonic_ns + after_s * 10**9, 0, beat.boot_id)


def test_a_beat_in_one_line(beat: Beat) -> None:
    text = describe(beat, 0.2, clock(beat, 1000))
    assert text == "step 3,000/12,000  loss 3.2500  439,120 tok/s  ETA 00:50:00  step"


def test_silence_is_named_with_its_phase(beat: Beat) -> None:
    silent = replace(beat, phase=Phase.DATA)
    assert describe(silent, 12.4, clock(beat, 1)).endswith("no progress for 12 s in data")
    assert describe(None, 7.0, clock(beat, 1)) == "start: 7 s so far, while torch is imported"
    assert describe(None, 60.0, clock(beat, 1)) == "start: no heartbeat for 60 s"


def test_a_run_that_is_over_has_no_time_left_and_is_not_silent(beat: Beat) -> None:
    for step, word in ((12_000, "done"), (3000, "ended early")):
        over = replace(beat, step=step, phase=Phase.DONE)
        text = describe(over, 20.0, clock(beat, 3600))
        assert text == f"step {step:,}/12,000  loss 3.2500  439,120 tok/s  {word}"


def test_what_was_not_measured_is_n_a(beat: Beat) -> None:
    assert beat.report is not None
    report = replace(beat.report, loss_nats=None, tokens_per_s=None)
    bare = replace(beat, report=report, steps=0)
    assert describe(bare, 0.0, clock(beat, 1)) == "step 3,000  loss n/a  tok/s n/a  step"
    assert describe(replace(bare, report=None), 0.0, clock(beat, 1)) == "step 3,000  step"


@pytest.mark.parametrize(
    ("step", "steps", "filled"), [(0, 100, 0), (50, 100, 5), (99, 100, 9), (100, 100, 10)]
)
def test_the_bar_is_full_at_the_end_alone(step: int, steps: int, filled: int) -> None:
    assert bar(step, steps, 10) == "━" * filled + "─" * (10 - filled)


def test_no_bar_without_an_end() -> None:
    assert bar(5, 0) == ""
    assert bar(200, 100, 4) == "━━━━"


def test_durations_and_tables() -> None:
    found = [duration(s) for s in (0, 59.6, 3_723, 86_400 + 5)]
    assert found == ["00:00:00", "00:01:00", "01:02:03", "1d 00:00:05"]
    assert table(("a", "long"), [("wide", "1"), ("", "22")]) == "a     long\nwide  1\n      22"


def test_elsewhere_it_writes_plain_lines(beat: Beat) -> None:
    stream = io.StringIO()
    line = LiveLine(live=True, every_s=0.01, stream=stream)
    line.show(beat, 0.0)
    wait_for(lambda: "step 3,000/12,000  loss 3.2500" in stream.getvalue())
    line.line("halt: stall")
    line.close()
    assert "halt: stall\n" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()
    assert "━" not in stream.getvalue()


def test_the_last_state_is_written_however_short_the_run(beat: Beat) -> None:
    stream = io.StringIO()
    line = LiveLine(live=True, every_s=3600.0, stream=stream)
    line.show(replace(beat, step=12_000, phase=Phase.DONE), 0.0)
    line.close()
    assert stream.getvalue().startswith("step 12,000/12,000") and stream.getvalue().count("\n") == 1


def test_a_line_that_is_dropped_leaves_the_last_word_to_another(beat: Beat) -> None:
    stream = io.StringIO()
    line = LiveLine(live=True, every_s=3600.0, stream=stream)
    line.show(beat, 0.0)
    line.line("nsa.train: no memory")
    line.drop()
    line.close()
    assert stream.getvalue() == "nsa.train: no memory\n"


def test_on_a_terminal_a_dropped_line_is_wiped(beat: Beat) -> None:
    shown, terminal = pty.openpty()
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.append(read_all(shown)))
    thread.start()
    with os.fdopen(terminal, "w") as stream:
        line = LiveLine(live=True, stream=stream)
        line.show(beat, 0.0)
        time.sleep(0.6)
        line.drop()
        line.close()
    thread.join()
    os.close(shown)
    text = re.sub(r"\x1b\[[0-9;]*m", "", got[0])  # without colours
    before, wiped, after = text.rpartition("\x1b[2K")
    assert "step 3,000/12,000" in before and wiped
    assert "step" not in after


def test_other_ranks_write_only_what_happened(beat: Beat) -> None:
    stream = io.StringIO()
    line = LiveLine(live=False, every_s=0.01, stream=stream)
    line.show(beat, 0.0)
    line.line("nsa.train rank 3: halt")
    line.close()
    assert stream.getvalue() == "nsa.train rank 3: halt\n"


def read_all(descriptor: int) -> str:
    """Until the other end is closed, as a terminal that shows everything."""
    found = b""
    while True:
        try:
            part = os.read(descriptor, 65_536)
        except OSError as error:
            assert error.errno == errno.EIO
            part = b""
        if not part:
            return found.decode()
        found += part


def test_on_a_terminal_one_line_is_drawn_again_and_again(
    beat: Beat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    shown, terminal = pty.openpty()
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.append(read_all(shown)))
    thread.start()
    with os.fdopen(terminal, "w") as stream:
        line = LiveLine(live=True, stream=stream)
        line.show(beat, 0.0)
        time.sleep(0.6)
        line.line("nsa.train rank 0: [webhook] failed")
        line.show(replace(beat, step=6000), 20.0)
        line.close()
    thread.join()
    os.close(shown)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", got[0])
    assert "━" * 6 + "─" * 18 in text and "━" * 12 + "─" * 12 in text
    assert "step 6,000/12,000" in text and "no progress for 20 s in step" in text
    assert "nsa.train rank 0: [webhook] failed" in text
    assert "\x1b[?25h" in got[0]  # the cursor is back


def test_the_line_fits_in_80_columns_and_a_long_path_stays_whole(
    beat: Beat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown, terminal = pty.openpty()
    got: list[str] = []
    thread = threading.Thread(target=lambda: got.append(read_all(shown)))
    thread.start()
    path = "/a folder of runs/" + "x" * 100
    with os.fdopen(terminal, "w") as stream:
        line = LiveLine(live=True, stream=stream)
        line.show(replace(beat, step=11_000), 0.0)
        time.sleep(0.6)
        line.line(f"stacks: {path}")
        line.close()
    thread.join()
    os.close(shown)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", got[0])
    drawn = [one for one in re.split(r"[\r\n]+", text) if "step 11,000" in one]
    assert drawn and max(map(len, drawn)) <= 80
    assert any(one.startswith("━") and one.rstrip().endswith("step") for one in drawn)
    assert not [one for one in re.split(r"[\r\n]+", text) if one.strip() == "step"]
    assert f"stacks: {path}" in text


@pytest.mark.parametrize("apart", [False, True])
def test_an_error_of_the_trainer_does_not_run_into_the_live_line(
    tmp_path: Path, apart: bool
) -> None:
    """On a terminal the trainer's stderr goes through the one writer; a file gets it as it is."""
    code = """
import sys
from nsa.train.watchdog.child import Child
shown = []
child = Child([sys.executable, "-c", "import sys; print('boom', file=sys.stderr)"], shown.append)
assert child.wait(60)
child.reap(5)
print(shown)
"""
    screen, terminal = pty.openpty()
    err = tmp_path / "err"
    with os.fdopen(terminal, "w") as both, err.open("w") as file:
        command = [sys.executable, "-c", code]
        subprocess.run(command, stdout=both, stderr=file if apart else both, check=True)
        text = os.read(screen, 4096).decode()
    os.close(screen)
    assert (text.strip(), err.read_text()) == (("[]", "boom\n") if apart else ("['boom']", ""))


def test_without_rich_a_terminal_gets_plain_lines_that_name_the_package(
    beat: Beat, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for name in ("rich.live", "rich.console"):
        monkeypatch.setitem(sys.modules, name, None)
    stream = Terminal()
    line = LiveLine(live=True, every_s=0.01, stream=stream)
    line.show(beat, 0.0)
    line.close()
    assert "the package rich is missing" in stream.getvalue()
    assert "step 3,000/12,000" in stream.getvalue()


def test_a_terminal_that_takes_nothing_never_stops_the_caller(beat: Beat) -> None:
    """A pipe that nobody reads: its writer blocks for good, and only the drawing thread is it."""
    read_end, write_end = os.pipe()
    stream = os.fdopen(write_end, "w")
    line = LiveLine(live=True, every_s=0.0, stream=stream)
    try:
        for number in range(2000):
            line.line(f"{number} " + "x" * 100)
            line.show(replace(beat, step=number), 0.0)
        line.close()
        assert line.is_drawing()  # still in its write, while close has given up
    finally:
        os.close(read_end)  # the write fails now, and the thread ends
        wait_for(lambda: not line.is_drawing())
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        stream.close()
