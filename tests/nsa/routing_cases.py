"""Machines and problems for the tests of the router, by name and at random."""

from __future__ import annotations

import dataclasses

from hypothesis import strategies as st

from nsa.config import BRANCHES, preset
from nsa.routing import Capability, Problem, Request, Route, plan

H100 = Capability("cuda", "NVIDIA H100 80GB HBM3", (9, 0), "torch.varlen 2.13.0", "", "2.13.0")
TRITON = dataclasses.replace(H100, triton_provider="triton 3.6.0", triton_reason="")
NO_FA2 = dataclasses.replace(
    H100,
    fa2_provider=None,
    fa2_reason="flash_attn is not installed and torch 2.5 is older than 2.11",
)
V100 = dataclasses.replace(H100, device_name="Tesla V100", sm=(7, 0))
CPU = Capability("cpu", "cpu", None, "torch.varlen 2.13.0", "", "2.13.0")
PROBLEM = Problem(1, 2048, 2048, 12, 2, 64, 64, "bfloat16")

capabilities = st.builds(
    Capability,
    device=st.sampled_from(["cpu", "cuda"]),
    device_name=st.just("any"),
    sm=st.sampled_from([None, (7, 0), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0)]),
    fa2_provider=st.sampled_from([None, "flash_attn 2.8.3", "torch.varlen 2.11.0"]),
    fa2_reason=st.just("no provider here"),
    torch_version=st.just("2.13.0"),
    triton_provider=st.sampled_from([None, "triton 3.6.0"]),
    triton_reason=st.just("no Triton here"),
)
problems = st.builds(
    lambda groups, heads, **rest: Problem(num_heads=groups * heads, num_kv_heads=groups, **rest),
    groups=st.sampled_from([1, 2, 4, 8]),
    heads=st.sampled_from([1, 3, 6, 16, 65]),
    batch=st.sampled_from([1, 3, 8]),
    q_tokens=st.sampled_from([1, 64, 2048, 65536]),
    k_tokens=st.sampled_from([64, 2048, 65536, 131072]),
    head_dim=st.sampled_from([16, 60, 64, 192, 300]),
    v_head_dim=st.sampled_from([16, 60, 64, 100, 128]),
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "float64"]),
    branches=st.sampled_from([BRANCHES, ("sel",), ("cmp", "win"), ("win",), ("sel", "win")]),
    ragged=st.booleans(),
    select_all_tokens=st.sampled_from([None, 64, 65536]),
    window=st.sampled_from([None, 64, 65536]),
    whole=st.booleans(),
    scores=st.sampled_from([None, "", "selection=hierarchical"]),
)
fa2s = st.sampled_from(["on", "off", "auto"])


def route_at(
    tokens: int,
    request: Request = Request(),  # noqa: B008
    capability: Capability = H100,
    **options: object,
) -> Route:
    model = preset("m7c_125m")
    model = dataclasses.replace(model, nsa=dataclasses.replace(model.nsa, **options))
    return plan(request, model, batch=1, tokens=tokens, dtype="bfloat16", capability=capability)
