"""The answers in the OpenAPI document: the statuses that each route has, their headers and their bodies.
FastAPI describes the requests from their types."""

from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI, Security
from fastapi.params import Depends
from fastapi.security import HTTPBearer

from lightkv.router.api.answers.bodies import (
    CacheEvicted,
    ChatBody,
    CompletionBody,
    Detokenized,
    Health,
    Model,
    ModelList,
    Ready,
    ReleasedSession,
    ServerInfo,
    Tokenized,
    Version,
)
from lightkv.router.api.http.guard import ErrorBody
from lightkv.router.api.requests.sharing import MAX_SESSION_ID
from lightkv.router.config import NAMESPACE_HEADER, SESSION_HEADER
from lightkv.router.engine.step import PoolMap
from lightkv.router.service.messages import Load, State

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
    429: {"description": "The queue is full; try again.", "headers": _WAIT},
    500: {"description": "The model or the service failed on this request."},
    503: {
        "description": "The service is starting, shutting down or overloaded, or lost the answer; try again.",
        "headers": _WAIT,
    },
}
ALWAYS = (413, 500)  # statuses of every route
NAMES_MODEL = (404,)
WITHOUT_BODY = (400,)  # of a POST, which a form could send
CONVERTS_TEXT = (400, 404)
GENERATES = (400, 404, 429, 503)
ASKS_WORKER = (503,)


def _load_schema() -> dict[str, Any]:
    schema: dict[str, Any] = msgspec.json.schema(Load)["$defs"]["Load"]
    schema["properties"] |= {
        "state": msgspec.json.schema(State),
        "detail": {"type": "string"},
        "router_silence": {
            "type": "number",
            "description": "Seconds since the router reported these counts.",
        },
        "kv_dtype": {
            "type": ["string", "null"],
            "description": "How the pool stores K and V; null until the model is loaded.",
        },
    }
    schema["description"] = "The router's counts and its state."
    schema["required"] = [*schema.get("required", ()), "state", "detail", "router_silence", "kv_dtype"]
    return schema


def _map_schema() -> dict[str, Any]:
    found = msgspec.json.schema(PoolMap)["$defs"]
    schema: dict[str, Any] = found["PoolMap"]
    schema["properties"]["owners"]["items"] = found["Owner"]  # a reference would not resolve in the document
    return schema


def _of_kind(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {kind: {"schema": schema}}}


_EVENTS = {"type": "object", "description": "An event, which has JSON as its data."}
_STREAM = _of_kind("text/event-stream", _EVENTS)
_WHOLE = "The answers or their stream."
COMPLETION: Answers = {200: {"model": CompletionBody, "description": _WHOLE, **_STREAM}}
CHAT: Answers = {200: {"model": ChatBody, "description": _WHOLE, **_STREAM}}
RESPONSE: Answers = {200: {"model": dict[str, Any], "description": _WHOLE, **_STREAM}}
MODELS: Answers = {200: {"model": ModelList, "description": "All names of the model."}}
ONE_MODEL: Answers = {200: {"model": Model, "description": "The model."}}
RELEASED: Answers = {
    200: {"model": ReleasedSession, "description": "The session has ended."},
    404: {"model": ErrorBody, "description": "The client has no open session of this id."},
}
TOKENIZED: Answers = {200: {"model": Tokenized, "description": "The tokens."}}
DETOKENIZED: Answers = {200: {"model": Detokenized, "description": "The text."}}
TOKENIZER_INFO: Answers = {
    200: {"model": dict[str, Any], "description": "tokenizer_config.json, and the chat template."}
}
HEALTH: Answers = {
    200: {"model": Health, "description": "The service is healthy."},
    503: {"model": Health, "description": "The service is not healthy."},
}
READY: Answers = {
    200: {"model": Ready, "description": "The service takes requests."},
    503: {"model": Ready, "description": "The service does not take requests."},
}
METRICS: Answers = {200: {"description": "All metrics.", **_of_kind("text/plain", {"type": "string"})}}
LOAD: Answers = {200: {"description": "The counts.", **_of_kind("application/json", _load_schema())}}
MAP: Answers = {200: {"description": "The pool.", **_of_kind("application/json", _map_schema())}}
VERSION: Answers = {200: {"model": Version, "description": "The version."}}
SERVER_INFO: Answers = {200: {"model": ServerInfo, "description": "The service's settings and its model."}}
CACHE_RESET: Answers = {200: {"model": CacheEvicted, "description": "The cached tokens were evicted."}}


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


def responses(answers: Answers, errors: Iterable[int]) -> Answers:
    """Returns the documented responses of a route: `answers`, and `errors` with OpenAI's error body."""
    statuses = sorted({*errors, *ALWAYS})
    return {status: {"model": ErrorBody, **_ERRORS[status]} for status in statuses} | answers


def needs_bearer() -> Depends:
    """Returns the dependency that documents the API key. It checks nothing, because `Guard` checks the key."""
    return Security(HTTPBearer(auto_error=False, scheme_name="key", description="The service's API key."))


def _parameter(name: str, place: str, schema: dict[str, Any], text: str = "") -> dict[str, Any]:
    is_optional = name == SESSION_HEADER
    return {"name": name, "in": place, "required": not is_optional, "description": text, "schema": schema}


_NAMESPACE = "Requests share cached prefixes only with requests that send the same value."
_SESSION = {"type": "string", "maxLength": MAX_SESSION_ID}
NAMESPACE = _parameter(NAMESPACE_HEADER, "header", {"type": "string", "minLength": 1}, _NAMESPACE)
SESSION = _parameter(SESSION_HEADER, "header", _SESSION, "The session, if the body has no session_id.")
SESSION_ID = _parameter("session_id", "path", _SESSION)  # which may have slashes


def model_parameter(names: list[str]) -> dict[str, Any]:
    """Returns the documentation of the name in /v1/models/{model}, which may have slashes."""
    return {"parameters": [_parameter("model", "path", {"type": "string", "enum": names})]}
