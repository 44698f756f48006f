"""OpenAI's requests and responses as types.

Requests are pydantic models: types are checked strictly, and null means the default. Fields that other servers
support and this one does not are refused by name (`unsupported_fields.py`); unknown fields are ignored.
`SamplingParams` checks the ranges. Responses are typed dicts, which pydantic documents and msgspec encodes.
"""

from typing import Annotated, Any, Literal, NotRequired

from msgspec.structs import replace
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from lightkv.router.api import unsupported_fields
from lightkv.router.api.unsupported_fields import refuse_unsupported
from lightkv.router.config import MAX_SECONDS
from lightkv.router.sampling_params import MAX_LOGPROBS, InvalidParams, SamplingParams
from lightkv.router.text.beam_search import BeamParams

from .extensions import AnswerFields, Ids, SuffixField, TemplateFields, Text, Texts
from .extras import PromptTokens
from .structured import StructuredFields
from .tools import CalledFunction, CalledFunctionDelta, ToolCall, ToolCallDelta, ToolFields

DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's for plain completions
MAX_PRIORITY = 2**31 - 1
MAX_SESSION_ID = 256  # characters


class RequestBody(BaseModel):
    """The common fields of all request bodies."""

    model_config = ConfigDict(strict=True, extra="ignore", hide_input_in_errors=True)

    model: str | None = Field(None, description="One of /v1/models; by default the first of them.")


class StreamOptions(BaseModel):
    """Options of a stream."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = Field(
        None, description="End the stream with a chunk that has token counts and no choices."
    )
    continuous_usage_stats: bool | None = Field(
        None, description="Add the token counts so far to every chunk."
    )
    include_obfuscation: Literal[False] | None = Field(None, description="Chunks are never padded.")


class GenerationRequest(StructuredFields, RequestBody, AnswerFields):
    """The common fields of completions and chats. Those after `user` are extensions, named as in vLLM."""

    model_config = ConfigDict(extra="allow")  # further fields are looked up among the unsupported ones

    n: int | None = Field(None, ge=1, description="Number of answers to each prompt; 1 by default.")
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = Field(None, description="Replaces max_tokens.")
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, Any] | None = Field(
        None, description="A number for each token id; the ids are strings."
    )
    seed: int | None = None
    stop: Text | Texts | None = None
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
    add_special_tokens: bool | None = Field(
        None,
        description="Add the tokenizer's special tokens to the prompt. By default they are added to a text, "
        "and not to a chat, whose template writes them.",
    )
    truncate_prompt_tokens: int | None = Field(
        None,
        description="Keep this many of the prompt's last tokens; -1 keeps as many as max_tokens leaves room "
        "for.",
    )
    truncation_side: Literal["left", "right"] | None = Field(
        None, description="Which end of a prompt truncate_prompt_tokens cuts off; left by default."
    )
    priority: int | None = Field(
        None,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Requests with a lower value run first; 0 by default. One unit counts as much as a minute "
        "of waiting; below -10 and above 60 it counts no more. Values below 0 need --allow-priority.",
    )
    cache_salt: Text | None = Field(
        None,
        max_length=1024,
        description="Requests share cached prefixes only with requests of the same salt.",
    )
    session_id: Text | None = Field(
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

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def has_running_usage(self) -> bool:
        """Whether every chunk of a stream has the token counts so far."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def namespace(self) -> tuple[str, ...]:
        """The namespace within which cached prefixes are shared."""
        return (self.cache_salt,) if self.cache_salt else ()

    @property
    def states_length(self) -> bool:
        """Whether the request says how many tokens an answer has at most."""
        return self.max_completion_tokens is not None or self.max_tokens is not None

    def given_max_tokens(self, default: int) -> int:
        """Returns the most tokens of an answer, or `default` if the request does not say."""
        given = (self.max_completion_tokens, self.max_tokens, default)
        return next(value for value in given if value is not None)

    def num_kept(self, max_tokens: int, max_model_len: int) -> int | None:
        """Returns how many of a prompt's last tokens are kept; None keeps all. Raises InvalidParams."""
        kept = self.truncate_prompt_tokens
        if kept is None:
            return None
        if kept != -1 and not 1 <= kept <= max_model_len:
            allowed = f"-1, or 1 to {max_model_len}, the length of the context"
            raise InvalidParams("truncate_prompt_tokens", kept, allowed)
        return max(max_model_len - max_tokens, 1) if kept == -1 else kept

    def beam_params(self, params: SamplingParams) -> BeamParams | None:
        """Returns the parameters of a beam search, or None if the request samples. Raises InvalidParams."""
        if self.use_beam_search and params.grammar is not None:
            allowed = "it without use_beam_search, which does not heed it"
            raise InvalidParams(self.grammar_field, "what the answer has to be", allowed)
        return self.beams(params, self.n or 1, self.stream is True)

    def sampling_params(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """Returns the sampling parameters of all n answers. Raises InvalidParams."""
        if self.stream_options is not None and not self.stream:
            raise InvalidParams("stream_options", "an object", "it only together with stream: true")
        fields: dict[str, Any] = {
            name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None
        }
        if self.logit_bias is not None:
            fields["logit_bias"] = _by_token(self.logit_bias)
        streams = self.stream is True
        self.check_stream(streams)
        fields["n"] = self.num_generated(self.n or 1, streams)
        if fields["n"] > (self.n or 1) and logprobs is None:
            logprobs = 0  # by which the best are chosen
        if (structure := self.structure) is not None:
            fields["grammar"] = structure[1]
        return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, **fields)


_SAMPLING_FIELDS = sorted(set(SamplingParams.__struct_fields__) & set(GenerationRequest.model_fields))
_SAMPLING_FIELDS.remove("max_tokens")
_SAMPLING_FIELDS.remove("logit_bias")
_SAMPLING_FIELDS.remove("n")


class CompletionRequest(GenerationRequest, SuffixField):
    """The body of POST /v1/completions."""

    prompt: Text | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)] = Field(
        description="A text, its token ids, or a list of either."
    )
    logprobs: int | None = Field(
        None, description="How many of the likeliest tokens to return with each token, 0 to 20."
    )
    echo: bool | None = Field(
        None, description="Repeat the prompt before each answer; with max_tokens 0 it is all."
    )

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or its token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]

    def params(self, default: int = DEFAULT_COMPLETION_TOKENS) -> SamplingParams:
        """Returns the sampling parameters of all n answers to each prompt, of `default` tokens at most if the
        request does not say. Raises InvalidParams."""
        refuse_unsupported(self.model_extra or {}, unsupported_fields.COMPLETIONS)
        self.check_suffix(self.prompts, self.truncate_prompt_tokens)
        max_tokens = 1 if self.answers_nothing else self.given_max_tokens(default)
        params = self.sampling_params(max_tokens, self.logprobs)
        if not self.echoes_logprobs:
            return params
        if self.stream and params.n > 1:
            raise InvalidParams("echo", self.echo, "it without logprobs in a stream of several answers")
        assert self.logprobs is not None
        return replace(params, prompt_logprobs=max(self.prompt_logprobs or 0, self.logprobs))

    @property
    def answers_nothing(self) -> bool:
        """Whether the answer is the prompt alone: `echo` with a `max_tokens` of 0."""
        return bool(self.echo) and self.given_max_tokens(1) == 0 and not self.use_beam_search

    @property
    def echoes_logprobs(self) -> bool:
        """Whether the log-probabilities of the prompt stand before those of the answer."""
        return bool(self.echo) and self.logprobs is not None


class TextPart(BaseModel):
    """A part of a message's content."""

    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: Text


def _only_text(content: Any) -> Any:
    """Raises PydanticCustomError for a part of a content that is an image or the like."""
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            said = "a part of type {kind}, and this service takes text only; send parts of type text"
            raise PydanticCustomError("text_only", said, {"kind": kind[:100]})
    return content


class ChatMessage(BaseModel):
    """One message of a chat. Further fields (name, tool_calls …) go unchanged to the chat template, but fields
    that no template supports are refused."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Annotated[
        Text | Annotated[list[TextPart], Field(fail_fast=True)] | None, BeforeValidator(_only_text)
    ] = None

    def plain(self) -> dict[str, Any]:
        """Returns the message as chat templates expect it, with one text as its content. Raises
        InvalidParams."""
        refuse_unsupported(self.model_extra or {}, unsupported_fields.MESSAGES)
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content or ())
        return {**(self.model_extra or {}), "role": self.role, "content": content}


Messages = Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1)]


class ChatRequest(ToolFields, GenerationRequest, TemplateFields):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: int | None = Field(
        None,
        description="How many of the likeliest tokens to return with each token, 0 to 20; needs logprobs.",
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the model's chat template, by name."
    )

    def params(self, max_tokens_left: int) -> SamplingParams:
        """Returns the sampling parameters of all n answers. Raises InvalidParams.

        `max_tokens_left`: the most tokens of an answer if the request does not say.
        """
        refuse_unsupported(self.model_extra or {}, unsupported_fields.CHAT)
        if self.top_logprobs and not self.logprobs:
            raise InvalidParams("top_logprobs", self.top_logprobs, "it together with logprobs: true")
        if not 0 <= (self.top_logprobs or 0) <= MAX_LOGPROBS:
            raise InvalidParams("top_logprobs", self.top_logprobs, f"0 to {MAX_LOGPROBS}")
        max_tokens = self.given_max_tokens(max_tokens_left)
        return self.sampling_params(max_tokens, (self.top_logprobs or 0) if self.logprobs else None)


class TokenizeRequest(ToolFields, RequestBody, TemplateFields):
    """The body of POST /tokenize, with either a prompt or the messages of a chat."""

    model_config = ConfigDict(extra="allow")

    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        None, description="On by default for a prompt, and off for a chat."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables of the chat template, as in a chat completion."
    )
    return_token_strs: bool | None = None


class DetokenizeRequest(RequestBody):
    """The body of POST /detokenize."""

    tokens: Annotated[list[Annotated[int, Field(ge=0, le=2**31 - 1)]], Field(fail_fast=True)]


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    """Token counts. A prompt counts once, however many answers it has. The details are null unless the service
    reports cached tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None


FinishReason = Literal["stop", "length", "tool_calls", "function_call"]


class CompletionLogprobs(TypedDict):
    """Lists with one entry for each token; that of a prompt's first token is null. `text_offset`: where
    the token begins in the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[PromptTokens | None] | None]


class CompletionBody(TypedDict):
    """The body of a whole answer, and of each chunk of a stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]


class AssistantMessage(TypedDict):
    """`content` is null if there are only calls or reasoning, which has two names, as other servers have."""

    role: Literal["assistant"]
    content: str | None
    reasoning_content: NotRequired[str]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    function_call: NotRequired[CalledFunction]


class ChatChoice(TypedDict):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatBody(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    prompt_logprobs: NotRequired[list[PromptTokens | None] | None]


class Delta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    reasoning: str
    tool_calls: list[ToolCallDelta]
    function_call: CalledFunctionDelta


class ChunkChoice(TypedDict):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: NotRequired[list[int]]


class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


def _by_token(logit_bias: dict[str, Any]) -> dict[int, Any]:
    """Converts the keys, which are strings in JSON, to token ids. Raises InvalidParams for other keys."""
    by_token = {}
    for key, bias in logit_bias.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10):
            raise InvalidParams("logit_bias", key, "token ids, as strings, to numbers")
        by_token[int(key)] = bias
    return by_token
