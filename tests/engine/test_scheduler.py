"""The scheduler with a worker of integers: admission, chunks, ends, failures, and a long random life."""

import random
from collections.abc import Iterator

import msgspec
import pytest

from lightkv.errors import LedgerMismatch
from lightkv.ledger.shared_prefixes import SharedPrefix, shared_prefixes
from lightkv.router.engine.loop import EngineDead, LocalEngine
from lightkv.router.engine.request import InvalidPrompt, NeverFits, Request
from lightkv.router.engine.step import StepPlan, TokenEvent
from lightkv.router.sampling_params import InvalidParams, SamplingParams
from tests.support.combinations import each_value, slow
from tests.support.model_worker import STOP, ModelWorker, assert_idle, run
from tests.support.scheduled import GROUPING, VOCABULARY, ids, make


def request(name: str, prompt: list[int], max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(name, ids(prompt), params, seed=1, stop_ids=frozenset({STOP}))


def test_one_request_runs_to_its_length() -> None:
    engine, worker = make()
    engine.add(request("a", [1, 2, 3], 4))
    events = run(engine)
    assert [event.finish_reason for event in events] == [None, None, None, "length"]
    assert [len(plan.counts) and plan.num_tokens for plan in worker.plans] == [3, 1, 1, 1]
    assert engine.stats().cached == 6  # the last token sampled was never written
    assert_idle(engine)


def test_a_stop_id_ends_a_request() -> None:
    engine, _ = make(stop_chance=1.0)
    engine.add(request("a", [1, 2, 3], 10))
    assert run(engine) == [TokenEvent("a", STOP, "stop", num_cached=0)]
    assert_idle(engine)


def test_prompts_are_cut_into_chunks_and_decodes_go_on_beside_them() -> None:
    engine, worker = make(prefill_chunk=4)
    engine.add(request("a", [1, 2, 3], 6))
    engine.step()
    engine.add(request("b", list(range(20, 30)), 2))
    run(engine)
    shapes = [(plan.num_prefills, plan.counts) for plan in worker.plans]
    assert shapes[:5] == [(1, [3]), (1, [4, 1]), (1, [4, 1]), (1, [2, 1]), (0, [1, 1])]
    assert_idle(engine)


def test_chats_that_arrive_together_share_their_system_prompt() -> None:
    engine, worker = make(capacity=200)
    system = list(range(20, 60))
    for i in range(8):
        engine.add(request(str(i), [*system, 100 + i, 200 + i], 3))
    engine.step()
    assert worker.plans[0].counts == [42] + [2] * 7
    assert engine.stats().hit_tokens == 7 * 40
    run(engine)
    assert_idle(engine)


def test_decodes_that_share_a_prefix_are_planned_to_read_it_together() -> None:
    engine, worker = make(capacity=200)
    system = list(range(20, 60))
    for i in range(3):
        engine.add(request(str(i), [*system, 100 + i, 200 + i], 3 + i))
    engine.add(request("other", [1, 2], 9))
    run(engine)
    together = [plan.prefixes for plan in worker.plans[:6]]
    all_three, last_two = SharedPrefix((1, 2, 3), 40), SharedPrefix((2, 3), 40)
    assert together == [[], [all_three], [all_three], [last_two], [], []]
    assert together[2] is together[1]  # nothing has changed: nothing was looked for
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(worker.plans[1]), type=StepPlan) == worker.plans[1]
    assert_idle(engine)


def test_admission_waits_for_the_exact_peak() -> None:
    # a: 10 held at its end; b as well; together they peak at 20, one before either ends.
    for capacity, together in ((20, 2), (19, 1)):
        engine, _ = make(capacity=capacity)
        engine.add(request("a", [1] * 5, 6))
        engine.add(request("b", [2] * 5, 6))
        engine.step()
        assert engine.stats().num_running == together
        run(engine)
        assert_idle(engine)


def test_exact_admission_beats_the_plain_sum() -> None:
    engine, _ = make(capacity=32)
    engine.add(request("short", [1] * 10, 3))  # 12 slots
    engine.add(request("long", [2], 20))  # 20 slots: as prefills, the two just fit
    engine.step()
    engine.add(request("third", [3] * 4, 8))  # 11 slots: their sum is 43
    engine.step()
    # Decoding, the two never hold more than 20 together: the short one ends long before.
    assert engine.stats().num_running == 3
    run(engine)
    assert_idle(engine)


def test_a_request_joins_one_that_grows_large_after_its_own_end() -> None:
    """The two never hold more than 100 tokens together, because the second one ends long before the first."""
    engine, _ = make(capacity=120, max_model_len=120)
    engine.add(request("long", [1] * 10, 91))
    engine.step()
    engine.add(request("short", [2] * 50, 5))
    engine.step()
    assert engine.stats().num_running == 2
    assert engine.stats().forecast_peak == 100
    run(engine)
    assert engine.stats().reached_peak == 100
    assert_idle(engine)


def test_a_request_is_admitted_in_the_first_step_in_which_it_fits() -> None:
    """Admitted in step s, the second one holds 10 + 20 - s tokens when the first ends with 30 after step 20."""
    engine, worker = make(capacity=50)
    engine.add(request("first", [1] * 10, 21))
    engine.step()
    engine.add(request("second", [2] * 10, 40))
    while engine.stats().num_running < 2:
        engine.step()
    assert len(worker.plans) == 11  # it begins in step 10
    assert engine.stats().forecast_peak == 50
    run(engine)
    assert engine.stats().reached_peak == 50
    assert_idle(engine)


@pytest.mark.parametrize("ends", ["by a stop token", "by an abort"])
def test_a_request_that_fits_after_an_early_end_is_in_the_very_next_plan(ends: str) -> None:
    """Its slots are there although a step in flight still holds those of the request that has ended."""
    engine, worker = make(capacity=100, depth=2)
    scheduler = engine.scheduler
    engine.add(request("long", [1] * 10, 70))
    for chance in (0.0, float(ends == "by a stop token")):
        plan = scheduler.plan()
        assert plan is not None
        worker.stop_chance = chance
        worker.send(plan)
    engine.add(request("next", [2] * 30, 50))
    scheduler.complete(worker.results.popleft())
    plan = scheduler.plan()
    assert plan is not None
    worker.send(plan)
    assert engine.stats().num_waiting == 1  # the two would come to hold more than 100 tokens
    if ends == "by an abort":
        assert engine.abort("long")
    scheduler.complete(worker.results.popleft())
    assert engine.stats().held == 12  # in the step that is in flight
    plan = scheduler.plan()
    assert plan is not None
    assert plan.counts == [30]
    scheduler.check()


@pytest.mark.parametrize("ends", ["at its length", "by an abort"])
def test_what_ends_in_the_older_of_two_steps_is_freed_before_the_next(ends: str) -> None:
    """The forecast does not count its tokens in the next step, which cannot be planned before."""
    engine, worker = make(capacity=15, depth=2)
    scheduler = engine.scheduler
    engine.add(request("short", [1] * 5, 3))  # 7 tokens after step 2
    engine.add(request("long", [2] * 5, 6))  # 8 tokens after step 3
    for step in range(4):
        plan = scheduler.plan()
        assert plan is not None
        worker.send(plan)
        if step == 3 and ends == "by an abort":
            assert engine.abort("short")
        assert scheduler.forecast_peak() == 15
        scheduler.check()
        if step in (1, 2):
            scheduler.complete(worker.results.popleft())
            scheduler.check()
    assert [[request.id for request in batch.requests] for batch in scheduler._in_flight] == [
        ["short", "long"],
        ["long"],
    ]
    while worker.results:
        scheduler.complete(worker.results.popleft())
    scheduler.check()
    assert engine.stats().held == 8


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "match"),
    [
        (70, 11, "70 prompt tokens and up to 11 .* the context of 80"),
        (51, 22, "51 prompt tokens .* the pool of 50 .*--max-total-tokens"),
    ],
)
def test_what_never_fits_is_refused_with_the_numbers(prompt: int, max_tokens: int, match: str) -> None:
    engine, _ = make(capacity=50)
    with pytest.raises(NeverFits, match=match):
        engine.add(request("a", [1] * prompt, max_tokens))
    assert not engine.has_work
    engine.add(request("b", [1] * 30, 21))  # 50 slots: the last token takes none
    run(engine)
    assert_idle(engine)


def test_abort_frees_at_once_wherever_the_request_is() -> None:
    engine, _ = make(capacity=20, prefill_chunk=4)
    engine.add(request("running", [1] * 4, 10))
    engine.add(request("waiting", [2] * 10, 5))
    engine.step()
    for name in ("running", "waiting"):
        assert engine.abort(name)
        assert not engine.abort(name)
    assert not engine.has_work
    assert_idle(engine)
    engine.add(request("prefilling", [3] * 10, 5))
    engine.step()
    assert engine.abort("prefilling", "stop")
    assert run(engine) == []
    assert_idle(engine)


def test_an_abort_while_its_step_is_in_flight_waits_for_the_step() -> None:
    engine, worker = make()
    engine.add(request("a", [1, 2], 5))
    plan = engine.scheduler.plan()
    assert plan is not None
    assert engine.abort("a")
    assert engine.stats().held == 2
    assert engine.scheduler.complete(worker.execute(plan)) == []
    assert_idle(engine)


def test_a_failed_step_ends_its_requests_and_caches_nothing_of_it() -> None:
    engine, worker = make()
    engine.add(request("done", [1, 2, 3], 2))
    run(engine)
    cached = engine.stats().cached
    engine.add(request("a", [1, 2, 3, 4, 5], 5))
    engine.add(request("b", [1, 2, 3, 4, 6], 5))
    worker.error = RuntimeError("no luck")
    events = engine.step()
    assert {(event.request_id, event.finish_reason) for event in events} == {("a", "error"), ("b", "error")}
    assert "no luck" in (events[0].error or "")
    assert engine.stats().cached == cached
    assert_idle(engine)
    engine.add(request("c", [1, 2, 3, 4, 5], 5))
    assert run(engine)[-1].finish_reason == "length"
    assert_idle(engine)


def test_a_fatal_error_stops_the_engine() -> None:
    engine, worker = make()
    engine.add(request("a", [1], 5))
    worker.error, worker.fatal = RuntimeError("device lost"), True
    assert engine.step()[0].finish_reason == "error"
    with pytest.raises(EngineDead, match="device lost"):
        engine.step()


def test_a_device_that_counts_otherwise_is_found_out() -> None:
    engine, worker = make()
    engine.add(request("a", [1], 5))
    engine.step()
    worker.count_error = -1
    with pytest.raises(
        LedgerMismatch, match=r"step 1: the device counts 97 free slots, the ledger 98.*Alloc"
    ):
        engine.step()
    with pytest.raises(EngineDead):
        engine.add(request("b", [1], 5))


def test_ids_are_not_given_twice() -> None:
    engine, _ = make()
    engine.add(request("a", [1], 5))
    with pytest.raises(ValueError, match="own id"):
        engine.add(request("a", [1], 5))


def test_to_queue_a_request_takes_no_longer_behind_a_long_queue() -> None:
    class Counted(str):
        num_hashed = 0

        def __hash__(self) -> int:
            Counted.num_hashed += 1
            return super().__hash__()

    engine, _ = make()
    hashed = []
    for i in range(40):
        before = Counted.num_hashed
        engine.add(request(Counted(i), [1, 2, 3], 4))
        hashed.append(Counted.num_hashed - before)
    assert max(hashed) < 10  # none of those that wait is looked at


@pytest.mark.parametrize("prompt", [[], [1, VOCABULARY], [-1]])
def test_a_prompt_that_is_no_line_of_tokens_is_refused(prompt: list[int]) -> None:
    engine, _ = make()
    with pytest.raises(InvalidPrompt, match=r"empty|token ids from .* to .*299"):
        engine.add(request("a", prompt, 5))
    assert not engine.has_work


def test_parameters_beyond_the_vocabulary_are_refused_at_the_door() -> None:
    engine, _ = make()
    params = SamplingParams(logit_bias={VOCABULARY: 1.0})
    with pytest.raises(InvalidParams, match="logit_bias"):
        engine.add(Request("a", ids([1]), params, seed=1))
    assert not engine.has_work


def test_a_refused_admission_touches_nothing() -> None:
    engine, worker = make(capacity=40)
    engine.add(request("cached", list(range(20)), 2))
    run(engine)
    engine.add(request("running", [100] * 10, 25))
    engine.step()
    ledger = engine.scheduler.ledger
    before = ledger.num_free, ledger.num_cached, ledger.num_held
    engine.add(request("refused", [*range(10), 200], 28))  # would split what is cached
    engine.step()
    assert engine.stats().num_waiting == 1
    assert (ledger.num_free, ledger.num_cached, ledger.num_held) == (before[0] - 1, before[1], before[2] + 1)
    assert worker.plans[-1].edits == b""  # the decode's slot alone is allocated
    run(engine)
    assert_idle(engine)


def test_an_interrupted_step_leaves_the_engine_usable() -> None:
    engine, worker = make()
    engine.add(request("a", [1, 2, 3], 5))
    worker.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    assert_idle(engine)
    engine.add(request("b", [1, 2, 3], 5))
    assert run(engine)[-1].finish_reason == "length"
    assert_idle(engine)


def test_an_error_flag_says_what_happened() -> None:
    engine, worker = make()
    engine.add(request("a", [1], 5))
    worker.flags = 2
    with pytest.raises(LedgerMismatch, match="on the device a slot was freed that was free already"):
        engine.step()


def overlap(engine: LocalEngine, worker: ModelWorker) -> Iterator[list[TokenEvent]]:
    """Runs steps at depth two: each is planned and sent before the result of the one before is taken."""
    scheduler = engine.scheduler
    while engine.has_work:
        plan = scheduler.plan() if scheduler.num_in_flight < 2 else None
        if plan is not None:
            worker.send(plan)
            if scheduler.num_in_flight < 2:
                continue
        result = worker.results.popleft()
        yield scheduler.fail(str(result)) if isinstance(result, Exception) else scheduler.complete(result)


def test_overlapped_steps_give_each_request_its_length() -> None:
    engine, worker = make(depth=2)
    for i, length in enumerate([1, 2, 5]):
        engine.add(request(str(i), [i, 2, 3], length))
    events = [event for step in overlap(engine, worker) for event in step]
    tokens = [[e for e in events if e.request_id == str(i)] for i in range(3)]
    assert [len(own) for own in tokens] == [1, 2, 5]
    assert all(own[-1].finish_reason == "length" for own in tokens)
    assert_idle(engine)


def test_overlap_drops_the_token_after_an_end_and_caches_the_rest() -> None:
    engine, worker = make(stop_chance=1.0, depth=2)
    engine.add(request("a", [1, 2, 3], 9))
    events = [event for step in overlap(engine, worker) for event in step]
    assert events == [TokenEvent("a", STOP, "stop", num_cached=0)]
    assert len(worker.plans) == 2  # the second was in flight already, and wrote the stop token's K/V
    assert engine.stats().cached == 4
    assert_idle(engine)


def test_a_failed_step_takes_the_one_after_it_along() -> None:
    engine, worker = make(depth=2)
    engine.add(request("a", [1, 2, 3], 9))
    steps = overlap(engine, worker)
    next(steps)
    engine.add(request("b", [1, 2, 3, 4], 9))
    worker.error = RuntimeError("no luck")
    events = [event for step in steps for event in step]
    assert {event.request_id: event.finish_reason for event in events if event.finish_reason} == {
        "a": "error",
        "b": "error",
    }
    assert_idle(engine)
    assert engine.stats().cached <= 4


@pytest.mark.parametrize("depth", [1, 2])
def test_the_urgent_is_admitted_first(depth: int) -> None:
    engine, worker = make(max_num_seqs=1, depth=depth)
    for name, priority in (("running", 5), ("late", 1), ("soon", 0), ("later", 1)):
        params = SamplingParams(max_tokens=2, temperature=0.0)
        engine.add(Request(name, ids([1, 2]), params, seed=1, priority=priority))
        if name == "running":
            plan = engine.scheduler.plan()
            assert plan is not None
    events = engine.scheduler.complete(worker.execute(plan))
    events += [event for step in overlap(engine, worker) for event in step] if depth == 2 else run(engine)
    ended = [event.request_id for event in events if event.finish_reason]
    assert ended == ["running", "soon", "late", "later"]
    assert_idle(engine)


def test_an_urgent_prompt_does_not_wait_for_a_long_one() -> None:
    engine, worker = make(capacity=200, prefill_chunk=8)
    long = Request("long", ids([1] * 70), SamplingParams(max_tokens=4), seed=1, priority=1)
    engine.add(long)
    engine.step()
    engine.add(Request("urgent", ids([2] * 10), SamplingParams(max_tokens=4), seed=1))
    events = engine.step() + engine.step()
    assert [event.request_id for event in events] == ["urgent"]
    assert worker.plans[-1].counts == [2, 6]  # what is left of the budget goes on with the long one
    run(engine)
    assert_idle(engine)


def test_requests_that_end_in_the_queue_leave_nothing_there() -> None:
    engine, _ = make(max_num_seqs=1)
    engine.add(request("running", [1], 50))
    engine.step()
    engine.add(request("head", [2], 5))
    for i in range(500):
        engine.add(request(str(i), [3], 5))
        assert engine.abort(str(i))
    assert engine.stats().num_waiting == 1
    assert len(engine.scheduler.waiting) < 100
    run(engine)
    assert_idle(engine)


@each_value(chunk=[0, 5, 32], depth=[1, 2], num_steps=[800, *slow(4_000, 20_000)])
def test_a_long_random_life_is_never_short_of_a_token(chunk: int, depth: int, num_steps: int) -> None:
    """Arrivals with shared prefixes, early ends, aborts and failures. The model of the memory raises when a
    slot is missing, shared wrongly or freed twice."""
    rng = random.Random(chunk)
    engine, worker = make(150, 12, 90, chunk, stop_chance=0.02, depth=depth)
    scheduler = engine.scheduler
    families = [[rng.randrange(100, 103) for _ in range(60)] for _ in range(4)]
    alive: set[str] = set()
    added = finished = failed = together = 0

    def take() -> None:
        nonlocal finished, failed
        result = worker.results.popleft()
        events = scheduler.fail(str(result)) if isinstance(result, Exception) else scheduler.complete(result)
        for event in events:
            failed += event.finish_reason == "error"
            if event.finish_reason:
                finished += 1
                alive.remove(event.request_id)

    for step in range(num_steps):
        if rng.random() < 0.15 and scheduler.num_waiting < 5:
            added += 1
            prompt = rng.choice(families)[: rng.randint(1, 60)]
            if rng.random() < 0.7:
                prompt = [*prompt, rng.randrange(50)]
            made = request(str(added), prompt, rng.randint(1, 29))
            made.priority = rng.randint(0, 1)
            engine.add(made)
            alive.add(str(added))
        if alive and rng.random() < 0.005:
            name = rng.choice(sorted(alive))
            assert engine.abort(name)
            alive.remove(name)
            finished += 1
        if rng.random() < 0.002:
            worker.error = RuntimeError("a failed step")
        plan = scheduler.plan()
        if plan is not None:
            batch = [request.sequence for request in scheduler._in_flight[-1].requests[plan.num_prefills :]]
            assert plan.prefixes == shared_prefixes(scheduler.ledger.shared, batch, GROUPING)
            together += len(plan.prefixes)
            worker.send(plan)
        if worker.results and (plan is None or scheduler.num_in_flight == depth):
            take()
        worker.plans.clear()
        if step % 500 == 0:
            while worker.results:
                take()
            engine.check()
    while engine.has_work:
        plan = scheduler.plan() if scheduler.num_in_flight < depth else None
        if plan is not None:
            worker.send(plan)
        take()
    assert_idle(engine)
    assert finished == added
    assert failed
    assert together > num_steps / 4
    assert engine.stats().num_preemptions == 0
    assert engine.stats().hit_tokens > num_steps / 2
    assert engine.stats().reached_peak > 130
