"""Tests requests without max_tokens beside requests with it: only the former are preempted."""

import random
from array import array

import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.engine.admission import ASSUMED_LENGTH, OutputLengths, make_admission
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits, TokenEvent
from lightkv.router.sampling_params import SamplingParams
from tests.support.combinations import each_value
from tests.support.model_worker import STOP, ModelWorker, assert_idle

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
    scheduler = Scheduler(ledger, limits, depth, admission=make_admission("exact"))
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
    assert (stats.num_running, stats.num_running_estimated, stats.num_waiting) == (12, 12, 0)
    assert stats.exact_peak == 0
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


def test_a_request_with_max_tokens_is_never_preempted() -> None:
    """The youngest of the others gives way instead, though it is more urgent than the exact one."""
    engine, _ = make(100)
    learn(engine, 5)
    engine.add(request("exact", [1] * 10, 60, stated=True, priority=2))
    for name, priority in (("old", -1), ("young", 0)):
        engine.add(request(name, [3 + priority] * 10, 80, stated=False, priority=priority))
    engine.step()
    assert engine.stats().num_running_estimated == 2
    scheduler = engine.scheduler
    while not scheduler.num_preemptions:
        engine.step()
        engine.check()
    running = {request.id for request in scheduler._decoding.values()}
    assert running == {"exact", "old"}
    assert engine.stats().num_waiting_estimated == 1
    assert engine.stats().waiting_tokens > 10  # the prompt of "young", and what it had generated
    ended = []
    while engine.has_work:
        ended += [event.request_id for event in engine.step() if event.finish_reason]
        engine.check()
    assert ended == ["exact", "old", "young"]
    assert_idle(engine)


def test_an_exact_request_is_counted_beside_estimated_ones() -> None:
    engine, _ = make(100)
    learn(engine, 2)
    engine.add(request("exact", [1] * 10, 60, stated=True))  # 69 slots
    engine.add(request("estimated", [2] * 10, 40, stated=False))
    engine.add(request("too large", [3] * 10, 60, stated=True))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_running_estimated) == (2, 1)
    assert (stats.num_waiting, stats.num_waiting_estimated, stats.waiting_tokens) == (1, 0, 10)
    assert stats.exact_peak == 69
    ended = [event.request_id for event in run_checked(engine) if event.finish_reason]
    assert ended == ["estimated", "exact", "too large"]
    assert engine.stats().num_preemptions == 0


def test_a_part_of_the_pool_is_left_free_beside_estimated_requests() -> None:
    """It is a share of 0.025 if all are estimated, and half of it if one of two is."""
    for num_exact, most in ((0, 1950), (1, 1975), (2, 2000)):
        for spare in (0, -1):
            engine, _ = make(2000, max_model_len=2000)
            learn(engine, 100)
            engine.add(request("first", [1] * 100, 100, stated=num_exact > 0))
            engine.add(request("second", [2] * (most - 298 - spare), 100, stated=num_exact > 1))
            engine.step()
            assert engine.stats().num_running == 2 + spare


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
    one.is_exact = False
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


def test_only_answers_without_a_limit_are_learnt_from() -> None:
    engine, worker = make(1000)
    worker.stop_chance = 1.0
    estimates = engine.scheduler._admission.estimates
    assert isinstance(estimates, OutputLengths)
    for i in range(4):
        engine.add(request(str(i), [20 + i], 10, stated=i < 3))
    run_checked(engine)
    assert list(estimates._recent) == [1]


def live(seed: int, steps: int, depth: int, chunk: int, exact_share: float) -> None:
    """A random life with both kinds of requests, with priorities, aborts, prefixes and failed steps. In every
    step `check` compares all counts, and the peak of the exact requests with the capacity; the worker raises
    where a slot is missing."""
    rng = random.Random(seed)
    capacity = rng.choice((100, 130))
    ledger = TokenLedger(capacity, 12, 100)
    worker = ModelWorker(capacity, rng, stop_chance=0.04)
    limits = Limits(12, 100, chunk, VOCABULARY)
    scheduler = Scheduler(ledger, limits, depth, admission=make_admission("exact"))
    engine = LocalEngine(scheduler, worker)
    learn(engine, 3)
    families = [[rng.randrange(100, 103) for _ in range(60)] for _ in range(4)]
    alive: dict[str, Request] = {}
    added = 0

    def take() -> None:
        result = worker.results.popleft()
        events = scheduler.fail(str(result)) if isinstance(result, Exception) else scheduler.complete(result)
        for event in events:
            if event.finish_reason:
                one = alive.pop(event.request_id)
                assert one.is_exact == one.states_length
                assert not one.is_exact or not one.num_preemptions

    while scheduler.step < steps or engine.has_work:
        if rng.random() < 0.3 and scheduler.num_waiting < 6 and scheduler.step < steps:
            added += 1
            prompt = rng.choice(families)[: rng.randint(1, 60)]
            if rng.random() < 0.7:
                prompt = [*prompt, rng.randrange(50)]
            stated = rng.random() < exact_share
            most = rng.randint(1, 29) if stated else 100 - len(prompt)
            alive[str(added)] = request(str(added), prompt, most, stated, rng.randint(0, 2))
            engine.add(alive[str(added)])
        if alive and rng.random() < 0.01:
            name = rng.choice(sorted(alive))
            assert engine.abort(name)
            del alive[name]
        if rng.random() < 0.001:
            worker.error = RuntimeError("a failed step")
        scheduler.check()
        plan = scheduler.plan()
        scheduler.check()
        if plan is not None:
            worker.send(plan)
            if any(one.is_exact and one.num_prefill_left for one in scheduler._prefilling):
                # No chunk is cut because estimated requests hold the pool.
                assert sum(plan.counts[: plan.num_prefills]) == limits.prefill_budget
        if worker.results and (plan is None or scheduler.num_in_flight == depth or rng.random() < 0.2):
            take()
        worker.plans.clear()
    assert_idle(engine)
    assert not alive
    assert scheduler.num_preemptions > steps // 100
    assert scheduler.peak_held > 0.95 * capacity


@each_value(depth=[1, 2], chunk=[5, 32])
def test_exact_requests_are_never_short_beside_estimated_ones(depth: int, chunk: int) -> None:
    live(depth + chunk, 300, depth, chunk, exact_share=0.5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("exact_share", [0.2, 0.8])
@pytest.mark.parametrize("chunk", [5, 16])
@pytest.mark.parametrize("depth", [1, 2])
def test_nor_in_a_long_life(depth: int, chunk: int, exact_share: float) -> None:
    live(100 * depth + chunk, 60_000, depth, chunk, exact_share)
