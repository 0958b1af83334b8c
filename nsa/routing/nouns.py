"""The nouns of routing: what is requested, for which shape, on which machine, and what was decided.

Pure, like all of nsa.routing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from nsa.config import BRANCHES, ModelConfig, NSAConfig, nearest_name
from nsa.routing.user_table import UserTable

AUTO = "auto"
ADAPTIVE = "adaptive"
FA2_CHOICES = ("on", "off", AUTO)
SCORE = "score"
ONE_STEP = "one_step"  # what a Route rejects where no one operator serves a decode step
# a branch's implementation where it leaves no key out; not a Path, since no request names it
DENSE = "dense"

EXPLICIT = "explicit"  # a branch whose softmax is over logits that exist (nsa.ops.explicit)
# What a call may want of the softmax besides its output, which few implementations give.
SOFTCAP, SINKS, LSE = "softcap", "sinks", "return_lse"

SCORE_MAX_SLOTS = 64  # candidates that the choosing kernel ranks at once
PHI_MAX_HIDDEN = 256  # features of phi=mlp that the kernel's sums of a weight hold at once
# What NSA_TRITON_<STEP>=0 takes from path triton, so that a measurement can show what it buys;
# results are the same to rounding.
TRITON_STEPS: Mapping[str, str] = {
    "copy": (
        "tiles by tensor descriptors, which Hopper's copy engine fetches, in calls of many tokens"
    ),
    "lists": (
        "the selected forward block by block: as dense tiles where most blocks are chosen anyway,"
        " else over sorted lists of the queries that chose each"
    ),
    "roles": (
        "kernels for Hopper alone: the selected branch's lists and the compressed branch by warp"
        " groups with roles, some fetch and others multiply; scores of queries that stay in shared"
        " memory"
    ),
    "join": "one operator for the gated sum and the gradients of all branches",
    "split": "a decode step whose keys are split over the GPU",
}


class Path(StrEnum):
    """Implementations of the selected branch: one function at different costs."""

    REFERENCE = "reference"
    V1 = "v1"
    V2 = "v2"
    MASKED = "masked"
    TRITON = "triton"


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
    Path.V2: PathSpec(
        False, False, False, "whole blocks gathered, all rows in one packed call a workspace"
    ),
    Path.MASKED: PathSpec(False, False, False, "one SDPA over a boolean mask, O(T*S) memory"),
    Path.TRITON: PathSpec(
        False, False, True, "block-sparse kernels; each block meets the queries that chose it"
    ),
}
PATH_REQUESTS = (*Path, AUTO, ADAPTIVE)


class RouteError(ValueError):
    """A ValueError: a request cannot be served, or two explicit requests contradict each other.

    The message names the request, every reason against it, and what to ask for instead; of an
    unknown name, the nearest.
    """


@dataclass(frozen=True, slots=True)
class Capability:
    """What exists on the machine that will run; probed once by ``nsa.capability``, or assumed by
    name.

    ``sm`` is the compute capability, None on a CPU. ``fa2_provider`` is e.g. "torch.varlen 2.13.0";
    where it is None, ``fa2_reason`` says why. ``triton_provider``, e.g. "triton 3.7.1", and
    ``triton_reason`` likewise; so are those of FA-3, which serves a cache of full attention alone.
    """

    device: str
    device_name: str
    sm: tuple[int, int] | None
    fa2_provider: str | None
    fa2_reason: str
    torch_version: str
    triton_provider: str | None = None
    triton_reason: str = "Triton was not looked for"
    fa3_provider: str | None = None
    fa3_reason: str = "FA-3 was not looked for"


def scores_of(config: NSAConfig) -> str:
    """What keeps the fused kernel from choosing this config's blocks, every reason; "" for
    nothing.
    """
    reasons = []
    if config.selection != "exact":
        reasons.append(f"selection={config.selection}")
    if config.score_dtype != "float32":
        reasons.append(f"score_dtype={config.score_dtype}")
    begin = config.sel_block // config.cmp_stride
    if begin & (begin - 1):
        reasons.append(
            f"{begin} compressed blocks begin in a selection block, which is no power of two"
        )
    if config.cmp_block > config.sel_block:
        reasons.append(
            f"a compressed block ({config.cmp_block}) is longer than a selection block"
            f" ({config.sel_block})"
        )
    if config.num_selected > SCORE_MAX_SLOTS:
        reasons.append(f"num_selected {config.num_selected} exceeds {SCORE_MAX_SLOTS}")
    reasons += [f"it takes no {extra}" for extra in extras_of(config)]
    return "; ".join(reasons)


def extras_of(config: NSAConfig, *, return_lse: bool = False) -> tuple[str, ...]:
    """Problem.extras of a call with this config."""
    wanted = {SOFTCAP: config.softcap is not None, SINKS: config.sinks, LSE: return_lse}
    return tuple(extra for extra, is_on in wanted.items() if is_on)


def kept_tokens_of(config: NSAConfig) -> int:
    """Problem.kept_tokens of a call with this config."""
    return config.num_selected * config.sel_block + config.window


@dataclass(frozen=True, slots=True)
class Problem:
    """The shape of one attention call; ``ragged`` means that rows of the batch begin at different
    positions.

    ``select_all_tokens`` (num_selected * sel_block) and ``window`` say up to how many keys a branch
    leaves none out; None where that is not known. ``whole``: the queries are those of all the keys,
    in sequences that begin at 0, without a cache and not packed; only then is a branch that leaves
    no key out the same as full causal attention of one call.
    ``sel_block``: tokens of a selection block, where the call has some. ``scores``: what keeps the
    fused kernel from choosing the blocks, "" for nothing; None where the call chooses none.
    ``extras``: of SOFTCAP, SINKS and LSE, what the call wants. ``kept_tokens``: keys that the
    selected and the window branch leave a query, num_selected * sel_block + window, and
    ``cmp_stride``, tokens a compressed block further: None where a call of one branch names none.
    ``phi`` of NSAConfig: None where the call is given compressed keys.
    """

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
    select_all_tokens: int | None = None
    window: int | None = None
    whole: bool = False
    scores: str | None = None
    sel_block: int | None = None
    extras: tuple[str, ...] = ()
    kept_tokens: int | None = None
    cmp_stride: int | None = None
    phi: str | None = None

    @classmethod
    def of(
        cls,
        model: ModelConfig,
        *,
        batch: int,
        tokens: int,
        dtype: str,
        return_lse: bool = False,
    ) -> Self:
        """The attention call of one layer of ``model`` on ``batch`` sequences of ``tokens``
        tokens.
        """
        nsa = model.nsa
        # A hierarchical search looks into n / 2 regions, however few blocks there are.
        select_all = (
            nsa.num_selected_for(tokens) * nsa.sel_block if nsa.selection == "exact" else None
        )
        return cls(
            batch,
            tokens,
            tokens,
            model.num_heads,
            model.num_kv_heads,
            model.head_dim,
            model.value_dim,
            dtype,
            nsa.branches,
            select_all_tokens=select_all,
            window=nsa.window,
            whole=True,
            scores=scores_of(nsa),
            sel_block=nsa.sel_block,
            extras=extras_of(nsa, return_lse=return_lse),
            kept_tokens=kept_tokens_of(nsa),
            cmp_stride=nsa.cmp_stride,
            phi=nsa.phi,
        )

    @property
    def selects_all(self) -> bool:
        """Whether every selection block finds a slot, so that no query leaves a key out."""
        return self.select_all_tokens is not None and self.k_tokens <= self.select_all_tokens

    @property
    def window_covers_all(self) -> bool:
        """Whether no key is further back than the window, so that no query leaves a key out."""
        return self.window is not None and self.k_tokens <= self.window

    @property
    def mask_elements(self) -> int:
        return self.batch * self.num_kv_heads * self.q_tokens * self.k_tokens


@dataclass(frozen=True, slots=True)
class Request:
    """What the call and the environment request.

    ``notes`` say which setting changed it, so that the Route can repeat them.

    An argument's fa2=on must find a branch to serve; ``fa2_from_environment`` means one for every
    branch that FA-2 can express, which may be none. ``fa2_win`` and ``fa2_cmp`` are for one branch;
    with fewer keys than ``fa2_min_len_win`` fa2=auto does not take FA-2 for the window. ``off``:
    steps of path triton that are turned off, in the order of TRITON_STEPS. ``table``: the user's
    own, None for none.
    """

    path: str = AUTO
    fa2: str = AUTO
    fa2_win: str = AUTO
    v2_allowed: bool = True
    fa2_from_environment: bool = False
    notes: tuple[str, ...] = ()
    fa2_cmp: str = AUTO
    fa2_min_len_win: int = 0
    off: tuple[str, ...] = ()
    table: UserTable | None = None

    def __post_init__(self) -> None:
        if self.path not in PATH_REQUESTS:
            raise RouteError(
                f"path={self.path!r} is not"
                f" known{nearest_name(str(self.path), [str(path) for path in PATH_REQUESTS])}"
            )
        for name, value in (
            ("fa2", self.fa2),
            ("fa2_win", self.fa2_win),
            ("fa2_cmp", self.fa2_cmp),
        ):
            if value not in FA2_CHOICES:
                raise RouteError(
                    f"{name}={value!r} is not known; choose one of {', '.join(FA2_CHOICES)}"
                )


@dataclass(frozen=True, slots=True)
class Rejected:
    """An alternative that was not taken, and why."""

    alternative: str
    reason: str


@dataclass(frozen=True, slots=True)
class BranchRoute:
    """What serves one branch.

    ``kernel`` is fa2, sdpa, flash, cudnn, triton, loop or explicit; ``provider`` names whose, and
    its version.

    ``branch`` is cmp, sel or win, or SCORE for the choice of blocks where a kernel makes it.
    ``implementation`` is a Path of the selected branch, or DENSE where full causal attention serves
    that or the window branch.
    """

    branch: str
    implementation: str
    kernel: str
    provider: str
    reason: str
    syncs: bool = False
    repeatable: bool = True

    @property
    def counters(self) -> tuple[str, ...]:
        """Engagement counters that one call of this branch increments, e.g.

        ('sel.v2', 'sel.fa2').
        """
        names = (f"{self.branch}.{self.implementation}", f"{self.branch}.{self.kernel}")
        return tuple(dict.fromkeys(names))


@dataclass(frozen=True, slots=True)
class Route:
    """The decision for every branch of a call, with reasons and rejected alternatives.

    ``off``: steps of TRITON_STEPS that are turned off; empty where path triton serves no branch.
    """

    branches: tuple[BranchRoute, ...]
    rejected: tuple[Rejected, ...] = ()
    notes: tuple[str, ...] = ()
    off: tuple[str, ...] = ()

    def branch(self, name: str) -> BranchRoute:
        for candidate in self.branches:
            if candidate.branch == name:
                return candidate
        raise RouteError(
            f"this route has no branch {name!r}, only {[b.branch for b in self.branches]}; route it"
            " first"
        )

    def has(self, name: str) -> bool:
        return any(candidate.branch == name for candidate in self.branches)

    @property
    def counters(self) -> tuple[str, ...]:
        return tuple(counter for branch in self.branches for counter in branch.counters)

    def explain(self) -> list[str]:
        """One line for each branch, rejected alternative and note."""
        lines = [
            f"{b.branch}: {b.implementation} ({b.kernel}, {b.provider}): {b.reason}"
            for b in self.branches
        ]
        lines += [f"not {r.alternative}: {r.reason}" for r in self.rejected]
        return lines + [f"note: {note}" for note in self.notes]
