"""Writes the answers of a plain completion as OpenAI's JSON objects: whole, and as chunks of a stream."""

import secrets
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import chain
from typing import Any, cast

import msgspec

from lightkv.router.engine.step import PromptLogprobs
from lightkv.router.text.tokenizer import Tokenizer

from .bodies import CompletionBody, CompletionChoice, CompletionLogprobs, FinishReason, Usage
from .extras import Extras, prompt_scores
from .generation import Answer, Answered, TextDelta, usage_of
from .pieces import Long, encode, in_pieces, long_list
from .scores import GrowingScores, ScoredToken, Scores


class CompletionWriter:
    """Writes the bodies of one plain completion. `extras`: what answers have beside their text."""

    divides_answers = False  # the text of an answer is written as it is

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        extras: Extras | None = None,
    ) -> None:
        self.extras = extras or Extras()
        self._model = model
        self._tokenizer = tokenizer
        self._id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._num_chars: dict[int, int] = {}  # by answer: characters whose log-probabilities were written
        self._opened: set[int] = set()

    def whole(self, generation: Answered) -> Iterator[bytes]:
        """Yields the body of an answer that is not streamed."""
        scores = prompt_scores(generation)

        def choices() -> Iterator[bytes]:
            written = (self._choice(_all_of(one), scores.get(one.prompt_idx)) for one in generation.answers)
            return long_list(map(in_pieces, written))

        return in_pieces(self._body(Long(choices)) | {"usage": usage_of(generation)})

    def chunks(self, delta: TextDelta) -> list[CompletionBody]:
        """Returns the chunks of a stream for a delta."""
        scores = delta.answer.completion.prompt_logprobs if self.extras.echoes_logprobs else None
        return [self._body([self._choice(delta, scores)])]

    def usage_chunk(self, usage: Usage) -> CompletionBody:
        """Returns the last chunk of a stream, which has the token counts."""
        return self._body([]) | {"usage": usage}

    def _body(self, choices: Any) -> CompletionBody:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _choice(self, delta: TextDelta, prompt_scores: PromptLogprobs | None) -> CompletionChoice:
        answer, text = delta.answer, delta.text
        opens = answer.index not in self._opened
        self._opened.add(answer.index)
        if self.extras.echoed and opens:
            text = self.extras.echoed[answer.prompt_idx] + text
        logprobs = None
        if answer.has_logprobs:
            of_prompt = prompt_scores if opens and self.extras.echoes_logprobs else None
            logprobs = self._logprobs(answer, delta.scored or GrowingScores(), of_prompt)
        choice: CompletionChoice = {
            "index": answer.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": cast(FinishReason | None, delta.finish_reason),
        }
        if self.extras.token_ids:
            choice["token_ids"] = list(delta.token_ids)
            if opens:
                choice["prompt_token_ids"] = self.extras.prompt_ids(answer.prompt_idx)
        if self.extras.prompt_logprobs:
            choice["prompt_logprobs"] = self.extras.scored_prompt(
                self._tokenizer, answer.prompt_idx, prompt_scores
            )
        return choice

    def _logprobs(
        self, answer: Answer, scored: GrowingScores, prompt: PromptLogprobs | None
    ) -> CompletionLogprobs:
        """Returns lists of the tokens that are scored, which are `Long`. `prompt`: stands before them."""
        found, first = [scored.read()], None
        if prompt is not None:
            prompt_ids = self.extras.prompts[answer.prompt_idx]
            found.insert(0, Scores.of_prompt(prompt_ids, prompt))
            first = memoryview(prompt_ids).cast("i")[0]
        short = found[0].short if prompt is None else None  # as in most chunks of a stream

        def all_of(write: Callable[[ScoredToken], bytes], of_first: bytes) -> Any:
            if short is not None:
                return msgspec.Raw(b"[%b]" % b",".join(map(write, short)))

            def pieces() -> Iterator[bytes]:
                before = [] if first is None else [[of_first]]
                parts = (part for scores in found for part in scores.parts())
                return long_list(chain(before, ([b",".join(map(write, part))] for part in parts)))

            return Long(pieces)

        def encoded(token_id: int) -> bytes:
            return encode(self._token(token_id))

        text = encoded if short is not None else cache(encoded)

        def likeliest(one: ScoredToken) -> bytes:
            by_text = {text(one.token_id): one.logprob}
            for other_id, logprob in zip(one.top_ids, one.top_logprobs, strict=True):
                by_text.setdefault(text(other_id), logprob)
            return b"{%b}" % b",".join([b"%b:%b" % entry for entry in by_text.items()])

        def offset(token_id: int) -> bytes:
            offset = self._num_chars.get(answer.index, 0)
            self._num_chars[answer.index] = offset + len(self._tokenizer.token_text(token_id))
            return b"%d" % offset

        return {
            "tokens": all_of(lambda one: text(one.token_id), b"" if first is None else text(first)),
            "token_logprobs": all_of(lambda one: one.logprob, b"null"),
            "top_logprobs": all_of(likeliest, b"null"),
            "text_offset": all_of(lambda one: offset(one.token_id), b"" if first is None else offset(first)),
        }

    def _token(self, token_id: int) -> str:
        return self.extras.token(self._tokenizer, token_id)


def _all_of(answer: Answer) -> TextDelta:
    completion = answer.completion
    return TextDelta(answer, completion.text, answer.scored, completion.finish_reason, completion.token_ids)
