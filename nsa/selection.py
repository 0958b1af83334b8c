"""Which blocks each query attends to (arXiv 2502.11089, Eq. 8 to 12).

Runs under no_grad, in fp32 or wider.

B batch, T query tokens, G kv heads, H query heads per kv head, C compressed blocks, J selection
blocks, N selected, R regions of four selection blocks. A ranking holds a block's score, +inf where
it is forced and -inf where it may not be chosen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nsa.blocks import BlockGrid
from nsa.config import NSAConfig
from nsa.ops.explicit import capped
from nsa.ops.positions import is_symbolic, query_positions
from nsa.ops.precision import without_autocast

SCORE_CHUNK_BYTES = 1 << 28  # logits of one chunk of queries
REGION_BLOCKS = 4  # of hierarchical selection
BLOCKS_PER_REGION = 2  # that a chosen region may give
DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}  # of the mantissa of an fp32 value


@dataclass(frozen=True, slots=True)
class QueryRows:
    """Queries [B, T, HQ, D], their positions [B or 1, T], and where their documents begin [B or 1,
    T] (None: at 0).
    """

    q: Tensor
    position_BT: Tensor
    first_BT: Tensor | None

    def part(self, rows: slice) -> QueryRows:
        first_BT = None if self.first_BT is None else self.first_BT[:, rows]
        return QueryRows(self.q[:, rows], self.position_BT[:, rows], first_BT)

    def current_block(self, sel_block: int) -> Tensor:
        """The block of each query, counted from its document's first one."""
        position_BT = (
            self.position_BT if self.first_BT is None else self.position_BT - self.first_BT
        )
        return position_BT // sel_block

    def first_block(self, sel_block: int) -> Tensor | None:
        return None if self.first_BT is None else self.first_BT // sel_block


@torch.no_grad()
def choose(
    q: Tensor,
    k_cmp: Tensor,
    *,
    config: NSAConfig,
    q_start: int | Tensor,
    kv_len: int,
    scale: float,
    first: Tensor | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Blocks int32 [B, T, G, N], ascending, unique, -1 padded at the end.

    See ``nsa.select_blocks``.

    N = config.num_selected_for(kv_len): num_selected, or fewer by the adaptive rule. A call has one
    N: the number of slots is a shape, so it depends on kv_len (for a packed batch, on all its
    rows), never on a row's own length.

    ``first`` int64 [B or 1, T] is the position of the first token of each query's document in a
    packed batch, always a multiple of sel_block; None means 0. A compressed block is visible if it
    begins at or after ``first`` and ends at or before the query; initial blocks are the document's
    own first ones; block ids stay global.

    ``sink`` [HQ]: the compressed branch's, where config.sinks.

    Forced blocks are ranked +inf within the same ranking as the others, so no block is chosen
    twice. A score that is not a number (a NaN in q or k_cmp, a logit that overflows) counts as 0.
    config.score_dtype: see `group_probabilities`; config.selection: see `within_regions`. No
    host sync.
    """
    # one block and several would be graphs of their own; beyond the query's none is chosen
    most = kv_len + 2 * config.sel_block if is_symbolic(kv_len) else kv_len
    J, N = BlockGrid.of(config).num_sel(most), config.num_selected_for(kv_len)
    rows = QueryRows(q, query_positions(q_start, q.shape[1], q.device), first)
    # Every candidate fits, and no score can change the set. A search by regions may reach fewer,
    # however few blocks there are: were it left out here, the same query would get other blocks in
    # a longer call. Compiled, the lengths at which all fit would be a graph of their own.
    if not torch.compiler.is_compiling() and N >= J and config.selection == "exact":
        return _all_candidates(rows, k_cmp.shape[2], J, N, config.sel_block)
    chunks = []
    for part, ranking_BGTJ in rankings(rows, k_cmp, J, config=config, scale=scale, sink=sink):
        if config.selection == "hierarchical":
            ranking_BGTJ = within_regions(ranking_BGTJ, N)
        chunks.append(_best(ranking_BGTJ, N, part.first_block(config.sel_block)))
    return torch.cat(chunks, 1)


def rankings(
    rows: QueryRows,
    k_cmp: Tensor,
    J: int,
    *,
    config: NSAConfig,
    scale: float,
    sink: Tensor | None = None,
) -> Iterator[tuple[QueryRows, Tensor]]:
    """Chunks of the queries with their rankings [B, G, T, J]; j counts from the first block of the
    query's document.
    """
    for chunk in _query_slices(rows.q, k_cmp):
        part = rows.part(chunk)
        with without_autocast(part.q.device):  # which would score in bf16
            scores_BGTJ = block_scores(
                group_probabilities(part, k_cmp, config, scale, sink), BlockGrid.of(config), J
            )
        # A NaN would be sorted before the forced blocks, and take their slots.
        yield part, _ranking(scores_BGTJ.nan_to_num(0.0), part, config)


def block_scores(p: Tensor, grid: BlockGrid, num_sel: int) -> Tensor:
    """Eq. 9: p [..., C] over compressed blocks -> scores [..., J], each weighted by the sub-chunks
    that it shares.
    """
    stride = grid.sel_block // grid.cmp_stride
    first, last = grid.overlap[0][0], grid.overlap[-1][0]
    # rows of ``stride`` each, so that every slice is a column of J rows, whatever the length
    rows = num_sel + (last - first) // stride
    padded = torch.nn.functional.pad(p, (-first, rows * stride - p.shape[-1] + first))
    by_row = padded.unfold(-1, stride, stride)
    scores = p.new_zeros(*p.shape[:-1], num_sel)
    for offset, weight in grid.overlap:
        row, column = divmod(offset - first, stride)
        scores += weight * by_row[..., row : row + num_sel, column]
    return scores


def group_probabilities(
    rows: QueryRows,
    k_cmp: Tensor,
    config: NSAConfig,
    scale: float,
    sink_Q: Tensor | None = None,
) -> Tensor:
    """Eq. 8 and 10: softmax over the visible blocks, summed over the heads of a group. [B, G, T,
    C], fp32 or wider.

    config.score_dtype below float32 rounds q and k_cmp to it, saturating at its range; products and
    sums of the logits, the softmax and all that follows stay fp32. The rounded values are
    multiplied in fp32 on every device: a product of two of them is exact there, so this is what a
    matmul in the narrow dtype with an fp32 result computes. float32 rounds nothing: bf16 inputs are
    scored as they came, and fp64 ones in fp64. So they are where torch.compile leaves a rounding
    to bf16 or fp16 out. config.softcap and a sink change the logits as in the compressed branch;
    the sink's own probability is no block's.
    """
    q, wide = rows.q, torch.promote_types(rows.q.dtype, torch.float32)
    C, G = k_cmp.shape[1:3]
    q_BTQD, k_BCGD = (_rounded(x, config.score_dtype).to(wide) for x in (q, k_cmp))
    q_BGHTD, k_BGDC = (
        q_BTQD.unflatten(2, (G, -1)).permute(0, 2, 3, 1, 4),
        k_BCGD.permute(0, 2, 3, 1),
    )
    logits = capped(torch.matmul(q_BGHTD, k_BGDC[:, :, None]) * scale, config.softcap)
    first_token_C = torch.arange(C, device=q.device) * config.cmp_stride
    hidden_BTC = first_token_C + (config.cmp_block - 1) > rows.position_BT[..., None]
    if rows.first_BT is not None:
        hidden_BTC = hidden_BTC | (first_token_C < rows.first_BT[..., None])
    logits = logits.masked_fill_(hidden_BTC[:, None, None], -torch.inf)
    if sink_Q is not None:
        sink = sink_Q.to(wide).view(1, G, -1, 1, 1).expand(*logits.shape[:-1], 1)
        logits = torch.cat([logits, sink], -1)
    p = logits.softmax(-1)[..., :C]
    # A row that sees no block has no probabilities: its scores are 0, and its candidates are all
    # forced or few.
    return p.sum(2).masked_fill(hidden_BTC.all(-1)[:, None, :, None], 0.0)


def within_regions(ranking_BGTJ: Tensor, N: int) -> Tensor:
    """Hierarchical selection: the ranking with -inf for every block that the search by regions does
    not reach.

    Region r is blocks 4r .. 4r + 3, counted from the document's first block. Forced blocks have
    their slots already, so they take no part: they neither raise their region's score nor use up
    one of its two places, and stay +inf. A region's score is the best score of its other
    candidates. The N // 2 best regions are searched, equal ones from the lower index; of each, the
    two best candidates stay, equal ones from the lower index. The free slots then go to what stays,
    in order of score; where less stays than there are free slots (few regions, or candidates mostly
    forced), slots are left empty.
    """
    J = ranking_BGTJ.shape[-1]
    forced_BGTJ = ranking_BGTJ == torch.inf
    free_BGTJ = ranking_BGTJ.masked_fill(forced_BGTJ, -torch.inf)
    room = -(-J // REGION_BLOCKS) * REGION_BLOCKS - J
    free_BGTR4 = torch.nn.functional.pad(free_BGTJ, (0, room), value=-torch.inf).unfold(
        -1, REGION_BLOCKS, REGION_BLOCKS
    )
    region_BGTR = _is_among_best(free_BGTR4.amax(-1), N // BLOCKS_PER_REGION)
    reached_BGTR4 = _is_among_best(free_BGTR4, BLOCKS_PER_REGION) & region_BGTR[..., None]
    j = torch.arange(J, device=ranking_BGTJ.device)
    reached_BGTJ = reached_BGTR4[..., j // REGION_BLOCKS, j % REGION_BLOCKS]
    return ranking_BGTJ.masked_fill(~(reached_BGTJ | forced_BGTJ), -torch.inf)


def _is_among_best(values: Tensor, count: int) -> Tensor:
    """True for the ``count`` largest of the last dimension, equal ones from the lower index."""
    order = values.argsort(dim=-1, descending=True, stable=True)
    place = torch.arange(values.shape[-1], device=values.device).expand_as(order)
    return torch.zeros_like(order).scatter_(-1, order, place) < count


def _query_slices(q: Tensor, k_cmp: Tensor) -> list[slice]:
    B, T, num_heads, _ = q.shape
    row_bytes = max(1, B * num_heads * k_cmp.shape[1] * 4)
    rows = max(1, SCORE_CHUNK_BYTES // row_bytes)
    if rows >= T:  # a loop over range would bind a compiled region to this T
        return [slice(0, T)]
    return [slice(start, start + rows) for start in range(0, T, rows)]


def _rounded(x: Tensor, score_dtype: str) -> Tensor:
    """x in a dtype narrower than float32, its values beyond that dtype's range at the range's end;
    float32: x itself. fp32 or wider.
    """
    wide, dtype = _widened(x), getattr(torch, score_dtype)
    if score_dtype == "float32" or x.dtype == dtype:
        return wide
    limit = torch.finfo(dtype).max
    return _widened(wide.clamp(-limit, limit).to(dtype))  # inf would turn a row into NaN


def _widened(x: Tensor) -> Tensor:
    """x in fp32 or wider, each value as x's dtype holds it.

    Inductor fuses the kernel that makes x with this one and skips the rounding between them:
    compressed keys of bf16 then gave 20 of 8,192 rows other blocks than those keys have. What is
    rounded already stays as it is here. Below fp16's normal range (2^-14) its rounding is still
    left out.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if x.dtype not in DROPPED_BITS or not torch.compiler.is_compiling():
        return wide
    dropped, bits = DROPPED_BITS[x.dtype], wide.view(torch.int32)
    half = (1 << (dropped - 1)) - 1 + ((bits >> dropped) & 1)  # to nearest, ties to even
    rounded = ((bits + half) & -(1 << dropped)).view(torch.float32)
    return torch.where(wide.isnan(), wide, rounded)  # a NaN of all ones would become -0


def _ranking(scores_BGTJ: Tensor, rows: QueryRows, config: NSAConfig) -> Tensor:
    J = scores_BGTJ.shape[-1]
    j = torch.arange(J, device=scores_BGTJ.device)
    current_BT1 = rows.current_block(config.sel_block)[..., None]
    forced_BTJ = ((j < config.num_initial) | (j > current_BT1 - config.num_local)) & (
        j <= current_BT1
    )
    absent_BTJ = j > current_BT1
    first_block_BT = rows.first_block(config.sel_block)
    if first_block_BT is not None:
        global_BTJ = j + first_block_BT[..., None]
        absent_BTJ = absent_BTJ | (global_BTJ >= J)
        index_BTJ = global_BTJ.clamp(max=J - 1)
        scores_BGTJ = scores_BGTJ.gather(-1, index_BTJ[:, None].expand(scores_BGTJ.shape))
    # +inf and -inf are outside the range of scores, so no real score can tie with a forced or an
    # absent block.
    return scores_BGTJ.masked_fill(forced_BTJ[:, None], torch.inf).masked_fill(
        absent_BTJ[:, None], -torch.inf
    )


def _best(ranking_BGTJ: Tensor, N: int, first_block_BT: Tensor | None) -> Tensor:
    """The N best of each ranking, [B, T, G, N] int32, as global ids; -inf is not chosen."""
    J = ranking_BGTJ.shape[-1]
    # enough for any J, so that no length needs a graph of its own
    absent = N if torch.compiler.is_compiling() else max(0, N - J)
    ranking_BGTJ = torch.nn.functional.pad(ranking_BGTJ, (0, absent), value=-torch.inf)
    # A stable sort keeps equal scores in order of their index, which topk does not promise.
    order = ranking_BGTJ.sort(dim=-1, descending=True, stable=True)
    chosen = (
        torch.where(order.values[..., :N] == -torch.inf, J, order.indices[..., :N]).sort(-1).values
    )
    blocks = chosen if first_block_BT is None else chosen + first_block_BT[:, None, :, None]
    return blocks.masked_fill(chosen == J, -1).transpose(1, 2).int()


def _all_candidates(rows: QueryRows, G: int, J: int, N: int, sel_block: int) -> Tensor:
    B, T = rows.q.shape[:2]
    j = torch.arange(N, device=rows.q.device)
    first_block_BT = rows.first_block(sel_block)
    blocks_BTN = j if first_block_BT is None else j + first_block_BT[..., None]
    absent_BTN = (j > rows.current_block(sel_block)[..., None]) | (blocks_BTN >= J)
    blocks = blocks_BTN.expand(absent_BTN.shape).masked_fill(absent_BTN, -1).int()
    return blocks[:, :, None].expand(B, T, G, -1).contiguous()
