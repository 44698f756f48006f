"""Checks of what OpenPPL's MultiHeadCacheAttention gets: attributes, shapes and types, but no tensor's
contents. Nothing is written before all of them have passed."""

from typing import NamedTuple

from torch import Tensor

from lightkv.triton_kernels.checks import Tensors

from .openppl_cache import LAYOUTS

_FLOATS_TEXT = "float32 or float16 or bfloat16"
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


_TAKEN = Tensors(
    query=f"{_FLOATS_TEXT} [S, H, D]",
    current_key=f"{_FLOATS_TEXT} [S, h, D]",
    current_value=f"{_FLOATS_TEXT} [S, h, D]",
    start_pos="int64 [B]",
    seqstarts="int64 [B + 1]",
    kvstarts="int64 [B + 1]",
)
_STARTS = (Tensors(cachestarts="int64 [B]"), Tensors(cachestarts="int64 [B, pages]"))
_MASKS = {
    dims: Tensors(attn_mask=f"{_FLOATS_TEXT} [{shape}]")
    for dims, shape in ((2, "S, width"), (3, "H, S, width"))
}
_CACHES = [
    {
        bits: Tensors(
            cache=f"{types} [{shape}] with a last stride of 1",
            scale=f"float32 or float16 [{shape.replace('D', 'groups')}] with a last stride of 1",
        )
        for bits, types in ((0, _FLOATS_TEXT), (8, "int8"), (4, "uint8 or int8"))
    }
    for shape in (", ".join(layout).replace("H", "h") for layout in LAYOUTS)
]


def check_inputs(
    tensors: dict[str, Tensor | None], counts: tuple[int, int, int], attributes: Attributes
) -> None:
    """Raises ValueError where attributes, shapes, types or devices do not fit. Reads no tensor's contents.

    `tensors`: those of `multi_head_cache_attention` by name; `counts`: decoding_batches, max_seqlen and
    max_kvlen.
    """
    attributes.check()
    heads = {"H": attributes.num_heads, "h": attributes.num_kv_heads, "D": attributes.head_dim}
    sizes = _TAKEN.check(heads, **tensors)
    query, mask, scale = tensors["query"], tensors["attn_mask"], tensors["scale"]
    assert query is not None
    kinds = [tensors[name].dtype for name in ("query", "current_key", "current_value")]  # type: ignore[union-attr]
    if len(set(kinds)) > 1:
        raise ValueError(f"query, current_key and current_value must have one type; got {kinds}")
    sizes = _STARTS[attributes.cache_mode].check(sizes, **tensors)
    if mask is not None:
        _MASKS[3 if mask.dim() == 3 else 2].check(sizes, **tensors)
    groups = attributes.head_dim // (attributes.quant_group if attributes.quant_bit else 1)
    stored = attributes.head_dim // 2 if attributes.quant_bit == 4 else attributes.head_dim
    of_cache = {"h": heads["h"], "L": attributes.num_layer, "D": stored, "groups": groups}
    tensors_of_cache = {"cache": tensors["cache"], "scale": scale if attributes.quant_bit else None}
    cache = _CACHES[attributes.cache_layout][attributes.quant_bit]
    num_slots = cache.check(of_cache, **tensors_of_cache)["T"]
    if attributes.quant_bit and scale is None:
        raise ValueError("scale must be float32 or float16, a number for each group of the cache; got None")
    if num_slots > _MOST_SLOTS:
        raise ValueError(f"a cache has at most {_MOST_SLOTS} slots, got {num_slots}; use several caches")
    room = min(sizes["pages"] * attributes.page_size, _MOST_SLOTS) if attributes.cache_mode else num_slots
    _check_counts(sizes["S"], sizes["B"], counts, room)
    devices = {str(tensor.device) for tensor in tensors.values() if tensor is not None}
    if len(devices) > 1:
        raise ValueError(f"all tensors must be on one device, got {sorted(devices)}; move them")


def _check_counts(num_queries: int, num_sequences: int, counts: tuple[int, int, int], room: int) -> None:
    """Raises ValueError for counts that do not fit each other, or `room`, the slots that a sequence can
    have."""
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
    if num_queries and most_tokens > room:
        raise ValueError(
            f"max_kvlen {most_tokens} is more than the {room} slots that a sequence can have; give a larger "
            "cache, or in cache_mode 1 more columns of cachestarts"
        )
