"""Block scores on Hopper: a tile of queries keeps all heads of its group in shared memory while the
compressed keys pass, so that a score is complete where it is computed.

Letters as in ``nsa.ops.scores.kernels``; R = 4 compressed blocks begin within a selection
block, and each overlaps the next (W = 2). Written in Gluon, which names the layouts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.constexpr_function
def _registers(NB):
    """Bases of [BM, quads, NB] in a thread's registers: of two rows, NB blocks each."""
    return [[0, 0, 1 << i] for i in range(NB.bit_length() - 1)] + [[8, 0, 0]]


@gluon.constexpr_function
def _warps(BM, ACROSS):
    """And of its warps: down the rows, then across the keys."""
    down = [[16 << i, 0, 0] for i in range((BM // 16).bit_length() - 1)]
    return down + [[0, 4 << i, 0] for i in range(ACROSS.bit_length() - 1)]


@gluon.jit
def _key_of_column(x, BC: gl.constexpr, ACROSS: gl.constexpr):
    """Which key of a tile is in column x: such that the columns that a thread holds of a product
    (8 i + 2 q + e of thread q of 4, in the columns of its warp) are neighbours.
    """
    w: gl.constexpr = BC // ACROSS
    return x // w * w + (x // 2 % 4) * (w // 4) + x % w // 8 * 2 + x % 2


@gluon.jit
def _fetch(
    K,
    buf,
    tile,
    C,
    sk_c,
    BC: gl.constexpr,
    D: gl.constexpr,
    WARPS: gl.constexpr,
    ACROSS: gl.constexpr,
):
    lay: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    x = gl.arange(0, BC, layout=gl.SliceLayout(1, lay))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, lay))
    c = tile * BC + _key_of_column(x, BC, ACROSS)
    at = c.to(gl.int64)[:, None] * sk_c + d[None, :]
    async_copy.async_copy_global_to_shared(buf, K + at, mask=(c < C)[:, None])


@gluon.jit
def _add(p, s, lse, scale_log2):
    return p + gl.exp2(s * scale_log2 - lse[:, None])


@gluon.jit
def _shifted(edge, before, lay: gl.constexpr):
    """Of edges [BM, quads, n], each block's from the one before it; ``before`` [BM, quads]: of
    those of the tile before. Returns it, and what is ``before`` for the next tile.
    """
    BM: gl.constexpr = edge.shape[0]
    quads: gl.constexpr = edge.shape[1]
    n: gl.constexpr = edge.shape[2]
    even, odd = gl.split(edge.reshape([BM, quads, n // 2, 2]))
    if n == 8:
        e04, e26 = gl.split(even.reshape([BM, quads, 2, 2]))
        e15, e37 = gl.split(odd.reshape([BM, quads, 2, 2]))
        e0, e4 = _pair(e04, lay)
        e2, e6 = _pair(e26, lay)
        e1, e5 = _pair(e15, lay)
        e3, e7 = _pair(e37, lay)
        first, rest = _moved(e7, before, lay)
        even = gl.join(gl.join(first, e3), gl.join(e1, e5)).reshape([BM, quads, 4])
        odd = gl.join(gl.join(e0, e4), gl.join(e2, e6)).reshape([BM, quads, 4])
    else:
        gl.static_assert(n == 4)
        e0, e2 = _pair(even, lay)
        e1, e3 = _pair(odd, lay)
        first, rest = _moved(e3, before, lay)
        even = gl.join(first, e1)
        odd = gl.join(e0, e2)
    return gl.convert_layout(gl.join(even, odd).reshape([BM, quads, n]), lay), rest


@gluon.jit
def _pair(x, lay: gl.constexpr):
    a, b = gl.split(x)
    of_quad: gl.constexpr = gl.SliceLayout(2, lay)
    return gl.convert_layout(a, of_quad), gl.convert_layout(b, of_quad)


@gluon.jit
def _moved(last, before, lay: gl.constexpr):
    """The last edge of each thread of a row moved on by one; the first gets the tile before's."""
    of_quad: gl.constexpr = gl.SliceLayout(2, lay)
    quads: gl.constexpr = last.shape[1]
    q = gl.arange(0, quads, layout=gl.SliceLayout(0, of_quad))
    m = gl.arange(0, last.shape[0], layout=gl.SliceLayout(1, of_quad))
    moved = gl.gather(last, ((q + quads - 1) % quads)[None, :] + (m * 0)[:, None], 1)
    return gl.where((q == 0)[None, :], before, moved), moved


@gluon.jit
def _sums(p, ACROSS: gl.constexpr):
    """(of each selection block, the sum of what begins in it, times the sub-chunks shared; what
    its last one adds to the next), of columns in the order of `_key_of_column`.
    """
    BM: gl.constexpr = p.shape[0]
    n: gl.constexpr = p.shape[1] // ACROSS // 16
    x = p.reshape([BM, ACROSS, n, 2, 4, 2]).permute((0, 1, 4, 2, 3, 5))
    even, odd = gl.split(x.reshape([BM, ACROSS * 4, n, 2, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return 2.0 * (x0 + x1 + x2) + x3, x3


@gluon.jit
def _fetch_queries(Q, buf, at, live):
    async_copy.async_copy_global_to_shared(buf, Q + at, mask=live)


@gluon.jit
def _step(
    Q,
    K,
    q_bufs,
    k_bufs,
    at,
    live,
    sq_h,
    tile,
    C,
    sk_c,
    h: gl.constexpr,
    H: gl.constexpr,
    BC: gl.constexpr,
    D: gl.constexpr,
    WARPS: gl.constexpr,
    ACROSS: gl.constexpr,
):
    """Before the product of head h + 1: it has arrived, and all warps are done with head h - 1, in
    whose place another goes; at first with the tile before.
    """
    RING: gl.constexpr = q_bufs.type.shape[0]
    if RING < H:
        if h == 0:
            async_copy.wait_group(RING - 4)
            fence_async_shared()
            _fetch_queries(Q + (RING - 2) * sq_h, q_bufs.index(RING - 2), at, live)
            _fetch(K, k_bufs.index((tile + 1) % 2), tile + 1, C, sk_c, BC, D, WARPS, ACROSS)
            async_copy.commit_group()
            _fetch_queries(Q + (RING - 1) * sq_h, q_bufs.index(RING - 1), at, live)
            async_copy.commit_group()
        else:
            async_copy.wait_group(RING - 3)
            fence_async_shared()
            _fetch_queries(Q + (h - 1 + RING) % H * sq_h, q_bufs.index((h - 1) % RING), at, live)
            async_copy.commit_group()


@gluon.jit
def nsa_scores_roles(
    Q,
    K,
    LSE,
    SCORE,
    MOST,
    b0,
    t0,
    n,
    T,
    C,
    q0,
    block,
    stride,
    J,
    L,
    num_initial,
    num_local,
    sq_b,
    sq_t,
    sq_h,
    sk_b,
    sk_c,
    sk_g,
    scale_log2,
    G: gl.constexpr,
    H: gl.constexpr,
    D: gl.constexpr,
    BM: gl.constexpr,
    BC: gl.constexpr,
    STAGES: gl.constexpr,
    RING: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Scores [rows, G, J] of queries t0 .. t0 + n - 1 of some b, of every block that a visible
    compressed block begins in; and [rows, G, J / NB], of NB neighbours the most of what competes.
    """
    # of fewer heads than all at a time, one is fetched while another is multiplied
    gl.static_assert(H % 2 == 0 and (RING == H or (H % RING == 0 and RING >= 4 and STAGES == 2)))
    ACROSS: gl.constexpr = WARPS * 16 // BM
    dtype: gl.constexpr = Q.dtype.element_ty
    row0 = (gl.num_programs(0) - 1 - gl.program_id(0)) * BM  # the longest first
    g = (gl.program_id(1) % G).to(gl.int64)
    batch = gl.program_id(1) // G
    b = (b0 + batch).to(gl.int64)
    q_lay: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, D], dtype)
    k_lay: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BC, D], dtype)
    s_lay: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS // ACROSS, ACROSS], [16, BC // ACROSS, 16]
    )
    row_lay: gl.constexpr = gl.SliceLayout(1, s_lay)
    in_lay: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    q_bufs = gl.allocate_shared_memory(dtype, [RING, BM, D], q_lay)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BC, D], k_lay)
    lse_bufs = gl.allocate_shared_memory(gl.float32, [H, BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    K += b * sk_b + g * sk_g

    in_m = row0 + gl.arange(0, BM, layout=gl.SliceLayout(1, in_lay))
    in_d = gl.arange(0, D, layout=gl.SliceLayout(0, in_lay))
    in_at = (t0 + in_m).to(gl.int64)[:, None] * sq_t + in_d[None, :]
    Q += b * sq_b + g * H * sq_h
    in_live = (in_m < n)[:, None]

    m = row0 + gl.arange(0, BM, layout=row_lay)
    lse_at = (b * T + t0 + m) * (G * H) + g * H
    for h in gl.static_range(H):
        lse = gl.load(LSE + lse_at + h, mask=m < n, other=float("inf"))
        # a row that sees nothing adds nothing
        lse_bufs.index(h).store(gl.where(lse == float("-inf"), float("inf"), lse))

    last = gl.minimum(row0 + BM, n) - 1 + t0 + q0  # position
    end = gl.minimum(gl.where(last + 1 < block, 0, (last + 1 - block) // stride + 1), C)
    first = row0 + t0 + q0
    full = gl.minimum(gl.where(first + 1 < block, 0, (first + 1 - block) // stride + 1), C)
    num_tiles = (end + BC - 1) // BC
    if num_tiles > 0:
        pos = t0 + m + q0
        hi = gl.minimum(gl.where(pos + 1 < block, 0, (pos + 1 - block) // stride + 1), C)
        key = _key_of_column(gl.arange(0, BC, layout=gl.SliceLayout(0, s_lay)), BC, ACROSS)
        # a thread's blocks of a row are neighbours
        NB: gl.constexpr = BC // ACROSS // 16
        out_lay: gl.constexpr = gl.DistributedLinearLayout(
            _registers(NB), [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            _warps(BM, ACROSS), [], [BM, 4 * ACROSS, NB],
        )  # fmt: skip
        out_m = row0 + gl.arange(0, BM, layout=gl.SliceLayout(1, gl.SliceLayout(2, out_lay)))
        out_q = gl.arange(0, 4 * ACROSS, layout=gl.SliceLayout(0, gl.SliceLayout(2, out_lay)))
        out_i = gl.arange(0, NB, layout=gl.SliceLayout(0, gl.SliceLayout(1, out_lay)))
        out_row = (batch * n + out_m).to(gl.int64) * G + g
        out_j = (out_q * NB)[None, :, None] + out_i[None, None, :]
        out_at = out_row[:, None, None] * J + out_j
        out_live = (out_m < n)[:, None, None]
        # blocks num_initial .. out_last compete for a row
        out_last = ((t0 + out_m + q0) // L - num_local)[:, None, None]
        first_local = (row0 + t0 + q0) // L - num_local + 1
        most_m = row0 + gl.arange(0, BM, layout=gl.SliceLayout(1, gl.SliceLayout(2, out_lay)))
        most_row = (batch * n + most_m).to(gl.int64) * G + g
        most_at = most_row[:, None] * (J // NB) + out_q[None, :]
        most_live = (most_m < n)[:, None]
        _fetch(K, k_bufs.index(0), 0, C, sk_c, BC, D, WARPS, ACROSS)
        for h in gl.static_range(RING if RING == H else RING - 2):
            _fetch_queries(Q + h * sq_h, q_bufs.index(h), in_at, in_live)
            if RING < H:
                async_copy.commit_group()
        if RING == H:
            async_copy.commit_group()
            for i in gl.static_range(1, STAGES - 1):
                _fetch(K, k_bufs.index(i), i, C, sk_c, BC, D, WARPS, ACROSS)
                async_copy.commit_group()
        zero = gl.zeros([BM, BC], gl.float32, s_lay)
        before = gl.zeros([BM, 4 * ACROSS], gl.float32, gl.SliceLayout(2, out_lay))
        for tile in range(num_tiles):
            if RING == H:
                async_copy.wait_group(STAGES - 2)
                fence_async_shared()
                # all warps are past the tile before, whose buffer is free
                ahead = tile + STAGES - 1
                _fetch(K, k_bufs.index(ahead % STAGES), ahead, C, sk_c, BC, D, WARPS, ACROSS)
                async_copy.commit_group()
            else:
                async_copy.wait_group(RING - 3)
                fence_async_shared()
            k = k_bufs.index(tile % STAGES).permute((1, 0))
            p = gl.zeros([BM, BC], gl.float32, s_lay)
            s = warpgroup_mma(q_bufs.index(0), k, zero, use_acc=False, is_async=True)
            # one head's product is computed while the one before is added
            for h in gl.static_range(0, H, 2):
                _step(Q, K, q_bufs, k_bufs, in_at, in_live, sq_h, tile, C, sk_c, h, H, BC, D, WARPS,
                    ACROSS)  # fmt: skip
                odd = warpgroup_mma(
                    q_bufs.index((h + 1) % RING), k, zero, use_acc=False, is_async=True
                )
                p = _add(
                    p, warpgroup_mma_wait(1, deps=[s]), lse_bufs.index(h).load(row_lay), scale_log2
                )
                if h + 2 < H:
                    _step(Q, K, q_bufs, k_bufs, in_at, in_live, sq_h, tile, C, sk_c, h + 1, H, BC,
                        D, WARPS, ACROSS)  # fmt: skip
                    s = warpgroup_mma(
                        q_bufs.index((h + 2) % RING), k, zero, use_acc=False, is_async=True
                    )
                    odd = warpgroup_mma_wait(1, deps=[odd])
                else:
                    odd = warpgroup_mma_wait(0, deps=[odd])
                p = _add(p, odd, lse_bufs.index(h + 1).load(row_lay), scale_log2)
            if (tile + 1) * BC > full:
                p = gl.where((tile * BC + key)[None, :] < hi[:, None], p, 0.0)
            score, edge = _sums(p, ACROSS)
            moved, before = _shifted(edge, before, out_lay)
            score = gl.convert_layout(score, out_lay) + moved
            score = gl.minimum(gl.maximum(score, 0.0), 1e38)  # NaN as 0
            gl.store(SCORE + out_at + tile * (BC // 4), score, mask=out_live)
            if (tile == 0) | ((tile + 1) * (BC // 4) > first_local):
                j = tile * (BC // 4) + out_j
                score = gl.where((j >= num_initial) & (j <= out_last), score, -1.0)
            gl.store(MOST + most_at + tile * (BC // 4 // NB), gl.max(score, 2), mask=most_live)
        async_copy.wait_group(0)
