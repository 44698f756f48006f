"""The kernel of `restore_kv.py`: a program copies or restores a head of K or V of some tokens to a scratch."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from lightkv.triton_kernels.attention.attend_keys import slots_at


@triton.jit
def _block_of(starts, lengths, num_requests, capacity, KV_HEADS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Returns which head of K (or, from KV_HEADS on, of V) a program fills, its first row of the scratch, and
    whether a request has rows from there on. Heads run fastest, so neighbouring programs read neighbouring
    heads."""
    head = tl.program_id(0) % (2 * KV_HEADS)
    first = tl.program_id(0) // (2 * KV_HEADS) * BLOCK_T
    last = num_requests - 1
    end = tl.minimum(tl.load(starts + last) + tl.load(lengths + last), capacity)
    return head, first, first < end


@triton.jit
def _find_requests(starts, first, num_requests, TURNS: tl.constexpr, BLOCK_T: tl.constexpr):
    """Returns the last request that begins at or before each token of the scratch from `first` on, int32
    [BLOCK_T], or -1: that of the first token by bisection, where 2**TURNS is more than the number of requests,
    and then those that begin within the block, mostly none."""
    found = -1
    for turn in tl.static_range(TURNS):
        later = found + 2 ** (TURNS - 1 - turn)
        begin = tl.load(starts + later, mask=later < num_requests, other=2147483647)
        found = tl.where(begin <= first, later, found)
    tokens = first + tl.arange(0, BLOCK_T)
    requests = tl.full([BLOCK_T], 0, tl.int32) + found
    following = found + 1
    begin = tl.load(starts + following, mask=following < num_requests, other=2147483647)
    while begin < first + BLOCK_T:
        requests = tl.where(begin <= tokens, following, requests)
        following += 1
        begin = tl.load(starts + following, mask=following < num_requests, other=2147483647)
    return requests


class Heads(NamedTuple):
    """K or V, and where it is restored to. `scales`: of K and V, or None; the first one of a head is
    `FIRST_SCALE`. `ELEMENTS`: of `constants_of`."""

    stored: Any
    scales: Any
    out: Any
    stride_slot: Any
    stride_head: Any
    stride_scales_slot: Any
    stride_scales_head: Any
    stride_out_token: Any
    stride_out_head: Any
    FIRST_SCALE: Any
    ELEMENTS: Any
    D: Any
    BLOCK_D: Any


@triton.jit
def _restore_head(
    heads,  # `Heads`
    head,  # int64
    slot,  # [BLOCK_T, 1] of each token, int64
    token,  # [BLOCK_T, 1] of the scratch, int64
    valid,  # [BLOCK_T]
    BLOCK_T: tl.constexpr,
):
    ELEMENTS: tl.constexpr = heads.ELEMENTS
    D: tl.constexpr = heads.D
    BLOCK_D: tl.constexpr = heads.BLOCK_D
    scales = None
    if heads.scales is not None:
        scales = heads.scales + slot * heads.stride_scales_slot
        scales += head * heads.stride_scales_head + heads.FIRST_SCALE
    source = heads.stored + slot * heads.stride_slot + head * heads.stride_head
    target = heads.out + token * heads.stride_out_token + head * heads.stride_out_head
    BITS: tl.constexpr = ELEMENTS[0]
    GROUP: tl.constexpr = ELEMENTS[2]
    HAS_ZERO_POINT: tl.constexpr = ELEMENTS[3]
    WIDTH: tl.constexpr = D // 2 if BITS == 4 else D
    places = tl.arange(0, BLOCK_D // 2 if BITS == 4 else BLOCK_D)
    in_row = valid[:, None] & (places < WIDTH)[None, :]
    if BITS == 4:
        stored = tl.load(source + places[None, :], mask=in_row, other=0).to(tl.int32)
        # Shifts of a signed number repeat the sign of a nibble, which is at the top.
        low, high = (stored << 28) >> 28, (stored << 24) >> 28
        tile = tl.reshape(tl.join(low, high), [BLOCK_T, BLOCK_D]).to(tl.float32)
    else:
        tile = tl.load(source + places[None, :], mask=in_row, other=0.0).to(tl.float32)
    if BITS < 16:
        GROUPS: tl.constexpr = D // GROUP if GROUP > 0 else 1
        BLOCK_GROUP: tl.constexpr = GROUP if GROUP > 0 else BLOCK_D
        BLOCK_GROUPS: tl.constexpr = BLOCK_D // BLOCK_GROUP
        groups = tl.arange(0, BLOCK_GROUPS)
        in_scales = valid[:, None] & (groups < GROUPS)[None, :]
        scales += groups[None, :]
        scale = tl.load(scales, mask=in_scales, other=0.0).to(tl.float32)  # [BLOCK_T, BLOCK_GROUPS]
        grouped = tl.reshape(tile, [BLOCK_T, BLOCK_GROUPS, BLOCK_GROUP]) * scale[:, :, None]
        if HAS_ZERO_POINT:
            zero_point = tl.load(scales + GROUPS, mask=in_scales, other=0.0).to(tl.float32)
            grouped += zero_point[:, :, None]
        tile = tl.reshape(grouped, [BLOCK_T, BLOCK_D])
    dims = tl.arange(0, BLOCK_D)
    in_head = valid[:, None] & (dims < D)[None, :]
    tl.store(target + dims[None, :], tile.to(target.dtype.element_ty), mask=in_head)


class Words(NamedTuple):
    """K or V as words of four elements, and the scratch that it is copied to. `WORDS`: of a head."""

    stored: Any
    out: Any
    stride_slot: Any
    stride_head: Any
    WORDS: Any
    BLOCK: Any


@triton.jit
def _byte(words, WHICH: tl.constexpr):
    """Returns one of the four bytes of int32 words."""
    return (words >> (8 * WHICH)) & 255


@triton.jit
def _bytes_of(w0, w1, w2, w3, WHICH: tl.constexpr):
    """Returns words of the same byte of four words."""
    low = _byte(w0, WHICH) | (_byte(w1, WHICH) << 8)
    return low | (_byte(w2, WHICH) << 16) | (_byte(w3, WHICH) << 24)


@triton.jit
def _load_keys(heads, head, index_row, keys, length, words, SHIFT: tl.constexpr):
    """Returns the words of keys, zeros for those that are not there. `heads`: `Words`."""
    valid = keys < length
    slots = slots_at(index_row, keys, valid, SHIFT)
    mask = valid[:, None] & (words < heads.WORDS)[None, :]
    places = heads.stored + head * heads.stride_head + slots[:, None] * heads.stride_slot
    return tl.load(places + words[None, :], mask=mask, other=0)


@triton.jit
def _copy_keys(
    heads, head, target, index_row, begin, length, stride_out, SHIFT: tl.constexpr, BLOCK_T: tl.constexpr
):
    keys = tl.arange(0, BLOCK_T)
    words = tl.arange(0, heads.BLOCK)
    found = _load_keys(heads, head, index_row, begin + keys, length, words, SHIFT)
    mask = (begin + keys < length)[:, None] & (words < heads.WORDS)[None, :]
    tl.store(target + keys[:, None] * stride_out + words[None, :], found, mask=mask)


@triton.jit
def _transpose_values(
    heads, head, target, index_row, begin, length, stride_out, SHIFT: tl.constexpr, BLOCK_T: tl.constexpr
):
    """Four words of four keys' V become four words of four dims: [BLOCK_T / 4, words] each."""
    fours = tl.arange(0, BLOCK_T // 4)
    words = tl.arange(0, heads.BLOCK)
    keys = begin + fours // 4 * 16 + fours % 4 * 2  # the first of the four
    w0 = _load_keys(heads, head, index_row, keys, length, words, SHIFT)
    w1 = _load_keys(heads, head, index_row, keys + 1, length, words, SHIFT)
    w2 = _load_keys(heads, head, index_row, keys + 8, length, words, SHIFT)
    w3 = _load_keys(heads, head, index_row, keys + 9, length, words, SHIFT)
    target += 4 * words.to(tl.int64)[:, None] * stride_out + fours[None, :]
    mask = (words < heads.WORDS)[:, None] & (fours >= 0)[None, :]
    for which in tl.static_range(4):
        tl.store(target + which * stride_out, tl.trans(_bytes_of(w0, w1, w2, w3, which)), mask=mask)


class Shape(NamedTuple):
    """The constants of a launch. `TURNS`: of `_find_requests`. `BLOCK_T`: tokens of a program. `ALIGNED`: the
    scratch is in fp8."""

    KV_HEADS: Any
    SHIFT: Any
    TURNS: Any
    BLOCK_T: Any
    ALIGNED: Any


@triton.jit(
    do_not_specialize=["num_requests", "capacity"],
    do_not_specialize_on_alignment=["index", "rows", "lengths", "begins"],
)
def restore_kv_kernel(
    k,  # `Heads`, or in fp8 `Words`
    v,
    index,
    rows,
    lengths,
    begins,
    num_requests,
    capacity,
    stride_index,
    shape,  # `Shape`
):
    KV_HEADS: tl.constexpr = shape.KV_HEADS
    SHIFT: tl.constexpr = shape.SHIFT
    TURNS: tl.constexpr = shape.TURNS
    BLOCK_T: tl.constexpr = shape.BLOCK_T
    program, first, exists = _block_of(begins, lengths, num_requests, capacity, KV_HEADS, BLOCK_T)
    if exists:
        request = _find_requests(begins, first, num_requests, TURNS, BLOCK_T)
        if shape.ALIGNED:
            # Requests begin at multiples of the block, so all of it is of the first token's.
            request = tl.max(request)
            found = request >= 0
            length = tl.load(lengths + request, mask=found, other=0)
            begin = first - tl.load(begins + request, mask=found, other=0)
            row = tl.load(rows + request, mask=found, other=0).to(tl.int64)
            index_row = index + row * stride_index
            if program < KV_HEADS:
                head = program.to(tl.int64)
                target = k.out + (first.to(tl.int64) * KV_HEADS + head) * k.WORDS
                _copy_keys(k, head, target, index_row, begin, length, KV_HEADS * k.WORDS, SHIFT, BLOCK_T)
            else:
                head = (program - KV_HEADS).to(tl.int64)
                target = v.out + head * v.WORDS * capacity + first // 4
                _transpose_values(v, head, target, index_row, begin, length, capacity // 4, SHIFT, BLOCK_T)
        else:
            tokens = first + tl.arange(0, BLOCK_T)
            is_found = request >= 0
            position = tokens - tl.load(begins + request, mask=is_found, other=0)
            length = tl.load(lengths + request, mask=is_found, other=0)
            valid = is_found & (position < length) & (tokens < capacity)
            row = tl.load(rows + request, mask=valid, other=0).to(tl.int64)
            slot = slots_at(index + row * stride_index, position, valid, SHIFT)[:, None]  # [BLOCK_T, 1]
            token = tokens.to(tl.int64)[:, None]
            if program < KV_HEADS:
                _restore_head(k, program.to(tl.int64), slot, token, valid, BLOCK_T)
            else:
                _restore_head(v, (program - KV_HEADS).to(tl.int64), slot, token, valid, BLOCK_T)
