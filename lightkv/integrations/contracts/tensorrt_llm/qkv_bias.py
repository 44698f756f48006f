"""The bias of a layer's projection, which attention adds to q, K and V."""

from typing import NamedTuple

import torch

from lightkv.triton_kernels.write.write_kv import split_qkv


class QKVBias(NamedTuple):
    """A bias for each head and dim: `q` `[num_heads, head_dim]`, `k` and `v` `[num_kv_heads, head_dim]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @classmethod
    def of(cls, bias: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> "QKVBias":
        """Returns views of a fused projection's bias, `[(num_heads + 2 * num_kv_heads) * head_dim]`. Raises
        ValueError for another shape, for one that is not contiguous, and for one of no floating type."""
        size = (num_heads + 2 * num_kv_heads) * head_dim
        fits = isinstance(bias, torch.Tensor) and bias.shape == (size,) and bias.is_contiguous()
        if not fits or not bias.is_floating_point():
            found = f"{bias.dtype} {tuple(bias.shape)}" if isinstance(bias, torch.Tensor) else repr(bias)
            raise ValueError(
                f"qkv_bias must be contiguous floats [{size}], for {num_heads} heads of q and {num_kv_heads} "
                f"each of K and V, of {head_dim} dims; got {found}"
            )
        return cls(*split_qkv(bias.detach(), num_heads, num_kv_heads, head_dim))


def biased(heads: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Returns heads `[tokens, heads, head_dim]` with their bias, added in float32 and rounded once."""
    return (heads.float() + bias.float()).to(heads.dtype)
