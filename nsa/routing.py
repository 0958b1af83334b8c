"""Which implementation serves which branch, decided before anything runs. Pure: no torch, no environment, no try.

An explicit request is that path or a RouteError with every reason; `auto` never returns a slow path, nor v1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Self

from nsa.config import BRANCHES, ModelConfig, nearest_name

AUTO = "auto"
ADAPTIVE = "adaptive"
ADAPTIVE_MIN_TOKENS = 1024  # the founding reports' NSA_SEL_RANGES_V2_MIN_S
MASK_LIMIT_ELEMENTS = 2**31  # `auto` builds no boolean mask larger than this (2 GiB)
FA2_CHOICES = ("on", "off", AUTO)
FA2_DTYPES = ("float16", "bfloat16")
FA2_MIN_SM = (8, 0)
FA2_MAX_HEAD_DIM = 256
DENSE_KINDS = ("dense", "dense_flash", "dense_cudnn")


class Path(StrEnum):
    """Implementations of the selected branch: the same function, at different prices."""

    REFERENCE = "reference"
    V1 = "v1"
    V2 = "v2"
    MASKED = "masked"


@dataclass(frozen=True, slots=True)
class PathSpec:
    """What a path costs and promises; every Path has one."""

    slow: bool
    syncs: bool
    repeatable_on_cuda: bool
    summary: str


SPECS: Mapping[Path, PathSpec] = {
    Path.REFERENCE: PathSpec(True, True, True, "Python loop over rows, fp32 softmax"),
    Path.V1: PathSpec(True, True, False, "token ranges in Python, rows bucketed by length"),
    Path.V2: PathSpec(False, False, False, "whole blocks gathered, all rows in one packed call a workspace"),
    Path.MASKED: PathSpec(False, False, False, "one SDPA over a boolean mask, O(T*S) memory"),
}
PATH_REQUESTS = (*Path, AUTO, ADAPTIVE)


class RouteError(ValueError):
    """No route serves an explicit request, or two explicit requests contradict one another."""


@dataclass(frozen=True, slots=True)
class Capability:
    """What exists on the machine that will run; probed once by ``nsa.capability``, or assumed by name.

    ``sm`` is the compute capability, None on a CPU. ``fa2_provider`` is e.g. "torch.varlen 2.13.0"; where it is
    None, ``fa2_reason`` says why.
    """

    device: str
    device_name: str
    sm: tuple[int, int] | None
    fa2_provider: str | None
    fa2_reason: str
    torch_version: str


@dataclass(frozen=True, slots=True)
class Problem:
    """The shape of one attention call; ``ragged`` means that rows of the batch begin at different positions."""

    batch: int
    q_tokens: int
    k_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    dtype: str
    branches: tuple[str, ...] = BRANCHES
    ragged: bool = False

    @classmethod
    def of(cls, model: ModelConfig, *, batch: int, tokens: int, dtype: str) -> Self:
        """The attention call of one layer of ``model`` on ``batch`` sequences of ``tokens`` tokens."""
        return cls(batch, tokens, tokens, model.num_heads, model.num_kv_heads, model.head_dim, model.value_dim, dtype, model.nsa.branches)

    @property
    def mask_elements(self) -> int:
        return self.batch * self.num_kv_heads * self.q_tokens * self.k_tokens


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for. ``notes`` say which setting changed it, so that the Route can repeat them.

    An argument's fa2=on must find a branch to serve; ``fa2_from_environment`` means one for every branch that FA-2 can
    express, which may be none.
    """

    path: str = AUTO
    fa2: str = AUTO
    fa2_win: str = AUTO
    v2_allowed: bool = True
    fa2_from_environment: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.path not in PATH_REQUESTS:
            raise RouteError(f"path={self.path!r} is not known{nearest_name(str(self.path), list(PATH_REQUESTS))}")
        for name, value in (("fa2", self.fa2), ("fa2_win", self.fa2_win)):
            if value not in FA2_CHOICES:
                raise RouteError(f"{name}={value!r} is not known; choose one of {', '.join(FA2_CHOICES)}")


@dataclass(frozen=True, slots=True)
class Rejected:
    """An alternative that was not taken, and why."""

    alternative: str
    reason: str


@dataclass(frozen=True, slots=True)
class BranchRoute:
    """What serves one branch. ``kernel`` is fa2, sdpa, flash, cudnn or loop; ``provider`` names whose, and its version."""

    branch: str
    implementation: str
    kernel: str
    provider: str
    reason: str
    syncs: bool = False
    repeatable: bool = True

    @property
    def counters(self) -> tuple[str, ...]:
        """Engagement counters that one call of this branch increments, e.g. ('sel.v2', 'sel.fa2')."""
        names = (f"{self.branch}.{self.implementation}", f"{self.branch}.{self.kernel}")
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Route:
    """The decision for every branch of a call, with reasons and rejected alternatives."""

    branches: tuple[BranchRoute, ...]
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()

    def branch(self, name: str) -> BranchRoute:
        for candidate in self.branches:
            if candidate.branch == name:
                return candidate
        raise RouteError(f"this route has no branch {name!r}, only {[b.branch for b in self.branches]}; route it first")

    @property
    def counters(self) -> tuple[str, ...]:
        return tuple(counter for branch in self.branches for counter in branch.counters)

    def explain(self) -> list[str]:
        """One line for each branch, rejected alternative and note."""
        lines = [f"{b.branch}: {b.implementation} ({b.kernel}, {b.provider}): {b.reason}" for b in self.branches]
        lines += [f"not {r.alternative}: {r.reason}" for r in self.rejected]
        return lines + [f"note: {note}" for note in self.notes]


@lru_cache(maxsize=1024)
def route(request: Request, problem: Problem, capability: Capability) -> Route:
    """Decide every branch of ``problem``; raises RouteError with all reasons where a request cannot be served."""
    rejected: list[Rejected] = []
    routed: list[BranchRoute] = []
    if "cmp" in problem.branches:
        routed.append(_route_compressed(request, problem, capability))
    if "sel" in problem.branches:
        routed.append(_route_selected(request, problem, capability, rejected))
    if "win" in problem.branches:
        routed.append(_route_window(request, problem, capability, rejected))
    return Route(tuple(routed), tuple(rejected), request.notes)


def route_dense(kind: str, problem: Problem, capability: Capability) -> Route:
    """Decide full causal attention: ``dense`` leaves the kernel to SDPA, the others name it or raise RouteError."""
    if kind not in DENSE_KINDS:
        raise RouteError(f"dense path {kind!r} is not known{nearest_name(kind, list(DENSE_KINDS))}")
    kernel = {"dense": "sdpa", "dense_flash": "flash", "dense_cudnn": "cudnn"}[kind]
    if kind != "dense" and (reasons := _fused_reasons(problem, capability)):
        raise RouteError(_cannot(f"path={kind}", reasons, "use path=dense"))
    branch = BranchRoute(
        "dense",
        kernel,
        kernel,
        f"torch {capability.torch_version}",
        "full causal attention, asked for by name",
        repeatable=_sdpa_is_repeatable(capability),
    )
    return Route((branch,), (Rejected("fa2", "n/a: a dense path names its kernel itself"),))


def plan(request: Request, model: ModelConfig, *, batch: int, tokens: int, dtype: str, capability: Capability) -> Route:
    """The Route that one layer of ``model`` will take: what perfbench prints before it measures."""
    return route(request, Problem.of(model, batch=batch, tokens=tokens, dtype=dtype), capability)


def fa2_reasons(problem: Problem, capability: Capability) -> list[str]:
    """Every reason why FA-2 cannot serve this problem; empty where it can."""
    missing = [capability.fa2_reason] if capability.fa2_provider is None else []
    return missing + _fused_reasons(problem, capability)


def _fused_reasons(problem: Problem, capability: Capability) -> list[str]:
    """What rules out a fused half-precision kernel, whoever provides it."""
    reasons = []
    if capability.sm is None:
        reasons.append(f"device {capability.device} is not CUDA")
    elif capability.sm < FA2_MIN_SM:
        reasons.append(f"SM {capability.sm[0]}.{capability.sm[1]} is below {FA2_MIN_SM[0]}.{FA2_MIN_SM[1]}")
    if problem.dtype not in FA2_DTYPES:
        reasons.append(f"dtype {problem.dtype} is not one of {', '.join(FA2_DTYPES)}")
    if problem.head_dim != problem.v_head_dim:
        reasons.append(f"head dims of K and V differ ({problem.head_dim} and {problem.v_head_dim})")
    for name, size in (("head_dim", problem.head_dim), ("v_head_dim", problem.v_head_dim)):
        if size % 8 or size > FA2_MAX_HEAD_DIM:
            reasons.append(f"{name} {size} is not a multiple of 8 up to {FA2_MAX_HEAD_DIM}")
    return reasons


def _cannot(what: str, reasons: list[str], next_step: str) -> str:
    return f"{what} cannot be served: {'; '.join(reasons)}. Next: {next_step}"


def _route_compressed(request: Request, problem: Problem, capability: Capability) -> BranchRoute:
    staircase = "its staircase mask is not expressible in FA-2"
    if request.fa2 == "on" and problem.branches == ("cmp",) and not request.fa2_from_environment:
        raise RouteError(_cannot("fa2=on for the compressed branch", [staircase], "use fa2=off or fa2=auto"))
    return BranchRoute(
        "cmp",
        "sdpa",
        "sdpa",
        f"torch {capability.torch_version}",
        f"SDPA over a boolean mask; {staircase}",
        repeatable=_sdpa_is_repeatable(capability),
    )


def _sdpa_is_repeatable(capability: Capability) -> bool:
    """Its CUDA kernels add up dQ in the order in which their blocks finish: three runs on an H100 gave other last bits."""
    return capability.sm is None


def _fa2_serves(asked: str, problem: Problem, capability: Capability, extra: list[str], what: str, rejected: list[Rejected]) -> bool:
    if asked == "off":
        rejected.append(Rejected(f"fa2 for {what}", "fa2=off was asked for"))
        return False
    reasons = fa2_reasons(problem, capability) + extra
    if asked == "on" and reasons:
        raise RouteError(_cannot(f"fa2=on for {what}", reasons, "use fa2=off, or fa2=auto to take FA-2 only where it can serve"))
    if reasons:
        rejected.append(Rejected(f"fa2 for {what}", "; ".join(reasons)))
    return not reasons


def _route_selected(request: Request, problem: Problem, capability: Capability, rejected: list[Rejected]) -> BranchRoute:
    path, reason = _selected_path(request, problem, capability, rejected)
    if request.fa2 == "on" and path is not Path.V2 and "win" not in problem.branches and not request.fa2_from_environment:
        why = [f"path {path.value} cannot use it, and there is no window branch for it to serve"]
        raise RouteError(_cannot("fa2=on", why, "use path=v2, or fa2=off"))
    spec = SPECS[path]
    kernel, provider = "sdpa", f"torch {capability.torch_version}"
    if path is Path.REFERENCE:
        kernel = "loop"
    if path is Path.V2 and _fa2_serves(request.fa2, problem, capability, [], "sel.v2", rejected):
        assert capability.fa2_provider is not None
        kernel, provider = "fa2", capability.fa2_provider
    repeatable = spec.repeatable_on_cuda or capability.sm is None
    return BranchRoute("sel", path.value, kernel, provider, f"{reason}; {spec.summary}", spec.syncs, repeatable)


def _selected_path(request: Request, problem: Problem, capability: Capability, rejected: list[Rejected]) -> tuple[Path, str]:
    if request.path == ADAPTIVE:
        long = problem.q_tokens >= ADAPTIVE_MIN_TOKENS and request.v2_allowed
        return (Path.V2 if long else Path.V1), f"adaptive: {problem.q_tokens} tokens against {ADAPTIVE_MIN_TOKENS}"
    if request.path != AUTO:
        return Path(request.path), f"path={request.path} was asked for by name"
    return _auto_path(request, problem, capability, rejected)


def _auto_path(request: Request, problem: Problem, capability: Capability, rejected: list[Rejected]) -> tuple[Path, str]:
    no_fa2 = ["fa2=off was asked for"] if request.fa2 == "off" else fa2_reasons(problem, capability)
    if request.fa2 == "on" and no_fa2:
        raise RouteError(_cannot("fa2=on", no_fa2, "use fa2=off, or fa2=auto to take FA-2 only where it can serve"))
    if not request.v2_allowed:
        no_fa2 = ["NSA_SEL_RANGES_V2=0 forbids v2"]
    if not no_fa2:
        return Path.V2, "auto: FA-2 serves its packed rows"
    rejected.append(Rejected(Path.V2.value, "; ".join(no_fa2)))
    if problem.mask_elements <= MASK_LIMIT_ELEMENTS:
        return Path.MASKED, f"auto: a mask of {problem.mask_elements} elements is within {MASK_LIMIT_ELEMENTS}"
    too_large = f"a mask of {problem.mask_elements} elements exceeds {MASK_LIMIT_ELEMENTS}"
    if not request.v2_allowed:
        raise RouteError(_cannot("path=auto", [*no_fa2, too_large], "unset NSA_SEL_RANGES_V2 or name a path"))
    rejected.append(Rejected(Path.MASKED.value, too_large))
    return Path.V2, "auto: the mask would be too large, so packed rows over SDPA"


def _route_window(request: Request, problem: Problem, capability: Capability, rejected: list[Rejected]) -> BranchRoute:
    asked = request.fa2 if request.fa2_win == AUTO else request.fa2_win
    ragged = ["rows of the batch begin at different positions"] if problem.ragged else []
    if _fa2_serves(asked, problem, capability, ragged, "win", rejected):
        assert capability.fa2_provider is not None
        return BranchRoute("win", "fa2", "fa2", capability.fa2_provider, f"fa2={asked}: FA-2 with a window", repeatable=False)
    return BranchRoute(
        "win",
        "sdpa",
        "sdpa",
        f"torch {capability.torch_version}",
        "SDPA over tiles of one window each",
        repeatable=_sdpa_is_repeatable(capability),
    )
