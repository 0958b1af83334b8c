"""The public functions. Layout is token-major: q [B, T, HQ, DK], k [B, S, HKV, DK], v [B, S, HKV, DV].

Query heads of one kv head are adjacent. ``q_start`` is the position of the first query: an int, or int64 [B] where rows
differ. ``scale`` defaults to DK ** -0.5. Outputs keep the inputs' dtype. Errors are ValueErrors (RouteError among them).
"""

from __future__ import annotations

import torch
from torch import Tensor

from nsa import capability, checks, dispatch, selection, settings
from nsa.compression import compress
from nsa.config import BRANCHES, NSAConfig
from nsa.ops import combine
from nsa.ops.compressed import log_sum_exp
from nsa.rope import angles, rotate
from nsa.routing import Problem, Route, route

KV = tuple[Tensor, Tensor]


def route_for(
    q: Tensor, num_kv_heads: int, v_head_dim: int, num_keys: int, *, branches: tuple[str, ...], q_start: int | Tensor, path: str, fa2: str
) -> Route:
    """The Route of a call with these tensors: arguments, environment and device joined."""
    problem = Problem(
        batch=q.shape[0],
        q_tokens=q.shape[1],
        k_tokens=num_keys,
        num_heads=q.shape[2],
        num_kv_heads=num_kv_heads,
        head_dim=q.shape[3],
        v_head_dim=v_head_dim,
        dtype=str(q.dtype).removeprefix("torch."),
        branches=branches,
        ragged=isinstance(q_start, Tensor),
    )
    return route(settings.current().request(path, fa2), problem, capability.probe(str(q.device)))


def compressed_attention(
    q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *, block: int, stride: int, q_start: int | Tensor = 0, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over compressed blocks k_cmp [B, C, HKV, DK], v_cmp [B, C, HKV, DV]; block i ends at i * stride + block - 1.

    Returns (o [B, T, HQ, DV], lse [B, T, HQ]). lse is fp32 (fp64 for fp64), natural log, without gradient. A query that
    sees no block gets exactly 0 and -inf.
    """
    checks.qkv(q, k_cmp, v_cmp, q_start=q_start, whole=False)
    checks.sizes(block=block, stride=stride)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    chosen = route_for(q, k_cmp.shape[2], v_cmp.shape[3], k_cmp.shape[1], branches=("cmp",), q_start=q_start, path="auto", fa2="auto")
    o = dispatch.compressed(chosen, q, k_cmp, v_cmp, block=block, stride=stride, q_start=q_start, scale=scale)
    return o, log_sum_exp(q, k_cmp, block=block, stride=stride, q_start=q_start, scale=scale)


def select_blocks(
    q: Tensor, k_cmp: Tensor, *, config: NSAConfig, q_start: int | Tensor = 0, kv_len: int | None = None, scale: float | None = None
) -> Tensor:
    """Choose config.num_selected blocks a query and kv head (Eq. 8 to 12): int32 [B, T, HKV, N], ascending, -1 padded.

    ``kv_len`` is the number of keys that exist, by default q_start + T. Forced blocks take their slots first; the rest
    go by score, equal scores to the lower index. Carries no gradient; scores are fp32 or wider.
    """
    checks.qkv(q, k_cmp, k_cmp, q_start=q_start, whole=False)
    if kv_len is None:
        if isinstance(q_start, Tensor):
            raise ValueError("kv_len is not given and q_start is a tensor; wanted kv_len, since reading it would sync; pass S")
        kv_len = q_start + q.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return selection.choose(q, k_cmp, config=config, q_start=q_start, kv_len=kv_len, scale=scale)


def selected_attention(
    q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, *, sel_block: int, q_start: int | Tensor = 0, scale: float | None = None,
    path: str = "auto", fa2: str = "auto",
) -> Tensor:  # fmt: skip
    """Attention over the tokens of ``blocks`` int32 [B, T, HKV, N] at or before the query; o [B, T, HQ, DV].

    ``blocks`` must ascend, be unique, and be padded with -1 at the end. A row without a key gets exactly 0.
    """
    checks.qkv(q, k, v, q_start=q_start)
    checks.blocks(blocks, q, k)
    checks.sizes(sel_block=sel_block)
    _assert_blocks(blocks, k.shape[1], sel_block)
    k, v = _up_to_last_query((k, v), q, q_start)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    chosen = route_for(q, k.shape[2], v.shape[3], k.shape[1], branches=("sel",), q_start=q_start, path=path, fa2=fa2)
    return dispatch.selected(chosen, q, k, v, blocks, sel_block=sel_block, q_start=q_start, scale=scale)


def sliding_attention(
    q: Tensor, k: Tensor, v: Tensor, *, window: int, q_start: int | Tensor = 0, scale: float | None = None, fa2: str = "auto"
) -> Tensor:
    """Attention over keys t - window + 1 .. t, exactly ``window`` tokens; o [B, T, HQ, DV]."""
    checks.qkv(q, k, v, q_start=q_start)
    if window < 1:
        raise ValueError(f"window={window}; wanted the number of keys that a query sees, itself included, >= 1; 512 is the paper's")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    chosen = route_for(q, k.shape[2], v.shape[3], k.shape[1], branches=("win",), q_start=q_start, path="auto", fa2=fa2)
    return dispatch.window(chosen, q, k, v, size=window, q_start=q_start, scale=scale)


def nsa_attention(
    q: Tensor, kv_cmp: KV, kv_sel: KV, kv_win: KV, gates: Tensor, *, config: NSAConfig, q_start: int | Tensor = 0,
    scale: float | None = None, path: str = "auto", fa2: str = "auto",
) -> Tensor:  # fmt: skip
    """Native sparse attention (Eq. 5): the gated sum of the compressed, selected and sliding branches; o [B, T, HQ, DV].

    Each kv is (k, v) of tokens, k rotated already; only with config.cmp_rope='after' the compressed branch's k comes
    unrotated and is rotated here, block i at position i * cmp_stride. ``gates`` [B, T, HQ, 3] in the order cmp, sel, win,
    activated already. A branch outside config.branches is not computed.
    """
    for k, v in (kv_cmp, kv_sel, kv_win):
        checks.qkv(q, k, v, q_start=q_start)
    checks.same_kv({"cmp": kv_cmp, "sel": kv_sel, "win": kv_win})
    kv_cmp, kv_sel, kv_win = (_up_to_last_query(kv, q, q_start) for kv in (kv_cmp, kv_sel, kv_win))
    if gates.shape != (*q.shape[:3], len(BRANCHES)):
        raise ValueError(f"gates {tuple(gates.shape)}; wanted {(*q.shape[:3], len(BRANCHES))}: one for each of {BRANCHES}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    S, G, DV = kv_sel[1].shape[1:]
    chosen = route_for(q, G, DV, S, branches=config.branches, q_start=q_start, path=path, fa2=fa2)

    outputs = []
    if "cmp" in config.branches or "sel" in config.branches:
        k_cmp, v_cmp = compress(kv_cmp[0], config=config), compress(kv_cmp[1], config=config)
        if not config.rotates_before_compression:
            k_cmp = _rotate_blocks(k_cmp, config)
    if "cmp" in config.branches:
        outputs.append(
            dispatch.compressed(chosen, q, k_cmp, v_cmp, block=config.cmp_block, stride=config.cmp_stride, q_start=q_start, scale=scale)
        )
    if "sel" in config.branches:
        blocks = selection.choose(q, k_cmp, config=config, q_start=q_start, kv_len=S, scale=scale)
        _assert_blocks(blocks, S, config.sel_block)
        outputs.append(dispatch.selected(chosen, q, *kv_sel, blocks, sel_block=config.sel_block, q_start=q_start, scale=scale))
    if "win" in config.branches:
        outputs.append(dispatch.window(chosen, q, *kv_win, size=config.window, q_start=q_start, scale=scale))
    return combine.gated_sum(gates, outputs, [i for i, b in enumerate(BRANCHES) if b in config.branches])


def _up_to_last_query(kv: KV, q: Tensor, q_start: int | Tensor) -> KV:
    """Without the keys that no query can see (a cache's unused room), whose contents may be anything."""
    if isinstance(q_start, Tensor):
        return kv
    end = q_start + q.shape[1]
    return (kv[0][:, :end], kv[1][:, :end]) if kv[0].shape[1] > end else kv


def _assert_blocks(blocks: Tensor, num_keys: int, sel_block: int) -> None:
    if settings.current().strict_asserts.value:
        checks.block_contents(blocks, num_keys, sel_block)


def _rotate_blocks(k_cmp: Tensor, config: NSAConfig) -> Tensor:
    first_token = torch.arange(k_cmp.shape[1], device=k_cmp.device) * config.cmp_stride
    theta = angles(first_token[None], k_cmp.shape[-1], base=config.rope_base, scale=config.rope_scale)
    return rotate(k_cmp, theta, kind=config.rope)
