"""The blocks that a step chose, judged by NSA.md's rule with the twin's own q and compressed keys.

Rounding moves scores, so a block may replace a better one where the twin's scores, in the cell's
dtype and in the wider one, differ by as much.

B batch, T sampled rows, G kv heads, J selection blocks, N chosen.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nsa import oracle
from nsa.config import NSAConfig
from perfbench.worker.parity.blocks import NEAR_TIE, is_malformed

NUM_ROWS = 64
# The step's scores may be off by twice what the twin's are, at both blocks that change places.
FACTOR = 4.0
LOG_NOTHING = 14.0  # a millionth of the largest score
Seen = tuple[Tensor, Tensor]  # q [B, T, HQ, D] and compressed keys, as the attention had them


def sampled(x: Tensor) -> Tensor:
    """int64, which rows of x [B, T, ...] are judged: evenly spread, both ends among them."""
    tokens = x.shape[1]
    rows = torch.linspace(0, tokens - 1, min(NUM_ROWS, tokens), dtype=torch.float64).round().long()
    distinct: Tensor = torch.unique_consecutive(rows)
    return distinct.to(x.device)


@torch.no_grad()
def judge(
    blocks: Tensor, wide: Seen, own: Seen, config: NSAConfig, *, first: int, kv_len: int
) -> tuple[float, str]:
    """(error over tolerance, in words) of the ``blocks`` [B, T, G, N] of a layer, whose first query
    is at ``first``; malformed ones are 1e9. ``wide`` and ``own`` have the `sampled` rows of q.

    Where the config chooses otherwise than by exact scores in fp32, their form is judged alone.
    """
    slots = config.num_selected_for(kv_len)
    if blocks.shape[-1] != slots:
        return 1e9, f"{blocks.shape[-1]} blocks a row; wanted {slots}"
    config = replace(config, num_selected=slots, adaptive_num_selected=False)
    sample = sampled(blocks)
    chosen, rows = blocks[:, sample].long(), sample + first
    J = -(-kv_len // config.sel_block)
    if count := int(is_malformed(chosen.cpu(), config, rows.cpu(), J).sum()):
        return 1e9, f"{count} rows of blocks are malformed"
    if config.selection != "exact" or config.score_dtype != "float32":
        return 0.0, "blocks"
    scores, others = (_scores(x, rows, config, J) for x in (wide, own))
    exact = oracle.select(*wide, config=config, kv_len=kv_len, positions=rows[None])[0]
    ours, best = (
        (x[..., None] == torch.arange(J, device=x.device)).any(3) for x in (chosen, exact)
    )
    lost = scores.masked_fill(~(best & ~ours), -torch.inf).amax(-1)
    gained = scores.masked_fill(~(ours & ~best), torch.inf).amin(-1)
    differs = (ours != best).any(-1)
    if not bool(differs.any()):
        return 0.0, "blocks"
    # a score of nearly nothing moves by orders of magnitude, and is never the last that is chosen
    counts = scores > scores.amax(-1, keepdim=True) - LOG_NOTHING
    moved = (others - scores).abs().masked_fill(~counts, 0.0).amax().item()
    tolerance = FACTOR * moved + NEAR_TIE
    error = (lost - gained)[differs].max().item()
    return error / tolerance, (
        f"a block is left out whose score is {error:.3g} (relative) above a chosen one's, wanted at"
        f" most {tolerance:.3g}"
    )


def _scores(seen: Seen, rows: Tensor, config: NSAConfig, J: int) -> Tensor:
    """Natural logarithms [B, T, G, J]."""
    scores = oracle.block_scores(*seen, rows[None], config, J, None)
    return scores.permute(0, 2, 1, 3).clamp(min=1e-300).log()
