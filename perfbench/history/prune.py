"""Which runs a policy lets go. Pure: the clock is an argument, and nothing is deleted here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

Cells = frozenset[tuple[str, str, str]]  # suite, card, cell id


@dataclass(frozen=True, slots=True)
class StoredRun:
    """What a policy asks of a run. ``is_demonstration``: faults were injected."""

    run_id: str
    measured_utc: datetime
    cells: Cells
    is_demonstration: bool = False


@dataclass(frozen=True, slots=True)
class PrunePolicy:
    """``older_than``: runs of before go. ``weekly_after``: of runs from before, one a week stays.
    ``keep_last``: the newest so many runs of each cell stay, whatever else says; alone, all others
    go. A demonstration is no run of a cell's, so it keeps no place of one.
    """

    older_than: timedelta | None = None
    weekly_after: timedelta | None = None
    keep_last: int | None = None

    @property
    def is_empty(self) -> bool:
        return (self.older_than, self.weekly_after, self.keep_last) == (None, None, None)


def to_prune(
    runs: Iterable[StoredRun], policy: PrunePolicy, now: datetime, kept: Collection[str] = ()
) -> list[str]:
    """Ids of the runs that go, oldest first. ``kept``: ids that stay, whatever the policy says.

    A run stays whole where any of its cells needs it.
    """
    newest_first = sorted(runs, key=lambda run: (run.measured_utc, run.run_id), reverse=True)
    if policy.is_empty:
        return []
    staying = {*kept, *_of_weeks(newest_first, policy, now)}
    if policy.keep_last is not None:
        staying |= _first_of_each(newest_first, policy.keep_last)
    leaving = [
        run.run_id
        for run in newest_first
        if run.run_id not in staying and _is_named(run, policy, now)
    ]
    return leaving[::-1]


def _is_named(run: StoredRun, policy: PrunePolicy, now: datetime) -> bool:
    ages = [age for age in (policy.older_than, policy.weekly_after) if age is not None]
    return not ages or now - run.measured_utc > min(ages)


def _of_weeks(
    newest_first: Sequence[StoredRun], policy: PrunePolicy, now: datetime
) -> Collection[str]:
    """The newest run of each cell in each ISO week, of those that are thinned out, not dropped."""
    if policy.weekly_after is None:
        return ()
    found: dict[Hashable, str] = {}
    for run in newest_first:
        is_dropped = policy.older_than is not None and now - run.measured_utc > policy.older_than
        if run.is_demonstration or is_dropped:
            continue
        week = run.measured_utc.isocalendar()[:2]
        for cell in run.cells:
            found.setdefault((week, cell), run.run_id)
    return found.values()


def _first_of_each(newest_first: Sequence[StoredRun], count: int) -> set[str]:
    seen: dict[Hashable, int] = defaultdict(int)
    found = set()
    for run in newest_first:
        if run.is_demonstration:
            continue
        for cell in run.cells:
            seen[cell] += 1
            if seen[cell] <= count:
                found.add(run.run_id)
    return found
