"""`perfbench gate`: judge a finished run, and what `check` confirmed of it, by the baseline."""

from __future__ import annotations

from perfbench.commands import options as opt


def gate(
    run: opt.RunArg,
    baseline: opt.BaselinePath = None,
    strict: opt.Strict = False,
    as_json: opt.Json = False,
) -> None:
    """Judge a finished run against the baseline."""
    from perfbench.commands.judging import judge_stored
    from perfbench.commands.outcome import finish

    finish(judge_stored(run, baseline, strict), as_json, write=False)
