"""The blocks that a trained model chooses on one row of text, kept as a file with their statistics.

T tokens, G kv heads, N slots.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from nsa import chosen_blocks, statistics
from nsa.model import TinyLM, next_token_labels
from nsa.train.block_statistics import block_statistics
from nsa.train.blocks_file import MAX_BLOCKS, write_blocks
from nsa.train.config import RunConfig
from nsa.train.data import load
from nsa.train.data.vocabulary import Tokenizer
from nsa.train.errors import TrainError, TrainExit
from nsa.train.finished import load_run
from nsa.train.manifest import MANIFEST, CheckpointManifest, FileDigest
from nsa.train.observe import held_out
from nsa.train.parallel import TrainWorld
from nsa.train.records import Batch
from nsa.train.run_folder import read_resolved

GEOMETRY = (
    "sel_block",
    "num_selected",
    "num_initial",
    "num_local",
    "window",
    "cmp_block",
    "cmp_stride",
    "selection",
    "branches",
)


def keep_blocks(
    out: Path,
    checkpoint: Path,
    file: Path,
    *,
    tokens: int,
    layers: Sequence[int] | None,
    text: Path | None,
) -> dict[str, Any]:
    """Write to ``file`` the blocks that the ``layers`` of a ``checkpoint`` of the run in ``out``
    choose for ``tokens`` tokens in one row; return its `about`.

    ``layers``: None for the first, the middle and the last. ``text``: a file whose beginning is
    read, None for the run's held-out text. A layer that attends to everything has no blocks, and
    `about` names it. The forward is eager, on a GPU where there is one. TrainError: USAGE for
    layers that are not there, the dense twin, and where no layer chooses; DATA for text that is too
    short; CHECKPOINT as `load_run`.
    """
    model, tokenizer = load_run(out, checkpoint)
    if not isinstance(model, TinyLM):
        raise TrainError(
            TrainExit.USAGE,
            f"{out} trained the dense twin, which chooses no blocks; wanted train.attention=nsa",
        )
    resolved = read_resolved(out)
    config = RunConfig.from_mapping(resolved["config"]).with_vocab(tokenizer.vocab_size)
    wanted = _layers_of(model, layers)
    batch, source = (
        _held_out_row(config, tokenizer, tokens)
        if text is None
        else _row_of_file(text, tokenizer, tokens)
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        model = model.float()  # a CPU takes 80 times as long in bf16
        config = replace(config, train=replace(config.train, precision="fp32"))
    model = model.to(device)
    with chosen_blocks.collect() as chosen, _by_layer(model) as seen:
        loss = held_out(model, [batch], config, TrainWorld(0, 1, device, "none"))
    assert len(chosen) == len(model.blocks), "a forward calls each layer once"
    slots = max(model.config.config_of(layer).num_selected_for(tokens) for layer in wanted)
    kept = {
        layer: _as_stored(blocks)
        for layer in wanted
        if (blocks := chosen[layer]) is not None and _leaves_any(model, layer, blocks)
    }
    if not kept:
        raise TrainError(
            TrainExit.USAGE,
            f"layers {_listed(wanted)} choose no blocks of {tokens} tokens: each attends to"
            f" everything, or all blocks fit into its {slots} slots; wanted --tokens above"
            f" {slots * model.config.nsa.sel_block}, and layers that select",
        )
    manifest = CheckpointManifest.read(checkpoint)
    about = {
        "model": model.config.to_mapping(),
        "num_kv_heads": model.config.num_kv_heads,
        "run": {"name": out.resolve().name, "config_sha256": resolved.get("sha256")},
        "checkpoint": {
            "name": checkpoint.name,
            "step": manifest.step,
            "manifest_sha256": FileDigest.of(checkpoint / MANIFEST).sha256,
        },
        "held_out": {
            "loss_nats": loss.loss_nats,
            "bits_per_byte": loss.bits_per_byte,
            "accuracy_pct": loss.accuracy_pct,
        },
        "text": {
            **source,
            "ids_sha256": hashlib.sha256(batch.ids.numpy().astype("<i4").tobytes()).hexdigest(),
        },
        "tokens": tokens,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "dtype": str(model.head.weight.dtype).removeprefix("torch."),
        "versions": {
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "attend_to_everything": [layer for layer in wanted if layer not in kept],
        "layers": {
            str(layer): _of_layer(model, layer, blocks, seen[layer])
            for layer, blocks in kept.items()
        },
    }
    write_blocks(file, about, kept)
    return about


def _of_layer(
    model: TinyLM, layer: int, blocks: np.ndarray[Any, Any], seen: statistics.Collection
) -> dict[str, Any]:
    nsa = model.config.config_of(layer)
    return {
        "nsa": {name: getattr(nsa, name) for name in GEOMETRY},
        "summary": seen.read().to_mapping(),
        "blocks": block_statistics(
            blocks,
            sel_block=nsa.sel_block,
            num_initial=nsa.num_initial,
            num_local=nsa.num_local,
        ),
    }


def _layers_of(model: TinyLM, layers: Sequence[int] | None) -> list[int]:
    last = len(model.blocks) - 1
    if layers is None:
        return sorted({0, last // 2, last})
    if wrong := [layer for layer in layers if not 0 <= layer <= last]:
        raise TrainError(
            TrainExit.USAGE,
            f"--layers {_listed(wrong)}: the model's layers are 0 to {last}; name those",
        )
    return sorted(set(layers))


def _listed(layers: Sequence[int]) -> str:
    return ",".join(map(str, layers))


@contextmanager
def _by_layer(model: TinyLM) -> Iterator[list[statistics.Collection]]:
    """The `nsa.statistics` of each layer's attention alone, filled by a forward."""
    collections: list[statistics.Collection] = []
    with ExitStack() as hooks, ExitStack() as failed:

        def observe(attention: nn.Module) -> None:
            opened = ExitStack()

            def begin(*_: Any) -> None:
                failed.push(opened)  # closes what a forward that raises leaves open
                collections.append(opened.enter_context(statistics.collect()))

            hooks.callback(attention.register_forward_pre_hook(begin).remove)
            hooks.callback(attention.register_forward_hook(lambda *_: opened.close()).remove)

        for block in model.blocks:
            observe(block.get_submodule("attention"))
        yield collections


def _leaves_any(model: TinyLM, layer: int, blocks: Tensor) -> bool:
    """Whether the last query sees more blocks than fit into its slots; not every path skips the
    choice where all do.
    """
    return blocks.shape[1] > blocks.shape[3] * model.config.config_of(layer).sel_block


def _as_stored(blocks: Tensor) -> np.ndarray[Any, Any]:
    """int16 [T, G, N] of one row's blocks [1, T, G, N]."""
    if int(blocks.amax()) > MAX_BLOCKS:
        raise TrainError(
            TrainExit.USAGE,
            f"block {int(blocks.amax())} was chosen, and the file holds ids up to {MAX_BLOCKS};"
            " wanted fewer --tokens",
        )
    return blocks[0].to("cpu", torch.int16).contiguous().numpy()


def _held_out_row(
    config: RunConfig, tokenizer: Tokenizer, tokens: int
) -> tuple[Batch, dict[str, Any]]:
    """The first ``tokens`` of the run's held-out text; TrainError DATA for fewer."""
    own = replace(
        config,
        data=replace(config.data, packing="rows", workers=0),
        train=replace(config.train, batch=1, seq_len=tokens),
    )
    try:
        loader = load(own, rank=0, world_size=1, split="held_out", tokenizer=tokenizer)
        try:
            (batch,) = loader.batches(1)
        finally:
            loader.close()
    except TrainError as error:
        if error.code is not TrainExit.DATA:
            raise
        raise TrainError(
            error.code, f"{error} (here train.seq_len is --tokens {tokens}; --text names a file)"
        ) from None
    source = {"source": "held out", **loader.describe()}
    if source["documents"] is not None and batch.num_labels < tokens - 1:
        raise _too_short("the run's held-out text", batch.num_labels, tokens)
    return batch, source


def _row_of_file(path: Path, tokenizer: Tokenizer, tokens: int) -> tuple[Batch, dict[str, Any]]:
    """The first ``tokens`` of a text file; TrainError DATA for fewer, and for one that cannot be
    read.
    """
    try:
        content = path.read_bytes()
        ids = tokenizer.encode(content)
    except UnicodeDecodeError as error:
        raise TrainError(
            TrainExit.DATA, f"--text {path}: byte {error.start} is not UTF-8; save it as UTF-8"
        ) from None
    except OSError as error:
        raise TrainError(
            TrainExit.DATA, f"--text {path} cannot be read: {error.strerror}; name a text file"
        ) from None
    if len(ids) < tokens:
        raise _too_short(f"--text {path}", len(ids), tokens)
    row = torch.tensor([ids[:tokens]])
    batch = Batch(
        ids=row,
        labels=next_token_labels(row),
        cu_seqlens=None,
        num_labels=tokens - 1,
        num_bytes=tokenizer.num_bytes(ids[1:tokens]),
        fetch_s=0.0,
    )
    return batch, {
        "source": path.name,
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }


def _too_short(what: str, got: int, wanted: int) -> TrainError:
    return TrainError(
        TrainExit.DATA,
        f"{what} has {got} tokens; wanted {wanted} in one row; lower --tokens, or give more text",
    )
