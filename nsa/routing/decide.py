"""The decision: a Request, a Problem and a Capability in, a Route out.

An explicit request is that path or a RouteError with every reason; `auto` never returns a slow
path, nor v1. Where a branch of a whole sequence leaves no key out, `auto` takes full causal
attention for it, unless FA-2 was asked to serve it. No reason names the sequence length: under
torch.compile a string formatted with it would compile every length anew.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from nsa.config import BRANCHES, ModelConfig, NSAConfig, nearest_name
from nsa.routing.nouns import (
    ADAPTIVE,
    AUTO,
    DENSE,
    EXPLICIT,
    ONE_STEP,
    PHI_MAX_HIDDEN,
    SCORE,
    SPECS,
    TRITON_STEPS,
    BranchRoute,
    Capability,
    Path,
    Problem,
    Rejected,
    Request,
    Route,
    RouteError,
)
from nsa.routing.speed import speed_of, table_says_of_window
from nsa.routing.support import (
    fa2_reasons,
    fused_reasons,
    sdpa_reasons,
    triton_lacks,
    triton_reasons,
)
from nsa.routing.thresholds import ADAPTIVE_MIN_TOKENS, MASK_LIMIT_ELEMENTS, STEP_MAX_ROWS

DENSE_KINDS = ("dense", "dense_flash", "dense_cudnn")
# with a cache: FA-2 and cuDNN of PyTorch take no lengths that are on the device
CACHED_DENSE_KINDS = ("dense", "dense_flash", "dense_triton", "dense_fa3")
ALL_SELECTED = "every block is selected at this length"
ALL_IN_WINDOW = "the window covers the whole sequence"
TAKE_REFERENCE = "use path=reference, which is slow"
PHI_BY_KERNEL = f"by kernels, but by its formula with a cache or over {PHI_MAX_HIDDEN} features"
STAIRCASE = "its staircase mask is not expressible in FA-2"


@lru_cache(maxsize=1024)
def route(request: Request, problem: Problem, capability: Capability) -> Route:
    """Decide every branch of ``problem``; raises RouteError with all reasons where a request cannot
    be served.
    """
    rejected: list[Rejected] = []
    notes = list(request.notes)
    routed: list[BranchRoute] = []
    fused = _takes_triton(request, problem, capability, rejected, notes)
    if problem.extras:
        _check_extras(request, problem, fused, rejected)
        if not fused:
            return _route_explicit(problem, capability, rejected, notes)
    if "cmp" in problem.branches:
        routed.append(_route_compressed(request, problem, capability, fused))
    if "sel" in problem.branches:
        selected = _route_selected(request, problem, capability, fused, rejected)
        routed += _route_scores(
            problem, capability, selected.implementation == Path.TRITON, rejected
        )
        routed.append(selected)
    if "win" in problem.branches:
        routed.append(_route_window(request, problem, capability, fused, rejected, notes))
    off = request.off if any(branch.implementation == Path.TRITON for branch in routed) else ()
    notes += [
        f"NSA_TRITON_{step.upper()}=0 (environment) turns off {TRITON_STEPS[step]}" for step in off
    ]
    return Route(tuple(routed), tuple(rejected), tuple(notes), off)


def route_dense(kind: str, problem: Problem, capability: Capability) -> Route:
    """Decide full causal attention: ``dense`` leaves the kernel to SDPA, the others name it or
    raise RouteError.
    """
    if kind not in DENSE_KINDS:
        raise RouteError(f"dense path {kind!r} is not known{nearest_name(kind, list(DENSE_KINDS))}")
    if problem.extras:
        raise RouteError(
            _cannot(
                f"path={kind}{_with(problem)}",
                sdpa_reasons(problem),
                "take NSAAttention with NSAConfig.full_attention() and path=reference",
            )
        )
    kernel = {"dense": "sdpa", "dense_flash": "flash", "dense_cudnn": "cudnn"}[kind]
    if kind != "dense" and (reasons := fused_reasons(problem, capability)):
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


def route_dense_cached(kind: str, problem: Problem, capability: Capability) -> Route:
    """Decide full causal attention of a chunk over a cache (`nsa.decode.DenseCache`): ``dense`` is
    SDPA, the others name their kernel or raise RouteError. ``problem.ragged``: positions are on the
    device, as in a captured step.
    """
    if kind not in CACHED_DENSE_KINDS:
        if kind in DENSE_KINDS:
            raise RouteError(
                _cannot(f"path={kind}", ["it keeps no cache"], "use path=dense or dense_triton")
            )
        known = list(CACHED_DENSE_KINDS)
        raise RouteError(f"dense path {kind!r} is not known{nearest_name(kind, known)}")
    kernel = {"dense": "sdpa"}.get(kind, kind.removeprefix("dense_"))
    provider: str | None = f"torch {capability.torch_version}"
    reasons = sdpa_reasons(problem)
    if kernel == "flash":
        reasons += fused_reasons(problem, capability)
        if problem.ragged:
            reasons.append("FA-2 of PyTorch takes no positions that are on the device")
    elif kernel == "triton":
        provider, alone = capability.triton_provider, replace(problem, sel_block=None)
        reasons = triton_reasons(alone, capability)
    elif kernel == "fa3":
        provider = capability.fa3_provider
        missing = [capability.fa3_reason] if provider is None else []
        reasons += missing + fused_reasons(problem, capability)
        if problem.dtype != "bfloat16":
            reasons.append(f"fa3-fwd is built for bfloat16 alone, not for {problem.dtype}")
    if reasons:
        raise RouteError(_cannot(f"path={kind}{_with(problem)}", reasons, "use path=dense"))
    assert provider is not None
    branch = BranchRoute(
        "dense", kernel, kernel, provider, "full causal attention over a cache, asked for by name"
    )
    return Route((branch,), (Rejected("fa2", "n/a: a dense path names its kernel itself"),))


def is_one_step(route: Route, config: NSAConfig) -> bool:
    """Whether one operator (nsa.ops.decode_step) serves a step of one token a row, positions on the
    device, of such a Route.
    """
    return not _against_one_step(route, config)


def with_one_step(route: Route, config: NSAConfig, against: tuple[str, ...] = ()) -> Route:
    """``route``, and why no one operator serves the step (`is_one_step`), where it does not.

    ``against``: what keeps its cache from it.
    """
    reasons = [*_against_one_step(route, config), *against]
    if not reasons:
        return route
    return replace(route, rejected=(*route.rejected, Rejected(ONE_STEP, "; ".join(reasons))))


def _against_one_step(route: Route, config: NSAConfig) -> list[str]:
    served = {b.branch for b in route.branches if Path.TRITON in (b.kernel, b.implementation)}
    reasons = []
    if missing := [name for name in (*BRANCHES, SCORE) if name not in served]:
        reasons.append(f"path triton does not serve {', '.join(missing)}")
    if "split" in route.off:
        reasons.append("NSA_TRITON_SPLIT=0 turns it off")
    if config.phi != "mean":
        reasons.append(f"it compresses by phi=mean, not by phi={config.phi}")
    if not config.rotates_before_compression:
        reasons.append("it rotates keys before they are compressed, not after")
    if config.qk_norm:
        reasons.append("it takes no qk_norm")
    return reasons


def is_one_block(route: Route, config: NSAConfig, batch: int) -> bool:
    """Whether the norms and products of a whole block go with it (nsa.ops.linear_step)."""
    return is_one_step(route, config) and config.gate == "softmax" and batch <= STEP_MAX_ROWS


def plan(
    request: Request,
    model: ModelConfig,
    *,
    batch: int,
    tokens: int,
    dtype: str,
    capability: Capability,
    return_lse: bool = False,
) -> Route:
    """The Route that one layer of ``model`` will take: what perfbench prints before it measures."""
    problem = Problem.of(model, batch=batch, tokens=tokens, dtype=dtype, return_lse=return_lse)
    return route(request, problem, capability)


def _cannot(what: str, reasons: list[str], next_step: str) -> str:
    return f"{what} cannot be served: {'; '.join(reasons)}. Next: {next_step}"


def _with(problem: Problem) -> str:
    return f" with {' and '.join(problem.extras)}" if problem.extras else ""


def _check_extras(
    request: Request, problem: Problem, fused: bool, rejected: list[Rejected]
) -> None:
    """RouteError unless what was asked for gives ``problem.extras``: path reference all of them,
    path triton the lse. The slow one is never taken for another.
    """
    against = sdpa_reasons(problem)
    if request.path != Path.REFERENCE and not fused:
        reasons = list(against)
        if request.path == AUTO:
            others = [r.reason for r in rejected if r.alternative == Path.TRITON]
            others = others or triton_lacks(problem) or ["auto takes it on a GPU alone"]
            reasons += [f"path triton: {other}" for other in others]
        what = f"path={request.path}{_with(problem)}"
        raise RouteError(_cannot(what, reasons, TAKE_REFERENCE))
    for name, value, is_refused in (
        ("fa2=on", request.fa2, not request.fa2_from_environment),
        ("NSA_USE_FA2_WIN=1", request.fa2_win, "win" in problem.branches),
        ("NSA_USE_FA2_CMP=1", request.fa2_cmp, "cmp" in problem.branches),
    ):
        if value == "on" and is_refused:
            next_step = "use fa2=off or fa2=auto, and unset the variable"
            raise RouteError(_cannot(f"{name}{_with(problem)}", against, next_step))
    rejected += [Rejected(other, "; ".join(against)) for other in ("sdpa", "fa2")]


def _route_explicit(
    problem: Problem, capability: Capability, rejected: list[Rejected], notes: list[str]
) -> Route:
    """Path reference of a call that wants more of the softmax than its output."""
    reason = f"path=reference{_with(problem)}: an explicit softmax over chunks of queries, slow"
    routed = tuple(
        BranchRoute(
            branch,
            Path.REFERENCE.value if branch == "sel" else EXPLICIT,
            EXPLICIT,
            f"torch {capability.torch_version}",
            reason,
        )
        for branch in BRANCHES
        if branch in problem.branches
    )
    return Route(routed, tuple(rejected), tuple(notes))


def _takes_triton(
    request: Request,
    problem: Problem,
    capability: Capability,
    rejected: list[Rejected],
    notes: list[str],
) -> bool:
    """Whether the Triton kernels serve this call: asked for by name, or the fastest that `auto`
    knows on this GPU (nsa.routing.speed).
    """
    if request.path == Path.TRITON:
        if reasons := triton_reasons(problem, capability):
            next_step = TAKE_REFERENCE if problem.extras else "use path=auto, v2 or masked"
            raise RouteError(_cannot(f"path=triton{_with(problem)}", reasons, next_step))
        return True
    if request.path != AUTO or capability.sm is None:  # the interpreter is for tests
        return False
    reasons = triton_reasons(problem, capability)
    speed = speed_of(request, problem, capability)
    if problem.dtype == "float32":
        reasons.append("in float32 its exact products are for tests")
    if request.fa2 == "on" and "win" not in problem.branches and not request.fa2_from_environment:
        reasons.append("fa2=on was asked for, and there is no window branch for it to serve")
    if speed.against:
        reasons.append(speed.against)
    if speed.note:
        notes.append(speed.note)
    if reasons:
        rejected.append(Rejected(Path.TRITON.value, "; ".join(reasons)))
    return not reasons


def _triton(branch: str, capability: Capability, reason: str) -> BranchRoute:
    assert capability.triton_provider is not None
    return BranchRoute(branch, Path.TRITON.value, "triton", capability.triton_provider, reason)


def _route_scores(
    problem: Problem, capability: Capability, fused: bool, rejected: list[Rejected]
) -> list[BranchRoute]:
    """The choice of blocks, where a kernel makes it; else it is torch's sort, which has no
    route.
    """
    if not fused or problem.scores is None:
        return []
    if problem.scores:
        rejected.append(Rejected("score.triton", problem.scores))
        return []
    return [
        _triton(
            SCORE,
            capability,
            "scores are summed over the group's heads and ranked without a copy per head",
        )
    ]


def _route_compressed(
    request: Request, problem: Problem, capability: Capability, fused: bool
) -> BranchRoute:
    if request.fa2_cmp == "on":
        raise RouteError(
            _cannot("NSA_USE_FA2_CMP=1", [STAIRCASE], "unset NSA_USE_FA2_CMP, or set it to 0")
        )
    if request.fa2 == "on" and problem.branches == ("cmp",) and not request.fa2_from_environment:
        raise RouteError(
            _cannot("fa2=on for the compressed branch", [STAIRCASE], "use fa2=off or fa2=auto")
        )
    if fused:
        reason = f"tiles of queries over the blocks they see; {STAIRCASE}"
        if problem.phi not in (None, "mean"):
            reason += f"; phi={problem.phi} {PHI_BY_KERNEL}"
        return _triton("cmp", capability, reason)
    return BranchRoute(
        "cmp",
        "sdpa",
        "sdpa",
        f"torch {capability.torch_version}",
        f"SDPA over a boolean mask; {STAIRCASE}",
        repeatable=_sdpa_is_repeatable(capability),
    )


def _sdpa_is_repeatable(capability: Capability) -> bool:
    """Its CUDA kernels add up dQ in the order in which their blocks finish: three runs on an H100
    gave other last bits.
    """
    return capability.sm is None


def _fa2_serves(
    fa2_request: str,
    problem: Problem,
    capability: Capability,
    extra: list[str],
    what: str,
    rejected: list[Rejected],
) -> bool:
    if fa2_request == "off":
        rejected.append(Rejected(f"fa2 for {what}", "fa2=off was asked for"))
        return False
    reasons = fa2_reasons(problem, capability) + extra
    if fa2_request == "on" and reasons:
        raise RouteError(
            _cannot(
                f"fa2=on for {what}",
                reasons,
                "use fa2=off, or fa2=auto to take FA-2 only where it can serve",
            )
        )
    if reasons:
        rejected.append(Rejected(f"fa2 for {what}", "; ".join(reasons)))
    return not reasons


def _route_full_causal(
    branch: str,
    why: str,
    fa2_request: str,
    problem: Problem,
    capability: Capability,
    rejected: list[Rejected],
) -> BranchRoute | None:
    """SDPA's own causal attention for a branch that leaves no key out; None where it may not be
    taken. ``why`` says that it leaves none.
    """
    if problem.extras:
        rejected.append(
            Rejected(f"{branch}.{DENSE}", f"{why}, but {'; '.join(sdpa_reasons(problem))}")
        )
        return None
    if not problem.whole:
        rejected.append(
            Rejected(
                f"{branch}.{DENSE}", f"{why}, but the call is a chunk, packed, or with a cache"
            )
        )
        return None
    if fa2_request == "on":
        rejected.append(
            Rejected(f"{branch}.{DENSE}", f"{why}, but fa2=on was asked for, and this is SDPA")
        )
        return None
    # SDPA would take its O(T^2) math kernel
    if capability.sm is not None and (unfused := fused_reasons(problem, capability)):
        rejected.append(
            Rejected(
                f"{branch}.{DENSE}",
                f"{why}, but no fused causal kernel serves it: {'; '.join(unfused)}",
            )
        )
        return None
    others = [
        "v2: nothing is left out, so there is nothing to gather",
        "masked: nothing is left out, so there is nothing to mask",
    ]
    if branch == "win":
        others = ["win.sdpa: no key is further back than the window, so tiles would only copy"]
    rejected += [Rejected(*other.split(": ", 1)) for other in others]
    against = (
        ["fa2=off was asked for"] if fa2_request == "off" else fa2_reasons(problem, capability)
    )
    against = against or [
        "the branch is full causal attention, which SDPA serves; fa2=on takes FA-2"
    ]
    rejected.append(Rejected(f"fa2 for {branch}", "; ".join(against)))
    reason = f"auto: {why}, so the branch is full causal attention"
    return BranchRoute(
        branch,
        DENSE,
        "sdpa",
        f"torch {capability.torch_version}",
        reason,
        repeatable=_sdpa_is_repeatable(capability),
    )


def _route_selected(
    request: Request,
    problem: Problem,
    capability: Capability,
    fused: bool,
    rejected: list[Rejected],
) -> BranchRoute:
    if request.path == AUTO and problem.selects_all:
        dense = _route_full_causal("sel", ALL_SELECTED, request.fa2, problem, capability, rejected)
        if dense is not None:
            return dense
    path, reason = _selected_path(request, problem, capability, fused, rejected)
    if (
        request.fa2 == "on"
        and path is not Path.V2
        and "win" not in problem.branches
        and not request.fa2_from_environment
    ):
        why = [f"path {path.value} cannot use it, and there is no window branch for it to serve"]
        raise RouteError(_cannot("fa2=on", why, "use path=v2, or fa2=off"))
    spec = SPECS[path]
    kernel, provider = "sdpa", f"torch {capability.torch_version}"
    if path is Path.REFERENCE:
        kernel = "loop"
    if path is Path.V2 and _fa2_serves(request.fa2, problem, capability, [], "sel.v2", rejected):
        assert capability.fa2_provider is not None
        kernel, provider = "fa2", capability.fa2_provider
    if path is Path.TRITON:
        assert capability.triton_provider is not None
        kernel, provider = "triton", capability.triton_provider
    repeatable = spec.repeatable_on_cuda or capability.sm is None
    why = [reason, spec.summary]
    if request.path == AUTO and problem.selects_all:
        why.append(ALL_SELECTED)
    return BranchRoute("sel", path.value, kernel, provider, "; ".join(why), spec.syncs, repeatable)


def _selected_path(
    request: Request,
    problem: Problem,
    capability: Capability,
    fused: bool,
    rejected: list[Rejected],
) -> tuple[Path, str]:
    if request.path == ADAPTIVE:
        rule = f"adaptive: v1 below {ADAPTIVE_MIN_TOKENS} query tokens, v2 from there"
        if problem.q_tokens < ADAPTIVE_MIN_TOKENS:
            return Path.V1, f"{rule}; these are fewer"
        if not request.v2_allowed:
            return Path.V1, f"{rule}; NSA_SEL_RANGES_V2=0 forbids v2"
        return Path.V2, f"{rule}; these are at least as many"
    if request.path != AUTO:
        return Path(request.path), f"path={request.path} was asked for by name"
    if fused:
        return Path.TRITON, speed_of(request, problem, capability).why
    return _auto_path(request, problem, capability, rejected)


def _auto_path(
    request: Request, problem: Problem, capability: Capability, rejected: list[Rejected]
) -> tuple[Path, str]:
    no_fa2 = ["fa2=off was asked for"] if request.fa2 == "off" else fa2_reasons(problem, capability)
    if request.fa2 == "on" and no_fa2:
        raise RouteError(
            _cannot(
                "fa2=on", no_fa2, "use fa2=off, or fa2=auto to take FA-2 only where it can serve"
            )
        )
    if not request.v2_allowed:
        no_fa2 = ["NSA_SEL_RANGES_V2=0 forbids v2"]
    if not no_fa2:
        return Path.V2, "auto: FA-2 serves its packed rows"
    rejected.append(Rejected(Path.V2.value, "; ".join(no_fa2)))
    if problem.mask_elements <= MASK_LIMIT_ELEMENTS:
        return Path.MASKED, f"auto: its mask is within {MASK_LIMIT_ELEMENTS} elements"
    if not request.v2_allowed:
        too_large = f"a mask of {problem.mask_elements} elements exceeds {MASK_LIMIT_ELEMENTS}"
        raise RouteError(
            _cannot("path=auto", [*no_fa2, too_large], "unset NSA_SEL_RANGES_V2 or name a path")
        )
    rejected.append(
        Rejected(Path.MASKED.value, f"its mask would exceed {MASK_LIMIT_ELEMENTS} elements")
    )
    return Path.V2, "auto: the mask would be too large, so packed rows over SDPA"


def _route_window(
    request: Request,
    problem: Problem,
    capability: Capability,
    fused: bool,
    rejected: list[Rejected],
    notes: list[str],
) -> BranchRoute:
    fa2_request = request.fa2 if request.fa2_win == AUTO else request.fa2_win
    if request.path == AUTO and problem.window_covers_all:
        dense = _route_full_causal("win", ALL_IN_WINDOW, fa2_request, problem, capability, rejected)
        if dense is not None:
            return dense
    if fused and (fa2_request != "on" or problem.extras):
        rejected.append(
            Rejected(
                "fa2 for win",
                (
                    "fa2=off was asked for"
                    if fa2_request == "off"
                    else "path triton has a kernel of its own"
                ),
            )
        )
        return _triton("win", capability, "tiles of queries over the keys of their windows")
    against = ["rows of the batch begin at different positions"] if problem.ragged else []
    if request.fa2_min_len_win > problem.k_tokens:
        minimum = f"NSA_FA2_MIN_LEN_WIN={request.fa2_min_len_win}"
        if fa2_request == AUTO:
            against.append(f"fewer tokens than {minimum}")
        if fa2_request == "on":
            notes.append(f"fa2=on outranks {minimum}, and these are fewer tokens")
    if fa2_request == AUTO and not request.fa2_min_len_win:
        against += table_says_of_window(request, problem, capability)
    covers = f"; {ALL_IN_WINDOW}" if request.path == AUTO and problem.window_covers_all else ""
    if _fa2_serves(fa2_request, problem, capability, against, "win", rejected):
        assert capability.fa2_provider is not None
        reason = f"fa2={fa2_request}: FA-2 with a window{covers}"
        return BranchRoute("win", "fa2", "fa2", capability.fa2_provider, reason, repeatable=False)
    return BranchRoute(
        "win",
        "sdpa",
        "sdpa",
        f"torch {capability.torch_version}",
        f"SDPA over tiles of one window each{covers}",
        repeatable=_sdpa_is_repeatable(capability),
    )
