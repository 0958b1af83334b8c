"""Several processes: the group, and the model as each kind of parallel training wants it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from nsa import settings
from nsa.train.config import RunConfig
from nsa.train.errors import TrainError, TrainExit
from nsa.train.preflight import backend_on, resolved_kind


@dataclass(frozen=True, slots=True)
class TrainWorld:
    """This process among the others; ``kind`` is resolved: none, ddp, fsdp or hsdp."""

    rank: int
    size: int
    device: torch.device
    kind: str

    @property
    def is_first(self) -> bool:
        return self.rank == 0


def connect(config: RunConfig) -> TrainWorld:
    """Join the process group that torchrun's variables describe; alone where there are none.

    TrainError DEVICE for a GPU or a backend that is not there; and as `preflight.resolved_kind`.
    """
    place, parallel = settings.launched_place(), config.parallel
    kind = resolved_kind(config, place)
    if place is None:
        device = _device(config.train.device, 0)
        backend_on(config, device.type)
        return TrainWorld(0, 1, device, kind)
    device = _device(config.train.device, place.local_rank)
    backend = backend_on(config, device.type)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        timeout=timedelta(seconds=parallel.timeout_s),
        device_id=device if backend == "nccl" else None,
    )
    return TrainWorld(dist.get_rank(), dist.get_world_size(), device, kind)


def disconnect(world: TrainWorld) -> None:
    if world.size > 1 or dist.is_initialized():
        dist.destroy_process_group()


def _device(wanted: str, local_rank: int) -> torch.device:
    count = torch.cuda.device_count() if wanted != "cpu" else 0
    if wanted == "cpu" or (wanted == "auto" and count == 0):
        return torch.device("cpu")
    if local_rank >= count:
        raise TrainError(
            TrainExit.DEVICE,
            f"train.device={wanted} and local rank {local_rank} with {count} GPUs; wanted a GPU a"
            " process; start fewer, look at CUDA_VISIBLE_DEVICES, or --set train.device=cpu",
        )
    return torch.device("cuda", local_rank)


def wrap(model: nn.Module, config: RunConfig, world: TrainWorld) -> nn.Module:
    """``model``, on its device, as it is called in training; its parameters stay its own, under
    fsdp and hsdp as DTensors.
    """
    parallel = config.parallel
    if world.kind == "ddp":
        ddp = nn.parallel.DistributedDataParallel(
            model,
            device_ids=[world.device.index] if world.device.type == "cuda" else None,
            bucket_cap_mb=parallel.bucket_mb,
            gradient_as_bucket_view=True,
        )
        if parallel.compress == "bf16":
            if dist.get_backend() != "nccl":
                raise TrainError(
                    TrainExit.DEVICE,
                    f"parallel.compress=bf16 over {dist.get_backend()}; wanted nccl, whose"
                    " reduction takes bf16; --set parallel.compress=off",
                )
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            ddp.register_comm_hook(state=None, hook=default_hooks.bf16_compress_hook)
        return ddp
    if world.kind in ("fsdp", "hsdp"):
        _shard(model, config, world)
    return model


def _shard(model: nn.Module, config: RunConfig, world: TrainWorld) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if world.kind == "hsdp":
        shard = config.parallel.shard_size
        mesh = init_device_mesh(
            world.device.type, (world.size // shard, shard), mesh_dim_names=("replicate", "shard")
        )
    else:
        mesh = init_device_mesh(world.device.type, (world.size,))
    in_bf16 = config.train.precision in ("bf16_master", "autocast")
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if in_bf16
        else MixedPrecisionPolicy()
    )
    blocks: Any = model.blocks
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


@contextmanager
def accumulating(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Gradients of all but the ``last`` micro-step stay on their rank."""
    sync_later: Any = nullcontext()
    if isinstance(model, nn.parallel.DistributedDataParallel) and not last:
        sync_later = model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)  # type: ignore[operator]
    with sync_later:
        yield


def wait_for_all(world: TrainWorld) -> None:
    if world.size > 1:
        dist.barrier()


def total(values: Tensor, world: TrainWorld) -> Tensor:
    """The sum of ``values`` over all ranks, in place."""
    if world.size > 1:
        dist.all_reduce(values)
    return values


def any_rank(flag: Tensor, world: TrainWorld) -> Tensor:
    """Whether ``flag``, a float of 0 or 1, is 1 on some rank, in place: all ranks agree."""
    if world.size > 1:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return flag


def largest(number: int, world: TrainWorld) -> int:
    """The largest ``number`` of any rank; waits for all of them."""
    if world.size == 1:
        return number
    shared = torch.tensor(number, device=world.device)
    dist.all_reduce(shared, op=dist.ReduceOp.MAX)
    return int(shared)
