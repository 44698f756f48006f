"""Products of weights of 4 bits, and of experts in 8 or 4, by humming-kernels (`lightkv[quantised]`).

It holds a weight in an order of its own, and compiles kernels for its shape when a model starts. It keeps them
in a folder between starts. `int4_linear` knows that order, and multiplies a few tokens.
"""

import json
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from lightkv.triton_kernels.layers.int4_linear import MAX_TOKENS, Int4Tensors, int4_linear, tickets_for

# The most rows for which each kernel is chosen; the last one computes all further ones, too.
_RANGES = (8, 16, 32, 64, 128, 256, 1024, 8192)
_RANGES_OF_EXPERTS = (16, 64, 256, 1024, 4096, 16384)  # of all experts together
_ANY = 1 << 30
_ROWS, _COLUMNS = 128, 64  # tiles: rows are padded, columns have to be whole
_NUM_LOCKS = 2048
_NAMES = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float8_e8m0fnu: "float8e8m0",
}  # of the types of scales


def can_multiply(num_columns: int, tensor: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether a weight of so many columns beside `tensor` is multiplied in `dtype` by the library."""
    fits = tensor.is_cuda and dtype in (torch.float16, torch.bfloat16) and num_columns % _COLUMNS == 0
    return fits and find_spec("humming") is not None


class LibraryTensors(NamedTuple):
    """A weight `[N, K]` as the library is given it. `kind`: its name of the numbers' type. `numbers`: int32
    words `[N, K · bits / 32]`, the first number in the lowest bits. `scales`: of blocks of `block`. `zeros`:
    what is subtracted from integers of 4 bits, int32 words of eight rows; None: 8."""

    kind: str
    numbers: Tensor
    scales: Tensor
    block: tuple[int, int]
    zeros: Tensor | None = None


class OrderedTensors(NamedTuple):
    """A weight, or the weights of experts, in the order of the library, and the kernels that multiply it.

    `tensors`: the numbers on a GPU, and the others, which are small, on the CPU: on the GPU they could come to
    lie in memory that the weight had before, and torch could not give that back. `bias`: `[N]` in its own
    order, on the GPU. `kind`: as in `LibraryTensors`. `shape`: `(N, K)`. `num_experts`: 0 for one weight.
    `dtype`: of inputs and outputs.
    """

    tensors: dict[str, Tensor]
    kernels: Tensor
    bias: Tensor | None
    kind: str
    shape: tuple[int, int]
    num_experts: int
    dtype: torch.dtype


def in_order(
    weight: LibraryTensors, bias: Tensor | None, dtype: torch.dtype, num_experts: int = 0
) -> OrderedTensors:
    """Copies a weight into the order of the library, and compiles its kernels.

    Args:
        weight: on a GPU.
        bias: `[N]`, or None.
        dtype: of inputs and outputs, float16 or bfloat16.
        num_experts: whose rows the weight has, one behind another; 0: it is one weight.
    """
    from humming.schema import HummingWeightSchema
    from humming.transform import (
        prepare_fp16_e8m0_scale,
        prepare_layer_config,
        transform_humming_tensors,
    )

    bits = 8 if weight.kind.startswith("float8") else 4
    num_rows, num_columns = len(weight.numbers) // max(1, num_experts), weight.numbers.shape[1] * 32 // bits
    tensors = {"weight": weight.numbers, "weight_scale": weight.scales}
    if weight.zeros is not None:
        tensors["zero_point"] = weight.zeros
    if bias is not None:
        tensors["bias"] = bias = bias.to(dtype)
    if num_experts:
        tensors = {name: one.view(num_experts, -1, one.shape[1]) for name, one in tensors.items()}
    rows_of_scale, columns_of_scale = weight.block
    schema = HummingWeightSchema(
        b_dtype=weight.kind,
        bs_dtype=_NAMES[weight.scales.dtype],
        weight_scale_group_size=columns_of_scale,
        weight_scale_group_size_n=rows_of_scale if columns_of_scale and rows_of_scale > 1 else 0,
        has_zero_point=weight.zeros is not None,
    )
    config = prepare_layer_config(
        num_rows,
        num_columns,
        schema,
        num_experts=num_experts,
        pad_n_to_multiple=_ROWS,
        has_bias=bias is not None,
        torch_dtype=dtype,
        device=weight.numbers.device,
        tensors=tensors,
    )
    config, tensors = prepare_fp16_e8m0_scale(config, tensors)
    tensors = transform_humming_tensors(config, tensors)
    moved = {name: one if name == "weight" else one.cpu() for name, one in tensors.items()}
    kernels, shape = _kernels(config, weight.numbers.device), (num_rows, num_columns)
    return OrderedTensors(moved, kernels, bias, weight.kind, shape, num_experts, dtype)


class HummingProduct:
    """The product with a weight that is in the order of the library. Nothing else should hold the weight as it
    was before."""

    def __init__(self, ordered: OrderedTensors) -> None:
        from humming import ops

        tensors, self._kernels, bias, kind, shape, self._num_experts, self._dtype = ordered
        (self._num_rows, self._num_columns), self.device = shape, tensors["weight"].device
        # The numbers move, too: out of memory that the library used besides, and has freed.
        torch.cuda.empty_cache()
        self._tensors = {name: one.to(self.device, copy=True) for name, one in tensors.items()}
        # The arguments of `int4_linear`, where it multiplies a few tokens.
        self._few: tuple[Int4Tensors, Tensor | None, Tensor] | None = None
        if kind == "uint4" and not self._num_experts and has_known_order(self.device):
            words, held_scales = self._tensors["weight"], self._tensors["weight_scale"]
            held = Int4Tensors(words, held_scales, self._tensors.get("zero_point"))
            self._few = held, bias, tickets_for(self._num_rows, self.device)
        self._locks = torch.zeros(_NUM_LOCKS, dtype=torch.int32, device=self.device)
        ops.utils.init_humming_launcher()
        self._launch = ops.launch_kernel

    @property
    def nbytes(self) -> int:
        """The bytes that the weight takes."""
        return sum(one.nbytes for one in self._tensors.values())

    def dense(self) -> Tensor:
        """Returns the weight without its bias, `[N, K]` or `[E, N, K]` of its dtype: what it makes of ones."""
        ones = torch.eye(self._num_columns, dtype=self._dtype, device=self.device)
        held = self._tensors
        if "bias" in held:
            self._tensors = held | {"bias": torch.zeros_like(held["bias"])}
        try:
            if not self._num_experts:
                return self.matmul(ones).t().contiguous()
            sizes = self._num_experts, self._num_rows, self._num_columns
            found = torch.empty(sizes, dtype=self._dtype, device=self.device)
            experts = torch.arange(self._num_experts, device=self.device)
            for expert in range(self._num_experts):
                ends = (experts >= expert).int() * self._num_columns
                found[expert] = self.matmul(ones, None, ends).t()
            return found
        finally:
            self._tensors = held

    def matmul(self, x: Tensor, out: Tensor | None = None, offsets: Tensor | None = None) -> Tensor:
        """Returns x · weight^T + bias of x `[..., K]`: `[..., N]`, in `out` if that is given. `offsets`: int32
        `[E]`, the end of the rows of x that are multiplied with each expert's weight. The library sums parts of
        K in any order, so the last bits vary."""
        if out is None:
            out = x.new_empty((*x.shape[:-1], self._num_rows))
        if x.numel():
            rows, outputs = x.reshape(-1, x.shape[-1]).contiguous(), out.view(-1, self._num_rows)
            if self._few is not None and len(rows) <= MAX_TOKENS:
                int4_linear(rows, *self._few, outputs)
                return out
            self._launch(
                configs=self._kernels,
                inputs=rows,
                outputs=outputs,
                locks=self._locks,
                expert_layout=None if offsets is None else functional.pad(offsets, (1, 0)),
                **self._tensors,
            )
        return out


@cache
def has_known_order(device: torch.device) -> bool:
    """Returns whether the library holds integers of 4 bits in the order that `int4_linear` reads."""
    from humming import __version__

    return __version__ == "0.1.20" and torch.cuda.get_device_capability(device)[0] == 9


def words_of(numbers: Tensor, dim: int) -> Tensor:
    """Returns each eight numbers along `dim` as an int32 word, the first one in its lowest bits."""
    if rest := -numbers.shape[dim] % 8:
        fill = [*numbers.shape]
        fill[dim] = rest
        numbers = torch.cat([numbers, numbers.new_zeros(fill)], dim)
    parts = numbers.unflatten(dim, (-1, 8)).unbind(dim + 1)
    words = parts[0].int()
    for i, part in enumerate(parts[1:], start=1):
        words |= part.int() << 4 * i
    return words


def _kernels(config: Any, device: torch.device) -> Tensor:
    """Returns the compiled kernels of a layer, by ranges of rows. The library remembers them by the layer."""
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    kind, most = ("grouped_contiguous", _RANGES_OF_EXPERTS) if config.num_experts else ("dense", _RANGES)
    ends = [*most[:-1], _ANY]
    ranges = [
        [begin, end, get_heuristics_config(config, shape_m=rows, gemm_type=kind, device=device)]
        for begin, end, rows in zip([0, *ends], ends, most, strict=False)
    ]
    kernels: Tensor = HummingKernel.prepare_kernels(
        config.to_str(), json.dumps({"gemm_type": kind}), json.dumps(ranges), device
    )
    return kernels
