"""Writes an answer as a response of OpenAI's Responses API: whole, and as a sequence of events.

It reads what `ChatWriter` writes, so that texts, tool calls and reasoning are the same in both APIs.
"""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

from .chat_writer import ChatWriter
from .generation import Generation, TextDelta, usage_of
from .pieces import Object, Scores, in_pieces


class ResponseWriter:
    """Writes the body of one response. `repeated`: the fields of the request that it repeats. `chat`: writes
    the same answer as a chat completion."""

    def __init__(self, repeated: Mapping[str, Any], model: str, chat: ChatWriter) -> None:
        self._repeated = repeated
        self._chat = chat
        self._model = model
        self._id = f"resp_{secrets.token_hex(16)}"
        self._created = int(time.time())

    def whole(self, generation: Generation) -> Iterator[bytes]:
        """Returns the pieces of the body of a response that is not streamed."""
        choice = self._chat.choice(generation.answers[0])
        message, logprobs = choice["message"], choice["logprobs"] and choice["logprobs"]["content"]
        items = []
        if reasoning := message.get("reasoning_content"):
            items.append(finished(_reasoning_item(), reasoning))
        calls = message.get("tool_calls") or ()
        if message.get("content") or not calls:
            items.append(finished(_message_item(), message.get("content") or "", logprobs))
        for call in calls:
            function = call["function"]
            items.append(finished(_call_item(call["id"], function["name"]), function["arguments"]))
        if choice["finish_reason"] == "length":
            items[-1]["status"] = "incomplete"
        return in_pieces(self.body(items, choice["finish_reason"], generation))

    def events(self, generation: Generation) -> "ResponseEvents":
        """Returns the writer of the stream's events."""
        return ResponseEvents(self, self._chat, generation)

    def body(
        self,
        items: list[Object],
        finish_reason: str | None,
        generation: Generation | None = None,
        error: dict[str, str] | None = None,
    ) -> Object:
        """Returns the response with these items. `generation`: its token counts are the usage. `error`: why the
        answer failed, as a code and a message."""
        status = "completed" if finish_reason is not None else "in_progress"
        details = None
        if finish_reason == "length":
            status, details = "incomplete", {"reason": "max_output_tokens"}
        if error is not None:
            status = "failed"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            **self._repeated,
            "background": False,
            "error": error,
            "incomplete_details": details,
            "model": self._model,
            "output": items,
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None if generation is None else _usage(generation),
        }


class ResponseEvents:
    """Writes the events of one streamed response, in OpenAI's order.

        created, in_progress, { item added, { deltas }, done, item done }, completed

    One item is open at a time: a message, a reasoning or a function call.
    """

    def __init__(self, writer: ResponseWriter, chat: ChatWriter, generation: Generation) -> None:
        self._writer = writer
        self._chat = chat
        self._generation = generation
        self._items: list[Object] = []  # those that are complete
        self._item: Object | None = None  # the one that is open
        self._call_idx: int | None = None  # that of the open function call
        self._pieces: list[str] = []
        self._scored = Scores()
        self._finish_reason: str | None = None
        self._num_events = 0

    def begin(self) -> Iterable[bytes]:
        """Returns the events before the first delta."""
        response = self._writer.body([], None)
        created = self._event("response.created", {"response": response})
        return chain(created, self._event("response.in_progress", {"response": response}))

    def delta(self, delta: TextDelta) -> Iterable[bytes]:
        """Returns the events of a delta; none if it has nothing to show."""
        if not (delta.text or delta.scored or delta.finish_reason):
            return ()
        events: list[Iterable[bytes]] = []
        for chunk in self._chat.chunks(delta):
            choice = chunk["choices"][0]
            self._finish_reason = choice["finish_reason"] or self._finish_reason
            gained = choice["delta"]
            reasoning, calls = gained.get("reasoning_content"), gained.get("tool_calls") or ()
            if reasoning:
                events.append(self._add("reasoning", reasoning))
            events += map(self._add_call, calls)
            is_text = not reasoning and not calls  # only texts have log-probabilities here
            scored = delta.scored if choice.get("logprobs") else None
            if gained.get("content") or (is_text and choice.get("logprobs")):
                events.append(self._add("message", gained.get("content") or "", scored))
        return chain.from_iterable(events)

    def end(self) -> Iterable[bytes]:
        """Returns the events after the last delta."""
        empty = () if self._item is not None or self._items else self._open(_message_item())
        closed = chain(empty, self._close())
        kind = "response.incomplete" if self._finish_reason == "length" else "response.completed"
        response = self._writer.body(self._items, self._finish_reason or "stop", self._generation)
        return chain(closed, self._event(kind, {"response": response}))

    def fail(self, status: int, error: str) -> Iterable[bytes]:
        """Returns the last event of an answer that could not be completed."""
        code = "invalid_prompt" if status == 400 else "server_error"  # those of OpenAI's client
        described = {"code": code, "message": error}
        response = self._writer.body(self._items, None, self._generation, described)
        return self._event("response.failed", {"response": response})

    def _add(self, kind: str, text: str, scored: Scores | None = None) -> Iterable[bytes]:
        """Adds text to the open item, which is made if another kind is open."""
        opened: Iterable[bytes] = ()
        if self._item is None or self._item["type"] != kind:
            item = _message_item() if kind == "message" else _reasoning_item()
            opened = chain(self._close(), self._open(item))
        self._pieces.append(text)
        self._scored.extend(scored or Scores())
        fields: Object = {**self._place(), "content_index": 0, "delta": text}
        if kind == "reasoning":
            return chain(opened, self._event("response.reasoning_text.delta", fields))
        fields["logprobs"] = self._chat.logprobs(scored)["content"]
        return chain(opened, self._event("response.output_text.delta", fields))

    def _add_call(self, call: Mapping[str, Any]) -> Iterable[bytes]:
        opened: Iterable[bytes] = ()
        function = call["function"]
        if self._item is None or self._item["type"] != "function_call" or self._call_idx != call["index"]:
            item = _call_item(call["id"], function["name"])
            opened = chain(self._close(), self._open(item))
            self._call_idx = call["index"]
        arguments = function.get("arguments")
        if not arguments:
            return opened
        self._pieces.append(arguments)
        fields = {**self._place(), "delta": arguments}
        return chain(opened, self._event("response.function_call_arguments.delta", fields))

    def _open(self, item: Object) -> Iterable[bytes]:
        self._item, self._pieces, self._scored = item, [], Scores()
        added = self._event("response.output_item.added", {"output_index": len(self._items), "item": item})
        if item["type"] == "function_call":
            return added
        part = {"content_index": 0, "part": _part(item, "", [])}
        return chain(added, self._event("response.content_part.added", self._place() | part))

    def _close(self) -> Iterable[bytes]:
        """Returns the events that end the open item, if there is one."""
        item = self._item
        if item is None:
            return ()
        text, logprobs = "".join(self._pieces), None
        if item["type"] == "message":
            logprobs = self._chat.logprobs(self._scored)["content"]
        done = finished(item, text, logprobs, self._finish_reason)
        place = self._place()
        if item["type"] == "function_call":
            fields = place | {"name": item["name"], "arguments": text}
            events = [self._event("response.function_call_arguments.done", fields)]
        else:
            place |= {"content_index": 0}
            if item["type"] == "message":
                fields = place | {"text": text, "logprobs": logprobs}
                events = [self._event("response.output_text.done", fields)]
            else:
                events = [self._event("response.reasoning_text.done", place | {"text": text})]
            events.append(self._event("response.content_part.done", place | {"part": done["content"][0]}))
        closed = {"output_index": len(self._items), "item": done}
        events.append(self._event("response.output_item.done", closed))
        self._items.append(done)
        self._item = self._call_idx = None
        return chain.from_iterable(events)

    def _place(self) -> Object:
        assert self._item is not None
        return {"item_id": self._item["id"], "output_index": len(self._items)}

    def _event(self, kind: str, fields: Mapping[str, Any]) -> Iterable[bytes]:
        content = {"type": kind, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return chain([b"event: %b\ndata: " % kind.encode()], in_pieces(content), [b"\n\n"])


def finished(item: Object, text: str, logprobs: Any = None, finish_reason: str | None = None) -> Object:
    """Returns a complete item: `text` is its text, or a call's arguments."""
    status = "incomplete" if finish_reason == "length" else "completed"
    if item["type"] == "function_call":
        return item | {"status": status, "arguments": text}
    return item | {"status": status, "content": [_part(item, text, logprobs or [])]}


def _part(item: Mapping[str, Any], text: str, logprobs: Any) -> Object:
    if item["type"] == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _message_item() -> Object:
    return _begun("msg", "message", role="assistant", content=[])


def _reasoning_item() -> Object:
    return _begun("rs", "reasoning", summary=[], content=[])


def _call_item(call_id: str, name: str) -> Object:
    return _begun("fc", "function_call", call_id=call_id, name=name, arguments="")


def _begun(prefix: str, kind: str, **fields: Any) -> Object:
    """Returns an item that has just begun."""
    return {"id": f"{prefix}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress", **fields}


def _usage(generation: Generation) -> Object:
    usage = usage_of(generation)
    details = usage["prompt_tokens_details"]
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {
            "cached_tokens": 0 if details is None else details["cached_tokens"],
            "cache_write_tokens": 0,  # not counted apart; OpenAI's client requires the field
        },
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
        **{name: usage[name] for name in ("interruptions", "max_tokens") if name in usage},
    }
