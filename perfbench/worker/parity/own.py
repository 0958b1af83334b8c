"""What a proof runs, and the same by hand: a cell's own function with the blocks that it attended
to, and the branches over explicit masks.

B batch, T tokens, G kv heads, N blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa import oracle
from nsa.config import ModelConfig
from perfbench.older_nsa import collect_blocks
from perfbench.worker.parity import layer
from perfbench.worker.parity.comparison import Tensors
from perfbench.worker.parity.judges import Attend


class Recorded:
    """A cell's function of the tensors of a proof. ``blocks`` int [B, T, G, N]: those that its last
    call attended to, out of a compiled graph as well; None where it needs none, and where not
    ``shows_blocks``: before a call, and of an nsa that hides them.
    """

    def __init__(self, function: Callable[[Tensors], Tensor]) -> None:
        self._function = function
        self.blocks: Tensor | None = None
        self.shows_blocks = False

    def __call__(self, t: Tensors) -> Tensor:
        with collect_blocks(compiled=True) as seen:
            o = self._function(t)
        self.blocks, self.shows_blocks = seen[0] if seen else None, bool(seen)
        return o


@dataclass(frozen=True, slots=True)
class Own:
    """``run``: the cell's own output o [B, T, HQ, DV] of the tensors of a proof; ``uncompiled``:
    the same function before torch.compile.

    ``blocks`` makes those int [B, T, G, N] that it attends to in all rows, but for near ties where
    it chooses them itself; None where it is full causal attention.
    """

    uncompiled: Callable[[Tensors], Tensor]
    blocks: Callable[[], Tensor] | None
    run: Recorded

    def last_blocks(self) -> Tensor | None:
        """Those of the last call of ``run``, else what ``blocks`` makes: rounding flips near ties,
        so another call may have chosen others.
        """
        made = self.run.blocks
        return self.blocks() if made is None and self.blocks is not None else made


def kv_cmp(model: ModelConfig, inputs: Tensors) -> tuple[Tensor, Tensor]:
    return layer.compressed_kv(
        inputs["k_cmp"], inputs["k_cmp"], inputs["v_cmp"], model, phi_of(inputs)
    )


def phi_of(t: Tensors) -> layer.PhiParams:
    """The tensors of phi for K and for V, out of those named phi_k.NAME and phi_v.NAME."""
    k, v = (
        {name.removeprefix(which): x for name, x in t.items() if name.startswith(which)}
        for which in ("phi_k.", "phi_v.")
    )
    return k or None, v or None


def gated(t: Tensors, model: ModelConfig, blocks: Tensor, rows: Tensor, attend: Attend) -> Tensor:
    """The branches over explicit masks, gated; ``attend`` is the fp64 reference or plain
    attention in the cell's dtype.
    """
    nsa, S = model.nsa, t["q"].shape[1]
    rows, blocks = rows.to(t["q"].device), blocks.to(t["q"].device)
    compressed = layer.compressed_kv(t["k_cmp"], t["k_cmp"], t["v_cmp"], model, phi_of(t))
    masks = {
        "cmp": oracle.compressed_mask(
            rows[None], compressed[0].shape[1], nsa.cmp_block, nsa.cmp_stride
        ),
        "sel": oracle.selected_mask(rows[None], blocks, S, nsa.sel_block),
        "win": oracle.sliding_mask(rows[None], S, nsa.window),
    }
    sources = {"cmp": compressed, "sel": (t["k_sel"], t["v_sel"]), "win": (t["k_win"], t["v_win"])}
    q, gates = t["q"][:, rows], t["gates"][:, rows]
    outputs = [
        gates[..., i, None] * attend(q, *sources[b], masks[b])
        for i, b in enumerate(("cmp", "sel", "win"))
        if b in nsa.branches
    ]
    return torch.stack(outputs).sum(0)
