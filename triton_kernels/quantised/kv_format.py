"""How K and V are stored: in the type they are computed in, or in 8 or 4 bits with scales."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from lightkv.triton_kernels.checks import Tensors
from lightkv.triton_kernels.layout.format_names import GROUPED_NAMES, split_name


class Elements(NamedTuple):
    """The stored elements of a head.

    `bits`: 16 stands for the type that they are computed in, and has no scale.
    `is_float`: 8 bits are fp8 (e4m3) instead of an integer.
    `group`: how many neighbouring elements of a head share a scale; 0 for all of the head.
    `has_zero_point`: a value is `element * scale + zero_point`, so that values need not lie around 0.
    `is_static`: the scales are given once for each head, and not computed for each token.
    `has_hadamard`: a head is multiplied by a Hadamard matrix first, which spreads outliers over its dims.
    """

    bits: int = 16
    is_float: bool = False
    group: int = 0
    has_zero_point: bool = False
    is_static: bool = False
    has_hadamard: bool = False

    @property
    def is_quantised(self) -> bool:
        """Whether the elements have scales."""
        return self.bits < 16

    @property
    def fields(self) -> int:
        """How many elements a word of 16 bits holds."""
        return 16 // self.bits

    @property
    def largest(self) -> float:
        """The largest stored number: that of e4m3, or of a symmetric integer."""
        return 448.0 if self.is_float else 2.0 ** (self.bits - 1) - 1

    @property
    def stored(self) -> torch.dtype:
        """The element type of the stored tensor; two elements of 4 bits share a byte."""
        if self.is_float:
            return torch.float8_e4m3fn
        return torch.int8 if self.bits == 8 else torch.uint8

    def groups(self, dim: int) -> int:
        """Returns how many groups of elements with a scale of their own a head of `dim` elements has."""
        if not self.is_quantised:
            return 0
        return dim // self.group if self.group else 1

    def num_scales(self, dim: int) -> int:
        """Returns how many numbers stand beside a head: its scales, then its zero points."""
        return self.groups(dim) * (2 if self.has_zero_point else 1)

    def head_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """Returns the bytes of a head's elements, which are computed in `dtype`."""
        return dim * self.bits // 8 if self.is_quantised else dim * dtype.itemsize

    def check(self, name: str, dim: int) -> None:
        """Raises ValueError if a head of `dim` elements cannot be stored so."""
        if self.is_quantised and (dim % (self.group or self.fields) or self.group % self.fields):
            raise ValueError(
                f"heads of {dim} {name} dims do not fit {self.group or self.fields} elements of {self.bits} "
                f"bits to a {'group' if self.group else 'word'}, and a group is whole words of {self.fields}; "
                "choose another format"
            )


_SCALES = {
    dtype: Tensors(scales=f"{dtype} [slots, heads, scales] with a last stride of 1".removeprefix("torch."))
    for dtype in (torch.float32, torch.float16)
}
_NAMED = {
    "auto": Elements(),
    "int8": Elements(8),
    "int8-hadamard": Elements(8, has_hadamard=True),
    "int4": Elements(4, has_zero_point=True, has_hadamard=True),
    "fp8-static": Elements(8, is_float=True, is_static=True),
}


class KVFormat(NamedTuple):
    """How the K/V of a pool is stored: K and V have the same elements. `skipped` layers stay in the type they
    are computed in."""

    elements: Elements = Elements()
    skipped: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, name: str, skipped: Iterable[int] = ()) -> "KVFormat":
        """Returns the format of a name, such as those of `--kv-dtype` and of `KVSpec(format=…)`.

        | name | K and V |
        |---|---|
        | auto | the type they are computed in |
        | int8 | 8 bits, a scale for each token and head |
        | int8-hadamard | likewise, of heads that a Hadamard transform has spread outliers over |
        | int8-g8 | 8 bits, a scale for each 8 elements; any number that divides the head dim |
        | int4 | 4 bits after a Hadamard transform, a scale and a zero point for each token and head |
        | int4-g32 | likewise, for each 32 elements; any number that divides the head dim |
        | fp8-static | e4m3, with a checkpoint's scales for each layer, or each layer and head |

        Raises ValueError for another name, and for a layer below 0.
        """
        base, group = split_name(name)
        layers = frozenset(skipped)
        if any(layer < 0 for layer in layers):
            raise ValueError(f"layers {sorted(layers)} to leave as computed; they are counted from 0")
        return cls(_NAMED[base]._replace(group=group), layers)

    def __repr__(self) -> str:
        """Returns the call that makes it, where a name stands for its elements."""
        group = self.elements.group
        for base, elements in _NAMED.items():
            if elements == self.elements._replace(group=0) and (not group or base in GROUPED_NAMES):
                name = f"{base}-g{group}" if group else base
                skipped = f", {sorted(self.skipped)}" if self.skipped else ""
                return f"KVFormat.parse({name!r}{skipped})"
        return f"KVFormat({self.elements}, skipped={self.skipped})"

    @property
    def is_quantised(self) -> bool:
        """Whether K and V have scales."""
        return self.elements.is_quantised

    @property
    def is_static(self) -> bool:
        """Whether the scales have to be given."""
        return self.elements.is_static

    @property
    def scale_dtype(self) -> torch.dtype:
        """The type of the scales: float16 where there are several for a head, or 4 bits, else float32."""
        return torch.float16 if self.elements.group or self.elements.bits < 8 else torch.float32

    def of_layer(self, layer_idx: int) -> "KVFormat":
        """Returns the format of one layer."""
        return AS_COMPUTED if layer_idx in self.skipped else self._replace(skipped=frozenset())

    def num_scales(self, k_dim: int, v_dim: int) -> int:
        """Returns how many numbers of `scale_dtype` stand beside K and V of a head."""
        return self.elements.num_scales(k_dim) + self.elements.num_scales(v_dim)

    def check_scales(self, scales: Tensor | None, k: Tensor, k_dim: int, v_dim: int) -> None:
        """Raises ValueError unless `scales` are those of K and V of `k_dim` and `v_dim` dims, a row for each
        slot and head of the stored `k`; or None, if nothing is quantised."""
        if not self.is_quantised and scales is not None:
            raise ValueError(f"scales, but K and V are stored as {self}; give their format, or no scales")
        if self.is_quantised:
            count = self.num_scales(k_dim, v_dim)
            if scales is None:
                raise ValueError(f"no scales, and {self} has {count} for each head; pass KVPool.scales")
            sizes = {"slots": len(k), "heads": k.shape[1], "scales": count}
            _SCALES[self.scale_dtype].check(sizes, scales=scales)

    def head_bytes(self, k_dim: int, v_dim: int, dtype: torch.dtype) -> int:
        """Returns the bytes of K, V and scales of one token and head in a quantised or computed layer."""
        data = self.elements.head_bytes(k_dim + v_dim, dtype)
        own = 0 if self.is_static else self.num_scales(k_dim, v_dim) * self.scale_dtype.itemsize
        return data + own


AS_COMPUTED = KVFormat()
