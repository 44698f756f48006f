"""Weights in fp8 (e4m3), as DeepSeek, Qwen and GLM publish them in blocks of 128 × 128, and compressed-tensors
with a scale for each output or for all.

On Hopper, several tokens are rounded to fp8 too, with a scale for each 128 inputs of a token (or for each
token), as these models are made for; torch's `_scaled_mm` multiplies more than a few. Elsewhere, and where the
checkpoint says that inputs stay as they are, the weight is made dense for the product of many.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from lightkv.triton_kernels.layers.quantised_linear import (
    MAX_TOKENS,
    QuantisedTensors,
    fp8_rows,
    quantised_linear,
)

from .humming import LibraryTensors
from .quantised import QuantisedWeight, Wanted, kinds

_LARGEST = 448.0  # of e4m3


class Fp8Weight(QuantisedWeight):
    """A weight of float8_e4m3fn numbers. `rounds_input`: whether inputs of many tokens may become fp8."""

    rounds_input = True

    def like(self, tensors: QuantisedTensors, bias: Tensor | None) -> "Fp8Weight":
        found = Fp8Weight(tensors, bias, self.dtype)
        found.rounds_input = self.rounds_input
        return found

    def values(self) -> Tensor:
        return self.tensors.data.float()

    def library_tensors(self) -> LibraryTensors:
        data, scales, _, block = self.tensors
        scales = scales if block[1] else scales.to(self.dtype)
        return LibraryTensors("float8e4m3", data.view(torch.int32), scales, block)

    def rounded(self, x: Tensor, activation: str | None = None) -> tuple[Tensor, Tensor] | None:
        """Returns what `fp8_rows` returns of several tokens; None where they are multiplied as they are."""
        block = self.tensors.block
        by_block = block == (128, 128) and not any(size % 128 for size in self.shape)
        fits = by_block or (block == (1, 0) and not any(size % 16 for size in self.shape))
        if not fits or not self.rounds_input or not _has_scaled_mm(x) or not len(x):
            return None
        return fp8_rows(x, 128 if by_block else self.shape[1], activation)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor | None:
        """Returns the product of activation(gate) · up of `gate_up` `[..., 2K]`, whose first half is the gate:
        `[..., N]`; None where tokens are multiplied as they are, as one token is."""
        x = gate_up.reshape(-1, gate_up.shape[-1])
        num_tokens, tickets = len(x), self._tickets
        if tickets is None or num_tokens < 2 or not self.tensors.block[1]:
            return None
        if (rounded := self.rounded(x, activation)) is None:
            return None
        y = None
        if num_tokens <= MAX_TOKENS:
            rows, out = rounded[0][:num_tokens], x.new_empty((num_tokens, self.shape[0]))
            y = quantised_linear(rows, self.tensors, self.bias, tickets, out, rounded)
        y = self._scaled(rounded, num_tokens) if y is None else y
        return y.view(*gate_up.shape[:-1], self.shape[0])

    def many(self, x: Tensor) -> Tensor:
        rounded = self.rounded(x)
        return super().many(x) if rounded is None else self._scaled(rounded, len(x))

    def _scaled(self, rounded: tuple[Tensor, Tensor], num_tokens: int) -> Tensor:
        """Returns the product of many tokens that are rounded, with the bias, `[num_tokens, N]`."""
        (rows, row_scales), (data, scales, *_) = rounded, self.tensors
        y = torch._scaled_mm(
            rows,
            data.t(),
            scale_a=row_scales,
            scale_b=scales.t(),
            out_dtype=self.dtype,
            use_fast_accum=self.tensors.block == (1, 0),
        )
        y = y[:num_tokens]
        return y if self.bias is None else y.add_(self.bias)


def _has_scaled_mm(x: Tensor) -> bool:
    """Returns whether torch multiplies fp8 with scales of blocks and of rows here."""
    return x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] == 9


@dataclass(frozen=True)
class Fp8Format:
    """Layers of float8_e4m3fn numbers. `scale`: the name of the scales. `block`: (128, 128), (1, 0) for a scale
    for each output, (0, 0) for one for all of a layer."""

    marker: str
    block: tuple[int, int]
    rounds_input: bool
    needs_library: bool = False

    @property
    def name(self) -> str:
        """What is said of the format in reports."""
        kinds = {(1, 0): "a scale for each output", (0, 0): "a scale for each layer"}
        return f"fp8, {kinds.get(self.block, 'a scale for each block of {} x {}'.format(*self.block))}"

    def wanted(self, n: int, k: int) -> Wanted:
        rows, columns = self.block
        shapes: tuple[tuple[int, ...], ...] = ((), (1,))
        if columns:
            shapes = ((-(-n // rows), -(-k // columns)),)
        elif rows:
            shapes = ((n, 1), (n,))
        floats = ("F32", "BF16", "F16")
        return {"weight": kinds(("F8_E4M3",), (n, k)), self.marker[1:]: kinds(floats, *shapes)}

    def weight(self, stored: dict[str, Tensor], bias: Tensor | None, dtype: torch.dtype) -> Fp8Weight:
        data, scales = stored["weight"], stored[self.marker[1:]].float()
        block = self.block
        if not block[1]:  # one scale for all is one for each output, too
            scales, block = scales.reshape(-1, 1).expand(len(data), 1).contiguous(), (1, 0)
        found = Fp8Weight(QuantisedTensors(data, scales, None, block), bias, dtype)
        found.rounds_input = self.rounds_input
        return found
