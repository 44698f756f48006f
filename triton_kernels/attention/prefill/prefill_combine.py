"""The second half of prefill where keys were shared out: adds up the partial outputs of each tile that was cut,
with weights.

A part of a tile is a normalised output and the log-sum-exp of its scores (base 2). With m the largest, a
part's weight is 2**(lse - m). The second piece of a tile is the first item of its share, and names the tile's
parts (`prefill_plan.py`). So the programs are one for each share but the first, each K/V head, and a few rows
of a tile; those without a second piece end at once.

Its programs are launched once those of prefill have ended, without waiting for their memory. They must not be
launched before, as those of `decode_combine` are: prefill leaves a few multiprocessors idle, on which the
programs that have parts to read would crowd.

The parts are made in each call and are free after it, so layers, and graphs with a common memory pool, use the
same memory one after the other.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels import tuning
from lightkv.triton_kernels.attention.merge_states import merge_states
from lightkv.triton_kernels.attention.paged_kv import HeadShape

from . import prefill_tuning
from .prefill_plan import ITEM_FIELDS


@triton.jit(do_not_specialize_on_alignment=["items", "lse"])
def _combine_kernel(
    partial_out,  # [parts, num_kv_heads, BLOCK_M, DV] float32
    partial_lse,  # [parts, num_kv_heads, BLOCK_M] float32, base 2
    items,  # [capacity, 12]
    out,
    lse,  # [T, H] float32, base 2
    stride_out_t,
    stride_out_h,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_LSE: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(0)
    num_kv_heads = tl.num_programs(0)
    place = tl.program_id(1) * ROWS + tl.arange(0, ROWS)  # [ROWS], in the tile
    number = tl.program_id(2) + 1
    # The plan was complete before attention began, so only the parts have to be waited for.
    item = items + number * ITEM_FIELDS
    num_parts = tl.load(item + 10)
    first_part = tl.load(item + 11)
    first_row = tl.load(item + 2)
    num_rows = tl.load(item + 3)
    q_begin = tl.load(item + 4)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if (num_parts < 0) | (first_row + tl.program_id(1) * ROWS >= num_rows):
        return

    dims = tl.arange(0, BLOCK_DV)
    in_tile = first_row + place < num_rows
    mask = in_tile[:, None] & (dims < DV)[None, :]
    peak = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, BLOCK_DV], tl.float32)
    for start in range(0, num_parts, BLOCK_P):
        for i in tl.static_range(BLOCK_P):  # their loads do not wait for one another
            rank = start + i
            is_part = rank < num_parts
            part = tl.where(rank == 0, first_part, number + rank - 1)
            partial = (part.to(tl.int64) * num_kv_heads + kv_head) * BLOCK_M + place  # [ROWS]
            part_lse = tl.load(partial_lse + partial, mask=in_tile & is_part, other=float("-inf"))
            pointers = partial_out + partial[:, None] * DV + dims[None, :]
            tile = tl.load(pointers, mask=mask & is_part, other=0.0)  # [ROWS, BLOCK_DV]
            new_peak = tl.maximum(peak, part_lse)
            weight = tl.exp2(part_lse - new_peak)
            decay = tl.exp2(peak - new_peak)
            total = total * decay + weight
            acc = acc * decay[:, None] + weight[:, None] * tile
            peak = new_peak
    acc = acc / tl.where(total > 0.0, total, 1.0)[:, None]

    rows = first_row + place
    tokens = (q_begin + rows // GROUP).to(tl.int64)
    heads = kv_head * GROUP + rows % GROUP
    pointers = out + tokens[:, None] * stride_out_t + heads[:, None] * stride_out_h + dims[None, :]
    tl.store(pointers, acc.to(out.dtype.element_ty), mask=mask)
    if HAS_LSE:
        tl.store(lse + tokens * (num_kv_heads * GROUP) + heads, peak + tl.log2(total), mask=in_tile)


def _partial_shape(num_workers: int, num_kv_heads: int, block_m: int) -> tuple[int, int, int]:
    return 2 * num_workers, num_kv_heads, block_m


def empty_partials(
    num_workers: int, num_kv_heads: int, block_m: int, value_dim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Makes `partial_out` and `partial_lse` of `combine_tiles`, with undefined values."""
    shape = _partial_shape(num_workers, num_kv_heads, block_m)
    partial_out = torch.empty((*shape, value_dim), dtype=torch.float32, device=device)
    return partial_out, torch.empty(shape, dtype=torch.float32, device=device)


def most_partial_bytes(
    device: tuning.DeviceClass, heads: HeadShape, num_tokens: int, element_size: int
) -> int:
    """Returns the most bytes of partial outputs that a call of `prefill_attention` makes for up to
    `num_tokens` queries of `element_size` bytes an element, whatever the requests and their lengths are."""
    group, found = heads.num_heads // heads.num_kv_heads, 0
    # Tiles differ between few and many queries; many requests have the tiles of few queries, or of many.
    counts = {min(1 << bits, num_tokens) for bits in range(num_tokens.bit_length() + 1)}
    for count in counts:
        sizes = heads.num_kv_heads, count * group, heads.key_dim, heads.value_dim, element_size
        launch = prefill_tuning.prefill_launch(device, 1, *sizes)
        shares = prefill_tuning.prefill_shares(device, launch, heads.num_kv_heads)
        shape = _partial_shape(shares.num_workers, heads.num_kv_heads, launch.block_m)
        found = max(found, math.prod(shape) * (heads.value_dim + 1) * torch.float32.itemsize)
    return found


def combine_tiles(
    partial_out: Tensor, partial_lse: Tensor, items: Tensor, out: Tensor, lse: Tensor | None
) -> None:
    """Writes the outputs of the tiles that are cut in the plan.

    Args:
        partial_out: float32 `[2 * num_workers, num_kv_heads, block_m, Dv]`, contiguous: the parts.
        partial_lse: float32 `[2 * num_workers, num_kv_heads, block_m]`, contiguous; -inf where a query saw no
            key.
        items: of the plan.
        out: `[T, H, Dv]`, to write to.
        lse: float32 `[T, H]`, contiguous, to write the log-sum-exp of all parts to, in base 2; or None.
    """
    num_parts, num_kv_heads, block_m, value_dim = partial_out.shape
    if num_parts < 4:  # a tile is cut where a share begins
        return
    # Rows of a tile per program, fewer where few K/V heads have many parts each, and parts loaded at a time.
    rows, num_warps = (16, 8) if num_kv_heads >= 8 else (8, 4)
    launch = tuning.Launch(block_m=rows, block_n=4, num_warps=num_warps, num_stages=1)
    _combine_kernel[(num_kv_heads, block_m // launch.block_m, num_parts // 2 - 1)](
        partial_out,
        partial_lse,
        items,
        out,
        lse,
        *out.stride()[:2],
        GROUP=out.shape[1] // num_kv_heads,
        BLOCK_M=block_m,
        DV=value_dim,
        BLOCK_DV=tuning.padded_dim(value_dim),
        ROWS=launch.block_m,
        BLOCK_P=launch.block_n,
        HAS_LSE=lse is not None,
        num_warps=launch.num_warps,
        **tuning.early_options(out.device),
    )


def combine_tiles_reference(
    partial_out: Tensor, partial_lse: Tensor, items: Tensor
) -> dict[tuple[int, int], tuple[Tensor, Tensor]]:
    """Computes `combine_tiles` in plain torch and float64: for each tile that is cut, by request and first row,
    its output `[num_kv_heads, block_m, Dv]` and log-sum-exp `[num_kv_heads, block_m]`, base 2. Rows after the
    request's last are undefined."""
    combined = {}
    for number, item in enumerate(items[: len(partial_out) // 2].tolist()):
        num_parts, first_part = item[10:]
        if num_parts > 0:
            chosen = [first_part, *range(number, number + num_parts - 1)]
            parts = partial_out[chosen].double(), partial_lse[chosen].double()
            combined[item[0], item[2]] = merge_states(*parts)
    return combined
