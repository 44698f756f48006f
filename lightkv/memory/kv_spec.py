"""The shape of one token's K/V, and how its elements are stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from lightkv.counts import checked_count
from lightkv.layer_groups import LayerGroups, Lifetime, one_group
from lightkv.triton_kernels.quantised.kv_format import AS_COMPUTED, KVFormat


@dataclass(frozen=True, init=False)
class KVSpec:
    """The K/V of one token, the same in every layer. `k_dim` and `v_dim` are per head and may differ.

    `dtype` is the type that K and V are computed in, and stored in where `format` does not say otherwise.
    `format` may be given by its name, such as "int8" (`KVFormat.parse` lists them). `lifetimes`: how long each
    layer's tokens are seen; layers of different lifetimes then hold their tokens apart (`groups`). None: all
    layers hold every token. Raises TypeError and ValueError for shapes, types and formats that no pool can
    have.
    """

    num_layers: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype
    format: KVFormat = AS_COMPUTED
    lifetimes: tuple[Lifetime, ...] | None = None

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        k_dim: int,
        v_dim: int,
        dtype: torch.dtype,
        format: KVFormat | str = AS_COMPUTED,
        lifetimes: Sequence[Lifetime] | None = None,
    ) -> None:
        keep = partial(object.__setattr__, self)  # the way in which a frozen dataclass sets its fields
        keep("num_layers", checked_count("num_layers", num_layers))  # numpy's own integers would overflow
        keep("num_kv_heads", checked_count("num_kv_heads", num_kv_heads))
        keep("k_dim", checked_count("k_dim", k_dim))
        keep("v_dim", checked_count("v_dim", v_dim))
        keep("dtype", dtype)
        keep("format", KVFormat.parse(format) if isinstance(format, str) else format)
        keep("lifetimes", None if lifetimes is None else tuple(lifetimes))
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
        if self.lifetimes is not None and len(self.lifetimes) != self.num_layers:
            raise ValueError(
                f"{len(self.lifetimes)} lifetimes for {self.num_layers} layers: give one for each"
            )
        for lifetime in self.lifetimes or ():
            if not isinstance(lifetime, Lifetime):
                raise TypeError(
                    f"a lifetime is {lifetime!r}; give a Lifetime, such as Lifetime('window', 512)"
                )
            lifetime.check()
        self.format.elements.check("K", self.k_dim)
        self.format.elements.check("V", self.v_dim)
        if beyond := {layer for layer in self.format.skipped if layer >= self.num_layers}:
            raise ValueError(
                f"layers {sorted(beyond)} are to stay as computed, but the model has {self.num_layers}, "
                "counted from 0"
            )

    @cached_property
    def groups(self) -> LayerGroups:
        """How the layers share slots. All are one group where some are stored otherwise than others, since a
        slot has the same bytes in any group."""
        if self.lifetimes is None or self.format.skipped:
            return one_group(self.num_layers)
        return LayerGroups.of(self.lifetimes)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers, with its scales."""
        return sum(map(self._layer_bytes, range(self.num_layers)))

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot: of a token in all layers where these are one group, otherwise in a layer of each
        lane."""
        if self.groups.is_uniform:
            return self.bytes_per_token
        return self.groups.num_lanes * self._layer_bytes(0)

    def _layer_bytes(self, layer_idx: int) -> int:
        """Returns the bytes of one token in a layer, with its scales."""
        of_layer = self.format.of_layer(layer_idx)
        return self.num_kv_heads * of_layer.head_bytes(self.k_dim, self.v_dim, self.dtype)

    def row_width(self, layer_idx: int) -> int:
        """Returns the length of a token's row in a layer's buffer, in elements of `row_dtype`."""
        num_bytes = self._head_bytes(layer_idx, self.k_dim + self.v_dim)
        return self.num_kv_heads * num_bytes // self.row_dtype(layer_idx).itemsize

    def row_dtype(self, layer_idx: int) -> torch.dtype:
        """Returns the element type of a layer's buffer: uint8, where K and V are quantised."""
        return torch.uint8 if self.format.of_layer(layer_idx).is_quantised else self.dtype

    def split(self, rows: torch.Tensor, layer_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Splits rows of a layer's buffer, `[..., row_width]`, into views: K `[..., num_kv_heads, k_dim]` and V
        `[..., num_kv_heads, v_dim]`, in their stored types; the dims of 4 bits are half as many."""
        of_layer = self.format.of_layer(layer_idx)
        num_k = self.num_kv_heads * self._head_bytes(layer_idx, self.k_dim) // rows.element_size()
        k, v = rows[..., :num_k], rows[..., num_k:]
        if of_layer.is_quantised:
            k, v = k.view(of_layer.elements.stored), v.view(of_layer.elements.stored)
        return k.unflatten(-1, (self.num_kv_heads, -1)), v.unflatten(-1, (self.num_kv_heads, -1))

    def _head_bytes(self, layer_idx: int, dims: int) -> int:
        """Returns the bytes of so many elements of a layer."""
        return self.format.of_layer(layer_idx).elements.head_bytes(dims, self.dtype)
