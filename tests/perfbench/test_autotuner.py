"""Reads what autotuners chose from loaded modules, with a stand-in for Triton; without Triton
nothing is found.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

from perfbench.worker import autotuner


class Autotuner:
    """As Triton's: the decorated function and what was chosen for each key."""

    def __init__(self, fn: Any, cache: dict[tuple[Any, ...], str]) -> None:
        self.base_fn, self.cache = fn, cache


class Heuristics:
    """A decorator around an autotuner."""

    __module__ = "triton.runtime.autotuner"

    def __init__(self, fn: Any) -> None:
        self.fn = fn


def kernel() -> None: ...


def module(name: str, **contents: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(contents)
    return made


kernel.__module__ = "nsa.ops.kernels.selected"
CHOSEN = Autotuner(
    kernel,
    {
        (64, "torch.bfloat16"): "BLOCK: 64, num_warps: 4",
        (128, "torch.bfloat16"): "BLOCK: 128, num_warps: 8",
    },
)
TRITON = {"triton.runtime.autotuner": module("triton.runtime.autotuner", Autotuner=Autotuner)}
WANTED = {
    "nsa.ops.kernels.selected.kernel[128, torch.bfloat16]": "BLOCK: 128, num_warps: 8",
    "nsa.ops.kernels.selected.kernel[64, torch.bfloat16]": "BLOCK: 64, num_warps: 4",
}


def test_every_choice_has_its_kernel_and_key() -> None:
    loaded = {**TRITON, "nsa.ops.kernels.selected": module("m", forward=CHOSEN, other=3)}
    assert autotuner.choices(loaded) == WANTED


def test_imported_elsewhere_or_decorated_it_keeps_its_name() -> None:
    loaded = {
        **TRITON,
        "nsa.a": module("a", f=Heuristics(CHOSEN)),
        "nsa.ops.kernels.selected": module("m", f=CHOSEN),
    }
    assert autotuner.choices(loaded) == WANTED


def test_what_has_not_chosen_or_is_not_ours_is_left_out() -> None:
    idle = Autotuner(kernel, {})
    assert (
        autotuner.choices(
            {
                **TRITON,
                "nsa.k": module("k", idle=idle),
                "other.k": module("o", f=CHOSEN),
                "nsax": module("x", f=CHOSEN),
            }
        )
        == {}
    )


def test_without_triton_nothing_is_tuned() -> None:
    assert autotuner.choices({"nsa.k": module("k", f=CHOSEN)}) == {}
    before = set(sys.modules)
    assert autotuner.choices() == {}
    assert not {name for name in set(sys.modules) - before if name.startswith("triton")}


def test_the_real_autotuner_has_what_is_read() -> None:
    """Built, not run: a renamed attribute of Triton's would silently record nothing."""
    import triton
    from triton.runtime.autotuner import Autotuner as Real

    @triton.jit
    def add(x: Any) -> None: ...

    tuner = triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=4)], key=["x"])(add)
    assert isinstance(tuner, Real)
    tuner.cache[64,] = tuner.configs[0]
    loaded = {
        "triton.runtime.autotuner": sys.modules["triton.runtime.autotuner"],
        "nsa.k": module("k", f=tuner),
    }
    ((name, config),) = autotuner.choices(loaded).items()
    assert name.endswith("add[64]")
    assert "BLOCK: 64" in config and "num_warps: 4" in config
