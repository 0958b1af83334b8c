"""A decode step over pages by one operator, in Triton's interpreter (`--require interpreter`): bit
for bit the step over contiguous buffers, and the fp64 oracle's; whatever rows do, a whole call's
over each row's tokens. What sends a step to the branches is said in its Route.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import checks, chosen_blocks, fused_step, statistics
from nsa.attention import NSAAttention
from nsa.config import NSAConfig, preset
from nsa.decode import NSACache, OutOfPages, PagedCache, PagedGraph, PageShape, Step, Steps
from nsa.functional import compress_kv
from nsa.model import TinyLM
from nsa.ops import paged
from nsa.ops.decode import kernels as decode
from nsa.ops.decode_step import Projected
from nsa.ops.decode_step import launches as step_launches
from nsa.routing import ONE_STEP
from tests import oracle
from tests.cases import SMALL, assert_parity, randn
from tests.nsa.kernel_cases import poisoned_memory  # noqa: F401
from tests.nsa.launch_count import launches
from tests.nsa.test_decode_step import calls_of
from tests.nsa.test_paged import graphs  # noqa: F401
from tests.nsa.test_step_kernels import DIM, SOFTMAX, layer_of

ROOM, PAGE = 120, SMALL.sel_block
GROUPS = {"tokens": ("sel",), "window": ("win",), "compressed": ("raw", "cmp")}  # of each pool
LINEAR = ["nsa_linear_step"]
OF_ATTENTION = [
    "nsa_append_step",
    "nsa_interval_forward_both_split",
    "nsa_choose_step",
    "nsa_selected_forward_pages",
    "nsa_sum_step",
]


def paged_of(layer: NSAAttention, max_batch: int, **options: Any) -> PagedCache:
    shape = PageShape(2, 8, 6, layer.q_proj.weight.dtype)
    return PagedCache([layer.config], max_batch, ROOM, shape, **options)


def entries(
    cache: PagedCache, pages: paged.LayerPages
) -> Iterator[tuple[str, paged.Pages, Tensor, Tensor]]:
    """(name, pages, positions [B, I], which of them each row's pages hold) of each group, by the
    host's tables, which the next plan copies to the device.
    """
    rows = cache.rows
    for name, of in zip(("sel", "win", "raw", "cmp"), rows.columns, strict=True):
        columns = slice(rows.columns[of], rows.columns[of] + rows.widths[of])
        group = replace(getattr(pages, name), table=cache._host_tables[:, columns])
        counts = [cache.grid.num_cmp(n) if name == "cmp" else n for n in cache.lengths]
        at = torch.arange(max(counts)).expand(cache.max_batch, -1)
        has_page = group.table[:, at[0] // PAGE] >= 0
        yield name, group, at, has_page & (at < torch.tensor(counts)[:, None])


def poison(cache: PagedCache) -> None:
    """NaN wherever no row has an entry: in pages of nobody, the spare one, and behind the last
    entry of a page.
    """
    used = {
        name: torch.zeros(pool[0].shape[1:3], dtype=torch.bool)
        for name, pool in cache._pools.items()
    }
    for name, group, at, exists in entries(cache, cache.pages_of(0)):
        (pool,) = (p for p, names in GROUPS.items() if name in names)
        page = group.table.long().gather(1, at // PAGE)
        used[pool][page[exists], (at % PAGE)[exists]] = True
    for name, pair in cache._pools.items():
        for x in pair:
            x[:, ~used[name]] = torch.nan


def contiguous(cache: PagedCache, layer: NSAAttention) -> NSACache:
    """What the pages hold, by the formula of `Pages.take`, in a cache that steps."""
    plain = layer.new_cache(cache.max_batch, cache.max_len)
    plain._lengths = list(cache.lengths)
    Steps([plain])
    for name, group, at, exists in entries(cache, cache.pages_of(0)):
        pair = getattr(plain, name)
        ring = pair[0].shape[1] if name in ("win", "raw") else cache.max_len
        for to, x in zip(pair, group.take(at, exists, pair[0].dtype), strict=True):
            for b in range(cache.max_batch):
                last = at[b, exists[b]][-ring:]
                to[b, last % ring] = x[b, last]
    return plain


class Twin:
    """A layer, its pages, and the tokens that each row holds; every step of one token is taken by
    pages and by contiguous buffers, every other chunk by formulas.
    """

    def __init__(
        self,
        config: NSAConfig,
        max_batch: int,
        dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        self.layer, self.dtype = layer_of(config).to(dtype), dtype
        self.exact = deepcopy(self.layer).double()
        self.exact.path = "masked"
        self.cache = paged_of(self.layer, max_batch, **options)
        self.tokens: dict[int, Tensor] = {}

    def join(self, held: Any = None, like: int | None = None) -> int:
        b = self.cache.join(held)
        self.tokens[b] = (
            torch.zeros(0, DIM, dtype=self.dtype) if like is None else self.tokens[like]
        )
        return b

    def prompt(self, b: int, n: int) -> None:
        counts = [n if row == b else 0 for row in range(self.cache.max_batch)]
        x = randn(self.cache.max_batch, n, DIM, seed=n, dtype=self.dtype)
        self.cache.has_kernels, self.layer.path = False, "masked"
        self.layer(x, cache=self.cache.layers[0], num_tokens=counts)
        self.cache.has_kernels, self.layer.path = True, "triton"
        self.tokens[b] = torch.cat([self.tokens[b], x[b]])

    def step(self, seed: int, *, rows: Sequence[int] | None = None) -> None:
        """One token of ``rows``, by default of all that joined."""
        cache, layer = self.cache, self.layer
        taking = sorted(self.tokens) if rows is None else list(rows)
        counts = [int(b in taking) for b in range(cache.max_batch)]
        x = randn(cache.max_batch, 1, DIM, seed=seed, dtype=self.dtype)
        poison(cache)
        plain = contiguous(cache, layer)
        starts = cache.lengths
        with chosen_blocks.collect() as blocks:
            want = layer(x, cache=plain)
            absent = torch.tensor(counts)[:, None, None] == 0
            given = {} if rows is None else {"num_tokens": counts}
            got = layer(x.masked_fill(absent, torch.nan), cache=cache.layers[0], **given)
        assert torch.equal(got[taking], want[taking]), "y"
        assert rows is None or not got.masked_select(absent).any(), "y of no token is 0"
        of_rows, of_pages = blocks
        assert of_rows is not None and of_pages is not None
        assert torch.equal(of_pages[taking], of_rows[taking]), "blocks"
        kept = contiguous(cache, layer)
        for name in ("sel", "win", "raw", "cmp"):
            for a, b in zip(getattr(kept, name), getattr(plain, name), strict=True):
                spared = slice(None) if name in ("win", "raw") else slice(-1)
                assert torch.equal(a[taking, spared], b[taking, spared]), name
        for b in taking:
            self.tokens[b] = torch.cat([self.tokens[b], x[b]])
            whole = self.exact(self.tokens[b][None].double())
            tolerance = 1e-5 if self.dtype is torch.float32 else 2e-3
            assert_parity(got[b], whole[0, -1:], f"row {b}", tolerance=tolerance)
        read = {
            n: c.broadcast_to(cache.max_batch, *c.shape[1:])
            for n, c in cache.layers[0].keys_read.items()
        }
        for b in taking:
            counted = {name: count[b].flatten().tolist() for name, count in read.items()}
            t, grid = starts[b], cache.grid
            assert counted == {
                "cmp": [grid.visible_cmp(t)],
                "sel": [grid.keys_sel(t)] * 2,
                "win": [grid.keys_win(t)],
            }
        assert cache.lengths == tuple(len(self.tokens.get(b, ())) for b in range(cache.max_batch))


@torch.no_grad()
def test_whatever_rows_do_a_step_is_that_over_contiguous_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit, and a whole call's in fp64: rows of different lengths join, wait, share a
    prefix and part, go back, change places and leave; steps complete blocks and begin pages.
    """
    monkeypatch.setattr(decode, "LEAST_KEYS", 16)
    monkeypatch.setattr(decode, "LEAST_KEYS_BANDED", 16)
    twin = Twin(SOFTMAX, 3, rollback=8)
    cache, a, b = twin.cache, twin.join(), twin.join()
    twin.prompt(a, 95)
    twin.prompt(b, 7)
    twin.step(1)  # completes a block of each row: tokens 88 to 95 and 0 to 7
    twin.step(2)  # begins a page of a
    held = cache.hold(a)
    c = twin.join(held, like=a)
    cache.drop(held)
    twin.step(4)  # each copies the page that it shares
    assert cache.rows.tables[a][:6] == cache.rows.tables[c][:6], "full pages are shared"
    assert cache.rows.tables[a][6] != cache.rows.tables[c][6]
    cache.truncate(a, 93)
    twin.tokens[a] = twin.tokens[a][:93]
    twin.step(5, rows=[b, c])  # a waits at a token of a page that c holds, too
    cache.reorder([c, a, a])
    twin.tokens = {0: twin.tokens[c], 1: twin.tokens[a], 2: twin.tokens[a]}
    twin.step(6)
    cache.leave(1)
    del twin.tokens[1]
    twin.step(7)
    assert twin.join() == 1
    twin.step(8, rows=[1])  # the first token of a row; the others wait


@torch.no_grad()
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        (replace(SMALL, rope="half", share_kv=True, window=2 * PAGE), torch.float32),
        (replace(SMALL, rope="none", gate="none", cmp_block=4), torch.float16),
    ],
    ids=["half-shared-sigmoid", "no-rope-no-gate-fp16"],
)
def test_a_step_of_any_layer_is_that_over_contiguous_rows(
    config: NSAConfig, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that begin alike, so that the host knows one position for all; then of two lengths.
    Tiles of a page, which a window of whole pages has in each lap of its ring.
    """
    monkeypatch.setattr(step_launches, "TILES", ((PAGE, 4, 3),) * 4)
    twin = Twin(config, 2, dtype=dtype)
    twin.join(), twin.join()
    twin.step(1)
    twin.prompt(0, 71)
    twin.step(2)


@torch.no_grad()
@pytest.mark.usefixtures("poisoned_memory")
def test_a_step_over_pages_is_the_oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    """q and k as they are, gates given; of whole rows, from the first token on. A row waits, one
    is empty, and one has not joined.
    """
    monkeypatch.setattr(decode, "LEAST_KEYS", 4)
    layer, lengths = layer_of(SMALL), [91, 7, 0, 79, 51]
    cache = paged_of(layer, 6)
    for _ in lengths:
        cache.join()
    B, longest, of_layer = 6, max(lengths), cache.layers[0]
    kv = [
        (randn(B, longest + 1, 2, 8, seed=s), randn(B, longest + 1, 2, 6, seed=s + 1))
        for s in (1, 3, 5)
    ]
    cache.has_kernels = False
    of_layer.append(
        *((k[:, :longest], v[:, :longest]) for k, v in kv),
        compress=lambda k, v, first: compress_kv(k, v, first, config=SMALL),
        num_tokens=[*lengths, 0],
    )
    cache.has_kernels = True
    poison(cache)
    at = torch.tensor([*lengths, 0])
    new = [
        torch.cat([x[torch.arange(B), at][:, None] for x in of], 2) for of in zip(*kv, strict=True)
    ]
    q = randn(B, 1, 4, 8, seed=7) * torch.tensor([1, 6, 2, 9])[:, None]
    gates = randn(B, 1, 4, 3, seed=8).sigmoid()
    step = Step(cache.start_B, SMALL, ROOM)
    x = Projected(q, *new, q.new_zeros(1), step.position_B, gates, None, None)
    route = layer.route_of_step(q.flatten(2), of_layer)
    taken = [1, 1, 1, 1, 0, 0]
    o = fused_step.attend_projected(route, of_layer, step, x, rope="none", num_tokens=taken)
    assert bool(o.isfinite().all())
    for b, n in enumerate(lengths[:4]):
        rows = [(k[b : b + 1, :n], v[b : b + 1, :n]) for k, v in kv]
        own = [(k[b : b + 1, n : n + 1], v[b : b + 1, n : n + 1]) for k, v in kv]
        pairs = [
            tuple(torch.cat(parts, 1) for parts in zip(*pair, strict=True))
            for pair in zip(rows, own, strict=True)
        ]
        of_all = [torch.zeros(1, n + 1, *x.shape[2:]) for x in (q, gates)]
        for whole, last in zip(of_all, (q, gates), strict=True):
            whole[0, n] = last[b, 0]
        want = oracle.nsa(of_all[0], *pairs, of_all[1], config=SMALL)
        assert_parity(o[b], want[0, -1:], f"row {b}")
    assert cache.lengths == (92, 8, 1, 80, 51, 0)


@torch.no_grad()
def test_a_captured_step_of_pages_is_nine_launches_a_layer(graphs: list[str]) -> None:  # noqa: F811
    """One capture, while rows join, share a prefix, wait, go back, change places and leave."""
    torch.manual_seed(1)
    tiny = preset("tiny")
    softmax = replace(tiny, num_layers=1, nsa=replace(tiny.nsa, gate="softmax"))
    model = TinyLM(softmax, path="triton")
    exact = deepcopy(model).double()
    for block in exact.blocks:
        block.attention.path = "masked"
    cache = PagedCache.of(model, 3, 60)
    with launches() as names:
        graph = PagedGraph(model, cache)
    own = [name for name in names if name.startswith("nsa_")]
    warm_up_and_capture = 2
    assert own == warm_up_and_capture * [*LINEAR, *OF_ATTENTION, *LINEAR * 3]
    ids, tokens = torch.randint(256, (3, 40)), dict[int, list[int]]()

    def take(*rows: int) -> None:
        new, counts = torch.zeros(3, 1, dtype=torch.int64), [0, 0, 0]
        for b in rows:
            new[b], counts[b] = ids[b, len(tokens[b])], 1
            tokens[b] = [*tokens[b], int(new[b])]
        poison(cache)
        logits = graph(new, num_tokens=counts)
        for b in rows:
            assert_parity(logits[b, 0], exact(torch.tensor([tokens[b]]))[0, -1], f"row {b}")

    def prompt(b: int, n: int) -> None:
        padded, counts = torch.zeros(3, n, dtype=torch.int64), [0, 0, 0]
        padded[b], counts[b] = ids[b, :n], n
        cache.has_kernels = False
        for layer in model.blocks:
            layer.attention.path = "masked"
        model(padded, cache=cache.layers, num_tokens=counts)
        cache.has_kernels = True
        for layer in model.blocks:
            layer.attention.path = "triton"
        tokens[b] = ids[b, :n].tolist()

    prompt(cache.join(), 31)
    prompt(cache.join(), 2)
    take(0, 1)
    take(0, 1)
    held = cache.hold(0)
    tokens[cache.join(held)] = tokens[0]
    cache.drop(held)
    take(0, 2)
    cache.truncate(0, 30)
    tokens[0] = tokens[0][:30]
    cache.leave(1)
    take(0, 2)
    cache.reorder([2, 1, 0])
    tokens = {0: tokens[2], 2: tokens[0]}
    take(0, 2)
    assert graphs == ["capture", *["replay"] * 5]


@torch.no_grad()
def test_a_static_step_asks_the_host_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same launches whatever the rows hold."""
    monkeypatch.setattr(checks, "may_read", lambda x: False)  # as anywhere but on a CPU
    torch.manual_seed(1)
    model = TinyLM(replace(preset("tiny"), num_layers=1), path="triton")
    cache = PagedCache.of(model, 2, 60)
    cache.join(), cache.join()
    token, seen = torch.zeros(2, 1, dtype=torch.int64), []
    for lengths in ([33, 20], [15, 2]):
        cache.plan(lengths)
        cache.taken()
        with cache.static(), launches() as names:
            calls = calls_of(lambda: model(token, cache=cache.layers))
        seen.append(list(names))
        assert calls.of_host == {} and "nsa_append_step" in names
    assert seen[0] == seen[1]


@torch.no_grad()
@pytest.mark.parametrize(
    ("why", "words"),
    [
        ("nothing", ""),
        ("float8", "it reads no float8"),
        ("two tokens", "it takes a chunk of one token a row, not of 2"),
        ("no kernels", "no kernel reads pages of 16 entries of torch.float32 on cpu"),
        ("phi", "it compresses by phi=mean, not by phi=linear; it rotates keys before"),
        ("qk_norm", "it takes no qk_norm"),
        ("path", "path triton does not serve cmp, sel, win, score"),
        ("statistics", ""),
    ],
)
def test_a_route_says_what_sends_a_step_to_the_branches(why: str, words: str) -> None:
    """And it is served as ever."""
    changes: dict[str, Any] = {"phi": {"phi": "linear"}, "qk_norm": {"qk_norm": True}}.get(why, {})
    layer = layer_of(replace(SMALL, **changes))
    layer.path = "masked" if why == "path" else "triton"
    cache = PagedCache(
        [layer.config],
        1,
        ROOM,
        PageShape(2, 8, 6, scales=(torch.ones(2), torch.ones(2)) if why == "float8" else None),
    )
    cache.has_kernels = cache.has_kernels and why != "no kernels"
    cache.join()
    x = randn(1, 2 if why == "two tokens" else 1, DIM, seed=0)
    route = layer.route_of_step(x, cache.layers[0])
    (reason,) = [r.reason for r in route.rejected if r.alternative == ONE_STEP] or [""]
    assert reason.startswith(words) and (reason == "") == (words == "")
    with statistics.collect() if why == "statistics" else nullcontext(), launches() as names:
        layer(x, cache=cache.layers[0])
    assert ("nsa_sum_step" in names) == (why == "nothing")
    assert cache.lengths == (x.shape[1],)


@torch.no_grad()
def test_what_a_step_over_pages_refuses() -> None:
    """Before anything is stored, as a chunk that the branches take one by one."""
    layer = layer_of(SMALL)
    cache = paged_of(layer, 2, num_pages={"tokens": 1})
    one, x = cache.layers[0], randn(2, 1, DIM, seed=0)
    a, b = cache.join(), cache.join()
    with pytest.raises(OutOfPages, match="wanted 2 pages of tokens"):
        layer(x, cache=one)
    with pytest.raises(ValueError, match="the cache holds 2 rows, the chunk 3"):
        layer(randn(3, 1, DIM, seed=0), cache=one)
    cache.leave(b)
    cache.plan([1, 0])
    with pytest.raises(ValueError, match=r"num_tokens=\[0, 1\]; wanted the planned \[1, 0\]"):
        layer(x, cache=one, num_tokens=[0, 1])
    layer(x, cache=one)
    assert cache.lengths == (1, 0)
    cache.plan([15, 0])
    cache.taken()
    with pytest.raises(OutOfPages, match="wanted 1 pages of tokens"):
        layer(x, cache=one)
    cache.truncate(a, 3)
    with torch.enable_grad(), pytest.raises(ValueError, match="while gradients are recorded"):
        layer(x, cache=one)
    assert cache.lengths == (3, 0)
