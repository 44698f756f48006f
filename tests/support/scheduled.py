"""Schedulers of tests."""

import random
from array import array

from lightkv.ledger import TokenLedger
from lightkv.ledger.shared_prefixes import PrefixSharing
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import Limits
from tests.support.model_worker import ModelWorker

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
