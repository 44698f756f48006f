"""Answers as OpenAI's JSON: whole, and in the chunks of a stream. Knows text and tokens; knows no HTTP."""

import secrets
import time
from collections.abc import Sequence
from typing import cast

from lightkv.router.api.generation import Answer, Generation, TextDelta
from lightkv.router.engine.step import TokenLogprobs
from lightkv.router.text.tokenizer import Tokenizer

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
    """The bodies of one plain completion. `prompts`: texts to put before the answers (`echo`), or none."""

    def __init__(self, model: str, tokenizer: Tokenizer, prompts: Sequence[str] = ()) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._id = f"cmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._num_chars: dict[int, int] = {}  # by answer, what its log-probabilities have covered
        self._opened: set[int] = set()

    def whole(self, generation: Generation) -> CompletionBody:
        """The answer to a request that does not stream."""
        choices = [self._choice(_all_of(answer)) for answer in generation.answers]
        return self._body(choices) | {"usage": usage_of(generation)}

    def chunks(self, piece: TextDelta) -> list[CompletionBody]:
        """A piece of an answer, in a stream."""
        return [self._body([self._choice(piece)])]

    def counts(self, usage: Usage) -> CompletionBody:
        """A stream's last chunk."""
        return self._body([]) | {"usage": usage}

    def _body(self, choices: list[CompletionChoice]) -> CompletionBody:
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": choices,
        }

    def _choice(self, piece: TextDelta) -> CompletionChoice:
        answer, text = piece.answer, piece.text
        if self._prompts and answer.index not in self._opened:
            text = self._prompts[answer.prompt_idx] + text
        self._opened.add(answer.index)
        return {
            "index": answer.index,
            "text": text,
            "logprobs": self._logprobs(answer, piece.scored) if answer.has_logprobs else None,
            "finish_reason": cast(FinishReason | None, piece.finish_reason),
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
    """The bodies of one chat completion."""

    def __init__(self, model: str, tokenizer: Tokenizer) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._id = f"chatcmpl-{secrets.token_hex(16)}"
        self._created = int(time.time())
        self._opened: set[int] = set()

    def whole(self, generation: Generation) -> ChatBody:
        """The answer to a request that does not stream."""
        return {
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

    def chunks(self, piece: TextDelta) -> list[ChatChunk]:
        """A piece of an answer, in a stream; before its first one that says who speaks."""
        answer, index = piece.answer, piece.answer.index
        chunks = []
        if index not in self._opened:
            self._opened.add(index)
            chunks.append(self._chunk(index, {"role": "assistant", "content": ""}))
        chunk = self._chunk(index, {"content": piece.text} if piece.text or piece.scored else {})
        chunk["choices"][0]["logprobs"] = self._logprobs(piece.scored) if answer.has_logprobs else None
        chunk["choices"][0]["finish_reason"] = cast(FinishReason | None, piece.finish_reason)
        return [*chunks, chunk]

    def counts(self, usage: Usage) -> ChatChunk:
        """A stream's last chunk."""
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
    """The counts so far."""
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
