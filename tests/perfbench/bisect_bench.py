"""A history of marked speeds, and stand-ins for what measures it: what the tests of `bisect`
share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from nsa.routing import Capability
from perfbench.machine.environment import TargetFit
from perfbench.matrix.matrix import Matrix
from perfbench.runner.ab import checkout, version_plan
from tests.perfbench.ab_bench import FakeSide, plan_here


@contextmanager
def marked_sides(
    fit: TargetFit, versions: Sequence[checkout.Checkout]
) -> Iterator[tuple[FakeSide, ...]]:
    """Executors whose speed is that of nsa/marker.py in each version."""
    assert fit.held, "another perfbench could take the card between two commits"
    yield tuple(FakeSide(one.name, _marked(one), []) for one in versions)


def marked_plan(
    one: checkout.Checkout, matrix: Matrix, only: Sequence[str], capability: Capability
) -> version_plan.VersionPlan:
    """As the version's own process: CannotBuild where its marker is no number."""
    try:
        _marked(one)
    except ValueError:
        message = f"{one.name} lacks what this harness needs of nsa"
        raise checkout.CannotBuild(message, one.name) from None
    return plan_here(one, matrix, only, capability)


def _marked(one: checkout.Checkout) -> float:
    text = (Path(one.folder) / "nsa" / "marker.py").read_text(encoding="utf-8")
    return float(text.partition("=")[2])
