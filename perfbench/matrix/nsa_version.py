"""What perfbench reads of `nsa` that another commit of it may lack or keep elsewhere: `ab` measures
that commit with this perfbench.

Whatever depends on the commit of `nsa` belongs here, or where only the measuring process needs it,
in perfbench/worker/nsa_version.py. A name that every commit has is imported where it is used.
"""

from __future__ import annotations

import importlib
from typing import Any

from nsa.routing import Route


def nsa_constant(*places: str) -> Any:
    """The value of the first ``module:NAME`` that this nsa has, newest first; None where it has
    none of them.
    """
    for place in places:
        module, _, name = place.partition(":")
        try:
            return getattr(importlib.import_module(module), name)
        except (ModuleNotFoundError, AttributeError):
            continue
    return None


def sort_min_rows() -> int:
    """Rows from which path triton sorts the queries of a block; 0 of an nsa that names no limit."""
    return nsa_constant("nsa.routing.thresholds:SORT_MIN_ROWS", "nsa.routes:SORT_MIN_ROWS") or 0


def copy_min_elements() -> int:
    """Elements of q from which path triton loads by tensor descriptors; 0 of an nsa that names no
    limit.
    """
    return (
        nsa_constant("nsa.routing.thresholds:COPY_MIN_ELEMENTS", "nsa.routes:COPY_MIN_ELEMENTS")
        or 0
    )


def steps_off(route: Route) -> list[str]:
    """Steps of path triton that a setting turned off; none of an nsa that knows no steps."""
    return list(getattr(route, "off", ()))
