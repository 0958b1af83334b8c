"""Scores while compressed keys pass, on the machine of Gluon kernels: which keys and blocks they
are of, and what crosses from a tile to the next.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import nsa.ops.scores
from nsa.config import NSAConfig
from nsa.ops import interval
from nsa.ops.scores import kernels as scores
from tests import oracle
from tests.cases import assert_blocks, randn
from tests.nsa import warp_roles_machine as machine
from tests.nsa.kernel_cases import poisoned_memory  # noqa: F401

SOURCE = Path(nsa.ops.scores.__file__).with_name("passing_keys.py")
CONFIG = NSAConfig(cmp_block=8, cmp_stride=4, sel_block=16, num_selected=6)
SCALE = 0.4


@pytest.fixture(autouse=True)
def passing(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = machine.kernels(["nsa_scores_roles"], SOURCE)
    monkeypatch.setitem(sys.modules, "nsa.ops.scores.passing_keys", SimpleNamespace(**kernels))
    monkeypatch.setattr(nsa.ops.scores, "passing_keys", SimpleNamespace(**kernels), raising=False)


def inputs(batch: int, queries: int, start: int) -> tuple[Tensor, Tensor]:
    num_cmp = oracle.num_compressed(start + queries, 8, 4)
    q = randn(batch, queries, 16, 64, seed=1).half()
    return q, randn(batch, num_cmp, 2, 64, seed=2).half()


def chosen(q: Tensor, k_cmp: Tensor, start: int, tiles: scores.PassingTiles) -> Tensor:
    where = {"block": 8, "stride": 4, "q_start": start, "first": None, "scale": SCALE}
    _, lse = interval.attend(q, k_cmp, k_cmp, width=None, **where)
    slots = {"sel_block": 16, "num_selected": 6, "num_initial": 1, "num_local": 2}
    return scores.choose(q, k_cmp, lse, **where, **slots, kv_len=start + q.shape[1], passing=tiles)


@pytest.mark.parametrize(
    "tiles",
    [
        scores.PassingTiles(64, 64, 2),
        scores.PassingTiles(64, 128, 3),
        scores.PassingTiles(64, 256, 2, ring=4, warps=8),
    ],
    ids=["heads stay", "three tiles ahead", "heads pass too"],
)
def test_choice_while_keys_pass(tiles: scores.PassingTiles) -> None:
    """150 queries from token 1,300 on: two chunks, the last tile of 22 rows, masked tiles and whole
    ones, edges from a tile to the next.
    """
    q, k_cmp = inputs(1, 150, 1300)
    got = chosen(q, k_cmp, 1300, replace(tiles, score_bytes=128 * 2 * 96 * 4))
    want = oracle.select(q, k_cmp, config=CONFIG, q_start=1300, scale=SCALE)
    assert torch.isfinite(want[1]).any(), "blocks compete"
    assert assert_blocks(got, *want) <= 0.02


def test_choice_of_the_first_queries() -> None:
    """Rows that see no compressed block, or a tile of them whose last alone see some."""
    q, k_cmp = inputs(1, 200, 0)
    got = chosen(q, k_cmp, 0, scores.PassingTiles(64, 64, 2))
    assert_blocks(got, *oracle.select(q, k_cmp, config=CONFIG, q_start=0, scale=SCALE))


@pytest.mark.parametrize(
    ("batch", "tokens", "start"),
    [(1, 65_536, 0), (1, 131_072 + 5, 77), (8, 2048, 0), (3, 40_000, 0)],
)
def test_chunks_hold_every_query_once_and_fit(batch: int, tokens: int, start: int) -> None:
    tiles, G, L = scores.PassingTiles(64, 64, 2), 2, 64
    chunks = list(scores._passing_chunks(batch, tokens, start, L, tiles, G=G, wave=64 * 198))
    assert all(many * n * G * row * 4 <= 1 << 27 for _, _, many, n, row in chunks)
    assert all((start + t + n - 1) // L < row for _, t, _, n, row in chunks), "its last block fits"
    held = torch.zeros(batch, tokens, dtype=torch.int64)
    for b, t, many, n, _ in chunks:
        held[b : b + many, t : t + n] += 1
    assert (held == 1).all()
