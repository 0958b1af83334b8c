"""A matrix file in, a validated Matrix and its Plan out."""

from perfbench.matrix.named_path import expected_of
from perfbench.matrix.attention_calls import held_tokens, layer_calls, of_selected, pieces, route_of
from perfbench.matrix.judge_rules import JudgeRules
from perfbench.matrix.matrix import Excluded, Matrix, load_matrix, parse_matrix
from perfbench.matrix.matrix import cells_of, check_configs, policies, sentinels_of
from perfbench.matrix.matrix import stored_matrix, trained_for
from perfbench.matrix.named_calls import COUNTED_INSIDE, INSIDE, NAMESPACE, SDPA
from perfbench.matrix.named_calls import OperatorCalls, operator_calls
from perfbench.matrix.plan import Plan, build_plan, plan_text
from perfbench.matrix.plan import route_line, plan_json
from perfbench.matrix.own_step import own_folder_for, step_folder
from perfbench.matrix.plugin_file import find
from perfbench.matrix.peers import located, model_with, route_of_peer
from perfbench.matrix.policy import GatePolicy, Policies
from perfbench.matrix.schema import Target, matrix_schema
from perfbench.matrix.shipped import MARK, shipped_file, shipped_name, shipped_names
