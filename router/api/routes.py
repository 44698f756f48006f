"""The table of routes: for each path the function that answers, and what the OpenAPI document says of it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from lightkv.router.api.answers.generation import Backend
from lightkv.router.api.grammars.checker import GrammarChecker
from lightkv.router.api.requests.chat import Chats
from lightkv.router.api.requests.completion import Completions
from lightkv.router.api.requests.dialect import ChatDialect
from lightkv.router.api.requests.generation import Desk
from lightkv.router.api.requests.prompts import PromptReader
from lightkv.router.api.requests.responses import Responses
from lightkv.router.api.requests.service import ServiceRoutes
from lightkv.router.api.requests.tokens import Tokens
from lightkv.router.service.api_settings import ApiSettings

from . import document


class Route(NamedTuple):
    """One route. `answers`, `errors`: its statuses. `described`: more of it in the document."""

    method: str
    path: str
    endpoint: Callable[..., Any]
    answers: document.Answers = {}  # noqa: RUF012
    errors: Sequence[int] = ()
    described: dict[str, Any] | None = None


def routes_of(backend: Backend, settings: ApiSettings, grammars: GrammarChecker) -> list[Route]:
    """Returns all routes of a service, but for the document's own."""
    desk = Desk(backend, settings, grammars)
    prompts = PromptReader(backend.tokenizer)
    dialect = ChatDialect(backend.tokenizer, settings)
    chats = Chats(desk, prompts, dialect)
    tokens = Tokens(desk, prompts, dialect)
    service = ServiceRoutes(desk)
    namespace = [document.NAMESPACE] if settings.cache_namespace == "header" else []
    headers = {"parameters": [*namespace, document.SESSION]}
    session = {"parameters": [*namespace, document.SESSION_ID]}
    model = document.model_parameter(settings.model_names)
    generates, converts = document.GENERATES, document.CONVERTS_TEXT
    reset_errors = (*document.WITHOUT_BODY, *document.ASKS_WORKER)
    complete = Completions(desk, prompts).complete
    respond = Responses(chats).respond
    info = [Route("GET", "/tokenizer_info", tokens.tokenizer_info, document.TOKENIZER_INFO)]
    return [
        Route("POST", "/v1/completions", complete, document.COMPLETION, generates, headers),
        Route("POST", "/v1/chat/completions", chats.chat, document.CHAT, generates, headers),
        Route("POST", "/v1/responses", respond, document.RESPONSE, generates, headers),
        Route(
            "POST",
            "/v1/sessions/{session_id:path}/release",
            service.release_session,
            document.RELEASED,
            document.WITHOUT_BODY,
            session,
        ),
        Route("GET", "/v1/models", service.models, document.MODELS),
        Route(
            "GET",
            "/v1/models/{model:path}",
            service.one_model,
            document.ONE_MODEL,
            document.NAMES_MODEL,
            model,
        ),
        Route("POST", "/tokenize", tokens.tokenize, document.TOKENIZED, converts),
        Route("POST", "/detokenize", tokens.detokenize, document.DETOKENIZED, converts),
        *(info if settings.enable_tokenizer_info else []),
        Route("GET", "/health", service.health, document.HEALTH),
        Route("GET", "/ready", service.ready, document.READY),
        Route("GET", "/metrics", service.metrics, document.METRICS),
        Route("GET", "/load", service.load, document.LOAD),
        Route("GET", "/map", service.pool_map, document.MAP, document.ASKS_WORKER),
        Route("GET", "/version", service.version, document.VERSION),
        Route("POST", "/reset_prefix_cache", service.reset_cache, document.CACHE_RESET, reset_errors),
        Route("GET", "/server_info", service.server_info, document.SERVER_INFO),
    ]
