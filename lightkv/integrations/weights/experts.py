"""Quantised weights of a mixture's experts: one weight, in which an expert's rows follow those of another."""

from torch import Size, Tensor
from torch.nn import functional

from lightkv.triton_kernels.layers.quantised_experts import quantised_experts

from .quantised import QuantisedWeight

_MOST_ROWS = 64  # of an expert, on average, for which packed weights are read; for more they are made dense


class QuantisedExperts:
    """The weights `[E, N, K]` of `num` experts; `of` has them as `[E · N, K]`."""

    def __init__(self, of: QuantisedWeight, num: int) -> None:
        self.of = of
        self.shape = Size((num, of.shape[0] // num, of.shape[1]))

    @property
    def nbytes(self) -> int:
        """The bytes of the numbers and the scales."""
        return self.of.nbytes

    def dense(self) -> Tensor:
        """Returns the weights, `[E, N, K]`."""
        return self.of.dense().view(self.shape)

    def matmul(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Returns the products `[R, N]` of rows x `[R, K]` with the weights of their experts. `offsets`: int32
        `[E]`, the end of each expert's rows. Rows behind the last one's are undefined."""
        if x.is_cuda and len(x) <= _MOST_ROWS * self.shape[0]:
            found = quantised_experts(x, self.of.tensors, offsets)
            if found is not None:
                return found
        return functional.grouped_mm(x.to(self.of.dtype), self.dense().transpose(1, 2), offs=offsets)
