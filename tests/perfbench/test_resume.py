"""What a resumed run refuses: changed expectations, rules and settings; and other
processes that came to the GPU in between.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from nsa.capability import assumed
from nsa.settings import Settings
from perfbench.errors import Exit, PerfbenchError
from perfbench.machine import gpu
from perfbench.machine.environment import TargetFit
from perfbench.matrix import matrix as matrices
from perfbench.matrix import plan as plans
from perfbench.records import run_file
from perfbench.records.job import Job
from perfbench.records.rows import Replicate
from perfbench.runner import run as runner
from perfbench.runner.executor import ForkServerExecutor, prepared_executors
from tests.perfbench import builders
from tests.perfbench.fake_nvml import Card, FakeNvml
from tests.perfbench.plan_cases import CODE, planned_from

TEXT = """\
version: 1
name: t
target: {gpu: none}
model: tiny
axes:
  workload: [forward]
  seq_len: [128, 256]
  path: [v2, masked]
  fa2: [off]
  dtype: [fp32]
expect:
  - {match: {path: v2}, engaged: [sel.v2]}
measure: {processes: 2}
limits: {timeout_s: 30, oom: record}
gate: {tolerance_pct: 5, min_replicates: 2}
"""


class FakeExecutor:
    """Green rows at once."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def new_block(self) -> None:
        pass

    def prepare(self, jobs: Sequence[Job]) -> None: ...

    def execute(self, job: Job) -> Replicate:
        self.jobs.append(job)
        planned = next(cell for cell in planned_from(TEXT)[1].cells if cell.cell_id == job.cell_id)
        return builders.replicate(planned, job.replicate, gpu=False)

    def close(self) -> None:
        pass


def run(
    folder: pathlib.Path,
    text: str = TEXT,
    executor: Any = None,
    settings: dict[str, str] | None = None,
    **changes: Any,
) -> Any:
    matrix, plan = planned_from(text)
    values: dict[str, Any] = {
        "plan": plan,
        "matrix": matrix,
        "environment": builders.environment(gpu=False, nsa_settings=settings or {}),
        "source": CODE,
        "argv": ["perfbench", "run", "m.yaml"],
        "seed": 7,
    }
    spec = {field.name for field in dataclasses.fields(runner.RunSpec)} & changes.keys()
    values |= {name: changes.pop(name) for name in spec}
    return runner.run_matrix(
        runner.RunSpec(**values), executor or FakeExecutor(), **{"runs_dir": folder, **changes}
    )


def refused(
    code: Exit, folder: pathlib.Path, resume: pathlib.Path, text: str = TEXT, **changes: Any
) -> str:
    before, executor = (resume / run_file.RUN_FILE).read_bytes(), FakeExecutor()
    with pytest.raises(PerfbenchError) as caught:
        run(folder, text, executor, resume=resume, **changes)
    assert caught.value.exit_code is code
    assert executor.jobs == [] and (resume / run_file.RUN_FILE).read_bytes() == before, (
        "a refusal leaves the run as it was"
    )
    assert "Next: " in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "now"),
    [
        (
            "engaged: [sel.v2]",
            "forbidden: [sel.v1]",
            "engaged sel.v2, and the matrix now expects forbidden sel.v1",
        ),
        (
            "engaged: [sel.v2]",
            "engaged: [sel.v2], forbidden: [sel.v1]",
            "now expects engaged sel.v2; forbidden sel.v1",
        ),
        (
            "match: {path: v2}, ",
            "match: {path: v2, seq_len: 256}, ",
            "engaged sel.v2, and the matrix now expects nothing",
        ),
    ],
)
def test_a_changed_expectation_is_refused_by_cell(
    tmp_path: pathlib.Path, before: str, after: str, now: str
) -> None:
    first = run(tmp_path, only=["path=v2", "seq_len=128"])
    message = refused(Exit.USAGE, tmp_path, first.folder, TEXT.replace(before, after))
    assert (
        now in message and "cell dtype=fp32,fa2=off,path=v2,seq_len=128,workload=forward" in message
    )


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ("timeout_s: 30", "timeout_s: 60", ("has limits", "timeout_s=30.0", "timeout_s=60.0")),
        ("oom: record", "oom: record_and_skip_larger", ("has limits", "record_and_skip_larger")),
        (
            "tolerance_pct: 5",
            "tolerance_pct: 50",
            ("is judged by gate", "tolerance_pct=5.0", "tolerance_pct=50.0"),
        ),
        (
            "gate: {tolerance_pct: 5, min_replicates: 2}\n",
            "",
            ("is judged by gate", "min_replicates=3"),
        ),
        ("processes: 2", "processes: 2, warmup_s: 1", ("measures with", "warmup_s=1.0")),
    ],
)
def test_changed_rules_are_refused(
    tmp_path: pathlib.Path, before: str, after: str, words: tuple[str, ...]
) -> None:
    first = run(tmp_path, only=["seq_len=128"])
    message = refused(Exit.USAGE, tmp_path, first.folder, TEXT.replace(before, after))
    assert all(word in message for word in words)


def test_what_says_the_same_in_other_words_goes_on(tmp_path: pathlib.Path) -> None:
    first = run(tmp_path, only=["seq_len=128"])
    other = TEXT.replace(
        "limits: {timeout_s: 30, oom: record}",
        "limits:  # as before\n  oom: record\n  timeout_s: 30.0",
    )
    assert len(run(tmp_path, other, resume=first.folder).run.replicates) == 8


@pytest.mark.parametrize(
    ("then", "here", "words"),
    [
        ({}, {"NSA_STRICT_ASSERTS": "1"}, "NSA_STRICT_ASSERTS was not set and is 1"),
        ({"NSA_STRICT_ASSERTS": "1"}, {}, "NSA_STRICT_ASSERTS was 1 and is not set"),
        (
            {"NSA_USE_FA2": "1", "NSA_STRICT_ASSERTS": "0"},
            {"NSA_USE_FA2": "0", "NSA_STRICT_ASSERTS": "0"},
            "NSA_USE_FA2 was 1 and is 0",
        ),
    ],
)
def test_changed_settings_are_another_environment(
    tmp_path: pathlib.Path, then: dict[str, str], here: dict[str, str], words: str
) -> None:
    first = run(tmp_path, only=["seq_len=128"], settings=then)
    message = refused(Exit.ENVIRONMENT, tmp_path, first.folder, settings=here)
    assert words in message and message.count(" was ") == 1
    assert len(run(tmp_path, resume=first.folder, settings=then).run.replicates) == 8


def test_a_setting_that_changes_routes_is_named_itself(tmp_path: pathlib.Path) -> None:
    first = run(tmp_path, only=["seq_len=128"])
    matrix = matrices.parse_matrix(TEXT, "m.yaml")
    plan = plans.build_plan(matrix, only=[], capability=assumed("none"), settings=Settings())
    rerouted = [
        cell.model_copy(update={"route": cell.route.model_copy(update={"counters": ["sel.v1"]})})
        for cell in plan.cells
    ]
    with pytest.raises(PerfbenchError, match="NSA_SEL_RANGES_V2 was not set and is 0") as caught:
        run(
            tmp_path,
            settings={"NSA_SEL_RANGES_V2": "0"},
            plan=plans.Plan(rerouted, [], [], 1.0, 2),
            resume=first.folder,
        )
    assert caught.value.exit_code is Exit.ENVIRONMENT


def test_company_that_comes_between_blocks_stops_the_run_and_nothing_is_lost(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(gpu, "NVML_LAG_S", 0.05)
    card = Card()
    nvml, fit = FakeNvml(card), TargetFit("cuda", gpu.GpuHandle(card.uuid, card.name, 0))
    fake = FakeExecutor()

    def execute(self: ForkServerExecutor, job: Job) -> Replicate:
        row = fake.execute(job)
        if len(fake.jobs) == 4:  # the first block is done
            card.processes = [SimpleNamespace(pid=2**30, usedGpuMemory=None)]
        return row

    monkeypatch.setattr(ForkServerExecutor, "execute", execute)
    with (
        pytest.raises(PerfbenchError, match=str(2**30)) as caught,
        prepared_executors(fit, module=nvml) as (executor,),
    ):
        run(tmp_path / "runs", executor=executor)
    (folder,) = (tmp_path / "runs").iterdir()
    assert caught.value.exit_code is Exit.ENVIRONMENT
    assert f"4 finished replicates in {folder}: perfbench run m.yaml --resume {folder}" in str(
        caught.value
    )
    assert len(run_file.read_run(folder).replicates) == 4
    card.processes = []
    with prepared_executors(fit, module=nvml) as (executor,):
        assert len(run(tmp_path / "runs", executor=executor, resume=folder).run.replicates) == 8
