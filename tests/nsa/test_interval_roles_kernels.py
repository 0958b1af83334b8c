"""The compressed branch's forward with warp roles, on the machine of Gluon kernels: which keys a
query sees, and that no barrier waits for ever.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nsa.ops.interval
from nsa.ops.interval import forward_kernels
from nsa.ops.interval.tile_sizes import RoleSizes
from tests.cases import randn
from tests.nsa import warp_roles_machine as machine
from tests.nsa.kernel_cases import poisoned_memory  # noqa: F401

SOURCE = Path(nsa.ops.interval.__file__).with_name("warp_roles.py")


@pytest.mark.parametrize(
    ("groups", "heads", "BC", "start"), [(3, 6, 64, 0), (2, 4, 64, 1500), (3, 3, 128, 1500)]
)
def test_forward_with_warp_roles(
    groups: int, heads: int, BC: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two rows of a batch, two kv heads, 100 queries: a tile of 36 rows, whole tiles of keys and
    masked ones, queries that see none.
    """
    kernels = machine.kernels(["nsa_interval_forward_roles"], SOURCE)
    monkeypatch.setattr(nsa.ops.interval, "warp_roles", SimpleNamespace(**kernels), raising=False)
    q = randn(2, 100, 2 * heads, 64, seed=1).half()
    C = (start + 100 - 8) // 4 + 1
    k, v = (randn(2, C, 2, 64, seed=n).half() for n in (2, 3))
    where = {"block": 8, "stride": 4, "width": None, "q_start": start, "first": None, "scale": 0.3}
    sizes = RoleSizes(BC, 2, groups, 128, 160)
    o, lse = forward_kernels.forward(q, k, v, **where, roles=sizes)
    s = torch.einsum("btghd,bcgd->btghc", q.double().unflatten(2, (2, heads)), k.double()) * 0.3
    ends = torch.arange(C) * 4 + 7
    seen = ends <= (start + torch.arange(100))[:, None]
    s = s.masked_fill(~seen[:, None, None], -torch.inf)
    want = torch.einsum("btghc,bcgd->btghd", s.softmax(-1).nan_to_num(), v.double()).flatten(2, 3)
    torch.testing.assert_close(o.double(), want, atol=2e-3, rtol=0)
    want_lse = torch.logsumexp(s, -1).flatten(2) / torch.log(torch.tensor(2.0))
    torch.testing.assert_close(lse.double(), want_lse, atol=1e-5, rtol=1e-5)
