"""One comment of ours on a pull request, found again by its first line, and rewritten in place."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from perfbench.posting.http import CannotSend, HttpAnswer, send

PER_PAGE = 100  # the most that GitHub gives
MAX_PAGES = 100
TRIES = 3
WAIT_S = 2.0  # before the second try; twice as long before the third
LOOPBACK = ("127.0.0.1", "::1", "localhost")
# What a token is made of: no character that could end a header.
_TOKEN = re.compile(r"[\x21-\x7e]+")
_REPOSITORY = re.compile(r"[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class PullRequest:
    """Where a comment goes; ValueError for what cannot be such a place.

    ``api`` is https://api.github.com or that of a server of one's own; http is for this machine
    alone, since the token would travel open.
    """

    api: str
    repository: str  # OWNER/NAME
    number: int
    token: str = field(repr=False)

    def __post_init__(self) -> None:
        found = urlsplit(self.api)
        is_open = found.scheme != "https" and found.hostname not in LOOPBACK
        if found.scheme not in ("http", "https") or not found.hostname or is_open:
            raise ValueError("the API's address is not https://")
        if not _REPOSITORY.fullmatch(self.repository):
            raise ValueError("the repository is not named OWNER/NAME")
        if self.number < 1:
            raise ValueError(f"got pull request {self.number}, wanted a number from 1 on")
        if not _TOKEN.fullmatch(self.token):
            raise ValueError("the token is empty, or has characters that no token has")

    @property
    def comments(self) -> str:
        return f"{self._issues}/{self.number}/comments"

    def comment(self, number: int) -> str:
        """The address of one comment, which is the repository's, not the pull request's."""
        return f"{self._issues}/comments/{number}"

    @property
    def _issues(self) -> str:
        return f"{self.api.rstrip('/')}/repos/{self.repository}/issues"


@dataclass(frozen=True, slots=True)
class PostedComment:
    """``author`` is who GitHub says wrote it; '' where it does not say."""

    created: bool
    author: str


def upsert_comment(
    to: PullRequest,
    body: str,
    author: str,
    *,
    sleep: Callable[[float], None] = time.sleep,
) -> PostedComment:
    """Rewrite the comment of ``author`` that begins with the first line of ``body``; create it
    where there is none. CannotSend says why GitHub took neither.

    What may pass is tried three times, each time from the search on: a POST whose answer was lost
    may have been carried out. A comment of somebody else with that line is left alone: whoever
    wrote it could rewrite the verdict.
    """
    for attempt in range(TRIES):
        try:
            return _upsert_once(to, body, author)
        except CannotSend as error:
            if not error.is_passing or attempt == TRIES - 1:
                raise
            sleep(WAIT_S * 2**attempt)
    raise AssertionError("unreachable: the last try returns or raises")


def _upsert_once(to: PullRequest, body: str, author: str) -> PostedComment:
    first = body.splitlines()[0]
    number = next(_ours(to, first, author), None)
    if number is not None:
        try:
            return _posted(_call(to, "PATCH", to.comment(number), body), created=False)
        except CannotSend as error:
            if error.status != 404:  # deleted since it was listed
                raise
    return _posted(_call(to, "POST", to.comments, body), created=True)


def _ours(to: PullRequest, first: str, author: str) -> Iterator[int]:
    """Numbers of the comments that ``author`` began with ``first``, the oldest first."""
    for page in range(1, MAX_PAGES + 1):
        found = _json(_call(to, "GET", f"{to.comments}?per_page={PER_PAGE}&page={page}"))
        if not isinstance(found, list):
            raise CannotSend("GitHub answered GET with no list of comments")
        for one in found:
            if not isinstance(one, dict) or not isinstance(one.get("id"), int):
                continue
            lines = str(one.get("body") or "").splitlines()
            if _login(one) == author and lines[:1] == [first]:
                yield one["id"]
        if len(found) < PER_PAGE:
            return


def _call(to: PullRequest, method: str, url: str, body: str | None = None) -> HttpAnswer:
    headers = {
        "Accept": "application/vnd.github+json",
        "Authorization": f"Bearer {to.token}",
        "Content-Type": "application/json",
        "User-Agent": "perfbench",
        "X-GitHub-Api-Version": "2022-11-28",
    }
    data = None if body is None else json.dumps({"body": body}).encode()
    answer = send(method, url, headers, data)
    if not 200 <= answer.status < 300:
        raise CannotSend(f"GitHub answered {answer.status} to {method}", answer.status)
    return answer


def _posted(answer: HttpAnswer, *, created: bool) -> PostedComment:
    found = _json(answer)
    return PostedComment(created, _login(found) if isinstance(found, dict) else "")


def _json(answer: HttpAnswer) -> Any:
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        raise CannotSend("GitHub's answer is no JSON", answer.status) from None


def _login(comment: dict[str, Any]) -> str:
    user = comment.get("user")
    return str(user.get("login") or "") if isinstance(user, dict) else ""
