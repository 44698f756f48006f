"""Writes the answers of a chat as OpenAI's messages and deltas: whole, and as chunks of a stream. Where a chat
has tools, or the model reasons, an answer is divided into content, reasoning and calls."""

import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import repeat
from typing import Any

import msgspec

from lightkv.router.text.answer_reader import AnswerReader, joined
from lightkv.router.text.detokenizer import StopChecker
from lightkv.router.text.tokenizer import Tokenizer
from lightkv.router.text.tool_calls.source import Arguments, CallBegins, Part, Reasoning

from .extras import Extras, prompt_scores
from .generation import Answer, Generation, TextDelta, usage_of
from .pieces import Long, Object, ScoredToken, Scores, encode, head_of, in_pieces, long_list


@dataclass(frozen=True)
class Reading:
    """How answers to one request are read. `new_reader`: makes the reader of one answer, which looks for stop
    strings. `shown_ids`: special tokens that it has to see. `id_length`: that of a call's id, if the model
    insists on one."""

    new_reader: Callable[[StopChecker], AnswerReader]
    shown_ids: frozenset[int] = frozenset()
    includes_reasoning: bool = True
    id_length: int | None = None


class ChatWriter:
    """Writes the bodies of one chat completion. `reading`: how answers are divided into content, reasoning and
    calls; None writes all text as content. `extras`: what answers have beside their text."""

    def __init__(
        self, model: str, tokenizer: Tokenizer, reading: Reading | None = None, extras: Extras | None = None
    ) -> None:
        self.extras = extras or Extras()
        self._tokenizer = tokenizer
        self._reading = reading
        self._head = head_of("chatcmpl", model)
        self._opened: set[int] = set()
        self._num_calls: Counter[int] = Counter()  # those that streams have begun, by answer
        self.divides_answers = reading is not None

    def whole(self, generation: Generation) -> Iterator[bytes]:
        """Yields the body of an answer that is not streamed."""
        choices = Long(lambda: long_list(in_pieces(self.choice(one)) for one in generation.answers))
        body: Object = {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage_of(generation),
        }
        if self.extras.token_ids:
            body["prompt_token_ids"] = self.extras.prompt_ids(0)
        if self.extras.prompt_logprobs:
            scores = prompt_scores(generation).get(0)
            body["prompt_logprobs"] = self.extras.scored_prompt(self._tokenizer, 0, scores)
        return in_pieces(body)

    def choice(self, answer: Answer) -> Object:
        """Returns a whole answer as a choice."""
        completion, reading = answer.completion, self._reading
        choice: Object = {
            "index": answer.index,
            "message": {"role": "assistant", "content": completion.text},
            "logprobs": self.logprobs(answer.scored) if answer.has_logprobs else None,
            "finish_reason": completion.finish_reason,
        }
        if reading is not None:
            choice["message"] = message_of(completion.parts, reading)
            choice["finish_reason"] = finish_reason(completion.finish_reason, completion.parts)
        if self.extras.token_ids:
            choice["token_ids"] = list(completion.token_ids)
        return choice

    def logprobs(self, scored: Scores | None) -> Object:
        """Returns the log-probabilities of tokens, whose list is `Long`."""
        found = scored or Scores()
        content: Any = Long(lambda: long_list(map(self._entries, found.parts())))
        if (short := found.short) is not None:  # as in most chunks of a stream
            content = msgspec.Raw(b"[%b]" % b"".join(self._entries(short)))
        return {"content": content}

    def chunks(self, delta: TextDelta) -> list[Object]:
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
        chunk["choices"][0]["logprobs"] = self.logprobs(delta.scored) if answer.has_logprobs else None
        chunk["choices"][0]["finish_reason"] = delta.finish_reason
        if self.extras.token_ids:
            chunk["choices"][0]["token_ids"] = list(delta.token_ids)
        return [*chunks, chunk]

    def _divided(self, delta: TextDelta, reading: Reading) -> list[Object]:
        """Returns the chunks of a delta, one for each of its parts. The first has the log-probabilities, and
        the end of an answer is a chunk of its own."""
        answer = delta.answer
        deltas = deltas_of(delta.parts, self._num_calls[answer.index], reading)
        self._num_calls[answer.index] += sum(isinstance(part, CallBegins) for part in delta.parts)
        has_ids = self.extras.token_ids and bool(delta.token_ids)
        if delta.finish_reason is not None or ((delta.scored or has_ids) and not deltas):
            deltas.append({})
        chunks = [self._chunk(answer.index, one) for one in deltas]
        if has_ids and chunks:
            chunks[0]["choices"][0]["token_ids"] = list(delta.token_ids)
        if answer.has_logprobs and chunks:
            chunks[0]["choices"][0]["logprobs"] = self.logprobs(delta.scored)
        if delta.finish_reason is not None:
            reason = finish_reason(delta.finish_reason, answer.completion.parts)
            chunks[-1]["choices"][0]["finish_reason"] = reason
        return chunks

    def usage_chunk(self, usage: Object) -> Object:
        """Returns the last chunk of a stream, which has the token counts."""
        return self._chunk(0, {}) | {"choices": [], "usage": usage}

    def _chunk(self, index: int, delta: Object) -> Object:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice]}

    def _entries(self, part: list[ScoredToken]) -> list[bytes]:
        """Returns the JSON of several tokens and of the likeliest in their places."""
        around = cache(self._around) if len(part) > 1 else self._around

        def top(token_id: int, logprob: bytes, begins: bool, is_hidden: bool = False) -> bytes:
            before, after = around(token_id, begins, is_hidden)
            return before + logprob + after

        entries = []
        for token_id, logprob, top_ids, top_logprobs, (_, begins, is_hidden) in part:
            others = zip(top_ids, top_logprobs, repeat(begins), strict=False)
            likeliest = b",".join([top(*other) + b"}" for other in others])
            entries.append(
                b'%b,"top_logprobs":[%b]}' % (top(token_id, logprob, begins, is_hidden), likeliest)
            )
        return [b",".join(entries)]

    def _around(self, token_id: int, begins: bool, is_hidden: bool) -> tuple[bytes, bytes]:
        """Returns what stands before and after a token's log-probability. A token that is hidden has no bytes,
        so that the bytes of all tokens are those of the text."""
        tokenizer = self._tokenizer
        known = tokenizer.token_bytes(token_id, begins)
        if token_id in tokenizer.special_ids and not is_hidden:
            known = tokenizer.token_text(token_id).encode()
        text = self.extras.token(tokenizer, token_id, begins)
        return b'{"token":%b,"logprob":' % encode(text), b',"bytes":%b' % encode(list(known))


def message_of(parts: Sequence[Part], reading: Reading) -> Object:
    """Returns the message of a whole answer. Its content is null if there are only calls or reasoning, which
    has two names, as on other servers."""
    reasoning, content, calls = joined(parts)
    message: Object = {"role": "assistant", "content": content}
    if not content and (calls or reasoning):
        message["content"] = None
    if reasoning and reading.includes_reasoning:
        message["reasoning_content"] = message["reasoning"] = reasoning
    if calls:
        message["tool_calls"] = [_call(name, arguments, reading) for name, arguments in calls]
    return message


def deltas_of(parts: Sequence[Part], num_calls: int, reading: Reading) -> list[Object]:
    """Returns the deltas of a stream for the parts of an answer. `num_calls`: how many calls it had before. The
    first delta of a call has its id, type and name, the others more of its arguments."""
    deltas: list[Object] = []
    for part in parts:
        if isinstance(part, CallBegins):
            num_calls += 1
            deltas.append({"tool_calls": [{"index": num_calls - 1, **_call(part.name, "", reading)}]})
        elif isinstance(part, Arguments):
            more = {"index": num_calls - 1, "function": {"arguments": part.text}}
            deltas.append({"tool_calls": [more]})
        elif not isinstance(part, Reasoning):
            deltas.append({"content": part.text})
        elif reading.includes_reasoning:
            deltas.append({"reasoning_content": part.text, "reasoning": part.text})
    return deltas


def _call(name: str, arguments: str, reading: Reading) -> Object:
    identifier = f"call_{secrets.token_hex(12)}"
    if reading.id_length is not None:
        identifier = secrets.token_hex(reading.id_length)[: reading.id_length]
    return {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}


def finish_reason(reason: str | None, parts: Sequence[Part]) -> str | None:
    """Returns why an answer ended: an answer with calls does not end by "stop". `parts`: all of the answer."""
    if reason != "stop" or not any(isinstance(part, CallBegins) for part in parts):
        return reason
    return "tool_calls"
