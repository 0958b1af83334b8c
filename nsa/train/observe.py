"""What is looked at besides the loss: held-out text, which paths run, what the model writes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from nsa import engagement, statistics
from nsa.model import IGNORED_LABEL, TinyLM
from nsa.routing import SPECS, Path
from nsa.train import parallel
from nsa.train.config import RunConfig
from nsa.train.errors import TrainError, TrainExit
from nsa.train.parallel import TrainWorld
from nsa.train.records import Batch

if TYPE_CHECKING:
    from nsa.train.data.vocabulary import Tokenizer

PROBE_TOKENS = 8192  # of the one sequence that a probe looks at


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Of all ranks: ``loss_nats`` a token; bits a byte of text, None where the ids stand for no
    text; ``accuracy_pct``: labels that were the most likely id.
    """

    loss_nats: float
    bits_per_byte: float | None
    accuracy_pct: float


@dataclass(frozen=True, slots=True)
class Probe:
    """Of one eager forward: counters of `nsa.engagement`, and a Summary of `nsa.statistics` as
    plain data.
    """

    engaged: Mapping[str, int]
    statistics: Mapping[str, Any]


def _casting(config: RunConfig, world: TrainWorld) -> torch.autocast:
    casts = config.train.precision == "autocast" and world.kind in ("none", "ddp")
    return torch.autocast(world.device.type, dtype=torch.bfloat16, enabled=casts)


@torch.no_grad()
def held_out(
    model: nn.Module, batches: Iterable[Batch], config: RunConfig, world: TrainWorld
) -> HeldOut:
    """Loss of ``batches``, each rank its own; waits for the device once. TrainError DATA where no
    rank has a label.
    """
    device = world.device
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    for batch in batches:
        cu_seqlens = batch.cu_seqlens
        options = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens.to(device)}
        with _casting(config, world):
            logits = model(batch.ids.to(device), **options)
        flat, labels = logits.flatten(0, 1).float(), batch.labels.to(device).flatten()
        sums[0] += nn.functional.cross_entropy(
            flat, labels, ignore_index=IGNORED_LABEL, reduction="sum"
        )
        sums[3] += (flat.argmax(-1) == labels).sum()
        sums[1] += batch.num_labels
        sums[2] += batch.num_bytes
    loss, num_labels, num_bytes, right = parallel.total(sums, world).tolist()
    if not num_labels:
        raise TrainError(
            TrainExit.DATA,
            "the held-out batches hold no label; wanted text of two tokens at least; make"
            " data.held_out_pct larger, give data.eval_paths, or set train.eval_every=0",
        )
    bits = loss / math.log(2) / num_bytes if num_bytes else None
    return HeldOut(loss / num_labels, bits, 100 * right / num_labels)


@torch.no_grad()
def probe(model: nn.Module, batch: Batch, config: RunConfig, world: TrainWorld) -> Probe:
    """Run one sequence of ``batch`` eagerly and look what that engages; a compiled or captured step
    shows none of it.
    """
    device = world.device
    if batch.cu_seqlens is None:
        ids, options = batch.ids[:1, :PROBE_TOKENS], {}
    else:
        ids, options = batch.ids, {"cu_seqlens": batch.cu_seqlens.to(device)}
    with engagement.collect() as engaged, statistics.collect() as seen, _casting(config, world):
        model(ids.to(device), **options)
    return Probe(dict(engaged.counts), seen.read().to_mapping())


def slow_path(counts: Mapping[str, int], wanted: str) -> str:
    """The slow path of the selected branch among ``counts`` that ``wanted`` does not name."""
    slow = {f"sel.{path}" for path in Path if SPECS[path].slow and path != wanted}
    if wanted == "adaptive":
        slow.discard("sel.v1")
    return ", ".join(sorted(slow & set(counts)))


@torch.no_grad()
def write_text(
    model: TinyLM,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    tokens: int,
    seed: int,
    temperature: float = 0.8,
    top_p: float = 0.95,
) -> str:
    """``prompt`` and up to ``tokens`` ids that the model draws after it, as text; it ends where the
    model ends the text.
    """
    device = model.head.weight.device
    ids: Sequence[int] = tokenizer.encode(prompt.encode()) or [max(tokenizer.eot_id, 0)]
    eot = tokenizer.eot_id
    out: Tensor = model.generate(
        torch.tensor([list(ids)], device=device),
        max_new_tokens=tokens,
        eos_token_id=eot if 0 <= eot < model.config.vocab_size else None,
        temperature=temperature,
        top_p=top_p,
        generator=torch.Generator(device).manual_seed(seed),
    )
    written = out[0, len(ids) :].tolist()
    if eot in written:
        written = written[: written.index(eot)]
    return prompt + tokenizer.decode(written)
