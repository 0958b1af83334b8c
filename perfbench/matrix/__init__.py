"""A matrix file in, a validated Matrix and its Plan out."""

from perfbench.matrix.attention_calls import held_tokens, layer_calls, of_selected, pieces, route_of
from perfbench.matrix.matrix import Excluded, Matrix, load as load_matrix, parse as parse_matrix
from perfbench.matrix.matrix import policies
from perfbench.matrix.plan import Plan, build as build_plan, render_text as plan_text
from perfbench.matrix.plan import route_line, to_json as plan_json
from perfbench.matrix.policy import GatePolicy, Policies
from perfbench.matrix.schema import Target, json_schema as matrix_schema
