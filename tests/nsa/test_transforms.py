"""FAULTS 'function transforms': `torch.func` on every path. Reverse mode equals `.backward()`, vmap
equals a loop or says what to do, a second derivative and forward mode are refused by name.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, grad_and_value, jacfwd, jacrev, jvp, vmap

from nsa import NSAAttention, compressed_attention, nsa_attention, sliding_attention
from nsa.routing import Path
from tests.cases import PATHS_HERE, SMALL, Case, assert_parity, here, leaves, qkv, randn

EVERY_PATH = pytest.mark.parametrize("path", PATHS_HERE)
CASE = Case(here(100, 40), 2, 16, 16, 1)
TWICE, FORWARD = "differentiate twice", "forward-mode AD"

pytestmark = pytest.mark.usefixtures("one_thread")


def inputs() -> tuple[Tensor, ...]:
    q, k, v = qkv(CASE)
    return q, k, v, randn(*q.shape[:3], 3, seed=3).sigmoid()


def attention(path: str, *, joined: bool = False) -> Callable[..., Tensor]:
    return lambda q, k, v, g: nsa_attention(
        q,
        (k, v),
        (k, v),
        (k, v),
        g,
        config=SMALL,
        path=path,
        fa2="off",
        nonnegative_gates=joined,
    )


def loss_of(path: str, *, joined: bool = False) -> Callable[..., Tensor]:
    return lambda *tensors: attention(path, joined=joined)(*tensors).square().sum()


def layer(path: str) -> NSAAttention:
    torch.manual_seed(0)
    return NSAAttention(32, 4, 2, 16, None, SMALL, path=path, fa2="off")


def assert_gradients(got: tuple[Tensor, ...], want: tuple[Tensor | None, ...]) -> None:
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert b is not None
        assert b.abs().max() > 0
        assert_parity(a, b, f"gradient {i}")


@EVERY_PATH
@pytest.mark.parametrize("joined", [False, True])
def test_grad_is_backward(path: Path, joined: bool) -> None:
    tensors, loss = inputs(), loss_of(path, joined=joined)
    held = leaves(tensors)
    value = loss(*held)
    value.backward()
    want = tuple(x.grad for x in held)
    assert_gradients(grad(loss, argnums=(0, 1, 2, 3))(*tensors), want)
    got, at = grad_and_value(loss, argnums=(0, 1, 2, 3))(*tensors)
    assert_gradients(got, want)
    assert_parity(at, value.detach(), "value")
    assert_gradients(jacrev(loss, argnums=(0, 1, 2, 3))(*tensors), want)


@EVERY_PATH
def test_grad_of_a_layers_parameters_is_backward(path: Path) -> None:
    model, x = layer(path), randn(1, CASE.tokens, 32, seed=5)
    parameters = dict(model.named_parameters())
    model(x).square().sum().backward()
    want = {name: p.grad for name, p in parameters.items()}
    got = grad(lambda p: functional_call(model, p, (x,)).square().sum())(
        {name: p.detach() for name, p in parameters.items()}
    )
    assert_gradients(tuple(got.values()), tuple(want[name] for name in got))


@EVERY_PATH
@pytest.mark.parametrize("mapped", [(0, 0, 0, 0), (0, None, None, None), (None, 1, None, None)])
def test_vmap_is_a_loop_or_says_what_to_do(path: Path, mapped: tuple[int | None, ...]) -> None:
    many = [
        x if d is None else torch.stack([x, x.flip(1)], d)
        for x, d in zip(inputs(), mapped, strict=True)
    ]
    each = [
        [x if d is None else x.select(d, i) for x, d in zip(many, mapped, strict=True)]
        for i in range(2)
    ]
    f, per_sample = attention(path), grad(loss_of(path))
    if path in (Path.REFERENCE, Path.V1):
        for function in (f, per_sample):
            with pytest.raises(ValueError, match=r"got vmap over path.*wanted.*fold"):
                vmap(function, mapped)(*many)
        return
    assert_parity(vmap(f, mapped)(*many), torch.stack([f(*x) for x in each]), "o")
    want = torch.stack([per_sample(*x) for x in each])
    assert_parity(vmap(per_sample, mapped)(*many), want, "gradients a sample")


@EVERY_PATH
@pytest.mark.parametrize("joined", [False, True])
def test_a_second_derivative_is_refused(path: Path, joined: bool) -> None:
    tensors, loss = inputs(), loss_of(path, joined=joined)
    for i in range(4):
        held = leaves(tensors)
        (first,) = torch.autograd.grad(loss(*held), held[i], create_graph=True)
        with pytest.raises(RuntimeError, match=TWICE):
            torch.autograd.grad(first.square().sum(), held, retain_graph=True)
        with pytest.raises(RuntimeError, match=TWICE):
            first.square().sum().backward()
    with pytest.raises(RuntimeError, match=TWICE):
        grad(lambda q: grad(loss)(q, *tensors[1:]).square().sum())(tensors[0])
    with pytest.raises(RuntimeError, match=f"{TWICE}|{FORWARD}"):
        jacfwd(lambda q: grad(loss)(q, *tensors[1:]).sum())(tensors[0])


@EVERY_PATH
def test_forward_mode_is_refused(path: Path) -> None:
    tensors = inputs()
    for i in range(4):
        others = list(tensors)

        def f(x: Tensor, i: int = i, others: list[Tensor] = others) -> Tensor:
            return attention(path)(*others[:i], x, *others[i + 1 :])

        with pytest.raises(RuntimeError, match=FORWARD):
            jvp(f, (tensors[i],), (tensors[i],))
        with forward_ad.dual_level(), pytest.raises(RuntimeError, match=FORWARD):
            f(forward_ad.make_dual(tensors[i], tensors[i]))
    with pytest.raises(RuntimeError, match=FORWARD):
        jacfwd(lambda q: attention(path)(q, *tensors[1:])[0, 0, 0, :2])(tensors[0])


def test_a_branch_alone_and_a_layer_refuse_the_same() -> None:
    q, k, v, _ = inputs()
    for f in (
        lambda q: compressed_attention(q, k[:, :9], v[:, :9], block=8, stride=4)[0],
        lambda q: sliding_attention(q, k, v, window=24, fa2="off"),
    ):
        with pytest.raises(RuntimeError, match=FORWARD):
            jvp(f, (q,), (q,))
        with pytest.raises(RuntimeError, match=TWICE):
            grad(lambda q, f=f: grad(lambda q: f(q).square().sum())(q).sum())(q)
    model, x = layer("auto"), randn(1, CASE.tokens, 32, seed=5)
    with pytest.raises(RuntimeError, match=FORWARD):
        jvp(model, (x,), (x,))


def test_a_penalty_on_the_rest_of_a_model_may_create_a_graph() -> None:
    """Only what goes through the attention a second time is refused."""
    model, head = layer("masked"), nn.Linear(32, 1)
    x = randn(1, 40, 32, seed=5)
    y = model(x).detach().requires_grad_()
    out = head(y).square().sum() + model(x).sum()
    (slope,) = torch.autograd.grad(out, y, create_graph=True)
    slope.square().sum().backward()
    assert head.weight.grad is not None
