"""Reads the bodies of requests within limits: bytes of one body, bytes of all bodies together, and JSON values.

The bytes of all bodies are limited twice: while they arrive, and from then on until their requests are
answered, because what a body was parsed to is kept as long.

Parsing JSON holds Python's lock from the first value to the last, in whatever thread it runs. So the values of
a long body are counted first, which is fast, and a body whose parsing would block the whole process is refused.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import msgspec
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lightkv.router.service.access.key_limits import KeyLimiter

from .guard import COUNTING_PATHS, too_large
from .owner import owner_of

# Bytes. A body of this size is parsed within a few milliseconds, so it is parsed without a thread.
SHORT_BODY = 2**16
# The first bytes of each body are not counted, so that short requests are served even if no room is left.
FREE_BYTES = 2**14
MAX_VALUES, MAX_STRINGS, MAX_CONTAINERS = 2**19, 2**15, 2**13  # of one body; keys count as strings
# Up to this size Python's own parser, which accepts more than strict JSON, takes a few milliseconds.
_LENIENT_BODY, _LENIENT_STRUCTURE = 2**22, 2**17  # bytes in all, and bytes outside of strings
_PIECE = 2**18  # bytes that are counted at a time
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


class Room:
    """Bytes that all requests share. The requests of one client take half of them at most, or one whole body.

    Args:
        max_bytes: the most bytes of all requests.
        one_body: the most bytes of one body, which always fits an empty room.
        what: what the bytes are, for the message of a refusal.
    """

    def __init__(self, max_bytes: int, one_body: int, what: str) -> None:
        self.max_bytes = max(max_bytes, one_body)
        self.share = max(self.max_bytes // 2, one_body)
        self.num_taken = 0
        self._what = what
        self._by_owner = Counter[bytes]()

    def take(self, owner: bytes, num_bytes: int) -> None:
        """Reserves bytes for a request of `owner`. Raises HTTPException (503) if there are not enough."""
        taken = self.num_taken, self.max_bytes, "for them"
        own = self._by_owner[owner], self.share, "that one client may take"
        for num_taken, most, whose in (taken, own):
            if num_taken + num_bytes > most:
                raise HTTPException(503, f"{self._what} fill the {most} bytes {whose}; try again in a moment")
        self.give(owner, -num_bytes)

    def give(self, owner: bytes, num_bytes: int) -> None:
        """Returns bytes that were reserved."""
        self.num_taken -= num_bytes
        self._by_owner[owner] -= num_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]


class BodyRoom:
    """The memory for bodies, shared by all requests.

    Args:
        max_body_bytes: the most bytes of one body.
        max_unread_bytes: the most bytes of all bodies that are not parsed yet, without the first FREE_BYTES of
            each.
        max_open_bytes: the same for the bodies of requests that are not answered yet.
        num_ids: how many token ids one body may need to hold; MAX_VALUES are accepted in any case.
    """

    def __init__(
        self, max_body_bytes: int, max_unread_bytes: int, max_open_bytes: int, num_ids: int = 0
    ) -> None:
        self.max_body_bytes = max_body_bytes
        self.unread = Room(max_unread_bytes, max_body_bytes, "bodies that are not read yet")
        kept = "bodies of requests that are not answered yet, and log-probabilities of their prompts,"
        self.open = Room(max_open_bytes, max_body_bytes, kept)
        self.max_values = max(num_ids, MAX_VALUES)
        self.parsing = asyncio.Semaphore(1)  # long bodies are parsed one at a time


class BodyRequest(Request):
    """A request whose body is read within the limits of `BodyRoom`."""

    def __init__(self, request: Request, room: BodyRoom) -> None:
        super().__init__(request.scope, request.receive, request._send)
        self._room = room
        self._num_unread = 0
        self._num_open = 0
        self._owner = owner_of(request)
        self._received: bytearray | None = None

    async def body(self) -> Any:
        """Returns the whole body as a bytearray; empty once it is parsed. Raises HTTPException (413, 503)."""
        if self._received is None:
            received = bytearray()
            async for chunk in self.stream():
                if len(received) + len(chunk) > self._room.max_body_bytes:
                    raise HTTPException(413, too_large(self._room.max_body_bytes))
                more = max(len(received) + len(chunk) - FREE_BYTES, 0) - self._num_unread
                self._room.unread.take(self._owner, more)
                self._num_unread += more
                received += chunk
            self._received = received
        return self._received

    async def json(self) -> Any:
        """Returns the parsed body. Raises HTTPException (413, 503), and ValueError if it is not JSON."""
        body = await self.body()
        try:
            self.keep(max(len(body) - FREE_BYTES, 0))
            if len(body) <= SHORT_BODY:
                return parse(body)
            async with self._room.parsing:
                return await asyncio.to_thread(parse, body, self._room.max_values)
        finally:
            body.clear()  # FastAPI would keep it until the request ends
            self.release()

    def keep(self, num_bytes: int) -> None:
        """Reserves room for what else is kept until the request is answered. Raises HTTPException (503) if
        there is not enough."""
        self._room.open.take(self._owner, num_bytes)
        self._num_open += num_bytes

    def release(self) -> None:
        """Returns the body's room, once it was parsed or never will be."""
        self._room.unread.give(self._owner, self._num_unread)
        self._num_unread = 0

    def finish(self) -> None:
        """Returns all room: the request is answered."""
        self.release()
        self._room.open.give(self._owner, self._num_open)
        self._num_open = 0


class _ClosingResponse(Response):
    """Passes a response on, and closes its request once it was sent."""

    def __init__(self, response: Response, request: BodyRequest) -> None:
        self._response = response
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._response(scope, receive, send)
        finally:
            self._request.finish()


def body_route(room: BodyRoom, limiter: KeyLimiter) -> type[APIRoute]:
    """Returns a class of routes that read their bodies within `room`, and read none of a key that is at a limit
    of `limiter`."""

    class BodyRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            num_answers = 0 if self.path in COUNTING_PATHS else 1
            has_body = self.body_field is not None

            async def handle_bounded(request: Request) -> Response:
                if has_body and (key := request.state.api_key) is not None:
                    limiter.require(key, num_answers)
                bounded = BodyRequest(request, room)
                try:
                    response = await handle(bounded)
                except BaseException:
                    bounded.finish()
                    raise
                bounded.release()
                return _ClosingResponse(response, bounded)

            return handle_bounded

    return BodyRoute


def parse(body: bytes | bytearray, max_values: int = MAX_VALUES) -> Any:
    """Parses a body, holding Python's lock for some tens of milliseconds at most.

    Raises HTTPException (413) if it has too many values for that, and ValueError if it is not JSON or nests too
    deeply. NaN and half surrogate pairs, which strict JSON does not allow, are accepted except in very large
    bodies.
    """
    num_structure = _check_values(body, max_values) if len(body) > SHORT_BODY else 0
    try:
        try:
            return msgspec.json.decode(body)  # in a third of the time
        except (msgspec.DecodeError, ValueError) as error:
            if len(body) > _LENIENT_BODY or num_structure > _LENIENT_STRUCTURE:
                raise json.JSONDecodeError(str(error), "", 0) from error
        return _lenient(body)  # which says where it is not JSON
    except RecursionError as error:
        raise json.JSONDecodeError("its values nest too deeply", "", 0) from error


def _lenient(body: bytes | bytearray) -> Any:
    """Parses JSON that may have NaN and halves of surrogate pairs, which become U+FFFD: UTF-8 has none."""
    value = json.loads(body.decode())
    if _SURROGATE.search(body) is None:
        return value
    text = json.dumps(value, ensure_ascii=False)
    mended = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return value if mended == text else json.loads(mended)


def _check_values(body: bytes | bytearray, max_values: int) -> int:
    """Counts the values of JSON without parsing it. Returns the number of bytes outside of strings.

    Outside of strings, each value of a list or an object follows a comma, except the first. Raises
    HTTPException (413) for too many values.
    """
    num_strings = num_containers = num_commas = num_structure = 0
    for more_strings, structure in _pieces(body):
        num_strings += more_strings
        num_containers += structure.count(b"[") + structure.count(b"{")
        num_commas += structure.count(b",")
        num_structure += len(structure)
        _check("strings", num_strings, MAX_STRINGS)
        _check("lists and objects", num_containers, MAX_CONTAINERS)
        _check("values", num_commas + num_containers + 1, max_values)
    return num_structure


def _pieces(body: bytes | bytearray) -> Iterator[tuple[int, bytes]]:
    """Yields the number of strings in each piece of JSON, and its bytes outside of strings.

    Without escapes, quotes stand only at the ends of strings.
    """
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
        yield len(parts) // 2, structure


def _check(what: str, count: int, most: int) -> None:
    if count > most:
        message = f"the body has more than {most} {what}, the limit for one request; send fewer"
        raise HTTPException(413, message)
