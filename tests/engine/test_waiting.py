"""Tests the order of waiting requests, and how long one can be kept waiting."""

import itertools
import random
from array import array

import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.engine.admission import make_admission
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.prefill_budget import PrefillBudget
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits
from lightkv.router.engine.step_time import StepTime
from lightkv.router.engine.waiting import LATE_EVERY, SECONDS_PER_PRIORITY, WaitingQueue
from lightkv.router.sampling_params import SamplingParams
from tests.support.combinations import slow_cases
from tests.support.model_worker import ModelWorker

# A device on which a hundred prompt tokens take as long as all else.
SMALL = StepTime(base=1e-3, per_decode=1e-5, per_kv=1e-7, prefill=0.0, per_prompt=1e-5, per_pair=2e-8)


def request(number: int, priority: int = 0, prompt: int = 1, max_tokens: int = 5, at: float = 0.0) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    made = Request(str(number), array("i", [number % 200] * prompt).tobytes(), params, 1, priority=priority)
    made.arrival, made.queued = number, at
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
    for number in range(6_000):
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
    assert len(queue._otherwise) <= 2 * 51 + 64


def bounded_engine(capacity: int, num_rows: int) -> LocalEngine:
    """Returns an engine whose steps a model of step times keeps short."""
    limits = Limits(num_rows, 900, 300, 300, itl_target=0.0025)
    ledger = TokenLedger(capacity, num_rows, 900)
    scheduler = Scheduler(ledger, limits, budget=PrefillBudget(limits, SMALL))
    return LocalEngine(scheduler, ModelWorker(capacity, random.Random(0)))


def queue_with_cache(cached: int = 0) -> WaitingQueue:
    """A queue in which short prompts pass long ones, with this many tokens of 1 in the cache."""
    ledger = TokenLedger(10_000, 4, 5000)
    if cached:
        sequence = ledger.open(array("i", [1] * cached).tobytes())
        ledger.extend([sequence], [cached])
        ledger.publish(sequence)
        ledger.close(sequence)
    return WaitingQueue(cache=ledger)


def pop_all(queue: WaitingQueue) -> list[int]:
    """Pops all requests, those that may pass the head before it. Returns their numbers."""
    popped = []
    while nexts := queue.nexts:
        assert nexts[-1] is queue.head
        popped.append(queue.pop(nexts[0]).arrival)
        queue.check()
    return popped


def test_a_long_prompt_lets_as_many_tokens_pass_as_it_has() -> None:
    lengths = [100, 40, 100, 30, 99, 40, 21, 100]
    queue = queue_with_cache()
    for number, length in enumerate(lengths):
        queue.push(request(number, prompt=length))
    # The first lets 21, 30 and 40 tokens pass, and then no 40 any more. The third lets 40 pass, and no 99.
    assert pop_all(queue) == [6, 3, 1, 0, 5, 2, 4, 7]
    queue = WaitingQueue()
    for number, length in enumerate(lengths):
        queue.push(request(number, prompt=length))
    assert pop_all(queue) == list(range(8))


def test_a_cached_prompt_counts_with_the_rest_of_it() -> None:
    queue = queue_with_cache(cached=900)
    queue.push(request(1, prompt=1000))
    queue.push(request(2, prompt=101))
    queue.push(request(3, prompt=99))
    assert pop_all(queue) == [3, 1, 2]


def test_short_prompts_of_lower_priority_do_not_pass() -> None:
    queue = queue_with_cache()
    queue.push(request(0, prompt=100))
    queue.push(request(1, priority=1, prompt=10))
    assert pop_all(queue) == [0, 1]
    queue.push(request(2, priority=1, prompt=100))
    queue.push(request(3, priority=1, prompt=10, at=1.0))
    assert pop_all(queue) == [3, 2]
    queue.push(request(4, prompt=4000))
    queue.push(request(5, priority=1, prompt=10))
    queue.push(request(6, prompt=100))
    assert pop_all(queue) == [6, 4, 5]


@pytest.mark.parametrize("seed", range(4))
def test_however_many_short_prompts_come_a_wait_is_bounded(seed: int) -> None:
    """By twice the tokens that waited before, and once the own ones. Some are aborted, or preempted once."""
    rng = random.Random(seed)
    queue = queue_with_cache()
    waiting: dict[Request, int] = {}  # and the tokens that may still be computed before each
    popped: list[Request] = []
    for number in range(2000):
        length = rng.choice((1, 3, 10, 50, 200))
        one = request(number, prompt=length, at=float(number))
        waiting[one] = length + 2 * sum(other.num_prompt for other in waiting)
        queue.push(one)
        if len(waiting) > 1 and rng.random() < 0.1:
            gone = rng.choice(list(waiting))
            queue.forget(gone)
            del waiting[gone]
        if waiting and rng.random() < 0.9:
            popped.append(first := queue.pop(queue.nexts[0]))
            left = waiting.pop(first)
            for other in waiting:
                waiting[other] -= first.num_prompt
            assert min(waiting.values(), default=0) >= 0
            if rng.random() < 0.05 and not first.num_preemptions:
                first.num_preemptions += 1
                queue.push(first)
                for other in waiting:
                    waiting[other] += first.num_prompt
                waiting[first] = left + 2 * sum(other.num_prompt for other in waiting)
        if number % 50 == 0:
            queue.check()
    assert any(one.arrival > other.arrival for one, other in itertools.pairwise(popped))


def test_small_requests_that_fit_do_not_pass_a_large_head() -> None:
    """The large one needs the whole pool. It is admitted when those that ran before it have ended, although
    small ones come in every step."""
    for admission, chunk in (("reserved", 0), ("timely", 0), ("reserved", 64)):
        worker = ModelWorker(100, random.Random(0))
        ledger, limits = TokenLedger(100, 32, 100), Limits(32, 100, chunk, 300)
        budget = PrefillBudget(limits, StepTime.parse(""))  # bounds the steps where prompts are cut
        scheduler = Scheduler(ledger, limits, admission=make_admission(admission), budget=budget)
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


@pytest.mark.parametrize(("capacity", "num_rows"), [*slow_cases((40_000, 4)), (1700, 64)])
def test_no_short_prompt_takes_what_a_long_one_could_have(capacity: int, num_rows: int) -> None:
    """While the first is computed, there is room for the second, and for it and a short one not for sure."""
    engine = bounded_engine(capacity, num_rows)
    engine.add(*(request(number, max_tokens=60) for number in range(2)))
    engine.step()
    engine.add(first := request(2, prompt=640, max_tokens=20))
    engine.step()
    assert first.sequence is not None
    engine.add(second := request(3, prompt=700, max_tokens=20))
    small = [request(number, prompt=20, max_tokens=100) for number in range(4, 40)]
    engine.add(*small)
    while second.sequence is None:
        engine.step()
        engine.check()
    with_row = sum(one.sequence is not None for one in small)
    assert with_row == (0 if num_rows == 4 else 1)
    assert first.num_prefill_left == 0
    assert not first.output or len(first.output) < 3


def test_what_is_more_urgent_than_a_prefill_is_not_delayed_by_one_that_passes_it() -> None:
    engine = bounded_engine(4000, 8)
    engine.add(request(0, prompt=650))
    engine.step()
    engine.add(request(1, prompt=600, priority=-1), request(2, prompt=20, priority=-1, at=100.0))
    assert first_tokens(engine) == ["2", "1", "0"]


def first_tokens(engine: LocalEngine) -> list[str]:
    """Runs the engine until it is idle. Returns the requests in the order of their first tokens."""
    found: dict[str, None] = {}
    while engine.has_work:
        found |= dict.fromkeys(event.request_id for event in engine.step())
        engine.check()
    return list(found)


def test_a_short_prompt_does_not_wait_for_a_long_one_that_waits() -> None:
    engine = bounded_engine(4000, 8)
    engine.add(request(0, prompt=600))
    engine.step()
    engine.add(request(1, prompt=650), request(2, prompt=500), request(3, prompt=20))
    assert first_tokens(engine) == ["0", "3", "2", "1"]
