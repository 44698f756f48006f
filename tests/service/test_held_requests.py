"""Requests that wait for a grammar, in a router whose worker compiles when the test says so."""

import asyncio
import logging
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from lightkv.router.engine.grammars.grammar_desk import MAX_WAITING, Compile, Compiled
from lightkv.router.sampling_params import Grammar
from lightkv.router.service.grammars import held_requests
from lightkv.router.service.messages import Abort, Accepted, Refused
from lightkv.router.service.restarts import MAX_CRASHES
from tests.support.router_service import Client, FakeWorker, Service, assert_idle, service

CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT)
DIGITS, LETTERS = Grammar("regex", "[0-9]+"), Grammar("regex", "[a-z]+")


async def until(holds: object) -> None:
    """Waits until `holds()`, while the router works."""
    for _ in range(2000):
        if holds():  # type: ignore[operator]
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it did not come to hold")


async def connect(made: Service) -> tuple[Client, FakeWorker]:
    client = await made.connect()
    made.workers[-1].compiles_at_once = False
    return client, made.workers[-1]


async def test_a_request_waits_outside_the_engine_while_steps_go_on(tmp_path: Path) -> None:
    async with service(tmp_path, depth=2) as made:
        client, worker = await connect(made)
        assert await client.submit("bound", [1, 2], grammar=DIGITS) == Accepted("bound")
        assert await client.submit("free", [1, 2]) == Accepted("free")
        await client.until_ended("free")
        (order,) = worker.orders
        assert isinstance(order, Compile)
        assert order.grammar == DIGITS
        status = await client.until(lambda status: status.load.num_waiting == 1)
        assert status.load.num_running == 0
        assert "bound" not in {event.request_id for event in client.events}
        worker.answers.put_nowait(Compiled(order.grammar_id))
        ends = await client.until_ended("bound")
        assert ends["bound"].finish_reason == "length"
        rows = [row for plan in worker.model.plans for row in plan.new_rows]
        assert [row.grammar for row in rows] == [None, order.grammar_id]
        assert all(row.params.grammar is None for row in rows)  # a row names it, and does not carry it
        assert await client.submit("again", [1, 2], grammar=DIGITS) == Accepted("again")
        await client.until_ended("again")
        assert len(worker.orders) == 1
        assert_idle(await client.until(lambda status: status.load.generated_tokens == 15))
        made.router._held.check()


async def test_what_the_worker_cannot_compile_ends_its_requests(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        client, worker = await connect(made)
        for name in ("a", "b"):
            await client.submit(name, [1], grammar=DIGITS)
        worker.answers.put_nowait(Compiled(worker.orders[0].grammar_id, "no text matches it"))
        ends = await client.until_ended("a", "b")
        assert {end.finish_reason for end in ends.values()} == {"invalid"}
        assert "no text matches it" in str(ends["a"].error)
        assert len(made.router._held) == 0
        made.router._held.check()
        assert await client.submit("c", [1]) == Accepted("c")
        await client.until_ended("c")


async def test_a_grammar_that_kills_workers_is_refused_and_the_service_goes_on(tmp_path: Path) -> None:
    """More often than the router would otherwise start another worker."""
    async with service(tmp_path) as made:
        client, _ = await connect(made)
        for i in range(2 * MAX_CRASHES):
            made.workers[-1].compiles_at_once = False
            killer = Grammar("regex", f"a{{{i}}}")
            assert await client.submit(f"k{i}", [1], grammar=killer) == Accepted(f"k{i}")
            await until(lambda: made.workers[-1].orders)
            made.workers[-1].crash(CRASHES[i % len(CRASHES)])
            assert (await client.until_ended(f"k{i}"))[f"k{i}"].finish_reason == "lost"
            await until(lambda i=i: len(made.workers) == i + 2 and made.router.status().state == "ready")
            refused = await client.submit(f"again{i}", [1], grammar=killer)
            assert isinstance(refused, Refused)
            assert refused.kind == "invalid"
            assert "a worker died while it compiled this one" in refused.message
        assert await client.submit("honest", [1], grammar=LETTERS) == Accepted("honest")
        await client.until_ended("honest")


def crash_in_a_step(worker: FakeWorker) -> None:
    worker.fail_fatally = True


@pytest.mark.parametrize(
    "end",
    [
        lambda worker: worker.crash(signal.SIGKILL),  # as the kernel does when memory runs out
        lambda worker: worker.kill("a call took more than 60 s (--step-timeout is 60)"),
        crash_in_a_step,
    ],
    ids=["out of memory", "step timeout", "fatal step"],
)
async def test_a_worker_that_dies_of_something_else_while_it_compiles_counts(
    tmp_path: Path, end: Callable[[FakeWorker], None]
) -> None:
    """The grammar is not refused, and the router gives up as it does without grammars."""
    async with service(tmp_path, pause=0.001) as made:
        client, _ = await connect(made)
        for i in range(MAX_CRASHES):
            worker = made.workers[-1]
            worker.compiles_at_once = False
            assert await client.submit(f"g{i}", [1], grammar=DIGITS) == Accepted(f"g{i}")
            await until(lambda worker=worker: worker.orders)
            assert await client.submit(f"s{i}", [1], max_tokens=50) == Accepted(f"s{i}")
            end(worker)
            ends = await client.until_ended(f"g{i}", f"s{i}")
            assert {one.finish_reason for one in ends.values()} <= {"lost", "error"}
            if i + 1 < MAX_CRASHES:
                await until(lambda i=i: len(made.workers) == i + 2 and made.router.status().state == "ready")
        assert await asyncio.wait_for(made.exit_code, 60) == 1
        assert made.router.status().state == "dead"


async def test_a_worker_whose_answer_cannot_be_taken_is_killed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without an end, every later grammar would wait for ever."""
    caplog.set_level(logging.ERROR, "lightkv.router")
    async with service(tmp_path) as made:
        client, worker = await connect(made)
        await client.submit("a", [1], grammar=DIGITS)
        worker.answers.put_nowait(Compiled(99))
        end = (await client.until_ended("a"))["a"]
        assert end.finish_reason == "lost"
        assert "grammar 99 is not being compiled" in str(end.error)
        await until(lambda: len(made.workers) == 2 and made.router.status().state == "ready")
        assert await client.submit("b", [1], grammar=DIGITS) == Accepted("b")  # it was not to blame
        await client.until_ended("b")
    assert "cannot be taken any more" in caplog.text


async def test_held_requests_count_in_the_queue_and_leave_it_when_they_are_aborted(tmp_path: Path) -> None:
    async with service(tmp_path, max_queued=3) as made:
        client, worker = await connect(made)
        for i in range(3):
            grammar = Grammar("regex", f"b{{{i}}}")
            assert await client.submit(str(i), [1], grammar=grammar) == Accepted(str(i))
        full = await client.submit("3", [1], grammar=DIGITS)
        assert isinstance(full, Refused)
        assert full.kind == "queue_full"
        for i in range(3):
            client.stream.send(Abort(str(i)))
        await until(lambda: not len(made.router._held))
        worker.answers.put_nowait(Compiled(worker.orders[0].grammar_id))  # nobody waits for it any more
        assert await client.submit("4", [1], grammar=DIGITS) == Accepted("4")
        await until(lambda: len(worker.orders) == 2)  # those in between were never compiled
        worker.answers.put_nowait(Compiled(worker.orders[1].grammar_id))
        await client.until_ended("4")
        made.router._held.check()


async def test_a_key_with_many_grammars_waits_behind_its_own_and_is_refused_beyond_a_number(
    tmp_path: Path,
) -> None:
    async with service(tmp_path, max_queued=2 * MAX_WAITING) as made:
        client, worker = await connect(made)
        for i in range(MAX_WAITING + 1):  # the first is being compiled
            many = Grammar("regex", f"b{{{i}}}")
            assert await client.submit(f"g{i}", [1], grammar=many, grammar_owner=b"greedy") == Accepted(
                f"g{i}"
            )
        for name in ("beyond", "and again"):
            full = await client.submit(name, [1], grammar=LETTERS, grammar_owner=b"greedy")
            assert isinstance(full, Refused)
            assert full.kind == "queue_full"
            assert f"{MAX_WAITING} grammars" in full.message
        assert await client.submit("h", [1], grammar=DIGITS, grammar_owner=b"honest") == Accepted("h")
        for i in range(3):
            await until(lambda i=i: len(worker.orders) == i + 1)
            worker.answers.put_nowait(Compiled(worker.orders[i].grammar_id))
        assert (await client.until_ended("h"))["h"].finish_reason == "length"
        made.router._held.check()
        made.router._submitted.check()  # what was refused has claimed nothing


async def test_a_drained_router_waits_for_held_requests(tmp_path: Path) -> None:
    async with service(tmp_path) as made:
        client, worker = await connect(made)
        await client.submit("a", [1], grammar=DIGITS)
        made.router.drain()
        await asyncio.sleep(0.02)
        assert not made.exit_code.done()
        worker.answers.put_nowait(Compiled(worker.orders[0].grammar_id))
        assert (await client.until_ended("a"))["a"].finish_reason == "length"
        assert await asyncio.wait_for(made.exit_code, 60) == 0


async def test_a_worker_that_does_not_come_to_an_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_requests, "COMPILE_SECONDS", 0.05)
    async with service(tmp_path) as made:
        client, worker = await connect(made)
        await client.submit("a", [1], grammar=DIGITS)
        assert (await client.until_ended("a"))["a"].finish_reason == "lost"
        assert "took more than" in worker.reason
        await until(lambda: len(made.workers) == 2 and made.router.status().state == "ready")
        refused = await client.submit("b", [1], grammar=DIGITS)
        assert isinstance(refused, Refused)
        assert "a worker died while it compiled this one" in refused.message
