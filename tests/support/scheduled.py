"""Schedulers of tests, with random budgets, and engines that run to their end."""

import random
from array import array

from lightkv.ledger import TokenLedger
from lightkv.ledger.shared_prefixes import PrefixSharing
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.prefill_budget import PrefillBudget
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits, TokenEvent
from lightkv.router.engine.step_time import StepTime
from tests.support.model_worker import ModelWorker, assert_idle

VOCABULARY = 300


GROUPING = PrefixSharing(max_members=3, min_tokens=1, min_saved=1, min_mean=0)


def ids(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def make(
    capacity: int = 100,
    max_num_seqs: int = 8,
    max_model_len: int = 80,
    prefill_chunk: int = 0,
    stop_chance: float = 0.0,
    depth: int = 1,
) -> tuple[LocalEngine, ModelWorker]:
    ledger = TokenLedger(capacity, max_num_seqs, max_model_len)
    worker = ModelWorker(capacity, random.Random(0), stop_chance)
    limits = Limits(max_num_seqs, max_model_len, prefill_chunk, VOCABULARY, GROUPING)
    return LocalEngine(Scheduler(ledger, limits, depth), worker), worker


def random_budget(rng: random.Random, limits: Limits) -> PrefillBudget:
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


def run(engine: LocalEngine) -> list[TokenEvent]:
    """Runs an engine until no request is left, and returns all events."""
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    assert_idle(engine)
    return events


def tokens_of(events: list[TokenEvent], name: str) -> list[int]:
    return [event.token for event in events if event.request_id == name and event.token is not None]
