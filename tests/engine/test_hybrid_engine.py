"""Models whose layers keep states, run by the engine: their greedy tokens are transformers' own."""

import random
from array import array

import pytest
import torch

from lightkv.router.config import EngineConfig
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.engine.step import TokenEvent
from lightkv.router.model.build import assemble
from lightkv.router.model.runner import ModelRunner
from lightkv.router.sampling_params import SamplingParams
from tests.support.combinations import slow
from tests.support.hybrid_models import HYBRIDS, VOCABULARY, greedy, hybrid
from tests.support.model_worker import assert_idle

CPU = torch.device("cpu")
FIRST, *OTHERS = HYBRIDS


def request(name: str, prompt: list[int], max_tokens: int, boundary: int = 0) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(name, array("i", prompt).tobytes(), params, seed=1, boundary=boundary)


def build(name: str, **settings: object) -> tuple[LocalEngine, ModelRunner]:
    fields = {"device": "cpu", "max_total_tokens": 600, "prefill_chunk": 16, "max_model_len": 200, "max_num_seqs": 8}
    runner, info = assemble(hybrid(name), EngineConfig(**(fields | settings)), lambda line: None)  # type: ignore[arg-type]
    return LocalEngine(make_scheduler(info), runner), runner


def run(engine: LocalEngine) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    assert_idle(engine)
    return events


def tokens_of(events: list[TokenEvent], name: str) -> list[int]:
    return [event.token for event in events if event.request_id == name and event.token is not None]


def prompts(num: int, seed: int = 0) -> list[list[int]]:
    """Half of them go on from another one."""
    rng, found = random.Random(seed), list[list[int]]()
    for number in range(num):
        begin = rng.choice(found) if number % 2 else []
        found.append([*begin, *(rng.randrange(3, VOCABULARY) for _ in range(rng.randint(1, 60)))])
    return found


@pytest.mark.parametrize("name", [FIRST, *slow(*OTHERS)])
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    """Prompts in chunks beside decodes, and prefixes that are hit at their snapshots."""
    model, asked = hybrid(name), prompts(8)
    engine, _ = build(name)
    events = []
    for number, prompt in enumerate(asked):
        engine.add(request(str(number), prompt, 12))
        for _ in range(number % 4):
            events += engine.step()
    events += run(engine)
    for number, prompt in enumerate(asked):
        assert tokens_of(events, str(number)) == greedy(model, prompt, 12), number
    assert sum(event.num_cached or 0 for event in events) > 50
