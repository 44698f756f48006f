"""Writes answers as OpenAI's JSON objects: whole answers, and the chunks of a stream."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import cast

from lightkv.router.api.generation import Answer, Answered, TextDelta
from lightkv.router.engine.step import PromptLogprobs, TokenLogprobs
from lightkv.router.text.answer_reader import AnswerReader
from lightkv.router.text.tokenizer import Tokenizer

from .dialect import Reading
from .divided import deltas_of, divide, finish_reason
from .extras import Extras, PromptTokens, finite
from .protocol import (
    ChatBody,
    ChatChunk,
    ChatLogprobs,
    CompletionBody,
    CompletionChoice,
    CompletionLogprobs,
    Delta,
    FinishReason,
    TopLogprob,
    Usage,
)

Scored = Sequence[tuple[int, TokenLogprobs]]
Scores = Mapping[int, PromptLogprobs]  # of the prompts, by their numbers


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
            choice["prompt_logprobs"] = _scored_prompt(
                self.extras, self._tokenizer, answer.prompt_idx, scores
            )
        return choice

    def _logprobs(self, answer: Answer, scored: Scored, prompt: PromptLogprobs | None) -> CompletionLogprobs:
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


class ChatWriter:
    """Writes the bodies of one chat completion. `reading`: how answers are divided into content, reasoning and
    calls; None writes all text as content. `extras`: what answers have beside their text."""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        reading: Reading | None = None,
        extras: Extras | None = None,
    ) -> None:
        self.extras = extras or Extras()
        self._model = model
        self._tokenizer = tokenizer
        self._reading = reading
        self._id = f"chatcmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._opened: set[int] = set()
        self._readers: dict[int, AnswerReader] = {}  # of streams, by answer
        self.divides_answers = reading is not None

    def whole(self, generation: Answered) -> ChatBody:
        """Returns the body of an answer that is not streamed."""
        body: ChatBody = {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [
                {
                    "index": answer.index,
                    "message": {"role": "assistant", "content": answer.completion.text},
                    "logprobs": self._logprobs(answer.scored) if answer.has_logprobs else None,
                    "finish_reason": cast(FinishReason | None, answer.completion.finish_reason),
                }
                for answer in generation.answers
            ],
            "usage": usage_of(generation),
        }
        if self.extras.token_ids:
            body["prompt_token_ids"] = self.extras.prompt_ids(0)
            for choice, answer in zip(body["choices"], generation.answers, strict=True):
                choice["token_ids"] = list(answer.completion.token_ids)
        if self.extras.prompt_logprobs:
            scores = prompt_scores(generation)
            body["prompt_logprobs"] = _scored_prompt(self.extras, self._tokenizer, 0, scores)
        if self._reading is not None:
            for choice in body["choices"]:
                divide(choice, self._reading)
        return body

    def chunks(self, delta: TextDelta) -> list[ChatChunk]:
        """Returns the chunks of a stream for a delta. The first chunk of each answer has its role."""
        answer, index = delta.answer, delta.answer.index
        chunks = []
        if index not in self._opened:
            self._opened.add(index)
            chunks.append(self._chunk(index, {"role": "assistant", "content": ""}))
            if self.extras.token_ids:
                chunks[0]["prompt_token_ids"] = self.extras.prompt_ids(0)
        if self._reading is not None:
            return [*chunks, *self._divided(delta, self._reading)]
        chunk = self._chunk(index, {"content": delta.text} if delta.text or delta.scored else {})
        chunk["choices"][0]["logprobs"] = self._logprobs(delta.scored) if answer.has_logprobs else None
        chunk["choices"][0]["finish_reason"] = cast(FinishReason | None, delta.finish_reason)
        if self.extras.token_ids:
            chunk["choices"][0]["token_ids"] = list(delta.token_ids)
        return [*chunks, chunk]

    def _divided(self, delta: TextDelta, reading: Reading) -> list[ChatChunk]:
        """Returns the chunks of a delta, one for each of its parts. The first has the log-probabilities, and
        the end of an answer is a chunk of its own."""
        answer = delta.answer
        reader = self._readers.get(answer.index)
        if reader is None:
            reader = self._readers[answer.index] = reading.new_reader()
        num_calls = reader.num_kept_calls
        parts = reader.push(delta.text)
        if delta.finish_reason is not None:
            parts += reader.finish()
        deltas = deltas_of(parts, num_calls, reading)
        has_ids = self.extras.token_ids and bool(delta.token_ids)
        if delta.finish_reason is not None or ((delta.scored or has_ids) and not deltas):
            deltas.append({})
        chunks = [self._chunk(answer.index, one) for one in deltas]
        if has_ids and chunks:
            chunks[0]["choices"][0]["token_ids"] = list(delta.token_ids)
        if answer.has_logprobs and chunks:
            chunks[0]["choices"][0]["logprobs"] = self._logprobs(delta.scored)
        if delta.finish_reason is not None:
            reason = finish_reason(delta.finish_reason, reader, reading)
            chunks[-1]["choices"][0]["finish_reason"] = reason
        return chunks

    def usage_chunk(self, usage: Usage) -> ChatChunk:
        """Returns the last chunk of a stream, which has the token counts."""
        chunk = self._chunk(0, {})
        return chunk | {"choices": [], "usage": usage}

    def _chunk(self, index: int, delta: Delta) -> ChatChunk:
        return {
            "id": self._id,
            "object": "chat.completion.chunk",
            "created": self._created,
            "model": self._model,
            "choices": [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}],
        }

    def _logprobs(self, scored: Scored) -> ChatLogprobs:
        return {
            "content": [
                {
                    **self._top(token_id, logprobs.logprob),
                    "top_logprobs": [
                        self._top(other_id, logprob)
                        for other_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
                    ],
                }
                for token_id, logprobs in scored
            ]
        }

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        text = self.extras.token(self._tokenizer, token_id)
        known = self._tokenizer.token_bytes(token_id) if self._tokenizer.is_byte_level else b""
        return {"token": text, "logprob": finite(logprob), "bytes": list(known or text.encode())}


def usage_of(generation: Answered) -> Usage:
    """Returns the token counts so far."""
    prompt, completion = generation.num_prompt_tokens, generation.num_completion_tokens
    cached = generation.num_cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


def prompt_scores(generation: Answered) -> Scores:
    """Returns the log-probabilities of each prompt that has them; one of its answers brought them."""
    found = [(answer.prompt_idx, answer.completion.prompt_logprobs) for answer in generation.all_answers]
    return {prompt_idx: scores for prompt_idx, scores in found if scores is not None}


def _scored_prompt(
    extras: Extras, tokenizer: Tokenizer, prompt_idx: int, scores: Scores
) -> list[PromptTokens | None] | None:
    found = scores.get(prompt_idx)
    return None if found is None else extras.scored_prompt(tokenizer, prompt_idx, found)


def _all_of(answer: Answer) -> TextDelta:
    completion = answer.completion
    return TextDelta(answer, completion.text, answer.scored, completion.finish_reason, completion.token_ids)
