"""Every replicate of a cell repeats the digest of its proof: the same output and gradients, bit for
bit, of the same inputs at the timed length.

Only where the path promises it (a row says why not), and among rows of one card: another card of
the same model may sum in another order. A CPU has no number of its own, so there only rows of one
session and node are compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from perfbench.gate.judgement import Finding
from perfbench.records import Replicate, Status, Verdict

SHOWN = 16  # characters of a digest


def findings(rows: Sequence[Replicate], resumed_utc: Sequence[str]) -> list[Finding]:
    """PARITY for each way in which rows of one cell do not repeat the first of their card;
    ``resumed_utc`` are the times at which the run was resumed.
    """
    groups: dict[tuple[str | None, int], list[Replicate]] = {}
    for row in sorted(rows, key=lambda row: row.replicate):
        if row.status is Status.OK:
            card = row.card
            session = (
                0
                if row.device_uuid_sha256
                else sum(begin <= row.started_utc for begin in resumed_utc)
            )
            groups.setdefault((card, session), []).append(row)
    return [finding for group in groups.values() for finding in _of_one_card(group)]


def _of_one_card(rows: Sequence[Replicate]) -> list[Finding]:
    first = next((row for row in rows if _digest(row)), None)
    if first is None:
        return []
    wanted = _digest(first)
    other = [row for row in rows if _digest(row) not in (None, wanted)]
    silent = [row for row in rows if _digest(row) is None]
    found = []
    if other:
        got = ", ".join(f"{str(_digest(row))[:SHOWN]} (replicate {row.replicate})" for row in other)
        text = (
            f"output and gradients of the proof's inputs have the digest {got}; wanted"
            f" {str(wanted)[:SHOWN]} as in replicate {first.replicate}, since the path promises"
            " equal bits: what is timed is not what was proved, or its Route promises too much"
        )
        found.append(Finding(Verdict.PARITY, "digest", text))
    if silent:
        numbers = ", ".join(str(row.replicate) for row in silent)
        proof = silent[0].length_proof
        why = (proof.no_digest or proof.absent) if proof is not None else ""
        text = (
            f"replicate {numbers} has no digest of the proof's inputs ({why or 'no reason given'});"
            f" wanted {str(wanted)[:SHOWN]} as in replicate {first.replicate}; measure again"
        )
        found.append(Finding(Verdict.PARITY, "no digest", text))
    return found


def _digest(row: Replicate) -> str | None:
    return row.length_proof.digest if row.length_proof is not None else None
