"""A learned phi of K and V by kernels, in Triton's interpreter (`--require interpreter`): values,
every gradient, grids, layouts, ends of a sequence, and who takes them.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAAttention, NSAConfig, nsa_attention
from nsa.ops.learned_phi import backward, backward_hidden_kernels, forward_kernels
from tests.cases import assert_same_function, leaves, randn, run
from tests.nsa.kernel_cases import poisoned_memory  # noqa: F401
from tests.nsa.phi_cases import (
    LEARNED,
    NAMES,
    Shape,
    both,
    by_kernel,
    by_oracle,
    tensors_of,
)
from tests.perfbench.jobs import TINY, job
from tests.perfbench.test_operator_calls import step_of


@pytest.mark.parametrize("phi", LEARNED)
@pytest.mark.parametrize(
    ("grid", "shape", "hidden"),
    [
        ((32, 16), (1, 32, 1, 16, 16), None),
        ((32, 16), (2, 95, 2, 20, 33), (24, 70)),
        ((4, 4), (1, 90, 3, 16, 16), (130, 17)),
        ((12, 4), (2, 41, 1, 9, 5), None),
        ((3, 1), (1, 70, 2, 20, 16), None),
        ((1, 1), (1, 5, 1, 16, 8), None),
        ((4, 2), (1, 9, 1, 144, 20), None),
    ],
    ids=str,
)
def test_equals_the_oracle(
    phi: str, grid: tuple[int, int], shape: Shape, hidden: tuple[int, int] | None
) -> None:
    """One block alone and a rest that no block holds; K and V of other widths, and of more than a
    tile of features.
    """
    tensors = tensors_of(phi, shape, grid[0], hidden=hidden)
    found, wanted = both(by_kernel(phi, *grid)), both(by_oracle(phi, *grid))
    assert_same_function(found, wanted, tensors, NAMES[phi])


@pytest.mark.parametrize("phi", LEARNED)
def test_sums_of_parts_of_many_rows(phi: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranges of rows end inside a tile and inside a sequence."""
    monkeypatch.setattr(backward_hidden_kernels, "MOST_PARTS", 3)
    tensors = tensors_of(phi, (3, 90, 2, 4, 4), 4)
    found, wanted = both(by_kernel(phi, 4, 2)), both(by_oracle(phi, 4, 2))
    assert_same_function(found, wanted, tensors, NAMES[phi])


@pytest.mark.parametrize("phi", LEARNED)
def test_half_precision(phi: str) -> None:
    """Sums of 64 products are rounded once: the error is that of the result's own rounding, and of
    the hidden layer's.
    """
    tensors = tensors_of(phi, (1, 30, 2, 16, 16), 4, dtype=torch.float16)
    o, grads = run(both(by_kernel(phi, 4, 2)), tensors)
    true_o, true_grads = run(both(by_oracle(phi, 4, 2)), tensors, dtype=torch.float64)
    for got, want in zip((o, *grads), (true_o, *true_grads), strict=True):
        assert got.dtype == torch.float16
        assert (got - want).abs().max() <= 2**-9 * want.abs().max()


@pytest.mark.parametrize("phi", LEARNED)
def test_repeats_its_bits_in_any_layout(phi: str) -> None:
    """Slices of a projection, with NaN beside and beyond them, have the bits of dense tensors."""
    tensors = tensors_of(phi, (2, 45, 2, 16, 16), 8, dtype=torch.float16)

    def both_ways(x: list[Tensor]) -> list[Tensor]:
        o, grads = run(both(by_kernel(phi, 8, 4)), x)
        return [o, *grads]

    def laid_out(x: Tensor) -> Tensor:
        whole = x.new_full((x.shape[0], 90, 3 * x.shape[2], x.shape[3]), torch.nan)
        return whole[:, : x.shape[1], 2:4].copy_(x)

    plain = both_ways(tensors)
    strided = both_ways([*map(laid_out, tensors[:2]), *(x.T.contiguous().T for x in tensors[2:])])
    assert all(torch.equal(a, b) for a, b in zip(plain, strided, strict=True))


T = 14
CONFIG = NSAConfig(
    cmp_block=4,
    cmp_stride=2,
    sel_block=4,
    num_selected=3,
    num_initial=1,
    num_local=1,
    window=5,
    phi="mlp",
    phi_hidden=9,
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran: "forward" and "backward" of the kernels."""
    seen: list[str] = []

    def watched(module: ModuleType, name: str) -> Any:
        was = getattr(module, name)

        def called(*given: Any, **options: Any) -> Any:
            seen.append(name)
            return was(*given, **options)

        return called

    for module, name in ((forward_kernels, "forward"), (backward, "backward")):
        monkeypatch.setattr(module, name, watched(module, name))
    return seen


@pytest.mark.parametrize("options", [{}, {"cu_seqlens": torch.tensor([0, 5, 8, 13])}], ids=len)
def test_layers_of_path_triton_take_it(options: dict[str, Any], calls: list[str]) -> None:
    """And differ from a path by formulas by rounding alone."""
    found = []
    for path in ("triton", "masked"):
        torch.manual_seed(0)
        layer = NSAAttention(16, 2, 1, 8, 12, config=CONFIG, path=path)
        y = layer(randn(1, T, 16, seed=0), **options)
        y.backward(randn(*y.shape, seed=1))
        found.append([y, *(p.grad for p in layer.parameters())])
    assert calls == ["forward", "backward"]
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


OTHERS = {
    "linear": replace(CONFIG, phi="linear", phi_hidden=None),
    "mean": replace(CONFIG, phi="mean", phi_hidden=None),
    "wide": replace(CONFIG, phi_hidden=257),
    "no block": replace(CONFIG, cmp_block=16, cmp_stride=8, sel_block=16),
    "no cmp": replace(CONFIG, branches=("sel", "win")),
}


@pytest.mark.parametrize(("name", "path"), [*((n, "triton") for n in OTHERS), ("linear", "masked")])
def test_who_takes_it(
    name: str, path: str, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: lambda *x, **o: None)
    config = OTHERS[name]
    layer = NSAAttention(16, 2, 1, 8, config=config, path=path)
    with torch.no_grad():
        layer(randn(1, T, 16, seed=0))
    taken = (name, path) == ("linear", "triton")
    assert calls == ["forward"] * taken
    route = layer._route(randn(1, T, 2, 8, seed=0), T)
    if route.has("cmp") and path == "triton":
        assert ("phi=" in route.branch("cmp").reason) == (name != "mean")


@pytest.mark.parametrize(("phi", "kind"), [("linear", "train"), ("mlp", "chunked_prefill")])
def test_perfbench_expects_it(phi: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step exactly, and none of steps through a cache, which go by the formula."""
    from triton.runtime.interpreter import InterpretedFunction

    monkeypatch.setattr(InterpretedFunction, "__getitem__", lambda self, grid: lambda *x, **o: None)
    asked = job("triton", kind, 64)
    model = replace(TINY, nsa=replace(TINY.nsa, phi=phi)).to_mapping()
    axes = replace(asked.axes, chunk=32) if kind == "chunked_prefill" else asked.axes
    seen, fault = step_of(asked.model_copy(update={"model": model, "axes": axes}))
    wanted = {f"nsa::phi_{phi}", f"nsa::phi_{phi}_backward"} if kind == "train" else set()
    assert not fault and {name for name in seen if "phi" in name} == wanted


def params_of(x: Tensor, config: NSAConfig, seed: int) -> dict[str, Tensor]:
    from nsa.compression import param_shapes

    shapes = param_shapes(config, x.shape[3])
    return {n: randn(*s, seed=seed + i) * 0.1 for i, (n, s) in enumerate(shapes.items())}


def test_autocast_and_weights_of_another_dtype(calls: list[str]) -> None:
    """Weights are cast to the tokens' dtype; tokens that autocast would cast go by the formula."""
    q, k, v = (randn(1, T, n, 8, seed=i) for i, n in enumerate((2, 1, 1)))
    params = tuple(params_of(x, CONFIG, 20 * i) for i, x in enumerate((k, v)))
    gates = randn(1, T, 2, 3, seed=9).sigmoid()

    def attended(*x: Tensor) -> Tensor:
        q, k, v = x
        options: dict[str, Any] = {"config": CONFIG, "path": "triton", "phi_params": params}
        return nsa_attention(q, *[(k, v)] * 3, gates.to(q.dtype), **options)

    want = attended(q, k, v)
    half = attended(*(x.half() for x in (q, k, v)))
    assert calls == ["forward"] * 2
    with torch.autocast("cpu", torch.float16):
        same = attended(*(x.half() for x in (q, k, v)))
        assert calls == ["forward"] * 3 and torch.equal(half, same)
        attended(q, k, v)
    assert calls == ["forward"] * 3
    torch.testing.assert_close(half.float(), want, rtol=2e-2, atol=2e-2)


def test_a_second_derivative_is_refused() -> None:
    k, v, *params = leaves(tensors_of("mlp", (1, 20, 1, 4, 4), 8))
    o = both(by_kernel("mlp", 8, 4))(k, v, *params)
    (first,) = torch.autograd.grad(o.square().sum(), params[0], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        first.sum().backward()


def test_params_that_do_not_fit_are_refused_before_anything_runs(calls: list[str]) -> None:
    q, k, v = (randn(1, 40, n, 16, seed=i) for i, n in enumerate((4, 2, 2)))
    gates, params = randn(1, 40, 4, 3, seed=9), params_of(k, CONFIG, 0)
    options: dict[str, Any] = {"config": CONFIG, "path": "triton"}
    with pytest.raises(ValueError, match="phi='mlp' got params"):
        nsa_attention(
            q, *[(k, v)] * 3, gates, phi_params=(params, {**params, "up": k[0, 0]}), **options
        )
    with pytest.raises(ValueError, match="phi='mlp' got no params"):
        nsa_attention(q, *[(k, v)] * 3, gates, **options)
    assert not calls
