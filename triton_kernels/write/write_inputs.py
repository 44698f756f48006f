"""Checks of what the kernels that write K/V are given."""

import torch
from torch import Tensor

from lightkv.triton_kernels.layout.strides import has_unit_stride


def check_inputs(
    k: Tensor,
    v: Tensor,
    slots: Tensor,
    q: Tensor | None,
    q_out: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_bias: Tensor | None,
    k_bias: Tensor | None,
    v_bias: Tensor | None,
) -> None:
    """Raises ValueError where the arguments of `write_kv` do not fit each other; the caches, and that k and v
    have three dims and a last stride of 1, are left to the caller."""
    if slots.shape != k.shape[:1] or v.shape[:2] != k.shape[:2]:
        raise ValueError(
            f"k, v and slots must agree on the number of tokens, k and v on that of heads; got "
            f"{tuple(k.shape)}, {tuple(v.shape)} and {tuple(slots.shape)}"
        )
    if slots.dtype not in (torch.int32, torch.int64) or not slots.is_contiguous():
        raise ValueError(f"slots must be contiguous int32 or int64, got {slots.dtype}")
    if positions is None and cos is None and sin is None and q is None and q_out is None:
        num_heads = 0  # a plain scatter, which decode steps call often: skip the checks of q and the tables
    else:
        num_heads = _check_rotary(k, q, q_out, positions, cos, sin, q_bias)
    for name, bias, shape in (
        ("q_bias", q_bias, (num_heads, k.shape[2])),
        ("k_bias", k_bias, k.shape[1:]),
        ("v_bias", v_bias, v.shape[1:]),
    ):
        if bias is not None and (bias.shape != shape or not has_unit_stride(bias)):
            raise ValueError(
                f"{name} must be [heads, dim] {tuple(shape)} with a last stride of 1, got "
                f"{tuple(bias.shape)} with strides {bias.stride()}"
            )


def _check_rotary(
    k: Tensor,
    q: Tensor | None,
    q_out: Tensor | None,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    q_bias: Tensor | None,
) -> int:
    """Returns the number of heads of q. Raises ValueError where q or the tables do not fit k or each other."""
    num_tokens, _, key_dim = k.shape
    if q is None and q_out is not None:
        raise ValueError("q_out is where q is written to; pass q as well")
    if q is not None:
        wanted = (num_tokens, q.shape[1] if q.dim() == 3 else 0, key_dim)
        for name, tensor in (("q", q), ("q_out", q if q_out is None else q_out)):
            if tensor.shape != wanted or not has_unit_stride(tensor):
                raise ValueError(
                    f"{name} must be [tokens, heads, dim] {wanted} with a last stride of 1, the tokens and dim "
                    f"those of k; got {tuple(tensor.shape)} with strides {tensor.stride()}"
                )
        if cos is None and positions is None and q_bias is None:
            raise ValueError("nothing is to be done to q: pass cos and sin, or q_bias, or leave q out")
    if cos is None or sin is None:
        if positions is not None or cos is not None or sin is not None:
            raise ValueError("cos and sin go together, and positions only with them; pass all or none")
        return 0 if q is None else q.shape[1]
    if positions is None:
        if len(cos) != num_tokens:
            raise ValueError(
                f"without positions, cos and sin need a row for each of the {num_tokens} tokens; cos has "
                f"{len(cos)} rows"
            )
    elif positions.shape != (num_tokens,) or not positions.is_contiguous():
        raise ValueError(f"positions must be contiguous [{num_tokens}], as k; got {tuple(positions.shape)}")
    elif positions.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"positions must be int32 or int64, got {positions.dtype}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.dtype not in (torch.float32, k.dtype) or table.dim() != 2 or not has_unit_stride(table):
            raise ValueError(
                f"{name} must be float32 or of k's type ({k.dtype}), [positions, rotary_dim / 2] with a last "
                f"stride of 1; got {table.dtype} {tuple(table.shape)} with strides {table.stride()}"
            )
    if cos.shape != sin.shape or not 0 < 2 * cos.shape[1] <= key_dim:
        raise ValueError(
            f"cos and sin must have one shape, and at most {key_dim // 2} columns for {key_dim} dims; got "
            f"{tuple(cos.shape)} and {tuple(sin.shape)}"
        )
    return 0 if q is None else q.shape[1]
