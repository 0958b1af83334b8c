"""`perfbench gap`: expected against measured, and what each change of a chain buys."""

from __future__ import annotations

from perfbench.commands import options as opt
from perfbench.commands.console import print_text


def gap(run: opt.RunArg, as_json: opt.Json = False) -> None:
    """Show how far each cell is from the floor, from dense and from what is expected."""
    from perfbench.commands.judging import judge_alone
    from perfbench.report import gap_text, gaps

    outcome = judge_alone(run)
    found = gaps(outcome.run, outcome.judgement)
    print_text(found.to_json() if as_json else gap_text(found))
