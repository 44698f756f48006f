"""A request: one prompt, its completion so far, and where it stands in the scheduler's queues."""

import math
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import numpy as np

from lightkv.errors import LightKVError
from lightkv.layer_groups import ONE_GROUP, LayerGroups
from lightkv.ledger import Sequence, Session
from lightkv.ledger.prefix_tree import TOKEN_BYTES, Namespace
from lightkv.router.sampling_params import MAX_END_IDS, InvalidParams, SamplerKind, SamplingParams

from .step import Limits, PromptLogprobs, ScoredChunk

_REMEDIES = {
    "context": "start with a longer --max-model-len",
    "pool": "start with a larger --max-total-tokens",
}
MAX_SCORES = 4_000_000  # log-probabilities of one prompt, which travel in one message


class NeverFits(LightKVError):
    """The request could not run even if it were alone: it is longer than the context, or its prompt than the
    pool. `limit`: the tokens of the context, or those of one request that fit the pool."""

    def __init__(
        self, prompt: int, max_tokens: int, limit: int, what: Literal["context", "pool"] = "context"
    ) -> None:
        self.prompt = prompt
        self.max_tokens = max_tokens
        self.limit = limit
        longest = limit if what == "context" else limit + 1  # the last token needs no slot
        remedy = _REMEDIES[what]
        super().__init__(
            f"{prompt} prompt tokens and up to {max_tokens} new ones do not fit the {what} of {limit} tokens: "
            f"{maximum_length(longest)}; shorten the prompt, lower max_tokens, or {remedy}"
        )


def maximum_length(num_tokens: int) -> str:
    """Returns the words by which clients (litellm, crewai, dspy) recognise that a request is too long."""
    return f"this model's maximum context length is {num_tokens} tokens"


class InvalidPrompt(LightKVError, ValueError):
    """The prompt is empty, or has token ids that the model does not have."""


@dataclass(slots=True, eq=False, repr=False)
class Request:
    """One prompt on its way to one completion.

    Before it decodes, a request computes its prefill: the prompt and, after a preemption, the output so far.

    Attributes:
        prompt_ids, prefill_ids: int32 bytes.
        seed: with the position, all that the request's random numbers depend on.
        stop_ids: sampling one of these tokens ends the request.
        priority: requests with a lower one are admitted sooner.
        session: protects the tokens that the request leaves in the cache.
        states_length: whether its client stated `max_tokens`; else this is only the most that may come.
        grammar: the id of the compiled grammar of the answer; None leaves it free. `params` has none.
        shows_answer: whether its client gets the answer. Else one token is computed, which needs no room in the
            context.
        boundary: how many tokens of its prompt the next turn of its chat begins with, too; 0 if that is not
            known. What cannot be cut at each token is kept there.
        expected: the output tokens that admission counts the request with, up to `max_tokens`.
        can_be_guaranteed: whether it becomes guaranteed, at once or later; the scheduler sets it.
        is_guaranteed: whether it runs and is never preempted. A request that runs and is not is provisional.
        ticket: the number of its place in the queue, while it waits.
        rank: the place in the queue by priority and time, which the queue sets.
        chunk_step: the newest step that computes a part of the prefill.
        finish_reason: None while the request lives, then "stop", "length", "abort", "invalid" or "error".
    """

    id: str
    prompt_ids: bytes
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int] = frozenset()
    namespace: Namespace = ()
    priority: int = 0
    session: Session | None = None
    states_length: bool = True
    grammar: int | None = None
    shows_answer: bool = True
    boundary: int = 0

    num_prompt: int = field(init=False)
    prefill_ids: bytes = field(init=False)
    num_prefill_tokens: int = field(init=False)
    kind: SamplerKind = field(init=False)  # `kind` and `max_tokens` are read in every step
    max_tokens: int = field(init=False)
    expected: int = field(init=False)
    # A prompt whose log-probabilities are asked for is computed in full, so it shares nothing.
    is_scored: bool = field(init=False)
    is_apart: bool = field(init=False)
    # Does another answer to its prompt begin with this one?
    is_repeated: bool = field(default=False, init=False)
    cached: bool = field(init=False)  # do the request's tokens stay in the cache once it has ended?
    can_be_guaranteed: bool = field(default=False, init=False)
    is_guaranteed: bool = field(default=False, init=False)
    ticket: int | None = field(default=None, init=False)
    arrival: int = field(default=0, init=False)  # its number in the order of arrival; the scheduler sets it
    rank: float = field(init=False)
    # `order` of the head of the queue when the request was admitted; it may have passed the head.
    place: tuple[float, bool, int] = field(default=(0.0, False, 0), init=False)
    # When the request came, in seconds; if it is infinite, the scheduler sets it.
    queued: float = field(default=math.inf, init=False)
    waited: float = field(default=0.0, init=False)  # seconds in the queue until it was first admitted
    is_late: bool = field(default=False, init=False)  # has it waited for so long that others go first?
    output: array = field(default_factory=lambda: array("i"), init=False)
    # What steps in flight sampled after its end, and the next one may have read; and whether this is all of it.
    unseen: array = field(default_factory=lambda: array("i"), init=False)
    is_traced: bool = field(default=True, init=False)
    sequence: Sequence | None = field(default=None, init=False)
    num_hit: int = field(default=0, init=False)  # tokens of the prompt found in the cache
    num_preemptions: int = field(default=0, init=False)
    num_computed: int = field(default=0, init=False)  # tokens computed when it was last preempted
    finish_reason: str | None = field(default=None, init=False)
    # Tokens of the prompt with log-probabilities in planned steps; the first has none.
    num_scored: int = field(default=1, init=False)
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list, init=False)  # in the prompt's order
    chunk_step: int = field(default=-1, init=False)
    # Where short prompts pass long ones, the queue sets these: the tokens of the prefill that were not cached
    # when the request was queued, and the tokens of others that may still pass it while it is the head.
    num_new: int = field(default=0, init=False)
    lets_pass: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.num_prompt = self.num_prefill_tokens = len(self.prompt_ids) // TOKEN_BYTES
        self.prefill_ids, self.rank = self.prompt_ids, self.priority
        self.kind, self.max_tokens = self.params.kind, self.params.max_tokens
        self.expected = self.max_tokens
        self.is_scored = self.params.prompt_logprobs is not None
        self.is_apart = self.is_scored or self.params.skip_reading_prefix_cache
        self.cached = not self.is_apart
        if self.is_apart:
            self.namespace, self.session = (*self.namespace, object()), None

    def validate(self, limits: Limits, capacity: int, groups: LayerGroups = ONE_GROUP) -> None:
        """Checks that the request can run in a pool of `capacity` slots, of a model with these layer groups.

        Raises NeverFits, InvalidPrompt, InvalidParams.
        """
        self.params.validate(limits.vocab_size)
        if self.params.bad_words:
            allowed = "their token ids in bad_words_ids; an engine has no tokenizer"
            raise InvalidParams("bad_words", self.params.bad_words, allowed)
        if self.params.grammar is not None:
            allowed = "the id of a compiled one in Request.grammar; an engine compiles none"
            raise InvalidParams("grammar", self.params.grammar.kind, allowed)
        if self.params.min_tokens and len(self.stop_ids) > MAX_END_IDS:
            allowed = f"0 where {len(self.stop_ids)} tokens end the answer; {MAX_END_IDS} can be held back"
            raise InvalidParams("min_tokens", self.params.min_tokens, allowed)
        ids = np.frombuffer(self.prompt_ids, np.int32)
        if not len(ids):
            raise InvalidPrompt("the prompt is empty; give at least one token")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= limits.vocab_size:
            raise InvalidPrompt(
                f"the prompt has token ids from {low} to {high}; "
                f"the model's go from 0 to {limits.vocab_size - 1}"
            )
        num_top = self.params.prompt_logprobs
        if num_top is not None and (num_top + 1) * self.num_prompt > MAX_SCORES:
            allowed = (
                f"fewer for {self.num_prompt} tokens, or shorten the prompt: at most {MAX_SCORES} in all"
            )
            raise InvalidParams("prompt_logprobs", num_top, allowed)
        prompt, shown = self.num_prompt, self.max_tokens if self.shows_answer else 0
        if prompt + shown > limits.max_model_len:
            raise NeverFits(prompt, shown, limits.max_model_len)
        if prompt > (longest := groups.longest(capacity, limits.prefill_budget)):
            raise NeverFits(prompt, 1, longest, "pool")

    def cut(self, longest: int) -> bool:
        """Lowers `max_tokens` to what the pool can hold: `longest` tokens of one request, and the last one,
        whose K/V is never written. Returns whether it was more."""
        is_more = self.longest > longest
        if is_more:
            self.max_tokens = self.expected = longest + 1 - self.num_prompt
            self.params = msgspec.structs.replace(self.params, max_tokens=self.max_tokens)
        return is_more

    @property
    def open_sequence(self) -> Sequence:
        """The sequence of a request that holds tokens."""
        assert self.sequence is not None
        return self.sequence

    @property
    def final(self) -> int:
        """The tokens that the request is expected to have written in the end."""
        return self.num_prompt + self.expected - 1

    @property
    def longest(self) -> int:
        """The tokens that the request has written in the end if it reaches its limit."""
        return self.num_prompt + self.max_tokens - 1

    @property
    def remaining(self) -> int:
        """The tokens that a running request is expected to write from now on."""
        return self.final - self.open_sequence.length

    @property
    def num_prefill_left(self) -> int:
        """The tokens of a running request's prefill that no planned step computes."""
        return self.num_prefill_tokens - self.open_sequence.length

    @property
    def num_prefill_new(self) -> int:
        """The tokens of a running request's prefill that were not found in the cache."""
        return self.num_prefill_tokens - self.open_sequence.num_hit

    @property
    def newest_step(self) -> int:
        """The newest step that a running request is in. Once its prefill is computed, it takes a token in each
        step until its end."""
        return self.chunk_step + max(self.open_sequence.length - self.num_prefill_tokens, 0)

    @property
    def order(self) -> tuple[float, bool, int]:
        """The request's place in the queue: the lowest is admitted first."""
        return self.rank, self.is_late, self.arrival

    @property
    def seniority(self) -> tuple[float, int]:
        """The request's place among the running ones: the lowest is guaranteed first, the highest preempted
        first. Unlike `order` it stays the same while the request waits."""
        return self.rank, self.arrival

    @property
    def keep_at(self) -> tuple[int, ...]:
        """The places in its prompt, if it has a boundary, at which what windows and states see is kept for
        others: the boundary and, for further answers to the prompt, its end."""
        if not self.boundary:
            return ()
        return (self.boundary, self.num_prompt - 1) if self.is_repeated else (self.boundary,)

    def tail_ids(self) -> bytes:
        """Returns what was generated since the prefill and can be cached, int32 bytes: also what the steps in
        flight read after its end, which a state cannot take back."""
        # An end token that min_tokens or a ban ruled out was set on the host, because a grammar had ended: a
        # step in flight may have computed another token in its place.
        params = self.params
        is_ruled_out = len(self.output) <= params.min_tokens or params.bans_tokens
        is_forced = self.grammar is not None and self.finish_reason == "stop" and is_ruled_out
        end = len(self.output) - is_forced
        ids = self.output[self.num_prefill_tokens - self.num_prompt : end]
        if self.grammar is None and self.is_traced:
            ids += self.unseen
        return ids.tobytes()

    def score(self, part: int, start: int, num_tokens: int) -> ScoredChunk | None:
        """Notes that a step computes the positions [start, start + num_tokens) of the prefill as part `part` of
        its batch. Returns the tokens that it scores; None if there are none."""
        first, end = max(start + 1, self.num_scored), min(start + num_tokens + 1, self.num_prompt)
        if not self.is_scored or first >= end:
            return None
        self.num_scored = end
        targets = self.prompt_ids[first * TOKEN_BYTES : end * TOKEN_BYTES]
        return ScoredChunk(part, first - 1 - start, targets, self.params.prompt_logprobs or 0)

    def take_scores(self) -> PromptLogprobs | None:
        """Returns the log-probabilities of the whole prompt, and forgets them; None if it asks for none."""
        found, self.prompt_logprobs = self.prompt_logprobs, []
        return PromptLogprobs.joined(found) if self.is_scored else None

    def preempt(self) -> None:
        """Notes that the request's sequence was closed: its next one begins with what was generated so far."""
        self.num_computed = self.open_sequence.length
        self.sequence = None
        self.num_preemptions += 1
        self.expected = self.max_tokens  # its estimate no longer stands
        self.prefill_ids = self.prompt_ids + self.output.tobytes()
        self.num_prefill_tokens = self.num_prompt + len(self.output)


def take_all(
    requests: Iterable[Request], limits: Limits, capacity: int, groups: LayerGroups = ONE_GROUP
) -> int:
    """Checks requests as `Request.validate` does, and then lowers limits that the pool can never hold.
    Returns how many. Answers that share their prompt and parameters are checked once."""
    requests, checked = list(requests), None
    num_answers = Counter([id(request.prompt_ids) for request in requests])
    for request in requests:
        request.is_repeated = num_answers[id(request.prompt_ids)] > 1
        shared = (request.prompt_ids, request.params, request.stop_ids)
        if checked is None or any(one is not other for one, other in zip(shared, checked, strict=True)):
            request.validate(limits, capacity, groups)
            checked = shared
    longest = groups.longest(capacity, limits.prefill_budget)
    return sum([request.cut(longest) for request in requests])
