"""The proof at the timed length and batch: faults that begin beyond the length of the small proof.

Each was timed and published when only 145 tokens were proved.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import capability, chosen_blocks, selection, settings
from nsa.config import ModelConfig, preset
from nsa.ops import selected
from nsa.ops.interval import sliding
from nsa.routing import Path
from perfbench.matrix import route_of
from perfbench.records import Cell, LengthProof
from perfbench.records.rows import Status
from perfbench.worker.parity import at_length, key_blocks, proof
from perfbench.worker.parity.at_length import prove_at_length
from perfbench.worker.parity.backward import DenseBackward
from perfbench.worker.parity.claim import Claim
from perfbench.worker.parity.identities import Identities
from perfbench.worker.parity.proof import prove
from tests.perfbench import measure_cases
from tests.perfbench.jobs import job

TINY = preset("tiny")
BEYOND = 200  # tokens; the small proof of this model has 145
MASKED = Path.MASKED


def claim_of(model: ModelConfig = TINY, **axes: Any) -> Claim:
    asked = {"workload": "train", "seq_len": 256, "path": "masked", "fa2": "off", "dtype": "fp32"}
    cell = Cell(**{**asked, **axes})
    route = route_of(cell, model, settings.current(), capability.probe("cpu"))
    return Claim(model, route, cell, "cpu", 3)


def proved(model: ModelConfig = TINY, **axes: Any) -> LengthProof:
    return prove_at_length(claim_of(model, **axes))


class Scaled(torch.autograd.Function):
    """The identity, whose gradient ``change`` alters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.change(grads[0].clone()), None


def late(change: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Path masked with its q, k, v and blocks changed, in calls of more than BEYOND keys."""
    plain = selected.PATHS[MASKED]

    def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, **options: Any) -> Any:
        if k.shape[1] > BEYOND:
            q, k, v, blocks = change(q, k, v, blocks)
        return plain(q, k, v, blocks, **options)

    return attend


def without_last_block(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> tuple[Tensor, ...]:
    lost = blocks.clone()
    lost[:, BEYOND:, :, 1] = -1
    return q, k, v, lost


def dv_lost(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> tuple[Tensor, ...]:
    def change(g: Tensor) -> Tensor:
        g[:, 208:224] = 0
        return g

    return q, k, Scaled.apply(v, change), blocks


def dv_doubled(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> tuple[Tensor, ...]:
    def change(g: Tensor) -> Tensor:
        g[:, -16:] *= 2
        return g

    return q, k, Scaled.apply(v, change), blocks


def dk_scaled(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> tuple[Tensor, ...]:
    return q, Scaled.apply(k, lambda g: g * 1.01), v, blocks


def second_sequence(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor) -> tuple[Tensor, ...]:
    return q, k, torch.cat([v[:1], v[:1].expand(v.shape[0] - 1, -1, -1, -1)]), blocks


FAULTS = {
    "a block dropped": (without_last_block, "o"),
    "dv of a key block lost": (dv_lost, "dv_sel"),
    "dv of the last block doubled": (dv_doubled, "dv_sel"),
    "dk 1 % too large": (dk_scaled, "dk_sel"),
    "every sequence reads the first one's values": (second_sequence, "o"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_other_code_beyond_the_small_proof_is_seen(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, tensor = FAULTS[fault]
    claim = claim_of(batch=2)
    monkeypatch.setitem(selected.PATHS, MASKED, late(change))
    small = prove(claim)
    assert small.ok, "the small proof cannot see it"
    found = prove_at_length(claim)
    assert found.ok is False and found.tensors[tensor] > 10, found.tensors


def test_a_window_one_token_too_long_beyond_the_small_proof(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = sliding.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, *, window: int, **options: Any) -> Tensor:
        return plain(q, k, v, window=window + (k.shape[1] > BEYOND), **options)

    monkeypatch.setattr(sliding, "attend", attend)
    assert prove(claim_of()).ok
    assert proved().ok is False


def test_a_gate_whose_gradient_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    from nsa import dispatch

    plain = dispatch.combined

    def combined(route: Any, gates: Tensor, outputs: Any, columns: Any) -> Tensor:
        if gates.shape[1] > BEYOND:
            gates = torch.cat([gates[:, :BEYOND], gates[:, BEYOND:].detach()], 1)
        return plain(route, gates, outputs, columns)

    monkeypatch.setattr(dispatch, "combined", combined)
    assert prove(claim_of()).ok
    found = proved()
    assert found.ok is False and found.tensors["dgates"] > 10


def test_future_blocks_beyond_the_small_proof_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = selection.choose

    def choose(*args: Any, **options: Any) -> Tensor:
        blocks = plain(*args, **options)
        if blocks.shape[1] > BEYOND:
            blocks = blocks.clone()
            blocks[:, 100:140, :, -1] = 15  # which begins at token 240
        return blocks

    monkeypatch.setattr(selection, "choose", choose)
    found = proved()
    assert found.ok is False and found.tensors["blocks"] >= 2


# --- dK and dV of key blocks, over all rows


def exchanged(x: Tensor) -> Callable[[Tensor], Tensor]:
    """A gradient of x [B, S, G, D] with tokens 3 and 4 exchanged, but for what both sums would see:
    the part along the difference of the two tokens.
    """

    def change(g: Tensor) -> Tensor:
        along = x[:, 3] - x[:, 4]
        moved = g[:, 4] - g[:, 3]
        share = (moved * along).sum(-1, keepdim=True) / along.square().sum(-1, keepdim=True)
        moved = moved - share * along
        g[:, 3] += moved
        g[:, 4] -= moved
        return g

    return change


def outside(rows: Tensor, fault: str) -> Callable[..., Any]:
    """Path masked whose backward is wrong for every row but ``rows``."""
    plain = selected.PATHS[MASKED]

    def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, **options: Any) -> Any:
        right, lse = plain(q, k, v, blocks, **options)
        if k.shape[1] <= BEYOND:
            return right, lse
        wrong_k, wrong_v = (
            Scaled.apply(x, exchanged(x.detach())) if fault == name else x
            for name, x in (("dk_sel", k), ("dv_sel", v))
        )
        wrong, _ = plain(q, wrong_k, wrong_v, blocks, **options)
        is_sampled = torch.zeros(q.shape[1], 1, 1, dtype=torch.bool)
        is_sampled[rows] = True
        return torch.where(is_sampled, right, wrong), lse

    return attend


@pytest.mark.parametrize("fault", ["dk_sel", "dv_sel"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_two_keys_that_exchange_their_gradients_are_seen_by_the_key_blocks_alone(
    fault: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim = claim_of(batch=2, dtype=dtype)
    rows = proof.sampled_rows(TINY.nsa, 256, claim.seed)
    monkeypatch.setitem(selected.PATHS, MASKED, outside(rows, fault))
    found = prove_at_length(claim)
    over = {name for name, ratio in found.tensors.items() if ratio > 1}
    assert found.ok is False and over == {f"keys {fault}"}, found.tensors
    assert found.worst.startswith(f"keys {fault}: off by ")
    monkeypatch.setattr(key_blocks, "check", lambda *_: {})
    assert prove_at_length(claim).ok, "without the key blocks nothing sees it"


def test_every_branch_has_exact_gradients_of_keys() -> None:
    keys = {name for name in proved(seq_len=300).tensors if name.startswith("keys")}
    assert keys == {f"keys {which}_{b}" for which in ("dk", "dv") for b in ("cmp", "sel", "win")}
    dense = proved(seq_len=300, path="dense", fa2="n/a").tensors
    assert {name for name in dense if name.startswith("keys")} == {"keys dk_sel", "keys dv_sel"}
    assert not any(name.startswith("keys") for name in proved(workload="forward").tensors)


@pytest.mark.parametrize("name", ["k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win"])
@pytest.mark.parametrize("phi", ["mean", "mlp"])
def test_a_gradient_that_is_off_at_one_key(name: str, phi: str) -> None:
    """Of each branch, through a learned phi as well: a hundredth at the last token but one."""
    model = replace(TINY, nsa=replace(TINY.nsa, phi=phi))
    claim = claim_of(model, seq_len=300)
    inputs = proof.inputs_of(claim, 1, 300)
    own = proof.own_of(claim, "masked", inputs, torch.arange(4))
    with chosen_blocks.collect() as seen:
        backward = DenseBackward(own.run, inputs)
    call = key_blocks.Differentiated(model, inputs, model.nsa.branches, seen[0])
    healthy = key_blocks.check(call, backward, 5)
    assert all(error < 0.2 * bound for error, bound in healthy.values()), healthy
    token = 280 if name.endswith("cmp") else 298  # the tail is no compressed block
    backward.grads[name][0, token] *= 1.01
    found = key_blocks.check(call, backward, 5)
    over = {key for key, (error, bound) in found.items() if error > bound}
    assert over == {f"keys d{name}"}


def test_which_keys_are_compared() -> None:
    keys = key_blocks.key_tokens(16, 0, 1000, 3).tolist()
    whole = [key for key in range(0, 992, 16) if set(range(key, key + 16)) <= set(keys)]
    assert keys == sorted(set(keys)) and keys[-1] == 999 and {0, 976} < set(whole)
    assert len(whole) == 4, "two more, drawn"
    edges = (edge for edge in range(0, 992, 16) if edge - 9 not in keys)
    assert any({edge - 8, edge + 7} <= set(keys) for edge in edges)
    assert set(key_blocks.key_tokens(16, 500, 1000, 3).tolist()) <= set(range(500, 1000))
    for tokens in (1, 15, 16, 17, 33):
        few = key_blocks.key_tokens(16, 0, tokens, 3).tolist()
        assert few[0] == 0 and few[-1] == tokens - 1


def test_beyond_the_budget_the_last_rows_and_one_head_are_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    judged: list[tuple[int, int, str, int]] = []
    plain = key_blocks._Head.gradients

    def gradients(self: Any, branch: str, seed: int, first: int) -> Any:
        judged.append((self._sequence, self._head, branch, first))
        return plain(self, branch, seed, first)

    monkeypatch.setattr(key_blocks._Head, "gradients", gradients)
    assert proved(seq_len=300, batch=3).ok
    assert len({one[:2] for one in judged}) == 3 * TINY.num_kv_heads
    assert {first for *_, first in judged} == {0}
    judged.clear()
    monkeypatch.setitem(key_blocks.MAX_LOGITS, "cpu", 10_000)
    found = proved(seq_len=300, batch=3)
    assert found.ok and len({one[:2] for one in judged}) == 1
    assert {first for *_, first in judged} == {223}
    assert 2 * (300**2 - 223**2) / 8 <= 10_100 < 2 * 300**2 / 8, "H (T^2 - first^2) / 2 d logits"
    assert {"keys dk_cmp", "keys dv_cmp"} < set(found.tensors)


# --- sums over all rows


def sums_of(own: Callable[[dict[str, Tensor]], Tensor], rows: Tensor) -> dict[str, float]:
    """The identities of causal attention of one branch, as ``own`` computes it."""
    generator = torch.Generator().manual_seed(0)
    inputs = {
        name: torch.randn(2, 64, heads, 8, generator=generator)
        for name, heads in (("q", 4), ("k_sel", 2), ("v_sel", 2))
    }
    sums = Identities(own, inputs, ("sel",), None)
    sums.check_outputs()
    sums.check_gradients(rows, DenseBackward(own, inputs))
    return {name: error / tolerance for name, (error, tolerance) in sums.ratios.items()}


def causal(t: dict[str, Tensor]) -> Tensor:
    k, v = (t[name].repeat_interleave(2, 2) for name in ("k_sel", "v_sel"))
    logits = torch.einsum("bthd,bshd->bhts", t["q"], k) * 8**-0.5
    p = logits.masked_fill(~torch.ones(64, 64).tril().bool(), -torch.inf).softmax(-1)
    return torch.einsum("bhts,bshd->bthd", p, v)


def only_rows(rows: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
    """Causal attention whose backward ignores every other row."""

    def keep(g: Tensor) -> Tensor:
        kept = torch.zeros_like(g)
        kept[:, rows] = g[:, rows]
        return kept

    return lambda t: Scaled.apply(causal(t), keep)


def test_a_backward_of_the_sampled_rows_alone_breaks_the_sums() -> None:
    """Of which the oracle cannot know: its upstream gradient is zero in the other rows."""
    rows = torch.arange(0, 64, 3)
    healthy = sums_of(causal, rows)
    assert set(healthy) == {"v = 1", "halves", "sum dv_sel", "q . dq"}
    assert max(healthy.values()) < 0.4
    assert sums_of(only_rows(rows), rows)["sum dv_sel"] > 100


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("v = 1", lambda o: o * 1.001),
        ("sum dv_sel", None),
        ("q . dq", None),
        ("halves", None),
    ],
)
def test_each_sum_sees_its_own_fault(name: str, change: Any) -> None:
    def own(t: dict[str, Tensor]) -> Tensor:
        if name == "sum dv_sel":
            t = {**t, "v_sel": Scaled.apply(t["v_sel"], lambda g: g * 1.001)}
        if name == "q . dq":
            t = {**t, "q": Scaled.apply(t["q"], lambda g: g * 1.5)}
        if name == "halves":  # no backward is linear that looks at a size
            t = {**t, "v_sel": Scaled.apply(t["v_sel"], lambda g: g + 0.001 * g.abs())}
        o = causal(t)
        return o if change is None else change(o)

    assert sums_of(own, torch.arange(10))[name] > 5


@pytest.mark.parametrize(
    "axes",
    [
        {"path": "masked", "batch": 3},
        {"path": "v2"},
        {"path": "v1", "workload": "forward"},
        {"path": "dense", "fa2": "n/a"},
        {"path": "v2", "workload": "attention"},
        {"path": "masked", "workload": "selected", "selection": "hot"},
        {"path": "masked", "dtype": "bf16"},
    ],
    ids=str,
)
def test_healthy_paths_pass_at_the_timed_shape(axes: dict[str, Any]) -> None:
    found = proved(seq_len=300, **{"fa2": "off", **axes})
    assert found.ok and (found.tokens, found.batch) == (300, axes.get("batch", 1))
    assert found.rows == 64
    of_all_rows = ("sum", "v =", "keys")
    sums = {name for name in found.tensors if "." in name or name.startswith(of_all_rows)}
    assert "v = 1" in sums
    assert (len(sums) > 2) == (axes.get("workload", "train") != "forward")
    assert max(found.tensors[name] for name in sums) < 0.4


@pytest.mark.parametrize(
    "nsa",
    [
        {"phi": "linear"},
        {"phi": "mlp", "phi_hidden": 8},
        {"branches": ("cmp", "sel")},
        {"branches": ("win",)},
        {"share_kv": True},
        {"selection": "hierarchical", "num_selected": 8},
    ],
    ids=str,
)
def test_healthy_options_pass_and_a_learned_phi_leaves_out_what_does_not_hold(
    nsa: dict[str, Any],
) -> None:
    model = replace(TINY, nsa=replace(TINY.nsa, **nsa))
    found = proved(model, seq_len=300)
    assert found.ok, found.worst
    learned = nsa.get("phi", "mean") != "mean"
    assert ("v = 1" not in found.tensors) == learned
    assert ("q . dq" not in found.tensors) == learned


def test_the_blocks_are_those_of_the_call_itself() -> None:
    """Keys that a learned phi compresses in bf16 are near ties of those of the oracle's phi."""
    model = replace(TINY, nsa=replace(TINY.nsa, phi="linear"))
    found = proved(model, seq_len=300, dtype="bf16")
    assert found.ok and found.tensors["keys dk_sel"] < 0.2, found.tensors


def test_a_compiled_backward_runs_once_each() -> None:
    """It gives its buffers away, and a second run of it is an error."""
    claim = claim_of(path="masked", workload="selected", selection="hot", compile="on")
    inputs = proof.inputs_of(claim, 1, 256)
    own = proof.own_of(claim, "masked", inputs, torch.arange(4))
    read = {name: inputs[name] for name in ("q", "k_sel", "v_sel")}
    backward = DenseBackward(own.run, read)
    doubled = backward.of(2 * backward.upstream)
    for name, grad in backward.grads.items():
        assert torch.equal(doubled[name], 2 * grad), name


def test_many_long_sequences_are_proved_on_fewer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_length, "MAX_LOGITS", 2 * 256 * 4 * 20)
    found = proved(batch=2)
    assert found.ok and found.rows == 20


def test_a_cache_is_left_to_the_proof_of_its_step() -> None:
    found = proved(workload="decode", path="v2")
    assert found.ok is None and "as it is timed" in found.absent


def test_a_cell_that_fails_at_its_length_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selected.PATHS, MASKED, late(dk_scaled))
    row = measure_cases.run(job("masked", "train", 256, proof=measure_cases.PROOF))
    assert row.status is Status.PARITY and row.tok_per_s is None
    assert "at the timed 1 x 256 tokens: " in row.reason
    assert row.parity == measure_cases.PROOF and row.length_proof is not None
    assert row.length_proof.ok is False
