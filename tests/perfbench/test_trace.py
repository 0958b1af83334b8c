"""Traces after a red and of one cell: fakes for every failure, and real steps, processes and
commits on the CPU.
"""

from __future__ import annotations

import errno
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nsa.capability import assumed
from nsa.settings import Settings
from perfbench.commands import outcome
from perfbench.commands import trace as tracecommand
from perfbench.errors import Exit, PerfbenchError
from perfbench.gate.judgement import CellVerdict, Judgement
from perfbench.machine.environment import TargetFit
from perfbench.matrix import matrix as matrices
from perfbench.matrix import plan as plans
from perfbench.matrix.policy import GatePolicy
from perfbench.records import run_file
from perfbench.records.baseline_file import write_baseline
from perfbench.records.job import Job, failed
from perfbench.records.kernel_table import Kernel, Kernels, table_path
from perfbench.records.rows import Replicate, Run, Status
from perfbench.records.verdict import Verdict
from perfbench.runner.ab import checkout, version_plan
from perfbench.runner.ab.checkout import CannotBuild, Checkout
from perfbench.runner.context import MeasuringContext
from perfbench.runner.progress import SilentProgress
from perfbench.tracing import trace
from perfbench.tracing.diff import Traced, TraceDiff, stored_traces, traces_markdown
from perfbench.tracing.kernel_diff import Kind
from perfbench.tracing.trace import SLUG_CHARS, TracedPair, slug
from perfbench.worker import measure, profile
from perfbench.worker.clock import PerfCounterClock
from perfbench.worker.telemetry import sampler_for
from perfbench.worker.workloads import workload
from tests.perfbench import builders, repositories, version_measure
from tests.perfbench.jobs import TINY, job

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = (64, 128, 256, 512, 1024)
MATRIX = f"""\
version: 1
name: small
target: {{gpu: none}}
model: tiny
axes: {{workload: [forward], seq_len: {list(LENGTHS)}, path: [masked], fa2: [off], dtype: [fp32]}}
measure: {{processes: 2, warmup_s: 0.02, min_sample_ms: 20, samples: 3}}
"""
CELLS = [f"dtype=fp32,fa2=off,path=masked,seq_len={n},workload=forward" for n in LENGTHS]


@dataclass
class FakeSide:
    """Leaves a table as a child would: one kernel, ``ms`` long; or ends as ``ends`` says."""

    ms: float
    ends: dict[str, Any] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)

    def new_block(self) -> None: ...
    def close(self) -> None: ...
    def prepare(self, jobs: Sequence[Job]) -> None: ...

    def execute(self, job: Job) -> Replicate:
        self.jobs.append(job)
        assert job.trace is not None
        end, chrome = self.ends.get(job.cell_id), Path(job.trace)
        if isinstance(end, BaseException):
            raise end
        if isinstance(end, Status):
            chrome.with_name(chrome.name.replace(".json.gz", ".partial.json.gz")).write_bytes(
                b"half"
            )
            return failed(job, end, "planted")
        if end != "silent":
            rows = {} if end == "empty" else {"gemm": Kernel(count=2, seconds=self.ms / 1e3)}
            table_path(chrome).write_text(
                "{" if end == "torn" else Kernels(device="cpu", rows=rows).model_dump_json()
            )
            chrome.write_bytes(gzip.compress(b"{}"))
        return version_measure.row_of(job, 100.0)


@dataclass
class Either:
    """The executor of whichever side the trace's file is named for."""

    a: FakeSide
    b: FakeSide

    def new_block(self) -> None: ...
    def prepare(self, jobs: Sequence[Job]) -> None: ...

    def execute(self, job: Job) -> Replicate:
        assert job.trace is not None
        return (self.a if job.trace.endswith("-a.json.gz") else self.b).execute(job)


@dataclass
class Bench:
    a: FakeSide
    b: FakeSide
    opened: list[str]
    said: list[str]
    pair: TracedPair
    out: Path

    def on_red(self, *cells: CellVerdict, limit: int = 3) -> list[TraceDiff]:
        return trace.trace_on_red(judgement(*cells), self.pair, self.out, limit=limit)


def judgement(*cells: CellVerdict) -> Judgement:
    return Judgement(Exit.REGRESSED, "red", list(cells), [], GatePolicy())


def red(
    cell_id: str, change_pct: float | None = -5.0, verdict: Verdict = Verdict.REGRESSED
) -> CellVerdict:
    return CellVerdict(
        cell_id,
        {},
        verdict,
        "slower",
        change_pct=change_pct,
        reproduce=f"perfbench run m.yaml --only cell={cell_id}",
    )


def run_of_matrix(**overrides: Any) -> Run:
    matrix = matrices.parse_matrix(MATRIX, "small.yaml")
    cells = plans.build_plan(matrix, only=[], capability=assumed("none"), settings=Settings()).cells
    return builders.make_run(
        cells,
        gpu=False,
        matrix_text=MATRIX,
        matrix_name="small",
        matrix_path="small.yaml",
        **overrides,
    )


def context_at(
    repository: Path, say: Callable[[str], None] = lambda text: None
) -> MeasuringContext:
    return MeasuringContext(
        TargetFit("cpu", None),
        assumed("none"),
        builders.environment(False),
        repository,
        SilentProgress(),
        say,
    )


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Every side can be opened, and its executor is a fake."""
    said: list[str] = []
    run, out = run_of_matrix(), tmp_path / "run"
    out.mkdir()
    base: dict[str, str | None] = dict.fromkeys(CELLS, "v1")
    pair = TracedPair(
        run, matrices.parse_matrix(MATRIX, "m"), context_at(tmp_path, said.append), base
    )
    made = Bench(FakeSide(1.0), FakeSide(2.0), [], said, pair, out)

    @contextmanager
    def checked_out(text: str, repository: Path) -> Iterator[Checkout]:
        if text.startswith("missing"):
            raise CannotBuild(f"got {text!r}, which is not there")
        made.opened.append(text)
        yield Checkout(text, tmp_path, run.manifest.source)

    @contextmanager
    def own_checkout(root: Path, found: Any) -> Iterator[Checkout]:
        made.opened.append("own")
        yield Checkout("this checkout", tmp_path, found)

    @contextmanager
    def prepared(fit: TargetFit, versions: tuple[Checkout]) -> Iterator[tuple[Either]]:
        yield (Either(made.a, made.b),)

    for room in ("perfbench.tracing.trace", "perfbench.runner"):
        monkeypatch.setattr(f"{room}.checked_out", checked_out)
        monkeypatch.setattr(f"{room}.own_checkout", own_checkout)
    monkeypatch.setattr(trace, "prepared_versions", prepared)
    monkeypatch.setattr(trace, "plan_of_version", plan_here)
    return made


def plan_here(
    one: Checkout, matrix: Any, only: Sequence[str], capability: Any
) -> version_plan.VersionPlan:
    """What the side's own process would answer: its routes are ours."""
    return version_plan.VersionPlan(
        one,
        plans.build_plan(matrix, only=list(only), capability=capability, settings=Settings()),
        matrix.model.to_mapping(),
    )


def test_the_largest_drops_are_traced_and_the_others_named(bench: Bench) -> None:
    drops = dict(zip(CELLS, (-4.0, -20.0, -6.0, -9.0, -1.0), strict=True))
    diffs = bench.on_red(*(red(cell, drop) for cell, drop in drops.items()))
    assert [one.cell_id for one in diffs if not one.left_out] == [CELLS[1], CELLS[3], CELLS[2]]
    assert [one.cell_id for one in diffs if one.left_out] == [CELLS[0], CELLS[4]]
    assert (
        sorted(job.cell_id for job in bench.a.jobs)
        == sorted(job.cell_id for job in bench.b.jobs)
        == sorted(CELLS[1:4])
    )
    assert bench.opened == ["v1", "own"], "one checkout and one server a side"
    text = traces_markdown(diffs)
    assert f"because reds or larger drops were: `{CELLS[0]}`, `{CELLS[4]}`" in text
    assert (
        text.count("operators' time 2.000 ms, was 1.000 ms (+100.0 %)") == 3
        and "| `gemm` | slower per call | 2 |" in text
    )
    assert f"`perfbench run m.yaml --only cell={CELLS[1]}`" in text


def test_what_is_written_is_read_again(bench: Bench) -> None:
    diffs = bench.on_red(red(CELLS[0]), red(CELLS[1], -9.0), limit=1)
    assert stored_traces(bench.out) == diffs and traces_markdown(
        stored_traces(bench.out)
    ) == traces_markdown(diffs)
    names = sorted(path.name for path in (bench.out / "traces").iterdir())
    assert names == sorted(
        f"{slug(CELLS[1])}-{side}.{kind}" for side in "ab" for kind in ("json.gz", "kernels.json")
    )
    candidate = diffs[0].candidate
    assert (
        candidate is not None
        and candidate.chrome is not None
        and (bench.out / candidate.chrome).is_file()
    )
    assert stored_traces(bench.out / "traces") == []
    (bench.out / "trace.json").write_text("[{]")
    with pytest.raises(PerfbenchError, match="damaged .* Next: remove it") as caught:
        stored_traces(bench.out)
    assert caught.value.exit_code is Exit.USAGE


def test_nothing_is_traced_without_a_red(bench: Bench) -> None:
    cells = [
        red(CELLS[0], verdict=Verdict.WATCH),
        red(CELLS[1], verdict=Verdict.FAILED),
        red(CELLS[2], verdict=Verdict.SAME),
    ]
    assert bench.on_red(*cells) == [] and bench.opened == [] and list(bench.out.iterdir()) == []
    assert traces_markdown([]) == ""


def test_a_wrong_path_is_traced_after_the_drops(bench: Bench) -> None:
    diffs = bench.on_red(red(CELLS[0], None, Verdict.WRONG_PATH), red(CELLS[1], -0.5))
    assert [one.verdict for one in diffs] == ["REGRESSED", "WRONG_PATH"]


def test_a_suspect_is_traced_after_the_reds(bench: Bench) -> None:
    """Nothing confirmed or cleared it; its base can be had, and the kernels may settle it."""
    suspect = red(CELLS[0], -9.0, Verdict.SUSPECT)
    diffs = bench.on_red(suspect, red(CELLS[1], -2.0), red(CELLS[2], -50.0, Verdict.SUSPECT))
    assert [one.verdict for one in diffs] == ["REGRESSED", "SUSPECT", "SUSPECT"]
    assert [one.cell_id for one in diffs] == [CELLS[1], CELLS[2], CELLS[0]]
    assert all(one.problems == [] and len(one.changes) == 1 for one in diffs)
    (alone,) = bench.on_red(suspect)
    assert alone.problems == [] and bench.opened == ["v1", "own"] * 2


def test_a_suspect_whose_base_nobody_knows_is_not_traced(bench: Bench) -> None:
    """There is nothing to compare it with; of a red cell its own kernels are shown all the same."""
    bases = {**dict.fromkeys(CELLS, "v1"), CELLS[0]: None}
    bench.pair = TracedPair(bench.pair.run, bench.pair.matrix, bench.pair.context, bases)
    suspect = red(CELLS[0], -9.0, Verdict.SUSPECT)
    assert bench.on_red(suspect) == [] and bench.opened == []
    (diff,) = bench.on_red(suspect, red(CELLS[1], -2.0, Verdict.SUSPECT))
    assert diff.cell_id == CELLS[1]


def test_the_jobs_are_those_of_the_first_replicate_and_the_fault_is_the_candidates(
    bench: Bench,
) -> None:
    faults = [f"slowdown=10%@{CELLS[0]}"]
    manifest = bench.pair.run.manifest.model_copy(update={"injections": faults, "seed": 3})
    run = bench.pair.run.model_copy(update={"manifest": manifest})
    bench.pair = TracedPair(run, bench.pair.matrix, bench.pair.context, bench.pair.base, "v2")
    bench.on_red(red(CELLS[0]), red(CELLS[1]))
    assert bench.opened == ["v1", "v2"]
    first, second = bench.b.jobs
    assert (
        first.injection is not None and first.injection.percent == 10 and second.injection is None
    )
    assert all(one.injection is None for one in bench.a.jobs)
    assert [one.seed for one in bench.a.jobs] == [
        one.seed for one in bench.b.jobs
    ] and first.seed != second.seed
    assert Path(first.trace or "").is_absolute() and not first.profile and first.replicate == 0


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (Status.OOM, "oom: planted"),
        (Status.TIMEOUT, "timeout: planted"),
        (Status.CRASH, "crash: planted"),
        ("silent", "left no readable"),
        ("torn", "left no readable"),
        ("empty", "the profiler saw no kernel of v1"),
        (PerfbenchError(Exit.ENVIRONMENT, "the GPU is busy"), "the GPU is busy"),
        (OSError(errno.ENOSPC, "No space left on device", "x"), "x: No space left on device"),
    ],
    ids=str,
)
def test_a_side_that_cannot_be_traced_is_a_line_and_the_other_is_shown(
    bench: Bench, end: Any, words: str
) -> None:
    bench.a.ends[CELLS[0]] = end
    (diff,) = bench.on_red(red(CELLS[0]))
    assert (
        diff.changes == []
        and len(diff.problems) == 1
        and words in diff.problems[0]
        and diff.problems[0].startswith("base: ")
    )
    text = diff.to_markdown()
    assert "not traced, base: " in text and "| `gemm` | 2 | 2.000 |" in text and "->" not in text
    assert not list((bench.out / "traces").glob("*partial*"))
    assert stored_traces(bench.out) == [diff]


@pytest.mark.parametrize(
    ("base", "words"), [("missing", "which is not there"), (None, "its commit is not known")]
)
def test_a_base_that_cannot_be_had(bench: Bench, base: str | None, words: str) -> None:
    """Of one cell only: each cell has the base that its own baseline was measured at."""
    bases = {**dict.fromkeys(CELLS, "v1"), CELLS[0]: base}
    bench.pair = TracedPair(bench.pair.run, bench.pair.matrix, bench.pair.context, bases)
    first, second = bench.on_red(red(CELLS[0], -9.0), red(CELLS[1], -2.0))
    assert words in first.problems[0] and second.problems == [] and len(second.changes) == 1
    assert bench.opened == ["v1", "own"]


def test_an_unwritable_folder_fails_nothing(bench: Bench) -> None:
    (bench.out / "traces").write_text("in the way")
    (bench.out / "trace.json").mkdir()
    (diff,) = bench.on_red(red(CELLS[0]))
    assert len(diff.problems) == 2 and all("File exists" in problem for problem in diff.problems)
    assert any("cannot be written" in line for line in bench.said)


def test_ctrl_c_ends_the_tracing_and_not_the_verdict(bench: Bench) -> None:
    bench.a.ends[CELLS[1]] = KeyboardInterrupt()
    first, second = bench.on_red(red(CELLS[0], -9.0), red(CELLS[1], -2.0))
    assert (
        first.problems == ["candidate: interrupted; the verdict stands"]
        and len(second.problems) == 2
    )
    assert bench.b.jobs == []


def test_an_older_trace_does_not_pass_for_this_one(bench: Bench) -> None:
    bench.on_red(red(CELLS[0]))
    bench.b.ends[CELLS[0]] = Status.TIMEOUT
    (diff,) = bench.on_red(red(CELLS[0]))
    assert diff.problems == ["candidate: timeout: planted"]
    assert not list((bench.out / "traces").glob(f"{slug(CELLS[0])}-b*"))


@pytest.mark.parametrize(
    "cell_id",
    [
        *CELLS,
        "",
        "..",
        "con",
        "nul",
        "a/b\\c:d*e?f",
        "ü\ud800",
        "x" * 151,
        "=" * 300,
        'q"<>|\n',
        "A",
    ],
)
def test_a_slug_is_a_file_name_everywhere(cell_id: str, tmp_path: Path) -> None:
    name = slug(cell_id)
    assert 0 < len(name) <= SLUG_CHARS and set(name) <= set(
        "abcdefghijklmnopqrstuvwxyz0123456789_-%"
    )
    assert (
        name not in ("con", "nul")
        and (tmp_path / f"{name}-b.partial.json.gz").write_bytes(b"") == 0
    )


def test_slugs_differ_where_ids_do() -> None:
    ids = [
        *CELLS,
        "a",
        "A",
        "%41",
        "a=1",
        "a%3D1",
        "a%3d1",
        "=" * 300,
        "=" * 301,
        "=" * 299 + "b",
        "x" * 151,
        "x" * 152,
        "con",
        "CON",
    ]
    assert len({slug(one) for one in ids}) == len(ids)
    assert slug("path=v2,seq_len=64") == "path%3dv2%2cseq_len%3d64"


def traced(tmp_path: Path, **changes: Any) -> tuple[Replicate, Kernels, Path]:
    """One real cell, in this process."""
    chrome = tmp_path / "cell-b.json.gz"
    row = measure.measure(
        job("masked", "train", trace=str(chrome), **changes),
        PerfCounterClock(),
        sampler_for("cpu", None, ""),
    )
    return row, Kernels.model_validate_json(table_path(chrome).read_bytes()), chrome


def test_a_real_step_leaves_its_timeline_and_its_table(tmp_path: Path) -> None:
    row, table, chrome = traced(tmp_path)
    assert (
        row.status is Status.OK
        and row.tok_per_s is None
        and row.samples_s == []
        and row.parity is None
    )
    events = json.loads(gzip.decompress(chrome.read_bytes()))["traceEvents"]
    operators = [event for event in events if event.get("cat") == "cpu_op"]
    for name in ("aten::scaled_dot_product_attention", "aten::mm", "aten::_fused_adamw_"):
        assert sum(event["name"] == name for event in operators) == table.rows[name].count > 0
    # one a branch and layer
    assert table.rows["aten::scaled_dot_product_attention"].count >= 3 * TINY.num_layers
    assert table.device == "cpu" and table.host_syncs is None
    begin = min(event["ts"] for event in operators)
    whole_s = (max(event["ts"] + event["dur"] for event in operators) - begin) * 1e-6
    assert table.memory is not None and table.memory_absent == ""
    # the hidden states of 64 tokens, at least, are alive for each layer's backward
    assert table.memory.peak_bytes > TINY.num_layers * 64 * TINY.dim * 4
    # two threads: backward has its own
    assert table.total_s is not None and 0.2 * whole_s < table.total_s < 1.05 * 2 * whole_s
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "cell-b.json.gz",
        "cell-b.kernels.json",
    ]


def test_a_planted_operation_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, before, _ = traced(tmp_path)
    build = workload.build

    def slower(job: Job) -> workload.Workload:
        # far longer than another process could hold up an operator
        work, much = (build(job), torch.ones(20_000_000))

        def step() -> None:
            work.step()
            torch.cumsum(much, 0)

        return workload.Workload(step, work.tokens_per_step, work.model)

    monkeypatch.setattr(workload, "build", slower)
    _, after, _ = traced(tmp_path)
    changes = TraceDiff(
        cell_id="c",
        base=Traced(name="v1", kernels=before),
        candidate=Traced(name="v2", kernels=after),
    ).changes
    assert (changes[0].name, changes[0].kind) == ("aten::cumsum", Kind.NEW) and changes[
        0
    ].candidate is not None
    assert changes[0].candidate.count == 1


def test_a_wrong_path_is_traced_all_the_same(tmp_path: Path) -> None:
    """If the plan named another path, the trace shows what ran."""
    row, table, _ = traced(tmp_path, plan=job("v2", "train").plan)
    assert row.status is Status.OK and table.launches > 100


def test_a_step_of_too_many_events_leaves_its_table_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "MAX_EVENTS", 100)
    _, table, chrome = traced(tmp_path)
    assert not chrome.exists() and "up to 100" in table.chrome_absent and "aten::mm" in table.rows
    side = Traced(name="v2", kernels=table)
    assert (
        "no timeline of the candidate: "
        in TraceDiff(cell_id="c", base=None, candidate=side).to_markdown()
    )


def test_the_table_of_a_gpu_holds_its_kernels_and_syncs() -> None:
    on_gpu, on_host = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [
        event("gemm", on_gpu, 2000),
        event("gemm", on_gpu, 3000),
        event("Optimizer.step", on_gpu, 9000, annotation=True),
    ]
    events += [
        event("aten::mm", on_host, 7),
        event("cudaStreamSynchronize", on_host, 7),
        event("cudaDeviceSynchronize", on_host, 7),
    ]
    table = profile.tabulate(events, "cuda")
    assert (
        list(table.rows) == ["gemm"]
        and table.rows["gemm"].count == 2
        and table.total_s == pytest.approx(5e-6)
    )
    assert table.host_syncs == 1


def event(name: str, kind: Any, duration_ns: int, annotation: bool = False) -> Any:
    methods = {
        "name": name,
        "device_type": kind,
        "duration_ns": duration_ns,
        "is_user_annotation": annotation,
        "start_ns": 0,
    }
    return SimpleNamespace(
        **{key: lambda value=value: value for key, value in methods.items()},
        start_thread_id=lambda: 1,
    )


PLANTED = """
_forward = TinyLM.forward
def _slower(self, *args, **options):
    torch.cumsum(torch.ones(()).expand(20_000_000), 0)
    return _forward(self, *args, **options)
TinyLM.forward = _slower
"""


def test_two_real_commits_in_real_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second commit does more, and on_red names what."""
    monkeypatch.chdir(repositories.ROOT)
    # half a second of process each, tested elsewhere
    monkeypatch.setattr(trace, "plan_of_version", plan_here)
    repository = tmp_path / "repository"
    (first,) = repositories.make(repository, 1000.0)
    model = repository / "nsa" / "model.py"
    model.write_text(model.read_text(encoding="utf-8") + PLANTED, encoding="utf-8")
    second = repositories.commit(repository, "more work")
    run = run_of_matrix(source=checkout.source_of(repository))
    pair = TracedPair(
        run, matrices.parse_matrix(MATRIX, "m"), context_at(repository), {CELLS[0]: first}
    )
    (diff,) = trace.trace_on_red(judgement(red(CELLS[0])), pair, tmp_path)
    assert (
        diff.problems == []
        and diff.changes[0].name == "aten::cumsum"
        and diff.changes[0].kind is Kind.NEW
    )
    assert (
        len(list((tmp_path / "traces").glob("*.json.gz"))) == 2
        and len(repositories.worktrees(repository)) == 1
    )
    assert run.manifest.source.commit == second


@pytest.fixture
def stored_run(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plain run in a folder; the checkout is what its manifest names."""
    monkeypatch.setattr("perfbench.machine.source_of", lambda root: bench.pair.run.manifest.source)
    monkeypatch.setattr(outcome, "CHECKOUT", tmp_path)
    return write(bench.pair.run, tmp_path / "runs")


def write(run: Run, home: Path) -> Path:
    with run_file.create_run(home, run.manifest) as writer:
        return writer.folder


def test_the_command_traces_what_the_run_holds(
    bench: Bench, stored_run: Path, tmp_path: Path
) -> None:
    text, code = tracecommand.trace_cell(stored_run, CELLS[0])
    assert code is Exit.OK and bench.opened == ["own"] and "| `gemm` | 2 | 2.000 |" in text
    assert (stored_run / "traces" / f"{slug(CELLS[0])}-b.json.gz").exists()
    text, code = tracecommand.trace_cell(
        stored_run / "run.jsonl", CELLS[0], out=tmp_path / "here", as_json=True
    )
    assert (
        code is Exit.OK
        and (tmp_path / "here").is_dir()
        and json.loads(text)["candidate"]["kernels"]["rows"]["gemm"]["count"] == 2
    )


def test_the_command_knows_both_sides_of_a_pair_and_of_a_confirmation(
    bench: Bench, stored_run: Path, tmp_path: Path
) -> None:
    base = builders.with_manifest(
        bench.pair.run,
        source=bench.pair.run.manifest.source.model_copy(update={"commit": "0" * 40}),
    )
    for pair in (tmp_path / "pair", stored_run / "confirm" / "000000000000"):
        pair.mkdir(parents=True)
        for name, run in (("a", base), ("b", bench.pair.run)):
            write(run, pair).rename(pair / name)
    for folder in (tmp_path / "pair", stored_run):
        bench.opened.clear()
        text, code = tracecommand.trace_cell(folder, CELLS[0])
        assert code is Exit.OK and bench.opened == ["0" * 40, "own"] and "slower per call" in text
    bench.opened.clear()
    assert tracecommand.trace_cell(stored_run, CELLS[0], side="a")[
        1
    ] is Exit.OK and bench.opened == ["0" * 40]


def test_the_base_is_that_of_the_cells_baseline(
    bench: Bench,
    stored_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A run that was checked against two baselines has a pair against each one's commit, and no
    baseline is at the third.
    """
    run, commits = bench.pair.run, ["0" * 40, "1" * 40]
    for commit in commits:
        pair = stored_run / "confirm" / commit[:12]
        pair.mkdir(parents=True)
        base = builders.with_manifest(
            run, source=run.manifest.source.model_copy(update={"commit": commit})
        )
        for name, side in (("a", base), ("b", run)):
            write(side, pair).rename(pair / name)

    def traced_against(commit: str, side: str | None = None) -> list[str]:
        known = builders.baseline_of(builders.small_run())
        cell = next(iter(known.cells.values())).model_copy(update={"commit": commit})
        path = tmp_path / f"{commit[:2]}.json"
        write_baseline(path, known.model_copy(update={"cells": {CELLS[0]: cell}}))
        bench.opened.clear()
        tracecommand.trace_cell(stored_run, CELLS[0], side=side, baseline=path)  # type: ignore[arg-type]
        return bench.opened

    for commit in commits:
        assert traced_against(commit) == [commit, "own"]
    assert traced_against("2" * 40) == ["own"]
    err = capsys.readouterr().err
    assert (
        "no side a: it has no pair against its baseline here (got pairs against 000000000000,"
        " 111111111111" in err
    )
    assert "the baseline's commit is 222222222222" in err and "--baseline" in err
    with pytest.raises(PerfbenchError, match="not a"):
        traced_against("2" * 40, side="a")
    # no baseline: both pairs have the cell, and nothing says which one judged it
    bench.opened.clear()
    monkeypatch.setattr(outcome, "BASELINES", tmp_path / "none")
    tracecommand.trace_cell(stored_run, CELLS[0])
    assert (
        bench.opened == ["own"] and "the baseline's commit is not known" in capsys.readouterr().err
    )


@pytest.mark.parametrize("content", [None, "not json"])
def test_a_named_baseline_that_cannot_be_read_is_refused(
    bench: Bench, stored_run: Path, tmp_path: Path, content: str | None
) -> None:
    path = tmp_path / "named.json"
    if content is not None:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(
        PerfbenchError, match=r"--baseline: .*named\.json.*Next: name a baseline file"
    ) as caught:
        tracecommand.trace_cell(stored_run, CELLS[0], baseline=path)
    assert caught.value.exit_code is Exit.BASELINE and bench.opened == []


def test_the_command_says_what_is_not_there(bench: Bench, stored_run: Path) -> None:
    for side in ("a", "both"):
        with pytest.raises(PerfbenchError, match="holds side b of this cell, not a") as caught:
            tracecommand.trace_cell(stored_run, CELLS[0], side=side)  # type: ignore[arg-type]
        assert caught.value.exit_code is Exit.USAGE
    with pytest.raises(PerfbenchError, match="'path=masked' names 5 cells"):
        tracecommand.trace_cell(stored_run, "path=masked")
    bench.b.ends[CELLS[0]] = Status.OOM
    text, code = tracecommand.trace_cell(stored_run, CELLS[0])
    assert code is Exit.FAILED and "candidate: oom: planted" in text
    bench.b.ends[CELLS[0]] = KeyboardInterrupt()
    with pytest.raises(PerfbenchError, match="interrupted") as caught:
        tracecommand.trace_cell(stored_run, CELLS[0])
    assert caught.value.exit_code is Exit.INTERRUPTED


@pytest.mark.parametrize(
    ("changes", "opened", "words"),
    [
        ({"commit": "1" * 40}, ["1" * 40], ""),
        ({"dirty_sha256": "d" * 64}, [], "changes that were never committed"),
        ({"commit": None, "reason": "no git"}, [], "a run of unknown code"),
    ],
)
def test_the_command_takes_the_code_of_the_manifest(
    bench: Bench,
    stored_run: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    opened: list[str],
    words: str,
) -> None:
    other = bench.pair.run.manifest.source.model_copy(update=changes)
    folder = write(builders.with_manifest(bench.pair.run, source=other), tmp_path / "others")
    text, code = tracecommand.trace_cell(folder, CELLS[0])
    assert bench.opened == opened and words in text and code is (Exit.FAILED if words else Exit.OK)


def test_without_git_the_run_is_taken_to_be_this_checkout(
    bench: Bench,
    stored_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    nothing = bench.pair.run.manifest.source.model_copy(
        update={"commit": None, "reason": "no git here"}
    )
    monkeypatch.setattr("perfbench.machine.source_of", lambda root: nothing)
    assert tracecommand.trace_cell(stored_run, CELLS[0])[1] is Exit.OK and bench.opened == ["own"]
    assert "git cannot prove: no git here" in capsys.readouterr().err
