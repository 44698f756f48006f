"""Prefill in fp8 on compute capability 9: both products run on the tensor cores in e4m3 (Gluon).

The programs, their work list and their three warpgroups are those of `prefill_hopper.py`; what differs is what
Hopper's fp8 products ask for.

- K and V come from the scratch of `fp8_scratch.py`, since these products read the keys of V next to each other:
  its V is transposed, and its keys are ordered as the tensor cores hold the scores, so that weights become an
  operand without being moved between threads.
- The tensor cores add fp8 products with few bits. Each tile's part of the output is a sum of its own, and
  float32 registers add it to those before (accumulation in two levels).
- Weights are 2**8 times as large as in 16 bits, since e4m3 has few numbers below 2**-6.

    gathering       slots │ K j, V j │ K j-1, V j-1 │ …
                               │ full        ▲ empty
    computing (2)      scores j │ ── part j+1 ──  wait │ add part j+1 │ scores j-1 │ ── part j ── …
                                │ ── softmax j ──      │              │            │ ── softmax j-1 ──
"""

from typing import Any, NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.paged_kv import AttentionOptions
from lightkv.triton_kernels.attention.records import Outputs, Shape, heads_record

from .hopper_features import features_of
from .prefill_fp8_tiles import (
    begin_part,
    begin_scores,
    copy_layout,
    copy_q,
    pack_fours,
    product_layout,
    start_copy,
    tile_layout,
    unpack_fours,
)
from .prefill_hopper_items import (
    item_at,
    keys_of,
    load_slopes,
    online_softmax,
    pass_item,
    piece_of,
    start_softmax,
    thread_sums,
    tile_of,
    write_part,
    write_tile,
)
from .prefill_hopper_tiles import WARPS
from .prefill_plan import PrefillPlan

_REGISTERS = gl.constexpr(504)  # of three threads, one of each warpgroup
_COMPUTE_REGISTERS = gl.constexpr(224)  # of a thread that computes; with fewer, the loop spills
_EXTRA_BITS = gl.constexpr(8)  # by which weights are larger than in 16 bits


@gluon.jit
def _gather(
    tensors,
    num_kv_heads,
    strides,
    shared,
    GROUP: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    AFTER: gl.constexpr,
    SHARES: gl.constexpr,
):
    q, k, v, begins, items, counters = tensors
    q_strides, stride_k_t, stride_v_d = strides
    _item, q_smem, k_smem, v_smem, _item_full, q_full, _q_empty, k_full, v_full, empty = shared
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    DK: gl.constexpr = k_smem.shape[2]
    DV: gl.constexpr = v_smem.shape[1]
    BLOCK_M: gl.constexpr = 2 * q_smem.shape[1]
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(1, copy_layout(DK)))
    dims = gl.arange(0, DV, gl.SliceLayout(1, copy_layout(BLOCK_N)))
    count = 0  # key tiles so far, over all items
    turn = 0  # items so far
    order = gl.load(counters + 2), gl.load(counters + 3), num_kv_heads
    item = item_at(gl.program_id(0), order)
    while item >= 0:
        tile = tile_of(items, item, num_kv_heads)
        piece = piece_of(items, item, num_kv_heads, SHARES)
        _begin, end, first, last = keys_of(tile, piece, BLOCK_M, BLOCK_N, GROUP, WINDOW, CHUNK, AFTER, SHARES)
        if end > 0:
            begin = gl.load(begins + tile[1]).to(gl.int64)
            k_head = k + begin * stride_k_t + tile[0] * DK
            v_head = v + tile[0] * DV * stride_v_d + begin
            for j in range(last - first + 1):
                stage = count % STAGES
                first_key = (last - j) * BLOCK_N
                mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
                start_copy(
                    k_head + first_key.to(gl.int64) * stride_k_t, stride_k_t, keys, k_smem.index(stage)
                )
                async_copy.mbarrier_arrive(k_full.index(stage), increment_count=False)
                if j == 0:
                    pass_item(item, turn, shared)
                    copy_q(q, q_strides, tile, q_smem, q_full, GROUP)
                start_copy(v_head + first_key, stride_v_d, dims, v_smem.index(stage))
                async_copy.mbarrier_arrive(v_full.index(stage), increment_count=False)
                count += 1
        else:
            pass_item(item, turn, shared)
            copy_q(q, q_strides, tile, q_smem, q_full, GROUP)
        turn += 1
        item = -1
        if SHARES:
            item = piece[3]
        if item < 0:
            place = gl.num_programs(0) + gl.atomic_add(counters, 1, sem="relaxed")
            item = item_at(place, order)
    pass_item(-1, turn, shared)
    if gl.atomic_add(counters + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counters, 0)
        gl.store(counters + 1, 0)


@gluon.jit
def _compute(
    tensors,
    num_kv_heads,
    scales,
    out_strides,
    shared,
    HALF: gl.constexpr,
    GROUP: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    AFTER: gl.constexpr,
    SOFTCAP: gl.constexpr,
    SHARES: gl.constexpr,
):
    items, out, lse, partials, of_scores, kv_scales = tensors
    sink_logits, alibi_slopes = of_scores
    item_smem, q_smem, k_smem, v_smem, item_full, q_full, q_empty, k_full, v_full, empty = shared
    STAGES: gl.constexpr = k_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[1]
    ROWS: gl.constexpr = q_smem.shape[1]
    DV: gl.constexpr = v_smem.shape[1]
    layout: gl.constexpr = product_layout(BLOCK_N)
    out_layout: gl.constexpr = product_layout(DV)
    out_row: gl.constexpr = gl.SliceLayout(1, out_layout)
    p_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 4)
    row: gl.constexpr = gl.SliceLayout(1, layout)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    no_tree: gl.constexpr = None  # masks are left to prefill in 16 bits
    count = 0
    turn = 0
    mbarrier.wait(item_full, 0)
    item = gl.max(item_smem.load(one), 0)
    while item >= 0:
        tile = tile_of(items, item, num_kv_heads)
        piece = piece_of(items, item, num_kv_heads, SHARES)
        _begin, end, first, last = keys_of(
            tile, piece, 2 * ROWS, BLOCK_N, GROUP, WINDOW, CHUNK, AFTER, SHARES
        )
        computes = end > 0
        if SHARES:  # few rows are the rule then
            computes = computes & (tile[2] + HALF * ROWS < tile[3])
        joins = True
        if SHARES and sink_logits is not None:  # of a tile's parts, its first is joined by the sinks
            begin = keys_of(tile, piece, 2 * ROWS, BLOCK_N, GROUP, WINDOW, CHUNK, AFTER, False)[0]
            joins = piece[0] <= begin
        peak, total = start_softmax(sink_logits, joins, tile, HALF, GROUP, ROWS, row)
        acc = gl.zeros([ROWS, DV], gl.float32, out_layout)
        mbarrier.wait(q_full, turn & 1)
        if computes:
            score_scale, cap_scale, q_scale, out_factor = scales
            k_scale = gl.load(kv_scales + 2 * tile[0]) * q_scale
            if SOFTCAP:
                cap_scale *= k_scale
            else:
                score_scale *= k_scale
            of_step = score_scale, cap_scale
            first_row, prefix = tile[2] + HALF * ROWS, tile[5]
            positions = prefix + (first_row + gl.arange(0, ROWS, row)) // GROUP
            last_keys = positions
            if AFTER > 0:
                last_keys = gl.minimum(positions + AFTER, end - 1)
            slopes = load_slopes(alibi_slopes, tile, HALF, GROUP, ROWS, row)
            origin = end - 1
            row_bias = peak
            if slopes is not None:
                row_bias = slopes * (origin - positions).to(gl.float32)
                peak -= row_bias
                slopes = slopes / score_scale
            full = first
            if WINDOW == 0:
                full = gl.minimum(gl.maximum(prefix + first_row // GROUP + 1 + AFTER, 0) // BLOCK_N, last)
            if SHARES:
                full = gl.maximum(full, first)
            if CHUNK > 0:
                last_position = prefix + (gl.minimum(first_row + ROWS, tile[3]) - 1) // GROUP
                one_chunk = gl.maximum(last_position, 0) // CHUNK * CHUNK <= first * BLOCK_N
                full = gl.where(one_chunk, full, first)
            q_half = q_smem.index(HALF)
            sums = thread_sums(gl.zeros([ROWS, BLOCK_N], gl.float32, layout))
            sums_row: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
            if sink_logits is not None:
                sums += gl.convert_layout(total * 0.25, sums_row)[:, None]
            stage = count % STAGES
            mbarrier.wait(k_full.index(stage), count // STAGES & 1)
            s = warpgroup_mma_wait(0, deps=[begin_scores(q_half, k_smem.index(stage), layout)])
            weights, decay, peak = online_softmax(
                s, peak, last * BLOCK_N, positions, last_keys, slopes, origin, no_tree, of_step,
                WINDOW, CHUNK, SOFTCAP, True, True, _EXTRA_BITS,
            )  # fmt: skip
            sums = sums * gl.convert_layout(decay, sums_row)[:, None] + thread_sums(weights)
            mbarrier.wait(v_full.index(stage), count // STAGES & 1)
            fours = pack_fours(weights)
            count += 1
            for FULL in gl.static_range(2 if WINDOW == 0 else 1):
                num_steps = full - first if FULL else last - full
                for j in range(num_steps):
                    before = stage
                    stage = count % STAGES
                    mbarrier.wait(k_full.index(stage), count // STAGES & 1)
                    s = begin_scores(q_half, k_smem.index(stage), layout)
                    p = unpack_fours(fours, p_layout)
                    old_fours = fours
                    part = begin_part(p, v_smem.index(before), out_layout)
                    s = warpgroup_mma_wait(1, deps=[s])
                    first_key = ((full if FULL else last) - 1 - j) * BLOCK_N
                    old_decay = decay
                    weights, decay, peak = online_softmax(
                        s, peak, first_key, positions, last_keys, slopes, origin, no_tree, of_step,
                        WINDOW, CHUNK, SOFTCAP, True, FULL == 0, _EXTRA_BITS,
                    )  # fmt: skip
                    sums = sums * gl.convert_layout(decay, sums_row)[:, None] + thread_sums(weights)
                    fours = pack_fours(weights)
                    mbarrier.wait(v_full.index(stage), count // STAGES & 1)
                    part, _ = warpgroup_mma_wait(0, deps=[part, old_fours])
                    mbarrier.arrive(empty.index(before))
                    acc = acc * gl.convert_layout(old_decay, out_row)[:, None] + part
                    count += 1
            p = unpack_fours(fours, p_layout)
            part = begin_part(p, v_smem.index(stage), out_layout)
            part = warpgroup_mma_wait(0, deps=[part])
            mbarrier.arrive(empty.index(stage))
            acc = acc * gl.convert_layout(decay, out_row)[:, None] + part
            total = gl.convert_layout(gl.sum(sums, 1), row)
            mbarrier.arrive(q_empty)
            acc *= gl.load(kv_scales + 2 * tile[0] + 1) * out_factor
            if slopes is not None:
                peak += row_bias
        else:
            mbarrier.arrive(q_empty)
            if SHARES:  # a half without rows reads no keys
                for _j in range(last - first + 1):
                    stage = count % STAGES
                    mbarrier.wait(k_full.index(stage), count // STAGES & 1)
                    mbarrier.wait(v_full.index(stage), count // STAGES & 1)
                    mbarrier.arrive(empty.index(stage))
                    count += 1
        if SHARES:
            if piece[2] >= 0:
                write_part((acc,), peak, total, partials, piece[2], num_kv_heads, tile, HALF)
            else:
                write_tile(
                    (acc,), peak, total, out, lse, num_kv_heads * GROUP, out_strides, tile, HALF, GROUP
                )
        else:
            write_tile((acc,), peak, total, out, lse, num_kv_heads * GROUP, out_strides, tile, HALF, GROUP)
        turn += 1
        mbarrier.wait(item_full, turn & 1)
        item = gl.max(item_smem.load(one), 0)


class Fp8Scales(NamedTuple):
    """`kv_scales`: float32 `[num_kv_heads, 2]`, of K and V; `q_scale`: of q; `out_factor`: multiplies the
    output."""

    kv_scales: Any
    q_scale: Any
    out_factor: Any


class Fp8Keys(NamedTuple):
    """A scratch: `k` e4m3 `[capacity, num_kv_heads, DK]`, `v` e4m3 `[num_kv_heads, DV, capacity]`, and where
    each request's keys begin in it, `begins` int32 `[P]`, multiples of BLOCK_N."""

    k: Any
    v: Any
    begins: Any
    stride_k_t: Any
    stride_v_d: Any


@gluon.jit(do_not_specialize=["num_kv_heads"], do_not_specialize_on_alignment=["items", "counters"])
def _fp8_kernel(
    q,  # `Heads`, e4m3
    keys,  # `Fp8Keys`
    items,  # [items, 12]
    counters,  # [4]: items taken, programs finished, items to begin at, heads of a section
    outputs,  # `Outputs`; its parts are [parts, num_kv_heads, BLOCK_M, DV] and [parts, num_kv_heads, BLOCK_M]
    num_kv_heads,
    score_scale,
    fp8_scales,  # `Fp8Scales`
    features,  # `HopperFeatures`
    shape,  # `Shape`
    STAGES: gl.constexpr,
    SHARES: gl.constexpr,
):
    GROUP: gl.constexpr = shape.GROUP
    DK: gl.constexpr = shape.DK
    DV: gl.constexpr = shape.DV
    BLOCK_M: gl.constexpr = shape.BLOCK_M
    BLOCK_N: gl.constexpr = shape.BLOCK_N
    WINDOW: gl.constexpr = features.WINDOW
    CHUNK: gl.constexpr = features.CHUNK
    AFTER: gl.constexpr = features.AFTER
    SOFTCAP: gl.constexpr = features.SOFTCAP
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    item_smem = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_smem = gl.allocate_shared_memory(gl.float8e4nv, [2, BLOCK_M // 2, DK], tile_layout(DK))
    k_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, DK], tile_layout(DK))
    v_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, DV, BLOCK_N], tile_layout(BLOCK_N))
    item_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    q_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    # Every gathering thread arrives when its copies have completed; each computing warpgroup arrives once.
    mbarrier.init(item_full, count=1)
    mbarrier.init(q_full, count=32 * WARPS)
    mbarrier.init(q_empty, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=32 * WARPS)
        mbarrier.init(v_full.index(stage), count=32 * WARPS)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    shared = (item_smem, q_smem, k_smem, v_smem, item_full, q_full, q_empty, k_full, v_full, empty)
    of_scores, partials = (features.sink_logits, features.slopes), (outputs.partial_out, outputs.partial_lse)
    tensors = items, outputs.out, outputs.lse, partials, of_scores, fp8_scales.kv_scales
    inputs = q.data, keys.k, keys.v, keys.begins, items, counters
    scales = score_scale, features.cap_scale, fp8_scales.q_scale, fp8_scales.out_factor
    strides = (q.stride_token, q.stride_head), keys.stride_k_t, keys.stride_v_d
    out_strides = outputs.stride_token, outputs.stride_head
    gl.warp_specialize(
        [
            (_compute, (
                tensors, num_kv_heads, scales, out_strides, shared, 0, GROUP, WINDOW, CHUNK, AFTER, SOFTCAP,
                SHARES,
            )),
            (_compute, (
                tensors, num_kv_heads, scales, out_strides, shared, 1, GROUP, WINDOW, CHUNK, AFTER, SOFTCAP,
                SHARES,
            )),
            (_gather, (inputs, num_kv_heads, strides, shared, GROUP, WINDOW, CHUNK, AFTER, SHARES)),
        ],
        [WARPS, WARPS],
        [_COMPUTE_REGISTERS, _REGISTERS - 2 * _COMPUTE_REGISTERS],
    )  # fmt: skip


def launch_fp8_prefill(
    q: Tensor,
    keys: Fp8Keys,
    plan: PrefillPlan,
    outputs: Outputs,
    launch: tuning.Launch,
    fp8_scales: Fp8Scales,
    options: AttentionOptions,
) -> None:
    """Computes the items of a plan, whose tiles have to be as high as `launch` says, in fp8; the arguments are
    those of `fp8_prefill_attention`. Nothing is checked."""
    num_heads, key_dim = q.shape[1:]
    num_kv_heads, value_dim = keys.v.shape[:2]
    num_programs = min(num_kv_heads * plan.num_shares, tuning.device_class(q.device).num_multiprocessors)
    features, score_scale = features_of(options.variants, options.scale_for(key_dim), options.causal)
    numbers = (
        num_heads // num_kv_heads, key_dim, value_dim, launch.block_m, key_dim, value_dim, launch.block_n,
        options.causal, 0, False,
    )  # fmt: skip
    _fp8_kernel[(num_programs,)](
        heads_record(q),
        keys,
        plan.items,
        plan.counters,
        outputs,
        num_kv_heads,
        score_scale,
        fp8_scales,
        features,
        Shape(*map(gl.constexpr, numbers)),
        STAGES=launch.num_stages,
        SHARES=outputs.partial_out is not None,
        num_warps=4,  # of the first warpgroup
    )
