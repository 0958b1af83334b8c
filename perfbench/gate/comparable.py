"""Whether a run's speeds may be compared at all: one machine throughout, the baseline's, and as
fast as it was then.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from perfbench.gate.cards import named, sentinels_by_card
from perfbench.gate.clocks import clock_faults
from perfbench.gate.coverage import clock_events, usable
from perfbench.gate.judgement import Finding
from perfbench.matrix import GatePolicy
from perfbench.records import (
    METHOD_VERSION,
    NOT_IN_OLDER,
    Environment,
    Manifest,
    Replicate,
    Run,
    SentinelLine,
    Status,
    Verdict,
)

if TYPE_CHECKING:
    from perfbench.records import Baseline


def run_findings(run: Run, rows: Mapping[str, list[Replicate]]) -> list[Finding]:
    """What is wrong with the run as a whole, before any baseline."""
    found = []
    first: Environment = run.manifest.environment
    for resumed in run.resumed:
        if changed := environment_differences(
            resumed.environment.fingerprint(), first.fingerprint()
        ):
            text = (
                f"resumed {resumed.resumed_utc} in another environment, so its cells mix two"
                f" machines: {changed}; measure again on one"
            )
            found.append(Finding(Verdict.ENV, "resumed", text))
    if unplanned := sorted(set(rows) - {cell.cell_id for cell in run.manifest.cells}):
        text = (
            f"{len(unplanned)} measured cells are not in the run's plan, e.g. {unplanned[0]}: the"
            " file was edited or two runs share it"
        )
        found.append(Finding(Verdict.FAILED, "unplanned", text))
    timed = {
        cell_id: [row for row in of_cell if row.status is Status.OK]
        for cell_id, of_cell in rows.items()
    }
    everything = [row for of_cell in timed.values() for row in of_cell]
    if any(row.is_throttled for row in everything) and not any(
        usable(of_cell) for of_cell in timed.values()
    ):
        text = (
            f"the card throttled in every one of {len(everything)} timed replicates"
            f" ({clock_events(everything)})"
        )
        found.append(
            Finding(Verdict.ENV, "throttled", f"{text}: cool the card, then measure again")
        )
    absent = _absent_sentinels(run) or _absent_on_cards(run)
    return found + absent + _clocks_of_sentinels(run)


def _clocks_of_sentinels(run: Run) -> list[Finding]:
    """They set the ceiling, and a machine that they call slower is no regression: their clock is
    held against the others, too.
    """
    found = []
    for line in run.sentinels:
        timed_s = [seconds * line.steps_per_sample for seconds in line.samples_s]
        odd = [] if line.other_clocks is None else clock_faults(timed_s, line.other_clocks)
        if odd:
            text = f"sentinel {line.name}, block {line.block}: {'; '.join(odd)}"
            found.append(Finding(Verdict.IMPOSSIBLE, "sentinel clock", text))
    return found


def environment_differences(mine: Mapping[str, object], theirs: Mapping[str, object]) -> str:
    """'key: theirs -> mine' for each key whose value differs; what only newer files hold is
    compared where both hold it.
    """
    unknown = {key for key in NOT_IN_OLDER if key not in mine or key not in theirs}
    every = {*mine, *theirs} - unknown
    keys = sorted(key for key in every if mine.get(key) != theirs.get(key))
    return "; ".join(f"{key}: {theirs.get(key)} -> {mine.get(key)}" for key in keys)


def comparability_key(manifest: Manifest) -> dict[str, object]:
    """What must agree before two speeds may be compared: environment and method."""
    return {**manifest.environment.fingerprint(), "method_version": manifest.method_version}


def incomparable(run: Run, baseline: Baseline, policy: GatePolicy) -> list[Finding]:
    """Why no speed of the run may be compared with the baseline's; empty where it may."""
    theirs: dict[str, object] = {**baseline.environment, "method_version": baseline.method_version}
    if changed := environment_differences(comparability_key(run.manifest), theirs):
        hint = "promote a run made here (docs/baselines.md), or gate on the machine of the baseline"
        if baseline.method_version > METHOD_VERSION:
            hint = "the baseline was made by a newer perfbench: update this one"
        return [
            Finding(
                Verdict.INCOMPARABLE,
                "fingerprint",
                f"not the baseline's environment (baseline -> now): {changed}; {hint}",
            )
        ]
    mine = run.manifest.environment.settings()
    if (
        mine is not None
        and baseline.settings is not None
        and (changed := environment_differences(mine, baseline.settings))
    ):
        hint = "set them as they were, or promote a run made with these"
        return [
            Finding(
                Verdict.INCOMPARABLE,
                "settings",
                f"other settings than the baseline's (baseline -> now): {changed}; {hint}",
            )
        ]
    if run.manifest.cards:  # `cards.moved_cards` looks at each
        return []
    return _moved_sentinels(sentinel_rates(run), baseline.sentinels, policy.sentinel_band_pct)


def unrecorded_settings(run: Run, baseline: Baseline) -> list[str]:
    """A note where the baseline is older than the record of variables that change speed."""
    if run.manifest.environment.settings() is None or baseline.settings is not None:
        return []
    return [
        "the baseline recorded no NSA_* settings and no other variables that change speed, so they"
        " are not compared; promote a run of now"
    ]


def sentinel_rates(run: Run) -> dict[str, list[float]]:
    """Rates of each sentinel by block, and in a fleet by card, where it finished and the card did
    not throttle; the last row of a block counts.
    """
    is_fleet = bool(run.manifest.cards)
    last: dict[tuple[str, int, str], SentinelLine] = {
        (line.name, line.block, (line.card or "") if is_fleet else ""): line
        for line in run.sentinels
    }
    rates: dict[str, list[float]] = {}
    for (name, _, _), line in sorted(last.items()):
        if line.status is Status.OK and line.rate_per_s is not None and not line.is_throttled:
            rates.setdefault(name, []).append(line.rate_per_s)
    return rates


def unwatched(run: Run, baseline: Baseline) -> list[str]:
    """Sentinels that only one of run and baseline has: whether the machine changed since is not
    known.
    """
    here, then = set(sentinel_rates(run)), set(baseline.sentinels)
    found = []
    if names := ", ".join(sorted(here - then)):
        found.append(
            f"the baseline holds no sentinel {names}, so whether the machine changed is not known;"
            " promote a run that has them"
        )
    if names := ", ".join(sorted(then - here)):
        text = (
            f"the run has no sentinel {names}, which the baseline holds, so whether the machine"
            " changed is not known"
        )
        found.append(f"{text}; gate a run of `perfbench run`, with these sentinels in its matrix")
    return found


def unverified(*files: Run | Baseline) -> list[str]:
    """Which of the files carry no digests, so that nobody can tell whether they were edited."""
    found = [
        f"run {one.manifest.run_id}" if isinstance(one, Run) else f"the baseline of {one.run_id}"
        for one in files
        if not one.is_verified
    ]
    return [f"unverified, written without digests: {', '.join(found)}"] if found else []


def unplanned_sentinels(run: Run, wanted: Iterable[str], baseline: Baseline) -> list[str]:
    """Sentinels that the run's matrix wants (``wanted``) and the run never planned, as a side of an
    `ab`; beyond ``unwatched``.
    """
    names = ", ".join(
        name
        for name in wanted
        if name not in {*run.manifest.sentinels, *sentinel_rates(run), *baseline.sentinels}
    )
    text = (
        f"the run was made without the sentinel {names}, which its matrix asks for, so a slower"
        " machine looks like slower code"
    )
    return [f"{text}; gate a run of `perfbench run`"] if names else []


def _absent_sentinels(run: Run) -> list[Finding]:
    rates = sentinel_rates(run)
    found = []
    for name in run.manifest.sentinels:
        if name not in rates and run.replicates:
            why = _why_absent([line for line in run.sentinels if line.name == name])
            text = (
                f"no rate of the sentinel {name}, which the matrix asks for: {why}; without it a"
                " slower machine looks like slower code"
            )
            found.append(Finding(Verdict.ENV, "sentinel", f"{text}, measure again"))
    return found


def _absent_on_cards(run: Run) -> list[Finding]:
    """Of a fleet: each card that measured a cell has the matrix's sentinels."""
    rates = sentinels_by_card(run)
    cards = sorted({row.card for row in run.replicates if row.card is not None})
    gone = [
        f"{name} on {named(card, run.replicates)}"
        for card in cards
        for name in run.manifest.sentinels
        if name not in rates.get(card, {})
    ]
    if not run.manifest.cards or not gone:
        return []
    text = f"no rate of the sentinel {'; '.join(gone)}: whether that card is slow is not known"
    return [Finding(Verdict.ENV, "sentinel", f"{text}; measure again")]


def _why_absent(lines: Sequence[SentinelLine]) -> str:
    if not lines:
        return "no line was recorded"
    last = lines[-1]
    if last.status is Status.OK:
        return (
            "the card throttled in every block"
            if last.rate_per_s is not None
            else "its line has no rate"
        )
    return f"{last.status.value}: {' '.join(last.reason.split())[:200] or 'no reason was recorded'}"


def _moved_sentinels(
    now: Mapping[str, Iterable[float]], then: Mapping[str, Iterable[float]], band_pct: float
) -> list[Finding]:
    moved = []
    for name in sorted(set(now) & set(then)):
        change_pct = round(100 * (median(now[name]) / median(then[name]) - 1), 9)
        if abs(change_pct) > band_pct:
            moved.append(f"{name} {change_pct:+.2f} % (median of {len(list(now[name]))} blocks)")
    if not moved:
        return []
    text = (
        f"the machine is not as fast as the baseline's: {'; '.join(moved)}, the band is"
        f" {band_pct:g} % either way"
    )
    return [
        Finding(
            Verdict.ENV,
            "sentinel moved",
            f"{text}; no commit changes this work: look for other load, clocks or another host",
        )
    ]
