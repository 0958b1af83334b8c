"""What was traced after a red or SUSPECT verdict, and how the report shows it: pure, from
`trace.json` in the run's folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from perfbench.errors import Exit, PerfbenchError
from perfbench.records import Kernels
from perfbench.text import code, escape
from perfbench.tracing import kernel_diff, memory_diff
from perfbench.tracing.kernel_diff import Change
from perfbench.tracing.places import CodePlace, caller_that_grew

FILE_NAME = "trace.json"


class Traced(BaseModel):
    """One side of one cell.

    ``kernels`` is null where nothing was traced, and then ``reason`` says why.
    """

    model_config = ConfigDict(frozen=True)
    name: str  # what was measured: a revision, a folder, 'this checkout'
    kernels: Kernels | None = None
    places: dict[str, CodePlace] = {}  # rows of ``kernels`` that the measured package defines
    # the timeline, relative to trace.json; null with the reason in ``kernels.chrome_absent``
    chrome: str | None = None
    reason: str = ""

    def callers_of(self, name: str) -> dict[str, int]:
        """'nsa/FILE.py:LINE FUNCTION' -> calls of the row from there."""
        return {} if self.kernels is None else self.kernels.called_from.get(name, {})

    @property
    def unusable(self) -> str:
        """Why this side cannot be compared; empty where it can."""
        if self.kernels is None:
            return self.reason
        return (
            ""
            if self.kernels.rows
            else (
                f"the profiler saw no kernel of {self.name}; `perfbench doctor` names its usual"
                " causes"
            )
        )


class TraceDiff(BaseModel):
    """One cell on both sides; ``base`` is null where only the candidate was traced."""

    model_config = ConfigDict(frozen=True)
    cell_id: str
    verdict: str = ""
    base: Traced | None
    candidate: Traced | None
    reproduce: str = ""
    left_out: bool = False  # reds or larger drops were traced in its place

    @property
    def changes(self) -> list[Change]:
        """Empty also where a side is missing: ``problems`` says which."""
        base, candidate = self._tables()
        if base is None or candidate is None:
            return []
        return [self._placed(one) for one in kernel_diff.diff(base, candidate)]

    def _placed(self, change: Change) -> Change:
        """With where each side's package defines it, or calls it most beyond the other side."""
        assert self.base is not None and self.candidate is not None
        names = (change.was or change.name, change.name)
        sides = (self.base, self.candidate)
        callers = [one.callers_of(name) for one, name in zip(sides, names, strict=True)]
        base, candidate = (
            one.places.get(name) or caller_that_grew(mine, theirs)
            for one, name, mine, theirs in zip(sides, names, callers, callers[::-1], strict=True)
        )
        return change.model_copy(update={"base_place": base, "candidate_place": candidate})

    @property
    def problems(self) -> list[str]:
        sides = (("base", self.base), ("candidate", self.candidate))
        return [
            f"{side}: {one.unusable}" for side, one in sides if one is not None and one.unusable
        ]

    def to_markdown(self, top: int = 10) -> str:
        """Heading, totals, table, files and how to measure this cell again; a side that is missing
        is named.
        """
        lines = [
            f"### {escape(self.cell_id)}{f' ({self.verdict})' if self.verdict else ''}",
            "",
        ]
        lines += [f"- not traced, {escape(problem)}" for problem in self.problems]
        base, candidate = self._tables()
        if base is not None and candidate is not None:
            lines += [f"- {escape(line)}" for line in kernel_diff.summary(base, candidate)]
        lines += [f"- {line}" for line in memory_diff.summary(base, candidate)]
        lines += self._files()
        lines += [f"- measure it again: {code(self.reproduce)}"] if self.reproduce else []
        if base is not None and candidate is not None:
            lines += ["", kernel_diff.render_markdown(self.changes, top)]
        elif (alone := candidate or base) is not None:
            lines += ["", kernel_diff.render_kernels(alone, top)]
        held = [None if one is None else one.memory for one in (base, candidate)]
        if table := memory_diff.render_markdown(held[0], held[1], top):
            lines = [*"\n".join(lines).rstrip("\n").split("\n"), "", table]
        return "\n".join(lines).rstrip("\n") + "\n"

    def _tables(self) -> tuple[Kernels | None, Kernels | None]:
        base, candidate = (
            None if one is None or one.unusable else one.kernels
            for one in (self.base, self.candidate)
        )
        return base, candidate

    def _files(self) -> list[str]:
        found = []
        for side, one in (("base", self.base), ("candidate", self.candidate)):
            if one is not None and one.chrome is not None:
                found.append(f"- timeline of the {side} ({escape(one.name)}): {code(one.chrome)}")
            elif one is not None and one.kernels is not None:
                found.append(f"- no timeline of the {side}: {escape(one.kernels.chrome_absent)}")
        return found


_LIST: TypeAdapter[list[TraceDiff]] = TypeAdapter(list[TraceDiff])


def traces_markdown(diffs: Sequence[TraceDiff], top: int = 10) -> str:
    """The report's part on traces; empty where nothing was to be traced."""
    if not diffs:
        return ""
    parts = [one.to_markdown(top) for one in diffs if not one.left_out]
    left_out = [code(one.cell_id) for one in diffs if one.left_out]
    if left_out:
        parts.append(f"Not traced, because reds or larger drops were: {', '.join(left_out)}.\n")
    return "\n".join(parts)


def to_json(diffs: Sequence[TraceDiff]) -> bytes:
    """The content of trace.json."""
    return _LIST.dump_json(list(diffs), indent=1) + b"\n"


def stored_traces(folder: Path) -> list[TraceDiff]:
    """What was traced of the run in ``folder``; empty where nothing was, USAGE where its file is
    damaged.
    """
    path = folder / FILE_NAME
    try:
        return _LIST.validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValidationError) as error:
        why = (
            error.strerror
            if isinstance(error, OSError)
            else error.errors(include_url=False)[0]["msg"]
        )
        step = "remove it; `perfbench trace RUN CELL` shows one cell again"
        raise PerfbenchError(
            Exit.USAGE,
            f"got {path} damaged ({why}), wanted what a red run's traces left. Next: {step}",
        ) from None
