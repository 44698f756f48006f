"""A language model in this process: prompts in, answers out, all at once or as they grow.

The engine, its memory and the text around it, for programs that want no service. One thread steps it.
"""

import secrets
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np

from lightkv.errors import LightKVError
from lightkv.ledger import TokenLedger

from .build import build_runner
from .completion import Completion
from .config import EngineConfig
from .engine import Engine, Stats
from .messages import TokenLogprobs
from .sampling_params import SamplingParams
from .scheduler import Request, Scheduler, SchedulerLimits
from .tokenizer import Tokenizer
from .weights import resolve

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]
Report = Callable[[str], None]


class StepFailed(LightKVError):
    """The model failed on a step; the requests in it are lost."""


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
    """A prompt and its n answers. `num_cached_tokens`: of its first answer's prompt, found in the cache."""

    prompt: Prompt
    prompt_token_ids: list[int]
    num_cached_tokens: int
    outputs: list[CompletionOutput]


@dataclass(frozen=True)
class StreamChunk:
    """What one answer has gained. `text` and `token_ids` are new; the last has a `finish_reason`."""

    prompt_idx: int
    index: int
    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None


@dataclass
class _Answer:
    """An answer on its way: whose it is, its request and its text."""

    prompt_idx: int
    index: int
    request: Request
    completion: Completion


class LLM:
    """A model, its K/V memory and its tokenizer.

    >>> from lightkv.router import LLM, SamplingParams
    >>> llm = LLM()                                  # or a directory, a hub id, or an EngineConfig
    >>> llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8))
    >>> llm.generate([{"role": "user", "content": "Hello!"}])          # a chat
    >>> for chunk in llm.stream("Once upon a time"): print(chunk.text, end="")

    A prompt is a text, its token ids, or a chat (a list of messages). `report` takes progress while the model
    loads, a line at a time. Raises InvalidConfig, ModelNotFound, UnreadableWeights, UnsupportedModel,
    OutOfMemory; nothing is held then.
    """

    def __init__(
        self, model: str | EngineConfig = EngineConfig.model, report: Report = lambda line: None
    ) -> None:
        config = EngineConfig(model=model) if isinstance(model, str) else model
        self.tokenizer = Tokenizer(Path(resolve(config.model, report)))
        runner, self.info = build_runner(config, report)
        info = self.info
        ledger = TokenLedger(info.capacity, info.max_num_seqs, info.max_model_len)
        limits = SchedulerLimits(info.max_num_seqs, info.max_model_len, info.prefill_chunk)
        self.engine = Engine(Scheduler(ledger, limits), runner)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt; they run together as memory allows. One `RequestOutput` a prompt, in order.

        `params`: for all, or one each. Raises NeverFits or InvalidParams before anything runs, StepFailed.
        """
        many = _as_prompts(prompts)
        answers = self._requests(many, params)
        for _ in self._run(answers):
            pass
        outputs = []
        for prompt_idx, prompt in enumerate(many):
            own = [answer for answer in answers if answer.prompt_idx == prompt_idx]
            request = own[0].request
            ids = np.frombuffer(request.prompt_ids, dtype=np.int32).tolist()
            outputs.append(RequestOutput(prompt, ids, request.num_hit, [_output(answer) for answer in own]))
        return outputs

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[StreamChunk]:
        """As `generate`, in chunks as they come. Dropping the iterator ends what still runs."""
        return self._run(self._requests(_as_prompts(prompts), params))

    def stats(self) -> Stats:
        """What the memory holds now, in tokens."""
        return self.engine.stats()

    def check(self) -> None:
        """Recount every book. Raises CheckFailed."""
        self.engine.check()

    def _requests(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[_Answer]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if len(params) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(params)} sampling parameters; give one each")
        vocab_size = self.info.vocab_size
        answers = []
        for prompt_idx, (prompt, wanted) in enumerate(zip(prompts, params, strict=True)):
            wanted.validate(vocab_size)
            ids = self._encode(prompt)
            if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
                raise ValueError(f"prompt {prompt_idx} has ids outside the vocabulary of {vocab_size} tokens")
            stop_ids = frozenset(wanted.stop_token_ids)
            if not wanted.ignore_eos:
                stop_ids |= self.tokenizer.eos_ids
            for index in range(wanted.n):
                child = wanted.child(index)
                seed = secrets.randbits(63) if child.seed is None else child.seed
                request = Request(secrets.token_hex(8), ids.tobytes(), child, seed, stop_ids)
                answers.append(_Answer(prompt_idx, index, request, Completion(self.tokenizer, child)))
        return answers

    def _encode(self, prompt: Prompt) -> np.ndarray:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if prompt and isinstance(prompt[0], Mapping):
            return self.tokenizer.encode_chat(cast(Sequence[Message], prompt))
        return np.array(array("i", cast(Sequence[int], prompt)), dtype=np.int32)

    def _run(self, answers: list[_Answer]) -> Iterator[StreamChunk]:
        engine = self.engine
        growing: dict[str, _Answer] = {}
        try:
            for answer in answers:
                engine.add(answer.request)
                growing[answer.request.id] = answer
            while growing:
                for event in engine.step():
                    grown = growing.get(event.request_id)
                    if grown is None:
                        continue
                    if event.finish_reason == "error":
                        raise StepFailed(f"a step failed: {event.error}; its requests are lost, try again")
                    completion = grown.completion
                    text = completion.push(event)
                    ids = [] if event.token is None else [event.token]
                    if completion.finish_reason is not None:
                        del growing[event.request_id]
                        if completion.stopped:
                            engine.abort(event.request_id, "stop")
                    yield StreamChunk(grown.prompt_idx, grown.index, text, ids, completion.finish_reason)
        finally:
            for request_id in growing:
                engine.abort(request_id)


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a text, a list of ids and a list of messages are one."""
    if isinstance(prompts, str) or (len(prompts) and isinstance(prompts[0], int | np.integer | Mapping)):
        return [cast(Prompt, prompts)]
    return list(cast(Sequence[Prompt], prompts))


def _output(answer: _Answer) -> CompletionOutput:
    completion = answer.completion
    assert completion.finish_reason is not None
    logprobs = completion.logprobs if answer.request.params.logprobs is not None else None
    return CompletionOutput(
        answer.index, completion.text, completion.token_ids, completion.finish_reason, logprobs
    )
