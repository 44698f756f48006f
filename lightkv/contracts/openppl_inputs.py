"""Checks of what OpenPPL's MultiHeadCacheAttention gets: shapes and types anywhere, and on a CPU the numbers in
the tensors, too. Nothing is written before all of them have passed."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.layout.strides import has_unit_stride

from .openppl_cache import LAYOUTS, Slots, num_slots_of, shape_of

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_MOST_SLOTS = 2**31 - 1  # kernels hold the number of a slot in int32


class Attributes(NamedTuple):
    """The attributes of the operator that its shapes follow from, in the contract's words."""

    num_heads: int
    head_dim: int
    num_kv_heads: int  # never 0
    num_layer: int
    layer_idx: int
    quant_bit: int
    quant_group: int
    cache_mode: int
    cache_layout: int
    page_size: int

    def check(self) -> None:
        """Raises ValueError for attributes that are out of range, or do not fit each other."""
        heads, dim, kv_heads = self.num_heads, self.head_dim, self.num_kv_heads
        if min(heads, dim, kv_heads) < 1 or heads % kv_heads:
            raise ValueError(
                f"num_heads {heads} must be a multiple of num_kv_heads {kv_heads}, and they and head_dim {dim} "
                "positive; give num_kv_heads 0 for as many as num_heads"
            )
        if not 0 <= self.layer_idx < self.num_layer:
            raise ValueError(
                f"layer_idx {self.layer_idx} must be one of num_layer {self.num_layer}, counted from 0"
            )
        if self.cache_mode not in (0, 1) or self.cache_layout not in (0, 1, 2, 3):
            raise ValueError(
                f"cache_mode must be 0 (one run of slots) or 1 (pages), and cache_layout 0 to 3; got "
                f"{self.cache_mode} and {self.cache_layout}"
            )
        if self.cache_mode and self.page_size < 1:
            raise ValueError(f"page_size {self.page_size} must be at least 1 in cache_mode 1")
        if self.quant_bit not in (0, 8, 4):
            raise ValueError(f"quant_bit must be 0 (not quantised), 8 or 4; got {self.quant_bit}")
        if self.quant_bit and (self.quant_group < 1 or dim % self.quant_group):
            raise ValueError(f"quant_group {self.quant_group} must divide head_dim {dim}")
        if self.quant_bit == 4 and dim % 2:
            raise ValueError(f"two elements of 4 bits share a byte, so head_dim must be even; got {dim}")

    @property
    def cache_types(self) -> tuple[torch.dtype, ...]:
        """The types that the cache may have."""
        return {0: _FLOATS, 8: (torch.int8,), 4: (torch.uint8, torch.int8)}[self.quant_bit]


def check_inputs(
    query: Tensor,
    current_key: Tensor,
    current_value: Tensor,
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    counts: tuple[int, int, int],
    cache: Tensor,
    scale: Tensor | None,
    attn_mask: Tensor | None,
    attributes: Attributes,
) -> None:
    """Raises ValueError where attributes, shapes, types or devices do not fit. Reads no tensor's contents.

    `batch`: seqstarts, kvstarts, cachestarts and start_pos; `counts`: decoding_batches, max_seqlen and
    max_kvlen; the others as in `multi_head_cache_attention`.
    """
    attributes.check()
    seqstarts, kvstarts, cachestarts, start_pos = batch
    _check_current(query, current_key, current_value, attributes)
    num_sequences = start_pos.shape[0] if start_pos.dim() else 0
    pages = tuple(cachestarts.shape[1:]) if attributes.cache_mode and cachestarts.dim() == 2 else ()
    for name, tensor, shape in (
        ("seqstarts", seqstarts, (num_sequences + 1,)),
        ("kvstarts", kvstarts, (num_sequences + 1,)),
        ("start_pos", start_pos, (num_sequences,)),
        ("cachestarts", cachestarts, (num_sequences, *pages)),
    ):
        if tensor.dtype != torch.int64 or tensor.shape != shape:
            raise ValueError(
                f"{name} must be int64 {shape} for {num_sequences} sequences in cache_mode "
                f"{attributes.cache_mode}, got {tensor.dtype} {tuple(tensor.shape)}"
            )
    if attributes.cache_mode and cachestarts.dim() != 2:
        raise ValueError(
            f"cachestarts must be int64 [{num_sequences}, pages] in cache_mode 1, got "
            f"{tuple(cachestarts.shape)}; give cache_mode 0 for one run of slots per sequence"
        )
    _check_cache(cache, scale, attributes)
    _check_counts(len(query), num_sequences, counts, cachestarts, cache, attributes)
    if attn_mask is not None and (
        attn_mask.dtype not in _FLOATS
        or attn_mask.dim() not in (2, 3)
        or attn_mask.shape[-2] != len(query)
        or (attn_mask.dim() == 3 and attn_mask.shape[0] != attributes.num_heads)
    ):
        raise ValueError(
            f"attn_mask must be of a floating type, [{len(query)}, width] or [{attributes.num_heads}, "
            f"{len(query)}, width], with 0 for keys that are seen and -inf for those that are not; got "
            f"{attn_mask.dtype} {tuple(attn_mask.shape)}"
        )
    others = (current_key, current_value, *batch, cache, scale, attn_mask)
    if any(tensor is not None and tensor.device != query.device for tensor in others):
        devices = [str(tensor.device) for tensor in (query, *others) if tensor is not None]
        raise ValueError(f"all tensors must be on one device, got {devices}; move them")


def _check_current(query: Tensor, key: Tensor, value: Tensor, attributes: Attributes) -> None:
    of_query = (attributes.num_heads, attributes.head_dim)
    of_key = (*query.shape[:1], attributes.num_kv_heads, attributes.head_dim)
    if query.dim() != 3 or query.shape[1:] != of_query or not key.shape == value.shape == of_key:
        raise ValueError(
            f"query must be [S, {of_query[0]}, {of_query[1]}], and current_key and current_value [S, "
            f"{of_key[-2]}, {of_key[-1]}]; got {tuple(query.shape)}, {tuple(key.shape)} and "
            f"{tuple(value.shape)}"
        )
    if query.dtype not in _FLOATS or not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"query, current_key and current_value must have one type, float32, float16 or bfloat16; got "
            f"{query.dtype}, {key.dtype} and {value.dtype}"
        )


def _check_cache(cache: Tensor, scale: Tensor | None, attributes: Attributes) -> None:
    layout, layers, heads = attributes.cache_layout, attributes.num_layer, attributes.num_kv_heads
    stored = attributes.head_dim // 2 if attributes.quant_bit == 4 else attributes.head_dim
    num_slots = num_slots_of(layout, cache) if cache.dim() == 5 else 0
    wanted = shape_of(layout, num_slots, layers, heads, stored)
    if cache.dtype not in attributes.cache_types or cache.shape != wanted or not has_unit_stride(cache):
        raise ValueError(
            f"cache must be ({', '.join(LAYOUTS[layout])}) with L {layers}, H {heads} and D {stored}, of one "
            f"of {[str(dtype) for dtype in attributes.cache_types]} and a last stride of 1, for cache_layout "
            f"{layout} and quant_bit {attributes.quant_bit}; got {cache.dtype} {tuple(cache.shape)} with "
            f"strides {cache.stride()}"
        )
    if num_slots > _MOST_SLOTS:
        raise ValueError(f"a cache has at most {_MOST_SLOTS} slots, got {num_slots}; use several caches")
    if not attributes.quant_bit:
        return
    groups = attributes.head_dim // attributes.quant_group
    wanted = shape_of(layout, num_slots, layers, heads, groups)
    types = (torch.float32, torch.float16)
    if scale is None or scale.dtype not in types or scale.shape != wanted or not has_unit_stride(scale):
        found = None if scale is None else (scale.dtype, tuple(scale.shape), scale.stride())
        raise ValueError(
            f"scale must be float32 or float16 {wanted} with a last stride of 1, a number for each "
            f"{attributes.quant_group} elements of the cache; got {found}"
        )


def _check_counts(
    num_queries: int,
    num_sequences: int,
    counts: tuple[int, int, int],
    cachestarts: Tensor,
    cache: Tensor,
    attributes: Attributes,
) -> None:
    decoding, most_queries, most_tokens = counts
    if not 0 <= decoding <= num_sequences:
        raise ValueError(f"decoding_batches {decoding} must be 0 to {num_sequences}, the sequences")
    if num_queries and (num_sequences < 1 or not 1 <= most_queries <= most_tokens):
        raise ValueError(
            f"{num_queries} queries of {num_sequences} sequences with a max_seqlen of {most_queries} and a "
            f"max_kvlen of {most_tokens}: there must be a sequence, and 1 <= max_seqlen <= max_kvlen"
        )
    if num_queries > num_sequences * most_queries:
        raise ValueError(
            f"{num_queries} queries do not fit {num_sequences} sequences of at most max_seqlen {most_queries}; "
            "give the largest number of queries of a sequence"
        )
    room = num_slots_of(attributes.cache_layout, cache)
    if attributes.cache_mode:
        room = min(cachestarts.shape[1] * attributes.page_size, _MOST_SLOTS)
    if num_queries and most_tokens > room:
        raise ValueError(
            f"max_kvlen {most_tokens} is more than the {room} slots that a sequence can have; give a larger "
            "cache, or in cache_mode 1 more columns of cachestarts"
        )


def check_contents(
    query: Tensor,
    batch: tuple[Tensor, Tensor, Tensor, Tensor],
    counts: tuple[int, int, int],
    cache: Tensor,
    attn_mask: Tensor | None,
    attributes: Attributes,
    slots: Slots,
) -> None:
    """Raises ValueError where the numbers in the tensors do not fit. It reads them on the host, so it is for a
    CPU. Arguments as for `check_inputs`, which has passed."""
    seqstarts, kvstarts, _, start_pos = batch
    q_lens, kv_lens = seqstarts.diff(), kvstarts.diff()
    for name, starts, lengths, end in (
        ("seqstarts", seqstarts, q_lens, len(query)),
        ("kvstarts", kvstarts, kv_lens, None),
    ):
        if starts[0] != 0 or (lengths < 0).any() or (end is not None and starts[-1] != end):
            raise ValueError(
                f"{name} must begin with 0, not descend{'' if end is None else f' and end with {end}'}; got "
                f"{starts.tolist()}"
            )
    if (start_pos < 0).any() or not torch.equal(start_pos + q_lens, kv_lens):
        raise ValueError(
            f"start_pos {start_pos.tolist()} and the queries {q_lens.tolist()} must add up to the tokens of "
            f"each sequence, {kv_lens.tolist()} by kvstarts"
        )
    most = [int(lengths.max()) if len(lengths) else 0 for lengths in (q_lens, kv_lens)]
    if most[0] > counts[1] or most[1] > counts[2]:
        raise ValueError(
            f"max_seqlen {counts[1]} and max_kvlen {counts[2]} must be at least {most[0]} and {most[1]}, the "
            "most queries and tokens of a sequence"
        )
    if attn_mask is not None and attn_mask.shape[-1] < kvstarts[-1]:
        raise ValueError(
            f"attn_mask has {attn_mask.shape[-1]} columns, but the sequences {int(kvstarts[-1])} tokens; "
            "give it a column for each"
        )
    sequences = torch.repeat_interleave(torch.arange(len(start_pos)), kv_lens)
    positions = torch.arange(len(sequences)) - kvstarts[sequences]
    found, num_slots = slots.find(sequences, positions), num_slots_of(attributes.cache_layout, cache)
    if len(found) and not 0 <= int(found.min()) <= int(found.max()) < num_slots:
        raise ValueError(
            f"cachestarts lead to slots {int(found.min())} to {int(found.max())}, but the cache has "
            f"{num_slots}; give slots within it"
        )
