"""One replicate: proved, warmed up, timed and witnessed in that order, and no speed where anything is amiss."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa import dispatch, engagement, selection, settings
from nsa.ops import sliding
from nsa.ops.selected import PATHS
from nsa.routing import BranchRoute, Path
from nsa.settings import Setting, Settings
from perfbench import measure, parity, physics, tuning, witness, workload
from perfbench.clock import FakeClock
from perfbench.job import Injection, Job
from perfbench.result import Expect, Replicate, Status
from perfbench.telemetry import FakeSampler, NullSampler, Sampler, Window
from perfbench.timing import is_level
from perfbench.workload import Workload
from tests.perfbench import builders
from tests.perfbench.jobs import TINY, cell_of, job, route_of

pytestmark = pytest.mark.usefixtures("one_thread", "light")
STEP_S = 1 / 128  # exact in binary, so that counts of steps are exact too
PROOF = builders.parity(proved_in="another #0")
TELEMETRY = builders.telemetry(gpu=False)
Units = Callable[[int, Job], Callable[[], None]]
REAL_GEMM: Units = measure._gemm


@dataclass
class Stub:
    """A workload that only counts: each step engages what ``engages`` says for its number, once a layer."""

    engages: Callable[[int], tuple[BranchRoute, ...]]
    clock: FakeClock | None = None
    step_s: float = 0.0
    steps: int = 0
    model: nn.Module = field(default_factory=lambda: nn.Linear(1, 1))

    def step(self) -> None:
        for branch in self.engages(self.steps) * TINY.num_layers:
            engagement.record(branch)
        self.steps += 1
        if self.clock is not None:
            self.clock.advance(self.step_s)


def stub(monkeypatch: pytest.MonkeyPatch, path: str = "v2", **changes: Any) -> Stub:
    branches = route_of(cell_of(path)).branches
    made = Stub(changes.pop("engages", lambda _: branches), **changes)
    monkeypatch.setattr(workload, "build", lambda asked: Workload(made.step, 64, made.model))
    return made


class Watch(FakeSampler):
    """Notes the clock and the steps when the timed window opens and closes."""

    def __init__(self, clock: FakeClock, counter: Stub | None = None) -> None:
        super().__init__(TELEMETRY)
        self._clock, self._counter = clock, counter
        self.opened_s = self.closed_s = -1.0
        self.steps_before = -1

    @contextmanager
    def window(self) -> Iterator[Window]:
        self.opened_s = self._clock.now()
        self.steps_before = self._counter.steps if self._counter else -1
        with super().window() as opened:
            yield opened
        self.closed_s = self._clock.now()


def run(asked: Job, clock: Any = None, sampler: Sampler | None = None) -> Replicate:
    return measure.measure(asked, clock or FakeClock(STEP_S), sampler or FakeSampler(TELEMETRY))


def no_build(asked: Job) -> Workload:
    raise AssertionError("the model was built for a cell that must not be timed")


def assert_no_speed(row: Replicate) -> None:
    assert row.tok_per_s is None and row.samples_s == [] and row.physics is None


# A row that is in order.


EVERY_PATH = [(path, "train") for path in ("masked", "dense")] + [(path, "forward") for path in ("v1", "v2", "auto", "dense")]


@pytest.mark.parametrize(("path", "kind"), EVERY_PATH)
def test_an_ok_row_is_complete_and_consistent(path: str, kind: str) -> None:
    luck = random.Random(9)
    seconds = (STEP_S * luck.uniform(1, 3) for _ in itertools.count())
    asked = job(path, kind, 96, batch=2, profile=True, measure={"samples": 4})
    begin = time.monotonic()
    row = run(asked, FakeClock(seconds))
    assert (row.status, row.reason) == (Status.OK, "")
    assert (row.cell_id, row.replicate, row.axes, row.config_sha256) == (asked.cell_id, 0, asked.axes, asked.config_sha256)
    assert statistics.fmean(row.samples_s) != statistics.median(row.samples_s), "or the next lines could not tell them apart"
    assert len(row.samples_s) == 4 and row.tokens_per_step == 2 * 96 and row.steps_per_sample >= 1
    assert row.tok_per_s == pytest.approx(row.tokens_per_step * row.steps_per_sample / statistics.median(row.samples_s), rel=1e-12)
    assert row.route == asked.plan
    calls = TINY.num_layers * row.steps_per_sample * 4  # of the timed steps and no others
    assert row.engaged == dict.fromkeys(asked.plan.counters, calls)
    assert row.parity is not None and row.parity.ok and row.parity.proved_in is None
    assert ("dq" in row.parity.tensors) == (kind == "train")
    assert row.telemetry == TELEMETRY
    assert row.profile is not None and row.profile.witness_ok is True
    assert row.host_bound is None and row.peak_memory_bytes is None, "null on a CPU, never 0"
    assert row.cold_start_s is not None and 0 < row.cold_start_s <= row.wall_s <= time.monotonic() - begin
    assert Replicate.model_validate_json(row.model_dump_json()) == row


@pytest.mark.parametrize("path", ["masked", "dense"])
def test_the_rows_physics(path: str) -> None:
    row = run(job(path, "train", 64))
    shape: dict[str, Any] = {"workload": "train", "batch": 1, "tokens": 64, "dense": path == "dense"}
    found = row.physics
    assert found is not None and found.gemm_flops_per_s is not None and row.tok_per_s is not None
    assert found.flops == physics.step_flops(TINY, **shape)
    assert found.min_bytes == physics.step_min_bytes(TINY, dtype="fp32", **shape)
    step_s = row.tokens_per_step / row.tok_per_s
    assert step_s == pytest.approx(STEP_S) and found.flops_per_s == pytest.approx(found.flops / step_s)
    assert found.gemm_flops_per_s == pytest.approx(2 * 1024**3 / STEP_S), "every call lasts one step on this clock"
    assert found.floor_fraction == pytest.approx(found.flops / found.gemm_flops_per_s / step_s)
    assert found.datasheet_bytes_per_s is None and found.notes == ["CPU: datasheet ceilings are null"]


def test_a_real_row_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing faked but the size of the GEMM."""
    from perfbench.clock import PerfCounterClock

    row = run(job("v2", "train", 64, profile=True), PerfCounterClock(), NullSampler("no GPU"))
    assert row.status is Status.OK and row.tok_per_s is not None
    assert all(0.005 < seconds < 5 for seconds in row.samples_s), "a sample lasts about min_sample_ms"
    assert 500 < row.tok_per_s < 1e6
    assert row.telemetry is not None and row.telemetry.utilisation_pct is None and row.telemetry.absent["utilisation_pct"] == "no GPU"
    assert torch.get_num_threads() == measure.CPU_THREADS


def test_only_a_job_that_asks_is_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    row = run(job("masked", "forward", profile=False))
    assert row.status is Status.OK and row.profile is None and row.host_bound is None
    monkeypatch.setattr(witness, "profile", lambda *_: builders.profile(busy_fraction=0.5))
    assert run(job("masked", "forward", profile=True)).host_bound is True


# How long and how often.


@pytest.mark.parametrize("samples", [1, 2, 7])
def test_a_fixed_number_of_samples(monkeypatch: pytest.MonkeyPatch, samples: int) -> None:
    stub(monkeypatch)
    row = run(job(proof=PROOF, measure={"samples": samples, "max_s": 0.001}))
    assert len(row.samples_s) == samples, "max_s does not cut a fixed number short"


@pytest.mark.parametrize(("min_sample_ms", "steps"), [(0.001, 1), (7.8, 1), (8, 2), (50, 7), (1000, 128)])
def test_samples_last_at_least_min_sample_ms(monkeypatch: pytest.MonkeyPatch, min_sample_ms: float, steps: int) -> None:
    counted = stub(monkeypatch)
    clock = FakeClock(STEP_S)
    watch = Watch(clock, counted)
    row = run(job(proof=PROOF, measure={"samples": 3, "min_sample_ms": min_sample_ms}), clock, watch)
    assert row.steps_per_sample == steps and row.samples_s == [steps * STEP_S] * 3
    assert min(row.samples_s) * 1e3 >= min_sample_ms
    assert counted.steps - watch.steps_before == 3 * steps and row.tok_per_s == 64 / STEP_S


@pytest.mark.parametrize(("max_s", "count"), [(1.0, 16), (0.5, 8), (0.01, 3)])
def test_max_s_ends_the_window(monkeypatch: pytest.MonkeyPatch, max_s: float, count: int) -> None:
    """Full samples until the time is up, and never fewer than three."""
    stub(monkeypatch)
    clock = FakeClock(STEP_S)
    watch = Watch(clock)
    row = run(job(proof=PROOF, measure={"samples": None, "max_s": max_s, "min_sample_ms": 8 * STEP_S * 1e3}), clock, watch)
    assert row.steps_per_sample == 8 and len(row.samples_s) == count
    assert watch.closed_s - watch.opened_s == sum(row.samples_s)


def warm_up_s(monkeypatch: pytest.MonkeyPatch, seconds: Iterator[float] | float, warmup_s: float) -> float:
    stub(monkeypatch)
    clock = FakeClock(seconds)
    watch = Watch(clock)
    row = run(job(proof=PROOF, measure={"warmup_s": warmup_s}), clock, watch)
    assert row.status is Status.OK and row.samples_s
    return watch.opened_s


def test_a_level_series_is_warm_when_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0.5 <= warm_up_s(monkeypatch, STEP_S, 0.5) < 0.6
    assert 2.0 <= warm_up_s(monkeypatch, STEP_S, 2.0) < 2.1
    luck = random.Random(4)
    assert 0.5 <= warm_up_s(monkeypatch, (STEP_S * (1 + 0.05 * luck.gauss(0, 1)) for _ in itertools.count()), 0.5) < 1.0


def test_warm_up_goes_on_while_it_gets_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    settling = (STEP_S * (1 + 2 * 0.97**i) for i in itertools.count())
    took = warm_up_s(monkeypatch, settling, 0.5)
    assert 1.0 < took < 2.1


@pytest.mark.parametrize(("warmup_s", "cap_s"), [(0.25, 1.0), (1.0, 4.0), (2.0, 5.0), (3.0, 5.0)])
def test_warm_up_is_capped(monkeypatch: pytest.MonkeyPatch, warmup_s: float, cap_s: float) -> None:
    rising = (STEP_S * (1 + 0.01 * i) for i in itertools.count())
    assert cap_s <= warm_up_s(monkeypatch, rising, warmup_s) < cap_s + 0.3


def test_no_warm_up_still_sizes_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    assert warm_up_s(monkeypatch, STEP_S, 0.0) < 0.1


def test_the_warmed_up_speed_sizes_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cold first steps, many times slower, must not make samples many times too short."""
    stub(monkeypatch)
    seconds = itertools.chain([32 * STEP_S, 16 * STEP_S, 8 * STEP_S], itertools.repeat(STEP_S))
    row = run(job(proof=PROOF, measure={"min_sample_ms": 8 * STEP_S * 1e3, "warmup_s": 1.0}), FakeClock(seconds))
    assert row.steps_per_sample == 8


def test_is_level_on_series() -> None:
    level = [0.02] * 50
    assert is_level(level)
    assert not is_level(level[:3]), "three points show no slope"
    for drift in (0.01, -0.01, 0.5):  # a second, relative
        assert not is_level([0.02 * (1 + drift * 0.02 * i) for i in range(50)])
    assert is_level([0.02 * (1 + 0.0005 * 0.02 * i) for i in range(50)]), "half of what counts as a slope"


def test_is_level_amid_noise() -> None:
    def series(seed: int, drift: float, noise: float = 0.02) -> list[float]:
        luck = random.Random(seed)
        return [0.02 * (1 + drift * 0.02 * i + noise * luck.gauss(0, 1)) for i in range(100)]

    assert sum(is_level(series(seed, 0.0)) for seed in range(100)) >= 85, "two standard errors: 95 of 100"
    for drift in (0.02, -0.02, 0.2):  # the smaller ones are six standard errors
        assert sum(is_level(series(seed, drift)) for seed in range(100)) <= 1


# Another path than planned.


def test_the_plan_of_another_path(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock(STEP_S)
    row = run(job("v2", plan=builders.route_line(route_of(cell_of("masked")))), clock)
    assert row.status is Status.WRONG_PATH and clock.now() == 0, "not timed"
    assert "this process routes to" in row.reason and "'sel.v2'" in row.reason and "'sel.masked'" in row.reason
    assert row.route is not None and "sel.v2" in row.route.counters, "the row says what would have run"
    assert row.parity is not None and row.engaged
    assert_no_speed(row)


def test_a_setting_that_reroutes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "current", lambda: Settings(sel_ranges_v2=Setting(False, "environment")))
    clock = FakeClock(STEP_S)
    row = run(job("v2"), clock)
    assert row.status is Status.WRONG_PATH and clock.now() == 0
    assert "NSA_SEL_RANGES_V2=0 (environment) turns path=v2 into v1" in row.reason and "'sel.v1'" in row.reason
    assert row.engaged["sel.v1"] == TINY.num_layers and "sel.v2" not in row.engaged
    assert_no_speed(row)


@pytest.mark.parametrize(
    ("expect", "words"),
    [
        (Expect(engaged=["sel.fa2"]), "expected sel.fa2 to be engaged"),
        (Expect(engaged=["sel.v2", "sel.fa2", "win.fa2"]), "expected sel.fa2, win.fa2 to be engaged"),
        (Expect(forbidden=["sel.v2"]), "sel.v2 is forbidden here, and it ran"),
        (Expect(engaged=["sel.v2"], forbidden=["sel.v1", "win.sdpa"]), "win.sdpa is forbidden here"),
    ],
)
def test_expectations(expect: Expect, words: str) -> None:
    clock = FakeClock(STEP_S)
    row = run(job("v2", "forward", expect=expect), clock)
    assert row.status is Status.WRONG_PATH and words in row.reason and clock.now() == 0
    assert_no_speed(row)


def test_expectations_that_hold() -> None:
    assert (
        run(job("v2", "forward", expect=Expect(engaged=["sel.v2", "win.sdpa"], forbidden=["sel.v1", "sel.reference"]))).status is Status.OK
    )


def test_a_silent_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that routes to v2 and then runs another path is seen by the counters."""
    selected, slow = dispatch.selected, route_of(cell_of("reference"))
    monkeypatch.setattr(dispatch, "selected", lambda route, *x, **options: selected(slow, *x, **options))
    row = run(job("v2", "forward", proof=PROOF))
    assert row.status is Status.WRONG_PATH and "engaged" in row.reason and "sel.loop" in row.reason
    assert_no_speed(row)


@pytest.mark.parametrize("what", ["another", "none", "one more", "one less"])
def test_what_runs_while_timing_is_what_counts(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """The first step goes as planned; the fallback begins later, in the timed window."""
    planned, other = route_of(cell_of("v2")).branches, route_of(cell_of("v1")).branches
    later = {"another": other, "none": (), "one more": (*planned, other[1]), "one less": planned[1:]}[what]
    stub(monkeypatch, engages=lambda number: planned if number < 5 else later)
    row = run(job(proof=PROOF, profile=True))
    assert row.status is Status.WRONG_PATH and "engaged" in row.reason and row.profile is None
    assert set(row.engaged) == {counter for branch in later for counter in branch.counters}, "of the timed window"
    assert row.telemetry is not None, "facts are kept, the speed is not"
    assert_no_speed(row)


@pytest.mark.parametrize("when", [0, 30])
def test_a_layer_that_took_no_planned_path(monkeypatch: pytest.MonkeyPatch, when: int) -> None:
    """Every name is there, but not once a layer and step: one step, or one layer, went another way unseen."""
    planned = route_of(cell_of("v2")).branches
    stub(monkeypatch, engages=lambda number: planned[:1] * 2 + planned[1:] if number == when else planned)
    row = run(job(proof=PROOF, measure={"samples": 30}))
    assert row.status is Status.WRONG_PATH and "calls were due from each counter" in row.reason and "cmp.sdpa" in row.reason
    assert_no_speed(row)


def test_engagement_of_the_first_step_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, other = route_of(cell_of("v2")).branches, route_of(cell_of("v1")).branches
    counted = stub(monkeypatch, engages=lambda number: other if number == 0 else planned)
    row = run(job(proof=PROOF))
    assert row.status is Status.WRONG_PATH and counted.steps == 1
    assert_no_speed(row)


def test_a_witness_that_contradicts_takes_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(witness, "testify", lambda *_: (False, "the Route names fa2, and no device kernel is called *flash_fwd*"))
    row = run(job("masked", "forward", profile=True))
    assert row.status is Status.WRONG_PATH and "no device kernel" in row.reason and row.profile is not None
    assert_no_speed(row)
    monkeypatch.setattr(witness, "testify", lambda *_: (None, "nothing can witness it"))
    assert run(job("masked", "forward", profile=True)).status is Status.OK


# Wrong numbers.


def one_key_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PATHS[Path.V2]
    monkeypatch.setitem(PATHS, Path.V2, lambda *x, q_start, **options: attend(*x, q_start=q_start + 1, **options))  # type: ignore[arg-type]


def window_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = sliding.attend
    monkeypatch.setattr(sliding, "attend", lambda *x, window, **options: attend(*x, window=window + 1, **options))


def block_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    choose = selection.choose

    def dropped(*x: Any, **options: Any) -> Tensor:
        blocks = choose(*x, **options)
        return torch.cat([blocks[..., :-1], torch.full_like(blocks[..., -1:], -1)], -1)

    monkeypatch.setattr(selection, "choose", dropped)


@pytest.mark.parametrize("kind", ["train", "forward"])
@pytest.mark.parametrize("fault", [one_key_too_many, window_too_long, block_dropped], ids=lambda fault: fault.__name__)
def test_what_differs_from_the_oracle_is_never_timed(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[pytest.MonkeyPatch], None], kind: str
) -> None:
    fault(monkeypatch)
    monkeypatch.setattr(workload, "build", no_build)
    clock = FakeClock(STEP_S)
    row = run(job("v2", kind), clock)
    assert row.status is Status.PARITY and clock.now() == 0
    assert row.parity is not None and not row.parity.ok
    assert row.reason == f"differs from the fp64 oracle: {row.parity.worst}" and "error / tolerance" in row.reason
    assert row.route is not None and row.engaged == {} and row.telemetry is None
    assert_no_speed(row)


def test_a_proof_of_another_route_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    def differs(*_: Any, **__: Any) -> None:
        raise parity.RouteDiffers("parity would run (sel.v1), the timed cell runs (sel.v2)")

    monkeypatch.setattr(parity, "check", differs)
    monkeypatch.setattr(workload, "build", no_build)
    row = run(job("v2"))
    assert row.status is Status.PARITY and "parity would run (sel.v1)" in row.reason and row.parity is None
    assert_no_speed(row)


def test_parity_is_asked_for_exactly_this_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def check(model: Any, timed: Any, **options: Any) -> Any:
        asked.update(options, model=model, timed=timed)
        return builders.parity()

    monkeypatch.setattr(parity, "check", check)
    stub(monkeypatch, "masked")
    wanted = job("masked", "train")
    run(wanted)
    assert asked.pop("model") == TINY and asked.pop("timed") == route_of(cell_of("masked"))
    assert asked == {
        "path": "masked",
        "fa2": "off",
        "dtype": torch.float32,
        "device": "cpu",
        "train": True,
        "seed": wanted.seed,
        "tokens": 64,
        "batch": 1,
    }


def test_a_given_proof_is_carried_and_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(*_: Any, **__: Any) -> None:
        raise AssertionError("proved already in this sitting")

    monkeypatch.setattr(parity, "check", check)
    row = run(job("masked", "forward", proof=PROOF))
    assert row.status is Status.OK and row.parity == PROOF and row.parity.proved_in == "another #0"


# Injections, memory.


@pytest.mark.parametrize(("percent", "slower"), [(10.0, 1.10), (50.0, 1.5), (200.0, 3.0), (0.01, 1.001)])
def test_an_injected_slowdown_is_work_of_that_share(monkeypatch: pytest.MonkeyPatch, percent: float, slower: float) -> None:
    """On a clock that counts: a step is 8 ms, a unit of extra work a thousandth of it, and at least one is done."""
    clock = FakeClock(0.0)
    stub(monkeypatch, clock=clock, step_s=STEP_S)
    monkeypatch.setattr(measure, "_gemm", lambda size, asked: lambda: clock.advance(STEP_S / 1000))
    plain = run(job(proof=PROOF), clock)
    asked = job(proof=PROOF)
    slowed = run(asked.model_copy(update={"injection": Injection(kind="slowdown", percent=percent, cell_id=asked.cell_id)}), clock)
    assert plain.tok_per_s is not None and slowed.tok_per_s is not None
    assert plain.tok_per_s == pytest.approx(64 / STEP_S)
    assert plain.tok_per_s / slowed.tok_per_s == pytest.approx(slower, rel=1e-6)
    assert slowed.status is Status.OK and slowed.engaged == plain.engaged


class CpuTimeClock:
    """Seconds of this process's own CPU time: another process on the machine does not slow it."""

    def now(self) -> float:
        return time.process_time()

    def time_steps(self, step: Callable[[], None], steps: int, between: Callable[[], None] | None = None) -> float:
        assert between is None
        begin = time.process_time()
        for _ in range(steps):
            step()
        return time.process_time() - begin


def test_an_injected_slowdown_costs_real_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_gemm", REAL_GEMM)
    monkeypatch.setattr(measure, "_physics", lambda *_: None)
    asked = job("masked", "forward", proof=PROOF, measure={"samples": 5, "warmup_s": 0.1})
    plain = run(asked, CpuTimeClock())
    slowed = run(asked.model_copy(update={"injection": Injection(kind="slowdown", percent=200, cell_id=asked.cell_id)}), CpuTimeClock())
    assert plain.tok_per_s is not None and slowed.tok_per_s is not None
    assert 1.8 < plain.tok_per_s / slowed.tok_per_s < 6.0


def test_other_injections_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forkserver acts them out; here they must not look like a slowdown."""
    stub(monkeypatch)
    asked = job(proof=PROOF)
    assert run(asked.model_copy(update={"injection": Injection(kind="hang", cell_id=asked.cell_id)})).tok_per_s == 64 / STEP_S


@pytest.mark.parametrize("at", ["build", "first step", "timed step"])
def test_out_of_memory_passes_through(monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    def fails() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    planned = route_of(cell_of("v2")).branches

    def engages(number: int) -> tuple[BranchRoute, ...]:
        if number >= {"first step": 0, "timed step": 20}.get(at, 10**9):
            fails()
        return planned

    stub(monkeypatch, engages=engages)
    if at == "build":
        monkeypatch.setattr(workload, "build", lambda asked: fails())
    with pytest.raises(torch.OutOfMemoryError, match="20.00 GiB"):
        run(job(proof=PROOF, measure={"samples": 100}))


# What a row says of itself.


def test_every_null_of_an_ok_row_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for profiled in (True, False):
        stub(monkeypatch)
        monkeypatch.setattr(witness, "profile", lambda *_: builders.profile(gpu=False))
        row = run(job(proof=PROOF, profile=profiled, measure={"warmup_s": 0.01}))
        nulls = {name for name in Replicate.model_fields if getattr(row, name) is None}
        assert row.status is Status.OK and nulls == set(row.absent), row.absent
        assert {"cycles_per_step", "energy_j_per_token", "host_bound", "steady"} <= nulls and ("profile" in nulls) is not profiled
        assert "no NVIDIA GPU" in row.absent["cycles_per_step"] and "shorter" not in row.absent["energy_j_per_token"]


@pytest.mark.parametrize(("rising", "steady"), [(0.0, True), (0.01, False)])
def test_whether_the_warm_up_ended_level_is_stored(monkeypatch: pytest.MonkeyPatch, rising: float, steady: bool) -> None:
    stub(monkeypatch)
    seconds = (STEP_S * (1 + rising * i) for i in itertools.count())
    row = run(job(proof=PROOF, measure={"warmup_s": 0.25}), FakeClock(seconds))
    assert row.steady is steady and "steady" not in row.absent


def test_cycles_energy_and_choices_reach_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    stub(monkeypatch)
    monkeypatch.setattr(tuning, "choices", lambda: {"nsa.ops.kernels.k[64]": "BLOCK: 64"})
    seen = builders.telemetry(sm_clock_mhz=1280.0, energy_j=96.0, window_s=2.5)
    row = run(job(proof=PROOF, measure={"samples": 3, "min_sample_ms": STEP_S * 1e3}), sampler=FakeSampler(seen))
    assert row.cycles_per_step == 1280e6 / 128 and row.energy_j_per_token == 96 / (3 * 64)
    assert row.tuned == {"nsa.ops.kernels.k[64]": "BLOCK: 64"}


def test_a_row_without_a_speed_has_no_cycles_or_energy(monkeypatch: pytest.MonkeyPatch) -> None:
    planned, other = route_of(cell_of("v2")).branches, route_of(cell_of("v1")).branches
    stub(monkeypatch, engages=lambda number: planned if number < 5 else other)
    row = run(job(proof=PROOF), sampler=FakeSampler(builders.telemetry(window_s=3.0)))
    assert row.status is Status.WRONG_PATH and row.cycles_per_step is None and row.energy_j_per_token is None
