"""Sessions in the engine: they change what is evicted, and neither what is admitted nor what is answered."""

import random
from array import array
from collections import defaultdict

import pytest

from lightkv.ledger import TokenLedger
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits
from lightkv.router.sampling_params import SamplingParams
from lightkv.router.simulate.admissions import make_simulated
from tests.support.combinations import slow
from tests.support.model_worker import STOP, ModelWorker, assert_idle, run

CAPACITY = 120
LIMITS = Limits(max_num_seqs=6, max_model_len=CAPACITY + 1, prefill_chunk=16, vocab_size=100)


def make_engine(share: float, depth: int = 1, admission: str = "reserved", seed: int = 0) -> LocalEngine:
    ledger = TokenLedger(CAPACITY, LIMITS.max_num_seqs, LIMITS.max_model_len, int(share * CAPACITY))
    scheduler = Scheduler(ledger, LIMITS, depth, make_simulated(admission, 0, 0))
    return LocalEngine(scheduler, ModelWorker(CAPACITY, random.Random(seed), stop_chance=0.05))


def make_request(
    engine: LocalEngine, number: int, prompt: list[int], max_tokens: int, name: str = ""
) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    request = Request(str(number), array("i", prompt).tobytes(), params, number, frozenset({STOP}))
    if name:
        request.session = engine.scheduler.ledger.sessions.open(name)
    return request


def test_admission_takes_the_tokens_that_sessions_protect() -> None:
    engine = make_engine(share=1.0)
    for number in range(2):
        engine.add(make_request(engine, number, [number] * 58, 1, f"session {number}"))
        run(engine)
    stats = engine.stats()
    assert (stats.num_sessions, stats.session_tokens, stats.free) == (2, 116, 4)
    engine.add(make_request(engine, 9, [50] * 120, 1))  # the whole pool
    engine.step()
    assert engine.stats().num_running + engine.stats().num_waiting <= 1
    run(engine)
    stats = engine.stats()
    assert (stats.num_sessions, stats.session_tokens, stats.session_evicted_tokens) == (0, 0, 116)
    assert_idle(engine)


@pytest.mark.parametrize("seed", [*range(2), *slow(*range(2, 12))])
def test_a_life_of_sessions_keeps_every_count(seed: int) -> None:
    """Conversations that grow, abort, expire and come back, in a pool that is too small for all of them."""
    rng = random.Random(seed)
    depth, admission = rng.choice([1, 2]), rng.choice(["reserved", "reserved", "watermark"])
    engine = make_engine(rng.choice([0.25, 0.5, 1.0]), depth, admission, seed)
    texts: defaultdict[str, list[int]] = defaultdict(lambda: [1, 2, 3])
    living: dict[str, tuple[str, Request]] = {}
    for number in range(400):
        if rng.random() < 0.3 and engine.scheduler.num_waiting < 5:
            name = rng.choice(["", "a", "b", "c", "d"])
            if len(texts[name]) > 60:
                texts[name] = [1, 2, 3]
            prompt = texts[name] + [rng.randrange(20, 99) for _ in range(rng.randint(1, 20))]
            request = make_request(engine, number, prompt, rng.randint(1, 20), name)
            engine.add(request)
            living[request.id] = name, request
        if rng.random() < 0.03 and living:
            engine.abort(living.pop(rng.choice(list(living)))[1].id)
        if rng.random() < 0.05:
            engine.scheduler.ledger.sessions.release(rng.choice("abcd"))
        if engine.has_work:
            for event in engine.step():
                if event.finish_reason is not None and event.request_id in living:
                    name, request = living.pop(event.request_id)
                    assert event.finish_reason in ("stop", "length")
                    texts[name] = array("i", request.prompt_ids).tolist() + request.output.tolist()
        engine.scheduler.ledger.check()
    run(engine)
    assert_idle(engine)
    assert engine.stats().hit_tokens > 0
    for name in "abcd":
        engine.scheduler.ledger.sessions.release(name)
    assert engine.stats().session_tokens == 0
    assert_idle(engine)
