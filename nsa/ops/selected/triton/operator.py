"""The operator of ``nsa.ops.selected.triton.kernels`` and its gradient.

B batch, T query tokens, S key tokens, Q query heads, G kv heads, N blocks a row, D head dim.
"""

from __future__ import annotations

from torch import Tensor

from nsa.ops.operator import call, define_operator, fake_attention, int_and_tensor, of_attention

_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor blocks, Tensor? q_starts"
_OPTIONS = "SymInt q_start, SymInt sel_block, SymInt full, float scale"


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    *,
    sel_block: int,
    q_start: int | Tensor,
    scale: float,
    fa2: str | None,
    num_full_rows: int = 0,
) -> tuple[Tensor, Tensor]:
    """See ``nsa.ops.selected.AttendFn``; ``fa2`` serves nothing here."""
    del fa2
    at, q_starts = int_and_tensor(q_start)
    o, lse = call("selected_triton", q, k, v, blocks, q_starts, at, sel_block, num_full_rows, scale)
    return o, lse


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    q_starts: Tensor | None,
    q_start: int,
    sel_block: int,
    full: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    from nsa.ops.selected.triton import kernels

    at = q_start if q_starts is None else q_starts
    return kernels.forward(q, k, v, blocks, sel_block=sel_block, q_start=at, scale=scale, full=full)


def _backward(
    do: Tensor,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    q_starts: Tensor | None,
    q_start: int,
    sel_block: int,
    full: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from nsa.ops.kernels import products
    from nsa.ops.selected.triton import kernels

    do, at = do.contiguous(), q_start if q_starts is None else q_starts
    delta = products.row_products(o, do)
    return kernels.backward(
        do, q, k, v, blocks, lse, delta, sel_block=sel_block, q_start=at, scale=scale, full=full
    )


define_operator(
    "selected_triton",
    f"({_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor)",
    _forward,
    fake_attention,
    of_attention(
        f"(Tensor do, Tensor o, Tensor lse, {_INPUTS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
        _backward,
        "selected_triton",
        num_inputs=9,
    ),
)
