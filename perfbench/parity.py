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

from nsa import capability, dispatch, functional, oracle, settings
from nsa.compression import param_shapes
from nsa.config import ModelConfig, NSAConfig
from nsa.routing import SPECS, Path, Problem, Route, route, route_dense
from perfbench import (
    attention_only,
    blocks_parity,
    cache_parity,
    calls,
    layer_parity,
    nsa_version,
    selected_parity,
)
from perfbench.deviation import Comparison, Tensors, eager, exact
from perfbench.result import ParityLine

NUM_ROWS = 64
NEAR_TIE = blocks_parity.NEAR_TIE
Attend = layer_parity.Attend
_Own = tuple[
    Callable[[Tensors], Tensor], Tensor
]  # the cell's own output of inputs, and the blocks that it chose for the rows


class RouteDiffers(Exception):
    """The parity problem would take another Route than the timed cell: its proof would prove
    nothing.
    """


def check(
    model: ModelConfig,
    timed: Route,
    *,
    path: str,
    fa2: str,
    dtype: torch.dtype,
    device: str,
    train: bool,
    seed: int,
    tokens: int | None = None,
    chunk: int | None = None,
    compiled: bool = False,
    selection: str | None = None,
    stepping: bool = False,
    batch: int = 1,
) -> ParityLine:
    """Compare on sampled rows; never raises for a wrong number, only says so.

    ``tokens``: those of the timed cell's sequences.

    ``chunk``: tokens that the timed cell adds to a cache at a time, 1 where it decodes; the proof
    then goes through a cache, too.
    ``batch``: the timed cell's sequences, by which a decode step's kernels go. ``stepping``: each
    single token by a step of static shapes (`nsa.decode`), as a captured decode step takes it.
    ``compiled``: what is compared is compiled, as the timed cell's model is. ``selection``: the
    timed cell is the selected branch alone, on blocks of this kind; so is the proof then, without a
    layer. The line's ``own_length`` is true where the proof is at that length and so for no other;
    its ``selection`` reports an option that does not choose the exact top n. RouteDiffers where no
    length that may be tried gives the timed Route.
    """
    alone, standard = selection is not None, _standard(model, timed, chunk)
    at_tokens, asked = _same_route_at(
        model,
        timed,
        path=path,
        fa2=fa2,
        dtype=dtype,
        device=device,
        tokens=tokens,
        alone=alone,
        chunk=chunk,
    )
    rows = _sampled_rows(model.nsa, at_tokens, seed)
    compare = Comparison(dtype)
    for sequences in _batches(model, timed, asked, at_tokens, chunk, batch, alone=alone):
        inputs = _inputs(model, sequences, at_tokens, dtype, device, seed)
        if selection is not None:
            blocks = selected_parity.blocks_of(selection, inputs["q"], model, seed)
            selected_parity.check(model, blocks, asked, fa2, inputs, rows, train, compare, compiled)
        elif asked.startswith("dense"):
            _check_dense(model, asked, inputs, rows, train, compare, compiled)
        else:
            if chunk is None:
                own = _whole(model, asked, fa2, inputs, rows)
            else:
                own = _cached(model, timed, asked, fa2, inputs, rows, chunk, stepping)
            if compiled:
                own = (layer_parity.compiled_of(own[0]), own[1])
            _check_sparse(model, own, inputs, rows, train, compare)
    if alone:
        return compare.line(at_tokens, len(rows), own_length=at_tokens != standard)
    layer_tokens, layer_asked = _layer_at(
        model, timed, path=path, fa2=fa2, dtype=dtype, device=device, tokens=tokens
    )
    got, truth, honest = layer_parity.outputs(
        model,
        path=layer_asked,
        fa2=fa2,
        tokens=layer_tokens,
        dtype=dtype,
        device=device,
        seed=seed,
        exact=exact,
        eager=eager,
        chunk=chunk,
        compiled=compiled,
        stepping=stepping,
    )
    compare.add("layer", got, truth, honest)
    return compare.line(at_tokens, len(rows), own_length=at_tokens != standard)


def standard_tokens(nsa: NSAConfig) -> int:
    """Beyond the length where everything is selected, and no multiple of anything."""
    return (nsa.num_selected + 4) * nsa.sel_block + 1


def _batch(asked: str) -> int:
    """Two sequences, so that batch rows cannot be mixed up unseen, and that v2 needs more than one
    workspace (m7c_125m, bf16).
    """
    return 1 if asked in tuple(Path) and SPECS[Path(asked)].slow else 2


def _batches(
    model: ModelConfig,
    timed: Route,
    asked: str,
    tokens: int,
    chunk: int | None,
    batch: int,
    *,
    alone: bool = False,
) -> tuple[int, ...]:
    """Sequences of each proof.

    Path triton serves large calls by other kernels than small ones, so there is a proof of each
    kind.

    A call with a cache has one size, by which it goes: chunks that never make a large one need no
    proof of it, and a decode step, which has few rows for any number of sequences, is proved with
    as many as the timed ``batch``. ``alone``: the selected branch is, which makes no descriptors.
    """
    few = _batch(asked)
    if not any(Path.TRITON in (branch.implementation, branch.kernel) for branch in timed.branches):
        return (few,)
    if chunk == 1:
        return (few,) if few == batch else (few, batch)
    longest = (
        tokens
        if chunk is None
        else max(end - begin for begin, end in cache_parity.pieces_of(chunk, [], tokens))
    )
    copied = 0 if alone else nsa_version.copy_min_elements()
    sizes = (
        (nsa_version.sort_min_rows(), model.num_kv_heads),
        (copied, model.num_heads * model.head_dim),
    )
    # (sequences from which a proof is a large call, whether a timed call may be one)
    large = [
        (-(-least // (longest * each)), chunk is None or batch * chunk * each >= least)
        for least, each in sizes
        if least
    ]
    reached, never = (
        [n - beyond for n, may_be in large if may_be is reaches]
        for reaches, beyond in ((True, 0), (False, 1))
    )
    wanted = {min(few, n - 1) for n, _ in large} | {max(few, n) for n in reached}
    return tuple(sorted({n for n in (min([n, *never]) for n in wanted) if n > 0}))


def _standard(model: ModelConfig, timed: Route, chunk: int | None) -> int:
    """Tokens of the usual proof: `standard_tokens`, or where path triton decodes, so many that its
    compressed keys are split.
    """
    usual = standard_tokens(model.nsa)
    if chunk != 1 or not any(branch.implementation == Path.TRITON for branch in timed.branches):
        return usual
    if (least := nsa_version.least_keys_of_a_split()) is None:
        return usual
    return max(usual, 2 * least * model.nsa.cmp_stride + model.nsa.cmp_block + 1)


def _same_route_at(
    model: ModelConfig,
    timed: Route,
    *,
    path: str,
    fa2: str,
    dtype: torch.dtype,
    device: str,
    tokens: int | None,
    alone: bool = False,
    chunk: int | None = None,
) -> tuple[int, str]:
    """(tokens, request) of a proof that takes the timed Route; RouteDiffers, with all that was
    tried, where none does.

    ``alone``: of the selected branch alone.
    """
    standard = _standard(model, timed, chunk)
    tries = [(standard, asked) for asked in (_by_name(model, timed, path), path)] + (
        [(tokens, path)] if tokens is not None else []
    )
    seen = []
    for at, asked in dict.fromkeys(tries):
        counters = _route(model, asked, fa2, dtype, device, at, alone).counters
        if counters == timed.counters:
            return at, asked
        seen.append(f"{asked} at {at} tokens runs {counters}")
    raise RouteDiffers(
        f"parity would prove another route ({'; '.join(seen)}) than the timed {timed.counters}:"
        " time a cell of one of those"
    )


def _layer_at(
    model: ModelConfig,
    timed: Route,
    *,
    path: str,
    fa2: str,
    dtype: torch.dtype,
    device: str,
    tokens: int | None,
) -> tuple[int, str]:
    """(tokens, request) of the layer's proof, at a length where every block is selected.

    Where no such length gives the timed Route (a window longer than that, of `auto`), the selected
    branch is the timed one, and the window's kernel has the proof of the attention function alone.
    """
    longest, by_name = layer_parity.tokens_selecting_all(model.nsa), _by_name(model, timed, path)
    lengths = [longest] + ([tokens] if tokens is not None and tokens <= longest else [])
    for at in lengths:
        for asked in (by_name, path):
            if _route(model, asked, fa2, dtype, device, at).counters == timed.counters:
                return at, asked
    return longest, by_name


def _by_name(model: ModelConfig, timed: Route, path: str) -> str:
    """`auto` and `adaptive` depend on the length: the request by name for what the timed cell
    takes, where that is a path.
    """
    taken = (
        timed.branch("sel").implementation
        if path in ("auto", "adaptive") and "sel" in model.nsa.branches
        else path
    )
    return taken if taken in tuple(Path) else path


def _route(
    model: ModelConfig,
    asked: str,
    fa2: str,
    dtype: torch.dtype,
    device: str,
    tokens: int,
    alone: bool = False,
) -> Route:
    here, problem = (
        capability.probe(device),
        Problem.of(model, batch=_batch(asked), tokens=tokens, dtype=_name(dtype)),
    )
    if asked.startswith("dense"):
        return route_dense(asked, problem, here)
    return route(
        settings.current().request(asked, fa2),
        calls.of_selected(problem) if alone else problem,
        here,
    )


def _check_dense(
    model: ModelConfig,
    kind: str,
    inputs: Tensors,
    rows: Tensor,
    train: bool,
    compare: Comparison,
    compiled: bool,
) -> None:
    q = inputs["q"]
    taken = _route(model, kind, "n/a", q.dtype, str(q.device), q.shape[1])
    keep = oracle.causal_mask(rows[None], q.shape[1])

    def cell(t: Tensors) -> Tensor:
        return dispatch.dense(taken, t["q"], t["k_sel"], t["v_sel"], scale=model.head_dim**-0.5)

    def judged(attend: Attend) -> Callable[[Tensors], Tensor]:
        return lambda t: attend(t["q"][:, rows], t["k_sel"], t["v_sel"], keep.to(t["q"].device))

    own = layer_parity.compiled_of(cell) if compiled else cell
    compare.attention(own, judged, inputs, rows, ["q", "k_sel", "v_sel"] if train else [])


def _whole(model: ModelConfig, asked: str, fa2: str, inputs: Tensors, rows: Tensor) -> _Own:
    """Whole sequences in one call."""
    q = inputs["q"]
    asked_of: dict[str, Any] = {"config": model.nsa, "path": asked, "fa2": fa2}
    promised = attention_only.SIGMOID_GATES
    blocks = blocks_parity.chosen(
        q, *_kv_cmp(model, inputs), q_start=0, kv_len=q.shape[1], whole=True, **asked_of
    )[:, rows].cpu()

    def cell(t: Tensors) -> Tensor:
        kv_cmp, kv_sel, kv_win = ((t[f"k_{b}"], t[f"v_{b}"]) for b in ("cmp", "sel", "win"))
        return functional.nsa_attention(
            t["q"], kv_cmp, kv_sel, kv_win, t["gates"], phi_params=_phi(t), **promised, **asked_of
        )

    return cell, blocks


def _cached(
    model: ModelConfig,
    timed: Route,
    asked: str,
    fa2: str,
    inputs: Tensors,
    rows: Tensor,
    chunk: int,
    stepping: bool,
) -> _Own:
    """The same through a cache; RouteDiffers where a call for one of ``rows`` engages other
    counters than the timed Route's.
    """
    pieces = cache_parity.pieces_of(chunk, rows.tolist(), inputs["q"].shape[1])
    ran = cache_parity.attention(
        model,
        inputs,
        pieces,
        _phi(inputs),
        path=asked,
        fa2=fa2,
        rows=rows.tolist(),
        stepping=stepping,
    )
    if ran.engaged != set(timed.counters):
        got = (
            f"a chunk of {chunk} at the parity length engaged {sorted(ran.engaged)}, the timed"
            f" route is {timed.counters}"
        )
        raise RouteDiffers(f"{got}: time a cell of the first, or name the path")
    return (lambda t: ran.o), ran.blocks[:, rows].cpu()


def _kv_cmp(model: ModelConfig, inputs: Tensors) -> tuple[Tensor, Tensor]:
    return layer_parity.compressed_kv(
        inputs["k_cmp"], inputs["k_cmp"], inputs["v_cmp"], model, _phi(inputs)
    )


def _check_sparse(
    model: ModelConfig, own: _Own, inputs: Tensors, rows: Tensor, train: bool, compare: Comparison
) -> None:
    nsa, q = model.nsa, inputs["q"]
    tokens, (cell, blocks), k_cmp = q.shape[1], own, _kv_cmp(model, inputs)[0]
    fixed = replace(nsa, num_selected=nsa.num_selected_for(tokens), adaptive_num_selected=False)
    compare.add_blocks(
        blocks_parity.judge(
            q[:, rows].cpu(), k_cmp.cpu(), blocks, config=fixed, rows=rows, kv_len=tokens
        )
    )

    def judged(attend: Attend) -> Callable[[Tensors], Tensor]:
        return lambda t: _gated(t, model, blocks, rows, attend)

    active = [f"{kind}_{branch}" for branch in nsa.branches for kind in ("k", "v")]
    learned = [name for name in inputs if name.startswith("phi_")]
    compare.attention(
        cell, judged, inputs, rows, ["q", "gates", *active, *learned] if train else []
    )


def _phi(t: Tensors) -> layer_parity.PhiParams:
    """The tensors of phi for K and for V, out of those named phi_k.NAME and phi_v.NAME."""
    k, v = (
        {name.removeprefix(which): x for name, x in t.items() if name.startswith(which)}
        for which in ("phi_k.", "phi_v.")
    )
    return k or None, v or None


def _gated(t: Tensors, model: ModelConfig, blocks: Tensor, rows: Tensor, attend: Attend) -> Tensor:
    """The branches over explicit masks, gated; ``attend`` is the fp64 oracle or its eager twin in
    the cell's dtype.
    """
    nsa, S = model.nsa, t["q"].shape[1]
    rows, blocks = rows.to(t["q"].device), blocks.to(t["q"].device)
    compressed = layer_parity.compressed_kv(t["k_cmp"], t["k_cmp"], t["v_cmp"], model, _phi(t))
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


def _inputs(
    model: ModelConfig, batch: int, tokens: int, dtype: torch.dtype, device: str, seed: int
) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, tokens, *shape, generator=generator).to(
            device=device, dtype=dtype
        )

    kv: Tensors = {}
    branches = ("cmp", "sel", "win")
    for which, dim in (
        ("k", model.head_dim),
        ("v", model.value_dim),
    ):  # as a layer's: slices of one projection
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
