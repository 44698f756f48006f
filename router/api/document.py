"""The answers in the OpenAPI document: the statuses that each route has, and the headers and bodies of errors.
FastAPI describes the requests from their types."""

from collections.abc import Iterable, Sequence
from typing import Any

from fastapi import FastAPI, Security
from fastapi.security import HTTPBearer

from lightkv.router.api.answers.errors import OVERLOADED, ErrorBody, MessageErrorBody
from lightkv.router.api.http.guard import MESSAGES_PATH
from lightkv.router.api.requests.sharing import MAX_SESSION_ID
from lightkv.router.config import NAMESPACE_HEADER, SESSION_HEADER

Answers = dict[int | str, dict[str, Any]]


def _header(name: str, text: str, kind: str) -> dict[str, Any]:
    return {name: {"description": text, "required": True, "schema": {"type": kind}}}


_WAIT = _header("Retry-After", "Seconds to wait before trying again.", "integer")
_ERRORS: Answers = {
    400: {
        "description": "The request is malformed, out of bounds, or too large for the pool or the context."
    },
    401: {
        "description": "The API key is missing or wrong.",
        "headers": _header("WWW-Authenticate", "Bearer.", "string"),
    },
    403: {"description": "The Host is not a name of this service."},
    404: {"description": "The model does not exist."},
    413: {"description": "The body is too large."},
    429: {"description": "The queue is full, or a limit of the key is reached; try again.", "headers": _WAIT},
    500: {"description": "The model or the service failed on this request."},
    OVERLOADED: {
        "description": "Anthropic's for a full queue, and for what is a 503 on other routes.",
        "headers": _WAIT,
    },
    503: {
        "description": "The service is starting, shutting down or overloaded, or lost the answer; try again.",
        "headers": _WAIT,
    },
}
ALWAYS = (413, 500)  # statuses of every route
NAMES_MODEL = (404,)
WITHOUT_BODY = (400,)  # of a POST, which a form could send
CONVERTS_TEXT = (400, 404, 429)
GENERATES = (400, 404, 429, 503)
OF_MESSAGES = (400, 404, 429, OVERLOADED)
ASKS_WORKER = (503,)
# Documents the API key. It checks nothing, because `Guard` checks the key.
NEEDS_KEY = Security(HTTPBearer(auto_error=False, scheme_name="key", description="The service's API key."))
UNREADY: Answers = {503: {"description": "The same, of a service that is not healthy or not ready."}}
UNKNOWN: Answers = {404: {"model": ErrorBody, "description": "The client has no open session of this id."}}


class DocumentedApp(FastAPI):
    """An application whose document leaves out FastAPI's status 422, which this service does not use."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for methods in document["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


def responses(path: str, errors: Iterable[int], special: Answers) -> Answers:
    """Returns the documented responses of a route whose errors have these statuses. `special`: those that are
    no error, or another one than usual."""
    statuses = sorted({*errors, *ALWAYS})
    model = MessageErrorBody if path.startswith(MESSAGES_PATH) else ErrorBody
    usual: Answers = {200: {"description": "The answer."}}
    return usual | {status: {"model": model, **_ERRORS[status]} for status in statuses} | special


def _parameter(name: str, place: str, schema: dict[str, Any], text: str = "") -> dict[str, Any]:
    is_optional = name == SESSION_HEADER
    return {"name": name, "in": place, "required": not is_optional, "description": text, "schema": schema}


_NAMESPACE = "Requests share cached prefixes only with requests that send the same value."
_SESSION = {"type": "string", "maxLength": MAX_SESSION_ID}
NAMESPACE = _parameter(NAMESPACE_HEADER, "header", {"type": "string", "minLength": 1}, _NAMESPACE)
SESSION = _parameter(SESSION_HEADER, "header", _SESSION, "The session, if the body has no session_id.")
SESSION_ID = _parameter("session_id", "path", _SESSION)  # which may have slashes


def model_parameter(names: Sequence[str]) -> dict[str, Any]:
    """Returns the documentation of the name in /v1/models/{model}, which may have slashes."""
    return {"parameters": [_parameter("model", "path", {"type": "string", "enum": list(names)})]}
