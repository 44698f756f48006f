"""Compiles kernels in parallel, before they are needed.

A dry run tells which kernels a program will launch: Triton sees every launch with its arguments, but launches
nothing, and threads compile what is missing. Compiling one kernel takes 0.1 to 3 s, most of it outside Python.
"""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import AsyncCompileMode, JITFunction

MOST_THREADS = 12


@contextmanager
def compile_ahead() -> Iterator[None]:
    """Launches no kernel of Triton while the block runs, and compiles for the current device those that the
    block would have launched.

    The block must not depend on what kernels compute: their outputs stay as they are. When it ends, all its
    kernels are compiled, but for those that cannot be, whose next launch raises the error. Other threads must
    launch nothing meanwhile.
    """

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        """Stands in for JITFunction.run, since a kernel that is compiled already must not run, either. Returns
        no kernel: `slots/relaunch.py` would keep it, and launch it without JITFunction.run."""
        run(kernel, *args, grid=grid, warmup=True, **named)

    run = JITFunction.run
    JITFunction.run = compile_only
    try:
        # The mode waits for the threads at its end.
        with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as threads:
            with AsyncCompileMode(threads, ignore_errors=True):
                yield
    finally:
        JITFunction.run = run
