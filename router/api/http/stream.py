"""The stream of server-sent events that answers a request: one write for what its answers gain in a step."""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lightkv.router.api.answers.chat_writer import ChatWriter
from lightkv.router.api.answers.completion_writer import CompletionWriter
from lightkv.router.api.answers.errors import error_body
from lightkv.router.api.answers.generation import (
    Answer,
    Generation,
    GenerationFailed,
    GenerationInvalid,
    GenerationLost,
    TextDelta,
    closed_with_client,
    usage_of,
)
from lightkv.router.api.answers.message_writer import MessageEvents, MessageWriter
from lightkv.router.api.answers.pieces import encode, in_pieces
from lightkv.router.api.answers.response_writer import ResponseEvents, ResponseWriter

from .paced import Pacer

_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy may hold events back
_MARK = secrets.token_hex(16)  # stands for the text in a chunk of which all others are made


class EventStream(Response):
    """A response with the events of a generation. If the client disconnects, its requests are aborted.

    `pacer`: sends what the answers gain. `includes_usage`: the stream ends with its token counts.
    `has_running_usage`: every chunk has those so far.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        generation: Generation,
        writer: CompletionWriter | ChatWriter | ResponseWriter | MessageWriter,
        pacer: Pacer,
        includes_usage: bool,
        has_running_usage: bool,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers(_HEADERS)
        self._generation = generation
        self._pacer = pacer
        self._events: EventWriter | ResponseEvents | MessageEvents
        if isinstance(writer, ResponseWriter | MessageWriter):
            self._events = writer.events(generation)
        else:
            self._events = EventWriter(generation, writer, includes_usage, has_running_usage)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with closed_with_client(receive, self._generation) as is_read:

            async def send_events(events: Iterable[bytes]) -> None:
                await self._pacer.send(iter(events), send, is_read)

            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send_events(self._events.begin())
            try:
                async for deltas in self._generation.deltas():
                    await send_events(chain.from_iterable(map(self._events.delta, deltas)))
                await send_events(self._events.end())
            except (GenerationFailed, GenerationLost) as error:  # there is no [DONE] then
                await send_events(self._events.fail(failure_status(error), str(error)))
            await send({"type": "http.response.body", "body": b"", "more_body": False})


@dataclass
class EventWriter:
    """Writes the events of one stream. The token counts are those of an EventStream.

    `around`: by answer, what stands before and after the text in a chunk that has nothing else of its own.
    """

    generation: Generation
    writer: CompletionWriter | ChatWriter
    includes_usage: bool
    has_running_usage: bool
    around: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)

    def begin(self) -> Iterable[bytes]:
        """Returns the events before the first delta, of which there are none."""
        return ()

    def fail(self, status: int, error: str) -> Iterable[bytes]:
        """Returns the last event of answers that could not be completed."""
        return _event(error_body(status, error))

    def delta(self, delta: TextDelta) -> Iterable[bytes]:
        """Returns the events of a delta; none if it has nothing to show."""
        has_ids = self.writer.extras.token_ids and bool(delta.token_ids)
        if not (delta.text or delta.scored or delta.finish_reason or has_ids):
            return ()
        answer = delta.answer
        is_plain = not (
            has_ids or answer.has_logprobs or self.has_running_usage or self.writer.divides_answers
        )
        if not is_plain or delta.finish_reason is not None:
            return self._chunks(delta)
        around = self.around.get(answer.index)
        if around is not None:
            return (around[0], encode(delta.text), around[1])
        chunks = self._chunks(delta)  # the first of an answer may have more than text
        self.around[answer.index] = self._split(answer)
        return chunks

    def end(self) -> Iterable[bytes]:
        """Returns the events after the last delta."""
        counts: Iterable[bytes] = ()
        if self.includes_usage:
            counts = _event(self.writer.usage_chunk(usage_of(self.generation)))
        return chain(counts, [b"data: [DONE]\n\n"])

    def _chunks(self, delta: TextDelta) -> Iterable[bytes]:
        events: list[Iterable[bytes]] = []
        for chunk in self.writer.chunks(delta):
            if self.has_running_usage:
                chunk["usage"] = usage_of(self.generation)
            elif self.includes_usage:
                chunk["usage"] = None
            if chunk["choices"][0]["finish_reason"] and delta.answer.num_interruptions:
                chunk["interruptions"] = delta.answer.num_interruptions
            events.append(_event(chunk))
        return chain.from_iterable(events)

    def _split(self, answer: Answer) -> tuple[bytes, bytes]:
        before, after = b"".join(self._chunks(TextDelta(answer, _MARK))).split(encode(_MARK))
        return before, after


def failure_status(error: GenerationFailed | GenerationLost) -> int:
    """Returns the HTTP status of an answer that could not be completed."""
    if isinstance(error, GenerationInvalid):
        return 400
    return 503 if isinstance(error, GenerationLost) else 500


def _event(content: Mapping[str, Any]) -> Iterable[bytes]:
    return chain([b"data: "], in_pieces(content), [b"\n\n"])
