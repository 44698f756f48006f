"""Compiles kernels in parallel, before they are needed.

A dry run tells which kernels a program will launch: Triton sees every launch with its arguments, but launches
nothing, and threads compile what is missing. Compiling one kernel takes 0.1 to 3 s, most of it outside Python.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from triton import JITFunction, knobs

MOST_THREADS = 12


@contextmanager
def compile_ahead(device: torch.device) -> Iterator[None]:
    """Launches no kernel of Triton while the block runs, and compiles for `device` those that the block would
    have launched.

    The block must not depend on what kernels compute: their outputs stay as they are. When it ends, all its
    kernels are compiled, but for those that cannot be, whose next launch raises the error. Other threads must
    launch nothing meanwhile.
    """
    caller, compiling = threading.get_ident(), dict[tuple[str, str], Future[Any]]()
    threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), initializer=_select(device))

    def note(*, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        """Has a thread compile the kernel. Triton skips the launch of a kernel for which this returns True."""
        if threading.get_ident() != caller:  # a thread of ours, which is to compile it
            return False
        if (fn.name, key) not in compiling:
            compiling[fn.name, key] = threads.submit(fn.jit_function.preload, compile["specialization_data"])
        return True

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        """Stands in for JITFunction.run, since a kernel that is compiled already must not run, either. Returns
        no kernel: `slots/relaunch.py` would keep it, and launch it without JITFunction.run."""
        run(kernel, *args, grid=grid, warmup=True, **named)

    run, hook = JITFunction.run, knobs.runtime.jit_cache_hook
    JITFunction.run = compile_only
    knobs.runtime.jit_cache_hook = note
    try:
        with threads:  # waits for them at the end
            yield
    finally:
        JITFunction.run = run
        knobs.runtime.jit_cache_hook = hook


def _select(device: torch.device) -> Callable[[], None]:
    """Returns a function that makes `device` the calling thread's current device, for which Triton compiles."""
    return lambda: torch.cuda.set_device(device) if device.type == "cuda" else None
