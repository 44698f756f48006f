"""Records the steps of a model: every plan with its result, which a worker has to reproduce."""

import random
import sys
from array import array
from pathlib import Path

import msgspec
import pytest
import tokenizers
import torch
from transformers import LlamaConfig

from bench.common.random_model import random_model
from lightkv.edits import encode
from lightkv.ledger import TokenLedger
from lightkv.router import EngineConfig, SamplingParams
from lightkv.router.engine.request import Request
from lightkv.router.engine.scheduler import Scheduler
from lightkv.router.engine.step import ExpectedMemory, StepPlan, StepResult
from lightkv.router.model.build import build_runner
from tests.support.run_step import run_step

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
PARAMS = [
    SamplingParams(temperature=0, max_tokens=12),
    SamplingParams(temperature=0.9, max_tokens=9),
    SamplingParams(temperature=0.8, top_k=20, frequency_penalty=0.5, logprobs=3, max_tokens=7),
]


def saved(directory: Path) -> EngineConfig:
    """Saves a complete model of two random layers, and its tokenizer. Returns the settings that run it."""
    torch.manual_seed(0)
    random_model(CONFIG, torch.device("cpu"), torch.float32).save_pretrained(directory)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    tokenizer.save(str(directory / "tokenizer.json"))
    return EngineConfig(
        str(directory), device="cpu", dtype="float32", max_total_tokens=300, max_num_seqs=4, prefill_chunk=16
    )


class Recording:
    """The plans and results of an in-process runner for some requests, and the memory expected afterwards."""

    def __init__(self, config: EngineConfig) -> None:
        runner, self.info = build_runner(config, lambda line: None)
        limits = self.info.limits
        ledger = TokenLedger(self.info.capacity, limits.max_num_seqs, limits.max_model_len)
        scheduler = Scheduler(ledger, limits)
        rng = random.Random(0)
        for i in range(8):
            ids = [*range(5, 25), *(rng.randrange(64) for _ in range(rng.randint(1, 20)))]
            scheduler.add(Request(str(i), array("i", ids).tobytes(), PARAMS[i % 3], seed=i))
        self.plans: list[StepPlan] = []
        self.results: list[StepResult] = []
        while (plan := scheduler.plan()) is not None:
            self.plans.append(plan)
            self.results.append(run_step(runner, plan))
            scheduler.complete(self.results[-1])
        self.edits = encode(ledger.drain())
        self.holding = ExpectedMemory(ledger.num_free, ledger.holdings())
        runner.check(self.edits, self.holding)


def assert_same(results: list[StepResult | None], expected: list[StepResult]) -> None:
    assert len(results) == len(expected)
    for got, wanted in zip(results, expected, strict=True):
        assert got is not None
        assert (got.step, got.tokens) == (wanted.step, wanted.tokens)
        assert (got.num_free, got.flags) == (wanted.num_free, wanted.flags)
        assert got.logprobs.keys() == wanted.logprobs.keys()
        for i, entry in got.logprobs.items():
            assert entry.top_ids == wanted.logprobs[i].top_ids
            assert entry.logprob == pytest.approx(wanted.logprobs[i].logprob, abs=1e-5)
            assert entry.top_logprobs == pytest.approx(wanted.logprobs[i].top_logprobs, abs=1e-5)


def with_unknown_token(plan: StepPlan) -> StepPlan:
    """Returns a plan that fails after its edits are applied."""
    assert plan.num_prefills
    unknown = array("i", [1000]).tobytes()
    return msgspec.structs.replace(plan, token_ids=unknown + plan.token_ids[len(unknown) :])


# A worker that loads no model and has the recorded results. {recorded}: RunnerInfo and they, as hex digits.
_REPLAYING = """
from collections import deque
from types import SimpleNamespace
import msgspec
from lightkv.router.engine.step import RunnerInfo, StepResult
from lightkv.router.service.messages import Done
from lightkv.router.service.worker import StepPipeline, Worker, main

class Replaying(Worker):
    def _start(self, start):
        recorded = bytes.fromhex("{recorded}")
        info, results = msgspec.msgpack.decode(recorded, type=tuple[RunnerInfo, list[StepResult]])
        self._runner = SimpleNamespace(
            fatal=False, newest_error=None, launch=lambda plan: None, collect=deque(results).popleft,
            check=lambda *given: None, digest=lambda: b"of the tables",
            grammars=SimpleNamespace(trim=lambda: None),
        )
        self._is_rank = start.rank is not None
        self._pipeline = StepPipeline(self._runner, is_rank=self._is_rank)
        self._slow_work.announce("replaying")
        return Done(info)

main(Replaying)
"""


def replaying(recording: Recording) -> list[str]:
    """Returns the program of a worker, or of a rank, that answers plans by the recorded results at once."""
    recorded = msgspec.msgpack.encode((recording.info, recording.results)).hex()
    return [sys.executable, "-c", _REPLAYING.format(recorded=recorded)]
