"""A cell on two ranks, through the real executor on gloo: green, and red with the rank's number for
each planted fault; no process stays.
"""

import pathlib
import statistics
from collections.abc import Iterator
from typing import Any

import pytest

from perfbench.gate.clocks import clock_faults
from perfbench.records.cells import Cell
from perfbench.records.job import Job
from perfbench.records.kernel_table import Kernels, table_path
from perfbench.records.rows import Replicate, Status
from perfbench.runner.executor import ForkServerExecutor
from perfbench.worker.ranks.launch import variables_of
from tests.perfbench import jobs
from tests.perfbench import ranks_measure as planted

COUNTERS = ("sel.v2", "sel.sdpa", "cmp.sdpa", "win.sdpa")
ROOT = pathlib.Path(__file__).parents[2]


def job(seed: int = 5, parallel: str = "ddp", **changes: Any) -> Job:
    graphs = {name: changes.pop(name, "off") for name in ("compile", "cuda_graph")}
    cell = Cell(
        "train",
        64,
        "v2",
        fa2="off",
        dtype="fp32",
        batch=2,
        world_size=2,
        parallel=parallel,
        **graphs,
    )
    made = jobs.job(batch=2, seed=seed, profile=True, **changes)
    return made.model_copy(update={"axes": cell, "cell_id": cell.cell_id})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Where the ranks of these tests keep their files: other tests run at the same time."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def executor(home: pathlib.Path) -> Iterator[ForkServerExecutor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(home))
        with ForkServerExecutor("tests.perfbench.ranks_measure:measure", cwd=ROOT) as made:
            yield made


def left_over(home: pathlib.Path) -> list[str]:
    """Ranks that still run, by the files below ``home`` that each has open."""
    found = []
    for place in pathlib.Path("/proc").iterdir():
        try:
            links = [str(one.readlink()) for one in (place / "fd").iterdir()]
        except OSError:
            continue
        if any(link.startswith(f"{home}/perfbench-ranks-") for link in links):
            found.append(place.name)
    return found


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_green_row_has_both_ranks_and_the_slowest_ones_samples(
    executor: ForkServerExecutor, parallel: str
) -> None:
    row = executor.execute(job(parallel=parallel))
    assert row.status is Status.OK, row.reason + row.stderr_tail
    ranks = row.ranks
    assert ranks is not None and (ranks.parallel, ranks.backend) == (parallel, "gloo")
    assert [one.rank for one in ranks.ranks] == [0, 1]
    own_s = [one.samples_s for one in ranks.ranks]
    assert row.samples_s == [max(both) for both in zip(*own_s, strict=True)]
    assert row.tokens_per_step == 2 * 2 * 64
    assert all(one.engaged == row.engaged and one.engaged for one in ranks.ranks)
    proof = row.step_proof
    assert proof is not None and proof.ok
    assert {"loss", "gradients", "optimizer", "logits", "blocks"} <= proof.tensors.keys()
    assert ranks.unsynchronised_step_s is not None and ranks.exposed_s is not None
    step_s = ranks.unsynchronised_step_s + ranks.exposed_s
    assert step_s == pytest.approx(row.tokens_per_step / (row.tok_per_s or 0))


@pytest.mark.parametrize(
    ("parallel", "axes", "engaged_by"),
    [
        ("ddp", {"compile": "on"}, "graph"),
        ("fsdp", {"compile": "on"}, "graph"),
        ("ddp", {"cuda_graph": "on"}, "capture"),
    ],
    ids=["ddp compiled", "fsdp compiled", "ddp captured"],
)
def test_a_step_in_a_graph_is_the_one_that_is_proved_and_counted(
    executor: ForkServerExecutor, parallel: str, axes: dict[str, str], engaged_by: str
) -> None:
    """Two layers, each branch once in each, by its graph alone: nothing is counted as it runs."""
    row = executor.execute(job(parallel=parallel, **axes))
    assert row.status is Status.OK, row.reason + row.stderr_tail
    assert row.engaged_by == engaged_by and row.ranks is not None
    steps = row.steps_per_sample * len(row.samples_s)
    assert row.engaged == dict.fromkeys(COUNTERS, 2 * steps)
    assert all(one.engaged == row.engaged for one in row.ranks.ranks)
    proof = row.step_proof
    assert proof is not None and proof.ok
    assert {"loss", "gradients", "optimizer", "logits"} <= proof.tensors.keys()
    assert row.ranks.exposed_s is not None, row.ranks.absent


def test_a_fault_in_a_replay_is_named_too(executor: ForkServerExecutor) -> None:
    row = executor.execute(job(planted.NOT_REDUCED, cuda_graph="on"))
    assert row.status is Status.PARITY, row.reason + row.stderr_tail
    assert row.reason.startswith("rank 1: ") and "holds others than rank 0" in row.reason


@pytest.mark.parametrize(
    ("graph", "wanted"), [("on", {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}), ("off", {})]
)
def test_what_a_captured_group_is_started_with(graph: str, wanted: dict[str, str]) -> None:
    assert variables_of(job(cuda_graph=graph)) == wanted


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_what_a_slow_reduction_costs_is_exposed(
    executor: ForkServerExecutor, parallel: str
) -> None:
    """One rank's reduction sleeps, which no other work hides: the exposed time has it, and the step
    without collectives has not.
    """
    row = executor.execute(job(planted.SLOW_WIRE, parallel=parallel))
    assert row.status is Status.OK, row.reason + row.stderr_tail
    ranks = row.ranks
    assert ranks is not None and ranks.exposed_s is not None
    assert ranks.exposed_s > planted.SLOW_S / 2


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        (planted.KILLED, Status.CRASH, ["rank 1 was killed by SIGKILL", "forward of step 3"]),
        (planted.RAISES, Status.CRASH, ["rank 1: RuntimeError: planted", "ranks_measure.py"]),
        (planted.OTHER_PATH, Status.WRONG_PATH, ["rank 1: engaged", "sel.masked"]),
        (planted.NOT_REDUCED, Status.PARITY, ["rank 1: ", "holds others than rank 0"]),
        (planted.NO_MEMORY, Status.PARITY, ["rank 1: no proof of the step: ", "planted"]),
        (planted.LOST, Status.PARITY, ["rank 0: ", "like the share of rank 1"]),
    ],
)
def test_a_fault_of_one_rank_makes_the_cell_red_by_its_number(
    executor: ForkServerExecutor,
    home: pathlib.Path,
    fault: int,
    status: Status,
    words: list[str],
) -> None:
    row: Replicate = executor.execute(job(fault))
    assert row.status is status, row.reason + row.stderr_tail
    assert all(one in row.reason for one in words), row.reason
    assert row.tok_per_s is None
    assert left_over(home) == []


def test_a_rank_that_hangs_is_named_with_its_stack(
    executor: ForkServerExecutor, home: pathlib.Path
) -> None:
    row = executor.execute(job(planted.HANGS, timeout_s=8.0))
    assert row.status is Status.TIMEOUT, row.reason + row.stderr_tail
    assert row.reason.startswith("rank 1 did not go on within 6.4 s, in forward of step 3")
    assert "rank 0 in backward of step 3" in row.reason
    assert "at forward (ranks_measure.py:" in row.reason
    assert left_over(home) == []


def test_the_link_is_timed_by_all_ranks(executor: ForkServerExecutor) -> None:
    """Of two, 2 (n - 1) / n is 1: the rate is a rank's bytes by the slowest one's seconds."""
    axes = Cell("sentinel", 1, "all_reduce", world_size=2)
    asked = job().model_copy(update={"axes": axes, "sentinel": "all_reduce", "profile": False})
    row = executor.execute(asked)
    assert row.status is Status.OK, row.reason + row.stderr_tail
    assert row.ranks is not None and len(row.ranks.ranks) == 2 and row.tok_per_s is not None
    own_s = [one.samples_s for one in row.ranks.ranks]
    slowest_s = [max(both) / row.steps_per_sample for both in zip(*own_s, strict=True)]
    assert row.samples_s == pytest.approx(slowest_s)
    assert row.tok_per_s * statistics.median(row.samples_s) == pytest.approx(2**24)


def test_a_late_rank_is_not_taken_for_a_wrong_clock(executor: ForkServerExecutor) -> None:
    """A rank times its GEMM by its own clock: the largest of all ranks' seconds would be held
    against its raw clock, in which it waited for the late one.
    """
    row = executor.execute(job(planted.LATE))
    assert row.status is Status.OK and row.other_clocks is not None, row.reason + row.stderr_tail
    faults = clock_faults(row.samples_s, row.other_clocks)
    assert not [one for one in faults if "GEMM" in one], faults


def test_a_trace_is_rank_0_s_and_has_the_collectives(
    executor: ForkServerExecutor, tmp_path: pathlib.Path
) -> None:
    """As `perfbench trace` asks for it; the other rank takes the same steps and leaves no file."""
    chrome = tmp_path / "cell-b.json.gz"
    row = executor.execute(job(trace=str(chrome)))
    assert row.status is Status.OK, row.reason + row.stderr_tail
    assert {one.name for one in tmp_path.iterdir()} == {chrome.name, table_path(chrome).name}
    table = Kernels.model_validate_json(table_path(chrome).read_bytes())
    assert "gloo:all_reduce" in table.rows and table.called_from
