"""What a parity proof is of: a timed cell with its model, its Route and its device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nsa.config import ModelConfig
from nsa.routing import Path, Route
from perfbench.records import CACHED, PAGED, SELECTED, Cell, Peer, torch_dtype_name


@dataclass(frozen=True, slots=True)
class Claim:
    """``timed`` is the Route that the timed cell takes on ``device``; ``seed`` decides the inputs
    of the proof, and which rows are compared.

    ``trained`` int32 [T, G, N]: the blocks of a cell with selection=trained. ``peer`` serves a cell
    whose path is one.
    """

    model: ModelConfig
    timed: Route
    cell: Cell
    device: str
    seed: int
    trained: Tensor | None = field(default=None, compare=False)
    peer: Peer | None = None

    @property
    def dtype(self) -> torch.dtype:
        found: torch.dtype = getattr(torch, torch_dtype_name(self.cell.dtype))
        return found

    @property
    def chunk(self) -> int | None:
        """Tokens that the cell adds to a cache at a time, 1 where it decodes; None without a
        cache.
        """
        if self.cell.workload not in CACHED:
            return None
        return 1 if self.cell.workload == "decode" else self.cell.chunk

    @property
    def stepping(self) -> int:
        """The most tokens that go by a step of static shapes (`nsa.decode`), as a captured step
        takes them: one where the cell decodes, a chunk in a prefill; 0 where none is captured.
        """
        return 0 if self.chunk is None or self.cell.cuda_graph == "off" else self.chunk

    @property
    def in_pages(self) -> bool:
        """Whether the cache is one of pages."""
        return self.cell.cache == PAGED

    @property
    def compiled(self) -> bool:
        """Whether what is compared is compiled, as the timed cell's model is."""
        return self.cell.compile == "on"

    @property
    def selected_alone(self) -> bool:
        """Whether the timed cell is the selected branch alone."""
        return self.cell.workload in SELECTED

    @property
    def request_by_name(self) -> str:
        """`auto` and `adaptive` depend on the length: the request by name for what the timed cell
        takes, where that is a path.
        """
        path = self.cell.path
        if path not in ("auto", "adaptive") or "sel" not in self.model.nsa.branches:
            return path
        taken = self.timed.branch("sel").implementation
        return taken if taken in tuple(Path) else path
