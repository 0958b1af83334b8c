"""A matrix: which cells to measure, what they must show, and how they are judged.

Pure but for reading the file.

A dead `expect` rule (it matches no cell) is an error, because it promises a check that never
happens; a dead
`exclude` or `include` is a warning of the plan.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import pathlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from nsa.config import ModelConfig
from perfbench.errors import Exit, PerfbenchError
from perfbench.matrix import rules, strict_yaml
from perfbench.matrix.peers import parse_peers, used_peers
from perfbench.matrix.policy import Alias, GatePolicy, Policies
from perfbench.matrix.rules import ExcludeRule, ExpectRule, IncludeRule, OverrideRule
from perfbench.matrix.schema import NO_MODEL, Limits, Target, resolve_model, validate
from perfbench.matrix.shipped import MARK, shipped_file, shipped_name
from perfbench.matrix.strict_yaml import Document, read_text
from perfbench.matrix.trained import blocks_path, trained_of
from perfbench.records import (
    AXES,
    BOUNDS,
    BUILT_IN,
    MAX_REPLICATES,
    METHOD_VERSION,
    OF_RANKS,
    TRAINED,
    Cell,
    Expect,
    Manifest,
    MeasureOptions,
    Peer,
    PlannedCell,
    TrainedBlocks,
    Value,
    select_cells,
)

MAX_CELLS = 100_000  # at five seconds a cell this is a week; a larger product is a slip
MAX_MATCHES = 2_000_000  # cells times rules: seconds of planning


@dataclass(frozen=True, slots=True)
class Excluded:
    cell_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class MatrixCell:
    """A cell with what the matrix says of it: the hash of what is measured, and what it must
    show.
    """

    cell: Cell
    config_sha256: str
    expect: Expect


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
    overrides: tuple[OverrideRule, ...] = ()
    aliases: Mapping[str, str] = field(default_factory=dict)  # a cell's former id -> its id now
    sentinels: tuple[str, ...] = ()
    by_cell: Mapping[str, GatePolicy] = field(default_factory=dict)  # those of an override
    trained: TrainedBlocks | None = None  # of the cells with selection=trained
    peers: Mapping[str, Peer] = field(default_factory=dict)  # of the cells whose path is one

    def peer_of(self, cell: Cell) -> Peer | None:
        """What serves the cell in nsa's place, if anything."""
        return self.peers.get(cell.path) if cell.is_peer else None


def load_matrix(path: str | pathlib.Path) -> Matrix:
    """Read and check a matrix file, or a shipped matrix (`@cpu`), which keeps that name.

    PerfbenchError(USAGE) with file:line for everything that is wrong with it.
    """
    name, file = str(path), str(path)
    if name.startswith(MARK):
        name, file = f"{MARK}{shipped_name(name)}", str(shipped_file(name))
    return parse_matrix(read_text(file), name, to_measure=True)


def stored_matrix(manifest: Manifest) -> Matrix:
    """The matrix that a run was made with, as its manifest keeps it; reads no file."""
    return parse_matrix(manifest.matrix_text, manifest.matrix_path, trained=manifest.trained_blocks)


def parse_matrix(
    text: str, path: str, *, to_measure: bool = False, trained: TrainedBlocks | None = None
) -> Matrix:
    """The same for a text that was read before; ``path`` names it in messages.

    ``to_measure``: refuse too few processes to judge, which the matrix of a stored run may have.
    Only then the file of blocks is read, unless ``trained`` is what the manifest of a run keeps of
    it.
    """
    document = strict_yaml.parse(text, path)
    file = validate(document)
    model, model_name = resolve_model(document, file.model)
    matrix = Matrix(
        version=file.version,
        name=file.name,
        target=file.target,
        model=model,
        model_name=model_name,
        axes=rules.parse_axes(document, file),
        exclude=tuple(
            rules.parse_exclude(document, i, rule) for i, rule in enumerate(file.exclude)
        ),
        include=tuple(
            rules.parse_include(document, i, entry) for i, entry in enumerate(file.include)
        ),
        expect=tuple(rules.parse_expect(document, file, i) for i in range(len(file.expect))),
        measure=file.measure,
        limits=file.limits,
        gate=file.gate,
        text=text,
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        path=path,
        overrides=tuple(
            rules.parse_override(document, file, i) for i in range(len(file.overrides))
        ),
        aliases=dict(file.aliases),
        sentinels=rules.parse_sentinels(document, file),
    )
    kept = _check_cells(document, matrix)
    declared = parse_peers(document, file.peers, on_gpu=not file.target.is_cpu)
    peers = used_peers(document, declared, kept)
    blocks = trained_of(document, file.trained_blocks, model, kept, trained, reads_file=to_measure)
    rules.check_aliases(document, matrix.aliases, {cell.cell_id for cell in kept})
    by_cell = rules.policies_of(document, file.gate, matrix.overrides, kept)
    if to_measure:
        _refuse_too_few(document, file.measure.processes, {"": file.gate, **by_cell})
    return replace(matrix, by_cell=by_cell, trained=blocks, peers=peers)


def _refuse_too_few(document: Document, processes: int, gates: Mapping[str, GatePolicy]) -> None:
    """No cell with fewer replicates than its policy wants is ever judged: every one would be
    WATCH, exit 0.
    """
    for cell_id, gate in gates.items():
        if gate.min_replicates > processes:
            where = f" of cell {cell_id}" if cell_id else ""
            document.fail(
                ("gate", "min_replicates") if not cell_id else ("overrides",),
                f"got min_replicates={gate.min_replicates}{where} with measure.processes="
                f"{processes}, wanted at most as many: fewer replicates than that are never judged;"
                " raise processes",
            )


def _check_cells(document: Document, matrix: Matrix) -> list[Cell]:
    """What only the expanded matrix can show: too many cells, none left, dead or contradictory
    expectations. The cells.
    """
    spans = [_span(matrix, rule) for rule in (None, *matrix.include)]
    if matrix.measure.processes > MAX_REPLICATES:
        document.fail(
            ("measure", "processes"),
            f"{matrix.measure.processes} is more than {MAX_REPLICATES}, which no run file may hold;"
            " lower it",
        )
    size = sum(math.prod(len(values) for values in span.values()) for span in spans)
    if size > MAX_CELLS:
        document.fail(
            ("axes",),
            f"the axes span {size} cells, more than {MAX_CELLS}; shorten one or split the matrix",
        )
    count = sum(map(len, (matrix.exclude, matrix.include, matrix.expect, matrix.overrides)))
    if size * count > MAX_MATCHES:
        text = f"{size} cells times {count} rules are more than {MAX_MATCHES} comparisons"
        document.fail(("axes",), f"{text}; join rules with lists of values, or split the matrix")
    kept, excluded = _expanded(matrix)
    if not kept:
        named = "; ".join(f"line {r.line} {r.match}: {r.reason}" for r in matrix.exclude)
        document.fail(
            ("exclude",),
            f"all {len(excluded)} cells are excluded, nothing would be measured, by {named}; narrow"
            " one of them",
        )
    _refuse_more_ranks(document, matrix.target, kept)
    _refuse_no_ranks(document, matrix.sentinels, kept)
    for index, expectation in enumerate(matrix.expect):
        if not any(expectation.match.matches(cell) for cell in kept):
            document.fail(
                ("expect", index),
                f"dead rule: {expectation.match} matches none of the {len(kept)} cells; correct or"
                " remove it",
            )
    for cell in kept:
        expect = expect_for(matrix, cell)
        if both := set(expect.engaged) & set(expect.forbidden):
            document.fail(
                ("expect",),
                f"cell {cell.cell_id}: {', '.join(sorted(both))} is both engaged and forbidden;"
                " narrow a `match`",
            )
    return kept


def _refuse_more_ranks(document: Document, target: Target, kept: Iterable[Cell]) -> None:
    """A rank has a card to itself, and the machine is compared with the target's count."""
    largest = max((cell.world_size for cell in kept), default=1)
    if largest > target.count:
        document.fail(
            ("target",),
            f"got count: {target.count} and a cell of world_size {largest}, wanted a count of at"
            f" least {largest}, a card for each rank; write count: {largest}, or exclude those"
            " cells",
        )


def _refuse_no_ranks(document: Document, sentinels: Iterable[str], kept: Iterable[Cell]) -> None:
    """The link between ranks is no part of a matrix that has none."""
    if any(cell.world_size > 1 for cell in kept):
        return
    for index, name in enumerate(sentinels):
        if name in OF_RANKS:
            document.fail(
                ("sentinels", index),
                f"got {name} and no cell of several ranks, wanted world_size >= 2 in one at least;"
                f" leave {name} out, or add such a cell",
            )


def _span(matrix: Matrix, rule: IncludeRule | None) -> dict[str, tuple[Value, ...]]:
    return {**matrix.axes, **(rule.axes if rule else {})}


def _product(axes: Mapping[str, tuple[Value, ...]]) -> Iterable[Cell]:
    """Cells in the order of the axes, each once: dense paths have one cell for all values of
    fa2.
    """
    return _product_of(tuple(axes.items()))


@lru_cache(maxsize=8)  # loading and planning one matrix span it three times
def _product_of(axes: tuple[tuple[str, tuple[Value, ...]], ...]) -> tuple[Cell, ...]:
    names = [name for name, _ in axes]
    points = (
        dict(zip(names, values, strict=True))
        for values in itertools.product(*(values for _, values in axes))
    )
    # A file names the axes in their own order, whatever that of the matrix.
    ordered = ({name: point[name] for name in AXES} for point in points)
    return tuple(dict.fromkeys(map(Cell.from_mapping, ordered)))


def cells_of(matrix: Matrix, only: Iterable[str] = ()) -> list[Cell]:
    """Every cell that a run with the `--only` terms in ``only`` would measure."""
    return [one.cell for one in cells(matrix, only)[0]]


def sentinels_of(matrix: Matrix, planned: Iterable[PlannedCell]) -> list[str]:
    """Sentinels of ``matrix`` that a run of ``planned`` measures: the link between ranks where one
    of them has as many ranks as any cell of the matrix, so that its rate is always of as many.
    """
    most = max(cell.world_size for cell in cells_of(matrix))
    has_most = max((cell.axes.world_size for cell in planned), default=1) == most
    return [name for name in matrix.sentinels if has_most or name not in OF_RANKS]


def cells(matrix: Matrix, only: Iterable[str] = ()) -> tuple[list[MatrixCell], list[Excluded]]:
    """The product minus `exclude`, then `include`, of which the `--only AXIS=V` terms in ``only``
    keep some (the same axis repeated is `or`, different axes are `and`); and what was excluded,
    with every reason.

    PerfbenchError(USAGE) where a term is malformed, or nothing is kept.
    """
    kept, excluded = _expanded(matrix)
    try:
        selected = select_cells(kept, only)
    except ValueError as error:
        raise PerfbenchError(Exit.USAGE, str(error)) from None
    return [
        MatrixCell(cell, config_sha256(matrix, cell.cell_id), expect_for(matrix, cell))
        for cell in selected
    ], excluded


def _expanded(matrix: Matrix) -> tuple[list[Cell], list[Excluded]]:
    """The cells without what the matrix says of them."""
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
    """Rules without effect."""
    found = []
    product = list(_product(matrix.axes))
    for rule in matrix.exclude:
        if not any(rule.match.matches(cell) for cell in product):
            found.append(
                f"{matrix.path}:{rule.line}: exclude {rule.match} matches no cell; correct or"
                " remove it"
            )
    excluded = {
        cell for cell in product if any(rule.match.matches(cell) for rule in matrix.exclude)
    }
    known = set(product) - excluded
    for entry in matrix.include:
        added = set(_product(_span(matrix, entry)))
        if added <= known:
            found.append(f"{matrix.path}:{entry.line}: include adds no cell; correct or remove it")
        known |= added
    return found


def expect_for(matrix: Matrix, cell: Cell) -> Expect:
    """The union of all rules that match ``cell``; of several bounds on one number the lowest."""
    matching = [rule for rule in matrix.expect if rule.match.matches(cell)]
    return _expect_of(
        tuple(dict.fromkeys(counter for rule in matching for counter in rule.engaged)),
        tuple(dict.fromkeys(counter for rule in matching for counter in rule.forbidden)),
        tuple(
            (name, min(found))
            for name in BOUNDS
            if (found := [rule.bounds[name] for rule in matching if name in rule.bounds])
        ),
    )


@lru_cache(maxsize=256)  # cells of one rule share the object
def _expect_of(
    engaged: tuple[str, ...],
    forbidden: tuple[str, ...],
    bounds: tuple[tuple[str, float], ...],
) -> Expect:
    return Expect.model_validate(
        {"engaged": list(engaged), "forbidden": list(forbidden), **dict(bounds)}
    )


def policies(matrix: Matrix) -> Policies:
    """How each cell is judged: `gate:`, its `overrides` and its `aliases`."""
    aliases = {
        old: Alias(new, config_sha256(matrix, new), config_sha256(matrix, old))
        for old, new in matrix.aliases.items()
    }
    return Policies(matrix.gate, matrix.by_cell, aliases, matrix.limits.oom == "find_boundary")


def config_sha256(matrix: Matrix, cell_id: str) -> str:
    """Hash of what is measured: the resolved model, the cell and the method; not how long it is
    timed.

    A dense path runs without NSA, but its twin's shape is the model's, so the whole model counts.
    The cell enters by its id: an axis that is added later, at its default, changes no hash. Blocks
    of a trained model enter by their file's content and the layer, wherever the file lies. A peer
    enters by what the matrix declares of it. A user's own step enters by its name: its file is
    code, and code is what a baseline compares.
    """
    model = NO_MODEL if matrix.model_name == NO_MODEL else _model_sha256(matrix.model)
    what = {"model": model, "cell": cell_id, "method_version": METHOD_VERSION}
    if matrix.trained is not None and f"selection={TRAINED}" in cell_id.split(","):
        what["trained_blocks"] = f"{matrix.trained.sha256} layer {matrix.trained.layer}"
    path = next((t.partition("=")[2] for t in cell_id.split(",") if t.startswith("path=")), "")
    if path in matrix.peers and path not in BUILT_IN:
        what["peer"] = matrix.peers[path].declared
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()


def trained_for(matrix: Matrix, cell: Cell) -> TrainedBlocks | None:
    """What a measuring process reads for ``cell``, its path absolute; None where it has no
    selection=trained.
    """
    if matrix.trained is None or cell.selection != TRAINED:
        return None
    path = blocks_path(matrix.path, matrix.trained.path).absolute()
    return matrix.trained.model_copy(update={"path": str(path)})


def check_configs(matrix: Matrix, cells: Iterable[PlannedCell], path: str) -> None:
    """BASELINE (corrupt) where a stored plan's cell has another hash than its axes and the stored
    matrix's model give.
    """
    for cell in cells:
        wanted = config_sha256(matrix, cell.axes.cell_id)
        if (cell.axes.cell_id, wanted) != (cell.cell_id, cell.config_sha256):
            raise PerfbenchError(
                Exit.BASELINE,
                f"{path}: CORRUPT: cell {cell.cell_id} has config {cell.config_sha256[:12]}, its"
                f" axes and the model give {wanted[:12]}; restore the file, or measure again",
            )


@lru_cache(maxsize=8)
def _model_sha256(model: ModelConfig) -> str:
    """Once a matrix, not once a cell: of 10,000 cells it took most of the planning."""
    return model.sha256()
