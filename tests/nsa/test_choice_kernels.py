"""The kernel that chooses blocks, in Triton's interpreter (`--require interpreter`): far queries,
chunks, documents, ties.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops import interval
from nsa.ops.scores import kernels as scores
from tests import oracle
from tests.cases import SMALL, assert_blocks, choose_by_kernel, randn
from tests.nsa.kernel_cases import poisoned_memory  # noqa: F401

CHOICES = [
    (SMALL, 1, 97, 0, 1.0),  # config, batch, queries, where they begin, size of the queries
    (replace(SMALL, cmp_block=4, sel_block=4), 2, 12, 300, 1.0),
    (replace(SMALL, sel_block=8, num_selected=6, num_local=3, num_initial=2), 1, 12, 700, 3.0),
    (replace(SMALL, num_selected=7), 3, 6, torch.tensor([5, 300, 131]), 1.0),
    # 251 blocks: more than CANDIDATES, which a threshold thins out
    (replace(SMALL, num_selected=16), 1, 8, 4000, 1.0),
]


@pytest.mark.parametrize(
    ("config", "batch", "queries", "start", "size"),
    CHOICES,
    ids=["whole", "no overlap", "sharp", "ragged", "far"],
)
def test_choice(
    config: NSAConfig, batch: int, queries: int, start: int | Tensor, size: float
) -> None:
    keys = queries + int(torch.as_tensor(start).max())
    num_cmp = oracle.num_compressed(keys, config.cmp_block, config.cmp_stride)
    q = size * randn(batch, queries, 3 if batch == 1 else 4, 16, seed=1)
    k_cmp = randn(batch, num_cmp, 1 if batch == 1 else 2, 16, seed=2)
    got = choose_by_kernel(q, k_cmp, config, q_start=start, kv_len=keys)
    want = oracle.select(q, k_cmp, config=config, q_start=start)
    assert torch.isfinite(want[1]).any(), "blocks compete"
    assert assert_blocks(got, *want) <= 0.02


@pytest.mark.parametrize("most_held", [32, 256])
@pytest.mark.parametrize(
    ("config", "batch", "queries", "start", "size"),
    [
        (replace(SMALL, sel_block=8, num_selected=6, num_local=3, num_initial=2), 1, 9, 2300, 3.0),
        (replace(SMALL, num_selected=7), 3, 3, torch.tensor([505, 4300, 1310]), 1.0),
        (replace(SMALL, num_selected=16), 1, 3, 9000, 1.0),
        # equal scores: more candidates than are ranked, so that slots are filled one by one
        (replace(SMALL, num_selected=8), 1, 3, 5000, 0.0),
    ],
    ids=["sharp", "ragged", "far", "equal"],
)
def test_rows_read_by_tiles_choose_what_held_rows_choose(
    config: NSAConfig,
    batch: int,
    queries: int,
    start: int | Tensor,
    size: float,
    most_held: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = queries + int(torch.as_tensor(start).max())
    assert keys // config.sel_block > most_held, "more than one tile"
    num_cmp = oracle.num_compressed(keys, config.cmp_block, config.cmp_stride)
    q = size * randn(batch, queries, 3 if batch == 1 else 4, 16, seed=1)
    k_cmp = randn(batch, num_cmp, 1 if batch == 1 else 2, 16, seed=2)
    options = {"q_start": start, "kv_len": keys}
    want = choose_by_kernel(q, k_cmp, config, **options)
    monkeypatch.setattr(scores, "choose", partial(scores.choose, most_held=most_held))
    assert torch.equal(choose_by_kernel(q, k_cmp, config, **options), want)


def test_choice_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k_cmp = randn(2, 40, 2, 16, seed=1), randn(2, 33, 1, 16, seed=2)
    options = {"block": 8, "stride": 4, "q_start": 100, "first": None, "scale": 0.25}
    _, lse = interval.attend(q, k_cmp, k_cmp, width=None, **options)
    tiles = {"BM": 16, "BC": 16, "num_warps": 1, "num_stages": 1}
    slots = {"sel_block": 16, "num_selected": 5, "num_initial": 1, "num_local": 2, "kv_len": 140}
    got = scores.choose(q, k_cmp, lse, **options, **slots, tiles=tiles, score_bytes=1)
    assert_blocks(got, *oracle.select(q, k_cmp, config=SMALL, q_start=100))


def test_choice_in_packed_documents() -> None:
    """Each document's blocks are those it would choose alone, counted from its own first."""
    config, bounds = replace(SMALL, num_selected=4), [0, 16, 112, 128]
    q, k_cmp = randn(1, 128, 2, 16, seed=1), randn(1, 31, 1, 16, seed=2)
    first = torch.tensor([0] * 16 + [16] * 96 + [112] * 16)
    got = choose_by_kernel(q, k_cmp, config, q_start=0, kv_len=128, first=first)
    for begin, end in itertools.pairwise(bounds):
        own = k_cmp[:, begin // 4 : (end - 8) // 4 + 1]
        blocks, gap = oracle.select(q[:, begin:end], own, config=config)
        assert_blocks(got[:, begin:end], torch.where(blocks < 0, -1, blocks + begin // 16), gap)


@pytest.mark.parametrize(("start", "branch"), [(400, "counted"), (1500, "one by one")])
def test_equal_scores_go_to_the_lower_index(start: int, branch: str) -> None:
    """Of queries of 0 every block inside the past has one score; beyond CANDIDATES of them slots
    are filled one by one.
    """
    config = replace(SMALL, num_selected=8)
    assert (start // 16 + 1 > scores.CANDIDATES) == (branch == "one by one")
    num_cmp = oracle.num_compressed(start + 6, 8, 4)
    got = choose_by_kernel(
        torch.zeros(1, 6, 2, 16),
        randn(1, num_cmp, 1, 16, seed=2),
        config,
        q_start=start,
        kv_len=start + 6,
    )
    for i in range(6):
        current = (start + i) // 16
        assert got[0, i, 0].tolist() == [0, 1, 2, 3, 4, 5, current - 1, current]


def one_hot(num_cmp: int, hot: int) -> tuple[Tensor, Tensor]:
    """(q, k_cmp) whose probabilities are exactly 1 at compressed block ``hot`` and 0 elsewhere, in
    fp32.
    """
    k_cmp = torch.zeros(1, num_cmp, 1, 16)
    k_cmp[0, hot, 0, 0] = 500.0
    q = torch.zeros(1, 3, 2, 16)
    q[..., 0] = 1.0
    return q, k_cmp


@pytest.mark.parametrize("start", [480, 1600])
@pytest.mark.parametrize(
    ("hot", "wanted"),
    [(4 * 9 + 1, [0, 1, 2, 9]), (4 * 9 + 3, [0, 1, 9, 10]), (4 * 20, [0, 1, 2, 20])],
    ids=["inside", "straddling", "first"],
)
def test_one_probability_of_1_names_the_blocks_it_overlaps(
    start: int, hot: int, wanted: list[int]
) -> None:
    """All other scores are exactly 0: the lowest indices take what is left."""
    config = replace(SMALL, num_selected=6)
    q, k_cmp = one_hot(oracle.num_compressed(start + 3, 8, 4), hot)
    got = choose_by_kernel(q, k_cmp, config, q_start=start, kv_len=start + 3, scale=1.0)
    assert got[0, :, 0].tolist() == [[*wanted, start // 16 - 1, start // 16]] * 3


def test_a_tie_of_a_few_among_many_goes_to_the_lower_index() -> None:
    """Six blocks share the best score, three slots are free, and no other of the 100 comes near: a
    threshold leaves nine to count.
    """
    config, start, k_cmp = replace(SMALL, num_selected=6), 1600, torch.zeros(1, 399, 1, 16)
    assert start // 16 + 1 > scores.CANDIDATES
    for block in (9, 20, 33, 47, 60, 70):
        k_cmp[0, 4 * block + 1, 0, 0] = 20.0
    got = choose_by_kernel(
        torch.eye(16)[:1].expand(1, 3, 2, 16),
        k_cmp,
        config,
        q_start=start,
        kv_len=start + 3,
        scale=1.0,
    )
    assert got[0, :, 0].tolist() == [[0, 9, 20, 33, 99, 100]] * 3


@pytest.mark.parametrize("start", [400, 1600])
@pytest.mark.parametrize("where", ["key", "query", "infinite"])
def test_scores_that_are_no_number_count_as_0(start: int, where: str) -> None:
    """FAULTS.md, numbers that are not finite in scores: more blocks than slots were taken, and the
    rest written over the next row.
    """
    config = replace(SMALL, num_selected=6)
    num_cmp = oracle.num_compressed(start + 6, 8, 4)
    q, k_cmp = randn(1, 6, 2, 16, seed=1), randn(1, num_cmp, 1, 16, seed=2)
    if where == "query":
        q[0, 2:4, 1] = torch.nan
    else:
        k_cmp[0, 30] = torch.nan if where == "key" else torch.inf
    got = choose_by_kernel(q, k_cmp, config, q_start=start, kv_len=start + 6)
    want, gap = oracle.select(q, k_cmp, config=config, q_start=start)
    for i in range(6):
        current = (start + i) // 16
        if where != "query" or i in (2, 3):
            assert got[0, i, 0].tolist() == [0, 1, 2, 3, current - 1, current]
            assert torch.equal(got[0, i].long(), want[0, i])
    assert_blocks(got, want, gap)


def test_a_grid_that_is_full_is_launched_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """FAULTS.md, grid limits: a step of 8,192 sequences of 8 kv heads had z = 65,536."""
    for G in (1, 8, 7):
        chunks = list(scores._chunks(8192, 1, 2**20, 65_535 // G))
        assert sum(batches for _, _, batches, _ in chunks) == 8192
        assert all(batches * G <= 65_535 for _, _, batches, _ in chunks)
    q, k_cmp = randn(5, 1, 4, 16, seed=1), randn(5, 33, 2, 16, seed=2)
    options = {"q_start": 130, "kv_len": 131}
    want = choose_by_kernel(q, k_cmp, SMALL, **options)
    grids: list[tuple[int, ...]] = []

    class Watched:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return launch[grid]

    launch = scores.nsa_scores
    monkeypatch.setattr(scores, "nsa_scores", Watched())
    monkeypatch.setattr(scores, "GRID_LIMIT", 4)
    assert torch.equal(choose_by_kernel(q, k_cmp, SMALL, **options), want)
    assert [z for _, _, z in grids] == [4, 4, 2]
