"""Which peer a cell's processes had imported: one and the same in all of them, and that of the
baseline, or the speeds are of two programs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from perfbench.gate.judgement import Finding
from perfbench.records import Baseline, LoadedPeer, PlannedCell, Replicate, Run, Status, Verdict

SHOWN = 12  # characters of a digest


def peer_of(rows: Iterable[Replicate]) -> LoadedPeer | None:
    """That of the first row that names one."""
    return next((row.peer for row in rows if row.peer is not None), None)


def peer_findings(cell: PlannedCell, rows: Sequence[Replicate]) -> list[Finding]:
    """FAILED where a row with a speed names no peer, ENV where it names another than the cell's
    path, or rows name several versions of one.
    """
    if not cell.axes.is_peer:
        return []
    good = [row for row in rows if row.status is Status.OK]
    found = []
    if silent := [str(row.replicate) for row in good if row.peer is None]:
        text = f"no record of what was imported (replicate {', '.join(silent)}): measure again"
        found.append(Finding(Verdict.FAILED, "peer", text))
    loaded = [row.peer for row in good if row.peer is not None]
    if other := sorted({one.name for one in loaded} - {cell.axes.path}):
        text = f"{', '.join(other)} was imported, the plan says {cell.axes.path}; measure again"
        found.append(Finding(Verdict.ENV, "peer", text))
    # not by uncommitted changes: an import may write untracked files next to its module
    if len(known := dict.fromkeys(map(_released, loaded))) > 1:
        text = (
            f"its processes imported {' and '.join(known)}: the peer changed while the run was"
            " measured; measure again"
        )
        found.append(Finding(Verdict.ENV, "peer", text))
    return found


def changed_peers(run: Run, baseline: Baseline) -> list[str]:
    """A note for each peer that is another than the baseline's: what changed in its speed may be
    its own.
    """
    now: dict[str, LoadedPeer] = {}
    for row in run.replicates:
        if row.status is Status.OK and row.peer is not None:
            now.setdefault(row.peer.name, row.peer)
    then: dict[str, dict[str, None]] = {}
    for cell in baseline.cells.values():
        if cell.peer is not None:
            then.setdefault(cell.peer.name, {})[_which(cell.peer)] = None
    return [
        f"{name} is not the baseline's: {' and '.join(then[name])}, now {_which(one)}"
        for name, one in sorted(now.items())
        if name in then and set(then[name]) != {_which(one)}
    ]


def _which(one: LoadedPeer) -> str:
    changes = f", with changes {one.dirty_sha256[:SHOWN]}" if one.dirty_sha256 else ""
    return _released(one) + changes


def _released(one: LoadedPeer) -> str:
    parts = [one.version or "no package", f"file {(one.file_sha256 or 'none')[:SHOWN]}"]
    if one.commit:
        parts.append(f"commit {one.commit[:SHOWN]}")
    return ", ".join(parts)
