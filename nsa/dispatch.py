"""The one door: the only caller of the implementations, and the only one who counts them."""

from __future__ import annotations

from torch import Tensor

from nsa import engagement
from nsa.ops import compressed as compressed_ops
from nsa.ops import sdpa, sliding
from nsa.ops.positions import Documents
from nsa.ops.selected import PATHS
from nsa.routing import BranchRoute, Path, Route


def _fa2(branch: BranchRoute) -> str | None:
    return branch.provider if branch.kernel == "fa2" else None


def compressed(
    route: Route, q: Tensor, k_cmp: Tensor, v_cmp: Tensor, *, block: int, stride: int, q_start: int | Tensor, scale: float,
    documents: Documents | None = None,
) -> Tensor:  # fmt: skip
    branch = route.branch("cmp")
    engagement.record(branch)
    return compressed_ops.attend(q, k_cmp, v_cmp, block=block, stride=stride, q_start=q_start, scale=scale, documents=documents)


def selected(
    route: Route, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, *, sel_block: int, q_start: int | Tensor, scale: float
) -> Tensor:
    branch = route.branch("sel")
    attend = PATHS[Path(branch.implementation)]
    engagement.record(branch)
    return attend(q, k, v, blocks, sel_block=sel_block, q_start=q_start, scale=scale, fa2=_fa2(branch))


def window(
    route: Route, q: Tensor, k: Tensor, v: Tensor, *, size: int, q_start: int | Tensor, scale: float, documents: Documents | None = None
) -> Tensor:
    branch = route.branch("win")
    engagement.record(branch)
    return sliding.attend(q, k, v, window=size, q_start=q_start, scale=scale, fa2=_fa2(branch), documents=documents)


def dense(route: Route, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
    branch = route.branch("dense")
    engagement.record(branch)
    return sdpa.causal(q, k, v, scale=scale, kernel=branch.kernel)
