"""What the autotuners of this process chose: a changed choice explains a changed speed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

PACKAGES = ("nsa", "perfbench")


def choices(modules: Mapping[str, ModuleType] | None = None) -> dict[str, str]:
    """'MODULE.KERNEL[KEY]' -> the configuration in use, for each Triton autotuner of our own
    modules that has chosen.

    Looks only at what is loaded (``modules``, by default ``sys.modules``): without Triton nothing
    can have been tuned.
    """
    loaded = sys.modules if modules is None else modules
    kind = getattr(loaded.get("triton.runtime.autotuner"), "Autotuner", None)
    if kind is None:
        return {}
    found: dict[str, str] = {}
    for name in sorted(loaded):
        if name.partition(".")[0] in PACKAGES:
            for value in vars(loaded[name]).values():
                tuner = _tuner(value, kind)
                found |= (
                    {
                        f"{_name(tuner)}[{_key(key)}]": str(config)
                        for key, config in tuner.cache.items()
                    }
                    if tuner
                    else {}
                )
    return dict(sorted(found.items()))


def _tuner(value: Any, kind: type) -> Any:
    """The autotuner itself, or the one inside of decorators such as triton.heuristics; None for
    anything else.
    """
    for _ in range(4):
        if isinstance(value, kind):
            return value
        if (
            isinstance(value, ModuleType | type)
            or type(value).__module__.partition(".")[0] != "triton"
        ):
            return None
        value = getattr(value, "fn", None)
    return None


def _name(tuner: Any) -> str:
    """Where the kernel is defined, so that importing it elsewhere renames nothing."""
    return f"{tuner.base_fn.__module__}.{tuner.base_fn.__name__}"


def _key(key: Any) -> str:
    return ", ".join(str(part) for part in key) if isinstance(key, tuple | list) else str(key)
