"""Writes answers as OpenAI's JSON objects: whole answers, and the chunks of a stream."""

import secrets
import time
from collections.abc import Sequence
from typing import cast

from lightkv.router.api.generation import Answer, Generation, TextDelta
from lightkv.router.engine.step import TokenLogprobs
from lightkv.router.text.answer_reader import AnswerReader, joined
from lightkv.router.text.tokenizer import Tokenizer
from lightkv.router.text.tool_calls.source import Arguments, CallBegins, Part, Reasoning

from .dialect import Reading
from .protocol import (
    MIN_JSON_LOGPROB,
    AssistantMessage,
    ChatBody,
    ChatChoice,
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
from .tools import ToolCall, ToolCallDelta

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
        return {
            "id": self._id,
            "object": "chat.completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(answer) for answer in generation.answers],
            "usage": usage_of(generation),
        }

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

    def _choice(self, answer: Answer) -> ChatChoice:
        message: AssistantMessage = {"role": "assistant", "content": answer.completion.text}
        finish_reason = answer.completion.finish_reason
        if self._reading is not None:
            reader = self._reading.new_reader()
            parts = [*reader.push(answer.completion.text), *reader.finish()]
            message = _message(parts, self._reading)
            finish_reason = _finish_reason(finish_reason, reader, self._reading)
        return {
            "index": answer.index,
            "message": message,
            "logprobs": self._logprobs(answer.scored) if answer.has_logprobs else None,
            "finish_reason": cast(FinishReason | None, finish_reason),
        }

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
        deltas = _deltas(parts, num_calls, reading)
        if delta.finish_reason is not None or (delta.scored and not deltas):
            deltas.append({})
        chunks = [self._chunk(answer.index, one) for one in deltas]
        if answer.has_logprobs and chunks:
            chunks[0]["choices"][0]["logprobs"] = self._logprobs(delta.scored)
        if delta.finish_reason is not None:
            finish_reason = _finish_reason(delta.finish_reason, reader, reading)
            chunks[-1]["choices"][0]["finish_reason"] = cast(FinishReason, finish_reason)
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


def _message(parts: Sequence[Part], reading: Reading) -> AssistantMessage:
    """Returns the message of a whole answer."""
    reasoning, content, calls = joined(parts)
    message: AssistantMessage = {"role": "assistant", "content": content}
    if not content and (calls or reasoning):
        message["content"] = None
    if reasoning and reading.includes_reasoning:
        message["reasoning_content"] = message["reasoning"] = reasoning
    if calls and reading.is_legacy:
        message["function_call"] = {"name": calls[0][0], "arguments": calls[0][1]}
    elif calls:
        message["tool_calls"] = [_call(name, arguments, reading) for name, arguments in calls]
    return message


def _deltas(parts: Sequence[Part], num_calls: int, reading: Reading) -> list[Delta]:
    """Returns the deltas of a stream for the parts of an answer. `num_calls`: how many calls it had before."""
    deltas: list[Delta] = []
    for part in parts:
        if isinstance(part, CallBegins):
            num_calls += 1
            if reading.is_legacy:
                deltas.append({"function_call": {"name": part.name, "arguments": ""}})
            else:
                begun = cast(ToolCallDelta, {"index": num_calls - 1, **_call(part.name, "", reading)})
                deltas.append({"tool_calls": [begun]})
        elif isinstance(part, Arguments):
            if reading.is_legacy:
                deltas.append({"function_call": {"arguments": part.text}})
            else:
                more: ToolCallDelta = {"index": num_calls - 1, "function": {"arguments": part.text}}
                deltas.append({"tool_calls": [more]})
        elif not isinstance(part, Reasoning):
            deltas.append({"content": part.text})
        elif reading.includes_reasoning:
            deltas.append({"reasoning_content": part.text, "reasoning": part.text})
    return deltas


def _call(name: str, arguments: str, reading: Reading) -> ToolCall:
    identifier = f"call_{secrets.token_hex(12)}"
    if reading.id_length is not None:
        identifier = secrets.token_hex(reading.id_length)[: reading.id_length]
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def _finish_reason(reason: str | None, reader: AnswerReader, reading: Reading) -> str | None:
    if reason != "stop" or not reader.num_calls:
        return reason
    return "function_call" if reading.is_legacy else "tool_calls"


def _all_of(answer: Answer) -> TextDelta:
    return TextDelta(answer, answer.completion.text, answer.scored, answer.completion.finish_reason)


def _finite(logprob: float) -> float:
    return max(logprob, MIN_JSON_LOGPROB)
