"""NSA_* environment variables, read once into a frozen object: the only os.environ in nsa."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path as File
from typing import Any, Generic, TypeVar

from nsa import thresholds_file
from nsa.config import nearest_name
from nsa.retired import RETIRED
from nsa.routing import (
    ADAPTIVE,
    AUTO,
    STAIRCASE,
    TRITON_STEPS,
    Capability,
    Path,
    Problem,
    Request,
    Route,
    RouteError,
    UserTable,
    route,
)

T = TypeVar("T", bool, int, str)


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """A value and where it came from: default or environment. None means that it was not set, and
    that there is no default.
    """

    value: T | None = None
    source: str = "default"

    @property
    def text(self) -> str | None:
        """The value as the environment would spell it, a flag as 1 or 0."""
        if self.value is None or isinstance(self.value, str):
            return self.value
        return str(int(self.value))


MEANINGS: Mapping[str, str] = {
    "NSA_FORCE_SEL_MASK": "1: an explicit request for path=masked",
    "NSA_USE_FA2": "1: an explicit fa2=on for every branch that FA-2 can express; 0: fa2=off",
    "NSA_USE_FA2_WIN": "the same for the window branch alone; outranks NSA_USE_FA2",
    "NSA_USE_FA2_CMP": (
        "1: refused, since FA-2 cannot express the compressed branch's mask; 0: what happens anyway"
    ),
    "NSA_FA2_MIN_LEN_WIN": (
        "tokens: with fewer keys fa2=auto does not take FA-2 for the window; an explicit fa2=on"
        " outranks it"
    ),
    "NSA_FA2_MIN_LEN_CMP": (
        "tokens: the same for the compressed branch, which FA-2 serves at no length"
    ),
    "NSA_SEL_RANGES_V2": "0: a request for path=v2 becomes an explicit request for v1",
    "NSA_THRESHOLDS": (
        "a file: the table of `perfbench tune --apply` from which path=auto decides, instead of"
        " nsa/thresholds.json in $XDG_CONFIG_HOME or ~/.config; off: none"
    ),
    "NSA_STRICT_ASSERTS": (
        "1: check the contents of `blocks` before every selected attention (synchronises)"
    ),
    "NSA_NVTX": (
        "1: mark each branch's forward with an NVTX range named by its counter (sel.v2); CUDA only,"
        " none inside torch.compile"
    ),
    "NSA_LAUNCH_PLANS": (
        "0, for measurements: path triton decides on its launches anew in every call"
    ),
    "NSA_DEBUG_LOG": "1: log every new Route once, at INFO to the logger 'nsa'",
    **{
        f"NSA_TRITON_{step.upper()}": f"0, for measurements: path triton without {what}"
        for step, what in TRITON_STEPS.items()
    },
}
ENVIRONMENT = "environment"
TABLE_OFF = "off"
_TOKENS = ("NSA_FA2_MIN_LEN_WIN", "NSA_FA2_MIN_LEN_CMP")
_TRUE, _FALSE = ("1", "true", "on", "yes"), ("0", "false", "off", "no")


@dataclass(frozen=True, slots=True)
class Settings:
    """The resolved environment. Build it with ``load``; ``current()`` is the process's own."""

    force_sel_mask: Setting[bool] = Setting()
    use_fa2: Setting[bool] = Setting()
    use_fa2_win: Setting[bool] = Setting()
    use_fa2_cmp: Setting[bool] = Setting()
    fa2_min_len_win: Setting[int] = Setting()
    fa2_min_len_cmp: Setting[int] = Setting()
    sel_ranges_v2: Setting[bool] = Setting()
    thresholds: Setting[str] = Setting()
    strict_asserts: Setting[bool] = Setting()
    nvtx: Setting[bool] = Setting()
    launch_plans: Setting[bool] = Setting()
    debug_log: Setting[bool] = Setting()
    triton_copy: Setting[bool] = Setting()
    triton_lists: Setting[bool] = Setting()
    triton_roles: Setting[bool] = Setting()
    triton_join: Setting[bool] = Setting()
    triton_split: Setting[bool] = Setting()

    def by_name(self) -> dict[str, Setting[Any]]:
        """Every variable's Setting, in the order of MEANINGS."""
        return {name: getattr(self, _field(name)) for name in MEANINGS}

    def given(self) -> dict[str, str]:
        """What the environment set, as text: {'NSA_FA2_MIN_LEN_WIN': '512'}."""
        return {
            name: setting.text
            for name, setting in self.by_name().items()
            if setting.text is not None and setting.source == ENVIRONMENT
        }

    def user_table(self) -> UserTable | None:
        """The user's own table, read at the first use; None for none, and for one that cannot be
        used, which is warned of once.
        """
        file = self.thresholds.value
        return None if file is None or file == TABLE_OFF else _read_table(file)

    def is_off(self, step: str) -> bool:
        """Whether ``step``, one of TRITON_STEPS, is turned off; AttributeError for any other."""
        setting: Setting[bool] = getattr(self, "triton_" + step)
        return setting.value is False

    def request(self, path: str = AUTO, fa2: str = AUTO) -> Request:
        """Join a call's arguments with the environment; RouteError where two explicit requests
        contradict.
        """
        arguments, notes, v2_allowed = Request(path, fa2), [], self.sel_ranges_v2.value is not False
        path, fa2, fa2_win = arguments.path, arguments.fa2, AUTO
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
            _agree(f"NSA_USE_FA2_WIN={int(self.use_fa2_win.value)}", fa2_win, "fa2", arguments.fa2)
            notes.append(f"NSA_USE_FA2_WIN (environment) requests fa2={fa2_win} for the window")
        return Request(
            str(path),
            fa2,
            fa2_win,
            v2_allowed,
            fa2_from_environment=self.use_fa2.value is not None and arguments.fa2 == AUTO,
            notes=(*notes, *self._without_effect()),
            fa2_cmp="on" if self.use_fa2_cmp.value else AUTO,
            fa2_min_len_win=self.fa2_min_len_win.value or 0,
            off=tuple(step for step in TRITON_STEPS if self.is_off(step)),
            table=self.user_table(),
        )

    def _without_effect(self) -> list[str]:
        """Notes on settings of the compressed branch, which FA-2 cannot serve."""
        compressed_settings = (
            ("NSA_USE_FA2_CMP", self.use_fa2_cmp),
            ("NSA_FA2_MIN_LEN_CMP", self.fa2_min_len_cmp),
        )
        ineffective = [
            f"{name}={setting.text}"
            for name, setting in compressed_settings
            if setting.text is not None
        ]
        return [
            f"{what} (environment) changes nothing for the compressed branch: {STAIRCASE}"
            for what in ineffective
        ]


def table_file(environ: Mapping[str, str] = os.environ) -> File:
    """Where the user's own table is, or would be written; ValueError where it can be nowhere."""
    named = load(environ).thresholds
    if named.value == TABLE_OFF:
        raise ValueError(
            "NSA_THRESHOLDS=off (environment) allows no table; unset it, or name a file"
        )
    found = thresholds_file.default_file(environ) if named.value is None else File(named.value)
    if found is None:
        raise ValueError(
            "got neither XDG_CONFIG_HOME nor HOME (environment), wanted a folder for the table;"
            " name a file in NSA_THRESHOLDS"
        )
    return found


def _read_table(file: str) -> UserTable | None:
    return thresholds_file.read(file)


# a compiler that traces a call's routing must not trace into a file
_read_table._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _field(name: str) -> str:
    return name.removeprefix("NSA_").lower()


def _on_off(value: bool) -> str:
    return "on" if value else "off"


def _agree(variable: str, wanted: str, name: str, argument: str) -> None:
    if argument not in (AUTO, wanted):
        raise RouteError(
            f"{variable} (environment) requests {name}={wanted}, and the call requests"
            f" {name}={argument}. Next: unset {variable.split('=')[0]} or ask for {name}=auto"
        )


def load(environ: Mapping[str, str]) -> Settings:
    """Parse every NSA_* name; an unknown or retired name and an unknown value are ValueErrors that
    say what is valid.
    """
    values: dict[str, Setting[Any]] = {}
    for name, text in environ.items():
        if not name.startswith("NSA_"):
            continue
        if name in RETIRED:
            raise ValueError(
                f"environment variable {name}={text!r} is retired; unset it and use instead:"
                f" {RETIRED[name]}"
            )
        if name not in MEANINGS:
            raise ValueError(f"environment variable {name} is not known{_nearest(name)}")
        if (word := text.strip().lower()) != "":
            values[_field(name)] = Setting(_parse(name, word, text), ENVIRONMENT)
    if "thresholds" not in values:
        file = thresholds_file.default_file(environ)
        if file is not None and file.is_file():
            values["thresholds"] = Setting(str(file))
    return Settings(**values)


def _nearest(name: str) -> str:
    """`nearest_name` by what follows NSA_, with which each name begins."""
    known = {one.removeprefix("NSA_"): one for one in MEANINGS}
    near = difflib.get_close_matches(name.removeprefix("NSA_"), known, n=1, cutoff=0.5)
    return nearest_name(known[near[0]] if near else "", list(MEANINGS))


def _parse(name: str, word: str, text: str) -> bool | int | str:
    if name == "NSA_THRESHOLDS":
        if word in _FALSE:
            return TABLE_OFF
        file = File(text.strip()).expanduser()
        if not file.is_absolute():
            raise ValueError(
                f"{name}={text!r} must be off, or an absolute path, since processes have other"
                f" folders; it means: {MEANINGS[name]}"
            )
        return str(file)
    if name in _TOKENS:
        if not (word.isascii() and word.isdigit()):
            raise ValueError(
                f"{name}={text!r} must be a whole number >= 0 in plain digits, such as 512; it"
                f" means: {MEANINGS[name]}"
            )
        return int(word)
    if word not in _TRUE + _FALSE:
        raise ValueError(f"{name}={text!r} must be 1 or 0; it means: {MEANINGS[name]}")
    return word in _TRUE


@lru_cache(maxsize=1)
def current() -> Settings:
    """The process's settings, read at the first call; later changes of the environment have no
    effect.
    """
    return load(os.environ)


def is_off(step: str) -> bool:
    """Whether NSA_TRITON_<STEP>=0 turns a step of path triton off; ``step`` is one of
    nsa.routing.TRITON_STEPS.

    For code that no compiler traces, such as what a custom operator runs; a compiled region asks
    its Route (`Route.off`).
    """
    return current().is_off(step)


def decide(problem: Problem, capability: Capability, *, path: str = AUTO, fa2: str = AUTO) -> Route:
    """The Route of a call under the process's settings; raises RouteError.

    NSA_DEBUG_LOG=1 logs it, the first time.
    """
    settings = current()
    request = settings.request(path, fa2)
    decision = route(request, problem, capability)
    if request.table is not None and capability.sm is not None:
        thresholds_file.warn_of_other_cards(request.table, capability.device_name, capability.sm)
    if settings.debug_log.value:
        log_route(decision)
    return decision


@cache  # Routes do not name lengths, so a process makes few
def log_route(decision: Route) -> None:
    """Log a Route at INFO, one record with every reason; once for each Route of the process."""
    _audible_logger().info("route\n  %s", "\n  ".join(decision.explain()))


def _audible_logger() -> logging.Logger:
    """The logger 'nsa', with a level and a way to stderr where nobody configured one: the variable
    requested the output.
    """
    logger = logging.getLogger("nsa")
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.hasHandlers():
        logger.addHandler(logging.StreamHandler())
    return logger


@dataclass(frozen=True, slots=True)
class LaunchedPlace:
    """This process among those that torchrun, or what sets its variables, has started."""

    rank: int
    size: int
    local_rank: int


def launched_place(environ: Mapping[str, str] = os.environ) -> LaunchedPlace | None:
    """From RANK, WORLD_SIZE and LOCAL_RANK; None where RANK or WORLD_SIZE is not set. ValueError
    for values that are no whole numbers, or a rank outside of the world.
    """
    texts = {name: environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    if not texts["RANK"] or not texts["WORLD_SIZE"]:
        return None
    for name, text in texts.items():
        if text and not (text.isascii() and text.isdigit()):
            raise ValueError(f"{name}={text!r} must be a whole number; torchrun sets it")
    rank, size = int(texts["RANK"]), int(texts["WORLD_SIZE"])
    if rank >= size:
        raise ValueError(f"RANK={rank} must be below WORLD_SIZE={size}; torchrun sets both")
    return LaunchedPlace(rank, size, int(texts["LOCAL_RANK"] or 0))
