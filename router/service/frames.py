"""Frames: typed messages over a local stream, each after its length in four bytes.

Knows msgspec and asyncio; knows no message. A peer that sends more than it may, or what is no message, is cut
off, and so is one that does not take what is sent to it. Sockets are unix sockets, and only processes of the
same user are let in.
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
MAX_PENDING_BYTES = 16 * 2**20  # that a peer has yet to take, for longer than this:
MAX_STALL_SECONDS = 10.0
_LENGTH = struct.Struct("<I")
_PEER = struct.Struct("3i")  # pid, uid, gid (SO_PEERCRED)


class BadFrame(LightKVError):
    """What arrived is no message; the stream is of no use any more."""


class FrameStream(Generic[Received]):
    """Both directions of one stream. `types`: what may arrive."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, types: Any) -> None:
        self._reader = reader
        self._writer = writer
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(types)
        self._behind_since: float | None = None

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; `drain` waits until the peer has taken enough of what is queued.

        A peer that has had more than MAX_PENDING_BYTES to take for MAX_STALL_SECONDS is dead, and is cut off:
        what waits for it is dropped, `receive` returns None, and what is sent from then on is lost.
        """
        transport = self._writer.transport
        if transport.is_closing():
            return
        if self._is_stalled(transport.get_write_buffer_size()):
            transport.abort()
            return
        data = self._encoder.encode(message)
        self._writer.write(_LENGTH.pack(len(data)) + data)

    def _is_stalled(self, num_pending: int) -> bool:
        # By time as well: what one turn of the loop sends, however much, nobody could have taken yet.
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
        """The next message; None when the peer has closed. Raises BadFrame."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise BadFrame(f"a frame of {length} bytes; {MAX_FRAME_BYTES} are allowed")
            return self._decoder.decode(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        except (msgspec.DecodeError, ValueError) as error:
            raise BadFrame(f"a frame that is no message: {error}") from error

    def close(self) -> None:
        self._writer.close()


def peer_uid(connection: socket.socket) -> int:
    """The user that the process at the other end of a unix socket runs as (Linux)."""
    _, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return int(uid)


def is_own(writer: asyncio.StreamWriter) -> bool:
    """Does the peer run as the same user as this process?"""
    return peer_uid(writer.get_extra_info("socket")) == os.geteuid()
