"""The router process: one ledger, one scheduler, one worker, and whoever submits requests.

It lets API processes in on a unix socket, admits by exact counts, plans each step and sends it to the worker
(`worker_client.py`), and sends back what came of it. On a GPU the next step is planned while one runs. It
knows no torch, no text and no HTTP. When its worker dies, every request ends in "lost", and another worker is
started; after `MAX_CRASHES` within a minute the process gives up. It does so at once when the books of ledger
and device differ.
"""

import asyncio
import gc
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from lightkv.edits import decode, encode
from lightkv.errors import LedgerMismatch, LightKVError
from lightkv.ledger import TokenLedger
from lightkv.memory_map import owners, segment_labels
from lightkv.router.config import EngineConfig
from lightkv.router.engine.admission import make_admission
from lightkv.router.engine.ledger import Ledger
from lightkv.router.engine.request import InvalidPrompt, NeverFits, Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import (
    ExpectedMemory,
    PoolMap,
    RunnerInfo,
    SlotOwners,
    StepPlan,
    StepResult,
    TokenEvent,
)
from lightkv.router.sampling_params import InvalidParams

from .frames import BadFrame, FrameStream, is_own
from .messages import (
    Abort,
    Accepted,
    AskMap,
    Events,
    Load,
    Mapped,
    OwnedMap,
    Refused,
    RowOwner,
    State,
    Status,
    Submit,
    ToRouter,
)
from .worker_client import WorkerDied, WorkerFailed

MAX_CRASHES = 3  # within CRASH_SECONDS, or with no step between: another worker would only die as well
CRASH_SECONDS = 60.0
STATUS_SECONDS = 0.25


class Worker(Protocol):
    """The far end of the steps, as `WorkerClient` is.

    Every call raises WorkerDied once the process is gone, and WorkerFailed for an error that it answers.
    """

    async def start(self, config: EngineConfig, report: Callable[[str], None]) -> RunnerInfo: ...

    async def step(self, plan: StepPlan) -> StepResult | None:
        """Send a step. Returns the result of the one before, if it was still under way; None if none was.

        An error is about the one before; this one is under way all the same.
        """

    async def flush(self) -> StepResult | None:
        """The result of the oldest step under way, or its error."""

    async def check(self, edits: bytes, holding: ExpectedMemory) -> None:
        """Recount the memory, between steps."""

    async def map(self, edits: bytes, owners: SlotOwners) -> PoolMap:
        """What every slot is used for, between steps."""

    async def wait_dead(self) -> WorkerDied:
        """Returns when the process is gone."""

    def kill(self) -> None: ...


class _Submitted(NamedTuple):
    """A request that has been accepted, and who gets its events."""

    client: FrameStream[ToRouter]
    request: Request


class Router:
    """Requests in, events out. `depth`: steps under way at once; None is two on a GPU, else one."""

    def __init__(
        self,
        config: EngineConfig,
        make_worker: Callable[[], Worker],
        max_queued_requests: int,
        depth: int | None = None,
    ) -> None:
        self._config = config
        self._make_worker = make_worker
        self._max_queued = max_queued_requests
        self._depth = depth
        self._state: State = "starting"
        self._detail = "starting the worker"
        self._info: RunnerInfo | None = None
        self._scheduler: Scheduler | None = None
        self._submitted: dict[str, _Submitted] = {}  # by request id, until it has ended
        self._clients: set[FrameStream[ToRouter]] = set()
        self._map_askers: list[FrameStream[ToRouter]] = []
        self._wake = asyncio.Event()
        # What it has learned outlives a worker.
        self._admission = make_admission(config.admission, ttft_target=config.ttft_target)
        self._crashes: deque[float] = deque(maxlen=MAX_CRASHES)
        self._num_barren = 0  # crashes in a row without a step between them
        self._num_starts = 0
        self._num_checks = 0
        self._router_seconds = 0.0
        self._worked = time.monotonic()  # when a step last ended, or work began to wait
        self._unchecked = False  # has anything changed since the books were recounted?
        self._past = Load()  # totals of the workers before this one

    # ------------------------------------------------------------------ what the process does

    async def serve(self, path: Path) -> int:
        """Listen at `path` and work until drained or dead. Returns the exit code."""
        server = await asyncio.start_unix_server(self._talk, path)
        path.chmod(0o600)
        ticker = asyncio.create_task(self._tell())
        try:
            return await self._work()
        finally:
            ticker.cancel()
            server.close()
            for client in list(self._clients):
                client.close()

    def drain(self) -> None:
        """Admit nothing more; `serve` returns once what was accepted has ended."""
        if self._state != "dead":
            self._turn("draining", "shutting down; try another replica")
        self._wake.set()

    def abort_all(self) -> None:
        """End every request now."""
        names = list(self._submitted)
        self._end_all("abort", "the service is shutting down")
        for name in names:
            if self._scheduler is not None:
                self._scheduler.abort(name)
        self._wake.set()

    async def _work(self) -> int:
        while True:
            worker = self._make_worker()
            self._num_starts += 1
            try:
                self._info = await worker.start(self._config, self._report)
                scheduler = self._open_books(self._info)
                gc.collect()
                gc.freeze()  # what is there now stays: the collector need not go through it in a step
                if self._state == "starting":
                    self._turn("ready", "ready")
                await self._steps(worker, scheduler)
                return 0
            except (WorkerDied, WorkerFailed) as error:
                self._lose_worker(error)
                if self._state == "dead":
                    return 1
                if self._state == "draining":
                    return 0
            except LightKVError as error:  # the books are wrong
                self._close_books("dead", str(error), str(error))
                return 1
            finally:
                worker.kill()
                await worker.wait_dead()

    async def _steps(self, worker: Worker, scheduler: Scheduler) -> None:
        """Plan, send, take, until drained."""
        while True:
            if self._map_askers:
                await self._map(worker, scheduler.ledger)
            begun = time.perf_counter()
            plan = scheduler.plan() if scheduler.num_in_flight < scheduler.depth else None
            self._router_seconds += time.perf_counter() - begun
            try:
                if plan is not None:
                    result = await worker.step(plan)
                    if result is None:
                        if scheduler.num_in_flight < scheduler.depth:
                            continue
                        result = await worker.flush()
                elif scheduler.num_in_flight:
                    result = await worker.flush()
                elif self._state == "draining" and not scheduler.has_work:
                    return
                else:
                    await self._idle(worker, scheduler)
                    continue
            except WorkerFailed as error:
                self._send(scheduler.fail(str(error)))
                if error.fatal:
                    raise
                continue
            if result is None:
                raise LightKVError(f"the worker knows no step {scheduler.landing.step}; report this")
            self._take(scheduler, result)

    def _take(self, scheduler: Scheduler, result: StepResult) -> None:
        begun = time.perf_counter()
        plan = scheduler.landing
        self._num_checks += 1
        if result.num_free != plan.num_free or result.flags:
            edits = str(decode(plan.edits))
            raise LedgerMismatch(plan.step, result.num_free, plan.num_free, result.flags, edits)
        self._send(scheduler.consume(result))
        self._worked = time.monotonic()
        self._num_barren = 0
        self._unchecked = True
        self._router_seconds += time.perf_counter() - begun

    async def _map(self, worker: Worker, ledger: Ledger) -> None:
        """Have the pool mapped as it is now, for all who have asked."""
        labels = SlotOwners(segment_labels(ledger), ledger.private_ranges())
        holders = self._holders(ledger)  # now: requests come and go while the worker counts
        try:
            found = await worker.map(encode(ledger.drain()), labels)
        except WorkerFailed as error:
            if error.fatal:
                raise
            self._send_map(Mapped(None, str(error)))
        else:
            self._send_map(Mapped(OwnedMap(**msgspec.structs.asdict(found), owners=holders)))

    def _holders(self, ledger: Ledger) -> list[RowOwner]:
        """Whose the tokens are that one row alone holds, by request."""
        names = {
            request.sequence.row: name
            for name, (_, request) in self._submitted.items()
            if request.sequence is not None
        }
        return [RowOwner(one.row, one.num_tokens, names.get(one.row, "")) for one in owners(ledger)]

    async def _idle(self, worker: Worker, scheduler: Scheduler) -> None:
        """Nothing to do: recount every book, then wait for a request, for the end, or for the worker's."""
        if self._unchecked:
            self._unchecked = False
            scheduler.check()
            ledger = scheduler.ledger
            holding = ExpectedMemory(ledger.num_free, ledger.private_ranges())
            try:
                await worker.check(encode(ledger.drain()), holding)
            except WorkerFailed as error:  # not a crash: the books are wrong
                raise LightKVError(f"a recount of the memory failed: {error}") from error
            return  # something may have come meanwhile
        self._wake.clear()
        woken, died = asyncio.create_task(self._wake.wait()), asyncio.create_task(worker.wait_dead())
        try:
            await asyncio.wait({woken, died}, return_when=asyncio.FIRST_COMPLETED)
            if died.done():
                raise died.result()
        finally:
            woken.cancel()
            died.cancel()
        self._worked = time.monotonic()

    # ------------------------------------------------------------------ who submits

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One API process, until it goes; what it waited for is aborted then."""
        client: FrameStream[ToRouter] = FrameStream(reader, writer, ToRouter)
        if not is_own(writer):
            client.close()
            return
        self._clients.add(client)
        client.send(self.status())
        try:
            while (message := await client.receive()) is not None:
                if isinstance(message, Submit):
                    client.send(self._submit(client, message))
                elif isinstance(message, AskMap):
                    self._ask_map(client)
                else:
                    self._abort(message)
        except BadFrame:
            pass  # it is cut off
        finally:
            self._clients.discard(client)
            self._map_askers = [asker for asker in self._map_askers if asker is not client]
            for request_id in [name for name, one in self._submitted.items() if one.client is client]:
                self._abort(Abort(request_id))
            client.close()

    def _submit(self, client: FrameStream[ToRouter], message: Submit) -> Accepted | Refused:
        name, scheduler = message.request_id, self._scheduler
        if self._state != "ready" or scheduler is None:
            return Refused(name, "unavailable", f"{self._state}: {self._detail}")
        if scheduler.num_waiting >= self._max_queued:
            text = f"{scheduler.num_waiting} requests wait already, as many as may; try again in a moment"
            return Refused(name, "queue_full", text)
        request = Request(
            name,
            message.prompt_ids,
            message.params,
            message.seed,
            frozenset(message.stop_ids),
            message.namespace,
            message.priority,
        )
        if not scheduler.has_work:
            self._worked = time.monotonic()
        try:
            scheduler.add(request)
        except NeverFits as error:
            return Refused(name, "never_fits", str(error))
        except (InvalidParams, InvalidPrompt, ValueError) as error:
            return Refused(name, "invalid", str(error))
        self._submitted[name] = _Submitted(client, request)
        self._wake.set()
        return Accepted(name)

    def _abort(self, message: Abort) -> None:
        if self._submitted.pop(message.request_id, None) is not None and self._scheduler is not None:
            self._scheduler.abort(message.request_id, message.reason)

    def _ask_map(self, client: FrameStream[ToRouter]) -> None:
        if self._scheduler is None:
            client.send(Mapped(None, f"{self._state}: {self._detail}"))
        else:
            self._map_askers.append(client)
            self._wake.set()

    def _send_map(self, answer: Mapped) -> None:
        """To all who have asked."""
        askers, self._map_askers = self._map_askers, []
        for client in askers:
            client.send(answer)

    def _send(self, events: list[TokenEvent]) -> None:
        """Each event to whoever submitted its request, one message a client."""
        submitted = self._submitted
        if len(self._clients) == 1:  # most often
            own = [event for event in events if event.request_id in submitted]
            if own:
                next(iter(self._clients)).send(Events(own))
        else:
            by_client: dict[FrameStream[ToRouter], list[TokenEvent]] = {}
            for event in events:
                one = submitted.get(event.request_id)
                if one is not None:
                    by_client.setdefault(one.client, []).append(event)
            for client, own in by_client.items():
                client.send(Events(own))
        for event in events:
            if event.finish_reason is not None:
                submitted.pop(event.request_id, None)

    def _end_all(self, reason: str, error: str) -> None:
        """Tell every request that it ends, whatever the scheduler holds of it."""
        self._send([TokenEvent(name, None, reason, error=error) for name in list(self._submitted)])

    # ------------------------------------------------------------------ states and counts

    def status(self) -> Status:
        """As it stands."""
        return Status(self._state, self._detail, self.load(), self._info)

    def load(self) -> Load:
        """The counts."""
        past, scheduler = self._past, self._scheduler
        if scheduler is None:
            return past
        ledger = scheduler.ledger
        return Load(
            capacity=ledger.capacity,
            free=ledger.num_free,
            held=ledger.num_held,
            cached=ledger.num_cached,
            forecast_peak=scheduler.forecast_peak(),
            reached_peak=max(past.reached_peak, scheduler.peak_held),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_steps=past.num_steps + scheduler.step,
            prompt_tokens=past.prompt_tokens + scheduler.num_prompt_tokens,
            hit_tokens=past.hit_tokens + scheduler.num_hit_tokens,
            generated_tokens=past.generated_tokens + scheduler.num_output_tokens,
            num_preemptions=past.num_preemptions + scheduler.num_preemptions,
            recomputed_tokens=past.recomputed_tokens + scheduler.num_recomputed_tokens,
            num_ledger_checks=self._num_checks,
            num_worker_starts=self._num_starts,
            step_age=time.monotonic() - self._worked if scheduler.has_work else 0.0,
            router_seconds=self._router_seconds,
        )

    async def _tell(self) -> None:
        """The status, again and again, to whoever listens."""
        while True:
            await asyncio.sleep(STATUS_SECONDS)
            self._broadcast()

    def _broadcast(self) -> None:
        status = self.status()
        for client in self._clients:
            client.send(status)

    def _turn(self, state: State, detail: str) -> None:
        self._state, self._detail = state, detail
        self._broadcast()

    def _report(self, line: str) -> None:
        """Progress of the worker while it loads."""
        if self._state == "starting":
            self._turn("starting", line)

    def _open_books(self, info: RunnerInfo) -> Scheduler:
        ledger = TokenLedger(info.capacity, info.limits.max_num_seqs, info.limits.max_model_len)
        depth = self._depth or (2 if info.cuda_graphs else 1)
        self._scheduler = Scheduler(ledger, info.limits, depth, self._admission)
        self._unchecked = False
        return self._scheduler

    def _lose_worker(self, error: WorkerDied | WorkerFailed) -> None:
        """End every request, and say whether another worker is started."""
        state, detail = self._state, self._detail  # draining stays draining
        self._crashes.append(time.monotonic())
        self._num_barren += 1
        quick = self._crashes[-1] - self._crashes[0] < CRASH_SECONDS
        if self._info is None and isinstance(error, WorkerFailed):
            state, detail = "dead", str(error)  # the model cannot be loaded, and never will be
        elif self._num_barren == MAX_CRASHES or (len(self._crashes) == MAX_CRASHES and quick):
            when = "within a minute" if quick else "before a step was done"
            state, detail = "dead", f"{MAX_CRASHES} workers died {when}, the last: {error}"
        elif state != "draining":
            state, detail = "starting", f"starting another worker: {error}"
        self._close_books(state, detail, str(error))

    def _close_books(self, state: State, detail: str, error: str) -> None:
        """The worker's memory is gone: so is every request. The totals stay.

        The state is sent before the ends: who has read that its request is lost finds the service not ready.
        """
        self._past = msgspec.structs.replace(
            self.load(),
            capacity=0,
            free=0,
            held=0,
            cached=0,
            forecast_peak=0,
            num_running=0,
            num_waiting=0,
            step_age=0.0,
        )
        self._scheduler = None
        self._turn(state, detail)
        self._end_all("lost", error)
        self._send_map(Mapped(None, error))
