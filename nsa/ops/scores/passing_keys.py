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
def _registers(BC):
    """Bases of [BM, 4, BC / 16] in a thread's registers; BM is 16 rows a warp."""
    return [[0, 0, 1 << i] for i in range((BC // 16).bit_length() - 1)] + [[8, 0, 0]]


@gluon.constexpr_function
def _warps(WARPS):
    return [[16 << i, 0, 0] for i in range(WARPS.bit_length() - 1)]


@gluon.jit
def _key_of_column(x, BC: gl.constexpr):
    """Which key of a tile is in column x: such that the columns that a thread holds of a product
    (8 i + 2 q + e of thread q of 4) are neighbours.
    """
    return (x // 2 % 4) * (BC // 4) + x // 8 * 2 + x % 2


@gluon.jit
def _fetch(K, buf, tile, C, sk_c, BC: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr):
    lay: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    x = gl.arange(0, BC, layout=gl.SliceLayout(1, lay))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, lay))
    c = tile * BC + _key_of_column(x, BC)
    at = c.to(gl.int64)[:, None] * sk_c + d[None, :]
    async_copy.async_copy_global_to_shared(buf, K + at, mask=(c < C)[:, None])
    async_copy.commit_group()


@gluon.jit
def _add(p, s, lse, scale_log2):
    return p + gl.exp2(s * scale_log2 - lse[:, None])


@gluon.jit
def _shifted(edge, before, lay: gl.constexpr):
    """Of edges [BM, 4, n], each block's from the one before it; ``before`` [BM, 4]: of those of the
    tile before. Returns it, and what is ``before`` for the next tile.
    """
    BM: gl.constexpr = edge.shape[0]
    n: gl.constexpr = edge.shape[2]
    even, odd = gl.split(edge.reshape([BM, 4, n // 2, 2]))
    if n == 8:
        e04, e26 = gl.split(even.reshape([BM, 4, 2, 2]))
        e15, e37 = gl.split(odd.reshape([BM, 4, 2, 2]))
        e0, e4 = _pair(e04, lay)
        e2, e6 = _pair(e26, lay)
        e1, e5 = _pair(e15, lay)
        e3, e7 = _pair(e37, lay)
        first, rest = _across(e7, before, lay)
        even = gl.join(gl.join(first, e3), gl.join(e1, e5)).reshape([BM, 4, 4])
        odd = gl.join(gl.join(e0, e4), gl.join(e2, e6)).reshape([BM, 4, 4])
    else:
        gl.static_assert(n == 4)
        e0, e2 = _pair(even, lay)
        e1, e3 = _pair(odd, lay)
        first, rest = _across(e3, before, lay)
        even = gl.join(first, e1)
        odd = gl.join(e0, e2)
    return gl.convert_layout(gl.join(even, odd).reshape([BM, 4, n]), lay), rest


@gluon.jit
def _pair(x, lay: gl.constexpr):
    a, b = gl.split(x)
    four: gl.constexpr = gl.SliceLayout(2, lay)
    return gl.convert_layout(a, four), gl.convert_layout(b, four)


@gluon.jit
def _across(last, before, lay: gl.constexpr):
    """The last edge of each of the 4 threads of a row moved on by one; the first gets the tile
    before's.
    """
    four: gl.constexpr = gl.SliceLayout(2, lay)
    q = gl.arange(0, 4, layout=gl.SliceLayout(0, four))
    m = gl.arange(0, last.shape[0], layout=gl.SliceLayout(1, four))
    moved = gl.gather(last, ((q + 3) % 4)[None, :] + (m * 0)[:, None], 1)
    return gl.where((q == 0)[None, :], before, moved), moved


@gluon.jit
def nsa_scores_roles(
    Q,
    K,
    LSE,
    SCORE,
    b0,
    t0,
    n,
    T,
    C,
    q0,
    block,
    stride,
    J,
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
    WARPS: gl.constexpr,
):
    """Scores [rows, G, J] of queries t0 .. t0 + n - 1 of some b, of every block that a visible
    compressed block begins in.
    """
    gl.static_assert(H % 2 == 0)
    dtype: gl.constexpr = Q.dtype.element_ty
    row0 = (gl.num_programs(0) - 1 - gl.program_id(0)) * BM  # the longest first
    g = (gl.program_id(1) % G).to(gl.int64)
    batch = gl.program_id(1) // G
    b = (b0 + batch).to(gl.int64)
    q_lay: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, D], dtype)
    k_lay: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BC, D], dtype)
    s_lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BC, 16])
    row_lay: gl.constexpr = gl.SliceLayout(1, s_lay)
    in_lay: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    q_bufs = gl.allocate_shared_memory(dtype, [H, BM, D], q_lay)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, BC, D], k_lay)
    lse_bufs = gl.allocate_shared_memory(gl.float32, [H, BM], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    K += b * sk_b + g * sk_g

    in_m = row0 + gl.arange(0, BM, layout=gl.SliceLayout(1, in_lay))
    in_d = gl.arange(0, D, layout=gl.SliceLayout(0, in_lay))
    in_at = (t0 + in_m).to(gl.int64)[:, None] * sq_t + in_d[None, :]
    Q += b * sq_b + g * H * sq_h
    for h in gl.static_range(H):
        async_copy.async_copy_global_to_shared(
            q_bufs.index(h), Q + h * sq_h + in_at, mask=(in_m < n)[:, None]
        )
    async_copy.commit_group()

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
        key = _key_of_column(gl.arange(0, BC, layout=gl.SliceLayout(0, s_lay)), BC)
        # a thread's blocks of a row are neighbours
        out_lay: gl.constexpr = gl.DistributedLinearLayout(
            _registers(BC), [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
            _warps(WARPS), [], [BM, 4, BC // 16],
        )  # fmt: skip
        out_m = row0 + gl.arange(0, BM, layout=gl.SliceLayout(1, gl.SliceLayout(2, out_lay)))
        out_q = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(2, out_lay)))
        out_i = gl.arange(0, BC // 16, layout=gl.SliceLayout(0, gl.SliceLayout(1, out_lay)))
        out_at = ((batch * n + out_m).to(gl.int64) * G + g)[:, None, None] * J
        out_at = out_at + (out_q * (BC // 16))[None, :, None] + out_i[None, None, :]
        out_live = (out_m < n)[:, None, None]
        for i in gl.static_range(STAGES - 1):
            _fetch(K, k_bufs.index(i), i, C, sk_c, BC, D, WARPS)
        zero = gl.zeros([BM, BC], gl.float32, s_lay)
        before = gl.zeros([BM, 4], gl.float32, gl.SliceLayout(2, out_lay))
        for tile in range(num_tiles):
            async_copy.wait_group(STAGES - 2)
            fence_async_shared()
            # all warps are past the tile before, whose buffer is free
            ahead = tile + STAGES - 1
            _fetch(K, k_bufs.index(ahead % STAGES), ahead, C, sk_c, BC, D, WARPS)
            k = k_bufs.index(tile % STAGES).permute((1, 0))
            p = gl.zeros([BM, BC], gl.float32, s_lay)
            s = warpgroup_mma(q_bufs.index(0), k, zero, use_acc=False, is_async=True)
            # one head's product is computed while the one before is added
            for h in gl.static_range(0, H, 2):
                odd = warpgroup_mma(q_bufs.index(h + 1), k, zero, use_acc=False, is_async=True)
                p = _add(
                    p, warpgroup_mma_wait(1, deps=[s]), lse_bufs.index(h).load(row_lay), scale_log2
                )
                if h + 2 < H:
                    s = warpgroup_mma(q_bufs.index(h + 2), k, zero, use_acc=False, is_async=True)
                    odd = warpgroup_mma_wait(1, deps=[odd])
                else:
                    odd = warpgroup_mma_wait(0, deps=[odd])
                p = _add(p, odd, lse_bufs.index(h + 1).load(row_lay), scale_log2)
            if (tile + 1) * BC > full:
                p = gl.where((tile * BC + key)[None, :] < hi[:, None], p, 0.0)
            score, edge = _sums(p, BC)
            moved, before = _shifted(edge, before, out_lay)
            score = gl.convert_layout(score, out_lay) + moved
            score = gl.minimum(gl.maximum(score, 0.0), 1e38)  # NaN as 0
            gl.store(SCORE + out_at + tile * (BC // 4), score, mask=out_live)
        async_copy.wait_group(0)


@gluon.jit
def _sums(p, BC: gl.constexpr):
    """(of each selection block, the sum of what begins in it, times the sub-chunks shared; what
    its last one adds to the next), of columns in the order of `_key_of_column`: [BM, 4, BC / 16].
    """
    x = p.reshape([p.shape[0], BC // 16, 2, 4, 2]).permute((0, 3, 1, 2, 4))
    even, odd = gl.split(x)
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    return 2.0 * (x0 + x1 + x2) + x3, x3
