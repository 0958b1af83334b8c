"""`perfbench compare`: one stored run judged by another, or both sides of one `ab` folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from perfbench.commands import options as opt
from perfbench.errors import Exit, PerfbenchError

if TYPE_CHECKING:
    from perfbench.commands.outcome import Outcome


def compare(
    base: opt.BaseArg,
    cand: opt.CandArg = None,
    strict: opt.Strict = False,
    as_json: opt.Json = False,
) -> None:
    """Judge one run by another, or an `ab` folder."""
    from perfbench.commands.outcome import finish

    finish(_judged(base, cand, strict), as_json, write=False)


def _judged(base: Path, candidate: Path | None, strict: bool) -> Outcome:
    from perfbench.commands.judging import judge_pair, judge_pair_folder, read_checked
    from perfbench.commands.outcome import folder_of
    from perfbench.runner import is_pair

    if candidate is None:
        if not is_pair(base):
            raise PerfbenchError(
                Exit.USAGE,
                f"got one run, {base}, and wanted two, or the folder of a `perfbench ab`. Next:"
                " name CAND too",
            )
        return judge_pair_folder(base, strict)
    for one in (base, candidate):
        if one.is_dir() and is_pair(one):
            raise PerfbenchError(
                Exit.USAGE,
                f"got {one}, which holds two runs, and another run. Next: name {one / 'a'} or"
                f" {one / 'b'}",
            )
    return judge_pair(read_checked(base), read_checked(candidate), folder_of(candidate), strict)
