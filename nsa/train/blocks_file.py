"""The file of the blocks that a trained model chose: a compressed .npz that numpy alone reads.

``about``: JSON text, with "format" 1. ``blocks_<layer>``: int16 [T, G, N], -1 padded at the end, of
T queries at positions 0 on, G kv heads, N slots.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nsa.train.errors import TrainError, TrainExit

FORMAT = 1
MAX_BLOCKS = int(np.iinfo(np.int16).max)


def write_blocks(
    path: Path, about: Mapping[str, Any], blocks: Mapping[int, NDArray[np.int16]]
) -> None:
    """Write ``path`` whole or not at all; TrainError USAGE where the disk refuses."""
    text = json.dumps({"format": FORMAT, **about})
    arrays: dict[str, Any] = {f"blocks_{layer}": one for layer, one in blocks.items()}
    whole = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole.open("wb") as file:
            np.savez_compressed(file, about=np.array(text), **arrays)
            file.flush()
            os.fsync(file.fileno())
        whole.replace(path)
    except OSError as error:
        raise TrainError(
            TrainExit.USAGE,
            f"cannot write {path}: {error.strerror}; wanted a new file; --out names another",
        ) from None
    finally:
        with suppress(OSError):
            whole.unlink()
