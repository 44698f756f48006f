"""Gives every request an id, and tells the operator how it went: a line of JSON in the log, and spans."""

import re
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol

import msgspec
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lightkv.router.api.generation import Answered
from lightkv.router.service.access.key_file import ApiKeys

REQUEST_ID_HEADER = "X-Request-Id"
WARM_UP = "lightkv.warm_up"  # the ASGI extension of requests that the service sends itself, and does not log
_NOT_LOGGED = frozenset({"/health", "/ready", "/metrics"})  # routes that machines ask for again and again
_REQUEST_ID = re.compile(r"[A-Za-z0-9._~:/+=@-]{1,128}")


@dataclass
class RequestRecord:
    """What is noted of one HTTP request.

    id: of its X-Request-Id. method, route: of its path, as a pattern without what a client put into it; None if
    there is no such path. status: of its answer; None if none was begun. key: the name of its API key. begun,
    ended: monotonic times. traceparent: the W3C header of its caller's span. generation: its answers, if any.
    """

    id: str
    method: str
    begun: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    route: str | None = None
    status: int | None = None
    key: str | None = None
    traceparent: str | None = None
    generation: Answered | None = None

    def line(self) -> dict[str, Any]:
        """Returns the record's line in the log, which has nothing of the texts of prompt or answer."""
        line: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "id": self.id,
            "method": self.method,
            "route": self.route,
            "status": self.status,
            "key": self.key,
            "seconds": round(self.ended - self.begun, 6),
        }
        generation = self.generation
        if generation is not None:
            answers = generation.answers
            waited = [answer.waited for answer in answers if answer.waited is not None]
            first = [answer.clock.first for answer in answers if answer.clock.first is not None]
            line |= {
                "prompt_tokens": generation.num_prompt_tokens,
                "cached_tokens": generation.num_hit_tokens,
                "completion_tokens": generation.num_completion_tokens,
                "queue_seconds": round(min(waited), 6) if waited else None,
                "first_token_seconds": round(min(first) - self.begun, 6) if first else None,
                "finish_reasons": [answer.completion.finish_reason or "abort" for answer in answers],
            }
        return line


class RequestTracer(Protocol):
    """Makes spans of records; `SpanTracer` does."""

    def record(self, record: RequestRecord) -> None: ...


class RequestObserver:
    """Passes requests on to `app`, with a RequestRecord in their state; its id is the answer's X-Request-Id.

    An id that the client sent is kept if it has 1 to 128 letters, digits or characters of ._~:/+=@- and else
    replaced by a new one. `write`: takes the line of each request that has ended, or None; probes and metrics
    have no line. `tracer`: is given each record, or None.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: ApiKeys,
        write: Callable[[bytes], None] | None = None,
        tracer: RequestTracer | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._write = write
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
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
        record.route = getattr(scope.get("route"), "path", None)
        record.key = self._keys.name(scope["state"].get("api_key"))
        if self._write is not None and record.route not in _NOT_LOGGED:
            self._write(msgspec.json.encode(record.line()))
        if self._tracer is not None:
            self._tracer.record(record)


def note_generation(request: Request, generation: Answered) -> None:
    """Adds the answers of a request to its record."""
    record: RequestRecord = request.state.record
    record.generation = generation


def write_to_stderr(line: bytes) -> None:
    """Writes a line of the log to standard error."""
    sys.stderr.write(line.decode() + "\n")
    sys.stderr.flush()
