"""On CUDA: context parallelism over NCCL on a mesh of one rank, whose two chunks are calls as on
several.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from nsa import NSAAttention, engagement
from nsa.config import preset
from nsa.dense import DenseAttention
from nsa.parallel import ContextParallel
from tests.cases import error, magnitude, randn

MODEL = preset("m7c_125m")
TOKENS = 1024  # every block is selected, so that rounding chooses no other ones
DOCUMENTS = [0, 5, 300, 301, 850, 1020]


@pytest.fixture(scope="module")
def cp() -> Iterator[ContextParallel]:
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield ContextParallel(init_device_mesh("cuda", (1,)))
    dist.destroy_process_group()


def layer_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "dense twin":
        return DenseAttention(MODEL)
    heads = MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim
    return NSAAttention(MODEL.dim, *heads, config=MODEL.nsa, path="triton")


def gradients(layer: nn.Module, x: Tensor, upstream: Tensor, **packing: Any) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x, **packing)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], upstream)]


@pytest.mark.parametrize("kind", ["layer", "documents", "dense twin"])
def test_a_rank_is_within_the_bound_of_one_process(cp: ContextParallel, kind: str) -> None:
    """NSA.md: twice the error of one process, and 2^-8 of the largest true value; twice the same
    bits.
    """
    layer = layer_of(kind).to("cuda", torch.bfloat16)
    packing = {"cu_seqlens": DOCUMENTS} if kind == "documents" else {}
    x, upstream = (
        randn(1, TOKENS, MODEL.dim, seed=s, dtype=torch.bfloat16, device="cuda") for s in (1, 2)
    )
    true_layer: Any = copy.deepcopy(layer).double()
    true_layer.path = "masked"
    want = gradients(true_layer, x.double(), upstream.double(), **packing)
    one = gradients(copy.deepcopy(layer), x, upstream, **packing)
    cp.wrap(layer)
    with engagement.collect() as ran:
        got = gradients(layer, x, upstream, **packing)
    assert kind == "dense twin" or any("triton" in name for name in ran.counts)
    again = gradients(layer, x, upstream, **packing)
    names = ["y", "x", *dict(layer.named_parameters())]
    for name, a, b, rough, true in zip(names, got, again, one, want, strict=True):
        bound = 2 * error(rough, true) + 2.0**-8 * magnitude(true)
        assert error(a, true) <= max(bound, 1e-5), name
        # PyTorch's FA-2 adds up dQ in the order in which its blocks finish
        assert kind == "dense twin" or torch.equal(a, b), name
