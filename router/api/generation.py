"""One HTTP request's answers: submitted together, grown from the router's events, ended together.

Knows text, events and the client's stream; knows no HTTP and nothing of how an answer is written down.
"""

import secrets
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from lightkv.errors import LightKVError
from lightkv.ledger.prefix_tree import TOKEN_BYTES
from lightkv.router.engine.step import TokenEvent, TokenLogprobs
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.service.messages import Submit
from lightkv.router.service.router_client import AnswerStream, RouterClient
from lightkv.router.text.completion import Completion
from lightkv.router.text.tokenizer import Tokenizer

from .metrics import AnswerClock, ServiceMetrics


class GenerationFailed(LightKVError):
    """A step failed in the model. The service goes on; the same request may well fail again."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the model failed in this answer ({reason}); the same request may fail again")


class GenerationLost(LightKVError):
    """The service lost an answer on its way: a process of it died, or it shuts down."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the answer was lost ({reason}); try again")


@dataclass(frozen=True)
class GenerationSpec:
    """What one HTTP request asks: `params.n` answers to each prompt (int32 bytes)."""

    prompts: list[bytes]
    params: SamplingParams
    priority: int = 0
    namespace: tuple[str, ...] = ()


@dataclass
class Answer:
    """One answer as it grows.

    `index`: among all of the HTTP request. `scored`: the tokens of its text with their log-probabilities,
    if it `has_logprobs` (a stop token is no part of the text). `num_cached`: prompt tokens found in the cache.
    """

    index: int
    prompt_idx: int
    completion: Completion
    clock: AnswerClock
    has_logprobs: bool
    num_cached: int = 0
    scored: list[tuple[int, TokenLogprobs]] = field(default_factory=list)


@dataclass
class TextDelta:
    """What one answer has gained; its last has a `finish_reason`."""

    answer: Answer
    text: str = ""
    scored: list[tuple[int, TokenLogprobs]] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass(frozen=True)
class Backend:
    """What answers are made with: the way to the router, the model's text, and the measurements.

    `reports_cached_tokens`: whether clients are told how much of a prompt was cached.
    """

    client: RouterClient
    tokenizer: Tokenizer
    metrics: ServiceMetrics
    reports_cached_tokens: bool = False

    async def generate(self, question: GenerationSpec) -> "Generation":
        """Queue every answer, or none. Raises RequestRefused."""
        params = question.params
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.tokenizer.eos_ids
        children = [params.child(child_idx) for child_idx in range(params.n)]
        answers: dict[str, Answer] = {}
        submits = []
        for prompt_idx, prompt_ids in enumerate(question.prompts):
            for child in children:
                request_id = uuid.uuid4().hex
                completion = Completion(self.tokenizer, child)
                answers[request_id] = Answer(
                    index=len(answers),
                    prompt_idx=prompt_idx,
                    completion=completion,
                    clock=self.metrics.begin(),
                    has_logprobs=params.logprobs is not None,
                )
                submits.append(
                    Submit(
                        request_id,
                        prompt_ids,
                        child,
                        secrets.randbits(63) if child.seed is None else child.seed,
                        sorted(stop_ids),
                        question.priority,
                        question.namespace,
                    )
                )
        events = await self.client.submit(submits)
        return Generation(question, answers, events, self.reports_cached_tokens)


class Generation:
    """All answers of one HTTP request, which are on their way. `close` ends what still grows."""

    def __init__(
        self,
        question: GenerationSpec,
        answers: dict[str, Answer],
        events: AnswerStream,
        reports_cached_tokens: bool = False,
    ) -> None:
        self._reports_cached_tokens = reports_cached_tokens
        self.answers = list(answers.values())
        self._question = question
        self._growing = answers
        self._events = events

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt counts once, however many answers it has."""
        return sum(map(len, self._question.prompts)) // TOKEN_BYTES

    @property
    def num_cached_tokens(self) -> int | None:
        """Prompt tokens found in the cache: of each prompt's first answer. None where clients are not told."""
        if not self._reports_cached_tokens:
            return None
        return sum(answer.num_cached for answer in self.answers[:: self._question.params.n])

    @property
    def num_completion_tokens(self) -> int:
        """Of all answers so far."""
        return sum(len(answer.completion.token_ids) for answer in self.answers)

    async def pieces(self) -> AsyncIterator[TextDelta]:
        """What the answers gain, as it comes; what came together is one piece an answer.

        Ends early when it is closed. Raises GenerationFailed and GenerationLost; nothing runs any more then.
        """
        async for events in self._events:
            pieces: dict[str, TextDelta] = {}
            for event in events:
                if event.finish_reason in ("error", "lost", "abort"):
                    self._fail(event.finish_reason, event.error or "it was ended")
                if (answer := self._growing.get(event.request_id)) is not None:
                    self._take(event, pieces.setdefault(event.request_id, TextDelta(answer)))
            for request_id, piece in pieces.items():
                self._settle(request_id, piece)  # all of them first: who takes the pieces may be slow
            for piece in pieces.values():
                yield piece

    def close(self) -> None:
        """End what still grows: nobody waits for it."""
        for answer in self._growing.values():
            answer.clock.finish("abort")
        self._growing.clear()
        self._events.close()

    def _take(self, event: TokenEvent, piece: TextDelta) -> None:
        answer = piece.answer
        if answer.completion.finish_reason is not None:  # a stop string came first
            return
        if event.num_cached is not None:
            answer.num_cached = event.num_cached
        piece.text += answer.completion.push(event)
        answer.clock.token()
        if event.logprobs is not None and event.token is not None and event.finish_reason != "stop":
            answer.scored.append((event.token, event.logprobs))
            piece.scored.append(answer.scored[-1])

    def _settle(self, request_id: str, piece: TextDelta) -> None:
        completion = piece.answer.completion
        piece.finish_reason = completion.finish_reason
        if completion.finish_reason is None:
            return
        del self._growing[request_id]
        piece.answer.clock.finish(completion.finish_reason)
        if completion.stopped:
            self._events.end(request_id, "stop")

    def _fail(self, finish_reason: str, error: str) -> None:
        for answer in self._growing.values():
            answer.clock.finish(finish_reason)
        self._growing.clear()
        self._events.close()
        raise GenerationFailed(error) if finish_reason == "error" else GenerationLost(error)
