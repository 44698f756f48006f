"""What `write_kv` computes, in plain torch: the specification."""

import torch
from torch import Tensor


def write_kv_reference(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    q: Tensor | None = None,
    q_out: Tensor | None = None,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    q_bias: Tensor | None = None,
    k_bias: Tensor | None = None,
    v_bias: Tensor | None = None,
) -> None:
    """Computes `write_kv` in plain torch."""

    def prepared(x: Tensor, bias: Tensor | None, rotated: bool) -> Tensor:
        if bias is not None:
            x = x.float() + bias.float()
        if rotated and cos is not None and sin is not None:
            tables = (cos, sin) if positions is None else (cos[positions.long()], sin[positions.long()])
            x = rotate_reference(x, *tables, interleaved)
        return x

    if q is not None:
        (q if q_out is None else q_out).copy_(prepared(q, q_bias, True))
    k_cache[slots.long()] = prepared(k, k_bias, True).to(k_cache.dtype)
    v_cache[slots.long()] = prepared(v, v_bias, False).to(v_cache.dtype)


def rotate_reference(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates the first 2n dims of `x` `[T, H, D]` by the angles of cos and sin, `[T, n]`; returns float32."""
    num_pairs = cos.shape[1]
    cos, sin = cos.float()[:, None], sin.float()[:, None]  # [T, 1, n]
    rotary, rest = x.float().split((2 * num_pairs, x.shape[2] - 2 * num_pairs), dim=2)
    first, second = rotary.unflatten(2, (-1, 2)).unbind(3) if interleaved else rotary.chunk(2, dim=2)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    rotary = torch.stack(rotated, dim=3).flatten(2) if interleaved else torch.cat(rotated, dim=2)
    return torch.cat((rotary, rest), dim=2)
