"""What every request passes before it reaches a route: it gets an id and a record, and is refused under another
host's name, without an API key, of a web page's form or with too large a body. Errors have OpenAI's form. The
server takes requests of HTTP alone (`server.py`)."""

import json
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from typing_extensions import TypedDict

from lightkv.router.api.answers.message_writer import OVERLOADED, message_error
from lightkv.router.api.operators.request_log import RequestRecord
from lightkv.router.service.access.key_file import ApiKeys
from lightkv.router.service.api_settings import ApiSettings

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes have no API key
METRICS_PATH = "/metrics"
MESSAGES_PATH = "/v1/messages"  # of Anthropic's API, with what is below it
_ASKED_FIRST = frozenset({"authorization", "x-api-key", "x-requested-with"})  # headers that no form has
REQUEST_ID_HEADER = "X-Request-Id"
WARM_UP = "lightkv.warm_up"  # the ASGI extension of requests that the service sends itself, and does not log
_REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")
RETRY_AFTER = {429: "1", 503: "5"}  # seconds

LIMIT_REACHED = "rate_limit_exceeded"  # OpenAI's code for a limit of the key
CONTEXT_EXCEEDED = "context_length_exceeded"  # OpenAI's code for a request that is longer than the context
RequestTaker = Callable[[RequestRecord], None]


class RequestObserver:
    """Passes requests on to `app`, with a RequestRecord in their state; its id is the answer's X-Request-Id.

    An id that the client sent is kept if it has 1 to 128 letters, digits or characters of ._~:/+=@- and else
    replaced by a new one. Each function of `take` is given the record of each request that has ended.
    `root_path`: the path under which a proxy passes requests on; it may stand before theirs.
    """

    def __init__(self, app: ASGIApp, take: Sequence[RequestTaker] = (), root_path: str = "") -> None:
        self._app = app
        self._root_path = root_path
        self._take = take

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._root_path
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID_HEADER, "")
        record = RequestRecord(
            id=given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex,
            method=scope["method"],
            traceparent=headers.get("traceparent"),
        )
        scope.setdefault("state", {})["record"] = record

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = record.id
                if _is_of_messages(scope):
                    MutableHeaders(scope=message)["request-id"] = record.id  # Anthropic's name
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception:
            record.status = record.status or 500  # which is sent behind this
            raise
        finally:
            if WARM_UP not in scope.get("extensions", {}):
                self._end(record, scope)

    def _end(self, record: RequestRecord, scope: Scope) -> None:
        record.ended = time.monotonic()
        if record.reservation is not None:
            record.give_back(record.reservation)
        record.route = getattr(scope.get("route"), "path", None)
        record.key = scope["state"].get("key_name")
        for take in self._take:
            take(record)


class Guard:
    """Passes requests on to `app`, with the API key and its name in the request's state.

    `metrics_keys` open METRICS_PATH alone. Answers 403 to a request under a name that is not the service's, 401
    to one without one of `keys` (if there are any), 400 to a POST that a form of any web page could send, and
    413 to one whose headers announce more than `settings.max_body_bytes`.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys, metrics_keys: ApiKeys, settings: ApiSettings) -> None:
        self._app = app
        self._keys = keys
        self._metrics_keys = metrics_keys
        self._needs_key = keys.any
        self._hosts = settings.hosts
        self._max_body_bytes = settings.max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        sent = _keys_in(headers)
        key = next((found for given in sent if (found := self._keys.find(given)) is not None), None)
        name = None if key is None else self._keys.name(key)
        scope.setdefault("state", {}).update(api_key=key, key_name=name)
        host = headers.get("host", "")
        is_open = _path(scope) in OPEN_PATHS
        is_known = key is not None or (
            _path(scope) == METRICS_PATH and any(self._metrics_keys.find(given) is not None for given in sent)
        )
        if self._hosts is not None and not is_open and not self._hosts.allows(host):
            await error_response(403, _other_host(host))(scope, receive, send)
        elif self._needs_key and not is_known and not is_open:
            response = error_response(
                401, "the API key is missing or wrong; send Authorization: Bearer KEY, or x-api-key: KEY"
            )
            await response(scope, receive, send)
        elif scope["method"] == "POST" and _is_form(headers):
            await error_response(400, not_json(headers.get("content-type")))(scope, receive, send)
        elif length.isdecimal() and int(length) > self._max_body_bytes:
            await error_response(413, too_large(self._max_body_bytes))(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def _keys_in(headers: Headers) -> list[bytes]:
    """Returns the keys that a request sent, as OpenAI's and as Anthropic's clients do."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    sent = [given] if scheme.lower() == "bearer" else []
    if (own := headers.get("x-api-key")) is not None:
        sent.append(own)
    # Headers are decoded as latin-1, so this restores the bytes that were sent.
    return [key.strip().encode("latin-1") for key in sent]


def _is_of_messages(scope: Scope) -> bool:
    return f"{_path(scope)}/".startswith(f"{MESSAGES_PATH}/")


def _path(scope: Scope) -> str:
    """Returns a request's path without the one under which a proxy passes it on."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def too_large(max_bytes: int) -> str:
    """Returns the message for a body of more than `max_bytes`."""
    return f"the body has more than {max_bytes} bytes; send a smaller one"


def is_json(kind: str | None) -> bool:
    """Returns whether a Content-Type is one of JSON."""
    name = (kind or "").partition(";")[0].strip().lower()
    return name.startswith("application/") and name.endswith(("/json", "+json"))


def not_json(kind: str | None) -> str:
    """Returns the message for a request with another Content-Type than JSON's."""
    what = "the request has no Content-Type" if kind is None else f"the Content-Type is {kind[:200]!r}"
    return f"{what}; send application/json"


def _is_form(headers: Headers) -> bool:
    """Returns whether a page of any origin can send these headers without asking first, as browsers do before
    they send JSON or headers of their own."""
    return not (is_json(headers.get("content-type")) or not _ASKED_FIRST.isdisjoint(headers.keys()))


def _other_host(host: str) -> str:
    return (
        f"the Host is {host[:200]!r}, which is not a name of this service; if it is one, start the service "
        "with --allowed-hosts and this name"
    )


class ErrorDetails(TypedDict):
    """An error. `param`: the request field that caused it, if one did. `code`: the HTTP status,
    "context_length_exceeded" or "rate_limit_exceeded", whose `param` is the limit."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorBody(TypedDict):
    error: ErrorDetails


class MessageErrorBody(TypedDict):
    """An error in Anthropic's form."""

    type: str
    error: dict[str, str]
    request_id: str | None


class ErrorResponse(Response):
    """An error, in the form of the API that the request's path belongs to."""

    def __init__(self, status: int, message: str, body: ErrorBody, headers: Mapping[str, str]) -> None:
        # json rather than msgspec: a message may quote half a surrogate pair, which json writes as an escape.
        super().__init__(json.dumps(body), status, headers, "application/json")
        # By these words agents recognise that they have to shorten their conversation.
        is_over = body["error"]["code"] == CONTEXT_EXCEEDED
        self._message = f"prompt is too long: {message}" if is_over else message
        # A full queue, and not a limit of the key.
        is_overload = status == 503 or (status == 429 and body["error"]["code"] == 429)
        self._status = OVERLOADED if is_overload else status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if _is_of_messages(scope):
            record = scope.get("state", {}).get("record")  # a connection too many has none
            request_id = None if record is None else record.id
            self.body = json.dumps(message_error(self._status, self._message, request_id)).encode()
            self.status_code = self._status
            MutableHeaders(raw=self.raw_headers)["content-length"] = str(len(self.body))
        await super().__call__(scope, receive, send)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> ErrorBody:
    """Returns OpenAI's error object. Its `type` follows from the HTTP status, and so does a missing `code`."""
    kinds = {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        429: "rate_limit_error",
        503: "service_unavailable_error",
    }
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "internal_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    code: str | None = None,
) -> Response:
    """Returns a response with OpenAI's error body, and with Retry-After if trying again may help."""
    headers = dict(headers or {})
    if status in RETRY_AFTER:
        headers.setdefault("Retry-After", RETRY_AFTER[status])
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return ErrorResponse(status, message, error_body(status, message, param, code), headers)
