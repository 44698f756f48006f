"""The sampling parameters of one request: the fields, their defaults and their allowed ranges."""

import copy
import enum
import functools
import reprlib
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from lightkv.errors import LightKVError
from lightkv.token_set import MAX_TOKEN_ID, TokenSet

from .config import declared

MAX_COUNT = 2**31 - 1  # of tokens and of top_k, which are int32 on the device
MAX_TEMPERATURE = 3.4028234663852886e38  # the largest float32, so that every finite temperature is allowed
MIN_TEMPERATURE = 1e-5  # below this a row is greedy: the rounding of the logits would decide
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100.0  # beyond, logits overflow float32
MAX_LOGIT_BIAS = 512
MAX_LOGPROBS = 20
# What a model's generation_config.json may say of sampling; `do_sample` and the rest of it are not read.
RECOMMENDED = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
MAX_BAD_WORDS = 128  # sequences of several tokens that a request bans; single tokens are not limited
MAX_BAD_WORD_TOKENS = 16
MAX_BAD_TEXTS, MAX_BAD_TEXT_CHARS = 1024, 256
MAX_N = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 128
GRAMMAR_KINDS = ("json_object", "json_schema", "regex", "choice", "lark", "structural_tag")
MAX_GRAMMAR_BYTES = 256 * 2**10
# How many tokens min_tokens can hold back: the stop tokens, and the model's own end tokens.
MAX_END_IDS = MAX_STOP_TOKEN_IDS + 32
_MIN_INT64, _MAX_INT64 = -(2**63), 2**63 - 1
# 2^64 divided by the golden ratio, made odd: its multiples are far apart modulo 2^64.
_CHILD_STRIDE = 0x9E3779B97F4A7C15
_NO_TOKENS = TokenSet()

Flag = Annotated[bool, Meta(title="true or false")]
TokenId = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Biases = Annotated[
    dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]],
    Meta(max_length=MAX_LOGIT_BIAS, title=f"at most {MAX_LOGIT_BIAS} token ids to numbers from -100 to 100"),
]
_StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[
    _StopString | Annotated[Sequence[_StopString], Meta(max_length=MAX_STOPS)],
    Meta(title=f"a string of 1 to {MAX_STOP_CHARS} characters, or at most {MAX_STOPS} of them"),
]
StopIds = Annotated[
    Sequence[TokenId], Meta(max_length=MAX_STOP_TOKEN_IDS, title=f"at most {MAX_STOP_TOKEN_IDS} token ids")
]
BadWords = Annotated[
    Sequence[Annotated[str, Meta(min_length=1, max_length=MAX_BAD_TEXT_CHARS)]],
    Meta(
        max_length=MAX_BAD_TEXTS,
        title=f"{MAX_BAD_TEXTS} texts of up to {MAX_BAD_TEXT_CHARS} characters at most",
    ),
]
# A word counts once for each way in which it is written in tokens.
BadWordsIds = Annotated[
    Sequence[Annotated[Sequence[TokenId], Meta(min_length=1, max_length=MAX_BAD_WORD_TOKENS)]],
    Meta(
        max_length=MAX_BAD_WORDS,
        title=f"{MAX_BAD_WORDS} words of up to {MAX_BAD_WORD_TOKENS} tokens at most",
    ),
]


class InvalidParams(LightKVError, ValueError):
    """A sampling parameter is outside its range. The request was not queued."""

    def __init__(self, field: str, value: object, allowed: str) -> None:
        self.field = field
        self.value = value
        self.allowed = allowed
        super().__init__(f"{field} is {reprlib.repr(value)}; give {allowed}")


class SamplerKind(enum.IntEnum):
    """How much of the sampler a row needs. A batch is sampled at the highest kind among its rows.

    A row's token is the same at its own kind and at every higher one.
    """

    GREEDY = 0  # the argmax of the model's logits
    RANDOM = 1  # temperature, min_p, top-k and top-p
    EDITED = 2  # also logit bias, penalties, log-probabilities and min_tokens


class Grammar(msgspec.Struct, frozen=True):
    """What a text has to be, from its first token to its end.

    `kind`: "json_object" (any object; `text` is empty), "json_schema", "regex", "choice" (a JSON array of
    texts), "lark" (an EBNF grammar in Lark's form, or with ::= in GBNF) or "structural_tag" (JSON, see
    docs/api.md). `text`: the grammar.
    """

    kind: str
    text: str = ""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How one request is sampled, and where its text ends. The fields are checked on creation and decoding.

    max_tokens: the most tokens to generate.
    min_tokens: no end token, stop token or stop string ends the answer before it has this many tokens.
    temperature: the logits are divided by it; 0 (or below 1e-5) is greedy.
    top_k: sample from the k likeliest tokens, and those as likely as the k-th; 0 or -1 is all tokens.
    top_p: sample from the smallest set of likeliest tokens whose probabilities sum to at least top_p.
    min_p: sample from the tokens that are at least min_p times as likely as the likeliest.
    repetition_penalty: divides the positive logits (and multiplies the negative ones) of tokens that occur in
        the prompt or the output.
    presence_penalty: subtracted once from the logits of tokens that occur in the output.
    frequency_penalty: subtracted from the logits of tokens for each time that they occur in the output.
    logit_bias: maps a token id to what is added to its logit.
    allowed_token_ids: only these tokens are sampled; None allows all. A list becomes a TokenSet.
    bad_words: texts that the answer may not have. The engine knows only their tokens: `LLM` and the service
        turn them into `bad_words_ids` (`lightkv.router.text.banned_words`).
    bad_words_ids: sequences of token ids that are never completed. The last token of one is not sampled where
        the tokens before it are the last of prompt and output. Sequences of one token become members of
        `banned_token_ids`.
    banned_token_ids: tokens that are never sampled. A list becomes a TokenSet.
    logprobs: how many of the likeliest tokens are returned with each token, under the model's own distribution.
        The token's own log-probability is returned with them, also at 0. None returns neither.
    prompt_logprobs: as logprobs, for the tokens of the prompt but its first. The request computes its whole
        prompt then: it takes nothing from the cache, and leaves nothing there.
    skip_reading_prefix_cache: the request takes nothing from the cache, and leaves nothing there.
    seed: makes the random numbers, and so the tokens, repeatable; None draws a seed.
    n: the number of answers.
    stop: one string, or several, that end the text (see `stops`).
    stop_token_ids: tokens that end the text.
    ignore_eos: the model's own end tokens do not end the text.
    include_stop_str_in_output: the stop string that ended the text is part of it.
    skip_special_tokens: special tokens are left out of the text.
    grammar: what the text has to be; None leaves it free.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_COUNT)] = 256
    min_tokens: int = 0
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE, description="0 is greedy")] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT, description="0 and -1 are all tokens")] = 0
    top_p: Annotated[float, Meta(gt=0, le=1, description="1 keeps all tokens")] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    logit_bias: Biases = {}  # msgspec makes a new one for each object
    allowed_token_ids: TokenSet | Sequence[int] | None = None
    bad_words: BadWords = ()
    bad_words_ids: BadWordsIds = ()
    banned_token_ids: TokenSet | Sequence[int] = _NO_TOKENS
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    skip_reading_prefix_cache: Flag = False
    seed: Annotated[int, Meta(ge=_MIN_INT64, le=_MAX_INT64)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] = 1
    stop: Stops = ()
    stop_token_ids: StopIds = ()
    ignore_eos: Flag = False
    include_stop_str_in_output: Flag = False
    skip_special_tokens: Flag = True
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        self._make_token_sets()
        self.validate()
        # Lists become tuples, so that equal parameters compare as equal, also after encoding and decoding.
        msgspec.structs.force_setattr(self, "stop", self.stops)
        msgspec.structs.force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids))
        msgspec.structs.force_setattr(self, "bad_words", tuple(self.bad_words))
        msgspec.structs.force_setattr(self, "bad_words_ids", tuple(map(tuple, self.bad_words_ids)))

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings, as a tuple also if `stop` is one string."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is chosen, without a random number."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def penalised(self) -> bool:
        """Whether logits depend on the tokens seen so far."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def bans_tokens(self) -> bool:
        """Whether some tokens are never sampled, or not after others."""
        return self.allowed_token_ids is not None or bool(self.bad_words_ids or self.banned_token_ids)

    @property
    def allowed(self) -> TokenSet | None:
        """The set `allowed_token_ids`."""
        assert not isinstance(self.allowed_token_ids, Sequence)
        return self.allowed_token_ids

    @property
    def banned(self) -> TokenSet:
        """The set `banned_token_ids`."""
        assert isinstance(self.banned_token_ids, TokenSet)
        return self.banned_token_ids

    @property
    def kind(self) -> SamplerKind:
        """The lowest kind that can sample this request. top-k, top-p and min-p never change an argmax."""
        edited = self.penalised or self.logit_bias or self.bans_tokens
        if edited or self.logprobs is not None or self.min_tokens:
            return SamplerKind.EDITED
        return SamplerKind.GREEDY if self.greedy else SamplerKind.RANDOM

    def completed(self, max_tokens: int, grammar: Grammar | None) -> "SamplingParams":
        """Returns these parameters with what follows from the prompt: its room for tokens, and what the text
        has to be with the tools that it may call. Only these are checked. Raises InvalidParams."""
        copied = copy.copy(self)
        msgspec.structs.force_setattr(copied, "max_tokens", max_tokens)
        msgspec.structs.force_setattr(copied, "grammar", grammar)
        check_ranges(copied, "max_tokens")
        copied._validate_length()
        copied._validate_grammar()
        return copied

    @property
    def of_others(self) -> "SamplingParams":
        """The parameters of the other answers to a prompt whose first answer has these: the first alone
        computes the log-probabilities of the prompt."""
        if self.prompt_logprobs is None:
            return self
        return msgspec.structs.replace(self, prompt_logprobs=None)

    def child_seed(self, child_idx: int) -> int | None:
        """Returns the seed of answer `child_idx` of n, None where none was given. The first answer keeps the
        seed of its request, so that it is the one of the same request with n = 1."""
        if self.seed is None:
            return None
        return (self.seed + child_idx * _CHILD_STRIDE - _MIN_INT64) % 2**64 + _MIN_INT64

    def validate(self, vocab_size: int | None = None) -> None:
        """Raises InvalidParams for the first field out of range. Token ids have to be below `vocab_size`."""
        check_ranges(self)
        self._validate_length()
        self._validate_tokens(MAX_COUNT + 1 if vocab_size is None else vocab_size)
        self._validate_grammar()

    def _validate_length(self) -> None:
        if type(self.min_tokens) is not int or not 0 <= self.min_tokens <= self.max_tokens:
            allowed = f"an integer from 0 to max_tokens, which is {self.max_tokens}"
            raise InvalidParams("min_tokens", self.min_tokens, allowed)

    def _validate_tokens(self, vocab_size: int) -> None:
        named = [("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)]
        named += [("bad_words_ids", ids) for ids in self.bad_words_ids]
        highest = [(field, max(ids)) for field, ids in named if ids]
        allowed, banned = self.allowed, self.banned
        has_bans = banned is not _NO_TOKENS
        if has_bans:
            highest.append(("bad_words_ids", banned.highest))
        if allowed is not None:
            highest.append(("allowed_token_ids", allowed.highest))
        for field, token in highest:
            if token >= vocab_size:
                raise InvalidParams(field, token, f"token ids from 0 to {vocab_size - 1}")
        if allowed is None and has_bans and len(banned) >= vocab_size:
            words = "words that leave a token to sample"
            raise InvalidParams("bad_words", f"all {vocab_size} tokens", words)
        if allowed is not None and not allowed.without(banned):
            left = "at least one token that bad_words does not ban"
            raise InvalidParams("allowed_token_ids", allowed, left)

    def _make_token_sets(self) -> None:
        """Turns lists of token ids into sets, in which a decoded object has them. Raises InvalidParams."""
        allowed = self.allowed_token_ids
        if allowed is not None and not isinstance(allowed, TokenSet):
            allowed = _token_set("allowed_token_ids", allowed)
            msgspec.structs.force_setattr(self, "allowed_token_ids", allowed)
        if allowed is not None and not allowed:
            raise InvalidParams("allowed_token_ids", (), "None, or a list of at least one token id")
        banned = self.banned_token_ids
        if not isinstance(banned, TokenSet):
            banned = _token_set("banned_token_ids", banned)
        words = self.bad_words_ids
        if isinstance(words, (tuple, list)):
            single = [ids[0] for ids in words if isinstance(ids, (tuple, list)) and len(ids) == 1]
            if single:
                banned |= _token_set("bad_words_ids", single)
                words = [ids for ids in words if not isinstance(ids, (tuple, list)) or len(ids) != 1]
                msgspec.structs.force_setattr(self, "bad_words_ids", words)
        if banned is not _NO_TOKENS:  # defaults are not sent, and are known by their identity
            msgspec.structs.force_setattr(self, "banned_token_ids", banned or _NO_TOKENS)

    def _validate_grammar(self) -> None:
        grammar = self.grammar
        if grammar is None:
            return
        if grammar.kind not in GRAMMAR_KINDS:
            raise InvalidParams("grammar", grammar, f"one of the kinds {', '.join(GRAMMAR_KINDS)}")
        num_bytes = len(grammar.text.encode("utf-8", "surrogatepass"))
        if num_bytes > MAX_GRAMMAR_BYTES:
            allowed = f"one of at most {MAX_GRAMMAR_BYTES} bytes; this one has {num_bytes}"
            raise InvalidParams("grammar", grammar.text, allowed)
        if self.ignore_eos:
            raise InvalidParams("ignore_eos", True, "false with a grammar, which says where the text ends")


def check_ranges(params: Any, *names: str) -> None:
    """Raises InvalidParams for the first of these fields, by default of all with a range, whose value is no
    number or outside the range."""
    fields, defaults = declared(params.__class__), _defaults(params.__class__)
    for name in names or fields:
        allowed, value = fields[name], getattr(params, name)
        if allowed.meta is not None and value is not defaults[name]:
            try:  # as `Allowed.takes`, written out: each request passes here, and its way is short
                msgspec.convert(value, allowed.hint)
            except msgspec.ValidationError:
                raise InvalidParams(name, value, allowed.words) from None


@functools.cache
def _defaults(owner: type) -> dict[str, Any]:
    return {field.name: field.default for field in msgspec.structs.fields(owner)}


def _token_set(field: str, token_ids: object) -> TokenSet:
    if not isinstance(token_ids, (tuple, list)):
        raise InvalidParams(field, token_ids, "a list of token ids")
    if not set(map(type, token_ids)) <= {int}:
        raise InvalidParams(field, token_ids, "integers")
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= MAX_TOKEN_ID:  # before they become int64
        raise InvalidParams(field, token_ids, f"token ids from 0 to {MAX_TOKEN_ID}")
    return TokenSet.of(token_ids)
