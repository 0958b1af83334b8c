"""Which tests show each system that the core must have, by the feature list's row; and the small
ones that were missing.

Row 6 is `perfbench tune`, and that the lengths it finds are obeyed. Row 12 runs in Triton's
interpreter (`nox -s interpret`), and in bf16 in tests/gpu.
"""

from __future__ import annotations

import ast
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path as File

import pytest
import torch

from nsa import NSAAttention, TinyLM, selected_attention
from nsa.config import preset
from nsa.gate import SoftmaxGate
from nsa.routing import SPECS, Path
from tests import oracle
from tests.cases import SMALL, Case, assert_parity, qkv, randn

TESTS = File(__file__).parents[1]
ROOT = TESTS.parent

FEATURES: Mapping[int, tuple[str, ...]] = {
    1: (
        "nsa/test_branches.py::test_selected",
        "nsa/test_settings.py::test_force_sel_mask_is_the_explicit_request",
    ),
    2: (
        "nsa/test_features.py::test_the_slow_path_says_so_every_time",
        "nsa/test_routing.py::test_auto_is_never_slow_nor_v1",
        "perfbench/test_doctor.py::test_what_the_slow_path_says_is_what_the_doctor_looks_for",
    ),
    3: (
        "nsa/test_settings.py::test_the_environment_decides_what_runs",
        "nsa/test_routing.py::test_an_explicit_request_is_that_path_or_an_error",
    ),
    4: (
        "nsa/test_routing_fa2.py::test_fa2_on_is_served_by_fa2_wherever_it_can_be_or_refused",
        "nsa/test_routing_fa2.py::test_fa2_auto_without_fa2_is_off_with_the_reason",
        "gpu/test_parity.py::test_sliding",
    ),
    5: (
        "nsa/test_settings.py::test_use_fa2",
        "nsa/test_settings.py::test_the_window_variable_outranks_the_general_one",
        "nsa/test_settings.py::test_what_cannot_change_the_compressed_branch_is_noted",
        "nsa/test_settings.py::test_a_prototype_variable_is_known_or_retired",
    ),
    6: (
        "perfbench/test_tune.py::test_on_a_gpu_the_lengths_are_decided",
        "perfbench/test_tune.py::test_the_window_is_compared_by_cells_that_differ_in_fa2_alone",
        "nsa/test_settings.py::test_the_minimum_length_reaches_the_route",
        "nsa/test_routing_fa2.py::test_fa2_auto_leaves_a_short_window_to_sdpa",
    ),
    7: (
        "nsa/test_features.py::test_no_head_is_copied",
        "nsa/test_function.py::test_the_window_copies_no_window_per_row",
    ),
    8: (
        "nsa/test_workspace.py::test_the_closed_form_is_what_was_gathered",
        "nsa/test_workspace.py::test_interleaved_models_agree_with_fresh_ones",
        "gpu/test_property11.py::test_a_reserved_workspace_is_what_the_first_step_takes",
    ),
    9: (
        "nsa/test_properties.py::test_paths_agree_with_one_another",
        "nsa/test_routing.py::test_adaptive_names_its_rule_and_the_side",
        "nsa/test_settings.py::test_ranges_v2_off_turns_v2_into_an_explicit_v1",
    ),
    10: (
        "nsa/test_edges.py::test_v2_is_the_same_function_in_one_workspace_and_in_many",
        "gpu/test_parity.py::test_selected",
    ),
    11: (
        "nsa/test_branches.py::test_selected_with_blocks_given_by_hand",
        "nsa/test_layer.py::test_engagement_counts_every_layer_once",
    ),
    12: (
        "nsa/test_selected_kernels.py::test_selected",
        "nsa/test_choice_kernels.py::test_choice",
        "gpu/test_kernels.py::test_choice_of_blocks",
    ),
    13: (
        "nsa/test_cache.py::test_prefill_is_chunked_prefill_is_decode",
        "nsa/test_layer_options.py::test_decode_is_prefill_across_the_boundaries_of_the_papers_geometry",
    ),
    14: ("nsa/test_cache.py::test_keys_read_are_counted_and_equal_the_closed_form",),
    15: (
        "nsa/test_selection_options.py::test_narrow_scoring_changes_close_rows_only",
        "nsa/test_selection_options.py::test_recall_counts_what_the_loops_differ_in",
    ),
    16: (
        "nsa/test_traps.py::test_trap_13_no_block_is_chosen_twice",
        "nsa/test_selection_options.py::test_choose_reads_nothing_on_the_host",
    ),
    17: (
        "nsa/test_selection_options.py::test_adaptive_n_goes_by_length",
        "nsa/test_selection_options.py::test_hierarchical_search_by_hand",
        "nsa/test_selection_options.py::test_recall_is_whole_where_everything_fits_or_nothing_is_changed",
    ),
    18: (
        "nsa/test_features.py::test_the_softmax_gate_by_hand",
        "nsa/test_layer.py::test_the_module_equals_the_oracle",
        "nsa/test_fusion_bench.py::test_a_row_holds_its_raw_samples_and_its_proof",
    ),
    19: (
        "nsa/test_compression.py::test_equals_the_oracle",
        "nsa/test_compression.py::test_mlp_adds_the_encoding_to_the_tokens",
        "nsa/test_layer_options.py::test_a_layer_with_any_phi_equals_the_oracle",
    ),
    20: ("nsa/test_layer.py::test_a_branch_that_is_off_is_not_computed",),
    21: (
        "nsa/test_features.py::test_the_prototype_model_has_78_3_million_parameters",
        "nsa/test_config.py::test_the_prototype_preset",
        "nsa/test_layer.py::test_the_dense_twin_is_full_causal_attention",
    ),
    22: (
        "nsa/test_errors.py::test_strict_mode_names_what_is_wrong_with_a_row_of_blocks",
        "nsa/test_settings.py::test_each_new_route_is_logged_once",
        "nsa/test_dispatch.py::test_every_branch_is_marked_by_its_counter",
    ),
    23: (
        "nsa/test_statistics.py::test_selection_against_loops",
        "nsa/test_statistics.py::test_gates_against_loops",
        "nsa/test_statistics_effects.py::test_observing_never_syncs",
        "nsa/test_statistics_effects.py::test_read_moves_one_tensor",
    ),
}


def functions_of(file: File) -> set[str]:
    """Names of the functions at the top of a module: what pytest collects there."""
    return {
        node.name
        for node in ast.parse(file.read_text("utf-8")).body
        if isinstance(node, ast.FunctionDef)
    }


def test_every_row_has_its_tests() -> None:
    assert set(FEATURES) | {12} == set(range(1, 24))
    assert all(FEATURES.values()), "a row without a test"


@pytest.mark.parametrize("row", FEATURES)
def test_a_named_test_is_one_that_exists(row: int) -> None:
    for name in FEATURES[row]:
        file, function = name.split("::")
        assert function.startswith("test_") and function in functions_of(TESTS / file), (
            f"row {row}: no {name}"
        )


# 2. The slow path is loud.


def test_the_slow_path_says_so_every_time(caplog: pytest.LogCaptureFixture) -> None:
    """The first implementation's log lines, which its users grep for; no other path prints them."""
    q, k, v = qkv(Case(20, 2, 8, 8, 1))
    blocks = torch.zeros(1, 20, 2, 1, dtype=torch.int32)
    with caplog.at_level(logging.WARNING, logger="nsa"):
        for path in (Path.REFERENCE, Path.V1, Path.V2, Path.MASKED):  # what needs no GPU
            caplog.clear()
            for _ in range(2):
                selected_attention(q, k, v, blocks, sel_block=16, path=path, fa2="off")
            said = [r for r in caplog.records if "Using slow _sdpa_over_ranges" in r.getMessage()]
            assert [r.levelname for r in said] == (
                ["WARNING"] * 2 if path is Path.REFERENCE else []
            ), path
    assert SPECS[Path.REFERENCE].slow


# 7. No head is copied to serve its group.


def copies_of_heads(tree: ast.AST) -> list[int]:
    """Lines that name ``repeat_interleave``, whatever it is called on."""
    names = [
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.Attribute | ast.Name)
        and "repeat_interleave" in ast.unparse(n).split(".")[-1]
    ]
    # getattr(x, "...")
    texts = [
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.Constant) and n.value == "repeat_interleave"
    ]
    imported = [
        n.lineno
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and any(a.name == "repeat_interleave" for a in n.names)
    ]
    return names + texts + imported


@pytest.mark.parametrize(
    "violation",
    [
        "k.repeat_interleave(6, 2)",
        "torch.repeat_interleave(k, 6, 2)",
        "from torch import repeat_interleave as r",
        "getattr(k, 'repeat_interleave')",
    ],
)
def test_the_checker_sees_what_it_bans(violation: str) -> None:
    assert copies_of_heads(ast.parse(violation)) == [1]


def test_no_head_is_copied() -> None:
    """Query heads of one kv head are adjacent, so a view serves; a copy of K and V for each head is
    what GQA saves.
    """
    files = sorted([*ROOT.glob("nsa/**/*.py"), *ROOT.glob("perfbench/**/*.py")])
    assert len(files) > 100
    assert [
        (f.name, lines)
        for f in files
        if (lines := copies_of_heads(ast.parse(f.read_text("utf-8"))))
    ] == []


# 18. The softmax gate.


@pytest.mark.parametrize("branches", [("cmp", "sel", "win"), ("cmp", "win")], ids="+".join)
def test_the_softmax_gate_by_hand(branches: tuple[str, ...]) -> None:
    """One MLP a kv group on the mean of the group's queries: z / (1 + e^-z) between two matrices,
    softmax at T = 0.5.
    """
    T, G, H, D = 5, 2, 3, 4
    torch.manual_seed(0)
    gate = SoftmaxGate(G, D, temperature=0.5, branches=branches).double()
    q = 3 * randn(1, T, G * H, D, seed=1, dtype=torch.float64)
    got = gate(torch.empty(1, T, 7, dtype=torch.float64), q)
    assert got.shape == (1, T, G * H, 3)
    on = [i for i, branch in enumerate(("cmp", "sel", "win")) if branch in branches]
    rows, up, down = q[0].tolist(), gate.up.tolist(), gate.down.tolist()
    for t in range(T):
        for g in range(G):
            mean = [sum(rows[t][g * H + h][d] for h in range(H)) / H for d in range(D)]
            hidden = [sum(mean[d] * up[g][d][j] for d in range(D)) for j in range(D)]
            hidden = [z / (1 + math.exp(-z)) for z in hidden]
            weight = {
                i: math.exp(sum(hidden[j] * down[g][j][i] for j in range(D)) / 0.5) for i in on
            }
            want = [weight.get(i, 0.0) / sum(weight.values()) for i in range(3)]
            for h in range(H):
                # The softmax is in fp32 whatever its inputs.
                assert got[0, t, g * H + h].tolist() == pytest.approx(want, rel=1e-6, abs=1e-7), (
                    t,
                    g,
                    h,
                )
                assert len(on) == 3 or got[0, t, g * H + h, 1] == 0


@pytest.mark.parametrize("branches", [("cmp", "sel", "win"), ("sel", "win")], ids="+".join)
def test_a_layer_with_softmax_gates_is_their_sum_of_branches(branches: tuple[str, ...]) -> None:
    """The gate sees the queries before they are rotated: afterwards its group means would turn with
    the position.
    """
    torch.manual_seed(0)
    layer = NSAAttention(
        24, 6, 2, 8, config=replace(SMALL, gate="softmax", gate_temperature=0.5, branches=branches)
    ).double()
    x = 3 * randn(1, 100, 24, seed=1, dtype=torch.float64)
    q, k, v = (x @ getattr(layer, f"{name}_proj").weight.T for name in "qkv")
    q, at = q.view(1, 100, 6, 8), torch.arange(100)
    hidden = torch.einsum("btgd,gdh->btgh", q.view(1, 100, 2, 3, 8).mean(3), layer.gate.up)
    logits = torch.einsum("btgh,ghn->btgn", hidden * torch.sigmoid(hidden), layer.gate.down) / 0.5
    weight = logits.exp() * torch.tensor([branch in branches for branch in ("cmp", "sel", "win")])
    gates = (
        (weight / weight.sum(-1, keepdim=True))[:, :, :, None]
        .expand(-1, -1, -1, 3, -1)
        .reshape(1, 100, 6, 3)
    )
    keys = [oracle.rope(y, at) for y in k.view(1, 100, 3, 2, 8).unbind(2)]
    pairs = zip(keys, v.view(1, 100, 3, 2, 8).unbind(2), strict=True)
    o = oracle.nsa(oracle.rope(q, at), *pairs, gates, config=layer.config)
    assert_parity(layer(x), o.flatten(2) @ layer.o_proj.weight.T, "o")


# 21. The first implementation's model.


def test_the_prototype_model_has_78_3_million_parameters() -> None:
    """Embedding and head, then twelve layers of: two norms, MLP, q, k and v of three branches, o,
    softmax gate.
    """
    with torch.device("meta"):
        model = TinyLM(preset("m7c_125m"))
    attention = 768 * 12 * 64 + 2 * (768 * 3 * 2 * 64) + 12 * 64 * 768 + (2 * 64 * 64 + 2 * 64 * 3)
    by_hand = 2 * 256 * 768 + 768 + 12 * (2 * 768 + 2 * 4 * 768 * 768 + attention)
    assert sum(p.numel() for p in model.parameters()) == by_hand == 78_372_096
