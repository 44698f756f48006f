"""The API process's end of the stream to the router, which sends requests and receives their events.

One task reads the stream and never waits for the consumers of events: a slow consumer finds all events that
have arrived in the meantime. The events of all consumers have a bound in bytes, beyond which the answers of the
slowest one are ended. So have the requests that the router has not read: further ones are refused here.
"""

import asyncio
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from lightkv.errors import LightKVError
from lightkv.router.engine.step import PoolMap, RunnerInfo, TokenEvent

from . import messages
from .messages import MAX_FRAME_BYTES, FrameStream, Load, Status, Submit, ToApi, is_own

MAP_SECONDS = 0.25  # a map this young is returned again, so that frequent calls do not slow the steps down
MAX_STEP_AGE = 30.0  # seconds without a completed step while work waits, until the service is unhealthy
MAX_STATUS_AGE = 5.0  # seconds without a status of the router, which reports four times a second
MAX_UNANSWERED_BYTES = MAX_FRAME_BYTES  # of requests that the router has neither accepted nor refused
MAX_EVENT_BYTES = 64 * 2**20  # of events that no consumer has taken
READ_AHEAD_BYTES = 2**20  # so that long bodies, which are written meanwhile, do not hold up what follows
MAX_TAKEN = 1024  # events that a consumer gets at a time, which become text in some milliseconds
_EVENT_BYTES, _TOP_BYTES = 256, 80  # an event, and each of its likeliest tokens, as objects


class LatestStatus(NamedTuple):
    """The router's latest status, and its age in seconds."""

    status: Status
    age: float

    @property
    def is_silent(self) -> bool:
        """Whether the latest status is so old that its counts mean nothing any more."""
        return self.age > MAX_STATUS_AGE

    @property
    def is_late(self) -> bool:
        """Whether no step has completed for too long although work waits, or the router is silent."""
        return self.is_silent or self.status.load.step_age > MAX_STEP_AGE

    @property
    def is_healthy(self) -> bool:
        """Whether the service is ready and completes steps. A short silence of the router does not count."""
        return self.status.state == "ready" and max(self.age, self.status.load.step_age) <= MAX_STEP_AGE

    @property
    def detail(self) -> str:
        """One line that says why the service accepts requests or not."""
        if self.is_silent:
            return f"the router has not reported for {self.age:.0f} s"
        if self.is_late:
            return f"no step has completed for {self.status.load.step_age:.0f} s although work waits"
        return self.status.detail

    @property
    def takes_requests(self) -> bool:
        """Whether a request is accepted now and can be answered in time."""
        return self.status.state == "ready" and not self.is_late


class RouterUnreachable(LightKVError):
    """No router listens on the socket, or a process of another user does."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        super().__init__(f"no router listens on {path} ({reason}); start the service again: lightkv serve")


class RequestRefused(LightKVError):
    """The router refuses a request. `kind`: as in `Refused`."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


class RouterClient:
    """One stream to the router, shared by all requests of this process.

    Attributes:
        status: the router's latest status. The state is "starting" before the first status, and "dead" once the
            stream has closed.
        became_ready: set once the state has been "ready".
        num_event_bytes: of the events of all AnswerStreams that no consumer has taken, as objects.

    `connect` creates a client, inside a running event loop.
    """

    def __init__(self, stream: FrameStream[ToApi]) -> None:
        self.status = Status("starting", "the router has not reported yet", Load())
        self.became_ready = asyncio.Event()
        self.num_event_bytes = 0
        self._frames = stream
        self._status_time = time.monotonic()
        self._map: messages.Mapped | None = None  # the latest
        self._map_time = 0.0  # when that map arrived
        # The questions without an answer, by the message that asks.
        self._asked: dict[type[msgspec.Struct], asyncio.Future[Any]] = {}
        self._unanswered: dict[str, int] = {}  # bytes of each submission, by its first request
        self._num_unanswered_bytes = 0
        self._streams: set[AnswerStream] = set()  # that are not closed
        # By request, as long as the router may send events for it.
        self._answers: dict[str, AnswerStream] = {}
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, path: Path) -> "RouterClient":
        """Connects to the router's socket at `path`. Raises RouterUnreachable."""
        try:
            reader, writer = await asyncio.open_unix_connection(path, limit=READ_AHEAD_BYTES)
        except OSError as error:
            raise RouterUnreachable(path, str(error)) from error
        if not is_own(writer):
            writer.close()
            raise RouterUnreachable(path, "a process of another user listens there")
        return cls(FrameStream(reader, writer, ToApi))

    @property
    def latest(self) -> LatestStatus:
        """The router's latest status, and its age."""
        return LatestStatus(self.status, time.monotonic() - self._status_time)

    @property
    def num_open(self) -> int:
        """The number of requests that have not ended."""
        return len(self._answers)

    def ready_info(self) -> RunnerInfo:
        """Returns the description of the model and its memory. Raises RequestRefused unless the service is
        ready."""
        latest = self.latest
        status, info = latest.status, latest.status.info
        if status.state != "ready" or info is None:
            raise RequestRefused("unavailable", f"the service is {status.state} ({status.detail}); try again")
        if latest.is_silent:
            raise RequestRefused("unavailable", f"{latest.detail}; try again")
        return info

    async def submit(self, submit: Submit) -> "AnswerStream":
        """Queues all of the answers, or none. Returns their events.

        Raises RequestRefused, also if the router has ended, is not ready, or has not read what was sent before.
        """
        self.ready_info()
        frame = self._frames.frame(submit)
        self._check_unanswered(len(frame))
        answers = AnswerStream(self, submit)
        self._unanswered[submit.request_id] = len(frame)
        self._num_unanswered_bytes += len(frame)
        self._streams.add(answers)
        for request_id in submit.request_ids:
            self._answers[request_id] = answers
        self._frames.send_frame(frame)
        try:
            await answers.accepted()
        except BaseException:
            answers.close()
            raise
        return answers

    def _check_unanswered(self, num_bytes: int) -> None:
        """Raises RequestRefused where `num_bytes` more would be too much for the router to read."""
        if num_bytes > MAX_UNANSWERED_BYTES:
            raise RequestRefused(
                "never_fits",
                f"the request takes {num_bytes} bytes on its way to the router, and {MAX_UNANSWERED_BYTES} are "
                "allowed; send fewer prompts at once",
            )
        if self._num_unanswered_bytes + num_bytes > MAX_UNANSWERED_BYTES:
            raise RequestRefused(
                "unavailable",
                f"the router has {self._num_unanswered_bytes} bytes of requests to read, and "
                f"{MAX_UNANSWERED_BYTES} are allowed; try again in a moment",
            )

    async def pool_map(self) -> PoolMap:
        """Returns what every slot is used for, at most MAP_SECONDS old. Raises RequestRefused."""
        if self._map is None or time.monotonic() - self._map_time > MAP_SECONDS:
            self._map = await self._ask(messages.AskMap())
            self._map_time = time.monotonic()
        if self._map.pool is None:
            raise RequestRefused("unavailable", self._map.error)
        return self._map.pool

    async def reset_cache(self) -> int:
        """Evicts every cached token that no running request holds. Returns their number. Raises
        RequestRefused."""
        reset = await self._ask(messages.ResetCache())
        if reset.num_tokens is None:
            raise RequestRefused("unavailable", reset.error)
        return int(reset.num_tokens)

    async def _ask(self, question: messages.AskMap | messages.ResetCache) -> Any:
        """Returns the router's answer, which all calls get that wait for it. Raises RequestRefused unless the
        service is ready."""
        self.ready_info()
        kind = type(question)
        if kind not in self._asked:
            self._asked[kind] = asyncio.get_running_loop().create_future()
            self._frames.send(question)
        return await asyncio.shield(self._asked[kind])

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Ends a request early; it gets no further events. Does nothing if the request has ended."""
        if self._answers.pop(request_id, None) is not None and self.status.state != "dead":
            self._frames.send(messages.Abort(request_id, reason))

    def forget(self, answers: "AnswerStream") -> None:
        """Forgets a stream that is closed."""
        self._streams.discard(answers)

    def release_session(self, session: str) -> None:
        """Ends a session that requests have named: its tokens are protected no more."""
        if self.status.state != "dead":
            self._frames.send(messages.ReleaseSession(session))

    async def closed(self) -> None:
        """Returns once the stream has ended, because the router ended or `close` was called."""
        await asyncio.wait([self._reader])

    async def close(self) -> None:
        """Closes the stream; unfinished requests are lost."""
        self._frames.close()
        await self.closed()

    async def _read(self) -> None:
        detail = "the router has ended"
        try:
            while (message := await self._frames.receive()) is not None:
                self._take(message)
        except messages.BadFrame as error:
            detail = f"the router sent {error}"
        finally:
            self._frames.close()
            self.status = msgspec.structs.replace(self.status, state="dead", detail=detail)
            for request_id, answers in self._answers.items():
                answers.push(TokenEvent(request_id, None, "lost", error=detail))
            self._answers.clear()
            self._note_reply(messages.AskMap, messages.Mapped(None, detail))
            self._note_reply(messages.ResetCache, messages.CacheReset(None, detail))

    def _take(self, message: ToApi) -> None:
        match message:
            case messages.Events(events):
                for event in events:
                    answers = self._answers.get(event.request_id)
                    if answers is None:  # the request was aborted in the meantime
                        continue
                    if event.finish_reason is not None:
                        del self._answers[event.request_id]
                    answers.push(event)
                if self.num_event_bytes > MAX_EVENT_BYTES:
                    max(self._streams, key=lambda one: one.num_bytes).give_up()
            case messages.Accepted(request_id):
                self._note_answer(request_id)
                if request_id in self._answers:
                    self._answers[request_id].accept()
            case messages.Refused(request_id, kind, text):
                self._note_answer(request_id)
                answers = self._answers.get(request_id)
                if answers is not None:
                    for refused in answers.refuse(RequestRefused(kind, text)):
                        self._answers.pop(refused, None)
            case messages.Mapped():
                self._note_reply(messages.AskMap, message)
            case messages.CacheReset():
                self._note_reply(messages.ResetCache, message)
            case Status():
                self.status = message
                self._status_time = time.monotonic()
                if message.state == "ready":
                    self.became_ready.set()

    def _note_answer(self, request_id: str) -> None:
        """Notes that the router has read a submission."""
        self._num_unanswered_bytes -= self._unanswered.pop(request_id, 0)

    def _note_reply(self, kind: type[msgspec.Struct], reply: messages.Mapped | messages.CacheReset) -> None:
        """Passes a reply on to those who wait for it."""
        waiting = self._asked.pop(kind, None)
        if waiting is not None:
            waiting.set_result(reply)


class AnswerStream:
    """The events of requests that were submitted together. Each iteration returns the events since the last
    one, up to MAX_TAKEN.

    The iterator ends when every request has ended. `close` aborts the requests that have not. The client's
    reader calls `push`, `accept`, `refuse` and `give_up`.

    Attributes:
        num_bytes: of the events that the consumer has not taken, as objects.
    """

    def __init__(self, client: RouterClient, submit: Submit) -> None:
        self.num_bytes = 0
        self._client = client
        self._living = set(submit.request_ids)
        self._is_accepted = False
        self._refused: RequestRefused | None = None
        self._pending: list[TokenEvent] = []
        self._waiter: asyncio.Future[None] | None = None  # of the one task that reads

    def __aiter__(self) -> "AnswerStream":
        return self

    async def __anext__(self) -> list[TokenEvent]:
        while not self._pending:
            if not self._living:
                raise StopAsyncIteration
            await self._wait()
        events = self._take(MAX_TAKEN)
        if self._pending:
            await asyncio.sleep(0)
        return events

    async def accepted(self) -> None:
        """Waits until the requests are queued or closed. Raises RequestRefused if they are refused."""
        while not self._is_accepted and self._living and self._refused is None:
            await self._wait()
        if self._refused is not None:
            raise self._refused

    def end(self, request_id: str, reason: str = "abort") -> None:
        """Ends one request early."""
        self._living.discard(request_id)
        self._client.abort(request_id, reason)
        self._wake()

    def close(self) -> None:
        """Aborts all unfinished requests and drops the events that were not consumed."""
        self._end_all()
        self._client.forget(self)

    def give_up(self) -> None:
        """Ends all requests, and leaves one event that says why, because their consumer takes too little."""
        name = next(iter(self._living), self._pending[-1].request_id if self._pending else "")
        text = f"{self.num_bytes} bytes of its answers were not read; read faster, or ask for fewer at once"
        self._end_all()
        self.push(TokenEvent(name, None, "lost", error=text))

    def push(self, event: TokenEvent) -> None:
        """Adds an event of one of the requests."""
        if event.finish_reason is not None:
            self._living.discard(event.request_id)
            if event.finish_reason in ("lost", "abort") and not self._is_accepted:
                # The router may never accept or refuse the others, for which `accepted` waits.
                self.refuse(RequestRefused("unavailable", event.error or "the request was aborted"))
        self._pending.append(event)
        num_bytes = _EVENT_BYTES
        if event.logprobs is not None or event.prompt_logprobs is not None:
            num_bytes = _bytes_of(event)
        self.num_bytes += num_bytes
        self._client.num_event_bytes += num_bytes
        self._wake()

    def accept(self) -> None:
        """Notes that the requests are queued."""
        self._is_accepted = True
        self._wake()

    def refuse(self, error: RequestRefused) -> list[str]:
        """Notes that the requests were refused. Returns those of them that have not ended."""
        self._refused = self._refused or error
        self._wake()
        return list(self._living)

    def _end_all(self) -> None:
        for request_id in list(self._living):
            self.end(request_id)
        self._take()

    def _take(self, most: int | None = None) -> list[TokenEvent]:
        """Returns the events that are there, or the first of them, and removes them."""
        events = self._pending[:most]
        self._pending = self._pending[len(events) :]
        num_bytes = sum(map(_bytes_of, events)) if self._pending else self.num_bytes
        self._client.num_event_bytes -= num_bytes
        self.num_bytes -= num_bytes
        return events

    async def _wait(self) -> None:
        """Waits for the next `_wake`. An asyncio.Event takes twice as long, and every token wakes a task."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _bytes_of(event: TokenEvent) -> int:
    """Returns how many bytes an event takes, as objects."""
    num_bytes = _EVENT_BYTES
    if event.logprobs is not None:
        num_bytes += _EVENT_BYTES + _TOP_BYTES * len(event.logprobs.top_ids)
    scores = event.prompt_logprobs
    if scores is not None:
        num_bytes += sum(map(len, (scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)))
    return num_bytes
