"""How far a step is from the twin in a wider dtype, over how far the twin in the cell's own dtype
is: the bound that rounding allows.

The twin in the cell's dtype is a healthy implementation that rounds elsewhere, so its error is the
unit of the step's own. Of independent roundings the ratio of the norms is near 1: over 19 configs,
4 kinds of step, fp32 and bf16 it was .7 to 1.3. A part that is left out is off by the order of the
tensor itself, some 100 times the unit in bf16 and 1e6 times in fp32.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

FACTOR = 5.0
FEW = 4.0  # the norms of n errors differ by chance by the order of 1 / sqrt(n)
LOSS_TOLERANCE = 1e-5  # relative: the fp32 loss of given logits


@dataclass(slots=True)
class Ratios:
    """Error over tolerance of each kind (logits, loss, gradients, optimizer, blocks), the worst of
    its tensors; ``where`` says what was worst of a kind.
    """

    dtype: torch.dtype
    ratios: dict[str, float] = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, ratio: float, where: str) -> None:
        ratio = min(ratio, 1e9) if ratio == ratio else 1e9  # NaN never passes
        if kind not in self.ratios or ratio > self.ratios[kind]:
            self.ratios[kind], self.where[kind] = ratio, where

    def tensor(
        self,
        kind: str,
        name: str,
        got: Tensor,
        wide: Tensor,
        own: Tensor,
        *,
        usual: float = 0.0,
        floor: float = 0.0,
    ) -> None:
        """Add ``got`` by the norm of its error.

        ``usual``: the least that the twin's error is taken for, relatively; ``floor`` is added to
        the tolerance.
        """
        if got.shape != wide.shape:
            self.add(kind, 1e9, f"{name} is {tuple(got.shape)}; wanted {tuple(wide.shape)}")
            return
        got, wide, own = (x.detach().double() for x in (got, wide, own))
        size = wide.norm().item()
        unit = max((own - wide).norm().item(), usual * size)
        unit *= 1 + FEW / max(1, wide.count_nonzero().item()) ** 0.5
        tolerance = FACTOR * unit + self._eps * size + floor
        error = (got - wide).norm().item()
        self.add(kind, _over(error, tolerance), _sentence(name, error, tolerance, size))

    def rows(self, kind: str, name: str, got: Tensor, wide: Tensor, own: Tensor) -> None:
        """Add the worst row [..., V] of ``got``: a fault in few rows is lost in the norm of all."""
        if got.shape != wide.shape:
            return
        got, wide, own = (x.detach().flatten(0, -2).double() for x in (got, wide, own))
        size = wide.norm(dim=-1).max().item()
        tolerance = FACTOR * (own - wide).norm(dim=-1).max().item() + self._eps * size
        errors = (got - wide).norm(dim=-1)
        worst = int(errors.nan_to_num(torch.inf).argmax())
        error = errors[worst].item()
        at = f"row {worst} of {name}"
        self.add(kind, _over(error, tolerance), _sentence(at, error, tolerance, size))

    def gradients(
        self,
        got: Mapping[str, Tensor | None],
        wide: Mapping[str, Tensor | None],
        own: Mapping[str, Tensor | None],
    ) -> None:
        """Add each gradient; one that is None is 0, and an error below the rounding of all of them
        together is none.

        A tensor of few numbers may be exact in the twin by chance, so no unit is below the median
        of all.
        """
        norms = [x.double().norm().item() for x in wide.values() if x is not None]
        floor = self._eps**2 * sum(n * n for n in norms) ** 0.5
        usual = _usual(wide, own)
        for name, wanted in wide.items():
            mine, other = got.get(name), own.get(name)
            if wanted is None and mine is None:
                continue
            if mine is None and wanted is not None and wanted.double().norm().item() > floor:
                self.add("gradients", 1e9, f"{name} has no gradient")
                continue
            like = next(x for x in (wanted, mine) if x is not None)
            zero = torch.zeros_like(like)
            given = (zero if x is None else x for x in (mine, wanted, other))
            self.tensor("gradients", f"the gradient of {name}", *given, usual=usual, floor=floor)

    @property
    def ok(self) -> bool:
        return all(ratio <= 1 for ratio in self.ratios.values())

    @property
    def worst(self) -> str:
        kind = max(self.ratios, key=lambda one: self.ratios[one])
        return f"{kind}: {self.where[kind]}: error / tolerance {self.ratios[kind]:.3g}"

    @property
    def _eps(self) -> float:
        return torch.finfo(self.dtype).eps


def _usual(wide: Mapping[str, Tensor | None], own: Mapping[str, Tensor | None]) -> float:
    """The median of the relative errors of ``own``."""
    errors = []
    for name, x in wide.items():
        y = own.get(name)
        if x is not None and y is not None and (size := x.double().norm().item()) > 0:
            errors.append((y.double() - x.double()).norm().item() / size)
    return statistics.median(errors) if errors else 0.0


def _over(error: float, tolerance: float) -> float:
    if error != error:
        return 1e9
    return 0.0 if error == 0 else error / tolerance if tolerance > 0 else 1e9


def _sentence(name: str, error: float, tolerance: float, size: float) -> str:
    return f"{name} is off by {error:.3g} of {size:.3g}, wanted at most {tolerance:.3g}"
