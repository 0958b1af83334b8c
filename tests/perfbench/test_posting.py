"""Comments and verdicts over HTTP, against servers on this machine: found again, rewritten in
place, and never at the price of a secret or of a verdict.
"""

from __future__ import annotations

import json
import shutil
import socket
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

import perfbench
from perfbench.commands import app, library, options
from perfbench.commands import check as checking
from perfbench.commands.judging import judge_alone
from perfbench.commands.notifying import notify
from perfbench.posting import CannotSend, PullRequest, send_verdict, shown_host
from perfbench.posting.pull_request import PER_PAGE
from tests.perfbench.github_server import BOT, TOKEN, FakeGitHub, serving

ROOT = Path(__file__).parents[2]
RUN = ROOT / "tests" / "data" / "runs" / "cpu"
MARKER = "<!-- perfbench comment: perfbench -->"


@pytest.fixture
def summary(tmp_path: Path) -> Path:
    return tmp_path / "summary.md"


@pytest.fixture
def github(tmp_path: Path, summary: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGitHub]:
    """A server, and the environment of a workflow run of pull request 7."""
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"pull_request": {"number": 7}}))
    monkeypatch.setattr("perfbench.posting.pull_request.WAIT_S", 0.0)
    with serving(FakeGitHub()) as found:
        for name, value in {
            "GITHUB_API_URL": found.url,
            "GITHUB_EVENT_PATH": str(event),
            "GITHUB_REF": "refs/heads/x",
            "GITHUB_REPOSITORY": "o/r",
            "GITHUB_RUN_ID": "55",
            "GITHUB_SERVER_URL": "https://github.example",
            "GITHUB_STEP_SUMMARY": str(summary),
            "GITHUB_TOKEN": TOKEN,
        }.items():
            monkeypatch.setenv(name, value)
        yield found


def post(*argv: str) -> None:
    """Exit 0 whatever happens: the verdict is the gate's."""
    assert app.invoke(["comment", str(RUN), "--post", *argv]) == 0


def test_one_comment_is_created_and_then_rewritten(
    github: FakeGitHub, summary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Next to those of people, and to one by a stranger that begins as ours does: whoever wrote it
    could rewrite the verdict.
    """
    github.add("looks good @all", "somebody")
    github.add(f"{MARKER}\n### SAME, exit 0", "mallory")
    github.add(f"quoting\n{MARKER}")
    github.add("<!-- perfbench comment: other -->\nx")
    before = [dict(one) for one in github.comments]
    post()
    assert github.comments[:4] == before and len(github.comments) == 5
    ours = github.comments[4]
    assert ours["body"].startswith(f"{MARKER}\n### ") and "MEASURED, exit 0" in ours["body"]
    page = "https://github.example/o/r/actions/runs/55"
    assert f"[Report, pictures and data]({page})" in ours["body"]
    ours["body"] = f"{MARKER}\r\nan older verdict"  # as GitHub may give it back
    post("--pr", "7")
    assert github.comments[:4] == before and len(github.comments) == 5
    assert "MEASURED, exit 0" in ours["body"] and not summary.exists()
    said = capsys.readouterr().err
    assert "created the comment on pull request 7" in said and "updated the comment" in said
    post("--key", "other")
    assert github.comments[3]["body"].count("MEASURED") and len(github.comments) == 5


@pytest.mark.parametrize("others", [PER_PAGE - 1, PER_PAGE, PER_PAGE + 30])
def test_the_comment_is_found_on_a_later_page(github: FakeGitHub, others: int) -> None:
    for number in range(others):
        github.add(f"comment {number}", "somebody")
    github.add(f"{MARKER}\nold")
    post()
    assert len(github.comments) == others + 1 and "MEASURED" in github.comments[-1]["body"]


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        ({"POST": [403]}, "GitHub answered 403 to POST; the token may not write here"),
        ({"GET": [401]}, "GitHub answered 401 to GET; the token may not write here"),
        ({"GET": [404]}, "GitHub answered 404 to GET; the token may not write here"),
        ({"POST": [502]}, "GitHub answered 502 to POST"),
        ({"POST": [422]}, "GitHub answered 422 to POST"),
    ],
)
def test_what_github_refuses_is_in_the_step_summary(
    faults: dict[str, list[int]],
    said: str,
    github: FakeGitHub,
    summary: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As on a fork's pull request, whose token only reads; one line says so, and no secret and no
    word of the server is in it.
    """
    github.faults = faults
    post()
    assert github.comments == []
    text = summary.read_text(encoding="utf-8")
    assert text.startswith(MARKER) and "MEASURED, exit 0" in text
    assert (
        text.rstrip()
        .splitlines()[-1]
        .startswith(f"This comment is here, and on no pull request: {said}")
    )
    err = capsys.readouterr().err
    assert f"no comment was posted: {said}" in err
    assert TOKEN not in err + text and "::error" not in err + text


def test_what_passes_is_tried_again(github: FakeGitHub, summary: Path) -> None:
    github.faults = {"GET": [502, 503, 0]}
    post()
    assert len(github.comments) == 1 and not summary.exists()


def test_a_lost_answer_makes_no_second_comment(github: FakeGitHub) -> None:
    """A POST that was carried out, and whose answer was a 502."""
    github.faults, github.carried_out = {"POST": [502]}, True
    post()
    assert [method for method, _ in github.requests] == ["GET", "POST", "GET", "PATCH"]
    assert len(github.comments) == 1


def test_a_comment_that_was_deleted_meanwhile_is_made_anew(github: FakeGitHub) -> None:
    github.add(f"{MARKER}\nold")
    github.faults = {"PATCH": [404]}
    post()
    assert len(github.comments) == 2 and "MEASURED" in github.comments[1]["body"]


def test_the_token_goes_to_no_other_address(github: FakeGitHub, summary: Path) -> None:
    with serving(FakeGitHub()) as other:
        github.faults, github.location = {"GET": [307]}, f"{other.url}/elsewhere"
        post()
        assert other.requests == []
    assert "GitHub answered 307 to GET" in summary.read_text()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("GITHUB_TOKEN", "", "GITHUB_TOKEN is not set"),
        ("GITHUB_TOKEN", f"{TOKEN}\nX-Evil: 1", "the token is empty, or has characters"),
        ("GITHUB_EVENT_PATH", "", "this event has no pull request"),
        ("GITHUB_REPOSITORY", "o/r/../x", "the repository is not named OWNER/NAME"),
        ("GITHUB_API_URL", "http://api.example.org", "the API's address is not https://"),
        ("GITHUB_API_URL", "http://127.0.0.1:1", "no connection"),
    ],
)
def test_without_what_it_needs_it_says_what_and_shows_the_comment(
    name: str,
    value: str,
    said: str,
    github: FakeGitHub,
    summary: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(name, value)
    post()
    err = capsys.readouterr().err
    assert said in err and said in summary.read_text() and TOKEN not in err
    assert github.requests == []


def test_the_number_stands_in_the_ref_too(
    github: FakeGitHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GITHUB_EVENT_PATH", "/nowhere")
    monkeypatch.setenv("GITHUB_REF", "refs/pull/7/merge")
    post()
    assert len(github.comments) == 1


def test_a_token_of_somebody_else_is_named(
    github: FakeGitHub, capsys: pytest.CaptureFixture[str]
) -> None:
    post("--author", "me")
    assert f"Next: --author {BOT}" in capsys.readouterr().err


def test_a_place_shows_no_token() -> None:
    assert TOKEN not in repr(PullRequest("https://x", "o/r", 1, TOKEN))
    with pytest.raises(ValueError, match="from 1 on"):
        PullRequest("https://x", "o/r", 0, TOKEN)


# --- the webhook

SECRET = "s3cr3t-path"


@pytest.fixture
def hook() -> Iterator[tuple[str, list[tuple[str, bytes]], list[int]]]:
    """An address, what was posted there, and the statuses that it answers with."""
    got: list[tuple[str, bytes]] = []
    statuses = [204]

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(statuses[-1])
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/{SECRET}?token={SECRET}", got, statuses
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize("url", ["nohost", "ftp://x/s3cr3t", "https:///s3cr3t", "http://[s3cr3t"])
def test_an_address_that_is_none_is_refused_before_anything_is_measured(
    url: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    measured: list[object] = []
    monkeypatch.setattr(checking, "check_and_judge", lambda *_: measured.append(1))
    for typed, variable in (([f"--webhook={url}"], ""), ([], url)):
        monkeypatch.setenv("PERFBENCH_WEBHOOK", variable)
        assert app.invoke(["check", "@cpu", "--history", "none", *typed]) == 2
        shown = capfd.readouterr()
        assert "wanted https://HOST/PATH" in shown.err and "s3cr3t" not in shown.out + shown.err
    assert not measured


def test_check_posts_its_verdict_and_keeps_its_exit_code(
    hook: tuple[str, list[tuple[str, bytes]], list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """By the option and by the variable; a server that refuses costs one warning."""
    url, got, statuses = hook
    folder = tmp_path / "run"
    shutil.copytree(RUN, folder)
    outcome = judge_alone(folder)
    monkeypatch.setattr(type(outcome), "write_report", lambda *_: [])  # not its pictures
    monkeypatch.setattr(checking, "check_and_judge", lambda *_: outcome)
    monkeypatch.chdir(tmp_path)
    assert app.invoke(["check", "@cpu", "--history", "none", "--webhook", url]) == 0
    monkeypatch.setenv("PERFBENCH_WEBHOOK", url)
    statuses.append(500)
    assert app.invoke(["check", "@cpu", "--history", "none"]) == 0
    assert [path for path, _ in got] == [f"/{SECRET}?token={SECRET}"] * 2
    assert got[0][1].decode() == outcome.verdict_text()
    assert json.loads(got[0][1])["kind"] == "verdict"
    said = capfd.readouterr()
    assert "the webhook at 127.0.0.1 has the verdict" in said.err
    assert "it answered 500. The verdict stands" in said.err
    statuses.append(204)
    monkeypatch.delenv("PERFBENCH_WEBHOOK")
    monkeypatch.setattr(library, "check_and_judge", lambda *_, **__: outcome)
    found = perfbench.check("@cpu", history="none", webhook=url)
    assert len(got) == 3 and any("has the verdict" in one for one in found.messages)
    assert SECRET not in said.err + said.out


@pytest.mark.parametrize(
    "url",
    [
        f"http://127.0.0.1:1/{SECRET}",
        f"ftp://example.org/{SECRET}",
        f"{SECRET}",
        f"http://u:{SECRET}@127.0.0.1:1/",
        f"http://127.0.0.1:1/{SECRET}\nX: y",
        f"http://[{SECRET}/",
        f"http://127.0.0.1:{SECRET}/",
    ],
)
def test_an_address_that_cannot_be_reached_stays_secret(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    notify(judge_alone(RUN), url)
    said = capsys.readouterr().err
    assert "has no verdict: " in said and SECRET not in said


def test_a_server_that_never_answers_is_left() -> None:
    """It takes the connection and is silent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}/"
        with pytest.raises(CannotSend, match="no answer within 0.2 s"):
            send_verdict(url, "{}", timeout_s=0.2)


def test_no_run_holds_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = ["perfbench", "check", "m.yaml", "--webhook", SECRET, f"--webhook={SECRET}", "--strict"]
    monkeypatch.setattr(sys, "argv", typed)
    assert options.argv() == ["perfbench", "check", "m.yaml", "--strict"]
    assert shown_host(f"https://u:{SECRET}@hooks.example.org/{SECRET}") == "hooks.example.org"
