"""Tests the order of waiting requests, and how long one can be kept waiting."""

import itertools
import random
from array import array

import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.engine.admission import make_admission
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits
from lightkv.router.engine.waiting import LATE_EVERY, SECONDS_PER_PRIORITY, WaitingQueue
from lightkv.router.sampling_params import SamplingParams
from tests.support.model_worker import ModelWorker


def request(
    number: int,
    priority: int = 0,
    prompt: int = 1,
    max_tokens: int = 5,
    at: float = 0.0,
    seconds: float = 0.0,
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    made = Request(str(number), array("i", [number % 200] * prompt).tobytes(), params, 1, priority=priority)
    made.arrival, made.queued, made.prefill_seconds = number, at, seconds
    return made


def test_a_request_is_passed_only_by_those_that_come_within_a_minute_of_each_unit() -> None:
    """However many requests of priority 0 come: one each second, and each second one is admitted."""
    queue = WaitingQueue()
    queue.push(low := request(0, priority=2))
    for second in range(500):
        queue.push(request(1 + second, at=float(second)))
        if queue.pop() is low:
            break
    assert second == 2 * SECONDS_PER_PRIORITY


@pytest.mark.parametrize(
    ("urgent", "own", "minutes"),
    [(-(2**31), 0, 10), (-11, 0, 10), (-10, 0, 10), (-9, 0, 9), (0, 2**31, 60), (-(2**31), 2**31, 70)],
)
def test_extreme_priorities_pass_a_request_for_a_bounded_time(urgent: int, own: int, minutes: int) -> None:
    """However many urgent requests come: one every ten seconds, and each time one is admitted."""
    queue = WaitingQueue()
    queue.push(waiting := request(0, priority=own))
    for number in range(1, 1000):
        queue.push(request(number, priority=urgent, at=10.0 * number))
        if queue.pop() is waiting:
            break
    assert 10.0 * number == 60.0 * minutes


def test_a_long_prefill_is_passed_for_twice_what_it_takes_longer() -> None:
    """However many short ones come: one each 100 ms, and each time one is admitted."""
    queue = WaitingQueue()
    queue.push(long := request(0, seconds=1.0))
    for number in range(1, 100):
        queue.push(request(number, at=0.1 * number, seconds=0.17))
        if queue.pop() is long:
            break
    assert number == 17  # at 1.7 seconds, and not at 1.6


@pytest.mark.parametrize("seed", range(5))
def test_only_shorter_prefills_pass_and_only_within_their_time(seed: int) -> None:
    rng = random.Random(seed)
    queue = WaitingQueue()
    requests = [request(i, at=rng.uniform(0, 3), seconds=rng.choice((0.0, 0.1, 0.4, 1.0))) for i in range(60)]
    for one in requests:
        queue.push(one)
    queue.check()
    popped = [queue.pop() for _ in requests]
    for first, second in itertools.combinations(popped, 2):
        assert first.queued is not None
        assert second.queued is not None
        ahead = first.queued - second.queued
        assert ahead <= 2 * (second.prefill_seconds - first.prefill_seconds) + 1e-9
    assert any(first.queued > second.queued for first, second in itertools.pairwise(popped))  # type: ignore[operator]


def test_with_patience_extreme_priorities_leave_one_in_so_many_admissions() -> None:
    queue = WaitingQueue(patience=8.0)
    queue.push(waiting := request(0))
    popped = []
    for number in range(1, 200):
        queue.push(request(number, priority=-(2**31), at=10.0 * number))
        popped.append(queue.pop())
    assert popped.index(waiting) == 3 * LATE_EVERY - 1  # 600 seconds later


def test_with_patience_one_in_so_many_admissions_goes_to_the_longest_waiting_request() -> None:
    queue = WaitingQueue(patience=8.0)
    late = [request(number) for number in range(3)]
    for one in late:
        queue.push(one)
    assert queue.defer(9.0)
    low = request(3, priority=1, at=-55.0)  # counts as one that came at 5.0
    queue.push(low)
    popped = []
    for number in range(4, 6 * LATE_EVERY):
        queue.push(request(number, at=10.0))
        popped.append(queue.pop())
        queue.check()
    assert [popped.index(one) for one in [*late, low]] == [i * LATE_EVERY - 1 for i in (1, 2, 3, 4)]
    assert len(queue) == 4


def test_a_request_that_is_preempted_gets_its_place_back_once() -> None:
    """Its stale entries do not count, in either order."""
    queue = WaitingQueue(patience=8.0)
    one = request(0)
    for _ in range(3 * LATE_EVERY):
        queue.push(one)
        queue.push(request(1))
        assert queue.pop() is one
        one.num_preemptions += 1
        queue.pop()
        assert len(queue) == 0
        assert queue.head is None
        queue.check()


def test_random_lives_of_the_queue_keep_few_stale_entries() -> None:
    rng = random.Random(0)
    queue = WaitingQueue(patience=8.0)
    waiting: list[Request] = []
    for number in range(20_000):
        one = request(number, rng.randint(0, 2), at=float(number))
        queue.push(one)
        waiting.append(one)
        if number % 7 == 0:
            queue.defer(number)
        while len(waiting) > 50:
            if rng.random() < 0.3:
                gone = waiting.pop(rng.randrange(len(waiting)))
                queue.forget(gone)
            else:
                waiting.remove(queue.pop())
        if number % 500 == 0:
            queue.check()
    assert len(queue) == len(waiting)
    assert len(queue._heap) <= 2 * 51 + 64
    assert len(queue._by_age) <= 2 * 51 + 64


def test_small_requests_that_fit_do_not_pass_a_large_head() -> None:
    """The large one needs the whole pool. It is admitted when those that ran before it have ended, although
    small ones come in every step."""
    for admission in ("exact", "timely"):
        worker = ModelWorker(100, random.Random(0))
        ledger = TokenLedger(100, 32, 100)
        scheduler = Scheduler(ledger, Limits(32, 100, 0, 300), admission=make_admission(admission))
        engine = LocalEngine(scheduler, worker)
        number = 0
        for _ in range(5):
            engine.add(request(number, max_tokens=10))
            number += 1
            engine.step()
        engine.add(large := request(number, prompt=90, max_tokens=10))
        waited = 0
        while large.sequence is None:
            number += 1
            engine.add(request(number, max_tokens=10))
            engine.step()
            engine.check()
            waited += 1
        assert waited <= 12
