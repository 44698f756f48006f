"""Attends from a tile of queries to a range of keys, tile by tile, with a running softmax. Decode and prefill
share this loop. `attention_reference.py` has its reference, and `lookups/` the ways in which the index finds a
token's slot."""

import triton
import triton.language as tl

from lightkv.triton_kernels.attention.variants.hooks import change_scores, hide, load_ahead, offset_of
from lightkv.triton_kernels.quantised.unpack import (
    field_bias,
    field_factor,
    fields_of,
    fit_one_word,
    has_zero_point,
    is_biased,
    k_groups,
    kind_of,
    load_scale_word,
    load_scales,
    restore,
    scales_of,
    unpack,
    v_groups,
    weight_factor,
    word_block,
    words_of,
)

from .records import Sums


@triton.jit
def slots_at(index_row, positions, valid, SHIFT: tl.constexpr):
    """Returns the slots, int64, of the tokens at `positions` of the row that begins at `index_row`. Positions
    that are not valid read no index entry."""
    entries = tl.load(index_row + (positions >> SHIFT), mask=valid, other=0)
    return (entries + (positions & (2**SHIFT - 1))).to(tl.int64)


@triton.jit
def find_slots(index, row, positions, valid):
    """Returns the slots, int64, of the tokens at `positions` of a row, int64, of the index `Index`. Positions
    that are not valid read no index entry."""
    start, entries = index.hooks.place(index, row, positions, valid)
    return slots_at(start, entries, valid, index.SHIFT)


@triton.jit
def load_rows(
    cache_head, slots, valid, stride_slot, D: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
    TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Loads one head's K or V at `slots`, [BLOCK_N, BLOCK_D] or transposed; zeros where not valid: a free slot
    may hold NaN."""
    dims = tl.expand_dims(tl.arange(0, BLOCK_D), 1 if TRANSPOSED else 0)
    slots = tl.expand_dims(slots, 0 if TRANSPOSED else 1)
    pointers = cache_head + slots * stride_slot + dims
    if MASKED:
        mask = tl.expand_dims(valid, 0 if TRANSPOSED else 1) & (dims < D)
        rows = tl.load(pointers, mask=mask, other=0.0)
    elif D != BLOCK_D:
        rows = tl.load(pointers, mask=dims < D, other=0.0)
    else:
        rows = tl.load(pointers)
    return rows


@triton.jit
def query_for(part, KIND: tl.constexpr, PACKED: tl.constexpr):
    """Returns dims of a query in the type in which they meet K."""
    if KIND > 0 and PACKED:
        part = tl.clamp(part.to(tl.float32), -65504.0, 65504.0).to(tl.float16)
    return part


@triton.jit
def _dot(a, b, acc):
    """Returns `acc`, transposed, plus the product of a `[M, K]` and b `[K, N]`; with M below 16, which is a
    narrow second factor, but no first one, both are transposed. So `acc` is [N, M] then, and else [M, N]."""
    if a.shape[0] < 16:
        product = tl.dot(tl.trans(b), tl.trans(a), acc, input_precision="ieee")
    else:
        product = tl.dot(a, b, acc, input_precision="ieee")
    return product


@triton.jit
def load_query(heads, in_tile, shape):
    """Loads the tile of the query heads that the pointers `heads`, [BLOCK_M, 1], begin at: a tuple of one tile
    for each field of a word of K, [BLOCK_M, BLOCK_DK / fields], or of the whole heads if K is not quantised."""
    PACKED: tl.constexpr = shape.PACKED
    KIND: tl.constexpr = kind_of(shape.FORMAT)
    words = tl.arange(0, word_block(shape.BLOCK_DK, KIND))
    mask = in_tile[:, None] & (words < words_of(shape.DK, KIND))[None, :]
    tiles = ()  # type: tuple
    for field in tl.static_range(fields_of(KIND)):
        dims = words * fields_of(KIND) + field
        tiles += (query_for(tl.load(heads + dims[None, :], mask=mask, other=0.0), KIND, PACKED),)
    return tiles


@triton.jit
def sum_query(q, FORMAT: tl.constexpr, PACKED: tl.constexpr):
    """Returns two sums of each row of the tiles of `load_query`, [BLOCK_M] float32: of its numbers, and of
    these times `field_bias`. None where nothing is added to the elements of K."""
    KIND: tl.constexpr = kind_of(FORMAT)
    sums = None
    if has_zero_point(FORMAT) or is_biased(KIND, k_groups(FORMAT), PACKED):
        total = tl.sum(q[0].to(tl.float32), 1)
        biased = total * field_bias(KIND, 0, PACKED)
        for part in tl.static_range(1, fields_of(KIND)):
            of_part = tl.sum(q[part].to(tl.float32), 1)
            total += of_part
            biased += of_part * field_bias(KIND, part, PACKED)
        sums = (total, biased)
    return sums


@triton.jit
def finish_output(sums, in_tile, FIELD: tl.constexpr, shape):
    """Returns a part of the output of `Sums`, divided by the sum of the weights, its dims, and which of it
    exists."""
    FORMAT: tl.constexpr = shape.FORMAT
    PACKED: tl.constexpr = shape.PACKED
    KIND: tl.constexpr = kind_of(FORMAT)
    words = tl.arange(0, word_block(shape.BLOCK_DV, KIND))
    mask = in_tile[:, None] & (words < words_of(shape.DV, KIND))[None, :]
    divisor = tl.where(sums.total > 0.0, sums.total, 1.0)
    if v_groups(FORMAT) == 1:
        divisor = divisor * weight_factor(KIND, PACKED)
    if is_biased(KIND, v_groups(FORMAT), PACKED) and field_factor(KIND, FIELD, PACKED) != 1.0:
        divisor = divisor * field_factor(KIND, FIELD, PACKED)
    part = sums.acc[FIELD]
    if part.shape[1] < 16:
        part = tl.trans(part)
    return part / divisor[:, None], words * fields_of(KIND) + FIELD, mask


@triton.jit
def key_scores(q, q_sums, words, beside, FORMAT: tl.constexpr, PACKED: tl.constexpr):
    """Returns the dot products of queries and keys, [BLOCK_M, BLOCK_N]."""
    KIND: tl.constexpr = kind_of(FORMAT)
    GROUPS: tl.constexpr = k_groups(FORMAT)
    HAS_ZERO_POINT: tl.constexpr = has_zero_point(FORMAT)
    BIASED: tl.constexpr = is_biased(KIND, GROUPS, PACKED)
    tiles = unpack(words, KIND, q[0].dtype, PACKED, BIASED)
    start = None
    if BIASED and q[0].shape[0] >= 16:
        shape: tl.constexpr = (q[0].shape[0], words.shape[0])
        start = tl.broadcast_to(-q_sums[1][:, None], shape)
    scores = _dot(q[0], tl.trans(restore(tiles[0], beside, GROUPS, HAS_ZERO_POINT)), start)
    for part in tl.static_range(1, fields_of(KIND)):
        k = restore(tiles[part], beside, GROUPS, HAS_ZERO_POINT)
        of_part = q[part]
        if BIASED and field_factor(KIND, part, PACKED) != 1.0:
            of_part = of_part * (1.0 / field_factor(KIND, part, PACKED))
        scores = _dot(of_part, tl.trans(k), scores)
    if q[0].shape[0] < 16:
        scores = tl.trans(scores)
        if BIASED:
            scores -= q_sums[1][:, None]
    if GROUPS == 1:
        scores = scores * beside[0][None, :]
        if HAS_ZERO_POINT:
            scores += q_sums[0][:, None] * beside[1][None, :]
    return scores


@triton.jit
def _add_field(
    acc, weights, v, shifts, decay, beside, FIELD: tl.constexpr, FORMAT: tl.constexpr, PACKED: tl.constexpr
):
    """Returns a part of the output, decayed, with the weighted values of a tile of keys."""
    KIND: tl.constexpr = kind_of(FORMAT)
    BIASED: tl.constexpr = is_biased(KIND, v_groups(FORMAT), PACKED)
    FACTOR: tl.constexpr = field_factor(KIND, FIELD, PACKED) if BIASED else 1.0
    ACROSS: tl.constexpr = 0 if weights.shape[0] < 16 else 1  # 0: the output is transposed
    old = acc[FIELD] * tl.expand_dims(decay, ACROSS)
    of_zero_points, of_weights = shifts
    if of_zero_points is not None and BIASED:
        shift = of_zero_points * FACTOR - of_weights * (field_bias(KIND, FIELD, PACKED) * FACTOR)
        old += tl.expand_dims(shift, ACROSS)
    elif of_zero_points is not None:
        old += tl.expand_dims(of_zero_points, ACROSS)
    elif BIASED:
        old += tl.expand_dims(of_weights * (-field_bias(KIND, FIELD, PACKED) * FACTOR), ACROSS)
    values = v[FIELD]
    if weights.shape[0] < 16:
        values = tl.trans(values)
    return _dot(weights, restore(values, beside, v_groups(FORMAT), has_zero_point(FORMAT)), old)


@triton.jit
def add_weighted(
    acc, weights, words, decay, beside, DTYPE: tl.constexpr, FORMAT: tl.constexpr, PACKED: tl.constexpr
):
    """Returns the output, decayed, with the values of a tile of keys, weighted. `DTYPE`: of the dot product, if
    V is not unpacked to float16."""
    KIND: tl.constexpr = kind_of(FORMAT)
    BIASED: tl.constexpr = is_biased(KIND, v_groups(FORMAT), PACKED)
    tiles = unpack(words, KIND, DTYPE, PACKED, BIASED)
    of_zero_points, of_weights = None, None  # what each row's outputs have beside those of the elements
    if v_groups(FORMAT) == 1:
        # Scales go to the weights, so that elements are not touched.
        FACTOR: tl.constexpr = weight_factor(KIND, PACKED)
        scale, zero_point = beside
        if has_zero_point(FORMAT):
            of_zero_points = tl.sum(weights * zero_point[None, :], 1) * FACTOR
        weights = weights * (scale * FACTOR)[None, :]
    weights = weights.to(tiles[0].dtype)
    if BIASED:
        # The bias is taken out tile by tile, so the output that is carried stays small and precise.
        of_weights = tl.sum(weights.to(tl.float32), 1)
    shifts = of_zero_points, of_weights
    sums = ()  # type: tuple
    for field in tl.static_range(fields_of(KIND)):
        sums += (_add_field(acc, weights, tiles, shifts, decay, beside, field, FORMAT, PACKED),)
    return sums


@triton.jit
def attend_keys(
    q,  # of `load_query`
    q_sums,  # of `sum_query`
    sums,  # `Sums` so far; its slots are loaded one tile ahead, so that loads of K need not wait
    cache,  # `Cache`
    kv_head,  # int64
    index,  # `Index`
    row,  # of the index, int64
    query_positions,  # [BLOCK_M]
    variants,
    states,  # of `start_rows`
    begin,
    full_end,
    num_keys,  # no key at num_keys or beyond is read
    score_scale,
    shape,  # `Shape`
    FIRST: tl.constexpr,
):
    """Attends to the keys in [begin, num_keys), tile by tile, with a running softmax. Returns `Sums`.

    Every key in [begin, full_end), which are whole tiles, has to be visible to every query, as far as no score
    hook hides it, and lie within what variants have loaded. Keys from `full_end` on are masked:

        begin ├──── not masked ────┤ full_end ├─ masked ─┤ num_keys

    FIRST: 1 where there are none in [begin, full_end), else 0.
    """
    acc, total, peak, slots = sums
    FORMAT: tl.constexpr = shape.FORMAT
    PACKED: tl.constexpr = shape.PACKED
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    NUM_K: tl.constexpr = words_of(shape.DK, kind_of(FORMAT))
    NUM_V: tl.constexpr = words_of(shape.DV, kind_of(FORMAT))
    BLOCK_K: tl.constexpr = word_block(shape.BLOCK_DK, kind_of(FORMAT))
    BLOCK_V: tl.constexpr = word_block(shape.BLOCK_DV, kind_of(FORMAT))
    IN_ONE_WORD: tl.constexpr = FORMAT > 0 and fit_one_word(
        FORMAT, cache.scales.dtype.element_ty.primitive_bitwidth
    )
    k_head = cache.k + kv_head * cache.stride_k_head
    v_head = cache.v + kv_head * cache.stride_v_head
    if FORMAT > 0:
        k_scales = cache.scales + kv_head * cache.stride_scales_head
        v_scales = k_scales + k_groups(FORMAT) * (2 if has_zero_point(FORMAT) else 1)
        if cache.v_scales is not None:
            v_scales = cache.v_scales + kv_head * cache.stride_scales_head
    # The few tiles in which a variant hides some keys only are not pipelined, since what it reads of them would
    # take memory of K and V.
    MASKED_STAGES: tl.constexpr = 1 if variants.flags.hides_own else None
    for MASKED in tl.static_range(FIRST, 2):
        first = full_end if MASKED else begin
        end = num_keys if MASKED else full_end
        loaded = load_ahead(variants, states, first + tl.arange(0, BLOCK_N), first < end, MASKED)
        for start in tl.range(first, end, BLOCK_N, num_stages=MASKED_STAGES if MASKED else None):
            positions = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            valid = positions < num_keys
            # [BLOCK_N, BLOCK_DK] and [BLOCK_N, BLOCK_DV], of elements or of words; V transposed where `_dot`
            # wants that, since unpacked elements would have to be rearranged
            k = load_rows(k_head, slots, valid, cache.stride_k_slot, NUM_K, BLOCK_K, MASKED, False)
            v = load_rows(
                v_head, slots, valid, cache.stride_v_slot, NUM_V, BLOCK_V, MASKED, peak.shape[0] < 16
            )
            beside_k = None, None
            beside_v = None, None
            if IN_ONE_WORD:
                word = load_scale_word(k_scales, slots, valid, cache.stride_scales_slot, MASKED)
                beside_k, beside_v = scales_of(word, FORMAT, cache.scales.dtype.element_ty)
            elif FORMAT > 0:
                beside_k = load_scales(
                    k_scales, slots, valid, cache.stride_scales_slot, k_groups(FORMAT), BLOCK_K, NUM_K,
                    has_zero_point(FORMAT), MASKED,
                )  # fmt: skip
                beside_v = load_scales(
                    v_scales, slots, valid, cache.stride_scales_slot, v_groups(FORMAT), BLOCK_V, NUM_V,
                    has_zero_point(FORMAT), MASKED,
                )  # fmt: skip
            slots = find_slots(index, row, positions + BLOCK_N, positions + BLOCK_N < num_keys)

            scores = key_scores(q, q_sums, k, beside_k, FORMAT, PACKED)
            scores = change_scores(variants, states, loaded, scores, score_scale)
            loaded = load_ahead(variants, states, positions + BLOCK_N, start + BLOCK_N < end, MASKED)
            if MASKED:
                visible = tl.broadcast_to(valid[None, :], scores.shape)
                if shape.CAUSAL:
                    visible = visible & (positions[None, :] <= query_positions[:, None])
                visible = hide(variants, states, visible, query_positions, positions)
                scores = tl.where(visible, scores, float("-inf"))

            if variants.flags.has_offset:
                offset = offset_of(variants, states, start, query_positions)
                new_peak = tl.maximum(peak, tl.max(scores, 1) * score_scale + offset)
                exponents = scores * score_scale - (new_peak - offset)[:, None]
            else:
                new_peak = tl.maximum(peak, tl.max(scores, 1) * score_scale)
                exponents = scores * score_scale - new_peak[:, None]
            if variants.flags.may_exceed:
                # Where all keys so far have a value like -1e10, the product above, which is rounded only after
                # the subtraction, may exceed the peak by hundreds.
                exponents = tl.minimum(exponents, 0.0)
            weights = tl.exp2(exponents)
            decay = tl.exp2(peak - new_peak)
            total = total * decay + tl.sum(weights, 1)
            acc = add_weighted(acc, weights, v, decay, beside_v, q[0].dtype, FORMAT, PACKED)
            peak = new_peak
    return Sums(acc, total, peak, slots)
