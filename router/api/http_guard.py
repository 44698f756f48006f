"""What is turned away before it reaches a route: requests without a key, and bodies announced as too large.

Knows HTTP and OpenAI's error body; knows no route.
"""

import hmac
import json
from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from lightkv.router.api.openai.protocol import error_body

OPEN_PATHS = frozenset({"/health"})  # what asks whether the service lives has no key
RETRY_AFTER = {429: "1", 503: "5"}  # seconds


class Guard:
    """Lets a request through to `app`, or answers it: 401 without one of `api_keys` (if there are any), 413
    where its headers announce more than `max_body_bytes`. Puts the key that was given into the request's state.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], max_body_bytes: int) -> None:
        self._app = app
        self._keys = [key.encode() for key in api_keys]
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        key = self._key(headers.get("authorization", ""))
        scope.setdefault("state", {})["api_key"] = key
        if self._keys and key is None and scope["path"] not in OPEN_PATHS:
            response = error_response(401, "give the service's key: Authorization: Bearer KEY")
            await response(scope, receive, send)
        elif length.isdecimal() and int(length) > self._max_body_bytes:
            await error_response(413, self._too_large)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    @property
    def _too_large(self) -> str:
        return f"the body has more than {self._max_body_bytes} bytes; send less at once"

    def _key(self, authorization: str) -> bytes | None:
        """The key that a request gave, if it is one of the service's."""
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        # Headers are latin-1: the bytes that were sent. Each whole key is compared, whatever differs first.
        equal = [key for key in self._keys if hmac.compare_digest(given.strip().encode("latin-1"), key)]
        return equal[0] if equal else None


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
