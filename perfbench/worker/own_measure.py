"""One replicate of a user's own step: build, compare as far as it declares, warm up, time, witness.

What is not declared is not proved, and the row says so.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from nsa import engagement
from perfbench.matrix import find
from perfbench.records import Job, OtherClocks, OwnStepLine, Physics, Status
from perfbench.roofline import judge_step
from perfbench.worker import autotuner, memory, profile
from perfbench.worker.clock import CheckedClock, Clock
from perfbench.worker.device import allocation_retries, set_threads, synchronize
from perfbench.worker.gemm import gemm_flops_per_s, slowed
from perfbench.worker.own_step import DeclaredStep, StepRequest, ratios_of
from perfbench.worker.plugin_object import file_of, resolve
from perfbench.worker.stop import Stop, without_speed
from perfbench.worker.telemetry import Sampler
from perfbench.worker.timing import TRACE_WARM_STEPS, absent_of, time_samples, warm_up
from perfbench.worker.turn import Turn
from perfbench.worker.user_code import UserCode
from perfbench.worker.workloads import workload

Function = Callable[[StepRequest, str], object]


@dataclass(slots=True)
class _Word:
    """What is proved of the step and what is not, as sentences."""

    proved: list[str] = field(default_factory=list)
    not_proved: list[str] = field(default_factory=list)
    comparisons: dict[str, float] = field(default_factory=dict)

    def line(self, sha256: str) -> OwnStepLine:
        return OwnStepLine(
            sha256=sha256,
            proved=self.proved,
            not_proved=self.not_proved,
            comparisons=self.comparisons,
        )


def measure_own(job: Job, clock: Clock, sampler: Sampler, turn: Turn) -> dict[str, Any]:
    """The fields of the row; Stop where the step has no speed, whatever its code raised."""
    set_threads(job)
    torch.manual_seed(job.seed)
    target, facts = job.axes.workload, {"route": job.plan, "engaged_by": "call"}
    user = partial(UserCode, target, _home(job), facts=facts)
    with user("when it was built"):
        function = cast("Function", resolve(target, _search(job)))
        declared = DeclaredStep.of(target, function(StepRequest.of(job), job.device))
        if declared.setup is not None:
            declared.setup()
    file = file_of(target)
    assert file is not None  # resolve has compared it
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    begin = time.perf_counter()
    with user("in its first step"), engagement.collect() as engaged:
        declared.step()
        synchronize()
    facts |= {"cold_start_s": time.perf_counter() - begin, "engaged": engaged.counts}
    if job.trace is not None:
        facts |= _traced(job, clock, turn, Path(job.trace), declared)
    else:
        word = _Word()
        _compare(declared, word, facts, user("in its parity", failing=Status.PARITY), target)
        facts["own_step"] = word.line(sha256)
        facts |= _timed(job, clock, sampler, turn, declared, user, word, facts)
        facts["own_step"] = word.line(sha256)
    if declared.teardown is not None:
        with user("in its teardown", facts=without_speed(facts)):
            declared.teardown()
    return facts


def _search(job: Job) -> list[Path]:
    return [] if job.own_step_folder is None else [Path(job.own_step_folder)]


def _home(job: Job) -> Path:
    """Where the user's own files lie, for their frames in a traceback."""
    try:
        found = find(job.axes.workload, _search(job))
    except ValueError as error:
        raise Stop(Status.CRASH, str(error)) from None
    return (found.folder or found.path.parent).resolve()


def _compare(
    declared: DeclaredStep, word: _Word, facts: dict[str, Any], code: UserCode, target: str
) -> None:
    """The step's own comparisons; Stop with status parity where one is beyond its tolerance."""
    if declared.parity is None:
        word.not_proved.append("parity (none declared)")
        return
    with code:
        ratios = ratios_of(target, declared.parity())
    word.comparisons = {name: min(ratio, 1e300) for name, ratio in ratios.items()}
    worst = max(ratios, key=lambda name: ratios[name])
    said = f"{worst} {ratios[worst]:.3g} of its tolerance"
    if not ratios[worst] <= 1:
        raise Stop(Status.PARITY, f"differs from the step's own reference: {said}", facts)
    word.proved.append(f"parity by its own reference ({len(ratios)} compared, worst {said})")


def _timed(
    job: Job,
    clock: Clock,
    sampler: Sampler,
    turn: Turn,
    declared: DeclaredStep,
    user: Callable[[str], UserCode],
    word: _Word,
    facts: dict[str, Any],
) -> dict[str, Any]:
    on_gpu = job.device == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    turn()
    retries, flush = allocation_retries(job), workload.l2_flush(job)
    plain = cast("Callable[[], None]", declared.step)
    with user("while it warmed up"):
        warmth = warm_up(plain, clock, job.measure, flush)
    step = slowed(plain, warmth.step_s, job, clock)
    with user("while it was timed"):
        timed = time_samples(step, warmth.step_s, job.measure, clock, sampler, flush, turn.timing())
    found = timed.facts(declared.tokens_per_step)
    found |= {"steady": warmth.steady, "tuned": autotuner.choices()}
    found["absent"] |= absent_of(job, warmth)
    found["absent"] |= dict.fromkeys(
        ("parity", "length_proof", "step_proof"), "a user's own step: own_step says what is proved"
    )
    found["absent"] |= dict.fromkeys(("cache", "loop", "peer", "ranks"), "a user's own step")
    found["absent"]["node"] = "one machine, no fleet"
    if job.waiting_peers and (again := allocation_retries(job) - retries):
        raise torch.OutOfMemoryError(
            f"memory was so scarce next to {job.waiting_peers} waiting processes that {again}"
            " allocations were retried"
        )
    _expected(job, timed.engaged, word, facts | without_speed(found))
    if on_gpu:
        found["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    if job.profile:
        with user("under the profiler"):
            seen = profile.observe(step, job.device, timed.step_s, flush)
        ok, sentence = _witness(declared, seen, word)
        found["profile"] = seen.profile(ok, sentence)
        found["host_bound"] = profile.is_host_bound(found["profile"])
        if ok is False:
            raise Stop(Status.WRONG_PATH, sentence, facts | without_speed(found))
    gemm_clock = CheckedClock(clock)
    found["physics"] = _physics(job, declared, timed.step_s, gemm_clock, word)
    if found["physics"] is None:
        found["absent"]["physics"] = "the step states no flops and no min_bytes"
    found["other_clocks"] = OtherClocks(
        raw_s=timed.raw_s,
        between_s=timed.between_s,
        aside_s=timed.aside_s,
        cpu_s=timed.cpu_s,
        # the step may have threads of its own, on no more CPUs than there are
        threads=None if on_gpu else max(torch.get_num_threads(), os.cpu_count() or 1),
        gemm_s=gemm_clock.clock_s if found["physics"] is not None else None,
        gemm_raw_s=gemm_clock.raw_s if found["physics"] is not None else None,
        gemm_aside_s=gemm_clock.aside_s,
    )
    word.not_proved += [
        f"{name}=on (the step was asked for it)"
        for name in ("compile", "cuda_graph")
        if getattr(job.axes, name) == "on"
    ]
    return found


def _expected(job: Job, engaged: dict[str, int], word: _Word, facts: dict[str, Any]) -> None:
    """The counters of nsa that the matrix's `expect` names, over the timed steps; Stop with status
    wrong_path.
    """
    ran = sorted(engaged)
    if missing := [name for name in job.expect.engaged if name not in engaged]:
        raise Stop(
            Status.WRONG_PATH,
            f"expected {', '.join(missing)} to be engaged, what ran is {ran}",
            facts,
        )
    if present := [name for name in job.expect.forbidden if name in engaged]:
        raise Stop(Status.WRONG_PATH, f"{', '.join(present)} is forbidden here, and it ran", facts)
    if job.expect.engaged:
        word.proved.append(f"counters ({', '.join(job.expect.engaged)})")


def _witness(
    declared: DeclaredStep, seen: profile.Observed, word: _Word
) -> tuple[bool | None, str]:
    """Whether the profiler saw what the step declares to call; None where nothing was declared that
    it could see here.
    """
    launches, said = seen.launches, []
    for name, least in (declared.operators or {}).items():
        if (got := seen.called.get(name, 0)) < least:
            return False, f"the step declares {least} calls of {name}, the profiler saw {got}"
        said.append(f"{name} ({got} calls)")
    for name, least in (declared.kernels or {}).items():
        if not seen.on_gpu:
            continue
        got = sum(count for kernel, count in launches.items() if name in kernel)
        if got < least:
            return False, f"the step declares {least} launches of *{name}*, the profiler saw {got}"
        said.append(f"*{name}* ({got} launches)")
    if declared.kernels and not seen.on_gpu:
        word.not_proved.append("kernels (a CPU launches none)")
    elif not said:
        word.not_proved.append("engagement (none declared)")
    if not said:
        return None, "the step declares nothing that the profiler could see here"
    word.proved.append(f"engagement: {', '.join(said)}")
    return True, f"as declared: {', '.join(said)}"


def _physics(
    job: Job, declared: DeclaredStep, step_s: float, clock: Clock, word: _Word
) -> Physics | None:
    """By what the step states; None where that is nothing."""
    if declared.flops is None and declared.min_bytes is None:
        word.not_proved.append("physics (no flops or min_bytes declared)")
        return None
    on_gpu = job.device == "cuda"
    word.proved.append("physics by its own count of work")
    return judge_step(
        flops=declared.flops or 0.0,
        min_bytes=declared.min_bytes or 0.0,
        step_s=step_s,
        gemm_flops_per_s=gemm_flops_per_s(job, clock),
        dtype=job.axes.dtype,
        device_name=torch.cuda.get_device_name() if on_gpu else "cpu",
        is_gpu=on_gpu,
    )


def _traced(
    job: Job, clock: Clock, turn: Turn, chrome: Path, declared: DeclaredStep
) -> dict[str, Any]:
    """One warm step under the profiler."""
    plain = cast("Callable[[], None]", declared.step)
    turn()
    flush = workload.l2_flush(job)
    step_s = clock.time_steps(plain, TRACE_WARM_STEPS) / TRACE_WARM_STEPS
    step = slowed(plain, step_s, job, clock)
    held, why_not = memory.profile_memory(step, job.device, flush)
    extra = {"tuned": autotuner.choices(), "memory": held, "memory_absent": why_not}
    profile.capture(step, job.device, flush, extra, chrome)
    return {"absent": {"tok_per_s": "a trace times nothing"}}
