"""Prefill on compute capability 9: some warps gather while others compute (Gluon).

A program has three warpgroups of four warps, and stays on its multiprocessor until the work list is done. One
warpgroup copies q, and K and V by index, to shared memory, as far ahead as there is room; the other two
compute, each half of a tile's rows. An item is a tile for one K/V head; its key tiles are read from the last to
the first, so the masked ones on the diagonal come first.

    gathering       slots j-1 │ K j, V j │ slots j-2 │ K j-1, V j-1 │ …          next item: K, q, V │ …
                                   │ full        ▲ empty
    shared memory      K: 3 tiles in turn      V: 3 tiles in turn      q: one tile    (at head dim 128)
                                   │ full        ▲ empty
    computing (2)      scores j │ ─── output j+1 ───          │ scores j-1 │ ─── output j ───         (wgmma)
                                │ ─── softmax j  ─── wait for │            │ ─── softmax j-1 ───

A tile of K and the tile of V before it become empty together, since their scores and their part of the output
are computed together.

Programs take the next item from a counter, because items differ too much to assign them beforehand. The program
that finishes last resets the counter, so one run at a time may use a plan. The K/V heads are computed in
sections, whose K and V stay in the L2 cache (`tuning.SECTION_BYTES`).

It computes the same as the kernel of `prefill_kernel.py`, which is easier to read. `prefill_attention.py` and
`tuning.py` say on which devices, for which shapes and strides this kernel runs, and how large its tiles are.
"""

from collections.abc import Sequence

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma_wait,
)

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.records import Cache, Index, Outputs, Shape, heads_record
from lightkv.triton_kernels.attention.variants.variant import Variant

from .hopper_features import VARIANTS, features_of
from .prefill_hopper_items import (
    in_gluon,
    item_at,
    keys_of,
    load_slopes,
    online_softmax,
    pack_pairs,
    pass_item,
    piece_of,
    rows_of_tree,
    start_softmax,
    thread_sums,
    tile_of,
    total_width,
    unpack_pairs,
    write_part,
    write_tile,
)
from .prefill_hopper_tiles import (
    WARPS,
    allocate_tiles,
    begin_output,
    begin_scores,
    copy_q,
    copy_rows,
    empty_output,
    find_inner_slots_of_pieces,
    find_slots_of_pieces,
    output_layout,
    scale_rows,
    tile_at,
    wait_output,
)

__all__ = ["VARIANTS", "launch_hopper_prefill"]

_REGISTERS = gl.constexpr(504)  # of three threads, one of each warpgroup


@gluon.jit
def _gather(
    tensors,
    index,
    num_kv_heads,
    strides,
    shared,
    GROUP: gl.constexpr,
    WINDOW: gl.constexpr,
    CHUNK: gl.constexpr,
    AFTER: gl.constexpr,
    SHARES: gl.constexpr,
):
    q, k_cache, v_cache, items, counters = tensors
    q_strides, k_strides, v_strides = strides
    _item, q_smem, k_smem, v_smem, _item_full, q_full, _q_empty, k_full, v_full, empty = shared
    STAGES: gl.constexpr = k_smem[0].shape[0]
    BLOCK_N: gl.constexpr = k_smem[0].shape[1]
    BLOCK_M: gl.constexpr = 2 * q_smem[0].shape[1]
    count = 0  # key tiles so far, over all items
    turn = 0  # items so far
    order = gl.load(counters + 2), gl.load(counters + 3), num_kv_heads
    item = item_at(gl.program_id(0), order)
    while item >= 0:
        tile = tile_of(items, item, num_kv_heads)
        piece = piece_of(items, item, num_kv_heads, SHARES)
        begin, end, first, last = keys_of(tile, piece, BLOCK_M, BLOCK_N, GROUP, WINDOW, CHUNK, AFTER, SHARES)
        if end > 0:
            k_head = k_cache + tile[0] * k_strides[1]
            v_head = v_cache + tile[0] * v_strides[1]
            slots = find_slots_of_pieces(index, tile[1], last, begin, end, k_smem)
            for j in range(last - first + 1):
                stage = count % STAGES
                here = slots
                # The index is loaded a tile ahead, since the copy of K needs its values.
                if WINDOW > 0 or CHUNK > 0:
                    slots = find_slots_of_pieces(index, tile[1], last - 1 - j, begin, end, k_smem)
                else:
                    slots = find_inner_slots_of_pieces(index, tile[1], last - 1 - j, j < last - first, k_smem)
                mbarrier.wait(empty.index(stage), (count // STAGES & 1) ^ 1)
                copy_rows(k_head, here, k_strides[0], tile_at(k_smem, stage), k_full.index(stage))
                if j == 0:
                    pass_item(item, turn, shared)
                    copy_q(q, q_strides, tile, q_smem, q_full, GROUP)
                # V of the tile that was here goes with K of the tile after that.
                mbarrier.wait(empty.index((count + 1) % STAGES), ((count + 1) // STAGES & 1) ^ 1)
                copy_rows(v_head, here, v_strides[0], tile_at(v_smem, stage), v_full.index(stage))
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
    items, out, lse, partials, of_scores = tensors
    sink_logits, alibi_slopes, tree = of_scores
    item_smem, q_smem, k_smem, v_smem, item_full, q_full, q_empty, k_full, v_full, empty = shared
    STAGES: gl.constexpr = k_smem[0].shape[0]
    BLOCK_N: gl.constexpr = k_smem[0].shape[1]
    ROWS: gl.constexpr = q_smem[0].shape[1]
    dtype: gl.constexpr = q_smem[0].dtype
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BLOCK_N, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, output_layout(v_smem[0].shape[2]), 2)
    row: gl.constexpr = gl.SliceLayout(1, layout)
    one: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    q_half = tile_at(q_smem, HALF)
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
        acc = empty_output(v_smem, ROWS)
        mbarrier.wait(q_full, turn & 1)
        if computes:
            first_row, prefix = tile[2] + HALF * ROWS, tile[5]
            positions = prefix + (first_row + gl.arange(0, ROWS, row)) // GROUP
            last_keys = positions
            if AFTER > 0:
                last_keys = gl.minimum(positions + AFTER, end - 1)
            slopes = load_slopes(alibi_slopes, tile, HALF, GROUP, ROWS, row)
            # In the loop, the bias of ALiBi is counted from the tile's last key: the numbers of the keys that
            # count are small, so those of millions of tokens lose no precision.
            origin = end - 1
            row_bias = peak
            if slopes is not None:
                row_bias = slopes * (origin - positions).to(gl.float32)
                peak -= row_bias
                slopes = slopes / scales[0]
            of_tree = rows_of_tree(tree, tile, HALF, GROUP, ROWS, row)
            # Every row sees all keys of the tiles before `full`. A window is short, and all of its tiles are
            # masked.
            full = first
            if WINDOW == 0:
                seen_by_all = prefix + first_row // GROUP + 1 + AFTER
                if tree[0] is not None:
                    seen_by_all = gl.minimum(seen_by_all, prefix)
                full = gl.minimum(gl.maximum(seen_by_all, 0) // BLOCK_N, last)
            if SHARES:
                full = gl.maximum(full, first)
            if CHUNK > 0:
                # Unless the last row's chunk begins where the key tiles do, all of them are masked. Such tiles
                # of two chunks are few, if a chunk is much longer than the tile's queries.
                last_position = prefix + (gl.minimum(first_row + ROWS, tile[3]) - 1) // GROUP
                one_chunk = gl.maximum(last_position, 0) // CHUNK * CHUNK <= first * BLOCK_N
                full = gl.where(one_chunk, full, first)
            stage = count % STAGES
            mbarrier.wait(k_full.index(stage), count // STAGES & 1)
            s = begin_scores(tile_at(k_smem, stage), q_half, layout)
            s = warpgroup_mma_wait(0, deps=[s])
            weights, decay, peak = online_softmax(
                s, peak, last * BLOCK_N, positions, last_keys, slopes, origin, of_tree, scales,
                WINDOW, CHUNK, SOFTCAP, total_width(v_smem) > 64, True, 0,
            )  # fmt: skip
            sums = thread_sums(weights)  # of each of the four threads of a row
            sums_row: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
            if sink_logits is not None:
                sums += gl.convert_layout(total * decay * 0.25, sums_row)[:, None]
            mbarrier.wait(v_full.index(stage), count // STAGES & 1)
            mbarrier.arrive(empty.index(stage))
            pairs = pack_pairs(weights, dtype)
            count += 1
            for FULL in gl.static_range(2 if WINDOW == 0 else 1):
                num_steps = full - first if FULL else last - full
                for j in range(num_steps):
                    # The scores of this tile are computed while the weights of the tile before go into the
                    # output.
                    before = stage
                    stage = count % STAGES
                    mbarrier.wait(k_full.index(stage), count // STAGES & 1)
                    s = begin_scores(tile_at(k_smem, stage), q_half, layout)
                    p = unpack_pairs(pairs, dtype, p_layout)
                    acc = begin_output(p, tile_at(v_smem, before), acc)
                    s = warpgroup_mma_wait(len(v_smem), deps=[s])
                    first_key = ((full if FULL else last) - 1 - j) * BLOCK_N
                    weights, decay, peak = online_softmax(
                        s, peak, first_key, positions, last_keys, slopes, origin, of_tree, scales,
                        WINDOW, CHUNK, SOFTCAP, total_width(v_smem) > 64, FULL == 0, 0,
                    )  # fmt: skip
                    sums = sums * gl.convert_layout(decay, sums_row)[:, None] + thread_sums(weights)
                    # This wait also ends a basic block; without it ptxas moves the next wait above the softmax.
                    mbarrier.wait(v_full.index(stage), count // STAGES & 1)
                    acc = wait_output(acc, (p,))
                    mbarrier.arrive(empty.index(stage))
                    pairs = pack_pairs(weights, dtype)
                    acc = scale_rows(acc, decay)
                    count += 1
            mbarrier.arrive(q_empty)
            fence_async_shared()
            p = unpack_pairs(pairs, dtype, p_layout)
            acc = begin_output(p, tile_at(v_smem, stage), acc)
            acc = wait_output(acc, ())
            total = gl.convert_layout(gl.sum(sums, 1), row)
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
                write_part(acc, peak, total, partials, piece[2], num_kv_heads, tile, HALF)
            else:
                write_tile(acc, peak, total, out, lse, num_kv_heads * GROUP, out_strides, tile, HALF, GROUP)
        else:
            write_tile(acc, peak, total, out, lse, num_kv_heads * GROUP, out_strides, tile, HALF, GROUP)
        turn += 1
        mbarrier.wait(item_full, turn & 1)
        item = gl.max(item_smem.load(one), 0)


@gluon.jit(do_not_specialize=["num_kv_heads"], do_not_specialize_on_alignment=["items", "counters"])
def _hopper_kernel(
    q,  # `Heads`
    cache,  # `Cache`
    index,  # `Index`
    items,  # [capacity, 12]
    counters,  # [4]: items taken, programs finished, items to begin at, heads of a section
    outputs,  # `Outputs`; its parts are [parts, num_kv_heads, BLOCK_M, DV] and [parts, num_kv_heads, BLOCK_M]
    num_kv_heads,
    score_scale,
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
    COMPUTE_REGISTERS: gl.constexpr = 208 if DV > 128 else 200
    dtype: gl.constexpr = q.data.dtype.element_ty
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    item_smem = gl.allocate_shared_memory(gl.int32, [1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_smem = allocate_tiles(dtype, 2, BLOCK_M // 2, DK)
    k_smem = allocate_tiles(dtype, STAGES, BLOCK_N, DK)
    v_smem = allocate_tiles(dtype, STAGES, BLOCK_N, DV)
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
    of_scores = (
        features.sink_logits,
        features.slopes,
        (features.tree, features.tree_words, features.stride_tree),
    )
    tensors = items, outputs.out, outputs.lse, (outputs.partial_out, outputs.partial_lse), of_scores
    inputs = q.data, cache.k, cache.v, items, counters
    scales, out_strides = (score_scale, features.cap_scale), (outputs.stride_token, outputs.stride_head)
    k_strides, v_strides = (
        (cache.stride_k_slot, cache.stride_k_head),
        (cache.stride_v_slot, cache.stride_v_head),
    )
    strides = ((q.stride_token, q.stride_head), k_strides, v_strides)
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
            (_gather, (
                inputs, index, num_kv_heads, strides, shared, GROUP, WINDOW, CHUNK, AFTER, SHARES,
            )),
        ],
        [WARPS, WARPS],
        [COMPUTE_REGISTERS, _REGISTERS - 2 * COMPUTE_REGISTERS],
    )  # fmt: skip


def launch_hopper_prefill(
    q: Tensor,
    cache: Cache,
    index: Index,
    items: Tensor,
    counters: Tensor,
    outputs: Outputs,
    launch: tuning.Launch,
    variants: Sequence[Variant],
    num_shares: int,
    scale: float,
    causal: bool,
) -> None:
    """Computes the items of a plan, whose tiles have to be as high as `launch` says
    (`tuning.hopper_prefill_launch`).

    The tensors are as in `prefill_attention`, with q and the caches of one 16-bit type. The strides of q, the
    caches and out, except the last ones, and their addresses in bytes have to be multiples of 16. The variants
    are of `VARIANTS`. Nothing is checked.
    """
    num_heads, key_dim = q.shape[1:]
    num_kv_heads, value_dim = cache.v.shape[1:]
    num_programs = min(num_kv_heads * num_shares, tuning.device_class(q.device).num_multiprocessors)
    features, score_scale = features_of(variants, scale, causal)
    numbers = (
        num_heads // num_kv_heads, key_dim, value_dim, launch.block_m, key_dim, value_dim, launch.block_n,
        causal, 0, False,
    )  # fmt: skip
    _hopper_kernel[(num_programs,)](
        heads_record(q),
        cache,
        in_gluon(index),
        items,
        counters,
        outputs,
        num_kv_heads,
        score_scale,
        features,
        Shape(*map(gl.constexpr, numbers)),
        STAGES=launch.num_stages,
        SHARES=outputs.partial_out is not None,
        num_warps=4,  # of the first warpgroup
    )
