"""Which kernels changed between two steps, the largest change of time first: pure, from two
tables.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum

from pydantic import BaseModel, ConfigDict

from perfbench.records import Kernel, Kernels
from perfbench.text import NULL, cell_code, number
from perfbench.tracing.places import CodePlace

DISPLAY_CHARS = 70
_PLAIN_TYPES = frozenset(
    [
        "void",
        "bool",
        "char",
        "short",
        "int",
        "long",
        "float",
        "double",
        "half",
        "unsigned",
        "signed",
        "const",
        "struct",
        "class",
        "enum",
    ]
    + ["std", "true", "false", "nullptr", "auto", "at", "c10", "native", "cuda", "size_t"]
    + [f"{sign}int{bits}_t" for sign in ("", "u") for bits in (8, 16, 32, 64)]
)


class Kind(StrEnum):
    NEW = "new"
    GONE = "gone"
    # the same family under another name, as often: an autotuner's or a library's choice
    VARIANT = "another variant"
    COUNT = "count changed"
    SLOWER = "slower per call"
    FASTER = "faster per call"


class Change(BaseModel):
    """One kernel that differs.

    ``name`` is full and the candidate's; ``was`` the base's where a variant took its place. The
    places are where each side's own code defines it, or calls it.
    """

    model_config = ConfigDict(frozen=True)
    name: str
    kind: Kind
    base: Kernel | None
    candidate: Kernel | None
    was: str = ""
    base_place: CodePlace | None = None
    candidate_place: CodePlace | None = None

    @property
    def delta_s(self) -> float | None:
        """Seconds a step that the candidate spends more; null where either side has no times."""
        times_s = [0.0 if row is None else row.seconds for row in (self.base, self.candidate)]
        return None if times_s[0] is None or times_s[1] is None else times_s[1] - times_s[0]

    @property
    def delta_count(self) -> int:
        return (self.candidate.count if self.candidate else 0) - (
            self.base.count if self.base else 0
        )

    @property
    def per_call_pct(self) -> float | None:
        """How much longer one call takes; null without times on both sides."""
        before_s, after_s = _per_call_s(self.base), _per_call_s(self.candidate)
        return None if not before_s or after_s is None else (after_s / before_s - 1) * 100


def diff(base: Kernels, candidate: Kernels) -> list[Change]:
    """Every kernel whose calls or time differ, by absolute change of time, then of calls, then by
    name.
    """
    gone = [name for name in base.rows if name not in candidate.rows]
    new = [name for name in candidate.rows if name not in base.rows]
    variants = _variants(
        {name: base.rows[name] for name in gone}, {name: candidate.rows[name] for name in new}
    )
    found = [
        Change(
            name=name,
            kind=Kind.VARIANT,
            base=base.rows[was],
            candidate=candidate.rows[name],
            was=was,
        )
        for name, was in variants.items()
    ]
    found += [
        Change(name=name, kind=Kind.NEW, base=None, candidate=candidate.rows[name])
        for name in new
        if name not in variants
    ]
    found += [
        Change(name=name, kind=Kind.GONE, base=base.rows[name], candidate=None)
        for name in gone
        if name not in variants.values()
    ]
    for name in base.rows.keys() & candidate.rows.keys():
        kind = _kind(base.rows[name], candidate.rows[name])
        if kind is not None:
            found.append(
                Change(name=name, kind=kind, base=base.rows[name], candidate=candidate.rows[name])
            )
    return sorted(
        found,
        key=lambda change: (-abs(change.delta_s or 0.0), -abs(change.delta_count), change.name),
    )


def summary(base: Kernels, candidate: Kernels) -> list[str]:
    """Sentences on the whole step: time, launches, host syncs, and every autotuner that chose
    differently.
    """
    what = "device time" if candidate.device == "cuda" else "operators' time"
    lines = [
        f"{what} {_ms(candidate.total_s)}, was"
        f" {_ms(base.total_s)}{_change_of(base.total_s, candidate.total_s)}"
    ]
    calls = "launches" if candidate.device == "cuda" else "operator calls"
    lines.append(f"{calls} {candidate.launches:,}, were {base.launches:,}")
    if base.host_syncs is not None or candidate.host_syncs is not None:
        lines.append(
            f"host syncs {number(candidate.host_syncs, 9)}, were {number(base.host_syncs, 9)}"
        )
    for name in sorted(base.tuned.keys() | candidate.tuned.keys()):
        one, other = base.tuned.get(name, "nothing"), candidate.tuned.get(name, "nothing")
        if one != other:
            lines.append(f"the autotuner of {name} chose {other}, was {one}")
    return lines


def render_markdown(changes: Sequence[Change], top: int = 10) -> str:
    """A table for GitHub of the first ``top`` changes, and a sentence on the others.

    Full names are in the JSON.
    """
    if not changes:
        return "No kernel differs in calls or time."
    shown, rest = changes[:top], changes[top:]
    names = labels([change.name for change in shown])
    lines = [
        "| kernel or operator | what | calls | ms | change, ms | each call |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [_row(change, name) for change, name in zip(shown, names, strict=True)]
    wheres = [_where(change) for change in shown]
    if any(where != NULL for where in wheres):
        cells = ["where", "---", *wheres]
        lines = [f"{line} {cell} |" for line, cell in zip(lines, cells, strict=True)]
    if rest:
        known_s = [change.delta_s for change in rest if change.delta_s is not None]
        together = f", together {sum(known_s) * 1e3:+.3f} ms" if len(known_s) == len(rest) else ""
        lines += [
            "",
            f"{len(rest)} smaller change{'s' if len(rest) > 1 else ''} not shown{together}.",
        ]
    return "\n".join(lines) + "\n"


def render_kernels(kernels: Kernels, top: int = 10) -> str:
    """One step alone: the longest kernels, as a table for GitHub."""
    ranked = sorted(
        kernels.rows.items(), key=lambda item: (-(item[1].seconds or 0.0), -item[1].count, item[0])
    )
    names = labels([name for name, _ in ranked[:top]])
    lines = ["| kernel or operator | calls | ms |", "| --- | ---: | ---: |"]
    lines += [
        f"| {cell_code(name)} | {row.count:,} | {_in_ms(row)} |"
        for name, (_, row) in zip(names, ranked[:top], strict=True)
    ]
    return "\n".join(lines) + "\n"


def short_name(name: str) -> str:
    """A kernel's name without return type, parameters and template arguments, except the one type
    that states what it does.
    """
    plain = " ".join(name.split()).replace("(anonymous namespace)::", "").removeprefix("void ")
    outer, inner = _split_template(plain)
    path = outer.split("::")
    outer = "::".join(path[-2:]) if len(path) > 2 else outer
    telling = next(
        (
            word
            for word in re.findall(r"[A-Za-z_]\w*", inner)
            if word not in _PLAIN_TYPES and len(word) > 2
        ),
        "",
    )
    short = f"{outer}<{telling}>" if telling else outer
    return short if len(short) <= DISPLAY_CHARS else f"{short[: DISPLAY_CHARS - 3]}..."


def labels(names: Sequence[str]) -> list[str]:
    """Short names that differ where the full ones do: '#2' is the second of its kind in this
    list.
    """
    shorts = [short_name(name) for name in names]
    total, seen = Counter(shorts), Counter[str]()
    found = []
    for short in shorts:
        seen[short] += 1
        found.append(f"{short} #{seen[short]}" if total[short] > 1 else short)
    return found


def _split_template(name: str) -> tuple[str, str]:
    """('ns::kernel', 'template arguments') of 'ns::kernel<template arguments>(parameters)'."""
    start = re.search(r"[<(]", name)
    if start is None or start.start() == 0:  # '<lambda>' and the like are names
        return name, ""
    if name[start.start()] == "(":
        return name[: start.start()].strip(), ""
    depth = 0
    for place in range(start.start(), len(name)):
        depth += {"<": 1, ">": -1}.get(name[place], 0)
        if depth == 0:
            return name[: start.start()], name[start.start() + 1 : place]
    return name[: start.start()], name[start.start() + 1 :]  # cut off


def _variants(gone: dict[str, Kernel], new: dict[str, Kernel]) -> dict[str, str]:
    """New name -> the gone one whose place it took: same family, as many calls, nearest in time.

    Each once.
    """
    found: dict[str, str] = {}
    for name in sorted(new):
        free = [
            was
            for was in sorted(gone)
            if was not in found.values() and gone[was].count == new[name].count
        ]
        same = [was for was in free if _family(was) == _family(name)]
        if same:
            wanted_s = new[name].seconds or 0.0
            found[name] = min(same, key=lambda was: abs((gone[was].seconds or 0.0) - wanted_s))
    return found


def _family(name: str) -> str:
    """What variants of one kernel share: a generated name up to its first number, else the short
    name.
    """
    short = short_name(name)
    head = re.split(r"\d", short, maxsplit=1)[0]
    return head if len(head) >= 4 else short


def _kind(base: Kernel, candidate: Kernel) -> Kind | None:
    if base.count != candidate.count:
        return Kind.COUNT
    if base.seconds is None or candidate.seconds is None or base.seconds == candidate.seconds:
        return None
    return Kind.SLOWER if candidate.seconds > base.seconds else Kind.FASTER


def _row(change: Change, name: str) -> str:
    what = change.kind.value
    if change.was:
        what += f" of {cell_code(short_name(change.was))}"
    calls = _both(
        str(change.base.count) if change.base else None,
        str(change.candidate.count) if change.candidate else None,
    )
    times = _both(
        _in_ms(change.base) if change.base else None,
        _in_ms(change.candidate) if change.candidate else None,
    )
    delta = NULL if change.delta_s is None else f"{change.delta_s * 1e3:+.3f}"
    each = NULL if change.per_call_pct is None else f"{change.per_call_pct:+.1f} %"
    return f"| {cell_code(name)} | {what} | {calls} | {times} | {delta} | {each} |"


def _where(change: Change) -> str:
    """Of the candidate; 'base -> candidate' where they differ."""
    base, candidate = (
        None if one is None else cell_code(one)
        for one in (change.base_place, change.candidate_place)
    )
    return base if change.candidate is None and base else _both(base or candidate, candidate)


def _both(base: str | None, candidate: str | None) -> str:
    """'24', or '12 -> 24'; '-' where a side has none."""
    return (base or NULL) if base == candidate else f"{base or NULL} -> {candidate or NULL}"


def _per_call_s(row: Kernel | None) -> float | None:
    return None if row is None or row.seconds is None or not row.count else row.seconds / row.count


def _in_ms(row: Kernel) -> str:
    return NULL if row.seconds is None else f"{row.seconds * 1e3:.3f}"


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.3f} ms"


def _change_of(base: float | None, candidate: float | None) -> str:
    return "" if not base or candidate is None else f" ({(candidate / base - 1) * 100:+.1f} %)"
