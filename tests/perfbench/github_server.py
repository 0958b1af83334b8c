"""A server on this machine that answers as GitHub's REST API does about comments of a pull
request.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

TOKEN = "ghs_0123456789secret"
BOT = "github-actions[bot]"


@dataclass
class FakeGitHub:
    """Its comments, and what it does instead of answering: ``faults`` maps a method to statuses,
    each used once, the last for ever; ``carried_out``: a faulty POST is kept all the same.
    """

    url: str = ""
    comments: list[dict[str, Any]] = field(default_factory=list)
    faults: dict[str, list[int]] = field(default_factory=dict)
    carried_out: bool = False
    location: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)

    def add(self, body: str, login: str = BOT) -> dict[str, Any]:
        number = 1000 + len(self.comments)
        self.comments.append({"id": number, "body": body, "user": {"login": login}})
        return self.comments[-1]

    def answer(self, method: str, path: str, sent: Any) -> tuple[int, Any]:
        parts = urlsplit(path)
        self.requests.append((method, path))
        faults = self.faults.get(method, [])
        status = faults.pop(0) if len(faults) > 1 else faults[0] if faults else 0
        if status and not (self.carried_out and method == "POST"):
            return status, {"message": f"::error::no {TOKEN}"}
        if method == "GET" and parts.path == "/repos/o/r/issues/7/comments":
            query = parse_qs(parts.query)
            size, page = int(query["per_page"][0]), int(query["page"][0])
            return 200, self.comments[size * (page - 1) : size * page]
        if len(sent["body"]) > 65_536:
            return 422, {}
        if method == "POST" and parts.path == "/repos/o/r/issues/7/comments":
            made = self.add(sent["body"])
            return status or 201, made
        for one in self.comments:
            if method == "PATCH" and parts.path == f"/repos/o/r/issues/comments/{one['id']}":
                one["body"] = sent["body"]
                return 200, one
        return 404, {}


@contextmanager
def serving(github: FakeGitHub) -> Iterator[FakeGitHub]:
    """On a free port of the loopback, until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def _do(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            sent = json.loads(self.rfile.read(length)) if length else None
            status, found = 401, {}
            if self.headers.get("Authorization") == f"Bearer {TOKEN}":
                status, found = github.answer(self.command, self.path, sent)
            body = json.dumps(found).encode()
            self.send_response(status)
            if github.location:
                self.send_header("Location", github.location)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PATCH = _do

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    github.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield github
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
