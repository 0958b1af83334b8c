"""What the last step was given and what it made, for the proof of the step."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class Made:
    """Filled by the body of a step, and emptied where the next one begins.

    So it holds nothing that the step did not hold at its end. Of a step in a graph these are the
    graph's own tensors, which each replay overwrites.

    ``inputs``: ids, or the arguments of attention alone. ``outputs``: logits [B, T, V] (of a
    prefill those of each chunk), or what attention alone returned. ``gradients``: of attention
    alone, by each argument that wants one, then by each parameter; a model's are at its parameters.
    ``keep``: whether a step of several chunks keeps their outputs, which it has no use for.
    """

    inputs: tuple[Tensor, ...] = ()
    outputs: list[Tensor] = field(default_factory=list)
    loss: Tensor | None = None
    gradients: tuple[Tensor, ...] = ()
    keep: bool = False

    def begin(self, *inputs: Tensor) -> None:
        """A step of ``inputs`` begins: what the last one made is dropped."""
        self.inputs, self.outputs, self.loss, self.gradients = inputs, [], None, ()
