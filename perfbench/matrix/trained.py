"""The file behind `selection: trained`: which one a matrix names, and whether its blocks fit the
matrix's model and cells.

T queries at positions 0 on, G kv heads, N slots.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from nsa.config import ModelConfig
from perfbench.matrix.shipped import MARK, shipped_file
from perfbench.matrix.strict_yaml import Document, Loc
from perfbench.records import TRAINED, Cell, TrainedBlocks, read_trained_blocks, show_value

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

KEY: Loc = ("trained_blocks",)
WRITTEN = "PATH, or {file: PATH, layer: N}"
GEOMETRY = ("sel_block", "num_selected", "num_initial", "num_local")


def blocks_path(matrix_path: str, path: str) -> pathlib.Path:
    """Where a matrix's ``path`` of blocks lies: relative to the folder of the matrix."""
    file = shipped_file(matrix_path) if matrix_path.startswith(MARK) else pathlib.Path(matrix_path)
    return file.parent / path


def trained_of(
    document: Document,
    spec: object,
    model: ModelConfig,
    cells: Iterable[Cell],
    stored: TrainedBlocks | None,
    *,
    reads_file: bool,
) -> TrainedBlocks | None:
    """The blocks of the ``cells`` with `selection: trained`; None where there are none.

    ``stored``: those that the manifest of a run keeps. ``reads_file``: look at the file; a matrix
    out of a run file never does, whatever path it names.

    PerfbenchError (USAGE) with file:line for a key without such a cell and a cell without the key;
    for a file that is missing, damaged, or of another geometry than ``model``; for fewer tokens
    than a cell has; and for blocks that break the contract of
    perfbench.worker.workloads.block_patterns.
    """
    asking = [cell for cell in cells if cell.selection == TRAINED]
    if spec is None and KEY[0] not in document.data:
        if asking:
            document.fail(
                ("axes", "selection"),
                f"cell {asking[0].cell_id} has selection={TRAINED}, and the matrix names no file of"
                f" blocks; add `trained_blocks: {WRITTEN}`, which `python -m nsa.train blocks`"
                " writes",
            )
        return None
    path, layer = _spec(document, spec)
    if not asking:
        document.fail(
            KEY,
            f"no cell has selection: {TRAINED}; add it to the axis selection, or remove the key",
        )
    if stored is not None:
        return stored
    if not reads_file:
        document.fail(
            KEY,
            f"cells have selection: {TRAINED}, and the run's manifest keeps no file of blocks;"
            " wanted its trained_blocks; measure again",
        )
    if model.nsa.adaptive_num_selected:
        document.fail(
            KEY,
            "a file of blocks has one number of slots, and nsa.adaptive_num_selected has one for"
            " each length; set it to false",
        )
    try:
        found = read_trained_blocks(blocks_path(document.path, path), layer)
        _check_geometry(found.nsa, found.blocks.shape, model)
        longest = max(asking, key=lambda cell: cell.seq_len)
        tokens = len(found.blocks)
        if tokens < longest.seq_len:
            raise ValueError(
                f"{path} holds {tokens} tokens, and cell {longest.cell_id} has {longest.seq_len};"
                " write it with more --tokens, or shorten the axis"
            )
        if (broken := first_broken_row(found.blocks, model)) is not None:
            raise ValueError(
                f"{path}: the blocks of layer {found.layer}, token {broken[0]}, KV head"
                f" {broken[1]} are {found.blocks[broken].tolist()}; wanted the forced blocks and as"
                " many others as its slots and past hold, ascending, -1 at the end; take a layer"
                " whose selection is exact"
            )
    except ValueError as error:
        document.fail(KEY, str(error))
    return TrainedBlocks(path=path, layer=found.layer, sha256=found.sha256, tokens=tokens)


def _spec(document: Document, spec: object) -> tuple[str, int | None]:
    """The path and the layer that the key names."""
    layer: object = None
    path: object = spec
    if isinstance(spec, dict):
        if unknown := sorted(set(spec) - {"file", "layer"}):
            document.fail((*KEY, unknown[0]), f"unknown key; wanted {WRITTEN}")
        path, layer = spec.get("file"), spec.get("layer")
        if "layer" in spec and (isinstance(layer, bool) or not isinstance(layer, int) or layer < 0):
            document.fail(
                (*KEY, "layer"), f"got {show_value(layer)}, wanted a whole number from 0 on"
            )
    if not isinstance(path, str) or not path.strip() or "\0" in path:
        document.fail(KEY, f"got {show_value(path)}, wanted {WRITTEN}")
    return path, layer if isinstance(layer, int) else None


def _check_geometry(nsa: Any, shape: tuple[int, ...], model: ModelConfig) -> None:
    """ValueError where the blocks were chosen by another geometry than the model's."""
    wanted = {name: getattr(model.nsa, name) for name in GEOMETRY}
    got = {name: nsa.get(name) for name in GEOMETRY}
    wanted["num_kv_heads"], got["num_kv_heads"] = model.num_kv_heads, shape[1]
    if shape[2] != got["num_selected"]:
        got["num_selected"] = shape[2]
    differs = [
        f"{name}={got[name]!r} (the model: {wanted[name]})"
        for name in wanted
        if got[name] != wanted[name]
    ]
    if differs:
        raise ValueError(
            f"the blocks were chosen with {', '.join(differs)}; wanted the model's; name the"
            " model that was trained, or another file"
        )


def first_broken_row(blocks: NDArray[np.int16], model: ModelConfig) -> tuple[int, int] | None:
    """(token, kv head) of the first row of ``blocks`` [T, G, N] that breaks the contract; None
    where all keep it.
    """
    import numpy as np

    nsa, (T, _, N) = model.nsa, blocks.shape
    ids = blocks.astype(np.int32)
    current_T = np.arange(T) // nsa.sel_block
    held_T = np.minimum(N, current_T + 1)
    slot_N = np.arange(N)
    held_TN = slot_N < held_T[:, None]
    before = np.concatenate([np.full_like(ids[..., :1], -1), ids[..., :-1]], -1)
    fits = np.where(held_TN[:, None], (ids > before) & (ids <= current_T[:, None, None]), ids == -1)
    # ascending: the initial blocks come first, the local ones last
    initial_TN = held_TN & (slot_N < nsa.num_initial)
    fits &= ~initial_TN[:, None] | (ids == slot_N)
    from_end_TN = held_T[:, None] - 1 - slot_N
    local_TN = held_TN & (from_end_TN < nsa.num_local)
    fits &= ~local_TN[:, None] | (ids == (current_T[:, None] - from_end_TN)[:, None])
    broken = np.argwhere(~fits.all(-1))
    return (int(broken[0, 0]), int(broken[0, 1])) if len(broken) else None
