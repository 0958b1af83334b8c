"""Train a byte-level language model with NSA on one text file, then let it write: two minutes on
two CPU cores.

    python examples/train_text.py README.md

The file is one long document, so a training row is a window of it at a random place. Packing with
``cu_seqlens`` is for many short documents: cut at blank lines, most pieces of a text would be
shorter than the 104 tokens that the selected blocks and the sliding window of this model reach, and
NSA would have nothing to choose.

B batch, T tokens of a window.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from nsa import ModelConfig, TinyLM, capability, settings
from nsa.config import preset
from nsa.engagement import collect
from nsa.model import next_token_labels
from nsa.routing import Problem

BATCH = 4
LEARNING_RATE = 3e-3
WARMUP_STEPS = 20
MIN_SEQ_LEN = 32  # four compressed blocks of this model
NUM_REPORTS = 10
HELD_OUT_SHARE = 0.1
MODEL = replace(preset("tiny"), dim=128, head_dim=32)  # 0.5 M parameters, bytes as tokens


@dataclass(frozen=True, slots=True)
class Outcome:
    """``losses`` of every step, ``held_out`` the loss on the part never trained on, ``unigram`` the
    bytes' entropy: nats a byte.
    """

    losses: list[float]
    held_out: float
    unigram: float
    text: str


def read_bytes(path: Path, seq_len: int) -> Tensor:
    """The file's bytes, int64 [number of bytes]; ValueError unless it is a file with two windows in
    its trained part.
    """
    if not path.is_file():
        raise ValueError(
            f"got {path}, which is not a file; wanted a text to train on; README.md is one"
        )
    raw = path.read_bytes()
    wanted = math.ceil((2 * seq_len + 1) / (1 - HELD_OUT_SHARE))
    if len(raw) < wanted:
        raise ValueError(
            f"{path} has {len(raw)} bytes; wanted at least {wanted} for --seq-len {seq_len}; give a"
            " longer file or lower --seq-len"
        )
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).long()


def unigram_entropy(data: Tensor) -> float:
    """Entropy of the byte frequencies: the loss, in nats a byte, of a model that knows only how
    often each occurs.
    """
    share = torch.bincount(data).double() / len(data)
    return float(torch.special.entr(share).sum())


def loss_of(model: TinyLM, ids_BT: Tensor) -> Tensor:
    """Mean cross-entropy of each next byte, in nats."""
    logits = model(ids_BT)
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), next_token_labels(ids_BT).flatten()
    )


def explain_route(model: ModelConfig, seq_len: int) -> list[str]:
    """What will serve each branch of a layer here, and why nothing else; nothing runs."""
    problem = Problem.of(model, batch=BATCH, tokens=seq_len, dtype="float32")
    return settings.decide(problem, capability.probe("cpu"), path="auto", fa2="auto").explain()


@torch.no_grad()
def held_out_loss(model: TinyLM, data: Tensor, seq_len: int) -> float:
    """Loss on up to BATCH windows of ``data``, side by side; on the whole of it where it is shorter
    than one.
    """
    size = min(seq_len, len(data))
    return float(loss_of(model, data.unfold(0, size, size)[:BATCH]))


def train(
    model: TinyLM,
    data: Tensor,
    held_out: Tensor,
    *,
    steps: int,
    seq_len: int,
    generator: torch.Generator,
) -> list[float]:
    """AdamW with warm-up and a linear decay to zero; prints as it goes and returns the loss of
    every step.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, weight_decay=0.1, betas=(0.9, 0.95)
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, (steps - step) / steps)
    )
    windows_NT = data.unfold(0, seq_len, 1)  # a view: no byte is copied
    report_every = math.ceil(steps / NUM_REPORTS)
    losses: list[float] = []
    since = time.perf_counter()
    for step in range(1, steps + 1):
        ids_BT = windows_NT[torch.randint(len(windows_NT), (BATCH,), generator=generator)]
        with collect() as ran:
            loss = loss_of(model, ids_BT)
            optimizer.zero_grad()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
        if step == 1:
            print(f"ran in step 1: {ran.counts}")
        if step % report_every == 0 or step == steps:
            recent = losses[(step - 1) // report_every * report_every :]
            tokens_per_s = len(recent) * ids_BT.numel() / (time.perf_counter() - since)
            held = held_out_loss(model, held_out, seq_len)
            print(
                f"step {step:4d}  loss {sum(recent) / len(recent):.3f}  held out {held:.3f} "
                f" {tokens_per_s:,.0f} tok/s",
                flush=True,
            )
            since = time.perf_counter()
    return losses


def write(model: TinyLM, prompt: str, *, max_new_tokens: int, generator: torch.Generator) -> str:
    """Continue ``prompt`` from a cache, a byte at a time, each drawn from the likely 90 %."""
    ids_BT = torch.tensor([list(prompt.encode())])
    out_BT = model.generate(
        ids_BT, max_new_tokens=max_new_tokens, temperature=0.8, top_p=0.9, generator=generator
    )
    return bytes(out_BT[0].tolist()).decode(errors="replace")


def run(
    file: Path,
    *,
    steps: int,
    seq_len: int,
    prompt: str | None,
    seed: int,
    max_new_tokens: int = 300,
) -> Outcome:
    """Train on ``file`` and write; ValueError for a file or numbers that do not fit."""
    if steps < 1 or seq_len < MIN_SEQ_LEN:
        raise ValueError(
            f"--steps {steps}, --seq-len {seq_len}; wanted at least 1 and {MIN_SEQ_LEN}; the"
            " defaults are 300 and 512"
        )
    if prompt == "":
        raise ValueError(
            "--prompt is empty; wanted at least one character; leave it away to begin with the"
            " file's first line"
        )
    data = read_bytes(file, seq_len)
    trained, held_out = data.tensor_split([math.ceil((1 - HELD_OUT_SHARE) * len(data))])
    unigram = unigram_entropy(data)
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = TinyLM(MODEL)
    print(
        f"{file}: {len(data):,} bytes, unigram entropy {unigram:.3f} nats a byte; the last tenth is"
        " held out"
    )
    print("\n".join(explain_route(MODEL, seq_len)))

    losses = train(model, trained, held_out, steps=steps, seq_len=seq_len, generator=generator)
    if prompt is None:
        first_line = (
            bytes(data[:seq_len].tolist()).decode(errors="replace").strip().partition("\n")[0]
        )
        prompt = f"{first_line}\n"
    text = write(model, prompt, max_new_tokens=max_new_tokens, generator=generator)
    print(f"--- sample, temperature 0.8, top_p 0.9 ---\n{text}")
    return Outcome(losses, held_out_loss(model, held_out, seq_len), unigram, text)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description="Train a byte-level TinyLM with NSA on a text file, and generate from it."
    )
    parser.add_argument(
        "file", type=Path, metavar="FILE", help="text to train on, any encoding; README.md will do"
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=300,
        metavar="N",
        help="optimizer steps of 4 windows each (300)",
    )
    parser.add_argument(
        "--seq-len", type=int, default=512, metavar="N", help="bytes of a window (512)"
    )
    parser.add_argument(
        "--prompt", metavar="TEXT", help="what the sample begins with (the file's first line)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of weights, windows and sample (0)"
    )
    arguments = parser.parse_args(argv)
    try:
        run(**vars(arguments))
    except ValueError as error:
        parser.error(str(error))  # exit 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
