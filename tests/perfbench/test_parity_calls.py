"""How many proofs a cell of path triton gets, and how they become one.

Which kernels serve a call goes by its rows, so the proof has both kinds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nsa.config import ModelConfig
from nsa.ops.decode import kernels as decode
from nsa.routing import Problem, Request, Route, route
from nsa.routing.thresholds import COPY_MIN_ELEMENTS, SORT_MIN_ROWS
from perfbench.records import Cell
from perfbench.records.cells import DEFAULT_CHUNK
from perfbench.worker.parity import cache, sizes
from perfbench.worker.parity.blocks import BlocksProof
from perfbench.worker.parity.claim import Claim
from perfbench.worker.parity.comparison import ParityComparison
from tests.perfbench.builders import H100

pytestmark = pytest.mark.usefixtures("one_thread")


M7C = ModelConfig.from_mapping({"preset": "m7c_125m"})
SHAPE_B = ModelConfig.from_mapping(
    {"preset": "m7c_125m", "num_heads": 64, "num_kv_heads": 4, "head_dim": 128}
)
WIDE = ModelConfig.from_mapping(
    {"preset": "m7c_125m", "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
)


def routed(path: str, tokens: int = 4_096) -> Route:
    return route(
        Request(path),
        Problem.of(M7C, batch=16, tokens=tokens, dtype="bfloat16"),
        replace(H100, triton_provider="triton 3.7.1"),
    )


TIMED = routed("triton")


def batches(
    model: ModelConfig,
    timed: Route,
    path: str,
    tokens: int,
    *,
    chunk: int | None = None,
    batch: int = 1,
    workload: str = "train",
) -> tuple[int, ...]:
    """Sequences of each proof of ``tokens`` of a cell of that chunk (1 where it decodes)."""
    if chunk is not None:
        workload = "decode" if chunk == 1 else "chunked_prefill"
    cell = Cell(workload, 4_096, path, batch=batch, chunk=chunk or DEFAULT_CHUNK)
    return sizes.batches(Claim(model, timed, cell, "cpu", 0), path, tokens)


def kinds(
    model: ModelConfig, chunk: int | None = None, batch: int = 1, tokens: int | None = None
) -> list[tuple[bool, bool]]:
    """(whether queries are sorted, whether tiles come by descriptors) in the largest call of each
    proof.
    """
    at = sizes.standard_tokens(model.nsa) if tokens is None else tokens
    longest = at if chunk is None else max(b - a for a, b in cache.pieces_of(chunk, [], at))
    calls = [n * longest for n in batches(model, TIMED, "triton", at, chunk=chunk, batch=batch)]
    elements = model.num_heads * model.head_dim
    return [
        (n * model.num_kv_heads >= SORT_MIN_ROWS, n * elements >= COPY_MIN_ELEMENTS) for n in calls
    ]


@pytest.mark.parametrize("tokens", [None, 200])
@pytest.mark.parametrize("model", [M7C, SHAPE_B, WIDE], ids=["A", "B", "wide"])
def test_small_calls_and_large_are_proved(model: ModelConfig, tokens: int | None) -> None:
    """Each kind of loads, and either forward of the selected branch: of any length, since one proof
    holds for all.
    """
    found = kinds(model, tokens=tokens)
    # a sequence of the usual proof is many rows by itself
    sorts = {True} if model is WIDE and tokens is None else {False, True}
    assert {rows for rows, _ in found} == sorts and {copy for _, copy in found} == {False, True}


def test_a_sequence_that_is_long_itself_makes_large_calls_only() -> None:
    assert kinds(M7C, tokens=20_000) == [(True, True)]


@pytest.mark.parametrize(
    ("chunk", "batch", "sorts", "copies"),
    [(256, 1, False, False), (256, 16, True, False), (256, 64, True, True)],
)
def test_chunks_are_proved_up_to_the_timed_size(
    chunk: int, batch: int, sorts: bool, copies: bool
) -> None:
    found = kinds(M7C, chunk=chunk, batch=batch)
    assert (False, False) in found
    assert {rows for rows, _ in found} == {False, sorts} and {copy for _, copy in found} == {
        False,
        copies,
    }


def test_a_decode_step_is_proved_with_its_own_sequences() -> None:
    assert [batches(M7C, TIMED, "triton", 4_129, chunk=1, batch=n) for n in (1, 2, 64)] == [
        (2, 1),
        (2,),
        (2, 64),
    ]
    assert batches(M7C, routed("v2"), "v2", 1_281, chunk=1, batch=64) == (2,)


def test_kernels_of_two_branches_are_proved_where_auto_makes_the_third_dense() -> None:
    timed = routed("auto", tokens=1_024)
    assert timed.counters == ("cmp.triton", "sel.dense", "sel.sdpa", "win.triton")
    assert batches(M7C, timed, "auto", 1_024, batch=16) == (2, 4, 16)


def test_the_selected_branch_alone_makes_no_descriptors() -> None:
    assert batches(M7C, TIMED, "triton", 1_281, workload="selected") == (2, 4)


@pytest.mark.parametrize(("chunk", "kv_heads"), [(448, 16), (256, 16)])
def test_a_proof_of_chunks_is_no_larger_than_the_chunks(chunk: int, kv_heads: int) -> None:
    """Two sequences of such chunks would sort, and one, which is timed, does not."""
    many = ModelConfig.from_mapping(
        {"preset": "m7c_125m", "num_heads": 16, "num_kv_heads": kv_heads, "head_dim": 64}
    )
    assert all(sorts is False for sorts, _ in kinds(many, chunk=chunk))


def test_a_decode_step_is_proved_where_its_compressed_keys_are_split() -> None:
    tokens, plain = (
        sizes.standard_tokens_of(Claim(M7C, TIMED, Cell(kind, 4_096, "triton"), "cpu", 0))
        for kind in ("decode", "forward")
    )
    keys = (tokens - M7C.nsa.cmp_block) // M7C.nsa.cmp_stride + 1
    assert (
        min(decode.interval_splits(n * M7C.num_kv_heads, keys, banded=False) for n in (2, 64)) > 1
    )
    assert plain == sizes.standard_tokens(M7C.nsa)


def test_a_tensor_that_is_compared_twice_keeps_the_worse() -> None:
    compare = ParityComparison(torch.float32)
    reference = torch.ones(3, dtype=torch.float64)
    for error in (5e-6, 5e-5, 1e-6):
        compare.add("o", reference + error, reference, reference)
    assert compare.ratios["o"] == pytest.approx(5.0, rel=1e-3)
    for wrong, missed in ((3, 0.9), (0, 0.1)):
        compare.add_blocks(
            BlocksProof(
                wrong_rows=wrong, missed=missed, missed_by_chance=0.5, report={"missed": missed}
            )
        )
    assert (
        compare.ratios["blocks"] == 6
        and compare.ratios["recall"] == pytest.approx(1.8)
        and compare.selection == {"missed": 0.9}
    )
