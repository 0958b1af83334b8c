"""One HTTP request: within a time, to no other address, and without a secret in what it reports."""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any
from urllib.parse import urlsplit

TIMEOUT_S = 15.0
MAX_ANSWER_BYTES = 2**25  # a page of 100 comments of 65,536 characters has 6.6 MB and more
_CHUNK = 2**16


class CannotSend(Exception):
    """Why there is no answer, or not the one that was wanted; ``status`` where one came.

    The text holds no address and no header: both may be secrets.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status

    @property
    def is_passing(self) -> bool:
        """Whether the same request may succeed in a moment."""
        return self.status is None or self.status in (429, 500, 502, 503, 504)


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """What a server answered, whatever the status; ``body`` may be empty."""

    status: int
    body: bytes


class _SameAddress(urllib.request.HTTPRedirectHandler):
    """Follows nothing: a header with a token is for the address that was asked."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def send(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes | None = None,
    timeout_s: float = TIMEOUT_S,
) -> HttpAnswer:
    """Raises CannotSend where no server answers within ``timeout_s`` seconds, for each wait and for
    the whole body.
    """
    until = time.monotonic() + timeout_s
    try:
        if urlsplit(url).scheme not in ("http", "https"):
            raise CannotSend("the address is neither http:// nor https://")
        request = urllib.request.Request(url, body, dict(headers), method=method)
        opener = urllib.request.build_opener(_SameAddress)
        try:
            with opener.open(request, timeout=timeout_s) as answer:
                return HttpAnswer(answer.status, _read(answer, until))
        except urllib.error.HTTPError as error:
            with error:
                return HttpAnswer(error.code, _read(error, until))
    except TimeoutError:
        raise CannotSend(f"no answer within {timeout_s:g} s") from None
    except urllib.error.URLError as error:
        raise CannotSend(_why(error.reason, timeout_s)) from None
    except OSError as error:
        raise CannotSend(_why(error, timeout_s)) from None
    except (http.client.HTTPException, ValueError) as error:
        # their texts quote the address or the header
        raise CannotSend(f"the request failed: {type(error).__name__}") from None


def _why(reason: object, timeout_s: float) -> str:
    if isinstance(reason, TimeoutError):
        return f"no answer within {timeout_s:g} s"
    words = reason.strerror if isinstance(reason, OSError) else None
    return f"no connection: {words or type(reason).__name__}"


def _read(answer: IO[bytes], until: float) -> bytes:
    """The body; CannotSend for one that is too long or trickles."""
    parts, room = [], MAX_ANSWER_BYTES
    while part := answer.read1(_CHUNK):  # type: ignore[attr-defined]  # http.client has it
        parts.append(part)
        room -= len(part)
        if room < 0:
            raise CannotSend(f"the answer has more than {MAX_ANSWER_BYTES:,} bytes")
        if time.monotonic() > until:
            raise CannotSend("the answer takes too long")
    return b"".join(parts)
