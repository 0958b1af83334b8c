"""What must have run because the cell's own axes name its path, whatever the matrix expects."""

from __future__ import annotations

from collections.abc import Iterable

from nsa.routing import ADAPTIVE, DENSE, DENSE_KINDS, Path
from perfbench.matrix.peers import BRANCH
from perfbench.records import CACHED_DENSE, Cell, Expect


def expected_of(cell: Cell, stated: Expect, planned: Iterable[str]) -> Expect:
    """``stated`` and what the path implies: it is engaged, the other paths are not.

    ``planned`` counters say whether the selected branch is on. `auto` implies nothing, `adaptive`
    one of two.
    """
    every = [*(f"sel.{path}" for path in Path), f"sel.{DENSE}", *_dense_counters()]
    selects = any(name.startswith("sel.") for name in planned)
    if cell.is_peer:
        engaged = [f"{BRANCH}.{cell.path}"]
        allowed = set(engaged)
    elif cell.is_dense:
        engaged = [_dense_counter(cell.path)]
        allowed = set(engaged)
    elif cell.path in tuple(Path):
        allowed = {f"sel.{cell.path}"}
        engaged = sorted(allowed) if selects else []
    elif cell.path == ADAPTIVE:
        allowed, engaged = {f"sel.{Path.V1}", f"sel.{Path.V2}"}, []
    else:
        return stated
    forbidden = [name for name in every if name not in allowed]
    return stated.model_copy(
        update={
            "engaged": list(dict.fromkeys([*stated.engaged, *engaged])),
            "forbidden": list(dict.fromkeys([*stated.forbidden, *forbidden])),
        }
    )


def _dense_counters() -> list[str]:
    return [_dense_counter(kind) for kind in dict.fromkeys((*DENSE_KINDS, *CACHED_DENSE))]


def _dense_counter(kind: str) -> str:
    """dense -> dense.sdpa, dense_flash -> dense.flash."""
    return f"dense.{kind.partition('_')[2] or 'sdpa'}"
