"""The API process's end of the stream to the router, which sends requests and receives their events.

One task reads the stream and never waits for the consumers of events: a slow consumer finds all events that
have arrived in the meantime. Their number is bounded by the max_tokens of its requests.
"""

import asyncio
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from lightkv.errors import LightKVError
from lightkv.router.engine.step import PoolMap, RunnerInfo, TokenEvent

from .frames import BadFrame, FrameStream, is_own
from .messages import (
    Abort,
    Accepted,
    AskMap,
    CacheReset,
    Events,
    Load,
    Mapped,
    Refused,
    ReleaseSession,
    ResetCache,
    Status,
    Submit,
    ToApi,
)

MAP_SECONDS = 0.25  # a map this young is returned again, so that frequent calls do not slow the steps down
MAX_STEP_AGE = 30.0  # seconds without a completed step while work waits, until the service is unhealthy
MAX_STATUS_AGE = 5.0  # seconds without a status of the router, which reports four times a second


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

    `connect` creates a client, inside a running event loop.
    """

    def __init__(self, stream: FrameStream[ToApi]) -> None:
        self.status = Status("starting", "the router has not reported yet", Load())
        self.became_ready = asyncio.Event()
        self._frames = stream
        self._status_time = time.monotonic()
        self._map: asyncio.Future[Mapped] | None = None  # the last map that was asked for
        self._map_time = 0.0  # when that map arrived
        self._resets: deque[asyncio.Future[CacheReset]] = deque()  # those without an answer, in order
        self._answers: dict[
            str, AnswerStream
        ] = {}  # by request, as long as the router may send events for it
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, path: Path) -> "RouterClient":
        """Connects to the router's socket at `path`. Raises RouterUnreachable."""
        try:
            reader, writer = await asyncio.open_unix_connection(path)
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

    async def submit(self, submits: Sequence[Submit]) -> "AnswerStream":
        """Queues all of the requests, or none: if one is refused, the others are aborted. Returns their events.

        Raises RequestRefused, also if the router has ended or is not ready.
        """
        self.ready_info()
        answers = AnswerStream(self, [submit.request_id for submit in submits])
        try:
            for submit in submits:
                self._answers[submit.request_id] = answers
                self._frames.send(submit)
            await self._frames.drain()
            await answers.accepted()
        except ConnectionError as error:
            answers.close()
            raise RequestRefused("unavailable", "the router has ended; try again") from error
        except BaseException:
            answers.close()
            raise
        return answers

    async def pool_map(self) -> PoolMap:
        """Returns what every slot is used for, at most MAP_SECONDS old. Raises RequestRefused."""
        self.ready_info()
        if self._map is None or (self._map.done() and time.monotonic() - self._map_time > MAP_SECONDS):
            self._map = asyncio.get_running_loop().create_future()
            self._frames.send(AskMap())
        mapped = await asyncio.shield(self._map)
        if mapped.pool is None:
            raise RequestRefused("unavailable", mapped.error)
        return mapped.pool

    async def reset_cache(self) -> int:
        """Evicts every cached token that no running request holds. Returns their number. Raises
        RequestRefused."""
        self.ready_info()
        answer: asyncio.Future[CacheReset] = asyncio.get_running_loop().create_future()
        self._resets.append(answer)
        self._frames.send(ResetCache())
        reset = await asyncio.shield(answer)
        if reset.num_tokens is None:
            raise RequestRefused("unavailable", reset.error)
        return reset.num_tokens

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """Ends a request early; it gets no further events. Does nothing if the request has ended."""
        if self._answers.pop(request_id, None) is not None and self.status.state != "dead":
            self._frames.send(Abort(request_id, reason))

    def release_session(self, session: str) -> None:
        """Ends a session that requests have named: its tokens are protected no more."""
        if self.status.state != "dead":
            self._frames.send(ReleaseSession(session))

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
        except BadFrame as error:
            detail = f"the router sent {error}"
        finally:
            self._frames.close()
            self.status = msgspec.structs.replace(self.status, state="dead", detail=detail)
            for request_id, answers in self._answers.items():
                answers.push(TokenEvent(request_id, None, "lost", error=detail))
            self._answers.clear()
            self._take_map(Mapped(None, detail))
            while self._resets:
                self._resets.popleft().set_result(CacheReset(None, detail))

    def _take(self, message: ToApi) -> None:
        match message:
            case Events(events):
                for event in events:
                    answers = self._answers.get(event.request_id)
                    if answers is None:  # the request was aborted in the meantime
                        continue
                    if event.finish_reason is not None:
                        del self._answers[event.request_id]
                    answers.push(event)
            case Accepted(request_id):
                if request_id in self._answers:
                    self._answers[request_id].accept()
            case Refused(request_id, kind, text):
                answers = self._answers.pop(request_id, None)
                if answers is not None:
                    answers.refuse(RequestRefused(kind, text))
            case Mapped():
                self._take_map(message)
            case CacheReset():
                self._resets.popleft().set_result(message)
            case Status():
                self.status = message
                self._status_time = time.monotonic()
                if message.state == "ready":
                    self.became_ready.set()

    def _take_map(self, mapped: Mapped) -> None:
        if self._map is not None and not self._map.done():
            self._map.set_result(mapped)
            self._map_time = time.monotonic()


class AnswerStream:
    """The events of requests that were submitted together. Each iteration returns all events since the last
    one.

    The iterator ends when every request has ended. `close` aborts the requests that have not. The client's
    reader calls `push`, `accept` and `refuse`.
    """

    def __init__(self, client: RouterClient, request_ids: Sequence[str]) -> None:
        self._client = client
        self._living = set(request_ids)
        self._num_unanswered = len(request_ids)
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
        events, self._pending = self._pending, []
        return events

    async def accepted(self) -> None:
        """Waits until every request is queued or closed. Raises RequestRefused if one is refused."""
        while self._num_unanswered and self._living and self._refused is None:
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
        for request_id in list(self._living):
            self.end(request_id)
        self._pending = []

    def push(self, event: TokenEvent) -> None:
        """Adds an event of one of the requests."""
        if event.finish_reason is not None:
            self._living.discard(event.request_id)
            if event.finish_reason in ("lost", "abort") and self._num_unanswered:
                # The router may never accept or refuse the others, for which `accepted` waits.
                self.refuse(RequestRefused("unavailable", event.error or "the request was aborted"))
        self._pending.append(event)
        self._wake()

    def accept(self) -> None:
        """Notes that one of the requests is queued."""
        self._num_unanswered -= 1
        self._wake()

    def refuse(self, error: RequestRefused) -> None:
        """Notes that one of the requests was refused."""
        self._refused = self._refused or error
        self._wake()

    async def _wait(self) -> None:
        """Waits for the next `_wake`. An asyncio.Event takes twice as long, and every token wakes a task."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
