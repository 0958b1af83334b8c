"""A peer is proved, counted and recorded as any path is: right ones have a speed, and each fault
has its red.
"""

from __future__ import annotations

import hashlib
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask
from torch.nn.functional import scaled_dot_product_attention

from perfbench.matrix.peers import _BUILT_IN, located
from perfbench.records.peers import Peer
from perfbench.records.rows import Replicate, Status
from perfbench.worker.parity import peers as proof_of_peers
from perfbench.worker.peers import flex
from perfbench.worker.peers.call import ascending, loaded_peer
from perfbench.worker.peers.witness import witness_of
from tests.perfbench.measure_cases import assert_no_speed, run
from tests.perfbench.peer_cases import CODE, peer_job, peer_of

pytestmark = pytest.mark.usefixtures("one_thread", "light")


def measured(
    folder: Path, function: str, kind: str = "dense", seq_len: int = 256, **changes: Any
) -> Replicate:
    """Of attention forward and backward, at a length where blocks compete."""
    of_job = {name: changes.pop(name) for name in ("profile", "workload") if name in changes}
    peer = peer_of(folder, function, kind, **changes)
    return run(peer_job(peer, seq_len=seq_len, **of_job))


RIGHT = [
    ("right", "dense", {}),
    ("windowed", "window", {}),
    ("nsa", "nsa", {}),
    ("nsa_hidden", "nsa", {}),
    ("one_kv", "nsa", {"kv": "one"}),
]


@pytest.mark.parametrize(("function", "kind", "changes"), RIGHT)
def test_a_right_peer_has_a_speed_its_proofs_and_its_name(
    tmp_path: Path, function: str, kind: str, changes: dict[str, Any]
) -> None:
    row = measured(tmp_path, function, kind, profile=True, repeatable=True, **changes)
    assert (row.status, row.reason) == (Status.OK, "")
    name = function if kind == "nsa" else f"{kind}_{function}"
    assert {*row.engaged} == {f"peer.{name}"} and row.tok_per_s is not None
    assert row.parity is not None and row.parity.ok and row.parity.tokens == 145
    proof = row.length_proof
    assert proof is not None and proof.ok and proof.tokens == 256 and proof.digest
    assert {"o", "dq", "v = 1", "halves"} <= {*proof.tensors}
    assert row.step_proof is not None and row.step_proof.ok
    assert row.profile is not None and row.profile.witness_ok
    assert not [called for called in row.profile.operators if called.startswith("nsa::")]


def test_a_row_records_the_file_that_was_loaded(tmp_path: Path) -> None:
    row = measured(tmp_path, "right", workload="attention_forward")
    peer = row.peer
    assert peer is not None and peer.name == "dense_right" and peer.version is None
    file = Path(peer.file)
    assert file.parent == tmp_path and file.name.startswith("peer_code")
    assert peer.file_sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    flex_row = loaded_peer(_BUILT_IN["flex"])
    assert flex_row.version == f"torch {torch.__version__}".split("+")[0] or "+" in str(
        flex_row.version
    )
    assert flex_row.file.endswith("flex_attention.py")


WRONG = [
    ("wrong", "dense", {}, "differs from the fp64 oracle: "),
    ("nan", "dense", {}, "differs from the fp64 oracle: "),
    ("no_gradient_of_k", "dense", {}, "differs from the fp64 oracle: dk_sel"),
    ("wrong_beyond_200", "dense", {}, "differs from the fp64 oracle at the timed 1 x 256 tokens"),
    ("off_by_one", "window", {}, "differs from the fp64 oracle: "),
    ("nsa_fewer", "nsa", {}, "differs from the fp64 oracle: blocks"),
    ("nsa_fewer_hidden", "nsa", {}, "differs from the fp64 oracle: "),
    ("nsa_gates_swapped", "nsa", {}, "differs from the fp64 oracle: "),
    ("one_kv_window_left_out", "nsa", {"kv": "one"}, "differs from the fp64 oracle: dk_sel"),
]


@pytest.mark.parametrize(("function", "kind", "changes", "reason"), WRONG)
def test_a_wrong_peer_is_parity_and_never_timed(
    tmp_path: Path, function: str, kind: str, changes: dict[str, Any], reason: str
) -> None:
    row = measured(tmp_path, function, kind, **changes)
    assert row.status is Status.PARITY and row.reason.startswith(reason)
    assert_no_speed(row)


def test_a_peer_that_calls_nsa_is_a_wrong_path(tmp_path: Path) -> None:
    row = measured(tmp_path, "through_nsa", profile=True, workload="attention_forward")
    assert row.status is Status.WRONG_PATH
    assert "sel.masked" in row.reason and "peer.dense_through_nsa" in row.reason
    assert_no_speed(row)


def test_a_peer_that_calls_an_operator_of_nsa_is_a_wrong_path(tmp_path: Path) -> None:
    """One that dispatch did not count."""
    row = measured(tmp_path, "through_operator", profile=True, workload="attention_forward")
    assert row.status is Status.WRONG_PATH
    assert row.reason == "nsa::borrowed was called 1 times, 0 are due"
    assert_no_speed(row)


def test_a_hidden_choice_that_rounding_could_change_proves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chosen score is nowhere so far from the next."""
    monkeypatch.setattr(proof_of_peers, "closeness", lambda q, *_: torch.tensor(1e9))
    row = measured(tmp_path, "nsa_hidden", "nsa", workload="attention_forward")
    assert row.status is Status.PARITY
    assert row.reason.startswith("differs from the fp64 oracle: decided")


@pytest.mark.parametrize("times", [None, 1.1])
def test_a_hidden_choice_is_compared_where_rounding_cannot_change_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: float | None
) -> None:
    """Queries scored in steps of 1/32: near ties fall otherwise, which fp32 does not explain, and
    scores that may be 1.1 times off do.
    """
    if times is not None:
        monkeypatch.setattr(proof_of_peers, "closeness", lambda q, *_: torch.tensor(times))
    row = measured(tmp_path, "nsa_coarse_hidden", "nsa", workload="attention_forward")
    assert row.status is (Status.PARITY if times is None else Status.OK), row.reason


BROKEN = [
    (
        "no_backward",
        "its output has no gradient, wanted one by autograd; declare `backward: false`",
    ),
    ("half", r"returned \(.*\) torch.float16, wanted o \(2, 145, .*\) torch.float32"),
    ("missing", "has no missing"),
]


@pytest.mark.parametrize(("function", "message"), BROKEN)
def test_a_peer_that_breaks_the_contract_says_how(
    tmp_path: Path, function: str, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        measured(tmp_path, function)


def test_a_peer_without_a_backward_is_measured_forward(tmp_path: Path) -> None:
    row = measured(tmp_path, "no_backward", workload="attention_forward", backward=False)
    assert (row.status, row.reason) == (Status.OK, "")


def test_a_peer_that_fails_to_import_is_a_crash(tmp_path: Path) -> None:
    peer = peer_of(tmp_path, "right")
    file = (tmp_path / peer.function.partition(":")[0]).with_suffix(".py")
    file.write_text("raise RuntimeError('needs another driver')\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match="needs another driver"):
        run(peer_job(peer))


def test_a_module_that_hides_the_checkouts_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    peer = peer_of(here, "right")
    module, _, _ = peer.function.partition(":")
    (there / f"{module}.py").write_text(CODE, encoding="utf-8")
    monkeypatch.syspath_prepend(str(there))
    importlib.import_module(module)  # as a neighbour of another peer would have
    with pytest.raises(ValueError, match=f"wanted {here / module}"):
        run(peer_job(peer))


def test_a_checkout_without_the_module_is_not_served_by_an_installed_one(tmp_path: Path) -> None:
    (tmp_path / "email").mkdir()
    (tmp_path / "email" / "__init__.py").touch()
    found = located(
        Peer(name="dense_mail", kind="dense", function="email.utils:quote", folder=str(tmp_path))
    )
    assert f"the checkout {tmp_path} holds no module email.utils" in found.absent


def test_a_peer_runs_by_the_kernels_that_it_declares(tmp_path: Path) -> None:
    """On a GPU: names as profilers showed them."""
    fa4, fa3 = _BUILT_IN["dense_fa4"], _BUILT_IN["dense_fa3"]
    ran = {
        "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at_": 1,
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>": 1,
    }
    assert witness_of(fa4, ran, on_gpu=True)[0]
    ok, sentence = witness_of(fa3, ran, on_gpu=True)
    assert not ok and "dense_fa3 declares kernels of the name 'FlashAttnFwdSm90'" in sentence
    dense = {"void pytorch_flash::flash_fwd_kernel<...>": 1, "cudnn_generated_fort_native_sdpa": 1}
    assert not witness_of(fa3, dense, on_gpu=True)[0]
    assert not witness_of(
        fa4, {"cudnn_generated_fort_native_sdpa_sm90_flash_fprop": 1}, on_gpu=True
    )[0]
    assert witness_of(fa3, {}, on_gpu=False)[0]


@pytest.mark.parametrize("window", [None, 1, 100, 128, 200, 1000])
@pytest.mark.parametrize("tokens", [40, 256, 300])
def test_flex_block_masks_are_the_band(tokens: int, window: int | None) -> None:
    """Each block that is not listed holds no key of the band, and each full one no other."""
    mask = flex.block_mask(tokens, window, torch.device("cpu"))
    at = torch.arange(tokens)
    band = (at[:, None] >= at) & (at[:, None] - at < (window or tokens))
    J = -(-tokens // flex.BLOCK)
    listed = torch.zeros(J, J, dtype=torch.long)
    for counts, index, mark in (
        (mask.kv_num_blocks, mask.kv_indices, 1),
        (mask.full_kv_num_blocks, mask.full_kv_indices, 2),
    ):
        for row in range(J):
            listed[row, index[0, 0, row, : counts[0, 0, row]].long()] += mark
    padded = torch.zeros(J * flex.BLOCK, J * flex.BLOCK, dtype=torch.bool)
    padded[:tokens, :tokens] = band
    real = torch.zeros_like(padded)
    real[:tokens, :tokens] = True
    held = padded.unflatten(0, (J, -1)).unflatten(2, (J, -1)).transpose(1, 2).flatten(2)
    there = real.unflatten(0, (J, -1)).unflatten(2, (J, -1)).transpose(1, 2).flatten(2)
    assert ((listed > 0) == held.any(-1)).all()
    assert (held | ~there)[listed == 2].all()
    assert (create_mask(mask.mask_mod, 1, 1, tokens, tokens, device="cpu")[0, 0] == band).all()


def test_flex_runs_here_and_is_proved() -> None:
    """Causal by SDPA, which shares no code with it; and a cell of it, which is forward alone."""
    q = torch.randn(1, 70, 4, 16)
    k, v = torch.randn(2, 1, 70, 2, 16).unbind(0)
    o = flex.causal(q, k, v, scale=0.25)
    heads_first = (x.transpose(1, 2) for x in (q, k, v))
    keep = torch.ones(70, 70, dtype=torch.bool).tril()
    wanted = scaled_dot_product_attention(*heads_first, attn_mask=keep, enable_gqa=True, scale=0.25)
    assert torch.allclose(o, wanted.transpose(1, 2), atol=1e-5)
    row = run(peer_job(_BUILT_IN["flex_window"], "attention_forward"))
    assert (row.status, row.reason, {*row.engaged}) == (Status.OK, "", {"peer.flex_window"})


def test_blocks_come_in_any_order() -> None:
    blocks = torch.tensor([[7, 0, -1, 3, -1]])
    assert ascending(blocks).tolist() == [[0, 3, 7, -1, -1]]
