"""The first command on a busy machine: the load is said before, and a number that is too noisy to
use is not under a green headline.

Row of the faults: first run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from perfbench import report
from perfbench.commands import app
from perfbench.errors import Exit
from perfbench.gate.judging import judge
from perfbench.machine import load
from perfbench.matrix.policy import GatePolicy
from perfbench.records.rows import Run
from tests.perfbench import builders as b
from tests.perfbench import fake_nvml
from tests.perfbench.report_cases import alone
from tests.perfbench.test_cli import FakeExecutor, executor

__all__ = ["executor"]
POLICY = GatePolicy()
TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"


def spread(run: Run, cell_id: str, factors: tuple[float, ...], host: bool = False) -> Run:
    """One cell whose processes ran at 600 times ``factors``."""
    cell = next(one for one in run.manifest.cells if one.cell_id == cell_id)
    return b.change_rows(
        run,
        cell_id,
        lambda row: b.replicate(
            cell, row.replicate, tok_per_s=600 * factors[row.replicate], host_bound=host
        ),
    )


def test_a_number_that_is_too_noisy_to_use_heads_the_report() -> None:
    """It was '600 ± 86 %' in the table of a green run."""
    run = spread(b.small_run(), TRAIN, (0.7, 1.0, 1.4))
    found = judge(run, None, POLICY)
    (noisy,) = [cell for cell in found.cells if cell.is_too_noisy]
    assert noisy.half_pct is not None and noisy.half_pct > 50
    said = f"too noisy to use: v2 2048 train 5{noisy.cand_tok_per_s:,.0f}"[:-3]
    assert found.headline.startswith(said)
    assert f" ± {noisy.half_pct:,.0f} % tok/s (1 of 4 cells)" in found.headline
    assert "; close what else runs here, or raise measure.processes: MEASURED, exit 0: " in (
        found.headline
    )
    assert found.exit_code is Exit.OK
    assert alone(run).startswith("# 🟡 too noisy to use: ")
    assert "\x1b[1;33mtoo noisy" in report.terminal_table(run, found, colour=True)


def test_what_is_noisy_on_the_hosts_side_is_told_to_capture() -> None:
    """Two of our own: a host-bound cell, and one process whose noise is its family's."""
    run = spread(b.small_run(), TRAIN, (0.5, 1.0, 2.0), host=True)
    headline = judge(run, None, POLICY).headline
    assert "; their wall time follows the host: capture the step" in headline
    calm = b.small_run(noise=0.02)
    found = judge(calm, None, POLICY)
    assert found.headline.startswith("MEASURED, exit 0: ") and alone(calm).startswith("# 🟢 ")
    assert all(cell.half_pct is not None and cell.half_pct < 50 for cell in found.cells)
    one = b.small_run(replicates=1)
    assert judge(one, None, POLICY).headline.startswith("MEASURED"), "no interval, no claim"


def reading(total: int, busy: int, ours: int, **others: int) -> load.Reading:
    return load.Reading(total, busy, ours, others)


@pytest.mark.parametrize(
    ("after", "shown"),
    [
        (reading(1200, 510, 10, python=400), "this machine is busy: other processes use 2.0 of 2"),
        (reading(1200, 420, 110, python=10), "other processes use 0.1 of 2 CPUs"),
        (reading(1200, 310, 110), "other processes use 0.0 of 2 CPUs"),
        (None, "how busy this machine is cannot be read here"),
        (reading(1000, 300, 0), "how busy this machine is cannot be read here"),
    ],
)
def test_the_load_is_that_of_others(
    after: load.Reading | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own ticks do not count; the busiest is named where it matters."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    found = load.load_between(reading(1000, 300, 0, python=0), after, None)
    assert str(found).startswith(shown)
    assert found.is_busy == ("busy: " in str(found)) == ("most of it python" in str(found))


def _ticks(found: load.Reading | None) -> int:
    assert found is not None
    return found.ours


def test_a_process_that_spins_is_seen_and_one_of_ours_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read from /proc: a child of ours is ours until it is nobody's child."""
    loop = "import time\nend = time.time() + 60\nwhile time.time() < end: pass"
    monkeypatch.setattr(load, "PROC", Path("/proc"))
    child = subprocess.Popen([sys.executable, "-c", loop])
    try:
        before = after = load._reading()
        while child.poll() is None and _ticks(after) < _ticks(before) + 5:
            after = load._reading()
        assert after is not None and _ticks(after) >= _ticks(before) + 5
        assert not any(name.endswith(f" {child.pid}") for name in after.others)
        monkeypatch.setattr(load, "is_ours", lambda pid: False)
        named = load._reading()
        assert named is not None
        assert any(name.endswith(f" {child.pid}") for name in named.others)
    finally:
        child.kill()
        child.wait()


def test_a_command_says_the_load_before_it_measures(
    executor: FakeExecutor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    busy = load.Load(1.9, 2, "python 4711")
    monkeypatch.setattr("perfbench.commands.measuring.load_now", lambda uuid: busy)
    assert app.invoke(["run", "small.yaml"]) == 0
    err = capsys.readouterr().err
    line = (
        "this machine is busy: other processes use 1.9 of 2 CPUs, most of it python 4711. Next:"
        " close what runs, or expect intervals too wide to use"
    )
    assert err.count(line) == 1 and err.index(line) < err.index("replicates to measure")
    monkeypatch.setattr("perfbench.commands.measuring.load_now", lambda uuid: load.Load(0.0, 2))
    assert app.invoke(["run", "small.yaml", "--out", "again"]) == 0
    assert "perfbench: other processes use 0.0 of 2 CPUs\n" in capsys.readouterr().err


@pytest.mark.parametrize(("pct", "busy"), [(0, False), (37, True)])
def test_a_gpu_that_is_used_by_what_nobody_lists_is_seen(pct: int, busy: bool) -> None:
    """Inside many containers NVML lists no process, and its utilisation all the same."""
    card = fake_nvml.Card()
    found = load.load_now(card.uuid, fake_nvml.FakeNvml(card, gpu_pct=pct))
    assert found.gpu_pct == pct and found.is_busy is busy
    assert f"the GPU is {pct} % busy without us" in str(found)


def test_a_machine_without_proc_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "PROC", tmp_path)
    assert load.load_now() == load.Load(None, os.cpu_count() or 1)
    assert not load.load_now().is_busy
