"""How far a cell's own output and gradients are from the fp64 oracle's, over what their dtype
allows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from perfbench.records import ParityLine
from perfbench.worker.parity.blocks import BlocksProof
from perfbench.worker.parity.judges import Attend, plain_attention, reference_attention

Tensors = dict[str, Tensor]


class ParityComparison:
    """Error over tolerance of each tensor, by NSA.md's rule for the dtype; of a tensor that is
    added again, the worse.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.ratios: dict[str, float] = {}
        self.selection: dict[str, float] = {}
        self._errors: dict[str, tuple[float, float]] = {}

    def add(self, name: str, got: Tensor, reference: Tensor, plain: Tensor) -> None:
        """``plain`` is what plain softmax attention gives in the same dtype: how far an
        implementation without a fault is off.
        """
        got, reference, plain = (x.detach().cpu().double() for x in (got, reference, plain))
        size = reference.abs().max().item()
        tolerance = 1e-5 * max(1.0, size)
        if self.dtype != torch.float32:
            rounding = (
                2 * (plain - reference).abs().max().item() + torch.finfo(self.dtype).eps / 2 * size
            )
            # a gradient of exactly 0 may come out as the rest of an fp32 subtraction
            tolerance = max(tolerance, rounding)
        error = (got - reference).abs().max().item()
        error = min(error, 1e9) if error == error else 1e9  # NaN never passes
        if (ratio := min(error / tolerance, 1e9)) >= self.ratios.get(name, 0.0):
            self._errors[name], self.ratios[name] = (error, tolerance), ratio

    def evaluated(
        self,
        cell: Callable[[Tensors], Tensor],
        inputs: Tensors,
        rows: Tensor,
        wanted: Collection[str],
    ) -> Tensors:
        """The output of ``cell`` on ``rows``, and its gradient by each ``wanted`` input."""
        q, weight = inputs["q"], _weight(inputs, rows)
        return _evaluate(lambda t: cell(t)[:, rows], inputs, q.dtype, weight, wanted)

    def attention(
        self,
        got: Tensors,
        judged: Callable[[Attend], Callable[[Tensors], Tensor]],
        inputs: Tensors,
        rows: Tensor,
        wanted: Collection[str],
    ) -> None:
        """Add what `evaluated` gave; ``judged`` is the same by plain attention."""
        q, weight = inputs["q"], _weight(inputs, rows)
        # The judge sits on the CPU: no kernel is shared with what it judges, and none has to be
        # loaded for it.
        reference = _evaluate(
            judged(reference_attention),
            {name: x.cpu() for name, x in inputs.items()},
            torch.float64,
            weight,
            wanted,
        )
        plain = _evaluate(judged(plain_attention), inputs, q.dtype, weight, wanted)
        for name in reference:
            self.add(name, got[name], reference[name], plain[name])

    def add_blocks(self, proof: BlocksProof) -> None:
        """Rows of blocks that nothing explains: none is allowed, so one is twice too many.

        A search must also beat chance.
        """
        wrong = max(float(proof.wrong_rows), self._errors.get("blocks", (0.0, 0.5))[0])
        self._errors["blocks"], self.ratios["blocks"] = (wrong, 0.5), 2.0 * wrong
        if proof.missed is None or proof.missed_by_chance is None:
            self.selection = proof.report
        elif (
            ratio := min(proof.missed / max(proof.missed_by_chance, 1e-9), 1e9)
        ) >= self.ratios.get("recall", 0.0):
            self._errors["recall"], self.ratios["recall"] = (
                (proof.missed, proof.missed_by_chance),
                ratio,
            )
            self.selection = proof.report

    def add_decided(self, found: int, wanted: int) -> None:
        """How many choices of blocks no rounding can change were compared, where none was given to
        judge; each that lacks is twice too many.
        """
        lacking = float(max(0, wanted - found))
        if 2.0 * lacking >= self.ratios.get("decided", 0.0):
            self._errors["decided"], self.ratios["decided"] = (lacking, 0.5), 2.0 * lacking

    def line(self, tokens: int, rows: int, *, own_length: bool) -> ParityLine:
        worst = max(self.ratios, key=lambda name: self.ratios[name])
        error, tolerance = self._errors[worst]
        options: dict[str, Any] = {"own_length": own_length, "selection": self.selection or None}
        return ParityLine(
            ok=all(ratio <= 1 for ratio in self.ratios.values()),
            tokens=tokens,
            rows=rows,
            max_error=error,
            tolerance=tolerance,
            tensors={name: round(ratio, 4) for name, ratio in self.ratios.items()},
            worst=f"{worst}: error / tolerance {self.ratios[worst]:.3g}",
            **options,
        )


def _weight(inputs: Tensors, rows: Tensor) -> Tensor:
    """The upstream gradient of ``rows``, [B, R, HQ, DV]."""
    q, v = inputs["q"], inputs["v_sel"]
    shape = (q.shape[0], len(rows), q.shape[2], v.shape[3])
    return torch.randn(shape, generator=torch.Generator().manual_seed(7))


def _evaluate(
    fn: Callable[[Tensors], Tensor],
    inputs: Tensors,
    dtype: torch.dtype,
    weight: Tensor,
    wanted: Collection[str],
) -> Tensors:
    """The output ``o``, and the gradient of a random functional of it by each wanted input."""
    leaves = {
        name: x.detach().to(dtype).requires_grad_(name in wanted) for name, x in inputs.items()
    }
    o = fn(leaves)
    # A path that loses a gradient altogether is a wrong number (0), not a crash.
    options = {"allow_unused": True, "materialize_grads": True}
    grads = (
        torch.autograd.grad(o, [leaves[name] for name in wanted], weight.to(o), **options)
        if wanted
        else ()
    )
    return {"o": o.detach(), **{f"d{name}": grad for name, grad in zip(wanted, grads, strict=True)}}
