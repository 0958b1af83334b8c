"""NSA_* environment variables, read once into a frozen object: the only os.environ in nsa."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from nsa.config import nearest_name
from nsa.routing import ADAPTIVE, AUTO, Path, Request, RouteError


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it came from: default or environment. None means that it was not set."""

    value: bool | None = None
    source: str = "default"


MEANINGS: Mapping[str, str] = {
    "NSA_FORCE_SEL_MASK": "1: an explicit request for path=masked",
    "NSA_USE_FA2": "1: an explicit fa2=on for every branch that FA-2 can express; 0: fa2=off",
    "NSA_USE_FA2_WIN": "the same for the window branch alone; outranks NSA_USE_FA2",
    "NSA_SEL_RANGES_V2": "0: a request for path=v2 becomes an explicit request for v1",
    "NSA_STRICT_ASSERTS": "1: check the contents of `blocks` before every selected attention (synchronises)",
}
_TRUE, _FALSE = ("1", "true", "on", "yes"), ("0", "false", "off", "no")


@dataclass(frozen=True, slots=True)
class Settings:
    """The resolved environment. Build it with ``load``; ``current()`` is the process's own."""

    force_sel_mask: Setting = Setting()
    use_fa2: Setting = Setting()
    use_fa2_win: Setting = Setting()
    sel_ranges_v2: Setting = Setting()
    strict_asserts: Setting = Setting()

    def request(self, path: str = AUTO, fa2: str = AUTO) -> Request:
        """Join a call's arguments with the environment; RouteError where two explicit requests contradict."""
        asked, notes, v2_allowed = Request(path, fa2), [], self.sel_ranges_v2.value is not False
        path, fa2, fa2_win = asked.path, asked.fa2, AUTO
        if self.force_sel_mask.value:
            _agree("NSA_FORCE_SEL_MASK=1", Path.MASKED, "path", path)
            path = Path.MASKED
            notes.append("NSA_FORCE_SEL_MASK=1 (environment) requests path=masked")
        if path in (Path.V2, ADAPTIVE) and not v2_allowed:
            notes.append(f"NSA_SEL_RANGES_V2=0 (environment) turns path={path} into v1")
            path = Path.V1
        if self.use_fa2.value is not None:
            wanted = _on_off(self.use_fa2.value)
            _agree(f"NSA_USE_FA2={int(self.use_fa2.value)}", wanted, "fa2", fa2)
            fa2 = wanted
            notes.append(f"NSA_USE_FA2 (environment) requests fa2={wanted}")
        if self.use_fa2_win.value is not None:
            fa2_win = _on_off(self.use_fa2_win.value)
            _agree(f"NSA_USE_FA2_WIN={int(self.use_fa2_win.value)}", fa2_win, "fa2", asked.fa2)
            notes.append(f"NSA_USE_FA2_WIN (environment) requests fa2={fa2_win} for the window")
        from_environment = self.use_fa2.value is not None and asked.fa2 == AUTO
        return Request(str(path), fa2, fa2_win, v2_allowed, from_environment, tuple(notes))


def _on_off(value: bool) -> str:
    return "on" if value else "off"


def _agree(variable: str, wanted: str, name: str, argument: str) -> None:
    if argument not in (AUTO, wanted):
        raise RouteError(
            f"{variable} (environment) requests {name}={wanted}, and the call requests {name}={argument}. "
            f"Next: unset {variable.split('=')[0]} or ask for {name}=auto"
        )


def load(environ: Mapping[str, str]) -> Settings:
    """Parse every NSA_* name; an unknown name or value is a ValueError that names the nearest valid one."""
    values: dict[str, Setting] = {}
    for name, text in environ.items():
        if not name.startswith("NSA_"):
            continue
        if name not in MEANINGS:
            raise ValueError(f"environment variable {name} is not known{nearest_name(name, list(MEANINGS))}")
        lowered = text.strip().lower()
        if lowered == "":
            continue
        if lowered not in _TRUE + _FALSE:
            raise ValueError(f"{name}={text!r} must be 1 or 0; it means: {MEANINGS[name]}")
        values[name.removeprefix("NSA_").lower()] = Setting(lowered in _TRUE, "environment")
    return Settings(**values)


@lru_cache(maxsize=1)
def current() -> Settings:
    """The process's settings, read at the first call; later changes of the environment have no effect."""
    return load(os.environ)
