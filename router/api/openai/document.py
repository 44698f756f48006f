"""What the OpenAPI document says of a route's answers: each status that it really has, and what comes with it.

FastAPI describes requests by their types; this is the rest. Knows no route.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
from fastapi import FastAPI, Security
from fastapi.params import Depends
from fastapi.security import HTTPBearer

from lightkv.router.config import NAMESPACE_HEADER
from lightkv.router.engine.step import PoolMap
from lightkv.router.service.messages import Load, State

from .protocol import (
    ChatBody,
    CompletionBody,
    Detokenized,
    ErrorBody,
    Health,
    Model,
    ModelList,
    Ready,
    Tokenized,
    Version,
)

Answers = dict[int | str, dict[str, Any]]


def _header(name: str, text: str, kind: str) -> dict[str, Any]:
    return {name: {"description": text, "required": True, "schema": {"type": kind}}}


_WAIT = _header("Retry-After", "Seconds to wait before the next try.", "integer")
_ERRORS: Answers = {
    400: {"description": "The request is malformed, out of bounds, or can never fit."},
    401: {
        "description": "The key is missing or wrong.",
        "headers": _header("WWW-Authenticate", "Bearer.", "string"),
    },
    404: {"description": "There is no such model."},
    413: {"description": "The body is too large."},
    429: {"description": "The queue is full; try again.", "headers": _WAIT},
    500: {"description": "The model, or the service, failed on this request."},
    503: {"description": "The service starts, drains, or lost the answer; try again.", "headers": _WAIT},
}
ALWAYS = (413, 500)  # of every route; and 401 of every one that asks for the key
NAMES_MODEL = (404,)
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
    }
    schema["description"] = "The router's counts, and its state."
    schema["required"] = [*schema.get("required", ()), "state", "detail", "router_silence"]
    return schema


def _map_schema() -> dict[str, Any]:
    found = msgspec.json.schema(PoolMap)["$defs"]
    schema: dict[str, Any] = found["PoolMap"]
    schema["properties"]["owners"]["items"] = found["Owner"]  # a reference would not resolve in the document
    return schema


def _of_kind(kind: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {kind: {"schema": schema}}}


_EVENT = {
    "type": "object",
    "description": "One event of the stream.",
    "required": ["data"],
    "properties": {
        "data": {
            "type": "string",
            "description": 'A chunk as JSON; at the end "[DONE]", or an ErrorBody where the answer broke off.',
        }
    },
}
_STREAM = _of_kind("text/event-stream", _EVENT)
COMPLETION: Answers = {
    200: {"model": CompletionBody, "description": "The answers, or their stream.", **_STREAM}
}
CHAT: Answers = {200: {"model": ChatBody, "description": "The answers, or their stream.", **_STREAM}}
MODELS: Answers = {200: {"model": ModelList, "description": "Every name."}}
ONE_MODEL: Answers = {200: {"model": Model, "description": "The model."}}
TOKENIZED: Answers = {200: {"model": Tokenized, "description": "The tokens."}}
DETOKENIZED: Answers = {200: {"model": Detokenized, "description": "The text."}}
HEALTH: Answers = {
    200: {"model": Health, "description": "It does what it is for."},
    503: {"model": Health, "description": "It does not."},
}
READY: Answers = {
    200: {"model": Ready, "description": "Requests are taken."},
    503: {"model": Ready, "description": "They are not."},
}
METRICS: Answers = {200: {"description": "Every series.", **_of_kind("text/plain", {"type": "string"})}}
LOAD: Answers = {200: {"description": "The counts.", **_of_kind("application/json", _load_schema())}}
MAP: Answers = {200: {"description": "The pool.", **_of_kind("application/json", _map_schema())}}
VERSION: Answers = {200: {"model": Version, "description": "The version."}}


class DocumentedApp(FastAPI):
    """An application that documents the statuses it is given, and not FastAPI's own of invalid bodies."""

    def openapi(self) -> dict[str, Any]:
        document = super().openapi()
        for methods in document["paths"].values():
            for operation in methods.values():
                operation["responses"].pop("422", None)
        for name in ("HTTPValidationError", "ValidationError"):
            document["components"]["schemas"].pop(name, None)
        return document


def responses(answers: Answers, errors: Iterable[int], needs_key: bool) -> Answers:
    """What is documented of a route that answers with `answers`, or with `errors` in OpenAI's form."""
    statuses = sorted({*errors, *ALWAYS, *((401,) if needs_key else ())})
    return {status: {"model": ErrorBody, **_ERRORS[status]} for status in statuses} | answers


def needs_bearer() -> Depends:
    """Names the key's scheme in the document. It lets everybody in: `Guard` has turned away who may not."""
    return Security(HTTPBearer(auto_error=False, scheme_name="key", description="The service's key."))


def namespace_parameter() -> dict[str, Any]:
    """The header that names a request's cache namespace, where the service asks for it."""
    text = "Cached prefixes are shared only among requests of one value."
    schema = {"type": "string", "minLength": 1}
    header = {
        "name": NAMESPACE_HEADER,
        "in": "header",
        "required": True,
        "description": text,
        "schema": schema,
    }
    return {"parameters": [header]}


def model_parameter(names: list[str]) -> dict[str, Any]:
    """The name in /v1/models/{model}, of which slashes may be a part."""
    schema = {"type": "string", "enum": names}
    return {"parameters": [{"name": "model", "in": "path", "required": True, "schema": schema}]}
