"""Kinds of selections: the contract of blocks row by row, and the pattern that each kind is named
after.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import nsa
from nsa.config import NSAConfig, preset
from perfbench import roofline
from perfbench.records import cells
from perfbench.worker.workloads import block_patterns

pytestmark = pytest.mark.usefixtures("one_thread")
TINY = preset("tiny").nsa  # blocks of 16, 5 slots: 1 initial, 2 local, 2 free
OTHER = NSAConfig(
    cmp_block=8, cmp_stride=4, sel_block=8, num_selected=7, window=16, num_initial=2, num_local=1
)
FULL = replace(TINY, num_selected=3)  # no slot is free
# what a trained model chose is in tests/perfbench/test_trained_selection.py
DRAWN = tuple(kind for kind in cells.SELECTIONS if kind != cells.TRAINED)
EVERY_KIND = pytest.mark.parametrize("kind", DRAWN)


def drawn(
    kind: str,
    tokens: int,
    config: NSAConfig = TINY,
    *,
    batch: int = 2,
    heads: int = 2,
    seed: int = 3,
) -> Tensor:
    q = torch.randn(batch, tokens, 2 * heads, 8, generator=torch.Generator().manual_seed(11))
    return block_patterns.chosen(
        kind, q, config=config, num_kv_heads=heads, generator=torch.Generator().manual_seed(seed)
    )


def free_of(row: list[int], position: int, config: NSAConfig) -> list[int]:
    current = position // config.sel_block
    return [j for j in row if config.num_initial <= j <= current - config.num_local]


@EVERY_KIND
@pytest.mark.parametrize("config", [TINY, OTHER, FULL], ids=["tiny", "other", "full"])
@pytest.mark.parametrize("tokens", [1, 16, 33, 150])
def test_every_row_keeps_the_contract(kind: str, config: NSAConfig, tokens: int) -> None:
    blocks = drawn(kind, tokens, config)
    assert blocks.dtype == torch.int32 and blocks.shape == (2, tokens, 2, config.num_selected)
    for t in range(tokens):
        current = t // config.sel_block
        forced = {
            j
            for j in range(current + 1)
            if j < config.num_initial or j > current - config.num_local
        }
        for row in blocks[:, t].flatten(0, 1).tolist():
            held = [j for j in row if j != -1]
            assert row == held + [-1] * (len(row) - len(held)), "padding is at the end"
            assert held == sorted(set(held)) and min(held) >= 0 and max(held) <= current
            assert forced <= set(held) and len(held) == min(config.num_selected, current + 1), (
                "no slot is left that a block could fill"
            )


@EVERY_KIND
def test_every_kind_reads_as_many_keys_as_the_closed_form_says(kind: str) -> None:
    model = replace(preset("tiny"), nsa=OTHER)
    blocks = drawn(kind, 101, OTHER, batch=1, heads=1)[0, :, 0].tolist()
    keys = sum(
        min((j + 1) * 8, t + 1) - j * 8 for t, row in enumerate(blocks) for j in row if j >= 0
    )
    assert roofline.selected_pairs(model, 101) == keys
    assert roofline.filled_slots(model, 101) == sum(j >= 0 for row in blocks for j in row)


@EVERY_KIND
def test_the_seed_decides(kind: str) -> None:
    first, again, other = (drawn(kind, 200, seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert torch.equal(first, other) == (kind == "hot"), "the earliest blocks are nobody's draw"


def test_random_blocks_are_uniform_sets_of_each_querys_own() -> None:
    """The last 16 of 160 tokens have 10 - 3 free blocks, 2 of which they take: 21 sets, each by 1
    in 21.
    """
    many = drawn("random", 160, batch=256, heads=2)
    rows = [tuple(free_of(row, 159, TINY)) for row in many[:, 144:].flatten(0, 2).tolist()]
    counts, due = Counter(rows), len(rows) / 21
    assert len(counts) == 21
    assert sum((count - due) ** 2 / due for count in counts.values()) < 56, (
        "chi square of 20 degrees: beyond this 3 in 100,000"
    )
    one = many[0, 144:, 0].tolist()
    assert len({tuple(row) for row in one}) > 5, "neighbours choose for themselves"
    assert not torch.equal(many[0, :, 0], many[0, :, 1]) and not torch.equal(many[0], many[1])


def test_local_blocks_are_shared_within_a_block_but_for_one() -> None:
    config = replace(TINY, num_selected=8)  # 5 free slots
    blocks = drawn("local", 640, config, batch=1, heads=1)[0, :, 0].tolist()
    shared_of = []
    for first in range(160, 640, 16):
        free = [set(free_of(blocks[t], t, config)) for t in range(first, first + 16)]
        shared = set.intersection(*free)
        assert len(shared) >= 4 and all(len(one) == 5 for one in free)
        assert len({frozenset(one) for one in free}) > 3, "each query has one of its own"
        shared_of.append(frozenset(shared))
    assert len(set(shared_of)) > 25, "and the set moves from block to block"


def test_a_querys_own_local_block_is_any_of_the_rest() -> None:
    """10 - 3 free blocks, 1 shared, so each of 6 others is 1 in 6 of the draws."""
    many = drawn("local", 160, batch=128, heads=2)[:, 144:]
    counts: Counter[int] = Counter()
    for b in range(128):
        for g in range(2):
            free = [free_of(row, 159, TINY) for row in many[b, :, g].tolist()]
            shared = set.intersection(*map(set, free))
            if len(shared) == 1:
                ranks = sorted(set(range(1, 8)) - shared)
                counts.update(ranks.index(j) for row in free for j in row if j not in shared)
    due = counts.total() / 6
    assert len(counts) == 6 and sum((count - due) ** 2 / due for count in counts.values()) < 30, (
        "5 degrees: beyond this 2 in 100,000"
    )


def test_hot_blocks_are_the_same_for_all_who_see_them() -> None:
    blocks = drawn("hot", 400)
    rows = {
        tuple(free_of(row, t, TINY))
        for t in range(5 * 16, 400)
        for row in blocks[:, t].flatten(0, 1).tolist()
    }
    assert rows == {(1, 2)}
    assert free_of(blocks[0, 4 * 16 - 1, 0].tolist(), 4 * 16 - 1, TINY) == [1], (
        "block 2 is local there"
    )


def test_own_blocks_are_those_of_select_blocks() -> None:
    """Keys by the same generator, compressed by hand: means of 8 tokens, 4 apart."""
    q = torch.randn(2, 200, 4, 8, generator=torch.Generator().manual_seed(11))
    keys = torch.randn(2, 200, 2, 8, generator=torch.Generator().manual_seed(3))
    k_cmp = keys.unfold(1, 8, 4).mean(-1)
    assert torch.equal(drawn("own", 200), nsa.select_blocks(q, k_cmp, config=TINY))
    learned = replace(TINY, phi="linear")  # whose tensors nobody has here
    assert torch.equal(drawn("own", 200, learned), drawn("own", 200))


def test_the_adaptive_rule_decides_how_many_slots_there_are() -> None:
    config = replace(TINY, num_selected=16, adaptive_num_selected=True)
    for kind in DRAWN:
        assert [drawn(kind, tokens, config).shape[-1] for tokens in (500, 600)] == [8, 12]


def test_an_unknown_kind_names_those_that_exist() -> None:
    with pytest.raises(ValueError, match=r"selection='cold': wanted own, random, local, hot"):
        drawn("cold", 16)


def test_long_sequences_are_drawn_at_once_in_bounded_memory() -> None:
    """65,536 queries over 1,024 blocks: a matrix of queries by blocks would have 512 MB; no tensor
    here is larger than 40 MB.
    """
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            made = func(*args, **(kwargs or {}))
            for one in made if isinstance(made, tuple | list) else [made]:
                largest = max(
                    largest, one.untyped_storage().nbytes() if isinstance(one, Tensor) else 0
                )
            return made

    paper, q = preset("m7c_125m").nsa, torch.empty(1, 65536, 1, 1)
    for kind in ("random", "local", "hot"):
        with Watch():
            block_patterns.chosen(
                kind, q, config=paper, num_kv_heads=2, generator=torch.Generator().manual_seed(3)
            )
    assert 1 << 20 < largest < 40e6
