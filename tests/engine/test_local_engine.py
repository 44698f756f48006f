"""An engine that drives an executor in this process, with one and with two steps in flight."""

import random
from array import array

import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.engine.loop import EngineDead, LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits, StepResult, TokenEvent
from lightkv.router.sampling_params import SamplingParams
from tests.support.combinations import slow
from tests.support.model_worker import STOP, ModelWorker, assert_idle, run

CAPACITY = 150


class FailingWorker(ModelWorker):
    """A worker of integers whose `collect` can fail, too. It counts the steps in flight."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(CAPACITY, rng, stop_chance=0.03)
        self.collect_error: BaseException | None = None
        self.most_in_flight = 0

    def collect(self) -> StepResult:
        self.most_in_flight = max(self.most_in_flight, len(self._launched))
        result = super().collect()
        if self.collect_error is not None:
            error, self.collect_error = self.collect_error, None
            raise error
        return result


def make(depth: int, seed: int = 0) -> tuple[LocalEngine, FailingWorker]:
    worker = FailingWorker(random.Random(seed))
    limits = Limits(max_num_seqs=12, max_model_len=90, prefill_chunk=16, vocab_size=200)
    return LocalEngine(Scheduler(TokenLedger(CAPACITY, 12, 90), limits, depth), worker), worker


def request(name: str, prompt: list[int], max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(name, array("i", prompt).tobytes(), params, seed=1, stop_ids=frozenset({STOP}))


@pytest.mark.parametrize("depth", [1, 2])
def test_as_many_steps_are_in_flight_as_may_be(depth: int) -> None:
    engine, worker = make(depth)
    engine.add(request("a", [20] * 5, 9))
    events = run(engine)
    assert worker.most_in_flight == depth
    assert events[-1].finish_reason in ("stop", "length")
    assert_idle(engine)


def test_settle_completes_what_is_in_flight_and_plans_nothing() -> None:
    engine, worker = make(2)
    engine.add(request("a", [20] * 5, 40))
    first = engine.step()
    num_planned = len(worker.plans)
    assert engine.scheduler.num_in_flight == 1
    assert [event.request_id for event in first + engine.settle()] == ["a", "a"]
    assert (engine.scheduler.num_in_flight, len(worker.plans)) == (0, num_planned)
    engine.check()


@pytest.mark.parametrize("where", ["error", "collect_error"])
def test_an_interrupt_loses_no_event(where: str) -> None:
    """The step in flight brings "short" its last token while the interrupt fails the step behind it, or is
    itself interrupted; the events come with the next call."""
    engine, worker = make(2)
    worker.stop_chance = 0.0
    engine.add(request("short", [20] * 5, 2))
    engine.add(request("long", [21] * 5, 30))
    events = engine.step()
    setattr(worker, where, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    events += run(engine)
    ends = {event.request_id: event.finish_reason for event in events if event.finish_reason}
    assert ends == {"short": "length" if where == "error" else "error", "long": "error"}
    assert_idle(engine)


@pytest.mark.parametrize("where", ["error", "collect_error"])
def test_after_a_fatal_error_the_engine_is_dead(where: str) -> None:
    engine, worker = make(2)
    engine.add(request("a", [20] * 5, 30))
    engine.step()
    setattr(worker, where, RuntimeError("device lost"))
    worker.fatal = True
    assert [event.finish_reason for event in engine.step()][-1] == "error"
    with pytest.raises(EngineDead, match="device lost"):
        engine.step()
    assert engine.settle() == []


def test_a_result_of_another_step_changes_nothing() -> None:
    engine, worker = make(1)
    engine.add(request("a", [20] * 5, 2))
    plan = engine.plan()
    assert plan is not None
    with pytest.raises(ValueError, match=r"a result for step 7, while the steps \[0\] are in flight"):
        engine.complete(StepResult(7, [10], plan.num_free, 0))
    assert [event.token for event in engine.complete(worker.execute(plan))] != []
    run(engine)
    with pytest.raises(ValueError, match=r"while the steps \[\] are in flight"):
        engine.complete(StepResult(0, [10], 0, 0))
    with pytest.raises(ValueError, match="in flight"):
        engine.fail("nothing to fail")
    assert_idle(engine)
    engine.add(request("b", [20] * 5, 2))  # a refused call has changed nothing
    assert run(engine)[-1].finish_reason in ("stop", "length")


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", [0, *slow(1, 2)])
def test_every_request_ends_once_in_a_random_life(seed: int, depth: int) -> None:
    """Steps fail in `launch` and `collect`, interrupts and aborts come. The model of the memory raises when a
    slot is missing, shared wrongly or freed twice; each request gets its tokens and one end."""
    rng = random.Random(seed)
    engine, worker = make(depth, seed)
    families = [[rng.randrange(100, 103) for _ in range(40)] for _ in range(3)]
    alive: dict[str, int] = {}
    number = num_failed = 0

    def take(events: list[TokenEvent]) -> None:
        nonlocal num_failed
        for event in events:
            alive[event.request_id] -= event.token is not None
            if event.finish_reason is not None:
                left = alive.pop(event.request_id)
                assert left == 0 if event.finish_reason == "length" else left >= 0
                num_failed += event.finish_reason == "error"

    for _ in range(1200):
        if rng.random() < 0.3 and len(alive) < 15:
            number += 1
            alive[str(number)] = rng.randint(1, 29)
            prompt = rng.choice(families)[: rng.randint(1, 40)]
            engine.add(request(str(number), prompt, alive[str(number)]))
        if alive and rng.random() < 0.01:
            name = rng.choice(sorted(alive))
            if engine.abort(name):
                del alive[name]
        if rng.random() < 0.02:
            error = rng.choice([RuntimeError("a failed step"), KeyboardInterrupt()])
            setattr(worker, rng.choice(["error", "collect_error"]), error)
        try:
            take(engine.settle() if rng.random() < 0.02 else engine.step())
        except KeyboardInterrupt:
            continue
        if not engine.scheduler.num_in_flight:
            engine.check()
    worker.error = worker.collect_error = None
    take(run(engine))
    assert_idle(engine)
    assert not alive
    assert num_failed > 10
