"""The answers to one HTTP request: they are submitted to the router together, grow with its events, and are
closed together."""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from lightkv.errors import LightKVError
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.router.api.metrics import ServiceMetrics
from lightkv.router.engine.step import TokenEvent
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.service.messages import NewAnswer, NewPrompt, Submit
from lightkv.router.service.router_client import AnswerStream, RouterClient
from lightkv.router.text.completion import NEW_TEXT, AnswerForm, AnswerPlan, Completion
from lightkv.router.text.tokenizer import Tokenizer
from lightkv.router.text.tool_calls.source import Part

from .pieces import Object, Scores
from .sessions import OpenSessions, SessionUse

Result = TypeVar("Result")

INLINE_CHARS = 4096  # so many characters become tokens in about a millisecond, without a thread


class GenerationFailed(LightKVError):
    """A step of this answer failed in the model. The service continues; the same request may fail again."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the model failed in this answer ({reason}); the same request may fail again")


class GenerationInvalid(GenerationFailed):
    """The text of an answer could not go on as its grammar says. The same request would fail again."""

    def __init__(self, reason: str) -> None:
        LightKVError.__init__(self, f"the answer could not be completed: {reason}")


class GenerationLost(LightKVError):
    """The service lost an unfinished answer, because one of its processes died or it is shutting down."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the answer was lost ({reason}); try again")


_FAILURES: dict[str, Callable[[str], LightKVError]] = {
    "invalid": GenerationInvalid,
    "error": GenerationFailed,
    "lost": GenerationLost,
    "abort": GenerationLost,
}


class AnswerClock:
    """Measures the times and tokens of one answer, which it also adds to the metrics, from its beginning to
    `finish`.

    `num_prompt`, `max_tokens`: the tokens of its prompt, and the most that it may have. `begun`, `first`,
    `ended`: monotonic times of its begin, its first token and its end; None until then. `waited`: the seconds
    that it was queued, once it has a token.
    """

    def __init__(self, metrics: ServiceMetrics, num_prompt: int, max_tokens: int) -> None:
        self._metrics = metrics
        self._num_prompt = num_prompt
        self._max_tokens = max_tokens
        self._num_tokens = 0
        self.begun = time.monotonic()
        self.first: float | None = None
        self.ended: float | None = None
        self.waited: float | None = None
        self._last = self.begun

    def token(self) -> None:
        """Notes the arrival of a token. Of tokens that arrive together, the first ends an interval and the
        others have intervals of nearly 0."""
        now = time.monotonic()
        self._num_tokens += 1
        if self.first is None:
            self.first = now
            self._metrics.ttft.observe(now - self.begun)
        else:
            self._metrics.inter_token.observe(now - self._last)
        self._last = now

    def finish(self, reason: str) -> None:
        """Notes the end of the answer. `reason`: "stop", "length", "abort", "invalid", "error" or "lost"."""
        metrics = self._metrics
        self.ended = time.monotonic()
        metrics.e2e.observe(self.ended - self.begun)
        metrics.prompt_tokens.observe(self._num_prompt)
        metrics.generation_tokens.observe(self._num_tokens)
        metrics.max_tokens.observe(self._max_tokens)
        if self.first is not None:
            waited = min(self.waited or 0.0, self.first - self.begun)
            metrics.queue.observe(waited)
            metrics.prefill.observe(self.first - self.begun - waited)
            metrics.decode.observe(self._last - self.first)
        metrics.finished.labels(metrics.model, reason).inc()


@dataclass(frozen=True)
class GenerationSpec:
    """The generation that one HTTP request asks for: `params.n` answers to each of `prompts` (int32 bytes).

    `session`: the one that protects the tokens of prompts and answers in the cache. `states_length`: whether
    the client stated max_tokens. `shows_answer`: if not, the one token that a prompt is answered with is
    dropped. `form`: how its tokens become an answer. `cut_to`: what `params.max_tokens` is cut to, if the pool
    cannot hold as many. `grammar_field`: the field that `params.grammar` came in. `grammar_bytes`: what it
    takes when it is compiled. `grammar_owner`: what stands for the client. `boundary`: as of `NewPrompt`.
    `key`: the name of the client's API key.
    """

    prompts: list[bytes]
    params: SamplingParams
    priority: int = 0
    namespace: tuple[str, ...] = ()
    session: SessionUse | None = None
    states_length: bool = True
    shows_answer: bool = True
    form: AnswerForm = NEW_TEXT
    cut_to: int | None = None
    grammar_field: str = "grammar"
    grammar_bytes: int = 0
    grammar_owner: bytes = b""
    boundary: int = 0
    key: str | None = None


@dataclass
class Answer:
    """One answer while it grows.

    `index`: its number among the answers of the HTTP request. `scored`: the tokens of its text with their
    log-probabilities, if it `has_logprobs` (a stop token does not belong to the text). `num_cached`: prompt
    tokens found in the cache. `num_interruptions`: how often it was preempted.
    """

    index: int
    prompt_idx: int
    completion: Completion
    clock: AnswerClock
    has_logprobs: bool
    num_cached: int = 0
    num_interruptions: int = 0
    scored: Scores = field(default_factory=Scores)


@dataclass(slots=True)
class TextDelta:
    """What an answer has gained: text, the parts of it if it is divided, and tokens. `scored`: the tokens that
    have log-probabilities, if any. The last delta of an answer has a `finish_reason`."""

    answer: Answer
    text: str = ""
    parts: list[Part] = field(default_factory=list)
    scored: Scores | None = None
    finish_reason: str | None = None
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Backend:
    """The client of the router, the tokenizer, the metrics and the open sessions, from which answers are made.

    `reports_cached_tokens`: whether answers report how many prompt tokens were cached.
    """

    client: RouterClient
    tokenizer: Tokenizer
    metrics: ServiceMetrics
    sessions: OpenSessions
    reports_cached_tokens: bool = False

    async def generate(self, spec: GenerationSpec) -> "Generation":
        """Queues every answer, or none; a grammar has to be checked already. Raises RequestRefused."""
        params = spec.params
        if sum(map(len, params.bad_words)) > INLINE_CHARS:  # words to avoid become tokens
            plan = await asyncio.to_thread(AnswerPlan, params, self.tokenizer)
        else:
            plan = AnswerPlan(params, self.tokenizer)
        has_logprobs = params.logprobs is not None
        answers: dict[str, Answer] = {}
        prompts = []
        for prompt_idx, prompt_ids in enumerate(spec.prompts):
            asked = []
            for seed, completion in plan.begin(prompt_ids, spec.form):
                asked.append(NewAnswer(uuid.uuid4().hex, seed))
                clock = AnswerClock(self.metrics, len(prompt_ids) // TOKEN_BYTES, params.max_tokens)
                answer = Answer(len(answers), prompt_idx, completion, clock, has_logprobs)
                answers[asked[-1].request_id] = answer
            prompts.append(NewPrompt(prompt_ids, asked, spec.boundary))
        submit = Submit(
            prompts=prompts,
            params=plan.params,
            stop_ids=sorted(plan.stop_ids),
            priority=spec.priority,
            namespace=spec.namespace,
            session=None if spec.session is None else spec.session.name,
            states_length=spec.states_length,
            shows_answer=spec.shows_answer,
            grammar_bytes=spec.grammar_bytes,
            grammar_owner=spec.grammar_owner,
            key=spec.key,
        )
        with ExitStack() as stack:
            session = None
            if spec.session is not None:
                session = self.sessions.begin(spec.session)
                stack.callback(self.sessions.end, session)
            events = await self.client.submit(submit)
            if session is not None:
                self.sessions.accept(session)
            closed = stack.pop_all().close  # the session's request ends with the generation
        return Generation(spec, answers, events, closed, self.reports_cached_tokens)


class Generation:
    """The answers to one HTTP request while they are generated. `close` aborts the unfinished ones.

    `cut_to`: what max_tokens is cut to, if the pool cannot hold as many. `closed`: called once, by the first
    `close`.
    """

    def __init__(
        self,
        spec: GenerationSpec,
        answers: dict[str, Answer],
        events: AnswerStream,
        closed: Callable[[], None] = lambda: None,
        reports_cached_tokens: bool = False,
    ) -> None:
        self._reports_cached_tokens = reports_cached_tokens
        self.answers = list(answers.values())
        self.cut_to = spec.cut_to
        self._spec = spec
        self._growing = answers
        self._events = events
        self._closed = closed

    @property
    def num_prompt_tokens(self) -> int:
        """The tokens of all prompts. A prompt counts once, however many answers it has."""
        return sum(map(len, self._spec.prompts)) // TOKEN_BYTES

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens found in the cache, counted for the first answer to each prompt; None if the service
        does not report them."""
        return self.num_hit_tokens if self._reports_cached_tokens else None

    @property
    def num_hit_tokens(self) -> int:
        """Prompt tokens found in the cache, as `num_cached_tokens`, whether reported to clients or not."""
        return sum(answer.num_cached for answer in self.answers[:: self._spec.params.n])

    @property
    def num_completion_tokens(self) -> int:
        """The tokens of all answers so far."""
        return sum(len(answer.completion.token_ids) for answer in self.answers)

    async def deltas(self) -> AsyncIterator[list[TextDelta]]:
        """Yields what the answers gain, each time as one delta for each answer that has gained something.

        Ends early if the generation is closed. Raises GenerationFailed and GenerationLost, after which no
        answer runs any more.
        """
        async for events in self._events:
            deltas: dict[str, TextDelta] = {}
            for event in events:
                request_id = event.request_id
                if event.finish_reason in _FAILURES:
                    self._fail(event.finish_reason, event.error or "it was aborted")
                delta = deltas.get(request_id)
                if delta is None:
                    answer = self._growing.get(request_id)
                    if answer is None:
                        continue
                    delta = deltas[request_id] = TextDelta(answer)
                self._add(event, delta)
            for request_id, delta in deltas.items():
                if delta.answer.completion.finish_reason is not None:
                    self._finish(request_id, delta)
            yield list(deltas.values())

    def close(self) -> None:
        """Aborts the answers that are unfinished."""
        for answer in self._growing.values():
            answer.clock.finish("abort")
        self._growing.clear()
        self._events.close()
        closed, self._closed = self._closed, lambda: None
        closed()

    def _add(self, event: TokenEvent, delta: TextDelta) -> None:
        """Adds an event to its answer and to the answer's delta."""
        answer = delta.answer
        if answer.completion.finish_reason is not None:  # a stop string ended the answer before
            return
        if event.num_cached is not None:
            answer.num_cached = event.num_cached
            answer.clock.waited = event.waited
        answer.num_interruptions = max(answer.num_interruptions, event.num_interruptions)
        if not self._spec.shows_answer:
            event = msgspec.structs.replace(event, token=None, finish_reason="length")
        completion, logprobs = answer.completion, event.logprobs
        num_parts = len(completion.parts)
        delta.text += completion.push(event)
        delta.parts += completion.parts[num_parts:]
        if event.token is not None:
            delta.token_ids.append(event.token)
        answer.clock.token()
        if logprobs is not None and event.token is not None and completion.place is not None:
            answer.scored.append(event.token, logprobs, completion.place)
            delta.scored = delta.scored or Scores()
            delta.scored.append(event.token, logprobs, completion.place)

    def _finish(self, request_id: str, delta: TextDelta) -> None:
        """Notes why an answer has ended, and aborts its request if a stop string ended it."""
        completion = delta.answer.completion
        assert completion.finish_reason is not None
        delta.finish_reason = completion.finish_reason
        del self._growing[request_id]
        delta.answer.clock.finish(completion.finish_reason)
        if completion.stopped:
            self._events.end(request_id, "stop")

    def _fail(self, finish_reason: str, error: str) -> None:
        """Aborts the unfinished answers and raises what the reason stands for."""
        for answer in self._growing.values():
            answer.clock.finish(finish_reason)
        self._growing.clear()
        self._events.close()
        raise _FAILURES[finish_reason](error)


def usage_of(generation: Generation) -> Object:
    """Returns the token counts so far. `interruptions`: how often answers were interrupted, if any was.
    `max_tokens`: what the request's own was cut to, if the pool cannot hold as many."""
    prompt, completion = generation.num_prompt_tokens, generation.num_completion_tokens
    cached = generation.num_cached_tokens
    usage: Object = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }
    if interruptions := sum([answer.num_interruptions for answer in generation.answers]):
        usage["interruptions"] = interruptions
    if generation.cut_to is not None:
        usage["max_tokens"] = generation.cut_to
    return usage


@asynccontextmanager
async def closed_with_client(receive: Receive, generation: Generation) -> AsyncIterator[Callable[[], bool]]:
    """Closes the generation as soon as its client disconnects, at the latest at the end of the block. The block
    gets a function that returns whether the client is still connected."""

    async def watch() -> None:
        await until_disconnected(receive)
        generation.close()

    watching = asyncio.create_task(watch())
    try:
        yield lambda: not watching.done()
    finally:
        watching.cancel()
        generation.close()


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Returns the result of `work`, which is cancelled if the client disconnects before. Raises GenerationLost
    then."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(until_disconnected(receive))
    try:
        await asyncio.wait((working, watching), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise GenerationLost("its client has disconnected")
        return working.result()
    finally:
        watching.cancel()
        working.cancel()


async def until_disconnected(receive: Receive) -> None:
    """Returns once the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass
