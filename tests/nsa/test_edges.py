"""What the public functions refuse, and what must not reach their numbers: each was wrong once."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from nsa import (
    RouteError,
    compressed_attention,
    functional,
    nsa_attention,
    select_blocks,
    selected_attention,
    selection,
    sliding_attention,
)
from nsa.capability import probe
from nsa.ops import flash
from nsa.ops.selected import v2
from nsa.routing import Problem, route
from nsa.settings import Setting, Settings, load
from tests import oracle
from tests.cases import PATHS_HERE, SMALL, here

EVERY_PATH = pytest.mark.parametrize("path", PATHS_HERE)


def tensors(
    tokens: int = 97, keys: int | None = None, heads: int = 4, kv_heads: int = 2
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    sizes = ((tokens, heads), (keys or tokens, kv_heads), (keys or tokens, kv_heads))
    q, k, v = (torch.randn(2, length, count, 16, generator=generator) for length, count in sizes)
    return q, k, v


def whole(
    q: Tensor, k: Tensor, v: Tensor, path: str = "masked", **changes: tuple[Tensor, Tensor]
) -> Tensor:
    pairs = {"kv_cmp": (k, v), "kv_sel": (k, v), "kv_win": (k, v)} | changes
    return nsa_attention(
        q, **pairs, gates=torch.ones(*q.shape[:3], 3), config=SMALL, path=path, fa2="off"
    )


def test_branches_of_different_kv_heads_are_refused() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match="wanted the same for each branch"):
        whole(q, k, v, kv_sel=(k.repeat(1, 1, 2, 1), v.repeat(1, 1, 2, 1)))


def test_empty_calls_are_refused_alike() -> None:
    q, k, v = tensors()
    for call in (
        lambda: sliding_attention(q[:, :0], k, v, window=4),
        lambda: whole(q[:, :0], k, v),
    ):
        with pytest.raises(ValueError, match="at least one query"):
            call()


@pytest.mark.parametrize("q_start", [1.5, -1, "0"])
def test_a_start_that_is_no_position_is_refused(q_start: object) -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match="an int >= 0"):
        sliding_attention(q, k, v, window=4, q_start=q_start)  # type: ignore[arg-type]


def test_sizes_of_no_tokens_are_refused() -> None:
    q, k, v = tensors()
    blocks = select_blocks(q, k[:, :20], config=SMALL)
    with pytest.raises(ValueError, match="sel_block=0"):
        selected_attention(q, k, v, blocks, sel_block=0)
    with pytest.raises(ValueError, match="stride=0"):
        compressed_attention(q, k, v, block=8, stride=0)


def test_strict_asserts_hold_inside_the_layer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors()
    strict = Settings(strict_asserts=Setting(True, "environment"))
    monkeypatch.setattr(functional.settings, "current", lambda: strict)
    whole(q, k, v)
    monkeypatch.setattr(
        selection, "choose", lambda q, k_cmp, **_: torch.full((2, 97, 2, 5), 3, dtype=torch.int32)
    )
    with pytest.raises(ValueError, match="in the future; wanted distinct ids"):
        whole(q, k, v)


def test_autocast_does_not_lower_the_scores() -> None:
    q, k, _ = tensors(tokens=400)
    k_cmp = k[:, :99]
    plain = select_blocks(q, k_cmp, config=SMALL)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        lowered = select_blocks(q, k_cmp, config=SMALL)
    assert torch.equal(plain, lowered)


@EVERY_PATH
def test_what_lies_behind_the_last_query_never_reaches_a_number(path: str) -> None:
    """A cache's unused room holds anything, NaN included."""
    tokens = here(40, 18)
    q, k, v = tensors(tokens=tokens, keys=97)
    dirty_k, dirty_v = k.clone(), v.clone()
    dirty_k[:, tokens:], dirty_v[:, tokens:] = torch.nan, torch.nan
    assert torch.equal(whole(q, k, v, path), whole(q, dirty_k, dirty_v, path))


def test_outputs_keep_the_queries_dtype_whatever_the_gates() -> None:
    q, k, v = (x.to(torch.bfloat16) for x in tensors())
    gates = torch.ones(*q.shape[:3], 3)
    assert nsa_attention(q, (k, v), (k, v), (k, v), gates, config=SMALL).dtype == torch.bfloat16


def test_v2_is_the_same_function_in_one_workspace_and_in_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run() -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in tensors()]
        o = whole(*leaves, path="v2")
        return (o, *torch.autograd.grad(o.square().sum(), leaves))

    one = run()
    monkeypatch.setattr(v2, "WORKSPACE_BYTES", 7 * 5 * 16 * 2 * 16 * 4)  # seven rows
    many = run()
    for a, b in zip(one, many, strict=True):
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-5)


def test_the_environment_asks_fa2_of_what_can_use_it_and_an_argument_insists() -> None:
    here = dataclasses.replace(
        probe("cpu"), device="cuda", sm=(9, 0), fa2_provider="flash_attn 2.8", fa2_reason=""
    )
    by_environment = load({"NSA_USE_FA2": "1"})
    for branches, path in ((("cmp",), "auto"), (("sel",), "masked")):
        problem = Problem(1, 2048, 2048, 12, 2, 64, 64, "bfloat16", branches)
        assert route(by_environment.request(path), problem, here).branches
        with pytest.raises(RouteError, match="fa2=on"):
            route(load({}).request(path, "on"), problem, here)


@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("path", ["auto", "v2", "masked", "v1"])
def test_any_finite_scale_is_the_same_function(path: str, scale: float) -> None:
    """Few tokens, so that auto takes full causal attention: fused kernels scale their mask, too."""
    q, k, v = (x[:, :20] for x in tensors())
    config = dataclasses.replace(SMALL, num_selected=8, window=32)
    gates = torch.full((*q.shape[:3], 3), 0.5)
    o = nsa_attention(q, (k, v), (k, v), (k, v), gates, config=config, scale=scale, path=path)
    want = oracle.nsa(
        q.double() * scale,
        *[(k.double(), v.double())] * 3,
        gates.double(),
        config=config,
        scale=1.0,
    )
    torch.testing.assert_close(o.double(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", [0.0, -0.3, 0.3])
def test_fa2_is_given_a_scale_above_zero(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs a GPU; what it is asked for is the same product of scale and queries."""
    asked: list[tuple[Tensor, float]] = []

    def varlen_attn(
        q: Tensor, *_: object, scale: float, enable_gqa: bool = False, **__: object
    ) -> Tensor:
        asked.append((q, scale))
        return q

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    q, k, v = (x[0] for x in tensors())
    bounds = torch.tensor([0, 97], dtype=torch.int32)
    flash.varlen("torch.varlen", q, k, v, bounds, bounds, 97, 97, scale=scale)
    ((given, factor),) = asked
    assert factor > 0
    torch.testing.assert_close(given * factor, q * scale)
