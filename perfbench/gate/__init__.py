"""Judges: rows in, verdicts out, without a file, a clock or torch."""

from perfbench.gate.baseline import baseline_of_run, promote
from perfbench.gate.bimodality import modes
from perfbench.gate.boundary import boundaries
from perfbench.gate.comparable import comparability_key, environment_differences, sentinel_rates
from perfbench.gate.comparison import compare
from perfbench.gate.confirmation import MeasuredPairs, confirm_all, pairs_for
from perfbench.gate.coverage import interrupted_between, paired_rows, rows_by_cell, usable
from perfbench.gate.evidence import DEVICE, Evidence
from perfbench.gate.explain import explain_cell
from perfbench.gate.judgement import CellVerdict, Finding, Judgement, severity
from perfbench.gate.judging import judge
from perfbench.gate.screen import judge_by_baseline
from perfbench.gate import stats
