"""Weights of numbers e2m1 of 4 bits, two a byte. Inputs stay in 16 bits.

- MXFP4, in which gpt-oss's experts are published: a power of two is the scale of each 32 inputs (OCP
  Microscaling Formats, version 1.0).
- nvfp4: a number e4m3 for each 16 inputs, and a factor for all of a layer (compressed-tensors, modelopt).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightkv.triton_kernels.layers.quantised_linear import QuantisedTensors

from .humming import LibraryTensors
from .quantised import QuantisedWeight, Wanted, kinds

_MXFP4_GROUP, _NVFP4_GROUP = 32, 16
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lowest three bits; the highest one is the sign
_ROWS = 4096  # that are made dense at once


class Float4Weight(QuantisedWeight):
    """A weight whose `data` has inputs 2 i and 2 i + 1 in byte i of a row, the first one in the lower half, and
    whose scales are float8_e8m0fnu or of the dtype. No kernel of ours reads it."""

    by_library = True
    has_kernels = False

    def values(self) -> Tensor:
        data = self.tensors.data
        table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=data.device)
        return table[torch.stack([data & 15, data >> 4], -1).flatten(1).int()]

    def made_dense(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype, device=self.tensors.data.device)
        for begin in range(0, len(out), _ROWS):
            rows = self.part(0, [(begin, min(_ROWS, len(out) - begin))])
            scales = rows.tensors.scales.float().repeat_interleave(self.tensors.block[1], 1)
            out[begin : begin + _ROWS] = rows.values() * scales
        return out

    def library_tensors(self) -> LibraryTensors:
        data, scales, _, block = self.tensors
        scales = scales if scales.dtype == torch.float8_e8m0fnu else scales.to(self.dtype)
        return LibraryTensors("float4e2m1", data.view(torch.int32), scales, block)


@dataclass(frozen=True)
class Mxfp4Format:
    """gpt-oss's: a tensor of blocks of 16 bytes and one of scales for all the experts of a product."""

    marker: str = "_blocks"
    name: str = "MXFP4"
    needs_library: bool = True

    def wanted(self, n: int, k: int) -> Wanted:
        raise ValueError("a linear layer is in MXFP4, which is read for experts alone")

    def of_experts(self, num: int, n: int, k: int) -> Wanted:
        """Returns the tensors of `num` experts of `n` outputs and `k` inputs each."""
        if k % _MXFP4_GROUP:
            raise ValueError(f"{k} inputs in groups of {_MXFP4_GROUP}, which have to be whole")
        shape = num, n, k // _MXFP4_GROUP
        return {"_blocks": kinds(("U8",), (*shape, _MXFP4_GROUP // 2)), "_scales": kinds(("U8",), shape)}

    def weight(self, stored: dict[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> Float4Weight:
        data = stored["_blocks"].flatten(2).flatten(0, 1)
        scales = stored["_scales"].flatten(0, 1).view(torch.float8_e8m0fnu)
        return Float4Weight(QuantisedTensors(data, scales, None, (1, _MXFP4_GROUP)), bias, dtype)


@dataclass(frozen=True)
class Nvfp4Format:
    """compressed-tensors' and modelopt's nvfp4. `numbers`, `factor`: the names of the numbers, and of what all
    scales of a layer are multiplied with, or divided by where `divides`."""

    numbers: str
    factor: str
    divides: bool
    name: str = "nvfp4"
    needs_library: bool = True

    @property
    def marker(self) -> str:
        return f".{self.factor}"

    def wanted(self, n: int, k: int) -> Wanted:
        if k % _NVFP4_GROUP:
            raise ValueError(f"{k} inputs in groups of {_NVFP4_GROUP}, which have to be whole")
        return {
            self.numbers: kinds(("U8",), (n, k // 2)),
            "weight_scale": kinds(("F8_E4M3",), (n, k // _NVFP4_GROUP)),
            self.factor: kinds(("F32",), (), (1,)),
        }

    def weight(self, stored: dict[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> Float4Weight:
        scales, factor = stored["weight_scale"].float(), stored[self.factor]
        scales = scales / factor if self.divides else scales * factor
        scales = scales.to(dtype)
        return Float4Weight(
            QuantisedTensors(stored[self.numbers], scales, None, (1, _NVFP4_GROUP)), bias, dtype
        )
