"""The only caller of the implementations. It counts each call and marks it for a profiler."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from nsa import engagement, settings
from nsa.config import BRANCHES, NSAConfig
from nsa.documents import Documents
from nsa.ops import decode_step as step_operator
from nsa.ops import (
    derivatives,
    explicit,
    fa3,
    gated_sum,
    interval,
    joint_backward,
    learned_phi,
    means,
    scores,
    sdpa,
)
from nsa.ops import paged as pages_op
from nsa.ops.interval import compressed as compressed_formula
from nsa.ops.interval import sliding
from nsa.ops.operator import Plainly as Plainly
from nsa.ops.operator import is_plain as is_plain
from nsa.ops.precision import autocast_dtype
from nsa.ops.selected import PATHS
from nsa.routing import DENSE, EXPLICIT, PHI_MAX_HIDDEN, SCORE, BranchRoute, Path, Route

# o [B, T, HQ, DV], lse to base 2 [B, T, HQ] where the kernel leaves one
Output = tuple[Tensor, Tensor | None]
# the selected branch by kernels also leaves the lists of queries that its gradient takes
Attended = Output | tuple[Tensor, Tensor | None, Tensor]


def _marked(branch: BranchRoute, x: Tensor) -> AbstractContextManager[None]:
    """An NVTX range named by the branch's counter around its forward, with NSA_NVTX=1 on CUDA;
    nothing inside torch.compile.
    """
    if torch.compiler.is_compiling() or not _on_cuda(x) or not settings.current().nvtx.value:
        return nullcontext()
    mark: AbstractContextManager[None] = torch.cuda.nvtx.range(branch.counters[0])
    return mark


def _on_cuda(x: Tensor) -> bool:
    return x.is_cuda


def _explicit(
    branch: BranchRoute,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keep: explicit.Keep,
    *,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Output:
    sink = None if sinks is None else sinks[:, BRANCHES.index(branch.branch)]
    o, lse = explicit.attend(q, k, v, keep, scale=scale, softcap=softcap, sink_Q=sink)
    return o, lse / math.log(2)


def _fa2(branch: BranchRoute) -> str | None:
    return branch.provider if branch.kernel == "fa2" else None


def fuses_means(route: Route, config: NSAConfig, tokens: int) -> bool:
    """Whether `means_of` may make the compressed K and V: path triton's, of a mean.

    A compiler fuses the formula itself.
    """
    served = any(b.branch == "cmp" and b.kernel == Path.TRITON for b in route.branches)
    return (
        served
        and config.phi == "mean"
        and not torch.compiler.is_compiling()
        and tokens >= config.cmp_block
    )


def means_of(k: Tensor, v: Tensor, config: NSAConfig) -> tuple[Tensor, Tensor]:
    """`nsa.compress` of K and V where `fuses_means`; part of the compressed branch, which
    `compressed` counts.
    """
    return means.means(k, v, block=config.cmp_block, stride=config.cmp_stride)


def fuses_learned_phi(
    route: Route,
    config: NSAConfig,
    k: Tensor,
    params: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
) -> bool:
    """Whether `learned_phi_of` may make the compressed K and V: path triton's, of a linear or mlp
    phi whose ``params`` for K and for V have at most PHI_MAX_HIDDEN hidden features.

    Where autocast would multiply in another dtype than k's, the formula does.
    """
    served = any(b.branch == "cmp" and b.kernel == Path.TRITON for b in route.branches)
    return (
        served
        and config.phi != "mean"
        and k.shape[1] >= config.cmp_block
        and autocast_dtype(k.device) in (None, k.dtype)
        and all(p["up"].shape[0] <= PHI_MAX_HIDDEN for p in params if "up" in p)
    )


def learned_phi_of(
    k: Tensor,
    v: Tensor,
    params: tuple[Mapping[str, Tensor], Mapping[str, Tensor]],
    config: NSAConfig,
) -> tuple[Tensor, Tensor]:
    """`nsa.compress` of K and V where `fuses_learned_phi`; part of the compressed branch, which
    `compressed` counts.
    """
    of_k, of_v = ({name: x.to(k.dtype) for name, x in one.items()} for one in params)
    grid = {"block": config.cmp_block, "stride": config.cmp_stride}
    if config.phi == "linear":
        return learned_phi.linear(k, v, (of_k["weight"], of_v["weight"]), **grid)
    up, position, down = ((of_k[name], of_v[name]) for name in ("up", "position", "down"))
    return learned_phi.mlp(k, v, up, position, down, **grid)


def compressed(
    route: Route,
    q: Tensor,
    k_cmp: Tensor,
    v_cmp: Tensor,
    *,
    block: int,
    stride: int,
    q_start: int | Tensor,
    scale: float,
    documents: Documents | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Output:
    """The lse is what `choose` and `join` take. ``sinks`` [HQ, 3], in the order of BRANCHES."""
    branch = route.branch("cmp")
    engagement.record(branch)
    with _marked(branch, q):
        if branch.kernel == EXPLICIT:
            keep = explicit.keep_compressed(
                q,
                k_cmp.shape[1],
                block=block,
                stride=stride,
                q_start=q_start,
                first_BT=None if documents is None else documents.first_BT,
            )
            return _explicit(
                branch, q, k_cmp, v_cmp, keep, scale=scale, softcap=softcap, sinks=sinks
            )
        if branch.kernel == Path.TRITON:
            first = _first(documents)
            return interval.attend(
                q,
                k_cmp,
                v_cmp,
                block=block,
                stride=stride,
                width=None,
                q_start=q_start,
                scale=scale,
                first=first,
            )
        o = compressed_formula.attend(
            q,
            k_cmp,
            v_cmp,
            block=block,
            stride=stride,
            q_start=q_start,
            scale=scale,
            documents=documents,
        )
        return o, None


def choose(
    route: Route,
    q: Tensor,
    k_cmp: Tensor,
    lse: Tensor | None,
    *,
    config: NSAConfig,
    q_start: int | Tensor,
    kv_len: int,
    scale: float,
    documents: Documents | None,
) -> Tensor:
    """The blocks of a Route that has a kernel for them: int32 [B, T, G, N]. ``lse`` as `compressed`
    left it, else made here.
    """
    branch = route.branch(SCORE)
    engagement.record(branch)
    grid = {"block": config.cmp_block, "stride": config.cmp_stride}
    with _marked(branch, q), torch.no_grad():
        first = _first(documents)
        if lse is None:  # the compressed branch is off
            _, lse = interval.attend(
                q, k_cmp, k_cmp, width=None, q_start=q_start, scale=scale, first=first, **grid
            )
        return scores.choose(
            q,
            k_cmp,
            lse,
            q_start=q_start,
            first=first,
            kv_len=kv_len,
            sel_block=config.sel_block,
            num_selected=config.num_selected_for(kv_len),
            num_initial=config.num_initial,
            num_local=config.num_local,
            scale=scale,
            **grid,
        )


def combined(
    route: Route, gates: Tensor, outputs: Sequence[Tensor], columns: Sequence[int]
) -> Tensor:
    """The gated sum, fused where the selected branch is."""
    fused = any(b.branch == "sel" and b.implementation == Path.TRITON for b in route.branches)
    return (gated_sum.fused_gated_sum if fused else gated_sum.gated_sum)(gates, outputs, columns)


def has_kernels_alone(route: Route) -> bool:
    """Whether path triton's kernels serve every branch, and all three are on."""
    served = [
        b.branch
        for b in route.branches
        if b.branch in BRANCHES and Path.TRITON in (b.kernel, b.implementation)
    ]
    return len(served) == len(BRANCHES)


def serves_pages(route: Route, queries: int, heads: int) -> bool:
    """Whether `paged` serves a call of so many queries a row and query heads a kv head: few of
    them, of a Route of which kernels serve every part.
    """
    return (
        has_kernels_alone(route)
        and route.has(SCORE)
        and not torch.compiler.is_compiling()
        and pages_op.fits_one_tile(queries, heads)
    )


def paged(
    route: Route, q: Tensor, pages: pages_op.LayerPages, *, config: NSAConfig, scale: float
) -> tuple[tuple[tuple[Tensor, Tensor], ...], Tensor]:
    """(o and lse of all three branches, the blocks) over keys in pages, where `serves_pages`."""
    for name in ("cmp", SCORE, "sel", "win"):
        engagement.record(route.branch(name))
    geometry = pages_op.PagesGeometry(
        config.cmp_block,
        config.cmp_stride,
        config.window,
        config.num_selected,
        (config.num_initial, config.num_local),
        scale,
    )
    return pages_op.attend(q, pages, geometry)


def joins(route: Route) -> bool:
    """Whether gradients are recorded and all three branches leave what `join` takes, since kernels
    serve them; NSA_TRITON_JOIN=0: never. Transforms of `torch.func` differentiate each by itself.
    """
    return (
        torch.is_grad_enabled()
        and has_kernels_alone(route)
        and "join" not in route.off
        and (torch.compiler.is_compiling() or not derivatives.has_transforms())
    )


def joined(
    gates: Tensor,
    q: Tensor,
    kv: tuple[joint_backward.KV, joint_backward.KV, joint_backward.KV],
    blocks: Tensor,
    attended: Sequence[Attended],
    *,
    config: NSAConfig,
    q_start: int | Tensor,
    scale: float,
    documents: Documents | None,
    num_full_rows: int,
    win_begin: int = 0,
) -> joint_backward.Joined:
    """What `join` takes of branches that ran without gradients: ``kv`` and ``attended`` in the
    order of BRANCHES. The window's keys begin at position ``win_begin``.
    """
    outputs, lse = tuple(o for o, *_ in attended), tuple(x[1] for x in attended if x[1] is not None)
    _, _, *lists = attended[BRANCHES.index("sel")]
    return joint_backward.arguments(
        gates,
        q,
        *kv,
        blocks,
        outputs,
        lse,
        *lists,
        block=config.cmp_block,
        stride=config.cmp_stride,
        sel_block=config.sel_block,
        window=config.window,
        q_start=q_start,
        scale=scale,
        first=_first(documents),
        num_full_rows=num_full_rows,
        win_begin=win_begin,
    )


def join(joined: joint_backward.Joined) -> Tensor:
    """`combined` with every gradient."""
    return joint_backward.attend(joined)


def in_one_node(
    run: Callable[[], joint_backward.one_node.Ran],
    gates: Tensor,
    q: Tensor,
    kv: tuple[joint_backward.KV, joint_backward.KV, joint_backward.KV],
) -> Tensor:
    """`join` of what ``run`` calls, with its gradients; ``kv`` as that takes it."""
    cmp, sel, win = kv
    return joint_backward.one_node.attend(run, gates, q, cmp=cmp, sel=sel, win=win)


def _first(documents: Documents | None) -> Tensor | None:
    return None if documents is None else documents.first_BT[0]


def selected(
    route: Route,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor | None,
    *,
    sel_block: int,
    q_start: int | Tensor,
    scale: float,
    num_full_rows: int = 0,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Attended:
    """``num_full_rows`` as in `nsa.ops.selected.AttendFn`, ``sinks`` as in `compressed`.

    ``blocks`` may be None where the Route is full causal attention, which looks at none."""
    branch = route.branch("sel")
    if branch.implementation == DENSE:
        return _full_causal(branch, q, k, v, scale=scale), None
    assert blocks is not None
    attend = PATHS[Path(branch.implementation)]
    engagement.record(branch)
    with _marked(branch, q):
        if branch.kernel == EXPLICIT:
            keep = explicit.keep_selected(
                q, k.shape[1], blocks, sel_block=sel_block, q_start=q_start
            )
            return _explicit(branch, q, k, v, keep, scale=scale, softcap=softcap, sinks=sinks)
        return attend(
            q,
            k,
            v,
            blocks,
            sel_block=sel_block,
            q_start=q_start,
            scale=scale,
            fa2=_fa2(branch),
            num_full_rows=num_full_rows,
        )


def window(
    route: Route,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    size: int,
    q_start: int | Tensor,
    scale: float,
    documents: Documents | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Output:
    """``sinks`` as in `compressed`."""
    branch = route.branch("win")
    if branch.implementation == DENSE:
        return _full_causal(branch, q, k, v, scale=scale), None
    engagement.record(branch)
    with _marked(branch, q):
        if branch.kernel == EXPLICIT:
            keep = explicit.keep_window(
                q,
                k.shape[1],
                window=size,
                q_start=q_start,
                first_BT=None if documents is None else documents.first_BT,
            )
            return _explicit(branch, q, k, v, keep, scale=scale, softcap=softcap, sinks=sinks)
        if branch.kernel == Path.TRITON:
            grid = {"block": 1, "stride": 1, "width": size}
            return interval.attend(
                q, k, v, q_start=q_start, scale=scale, first=_first(documents), **grid
            )
        return (
            sliding.attend(
                q,
                k,
                v,
                window=size,
                q_start=q_start,
                scale=scale,
                fa2=_fa2(branch),
                documents=documents,
            ),
            None,
        )


def decode_step(
    route: Route,
    projected: step_operator.Projected,
    buffers: step_operator.Buffers,
    geometry: step_operator.StepGeometry,
    pages: step_operator.StepPages | None = None,
) -> tuple[Tensor, Tensor]:
    """(the gated sum of all branches, the blocks) of one token a row, which ``buffers`` take (pools
    of ``pages``): one operator of path triton's for every branch and the choice.
    """
    for branch in route.branches:
        engagement.record(branch)
    with _marked(route.branch("cmp"), projected.q):
        return step_operator.attend(projected, buffers, geometry, pages)


def dense(route: Route, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    """Full causal attention of q [B, T, HQ, DK], the last T of S keys."""
    return _full_causal(route.branch("dense"), q, k, v, scale=scale)


def dense_cached(
    route: Route,
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    *,
    q_start: int | Tensor,
    scale: float,
    new: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Full causal attention over K and V of a cache. ``new``: of the chunk, where the kernel itself
    stores them, at ``q_start`` (int, or int32 [B]).
    """
    branch = route.branch("dense")
    engagement.record(branch)
    with _marked(branch, q):
        if new is not None:
            return fa3.cached(q, new, kv, position=q_start, scale=scale)
        if branch.kernel == Path.TRITON:
            return interval.attend(
                q, *kv, block=1, stride=1, width=None, q_start=q_start, scale=scale
            )[0]
        return sdpa.cached(q, *kv, q_start=q_start, scale=scale, kernel=branch.kernel)


def _full_causal(branch: BranchRoute, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    assert branch.branch == "dense" or q.shape[1] == k.shape[1], "a branch is of whole sequences"
    engagement.record(branch)
    with _marked(branch, q):
        return sdpa.causal(q, k, v, scale=scale, kernel=branch.kernel)
