"""Samples against clocks that know nothing of theirs: a ceiling that was timed by a fast clock is
as high as the speed that it should bound.
"""

from __future__ import annotations

from collections.abc import Sequence

from perfbench.records import OtherClocks

# The samples' clock against another one: it may be this much off, and each sample pays for reading
# both. CPU time is counted in ticks by some kernels.
MAX_CLOCK_MISMATCH, CLOCK_SLACK_S, CPU_TICK_S = 0.03, 2e-4, 0.02
# A flush runs into the step's own launches, so that it may cost this often what it takes alone.
FLUSH_SLACK = 2.0
# A word of the child's goes through the server: two processes that a busy machine may let wait.
MESSAGE_SLACK_S = 0.5


def clock_faults(timed_s: Sequence[float], clocks: OtherClocks) -> list[str]:
    """A sentence for each clock that contradicts ``timed_s``, the seconds of each sample."""
    total_s, slack_s = sum(timed_s), CLOCK_SLACK_S * len(timed_s)
    between_s = FLUSH_SLACK * clocks.between_s
    aside_s = between_s + clocks.aside_s
    found = [
        _apart(total_s, clocks.raw_s, aside_s, slack_s, "the kernel's raw clock"),
        _cpu_fault(total_s, between_s + slack_s, clocks),
    ]
    if clocks.parent_s is not None:
        # It began before the first sample and ended after the last, so it is never the lesser.
        word_s = slack_s + MESSAGE_SLACK_S
        found.append(_apart(total_s, clocks.parent_s, aside_s, word_s, "the parent's clock"))
    if clocks.gemm_s is not None and clocks.gemm_raw_s is not None:
        gemm_aside_s, other = clocks.gemm_aside_s, "the kernel's raw clock"
        odd = _apart(clocks.gemm_s, clocks.gemm_raw_s, gemm_aside_s, CPU_TICK_S, other)
        return [*_sentences("the samples", found), *_sentences("the GEMM's repeats", [odd])]
    return _sentences("the samples", found)


def _sentences(subject: str, faults: Sequence[str]) -> list[str]:
    return [f"{subject} {fault}" for fault in faults if fault]


def _apart(clock_s: float, other_s: float, aside_s: float, slack_s: float, other: str) -> str:
    """Where the two clocks disagree; ``aside_s`` may be in ``other_s`` alone."""
    least = (other_s - aside_s) * (1 - MAX_CLOCK_MISMATCH) - slack_s
    most = other_s * (1 + MAX_CLOCK_MISMATCH) + min(slack_s, CPU_TICK_S)
    if least <= clock_s <= most:
        return ""
    aside = f", at most {aside_s:.4g} s of it outside of the steps" if aside_s > slack_s else ""
    return (
        f"add up to {clock_s:.4g} s, and {other} saw {other_s:.4g} s pass{aside}: the clock is"
        " wrong"
    )


def _cpu_fault(total_s: float, aside_s: float, clocks: OtherClocks) -> str:
    if clocks.threads is None:
        return ""
    most = clocks.threads * (total_s * (1 + MAX_CLOCK_MISMATCH) + aside_s) + CPU_TICK_S
    if clocks.cpu_s <= most:
        return ""
    return (
        f"add up to {total_s:.4g} s, in which {clocks.threads} threads cannot have used the"
        f" {clocks.cpu_s:.4g} s of CPU time that passed: the clock is wrong"
    )
