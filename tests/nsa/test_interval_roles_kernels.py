"""The interval kernels with warp roles, on the machine of Gluon kernels: which keys a query sees,
that all tiles are visited, and that no barrier waits for ever.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nsa.ops.interval
from nsa.ops.interval import backward_kv_kernels, forward_kernels, parts, roles
from nsa.ops.interval.tile_sizes import (
    BACKWARD_KV_ROLES,
    FORWARD_ROLES,
    BackwardRoleSizes,
    RoleSizes,
)
from nsa.ops.kernels import shares
from tests.cases import randn
from tests.nsa import warp_roles_machine as machine
from tests.nsa.kernel_cases import poisoned_memory  # noqa: F401

SOURCE = Path(nsa.ops.interval.__file__).with_name("warp_roles.py")
BACKWARD = SOURCE.with_name("warp_roles_backward.py")
COMPRESSED = {"block": 8, "stride": 4, "width": None}


@pytest.mark.parametrize(
    ("groups", "heads", "BC", "geometry", "start", "fewer"),
    [
        (3, 6, 64, COMPRESSED, 0, 0),
        (2, 4, 64, COMPRESSED, 1500, 0),
        (3, 3, 128, COMPRESSED, 1500, 0),
        (3, 6, 64, {"block": 1, "stride": 1, "width": 90}, 0, 0),
        (2, 2, 128, {"block": 1, "stride": 1, "width": 300}, 700, 0),
        (2, 4, 64, {"block": 1, "stride": 1, "width": 20}, 1500, 0),
        (3, 3, 64, {"block": 131, "stride": 1, "width": 70}, 60, 0),
        (3, 3, 64, {"block": 1, "stride": 1, "width": 90}, 0, 60),
        (2, 2, 64, {"block": 1, "stride": 1, "width": 90}, 1500, 200),
    ],
    ids=[
        "compressed",
        "late",
        "late by 128",
        "window",
        "late window",
        "narrow",
        "cut window",
        "window beyond the keys",
        "window behind the keys",
    ],
)
def test_forward_with_warp_roles(
    groups: int,
    heads: int,
    BC: int,
    geometry: dict[str, int | None],
    start: int,
    fewer: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rows of a batch, two kv heads, 100 queries: a tile of 36 rows, whole tiles of keys and
    masked ones, queries that see none. ``fewer`` keys than the last query would see.
    """
    kernels = machine.kernels(["nsa_interval_forward_roles"], SOURCE)
    monkeypatch.setattr(nsa.ops.interval, "warp_roles", SimpleNamespace(**kernels), raising=False)
    q = randn(2, 100, 2 * heads, 64, seed=1).half()
    block, stride, width = (geometry[name] for name in ("block", "stride", "width"))
    C = (start + 100 - block) // stride + 1 - fewer
    k, v = (randn(2, C, 2, 64, seed=n).half() for n in (2, 3))
    sizes = RoleSizes(BC, 2, groups, 128, 160)
    where = {"q_start": start, "first": None, "scale": 0.3}
    o, lse = forward_kernels.forward(q, k, v, **geometry, **where, role_sizes=sizes)
    s = torch.einsum("btghd,bcgd->btghc", q.double().unflatten(2, (2, heads)), k.double()) * 0.3
    ago = start + torch.arange(100)[:, None] - (torch.arange(C) * stride + block - 1)
    seen = (ago >= 0) & (ago < (width or C) * stride)
    s = s.masked_fill(~seen[:, None, None], -torch.inf)
    want = torch.einsum("btghc,bcgd->btghd", s.softmax(-1).nan_to_num(), v.double()).flatten(2, 3)
    torch.testing.assert_close(o.double(), want, atol=2e-3, rtol=0)
    want_lse = torch.logsumexp(s, -1).flatten(2) / torch.log(torch.tensor(2.0))
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("geometry", "sizes", "start", "plan"),
    [
        (COMPRESSED, (128, 2), 0, (1, 512)),
        (COMPRESSED, (64, 2), 700, (1, 128)),
        (COMPRESSED, (128, 3), 0, (2, 256)),
        ({"block": 1, "stride": 1, "width": 90}, (64, 2), 0, (2, 512)),
        ({"block": 1, "stride": 1, "width": 40}, (64, 3), 200, (1, 512)),
        ({"block": 131, "stride": 1, "width": 70}, (64, 2), 300, (2, 512)),
    ],
    ids=["compressed", "late", "ranges", "window", "late window", "cut window"],
)
def test_gradients_of_keys_with_warp_roles(
    geometry: dict[str, int | None],
    sizes: tuple[int, int],
    start: int,
    plan: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two rows of a batch, two kv heads of two, one or both a program, queries in ranges that cut
    what a key is seen by; keys that no query sees, queries that see none, and rows of lse beyond
    the queries.
    """
    names = ["nsa_interval_backward_kv_roles"]
    kernels = machine.kernels(names, BACKWARD, fetching_threads=32)
    found = SimpleNamespace(**kernels)
    monkeypatch.setattr(nsa.ops.interval, "warp_roles_backward", found, raising=False)
    T, H, scale = 500, 2, 0.3
    monkeypatch.setattr(parts, "plan", lambda *_, **__: (*plan, -(-T // plan[1])))
    block, stride, width = (geometry[name] for name in ("block", "stride", "width"))
    C = (start + T - block) // stride + 1 + 70
    q, do = (randn(2, T, 2 * H, 64, seed=n).half() for n in (1, 4))
    k, v = (randn(2, C, 2, 64, seed=n).half() for n in (2, 3))
    ends = torch.arange(C) * stride + block - 1
    ago = start + torch.arange(T)[:, None] - ends
    seen = (ago >= 0) & (ago < (width or C) * stride)
    leaves = [x.double().requires_grad_() for x in (k, v)]
    q_ = q.double().unflatten(2, (2, H))
    s = torch.einsum("btghd,bcgd->btghc", q_, leaves[0]) * scale
    s = s.masked_fill(~seen[:, None, None], -torch.inf)
    o = torch.einsum("btghc,bcgd->btghd", s.softmax(-1).nan_to_num(), leaves[1]).flatten(2, 3)
    lse = torch.logsumexp(s.detach(), -1).flatten(2) / torch.log(torch.tensor(2.0))
    blind = ~seen.any(1)
    o = o.masked_fill(blind[:, None, None], 0)
    want = torch.autograd.grad(o, leaves, do.double())
    delta = (o.detach() * do.double()).sum(-1)
    # rows that the queries do not have
    of_rows = [
        torch.nn.functional.pad(x.float(), (0, 0, 0, 3), value=torch.nan) for x in (lse, delta)
    ]
    do = torch.nn.functional.pad(do, (0, 0, 0, 0, 0, 3), value=torch.nan)
    got = backward_kv_kernels.backward_kv(
        do,
        q,
        k,
        v,
        *of_rows,
        **geometry,
        q_start=start,
        first=None,
        scale=scale,
        role_sizes=BackwardRoleSizes(*sizes, 168, 240),
    )
    for what, a, b in zip(("dk", "dv"), got, want, strict=True):
        # fp16 weights of their products
        assert (a.double() - b).abs().max() <= 2**-8 * max(1, b.abs().max()), what


def test_a_table_names_who_serves_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both branches at width 128, the compressed one alone at 64; heads that groups divide."""
    monkeypatch.setattr(roles, "described", lambda *_, work: ([], True))
    monkeypatch.setattr(roles, "sm_of", lambda device: (9, 0))

    def served(dim: int, width: int | None, heads: int = 12) -> RoleSizes | None:
        given = (torch.empty(1, 4096, n, dim, dtype=torch.float16) for n in (heads, 2, 2))
        return roles.forward_sizes(*given, width, 0.1, work=1 << 30)

    assert served(64, None) == FORWARD_ROLES[0][0] is not None
    assert served(64, 512) is None, "Triton's kernel is as fast on an H200"
    assert served(128, None) == FORWARD_ROLES[1][0] is not None
    assert served(128, 512) == FORWARD_ROLES[1][1] is not None
    assert served(128, 512, heads=6) is None, "groups of two heads do not divide three"


@pytest.mark.parametrize("width", [None, 512], ids=["compressed", "window"])
@pytest.mark.parametrize("dim", [64, 128])
def test_a_table_names_who_serves_gradients_of_keys(
    dim: int, width: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes of a table serve Hopper alone, rows of 64 or 128 elements of two bytes, and calls of
    many rows.
    """
    sizes = BACKWARD_KV_ROLES[(64, 128).index(dim)][width is not None]
    assert sizes is not None

    def served(rows: int = 4096, dtype: torch.dtype = torch.float16, key_dim: int = dim) -> bool:
        given = (torch.empty(1, rows, heads, key_dim, dtype=dtype) for heads in (4, 4, 2, 2))
        found = roles.backward_kv_sizes(*given, width, work=1 << 30)
        assert found in (None, sizes)
        return found is not None

    monkeypatch.setattr(roles, "described", lambda rows, *_, work: ([], rows == sizes.BM))
    monkeypatch.setattr(roles, "sm_of", lambda device: (9, 0))
    assert served()
    assert not served(key_dim=256) and not served(rows=4095) and not served(dtype=torch.float32)
    with shares.one_of(4):
        assert served(rows=1024) and not served(rows=1023), "a share counts as the whole"
    monkeypatch.setattr(roles, "is_off", lambda step: step == "roles")
    assert not served()
    monkeypatch.setattr(roles, "is_off", lambda step: False)
    monkeypatch.setattr(roles, "sm_of", lambda device: (8, 0))
    assert not served()
