"""A model as several ranks train it: DistributedDataParallel, or FSDP2 block by block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """``step`` with gradients left on their rank, and under fsdp with weights that were gathered in
    its first call; None under the fsdp of a torch that cannot be given other collectives.
    """
    if isinstance(wrapped, nn.parallel.DistributedDataParallel):
        ddp = wrapped

        def alone() -> None:
            with ddp.no_sync():
                step()

        return alone
    sharded: list[Any] = [one for one in wrapped.modules() if hasattr(one, "set_custom_all_gather")]
    if not sharded:
        return None

    def without_collectives() -> None:
        while sharded:
            one = sharded.pop()
            one.set_custom_all_gather(_KeptWeights())
            one.set_custom_reduce_scatter(_OwnPart())
        step()

    return without_collectives


class _KeptWeights:
    """The all-gather of one group of fsdp's weights, made once: later calls find the other ranks'
    weights where the first one left them.
    """

    def __init__(self) -> None:
        self._whole: Tensor | None = None
        self._is_filled = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        if self._whole is None:
            self._whole = torch.empty(*size, dtype=dtype, device=device)
        return self._whole

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        if not self._is_filled:
            parts = list(output_tensor.chunk(dist.get_world_size(group)))
            dist.all_gather(parts, input_tensor.clone(), group)
            self._is_filled = True


class _OwnPart:
    """In place of a reduce-scatter: this rank's own gradients of its shard."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        output_tensor.copy_(input_tensor.chunk(dist.get_world_size(group))[dist.get_rank(group)])


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
