"""Proof of the chosen blocks: equal to the exact top n where the config promises that, else its
structure and how near it comes.

A hierarchical search and scores below fp32 are options that choose other blocks on purpose. There,
attention is proved over the blocks that were chosen, and the blocks by what each option does
promise.

B batch, T sampled rows, H query heads per kv head, G kv heads, D head dim, C compressed blocks, J
selection blocks, N selected, R regions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nsa import dispatch, functional, oracle
from nsa.blocks import BlockGrid
from nsa.config import NSAConfig
from nsa.routing import SCORE

# sets may differ where the last chosen and the next score are closer than this, relatively
NEAR_TIE = 1e-5
# Largest relative error of rounding to nearest.
HALF_ULP = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# A hierarchical search takes at most two of four neighbours, from at most n // 2 fours.
REGION, PER_REGION = 4, 2
SIGMAS = 3.0  # by which a search must beat a choice that does not look at the scores


@dataclass(frozen=True, slots=True)
class BlocksProof:
    """``wrong_rows``: rows (a query of a kv head) whose blocks nothing explains.

    ``report``: what a run file says about an option.

    ``missed`` and ``missed_by_chance``, of a hierarchical search alone: the share of the exact top
    n's unforced blocks that it leaves out, and the largest share that is still better than chance;
    None where no row's blocks compete.
    """

    wrong_rows: int
    missed: float | None
    missed_by_chance: float | None
    report: dict[str, float]


@dataclass(frozen=True, slots=True)
class Place:
    """Where the queries of a call stand: the first at ``q_start`` of ``kv_len`` tokens, or all of
    them from the first token on (``is_whole_sequence``).
    """

    q_start: int | Tensor
    kv_len: int
    is_whole_sequence: bool


@torch.no_grad()
def chosen(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    config: NSAConfig,
    path: str,
    fa2: str,
    at: Place,
) -> Tensor:
    """The blocks int32 [B, T, G, N] that a call of this path takes: its kernel's where the Route
    has one, else `select_blocks`'.
    """
    (G, DV), kv_len = v_cmp.shape[2:], at.kv_len
    route = functional.route_for(
        q,
        G,
        DV,
        kv_len,
        q_start=at.q_start,
        whole=at.is_whole_sequence,
        path=path,
        fa2=fa2,
        config=config,
        branches=config.branches,
    )
    if not route.has(SCORE):
        return functional.select_blocks(q, k_cmp, config=config, q_start=at.q_start, kv_len=kv_len)
    call: dict[str, Any] = {"q_start": at.q_start, "scale": q.shape[-1] ** -0.5, "documents": None}
    lse = None
    if "cmp" in config.branches:
        _, lse = dispatch.compressed(
            route, q, k_cmp, v_cmp, block=config.cmp_block, stride=config.cmp_stride, **call
        )
    return dispatch.choose(route, q, k_cmp, lse, config=config, kv_len=kv_len, **call)


@torch.no_grad()
def judge(
    q: Tensor, k_cmp: Tensor, blocks: Tensor, *, config: NSAConfig, rows: Tensor, kv_len: int
) -> BlocksProof:
    """Judge ``blocks`` int [B, T, G, N] of queries q [B, T, HQ, D] at positions ``rows`` [T] over
    k_cmp [B, C, G, D], all on the CPU.

    The number of slots is config.num_selected, whatever its adaptive rule says: resolve that
    before.
    """
    reference, _ = oracle.select(q, k_cmp, config=config, kv_len=kv_len, positions=rows[None])
    # Another number of slots is a wrong answer, not a crash.
    width = max(reference.shape[-1], blocks.shape[-1])
    reference, blocks = (
        torch.nn.functional.pad(x.long(), (0, width - x.shape[-1]), value=-1)
        for x in (reference, blocks)
    )
    differs = (blocks != reference).any(-1)
    J = -(-kv_len // config.sel_block)
    if config.selection == "exact" and config.score_dtype == "float32" and not differs.any():
        return BlocksProof(0, None, None, {})
    wrong = is_malformed(blocks, config, rows, J)
    exact, chosen = _members(reference, J), _members(blocks, J)
    if config.selection == "exact" and config.score_dtype == "float32":
        # each that is left out against each that took a place: a tie is no excuse for a third
        wrong |= differs & ~_is_explained(q, k_cmp, exact, chosen, config, rows, J)
        return BlocksProof(int(wrong.sum()), None, None, {})
    shares = (exact & chosen).sum(-1).double() / exact.sum(-1)
    report = {
        "rows": float(differs.numel()),
        "recall": float(shares.mean()),
        "changed_share": float(differs.double().mean()),
    }
    if config.selection == "exact":
        wrong |= differs & ~_is_explained(q, k_cmp, exact, chosen, config, rows, J)
        return BlocksProof(int(wrong.sum()), None, None, report)
    missed, by_chance = _against_chance(exact, chosen, config, rows, J)
    return BlocksProof(int(wrong.sum()), missed, by_chance, report)


def _forced_and_candidates(config: NSAConfig, rows: Tensor, J: int) -> tuple[Tensor, Tensor]:
    """Boolean [1, T, 1, J] each: blocks that every query has, and those that begin at or before
    it.
    """
    j, current = torch.arange(J), (rows // config.sel_block)[None, :, None, None]
    candidate = j <= current
    return ((j < config.num_initial) | (j > current - config.num_local)) & candidate, candidate


def _members(blocks: Tensor, J: int) -> Tensor:
    """Boolean [B, T, G, J]: which blocks are among a row's."""
    return (blocks[..., None] == torch.arange(J)).any(3)


def is_malformed(blocks: Tensor, config: NSAConfig, rows: Tensor, J: int) -> Tensor:
    """Boolean [B, T, G]: not ascending, repeated, padded before the end, out of range, without a
    forced block, or of another number.
    """
    forced, candidate = _forced_and_candidates(config, rows, J)
    real = blocks >= 0
    order = (real[..., 1:] & (~real[..., :-1] | (blocks[..., 1:] <= blocks[..., :-1]))).any(-1)
    chosen = _members(blocks, J)
    outside = (blocks < -1).any(-1) | ((chosen & candidate).sum(-1) != real.sum(-1))
    free = chosen & ~forced
    slots = config.num_selected - forced.sum(-1)
    if config.selection == "exact":
        fewest = torch.minimum(slots, (candidate & ~forced).sum(-1))
        return order | outside | (forced & ~chosen).any(-1) | (free.sum(-1) != fewest)
    searched = config.num_selected // PER_REGION
    taken_R, most_R = _by_region(free), _by_region(candidate & ~forced).clamp(max=PER_REGION)
    crowded = (taken_R > PER_REGION).any(-1) | ((taken_R > 0).sum(-1) > searched)
    # Which regions are searched is not known here: at least as many blocks come out as the poorest
    # of them hold.
    poorest = torch.where(most_R > 0, most_R, PER_REGION + 1).sort(-1).values[..., :searched]
    fewest = torch.minimum(slots, torch.where(poorest > PER_REGION, 0, poorest).sum(-1))
    return (
        order
        | outside
        | (forced & ~chosen).any(-1)
        | crowded
        | (free.sum(-1) > slots)
        | (free.sum(-1) < fewest)
    )


def num_malformed(blocks: Tensor, config: NSAConfig, rows: Tensor, tokens: int) -> int:
    """Rows of ``blocks`` [B, T, G, N] at positions ``rows`` without every forced block, every slot
    filled that can be, or the order and the range that are promised.
    """
    slots = config.num_selected_for(tokens)
    if blocks.shape[-1] != slots:
        return blocks[..., 0].numel()
    exact = replace(config, num_selected=slots, adaptive_num_selected=False, selection="exact")
    return int(is_malformed(blocks.long(), exact, rows, BlockGrid.of(exact).num_sel(tokens)).sum())


def _by_region(members: Tensor) -> Tensor:
    """How many of each four neighbours: [..., J] -> [..., R]."""
    taken: Tensor = (
        torch.nn.functional.pad(members, (0, -members.shape[-1] % REGION))
        .unflatten(-1, (-1, REGION))
        .sum(-1)
    )
    return taken


def _is_explained(
    q: Tensor, k_cmp: Tensor, exact: Tensor, chosen: Tensor, config: NSAConfig, rows: Tensor, J: int
) -> Tensor:
    """Boolean [B, T, G]: whether rounding q and k_cmp to config.score_dtype can have made the row's
    blocks of the exact ones.

    Both factors of a product are off by at most u relatively, so a logit by at most delta = scale *
    sum |q k| * (2u + u^2), a softmax over such logits by e^(2 delta), and the ratio of two blocks'
    scores by e^(4 delta): a block may replace another whose exact score is larger by no more than
    that.
    """
    scores = oracle.block_scores(q, k_cmp, rows[None], config, J, None).permute(0, 2, 1, 3)
    lost = scores.masked_fill(~(exact & ~chosen), 0.0).amax(-1)
    gained = scores.masked_fill(~(chosen & ~exact), torch.inf).amin(-1)
    explained: Tensor = lost <= gained * closeness(q, k_cmp, config, rows)
    return explained


def closeness(q: Tensor, k_cmp: Tensor, config: NSAConfig, rows: Tensor) -> Tensor:
    """[B, T, G]: how many times a score may exceed another and be taken for the smaller, where q
    and k_cmp are rounded to config.score_dtype; derived in `_is_explained`.
    """
    u = (
        0.0
        if str(q.dtype).removeprefix("torch.") == config.score_dtype
        else HALF_ULP[config.score_dtype]
    )
    q_BTGHD = q.double().abs().unflatten(2, (k_cmp.shape[2], -1))
    size_BTGHC = (
        torch.einsum("btghd,bcgd->btghc", q_BTGHD, k_cmp.double().abs()) * q.shape[-1] ** -0.5
    )
    visible_TC = (
        torch.arange(k_cmp.shape[1]) * config.cmp_stride + config.cmp_block <= rows[:, None] + 1
    )
    size_BTG = (
        torch.where(visible_TC[:, None, None], size_BTGHC, 0.0).amax((-1, -2))
        if k_cmp.shape[1]
        else size_BTGHC.new_zeros(*q.shape[:2], k_cmp.shape[2])
    )
    times: Tensor = torch.exp(4 * size_BTG * (2 * u + u * u)) * (1 + NEAR_TIE)
    return times


def _against_chance(
    exact: Tensor, chosen: Tensor, config: NSAConfig, rows: Tensor, J: int
) -> tuple[float | None, float | None]:
    """(share of the exact unforced blocks that are missed, the most that a search may miss), over
    the rows where blocks compete.

    Of k blocks drawn without a look from f, of which s are exact, k s / f are hits, with the
    hypergeometric variance.
    """
    forced, candidate = _forced_and_candidates(config, rows, J)
    f = (candidate & ~forced).sum(-1).expand(exact.shape[:3])
    s, k, hits = ((members & ~forced).sum(-1) for members in (exact, chosen, exact & chosen))
    competes = f > s
    if not bool(competes.any()):
        return None, None
    f, s, k, hits = (x[competes].double() for x in (f, s, k, hits))
    variance = k * (s / f) * (1 - s / f) * (f - k) / (f - 1).clamp(min=1) / s.clamp(min=1) ** 2
    by_chance = float((k / f).mean()) + SIGMAS * float(variance.sum().sqrt()) / len(f)
    return 1 - float((hits / s.clamp(min=1)).mean()), max(0.0, 1 - by_chance)
