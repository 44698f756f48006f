"""Experts in MXFP4, as gpt-oss is published: numbers of 4 bits (e2m1), two a byte, and a power of two as the
scale of each 32 inputs (OCP Microscaling Formats, version 1.0). Inputs stay in 16 bits.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightkv.triton_kernels.layers.quantised_linear import QuantisedTensors

from .humming import LibraryTensors
from .quantised import QuantisedWeight, Wanted

GROUP = 32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the lowest three bits; the highest one is the sign
_ROWS = 4096  # that are made dense at once


class Mxfp4Weight(QuantisedWeight):
    """A weight whose `data` has inputs 2 i and 2 i + 1 in byte i of a row, the first one in the lower half, and
    whose scales are float8_e8m0fnu."""

    def values(self) -> Tensor:
        data = self.tensors.data
        table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=data.device)
        return table[torch.stack([data & 15, data >> 4], -1).flatten(1).int()]

    def dense(self) -> Tensor:
        out = torch.empty(self.shape, dtype=self.dtype, device=self.tensors.data.device)
        for begin in range(0, len(out), _ROWS):
            rows = self.part(0, [(begin, min(_ROWS, len(out) - begin))])
            out[begin : begin + _ROWS] = rows.values() * rows.tensors.scales.float().repeat_interleave(
                GROUP, 1
            )
        return out

    def matmul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        raise NotImplementedError("lightkv has products of experts in MXFP4 alone")

    def library_tensors(self) -> LibraryTensors:
        return LibraryTensors(
            "float4e2m1", self.tensors.data.view(torch.int32), self.tensors.scales, (1, GROUP)
        )


@dataclass(frozen=True)
class Mxfp4Format:
    """gpt-oss's: a tensor of blocks of 16 bytes and one of scales for all the experts of a product."""

    marker: str = "_blocks"
    name: str = "MXFP4"

    def wanted(self, n: int, k: int) -> Wanted:
        """Returns the tensors of experts of `n` outputs in all."""
        raise ValueError("a linear layer is in MXFP4, which is read for experts alone")

    def of_experts(self, num: int, n: int, k: int) -> Wanted:
        """Returns the tensors of `num` experts of `n` outputs and `k` inputs each."""
        if k % GROUP:
            raise ValueError(f"{k} inputs in groups of {GROUP}, which have to be whole")
        shape = num, n, k // GROUP
        return {"_blocks": (("U8",), ((*shape, GROUP // 2),)), "_scales": (("U8",), (shape,))}

    def weight(self, stored: dict[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> Mxfp4Weight:
        data, scales = stored["_blocks"].flatten(2).flatten(0, 1), stored["_scales"].flatten(0, 1)
        return Mxfp4Weight(
            QuantisedTensors(data, scales.view(torch.float8_e8m0fnu), None, (1, GROUP)), bias, dtype
        )
