"""The one door: the only caller of the implementations, the only one who counts them, and who marks them for a profiler."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from nsa import engagement, settings
from nsa.ops import compressed as compressed_ops
from nsa.ops import sdpa, sliding
from nsa.ops.positions import Documents
from nsa.ops.selected import PATHS
from nsa.routing import DENSE, BranchRoute, Path, Route


def _marked(branch: BranchRoute, x: Tensor) -> AbstractContextManager[None]:
    """An NVTX range named by the branch's counter around its forward, with NSA_NVTX=1 on CUDA; nothing inside torch.compile."""
    if torch.compiler.is_compiling() or not _on_cuda(x) or not settings.current().nvtx.value:
        return nullcontext()
    mark: AbstractContextManager[None] = torch.cuda.nvtx.range(branch.counters[0])
    return mark


def _on_cuda(x: Tensor) -> bool:
    return x.is_cuda


def _fa2(branch: BranchRoute) -> str | None:
    return branch.provider if branch.kernel == "fa2" else None


def compressed(
    route: Route, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *, block: int, stride: int, q_start: int | Tensor, scale: float,
    documents: Documents | None = None,
) -> Tensor:  # fmt: skip
    branch = route.branch("cmp")
    engagement.record(branch)
    with _marked(branch, q):
        return compressed_ops.attend(q, k_cmp, v_cmp, block=block, stride=stride, q_start=q_start, scale=scale, documents=documents)


def selected(
    route: Route, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor | None, *, sel_block: int, q_start: int | Tensor, scale: float
) -> Tensor:
    """``blocks`` may be None where the Route is full causal attention, which looks at none."""
    branch = route.branch("sel")
    if branch.implementation == DENSE:
        return _full_causal(branch, q, k, v, scale=scale)
    assert blocks is not None
    attend = PATHS[Path(branch.implementation)]
    engagement.record(branch)
    with _marked(branch, q):
        return attend(q, k, v, blocks, sel_block=sel_block, q_start=q_start, scale=scale, fa2=_fa2(branch))


def window(
    route: Route, q: Tensor, k: Tensor, v: Tensor, *, size: int, q_start: int | Tensor, scale: float, documents: Documents | None = None
) -> Tensor:
    branch = route.branch("win")
    if branch.implementation == DENSE:
        return _full_causal(branch, q, k, v, scale=scale)
    engagement.record(branch)
    with _marked(branch, q):
        return sliding.attend(q, k, v, window=size, q_start=q_start, scale=scale, fa2=_fa2(branch), documents=documents)


def dense(route: Route, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    return _full_causal(route.branch("dense"), q, k, v, scale=scale)


def _full_causal(branch: BranchRoute, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    assert q.shape[1] == k.shape[1], "full causal attention is of whole sequences alone"
    engagement.record(branch)
    with _marked(branch, q):
        return sdpa.causal(q, k, v, scale=scale, kernel=branch.kernel)
