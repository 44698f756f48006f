"""Frames: typed messages over a unix socket, each preceded by its length in four bytes.

A peer is disconnected if it sends a frame that is too long or is not a message. A peer that reads slowly is
not: each end sees how much is unread, and sends less (`router.py`, `router_client.py`). Only processes of the
same user are accepted.
"""

import asyncio
import os
import socket
import struct
from typing import Any, Generic, TypeVar

import msgspec

from lightkv.errors import LightKVError

Received = TypeVar("Received")

MAX_FRAME_BYTES = 64 * 2**20
_READ_BYTES = 2**18
LENGTH = struct.Struct("<I")
_PEER = struct.Struct("3i")  # pid, uid, gid (SO_PEERCRED)


class BadFrame(LightKVError):
    """A frame is not a message. The stream cannot be used any more."""


def decode(decoder: "msgspec.msgpack.Decoder[Received]", data: bytes) -> Received:
    """Returns the message that `data` is. Raises BadFrame if it is none of the decoder's types, or nests too
    deeply."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadFrame(f"{len(data)} bytes are not a message: {error}") from error


class FrameStream(Generic[Received]):
    """Both directions of one stream. `types`: the types of messages that may arrive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, types: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(types)
        self._received = bytearray()  # and not decoded yet

    @property
    def num_unread(self) -> int:
        """The bytes that were sent and that the peer has not read, less those in the socket's own buffers."""
        return self._writer.transport.get_write_buffer_size()

    def send(self, message: msgspec.Struct) -> None:
        """Queues a message; `drain` waits until the peer has read enough of what is queued. Once the stream is
        closed, messages are lost."""
        self.send_frame(self.frame(message))

    def frame(self, message: msgspec.Struct) -> bytes:
        """Returns the bytes of a message as it is sent."""
        data = self._encoder.encode(message)
        return LENGTH.pack(len(data)) + data

    def send_frame(self, frame: bytes) -> None:
        """Queues what `frame` returned."""
        if not self._writer.transport.is_closing():
            self._writer.write(frame)

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
        return decode(self._decoder, frame)

    def close(self) -> None:
        self._writer.close()


def peer_uid(connection: socket.socket) -> int:
    """Returns the user id of the process at the other end of a unix socket (Linux)."""
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(uid)


def is_own(writer: asyncio.StreamWriter) -> bool:
    """Returns whether the peer runs as the same user as this process."""
    return peer_uid(writer.get_extra_info("socket")) == os.geteuid()
