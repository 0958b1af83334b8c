"""The proof of a compiled cell: judged by the blocks that its own graph chose, once they pass the
rule for selection.

A graph of the compiler rounds scores otherwise, so near-tied blocks fall otherwise than in a call
that is not compiled: on an H200 eight cells of v2 and masked were red for that alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import dispatch, oracle, selection
from nsa.blocks import BlockGrid
from perfbench import older_nsa
from perfbench.records import LengthProof
from perfbench.worker.parity import layer, own, proof
from perfbench.worker.parity.at_length import prove_at_length
from perfbench.worker.parity.blocks import judge
from tests.perfbench.test_parity_at_length import TINY, claim_of

TOKENS = 192
PERIOD = 16  # tokens of a selection block


@pytest.fixture(autouse=True)
def graphs_without_inductor(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Dynamo's graph as it is: what differs in it is planted here."""

    def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        made: Callable[..., Tensor] = torch.compile(
            function, backend="eager", fullgraph=True, dynamic=False
        )
        return made

    torch._dynamo.reset()
    monkeypatch.setattr(layer, "compiled_of", compiled)
    yield
    torch._dynamo.reset()


@pytest.fixture
def near_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block has the same compressed keys, so their scores tie in exact arithmetic."""
    plain = proof.inputs_of

    def inputs_of(*arguments: Any) -> dict[str, Tensor]:
        made = plain(*arguments)
        k = made["k_cmp"]
        return made | {"k_cmp": k[:, torch.arange(k.shape[1]) % PERIOD]}

    monkeypatch.setattr(proof, "inputs_of", inputs_of)


def scores_when_compiled(monkeypatch: pytest.MonkeyPatch, relative: float) -> None:
    """In a compiled graph each block's score is larger than that of the block before it."""
    plain = selection.block_scores

    def block_scores(p: Tensor, *grid: Any) -> Tensor:
        scores = plain(p, *grid)
        if not torch.compiler.is_compiling():
            return scores
        return scores * (1 + relative * torch.arange(scores.shape[-1], device=scores.device))

    monkeypatch.setattr(selection, "block_scores", block_scores)


def proved(workload: str, path: str = "masked", compiled: str = "on") -> LengthProof:
    claim = claim_of(path=path, workload=workload, seq_len=TOKENS, compile=compiled)
    return prove_at_length(claim)


@pytest.mark.usefixtures("near_ties")
@pytest.mark.parametrize("workload", ["forward", "train"])
@pytest.mark.parametrize("path", ["v2", "masked"])
def test_blocks_that_tie_may_fall_otherwise_in_a_compiled_graph(
    path: str, workload: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores_when_compiled(monkeypatch, 5e-7)
    found = proved(workload, path)
    assert found.ok, found.worst
    monkeypatch.setattr(older_nsa, "_first", lambda *places: None)
    monkeypatch.setattr(own, "collect_blocks", lambda **_: nullcontext())
    hidden = proved(workload, path)
    assert hidden.tensors["o"] > 10, "the flip is there, in the rows that are compared"


@pytest.mark.parametrize("workload", ["forward", "train"])
def test_blocks_beyond_a_tie_are_red(workload: str, monkeypatch: pytest.MonkeyPatch) -> None:
    scores_when_compiled(monkeypatch, 1e-2)
    assert proved(workload, compiled="off").ok, "it is in the compiled graph alone"
    found = proved(workload)
    assert found.ok is False and found.tensors["blocks"] >= 2, found.tensors
    assert found.tensors["o"] <= 1, "those blocks are what was attended to"


def test_a_branch_that_a_compiled_graph_drops_is_red(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = dispatch.selected

    def selected(*arguments: Any, **options: Any) -> Any:
        o, lse = plain(*arguments, **options)
        return (o * 0 if torch.compiler.is_compiling() else o), lse

    monkeypatch.setattr(dispatch, "selected", selected)
    assert proved("train", compiled="off").ok
    found = proved("train")
    assert found.ok is False and {"o", "dv_sel"} <= {n for n, r in found.tensors.items() if r > 10}


def test_other_blocks_than_were_attended_to_are_red(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that shows the blocks of the rule and attends to others."""
    plain = dispatch.selected

    def selected(route: Any, q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, **given: Any) -> Any:
        if torch.compiler.is_compiling():
            last = torch.arange(blocks.shape[-1], device=blocks.device) == blocks.shape[-1] - 1
            blocks = blocks.masked_fill(last, -1)
        return plain(route, q, k, v, blocks, **given)

    monkeypatch.setattr(dispatch, "selected", selected)
    found = proved("forward")
    assert found.ok is False and found.tensors["blocks"] == 0 and found.tensors["o"] > 10


def test_a_tie_is_no_excuse_for_a_third_block() -> None:
    """All blocks tie but one of nearly no score, which takes a place of theirs."""
    config, tokens = replace(TINY.nsa, adaptive_num_selected=False), 192
    q = torch.ones(1, 1, TINY.num_heads, 8, dtype=torch.float64)
    num_cmp = BlockGrid.of(config).num_cmp(tokens)
    k_cmp = torch.ones(1, num_cmp, TINY.num_kv_heads, 8, dtype=torch.float64)
    poor = slice(
        4 * config.sel_block // config.cmp_stride - 1, 5 * config.sel_block // config.cmp_stride
    )
    k_cmp[:, poor] = -1
    rows = torch.tensor([tokens - 1])
    exact, _ = oracle.select(q, k_cmp, config=config, kv_len=tokens, positions=rows[None])

    def wrong(blocks: Tensor) -> int:
        return judge(q, k_cmp, blocks, config=config, rows=rows, kv_len=tokens).wrong_rows

    free = next(j for j in exact[0, 0, 0].tolist() if 0 < j < 10)
    other = next(j for j in range(9, 0, -1) if j not in exact and j != 4)
    for replacement, count in ((other, 0), (4, TINY.num_kv_heads)):
        blocks = torch.where(exact == free, replacement, exact).sort(-1).values
        assert wrong(blocks) == count, (exact, blocks)
    assert wrong(exact.clone().index_fill_(-1, torch.tensor([0]), -1)) == TINY.num_kv_heads
