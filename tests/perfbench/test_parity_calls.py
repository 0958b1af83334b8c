"""How many proofs a cell of path triton gets, and how they become one.

Which kernels serve a call goes by its rows, so the proof has both kinds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa.config import ModelConfig
from nsa.ops.kernels import decode
from nsa.ops.kernels.selected import MIN_ROWS_TO_SORT
from nsa.routing import Problem, Request, route
from perfbench import cache_parity, parity
from perfbench.blocks_parity import BlocksProof
from perfbench.deviation import Comparison
from tests.perfbench.builders import H100

pytestmark = pytest.mark.usefixtures("one_thread")


def rows_of(chunk: int | None, batch: int = 1, tokens: int | None = None) -> list[int]:
    """(b, t, kv head) rows of the largest call of each proof of m7c_125m."""
    model = ModelConfig.from_mapping({"preset": "m7c_125m"})
    at = parity.standard_tokens(model.nsa) if tokens is None else tokens
    longest = at if chunk is None else max(b - a for a, b in cache_parity.pieces_of(chunk, [], at))
    return [n * longest * model.num_kv_heads for n in parity._batches(model, "triton", at, chunk, batch)]


@pytest.mark.parametrize("chunk", [None, 2048, 256])
@pytest.mark.parametrize("tokens", [None, 200, 20_000])
def test_few_rows_and_many_are_proved(chunk: int | None, tokens: int | None) -> None:
    found = rows_of(chunk, tokens=tokens)
    assert max(found) >= MIN_ROWS_TO_SORT and len(found) == (1 if chunk is None and tokens == 20_000 else 2)
    assert len(found) == 1 or min(found) < MIN_ROWS_TO_SORT


def test_a_decode_step_is_proved_with_its_own_sequences() -> None:
    model = ModelConfig.from_mapping({"preset": "m7c_125m"})
    assert [parity._batches(model, "triton", 4_129, 1, n) for n in (1, 2, 64)] == [(2, 1), (2,), (2, 64)]
    assert parity._batches(model, "v2", 1_281, 1, 64) == (2,)


def test_a_decode_step_is_proved_where_its_compressed_keys_are_split() -> None:
    model = ModelConfig.from_mapping({"preset": "m7c_125m"})
    here = replace(H100, triton_provider="triton 3.7.1")
    timed = route(Request("triton"), Problem.of(model, batch=64, tokens=4_096, dtype="bfloat16"), here)
    tokens = parity._standard(model, timed, 1)
    keys = (tokens - model.nsa.cmp_block) // model.nsa.cmp_stride + 1
    assert min(decode.interval_splits(n * model.num_kv_heads, keys, banded=False) for n in (2, 64)) > 1
    assert parity._standard(model, timed, None) == parity.standard_tokens(model.nsa)


def test_a_tensor_that_is_compared_twice_keeps_the_worse() -> None:
    compare = Comparison(torch.float32)
    truth = torch.ones(3, dtype=torch.float64)
    for error in (5e-6, 5e-5, 1e-6):
        compare.add("o", truth + error, truth, truth)
    assert compare.ratios["o"] == pytest.approx(5.0, rel=1e-3)
    for wrong, missed in ((3, 0.9), (0, 0.1)):
        compare.add_blocks(BlocksProof(wrong_rows=wrong, missed=missed, missed_by_chance=0.5, report={"missed": missed}))
    assert compare.ratios["blocks"] == 6 and compare.ratios["recall"] == pytest.approx(1.8) and compare.selection == {"missed": 0.9}
