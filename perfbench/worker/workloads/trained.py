"""The blocks of `selection: trained` in a measuring process."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from perfbench.records import Job, TrainedBlocks, read_trained_blocks


def blocks_of(job: Job) -> Tensor | None:
    """int32 [T, G, N] on the CPU, of all tokens in the file; None where the job takes none.

    ValueError where the file is gone, or no longer the one that was planned with.
    """
    return None if job.trained_blocks is None else _read(job.trained_blocks)


@lru_cache(maxsize=1)  # the proofs and the timed step of one cell
def _read(named: TrainedBlocks) -> Tensor:
    found = read_trained_blocks(Path(named.path), named.layer)
    if found.sha256 != named.sha256:
        raise ValueError(
            f"{named.path} has sha256 {found.sha256[:12]}, and the cell was planned with"
            f" {named.sha256[:12]}; bring the file back, or start a new run"
        )
    return torch.from_numpy(found.blocks).int()
