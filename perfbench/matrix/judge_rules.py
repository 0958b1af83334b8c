"""What a matrix demands of a run, as data: stored by `baseline promote`, so that a later matrix is
held against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from perfbench.matrix.matrix import Matrix, cells
from perfbench.matrix.policy import GatePolicy
from perfbench.records import Expect


@dataclass(frozen=True, slots=True)
class JudgeRules:
    """``gate`` holds every key of `gate:`, ``by_cell`` those of the cells that an override changes.

    ``settings`` are `measure:`, `limits:` and `target:` as 'section.key'; ``expect`` names every
    cell; ``aliases`` map a former id to that of today.
    """

    gate: Mapping[str, Any]
    by_cell: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any]
    expect: Mapping[str, Expect]
    sentinels: tuple[str, ...]
    aliases: Mapping[str, str]

    @classmethod
    def of(cls, matrix: Matrix) -> Self:
        """Those of a matrix."""
        sections = {"measure": matrix.measure, "limits": matrix.limits, "target": matrix.target}
        every, _ = cells(matrix)
        return cls(
            gate=matrix.gate.model_dump(),
            by_cell={cell_id: one.model_dump() for cell_id, one in matrix.by_cell.items()},
            settings={
                f"{name}.{key}": value
                for name, section in sections.items()
                for key, value in section.model_dump().items()
            },
            expect={one.cell.cell_id: one.expect for one in every},
            sentinels=matrix.sentinels,
            aliases=matrix.aliases,
        )

    @classmethod
    def from_stored(cls, stored: Mapping[str, Any]) -> Self:
        """Those of a baseline; ValueError where they are none.

        A key that this version does not know is left out, one that the file lacks has its default.
        """
        try:
            return cls(
                gate=_policy(stored["gate"]),
                by_cell={cell_id: _policy(one) for cell_id, one in stored["by_cell"].items()},
                settings=dict(stored["settings"]),
                expect={
                    cell_id: Expect.model_validate(one) for cell_id, one in stored["expect"].items()
                },
                sentinels=tuple(map(str, stored["sentinels"])),
                aliases={str(old): str(new) for old, new in stored["aliases"].items()},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"rules without a usable {error}") from None

    def to_stored(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "gate": dict(self.gate),
            "by_cell": {cell_id: dict(one) for cell_id, one in self.by_cell.items()},
            "settings": dict(self.settings),
            "expect": {cell_id: one.model_dump() for cell_id, one in self.expect.items()},
            "sentinels": list(self.sentinels),
            "aliases": dict(self.aliases),
        }

    def of_cell(self, cell_id: str) -> Mapping[str, Any]:
        """The keys of `gate:` for one cell."""
        return self.by_cell.get(cell_id, self.gate)


def _policy(stored: Mapping[str, Any]) -> dict[str, Any]:
    known = {key: value for key, value in stored.items() if key in GatePolicy.model_fields}
    return GatePolicy.model_validate(known).model_dump()
