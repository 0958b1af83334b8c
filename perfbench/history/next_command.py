"""What to type next about a change point: the search for its commit, or what the runs were."""

from __future__ import annotations

import shlex

from perfbench.history.nouns import ChangePoint

COMMIT_CHARS = 10
BISECTED = "tok_per_s"  # the metric that `perfbench bisect` judges


def next_step(change: ChangePoint, reproduce: str, *, is_dirty: bool = False) -> str:
    """Bisect where it can find a commit; else the history of the cell.

    ``reproduce``: the command that measures the cell again, whose matrix a bisect needs.
    ``is_dirty``: one of the two runs had uncommitted changes, which no commit holds.
    """
    key, good, bad = change.key, change.before_commit, change.commit
    matrix = matrix_in(reproduce)
    can_bisect = change.is_worse and key.metric == BISECTED and matrix is not None and not is_dirty
    if not (can_bisect and good and bad and good != bad):
        metric = ["--metric", key.metric]
        if key.cell_id.startswith("-"):  # as another tool's name can
            return shlex.join(["perfbench", "history", "show", *metric, "--", key.cell_id])
        return shlex.join(["perfbench", "history", key.cell_id, *metric])
    ends = ["--good", good[:COMMIT_CHARS], "--bad", bad[:COMMIT_CHARS]]
    return shlex.join(["perfbench", "bisect", key.cell_id, *ends, "--matrix", str(matrix)])


def matrix_in(command: str) -> str | None:
    """The matrix of `perfbench run MATRIX ...`; None for another command."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    is_run = words[:2] == ["perfbench", "run"] and len(words) > 2
    return words[2] if is_run else None
