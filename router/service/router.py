"""The router process: one engine, one worker, and the API processes that submit requests.

It listens on a unix socket, admits requests by exact token counts, plans each step and sends it to the worker
(`worker_client.py`), and sends back what each request got. On a GPU it plans the next step while one is in
flight (`Engine.spare_seconds`). When its worker dies, every request ends in "lost" and another worker is
started; after `MAX_CRASHES` within a minute the process gives up. It gives up at once when the counts of ledger
and device differ.
"""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from lightkv.errors import LightKVError
from lightkv.memory_map import owners
from lightkv.router.config import EngineConfig
from lightkv.router.engine.admission import make_admission
from lightkv.router.engine.grammars.grammar_desk import TooManyGrammars
from lightkv.router.engine.loop import Engine, EngineStats, make_scheduler
from lightkv.router.engine.request import InvalidPrompt, NeverFits
from lightkv.router.engine.step import RunnerInfo, StepResult, TokenEvent
from lightkv.router.sampling_params import InvalidParams
from lightkv.router.service.grammars.held_requests import HeldRequests
from lightkv.router.service.ranks.worker_group import Worker

from . import messages
from .child_process import collect_seldom, freeze_objects
from .log_stream import MinuteLog, num_dropped_lines
from .messages import Accepted, FrameStream, Load, Refused, State, Status, Submit, ToRouter, is_own
from .restarts import Restarts
from .submitted import MAX_KEPT_BYTES, MAX_UNREAD_BYTES, NoRoom, SubmittedRequests, requests_of
from .worker_client import WorkerDied, WorkerFailed

if TYPE_CHECKING:  # its package is an extra's
    from lightkv.router.service.kv_events.publisher import KVEventPublisher

STATUS_SECONDS = 0.25
# The memory is recounted after this time without work. A recount takes milliseconds, for which a request would
# wait that comes as soon as the last one has ended.
RECOUNT_SECONDS = 1.0
MAX_MESSAGES = 16  # of one client, or answers that it asks for, that are handled before the steps go on


class Router:
    """Takes requests and sends their events."""

    def __init__(
        self, config: EngineConfig, make_worker: Callable[[], Worker], max_queued_requests: int
    ) -> None:
        self._config = config
        self._make_worker = make_worker
        self._max_queued = max_queued_requests
        self._state: State = "starting"
        self._detail = "starting the worker"
        self._info: RunnerInfo | None = None
        self._engine: Engine | None = None  # of the worker that runs
        self._submitted = SubmittedRequests()
        self._clients: dict[FrameStream[ToRouter], set[str]] = {}  # and the sessions that each has open
        self._map_askers: list[FrameStream[ToRouter]] = []
        self._wake = asyncio.Event()
        # What the admission has learned of output lengths outlives a worker.
        self._admission = make_admission(config.admission, ttft_target=config.ttft_target)
        self._restarts = Restarts()
        self._num_starts = 0
        self._num_checks = 0
        self._router_seconds = 0.0
        self._worked = time.monotonic()  # when a step last completed, or work began to wait
        self._is_checked = True  # has nothing changed since the counts were checked?
        self._past = EngineStats()  # the totals of earlier workers
        self._held = HeldRequests(
            self._wake.set, lambda name, error: self._send([TokenEvent(name, None, "invalid", error=error)])
        )
        self._kv_events: KVEventPublisher | None = None  # while it serves, with --kv-events

    async def serve(self, path: Path) -> int:
        """Listens at `path` and works until it is drained or dead. Returns the exit code."""
        server = await asyncio.start_unix_server(self._serve_client, path)
        path.chmod(0o600)
        ticker = asyncio.create_task(self._report_status())
        try:
            if self._config.kv_events is not None:
                from lightkv.router.service.kv_events.publisher import KVEventPublisher

                self._kv_events = KVEventPublisher(self._config.kv_events)
            return await self._work()
        finally:
            ticker.cancel()
            if self._kv_events is not None:
                self._kv_events.close()
            server.close()
            for client in list(self._clients):
                client.close()

    def drain(self) -> None:
        """Refuses new requests; `serve` returns once the accepted ones have ended."""
        if self._state != "dead":
            self._change_state("draining", "shutting down; try another replica")
        self._wake.set()

    def abort_all(self) -> None:
        """Ends every request now."""
        for name in self._submitted.ids():
            if self._engine is not None:
                self._engine.abort(name)
        self._end_all("abort", "the service is shutting down")
        self._wake.set()

    async def _work(self) -> int:
        while True:
            try:
                worker = self._make_worker()
            except OSError as error:
                text = (
                    f"no worker can be started ({error}); free what is lacking, and start the service again"
                )
                self._end_engine("dead", text, text)
                return 1
            self._num_starts += 1
            try:
                self._info = await worker.start(self._config, self._report)
                engine = self._start_engine(self._info)
                self._held.begin(worker, engine)
                freeze_objects()
                collect_seldom()
                if self._state == "starting":
                    self._change_state("ready", "ready")
                await self._steps(worker, engine)
                return 0
            except (WorkerDied, WorkerFailed) as error:
                self._lose_worker(error)
                if self._state == "dead":
                    return 1
                if self._state == "draining":
                    return 0
            except LightKVError as error:  # the counts are wrong
                self._end_engine("dead", str(error), str(error))
                return 1
            finally:
                worker.kill()
                await worker.wait_dead()

    async def _steps(self, worker: Worker, engine: Engine) -> None:
        """Drives the engine until it is drained: plans a step, sends it, and completes the oldest in flight."""
        while True:
            if self._map_askers:
                await self._map(worker, engine)
            if engine.is_capture_due and self._state == "ready":
                engine.captures.note(await worker.capture())
                if not engine.captures.num_missing:
                    self._change_state("ready", "all CUDA graphs are captured")
                continue
            if (spare := self._worked + engine.spare_seconds - time.monotonic()) > 0:
                await asyncio.sleep(spare)  # what comes meanwhile need not wait for the step after the next
            begun = time.perf_counter()
            plan = engine.plan()
            if self._kv_events is not None:
                self._kv_events.send()
            self._router_seconds += time.perf_counter() - begun
            try:
                if plan is not None:
                    result = await worker.step(plan)
                    if result is None:
                        if engine.can_plan:
                            continue
                        result = await worker.flush()
                elif engine.scheduler.num_in_flight:
                    result = await worker.flush()
                elif self._state == "draining" and not engine.has_work and not self._held:
                    await self._recount(worker, engine)
                    return
                else:
                    await self._idle(worker, engine)
                    continue
            except WorkerFailed as error:
                self._send(engine.fail(str(error), error.fatal))
                if error.fatal:
                    raise
                continue
            if result is None:
                raise LightKVError("the worker does not know the oldest step in flight; report this")
            self._complete(engine, result)

    def _complete(self, engine: Engine, result: StepResult) -> None:
        begun = time.perf_counter()
        self._num_checks += 1
        self._send(engine.complete(result))
        self._worked = time.monotonic()
        self._restarts.note_step()
        self._is_checked = False
        self._router_seconds += time.perf_counter() - begun

    async def _map(self, worker: Worker, engine: Engine) -> None:
        """Sends the map of the pool, as it is now, to all clients that asked for it."""
        edits, expected = engine.sync_memory()
        # Named now, since requests come and go while the worker counts.
        holders = self._submitted.named(owners(expected.holdings, engine.scheduler.ledger.groups.widths))
        try:
            found = await worker.map(edits, expected.holdings)
        except WorkerFailed as error:
            if error.fatal:
                raise
            self._send_map(messages.Mapped(None, str(error)))
        else:
            self._send_map(messages.Mapped(msgspec.structs.replace(found, owners=holders)))

    async def _idle(self, worker: Worker, engine: Engine) -> None:
        """Waits for a request, for the end, or for the worker's death. Recounts everything once, after
        RECOUNT_SECONDS."""
        self._wake.clear()
        woken, died = asyncio.create_task(self._wake.wait()), asyncio.create_task(worker.wait_dead())
        try:
            timeout = None if self._is_checked else RECOUNT_SECONDS
            done, _ = await asyncio.wait({woken, died}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                raise died.result()
        finally:
            woken.cancel()
            died.cancel()
        if not done:
            await self._recount(worker, engine)
        self._worked = time.monotonic()

    async def _recount(self, worker: Worker, engine: Engine) -> None:
        """Compares every count with the memory, unless nothing has changed since the last time."""
        if self._is_checked:
            return
        self._is_checked = True
        engine.check()
        self._held.check()
        self._submitted.check()
        try:
            await worker.check(*engine.sync_memory())
        except WorkerFailed as error:  # the counts are wrong, which is worse than a crash
            raise LightKVError(f"a recount of the memory failed: {error}") from error

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one API process until it disconnects; its requests are aborted then."""
        client: FrameStream[ToRouter] = FrameStream(reader, writer, ToRouter)
        if not is_own(writer):
            client.close()
            return
        self._clients[client] = set()
        client.send(self.status())
        num_handled = 0
        try:
            while (message := await client.receive()) is not None:
                num_handled += message.num_answers if isinstance(message, Submit) else 1
                if num_handled >= MAX_MESSAGES:  # `receive` does not wait for a message that has arrived
                    num_handled = 0
                    await asyncio.sleep(0)
                if isinstance(message, Submit):
                    client.send(self._submit(client, message))
                elif isinstance(message, messages.AskMap):
                    self._ask_map(client)
                elif isinstance(message, messages.ReleaseSession):
                    self._release_session(client, message.session)
                elif isinstance(message, messages.ResetCache):
                    client.send(self._reset_cache())
                else:
                    self._abort(message)
        except messages.BadFrame:
            pass  # the client is disconnected
        finally:
            for session in list(self._clients[client]):
                self._release_session(client, session)
            del self._clients[client]
            self._map_askers = [asker for asker in self._map_askers if asker is not client]
            for request_id in self._submitted.ids(client):
                self._abort(messages.Abort(request_id))
            client.close()

    def _submit(self, client: FrameStream[ToRouter], message: Submit) -> Accepted | Refused:
        name, engine = message.request_id, self._engine
        if self._state != "ready" or engine is None:
            return Refused(name, "unavailable", f"{self._state}: {self._detail}")
        num_waiting = engine.scheduler.num_waiting + len(self._held)
        if num_waiting + message.num_answers > self._max_queued:
            text = (
                f"{num_waiting} requests wait already, {self._max_queued} may, and {message.num_answers} more "
                "do not fit; try again in a moment"
            )
            return Refused(name, "queue_full", text)
        if client.num_unread > MAX_UNREAD_BYTES:
            text = (
                f"{client.num_unread} bytes of answers are unread, and {MAX_UNREAD_BYTES} may be; try again"
            )
            return Refused(name, "unavailable", text)
        try:
            num_bytes = self._submitted.require_room(message)
            if not engine.has_work:
                self._worked = time.monotonic()
            requests = requests_of(message)
            if message.params.grammar is None:
                engine.add(*requests)
            else:
                self._held.add(engine, requests, message)
        except NoRoom as error:
            return Refused(name, "never_fits" if error.is_too_large else "queue_full", str(error))
        except TooManyGrammars as error:
            return Refused(name, "queue_full", str(error))
        except (NeverFits, InvalidParams, InvalidPrompt, ValueError) as error:
            return Refused(name, "never_fits" if isinstance(error, NeverFits) else "invalid", str(error))
        if message.session is not None:
            session = engine.scheduler.ledger.sessions.open(message.session)
            self._clients[client].add(message.session)
            for request in requests:
                request.session = session if request.cached else None
        self._submitted.add(client, requests, num_bytes, message.key)
        self._wake.set()
        return Accepted(name)

    def _abort(self, message: messages.Abort) -> None:
        if self._submitted.forget(message.request_id) and self._engine is not None:
            self._engine.abort(message.request_id, message.reason)
            self._held.end(message.request_id)

    def _release_session(self, client: FrameStream[ToRouter], session: str) -> None:
        self._clients[client].discard(session)
        if self._engine is not None:
            self._engine.scheduler.ledger.sessions.release(session)

    def _ask_map(self, client: FrameStream[ToRouter]) -> None:
        if self._engine is None:
            client.send(messages.Mapped(None, f"{self._state}: {self._detail}"))
        else:
            self._map_askers.append(client)
            self._wake.set()

    def _reset_cache(self) -> messages.CacheReset:
        if self._engine is None:
            return messages.CacheReset(None, f"{self._state}: {self._detail}")
        num_tokens = self._engine.evict_cached()
        self._is_checked = False
        self._wake.set()
        self._broadcast()  # /load shows it when the answer comes
        return messages.CacheReset(num_tokens)

    def _send_map(self, answer: messages.Mapped) -> None:
        """Answers all clients that asked for the map."""
        askers, self._map_askers = self._map_askers, []
        for client in askers:
            client.send(answer)

    def _send(self, events: list[TokenEvent]) -> None:
        """Sends each event to the client of its request. The requests of a client that has left too much unread
        end; its connection stays."""
        for client in self._submitted.send(events):
            text = f"its API process has left {client.num_unread} of {MAX_KEPT_BYTES} bytes unread"
            names = self._submitted.ids(client)
            client.send(messages.Events([TokenEvent(name, None, "lost", error=text) for name in names]))
            for name in names:
                self._abort(messages.Abort(name))
        for event in events:
            if event.finish_reason is not None:
                self._held.end(event.request_id, is_spoilt=event.finish_reason == "invalid")

    def _end_all(self, reason: str, error: str) -> None:
        """Reports to the clients that every request ends, whatever the engine holds of it."""
        self._send([TokenEvent(name, None, reason, error=error) for name in self._submitted.ids()])

    def status(self) -> Status:
        """Returns the state and the counts as they stand."""
        return Status(self._state, self._detail, self.load(), self._info)

    def load(self) -> Load:
        """Returns the counts; totals include those of earlier workers."""
        engine = self._engine
        stats = self._past if engine is None else engine.stats().after(self._past)
        counts = msgspec.structs.asdict(stats)
        counts["num_waiting"] += len(self._held)
        return Load(
            **counts,
            num_ledger_checks=self._num_checks,
            num_worker_starts=self._num_starts,
            step_age=time.monotonic() - self._worked if engine is not None and engine.has_work else 0.0,
            router_seconds=self._router_seconds,
            num_dropped_log_lines=num_dropped_lines(),
            by_key=self._submitted.usage(engine is not None),
        )

    async def _report_status(self) -> None:
        """Sends the status to all clients every `STATUS_SECONDS`."""
        log = MinuteLog()
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            self._held.send_orders()
            log.print(self._broadcast().load.why_waiting)

    def _broadcast(self) -> Status:
        status = self.status()
        for client in self._clients:
            if client.num_unread <= MAX_UNREAD_BYTES:  # else it gets the status once it has read on
                client.send(status)
        return status

    def _change_state(self, state: State, detail: str) -> None:
        self._state, self._detail = state, detail
        self._broadcast()

    def _report(self, line: str) -> None:
        """Takes the worker's progress while it loads."""
        if self._state == "starting":
            self._change_state("starting", line)

    def _start_engine(self, info: RunnerInfo) -> Engine:
        scheduler = make_scheduler(info, self._admission)
        self._engine = Engine(scheduler, info.num_missing_graphs)
        self._is_checked = True
        if self._kv_events is not None:
            self._kv_events.follow(scheduler.ledger)
        return self._engine

    def _lose_worker(self, error: WorkerDied | WorkerFailed) -> None:
        """Ends every request, and decides whether another worker is started. A worker that a grammar has
        killed does not count: that is a client's doing, and the grammar is refused from now on."""
        state, detail = self._state, self._detail  # a draining router stays draining
        gives_up = "" if self._held.lose_worker(error) else self._restarts.note_crash()
        if self._info is None and isinstance(error, WorkerFailed):
            state, detail = "dead", str(error)  # the model can never be loaded
        elif gives_up:
            state, detail = "dead", f"{gives_up}, the last: {error}"
        elif state != "draining":
            state, detail = "starting", f"starting another worker: {error}"
        self._end_engine(state, detail, str(error))

    def _end_engine(self, state: State, detail: str, error: str) -> None:
        """Ends every request, since the worker's memory is gone. The totals stay.

        The state is sent before the ends: a client that reads that its request is lost finds the service
        not ready.
        """
        if self._engine is not None:
            self._past = EngineStats().after(self._engine.stats().after(self._past))
        self._engine = None
        if self._kv_events is not None:
            self._kv_events.follow(None)
        self._change_state(state, detail)
        self._end_all("lost", error)
        self._send_map(messages.Mapped(None, error))
