"""The kernels that read and write pages, in Triton's interpreter (`--require interpreter`).

Tables are in random order, rows of different lengths, one of them empty and one with fewer tokens
than the step; what no row holds is NaN.
"""

from __future__ import annotations

from dataclasses import replace
from math import log
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa.config import NSAConfig
from nsa.ops import paged
from nsa.ops.decode import kernels as contiguous
from nsa.ops.paged import append_kernels
from nsa.ops.paged.choose_kernels import choose
from nsa.ops.paged.interval_kernels import interval
from tests import oracle
from tests.cases import SMALL, assert_blocks, assert_lse, assert_parity, randn
from tests.nsa.kernel_cases import poisoned_memory  # noqa: F401

KV = tuple[Tensor, Tensor]
PAGE, G, H, D, DV = SMALL.sel_block, 2, 3, 12, 20
LENGTHS, NEW = (61, 5, 0, 130), (3, 2, 0, 1)  # tokens of each row with this step's, and those
B, T, MOST = len(LENGTHS), max(NEW), 140
STARTS = [n - new for n, new in zip(LENGTHS, NEW, strict=True)]
SCALES = torch.tensor([2.0**-5, 2.0**-7]), torch.tensor([2.0**-6, 2.0**-2])


def tokens(seed: int) -> KV:
    """k and v of every row as it would be contiguous, [B, MOST, G, D]."""
    return randn(B, MOST, G, D, seed=seed), randn(B, MOST, G, DV, seed=seed + 1)


def pages_of(kv: KV, counts: list[int], first: list[int], *, fp8: bool = False) -> paged.Pages:
    """The first ``counts[b]`` entries of kv, from the page of ``first[b]`` on, in random pages."""
    width = -(-MOST // PAGE)
    order = torch.randperm(B * width, generator=torch.Generator().manual_seed(3)).int()
    table, taken = torch.full((B, width), -1, dtype=torch.int32), 0
    for b, count in enumerate(counts):
        for i in range(first[b] // PAGE, -(-count // PAGE)):
            table[b, i], taken = order[taken], taken + 1
    pools = [torch.full((B * width + 1, PAGE, *x.shape[2:]), torch.nan) for x in kv]
    if fp8:
        pools = [pool.to(torch.float8_e4m3fn) for pool in pools]
    group = paged.Pages(pools[0], pools[1], table, SCALES if fp8 else None)
    at = torch.arange(MOST).expand(B, MOST)
    group.put(at, at < torch.tensor(counts)[:, None], kv)
    return group


def layer_pages(
    config: NSAConfig, kv: dict[str, KV], counts: list[int], *, fp8: bool = False
) -> paged.LayerPages:
    """What a layer holds of the first ``counts`` tokens of each row, with room for LENGTHS."""
    blocks = [oracle.num_compressed(n, config.cmp_block, config.cmp_stride) for n in counts]
    recent = [max(0, n - 40) for n in STARTS]
    groups = {
        "cmp": pages_of(kv["cmp"], blocks, [0] * B),
        "raw": pages_of(kv["raw"], counts, recent),
        "sel": pages_of(kv["sel"], counts, [0] * B, fp8=fp8),
        "win": pages_of(kv["win"], counts, recent, fp8=fp8),
    }
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    return paged.LayerPages(
        **groups, start_B=torch.tensor(STARTS), seq_lens=lengths, max_tokens=MOST
    )


def rows_of(x: Tensor, b: int) -> Tensor:
    return x[b : b + 1, : NEW[b]]


@pytest.mark.parametrize(("splits", "fp8"), [(3, False), (1, True)], ids=["split", "fp8"])
def test_attention_over_pages(splits: int, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each branch of each row is the oracle's over that row alone; of float8, over what is kept."""
    monkeypatch.setattr(contiguous, "interval_splits", lambda *_, **__: splits)
    monkeypatch.setattr(contiguous, "slots_per_split", lambda *_, **__: 8 // splits)
    kv = {name: tokens(seed) for name, seed in (("cmp", 1), ("raw", 3), ("sel", 5), ("win", 7))}
    pages = layer_pages(SMALL, kv, list(LENGTHS), fp8=fp8)
    q = randn(B, T, G * H, D, seed=9)
    scale, grid = 0.3, {"block": SMALL.cmp_block, "stride": SMALL.cmp_stride}
    geometry = paged.PagesGeometry(8, 4, SMALL.window, 5, (1, 2), scale)
    (cmp, sel, win), blocks = paged.attend(q, pages, geometry)
    kept = {name: getattr(pages, name).rounded(kv[name]) for name in ("sel", "win")}
    for b, n in enumerate(LENGTHS):
        if not n:
            continue
        C = oracle.num_compressed(n, 8, 4)
        k_cmp, v_cmp = (x[b : b + 1, :C] for x in kv["cmp"])
        rows = {name: tuple(x[b : b + 1, :n] for x in kept[name]) for name in kept}
        one, at = rows_of(q, b), {"q_start": STARTS[b]}
        wanted = oracle.select(one, k_cmp, config=SMALL, **at, kv_len=n, scale=scale)
        assert_blocks(rows_of(blocks, b), *wanted)
        masks = (
            oracle.kept_compressed(one, k_cmp, **grid, **at),
            oracle.kept_selected(one, rows["sel"][0], rows_of(blocks, b), sel_block=PAGE, **at),
            oracle.kept_window(one, rows["win"][0], window=SMALL.window, **at),
        )
        values = ((k_cmp, v_cmp), rows["sel"], rows["win"])
        for (o, lse), mask, (k, v), name in zip(
            (cmp, sel, win), masks, values, ("cmp", "sel", "win"), strict=True
        ):
            want, want_lse = oracle.masked_attention(one, k, v, mask, scale)
            assert_parity(rows_of(o, b), want, f"{name} of row {b}")
            assert_lse(rows_of(lse, b) * log(2), want_lse)
    empty = LENGTHS.index(0)
    for o, lse in (cmp, sel, win):
        assert not o[empty].any() and torch.isneginf(lse[empty]).all(), "no row, no key"
    again, same = paged.attend(q, pages, geometry)
    assert torch.equal(blocks, same)
    assert all(map(torch.equal, (*cmp, *sel, *win), (x for pair in again for x in pair)))


@pytest.mark.parametrize("fp8", [False, True], ids=["fp32", "fp8"])
def test_a_step_is_stored_where_the_formula_stores_it(fp8: bool) -> None:
    """Bit for bit, and nothing else is touched but the spare page; from tensors with gaps. Values
    that float8 holds, since the interpreter (Triton 3.7.1) loses the carry where a mantissa is
    rounded up to the next power of two; a GPU rounds as PyTorch does.
    """
    kv = {name: tokens(seed) for name, seed in (("cmp", 1), ("raw", 3), ("sel", 5), ("win", 7))}
    if fp8:
        kv = {name: paged.Pages(*x, torch.empty(0), SCALES).rounded(x) for name, x in kv.items()}
    got, want = (layer_pages(SMALL, kv, STARTS, fp8=fp8) for _ in range(2))
    full = layer_pages(SMALL, kv, list(LENGTHS), fp8=fp8)
    at = torch.tensor(STARTS)[:, None] + torch.arange(T)
    exists = at < torch.tensor(LENGTHS)[:, None]

    def chunk(x: Tensor) -> Tensor:
        new = x.gather(1, at.clamp(max=MOST - 1)[..., None, None].expand(-1, -1, *x.shape[2:]))
        wide = torch.full((B, T, 2 * G, x.shape[3]), 7.0)
        wide[:, :, ::2] = new.masked_fill(~exists[..., None, None], 7.0)
        return wide[:, :, ::2]

    new = {name: tuple(map(chunk, kv[name])) for name in ("raw", "sel", "win")}
    for pages in (got, want):
        for name in ("sel", "win", "raw"):  # room for the step
            getattr(pages, name).table.copy_(getattr(full, name).table)
    append_kernels.append(got, new["sel"], new["win"], new["raw"])
    for name in ("sel", "win", "raw"):
        group, expected = getattr(got, name), getattr(want, name)
        expected.put(at, exists, new[name])
        for x, y in zip((group.k, group.v), (expected.k, expected.v), strict=True):
            a, b = (one[:-1].view(torch.uint8) for one in (x, y))
            assert torch.equal(a, b), name


@pytest.mark.parametrize(
    "config", [SMALL, replace(SMALL, cmp_block=4, cmp_stride=4)], ids=["overlap", "no overlap"]
)
def test_means_of_the_blocks_that_a_step_completes(config: NSAConfig) -> None:
    """Up to three a row, in one pool with the raw tokens; all others stay as they are."""
    new = 10
    starts = [max(0, n - new) for n in LENGTHS]
    kv = {name: tokens(seed) for name, seed in (("cmp", 1), ("raw", 3), ("sel", 5), ("win", 7))}
    pages = layer_pages(config, kv, list(LENGTHS))
    raw, cmp, width = pages.raw, pages.cmp, pages.raw.k.shape[0]
    pools = [torch.cat([a, b]) for a, b in ((raw.k, cmp.k), (raw.v, cmp.v))]
    before = [pool.clone() for pool in pools]
    shifted = torch.where(cmp.table >= 0, cmp.table + width, -1).int()
    one = {"k": pools[0], "v": pools[1]}
    pages = replace(pages, raw=replace(raw, **one), cmp=paged.Pages(**one, table=shifted))
    pages = replace(pages, start_B=torch.tensor(starts))
    append_kernels.means(pages, new, block=config.cmp_block, stride=config.cmp_stride)
    changed = 0
    for b, n in enumerate(LENGTHS):
        done, due = (
            oracle.num_compressed(m, config.cmp_block, config.cmp_stride) for m in (starts[b], n)
        )
        for i in range(done, due):
            changed += 1
            page, slot = int(shifted[b, i // PAGE]), i % PAGE
            for pool, old, x in zip(pools, before, kv["raw"], strict=True):
                means = oracle.compress_mean(x[b : b + 1, :n], config.cmp_block, config.cmp_stride)
                assert_parity(pool[page, slot], means[0, i], f"block {i} of row {b}")
                old[page, slot] = pool[page, slot]
    assert changed > 0
    assert all(
        torch.equal(*(y.view(torch.int32) for y in x)) for x in zip(pools, before, strict=True)
    )


def test_many_blocks_a_row_and_a_page_that_is_no_tile() -> None:
    """A table of 40 pages, of which a threshold leaves few candidates; bf16-wide rows take tiles of
    half a page.
    """
    n, wide = 16 * 40 - 3, 192
    config = replace(SMALL, num_selected=6)
    k_cmp = randn(1, oracle.num_compressed(n, 8, 4), 1, wide, seed=1)
    C = k_cmp.shape[1]
    at = torch.arange(C)[None]
    group = paged.Pages(
        torch.full((11, PAGE, 1, wide), torch.nan),
        torch.full((11, PAGE, 1, wide), torch.nan),
        torch.randperm(10, generator=torch.Generator().manual_seed(1)).int()[None],
    )
    group.put(at, at >= 0, (k_cmp, k_cmp))
    lengths = torch.tensor([n], dtype=torch.int32)
    pages = paged.LayerPages(group, group, group, group, torch.tensor([n - 1]), lengths, 16 * 50)
    q = randn(1, 1, 2, wide, seed=2)
    options: dict[str, Any] = {"block": 8, "stride": 4, "scale": 0.1}
    o, lse = interval(q, group, pages, **options, width=None)
    blocks = choose(q, lse, pages, **options, num_selected=6, forced=(1, 2))
    given = {"config": config, "q_start": n - 1, "kv_len": n, "scale": 0.1}
    assert_blocks(blocks, *oracle.select(q, k_cmp, **given))
    want = oracle.compressed(q, k_cmp, k_cmp, block=8, stride=4, q_start=n - 1, scale=0.1)
    assert_parity(o, want if isinstance(want, Tensor) else want[0], "o")
