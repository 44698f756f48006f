"""Sends the pieces of long bodies so that other tasks run in between, and only as fast as the client reads.

Long bodies take turns, and leave half of the time to short answers and to events that arrive. The server's
`send` waits while the client has too many bytes to read.
"""

import asyncio
import time
from collections.abc import Callable, Iterator
from itertools import chain

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from lightkv.router.api.answers.generation import until_disconnected

SENT_BYTES, MAX_SENT_BYTES = 2**16, 2**18  # that are sent at a time, if pieces are short, and at most
TURN_SECONDS = 0.002  # in which a body is made before other tasks run


class Pacer:
    """Sends long bodies in turns. All responses of a service share one pacer."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def send(self, pieces: Iterator[bytes], send: Send, is_read: Callable[[], bool]) -> None:
        """Sends a body, or a part of one, until `is_read` says that its client has gone."""
        is_over = False
        while not is_over and is_read():
            begun = time.monotonic()
            content, is_over = _next(pieces)
            seconds = time.monotonic() - begun
            for start in range(0, len(content), MAX_SENT_BYTES):
                await send(_part(content[start : start + MAX_SENT_BYTES]))
            if not is_over:
                async with self._turn:
                    await asyncio.sleep(seconds)


class LongResponse(Response):
    """A response of JSON in pieces. One that is made in a turn has a Content-Length; a longer one is sent by
    `pacer`."""

    media_type = "application/json"

    def __init__(self, pieces: Iterator[bytes], pacer: Pacer) -> None:
        self.status_code = 200
        self.background = None
        self._pieces = pieces
        self._pacer = pacer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        content, is_over = _next(self._pieces)
        if is_over and len(content) <= MAX_SENT_BYTES:
            await Response(content, media_type=self.media_type)(scope, receive, send)
            return
        self.init_headers()
        reading = asyncio.create_task(until_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._pacer.send(chain([content], self._pieces), send, lambda: not reading.done())
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            reading.cancel()


def _part(content: bytes) -> Message:
    """Returns the message that sends a part of a body, which is not the last."""
    return {"type": "http.response.body", "body": content, "more_body": True}


def _next(pieces: Iterator[bytes]) -> tuple[bytes, bool]:
    """Returns the next part of a body, made within a turn, and whether it is the last."""
    content, num_bytes = [], 0
    end = time.monotonic() + TURN_SECONDS
    for piece in pieces:
        content.append(piece)
        num_bytes += len(piece)
        if num_bytes >= SENT_BYTES or time.monotonic() > end:
            return b"".join(content), False
    return b"".join(content), True
