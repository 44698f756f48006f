"""Tests every admission in the engine, on a worker that checks its K/V; the estimates; and late requests."""

import random
from array import array

import pytest

from lightkv.ledger import TokenLedger
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.config import ADMISSIONS, InvalidConfig
from lightkv.router.engine.admission import make_admission
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits, StepResult
from lightkv.router.simulate.admissions import make_simulated
from lightkv.router.simulate.config import SIMULATED_ADMISSIONS
from tests.support.combinations import each_value
from tests.support.model_worker import STOP, ModelWorker, assert_idle

VOCABULARY = 300


def request(name: str, prompt: list[int], max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(name, array("i", prompt).tobytes(), params, 1, frozenset({STOP}))


def make(
    admission: str, capacity: int, max_num_seqs: int = 12, chunk: int = 0
) -> tuple[LocalEngine, ModelWorker]:
    ledger = TokenLedger(capacity, max_num_seqs, 90)
    worker = ModelWorker(capacity, random.Random(0), stop_chance=0.1)
    limits = Limits(max_num_seqs, 90, chunk, VOCABULARY)
    return LocalEngine(Scheduler(ledger, limits, admission=make_simulated(admission, 0, 0)), worker), worker


@each_value(admission=SIMULATED_ADMISSIONS, chunk=[0, 5])
def test_random_requests_under_each_admission(admission: str, chunk: int) -> None:
    """Prompts with shared prefixes run in a pool that a few requests fill. The worker raises if a slot is
    missing."""
    rng = random.Random(3)
    engine, _ = make(admission, 110, chunk=chunk)
    finished = number = 0
    while number < 120 or engine.has_work:
        if number < 120 and rng.random() < 0.5:
            prompt = [20] * rng.randint(0, 12) + [rng.randrange(20, 24) for _ in range(rng.randint(1, 25))]
            engine.add(request(str(number), prompt, rng.randint(1, 50)))
            number += 1
        events = engine.step()
        assert all(event.error is None for event in events)
        finished += sum(event.finish_reason in ("stop", "length") for event in events)
        if number % 10 == 0:
            engine.check()
    assert finished == 120
    assert_idle(engine)
    preemptions = engine.stats().num_preemptions
    if admission in ("sum", "reserved", "oracle"):
        assert preemptions == 0
    if admission in ("watermark", "past-future", "moving-average"):
        assert preemptions > 0


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_each_admission_is_a_setting_of_the_service(admission: str) -> None:
    assert EngineConfig(admission=admission).admission == admission


@pytest.mark.parametrize("admission", ["sum", "oracle", "watermark"])
def test_an_admission_for_comparison_is_refused_by_the_service(admission: str) -> None:
    with pytest.raises(InvalidConfig, match="give one of guaranteed, reserved, timely"):
        EngineConfig(admission=admission)


def running_at_first(admission: str, num: int, prompt: int, max_tokens: int, capacity: int) -> int:
    engine, worker = make(admission, capacity)
    worker.stop_chance = 0.0
    for i in range(num):
        engine.add(request(str(i), [30 + i] * prompt, max_tokens))
    engine.step()
    return engine.stats().num_running


def test_each_admission_admits_another_number_of_equal_requests() -> None:
    """Ten prompts of 10 tokens with up to 21 new ones: 30 slots each, since the last token is never written."""
    assert running_at_first("sum", 10, 10, 21, 100) == 3
    assert running_at_first("reserved", 10, 10, 21, 100) == 3
    assert running_at_first("watermark", 10, 10, 21, 100) == 9  # 99 tokens: 10 and one more of each


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def scheduler_of_one(clock: Clock) -> Scheduler:
    """Returns a scheduler that runs one request at a time. A request is late when it has waited 8 seconds."""
    admission = make_admission("timely", ttft_target=10.0)
    assert admission.patience == 8.0
    return Scheduler(TokenLedger(100, 1, 90), Limits(1, 90, 0, VOCABULARY), admission=admission, clock=clock)


def finish(scheduler: Scheduler) -> list[str]:
    """Runs until a request ends. Returns the ids of the requests that ended."""
    while True:
        plan = scheduler.plan()
        assert plan is not None
        events = scheduler.complete(StepResult(plan.step, [10] * len(plan.sample), plan.num_free, 0))
        scheduler.check()
        ended = [event.request_id for event in events if event.finish_reason]
        if ended:
            return ended


def test_a_late_request_runs_after_punctual_ones() -> None:
    clock = Clock()
    scheduler = scheduler_of_one(clock)
    scheduler.add(request("a", [1], 3))
    scheduler.add(request("b", [2], 3))
    assert finish(scheduler) == ["a"]
    clock.now = 5.0
    scheduler.add(request("c", [3], 3))
    clock.now = 8.5  # b is late
    assert finish(scheduler) == ["c"]
    scheduler.add(request("d", [4], 3))
    assert finish(scheduler) == ["d"]
    assert finish(scheduler) == ["b"]
    assert not scheduler.has_work
    scheduler.check()


def test_late_requests_keep_their_order_and_can_be_aborted() -> None:
    clock = Clock()
    scheduler = scheduler_of_one(clock)
    for name in "abcd":
        scheduler.add(request(name, [1], 3))
    clock.now = 100.0
    assert scheduler.abort("b")
    assert [finish(scheduler)[0] for _ in range(3)] == ["a", "c", "d"]
    assert scheduler.num_waiting == 0
    scheduler.check()


def test_a_unit_of_priority_is_worth_a_minute_of_waiting() -> None:
    """A stream of more urgent requests delays a request for a time that depends on their priority."""
    clock = Clock()
    ledger = TokenLedger(100, 1, 90)
    scheduler = Scheduler(ledger, Limits(1, 90, 0, VOCABULARY), clock=clock)
    patient = request("patient", [1], 3)
    patient.priority = 2
    scheduler.add(patient)
    served = []
    for minute in range(4):
        clock.now = 60.0 * minute + 1
        scheduler.add(request(f"urgent {minute}", [1], 3))
        served += finish(scheduler)
    assert served == ["urgent 0", "urgent 1", "patient", "urgent 2"]
    urgent = request("most urgent", [1], 3)
    urgent.priority = -5
    scheduler.add(urgent)
    assert finish(scheduler) == ["most urgent"]
    assert finish(scheduler) == ["urgent 3"]
    scheduler.check()


def test_priority_counts_more_than_waiting_time() -> None:
    clock = Clock()
    scheduler = scheduler_of_one(clock)
    urgent = request("urgent", [1], 3)
    urgent.priority = -1
    scheduler.add(urgent)
    clock.now = 9.0
    scheduler.add(request("new", [2], 3))
    assert [finish(scheduler)[0] for _ in range(2)] == ["urgent", "new"]
