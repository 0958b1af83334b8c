"""BlockGrid's closed forms against counting, token by token."""

from __future__ import annotations

import pytest

from nsa.blocks import BlockGrid
from nsa.config import NSAConfig
from tests import oracle
from tests.cases import SMALL

GEOMETRIES = (
    NSAConfig(),
    SMALL,
    NSAConfig(cmp_block=4, cmp_stride=4, sel_block=4, num_selected=3, window=5),
    NSAConfig(
        cmp_block=12,
        cmp_stride=4,
        sel_block=8,
        num_selected=4,
        window=3,
        num_initial=2,
        num_local=2,
    ),
    NSAConfig(
        cmp_block=16,
        cmp_stride=4,
        sel_block=8,
        num_selected=6,
        window=1,
        num_initial=0,
        num_local=1,
    ),
)


@pytest.mark.parametrize("config", GEOMETRIES)
def test_compressed_blocks_are_the_whole_ones(config: NSAConfig) -> None:
    grid = BlockGrid.of(config)
    for tokens in range(300):
        assert grid.num_cmp(tokens) == oracle.num_compressed(
            tokens, config.cmp_block, config.cmp_stride
        )
        ends = [i * config.cmp_stride + config.cmp_block - 1 for i in range(80)]
        assert grid.visible_cmp(tokens) == sum(end <= tokens for end in ends)


def test_emission_at_the_papers_boundaries() -> None:
    grid = BlockGrid.of(NSAConfig())
    assert [grid.visible_cmp(t) for t in (0, 15, 30, 31, 46, 47, 62, 63)] == [
        0,
        0,
        0,
        1,
        1,
        2,
        2,
        3,
    ]
    assert [grid.num_sel(s) for s in (0, 1, 64, 65, 100)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("config", GEOMETRIES)
def test_overlap_counts_shared_chunks(config: NSAConfig) -> None:
    grid = BlockGrid.of(config)
    chunks, ratio = config.cmp_block // config.cmp_stride, config.sel_block // config.cmp_stride
    got = {
        (j * ratio + offset, j): weight
        for j in range(9)
        for offset, weight in grid.overlap
        if j * ratio + offset >= 0
    }
    want = {
        (i, j): oracle.shared_chunks(i, j, chunks, ratio)
        for j in range(9)
        for i in range(9 * ratio)
        if oracle.shared_chunks(i, j, chunks, ratio)
    }
    assert got == want


def test_overlap_of_the_paper() -> None:
    assert BlockGrid.of(NSAConfig()).overlap == ((-1, 1), (0, 2), (1, 2), (2, 2), (3, 1))


@pytest.mark.parametrize("config", GEOMETRIES)
def test_forced_blocks_are_distinct_ascending_and_inside_n(config: NSAConfig) -> None:
    grid = BlockGrid.of(config)
    for position in range(200):
        forced = grid.forced(position)
        assert set(forced) == oracle.forced_blocks(position, config)
        assert list(forced) == sorted(set(forced)) and len(forced) <= config.num_selected
        assert position // config.sel_block in forced


@pytest.mark.parametrize("config", GEOMETRIES)
def test_keys_read_equal_the_count(config: NSAConfig) -> None:
    grid = BlockGrid.of(config)
    totals = {"cmp": 0, "sel": 0, "win": 0, "dense": 0}
    for t in range(200):
        visible = t // config.sel_block + 1
        # Any n candidates hold the same number of tokens, because the current, partial block is
        # always among them.
        kept = {*range(min(config.num_selected, visible) - 1), visible - 1}
        keys = [s for s in range(t + 1) if s // config.sel_block in kept]
        assert grid.keys_sel(t) == len(keys)
        assert grid.keys_win(t) == len(range(max(0, t - config.window + 1), t + 1))
        totals["cmp"] += grid.visible_cmp(t)
        totals["sel"] += len(keys)
        totals["win"] += min(config.window, t + 1)
        totals["dense"] += t + 1
    assert grid.pairs(200) == totals


def test_blocks_compete_just_beyond_n_blocks() -> None:
    assert BlockGrid.of(NSAConfig()).everything_selected_tokens == 1024
    assert BlockGrid.of(SMALL).everything_selected_tokens == 80
