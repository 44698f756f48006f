"""The bodies of answers as types, which pydantic documents and msgspec encodes."""

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class PromptToken(TypedDict):
    """A token in the place of one of the prompt's. `rank`: 1 for the likeliest."""

    logprob: float
    rank: int
    decoded_token: str


PromptTokens = dict[str, PromptToken]  # by token id: the prompt's own token first, and then the likeliest


class CalledFunction(TypedDict):
    """`arguments`: JSON, as the model wrote it; it may be incomplete if the answer reached max_tokens."""

    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledFunctionDelta(TypedDict, total=False):
    name: str
    arguments: str


class ToolCallDelta(TypedDict):
    """The first delta of a call has its id, type and name, the others more of its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: CalledFunctionDelta


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    """Token counts. A prompt counts once, however many answers it has. The details are null unless the service
    reports cached tokens. `interruptions`: how often answers were interrupted, if any was. `max_tokens`: what
    the request's own was cut to, if the pool cannot hold as many."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    interruptions: NotRequired[int]
    max_tokens: NotRequired[int]


FinishReason = Literal["stop", "length", "tool_calls"]


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
    interruptions: NotRequired[int]


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
    interruptions: NotRequired[int]
    prompt_token_ids: NotRequired[list[int]]
