"""The bias of a layer's projection, which attention adds to q, K and V."""

import torch

from lightkv.triton_kernels.write.inputs import Biases
from lightkv.triton_kernels.write.write_kv import split_qkv


def qkv_biases(bias: torch.Tensor, num_heads: int, num_kv_heads: int, head_dim: int) -> Biases:
    """Returns views of a fused projection's bias, `[(num_heads + 2 * num_kv_heads) * head_dim]`: for each head
    and dim of q, K and V. Raises ValueError for another shape, for one that is not contiguous, and for one of
    no floating type."""
    size = (num_heads + 2 * num_kv_heads) * head_dim
    fits = isinstance(bias, torch.Tensor) and bias.shape == (size,) and bias.is_contiguous()
    if not fits or not bias.is_floating_point():
        found = f"{bias.dtype} {tuple(bias.shape)}" if isinstance(bias, torch.Tensor) else repr(bias)
        raise ValueError(
            f"qkv_bias must be contiguous floats [{size}], for {num_heads} heads of q and {num_kv_heads} each "
            f"of K and V, of {head_dim} dims; got {found}"
        )
    return Biases(*split_qkv(bias.detach(), num_heads, num_kv_heads, head_dim))


def biased(heads: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns heads `[tokens, heads, head_dim]` with their bias, if any, added in float32 and rounded once."""
    return heads if bias is None else (heads.float() + bias.float()).to(heads.dtype)
