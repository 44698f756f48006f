"""The cache of OpenPPL's MultiHeadCacheAttention: four layouts as views, where its tokens are, and how its
quantiser writes and reads them. All of it is plain torch on the cache's device, and no value is read on the
host, so it can be captured in a CUDA graph."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.attention.lookups import CONTIGUOUS, Pages
from lightkv.triton_kernels.attention.paged_kv import PagedKV
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, Elements, KVFormat
from lightkv.triton_kernels.quantised.quantise_reference import pack, unpack

SMALLEST_SCALE = 1e-5  # of the contract's quantiser, also of a group of zeros
LAYOUTS = ("TL2HD", "LT2HD", "L2THD", "L2HTD")  # T slots, L layers, K and V, H heads, D dims


def layer_of(layout: int, cache: Tensor, layer_idx: int) -> Tensor:
    """Returns a view of a layer, `[num_slots, 2, num_kv_heads, D]`, of a cache or of its scales."""
    return cache.permute(*map(LAYOUTS[layout].index, "LT2HD"))[layer_idx]


class Slots(NamedTuple):
    """Where the tokens of each sequence are.

    `starts`: int64 `[B]`, the slot of each sequence's first token, or `[B, MaxP]`, the slots at which its pages
    begin.
    `page_size`: tokens of a page; 0 for `[B]`.
    """

    starts: Tensor
    page_size: int

    def find(self, sequences: Tensor, positions: Tensor) -> Tensor:
        """Returns the slots, int64, of tokens at `positions` of `sequences`, which broadcast. Positions beyond
        a sequence's last page are taken as on it."""
        if not self.page_size:
            return self.starts[sequences] + positions
        pages = (positions // self.page_size).clamp(max=self.starts.shape[1] - 1)
        return self.starts[sequences, pages] + positions % self.page_size

    def all_until(self, max_kvlen: int) -> Tensor:
        """Returns the slots, int64 `[B, max_kvlen]`, of the first tokens of each sequence."""
        device = self.starts.device
        sequences = torch.arange(len(self.starts), device=device)
        return self.find(sequences[:, None], torch.arange(max_kvlen, device=device)[None])

    def index_for(self, max_kvlen: int) -> tuple[Tensor, int]:
        """Returns the index of `PagedKV`, int32, and its shift: for pages of a size that is no power of two, it
        has an entry for each of `max_kvlen` tokens."""
        if not self.page_size:
            return self.starts[:, None].int(), CONTIGUOUS.shift
        if self.page_size & (self.page_size - 1):
            return self.all_until(max(max_kvlen, 1)).int(), 0
        return self.starts.int().contiguous(), self.page_size.bit_length() - 1


class LayerCache(NamedTuple):
    """K/V of one layer in the caller's cache, of which these are views.

    `kv`: `[num_slots, 2, num_kv_heads, D]`, K and V; where a byte has two elements of 4 bits, half of D, uint8.
    `scales`: `[num_slots, 2, num_kv_heads, D / group]`; None if nothing is quantised.
    `bits`: 0 where nothing is quantised, else 8 or 4.
    """

    kv: Tensor
    scales: Tensor | None
    bits: int

    def write(self, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes K and V `[n, num_kv_heads, D]` to slots, int64 `[n]`."""
        both = torch.stack((k, v), 1)
        if self.scales is None:
            self.kv.index_copy_(0, slots, both.to(self.kv.dtype))
            return
        stored, scales = quantise(both, self.bits, self.scales.shape[-1])
        self.kv.index_copy_(0, slots, stored)
        self.scales.index_copy_(0, slots, scales.to(self.scales.dtype))

    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Returns K and V of slots, int64 `[n]`, each `[n, num_kv_heads, D]`: in the type of the scales where
        quantised, else in the cache's."""
        both = self.kv[slots]
        if self.scales is not None:
            both = dequantise(both, self.scales[slots], self.bits)
        return both[:, 0], both[:, 1]

    @property
    def suits_kernels(self) -> bool:
        """Whether the kernels read such groups in place: words of 16 bits, and of these a power of two in each
        group, or all of a head in one."""
        if self.scales is None:
            return True
        words = self.kv.shape[-1] // 2
        strides = (*self.kv.stride()[:-1], self.kv.storage_offset(), self.kv.shape[-1])
        groups = self.scales.shape[-1]
        in_group = words // groups
        return (
            not any(stride % 2 for stride in strides)
            and words % groups == 0
            and (groups == 1 or in_group & (in_group - 1) == 0)
        )

    def paged_kv(self, slots: Slots, max_kvlen: int, dtype: torch.dtype) -> PagedKV:
        """Returns the layer as kernels read up to `max_kvlen` tokens of each sequence: in place where it suits
        them, else a copy of the tokens in `dtype`, one run per sequence, not quantised."""
        if self.suits_kernels:
            return self._in_place(*slots.index_for(max_kvlen))
        found = slots.all_until(max_kvlen)  # slots that the cache does not have are taken as its nearest
        k, v = self.read(found.flatten().clamp(0, len(self.kv) - 1))
        begins = torch.arange(len(found), device=found.device, dtype=torch.int32)[:, None] * max_kvlen
        return PagedKV(k.to(dtype), v.to(dtype), begins, CONTIGUOUS, format=AS_COMPUTED)

    def _in_place(self, index: Tensor, shift: int) -> PagedKV:
        k, v = self.kv[:, 0], self.kv[:, 1]
        if self.scales is None:
            return PagedKV(k, v, index, Pages(shift))
        groups, elements = self.scales.shape[-1], Elements(self.bits)
        if groups > 1:
            elements = elements._replace(group=self.kv.shape[-1] * 8 // self.bits // groups)
        scales, v_scales = self.scales[:, 0], self.scales[:, 1]
        layer_format = KVFormat(elements)
        return PagedKV(k, v, index, Pages(shift), scales=scales, format=layer_format, v_scales=v_scales)


def quantise(x: Tensor, bits: int, num_groups: int) -> tuple[Tensor, Tensor]:
    """Quantises heads `[..., D]` as the contract does, in the type of x.

    Returns the elements, int8 `[..., D]`, or uint8 `[..., D / 2]` of 4 bits with the even element in the low
    nibble, and the scales `[..., num_groups]`: the largest absolute value by 127 (7 for 4 bits), at least 1e-5.
    """
    elements = Elements(bits)
    groups = x.unflatten(-1, (num_groups, -1))
    scales = (groups.abs().amax(-1) / elements.largest).clamp(min=SMALLEST_SCALE)
    return pack((groups / scales[..., None]).flatten(-2), elements), scales


def dequantise(stored: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Returns heads `[..., D]`, computed in the type of their scales `[..., num_groups]`."""
    numbers = unpack(stored, Elements(bits)).to(scales.dtype)
    return (numbers.unflatten(-1, (scales.shape[-1], -1)) * scales[..., None]).flatten(-2)
