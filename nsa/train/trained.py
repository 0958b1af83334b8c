"""The model of a run's checkpoint, to sample from or to export."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nsa.model import DenseLM, TinyLM
from nsa.train.config import RunConfig
from nsa.train.errors import TrainError, TrainExit
from nsa.train.launch import read_resolved

_PREFIX = "model."  # of the weights' names in a checkpoint (nsa.train.loop)


def load_trained(out: Path, checkpoint: Path) -> tuple[TinyLM | DenseLM, Any]:
    """(the model, the tokenizer) of the run in ``out`` as ``checkpoint`` has them: on the GPU where
    there is one in the dtype that was saved, else on the CPU in fp32.

    Writes nothing into the checkpoints, so that a run may go on meanwhile. TrainError CHECKPOINT
    for a damaged one, or one of another config or tokenizer.
    """
    from nsa.train.data import tokenizer_of
    from nsa.train.manifest import Manifest  # type: ignore[import-not-found, unused-ignore]

    config = RunConfig.from_mapping(read_resolved(out)["config"])
    manifest = Manifest.read(checkpoint)
    manifest.check_sizes(checkpoint)
    manifest.check_contents(checkpoint, manifest.files)
    if manifest.config_sha256 != config.sha256():
        raise TrainError(
            TrainExit.CHECKPOINT,
            f"{checkpoint} is of config {manifest.config_sha256[:12]}, and {out}/config.json is"
            f" {config.sha256()[:12]}; wanted a checkpoint of that run; see {out}/checkpoints",
        )
    tokenizer = tokenizer_of(config, out)
    saved = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    shapes = {
        name.removeprefix(_PREFIX): one
        for name, one in saved.items()
        if name.startswith(_PREFIX) and isinstance(one, TensorStorageMetadata)
    }
    model = _model(config.with_vocab(tokenizer.vocab_size))
    weights: dict[str, Tensor] = {}
    for name, own in model.state_dict().items():
        there = shapes.get(name)
        if there is None or there.size != own.shape:
            has = "no such tensor" if there is None else list(there.size)
            raise TrainError(
                TrainExit.CHECKPOINT,
                f"{checkpoint} has {has} for {name}; wanted {list(own.shape)}; take a checkpoint"
                " of this run",
            )
        weights[name] = torch.empty(there.size, dtype=there.properties.dtype)
    with warnings.catch_warnings():
        # of a single process, which no_dist asks for
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        dcp.load(
            {f"{_PREFIX}{name}": one for name, one in weights.items()},
            storage_reader=dcp.FileSystemReader(checkpoint),
            no_dist=True,
        )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = weights["head.weight"].dtype if device == "cuda" else torch.float32
    model.load_state_dict(weights)
    return model.to(device=device, dtype=dtype), tokenizer


def _model(config: RunConfig) -> TinyLM | DenseLM:
    train = config.train
    if train.attention == "dense":
        return DenseLM(config.model)
    return TinyLM(config.model, train.path, train.fa2)
