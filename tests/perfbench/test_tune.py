"""`perfbench tune`: the rule by hand, its matrix, and the command from outside with a fake executor
and once for real.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

import nsa.settings
from nsa.capability import assumed
from nsa.config import preset
from nsa.routing import Capability
from nsa.routing.thresholds import Tuned
from nsa.settings import Setting, Settings
from perfbench.commands import app, measuring, outcome
from perfbench.errors import Exit, PerfbenchError
from perfbench.machine.environment import TargetFit
from perfbench.machine.gpu import GpuHandle
from perfbench.matrix import matrix as matrices
from perfbench.matrix import plan as plans
from perfbench.records import run_file
from perfbench.records.job import Job
from perfbench.records.rows import PlannedCell, Replicate, Status
from perfbench.runner import executor
from perfbench.tuning import matrix as tuneplan
from perfbench.tuning.crossing import crossing, margin_pct
from perfbench.worker import measure
from perfbench.worker.clock import PerfCounterClock
from perfbench.worker.telemetry import sampler_for
from tests.perfbench import builders
from tests.perfbench.digested import write_run

CARD = "NVIDIA H100 80GB HBM3"
H100 = replace(
    assumed("h100"),
    fa2_provider="torch.varlen 2.13.0",
    fa2_reason="",
    triton_provider="triton 3.7.1",
    triton_reason="",
)
CPU = assumed("none")
LENGTHS = (256, 1024, 4096)
M125 = preset("m7c_125m")
Times = list[float] | None


# The rule.

FAST, SLOW, TIE = [1.0, 1.01], [2.0, 2.01], [1.02, 1.03]


@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        ([FAST, FAST, FAST], [SLOW, SLOW, SLOW], 1),
        ([SLOW, FAST, FAST], [FAST, SLOW, SLOW], 2),
        ([SLOW, SLOW, FAST], [FAST, FAST, SLOW], 4),
        ([SLOW, SLOW, SLOW], [FAST, FAST, FAST], None),
        # not monotone: a length that is lost again counts for nothing
        ([FAST, SLOW, FAST], [SLOW, FAST, SLOW], 4),
        ([FAST, FAST, SLOW], [SLOW, SLOW, FAST], None),
        ([FAST, FAST, FAST], [TIE, SLOW, SLOW], 2),  # 2 % is within the margin of 3
        ([FAST, FAST, FAST], [FAST, FAST, FAST], None),
        ([None, FAST, FAST], [SLOW, SLOW, SLOW], 2),
        ([FAST, None, FAST], [SLOW, SLOW, SLOW], 4),  # where A is not known it must not be taken
        ([FAST, FAST, None], [SLOW, SLOW, SLOW], None),
        ([FAST, FAST, FAST], [SLOW, SLOW, None], 1),  # B may not fit there
        ([FAST, FAST, FAST], [None, SLOW, SLOW], 2),
        ([FAST, FAST, FAST], [SLOW, None, SLOW], 1),
        ([FAST, FAST, FAST], [None, None, None], None),
        ([FAST, [1.0], FAST], [SLOW, SLOW, SLOW], 4),  # one process is no proof
        ([FAST, FAST, FAST], [[2.0], SLOW, SLOW], 2),
    ],
)
def test_crossing(a: list[Times], b: list[Times], want: int | None) -> None:
    assert crossing([1, 2, 4], a, b) == want


def test_one_length_and_none() -> None:
    assert crossing([512], [FAST], [SLOW]) == 512
    assert crossing([512], [SLOW], [FAST]) is None
    assert crossing([], [], []) is None


def test_noise_widens_the_margin() -> None:
    """10 % between medians: proved where processes agree, not where those of one side are 12 %
    apart.
    """
    assert margin_pct([1.0, 1.0], [1.1, 1.1]) == 3.0
    assert crossing([1], [[1.0, 1.0, 1.0]], [[1.1, 1.1, 1.1]]) == 1
    assert crossing([1], [[1.0, 1.0, 1.12]], [[1.1, 1.1, 1.1]]) is None
    assert crossing([1], [[1.0, 1.0, 1.0]], [[1.0, 1.1, 1.12]]) is None
    assert margin_pct([1.0, 1.0, 1.12], [1.1, 1.1]) == pytest.approx(12.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_what_is_no_time_is_refused(bad: float) -> None:
    for a, b in (([[bad, 1.0]], [SLOW]), ([FAST], [[2.0, bad]])):
        with pytest.raises(ValueError, match="wanted a positive number"):
            crossing([1], a, b)


@pytest.mark.parametrize("lengths", [[2, 1], [1, 1]])
def test_lengths_must_ascend(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match="wanted ascending ones"):
        crossing(lengths, [FAST, FAST], [SLOW, SLOW])
    with pytest.raises(ValueError, match="as many of each"):
        crossing([1, 2], [FAST], [SLOW, SLOW])


# The matrix.


def planned(
    lengths: Sequence[int] = LENGTHS, *, gpu: str | None = CARD, capability: Capability = H100
) -> tuple[list[PlannedCell], dict[str, str]]:
    """Cells and, by cell, why the rest is excluded."""
    text = tuneplan.tuning_matrix(
        tuneplan.Machine(gpu, capability), "m7c_125m", M125, lengths, 3, Settings()
    )
    matrix = matrices.parse_matrix(text, "tune.yaml")
    plan = plans.build_plan(matrix, only=[], capability=capability, settings=Settings())
    assert plan.warnings == []
    return plan.cells, {one.cell_id: one.reason for one in plan.excluded}


def test_the_matrix_of_a_gpu() -> None:
    cells, excluded = planned()
    kinds = [
        (path, fa2, n)
        for n in LENGTHS
        for path, fa2 in [
            ("triton", "off"),
            *((p, f) for p in ("v2", "masked") for f in ("on", "off")),
        ]
    ]
    assert sorted((c.axes.path, c.axes.fa2, c.axes.seq_len) for c in cells) == sorted(kinds)
    assert {(c.axes.workload, c.axes.dtype, c.axes.l2) for c in cells} == {
        ("attention", "bf16", "cold")
    }
    assert len(excluded) == 3 and all(
        "window kernel of its own" in why for why in excluded.values()
    )


def test_the_window_is_compared_by_cells_that_differ_in_fa2_alone() -> None:
    cells, _ = planned((4096,))
    counters = {c.axes.fa2: set(c.route.counters) for c in cells if c.axes.path == "masked"}
    assert counters["on"] - counters["off"] == {"win.fa2"} and counters["off"] - counters["on"] == {
        "win.sdpa"
    }


def test_what_auto_would_not_build_is_not_measured() -> None:
    cells, excluded = planned((8192, 65536))  # 2 heads x 65,536^2 elements are 2^33
    assert {c.axes.seq_len for c in cells if c.axes.path == "masked"} == {8192}
    assert sum("no mask of more than" in why for why in excluded.values()) == 2
    cells, _ = planned((65536,))
    assert {c.axes.path for c in cells} == {"triton", "v2"}


def test_without_a_gpu_the_reasons_are_the_routes() -> None:
    cells, excluded = planned((128,), gpu=None, capability=CPU)
    assert {(c.axes.path, c.axes.fa2, c.axes.dtype) for c in cells} == {
        ("v2", "off", "fp32"),
        ("masked", "off", "fp32"),
    }
    assert {why for cell, why in excluded.items() if "path=triton" in cell} == {
        "path=triton cannot be served: there is no GPU"
    }


def test_the_name_carries_the_compute_capability() -> None:
    assert tuneplan.sm_of(tuneplan.Machine(CARD, H100).matrix_name) == (9, 0)
    assert tuneplan.sm_of(tuneplan.Machine("x", replace(H100, sm=(12, 1))).matrix_name) == (12, 1)
    assert tuneplan.sm_of(tuneplan.Machine(None, CPU).matrix_name) is None
    for other in ("cpu", "tune", "tune-sm9", "tune-sm9.x", "tune-sm"):
        with pytest.raises(ValueError, match="wanted one that `perfbench tune` made"):
            tuneplan.sm_of(other)


@pytest.mark.parametrize("text", ["", "256,", "a", "0", "1.5", "-1", "256,256", "²"])
def test_lengths_are_whole_numbers_each_once(text: str) -> None:
    assert tuneplan.parse_lengths("512, 256") == (256, 512)
    with pytest.raises(PerfbenchError, match="--lengths"):
        tuneplan.parse_lengths(text)


def test_a_setting_that_turns_routes_is_refused() -> None:
    # an explicit fa2 outranks it
    tuneplan.refuse_settings(Settings(fa2_min_len_win=Setting(512, "environment")))
    with pytest.raises(PerfbenchError, match=r"NSA_USE_FA2=0 changes .* Next: unset NSA_USE_FA2$"):
        tuneplan.refuse_settings(Settings(use_fa2=Setting(False, "environment")))


# The command.

Speed = Callable[[str, str, int], float]  # path, fa2, tokens -> ms


@dataclass
class FakeExecutor:
    """Answers every job by ``step_ms``, or with the status that ``ends`` has for (path, fa2,
    tokens).
    """

    gpu: bool
    step_ms: Speed = lambda path, fa2, tokens: 1.0
    ends: dict[tuple[str, str, int], Status] = field(default_factory=dict)
    jobs: list[Job] = field(default_factory=list)

    def new_block(self) -> None: ...

    def close(self) -> None: ...

    def prepare(self, jobs: Sequence[Job]) -> None: ...

    def execute(self, job: Job) -> Replicate:
        self.jobs.append(job)
        where = job.axes.path, job.axes.fa2, job.axes.seq_len
        if (status := self.ends.get(where)) is not None:
            return executor.failed(job, status, "by the test")
        fields = {
            "cell_id": job.cell_id,
            "axes": job.axes,
            "config_sha256": job.config_sha256,
            "route": job.plan,
            "expect": job.expect,
        }
        speed = where[2] / self.step_ms(*where) * 1000
        return builders.replicate(
            PlannedCell(**fields, layers=1), job.replicate, tok_per_s=speed, gpu=self.gpu
        )


def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, gpu: bool) -> FakeExecutor:
    fake = FakeExecutor(gpu)

    @contextmanager
    def prepared(fit: object) -> Iterator[tuple[FakeExecutor]]:
        yield (fake,)

    monkeypatch.setattr(measuring, "prepared_executors", prepared)
    monkeypatch.setattr(outcome, "CHECKOUT", tmp_path)
    handle = GpuHandle("GPU-1", CARD, 0) if gpu else None
    monkeypatch.setattr(
        "perfbench.machine.visible_gpu", lambda: (handle, "" if gpu else "none is here")
    )
    monkeypatch.setattr(measuring, "collect_environment", lambda device: builders.environment(gpu))
    fit = TargetFit("cuda" if gpu else "cpu", handle)
    for room in ("perfbench.machine", "perfbench.commands.measuring"):
        monkeypatch.setattr(f"{room}.check_target", lambda target: fit)
        monkeypatch.setattr(f"{room}.capability_here", lambda fit: H100 if gpu else CPU)
    monkeypatch.chdir(tmp_path)
    return fake


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeExecutor:
    """An H100 that is not there."""
    return machine(monkeypatch, tmp_path, gpu=True)


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeExecutor:
    return machine(monkeypatch, tmp_path, gpu=False)


def crossing_times(path: str, fa2: str, tokens: int) -> float:
    """Triton wins from 1,024; FA-2 in the window from 4,096; v2 never."""
    if path == "triton":
        return 2.0 if tokens < 1024 else 1.0
    if path == "v2":
        return 9.0
    return 1.5 if (fa2 == "on") == (tokens >= 4096) else 1.8


def tuned(*argv: str, code: int = 0) -> dict[str, object]:
    """The tune.json of a run of the command, next to its run file."""
    assert app.invoke(["tune", "--lengths", "256,1024,4096", "--seed", "1", *argv]) == code
    (file,) = Path("reports/runs").glob("*/tune.json")
    return dict(json.loads(file.read_text(encoding="utf-8")))


def found(content: dict[str, object]) -> dict[str, object]:
    decisions = content["decisions"]
    assert isinstance(decisions, list)
    return {one["name"]: one["min_tokens"] if one["judged"] else "not judged" for one in decisions}


def test_on_a_gpu_the_lengths_are_decided(
    card: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    card.step_ms = crossing_times
    content = tuned()
    out = capsys.readouterr().out
    assert found(content) == {
        "triton_min_tokens": 1024,
        "fa2_min_len_win": 4096,
        "v2_min_tokens": None,
    }
    assert content["tuned_py"] == ["(9, 0): Tuned(triton_min_tokens=1024),"]
    assert content["settings"] == {"NSA_FA2_MIN_LEN_WIN": 4096}
    assert (
        "| 256 | 2 | 9 | 9 | 1.8 | 1.5 | masked fa2=off | against masked fa2=on +20.0 %, proved"
        " (margin 3.0 %) |" in out
    )
    assert "| 4096 | 1 | 9 | 9 | 1.5 | 1.8 | triton |" in out
    assert len(card.jobs) == 5 * 3 * 3
    (folder,) = (one for one in Path("reports/runs").iterdir() if one.is_dir())
    assert {one.name for one in folder.iterdir()} == {"run.jsonl", "tune.json", "tune.md"}
    assert out == (folder / "tune.md").read_text(encoding="utf-8")


def test_the_lines_are_what_the_code_reads(card: FakeExecutor) -> None:
    """The line is Python of thresholds.py, and the variables are ones that nsa.settings knows."""
    card.step_ms = crossing_times
    content = tuned()
    (line,) = content["tuned_py"]  # type: ignore[misc]
    assert eval("{" + line + "}", {"Tuned": Tuned}) == {(9, 0): Tuned(triton_min_tokens=1024)}
    variables = content["settings"]
    assert isinstance(variables, dict)
    assert (
        nsa.settings.load({name: str(value) for name, value in variables.items()})
        .request()
        .fa2_min_len_win
        == 4096
    )


def test_always_is_zero_and_never_is_beyond_the_longest(
    card: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    # fa2 is a tie: the older one stays
    card.step_ms = lambda path, fa2, tokens: {"triton": 1.0, "v2": 2.0, "masked": 3.0}[path]
    content = tuned()
    assert found(content) == {
        "triton_min_tokens": 256,
        "fa2_min_len_win": None,
        "v2_min_tokens": 256,
    }
    assert content["tuned_py"] == ["(9, 0): Tuned(triton_min_tokens=0),"]
    assert content["settings"] == {"NSA_FA2_MIN_LEN_WIN": 4097}
    out = capsys.readouterr().out
    assert (
        "a number above 4096 says that no measured length proved it" in out
        and "shorter ones than 256 were not measured" in out
    )


def test_the_same_run_gives_the_same_bytes_again(
    card: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    card.step_ms = crossing_times
    tuned()
    first, jobs = capsys.readouterr().out, len(card.jobs)
    (folder,) = (one for one in Path("reports/runs").iterdir() if one.is_dir())
    assert app.invoke(["tune", "--from", str(folder), "--out", "again"]) == 0
    assert capsys.readouterr().out == first
    for name in ("tune.json", "tune.md"):
        assert (Path("again") / name).read_bytes() == (folder / name).read_bytes()
    assert app.invoke(["tune", "--from", str(folder), "--json"]) == 0
    assert capsys.readouterr().out == (folder / "tune.json").read_text(encoding="utf-8")
    assert len(card.jobs) == jobs


def test_a_cell_that_fails_is_red_and_not_judged(
    card: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    """Triton crashes at the longest: it must not be taken there, so it is never the fastest from
    anywhere.
    """
    card.step_ms, card.ends = crossing_times, {("triton", "off", 4096): Status.CRASH}
    content = tuned(code=6)
    assert found(content)["triton_min_tokens"] is None
    out = capsys.readouterr().out
    assert (
        "- triton at 4096: FAILED: crash: by the test" in out
        and "at 4096: the first side has no time that counts" in out
    )
    assert "FAILED, exit 6" in out


def test_a_rival_that_does_not_fit_refutes_nothing(card: FakeExecutor) -> None:
    """Every other path runs out of memory at the longest: triton is decided by the shorter ones,
    and the run says 6.
    """
    card.step_ms = crossing_times
    card.ends = {
        (path, fa2, 4096): Status.OOM for path in ("v2", "masked") for fa2 in ("on", "off")
    }
    content = tuned(code=6)
    assert found(content) == {
        "triton_min_tokens": 1024,
        "fa2_min_len_win": None,
        "v2_min_tokens": None,
    }


@pytest.mark.parametrize(("status", "code"), [(Status.PARITY, 5), (Status.WRONG_PATH, 4)])
def test_a_number_without_proof_decides_nothing(
    card: FakeExecutor, status: Status, code: int
) -> None:
    card.step_ms, card.ends = crossing_times, {("triton", "off", n): status for n in LENGTHS}
    content = tuned(code=code)
    assert found(content)["triton_min_tokens"] == "not judged" and content["tuned_py"] == []


def test_on_a_cpu_only_v2_and_masked_are_compared(
    cpu: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu.step_ms = lambda path, fa2, tokens: 1.0 if (path == "v2") == (tokens > 256) else 2.0
    content = tuned("--model", "tiny")
    assert found(content) == {
        "triton_min_tokens": "not judged",
        "fa2_min_len_win": "not judged",
        "v2_min_tokens": 1024,
    }
    assert (content["tuned_py"], content["settings"], content["compute_capability"]) == (
        [],
        {},
        None,
    )
    out, err = capsys.readouterr()
    assert "Nothing: neither path triton nor FA-2 was judged on this machine." in out
    assert "- triton at 256, 1024, 4096: path=triton cannot be served: there is no GPU" in out
    assert "no GPU (none is here): path triton and FA-2 cannot be judged here" in err
    assert {job.axes.path for job in cpu.jobs} == {"v2", "masked"}


def test_too_few_processes_decide_nothing_and_say_so(
    cpu: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    tuned("--model", "tiny")
    (folder,) = (one for one in Path("reports/runs").iterdir() if one.is_dir())
    rows = (folder / "run.jsonl").read_text(encoding="utf-8").splitlines()
    # as a spent budget would leave it
    kept = [row for row in rows if json.loads(row).get("replicate", 0) == 0]
    Path("cut").mkdir()
    Path("cut/run.jsonl").write_text("\n".join(kept) + "\n", encoding="utf-8")
    capsys.readouterr()
    assert app.invoke(["tune", "--from", "cut"]) == 6
    assert "**Exit 6: too little was measured for v2_min_tokens**" in capsys.readouterr().out


def test_a_run_can_be_measured_again_by_its_own_matrix(cpu: FakeExecutor) -> None:
    tuned("--model", "tiny")
    assert (
        app.invoke(["run", "reports/runs/tune-cpu.yaml", "--only", "path=v2", "--out", "more"]) == 0
    )


def test_usage(cpu: FakeExecutor, capsys: pytest.CaptureFixture[str]) -> None:
    tuned("--model", "tiny")
    (folder,) = (one for one in Path("reports/runs").iterdir() if one.is_dir())
    Path("small.yaml").write_text(
        Path("reports/runs/tune-cpu.yaml").read_text(encoding="utf-8").replace("tune-cpu", "small"),
        encoding="utf-8",
    )
    assert app.invoke(["run", "small.yaml", "--out", "other"]) == 0
    (other,) = Path("other").iterdir()
    cell = cpu.jobs[0].cell_id
    assert (
        app.invoke(
            [
                "run",
                "reports/runs/tune-cpu.yaml",
                "--out",
                "planted",
                "--inject",
                f"slowdown=10%@{cell}",
            ]
        )
        == 0
    )
    (injected,) = Path("planted").iterdir()
    capsys.readouterr()
    for argv, message in (
        (["--model", "m7c_125n"], "did you mean 'm7c_125m'"),
        (["--lengths", "few"], "--lengths 'few'"),
        (["--budget", "soon"], "--budget 'soon'"),
        (
            ["--from", str(folder), "--model", "tiny", "--seed", "2"],
            "--model, --seed would do nothing",
        ),
        (["--from", "nowhere"], "nowhere"),
        (["--from", str(other)], "got a run of matrix 'small'"),
        (["--from", str(injected)], "injected faults"),
        (["--out", "small.yaml", "--model", "tiny"], "cannot be written"),
    ):
        assert app.invoke(["tune", *argv]) == 2, argv
        assert message in capsys.readouterr().err


def test_the_name_of_a_matrix_proves_no_cells(
    cpu: FakeExecutor, capsys: pytest.CaptureFixture[str]
) -> None:
    """Renamed to tune-cpu: other workloads, other paths, and two batches at one place."""
    head = (
        "version: 1\nname: tune-cpu\ntarget: {gpu: none}\nmodel: tiny\nmeasure: {processes:"
        " 2}\ngate: {min_replicates: 2}\n"
    )
    for number, (axes, message) in enumerate(
        (
            (
                "workload: [train], path: [v2, masked], fa2: [off], dtype: [fp32]",
                "workload=train, wanted workload attention, path",
            ),
            (
                "workload: [attention], path: [dense], dtype: [fp32]",
                "path=dense,seq_len=128,workload=attention, wanted workload attention",
            ),
            (
                "workload: [attention], path: [v2], fa2: [off], dtype: [fp32], batch: [1, 2]",
                "wanted one cell of a path, fa2 and length",
            ),
        )
    ):
        Path("tune-cpu.yaml").write_text(
            f"{head}axes: {{seq_len: [128], {axes}}}\n", encoding="utf-8"
        )
        app.invoke(["run", "tune-cpu.yaml", "--out", f"renamed{number}"])
        (folder,) = Path(f"renamed{number}").iterdir()
        capsys.readouterr()
        assert app.invoke(["tune", "--from", str(folder)]) == 2
        (line,) = (line for line in capsys.readouterr().err.splitlines() if "got a run" in line)
        assert (
            message in line
            and "Next: name the folder of one" in line
            and not (folder / "tune.json").exists()
        )


@pytest.mark.parametrize(
    "cell_id",
    [
        "fa2=on,seq_len=64",
        "",
        "fa2=on,path=v2",
        "fa2=on,path=v2,seq_len=many",
        "path=v2,seq_len=64",
    ],
)
def test_an_excluded_id_that_names_no_place_is_left_out(cpu: FakeExecutor, cell_id: str) -> None:
    content = tuned("--model", "tiny")
    (folder,) = (one for one in Path("reports/runs").iterdir() if one.is_dir())
    run = run_file.read_run(folder)
    excluded = [*run.manifest.excluded, {"cell_id": cell_id, "reason": "by hand"}]
    named = builders.with_manifest(run, excluded=excluded)
    write_run(folder / "run.jsonl", named)
    assert app.invoke(["tune", "--from", str(folder)]) == 0
    again = json.loads((folder / "tune.json").read_text(encoding="utf-8"))
    assert again["cells"] == content["cells"] and again["decisions"] == content["decisions"]


def test_an_interrupted_run_goes_on(cpu: FakeExecutor, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(path: str, fa2: str, tokens: int) -> float:
        if len(cpu.jobs) == 5:
            raise KeyboardInterrupt
        return 1.0

    cpu.step_ms, argv = interrupted, ["tune", "--model", "tiny", "--lengths", "256,512"]
    assert app.invoke(argv) == 130
    (folder,) = (one for one in Path("reports/runs").iterdir() if one.is_dir())
    assert f"--resume {folder}" in capsys.readouterr().err
    cpu.step_ms = lambda path, fa2, tokens: 1.0 if path == "v2" else 2.0
    assert app.invoke([*argv, "--resume", str(folder)]) == 0
    assert len(cpu.jobs) == 2 * 2 * 3 + 1
    assert (folder / "tune.md").is_file()


def test_a_card_that_is_busy_is_exit_8(card: FakeExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(fit: object) -> None:
        raise PerfbenchError(Exit.ENVIRONMENT, "another process computes on it")

    monkeypatch.setattr(measuring, "prepared_executors", busy)
    assert app.invoke(["tune", "--lengths", "256"]) == 8


class InProcess(FakeExecutor):
    """Measures for real, in this process: what a fresh one costs (torch, 3 s) is shown by
    test_executor.
    """

    def execute(self, job: Job) -> Replicate:
        return measure.measure(job, PerfCounterClock(), sampler_for("cpu", None))


@pytest.mark.usefixtures("one_thread")
def test_for_real_on_this_cpu(
    cpu: FakeExecutor, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Parity, routes, samples and hard gates: only the numbers are the machine's own."""
    real = InProcess(gpu=False)
    monkeypatch.setattr(measuring, "prepared_executors", lambda fit: nullcontext((real,)))
    begin = time.monotonic()
    assert (
        app.invoke(["tune", "--model", "tiny", "--lengths", "64,96", "--processes", "2", "--json"])
        == 0
    )
    whole_ms = 1e3 * (time.monotonic() - begin)
    content = json.loads(capsys.readouterr().out)
    measured = {
        (one["path"], one["fa2"], one["seq_len"]): one["step_ms"]
        for one in content["cells"]
        if one["step_ms"]
    }
    assert set(measured) == {(path, "off", n) for path in ("v2", "masked") for n in (64, 96)}
    assert all(len(times) == 2 for times in measured.values())
    assert all(whole_ms / 1e5 < ms < whole_ms for times in measured.values() for ms in times), (
        "milliseconds, of this run"
    )
    assert found(content)["v2_min_tokens"] in (64, 96, None)
