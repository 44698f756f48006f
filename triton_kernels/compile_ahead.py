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
from triton import JITFunction

MOST_THREADS = 12


@contextmanager
def compile_ahead(device: torch.device) -> Iterator[None]:
    """Launches no kernel of Triton while the block runs, and compiles for `device` those that the block would
    have launched.

    The block must not depend on what kernels compute: their outputs stay as they are. When it ends, all its
    kernels are compiled, but for those that cannot be, whose next launch raises the error. Other threads must
    launch nothing meanwhile.
    """
    caller, compiling = threading.get_ident(), dict[tuple[int, str], Future[Any]]()
    threads = ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1), initializer=_select(device))

    def note(kernel: Any, key: str, *arguments: Any) -> Any:
        """Stands in for JITFunction._do_compile: has a thread compile the kernel, and returns none, so Triton
        does not launch it. The thread gets Triton's own objects: a form of them in text, as `preload` takes it,
        has lost the names in records."""
        if threading.get_ident() != caller:  # a thread of ours
            return compile_now(kernel, key, *arguments)
        if (id(kernel), key) not in compiling:
            compiling[id(kernel), key] = threads.submit(compile_now, kernel, key, *arguments)
        return None

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        """Stands in for JITFunction.run, since a kernel that is compiled already must not run, either. Returns
        no kernel: `slots/relaunch.py` would keep it, and launch it without JITFunction.run."""
        run(kernel, *args, grid=grid, warmup=True, **named)

    run, compile_now = JITFunction.run, JITFunction._do_compile
    JITFunction.run, JITFunction._do_compile = compile_only, note
    try:
        with threads:  # waits for them at the end
            yield
    finally:
        JITFunction.run, JITFunction._do_compile = run, compile_now


def _select(device: torch.device) -> Callable[[], None]:
    """Returns a function that makes `device` the calling thread's current device, for which Triton compiles."""
    return lambda: torch.cuda.set_device(device) if device.type == "cuda" else None
