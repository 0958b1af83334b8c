"""Peers that tests write to a folder of their own: right ones, and one for each fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from perfbench.matrix import model_with, route_line, route_of_peer
from perfbench.records.job import Job
from perfbench.records.peers import Peer
from tests.perfbench.jobs import TINY, cell_of, job

# Plain PyTorch: a peer calls no operator of nsa.
CODE = """
import torch
from nsa import oracle
from torch.nn.functional import scaled_dot_product_attention as sdpa

HEADS = dict(enable_gqa=True)


def right(q, k, v, *, scale, factor=1.0):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return sdpa(q, k, v, is_causal=True, scale=factor * scale, **HEADS).transpose(1, 2)


def wrong(q, k, v, *, scale):
    return right(q, k, v, scale=scale, factor=1.01)


def wrong_beyond_200(q, k, v, *, scale):
    return right(q, k, v, scale=scale, factor=1.01 if q.shape[1] > 200 else 1.0)


def no_gradient_of_k(q, k, v, *, scale):
    return right(q, k.detach() + 0 * k, v, scale=scale)


def no_backward(q, k, v, *, scale):
    with torch.no_grad():
        return right(q, k, v, scale=scale)


def nan(q, k, v, *, scale):
    o = right(q, k, v, scale=scale)
    return torch.where(torch.arange(o.shape[1])[:, None, None] == 7, torch.nan, o)


def half(q, k, v, *, scale):
    return right(q, k, v, scale=scale).half()


def through_nsa(q, k, v, *, scale):
    from nsa import NSAConfig, nsa_attention

    config = NSAConfig(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=5, window=64)
    gates = torch.ones(*q.shape[:3], 3)
    other = nsa_attention(q, (k, v), (k, v), (k, v), gates, config=config, path="masked", fa2="off")
    return right(q, k, v, scale=scale) + 0 * other


def through_operator(q, k, v, *, scale):
    return right(q, k, v, scale=scale) + 0 * torch.ops.nsa.borrowed(q)


if not hasattr(torch.ops.nsa, "borrowed"):
    torch.library.define("nsa::borrowed", "(Tensor x) -> Tensor")
    torch.library.impl("nsa::borrowed", "CPU", torch.clone)


def windowed(q, k, v, *, window, scale, more=0):
    at = torch.arange(q.shape[1])
    keep = (at[:, None] >= at) & (at[:, None] - at < window + more)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return sdpa(q, k, v, attn_mask=keep, scale=scale, **HEADS).transpose(1, 2)


def off_by_one(q, k, v, *, window, scale):
    return windowed(q, k, v, window=window, scale=scale, more=1)


def _masked(q, k, v, keep, scale):
    heads = q.shape[2] // k.shape[2]
    logits = torch.einsum("btghd,bsgd->bghts", q.unflatten(2, (-1, heads)), k) * scale
    p = torch.where(keep[:, :, None], logits, -torch.inf).softmax(-1).nan_to_num(0.0)
    return torch.einsum("bghts,bsgd->btghd", p, v).flatten(2, 3)


def _nsa(q, kv_cmp, kv_sel, kv_win, gates, config, scale, drop=0, grid=None):
    T, at = q.shape[1], torch.arange(q.shape[1])[None]
    size, stride = config.cmp_block, config.cmp_stride
    k_cmp, v_cmp = (x.unfold(1, size, stride).mean(-1) for x in kv_cmp)
    from dataclasses import replace

    few = replace(config, num_selected=config.num_selected - drop)
    scored = q.detach() if grid is None else (q.detach() * grid).round() / grid
    blocks, _ = oracle.select(scored, k_cmp.detach(), config=few, kv_len=T)
    masks = (
        oracle.compressed_mask(at, k_cmp.shape[1], size, stride),
        oracle.selected_mask(at, blocks, T, config.sel_block),
        oracle.sliding_mask(at, T, config.window),
    )
    pairs = ((k_cmp, v_cmp), kv_sel, kv_win)
    parts = [_masked(q, *kv, keep, scale) for kv, keep in zip(pairs, masks)]
    o = sum(gates[..., i, None] * part for i, part in enumerate(parts))
    return o, blocks.flip(-1)


def nsa(q, kv_cmp, kv_sel, kv_win, gates, *, config, scale):
    return _nsa(q, kv_cmp, kv_sel, kv_win, gates, config, scale)


def nsa_hidden(*inputs, config, scale):
    return _nsa(*inputs, config, scale)[0]


def nsa_coarse_hidden(*inputs, config, scale):
    return _nsa(*inputs, config, scale, grid=32)[0]


def nsa_fewer(*inputs, config, scale):
    return _nsa(*inputs, config, scale, drop=1)


def nsa_fewer_hidden(*inputs, config, scale):
    return _nsa(*inputs, config, scale, drop=1)[0]


def nsa_gates_swapped(q, *kv_and_gates, config, scale):
    *kv, gates = kv_and_gates
    return _nsa(q, *kv, gates.flip(-1), config, scale)


def one_kv(q, k, v, gates, *, config, scale):
    return _nsa(q, (k, v), (k, v), (k, v), gates, config, scale)


def one_kv_window_left_out(q, k, v, gates, *, config, scale):
    lost = (k.detach() + 0 * k, v)
    return _nsa(q, (k, v), (k, v), lost, gates, config, scale)
"""


def peer_of(folder: Path, function: str, kind: str = "dense", **changes: Any) -> Peer:
    """A peer `KIND_FUNCTION` (of kind nsa `FUNCTION`) out of `peer_code.py` in ``folder``."""
    module = f"peer_code_{folder.name.replace('-', '_')}"
    (folder / f"{module}.py").write_text(CODE, encoding="utf-8")
    name = function if kind == "nsa" else f"{kind}_{function}"
    if kind == "window":
        changes.setdefault("nsa", {"branches": ["win"]})
    return Peer(
        name=name, kind=kind, function=f"{module}:{function}", folder=str(folder), **changes
    )


def peer_job(peer: Peer, workload: str = "attention", seq_len: int = 96, **changes: Any) -> Job:
    """A job of the tiny model, in fp32 on the CPU, whose plan is that peer's."""
    cell = cell_of(peer.name, workload, seq_len)
    model = model_with(peer, TINY.to_mapping())
    line = route_line(route_of_peer(peer, peer.name))
    values = {"axes": cell, "cell_id": cell.cell_id, "plan": line, "model": model, "peer": peer}
    return job("dense", workload, seq_len, **{**values, **changes})
