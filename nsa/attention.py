"""NSA as a layer: the equations of the paper in order, whatever implements them.

B batch, T tokens, M model dim, Q query heads, G kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nsa import checks, fused_step
from nsa.branches import Call, attend_view, nothing, reaching
from nsa.compression import Phi
from nsa.config import BRANCHES, NSAConfig, check_heads
from nsa.decode import KV, NSACache, Step, View, check_cache, one_step, replay_of
from nsa.documents import Documents
from nsa.functional import compress_kv, route_for, takes_means_itself
from nsa.gate import NoGate, SigmoidGate, SoftmaxGate
from nsa.ops.precision import autocast_dtype
from nsa.ops.selected import gathered_rows
from nsa.padding import call_padded
from nsa.rope import rotate
from nsa.routing import Path, Request, Route, extras_of, with_one_step
from nsa.shared_positions import Layout


class NSAAttention(nn.Module):
    """Native sparse attention (arXiv 2502.11089, Eq. 5): x [B, T, M] -> y [B, T, M], causal;
    training, prefill and decode.

    One query projection; each branch has its own projections of K and V, unless config.share_kv.
    ``path`` and ``fa2`` are requests as in ``nsa.routing``; ``auto`` takes the fastest that the
    device supports. config.sinks adds the parameter ``sinks`` [num_heads, 3], 0 at first. Raises
    ValueError for heads that do not form whole groups, RouteError for a request that cannot be
    served.
    """

    sinks: nn.Parameter | None

    def __init__(
        self,
        dim: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        config: NSAConfig = NSAConfig(),
        path: str = "auto",
        fa2: str = "auto",
    ) -> None:
        super().__init__()
        checks.config(config)
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        check_heads(num_heads, num_kv_heads, head_dim, v_head_dim)
        Request(path, fa2)  # an unknown name fails here, not in the first forward
        self.config, self.path, self.fa2 = config, path, fa2
        self.dim = dim
        self.num_heads, self.num_kv_heads, self.head_dim, self.v_head_dim = (
            num_heads,
            num_kv_heads,
            head_dim,
            v_head_dim,
        )
        self.num_kv = 1 if config.share_kv else len(BRANCHES)
        self.q_proj = nn.Linear(dim, num_heads * head_dim, bias=False)
        self.k_proj = nn.Linear(dim, self.num_kv * num_kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(dim, self.num_kv * num_kv_heads * v_head_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * v_head_dim, dim, bias=False)
        self.phi_k, self.phi_v = Phi(config, head_dim), Phi(config, v_head_dim)
        if config.qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(head_dim), nn.RMSNorm(head_dim)
        self.register_parameter(
            "sinks", nn.Parameter(torch.empty(num_heads, len(BRANCHES))) if config.sinks else None
        )
        self.reset_parameters()
        if config.gate == "sigmoid":
            self.gate: nn.Module = SigmoidGate(dim, num_heads)
        elif config.gate == "none":
            self.gate = NoGate()
        else:
            self.gate = SoftmaxGate(
                num_kv_heads,
                head_dim,
                temperature=config.gate_temperature,
                branches=config.branches,
            )

    def reset_parameters(self) -> None:
        """Sinks of 0, where there are any; submodules have their own."""
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(
        self,
        x_BTM: Tensor,
        *,
        cache: NSACache | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        num_tokens: Sequence[int] | Tensor | None = None,
        attention_mask: Tensor | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        """x [B, T, M] -> y [B, T, M]. At most one of ``cache`` and ``cu_seqlens``.

        With a ``cache`` the chunk continues each row's sequence (decode is a chunk of 1). Row b
        takes its first ``num_tokens[b]`` tokens only (int64 [B], too, without a cache), and y of
        the others is 0. A cache that steps
        (`nsa.decode.Steps`) takes chunks of 1. ``cu_seqlens`` int [N + 1] packs N documents into
        B = 1; y beyond the last is 0.
        ``attention_mask`` [B, T] (bool, or 0 and 1) says which of the tokens exist, instead of
        num_tokens and cu_seqlens: padding may lie anywhere, counts as no position, and has y = 0.
        With a cache the host waits for its counts.
        ``layout`` is the Layout of the same arguments, where layers share one. y has x's dtype,
        which is the weights' (or any floating one under autocast, whose dtype y then has).
        ValueError for an x that does not fit the weights, a cache of another config, batch, dtype
        or device, or one given while gradients are recorded.
        """
        checks.states(x_BTM, self.dim, checks.plain_weight(self.q_proj))
        if cache is not None:
            check_cache(cache, self.config)
        if attention_mask is not None:
            checks.mask_alone(cu_seqlens=cu_seqlens, num_tokens=num_tokens, layout=layout)
            return call_padded(self, x_BTM, attention_mask, cache=cache)
        replay = replay_of(cache, self)
        if replay is not None and cu_seqlens is None:
            return replay.step(x_BTM, cache, num_tokens)
        if layout is None:
            layout = self.layout(
                x_BTM, dtype=x_BTM.dtype, cache=cache, cu_seqlens=cu_seqlens, num_tokens=num_tokens
            )
        else:
            layout.check(
                x_BTM,
                packed=cu_seqlens is not None,
                some_absent=cu_seqlens is not None or num_tokens is not None,
            )
        absent = layout.absent_BT1
        # contents of absent tokens, NaN included, must not reach a weight's gradient
        if absent is not None:
            x_BTM = x_BTM.masked_fill(absent, 0)
        q, k, v = self._project(x_BTM)
        given = cache is not None and num_tokens is not None
        counts = checks.counts("num_tokens", num_tokens) if given else None
        if cache is not None and self._may_step(x_BTM, cache, counts):
            route = self.route_of_step(x_BTM, cache)
            if fused_step.serves(route, self.config, cache, layout, q, k, v, x_BTM):
                checks.no_gradient(q, k, v, *self.gate.parameters())
                kv, gate = (q, k, v), (self.gate, x_BTM)
                o = fused_step.attend(route, cache, layout, kv, gate, counts)
                y = self.o_proj(o.flatten(2))
                return y if absent is None else y.masked_fill(absent, 0)
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        gates = self.gate(x_BTM, q)

        q, k, v, gates = (layout.rows(t) for t in (q, k, v, gates))
        q, k_rotated = (rotate(t, layout.turns, kind=self.config.rope) for t in (q, k))
        k_cmp = k_rotated if self.config.rotates_before_compression else k
        kv_cmp, kv_sel, kv_win = zip(
            self._per_branch(k_cmp, k_rotated), self._per_branch(v, v), strict=True
        )
        checks.qkv(q, *kv_sel, q_start=0)
        if cache is None and q.shape[0] == 0:
            learned = [*self.phi_k.parameters(), *self.phi_v.parameters()]
            learned += [] if self.sinks is None else [self.sinks]
            o = nothing(q, k_cmp, k_rotated, v, gates, *learned, dim=self.v_head_dim)
            return self.o_proj(o.flatten(2))
        is_whole_sequence = cache is None and layout.packing is None
        takes_means = False
        if cache is None:
            route = self._route(q, q.shape[1], whole=is_whole_sequence)
            takes_means = takes_means_itself(
                route, self.config, *kv_cmp, documents=layout.documents
            )
            view = self._view_of_tokens(kv_cmp, kv_sel, kv_win, layout, route, takes_means)
        else:
            checks.no_gradient(q, k, v, gates)
            view = cache.append(
                kv_cmp,
                kv_sel,
                kv_win,
                compress=self._compress,
                num_tokens=counts,
                step=layout.step if isinstance(layout.step, Step) else None,
            )
            route = self._route(q, view.num_keys, q_start=view.q_start)
        call = Call(
            route,
            self.config,
            self.head_dim**-0.5,
            documents=layout.documents,
            present=layout.present_BR,
            is_whole_sequence=is_whole_sequence,
            nonnegative_gates=True,
            sinks=self.sinks,
            takes_means=takes_means,
        )
        keys_read = None if cache is None else cache.keys_read
        o = attend_view(q, gates, view, call, keys_read=keys_read)
        if "cmp" not in self.config.branches and torch.is_grad_enabled():
            # the choice of blocks has no gradient, and DDP waits for one of each parameter
            o = reaching(o, self.phi_k.parameters(), self.phi_v.parameters())
        y = self.o_proj(layout.tokens(o).flatten(2))
        return y if absent is None else y.masked_fill(absent, 0)

    def _project(self, x_BTM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, HQ, DK], and k and v of all branches that have their own."""
        q, k, v = self.q_proj(x_BTM), self.k_proj(x_BTM), self.v_proj(x_BTM)
        kv_heads = self.num_kv * self.num_kv_heads
        checks.projected("q_proj", q, self.num_heads, self.head_dim)
        checks.projected("k_proj", k, kv_heads, self.head_dim)
        checks.projected("v_proj", v, kv_heads, self.v_head_dim)
        return (
            q.unflatten(-1, (self.num_heads, self.head_dim)),
            k.unflatten(-1, (-1, self.head_dim)),
            v.unflatten(-1, (-1, self.v_head_dim)),
        )

    def _may_step(self, x: Tensor, cache: NSACache, num_tokens: Sequence[int] | None) -> bool:
        """Whether to look if one operator serves the chunk: neither its cache nor the layer is
        against it.
        """
        return (
            not torch.compiler.is_compiling()
            and self.sinks is None
            and not one_step.against(cache, x.shape[1])
            and (num_tokens is None or cache.steps is None)
        )

    def route_of_step(self, x_BTM: Tensor, cache: NSACache) -> Route:
        """The Route of x [B, T, M] with a cache of rows of max_len tokens; it says why no one
        operator serves the step, where none does.
        """
        # a shape, no memory
        q = cache.sel[0][:, :1, :1].expand(-1, x_BTM.shape[1], self.num_heads, -1)
        route = self._route(q, cache.max_len, q_start=one_step.position_of(cache))
        return with_one_step(route, self.config, one_step.against(cache, x_BTM.shape[1]))

    def layout(self, x: Tensor, **options: Any) -> Layout:
        """The Layout of x [B, T, ...], for this layer and others of its config and head dim;
        ``options`` as in `Layout.of`.
        """
        return Layout.of(x, self.config, self.head_dim, **options)

    def new_cache(
        self,
        batch: int,
        max_len: int,
        *,
        initial_len: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> NSACache:
        """An empty NSACache of this layer's heads, dtype (autocast's where it is on; or
        ``dtype``) and device.
        """
        own_dtype, device = self._compute_kind()
        return NSACache.empty(
            self.config,
            batch,
            max_len,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            initial_len=initial_len,
            dtype=dtype or autocast_dtype(device) or own_dtype,
            device=device,
        )

    def reserve(
        self, batch: int, tokens: int, *, dtype: torch.dtype | None = None, backward: bool = True
    ) -> int:
        """Bytes that path v2 packs in a call of this size (0 where another path serves it), held by
        the allocator from now on.

        For the device of the weights, the current stream, and ``dtype`` (theirs by default). Layers
        share no buffers: a layer returns its buffers to the allocator at the end of its call, so
        one layer's reservation serves all layers of that size.
        """
        own_dtype, device = self._compute_kind()
        # a shape, no memory
        q = torch.empty(1, dtype=dtype or own_dtype, device=device).expand(
            batch, tokens, self.num_heads, self.head_dim
        )
        route = self._route(q, tokens, whole=True)
        if "sel" not in self.config.branches or route.branch("sel").implementation != Path.V2:
            return 0
        shape = gathered_rows.GatherShape(
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            num_selected=self.config.num_selected_for(tokens),
            sel_block=self.config.sel_block,
            dtype=q.dtype,
        )
        needed = gathered_rows.workspace_bytes(batch, tokens, shape, backward=backward)
        gathered_rows.reserve(needed, device)
        return needed

    def _compute_kind(self) -> tuple[torch.dtype, torch.device]:
        """dtype and device of K and V: the projection's, or the layer's where that was replaced."""
        weight = checks.plain_weight(self.k_proj)
        return checks.compute_kind(self) if weight is None else (weight.dtype, weight.device)

    def _route(
        self, q: Tensor, tokens: int, *, q_start: int | Tensor = 0, whole: bool = False
    ) -> Route:
        """The Route of a call with these queries over ``tokens`` keys; ``whole`` as in
        `nsa.routing.Problem`.
        """
        return route_for(
            q,
            self.num_kv_heads,
            self.v_head_dim,
            tokens,
            branches=self.config.branches,
            q_start=q_start,
            path=self.path,
            fa2=self.fa2,
            config=self.config,
            whole=whole,
            extras=extras_of(self.config),
        )

    def _compress(
        self,
        k: Tensor,
        v: Tensor,
        first_block: Tensor | None = None,
        documents: Documents | None = None,
        route: Route | None = None,
    ) -> KV:
        phi_params = (self.phi_k.params(), self.phi_v.params())
        return compress_kv(
            k,
            v,
            first_block,
            config=self.config,
            phi_params=phi_params,
            documents=documents,
            route=route,
        )

    def _view_of_tokens(
        self, kv_cmp: KV, kv_sel: KV, kv_win: KV, layout: Layout, route: Route, takes_means: bool
    ) -> View:
        """Whole sequences from position 0, or packed documents: without a cache, the tokens of the
        call are all there is.
        """
        if not takes_means and self.config.branches != (
            "win",
        ):  # compressed keys serve the selection, too
            kv_cmp = self._compress(*kv_cmp, documents=layout.documents, route=route)
        return View(cmp=kv_cmp, sel=kv_sel, win=kv_win, q_start=0, win_start=0)

    def _per_branch(self, cmp_BTND: Tensor, rest_BTND: Tensor) -> list[Tensor]:
        """Slices [B, T, G, D] for cmp, sel and win; the same one thrice where K and V are
        shared.
        """
        if self.num_kv == 1:
            return [cmp_BTND, rest_BTND, rest_BTND]
        # split, not slices: its backward is one concatenation instead of three zero-filled copies;
        # and once, since of two splits of one tensor the gradients are two tensors and their sum
        cmp, sel, win = rest_BTND.split(self.num_kv_heads, dim=2)
        if cmp_BTND is not rest_BTND:
            cmp = cmp_BTND.split(self.num_kv_heads, dim=2)[0]
        return [cmp, sel, win]
