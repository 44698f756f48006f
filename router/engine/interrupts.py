"""Ctrl-C in a program that steps an engine: it is answered between two steps, never within one.

A KeyboardInterrupt that is raised while a step changes counts or memory would part the two, and the engine
would have to stop for good.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """SIGINT's handler runs at the end of the block, if the signal came within it.

    Only the main thread runs handlers, and only a handler that is a Python function can be deferred: elsewhere,
    and where SIGINT is ignored or ends the process, the block runs as it is.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    frames: list[FrameType | None] = []
    try:
        signal.signal(signal.SIGINT, lambda number, frame: frames.append(frame))
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if frames:
            handler(signal.SIGINT, frames[-1])
