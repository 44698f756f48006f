"""Standard output and error that never hold their process up.

Writing to a pipe that is not read, or to a terminal that is stopped, waits. An event loop that does it serves
no client meanwhile, and hears no signal. So a process of the service queues what it writes, and a thread
writes it. What the queue has no room for is dropped and counted.
"""

import atexit
import io
import math
import os
import select
import sys
import threading
import time
from collections import deque
from typing import TextIO

from .child_process import signals_held_back

MAX_WAITING_BYTES = 2**20  # of one stream, some four thousand lines of the log of requests
_PIECE_BYTES = 4096  # a pipe takes pieces of this size whole, so that lines of two processes do not mix
_LAST_SECONDS = 1.0  # for what is still queued when the process ends


class LogStream(io.TextIOBase):
    """A text stream whose `write` neither waits nor raises: a thread writes to the descriptor of `stream`.

    Text is queued by whole lines, or at `flush`. Beyond `max_bytes` lines are dropped. Once there is room
    again, a line says how many.

    Attributes:
        num_dropped: the lines that were dropped, or that the descriptor refused (a full device, a closed pipe).
    """

    def __init__(self, stream: TextIO, max_bytes: int = MAX_WAITING_BYTES) -> None:
        self.stream = stream
        self.num_dropped = 0
        self._max_bytes = max_bytes
        self._fd = stream.fileno()
        self._line = ""  # of which the end has not come yet
        self._pieces: deque[bytes] = deque()
        self._num_bytes = 0  # queued, or being written
        self._num_unsaid = 0  # dropped lines that no line has reported
        self._changed = threading.Condition()
        # The thread inherits this: a signal that others hold back must not come by it.
        with signals_held_back():
            threading.Thread(target=self._write_all, name="log", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self.stream.errors

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return self.stream.isatty()

    def write(self, text: str) -> int:
        """Queues the whole lines of `text`, and keeps the rest for the next call. Returns its length."""
        with self._changed:
            lines, end, rest = (self._line + text).rpartition("\n")
            self._line = rest
            if end:
                self._queue(lines + end)
            if len(rest) > _PIECE_BYTES:
                self._queue_rest()
        return len(text)

    def flush(self) -> None:
        """Queues a line that has not ended, too."""
        with self._changed:
            self._queue_rest()

    def drain(self, seconds: float) -> bool:
        """Waits until everything is written or has failed, at most so long. Returns whether it is."""
        with self._changed:
            self._queue_rest()
            return self._changed.wait_for(lambda: not self._num_bytes, seconds)

    def _queue_rest(self) -> None:
        rest, self._line = self._line, ""
        if rest:
            self._queue(rest)

    def _queue(self, text: str) -> None:
        data = text.encode(self.encoding or "utf-8", "replace")
        if self._num_bytes + len(data) > self._max_bytes:
            num_lines = max(data.count(b"\n"), 1)
            self.num_dropped += num_lines
            self._num_unsaid += num_lines
            return
        if self._num_unsaid:
            report = (
                f"lightkv: {self._num_unsaid} lines were dropped here, because nothing read them in time\n"
            )
            self._num_unsaid = 0
            data = report.encode() + data
        self._pieces.append(data)
        self._num_bytes += len(data)
        self._changed.notify_all()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pieces)
                data = self._pieces.popleft()
                while self._pieces and len(data) + len(self._pieces[0]) <= _PIECE_BYTES:
                    data += self._pieces.popleft()
            is_written = self._write(data)
            with self._changed:
                if not is_written:
                    self.num_dropped += max(data.count(b"\n"), 1)
                self._num_bytes -= len(data)
                self._changed.notify_all()

    def _write(self, data: bytes) -> bool:
        """Writes all of `data`, however long that takes. Returns whether no error prevents it."""
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self._fd, left) :]
            except BlockingIOError:  # another process that shares the pipe does not want to wait
                select.select([], [self._fd], [])
            except OSError:
                return False
        return True


def write_in_background(also_stdout: bool = False) -> None:
    """Replaces this process's standard error by a LogStream, and also its standard output if that is wanted.

    When the process ends, what is queued has one more second. A stream without a descriptor stays as it is.
    """
    for name in ("stdout", "stderr") if also_stdout else ("stderr",):
        try:
            stream = LogStream(getattr(sys, name))
        except (OSError, ValueError, AttributeError):  # it has no descriptor, or is closed
            continue
        setattr(sys, name, stream)
        atexit.register(_restore, name, stream)


def drain_log(seconds: float) -> None:
    """Waits until this process's standard error is written, at most so long."""
    if isinstance(sys.stderr, LogStream):
        sys.stderr.drain(seconds)


class MinuteLog:
    """Prints lines to this process's standard error, at most one a minute."""

    def __init__(self) -> None:
        self._next = -math.inf  # when a line may be printed

    def print(self, line: str) -> None:
        """Prints a line unless it is empty, or another was printed less than a minute ago."""
        if line and (now := time.monotonic()) >= self._next:
            self._next = now + 60
            print(line, file=sys.stderr)


def num_dropped_lines() -> int:
    """Returns how many lines this process's standard error has dropped; 0 if it is no LogStream."""
    return sys.stderr.num_dropped if isinstance(sys.stderr, LogStream) else 0


def _restore(name: str, replaced: LogStream) -> None:
    """Gives what is queued its last second. The interpreter flushes its streams when threads run no more, so
    the process ends with its own stream."""
    replaced.drain(_LAST_SECONDS)
    setattr(sys, name, replaced.stream)
