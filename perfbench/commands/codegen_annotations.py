"""What `perfbench codegen` says on GitHub next to the lines of kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfbench.errors import Exit
from perfbench.records import EXIT_OF, Verdict
from perfbench.report import github_command, github_commands_at_most

if TYPE_CHECKING:
    from perfbench.codegen import CodeJudgement


def code_annotations(judgement: CodeJudgement) -> list[str]:
    """GitHub's workflow commands: an error for each red finding, at the line of its kernel, and one
    warning for all the others of a verdict; at most 10 of each.
    """
    errors, warnings = [], []
    for one in judgement.findings:
        if EXIT_OF[one.verdict] is not Exit.OK:
            title = f"perfbench codegen: {one.verdict.value} {one.variant or ''}".rstrip()
            changed = f" ({', '.join(one.changes)})" if one.changes else ""
            errors.append(
                github_command("error", title, one.reason + changed, source=one.source or "")
            )
    for verdict in (Verdict.NEW, Verdict.WATCH):
        if found := judgement.of(verdict):
            title = f"perfbench codegen: {verdict.value}, {len(found)} variants"
            first = found[0]
            changed = f" ({', '.join(first.changes)})" if first.changes else ""
            text = f"{first.variant}: {first.reason}{changed}"
            level = "error" if judgement.strict else "warning"
            warnings.append(github_command(level, title, text))
    return [*github_commands_at_most(errors, "error"), *warnings]
