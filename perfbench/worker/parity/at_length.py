"""Proof of the attention function at the timed length and batch, and the digest by which every
other replicate of the cell shows that it computes the same.

Decode and chunked prefill have neither. Their step goes through a cache and is proved as it is
timed, on a cache of its own length, in every replicate that is short enough (`step_proof`); it has
no backward. `proof.prove` takes the attention function through a cache, at its own length.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from perfbench.records import LengthProof, ParityLine
from perfbench.worker.parity import key_blocks, proof
from perfbench.worker.parity.backward import DenseBackward, Tensors
from perfbench.worker.parity.claim import Claim
from perfbench.worker.parity.comparison import ParityComparison
from perfbench.worker.parity.identities import Identities
from perfbench.worker.parity.own import Own, Recorded
from perfbench.worker.parity.peers import branches_of, proof_names

MIN_ROWS = 8
MAX_LOGITS = 2**25  # of the sampled rows, in fp64: beyond, the judge takes longer than the cell
THROUGH_CACHE = "the step through a cache is proved as it is timed"


@dataclass(frozen=True, slots=True)
class _Call:
    """The cell's own function of ``inputs``, those that it reads; it is given ``rest`` besides."""

    own: Own
    inputs: Tensors
    rest: Tensors
    branches: tuple[str, ...]

    @property
    def shares_kv(self) -> bool:
        """Whether all branches have the K and V of one."""
        return any(f"k_{branch}" not in self.inputs for branch in self.branches)

    def run(self, t: Tensors) -> Tensor:
        return self.own.run({**self.rest, **t})


def prove_at_length(claim: Claim) -> LengthProof:
    """The attention function at the timed length and batch: sampled rows against the fp64 oracle,
    output and gradients; what all rows together must keep (`identities`); and with a dense upstream
    gradient exact dK and dV of a few key blocks over all queries (`key_blocks`).
    """
    begin, cell = time.monotonic(), claim.cell
    if claim.chunk is not None:
        return LengthProof(ok=None, absent=THROUGH_CACHE, no_digest=THROUGH_CACHE)
    rows = _rows(claim)
    compare = ParityComparison(claim.dtype)
    inputs = proof.inputs_of(claim, cell.batch, cell.seq_len)
    call = _call(claim, inputs, proof.check(claim, cell.path, inputs, rows, compare))
    sums = Identities(
        call.run,
        call.inputs,
        call.branches,
        claim.model.nsa if "gates" in call.inputs else None,
        shared=call.shares_kv,
    )
    sums.check_outputs()
    backward: DenseBackward | None = None
    if cell.has_backward:
        backward, differentiated = _differentiated(claim, call)
        sums.check_gradients(rows, backward)
        if not call.shares_kv:  # whose gradients are sums that no branch has by itself
            sums.ratios |= key_blocks.check(differentiated, backward, claim.seed)
    line = _with_slack(claim, compare.line(cell.seq_len, len(rows), own_length=True))
    ratios = {name: error / tolerance for name, (error, tolerance) in sums.ratios.items()}
    tensors = line.tensors | {name: round(min(ratio, 1e9), 4) for name, ratio in ratios.items()}
    worst = line.worst
    if ratios and max(ratios.values()) > max(line.tensors.values(), default=0.0):
        name = max(ratios, key=lambda one: ratios[one])
        error, tolerance = sums.ratios[name]
        worst = f"{name}: off by {error:.3g}, wanted at most {tolerance:.3g}"
    no_digest = why_no_digest(claim)
    return LengthProof(
        ok=all(ratio <= 1 for ratio in tensors.values()),
        tokens=cell.seq_len,
        batch=cell.batch,
        rows=len(rows),
        tensors=tensors,
        worst=worst,
        digest=None if no_digest else _digest(call, backward),
        no_digest=no_digest,
        seconds=time.monotonic() - begin,
    )


def repeat_digest(claim: Claim) -> LengthProof:
    """Of a replicate that proves nothing itself: the digest of the same inputs, for the gate to
    compare with that of the proof.

    One forward, and one backward where the cell has one, besides making the inputs and hashing what
    came out (some 1.5 GB/s). ``claim.seed`` must be the proof's.
    """
    begin, cell = time.monotonic(), claim.cell
    absent = "replicate 0 has the proof; this one repeats its digest"
    if no_digest := why_no_digest(claim):
        return LengthProof(ok=None, absent="replicate 0 has the proof", no_digest=no_digest)
    inputs = proof.inputs_of(claim, cell.batch, cell.seq_len)
    call = _call(claim, inputs, proof.own_of(claim, cell.path, inputs, _rows(claim)))
    return LengthProof(
        ok=None,
        absent=absent,
        tokens=cell.seq_len,
        batch=cell.batch,
        digest=_digest(call, DenseBackward(call.run, call.inputs) if cell.has_backward else None),
        seconds=time.monotonic() - begin,
    )


def why_no_digest(claim: Claim) -> str:
    """Why two processes may give other bits of the same inputs; '' where the path promises that
    they do not.
    """
    if claim.chunk is not None:
        return THROUGH_CACHE
    loose = [branch for branch in claim.timed.branches if not branch.repeatable]
    if loose:
        names = ", ".join(f"{branch.branch}.{branch.kernel}" for branch in loose)
        return f"{names}: by its Route no backward of it repeats bit for bit"
    if claim.compiled:
        return "torch.compile may choose its kernels by timing them: other processes, other bits"
    return ""


def _rows(claim: Claim) -> Tensor:
    """The sampled rows; of many long sequences fewer of each."""
    cell = claim.cell
    rows = proof.sampled_rows(claim.model.nsa, cell.seq_len, claim.seed)
    fits = MAX_LOGITS // (cell.batch * cell.seq_len * claim.model.num_heads)
    if fits >= len(rows):
        return rows
    few = torch.linspace(0, len(rows) - 1, max(MIN_ROWS, fits)).round().long().unique()
    return rows[few]


def _call(claim: Claim, inputs: Tensors, own: Own) -> _Call:
    branches: tuple[str, ...] = ("sel",)
    names: tuple[str, ...] = ("q", "k_sel", "v_sel")
    if claim.peer is not None:
        branches, names = branches_of(claim.peer), proof_names(claim.peer)
    elif not claim.selected_alone and not claim.cell.is_dense:
        branches = claim.model.nsa.branches
        names = tuple(n for n in inputs if n[2:] not in {"cmp", "sel", "win"} - {*branches})
    read = {name: inputs[name] for name in names}
    rest = {name: x for name, x in inputs.items() if name not in names}
    return _Call(own, read, rest, branches)


def _differentiated(claim: Claim, call: _Call) -> tuple[DenseBackward, key_blocks.Differentiated]:
    """The gradients of a dense upstream gradient, and what they are of: with the blocks of this
    very call, or where those are hidden, of the same call uncompiled.
    """
    own, hidden = call.own, False
    backward = DenseBackward(call.run, call.inputs)
    blocks, branches = own.run.blocks, call.branches
    if claim.peer is not None and claim.peer.kind == "nsa" and blocks is None:
        # its choice is not known: the branch has the proof of its sampled rows
        branches = tuple(branch for branch in branches if branch != "sel")
    elif claim.selected_alone and own.blocks is not None:
        blocks = own.blocks()
    elif not own.run.shows_blocks and own.blocks is not None and "sel" in call.branches:
        hidden, uncompiled = True, Recorded(own.uncompiled)
        with torch.no_grad():
            uncompiled({**call.rest, **call.inputs})
        blocks = uncompiled.blocks if uncompiled.shows_blocks else own.blocks()
    return backward, key_blocks.Differentiated(claim.model, call.inputs, branches, blocks, hidden)


def _with_slack(claim: Claim, line: ParityLine) -> ParityLine:
    """A library's dense kernel may sum the gradients of keys in the cell's dtype: 1.1 of the
    tolerance was seen of bf16 on a CPU.
    """
    library = claim.cell.is_dense or (claim.peer is not None and claim.peer.kind == "window")
    slack = 2.0 if library and claim.dtype != torch.float32 else 1.0
    return line.model_copy(update={"tensors": {n: r / slack for n, r in line.tensors.items()}})


def _digest(call: _Call, backward: DenseBackward | None) -> str:
    """sha256 of the output, and of the gradient of a dense upstream gradient by each input, name,
    dtype and shape included.
    """
    if backward is None:
        with torch.no_grad():
            tensors = {"o": call.run(call.inputs)}
    else:
        grads = {f"d{name}": grad for name, grad in backward.grads.items()}
        tensors = {"o": backward.o, **grads}
    found = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        found.update(f"{name} {x.dtype} {tuple(x.shape)}\n".encode())
        found.update(x.contiguous().cpu().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()
