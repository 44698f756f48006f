"""What weights in 8 or 4 bits have in common: numbers `[N, K]`, scales for blocks of them, and a bias.

    weight[n, k]  =  (number[n, k] - zero) · scale[n // block[0], k // block[1]]

Joining and dividing keep the numbers as they are, so they are exact. They cut at whole blocks only.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional

from lightkv.errors import LightKVError
from lightkv.triton_kernels.layers.linear import tickets_for
from lightkv.triton_kernels.layers.quantised_linear import (
    QuantisedTensors,
    dequantised,
    quantised_linear,
)

from .humming import HummingProduct, LibraryTensors, can_multiply, in_order

# The element types and the shapes that a tensor may have; any of several of these.
Kinds = tuple[tuple[tuple[str, ...], tuple[tuple[int, ...], ...]], ...]
Wanted = dict[str, Kinds]  # by the name of a tensor, behind that of its layer


def kinds(types: tuple[str, ...], *shapes: tuple[int, ...]) -> Kinds:
    """Returns any of these types with any of these shapes. What is returned may be added up."""
    return ((types, shapes),)


class CannotDivide(LightKVError):
    """A quantised weight would be cut within a block that has one scale."""


class Format(Protocol):
    """How a checkpoint stores quantised weights. `name`: for reports. `marker`: how the name of a tensor
    ends that shows that a layer is quantised.
    `needs_library`: whether a GPU multiplies the weights by the library alone."""

    @property
    def name(self) -> str: ...
    @property
    def marker(self) -> str: ...
    @property
    def needs_library(self) -> bool: ...

    def wanted(self, n: int, k: int) -> Wanted:
        """Returns the tensors of a layer of `n` outputs and `k` inputs. Raises ValueError if the format cannot
        have such a layer."""

    def weight(self, stored: dict[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> "QuantisedWeight":
        """Returns the weight of the stored tensors of a layer, on the device that they are on."""


class QuantisedWeight(ABC):
    """A weight `[N, K]` that is held as `tensors`, on one device, and multiplied in `dtype`. A subclass says
    what the numbers are, and may multiply many tokens in its own way. `by_library`: whether the library
    multiplies it where it is installed, as `product`. `has_kernels`: whether `quantised_linear` reads it."""

    by_library: ClassVar[bool] = False
    has_kernels: ClassVar[bool] = True

    def __init__(self, tensors: QuantisedTensors, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.tensors, self.bias, self.dtype = tensors, bias, dtype
        self.shape = torch.Size((len(tensors.data), tensors.num_columns))
        self._tickets = tickets_for(tensors.data) if tensors.data.is_cuda and self.has_kernels else None
        self.product: HummingProduct | None = None

    @classmethod
    def join(cls, weights: Sequence[Any]) -> Self | None:
        """Returns the weights of layers with one input as one; None where they are of another kind, or cannot
        be below each other in whole blocks. A layer without a bias gets one of zeros if another one has one."""
        parts = [one.tensors for one in weights]
        kinds = {(type(one), one.dtype, one.shape[1], one.tensors.block) for one in weights}
        if len(kinds) > 1 or any(len(part.data) % part.block[0] for part in parts[:-1]):
            return None
        if len({part.zeros is None for part in parts}) > 1:
            return None
        bias = None
        if any(one.bias is not None for one in weights):
            zeros = parts[0].scales.new_zeros
            biases = [zeros(len(one.tensors.data)) if one.bias is None else one.bias for one in weights]
            bias = torch.cat([one.to(weights[0].dtype) for one in biases])
        zeros_of = [part.zeros for part in parts if part.zeros is not None]
        joined = parts[0]._replace(
            data=torch.cat([part.data for part in parts]),
            scales=torch.cat([part.scales for part in parts]),
            zeros=torch.cat(zeros_of) if zeros_of else None,
        )
        return weights[0].like(joined, bias)

    def like(self, tensors: QuantisedTensors, bias: Tensor | None) -> Self:
        """Returns a weight of the same kind."""
        return type(self)(tensors, bias, self.dtype)

    def part(self, dim: int, spans: Sequence[tuple[int, int]]) -> Self:
        """Returns a copy of some of the outputs (`dim` 0) or of the inputs (1): `spans` are pairs of where some
        begin and how many they are. Inputs keep the whole bias. Raises CannotDivide."""
        tensors, block, size = self.tensors, self.tensors.block[dim], self.shape[dim]
        for begin, count in spans if block else ():
            if begin % block or (count % block and begin + count != size):
                raise CannotDivide(
                    f"{count} of {size} {('outputs', 'inputs')[dim]} of a weight that has a scale for each "
                    f"{block} cannot be held by themselves; choose another number of ranks"
                )

        def cut(whole: Tensor, unit: int) -> Tensor:
            ends = [(begin // unit, -(-(begin + count) // unit)) for begin, count in spans]
            return torch.cat([whole.narrow(dim, begin, end - begin) for begin, end in ends], dim)

        bias = self.bias
        if dim == 0 and bias is not None:
            bias = cut(bias, 1)
        data = cut(tensors.data, 1 if dim == 0 else tensors.num_columns // tensors.data.shape[1])
        scales, zeros = tensors.scales, tensors.zeros
        if block:
            scales, zeros = cut(scales, block), None if zeros is None else cut(zeros, block)
        return self.like(tensors._replace(data=data, scales=scales, zeros=zeros), bias)

    def without_bias(self) -> Self:
        """Returns the weight without its bias."""
        return self.like(self.tensors, None)

    @property
    def nbytes(self) -> int:
        """The bytes of the numbers, the scales and the biases."""
        if self.product is not None:
            return self.product.nbytes
        return sum(one.nbytes for one in (*self.tensors[:3], self.bias) if one is not None)

    @abstractmethod
    def values(self) -> Tensor:
        """Returns the numbers, less their zeros, float32 `[N, K]`."""

    def dense(self) -> Tensor:
        """Returns the weight, `[N, K]` of its dtype: the reference of every product."""
        return self.made_dense() if self.product is None else self.product.dense()

    def made_dense(self) -> Tensor:
        """Returns the weight that `tensors` stand for."""
        if self.tensors.data.is_cuda and self.has_kernels:
            return dequantised(self.tensors, self.dtype)
        scales = self.tensors.scales.float()
        for dim, block in enumerate(self.tensors.block):
            if scales.shape[dim] not in (1, self.shape[dim]):
                scales = scales.repeat_interleave(block, dim).narrow(dim, 0, self.shape[dim])
        return (self.values() * scales).to(self.dtype)

    def matmul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns x · weight^T + bias of x `[..., K]`: `[..., N]`, in `out` if that is given. A GPU multiplies
        a few tokens by kernels that read the numbers; a CPU multiplies with the dense weight."""
        if self.product is not None:
            return self.product.matmul(x, out)
        if self.tensors.data.is_meta:
            return x.new_empty((*x.shape[:-1], self.shape[0]))
        if self._tickets is not None:
            rounded = self.rounded(x.reshape(-1, self.shape[1])) if x.numel() > self.shape[1] else None
            found = quantised_linear(x, self.tensors, self.bias, self._tickets, out, rounded)
            if found is not None:
                return found
        rows = self.many(x.reshape(-1, self.shape[1]))
        y = rows.view(*x.shape[:-1], self.shape[0])
        return y if out is None else out.copy_(y)

    def place(self, num_experts: int = 0) -> bool:
        """Puts the weight into the order of the library where the library multiplies it, and lets go of the
        tensors that it had. Returns whether it did. A weight is not joined or divided after that.

        `num_experts`: whose rows the weight has; 0: it is one weight. With experts `product` multiplies
        afterwards, and `dense` returns `[E, N, K]`."""
        is_ours = not self.by_library and not num_experts
        fits = can_multiply(self.shape[1], self.tensors.data, self.dtype)
        if is_ours or self.product is not None or not fits:
            return False
        ordered = in_order(self.library_tensors(), self.bias, self.dtype, num_experts)
        self.tensors = self.tensors._replace(
            data=self.tensors.data[:0].clone(), scales=self.tensors.scales[:0].clone(), zeros=None
        )
        self.product = HummingProduct(ordered)
        return True

    def library_tensors(self) -> LibraryTensors:
        """Returns the weight as the library is given it."""
        raise NotImplementedError

    def rounded(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        """Returns several tokens x `[T, K]` in fp8, and their scales, if they are multiplied so."""
        return None

    def many(self, x: Tensor) -> Tensor:
        """Returns the product of many tokens x `[T, K]`, with the bias."""
        return functional.linear(x, self.dense(), self.bias)
