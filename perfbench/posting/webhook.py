"""A verdict to an address of the user's own, which is a secret: whoever has it may post there."""

from __future__ import annotations

from urllib.parse import urlsplit

from perfbench.posting.http import TIMEOUT_S, CannotSend, send

HEADERS = {"Content-Type": "application/json", "User-Agent": "perfbench"}


def send_verdict(url: str, verdict_json: str, timeout_s: float = TIMEOUT_S) -> None:
    """POST ``verdict_json``, the content of verdict.json; CannotSend for any answer but 2xx."""
    answer = send("POST", url, HEADERS, verdict_json.encode(), timeout_s)
    if not 200 <= answer.status < 300:
        raise CannotSend(f"it answered {answer.status}", answer.status)


def is_address(url: str) -> bool:
    """Whether it has a host, and is of http or https."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def shown_host(url: str) -> str:
    """'hooks.example.org' of an address whose path, user and query may be secrets."""
    try:
        return urlsplit(url).hostname or "an unnamed host"
    except ValueError:
        return "an address that cannot be read"
