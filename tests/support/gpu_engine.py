"""Engines of tests on a GPU: how they are made and run, and what must not happen meanwhile."""

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import LlamaConfig, PreTrainedModel

from lightkv.ledger import TokenLedger
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.loop import LocalEngine
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import TokenEvent
from lightkv.router.model.build import assemble
from lightkv.router.model.runner import ModelRunner
from tests.support.capturing import capture_all

CONFIG = LlamaConfig(
    vocab_size=1000,
    hidden_size=576,
    intermediate_size=384,
    num_hidden_layers=3,
    num_attention_heads=9,
    num_key_value_heads=3,
    head_dim=64,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)


def make(model: PreTrainedModel, **settings: object) -> tuple[LocalEngine, ModelRunner]:
    defaults = {"device": "cuda", "max_num_seqs": 12, "max_total_tokens": 3000, "prefill_chunk": 64}
    config = EngineConfig(**(defaults | settings))  # type: ignore[arg-type]
    runner, info = assemble(model, config, lambda line: None)
    ledger = TokenLedger(info.capacity, info.limits.max_num_seqs, info.limits.max_model_len)
    return LocalEngine(Scheduler(ledger, info.limits), capture_all(runner)), runner


def add_requests(engine: LocalEngine, count: int, params: list[SamplingParams]) -> None:
    rng = random.Random(0)
    system = [rng.randrange(1000) for _ in range(70)]
    for i in range(count):
        ids = [*system[: rng.choice([0, 30, 70])], *(rng.randrange(1000) for _ in range(rng.randint(1, 90)))]
        chosen = params[i % len(params)]
        engine.add(Request(str(i), array("i", ids).tobytes(), chosen, seed=i))


def run(engine: LocalEngine) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while engine.has_work:
        for event in engine.step():
            take(tokens, event)
    return tokens


def take(tokens: dict[str, list[int]], event: TokenEvent) -> None:
    assert event.error is None
    if event.token is not None:
        tokens.setdefault(event.request_id, []).append(event.token)


@contextmanager
def no_waits() -> Iterator[None]:
    """Makes a synchronising call inside the block raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def share_alike(first: dict[str, list[int]], second: dict[str, list[int]]) -> float:
    assert first.keys() == second.keys()
    return sum(first[name] == second[name] for name in first) / len(first)
