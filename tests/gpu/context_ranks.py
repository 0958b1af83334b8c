"""Started by torchrun in two processes: context parallelism over NCCL, a GPU a rank, against one
GPU. argv: OUT, a JSON file of what rank 0 found; a second word tries it over gloo on CPUs.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from nsa import NSAAttention
from nsa.config import NSAConfig
from nsa.parallel import ContextParallel
from tests.cases import randn
from tests.nsa.parallel.four_ranks import (
    CASES,
    TOKENS,
    LayerCase,
    Result,
    compared,
    on_any_rank,
    same_bits_of,
    sharded_layer,
    whole_layer,
)
from tests.nsa.test_layer import DIM

FP64 = ("GQA, DK != DV, v2", "MQA, mlp, softmax gate", "MHA, linear, shared K and V")
PAPER = {"cmp_block": 32, "cmp_stride": 16, "sel_block": 64, "num_selected": 16, "window": 512}
LONG = 1024  # 16 blocks, which are all chosen, so that rounding chooses no other ones


def exact(cp: ContextParallel, case: LayerCase, device: str) -> dict[str, float]:
    """In fp64, by plain PyTorch: what differs is the ranks' doing alone."""
    x, upstream = (randn(case.batch, TOKENS, DIM, seed=s).to(device).double() for s in (1, 2))
    whole = whole_layer(case.layer().to(device).double(), x, upstream)
    return compared(sharded_layer(cp, case.layer().to(device).double(), x, upstream), whole)


def in_bf16(cp: ContextParallel, path: str, device: str) -> dict[str, float]:
    """Errors against fp64 of the sharded layer beyond twice those of one GPU, as NSA.md wants."""
    case = LayerCase(PAPER, heads=(4, 2, 64, 64))

    def run(layer_path: str, dtype: torch.dtype, ranks: ContextParallel | None) -> Result:
        layer = replace(case, path=layer_path).layer().bfloat16().to(device, dtype)
        x, upstream = (randn(1, LONG, DIM, seed=s).bfloat16().to(device, dtype) for s in (1, 2))
        given = (layer, x, upstream)
        found = whole_layer(*given) if ranks is None else sharded_layer(ranks, *given)
        return {name: one.double() for name, one in found.items() if name != "blocks"}

    true = run("masked", torch.float64, None)
    one = compared(run(path, torch.bfloat16, None), true)
    got = compared(run(path, torch.bfloat16, cp), true)
    return {name: got[name] - 2 * one[name] for name in got}


def bits(cp: ContextParallel, path: str, device: str) -> dict[str, float]:
    """1 of what equal q, k and v have not bit for bit alike on some rank, as `same_bits_of` names
    it. Which kernel serves a call goes by its size, and a chunk is smaller than the whole.
    """
    # 16,384 tokens: from there on one card takes the kernels with warp roles
    tokens, heads = (1024, (4, 2)) if path == "masked" else (16_384, (12, 2))
    layer = NSAAttention(768, *heads, 64, config=NSAConfig(**PAPER), path=path)
    sizes = (heads[0], heads[1], heads[1])
    q, k, v = (randn(1, tokens, n, 64, seed=s).to(device) for s, n in enumerate(sizes))
    q, k, v = (x.bfloat16() if path == "triton" else x for x in (q, k, v))
    return on_any_rank(
        {name: float(not alike) for name, alike in same_bits_of(cp, layer.to(q), q, k, v).items()}
    )


def main() -> None:
    on_cpu = len(sys.argv) > 2
    dist.init_process_group("gloo" if on_cpu else "nccl")
    kind, device = ("cpu", "cpu") if on_cpu else ("cuda", f"cuda:{dist.get_rank()}")
    if not on_cpu:
        torch.cuda.set_device(device)
    cp = ContextParallel(init_device_mesh(kind, (dist.get_world_size(),)))
    found = {name: exact(cp, CASES[name], device) for name in FP64}
    found["bf16"] = in_bf16(cp, "masked" if on_cpu else "triton", device)
    found["bits"] = bits(cp, "masked" if on_cpu else "triton", device)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
