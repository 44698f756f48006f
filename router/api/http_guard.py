"""Refuses requests without an API key or with too large a body before they reach a route, and answers those on
which the service itself fails."""

import json
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightkv.router.api.openai.protocol import error_body
from lightkv.router.service.key_file import ApiKeys

OPEN_PATHS = frozenset({"/health"})  # liveness probes have no API key
RETRY_AFTER = {429: "1", 503: "5"}  # seconds


class Guard:
    """Passes requests on to `app`, with the API key in the request's state.

    Answers 401 to a request without one of `keys` (if there are any), and 413 to one whose headers announce
    more than `max_body_bytes`.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, max_body_bytes: int) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        key = self._key(headers.get("authorization", ""))
        scope.setdefault("state", {})["api_key"] = key
        if self._keys.any and key is None and scope["path"] not in OPEN_PATHS:
            response = error_response(401, "the API key is missing or wrong; send Authorization: Bearer KEY")
            await response(scope, receive, send)
        elif length.isdecimal() and int(length) > self._max_body_bytes:
            await error_response(413, self._too_large)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    @property
    def _too_large(self) -> str:
        return f"the body has more than {self._max_body_bytes} bytes; send a smaller one"

    def _key(self, authorization: str) -> bytes | None:
        """Returns the API key that a request sent, or None if it is not one of the service's."""
        scheme, _, given = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        # Headers are decoded as latin-1, so this restores the bytes that were sent.
        return self._keys.find(given.strip().encode("latin-1"))


class DefectAnswer:
    """Answers 500 to a request on which `app` fails before its answer has begun, and raises the error again,
    for the log.

    The framework's own answer would be made outside all middleware, and so without the headers that let a page
    of another origin read it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def noting_send(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting_send)
        except Exception:
            if scope["type"] == "http" and not has_begun:
                await defect_response()(scope, receive, send)
            raise


def defect_response(headers: Mapping[str, str] | None = None) -> Response:
    """Returns the response to a request on which the service fails."""
    message = "the service failed on this request; its log has the reason"
    return error_response(500, message, headers=headers)


def error_response(
    status: int, message: str, param: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns a response with OpenAI's error body, and with Retry-After if trying again may help."""
    headers = dict(headers or {})
    if status in RETRY_AFTER:
        headers["Retry-After"] = RETRY_AFTER[status]
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    # json rather than msgspec: a message may quote half a surrogate pair, which json writes as an escape.
    body = json.dumps(error_body(status, message, param))
    return Response(body, status, headers, "application/json")
