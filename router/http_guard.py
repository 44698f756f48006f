"""What is turned away before it reaches a route: requests without the key, and bodies too large.

Knows HTTP and OpenAI's error body; knows no route.
"""

import hmac
import json
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .openai_protocol import error_body

OPEN_PATHS = frozenset({"/health"})  # what asks whether the service lives has no key
RETRY_AFTER = {429: "1", 503: "5"}  # seconds


class Guard:
    """Lets a request through to `app`, or answers it: 401 without `api_key` (None: no key is needed), 413 for a
    body of more than `max_body_bytes`, whether or not it said so beforehand."""

    def __init__(self, app: ASGIApp, api_key: str | None, max_body_bytes: int) -> None:
        self._app = app
        self._expected = None if api_key is None else api_key.encode()
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        if scope["path"] not in OPEN_PATHS and not self._has_key(headers.get("authorization", "")):
            response = error_response(401, "give the service's key: Authorization: Bearer KEY")
            await response(scope, receive, send)
        elif length.isdecimal() and int(length) > self._max_body_bytes:
            await error_response(413, self._too_large)(scope, receive, send)
        else:
            await self._app(scope, self._counted(receive), send)

    @property
    def _too_large(self) -> str:
        return f"the body has more than {self._max_body_bytes} bytes; send less at once"

    def _has_key(self, authorization: str) -> bool:
        if self._expected is None:
            return True
        scheme, _, key = authorization.partition(" ")
        # Headers are latin-1: the bytes that were sent. The whole key is compared, whatever differs first.
        is_same = hmac.compare_digest(key.strip().encode("latin-1"), self._expected)
        return is_same and scheme.lower() == "bearer"

    def _counted(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_body_bytes:
                raise HTTPException(413, self._too_large)
            return message

        return counted


def error_response(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """An error as OpenAI writes it; with the time to wait, if waiting helps."""
    headers = dict(headers or {})
    if status in RETRY_AFTER:
        headers["Retry-After"] = RETRY_AFTER[status]
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    # json, not msgspec: a message may quote half a surrogate pair, which only escapes can carry.
    body = json.dumps(error_body(status, message, param))
    return Response(body, status, headers, "application/json")
