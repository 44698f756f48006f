"""How router/'s processes are started and left alone: the command line, and signals that are not theirs.

A signal to the whole service (a terminal's Ctrl-C, a service manager that stops each of its processes) is the
launcher's to answer: the others ignore it from their first instruction on, and end with their peers or when
they are told. Knows no process.
"""

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def command(module: str, *args: str) -> list[str]:
    """What runs a module of router/ in this interpreter. `-m` alone would import from the working directory
    before all else: only where this process does so too."""
    safe_path = [] if {"", os.getcwd()} & set(sys.path) else ["-P"]
    return [sys.executable, *safe_path, "-m", f"lightkv.router.{module}", *args]


@contextmanager
def signals_held_back() -> Iterator[None]:
    """SIGINT and SIGTERM reach this thread at the end of the block. A process that is started in it begins with
    them held back: none can end it before it calls `ignore_signals`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM from now on, those that were held back too; so do processes started later."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
