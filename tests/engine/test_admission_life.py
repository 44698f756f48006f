"""Random lives of the scheduler, with every count checked in every step: an admitted request is never short of
a token, whatever ends, is aborted, comes first or fails, and however many prompt tokens a step takes."""

import random
from array import array

import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.prefill_budget import PrefillBudget
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits
from lightkv.router.engine.step_time import StepTime
from lightkv.router.sampling_params import SamplingParams
from tests.support.model_worker import STOP, ModelWorker, assert_idle

MAX_MODEL_LEN = 90


def budget(rng: random.Random, limits: Limits) -> PrefillBudget:
    """Returns a budget under which the chunks depend on the decodes."""
    model = StepTime(
        base=1e-3,
        per_decode=rng.choice((0.0, 1e-4, 1e-3)),
        per_kv=1e-6,
        prefill=0.0,
        per_prompt=rng.choice((1e-5, 1e-4, 5e-4)),
        per_pair=2e-7,
    )
    return PrefillBudget(limits, model)


def random_request(rng: random.Random, number: int, families: list[list[int]]) -> Request:
    prompt = rng.choice(families)[: rng.randint(1, 60)] if rng.random() < 0.6 else []
    prompt = prompt + [rng.randrange(50) for _ in range(1 if rng.random() < 0.5 else 61 - len(prompt))]
    params = SamplingParams(max_tokens=rng.randint(1, 29), temperature=0.0)
    ids = array("i", prompt).tobytes()
    return Request(str(number), ids, params, 1, frozenset({STOP}), priority=rng.randrange(3))


def live(seed: int, steps: int, depth: int, chunk: int, timed: bool) -> None:
    rng = random.Random(seed)
    capacity = rng.choice((100, 150, 300))
    target = rng.choice((None, 0.002, 0.005)) if timed else 0.0
    limits = Limits(12, MAX_MODEL_LEN, chunk, 300, itl_target=target)
    worker = ModelWorker(capacity, rng, stop_chance=0.02)
    made = budget(rng, limits) if timed else None
    scheduler = Scheduler(TokenLedger(capacity, 12, MAX_MODEL_LEN), limits, depth, budget=made)
    engine = LocalEngine(scheduler, worker)
    families = [[rng.randrange(100, 103) for _ in range(60)] for _ in range(4)]
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
        if plan is not None:
            worker.send(plan)
        if worker.results and (plan is None or scheduler.num_in_flight == depth or rng.random() < 0.2):
            take()
        worker.plans.clear()
    assert_idle(engine)
    assert not alive
    assert scheduler.num_preemptions == 0
    assert scheduler.num_hit_tokens > steps // 4
    assert scheduler.peak_held > 0.8 * capacity


@pytest.mark.parametrize("timed", [False, True], ids=["fixed", "timed"])
@pytest.mark.parametrize("chunk", [5, 32])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_admitted_request_is_never_short_of_a_token(depth: int, chunk: int, timed: bool) -> None:
    live(depth + chunk, 400, depth, chunk, timed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("timed", [False, True], ids=["fixed", "timed"])
@pytest.mark.parametrize("chunk", [0, 5, 16, 32])
@pytest.mark.parametrize("depth", [1, 2])
def test_nor_in_a_long_life(depth: int, chunk: int, timed: bool) -> None:
    live(100 * depth + chunk, 60_000, depth, chunk, timed)
