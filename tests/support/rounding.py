"""How near the results of a layer's kernels have to be to their references."""

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def dtypes(device: torch.device) -> list[torch.dtype]:
    """Returns the dtypes that are right on this device: the interpreter's bfloat16 is not."""
    return [torch.float32, torch.float16] + ([torch.bfloat16] if device.type == "cuda" else [])


def close(actual: Tensor, wanted: Tensor) -> None:
    """Asserts that two tensors are the same but for the rounding of the dtype of `actual`."""
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), wanted.double(), rtol=tolerance, atol=tolerance)
