"""Writes the answers of a plain completion as OpenAI's JSON objects: whole, and as chunks of a stream."""

import secrets
import time
from collections.abc import Sequence
from typing import cast

from lightkv.router.engine.step import PromptLogprobs, TokenLogprobs
from lightkv.router.text.tokenizer import Tokenizer

from .bodies import CompletionBody, CompletionChoice, CompletionLogprobs, FinishReason, Usage
from .extras import Extras, Scores, finite, prompt_scores
from .generation import Answer, Answered, TextDelta, usage_of


class CompletionWriter:
    """Writes the bodies of one plain completion. `prompts`: texts to put before the answers (`echo`), or
    none. `extras`: what answers have beside their text."""

    divides_answers = False  # the text of an answer is written as it is

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        prompts: Sequence[str] = (),
        extras: Extras | None = None,
    ) -> None:
        self.extras = extras or Extras()
        self._model = model
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._num_chars: dict[int, int] = {}  # by answer: characters whose log-probabilities were written
        self._opened: set[int] = set()

    def whole(self, generation: Answered) -> CompletionBody:
        """Returns the body of an answer that is not streamed."""
        scores = prompt_scores(generation)
        choices = [self._choice(_all_of(answer), scores) for answer in generation.answers]
        return self._body(choices) | {"usage": usage_of(generation)}

    def chunks(self, delta: TextDelta) -> list[CompletionBody]:
        """Returns the chunks of a stream for a delta."""
        scores = delta.answer.completion.prompt_logprobs if self.extras.echoes_logprobs else None
        return [
            self._body([self._choice(delta, {} if scores is None else {delta.answer.prompt_idx: scores})])
        ]

    def usage_chunk(self, usage: Usage) -> CompletionBody:
        """Returns the last chunk of a stream, which has the token counts."""
        return self._body([]) | {"usage": usage}

    def _body(self, choices: list[CompletionChoice]) -> CompletionBody:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _choice(self, delta: TextDelta, scores: Scores) -> CompletionChoice:
        answer, text = delta.answer, delta.text
        opens = answer.index not in self._opened
        self._opened.add(answer.index)
        if self._prompts and opens:
            text = self._prompts[answer.prompt_idx] + text
        logprobs = None
        if answer.has_logprobs:
            of_prompt = scores.get(answer.prompt_idx) if opens and self.extras.echoes_logprobs else None
            logprobs = self._logprobs(answer, delta.scored, of_prompt)
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
            choice["prompt_logprobs"] = self.extras.scored_prompt(self._tokenizer, answer.prompt_idx, scores)
        return choice

    def _logprobs(
        self, answer: Answer, scored: Sequence[tuple[int, TokenLogprobs]], prompt: PromptLogprobs | None
    ) -> CompletionLogprobs:
        entries: list[tuple[int, TokenLogprobs | None]] = list(scored)
        if prompt is not None:
            first, *ids = self.extras.prompt_ids(answer.prompt_idx)
            found = [logprobs for logprobs, _ in prompt.per_token()]
            entries = [(first, None), *zip(ids, found, strict=True), *scored]
        offset = self._num_chars.get(answer.index, 0)
        offsets, alternatives = [], []
        for token_id, logprobs in entries:
            offsets.append(offset)
            offset += len(self._tokenizer.token_text(token_id))
            alternatives.append(None if logprobs is None else self._alternatives(token_id, logprobs))
        self._num_chars[answer.index] = offset
        return {
            "tokens": [self._token(token_id) for token_id, _ in entries],
            "token_logprobs": [None if one is None else finite(one.logprob) for _, one in entries],
            "top_logprobs": alternatives,
            "text_offset": offsets,
        }

    def _alternatives(self, token_id: int, logprobs: TokenLogprobs) -> dict[str, float]:
        by_token = {self._token(token_id): finite(logprobs.logprob)}
        for other_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
            by_token.setdefault(self._token(other_id), finite(logprob))
        return by_token

    def _token(self, token_id: int) -> str:
        return self.extras.token(self._tokenizer, token_id)


def _all_of(answer: Answer) -> TextDelta:
    completion = answer.completion
    return TextDelta(answer, completion.text, answer.scored, completion.finish_reason, completion.token_ids)
