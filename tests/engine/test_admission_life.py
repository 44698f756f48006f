"""Random lives of the scheduler, with every count checked in every step: an admitted request is never short of
a token, whatever ends, is aborted, comes first or fails, and however many prompt tokens a step takes."""

import random
from array import array
from typing import TypeVar

import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.engine.admission import Running
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.prefill_budget import StepBudget
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits
from lightkv.router.sampling_params import SamplingParams
from tests.support.combinations import each_value
from tests.support.model_worker import STOP, ModelWorker, assert_idle
from tests.support.peaks import check_peaks
from tests.support.scheduled import random_budget

MAX_MODEL_LEN = 90
S = TypeVar("S", bound=Scheduler)


def random_request(rng: random.Random, number: int, families: list[list[int]]) -> Request:
    prompt = rng.choice(families)[: rng.randint(1, 60)] if rng.random() < 0.6 else []
    prompt = prompt + [rng.randrange(50) for _ in range(1 if rng.random() < 0.5 else 61 - len(prompt))]
    params = SamplingParams(max_tokens=rng.randint(1, 29), temperature=0.0)
    ids = array("i", prompt).tobytes()
    return Request(str(number), ids, params, 1, frozenset({STOP}), priority=rng.randrange(3))


def begin(
    kind: type[S], seed: int, depth: int, chunk: int, timed: bool
) -> tuple[random.Random, S, ModelWorker, list[list[int]]]:
    """Returns random numbers, a scheduler and a worker of a random size, and families of prompts."""
    rng = random.Random(seed)
    capacity = rng.choice((100, 150, 300))
    target = rng.choice((None, 0.002, 0.005)) if timed else 0.0
    limits = Limits(12, MAX_MODEL_LEN, chunk, 300, itl_target=target)
    worker = ModelWorker(capacity, rng, stop_chance=0.02)
    made = random_budget(rng, limits) if timed else None
    scheduler = kind(TokenLedger(capacity, 12, MAX_MODEL_LEN), limits, depth, budget=made)
    families = [[rng.randrange(100, 103) for _ in range(60)] for _ in range(4)]
    return rng, scheduler, worker, families


def live(seed: int, steps: int, depth: int, chunk: int, timed: bool) -> None:
    rng, scheduler, worker, families = begin(Scheduler, seed, depth, chunk, timed)
    engine = LocalEngine(scheduler, worker)
    alive: set[str] = set()
    added = 0

    def take() -> None:
        result = worker.results.popleft()
        events = scheduler.fail(str(result)) if isinstance(result, Exception) else scheduler.complete(result)
        alive.difference_update(event.request_id for event in events if event.finish_reason)

    while scheduler.step < steps or engine.has_work:
        if rng.random() < 0.2 and scheduler.num_waiting < 6 and scheduler.step < steps:
            engine.add(random_request(rng, added, families))
            alive.add(str(added))
            added += 1
        if alive and rng.random() < 0.02:
            name = rng.choice(sorted(alive))
            assert engine.abort(name)
            alive.remove(name)
        if rng.random() < 0.001:
            worker.error = RuntimeError("a failed step")
        scheduler.check()
        plan = scheduler.plan()
        scheduler.check()
        check_peaks(scheduler)
        if plan is not None:
            worker.send(plan)
        if worker.results and (plan is None or scheduler.num_in_flight == depth or rng.random() < 0.2):
            take()
        worker.plans.clear()
    assert_idle(engine)
    assert not alive
    assert scheduler.num_preemptions == 0
    assert scheduler.num_hit_tokens > steps // 4
    assert scheduler.peak_held > 0.8 * scheduler.ledger.capacity


@each_value(timed=[False, True], chunk=[5, 32], depth=[1, 2])
def test_an_admitted_request_is_never_short_of_a_token(depth: int, chunk: int, timed: bool) -> None:
    live(depth + chunk, 400, depth, chunk, timed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("timed", [False, True], ids=["fixed", "timed"])
@pytest.mark.parametrize("chunk", [0, 5, 16, 32])
@pytest.mark.parametrize("depth", [1, 2])
def test_nor_in_a_long_life(depth: int, chunk: int, timed: bool) -> None:
    live(100 * depth + chunk, 60_000, depth, chunk, timed)


class Asking(Scheduler):
    """A scheduler that also asks in the steps in which the head of the queue is to wait, and notes where it
    would fit."""

    refused_at = -1
    num_asked = 0

    def _admit(self, request: Request, budget: StepBudget, room: int, idx: int) -> bool:
        retry_at = self._retry_at
        waits = self.refused_at < self.step < retry_at
        has_row = 0 < self.ledger.num_open < self.limits.max_num_seqs
        if waits and has_row and budget.can_begin(request.num_prefill_tokens):
            decoding = self._decoding.values()
            running = Running(self.ledger, self._forecasts, self._prefilling, decoding, budget, room, idx)
            if passed := self.waiting.passed_by(request):  # there is not room for both for sure
                has_rows = self.ledger.num_open + 2 <= self.limits.max_num_seqs
                assert not has_rows or not self._admission.has_room(running, request, *passed)
                return super()._admit(request, budget, room, idx)
            self.num_asked += 1
            assert self._admission.steps_to_wait(running, request), (self.step, retry_at)
        is_admitted = super()._admit(request, budget, room, idx)
        if self._retry_at != retry_at and not is_admitted:
            self.refused_at = self.step
        return is_admitted


def ask(seed: int, steps: int, depth: int, chunk: int, timed: bool) -> Asking:
    rng, scheduler, worker, families = begin(Asking, seed, depth, chunk, timed)
    engine = LocalEngine(scheduler, worker)
    added = 0
    while scheduler.step < steps or engine.has_work:
        if rng.random() < 0.3 and scheduler.num_waiting < 6 and scheduler.step < steps:
            engine.add(random_request(rng, added, families))
            added += 1
        plan = scheduler.plan()
        if plan is not None:
            worker.send(plan)
        if worker.results and (plan is None or scheduler.num_in_flight == depth or rng.random() < 0.2):
            result = worker.results.popleft()
            assert not isinstance(result, Exception)
            scheduler.complete(result)
        worker.plans.clear()
    return scheduler


@pytest.mark.parametrize(("depth", "chunk", "seed"), [(1, 5, 3105), (1, 16, 1116), (2, 5, 6205)])
def test_a_refused_request_does_not_fit_before_it_is_asked_again(depth: int, chunk: int, seed: int) -> None:
    """It is asked in every step while a part of what it hits may be evicted: it would compute more then, begin
    to decode later, and fit before. In these lives that did happen."""
    scheduler = ask(seed, 800, depth, chunk, timed=False)
    assert scheduler.num_asked > 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("timed", [False, True], ids=["fixed", "timed"])
@pytest.mark.parametrize("chunk", [0, 5, 16, 32])
@pytest.mark.parametrize("depth", [1, 2])
def test_nor_in_many_lives(depth: int, chunk: int, timed: bool) -> None:
    for seed in range(6):
        ask(1000 * seed + 100 * depth + chunk, 3000, depth, chunk, timed)
