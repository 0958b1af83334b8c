"""Judges: rows in, verdicts out, without a file, a clock or torch."""

from perfbench.gate.baseline import of_run as baseline_of_run
from perfbench.gate.bimodality import modes
from perfbench.gate.comparable import differences as environment_differences
from perfbench.gate.comparable import ground_of as comparability_key, sentinel_rates
from perfbench.gate.comparison import judge as compare
from perfbench.gate.confirmation import Measured, conclude_all, pairs_for
from perfbench.gate.coverage import paired, parted as interrupted_between, rows_by_cell
from perfbench.gate.coverage import throttled as is_throttled, usable
from perfbench.gate.evidence import DEVICE, Evidence
from perfbench.gate.explain import text as explain_cell
from perfbench.gate.judgement import CellVerdict, Finding, Judgement, severity
from perfbench.gate.judging import judge
from perfbench.gate import stats
