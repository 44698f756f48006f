"""Frames: typed messages over a unix socket, each preceded by its length in four bytes.

A peer is disconnected if it sends a frame that is too long or is not a message, or if it does not read what
is sent to it. Only processes of the same user are accepted.
"""

import asyncio
import os
import socket
import struct
import time
from typing import Any, Generic, TypeVar

import msgspec

from lightkv.errors import LightKVError

Received = TypeVar("Received")

MAX_FRAME_BYTES = 64 * 2**20
# A peer that has not read more than so many bytes for so many seconds is disconnected.
MAX_PENDING_BYTES, MAX_STALL_SECONDS = 16 * 2**20, 10.0
_READ_BYTES = 2**18
LENGTH = struct.Struct("<I")
_PEER = struct.Struct("3i")  # pid, uid, gid (SO_PEERCRED)


class BadFrame(LightKVError):
    """A frame is not a message. The stream cannot be used any more."""


class FrameStream(Generic[Received]):
    """Both directions of one stream. `types`: the types of messages that may arrive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, types: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(types)
        self._behind_since: float | None = None
        self._received = bytearray()  # and not decoded yet

    def send(self, message: msgspec.Struct) -> None:
        """Queues a message; `drain` waits until the peer has read enough of what is queued.

        A peer with more than MAX_PENDING_BYTES unread for MAX_STALL_SECONDS is disconnected: queued messages
        are dropped, `receive` returns None, and later messages are lost.
        """
        transport = self._writer.transport
        if transport.is_closing():
            return
        if self._is_stalled(transport.get_write_buffer_size()):
            transport.abort()
            return
        data = self._encoder.encode(message)
        self._writer.write(LENGTH.pack(len(data)) + data)

    def _is_stalled(self, num_pending: int) -> bool:
        # Bytes alone prove nothing: the peer had no chance to read what one turn of the event loop sends.
        if num_pending <= MAX_PENDING_BYTES:
            self._behind_since = None
            return False
        now = time.monotonic()
        if self._behind_since is None:
            self._behind_since = now
        return now - self._behind_since > MAX_STALL_SECONDS

    async def drain(self) -> None:
        await self._writer.drain()

    async def receive(self) -> Received | None:
        """Returns the next message, or None once the peer has closed the stream. Raises BadFrame."""
        try:
            while (message := self._next()) is None:
                data = await self._reader.read(_READ_BYTES)
                if not data:
                    return None
                self._received += data
            return message
        except ConnectionError:
            return None
        except (msgspec.DecodeError, ValueError) as error:
            raise BadFrame(f"a frame that is not a message: {error}") from error

    def _next(self) -> Received | None:
        """Returns the next message if all of it has been read."""
        received = self._received
        if len(received) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(received)
        if length > MAX_FRAME_BYTES:
            raise BadFrame(f"a frame of {length} bytes; at most {MAX_FRAME_BYTES} are allowed")
        end = LENGTH.size + length
        if len(received) < end:
            return None
        frame = bytes(received[LENGTH.size : end])
        del received[:end]
        return self._decoder.decode(frame)

    def close(self) -> None:
        self._writer.close()


def peer_uid(connection: socket.socket) -> int:
    """Returns the user id of the process at the other end of a unix socket (Linux)."""
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(uid)


def is_own(writer: asyncio.StreamWriter) -> bool:
    """Returns whether the peer runs as the same user as this process."""
    return peer_uid(writer.get_extra_info("socket")) == os.geteuid()
