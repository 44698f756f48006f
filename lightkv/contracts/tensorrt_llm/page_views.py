"""A cache manager's blocks as lightkv's kernels read them: views, with no copy."""

from typing import NamedTuple

import torch

from lightkv.triton_kernels.attention.lookups import Lookup
from lightkv.triton_kernels.attention.paged_kv import PagedKV
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, Elements, KVFormat

from .step import Step, check_blocks

MAX_SLOTS = 2**31  # an index is int32
FORMATS = {  # by the type of the blocks
    torch.float8_e4m3fn: KVFormat.parse("fp8-static"),
    torch.int8: KVFormat(Elements(8, is_static=True)),
}


class PageTable(NamedTuple):
    """Where the keys of a batch are in a layer's views: `index` int32 `[B, n]` with `lookup` as in `PagedKV`,
    and `slots`, int64 `[T]`, of this step's keys."""

    index: torch.Tensor  # type: ignore[assignment]  # hides the method of tuples
    lookup: Lookup
    slots: torch.Tensor


class PageViews(NamedTuple):
    """K and V of a layer's blocks, `[num_slots, num_kv_heads, head_dim]` each, strided views of the buffer.

    A block's tokens are `page_size` slots in a row, from the slot `block * slots_per_block` on. That is more
    than `page_size` where K and V of a block, or its heads, lie one after the other: slots are counted in steps
    from one token to the next, and those in between are never used.
    """

    k: torch.Tensor
    v: torch.Tensor
    page_size: int
    slots_per_block: int
    format: KVFormat

    @classmethod
    def of(cls, buffer: torch.Tensor, num_kv_heads: int, head_dim: int, kv_layout: str) -> "PageViews":
        """Returns the views of blocks `[num_blocks, 2, num_kv_heads, page_size, head_dim]` (HND) or
        `[num_blocks, 2, page_size, num_kv_heads, head_dim]` (NHD), of any strides, except that the last one is
        1 and that a block's is a multiple of a token's. The shape tells the layout; `kv_layout` does where it
        could be either. Raises ValueError."""
        shape = tuple(buffer.shape)
        may_be = {
            "HND": len(shape) == 5 and shape[2] == num_kv_heads,
            "NHD": len(shape) == 5 and shape[3] == num_kv_heads,
        }
        if len(shape) != 5 or shape[1] != 2 or shape[4] != head_dim or not any(may_be.values()):
            raise ValueError(
                f"the cache manager's buffer is {shape}; it must be [blocks, 2, {num_kv_heads}, tokens, "
                f"{head_dim}] (HND) or [blocks, 2, tokens, {num_kv_heads}, {head_dim}] (NHD)"
            )
        layout = kv_layout if may_be.get(kv_layout) else next(name for name, may in may_be.items() if may)
        heads, tokens = (2, 3) if layout == "HND" else (3, 2)
        num_blocks, page_size, strides = shape[0], shape[tokens], buffer.stride()
        step = strides[tokens]
        if page_size == 1 and (step == 0 or strides[0] % step):
            step = strides[0]  # a stride of a dimension of one says nothing
        if strides[4] != 1 or step < 1 or strides[0] % step:
            raise ValueError(
                f"the cache manager's buffer {shape} has strides {strides}: the last must be 1, and a "
                "block's a multiple of a token's; make it contiguous"
            )
        slots_per_block = strides[0] // step
        num_slots = (num_blocks - 1) * slots_per_block + page_size
        if num_slots >= MAX_SLOTS:
            raise ValueError(
                f"a buffer of {num_blocks} blocks takes {num_slots} slots, and an index reaches {MAX_SLOTS}; "
                "use fewer blocks, or kv_layout NHD, which counts fewer"
            )
        size, stride = (num_slots, num_kv_heads, head_dim), (step, strides[heads], 1)
        first = buffer.storage_offset()
        k = buffer.as_strided(size, stride, first)
        v = buffer.as_strided(size, stride, first + strides[1])
        return cls(k, v, page_size, slots_per_block, FORMATS.get(buffer.dtype, AS_COMPUTED))

    def table(self, step: Step) -> PageTable:
        """Returns where the keys of a batch are. It is computed on the device, so that a CUDA graph follows its
        blocks and lengths. Raises ValueError for a sequence with too few blocks."""
        assert step.blocks is not None
        assert step.num_blocks is not None
        check_blocks(step.numbers, step.num_blocks, self.page_size)
        firsts = step.blocks * self.slots_per_block
        page, rows = step.token_positions // self.page_size, step.token_rows
        slots = firsts[rows, page].long() + step.token_positions % self.page_size
        shift = self.page_size.bit_length() - 1
        if self.page_size == 1 << shift:
            return PageTable(firsts, step.lookup(shift), slots)
        within = torch.arange(self.page_size, dtype=torch.int32, device=firsts.device)
        return PageTable((firsts[:, :, None] + within).flatten(1), step.lookup(0), slots)

    def scales(self, scale: torch.Tensor) -> torch.Tensor | None:
        """Returns the scales as kernels read them, for K and V of all slots, float32 `[num_slots, num_kv_heads,
        2]`, from float `[1]`, or `[2]` for K and for V. None if nothing is quantised."""
        if not self.format.is_quantised:
            return None
        both = scale.to(self.k.device, torch.float32).flatten().expand(2)
        num_slots, num_kv_heads = self.k.shape[:2]
        return both.expand(1, num_kv_heads, 2).contiguous().expand(num_slots, -1, -1)

    def paged_kv(self, table: PageTable, scales: torch.Tensor | None) -> PagedKV:
        """Returns the layer's K and V with the index of a batch."""
        return PagedKV(self.k, self.v, table.index, lookup=table.lookup, scales=scales, format=self.format)
