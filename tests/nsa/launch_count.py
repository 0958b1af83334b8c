"""What a call launches on a GPU, counted on a CPU: kernels of Triton by name, which are not run,
and operators of PyTorch that launch a kernel or a copy.

For Triton's interpreter (`--require interpreter`), whose launches go through one function. Contents
of tensors are what memory held: hosts that read none of them make the same launches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import InterpretedFunction

BODY = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
# They make memory or another view of it; every other operator of aten computes.
LAUNCH_NOTHING = {
    "_reshape_alias",
    "_unsafe_view",
    "alias",
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "new_empty",
    "permute",
    "select",
    "slice",
    "split",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
}


class Launched(TorchDispatchMode):
    """Counts operators of aten that launch; a copy of nothing, or to the same dtype, does not reach
    it.
    """

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, name = func.name().split("::")
        name = name.split(".")[0]
        if space != "aten":  # an operator of ours: what its body calls is counted
            with self:
                return func.redispatch(BODY, *args, **(kwargs or {}))
        if name not in LAUNCH_NOTHING:
            self.names.append(f"aten.{name}")
        return func(*args, **(kwargs or {}))


@contextmanager
def launches() -> Iterator[list[str]]:
    """The names of what is launched inside, in order: of kernels, and aten.NAME."""
    names: list[str] = []
    run = InterpretedFunction.run

    def noted(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        names.append(self.__name__)

    InterpretedFunction.run = noted  # type: ignore[method-assign]
    try:
        with Launched(names):
            yield names
    finally:
        InterpretedFunction.run = run  # type: ignore[method-assign]


def table(names: list[str]) -> str:
    """One line a name, in the order of first appearance."""
    return "\n".join(f"{count:3} {name}" for name, count in Counter(names).items())
