"""Finds the lengths from which each path pays on one GPU."""

from perfbench.tuning.apply import changes, entry_of, refusals, shown, with_entry
from perfbench.tuning.decide import TunedRun, decide_run
from perfbench.tuning.matrix import DEFAULT_LENGTHS, Machine, tuning_matrix
from perfbench.tuning.matrix import parse_lengths, refuse_settings
from perfbench.tuning.report import tuning_json, tuning_markdown
