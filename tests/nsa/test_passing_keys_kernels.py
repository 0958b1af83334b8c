"""Scores while compressed keys pass, on the machine of Gluon kernels: which keys and blocks they
are of, and what crosses from a tile to the next.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa.ops.scores
from nsa.config import NSAConfig
from nsa.ops import interval
from nsa.ops.kernels import shares
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
    q = randn(batch, queries, 8, 64, seed=1).half()
    return q, randn(batch, num_cmp, 2, 64, seed=2).half()


def chosen(q: Tensor, k_cmp: Tensor, start: int, tiles: scores.PassingTiles) -> Tensor:
    where = {"block": 8, "stride": 4, "q_start": start, "first": None, "scale": SCALE}
    _, lse = interval.attend(q, k_cmp, k_cmp, width=None, **where)
    slots = {"sel_block": 16, "num_selected": 6, "num_initial": 1, "num_local": 2}
    return scores.choose(q, k_cmp, lse, **where, **slots, kv_len=start + q.shape[1], passing=tiles)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("BC", [64, 128])
def test_choice_while_keys_pass(BC: int, stages: int) -> None:
    """150 queries from token 700 on: two chunks a sequence, the last tile of 22 rows, masked tiles
    and whole ones, edges from a tile to the next.
    """
    q, k_cmp = inputs(2, 150, 700)
    tiles = scores.PassingTiles(64, BC, stages, score_bytes=128 * 2 * 64 * 4, programs=1)
    got = chosen(q, k_cmp, 700, tiles)
    want = oracle.select(q, k_cmp, config=CONFIG, q_start=700, scale=SCALE)
    assert torch.isfinite(want[1]).any(), "blocks compete"
    assert assert_blocks(got, *want) <= 0.02


def test_choice_of_the_first_queries() -> None:
    """Rows that see no compressed block, or a tile of them whose last alone see some."""
    q, k_cmp = inputs(1, 200, 0)
    got = chosen(q, k_cmp, 0, scores.PassingTiles(64, 64, 2))
    assert_blocks(got, *oracle.select(q, k_cmp, config=CONFIG, q_start=0, scale=SCALE))


@pytest.mark.parametrize(
    ("batch", "programs", "rows"),
    [
        (1, 1, [64, 64, 64, 8]),
        (1, 4, [128, 72]),
        (1, 6, [128, 72]),
        (1, 8, [200]),
        (2, 8, [200, 200]),
        (2, 14, [400]),
    ],
)
def test_a_chunk_of_scores_fills_the_gpu(
    batch: int, programs: int, rows: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two kv heads, tiles of 64 queries of both: chunks of up to half as many tiles, though one
    row alone is beyond ``score_bytes``, and of one size.
    """
    launched: list[int] = []

    def count(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        if kernel is scores.nsa_choose:
            launched.append(grid[0] // 2)
        launch(kernel, grid, *arguments, **options)

    launch = scores.launch
    monkeypatch.setattr(scores, "launch", count)
    q, k_cmp = inputs(batch, 200, 0)
    chosen(q, k_cmp, 0, scores.PassingTiles(64, 64, 2, score_bytes=1, programs=programs))
    assert launched == rows


def test_a_share_is_scored_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "sm_of", lambda device: (9, 0))
    q, k_cmp = inputs(1, 4096, 0)
    assert scores._passing_tiles(q, k_cmp) is None, "8,192 rows"
    with shares.one_of(2):
        assert scores._passing_tiles(q, k_cmp) is scores.PASSING[0]
