"""The worker as a process, and its client: the same results, failures in their turn, and every kind of end."""

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import uvloop

from lightkv.edits import FreeSegment, encode
from lightkv.holdings import Holdings
from lightkv.router import EngineConfig
from lightkv.router.engine.step import ExpectedMemory, StepPlan
from lightkv.router.service.messages import WorkerError
from lightkv.router.service.worker_client import WorkerClient, WorkerDied, WorkerFailed
from tests.support.recorded_steps import Recording, assert_same, replaying, with_unknown_token


@pytest.fixture(autouse=True)
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """The event loop of the tests that are coroutines: uvloop's, or the one that `LOOPS` names."""
    with asyncio.Runner(loop_factory=getattr(request, "param", uvloop.new_event_loop)) as runner:
        yield runner


LOOPS = pytest.mark.parametrize(
    "runner",
    [pytest.param(asyncio.new_event_loop, marks=pytest.mark.slow), uvloop.new_event_loop],
    ids=["asyncio", "uvloop"],
    indirect=True,
)


@LOOPS
@pytest.mark.parametrize(
    "loads", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["replay", "model"]
)
async def test_a_worker_has_the_results_of_a_runner_in_process_and_gets_large_plans_while_it_is_slow(
    config: EngineConfig, recording: Recording, loads: bool
) -> None:
    """The first plans' messages have 4 MiB each. In the end, a send to a dead worker raises. `loads`: the
    worker computes the results with the model; else it has them, and loads none."""

    def large(plan: StepPlan) -> StepPlan:
        return msgspec.structs.replace(plan, prompts=[bytes(4 << 20)])

    client = WorkerClient(program=None if loads else replaying(recording))
    lines: list[str] = []
    info = await client.start(config, lines.append)
    assert info == recording.info
    expected = "K/V pool: 300 tokens" if loads else "replaying"
    assert any(line.startswith(expected) for line in lines)
    assert "\n" not in "".join(lines)

    plans = [*map(large, recording.plans[:3]), *recording.plans[3:]]
    results = [await client.step(plans[0])]  # the worker is idle

    os.kill(client.pid, signal.SIGSTOP)  # the worker is stopped
    waiting = asyncio.ensure_future(client.step(plans[1]))
    for _ in range(10):  # the event loop is not blocked
        await asyncio.sleep(0.01)
    assert not waiting.done()
    os.kill(client.pid, signal.SIGCONT)
    results.append(await waiting)

    waiting = asyncio.ensure_future(client.step(plans[2]))
    for _ in range(20):  # the worker is slow
        os.kill(client.pid, signal.SIGSTOP)
        await asyncio.sleep(0.01)
        os.kill(client.pid, signal.SIGCONT)
        await asyncio.sleep(0.002)
    results.append(await waiting)

    results += [await client.step(plan) for plan in plans[3:]]
    results += [await client.flush(), await client.flush()]
    assert results[0] is None
    assert results[-1] is None
    assert_same(results[1:-1], recording.results)
    await client.check(recording.edits, recording.holding)

    assert client.alive

    os.kill(client.pid, signal.SIGKILL)
    while is_running(client.pid):  # the event loop has no turn in which to notice the end
        time.sleep(0.01)
    for plan in (large(plans[3]), plans[3]):
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await client.step(plan)
    assert (await client.wait_dead()).returncode == -signal.SIGKILL
    assert not client.alive


@pytest.mark.slow  # test_worker.py has these failures within a process
async def test_failures_are_reported_in_their_turn_and_a_killed_worker_at_once(
    config: EngineConfig, recording: Recording
) -> None:
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

    lost = msgspec.structs.replace(recording.plans[4], edits=encode([FreeSegment(99, 0)]))
    assert await client.step(lost) is None
    with pytest.raises(WorkerFailed, match="step 4: KeyError") as failed:
        await client.flush()
    assert failed.value.fatal

    with pytest.raises(WorkerFailed, match="free slots") as failed:
        await client.check(encode([]), ExpectedMemory(7, Holdings([], {})))
    assert (failed.value.kind, failed.value.fatal) == ("CheckFailed", True)

    os.kill(client.pid, signal.SIGSTOP)  # so that a call is in flight
    waiting = asyncio.ensure_future(client.flush())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    started = time.monotonic()
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        await waiting
    assert (await client.wait_dead()).returncode == -signal.SIGKILL
    assert time.monotonic() - started < 20  # long before its call would be overdue


def ignored_signals(pid: int) -> set[int]:
    """Returns the signals that a worker ignores; none until it has set what ends it."""
    status = Path(f"/proc/{pid}/status").read_text()
    mask = int(status.split("SigIgn:")[1].split()[0], 16)
    found = {number for number in range(1, 32) if mask >> (number - 1) & 1}
    return found if signal.SIGTERM in found else set()


# A worker that loads no model and computes nothing. {info}: the RunnerInfo that it reports, as hex digits.
WITHOUT_MODEL = """
import time
from types import SimpleNamespace
import msgspec
from lightkv.router.service.messages import Done
from lightkv.router.service.worker import StepPipeline, Worker, main

class WithoutModel(Worker):
    def _start(self, start):
        time.sleep(0.3)
        self._runner = SimpleNamespace(fatal=False, launch=lambda plan: None)
        self._pipeline = StepPipeline(self._runner)
        return Done(msgspec.msgpack.decode(bytes.fromhex("{info}")))

main(WithoutModel)
"""
WITHOUT_SENSE = WITHOUT_MODEL.replace(
    "\nmain(", "    def exposed_flush(self):\n        return {answer}\n\nmain("
)


@pytest.mark.parametrize("answer", ["b'nonsense'", "b'\\x81\\xa1x' * 100_000 + b'\\x80'", "'text'"])
async def test_a_worker_whose_answer_is_no_message_is_killed(
    config: EngineConfig, recording: Recording, answer: str
) -> None:
    info = msgspec.msgpack.encode(recording.info).hex()
    program = [sys.executable, "-c", WITHOUT_SENSE.format(info=info, answer=answer)]
    client = WorkerClient(program=program)
    await client.start(config, lambda line: None)
    with pytest.raises(WorkerDied, match="its answer to flush is not a valid message"):
        await client.flush()
    assert (await client.wait_dead()).returncode == -signal.SIGKILL


async def test_a_failure_is_raised_with_its_step_and_the_worker_goes_on(
    config: EngineConfig, recording: Recording
) -> None:
    info = msgspec.msgpack.encode(recording.info).hex()
    answer = msgspec.msgpack.encode(WorkerError("IndexError", "token 1000", False, 1))
    program = [sys.executable, "-c", WITHOUT_SENSE.format(info=info, answer=answer)]
    client = WorkerClient(program=program)
    await client.start(config, lambda line: None)
    for _ in range(2):
        with pytest.raises(WorkerFailed, match="step 1: IndexError") as failed:
            await client.flush()
        assert (failed.value.step, failed.value.fatal) == (1, False)
    os.kill(client.pid, signal.SIGSTOP)  # so that a call is in flight
    waiting = asyncio.ensure_future(client.flush())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    os.kill(client.pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        await waiting
    assert (await client.wait_dead()).returncode == -signal.SIGKILL


async def test_a_worker_leaves_signals_to_the_launcher_and_is_killed_if_it_does_not_answer_in_time(
    config: EngineConfig, recording: Recording
) -> None:
    """A signal may reach the whole process group, but running requests have to finish: the worker ends with the
    router, or if a call takes too long."""
    info = msgspec.msgpack.encode(recording.info).hex()
    client = WorkerClient(step_timeout=1.0, program=[sys.executable, "-c", WITHOUT_MODEL.format(info=info)])
    starting = asyncio.ensure_future(client.start(config, lambda line: None))
    while not (ignored := ignored_signals(client.pid)):
        await asyncio.sleep(0.01)
    assert {signal.SIGTERM, signal.SIGINT} <= ignored
    os.kill(client.pid, signal.SIGTERM)
    os.kill(client.pid, signal.SIGINT)
    assert (await starting).device == "cpu"
    await asyncio.sleep(1.2)  # no call is in flight, so none is overdue
    assert await client.step(recording.plans[0]) is None
    os.kill(client.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(WorkerDied, match=r"took more than 1 s \(--step-timeout is 1\)"):
        await client.flush()
    assert time.monotonic() - started >= 1
    died = await client.wait_dead()
    assert (died.returncode, client.alive) == (-signal.SIGKILL, False)
    assert "--step-timeout" in str(died)
    wait_gone(client.pid)


async def test_a_worker_that_refuses_its_start_says_why_and_ends(config: EngineConfig) -> None:
    """The setting is refused before torch is imported."""
    wrong = dataclasses.replace(config)
    object.__setattr__(wrong, "model", 7)
    client = WorkerClient()
    with pytest.raises(WorkerFailed, match=r"\$\.config\.model") as failed:
        await client.start(wrong, lambda line: None)
    assert (failed.value.kind, failed.value.fatal) == ("BadRequest", False)
    assert (await client.wait_dead()).returncode is not None


@pytest.mark.slow
async def test_an_unknown_model_is_reported_as_such(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    client = WorkerClient()
    with pytest.raises(WorkerFailed, match="nobody/nothing") as failed:
        await client.start(EngineConfig("nobody/nothing"), lambda line: None)
    assert (failed.value.kind, failed.value.fatal) == ("ModelNotFound", False)
    assert (await client.wait_dead()).returncode is not None


def is_running(pid: int) -> bool:
    """Returns whether a process exists and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def wait_gone(pid: int, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.01)


@LOOPS
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT], ids=["SIGKILL", "SIGABRT"])
async def test_a_worker_killed_while_it_loads(config: EngineConfig, number: signal.Signals) -> None:
    client = WorkerClient()
    starting = asyncio.ensure_future(client.start(config, lambda line: None))
    await asyncio.sleep(0.4)
    os.kill(client.pid, number)
    with pytest.raises(WorkerDied, match=number.name) as died:
        await starting
    assert died.value.returncode == -number
    assert (await client.wait_dead()).returncode == -number
    with pytest.raises(WorkerDied):
        await client.flush()


@pytest.mark.parametrize("num_turns", [1, 2, 3, 100])
@LOOPS
async def test_a_cancelled_start_leaves_no_process(config: EngineConfig, num_turns: int) -> None:
    client = WorkerClient()
    start = asyncio.create_task(client.start(config, lambda line: None))
    for _ in range(num_turns):  # turns of the event loop
        await asyncio.sleep(0)
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    await client.wait_dead()
    assert not is_running(client.pid)


def test_a_worker_ends_with_the_event_loop_of_its_client() -> None:
    async def work() -> int:
        return WorkerClient().pid

    wait_gone(asyncio.run(work()))


@pytest.mark.parametrize(
    ("number", "is_stopped"),
    [
        (signal.SIGKILL, False),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.slow),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.slow),
        (signal.SIGKILL, True),
    ],
    ids=["SIGKILL", "SIGTERM", "SIGINT", "stopped"],
)
def test_a_worker_ends_with_the_process_that_started_it(
    config: EngineConfig, number: signal.Signals, is_stopped: bool
) -> None:
    """Its main thread is loading the model, and reads nothing from the socket; or the process is stopped."""
    program = (
        "import asyncio, json, sys\n"
        "from lightkv.router import EngineConfig\n"
        "from lightkv.router.service.worker_client import WorkerClient\n"
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
        while not ignored_signals(pid):
            time.sleep(0.01)
        time.sleep(0.5)
        assert is_running(pid)
        if is_stopped:
            os.kill(pid, signal.SIGSTOP)
        router.send_signal(number)
        router.wait(timeout=60)
    wait_gone(pid)
