"""The proof is red for a fault planted in each part of the attention function, and in the gradients
alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import functional, selection
from nsa.config import NSAConfig
from nsa.ops import gated_sum as combine
from nsa.ops import sdpa
from nsa.ops.interval import compressed, sliding
from nsa.routing import Path
from perfbench.worker.parity import proof
from perfbench.worker.parity.blocks import NEAR_TIE
from tests.perfbench.parity_cases import (
    TOKENS,
    Attend,
    gradient_times,
    in_path,
    last_block_dropped,
    prove,
    wrong,
)

pytestmark = pytest.mark.usefixtures("one_thread")


# Each fault replaces what dispatch or the public function calls, as a bug in that file would.


def one_key_too_many(attend: Attend) -> Attend:
    return lambda *x, q_start, **options: attend(*x, q_start=q_start + 1, **options)


def a_little_too_sharp(attend: Attend) -> Attend:
    return lambda *x, scale, **options: attend(*x, scale=scale * 1.001, **options)


def heads_in_the_wrong_group(attend: Attend) -> Attend:
    return lambda q, k, v, *rest, **options: attend(q, k.flip(2), v.flip(2), *rest, **options)


SELECTED_FAULTS = [
    one_key_too_many,
    last_block_dropped,
    a_little_too_sharp,
    heads_in_the_wrong_group,
]


@pytest.mark.parametrize("train", [True, False], ids=["train", "forward"])
@pytest.mark.parametrize("fault", SELECTED_FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("path", [Path.V1, Path.V2, Path.MASKED])
def test_a_fault_in_a_selected_path(
    monkeypatch: pytest.MonkeyPatch, path: Path, fault: Callable[[Attend], Attend], train: bool
) -> None:
    in_path(monkeypatch, path, fault)
    line = prove(path, train=train)
    assert not line.ok and "o" in wrong(line) and line.max_error > line.tolerance
    assert not train or {"dk_sel", "dv_sel"} <= wrong(line) <= {
        "o",
        "dq",
        "dk_sel",
        "dv_sel",
        "dgates",
    }, "and only there"
    others = [other for other in (Path.V1, Path.V2, Path.MASKED) if other is not path]
    assert all(prove(other, train=False).ok for other in others), (
        "it is this path's proof, not another's"
    )


@pytest.mark.parametrize("fault", SELECTED_FAULTS[:2], ids=lambda fault: fault.__name__)
def test_a_fault_in_bf16(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Attend], Attend]
) -> None:
    """bf16's tolerance is wide, and one key more or less is still far outside."""
    in_path(monkeypatch, Path.V2, fault)
    assert "o" in wrong(prove(Path.V2, dtype="bf16"))


@pytest.mark.parametrize("by", [1, -1])
def test_a_window_of_another_length(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    attend = sliding.attend
    monkeypatch.setattr(
        sliding, "attend", lambda *x, window, **options: attend(*x, window=window + by, **options)
    )
    assert {"o", "dk_win", "dv_win"} <= wrong(prove()) <= {"o", "dq", "dk_win", "dv_win", "dgates"}


def test_a_compressed_block_seen_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = compressed.attend
    monkeypatch.setattr(
        compressed, "attend", lambda *x, block, **options: attend(*x, block=block - 1, **options)
    )
    assert {"o", "dk_cmp", "dv_cmp"} <= wrong(prove()) <= {"o", "dq", "dk_cmp", "dv_cmp", "dgates"}


def test_blind_rows_that_are_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first compressed block ends, that branch is 0; a mean over everything would leak
    the future.
    """
    attend = compressed.attend
    monkeypatch.setattr(
        compressed, "attend", lambda q, k, v, **options: attend(q, k, v, **options) + 1e-3
    )
    assert "o" in wrong(prove(train=False))


def test_compression_over_the_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:

    compress = functional.compress
    monkeypatch.setattr(
        functional,
        "compress",
        lambda x, *, config, params=None: compress(x.roll(1, 1), config=config),
    )
    assert "o" in wrong(prove(train=False))


def test_gates_of_the_wrong_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    gated_sum = combine.gated_sum
    monkeypatch.setattr(
        combine, "gated_sum", lambda gates, outputs, columns: gated_sum(gates, outputs, [1, 0, 2])
    )
    assert {"o", "dgates"} <= wrong(prove())


@pytest.mark.parametrize("shift", [1, -1])
def test_a_selection_that_is_off_by_one_block(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    choose = selection.choose

    def shifted(*x: Any, **options: Any) -> Tensor:
        blocks = choose(*x, **options)
        return torch.where(blocks < 0, blocks, (blocks + shift).clamp(min=0)).int()

    monkeypatch.setattr(selection, "choose", shifted)
    line = prove(train=False)
    assert not line.ok and "blocks" in wrong(line)


def test_a_selection_that_skips_the_best_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over wrong blocks is correct attention: only comparing the sets detects it."""
    scores = selection.block_scores
    monkeypatch.setattr(selection, "block_scores", lambda *x: -scores(*x))
    line = prove()
    assert wrong(line) == {"blocks"} and not line.ok and line.max_error > line.tolerance


def test_equal_scores_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two blocks score alike, either may be taken: rounding decides, not the code."""
    choose = selection.choose
    monkeypatch.setattr(
        proof.oracle, "select", lambda q, k, **options: _as_if_tied(choose, q, k, **options)
    )
    assert prove(train=False).tensors["blocks"] == 0.0


def _as_if_tied(
    choose: Attend, q: Tensor, k: Tensor, *, positions: Tensor, config: NSAConfig, kv_len: int
) -> tuple[Tensor, Tensor]:
    blocks = torch.full((*q.shape[:2], k.shape[2], config.num_selected), 99)
    return blocks, torch.full(blocks.shape[:3], NEAR_TIE / 2, dtype=torch.float64)


# Gradients alone: the output is right to the last bit.


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.001, 2.0])
@pytest.mark.parametrize("tensor", ["k", "v"])
@pytest.mark.parametrize("branch", ["cmp", "sel", "win"])
def test_a_wrong_gradient_alone(
    monkeypatch: pytest.MonkeyPatch, branch: str, tensor: str, factor: float
) -> None:
    """0 is a forgotten gradient (`detach`): it must be said like any other wrong number."""

    def spoil(attend: Attend) -> Attend:
        def spoiled(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Any) -> Tensor:
            k, v = (
                gradient_times(x, factor if name == tensor else 1.0)
                for name, x in (("k", k), ("v", v))
            )
            return attend(q, k, v, *rest, **options)

        return spoiled

    if branch == "sel":
        in_path(monkeypatch, Path.V2, spoil)
    else:
        module = {"cmp": compressed, "win": sliding}[branch]
        monkeypatch.setattr(module, "attend", spoil(module.attend))
    assert prove(train=False).ok, "the output is right"
    assert wrong(prove()) == {f"d{tensor}_{branch}"}


def test_gates_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    gated_sum = combine.gated_sum
    monkeypatch.setattr(
        combine, "gated_sum", lambda gates, *rest: gated_sum(gradient_times(gates, 0.5), *rest)
    )
    assert prove(train=False).ok and wrong(prove()) == {"dgates"}


@pytest.mark.parametrize("train", [True, False], ids=["train", "forward"])
def test_the_dense_twin_is_judged(monkeypatch: pytest.MonkeyPatch, train: bool) -> None:
    causal = sdpa.causal
    monkeypatch.setattr(
        sdpa, "causal", lambda q, k, v, **options: causal(q, k.roll(1, 1), v.roll(1, 1), **options)
    )
    assert "o" in wrong(prove("dense", train=train))


@pytest.mark.parametrize("path", [Path.V2, Path.MASKED])
def test_sequences_of_a_batch_that_are_mixed_up(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    def mixed(attend: Attend) -> Attend:
        return lambda q, k, v, *rest, **options: attend(q, k.flip(0), v.flip(0), *rest, **options)

    in_path(monkeypatch, path, mixed)
    assert "o" in wrong(prove(path, train=False))


def test_a_wrong_gradient_of_the_dense_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    causal = sdpa.causal
    monkeypatch.setattr(
        sdpa, "causal", lambda q, k, v, **options: causal(q, gradient_times(k, 1.01), v, **options)
    )
    assert wrong(prove("dense")) == {"dk_sel"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_wrong_and_can_be_stored(
    monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    attend = compressed.attend
    monkeypatch.setattr(compressed, "attend", lambda *x, **options: attend(*x, **options) + value)
    line = prove(train=False)
    assert not line.ok and line.tensors["o"] == 1e9
    assert "NaN" not in json.dumps(line.model_dump()) and "Infinity" not in json.dumps(
        line.model_dump()
    )


@pytest.mark.parametrize("row", [0, 3, 4, 7, 8, 15, 16, 23, 24, 79, 80, TOKENS - 1])
def test_a_fault_at_one_boundary_row(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    """Both sides of stride, block, selection block, window and the end of "everything is selected",
    first and last.
    """

    def spoil(attend: Attend) -> Attend:
        def bumped(q: Tensor, *rest: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:
            here = torch.arange(q.shape[1])[:, None, None] == row
            o, lse = attend(q, *rest, **options)
            return o + 1e-2 * here * (q.shape[1] == TOKENS), lse

        return bumped

    in_path(monkeypatch, Path.V2, spoil)
    assert all("o" in wrong(prove(train=False, seed=seed)) for seed in (1, 2)), (
        "not by chance of a seed"
    )
