"""Float32 products on a CPU with weights that are packed for oneDNN.

A decode step multiplies a few tokens with every weight of the model. On many processors, MKL reads a plain
matrix for that at about half the speed at which oneDNN reads a packed one. Packed weights have no gradient.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

# Smaller weights stay plain: MKL multiplies a few tokens with them faster than oneDNN does.
LEAST_NUMBERS = 1 << 22

# oneDNN generates about 0.5 MiB of code for each number of tokens that it computes. It and torch each keep the
# code of the last 1,024 numbers. Steps have any number of tokens, so a worker grew by hundreds of MiB. Packed
# products therefore compute only some numbers of tokens, and pad their input to the next of them.
MAX_TOKENS = 512  # of a product that may be padded
LONG_PIECES = (2048, 1024)  # of a longer input, as long as as many tokens are left: their rates are higher
_SIZE_BITS = 4  # a padded size is a power of two times at most 2 ** 4


def has_onednn() -> bool:
    """Returns whether this torch can pack weights."""
    ops = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and all(
        hasattr(ops, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )


def packed(weight: Tensor) -> Tensor:
    """Returns a packed copy of `weight` `[N, K]`, float32; `to_dense` of it returns a plain one."""
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
    return found


def packed_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Returns x · weight^T + bias of x `[..., K]`, float32 with any strides, and a packed `weight`: `[..., N]`.

    oneDNN computes at most 58 different numbers of tokens: each `padded_size` up to `MAX_TOKENS`, and those of
    `LONG_PIECES`.
    """
    dim = x.shape[-1]
    num_tokens = x.numel() // dim
    sizes = piece_sizes(num_tokens)
    if sizes == [padded_size(num_tokens)]:
        return _product(x, weight, bias)
    pieces = []
    for piece in x.reshape(-1, dim).split(sizes):
        padding = padded_size(len(piece)) - len(piece)
        padded = pad(piece, (0, 0, 0, padding)) if padding else piece  # a pad of 0 is a copy
        pieces.append(_product(padded, weight, bias)[: len(piece)])
    y = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    return y.view(*x.shape[:-1], y.shape[-1])


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y


def padded_size(num_tokens: int) -> int:
    """Returns how many tokens a product computes for `num_tokens`: at most an eighth more.

    Up to 16 there is no padding; above, there are eight sizes from each power of two to the next.
    """
    step = 1 << max((num_tokens - 1).bit_length() - _SIZE_BITS, 0)
    return -(-num_tokens // step) * step


def piece_sizes(num_tokens: int) -> list[int]:
    """Returns the pieces in which `num_tokens` are computed, the longest first."""
    sizes = []
    for most in (*LONG_PIECES, MAX_TOKENS):
        count, num_tokens = divmod(num_tokens, most)
        sizes += [most] * count
    return [*sizes, num_tokens] if num_tokens or not sizes else sizes
