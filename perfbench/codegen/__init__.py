"""Compiles nsa's kernels without a GPU and judges their machine code by a baseline in git."""

from perfbench.codegen.baseline import find_baseline, merged
from perfbench.codegen.baseline import write_baseline_file
from perfbench.codegen.building import build_all, chosen_builds, chosen_kernels
from perfbench.codegen.judging import CodeJudgement, judge_code
from perfbench.codegen.pages import code_json, code_markdown, code_text
