"""Compares fused passes with the model's own code, which runs on noise before it is replaced."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lightkv.integrations.model.attention_call import AttentionCall, compute
from lightkv.integrations.model.context import context_length
from lightkv.integrations.model.mixers.mixer import Mixer

# The rounding of float32 results, since a kernel adds up a row in another order, and has its own exp.
MIN_EPS = 2.0**-20
LARGE = 64.0  # the factor of large inputs, which a module that clips its projections would clip
NUM_TOKENS = 8
_DEFAULT_CONTEXT = 2048  # tokens, for a configuration that names no context


class NotFusable(Exception):
    """A module does not compute what a fused pass computes; the message says why, and the module keeps its own
    forward pass."""


def own_forward(module: Any) -> Callable[..., Any]:
    """Returns the forward pass of the class of `module`."""
    return partial(type(module).forward, module)


def run_own(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns what a model's own code, `forward`, returns for inputs that it was not made for.

    This alone catches errors of any type, as NotFusable: the code is transformers', so nothing is known of what
    it raises for noise. Running out of memory says nothing about a module, and is raised as it is.
    """
    try:
        return forward(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise NotFusable(f"it fails on noise ({said})") from error


def run_fused(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Returns what a fused pass, `forward`, returns. Raises NotFusable where the sizes of a module's parts do
    not fit what its plan says of them, which torch reports as a RuntimeError."""
    try:
        return forward(*args, **kwargs)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise NotFusable(f"fused, it fails ({' '.join(str(error).split())[:100]})") from error


def noise(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns normal noise of a shape, the same each time, of the dtype and on the device of `like`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator).to(like.device, like.dtype)


def noise_of_tokens(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Returns noise `[1, T, C]` of two magnitudes, each in two tokens that follow each other."""
    token = torch.arange(shape[1], device=like.device)[:, None]
    return noise(shape, like) * torch.where(token // 2 % 2 == 1, LARGE, 1.0).to(like.dtype)


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


class NoiseHandler:
    """An AttentionHandler that records calls, and returns noise: the same noise for the same shape. `last`: the
    module that mixed tokens last."""

    def __init__(self) -> None:
        self.calls: list[AttentionCall] = []
        self.last: nn.Module | None = None

    def attend(self, call: AttentionCall) -> Tensor:
        self.calls.append(call.rotated())
        self.last = call.module
        return noise(call.output_shape, call.q)

    def mix(self, mixer: Mixer, x: Tensor) -> Tensor:
        self.last = mixer.module
        return noise(tuple(x.shape), x)


class Call(NamedTuple):
    """A call of a module by its model, and what the module returned."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any

    @property
    def x(self) -> Any:
        """The input of the module."""
        return self.args[0] if self.args else self.kwargs.get("hidden_states")

    def of(self, x: Tensor) -> "Call":
        """Returns the same call of another input."""
        if self.args:
            return self._replace(args=(x, *self.args[1:]))
        return self._replace(kwargs=self.kwargs | {"hidden_states": x})


def recorded_calls(
    model: PreTrainedModel, modules: Iterable[nn.Module], handler: NoiseHandler
) -> dict[nn.Module, Call]:
    """Runs a bound `model` over eight tokens, at positions from the first to the last of its context. Returns
    the first call of each of `modules`, in the order in which they returned."""
    calls: dict[nn.Module, Call] = {}

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        calls.setdefault(module, Call(args, kwargs, output))

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in modules]
    context = context_length(model.config.get_text_config()) or _DEFAULT_CONTEXT
    wanted = (0, 1, 2, 3, context // 3, context // 2, context - 2, context - 1)
    positions = torch.tensor([max(0, min(one, context - 1)) for one in wanted], device=model.device)
    try:
        compute(model, torch.zeros_like(positions), positions, handler, positions[:1])
    finally:
        for handle in handles:
            handle.remove()
    return calls


class OwnPass(NamedTuple):
    """A run of the forward pass of a module's class on noise: what it was given, and what it returned."""

    module: nn.Module
    call: Call

    @classmethod
    def of(cls, module: nn.Module, call: Call) -> "OwnPass":
        """Runs `module` on noise in the place of the input of `call`. Raises NotFusable where that is not one
        vector for each token, or where it does not return as many."""
        if not isinstance(call.x, Tensor) or call.x.dim() != 3:
            raise NotFusable("it does not get one vector for each token")
        given = call.of(noise_of_tokens(tuple(call.x.shape), call.x))
        output = run_own(own_forward(module), *given.args, **_with_noise(given.kwargs))
        if not isinstance(output, Tensor) or output.shape != call.x.shape:
            raise NotFusable("it returns something else than one vector for each token")
        return cls(module, given._replace(output=output))

    def require_same(self, fused: Callable[..., Any] | None = None) -> None:
        """Raises NotFusable unless `fused` returns the same, but for rounding; None for the module as it is
        now."""
        args, kwargs, own = self.call
        ours = run_fused(fused or self.module, *args, **_with_noise(kwargs)).float()
        tolerance = max(8 * torch.finfo(own.dtype).eps, 2.0**-11)
        if not bool(
            ((ours - own.float()).abs() <= tolerance * own.float().abs().amax(-1, keepdim=True)).all()
        ):
            raise NotFusable("fused, it returns something else")


def _with_noise(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call, with a new NoiseHandler if they have a handler."""
    return kwargs | {"lightkv": NoiseHandler()} if "lightkv" in kwargs else kwargs
