"""What each provider's kernels can serve: every reason why not, so that a Route can repeat them.

Pure, like all of nsa.routing.
"""

from __future__ import annotations

from collections.abc import Mapping

from nsa.routing.cards import HOPPER, card_class, selected_backward_bytes
from nsa.routing.nouns import LSE, SINKS, SOFTCAP, Capability, Problem
from nsa.routing.thresholds import GRID_LIMIT

FA2_DTYPES = ("float16", "bfloat16")
FA2_MIN_SM = (8, 0)
FA2_MAX_HEAD_DIM = 256
TRITON_DTYPES = ("float16", "bfloat16", "float32")
TRITON_MAX_HEAD_DIM = 256
TRITON_MAX_BLOCK_BYTES = 2**16  # K and V of one block lie in shared memory together
TRITON_MAX_GROUP = 64  # query heads per kv head: a tile holds at least one query's


# why a branch that SDPA or FA-2 serves cannot give what a call wants besides o
_SDPA_HAS_NO: Mapping[str, str] = {
    SOFTCAP: "SDPA and torch's FA-2 take no softcap",
    SINKS: "SDPA and torch's FA-2 take no sinks",
    LSE: "NSA's calls of SDPA and FA-2 leave no lse",
}


def sdpa_reasons(problem: Problem) -> list[str]:
    """Every reason why neither SDPA nor FA-2 can serve this problem; empty where they can."""
    return [_SDPA_HAS_NO[extra] for extra in problem.extras]


def fa2_reasons(problem: Problem, capability: Capability) -> list[str]:
    """Every reason why FA-2 cannot serve this problem; empty where it can."""
    missing = [capability.fa2_reason] if capability.fa2_provider is None else []
    return missing + sdpa_reasons(problem) + fused_reasons(problem, capability)


def triton_lacks(problem: Problem) -> list[str]:
    """What the call wants of the softmax and the Triton kernels do not give; their lse they leave
    anyway.
    """
    return [f"its kernels have no {e} yet" for e in problem.extras if e in (SOFTCAP, SINKS)]


def triton_reasons(problem: Problem, capability: Capability) -> list[str]:
    """Every reason why the Triton kernels cannot serve this problem; empty where they can."""
    reasons = [capability.triton_reason] if capability.triton_provider is None else []
    if capability.sm is not None and capability.sm < FA2_MIN_SM:
        reasons.append(
            f"SM {capability.sm[0]}.{capability.sm[1]} is below {FA2_MIN_SM[0]}.{FA2_MIN_SM[1]}"
        )
    if problem.dtype not in TRITON_DTYPES:
        reasons.append(f"dtype {problem.dtype} is not one of {', '.join(TRITON_DTYPES)}")
    if problem.dtype == "bfloat16" and capability.sm is None:
        reasons.append("Triton's interpreter multiplies bfloat16 wrongly")
    for name, size in (("a batch of", problem.batch), ("num_heads", problem.num_heads)):
        if size > GRID_LIMIT:
            reasons.append(f"{name} {size:,} exceeds {GRID_LIMIT:,}, a dimension of a CUDA grid")
    for name, size in (("head_dim", problem.head_dim), ("v_head_dim", problem.v_head_dim)):
        if size > TRITON_MAX_HEAD_DIM:
            reasons.append(f"{name} {size} exceeds {TRITON_MAX_HEAD_DIM}")
    if problem.sel_block is not None:
        block, size = (
            1 << (n - 1).bit_length()
            for n in (problem.sel_block, max(problem.head_dim, problem.v_head_dim))
        )
        if block * size * (4 if problem.dtype == "float32" else 2) > TRITON_MAX_BLOCK_BYTES:
            reasons.append(
                f"a selection block of {block} x {size} {problem.dtype} exceeds"
                f" {TRITON_MAX_BLOCK_BYTES} bytes"
            )
    reasons += _too_little_shared_memory(problem, capability)
    reasons += triton_lacks(problem)
    if (group := problem.num_heads // problem.num_kv_heads) > TRITON_MAX_GROUP:
        reasons.append(f"{group} query heads per kv head exceed {TRITON_MAX_GROUP}")
    return reasons


def _too_little_shared_memory(problem: Problem, capability: Capability) -> list[str]:
    """On a card that gives less than the one with which the limits above were found."""
    shared = card_class(capability.sm).shared_bytes
    if capability.sm is None or shared >= HOPPER.shared_bytes:
        return []
    sizes = (
        problem.num_heads // problem.num_kv_heads,
        problem.sel_block or 1,
        problem.head_dim,
        problem.v_head_dim,
    )
    rows, block, *dims = (max(16, 1 << (n - 1).bit_length()) for n in sizes)
    element_bytes = 4 if problem.dtype == "float32" else 2
    needed = selected_backward_bytes(rows, block, dims[0], dims[1], element_bytes)
    if problem.sel_block is None or needed <= shared:
        return []
    return [
        f"a selection block of {block} x {max(dims)} {problem.dtype} and {rows} query heads take"
        f" {needed:,} bytes of shared memory in its backward, and SM"
        f" {capability.sm[0]}.{capability.sm[1]} has {shared:,}"
    ]


def fused_reasons(problem: Problem, capability: Capability) -> list[str]:
    """What rules out a fused half-precision kernel, whoever provides it."""
    reasons = []
    if capability.sm is None:
        reasons.append(f"device {capability.device} is not CUDA")
    elif capability.sm < FA2_MIN_SM:
        reasons.append(
            f"SM {capability.sm[0]}.{capability.sm[1]} is below {FA2_MIN_SM[0]}.{FA2_MIN_SM[1]}"
        )
    if problem.dtype not in FA2_DTYPES:
        reasons.append(f"dtype {problem.dtype} is not one of {', '.join(FA2_DTYPES)}")
    if problem.head_dim != problem.v_head_dim:
        reasons.append(f"head dims of K and V differ ({problem.head_dim} and {problem.v_head_dim})")
    for name, size in (("head_dim", problem.head_dim), ("v_head_dim", problem.v_head_dim)):
        if size % 8 or size > FA2_MAX_HEAD_DIM:
            reasons.append(f"{name} {size} is not a multiple of 8 up to {FA2_MAX_HEAD_DIM}")
    return reasons
