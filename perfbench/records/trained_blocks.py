"""The blocks that a trained model chose, out of the file that `python -m nsa.train blocks` writes.

T queries at positions 0 on, G kv heads, N slots.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from perfbench.records.regular_file import read_regular_file

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FORMAT = 1
MAX_FILE_BYTES = 2**28
MAX_ARRAY_BYTES = 2**28  # 8 kv heads of 16 slots for a million tokens
_ABOUT = "about"
_ARRAY = "blocks_"
# what zipfile, numpy and json raise for files that are cut, changed, encrypted or huge
_DAMAGE = (
    ValueError,
    TypeError,
    LookupError,
    SyntaxError,
    OSError,
    EOFError,
    MemoryError,
    OverflowError,
    RuntimeError,
    zipfile.BadZipFile,
    zlib.error,
    struct.error,
    tokenize.TokenError,
)


class TrainedBlocks(BaseModel):
    """Which blocks `selection: trained` takes: those of ``layer`` in the file ``path``, as the
    matrix names it, whose content has ``sha256`` and holds ``tokens`` queries.
    """

    model_config = ConfigDict(extra="ignore", frozen=True, defer_build=True)
    path: str
    layer: int
    sha256: str
    tokens: int


@dataclass(frozen=True, slots=True)
class BlocksFile:
    """``blocks`` int16 [T, G, N] of ``layer``; ``nsa`` is the geometry that chose them."""

    layer: int
    blocks: NDArray[np.int16]
    nsa: Mapping[str, Any]
    sha256: str


def read_trained_blocks(path: Path, layer: int | None) -> BlocksFile:
    """The blocks of ``layer``, or of the only layer; ValueError, one line, for a file that is
    missing, damaged or of another kind, and for a layer that it lacks.
    """
    import numpy as np

    try:
        content = read_regular_file(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ValueError(
            f"cannot read {path}: {error.strerror}; `python -m nsa.train blocks RUN --out"
            f" {path.name}` writes such a file"
        ) from None
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as members:
            if any(one.file_size > MAX_ARRAY_BYTES for one in members.infolist()):
                raise ValueError(f"an array of more than {MAX_ARRAY_BYTES} bytes")
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            about = json.loads(str(arrays[_ABOUT]))
            held = sorted(
                int(name.removeprefix(_ARRAY)) for name in arrays.files if name.startswith(_ARRAY)
            )
            if about["format"] != FORMAT:
                raise ValueError(f"format {about['format']!r}, which this perfbench does not read")
            chosen = _layer_of(held, layer)
            if isinstance(chosen, int):
                blocks = arrays[f"{_ARRAY}{chosen}"]
                nsa = dict(about["layers"][str(chosen)]["nsa"])
    except _DAMAGE as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from None
    if isinstance(chosen, str):
        raise ValueError(f"{path} {chosen}")
    if blocks.dtype != np.int16 or blocks.ndim != 3 or not blocks.size:
        raise _damaged(path, f"blocks of {blocks.dtype} {list(blocks.shape)}")
    return BlocksFile(chosen, blocks, nsa, hashlib.sha256(content).hexdigest())


def _layer_of(held: list[int], layer: int | None) -> int | str:
    """The layer, or why there is none."""
    shown = ", ".join(map(str, held)) or "no layer"
    if layer is None and len(held) == 1:
        return held[0]
    if layer is None:
        return f"holds layers {shown}; wanted one; name it: {{file: FILE, layer: N}}"
    return layer if layer in held else f"holds layers {shown}; got layer {layer}; name one of them"


def _damaged(path: Path, why: str) -> ValueError:
    why = " ".join(why.split())[:200]
    return ValueError(
        f"{path} is damaged, or no file of `python -m nsa.train blocks`: {why}; write it again"
    )
