"""Profiles both sides of a red or SUSPECT cell and compares their kernels."""

from perfbench.tracing.diff import TraceDiff, stored_traces, traces_markdown
from perfbench.tracing.trace import TRACE_FOLDER, TRACED_VERDICTS, TracedPair, Tracing
from perfbench.tracing.trace import Version, trace_on_red, trace_side
