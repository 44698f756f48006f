"""What the service's processes have in common: their command line, signals, and garbage collection.

A signal may reach every process of the service: Ctrl-C in a terminal, or a service manager that stops each of
them. The launcher alone handles it. The other processes ignore it from their first instruction on, and end
with their peers or when the launcher orders it.
"""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MMAP_THRESHOLD, _LARGE_BYTES = -3, 2**17  # the number of a setting of mallopt, and its value
_PDEATHSIG = 1  # of prctl: the signal to get when the parent dies


def command(module: str, *args: str) -> list[str]:
    """Returns the command that runs a module of router/ in this interpreter.

    `-m` alone would put the working directory first on the import path. `-P` prevents that, unless this process
    imports from there, too.
    """
    safe_path = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    return [sys.executable, *safe_path, "-m", f"lightkv.router.{module}", *args]


def how_ended(code: int) -> str:
    """Returns how a process with this exit code ended, for a message."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"


@contextmanager
def signals_held_back() -> Iterator[None]:
    """Blocks SIGINT and SIGTERM in this thread until the end of the block.

    A process that is started in the block inherits this, so that no signal can end it before it calls
    `ignore_signals`.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Ignores SIGINT and SIGTERM from now on, including blocked ones. Processes started later inherit this."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def end_with_parent() -> None:
    """Has the kernel kill this process when the thread that has started it ends, even while this one is
    stopped."""
    ctypes.CDLL(None).prctl(_PDEATHSIG, signal.SIGKILL)


def map_large_blocks() -> None:
    """Has malloc map each large block by itself, where libc can, so that it goes back to the system when it is
    freed. By default malloc keeps blocks of up to 32 MiB once it has freed one of that size."""
    with suppress(AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE_BYTES)


def freeze_objects() -> None:
    """Leaves all objects that exist now out of later garbage collections. Call it once a process is ready.

    A collection that goes through all objects of the imported libraries stops a process for a tenth of a second
    or more, and these objects live as long as the process.
    """
    gc.collect()
    gc.freeze()


def collect_seldom() -> None:
    """Has garbage collections go through all objects a hundred times less often than by default.

    One that goes through tens of thousands of queued requests stops every stream for a tenth of a second or
    more, and finds nothing: requests are freed by their reference counts.
    """
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, 1000)
