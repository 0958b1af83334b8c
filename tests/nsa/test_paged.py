"""The paged cache: pages are shared, copied, freed and gone back over as if each row had a cache of
its own; what a plan refuses; a step of the largest batch that asks the host for nothing.

That its decode is a whole call's, for any split and any rows, is tests/nsa/test_cache.py's, over
both caches.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from nsa import checks
from nsa.attention import NSAAttention
from nsa.blocks import BlockGrid
from nsa.cached import decode_attention
from nsa.config import NSAConfig, preset
from nsa.decode import DecodeGraph, OutOfPages, PagedCache, PagedGraph, PageShape, Steps
from nsa.decode import graph as one_graph
from nsa.decode.paged import PageAllocator, PagedLayer
from nsa.functional import compress_kv
from nsa.model import TinyLM
from nsa.ops.paged import append_kernels
from tests import oracle
from tests.cases import SMALL, assert_parity, randn
from tests.nsa.test_cache import DIM, KINDS, OPTIONS, cache_of, layer_of
from tests.nsa.test_decode_step import calls_of

PAGE = SMALL.sel_block
ROOM = 200


def paged_of(layer: NSAAttention, max_batch: int, **options: Any) -> PagedCache:
    weight = layer.q_proj.weight
    shape = PageShape(layer.num_kv_heads, layer.head_dim, layer.v_head_dim, weight.dtype)
    return PagedCache([layer.config], max_batch, ROOM, shape, **options)


def step(layer: NSAAttention, cache: PagedCache, chunks: dict[int, Tensor]) -> dict[int, Tensor]:
    """Tokens [T, M] of some rows, which all take in one step."""
    counts = [len(chunks.get(b, ())) for b in range(cache.max_batch)]
    x = torch.full((cache.max_batch, max(counts), DIM), torch.nan, dtype=torch.float64)
    for b, tokens in chunks.items():
        x[b, : len(tokens)] = tokens
    y = layer(x, cache=cache.layers[0], num_tokens=counts)
    return {b: y[b, : len(tokens)] for b, tokens in chunks.items()}


def assert_all_free(cache: PagedCache) -> None:
    assert cache.free_pages() == {n: p.num_pages for n, p in cache.rows.pools.items()}
    assert {n for table in cache.rows.tables for n in table} == {-1}


def test_an_allocator_counts_who_holds_a_page() -> None:
    pool = PageAllocator(3, "tokens")
    a, b = pool.allocate(), pool.allocate()
    pool.share([a])
    pool.release([a, b])
    assert (pool.num_free, pool.count(a), pool.count(b)) == (2, 1, 0)
    pool.release([a])
    assert sorted(pool.allocate() for _ in range(3)) == [0, 1, 2]
    with pytest.raises(OutOfPages, match=r"wanted 2 pages of tokens, of whose 3 0 are free.*: 5"):
        pool.check(2)
    pool.release([1])
    for wrong in (1, -1, 3):
        with pytest.raises(ValueError, match=r"wanted one that is held"):
            pool.release([wrong])
    with pytest.raises(ValueError, match=r"num_pages=0 of x; wanted a whole number"):
        PageAllocator(0, "x")


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["step", "step", "step", "join", "leave", "truncate", "fork", "reorder"]),
        st.integers(0, 9),
        st.integers(1, 20),
    ),
    min_size=8,
    max_size=16,
)


@settings(max_examples=12)
@given(ACTIONS, st.sampled_from(["mean", "mlp"]))
@torch.no_grad()
def test_whatever_rows_do_each_is_a_whole_call_over_its_tokens(
    actions: list[tuple[str, int, int]], option: str
) -> None:
    """Rows join, leave, go back, are forked and change places between steps of several tokens; each
    step's outputs are the last of a call over all tokens that the row then has.
    """
    layer = layer_of(OPTIONS[option])
    cache = paged_of(layer, 3, num_pages=60, rollback=20)
    tokens: dict[int, Tensor] = {}
    for i, (action, which, n) in enumerate(actions):
        joined = sorted(tokens)
        if (action == "join" or not joined) and len(joined) < 3:
            tokens[cache.join()] = torch.zeros(0, DIM, dtype=torch.float64)
        elif action == "leave":
            cache.leave(b := joined[which % len(joined)])
            del tokens[b]
        elif action == "truncate":
            b = joined[which % len(joined)]
            length = max(0, len(tokens[b]) - n)
            cache.truncate(b, length)
            tokens[b] = tokens[b][:length]
        elif action == "fork" and len(joined) < 3:
            held = cache.hold(b := joined[which % len(joined)])
            tokens[cache.join(held)] = tokens[b]
            cache.drop(held)
            cache.drop(held)
        elif action == "reorder":
            sources = [joined[(which + b) % len(joined)] for b in range(3)]
            cache.reorder(sources)
            tokens = {b: tokens[source] for b, source in enumerate(sources)}
        else:
            new = {
                b: randn(1, min(n + b, ROOM - len(tokens[b])), DIM, seed=7 * i + b)[0].double()
                for b in joined
                if (which + b) % 3 or len(joined) == 1
            }
            new = {b: x for b, x in new.items() if len(x)}
            for b, y in (step(layer, cache, new) if new else {}).items():
                tokens[b] = torch.cat([tokens[b], new[b]])
                assert_parity(y, layer(tokens[b][None])[0, -len(y) :], f"{i} {action} row {b}")
        assert cache.lengths == tuple(len(tokens.get(b, ())) for b in range(3))
    for b in tokens:
        cache.leave(b)
    assert_all_free(cache)


@torch.no_grad()
def test_a_prefix_is_held_once_and_copied_where_rows_part() -> None:
    layer = layer_of()
    cache = paged_of(layer, 3)
    x = randn(3, 90, DIM, seed=1, dtype=torch.float64)
    first = cache.join()
    step(layer, cache, {first: x[0, :60]})  # a page is 16 tokens or blocks: two are not full
    held, before = cache.hold(first), cache.free_pages()
    rows = [cache.join(held), cache.join(held)]
    assert cache.free_pages() == before, "no page for a row that begins alike"
    branch = {b: torch.cat([x[0, :60], x[b, 60:80]]) for b in (first, *rows)}
    # one by one: blocks are completed steps after the last page of tokens was copied
    got = [step(layer, cache, {b: t[i : i + 1] for b, t in branch.items()}) for i in range(60, 80)]
    for b, t in branch.items():
        assert_parity(torch.cat([one[b] for one in got]), layer(t[None])[0, 60:], f"row {b}")
    # the fourth page thrice anew, since it is held, too, and the fifth
    assert before["tokens"] - cache.free_pages()["tokens"] == 3 * 2
    shared = [cache.rows.tables[b][:3] for b in (first, *rows)]
    assert shared[0] == shared[1] == shared[2] and -1 not in shared[0]
    for b in (first, *rows):
        cache.leave(b)
    again = cache.join(held)
    y = step(layer, cache, {again: x[1, 60:65]})[again]
    assert_parity(y, layer(torch.cat([x[0, :60], x[1, 60:65]])[None])[0, 60:], "later")
    cache.leave(again)
    cache.drop(held)
    assert_all_free(cache)


@torch.no_grad()
def test_what_another_row_left_in_a_page_is_not_read() -> None:
    """NaN in every page, the spare one included, also where a row's own tokens end within one."""
    layer = layer_of()
    cache = paged_of(layer, 2)
    b = cache.join()
    step(layer, cache, {b: torch.full((150, DIM), torch.inf, dtype=torch.float64)})
    cache.leave(b)
    for pair in cache._pools.values():
        for pool in pair:
            pool.fill_(torch.nan)
    x = randn(1, 70, DIM, seed=2, dtype=torch.float64)
    b, short = cache.join(), cache.join()  # the short row's page is not full
    for part, few in ((slice(0, 45), slice(0, 9)), (slice(45, 46), slice(9, 10))):
        got = step(layer, cache, {b: x[0, part], short: x[0, few]})
        for row, own in ((b, part), (short, few)):
            assert_parity(got[row], layer(x[:, : own.stop])[0, own], f"{row} {own}")


@torch.no_grad()
def test_what_the_tables_say() -> None:
    """-1 where there is no page; the window and the raw tokens as far back as they are read."""
    layer, grid = layer_of(), BlockGrid.of(SMALL)
    cache = paged_of(layer, 2, rollback=4)
    cache.join()
    cache.leave(0)
    cache.join(), cache.join()
    for _ in range(25):
        step(layer, cache, {1: randn(1, 6, DIM, seed=3)[0].double()})
    n, page = 150, PAGE
    assert cache.seq_lens.tolist() == [0, n] and cache.num_new.tolist() == [0, 6]
    assert cache.block_table.dtype == cache.seq_lens.dtype == torch.int32
    assert cache.block_table.shape == (2, -(-ROOM // page))
    kept = {
        "block": (0, -(-n // page)),
        "compressed": (0, -(-grid.num_cmp(n) // page)),
        "window": ((n - 6 - SMALL.window + 1 - 4) // page, -(-n // page)),
        "raw": ((n - 6 - SMALL.cmp_block + 1 - 4) // page, -(-n // page)),
    }
    for name, (begin, end) in kept.items():
        table = getattr(cache, f"{name}_table")
        there = [i for i, one in enumerate(table[1].tolist()) if one >= 0]
        assert there == list(range(begin, end)) and set(table[0].tolist()) == {-1}, name
    size = {"tokens": 26, "window": 2 * 2 * 3, "compressed": 2 * (4 + 2 * 2)}
    assert {name: pool.num_pages for name, pool in cache.rows.pools.items()} == size
    pages = sum(size.values()) + 3
    own = (8 + 6) * 2 * 8 * page * pages + 4 * cache._tables.numel() + 2 * 2 * 4 + 2 * 2 * 8
    assert cache.memory_bytes() == own


@torch.no_grad()
def test_too_few_pages_plan_nothing() -> None:
    """None of several, the pages of copies included; rows go on once there is room. Of two rows
    that share a page alone, the second writes to it where it lies.
    """
    layer = layer_of()
    cache = paged_of(layer, 2, num_pages={"tokens": 6})
    x = randn(2, 100, DIM, seed=4, dtype=torch.float64)
    a = cache.join()
    step(layer, cache, {a: x[0, :70]})
    before = (cache.lengths, cache.free_pages(), [list(t) for t in cache.rows.tables])
    words = r"wanted 2 pages of tokens, of whose 6 1 are free; let rows leave.*'tokens': 7"
    with pytest.raises(OutOfPages, match=words):
        step(layer, cache, {a: x[0, 70:100]})
    tables = [list(t) for t in cache.rows.tables]
    assert before == (cache.lengths, cache.free_pages(), tables)
    held = cache.hold(a)
    with pytest.raises(OutOfPages, match=r"wanted 2 pages of tokens"):  # one of them a copy
        step(layer, cache, {a: x[0, 70:90]})
    b = cache.join(held)
    cache.drop(held)
    got = step(layer, cache, {a: x[0, 70:75], b: x[1, 70:78]})
    assert_parity(got[a], layer(x[:1, :75])[0, 70:], "the first row")
    other = torch.cat([x[0, :70], x[1, 70:78]])
    assert_parity(got[b], layer(other[None])[0, 70:], "the second row")


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_plan_append_and_decode_without_a_layer(kind: str) -> None:
    """Of K, V, q and gates as a model of one's own makes them, against the oracle."""
    layer = layer_of()
    of_layer = cache_of(layer, kind, 2, ROOM)
    q = randn(2, 90, 4, 8, seed=1, dtype=torch.float64)
    gates = randn(2, 90, 4, 3, seed=2, dtype=torch.float64).sigmoid()
    kv = [
        (
            randn(2, 90, 2, 8, seed=3 + i, dtype=torch.float64),
            randn(2, 90, 2, 6, seed=6 + i, dtype=torch.float64),
        )
        for i in range(3)
    ]
    want = oracle.nsa(q, *kv, gates, config=SMALL)
    for part in (slice(0, 80), slice(80, 81), slice(81, 90)):
        if isinstance(of_layer, PagedLayer):
            of_layer.owner.plan(part.stop - part.start)
        chunk = [(k[:, part], v[:, part]) for k, v in kv]
        view = of_layer.append(*chunk, compress=partial(compress_kv, config=SMALL))
        o = decode_attention(q[:, part], gates[:, part], view, config=SMALL)
        assert_parity(o, want[:, part], str(part))


@torch.no_grad()
def test_how_far_a_row_goes_back() -> None:
    """Exactly ``rollback`` tokens after any step, also one that is longer than what is kept."""
    layer = layer_of()
    x = randn(1, ROOM, DIM, seed=5, dtype=torch.float64)
    for chunk in (1, 90):
        cache = paged_of(layer, 1, rollback=10)
        cache.join()
        step(layer, cache, {0: x[0, :100]})
        step(layer, cache, {0: x[0, 100 : 100 + chunk]})
        n = 100 + chunk
        cache.plan(ROOM - n)
        cache.cancel()
        last = 100 - 10 if chunk == 1 else n - 10
        with pytest.raises(ValueError, match=rf"length={last - 1} .*wanted at least.*than 10"):
            cache.truncate(0, last - 1)
        cache.truncate(0, last)
        other = randn(1, 15, DIM, seed=6)[0].double()
        want = layer(torch.cat([x[0, :last], other])[None])[0, last:]
        assert_parity(step(layer, cache, {0: other})[0], want, f"{chunk}")
        assert cache.lengths == (last + 15,)


@torch.no_grad()
def test_how_far_a_row_goes_back_after_a_plan_was_cancelled() -> None:
    """A plan releases pages, which a cancel brings not back: what a row may go back to is held."""
    layer = layer_of()
    x = randn(1, ROOM, DIM, seed=5, dtype=torch.float64)
    cache = paged_of(layer, 1, rollback=10)
    cache.join()
    step(layer, cache, {0: x[0, :100]})
    step(layer, cache, {0: x[0, 100:115]})
    cache.plan(14)  # which takes another page
    cache.cancel()
    with pytest.raises(ValueError, match=r"length=101 .*wanted at least 103"):
        cache.truncate(0, 101)
    cache.truncate(0, 103)
    other = randn(1, 15, DIM, seed=6)[0].double()
    want = layer(torch.cat([x[0, :103], other])[None])[0, 103:]
    assert_parity(step(layer, cache, {0: other})[0], want, "what follows")


def test_pages_that_are_no_longer_held() -> None:
    layer = layer_of()
    cache, other = paged_of(layer, 2), paged_of(layer, 2)
    with torch.no_grad():
        step(layer, cache, {cache.join(): randn(1, 20, DIM, seed=0)[0].double()})
    held = cache.hold(0)
    for use in (other.join, other.drop):
        with pytest.raises(ValueError, match="got 20 tokens that another cache holds; wanted"):
            use(held)
    cache.drop(held)
    cache.drop(held)
    with pytest.raises(ValueError, match="got 20 held tokens whose pages were dropped; wanted"):
        cache.join(held)
    assert cache.lengths == (20, 0)


@torch.no_grad()
def test_what_a_paged_cache_refuses() -> None:
    layer = layer_of()
    cache, x = paged_of(layer, 2), randn(2, 5, DIM, seed=0, dtype=torch.float64)
    row = cache.join()
    with pytest.raises(ValueError, match=r"got row 1; wanted one that has joined: \[0\]"):
        cache.leave(1)
    for wrong in (-1, 1, True, 2.0):
        with pytest.raises(ValueError, match=r"for row 0 of 0 tokens; wanted a whole number"):
            cache.truncate(row, wrong)  # type: ignore[arg-type]
    for planned in ([1], [0, 0], [1, 1], [-1, 1], 0, [ROOM + 1, 0]):
        with pytest.raises(ValueError, match=r"wanted"):
            cache.plan(planned)
    assert cache.lengths == (0, 0)
    cache.plan([3, 0])
    for change in (lambda: cache.plan(1), lambda: cache.leave(0), lambda: cache.reorder([0, 1])):
        with pytest.raises(ValueError, match=r"layers \[0\] have not taken the planned step"):
            change()
    with pytest.raises(ValueError, match=r"num_tokens=\[2, 0\]; wanted the planned \[3, 0\]"):
        layer(x[:, :2], cache=cache.layers[0], num_tokens=[2, 0])
    cache.cancel()
    cache.cancel()
    assert cache.lengths == (0, 0)
    free = cache.free_pages()
    layer(x, cache=cache.layers[0], num_tokens=[5, 0])
    cache.leave(0)
    assert cache.free_pages() == free
    cache.join(), cache.join()
    with pytest.raises(ValueError, match=r"max_batch=2, all of which are taken"):
        cache.join()
    with pytest.raises(ValueError, match=r"got 1 sources for 2 rows; wanted one each"):
        cache.reorder([0])
    with pytest.raises(ValueError, match=r"wanted an NSACache; nsa.decode.PagedGraph"):
        Steps(cache.layers)
    shape = cache.shape
    configs = [SMALL, replace(SMALL, window=9)]
    for build, words in (
        (lambda: PagedCache([], 1, 9, shape), "got no configs"),
        (lambda: PagedCache(configs, 1, 9, shape), "wanted one for all"),
        (lambda: PagedCache([SMALL], 0, 9, shape), "max_batch=0"),
        (lambda: PagedCache([SMALL], 1, 9, shape, rollback=0), "rollback=0"),
        (lambda: PagedCache([SMALL], 1, 9, shape, num_pages={"sel": 3}), r"\['sel'\]; wanted"),
        (
            lambda: PagedCache([SMALL], 1, 9, replace(shape, scales=(torch.ones(3),) * 2)),
            r"got scales \(3,\); wanted \(2,\) or \(1, 2\)",
        ),
        (
            lambda: PagedCache([SMALL], 1, 9, replace(shape, scales=(torch.zeros(2),) * 2)),
            "not finite and above 0",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            build()


# float8.


@triton.jit
def encoded(X, S, OUT, W: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, W)
    tl.store(OUT + i, append_kernels._encode(tl.load(X + i), S, i, i < W, True))


def test_float8_keeps_nan_on_a_gpu() -> None:
    """The instruction that clamps would give 448 for NaN, which the interpreter does not show."""
    signature = {"X": "*bf16", "S": "*fp32", "OUT": "*fp8e4nv", "W": "constexpr"}
    source = ASTSource(fn=encoded, signature=signature, constexprs={"W": 128})
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    clamps = re.findall(r"\b(?:min|max)\S*f32", ptx)
    assert clamps and all(".NaN." in name for name in clamps), clamps


@torch.no_grad()
def test_float8_keeps_its_bound() -> None:
    """Each K and V within max(2^-4 |x|, 2^-10 s) of what it was; o within what follows from that,
    since the same blocks are chosen: compressed keys are kept as they are.

    Logits move by at most e = scale * sum |q| |dk|, so each weight by a factor of at most e^(2e),
    and o by (e^(2e) - 1) max |v| + max |dv|.
    """
    layer = layer_of().float()
    scales = torch.tensor([0.01, 0.02]), torch.tensor([0.005, 0.25])
    weight = layer.q_proj.weight
    x = randn(1, 150, DIM, seed=8, dtype=torch.float32)
    caches = [
        PagedCache([SMALL], 1, ROOM, PageShape(2, 8, 6, weight.dtype, scales=s))
        for s in (None, scales)
    ]
    views: list[Any] = []
    for cache in caches:
        cache.join()
        of_layer = cache.layers[0]
        append = of_layer.append

        def watched(*kv: Any, append: Callable[..., Any] = append, **options: Any) -> Any:
            views.append(append(*kv, **options))
            return views[-1]

        of_layer.append = watched  # type: ignore[method-assign]
        for part in (slice(0, 140), slice(140, 149), slice(149, 150)):
            layer(x[:, part], cache=of_layer)
    exact, rounded = views[2], views[5]
    far = torch.tensor([-5.0, 5.0, torch.inf]).expand(1, 1, 2, 3)
    kept = rounded.pages.sel.rounded((far, far))[0][0, 0, 0]
    assert torch.equal(kept, torch.tensor([-4.48, 4.48, 4.48])), "the largest, not NaN"
    assert caches[1]._pools["tokens"][0].dtype == torch.float8_e4m3fn
    assert all(map(torch.equal, exact.cmp, rounded.cmp)), "blocks are chosen alike"
    deltas = {}
    for branch in ("sel", "win"):
        pairs = zip(getattr(exact, branch), getattr(rounded, branch), scales, strict=True)
        for name, (want, got, scale) in zip("kv", pairs, strict=True):
            s = scale[:, None]
            assert bool((want.abs() <= 448 * s).all()), "none is cut off"
            bound = torch.maximum(want.abs() / 16, s / 1024)
            delta = (got - want).abs()
            assert bool((delta <= bound).all()) and bool((delta > bound / 2).any())
            deltas[branch, name] = bound
    q = randn(1, 1, 4, 8, seed=9, dtype=torch.float32)
    blocks = torch.tensor([0, 3, 5, 8, 9], dtype=torch.int32).expand(1, 1, 2, 5)
    o = [oracle.selected(q, *v.sel, blocks, sel_block=PAGE, q_start=149) for v in (exact, rounded)]
    dk, dv = (deltas["sel", name].double() for name in "kv")
    e = torch.einsum("btghd,bsgd->btghs", q.abs().double().unflatten(2, (2, 2)), dk) * 8**-0.5
    limit = (2 * e.amax(-1)).expm1() * exact.sel[1].abs().max().double() + dv.max()
    error = (o[1] - o[0]).abs().amax(-1).unflatten(2, (2, 2))
    assert bool((error <= limit).all()) and float(error.max()) > 1e-4


# A model, and a step of its largest batch.


def model_of(**changes: Any) -> TinyLM:
    torch.manual_seed(1)
    return TinyLM(replace(preset("tiny"), **changes), path="masked", fa2="off").double()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A capture that replays the device's part of a step: within `PagedCache.static`, in which
    nothing is planned or counted.
    """
    done: list[str] = []

    def capture(work: Callable[[], None], device: torch.device) -> Callable[[], None]:
        done.append("capture")
        owner: Any = work.__self__  # type: ignore[attr-defined]
        work()
        into = owner._logits_BTV

        def replay() -> None:
            done.append("replay")
            with owner._cache.static(), torch.no_grad():
                work()
            into.copy_(owner._logits_BTV)
            owner._logits_BTV = into

        return replay

    monkeypatch.setattr(one_graph, "check_device", lambda device: None)
    monkeypatch.setattr(one_graph, "warm_up", lambda work, device: work())
    monkeypatch.setattr(one_graph, "capture", capture)
    return done


@torch.no_grad()
def test_one_graph_serves_rows_that_join_go_back_and_leave(graphs: list[str]) -> None:
    """Speculative decoding of up to three tokens a step, in one capture."""
    model = model_of()
    cache = PagedCache.of(model, 3, 120)
    ids = torch.randint(256, (3, 60))
    graph = PagedGraph(model, cache, tokens=3)
    places = [(p[0].data_ptr(), p[1].data_ptr()) for p in cache._pools.values()]

    def prompt(b: int, n: int) -> None:
        padded, counts = torch.zeros(3, n, dtype=torch.int64), [0, 0, 0]
        padded[b], counts[b] = ids[b, :n], n
        model(padded, cache=cache.layers, num_tokens=counts)

    def whole(b: int, n: int, count: int) -> Tensor:
        return model(ids[b : b + 1, :n])[0, n - count :]

    def take(counts: list[int]) -> None:
        starts, new = cache.lengths, torch.zeros(3, 3, dtype=torch.int64)
        for b, n in enumerate(counts):
            new[b, :n] = ids[b, starts[b] : starts[b] + n]
        logits = graph(new, num_tokens=counts)
        for b, n in enumerate(counts):
            if n:
                assert_parity(logits[b, :n], whole(b, starts[b] + n, n), f"{counts} row {b}")

    a, b = cache.join(), cache.join()
    prompt(a, 33)
    prompt(b, 7)
    take([3, 1, 0])
    cache.truncate(a, 34)
    c = cache.join()
    prompt(c, 20)
    take([2, 3, 1])
    cache.leave(b)
    take([1, 0, 3])
    b = cache.join()
    take([1, 3, 2])
    assert graphs == ["capture", *["replay"] * 4]
    assert places == [(p[0].data_ptr(), p[1].data_ptr()) for p in cache._pools.values()]
    with pytest.raises(ValueError, match=r"got num_tokens=4 for a step of 3"):
        graph(ids[:, :3], num_tokens=4)
    with pytest.raises(ValueError, match=r"wanted torch.int64 \(3, 3\) on cpu"):
        graph(ids[:, :1])
    graph.close()
    with pytest.raises(ValueError, match="closed PagedGraph"):
        graph(ids[:, :3])
    for tokens in (0, 65, True):
        with pytest.raises(ValueError, match=r"wanted 1 to 64, the cache's rollback"):
            PagedGraph(model, cache, tokens=tokens)
    with pytest.raises(ValueError, match=r"nsa.decode.PagedGraph captures"):
        DecodeGraph(model, cache.layers)


@torch.no_grad()
def test_a_static_step_asks_the_host_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No read-back and no tensor of Python numbers; the same calls whatever the rows hold."""
    # contents may not be looked at, as anywhere but on a CPU
    monkeypatch.setattr(checks, "may_read", lambda x: False)
    model = model_of(num_layers=1)
    cache = PagedCache.of(model, 2, 60)
    cache.join(), cache.join()
    token, seen = torch.zeros(2, 1, dtype=torch.int64), []
    for lengths in ([33, 20], [15, 2]):
        ids = torch.zeros(2, max(lengths), dtype=torch.int64)
        model(ids, cache=cache.layers, num_tokens=lengths)
        with cache.static():
            seen.append(calls_of(lambda: model(token, cache=cache.layers)))
            # a shape is the graph's for good
            assert cache.pages_of(0).max_tokens == cache.max_len
    assert seen[0].of_host == {} and seen[0].count == seen[1].count


@torch.no_grad()
def test_beams_of_a_model_are_rows_alone() -> None:
    """Every layer's pages follow the table; what a layer keeps may differ, but not its geometry."""
    model = model_of(nsa=replace(NSAConfig(), cmp_block=8, cmp_stride=4, sel_block=16, window=24))
    cache = PagedCache.of(model, 2, 90)
    ids = torch.randint(256, (2, 50))
    cache.join(), cache.join()
    model(ids[:, :40], cache=cache.layers)
    cache.reorder([1, 1])
    got = model(ids[:, 40:], cache=cache.layers)
    joined = torch.cat([ids[1:, :40].expand(2, 40), ids[:, 40:]], 1)
    assert_parity(got, model(joined)[:, 40:], "two beams of row 1")


@torch.no_grad()
def test_a_step_that_failed_is_taken_back_and_run_again() -> None:
    model = model_of()
    cache, ids = PagedCache.of(model, 2, ROOM), torch.arange(120).view(2, 60) % 256
    cache.join(), cache.join()
    got = [model(ids[:, :40], cache=cache.layers)]

    def fail(*_: object) -> None:
        raise RuntimeError("planted")

    hook = model.blocks[1].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="planted"):
        model(ids[:, 40:41], cache=cache.layers)
    hook.remove()
    with pytest.raises(ValueError, match=r"take the step back with cancel\(\) of the PagedCache"):
        model(ids[:, 40:41], cache=cache.layers)
    cache.cancel()
    got += [model(ids[:, t : t + 1], cache=cache.layers) for t in range(40, 60)]
    assert_parity(torch.cat(got, 1), model(ids), "after cancel")
