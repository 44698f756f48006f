"""Tests guaranteed and provisional requests: which ones give way, and when one becomes guaranteed."""

import random
from array import array

import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.engine.admission import Admission, make_admission
from lightkv.router.engine.estimates import ASSUMED_LENGTH, UNIT, LimitShares, OutputLengths
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits, TokenEvent
from lightkv.router.sampling_params import SamplingParams
from tests.support.model_worker import STOP, ModelWorker, assert_idle, run

VOCABULARY = 300


def request(
    name: str, prompt: list[int], max_tokens: int, stated: bool, priority: int = 0, min_tokens: int = 0
) -> Request:
    params = SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, temperature=0.0)
    ids, stop_ids = array("i", prompt).tobytes(), frozenset({STOP})
    return Request(name, ids, params, 1, stop_ids, priority=priority, states_length=stated)


def make(
    capacity: int, max_model_len: int = 1000, chunk: int = 0, stop_chance: float = 0.0, depth: int = 1
) -> tuple[LocalEngine, ModelWorker]:
    ledger = TokenLedger(capacity, 64, max_model_len)
    worker = ModelWorker(capacity, random.Random(0), stop_chance)
    limits = Limits(64, max_model_len, chunk, VOCABULARY)
    scheduler = Scheduler(ledger, limits, depth, admission=make_admission("guaranteed"))
    return LocalEngine(scheduler, worker), worker


def learn(engine: LocalEngine, length: int, num: int = OutputLengths.num_needed) -> None:
    """Lets `num` answers of this length end before the engine's first request."""
    estimates = engine.scheduler._admission.estimates
    assert estimates is not None
    for _ in range(num):
        estimates.observe(length)


def test_chats_without_a_limit_run_at_once_on_a_cpus_default_pool() -> None:
    """Twelve of them may take 8,192 tokens each, of a pool of 32,768."""
    engine, _ = make(32_768, max_model_len=8192, chunk=512)
    for i in range(12):
        engine.add(request(str(i), [20 + i] * 40, 8192 - 40, stated=False))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_guaranteed, stats.num_waiting) == (12, 0, 0)
    assert stats.guaranteed_peak == 0
    assert stats.forecast_peak == 12 * (40 + ASSUMED_LENGTH - 1)
    engine.check()


def test_what_is_assumed_doubles_until_enough_is_known() -> None:
    lengths = OutputLengths(assumed=256)
    assert [lengths.estimate(n, 8000) for n in (0, 255, 256, 1000, 5000)] == [256, 510, 512, 2000, 8000]
    for _ in range(lengths.num_needed - 1):
        lengths.observe(10)
    assert lengths.estimate(0, 8000) == 256
    lengths.observe(10)
    assert lengths.estimate(0, 8000) == 10
    assert lengths.estimate(10, 8000) == 256  # none was longer
    assert lengths.estimate(300, 8000) == 600


def test_a_guaranteed_request_is_never_preempted() -> None:
    """The youngest of the others gives way instead, though it is more urgent."""
    engine, _ = make(100)
    learn(engine, 5)
    engine.add(request("guaranteed", [1] * 10, 60, stated=True, priority=2))
    for name, priority in (("old", -1), ("young", 0)):
        engine.add(request(name, [3 + priority] * 10, 80, stated=False, priority=priority))
    engine.step()
    assert engine.stats().num_guaranteed == 1
    scheduler = engine.scheduler
    while not scheduler.num_preemptions:
        engine.step()
        engine.check()
    running = {request.id for request in scheduler._decoding.values()}
    assert running == {"guaranteed", "old"}
    assert engine.stats().waiting_tokens > 10  # the prompt of "young", and what it had generated
    ended = []
    while engine.has_work:
        ended += [event.request_id for event in engine.step() if event.finish_reason]
        engine.check()
    assert ended == ["guaranteed", "old", "young"]
    assert_idle(engine)


def test_a_guaranteed_request_is_counted_beside_provisional_ones() -> None:
    engine, _ = make(100)
    learn(engine, 2)
    engine.add(request("guaranteed", [1] * 10, 60, stated=True))  # 69 slots
    engine.add(request("provisional", [2] * 10, 40, stated=False))
    engine.add(request("too large", [3] * 10, 60, stated=True))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_guaranteed) == (2, 1)
    assert (stats.num_waiting, stats.waiting_tokens, stats.waits_for) == (1, 10, "slots")
    assert stats.guaranteed_peak == 69
    ended = [event.request_id for event in run_checked(engine) if event.finish_reason]
    assert ended == ["provisional", "guaranteed", "too large"]
    assert engine.stats().num_preemptions == 0


def test_a_part_of_the_pool_is_left_free_beside_estimated_requests() -> None:
    """It is a share of 0.01 if all are estimated, and half of it if one of two is."""
    for num_stated, most in ((0, 1980), (1, 1990), (2, 2000)):
        for spare in (0, -1):
            engine, _ = make(2000, max_model_len=2000)
            learn(engine, 100)
            limits = [100 if number < num_stated else 101 for number in range(2)]
            engine.add(request("first", [1] * 100, limits[0], stated=num_stated > 0))
            engine.add(request("second", [2] * (most - 298 - spare), limits[1], stated=num_stated > 1))
            engine.step()
            assert engine.stats().num_running == 2 + spare


def test_prompts_have_room_beside_what_is_held_however_soon_answers_should_end() -> None:
    """The forecast expects that the first answer has ended long before the second prompt is computed."""
    for prompt, num_running in ((489, 2), (490, 1)):
        engine, _ = make(1000, chunk=32)
        learn(engine, 2)
        engine.add(request("first", [1] * 500, 60, stated=False))
        while not engine.scheduler._decoding:
            engine.step()
        engine.add(request("second", [2] * prompt, 60, stated=False))
        engine.step()
        assert engine.stats().forecast_peak < 600
        assert engine.stats().num_running == num_running
        assert len([one for one in run(engine) if one.finish_reason]) == 2
        engine.check()


def test_what_is_promised_does_not_let_a_request_in_that_is_expected_to_be_too_much() -> None:
    """It waits although the guaranteed requests fit with it, unless it has been preempted."""
    for num_preemptions, num_running in ((0, 1), (1, 2)):
        engine, _ = make(1000)
        engine.add(request("first", [1] * 300, 400, stated=False))
        engine.step()
        second = request("second", [2] * 300, 250, stated=True)
        second.num_preemptions = num_preemptions
        engine.add(second)
        engine.step()
        assert engine.stats().num_running == num_running


def run_checked(engine: LocalEngine) -> list[TokenEvent]:
    """Steps until all requests have ended, with a check after each step. Returns their events."""
    events = []
    while engine.has_work:
        events += engine.step()
        engine.check()
    return events


def test_a_preempted_request_is_counted_with_twice_what_it_has() -> None:
    """So it is preempted a few times at most, however low the estimates are."""
    engine, _ = make(400, max_model_len=400)
    learn(engine, 51)
    admission, one = engine.scheduler._admission, request("one", [1] * 10, 90, stated=False)
    assert admission.expected(one, 20) == 51
    one.num_preemptions = 1
    assert [admission.expected(one, generated) for generated in (20, 40, 60)] == [51, 80, 90]


def test_many_long_answers_in_a_small_pool_are_preempted_a_few_times_each() -> None:
    engine, _ = make(400, max_model_len=400)
    learn(engine, 2, num=OutputLengths.num_recent)
    requests = [request(str(i), [20 + i] * 10, 380, stated=False) for i in range(8)]
    for one in requests:
        engine.add(one)
    run_checked(engine)
    assert engine.scheduler.num_preemptions > 3
    assert max(one.num_preemptions for one in requests) <= 5
    assert requests[0].num_preemptions == 0  # the oldest gives way last


def test_an_estimate_is_not_below_min_tokens() -> None:
    engine, _ = make(1000)
    learn(engine, 5)
    engine.add(request("long", [1] * 10, 500, stated=False, min_tokens=200))
    engine.step()
    assert engine.stats().forecast_peak == 209


def test_answers_without_a_limit_are_learnt_from_apart() -> None:
    engine, worker = make(1000)
    worker.stop_chance = 1.0
    estimates = engine.scheduler._admission.estimates
    assert isinstance(estimates, OutputLengths)
    for i in range(4):
        engine.add(request(str(i), [20 + i], 10, stated=i < 3))
    run_checked(engine)
    assert list(estimates._recent) == [1]
    shares = engine.scheduler._admission.shares
    assert shares is not None
    assert [list(lengths._recent) for lengths in shares._shares.values()] == [[UNIT // 10] * 3]


def test_a_limit_is_estimated_by_the_share_of_like_limits_that_answers_used() -> None:
    shares, one = LimitShares(), request("one", [1], 4000, stated=True)
    assert [shares.estimate(one, generated) for generated in (0, 200, 3000)] == [256, 400, 4000]
    for number in range(8):
        known = request(str(number), [1], 3000, stated=True)
        known.output.extend([1] * (300 + number))
        shares.observe(known)
    assert shares.estimate(one, 0) == 403  # 0.3 quantile: 302 of 3,000
    assert shares.estimate(one, 500) == 1000  # longer than all
    assert shares.estimate(request("two", [1], 5000, stated=True), 0) == 256
    assert shares.estimate(request("three", [1], 20, stated=True), 0) == 20


def test_a_namespace_has_shares_of_its_own_once_eight_are_known() -> None:
    shares, one, other = LimitShares(), request("one", [1], 1000, True), request("other", [1], 1000, True)
    one.namespace = ("a",)
    for number in range(16):
        known = request(str(number), [1], 1000, stated=True)
        known.namespace = ("a",) if number % 2 else ("b",)
        known.output.extend([1] * (500 if number % 2 else 100))
        shares.observe(known)
    assert (shares.estimate(one, 0), shares.estimate(other, 0)) == (500, 100)
    for number in range(1000):
        known.namespace = (str(number),)
        shares.observe(known)
    assert len(shares._shares) == shares.most_kept


class Low(LimitShares):
    """Expects two more tokens of every answer."""

    def estimate(self, request: Request, generated: int) -> int:
        return min(generated + 2, request.max_tokens)


def low(capacity: int, chunk: int = 0, depth: int = 1) -> LocalEngine:
    """An engine whose estimates are always too low."""
    limits = Limits(64, 1000, chunk, VOCABULARY)
    admission = Admission(OutputLengths(assumed=2), Low(), reserve=0.0)
    scheduler = Scheduler(TokenLedger(capacity, 64, 1000), limits, depth, admission)
    return LocalEngine(scheduler, ModelWorker(capacity, random.Random(0)))


def guaranteed(engine: LocalEngine) -> set[str]:
    return {one.id for one in engine.scheduler._running() if one.is_guaranteed}


def test_a_request_becomes_guaranteed_when_another_has_ended() -> None:
    """Whichever fits first; those that state no limit do not matter."""
    engine = low(100)
    engine.add(request("a", [1] * 10, 51, stated=True))
    engine.add(request("none", [2] * 2, 90, stated=False))
    engine.add(request("b", [3] * 10, 51, stated=True))
    engine.add(request("c", [4] * 10, 51, stated=True))
    engine.step()
    engine.check()
    assert guaranteed(engine) == {"a"}
    assert engine.stats().guaranteed_peak == 60
    engine.add(request("small", [5] * 10, 21, stated=True))
    engine.step()
    assert guaranteed(engine) == {"a", "small"}  # at once, since it fits
    engine.abort("a")
    engine.step()
    assert guaranteed(engine) == {"b", "small"}
    engine.abort("small")
    engine.step()
    assert guaranteed(engine) == {"b"}
    run_checked(engine)
    assert_idle(engine)


def test_after_its_first_preemption_nothing_behind_a_request_is_guaranteed_before_it() -> None:
    engine = low(100)
    engine.add(request("first", [1] * 10, 71, stated=True))
    second = request("second", [2] * 10, 51, stated=True)
    engine.add(second)
    while not second.num_preemptions:
        engine.step()
        engine.check()
    assert guaranteed(engine) == {"first"}
    engine.add(request("third", [3] * 2, 3, stated=True))  # it fits beside the first
    ended = []
    while engine.has_work:
        ended += [event for event in engine.step() if event.finish_reason]
        engine.check()
        assert (
            "third" not in guaranteed(engine)
            or second.is_guaranteed
            or "second" in {e.request_id for e in ended}
        )
    assert second.num_preemptions <= 2


@pytest.mark.parametrize("was_preempted", [False, True])
def test_a_larger_one_before_a_request_keeps_it_from_a_guarantee_only_once_preempted(
    was_preempted: bool,
) -> None:
    engine = low(100)
    for number, (name, limit) in enumerate((("first", 51), ("second", 31), ("large", 81), ("small", 31))):
        engine.add(request(name, [number] * 10, limit, stated=True))
    engine.step()
    assert guaranteed(engine) == {"first", "second"}  # 120 slots with "small"
    large, small = (engine.scheduler._requests[name] for name in ("large", "small"))
    for one in (small, large) if was_preempted else (small,):
        engine.scheduler._forecasts.interrupt(one)
    engine.abort("second")
    engine.step()
    engine.check()
    assert guaranteed(engine) == ({"first"} if was_preempted else {"first", "small"})


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_is_interrupted_twice_at_most_and_says_so(depth: int) -> None:
    """The third time it is admitted as a guaranteed one."""
    engine = low(120, depth=depth)
    requests = [request(str(i), [20 + i] * 10, 90, stated=True) for i in range(8)]
    for one in requests:
        engine.add(one)
    events = run_checked(engine)
    assert max(one.num_preemptions for one in requests) == 2
    for one in requests:
        told = max(event.num_interruptions for event in events if event.request_id == one.id)
        assert (told, len(one.output)) == (one.num_preemptions, 90)
    assert engine.scheduler.num_recomputed_tokens <= 2 * sum(99 for _ in requests)
    assert_idle(engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_of_the_pools_size_is_guaranteed_beside_a_stream_of_short_ones(depth: int) -> None:
    """It is admitted while others run, whatever they are expected to need, once the guaranteed ones leave it
    enough, and is not interrupted then."""
    engine = low(100, chunk=8, depth=depth)
    for number in range(5):
        engine.add(request(str(number), [number] * 4, 7, stated=number % 2 > 0))
        engine.step()
    engine.add(large := request("large", [90] * 40, 61, stated=True))  # 100 slots
    number = waited = 0
    while not large.finish_reason:
        number += 1
        engine.add(request(f"short {number}", [number % 200] * 4, 7, stated=number % 2 > 0))
        engine.step()
        engine.check()
        waited += not large.is_guaranteed
        assert waited < 200
    assert large.is_guaranteed
    assert len(large.output) == 61
    run_checked(engine)
    assert_idle(engine)


def test_a_limit_that_the_pool_cannot_hold_is_cut() -> None:
    engine, _ = make(50)
    engine.add(one := request("a", [1] * 30, 500, stated=True))
    events = run_checked(engine)
    assert (one.max_tokens, one.params.max_tokens) == (21, 21)
    assert (events[-1].finish_reason, len(events)) == ("length", 21)
    assert engine.stats().num_cut == 1
    assert_idle(engine)
