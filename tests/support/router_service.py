"""A router of tests over a worker of integers, and its clients."""

import asyncio
import random
import signal
from array import array
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from lightkv.router.config import EngineConfig
from lightkv.router.engine.grammars.grammar_desk import Compile, Compiled, Forget
from lightkv.router.engine.loop import Engine
from lightkv.router.engine.step import (
    Captured,
    ExpectedMemory,
    Limits,
    RunnerInfo,
    StepPlan,
    StepResult,
    TokenEvent,
)
from lightkv.router.sampling_params import Grammar, SamplingParams
from lightkv.router.service.messages import (
    Accepted,
    Events,
    FrameStream,
    NewAnswer,
    NewPrompt,
    Refused,
    Status,
    Submit,
    ToApi,
    WorkerError,
)
from lightkv.router.service.router import Router
from lightkv.router.service.worker_client import WorkerDied, WorkerFailed
from tests.support.model_worker import ModelWorker

CAPACITY = 200


INFO = RunnerInfo(
    "Model", "cpu", "float32", "Torch", False, CAPACITY, 8, 1608, "given", Limits(4, 100, 16, 300)
)


class FakeWorker:
    """A worker whose steps are computed by the model of the memory; it can be killed, or made to fail."""

    def __init__(self, pause: float = 0.0) -> None:
        self.model = ModelWorker(CAPACITY, random.Random(0))
        self.pause = pause
        self.killed = asyncio.Event()
        self.reason = ""  # why the router killed it
        self.returncode = -signal.SIGKILL  # once it is killed
        self.num_checks = 0
        self.orders: list[Compile | Forget] = []
        self.answers: asyncio.Queue[Compiled] = asyncio.Queue()
        self.compiles_at_once = True
        self.fail_fatally = False  # in the next step

    def kill(self, reason: str = "") -> None:
        self.reason = self.reason or reason
        self.killed.set()

    def crash(self, number: signal.Signals) -> None:
        """Ends it by a signal that the router did not send."""
        self.returncode = -number
        self.killed.set()

    def send_grammar(self, order: Compile | Forget) -> None:
        self.orders.append(order)
        if isinstance(order, Compile) and self.compiles_at_once:
            self.answers.put_nowait(Compiled(order.grammar_id))

    async def take_grammar(self) -> Compiled:
        return await self.answers.get()

    async def start(self, config: EngineConfig, report: Callable[[str], None]) -> RunnerInfo:
        report("loading")
        return INFO

    async def step(self, plan: StepPlan) -> StepResult | None:
        self._require_alive()
        pending = len(self.model.results)
        self.model.send(plan)
        return await self.flush() if pending else None

    async def flush(self) -> StepResult | None:
        await asyncio.sleep(self.pause)
        self._require_alive()
        if self.fail_fatally:
            raise WorkerFailed(WorkerError("CudaError", "for the test", True))
        result = self.model.results.popleft()
        if isinstance(result, Exception):
            raise WorkerFailed(WorkerError("RuntimeError", str(result), False))
        return result

    async def capture(self) -> Captured:
        self._require_alive()
        return self.model.capture()

    async def check(self, edits: bytes, expected: ExpectedMemory) -> None:
        self.model.check(edits, expected)
        self.num_checks += 1

    async def wait_dead(self) -> WorkerDied:
        await self.killed.wait()
        return self._death()

    def _require_alive(self) -> None:
        if self.killed.is_set():
            raise self._death()

    def _death(self) -> WorkerDied:
        return WorkerDied(self.returncode, self.reason)


class Client:
    """An API process, as far as the router sees one."""

    def __init__(self, stream: FrameStream[ToApi]) -> None:
        self.stream = stream
        self.status: Status | None = None
        self.events: list[TokenEvent] = []

    async def take(self) -> Accepted | Refused | None:
        """Reads one message. Returns it if it answers a submission."""
        message = await asyncio.wait_for(self.stream.receive(), 60)
        assert message is not None, "the router hung up"
        if isinstance(message, Status):
            self.status = message
        elif isinstance(message, Events):
            self.events += message.events
        else:
            return message
        return None

    async def submit(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int = 5,
        states_length: bool = True,
        grammar: Grammar | None = None,
        grammar_owner: bytes = b"",
    ) -> Accepted | Refused:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, grammar=grammar)
        ids = array("i", prompt).tobytes()
        prompts = [NewPrompt(ids, [NewAnswer(name, 1)])]
        self.stream.send(
            Submit(prompts, params, [], states_length=states_length, grammar_owner=grammar_owner)
        )
        while (answer := await self.take()) is None:
            pass
        return answer

    async def until_ended(self, *names: str) -> dict[str, TokenEvent]:
        while not set(names) <= {event.request_id for event in self.events if event.finish_reason}:
            await self.take()
        return {event.request_id: event for event in self.events if event.finish_reason}

    async def until(self, what: Callable[[Status], bool]) -> Status:
        """Reads statuses that the router sent after what was read so far, until one is as wanted."""
        self.status = None
        while self.status is None or not what(self.status):
            await self.take()
        return self.status


class _Router(Router):
    """A router that has up to `depth` steps in flight, one or two."""

    depth = 1

    def _start_engine(self, info: RunnerInfo) -> Engine:
        return super()._start_engine(msgspec.structs.replace(info, cuda_graphs=self.depth == 2))


class Service:
    """A router that serves in this event loop, and the workers that it has made, by `make` if it is given."""

    def __init__(
        self,
        path: Path,
        depth: int,
        pause: float = 0.0,
        max_queued: int = 10,
        admission: str = "guaranteed",
        kv_events: str | None = None,
        make: Callable[[], FakeWorker] | None = None,
    ) -> None:
        self.path = path
        self.make = make
        self.pause = pause
        self.workers: list[FakeWorker] = []
        config = EngineConfig(admission=admission, kv_events=kv_events)
        self.router = _Router(config, self.make_worker, max_queued)
        self.router.depth = depth
        self.exit_code: asyncio.Task[int] = asyncio.create_task(self.router.serve(path))

    def make_worker(self) -> FakeWorker:
        self.workers.append(FakeWorker(self.pause) if self.make is None else self.make())
        return self.workers[-1]

    async def connect(self) -> Client:
        while not self.path.exists():
            await asyncio.sleep(0.001)
        reader, writer = await asyncio.open_unix_connection(self.path)
        client = Client(FrameStream(reader, writer, ToApi))
        await client.until(lambda status: status.state == "ready")
        return client


@asynccontextmanager
async def service(
    path: Path,
    depth: int = 1,
    pause: float = 0.0,
    max_queued: int = 10,
    admission: str = "guaranteed",
    kv_events: str | None = None,
    make: Callable[[], FakeWorker] | None = None,
) -> AsyncIterator[Service]:
    made = Service(path / "router.sock", depth, pause, max_queued, admission, kv_events, make)
    try:
        yield made
    finally:
        made.router.drain()
        made.router.abort_all()
        await asyncio.wait_for(made.exit_code, 60)


def is_idle(status: Status) -> bool:
    return not (status.load.held or status.load.num_running or status.load.num_waiting)


def assert_idle(status: Status) -> None:
    load = status.load
    assert (load.held, load.num_running, load.num_waiting) == (0, 0, 0)
    assert load.free + load.cached == CAPACITY
