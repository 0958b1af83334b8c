"""Workspaces of path `v2`: bounded, known beforehand, and no module's buffer is another's."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nsa.attention import NSAAttention
from nsa.config import ModelConfig, NSAConfig, preset
from nsa.model import TinyLM
from nsa.ops.selected import gathered_rows, v2
from tests.cases import SMALL, Case, qkv, random_blocks

FIRST = replace(preset("tiny"), checkpoint_layers=(0, 2))
SECOND = ModelConfig(
    dim=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    v_head_dim=16,
    nsa=NSAConfig(cmp_block=4, cmp_stride=2, sel_block=8, num_selected=7, window=10),
    checkpoint_layers=(1, 2),
)
Step = tuple[Tensor, ...]


def model_of(config: ModelConfig, path: str) -> TinyLM:
    torch.manual_seed(config.dim)
    return TinyLM(config, path=path, fa2="off")


def start(model: TinyLM, tokens: int) -> tuple[Tensor, Callable[[], Step]]:
    """Logits of one step, and what finishes it."""
    ids = torch.randint(256, (2, tokens), generator=torch.Generator().manual_seed(tokens))
    logits = model(ids)
    return logits, lambda: (
        logits.detach(),
        *torch.autograd.grad(logits.square().mean(), list(model.parameters())),
    )


@pytest.mark.parametrize("path", ["v2", "masked"])
@pytest.mark.parametrize("limit_bytes", [1 << 30, 1 << 15])
def test_interleaved_models_agree_with_fresh_ones(
    path: str, limit_bytes: int, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> None:
    """Different geometry, activation checkpointing, forwards between another's forward and
    backward, also a longer one.
    """
    monkeypatch.setattr(v2, "WORKSPACE_BYTES", limit_bytes)
    jobs = [(FIRST, 100), (SECOND, 70), (FIRST, 131), (SECOND, 33)]
    alone = [start(model_of(config, path), tokens)[1]() for config, tokens in jobs]
    models = {id(config): model_of(config, path) for config in (FIRST, SECOND)}
    begun = [start(models[id(config)], tokens)[1] for config, tokens in jobs]
    together = [begun[i]() for i in (1, 0, 3, 2)]
    for job, got in zip((1, 0, 3, 2), together, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(got, alone[job], strict=True)), jobs[job]


def nbytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


class Made(TorchDispatchMode):
    """Bytes that the operators of interest returned or, for products, read: a list per name, in
    order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes: dict[str, list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1].split(".")[0]
        if name in ("index_select", "eq", "zeros_like") and out.dim() > 1:
            self.bytes[name].append(nbytes(out))
        if name == "mm":
            self.bytes["mm.left"].append(nbytes(args[0]))
            self.bytes["mm.right"].append(nbytes(args[1]))
        return out

    def pairs(self, name: str) -> list[int]:
        """K's and V's of each chunk together."""
        of = self.bytes[name]
        return [of[i] + of[i + 1] for i in range(0, len(of), 2)]


CASE = Case(50, 3, 8, 12, 2)
ROW_BYTES = SMALL.num_selected * SMALL.sel_block * (8 + 12) * 4
ROWS = CASE.batch * CASE.kv_heads * CASE.tokens


def closed_form(limit_bytes: int, *, backward: bool) -> int:
    shape = gathered_rows.GatherShape(
        num_kv_heads=CASE.kv_heads,
        head_dim=8,
        v_head_dim=12,
        num_selected=SMALL.num_selected,
        sel_block=SMALL.sel_block,
        dtype=torch.float32,
    )
    return gathered_rows.workspace_bytes(
        CASE.batch, CASE.tokens, shape, limit_bytes=limit_bytes, backward=backward
    )


@pytest.mark.parametrize("limit_bytes", [1 << 30, 7 * ROW_BYTES, 60 * ROW_BYTES + 5, 1])
def test_the_closed_form_is_what_was_gathered(limit_bytes: int) -> None:
    q, k, v = qkv(CASE)
    blocks = random_blocks(CASE, SMALL, seed=3)
    inputs = (
        q,
        k,
        v,
        blocks,
        torch.arange(CASE.tokens)[None],
        SMALL.sel_block,
        0.25,
        None,
        limit_bytes,
    )
    with Made() as forward:
        v2._forward(*inputs)
    gathered = forward.pairs("index_select")
    assert sum(gathered) == ROWS * ROW_BYTES, "every row once"
    assert max(gathered) == closed_form(limit_bytes, backward=False) <= max(limit_bytes, ROW_BYTES)
    with Made() as backward:
        v2._backward(torch.ones(2, 50, 6, 12), *inputs)
    assert backward.pairs("index_select") == gathered, "gathered again, in the same chunks"
    made = backward.bytes
    matrix = [a + b for a, b in zip(made["eq"], made["mm.left"], strict=True)]
    sizes = max(gathered), max(backward.pairs("mm.right")), max(matrix), sum(made["zeros_like"])
    assert closed_form(limit_bytes, backward=True) == sum(sizes)


def test_a_dtype_narrower_than_fp32_is_added_up_in_fp32() -> None:
    shape = gathered_rows.GatherShape(
        num_kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        num_selected=16,
        sel_block=64,
        dtype=torch.bfloat16,
    )
    forward = gathered_rows.workspace_bytes(1, 8192, shape, backward=False)
    # 4,096 rows of 16 blocks of 64 keys of 2 x 64 numbers of 2 bytes fill 1 GiB; they touch one kv
    # head's 128 blocks.
    assert forward == 4096 * 16 * 64 * 128 * 2 == 1 << 30
    matrix, totals = 128 * 4096 * 16 * (1 + 2), 2 * 8192 * 128 * 4
    assert gathered_rows.workspace_bytes(1, 8192, shape) == 2 * forward + matrix + totals
    decode = gathered_rows.workspace_bytes(1, 8192, shape, q_tokens=1, backward=False)
    assert decode == 2 * 16 * 64 * 128 * 2


@pytest.mark.parametrize("limit_bytes", [1, 7 * ROW_BYTES])
def test_a_tiny_limit_changes_no_bit_of_the_forward(
    limit_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors, blocks = qkv(CASE), random_blocks(CASE, SMALL, seed=3)

    def attend() -> Tensor:
        return v2.attend(
            *tensors, blocks, sel_block=SMALL.sel_block, q_start=0, scale=0.25, fa2=None
        )[0]

    whole = attend()
    monkeypatch.setattr(v2, "WORKSPACE_BYTES", limit_bytes)
    assert torch.equal(attend(), whole)


def test_reserving_on_a_cpu_allocates_nothing() -> None:
    gathered_rows.reserve(1 << 60, torch.device("cpu"))  # more than any machine has


def test_a_layer_reserves_what_its_own_path_packs() -> None:
    layer = NSAAttention(48, 6, 2, 8, 16, SECOND.nsa, path="v2", fa2="off")
    shape = gathered_rows.GatherShape(
        num_kv_heads=2,
        head_dim=8,
        v_head_dim=16,
        num_selected=7,
        sel_block=8,
        dtype=torch.float32,
    )
    wanted = gathered_rows.workspace_bytes(2, 100, shape, backward=False)
    assert wanted == 2 * 2 * 100 * 7 * 8 * (8 + 16) * 4
    assert layer.reserve(2, 100, backward=False) == wanted
    assert layer.reserve(2, 100) > wanted
    for path in ("masked", "reference"):
        assert NSAAttention(48, 6, 2, 8, 16, SECOND.nsa, path=path, fa2="off").reserve(2, 100) == 0
