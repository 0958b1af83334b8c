"""Judges: rows in, verdicts out, without a file, a clock or torch."""

from perfbench.gate.intervals import CONFIDENCE, Band, bands, least_sure_first, prior_half_pct
from perfbench.gate.baseline import baseline_of_run, promote
from perfbench.gate.bimodality import modes
from perfbench.gate.bisection import PairFound, SoughtDrop, SpeedInterval, StepFound, StepTurn
from perfbench.gate.bisection import StepShares, judge_step, pair_found, pairs_of_step, sought
from perfbench.gate.bisection import decide_step, interval, step_shares
from perfbench.gate.boundary import boundaries
from perfbench.gate.cards import cards_of, named, on_several, sentinels_by_card
from perfbench.gate.comparable import comparability_key, environment_differences, sentinel_rates
from perfbench.gate.comparison import compare
from perfbench.gate.confirmation import confirm_all, next_looks, plan_confirmation
from perfbench.gate.coverage import interrupted_between, paired_rows, rows_by_cell, usable
from perfbench.gate.evidence import DEVICE, HOST, Evidence
from perfbench.gate.explain import explain_cell
from perfbench.gate.hard_rules import WHOLE
from perfbench.gate.judgement import CellVerdict, Finding, Judgement, severity
from perfbench.gate.judging import judge
from perfbench.gate.own_steps import files_of
from perfbench.gate.pair_rows import MeasuredPairs
from perfbench.gate.planned import judge_plan
from perfbench.gate.screen import judge_by_baseline
from perfbench.gate.sequential import EARLY_DROP_PCT, LOOKS, PAIRS_PER_BLOCK, base_first
from perfbench.gate.sequential import decide_at, has_fresh_servers, looks_of
from perfbench.gate.strictness import joint_rules
from perfbench.gate import stats
