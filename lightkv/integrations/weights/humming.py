"""Products of weights of 4 bits by humming-kernels (`lightkv[quantised]`), which holds a weight in an order of
its own, and compiles kernels for its shape when a model starts. It keeps them in a folder between starts.
"""

import json
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

# The most tokens for which each kernel is chosen; the last one computes all further ones, too.
_RANGES = (8, 16, 32, 64, 128, 256, 1024, 8192)
_ANY = 1 << 30
_ROWS, _COLUMNS = 128, 64  # tiles: rows are padded, columns have to be whole
_NUM_LOCKS = 2048


def can_multiply(num_columns: int, tensor: Tensor, dtype: torch.dtype) -> bool:
    """Returns whether a weight of so many columns beside `tensor` is multiplied in `dtype` by the library."""
    fits = tensor.is_cuda and dtype in (torch.float16, torch.bfloat16) and num_columns % _COLUMNS == 0
    return fits and find_spec("humming") is not None


class HummingProduct:
    """A weight `[N, K]` of numbers from 0 to 15, on a GPU.

    Args:
        numbers: uint8 `[N, K]`.
        scales: `[N, K / group]`.
        zeros: what is subtracted from the numbers, uint8 of the shape of `scales`; None: 8.
        bias: `[N]`, or None.
        dtype: of inputs and outputs, float16 or bfloat16.
    """

    def __init__(
        self, numbers: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        from humming import ops
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_layer_config, transform_humming_tensors

        (self._num_rows, num_columns), device = numbers.shape, numbers.device
        tensors = {"weight": _words(numbers, 1), "weight_scale": scales.to(dtype)}
        if zeros is not None:
            tensors["zero_point"] = _words(zeros, 0)
        if bias is not None:
            tensors["bias"] = bias.to(dtype)
        schema = HummingWeightSchema(
            b_dtype="uint4",
            bs_dtype=str(dtype).removeprefix("torch."),
            weight_scale_group_size=num_columns // scales.shape[1],
            has_zero_point=zeros is not None,
        )
        config = prepare_layer_config(
            self._num_rows,
            num_columns,
            schema,
            pad_n_to_multiple=_ROWS,
            has_bias=bias is not None,
            torch_dtype=dtype,
            device=device,
            tensors=tensors,
        )
        self._tensors: dict[str, Tensor] = transform_humming_tensors(config, tensors)
        self._kernels = _kernels(config, device)
        self._locks = torch.zeros(_NUM_LOCKS, dtype=torch.int32, device=device)
        ops.utils.init_humming_launcher()
        self._launch = ops.launch_kernel

    @property
    def nbytes(self) -> int:
        """The bytes that the weight takes."""
        return sum(one.nbytes for one in self._tensors.values())

    def matmul(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Returns x · weight^T + bias of x `[..., K]`: `[..., N]`, in `out` if that is given. Sums over parts
        of K come in any order, so the last bits vary."""
        if out is None:
            out = x.new_empty((*x.shape[:-1], self._num_rows))
        if x.numel():
            rows = x.reshape(-1, x.shape[-1]).contiguous()
            self._launch(
                configs=self._kernels,
                inputs=rows,
                outputs=out.view(-1, self._num_rows),
                locks=self._locks,
                **self._tensors,
            )
        return out


def _words(numbers: Tensor, dim: int) -> Tensor:
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
    """Returns the compiled kernels of a layer, by ranges of tokens. The library remembers them by the layer."""
    from humming.kernel.humming import HummingKernel
    from humming.tune import get_heuristics_config

    ends = [*_RANGES[:-1], _ANY]
    ranges = [
        [begin, end, get_heuristics_config(config, shape_m=most, gemm_type="dense", device=device)]
        for begin, end, most in zip([0, *ends], ends, _RANGES, strict=False)
    ]
    kernels: Tensor = HummingKernel.prepare_kernels(
        config.to_str(), json.dumps({"gemm_type": "dense"}), json.dumps(ranges), device
    )
    return kernels
