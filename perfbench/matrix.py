"""A matrix: which cells to measure, what they must show, and how they are judged. Pure but for reading the file.

A dead `expect` rule (it matches no cell) is an error, because it promises a check that never happens; a dead
`exclude` or `include` is a warning of the plan.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nsa.config import ModelConfig, nearest_name
from nsa.routing import DENSE_KINDS, Path
from perfbench import axes as _axes
from perfbench.axes import AXES, Cell, Match, Term, Value, show, torch_dtype_name
from perfbench.job import MeasureOptions
from perfbench.matrixfile import Limits, MatrixFile, Target, json_schema, resolve_model, validate
from perfbench.policy import GatePolicy
from perfbench.result import METHOD_VERSION, Expect
from perfbench.verdict import Exit, PerfbenchError
from perfbench.yamlfile import Document, Loc, read_text
from perfbench.yamlfile import parse as parse_yaml

__all__ = [
    "AXES", "Cell", "Excluded", "Matrix", "cells", "config_sha256", "expect_for", "json_schema", "load", "parse",
    "select", "torch_dtype_name", "warnings",
]  # fmt: skip

MAX_CELLS = 100_000  # at five seconds a cell this is a week; a larger product is a slip

# Every counter that a Route can name; a misspelt one in `forbidden` would never be seen to engage.
COUNTERS = (
    "cmp.sdpa",
    *(f"sel.{name}" for name in (*(str(p) for p in Path), "loop", "sdpa", "fa2")),
    "win.fa2",
    "win.sdpa",
    *(f"dense.{kernel}" for kernel in ("sdpa", "flash", "cudnn")),
)


@dataclass(frozen=True, slots=True)
class Excluded:
    cell_id: str
    reason: str


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


@dataclass(frozen=True, slots=True)
class Matrix:
    """A validated matrix file; ``text`` is the file itself, which the manifest of a run keeps."""

    version: int
    name: str
    target: Target
    model: ModelConfig
    model_name: str
    axes: Mapping[str, tuple[Value, ...]]
    exclude: tuple[ExcludeRule, ...]
    include: tuple[IncludeRule, ...]
    expect: tuple[ExpectRule, ...]
    measure: MeasureOptions
    limits: Limits
    gate: GatePolicy
    text: str
    sha256: str
    path: str


def load(path: str | pathlib.Path) -> Matrix:
    """Read and check a matrix file. PerfbenchError(USAGE) with file:line for everything that is wrong with it."""
    return parse(read_text(str(path)), str(path))


def parse(text: str, path: str) -> Matrix:
    """The same for a text that was read before; ``path`` names it in messages."""
    document = parse_yaml(text, path)
    file = validate(document)
    model, model_name = resolve_model(document, file.model)
    matrix = Matrix(
        version=file.version,
        name=file.name,
        target=file.target,
        model=model,
        model_name=model_name,
        axes=_parse_axes(document, file),
        exclude=tuple(_parse_exclude(document, i, rule) for i, rule in enumerate(file.exclude)),
        include=tuple(_parse_include(document, i, entry) for i, entry in enumerate(file.include)),
        expect=tuple(_parse_expect(document, file, i) for i in range(len(file.expect))),
        measure=file.measure,
        limits=file.limits,
        gate=file.gate,
        text=text,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        path=path,
    )
    _check_whole(document, matrix)
    return matrix


def _axis(document: Document, loc: Loc, name: str) -> _axes.Axis:
    try:
        return _axes.check_axis(name)
    except ValueError as error:
        document.fail(loc, str(error))


def _values(document: Document, loc: Loc, name: str, given: list[Any]) -> tuple[Value, ...]:
    """Check the values of one axis: at least one, each valid, none twice."""
    axis = _axis(document, loc, name)
    if not given:
        document.fail(loc, f"empty axis: the product has no cell; give {axis.wanted}, or remove the axis")
    values: list[Value] = []
    for index, value in enumerate(given):
        at = (*loc, index)
        if value in axis.recorded:
            document.fail(at, f"{value} is what dense paths record, it cannot be asked for; wanted {axis.wanted}")
        try:
            values.append(axis.check(value))
        except ValueError as error:
            document.fail(at, str(error))
        if value in values[:-1]:
            document.fail(at, f"{show(value)} is given twice; keep one")
    return tuple(values)


def _parse_axes(document: Document, file: MatrixFile) -> dict[str, tuple[Value, ...]]:
    given = {name: _values(document, ("axes", name), name, values) for name, values in file.axes.items()}
    for name, axis in AXES.items():
        if name not in given:
            if axis.default is None:
                document.fail(("axes",), f"axis {name!r} is missing and has no default; add `{name}: [...]` with {axis.wanted}")
            given[name] = (axis.default,)
    return given


def _parse_match(document: Document, loc: Loc, rule: Mapping[str, Any]) -> Match:
    terms: list[tuple[str, tuple[Term, ...]]] = []
    for name, spec in rule.items():
        at = (*loc, name)
        axis = _axis(document, at, name)
        if spec == []:
            document.fail(at, "an empty list matches nothing; give a value, or remove the axis")
        try:
            terms.append((name, tuple(axis.term(one) for one in (spec if isinstance(spec, list) else [spec]))))
        except ValueError as error:
            document.fail(at, str(error))
    return Match(tuple(terms))


def _parse_exclude(document: Document, index: int, rule: dict[str, Any]) -> ExcludeRule:
    loc: Loc = ("exclude", index)
    reason = rule.get("reason")
    if not isinstance(reason, str) or not reason.strip():
        document.fail(loc, f"reason: got {show(reason)}, wanted a sentence; every exclusion says why, and the report repeats it")
    match = _parse_match(document, loc, {k: v for k, v in rule.items() if k != "reason"})
    if not match.terms:
        document.fail(loc, "names no axis, so it would exclude every cell; add one, e.g. `path: v1`")
    return ExcludeRule(match, reason.strip(), document.line(loc))


def _parse_include(document: Document, index: int, entry: dict[str, Any]) -> IncludeRule:
    loc: Loc = ("include", index)
    if not entry:
        document.fail(loc, "names no axis; give the cell's, e.g. {path: reference, seq_len: 128}")
    axes: dict[str, tuple[Value, ...]] = {}
    for name, value in entry.items():
        axes[name] = _values(document, (*loc, name), name, value if isinstance(value, list) else [value])
    return IncludeRule(axes, document.line(loc))


def _parse_expect(document: Document, file: MatrixFile, index: int) -> ExpectRule:
    loc: Loc = ("expect", index)
    section = file.expect[index]
    match = _parse_match(document, (*loc, "match"), section.match)
    for key, counters in (("engaged", section.engaged), ("forbidden", section.forbidden)):
        for at, counter in enumerate(counters):
            if counter not in COUNTERS:
                document.fail((*loc, key, at), f"no counter {counter[:60]!r}{nearest_name(counter, list(COUNTERS))}")
    if not section.engaged and not section.forbidden:
        document.fail(loc, "expects nothing; give `engaged:` or `forbidden:` counters, e.g. engaged: [sel.v2]")
    return ExpectRule(match, tuple(section.engaged), tuple(section.forbidden), document.line(loc))


def _check_whole(document: Document, matrix: Matrix) -> None:
    """What only the expanded matrix can show: too many cells, none left, dead or contradictory expectations."""
    spans = [_span(matrix, rule) for rule in (None, *matrix.include)]
    size = sum(math.prod(len(values) for values in span.values()) for span in spans)
    if size > MAX_CELLS:
        document.fail(("axes",), f"the axes span {size} cells, more than {MAX_CELLS}; shorten one or split the matrix")
    kept, excluded = cells(matrix)
    if not kept:
        rules = "; ".join(f"line {r.line} {r.match}: {r.reason}" for r in matrix.exclude)
        document.fail(("exclude",), f"all {len(excluded)} cells are excluded, nothing would be measured, by {rules}; narrow one of them")
    for index, expectation in enumerate(matrix.expect):
        if not any(expectation.match.matches(cell) for cell in kept):
            document.fail(("expect", index), f"dead rule: {expectation.match} matches none of the {len(kept)} cells; correct or remove it")
    for cell in kept:
        expect = expect_for(matrix, cell)
        if both := set(expect.engaged) & set(expect.forbidden):
            document.fail(("expect",), f"cell {cell.cell_id}: {', '.join(sorted(both))} is both engaged and forbidden; narrow a `match`")


def _span(matrix: Matrix, rule: IncludeRule | None) -> dict[str, tuple[Value, ...]]:
    return {**matrix.axes, **(rule.axes if rule else {})}


def _product(axes: Mapping[str, tuple[Value, ...]]) -> Iterable[Cell]:
    """Cells in the order of the axes, each once: dense paths have one cell for all values of fa2."""
    points = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return dict.fromkeys(Cell(**point) for point in points)  # type: ignore[arg-type]  # _values checked the kinds


def cells(matrix: Matrix) -> tuple[list[Cell], list[Excluded]]:
    """The product minus `exclude`, then `include`; and what was excluded, with every reason."""
    kept: dict[Cell, None] = {}
    excluded: dict[Cell, Excluded] = {}
    for cell in _product(matrix.axes):
        if reasons := [rule.reason for rule in matrix.exclude if rule.match.matches(cell)]:
            excluded[cell] = Excluded(cell.cell_id, "; ".join(dict.fromkeys(reasons)))
        else:
            kept[cell] = None
    for entry in matrix.include:
        for cell in _product(_span(matrix, entry)):
            kept[cell] = None
            excluded.pop(cell, None)
    return list(kept), list(excluded.values())


def warnings(matrix: Matrix) -> list[str]:
    """Rules without effect, and too few replicates for the gate."""
    found = []
    product = list(_product(matrix.axes))
    for rule in matrix.exclude:
        if not any(rule.match.matches(cell) for cell in product):
            found.append(f"{matrix.path}:{rule.line}: exclude {rule.match} matches no cell; correct or remove it")
    excluded = {cell for cell in product if any(rule.match.matches(cell) for rule in matrix.exclude)}
    known = set(product) - excluded
    for entry in matrix.include:
        added = set(_product(_span(matrix, entry)))
        if added <= known:
            found.append(f"{matrix.path}:{entry.line}: include adds no cell; correct or remove it")
        known |= added
    if matrix.measure.processes < matrix.gate.min_replicates:
        found.append(
            f"{matrix.path}: measure.processes={matrix.measure.processes} is below gate.min_replicates={matrix.gate.min_replicates}, "
            "so every cell will be WATCH; raise processes"
        )
    return found


def select(cells: list[Cell], only: list[str]) -> list[Cell]:
    """The cells that `--only AXIS=V` keeps; the same axis repeated is `or`, different axes are `and`."""
    try:
        return _axes.select(cells, only)
    except ValueError as error:
        raise PerfbenchError(Exit.USAGE, str(error)) from None


def expect_for(matrix: Matrix, cell: Cell) -> Expect:
    """The union of all rules that match ``cell``."""
    rules = [rule for rule in matrix.expect if rule.match.matches(cell)]
    return Expect(
        engaged=list(dict.fromkeys(counter for rule in rules for counter in rule.engaged)),
        forbidden=list(dict.fromkeys(counter for rule in rules for counter in rule.forbidden)),
    )


def config_sha256(matrix: Matrix, cell: Cell) -> str:
    """Hash of what is measured: the resolved model, the cell and the method; not how long it is timed.

    A dense path runs without NSA, but its twin's shape is the model's, so the whole model counts. The cell enters by
    its id: an axis that is added later, at its default, changes no hash.
    """
    what = {"model": matrix.model.sha256(), "cell": cell.cell_id, "method_version": METHOD_VERSION}
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def is_dense(cell: Cell) -> bool:
    return cell.path in DENSE_KINDS
