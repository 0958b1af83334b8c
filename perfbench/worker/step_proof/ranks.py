"""What the proof of a step on several ranks exchanges: each rank's sequences, blocks and loss, and
a digest of the gradients that it holds after the reduction.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from perfbench.worker.ranks.world import Ranks
from perfbench.worker.step_proof.compare import LOSS_TOLERANCE, Ratios
from perfbench.worker.step_proof.twin import TwinStep

_RIGHT, _WRONG, _UNKNOWN = 0.0, 1.0, 2.0  # what rank 0 found of its gradients
# Cosine between the error and a rank's own gradient, from which that rank's share is blamed.
ALIKE = 0.9
Gradients = Mapping[str, Tensor | None]


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of the global batch: ``ids`` and ``labels`` [B, T], ``layers`` the blocks of
    each layer; ``digest`` of the whole reduced gradients. ``began_alike``: with rank 0's weights.
    """

    ids: Tensor
    labels: Tensor
    loss: float
    layers: Sequence[Tensor | None] | None
    digest: str
    began_alike: bool


def digest_of(gradients: Gradients) -> str:
    """Of all bits: a reduction gives every rank the same ones."""
    found = hashlib.sha256()
    for name, x in sorted(gradients.items()):
        found.update(name.encode())
        if x is not None:
            found.update(x.detach().contiguous().view(torch.uint8).cpu().numpy().data)
    return found.hexdigest()


@torch.no_grad()
def begin_alike(ranks: Ranks, parameters: Mapping[str, Tensor], weights: dict[str, Tensor]) -> bool:
    """Whether this rank's whole ``weights`` are rank 0's; where any rank's are not, all take them.

    So the proved step shows which rank's reduction is wrong, not the trace of an earlier one.
    """
    digest, held = digest_of(weights), ranks.folder / "weights.pt"
    if ranks.rank == 0:
        (ranks.folder / "weights.sha256").write_text(digest, encoding="utf-8")
    ranks.agree()
    same = digest == (ranks.folder / "weights.sha256").read_text(encoding="utf-8")
    if not ranks.agree(float(not same)):
        return True
    if ranks.rank == 0:
        torch.save(weights, held)
    ranks.agree()
    for name, x in torch.load(held, map_location="cpu", weights_only=True).items():
        parameters[name].copy_(x)
        weights[name].copy_(x)
    return same


@contextmanager
def exchange(ranks: Ranks, share: Share, device: str, compare: Ratios) -> Iterator[Sequence[Share]]:
    """The shares of all ranks; inside, rank 0 adds to ``compare`` whether its gradients are right.

    Then each other rank adds whether it holds the same ones, so that the rank that holds others is
    the one that is red.
    """
    files = [ranks.folder / f"share-{rank}.pt" for rank in range(ranks.size)]
    torch.save(asdict(share), files[ranks.rank])
    ranks.agree()
    wanted = files if ranks.rank == 0 else files[:1]
    shares = [Share(**torch.load(one, map_location=device, weights_only=True)) for one in wanted]
    word = _UNKNOWN if ranks.rank == 0 else _RIGHT
    try:
        yield shares
        if ranks.rank == 0:
            word = _RIGHT if compare.ok else _WRONG
    finally:
        word = ranks.agree(word)
    if ranks.rank > 0 and word != _WRONG:
        same = share.digest == shares[0].digest
        compare.add(
            "gradients",
            0.0 if same else 1e9,
            "they are rank 0's" if same else "after the reduction it holds others than rank 0",
        )
        if not share.began_alike:
            compare.add("weights", 1e6, "before this step they were others than rank 0's")


@dataclass(slots=True)
class Reduced:
    """``got``, the gradients that a rank holds after the reduction, against the mean of the twin's
    over the shares.
    """

    got: Gradients
    losses: list[float] = field(default_factory=list)
    twins: list[tuple[float, float]] = field(default_factory=list)  # the losses, wide and own
    shares: list[dict[str, Tensor]] = field(default_factory=list)  # of the wide twin
    own: dict[str, Tensor] = field(default_factory=dict)  # the sums of the other's

    def add(self, loss: float, wide: TwinStep, own: TwinStep) -> None:
        """A share whose rank gave ``loss``."""
        assert wide.loss is not None and own.loss is not None
        self.losses.append(loss)
        self.twins.append((float(wide.loss), float(own.loss)))
        self.shares.append({name: x for name, x in wide.gradients.items() if x is not None})
        for name, x in own.gradients.items():
            if x is not None:
                before = self.own.get(name)
                self.own[name] = x.float() if before is None else before + x.float()

    def compare(self, compare: Ratios) -> None:
        size = len(self.shares)
        wide: dict[str, Tensor | None] = {
            name: sum((one[name] for one in self.shares[1:]), self.shares[0][name]) / size
            for name in self.shares[0]
        }
        own: dict[str, Tensor | None] = {
            name: x.div(size).to(compare.dtype) for name, x in self.own.items()
        }
        mean, *twins = (
            torch.tensor(sum(x) / size, dtype=torch.float64)
            for x in (self.losses, *zip(*self.twins, strict=True))
        )
        floor = LOSS_TOLERANCE * abs(float(twins[0]))
        compare.tensor("loss", "the loss of the global batch", mean, *twins, floor=floor)
        compare.gradients(self.got, wide, own)
        if compare.ratios["gradients"] > 1:
            compare.where["gradients"] += self._blamed(wide)

    def _blamed(self, wide: Gradients) -> str:
        """Whose share the reduction lost or changed; empty where no share is like the error."""
        errors = {
            name: got.double() - x.double()
            for name, x in wide.items()
            if x is not None and (got := self.got.get(name)) is not None
        }
        size = sum(float(x.square().sum()) for x in errors.values()) ** 0.5
        found = []
        for rank, share in enumerate(self.shares):
            dot = sum(float((x * share[name].double()).sum()) for name, x in errors.items())
            norm = sum(float(share[name].double().square().sum()) for name in errors) ** 0.5
            found.append((abs(dot) / max(size * norm, 1e-300), rank))
        cosine, rank = max(found)
        if cosine < ALIKE:
            return ""
        return f"; the error is like the share of rank {rank} (cosine {cosine:.3f})"
