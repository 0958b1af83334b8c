"""The branches of one call over a view of keys, and their gated sum (arXiv 2502.11089, Eq. 5).

B batch, T query tokens, G kv heads, N blocks a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from nsa import checks, chosen_blocks, dispatch, selection, statistics
from nsa.config import BRANCHES, NSAConfig
from nsa.decode import PagedView, View
from nsa.documents import Documents, reached, without_poison
from nsa.ops import joint_backward, key_counts
from nsa.ops.derivatives import has_transforms, once
from nsa.ops.joint_backward import one_node
from nsa.routing import DENSE, SCORE, Route


@dataclass(frozen=True, slots=True)
class Call:
    """Arguments that all branches of one call share, besides its tensors.

    ``scale`` of the logits. ``documents``: of a packed batch. ``present`` bool [B or 1, T]: queries
    that hold a token, for the statistics alone; None: all of them. ``is_whole_sequence``: the call
    is of whole sequences that begin at 0, without a cache and not packed. ``nonnegative_gates`` as
    in `nsa.nsa_attention`. ``takes_means``: the view's ``cmp`` holds tokens, of which the call
    attends to the means.
    """

    route: Route
    config: NSAConfig
    scale: float
    documents: Documents | None = None
    present: Tensor | None = None
    is_whole_sequence: bool = False
    nonnegative_gates: bool = False
    sinks: Tensor | None = None
    takes_means: bool = False
    wait_for_selected: Callable[[], object] | None = None

    def num_full_rows(self, num_keys: int) -> int:
        """Queries at the head of each sequence that choose every block up to their own."""
        if not self.is_whole_sequence:
            return 0
        return self.config.num_selected_for(num_keys) * self.config.sel_block


def nothing(q: Tensor, *sources: Tensor, dim: int) -> Tensor:
    """o [0, T, HQ, dim] of an empty batch, in q's dtype. Gradients of q [0, T, HQ, D] and of
    ``sources`` are 0, not None.
    """
    zero = sum(x.sum() * 0 for x in (q, *sources))
    assert isinstance(zero, Tensor)
    return zero.to(q.dtype).expand(0, *q.shape[1:3], dim)


def reaching(o: Tensor, *groups: Iterable[Tensor]) -> Tensor:
    """``o`` as it is, such that gradients of the tensors of ``groups`` are 0 where they would be
    None; their contents are not read.
    """
    for x in chain(*groups):
        o = o + x.flatten()[:0].sum().to(o.dtype)
    return o


def attend_view(
    q: Tensor,
    gates: Tensor,
    view: View,
    call: Call,
    *,
    keys_read: key_counts.KeysRead | None = None,
) -> Tensor:
    """The gated sum over what ``view`` holds; counts what each branch gathers into ``keys_read``
    where that is given.

    Where the selected branch is full causal attention, blocks are neither scored nor chosen unless
    statistics are collected, strict mode checks them, or keys are counted.

    Packed documents are isolated, NaN and infinities included: within one, rows are NaN from the
    first token on that holds one in k or v, and a row whose own q or gate does; those rows pass no
    gradient on. Rows before it are exact.
    """
    if isinstance(view, PagedView):
        if _serves_pages(q, view, call):
            return _attend_pages(q, gates, view, call, keys_read)
        view = view.gathered
    return _isolated(q, gates, view, call, keys_read)[0]


def attend_view_with_lse(q: Tensor, gates: Tensor, view: View, call: Call) -> tuple[Tensor, Tensor]:
    """(`attend_view`, lse [B, T, HQ, 3], natural log, fp32 or wider, without gradient: -inf where a
    row sees no key, and of a branch that is off; NaN in rows that are NaN for what their packed
    document holds), of a Route whose implementations leave it.
    """
    o, attended, poisoned_BT = _isolated(q, gates, view, call, None)
    known = iter(attended)
    wide = torch.promote_types(q.dtype, torch.float32)
    off = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)
    columns = []
    for branch in BRANCHES:
        lse = next(known)[1] if branch in call.config.branches else off
        assert lse is not None, f"{call.route.branch(branch)} leaves no lse"
        if poisoned_BT is not None and lse is not off:
            lse = lse.masked_fill(poisoned_BT[..., None], torch.nan)
        columns.append(lse)
    return o, torch.stack(columns, -1).detach() * math.log(2)


def _isolated(
    q: Tensor,
    gates: Tensor,
    view: View,
    call: Call,
    keys_read: key_counts.KeysRead | None,
) -> tuple[Tensor, list[dispatch.Attended], Tensor | None]:
    """(`attend_view`; o and lse of each branch that is on; the rows of a packed call that are NaN,
    bool [1, T], which that lse does not show).
    """
    config = call.config
    transformed = not torch.compiler.is_compiling() and has_transforms()
    if not dispatch.has_kernels_alone(call.route) or transformed:
        # the operators of kernels refuse a second derivative by themselves
        sinks = () if call.sinks is None else (call.sinks,)
        q, gates, *kv = once(q, gates, *view.cmp, *view.sel, *view.win, *sinks)
        view = replace(view, cmp=(kv[0], kv[1]), sel=(kv[2], kv[3]), win=(kv[4], kv[5]))
        call = replace(call, sinks=kv[6]) if sinks else call
    checks.fixed_selection(
        config, whole=call.is_whole_sequence, what="a cache, a packed batch or a chunk"
    )
    statistics.observe_gates(gates, config.branches, present=call.present)
    poisoned_BT = None
    if call.documents is not None:
        if call.wait_for_selected is not None:
            call.wait_for_selected()
        q, gates, view, poisoned_BT = _without_poison(q, gates, view, call.documents, config)
    o, attended = _attend_and_sum(q, gates, view, call, keys_read)
    if poisoned_BT is not None:
        o = o.masked_fill(poisoned_BT[..., None, None], torch.nan)
    return o, attended, poisoned_BT


def _without_poison(
    q: Tensor, gates: Tensor, view: View, documents: Documents, config: NSAConfig
) -> tuple[Tensor, Tensor, View, Tensor]:
    """What a packed call computes with, such that no document reads another's NaN or infinity, and
    bool [1, T]: the rows that its own documents' values make NaN.
    """
    (q, gates), query_BT = without_poison(q, gates)
    assert isinstance(view.q_start, int), "packed documents have no cache"
    q_start, block_BC = view.q_start, None
    S = q_start + q.shape[1]
    token_BS = query_BT.new_zeros(1, S)
    if config.branches != ("win",):  # else there are no compressed keys
        (k, v), block_BC = without_poison(*view.cmp)
        view = replace(view, cmp=(k, v))
    if "sel" in config.branches:
        (k, v), bad_BS = without_poison(*view.sel)
        view, token_BS = replace(view, sel=(k, v)), token_BS | bad_BS
    if "win" in config.branches:  # whose keys are the last of them
        (k, v), bad_BS = without_poison(*view.win)
        if bad_BS.shape[1] != S:
            bad_BS = torch.nn.functional.pad(bad_BS, (S - bad_BS.shape[1], 0))
        view, token_BS = replace(view, win=(k, v)), token_BS | bad_BS
    grid = config.cmp_block, config.cmp_stride
    later_BT = reached(documents, token_BS, block_BC, *grid, q_start=q_start)
    return q, gates, view, query_BT | later_BT


def _attend_and_sum(
    q: Tensor, gates: Tensor, view: View, call: Call, keys_read: key_counts.KeysRead | None
) -> tuple[Tensor, list[dispatch.Attended]]:
    """(the gated sum, what `_attend_branches` returned)."""
    config = call.config
    tensors = (gates, q, *view.cmp, *view.sel, *view.win)
    records = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    # a cache's window begins elsewhere, and keeps no gradient
    is_plain_call = view.win_start is view.q_start or (records and _win_begin(view) is not None)
    joins = call.nonnegative_gates and is_plain_call and dispatch.joins(call.route)
    plain = dispatch.is_plain(*tensors, view.q_start)
    if joins and plain:
        return _in_one_node(q, gates, view, call, keys_read)
    with dispatch.Plainly() if plain and not records else nullcontext():
        view = _compressed(view, call)
        with torch.no_grad() if joins else nullcontext():
            attended, blocks = _attend_branches(q, view, call, keys_read)
        if joins:
            return dispatch.join(_joined(q, gates, view, call, attended, blocks)), attended
        columns = [i for i, b in enumerate(BRANCHES) if b in config.branches]
        outputs = [o for o, *_ in attended]
        return dispatch.combined(call.route, gates, outputs, columns), attended


def _in_one_node(
    q: Tensor, gates: Tensor, view: View, call: Call, keys_read: key_counts.KeysRead | None
) -> tuple[Tensor, list[dispatch.Attended]]:
    """`_attend_and_sum` with one node of autograd's graph for all of it, the means included."""
    attended: list[dispatch.Attended] = []
    gates = gates.to(q.dtype)

    def run() -> one_node.Ran:
        seen = _compressed(view, call)
        found, blocks = _attend_branches(q, seen, call, keys_read)
        attended.extend(found)
        grid = call.config.cmp_block, call.config.cmp_stride
        means = (view.cmp[0].shape[1], *grid) if call.takes_means else None
        return one_node.Ran(_joined(q, gates, seen, call, found, blocks), means)

    return dispatch.in_one_node(run, gates, q, (view.cmp, view.sel, view.win)), attended


def _compressed(view: View, call: Call) -> View:
    """``view`` with compressed keys and values."""
    if not call.takes_means:
        return view
    k, v = view.cmp
    return View(
        dispatch.means_of(k, v, call.config), view.sel, view.win, view.q_start, view.win_start
    )


def _joined(
    q: Tensor,
    gates: Tensor,
    view: View,
    call: Call,
    attended: list[dispatch.Attended],
    blocks: Tensor | None,
) -> joint_backward.Joined:
    assert blocks is not None
    return dispatch.joined(
        gates,
        q,
        (view.cmp, view.sel, view.win),
        blocks,
        attended,
        config=call.config,
        q_start=view.q_start,
        scale=call.scale,
        documents=call.documents,
        num_full_rows=call.num_full_rows(view.sel[1].shape[1]),
        win_begin=_win_begin(view) or 0,
    )


def _attend_branches(
    q: Tensor, view: View, call: Call, keys_read: key_counts.KeysRead | None
) -> tuple[list[dispatch.Attended], Tensor | None]:
    """(o, lse) of each branch that is on, in the order of BRANCHES, and the blocks, where any were
    chosen.
    """
    config = call.config
    attended: list[dispatch.Attended] = []
    lse = blocks = None
    softmax: dict[str, Any] = {"softcap": config.softcap, "sinks": call.sinks}
    if "cmp" in config.branches:
        attended.append(
            dispatch.compressed(
                call.route,
                q,
                *view.cmp,
                block=config.cmp_block,
                stride=config.cmp_stride,
                q_start=view.q_start,
                scale=call.scale,
                documents=call.documents,
                **softmax,
            )
        )
        lse = attended[-1][1]
    if "sel" in config.branches:
        if not _needs_no_blocks(call.route) or keys_read is not None:
            blocks = _choose(q, view, call, lse)
        if call.wait_for_selected is not None:
            call.wait_for_selected()
        attended.append(
            dispatch.selected(
                call.route,
                q,
                *view.sel,
                blocks,
                sel_block=config.sel_block,
                q_start=view.q_start,
                scale=call.scale,
                num_full_rows=call.num_full_rows(view.sel[1].shape[1]),
                **softmax,
            )
        )
    if "win" in config.branches:
        attended.append(
            dispatch.window(
                call.route,
                q,
                *view.win,
                size=config.window,
                q_start=view.win_start,
                scale=call.scale,
                documents=_documents_of_window(view, call),
                **softmax,
            )
        )
    chosen_blocks.record(blocks)
    if keys_read is not None:
        _count_keys(q, view, config, blocks, keys_read)
    return attended, blocks


def _documents_of_window(view: View, call: Call) -> Documents | None:
    """The documents, counted as the keys of the window are."""
    if call.documents is None:
        return None
    begin = _win_begin(view)
    assert begin is not None, "packed documents have no cache"
    return call.documents.counted_from(begin)


def _win_begin(view: View) -> int | None:
    """The position of the first key of the window; None where it is the device's."""
    if isinstance(view.q_start, int) and isinstance(view.win_start, int):
        return view.q_start - view.win_start
    return None


def _serves_pages(q: Tensor, view: PagedView, call: Call) -> bool:
    """Whether kernels attend to pages where they lie; else they are gathered."""
    heads = q.shape[2] // view.new_win[0].shape[2]
    return view.by_kernels and dispatch.serves_pages(call.route, q.shape[1], heads)


def _attend_pages(
    q: Tensor,
    gates: Tensor,
    view: PagedView,
    call: Call,
    keys_read: key_counts.KeysRead | None,
) -> Tensor:
    """`attend_view` by kernels that read pages through the table; a cache's call, so without
    gradients, packed documents or compiler.
    """
    config = call.config
    statistics.observe_gates(gates, config.branches, present=call.present)
    attended, blocks = dispatch.paged(call.route, q, view.pages, config=config, scale=call.scale)
    if checks.is_strict():
        checks.block_contents(blocks, view.num_keys, config.sel_block, view.q_start)
    statistics.observe_selection(
        blocks, q_start=view.q_start, sel_block=config.sel_block, present=call.present
    )
    chosen_blocks.record(blocks)
    if keys_read is not None:
        _count_keys(q, view, config, blocks, keys_read)
    return dispatch.combined(call.route, gates, [o for o, _ in attended], range(len(BRANCHES)))


def _choose(q: Tensor, view: View, call: Call, lse: Tensor | None) -> Tensor:
    """The blocks int32 [B, T, G, N] of a call; ``lse`` as the compressed branch left it."""
    config, S = call.config, view.sel[1].shape[1]
    if call.route.has(SCORE):
        blocks = dispatch.choose(
            call.route,
            q,
            view.cmp[0],
            lse,
            config=config,
            q_start=view.q_start,
            kv_len=S,
            scale=call.scale,
            documents=call.documents,
        )
    else:
        blocks = selection.choose(
            q,
            view.cmp[0],
            config=config,
            q_start=view.q_start,
            kv_len=S,
            scale=call.scale,
            first=None if call.documents is None else call.documents.first_BT,
            sink=None if call.sinks is None else call.sinks[:, BRANCHES.index("cmp")],
        )
    if checks.is_strict():
        checks.block_contents(blocks, S, config.sel_block, view.q_start)
    statistics.observe_selection(
        blocks, q_start=view.q_start, sel_block=config.sel_block, present=call.present
    )
    return blocks


def _count_keys(
    q: Tensor,
    view: View,
    config: NSAConfig,
    blocks: Tensor | None,
    keys_read: key_counts.KeysRead,
) -> None:
    if "cmp" in config.branches:
        count = partial(
            key_counts.compressed,
            q,
            view.num_cmp,
            block=config.cmp_block,
            stride=config.cmp_stride,
            q_start=view.q_start,
        )
        keys_read.later("cmp", count)
    if blocks is not None:
        count = partial(
            key_counts.selected,
            blocks,
            view.num_keys,
            q_start=view.q_start,
            sel_block=config.sel_block,
        )
        keys_read.later("sel", count)
    if "win" in config.branches:
        count = partial(
            key_counts.sliding,
            q,
            view.num_win,
            q_start=view.win_start,
            window=config.window,
        )
        keys_read.later("win", count)


def _needs_no_blocks(route: Route) -> bool:
    """Whether the selected branch attends to every key up to the query, and neither statistics nor
    strict mode reads its blocks.
    """
    return (
        route.branch("sel").implementation == DENSE
        and not statistics.is_collecting()
        and not checks.is_strict()
    )
