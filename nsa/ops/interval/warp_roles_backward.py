"""dK and dV of an interval of keys on Hopper, with a role for each warp group: a warp fetches tiles
of queries and of dO, and two groups differentiate 64 keys each with them.

Letters as in `nsa.ops.interval.tile_loads`; `nsa_interval_backward_kv` computes the same parts on
any card. Written in Gluon, which names the layouts, the barriers and the warps of each role.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from nsa.ops.kernels.common import named_by


@gluon.jit
def _sees(c, where):
    """The first query that sees key c; less than 0 where one before the first query does.

    c < hi of the query at position p, as `nsa_interval_backward_kv` masks: p + 1 - block is at
    least c * stride.
    """
    q0, block, stride = where
    return c * stride + block - 1 - q0


@gluon.jit
def _tiles_of_program(
    c0,
    split,
    per_split,
    T,
    C,
    where,
    width,
    BM: gl.constexpr,
    BANDED: gl.constexpr,
):
    """(the first query, the number of tiles) of one range of queries that keys c0 .. c0 + 127 are
    seen by.
    """
    first = gl.maximum(_sees(c0, where), 0)
    begin = gl.maximum(first // BM * BM, split * per_split)
    stop = gl.minimum(T, (split + 1) * per_split)
    if BANDED:  # the last key is seen by no query from here on
        stop = gl.minimum(stop, _sees(gl.minimum(c0 + 128, C) - 1 + width, where))
    return begin, (gl.maximum(stop - begin, 0) + BM - 1) // BM


@gluon.jit
def _tiles_of_group(c0, begin, num_tiles, C, where, width, BM: gl.constexpr, BANDED: gl.constexpr):
    """(the first tile, one past the last) of those that see any of keys c0 .. c0 + 63."""
    a = gl.minimum(gl.maximum(_sees(c0, where) - begin, 0) // BM, num_tiles)
    z = num_tiles
    if BANDED:
        gone = gl.maximum(_sees(c0 + 63 + width, where) - begin, 0)
        z = gl.minimum(z, (gone + BM - 1) // BM)
    a = gl.where(c0 < C, a, num_tiles)
    return a, gl.maximum(a, z)


@gluon.jit
def _is_masked(t0, c0, where, width, BM: gl.constexpr, BANDED: gl.constexpr):
    """Whether a query of tile t0 does not see one of keys c0 .. c0 + 63."""
    masked = t0 < _sees(c0 + 63, where)
    if BANDED:
        masked = masked | (t0 + BM > _sees(c0 + width, where))
    return masked


@gluon.jit
def _fetch(
    Q,
    DO,
    K,
    V,
    LSE,
    DELTA,
    held,
    begin,
    num_tiles,
    b,
    g,
    head,
    c0,
    T,
    TO,
    HQ: gl.constexpr,
    HP: gl.constexpr,
):
    """K and V of both groups, then tile by tile of Q and dO, with lse and delta of its rows."""
    q_bufs, do_bufs, k_bufs, v_bufs, lse_bufs, delta_bufs, kv_full, full, empty = held
    STAGES: gl.constexpr = q_bufs.type.shape[0]
    BM: gl.constexpr = q_bufs.type.shape[2]
    lay: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    j = gl.arange(0, BM, layout=lay)
    mbarrier.expect(kv_full.index(0), 2 * (K.block_type.nbytes + V.block_type.nbytes))
    for i in gl.static_range(2):
        at = c0 + 64 * i
        tma.async_copy_global_to_shared(K, [b, at, g, 0], kv_full.index(0), k_bufs.index(i))
        tma.async_copy_global_to_shared(V, [b, at, g, 0], kv_full.index(0), v_bufs.index(i))
    turn = 0
    for i in range(HP):
        for tile in range(num_tiles):
            t0 = begin + tile * BM
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, Q.block_type.nbytes + DO.block_type.nbytes)
            tma.async_copy_global_to_shared(Q, [b, t0, head + i, 0], bar, q_bufs.index(stage))
            tma.async_copy_global_to_shared(DO, [b, t0, head + i, 0], bar, do_bufs.index(stage))
            # Rows beyond T are 0 in all four, and add 0: their weight is 1, their dO 0.
            row = (b * TO + t0 + j).to(gl.int64) * HQ + head + i
            live = t0 + j < T
            async_copy.async_copy_global_to_shared(lse_bufs.index(stage), LSE + row, mask=live)
            async_copy.async_copy_global_to_shared(delta_bufs.index(stage), DELTA + row, mask=live)
            async_copy.mbarrier_arrive(bar, increment_count=False)  # each thread, when its are done
            turn += 1


@gluon.jit
def _pass(full, empty, turn, count):
    """``count`` tiles that this group has nothing to do with."""
    STAGES: gl.constexpr = full.type.shape[0]
    for i in range(count):
        at = turn + i
        mbarrier.wait(full.index(at % STAGES), (at // STAGES) & 1)
        mbarrier.arrive(empty.index(at % STAGES), count=1)


@gluon.jit
def _differentiate(
    DK,
    DV,
    held,
    begin,
    num_tiles,
    slot,
    g,
    c0,
    C,
    where,
    width,
    scale,
    scale_log2,
    WHICH: gl.constexpr,
    G: gl.constexpr,
    HP: gl.constexpr,
    BANDED: gl.constexpr,
):
    """dK and dV of keys c0 + 64 WHICH .. + 63. Keys are rows, so that weights and their gradients
    go from registers into the next product.
    """
    q_bufs, do_bufs, k_bufs, v_bufs, lse_bufs, delta_bufs, kv_full, full, empty = held
    STAGES: gl.constexpr = q_bufs.type.shape[0]
    BM: gl.constexpr = q_bufs.type.shape[2]
    D: gl.constexpr = q_bufs.type.shape[4]
    dtype: gl.constexpr = q_bufs.dtype
    s_lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    kv_lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_lay: gl.constexpr = gl.DotOperandLayout(0, kv_lay, 2)
    t_lay: gl.constexpr = gl.SliceLayout(0, s_lay)
    own = c0 + 64 * WHICH
    sees = _sees(own + gl.arange(0, 64, layout=gl.SliceLayout(1, s_lay)), where)
    t = gl.arange(0, BM, layout=t_lay)
    a, z = _tiles_of_group(own, begin, num_tiles, C, where, width, BM, BANDED)
    zero = gl.zeros([64, BM], gl.float32, s_lay)
    dk = gl.zeros([64, D], gl.float32, kv_lay)
    dv = gl.zeros([64, D], gl.float32, kv_lay)
    k = k_bufs.index(WHICH).reshape([64, D])
    v = v_bufs.index(WHICH).reshape([64, D])
    mbarrier.wait(kv_full.index(0), 0)
    turn = 0
    for _ in range(HP):
        _pass(full, empty, turn, a)
        turn += a
        for tile in range(a, z):
            stage = turn % STAGES
            q = q_bufs.index(stage).reshape([BM, D])
            do = do_bufs.index(stage).reshape([BM, D])
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
            dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s])
            lse = lse_bufs.index(stage).load(t_lay)
            p = gl.exp2(s * scale_log2 - lse[None, :])
            t0 = begin + tile * BM
            if _is_masked(t0, own, where, width, BM, BANDED):
                seen = t0 + t[None, :] >= sees[:, None]
                if BANDED:
                    seen = seen & (t0 + t[None, :] < sees[:, None] + width * where[2])
                p = gl.where(seen, p, 0.0)
            dv = warpgroup_mma(gl.convert_layout(p.to(dtype), p_lay), do, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=[dp])
            delta = delta_bufs.index(stage).load(t_lay)
            ds = gl.convert_layout((p * (dp - delta[None, :])).to(dtype), p_lay)
            dk = warpgroup_mma(ds, q, dk, is_async=True)
            # Products that go on into the next turn would be serialised: ptxas says C7512.
            dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
            mbarrier.arrive(empty.index(stage), count=1)
            turn += 1
        _pass(full, empty, turn, num_tiles - z)
        turn += num_tiles - z
    c = own + gl.arange(0, 64, layout=gl.SliceLayout(1, kv_lay))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, kv_lay))
    at = ((slot * C + c).to(gl.int64) * G + g)[:, None] * D + d[None, :]
    gl.store(DK + at, (dk * scale).to(DK.dtype.element_ty), mask=(c < C)[:, None])
    gl.store(DV + at, dv.to(DV.dtype.element_ty), mask=(c < C)[:, None])


@gluon.jit(repr=named_by("nsa_interval_backward_kv_roles", {"BANDED": "_band"}))
def nsa_interval_backward_kv_roles(
    Q,
    DO,
    K,
    V,
    LSE,
    DELTA,
    DK,
    DV,
    T,
    TO,
    C,
    q0,
    block,
    stride,
    width,
    per_split,
    num_splits,
    scale,
    scale_log2,
    G: gl.constexpr,
    H: gl.constexpr,
    HP: gl.constexpr,
    D: gl.constexpr,
    BM: gl.constexpr,
    STAGES: gl.constexpr,
    BANDED: gl.constexpr,
    REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
):
    """128 keys, HP query heads and one range of queries a program; its grid and the parts
    that it stores are `nsa_interval_backward_kv`'s.
    """
    dtype: gl.constexpr = Q.dtype
    row_lay: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    per_tile: gl.constexpr = G * (H // HP)
    folds = gl.num_programs(0) // per_tile
    heads_at = gl.program_id(0) % per_tile
    part = heads_at // G  # of the heads of g
    g = heads_at % G
    head = g * H + part * HP
    split = gl.program_id(1) % num_splits
    b = gl.program_id(1) // num_splits
    batches = gl.num_programs(1) // num_splits
    c0 = (gl.program_id(2) * folds + gl.program_id(0) // per_tile) * 128
    where = (q0, block, stride)
    begin, num_tiles = _tiles_of_program(c0, split, per_split, T, C, where, width, BM, BANDED)
    slot = ((split * (H // HP) + part) * batches + b).to(gl.int64)
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, BM, 1, D], Q.layout)
    do_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, BM, 1, D], DO.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, D], K.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [2, 1, 64, 1, D], V.layout)
    lse_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BM], row_lay)
    delta_bufs = gl.allocate_shared_memory(gl.float32, [STAGES, BM], row_lay)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + 32)  # bytes expected, and threads that fetch rows
        mbarrier.init(empty.index(i), count=2)  # groups
    held = (q_bufs, do_bufs, k_bufs, v_bufs, lse_bufs, delta_bufs, kv_full, full, empty)
    gl.warp_specialize(
        [
            (_differentiate, (DK, DV, held, begin, num_tiles, slot, g, c0, C, where, width,
                scale, scale_log2, 0, G, HP, BANDED)),
            (_differentiate, (DK, DV, held, begin, num_tiles, slot, g, c0, C, where, width,
                scale, scale_log2, 1, G, HP, BANDED)),
            (_fetch, (Q, DO, K, V, LSE, DELTA, held, begin, num_tiles, b, g, head, c0, T, TO,
                G * H, HP)),
        ],
        [4, 1],
        [REGISTERS, FETCH_REGISTERS],
    )  # fmt: skip
