"""The routes of the HTTP application. Each returns a response or raises an error, which `app.py` turns into an
HTTP status."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
from fastapi import Request
from starlette.responses import Response

from lightkv import __version__
from lightkv.errors import LightKVError
from lightkv.router.api.grammars.checker import GrammarChecker
from lightkv.router.api.openai.dialect import ChatDialect
from lightkv.router.api.openai.protocol import (
    MAX_SESSION_ID,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from lightkv.router.api.openai.response_writer import ResponseWriter
from lightkv.router.api.openai.responses import ResponseRequest, renamed
from lightkv.router.api.openai.service_bodies import (
    CacheEvicted,
    Detokenized,
    Model,
    ModelList,
    ReleasedSession,
    ServerInfo,
    Tokenized,
    Version,
)
from lightkv.router.api.openai.structured import compact
from lightkv.router.api.openai.tools import ToolUse
from lightkv.router.api.openai.writer import ChatWriter, CompletionWriter, prompt_scores
from lightkv.router.api.operators.request_log import note_generation
from lightkv.router.config import NAMESPACE_HEADER, SESSION_HEADER
from lightkv.router.engine.request import InvalidPrompt, NeverFits
from lightkv.router.sampling_params import MAX_COUNT, MAX_LOGPROBS, Grammar, InvalidParams
from lightkv.router.service.api_settings import ApiSettings

from . import unsupported_fields
from .beams import search_beams
from .event_stream import EventStream, closed_with_client, unless_disconnected
from .generation import Backend, GenerationSpec
from .metrics import CONTENT_TYPE
from .prompt_reader import Chat, PromptReader, PromptRoom, convert
from .sessions import SessionUse, UnknownSession
from .unsupported_fields import refuse_unsupported


class UnknownModel(LightKVError):
    """The request names a model that this service does not serve."""

    def __init__(self, model: str, known: list[str]) -> None:
        super().__init__(f"the model {model!r} does not exist here; give one of {', '.join(known)}")


class NoEmbeddings(LightKVError):
    """The request wants embeddings, which this service does not compute."""

    def __init__(self) -> None:
        super().__init__(
            "/v1/embeddings does not exist here: this service generates text; send embeddings to a service of "
            "an embedding model, such as Text Embeddings Inference, Infinity or vLLM"
        )


class InvalidHeader(LightKVError):
    """A header that the service requires is missing, empty or given several times."""

    def __init__(self, name: str, num_given: int) -> None:
        super().__init__(
            f"the request has {num_given} headers {name}, or an empty one; send one that names the cache "
            "namespace"
        )


class Routes:
    """The endpoints, as methods. For an invalid request they raise an error."""

    def __init__(self, backend: Backend, settings: ApiSettings, grammars: GrammarChecker) -> None:
        self._backend = backend
        self._grammars = grammars
        self._client = backend.client
        self._tokenizer = backend.tokenizer
        self._prompts = PromptReader(backend.tokenizer)
        self._dialect = ChatDialect(backend.tokenizer, settings)
        self._settings = settings
        self._created = int(time.time())

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """POST /v1/completions: continue one or several prompts."""
        model = self._model(body.model)
        default = None if body.states_length else self._settings.default_max_tokens
        params = body.params() if default is None else body.params(default)
        info = self._client.ready_info()
        if not 1 <= len(body.prompts) * params.n <= self._settings.max_answers:
            most = f"1 to {self._settings.max_answers} prompts, counted n times each"
            raise InvalidParams("prompt", f"{len(body.prompts)} prompts", most)
        self._check_queue(len(body.prompts), params.n)
        namespace, session = self._namespace(request, body), self._session(request, body)
        context = info.limits.max_model_len
        keeps_first = body.truncation_side == "right"
        room = PromptRoom(context, body.num_kept(params.max_tokens, context), keeps_first)
        prompts = []
        for prompt in body.prompts:  # a prompt that is too long is refused before the next one is tokenised
            if body.suffix:
                prompt_ids = await self._prompts.ids_between(str(prompt), body.suffix, room)
            else:
                prompt_ids = await self._prompt_ids(prompt, body.add_special_tokens is not False, room)
            _check_fits(prompt_ids.size, params.max_tokens if default is None else 1, context)
            prompts.append(prompt_ids)
        if default is not None:  # which is cut to what the prompts leave room for
            left = min(context, info.capacity + 1) - max(ids.size for ids in prompts)
            params = body.params(max(min(default, left), 1))
        if self._settings.compact_json:
            params = msgspec.structs.replace(params, grammar=compact(params.grammar, body.grammar_field))
        echoed = []
        if body.echo:
            for text, prompt_ids in zip(body.prompts, prompts, strict=True):
                is_whole = isinstance(text, str) and room.num_kept is None
                echoed.append(str(text) if is_whole else await self._prompts.text_of(prompt_ids))
        spec = GenerationSpec(
            prompts=[prompt_ids.tobytes() for prompt_ids in prompts],
            params=params,
            priority=self._priority(body),
            namespace=namespace,
            session=session,
            shows_logprobs=body.logprobs is not None,
            shows_answer=not body.answers_nothing,
            grammar_field=body.grammar_field,
        )
        extras = replace(body.extras(), echoes_logprobs=body.echoes_logprobs, prompts=spec.prompts)
        writer = CompletionWriter(model, self._tokenizer, echoed, extras)
        return await self._answer(spec, writer, body, request)

    async def respond(self, body: ResponseRequest, request: Request) -> Response:
        """POST /v1/responses: answer a chat, in the form of OpenAI's Responses API."""
        chat = body.chat()
        try:
            return await self._chat(chat, request, partial(ResponseWriter, body))
        except InvalidParams as error:
            raise renamed(error) from error

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """POST /v1/chat/completions: answer a chat."""
        return await self._chat(body, request)

    async def _chat(
        self,
        body: ChatRequest,
        request: Request,
        wrap: Callable[[str, ChatWriter], ResponseWriter] | None = None,
    ) -> Response:
        """Answers a chat. `wrap`: returns what writes the answer in another form, for the model's name."""
        model = self._model(body.model)
        params = body.params(MAX_COUNT)  # raises for wrong parameters before anything is computed
        info = self._client.ready_info()
        if params.n > self._settings.max_answers:
            raise InvalidParams("n", params.n, f"1 to {self._settings.max_answers}")
        self._check_queue(1, params.n)
        namespace, session = self._namespace(request, body), self._session(request, body)
        context = info.limits.max_model_len
        keeps_first = body.truncation_side == "right"
        room = PromptRoom(context, body.num_kept(body.given_max_tokens(1), context), keeps_first)
        use = body.tool_use()
        is_constrained = params.grammar is not None
        prompt_ids = await self._prompts.ids_of_chat(self._chat_of(body, use, is_constrained), room)
        reading = self._dialect.reading(body, use, prompt_ids, params.grammar)
        longest = min(context, info.capacity + 1)  # the last token needs no slot
        most = min(longest - prompt_ids.size, self._settings.default_max_tokens or longest)
        params = body.params(max(most, 1))
        _check_fits(prompt_ids.size, params.max_tokens, context)
        if self._settings.compact_json and use is None:
            grammar = compact(params.grammar, body.grammar_field)
            params = msgspec.structs.replace(params, grammar=grammar)
        if params.grammar is not None:  # it may become a part of another one
            await self._check_grammar(params.grammar, body.grammar_field, request)
        params = msgspec.structs.replace(params, grammar=self._dialect.grammar(use, params.grammar))
        spec = GenerationSpec(
            prompts=[prompt_ids.tobytes()],
            params=params,
            priority=self._priority(body),
            namespace=namespace,
            session=session,
            grammar_field=body.grammar_field if use is None else use.field,
            states_length=body.states_length,
            shows_logprobs=body.logprobs is True,
            shown_ids=frozenset() if reading is None else reading.shown_ids,
        )
        extras = replace(body.extras(), prompts=spec.prompts)
        writer = ChatWriter(model, self._tokenizer, reading, extras)
        return await self._answer(spec, writer if wrap is None else wrap(model, writer), body, request)

    async def release_session(self, request: Request) -> Response:
        """POST /v1/sessions/{session_id}/release: end a session; its tokens are cached like any others."""
        session_id = request.path_params["session_id"]
        if not self._backend.sessions.release(self._session_name(request, session_id)):
            raise UnknownSession(session_id)
        return _json(ReleasedSession(id=session_id, object="session", released=True))

    async def embed(self) -> Response:
        """POST /v1/embeddings: say what to use in its place."""
        raise NoEmbeddings

    async def tokenizer_info(self) -> Response:
        """GET /tokenizer_info: return tokenizer_config.json and the chat template."""
        return _json(self._tokenizer.settings | {"chat_template": self._tokenizer.template or None})

    async def tokenize(self, body: TokenizeRequest) -> Response:
        """POST /tokenize: return the tokens of a prompt or of a chat, which may have at most as many characters
        as the context could hold."""
        self._model(body.model)
        refuse_unsupported(body.model_extra or {}, unsupported_fields.CHAT)
        room = PromptRoom(self._max_model_len)
        if body.prompt is not None and body.messages is None:
            ids = await self._prompts.ids_of_text(body.prompt, body.add_special_tokens is not False, room)
        elif body.messages is not None and body.prompt is None:
            ids = await self._prompts.ids_of_chat(self._chat_of(body, body.tool_use()), room)
        else:
            raise InvalidPrompt("the request has neither prompt nor messages, or both; give one of them")
        tokens = ids.tolist()
        strings = await self._prompts.texts_of_each(tokens) if body.return_token_strs else None
        return _json(
            Tokenized(count=len(tokens), max_model_len=self._max_model_len, tokens=tokens, token_strs=strings)
        )

    async def detokenize(self, body: DetokenizeRequest) -> Response:
        """POST /detokenize: return the text of tokens."""
        self._model(body.model)
        return _json(Detokenized(prompt=await self._prompts.text_of(body.tokens)))

    async def models(self) -> Response:
        """GET /v1/models: return the names that requests may use for the model."""
        models = [self._described(name) for name in self._settings.model_names]
        return _json(ModelList(object="list", data=models))

    async def one_model(self, request: Request) -> Response:
        """GET /v1/models/{model}: describe one name."""
        return _json(self._described(self._model(request.path_params["model"])))

    async def health(self) -> Response:
        """GET /health: return 200 while the service takes requests and completes steps when there is work."""
        latest = self._client.latest
        is_healthy = latest.is_healthy
        body = {
            "healthy": is_healthy,
            "state": latest.status.state,
            "step_age": latest.status.load.step_age,
            "router_silence": latest.age,
        }
        return _json(body, 200 if is_healthy else 503)

    async def ready(self) -> Response:
        """GET /ready: return 200 while the service takes requests and steps are not late."""
        latest = self._client.latest
        is_ready = latest.takes_requests
        body = {"ready": is_ready, "state": latest.status.state, "detail": latest.detail}
        return _json(body, 200 if is_ready else 503)

    async def metrics(self) -> Response:
        """GET /metrics: return all series in Prometheus' text format."""
        return Response(self._backend.metrics.text(), media_type=CONTENT_TYPE)

    async def load(self) -> Response:
        """GET /load: return the router's counts as JSON."""
        status, age = self._client.latest
        state = {
            "state": status.state,
            "detail": status.detail,
            "router_silence": age,
            "kv_dtype": self._kv_type,
        }
        return _json(state | msgspec.structs.asdict(status.load))

    async def pool_map(self) -> Response:
        """GET /map: return as JSON what every slot of the pool is used for."""
        return _json(await self._client.pool_map())

    async def version(self) -> Response:
        """GET /version: return lightkv's version."""
        return _json(Version(version=__version__))

    async def server_info(self) -> Response:
        """GET /server_info: return the version, the settings without secrets, and what runs the model."""
        info = self._client.status.info
        runner = None if info is None else msgspec.to_builtins(info)
        configuration = self._settings.configuration
        return _json(ServerInfo(version=__version__, configuration=configuration, runner=runner))

    async def reset_cache(self) -> Response:
        """POST /reset_prefix_cache: evict every cached token that no running request holds."""
        return _json(CacheEvicted(num_evicted_tokens=await self._client.reset_cache()))

    async def _answer(
        self,
        spec: GenerationSpec,
        writer: CompletionWriter | ChatWriter | ResponseWriter,
        body: GenerationRequest,
        request: Request,
    ) -> Response:
        """Returns the whole answer or its stream. The router has accepted the request before a stream
        begins."""
        beams = body.beam_params(spec.params)
        if beams is not None:
            self._check_queue(len(spec.prompts), beams.width)
            found = await search_beams(self._backend, spec, beams, request.receive)
            note_generation(request, found)
            return _json(writer.whole(found))
        if spec.params.grammar is not None:
            num_bytes = await self._check_grammar(spec.params.grammar, spec.grammar_field, request)
            spec = replace(spec, grammar_bytes=num_bytes, grammar_owner=_grammar_owner(request))
        generation = await self._backend.generate(spec)
        note_generation(request, generation)
        if body.stream:
            return EventStream(generation, writer, body)
        async with closed_with_client(request.receive, generation):
            async for _ in generation.deltas():
                pass
            if spec.params.n > (body.n or 1):
                generation.keep_best(body.n or 1)
            num_scored = sum(len(answer.scored) for answer in generation.answers)
            num_scored += sum(map(len, prompt_scores(generation).values()))
            content = await convert(
                num_scored * (1 + MAX_LOGPROBS), lambda: msgspec.json.encode(writer.whole(generation))
            )
            return Response(content, media_type="application/json")

    async def _check_grammar(self, grammar: Grammar, field: str, request: Request) -> int:
        """Returns the bytes of the compiled grammar. Raises InvalidGrammar, RequestRefused, and GenerationLost
        if the client disconnects."""
        checked = self._grammars.check(grammar, field, _grammar_owner(request))
        return await unless_disconnected(request.receive, checked)

    async def _prompt_ids(
        self, prompt: str | list[int], add_special_tokens: bool, room: PromptRoom
    ) -> np.ndarray:
        if isinstance(prompt, str):
            return await self._prompts.ids_of_text(prompt, add_special_tokens, room)
        return await self._prompts.ids_of_ids(prompt, room)

    def _namespace(self, request: Request, body: GenerationRequest) -> tuple[str, ...]:
        """Returns the namespace within which the request shares cached prefixes. Raises InvalidHeader."""
        match self._settings.cache_namespace:
            case "key":
                tenant: bytes = request.state.api_key
            case "header":
                tenant = _tenant(request)
            case _:
                return body.namespace
        # The router stores the names of its prefix trees, so it gets a hash and never an API key.
        return (hashlib.sha256(tenant).hexdigest(), *body.namespace)

    def _session(self, request: Request, body: GenerationRequest) -> SessionUse | None:
        """Returns the session that the body names or, if it names none, the header. Raises InvalidParams,
        InvalidHeader."""
        given = request.headers.get(SESSION_HEADER, "")
        if len(given) > MAX_SESSION_ID:  # also of a header that the body's session replaces, as documented
            what = f"{len(given)} bytes in {SESSION_HEADER}"
            raise InvalidParams("session_id", what, f"at most {MAX_SESSION_ID}")
        session_id = body.session_id
        if session_id is None:
            session_id = given.encode("latin-1").decode("utf-8", "replace")
        if not session_id:
            if body.session_ttl is not None:
                raise InvalidParams("session_ttl", body.session_ttl, "it together with a session_id")
            return None
        ttl = self._settings.session_ttl if body.session_ttl is None else body.session_ttl
        return SessionUse(self._session_name(request, session_id), ttl)

    def _session_name(self, request: Request, session_id: str) -> str:
        """Returns the session's name in the service, which has its owner: the API key and, where the cache is
        divided by the header, its value. Raises InvalidHeader."""
        owner = request.state.api_key or b""
        if self._settings.cache_namespace == "header":
            owner += b"\n" + _tenant(request)
        return f"{hashlib.sha256(owner).hexdigest()}/{session_id}"

    def _check_queue(self, num_prompts: int, n: int) -> None:
        """Raises InvalidParams if the queue could never hold all answers, which have to be queued
        together."""
        most = self._settings.max_queued_requests
        if num_prompts * n > most:
            allowed = f"at most {most} answers at once, or start with a larger --max-queued-requests"
            raise InvalidParams("n", f"{n} for each of {num_prompts} prompts", allowed)

    def _priority(self, body: GenerationRequest) -> int:
        """Returns the request's priority, 0 by default. Raises InvalidParams for one below 0 without
        --allow-priority."""
        priority = body.priority or 0
        if priority < 0 and not self._settings.allow_priority:
            allowed = "0, or more for less urgency; less than 0 needs a service started with --allow-priority"
            raise InvalidParams("priority", priority, allowed)
        return priority

    def _chat_of(
        self, body: ChatRequest | TokenizeRequest, use: ToolUse | None, is_constrained: bool = False
    ) -> Chat:
        """Returns the chat of a request, with the functions that may be called. Raises InvalidParams."""
        if body.chat_template is not None and not self._settings.trust_request_chat_template:
            allowed = "null, or start the service with --trust-request-chat-template"
            raise InvalidParams("chat_template", body.chat_template, allowed)
        if body.documents and body.chat_template is None and not self._dialect.takes_documents:
            allowed = "null, and put the documents into a message: the model's chat template takes none"
            raise InvalidParams("documents", body.documents, allowed)
        return replace(
            self._dialect.chat(body, use, is_constrained),
            add_generation_prompt=body.begins_answer,
            documents=body.documents or None,
            template=body.chat_template,
            continues_last=body.continue_final_message is True,
        )

    def _model(self, name: str | None) -> str:
        """Returns the name of the requested model, by default the first. Raises UnknownModel."""
        known = self._settings.model_names
        if name is None:
            return known[0]
        if name not in known:
            raise UnknownModel(name, known)
        return name

    @property
    def _max_model_len(self) -> int:
        info = self._client.status.info
        return self._tokenizer.max_model_len if info is None else info.limits.max_model_len

    @property
    def _kv_type(self) -> str | None:
        info = self._client.status.info
        return None if info is None else info.kv_type

    def _described(self, name: str) -> Model:
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "lightkv",
            "max_model_len": self._max_model_len,
            "kv_dtype": self._kv_type,
        }


def _tenant(request: Request) -> bytes:
    """Returns the value of the header that names the cache namespace. Raises InvalidHeader."""
    values = request.headers.getlist(NAMESPACE_HEADER)
    if len(values) != 1 or not values[0]:
        raise InvalidHeader(NAMESPACE_HEADER, len(values))
    return values[0].encode("latin-1")


def _grammar_owner(request: Request) -> bytes:
    """Returns the hash of the client's key, by which grammars wait in turns, here and in the router."""
    return hashlib.sha256(request.state.api_key or b"").digest()


def _json(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _check_fits(num_prompt: int, max_tokens: int, max_model_len: int) -> None:
    """Raises NeverFits for a request longer than the context, before its prompt is sent to the router."""
    if num_prompt + max_tokens > max_model_len:
        raise NeverFits(num_prompt, max_tokens, max_model_len)
