"""The state of every random generator of the process, as JSON data."""

from __future__ import annotations

import base64
import random
import sys
from typing import Any

import torch
from torch import Tensor


def rng_state() -> dict[str, Any]:
    """Of Python's random, torch on the CPU, every CUDA device that is in use, and numpy's global
    generator where numpy is imported: data that JSON keeps.
    """
    state: dict[str, Any] = {
        "python": random.getstate(),
        "torch": _text(torch.get_rng_state()),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = [_text(one) for one in torch.cuda.get_rng_state_all()]
    if "numpy" in sys.modules:
        import numpy

        kind, keys, *rest = numpy.random.get_state()
        state["numpy"] = [kind, numpy.asarray(keys).tolist(), *rest]
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """Continue from what `rng_state` returned, also after JSON; states of a device or a package
    that is not here are left out. Raises ValueError for data of another form.
    """
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    if torch.cuda.is_available():
        for device, text in enumerate(state.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(_tensor(text), device)
    if "numpy" in state and "numpy" in sys.modules:
        import numpy

        kind, keys, *rest = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


def _text(state: Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
