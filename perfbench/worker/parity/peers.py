"""Proof of a peer: the same rows, tolerances and oracles as of nsa's own paths, over what its kind
says that it computes.

The blocks of an NSA peer that returns them are judged as nsa's own are, with what rounding q and
the compressed keys to the cell's dtype may change: libraries score in that dtype. Of one that does
not, only such queries of a KV head are compared whose choice no rounding can change.

B batch, T tokens, R rows, G kv heads, HQ query heads, N blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nsa import oracle
from nsa.config import BRANCHES, NSAConfig
from perfbench.records import Peer, torch_dtype_name
from perfbench.worker.parity.blocks import closeness, judge
from perfbench.worker.parity.claim import Claim
from perfbench.worker.parity.comparison import ParityComparison, Tensors
from perfbench.worker.parity.judges import Attend
from perfbench.worker.parity.own import Own, Recorded, gated, kv_cmp
from perfbench.worker.peers.call import THREE, PeerAttention, ascending

# Rows are looked through for decided ones, so many times as many as are compared.
LOOKED_THROUGH = 16
MIN_DECIDED = 16  # choices of a query and a KV head, among those that leave a block out


class RecordedPeer(Recorded):
    """A peer as a proof runs it, with the blocks that its last call returned, ascending."""

    def __init__(self, module: PeerAttention, names: tuple[str, ...]) -> None:
        super().__init__(lambda t: module(*(t[name] for name in names)))
        self._module = module

    def __call__(self, t: Tensors) -> Tensor:
        o = self._function(t)
        blocks = self._module.blocks
        self.blocks, self.shows_blocks = None, blocks is not None
        if blocks is not None:
            self.blocks = ascending(blocks)
        return o


def proof_names(peer: Peer) -> tuple[str, ...]:
    """The inputs of a peer, in the order of its contract, as a proof calls them; one K and V are
    those of the selected branch.
    """
    if peer.kind == "nsa":
        return THREE if peer.kv == "three" else ("q", "k_sel", "v_sel", "gates")
    return ("q", "k_win", "v_win") if peer.kind == "window" else ("q", "k_sel", "v_sel")


def branches_of(peer: Peer) -> tuple[str, ...]:
    """The branches that a peer's function holds, as `identities` takes them: full causal attention
    is a selected branch that leaves nothing out.
    """
    return {"dense": ("sel",), "window": ("win",), "nsa": BRANCHES}[peer.kind]


def own_of_peer(claim: Claim, peer: Peer) -> Own:
    """What the peer computes of the tensors of a proof."""
    run = RecordedPeer(PeerAttention(claim.model, peer), proof_names(peer))
    return Own(run, None, run)


def check_peer(
    claim: Claim, peer: Peer, inputs: Tensors, rows: Tensor, compare: ParityComparison
) -> Own:
    """Add what the peer gives of ``inputs`` on ``rows``: output, gradients where the cell has a
    backward, and the blocks of an NSA peer that returns them.
    """
    own, names = own_of_peer(claim, peer), proof_names(peer)
    wanted = names if claim.cell.has_backward else ()
    if peer.kind == "nsa":
        _check_nsa(_Nsa(claim, peer, inputs, compare), own, rows, wanted)
        return own
    tokens = inputs["q"].shape[1]
    keep = (
        oracle.causal_mask(rows[None], tokens)
        if peer.kind == "dense"
        else oracle.sliding_mask(rows[None], tokens, claim.model.nsa.window)
    )
    _, k, v = names

    def judged(attend: Attend) -> Callable[[Tensors], Tensor]:
        return lambda t: attend(t["q"][:, rows], t[k], t[v], keep.to(t["q"].device))

    got = compare.evaluated(own.run, inputs, rows, wanted)
    compare.attention(got, judged, inputs, rows, wanted)
    return own


@dataclass(frozen=True, slots=True)
class _Nsa:
    """A proof of an NSA peer."""

    claim: Claim
    peer: Peer
    inputs: Tensors
    compare: ParityComparison

    @property
    def config(self) -> NSAConfig:
        """Of the choice: the exact top n, scored in the cell's dtype."""
        nsa, tokens = self.claim.model.nsa, self.inputs["q"].shape[1]
        return replace(
            nsa,
            num_selected=nsa.num_selected_for(tokens),
            adaptive_num_selected=False,
            score_dtype=torch_dtype_name(self.claim.cell.dtype),
        )

    def branches(self, t: Tensors) -> Tensors:
        """``t`` with K and V of each branch: of a peer with one pair those, three times."""
        if self.peer.kv == "three":
            return t
        return {**t, **{f"{x}_{b}": t[f"{x}_sel"] for x in ("k", "v") for b in BRANCHES}}

    def keys(self) -> Tensor:
        """Compressed keys [B, C, G, D] on the CPU, wide, so that it counts as rounded."""
        return kv_cmp(self.claim.model, self.branches(self.inputs))[0].cpu().float()

    def queries(self, rows: Tensor) -> Tensor:
        return self.inputs["q"][:, rows].cpu().float()


def _check_nsa(proof: _Nsa, own: Own, rows: Tensor, wanted: tuple[str, ...]) -> None:
    with torch.no_grad():
        own.run(proof.inputs)
    if own.run.shows_blocks:
        got = proof.compare.evaluated(own.run, proof.inputs, rows, wanted)
        assert own.run.blocks is not None
        blocks = own.run.blocks[:, rows.to(own.run.blocks.device)].cpu().long()
        proof.compare.add_blocks(
            judge(
                proof.queries(rows),
                proof.keys(),
                blocks,
                config=proof.config,
                rows=rows,
                kv_len=proof.inputs["q"].shape[1],
            )
        )
        mask = None
    else:
        rows, blocks, mask = _decided(proof, rows)
        got = proof.compare.evaluated(_masked(own.run, mask, rows), proof.inputs, rows, wanted)
    model = proof.claim.model

    def judged(attend: Attend) -> Callable[[Tensors], Tensor]:
        def of_rows(t: Tensors) -> Tensor:
            o = gated(proof.branches(t), model, blocks, rows, attend)
            return o if mask is None else o * mask.to(o)

        return of_rows

    proof.compare.attention(got, judged, proof.inputs, rows, wanted)


def _masked(
    run: Callable[[Tensors], Tensor], mask: Tensor, rows: Tensor
) -> Callable[[Tensors], Tensor]:
    """``run`` with its output of ``rows`` times ``mask`` [B, R, HQ, 1]; NaN stays NaN."""

    def masked(t: Tensors) -> Tensor:
        o = run(t)
        whole = torch.ones_like(o[..., :1]).detach()
        whole[:, rows.to(o.device)] = mask.to(o)
        return o * whole

    return masked


def _decided(proof: _Nsa, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(rows [R], at most as many as given; the exact blocks [B, R, G, N] of them; whether the
    choice of each head is decided [B, R, HQ, 1]).

    Decided: the last chosen score exceeds the next by more than rounding can change. Adds an error
    where too few choices that leave a block out are.
    """
    tokens, config, keys = proof.inputs["q"].shape[1], proof.config, proof.keys()
    drawn = torch.randperm(tokens, generator=torch.Generator().manual_seed(proof.claim.seed))
    looked = torch.cat([rows, drawn[: LOOKED_THROUGH * len(rows)]]).unique()
    found = []
    for part in looked.split(len(rows)):
        q = proof.queries(part)
        blocks, gap = oracle.select(q, keys, config=config, kv_len=tokens, positions=part[None])
        # gap is 1 - next / last, and inf where every candidate has a slot
        decided = (1 - gap) * closeness(q, keys, config, part) < 1
        found.append((part, blocks, decided, gap.isfinite()))
    every, blocks, decided, competes = (
        torch.cat([one[i] for one in found], 0 if i == 0 else 1) for i in range(4)
    )
    telling = (decided & competes).sum((0, 2))
    most = every[telling.argsort(descending=True, stable=True)]
    # every other row that was asked for, which are block edges, too, and the most telling others
    kept = torch.cat([rows[::2], most[~torch.isin(most, rows[::2])]])[: len(rows)]
    best = torch.searchsorted(every, kept.sort().values)
    proof.compare.add_decided(int(telling[best].sum()), int(competes.any()) * MIN_DECIDED)
    heads = proof.claim.model.num_heads // proof.claim.model.num_kv_heads
    of_groups = decided[:, best][..., None]
    mask = of_groups.expand(*of_groups.shape[:-1], heads).flatten(-2)[..., None]
    return every[best], blocks[:, best], mask
