"""The forward of an interval of keys on Hopper, with a role for each warp group: a warp fetches
tiles of keys and values, and each group attends with them for the same queries of its own head.

Letters as in `nsa.ops.interval.tile_loads`; `nsa_interval_forward` computes the same on any card.
Written in Gluon, which names the layouts, the barriers and the warps of each role.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _end(pos, block, stride):
    """One past the last key that position ``pos`` sees, of as many as there may be."""
    return gl.where(pos + 1 < block, 0, (pos + 1 - block) // stride + 1)


@gluon.jit
def _fetch(Q, K, V, held, t0, b, head, g, begin, num_tiles, GROUPS: gl.constexpr):
    """Q of all groups, then tile by tile of K and of V, from key ``begin`` on."""
    q_bufs, k_bufs, v_bufs, q_full, k_full, v_full, k_empty, v_empty = held
    STAGES: gl.constexpr = k_bufs.type.shape[0]
    mbarrier.expect(q_full.index(0), GROUPS * Q.block_type.nbytes)
    for i in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(Q, [b, t0, head + i, 0], q_full.index(0), q_bufs.index(i))
    for tile in range(num_tiles):
        stage = tile % STAGES
        parity = ((tile // STAGES) & 1) ^ 1
        c0 = begin + tile * K.block_type.shape[1]
        mbarrier.wait(k_empty.index(stage), parity)
        mbarrier.expect(k_full.index(stage), K.block_type.nbytes)
        tma.async_copy_global_to_shared(K, [b, c0, g, 0], k_full.index(stage), k_bufs.index(stage))
        mbarrier.wait(v_empty.index(stage), parity)
        mbarrier.expect(v_full.index(stage), V.block_type.nbytes)
        tma.async_copy_global_to_shared(V, [b, c0, g, 0], v_full.index(stage), v_bufs.index(stage))


@gluon.jit
def _softmax(
    s,
    m,
    total,
    sees,
    c0,
    all_see,
    scale_log2,
    BC: gl.constexpr,
    s_lay: gl.constexpr,
    BANDED: gl.constexpr,
):
    """(weights, maximum, sum, what the sums so far are worth) with one more tile of products.
    ``sees``: the first key that a query sees, and one past the last; ``all_see``: that every query
    sees.
    """
    lo, hi = sees
    masked = c0 + BC > all_see[1]
    if BANDED:
        masked = masked | (c0 < all_see[0])
    if masked:
        key = c0 + gl.arange(0, BC, layout=gl.SliceLayout(0, s_lay))
        seen = key[None, :] < hi[:, None]
        if BANDED:
            seen = seen & (key[None, :] >= lo[:, None])
        s = gl.where(seen, s, float("-inf"))
    new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    safe = gl.where(new == float("-inf"), 0.0, new)
    p = gl.exp2(s * scale_log2 - safe[:, None])
    a = gl.exp2(m - safe)
    return p, new, total * a + gl.sum(p, 1), a


@gluon.jit
def _attend(
    OUT,
    LSE,
    held,
    t0,
    b,
    head,
    begin,
    num_tiles,
    T,
    TO,
    C,
    where,
    scale_log2,
    WHICH: gl.constexpr,
    HQ: gl.constexpr,
    D: gl.constexpr,
    BC: gl.constexpr,
    GROUPS: gl.constexpr,
    BANDED: gl.constexpr,
):
    q_bufs, k_bufs, v_bufs, q_full, k_full, v_full, k_empty, v_empty = held
    q0, block, stride, width = where
    STAGES: gl.constexpr = k_bufs.type.shape[0]
    dtype: gl.constexpr = k_bufs.dtype
    s_lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BC, 16])
    o_lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_lay: gl.constexpr = gl.DotOperandLayout(0, o_lay, 2)
    row_lay: gl.constexpr = gl.SliceLayout(1, s_lay)
    o_row: gl.constexpr = gl.SliceLayout(1, o_lay)
    out_lay: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    t = t0 + gl.arange(0, 64, layout=row_lay)
    end = _end(gl.minimum(t, T - 1) + q0, block, stride)
    sees = (end - width, gl.minimum(end, C))
    last_end = _end(gl.minimum(t0 + 64, T) - 1 + q0, block, stride)
    all_see = (last_end - width, gl.minimum(_end(t0 + q0, block, stride), C))
    q = q_bufs.index(WHICH).reshape([64, D])
    zero = gl.zeros([64, BC], gl.float32, s_lay)
    acc = gl.zeros([64, D], gl.float32, o_lay)
    m = gl.full([64], float("-inf"), gl.float32, row_lay)
    total = gl.zeros([64], gl.float32, row_lay)
    mbarrier.wait(q_full.index(0), 0)
    mbarrier.wait(k_full.index(0), 0)
    s = warpgroup_mma(
        q, k_bufs.index(0).reshape([BC, D]).permute((1, 0)), zero, use_acc=False, is_async=True
    )
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(0), count=1)
    p, m, total, a = _softmax(s, m, total, sees, begin, all_see, scale_log2, BC, s_lay, BANDED)
    p16 = gl.convert_layout(p.to(dtype), p_lay)
    for tile in range(1, num_tiles):
        stage = tile % STAGES
        before = (tile - 1) % STAGES
        mbarrier.wait(k_full.index(stage), (tile // STAGES) & 1)
        s = warpgroup_mma(
            q,
            k_bufs.index(stage).reshape([BC, D]).permute((1, 0)),
            zero,
            use_acc=False,
            is_async=True,
        )
        mbarrier.wait(v_full.index(before), ((tile - 1) // STAGES) & 1)
        acc = warpgroup_mma(p16, v_bufs.index(before).reshape([BC, D]), acc, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        c0 = begin + tile * BC
        p, m, total, a = _softmax(s, m, total, sees, c0, all_see, scale_log2, BC, s_lay, BANDED)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.convert_layout(a, o_row)[:, None]
        p16 = gl.convert_layout(p.to(dtype), p_lay)
    last = (num_tiles - 1) % STAGES
    mbarrier.wait(v_full.index(last), ((num_tiles - 1) // STAGES) & 1)
    acc = warpgroup_mma(p16, v_bufs.index(last).reshape([BC, D]), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    some = total != 0  # NaN stays NaN
    total = gl.where(some, total, 1.0)
    row = (b * TO + t).to(gl.int64) * HQ + head + WHICH
    gl.store(LSE + row, gl.where(some, m + gl.log2(total), float("-inf")), mask=t < T)
    acc = acc / gl.convert_layout(total, o_row)[:, None]
    o_t = t0 + gl.arange(0, 64, layout=gl.SliceLayout(1, out_lay))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, out_lay))
    o_at = ((b * TO + o_t).to(gl.int64) * HQ + head + WHICH)[:, None] * D + o_d[None, :]
    gl.store(OUT + o_at, gl.convert_layout(acc.to(dtype), out_lay), mask=(o_t < T)[:, None])


@gluon.jit
def nsa_interval_forward_roles(
    Q,
    K,
    V,
    OUT,
    LSE,
    T,
    TO,
    C,
    q0,
    block,
    stride,
    width,
    scale_log2,
    H: gl.constexpr,
    HQ: gl.constexpr,
    D: gl.constexpr,
    BC: gl.constexpr,
    STAGES: gl.constexpr,
    GROUPS: gl.constexpr,
    BANDED: gl.constexpr,
    REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
):
    """64 queries of GROUPS heads of one kv head a program; what it stores is
    `nsa_interval_forward`'s.
    """
    gl.static_assert(H % GROUPS == 0)
    dtype: gl.constexpr = Q.dtype
    t0 = (gl.num_programs(0) - 1 - gl.program_id(0)) * 64  # the longest tiles first
    head = gl.program_id(1) * GROUPS
    b = gl.program_id(2)
    g = head // H
    q_bufs = gl.allocate_shared_memory(dtype, [GROUPS, 1, 64, 1, D], Q.layout)
    k_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, BC, 1, D], K.layout)
    v_bufs = gl.allocate_shared_memory(dtype, [STAGES, 1, BC, 1, D], V.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=GROUPS)
        mbarrier.init(v_empty.index(i), count=GROUPS)
    end = gl.minimum(_end(gl.minimum(t0 + 64, T) - 1 + q0, block, stride), C)
    begin = 0
    if BANDED:
        begin = gl.maximum(_end(t0 + q0, block, stride) - width, 0)
    # of a row that sees none, one that is masked
    num_tiles = gl.maximum((end - begin + BC - 1) // BC, 1)
    where = (q0, block, stride, width)
    held = (q_bufs, k_bufs, v_bufs, q_full, k_full, v_full, k_empty, v_empty)
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_attend, (OUT, LSE, held, t0, b, head, begin, num_tiles, T, TO, C, where,
                    scale_log2, 0, HQ, D, BC, GROUPS, BANDED)),
                (_attend, (OUT, LSE, held, t0, b, head, begin, num_tiles, T, TO, C, where,
                    scale_log2, 1, HQ, D, BC, GROUPS, BANDED)),
                (_fetch, (Q, K, V, held, t0, b, head, g, begin, num_tiles, GROUPS)),
            ],
            [4, 1],
            [REGISTERS, FETCH_REGISTERS],
        )  # fmt: skip
    else:
        gl.static_assert(GROUPS == 3)
        gl.warp_specialize(
            [
                (_attend, (OUT, LSE, held, t0, b, head, begin, num_tiles, T, TO, C, where,
                    scale_log2, 0, HQ, D, BC, GROUPS, BANDED)),
                (_attend, (OUT, LSE, held, t0, b, head, begin, num_tiles, T, TO, C, where,
                    scale_log2, 1, HQ, D, BC, GROUPS, BANDED)),
                (_attend, (OUT, LSE, held, t0, b, head, begin, num_tiles, T, TO, C, where,
                    scale_log2, 2, HQ, D, BC, GROUPS, BANDED)),
                (_fetch, (Q, K, V, held, t0, b, head, g, begin, num_tiles, GROUPS)),
            ],
            [4, 4, 1],
            [REGISTERS, REGISTERS, FETCH_REGISTERS],
        )  # fmt: skip
