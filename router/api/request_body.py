"""How the bodies of requests are read: within bounds of bytes, one by one and all together, and of JSON values.

Parsing JSON holds Python's lock from its first value to its last, in whatever thread it runs. So a long body
is counted first, which is quick, and refused where its parsing would silence the whole process.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

SHORT_BODY = 2**16  # bytes that are parsed at once: it takes a few milliseconds at most
# The first bytes of each body are not counted: where no room is left, short requests are still served.
FREE_BYTES = 2**14
MAX_VALUES, MAX_STRINGS, MAX_CONTAINERS = 2**19, 2**15, 2**13  # of one body; keys are strings, too
# What Python's own parser, which takes all that clients send for JSON, gets through in a few milliseconds.
_LENIENT_BODY, _LENIENT_STRUCTURE = 2**22, 2**17  # bytes in all, and bytes outside of strings
_PIECE = 2**18  # bytes that are counted in one go


class BodyRoom:
    """What the bodies that are being read may take, all together.

    Args:
        max_body_bytes: of one body.
        max_unread_bytes: of all bodies that are not parsed yet, less the first FREE_BYTES of each.
        num_ids: token ids that one body may need to hold; MAX_VALUES are let through in any case.
    """

    def __init__(self, max_body_bytes: int, max_unread_bytes: int, num_ids: int = 0) -> None:
        self.max_body_bytes = max_body_bytes
        self.max_unread_bytes = max(max_unread_bytes, max_body_bytes)
        self.max_values = max(num_ids, MAX_VALUES)
        self.num_claimed = 0
        self.parsing = asyncio.Semaphore(1)  # long bodies are parsed one after the other

    @property
    def too_large(self) -> HTTPException:
        """The answer to a body that can never be read."""
        return HTTPException(413, f"the body has more than {self.max_body_bytes} bytes; send less at once")

    def claim(self, num_bytes: int) -> None:
        """Take room for bytes that have come. Raises HTTPException (503) where there is not enough."""
        if self.num_claimed + num_bytes > self.max_unread_bytes:
            raise HTTPException(
                503,
                f"the bodies of other requests fill the {self.max_unread_bytes} bytes that there are for "
                "unfinished ones; try again in a moment",
            )
        self.num_claimed += num_bytes

    def release(self, num_bytes: int) -> None:
        """Give back room that was claimed."""
        self.num_claimed -= num_bytes


class _BodyRequest(Request):
    """A request whose body is read within the bounds of `BodyRoom`."""

    def __init__(self, request: Request, room: BodyRoom) -> None:
        super().__init__(request.scope, request.receive, request._send)
        self._room = room
        self._num_claimed = 0
        self._received: bytearray | None = None

    async def body(self) -> Any:
        """The whole body, a bytearray; empty once it is parsed. Raises HTTPException (413, 503)."""
        if self._received is None:
            received = bytearray()
            async for chunk in self.stream():
                if len(received) + len(chunk) > self._room.max_body_bytes:
                    raise self._room.too_large
                more = max(len(received) + len(chunk) - FREE_BYTES, 0) - self._num_claimed
                self._room.claim(more)
                self._num_claimed += more
                received += chunk
            self._received = received
        return self._received

    async def json(self) -> Any:
        """The body's value. Raises HTTPException (413, 503), ValueError for what is no JSON."""
        body = await self.body()
        try:
            if len(body) <= SHORT_BODY:
                return json.loads(body.decode())
            async with self._room.parsing:
                return await asyncio.to_thread(parse, body, self._room.max_values)
        finally:
            body.clear()  # FastAPI holds it as long as the request lasts
            self.release()

    def release(self) -> None:
        """Give back the body's room: it was parsed, or never will be."""
        self._room.release(self._num_claimed)
        self._num_claimed = 0


def body_route(room: BodyRoom) -> type[APIRoute]:
    """The class of routes that read their bodies within `room`."""

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_bounded(request: Request) -> Response:
                bounded = _BodyRequest(request, room)
                try:
                    return await handle(bounded)
                finally:
                    bounded.release()

            return handle_bounded

    return BodyRoute


def parse(body: bytes | bytearray, max_values: int = MAX_VALUES) -> Any:
    """The value of a long body. Python's lock is held for some tens of milliseconds at a time.

    Raises HTTPException (413) for more values than that allows, ValueError for what is no JSON. In a body of
    very many values or bytes NaN and half surrogate pairs, which are no JSON, are refused; in others they are
    read.
    """
    num_structure = _check_values(body, max_values)
    if len(body) <= _LENIENT_BODY and num_structure <= _LENIENT_STRUCTURE:
        return json.loads(body.decode())
    try:
        return msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise json.JSONDecodeError(str(error), "", 0) from error


def _check_values(body: bytes | bytearray, max_values: int) -> int:
    """Count the values of JSON without parsing it. Returns the bytes outside of strings.

    Once escapes are gone, quotes stand at the ends of strings alone. Outside of strings each value but the
    first of a list or an object follows a comma.
    """
    num_strings = num_containers = num_commas = num_structure = 0
    is_inside = False
    rest = b""  # a backslash whose second half is in the next piece
    for start in range(0, len(body), _PIECE):
        piece = rest + body[start : start + _PIECE]
        num_backslashes = len(piece) - len(piece.rstrip(b"\\"))
        rest = b"\\" * (num_backslashes % 2)
        piece = piece[: len(piece) - len(rest)].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        structure = b"".join(parts[is_inside::2])
        is_inside ^= len(parts) % 2 == 0
        num_strings += len(parts) // 2
        num_containers += structure.count(b"[") + structure.count(b"{")
        num_commas += structure.count(b",")
        num_structure += len(structure)
        _check("strings", num_strings, MAX_STRINGS)
        _check("lists and objects", num_containers, MAX_CONTAINERS)
        _check("values", num_commas + num_containers + 1, max_values)
    return num_structure


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        message = f"the body holds more than {most} {what}, which is more than is read at once; send fewer"
        raise HTTPException(413, message)
