"""Quantised weights of a mixture's experts: one weight, in which an expert's rows follow those of another."""

from collections.abc import Sequence
from typing import Protocol, Self, runtime_checkable

from torch import Size, Tensor
from torch.nn import functional

from .quantised import QuantisedWeight


@runtime_checkable
class DivisibleExperts(Protocol):
    """Weights of experts that ranks divide before they are read. `num`: experts. `layer_shape`: outputs and
    inputs of each layer of an expert that the files have."""

    num: int

    @property
    def layer_shape(self) -> tuple[int, int]: ...

    def some(self, begin: int, count: int) -> Self:
        """Returns the experts from `begin` on."""

    def part(self, dim: int, spans: Sequence[tuple[int, int]]) -> Self:
        """Returns some outputs (`dim` 0) or inputs (1) of each layer of each expert."""


class QuantisedExperts:
    """The weights `[E, N, K]` of `num` experts; `of` has them as `[E · N, K]`. `is_transposed`: the model has
    them as `[E, K, N]`, which is the shape that is told then.

    Args:
        of: is put into the order of the library where the library multiplies it.
    """

    def __init__(self, of: QuantisedWeight, num: int, is_transposed: bool) -> None:
        num_rows, num_columns = of.shape[0] // num, of.shape[1]
        self.shape = Size((num, num_columns, num_rows) if is_transposed else (num, num_rows, num_columns))
        self._is_transposed, self._of = is_transposed, of
        of.place(num)

    @property
    def nbytes(self) -> int:
        """The bytes of the numbers and the scales."""
        return self._of.nbytes

    def dense(self) -> Tensor:
        """Returns the weights in the shape that is told."""
        dense = self._of.dense()
        found = dense.view(self.shape[0], -1, dense.shape[-1])
        return found.transpose(1, 2) if self._is_transposed else found

    def matmul(self, x: Tensor, offsets: Tensor) -> Tensor:
        """Returns the products `[R, N]` of rows x `[R, K]` with the weights of their experts. `offsets`: int32
        `[E]`, the end of each expert's rows. Rows behind the last one's are undefined."""
        rows, product = x.to(self._of.dtype), self._of.product
        if product is not None:
            return product.matmul(rows, None, offsets)
        weights = self.dense() if self._is_transposed else self.dense().transpose(1, 2)
        return functional.grouped_mm(rows, weights, offs=offsets)
