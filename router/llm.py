"""A language model in this process: prompts in, answers out, all at once or as they grow.

It holds the engine, its memory and the tokenizer, for programs that need no service. One thread calls it.
"""

import reprlib
import secrets
import signal
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count, groupby
from os import PathLike, fspath
from types import FrameType
from typing import Any, Never, cast

import numpy as np
from msgspec.structs import replace as replace_params

from lightkv.errors import LightKVError
from lightkv.router.engine.admission import make_admission
from lightkv.router.engine.loop import EngineStats, LocalEngine, make_scheduler
from lightkv.router.engine.request import InvalidPrompt, Request
from lightkv.router.engine.step import PromptLogprobs, TokenEvent, TokenLogprobs
from lightkv.router.model.build import build_runner, find_model
from lightkv.router.text.beam_search import Beam, BeamParams, BeamSearch
from lightkv.router.text.completion import AnswerForm, AnswerPlan, Completion
from lightkv.router.text.stable_boundary import chat_boundary
from lightkv.router.text.tokenizer import Tokenizer
from lightkv.token_ids import int32_bytes

from .config import EngineConfig, InvalidConfig
from .peer_names import unknown_setting
from .sampling_params import Grammar, SamplingParams

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | np.ndarray | Sequence[Message]
# One prompt, or several in a list.
Prompts = str | np.ndarray | Sequence[int | Message | Prompt]
Report = Callable[[str], None]


class StepFailed(LightKVError):
    """The model failed on a step, whose requests are lost, or a text could not go on as its grammar says."""


@dataclass(frozen=True)
class CompletionOutput:
    """One answer. `finish_reason`: "stop" (a stop token or string) or "length"."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its n answers. `num_cached_tokens`: the tokens of the prompt that its first answer found
    in the cache. `prompt_logprobs`: of the prompt's tokens from the second on, if they were asked for."""

    prompt: Prompt
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True)
class StreamChunk:
    """The new text and tokens of one answer; its last chunk has a `finish_reason`."""

    prompt_idx: int
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: TokenLogprobs | None = None


@dataclass
class _Answer:
    """An answer that is being generated: its place, its request, its text, what this has to be, and the
    log-probabilities of its tokens, where they have any."""

    prompt_idx: int
    index: int
    request: Request
    completion: Completion
    grammar: Grammar | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class _Run:
    """The answers of one call, and the events that the call has not handled yet."""

    def __init__(self, answers: list[_Answer]) -> None:
        self.growing = {answer.request.id: answer for answer in answers}
        self.inbox: deque[TokenEvent] = deque()


class LLM:
    """A model, its K/V memory and its tokenizer.

    >>> from lightkv.router import LLM, SamplingParams
    >>> llm = LLM()                                  # or a directory, a hub id, or an EngineConfig
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))
    >>> llm.generate([{"role": "user", "content": "Hello!"}])          # a chat
    >>> for chunk in llm.stream("Once upon a time"): print(chunk.text, end="")

    A prompt is a text, its token ids, or a chat (a list of messages). `report` takes lines of progress while
    the model loads. Settings other than the model are given as an EngineConfig; keywords by which vLLM and
    SGLang know them are answered with a TypeError that shows it.

    Each step computes as many prompt tokens as fill the device, because a caller waits for the last answer.
    For streams that should grow evenly, give the configuration an `itl_target`.

    Raises InvalidConfig, ModelNotFound, UnreadableWeights, UnsupportedModel, OutOfMemory; no memory is held
    then.
    """

    def __init__(
        self,
        model: str | PathLike[str] | EngineConfig = EngineConfig.model,
        report: Report = lambda line: None,
        **unknown: Never,
    ) -> None:
        if unknown:
            raise unknown_setting(repr(model.model if isinstance(model, EngineConfig) else model), unknown)
        if not isinstance(model, str | PathLike | EngineConfig):
            raise TypeError(
                f"model is {model!r} ({type(model).__name__}); give a directory, an id on the Hugging Face hub "
                "or an EngineConfig"
            )
        if not callable(report):
            raise TypeError(f"report is {report!r}; give a function that takes a line of text, such as print")
        config = model if isinstance(model, EngineConfig) else EngineConfig(model=fspath(model))
        if config.tensor_parallel > 1:
            raise InvalidConfig(
                f"--tensor-parallel is {config.tensor_parallel}, and an LLM runs in this process alone; start "
                "lightkv serve, whose ranks are processes, or leave it at 1"
            )
        if config.kv_events is not None:
            raise InvalidConfig(
                "--kv-events is for lightkv serve, and a program has no gateway; leave it out"
            )
        if config.itl_target is None:
            config = replace(config, itl_target=0.0)
        # `find_model` comes first: that a model cannot run matters more than what its tokenizer lacks.
        directory = find_model(config, report)
        self.tokenizer = Tokenizer(directory)
        runner, self.info = build_runner(config, report, directory)
        admission = make_admission(config.admission, ttft_target=config.ttft_target)
        self.engine = LocalEngine(make_scheduler(self.info, admission), runner, self.info.num_missing_graphs)
        self._model = config.model
        self._grammars = runner.grammars
        self._grammar_ids = count()
        self._runs: dict[str, _Run] = {}  # by request id; calls may be interleaved

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of prompts that are given none, as the model's generation_config.json recommends."""
        return SamplingParams(**self.tokenizer.recommended)

    def __repr__(self) -> str:
        info, stats = self.info, self.stats()
        return (
            f"LLM({self._model!r}: {info.architecture}, {info.dtype} on {info.device}; K/V of {info.capacity} "
            f"tokens in {info.kv_type}; context {info.limits.max_model_len}; {stats.num_running} running, "
            f"{stats.num_waiting} waiting)"
        )

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers every prompt, as many at once as memory allows. Returns one `RequestOutput` a prompt, in
        order.

        `sampling_params`: one for all prompts, or one for each; None takes `default_params`. Raises NeverFits,
        InvalidParams, InvalidPrompt or TypeError before anything runs, and StepFailed. Ctrl-C ends these
        answers after the step in flight; other calls continue.
        """
        many = _as_prompts(prompts)
        answers = self._answers(many, sampling_params)
        for _ in self._run(answers):
            pass
        outputs = []
        for prompt_idx, group in groupby(answers, key=lambda answer: answer.prompt_idx):
            own = list(group)
            request = own[0].request
            ids = array("i", request.prompt_ids).tolist()
            made = [_output(answer) for answer in own]
            scores = own[0].completion.prompt_logprobs
            outputs.append(RequestOutput(many[prompt_idx], ids, request.num_hit, made, scores))
        return outputs

    def chat(
        self,
        messages: Sequence[Message | Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answers a chat (a list of messages), or several (a list of such lists), as `generate` does."""
        for chat in _as_prompts(messages):
            if not _is_chat(chat):
                raise TypeError(
                    f"messages has {reprlib.repr(chat)} where a chat is expected; give messages such as "
                    '[{"role": "user", "content": "Hello!"}], or texts to generate'
                )
        return self.generate(messages, sampling_params)

    def stream(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamChunk]:
        """Answers as `generate` does, in chunks as they come. Dropping the iterator ends the unfinished
        answers. Raises as `generate` does."""
        return self._run(self._answers(_as_prompts(prompts), sampling_params))

    def beam_search(self, prompts: Prompts, params: BeamParams | None = None) -> list[list[Beam]]:
        """Returns the best beams of each prompt, in order; the likeliest tokens of each round are found for all
        prompts together. Raises as `generate` does, and InvalidParams for more beams than log-probabilities.
        """
        params = BeamParams() if params is None else params
        if not isinstance(params, BeamParams):
            raise TypeError(f"params is {reprlib.repr(params)}; give BeamParams, such as BeamParams(width=4)")
        end_ids = frozenset() if params.ignore_eos else self.tokenizer.eos_ids
        one_token = params.round_params(len(end_ids))
        many = _as_prompts(prompts)
        searches = [BeamSearch(self._encode(i, one)[0], params, end_ids) for i, one in enumerate(many)]
        whole = replace_params(one_token, max_tokens=params.max_tokens)
        for search in searches:  # the last round is as long as a whole answer
            request = Request("", search.prompts[0], whole, seed=0)
            request.validate(self.info.limits, self.info.capacity, self.info.groups)
        while growing := [search for search in searches if search.prompts]:
            asked = [search.prompts for search in growing]
            ids = [array("i", prompt).tolist() for own in asked for prompt in own]
            found = iter(self.generate(ids, one_token))
            for search, own in zip(growing, asked, strict=True):
                logprobs = [next(found).outputs[0].logprobs for _ in own]
                search.take([one[0] for one in logprobs if one])
        return [search.finished for search in searches]

    def stats(self) -> EngineStats:
        """Returns the engine's counts."""
        return self.engine.stats()

    def check(self) -> None:
        """Recounts everything, the device's memory included. Raises CheckFailed."""
        with interrupts_deferred():
            self._deliver(self.engine.settle())
            self.engine.check()

    def _answers(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[_Answer]:
        """Returns the answers to generate, in order. Every request is checked before any runs."""
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params] * len(prompts)
        if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
            raise TypeError(
                f"sampling_params is {reprlib.repr(params)}; give SamplingParams, such as "
                "SamplingParams(temperature=0), or a list with one for each prompt"
            )
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(params)} sampling parameters; give one each")
        answers = []
        with self._compiled({one.grammar for one in params}):  # raises InvalidGrammar
            pass
        for prompt_idx, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            prompt_ids, boundary = self._encode(prompt_idx, prompt)
            grammar = wanted.grammar
            if grammar is not None:
                wanted = replace_params(wanted, grammar=None)  # the request gets a compiled one later
            plan = AnswerPlan(wanted, self.tokenizer)
            others, form = plan.params.of_others, AnswerForm(continues=not _is_chat(prompt))
            for index, (seed, completion) in enumerate(plan.begin(prompt_ids, form)):
                params_of_one = others if index else plan.params
                request = Request(
                    secrets.token_hex(8), prompt_ids, params_of_one, seed, plan.stop_ids, boundary=boundary
                )
                request.validate(self.info.limits, self.info.capacity, self.info.groups)
                answers.append(_Answer(prompt_idx, index, request, completion, grammar))
        return answers

    def _encode(self, prompt_idx: int, prompt: Prompt) -> tuple[bytes, int]:
        """Returns a prompt's ids, int32 bytes, and the boundary of a chat (`Request`)."""
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt).tobytes(), 0
        if _is_chat(prompt):
            for message in cast(Sequence[Message], prompt):
                _require_message(prompt_idx, message)
            chat, render = list(map(dict, cast(Sequence[Message], prompt))), self.tokenizer.render_chat
            ids = self.tokenizer.encode(text := render(chat), add_special_tokens=False)
            keeps_all = self.info.longest is None and not self.info.num_states
            return ids.tobytes(), 0 if keeps_all else chat_boundary(self.tokenizer, text, ids, chat, render)
        wrong = f"prompt {prompt_idx} is neither a text nor token ids nor a list of messages"
        try:
            return int32_bytes(cast(Sequence[int], prompt)), 0
        except TypeError as error:
            raise TypeError(f"{wrong}: {error}") from error
        except ValueError as error:
            raise InvalidPrompt(f"{wrong}: {error}") from error

    @contextmanager
    def _compiled(self, grammars: set[Grammar | None]) -> Iterator[dict[Grammar | None, int]]:
        """Yields the ids of grammars, compiled until the end of the block. Raises InvalidGrammar."""
        ids: dict[Grammar | None, int] = {}
        try:
            for grammar in grammars:
                if grammar is not None:
                    self._grammars.compile(number := next(self._grammar_ids), grammar)
                    ids[grammar] = number
            yield ids
        finally:
            for number in ids.values():
                self._grammars.release(number)

    def _run(self, answers: list[_Answer]) -> Iterator[StreamChunk]:
        run = _Run(answers)
        with self._compiled({answer.grammar for answer in answers}) as ids:
            for answer in answers:
                answer.request.grammar = ids.get(answer.grammar)
            try:
                with interrupts_deferred():
                    self.engine.add(*[answer.request for answer in answers])
                    self._runs.update(dict.fromkeys(run.growing, run))
                while run.growing:
                    with interrupts_deferred():
                        if not run.inbox:
                            self._deliver(self.engine.step())
                        chunks = self._take(run)
                    yield from chunks
            finally:
                with interrupts_deferred():
                    for request_id in run.growing:
                        self.engine.abort(request_id)
                        self._runs.pop(request_id, None)
                    if not self._runs:  # nothing of these answers is held once the call has returned
                        self._deliver(self.engine.settle())

    def _deliver(self, events: list[TokenEvent]) -> None:
        """Puts every event into the inbox of its own call."""
        for event in events:
            if event.request_id in self._runs:
                self._runs[event.request_id].inbox.append(event)

    def _take(self, run: _Run) -> list[StreamChunk]:
        """Returns the chunks of the call's events. Raises StepFailed, once the events before are taken."""
        chunks: list[StreamChunk] = []
        while run.inbox and not (chunks and run.inbox[0].finish_reason in ("error", "invalid")):
            event = run.inbox.popleft()
            if event.request_id in run.growing:  # else a stop string has ended the answer before
                chunks.append(self._chunk(run, event))
        return chunks

    def _chunk(self, run: _Run, event: TokenEvent) -> StreamChunk:
        answer = run.growing[event.request_id]
        if event.finish_reason == "invalid":
            raise StepFailed(f"an answer could not be completed: {event.error}")
        if event.finish_reason == "error":
            raise StepFailed(f"a step failed: {event.error}; its requests are lost, try again")
        completion = answer.completion
        text = completion.push(event)
        if event.logprobs is not None:
            answer.logprobs.append(event.logprobs)
        if completion.finish_reason is not None:
            del run.growing[event.request_id], self._runs[event.request_id]
            if completion.stopped:
                self.engine.abort(event.request_id, "stop")
        assert event.token is not None
        return StreamChunk(
            answer.prompt_idx, answer.index, text, [event.token], completion.finish_reason, event.logprobs
        )


def _is_chat(prompt: Prompt) -> bool:
    """Returns whether a prompt is a list of messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _require_message(prompt_idx: int, message: Message) -> None:
    """Raises TypeError for what cannot be a message of a chat, such as a prompt as vLLM takes it."""
    if not isinstance(message, Mapping):
        raise TypeError(
            f"prompt {prompt_idx} is a chat with {reprlib.repr(message)} among its messages; give messages "
            'such as {"role": "user", "content": "Hello!"}'
        )
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise TypeError(
                f"prompt {prompt_idx} is a chat with a part of type {kind}, and models run on texts only here; "
                "give parts of type text"
            )
    if "role" not in message and ("prompt" in message or "prompt_token_ids" in message):
        raise TypeError(
            f"prompt {prompt_idx} is in a dict with {' and '.join(map(repr, message))}; give the text or the "
            "list of token ids itself"
        )


def _as_prompts(prompts: Prompts) -> list[Prompt]:
    """Returns a list of prompts. A text, a list of ids and a list of messages are one prompt each. Raises
    TypeError."""
    if isinstance(prompts, Mapping):
        _require_message(0, prompts)
        raise TypeError("prompts is one message; give a list of them: [{…}]")
    if isinstance(prompts, str) or not isinstance(prompts, Sequence | np.ndarray):
        return [cast(Prompt, prompts)]
    if len(prompts) and isinstance(prompts[0], int | np.integer | Mapping):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _output(answer: _Answer) -> CompletionOutput:
    completion = answer.completion
    assert completion.finish_reason is not None
    reason, logprobs = completion.finish_reason, answer.logprobs or None  # an answer has a token at least
    return CompletionOutput(answer.index, completion.text, completion.token_ids, reason, logprobs)


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Runs SIGINT's handler at the end of the block, if the signal comes within it. A KeyboardInterrupt
    within a step would leave counts and memory different, and the engine would have to stop for good.

    Only the main thread runs handlers, and only a Python function can be deferred. In other threads, and where
    SIGINT is ignored or ends the process, nothing is deferred.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    frames: list[FrameType | None] = []
    try:
        signal.signal(signal.SIGINT, lambda number, frame: frames.append(frame))
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if frames:
            handler(signal.SIGINT, frames[-1])
