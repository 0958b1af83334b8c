"""Started by torchrun in four processes: context parallelism over all of them, and over each row of
a 2 x 2 mesh, against one process. Rank 0 writes what it found as JSON to argv[1].
"""

from __future__ import annotations

import copy
import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from nsa import chosen_blocks
from nsa.attention import NSAAttention
from nsa.branches import Call, attend_view
from nsa.config import preset
from nsa.decode import View
from nsa.model import DenseLM, TinyLM, next_token_labels
from nsa.parallel import ContextParallel
from nsa.parallel.attention import ShardedAttention
from nsa.parallel.gather import sum_over_ranks
from nsa.parallel.layout import ShardedLayout
from tests.cases import SMALL, error, magnitude, randn
from tests.nsa.test_layer import DIM, attention, by_hand
from tests.nsa.torchrun import end_together

TOKENS = 128  # chunks of 16 on four ranks, of 32 on two; the window of 24 is between them
DOCUMENTS = [0, 5, 5, 40, 41, 100, 121]
MODELS: dict[str, dict[str, Any]] = {
    "model": {},
    "model of documents": {"cu_seqlens": DOCUMENTS},
    "dense twin": {},
}
Result = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class LayerCase:
    options: dict[str, Any] = field(default_factory=dict)
    path: str = "masked"
    batch: int = 1
    heads: tuple[int, int, int, int] = (4, 2, 8, 8)  # HQ, HKV, DK, DV
    cu_seqlens: list[int] | Tensor | None = None

    @property
    def packing(self) -> dict[str, Any]:
        return {} if self.cu_seqlens is None else {"cu_seqlens": self.cu_seqlens}

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """x, and the gradient of y. Tokens of no document are NaN, which nobody may read."""
        x, upstream = (randn(self.batch, TOKENS, DIM, seed=s).to(dtype) for s in (1, 2))
        if self.cu_seqlens is not None:
            x[:, int(self.cu_seqlens[-1]) :] = torch.nan
        return [x, upstream]

    def layer(self) -> NSAAttention:
        torch.manual_seed(0)
        config = replace(SMALL, **self.options)
        return NSAAttention(DIM, *self.heads, config=config, path=self.path, fa2="off")


CASES = {
    "GQA, DK != DV, v2": LayerCase(path="v2", batch=2, heads=(6, 2, 8, 4)),
    "MHA, linear, shared K and V": LayerCase({"phi": "linear", "share_kv": True, "window": 8}),
    "MQA, mlp, softmax gate": LayerCase(
        {"phi": "mlp", "gate": "softmax", "qk_norm": True, "rope": "half"}, heads=(4, 1, 8, 12)
    ),
    "no halos": LayerCase({"cmp_block": 4, "window": 1}, heads=(2, 2, 8, 8)),
    "window over everything": LayerCase({"window": 500}, batch=2),
    "long compressed block": LayerCase({"cmp_block": 16}),
    "no compressed branch": LayerCase({"phi": "mlp", "branches": ("sel", "win")}),
    "window alone": LayerCase({"branches": ("win",)}),
    "softcap and sinks": LayerCase({"softcap": 5.0, "sinks": True}, path="reference"),
    "documents over borders, v2": LayerCase(path="v2", cu_seqlens=DOCUMENTS),
    "documents, mlp": LayerCase({"phi": "mlp", "share_kv": True}, cu_seqlens=[0, 3, 77, 128]),
    "documents, sinks": LayerCase({"sinks": True}, path="reference", cu_seqlens=[0, 55, 110]),
    "a short document, most ranks without": LayerCase({"phi": "linear"}, cu_seqlens=[0, 13, 20]),
    "one document": LayerCase({"window": 60}, cu_seqlens=torch.tensor([0, TOKENS])),
}


def gradients(module: nn.Module) -> Result:
    return {f"d {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}


def whole_layer(layer: NSAAttention, x: Tensor, upstream: Tensor, **packing: Any) -> Result:
    x = x.clone().requires_grad_()
    with chosen_blocks.collect() as blocks:
        y = layer(x, **packing)
    y.backward(upstream)
    assert x.grad is not None
    found = {} if blocks[0] is None else {"blocks": blocks[0]}
    return {"y": y.detach(), "d x": x.grad, **gradients(layer), **found}


def sharded_layer(
    cp: ContextParallel, layer: NSAAttention, x: Tensor, upstream: Tensor, **packing: Any
) -> Result:
    """The same of a shard, put together again; blocks of packed documents are those of this rank's
    rows.
    """
    cp.wrap(layer)
    own = cp.shard(x).clone().requires_grad_()
    with chosen_blocks.collect() as blocks:
        y = layer(own, **packing)
    y.backward(cp.shard(upstream))
    cp.sum_gradients(layer)
    assert own.grad is not None
    found = {}
    if blocks[0] is not None:
        late, early = (b for b in blocks if b is not None)  # in the order of the calls
        found["blocks"] = torch.cat([early, late], 1)
        if not packing:
            found["blocks"] = cp.unshard(found["blocks"])
    return {"y": cp.unshard(y.detach()), "d x": cp.unshard(own.grad), **gradients(layer), **found}


def language(model: nn.Module, ids: Tensor, labels: Tensor, count: int, **packing: Any) -> Tensor:
    logits = model(ids, **packing).flatten(0, 1)
    return cross_entropy(logits, labels.flatten(), reduction="sum") / count


def whole_model(model: nn.Module, ids: Tensor, **packing: Any) -> Result:
    labels = next_token_labels(ids, **packing)
    loss = language(model, ids, labels, ids.shape[1] - 1, **packing)
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def sharded_model(cp: ContextParallel, model: nn.Module, ids: Tensor, **packing: Any) -> Result:
    cp.wrap(model)
    own, labels = cp.shard(ids), cp.shard(next_token_labels(ids, **packing))
    loss = language(model, own, labels, ids.shape[1] - 1, **packing)
    loss.backward()
    cp.sum_gradients(model)
    return {"loss": sum_over_ranks(loss.detach(), cp.group), **gradients(model)}


def model_of(kind: str) -> TinyLM | DenseLM:
    config = replace(
        preset("tiny"), vocab_size=32, num_layers=2, nsa=SMALL, checkpoint_layers=(0, 1)
    )
    torch.manual_seed(0)
    return (DenseLM(config) if kind == "dense twin" else TinyLM(config, "masked")).double()


def compared(got: Result, want: Result) -> dict[str, float]:
    """Each result's error, as a share of NSA.md's bound of 1, infinite of a NaN, which the largest
    of several numbers would drop; blocks: how many differ.
    """
    assert got.keys() == want.keys(), (sorted(got), sorted(want))
    found = {
        name: float((got[name] != want[name]).sum())
        if name == "blocks"
        else error(got[name], want[name]) / max(1.0, magnitude(want[name]))
        for name in want
    }
    return {name: math.inf if math.isnan(share) else share for name, share in found.items()}


def in_dtype(cp: ContextParallel, case: LayerCase, dtype: torch.dtype) -> dict[str, float]:
    given, layer = case.inputs(dtype), case.layer().to(dtype)
    got = sharded_layer(cp, layer, *given, **case.packing)
    want = whole_layer(case.layer().to(dtype), *given, **case.packing)
    if case.packing and "blocks" in want:
        layout = layer.layout(cp.shard(given[0]), dtype=dtype, **case.packing)
        assert isinstance(layout, ShardedLayout)
        own = [want["blocks"][:, slice(*chunk.rows)] for chunk in layout.chunks]
        want["blocks"] = torch.cat(own, 1)
    return on_any_rank(compared(got, want))


def same_bits(cp: ContextParallel, phi: str, *cu_seqlens: int) -> dict[str, bool]:
    """`same_bits_of` in fp32."""
    q, k, v = (randn(1, TOKENS, n, 8, seed=n) for n in (4, 2, 1))
    v = v.expand(-1, -1, 2, -1).contiguous()
    return same_bits_of(cp, LayerCase({"phi": phi}).layer(), q, k, v, *cu_seqlens)


def same_bits_of(
    cp: ContextParallel, layer: NSAAttention, q: Tensor, k: Tensor, v: Tensor, *cu_seqlens: int
) -> dict[str, bool]:
    """Of equal q, k and v: whether compressed K and V, and the blocks, are those of one process,
    bit for bit, on this rank.
    """
    gates = q.new_ones(*q.shape[:3], 3)
    packing = {"cu_seqlens": list(cu_seqlens)} if cu_seqlens else {}
    one = layer.layout(q, dtype=q.dtype, **packing)
    rows = [one.rows(x) for x in (q, gates, k, v)]
    kv = rows[2], rows[3]
    route = layer._route(rows[0], rows[0].shape[1])
    cmp = layer._compress(*kv, documents=one.documents, route=route)
    view = View(cmp, kv, kv, 0, 0)
    call = Call(route, layer.config, q.shape[3] ** -0.5, documents=one.documents)
    cp.wrap(layer)
    assert isinstance(layer, ShardedAttention)
    layout = layer.layout(cp.shard(q), dtype=q.dtype, **packing)
    own, kv = cp.shard(q).chunk(2, 1), (cp.shard(k), cp.shard(v))
    keys = layer._keys(kv, kv, kv, layout)
    keys.compress(layer._compress, [route, route])
    views = keys.views()
    with torch.no_grad(), chosen_blocks.collect() as blocks:
        attend_view(rows[0], rows[1], view, call)
        for part in zip(own, cp.shard(gates).chunk(2, 1), views, layout.chunks, strict=True):
            layer._attend(*part, route, keys)
    whole, *parts = (b for b in blocks if b is not None)
    end = (
        torch.arange(cmp[0].shape[1], device=q.device) * layer.config.cmp_stride
        + layer.config.cmp_block
        - 1
    )
    exists = torch.ones_like(end, dtype=torch.bool)
    if one.packing is not None:  # what holds room between documents differs, and nobody sees it
        exists = (
            one.packing.present_R[end] & one.packing.present_R[end - layer.config.cmp_block + 1]
        )
    return {
        "compressed": all(
            torch.equal(x[:, exists[: x.shape[1]]], y[:, : x.shape[1]][:, exists[: x.shape[1]]])
            for seen in views
            for x, y in zip(seen.cmp, cmp, strict=True)
        ),
        "blocks": all(
            torch.equal(part, whole[:, slice(*chunk.rows)])
            for part, chunk in zip(parts, layout.chunks, strict=True)
        ),
    }


@torch.no_grad()
def isolated(cp: ContextParallel) -> dict[str, bool]:
    """Whether a NaN and an infinity of one document, which lies on several ranks, reach the rows
    that they reach on one process, and others are finite.
    """
    case = LayerCase(cu_seqlens=[0, 9, 70, 128])
    x, _ = case.inputs(torch.float64)
    x[:, 20], x[:, 60] = torch.nan, torch.inf
    want = case.layer().double()(x, **case.packing)
    got = cp.unshard(cp.wrap(case.layer().double())(cp.shard(x), **case.packing))
    bad = want.isnan()
    return {
        "some": bool(bad[:, 20:70].all()) and int(bad.sum()) == 50 * DIM,
        "same": torch.equal(got.isnan(), bad),
        "rest": error(got[~bad], want[~bad]) <= 1e-13,
    }


def on_any_rank(found: dict[str, float]) -> dict[str, float]:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    return {name: max(rank[name] for rank in ranks) for name in found}


def on_every_rank(found: dict[str, bool]) -> dict[str, bool]:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, found)
    return {name: all(rank[name] for rank in ranks) for name in found}


def against_oracle(cp: ContextParallel) -> dict[str, float]:
    """Of the layer that tests/nsa/test_layer.py compares, in fp32 against fp64."""
    layer = attention("masked")
    x, upstream = (randn(1, TOKENS, DIM, seed=s) for s in (1, 2))
    got = sharded_layer(cp, copy.deepcopy(layer), x, upstream)
    del got["blocks"]
    true_x = x.double().requires_grad_()
    y = by_hand(layer, true_x, layer.config)
    names = ["x", *dict(layer.named_parameters())]
    grads = torch.autograd.grad(y, [true_x, *layer.parameters()], upstream.double())
    want = {f"d {name}": grad for name, grad in zip(names, grads, strict=True)}
    return compared(got, {"y": y, **want})


def bf16(cp: ContextParallel) -> dict[str, float]:
    """Errors against fp64 of the sharded layer and of one process, each in units of the largest
    true value; blocks are all of them, so that rounding chooses no other ones.
    """
    case = LayerCase({"num_selected": 8})
    x, upstream = (randn(1, TOKENS, DIM, seed=s).bfloat16() for s in (1, 2))
    layer = case.layer().bfloat16()
    true = whole_layer(copy.deepcopy(layer).double(), x.double(), upstream.double())
    one = compared(whole_layer(copy.deepcopy(layer), x, upstream), true)
    got = compared(sharded_layer(cp, layer, x, upstream), true)
    return {name: got[name] - 2 * one[name] for name in got}


def repeated(cp: ContextParallel) -> bool:
    """Whether two runs, forward and backward, are bitwise equal, on this rank."""
    x, upstream = (randn(1, TOKENS, DIM, seed=s) for s in (1, 2))
    case = LayerCase({"phi": "mlp"})
    first, second = (sharded_layer(cp, case.layer(), x, upstream) for _ in range(2))
    return all(torch.equal(first[name], second[name]) for name in first)


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except ValueError as error:
        return str(error)
    return ""


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    meshes = {"4": init_device_mesh("cpu", (4,)), "2": grid["cp"]}
    found: dict[str, Any] = {}
    ids = torch.randint(32, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    for ranks, mesh in meshes.items():
        cp = ContextParallel(mesh)
        for name, case in CASES.items():
            found[f"{name}, {ranks} ranks"] = in_dtype(cp, case, torch.float64)
        for name, packing in MODELS.items():
            got = sharded_model(cp, model_of(name), ids, **packing)
            want = whole_model(model_of(name), ids, **packing)
            found[f"{name}, {ranks} ranks"] = compared(got, want)
        found[f"oracle, {ranks} ranks"] = against_oracle(cp)
        for phi in ("mean", "linear", "mlp"):
            found[f"bits, {phi}, {ranks} ranks"] = on_every_rank(same_bits(cp, phi))
            bits = on_every_rank(same_bits(cp, phi, *DOCUMENTS))
            found[f"bits of documents, {phi}, {ranks} ranks"] = bits
    found["isolated"] = on_every_rank(isolated(cp))
    cp = ContextParallel(meshes["4"])
    found["bf16"] = bf16(cp)
    found["repeated"] = on_every_rank({"equal": repeated(cp)})["equal"]
    layer = cp.wrap(LayerCase().layer())
    found["refused"] = {
        "mesh": refused(lambda: ContextParallel(grid)),
        "none": refused(lambda: ContextParallel(None)),
        "list": refused(lambda: cp.shard([1, 2])),
        "gathered list": refused(lambda: cp.unshard([1, 2])),
        "dim": refused(lambda: cp.shard(ids, 2)),
        "word": refused(lambda: cp.shard(ids, "tokens")),
        "gathered dim": refused(lambda: cp.unshard(ids, -3)),
        "odd": refused(lambda: cp.unshard(ids[:, :7])),
        "seven": refused(lambda: cp.positions(7)),
        "half": refused(lambda: cp.positions(8.0)),
        "twice": refused(lambda: cp.wrap(layer)),
        "other": refused(lambda: cp.wrap(nn.Linear(1, 1))),
        "cudnn": refused(lambda: cp.wrap(DenseLM(preset("tiny"), "dense_cudnn"))),
        "chunk": refused(lambda: layer(randn(1, 24, DIM, seed=1))),
        "documents": refused(lambda: layer(randn(1, 32, DIM, seed=1), cu_seqlens=[0, 129])),
        "masked": refused(lambda: layer(randn(1, 32, DIM, seed=1), num_tokens=[32])),
    }
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    end_together()


if __name__ == "__main__":
    main()
