"""Proof of the layer that is timed: projections, RoPE, use of the gates, branch wiring, against the
same by hand.

The gate module itself is judged in tests/nsa, not here.

At a length where every block is selected no near-tie of scores can change the set, and the selected
branch is causal.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from nsa import oracle
from nsa.attention import NSAAttention
from nsa.config import ModelConfig, NSAConfig
from nsa.dense import DenseAttention
from perfbench import older_nsa
from perfbench.worker.parity import cache, paged_cache
from perfbench.worker.parity.claim import Claim
from perfbench.worker.parity.judges import Attend, plain_attention, reference_attention

PhiParams = tuple[Mapping[str, Tensor] | None, Mapping[str, Tensor] | None]


def outputs(claim: Claim, request: str, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """(the layer's own output, the reference by hand in fp64 on the CPU, the same by plain
    attention in the cell's dtype on its device) on sampled rows of ``tokens``.

    ``tokens`` must be so few that every block is selected (``tokens_selecting_all``). The layer
    goes through a cache where the cell does, cut as `cache.pieces_of` says.
    """
    model, device, dtype = claim.model, claim.device, claim.dtype
    generator = torch.Generator().manual_seed(claim.seed)
    rows = torch.cat(
        [
            torch.randperm(tokens - 1, generator=generator)[:31].sort().values,
            torch.tensor([tokens - 1]),
        ]
    )
    x = torch.randn(2, tokens, model.dim, generator=generator).to(dtype)
    torch.manual_seed(claim.seed)
    layer: nn.Module
    if request.startswith("dense"):
        layer, by_hand = DenseAttention(model, request), _dense_by_hand
    else:
        heads = (model.dim, model.num_heads, model.num_kv_heads, model.head_dim, model.v_head_dim)
        layer, by_hand = (
            NSAAttention(*heads, model.nsa, path=request, fa2=claim.cell.fa2),
            _nsa_by_hand,
        )
    layer = layer.to(dtype)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        layer.to(device)
        got = (
            compiled_of(layer)(x.to(device))
            if claim.compiled
            else _own(claim, layer, x.to(device), rows)
        )[:, rows]
        plain = by_hand(layer, model, x.to(device), rows.to(device), plain_attention)
        reference = by_hand(twin.double(), model, x.double(), rows, reference_attention)
    return got, reference, plain


def compiled_of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``function`` as perfbench compiles a model: one graph for each shape, or an error."""
    compiled: Callable[..., Tensor] = torch.compile(function, fullgraph=True, dynamic=False)
    return compiled


def _own(claim: Claim, layer: nn.Module, x: Tensor, rows: Tensor) -> Tensor:
    if claim.chunk is None:
        y: Tensor = layer(x)
        return y
    through = paged_cache.layer if claim.in_pages else cache.layer
    pieces = cache.pieces_of(claim.chunk, rows.tolist(), x.shape[1])
    return through(layer, x, pieces, stepping=claim.stepping)


def tokens_selecting_all(nsa: NSAConfig) -> int:
    """The most tokens, a multiple of l', at which every query attends to every block up to its own,
    whatever the scores.
    """
    if nsa.selection == "hierarchical":  # its search may pass over any block that is not forced
        return (nsa.num_initial + nsa.num_local) * nsa.sel_block
    return next(
        n * nsa.sel_block
        for n in range(nsa.num_selected, 0, -1)
        if n <= nsa.num_selected_for(n * nsa.sel_block)
    )


def _nsa_by_hand(
    layer: nn.Module, model: ModelConfig, x: Tensor, rows: Tensor, attend: Attend
) -> Tensor:
    assert isinstance(layer, NSAAttention)
    nsa, S = model.nsa, x.shape[1]
    q = layer.q_proj(x).unflatten(-1, (model.num_heads, model.head_dim))
    k = layer.k_proj(x).unflatten(-1, (-1, model.head_dim))
    v = layer.v_proj(x).unflatten(-1, (-1, model.value_dim))
    if older_nsa.has_qk_norm(nsa):
        q, k = layer.q_norm(q), layer.k_norm(k)
    gates = layer.gate(x, q)[:, rows]
    q_rotated, k_rotated = _rope(q, model, 1)[:, rows], _rope(k, model, 1)
    keep = {
        "cmp": oracle.compressed_mask(
            rows[None],
            max(0, (S - nsa.cmp_block) // nsa.cmp_stride + 1),
            nsa.cmp_block,
            nsa.cmp_stride,
        ),
        "sel": oracle.causal_mask(rows[None], S),
        "win": oracle.sliding_mask(rows[None], S, nsa.window),
    }
    total = torch.zeros_like(gates[..., :1])
    for column, branch in enumerate(("cmp", "sel", "win")):
        if branch not in nsa.branches:
            continue
        k_branch, v_branch = (_kv_of(t, column, model.num_kv_heads) for t in (k_rotated, v))
        if branch == "cmp":
            phi = (layer.phi_k.params(), layer.phi_v.params())
            k_branch, v_branch = compressed_kv(
                _kv_of(k, 0, model.num_kv_heads), k_branch, v_branch, model, phi
            )
        total = total + gates[..., column, None] * attend(
            q_rotated, k_branch, v_branch, keep[branch]
        )
    y: Tensor = layer.o_proj(total.flatten(2))
    return y


def _dense_by_hand(
    layer: nn.Module, model: ModelConfig, x: Tensor, rows: Tensor, attend: Attend
) -> Tensor:
    assert isinstance(layer, DenseAttention)
    q, k = (p(x).unflatten(-1, (-1, model.head_dim)) for p in (layer.q_proj, layer.k_proj))
    if older_nsa.has_qk_norm(model.nsa):
        q, k = layer.q_norm(q), layer.k_norm(k)
    q, k = _rope(q, model, 1), _rope(k, model, 1)
    v = layer.v_proj(x).unflatten(-1, (-1, model.value_dim))
    y: Tensor = layer.o_proj(
        attend(q[:, rows], k, v, oracle.causal_mask(rows[None], x.shape[1])).flatten(2)
    )
    return y


def compressed_kv(
    k: Tensor, k_rotated: Tensor, v: Tensor, model: ModelConfig, phi: PhiParams
) -> tuple[Tensor, Tensor]:
    """Compressed K and V as the config wants them rotated: before compression, or after it, block i
    at position i * d.

    ``phi`` are the tensors of the map of K and of V, None for mean.
    """
    nsa = model.nsa
    if nsa.rotates_before_compression:
        k_cmp = _compressed(k_rotated, model, phi[0])
    else:
        k_cmp = _rope(_compressed(k, model, phi[0]), model, nsa.cmp_stride)
    return k_cmp, _compressed(v, model, phi[1])


def _compressed(x: Tensor, model: ModelConfig, params: Mapping[str, Tensor] | None) -> Tensor:
    sizes = (model.nsa.cmp_block, model.nsa.cmp_stride)
    if params is None:
        return oracle.compress_mean(x, *sizes).to(x.dtype)
    if model.nsa.phi == "linear":
        return oracle.compress_linear(x, params["weight"], *sizes).to(x.dtype)
    return oracle.compress_mlp(x, params["position"], params["up"], params["down"], *sizes).to(
        x.dtype
    )


def _kv_of(x: Tensor, column: int, num_kv_heads: int) -> Tensor:
    return (
        x
        if x.shape[2] == num_kv_heads
        else x[:, :, column * num_kv_heads : (column + 1) * num_kv_heads]
    )


def _rope(x: Tensor, model: ModelConfig, step: int) -> Tensor:
    positions = torch.arange(x.shape[1], device=x.device) * step
    nsa = model.nsa
    return oracle.rope(x, positions, base=nsa.rope_base, scale=nsa.rope_scale, kind=nsa.rope).to(
        x.dtype
    )
