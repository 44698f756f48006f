"""CUDA graphs of computations on static tensors."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode

Output = TypeVar("Output")
_MOST_BYTES = 1 << 20  # of a host constant


class HostConstants(TorchFunctionMode):
    """Copies on the device of the small tensors that a model's code makes on the host in every pass, such as
    `torch.tensor(1e-5).to(device)`, which a capture cannot copy.

    A pass inside the mode makes the copies; a later one, with the same values, finds them by their bytes and
    copies them on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self._copies: dict[tuple[bytes, torch.dtype, torch.Size, torch.device], torch.Tensor] = {}

    @property
    def were_met(self) -> bool:
        """Whether a pass has made such tensors."""
        return bool(self._copies)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        made_there = func is torch.tensor and args and named.get("device") is not None
        if made_there and not isinstance(args[0], torch.Tensor):
            host, device = func(*args, **(named | {"device": "cpu"})), torch.device(named["device"])
        elif func is torch.Tensor.to and args[0].device.type == "cpu":
            where = {name: value for name, value in named.items() if name != "copy"}
            to_device, dtype, *_ = torch._C._nn._parse_to(*args[1:4], **where)
            host, device = args[0].to(dtype or args[0].dtype), to_device or args[0].device
        else:
            return func(*args, **named)
        if device.type == "cuda" and host.nbytes <= _MOST_BYTES:
            content = host.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            key = content, host.dtype, host.shape, device
            if key not in self._copies:
                self._copies[key] = host.to(device)
            return self._copies[key].clone()  # which the caller may write to
        return func(*args, **named)


class Capture(NamedTuple):
    """What captures share whose graphs never run at the same time.

    `pool`: torch's handle of a memory pool. `stream`: where passes warm up and are captured; cuBLAS keeps a
    workspace of 32 MiB for each stream that it has seen. `constants`: those of the computations.
    """

    pool: Any
    stream: torch.cuda.Stream
    constants: HostConstants

    @classmethod
    def new(cls) -> "Capture":
        """Returns a memory pool and a stream on the current device."""
        return cls(torch.cuda.graph_pool_handle(), torch.cuda.Stream(), HostConstants())

    def graph(self, compute: Callable[[], Output]) -> tuple[torch.cuda.CUDAGraph, Output]:
        """Returns a graph of `compute` and what it returned. The static tensors hold padding alone.

        `compute`, or a computation with the same kernels, has run in `rehearsal` before. The host does not wait
        for the device, and the steps that run there go on.
        """
        graph = torch.cuda.CUDAGraph()
        # The mode doubles the time of a pass, so it is entered only where a rehearsal has met host constants.
        constants = self.constants if self.constants.were_met else nullcontext()
        with self._on_stream(), constants, _without_collections():
            # Kernels that no step has launched yet are loaded while the block runs, which "relaxed" allows.
            graph.capture_begin(pool=self.pool, capture_error_mode="relaxed")
            try:
                output = compute()
            finally:
                graph.capture_end()
        return graph, output

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Runs the block on the stream of the captures, so that libraries set themselves up there, and copies
        host constants to the device."""
        with self._on_stream(), self.constants:
            yield

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.current_stream().wait_stream(self.stream)


@contextmanager
def _without_collections() -> Iterator[None]:
    """Runs no garbage collection while the block runs: to free another graph would break a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
