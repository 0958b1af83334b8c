"""Sections of a matrix that match its cells: exclusions, inclusions, expected routes, overrides of
the gate, renamed cells.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from nsa.config import nearest_name
from nsa.routing import Path
from perfbench.matrix.peers import BRANCH, declared_names
from perfbench.matrix.policy import GatePolicy
from perfbench.matrix.schema import SENTINELS, MatrixFile, policy_with
from perfbench.matrix.strict_yaml import Document, Loc
from perfbench.records import (
    AXES,
    BOUNDS,
    BUILT_IN,
    NOT_APPLICABLE,
    Axis,
    Cell,
    Match,
    Term,
    Value,
    check_axis,
    is_own_step,
    show_value,
    with_choices,
)

# Every counter that a Route can name; a misspelt one in `forbidden` would never be seen to engage.
COUNTERS = (
    *(f"cmp.{name}" for name in ("sdpa", "triton")),
    "score.triton",
    *(f"sel.{name}" for name in (*(str(p) for p in Path), "dense", "loop", "sdpa", "fa2")),
    *(f"win.{name}" for name in ("dense", "sdpa", "fa2", "triton")),
    *(f"dense.{kernel}" for kernel in ("sdpa", "flash", "cudnn", "triton", "fa3")),
)


@dataclass(frozen=True, slots=True)
class ExcludeRule:
    match: Match
    reason: str
    line: int


@dataclass(frozen=True, slots=True)
class IncludeRule:
    """A product of its own: axes that it leaves out take the values of `axes`."""

    axes: Mapping[str, tuple[Value, ...]]
    line: int


@dataclass(frozen=True, slots=True)
class ExpectRule:
    match: Match
    engaged: tuple[str, ...]
    forbidden: tuple[str, ...]
    line: int
    bounds: Mapping[str, float] = field(default_factory=dict)  # those of BOUNDS that it states


@dataclass(frozen=True, slots=True)
class OverrideRule:
    """Keys of the gate's policy that the matched cells change, checked against the matrix's
    `gate:`.
    """

    match: Match
    gate: Mapping[str, Any]
    reason: str
    line: int


def parse_axes(document: Document, file: MatrixFile) -> dict[str, tuple[Value, ...]]:
    values_of = {
        name: _values(document, ("axes", name), name, values) for name, values in file.axes.items()
    }
    for name, axis in AXES.items():
        if name not in values_of:
            if name == "path" and all(is_own_step(str(one)) for one in values_of["workload"]):
                values_of[name] = (NOT_APPLICABLE,)
                continue
            if axis.default is None:
                document.fail(
                    ("axes",),
                    f"axis {name!r} is missing and has no default; add `{name}: [...]` with"
                    f" {axis.wanted}",
                )
            values_of[name] = (axis.default,)
    return values_of


def parse_exclude(document: Document, index: int, rule: dict[str, Any]) -> ExcludeRule:
    loc: Loc = ("exclude", index)
    reason = _reason(
        document, loc, rule.get("reason"), "every exclusion says why, and the report repeats it"
    )
    match = _parse_match(document, loc, {k: v for k, v in rule.items() if k != "reason"})
    if not match.terms:
        document.fail(
            loc, "names no axis, so it would exclude every cell; add one, e.g. `path: v1`"
        )
    return ExcludeRule(match, reason, document.line(loc))


def parse_include(document: Document, index: int, entry: dict[str, Any]) -> IncludeRule:
    loc: Loc = ("include", index)
    if not entry:
        document.fail(loc, "names no axis; give the cell's, e.g. {path: reference, seq_len: 128}")
    axes: dict[str, tuple[Value, ...]] = {}
    for name, value in entry.items():
        axes[name] = _values(
            document, (*loc, name), name, value if isinstance(value, list) else [value]
        )
    return IncludeRule(axes, document.line(loc))


def parse_expect(document: Document, file: MatrixFile, index: int) -> ExpectRule:
    loc: Loc = ("expect", index)
    section = file.expect[index]
    match = _parse_match(document, (*loc, "match"), section.match)
    peers = (f"{BRANCH}.{name}" for name in (*BUILT_IN, *declared_names(document)))
    known = [*COUNTERS, *peers]
    for key, counters in (("engaged", section.engaged), ("forbidden", section.forbidden)):
        for at, counter in enumerate(counters):
            if counter not in known:
                document.fail(
                    (*loc, key, at), f"no counter {counter[:60]!r}{nearest_name(counter, known)}"
                )
    bounds = {name: most for name in BOUNDS if (most := getattr(section, name)) is not None}
    if not section.engaged and not section.forbidden and not bounds:
        document.fail(
            loc,
            "expects nothing; give `engaged:` or `forbidden:` counters, e.g. engaged: [sel.v2], or"
            f" one of {', '.join(BOUNDS)}",
        )
    if file.target.is_cpu and (on_device := [name for name in bounds if BOUNDS[name].needs_gpu]):
        document.fail(
            (*loc, on_device[0]),
            f"got {bounds[on_device[0]]:g} with target.gpu: {file.target.gpu}, and a CPU has no"
            " device whose kernels count; bound max_host_ms instead, or remove it",
        )
    return ExpectRule(
        match, tuple(section.engaged), tuple(section.forbidden), document.line(loc), bounds
    )


def parse_override(document: Document, file: MatrixFile, index: int) -> OverrideRule:
    loc: Loc = ("overrides", index)
    section = file.overrides[index]
    reason = _reason(
        document,
        (*loc, "reason"),
        section.reason,
        "whoever reads the verdict must know why this cell is judged otherwise",
    )
    match = _parse_match(document, (*loc, "match"), section.match)
    if not match.terms:
        document.fail(
            (*loc, "match"),
            "names no axis, so it is every cell; change the top-level `gate:` instead",
        )
    if not section.gate:
        document.fail(
            (*loc, "gate"), "changes nothing; give a key of `gate:`, e.g. {tolerance_pct: 5}"
        )
    policy_with(document, (*loc, "gate"), file.gate, section.gate)
    return OverrideRule(match, dict(section.gate), reason, document.line(loc))


def parse_sentinels(document: Document, file: MatrixFile) -> tuple[str, ...]:
    for index, name in enumerate(file.sentinels):
        if name not in SENTINELS:
            document.fail(
                ("sentinels", index),
                f"no sentinel {name[:60]!r}{nearest_name(name, list(SENTINELS))}",
            )
        if name in file.sentinels[:index]:
            document.fail(("sentinels", index), f"{name} is given twice; keep one")
    return tuple(file.sentinels)


def policies_of(
    document: Document, base: GatePolicy, rules: tuple[OverrideRule, ...], cells: list[Cell]
) -> dict[str, GatePolicy]:
    """The policy of each cell that an override matches; rules that match none, or contradict one
    another, are errors.
    """
    used: set[int] = set()
    found: dict[str, GatePolicy] = {}
    for cell in cells:
        changes: dict[str, tuple[Any, int]] = {}
        for index, rule in enumerate(rules):
            if not rule.match.matches(cell):
                continue
            used.add(index)
            for key, value in rule.gate.items():
                if key in changes and changes[key][0] != value:
                    earlier = f"line {changes[key][1]} says {changes[key][0]}"
                    text = (
                        f"cell {cell.cell_id}: {key} is {value} here, and {earlier}; narrow a"
                        " `match`"
                    )
                    document.fail(("overrides", index, "gate", key), text)
                changes[key] = (value, rule.line)
        if changes:
            found[cell.cell_id] = GatePolicy.model_validate(
                {**base.model_dump(), **{key: value for key, (value, _) in changes.items()}}
            )
    for index, rule in enumerate(rules):
        if index not in used:
            document.fail(
                ("overrides", index),
                f"dead rule: {rule.match} matches none of the {len(cells)} cells; correct or"
                " remove it",
            )
    return found


def check_aliases(document: Document, aliases: Mapping[str, str], ids: set[str]) -> None:
    """Each maps a cell that is gone to one that is here, and no two to the same."""
    owner: dict[str, str] = {}
    for old, new in aliases.items():
        loc: Loc = ("aliases", old)
        if new not in ids:
            document.fail(
                loc,
                f"no cell {new[:150]!r} in this matrix{nearest_name(new, sorted(ids)[:1000])};"
                " `perfbench plan` lists them",
            )
        if old in ids:
            document.fail(
                loc, "this cell still exists, and has a baseline of its own; remove the alias"
            )
        if new in owner:
            document.fail(
                loc,
                f"{new} is the new name of {owner[new]} already; one cell has one former baseline,"
                " keep one",
            )
        owner[new] = old


def _reason(document: Document, loc: Loc, reason: object, why: str) -> str:
    if not isinstance(reason, str) or not reason.strip():
        document.fail(loc, f"reason: got {show_value(reason)}, wanted a sentence; {why}")
    return reason.strip()


def _axis(document: Document, loc: Loc, name: str) -> Axis:
    try:
        axis = check_axis(name)
    except ValueError as error:
        document.fail(loc, str(error))
    return with_choices(axis, declared_names(document)) if name == "path" else axis


def _values(document: Document, loc: Loc, name: str, given: list[Any]) -> tuple[Value, ...]:
    """Check the values of one axis: at least one, each valid, none twice."""
    axis = _axis(document, loc, name)
    if not given:
        document.fail(
            loc, f"empty axis: the product has no cell; give {axis.wanted}, or remove the axis"
        )
    values: dict[Value, None] = {}
    for index, value in enumerate(given):
        at = (*loc, index)
        if value in axis.recorded:
            document.fail(
                at,
                f"{value} is what dense paths record, it cannot be asked for; wanted {axis.wanted}",
            )
        try:
            checked = axis.check(value)
        except ValueError as error:
            document.fail(at, str(error))
        if checked in values:
            document.fail(at, f"{show_value(value)} is given twice; keep one")
        values[checked] = None
    return tuple(values)


def _parse_match(document: Document, loc: Loc, rule: Mapping[str, Any]) -> Match:
    terms: list[tuple[str, tuple[Term, ...]]] = []
    for name, spec in rule.items():
        at = (*loc, name)
        axis = _axis(document, at, name)
        if spec == []:
            document.fail(at, "an empty list matches nothing; give a value, or remove the axis")
        try:
            terms.append(
                (
                    name,
                    tuple(axis.term(one) for one in (spec if isinstance(spec, list) else [spec])),
                )
            )
        except ValueError as error:
            document.fail(at, str(error))
    return Match(tuple(terms))
