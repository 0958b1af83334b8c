"""Prints a judged run: Markdown, pictures, JSON, JUnit, GitHub, terminal; no clock and no torch."""

from perfbench.report.bisect import bisect_exit, bisect_json, bisect_markdown
from perfbench.report.comment import AbsentRun, CommentedRun, comment_text
from perfbench.report.context import ReportContext
from perfbench.report.files import render, report_text, write_ci
from perfbench.report.frame import load
from perfbench.report.gap import gap_text, gaps
from perfbench.report.github import announce, append_summary
from perfbench.report.github import github_command, github_commands_at_most
from perfbench.report.terminal import terminal_table
from perfbench.report.verdict_json import read_verdict, to_json, verdict_file
from perfbench.report.verdict_json import text as verdict_text
from perfbench.report.verdict_json import verdict_schema
