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

from lightkv.router.api.answers.errors import ErrorBody, error_body, message_error
from lightkv.router.api.operators.request_log import RequestRecord
from lightkv.router.service.access.key_file import ApiKeys
from lightkv.router.service.api_settings import ApiSettings

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes have no API key
METRICS_PATH = "/metrics"
MESSAGES_PATH = "/v1/messages"  # of Anthropic's API, with what is below it
COUNTING_PATHS = frozenset({f"{MESSAGES_PATH}/count_tokens", "/tokenize", "/detokenize"})  # without answers
_ASKED_FIRST = frozenset({"authorization", "x-api-key", "x-requested-with"})  # headers that no form has
REQUEST_ID_HEADER, MESSAGE_ID_HEADER = "X-Request-Id", "request-id"  # the second is Anthropic's
WARM_UP = "lightkv.warm_up"  # the ASGI extension of requests that the service sends itself, and does not log
_REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")
RETRY_AFTER = {429: "1", 503: "5"}  # seconds

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
                if is_of_messages(path_of(scope)):
                    MutableHeaders(scope=message)[MESSAGE_ID_HEADER] = record.id
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
        is_open = path_of(scope) in OPEN_PATHS
        is_known = key is not None or (
            path_of(scope) == METRICS_PATH
            and any(self._metrics_keys.find(given) is not None for given in sent)
        )
        if self._hosts is not None and not is_open and not self._hosts.allows(host):
            text = (
                f"the Host is {host[:200]!r}, which is not a name of this service; if it is one, start the "
                "service with --allowed-hosts and this name"
            )
            await error_response(403, text)(scope, receive, send)
        elif self._needs_key and not is_known and not is_open:
            text = "the API key is missing or wrong; send Authorization: Bearer KEY, or x-api-key: KEY"
            await error_response(401, text)(scope, receive, send)
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


def is_of_messages(path: str) -> bool:
    """Returns whether a path without the proxy's is one of Anthropic's API."""
    return f"{path}/".startswith(f"{MESSAGES_PATH}/")


def path_of(scope: Scope) -> str:
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


class ErrorResponse(Response):
    """An error of this status and `body`, which take Anthropic's form for a path of its API."""

    def __init__(self, status: int, body: ErrorBody, headers: Mapping[str, str]) -> None:
        # json rather than msgspec: a message may quote half a surrogate pair, which json writes as an escape.
        super().__init__(json.dumps(body), status, headers, "application/json")
        self._error = body["error"]

    def take_form_of(self, path: str, request_id: str | None = None) -> None:
        """Gives the error the form of the API that has `path`, before it is sent."""
        if is_of_messages(path):
            code, message = self._error["code"], self._error["message"]
            self.status_code, body = message_error(self.status_code, message, code, request_id)
            self.body = json.dumps(body).encode()
            MutableHeaders(raw=self.raw_headers)["content-length"] = str(len(self.body))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = scope.get("state", {}).get("record")  # a connection too many has none
        self.take_form_of(path_of(scope), None if record is None else record.id)
        await super().__call__(scope, receive, send)


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    headers: Mapping[str, str] | None = None,
    code: str | None = None,
) -> ErrorResponse:
    """Returns a response with OpenAI's error body, and with Retry-After if trying again may help."""
    headers = dict(headers or {})
    if status in RETRY_AFTER:
        headers.setdefault("Retry-After", RETRY_AFTER[status])
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return ErrorResponse(status, error_body(status, message, param, code), headers)
