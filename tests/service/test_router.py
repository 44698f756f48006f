"""The router with a worker of integers: submissions, refusals, ends, crashes, draining. One process."""

import asyncio
import signal
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lightkv.router.config import EngineConfig
from lightkv.router.engine import loop as loop_module
from lightkv.router.engine.estimates import OutputLengths
from lightkv.router.engine.step import RunnerInfo
from lightkv.router.engine.step_time import StepTime
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.service import router as router_module
from lightkv.router.service.messages import (
    Abort,
    Accepted,
    FrameStream,
    NewAnswer,
    NewPrompt,
    Refused,
    ResetCache,
    Submit,
    ToApi,
    WorkerError,
)
from lightkv.router.service.restarts import MAX_CRASHES
from lightkv.router.service.router import Router
from lightkv.router.service.worker_client import WorkerFailed
from tests.support.router_service import Client, FakeWorker, Service, assert_idle, is_idle, service


@pytest.mark.parametrize("depth", [1, 2])
async def test_requests_are_accepted_answered_and_leave_nothing(
    tmp_path: Path, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router_module, "RECOUNT_SECONDS", 1000.0)
    async with service(tmp_path, depth) as made:
        client = await made.connect()
        for i in range(9):
            assert await client.submit(str(i), [7, 8, 9, *range(i)]) == Accepted(str(i))
        ends = await client.until_ended(*map(str, range(9)))
        assert made.workers[0].num_checks == 0  # the next request would wait for a recount
        assert {event.finish_reason for event in ends.values()} == {"length"}
        tokens = [event.token for event in client.events if event.request_id == "3"]
        assert len(tokens) == 5
        firsts = {
            event.request_id: event.num_cached for event in client.events if event.num_cached is not None
        }
        assert len(firsts) == 9
        status = await client.until(lambda status: is_idle(status) and status.load.num_steps > 0)
        assert_idle(status)
        assert status.load.generated_tokens == 45
        assert status.load.num_ledger_checks == status.load.num_steps
        monkeypatch.setattr(router_module, "RECOUNT_SECONDS", 0.0)
        await client.submit("last", [7])
        await client.until(lambda _: made.workers[0].num_checks > 0)
        await asyncio.sleep(0.1)
        assert made.workers[0].num_checks == 1  # nothing has changed since


async def test_a_request_that_comes_early_in_a_step_is_in_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SteadyWorker(FakeWorker):
        """Says that each step takes 1000 seconds, for most of which the next plan waits for requests."""

        async def start(self, config: EngineConfig, report: Callable[[str], None]) -> RunnerInfo:
            info = await super().start(config, report)
            return msgspec.structs.replace(info, step_time=StepTime.parse("base=1000"))

    steps_over = asyncio.Semaphore(1)  # before the third plan, the first step is over
    sleep = asyncio.sleep

    async def wait(seconds: float) -> None:
        await (steps_over.acquire() if seconds > 500 else sleep(seconds))

    monkeypatch.setattr(loop_module, "MOST_WAIT", 1000.0)
    monkeypatch.setattr(router_module.asyncio, "sleep", wait)
    async with service(tmp_path, depth=2, make=SteadyWorker) as made:
        client = await made.connect()
        await client.submit("a", [7, 8, 9], 4)
        while not client.events:
            await client.take()
        await client.submit("b", [7, 8, 10], 1)
        assert len(made.workers[0].model.plans) == 2  # the second is in flight, and none is behind it
        for _ in range(4):
            steps_over.release()
        await client.until_ended("a", "b")
        assert [plan.num_prefills for plan in made.workers[0].model.plans[:3]] == [1, 0, 1]


async def test_a_burst_of_requests_leaves_time_for_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_handled = 0
    handled: list[int] = []  # in each turn of the event loop

    def submit(self: Router, client: Any, message: Submit) -> Refused:
        nonlocal num_handled
        num_handled += 1
        return Refused(message.request_id, "queue_full", "for the test")

    monkeypatch.setattr(Router, "_submit", submit)
    async with service(tmp_path) as made:
        client = await made.connect()
        for i in range(100):
            params = SamplingParams(max_tokens=5, temperature=0.0)
            client.stream.send(Submit([NewPrompt(b"", [NewAnswer(str(i), 1)])], params, []))
        while sum(handled) < 100:
            await asyncio.sleep(0)
            handled.append(num_handled)
            num_handled = 0
    assert max(handled) <= router_module.MAX_MESSAGES


async def test_a_drained_router_recounts_before_it_ends(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        client = await made.connect()
        assert await client.submit("a", [7, 8, 9]) == Accepted("a")
        await client.until_ended("a")
        made.router.drain()
        assert await made.exit_code == 0
        assert made.workers[0].num_checks == 1


async def test_a_refusal_names_its_kind(tmp_path: Path) -> None:
    async with service(tmp_path, pause=0.02, max_queued=2) as made:
        client = await made.connect()
        refused = await client.submit("a", [1] * 90, 11)
        assert isinstance(refused, Refused)
        assert (refused.kind, "the context of 100" in refused.message) == ("never_fits", True)
        for name, prompt in (("b", []), ("c", [300])):
            refused = await client.submit(name, prompt)
            assert isinstance(refused, Refused)
            assert refused.kind == "invalid"
        answers = [await client.submit(f"q{i}", [i], 40) for i in range(9)]
        kinds = [answer.kind for answer in answers if isinstance(answer, Refused)]
        assert kinds
        assert set(kinds) == {"queue_full"}
        made.router.drain()
        refused = await client.submit("late", [1])
        assert isinstance(refused, Refused)
        assert refused.kind == "unavailable"


async def test_an_abort_or_a_disconnect_frees_within_two_steps(tmp_path: Path) -> None:
    async with service(tmp_path, pause=0.01) as made:
        client, other = await made.connect(), await made.connect()
        await client.submit("aborted", [1] * 20, 70)
        await other.submit("vanished", [2] * 20, 70)
        await client.until(lambda status: status.load.num_running == 2)
        client.stream.send(Abort("aborted"))
        other.stream.close()
        before = made.router.load().num_steps
        status = await client.until(is_idle)
        assert_idle(status)
        assert made.workers[0].model.plans[-1].step <= before + 2
        assert not [event for event in client.events if event.finish_reason]


async def test_a_failed_step_ends_its_requests_and_the_service_goes_on(tmp_path: Path) -> None:
    async with service(tmp_path, pause=0.005) as made:
        client = await made.connect()
        await client.submit("a", [1, 2], 50)
        made.workers[0].model.error = RuntimeError("no luck")
        ends = await client.until_ended("a")
        assert (ends["a"].finish_reason, ends["a"].error) == ("error", "RuntimeError: no luck")
        await client.submit("b", [1, 2])
        assert (await client.until_ended("b"))["b"].finish_reason == "length"
        assert len(made.workers) == 1


@pytest.mark.parametrize("while_idle", [True, False])
async def test_a_worker_that_dies_is_replaced(tmp_path: Path, while_idle: bool) -> None:
    async with service(tmp_path, pause=0.01) as made:
        client = await made.connect()
        if not while_idle:
            await client.submit("a", [1, 2], 90)
        await asyncio.sleep(0.05)
        made.workers[0].kill()
        if not while_idle:
            ends = await client.until_ended("a")
            assert ends["a"].finish_reason == "lost"
            assert client.status is not None
            assert client.status.state == "starting"
        status = await client.until(lambda s: s.state == "ready" and s.load.num_worker_starts == 2)
        assert_idle(status)
        assert status.load.cached == 0
        assert await client.submit("b", [1, 2]) == Accepted("b")
        assert (await client.until_ended("b"))["b"].finish_reason == "length"


async def test_three_deaths_within_a_minute_end_the_service(tmp_path: Path) -> None:
    made = Service(tmp_path / "router.sock", depth=1)
    client = await made.connect()
    for i in range(MAX_CRASHES):
        await client.until(
            lambda status, i=i: status.load.num_worker_starts == i + 1 and status.state == "ready"
        )
        made.workers[-1].kill()
    assert await asyncio.wait_for(made.exit_code, 60) == 1


async def test_workers_that_die_before_a_step_end_the_service_however_long_they_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightkv.router.service.restarts.CRASH_SECONDS", 0.0)  # no two crashes are within it
    made = Service(tmp_path / "router.sock", depth=1)
    client = await made.connect()
    num_starts = 2 * MAX_CRASHES
    for i in range(1, num_starts + 1):
        await client.until(lambda status, i=i: status.load.num_worker_starts == i and status.state == "ready")
        if i <= num_starts - MAX_CRASHES + 1:  # with a step between them, crashes do not add up
            await client.submit(str(i), [1, 2])
            await client.until_ended(str(i))
        made.workers[-1].kill()
    assert await asyncio.wait_for(made.exit_code, 60) == 1
    assert len(made.workers) == num_starts


async def submit_more_than_fits(client: Client) -> list[str]:
    """Submits short answers, which set the estimates, and then long ones, whose estimates are too low."""
    for i in range(OutputLengths.num_needed):
        await client.submit(f"short{i}", [i % 16], 2, False)
        await client.until_ended(f"short{i}")
    names = [f"long{i}" for i in range(4)]
    for i, name in enumerate(names):
        assert await client.submit(name, [i] * 30, 60, False) == Accepted(name)
    return names


@pytest.mark.parametrize("admission", ["guaranteed", "reserved"])
@pytest.mark.parametrize("depth", [1, 2])
async def test_preempted_requests_finish_while_the_service_drains(
    tmp_path: Path, depth: int, admission: str
) -> None:
    async with service(tmp_path, depth, pause=0.002, admission=admission) as made:
        client = await made.connect()
        names = await submit_more_than_fits(client)
        await client.until(lambda status: status.load.num_preemptions > 0)
        made.router.drain()
        ends = await client.until_ended(*names)
        assert {ends[name].finish_reason for name in names} == {"length"}
        for name in names:
            assert sum(event.request_id == name for event in client.events) == 60
        assert made.router.load().recomputed_tokens > 0
        assert await asyncio.wait_for(made.exit_code, 60) == 0


async def test_a_worker_that_dies_ends_preempted_requests_and_keeps_the_estimates(tmp_path: Path) -> None:
    async with service(tmp_path, 2, pause=0.002) as made:
        client = await made.connect()
        names = await submit_more_than_fits(client)
        while not made.router.load().num_preemptions:  # a status would arrive too late
            await asyncio.sleep(0.001)
        made.workers[0].kill()
        ends = await client.until_ended(*names)
        assert {ends[name].finish_reason for name in names} == {"lost"}
        await client.until(lambda status: status.state == "ready" and status.load.num_worker_starts == 2)
        assert await client.submit("next", [1] * 30, 60) == Accepted("next")
        assert (await client.until_ended("next"))["next"].finish_reason == "length"
        status = await client.until(is_idle)
        assert_idle(status)
        assert made.router._engine is not None
        assert made.router._engine.scheduler._admission is made.router._admission


async def test_counts_that_differ_end_the_service(tmp_path: Path) -> None:
    made = Service(tmp_path / "router.sock", depth=1, pause=0.01)
    client = await made.connect()
    await client.submit("a", [1, 2], 50)
    made.workers[0].model.count_error = 1
    ends = await client.until_ended("a")
    assert "the device counts" in (ends["a"].error or "")
    assert await asyncio.wait_for(made.exit_code, 60) == 1


async def test_the_end_of_every_request_ends_its_steps(tmp_path: Path) -> None:
    async with service(tmp_path, pause=0.01) as made:
        client = await made.connect()
        assert await client.submit("1", [7, 8, 9], max_tokens=90) == Accepted("1")
        while not client.events:  # its first token
            await client.take()
        made.router.drain()
        before = made.router.load().num_steps
        made.router.abort_all()
        assert (await client.until_ended("1"))["1"].finish_reason == "abort"
        assert await made.exit_code == 0
        assert made.router.load().num_steps <= before + 1  # the one in flight


async def test_work_that_begins_after_an_idle_time_has_not_waited_for_it(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        client = await made.connect()
        made.router._worked -= 1000  # as after an idle time of so many seconds
        prompts = [NewPrompt(array("i", [7, 8, 9]).tobytes(), [NewAnswer("1", 1)])]
        client.stream.send(Submit(prompts, SamplingParams(max_tokens=5), []))
        client.stream.send(ResetCache())  # which sends the status at once
        status = await client.until(lambda status: status.load.num_waiting == 1)
        assert status.load.step_age < 500


async def test_draining_finishes_accepted_requests(tmp_path: Path) -> None:
    made = Service(tmp_path / "router.sock", depth=1, pause=0.005)
    client = await made.connect()
    await client.submit("a", [1, 2], 30)
    made.router.drain()
    assert (await client.until_ended("a"))["a"].finish_reason == "length"
    assert await asyncio.wait_for(made.exit_code, 60) == 0


async def test_a_model_that_cannot_be_loaded_ends_the_service_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker would fail likewise, so none is started."""
    reason = "a K/V pool of 9 tokens takes 9 GiB"
    fails = asyncio.Event()

    async def start(worker: FakeWorker, config: EngineConfig, report: Callable[[str], None]) -> RunnerInfo:
        await fails.wait()
        raise WorkerFailed(WorkerError("NotEnoughMemory", reason, False))

    monkeypatch.setattr(FakeWorker, "start", start)
    async with service(tmp_path) as made:
        while not made.path.exists():
            await asyncio.sleep(0.001)
        client = Client(FrameStream(*await asyncio.open_unix_connection(made.path), ToApi))
        await client.until(lambda status: status.state == "starting")
        fails.set()
        assert reason in (await client.until(lambda status: status.state == "dead")).detail
        assert await made.exit_code == 1
    assert len(made.workers) == 1
    assert made.workers[0].killed.is_set()


async def test_no_worker_can_be_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with service(tmp_path) as made:
        client = await made.connect()
        monkeypatch.setattr(made.router, "_make_worker", Path("/nowhere/at/all").read_text)
        made.workers[0].crash(signal.SIGKILL)
        assert "nowhere" in (await client.until(lambda status: status.state == "dead")).detail
        assert await made.exit_code == 1
