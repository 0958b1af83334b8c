"""The files of `perfbench tune`: tune.json, and tune.md, which is printed too.

Pure: the same run, the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from perfbench.errors import Exit
from perfbench.text import NULL, code, escape, number
from perfbench.tuning import crossing
from perfbench.tuning.decide import KEYS, Decision, Key, TunedRun, compared, lines, settings


def tuning_json(tuned: TunedRun) -> str:
    """The content of tune.json; null where nothing is known, with the reason."""
    manifest = tuned.run.manifest
    table = [
        {
            "path": key[0],
            "fa2": key[1],
            "seq_len": length,
            "step_ms": cell.step_ms,
            "median_ms": cell.median_ms,
            "why_not": cell.why_not,
        }
        for length in tuned.lengths
        for key in KEYS
        if (cell := tuned.cells.get((key, length))) is not None
    ]
    content = {
        "run_id": manifest.run_id,
        "device_name": manifest.environment.device_name,
        "compute_capability": tuned.sm,
        "environment": manifest.environment.fingerprint(),
        "commit": manifest.source.commit,
        "exit_code": int(tuned.exit_code),
        "rule": {"margin_pct": crossing.MARGIN_PCT, "min_processes": crossing.MIN_PROCESSES},
        "decisions": [asdict(one) for one in tuned.decisions],
        "tuned_py": lines(tuned),
        "settings": settings(tuned),
        "cells": table,
    }
    return json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"


def tuning_markdown(tuned: TunedRun) -> str:
    """The content of tune.md, which is printed too."""
    manifest, env = tuned.run.manifest, tuned.run.manifest.environment
    sm = "" if tuned.sm is None else f", compute capability {tuned.sm[0]}.{tuned.sm[1]}"
    known = (("torch", env.torch), ("triton", env.triton), ("FA-2 by", env.flash_provider))
    versions = escape(", ".join(f"{name} {value}" for name, value in known if value))
    commit = code(manifest.source.commit or "unknown") + (
        " **with uncommitted changes**" if manifest.source.dirty_sha256 else ""
    )
    parts = ["# Which implementation from which length", "", _headline(tuned), ""]
    parts += [
        f"{escape(env.device_name)}{sm}; {versions}; commit {commit}; run {code(manifest.run_id)}.",
        "",
    ]
    parts += [*_table(tuned), "", "## Decided", "", *map(_bullet, tuned.decisions), ""]
    parts += ["## To write", "", *_to_write(tuned), ""]
    if left := list(_not_judged(tuned)):
        parts += ["## Not judged", "", *left, ""]
    parts += [
        "## Rule",
        "",
        (
            "Forward and backward of attention alone. A side is proved faster at a length when the"
            f" other's median over its processes is longer by more than {crossing.MARGIN_PCT:g} %,"
            " or than the spread of either side's processes where that is wider; it takes over from"
            " the shortest length from which that holds at every longer one. A tie, or fewer than"
            f" {crossing.MIN_PROCESSES} processes, changes nothing."
        ),
    ]
    return "\n".join(parts) + "\n"


def _headline(tuned: TunedRun) -> str:
    code_ = int(tuned.exit_code)
    if tuned.judgement.exit_code is not Exit.OK:
        return f"**{escape(tuned.judgement.headline)}**; what follows leaves that out"
    lacking = [one.name for one in tuned.decisions if one.incomplete]
    return (
        f"**Exit {code_}: too little was measured for {', '.join(lacking)}**"
        if lacking
        else f"Exit {code_}: {_counted(tuned)}"
    )


def _counted(tuned: TunedRun) -> str:
    measured = sum(cell.step_ms is not None for cell in tuned.cells.values())
    judged = sum(one.judged for one in tuned.decisions)
    return (
        f"{judged} of {len(tuned.decisions)} questions decided from {measured} cells, each proved"
        " by parity, route and physics"
    )


def _table(tuned: TunedRun) -> list[str]:
    shown = [
        key
        for key in KEYS
        if any(tuned.cells[key, n].planned for n in tuned.lengths if (key, n) in tuned.cells)
    ]
    heads = ["tokens", *(f"{_label(key)}, ms" for key in shown), "fastest", "why"]
    rows = [f"| {' | '.join(heads)} |", f"|{' ---: |' * (len(shown) + 1)} --- | --- |"]
    for length in tuned.lengths:
        known = [
            (cell.median_ms, key)
            for key in shown
            if (cell := tuned.cells.get((key, length))) and cell.median_ms is not None
        ]
        ranked = [key for _, key in sorted(known)]
        speeds = [
            number(cell.median_ms) if (cell := tuned.cells.get((key, length))) else NULL
            for key in shown
        ]
        rows.append(
            f"| {length} | {' | '.join(speeds)} | {_label(ranked[0]) if ranked else NULL} |"
            f" {_why(tuned, ranked, length)} |"
        )
    return rows


def _why(tuned: TunedRun, ranked: Sequence[Key], length: int) -> str:
    if len(ranked) < 2:
        return "nothing to compare with" if ranked else "nothing measured"
    first, second = (tuned.cells[key, length].step_ms for key in ranked[:2])
    assert first is not None and second is not None
    return f"against {_label(ranked[1])} {compared(first, second)}"


def _label(key: Key) -> str:
    return key[0] if key[0] == "triton" else f"{key[0]} fa2={key[1]}"


def _bullet(decision: Decision) -> str:
    if not decision.judged:
        return (
            f"- {decision.name} (*{escape(decision.means)}*): not judged, {escape(decision.reason)}"
        )
    found = "never" if decision.min_tokens is None else str(decision.min_tokens)
    return f"- {decision.name} (*{escape(decision.means)}*): **{found}**; {escape(decision.reason)}"


def _to_write(tuned: TunedRun) -> list[str]:
    table, variables = lines(tuned), settings(tuned)
    notes = [
        "- your own table, which `auto` reads on this card: `perfbench tune --from RUN --apply`"
        for _ in table
    ]
    notes += [
        f"- the package's, nsa/routing/thresholds.py, `TUNED`: {code(line)}" for line in table
    ]
    notes += [
        f"- at once, for FA-2 in the window: {code(f'{name}={value}')}"
        for name, value in variables.items()
    ]
    if table:
        notes.append(
            "- the window's variable counts only where path triton does not serve: that has a"
            " window kernel of its own"
        )
    found = [
        one.min_tokens for one in tuned.decisions if one.judged and one.name != "v2_min_tokens"
    ]
    shortest, longest = tuned.lengths[0], tuned.lengths[-1]
    if None in found:
        notes.append(
            f"- a number above {longest} says that no measured length proved it; longer ones were"
            " not measured (`--lengths`)"
        )
    if shortest in found:
        notes.append(
            f"- 0 says that every measured length proved it; shorter ones than {shortest} were not"
            " measured (`--lengths`)"
        )
    return notes or ["Nothing: neither path triton nor FA-2 was judged on this machine."]


def _not_judged(tuned: TunedRun) -> Iterator[str]:
    """Cells without a time that counts, by their reason."""
    by_reason: dict[tuple[Key, str], list[str]] = {}
    for key, length in ((key, length) for key in KEYS for length in tuned.lengths):
        cell = tuned.cells.get((key, length))
        if cell is not None and cell.step_ms is None:
            by_reason.setdefault((key, cell.why_not), []).append(str(length))
    for (key, reason), at in by_reason.items():
        yield f"- {_label(key)} at {', '.join(at)}: {escape(reason)}"
