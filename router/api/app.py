"""The HTTP application: which path leads to which route, and which error becomes which HTTP status."""

from collections.abc import Sequence

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from lightkv import __version__
from lightkv.errors import LightKVError
from lightkv.router.api.answers.errors import CONTEXT_EXCEEDED, LIMIT_REACHED
from lightkv.router.api.answers.generation import Backend, GenerationFailed, GenerationLost
from lightkv.router.api.answers.sessions import OpenSessions, UnknownSession
from lightkv.router.api.grammars.checker import GrammarChecker
from lightkv.router.api.http.body import BodyRoom, body_route
from lightkv.router.api.http.guard import (
    MESSAGE_ID_HEADER,
    OPEN_PATHS,
    REQUEST_ID_HEADER,
    Guard,
    RequestObserver,
    RequestTaker,
    error_response,
    is_json,
    not_json,
)
from lightkv.router.api.http.stream import failure_status
from lightkv.router.api.operators.request_log import write_line
from lightkv.router.api.requests.generation import UnknownModel
from lightkv.router.api.requests.prompts import PromptTooLong
from lightkv.router.api.requests.sharing import InvalidHeader
from lightkv.router.engine.request import InvalidPrompt, NeverFits
from lightkv.router.sampling_params import InvalidParams
from lightkv.router.service.access.key_file import ApiKeys
from lightkv.router.service.access.key_limits import KeyLimiter, LimitReached
from lightkv.router.service.api_settings import ApiSettings
from lightkv.router.service.router_client import RequestRefused, RouterClient
from lightkv.router.text.tokenizer import ChatTemplateError, Tokenizer

from . import document
from .metrics import ServiceMetrics
from .other_apis import not_found
from .routes import routes_of

_STATUS_OF_REFUSAL = {"invalid": 400, "never_fits": 400, "queue_full": 429, "unavailable": 503}


def create_app(
    client: RouterClient,
    tokenizer: Tokenizer,
    settings: ApiSettings,
    keys: ApiKeys | None = None,
    take: Sequence[RequestTaker] = (),
) -> FastAPI:
    """Returns the HTTP application over a connected client of the router. `keys`: those of the settings, by
    default made of them. Each function of `take` is given the record of each request that has ended."""
    keys = keys or ApiKeys(settings.api_key, settings.api_key_file)
    metrics = ServiceMetrics(settings.served_model_name[0], lambda: client.latest)
    sessions = OpenSessions(client.release_session)
    backend = Backend(client, tokenizer, metrics, sessions, settings.report_cached_tokens)
    grammars = GrammarChecker(tokenizer.directory, lambda: client.ready_info().limits.vocab_size)
    app = document.DocumentedApp(title="lightkv", version=__version__, redoc_url=None)
    app.state.grammars = grammars  # which its owner closes
    room = BodyRoom(
        settings.max_body_bytes,
        settings.max_unread_bytes,
        settings.max_open_bytes,
        2 * tokenizer.max_model_len,
    )
    limiter = KeyLimiter(keys.limits)
    app.router.route_class = body_route(room, limiter)
    # The last one that is added sees a request first.
    app.add_middleware(
        Guard,
        keys=keys,
        metrics_keys=ApiKeys(settings.metrics_key, settings.metrics_key_file),
        settings=settings,
    )
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, MESSAGE_ID_HEADER, "Retry-After"],
        )
    logs = [write_line] if settings.log_requests else []
    app.add_middleware(RequestObserver, take=[*logs, *take], root_path=settings.root_path)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_invalid_body)
    app.add_exception_handler(LightKVError, _on_refusal)
    app.add_exception_handler(Exception, _on_defect)

    for route in routes_of(backend, settings, grammars, limiter):
        is_open = route.path in OPEN_PATHS
        needs_key = keys.any and not is_open
        guarded = [401] * needs_key + [403] * (settings.hosts is not None and not is_open)
        app.add_api_route(
            route.path,
            route.endpoint,
            methods=[route.method],
            response_model=None,
            response_class=Response,  # the document says nothing of the bodies of answers
            responses=document.responses(route.path, [*route.errors, *guarded], route.special),
            dependencies=[document.NEEDS_KEY] if needs_key else [],
            openapi_extra=route.described,
        )
    return app


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    # Routes themselves raise other errors for what they do not find.
    message = not_found(request.url.path) if error.status_code == 404 else str(error.detail)
    return error_response(error.status_code, message, headers=error.headers)


async def _on_invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    first = errors[0]
    # The path of the field, without the names of pydantic's own types, which have brackets.
    place = [str(step) for step in first["loc"][1:] if "[" not in str(step)]
    messages = dict.fromkeys(str(other["msg"]) for other in errors if other["loc"][:2] == first["loc"][:2])
    message = "; ".join(list(messages)[:4])
    kind = request.headers.get("content-type")
    if len(first["loc"]) == 1 and not is_json(kind):
        return error_response(400, not_json(kind))
    if first["type"] == "json_invalid":
        return error_response(400, f"the body is not JSON ({first['ctx']['error']}, at {place[0]})")
    return error_response(400, f"{'.'.join(place) or 'body'}: {message}", place[0] if place else None)


async def _on_refusal(request: Request, error: Exception) -> Response:
    param = code = headers = None
    match error:
        case RequestRefused():
            status = _STATUS_OF_REFUSAL[error.kind]
            code = CONTEXT_EXCEEDED if error.kind == "never_fits" else None
        case InvalidParams():
            status, param = 400, error.field
        case NeverFits() | PromptTooLong():
            status, code = 400, CONTEXT_EXCEEDED
        case InvalidPrompt() | ChatTemplateError() | InvalidHeader():
            status = 400
        case LimitReached():
            status, param, code = 429, error.name, LIMIT_REACHED
            if error.seconds is None:  # trying again cannot help
                status = 400
            headers = {"Retry-After": str(error.seconds)} if status == 429 else None
        case UnknownModel():
            status, param = 404, "model"
        case UnknownSession():
            status = 404
        case GenerationFailed() | GenerationLost():
            status = failure_status(error)
        case _:  # a bug of this process, which the log has to show
            raise error
    return error_response(status, str(error), param, headers, code)


async def _on_defect(request: Request, error: Exception) -> Response:
    headers = {REQUEST_ID_HEADER: request.state.record.id}
    return error_response(500, "the service failed on this request; its log has the reason", headers=headers)
