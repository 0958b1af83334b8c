"""A model as several ranks train it: DistributedDataParallel, or FSDP2 block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from perfbench.worker.ranks.world import Ranks

BUCKET_MB = 25  # of DistributedDataParallel's gradients, its default


def wrap(model: nn.Module, parallel: str, ranks: Ranks, device: str) -> nn.Module:
    """What is called in place of ``model``, whose parameters stay its own, under fsdp as
    DTensors.
    """
    if parallel == "ddp":
        return nn.parallel.DistributedDataParallel(
            model,
            device_ids=[0] if device == "cuda" else None,  # a rank sees its own card alone
            bucket_cap_mb=BUCKET_MB,
            gradient_as_bucket_view=True,
        )
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(device, (ranks.size,))
    blocks: Any = model.blocks
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def unsynchronised(wrapped: nn.Module, step: Callable[[], None]) -> Callable[[], None] | None:
    """``step`` with gradients left on their rank; None under fsdp, whose gathered weights no switch
    turns off.
    """
    if not isinstance(wrapped, nn.parallel.DistributedDataParallel):
        return None

    def alone() -> None:
        with wrapped.no_sync():
            step()

    return alone


def backend_of(device: str) -> str:
    return "nccl" if device == "cuda" else "gloo"


def local(x: Tensor) -> Tensor:
    """This rank's part of a DTensor; any other tensor itself."""
    to_local = getattr(x, "to_local", None)
    return x if to_local is None else to_local()


def whole(x: Tensor) -> Tensor:
    """All of a DTensor, which every rank must ask for; any other tensor itself."""
    full = getattr(x, "full_tensor", None)
    return x if full is None else full()


def end_group(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
    dist.destroy_process_group()
