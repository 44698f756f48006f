"""OpenPPL's MultiHeadCacheAttention by the letter of its contract: one sequence, head and token at a time, with
the cache as a list of tokens, and attention in float64. Nothing of the product is used here."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

GARBAGE = 0x7F  # in all bytes of slots that no sequence has: NaN in float16, float32 and float8


@dataclass(frozen=True)
class Setting:
    """What the result depends on."""

    dtype: torch.dtype = torch.float32
    quant_bit: int = 0
    quant_group: int = 8
    is_alibi: bool = False
    is_causal: bool = True
    mask: str = "none"  # "2d", "padded" or "3d"
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    scale_dtype: torch.dtype | None = None  # None for that of the input

    @property
    def scales(self) -> torch.dtype:
        if self.scale_dtype is not None:
            return self.scale_dtype
        return torch.float32 if self.dtype == torch.bfloat16 else self.dtype

    def __str__(self) -> str:
        names = [str(self.dtype).removeprefix("torch."), f"{self.quant_bit}bit", self.mask]
        return "-".join([*names, *["alibi"] * self.is_alibi, *["causal"] * self.is_causal])


@dataclass(frozen=True)
class Place:
    """What the result does not depend on."""

    layout: int = 0
    page: int = 0  # 0 for mode 0
    num_layers: int = 2
    layer_idx: int = 1


@dataclass
class Batch:
    """The sequences of a step: tokens that are in the cache before, and queries."""

    past: list[int]
    counts: list[int]
    decoding: int
    setting: Setting
    device: str = "cpu"
    seed: int | None = None  # of the batch's numbers; None: drawn from torch's
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    mask: Tensor | None = field(init=False)
    stored: list[list[Tensor]] = field(init=False)  # of each sequence's past tokens: [2, H, bytes]
    scales: list[list[Tensor]] = field(init=False)  # [2, H, groups]

    def __post_init__(self) -> None:
        s, num = self.setting, sum(self.counts)
        # numpy never changes the stream of a RandomState, so results for a seed can be recorded.
        seed = int(torch.randint(2**31 - 1, ())) if self.seed is None else self.seed
        self._random = np.random.RandomState(seed)
        self.q = self._randn(num, s.num_heads, s.head_dim)
        self.k, self.v = (self._randn(num, s.num_kv_heads, s.head_dim) for _ in range(2))
        self.k[:, :, 1] *= 6  # an outlier
        if num > 1:
            self.k[1] = 0  # a group of zeros
        self.stored, self.scales = [], []
        for length in self.past:
            pairs = [store(self._randn(2, s.num_kv_heads, s.head_dim), s) for _ in range(length)]
            self.stored.append([pair[0] for pair in pairs])
            self.scales.append([pair[1] for pair in pairs])
        self.mask = self._mask()

    def _randn(self, *shape: int) -> Tensor:
        numbers = self._random.standard_normal(shape).astype(np.float32)
        return torch.from_numpy(numbers).to(self.device, self.setting.dtype)

    @property
    def lengths(self) -> list[int]:
        return [past + count for past, count in zip(self.past, self.counts, strict=True)]

    @property
    def seqstarts(self) -> list[int]:
        return [sum(self.counts[:b]) for b in range(len(self.counts) + 1)]

    @property
    def kvstarts(self) -> list[int]:
        return [sum(self.lengths[:b]) for b in range(len(self.lengths) + 1)]

    def _mask(self) -> Tensor | None:
        """Random values, a few of them -inf, in the blocks on the diagonal, and NaN beside them."""
        kind = self.setting.mask
        if kind == "none":
            return None
        shape = (sum(self.counts), sum(self.lengths) + (5 if kind == "padded" else 0))
        if kind == "3d":
            shape = (self.setting.num_heads, *shape)
        mask = torch.full(shape, float("nan")).to(self.device, self.setting.dtype)
        for b in range(len(self.counts)):
            rows, columns = (slice(starts[b], starts[b + 1]) for starts in (self.seqstarts, self.kvstarts))
            block = self._randn(*shape[:-2], self.counts[b], self.lengths[b])
            hidden = torch.from_numpy(self._random.random_sample(block[..., 1:].shape) < 0.2)
            block[..., 1:][hidden.to(self.device)] = float("-inf")
            mask[..., rows, columns] = block.to(mask)
        return mask

    # ----------------------------------------------------------------------------
    # What the contract says

    def result(self) -> tuple[Tensor, list[list[Tensor]], list[list[Tensor]]]:
        """Returns the output, float64, and the tokens of each sequence and their scales after the step."""
        s, out = self.setting, torch.zeros(self.q.shape, dtype=torch.float64, device=self.device)
        all_stored, all_scales = [], []
        for b, first in enumerate(self.seqstarts[:-1]):
            stored, scales = list(self.stored[b]), list(self.scales[b])
            for t in range(first, first + self.counts[b]):
                elements, scale = store(torch.stack((self.k[t], self.v[t])), s)
                stored.append(elements)
                scales.append(scale)
            all_stored.append(stored)
            all_scales.append(scales)
            if self.counts[b]:
                self._attend(
                    b, torch.stack([load(*pair, s) for pair in zip(stored, scales, strict=True)]), out
                )
        return out, all_stored, all_scales

    def _attend(self, b: int, tokens: Tensor, out: Tensor) -> None:
        """`tokens`: `[length, 2, H, D]`, float64."""
        s, first, length = self.setting, self.seqstarts[b], self.lengths[b]
        keys = torch.arange(length, device=self.device)
        for count in range(self.counts[b]):
            position = self.past[b] + count
            for head in range(s.num_heads):
                k, v = tokens[:, :, head // (s.num_heads // s.num_kv_heads)].unbind(1)
                scores = k @ self.q[first + count, head].double() / math.sqrt(s.head_dim)
                if s.is_alibi:  # the bias is -inf after the query, whether the layer is causal or not
                    bias = slope(head, s.num_heads) * (keys - position)
                    scores = scores + bias.masked_fill(keys > position, float("-inf"))
                if self.mask is not None:
                    of_head = self.mask[head] if s.mask == "3d" else self.mask
                    scores = scores + of_head[first + count, self.kvstarts[b] : self.kvstarts[b + 1]].double()
                if s.is_causal and b >= self.decoding:
                    scores = scores.masked_fill(keys > position, float("-inf"))
                if scores.max() > float("-inf"):
                    out[first + count, head] = scores.softmax(0) @ v

    # ----------------------------------------------------------------------------
    # The call

    def arguments(self, place: Place) -> dict[str, Any]:
        """The arguments of the operator, with a cache that has the past tokens in it, and garbage elsewhere."""
        s, starts, num_slots = self.setting, *self.slots(place)
        cache, scale = self.filled(place, num_slots, starts, self.stored, self.scales)
        return {
            "query": self.q,
            "current_key": self.k,
            "current_value": self.v,
            "seqstarts": self._numbers(self.seqstarts),
            "kvstarts": self._numbers(self.kvstarts),
            "cachestarts": self._numbers(starts),
            "start_pos": self._numbers(self.past),
            "decoding_batches": self.decoding,
            "max_seqlen": max(self.counts),
            "max_kvlen": max(self.lengths),
            "cache": cache,
            "scale": scale,
            "attn_mask": self.mask,
            "num_heads": s.num_heads,
            "head_dim": s.head_dim,
            "is_causal": s.is_causal,
            "is_alibi": s.is_alibi,
            "num_kv_heads": s.num_kv_heads,
            "num_layer": place.num_layers,
            "layer_idx": place.layer_idx,
            "quant_bit": s.quant_bit,
            "quant_group": s.quant_group,
            "cache_mode": 1 if place.page else 0,
            "cache_layout": place.layout,
            "page_size": place.page or 128,
        }

    def _numbers(self, numbers: list[Any]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self.device)

    def slots(self, place: Place) -> tuple[list[Any], int]:
        """`cachestarts`, and how many slots there are. Pages have an order of their own and begin anywhere."""
        order = list(reversed(range(len(self.lengths))))
        if not place.page:
            starts, at = [0] * len(order), 3
            for b in order:
                starts[b], at = at, at + self.lengths[b] + 2
            return starts, at
        pages = [-(-length // place.page) for length in self.lengths]
        # An entry of no page leads nowhere.
        table = [[10**8] * (max(pages) + 1) for _ in pages]
        at = 3
        for number in range(max(pages)):
            for b in order:
                if number < pages[b]:
                    table[b][number], at = at, at + place.page + 1
        return table, at

    def filled(
        self,
        place: Place,
        num_slots: int,
        starts: list[Any],
        stored: list[list[Tensor]],
        scales: list[list[Tensor]],
    ) -> tuple[Tensor, Tensor | None]:
        """A cache and its scales with these tokens in it."""
        s = self.setting
        dtype = {0: s.dtype, 8: torch.int8, 4: torch.uint8}[s.quant_bit]
        dim = s.head_dim // (2 if s.quant_bit == 4 else 1)
        cache = self._put(place, num_slots, starts, dim, dtype, stored)
        if not s.quant_bit:
            return cache, None
        groups = s.head_dim // s.quant_group
        return cache, self._put(place, num_slots, starts, groups, s.scales, scales)

    def _put(
        self,
        place: Place,
        num_slots: int,
        starts: list[Any],
        dim: int,
        dtype: torch.dtype,
        tokens: list[list[Tensor]],
    ) -> Tensor:
        heads, layers = self.setting.num_kv_heads, place.num_layers
        shapes = (
            (num_slots, layers, 2, heads, dim),
            (layers, num_slots, 2, heads, dim),
            (layers, 2, num_slots, heads, dim),
            (layers, 2, heads, num_slots, dim),
        )
        cache = torch.empty(shapes[place.layout], dtype=dtype, device=self.device)
        cache.view(torch.uint8).fill_(GARBAGE)
        for b, of_sequence in enumerate(tokens):
            for t, token in enumerate(of_sequence):
                slot = starts[b][t // place.page] + t % place.page if place.page else starts[b] + t
                if place.layout == 0:
                    cache[slot, place.layer_idx] = token
                elif place.layout == 1:
                    cache[place.layer_idx, slot] = token
                elif place.layout == 2:
                    cache[place.layer_idx, :, slot] = token
                else:
                    cache[place.layer_idx, :, :, slot] = token
        return cache


def store(x: Tensor, s: Setting) -> tuple[Tensor, Tensor]:
    """How K and V `[2, H, D]` of a token are stored, and their scales `[2, H, groups]`."""
    if not s.quant_bit:
        return x, x
    largest = {8: 127, 4: 7}[s.quant_bit]
    groups = x.reshape(*x.shape[:-1], s.head_dim // s.quant_group, s.quant_group)
    smallest = torch.tensor(1e-5, dtype=x.dtype, device=x.device)
    scale = torch.maximum(groups.abs().amax(-1) / largest, smallest)
    numbers = torch.clamp(torch.round(groups / scale[..., None]), -largest, largest).reshape(x.shape).int()
    if s.quant_bit == 4:
        return ((numbers[..., 0::2] & 15) + 16 * (numbers[..., 1::2] & 15)).to(torch.uint8), scale.to(
            s.scales
        )
    return numbers.to(torch.int8), scale.to(s.scales)


def load(stored: Tensor, scale: Tensor, s: Setting) -> Tensor:
    """K and V `[2, H, D]` of a token, float64, that are computed in the type of the scales."""
    if not s.quant_bit:
        return stored.double()
    numbers = stored.int()
    if s.quant_bit == 4:
        numbers = torch.stack((numbers % 16, numbers // 16), -1).flatten(-2)
        numbers = torch.where(numbers > 7, numbers - 16, numbers)
    return (numbers.to(s.scales) * scale.repeat_interleave(s.quant_group, -1)).double()


def slope(head: int, num_heads: int) -> float:
    """The slope of ALiBi of a head, by the usual rule."""
    power = 2 ** math.floor(math.log2(num_heads))
    if head < power:
        return 2.0 ** (-8 * (head + 1) / power)
    return 2.0 ** (-8 * (2 * (head - power) + 1) / (2 * power))
