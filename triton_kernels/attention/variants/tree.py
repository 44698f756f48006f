"""A tree of guesses: which of its request's own queries each query sees, as bits."""

from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.checks import Tensors

from .hooks import Flags, Hooks
from .variant import Scored, Variant

_TAKEN = Tensors(bits="int32 or int64 [T, words] with a last stride of 1")


class _Data(NamedTuple):
    bits: Tensor  # int32 words
    num_words: int
    stride_token: int


@triton.jit
def _start(data, rows):
    """Returns pointers to the first words of a tile's rows, how many words there are, 0 where not in the tile,
    and the first of the request's queries."""
    pointers = data.bits + rows.tokens.to(tl.int64) * data.stride_token
    return pointers, tl.where(rows.in_tile, data.num_words, 0), rows.own_begin


@triton.jit
def _sees(data, state, visible, query_positions, positions):
    pointers, num_words, own_begin = state
    own = tl.maximum(positions - own_begin, 0)
    word = own >> 5
    read = (positions >= own_begin)[None, :] & (word[None, :] < num_words[:, None])
    words = tl.load(pointers[:, None] + word[None, :], mask=read, other=0)
    is_set = ((words >> (own & 31)[None, :]) & 1) != 0
    return visible & ((positions < own_begin)[None, :] | is_set)


@dataclass(frozen=True, eq=False)
class TreeMask(Variant):
    """`bits`: int32 or int64 `[T, words]`, a row for each query of q, with a last stride of 1.

    Each query sees the keys before its request's queries, and of the queries' own keys those whose bit is set:
    bit j % 32 (64) of word j // 32 (64) is that of the request's query j. Bits beyond the words are not set. In
    a causal layer, only bits of queries before a query, and its own, count; parents have to precede their
    children.
    """

    bits: Tensor

    hooks = Hooks(start=tl.constexpr(_start), sees=tl.constexpr(_sees))
    flags = Flags(hides_own=True)
    on_hopper = (16,)

    @property
    def loaded_bytes(self) -> int:
        return 4

    def check(self, q: Tensor, num_requests: int) -> None:
        _TAKEN.check({"T": len(q)}, bits=self.bits)

    def data(self, scale: float) -> _Data:
        words = self.bits.view(torch.int32)
        return _Data(words, words.shape[1], words.stride(0))

    def for_hopper(self, scale: float) -> dict[str, Any]:
        return {"tree": tuple(self.data(scale))}

    def of_queries(self, begin: int, end: int) -> Self:
        return type(self)(self.bits[begin:end])

    def sees_reference(self, scored: Scored) -> Tensor:
        bits, size = self.bits[scored.queries], 8 * self.bits.dtype.itemsize
        number = scored.keys - scored.own_begin
        place = number.clamp(0, size * bits.shape[1] - 1)
        is_set = (bits[:, place // size] >> (place % size)) & 1 != 0
        return (number < 0) | (is_set & (number < size * bits.shape[1]))
