"""What somebody decided about a change point: that its level is accepted, or that it is noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from perfbench.history.nouns import ChangePoint, Series, Triage, TriageKind

NEAR = 3  # points from a change at which noise is about it, as for reports of one change


def decision_on(change: ChangePoint, series: Series, decisions: Sequence[Triage]) -> Triage | None:
    """The decision that takes ``change`` from the news; null where there is none.

    A run that was accepted makes what changed until then the level. Noise is about the changes at
    or next to its run.
    """
    places = {point.run_id: place for place, point in enumerate(series.points)}
    end = places.get(change.run_id)
    if end is None:
        return None
    begin = places.get(change.before_run_id, end)
    for one in sorted(decisions, key=lambda one: one.created_utc, reverse=True):
        at = places.get(one.run_id)
        if at is None or not one.matches(change.key):
            continue
        if one.kind == TriageKind.ACCEPTED and end <= at:
            return one
        if one.kind == TriageKind.NOISE and begin - NEAR <= at <= end + NEAR:
            return one
    return None


def decisions_on(
    changes: Sequence[ChangePoint], series: Series, decisions: Sequence[Triage]
) -> Mapping[ChangePoint, Triage]:
    """Of the changes of one series those that were decided."""
    found = {one: decision_on(one, series, decisions) for one in changes}
    return {change: decision for change, decision in found.items() if decision is not None}


def decided_text(decision: Triage) -> str:
    """'noise: the fan was broken (ada)'."""
    return f"{decision.kind.value}: {remark(decision)}"


def remark(decision: Triage) -> str:
    return f"{decision.note} ({decision.author})" if decision.author else decision.note
