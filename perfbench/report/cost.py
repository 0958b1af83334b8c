"""What the numbers cost: minutes of measuring processes, and how much of them was timed samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

from perfbench.records import Run


def shown(run: Run, pairs: Sequence[Run]) -> str:
    """'12.3 minutes of processes, 4.1 of them timed samples (33 %)'; ``pairs``: the runs of a
    confirmation, whose part is said.

    A process's time goes from its start to its last row: import, proofs, warm-up, samples.
    """
    text = _minutes([run, *pairs])
    return f"{text}; of the confirmation's pairs {_minutes(pairs)}" if pairs else text


def _minutes(runs: Sequence[Run]) -> str:
    rows = [row for run in runs for row in run.replicates]
    spent = math.fsum(row.wall_s for row in rows) / 60
    timed = math.fsum(second for row in rows for second in row.samples_s) / 60
    share = f" ({100 * timed / spent:.0f} %)" if spent > 0 else ""
    return f"{spent:.1f} minutes of processes, {timed:.1f} of them timed samples{share}"
