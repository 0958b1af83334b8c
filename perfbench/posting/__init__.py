"""Sends what was judged to others: a comment to GitHub, a verdict to a webhook."""

from perfbench.posting.http import CannotSend
from perfbench.posting.pull_request import PullRequest, upsert_comment
from perfbench.posting.webhook import is_address, send_verdict, shown_host
