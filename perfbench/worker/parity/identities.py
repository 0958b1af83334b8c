"""What the gradients of attention must keep for any upstream gradient, without an oracle: sums that
see the rows and keys which no sample holds.

For o = sum over branches b of g_b * P_b v_b, where each row of P_b sums to 1 over the keys that it
sees (to 0 where it sees none), with the gradient dO of o, per sequence and KV head:

- ``sum dv_b``: the sum of dv_b over all keys is that of g_b * dO over all rows that see a key.
- ``gates . dg_b``: <g_b, dg_b> = <v_b, dv_b>, since both are <g_b * P_b v_b, dO>.
- ``q . dq``: <q, dq> = sum over b of <k_b, dk_b>, since logits are bilinear in q and k.
- ``v = 1``: every output is the sum of the gates of the branches in which its row sees a key.
- ``halves``: a backward of dO is the sum of the backwards of dO on some rows and on the others.

Compressed keys and values are means of tokens, through which the first three pass; of another phi
they do not hold for the tokens, and are left out there. Where all branches share one K and V, the
first three hold for the sums over the branches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from nsa.config import NSAConfig
from perfbench.worker.parity.backward import DenseBackward, Tensors

# Each of n roundings is off by at most eps / 2, either way; their sum by about sqrt(n) of that.
# 16 times eps leaves room for kernels that round several times; a key block that is lost moves
# a sum by far more.
ROUNDINGS = 16.0


class Identities:
    """``own`` maps the tensors to o [B, T, HQ, DV]; it is evaluated at ``inputs``, whose names are
    q, gates (or none, where the only branch's gate is 1), and k_b, v_b of each of ``branches``; or
    with ``shared`` k_sel and v_sel of all.

    B batch, T tokens, G kv heads, H query heads per kv head.
    """

    def __init__(
        self,
        own: Callable[[Tensors], Tensor],
        inputs: Tensors,
        branches: Sequence[str],
        nsa: NSAConfig | None,
        *,
        shared: bool = False,
    ) -> None:
        self._own, self._branches, self._nsa, self._shared = own, branches, nsa, shared
        self._inputs = {name: x.detach() for name, x in inputs.items()}
        self._eps = torch.finfo(inputs["q"].dtype).eps
        self.ratios: dict[str, tuple[float, float]] = {}  # name -> (error, tolerance)

    def check_outputs(self) -> None:
        """``v = 1`` alone: one forward."""
        ones = {
            name: torch.ones_like(x) if name.startswith("v_") else x
            for name, x in self._inputs.items()
        }
        if any(not self._is_linear(branch) for branch in self._branches):
            return  # a learned phi does not map ones to ones
        with torch.no_grad():
            o = self._own(ones).float()
        seen = [self._gate(branch) * self._sees(branch) for branch in self._branches]
        wanted, size = torch.stack(seen).sum(0), 1.0 + len(seen)
        self._add("v = 1", o - wanted[..., None], torch.tensor(ROUNDINGS * self._eps * size))

    def check_gradients(self, sampled: Tensor, backward: DenseBackward) -> None:
        """The others, of the ``backward`` of the same inputs; ``halves`` cuts its upstream gradient
        at the ``sampled`` rows [R]. Two steps more.
        """
        upstream, whole = backward.upstream, backward.grads
        on_rows = torch.zeros(upstream.shape[1], 1, 1, dtype=torch.bool, device=upstream.device)
        on_rows[sampled.to(upstream.device)] = True
        some, rest = backward.of(upstream * on_rows), backward.of(upstream * ~on_rows)
        for name in whole:
            if name.startswith("phi_"):
                continue
            # an element may cancel, but not a whole head of a token: that is what its terms are of
            size = sum(x[name].float().square().mean().sqrt() for x in (whole, some, rest))
            head = whole[name].float().square().mean(-1, keepdim=True).sqrt()
            tolerance = 4 * ROUNDINGS * self._eps * (whole[name].float().abs() + head + size)
            difference = whole[name].float() - some[name].float() - rest[name].float()
            self._add("halves", difference, tolerance)
        self._check_sums(whole, upstream)

    def _check_sums(self, grads: Tensors, upstream: Tensor) -> None:
        if self._shared:
            self._check_shared_sums(grads, upstream)
            return
        inputs, heads = self._inputs, self._heads
        linear = [branch for branch in self._branches if self._is_linear(branch)]
        for branch in linear:
            v = f"v_{branch}"
            seen = self._gate(branch) * self._sees(branch)
            through = (upstream.double() * seen[..., None]).unflatten(2, heads)  # [B, T, G, H, DV]
            dv, size = grads[v].double(), through.square().sum((1, 3)).sqrt()
            tolerance = ROUNDINGS * self._eps * (size + dv.square().sum(1).sqrt())
            self._add(f"sum d{v}", dv.sum(1) - through.sum((1, 3)), tolerance)
            if "gates" in inputs:
                column = ("cmp", "sel", "win").index(branch)
                gate, dgate = (x["gates"][..., column].double() for x in (inputs, grads))
                terms = (gate * dgate).unflatten(2, heads).flatten(3).transpose(1, 2).flatten(2)
                values = (inputs[v].double() * dv).transpose(1, 2).flatten(2)
                self._balance(f"gates . dg_{branch}", [terms], [values])
            del dv, through
        if len(linear) == len(self._branches):
            qdq = (inputs["q"].double() * grads["q"].double()).unflatten(2, heads)
            mine = qdq.transpose(1, 2).flatten(2)
            others = [
                (inputs[f"k_{b}"].double() * grads[f"k_{b}"].double()).transpose(1, 2).flatten(2)
                for b in self._branches
            ]
            self._balance("q . dq", [mine], others)

    def _check_shared_sums(self, grads: Tensors, upstream: Tensor) -> None:
        """The same of one K and V, whose gradients are sums over the branches."""
        inputs, heads = self._inputs, self._heads
        if not all(self._is_linear(branch) for branch in self._branches):
            return
        seen = torch.stack([self._gate(b) * self._sees(b) for b in self._branches]).sum(0)
        through = (upstream.double() * seen[..., None]).unflatten(2, heads)
        dv, size = grads["v_sel"].double(), through.square().sum((1, 3)).sqrt()
        tolerance = ROUNDINGS * self._eps * (size + dv.square().sum(1).sqrt())
        self._add("sum dv", dv.sum(1) - through.sum((1, 3)), tolerance)

        def by_head(name: str) -> Tensor:
            x = inputs[name].double() * grads[name].double()
            x = x.unflatten(2, heads) if x.shape[2] != heads[0] else x
            return x.transpose(1, 2).flatten(2)

        self._balance("gates . dg", [by_head("gates")], [by_head("v_sel")])
        self._balance("q . dq", [by_head("q")], [by_head("k_sel")])

    def _balance(self, name: str, left: Sequence[Tensor], right: Sequence[Tensor]) -> None:
        """Terms [B, G, n] of both sides have the same sum."""
        size = torch.stack([x.square().sum(-1).sqrt() for x in (*left, *right)]).sum(0)
        sums = [torch.stack([x.sum(-1) for x in side]).sum(0) for side in (left, right)]
        difference = sums[0] - sums[1]
        self._add(name, difference, ROUNDINGS * self._eps * size)

    def _add(self, name: str, difference: Tensor, tolerance: Tensor) -> None:
        """The worst element; NaN never passes."""
        off = (difference.abs() / tolerance.to(difference).clamp(min=1e-30)).nan_to_num(1e9, 1e9)
        worst = int(off.argmax())
        error = float(difference.flatten()[worst].abs().nan_to_num(1e9, 1e9))
        bound = float(tolerance.to(difference).expand_as(difference).flatten()[worst])
        before = self.ratios.get(name)
        if before is None or error * before[1] >= before[0] * bound:
            self.ratios[name] = error, max(bound, 1e-30)

    @property
    def _heads(self) -> tuple[int, int]:
        groups = self._inputs["k_sel" if self._shared else f"k_{self._branches[0]}"].shape[2]
        return groups, self._inputs["q"].shape[2] // groups

    def _is_linear(self, branch: str) -> bool:
        return branch != "cmp" or self._nsa is None or self._nsa.phi == "mean"

    def _gate(self, branch: str) -> Tensor:
        """[B, T, HQ] in fp64."""
        if "gates" not in self._inputs:
            return torch.ones(self._inputs["q"].shape[:3], device=self._inputs["q"].device).double()
        return self._inputs["gates"][..., ("cmp", "sel", "win").index(branch)].double()

    def _sees(self, branch: str) -> Tensor:
        """[T, 1], 1 where the row at that position sees a key."""
        row = torch.arange(self._inputs["q"].shape[1], device=self._inputs["q"].device)
        if branch == "cmp" and self._nsa is not None:
            return (row >= self._nsa.cmp_block - 1)[:, None].double()
        return torch.ones_like(row)[:, None].double()
