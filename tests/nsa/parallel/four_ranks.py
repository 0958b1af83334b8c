"""Started by torchrun in four processes: context parallelism over all of them, and over each row of
a 2 x 2 mesh, against one process. Rank 0 writes what it found as JSON to argv[1].
"""

from __future__ import annotations

import copy
import json
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
from tests.cases import SMALL, error, magnitude, randn
from tests.nsa.test_layer import DIM, attention, by_hand

TOKENS = 128  # chunks of 16 on four ranks, of 32 on two; the window of 24 is between them
Result = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class LayerCase:
    options: dict[str, Any] = field(default_factory=dict)
    path: str = "masked"
    batch: int = 1
    heads: tuple[int, int, int, int] = (4, 2, 8, 8)  # HQ, HKV, DK, DV

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
}


def gradients(module: nn.Module) -> Result:
    return {f"d {name}": p.grad for name, p in module.named_parameters() if p.grad is not None}


def whole_layer(layer: NSAAttention, x: Tensor, upstream: Tensor) -> Result:
    x = x.clone().requires_grad_()
    with chosen_blocks.collect() as blocks:
        y = layer(x)
    y.backward(upstream)
    assert x.grad is not None
    found = {} if blocks[0] is None else {"blocks": blocks[0]}
    return {"y": y.detach(), "d x": x.grad, **gradients(layer), **found}


def sharded_layer(cp: ContextParallel, layer: NSAAttention, x: Tensor, upstream: Tensor) -> Result:
    """The same of a shard, put together again."""
    cp.wrap(layer)
    own = cp.shard(x).clone().requires_grad_()
    with chosen_blocks.collect() as blocks:
        y = layer(own)
    y.backward(cp.shard(upstream))
    cp.sum_gradients(layer)
    assert own.grad is not None
    found = {}
    if blocks[0] is not None:
        found["blocks"] = cp.unshard(torch.cat([b for b in blocks if b is not None], 1))
    return {"y": cp.unshard(y.detach()), "d x": cp.unshard(own.grad), **gradients(layer), **found}


def language(model: TinyLM, ids: Tensor, labels: Tensor, count: int) -> Tensor:
    logits = model(ids).flatten(0, 1)
    return cross_entropy(logits, labels.flatten(), reduction="sum") / count


def whole_model(model: TinyLM, ids: Tensor) -> Result:
    loss = language(model, ids, next_token_labels(ids), ids.shape[1] - 1)
    loss.backward()
    return {"loss": loss.detach(), **gradients(model)}


def sharded_model(cp: ContextParallel, model: TinyLM, ids: Tensor) -> Result:
    cp.wrap(model)
    own, labels = cp.shard(ids), cp.shard(next_token_labels(ids))
    loss = language(model, own, labels, ids.shape[1] - 1)
    loss.backward()
    cp.sum_gradients(model)
    return {"loss": sum_over_ranks(loss.detach(), cp.group), **gradients(model)}


def model_of() -> TinyLM:
    config = replace(
        preset("tiny"), vocab_size=32, num_layers=2, nsa=SMALL, checkpoint_layers=(0, 1)
    )
    torch.manual_seed(0)
    return TinyLM(config, "masked").double()


def compared(got: Result, want: Result) -> dict[str, float]:
    """Each result's error, as a share of NSA.md's bound of 1; blocks: how many differ."""
    assert got.keys() == want.keys(), (sorted(got), sorted(want))
    return {
        name: float((got[name] != want[name]).sum())
        if name == "blocks"
        else error(got[name], want[name]) / max(1.0, magnitude(want[name]))
        for name in want
    }


def in_dtype(cp: ContextParallel, case: LayerCase, dtype: torch.dtype) -> dict[str, float]:
    x, upstream = (randn(case.batch, TOKENS, DIM, seed=s).to(dtype) for s in (1, 2))
    got = sharded_layer(cp, case.layer().to(dtype), x, upstream)
    return compared(got, whole_layer(case.layer().to(dtype), x, upstream))


def same_bits(cp: ContextParallel, phi: str) -> dict[str, bool]:
    """Of equal q, k and v in fp32: whether compressed K and V, and the blocks, are those of one
    process, bit for bit, on this rank.
    """
    layer = LayerCase({"phi": phi}).layer()
    q, k, v = (randn(1, TOKENS, n, 8, seed=n) for n in (4, 2, 1))
    v, gates = v.expand(-1, -1, 2, -1).contiguous(), torch.ones(1, TOKENS, 4, 3)
    route = layer._route(q, TOKENS)
    cmp = layer._compress(k, v, route=route)
    view = View(cmp, (k, v), (k, v), 0, 0)
    call = Call(route, layer.config, 8**-0.5)
    cp.wrap(layer)
    assert isinstance(layer, ShardedAttention)
    own, kv = cp.shard(q).chunk(2, 1), (cp.shard(k), cp.shard(v))
    ends = [(c + 1) * own[0].shape[1] for c in cp.place.own]
    views = layer._views(kv, kv, kv, ends, [route, route])
    with torch.no_grad(), chosen_blocks.collect() as blocks:
        attend_view(q, gates, view, call)
        for part in zip(own, cp.shard(gates).chunk(2, 1), views, strict=True):
            layer._attend(*part, route)
    whole, *parts = (b for b in blocks if b is not None)
    return {
        "compressed": all(
            torch.equal(x, y[:, : x.shape[1]])
            for one in views
            for x, y in zip(one.cmp, cmp, strict=True)
        ),
        "blocks": torch.equal(torch.cat(parts, 1), cp.shard(whole)),
    }


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
        model = sharded_model(cp, model_of(), ids)
        found[f"model, {ranks} ranks"] = compared(model, whole_model(model_of(), ids))
        found[f"oracle, {ranks} ranks"] = against_oracle(cp)
        for phi in ("mean", "linear", "mlp"):
            found[f"bits, {phi}, {ranks} ranks"] = on_every_rank(same_bits(cp, phi))
    cp = ContextParallel(meshes["4"])
    found["bf16"] = bf16(cp)
    found["repeated"] = on_every_rank({"equal": repeated(cp)})["equal"]
    layer = cp.wrap(LayerCase().layer())
    found["refused"] = {
        "mesh": refused(lambda: ContextParallel(grid)),
        "twice": refused(lambda: cp.wrap(layer)),
        "dense": refused(lambda: cp.wrap(DenseLM(model_of().config))),
        "chunk": refused(lambda: layer(randn(1, 24, DIM, seed=1))),
        "packed": refused(lambda: layer(randn(1, 32, DIM, seed=1), cu_seqlens=[0, 32])),
    }
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
