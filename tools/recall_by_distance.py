"""How much a trained model recalls, by length and by how far away the value was stated.

    python -m tools.recall_by_distance RUN [--checkpoint NAME] [--lengths 2048 65536] [--json FILE]

RUN is a folder that `python -m nsa.train` wrote with data.kind=recall or copying. The rows are
held out. ``far`` are questions that only compressed and selected keys can answer: the pair (of
copying: the token) lies outside the window and outside the blocks that every query reads. ``block
chosen``: how often the block of a far pair is among those that the query chose, of the layer and kv
head where that is most often; and ``by any``, of all layers and kv heads together, which may divide
the keys among them.

B rows, T tokens, G kv heads, N slots.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nsa import chosen_blocks
from nsa.config import NSAConfig
from nsa.model import DenseLM, TinyLM
from nsa.train.config import DataConfig, RunConfig
from nsa.train.data import copying
from nsa.train.data.generated import Language
from nsa.train.data.recall import LEAST_TOKENS, RecallRows, most_pairs, num_pairs_for
from nsa.train.errors import TrainError, TrainExit
from nsa.train.finished import load_run
from nsa.train.run_folder import checkpoint_of, read_resolved

TOKENS_A_FORWARD = 65_536
EDGES = (2048, 8192, 16_384, 32_768)  # tokens of distance, besides the window


@dataclass(frozen=True, slots=True)
class Recalled:
    """Of the questions whose value was stated ``from_tokens`` to ``to_tokens`` - 1 tokens before;
    ``guess_pct``: right by chance among the values that the row states, of copying among the
    tokens of the kind.
    """

    length: int
    distance: str
    questions: int
    right_pct: float
    guess_pct: float
    chosen_pct: float | None = None
    chosen_by: str = ""
    chosen_by_any_pct: float | None = None


def is_far(rows: RecallRows, config: NSAConfig) -> NDArray[np.bool_]:
    """bool [B, T]: questions whose pair no window holds, and no block that is read by force."""
    at = np.arange(rows.ids.shape[1])
    block, stated_block = at // config.sel_block, rows.stated // config.sel_block
    # the key lies one token before the value, in the same block
    return (
        (rows.stated > 0)
        & (at - rows.stated >= config.window)
        & (stated_block >= config.num_initial)
        & (stated_block <= block - config.num_local)
    )


def recalled(
    model: TinyLM | DenseLM, rows: RecallRows, num_answers: int, device: torch.device
) -> list[Recalled]:
    """One line a range of distances, then one of all, then one of the far ones."""
    nsa, length = model.config.config_of(0), rows.ids.shape[1]
    right, chosen = _answers(model, rows, nsa, device)
    asked, at = rows.labels >= 0, np.arange(length)
    distance = np.where(asked, at - rows.stated, 0)
    edges = [1, *sorted({nsa.window, *EDGES}), length]
    edges = [one for one in edges if one < length] + [length]
    kinds = {
        f"{low:,} to {high - 1:,}": asked & (distance >= low) & (distance < high)
        for low, high in pairwise(edges)
    }
    far = is_far(rows, nsa)
    found = []
    for name, among in {**kinds, "all": asked, "far": far}.items():
        count = int(among.sum())
        if count:
            found.append(
                Recalled(length, name, count, 100 * float(right[among].mean()), 100 / num_answers)
            )
    if far.any() and chosen:
        best = max(chosen, key=lambda one: float(chosen[one][far].mean()))
        share = 100 * float(chosen[best][far].mean())
        by_any = 100 * float(np.logical_or.reduce([one[far] for one in chosen.values()]).mean())
        found[-1] = replace(found[-1], chosen_pct=share, chosen_by=best, chosen_by_any_pct=by_any)
    return found


@torch.no_grad()
def _answers(
    model: TinyLM | DenseLM, rows: RecallRows, nsa: NSAConfig, device: torch.device
) -> tuple[NDArray[np.bool_], dict[str, NDArray[np.bool_]]]:
    """Which questions are right, bool [B, T], and by layer and kv head, whether the block of the
    pair was chosen, bool [B, T].
    """
    right, chosen = [], dict[str, list[NDArray[np.bool_]]]()
    for part in _forwards(len(rows.ids), rows.ids.shape[1]):
        ids, labels = (torch.from_numpy(x[part]).to(device) for x in (rows.ids, rows.labels))
        stated = torch.from_numpy(rows.stated[part]).to(device)
        with chosen_blocks.collect() as blocks:
            logits: Tensor = model(ids)
        right.append((logits.argmax(-1) == labels).cpu().numpy())
        for layer, of_layer in enumerate(blocks):
            if of_layer is None:
                continue
            has = (of_layer == (stated // nsa.sel_block)[..., None, None]).any(-1)
            for head in range(has.shape[2]):
                name = f"layer {layer}, kv head {head}"
                chosen.setdefault(name, []).append(has[:, :, head].cpu().numpy())
    return np.concatenate(right), {
        name: np.concatenate(parts) for name, parts in chosen.items() if len(parts) == len(right)
    }


def _forwards(rows: int, length: int) -> Iterator[slice]:
    step = max(1, TOKENS_A_FORWARD // length)
    for start in range(0, rows, step):
        yield slice(start, start + step)


def evaluate(
    run: Path, checkpoint: Path, lengths: Sequence[int], questions: int
) -> Iterator[list[Recalled]]:
    """For each of ``lengths``, of as many held-out rows as hold ``questions``. TrainError USAGE for
    a run of other data and for lengths that hold no rows.
    """
    config = RunConfig.from_mapping(read_resolved(run)["config"])
    if config.data.kind not in ("recall", "copying"):
        raise TrainError(
            TrainExit.USAGE,
            f"{run} was trained on data.kind={config.data.kind}; wanted recall or copying;"
            " evaluate a run of configs/needle_64k.yaml",
        )
    for length in lengths:
        if why := _holds_no_rows(config.data, length):
            raise TrainError(TrainExit.USAGE, f"--lengths {length} holds no {why}")
    model, _ = load_run(run, checkpoint)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device) if device.type == "cuda" else model.float()
    language = Language(config.data.kind, config.data.seed, held_out=True, pairs=config.data.pairs)
    for length in lengths:
        one = language.questions(0, 0, 1, length)
        count = -(-questions // int((one.labels >= 0).sum()))
        rows = language.questions(0, 0, count, length)
        casts = config.train.precision == "autocast" and device.type == "cuda"
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=casts):
            found = recalled(model, rows, _num_answers(config.data, length), device)
        yield found


def _holds_no_rows(data: DataConfig, length: int) -> str:
    if data.kind == "copying":
        least = copying.LEAST_TOKENS
        return "" if length >= least else f"token of each kind; wanted rows of {least} or more"
    fits = length >= LEAST_TOKENS and most_pairs(length) >= data.pairs
    return "" if fits else f"{data.pairs or 2} pairs; wanted longer rows"


def _num_answers(data: DataConfig, length: int) -> int:
    return copying.NUM_OF_A_KIND if data.kind == "copying" else num_pairs_for(length, data.pairs)


def _line(one: Recalled) -> str:
    text = (
        f"{one.length:>7,}  {one.distance:>16}  {one.questions:>9,}  {one.right_pct:7.2f}"
        f"  {one.guess_pct:7.2f}"
    )
    if one.chosen_pct is None:
        return text
    return f"{text}  {one.chosen_pct:12.2f} ({one.chosen_by}), {one.chosen_by_any_pct:.2f} by any"


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.recall_by_distance")
    parser.add_argument("run", type=Path)
    parser.add_argument("--checkpoint", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 65_536])
    parser.add_argument("--questions", type=int, default=4096)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    found: list[Recalled] = []
    try:
        checkpoint = (
            checkpoint_of(given.run, "auto")
            if given.checkpoint == "auto"
            else checkpoint_of(given.run, str(given.run / "checkpoints" / given.checkpoint))
        )
        print(f"{given.run.name}, {checkpoint.name}")
        print(" length          distance  questions  right %  guess %  block chosen %")
        for lines in evaluate(given.run, checkpoint, given.lengths, given.questions):
            found += lines
            print("\n".join(map(_line, lines)), flush=True)
    except TrainError as error:
        print(f"recall_by_distance: {error}", file=sys.stderr)
        return int(error.code)
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
