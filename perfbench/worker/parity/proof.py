"""Proof before timing: the cell's own path against the fp64 oracle, at its geometry, heads and
dtype.

Two checks. The attention function (output, and gradients when training), and the layer that the
timed model is made of, with its projections, RoPE and use of the gates. Both take the Route of the
timed cell: at a length where blocks compete where that gives it, so that one proof holds for every
length of a Route, else at the cell's own length.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nsa import dispatch, functional, oracle
from nsa.compression import param_shapes
from nsa.config import ModelConfig, NSAConfig
from nsa.functional import selected_attention
from perfbench.older_nsa import promise_of_sigmoid_gates
from perfbench.records import LengthProof, ParityLine
from perfbench.worker.parity import cache, layer, sizes
from perfbench.worker.parity.blocks import BlocksProof, Place, chosen, judge, num_malformed
from perfbench.worker.parity.claim import Claim
from perfbench.worker.parity.comparison import ParityComparison, Tensors
from perfbench.worker.parity.identities import Identities
from perfbench.worker.parity.judges import Attend
from perfbench.worker.parity.sizes import RouteDiffers
from perfbench.worker.workloads import block_patterns

NUM_ROWS = 64
MIN_ROWS = 8
MAX_LOGITS = 2**25  # of the sampled rows, in fp64: beyond, the judge takes longer than the cell
# The cell's own output of inputs, and the blocks that it chose for the rows.
_Own = tuple[Callable[[Tensors], Tensor], Tensor]


def prove(claim: Claim) -> ParityLine:
    """Compare on sampled rows; never raises for a wrong number, but records it.

    The line's ``own_length`` is true where the proof is at the timed cell's length and so for no
    other; its ``selection`` reports an option that does not choose the exact top n. RouteDiffers
    where no length that may be tried gives the timed Route.

    The proof of a cell whose steps go through a cache goes through one, too; that of the selected
    branch alone is on blocks of the cell's kind, without a layer.
    """
    tokens, request = sizes.same_route_at(claim)
    rows = _sampled_rows(claim.model.nsa, tokens, claim.seed)
    compare = ParityComparison(claim.dtype)
    for sequences in sizes.batches(claim, request, tokens):
        inputs = _inputs(claim, sequences, tokens)
        if claim.selected_alone:
            _check_selected(claim, request, inputs, rows, compare)
        elif request.startswith("dense"):
            _check_dense(claim, request, inputs, rows, compare)
        else:
            _check_sparse(claim, request, inputs, rows, compare)
    if not claim.selected_alone:
        layer_tokens, layer_request = sizes.layer_at(claim)
        compare.add("layer", *layer.outputs(claim, layer_request, layer_tokens))
    standard = sizes.standard_tokens_of(claim)
    return compare.line(tokens, len(rows), own_length=tokens != standard)


def prove_at_length(claim: Claim) -> LengthProof:
    """The attention function at the timed length and batch: sampled rows against the fp64 oracle,
    output and gradients, and what all rows together must keep (`identities`).

    Of a cell whose steps go through a cache the step itself is proved at its length instead.
    """
    begin, cell = time.monotonic(), claim.cell
    if claim.chunk is not None:
        return LengthProof(ok=None, absent="the step through a cache is proved as it is timed")
    rows = _sampled_rows(claim.model.nsa, cell.seq_len, claim.seed)
    fits = MAX_LOGITS // (cell.batch * cell.seq_len * claim.model.num_heads)
    if fits < len(rows):  # of many long sequences fewer rows each
        few = torch.linspace(0, len(rows) - 1, max(MIN_ROWS, fits)).round().long().unique()
        rows = rows[few]
    compare = ParityComparison(claim.dtype)
    inputs = _inputs(claim, cell.batch, cell.seq_len)
    branches: tuple[str, ...] = ("sel",)
    names: tuple[str, ...] = ("q", "k_sel", "v_sel")
    nsa: NSAConfig | None = None
    if claim.selected_alone:
        own = _check_selected(claim, cell.path, inputs, rows, compare)
    elif cell.is_dense:
        own = _check_dense(claim, cell.path, inputs, rows, compare)
    else:
        own = _check_sparse(claim, cell.path, inputs, rows, compare)
        branches, nsa = claim.model.nsa.branches, claim.model.nsa
        kept = (name for name in inputs if name[2:] not in {"cmp", "sel", "win"} - {*branches})
        names = tuple(kept)
    rest = {name: x for name, x in inputs.items() if name not in names}
    sums = Identities(
        lambda t: own({**rest, **t}), {name: inputs[name] for name in names}, branches, nsa
    )
    sums.check_outputs()
    if cell.has_backward:
        sums.check_gradients(rows)
    line = compare.line(cell.seq_len, len(rows), own_length=True)
    # A library's dense kernel may sum the gradients of keys in the cell's dtype: 1.1 of the
    # tolerance was seen of bf16 on a CPU.
    slack = 2.0 if cell.is_dense and claim.dtype != torch.float32 else 1.0
    line = line.model_copy(update={"tensors": {n: r / slack for n, r in line.tensors.items()}})
    ratios = {name: error / tolerance for name, (error, tolerance) in sums.ratios.items()}
    tensors = line.tensors | {name: round(min(ratio, 1e9), 4) for name, ratio in ratios.items()}
    worst = line.worst
    if ratios and max(ratios.values()) > max(line.tensors.values(), default=0.0):
        name = max(ratios, key=lambda one: ratios[one])
        error, tolerance = sums.ratios[name]
        worst = f"{name}: off by {error:.3g}, wanted at most {tolerance:.3g}"
    return LengthProof(
        ok=all(ratio <= 1 for ratio in tensors.values()),
        tokens=cell.seq_len,
        batch=cell.batch,
        rows=len(rows),
        tensors=tensors,
        worst=worst,
        seconds=time.monotonic() - begin,
    )


def _check_selected(
    claim: Claim, request: str, inputs: Tensors, rows: Tensor, compare: ParityComparison
) -> Callable[[Tensors], Tensor]:
    """Add rows of blocks that break the contract, the output, and where the cell has a backward the
    gradients of q, k and v; return what was compared.
    """
    model, cell, q = claim.model, claim.cell, inputs["q"]
    sel_block, tokens = model.nsa.sel_block, q.shape[1]
    blocks = selected_blocks(claim, q)
    on_rows = blocks[:, rows.to(blocks.device)].cpu()
    wrong_rows = num_malformed(on_rows, model.nsa, rows, tokens)
    compare.add_blocks(BlocksProof(wrong_rows, None, None, {}))

    def own(t: Tensors) -> Tensor:
        return selected_attention(
            t["q"],
            t["k_sel"],
            t["v_sel"],
            blocks,
            sel_block=sel_block,
            path=request,
            fa2=cell.fa2,
        )

    def judged(attend: Attend) -> Callable[[Tensors], Tensor]:
        keep = oracle.selected_mask(rows[None], on_rows, tokens, sel_block)
        return lambda t: attend(t["q"][:, rows], t["k_sel"], t["v_sel"], keep.to(t["q"].device))

    used = {name: inputs[name] for name in ("q", "k_sel", "v_sel")}
    run = layer.compiled_of(own) if claim.compiled else own
    compare.attention(run, judged, used, rows, list(used) if cell.has_backward else [])
    return run


def selected_blocks(claim: Claim, q: Tensor) -> Tensor:
    """Blocks int32 [B, T, G, N] of the cell's kind, made as a timed cell makes its own."""
    generator = torch.Generator(q.device).manual_seed(claim.seed)
    return block_patterns.chosen(
        claim.cell.selection,
        q,
        config=claim.model.nsa,
        num_kv_heads=claim.model.num_kv_heads,
        generator=generator,
    )


def _check_dense(
    claim: Claim, kind: str, inputs: Tensors, rows: Tensor, compare: ParityComparison
) -> Callable[[Tensors], Tensor]:
    q, scale = inputs["q"], claim.model.head_dim**-0.5
    taken = sizes.route_at(claim, kind, q.shape[1])
    keep = oracle.causal_mask(rows[None], q.shape[1])

    def cell(t: Tensors) -> Tensor:
        return dispatch.dense(taken, t["q"], t["k_sel"], t["v_sel"], scale=scale)

    def judged(attend: Attend) -> Callable[[Tensors], Tensor]:
        return lambda t: attend(t["q"][:, rows], t["k_sel"], t["v_sel"], keep.to(t["q"].device))

    own = layer.compiled_of(cell) if claim.compiled else cell
    wanted = ["q", "k_sel", "v_sel"] if claim.cell.has_backward else []
    compare.attention(own, judged, inputs, rows, wanted)
    return own


def _in_one_call(claim: Claim, request: str, inputs: Tensors, rows: Tensor) -> _Own:
    """Each sequence in one call."""
    model, q = claim.model, inputs["q"]
    options: dict[str, Any] = {"config": model.nsa, "path": request, "fa2": claim.cell.fa2}
    promised = promise_of_sigmoid_gates()
    blocks = chosen(q, *_kv_cmp(model, inputs), at=Place(0, q.shape[1], True), **options)[
        :, rows
    ].cpu()

    def cell(t: Tensors) -> Tensor:
        kv_cmp, kv_sel, kv_win = ((t[f"k_{b}"], t[f"v_{b}"]) for b in ("cmp", "sel", "win"))
        return functional.nsa_attention(
            t["q"], kv_cmp, kv_sel, kv_win, t["gates"], phi_params=_phi(t), **promised, **options
        )

    return cell, blocks


def _through_cache(claim: Claim, request: str, inputs: Tensors, rows: Tensor, chunk: int) -> _Own:
    """The same through a cache, ``chunk`` tokens at a time.

    RouteDiffers where a call for one of ``rows`` engages other counters than the timed Route's.
    """
    pieces = cache.pieces_of(chunk, rows.tolist(), inputs["q"].shape[1])
    ran = cache.attention(
        claim.model,
        inputs,
        pieces,
        _phi(inputs),
        path=request,
        fa2=claim.cell.fa2,
        rows=rows.tolist(),
        stepping=claim.stepping,
    )
    if ran.engaged != set(claim.timed.counters):
        got = (
            f"a chunk of {chunk} at the parity length engaged {sorted(ran.engaged)}, the timed"
            f" route is {claim.timed.counters}"
        )
        raise RouteDiffers(f"{got}: time a cell of the first, or name the path")
    return (lambda t: ran.o), ran.blocks[:, rows].cpu()


def _kv_cmp(model: ModelConfig, inputs: Tensors) -> tuple[Tensor, Tensor]:
    return layer.compressed_kv(
        inputs["k_cmp"], inputs["k_cmp"], inputs["v_cmp"], model, _phi(inputs)
    )


def _check_sparse(
    claim: Claim, request: str, inputs: Tensors, rows: Tensor, compare: ParityComparison
) -> Callable[[Tensors], Tensor]:
    if claim.chunk is None:
        own, blocks = _in_one_call(claim, request, inputs, rows)
    else:
        own, blocks = _through_cache(claim, request, inputs, rows, claim.chunk)
    if claim.compiled:
        own = layer.compiled_of(own)
    model, nsa, q = claim.model, claim.model.nsa, inputs["q"]
    tokens, k_cmp = q.shape[1], _kv_cmp(model, inputs)[0]
    fixed = replace(nsa, num_selected=nsa.num_selected_for(tokens), adaptive_num_selected=False)
    compare.add_blocks(
        judge(q[:, rows].cpu(), k_cmp.cpu(), blocks, config=fixed, rows=rows, kv_len=tokens)
    )

    def judged(attend: Attend) -> Callable[[Tensors], Tensor]:
        return lambda t: _gated(t, model, blocks, rows, attend)

    active = [f"{kind}_{branch}" for branch in nsa.branches for kind in ("k", "v")]
    learned = [name for name in inputs if name.startswith("phi_")]
    wanted = ["q", "gates", *active, *learned] if claim.cell.has_backward else []
    compare.attention(own, judged, inputs, rows, wanted)
    return own


def _phi(t: Tensors) -> layer.PhiParams:
    """The tensors of phi for K and for V, out of those named phi_k.NAME and phi_v.NAME."""
    k, v = (
        {name.removeprefix(which): x for name, x in t.items() if name.startswith(which)}
        for which in ("phi_k.", "phi_v.")
    )
    return k or None, v or None


def _gated(t: Tensors, model: ModelConfig, blocks: Tensor, rows: Tensor, attend: Attend) -> Tensor:
    """The branches over explicit masks, gated; ``attend`` is the fp64 reference or plain
    attention in the cell's dtype.
    """
    nsa, S = model.nsa, t["q"].shape[1]
    rows, blocks = rows.to(t["q"].device), blocks.to(t["q"].device)
    compressed = layer.compressed_kv(t["k_cmp"], t["k_cmp"], t["v_cmp"], model, _phi(t))
    masks = {
        "cmp": oracle.compressed_mask(
            rows[None], compressed[0].shape[1], nsa.cmp_block, nsa.cmp_stride
        ),
        "sel": oracle.selected_mask(rows[None], blocks, S, nsa.sel_block),
        "win": oracle.sliding_mask(rows[None], S, nsa.window),
    }
    sources = {"cmp": compressed, "sel": (t["k_sel"], t["v_sel"]), "win": (t["k_win"], t["v_win"])}
    q, gates = t["q"][:, rows], t["gates"][:, rows]
    outputs = [
        gates[..., i, None] * attend(q, *sources[b], masks[b])
        for i, b in enumerate(("cmp", "sel", "win"))
        if b in nsa.branches
    ]
    return torch.stack(outputs).sum(0)


def _inputs(claim: Claim, batch: int, tokens: int) -> Tensors:
    model, device, dtype = claim.model, claim.device, claim.dtype
    generator = torch.Generator().manual_seed(claim.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, *shape, generator=generator).to(
            device=device, dtype=dtype
        )

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
            phi[f"{which}.{name}"] = (scale * torch.randn(shape, generator=generator)).to(
                device=device, dtype=dtype
            )
    return {
        "q": normal(model.num_heads, model.head_dim),
        **kv,
        **phi,
        "gates": normal(model.num_heads, 3).sigmoid(),
    }


def _sampled_rows(nsa: NSAConfig, tokens: int, seed: int) -> Tensor:
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
