"""How far a configured selection (hierarchical, or scored below fp32) departs from the exact fp32
top n.

B batch, T query tokens, G kv heads, J selection blocks, N selected. Reads its results on the host:
a report, never a forward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nsa import checks
from nsa.blocks import BlockGrid
from nsa.config import NSAConfig
from nsa.ops.positions import query_positions
from nsa.selection import QueryRows, choose, rankings

NEAR_TIE = 1e-5  # relative gap under which the order of two fp32 scores is rounding


@dataclass(frozen=True, slots=True)
class SelectionReport:
    """Over all rows, a row being one query of one kv head; shares and recalls are from 0 to 1.

    ``mean_recall`` and ``min_recall``: |chosen & exact| / |exact|, forced blocks included in both
    sets. ``changed_share``: rows whose set differs. ``near_tie_share``: rows whose n-th and
    (n+1)-th exact score are closer than 1e-5 relative (to the n-th; two scores of 0 are a tie), so
    that even two exact implementations may differ there. A row with nothing to compete for is none.
    """

    rows: int
    mean_recall: float
    min_recall: float
    changed_share: float
    near_tie_share: float


@torch.no_grad()
def recall(
    q: Tensor,
    k_cmp: Tensor,
    *,
    config: NSAConfig,
    q_start: int | Tensor = 0,
    kv_len: int | None = None,
    scale: float | None = None,
) -> SelectionReport:
    """Compare what ``config`` selects with the exact top n of fp32 scores (fp64 for fp64 inputs), n
    being config's for kv_len.

    q [B, T, HQ, DK] and k_cmp [B, C, HKV, DK] as of ``nsa.select_blocks``; kv_len defaults to the
    last query's position + 1. Raises ValueError for shapes, dtypes or devices that do not fit, and
    for a call without a query.
    """
    checks.qkv(q, k_cmp, k_cmp, q_start=q_start, whole=False)
    if kv_len is None:
        kv_len = int(torch.as_tensor(q_start).max()) + q.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    exact = replace(config, selection="exact", score_dtype="float32")
    chosen_BTGN = choose(q, k_cmp, config=config, q_start=q_start, kv_len=kv_len, scale=scale)
    exact_BTGN = choose(q, k_cmp, config=exact, q_start=q_start, kv_len=kv_len, scale=scale)
    recall_BTG = _found(exact_BTGN, chosen_BTGN).double() / (exact_BTGN >= 0).sum(-1)
    near_BGT = _near_ties(q, k_cmp, exact, q_start, kv_len, scale)
    return SelectionReport(
        rows=recall_BTG.numel(),
        mean_recall=float(recall_BTG.mean()),
        min_recall=float(recall_BTG.min()),
        changed_share=float((chosen_BTGN != exact_BTGN).any(-1).double().mean()),
        near_tie_share=float(near_BGT.double().mean()),
    )


def _found(wanted_BTGN: Tensor, chosen_BTGN: Tensor) -> Tensor:
    """How many of a row's wanted blocks are among its chosen ones, [B, T, G]."""
    # One slot at a time: all pairs at once would be N times the memory.
    found = [
        ((chosen_BTGN == wanted[..., None]).any(-1) & (wanted >= 0))
        for wanted in wanted_BTGN.unbind(-1)
    ]
    return torch.stack(found).sum(0)


def _near_ties(
    q: Tensor, k_cmp: Tensor, config: NSAConfig, q_start: int | Tensor, kv_len: int, scale: float
) -> Tensor:
    """True [B, G, T] where the last block taken and the first left out have nearly one score."""
    J, N = BlockGrid.of(config).num_sel(kv_len), config.num_selected_for(kv_len)
    if N >= J:
        return torch.zeros(
            q.shape[0], k_cmp.shape[2], q.shape[1], dtype=torch.bool, device=q.device
        )
    rows = QueryRows(q, query_positions(q_start, q.shape[1], q.device), None)
    near = []
    for _, ranking_BGTJ in rankings(rows, k_cmp, J, config=config, scale=scale):
        best = ranking_BGTJ.sort(dim=-1, descending=True).values
        last, left = best[..., N - 1], best[..., N]
        # A forced block, +inf, is infinitely far from any other; what is not there, -inf, does not
        # compete.
        near.append(((last - left < NEAR_TIE * last) | (last == left)) & (left > -torch.inf))
    return torch.cat(near, 2)
