"""What is compiled: which shapes for which architecture. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COMPILER = "perfbench.worker.codegen"  # the module that is started with `python -m`


@dataclass(frozen=True, slots=True)
class CodeShape:
    """Heads and dims of a call's tensors; ``ragged``: rows begin at positions of their own,
    ``documents``: no query sees another document.
    """

    groups: int  # kv heads
    heads: int  # query heads of each
    key_dim: int
    value_dim: int
    dtype: str = "bfloat16"
    ragged: bool = False
    documents: bool = False


# A: m7c_125m, 12 heads over 2 of 64. B: 64 over 4 of 128. Both are the matrices' shapes; odd is of
# none of them, and fits no tile.
SHAPES: Mapping[str, CodeShape] = {
    "A": CodeShape(2, 6, 64, 64),
    "B": CodeShape(4, 16, 128, 128),
    "A.ragged": CodeShape(2, 6, 64, 64, ragged=True),
    "A.documents": CodeShape(2, 6, 64, 64, documents=True),
    "odd": CodeShape(2, 3, 60, 100, "float16"),
}
ARCHITECTURES = ("8.0", "8.9", "9.0", "10.0")
# (architecture, shape), the longest first. Masks are written in the same language for every card,
# and took within 512 bytes of the plain kernels' shared memory: they are compiled for one.
BUILDS = (
    *((sm, shape) for sm in reversed(ARCHITECTURES) for shape in ("B", "A")),
    ("9.0", "odd"),
    ("9.0", "A.ragged"),
    ("9.0", "A.documents"),
)
