"""What changed, a line for each change: change points and verdicts that turned."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from itertools import pairwise

from perfbench.history.next_command import next_step
from perfbench.history.nouns import ChangePoint, HistoryCell, Series, Triage
from perfbench.history.site import chart_data, names
from perfbench.history.site.decided import decided_text
from perfbench.history.site.page_data import LIGHTS, MEASURED, mark_of, terms
from perfbench.history.site.units import minute, short_commit
from perfbench.history.site.verdict_marks import light_of


@dataclass(frozen=True, slots=True)
class ChangeLine:
    """A change point in a list, with what to type next."""

    page: str
    name: str
    suite: str
    card: str
    metric: str
    kind: str
    judged: str  # worse, better, neither
    size: str
    interval: str
    when: str
    milliseconds: int
    run_page: str
    before_page: str  # empty where that run has no page
    commit: str
    before_commit: str
    commands: tuple[str, ...]
    terms: str
    decided: str = ""  # 'noise: why (who)': then it is no news, and nothing is to be typed


def change_line(
    change: ChangePoint,
    name: str,
    cell: HistoryCell,
    series: Series,
    decision: Triage | None = None,
    *,
    has_before: bool,
) -> ChangeLine:
    """``series``: of the change. ``decision``: that the change is accepted, or noise.
    ``has_before``: the last run of the old level has a page.
    """
    key = change.key
    judged = {True: "worse", False: "better", None: "neither"}[change.is_worse]
    decided = f"decided={decision.kind.value}\n" if decision else ""
    if decision is not None:
        judged = "neither"
    sides = {one.run_id: one for one in series.points}
    old, new = sides.get(change.before_run_id), sides.get(change.run_id)
    size = f"{change.size_pct:+.1f} %".replace("-", "−")
    interval = f"{change.low_pct:+.1f} to {change.high_pct:+.1f} %".replace("-", "−")
    if old is not None and new is not None and old.value == 0 and new.value is not None:
        size, interval = f"0 → {new.value:.6g}", "no percentage of 0 exists"
    is_dirty = any(one is not None and one.is_dirty is True for one in (old, new))
    return ChangeLine(
        names.cell_page(key.suite, key.card, key.cell_id),
        name,
        key.suite,
        key.card,
        key.metric,
        change.kind.value,
        judged,
        size,
        interval,
        minute(change.measured_utc),
        chart_data.milliseconds(change.measured_utc),
        names.run_page(change.run_id),
        names.run_page(change.before_run_id) if has_before else "",
        short_commit(change.commit),
        short_commit(change.before_commit),
        _next_commands(change, cell.reproduce, is_dirty) if decision is None else (),
        f"{terms(key.suite, key.card, cell.axes, mark_of(cell.verdict))}kind={change.kind.value}\n"
        f"metric={key.metric}\n{judged}\n{decided}",
        decided_text(decision) if decision else "",
    )


def turned_line(name: str, cell: HistoryCell, series: Series) -> ChangeLine | None:
    """Where the light of the verdict turned last, and from what; null where it never did."""
    found = [
        (old, new)
        for old, new in pairwise(series.points)
        if light_of(old.verdict) != light_of(new.verdict)
    ]
    if not found:
        return None
    old, new = found[-1]
    key, lights = series.key, (light_of(old.verdict), light_of(new.verdict))
    judged = "worse" if LIGHTS.index(lights[1]) < LIGHTS.index(lights[0]) else "better"
    return ChangeLine(
        names.cell_page(key.suite, key.card, key.cell_id),
        name,
        key.suite,
        key.card,
        "verdict",
        "verdict",
        judged,
        f"{old.verdict or MEASURED} → {new.verdict or MEASURED}",
        new.reason,
        minute(new.measured_utc),
        chart_data.milliseconds(new.measured_utc),
        names.run_page(new.run_id),
        names.run_page(old.run_id),
        short_commit(new.commit),
        short_commit(old.commit),
        (cell.reproduce,) if cell.reproduce else (),
        f"{terms(key.suite, key.card, cell.axes, mark_of(cell.verdict))}kind=verdict\n"
        f"metric=verdict\n{judged}\n",
    )


def _next_commands(change: ChangePoint, reproduce: str, is_dirty: bool) -> tuple[str, ...]:
    """The commits between, where some are known, and what `detect` prints as the next step."""
    old, new = change.before_commit, change.commit
    typed = next_step(change, reproduce, is_dirty=is_dirty)
    if not old or not new or old == new:
        return (typed,)
    span = f"{short_commit(old)}..{short_commit(new)}"
    return shlex.join(["git", "log", "--oneline", span]), typed
