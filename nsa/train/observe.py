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
from nsa.train.parallel import TrainWorld
from nsa.train.records import Batch

if TYPE_CHECKING:
    from nsa.train.data.vocabulary import Tokenizer

PROBE_TOKENS = 8192  # of the one sequence that a probe looks at


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Of all ranks: ``loss_nats`` a token, and bits a byte of text; None where the ids stand for no
    text.
    """

    loss_nats: float
    bits_per_byte: float | None


@dataclass(frozen=True, slots=True)
class Probe:
    """Of one eager forward: counters of `nsa.engagement`, a Summary of `nsa.statistics` as plain
    data, and the slow path that ran without being asked for, '' where none did.
    """

    engaged: Mapping[str, int]
    statistics: Mapping[str, Any]
    slow: str


def _casting(config: RunConfig, world: TrainWorld) -> torch.autocast:
    casts = config.train.precision == "autocast" and world.kind in ("none", "ddp")
    return torch.autocast(world.device.type, dtype=torch.bfloat16, enabled=casts)


@torch.no_grad()
def held_out(
    model: nn.Module, batches: Iterable[Batch], config: RunConfig, world: TrainWorld
) -> HeldOut:
    """Loss of ``batches``, each rank its own; waits for the device once."""
    device = world.device
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    for batch in batches:
        cu_seqlens = batch.cu_seqlens
        options = {} if cu_seqlens is None else {"cu_seqlens": cu_seqlens.to(device)}
        with _casting(config, world):
            logits = model(batch.ids.to(device), **options)
        sums[0] += nn.functional.cross_entropy(
            logits.flatten(0, 1).float(),
            batch.labels.to(device).flatten(),
            ignore_index=IGNORED_LABEL,
            reduction="sum",
        )
        sums[1] += batch.num_labels
        sums[2] += batch.num_bytes
    loss, labels, num_bytes = parallel.total(sums, world).tolist()
    bits = loss / math.log(2) / num_bytes if num_bytes else None
    return HeldOut(loss / labels, bits)


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
    counts = dict(engaged.counts)
    return Probe(counts, seen.read().to_mapping(), slow_path(counts, config.train.path))


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
