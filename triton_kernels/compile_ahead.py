"""Compiles kernels in parallel, before they are needed.

A dry run tells which kernels a program will launch: Triton sees every launch with its arguments, but launches
nothing, and threads compile what is missing and load it. Compiling one kernel takes 0.1 to 3 s, most of it
outside Python, and building its launcher in C 0.25 s.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from triton import AsyncCompileMode, JITFunction
from triton.runtime._async_compile import FutureKernel

MOST_THREADS = 12


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Launches no kernel of Triton while the block runs. Compiles those that the block would have launched, and
    loads them on the current device.

    The block must not depend on what kernels compute: their outputs stay as they are. When it ends, all its
    kernels are ready, but for those that cannot be, whose next launch raises the error. Other threads must
    launch nothing meanwhile.
    """
    compiled: dict[int, Any] = {}  # each once

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        """Stands in for JITFunction.run, since a kernel that is compiled already must not run, either. Returns
        no kernel: `slots/relaunch.py` would keep it, and launch it without JITFunction.run."""
        found = run(kernel, *args, grid=grid, warmup=True, **named)
        compiled[id(found)] = found

    set_device = None
    if torch.cuda.is_available():  # the threads' device is that of this one
        set_device = partial(torch.cuda.set_device, torch.cuda.current_device())
    num_threads, run = min(MOST_THREADS, os.cpu_count() or 1), JITFunction.run
    JITFunction.run = compile_only
    try:
        with ThreadPoolExecutor(num_threads, initializer=set_device) as threads:
            with AsyncCompileMode(threads, ignore_errors=True):  # waits for the threads at its end
                yield
            list(threads.map(_load, compiled.values()))
    finally:
        JITFunction.run = run


def _load(kernel: Any) -> None:
    """Loads a compiled kernel and its launcher. What cannot be loaded fails where it is launched."""
    with suppress(Exception):
        if isinstance(kernel, FutureKernel):  # whose attributes are the kernel's from Triton 3.7 on
            kernel = kernel.result()
        _ = kernel.run
