"""Graphs are captured between steps for a small share of the time, and until none is missing."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from lightkv.ledger import TokenLedger
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import CAPTURE_SHARE, Captures, LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Captured, Limits, RunnerInfo
from tests.support.capturing import capture_before_each_step
from tests.support.model_worker import ModelWorker, assert_idle
from tests.support.router_service import FakeWorker, service


class FakeClock:
    """A clock that is moved by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("seconds", [0.01, 0.05, 0.3])
def test_captures_take_their_share_of_the_time(seconds: float) -> None:
    clock = FakeClock()
    captures, spent = Captures(100_000, clock), 0.0
    for _ in range(100_000):
        if captures.is_due():
            clock.now += seconds
            spent += seconds
            captures.note(Captured(seconds, captures.num_missing - 1))
        clock.now += 0.007
    assert 0.8 * CAPTURE_SHARE < (spent - seconds) / clock.now <= CAPTURE_SHARE  # the first comes at once


def test_the_first_is_captured_at_once_and_none_where_none_is_missing() -> None:
    clock = FakeClock()
    captures = Captures(1, clock)
    assert captures.is_due()
    captures.note(Captured(0.05, 0))
    clock.now += 100.0
    assert not captures.is_due()
    captures.num_missing = 2  # a step has lacked others meanwhile
    assert captures.is_due()
    assert not Captures(0, clock).is_due(is_idle=True)


def test_an_engine_captures_what_its_steps_lack() -> None:
    limits, worker = Limits(4, 100, 16, 300), ModelWorker(200, random.Random(0))
    worker.num_missing = 2
    engine = LocalEngine(Scheduler(TokenLedger(200, 4, 100), limits), worker, worker.num_missing)
    capture_before_each_step(engine, worker.num_missing)
    engine.add(Request("a", bytes(4 * 40), SamplingParams(max_tokens=20), seed=0))
    left = []
    while engine.has_work:
        engine.step()
        left.append(engine.stats().num_missing_graphs)
        if len(left) == 8:
            worker.num_missing += 1  # a row of another kind
    assert left[:3] == [1, 0, 0]
    assert left[-1] == worker.num_missing == 0
    assert worker.num_captured == 3
    assert_idle(engine)


async def test_a_service_at_rest_captures_what_is_missing(tmp_path: Path) -> None:
    class MissingWorker(FakeWorker):
        async def start(self, config: EngineConfig, report: Callable[[str], None]) -> RunnerInfo:
            self.model.num_missing = 7
            return replace(await super().start(config, report), num_missing_graphs=7)

    async with service(tmp_path, depth=2, make=MissingWorker) as made:
        client = await made.connect()
        await client.submit("a", [7, 8, 9], 4)
        await client.until_ended("a")
        status = await client.until(lambda status: not status.load.num_missing_graphs)
        assert (status.state, made.workers[0].model.num_captured) == ("ready", 7)
        assert status.detail.startswith("all CUDA graphs are captured")
