"""Weights of 4 bits with a scale for each group of 32, 64 or 128 inputs, as compressed-tensors, AWQ and GPTQ
publish them, two numbers a byte. Inputs stay in 16 bits.

On a GPU humming-kernels multiplies, and `int4_linear` a few tokens.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lightkv.triton_kernels.layers.quantised_linear import QuantisedTensors

from .humming import LibraryTensors, words_of
from .quantised import QuantisedWeight, Wanted, kinds

GROUPS = (32, 64, 128)
_FLOATS = ("F16", "BF16", "F32")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # which of eight outputs each number of a word is of


class Int4Weight(QuantisedWeight):
    """A weight of numbers of 4 bits."""

    by_library = True
    has_kernels = False

    def numbers(self) -> Tensor:
        """Returns the numbers from 0 to 15, uint8 `[N, K]`."""
        halves = self.tensors.data.unflatten(1, (-1, self.tensors.block[1] // 2))
        return torch.cat([halves & 15, halves >> 4], -1).flatten(1)

    def values(self) -> Tensor:
        zeros, group = self.tensors.zeros, self.tensors.block[1]
        return self.numbers().float() - (8.0 if zeros is None else zeros.float().repeat_interleave(group, 1))

    def library_tensors(self) -> LibraryTensors:
        (_, scales, zeros, block), numbers = self.tensors, words_of(self.numbers(), 1)
        zeros = None if zeros is None else words_of(zeros, 0)
        return LibraryTensors("uint4", numbers, scales.to(self.dtype), block, zeros)


def _words(packed: Tensor, dim: int) -> Tensor:
    """Returns the numbers of int32 words, each of eight along `dim`, the lowest bits first, as uint8."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    numbers = packed.unsqueeze(dim + 1) >> (shifts[:, None] if dim == 0 else shifts) & 15
    return numbers.to(torch.uint8).flatten(dim, dim + 1)


def _weight(
    numbers: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Int4Weight:
    """Returns the weight of numbers `[N, K]`, scales and zeros `[N, K / group]`."""
    group = numbers.shape[1] // scales.shape[1]
    low, high = numbers.unflatten(1, (-1, 2, group // 2)).unbind(2)
    data = (low | high << 4).flatten(1)
    zeros = None if zeros is None else zeros.contiguous()
    return Int4Weight(QuantisedTensors(data, scales.float().contiguous(), zeros, (1, group)), bias, dtype)


@dataclass(frozen=True)
class _GroupFormat:
    """What the formats have in common. `kind`: what reports call it."""

    kind: ClassVar[str]
    marker: ClassVar[str] = ".qweight"
    needs_library: ClassVar[bool] = True

    group: int

    @property
    def name(self) -> str:
        """What is said of the format in reports."""
        return f"4 bits in groups of {self.group} ({self.kind})"

    def _num_groups(self, k: int) -> int:
        group = self.group
        if group not in GROUPS or k % group:
            raise ValueError(f"{k} inputs in groups of {group}; groups can be {GROUPS}, and have to be whole")
        return k // group


@dataclass(frozen=True)
class PackedFormat(_GroupFormat):
    """compressed-tensors' pack-quantized: numbers are stored along inputs, zeros along outputs, or as int8."""

    kind = "compressed-tensors"
    marker = ".weight_packed"

    has_zeros: bool

    def wanted(self, n: int, k: int) -> Wanted:
        groups = self._num_groups(k)
        found: Wanted = {
            "weight_packed": kinds(("I32",), (n, k // 8)),
            "weight_scale": kinds(_FLOATS, (n, groups)),
        }
        if self.has_zeros:
            packed, plain = kinds(("I32",), (-(-n // 8), groups)), kinds(("I8",), (n, groups))
            found["weight_zero_point"] = packed + plain
        return found

    def weight(self, stored: dict[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> Int4Weight:
        scales = stored["weight_scale"]
        zeros = stored["weight_zero_point"] if self.has_zeros else None
        if zeros is not None:  # earlier versions store them as they are, from -8 to 7
            is_plain = zeros.dtype == torch.int8
            zeros = (zeros + 8).to(torch.uint8) if is_plain else _words(zeros, 0)[: len(scales)]
        return _weight(_words(stored["weight_packed"], 1), scales, zeros, bias, dtype)


@dataclass(frozen=True)
class AwqFormat(_GroupFormat):
    """AWQ's: numbers and zeros are stored along outputs, in an order of their own."""

    kind = "AWQ"

    def wanted(self, n: int, k: int) -> Wanted:
        groups = self._num_groups(k)
        return {
            "qweight": kinds(("I32",), (k, n // 8)),
            "qzeros": kinds(("I32",), (groups, n // 8)),
            "scales": kinds(_FLOATS, (groups, n)),
        }

    def weight(self, stored: dict[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> Int4Weight:
        # Output o of eight is the number at the place at which the order names o.
        order = torch.tensor([_AWQ_ORDER.index(one) for one in range(8)], device=stored["scales"].device)
        numbers, zeros = (
            _words(stored[name], 1).unflatten(1, (-1, 8)).index_select(2, order).flatten(1).t()
            for name in ("qweight", "qzeros")
        )
        return _weight(numbers, stored["scales"].t(), zeros, bias, dtype)


@dataclass(frozen=True)
class GptqFormat(_GroupFormat):
    """GPTQ's, whose groups are of inputs in their order. `added`: what is added to stored zeros, of which the
    first version of the format stores one less, and 15 for 0."""

    kind = "GPTQ"

    added: int

    def wanted(self, n: int, k: int) -> Wanted:
        groups = self._num_groups(k)
        return {
            "qweight": kinds(("I32",), (k // 8, n)),
            "qzeros": kinds(("I32",), (groups, n // 8)),
            "scales": kinds(_FLOATS, (groups, n)),
        }

    def weight(self, stored: dict[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> Int4Weight:
        numbers, zeros = _words(stored["qweight"], 0).t(), (_words(stored["qzeros"], 1).t() + self.added) & 15
        return _weight(numbers, stored["scales"].t(), zeros, bias, dtype)
