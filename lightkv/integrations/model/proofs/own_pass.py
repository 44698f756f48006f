"""What the proofs of fused parts share: runs of a model's own code, on noise, and exact comparison."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightkv.errors import LightKVError

# The rounding of float32 results, since a kernel adds up a row in another order, and has its own exp.
MIN_EPS = 2.0**-20
LARGE = 64.0  # the factor of large inputs, which a module that clips its projections would clip


class NotFusable(Exception):
    """A module was not found to compute what a fused pass computes; the message says why.

    Whoever looks for fusable parts catches it, and the module keeps its own forward pass.
    """


def own_forward(module: Any) -> Callable[..., Any]:
    """Returns the forward pass of the class of `module`."""
    return partial(type(module).forward, module)


def run_own(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns what a model's own code, `forward`, returns for inputs that it was not made for.

    This alone catches errors of any type, as NotFusable: the code is transformers', or comes with a checkpoint,
    so nothing is known of what it raises for noise. Running out of memory says nothing about a module, and an
    error that code of lightkv raises, which the module calls back, is a bug: both are raised as they are.
    """
    try:
        return forward(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if _is_bug(error):
            raise
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise NotFusable(f"it fails on noise ({said})") from error


def _is_bug(error: Exception) -> bool:
    """Returns whether lightkv raised `error`, and not on purpose: its innermost function is one of lightkv.

    That is not the function above: there an argument is missing, or one too many.
    """
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    name = "" if traceback is None else str(traceback.tb_frame.f_globals.get("__name__"))
    return name.startswith("lightkv.") and name != __name__ and not isinstance(error, LightKVError)


def noise(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns normal noise of a shape, the same each time, of the dtype and on the device of `like`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


def is_equal(ours: Any, own: Any) -> bool:
    """Returns whether both are tensors of the same dtype, shape and values."""
    both = isinstance(ours, Tensor) and isinstance(own, Tensor)
    return both and ours.dtype == own.dtype and torch.equal(ours, own)


def relative_error(ours: Tensor, own: Tensor, bound: Tensor, num_roundings: int) -> float:
    """Returns the largest difference, in units of what so many roundings may change of numbers of size `bound`;
    infinite for another dtype or shape."""
    if ours.dtype != own.dtype or ours.shape != own.shape:
        return float("inf")
    unit = num_roundings * max(torch.finfo(own.dtype).eps, MIN_EPS) * bound.abs().float()
    error = ((ours.float() - own.float()).abs() / unit.clamp(min=1e-30)).max()
    return float(torch.nan_to_num(error, nan=float("inf")))


def epsilons(module: Any, dtype: torch.dtype) -> list[float]:
    """Returns what the epsilon of a norm may be, most likely ones first."""
    kept = [value for value in vars(module).values() if isinstance(value, float) and 0 < value < 1e-2]
    return list(dict.fromkeys((*kept, 1e-5, 1e-6, torch.finfo(dtype).eps)))
