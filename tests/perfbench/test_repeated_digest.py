"""Every replicate repeats the digest of the proof's call; the gate compares those of one card."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import settings
from nsa.config import preset
from nsa.ops import selected
from nsa.routing import Capability, Path
from perfbench.errors import Exit
from perfbench.gate.judging import judge
from perfbench.matrix import route_of
from perfbench.matrix.policy import GatePolicy
from perfbench.records import Cell, Job, LengthProof, Replicate
from perfbench.records.rows import Run, Status
from perfbench.records.verdict import Verdict
from perfbench.worker.parity import at_length, proof
from perfbench.worker.parity.at_length import why_no_digest
from perfbench.worker.parity.claim import Claim
from tests.perfbench import builders as b
from tests.perfbench import measure_cases
from tests.perfbench.edits import reason_of, verdict_of
from tests.perfbench.jobs import job

TINY = preset("tiny")
H100 = Capability(
    "cuda", "H100", (9, 0), "torch 2.13.0", "", "2.13.0", triton_provider="triton 3.7"
)
TRAIN = "fa2=on,path=v2,seq_len=2048,workload=train"
ONE, OTHER = "1a" * 32, "2b" * 32


# --- what is measured


def asked(replicate: int, path: str = "masked", **changes: Any) -> Job:
    """A job of ``replicate``, whose own seed is another than the proof's."""
    options = {"replicate": replicate, "seed": 40 + replicate, "proof_seed": 40, **changes}
    return job(path, options.pop("workload", "train"), 128, proof=measure_cases.PROOF, **options)


def digest_of(replicate: int, **changes: Any) -> LengthProof:
    row = measure_cases.run(asked(replicate, **changes))
    assert row.status is Status.OK and row.length_proof is not None
    return row.length_proof


@pytest.mark.parametrize(
    ("workload", "path"), [("train", "masked"), ("forward", "v2"), ("attention", "v2")]
)
def test_replicates_repeat_the_digest_of_the_proof_whatever_their_own_seed(
    workload: str, path: str
) -> None:
    proved, again = (digest_of(r, workload=workload, path=path) for r in (0, 1))
    assert proved.ok is True and again.ok is None and "replicate 0 has the proof" in again.absent
    assert proved.digest is not None and len(proved.digest) == 64
    assert again.digest == proved.digest
    assert (again.tokens, again.batch) == (proved.tokens, proved.batch) == (128, 1)


def test_other_inputs_have_another_digest() -> None:
    line = at_length.repeat_digest(claim("masked"))
    assert line.digest == at_length.repeat_digest(claim("masked")).digest
    assert line.digest != at_length.repeat_digest(replace(claim("masked"), seed=41)).digest


@pytest.mark.parametrize(
    "axes",
    [
        {"path": "dense"},
        {"path": "v1"},
        {"path": "v2", "dtype": "bf16", "batch": 2},
        {"path": "masked", "workload": "selected", "selection": "random"},
        {"path": "v2", "workload": "selected_forward", "selection": "own"},
    ],
    ids=str,
)
def test_the_proof_and_what_repeats_it_have_one_digest(axes: dict[str, Any]) -> None:
    asked = claim(**axes)
    proved = at_length.prove_at_length(asked)
    assert proved.ok and proved.digest == at_length.repeat_digest(asked).digest is not None


def test_a_cell_with_a_cache_says_why_it_has_none() -> None:
    cached = claim("v2", workload="decode")
    for line in (at_length.prove_at_length(cached), at_length.repeat_digest(cached)):
        assert line.ok is None and line.digest is None and "as it is timed" in line.no_digest


@pytest.mark.parametrize("which", ["o", "dk"])
def test_one_bit_of_another_replicate_is_another_digest(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    proved, plain = digest_of(0), selected.PATHS[Path.MASKED]
    unit = torch.finfo(torch.float32).eps

    def attend(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, **options: Any) -> Any:
        if which == "dk":  # forward as it was
            k = k.detach() + (1 + unit) * (k - k.detach())
        o, lse = plain(q, k, v, blocks, **options)
        one = torch.zeros_like(o)
        one[0, 100, 0, 0] = 2**-20
        return (o + one if which == "o" else o), lse

    monkeypatch.setitem(selected.PATHS, Path.MASKED, attend)
    row = measure_cases.run(asked(1))
    assert row.status is Status.OK, "no other check of a later replicate sees it"
    assert row.length_proof is not None and row.length_proof.digest not in (None, proved.digest)


def test_a_replicate_that_proves_nothing_pays_one_forward_and_one_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    plain = selected.PATHS[Path.MASKED]

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            calls.append("backward")
            return grads[0]

    def attend(q: Tensor, *rest: Tensor, **options: Any) -> Any:
        calls.append("forward")
        return plain(Counted.apply(q), *rest, **options)

    monkeypatch.setitem(selected.PATHS, Path.MASKED, attend)
    assert at_length.repeat_digest(claim("masked")).digest is not None
    assert calls == ["forward", "backward"]


# --- who promises it


def claim(path: str, capability: Capability = b.CPU, **axes: Any) -> Claim:
    fa2 = "n/a" if path == "dense" else "off"
    given = {"workload": "train", "seq_len": 128, "dtype": "fp32", "fa2": fa2, **axes}
    cell = Cell(**given, path=path)
    return Claim(TINY, route_of(cell, TINY, settings.current(), capability), cell, "cpu", 40)


def test_the_digest_is_of_paths_that_promise_equal_bits() -> None:
    for path in ("v1", "v2", "masked", "reference", "dense"):
        assert why_no_digest(claim(path)) == ""
    assert why_no_digest(claim("triton", H100)) == ""
    for path, loose in (("masked", "cmp.sdpa, sel.sdpa, win.sdpa"), ("dense", "dense.sdpa")):
        reason = why_no_digest(claim(path, H100))
        assert reason.startswith(f"{loose}: by its Route no backward")
    assert "choose its kernels by timing" in why_no_digest(claim("triton", H100, compile="on"))
    assert "as it is timed" in why_no_digest(claim("v2", workload="decode"))


def test_a_path_without_the_promise_stores_why(monkeypatch: pytest.MonkeyPatch) -> None:
    loose = claim("masked")
    loose = replace(
        loose, timed=replace(loose.timed, branches=claim("masked", H100).timed.branches)
    )
    monkeypatch.setattr(proof, "inputs_of", None)  # nothing is computed
    found = at_length.repeat_digest(loose)
    assert found.digest is None and found.no_digest.startswith("cmp.sdpa, sel.sdpa")


# --- the gate


def with_digests(digests: list[str | None], **others: list[Any]) -> Run:
    """The small run, whose replicates of TRAIN have these digests, and these values of others."""

    def change(row: Replicate) -> Replicate:
        line = LengthProof(ok=None, digest=digests[row.replicate])
        values = {name: given[row.replicate] for name, given in others.items()}
        return row.model_copy(update={"length_proof": line, **values})

    return b.change_rows(b.small_run(), TRAIN, change)


def exit_of(run: Run) -> Exit:
    return judge(run, None, GatePolicy()).exit_code


def test_a_replicate_with_another_digest_is_parity_with_got_and_wanted() -> None:
    assert exit_of(with_digests([ONE] * 3)) is Exit.OK
    assert exit_of(with_digests([None] * 3)) is Exit.OK, "no promise"
    judgement = judge(with_digests([ONE, ONE, OTHER]), None, GatePolicy())
    assert verdict_of(judgement, TRAIN) is Verdict.PARITY
    assert judgement.exit_code is Exit.NOT_TRUE
    reason = reason_of(judgement, TRAIN)
    assert "have the digest 2b2b2b2b2b2b2b2b (replicate 2); wanted 1a1a1a1a1a1a1a1a" in reason
    assert "as in replicate 0" in reason


def test_a_replicate_without_the_digest_that_its_proof_has_is_parity() -> None:
    judgement = judge(with_digests([ONE, None, ONE]), None, GatePolicy())
    assert verdict_of(judgement, TRAIN) is Verdict.PARITY
    assert "replicate 1 has no digest of the proof's inputs" in reason_of(judgement, TRAIN)


def test_only_rows_of_one_card_are_compared() -> None:
    mine, its = "ab" * 32, "cd" * 32
    cards: dict[str, list[Any]] = {"device_uuid_sha256": [mine, its, its]}
    elsewhere = b.environment(gpu_uuid_sha256=its)
    alike = with_digests([ONE, OTHER, OTHER], **cards)
    assert exit_of(b.resumed(alike, environment=elsewhere)) is Exit.OK
    judgement = judge(
        b.resumed(with_digests([ONE, OTHER, ONE], **cards), environment=elsewhere),
        None,
        GatePolicy(),
    )
    assert verdict_of(judgement, TRAIN) is Verdict.PARITY
    assert "as in replicate 1" in reason_of(judgement, TRAIN)


def test_rows_of_a_cpu_are_compared_within_a_session() -> None:
    early, late = "2026-01-02T03:04:05+00:00", "2026-01-02T05:00:00+00:00"
    cells = b.cpu_cells()
    first = cells[0].cell_id

    def run(digests: list[str]) -> Run:
        def change(row: Replicate) -> Replicate:
            line = LengthProof(ok=None, digest=digests[row.replicate])
            began = early if row.replicate == 0 else late
            return row.model_copy(update={"length_proof": line, "started_utc": began})

        return b.change_rows(b.make_run(cells, gpu=False), first, change)

    same = [ONE] + [OTHER] * 4
    assert exit_of(run(same)) is Exit.NOT_TRUE
    assert exit_of(b.resumed(run(same), resumed_utc="2026-01-02T04:00:00+00:00")) is Exit.OK


def test_a_stored_proof_at_the_timed_length_that_failed_is_parity() -> None:
    stored = LengthProof(ok=True, tokens=2048, batch=1, worst="keys dv_sel: off by 2")
    for change in ({"ok": False}, {"tensors": {"keys dv_sel": 1.5}}):
        proof_line = stored.model_copy(update=change)
        run = b.change_rows(
            b.small_run(),
            TRAIN,
            lambda row, line=proof_line: row.model_copy(update={"length_proof": line}),
        )
        judgement = judge(run, None, GatePolicy())
        assert verdict_of(judgement, TRAIN) is Verdict.PARITY
        assert "at the timed 1 x 2048 tokens: keys dv_sel" in reason_of(judgement, TRAIN)
