"""What the keys of a service have used: by name it adds up to the totals, whatever becomes of the requests."""

import asyncio
import random
from array import array
from pathlib import Path

import msgspec
import pytest

from lightkv.router.sampling_params import SamplingParams
from lightkv.router.service.access.key_usage import MAX_NAMES, OTHERS, KeyUsage, UsageByName
from lightkv.router.service.messages import Abort, Load, NewAnswer, NewPrompt, Status, Submit
from tests.support.router_service import Client, service

NAMES = ["alice", "bob", "carol"]


def check(load: Load) -> None:
    """By name, the counts are those of the whole engine."""
    totals = [
        sum(getattr(usage, name) for usage in load.by_key.values())
        for name in ("prompt_tokens", "cached_tokens", "generated_tokens", "interruptions")
    ]
    assert totals == [load.prompt_tokens, load.hit_tokens, load.generated_tokens, load.num_preemptions]


@pytest.mark.parametrize("depth", [1, 2])
async def test_figures_by_key_add_up_to_the_totals_after_aborts_and_kills(tmp_path: Path, depth: int) -> None:
    rng = random.Random(depth)
    names: list[str] = []
    num_statuses = 0

    async def read(client: Client, num_messages: int) -> None:
        nonlocal num_statuses
        for _ in range(num_messages):
            before = client.status
            await client.take()
            if client.status is not before and client.status is not None:
                check(client.status.load)
                num_statuses += 1

    async with service(tmp_path, depth=depth, max_queued=200) as made:
        clients = [await made.connect(), await made.connect()]
        for turn in range(230):
            client = rng.choice(clients)
            key, name, n = rng.choice(NAMES), f"q{turn}", rng.randint(1, 2)
            shared = list(range(rng.randrange(30)))
            ids = array("i", [*shared, turn]).tobytes()
            answers = [NewAnswer(f"{name}.{i}", i) for i in range(n)]
            params = SamplingParams(max_tokens=rng.randint(1, 60), temperature=0.0)
            submit = Submit([NewPrompt(ids, answers)], params, [], states_length=turn % 3 > 0, key=key)
            client.stream.send(submit)
            names += submit.request_ids
            if rng.random() < 0.3:
                client.stream.send(Abort(rng.choice(names)))
            await asyncio.sleep(0)
            if turn % 60 == 59:
                made.workers[-1].kill("for the test")
                made.router._restarts.__init__()  # type: ignore[misc] (it would give up)
                await client.until(lambda status: status.load.num_worker_starts == len(made.workers))
                await client.until(lambda status: status.state == "ready")
            if turn == 150:  # its requests are aborted with it
                clients[1].stream.close()
                clients[1] = await made.connect()
            made.router._broadcast()
            await read(client, 1)
        clients[0].status = None
        last = await clients[0].until(lambda status: not status.load.num_running + status.load.num_waiting)
        check(last.load)
        assert last.load.generated_tokens > 500
        assert last.load.hit_tokens > 0
        assert sum(usage.held for usage in last.load.by_key.values()) == 0
        assert set(last.load.by_key) == set(NAMES)
    assert num_statuses > 50


async def test_what_a_key_holds_now_is_that_of_its_running_requests(tmp_path: Path) -> None:
    async with service(tmp_path, pause=0.01) as made:
        client = await made.connect()
        for key in NAMES[:2]:
            ids = array("i", range(20)).tobytes()
            params = SamplingParams(max_tokens=70, temperature=0.0)
            client.stream.send(Submit([NewPrompt(ids, [NewAnswer(key, 1)])], params, [], key=key))

        def both_hold(status: Status) -> bool:
            return sum(usage.held >= 20 for usage in status.load.by_key.values()) == 2

        found = await client.until(both_hold)
        assert found.load.held <= sum(usage.held for usage in found.load.by_key.values())
        await client.submit("without", [1, 2, 3])  # of a service without keys
        await client.until_ended(*NAMES[:2], "without")
        done = await client.until(lambda status: not status.load.num_running)
        assert set(done.load.by_key) == set(NAMES[:2])


def test_names_have_a_bound_in_number_and_length() -> None:
    usage = UsageByName()
    names = [usage.begin(f"team-{i}", 1) for i in range(3000)]
    assert names[: MAX_NAMES - 1] == [f"team-{i}" for i in range(MAX_NAMES - 1)]
    assert set(names[MAX_NAMES:]) == {OTHERS}
    assert usage.begin("team-7", 1) == "team-7"
    assert len(usage.with_living([], True)) <= MAX_NAMES + 1
    assert sum(one.num_requests for one in usage.with_living([], True).values()) == 3001
    assert len(UsageByName().begin("x" * 10_000, 1)) <= 64
    status = Status("ready", "", Load(by_key={"x" * 60 + str(i): KeyUsage(*[10**9] * 6) for i in range(257)}))
    assert len(msgspec.msgpack.encode(status)) < 64_000  # some four times a second
