"""LayerGraphs on a CPU, by a stand-in for the card's graphs: a model from Python whose layers
replay is one whose caches step.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nsa import NSAAttention, RouteError, TinyLM, chosen_blocks, engagement, statistics
from nsa.decode import DecodeGraph, LayerGraphs, NSACache, Steps
from nsa.decode import graph as decoding
from nsa.model import DenseLM
from tests.cases import SMALL, randn
from tests.nsa.test_cache import DIM, layer_of
from tests.nsa.test_decode_step import model_of

ROOM = 40


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Captures that replay like graphs: each repeats the device's part of its own layer, at its own
    addresses, and moves no count of the host's. The places of the layers, in the order of the
    replays.
    """
    done: list[int] = []

    def warm_up(work: Callable[[], None], device: torch.device) -> None:
        work()
        work()

    def capture(work: Callable[[], None], device: torch.device, pool: object) -> Callable[[], None]:
        assert pool == "one pool"
        held: Any = weakref.ref(work.__self__)  # type: ignore[attr-defined]
        work()
        into = held()._y_B1M

        def replay() -> None:
            own = held()  # a graph holds no layer
            done.append(own._place)
            steps = own._cache().steps
            kept = steps.replays, steps._taken, steps._may_forget, set(steps._due)
            steps.replays = {}
            with torch.no_grad():
                own.run()
                into.copy_(own._y_B1M)
            own._y_B1M = into
            steps.replays, steps._taken, steps._may_forget, steps._due = kept

        return replay

    monkeypatch.setattr(decoding, "check_device", lambda device: None)
    monkeypatch.setattr(decoding, "new_pool", lambda: "one pool")
    monkeypatch.setattr(decoding, "warm_up", warm_up)
    monkeypatch.setattr(decoding, "capture", capture)
    return done


def filled(model: TinyLM, lengths: Sequence[int] = (30, 11)) -> list[NSACache]:
    cache = model.new_cache(len(lengths), ROOM)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        prompt = torch.randint(256, (len(lengths), max(lengths)), generator=generator)
        model(prompt, cache=cache, num_tokens=lengths)
    return cache


@torch.no_grad()
def test_layers_that_replay_are_layers_that_step(graphs: list[int]) -> None:
    """Token by token, for rows of different lengths, to the last that a row holds; a hook on each
    layer sees every step, and may change what goes on.
    """
    model: Any = model_of().double()
    cache, plain = filled(model), filled(model)
    own, steps = LayerGraphs(model, cache), Steps(plain)
    assert {c.lengths for c in cache} == {(30, 11)} and own.steps.length_B.tolist() == [30, 11], (
        "neither warm-up nor capture is a step"
    )
    assert own.engaged == {"cmp.sdpa": 2, "sel.masked": 2, "sel.sdpa": 2, "win.sdpa": 2}
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: tuple[Tensor], y: Tensor) -> Tensor:
        seen.append(y)
        return 1.25 * y

    hooks = [block.register_forward_hook(hook) for block in model.blocks]
    for step in range(ROOM - 30):
        ids = torch.randint(256, (2, 1))
        got, (a, b) = model(ids, cache=cache), seen
        kept = a.clone()
        assert not torch.equal(kept, b)
        seen.clear()
        assert torch.equal(got, model(ids, cache=plain))
        assert torch.equal(a, kept) and all(map(torch.equal, (a, b), seen)), step
        seen.clear()
        assert {c.lengths for c in cache} == {(31 + step, 12 + step)}
        assert own.steps.length_B.tolist() == steps.length_B.tolist()
        for branch in ("cmp", "sel", "win"):
            assert torch.equal(cache[1].keys_read[branch], plain[1].keys_read[branch])
        if step == 2:  # a step is taken back as ever
            for one in (own.steps, steps):
                one.forget_last()
            assert all(map(torch.equal, (model(ids, cache=cache),), (model(ids, cache=plain),)))
            seen.clear()
            model.blocks[1].mlp[0].weight.mul_(1.5)  # which a replay follows
    assert graphs == [0, 1] * (ROOM - 30 + 1)
    before = [t.clone() for c in cache for t in (*c.sel, *c.win, *c.raw, *c.cmp)]
    with pytest.raises(ValueError, match="would hold 41 tokens; wanted at most max_len=40"):
        model(ids, cache=cache)
    assert all(
        map(torch.equal, before, (t for c in cache for t in (*c.sel, *c.win, *c.raw, *c.cmp)))
    )
    for hooked in hooks:
        hooked.remove()
    for one in (own.steps, steps):
        one.forget_last()
    own.close()
    own.close()
    steps.end()
    assert all(c.steps is None and c.lengths == (39, 20) for c in cache)
    assert torch.equal(model(ids, cache=cache), model(ids, cache=plain)), "an ordinary step"
    assert len(graphs) == 2 * (ROOM - 30 + 1), "no replay after close"


@torch.no_grad()
def test_attention_in_a_model_of_ones_own(
    graphs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers alone, of two configs and with code between them; and those of a TinyLM, whose MLPs
    may then be hooked.
    """
    made, real = [], NSAAttention.layout

    def counted(self: NSAAttention, x: Tensor, **options: Any) -> Any:
        made.append(self)
        return real(self, x, **options)

    layers = [layer_of(), layer_of(SMALL.full_attention()), layer_of()]
    caches, plain = ([one.new_cache(2, ROOM) for one in layers] for _ in range(2))

    def forward(x: Tensor, cache: Sequence[NSACache], **options: Any) -> Tensor:
        for layer, one in zip(layers, cache, strict=True):
            x = x + layer(torch.tanh(x), cache=one, **options)
        return x

    for cache in (caches, plain):
        forward(randn(2, 9, DIM, seed=1).double(), cache, num_tokens=[9, 4])
    with monkeypatch.context() as patched:
        patched.setattr(NSAAttention, "layout", counted)
        own, _ = LayerGraphs(layers, caches), Steps(plain)
    assert made == layers[:2] * 3, "each run has one Layout a config: two to warm up, one captured"
    for step in range(6):
        x = randn(2, 1, DIM, seed=step).double()
        assert torch.equal(forward(x, caches), forward(x, plain)), step
    assert caches[0].lengths == (15, 10) and graphs == [0, 1, 2] * 6
    with pytest.raises(ValueError, match="a cache and cu_seqlens"):
        layers[0](x, cache=caches[0], cu_seqlens=[0, 1])
    own.close()
    model: Any = model_of()
    cache, other = filled(model), filled(model)
    LayerGraphs([block.attention for block in model.blocks], cache)
    Steps(other)
    seen: list[Tensor] = []
    for block in model.blocks:
        block.mlp.register_forward_hook(lambda module, args, y: seen.append(y))
    ids = torch.tensor([[3], [5]])
    assert torch.equal(model(ids, cache=cache), model(ids, cache=other)) and len(seen) == 4


@torch.no_grad()
def test_a_dense_twin_replays(graphs: list[int]) -> None:
    model = DenseLM(model_of().config)
    caches = [model.new_cache(2, ROOM) for _ in range(2)]
    for cache in caches:
        model(torch.ones(2, 5, dtype=torch.int64), cache=cache)
    LayerGraphs(model, caches[0])
    Steps(caches[1])
    for token in range(3):
        ids = torch.full((2, 1), token)
        assert torch.equal(*(model(ids, cache=cache) for cache in caches))
    assert graphs == [0, 1] * 3 and caches[0][1].lengths == (8, 8)


def put_elsewhere(weight: Tensor) -> None:
    weight.data = weight.data.clone()


def replaced(linear: Any) -> None:
    linear.weight = nn.Parameter(linear.weight.clone())


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "a hook inside": (
        lambda block: block.mlp[0].register_forward_hook(lambda *_: None),
        "got a hook on, or another forward of, a Linear inside",
    ),
    "another forward inside": (
        lambda block: setattr(block.mlp, "forward", lambda x: x),
        "another forward of, a Sequential",
    ),
    "another weight": (lambda block: replaced(block.attention.q_proj), "another weight or module"),
    "another module": (
        lambda block: setattr(block, "mlp_norm", nn.Identity()),
        "another weight or module",
    ),
    "a weight that moved": (
        lambda block: put_elsewhere(block.mlp[2].weight),
        "a weight at another address",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_layer_that_changed_is_refused(graphs: list[int], change: str) -> None:
    model: Any = model_of()
    cache = filled(model)
    own = LayerGraphs(model, cache)
    work, message = CHANGES[change]
    with torch.no_grad():
        work(model.blocks[0])
        ids = torch.tensor([[3], [5]])
        with pytest.raises(ValueError, match=message):
            model(ids, cache=cache)
        assert graphs == [] and cache[0].lengths == (30, 11)
        own.close()
        model(ids, cache=cache)
        assert cache[1].lengths == (31, 12), "an ordinary cache afterwards"


@torch.no_grad()
def test_steps_that_are_refused(graphs: list[int]) -> None:
    """Each before anything is replayed; the next one is taken."""
    model: Any = model_of()
    cache = filled(model)
    own = LayerGraphs(model, cache)
    ids, x = torch.tensor([[3], [5]]), torch.zeros(2, 1, model.config.dim)
    first, second = model.blocks

    def refused(message: str, call: Callable[[], object]) -> None:
        with pytest.raises(ValueError, match=message):
            call()

    refused(
        r"a chunk \(2, 3\) for a cache that steps", lambda: model(ids.repeat(1, 3), cache=cache)
    )
    refused("with num_tokens", lambda: model(ids, cache=cache, num_tokens=[1, 0]))
    refused("a cache and cu_seqlens", lambda: model(ids, cache=cache, cu_seqlens=[0, 1]))
    refused("wanted torch.float32", lambda: first(x.double(), cache=cache[0]))
    refused(r"wanted torch.float32 \(2, 1, ", lambda: first(x[:1], cache=cache[0]))
    refused("layer 1 while layer 0 waits", lambda: second(x, cache=cache[1]))
    refused("no graph of its LayerGraphs replays", lambda: second(x, cache=cache[0]))
    refused("no graph of its", lambda: first.attention(x, cache=cache[0]))
    refused("step already", lambda: LayerGraphs(model, cache))
    refused("step already", lambda: DecodeGraph(model, cache))
    with torch.enable_grad():
        refused("while gradients are recorded", lambda: model(ids, cache=cache))
    with torch.autocast("cpu", torch.bfloat16):
        refused("a step under another autocast", lambda: model(ids, cache=cache))
    for collect in (statistics.collect, chosen_blocks.collect):
        with collect():
            refused("statistics or chosen blocks", lambda: model(ids, cache=cache))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    refused("a hook of all modules", lambda: model(ids, cache=cache))
    handle.remove()
    assert graphs == [] and cache[0].lengths == (30, 11)
    model(ids, cache=cache)
    first(x, cache=cache[0])
    refused("got a second token", lambda: first(x, cache=cache[0]))
    refused("caches that hold", lambda: model(ids, cache=cache))
    assert graphs == [0, 1, 0]
    own.steps.end()
    assert cache[0].lengths == cache[1].lengths == (31, 12), "a token of one layer alone is none"


@torch.no_grad()
def test_what_is_not_captured(graphs: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And leaves the caches ordinary; nor is anything counted of a capture."""
    model: Any = model_of()
    cache = filled(model)
    with engagement.collect() as counted, statistics.collect() as observed:
        LayerGraphs(model, cache).close()
    assert not counted.counts and observed.read().rows is None
    with pytest.raises(
        ValueError, match="got a Linear for LayerGraphs; wanted a TinyLM, or a list"
    ):
        LayerGraphs(nn.Linear(2, 2), cache)
    with pytest.raises(ValueError, match="got 1 caches for 2 layers"):
        LayerGraphs(model, cache[:1])
    other = layer_of().new_cache(1, ROOM, initial_len=8)
    with pytest.raises(ValueError, match="a cache made with"):
        LayerGraphs([layer_of(SMALL.full_attention())], [other])
    assert other.capacity == 8, "its buffers do not grow first"
    handle = model.blocks[1].attention.gate.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="wanted them on the layer alone"):
        LayerGraphs(model, cache)
    handle.remove()
    full = filled(model, [ROOM])
    with pytest.raises(ValueError, match="would hold 41 tokens"):
        LayerGraphs(model, full)
    slow = model_of("reference")
    loops = filled(slow)
    with pytest.raises(RouteError, match=r"sel.reference, whose loop runs on the host"):
        LayerGraphs(slow, loops)
    with monkeypatch.context() as patched:
        patched.setattr("nsa.checks.is_strict", lambda: True)
        with pytest.raises(ValueError, match="NSA_STRICT_ASSERTS=1.*unset it"):
            LayerGraphs(model, cache)
    monkeypatch.setattr(model.blocks[1].mlp[2].weight, "data", torch.zeros(3))
    with pytest.raises(RuntimeError):
        LayerGraphs(model, cache)
    assert all(c.steps is None for c in (*cache, *full, *loops)) and cache[0].lengths == (30, 11)


@torch.no_grad()
def test_graphs_live_as_long_as_their_caches(graphs: list[int]) -> None:
    """Nobody needs to hold them, and they are freed at once, as after `close`."""
    model: Any = model_of()
    cache = filled(model)
    own = LayerGraphs(model, cache)
    held = weakref.ref(own.steps.replays[id(cache[0])])
    own.close()
    assert held() is None
    held = weakref.ref(LayerGraphs(model, cache).steps.replays[id(cache[0])])
    model(torch.tensor([[3], [5]]), cache=cache)
    assert graphs == [0, 1]
    gc.disable()
    try:
        del cache
        assert held() is None
    finally:
        gc.enable()


def test_a_cpu_has_no_layer_graphs() -> None:
    model: Any = model_of()
    with pytest.raises(ValueError, match="wanted one on 'cuda'"):
        LayerGraphs(model, filled(model))
