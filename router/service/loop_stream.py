"""A stream for rpyc on a socket that an event loop watches, so that neither sending nor receiving blocks the
loop.

rpyc's own stream blocks. On a non-blocking socket, such as every socket that uvloop watches, it mistakes a full
send buffer for the end of the connection, and it spins while a message arrives in pieces. This stream sends at
once what the socket accepts, and the rest from the event loop. It reports a message once all of it has arrived.
"""

import asyncio
import select
import socket
from collections.abc import Callable

from rpyc.core.channel import Channel
from rpyc.core.consts import STREAM_CHUNK
from rpyc.core.stream import Stream
from rpyc.lib import Timeout

MAX_MESSAGE_BYTES = 256 * 2**20  # of one message that is received; the stream ends at a longer one
_RECEIVE_BYTES = 1 << 16  # read by one system call at most; for more, malloc would map memory each time


class LoopStream(Stream):
    """One end of a connected socket, for one rpyc channel without compression. The stream owns the socket.

    The event loop calls `on_message` when a whole message can be read, and `on_end` once, when the peer has
    closed its end or the socket has failed. From then on `read` and `write` raise EOFError.
    """

    MAX_IO_CHUNK = STREAM_CHUNK  # rpyc sends a longer message in three parts

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        on_message: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        connection.setblocking(False)
        self._loop = loop
        self._socket = connection
        self._fd = connection.fileno()
        self._on_message = on_message
        self._on_end = on_end
        self._received = bytearray()
        self._unsent = bytearray()
        self._is_over = False
        self._is_watched = True
        loop.add_reader(self._fd, self._on_readable)

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Closes the socket and drops unsent bytes."""
        self._unwatch()
        self._is_over = True
        self._unsent.clear()
        self._socket.close()

    def poll(self, timeout: float | Timeout) -> bool:
        """Returns whether a whole message can be read, after waiting up to `timeout` seconds (None: no limit).

        Only rpyc's own synchronous requests wait here. Raises EOFError once the stream has ended.
        """
        limit = Timeout(timeout)
        waiting = select.poll()
        waiting.register(self._fd, select.POLLIN)
        while not self._has_message():
            if self._is_over:
                raise EOFError("the stream has ended")
            left = limit.timeleft()
            if not waiting.poll(None if left is None else left * 1000):
                return False
            self._receive()
        return True

    def read(self, count: int) -> bytes:
        """Returns `count` bytes of a message that `poll` has found."""
        if len(self._received) < count:
            raise EOFError(f"cannot read {count} bytes; only {len(self._received)} have arrived")
        data = bytes(self._received[:count])
        del self._received[:count]
        return data

    def write(self, data: bytes) -> None:
        """Sends `data`; what the socket does not accept at once is sent by the event loop. Raises EOFError."""
        if self._is_over:
            raise EOFError("the stream has ended")
        if self._unsent:
            self._unsent += data
            return
        num_sent = self._send(data)
        if num_sent < len(data):
            self._unsent += memoryview(data)[num_sent:]
            self._loop.add_writer(self._fd, self._on_writable)

    def _send(self, data: bytes | bytearray) -> int:
        """Returns how many bytes the socket accepted. Raises EOFError if the peer has closed its end."""
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            self._end()
            raise EOFError(str(error)) from error

    def _receive(self) -> None:
        """Reads what has arrived, and notes the end of the stream."""
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if data and len(self._received) + len(data) <= MAX_MESSAGE_BYTES:
            self._received += data
        else:
            self._end()

    def _has_message(self) -> bool:
        header = Channel.FRAME_HEADER
        if len(self._received) < header.size:
            return False
        length, _ = header.unpack_from(self._received)
        return len(self._received) >= header.size + length + len(Channel.FLUSHER)

    def _on_readable(self) -> None:
        self._receive()
        while self._has_message():
            before = len(self._received)
            self._on_message()
            if len(self._received) == before:  # the reader does not read from this stream any more
                return

    def _on_writable(self) -> None:
        try:
            del self._unsent[: self._send(self._unsent)]
        except EOFError:
            return
        if not self._unsent:
            self._loop.remove_writer(self._fd)

    def _end(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._unwatch()
            self._loop.call_soon(self._on_end)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._fd)
            self._loop.remove_writer(self._fd)
