"""Proof before timing: green for every path and every geometry, on the route that is timed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import Tensor

from nsa import functional
from nsa.config import NSAConfig
from nsa.routing import Path
from perfbench.worker.parity import sizes
from tests.cases import PATHS_HERE
from tests.perfbench.jobs import TINY, cell_of, route_of
from tests.perfbench.parity_cases import TOKENS, in_path, last_block_dropped, prove, wrong

pytestmark = pytest.mark.usefixtures("one_thread")

INPUTS = ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates")


@pytest.mark.parametrize("path", [*PATHS_HERE, "auto", "adaptive"])
def test_every_path_is_proved(path: str) -> None:
    line = prove(path, tokens=100)  # a few more than are all selected
    assert line.ok and wrong(line) == set(), line.worst
    assert set(line.tensors) == {"o", "blocks", "layer", *(f"d{name}" for name in INPUTS)}
    assert (line.tokens, line.rows, line.proved_in) == (TOKENS, 64, None)
    assert 0 < line.max_error <= line.tolerance < 1e-3 and line.tensors["blocks"] == 0.0
    assert max(line.tensors.values()) < 0.7, (
        "the tolerance leaves room: this does not depend on the seed"
    )


@pytest.mark.parametrize(
    ("phi", "names"), [("linear", {"weight"}), ("mlp", {"position", "up", "down"})]
)
def test_a_learned_phi_is_proved_with_its_gradients(
    monkeypatch: pytest.MonkeyPatch, phi: str, names: set[str]
) -> None:
    model = replace(TINY, nsa=replace(TINY.nsa, phi=phi))
    line = prove("masked", model=model)
    learned = {f"dphi_{which}.{name}" for which in "kv" for name in names}
    assert line.ok and set(line.tensors) == {
        "o",
        "blocks",
        "layer",
        *(f"d{name}" for name in INPUTS),
        *learned,
    }, line.worst
    compress = functional.compress

    def off(x: Tensor, *, config: NSAConfig, params: Any) -> Tensor:
        return compress(
            x, config=config, params={name: 1.01 * value for name, value in params.items()}
        )

    monkeypatch.setattr(functional, "compress", off)
    assert {"o", "dphi_v.weight" if phi == "linear" else "dphi_v.down"} <= wrong(
        prove("masked", model=model)
    )


def test_the_dense_twin_is_proved() -> None:
    line = prove("dense")
    assert (
        line.ok
        and set(line.tensors) == {"o", "layer", "dq", "dk_sel", "dv_sel"}
        and (line.tokens, line.rows) == (TOKENS, 64)
    )


@pytest.mark.parametrize("path", ["v2", "dense"])
def test_a_forward_cell_needs_no_gradients(path: str) -> None:
    assert set(prove(path, train=False).tensors) - {"blocks"} == {"o", "layer"}


@pytest.mark.parametrize("path", ["v2", "masked", "v1"])
def test_bf16_is_judged_by_its_own_rounding(path: str) -> None:
    line = prove(path, dtype="bf16")
    assert line.ok, line.worst
    assert 1e-4 < line.tolerance < 0.3


def variants() -> dict[str, NSAConfig]:
    changes: list[dict[str, Any]] = [
        {"share_kv": True},
        {"gate": "softmax"},
        {"num_initial": 0},
        {"num_local": 1},
        {"window": 1},
    ]
    changes += [
        {"cmp_block": 16, "cmp_stride": 8},
        {"sel_block": 8, "num_selected": 3},
        {"rope": "half"},
        {"rope": "none", "gate": "none", "qk_norm": True},
        {"cmp_rope": "after"},
    ]
    changes += [
        {"branches": branches}
        for branches in (("cmp",), ("sel",), ("win",), ("cmp", "win"), ("sel", "win"))
    ]
    return {str(change): replace(TINY.nsa, **change) for change in changes}


@pytest.mark.parametrize("train", [True, False], ids=["train", "forward"])
@pytest.mark.parametrize("name", variants())
def test_every_geometry_is_proved(name: str, train: bool) -> None:
    """What the config allows, the proof must judge: a branch that is left out has gradients of
    exactly 0.
    """
    line = prove("masked", model=replace(TINY, nsa=variants()[name]), train=train)
    assert line.ok, line.worst


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dims"), [(6, 1, (16, 16)), (3, 3, (12, 20)), (4, 2, (64, 64))]
)
def test_heads_are_the_cells_own(heads: int, kv_heads: int, dims: tuple[int, int]) -> None:
    model = replace(
        TINY, num_heads=heads, num_kv_heads=kv_heads, head_dim=dims[0], v_head_dim=dims[1]
    )
    assert prove("v2", model=model).ok


# The route that is timed.


def test_another_route_proves_nothing() -> None:
    timed = route_of(cell_of("v1"))
    with pytest.raises(sizes.RouteDiffers, match=r"sel.v2.*sel.v1"):
        prove("v2", TOKENS, timed=timed, train=False)
    with pytest.raises(sizes.RouteDiffers, match="dense.sdpa"):
        prove("dense", TOKENS, timed=timed, train=False)


def test_adaptive_is_proved_on_the_path_that_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the proof's own length it would take v1; the timed cell takes v2."""
    timed = route_of(cell_of("adaptive", seq_len=2048))
    assert timed.branch("sel").implementation == "v2"
    in_path(monkeypatch, Path.V2, last_block_dropped)
    line = prove("adaptive", 2048, train=False)
    assert not line.ok
    assert prove("adaptive", train=False).ok, "v1 at 64 tokens is untouched"


def test_inputs_follow_the_seed() -> None:
    assert prove(train=False) == prove(train=False)
    assert prove(train=False).max_error != prove(train=False, seed=4).max_error
