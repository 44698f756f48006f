"""The kernels of the classic paged attention: a program attends to a partition of one sequence's tokens with
the query heads that share a K/V head. `paged_attention_v1.py` says how the blocks are laid out, and has the
reference.

A head's part of a block is contiguous, and is loaded as it lies in memory: a warp reads 512 bytes side by side,
and writes them side by side into shared memory. What the products read from there is in their own order.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.decode import decode_tuning
from lightkv.triton_kernels.attention.records import heads_record
from lightkv.triton_kernels.attention.variants.hooks import (
    LOG2_E,
    Rows,
    change_scores,
    load_ahead,
    offset_of,
    start_rows,
)
from lightkv.triton_kernels.attention.variants.variant import bind

from .paged_attention_inputs import PagedInputs

_LOG2_E = tl.constexpr(LOG2_E)


class Blocks(NamedTuple):
    """K and V of a layer in blocks."""

    k: Any
    v: Any
    stride_k_block: Any
    stride_k_head: Any
    stride_v_block: Any
    stride_v_head: Any


class Partials(NamedTuple):
    """What partitions write: `exp_sums` and `max_logits`, float32 `[num_seqs, H, partitions]`, and `tmp_out`
    `[num_seqs, H, partitions, D]`; contiguous."""

    exp_sums: Any
    max_logits: Any
    tmp_out: Any


class Shape(NamedTuple):
    """The constants of a launch. `GROUP`: query heads of a K/V head. `X`: dims of a vector of K. `BLOCK_SIZE`:
    tokens of a block."""

    GROUP: Any
    D: Any
    X: Any
    BLOCK_SIZE: Any
    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    EARLY: Any


@triton.jit
def _find_blocks(table, positions, num_blocks, BLOCK_SIZE: tl.constexpr):
    """Returns the blocks, int32, of the tokens at `positions`; 0 for positions after the last block."""
    rank = positions // BLOCK_SIZE
    return tl.load(table + rank, mask=rank < num_blocks, other=0)


@triton.jit
def _load_tile(pointers, is_read, ranks, NUM: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Loads K or V of a tile of tokens: zeros for vectors or dims whose rank is not below NUM, of which there
    are some if PADDED is larger, and, if MASKED, where not `is_read`."""
    if MASKED:
        tile = tl.load(pointers, mask=is_read & (ranks < NUM), other=0.0)
    elif PADDED > NUM:
        tile = tl.load(pointers, mask=ranks < NUM, other=0.0)
    else:
        tile = tl.load(pointers)
    return tile


@triton.jit
def _attend_blocks(
    q,  # `Heads`
    blocks,  # `Blocks`
    table,  # pointer to the sequence's blocks
    seq,  # int64
    kv_head,
    heads,  # [BLOCK_M]
    in_tile,  # [BLOCK_M]
    begin,
    end,
    length,  # of the sequence
    variants,
    score_scale,
    shape,  # `Shape`
):
    """Returns the output of the tokens in [begin, end), float32 `[BLOCK_M, BLOCK_D]`, and `[BLOCK_M]` the sum
    of the weights and the largest score, in base 2."""
    D: tl.constexpr = shape.D
    X: tl.constexpr = shape.X
    BLOCK_SIZE: tl.constexpr = shape.BLOCK_SIZE
    BLOCK_M: tl.constexpr = shape.BLOCK_M
    BLOCK_N: tl.constexpr = shape.BLOCK_N
    BLOCK_D: tl.constexpr = shape.BLOCK_D
    q_heads = q.data + seq * q.stride_token + heads * q.stride_head
    k_head = blocks.k + kv_head * blocks.stride_k_head
    v_head = blocks.v + kv_head * blocks.stride_v_head
    query_positions = tl.zeros([BLOCK_M], tl.int32) + (length - 1)
    states = start_rows(variants, Rows(heads, seq, seq, query_positions, in_tile, length - 1))
    # K and V of a tile are loaded as [blocks, elements of a block]:
    #   K   vector 0 of each token, vector 1 of each token, ...; a vector has X dims
    #   V   dim 0 of each token, dim 1 of each token, ...
    IN_BLOCK: tl.constexpr = min(BLOCK_SIZE, BLOCK_N)  # tokens of a tile in one block
    NUM_BLOCKS: tl.constexpr = BLOCK_N // IN_BLOCK
    tokens = tl.arange(0, BLOCK_N)
    dims = tl.arange(0, BLOCK_D)
    q = tl.load(q_heads[:, None] + dims[None, :], mask=in_tile[:, None] & (dims < D)[None, :], other=0.0)
    elements = tl.arange(0, BLOCK_D * IN_BLOCK)
    k_vectors, v_dims = elements // (IN_BLOCK * X), elements // IN_BLOCK
    k_pointers = (k_head + k_vectors * (BLOCK_SIZE * X) + elements % (IN_BLOCK * X))[None, :]
    v_pointers = (v_head + v_dims * BLOCK_SIZE + elements % IN_BLOCK)[None, :]
    ranks = tl.arange(0, NUM_BLOCKS)

    # The peak starts at a finite number, not at -inf: weights of a masked first tile are 0, not NaN.
    peak = tl.full([BLOCK_M], -1.0e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    num_blocks = tl.cdiv(end, BLOCK_SIZE)
    numbers = _find_blocks(table, begin + ranks * IN_BLOCK, num_blocks, BLOCK_SIZE)  # one tile ahead
    full_end = begin + (end - begin) // BLOCK_N * BLOCK_N
    for MASKED in tl.static_range(0, 2):
        for start in tl.range(full_end if MASKED else begin, end if MASKED else full_end, BLOCK_N):
            positions = start + tokens
            valid = positions < end
            firsts = start + ranks * IN_BLOCK
            # Whole blocks are read as vectors; what the last one has after the end may be NaN.
            is_read = (firsts // BLOCK_SIZE < num_blocks)[:, None]
            k_blocks = numbers.to(tl.int64) * blocks.stride_k_block + firsts % BLOCK_SIZE * X
            k = _load_tile(
                k_pointers + k_blocks[:, None], is_read, k_vectors[None, :], D // X, BLOCK_D // X, MASKED
            )
            k = tl.reshape(k, (NUM_BLOCKS, BLOCK_D // X, IN_BLOCK, X))
            k = tl.reshape(tl.permute(k, (1, 3, 0, 2)), (BLOCK_D, BLOCK_N))
            scores = tl.dot(q, k, input_precision="ieee")
            v_blocks = numbers.to(tl.int64) * blocks.stride_v_block + firsts % BLOCK_SIZE
            v = _load_tile(v_pointers + v_blocks[:, None], is_read, v_dims[None, :], D, BLOCK_D, MASKED)
            v = tl.permute(tl.reshape(v, (NUM_BLOCKS, BLOCK_D, IN_BLOCK)), (0, 2, 1))
            v = tl.reshape(v, (BLOCK_N, BLOCK_D))
            if MASKED:
                v = tl.where(valid[:, None], v, 0.0)
            numbers = _find_blocks(table, firsts + BLOCK_N, num_blocks, BLOCK_SIZE)
            loaded = load_ahead(variants, states, positions, True, MASKED)
            scores = change_scores(variants, states, loaded, scores, score_scale) * score_scale
            if variants.flags.has_offset:
                scores += offset_of(variants, states, start, query_positions)[:, None]
            if MASKED:
                scores = tl.where(valid[None, :], scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1))
            weights = tl.exp2(scores - new_peak[:, None])
            decay = tl.exp2(peak - new_peak)
            total = total * decay + tl.sum(weights, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
            peak = new_peak
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    return acc, total, peak


@triton.jit(
    do_not_specialize=["num_partitions", "partition_size"],
    do_not_specialize_on_alignment=["block_tables", "seq_lens"],
)
def _partition_kernel(
    q,  # `Heads`
    blocks,  # `Blocks`
    block_tables,
    stride_table,
    seq_lens,
    partials,  # `Partials`
    num_partitions,
    partition_size,
    variants,
    score_scale,
    shape,  # `Shape`
):
    """Attends to one partition of a sequence's tokens. The grid is (K/V heads times tiles of a group,
    sequences, partitions): a K/V head has as many programs as its query heads have tiles."""
    TILES: tl.constexpr = tl.cdiv(shape.GROUP, shape.BLOCK_M)
    kv_head = tl.program_id(0).to(tl.int64) // TILES
    in_group = tl.program_id(0) % TILES * shape.BLOCK_M + tl.arange(0, shape.BLOCK_M)
    num_heads = tl.num_programs(0) // TILES * shape.GROUP
    heads, in_tile = kv_head * shape.GROUP + in_group, in_group < shape.GROUP
    seq = tl.program_id(1).to(tl.int64)
    partition = tl.program_id(2)
    if shape.EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    length = tl.load(seq_lens + seq)
    # So that the compiler knows that it is a multiple.
    begin = partition * (partition_size // shape.BLOCK_SIZE * shape.BLOCK_SIZE)
    if begin >= length:
        return
    end = tl.minimum(length, begin + partition_size)
    acc, total, peak = _attend_blocks(
        q, blocks, block_tables + seq * stride_table, seq, kv_head, heads, in_tile, begin, end, length,
        variants, score_scale, shape,
    )  # fmt: skip
    of_head = (seq * num_heads + heads) * num_partitions + partition
    tl.store(partials.exp_sums + of_head, total, mask=in_tile)
    tl.store(partials.max_logits + of_head, peak / _LOG2_E, mask=in_tile)
    dims = tl.arange(0, shape.BLOCK_D)
    pointers = partials.tmp_out + of_head[:, None] * shape.D + dims[None, :]
    out_mask = in_tile[:, None] & (dims < shape.D)[None, :]
    tl.store(pointers, acc.to(partials.tmp_out.dtype.element_ty), mask=out_mask)


@triton.jit(
    do_not_specialize=["num_partitions", "partition_size"], do_not_specialize_on_alignment=["seq_lens"]
)
def _combine_kernel(
    partials,  # `Partials`
    seq_lens,
    out,  # `Heads` of [num_seqs, H, D]
    num_partitions,
    partition_size,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Adds up the partitions of a query head, with weights. The grid is (H, sequences)."""
    head = tl.program_id(0).to(tl.int64)
    seq = tl.program_id(1).to(tl.int64)
    tuning.wait_early(EARLY)
    num_used = tl.cdiv(tl.load(seq_lens + seq), partition_size)
    of_head = (seq * tl.num_programs(0) + head) * num_partitions
    dims = tl.arange(0, BLOCK_D)
    peak = -1.0e30
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_used, BLOCK_P):
        rank = start + tl.arange(0, BLOCK_P)
        used = rank < num_used
        logits = tl.load(partials.max_logits + of_head + rank, mask=used, other=float("-inf")) * _LOG2_E
        sums = tl.load(partials.exp_sums + of_head + rank, mask=used, other=0.0)
        pointers = partials.tmp_out + (of_head + rank)[:, None] * D + dims[None, :]
        tile = tl.load(pointers, mask=used[:, None] & (dims < D)[None, :], other=0.0)  # [BLOCK_P, BLOCK_D]
        new_peak = tl.maximum(peak, tl.max(logits, 0))
        weights = tl.exp2(logits - new_peak) * sums
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * tile.to(tl.float32), 0)
        peak = new_peak
    acc = acc / tl.where(total > 0.0, total, 1.0)
    pointers_out = out.data + seq * out.stride_token + head * out.stride_head + dims
    tl.store(pointers_out, acc.to(out.data.dtype.element_ty), mask=dims < D)


def paged_attention_launch(
    device: tuning.DeviceClass, group: int, head_dim: int, element_size: int
) -> tuning.Launch:
    """Returns the tiles of the classic kernel for `group` query heads that share a K/V head: those of decode,
    but with at most 64 heads in a tile; other programs have the rest of a larger group."""
    return decode_tuning.decode_launch(device, min(group, 64), False, head_dim, head_dim, element_size)


def num_programs_for(q: Tensor, k_cache: Tensor) -> int:
    """Returns how many programs attend to one sequence's tokens, all heads together."""
    num_kv_heads = k_cache.shape[1]
    group = q.shape[1] // num_kv_heads
    launch = paged_attention_launch(tuning.device_class(q.device), group, q.shape[2], k_cache.element_size())
    return num_kv_heads * triton.cdiv(group, launch.block_m)


def attend_partitions(inputs: PagedInputs, partials: Partials, partition_size: int, out: Tensor) -> None:
    """Attends to the partitions of each sequence, and adds up what they have found."""
    q, k_cache, v_cache, tables, seq_lens, options = inputs
    num_seqs, num_heads, head_dim = q.shape
    if num_seqs == 0:
        return
    num_kv_heads, _, block_size, x = k_cache.shape[1:]
    group, device = num_heads // num_kv_heads, tuning.device_class(q.device)
    num_partitions, block_d = partials.tmp_out.shape[2], tuning.padded_dim(head_dim)
    launch = paged_attention_launch(device, group, head_dim, k_cache.element_size())
    early = tuning.early_options(q.device)
    is_early = early.pop("EARLY")
    numbers = group, head_dim, x, block_size, launch.block_m, launch.block_n, block_d, is_early
    _partition_kernel[(num_programs_for(q, k_cache), num_seqs, num_partitions)](
        heads_record(q),
        Blocks(k_cache, v_cache, *k_cache.stride()[:2], *v_cache.stride()[:2]),
        tables,
        tables.stride(0),
        seq_lens,
        partials,
        num_partitions,
        partition_size,
        *bind(options.variants, options.scale_for(head_dim)),
        Shape(*map(tl.constexpr, numbers)),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **early,
    )
    # The partitions that a program reads at a time are a tile that stays in registers.
    block_p = min(triton.next_power_of_2(num_partitions), max(1, 4096 // block_d))
    _combine_kernel[(num_heads, num_seqs)](
        partials,
        seq_lens,
        heads_record(out),
        num_partitions,
        partition_size,
        D=head_dim,
        BLOCK_D=block_d,
        BLOCK_P=block_p,
        EARLY=is_early,
        num_warps=1 if num_partitions <= 4 else 4,
        num_stages=2,
        **early,
    )
