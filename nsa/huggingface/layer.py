"""What NSA adds to an attention of transformers: its gates, its phi, and the call itself.

B batch, T query tokens, S key tokens, M model dim, H query heads, G kv heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nsa.branches import reaching
from nsa.compression import Phi
from nsa.config import NSAConfig
from nsa.functional import nsa_attention
from nsa.gate import SigmoidGate
from nsa.ops.precision import autocast_dtype
from nsa.padding import Padding

CMP_SHARE = 0.05  # of the compressed branch in a model that was converted


class InterfaceNSA(nn.Module):
    """The gated sum of NSA's branches over one K and V, which the model has projected and rotated.

    A submodule ``nsa`` of each attention, so that what it learns is the model's: trained, saved,
    and wrapped (adapters' ``modules_to_save=["nsa"]``) as any other.
    """

    def __init__(self, config: NSAConfig, dim: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.gate = SigmoidGate(dim, num_heads)
        self.phi_k, self.phi_v = Phi(config, head_dim), Phi(config, head_dim)
        self.reset_gate()

    @torch.no_grad()
    def reset_gate(self) -> None:
        """Gates of sum 1, the same for every token: CMP_SHARE for the compressed branch, equal ones
        for those that read tokens.

        Where selection and window hold every key, each of them is the attention that was there, and
        the compressed branch, which reads means, is not. Weights of 0 learn: their gradient is that
        of the gate times the input.
        """
        branches = self.config.branches
        of_tokens = [name for name in branches if name != "cmp"]
        cmp = CMP_SHARE if of_tokens else 1.0
        rest = (1 - cmp * ("cmp" in branches)) / max(len(of_tokens), 1)
        # a sigmoid never reaches the 1 of a single branch; one that is off is not read
        share = torch.tensor([cmp, rest, rest]).repeat(self.gate.proj.out_features // 3)
        self.gate.proj.weight.zero_()
        self.gate.proj.bias.copy_(torch.logit(share, eps=1e-6))

    def forward(
        self,
        hidden_BTM: Tensor,
        q_BHTD: Tensor,
        k_BGSD: Tensor,
        v_BGSD: Tensor,
        *,
        mask: Tensor | None,
        scale: float | None,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        """o [B, T, H, D] of the last T of the keys that exist.

        ``mask`` bool [B, keys] says which of the first ``keys`` hold a token, [keys] that all do;
        None: all S. ValueError and RouteError as `nsa.nsa_attention`.
        """
        end = k_BGSD.shape[2] if mask is None else mask.shape[-1]
        q, k, v = (x.transpose(1, 2) for x in (q_BHTD, k_BGSD[:, :, :end], v_BGSD[:, :, :end]))
        dtype = autocast_dtype(q.device)
        if dtype is not None:  # RoPE of a model in float32 leaves q and k in it, and v as projected
            q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
        gates = self.gate(hidden_BTM, q)
        before = end - q.shape[1]
        if mask is None or mask.ndim == 1:
            o = self._attend(q, k, v, gates, q_start=before, scale=scale, cu_seqlens=cu_seqlens)
        else:
            keys, rows = Padding.of(mask, k), Padding.of(mask[:, before:], q)
            q, gates, k, v = rows.pack(q), rows.pack(gates), keys.pack(k), keys.pack(v)
            start = mask[:, :before].sum(1) if before else 0
            o = rows.restore(
                self._attend(q, k, v, gates, q_start=start, scale=scale, cu_seqlens=cu_seqlens)
            )
        if "cmp" not in self.config.branches and torch.is_grad_enabled():
            o = reaching(o, self.phi_k.parameters(), self.phi_v.parameters())
        return o

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        gates: Tensor,
        *,
        q_start: int | Tensor,
        scale: float | None,
        cu_seqlens: Tensor | None,
    ) -> Tensor:
        return nsa_attention(
            q,
            (k, v),
            (k, v),
            (k, v),
            gates,
            config=self.config,
            q_start=q_start,
            scale=scale,
            phi_params=(self.phi_k.params(), self.phi_v.params()),
            cu_seqlens=cu_seqlens,
            nonnegative_gates=True,
        )
