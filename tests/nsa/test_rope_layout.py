"""What the layers of one forward share: RoPE's turns and the layout are made once, and equal what
each layer would make.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import nsa.shared_positions
from nsa.attention import NSAAttention
from nsa.config import NSAConfig, preset
from nsa.documents import Packing
from nsa.model import DenseLM, TinyLM
from nsa.rope import angles, rotate, turns
from nsa.shared_positions import Layout
from tests import oracle
from tests.cases import assert_parity, randn

TINY = replace(preset("tiny"), num_layers=3)
CU = torch.tensor([0, 1, 41, 41, 97])
IDS = torch.randint(256, (2, 100), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", ["interleaved", "half"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_turns_rotate_as_angles_do(kind: str, dtype: torch.dtype) -> None:
    """Against the oracle, whose angles are fp64 (ours are fp32: 2^-24 of 2,048 radians is 1.2e-4),
    for a q that is a view.
    """
    position = torch.tensor([[0, 3, 1, 700, 4096], [2, 2, 9, 5, 11]])
    theta = angles(position, 12, base=1e4, scale=0.5)
    x = randn(2, 5, 4, 24, seed=1, dtype=dtype)[..., 6:18]
    got = rotate(x, turns(theta, dtype), kind=kind)
    assert (
        got.dtype == dtype
        and got.shape == x.shape
        and torch.equal(got, rotate(x, theta, kind=kind))
    )
    for row in range(2):
        want = oracle.rope(x[row : row + 1].double(), position[row], scale=0.5, kind=kind)
        assert_parity(
            got[row : row + 1].double(),
            want,
            kind,
            tolerance=2**-8 if dtype == torch.bfloat16 else 5e-4,
        )


@pytest.mark.parametrize("kind", ["interleaved", "half"])
def test_compiled_rope_is_the_same_rotation(kind: str) -> None:
    """Inductor does not fuse complex numbers, so that inside torch.compile the products are written
    out.
    """
    torch._dynamo.reset()
    x, by = (
        randn(2, 9, 3, 8, seed=2).requires_grad_(),
        turns(angles(torch.arange(9)[None], 8, base=1e4, scale=1.0), torch.float32),
    )
    o, compiled = (
        rotate(x, by, kind=kind),
        torch.compile(rotate, fullgraph=True, backend="eager")(x, by, kind=kind),
    )
    assert_parity(compiled, o, "o", tolerance=1e-6)
    upstream = randn(*x.shape, seed=3)
    (grad,), (compiled_grad,) = (torch.autograd.grad(y, x, upstream) for y in (o, compiled))
    assert_parity(compiled_grad, grad, "dx", tolerance=1e-6)
    torch._dynamo.reset()


def count(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    made = {"turns": 0, "packings": 0}
    of = Packing.of

    def counted_turns(theta: Tensor, dtype: torch.dtype) -> Tensor:
        made["turns"] += 1
        return turns(theta, dtype)

    def counted_packing(*args: object) -> Packing:
        made["packings"] += 1
        return of(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(nsa.shared_positions, "turns", counted_turns)
    monkeypatch.setattr(Packing, "of", counted_packing)
    return made


@pytest.mark.parametrize("checkpoint", [None, (0, 3)])
def test_a_model_makes_turns_and_packing_once_a_forward(
    monkeypatch: pytest.MonkeyPatch, checkpoint: tuple[int, int] | None
) -> None:
    """Three layers, and their recomputation in the backward, share one layout."""
    torch.manual_seed(0)
    model, made = TinyLM(replace(TINY, checkpoint_layers=checkpoint), fa2="off"), count(monkeypatch)
    model(IDS[:1], cu_seqlens=CU).sum().backward()
    assert made == {"turns": 1, "packings": 1}
    with torch.no_grad():
        model(IDS[:, :50], cache=model.new_cache(2, 100), num_tokens=[50, 7])
        DenseLM(TINY)(IDS)
    assert made == {"turns": 3, "packings": 1}


@pytest.mark.parametrize("rope", ["interleaved", "half"])
def test_a_layer_alone_makes_the_same_layout(rope: str) -> None:
    torch.manual_seed(0)
    config = replace(TINY.nsa, rope=rope, cmp_rope="after")
    layer = NSAAttention(
        TINY.dim,
        TINY.num_heads,
        TINY.num_kv_heads,
        TINY.head_dim,
        config=config,
        path="masked",
        fa2="off",
    )
    x = randn(2, 100, TINY.dim, seed=3)
    shared = Layout.of(IDS[:1], config, TINY.head_dim, dtype=torch.float32, cu_seqlens=CU)
    assert torch.equal(layer(x[:1], cu_seqlens=CU, layout=shared), layer(x[:1], cu_seqlens=CU))
    with torch.no_grad():
        ours, theirs = layer.new_cache(2, 100), layer.new_cache(2, 100)
        for chunk, num_tokens in (
            (x[:, :40], [40, 9]),
            (x[:, 40:41], None),
            (x[:, 41:60], [3, 19]),
        ):
            shared = layer.layout(chunk, dtype=torch.float32, cache=ours, num_tokens=num_tokens)
            got = layer(chunk, cache=ours, num_tokens=num_tokens, layout=shared)
            assert torch.equal(got, layer(chunk, cache=theirs, num_tokens=num_tokens))


def test_positions_and_rows_of_a_layout() -> None:
    """The angle of a turn is the position itself where base^0 = 1: its first pair."""
    layout = Layout.of(IDS[:1], TINY.nsa, TINY.head_dim, dtype=torch.float64, cu_seqlens=CU)
    token = torch.arange(97)
    first = torch.tensor([0] + [1] * 40 + [41] * 56)
    turn = layout.tokens(layout.turns)[0, :97, 0, 0]
    assert torch.allclose(
        turn, torch.polar(torch.ones(97, dtype=torch.float64), (token - first).double())
    )
    assert (
        layout.absent_BT1 is not None
        and layout.absent_BT1[0, :, 0].tolist() == [False] * 97 + [True] * 3
    )
    assert layout.present_BR is not None and int(layout.present_BR.sum()) == 97
    x = randn(1, 100, 5, seed=4)
    assert torch.equal(layout.tokens(layout.rows(x)), x.masked_fill(layout.absent_BT1, 0))


def test_caches_of_another_history_are_refused() -> None:
    """An interrupted forward leaves the first layers longer; going on would rotate the others by
    wrong positions.
    """
    model = TinyLM(TINY, fa2="off")
    cache = model.new_cache(2, 100)
    with torch.no_grad():
        model.blocks[0].attention(randn(2, 5, TINY.dim, seed=5), cache=cache[0])  # type: ignore[operator, union-attr]
        with pytest.raises(ValueError, match=r"\(5, 5\).*the same in each layer; begin anew"):
            model(IDS[:, :1], cache=cache)


@pytest.mark.parametrize("kind", ["half", "interleaved"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_sequences_shorter_than_one_compressed_block(kind: str, when: str) -> None:
    layer = NSAAttention(16, 2, 1, 8, config=NSAConfig(rope=kind, cmp_rope=when))
    y = layer(torch.randn(1, 5, 16, requires_grad=True))
    y.sum().backward()
    assert y.shape == (1, 5, 16) and bool(y.isfinite().all())


def test_a_layout_of_another_call_is_refused() -> None:
    layer = NSAAttention(16, 2, 1, 8)
    x, cu_seqlens = torch.randn(1, 20, 16), torch.tensor([0, 10, 20])
    whole = layer.layout(x, dtype=x.dtype)
    assert torch.equal(layer(x, layout=whole), layer(x))
    with pytest.raises(ValueError, match="got a layout of 20 tokens"):
        layer(x, layout=whole, cu_seqlens=cu_seqlens)
    with pytest.raises(ValueError, match="got a layout of 20 packed tokens"):
        layer(x, layout=layer.layout(x, dtype=x.dtype, cu_seqlens=cu_seqlens))
    with pytest.raises(ValueError, match=r"for x \(1, 20, 16\)"):
        layer(x, layout=layer.layout(x[:, :1], dtype=x.dtype))
