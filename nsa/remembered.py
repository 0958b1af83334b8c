"""What was found out of calls like this one before, so that the host does it once a shape and not
once a call.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

V = TypeVar("V")
MOST = 1024  # calls of other shapes, sizes or settings; then all are forgotten


class ByShape(Generic[V]):
    """Values by a key and by ``objects``, which never change and whose own hash takes long: those
    count by identity, and live as long as what is remembered of them.
    """

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[V, tuple[object, ...]]] = {}

    def get(self, key: Hashable, *objects: object) -> V | None:
        found = self._found.get((key, *map(id, objects)))
        return None if found is None else found[0]

    def put(self, value: V, key: Hashable, *objects: object) -> None:
        if len(self._found) >= MOST:
            self.clear()
        self._found[(key, *map(id, objects))] = value, objects

    def clear(self) -> None:
        self._found.clear()
