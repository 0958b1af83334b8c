"""The log of a rank: lines that a kill cannot tear, a table, TensorBoard."""

from __future__ import annotations

import csv
import json
import math
import subprocess
import sys
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest

from nsa.train.errors import TrainError, TrainExit
from nsa.train.log import RunLog, log_path, read_log
from nsa.train.records import StepRecord
from tests.nsa.train.stand_in import HEALTHY, record
from tests.nsa.train.supervised import ROOT, wait_for


def test_a_line_holds_the_record(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 2, tensorboard=False)
    log.write(record(step=10))
    log.event("resume", step=10, checkpoint="step-00000010")
    log.close()
    line, event = (tmp_path / "log/rank2.jsonl").read_text().splitlines()
    assert json.loads(line) == {"kind": "step", **HEALTHY, "step": 10}
    assert {**json.loads(event), "time_utc": ""} == {
        "kind": "resume",
        "time_utc": "",
        "step": 10,
        "checkpoint": "step-00000010",
    }
    assert read_log(log_path(tmp_path, 2)) == [json.loads(line), json.loads(event)]
    assert not (tmp_path / "log/training.csv").exists()


def test_what_is_not_finite_is_null_and_named(tmp_path: Path) -> None:
    statistics = {"gate_entropy": math.inf, "branch_share": {"cmp": math.nan, "sel": 1.0}}
    log = RunLog(tmp_path, 0, tensorboard=False)
    log.write(record(loss_nats=math.nan, gradient_norm=None, statistics=statistics))
    log.close()

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    text = log_path(tmp_path, 0).read_text()
    line = json.loads(text, parse_constant=refuse)
    assert line["loss_nats"] is None and line["gradient_norm"] is None
    assert line["statistics"]["branch_share"] == {"cmp": None, "sel": 1.0}
    assert line["not_finite"] == [
        "loss_nats",
        "statistics.gate_entropy",
        "statistics.branch_share.cmp",
    ]


def steps_of_the_table(out: Path) -> list[int]:
    with (out / "log/training.csv").open(newline="") as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


def test_the_table_holds_each_step_once(tmp_path: Path) -> None:
    """A run that was killed after its checkpoint of step 20 trains steps 21 to 40 again."""
    log = RunLog(tmp_path, 0, tensorboard=False)
    for step in (10, 20, 30, 40):
        log.write(record(step=step, statistics={"text": "a,b"}))
    log.close()
    log = RunLog(tmp_path, 0, tensorboard=False)
    assert steps_of_the_table(tmp_path) == [10, 20, 30, 40]  # until the checkpoint is read
    log.go_on_after(20)
    log.event("start", step=20)
    log.write(record(step=30))
    log.close()
    assert steps_of_the_table(tmp_path) == [10, 20, 30]
    lines = read_log(log_path(tmp_path, 0))
    assert [line["step"] for line in lines if "step" in line] == [10, 20, 30, 40, 20, 30]
    RunLog(tmp_path, 1, tensorboard=False).go_on_after(20)  # which has no table


def test_a_table_that_holds_steps_twice_keeps_the_later_ones(tmp_path: Path) -> None:
    """As runs wrote it that were resumed before tables were cut."""
    log = RunLog(tmp_path, 0, tensorboard=False)
    for step in (10, 20, 30, 20, 30, 40):
        log.write(record(step=step))
    log.go_on_after(20)
    log.close()
    assert steps_of_the_table(tmp_path) == [10, 20, 30, 20]


def test_a_table_without_steps_after_the_checkpoint_stays(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0, tensorboard=False)
    log.go_on_after(20)  # of another run's folder
    log.write(record(step=30))
    log.go_on_after(30)
    log.close()
    assert steps_of_the_table(tmp_path) == [30]


def test_the_table_has_the_columns_of_a_record(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0, tensorboard=False)
    log.write(record(step=10, mfu_pct=None))
    log.write(record(step=20, loss_nats=math.nan))
    log.close()
    with (tmp_path / "log/training.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert list(first) == [one.name for one in fields(StepRecord)]
    assert (first["step"], first["loss_nats"], first["mfu_pct"]) == ("10", "3.0", "")
    assert json.loads(first["engaged"]) == {"sel.triton": 12}
    assert json.loads(first["statistics"]) == HEALTHY["statistics"]
    assert second["loss_nats"] == "nan"


@pytest.mark.parametrize("torn", [b"", b'{"kind": "st', b"x" * 200_000])
def test_a_resumed_run_appends_after_the_last_whole_line(tmp_path: Path, torn: bytes) -> None:
    log = RunLog(tmp_path, 0, tensorboard=False)
    log.write(record(step=10))
    log.close()
    for name in ("rank0.jsonl", "training.csv"):
        with (tmp_path / "log" / name).open("ab") as file:
            file.write(torn)
    assert [line["step"] for line in read_log(log_path(tmp_path, 0))] == [10]

    log = RunLog(tmp_path, 0, tensorboard=False)
    log.write(record(step=11))
    log.close()
    first, event, second = read_log(log_path(tmp_path, 0))
    assert (first["step"], second["step"]) == (10, 11)
    assert (event["kind"], event["rank"], event["torn_bytes"]) == ("resumed", 0, len(torn))
    with (tmp_path / "log/training.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["10", "11"]


def test_a_log_of_one_torn_line_begins_anew(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    for name in ("rank0.jsonl", "training.csv"):
        (tmp_path / "log" / name).write_bytes(b'{"kind"')
    log = RunLog(tmp_path, 0, tensorboard=False)
    log.write(record(step=1))
    log.close()
    assert [line["step"] for line in read_log(log_path(tmp_path, 0))] == [1]


ENDLESS = """
import sys
from pathlib import Path
from nsa.train.log import RunLog
from tests.nsa.train.stand_in import record
log = RunLog(Path(sys.argv[1]), 0, tensorboard=False)
step = 0
while True:
    step += 1
    log.write(record(step=step))
"""


def test_a_kill_loses_no_whole_line(tmp_path: Path) -> None:
    path = log_path(tmp_path, 0)

    def is_longer_than(size: int) -> bool:
        return path.exists() and path.stat().st_size > size

    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", ENDLESS, str(tmp_path)], cwd=ROOT)
        size = path.stat().st_size if path.exists() else 0
        wait_for(partial(is_longer_than, size + 50_000))
        process.kill()
        process.wait()
    lines = read_log(path)
    runs: list[list[int]] = [[]]
    for line in lines:
        if line["kind"] == "resumed":
            runs.append([])
        else:
            runs[-1].append(line["step"])
    assert len(runs) == 3
    for steps in runs:
        assert steps == list(range(1, len(steps) + 1)) and steps


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rank0.jsonl"
    path.write_text('{"kind": "a"}\nnot JSON\n{"kind": "b"}\n')
    with pytest.raises(ValueError, match=r"rank0.jsonl:2 is b'not JSON'; wanted a JSON object"):
        read_log(path)


def test_an_event_cannot_look_like_a_record(tmp_path: Path) -> None:
    log = RunLog(tmp_path, 0, tensorboard=False)
    with pytest.raises(ValueError, match="marks records"):
        log.event("step")
    log.close()


def test_a_table_of_other_columns_is_refused(tmp_path: Path) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log/training.csv").write_text("step,loss\n1,2\n")
    with pytest.raises(TrainError, match="wanted the columns time_utc,rank,step") as caught:
        RunLog(tmp_path, 0, tensorboard=False)
    assert caught.value.code is TrainExit.USAGE
    assert (tmp_path / "log/training.csv").read_text() == "step,loss\n1,2\n"


def test_tensorboard_has_every_number_with_its_unit(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path, 0, tensorboard=True)
    log.write(record(step=10, loss_nats=2.5))
    log.write(record(step=20, loss_nats=2.25, mfu_pct=None))
    log.close()
    events = EventAccumulator(str(tmp_path / "log/tensorboard"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("loss_nats")] == [(10, 2.5), (20, 2.25)]
    assert [one.step for one in events.Scalars("mfu_pct")] == [10]
    tags = set(events.Tags()["scalars"])
    assert {"tokens_per_s", "memory_rss_bytes", "engaged.sel.triton"} <= tags
    assert "statistics.branch_share.win" in tags and "rank" not in tags


def test_tensorboard_shows_each_step_once(tmp_path: Path) -> None:
    """A run that was killed after its checkpoint of step 20 trains steps 21 to 40 again. Neither
    this reader nor TensorBoard's server heeds a file that purges older ones.
    """
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

    log = RunLog(tmp_path, 0, tensorboard=True)
    for step in (10, 20, 21, 30, 40):
        log.write(record(step=step, loss_nats=3.0))
    log.close()
    (older,) = (tmp_path / "log/tensorboard").iterdir()
    older.write_bytes(older.read_bytes()[:-3])  # torn by the kill
    log = RunLog(tmp_path, 0, tensorboard=True)
    log.go_on_after(20)
    for step in (30, 40, 50):
        log.write(record(step=step, loss_nats=2.0))
    log.close()
    events = EventAccumulator(str(tmp_path / "log/tensorboard"))
    events.Reload()
    shown = [
        (one.step, float(one.tensor_proto.float_val[0])) for one in events.Tensors("loss_nats")
    ]
    assert shown == [(10, 3.0), (20, 3.0), (30, 2.0), (40, 2.0), (50, 2.0)]


def test_without_the_package_tensorboard_the_flag_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(TrainError, match="package tensorboard is missing.*pip install") as caught:
        RunLog(tmp_path, 0, tensorboard=True)
    assert caught.value.code is TrainExit.MISSING
    RunLog(tmp_path, 1, tensorboard=True).close()  # only rank 0 writes there
