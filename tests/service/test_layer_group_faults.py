"""Faults of a router's steps, worker and clients, with models whose layers hold their tokens unequally long.

After each, answers are transformers' own, a recount of ledger, table, pool and worker passes, and no slot is
held.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lightkv.router.engine.admission import Admission
from lightkv.router.engine.estimates import OutputLengths
from lightkv.router.service import router as router_module
from lightkv.router.service.messages import Abort, Accepted
from lightkv.router.simulate.admissions import SimulatedAdmission
from tests.support.combinations import slow
from tests.support.family_worker import FamilyWorker, save_family
from tests.support.router_service import Client, Service, service
from tests.support.windowed_models import LONG, expected, text

pytestmark = pytest.mark.usefixtures("one_thread")

FAMILIES = {"gemma3": 7, "gpt-oss": 2}  # slots of a token that all layers see
SLOTS = 450
NUM_NEW = 12
# They leave one another before, within and behind the last window of the longest.
PROMPTS = [LONG, LONG[:57] + text(20, 1), LONG[:76] + text(9, 2), text(40, 3), LONG[:30]]


def cases(family: str = "", depth: int = 0) -> pytest.MarkDecorator:
    """Parametrizes a test with all families and depths, of which `make test` takes only these, or none."""
    found = [
        pytest.param(*case, marks=() if case == (family, depth) else pytest.mark.slow)
        for case in [(name, num) for name in FAMILIES for num in (1, 2)]
    ]
    return pytest.mark.parametrize(("family", "depth"), found)


@pytest.fixture(autouse=True)
def recounts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "RECOUNT_SECONDS", 0.01)


class Running:
    """A service over a family's model, and a client of it."""

    def __init__(self, family: str, made: Service, client: Client) -> None:
        self.family = family
        self.made = made
        self.client = client

    @property
    def worker(self) -> FamilyWorker:
        worker = self.made.workers[-1]
        assert isinstance(worker, FamilyWorker)
        return worker

    async def submit(self, turn: str, max_tokens: int = NUM_NEW, client: Client | None = None) -> list[str]:
        """Submits all prompts. Returns their names."""
        names = [f"{turn} {i}" for i in range(len(PROMPTS))]
        for name, prompt in zip(names, PROMPTS, strict=True):
            assert await (client or self.client).submit(name, prompt, max_tokens) == Accepted(name)
        return names

    def answer(self, name: str) -> list[int]:
        events = [event for event in self.client.events if event.request_id == name]
        return [event.token for event in events if event.token is not None]

    async def until_step(self, num: int) -> None:
        """Waits until so many steps were planned from now on."""
        end = self.made.router.load().num_steps + num
        while self.made.router.load().num_steps < end:
            await asyncio.sleep(0.001)

    async def check_answers(self, names: list[str], max_tokens: int = NUM_NEW) -> None:
        """Waits for all these answers, which have to be right."""
        ends = await self.client.until_ended(*names)
        assert {ends[name].finish_reason for name in names} == {"length"}
        assert [self.answer(name) for name in names] == expected(self.family, PROMPTS, max_tokens)

    async def check_rest(self) -> None:
        """Waits until no request runs, and everything has been recounted."""
        num_checks = self.worker.num_checks
        while (load := self.made.router.load()).held or load.num_running or load.num_waiting:
            assert not self.made.exit_code.done()
            await asyncio.sleep(0.001)
        while self.worker.num_checks == num_checks and not self.made.router._is_checked:
            assert not self.made.exit_code.done(), self.made.router.status().detail
            await asyncio.sleep(0.001)
        assert load.free + load.cached == load.capacity


def fail_next_step(runner: Any) -> None:
    """Lets the model fail in the next step that is launched, once."""
    logits = runner._logits

    def fail(*_: Any) -> None:
        runner._logits = logits
        raise RuntimeError("no luck")

    runner._logits = fail


@asynccontextmanager
async def running(
    path: Path, family: str, depth: int, slots: int = SLOTS, admission: Admission | None = None
) -> AsyncIterator[Running]:
    directory = save_family(path / "model", family)
    num_tokens = slots // FAMILIES[family]
    async with service(
        path, depth, max_queued=50, make=lambda: FamilyWorker(directory, num_tokens, 0.001)
    ) as made:
        if admission is not None:
            made.router._admission = admission
        yield Running(family, made, await made.connect())


@pytest.mark.parametrize("num_steps", [9, *slow(1, 4, 14)])
@cases("gpt-oss", 2)
async def test_a_step_that_fails(family: str, depth: int, num_steps: int, tmp_path: Path) -> None:
    """In chunks of prompts, and while all decode."""
    async with running(tmp_path, family, depth) as one:
        await one.check_answers(await one.submit("before"))
        names = await one.submit("fails", 30)
        await one.until_step(num_steps)
        fail_next_step(one.worker.runner)
        ends = await one.client.until_ended(*names)
        assert "error" in {ends[name].finish_reason for name in names}
        await one.check_rest()
        await one.check_answers(await one.submit("after"))
        await one.check_rest()
        assert len(one.made.workers) == 1


@cases("gemma3", 1)
async def test_a_worker_that_dies(family: str, depth: int, tmp_path: Path) -> None:
    async with running(tmp_path, family, depth) as one:
        names = await one.submit("first", 30)
        await one.until_step(9)
        one.worker.kill()
        ends = await one.client.until_ended(*names)
        assert {ends[name].finish_reason for name in names} == {"lost"}
        await one.client.until(lambda s: s.state == "ready" and s.load.num_worker_starts == 2)
        await one.check_answers(await one.submit("second"))
        await one.check_rest()


@cases()
async def test_clients_that_disconnect_and_abort(family: str, depth: int, tmp_path: Path) -> None:
    """Others go on, which share their tokens."""
    async with running(tmp_path, family, depth, slots=2 * SLOTS) as one:
        for num_steps in (2, 7, 15):
            other = await one.made.connect()
            await one.submit(f"vanished {num_steps}", 30, other)
            names = await one.submit(f"own {num_steps}")
            aborted = await one.submit(f"aborted {num_steps}", 30)
            await one.until_step(num_steps)
            other.stream.close()
            for name in aborted:
                one.client.stream.send(Abort(name))
            await one.check_answers(names)
            await one.check_rest()


@cases()
async def test_requests_that_are_preempted(family: str, depth: int, tmp_path: Path) -> None:
    admission = SimulatedAdmission(OutputLengths(assumed=2), guarantees=False)
    async with running(tmp_path, family, depth, 400, admission) as one:
        names = await one.submit("a", 24) + await one.submit("b", 24)
        await one.check_answers(names[:5], 24)
        await one.check_answers(names[5:], 24)
        assert one.made.router.load().num_preemptions > 0
        await one.check_rest()


@cases()
async def test_more_requests_than_the_pool_holds(family: str, depth: int, tmp_path: Path) -> None:
    async with running(tmp_path, family, depth, slots=380) as one:
        turns = [await one.submit(turn) for turn in "abcd"]
        for names in turns:
            await one.check_answers(names)
        assert one.made.router.load().num_preemptions == 0
        await one.check_rest()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
@cases()
async def test_a_life_with_all_faults(family: str, depth: int, seed: int, tmp_path: Path) -> None:
    """Clients come and go, steps fail and workers die at random, in a pool too small for the load."""
    rng = random.Random(f"{family} {depth} {seed}")
    most = 24
    prompts = [LONG[: rng.randint(1, 80)] + text(rng.randint(1, 9), 100 * seed + i) for i in range(20)]
    own = expected(family, prompts, most)

    async def life(one: Running) -> None:
        clients, asked, num_right = [one.client], dict[str, tuple[Client, int]](), 0
        for number in range(400):
            if one.made.router.load().num_waiting < 8:
                name, index = str(number), rng.randrange(len(prompts))
                client = rng.choice(clients)
                states = rng.random() < 0.6
                answer = await client.submit(name, prompts[index], rng.randint(1, most), states)
                if answer == Accepted(name):
                    asked[name] = client, index
            await asyncio.sleep(rng.choice((0, 0.005, 0.05)))
            if rng.random() < 0.05:
                clients.append(await one.made.connect())
            if rng.random() < 0.05 and len(clients) > 1:
                client = clients.pop(rng.randrange(1, len(clients)))
                client.stream.close()
                asked = {name: found for name, found in asked.items() if found[0] is not client}
            if rng.random() < 0.1 and asked:
                name = rng.choice(list(asked))
                asked.pop(name)[0].stream.send(Abort(name))
            if rng.random() < 0.02:
                fail_next_step(one.worker.runner)
            if rng.random() < 0.01:
                one.worker.kill()
                await one.client.until(lambda s: s.load.num_worker_starts == len(one.made.workers))
                await one.client.until(lambda s: s.state == "ready")
                one.made.router._restarts = type(one.made.router._restarts)()
            if rng.random() < 0.05:
                num_right += await settle(one, asked)
                asked.clear()
        num_right += await settle(one, asked)
        assert num_right > 100

    async def settle(one: Running, asked: dict[str, tuple[Client, int]]) -> int:
        num_right = 0
        for name, (client, index) in asked.items():
            end = (await client.until_ended(name))[name]
            events = [event for event in client.events if event.request_id == name]
            tokens = [event.token for event in events if event.token is not None]
            assert tokens == own[index][: len(tokens)]
            assert end.finish_reason in ("length", "error", "lost")
            num_right += end.finish_reason == "length"
        await one.check_rest()
        return num_right

    admission = Admission(OutputLengths(assumed=4)) if seed % 2 else None
    async with running(tmp_path, family, depth, 420, admission) as one:
        await life(one)
