"""Finds the lengths from which each path pays on one GPU."""

from perfbench.tuning.decide import tell as decide
from perfbench.tuning.matrix import DEFAULT_LENGTHS, Machine, matrix_text as tuning_matrix
from perfbench.tuning.matrix import parse_lengths, refuse_settings
from perfbench.tuning.report import to_json as tuning_json, to_markdown as tuning_markdown
