"""What is checked and routed once a shape: the same errors, and the same Routes, as every time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nsa import checked, checks, functional, nsa_attention, settings
from nsa.config import NSAConfig
from nsa.remembered import MOST, ByShape
from tests.cases import SMALL, randn


def call(config: NSAConfig = SMALL, **changed: Any) -> Tensor:
    given: dict[str, Any] = {"path": "masked", **changed}
    q = given.pop("q", randn(1, 20, 2, 16, seed=1))
    k = given.pop("k", randn(1, 20, 1, 16, seed=2))
    gates = given.pop("gates", torch.full((1, 20, 2, 3), 0.5))
    sel = given.pop("kv_sel", (k, k))
    return nsa_attention(q, (k, k), sel, (k, k), gates, config=config, **given)


WRONG: dict[str, dict[str, Any]] = {
    "a flag as a position": {"q_start": False},
    "a position beyond": {"q_start": 1},
    "no number": {"scale": float("nan")},
    "no pair": {"kv_sel": [torch.ones(1, 20, 1, 16)]},
    "no tensors": {"kv_sel": (1, 2)},
    "another dtype of k": {"k": randn(1, 20, 1, 16, seed=2, dtype=torch.float64)},
    "another shape of gates": {"gates": torch.ones(1, 20, 2, 2)},
    "whole gates": {"gates": torch.ones(1, 20, 2, 3, dtype=torch.int64)},
    "no config": {"config": None},
    "sinks": {"sinks": torch.ones(2, 3)},
    "sinks that lack": {"config": replace(SMALL, sinks=True)},
    "an adaptive chunk": {
        "config": replace(SMALL, adaptive_num_selected=True),
        "cu_seqlens": torch.tensor([0, 20]),
    },
    "a path": {"path": "maskedd"},
    "a path that is a list": {"path": ["masked"]},
    "a path that cannot": {"path": "masked", "fa2": "on"},
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_call_is_refused_after_a_good_one_as_before(name: str) -> None:
    checked._CHECKED.clear()
    functional._ROUTES.clear()
    texts = []
    for _ in range(2):
        with pytest.raises(ValueError) as refused:
            call(**WRONG[name])
        texts.append(str(refused.value))
        for _ in range(2):
            call()
    assert texts[0] == texts[1] and texts[0]


def test_a_good_call_is_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked._CHECKED.clear()
    seen: list[str] = []
    gates = checks.gates
    monkeypatch.setattr(checks, "gates", lambda *x: (seen.append("gates"), gates(*x))[1])
    for _ in range(3):
        call()
    assert len(seen) == 1
    for changed in ({"config": replace(SMALL)}, {"scale": 0.5}, {"q": randn(1, 20, 4, 16, seed=1)}):
        heads = changed["q"].shape[2] if "q" in changed else 2
        call(**changed, gates=torch.full((1, 20, heads, 3), 0.5))
    assert len(seen) == 4


def test_what_holds_contents_is_checked_every_time() -> None:
    q, k = randn(1, 8, 2, 16, seed=1), randn(1, 20, 1, 16, seed=2)
    gates = torch.full((1, 8, 2, 3), 0.5)
    call(q=q, k=k, gates=gates, q_start=torch.tensor([12]))
    with pytest.raises(ValueError, match="q_start holds 13"):
        call(q=q, k=k, gates=gates, q_start=torch.tensor([13]))


def test_a_route_is_that_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(path: str) -> str:
        options: dict[str, Any] = {"branches": ("sel",), "q_start": 0, "path": path, "fa2": "auto"}
        return (
            functional.route_for(randn(1, 20, 2, 16, seed=1), 1, 16, 20, **options)
            .branches[0]
            .implementation
        )

    assert [of("v2"), of("auto"), of("v2")] == ["v2", of("auto"), "v2"]
    asked = settings.load({"NSA_SEL_RANGES_V2": "0"})
    monkeypatch.setattr(settings, "current", lambda: asked)
    assert of("v2") == "v1"
    monkeypatch.undo()
    assert of("v2") == "v2"


def test_objects_count_by_identity_and_live_on() -> None:
    kept: ByShape[int] = ByShape()
    for number in range(50):  # were one let go, another might take its place
        assert kept.get("key", [number]) is None
        kept.put(number, "key", [number])
    mine = [0]
    kept.put(7, "key", mine)
    assert kept.get("key", mine) == 7 and kept.get("other", mine) is kept.get("key") is None
    for number in range(MOST):
        kept.put(number, number)
    assert kept.get("key", mine) is None and kept.get(MOST - 1) == MOST - 1
