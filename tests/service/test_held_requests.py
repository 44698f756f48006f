"""Requests that wait for a grammar, in a router whose worker compiles when the test says so."""

import asyncio
from pathlib import Path

import pytest

from lightkv.router.engine.grammar_desk import Compile, Compiled
from lightkv.router.sampling_params import Grammar
from lightkv.router.service.grammars import held_requests
from lightkv.router.service.messages import Abort, Accepted, Refused
from lightkv.router.service.restarts import MAX_CRASHES
from tests.service.test_router import Client, FakeWorker, Service, assert_idle, service

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


def test_a_request_waits_outside_the_engine_while_steps_go_on(tmp_path: Path) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_what_the_worker_cannot_compile_ends_its_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_a_grammar_that_kills_workers_is_refused_and_the_service_goes_on(tmp_path: Path) -> None:
    """More often than the router would otherwise start another worker."""

    async def scenario() -> None:
        async with service(tmp_path) as made:
            client, _ = await connect(made)
            for i in range(2 * MAX_CRASHES):
                made.workers[-1].compiles_at_once = False
                killer = Grammar("regex", f"a{{{i}}}")
                assert await client.submit(f"k{i}", [1], grammar=killer) == Accepted(f"k{i}")
                await until(lambda: made.workers[-1].orders)
                made.workers[-1].kill()
                assert (await client.until_ended(f"k{i}"))[f"k{i}"].finish_reason == "lost"
                await until(lambda i=i: len(made.workers) == i + 2 and made.router.status().state == "ready")
                refused = await client.submit(f"again{i}", [1], grammar=killer)
                assert isinstance(refused, Refused)
                assert refused.kind == "invalid"
                assert "a worker died while it compiled this one" in refused.message
            assert await client.submit("honest", [1], grammar=LETTERS) == Accepted("honest")
            await client.until_ended("honest")

    asyncio.run(scenario())


def test_held_requests_count_in_the_queue_and_leave_it_when_they_are_aborted(tmp_path: Path) -> None:
    async def scenario() -> None:
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

    asyncio.run(scenario())


def test_a_drained_router_waits_for_held_requests(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with service(tmp_path) as made:
            client, worker = await connect(made)
            await client.submit("a", [1], grammar=DIGITS)
            made.router.drain()
            await asyncio.sleep(0.02)
            assert not made.exit_code.done()
            worker.answers.put_nowait(Compiled(worker.orders[0].grammar_id))
            assert (await client.until_ended("a"))["a"].finish_reason == "length"
            assert await asyncio.wait_for(made.exit_code, 5) == 0

    asyncio.run(scenario())


def test_a_worker_that_does_not_come_to_an_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with service(tmp_path) as made:
            client, worker = await connect(made)
            await client.submit("a", [1], grammar=DIGITS)
            assert (await client.until_ended("a"))["a"].finish_reason == "lost"
            assert worker.killed.is_set()

    monkeypatch.setattr(held_requests, "COMPILE_SECONDS", 0.05)
    asyncio.run(scenario())
