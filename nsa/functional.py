"""The public functions.

Layout is token-major: q [B, T, HQ, DK], k [B, S, HKV, DK], v [B, S, HKV, DV].

Query heads of one kv head are adjacent. ``q_start`` is the position of the first query: an int, or
int64 [B] where rows differ. ``scale`` defaults to DK ** -0.5. Outputs keep the inputs' dtype.
Errors are ValueErrors (RouteError among them).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.functional import pad

from nsa import capability, checked, checks, dispatch, selection, settings
from nsa.branches import Call, attend_view, attend_view_with_lse, nothing
from nsa.compression import checked_params, compress
from nsa.config import BRANCHES, NSAConfig
from nsa.decode import KV, View
from nsa.documents import Documents, Packing
from nsa.ops.derivatives import has_transforms, once
from nsa.ops.interval.compressed import log_sum_exp
from nsa.ops.positions import is_symbolic
from nsa.remembered import ByShape
from nsa.rope import angles, rotate
from nsa.routing import (
    SCORE,
    Capability,
    Problem,
    Request,
    Route,
    extras_of,
    kept_tokens_of,
    route,
    scores_of,
)

F = TypeVar("F", bound=Callable[..., Any])
_ROUTES: ByShape[Route] = ByShape()  # of `route_for`
PhiParams = tuple[Mapping[str, Tensor] | None, Mapping[str, Tensor] | None] | None  # of K and of V


def route_for(
    q: Tensor,
    num_kv_heads: int,
    v_head_dim: int,
    num_keys: int,
    *,
    branches: tuple[str, ...],
    q_start: int | Tensor,
    path: str,
    fa2: str,
    config: NSAConfig | None = None,
    whole: bool = False,
    sel_block: int | None = None,
    extras: tuple[str, ...] = (),
) -> Route:
    """The Route of a call with these tensors: arguments, environment and device joined.

    ``whole`` and ``extras`` as in Problem.

    Inside torch.compile no branch becomes full causal attention because of its length: a Route that
    depended on the length would recompile there.
    """
    compiling = torch.compiler.is_compiling()
    key: tuple[object, ...] | None = None
    here: tuple[object, ...] = ()
    if not compiling and type(q) in (Tensor, Parameter) and type(path) is type(fa2) is str:
        ragged = isinstance(q_start, Tensor)
        key = (q.shape, q.dtype, num_kv_heads, v_head_dim, num_keys, branches, ragged, path, fa2)
        key += (whole, sel_block, extras)
        here = (config, settings.current(), capability_of(str(q.device)))
        if (known := _ROUTES.get(key, *here)) is not None:
            return known
    length_rules = None if compiling else config
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
        select_all_tokens=_select_all_tokens(length_rules, num_keys),
        window=None if length_rules is None else length_rules.window,
        whole=whole and not compiling,
        scores=None if config is None else scores_of(config),
        sel_block=sel_block if config is None else config.sel_block,
        extras=extras,
        kept_tokens=None if config is None else kept_tokens_of(config),
        cmp_stride=None if config is None else config.cmp_stride,
        phi=None if config is None else config.phi,
    )
    # the cache of `route` is opaque to the compiler, and so is reading the environment and the
    # machine
    if compiling:
        return route.__wrapped__(
            _settings_of_process().request(path, fa2), problem, capability_of(str(q.device))
        )
    decision = settings.decide(problem, capability_of(str(q.device)), path=path, fa2=fa2)
    if key is not None:
        _ROUTES.put(decision, key, *here)
    return decision


def _select_all_tokens(config: NSAConfig | None, num_keys: int) -> int | None:
    if config is None or config.selection != "exact":
        return None
    return config.num_selected_for(num_keys) * config.sel_block


def _is_constant_where_compiled(function: F) -> F:
    """What `torch.compiler.assume_constant_result` does, without importing torch._dynamo: a second
    of every start.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_is_constant_where_compiled
def _settings_of_process() -> settings.Settings:
    return settings.current()


@_is_constant_where_compiled
def capability_of(device: str) -> Capability:
    """What the device has, as a constant of a compiled region."""
    capability.warn_of_untried_versions()
    return capability.probe(device)


def compressed_attention(
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    block: int,
    stride: int,
    q_start: int | Tensor = 0,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention (Eq. 2) over the compressed keys of Eq. 7: (o [B, T, HQ, DV], lse [B, T, HQ]).

    ``k_cmp`` [B, C, HKV, DK] and ``v_cmp`` [B, C, HKV, DV], in the dtype of q; block i ends at
    token i * stride + block - 1, and is seen from there on. lse is fp32 (fp64 for fp64), natural
    log, without gradient. A query that sees no block gets exactly 0 and -inf. ValueError for
    tensors that disagree in shape, dtype or device, and unless ``stride`` divides ``block``;
    RouteError where the environment asks FA-2 of this branch.
    """
    checks.scale(scale)
    checks.qkv(q, k_cmp, v_cmp, q_start=q_start, whole=False)
    checks.compressed_grid(block, stride)
    if q.shape[0] == 0:
        wide = torch.promote_types(q.dtype, torch.float32)
        return nothing(q, k_cmp, v_cmp, dim=v_cmp.shape[3]), q.new_empty(q.shape[:3], dtype=wide)
    q, scale = _with_scale(q, scale)
    q, k_cmp, v_cmp = once(q, k_cmp, v_cmp)
    decision = route_for(
        q,
        k_cmp.shape[2],
        v_cmp.shape[3],
        k_cmp.shape[1],
        branches=("cmp",),
        q_start=q_start,
        path="auto",
        fa2="auto",
    )
    o, lse_base_2 = dispatch.compressed(
        decision, q, k_cmp, v_cmp, block=block, stride=stride, q_start=q_start, scale=scale
    )
    if lse_base_2 is not None:
        return o, lse_base_2 * math.log(2)
    return o, log_sum_exp(q, k_cmp, block=block, stride=stride, q_start=q_start, scale=scale)


def select_blocks(
    q: Tensor,
    k_cmp: Tensor,
    *,
    config: NSAConfig,
    q_start: int | Tensor = 0,
    kv_len: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Choose N = config.num_selected_for(kv_len) blocks a query and kv head (Eq. 8 to 12): int32
    [B, T, HKV, N], ascending, -1 padded.

    ``kv_len`` is the number of keys that exist, by default q_start + T. Forced blocks take their
    slots first, whatever the scores are; the rest are ranked by score, equal scores by the lower
    index, and a score that is NaN counts as 0. Carries no gradient;
    scores are fp32 or wider, unless config.score_dtype is narrower. ``q`` [B, T, HQ, DK] and
    ``k_cmp`` [B, C, HKV, DK], rotated both. ``sinks`` as in `nsa_attention`. ValueError for tensors
    that disagree in shape, dtype or device, and for a ``q_start`` tensor without ``kv_len``.
    """
    checks.config(config)
    checks.scale(scale)
    checks.qkv(q, k_cmp, k_cmp, q_start=q_start, whole=False)
    checks.sinks(sinks, q, config, BRANCHES)
    if kv_len is None:
        if isinstance(q_start, Tensor):
            raise ValueError(
                "kv_len is not given and q_start is a tensor; wanted kv_len, since reading it would"
                " sync; pass S"
            )
        kv_len = q_start + q.shape[1]
    checks.keys(kv_len, q, q_start=q_start)
    q, scale = _with_scale(q, scale)
    G, D = k_cmp.shape[2:]
    if q.shape[0] == 0:
        N = config.num_selected_for(kv_len)
        return torch.empty(0, q.shape[1], G, N, dtype=torch.int32, device=q.device)
    decision = route_for(
        q, G, D, kv_len, branches=("sel",), q_start=q_start, path="auto", fa2="auto", config=config
    )
    if decision.has(SCORE):
        return dispatch.choose(
            decision,
            q,
            k_cmp,
            None,
            config=config,
            q_start=q_start,
            kv_len=kv_len,
            scale=scale,
            documents=None,
        )
    return selection.choose(
        q,
        k_cmp,
        config=config,
        q_start=q_start,
        kv_len=kv_len,
        scale=scale,
        sink=None if sinks is None else sinks[:, BRANCHES.index("cmp")],
    )


def selected_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    sel_block: int,
    q_start: int | Tensor = 0,
    scale: float | None = None,
    path: str = "auto",
    fa2: str = "auto",
) -> Tensor:
    """Attention (Eq. 2) over the tokens of the chosen blocks (Eq. 12) at or before the query; o [B,
    T, HQ, DV].

    ``blocks`` int32 [B, T, HKV, N] must ascend, be unique, begin at or before their query, and be
    padded with -1 at the end. These contents are checked only in strict mode
    (NSA_STRICT_ASSERTS=1): reading them would make the host wait. Otherwise a block beyond the
    query holds no key for it, and the result of rows that break the other rules depends on the
    path. Block j is tokens [j * sel_block, (j + 1) * sel_block). A row without a key gets exactly
    0. ValueError for tensors that disagree in shape, dtype or device; RouteError for a ``path`` or
    ``fa2`` that nothing serves.
    """
    checks.scale(scale)
    checks.qkv(q, k, v, q_start=q_start)
    checks.blocks(blocks, q, k)
    checks.sizes(sel_block=sel_block)
    if q.shape[0] == 0:
        Request(path, fa2)
        return nothing(q, k, v, dim=v.shape[3])
    if checks.is_strict():
        checks.block_contents(blocks, k.shape[1], sel_block, q_start)
    q, k, v = once(q, *_up_to_last_query((k, v), q, q_start))
    q, scale = _with_scale(q, scale)
    decision = route_for(
        q,
        k.shape[2],
        v.shape[3],
        k.shape[1],
        branches=("sel",),
        q_start=q_start,
        path=path,
        fa2=fa2,
        sel_block=sel_block,
    )
    return dispatch.selected(
        decision, q, k, v, blocks, sel_block=sel_block, q_start=q_start, scale=scale
    )[0]


def sliding_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    window: int,
    q_start: int | Tensor = 0,
    scale: float | None = None,
    fa2: str = "auto",
) -> Tensor:
    """Attention (Eq. 2) over keys t - window + 1 .. t, exactly ``window`` tokens (section 3.3.3); o
    [B, T, HQ, DV] in q's dtype.

    ValueError for tensors that disagree in shape, dtype or device, and for a ``window`` that is no
    whole number >= 1; RouteError for an ``fa2`` that nothing serves.
    """
    checks.scale(scale)
    checks.qkv(q, k, v, q_start=q_start)
    checks.sizes(window=window)
    if q.shape[0] == 0:
        Request("auto", fa2)
        return nothing(q, k, v, dim=v.shape[3])
    q, scale = _with_scale(q, scale)
    q, k, v = once(q, k, v)
    decision = route_for(
        q,
        k.shape[2],
        v.shape[3],
        k.shape[1],
        branches=("win",),
        q_start=q_start,
        path="auto",
        fa2=fa2,
    )
    return dispatch.window(decision, q, k, v, size=window, q_start=q_start, scale=scale)[0]


@overload
def nsa_attention(
    q: Tensor,
    kv_cmp: KV,
    kv_sel: KV,
    kv_win: KV,
    gates: Tensor,
    *,
    config: NSAConfig,
    q_start: int | Tensor = 0,
    scale: float | None = None,
    phi_params: PhiParams = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    path: str = "auto",
    fa2: str = "auto",
    nonnegative_gates: bool = False,
    sinks: Tensor | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...


@overload
def nsa_attention(
    q: Tensor,
    kv_cmp: KV,
    kv_sel: KV,
    kv_win: KV,
    gates: Tensor,
    *,
    config: NSAConfig,
    q_start: int | Tensor = 0,
    scale: float | None = None,
    phi_params: PhiParams = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    path: str = "auto",
    fa2: str = "auto",
    nonnegative_gates: bool = False,
    sinks: Tensor | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...


def nsa_attention(
    q: Tensor,
    kv_cmp: KV,
    kv_sel: KV,
    kv_win: KV,
    gates: Tensor,
    *,
    config: NSAConfig,
    q_start: int | Tensor = 0,
    scale: float | None = None,
    phi_params: PhiParams = None,
    cu_seqlens: Tensor | Sequence[int] | None = None,
    path: str = "auto",
    fa2: str = "auto",
    nonnegative_gates: bool = False,
    sinks: Tensor | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Native sparse attention (Eq. 5): the gated sum of the compressed, selected and sliding
    branches; o [B, T, HQ, DV].

    ``kv_cmp``, ``kv_sel`` and ``kv_win`` are (k, v) of tokens, k rotated already; only with
    config.cmp_rope='after' (and 'auto' for a learned phi) the compressed branch's k comes unrotated
    and is rotated here, block i at position i * cmp_stride.
    ``gates`` [B, T, HQ, 3] in the order cmp, sel, win, activated already, of any floating dtype; o
    has q's. A branch outside config.branches is not computed. ``phi_params`` are phi's tensors for
    K and for V (see `compress`), None for mean.
    ``cu_seqlens`` int [N + 1] packs N documents into B = 1: no query sees another document's key,
    nor a NaN or an infinity of it, and rows beyond cu_seqlens[-1] are exactly 0. Within a document
    that holds one, rows are NaN from its token on (its row alone, where it is in q or the gates)
    and pass no gradient on; rows before it are exact. config.adaptive_num_selected is a ValueError
    with cu_seqlens or a q_start other than 0, where its n would not be that of the sequence; so is
    any tensor whose shape, dtype or device does not fit. RouteError for a ``path`` or ``fa2`` that
    nothing serves.

    ``sinks`` [HQ, 3], of any floating dtype, are the logits of config.sinks. ``return_lse`` returns
    (o, lse [B, T, HQ, 3]) of each branch over its keys: natural log, softcap applied, sinks not
    included; fp32 (fp64 for fp64), without gradient; -inf where a row sees no key, and of a branch
    that is off. Paths reference and triton have it, path reference alone softcap and sinks.

    ``nonnegative_gates`` promises that no gate is below 0, as after sigmoid and softmax: path
    triton then computes the gradients of all branches together. A gate below 0 would make gradients
    NaN, those of the keys that its row attends to included.
    """
    is_whole_sequence = checked.is_whole_sequence(
        q,
        (kv_cmp, kv_sel, kv_win),
        gates,
        config=config,
        q_start=q_start,
        scale=scale,
        is_packed=cu_seqlens is not None,
        sinks=sinks,
    )
    packing = None
    if q.shape[0] == 0 and cu_seqlens is None:
        Request(path, fa2)
        learned = [x for params in phi_params or () for x in (params or {}).values()]
        learned += [] if sinks is None else [sinks]
        tensors = (*kv_cmp, *kv_sel, *kv_win, gates, *learned)
        o = nothing(q, *tensors, dim=kv_sel[1].shape[3])
        wide = torch.promote_types(q.dtype, torch.float32)
        return (o, q.new_empty(gates.shape, dtype=wide)) if return_lse else o
    if cu_seqlens is not None:
        cu_seqlens = checks.cu_seqlens_tensor(cu_seqlens, q.device)
        checks.packed(cu_seqlens, q, kv_sel[0], q_start, read=checks.may_read(q))
        packing = Packing.of(cu_seqlens, q.shape[1], config.sel_block)
        q, gates = packing.align(q), packing.align(gates)
        kv_cmp, kv_sel, kv_win = (
            (packing.align(k), packing.align(v)) for k, v in (kv_cmp, kv_sel, kv_win)
        )
    else:
        kv_cmp, kv_sel, kv_win = (
            _up_to_last_query(kv, q, q_start) for kv in (kv_cmp, kv_sel, kv_win)
        )
    documents = None if packing is None else packing.documents
    q, scale = _with_scale(q, scale)
    S, G, DV = kv_sel[1].shape[1:]
    decision = route_for(
        q,
        G,
        DV,
        S,
        branches=config.branches,
        q_start=q_start,
        path=path,
        fa2=fa2,
        config=config,
        whole=is_whole_sequence,
        extras=extras_of(config, return_lse=return_lse),
    )
    takes_means = phi_params is None and takes_means_itself(
        decision, config, *kv_cmp, documents=documents
    )
    if not takes_means and config.branches != ("win",):  # compressed keys serve the selection, too
        kv_cmp = compress_kv(
            *kv_cmp, config=config, phi_params=phi_params, documents=documents, route=decision
        )
    view = View(cmp=kv_cmp, sel=kv_sel, win=kv_win, q_start=q_start, win_start=q_start)
    present = None if packing is None else packing.align(packing.inside_T[None])
    call = Call(
        decision,
        config,
        scale,
        documents=documents,
        present=present,
        is_whole_sequence=is_whole_sequence,
        nonnegative_gates=nonnegative_gates,
        sinks=sinks,
        takes_means=takes_means,
    )
    if return_lse:
        o, lse = attend_view_with_lse(q, gates, view, call)
        if packing is None:
            return o, lse
        outside = packing.outside_T[None, :, None, None]
        return packing.restore(o), packing.restore(lse).masked_fill(outside, -torch.inf)
    o = attend_view(q, gates, view, call)
    return o if packing is None else packing.restore(o)


def _with_scale(q: Tensor, scale: float | None) -> tuple[Tensor, float]:
    """(q, scale) of the kernels; by default the scale is DK ** -0.5.

    A scale that torch.compile holds as a number that changes is multiplied into q, which is rounded
    once more: as an argument of SDPA each value would compile anew.
    """
    if scale is None:
        return q, q.shape[-1] ** -0.5
    if is_symbolic(scale):
        return q * scale, 1.0
    # as an operator's schema makes of it
    return q, scale if torch.compiler.is_compiling() else float(scale)


def takes_means_itself(
    route: Route, config: NSAConfig, k: Tensor, v: Tensor, *, documents: Documents | None
) -> bool:
    """Whether a call of this Route may be given tokens as K and V of the compressed branch, and
    takes their means, as `compress_kv` would: `nsa.branches.Call.takes_means`.
    """
    return (
        documents is None  # whose NaN are taken out of the means
        and config.rotates_before_compression
        and dispatch.has_kernels_alone(route)
        and dispatch.fuses_means(route, config, k.shape[1])
        and not has_transforms()
    )


def compress_kv(
    k: Tensor,
    v: Tensor,
    first_block: Tensor | None = None,
    *,
    config: NSAConfig,
    phi_params: PhiParams = None,
    documents: Documents | None = None,
    route: Route | None = None,
) -> KV:
    """Eq. 7 for K and V, and RoPE of the compressed K where config rotates it after compression.

    ``first_block`` int64 [B]: its index, 0 by default.

    ``route``: of the call that attends to them, whose compressed branch may have a kernel for
    phi; with a cache, None.
    """
    params_k, params_v = (None, None) if phi_params is None else phi_params
    if first_block is None and documents is None and is_symbolic(k.shape[1]):
        # Blocks that nobody sees: 0, 1 and more of them would be graphs of their own.
        k, v = (pad(x, (0, 0, 0, 0, 0, 2 * config.cmp_block)) for x in (k, v))
    if (
        route is not None
        and params_k is None
        and params_v is None
        and dispatch.fuses_means(route, config, k.shape[1])
    ):
        k_cmp, v_cmp = dispatch.means_of(k, v, config)
    elif (found := _learned_phi(k, v, config, phi_params, documents, route)) is not None:
        k_cmp, v_cmp = found
    else:
        k_cmp, v_cmp = (
            compress(k, config=config, params=params_k),
            compress(v, config=config, params=params_v),
        )
    if config.rotates_before_compression:
        return k_cmp, v_cmp
    block_BC = torch.arange(k_cmp.shape[1], device=k.device)[None]
    if first_block is not None:
        block_BC = first_block[:, None] + block_BC
    token_BC = block_BC * config.cmp_stride
    if documents is not None:  # positions begin anew in each document
        token_BC = token_BC - documents.first_BT[:, :: config.cmp_stride][:, : k_cmp.shape[1]]
    theta = angles(token_BC, k_cmp.shape[-1], base=config.rope_base, scale=config.rope_scale)
    return rotate(k_cmp, theta, kind=config.rope), v_cmp


def _learned_phi(
    k: Tensor,
    v: Tensor,
    config: NSAConfig,
    phi_params: PhiParams,
    documents: Documents | None,
    route: Route | None,
) -> KV | None:
    """Eq. 7 of a learned phi by kernels; None where `compress` takes it."""
    if route is None or config.phi == "mean" or phi_params is None:
        return None
    if documents is not None and torch.compiler.is_compiling():
        return None  # fewer tokens than a block has would be compiled anew
    of_k, of_v = phi_params
    params = checked_params(k, config, of_k), checked_params(v, config, of_v)
    if not dispatch.fuses_learned_phi(route, config, k, params):
        return None
    return dispatch.learned_phi_of(k, v, params, config)


def _up_to_last_query(kv: KV, q: Tensor, q_start: int | Tensor) -> KV:
    """Drop the keys that no query can see (a cache's unused room), whose contents are undefined."""
    if isinstance(q_start, Tensor):
        return kv
    end = q_start + q.shape[1]
    return (kv[0][:, :end], kv[1][:, :end]) if kv[0].shape[1] > end else kv
