"""Packed documents equal each document alone, in every branch and path; nothing crosses, nothing
leaks beyond the end.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nsa import statistics
from nsa.attention import NSAAttention
from nsa.config import NSAConfig, preset
from nsa.documents import Packing
from nsa.functional import nsa_attention
from nsa.model import IGNORED_LABEL, TinyLM, next_token_labels
from nsa.routing import Path
from tests.cases import FAST_PATHS, SMALL, assert_parity, here, randn
from tests.nsa.test_cache import DIM, OPTIONS, layer_of

LENGTHS = (1, 0, 100, 16, 33, 1, 0, 64, 15, 7)
FAST = (Path.V2, Path.MASKED)


def cu(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)])


def one_by_one(
    layer: Callable[[Tensor], Tensor], x: Tensor, lengths: Sequence[int], **options: object
) -> Tensor:
    bounds = cu(lengths).tolist()
    return torch.cat([layer(x[:, a:b]) for a, b in itertools.pairwise(bounds) if b > a], 1)


def gradients(layer: nn.Module, y: Tensor, x: Tensor) -> list[Tensor]:
    upstream = randn(*y.shape, seed=9, dtype=y.dtype)
    grads = torch.autograd.grad(y, [x, *layer.parameters()], upstream, allow_unused=True)
    return [
        torch.zeros_like(t) if g is None else g
        for t, g in zip([x, *layer.parameters()], grads, strict=True)
    ]


@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "paper"])
@pytest.mark.parametrize("path", FAST)
def test_packed_is_one_by_one(path: Path, option: str) -> None:
    """NSA.md property 6, forward and backward."""
    layer = layer_of(OPTIONS[option], path=path)
    x = randn(1, sum(LENGTHS), DIM, seed=1, dtype=torch.float64).requires_grad_()
    packed, alone = layer(x, cu_seqlens=cu(LENGTHS)), one_by_one(layer, x, LENGTHS)
    assert_parity(packed, alone, "y")
    for got, want in zip(gradients(layer, packed, x), gradients(layer, alone, x), strict=True):
        assert_parity(got, want, "gradient")


@pytest.mark.parametrize("path", FAST_PATHS)
def test_packed_is_one_by_one_in_fp32(path: Path) -> None:
    """What no fp64 serves is held to this."""
    lengths = here(LENGTHS, (1, 0, 17))
    layer = layer_of(path=path).float()
    x = randn(1, sum(lengths), DIM, seed=1).requires_grad_()
    packed, alone = layer(x, cu_seqlens=cu(lengths)), one_by_one(layer, x, lengths)
    assert_parity(packed, alone, "y")
    for got, want in zip(gradients(layer, packed, x), gradients(layer, alone, x), strict=True):
        assert_parity(got, want, "gradient", tolerance=2e-5)


@pytest.mark.parametrize("path", [Path.REFERENCE, Path.V1])
def test_slow_paths_pack_too(path: Path) -> None:
    layer = layer_of(path=path)
    x = randn(1, 90, DIM, seed=1, dtype=torch.float64)
    with torch.no_grad():
        assert_parity(layer(x, cu_seqlens=cu([60, 0, 30])), one_by_one(layer, x, [60, 30]), path)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=8),
    st.sampled_from(FAST),
    st.integers(0, 9),
    st.booleans(),
)
def test_any_packing(lengths: list[int], path: Path, beyond: int, narrow: bool) -> None:
    """Contents beyond the last document may be NaN: its rows are 0 and change no gradient."""
    if sum(lengths) == 0:
        lengths = [*lengths, 1]
    layer = layer_of(replace(SMALL, window=5) if narrow else SMALL, path=path)
    x = randn(1, sum(lengths) + beyond, DIM, seed=2, dtype=torch.float64)
    x[:, sum(lengths) :] = torch.nan
    x.requires_grad_()
    y = layer(x, cu_seqlens=cu(lengths).int())
    assert bool((y[:, sum(lengths) :] == 0).all())
    alone = one_by_one(layer, x, lengths)
    assert_parity(y[:, : sum(lengths)], alone, "y")
    got, want = (
        gradients(layer, y, x),
        gradients(layer, torch.cat([alone, torch.zeros_like(y[:, sum(lengths) :])], 1), x),
    )
    for a, b in zip(got, want, strict=True):
        assert_parity(a, b, "gradient")


def test_no_key_of_another_document() -> None:
    """Changing one document leaves every other bit-identical, neighbours included."""
    layer, lengths = layer_of(), [37, 16, 50, 1]
    x = randn(1, sum(lengths), DIM, seed=3, dtype=torch.float64)
    bounds = cu(lengths).tolist()
    with torch.no_grad():
        before = layer(x, cu_seqlens=cu(lengths))
        for a, b in itertools.pairwise(bounds):
            changed = x.clone()
            changed[:, a:b] = 1e3
            after = layer(changed, cu_seqlens=cu(lengths))
            others = [t for t in range(sum(lengths)) if not a <= t < b]
            assert torch.equal(before[:, others], after[:, others]) and not torch.equal(
                before[:, a:b], after[:, a:b]
            )


def test_trap_4_781_and_2048() -> None:
    """cu_seqlens [0, 781, 2048] at the paper's geometry: a chunk count off by one gave NaN."""
    layer = layer_of(NSAConfig(), path="masked").float()
    x = randn(1, 2048, DIM, seed=4)
    with torch.no_grad():
        assert_parity(
            layer(x, cu_seqlens=cu([781, 1267])),
            one_by_one(layer, x, [781, 1267]),
            "y",
            tolerance=1e-5,
        )


def test_trap_5_rows_beyond_the_end_poison_no_weight() -> None:
    layer = layer_of()
    x = randn(1, 60, DIM, seed=5, dtype=torch.float64)
    x[:, 50:] = torch.inf
    layer(x, cu_seqlens=cu([20, 30])).sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in layer.parameters() if p.grad is not None)


def test_the_functional_form_packs() -> None:
    heads = {"q": (4, 8), "k": (2, 8), "v": (2, 6)}
    lengths = [50, 3, 70]
    t = {
        name: randn(1, sum(lengths), *shape, seed=i, dtype=torch.float64)
        for i, (name, shape) in enumerate(heads.items())
    }
    gates = randn(1, sum(lengths), 4, 3, seed=8, dtype=torch.float64)

    def call(rows: slice, cu_seqlens: Tensor | None = None) -> Tensor:
        kv = (t["k"][:, rows], t["v"][:, rows])
        return nsa_attention(
            t["q"][:, rows],
            kv,
            kv,
            kv,
            gates[:, rows],
            config=SMALL,
            cu_seqlens=cu_seqlens,
            fa2="off",
        )

    bounds = cu(lengths)
    alone = torch.cat([call(slice(a, b)) for a, b in itertools.pairwise(bounds.tolist())], 1)
    assert_parity(call(slice(None), bounds), alone, "o")


def test_packing_reads_no_length_and_wastes_less_than_a_block_a_document() -> None:
    lengths = [1, 16, 17, 0, 5]
    packing = Packing.of(cu(lengths), 45, 16)
    assert packing.num_rows <= 45 + 5 * 15 + 15 and packing.num_rows % 16 == 0
    assert packing.row_T[:39].tolist() == [0, *range(16, 32), *range(32, 49), *range(64, 69)]
    assert packing.position_R[packing.row_T[:39]].tolist() == [0, *range(16), *range(17), *range(5)]
    assert packing.inside_T.tolist() == [True] * 39 + [False] * 6 == (~packing.outside_T).tolist()
    assert packing.present_R.nonzero().flatten().tolist() == packing.row_T[:39].tolist()
    assert packing.documents.bounds_N.tolist() == [0, 16, 32, 64, 64, 80, packing.num_rows]
    x = randn(1, 45, 3, seed=0)
    assert torch.equal(packing.restore(packing.align(x))[:, :39], x[:, :39])


def test_a_model_takes_packed_batches_and_labels_end_with_each_document() -> None:
    torch.manual_seed(0)
    model = TinyLM(preset("tiny"), fa2="off").double()
    lengths = [40, 1, 90]
    ids = torch.randint(256, (1, 140))
    with torch.no_grad():
        logits = model(ids, cu_seqlens=cu(lengths))
        alone = torch.cat(
            [model(ids[:, a:b]) for a, b in itertools.pairwise(cu(lengths).tolist())], 1
        )
    assert_parity(logits[:, :131], alone, "logits")
    labels = next_token_labels(ids, cu_seqlens=cu(lengths))[0].tolist()
    wanted = [
        IGNORED_LABEL if t in (39, 40, 130) or t >= 131 else int(ids[0, t + 1]) for t in range(140)
    ]
    assert labels == wanted
    assert next_token_labels(ids)[0].tolist() == [*ids[0, 1:].tolist(), IGNORED_LABEL]


@pytest.mark.parametrize(
    ("bounds", "batch", "words"),
    [
        ([0, 9], 2, "pack the batch into B = 1"),
        ([0], 1, r"int32 or int64 \[documents \+ 1\]"),
        ([[0, 9]], 1, r"int32 or int64 \[documents \+ 1\]"),
        ([0.0, 9.0], 1, "float32"),
        ([1, 9], 1, "wanted 0 first"),
        ([0, 5, 3, 9], 1, "ascending"),
        ([0, 10], 1, "over 9 tokens"),
    ],
)
def test_what_packing_refuses(bounds: list[object], batch: int, words: str) -> None:
    layer: NSAAttention = layer_of()
    with pytest.raises(ValueError, match=words):
        layer(randn(batch, 9, DIM, seed=0, dtype=torch.float64), cu_seqlens=torch.tensor(bounds))


def test_statistics_count_tokens_and_not_what_fills_the_blocks_up() -> None:
    """60 rows of which two documents of 20 and 30 are tokens, over 2 kv heads; a ragged chunk
    counts its tokens too.
    """
    layer = layer_of()
    x = randn(1, 60, DIM, seed=6, dtype=torch.float64)
    with torch.no_grad(), statistics.collect() as packed:
        layer(x, cu_seqlens=cu([20, 30]))
    with torch.no_grad(), statistics.collect() as ragged:
        layer(x.expand(2, -1, -1), cache=layer.new_cache(2, 60), num_tokens=[60, 7])
    assert packed.read().rows == 50 * 2 and ragged.read().rows == 67 * 2
