"""The fields that every request for an answer has, and the one way from such a body to a `GenerationSpec` and
its response. Chats, plain completions and responses add what their prompts need, each in a file of its own.

Requests are pydantic models: types are checked strictly, and null means the default. Fields of other servers
are renamed or refused (`refused.py`); unknown fields are ignored. `SamplingParams` checks the ranges, once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from fastapi import Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from starlette.responses import Response

from lightkv.errors import LightKVError
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.router.api.answers.chat_writer import ChatWriter
from lightkv.router.api.answers.completion_writer import CompletionWriter
from lightkv.router.api.answers.extras import Extras, kept_bytes, most_tokens
from lightkv.router.api.answers.generation import (
    Backend,
    GenerationSpec,
    closed_with_client,
    unless_disconnected,
)
from lightkv.router.api.answers.message_writer import MessageWriter
from lightkv.router.api.answers.response_writer import ResponseWriter
from lightkv.router.api.grammars.checker import GrammarChecker
from lightkv.router.api.http.body import BodyRequest
from lightkv.router.api.http.owner import owner_of
from lightkv.router.api.http.paced import LongResponse, Pacer
from lightkv.router.api.http.stream import EventStream
from lightkv.router.config import MAX_SECONDS
from lightkv.router.engine.request import NeverFits
from lightkv.router.sampling_params import MAX_COUNT, Grammar, InvalidParams, SamplingParams
from lightkv.router.service.access.key_limits import KeyLimiter
from lightkv.router.service.api_settings import ApiSettings
from lightkv.token_set import TokenSet

from .refused import HINTS, SECOND_NAMES, Unsupported, by_own_names, refuse_unsupported
from .sharing import MAX_SESSION_ID, namespace_of, session_of
from .structured import grammar_of
from .tools import RequestPart

MAX_PRIORITY = 2**31 - 1
# fail_fast: a list of a million wrong items is one error, not a million.
Ids = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
# A list of token ids that becomes a set at once: lists of a whole vocabulary are never kept.
TokenIdSet = Annotated[list[int], Field(fail_fast=True), AfterValidator(TokenSet.of)]


class UnknownModel(LightKVError):
    """The request names a model that this service does not serve."""

    def __init__(self, model: str, known: Sequence[str]) -> None:
        super().__init__(f"the model {model[:200]!r} does not exist here; give one of {', '.join(known)}")


class RequestBody(BaseModel):
    """The common fields of all request bodies."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)

    model: str | None = Field(None, description="One of /v1/models; by default the first of them.")


class StreamOptions(RequestPart):
    """Options of a stream."""

    include_usage: bool | None = Field(
        None, description="End the stream with a chunk that has token counts and no choices."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="Add the token counts so far to every chunk."
    )
    include_obfuscation: Literal[False] | None = Field(None, description="Chunks are never padded.")


class GenerationRequest(RequestBody):
    """The common fields of completions and chats. Those after `user` are extensions, named as in vLLM."""

    model_config = ConfigDict(extra="allow")  # further fields are looked up among the refused ones

    refused: ClassVar[Mapping[str, Unsupported]] = {}
    # The most tokens of an answer to a request that does not say; None: as many as there is room for.
    own_max_tokens: ClassVar[int | None] = None

    n: int | None = Field(None, ge=1, description="Number of answers to each prompt; 1 by default.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(None, description="-1: as many as there is room for.")
    max_completion_tokens: int | None = Field(None, description="Replaces max_tokens.")
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = Field(
        None, description="A number for each token id; the ids are strings."
    )
    seed: int | None = None
    stop: str | Texts | None = None
    user: Any = None

    min_tokens: int | None = Field(
        None,
        description="No end token, stop token or stop string ends an answer before it has this many tokens.",
    )
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: Ids | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = Field(
        None, description="Leave special tokens out of the text; on by default."
    )
    priority: int | None = Field(
        None,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Requests with a lower value run first; 0 by default. One unit counts as much as a minute "
        "of waiting; below -10 and above 60 it counts no more. Values below 0 need --allow-priority.",
    )
    cache_salt: str | None = Field(
        None,
        max_length=1024,
        description="Requests share cached prefixes only with requests of the same salt.",
    )
    skip_reading_prefix_cache: bool | None = Field(
        None, description="Compute the whole prompt, and leave nothing of prompt and answer in the cache."
    )
    session_id: str | None = Field(
        None,
        max_length=MAX_SESSION_ID,
        description="Names a conversation that will continue: the tokens of prompt and answer stay cached when "
        "others are evicted, for session_ttl seconds after the answer. The header X-Session-Id does the same.",
    )
    session_ttl: float | None = Field(
        None,
        gt=0,
        le=MAX_SECONDS,
        description="Seconds until the session expires, after the end of this answer and unless it continues; "
        "by default those of --session-ttl. Needs a session.",
    )

    response_format: dict[str, Any] | None = Field(
        None,
        description='What the answer has to be: {"type": "text"}, "json_object", "json_schema" with '
        '{"schema": …} in json_schema, which is followed whether strict or not, or "structural_tag" with a '
        "format.",
    )
    structured_outputs: dict[str, Any] | None = Field(
        None,
        description="One of json (a schema), json_object, regex, choice, grammar (Lark or GBNF) and "
        "structural_tag.",
    )
    bad_words: Texts | None = Field(None, description="Texts that an answer never has.")
    allowed_token_ids: TokenIdSet | None = Field(None, description="Only these tokens are sampled.")
    prompt_logprobs: int | None = Field(
        None,
        description="How many of the likeliest tokens to return in the place of each token of the prompt, 0 to "
        "20, with the token's own log-probability; not in a stream.",
    )
    return_token_ids: bool | None = Field(
        None, description="Return the ids of the tokens of prompt and answer."
    )
    return_tokens_as_token_ids: bool | None = Field(
        None, description="Name the tokens of log-probabilities by their ids, as token_id:5."
    )

    _by_own_names = model_validator(mode="before")(staticmethod(by_own_names))

    @property
    def stated_max_tokens(self) -> int | None:
        """The most tokens of an answer, if the request says; -1: as many as there is room for."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def answers_nothing(self) -> bool:
        """Whether the client gets no token of an answer. One is computed then."""
        return False

    @property
    def prompt_scores(self) -> int | None:
        """How many log-probabilities of each of the prompt's tokens are computed, if any."""
        return self.prompt_logprobs

    def structure(self) -> tuple[str, Grammar | None]:
        """Returns the field that says what the answer has to be, and its grammar; None if the text is free.
        Raises InvalidParams."""
        if self.response_format is None and self.structured_outputs is None:
            return "tools", None
        return grammar_of(self.response_format, self.structured_outputs)

    def sampling_params(
        self,
        max_tokens: int,
        logprobs: int | None,
        grammar: Grammar | None,
        defaults: Mapping[str, Any],
    ) -> SamplingParams:
        """Returns the sampling parameters of all answers to each prompt. Raises InvalidParams.

        `max_tokens`, `logprobs`, `grammar`: what several fields say together. `defaults`: of fields that the
        request leaves out.
        """
        streams = self.stream is True
        if self.model_extra:
            refuse_unsupported(self.model_extra, SECOND_NAMES)
            refuse_unsupported(self.model_extra, self.refused)
        if self.stream_options is not None and not streams:
            raise InvalidParams("stream_options", "an object", "it only together with stream: true")
        if streams and self.prompt_logprobs is not None:
            raise InvalidParams("prompt_logprobs", self.prompt_logprobs, "it without stream: true")
        given = {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}
        fields: dict[str, Any] = {**defaults, **given}
        fields["prompt_logprobs"] = self.prompt_scores
        if self.logit_bias is not None:
            fields["logit_bias"] = _by_token(self.logit_bias)
        return SamplingParams(
            max_tokens=max_tokens, logprobs=logprobs, n=self.n or 1, grammar=grammar, **fields
        )


_SAMPLING_FIELDS = sorted(
    set(SamplingParams.__struct_fields__)
    & set(GenerationRequest.model_fields) - {"max_tokens", "logit_bias", "n", "prompt_logprobs"}
)


@dataclass(frozen=True)
class Accepted:
    """A request whose fields are in order, before its prompts are made.

    spec: what is generated, still without prompts; its parameters are parsed once. grammar: what the whole
    answers have to be. is_cut: the request does not say how long its answers are, so that they may have as many
    tokens as `spec` allows and there is room for. context: the model's, in tokens. longest: the most tokens of
    a prompt and its answer. finds_boundary: what the model keeps of a prompt is not there at each of its
    tokens, so that a chat says where its next turn leaves it. extras: what the answers have beside their text.
    """

    model: str
    spec: GenerationSpec
    grammar: Grammar | None
    is_cut: bool
    context: int
    longest: int
    finds_boundary: bool
    extras: Extras

    def check_fits(self, num_prompt: int) -> None:
        """Raises NeverFits for a prompt that is longer than the context with its answer, before it is sent to
        the router."""
        max_tokens = self.spec.shows_answer * (1 if self.is_cut else self.spec.params.max_tokens)
        if num_prompt + max_tokens > self.context:
            raise NeverFits(num_prompt, max_tokens, self.context)


class Desk:
    """Takes requests for answers: checks them, plans their answers, and writes these whole or as a stream."""

    def __init__(
        self, backend: Backend, settings: ApiSettings, grammars: GrammarChecker, limiter: KeyLimiter
    ) -> None:
        self._limiter = limiter
        self.backend = backend
        self.settings = settings
        self.pacer = Pacer()
        self._grammars = grammars

    def accept(
        self, body: GenerationRequest, request: Request, logprobs: int | None, num_prompts: int | None = None
    ) -> Accepted:
        """Returns what is known before the prompts are made, and takes the answers of the key's limits.
        `num_prompts`: None for the one of a chat. Raises InvalidParams, UnknownModel, InvalidHeader,
        LimitReached, and RequestRefused unless the service is ready."""
        settings = self.settings
        model = self.model(body.model)
        stated, own, shows_answer = body.stated_max_tokens, body.own_max_tokens, not body.answers_nothing
        extras = body.model_extra or {}
        ignored = request.state.record.ignored_fields
        ignored += [name for name in extras if name in HINTS and extras[name] is not None]
        if stated == -1:
            stated = own = None
            ignored.append("max_tokens")
        default = settings.default_max_tokens or own
        is_cut = stated is None and (settings.default_max_tokens is not None or default is None)
        field, grammar = body.structure()
        max_tokens = stated if stated is not None else default or MAX_COUNT
        params = body.sampling_params(max_tokens, logprobs, grammar, self.sampling_defaults)
        info = self.backend.client.ready_info()
        if num_prompts is not None and not 1 <= num_prompts * params.n <= settings.max_answers:
            most = f"1 to {settings.max_answers} prompts, counted n times each"
            raise InvalidParams("prompt", f"{num_prompts} prompts", most)
        if params.n > settings.max_answers:
            raise InvalidParams("n", params.n, f"1 to {settings.max_answers}")
        num_answers = (num_prompts or 1) * params.n
        if num_answers > settings.max_queued_requests:  # the queue could never hold all of them together
            most = f"at most {settings.max_queued_requests} answers at once"
            allowed = f"{most}, or start with a larger --max-queued-requests"
            raise InvalidParams("n", f"{params.n} for each of {num_prompts or 1} prompts", allowed)
        context = info.limits.max_model_len
        priority = body.priority or 0
        if priority < 0 and not settings.allow_priority:
            allowed = "0, or more for less urgency; less than 0 needs a service started with --allow-priority"
            raise InvalidParams("priority", priority, allowed)
        accepted = Accepted(
            model=model,
            spec=GenerationSpec(
                prompts=[],
                params=params,
                priority=priority,
                shows_answer=shows_answer,
                namespace=namespace_of(settings, request, body.cache_salt),
                session=session_of(settings, request, body.session_id, body.session_ttl),
                states_length=stated is not None or own is not None,
                grammar_field=field,
                key=request.state.key_name,
            ),
            grammar=grammar,
            is_cut=is_cut,
            context=context,
            # The last token needs no slot.
            longest=min(context, (info.capacity if info.longest is None else info.longest) + 1),
            finds_boundary=info.longest is not None or info.num_states > 0,
            extras=Extras(
                token_ids=body.return_token_ids is True,
                ids_for_tokens=body.return_tokens_as_token_ids is True,
                prompt_logprobs=body.prompt_logprobs is not None,
            ),
        )
        if (key := request.state.api_key) is not None:
            length = request.headers.get("content-length", "")
            num_bytes = int(length) if length.isdecimal() else 0
            reserved = self._limiter.reserve(key, num_answers, params.max_tokens, num_bytes)
            request.state.record.reservation = reserved
        return accepted

    def take_request(self, request: Request) -> None:
        """Takes a request without an answer of its key's limits. Raises LimitReached."""
        if (key := request.state.api_key) is not None:
            self._limiter.take_request(key)

    async def answer(
        self,
        asked: Accepted,
        writer: CompletionWriter | ChatWriter | ResponseWriter | MessageWriter,
        body: GenerationRequest,
        request: Request,
    ) -> Response:
        """Returns the whole answer or its stream. `asked`: with the prompts. The router has accepted the
        request before a stream begins."""
        spec, params = asked.spec, asked.spec.params
        num_prompt = max(map(len, spec.prompts)) // TOKEN_BYTES
        asked.check_fits(num_prompt)
        if (reservation := request.state.record.reservation) is not None:
            reservation.add_prompt(sum(map(len, spec.prompts)) // TOKEN_BYTES)
        most = most_tokens(spec, asked.extras, 1 if asked.is_cut else params.max_tokens)
        if asked.is_cut:
            left = max(min(params.max_tokens, asked.longest - num_prompt, most), 1)
            spec = replace(spec, params=params.completed(left, asked.grammar))
        else:
            if asked.grammar is not params.grammar:
                spec = replace(spec, params=params.completed(params.max_tokens, asked.grammar))
            if params.max_tokens > (left := asked.longest - num_prompt):
                spec = replace(spec, cut_to=left)
        if spec.params.grammar is not None:
            num_bytes = await self.check_grammar(spec.params.grammar, spec.grammar_field, request)
            spec = replace(spec, grammar_bytes=num_bytes, grammar_owner=owner_of(request))
        if num_bytes := kept_bytes(spec):
            assert isinstance(request, BodyRequest)
            request.keep(num_bytes)
        generation = await self.backend.generate(spec)
        request.state.record.generation = generation
        if body.stream:
            options = body.stream_options
            includes_usage = options is not None and options.include_usage is True
            has_running_usage = options is not None and options.continuous_usage_stats is True
            return EventStream(generation, writer, self.pacer, includes_usage, has_running_usage)
        async with closed_with_client(request.receive, generation):
            async for _ in generation.deltas():
                pass
            return LongResponse(writer.whole(generation), self.pacer)

    async def check_grammar(self, grammar: Grammar, field: str, request: Request) -> int:
        """Returns the bytes of the compiled grammar. Raises InvalidGrammar, RequestRefused, and GenerationLost
        if the client disconnects."""
        checked = self._grammars.check(grammar, field, owner_of(request))
        return await unless_disconnected(request.receive, checked)

    @property
    def sampling_defaults(self) -> Mapping[str, Any]:
        """The sampling parameters of a request that does not say, by name, where they are not OpenAI's."""
        return self.backend.tokenizer.recommended if self.settings.sampling_defaults == "model" else {}

    @property
    def max_model_len(self) -> int:
        """The context in tokens; until the model is loaded, that of its tokenizer."""
        info = self.backend.client.status.info
        return self.backend.tokenizer.max_model_len if info is None else info.limits.max_model_len

    def model(self, name: str | None) -> str:
        """Returns the name of the requested model, by default the first. Raises UnknownModel."""
        known = self.settings.served_model_name
        if name is None:
            return known[0]
        if name not in known:
            raise UnknownModel(name, known)
        return name


def json_response(content: Any, status: int = 200) -> Response:
    """Returns a response with a body of JSON."""
    return Response(msgspec.json.encode(content), status, media_type="application/json")


def _by_token(logit_bias: dict[str, Any]) -> dict[int, Any]:
    """Converts the keys, which are strings in JSON, to token ids. Raises InvalidParams for other keys."""
    by_token = {}
    for key, bias in logit_bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidParams("logit_bias", key, "token ids, as strings, to numbers")
        by_token[int(key)] = bias
    return by_token
