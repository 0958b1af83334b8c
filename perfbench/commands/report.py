"""What `report` and `explain` do: judge again what lies on the disk, a run or the pair of an
`ab`.
"""

from __future__ import annotations

import json
from pathlib import Path

from nsa.config import nearest_name
from perfbench.commands import session
from perfbench.commands.session import Outcome
from perfbench.errors import Exit, PerfbenchError


def report(path: Path, baseline_path: Path | None, out: Path | None) -> Outcome:
    """Without a baseline the hard gates alone; a pair by its own base.

    USAGE where that would write over the verdict of a baseline.
    """
    if (pair := _pair(path, baseline_path)) is not None:
        return pair
    if baseline_path is not None:
        return session.judge_against_baseline(path, baseline_path, strict=False)
    outcome = session.judge(path)
    known = outcome.folder / "verdict.json"
    if (out is None or out.resolve() == outcome.folder.resolve()) and known.is_file():
        try:
            before = json.loads(known.read_bytes()).get("exit_code")
        except (ValueError, AttributeError, RecursionError):
            return outcome
        if before != outcome.judgement.exit_code:
            text = (
                f"{known} says exit {before}, and without a baseline this run is exit"
                f" {int(outcome.judgement.exit_code)}"
            )
            raise PerfbenchError(
                Exit.USAGE,
                f"{text}. Next: name what judged it with --baseline, or another folder with --out",
            )
    return outcome


def explain(path: Path, cell_id: str, baseline_path: Path | None, *, as_json: bool = False) -> str:
    """Why a cell got its verdict, in plain words and with the numbers between; as JSON with
    verdict.json's line of the cell.
    """
    from perfbench import report as reports
    from perfbench.gate import baseline_of_run, explain_cell
    from perfbench.records import read_baseline

    pair = _pair(path, baseline_path)
    outcome = pair or session.judge_against_baseline(path, baseline_path, strict=False)
    known = [cell.cell_id for cell in outcome.judgement.cells]
    if cell_id not in known:
        raise PerfbenchError(
            Exit.USAGE,
            f"got cell {cell_id!r}, which {path} does not have{nearest_name(cell_id, known)}",
        )
    if pair is not None and pair.base_run is not None:
        found = baseline_of_run(pair.base_run)
    else:
        found = read_baseline(baseline_path or session.default_baseline(outcome.run))
    text = explain_cell(
        outcome.run, outcome.judgement, cell_id, session.policy_of(outcome.run), found
    )
    if not as_json:
        return text
    whole = reports.to_json(outcome.judgement, outcome.run)
    (line,) = (cell for cell in whole["cells"] if cell["cell_id"] == cell_id)
    about = {name: whole[name] for name in ("run", "baseline", "policy", "findings")}
    return json.dumps({**about, "cell": line, "explanation": text.splitlines()}, indent=2)


def _pair(path: Path, baseline_path: Path | None) -> Outcome | None:
    """Both sides of the `ab` folder that ``path`` is, judged; None for a run."""
    from perfbench.commands import compare
    from perfbench.runner import is_pair

    if not is_pair(path):
        return None
    if baseline_path is not None:
        text = f"got --baseline beside {path}, which holds both sides of an A/B, wanted one run"
        raise PerfbenchError(
            Exit.USAGE, f"{text}. Next: leave --baseline away, or name {path / 'b'}"
        )
    return compare.compare(path, None, strict=False)
