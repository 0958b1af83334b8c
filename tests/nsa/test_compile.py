"""torch.compile(fullgraph=True) with a dynamic length: one graph for many lengths, and the same
numbers as eager.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounter
from torch._inductor.decomposition import select_decomp_table
from torch.utils.flop_counter import FlopCounterMode

from nsa import engagement, nsa_attention
from nsa.attention import NSAAttention
from nsa.config import BRANCHES, preset
from nsa.dense import DenseAttention
from nsa.model import DenseLM, TinyLM
from nsa.ops.selected import masked, v2
from tests.cases import INTERPRETED, SMALL, Case, assert_parity, here, qkv, randn, random_blocks

TINY = preset("tiny")
ROOT = Path(__file__).parents[2]
# up to this length every block is selected
EVERY_BLOCK_TOKENS = SMALL.num_selected * SMALL.sel_block
# Blocks compete or all find a slot, the window has tiles behind it or covers all: multiples of the
# selection block, of the window, and of neither. Up to one selection block (16 here) the sizes are
# 0 and 1, which torch.compile makes other graphs of.
LENGTHS = (200, 201, 96, 333, 160, 240, 111, 80, 64, 48, 33, 24, 23, 17)


@pytest.fixture(autouse=True)
def fresh_compiler(one_thread: None) -> Iterator[None]:
    """With symbolic shapes the cache of fake tensors takes a third of tracing, and saves little."""
    torch._dynamo.reset()
    with torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
        yield
    torch._dynamo.reset()


def layer_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "dense":
        return DenseAttention(TINY)
    return NSAAttention(
        TINY.dim,
        TINY.num_heads,
        TINY.num_kv_heads,
        TINY.head_dim,
        None,
        TINY.nsa,
        path=kind,
        fa2="off",
    )


def value_and_gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    y = function(leaf)
    return y.detach(), torch.autograd.grad(y.square().sum(), leaf)[0]


class Counter(CompileCounter):
    """Counts graphs, and notes the calls of SDPA in them that leave the mask to ``is_causal``."""

    def __init__(self) -> None:
        super().__init__()
        self.causal: list[torch.fx.Node] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.causal += [node for node in graph.graph.nodes if "is_causal" in node.kwargs]
        return super().__call__(graph, inputs)


@pytest.mark.parametrize("kind", ["auto", "v2", "dense", *(["triton"] if INTERPRETED else [])])
def test_one_graph_of_a_layer_serves_every_length(kind: str) -> None:
    """Lengths are unknown inside: ``auto`` is path masked there at any length, and no branch is
    causal SDPA, which it is outside up to a length.
    """
    layer, counter = layer_of(kind), Counter()
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=counter)
    for tokens in LENGTHS if kind != "triton" else LENGTHS[-2:]:
        x = randn(here(2, 1), tokens, TINY.dim, seed=tokens)
        for got, want in zip(
            value_and_gradient(compiled, x), value_and_gradient(layer, x), strict=True
        ):
            assert_parity(got, want, f"{kind} {tokens}")
    assert counter.frame_count == 1 and (counter.causal == [] or kind == "dense")


@pytest.mark.parametrize("path", [masked, v2], ids=["masked", "v2"])
def test_one_graph_of_the_selected_branch_serves_short_lengths_too(path) -> None:
    """At and below num_selected blocks, the window and one block."""
    counter = CompileCounter()

    def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
        return path.attend(
            q, k, v, blocks, sel_block=SMALL.sel_block, q_start=0, scale=0.25, fa2=None
        )[0]

    compiled = torch.compile(attend, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (
        100,
        EVERY_BLOCK_TOKENS,
        EVERY_BLOCK_TOKENS + 1,
        SMALL.window,
        SMALL.window - 1,
        SMALL.sel_block,
        5,
        160,
    ):
        case = Case(tokens, 6, 16, 8, 2)
        blocks = random_blocks(case, SMALL, seed=tokens)
        got, want = ([x.requires_grad_() for x in qkv(case, seed=tokens)] for _ in range(2))
        o, true_o = compiled(*got, blocks), attend(*want, blocks)
        grads = (
            torch.autograd.grad(o.square().sum(), got),
            torch.autograd.grad(true_o.square().sum(), want),
        )
        assert torch.equal(o, true_o) and all(
            torch.equal(a, b) for a, b in zip(*grads, strict=True)
        ), tokens
    assert counter.frame_count == 1


def test_a_language_model_is_one_graph_too_and_nothing_is_counted_inside_it() -> None:
    torch.manual_seed(0)
    model, counter = TinyLM(TINY, path="v2", fa2="off"), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (201, 48):
        ids = torch.randint(256, (2, tokens), generator=torch.Generator().manual_seed(tokens))
        runs = []
        for function, calls in ((compiled, 0), (model, TINY.num_layers)):
            with engagement.collect() as seen:
                logits = function(ids)
            assert seen.counts.get("sel.v2", 0) == calls
            runs.append(
                (logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters())))
            )
        for got, want in zip(*runs, strict=True):
            assert_parity(got, want, f"{tokens} tokens")
    assert counter.frame_count == 1


def saved_views_of_another(model: nn.Module, ids: Tensor) -> list[str]:
    """Pairs of tensors that Inductor's own split of the step keeps for the backward, one of which
    has memory of the other, and neither of which is an input or an output.
    """
    kept: dict[int, list[tuple[str, Tensor]]] = {}

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        first, *saved = graph.graph.find_nodes(op="output")[0].args[0]
        known = [node.meta["val"] for node in (*graph.graph.find_nodes(op="placeholder"), first)]
        others = {storage_of(t) for t in known}
        for node in saved:
            if storage_of(t := node.meta["val"]) not in others:
                kept.setdefault(storage_of(t), []).append((node.name, t))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=look,
        bw_compiler=lambda graph, inputs: make_boxed_func(graph.forward),
        decompositions=select_decomp_table,
        partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
    )
    logits = torch.compile(model, fullgraph=True, dynamic=False, backend=backend)(ids)
    logits.square().mean().backward()
    assert kept
    pairs = (pair for same in kept.values() for pair in itertools.combinations(same, 2))
    return [f"{a} and {b}" for (a, x), (b, y) in pairs if offsets(x) & offsets(y)]


def storage_of(t: Tensor) -> int:
    return t.untyped_storage()._cdata


def offsets(t: Tensor) -> set[int]:
    """Which bytes of its storage are those of ``t``, by the first of each number."""
    index = torch.arange(t.untyped_storage().nbytes() // t.element_size())
    of_t = index.as_strided(t.shape, t.stride(), t.storage_offset())
    return set((of_t * t.element_size()).flatten().tolist())


@pytest.mark.parametrize(
    ("path", "gate", "branches"),
    [
        ("v2", "sigmoid", BRANCHES),
        ("masked", "sigmoid", ("sel", "win")),
        ("v2", "softmax", BRANCHES),
    ],
)
def test_no_saved_tensor_is_a_view_of_another(
    path: str, gate: str, branches: tuple[str, ...]
) -> None:
    """Inductor (torch 2.11 and 2.13) writes the backward over a saved tensor that no input and no
    output shares, and does not see that another saved one does: gradients were silently wrong.
    """
    torch.manual_seed(0)
    nsa = replace(TINY.nsa, gate=gate, branches=branches)
    config = replace(TINY, num_layers=1, nsa=nsa)
    model = TinyLM(config, path=path, fa2="off")
    ids = torch.randint(256, (2, 100), generator=torch.Generator().manual_seed(1))
    assert saved_views_of_another(model, ids) == []


@pytest.mark.parametrize("ragged", [False, True])
def test_the_operators_keep_what_their_schemas_promise(ragged: bool) -> None:
    """No alias, no mutation; fake tensors have the shapes, strides and dtypes of real ones, for
    dynamic shapes as well.
    """
    case = Case(37, 3, 8, 16, 2)
    q, k, v = (x.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for x in qkv(case))
    position = torch.arange(37)[None] if not ragged else torch.tensor([[0], [5]]) + torch.arange(37)
    options = (SMALL.sel_block, 0.25, None, 1 << 14)
    inputs = (q, k, v, random_blocks(case, SMALL, seed=1), position)
    torch.library.opcheck(torch.ops.nsa.selected_v2.default, (*inputs, *options))
    plain = tuple(x.detach() for x in inputs)
    do = torch.ones(()).expand(2, 37, 6, 16)
    torch.library.opcheck(torch.ops.nsa.selected_v2_backward.default, (do, *plain, *options))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_v2_gives_the_gradients_that_are_asked_for(wanted: tuple[int, ...]) -> None:
    case = Case(50, 3, 8, 16, 2)
    blocks = random_blocks(case, SMALL, seed=1)

    def gradients(which: tuple[int, ...]) -> dict[int, Tensor]:
        tensors = [x.requires_grad_(i in which) for i, x in enumerate(qkv(case))]
        o, _ = v2.attend(
            *tensors, blocks, sel_block=SMALL.sel_block, q_start=0, scale=0.25, fa2=None
        )
        o.square().sum().backward()
        return {i: x.grad for i, x in enumerate(tensors) if x.grad is not None}

    every, some = gradients((0, 1, 2)), gradients(wanted)
    assert tuple(some) == wanted and all(torch.equal(some[i], every[i]) for i in wanted)


def test_v2_differentiates_under_a_dispatch_mode_and_refuses_a_second_time() -> None:
    """A mode (a FLOP counter, a memory tracker) cuts the operator's body off from autograd."""
    case = Case(50, 3, 8, 16, 2)
    blocks = random_blocks(case, SMALL, seed=1)

    def gradient(*, create_graph: bool = False) -> Tensor:
        q, k, v = (x.requires_grad_() for x in qkv(case))
        o, _ = v2.attend(
            q, k, v, blocks, sel_block=SMALL.sel_block, q_start=0, scale=0.25, fa2=None
        )
        return torch.autograd.grad(o.square().sum(), q, create_graph=create_graph)[0]

    with FlopCounterMode(display=False):
        counted = gradient()
    assert torch.equal(counted, gradient())
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient(create_graph=True).sum().backward()


def test_a_scale_that_changes_between_calls() -> None:
    """torch.compile makes a number that changes an unknown one: what looks at it must be
    traceable.
    """
    q, k, v = qkv(Case(40, 2, 16, 16, 1))
    gates = torch.full((*q.shape[:3], 3), 0.5)

    def call(scale: float) -> Tensor:
        return nsa_attention(
            q, *[(k, v)] * 3, gates, config=SMALL, scale=scale, path="masked", fa2="off"
        )

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for scale in (0.1, 0.2, 0.3, -0.1):
        torch.testing.assert_close(compiled(scale), call(scale))


@pytest.mark.parametrize("kind", ["interleaved", "half"])
@pytest.mark.parametrize("call", ["whole", "packed", "learned", "dense"])
def test_no_complex_number_is_compiled(call: str, kind: str) -> None:
    """FAULTS.md, RoPE as complex numbers: Inductor warned that it has no code for them."""
    nsa = replace(TINY.nsa, rope=kind, phi="linear" if call == "learned" else "mean")
    config = replace(TINY, num_layers=1, nsa=nsa)
    torch.manual_seed(0)
    model = DenseLM(config) if call == "dense" else TinyLM(config, path="masked", fa2="off")
    options = {"cu_seqlens": torch.tensor([0, 30, 64])} if call == "packed" else {}
    complex_nodes: list[str] = []

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        nodes = [n for n in graph.graph.nodes if isinstance(n.meta.get("val"), Tensor)]
        assert nodes
        complex_nodes.extend(n.name for n in nodes if n.meta["val"].is_complex())
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=look, bw_compiler=look, decompositions=select_decomp_table)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    ids = torch.randint(256, (1, 64), generator=torch.Generator().manual_seed(1))
    got, want = ([f(ids, **options)] for f in (compiled, model))
    for run in (got, want):
        run.extend(torch.autograd.grad(run[0].square().mean(), list(model.parameters())))
    assert complex_nodes == []
    for a, b in zip(got, want, strict=True):
        assert_parity(a, b, f"{call} {kind}")


def test_a_layout_made_outside_serves_a_compiled_layer_and_the_other_way_round() -> None:
    """Its turns are complex outside and real inside."""
    layer, x = layer_of("masked"), randn(1, 40, TINY.dim, seed=1)
    layout = layer.layout(x, dtype=x.dtype)
    inside = torch.compile(layer.layout, fullgraph=True, backend="eager")(x, dtype=x.dtype)
    assert layout.turns.is_complex() and not inside.turns.is_complex()
    compiled, want = torch.compile(layer, fullgraph=True, backend="eager"), layer(x)
    for got in (compiled(x, layout=layout), compiled(x, layout=inside), layer(x, layout=inside)):
        assert_parity(got, want, "y")


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("tokens", [100, 49])
def test_inductor_writes_the_mask_of_the_last_partial_block(tokens: int, dynamic: bool) -> None:
    """FAULTS.md, the kind of a silent miscompile: its loop over S tokens ended at the last whole
    block of l' > 8, and what lay in memory was the mask of the keys beyond.
    """
    case = Case(tokens, 2, 16, 16, 2)
    q, k, v = qkv(case, seed=1)
    blocks = random_blocks(case, SMALL, seed=tokens)
    blocks[:, -20:, :, 0] = tokens // SMALL.sel_block  # the partial block is chosen
    blocks[:, -20:, :, 1:] = -1

    def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> Tensor:
        options = {"sel_block": SMALL.sel_block, "q_start": 0, "scale": 0.25, "fa2": None}
        return masked.attend(q, k, v, blocks, **options)[0]

    with torch.no_grad():
        got = torch.compile(attend, fullgraph=True, dynamic=dynamic)(q, k, v, blocks)
    assert_parity(got, attend(q, k, v, blocks), "o")


def test_the_compiler_is_not_imported_before_it_compiles() -> None:
    """torch._dynamo takes a second, of every process that imports nsa."""
    script = "import sys, nsa.functional, nsa.model; sys.exit('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("kind", ["v1", "reference"])
def test_a_path_that_reads_on_the_host_says_why_no_one_graph_holds_it(kind: str) -> None:
    layer = layer_of(kind)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    wanted = (
        rf"path='{kind}', which reads the chosen blocks on the host; wanted masked, v2 or triton"
    )
    with pytest.raises(torch._dynamo.exc.Unsupported, match=wanted):
        compiled(randn(1, 20, TINY.dim, seed=1))
