"""NSA as a function equals the fp64 oracle for any length, heads, dims, batch, geometry and path
that hypothesis finds.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from nsa import NSAConfig, compress, nsa_attention, select_blocks
from nsa.config import BRANCHES
from nsa.routing import Path
from tests import oracle
from tests.cases import Case, assert_blocks, assert_same_function, qkv, randn

HERE = (Path.REFERENCE, Path.V1, Path.V2, Path.MASKED)  # what needs no GPU


@st.composite
def geometries(draw: st.DrawFn) -> NSAConfig:
    """Any that NSAConfig takes, of blocks short enough to compete within a hundred tokens."""
    stride, initial, local = (
        draw(st.integers(1, 5)),
        draw(st.integers(0, 2)),
        draw(st.integers(1, 3)),
    )
    branches = draw(st.lists(st.sampled_from(BRANCHES), min_size=1, unique=True))
    return NSAConfig(
        cmp_block=stride * draw(st.integers(1, 4)),
        cmp_stride=stride,
        sel_block=stride * draw(st.integers(1, 5)),
        num_selected=initial + local + draw(st.integers(0, 3)),
        window=draw(st.integers(1, 110)),
        num_initial=initial,
        num_local=local,
        branches=tuple(branches),
    )


CASES = st.builds(
    Case,
    tokens=st.integers(1, 100),
    group=st.sampled_from([1, 2, 3, 6, 16]),
    key_dim=st.integers(1, 20),
    value_dim=st.integers(1, 20),
    batch=st.integers(1, 3),
)


@settings(max_examples=20, deadline=None)
@given(CASES, geometries(), st.sampled_from(HERE), st.integers(0, 2**16))
@example(
    Case(97, 3, 7, 5, 2),
    NSAConfig(cmp_block=9, cmp_stride=3, sel_block=6, num_selected=4, window=10),
    Path.V2,
    0,
)
@example(
    Case(1, 16, 1, 1, 3),
    NSAConfig(cmp_block=1, cmp_stride=1, sel_block=1, num_selected=3, window=1),
    Path.MASKED,
    1,
)
def test_any_layer_equals_the_oracle(case: Case, config: NSAConfig, path: Path, seed: int) -> None:
    q, k, v = qkv(case, seed=seed)
    gates = randn(*q.shape[:3], 3, seed=seed + 3).sigmoid()
    blocks = select_blocks(q, compress(k, config=config), config=config)
    want, gap = oracle.select(
        q, oracle.compress_mean(k, config.cmp_block, config.cmp_stride), config=config
    )
    assert_blocks(blocks, want, gap)

    def function(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        return nsa_attention(q, (k, v), (k, v), (k, v), gates, config=config, path=path, fa2="off")

    def reference(q: Tensor, k: Tensor, v: Tensor, gates: Tensor) -> Tensor:
        return oracle.nsa(q, (k, v), (k, v), (k, v), gates, config=config, blocks=blocks)

    assert_same_function(function, reference, (q, k, v, gates), ("q", "k", "v", "gates"))
