"""Whether two points may be compared: one meaning for what is found, listed and drawn. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from perfbench.records import NOT_IN_OLDER

Segment = Mapping[str, str]
Differences = Mapping[str, tuple[str | None, str | None]]


def segment_differences(old: Segment, new: Segment) -> Differences:
    """Each key that differs, sorted, with its old and its new value (null: it is not there).

    What older files do not hold is compared where both hold it. Empty: the points may be compared.
    """
    every = {*old, *new} - {key for key in NOT_IN_OLDER if key not in old or key not in new}
    names = sorted(name for name in every if old.get(name) != new.get(name))
    return MappingProxyType({name: (old.get(name), new.get(name)) for name in names})


def segment_so_far(old: Segment, new: Segment) -> Segment:
    """``new``, with what ``old``, which it may be compared with, knows and its older file does not:
    the next point is compared with that.
    """
    return {key: old[key] for key in NOT_IN_OLDER if key in old} | dict(new)
