"""The shape and element type of one token's K/V."""

from dataclasses import dataclass

import torch

from lightkv.counts import checked_count


@dataclass(frozen=True)
class KVSpec:
    """The K/V of one token, the same in every layer. `k_dim` and `v_dim` are per head and may differ."""

    num_layers: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: torch.dtype

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "k_dim", "v_dim"):
            object.__setattr__(self, name, checked_count(name, getattr(self, name)))  # numpy's would overflow
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype is {self.dtype!r}; give torch's own, such as torch.float32")
        if not self.dtype.is_floating_point:
            raise ValueError(f"K/V of {self.dtype}: use a floating-point type")

    @property
    def width(self) -> int:
        """Numbers per token and layer: all K heads, then all V heads."""
        return self.num_kv_heads * (self.k_dim + self.v_dim)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return self.num_layers * self.width * self.dtype.itemsize

    def split(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Splits `rows` `[..., width]` into views: K `[..., num_kv_heads, k_dim]`, V `[..., num_kv_heads,
        v_dim]`."""
        heads = self.num_kv_heads
        k, v = rows.split([heads * self.k_dim, heads * self.v_dim], dim=-1)
        return k.unflatten(-1, (heads, self.k_dim)), v.unflatten(-1, (heads, self.v_dim))
