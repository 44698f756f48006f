"""The API process's end of the stream to the router: requests out, their events in.

Knows frames and messages; knows no HTTP and no text. One task reads, and never waits for whoever takes what it
brings: a slow taker finds all that has come since. What is kept for it is bounded by its requests' max_tokens.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from lightkv.errors import LightKVError
from lightkv.router.engine.step import PoolMap, RunnerInfo, TokenEvent

from .frames import BadFrame, FrameStream, is_own
from .messages import Abort, Accepted, AskMap, Events, Load, Mapped, Refused, Status, Submit, ToApi

MAP_SECONDS = 0.25  # a map this young is given again, so that whoever asks often does not slow the steps down


MAX_STEP_AGE = 30.0  # seconds without a step while work waits, after which steps are late and health is bad
MAX_STATUS_AGE = 5.0  # seconds without a word of the router, which reports four times a second


class Heard(NamedTuple):
    """What the router said last, and how many seconds ago."""

    status: Status
    age: float

    @property
    def is_silent(self) -> bool:
        """Has the router not reported for so long that its counts say nothing any more?"""
        return self.age > MAX_STATUS_AGE

    @property
    def is_late(self) -> bool:
        """Has no step ended for too long, though work waits, as far as is known?"""
        return self.is_silent or self.status.load.step_age > MAX_STEP_AGE

    @property
    def is_healthy(self) -> bool:
        """Does the service do what it is for? A short silence does not count against it."""
        return self.status.state == "ready" and max(self.age, self.status.load.step_age) <= MAX_STEP_AGE

    @property
    def detail(self) -> str:
        """In a line, why requests are taken or not."""
        if self.is_silent:
            return f"the router has not reported for {self.age:.0f} s"
        if self.is_late:
            return f"no step has ended for {self.status.load.step_age:.0f} s, though work waits"
        return self.status.detail

    @property
    def takes_requests(self) -> bool:
        """Is a request taken now, and can it be answered in time?"""
        return self.status.state == "ready" and not self.is_late


class RouterUnreachable(LightKVError):
    """No router answers on the socket, or another user's process does."""

    def __init__(self, path: Path, reason: str) -> None:
        self.path = path
        super().__init__(f"no router on {path} ({reason}); start the service again: lightkv serve")


class RequestRefused(LightKVError):
    """The router does not take a request. `kind`: as in `Refused`."""

    def __init__(self, kind: str, message: str) -> None:
        self.kind = kind
        super().__init__(message)


class RouterClient:
    """One stream to the router, shared by all requests of this process.

    Attributes:
        status: the router's latest word. Before its first the state is "starting", and once the stream has
            closed "dead".
        became_ready: set once the state has been "ready".

    Made by `connect`, inside a running event loop.
    """

    def __init__(self, stream: FrameStream[ToApi]) -> None:
        self.status = Status("starting", "the router has not reported yet", Load())
        self.became_ready = asyncio.Event()
        self._frames = stream
        self._status_time = time.monotonic()
        self._map: asyncio.Future[Mapped] | None = None  # the last that was asked for
        self._map_time = 0.0  # when it came
        self._answers: dict[str, AnswerStream] = {}  # by request, while the router may send it events
        self._reader = asyncio.create_task(self._read())

    @classmethod
    async def connect(cls, path: Path) -> "RouterClient":
        """Raises RouterUnreachable."""
        try:
            reader, writer = await asyncio.open_unix_connection(path)
        except OSError as error:
            raise RouterUnreachable(path, str(error)) from error
        if not is_own(writer):
            writer.close()
            raise RouterUnreachable(path, "a process of another user listens there")
        return cls(FrameStream(reader, writer, ToApi))

    @property
    def heard(self) -> Heard:
        """The router's latest word, and its age."""
        return Heard(self.status, time.monotonic() - self._status_time)

    @property
    def num_open(self) -> int:
        """Requests whose end has not come yet."""
        return len(self._answers)

    def ready_info(self) -> RunnerInfo:
        """What runs behind the router. Raises RequestRefused unless it takes requests now."""
        heard = self.heard
        status, info = heard.status, heard.status.info
        if status.state != "ready" or info is None:
            raise RequestRefused("unavailable", f"the service is {status.state} ({status.detail}); try again")
        if heard.is_silent:
            raise RequestRefused("unavailable", f"{heard.detail}; try again")
        return info

    async def submit(self, submits: Sequence[Submit]) -> "AnswerStream":
        """Queue requests, all or none: one refusal takes the others back. Returns their events to come.

        Raises RequestRefused, also when the router is gone or not ready.
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
            raise RequestRefused("unavailable", "the router is gone; try again") from error
        except BaseException:
            answers.close()
            raise
        return answers

    async def pool_map(self) -> PoolMap:
        """What every slot is used for; at most MAP_SECONDS old. Raises RequestRefused."""
        self.ready_info()
        if self._map is None or (self._map.done() and time.monotonic() - self._map_time > MAP_SECONDS):
            self._map = asyncio.get_running_loop().create_future()
            self._frames.send(AskMap())
        mapped = await asyncio.shield(self._map)
        if mapped.pool is None:
            raise RequestRefused("unavailable", mapped.error)
        return mapped.pool

    def abort(self, request_id: str, reason: str = "abort") -> None:
        """End a request early; nothing more comes of it. One that has ended is left alone."""
        if self._answers.pop(request_id, None) is not None and self.status.state != "dead":
            self._frames.send(Abort(request_id, reason))

    async def closed(self) -> None:
        """Return once the stream has ended: the router is gone, or `close` was called."""
        await asyncio.wait([self._reader])

    async def close(self) -> None:
        """End the stream; what is open is lost."""
        self._frames.close()
        await self.closed()

    async def _read(self) -> None:
        detail = "the router is gone"
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

    def _take(self, message: ToApi) -> None:
        match message:
            case Events(events):
                for event in events:
                    answers = self._answers.get(event.request_id)
                    if answers is None:  # aborted meanwhile
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
    """The events of requests that were submitted together: an iterator over all that came since last time.

    It ends when each of them has ended, or when it was closed. `close` aborts those that live. The client's
    reader feeds it through `push`, `accept` and `refuse`.
    """

    def __init__(self, client: RouterClient, request_ids: Sequence[str]) -> None:
        self._client = client
        self._living = set(request_ids)
        self._num_unanswered = len(request_ids)
        self._refused: RequestRefused | None = None
        self._pending: list[TokenEvent] = []
        self._woken = asyncio.Event()

    def __aiter__(self) -> "AnswerStream":
        return self

    async def __anext__(self) -> list[TokenEvent]:
        while not self._pending:
            if not self._living:
                raise StopAsyncIteration
            self._woken.clear()
            await self._woken.wait()
        events, self._pending = self._pending, []
        return events

    async def accepted(self) -> None:
        """Wait until every request is queued (or closed). Raises RequestRefused for the first that is not."""
        while self._num_unanswered and self._living and self._refused is None:
            self._woken.clear()
            await self._woken.wait()
        if self._refused is not None:
            raise self._refused

    def end(self, request_id: str, reason: str = "abort") -> None:
        """No more is wanted of one request."""
        self._living.discard(request_id)
        self._client.abort(request_id, reason)
        self._woken.set()

    def close(self) -> None:
        """No more is wanted at all; what was not taken yet is dropped."""
        for request_id in list(self._living):
            self.end(request_id)
        self._pending = []

    def push(self, event: TokenEvent) -> None:
        """An event of one of the requests has come."""
        if event.finish_reason is not None:
            self._living.discard(event.request_id)
            if event.finish_reason in ("lost", "abort") and self._num_unanswered:  # may never be answered
                self.refuse(RequestRefused("unavailable", event.error or "it was ended"))
        self._pending.append(event)
        self._woken.set()

    def accept(self) -> None:
        """One of the requests is queued."""
        self._num_unanswered -= 1
        self._woken.set()

    def refuse(self, error: RequestRefused) -> None:
        """One of the requests is not."""
        self._refused = self._refused or error
        self._woken.set()
