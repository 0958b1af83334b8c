"""`perfbench explain`: why a cell got its verdict, in plain words and with the numbers between."""

from __future__ import annotations

import json

from perfbench.commands import options as opt
from perfbench.commands.console import print_text


def explain(
    run: opt.TraceArg,
    cell: opt.CellArg,
    baseline: opt.BaselinePath = None,
    as_json: opt.Json = False,
) -> None:
    """Say in plain words why a cell got its verdict."""
    from perfbench.commands.judging import judge_stored, pair_outcome
    from perfbench.commands.names import named_cell
    from perfbench.gate import baseline_of_run, explain_cell
    from perfbench.report import to_json

    pair = pair_outcome(run, baseline)
    outcome = pair or judge_stored(run, baseline, strict=False)
    cell = named_cell(cell, (one.axes for one in outcome.judgement.cells), str(run))
    found = outcome.baseline
    if outcome.base_run is not None:
        found = baseline_of_run(outcome.base_run)
    assert found is not None  # a run is judged by a baseline, a pair by its base
    text = explain_cell(outcome.run, outcome.judgement, cell, outcome.policy, found)
    if as_json:
        verdict = to_json(outcome.judgement, outcome.run)
        (line,) = (one for one in verdict["cells"] if one["cell_id"] == cell)
        about = {name: verdict[name] for name in ("run", "baseline", "policy", "findings")}
        text = json.dumps({**about, "cell": line, "explanation": text.splitlines()}, indent=2)
    print_text(text)
