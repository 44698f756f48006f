"""Masks that a call of attention gets as a tensor: values that are added to scores, keys that are hidden, and
trees of guesses as bits. The kernels read them by tiles, in the loop of `attend_keys.py`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.strides import has_unit_stride


class AttentionMask(NamedTuple):
    """What hides keys from queries, beside the layer's own causality and window, or changes their scores.

    `values`: `[T, width]`, or `[H, T, width]` with a mask for each query head; a row for each query of q, and a
    column for each position of the query's request. Bool: whether the query sees the key. Floating: added to
    the score, scaled and capped, and -inf hides the key. Keys at positions of `width` and beyond are hidden. A
    value that overflows float32 when divided by the layer's scale hides, too.
    `bits`: int32 or int64 `[T, words]`, for a tree of guesses. Each query sees the keys before its request's
    queries, and of the queries' own keys those whose bit is set: bit j % 32 (64) of word j // 32 (64) is that
    of the request's query j. Bits beyond the words are not set. In a causal layer, only bits of queries before
    a query, and its own, count; parents have to precede their children.
    `columns`: int32 `[B]`, with `values` alone: the column of the first key of each request, as where the masks
    of all requests are the blocks of one tensor; None for column 0.

    Either `values` or `bits` is given. Strides are free, except that the last one is 1. A query that sees no
    key gets zeros.
    """

    values: Tensor | None = None
    bits: Tensor | None = None
    columns: Tensor | None = None

    @property
    def is_tree(self) -> bool:
        """Whether the mask is one of bits."""
        return self.bits is not None

    def queries(self, begin: int, end: int) -> "AttentionMask":
        """Returns the mask of the queries [begin, end), of the same requests."""
        values = None if self.values is None else self.values[..., begin:end, :]
        return self._replace(values=values, bits=None if self.bits is None else self.bits[begin:end])

    def requests(self, begin: int, end: int) -> "AttentionMask":
        """Returns the mask with the columns of the requests [begin, end) alone."""
        return self._replace(columns=None if self.columns is None else self.columns[begin:end])

    def for_kernel(self) -> Tensor:
        """Returns the mask as kernels read it: `[1 or H, T, width]` of values, bytes for bool, or int32
        words."""
        if self.bits is not None:
            return self.bits.view(torch.int32)[None]
        assert self.values is not None
        values = self.values.view(torch.uint8) if self.values.dtype == torch.bool else self.values
        return values if values.dim() == 3 else values[None]


def mask_strides(mask: Tensor | None) -> tuple[int | None, int | None, int | None]:
    """Returns the width of a mask in `for_kernel`'s form and its strides of heads and queries, as arguments of
    a kernel; None without a mask, so that the kernel has no such arguments."""
    if mask is None:
        return None, None, None
    return mask.shape[2], mask.stride(0) if mask.shape[0] > 1 else 0, mask.stride(1)


def check_attention_mask(mask: AttentionMask, q: Tensor, num_requests: int, bounded: bool) -> None:
    """Raises ValueError unless the mask fits q `[T, H, D]`. `bounded`: the layer has a window, chunks or ALiBi.
    Reads no tensor's contents."""
    tokens, heads = q.shape[:2]
    given = mask.values if mask.bits is None else mask.bits
    if given is None or (mask.values is not None and mask.bits is not None):
        raise ValueError("a mask has either values or bits; give one of them")
    fits = given.dim() == 2 or (given.dim() == 3 and given.shape[0] == heads and not mask.is_tree)
    has_rows = given.stride(-1) == 1 if mask.is_tree else has_unit_stride(given)
    if not fits or given.shape[-2] != tokens or not has_rows:
        raise ValueError(
            f"a mask must be [{tokens}, width], or values [{heads}, {tokens}, width], with a last stride of 1; "
            f"got {tuple(given.shape)} with strides {given.stride()}"
        )
    if mask.is_tree and given.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"a mask's bits must be int32 or int64, got {given.dtype}")
    if not mask.is_tree and given.dtype not in (torch.bool, torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"a mask's values must be bool, float32, float16 or bfloat16, got {given.dtype}")
    if mask.is_tree and bounded:
        raise ValueError(
            "a tree of guesses is for layers without a window, chunks or ALiBi: a guess's position is its "
            "depth in the tree, and these would count its place among the queries; verify guesses in a line"
        )
    columns = mask.columns
    if columns is not None and (
        mask.is_tree
        or columns.dtype != torch.int32
        or columns.shape != (num_requests,)
        or not columns.is_contiguous()
    ):
        raise ValueError(
            f"columns must be contiguous int32 [{num_requests}], beside values; got {columns.dtype} "
            f"{tuple(columns.shape)}"
        )


@triton.jit
def mask_rows(mask, columns, width, stride_h, stride_t, heads, tokens, requests, in_tile):
    """Returns pointers to the value of key 0 in the mask's rows of a tile, and how many keys each row has, 0
    where not in the tile; both [BLOCK_M]. For a mask of bits: to the first words, and how many. `requests`:
    [BLOCK_M], or one for all rows."""
    pointers = mask + tokens.to(tl.int64) * stride_t + heads.to(tl.int64) * stride_h
    widths = tl.where(in_tile, width, 0)
    if columns is not None:
        first = tl.load(columns + tl.zeros_like(heads) + requests, mask=in_tile, other=0)
        pointers += first
        widths -= first
    return pointers, widths


@triton.jit
def end_of_whole_tiles(begin, end, widths, in_tile, BLOCK_N: tl.constexpr):
    """Returns where the tiles of BLOCK_N keys from `begin` on end that lie before `end` and within the masks of
    all rows."""
    least = tl.min(tl.where(in_tile, widths, 2**30), 0)
    return begin + tl.maximum(tl.minimum(end, least) - begin, 0) // BLOCK_N * BLOCK_N


@triton.jit
def load_values(pointers, widths, positions, exists, MASKED: tl.constexpr):
    """Loads a tile of a mask's values; zeros if the tile does not exist. Unless MASKED, it lies within the mask
    of every row (`end_of_whole_tiles`), so that values are loaded as vectors."""
    within = (widths > 0)[:, None] & exists
    if MASKED:
        within = positions[None, :] < widths[:, None]
    if pointers.dtype.element_ty == tl.uint8:
        values = tl.load(pointers[:, None] + positions[None, :], mask=within, other=0)
    else:
        values = tl.load(pointers[:, None] + positions[None, :], mask=within, other=float("-inf"))
    return values


@triton.jit
def add_values(scores, values, scale):
    """Adds a mask's values, times `scale`, to a tile of scores, or hides what it hides."""
    if values.dtype == tl.uint8:
        scores += tl.where(values != 0, 0.0, float("-inf"))
    else:
        scores += values.to(tl.float32) * scale
    return scores


@triton.jit
def is_in_tree(pointers, num_words, positions, own_begin):
    """Returns which keys at `positions` a tile's queries see by their bits: [BLOCK_M, BLOCK_N]. Keys before
    `own_begin`, the request's first query, are seen by all."""
    own = tl.maximum(positions - own_begin, 0)
    word = own >> 5
    read = (positions >= own_begin)[None, :] & (word[None, :] < num_words[:, None])
    words = tl.load(pointers[:, None] + word[None, :], mask=read, other=0)
    return (positions < own_begin)[None, :] | (((words >> (own & 31)[None, :]) & 1) != 0)


def mask_reference(mask: AttentionMask, queries: slice, request: int, length: int) -> Tensor:
    """Returns what is added to the scores of one request's queries, `[1 or H, n, length]`, float64."""
    num_queries = queries.stop - queries.start
    if mask.bits is not None:
        bits, size = mask.bits[queries], 8 * mask.bits.dtype.itemsize
        number = torch.arange(length, device=bits.device) - (length - num_queries)
        place = number.clamp(0, size * bits.shape[1] - 1)
        is_set = (bits[:, place // size] >> (place % size)) & 1 != 0
        shown = (number < 0) | (is_set & (number < size * bits.shape[1]))
        values = shown[None]
    else:
        assert mask.values is not None
        values = mask.values if mask.values.dim() == 3 else mask.values[None]
        first = 0 if mask.columns is None else int(mask.columns[request])
        values = values[:, queries, first : first + length]
    missing = length - values.shape[2]
    if values.dtype == torch.bool:
        values = torch.zeros(values.shape, device=values.device).masked_fill_(~values, float("-inf"))
    return torch.nn.functional.pad(values.double(), (0, missing), value=float("-inf"))
