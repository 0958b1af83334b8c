"""Proof before timing: the cell's own path against the fp64 oracle, at its geometry, heads and dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nsa import capability, dispatch, functional, oracle, settings
from nsa.config import ModelConfig, NSAConfig
from nsa.routing import Problem, Route, plan, route_dense
from perfbench.result import ParityLine

NUM_ROWS = 64
NEAR_TIE = 1e-5  # sets may differ where the last chosen and the next score are closer than this, relatively
Tensors = dict[str, Tensor]


class RouteDiffers(Exception):
    """The parity problem would take another Route than the timed cell: its proof would prove nothing."""


def check(model: ModelConfig, timed: Route, *, path: str, fa2: str, dtype: torch.dtype, device: str, train: bool, seed: int) -> ParityLine:
    """Compare output (and gradients when training) on sampled rows; never raises for a wrong number, only says so."""
    nsa = model.nsa
    tokens = (nsa.num_selected + 4) * nsa.sel_block + 1  # beyond the length where everything is selected
    rows = _sampled_rows(nsa, tokens, seed)
    inputs = _inputs(model, tokens, dtype, device, seed)
    if path.startswith("dense"):
        return _check_dense(model, path, timed, inputs, rows, dtype, train)
    return _check_sparse(model, path, fa2, timed, inputs, rows, dtype, train)


def _check_dense(model: ModelConfig, kind: str, timed: Route, inputs: Tensors, rows: Tensor, dtype: torch.dtype, train: bool) -> ParityLine:
    q = inputs["q"]
    route = route_dense(kind, Problem.of(model, batch=1, tokens=q.shape[1], dtype=_name(dtype)), capability.probe(str(q.device)))
    _same_route(route, timed)
    names = ["q", "k_sel", "v_sel"]
    keep = oracle.causal_mask(rows[None], q.shape[1])

    def cell(t: Tensors) -> Tensor:
        return dispatch.dense(route, t["q"], t["k_sel"], t["v_sel"], scale=model.head_dim**-0.5)

    def judged(attend: Callable[..., Tensor]) -> Callable[[Tensors], Tensor]:
        return lambda t: attend(t["q"][:, rows], t["k_sel"], t["v_sel"], keep.to(t["q"].device))

    return _compare(cell, judged, {name: inputs[name] for name in names}, rows, dtype, train, {})


def _check_sparse(
    model: ModelConfig, path: str, fa2: str, timed: Route, inputs: Tensors, rows: Tensor, dtype: torch.dtype, train: bool
) -> ParityLine:
    nsa, q = model.nsa, inputs["q"]
    # `auto` and `adaptive` depend on the length: ask by name for what the timed cell takes.
    asked = timed.branch("sel").implementation if path in ("auto", "adaptive") and "sel" in nsa.branches else path
    route = plan(
        settings.current().request(asked, fa2),
        model,
        batch=1,
        tokens=q.shape[1],
        dtype=_name(dtype),
        capability=capability.probe(str(q.device)),
    )
    _same_route(route, timed)
    k_cmp = functional.compress(inputs["k_cmp"], config=nsa)
    blocks = functional.select_blocks(q, k_cmp, config=nsa)[:, rows].cpu()
    truth, gap = oracle.select(q[:, rows].cpu(), k_cmp.cpu(), config=nsa, kv_len=q.shape[1], positions=rows[None])
    wrong = (blocks.long() != truth).any(-1) & (gap > NEAR_TIE)
    extra = {"blocks": float(wrong.sum()) * 2}  # one wrong row is twice what is allowed

    def cell(t: Tensors) -> Tensor:
        kv_cmp, kv_sel, kv_win = ((t[f"k_{b}"], t[f"v_{b}"]) for b in ("cmp", "sel", "win"))
        return functional.nsa_attention(t["q"], kv_cmp, kv_sel, kv_win, t["gates"], config=nsa, path=asked, fa2=fa2)

    def judged(attend: Callable[..., Tensor]) -> Callable[[Tensors], Tensor]:
        return lambda t: _gated(t, nsa, blocks, rows, attend)

    return _compare(cell, judged, inputs, rows, dtype, train, extra)


def _gated(t: Tensors, nsa: NSAConfig, blocks: Tensor, rows: Tensor, attend: Callable[..., Tensor]) -> Tensor:
    """The three branches over explicit masks, gated; ``attend`` is the fp64 oracle or its eager twin in the cell's dtype."""
    rows, blocks = rows.to(t["q"].device), blocks.to(t["q"].device)
    position, S = rows[None], t["q"].shape[1]
    compressed = [oracle.compress_mean(t[name], nsa.cmp_block, nsa.cmp_stride).to(t["q"].dtype) for name in ("k_cmp", "v_cmp")]
    masks = {
        "cmp": oracle.compressed_mask(position, compressed[0].shape[1], nsa.cmp_block, nsa.cmp_stride),
        "sel": oracle.selected_mask(position, blocks, S, nsa.sel_block),
        "win": oracle.sliding_mask(position, S, nsa.window),
    }
    sources = {"cmp": compressed, "sel": (t["k_sel"], t["v_sel"]), "win": (t["k_win"], t["v_win"])}
    q, gates = t["q"][:, rows], t["gates"][:, rows]
    outputs = [gates[..., i, None] * attend(q, *sources[b], masks[b]) for i, b in enumerate(("cmp", "sel", "win")) if b in nsa.branches]
    return torch.stack(outputs).sum(0)


def _exact(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    return oracle.attention(q, k, v, keep)[0]


def _eager(q: Tensor, k: Tensor, v: Tensor, keep: Tensor) -> Tensor:
    """Plain softmax attention in the inputs' dtype: how far an honest implementation may be off."""
    heads = q.shape[2] // k.shape[2]
    logits = torch.einsum("btghd,bsgd->bghts", q.unflatten(2, (-1, heads)), k) * q.shape[-1] ** -0.5
    keep = keep[:, :, None]
    p = logits.masked_fill(~keep, -torch.inf).softmax(-1).masked_fill(~keep.any(-1, keepdim=True), 0.0)
    return torch.einsum("bghts,bsgd->btghd", p, v).flatten(2, 3)


def _compare(
    cell: Callable[[Tensors], Tensor], judged: Callable[..., Callable[[Tensors], Tensor]], inputs: Tensors, rows: Tensor,
    dtype: torch.dtype, train: bool, extra: dict[str, float],
) -> ParityLine:  # fmt: skip
    weight = torch.randn(1, len(rows), *_output_shape(inputs), generator=torch.Generator().manual_seed(7))
    got = _evaluate(lambda t: cell(t)[:, rows], inputs, dtype, weight, train)
    # The judge sits on the CPU: no kernel is shared with what it judges, and none has to be loaded for it.
    truth = _evaluate(judged(_exact), {name: x.cpu() for name, x in inputs.items()}, torch.float64, weight, train)
    honest = _evaluate(judged(_eager), inputs, dtype, weight, train) if dtype != torch.float32 else {}
    ratios, errors = dict(extra), {}
    for name, exact in truth.items():
        size = exact.abs().max().item()
        tolerance = 1e-5 * max(1.0, size)
        if dtype != torch.float32:
            rounding = 2 * (honest[name] - exact).abs().max().item() + torch.finfo(dtype).eps / 2 * size
            tolerance = max(tolerance, rounding)  # a gradient of exactly 0 may come out as the rest of an fp32 subtraction
        difference = (got[name] - exact).abs()
        errors[name] = (difference.max().item(), tolerance)
        finite = bool(torch.isfinite(got[name]).all())
        ratios[name] = min(difference.max().item() / tolerance, 1e9) if finite and tolerance > 0 else 1e9
    worst = max(ratios, key=lambda name: ratios[name])
    error, tolerance = errors.get(worst, (ratios[worst], 1.0))
    return ParityLine(
        ok=all(ratio <= 1 for ratio in ratios.values()),
        tokens=inputs["q"].shape[1],
        rows=len(rows),
        max_error=min(error, 1e9) if error == error else 1e9,
        tolerance=tolerance,
        tensors={name: round(ratio, 4) for name, ratio in ratios.items()},
        worst=f"{worst}: error / tolerance {ratios[worst]:.3g}",
    )


def _evaluate(fn: Callable[[Tensors], Tensor], inputs: Tensors, dtype: torch.dtype, weight: Tensor, train: bool) -> Tensors:
    leaves = {name: x.detach().to(dtype).requires_grad_(train) for name, x in inputs.items()}
    o = fn(leaves)
    results = {"o": o}
    if train:
        grads = torch.autograd.grad(o, list(leaves.values()), weight.to(o))
        results |= {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return {name: x.detach().cpu().double() for name, x in results.items()}


def _inputs(model: ModelConfig, tokens: int, dtype: torch.dtype, device: str, seed: int) -> Tensors:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(1, tokens, *shape, generator=generator).to(device=device, dtype=dtype)

    kv = {}
    for branch in ("cmp", "sel", "win"):
        kv[f"k_{branch}"] = normal(model.num_kv_heads, model.head_dim)
        kv[f"v_{branch}"] = normal(model.num_kv_heads, model.value_dim)
    return {"q": normal(model.num_heads, model.head_dim), **kv, "gates": normal(model.num_heads, 3).sigmoid()}


def _output_shape(inputs: Tensors) -> tuple[int, int]:
    return inputs["q"].shape[2], inputs["v_sel"].shape[3]


def _sampled_rows(nsa: NSAConfig, tokens: int, seed: int) -> Tensor:
    """64 rows, ascending: the first, the last, both sides of every kind of boundary, and random ones."""
    edges = (nsa.cmp_stride, nsa.cmp_block, nsa.sel_block, nsa.window, nsa.num_selected * nsa.sel_block, tokens)
    wanted = {0} | {row for edge in edges for row in (edge - 2, edge - 1, edge, edge + 1) if 0 <= row < tokens}
    random_order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed)).tolist()
    for row in random_order:
        if len(wanted) >= min(NUM_ROWS, tokens):
            break
        wanted.add(row)
    return torch.tensor(sorted(wanted))


def _same_route(route: Route, timed: Route) -> None:
    if route.counters != timed.counters:
        raise RouteDiffers(f"parity would run {route.counters}, the timed cell runs {timed.counters}: choose a matrix cell of one route")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
