"""What the runner's tests share: a commit that measured, and the plan of a matrix's text for a
machine without a GPU.
"""

from __future__ import annotations

from nsa.capability import assumed
from nsa.settings import Settings
from perfbench.matrix import matrix as matrices
from perfbench.matrix import plan as plans
from perfbench.records.rows import Source

CODE = Source(commit="a" * 40, dirty_sha256=None)


def planned_from(text: str) -> tuple[matrices.Matrix, plans.Plan]:
    matrix = matrices.parse_matrix(text, "m.yaml")
    return matrix, plans.build_plan(
        matrix, only=[], capability=assumed("none"), settings=Settings()
    )
