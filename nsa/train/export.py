"""A trained model as Hugging Face's files: model.safetensors, config.json and tokenizer.json."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nsa.config import ModelConfig
from nsa.installing import pip_install
from nsa.model import DenseLM, TinyLM
from nsa.train.errors import TrainError, TrainExit
from nsa.train.manifest import one_line, write_text

MODEL_TYPE = "nsa_tinylm"
ARCHITECTURE = "TinyLMForCausalLM"
WEIGHTS, CONFIG = "model.safetensors", "config.json"
_UNFINISHED = ".tmp-export"
_SHARED = "shared"  # safetensors' metadata: JSON of a name -> the name that holds its tensor


class SavesItself(Protocol):
    """A tokenizer, as the export needs it."""

    def save(self, folder: Path) -> object: ...


def save_pretrained(
    model: TinyLM | DenseLM, folder: str | Path, tokenizer: SavesItself | None = None
) -> None:
    """Write ``folder``/model.safetensors, config.json and what ``tokenizer.save`` writes: all of
    them, or, where one cannot be written, none. All are written before the first takes its name.

    Tensors keep names, dtypes and bits; of tensors that are one, the first name is stored. A
    vocabulary that was resized is the embedding's. ValueError for a wrapped or sharded model;
    TrainError MISSING without safetensors, USAGE for a folder that cannot be written to.
    """
    _package()
    from safetensors import SafetensorError

    if not isinstance(model, TinyLM | DenseLM):
        raise ValueError(
            f"save_pretrained got a {type(model).__name__}; wanted a TinyLM or DenseLM; give what"
            " the wrapper holds (model.module), of a sharded one a whole model that a checkpoint"
            " was loaded into"
        )
    folder = Path(folder)
    unfinished = folder / _UNFINISHED
    made: list[Path] = []
    done = False
    try:
        made = [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        if unfinished.exists():  # of an export that was killed
            shutil.rmtree(unfinished)
        unfinished.mkdir()
        _write(model, unfinished, tokenizer)
        for one in sorted(unfinished.iterdir()):
            os.replace(one, folder / one.name)
        unfinished.rmdir()
        done = True
    except (OSError, SafetensorError) as error:
        why = (isinstance(error, OSError) and error.strerror) or one_line(error)
        raise TrainError(
            TrainExit.USAGE,
            f"{folder} cannot be written: {why}; wanted a folder on a disk with room; give another",
        ) from error
    finally:
        if not done:
            shutil.rmtree(unfinished, ignore_errors=True)
            for one in made:  # the innermost first
                with suppress(OSError):
                    one.rmdir()


def _write(model: TinyLM | DenseLM, folder: Path, tokenizer: SavesItself | None) -> None:
    tensors, shared = _once(model.state_dict())
    config, weights = folder / CONFIG, folder / WEIGHTS
    write_text(config, json.dumps(_config_of(model), indent=2) + "\n")
    metadata = {"format": "pt", _SHARED: json.dumps(shared)}
    _package().save_file(tensors, weights, metadata=metadata)
    weights.chmod(stat.S_IMODE(config.stat().st_mode))  # safetensors makes a file of its owner's
    if tokenizer is not None:
        tokenizer.save(folder)
    for one in folder.rglob("*"):
        if one.is_file():
            with one.open("rb") as file:
                os.fsync(file.fileno())


def load_pretrained(
    folder: str | Path, *, path: str = "auto", fa2: str = "auto"
) -> TinyLM | DenseLM:
    """The model that `save_pretrained` wrote, bit for bit, on the CPU; ``path`` and ``fa2`` as of
    TinyLM.

    TrainError CHECKPOINT for files that are missing, truncated, of another model_type, or without
    the tensors of their config; MISSING without safetensors. torch's generator is left as it was.
    """
    folder = Path(folder)
    plain = _read_config(folder / CONFIG)
    tensors, shared = _read_weights(folder / WEIGHTS)
    try:
        config = ModelConfig.from_mapping(plain["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise _bad(folder / CONFIG, f"has no model of this version: {one_line(error)}") from error
    with torch.random.fork_rng(devices=[]):
        model: TinyLM | DenseLM = (
            DenseLM(config) if plain.get("attention") == "dense" else TinyLM(config, path, fa2)
        )
    for alias, name in shared.items():
        _tie(model, alias, name)
    _fill(model, {**tensors, **{alias: tensors[name] for alias, name in shared.items()}}, folder)
    return model


def _package() -> Any:
    try:
        import safetensors.torch
    except ModuleNotFoundError as error:
        raise TrainError(
            TrainExit.MISSING,
            f"the package safetensors is missing, which the export needs; {pip_install('train')}",
        ) from error
    return safetensors.torch


def _once(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """(tensors by first name, other names -> the first)."""
    first: dict[tuple[Any, ...], str] = {}
    tensors: dict[str, Tensor] = {}
    shared: dict[str, str] = {}
    for name, tensor in state.items():
        same = first.setdefault((tensor.data_ptr(), tensor.shape, tensor.stride()), name)
        if same == name or not tensor.numel():
            tensors[name] = tensor.detach().contiguous()
        else:
            shared[name] = same
    return tensors, shared


def _config_of(model: TinyLM | DenseLM) -> dict[str, Any]:
    config = replace(model.config, vocab_size=model.embedding.weight.shape[0])
    dtype = str(model.embedding.weight.dtype).removeprefix("torch.")
    return {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "dtype": dtype,
        "torch_dtype": dtype,  # its name before transformers 5
        "vocab_size": config.vocab_size,
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "tie_word_embeddings": model.head.weight is model.embedding.weight,
        "attention": "dense" if isinstance(model, DenseLM) else "nsa",
        "model": config.to_mapping(),
    }


def _read_config(path: Path) -> dict[str, Any]:
    try:
        plain = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise _bad(path, f"cannot be read: {one_line(error)}") from error
    kind = plain.get("model_type") if isinstance(plain, dict) else None
    if kind != MODEL_TYPE:
        raise _bad(path, f"has model_type {kind!r}, not {MODEL_TYPE!r}")
    return plain  # type: ignore[no-any-return]


def _read_weights(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    _package()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            shared = json.loads((file.metadata() or {}).get(_SHARED, "{}"))
            # a copy: what safetensors gives is a map of the file, which may change
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise _bad(path, f"cannot be read: {one_line(error)}") from error
    for name in shared.values():
        if name not in tensors:
            raise _bad(path, f"has no tensor {name}")
    return tensors, shared


def _tie(model: nn.Module, alias: str, name: str) -> None:
    """Make the parameter ``alias`` the parameter ``name``, where the model has both."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if alias in parameters and name in parameters:
        owner, _, leaf = alias.rpartition(".")
        setattr(model.get_submodule(owner), leaf, parameters[name])


def _fill(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    own = model.state_dict(keep_vars=True)
    for name in sorted(own.keys() ^ tensors.keys()):
        what = "has no tensor" if name in own else "has a tensor that its config has not:"
        raise _bad(folder / WEIGHTS, f"{what} {name}")
    for name, tensor in tensors.items():
        if own[name].shape != tensor.shape:
            raise _bad(
                folder / WEIGHTS,
                f"has {name} of shape {list(tensor.shape)}, and config.json wants"
                f" {list(own[name].shape)}",
            )
        own[name].data = tensor


def _bad(path: Path, what: str) -> TrainError:
    return TrainError(
        TrainExit.CHECKPOINT,
        f"{path} {what}; wanted a folder that nsa.train's save_pretrained wrote; export it again",
    )
