"""What the row of a cell on several ranks must hold of each of them: a rank that is not in it may
have run anything; and that the step of any cell was proved.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from perfbench.gate.judgement import Finding
from perfbench.records import (
    NOT_RECORDED,
    PlannedCell,
    Replicate,
    Status,
    StepProof,
    Verdict,
)

# A sample of the row against the largest of the ranks': both are one float, stored twice.
MAX_MISMATCH = 1e-9


def rank_findings(cell: PlannedCell, row: Replicate) -> Iterator[Finding]:
    """FAILED where a rank is missing, WRONG_PATH where one ran otherwise than planned or on another
    one's card, IMPOSSIBLE where the row's samples are not the slowest rank's.
    """
    size = cell.axes.world_size
    if size == 1 or row.status is not Status.OK:
        return
    ranks = [] if row.ranks is None else row.ranks.ranks
    if [one.rank for one in ranks] != list(range(size)):
        got = ", ".join(str(one.rank) for one in ranks) or "none"
        text = f"the row holds ranks {got}, wanted each of {size} once; measure again"
        yield Finding(Verdict.FAILED, "ranks", text)
        return
    planned, wanted = sorted(set(cell.route.counters)), row.engaged
    for one in ranks:
        if sorted(set(one.route)) != planned or one.engaged != wanted:
            text = (
                f"rank {one.rank} engaged {_counts(one.engaged)} on route {', '.join(one.route)},"
                f" wanted {_counts(wanted)} on {', '.join(planned)}"
            )
            yield Finding(Verdict.WRONG_PATH, "rank's path", text)
    cards = [one.device_uuid_sha256 for one in ranks if one.device_uuid_sha256 is not None]
    if len(set(cards)) < len(cards):
        yield Finding(Verdict.ENV, "ranks' cards", "two ranks shared a card; wanted one a rank")
    own_s = [one.samples_s for one in ranks]
    lengths = {len(row.samples_s), *map(len, own_s)}
    slowest_s = [max(same) for same in zip(*own_s, strict=False)]
    if len(lengths) > 1 or any(
        abs(got / most - 1) > MAX_MISMATCH if most > 0 else True
        for got, most in zip(row.samples_s, slowest_s, strict=False)
    ):
        text = "its samples are not the slowest rank's, sample by sample: edited or miscomputed"
        yield Finding(Verdict.IMPOSSIBLE, "ranks' samples", text)


def proof_findings(cell: PlannedCell, rows: Sequence[Replicate]) -> list[Finding]:
    """PARITY where replicate 0 has no proof of its step: on several ranks what the reduction gave
    was compared with nothing, on one `_unproved`. A row that did not finish is red by itself.
    """
    if any(row.status is not Status.OK for row in rows):
        return []
    proofs = [row.step_proof for row in rows if row.replicate == 0]
    if cell.axes.world_size == 1:
        return _unproved([one for one in proofs if one is not None])
    if proofs and all(one is not None and one.ok is not None for one in proofs):
        return []  # one that failed is found by its row
    why = "replicate 0 is not in the run"
    if proofs:
        why = next(
            "none was recorded" if one is None else one.absent or "no reason was recorded"
            for one in proofs
            if one is None or one.ok is None
        )
    text = (
        "the reduced gradients were compared with nothing, no proof of the step by replicate 0"
        f" ({why}): a number without proof is not a result; measure again"
    )
    return [Finding(Verdict.PARITY, "no proof", text)]


def _unproved(proofs: Sequence[StepProof]) -> list[Finding]:
    """PARITY where a proof of one process's step was due and not made, as without memory for the
    twin: the attention's own proof says nothing of the rest of a step. An older file, or an older
    nsa, recorded none.
    """
    if not proofs or any(one.ok is not None for one in proofs):
        return []
    if all(one.absent.startswith(NOT_RECORDED) for one in proofs):
        return []
    why = proofs[-1].absent or "no reason was recorded"
    text = (
        f"the step that was timed was compared with nothing ({why}): a number without proof is not"
        " a result; measure a smaller batch, or on a card with more memory"
    )
    return [Finding(Verdict.PARITY, "no proof", text)]


def _counts(engaged: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(engaged.items())) or "nothing"
