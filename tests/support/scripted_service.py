"""A service whose device is scripted: real router, worker and API processes, around a runner that sleeps as
long as a step would take and returns random tokens. What such a service needs beyond these times is its own.

    python -m tests.support.scripted_service router SOCKET SCRIPT     started by `ScriptedService`
    python -m tests.support.scripted_service worker SCRIPT …          started by the router
"""

import random
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import msgspec
import uvloop

from bench.serving.served import cpu_seconds, descendants
from lightkv.holdings import Holdings
from lightkv.router.config import EngineConfig
from lightkv.router.engine.step import (
    ExpectedMemory,
    Limits,
    PoolMap,
    RunnerInfo,
    StepPlan,
    StepResult,
)
from lightkv.router.service import worker
from lightkv.router.service.api_settings import ApiSettings, ServeSettings
from lightkv.router.service.messages import Done, WorkerStart
from lightkv.router.service.router import Router
from lightkv.router.service.worker_client import WorkerClient
from lightkv.router.text.grammars import Grammars

MODEL = "scripted"
MAX_QUEUED = 4096


class Script(msgspec.Struct, frozen=True):
    """How long the device takes: milliseconds of a step with decodes, of each decode in it, and of 512 prompt
    tokens; for a recount of the memory between steps. `vocab_size`: tokens are drawn below it."""

    decode_ms: float = 5.0
    row_ms: float = 0.035
    prompt_ms: float = 13.0
    check_ms: float = 0.0
    vocab_size: int = 49152

    def step_ms(self, plan: StepPlan) -> float:
        """Returns the milliseconds that the device takes for a plan."""
        num_decodes = len(plan.rows) - plan.num_prefills
        num_prompt = sum(plan.counts[: plan.num_prefills])
        return (self.decode_ms + self.row_ms * num_decodes) * bool(
            num_decodes
        ) + self.prompt_ms * num_prompt / 512


class ScriptedRunner:
    """Stands for a `ModelRunner`: steps run one after the other on a device that only the clock knows."""

    fatal = False

    def __init__(self, script: Script) -> None:
        self.grammars = Grammars(None, script.vocab_size)
        self._script = script
        self._rng = random.Random(0)
        self._is_free_at = 0.0
        self._in_flight: deque[tuple[float, StepPlan]] = deque()

    def launch(self, plan: StepPlan) -> None:
        begun = max(self._is_free_at, time.perf_counter())
        self._is_free_at = begun + self._script.step_ms(plan) / 1e3
        self._in_flight.append((self._is_free_at, plan))

    def collect(self) -> StepResult:
        done, plan = self._in_flight.popleft()
        time.sleep(max(done - time.perf_counter(), 0.0))
        tokens = self._rng.choices(range(100, self._script.vocab_size), k=len(plan.sample))
        return StepResult(plan.step, tokens, plan.num_free, 0)

    def check(self, edits: bytes, expected: ExpectedMemory) -> None:
        time.sleep(self._script.check_ms / 1e3)

    def skip(self, plan: StepPlan) -> None:
        raise NotImplementedError("no step fails here")

    def map(self, edits: bytes, holdings: Holdings) -> PoolMap:
        raise NotImplementedError("this device has no slots to describe")


class ScriptedWorker(worker.Worker):
    """A worker around a `ScriptedRunner`."""

    script = Script()

    def _start(self, start: WorkerStart) -> Done[RunnerInfo]:
        runner = ScriptedRunner(self.script)
        self._runner, self._pipeline = runner, worker.StepPipeline(runner, self._slow_work.finish)
        info = RunnerInfo(
            architecture="Scripted",
            device="a clock",
            dtype="none",
            attention_backend="none",
            cuda_graphs=True,
            capacity=1_000_000,
            bytes_per_token=0,
            pool_bytes=0,
            pool_reason="scripted",
            limits=Limits(256, 8192, 2048, self.script.vocab_size),
        )
        return Done(info)


class ScriptedService:
    """The processes of one service. `url`: its root."""

    def __init__(self, url: str, router: subprocess.Popen[bytes], api: subprocess.Popen[bytes]) -> None:
        self.url = url
        self._router = router
        self._api = api

    def cpu_seconds(self) -> dict[str, float]:
        """Returns the seconds of processor time of the api, the router and the worker since their start."""
        (worker_pid,) = descendants(self._router.pid)
        pids = {"api": self._api.pid, "router": self._router.pid, "worker": worker_pid}
        return {role: cpu_seconds(pid) for role, pid in pids.items()}


@contextmanager
def scripted_service(script: Script, tokenizer: Path) -> Iterator[ScriptedService]:
    """Runs a service for the length of a `with` block. `tokenizer`: a model's directory."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    listener.set_inheritable(True)
    module = [sys.executable, "-m"]
    with tempfile.TemporaryDirectory(prefix="lightkv-") as directory:
        path = Path(directory) / "router.sock"
        me = [
            *module,
            "tests.support.scripted_service",
            "router",
            str(path),
            msgspec.json.encode(script).decode(),
        ]
        router = subprocess.Popen(me)
        api = None
        try:
            while not path.exists():
                if router.poll() is not None:
                    raise ChildProcessError(f"the router ended with code {router.returncode}")
                time.sleep(0.01)
            settings = ServeSettings(
                api=ApiSettings(served_model_name=(MODEL,)),
                model_directory=str(tokenizer),
                router_socket=str(path),
                listen_fd=listener.fileno(),
            )
            api = subprocess.Popen(
                [*module, "lightkv.router.api.process"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[listener.fileno()],
            )
            assert api.stdin is not None
            assert api.stdout is not None
            api.stdin.write(msgspec.json.encode(settings))
            api.stdin.close()
            if api.stdout.readline() != b"ready\n":
                raise ChildProcessError("the API process did not start")
            host, port = listener.getsockname()
            yield ScriptedService(f"http://{host}:{port}", router, api)
        finally:
            for process in (router, api):  # the worker ends with its router
                if process is not None:
                    process.kill()
                    process.wait()
            listener.close()


def main() -> None:
    """Runs one process of the service."""
    role, *rest = sys.argv[1:]
    if role == "worker":
        ScriptedWorker.script = msgspec.json.decode(rest[0], type=Script)
        sys.argv = rest
        worker.main(ScriptedWorker)
        return
    path, script = rest
    program = [sys.executable, "-m", "tests.support.scripted_service", "worker", script]

    async def route() -> None:
        await Router(EngineConfig(), partial(WorkerClient, program=program), MAX_QUEUED).serve(Path(path))

    uvloop.run(route())


if __name__ == "__main__":
    main()
