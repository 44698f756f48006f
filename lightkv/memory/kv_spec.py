"""The shape of one token's K/V, and how its elements are stored."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch

from lightkv.counts import checked_count
from lightkv.layer_groups import LayerGroups, Lifetime, one_group
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, KVFormat

_ALIGNMENT = 16  # bytes at which rows begin that share a lane: any element, and whole loads of the kernels


class KVHeads(NamedTuple):
    """The K/V heads of a layer, and the dims of a head of K and of V."""

    num_kv_heads: int
    k_dim: int
    v_dim: int


class StateTensor(NamedTuple):
    """A tensor of a recurrent layer's state: its name, its shape for one sequence, and its element type."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, init=False)
class KVSpec:
    """The K/V of one token. `k_dim` and `v_dim` are per head and may differ.

    `dtype` is the type that K and V are computed in, and stored in where `format` does not say otherwise.
    `format` may be given by its name, such as "int8" (`KVFormat.parse` lists them). `lifetimes`: how long each
    layer's tokens are seen; layers of different lifetimes then hold their tokens apart (`groups`). None: all
    layers hold every token.

    Where layers differ, `layer_heads` has the heads of each, and the three numbers are those of the first
    layer. `holders`: where layers read the K/V of another one and hold none themselves, the layer that holds
    what each reads, which is itself for most. None: all layers are equal, or hold their own.

    `states`: the tensors of each layer that keeps a state beside K/V or instead of it, such as a recurrent or a
    convolutional one. These layers are counted by themselves: `num_layers` is the number of those with K/V.

    Raises TypeError and ValueError for shapes, types and formats that no pool can have.
    """

    num_layers: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    format: KVFormat = AS_COMPUTED
    lifetimes: tuple[Lifetime, ...] | None = None
    layer_heads: tuple[KVHeads, ...] | None = None
    holders: tuple[int, ...] | None = None
    states: tuple[tuple[StateTensor, ...], ...] = ()

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        k_dim: int,
        v_dim: int,
        dtype: torch.dtype,
        format: KVFormat | str = AS_COMPUTED,
        lifetimes: Sequence[Lifetime] | None = None,
        layer_heads: Sequence[KVHeads] | None = None,
        holders: Sequence[int] | None = None,
        states: Sequence[Sequence[StateTensor]] = (),
    ) -> None:
        keep = partial(object.__setattr__, self)  # the way in which a frozen dataclass sets its fields
        keep("num_layers", checked_count("num_layers", num_layers))  # numpy's own integers would overflow
        keep("num_kv_heads", checked_count("num_kv_heads", num_kv_heads))
        keep("k_dim", checked_count("k_dim", k_dim))
        keep("v_dim", checked_count("v_dim", v_dim))
        keep("dtype", dtype)
        keep("format", KVFormat.parse(format) if isinstance(format, str) else format)
        keep("lifetimes", None if lifetimes is None else tuple(lifetimes))
        keep("layer_heads", None if layer_heads is None else tuple(layer_heads))
        keep("holders", None if holders is None else tuple(holders))
        keep("states", tuple(map(tuple, states)))
        self._check()

    def _check(self) -> None:
        """Raises TypeError or ValueError unless a pool can have this shape."""
        if not isinstance(self.format, KVFormat):
            raise TypeError(
                f"format is {self.format!r} ({type(self.format).__name__}); give a KVFormat or its name, "
                'such as "int8"'
            )
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype is {self.dtype!r}; give torch's own, such as torch.float32")
        if not self.dtype.is_floating_point:
            raise ValueError(f"K/V of {self.dtype}: use a floating-point type")
        for name, given in (
            ("lifetimes", self.lifetimes),
            ("layer_heads", self.layer_heads),
            ("holders", self.holders),
        ):
            if given is not None and len(given) != self.num_layers:
                raise ValueError(f"{len(given)} {name} for {self.num_layers} layers: give one for each")
        for lifetime in self.lifetimes or ():
            if not isinstance(lifetime, Lifetime):
                raise TypeError(
                    f"a lifetime is {lifetime!r}; give a Lifetime, such as Lifetime('window', 512)"
                )
            lifetime.check()
        if self.layer_heads is not None:
            self._check_heads(self.layer_heads)
        for heads in set(map(self.heads, range(self.num_layers))):
            self.format.elements.check("K", heads.k_dim)
            self.format.elements.check("V", heads.v_dim)
        if beyond := {layer for layer in self.format.skipped if layer >= self.num_layers}:
            raise ValueError(
                f"layers {sorted(beyond)} are to stay as computed, but the model has {self.num_layers}, "
                "counted from 0"
            )
        for layer, holder in enumerate(self.holders or ()):
            self._check_holder(layer, holder)
        for one in [one for tensors in self.states for one in tensors]:
            if not isinstance(one, StateTensor) or not isinstance(one.dtype, torch.dtype):
                raise TypeError(f"a tensor of a state is {one!r}; give a StateTensor")
            for size in one.shape:
                checked_count("a size of a state's tensor", size)

    def _check_heads(self, layer_heads: tuple[KVHeads, ...]) -> None:
        """Raises TypeError or ValueError unless the layers can have these heads."""
        for heads in layer_heads:
            if not isinstance(heads, KVHeads):
                raise TypeError(f"the heads of a layer are {heads!r}; give a KVHeads")
            for name, number in heads._asdict().items():
                checked_count(name, number)
        first = KVHeads(self.num_kv_heads, self.k_dim, self.v_dim)
        if layer_heads[0] != first:
            raise ValueError(
                f"the heads of layer 0 are {layer_heads[0]}, and {first} was given; give the same"
            )

    def _check_holder(self, layer: int, holder: int) -> None:
        """Raises TypeError or ValueError unless `layer` can read what `holder` holds."""
        checked_count("a holder", holder, least=0)
        if holder > layer or self.holder(holder) != holder:
            raise ValueError(
                f"layer {layer} reads the K/V of layer {holder}; give itself, or an earlier one with its own"
            )
        lived = [None if self.lifetimes is None else self.lifetimes[one] for one in (layer, holder)]
        if self.heads(layer) != self.heads(holder) or lived[0] != lived[1]:
            raise ValueError(
                f"layer {layer} reads the K/V of layer {holder}, and has other heads or another lifetime"
            )
        if holder != layer and layer in self.format.skipped:
            raise ValueError(
                f"layer {layer} is to stay as computed, but holds no K/V: it reads that of layer {holder}"
            )

    def heads(self, layer_idx: int) -> KVHeads:
        """Returns the K/V heads that a layer reads."""
        if self.layer_heads is None:
            return KVHeads(self.num_kv_heads, self.k_dim, self.v_dim)
        return self.layer_heads[layer_idx]

    def holder(self, layer_idx: int) -> int:
        """Returns the layer that holds the K/V which a layer reads: mostly itself."""
        return layer_idx if self.holders is None else self.holders[layer_idx]

    def format_of(self, layer_idx: int) -> KVFormat:
        """Returns how the K/V which a layer reads is stored."""
        return self.format.of_layer(self.holder(layer_idx))

    @cached_property
    def groups(self) -> LayerGroups:
        """How the layers that hold K/V share slots."""
        if self.lifetimes is None:
            return one_group([layer for layer in range(self.num_layers) if self.holder(layer) == layer])
        return LayerGroups.of(self.lifetimes, self.lane_bytes)

    @cached_property
    def lane_bytes(self) -> tuple[int, ...]:
        """The bytes that a token's K and V, without scales, take in each layer's lane; 0 for layers that hold
        none. Where rows differ, each begins at a multiple of 16 bytes."""
        rows = [self._row_bytes(layer) for layer in range(self.num_layers)]
        unit = 1 if len(set(rows)) == 1 else _ALIGNMENT
        return tuple([-(-row // unit) * unit if self._holds(layer) else 0 for layer, row in enumerate(rows)])

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers, with its scales."""
        layers = [layer for layer in range(self.num_layers) if self._holds(layer)]
        of_heads = [(self.heads(layer), self.format_of(layer)) for layer in layers]
        return sum([one.num_kv_heads * kind.head_bytes(*one[1:], self.dtype) for one, kind in of_heads])

    @cached_property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot, with its scales and what is left unused of its lanes: of a token in all layers
        where these are one group, otherwise in those of the widest group."""
        scales = [self.num_scales(layer) for layer in range(self.num_layers)]
        scale_bytes = sum(self.groups.lane_sizes(scales)) * self.format.scale_dtype.itemsize
        return sum(self.groups.lane_sizes(self.lane_bytes)) + scale_bytes

    @property
    def bytes_per_state(self) -> int:
        """Bytes of the states of one sequence, in all layers that have one."""
        tensors = [one for tensors in self.states for one in tensors]
        return sum([math.prod(one.shape) * one.dtype.itemsize for one in tensors])

    @property
    def unused_share(self) -> float:
        """How many bytes of a token's slots, while all layers see it, no layer has, as a share of its own."""
        return self.groups.num_groups * self.bytes_per_slot / self.bytes_per_token - 1

    def num_scales(self, layer_idx: int) -> int:
        """Returns how many numbers stand beside a token's row in a layer: scales and zero points of its own."""
        heads, of_layer = self.heads(layer_idx), self.format_of(layer_idx)
        return 0 if of_layer.is_static else heads.num_kv_heads * of_layer.num_scales(heads.k_dim, heads.v_dim)

    def row_width(self, layer_idx: int) -> int:
        """Returns the length of a token's row in a layer, in elements of `row_dtype`."""
        return self._row_bytes(layer_idx) // self.row_dtype(layer_idx).itemsize

    def row_dtype(self, layer_idx: int) -> torch.dtype:
        """Returns the element type of a layer's rows: uint8, where K and V are quantised."""
        return torch.uint8 if self.format_of(layer_idx).is_quantised else self.dtype

    def split(self, rows: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Splits rows of a layer, `[..., row_width]`, into views: K `[..., num_kv_heads, k_dim]` and V `[...,
        num_kv_heads, v_dim]`, in their stored types; the dims of 4 bits are half as many."""
        of_layer, heads = self.format_of(layer_idx), self.heads(layer_idx)
        k_bytes = heads.num_kv_heads * of_layer.elements.head_bytes(heads.k_dim, self.dtype)
        num_k = k_bytes // rows.element_size()
        k, v = rows[..., :num_k], rows[..., num_k:]
        if of_layer.is_quantised:
            k, v = k.view(of_layer.elements.stored), v.view(of_layer.elements.stored)
        return k.unflatten(-1, (heads.num_kv_heads, -1)), v.unflatten(-1, (heads.num_kv_heads, -1))

    def _holds(self, layer_idx: int) -> bool:
        return self.holder(layer_idx) == layer_idx

    def _row_bytes(self, layer_idx: int) -> int:
        """Returns the bytes of one token in a layer, without its scales."""
        heads, elements = self.heads(layer_idx), self.format_of(layer_idx).elements
        return heads.num_kv_heads * elements.head_bytes(heads.k_dim + heads.v_dim, self.dtype)
