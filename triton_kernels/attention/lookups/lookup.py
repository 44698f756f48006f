"""What the way in which an index finds a token is to the operators, the plans and the references."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.attention.variants.variant import Variant
from lightkv.triton_kernels.quantised.kv_format import KVFormat


@triton.jit
def _place(index, row, positions, valid):
    return index.entries + row * index.stride, positions


@triton.jit
def _attend_kept(query, sums, cache, index, row, variants, states, score_scale, shape):
    return sums


class LookupHooks(NamedTuple):
    """The jit functions of a lookup that kernels call. Those that it does not set leave no instruction.

    `place`: returns where the entries of the tokens at `positions` of a row, int64, begin (a pointer, or one
    for each position), and which entries from there they have. Positions that are not valid, where `valid` is
    given, read nothing. It makes no ranges, so that Gluon's kernels can compile it, too.
    `attend_kept`: attends from a request's `KeptQuery` to keys that the work list does not have, before all
    others; returns `Sums`. Only decode calls it.
    """

    place: Any = tl.constexpr(_place)
    attend_kept: Any = tl.constexpr(_attend_kept)


class KeptQuery(NamedTuple):
    """The query of a request as `attend_kept` gets it. `heads`: pointers to its heads, `[BLOCK_M, 1]`, of which
    those `in_tile`, `[BLOCK_M]`, exist. `is_first`: whether this is the first part of the request. `lengths`:
    those of all requests."""

    heads: Any
    in_tile: Any
    request: Any
    kv_head: Any
    is_first: Any
    lengths: Any


class Lookup(ABC):
    """How a row of an index finds the slot of a position: a frozen dataclass of tensors and numbers. A subclass
    sets `hooks`, and whatever else below it needs.

    What it finds is `slots_reference`; kernels find the same by its hooks.
    """

    hooks: ClassVar[LookupHooks] = LookupHooks()
    is_plain: ClassVar[bool] = False  # whether a row has entries of its own for all its positions, in order

    @property
    def page_shift(self) -> int:
        """An entry of the index is the first slot of `2**page_shift` tokens."""
        return 0

    def check(self, index: Tensor, variants: Sequence[Variant]) -> None:  # noqa: B027 - it may fit any
        """Raises ValueError unless it fits the index, int32 `[rows, entries]`, and a layer with these variants.
        Reads no tensor's contents."""

    def check_decode(  # noqa: B027
        self, q: Tensor, variants: Sequence[Variant], stored: KVFormat
    ) -> None:
        """Raises ValueError unless it serves decode of q `[T, H, D]` over K and V so stored."""

    def check_prefill(self, variants: Sequence[Variant], causal: bool) -> None:  # noqa: B027
        """Raises ValueError unless it serves prefill of a layer."""

    def limits(self, limits: tuple[Variant, ...]) -> tuple[Variant, ...]:
        """Returns what limits the first key that a query sees in a layer which itself has `limits`: a plan of
        decode has to be made for it."""
        return limits

    def of_layer(self, limits: tuple[Variant, ...]) -> Self:
        """Returns it for a layer which itself has `limits`."""
        return self

    def rotated(self, lengths: Tensor, inverse: Tensor) -> "Lookup":
        """Returns it for decode whose queries are rotated back for keys that they attend to from other
        positions; itself where there are none. `lengths`: int32 `[B]`, tokens so far, the newest included.
        `inverse`: float64 `[n]`, contiguous, radians per position of each pair of dims."""
        return self

    def data(self) -> Any:
        """Returns what its hooks get as `index.data`, a named tuple."""
        return ()

    def kept(self) -> Any:
        """Returns the tensors that `attend_kept` gets as `index.kept`. In a tuple with tensors, Triton 3.6
        loses constants, so `data` has those."""
        return ()

    @abstractmethod
    def slots_reference(self, index: Tensor, rows: int | Tensor, positions: Tensor) -> Tensor:
        """Returns the slots, int64, of the tokens at `positions`, int64, of a row, or of a row for each."""

    def keys_reference(self, length: int, device: torch.device) -> Tensor:
        """Returns the positions, int64, of the keys that decode of a request of `length` tokens reads."""
        return torch.arange(length, device=device)

    def rotate_reference(self, k: Tensor, request: int) -> Tensor:
        """Returns the keys `[L, num_kv_heads, Dk]` at `keys_reference` as the query of a request sees them."""
        return k


def slots_at_reference(index: Tensor, rows: int | Tensor, entries: Tensor, page_shift: int) -> Tensor:
    """Returns the slots, int64, of some entries, int64, of a row, or of a row for each entry."""
    return index[rows, entries >> page_shift].long() + (entries & ((1 << page_shift) - 1))


def check_shift(page_shift: int) -> None:
    """Raises ValueError for a shift that int32 positions cannot have."""
    if not 0 <= page_shift <= 31:
        raise ValueError(f"the shift of pages must be in 0..31; got {page_shift}")
