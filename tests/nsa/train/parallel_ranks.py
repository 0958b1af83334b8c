"""Forks two ranks, then four: each kind of parallel training against one process that sees the
batches of all ranks. What rank 0 of each found is written as JSON to argv[1].
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nsa.config import preset
from nsa.model import IGNORED_LABEL, TinyLM, next_token_labels
from nsa.parallel.norm import local_of
from nsa.train import parallel
from nsa.train.config import RunConfig
from nsa.train.errors import TrainError
from nsa.train.optimizer import TrainOptimizer, build_optimizer
from nsa.train.parallel import TrainWorld
from nsa.train.records import Batch
from nsa.train.step import TrainStep
from tests.nsa.torchrun import end_together

KINDS: dict[str, dict[str, Any]] = {
    "ddp": {"kind": "ddp"},
    "ddp, small buckets": {"kind": "ddp", "bucket_mb": 1},
    "fsdp": {"kind": "fsdp"},
    "hsdp": {"kind": "hsdp", "shard_size": 2},
}
NUM_STEPS = 3


def config_of(section: dict[str, Any]) -> RunConfig:
    train = {"precision": "fp32", "batch": 1, "seq_len": 32, "accumulate": 2, "clip": 0.3}
    config = RunConfig.from_mapping({"train": train, "parallel": section})
    return replace(config, model=replace(preset("tiny"), vocab_size=32))


def batch_of(rank: int, step: int, micro: int) -> Batch:
    seed = 100 * rank + 10 * step + micro
    ids = torch.randint(32, (1, 32), generator=torch.Generator().manual_seed(seed))
    return Batch(ids, next_token_labels(ids), None, 31, 31, 0.0)


def documents_of(rank: int, step: int, micro: int) -> Batch:
    """Of rank 1 with five times as many documents, and fewer labels, since each one's last token
    has none.
    """
    ids = batch_of(rank, step, micro).ids
    ends = torch.tensor([0, 20, 32] if rank == 0 else [*range(0, 30, 3), 32], dtype=torch.int32)
    labels = next_token_labels(ids)
    labels[0, (ends[1:] - 1).long()] = IGNORED_LABEL
    num_labels = int((labels != IGNORED_LABEL).sum())
    return Batch(ids, labels, ends, num_labels, num_labels, 0.0)


def model_of(config: RunConfig) -> TinyLM:
    torch.manual_seed(0)
    return TinyLM(config.model, "masked")


def whole(p: Tensor) -> Tensor:
    return p.full_tensor() if isinstance(p, DTensor) else p


def reference(world: TrainWorld, batch: Callable[[int, int, int], Batch]) -> nn.Module | None:
    """One process, plain PyTorch, the batches of all ranks: the mean over all their labels. Rank 0
    compares.
    """
    if not world.is_first:
        return None
    model = model_of(config_of({}))
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        lr=1e-2,
        betas=(0.9, 0.95),
    )
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        batches = [batch(rank, step, micro) for rank in range(world.size) for micro in range(2)]
        num_labels = sum(one.num_labels for one in batches)
        for one in batches:
            logits = model(one.ids, cu_seqlens=one.cu_seqlens).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, one.labels.flatten(), reduction="sum")
            (loss / num_labels).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
    return model


def spied(model: nn.Module) -> list[bool]:
    """A list that each micro-batch adds to whether its gradients stay on their rank; DDP is told of
    those that do alone, FSDP of every one.
    """
    kept_local: list[bool] = []
    if isinstance(model, DistributedDataParallel):
        no_sync = model.no_sync

        def noted() -> Any:
            kept_local.append(True)
            return no_sync()

        model.no_sync = noted  # type: ignore[method-assign]
    elif isinstance(model, FSDPModule):
        sync = model.set_requires_gradient_sync
        model.set_requires_gradient_sync = lambda on: (  # type: ignore[method-assign]
            kept_local.append(not on),
            sync(on),
        )[1]
    return kept_local


def before_clipping(optimizer: TrainOptimizer, model: nn.Module) -> list[float]:
    """A list that each step adds to the share of this rank's elements of the gradient that bf16
    holds exactly. What clips, the optimizer's fused kernel, writes others.
    """
    shares: list[float] = []
    clip = optimizer.clip

    def seen(max_norm: float) -> Tensor:
        given = torch.cat([local_of(p.grad).flatten() for p in model.parameters()])
        shares.append(float((given == given.bfloat16()).float().mean()))
        return clip(max_norm)

    optimizer.clip = seen  # type: ignore[method-assign]
    return shares


def mesh_of(model: nn.Module) -> list[int]:
    first = next(model.parameters())
    return list(first.device_mesh.shape) if isinstance(first, DTensor) else []


def furthest(weights: list[Tensor], model: nn.Module) -> float:
    pairs = zip(weights, model.parameters(), strict=True)
    return max(float((got - want.detach()).abs().max()) for got, want in pairs)


def compare(
    world: TrainWorld,
    section: dict[str, Any],
    wanted: nn.Module | None,
    batch: Callable[[int, int, int], Batch] = batch_of,
) -> dict[str, Any]:
    config = config_of(section)
    world = replace(world, kind=section["kind"])
    plain = model_of(config)
    model = parallel.wrap(plain, config, world)
    kept_local = spied(model)
    optimizer = build_optimizer(plain, config.train)
    in_bf16 = before_clipping(optimizer, plain)
    step = TrainStep(model, optimizer, config, world)
    local_micro_steps = []
    for i in range(NUM_STEPS):
        kept_local.clear()
        step([batch(world.rank, i, micro) for micro in range(2)], 1e-2)
        local_micro_steps.append(list(kept_local))
    totals = step.read()
    before = [whole(p.detach()).clone() for p in plain.parameters()]
    if world.rank == 1:  # one rank alone has a loss that is not finite
        step._call = lambda ids, **options: model(ids, **options) * float("nan")
    step([batch(world.rank, 9, micro) for micro in range(2)], 1e-2)
    unchanged = all(
        torch.equal(whole(p.detach()), old)
        for p, old in zip(plain.parameters(), before, strict=True)
    )
    return {
        "error": None if wanted is None else furthest(before, wanted),
        "loss_nats": totals.loss_nats,
        "gradient_norm": totals.gradient_norm,
        "unchanged": unchanged,
        "bad_steps": step.read().bad_steps,
        "local_micro_steps": local_micro_steps,
        "bucket_bytes": getattr(model, "bucket_bytes_cap", None),
        "mesh": mesh_of(plain),
        "in_bf16": in_bf16[NUM_STEPS - 1],
        "local_elements": sum(
            (p.to_local() if isinstance(p, DTensor) else p).numel() for p in plain.parameters()
        ),
        "elements": sum(p.numel() for p in plain.parameters()),
    }


@contextmanager
def compressing_over_gloo() -> Iterator[None]:
    """What the trainer and DDP refuse, by the backend's and by the hook's name."""
    hook = default_hooks.bf16_compress_hook

    def by_another_name(state: Any, bucket: Any) -> Any:
        return hook(state, bucket)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "get_backend", lambda group=None: "nccl")
        patch.setattr(
            default_hooks, "bf16_compress_hook", lambda state, bucket: hook(state, bucket)
        )
        yield


def by_two(world: TrainWorld) -> dict[str, Any]:
    wanted = reference(world, batch_of)
    found = {name: compare(world, section, wanted) for name, section in KINDS.items()}
    compressed = {"kind": "ddp", "compress": "bf16"}
    with compressing_over_gloo():
        found["ddp, compressed"] = compare(world, compressed, wanted)
    wanted = reference(world, documents_of)
    for kind in ("ddp", "fsdp"):
        found[f"{kind}, documents"] = compare(world, KINDS[kind], wanted, documents_of)
    try:
        parallel.wrap(model_of(config_of({})), config_of(compressed), world)
    except TrainError as error:
        found["compressed over gloo"] = {"code": error.code, "message": str(error)}
    found["agreed"] = {"largest": parallel.largest(10 * world.rank, world)}
    return found


def by_four(world: TrainWorld) -> dict[str, Any]:
    """A 2 x 2 mesh: two copies of the weights, of two halves each."""
    return {"hsdp, replicated": compare(world, KINDS["hsdp"], reference(world, batch_of))}


def rank_main(rank: int, size: int, port: int, out: Path) -> None:
    """As torchrun would start it."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
            patch.setenv(name, str(value))
        world = parallel.connect(config_of({"timeout_s": 60}))
    found = by_two(world) if size == 2 else by_four(world)
    if world.is_first:
        out.write_text(json.dumps(found))
    end_together()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def main(out: Path) -> None:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for size in (2, 4):
        of_size = out.with_name(f"{size}.json")
        torch.multiprocessing.start_processes(
            rank_main, (size, free_port(), of_size), size, start_method="fork"
        )
        found |= json.loads(of_size.read_text())
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
