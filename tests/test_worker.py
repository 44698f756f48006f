"""The worker process and its client: overlap and its errors, the wire and what it refuses, and every death."""

import asyncio
import dataclasses
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import rpyc
import tokenizers
import torch
import uvloop
from rpyc.core import consts
from transformers import LlamaConfig

from lightkv.edits import Drop, encode
from lightkv.ledger import TokenLedger
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.build import build_runner
from lightkv.router.engine import Holding
from lightkv.router.messages import Done, RunnerInfo, StepPlan, StepResult, WorkerError, WorkerStart
from lightkv.router.model_runner import ModelRunner
from lightkv.router.request import Request
from lightkv.router.sampling_params import SamplerKind
from lightkv.router.scheduler import Scheduler
from lightkv.router.weights import random_model
from lightkv.router.worker import RPYC_CONFIG, StepPipeline, Worker, connect
from lightkv.router.worker_client import WorkerClient, WorkerDied, WorkerFailed

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0.9, max_tokens=9),
    SamplingParams(temperature=0.8, top_k=20, frequency_penalty=0.5, logprobs=3, max_tokens=7),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    """A whole model, saved: two random layers and a tokenizer."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    random_model(CONFIG, torch.device("cpu"), torch.float32).save_pretrained(directory)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    tokenizer.save(str(directory / "tokenizer.json"))
    return EngineConfig(
        str(directory), device="cpu", dtype="float32", max_total_tokens=300, max_num_seqs=4, prefill_chunk=16
    )


class Recording:
    """What an in-process runner made of some requests: every plan with its result, and the books after."""

    def __init__(self, config: EngineConfig) -> None:
        runner, self.info = build_runner(config, lambda line: None)
        limits = self.info.limits
        ledger = TokenLedger(self.info.capacity, limits.max_num_seqs, limits.max_model_len)
        scheduler = Scheduler(ledger, limits)
        rng = random.Random(0)
        for i in range(8):
            ids = [*range(5, 25), *(rng.randrange(64) for _ in range(rng.randint(1, 20)))]
            scheduler.add(Request(str(i), array("i", ids).tobytes(), PARAMS[i % 3], seed=i))
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        while (plan := scheduler.plan()) is not None:
            self.plans.append(plan)
            self.results.append(runner.execute(plan))
            scheduler.consume(self.results[-1])
        self.edits = encode(ledger.drain())
        self.holding = Holding(ledger.num_free, [])
        runner.check(self.edits, self.holding)


@pytest.fixture(scope="module")
def recording(config: EngineConfig) -> Recording:
    return Recording(config)


def assert_same(results: list[StepResult | None], expected: list[StepResult]) -> None:
    assert len(results) == len(expected)
    for got, wanted in zip(results, expected, strict=True):
        assert got is not None
        assert (got.step, got.tokens) == (wanted.step, wanted.tokens)
        assert (got.num_free, got.flags) == (wanted.num_free, wanted.flags)
        assert got.logprobs.keys() == wanted.logprobs.keys()
        for i, entry in got.logprobs.items():
            assert entry.top_ids == wanted.logprobs[i].top_ids
            assert entry.logprob == pytest.approx(wanted.logprobs[i].logprob, abs=1e-5)
            assert entry.top_logprobs == pytest.approx(wanted.logprobs[i].top_logprobs, abs=1e-5)


# The model runner: launched ahead


def test_the_recording_has_every_kind_of_step(recording: Recording) -> None:
    assert {SamplerKind.RANDOM, SamplerKind.FULL} <= {plan.kind for plan in recording.plans}
    assert any(plan.num_contexts for plan in recording.plans)
    assert any(not plan.num_contexts for plan in recording.plans)
    assert any(plan.logprobs for plan in recording.plans)


def overlapped(runner: ModelRunner, plans: list[StepPlan]) -> list[StepResult | None]:
    results: list[StepResult | None] = []
    runner.launch(plans[0])
    for plan in plans[1:]:
        runner.launch(plan)
        results.append(runner.collect())
    return [*results, runner.collect()]


def test_steps_launched_ahead_give_the_same_results(config: EngineConfig, recording: Recording) -> None:
    runner, _ = build_runner(config, lambda line: None)
    assert_same(overlapped(runner, recording.plans), recording.results)
    runner.check(recording.edits, recording.holding)


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_steps_launched_ahead_give_the_same_results_on_a_gpu(config: EngineConfig, graphs: bool) -> None:
    gpu_config = dataclasses.replace(config, device="cuda", cuda_graphs=graphs)
    expected = Recording(gpu_config)
    runner, _ = build_runner(gpu_config, lambda line: None)
    assert_same(overlapped(runner, expected.plans), expected.results)
    runner.check(expected.edits, expected.holding)


@pytest.mark.gpu
def test_a_launch_does_not_wait(config: EngineConfig) -> None:
    gpu_config = dataclasses.replace(config, device="cuda", cuda_graphs=False)
    plans = Recording(gpu_config).plans
    runner, _ = build_runner(gpu_config, lambda line: None)
    for plan in plans[:-6]:
        runner.execute(plan)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for plan in plans[-6:]:
            runner.launch(plan)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [runner.collect().step for _ in range(6)] == [plan.step for plan in plans[-6:]]


def test_a_failed_launch_leaves_the_step_before_to_be_collected(
    config: EngineConfig, recording: Recording
) -> None:
    runner, _ = build_runner(config, lambda line: None)
    first, second = recording.plans[:2]
    runner.launch(first)
    with pytest.raises(IndexError):
        runner.launch(with_unknown_token(second))
    assert not runner.fatal
    assert_same([runner.collect()], recording.results[:1])
    for plan in recording.plans[2:]:
        runner.skip(plan)  # the edits are applied, so the books stay the ledger's
    runner.check(recording.edits, recording.holding)


def with_unknown_token(plan: StepPlan) -> StepPlan:
    """A plan that fails once its edits are applied."""
    assert plan.num_contexts
    unknown = array("i", [1000]).tobytes()
    return msgspec.structs.replace(plan, token_ids=unknown + plan.token_ids[len(unknown) :])


# The pipeline: each call answers for the step before


class ScriptedRunner:
    """Notes what is asked of it, and fails where it is told to."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.fatal = False
        self.launch_error: Exception | None = None
        self.collect_error: Exception | None = None
        self._steps: list[int] = []

    def launch(self, plan: StepPlan) -> None:
        self.log.append(f"launch {plan.step}")
        if self.launch_error is not None:
            error, self.launch_error = self.launch_error, None
            raise error
        self._steps.append(plan.step)

    def collect(self) -> StepResult:
        step = self._steps.pop(0)
        self.log.append(f"collect {step}")
        if self.collect_error is not None:
            error, self.collect_error = self.collect_error, None
            raise error
        return StepResult(step, [], 0, 0)

    def skip(self, plan: StepPlan) -> None:
        self.log.append(f"skip {plan.step}")


def bare_plan(step: int) -> StepPlan:
    return StepPlan(step, b"", [], [], [], 0, b"", [], SamplerKind.GREEDY, {}, [], 0)


def outcome(answer: Done[StepResult | None] | WorkerError) -> Any:
    """A result's step, or an error's step, kind and whether it is fatal."""
    if isinstance(answer, WorkerError):
        return answer.step, answer.kind, answer.fatal
    return None if answer.result is None else answer.result.step


@pytest.fixture
def scripted() -> ScriptedRunner:
    return ScriptedRunner()


@pytest.fixture
def pipeline(scripted: ScriptedRunner) -> StepPipeline:
    return StepPipeline(scripted)  # type: ignore[arg-type]


def test_a_step_is_launched_before_the_one_before_it_is_waited_for(
    pipeline: StepPipeline, scripted: ScriptedRunner
) -> None:
    answers = [pipeline.step(bare_plan(step)) for step in range(3)]
    answers += [pipeline.flush(), pipeline.flush()]
    assert [outcome(answer) for answer in answers] == [None, 0, 1, 2, None]
    assert scripted.log == ["launch 0", "launch 1", "collect 0", "launch 2", "collect 1", "collect 2"]


def test_a_failed_launch_is_answered_in_its_turn_and_fails_the_step_behind_it(
    pipeline: StepPipeline, scripted: ScriptedRunner
) -> None:
    answers = [pipeline.step(bare_plan(0))]
    scripted.launch_error = RuntimeError("out of luck")
    answers += [pipeline.step(bare_plan(step)) for step in (1, 2)]
    answers.append(pipeline.flush())
    assert [outcome(answer) for answer in answers] == [
        None,
        0,
        (1, "RuntimeError", False),
        (2, "StepSkipped", False),
    ]
    assert scripted.log == ["launch 0", "launch 1", "collect 0", "skip 2"]
    assert [outcome(pipeline.step(bare_plan(3))), outcome(pipeline.flush())] == [None, 3]


def test_a_failure_that_shows_when_the_result_is_read_names_its_own_step(
    pipeline: StepPipeline, scripted: ScriptedRunner
) -> None:
    pipeline.step(bare_plan(0))
    scripted.collect_error = RuntimeError("late")
    answers = [pipeline.step(bare_plan(1)), pipeline.flush()]
    assert [outcome(answer) for answer in answers] == [(0, "RuntimeError", False), 1]


def test_nothing_is_launched_after_a_fatal_failure(pipeline: StepPipeline, scripted: ScriptedRunner) -> None:
    pipeline.step(bare_plan(0))
    scripted.launch_error = RuntimeError("lost")
    answers = [pipeline.step(bare_plan(1))]
    scripted.fatal = True
    answers += [pipeline.step(bare_plan(2)), pipeline.step(bare_plan(3)), pipeline.flush()]
    assert [outcome(answer)[0] for answer in answers[1:]] == [1, 2, 3]
    assert [outcome(answer)[2] for answer in answers[2:]] == [True, True]
    assert scripted.log == ["launch 0", "launch 1", "collect 0"]


# The wire


@pytest.fixture
def worker() -> Worker:
    return Worker(io.StringIO())


NO_PLANS: dict[str, Any] = {
    "empty": b"",
    "no msgpack": b"\xc1\xff",
    "cut off": msgspec.msgpack.encode(bare_plan(0))[:-1],
    "trailing": msgspec.msgpack.encode(bare_plan(0)) + b"\x00",
    "other type": msgspec.msgpack.encode([1, 2]),
    "a field's type": msgspec.msgpack.encode({**msgspec.structs.asdict(bare_plan(0)), "step": "one"}),
    "pickle": b"\x80\x04N.",
    "str": "text",
    "bytearray": bytearray(b"\x80"),
    "subclass": type("Bytes", (bytes,), {})(b"\x80"),
    "none": None,
    "list": [],
}


@pytest.mark.parametrize("request_bytes", NO_PLANS.values(), ids=NO_PLANS)
@pytest.mark.parametrize("verb", ["start", "step", "check", "map"])
def test_what_is_no_message_is_refused(worker: Worker, verb: str, request_bytes: Any) -> None:
    answer = getattr(worker, f"exposed_{verb}")(request_bytes)
    error = msgspec.msgpack.decode(answer, type=WorkerError)
    assert (error.kind, error.fatal, error.step) == ("BadRequest", False, None)


def test_a_step_before_the_model_is_refused(worker: Worker) -> None:
    for answer in (worker.exposed_step(msgspec.msgpack.encode(bare_plan(0))), worker.exposed_flush()):
        error = msgspec.msgpack.decode(answer, type=WorkerError)
        assert (error.kind, error.message) == ("BadRequest", "no model yet; call start first")


def test_the_model_is_loaded_once(config: EngineConfig) -> None:
    worker = Worker(io.StringIO())
    request = msgspec.msgpack.encode(WorkerStart(config))
    info = msgspec.msgpack.decode(worker.exposed_start(request), type=Done[RunnerInfo]).result
    assert info.capacity == 300
    error = msgspec.msgpack.decode(worker.exposed_start(request), type=WorkerError)
    assert (error.kind, error.fatal) == ("BadRequest", False)
    assert msgspec.msgpack.decode(worker.exposed_flush(), type=Done[None]) == Done(None)


@pytest.mark.parametrize(("rank", "world_size"), [(1, 2), (0, 2), (1, 1)])
def test_another_rank_is_refused(worker: Worker, config: EngineConfig, rank: int, world_size: int) -> None:
    answer = worker.exposed_start(msgspec.msgpack.encode(WorkerStart(config, rank, world_size)))
    assert f"rank {rank} of {world_size}" in msgspec.msgpack.decode(answer, type=WorkerError).message


def test_an_impossible_setting_is_refused(worker: Worker, config: EngineConfig) -> None:
    request = msgspec.to_builtins(WorkerStart(config))
    request["config"]["mem_fraction"] = 2.0
    answer = worker.exposed_start(msgspec.msgpack.encode(request))
    assert "--mem-fraction is 2.0" in msgspec.msgpack.decode(answer, type=WorkerError).message


def test_rpyc_allows_calls_of_exposed_methods_and_nothing_else() -> None:
    allowed = {name for name, value in RPYC_CONFIG.items() if name.startswith("allow_") and value}
    assert allowed == {"allow_getattr", "allow_exposed_attrs"}
    known = {
        name for name in rpyc.core.protocol.DEFAULT_CONFIG if name.startswith(("allow_", "instantiate_"))
    }
    assert known <= RPYC_CONFIG.keys()
    on = [
        name for name, value in RPYC_CONFIG.items() if name.startswith(("import_", "instantiate_")) and value
    ]
    assert not on
    assert not RPYC_CONFIG["safe_attrs"]


@pytest.fixture
def hostile(worker: Worker) -> Iterator[rpyc.Connection]:
    """A client that may do all, against a worker served as it always is."""
    theirs, ours = socket.socketpair()
    served = connect(worker, theirs, RPYC_CONFIG)
    thread = threading.Thread(target=served.serve_all)
    thread.start()
    everything = {name: True for name in RPYC_CONFIG if name.startswith("allow_")}
    connection = connect(rpyc.VoidService(), ours, {**everything, "sync_request_timeout": 10})
    yield connection
    connection.close()
    thread.join(timeout=10)
    assert not thread.is_alive()


def test_a_hostile_client_reaches_the_exposed_methods_alone(hostile: rpyc.Connection) -> None:
    root = hostile.root
    names = {*dir(Worker), *dir(rpyc.Service), "_runner", "_pipeline", "_progress", "__globals__"}
    reached = set()
    for name in names:
        try:
            hostile.sync_request(consts.HANDLE_GETATTR, root, name)
        except AttributeError:
            continue
        reached.add(name.removeprefix("exposed_"))
    ours = {"start", "step", "flush", "check", "map"}
    assert reached == ours | {"get_service_name", "get_service_aliases"}  # rpyc's own: a name
    for name in dir(Worker.exposed_step):
        with pytest.raises(AttributeError):
            hostile.sync_request(consts.HANDLE_GETATTR, root.step, name)


def test_a_hostile_client_can_neither_write_nor_pickle(hostile: rpyc.Connection, worker: Worker) -> None:
    root = hostile.root
    before = dict(vars(worker))
    for handler, arguments in (
        (consts.HANDLE_SETATTR, ("exposed_step", 1)),
        (consts.HANDLE_SETATTR, ("_runner", 1)),
        (consts.HANDLE_DELATTR, ("_runner",)),
        (consts.HANDLE_PICKLE, (2,)),
        (consts.HANDLE_CALL, ((),)),
        (consts.HANDLE_CTXEXIT, (None,)),
        (consts.HANDLE_CMP, (1, "__init__")),
        (consts.HANDLE_BUFFITER, (1,)),
        (consts.HANDLE_OLDSLICING, ("__getitem__", "__getslice__", 0, 1, ())),
    ):
        with pytest.raises((AttributeError, TypeError, ValueError)):
            hostile.sync_request(handler, root, *arguments)
    assert vars(worker) == before


def test_live_objects_are_refused_as_requests(hostile: rpyc.Connection) -> None:
    for live in ([1], {"a": 1}, bytearray(b"x"), open, object()):
        error = msgspec.msgpack.decode(hostile.root.step(live), type=WorkerError)
        assert error.kind == "BadRequest"


# The process


def run(loop_factory: Callable[[], asyncio.AbstractEventLoop], work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(work)


@pytest.mark.parametrize("loop_factory", [uvloop.new_event_loop], ids=["uvloop"])
def test_a_worker_gives_the_results_of_the_runner_in_process(
    config: EngineConfig, recording: Recording, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def work() -> None:
        client = WorkerClient()
        lines: list[str] = []
        info = await client.start(config, lines.append)
        assert info == recording.info
        assert any(line.startswith("K/V pool: 300 tokens") for line in lines)
        assert "\n" not in "".join(lines)

        results = [await client.step(plan) for plan in recording.plans]
        results += [await client.flush(), await client.flush()]
        assert results[0] is None
        assert results[-1] is None
        assert_same(results[1:-1], recording.results)
        await client.check(recording.edits, recording.holding)

        with pytest.raises(RuntimeError, match="has been started"):
            await client.start(config, lines.append)
        flushing = asyncio.ensure_future(client.flush())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="a call is under way"):
            await client.flush()
        assert await flushing is None
        assert client.alive
        client.kill()
        assert (await client.wait_dead()).returncode == -signal.SIGKILL
        assert not client.alive

    run(loop_factory, work())


def test_failures_come_in_their_turn_and_a_killed_worker_is_seen_at_once(
    config: EngineConfig, recording: Recording
) -> None:
    async def work() -> None:
        client = WorkerClient()
        await client.start(config, lambda line: None)
        first, second, third = recording.plans[:3]
        assert await client.step(first) is None
        assert_same([await client.step(with_unknown_token(second))], recording.results[:1])
        with pytest.raises(WorkerFailed, match="step 1: IndexError") as failed:
            await client.step(third)
        assert (failed.value.step, failed.value.fatal) == (1, False)
        with pytest.raises(WorkerFailed, match=r"step 2: StepSkipped.*step 1 failed"):
            await client.flush()
        assert await client.step(recording.plans[3]) is None
        result = await client.flush()
        assert result is not None
        assert (result.step, result.num_free) == (3, recording.results[3].num_free)

        lost = msgspec.structs.replace(recording.plans[4], edits=encode([Drop(99, 0)]))
        assert await client.step(lost) is None
        with pytest.raises(WorkerFailed, match="step 4: KeyError") as failed:
            await client.flush()
        assert failed.value.fatal

        with pytest.raises(WorkerFailed, match="free slots") as failed:
            await client.check(encode([]), Holding(7, []))
        assert (failed.value.kind, failed.value.fatal) == ("CheckFailed", True)

        os.kill(client.pid, signal.SIGSTOP)  # so that a call is under way
        waiting = asyncio.ensure_future(client.flush())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        started = time.monotonic()
        os.kill(client.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await waiting
        assert (await client.wait_dead()).returncode == -signal.SIGKILL
        assert time.monotonic() - started < 2

    run(asyncio.new_event_loop, work())


def test_an_unknown_model_is_named_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    async def work() -> None:
        client = WorkerClient()
        with pytest.raises(WorkerFailed, match="nobody/nothing") as failed:
            await client.start(EngineConfig("nobody/nothing"), lambda line: None)
        assert (failed.value.kind, failed.value.fatal) == ("ModelNotFound", False)
        assert (await client.wait_dead()).returncode is not None

    run(asyncio.new_event_loop, work())


def is_running(pid: int) -> bool:
    """Not gone, and no zombie that nobody has reaped yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_gone(pid: int, seconds: float = 2.0) -> None:
    deadline = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


@pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT], ids=["SIGKILL", "SIGABRT"])
def test_a_worker_killed_while_it_loads(
    config: EngineConfig, loop_factory: Callable[[], asyncio.AbstractEventLoop], number: signal.Signals
) -> None:
    async def work() -> None:
        client = WorkerClient()
        starting = asyncio.ensure_future(client.start(config, lambda line: None))
        await asyncio.sleep(0.4)
        started = time.monotonic()
        os.kill(client.pid, number)
        with pytest.raises(WorkerDied, match=number.name) as died:
            await starting
        assert died.value.returncode == -number
        assert (await client.wait_dead()).returncode == -number
        assert time.monotonic() - started < 2
        with pytest.raises(WorkerDied):
            await client.flush()

    run(loop_factory, work())


def test_a_worker_leaves_signals_to_the_launcher(config: EngineConfig) -> None:
    """A whole group may be told to stop, and what runs is to finish: it ends when the router goes."""

    async def work() -> None:
        client = WorkerClient()
        starting = asyncio.ensure_future(client.start(config, lambda line: None))
        while not (ignored := ignored_signals(client.pid)):
            await asyncio.sleep(0.01)
        assert {signal.SIGTERM, signal.SIGINT} <= ignored
        os.kill(client.pid, signal.SIGTERM)
        os.kill(client.pid, signal.SIGINT)
        assert (await starting).device == "cpu"
        client.kill()
        await client.wait_dead()

    def ignored_signals(pid: int) -> set[int]:
        status = Path(f"/proc/{pid}/status").read_text()
        mask = int(status.split("SigIgn:")[1].split()[0], 16)
        found = {number for number in range(1, 32) if mask >> (number - 1) & 1}
        return found if signal.SIGTERM in found else set()

    run(asyncio.new_event_loop, work())


@pytest.mark.parametrize("num_turns", [1, 2, 3, 100])
@pytest.mark.parametrize(
    "loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
)
def test_a_cancelled_start_leaves_no_process(
    config: EngineConfig, loop_factory: Callable[[], asyncio.AbstractEventLoop], num_turns: int
) -> None:
    async def work() -> None:
        client = WorkerClient()
        start = asyncio.create_task(client.start(config, lambda line: None))
        for _ in range(num_turns):  # of the event loop
            await asyncio.sleep(0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        await client.wait_dead()
        assert not is_running(client.pid)

    run(loop_factory, work())


def test_an_event_loop_that_ends_takes_its_worker_down() -> None:
    pids: list[int] = []

    async def work() -> None:
        client = WorkerClient()
        pids.append(client.pid)
        await asyncio.sleep(0)

    run(asyncio.new_event_loop, work())
    wait_gone(pids[0])


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name
)
def test_a_worker_ends_with_the_process_that_started_it(config: EngineConfig, number: signal.Signals) -> None:
    """While it loads: its main thread is busy, and reads nothing from the socket."""
    program = (
        "import asyncio, json, sys\n"
        "from lightkv.router import EngineConfig\n"
        "from lightkv.router.worker_client import WorkerClient\n"
        "async def work():\n"
        "    client = WorkerClient()\n"
        "    print(client.pid, flush=True)\n"
        "    await client.start(EngineConfig(**json.loads(sys.argv[1])), lambda line: None)\n"
        "asyncio.run(work())\n"
    )
    settings = json.dumps(dataclasses.asdict(config))
    router = subprocess.Popen(
        [sys.executable, "-c", program, settings], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert router.stdout is not None
    with router, router.stdout as output:
        pid = int(output.readline())
        time.sleep(0.7)
        assert is_running(pid)
        router.send_signal(number)
        router.wait(timeout=10)
    wait_gone(pid)


def test_the_client_and_the_workers_start_know_no_torch() -> None:
    program = "import sys, lightkv.router.worker_client; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
