"""The kernels of the classic paged attention: a program attends to tokens of one sequence with the query heads
that share a K/V head. `paged_attention_v1.py` says how the blocks are laid out, and has the reference.

A head's part of a block is contiguous, and is loaded as it lies in memory: a warp reads 512 bytes side by side,
and writes them side by side into shared memory. What the products read from there is in their own order.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.decode.decode_plan import ITEM_FIELDS, PART_FIELDS, SHARE_FIELDS
from lightkv.triton_kernels.attention.variants.alibi import load_slopes
from lightkv.triton_kernels.attention.variants.hooks import LOG2_E

_LOG2_E = tl.constexpr(LOG2_E)
_UNIT = tl.constexpr(tuning.DECODE_UNIT)
_ITEM_FIELDS = tl.constexpr(ITEM_FIELDS)
_SHARE_FIELDS = tl.constexpr(SHARE_FIELDS)
_PART_FIELDS = tl.constexpr(PART_FIELDS)


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
    q_heads,  # pointers to the query heads, [BLOCK_M]
    in_tile,  # [BLOCK_M]
    slopes,  # [BLOCK_M] float32, of ALiBi, in base 2; or None
    k_head,  # pointers to a K/V head of block 0
    v_head,
    table,  # pointer to the sequence's blocks
    begin,
    end,
    length,  # of the sequence
    stride_k_block,
    stride_v_block,
    score_scale,
    D: tl.constexpr,
    X: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Returns the output of the tokens in [begin, end), float32 `[BLOCK_M, BLOCK_D]`, and `[BLOCK_M]` the sum
    of the weights and the largest score, in base 2."""
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
    blocks = _find_blocks(table, begin + ranks * IN_BLOCK, num_blocks, BLOCK_SIZE)  # one tile ahead
    full_end = begin + (end - begin) // BLOCK_N * BLOCK_N
    for MASKED in tl.static_range(0, 2):
        for start in tl.range(full_end if MASKED else begin, end if MASKED else full_end, BLOCK_N):
            positions = start + tokens
            valid = positions < end
            firsts = start + ranks * IN_BLOCK
            # Whole blocks are read as vectors; what the last one has after the end may be NaN.
            is_read = (firsts // BLOCK_SIZE < num_blocks)[:, None]
            k_blocks = blocks.to(tl.int64) * stride_k_block + firsts % BLOCK_SIZE * X
            k = _load_tile(
                k_pointers + k_blocks[:, None], is_read, k_vectors[None, :], D // X, BLOCK_D // X, MASKED
            )
            k = tl.reshape(k, (NUM_BLOCKS, BLOCK_D // X, IN_BLOCK, X))
            k = tl.reshape(tl.permute(k, (1, 3, 0, 2)), (BLOCK_D, BLOCK_N))
            scores = tl.dot(q, k, input_precision="ieee")
            v_blocks = blocks.to(tl.int64) * stride_v_block + firsts % BLOCK_SIZE
            v = _load_tile(v_pointers + v_blocks[:, None], is_read, v_dims[None, :], D, BLOCK_D, MASKED)
            v = tl.permute(tl.reshape(v, (NUM_BLOCKS, BLOCK_D, IN_BLOCK)), (0, 2, 1))
            v = tl.reshape(v, (BLOCK_N, BLOCK_D))
            if MASKED:
                v = tl.where(valid[:, None], v, 0.0)
            blocks = _find_blocks(table, firsts + BLOCK_N, num_blocks, BLOCK_SIZE)
            scores *= score_scale
            if slopes is not None:
                scores += slopes[:, None] * (positions - (length - 1)).to(tl.float32)[None, :]
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
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "alibi_slopes", "exp_sums", "max_logits"],
)
def partition_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens,
    alibi_slopes,  # [H] float32; or None
    out,  # [num_seqs, H, D], or in partitions [num_seqs, H, num_partitions, D], contiguous
    exp_sums,  # float32 [num_seqs, H, num_partitions]; None in one pass
    max_logits,  # likewise
    num_partitions,
    partition_size,
    score_scale,
    stride_q_seq,
    stride_q_h,
    stride_k_block,
    stride_k_h,
    stride_v_block,
    stride_v_h,
    stride_table,
    stride_out_seq,
    stride_out_h,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    X: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IN_PARTITIONS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attends to one partition of a sequence's tokens. The grid is (K/V heads times tiles of a group,
    sequences, partitions)."""
    TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(0).to(tl.int64) // TILES
    seq = tl.program_id(1).to(tl.int64)
    partition = tl.program_id(2)
    in_group = tl.program_id(0) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    in_tile = in_group < GROUP
    heads = kv_head * GROUP + in_group
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    length = tl.load(seq_lens + seq)
    begin = 0
    end = length
    if IN_PARTITIONS:
        begin = partition * (
            partition_size // BLOCK_SIZE * BLOCK_SIZE
        )  # so that the compiler knows the multiple
        if begin >= length:
            return
        end = tl.minimum(length, begin + partition_size)
    slopes = None
    if alibi_slopes is not None:
        slopes = load_slopes(alibi_slopes, heads, in_tile)
    acc, total, peak = _attend_blocks(
        q + seq * stride_q_seq + heads * stride_q_h, in_tile, slopes, k_cache + kv_head * stride_k_h,
        v_cache + kv_head * stride_v_h, block_tables + seq * stride_table, begin, end, length, stride_k_block,
        stride_v_block, score_scale, D, X, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
    )  # fmt: skip
    out += seq * stride_out_seq
    if IN_PARTITIONS:
        out += partition * D
        of_head = (seq * (tl.num_programs(0) // TILES * GROUP) + heads) * num_partitions + partition
        tl.store(exp_sums + of_head, total, mask=in_tile)
        tl.store(max_logits + of_head, peak / _LOG2_E, mask=in_tile)
    dims = tl.arange(0, BLOCK_D)
    pointers = out + (heads * stride_out_h)[:, None] + dims[None, :]
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=in_tile[:, None] & (dims < D)[None, :])


@triton.jit(
    do_not_specialize_on_alignment=["block_tables", "seq_lens", "alibi_slopes", "items", "shares", "parts"]
)
def share_kernel(
    q,
    k_cache,
    v_cache,
    block_tables,
    seq_lens,
    alibi_slopes,  # [H] float32; or None
    items,  # of a `DecodePlan`
    shares,
    parts,
    out,  # [num_seqs, H, D]
    partial_out,  # [parts, H, D] float32
    partial_lse,  # [parts, H] float32, base 2
    score_scale,
    stride_q_seq,
    stride_q_h,
    stride_k_block,
    stride_k_h,
    stride_v_block,
    stride_v_h,
    stride_table,
    stride_out_seq,
    stride_out_h,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    X: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Attends to a share of the batch's tokens, item by item. The grid is (K/V heads times tiles of a group,
    workers)."""
    TILES: tl.constexpr = (GROUP + BLOCK_M - 1) // BLOCK_M
    kv_head = tl.program_id(0).to(tl.int64) // TILES
    num_heads = tl.num_programs(0) // TILES * GROUP
    in_group = tl.program_id(0) % TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    in_tile = in_group < GROUP
    heads = kv_head * GROUP + in_group
    dims = tl.arange(0, BLOCK_D)
    out_mask = in_tile[:, None] & (dims < D)[None, :]
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    share = shares + tl.program_id(1) * _SHARE_FIELDS
    for item in range(tl.load(share), tl.load(share + _SHARE_FIELDS)):
        fields = items + item * _ITEM_FIELDS
        seq = tl.load(fields).to(tl.int64)
        begin = tl.load(fields + 2) // _UNIT * _UNIT  # a multiple anyway: so that the compiler knows
        end = tl.load(fields + 3)
        num_parts = tl.load(parts + seq * _PART_FIELDS + 1)
        length = tl.load(seq_lens + seq)
        slopes = None
        if alibi_slopes is not None:
            slopes = load_slopes(alibi_slopes, heads, in_tile)
        acc, total, peak = _attend_blocks(
            q + seq * stride_q_seq + heads * stride_q_h, in_tile, slopes, k_cache + kv_head * stride_k_h,
            v_cache + kv_head * stride_v_h, block_tables + seq * stride_table, begin, end, length,
            stride_k_block, stride_v_block, score_scale, D, X, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
        )  # fmt: skip
        if num_parts == 1:
            pointers = out + seq * stride_out_seq + (heads * stride_out_h)[:, None] + dims[None, :]
            tl.store(pointers, acc.to(out.dtype.element_ty), mask=out_mask)
        else:
            partials = item * num_heads + heads  # heads are int64
            tl.store(partial_out + partials[:, None] * D + dims[None, :], acc, mask=out_mask)
            tl.store(partial_lse + partials, peak + tl.log2(total), mask=in_tile)


@triton.jit(
    do_not_specialize=["num_partitions", "partition_size"], do_not_specialize_on_alignment=["seq_lens"]
)
def combine_kernel(
    tmp_out,  # [num_seqs, H, num_partitions, D], contiguous
    exp_sums,  # float32 [num_seqs, H, num_partitions], contiguous
    max_logits,
    seq_lens,
    out,  # [num_seqs, H, D]
    num_partitions,
    partition_size,
    stride_out_seq,
    stride_out_h,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Adds up the partitions of a query head, with weights. The grid is (H, sequences)."""
    head = tl.program_id(0).to(tl.int64)
    seq = tl.program_id(1).to(tl.int64)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    num_used = tl.cdiv(tl.load(seq_lens + seq), partition_size)
    of_head = (seq * tl.num_programs(0) + head) * num_partitions
    dims = tl.arange(0, BLOCK_D)
    peak = -1.0e30
    total = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for start in range(0, num_used, BLOCK_P):
        rank = start + tl.arange(0, BLOCK_P)
        used = rank < num_used
        logits = tl.load(max_logits + of_head + rank, mask=used, other=float("-inf")) * _LOG2_E
        sums = tl.load(exp_sums + of_head + rank, mask=used, other=0.0)
        pointers = tmp_out + (of_head + rank)[:, None] * D + dims[None, :]
        tile = tl.load(pointers, mask=used[:, None] & (dims < D)[None, :], other=0.0)  # [BLOCK_P, BLOCK_D]
        new_peak = tl.maximum(peak, tl.max(logits, 0))
        weights = tl.exp2(logits - new_peak) * sums
        decay = tl.exp2(peak - new_peak)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay + tl.sum(weights[:, None] * tile.to(tl.float32), 0)
        peak = new_peak
    acc = acc / tl.where(total > 0.0, total, 1.0)
    pointers_out = out + seq * stride_out_seq + head * stride_out_h + dims
    tl.store(pointers_out, acc.to(out.dtype.element_ty), mask=dims < D)


def paged_attention_launch(
    device: tuning.DeviceClass, group: int, head_dim: int, element_size: int
) -> tuning.Launch:
    """Returns the tiles of `paged_attention_v1` for `group` query heads that share a K/V head: those of decode,
    but with at most 64 heads in a tile; other programs have the rest of a larger group."""
    return tuning.decode_launch(device, min(group, 64), False, head_dim, head_dim, element_size)


def tile_options(q: Tensor, k_cache: Tensor) -> tuple[int, dict[str, Any]]:
    """Returns how many programs attend to one sequence's tokens, all heads together, and the shapes, tiles and
    launch options of `partition_kernel` and `share_kernel`. `q`: `[num_seqs, H, D]`; `k_cache`: as in
    `paged_attention_v1`."""
    num_heads, head_dim = q.shape[1:]
    num_kv_heads, _, block_size, x = k_cache.shape[1:]
    group = num_heads // num_kv_heads
    device = tuning.device_class(q.device)
    launch = paged_attention_launch(device, group, head_dim, k_cache.element_size())
    early = tuning.has_early_launch(device)
    options: dict[str, Any] = {"launch_pdl": True} if early else {}
    options |= {
        "GROUP": group,
        "D": head_dim,
        "X": x,
        "BLOCK_SIZE": block_size,
        "BLOCK_M": launch.block_m,
        "BLOCK_N": launch.block_n,
        "BLOCK_D": tuning.padded_dim(head_dim),
        "EARLY": early,
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
    }
    return num_kv_heads * triton.cdiv(group, launch.block_m), options


def attend_partitions(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    alibi_slopes: Tensor | None,
    out: Tensor,
    exp_sums: Tensor | None,
    max_logits: Tensor | None,
    scale: float,
    partition_size: int,
) -> None:
    """Launches `partition_kernel`, with the arguments of `paged_attention_v2`: in partitions `out` is its
    `tmp_out`, and without sums and logits there is one pass."""
    if len(q) == 0:
        return
    num_partitions = 1 if exp_sums is None else exp_sums.shape[2]
    num_programs, options = tile_options(q, k_cache)
    partition_kernel[(num_programs, len(q), num_partitions)](
        q,
        k_cache,
        v_cache,
        block_tables,
        seq_lens,
        alibi_slopes,
        out,
        exp_sums,
        max_logits,
        num_partitions,
        partition_size,
        scale * LOG2_E,
        *q.stride()[:2],
        *k_cache.stride()[:2],
        *v_cache.stride()[:2],
        block_tables.stride(0),
        *out.stride()[:2],
        IN_PARTITIONS=exp_sums is not None,
        **options,
    )
