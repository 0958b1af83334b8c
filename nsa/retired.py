"""NSA_* variables of the first implementation that are no longer read, and what to use instead.

Data only.
"""

from __future__ import annotations

from collections.abc import Mapping

_WORKSPACE = (
    "NSAAttention.reserve(batch, tokens); without it path v2 takes bounded chunks, which PyTorch's"
    " allocator keeps"
)

RETIRED: Mapping[str, str] = {
    "NSA_DDP_BUCKET_MB": (
        "parallel.bucket_mb of `python -m nsa.train`; in a loop of your own"
        " DistributedDataParallel(model, bucket_cap_mb=...)"
    ),
    "NSA_DDP_COMPRESS": (
        "parallel.compress, bf16 or off, of `python -m nsa.train`; in a loop of your own"
        " DistributedDataParallel's register_comm_hook with torch's bf16_compress_hook, or no hook"
    ),
    "NSA_DEBUG_FA2": (
        "NSA_DEBUG_LOG=1, or `python -m nsa explain`: a Route says for each branch why FA-2 serves"
        " it or not"
    ),
    "NSA_FA2_FORCE_DENSE": (
        "nothing is needed: every use of FA-2 is one variable-length call; fa2=off takes none"
    ),
    "NSA_GATE_COMPILE": (
        "torch.compile of the model or of one NSAAttention, which fuses gate and combine"
    ),
    "NSA_PREFILL_BATCHED": (
        "nothing is needed: prefill, chunked prefill and decode are one batched function of cache"
        " and chunk"
    ),
    "NSA_P_CMP_MIXED": "NSAConfig(score_dtype='bfloat16')",
    "NSA_SEL_PACK_RESERVE_L": _WORKSPACE,
    "NSA_SEL_PACK_RESERVE_N": _WORKSPACE,
    "NSA_SEL_RANGES_V2_MIN_S": (
        "path='adaptive', which takes v1 below 1,024 query tokens and v2 from there"
    ),
    "NSA_SEL_TRITON_MIN_L": (
        "the path argument: no path has a minimum length; path='auto' decides by shape and device"
    ),
    "NSA_SEL_VARLEN_V2": "path='v2'",
    "NSA_USE_SEL_PACK": "path='v1', which packs its rows by length",
    "NSA_VARLEN_RESERVE_K": _WORKSPACE,
    "NSA_VARLEN_RESERVE_N": _WORKSPACE,
}
