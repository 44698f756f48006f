"""The table of routes: for each path the function that answers, and what the OpenAPI document says of it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightkv.router.api.answers.generation import Backend
from lightkv.router.api.grammars.checker import GrammarChecker
from lightkv.router.api.http.guard import MESSAGES_PATH
from lightkv.router.api.requests.chat import Chats
from lightkv.router.api.requests.completion import Completions
from lightkv.router.api.requests.dialect import ChatDialect
from lightkv.router.api.requests.generation import Desk
from lightkv.router.api.requests.messages import Messages
from lightkv.router.api.requests.prompts import PromptReader
from lightkv.router.api.requests.responses import Responses
from lightkv.router.api.requests.service import ServiceRoutes
from lightkv.router.api.requests.tokens import Tokens
from lightkv.router.service.access.key_limits import KeyLimiter
from lightkv.router.service.api_settings import ApiSettings

from . import document


class Route(NamedTuple):
    """One route. `errors`: the statuses of its errors, and `special` those that differ from other routes'.
    `described`: more of it in the document."""

    method: str
    path: str
    endpoint: Callable[..., Any]
    errors: Sequence[int] = ()
    described: dict[str, Any] | None = None
    special: document.Answers = {}  # noqa: RUF012


def routes_of(
    backend: Backend, settings: ApiSettings, grammars: GrammarChecker, limiter: KeyLimiter
) -> list[Route]:
    """Returns all routes of a service, but for the document's own."""
    desk = Desk(backend, settings, grammars, limiter)
    prompts = PromptReader(backend.tokenizer)
    dialect = ChatDialect(backend.tokenizer, settings)
    chats = Chats(desk, prompts, dialect)
    tokens = Tokens(desk, prompts, dialect)
    service = ServiceRoutes(desk)
    namespace = [document.NAMESPACE] if settings.cache_namespace == "header" else []
    headers = {"parameters": [*namespace, document.SESSION]}
    session = {"parameters": [*namespace, document.SESSION_ID]}
    model = document.model_parameter(settings.served_model_name)
    generates, converts = document.GENERATES, document.CONVERTS_TEXT
    reset_errors = (*document.WITHOUT_BODY, *document.ASKS_WORKER)
    complete = Completions(desk, prompts).complete
    respond = Responses(chats).respond
    messages = Messages(chats)
    release, one_model = "/v1/sessions/{session_id:path}/release", "/v1/models/{model:path}"
    return [
        Route("POST", "/v1/completions", complete, generates, headers),
        Route("POST", "/v1/chat/completions", chats.chat, generates, headers),
        Route("POST", "/v1/responses", respond, generates, headers),
        Route("POST", MESSAGES_PATH, messages.create, document.OF_MESSAGES, headers),
        Route("POST", f"{MESSAGES_PATH}/count_tokens", messages.count_tokens, converts),
        Route("POST", release, service.release_session, document.WITHOUT_BODY, session, document.UNKNOWN),
        Route("GET", "/v1/models", service.models),
        Route("GET", one_model, service.one_model, document.NAMES_MODEL, model),
        Route("POST", "/tokenize", tokens.tokenize, converts),
        Route("POST", "/detokenize", tokens.detokenize, converts),
        Route("GET", "/health", service.health, special=document.UNREADY),
        Route("GET", "/ready", service.ready, special=document.UNREADY),
        Route("GET", "/metrics", service.metrics),
        Route("GET", "/load", service.load),
        Route("GET", "/map", service.pool_map, document.ASKS_WORKER),
        Route("GET", "/version", service.version),
        Route("POST", "/reset_prefix_cache", service.reset_cache, reset_errors),
        Route("GET", "/server_info", service.server_info),
    ]
