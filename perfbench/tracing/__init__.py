"""Profiles both sides of a red cell and compares their kernels."""

from perfbench.tracing.diff import TraceDiff
from perfbench.tracing.trace import FOLDER as TRACE_FOLDER, RED as RED_VERDICTS
from perfbench.tracing.trace import Sides as TracedSides, Tracing, Version, on_red as trace_on_red
from perfbench.tracing.trace import trace_side
