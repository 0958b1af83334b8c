"""The verdict of a run that was just judged, to a webhook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfbench.commands.console import say, warn
from perfbench.errors import Exit, PerfbenchError

if TYPE_CHECKING:
    from perfbench.commands.outcome import Outcome


def check_address(url: str | None) -> None:
    """PerfbenchError(USAGE) before anything is measured, for a webhook that cannot be one. The
    address is not shown: it may be a secret.
    """
    from perfbench.machine import configured_webhook
    from perfbench.posting import is_address

    named = configured_webhook(url)
    if named is not None and not is_address(named):
        raise PerfbenchError(
            Exit.USAGE,
            "--webhook (or PERFBENCH_WEBHOOK) is no address that can be posted to; wanted"
            " https://HOST/PATH; correct it, or leave it out",
        )


def notify(outcome: Outcome, url: str | None) -> None:
    """POST verdict.json where a webhook is configured.

    One that cannot be reached, or refuses, costs one warning and changes no verdict. Of its address
    the host alone is printed.
    """
    from perfbench.machine import configured_webhook
    from perfbench.posting import CannotSend, send_verdict, shown_host

    if (named := configured_webhook(url)) is None:
        return
    try:
        send_verdict(named, outcome.verdict_text())
    except CannotSend as error:
        warn(f"the webhook at {shown_host(named)} has no verdict: {error}. The verdict stands")
    else:
        say(f"the webhook at {shown_host(named)} has the verdict")
