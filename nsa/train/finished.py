"""A trained model, out of the folder of its run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from nsa.model import DenseLM, TinyLM
from nsa.train.assemble import model_of
from nsa.train.checkpoint import CheckpointStore
from nsa.train.config import RunConfig
from nsa.train.data import tokenizer_of
from nsa.train.errors import TrainError, TrainExit
from nsa.train.export import save_pretrained
from nsa.train.observe import write_text
from nsa.train.parallel import TrainWorld
from nsa.train.run_folder import read_resolved

if TYPE_CHECKING:
    from nsa.train.data.vocabulary import Tokenizer


def load_run(
    out: Path, checkpoint: Path, option: str = "--checkpoint"
) -> tuple[TinyLM | DenseLM, Tokenizer]:
    """The model of a ``checkpoint`` of the run in ``out``, on the CPU in the dtype that it was
    trained in, and its tokenizer. TrainError CHECKPOINT for one that is damaged or another run's,
    which says what to give ``option`` instead.
    """
    config = RunConfig.from_mapping(read_resolved(out)["config"])
    tokenizer = tokenizer_of(config, out)
    config = config.with_vocab(tokenizer.vocab_size)
    kind = config.parallel.kind if config.parallel.kind in ("fsdp", "hsdp") else "none"
    model = model_of(config, TrainWorld(0, 1, torch.device("cpu"), kind))
    store = CheckpointStore(
        out,
        keep=0,
        asynchronous=False,
        config_sha256=config.sha256(),
        config=config.identity(),
        rank=0,
        world_size=1,
        option=option,
    )
    try:
        store.load({"model": model.state_dict()}, checkpoint)
    finally:
        store.close()
    return model.eval(), tokenizer


def sample_text(
    out: Path,
    checkpoint: Path,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
) -> str:
    """``prompt``, continued by the model of a ``checkpoint``, on a GPU where there is one.
    TrainError MEMORY where no cache of so many tokens fits.
    """
    model, tokenizer = load_run(out, checkpoint)
    if not isinstance(model, TinyLM):
        raise TrainError(
            TrainExit.USAGE,
            f"{out} trained the dense twin, which does not generate; wanted train.attention=nsa",
        )
    if torch.cuda.is_available():
        model = model.to("cuda")
    elif model.head.weight.dtype == torch.bfloat16:
        model = model.float()  # a CPU takes 80 times as long in bf16
    try:
        return write_text(
            model,
            tokenizer,
            prompt,
            tokens=tokens,
            seed=seed,
            temperature=temperature,
            top_p=top_p,
        )
    except torch.OutOfMemoryError as error:
        got = str(error).split("; wanted", 1)[0]  # what follows advises who makes the cache
        raise TrainError(
            TrainExit.MEMORY, f"out of memory with --tokens {tokens}: {got}; lower --tokens"
        ) from error


def export_run(out: Path, checkpoint: Path, folder: Path) -> None:
    """Write the model of a ``checkpoint`` as `export.save_pretrained` does, its tokenizer too."""
    model, tokenizer = load_run(out, checkpoint)
    save_pretrained(model, folder, tokenizer)
