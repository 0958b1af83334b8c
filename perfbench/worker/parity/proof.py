"""Proof before timing: the cell's own path against the fp64 oracle, at its geometry, heads and
dtype.

Two checks. The attention function (output, and gradients when training), and the layer that the
timed model is made of, with its projections, RoPE and use of the gates. Both take the Route of the
timed cell: at a length where blocks compete where that gives it, so that one proof holds for every
length of a Route, else at the cell's own length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa import dispatch, functional, oracle
from nsa.compression import param_shapes
from nsa.config import NSAConfig
from nsa.functional import selected_attention
from perfbench.older_nsa import promise_of_sigmoid_gates
from perfbench.records import ParityLine
from perfbench.worker.parity import cache, layer, paged_cache, sizes
from perfbench.worker.parity.blocks import BlocksProof, Place, chosen, judge, num_malformed
from perfbench.worker.parity.claim import Claim
from perfbench.worker.parity.comparison import ParityComparison, Tensors
from perfbench.worker.parity.judges import Attend
from perfbench.worker.parity.own import Own, Recorded, gated, kv_cmp, phi_of
from perfbench.worker.parity.peers import check_peer, own_of_peer
from perfbench.worker.parity.sizes import RouteDiffers
from perfbench.worker.workloads import block_patterns

NUM_ROWS = 64
# A cell's own function, and its blocks, as in Own.
_Cell = tuple[Callable[[Tensors], Tensor], Callable[[], Tensor] | None]


def prove(claim: Claim) -> ParityLine:
    """Compare on sampled rows; never raises for a wrong number, but records it.

    The line's ``own_length`` is true where the proof is at the timed cell's length and so for no
    other; its ``selection`` reports an option that does not choose the exact top n. RouteDiffers
    where no length that may be tried gives the timed Route.

    The proof of a cell whose steps go through a cache goes through one, too; that of the selected
    branch alone is on blocks of the cell's kind, without a layer; that of a peer has none either.
    """
    tokens, request = sizes.same_route_at(claim)
    rows = sampled_rows(claim.model.nsa, tokens, claim.seed)
    compare = ParityComparison(claim.dtype)
    for sequences in sizes.batches(claim, request, tokens):
        check(claim, request, inputs_of(claim, sequences, tokens), rows, compare)
    if not claim.selected_alone and claim.peer is None:
        layer_tokens, layer_request = sizes.layer_at(claim)
        compare.add("layer", *layer.outputs(claim, layer_request, layer_tokens))
    standard = sizes.standard_tokens_of(claim)
    return compare.line(tokens, len(rows), own_length=tokens != standard)


def check(
    claim: Claim, request: str, inputs: Tensors, rows: Tensor, compare: ParityComparison
) -> Own:
    """Add what ``request`` gives of ``inputs`` on ``rows``: its blocks, its output, and where the
    cell has a backward its gradients by an upstream gradient that is zero in other rows; return
    what was compared.
    """
    if claim.peer is not None:
        return check_peer(claim, claim.peer, inputs, rows, compare)
    if claim.selected_alone:
        return _check_selected(claim, request, inputs, rows, compare)
    if request.startswith("dense"):
        return _check_dense(claim, request, inputs, rows, compare)
    return _check_sparse(claim, request, inputs, rows, compare)


def own_of(claim: Claim, request: str, inputs: Tensors, rows: Tensor) -> Own:
    """What ``request`` computes of such inputs, compiled where the cell is; through a cache for
    ``rows`` of a cell that has one.
    """
    if claim.peer is not None:
        return own_of_peer(claim, claim.peer)
    if claim.selected_alone:
        cell, blocks = _selected(claim, request, inputs["q"])
    elif request.startswith("dense"):
        cell, blocks = (
            _dense(claim, request, inputs["q"].shape[1])
            if claim.chunk is None
            else _dense_through_cache(claim, request, inputs, rows, claim.chunk)
        )
    elif claim.chunk is None:
        cell, blocks = _in_one_call(claim, request, inputs)
    else:
        cell, blocks = _through_cache(claim, request, inputs, rows, claim.chunk)
    return Own(cell, blocks, Recorded(layer.compiled_of(cell) if claim.compiled else cell))


def _check_selected(
    claim: Claim, request: str, inputs: Tensors, rows: Tensor, compare: ParityComparison
) -> Own:
    """Rows of blocks that break the contract, the output, and the gradients of q, k and v."""
    nsa, tokens = claim.model.nsa, inputs["q"].shape[1]
    own = own_of(claim, request, inputs, rows)
    wanted = ("q", "k_sel", "v_sel") if claim.cell.has_backward else ()
    used = {name: inputs[name] for name in ("q", "k_sel", "v_sel")}
    got = compare.evaluated(own.run, used, rows, wanted)
    on_rows = _on_rows(own, rows)
    wrong_rows = num_malformed(on_rows, nsa, rows, tokens)
    compare.add_blocks(BlocksProof(wrong_rows, None, None, {}))

    def judged(attend: Attend) -> Callable[[Tensors], Tensor]:
        keep = oracle.selected_mask(rows[None], on_rows, tokens, nsa.sel_block)
        return lambda t: attend(t["q"][:, rows], t["k_sel"], t["v_sel"], keep.to(t["q"].device))

    compare.attention(got, judged, used, rows, wanted)
    return own


def _on_rows(own: Own, rows: Tensor) -> Tensor:
    """The blocks of ``rows`` alone, of the last call, on the CPU."""
    blocks = own.last_blocks()
    assert blocks is not None
    return blocks[:, rows.to(blocks.device)].cpu()


def _selected(claim: Claim, request: str, q: Tensor) -> _Cell:
    blocks = selected_blocks(claim, q)

    def cell(t: Tensors) -> Tensor:
        return selected_attention(
            t["q"],
            t["k_sel"],
            t["v_sel"],
            blocks,
            sel_block=claim.model.nsa.sel_block,
            path=request,
            fa2=claim.cell.fa2,
        )

    return cell, lambda: blocks


def selected_blocks(claim: Claim, q: Tensor) -> Tensor:
    """Blocks int32 [B, T, G, N] of the cell's kind, made as a timed cell makes its own."""
    generator = torch.Generator(q.device).manual_seed(claim.seed)
    return block_patterns.chosen(
        claim.cell.selection,
        q,
        config=claim.model.nsa,
        num_kv_heads=claim.model.num_kv_heads,
        generator=generator,
        trained=claim.trained,
    )


def _check_dense(
    claim: Claim, kind: str, inputs: Tensors, rows: Tensor, compare: ParityComparison
) -> Own:
    keep = oracle.causal_mask(rows[None], inputs["q"].shape[1])

    def judged(attend: Attend) -> Callable[[Tensors], Tensor]:
        return lambda t: attend(t["q"][:, rows], t["k_sel"], t["v_sel"], keep.to(t["q"].device))

    own = own_of(claim, kind, inputs, rows)
    wanted = ["q", "k_sel", "v_sel"] if claim.cell.has_backward else []
    got = compare.evaluated(own.run, inputs, rows, wanted)
    compare.attention(got, judged, inputs, rows, wanted)
    return own


def _dense(claim: Claim, kind: str, tokens: int) -> _Cell:
    taken, scale = sizes.route_at(claim, kind, tokens), claim.model.head_dim**-0.5

    def cell(t: Tensors) -> Tensor:
        return dispatch.dense(taken, t["q"], t["k_sel"], t["v_sel"], scale=scale)

    return cell, None


def _dense_through_cache(
    claim: Claim, kind: str, inputs: Tensors, rows: Tensor, chunk: int
) -> _Cell:
    """The same through a cache, ``chunk`` tokens at a time; RouteDiffers as `_through_cache`."""
    pieces = cache.pieces_of(chunk, rows.tolist(), inputs["q"].shape[1])
    o, engaged = cache.dense_attention(
        claim.model, inputs, pieces, kind=kind, stepping=claim.stepping
    )
    _check_engaged(claim, chunk, engaged)
    return (lambda t: o), None


def _in_one_call(claim: Claim, request: str, inputs: Tensors) -> _Cell:
    """Each sequence in one call."""
    model, q = claim.model, inputs["q"]
    options: dict[str, Any] = {"config": model.nsa, "path": request, "fa2": claim.cell.fa2}
    promised = promise_of_sigmoid_gates()

    def cell(t: Tensors) -> Tensor:
        kv_cmp, kv_sel, kv_win = ((t[f"k_{b}"], t[f"v_{b}"]) for b in ("cmp", "sel", "win"))
        o: Tensor = functional.nsa_attention(
            t["q"], kv_cmp, kv_sel, kv_win, t["gates"], phi_params=phi_of(t), **promised, **options
        )
        return o

    at = Place(0, q.shape[1], is_whole_sequence=True)
    return cell, lambda: chosen(q, *kv_cmp(model, inputs), at=at, **options)


def _through_cache(claim: Claim, request: str, inputs: Tensors, rows: Tensor, chunk: int) -> _Cell:
    """The same through a cache, ``chunk`` tokens at a time.

    RouteDiffers where a call for one of ``rows`` engages other counters than the timed Route's.
    """
    pieces = cache.pieces_of(chunk, rows.tolist(), inputs["q"].shape[1])
    through = paged_cache.attention if claim.in_pages else cache.attention
    ran = through(
        claim.model,
        inputs,
        pieces,
        phi_of(inputs),
        path=request,
        fa2=claim.cell.fa2,
        rows=rows.tolist(),
        stepping=claim.stepping,
    )
    _check_engaged(claim, chunk, ran.engaged)
    return (lambda t: ran.o), (lambda: ran.blocks)


def _check_engaged(claim: Claim, chunk: int, engaged: frozenset[str]) -> None:
    if engaged != set(claim.timed.counters):
        got = (
            f"a chunk of {chunk} at the parity length engaged {sorted(engaged)}, the timed"
            f" route is {claim.timed.counters}"
        )
        raise RouteDiffers(f"{got}: time a cell of the first, or name the path")


def _check_sparse(
    claim: Claim, request: str, inputs: Tensors, rows: Tensor, compare: ParityComparison
) -> Own:
    own = own_of(claim, request, inputs, rows)
    model, nsa, q = claim.model, claim.model.nsa, inputs["q"]
    active = [f"{kind}_{branch}" for branch in nsa.branches for kind in ("k", "v")]
    learned = [name for name in inputs if name.startswith("phi_")]
    wanted = ["q", "gates", *active, *learned] if claim.cell.has_backward else []
    got = compare.evaluated(own.run, inputs, rows, wanted)
    blocks = _on_rows(own, rows)
    tokens, k_cmp = q.shape[1], kv_cmp(model, inputs)[0]
    fixed = replace(nsa, num_selected=nsa.num_selected_for(tokens), adaptive_num_selected=False)
    compare.add_blocks(
        judge(q[:, rows].cpu(), k_cmp.cpu(), blocks, config=fixed, rows=rows, kv_len=tokens)
    )

    def judged(attend: Attend) -> Callable[[Tensors], Tensor]:
        return lambda t: gated(t, model, blocks, rows, attend)

    compare.attention(got, judged, inputs, rows, wanted)
    return own


def inputs_of(claim: Claim, batch: int, tokens: int) -> Tensors:
    """Drawn on the device: a CPU takes two seconds for the 200 million numbers of 131,072
    tokens.
    """
    model, device, dtype = claim.model, claim.device, claim.dtype
    generator = torch.Generator(device).manual_seed(claim.seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def normal(*shape: int) -> Tensor:
        return drawn(batch, tokens, *shape).to(dtype)

    kv: Tensors = {}
    branches = ("cmp", "sel", "win")
    for which, dim in (("k", model.head_dim), ("v", model.value_dim)):
        # As a layer's: slices of one projection.
        projected = normal(len(branches) * model.num_kv_heads, dim).chunk(len(branches), dim=2)
        kv |= {f"{which}_{branch}": x for branch, x in zip(branches, projected, strict=True)}
    phi = {}
    for which, dim in (("phi_k", model.head_dim), ("phi_v", model.value_dim)):
        for name, shape in param_shapes(model.nsa, dim).items():
            scale = 1.0 if name == "position" else shape[1] ** -0.5
            phi[f"{which}.{name}"] = (scale * drawn(*shape)).to(dtype)
    return {
        "q": normal(model.num_heads, model.head_dim),
        **kv,
        **phi,
        "gates": normal(model.num_heads, 3).sigmoid(),
    }


def sampled_rows(nsa: NSAConfig, tokens: int, seed: int) -> Tensor:
    """64 rows, ascending: the first, the last, both sides of every kind of boundary, and random
    ones.
    """
    edges = (
        nsa.cmp_stride,
        nsa.cmp_block,
        nsa.sel_block,
        nsa.window,
        nsa.num_selected * nsa.sel_block,
        tokens,
    )
    wanted = {0} | {
        row for edge in edges for row in (edge - 2, edge - 1, edge, edge + 1) if 0 <= row < tokens
    }
    random_order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed)).tolist()
    for row in random_order:
        if len(wanted) >= min(NUM_ROWS, tokens):
            break
        wanted.add(row)
    return torch.tensor(sorted(wanted))
