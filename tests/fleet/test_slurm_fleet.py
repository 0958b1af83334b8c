"""Slurm's jobs by submitit's local executor: a run, a job that dies, a cell and a job that hang."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from perfbench.errors import Exit, PerfbenchError
from perfbench.gate import paired_rows
from perfbench.machine import TargetFit
from perfbench.records import Replicate, Status, read_run
from perfbench.runner import (
    MeasuringContext,
    PairSpec,
    checked_out,
    measure_pair,
    open_fleet,
    own_checkout,
)
from perfbench.runner.executor import ROOT
from perfbench.runner.fleet import FleetOptions
from tests.fleet.conftest import STUB, TEXT, Left, Watching, on_fleet, rows_of, spec_of
from tests.fleet.stub_measure import HANG

SILENT_S = 8.0


def of_slurm(folder: Path, cards: int, **given: str) -> FleetOptions:
    options = {"cluster": "local", "silent_s": str(SILENT_S), "wait_s": "90", **given}
    return FleetOptions("slurm", cards, options, folder, STUB)


def agents(folder: Path) -> list[psutil.Process]:
    """The processes that submitit started, by the folder of their jobs."""
    found = []
    for one in psutil.process_iter():
        try:
            words = one.cmdline()
        except psutil.Error:
            continue
        if "submitit.core._submit" in words and any(str(folder) in word for word in words):
            found.append(one)
    return found


def gone(folder: Path) -> bool:
    """Whether every agent ends within 20 s: of its own, after its word that it has let go."""
    deadline = time.monotonic() + 20
    while agents(folder) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not agents(folder)


def agent_of(node: str, folder: Path) -> psutil.Process:
    """A node is named after its host and job, and a job's number is its controller's."""
    controller = int(node.rsplit("-", 1)[1])
    return next(one for one in agents(folder) if one.ppid() == controller)


def finished_rows(folder: Path) -> dict[tuple[str, int], str]:
    (run,) = (one.parent for one in folder.glob("*/run.jsonl"))
    return rows_of(run)


def act_once(act: Any) -> Watching:
    """Calls ``act(node)`` with the node of the first finished row."""
    done: list[str] = []

    def first(row: Replicate) -> None:
        if not done:
            done.append(row.node or "")
            act(row.node)

    return Watching(first)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["dies", "hangs"])
def test_a_job_that_ends_loses_no_cell(blow: int, tmp_path: Path, nothing_left: Left) -> None:
    spec = spec_of(TEXT)
    hit: list[str] = []

    def strike(node: str) -> None:
        hit.append(node)
        agent_of(node, tmp_path).send_signal(blow)

    progress = act_once(strike)
    with open_fleet(of_slurm(tmp_path, 2), spec.matrix.target, print) as fleet:
        assert len(fleet.cards) == 2
        done = on_fleet(spec, fleet, runs_dir=tmp_path, progress=progress)
    rows = finished_rows(tmp_path)
    assert set(rows) == {(c.cell_id, n) for c in spec.plan.cells for n in range(5)}
    assert set(rows.values()).isdisjoint(hit) and len(set(rows.values())) == 1
    (lost,) = (note for note in progress.notes if "is lost" in note)
    assert hit[0] in lost and ("silent for 8 s" if blow == signal.SIGSTOP else "ended") in lost
    assert [one.moved != [] for one in done.run.resumed] == [True]
    assert nothing_left() == [] and gone(tmp_path)
    assert not [one for one in tmp_path.iterdir() if one.name.startswith(".fleet")]


def test_a_cell_that_hangs_is_a_timeout(tmp_path: Path, nothing_left: Left) -> None:
    text = TEXT.replace("[64, 128, 192]", "[64]").replace("timeout_s: 60", "timeout_s: 2")
    spec = spec_of(text.replace("dtype: [fp32]", f"dtype: [fp32]\n  batch: [1, {HANG}]"))
    with open_fleet(of_slurm(tmp_path, 1), spec.matrix.target, print) as fleet:
        done = on_fleet(spec, fleet, runs_dir=tmp_path)
    statuses = {row.axes.batch: row.status for row in done.run.replicates}
    assert statuses == {1: Status.OK, HANG: Status.TIMEOUT} and done.missing == []
    assert nothing_left() == []


def test_the_last_card_lost_is_named_and_what_was_measured_resumes(tmp_path: Path) -> None:
    spec = spec_of(TEXT)
    with open_fleet(of_slurm(tmp_path, 1), spec.matrix.target, print) as fleet:
        strike = act_once(lambda node: agent_of(node, tmp_path).kill())
        with pytest.raises(PerfbenchError, match="every card of the fleet is lost") as caught:
            on_fleet(spec, fleet, runs_dir=tmp_path, progress=strike)
    assert caught.value.exit_code is Exit.ENVIRONMENT and "--resume" in str(caught.value)
    (folder,) = (one.parent for one in tmp_path.glob("*/run.jsonl"))
    before = len(read_run(folder).replicates)
    with open_fleet(of_slurm(tmp_path, 1), spec.matrix.target, print) as fleet:
        done = on_fleet(spec, fleet, runs_dir=tmp_path, resume=folder)
    rows = rows_of(folder)
    assert len(rows) == 15 and len(set(rows.values())) == 1
    begun = {row.cell_id for row in done.run.replicates[:before]}
    moved = next(one.moved for one in done.run.resumed if one.moved)
    assert begun == set(moved), "their first rows are another card's: measured anew"


def test_ctrl_c_leaves_no_process(tmp_path: Path, nothing_left: Left) -> None:
    spec = spec_of(TEXT)
    strike = act_once(
        lambda node: threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
    )
    with open_fleet(of_slurm(tmp_path, 2), spec.matrix.target, print) as fleet:
        refused = pytest.raises(PerfbenchError, match="interrupted with .* Next: perfbench")
        with refused as caught:
            on_fleet(spec, fleet, runs_dir=tmp_path, progress=strike)
    assert caught.value.exit_code is Exit.INTERRUPTED
    assert nothing_left() == []
    assert gone(tmp_path)


def test_pairs_lie_on_one_card_and_go_on_where_it_is_lost(tmp_path: Path) -> None:
    """Both versions are checked out on the node; the first card dies after a pair's first half."""
    spec = spec_of(TEXT.replace("[64, 128, 192]", "[64]"))
    said: list[str] = []
    with open_fleet(of_slurm(tmp_path, 2), spec.matrix.target, print) as fleet:
        strike = act_once(lambda node: agent_of(node, tmp_path).kill())
        facts = fleet.cards[0].facts
        context = MeasuringContext(
            TargetFit("cpu", None),
            facts.capability,
            facts.environment,
            ROOT,
            strike,
            said.append,
            fleet,
        )
        pairs = PairSpec(spec.matrix, [], 2, 5, ["perfbench", "ab", "HEAD", ".", "m.yaml"])
        with checked_out("HEAD", ROOT) as base, own_checkout(ROOT, spec.source) as own:
            found = measure_pair(pairs, (base, own), context, tmp_path / "pair")
    (cell_id,) = (cell.cell_id for cell in spec.plan.cells)
    sides = [run.of_cell(cell_id) for run in (found.base, found.candidate)]
    both = paired_rows(found.base, found.candidate, *sides)
    assert list(both) == [0, 1] and all(one.node == other.node for one, other in both.values())
    assert {row.status for row in (*sides[0], *sides[1])} == {Status.OK}
    assert len(said) == 1 and "its pairs go on elsewhere" in said[0]
    assert len({one.node for one, _ in both.values()}) == 1


def test_where_there_is_no_slurm(tmp_path: Path) -> None:
    target = spec_of(TEXT).matrix.target
    options = FleetOptions("slurm", 1, {}, tmp_path)
    refused = pytest.raises(PerfbenchError, match="Slurm gives no card: .*srun")
    with refused as caught, open_fleet(options, target, print):
        pass
    assert caught.value.exit_code is Exit.ENVIRONMENT and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
