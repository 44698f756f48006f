"""What a variant of attention is to the operators, the plans and the references."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
import triton.language as tl
from torch import Tensor

from lightkv.triton_kernels.checks import Tensors

from .hooks import LOG2_E, Bound, Flags, Hooks, Variants


class Scored(NamedTuple):
    """Which scores a reference changes: those of the queries `queries` of q, all of request `request`.

    `positions`: int64 `[n]`, of the queries; `keys`: int64 `[L]`, the positions of the keys; `length`: of the
    request, its queries included; `own_begin`: the position of the request's first query.
    """

    queries: slice
    request: int
    positions: Tensor
    keys: Tensor
    length: int
    own_begin: int

    @classmethod
    def of_last(cls, queries: slice, request: int, length: int, device: torch.device) -> "Scored":
        """Returns it for all keys of a request, and queries at its last positions."""
        keys = torch.arange(length, device=device)
        first = length - (queries.stop - queries.start)
        return cls(queries, request, torch.arange(first, length, device=device), keys, length, first)

    def tile(self, begin: int, end: int) -> "Scored":
        """Returns it for the queries [begin, end) of these."""
        first = self.queries.start
        return self._replace(queries=slice(first + begin, first + end), positions=self.positions[begin:end])


class Variant:
    """One feature of attention: a frozen dataclass of tensors and numbers. A subclass sets `hooks` and `flags`,
    and whatever else below it needs.

    What it does is `scores_reference` and `sees_reference`; kernels do the same by its hooks.
    """

    hooks: ClassVar[Hooks] = Hooks()
    flags: ClassVar[Flags] = Flags()
    is_for_one_query: ClassVar[bool] = False  # whether plans apply it, which then have one query a request
    on_hopper: ClassVar[tuple[int, ...]] = ()  # bits of K and V for which Hopper's prefill computes it: 16, 8

    @property
    def loaded_bytes(self) -> int:
        """The bytes of what its `load` hook loads for a score, which takes memory of K and V."""
        return 0

    def check(self, q: Tensor, num_requests: int) -> None:
        """Raises ValueError unless it fits q `[T, H, D]` of so many requests. Reads no tensor's contents."""

    def data(self, scale: float) -> Any:
        """Returns what its hooks get, a named tuple. `scale`: what multiplies a dot product so far."""
        return ()

    def rescale(self, scale: float) -> float:
        """Returns what multiplies a score after its `score` hook, if that changes the unit of scores."""
        return scale

    def runs_on_hopper(self, variants: Sequence["Variant"], bits: int) -> bool:
        """Returns whether prefill's kernels for compute capability 9 compute it in a call with these variants,
        over K and V of 16 bits, or of 8 in fp8."""
        return bits in self.on_hopper

    def for_hopper(self, scale: float) -> dict[str, Any]:
        """Returns the fields of `HopperFeatures` that stand for it. `scale`: as for `data`."""
        return {}

    def first_key(self, position: int) -> int:
        """Returns the first key that a query at `position` sees."""
        return 0

    def most_keys(self) -> int | None:
        """Returns the most keys that a query sees; None for any number."""
        return None

    def of_queries(self, begin: int, end: int) -> Self:
        """Returns what it is for the queries [begin, end) of q alone."""
        return self

    def of_requests(self, begin: int, end: int) -> Self:
        """Returns what it is for the requests [begin, end) alone."""
        return self

    def scores_reference(self, scores: Tensor, scored: Scored) -> Tensor:
        """Returns scores `[H, n, L]` (base e, scaled) as the feature changes them."""
        return scores

    def sees_reference(self, scored: Scored) -> Tensor | None:
        """Returns which keys the queries see, bool, broadcast to `[n, L]`; None for all."""
        return None

    def joins_reference(self) -> Tensor | None:
        """Returns a score of each query head, `[H]`, that joins the softmax's sum; None for none."""
        return None


_TRUE, _FALSE = tl.constexpr(True), tl.constexpr(False)
_NONE = Variants((), tl.constexpr(0), Flags(*[_FALSE] * len(Flags())))


def bind(variants: Sequence[Variant], scale: float) -> tuple[Variants, float]:
    """Returns variants as a kernel takes them, and what multiplies a score, in base 2, after all of them have
    changed it. `scale`: multiplies a dot product, in base e."""
    if not variants:
        return _NONE, scale * LOG2_E
    bound = []
    for one in variants:
        bound.append(Bound(one.hooks, one.data(scale)))
        scale = one.rescale(scale)
    flags = (any(one.flags[i] for one in variants) for i in range(len(Flags())))
    is_set = Flags(*(_TRUE if flag else _FALSE for flag in flags))
    return Variants(tuple(bound), tl.constexpr(len(bound)), is_set), scale * LOG2_E


_OF_HEADS = Tensors(slopes="contiguous float32 [H]", logits="contiguous float32 [H]")


def check_heads(q: Tensor, **numbers: Tensor) -> None:
    """Raises ValueError unless slopes or logits are a float32 number for each head of q `[T, H, D]`."""
    _OF_HEADS.check({"H": q.shape[1]}, **numbers)


def limits(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Returns the variants that limit the first key that a query sees, which plans have to know."""
    return tuple(one for one in variants if one.flags.has_first_key)


def visible_reference(variants: Sequence[Variant], causal: bool, scored: Scored) -> Tensor:
    """Returns which keys the queries see, bool `[n, L]`."""
    queries, keys = scored.positions[:, None], scored.keys[None, :]
    visible = keys <= queries if causal else torch.ones_like(keys <= queries)
    for one in variants:
        sees = one.sees_reference(scored)
        if sees is not None:
            visible = visible & sees
    return visible
