"""What cannot be is refused before a run in the folder is archived. Imports no torch."""

from __future__ import annotations

from nsa import settings
from nsa.routing import Capability
from nsa.settings import LaunchedPlace
from nsa.train.config import RunConfig
from nsa.train.errors import TrainError, TrainExit


def check(config: RunConfig, where: Capability) -> None:
    """TrainError USAGE or DEVICE for a way to be parallel that this start has not, DEVICE for a GPU
    or NCCL that is not ``where`` the run would take place, DATA for files that are not there.
    """
    resolved_kind(config, settings.launched_place())
    if config.train.device == "cuda" and where.device != "cuda":
        raise TrainError(
            TrainExit.DEVICE,
            "train.device=cuda where torch finds no GPU; wanted one; look at nvidia-smi and"
            " CUDA_VISIBLE_DEVICES, or --set train.device=cpu",
        )
    backend_on(config, "cpu" if config.train.device == "cpu" else where.device)
    if config.data.kind in ("text", "parquet"):
        from nsa.train.data.paths import list_files

        suffixes = (".parquet",) if config.data.kind == "parquet" else ()
        for option in ("paths", "eval_paths"):
            if patterns := getattr(config.data, option):
                list_files(patterns, option=f"data.{option}", suffixes=suffixes)


def backend_on(config: RunConfig, device: str) -> str:
    """parallel.backend without auto for ``device`` "cuda" or "cpu": nccl or gloo.

    TrainError DEVICE for nccl without a GPU, in one process, too, where nothing is sent.
    """
    wanted = config.parallel.backend
    if wanted == "nccl" and device != "cuda":
        raise TrainError(
            TrainExit.DEVICE,
            f"parallel.backend=nccl on {device}; wanted a GPU; --set parallel.backend=gloo works on"
            " CPUs",
        )
    if wanted != "auto":
        return wanted
    return "nccl" if device == "cuda" else "gloo"


def resolved_kind(config: RunConfig, place: LaunchedPlace | None) -> str:
    """parallel.kind without auto: none, ddp, fsdp or hsdp.

    TrainError USAGE for a kind that needs several processes, for gradients or weights that a kind
    cannot compress or compile, DEVICE for a size that ``shard_size`` does not divide.
    """
    parallel = config.parallel
    if place is None:
        if parallel.kind not in ("auto", "none"):
            raise TrainError(
                TrainExit.USAGE,
                f"parallel.kind={parallel.kind} in one process; wanted several; start it by"
                " torchrun --nproc-per-node=N -m nsa.train ..., or omit parallel.kind",
            )
        return "none"
    kind = "ddp" if parallel.kind == "auto" else parallel.kind
    if kind == "none" and place.size > 1:
        raise TrainError(
            TrainExit.USAGE,
            f"parallel.kind=none among {place.size} processes; wanted ddp, fsdp or hsdp; omit"
            " parallel.kind for ddp",
        )
    if kind != "ddp" and parallel.compress != "off":
        raise TrainError(
            TrainExit.USAGE,
            f"parallel.compress={parallel.compress} with parallel.kind={kind}; wanted ddp, which"
            " alone sends whole gradients; --set parallel.compress=off",
        )
    if kind in ("fsdp", "hsdp") and config.train.compile:
        raise TrainError(
            TrainExit.USAGE,
            f"train.compile=true with parallel.kind={kind}; wanted ddp, since no graph holds what"
            " gathers sharded weights; --set train.compile=false",
        )
    if kind == "hsdp" and (parallel.shard_size < 2 or place.size % parallel.shard_size):
        raise TrainError(
            TrainExit.DEVICE,
            f"parallel.shard_size={parallel.shard_size} among {place.size} processes; wanted a"
            " divisor of them, from 2 on; GPUs of one host is usual",
        )
    return kind
