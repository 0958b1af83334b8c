"""A bisect as Markdown and as JSON: pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from perfbench.errors import Exit
from perfbench.gate import PairFound, SpeedInterval
from perfbench.records import EXIT_OF
from perfbench.runner import SHORT, BisectResult, Commit, Ending, touching
from perfbench.text import cell_code, code, escape, shorten

MOST_LEFT = 20  # commits that are listed one by one
NOTHING_TO_BISECT = (Ending.NOT_SLOWER, Ending.SAME_CODE)


def bisect_exit(result: BisectResult) -> Exit:
    """REGRESSED with a first bad commit, OK where there is nothing to bisect, FAILED where no
    single commit is named; without a speed of the bad end its own verdict's.
    """
    if result.ending is Ending.FOUND:
        return Exit.REGRESSED
    if result.ending in NOTHING_TO_BISECT:
        return Exit.OK
    if result.ending is Ending.NO_SPEED and result.verdict is not None:
        return EXIT_OF[result.verdict] or Exit.FAILED
    return Exit.FAILED


def bisect_markdown(result: BisectResult, cell_id: str, resume: str, template: str) -> str:
    """The outcome first, then the two ends, the steps, and the next command.

    ``resume`` is the command that resumes it; ``template`` the one of a new bisect of the same
    cell, with {good} and {bad} to be filled in.
    """
    ends = result.range
    lines = [f"# {_headline(result)}", ""]
    if result.ending is not Ending.FOUND:
        lines += [f"{escape(result.reason)}", ""]
    lines += [f"- cell {code(cell_id)}"]
    if result.confirmation is not None and result.parent:
        lines += [f"- against its parent {result.parent[:SHORT]}: {_of_pair(result.confirmation)}"]
    lines += [
        f"- good {_named(ends.good)}",
        f"- bad {_named(ends.bad)}"
        + (f": {_of_pair(result.whole)}" if result.whole is not None else ""),
        f"- {_counted(len(ends.commits), 'commit')} between them, of which"
        f" {len(touching(ends))} change `nsa/`",
    ]
    lines += [f"- {text}" for text in _remarks(result, resume, template)]
    if result.steps:
        lines += ["", *_steps(result)]
    if result.ending in (Ending.RANGE, Ending.OPEN) and result.left:
        lines += ["", "The first bad commit is one of:", "", *_left(result.left)]
    return "\n".join(lines) + "\n"


def bisect_json(result: BisectResult, cell_id: str, resume: str) -> dict[str, Any]:
    """Plain JSON values."""
    return {
        "ending": result.ending.name.lower(),
        "exit_code": int(bisect_exit(result)),
        "reason": result.reason,
        "cell_id": cell_id,
        "good": _commit(result.range.good),
        "bad": _commit(result.range.bad),
        "commits": len(result.range.commits),
        "commits_that_change_nsa": len(touching(result.range)),
        "whole": _pair(result.whole),
        "first_bad": None if result.first_bad is None else _commit(result.first_bad),
        "parent": result.parent or None,
        "confirmation": _pair(result.confirmation),
        "left": [_commit(one) for one in result.left],
        "steps": [
            {
                "pair": one.name,
                "commit": _commit(one.commit),
                "turn": one.found.turn.value,
                "is_part": one.found.is_part,
                "reason": one.found.reason,
                "change": _interval(one.found.change),
                "left": one.left,
            }
            for one in result.steps
        ],
        "resume": resume if result.ending is Ending.OPEN else None,
    }


def _headline(result: BisectResult) -> str:
    if result.ending is Ending.FOUND:
        (commit,) = result.left
        return f"First bad commit: {_named(commit)}"
    if result.ending is Ending.NOT_SLOWER:
        return "Nothing to bisect: the bad commit is not confirmed slower"
    if result.ending is Ending.SAME_CODE:
        return "Nothing to bisect: `nsa/` is the same at both commits"
    if result.ending is Ending.NO_SPEED:
        verdict = "" if result.verdict is None else f" ({result.verdict.value})"
        return f"No speed to bisect by{verdict}"
    if result.ending is Ending.RANGE:
        return f"Not one first bad commit: {len(result.left)} are left"
    if result.ending is Ending.NOT_CONFIRMED:
        (commit,) = result.left
        return f"No first bad commit: {_named(commit)} was not confirmed slower than its parent"
    return "Not finished"


def _remarks(result: BisectResult, resume: str, template: str) -> list[str]:
    if result.ending is Ending.OPEN:
        return [f"resume: {code(resume)}"]
    if result.ending is Ending.NOT_CONFIRMED:
        return [
            "a step went wrong by noise, or the drop is spread over several commits; another seed"
            f" measures anew: {code(_fill(template, result.range.good.sha, result.range.bad.sha))}"
        ]
    one, whole = result.confirmation, result.whole
    if result.ending is not Ending.FOUND or one is None or whole is None:
        return []
    rest = _rest_pct(one.change, whole.change)
    if rest is None:
        return []
    if rest > 0:
        return [f"later commits recover {rest:.1f} % of the speed"]
    (commit,) = result.left
    halves = ((result.range.good.sha, result.parent), (commit.sha, result.range.bad.sha))
    commands = " and ".join(code(_fill(template, good, bad)) for good, bad in halves if good != bad)
    return [f"another {-rest:.1f} % was lost in other commits: {commands}"]


def _rest_pct(one: SpeedInterval | None, whole: SpeedInterval | None) -> float | None:
    """Per cent of speed that the commit does not explain; null where the intervals overlap."""
    if one is None or whole is None or one.metric != whole.metric:
        return None
    bounds = (one.low_pct, one.high_pct, whole.low_pct, whole.high_pct)
    low, high, whole_low, whole_high = bounds
    if low is None or high is None or whole_low is None or whole_high is None:
        return None
    if low <= whole_high and whole_low <= high:
        return None
    assert one.change_pct is not None and whole.change_pct is not None
    return 100 * ((1 + whole.change_pct / 100) / (1 + one.change_pct / 100) - 1)


def _steps(result: BisectResult) -> list[str]:
    rows = [
        f"| {cell_code(one.commit.sha[:SHORT])} | {escape(shorten(one.commit.subject, 60))} |"
        f" {one.found.turn}{' (a part)' if one.found.is_part else ''} |"
        f" {escape(shorten(one.found.reason, 200))} | {one.left} |"
        for one in result.steps
    ]
    return ["| commit | subject | turn | by | left |", "| --- | --- | --- | --- | ---: |", *rows]


def _left(commits: Sequence[Commit]) -> list[str]:
    shown = [f"- {_named(one)}" for one in commits[:MOST_LEFT]]
    more = len(commits) - MOST_LEFT
    return [*shown, f"- and {more} more"] if more > 0 else shown


def _fill(template: str, good: str, bad: str) -> str:
    return template.format(good=good[:SHORT], bad=bad[:SHORT])


def _named(commit: Commit) -> str:
    return f"{commit.sha[:SHORT]} {escape(shorten(commit.subject))}"


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _of_pair(found: PairFound) -> str:
    work = "".join(f"{text}; " for text in found.work)
    verdict = "" if found.verdict is None else f", {found.verdict.value}"
    return f"{escape(work)}{'no speed' if found.change is None else escape(found.change)}{verdict}"


def _commit(commit: Commit) -> dict[str, str]:
    return {"sha": commit.sha, "subject": commit.subject}


def _interval(change: SpeedInterval | None) -> dict[str, Any] | None:
    return None if change is None else asdict(change)


def _pair(found: PairFound | None) -> dict[str, Any] | None:
    if found is None:
        return None
    verdict = None if found.verdict is None else found.verdict.value
    return {
        "verdict": verdict,
        "reason": found.reason,
        "change": _interval(found.change),
        "work": list(found.work),
    }
