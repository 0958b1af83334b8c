"""phi = mean of K and V by one kernel, in Triton's interpreter (`--require interpreter`): every
grid, layout and end of a sequence.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import NSAAttention, NSAConfig, nsa_attention
from nsa.ops import means
from nsa.ops.means import kernels
from tests import oracle
from tests.cases import assert_same_function, randn
from tests.nsa.kernel_cases import poisoned_memory  # noqa: F401


@pytest.mark.parametrize(("block", "stride"), [(32, 16), (8, 8), (12, 4), (5, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("beyond", [0, 1, 150])
def test_means_of_keys_and_values(block: int, stride: int, beyond: int) -> None:
    """As many tokens as one block has, one more, and many with a rest that no block holds; K and V
    of other widths.
    """
    k, v = randn(2, block + beyond, 3, 20, seed=0), randn(2, block + beyond, 3, 33, seed=1)
    for which in (0, 1):
        assert_same_function(
            lambda *x, which=which: means.means(*x, block=block, stride=stride)[which],
            lambda *x, which=which: (
                oracle.compress_mean(x[which], block, stride) + 0 * x[1 - which].sum()
            ),
            (k, v),
            ("k", "v"),
        )


def test_both_have_their_gradient_at_once() -> None:
    k, v = (randn(1, 40, 2, 16, seed=i).requires_grad_() for i in (0, 1))
    a, b = means.means(k, v, block=8, stride=4)
    do = randn(*a.shape, seed=2), randn(*b.shape, seed=3)
    wanted = [oracle.compress_mean(x.double(), 8, 4) for x in (k, v)]
    got = torch.autograd.grad((a, b), (k, v), do)
    for x, want in zip(
        got, torch.autograd.grad(wanted, (k, v), [x.double() for x in do]), strict=True
    ):
        torch.testing.assert_close(x, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["a slice of a projection", "room beyond the end", "transposed"])
def test_layouts_of_inputs(kind: str) -> None:
    """Inputs of any strides give the same result; memory beyond them is not read."""

    def laid_out(x: Tensor) -> Tensor:
        if kind == "a slice of a projection":
            whole = x.new_full((*x.shape[:2], 3 * x.shape[2], x.shape[3]), torch.nan)
            return whole[:, :, 2:4].copy_(x)
        if kind == "room beyond the end":
            return x.new_full((x.shape[0], 90, *x.shape[2:]), torch.nan)[:, : x.shape[1]].copy_(x)
        return x.transpose(2, 3).contiguous().transpose(2, 3)

    plain = [randn(2, 45, 2, 16, seed=i) for i in (0, 1)]
    for a, b in zip(
        kernels.forward(*plain, block=8, stride=4),
        kernels.forward(*map(laid_out, plain), block=8, stride=4),
        strict=True,
    ):
        assert torch.equal(a, b)


CONFIG = NSAConfig(cmp_block=8, cmp_stride=4, sel_block=8, num_selected=4, window=16)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran: "forward" and "backward" of the kernel."""
    seen: list[str] = []

    def watched(name: str) -> Any:
        was = getattr(kernels, name)

        def called(*given: Any, **options: Any) -> Any:
            seen.append(name)
            return was(*given, **options)

        return called

    for name in ("forward", "backward"):
        monkeypatch.setattr(kernels, name, watched(name))
    return seen


@pytest.mark.parametrize(
    ("path", "wanted"), [("triton", ["forward", "backward"]), ("v2", []), ("masked", [])]
)
def test_path_triton_alone_takes_it(path: str, wanted: list[str], calls: list[str]) -> None:
    torch.manual_seed(0)
    layer = NSAAttention(32, 4, 2, 16, config=CONFIG, path=path)
    layer(randn(1, 70, 32, seed=0)).sum().backward()
    assert calls == wanted
    x = [randn(1, 70, n, 16, seed=i) for i, n in enumerate((4, 2, 2))]
    nsa_attention(
        x[0], *[(x[1], x[2])] * 3, randn(1, 70, 4, 3, seed=9).sigmoid(), config=CONFIG, path=path
    )
    assert calls == wanted + wanted[:1]


def test_fewer_tokens_than_a_block_have_no_mean(calls: list[str]) -> None:
    x = [randn(1, 7, n, 16, seed=i) for i, n in enumerate((4, 2, 2))]
    nsa_attention(
        x[0], *[(x[1], x[2])] * 3, randn(1, 7, 4, 3, seed=9).sigmoid(), config=CONFIG, path="triton"
    )
    assert not calls


def test_params_of_a_mean_are_refused_all_the_same(calls: list[str]) -> None:
    x = [randn(1, 70, n, 16, seed=i) for i, n in enumerate((4, 2, 2))]
    gates, params = randn(1, 70, 4, 3, seed=9).sigmoid(), ({"weight": randn(16, 128, seed=3)}, None)
    with pytest.raises(ValueError, match="phi='mean' got params"):
        nsa_attention(
            x[0], *[(x[1], x[2])] * 3, gates, config=CONFIG, path="triton", phi_params=params
        )
    assert not calls
