"""The weights that a run begins with, out of another run's checkpoint or an export."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from nsa.train.assemble import model_of
from nsa.train.config import RunConfig
from nsa.train.data.vocabulary import FILE_NAME, Tokenizer
from nsa.train.errors import TrainError, TrainExit
from nsa.train.export import load_pretrained
from nsa.train.finished import load_run
from nsa.train.manifest import MANIFEST
from nsa.train.parallel import TrainWorld


def initial_weights(source: Path, config: RunConfig, tokenizer: Tokenizer) -> Mapping[str, Tensor]:
    """Tensors on the CPU by their names in the model, of ``source``: a checkpoint of a run, or a
    folder that `nsa.train export` wrote.

    TrainError DATA where that model read other ids than ``tokenizer`` gives; CHECKPOINT for a
    source that is damaged, and for one whose tensors are not those of ``config``'s model.
    """
    got = _read(source, tokenizer)
    no_device = TrainWorld(0, 1, torch.device("meta"), "none")
    with torch.device("meta"), torch.random.fork_rng(devices=[]):
        wanted = model_of(config, no_device).state_dict()
    _check_fit(source, got, wanted)
    return got


def _read(source: Path, tokenizer: Tokenizer) -> Mapping[str, Tensor]:
    if (source / MANIFEST).is_file():
        model, own = load_run(source.parent.parent, source, "train.init_from")
        if own.sha256 != tokenizer.sha256:
            raise _other_tokenizer(source)
        return model.state_dict()
    if (source / FILE_NAME).is_file() and not _is_saved_in(source, tokenizer):
        raise _other_tokenizer(source)
    return load_pretrained(source).state_dict()


def _check_fit(source: Path, got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for name in sorted({*got, *wanted}):
        theirs, ours = (
            f"{name} {list(tensors[name].shape)}" if name in tensors else f"no {name}"
            for tensors in (got, wanted)
        )
        if theirs != ours:
            raise TrainError(
                TrainExit.CHECKPOINT,
                f"train.init_from={source} has {theirs}, and this run's model {ours}; wanted one"
                " model; give its model section and train.attention",
            )


def _is_saved_in(folder: Path, tokenizer: Tokenizer) -> bool:
    with TemporaryDirectory() as own:
        tokenizer.save(Path(own))
        saved, wanted = (
            json.loads((where / FILE_NAME).read_text(encoding="utf-8"))
            for where in (folder, Path(own))
        )
    return bool(saved == wanted)


def _other_tokenizer(source: Path) -> TrainError:
    return TrainError(
        TrainExit.DATA,
        f"train.init_from={source} has another tokenizer than this run; wanted the same ids;"
        f" --set data.tokenizer=file data.tokenizer_path={source}/tokenizer.json takes one of"
        " `tokenizers`",
    )
