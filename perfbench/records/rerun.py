"""What to type so that `ab` measures the code of a run again: its commit, since a branch or HEAD
moves on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from perfbench.records.rows import Run, Source


def typed_revisions(argv: Sequence[str]) -> tuple[str, str] | None:
    """REV_A and REV_B as the user typed them; None where the command was no `ab`, or began with
    options.
    """
    if "ab" not in argv[1:2] or len(argv) < 4 or any(word.startswith("-") for word in argv[2:4]):
        return None
    return argv[2], argv[3]


def source_name(source: Source) -> str:
    """For a reader, not to be typed."""
    return source.commit[:12] if source.commit else "a tree without git"


def revisions_to_type(base: Run, candidate: Run) -> tuple[str, str]:
    """Both sides' commits; where git proved none, or there were uncommitted changes, what the user
    typed.
    """
    typed = typed_revisions(candidate.manifest.argv) or (source_name(base.manifest.source), ".")
    one, other = (_clean(run.manifest.source) for run in (base, candidate))
    return one or typed[0], other or typed[1]


def injection_words(
    run: Run, cell_id: str | None = None, shown: str | None = None
) -> Iterator[str]:
    """``--inject FAULT@CELL`` as words: all of the run's, or those of one cell, which may be
    ``shown`` by another name.
    """
    for text in run.manifest.injections:
        fault, _, cell = text.partition("@")
        if cell_id is None or cell == cell_id:
            yield from ("--inject", f"{fault}@{shown or cell}")


def _clean(source: Source) -> str | None:
    return (
        source.commit[:12]
        if source.commit and source.dirty_sha256 is None and source.reason is None
        else None
    )


def without_resume(argv: Sequence[str]) -> Iterator[str]:
    """The command without what a resumed run brings along itself."""
    skip = False
    for word in argv:
        if skip:
            skip = False
        elif word in ("--resume", "--inject", "--seed"):
            skip = True
        elif not word.startswith(("--resume=", "--inject=", "--seed=")):
            yield word
