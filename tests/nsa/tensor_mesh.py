"""Forks four ranks over gloo: a tensor-parallel model, alone and under FSDP2 on a 2 x 2 mesh,
against the whole one, in fp64; and its checkpoint on other numbers of ranks. argv: OUT, a JSON file
of what rank 0 found.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from nsa.config import preset
from nsa.model import TinyLM, next_token_labels
from nsa.parallel import clip_grad_norm_, tensor_parallel_plan, whole_state_dict
from tests.nsa.tensor_ranks import SMALL, gradients, whole_gradients, worst
from tests.nsa.torchrun import end_together

RANKS, TOKENS, CLIP = 4, 61, 0.05
CONFIG = replace(
    preset("tiny"),
    vocab_size=32,
    num_heads=8,
    num_kv_heads=4,
    nsa=replace(SMALL, phi="linear", qk_norm=True),
)
IDS = torch.randint(32, (4, TOKENS), generator=torch.Generator().manual_seed(5))


def model_of(seed: int = 4) -> TinyLM:
    torch.manual_seed(seed)
    return TinyLM(CONFIG, "masked").double()


def sharded(mesh: DeviceMesh, seed: int = 4) -> TinyLM:
    model = model_of(seed)
    parallelize_module(model, mesh, tensor_parallel_plan(model, mesh))
    return model


def backward(model: nn.Module, ids: Tensor) -> None:
    logits = model(ids).flatten(0, 1)
    nn.functional.cross_entropy(logits, next_token_labels(ids).flatten()).backward()


def stepped(model: nn.Module) -> dict[str, Tensor | None]:
    """The whole weights after a step down the gradients as they are."""
    torch.optim.SGD(model.parameters(), lr=3.0, foreach=False).step()
    return dict(whole_state_dict(model))


def rank_main(rank: int, out: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{out}.meet", rank=rank, world_size=RANKS)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wanted = model_of()
    backward(wanted, IDS)
    norm = nn.utils.clip_grad_norm_(wanted.parameters(), CLIP)
    clipped = {name: None if x is None else x.clone() for name, x in gradients(wanted).items()}
    after = stepped(wanted)

    alone = sharded(grid["tp"])
    backward(alone, IDS)
    found: dict[str, Any] = {
        "clipped": float(norm) > 2 * CLIP,
        "tp norm": abs(float(clip_grad_norm_(alone.parameters(), CLIP) / norm) - 1),
        "tp gradients": worst(whole_gradients(alone), clipped),
    }
    both = sharded(grid["tp"])
    for block in both.blocks:
        fully_shard(block, mesh=grid["dp"])
    fully_shard(both, mesh=grid["dp"])
    backward(both, IDS.chunk(2)[grid["dp"].get_local_rank()])
    found["dp x tp norm"] = abs(float(clip_grad_norm_(both.parameters(), CLIP) / norm) - 1)
    found["dp x tp weights"] = worst(stepped(both), after)

    saved = Path(f"{out}.saved")
    dcp.save(both.state_dict(), checkpoint_id=saved)
    lone = init_device_mesh("cpu", (4, 1), mesh_dim_names=("rest", "tp"))["tp"]
    for ranks, mesh in ((4, init_device_mesh("cpu", (4,))), (1, lone)):
        other = sharded(mesh, seed=9)
        state = other.state_dict()
        dcp.load(state, checkpoint_id=saved)
        other.load_state_dict(state)
        found[f"loaded by {ranks}"] = worst(dict(whole_state_dict(other)), after)
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, found)
    if rank == 0:
        out.write_text(json.dumps(gathered))
    end_together()


if __name__ == "__main__":
    torch.set_num_threads(1)
    place = (Path(sys.argv[1]),)
    torch.multiprocessing.start_processes(rank_main, place, RANKS, start_method="fork")
