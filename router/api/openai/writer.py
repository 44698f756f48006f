"""Writes answers as OpenAI's JSON objects: whole answers, and the chunks of a stream."""

import secrets
import time
from collections.abc import Sequence
from typing import cast

from lightkv.router.api.generation import Answer, Generation, TextDelta
from lightkv.router.engine.step import TokenLogprobs
from lightkv.router.text.answer_reader import AnswerReader
from lightkv.router.text.tokenizer import Tokenizer

from .dialect import Reading
from .divided import deltas_of, divide, finish_reason
from .protocol import (
    MIN_JSON_LOGPROB,
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


class CompletionWriter:
    """Writes the bodies of one plain completion. `prompts`: texts to put before the answers (`echo`), or
    none."""

    divides_answers = False  # the text of an answer is written as it is

    def __init__(self, model: str, tokenizer: Tokenizer, prompts: Sequence[str] = ()) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._num_chars: dict[int, int] = {}  # by answer: characters whose log-probabilities were written
        self._opened: set[int] = set()

    def whole(self, generation: Generation) -> CompletionBody:
        """Returns the body of an answer that is not streamed."""
        choices = [self._choice(_all_of(answer)) for answer in generation.answers]
        return self._body(choices) | {"usage": usage_of(generation)}

    def chunks(self, delta: TextDelta) -> list[CompletionBody]:
        """Returns the chunks of a stream for a delta."""
        return [self._body([self._choice(delta)])]

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

    def _choice(self, delta: TextDelta) -> CompletionChoice:
        answer, text = delta.answer, delta.text
        if self._prompts and answer.index not in self._opened:
            text = self._prompts[answer.prompt_idx] + text
        self._opened.add(answer.index)
        return {
            "index": answer.index,
            "text": text,
            "logprobs": self._logprobs(answer, delta.scored) if answer.has_logprobs else None,
            "finish_reason": cast(FinishReason | None, delta.finish_reason),
        }

    def _logprobs(self, answer: Answer, scored: Scored) -> CompletionLogprobs:
        tokens, offsets, alternatives = [], [], []
        offset = self._num_chars.get(answer.index, 0)
        for token_id, logprobs in scored:
            token = self._token(token_id)
            top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
            by_token = {token: _finite(logprobs.logprob)}
            for other_id, logprob in top:
                by_token.setdefault(self._token(other_id), _finite(logprob))
            tokens.append(token)
            offsets.append(offset)
            alternatives.append(by_token)
            offset += len(token)
        self._num_chars[answer.index] = offset
        return {
            "tokens": tokens,
            "token_logprobs": [_finite(logprobs.logprob) for _, logprobs in scored],
            "top_logprobs": alternatives,
            "text_offset": offsets,
        }

    def _token(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)


class ChatWriter:
    """Writes the bodies of one chat completion. `reading`: how answers are divided into content, reasoning and
    calls; None writes all text as content."""

    def __init__(self, model: str, tokenizer: Tokenizer, reading: Reading | None = None) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._reading = reading
        self._id = f"chatcmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._opened: set[int] = set()
        self._readers: dict[int, AnswerReader] = {}  # of streams, by answer
        self.divides_answers = reading is not None

    def whole(self, generation: Generation) -> ChatBody:
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
        if self._reading is not None:
            return [*chunks, *self._divided(delta, self._reading)]
        chunk = self._chunk(index, {"content": delta.text} if delta.text or delta.scored else {})
        chunk["choices"][0]["logprobs"] = self._logprobs(delta.scored) if answer.has_logprobs else None
        chunk["choices"][0]["finish_reason"] = cast(FinishReason | None, delta.finish_reason)
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
        if delta.finish_reason is not None or (delta.scored and not deltas):
            deltas.append({})
        chunks = [self._chunk(answer.index, one) for one in deltas]
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
        text = self._tokenizer.token_text(token_id)
        known = self._tokenizer.token_bytes(token_id) if self._tokenizer.is_byte_level else b""
        return {"token": text, "logprob": _finite(logprob), "bytes": list(known or text.encode())}


def usage_of(generation: Generation) -> Usage:
    """Returns the token counts so far."""
    prompt, completion = generation.num_prompt_tokens, generation.num_completion_tokens
    cached = generation.num_cached_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": None if cached is None else {"cached_tokens": cached},
    }


def _all_of(answer: Answer) -> TextDelta:
    return TextDelta(answer, answer.completion.text, answer.scored, answer.completion.finish_reason)


def _finite(logprob: float) -> float:
    return max(logprob, MIN_JSON_LOGPROB)
