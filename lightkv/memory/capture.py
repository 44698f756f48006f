"""CUDA graphs of computations on static tensors."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch

Output = TypeVar("Output")


class Capture(NamedTuple):
    """What captures share whose graphs never run at the same time.

    `pool`: torch's handle of a memory pool. `stream`: where passes warm up and are captured; cuBLAS keeps a
    workspace of 32 MiB for each stream that it has seen.
    """

    pool: Any
    stream: torch.cuda.Stream

    @classmethod
    def new(cls) -> "Capture":
        """Returns a memory pool and a stream on the current device."""
        return cls(torch.cuda.graph_pool_handle(), torch.cuda.Stream())

    def graph(self, compute: Callable[[], Output]) -> tuple[torch.cuda.CUDAGraph, Output]:
        """Returns a graph of `compute` and what it returned. The static tensors hold padding alone."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            compute()  # compiles kernels and lets libraries set themselves up
        torch.cuda.current_stream().wait_stream(self.stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream), _without_collections():
            output = compute()
        graph.replay()  # the first replay of a graph takes longer than the others
        return graph, output


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
