"""How K and V are stored: in the type they are computed in, or in 8 or 4 bits with scales."""

from collections.abc import Iterable
from typing import NamedTuple

import torch

from lightkv.triton_kernels.layout.format_names import GROUPED_NAMES, split_name


class Elements(NamedTuple):
    """The stored elements of a head of K, or of V.

    `bits`: 16 stands for the type that they are computed in, and has no scale.
    `is_float`: 8 bits are fp8 (e4m3) instead of an integer.
    `group`: how many neighbouring elements of a head share a scale; 0 for all of the head.
    `has_middle`: a value is `element * scale + middle`, so that values need not lie around 0.
    `is_static`: the scales are given once for each head, and not computed for each token.
    `is_rotated`: a head is multiplied by a Hadamard matrix first, which spreads outliers over its dims.
    """

    bits: int = 16
    is_float: bool = False
    group: int = 0
    has_middle: bool = False
    is_static: bool = False
    is_rotated: bool = False

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
        """Returns how many scales a head of `dim` elements has."""
        if not self.is_quantised:
            return 0
        return dim // self.group if self.group else 1

    def columns(self, dim: int) -> int:
        """Returns how many numbers stand beside a head: its scales, then its middles."""
        return self.groups(dim) * (2 if self.has_middle else 1)

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


_COMPUTED = Elements()
_INT8 = Elements(8)
_FP8 = Elements(8, is_float=True)
_INT4 = Elements(4, has_middle=True, is_rotated=True)
_NAMED = {
    "auto": (_COMPUTED, _COMPUTED),
    "fp8": (_FP8, _FP8),
    "fp8-rot": (_FP8._replace(is_rotated=True),) * 2,
    "int8-rot": (_INT8._replace(is_rotated=True),) * 2,
    "fp8-static": (_FP8._replace(is_static=True),) * 2,
    "int8": (_INT8, _INT8),
    "int4": (_INT4, _INT4),
    "int4-sym": (Elements(4), Elements(4)),
    "k16v8": (_COMPUTED, _INT8),
    "k8v4": (_INT8, _INT4),
}


class KVFormat(NamedTuple):
    """How the K/V of a pool is stored. `skipped` layers stay in the type they are computed in."""

    k: Elements = _COMPUTED
    v: Elements = _COMPUTED
    skipped: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, name: str, skipped: Iterable[int] = ()) -> "KVFormat":
        """Returns the format of a name, such as those of `--kv-dtype` and of `KVSpec(format=…)`.

        | name | K and V |
        |---|---|
        | auto | the type they are computed in |
        | int8, fp8 | 8 bits (fp8: e4m3), a scale for each token and head |
        | int8-rot, fp8-rot | likewise, of rotated heads, over whose dims outliers are spread |
        | fp8-static | e4m3, with a checkpoint's scales for each layer, or each layer and head |
        | int8-g8 | 8 bits, a scale for each 8 elements; any number that divides the head dim |
        | int4 | 4 bits, a scale and a middle for each token and head (int4-g32: for each 32 elements) |
        | int4-sym-g8 | 4 bits from -7 to 7, without middle and rotation: OpenPPL's |
        | k16v8 | K as computed, V as int8 |
        | k8v4 | K as int8, V as int4 |

        Raises ValueError for another name, and for a layer below 0.
        """
        base, group = split_name(name)
        layers = frozenset(skipped)
        if any(layer < 0 for layer in layers):
            raise ValueError(f"layers {sorted(layers)} to leave as computed; they are counted from 0")
        k, v = (elements._replace(group=group) for elements in _NAMED[base])
        return cls(k, v, layers)

    def __repr__(self) -> str:
        """Returns the call that makes it, where a name stands for its elements."""
        for base, (k, v) in _NAMED.items():
            group = self.k.group if base in GROUPED_NAMES else 0
            if (k._replace(group=group), v._replace(group=group)) == self[:2]:
                name = f"{base}-g{group}" if group else base
                skipped = f", {sorted(self.skipped)}" if self.skipped else ""
                return f"KVFormat.parse({name!r}{skipped})"
        return f"KVFormat(k={self.k}, v={self.v}, skipped={self.skipped})"

    @property
    def is_quantised(self) -> bool:
        """Whether K or V has scales."""
        return self.k.is_quantised or self.v.is_quantised

    @property
    def is_static(self) -> bool:
        """Whether the scales have to be given."""
        return self.k.is_static or self.v.is_static

    @property
    def scale_dtype(self) -> torch.dtype:
        """The type of the scales: float16 where there are several for a head, or 4 bits, else float32."""
        few = (e.bits >= 8 and not e.group for e in (self.k, self.v))
        return torch.float32 if all(few) else torch.float16

    def of_layer(self, layer_idx: int) -> "KVFormat":
        """Returns the format of one layer."""
        return AS_COMPUTED if layer_idx in self.skipped else self._replace(skipped=frozenset())

    def columns(self, k_dim: int, v_dim: int) -> int:
        """Returns how many numbers of `scale_dtype` stand beside K and V of a head."""
        return self.k.columns(k_dim) + self.v.columns(v_dim)

    def head_bytes(self, k_dim: int, v_dim: int, dtype: torch.dtype) -> int:
        """Returns the bytes of K, V and scales of one token and head in a quantised or computed layer."""
        data = self.k.head_bytes(k_dim, dtype) + self.v.head_bytes(v_dim, dtype)
        own = 0 if self.is_static else self.columns(k_dim, v_dim) * self.scale_dtype.itemsize
        return data + own


AS_COMPUTED = KVFormat()
