"""A step of static shapes, lengths on the device (nsa.decode.Steps), equals the ordinary decode
step, and asks the host for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa import checks
from nsa.attention import NSAAttention
from nsa.config import preset
from nsa.decode import NSACache
from nsa.decode.graph_cache import Steps
from nsa.model import TinyLM
from nsa.routing import Path
from tests.cases import PATHS_HERE, SMALL, assert_parity, cache_bytes, here, randn
from tests.nsa.test_cache import DIM, KV_HEADS, OPTIONS, layer_of

FAST = [path for path in PATHS_HERE if path in (Path.MASKED, Path.V2, Path.TRITON)]


def filled(layer: NSAAttention, x: Tensor, lengths: Sequence[int], room: int) -> NSACache:
    cache = layer.new_cache(x.shape[0], room)
    if max(lengths):
        layer(x[:, : max(lengths)], cache=cache, num_tokens=lengths)
    return cache


def tokens_at(x: Tensor, lengths: Sequence[int], step: int) -> Tensor:
    """The next token of each row, [B, 1, M]."""
    return torch.stack([x[b, n + step] for b, n in enumerate(lengths)])[:, None]


def kept(cache: NSACache) -> list[Tensor]:
    """All that the next call may read of an ordinary cache, row by row."""
    grid, d, w = cache.grid, cache.config.cmp_stride, cache.config.window
    parts = []
    for b, n in enumerate(cache.lengths):
        done = grid.num_cmp(n)
        slots = [p % w for p in range(max(0, n - w + 1), n)]
        for pair, rows in (
            (cache.sel, range(n)),
            (cache.cmp, range(done)),
            (cache.win, slots),
            (cache.tail, range(n - done * d)),
        ):
            parts += [x[b, list(rows)] for x in pair]
    return parts


@torch.no_grad()
def assert_steps_are_decode(
    layer: NSAAttention, lengths: Sequence[int], count: int, *, room: int | None = None
) -> None:
    """``count`` steps against ``count`` ordinary calls, then one more ordinary chunk on what each
    left.
    """
    x = randn(len(lengths), max(lengths) + count + 5, DIM, seed=3, dtype=layer.q_proj.weight.dtype)
    room = max(lengths) + count + 5 if room is None else room
    plain, stepped = (filled(layer, x, lengths, room) for _ in range(2))
    steps = Steps([stepped])
    for step in range(count):
        token = tokens_at(x, lengths, step)
        want, got = layer(token, cache=plain), layer(token, cache=stepped)
        assert_parity(got, want, f"step {step}")
        assert stepped.lengths == plain.lengths == tuple(n + step + 1 for n in lengths)
        for branch in ("cmp", "sel", "win"):
            if branch in layer.config.branches:
                a, b = (
                    torch.broadcast_to(
                        c.keys_read[branch], (len(lengths), *c.keys_read[branch].shape[1:])
                    )
                    for c in (plain, stepped)
                )
                assert torch.equal(a, b), (branch, step)
    steps.end()
    if layer.path == Path.TRITON:  # one operator, whose RoPE and means round otherwise in fp32
        for a, b in zip(kept(plain), kept(stepped), strict=True):
            assert a.numel() == 0 or float((a - b).abs().max()) <= 2e-6
        return
    assert all(map(torch.equal, kept(plain), kept(stepped))), (
        "the caches hold the same, bit for bit"
    )
    rest = torch.cat([tokens_at(x, lengths, count + i) for i in range(5)], 1)
    assert torch.equal(layer(rest, cache=plain), layer(rest, cache=stepped))


@pytest.mark.parametrize("option", OPTIONS)
def test_steps_are_decode_across_every_boundary(option: str) -> None:
    """From the first token on: those of l, d, l' and w, of the small geometry and of the
    paper's.
    """
    layer = layer_of(OPTIONS[option])
    assert_steps_are_decode(layer, [0, 0], 110 if option != "paper" else 70)


@pytest.mark.parametrize("path", FAST)
def test_every_fast_path_steps(path: Path) -> None:
    layer = layer_of(path=path).float()
    assert_steps_are_decode(layer, *here(([90, 37, 0], 40), ([14, 6], 3)))


@settings(max_examples=20)
@given(
    st.lists(st.integers(0, 120), min_size=1, max_size=3),
    st.integers(1, 30),
    st.sampled_from([(8, 4, 16, 24), (4, 4, 8, 1), (6, 2, 4, 7), (12, 4, 16, 200), (1, 1, 4, 3)]),
    st.sampled_from(["mean", "mlp", "linear"]),
)
def test_any_rows_of_any_geometry(
    lengths: list[int], count: int, geometry: tuple[int, int, int, int], phi: Any
) -> None:
    l, d, sel, w = geometry  # noqa: E741 (the paper's letters)
    assert_steps_are_decode(
        layer_of(replace(SMALL, cmp_block=l, cmp_stride=d, sel_block=sel, window=w, phi=phi)),
        lengths,
        count,
    )


def test_steps_in_room_that_holds_no_block_at_all() -> None:
    """A cache so short that no compressed block ever ends in it."""
    layer = layer_of()
    x = randn(1, 7, DIM, seed=1, dtype=torch.float64)
    with torch.no_grad():
        plain, stepped = layer.new_cache(1, 7), layer.new_cache(1, 7)
        Steps([stepped])
        for t in range(7):
            assert_parity(
                layer(x[:, t : t + 1], cache=stepped), layer(x[:, t : t + 1], cache=plain), t
            )
        with pytest.raises(
            ValueError, match=r"would hold 8 tokens; wanted at most max_len=7.*make it larger"
        ):
            layer(x[:, :1], cache=stepped)


@torch.no_grad()
def test_a_step_that_is_forgotten_leaves_no_trace() -> None:
    """At each position, so also where a block ends; the next step takes its place.

    What was there is random, to be seen.
    """
    layer, lengths = layer_of(OPTIONS["mlp"]), (60, 13)
    x = randn(2, 120, DIM, seed=4, dtype=torch.float64)
    once, again = (filled(layer, x, lengths, 120) for _ in range(2))
    Steps([once])
    steps = Steps([again])
    for step in range(30):
        layer(torch.full((2, 1, DIM), 9.0, dtype=torch.float64), cache=again)
        steps.forget_last()
        token = tokens_at(x, lengths, step)
        assert torch.equal(layer(token, cache=once), layer(token, cache=again)), step
    steps.forget_last()
    with pytest.raises(ValueError, match="got no whole step to forget"):
        steps.forget_last()
    steps.end()
    assert again.lengths == (89, 42)


def test_what_a_cache_that_steps_refuses() -> None:
    layer, other = layer_of(), layer_of()
    x = randn(2, 9, DIM, seed=0, dtype=torch.float64)
    with torch.no_grad():
        cache = filled(layer, x, (4, 4), 9)
        with pytest.raises(ValueError, match="wanted the same of each"):
            Steps([cache, filled(layer, x, (4, 5), 9)])
        with pytest.raises(ValueError, match="wanted the same of each"):
            Steps([])
        second = filled(other, x, (4, 4), 9)
        steps = Steps([cache, second])
        with pytest.raises(ValueError, match="step already"):
            Steps([cache])
        before = [t.clone() for name in ("sel", "cmp", "win", "raw") for t in getattr(cache, name)]
        with pytest.raises(
            ValueError,
            match=r"a chunk of 2 tokens for a cache that steps; wanted one token.*end its Steps",
        ):
            layer(x[:, :2], cache=cache)
        with pytest.raises(ValueError, match=r"num_tokens=\[1, 0\] for a cache that steps"):
            layer(x[:, :1], cache=cache, num_tokens=[1, 0])
        ragged = filled(layer, x, (4, 2), 9)
        for one in (cache, ragged):  # positions of two rows, which no others can be rotated by
            with pytest.raises(ValueError, match="the cache holds 2 rows, the chunk 4; wanted"):
                layer(torch.cat([x, x])[:, :1], cache=one)
        assert all(
            map(
                torch.equal,
                before,
                (t for name in ("sel", "cmp", "win", "raw") for t in getattr(cache, name)),
            )
        )
        layer(x[:, :1], cache=cache)
        assert (cache.lengths, second.lengths) == ((5, 5), (4, 4)) and steps.length_B.tolist() == [
            4,
            4,
        ]
        with pytest.raises(
            ValueError, match="a second token for a cache while another layer waits"
        ):
            layer(x[:, :1], cache=cache)
        with pytest.raises(ValueError, match="got no whole step to forget"):
            steps.forget_last()
        other(x[:, :1], cache=second)
        assert cache.lengths == second.lengths == (5, 5) and steps.length_B.tolist() == [5, 5]
        steps.end()
        steps.end()
        layer(x[:, :2], cache=cache)
        assert cache.lengths == (7, 7) and cache.raw == []


def test_a_route_says_why_no_one_operator_takes_the_chunk() -> None:
    layer, x = layer_of(), torch.zeros(2, 3, DIM, dtype=torch.float64)
    cache = layer.new_cache(2, 9)

    def reasons(tokens: int) -> str:
        route = layer.route_of_step(x[:, :tokens], cache)
        return next(line for line in route.explain() if line.startswith("not one_step"))

    assert "its cache does not step (nsa.decode.Steps)" in reasons(1)
    Steps([cache], 3)
    assert "it takes a chunk of one token a row, not of 3" in reasons(3)
    assert "its cache" not in reasons(1) and "a chunk of" not in reasons(1)


def test_a_token_that_only_some_layers_took_is_none() -> None:
    layer = layer_of()
    x = randn(1, 9, DIM, seed=0, dtype=torch.float64)
    with torch.no_grad():
        caches = [filled(layer, x, (4,), 9) for _ in range(2)]
        steps = Steps(caches)
        layer(x[:, :1], cache=caches[0])
        steps.end()
        assert [c.lengths for c in caches] == [(4,), (4,)]
        a, b = (layer(x[:, 4:6], cache=c) for c in caches)
        assert torch.equal(a, b)


def test_buffers_grow_first_and_their_bytes_are_counted() -> None:
    layer = layer_of()
    with torch.no_grad():
        cache = layer.new_cache(2, 100, initial_len=10)
        layer(randn(2, 10, DIM, seed=0, dtype=torch.float64), cache=cache)
        Steps([cache])
        places = [
            t.data_ptr() for name in ("sel", "cmp", "win", "raw") for t in getattr(cache, name)
        ]
        for _ in range(30):
            layer(randn(2, 1, DIM, seed=1, dtype=torch.float64), cache=cache)
    assert cache.capacity == 100 and places == [
        t.data_ptr() for name in ("sel", "cmp", "win", "raw") for t in getattr(cache, name)
    ]
    shape = {
        "batch": 2,
        "num_kv_heads": KV_HEADS,
        "head_dim": 8,
        "v_head_dim": 6,
        "element_size": 8,
    }
    # l = 8 raw tokens
    assert (
        cache.memory_bytes()
        == cache_bytes(SMALL, capacity=100, **shape) + 2 * 8 * KV_HEADS * (8 + 6) * 8
    )


def test_where_memory_ends_the_caches_are_what_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second layer's buffers do not fit: no cache steps, and each continues as if nothing had
    been asked.
    """
    layer = layer_of()
    x = randn(2, 30, DIM, seed=0, dtype=torch.float64)
    with torch.no_grad():
        caches = [layer.new_cache(2, 100, initial_len=12) for _ in range(2)]
        for cache in caches:
            layer(x[:, :11], cache=cache)
        cat, left = torch.cat, [3]  # of the four buffers of each cache

        def fails(*given: Any) -> Tensor:
            left[0] -= 1
            if left[0] < 0:
                raise torch.OutOfMemoryError("planted")
            return cat(*given)

        for first in (7, 3):
            left[0] = first
            with monkeypatch.context() as planted:
                planted.setattr(torch, "cat", fails)
                with pytest.raises(torch.OutOfMemoryError):
                    Steps(caches)
        assert all(cache.steps is None and cache.lengths == (11, 11) for cache in caches)
        assert [cache.sel[0].shape[1] - 1 for cache in caches] == [
            cache.capacity for cache in caches
        ]
        whole = layer(x)
        for cache in caches:
            assert_parity(layer(x[:, 11:], cache=cache), whole[:, 11:], "the rest")


# What a step asks of the host.


class Calls(TorchDispatchMode):
    """Counts ATen calls, and those that read back from the device, or make a tensor of Python
    numbers, which is copied to it.
    """

    HOST = ("_local_scalar_dense", "nonzero", "unique2", "lift_fresh")

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.count[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))

    @property
    def of_host(self) -> dict[str, int]:
        return {name: n for name, n in self.count.items() if name in self.HOST}


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents may not be looked at, as anywhere but on a CPU."""
    monkeypatch.setattr(checks, "may_read", lambda x: False)


def model_of(path: str = "masked", **changes: Any) -> TinyLM:
    torch.manual_seed(1)
    return TinyLM(replace(preset("tiny"), **changes), path=path, fa2="off")


def calls_of(step: Callable[[], Any]) -> Calls:
    with torch.no_grad(), Calls() as calls:
        step()
    return calls


@pytest.mark.parametrize("path", FAST)
@pytest.mark.usefixtures("as_on_cuda")
def test_a_step_never_asks_the_host(path: Path) -> None:
    """No read-back, no tensor made of Python numbers; the same calls at every position, and far
    fewer than an ordinary step's.
    """
    ids, lengths = torch.zeros(2, 1, dtype=torch.int64), here([33, 20], [9, 6])
    seen = []
    for layers in (1, 2):
        model = model_of(path, num_layers=layers)
        cache, ragged = model.new_cache(2, 60), model.new_cache(2, 60)
        with torch.no_grad():
            for c in (cache, ragged):
                model(torch.zeros(2, lengths[0], dtype=torch.int64), cache=c, num_tokens=lengths)
        ordinary = calls_of(lambda m=model, c=ragged: m(ids, cache=c))
        assert ordinary.of_host, "the count must be able to see them"
        Steps(cache)
        counts = [calls_of(lambda m=model, c=cache: m(ids, cache=c)) for _ in range(here(8, 2))]
        assert all(c.of_host == {} and c.count == counts[0].count for c in counts)
        seen.append((counts[0].count.total(), ordinary.count.total()))
    (few, many), (few_more, many_more) = seen
    print(
        f"{path}: {few_more - few} ATen calls a layer in a step, {many_more - many} in an ordinary"
        f" one; {few} in a model of one"
    )
    assert few_more - few < many_more - many
