"""Models whose layers keep states, run by the engine: their greedy tokens are transformers' own."""

import random
from array import array

import pytest

from lightkv.router.config import EngineConfig
from lightkv.router.engine.admission import Admission
from lightkv.router.engine.loop import LocalEngine, make_scheduler
from lightkv.router.engine.request import Request
from lightkv.router.engine.step import TokenEvent
from lightkv.router.model.build import assemble
from lightkv.router.model.runner import ModelRunner
from lightkv.router.sampling_params import SamplingParams
from tests.support.combinations import slow
from tests.support.hybrid_models import HYBRIDS, VOCABULARY, greedy, hybrid
from tests.support.preempting import counted_by, expecting
from tests.support.scheduled import run, tokens_of

pytestmark = pytest.mark.usefixtures("one_thread")
FIRST, *OTHERS = HYBRIDS


def request(name: str, prompt: list[int], max_tokens: int, boundary: int = 0) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Request(name, array("i", prompt).tobytes(), params, seed=1, boundary=boundary)


def build(
    name: str, admission: Admission | None = None, **settings: object
) -> tuple[LocalEngine, ModelRunner]:
    fields = {
        "device": "cpu",
        "max_total_tokens": 600,
        "prefill_chunk": 16,
        "max_model_len": 200,
        "max_num_seqs": 8,
        "mamba_full_memory_ratio": 3.0,
    }
    runner, info = assemble(hybrid(name), EngineConfig(**(fields | settings)), lambda line: None)  # type: ignore[arg-type]
    return LocalEngine(make_scheduler(info, admission), runner), runner


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
        answer = tokens_of(events, str(number))
        assert len(answer) == 12
        assert answer == greedy(model, prompt, answer)
    assert sum(event.num_cached or 0 for event in events) > 50


@pytest.mark.parametrize("name", [FIRST, *slow(*OTHERS)])
def test_a_small_pool_preempts_and_aborts_without_a_wrong_token(name: str) -> None:
    model, asked = hybrid(name), prompts(6, seed=2)
    engine, _ = build(name, counted_by(expecting(4)), max_total_tokens=160, max_num_seqs=4)
    engine.add(*[request(str(number), prompt, 30) for number, prompt in enumerate(asked)])
    events = [event for _ in range(20) for event in engine.step()]
    assert engine.abort("1")
    events += run(engine)
    assert sum(event.num_interruptions for event in events)
    for number, prompt in enumerate(asked):
        found = tokens_of(events, str(number))
        assert found == greedy(model, prompt, found)
        assert len(found) == 30 or number == 1


@pytest.mark.parametrize("seed", [3, *slow(9, *range(100, 130))])
def test_random_loads_with_few_states(seed: int) -> None:
    """Prompts that begin alike come at random, where a state is evicted, taken over and kept in one step."""
    rng, model, asked, events = random.Random(seed), hybrid(FIRST), list[list[int]](), list[TokenEvent]()
    engine, _ = build(
        FIRST,
        max_total_tokens=rng.choice([160, 240, 400]),
        prefill_chunk=rng.choice([16, 64]),
        max_num_seqs=rng.choice([4, 8]),
        mamba_full_memory_ratio=rng.choice([0.5, 1.0, 2.0, 3.0]),
    )
    for number in range(40):
        begin = rng.choice(asked) if asked and rng.random() < 0.7 else []
        begin = begin[: rng.randrange(len(begin) + 1)] if rng.random() < 0.6 else begin
        own = [rng.randrange(3, VOCABULARY) for _ in range(rng.choice([1, 2, 5, 12, 30]))]
        asked.append([*begin, *own][:90])
        boundary = max(len(asked[-1]) - rng.choice([1, 3, 12]), 0) if rng.random() < 0.5 else 0
        engine.add(request(str(number), asked[-1], rng.choice([1, 3, 12]), boundary))
        for _ in range(rng.choice([0, 0, 1, 3])):
            events += engine.step()
    events += run(engine)
    for number, prompt in enumerate(asked):
        answer = tokens_of(events, str(number))
        assert answer == greedy(model, prompt, answer)


def test_turns_of_a_chat_are_the_same_with_and_without_the_cache() -> None:
    """The next turn leaves out the end of the prompt before it, as templates do with thinking."""
    model, rng = hybrid(FIRST), random.Random(3)
    engine, _ = build(FIRST, prefill_chunk=64)
    kept: list[int] = []
    for turn in range(10):
        message = [rng.randrange(3, VOCABULARY) for _ in range(8)]
        prompt = [*kept, *message, 1, 2]
        boundary = len(kept) + len(message)
        engine.add(request(str(turn), prompt, 5, boundary))
        events = run(engine)
        answer = tokens_of(events, str(turn))
        assert len(answer) == 5
        assert answer == greedy(model, prompt, answer)
        (cached,) = [event.num_cached for event in events if event.num_cached is not None]
        assert cached == len(kept) - 5 if turn else not cached  # the answer is written without its thinking
        kept = [*kept, *message, *answer]


def test_a_step_that_fails_leaves_no_state_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = hybrid(FIRST), prompts(4, seed=4)
    engine, runner = build(FIRST)
    engine.add(*[request(str(number), prompt, 6) for number, prompt in enumerate(asked)])
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(runner, "_forward", failing)
        failed = [event.request_id for event in engine.step() + engine.step() if event.error]
    assert failed
    run(engine)
    for number in map(int, failed):
        engine.add(request(f"again {number}", asked[number], 6))
    events = run(engine)
    for number in map(int, failed):
        answer = tokens_of(events, f"again {number}")
        assert answer == greedy(model, asked[number], answer)


def failing(*args: object) -> None:
    raise RuntimeError("a failed step")
