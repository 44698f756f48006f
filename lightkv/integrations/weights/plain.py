"""Weights in 16 or 32 bits, in the type that products are computed in: the kind in which most models come.

A product picks its way by the number of tokens: on a GPU among kernels (`triton_kernels/layers/linear.py`),
on a CPU between two of torch's, unless the weight is packed there (`onednn.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from lightkv.triton_kernels.layers.linear import linear, tickets_for

from .onednn import packed, packed_product

_FEW_TOKENS = 64  # on a CPU, which MKL multiplies faster as columns than as rows


class PlainWeight:
    """The weight `[N, K]` of linear layers of one input, one below the other, and their `bias` `[N]` or
    None."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.shape = weight.shape
        self.bias = bias
        self.dtype, self.device = weight.dtype, weight.device
        self._weight = weight
        self.is_packed = False
        self._tickets = tickets_for(weight) if weight.is_cuda else None

    @classmethod
    def load(cls, layer: nn.Linear) -> "PlainWeight":
        """Returns the weight that a linear layer was loaded with, and shares its memory."""
        return cls(layer.weight, layer.bias)

    @classmethod
    def join(cls, layers: Sequence[nn.Linear]) -> "PlainWeight":
        """Returns the weight of layers with one input, type and device. Their parameters become views of it;
        no copy is made if they are such views already. A layer without a bias gets one of zeros if another
        one has one."""
        weight = _joined([layer.weight for layer in layers])
        if all(layer.bias is None for layer in layers):
            return cls(weight, None)
        zeros = weight.new_zeros
        return cls(
            weight, _joined([zeros(len(one.weight)) if one.bias is None else one.bias for one in layers])
        )

    def shard(self, begin: int, size: int) -> "PlainWeight":
        """Returns a copy of `size` of the N outputs."""
        bias = None if self.bias is None else self.bias.narrow(0, begin, size).clone()
        return PlainWeight(self.dense().narrow(0, begin, size).clone(), bias)

    @property
    def nbytes(self) -> int:
        """The bytes of the weight and the biases."""
        size = self.shape.numel() + (0 if self.bias is None else self.bias.numel())
        return size * self.dtype.itemsize

    def dense(self) -> Tensor:
        """Returns the weight, `[N, K]`; a copy if it is packed."""
        return self._weight.to_dense() if self.is_packed else self._weight

    def pack(self) -> None:
        """Packs a float32 weight on a CPU, and lets go of the plain one."""
        self._weight, self.is_packed = packed(self._weight), True

    def matmul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns x · weight^T + bias of x `[..., K]`: `[..., N]`, in `out` if that is given."""
        if self.is_packed:
            return packed_product(x, self._weight, self.bias)
        if self._tickets is None and out is None:
            if self.dtype != torch.float32 or not 0 < x.numel() <= _FEW_TOKENS * x.shape[-1]:
                return functional.linear(x, self._weight, self.bias)
            columns, weight = x.reshape(-1, x.shape[-1]).t(), self._weight
            y = weight @ columns if self.bias is None else torch.addmm(self.bias[:, None], weight, columns)
            return y.t().contiguous().view(*x.shape[:-1], -1)
        return linear(x, self._weight, self.bias, self._tickets, out)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Returns the concatenation of `parts`, which become views of it; no copy if they are views already."""
    if (whole := _whole(parts)) is not None:
        return whole
    joined = torch.cat([part.detach() for part in parts])
    for part, view in zip(parts, joined.split([len(part) for part in parts]), strict=True):
        part.data = view
    return joined


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """Returns one view of what `parts` are consecutive views of; None if they are not."""
    first = parts[0].detach()
    end = first.storage_offset()
    for part in parts:
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != end or not part.is_contiguous():
            return None
        end += part.numel()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride(), first.storage_offset())
