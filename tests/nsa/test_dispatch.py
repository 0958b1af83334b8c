"""The one door: full causal attention where `auto` may take it, the same numbers there, and NVTX
marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import nsa
from nsa import capability, dispatch, engagement, selection, settings, statistics
from nsa.attention import NSAAttention
from nsa.config import NSAConfig, preset
from nsa.decode import NSACache
from nsa.ops.selected import PATHS
from nsa.routing import BranchRoute, Path, Request, Route, plan
from tests.cases import PATHS_HERE, SMALL, assert_parity, randn

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = preset("tiny")
# 80 tokens: the last length at which every block has a slot
ALL = SMALL.num_selected * SMALL.sel_block


def inputs(
    tokens: int, *, batch: int = 2, dims: tuple[int, int] = (16, 24), seed: int = 0
) -> dict[str, Tensor]:
    DK, DV = dims
    named = {
        f"{kind}_{b}": randn(batch, tokens, 2, D, seed=seed + i)
        for i, b in enumerate(("cmp", "sel", "win"))
        for kind, D in (("k", DK), ("v", DV))
    }
    return {
        "q": randn(batch, tokens, 6, DK, seed=seed + 9),
        "gates": randn(batch, tokens, 6, 3, seed=seed + 10).sigmoid(),
        **named,
    }


def attend(x: dict[str, Tensor], path: str, *, config: NSAConfig = SMALL, **options: Any) -> Tensor:
    pairs = [(x[f"k_{b}"], x[f"v_{b}"]) for b in ("cmp", "sel", "win")]
    return nsa.nsa_attention(x["q"], *pairs, x["gates"], config=config, path=path, **options)


def engaged_by(x: dict[str, Tensor], path: str = "auto", **options: Any) -> set[str]:
    """The counters of one call, without those of the kernel that all of them share here."""
    with engagement.collect() as engaged:
        attend(x, path, **options)
    return set(engaged.counts) - {"cmp.sdpa", "sel.sdpa", "win.sdpa"}


def grads(x: dict[str, Tensor], path: str, config: NSAConfig) -> tuple[Tensor, list[Tensor]]:
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in x.items()}
    o = attend(leaves, path, config=config)
    upstream = randn(*o.shape, seed=77)
    return o.detach(), list(
        torch.autograd.grad(
            o, list(leaves.values()), upstream, allow_unused=True, materialize_grads=True
        )
    )


@pytest.mark.parametrize(
    ("tokens", "taken"),
    [
        (1, {"sel.dense", "win.dense"}),
        (24, {"sel.dense", "win.dense"}),
        (25, {"sel.dense"}),
        (80, {"sel.dense"}),
        (81, {"sel.masked"}),
    ],
)
def test_auto_equals_masked_where_it_is_full_causal_attention(tokens: int, taken: set[str]) -> None:
    """Output and the gradient of every input, each branch's K and V among them."""
    x = inputs(tokens)
    assert engaged_by(x) == taken
    (got, got_grads), (want, want_grads) = (grads(x, path, SMALL) for path in ("auto", "masked"))
    assert_parity(got, want, "o")
    for name, a, b in zip(x, got_grads, want_grads, strict=True):
        assert_parity(a, b, f"d{name}")


def test_a_window_beyond_the_slots_is_full_causal_alone() -> None:
    x, config = inputs(100), replace(SMALL, window=100)
    assert engaged_by(x, config=config) == {"sel.masked", "win.dense"}
    assert_parity(attend(x, "auto", config=config), attend(x, "masked", config=config), "o")


@pytest.mark.parametrize("path", [*PATHS_HERE, "adaptive"])
def test_a_path_by_name_is_that_path(path: str) -> None:
    assert not {"sel.dense", "win.dense"} & engaged_by(inputs(20), path)


@pytest.mark.parametrize("path", list(Path))
def test_the_registry_is_the_only_way_to_a_path(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault planted there is seen, whatever the path; no kernel has to run for it."""

    class Planted(Exception): ...

    def planted(*x: Any, **options: Any) -> Any:
        raise Planted

    for entry in Path:
        monkeypatch.setitem(PATHS, entry, planted)  # type: ignore[arg-type]
    route = Route((BranchRoute("sel", path.value, "any", "any", "by name"),))
    q, k, v = randn(1, 4, 2, 8, seed=0), randn(1, 4, 1, 8, seed=1), randn(1, 4, 1, 8, seed=2)
    blocks = torch.zeros(1, 4, 1, 1, dtype=torch.int32)
    with pytest.raises(Planted):
        dispatch.selected(route, q, k, v, blocks, sel_block=16, q_start=0, scale=1.0)


def test_only_whole_sequences_take_it() -> None:
    """A chunk, rows that begin at different positions, and packed documents do not, however short
    they are.
    """
    x = inputs(40, batch=1)
    later = {
        name: tensor[:, 20:] if name in ("q", "gates") else tensor for name, tensor in x.items()
    }
    assert engaged_by(later, q_start=20) == {"sel.masked"}
    assert engaged_by(later, q_start=torch.tensor([20])) == {"sel.masked"}
    assert engaged_by(x, q_start=torch.tensor([0])) == {"sel.masked"}
    assert engaged_by(x, cu_seqlens=torch.tensor([0, 40])) == {"sel.masked"}
    assert_parity(
        attend(later, "auto", q_start=20), attend(x, "auto")[:, 20:], "the chunk of the whole"
    )


def test_a_cache_never_takes_it_and_counts_its_keys() -> None:
    """Prefill, chunks and decode are one function of cache and chunk, so they take one Route."""
    layer = NSAAttention(TINY.dim, TINY.num_heads, TINY.num_kv_heads, TINY.head_dim, None, TINY.nsa)
    x = randn(1, 20, TINY.dim, seed=1)
    for splits in ([20], [12, 8], [1] * 20):
        cache, parts = layer.new_cache(1, 20), []
        with torch.no_grad(), engagement.collect() as engaged:
            for part in x.split(splits, 1):
                parts.append(layer(part, cache=cache))
        assert not {"sel.dense", "win.dense"} & set(engaged.counts)
        assert cache.keys_read["sel"][0, -1].tolist() == [20, 20]
        with torch.no_grad(), engagement.collect() as engaged:
            assert_parity(torch.cat(parts, 1), layer(x), f"splits {splits}")
        assert {"sel.dense", "win.dense"} <= set(engaged.counts)


def test_the_plan_is_what_runs() -> None:
    layer = NSAAttention(TINY.dim, TINY.num_heads, TINY.num_kv_heads, TINY.head_dim, None, TINY.nsa)
    for tokens in (1, 24, 25, 80, 81):
        with engagement.collect() as engaged:
            layer(randn(1, tokens, TINY.dim, seed=2))
        assert set(engaged.counts) == set(
            plan(
                Request(),
                TINY,
                batch=1,
                tokens=tokens,
                dtype="float32",
                capability=capability.probe("cpu"),
            ).counters
        )


def test_blocks_are_chosen_only_for_those_who_look(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    choose = selection.choose
    monkeypatch.setattr(
        selection, "choose", lambda *x, **options: calls.append(1) or choose(*x, **options)
    )
    x = inputs(ALL)
    attend(x, "auto")
    assert calls == []
    with statistics.collect() as seen:
        attend(x, "auto")
    assert calls == [1] and seen.read().rows == 2 * ALL * 2 and seen.read().tokens_max == ALL
    monkeypatch.setattr(settings, "current", lambda: settings.load({"NSA_STRICT_ASSERTS": "1"}))
    attend(x, "auto")
    assert calls == [1, 1]


# Inside a compiled region lengths are unknown: test_compile.py.


# The adaptive number of blocks goes by the length of a call.

ADAPTIVE = replace(SMALL, adaptive_num_selected=True)


def test_adaptive_n_is_for_whole_sequences() -> None:
    """Decode would choose 8 blocks where a call over 1,300 tokens chooses 16; so would a short
    document next to a long one.
    """
    x = inputs(40, batch=1)
    attend(x, "auto", config=ADAPTIVE)
    later = {
        name: tensor[:, 20:] if name in ("q", "gates") else tensor for name, tensor in x.items()
    }
    for call in (
        lambda: attend(x, "auto", config=ADAPTIVE, cu_seqlens=torch.tensor([0, 20, 40])),
        lambda: attend(later, "auto", config=ADAPTIVE, q_start=20),
        lambda: attend(x, "auto", config=ADAPTIVE, q_start=torch.tensor([0])),
        lambda: NSACache.empty(ADAPTIVE, 1, 512, num_kv_heads=2, head_dim=16),
    ):
        with pytest.raises(
            ValueError,
            match=(
                r"got config\.adaptive_num_selected=True with .*; wanted whole .*; set"
                r" adaptive_num_selected=False"
            ),
        ):
            call()


def test_a_cache_of_another_config_does_not_slip_through() -> None:
    layer = NSAAttention(
        TINY.dim,
        TINY.num_heads,
        TINY.num_kv_heads,
        TINY.head_dim,
        None,
        replace(TINY.nsa, adaptive_num_selected=True),
    )
    cache = NSACache.empty(TINY.nsa, 1, 64, num_kv_heads=TINY.num_kv_heads, head_dim=TINY.head_dim)
    with torch.no_grad(), pytest.raises(ValueError, match="adaptive_num_selected"):
        layer(randn(1, 8, TINY.dim, seed=4), cache=cache)
    with pytest.raises(ValueError, match="adaptive_num_selected"):
        layer(randn(1, 8, TINY.dim, seed=4), cu_seqlens=torch.tensor([0, 3, 8]))


# NVTX.


@pytest.fixture
def ranges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What torch.cuda.nvtx.range was entered and left with, on a CPU that is taken for a GPU."""
    log: list[str] = []

    @contextmanager
    def recorded(name: str) -> Iterator[None]:
        log.append(f"+{name}")
        yield
        log.append(f"-{name}")

    monkeypatch.setattr(torch.cuda.nvtx, "range", recorded)
    monkeypatch.setattr(dispatch, "_on_cuda", lambda x: True)
    monkeypatch.setattr(settings, "current", lambda: settings.load({"NSA_NVTX": "1"}))
    return log


def test_every_branch_is_marked_by_its_counter(ranges: list[str]) -> None:
    attend(inputs(81), "v2")
    assert ranges == ["+cmp.sdpa", "-cmp.sdpa", "+sel.v2", "-sel.v2", "+win.sdpa", "-win.sdpa"]
    ranges.clear()
    attend(inputs(20), "auto")
    assert ranges == [
        "+cmp.sdpa",
        "-cmp.sdpa",
        "+sel.dense",
        "-sel.dense",
        "+win.dense",
        "-win.dense",
    ]


def test_marks_lie_around_the_work(ranges: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    causal = dispatch.sdpa.causal
    monkeypatch.setattr(
        dispatch.sdpa,
        "causal",
        lambda *x, **options: ranges.append("work") or causal(*x, **options),
    )
    attend(inputs(20), "auto")
    assert ranges[2:5] == ["+sel.dense", "work", "-sel.dense"]


@pytest.mark.parametrize("why", ["not set", "a CPU", "compiling"])
def test_nothing_is_marked_otherwise(
    ranges: list[str], monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    if why == "not set":
        monkeypatch.setattr(settings, "current", lambda: settings.load({}))
    if why == "a CPU":
        monkeypatch.setattr(dispatch, "_on_cuda", lambda x: x.is_cuda)
    if why == "compiling":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    branch = plan(
        Request("v2", "off"),
        TINY,
        batch=1,
        tokens=20,
        dtype="float32",
        capability=capability.probe("cpu"),
    ).branch("sel")
    with dispatch._marked(branch, torch.ones(1)):
        pass
    assert ranges == []
