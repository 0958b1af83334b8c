"""A whole call of attention as one node of autograd's graph: what its operators ran, and the
backward of ``nsa.ops.joint_backward.kernels`` with that of the means.

B batch, T queries, S tokens, C compressed blocks, Q query heads, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nsa.ops import derivatives
from nsa.ops.joint_backward.operator import KV, Joined, gradients
from nsa.ops.operator import Gradients, Plainly, call, is_plain

_CMP_AT = 6  # of k of the compressed branch, among the tensors that a node takes


@dataclass(frozen=True, slots=True)
class Ran:
    """What the branches of a call left: the arguments of operator ``joined``, and ``means``
    (tokens, block, stride) where the compressed branch's K and V were given as tokens.
    """

    joined: Joined
    means: tuple[int, int, int] | None


def attend(
    run: Callable[[], Ran], gates: Tensor, q: Tensor, *, cmp: KV, sel: KV, win: KV
) -> Tensor:
    """gates [B, T, Q, 3] in q's dtype, q [B, T, Q, D] -> o [B, T, Q, DV] with every gradient, of
    ``run``, which calls the operators of these very tensors.

    ``sel`` and ``win`` (k, v) [B, S, G, D or DV]; ``cmp`` the same where `Ran.means` says so, else
    [B, C, G, D or DV].
    """
    # As autograd adds up the gradients of a tensor that is given several times: in this order those
    # of a node for each operator, whose means came last.
    o: Tensor = derivatives.apply(_Attention, run, gates, q, *sel, *win, *cmp)
    return o


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Callable[[], Ran], *tensors: Tensor) -> Tensor:
        with Plainly():
            ran = run()
            o: Tensor = call("joined", *ran.joined)
        gates, q, kv, blocks, saved, q_starts, first, *ctx.options = ran.joined
        ctx.save_for_backward(gates, q, *kv, blocks, q_starts, first, *saved)
        ctx.means = ran.means
        ctx.anchor = None
        if ran.means is not None:
            ctx.anchor = _anchor(tensors[_CMP_AT:], tensors[2:4])
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> Any:
        kept = list(ctx.saved_tensors)  # once: a checkpoint gives each of them no second time
        # a compiler of backwards sees operators
        with Plainly() if is_plain(do, *kept) else nullcontext():
            if not torch.is_grad_enabled():
                ctx.maybe_clear_saved_tensors()  # not where the graph is retained
                return _gradients(ctx, do, kept)
            with torch.no_grad():
                found = _gradients(ctx, do, list(kept))
        return derivatives.refusing(found, do, *kept, *_tokens_behind(ctx))


def _gradients(ctx: Any, do: Tensor, kept: list[Any]) -> Gradients:
    """Of what `_Attention` takes, in that order; ``kept`` is emptied, so that what is needed no
    longer is freed on the way.
    """
    gates, q, *kv = kept[:8]
    blocks, q_starts, first, *saved, lists = kept[8:]
    kept.clear()
    rest = (q, kv, blocks, lists, q_starts, first)
    dgates, dq, *d_kv = gradients(do.contiguous(), gates, saved, rest, ctx.options)
    d_cmp: Gradients = tuple(d_kv[:2])
    if ctx.means is not None:
        d_cmp = (None, None)
        if any(ctx.needs_input_grad[1 + _CMP_AT :]):
            d_cmp = call("means_backward", *d_kv[:2], *ctx.means)
    found = (None, dgates, dq, *d_kv[2:], *d_cmp)
    wanted = zip(found, ctx.needs_input_grad, strict=True)
    return tuple(x if needed else None for x, needed in wanted)


def _anchor(tokens: tuple[Tensor, ...], saved: tuple[Tensor, ...]) -> Tensor | None:
    """An empty tensor with a graph to ``tokens``, which are not saved, for a second derivative to
    be refused along; None where they are leaves, or of the nodes that made those of ``saved``.
    """
    behind = [x for x in tokens if x.grad_fn is not None]
    nodes = [x.grad_fn for x in saved]
    if all(any(x.grad_fn is node for node in nodes) for x in behind):
        return None
    with torch.enable_grad():
        return derivatives.refused_at(*behind)


def _tokens_behind(ctx: Any) -> list[Tensor]:
    """Tensors that lead to the tokens whose means were taken."""
    if ctx.means is None:
        return []
    leaves = [getattr(node, "variable", None) for node, _ in ctx.next_functions[_CMP_AT:]]
    return [x for x in (*leaves, ctx.anchor) if x is not None]
