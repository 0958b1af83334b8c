"""Whole layers with every phi, before and after RoPE, against fp64 by hand; a shift of the
positions; decode at the paper's sizes.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nsa import NSAAttention, NSAConfig, compressed_attention, select_blocks
from nsa.compression import Phi
from nsa.functional import compress_kv
from nsa.routing import Path
from tests import oracle
from tests.cases import SMALL, Case, assert_blocks, assert_parity, qkv, randn

DIM, HEADS, GROUPS, KEY_DIM, VALUE_DIM = 24, 6, 2, 8, 12
BLOCK, STRIDE = SMALL.cmp_block, SMALL.cmp_stride


def randomised(module: torch.nn.Module) -> None:
    """Parameters at which phi differs from a mean and depends on positions."""
    for seed, (name, parameter) in enumerate(module.named_parameters()):
        if "phi" in name or isinstance(module, Phi):
            spread = 0.5 if name.endswith("position") else parameter.shape[1] ** -0.5
            parameter.data = spread * randn(*parameter.shape, seed=seed, dtype=parameter.dtype)


def turned(x: Tensor, position: Tensor) -> Tensor:
    """Pairs (2i, 2i + 1) of x [B, N, heads, D] turned by position * 10000^(-2i / D), as complex
    numbers.
    """
    D = x.shape[-1]
    angle = position.double()[:, None] * 10_000.0 ** (
        -torch.arange(0, D, 2, dtype=torch.float64) / D
    )
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(
        pairs * torch.polar(torch.ones_like(angle), angle)[None, :, None]
    ).flatten(-2)


def phi_by_hand(x: Tensor, kind: str, parameters: dict[str, Tensor]) -> Tensor:
    """Block after block of x [B, S, G, D], one head and its l * D numbers at a time."""
    blocks = []
    for start in range(0, x.shape[1] - BLOCK + 1, STRIDE):
        tokens = x[:, start : start + BLOCK].transpose(1, 2)  # [B, G, l, D]
        if kind == "mean":
            blocks.append(tokens.mean(2))
        elif kind == "linear":
            blocks.append(tokens.flatten(2) @ parameters["weight"].T)
        else:
            hidden = (tokens + parameters["position"]).flatten(2) @ parameters["up"].T
            blocks.append((hidden / (1 + torch.exp(-hidden))) @ parameters["down"].T)
    return torch.stack(blocks, 1)


def layer_by_hand(layer: NSAAttention, x: Tensor, *, after: bool) -> Tensor:
    parameters = {name: p.double() for name, p in layer.named_parameters()}
    phi = {
        side: {n.split(".")[1]: p for n, p in parameters.items() if n.startswith(f"phi_{side}.")}
        for side in "kv"
    }
    B, T, _ = x.shape
    at = torch.arange(T)
    q = turned((x @ parameters["q_proj.weight"].T).view(B, T, HEADS, KEY_DIM), at)
    k_cmp, k_sel, k_win = (
        (x @ parameters["k_proj.weight"].T).view(B, T, 3, GROUPS, KEY_DIM).unbind(2)
    )
    v_cmp, v_sel, v_win = (
        (x @ parameters["v_proj.weight"].T).view(B, T, 3, GROUPS, VALUE_DIM).unbind(2)
    )
    gates = torch.sigmoid(
        (x @ parameters["gate.proj.weight"].T + parameters["gate.proj.bias"]).view(B, T, HEADS, 3)
    )
    kind = layer.config.phi
    if after:
        k_cmp = phi_by_hand(k_cmp, kind, phi["k"])
        k_cmp = turned(k_cmp, STRIDE * torch.arange(k_cmp.shape[1]))
    else:
        k_cmp = phi_by_hand(turned(k_cmp, at), kind, phi["k"])
    v_cmp = phi_by_hand(v_cmp, kind, phi["v"])
    blocks, gap = oracle.select(q, k_cmp, config=SMALL)
    assert float(gap.min()) > 1e-5, "a near-tie would excuse another set"
    o_cmp = oracle.compressed(q, k_cmp, v_cmp, block=BLOCK, stride=STRIDE)[0]
    o_sel = oracle.selected(q, turned(k_sel, at), v_sel, blocks, sel_block=SMALL.sel_block)
    o_win = oracle.sliding(q, turned(k_win, at), v_win, window=SMALL.window)
    o = gates[..., :1] * o_cmp + gates[..., 1:2] * o_sel + gates[..., 2:] * o_win
    return o.flatten(2) @ parameters["o_proj.weight"].T


@pytest.mark.parametrize("path", [Path.MASKED, Path.V2])
@pytest.mark.parametrize("cmp_rope", ["auto", "before", "after"])
@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
def test_a_layer_with_any_phi_equals_the_oracle(phi: str, cmp_rope: str, path: Path) -> None:
    """Forward, and the gradient of x and of every parameter; ``auto`` is after for a learned phi
    and before for the mean.
    """
    torch.manual_seed(0)
    config = replace(SMALL, phi=phi, cmp_rope=cmp_rope)
    layer = NSAAttention(
        DIM, HEADS, GROUPS, KEY_DIM, VALUE_DIM, config=config, path=path, fa2="off"
    ).double()
    randomised(layer)
    x = (2 * randn(1, 113, DIM, seed=1, dtype=torch.float64)).requires_grad_()
    true_x = x.detach().clone().requires_grad_()
    after = cmp_rope == "after" or (cmp_rope == "auto" and phi != "mean")
    y, want = layer(x), layer_by_hand(layer, true_x, after=after)
    assert_parity(y, want, "y")
    other = layer_by_hand(layer, true_x, after=not after)
    assert float((other - want).detach().abs().max()) > 1e-3, "where k is rotated must matter"
    upstream = randn(*y.shape, seed=2, dtype=torch.float64)
    got = torch.autograd.grad(y, [x, *layer.parameters()], upstream)
    true = torch.autograd.grad(want, [true_x, *layer.parameters()], upstream)
    for name, a, b in zip(["x", *dict(layer.named_parameters())], got, true, strict=True):
        assert_parity(a, b, f"d{name}")


# 4. RoPE after compression: a shift of all positions changes nothing beyond rounding.


@pytest.mark.parametrize("phi", ["mean", "linear", "mlp"])
def test_shifting_positions_changes_nothing_where_rope_comes_after(phi: str) -> None:
    """The queries by 16 strides, the compressed keys by 16 blocks.

    Angles are fp32: to 160 * 2^-23 radians.
    """
    config = replace(SMALL, phi=phi, cmp_rope="after")
    q, k, v = qkv(Case(100, 3, 8, 8, 1), dtype=torch.float64)
    phis = [Phi(config, 8).double() for _ in range(2)]
    for one in phis:
        randomised(one)
    params = (phis[0].params(), phis[1].params())

    def branch(queries_by: int, keys_by: int) -> tuple[Tensor, Tensor]:
        k_cmp, v_cmp = compress_kv(k, v, torch.tensor([keys_by]), config=config, phi_params=params)
        at = turned(q, torch.arange(100) + queries_by)
        o = compressed_attention(at, k_cmp, v_cmp, block=BLOCK, stride=STRIDE)[0]
        return o, select_blocks(at, k_cmp, config=config)

    (o, blocks), (shifted, same) = branch(0, 0), branch(16 * STRIDE, 16)
    assert_parity(shifted, o, "o", tolerance=5e-5)
    k_cmp = compress_kv(k, v, config=config, phi_params=params)[0]
    _, gap = oracle.select(turned(q, torch.arange(100)), k_cmp, config=config)
    assert_blocks(same, blocks.long(), gap, near_tie=1e-3)
    for wrong in (branch(16 * STRIDE, 0), branch(16 * STRIDE + 1, 16)):
        assert float((wrong[0] - o).detach().abs().max()) > 1e-3, "RoPE must matter"


# 5. Decode is prefill, where blocks of the paper's geometry begin to compete.


def test_decode_is_prefill_across_the_boundaries_of_the_papers_geometry() -> None:
    """Steps across 511, 512 and 1,023, 1,024, 1,025 (where a 17th block competes for 16 slots),
    after a prefill and a chunk.
    """
    torch.manual_seed(0)
    layer = NSAAttention(DIM, 4, 2, 8, 6, config=NSAConfig(), path="masked", fa2="off").double()
    x = randn(1, 1100, DIM, seed=1, dtype=torch.float64)
    bounds = [0, 500, *range(501, 521), 1015, *range(1016, 1031), 1080, *range(1081, 1101)]
    with torch.no_grad():
        whole = layer(x)
        cache = layer.new_cache(1, 1100, initial_len=64)
        got = torch.cat([layer(x[:, a:b], cache=cache) for a, b in itertools.pairwise(bounds)], 1)
    assert_parity(got, whole, "y", tolerance=1e-9)
    left_out = replace(NSAConfig(), num_selected=17)
    other = NSAAttention(DIM, 4, 2, 8, 6, config=left_out, path="masked", fa2="off").double()
    other.load_state_dict(layer.state_dict())
    with torch.no_grad():
        all_selected = other(x)
    assert torch.equal(all_selected[:, :1024], whole[:, :1024]) and not torch.equal(
        all_selected[:, 1087:], whole[:, 1087:]
    )
