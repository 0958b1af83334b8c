"""The parts of the selected branch by lists on Hopper, with a role for each warp group: one
fetches rows of queries, the others multiply them with the block that chose them.

Letters as in `nsa.ops.selected.triton.entries`; `nsa_selected_forward` and `nsa_selected_backward`
compute the same parts on any card. Written in Gluon, which names the layouts, the barriers and the
warps of each role.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@gluon.jit
def _tile(KEY, at, stop, QS: gl.constexpr, QP: gl.constexpr, WARPS: gl.constexpr):
    """(list of entry ``at``, one past the last of the QS next entries that are of it)."""
    lay: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    j = gl.arange(0, QP, layout=lay)
    there = (j < QS) & (at + j < stop)
    first = gl.load(KEY + at, mask=at < stop, other=-1).to(gl.int32)
    keys = gl.load(KEY + at + j, mask=there, other=-1).to(gl.int32)
    return first, at + gl.sum((there & (keys == first)).to(gl.int32), 0)


@gluon.jit
def _entry(ORDER, e, stop):
    """Entries (row, kv head, slot) at places ``e`` of the sorted list; 0 from ``stop`` on."""
    return gl.load(ORDER + e, mask=e < stop, other=0).to(gl.int32)


@gluon.jit
def _position(flat, T, q0, Q0, G: gl.constexpr, N: gl.constexpr, RAGGED: gl.constexpr):
    row = flat // (G * N)
    b = row // T
    pos = row - b * T + q0
    if RAGGED:
        pos = row - b * T + gl.load(Q0 + b).to(gl.int32)
    return pos


@gluon.jit
def _fetch(
    Q,
    DO,
    K,
    V,
    KEY,
    ORDER,
    held,
    span,
    T,
    S,
    J,
    sq_b,
    sq_t,
    sq_h,
    sk_b,
    sk_s,
    sk_g,
    sv_b,
    sv_s,
    sv_g,
    G: gl.constexpr,
    H: gl.constexpr,
    N: gl.constexpr,
    QS: gl.constexpr,
    QP: gl.constexpr,
    ONE_STRIDE: gl.constexpr,
    BACKWARD: gl.constexpr,
):
    """Fill the buffers: a tile of query rows a turn (and of dO's, if BACKWARD), a block of K and V
    a list. Rows that a tile lacks are 0.
    """
    q_bufs, do_bufs, k_bufs, v_bufs, q_full, q_empty, kv_empty = held
    begin, stop, last_list, base = span
    STAGES: gl.constexpr = q_bufs.type.shape[0]
    M: gl.constexpr = q_bufs.type.shape[1]
    L: gl.constexpr = k_bufs.type.shape[1]
    D: gl.constexpr = q_bufs.type.shape[2]
    KV_BUFFERS: gl.constexpr = k_bufs.type.shape[0]
    lay: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    m = gl.arange(0, M, layout=gl.SliceLayout(1, lay))
    d = gl.arange(0, D, layout=gl.SliceLayout(0, lay))
    i = gl.arange(0, L, layout=gl.SliceLayout(1, lay))
    of_tile = m // H
    head_at = (m % H).to(gl.int64) * sq_h  # may exceed 2^31
    at = begin
    turn = 0
    block_turn = -1
    current = -1
    first, end = _tile(KEY, at, stop, QS, QP, 4)
    flat = _entry(ORDER, at + of_tile, stop)
    while (at < stop) & (first < last_list):
        bg = (first - base) // J
        g = (bg % G).to(gl.int64)
        if first != current:
            current = first
            block_turn += 1
            buf = block_turn % KV_BUFFERS
            mbarrier.wait(kv_empty.index(buf), ((block_turn // KV_BUFFERS) & 1) ^ 1)
            # Beyond S: any row of K and V will do, its weights are 0.
            c = gl.minimum((first - base - bg * J) * L + i, S - 1).to(gl.int64)
            b0 = (bg // G).to(gl.int64)
            k_at = K + (b0 * sk_b + g * sk_g + c * sk_s)[:, None] + d[None, :]
            v_at = V + (b0 * sv_b + g * sv_g + c * sv_s)[:, None] + d[None, :]
            async_copy.async_copy_global_to_shared(k_bufs.index(buf), k_at)
            async_copy.async_copy_global_to_shared(v_bufs.index(buf), v_at)
        row = flat // (G * N)
        if ONE_STRIDE:
            q_at = row.to(gl.int64) * sq_t
        else:
            b = row // T
            q_at = b.to(gl.int64) * sq_b + (row - b * T).to(gl.int64) * sq_t
        q_at += g * H * sq_h + head_at
        live = (m < QS * H) & (at + of_tile < end)
        stage = turn % STAGES
        mbarrier.wait(q_empty.index(stage), ((turn // STAGES) & 1) ^ 1)
        async_copy.async_copy_global_to_shared(
            q_bufs.index(stage), Q + q_at[:, None] + d[None, :], mask=live[:, None]
        )
        if BACKWARD:
            head = row.to(gl.int64) * (G * H) + g * H + m % H
            async_copy.async_copy_global_to_shared(
                do_bufs.index(stage), DO + (head * D)[:, None] + d[None, :], mask=live[:, None]
            )
        # after all copies of this thread, the block's too
        async_copy.mbarrier_arrive(q_full.index(stage), increment_count=False)
        turn += 1
        at = end
        first, end = _tile(KEY, at, stop, QS, QP, 4)
        flat = _entry(ORDER, at + of_tile, stop)


@gluon.jit
def _multiply(
    KEY,
    ORDER,
    PART,
    LSE_PART,
    Q0,
    held,
    span,
    e0,
    T,
    S,
    q0,
    J,
    scale_log2,
    WHICH: gl.constexpr,
    GROUPS: gl.constexpr,
    G: gl.constexpr,
    H: gl.constexpr,
    N: gl.constexpr,
    QS: gl.constexpr,
    QP: gl.constexpr,
    RAGGED: gl.constexpr,
):
    """Every GROUPS-th tile from tile WHICH on: softmax over its block, parts and lse out."""
    q_bufs, _do_bufs, k_bufs, v_bufs, q_full, q_empty, kv_empty = held
    begin, stop, last_list, base = span
    STAGES: gl.constexpr = q_bufs.type.shape[0]
    M: gl.constexpr = q_bufs.type.shape[1]
    L: gl.constexpr = k_bufs.type.shape[1]
    D: gl.constexpr = q_bufs.type.shape[2]
    KV_BUFFERS: gl.constexpr = k_bufs.type.shape[0]
    dtype: gl.constexpr = q_bufs.dtype
    s_lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, L, 16])
    o_lay: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    p_lay: gl.constexpr = gl.DotOperandLayout(0, o_lay, 2)
    # parts leave in whole rows, 16 bytes a thread
    out_lay: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    s_m = gl.arange(0, M, layout=gl.SliceLayout(1, s_lay))
    s_i = gl.arange(0, L, layout=gl.SliceLayout(0, s_lay))
    o_m = gl.arange(0, M, layout=gl.SliceLayout(1, out_lay))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, out_lay))
    at = begin
    turn = 0
    block_turn = -1
    current = -1
    first, end = _tile(KEY, at, stop, QS, QP, 4)
    while (at < stop) & (first < last_list):
        if first != current:
            if block_turn >= 0:  # this role's products with the block before are done
                mbarrier.arrive(kv_empty.index(block_turn % KV_BUFFERS), count=1)
            current = first
            block_turn += 1
        begin_t = at
        end_t = end
        list_t = first - base
        at = end
        first, end = _tile(KEY, at, stop, QS, QP, 4)
        if turn % GROUPS == WHICH:
            s_e = begin_t + s_m // H
            o_e = begin_t + o_m // H
            s_flat = _entry(ORDER, s_e, stop)
            o_flat = _entry(ORDER, o_e, stop)
            least = gl.load(ORDER + begin_t).to(gl.int32)
            stage = turn % STAGES
            buf = block_turn % KV_BUFFERS
            mbarrier.wait(q_full.index(stage), (turn // STAGES) & 1)
            fence_async_shared()
            s = warpgroup_mma(
                q_bufs.index(stage),
                k_bufs.index(buf).permute((1, 0)),
                gl.zeros([M, L], gl.float32, s_lay),
                use_acc=False,
                is_async=True,
            )
            c0 = (list_t % J) * L
            # a list is in order of rows: if its first row sees the whole block, all do
            least_sees = gl.minimum(_position(least, T, q0, Q0, G, N, RAGGED) + 1, S) - c0
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(q_empty.index(stage), count=1)
            s = s * scale_log2
            if least_sees < L:
                sees = gl.minimum(_position(s_flat, T, q0, Q0, G, N, RAGGED) + 1, S) - c0
                s = gl.where(s_i[None, :] < sees[:, None], s, float("-inf"))
            most = gl.max(s, 1)
            most = gl.where(most == float("-inf"), 0.0, most)
            p = gl.exp2(s - most[:, None])
            total = gl.sum(p, 1)
            some = total != 0  # NaN stays NaN
            total = gl.where(some, total, 1.0)
            o = warpgroup_mma(
                gl.convert_layout(p.to(dtype), p_lay),
                v_bufs.index(buf),
                gl.zeros([M, D], gl.float32, o_lay),
                use_acc=False,
                is_async=True,
            )
            s_part = (s_flat.to(gl.int64) - e0) * H + s_m % H
            s_live = (s_m < QS * H) & (s_e < end_t)
            gl.store(
                LSE_PART + s_part,
                gl.where(some, most + gl.log2(total), float("-inf")),
                mask=s_live,
            )
            o = warpgroup_mma_wait(0, deps=[o])
            o = o / gl.convert_layout(total, gl.SliceLayout(1, o_lay))[:, None]
            o_part = (o_flat.to(gl.int64) - e0) * H + o_m % H
            o_live = (o_m < QS * H) & (o_e < end_t)
            gl.store(
                PART + o_part[:, None] * D + o_d[None, :],
                gl.convert_layout(o.to(dtype), out_lay),
                mask=o_live[:, None],
                eviction_policy="evict_first",
            )
        turn += 1


@gluon.jit
def nsa_selected_forward_roles(
    Q,
    K,
    V,
    KEY,
    ORDER,
    PART,
    LSE_PART,
    Q0,
    e0,
    e1,
    base,
    T,
    S,
    q0,
    J,
    num_lists,
    sq_b,
    sq_t,
    sq_h,
    sk_b,
    sk_s,
    sk_g,
    sv_b,
    sv_s,
    sv_g,
    scale_log2,
    G: gl.constexpr,
    H: gl.constexpr,
    N: gl.constexpr,
    L: gl.constexpr,
    D: gl.constexpr,
    QS: gl.constexpr,
    QP: gl.constexpr,
    TILE: gl.constexpr,
    M: gl.constexpr,
    STAGES: gl.constexpr,
    KV_BUFFERS: gl.constexpr,
    GROUPS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    MULTIPLY_REGISTERS: gl.constexpr,
    RAGGED: gl.constexpr,
    ONE_STRIDE: gl.constexpr,
):
    """TILE neighbouring entries a program; what it stores is `nsa_selected_forward`'s."""
    # a stage always has the same group: a barrier tells a phase by its parity alone
    gl.static_assert(STAGES % GROUPS == 0)
    dtype: gl.constexpr = Q.dtype.element_ty
    q_lay: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], dtype)
    kv_lay: gl.constexpr = gl.NVMMASharedLayout.get_default_for([L, D], dtype)
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, M, D], q_lay)
    k_bufs = gl.allocate_shared_memory(dtype, [KV_BUFFERS, L, D], kv_lay)
    v_bufs = gl.allocate_shared_memory(dtype, [KV_BUFFERS, L, D], kv_lay)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [KV_BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=128)  # each thread that fetches
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(KV_BUFFERS):
        mbarrier.init(kv_empty.index(i), count=GROUPS)
    begin = e0 + gl.program_id(0) * TILE
    span = (begin, gl.minimum(begin + TILE, e1), base + num_lists, base)
    held = (q_bufs, q_bufs, k_bufs, v_bufs, q_full, q_empty, kv_empty)
    if GROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (KEY, ORDER, PART, LSE_PART, Q0, held, span, e0, T, S, q0, J,
                    scale_log2, 0, 1, G, H, N, QS, QP, RAGGED)),
                (_fetch, (Q, Q, K, V, KEY, ORDER, held, span, T, S, J, sq_b, sq_t, sq_h, sk_b, sk_s,
                    sk_g, sv_b, sv_s, sv_g, G, H, N, QS, QP, ONE_STRIDE, False)),
            ],
            [4],
            [FETCH_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply, (KEY, ORDER, PART, LSE_PART, Q0, held, span, e0, T, S, q0, J,
                    scale_log2, 0, 2, G, H, N, QS, QP, RAGGED)),
                (_multiply, (KEY, ORDER, PART, LSE_PART, Q0, held, span, e0, T, S, q0, J,
                    scale_log2, 1, 2, G, H, N, QS, QP, RAGGED)),
                (_fetch, (Q, Q, K, V, KEY, ORDER, held, span, T, S, J, sq_b, sq_t, sq_h, sk_b, sk_s,
                    sk_g, sv_b, sv_s, sv_g, G, H, N, QS, QP, ONE_STRIDE, False)),
            ],
            [4, 4],
            [MULTIPLY_REGISTERS, FETCH_REGISTERS],
        )  # fmt: skip


@gluon.jit
def _row_values(
    ORDER, LSE, DELTA, at, end, stop, g, m, G: gl.constexpr, H: gl.constexpr, N: gl.constexpr
):
    """(lse, delta) of the rows of a tile; a row that is none has weights of 0."""
    e = at + m // H
    flat = _entry(ORDER, e, stop)
    head = (flat // (G * N)).to(gl.int64) * (G * H) + g * H + m % H
    live = e < end
    return (
        gl.load(LSE + head, mask=live, other=float("inf")),
        gl.load(DELTA + head, mask=live, other=0.0),
    )


@gluon.jit
def _differentiate(
    LSE,
    DELTA,
    KEY,
    ORDER,
    DQ_PART,
    DK_PART,
    DV_PART,
    Q0,
    held,
    p_buf,
    ds_buf,
    span,
    e0,
    T,
    S,
    q0,
    J,
    scale,
    scale_log2,
    G: gl.constexpr,
    H: gl.constexpr,
    N: gl.constexpr,
    QS: gl.constexpr,
    QP: gl.constexpr,
    RAGGED: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Each tile's part of dQ, each run's parts of dK and dV."""
    q_bufs, do_bufs, k_bufs, v_bufs, q_full, q_empty, kv_empty = held
    begin, stop, last_list, base = span
    STAGES: gl.constexpr = q_bufs.type.shape[0]
    M: gl.constexpr = q_bufs.type.shape[1]
    L: gl.constexpr = k_bufs.type.shape[1]
    D: gl.constexpr = q_bufs.type.shape[2]
    KV_BUFFERS: gl.constexpr = k_bufs.type.shape[0]
    dtype: gl.constexpr = q_bufs.dtype
    # warps beyond the 64 rows that four multiply take other columns
    ACROSS: gl.constexpr = WARPS * 16 // M if M < WARPS * 16 else 1
    KV_ACROSS: gl.constexpr = WARPS // 4
    s_lay: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS // ACROSS, ACROSS], [16, L // ACROSS, 16]
    )
    dq_lay: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [WARPS // ACROSS, ACROSS], [16, D // ACROSS, 16]
    )
    dkv_lay: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [4, KV_ACROSS], [16, D // KV_ACROSS, 16]
    )
    # 16 bytes a thread, whole rows
    dq_out: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    dkv_out: gl.constexpr = gl.BlockedLayout([1, 4], [128 // D, D // 4], [WARPS, 1], [1, 0])
    s_m = gl.arange(0, M, layout=gl.SliceLayout(1, s_lay))
    s_i = gl.arange(0, L, layout=gl.SliceLayout(0, s_lay))
    o_m = gl.arange(0, M, layout=gl.SliceLayout(1, dq_out))
    o_d = gl.arange(0, D, layout=gl.SliceLayout(0, dq_out))
    kv_i = gl.arange(0, L, layout=gl.SliceLayout(1, dkv_out))
    kv_d = gl.arange(0, D, layout=gl.SliceLayout(0, dkv_out))
    at = begin
    turn = 0
    block_turn = 0
    first, end = _tile(KEY, at, stop, QS, QP, WARPS)
    while (at < stop) & (first < last_list):
        current = first
        list_ = first - base
        g = (list_ // J % G).to(gl.int64)
        c0 = (list_ % J) * L
        buf = block_turn % KV_BUFFERS
        lse, delta = _row_values(ORDER, LSE, DELTA, at, end, stop, g, s_m, G, H, N)
        dk = gl.zeros([L, D], gl.float32, dkv_lay)
        dv = gl.zeros([L, D], gl.float32, dkv_lay)
        while first == current:
            stage = turn % STAGES
            q = q_bufs.index(stage)
            do = do_bufs.index(stage)
            k = k_bufs.index(buf)
            begin_t = at
            end_t = end
            least = gl.load(ORDER + begin_t).to(gl.int32)
            mbarrier.wait(q_full.index(stage), (turn // STAGES) & 1)
            fence_async_shared()
            s = warpgroup_mma(
                q,
                k.permute((1, 0)),
                gl.zeros([M, L], gl.float32, s_lay),
                use_acc=False,
                is_async=True,
            )
            dp = warpgroup_mma(
                do,
                v_bufs.index(buf).permute((1, 0)),
                gl.zeros([M, L], gl.float32, s_lay),
                use_acc=False,
                is_async=True,
            )
            row_lse = gl.where(lse == float("-inf"), float("inf"), lse)
            row_delta = delta
            at = end
            first, end = _tile(KEY, at, stop, QS, QP, WARPS)
            # those of the next tile, which is of this run or not read
            lse, delta = _row_values(ORDER, LSE, DELTA, at, end, stop, g, s_m, G, H, N)
            least_sees = gl.minimum(_position(least, T, q0, Q0, G, N, RAGGED) + 1, S) - c0
            s = warpgroup_mma_wait(1, deps=[s])
            p = gl.exp2(s * scale_log2 - row_lse[:, None])
            if least_sees < L:
                s_flat = _entry(ORDER, begin_t + s_m // H, stop)
                sees = gl.minimum(_position(s_flat, T, q0, Q0, G, N, RAGGED) + 1, S) - c0
                p = gl.where(s_i[None, :] < sees[:, None], p, 0.0)
            p_buf.store(p.to(dtype))
            dp = warpgroup_mma_wait(0, deps=[dp])
            ds_buf.store((p * (dp - row_delta[:, None]) * scale).to(dtype))
            fence_async_shared()
            dq = warpgroup_mma(
                ds_buf, k, gl.zeros([M, D], gl.float32, dq_lay), use_acc=False, is_async=True
            )
            dv = warpgroup_mma(p_buf.permute((1, 0)), do, dv, is_async=True)
            dk = warpgroup_mma(ds_buf.permute((1, 0)), q, dk, is_async=True)
            o_e = begin_t + o_m // H
            o_flat = _entry(ORDER, o_e, stop)
            dq, dv, dk = warpgroup_mma_wait(0, deps=[dq, dv, dk])
            mbarrier.arrive(q_empty.index(stage), count=1)
            o_part = (o_flat.to(gl.int64) - e0) * H + o_m % H
            o_live = (o_m < QS * H) & (o_e < end_t)
            gl.store(
                DQ_PART + o_part[:, None] * D + o_d[None, :],
                gl.convert_layout(dq.to(dtype), dq_out),
                mask=o_live[:, None],
                eviction_policy="evict_first",
            )
            turn += 1
        mbarrier.arrive(kv_empty.index(buf), count=1)
        block_turn += 1
        slot = (gl.program_id(0) + list_).to(gl.int64) * L + kv_i
        to = slot[:, None] * D + kv_d[None, :]
        gl.store(DK_PART + to, gl.convert_layout(dk, dkv_out))
        gl.store(DV_PART + to, gl.convert_layout(dv, dkv_out))


@gluon.jit
def nsa_selected_backward_roles(
    Q,
    K,
    V,
    DO,
    LSE,
    DELTA,
    KEY,
    ORDER,
    DQ_PART,
    DK_PART,
    DV_PART,
    Q0,
    e0,
    e1,
    base,
    T,
    S,
    q0,
    J,
    num_lists,
    sq_b,
    sq_t,
    sq_h,
    sk_b,
    sk_s,
    sk_g,
    sv_b,
    sv_s,
    sv_g,
    scale,
    scale_log2,
    G: gl.constexpr,
    H: gl.constexpr,
    N: gl.constexpr,
    L: gl.constexpr,
    D: gl.constexpr,
    QS: gl.constexpr,
    QP: gl.constexpr,
    TILE: gl.constexpr,
    M: gl.constexpr,
    STAGES: gl.constexpr,
    KV_BUFFERS: gl.constexpr,
    WARPS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
    RAGGED: gl.constexpr,
    ONE_STRIDE: gl.constexpr,
):
    """TILE neighbouring entries a program; what it stores is `nsa_selected_backward`'s."""
    dtype: gl.constexpr = Q.dtype.element_ty
    q_lay: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, D], dtype)
    kv_lay: gl.constexpr = gl.NVMMASharedLayout.get_default_for([L, D], dtype)
    p_lay: gl.constexpr = gl.NVMMASharedLayout.get_default_for([M, L], dtype)
    q_bufs = gl.allocate_shared_memory(dtype, [STAGES, M, D], q_lay)
    do_bufs = gl.allocate_shared_memory(dtype, [STAGES, M, D], q_lay)
    k_bufs = gl.allocate_shared_memory(dtype, [KV_BUFFERS, L, D], kv_lay)
    v_bufs = gl.allocate_shared_memory(dtype, [KV_BUFFERS, L, D], kv_lay)
    p_buf = gl.allocate_shared_memory(dtype, [M, L], p_lay)
    ds_buf = gl.allocate_shared_memory(dtype, [M, L], p_lay)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [KV_BUFFERS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=128)  # each thread that fetches
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(KV_BUFFERS):
        mbarrier.init(kv_empty.index(i), count=1)
    begin = e0 + gl.program_id(0) * TILE
    span = (begin, gl.minimum(begin + TILE, e1), base + num_lists, base)
    held = (q_bufs, do_bufs, k_bufs, v_bufs, q_full, q_empty, kv_empty)
    gl.warp_specialize(
        [
            (_differentiate, (LSE, DELTA, KEY, ORDER, DQ_PART, DK_PART, DV_PART, Q0, held, p_buf,
                ds_buf, span, e0, T, S, q0, J, scale, scale_log2, G, H, N, QS, QP, RAGGED, WARPS)),
            (_fetch, (Q, DO, K, V, KEY, ORDER, held, span, T, S, J, sq_b, sq_t, sq_h, sk_b, sk_s,
                sk_g, sv_b, sv_s, sv_g, G, H, N, QS, QP, ONE_STRIDE, True)),
        ],
        [4],
        [FETCH_REGISTERS],
    )  # fmt: skip
