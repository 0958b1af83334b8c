"""Proof before timing: green for every path, red for a fault planted in each part, and in the gradients alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import attention as nsa_attention
from nsa import dense as nsa_dense
from nsa import functional, layout, selection
from nsa.config import ModelConfig, NSAConfig
from nsa.ops import combine, compressed, sdpa, sliding
from nsa.ops.kernels import decode
from nsa.ops.kernels.selected import MIN_ROWS_TO_SORT
from nsa.ops.positions import query_positions
from nsa.ops.selected import PATHS
from nsa.rope import rotate
from nsa.routing import DENSE_KINDS, Path, Problem, Request, route
from perfbench import cache_parity, parity
from perfbench.blocks_parity import BlocksProof
from perfbench.deviation import Comparison
from perfbench.result import ParityLine
from tests.cases import PATHS_HERE
from tests.perfbench.builders import H100
from tests.perfbench.jobs import TINY, cell_of, route_of

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = (5 + 4) * 16 + 1  # (n + 4) l' + 1 of the tiny geometry
INPUTS = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")
Attend = Callable[..., Tensor]


def prove(
    path: str = "v2", *, model: ModelConfig = TINY, train: bool = True, dtype: torch.dtype = torch.float32, **changes: Any
) -> ParityLine:
    """The proof of a cell of 64 tokens, or of ``tokens``."""
    tokens = changes.setdefault("tokens", 64)
    timed = route_of(cell_of(path, seq_len=tokens, dtype={torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]), model)
    fa2 = "n/a" if path in DENSE_KINDS else "off"
    values: dict[str, Any] = {"path": path, "fa2": fa2, "dtype": dtype, "device": "cpu", "train": train, "seed": 3}
    return parity.check(model, timed, **{**values, **changes})


def wrong(line: ParityLine) -> set[str]:
    """Tensors of the attention function beyond their tolerance; ``layer`` has tests of its own below."""
    assert line.ok == all(ratio <= 1 for ratio in line.tensors.values())
    return {name for name, ratio in line.tensors.items() if ratio > 1} - {"layer"}


@pytest.mark.parametrize("path", [*PATHS_HERE, "auto", "adaptive"])
def test_every_path_is_proved(path: str) -> None:
    line = prove(path, tokens=100)  # a few more than are all selected
    assert line.ok and wrong(line) == set(), line.worst
    assert set(line.tensors) == {"o", "blocks", "layer", *(f"d{name}" for name in INPUTS)}
    assert (line.tokens, line.rows, line.proved_in) == (TOKENS, 64, None)
    assert 0 < line.max_error <= line.tolerance < 1e-3 and line.tensors["blocks"] == 0.0
    assert max(line.tensors.values()) < 0.7, "the tolerance leaves room: this is no luck of one seed"


@pytest.mark.parametrize(("phi", "names"), [("linear", {"weight"}), ("mlp", {"position", "up", "down"})])
def test_a_learned_phi_is_proved_with_its_gradients(monkeypatch: pytest.MonkeyPatch, phi: str, names: set[str]) -> None:
    model = replace(TINY, nsa=replace(TINY.nsa, phi=phi))
    line = prove("masked", model=model)
    learned = {f"dphi_{which}.{name}" for which in "kv" for name in names}
    assert line.ok and set(line.tensors) == {"o", "blocks", "layer", *(f"d{name}" for name in INPUTS), *learned}, line.worst
    compress = functional.compress

    def off(x: Tensor, *, config: NSAConfig, params: Any) -> Tensor:
        return compress(x, config=config, params={name: 1.01 * value for name, value in params.items()})

    monkeypatch.setattr(functional, "compress", off)
    assert {"o", "dphi_v.weight" if phi == "linear" else "dphi_v.down"} <= wrong(prove("masked", model=model))


def test_the_dense_twin_is_proved() -> None:
    line = prove("dense")
    assert line.ok and set(line.tensors) == {"o", "layer", "dq", "dk_sel", "dv_sel"} and (line.tokens, line.rows) == (TOKENS, 64)


@pytest.mark.parametrize("path", ["v2", "dense"])
def test_a_forward_cell_needs_no_gradients(path: str) -> None:
    assert set(prove(path, train=False).tensors) - {"blocks"} == {"o", "layer"}


@pytest.mark.parametrize("path", ["v2", "masked", "v1"])
def test_bf16_is_judged_by_its_own_rounding(path: str) -> None:
    line = prove(path, dtype=torch.bfloat16)
    assert line.ok, line.worst
    assert 1e-4 < line.tolerance < 0.3


def variants() -> dict[str, NSAConfig]:
    changes: list[dict[str, Any]] = [{"share_kv": True}, {"gate": "softmax"}, {"num_initial": 0}, {"num_local": 1}, {"window": 1}]
    changes += [{"cmp_block": 16, "cmp_stride": 8}, {"sel_block": 8, "num_selected": 3}, {"rope": "half"}, {"cmp_rope": "after"}]
    changes += [{"branches": branches} for branches in (("cmp",), ("sel",), ("win",), ("cmp", "win"), ("sel", "win"))]
    return {str(change): replace(TINY.nsa, **change) for change in changes}


@pytest.mark.parametrize("train", [True, False], ids=["train", "forward"])
@pytest.mark.parametrize("name", variants())
def test_every_geometry_is_proved(name: str, train: bool) -> None:
    """What the config allows, the proof must judge: a branch that is left out has gradients of exactly 0."""
    line = prove("masked", model=replace(TINY, nsa=variants()[name]), train=train)
    assert line.ok, line.worst


@pytest.mark.parametrize(("heads", "kv_heads", "dims"), [(6, 1, (16, 16)), (3, 3, (12, 20)), (4, 2, (64, 64))])
def test_heads_are_the_cells_own(heads: int, kv_heads: int, dims: tuple[int, int]) -> None:
    model = replace(TINY, num_heads=heads, num_kv_heads=kv_heads, head_dim=dims[0], v_head_dim=dims[1])
    assert prove("v2", model=model).ok


# Faults. Each replaces what dispatch or the public function calls, as a bug in that file would.


def in_path(monkeypatch: pytest.MonkeyPatch, path: Path, change: Callable[[Attend], Attend]) -> None:
    monkeypatch.setitem(PATHS, path, change(PATHS[path]))  # type: ignore[arg-type]


def one_key_too_many(attend: Attend) -> Attend:
    return lambda *x, q_start, **options: attend(*x, q_start=q_start + 1, **options)


def last_block_dropped(attend: Attend) -> Attend:
    def dropped(q: Tensor, k: Tensor, v: Tensor, blocks: Tensor, **options: Any) -> Tensor:
        return attend(q, k, v, torch.cat([blocks[..., :-1], torch.full_like(blocks[..., :1], -1)], -1), **options)

    return dropped


def a_little_too_sharp(attend: Attend) -> Attend:
    return lambda *x, scale, **options: attend(*x, scale=scale * 1.001, **options)


def heads_in_the_wrong_group(attend: Attend) -> Attend:
    return lambda q, k, v, *rest, **options: attend(q, k.flip(2), v.flip(2), *rest, **options)


SELECTED_FAULTS = [one_key_too_many, last_block_dropped, a_little_too_sharp, heads_in_the_wrong_group]


@pytest.mark.parametrize("train", [True, False], ids=["train", "forward"])
@pytest.mark.parametrize("fault", SELECTED_FAULTS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("path", [Path.V1, Path.V2, Path.MASKED])
def test_a_fault_in_a_selected_path(monkeypatch: pytest.MonkeyPatch, path: Path, fault: Callable[[Attend], Attend], train: bool) -> None:
    in_path(monkeypatch, path, fault)
    line = prove(path, train=train)
    assert not line.ok and "o" in wrong(line) and line.max_error > line.tolerance
    assert not train or {"dk_sel", "dv_sel"} <= wrong(line) <= {"o", "dq", "dk_sel", "dv_sel", "dgates"}, "and only there"
    others = [other for other in (Path.V1, Path.V2, Path.MASKED) if other is not path]
    assert all(prove(other, train=False).ok for other in others), "it is this path's proof, not another's"


@pytest.mark.parametrize("fault", SELECTED_FAULTS[:2], ids=lambda fault: fault.__name__)
def test_a_fault_in_bf16(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Attend], Attend]) -> None:
    """bf16's tolerance is wide, and one key more or less is still far outside."""
    in_path(monkeypatch, Path.V2, fault)
    assert "o" in wrong(prove(Path.V2, dtype=torch.bfloat16))


@pytest.mark.parametrize("by", [1, -1])
def test_a_window_of_another_length(monkeypatch: pytest.MonkeyPatch, by: int) -> None:
    attend = sliding.attend
    monkeypatch.setattr(sliding, "attend", lambda *x, window, **options: attend(*x, window=window + by, **options))
    assert {"o", "dk_win", "dv_win"} <= wrong(prove()) <= {"o", "dq", "dk_win", "dv_win", "dgates"}


def test_a_compressed_block_seen_before_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = compressed.attend
    monkeypatch.setattr(compressed, "attend", lambda *x, block, **options: attend(*x, block=block - 1, **options))
    assert {"o", "dk_cmp", "dv_cmp"} <= wrong(prove()) <= {"o", "dq", "dk_cmp", "dv_cmp", "dgates"}


def test_blind_rows_that_are_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first compressed block ends, that branch is 0; a mean over everything would leak the future."""
    attend = compressed.attend
    monkeypatch.setattr(compressed, "attend", lambda q, k, v, **options: attend(q, k, v, **options) + 1e-3)
    assert "o" in wrong(prove(train=False))


def test_compression_over_the_wrong_tokens(monkeypatch: pytest.MonkeyPatch) -> None:

    compress = functional.compress
    monkeypatch.setattr(functional, "compress", lambda x, *, config, params=None: compress(x.roll(1, 1), config=config))
    assert "o" in wrong(prove(train=False))


def test_gates_of_the_wrong_branch(monkeypatch: pytest.MonkeyPatch) -> None:
    gated_sum = combine.gated_sum
    monkeypatch.setattr(combine, "gated_sum", lambda gates, outputs, columns: gated_sum(gates, outputs, [1, 0, 2]))
    assert {"o", "dgates"} <= wrong(prove())


@pytest.mark.parametrize("shift", [1, -1])
def test_a_selection_that_is_off_by_one_block(monkeypatch: pytest.MonkeyPatch, shift: int) -> None:
    choose = selection.choose

    def shifted(*x: Any, **options: Any) -> Tensor:
        blocks = choose(*x, **options)
        return torch.where(blocks < 0, blocks, (blocks + shift).clamp(min=0)).int()

    monkeypatch.setattr(selection, "choose", shifted)
    line = prove(train=False)
    assert not line.ok and "blocks" in wrong(line)


def test_a_selection_that_skips_the_best_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention over wrong blocks is right attention: only the comparison of the sets sees it."""
    scores = selection.block_scores
    monkeypatch.setattr(selection, "block_scores", lambda *x: -scores(*x))
    line = prove()
    assert wrong(line) == {"blocks"} and not line.ok and line.max_error > line.tolerance


def test_equal_scores_are_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two blocks score alike, either may be taken: rounding decides, not the code."""
    choose = selection.choose
    monkeypatch.setattr(parity.oracle, "select", lambda q, k, **options: _as_if_tied(choose, q, k, **options))
    assert prove(train=False).tensors["blocks"] == 0.0


def _as_if_tied(choose: Attend, q: Tensor, k: Tensor, *, positions: Tensor, config: NSAConfig, kv_len: int) -> tuple[Tensor, Tensor]:
    blocks = torch.full((*q.shape[:2], k.shape[2], config.num_selected), 99)
    return blocks, torch.full(blocks.shape[:3], parity.NEAR_TIE / 2, dtype=torch.float64)


# Gradients alone: the output is right to the last bit.


def gradient_times(x: Tensor, factor: float) -> Tensor:
    return x.detach() + (x - x.detach()) * factor if factor else x.detach()


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.001, 2.0])
@pytest.mark.parametrize("tensor", ["k", "v"])
@pytest.mark.parametrize("branch", ["cmp", "sel", "win"])
def test_a_wrong_gradient_alone(monkeypatch: pytest.MonkeyPatch, branch: str, tensor: str, factor: float) -> None:
    """0 is a forgotten gradient (`detach`): it must be said like any other wrong number."""

    def spoil(attend: Attend) -> Attend:
        def spoiled(q: Tensor, k: Tensor, v: Tensor, *rest: Tensor, **options: Any) -> Tensor:
            k, v = (gradient_times(x, factor if name == tensor else 1.0) for name, x in (("k", k), ("v", v)))
            return attend(q, k, v, *rest, **options)

        return spoiled

    if branch == "sel":
        in_path(monkeypatch, Path.V2, spoil)
    else:
        module = {"cmp": compressed, "win": sliding}[branch]
        monkeypatch.setattr(module, "attend", spoil(module.attend))
    assert prove(train=False).ok, "the output is right"
    assert wrong(prove()) == {f"d{tensor}_{branch}"}


def test_gates_without_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    gated_sum = combine.gated_sum
    monkeypatch.setattr(combine, "gated_sum", lambda gates, *rest: gated_sum(gradient_times(gates, 0.5), *rest))
    assert prove(train=False).ok and wrong(prove()) == {"dgates"}


@pytest.mark.parametrize("train", [True, False], ids=["train", "forward"])
def test_the_dense_twin_is_judged(monkeypatch: pytest.MonkeyPatch, train: bool) -> None:
    causal = sdpa.causal
    monkeypatch.setattr(sdpa, "causal", lambda q, k, v, **options: causal(q, k.roll(1, 1), v.roll(1, 1), **options))
    assert "o" in wrong(prove("dense", train=train))


@pytest.mark.parametrize("path", [Path.V2, Path.MASKED])
def test_sequences_of_a_batch_that_are_mixed_up(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    def mixed(attend: Attend) -> Attend:
        return lambda q, k, v, *rest, **options: attend(q, k.flip(0), v.flip(0), *rest, **options)

    in_path(monkeypatch, path, mixed)
    assert "o" in wrong(prove(path, train=False))


def test_a_wrong_gradient_of_the_dense_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    causal = sdpa.causal
    monkeypatch.setattr(sdpa, "causal", lambda q, k, v, **options: causal(q, gradient_times(k, 1.01), v, **options))
    assert wrong(prove("dense")) == {"dk_sel"}


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_wrong_and_can_be_stored(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    attend = compressed.attend
    monkeypatch.setattr(compressed, "attend", lambda *x, **options: attend(*x, **options) + value)
    line = prove(train=False)
    assert not line.ok and line.tensors["o"] == 1e9
    assert "NaN" not in json.dumps(line.model_dump()) and "Infinity" not in json.dumps(line.model_dump())


@pytest.mark.parametrize("row", [0, 3, 4, 7, 8, 15, 16, 23, 24, 79, 80, TOKENS - 1])
def test_a_fault_at_one_boundary_row(monkeypatch: pytest.MonkeyPatch, row: int) -> None:
    """Both sides of stride, block, selection block, window and the end of "everything is selected", first and last."""

    def spoil(attend: Attend) -> Attend:
        def bumped(q: Tensor, *rest: Tensor, **options: Any) -> Tensor:
            here = torch.arange(q.shape[1])[:, None, None] == row
            return attend(q, *rest, **options) + 1e-2 * here * (q.shape[1] == TOKENS)

        return bumped

    in_path(monkeypatch, Path.V2, spoil)
    assert all("o" in wrong(prove(train=False, seed=seed)) for seed in (1, 2)), "not by luck of a seed"


# The layer that is timed: its own wiring, where the attention function is in order.


def only_the_layer(line: ParityLine) -> bool:
    return not line.ok and line.tensors["layer"] > 1 and wrong(line) == set() and line.worst.startswith("layer: ")


@pytest.mark.parametrize("path", ["v2", "dense"])
@pytest.mark.parametrize("fault", ["nothing rotated", "a turn too far", "half for interleaved"])
def test_rope_of_the_layer(monkeypatch: pytest.MonkeyPatch, path: str, fault: str) -> None:
    rotated: dict[str, Attend] = {
        "nothing rotated": lambda x, theta, *, kind: x,
        "a turn too far": lambda x, theta, *, kind: rotate(x, theta**1.001, kind=kind),
        "half for interleaved": lambda x, theta, *, kind: rotate(x, theta, kind="half"),
    }
    monkeypatch.setattr(nsa_dense if path == "dense" else nsa_attention, "rotate", rotated[fault])
    assert only_the_layer(prove(path))


def test_rope_that_moves_all_positions_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only distances matter where keys are rotated before compression: what the proof must not depend on."""
    monkeypatch.setattr(layout, "query_positions", lambda start, *rest: query_positions(start + 5, *rest))
    assert prove(train=False).ok


@pytest.mark.parametrize("order", [(0, 2, 1), (1, 0, 2), (2, 1, 0)])
def test_branches_with_one_anothers_keys(monkeypatch: pytest.MonkeyPatch, order: tuple[int, ...]) -> None:
    per_branch = nsa_attention.NSAAttention._per_branch

    def crossed(self: nsa_attention.NSAAttention, *x: Tensor) -> list[Tensor]:
        return [per_branch(self, *x)[i] for i in order]

    monkeypatch.setattr(nsa_attention.NSAAttention, "_per_branch", crossed)
    assert only_the_layer(prove(train=False))


@pytest.mark.parametrize("fault", ["order", "ungated", "one head's for all"])
def test_gates_of_the_layer(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    attend_view = nsa_attention.attend_view
    spoil: Attend = {
        "order": lambda gates: gates.flip(-1),
        "ungated": torch.ones_like,
        "one head's for all": lambda gates: gates[:, :, :1].expand_as(gates),
    }[fault]
    monkeypatch.setattr(nsa_attention, "attend_view", lambda q, gates, *x, **options: attend_view(q, spoil(gates), *x, **options))
    assert only_the_layer(prove(train=False))


def test_the_layer_takes_the_cells_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault of v1 alone, at the layer's length alone, shows in the layer of v1 and in no other."""

    def spoil(attend: Attend) -> Attend:
        return lambda q, *rest, **options: attend(q, *rest, **options) + 1e-2 * (q.shape[1] != TOKENS)

    in_path(monkeypatch, Path.V1, spoil)
    assert only_the_layer(prove("v1", train=False)) and prove("v2", train=False).ok


def test_another_route_proves_nothing() -> None:
    timed = route_of(cell_of("v1"))
    with pytest.raises(parity.RouteDiffers, match=r"sel.v2.*sel.v1"):
        parity.check(TINY, timed, path="v2", fa2="off", dtype=torch.float32, device="cpu", train=False, seed=3)
    with pytest.raises(parity.RouteDiffers, match="dense.sdpa"):
        parity.check(TINY, timed, path="dense", fa2="n/a", dtype=torch.float32, device="cpu", train=False, seed=3)


def test_adaptive_is_proved_on_the_path_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the proof's own length it would take v1; the timed cell takes v2."""
    timed = route_of(cell_of("adaptive", seq_len=2048))
    assert timed.branch("sel").implementation == "v2"
    in_path(monkeypatch, Path.V2, last_block_dropped)
    line = parity.check(TINY, timed, path="adaptive", fa2="off", dtype=torch.float32, device="cpu", train=False, seed=3)
    assert not line.ok
    assert prove("adaptive", train=False).ok, "v1 at 64 tokens is untouched"


def test_inputs_follow_the_seed() -> None:
    assert prove(train=False) == prove(train=False)
    assert prove(train=False).max_error != prove(train=False, seed=4).max_error


# Path triton: which kernels serve a call goes by its rows, so the proof has both kinds.


def rows_of(chunk: int | None, batch: int = 1, tokens: int | None = None) -> list[int]:
    """(b, t, kv head) rows of the largest call of each proof of m7c_125m."""
    model = ModelConfig.from_mapping({"preset": "m7c_125m"})
    at = parity.standard_tokens(model.nsa) if tokens is None else tokens
    longest = at if chunk is None else max(b - a for a, b in cache_parity.pieces_of(chunk, [], at))
    return [n * longest * model.num_kv_heads for n in parity._batches(model, "triton", at, chunk, batch)]


@pytest.mark.parametrize("chunk", [None, 2048, 256])
@pytest.mark.parametrize("tokens", [None, 200, 20_000])
def test_few_rows_and_many_are_proved(chunk: int | None, tokens: int | None) -> None:
    found = rows_of(chunk, tokens=tokens)
    assert max(found) >= MIN_ROWS_TO_SORT and len(found) == (1 if chunk is None and tokens == 20_000 else 2)
    assert len(found) == 1 or min(found) < MIN_ROWS_TO_SORT


def test_a_decode_step_is_proved_with_its_own_sequences() -> None:
    model = ModelConfig.from_mapping({"preset": "m7c_125m"})
    assert [parity._batches(model, "triton", 4_129, 1, n) for n in (1, 2, 64)] == [(2, 1), (2,), (2, 64)]
    assert parity._batches(model, "v2", 1_281, 1, 64) == (2,)


def test_a_decode_step_is_proved_where_its_compressed_keys_are_split() -> None:
    model = ModelConfig.from_mapping({"preset": "m7c_125m"})
    here = replace(H100, triton_provider="triton 3.7.1")
    timed = route(Request("triton"), Problem.of(model, batch=64, tokens=4_096, dtype="bfloat16"), here)
    tokens = parity._standard(model, timed, 1)
    keys = (tokens - model.nsa.cmp_block) // model.nsa.cmp_stride + 1
    assert min(decode.interval_splits(n * model.num_kv_heads, keys, banded=False) for n in (2, 64)) > 1
    assert parity._standard(model, timed, None) == parity.standard_tokens(model.nsa)


def test_a_tensor_that_is_compared_twice_keeps_the_worse() -> None:
    compare = Comparison(torch.float32)
    truth = torch.ones(3, dtype=torch.float64)
    for error in (5e-6, 5e-5, 1e-6):
        compare.add("o", truth + error, truth, truth)
    assert compare.ratios["o"] == pytest.approx(5.0, rel=1e-3)
    for wrong, missed in ((3, 0.9), (0, 0.1)):
        compare.add_blocks(BlocksProof(wrong_rows=wrong, missed=missed, missed_by_chance=0.5, report={"missed": missed}))
    assert compare.ratios["blocks"] == 6 and compare.ratios["recall"] == pytest.approx(1.8) and compare.selection == {"missed": 0.9}
