"""Prints a judged run: Markdown, pictures, JSON, JUnit, GitHub, terminal; no clock and no torch."""

from perfbench.report.context import Beside
from perfbench.report.files import write as render, write_ci
from perfbench.report.github import announce, append_summary, commands as github_commands
from perfbench.report.terminal import table as terminal_table
from perfbench.report.verdict_json import data as to_json, verdict_schema
