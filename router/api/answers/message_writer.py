"""Writes an answer as a message of Anthropic's Messages API: whole, and as a sequence of events.

It reads what `ChatWriter` writes, so that texts, tool calls and reasoning are the same in both APIs.
"""

import secrets
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any

from lightkv.router.text.tool_calls.json_call import as_object

from .chat_writer import ChatWriter
from .errors import message_error
from .generation import Generation, TextDelta, usage_of
from .pieces import Object, in_pieces

SIGNATURE = "lightkv"  # of each thinking; clients want one, and the service takes any back
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# By the type of a block: the type of its deltas, and the field that has their text.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


class MessageWriter:
    """Writes the body of one message. `chat`: writes the same answer as a chat completion."""

    def __init__(self, model: str, chat: ChatWriter) -> None:
        self._model = model
        self._chat = chat
        self._id = f"msg_{secrets.token_hex(16)}"

    def whole(self, generation: Generation) -> Iterator[bytes]:
        """Returns the pieces of the body of a message that is not streamed."""
        choice = self._chat.choice(generation.answers[0])
        message, blocks = choice["message"], []
        if thinking := message.get("reasoning_content"):
            blocks.append({"type": "thinking", "thinking": thinking, "signature": SIGNATURE})
        if text := message.get("content"):
            blocks.append({"type": "text", "text": text})
        for call in message.get("tool_calls") or ():
            given = as_object(call["function"]["arguments"]) or {}  # a call may have been cut
            blocks.append(_tool_use(call) | {"input": given})
        return in_pieces(self.body(generation, blocks, choice["finish_reason"]))

    def events(self, generation: Generation) -> "MessageEvents":
        """Returns the writer of the stream's events."""
        return MessageEvents(self, self._chat, generation)

    def body(self, generation: Generation, blocks: list[Object], finish_reason: str | None) -> Object:
        """Returns the message with these blocks. `finish_reason`: the chat's; None of a message that begins."""
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": blocks,
            **end_of(generation, finish_reason),
            "usage": _usage(generation),
        }


class MessageEvents:
    """Writes the events of one streamed message, in Anthropic's order.

        message_start, ping, { block start, { deltas }, block stop }, message_delta, message_stop

    One block is open at a time: a text, a thinking or a use of a tool.
    """

    def __init__(self, writer: MessageWriter, chat: ChatWriter, generation: Generation) -> None:
        self._writer = writer
        self._chat = chat
        self._generation = generation
        self._kind: str | None = None  # that of the open block
        self._num_closed = 0
        self._finish_reason: str | None = None

    def begin(self) -> Iterable[bytes]:
        """Returns the events before the first delta. What the cache has of the prompt is not known yet."""
        message = self._writer.body(self._generation, [], None)
        return chain(_event("message_start", {"message": message}), _event("ping", {}))

    def delta(self, delta: TextDelta) -> Iterable[bytes]:
        """Returns the events of a delta; none if it has nothing to show."""
        if not (delta.text or delta.finish_reason):
            return ()
        events: list[Iterable[bytes]] = []
        for chunk in self._chat.chunks(delta):
            choice = chunk["choices"][0]
            self._finish_reason = choice["finish_reason"] or self._finish_reason
            gained = choice["delta"]
            if thinking := gained.get("reasoning_content"):
                events += self._add({"type": "thinking", "thinking": "", "signature": ""}, thinking)
            if text := gained.get("content"):
                events += self._add({"type": "text", "text": ""}, text)
            for call in gained.get("tool_calls") or ():
                if "id" in call:
                    events += [*self._close(), *self._open(_tool_use(call))]
                if text := call["function"].get("arguments"):
                    events.append(self._delta(text))
        return chain.from_iterable(events)

    def end(self) -> Iterable[bytes]:
        """Returns the events after the last delta."""
        reason = self._finish_reason or "stop"
        ended = {"delta": end_of(self._generation, reason), "usage": _usage(self._generation)}
        last = [_event("message_delta", ended), _event("message_stop", {})]
        return chain.from_iterable([*self._close(), *last])

    def fail(self, status: int, error: str) -> Iterable[bytes]:
        """Returns the last event of an answer that could not be completed."""
        return _event("error", message_error(status, error)[1])

    def _add(self, block: Object, text: str) -> list[Iterable[bytes]]:
        """Returns the events of a text, for which `block` is opened if another kind is open."""
        opened = [] if self._kind == block["type"] else [*self._close(), *self._open(block)]
        return [*opened, self._delta(text)]

    def _open(self, block: Object) -> list[Iterable[bytes]]:
        self._kind = block["type"]
        return [_event("content_block_start", {"index": self._num_closed, "content_block": block})]

    def _delta(self, text: str) -> Iterable[bytes]:
        kind, name = _DELTAS[self._kind or "text"]
        return _event("content_block_delta", {"index": self._num_closed, "delta": {"type": kind, name: text}})

    def _close(self) -> list[Iterable[bytes]]:
        """Returns the events that end the open block, if there is one."""
        if self._kind is None:
            return []
        place = {"index": self._num_closed}
        events = [_event("content_block_stop", place)]
        if self._kind == "thinking":
            signed = {"type": "signature_delta", "signature": SIGNATURE}
            events.insert(0, _event("content_block_delta", place | {"delta": signed}))
        self._kind = None
        self._num_closed += 1
        return events


def end_of(generation: Generation, finish_reason: str | None) -> Object:
    """Returns why a message has ended. `finish_reason`: the chat's, None of a message that has not."""
    stop = generation.answers[0].completion.stop_string
    if finish_reason == "stop" and stop is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": stop}
    return {"stop_reason": _STOP_REASONS.get(finish_reason or "", finish_reason), "stop_sequence": None}


def _tool_use(call: dict[str, Any]) -> Object:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _usage(generation: Generation) -> Object:
    """Returns the token counts so far. Those of the input leave out the cached ones, if these are reported."""
    usage = usage_of(generation)
    counts: Object = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    if (details := usage["prompt_tokens_details"]) is not None:
        cached = details["cached_tokens"]
        counts["input_tokens"] -= cached
        counts |= {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
    return counts | {name: usage[name] for name in ("interruptions", "max_tokens") if name in usage}


def _event(kind: str, fields: Object) -> Iterable[bytes]:
    return chain([b"event: %b\ndata: " % kind.encode()], in_pieces({"type": kind, **fields}), [b"\n\n"])
