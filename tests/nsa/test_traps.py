"""What broke in other people's code, one test for each number of the list, with the input that
breaks it.

Numbers 4, 5, 21 and 22 are in test_varlen.py and test_cache.py; the last test here counts that none
is missing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path as File

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nsa import (
    ModelConfig,
    NSAAttention,
    NSAConfig,
    compress,
    compressed_attention,
    functional,
    nsa_attention,
    select_blocks,
    selected_attention,
    sliding_attention,
)
from nsa.capability import probe
from nsa.ops.selected import v2
from nsa.rope import angles, rotate
from nsa.routing import SPECS, Path, Problem, Request, route
from nsa.settings import Setting, Settings
from tests import oracle
from tests.cases import (
    FAST_PATHS,
    PATHS_HERE,
    SMALL,
    Case,
    assert_parity,
    assert_same_function,
    here,
    qkv,
    randn,
    run,
)

PAPER = NSAConfig()
# l = d = l': a block's score is its own probability, which a test can then write down.
PLAIN = NSAConfig(cmp_block=16, cmp_stride=16, sel_block=16, num_selected=4, window=24)
EVERY_PATH = pytest.mark.parametrize("path", PATHS_HERE)
FAST = pytest.mark.parametrize("path", FAST_PATHS)


def attend(
    path: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    blocks: Tensor,
    sel_block: int = 16,
    q_start: int = 0,
) -> Tensor:
    return selected_attention(
        q, k, v, blocks, sel_block=sel_block, q_start=q_start, path=path, fa2="off"
    )


def layer(path: str, config: NSAConfig = SMALL) -> Callable[..., Tensor]:
    return lambda q, k, v, g: nsa_attention(
        q, (k, v), (k, v), (k, v), g, config=config, path=path, fa2="off"
    )


def with_gates(case: Case) -> tuple[Tensor, ...]:
    q, k, v = qkv(case)
    return q, k, v, randn(*q.shape[:3], 3, seed=5).sigmoid()


def select_by_logits(
    logits_HC: Tensor, config: NSAConfig, *, position: int, kv_len: int
) -> list[int]:
    """The set of one query of one kv head, whose H heads have these logits over the compressed
    blocks.
    """
    H, C = logits_HC.shape
    q, k_cmp = torch.eye(H)[None, None], logits_HC.T[None, :, None]
    assert k_cmp.shape == (1, C, 1, H)
    return select_blocks(q, k_cmp, config=config, q_start=position, kv_len=kv_len, scale=1.0)[
        0, 0, 0
    ].tolist()


def hot(num_blocks: int, **logits: float) -> Tensor:
    """Logits [1, C] of 0, except ``b7=3.0``: block 7 has 3."""
    row = torch.zeros(1, num_blocks)
    for name, value in logits.items():
        row[0, int(name.removeprefix("b"))] = value
    return row


@EVERY_PATH
def test_trap_01_one_query_over_five_keys_sees_them_all(path: Path) -> None:
    """SDPA's causal corner is top-left: one row then returns V[0]."""
    q, k, v = qkv(Case(5, 2, 8, 8, 1), q_tokens=1)
    want = oracle.causal(q, k, v, q_start=4)
    assert float((want.unflatten(2, (-1, 2)) - v[:, :1, :, None]).abs().max()) > 0.1
    assert_parity(
        attend(path, q, k, v, torch.zeros(1, 1, 2, 1, dtype=torch.int32), q_start=4),
        want,
        "selected",
    )
    assert_parity(sliding_attention(q, k, v, window=5, q_start=4), want, "sliding")
    assert_parity(
        compressed_attention(q, k, v, block=1, stride=1, q_start=4)[0], want, "compressed"
    )


def test_trap_02_a_query_sees_the_blocks_that_ended_and_no_other() -> None:
    """An inverted mask shows the rest.

    Block i's value is the i-th unit vector, so the output names the blocks.
    """
    tokens, blocks = 100, 24
    q, k_cmp = randn(1, tokens, 2, 8, seed=0), randn(1, blocks, 1, 8, seed=1)
    o, _ = compressed_attention(q, k_cmp, torch.eye(blocks)[None, :, None], block=8, stride=4)
    for t in range(tokens):
        ended = [i for i in range(blocks) if i * 4 + 7 <= t]
        assert all(o[0, t, h].nonzero().flatten().tolist() == ended for h in (0, 1)), f"query {t}"


def test_trap_03_blind_rows_are_zero_and_weigh_nothing_in_a_merge() -> None:
    q, k, v = qkv(Case(33, 2, 8, 8, 1))
    inputs = [x.requires_grad_() for x in (q, compress(k, config=SMALL), compress(v, config=SMALL))]
    o, lse = compressed_attention(*inputs, block=8, stride=4)
    blind = slice(0, 7)
    assert (
        not o[:, blind].any()
        and torch.isneginf(lse[:, blind]).all()
        and torch.isfinite(lse[:, 7:]).all()
    )
    assert all(
        g.isfinite().all() and not g.any()
        for g in torch.autograd.grad(o[:, blind].sum(), inputs, retain_graph=True)
    )
    (d_q,) = torch.autograd.grad(o.square().sum(), inputs[:1])
    assert d_q.isfinite().all() and not d_q[:, blind].any()
    # an lse of 0 in the blind rows would take 95 % of the merged output
    other = torch.full_like(lse, -3.0)
    weight = (lse - torch.logaddexp(lse, other)).exp()
    assert (weight[:, blind] == 0).all() and (weight[:, 7:] > 0).all()


@EVERY_PATH
def test_trap_06_a_short_sequence_has_fewer_blocks_than_slots(path: Path) -> None:
    """S = 100 of 64-token blocks: two blocks for sixteen slots."""
    q, k, v = qkv(Case(100, 2, 8, 8, 1))
    blocks = select_blocks(q, compress(k, config=PAPER), config=PAPER)
    assert blocks.shape[-1] == 16 and blocks[..., :2].max() == 1 and (blocks[..., 2:] == -1).all()
    assert_parity(attend(path, q, k, v, blocks, 64), oracle.causal(q, k, v), "o")


@EVERY_PATH
@pytest.mark.parametrize("beyond", here([2, 100, 2**31 - 1], [2, 2**31 - 1]))
def test_trap_07_a_block_beyond_the_end_is_no_key(path: Path, beyond: int) -> None:
    """S or J as the padding passes a check for >= 0.

    Behind K and V lies NaN: reading on would show.
    """
    tokens = here(100, 70)
    q, k, v = qkv(Case(tokens, 2, 8, 8, 1))
    room = [torch.full((1, 400, 2, 8), torch.nan) for _ in (k, v)]
    for wide, x in zip(room, (k, v), strict=True):
        wide[:, :tokens] = x
    # block 1 is left out: clamping to it would show too
    blocks = torch.tensor([0, -1, -1], dtype=torch.int32).expand(1, tokens, 2, 3)
    padded = torch.where(blocks < 0, beyond, blocks)
    try:
        got = attend(path, q, room[0][:, :tokens], room[1][:, :tokens], padded, 64)
    except ValueError as refusal:
        assert "blocks" in str(refusal)
    else:
        assert torch.equal(got, attend(path, q, k, v, blocks, 64))


def test_trap_07_strict_mode_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(Case(100, 2, 8, 8, 1))
    monkeypatch.setattr(
        functional.settings,
        "current",
        lambda: Settings(strict_asserts=Setting(True, "environment")),
    )
    with pytest.raises(ValueError, match="blocks"):
        attend("masked", q, k, v, torch.full((1, 100, 2, 1), 2, dtype=torch.int32), 64)


@pytest.mark.parametrize("window", [1, 2, 24, 99])
def test_trap_08_the_window_holds_w_tokens_forward_and_backward(window: int) -> None:
    tokens, rows = 100, (0, 1, 23, 24, 25, 57, 99)
    q, k = randn(1, tokens, 1, 8, seed=0), randn(1, tokens, 1, 8, seed=1).requires_grad_()
    # token s's value is the s-th unit vector
    v = torch.eye(tokens)[None, :, None].clone().requires_grad_()
    o = sliding_attention(q, k, v, window=window)
    for t in rows:
        inside = list(range(max(0, t - window + 1), t + 1))
        assert o[0, t, 0].nonzero().flatten().tolist() == inside
        d_k, d_v = torch.autograd.grad(
            (o[:, t] * randn(tokens, seed=t)).sum(), (k, v), retain_graph=True
        )
        assert d_v[0, :, 0].any(-1).nonzero().flatten().tolist() == inside
        assert len(inside) == 1 or d_k[0, :, 0].any(-1).nonzero().flatten().tolist() == inside


@pytest.mark.parametrize("j", [1, 5, 17])
def test_trap_09_a_probability_scores_the_blocks_that_it_overlaps(j: int) -> None:
    """Compressed blocks 4j .. 4j + 2 lie within block j, and 4j - 1 half in each of j - 1 and j."""
    last, C = 20, 20 * 4
    inside, straddling = (replace(PAPER, num_selected=n) for n in (4, 5))
    for i in (4 * j, 4 * j + 1, 4 * j + 2):
        assert select_by_logits(
            hot(C, **{f"b{i}": 30.0}), inside, position=last * 64, kv_len=last * 64 + 1
        ) == [0, j, last - 1, last]
    pair = sorted({0, j - 1, j, last - 1, last})
    got = select_by_logits(
        hot(C, **{f"b{4 * j - 1}": 30.0}), straddling, position=last * 64, kv_len=last * 64 + 1
    )
    assert set(got) >= set(pair)


def test_trap_10_underflowed_past_blocks_beat_future_ones() -> None:
    """One logit of 500: every other probability is exactly 0, as is that of the 53 blocks of the
    future.
    """
    got = select_by_logits(
        hot(64, b5=500.0), replace(PLAIN, num_selected=7), position=10 * 16 + 15, kv_len=64 * 16
    )
    assert got == [0, 1, 2, 3, 5, 9, 10]
    few = select_by_logits(
        torch.zeros(1, 64), replace(PLAIN, num_selected=7), position=2 * 16 + 15, kv_len=64 * 16
    )
    assert few == [0, 1, 2, -1, -1, -1, -1], "a free slot is no place for a future block either"


def test_trap_11_the_softmax_does_not_see_the_future() -> None:
    """One head wants block 2 most, the other block 3 a little; a future key that only the first
    wants must not mute it.
    """
    logits = torch.cat([hot(30, b2=4.0), hot(30, b3=2.0)])
    raised = logits.clone()
    raised[0, 20:] = 60.0
    position = 8 * 16 + 15
    before, after = (
        select_by_logits(x, PLAIN, position=position, kv_len=30 * 16) for x in (logits, raised)
    )
    assert before == after == [0, 2, 7, 8]
    # normalised over all 30: the first head's block 2 has nothing left
    leaky = raised.softmax(-1)[:, :9].sum(0)
    assert int(leaky[1:7].argmax()) + 1 == 3


@pytest.mark.parametrize("heads", [1, 16])
@pytest.mark.parametrize("num_blocks", [20, 1100])
def test_trap_12_equal_scores_choose_the_lowest_index(heads: int, num_blocks: int) -> None:
    """Sixteen heads with 0.5 each: at a score of 8, a bias of 1e-8 times the index is lost in
    rounding.
    """
    last = num_blocks - 1
    twins = hot(num_blocks, b3=40.0, **{f"b{last - 4}": 40.0}).expand(heads, -1)
    assert select_by_logits(twins, PLAIN, position=last * 16 + 15, kv_len=num_blocks * 16) == [
        0,
        3,
        last - 1,
        last,
    ]
    flat = torch.zeros(heads, num_blocks)
    got = select_by_logits(
        flat, replace(PLAIN, num_selected=9), position=last * 16 + 15, kv_len=num_blocks * 16
    )
    assert got == [0, 1, 2, 3, 4, 5, 6, last - 1, last]


def test_trap_13_no_block_is_chosen_twice() -> None:
    """Initial and local blocks coincide in the first rows, and the best score is a forced
    block's.
    """
    for current in range(8):
        for favourite in (0, max(0, current - 1), current):
            logits = hot(8, **{f"b{favourite}": 9.0})
            row = select_by_logits(logits, PLAIN, position=current * 16 + 15, kv_len=8 * 16)
            real = [j for j in row if j >= 0]
            assert real == sorted(set(real)) and len(real) == min(4, current + 1)
            assert set(real) >= {0, max(0, current - 1), current}


def test_trap_14_no_real_score_displaces_a_forced_block() -> None:
    """Three slots for three forced blocks, next to one whose probability is exactly 1.0 in each of
    four heads.
    """
    config = replace(PLAIN, num_selected=3)
    for favourite in range(1, 9):
        logits = hot(11, **{f"b{favourite}": 500.0}).expand(4, -1)
        assert float(logits.softmax(-1).max()) == 1.0
        assert select_by_logits(logits, config, position=10 * 16 + 15, kv_len=11 * 16) == [0, 9, 10]


def test_trap_15_heads_that_form_no_whole_groups_are_refused() -> None:
    for build in (
        lambda: NSAAttention(64, 33, 2, 8),
        lambda: ModelConfig(num_heads=33, num_kv_heads=2),
    ):
        with pytest.raises(ValueError, match="33"):
            build()
    with pytest.raises(ValueError, match="33"):
        attend(
            "masked",
            randn(1, 16, 33, 8, seed=0),
            *2 * [randn(1, 16, 2, 8, seed=1)],
            torch.zeros(1, 16, 2, 1, dtype=torch.int32),
        )


@EVERY_PATH
def test_trap_15_the_last_head_is_written(path: Path) -> None:
    q, k, v, gates = with_gates(Case(33, 17, 8, 8, 1))
    assert q.shape[2] == 34
    assert layer(path)(q, k, v, gates)[:, 8:, -1].abs().amax(-1).gt(0).all()


@EVERY_PATH
@pytest.mark.parametrize("group", here([3, 4, 6], [3]))
def test_trap_16_groups_of_any_size(path: Path, group: int) -> None:
    q, k, v, gates = with_gates(Case(here(97, 25), group, 8, 8, 1))
    blocks = select_blocks(q, compress(k, config=SMALL), config=SMALL)
    want = oracle.nsa(q, (k, v), (k, v), (k, v), gates, config=SMALL, blocks=blocks)
    assert_parity(layer(path)(q, k, v, gates), want, f"group {group}")


@EVERY_PATH
@pytest.mark.parametrize(("key_dim", "value_dim"), [(12, 8), (8, 12)])
def test_trap_17_values_of_another_dimension_than_keys(
    path: Path, key_dim: int, value_dim: int
) -> None:
    q, k, v, gates = with_gates(Case(here(85, 25), 2, key_dim, value_dim, 1))
    blocks = select_blocks(q, compress(k, config=SMALL), config=SMALL)

    def reference(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Tensor:
        return oracle.nsa(q, (k, v), (k, v), (k, v), g, config=SMALL, blocks=blocks)

    assert_same_function(layer(path), reference, (q, k, v, gates), ("q", "k", "v", "gates"))


@EVERY_PATH
def test_trap_18_views_of_a_fused_projection_and_an_expanded_upstream_gradient(path: Path) -> None:
    tokens = here(50, 10)
    fused = randn(2, tokens, 8, 8, seed=0)
    gates = randn(2, tokens, 4, 3, seed=1).sigmoid()
    views = [x.detach().requires_grad_() for x in fused.split([4, 2, 2], 2)]
    copies = [x.detach().contiguous().requires_grad_() for x in views]
    assert not any(x.is_contiguous() for x in views)
    outputs = [layer(path)(*x, gates) for x in (views, copies)]
    torch.testing.assert_close(outputs[0], outputs[1])
    got = torch.autograd.grad(outputs[0].sum(), views)  # dO is one number, expanded
    want = torch.autograd.grad(outputs[1], copies, torch.ones(2, tokens, 4, 8))
    torch.testing.assert_close(got, want)


class Largest(TorchDispatchMode):
    """The largest number of elements of any tensor made meanwhile, by kind; contents are never
    looked at.
    """

    def __init__(self) -> None:
        super().__init__()
        self.values = self.indices = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in (leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)):
            if x.is_floating_point():
                self.values = max(self.values, x.numel())
            else:
                self.indices = max(self.indices, x.numel())
        return out


def inside_v2(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, sel_block: int) -> None:
    """The bodies of its operators, forward and backward: tensors without contents and modes see an
    operator, not what it does.
    """
    inputs = (
        q,
        k,
        v,
        blocks,
        torch.arange(q.shape[1])[None],
        sel_block,
        0.125,
        None,
        v2.WORKSPACE_BYTES,
    )
    v2._backward(v2._forward(*inputs), *inputs)


def largest(tokens: int, *, heads: int, kv_heads: int, dim: int) -> Largest:
    """Selection and the selected branch, forward and backward, at the paper's geometry, on tensors
    without contents.
    """
    with FakeTensorMode():
        q, k, v = (torch.empty(1, tokens, count, dim) for count in (heads, kv_heads, kv_heads))
        with Largest() as seen:
            blocks = select_blocks(q, compress(k, config=PAPER), config=PAPER)
            inside_v2(q, k, v, blocks, 64)
    return seen


def auto_at(tokens: int) -> Path:
    problem = Problem(1, tokens, tokens, 12, 2, 64, 64, "float32", ("sel",))
    (chosen,) = route(Request("auto", "off"), problem, probe("cpu")).branches
    return Path(chosen.implementation)


def test_trap_19_no_tensor_outgrows_32_bit_indices() -> None:
    """[S, 16, HQ, D] is 3.2e9 elements at these sizes."""
    tokens, heads, dim = 16_384, 96, 128
    assert tokens * 16 * heads * dim > 2**31
    assert largest(tokens, heads=heads, kv_heads=2, dim=dim).values < 2**31


def test_trap_20_index_maps_grow_with_the_length_and_not_with_its_square() -> None:
    half, full = (largest(tokens, heads=2, kv_heads=1, dim=64) for tokens in (32_768, 65_536))
    assert full.indices <= 2.2 * half.indices, (
        f"{half.indices:,} index elements at 32k, {full.indices:,} at 64k"
    )
    assert auto_at(65_536) is Path.V2, "masked holds S x S, and auto must not take it there"


def test_trap_23_each_head_is_rotated_by_itself() -> None:
    """Over the flattened heads, head 1 would turn by other frequencies than head 0."""
    theta = angles(torch.arange(40)[None], 8, base=1e4, scale=1.0)
    x = randn(1, 40, 1, 8, seed=0).expand(-1, -1, 5, -1)
    for kind in ("interleaved", "half"):
        rotated = rotate(x, theta, kind=kind)
        assert all(torch.equal(rotated[:, :, h], rotated[:, :, 0]) for h in range(5))
        assert_parity(
            rotated[:, :, 4:],
            oracle.rope(x[:, :, 4:], torch.arange(40), kind=kind),
            kind,
            tolerance=1e-5,
        )


@EVERY_PATH
def test_trap_24_a_rows_shift_is_its_own(path: Path) -> None:
    """Neighbouring rows and heads whose logits differ by far more than 88, which fp32's exp cannot
    span.
    """
    tokens = here(65, 30)
    q, k, v, gates = with_gates(Case(tokens, 2, 8, 8, 1))
    scale_TQ = (
        torch.tensor([1e-3, 300.0, -300.0])
        .repeat(1 + tokens * 4 // 3)[: tokens * 4]
        .view(1, tokens, 4, 1)
    )
    q = q * scale_TQ
    o, grads = run(layer(path), (q, k, v, gates))
    assert o.isfinite().all() and all(g.isfinite().all() for g in grads)
    blocks = select_blocks(q, compress(k, config=SMALL), config=SMALL)
    # fp32 knows a logit of 3,000 to 2e-4, and a weight moves by as much.
    assert_parity(
        o,
        oracle.nsa(q, (k, v), (k, v), (k, v), gates, config=SMALL, blocks=blocks),
        "o",
        tolerance=1e-3,
    )


@FAST
def test_trap_25_two_interleaved_layers_do_not_disturb_one_another(path: Path) -> None:
    """Of different geometry and length, training and decoding by turns, against each of them alone:
    equal bits.
    """
    tokens = here(70, 12)

    def build(seed: int) -> tuple[NSAAttention, Tensor]:
        torch.manual_seed(seed)
        config = (SMALL, replace(SMALL, sel_block=8, window=7, num_selected=3))[seed]
        return NSAAttention(16, 4, 2, 8, config=config, path=path, fa2="off"), randn(
            1 + seed, tokens + here(13, 5) * seed, 16, seed=seed
        )

    def session(seed: int):  # type: ignore[no-untyped-def]
        """Yields between any two steps."""
        module, x = build(seed)
        y = module(x)
        yield
        y.square().sum().backward()
        yield
        cache, decoded = module.new_cache(x.shape[0], x.shape[1]), []
        for part in x[:, :tokens].chunk(2, 1):
            with torch.no_grad():
                decoded.append(module(part, cache=cache))
            yield
        return [y.detach(), *decoded, *(p.grad for p in module.parameters())]

    def finish(*sessions) -> list[list[Tensor]]:  # type: ignore[no-untyped-def]
        results: dict[int, list[Tensor]] = {}
        while len(results) < len(sessions):
            for index, one in enumerate(sessions):
                try:
                    next(one)
                except StopIteration as end:
                    results[index] = end.value or results[index]
        return [results[i] for i in range(len(sessions))]

    alone = [finish(session(seed))[0] for seed in (0, 1)]
    for a, b in zip(alone, finish(session(0), session(1)), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_trap_26_no_value_is_read_on_the_host() -> None:
    """Of tensors without contents: reading one raises.

    A whole layer, forward and backward, on each path that may not sync.
    """

    def both_ways(path: Path) -> None:
        q, k, v = (torch.empty(1, 200, heads, 8, requires_grad=True) for heads in (4, 2, 2))
        layer(path)(q, k, v, torch.empty(1, 200, 4, 3)).sum().backward()

    with FakeTensorMode():
        for path in FAST_PATHS:
            both_ways(path)
        inside_v2(
            *(torch.empty(1, 200, heads, 8) for heads in (4, 2, 2)),
            torch.empty(1, 200, 2, 5, dtype=torch.int32),
            16,
        )
        for path in (path for path in Path if SPECS[path].slow):
            with pytest.raises(DataDependentOutputException):
                both_ways(path)


@EVERY_PATH
def test_trap_27_gradients_are_the_same_bits_in_every_run(path: Path) -> None:
    """Every row chooses block 0, so each of its keys is summed over nearly all rows: by atomics, in
    another order each time.
    """
    tokens = here(50 if SPECS[path].slow else 200, 20)
    q, k, v = qkv(Case(tokens, 3, 8, 8, 2))
    blocks = torch.tensor([0, here(3, 1)], dtype=torch.int32).expand(2, tokens, 2, 2)

    def once() -> list[Tensor]:
        return run(lambda *x: attend(path, *x, blocks), (q, k, v))[1]

    first = once()
    assert float(first[1][:, :16].abs().min()) > 0
    for _ in range(2):
        assert all(torch.equal(a, b) for a, b in zip(first, once(), strict=True))


@pytest.mark.parametrize("head_dim", [6, 8, 24])
def test_trap_28_the_mlp_runs_and_the_head_dim_is_the_one_asked_for(head_dim: int) -> None:
    """dim / num_heads would be 8."""
    torch.manual_seed(0)
    module = NSAAttention(32, 4, 2, head_dim, v_head_dim=10, config=replace(SMALL, phi="mlp"))
    assert module.q_proj.out_features == 4 * head_dim and module.o_proj.in_features == 4 * 10
    y = module(randn(1, 90, 32, seed=1))
    y.sum().backward()
    learned = {name: p.grad for name, p in module.named_parameters() if name.startswith("phi")}
    assert len(learned) == 6 and all(
        g is not None and g.isfinite().all() and g.any() for g in learned.values()
    )
    assert {p.shape[0] for name, p in module.named_parameters() if name.endswith("down")} == {
        head_dim,
        10,
    }


def test_every_trap_is_named_by_a_test_that_runs_here() -> None:
    tests = File(__file__).parents[1]
    files = [
        file
        for file in tests.glob("**/test_*.py")
        if not {"gpu", "peers"} & set(file.relative_to(tests).parts)
    ]
    names = [
        node.name
        for file in files
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.FunctionDef)
    ]
    named = {int(match[1]) for name in names if (match := re.match(r"test_trap_(\d+)_", name))}
    known = set(range(1, 51))  # from 29 on in tests/perfbench
    assert named == known, f"missing {sorted(known - named)}, unknown {sorted(named - known)}"
