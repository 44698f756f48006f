"""Tests that models with windows and chunks give transformers' own greedy answers, whatever the memory does: in
chunked prefills, after prefix hits, preemptions and evictions, in forks, beams and sessions.

The windows are shorter than the prompts (`tests.support.windowed_models`), so that a token which is released
too early, or hit where its window is not there, changes an answer.
"""

import random
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from transformers import DynamicCache, PreTrainedConfig

from lightkv.attention import Chunk, Window
from lightkv.integrations.hf_cache import LightKVCache
from lightkv.integrations.model.probe import probe
from lightkv.router import LLM, EngineConfig, SamplingParams
from lightkv.router.engine.estimates import OutputLengths
from lightkv.router.simulate.admissions import SimulatedAdmission
from lightkv.router.text.beam_search import BeamParams
from tests.support.combinations import each_value, slow
from tests.support.model_worker import assert_idle, run
from tests.support.tiny_architectures import random_weights, tiny
from tests.support.windowed_models import (
    FAMILIES,
    LONG,
    NUM_NEW,
    PROMPTS,
    LayerKind,
    expected,
    make_engine,
    own_answers,
    reference,
    request,
    run_all,
    text,
)

pytestmark = pytest.mark.usefixtures("one_thread")

# Of a cached text of 80 tokens, a prefix of so many or more is hit to the very token: the shortest window, of 8
# tokens, and the slack of as many that is kept before it, reach back to it from the end of the text.
EXACT = 72


def quickly(*names: str) -> list[Any]:
    """Returns all families that run, of which `make test` takes only these."""
    return [*names, *slow(*(name for name in FAMILIES if name not in names))]


# --------------------------------------------------------------------------------
# The table of families


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_tells_what_transformers_caches(name: str) -> None:
    family, past = FAMILIES[name], DynamicCache(config=FAMILIES[name].config())
    with torch.no_grad():
        reference(name)(torch.tensor([LONG]), past_key_values=past)
    found = []
    for kind, layer in zip(family.layer_kinds, past.layers, strict=True):
        if layer.keys is None:  # this layer reads another one's
            found.append(family.layer_kinds[kind.reads]._replace(reads=kind.reads))
            continue
        size = getattr(layer, "sliding_window", 0)
        limited = "chunk" if "attention_chunk_size" in family.fields else "window"
        _, num_kv_heads, _, k_dim = layer.keys.shape
        heads = kind.heads._replace(num_kv_heads=num_kv_heads, k_dim=k_dim, v_dim=layer.values.shape[-1])
        found.append(LayerKind(limited if size else "full", size, heads))
    assert tuple(found) == family.layer_kinds


@pytest.mark.parametrize("name", FAMILIES)
def test_the_probe_finds_the_layers_of_the_table(name: str) -> None:
    for kind, layer in zip(FAMILIES[name].layer_kinds, probe(FAMILIES[name].model()).layers, strict=True):
        assert kind.heads == (layer.num_heads, layer.num_kv_heads, layer.head_dim, layer.v_dim)
        assert layer.options.of(Window) == (Window(kind.size) if kind.sees == "window" else None)
        assert layer.options.of(Chunk) == (Chunk(kind.size) if kind.sees == "chunk" else None)


def resized(name: str, by: int) -> PreTrainedConfig:
    """Returns a family's configuration with windows and chunks that are larger by so many tokens."""
    family = FAMILIES[name]
    names = {"sliding_window", "attention_chunk_size"} & family.fields.keys()
    changed = {field: family.fields[field] + by for field in names}
    return tiny(family.model_type, fields={**family.fields, **changed})


@pytest.mark.parametrize("name", quickly("gemma3", "llama4"))
def test_a_window_that_is_wrong_by_one_gives_other_answers(name: str) -> None:
    """So the tests below notice it."""
    for by in (-1, 1):
        assert own_answers(random_weights(resized(name, by)), PROMPTS, NUM_NEW) != expected(name, PROMPTS)


# --------------------------------------------------------------------------------
# Prompts, hits and preemptions in the engine


@each_value(name=quickly("gemma3", "gemma4-tied", "gpt-oss"), chunk=[0, 7, 16], depth=[1, 2])
def test_prompts_of_many_lengths_in_chunks(name: str, chunk: int, depth: int) -> None:
    engine = make_engine(name, chunk=chunk, depth=depth)
    requests = [request(str(idx), prompt, NUM_NEW) for idx, prompt in enumerate(PROMPTS)]
    assert run_all(engine, requests) == expected(name, PROMPTS)
    assert_idle(engine)


@each_value(name=quickly("gemma3", "llama4"), chunk=[*slow(0), 7, 16], depth=[1, 2])
def test_a_long_prefix_is_hit_across_windows(name: str, chunk: int, depth: int) -> None:
    """Prompts leave a long one that is cached at, before and after bounds of windows and chunks; two of them
    also continue its answer. Then others leave these prompts."""
    engine = make_engine(name, chunk=chunk, depth=depth)
    answer = expected(name, [LONG])[0]
    assert run_all(engine, [request("long", LONG, NUM_NEW)]) == [answer]
    places = [3, 16, 17, 33, 57, 64, 79]
    prompts = [LONG[:at] + text(6, at) for at in places]
    prompts += [LONG, LONG + answer[:4] + text(4, 1), LONG + answer[:-1] + text(9, 2)]
    shared = [*places, len(LONG) - 1, len(LONG) + 4, len(LONG) + len(answer) - 1]
    first = [request(f"first {idx}", prompt, NUM_NEW) for idx, prompt in enumerate(prompts)]
    assert run_all(engine, first) == expected(name, prompts)
    for one, length in zip(first, shared, strict=True):
        assert one.num_hit == length if length >= EXACT else one.num_hit <= length
    again = [request(f"again {at}", LONG[:at] + text(6, at + 100), NUM_NEW) for at in places]
    assert run_all(engine, again) == expected(name, [LONG[:at] + text(6, at + 100) for at in places])
    assert [
        one.num_hit for one in again
    ] == places  # those that turned off there have left what is seen there
    prompts = [prompt[:-2] + text(5, 3 + idx) for idx, prompt in enumerate(prompts)]
    second = [request(f"second {idx}", prompt, NUM_NEW) for idx, prompt in enumerate(prompts[::2])]
    assert run_all(engine, second) == expected(name, prompts[::2])
    assert_idle(engine)


@each_value(name=quickly("llama4", "granite-swa"), chunk=[0, *slow(7), 16], depth=[1, 2])
def test_tokens_are_shared_with_a_request_whose_windows_pass_them(name: str, chunk: int, depth: int) -> None:
    """The first request holds them for the others while its own windows move on."""
    engine = make_engine(name, chunk=chunk, depth=depth)
    most = 24
    answer = expected(name, [LONG], most)[0]
    first = request("first", LONG, most)
    engine.add(first)
    while len(first.output) < 8:
        engine.step()
    prompts = [LONG, LONG[:40] + text(5, 4), LONG + answer[:6] + text(5, 5), LONG[:76]]
    others = [request(str(idx), prompt, NUM_NEW) for idx, prompt in enumerate(prompts)]
    engine.add(*others)
    while not others[1].output:
        engine.step()
    assert first.finish_reason is None
    later = request("later", prompts[1] + text(3, 6), NUM_NEW)  # of what the first and another one hold
    assert run_all(engine, [later]) == expected(name, [prompts[1] + text(3, 6)])
    assert [one.output.tolist() for one in others] == expected(name, prompts)
    assert first.output.tolist() == answer
    assert all(
        one.num_hit for one in (others[0], *others[2:], later)
    )  # the other one is the first to turn off at its place
    assert_idle(engine)


@each_value(name=quickly("gemma3", "llama4"), chunk=[0, 7, *slow(16)], depth=[1, 2])
def test_a_preemption_changes_no_answer(name: str, chunk: int, depth: int) -> None:
    """Answers are longer than admission expects. Two of the prompts share a prefix."""
    most = 16
    prompts = [text(length, 20 + length) for length in (22, 30, 41)]
    prompts += [prompts[2][:27] + text(8, 6)]
    admission = SimulatedAdmission(OutputLengths(assumed=2), guarantees=False)
    engine = make_engine(name, pool=60, chunk=chunk, depth=depth, admission=admission)
    requests = [request(str(idx), prompt, most) for idx, prompt in enumerate(prompts)]
    assert run_all(engine, requests) == expected(name, prompts, most)
    assert engine.stats().num_preemptions > 0
    assert_idle(engine)


@each_value(name=quickly("ministral-windows", "llama4"), chunk=[0, *slow(16), 40], depth=[1, 2])
def test_turns_of_sessions_find_what_the_turns_before_left(name: str, chunk: int, depth: int) -> None:
    """Two conversations run beside requests that take the rest of the pool. Each turn leaves the one before two
    tokens early, as with templates that write the end of an answer anew."""
    engine = make_engine(name, pool=300, chunk=chunk, depth=depth)
    prompts, shared = [text(38, 7), text(31, 8)], [0, 0]
    for turn in range(3):
        turns = [
            request(f"{idx} in {turn}", prompt, NUM_NEW, engine.scheduler.ledger.sessions.open(str(idx)))
            for idx, prompt in enumerate(prompts)
        ]
        others = [request(f"other {idx} in {turn}", text(95, 10 * turn + idx), 1) for idx in range(2)]
        answers = run_all(engine, [*turns, *others])[: len(turns)]
        assert answers == expected(name, prompts)
        assert [one.num_hit for one in turns] == shared
        told = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        prompts = [one[:-2] + text(7, 100 + turn) for one in told]
        # A new text may happen to begin as the answer would have gone on.
        pairs = [zip(*both, strict=False) for both in zip(told, prompts, strict=True)]
        shared = [len(list(takewhile(lambda one: one[0] == one[1], pair))) for pair in pairs]
        assert all(num >= len(one) - 2 for num, one in zip(shared, told, strict=True))
    assert_idle(engine)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAMILIES)
def test_a_random_life_changes_no_answer(name: str, seed: int) -> None:
    """Prompts with three prefixes come, some in sessions; some are aborted, or preempted. The pool is too small
    for all of them, so that what is cached is evicted in part."""
    rng = random.Random(seed)
    lengths = OutputLengths(assumed=3) if rng.random() < 0.5 else None
    engine = make_engine(
        name,
        pool=rng.choice([110, 160]),
        chunk=rng.choice([0, 7]),
        depth=rng.choice([1, 2]),
        admission=SimulatedAdmission(lengths, guarantees=lengths is None),
    )
    roots = [text(80, 30 + idx) for idx in range(3)]
    asked = {}
    for number in range(10):
        prompt = rng.choice(roots)[: rng.randint(1, 80)] + text(rng.randint(1, 6), 1000 * seed + number)
        session = engine.scheduler.ledger.sessions.open(rng.choice("ab")) if rng.random() < 0.3 else None
        one = request(str(number), prompt, NUM_NEW, session)
        engine.add(one)
        asked[one.id] = prompt, one
        for _ in range(rng.randint(0, 7)):
            engine.step()
        if rng.random() < 0.2:
            aborted = rng.choice(list(asked))
            if engine.abort(aborted):
                del asked[aborted]
        if not engine.scheduler.num_in_flight:
            engine.check()
    run(engine)
    prompts = [prompt for prompt, _ in asked.values()]
    assert [one.output.tolist() for _, one in asked.values()] == expected(name, prompts)
    assert engine.stats().hit_tokens > 0
    assert_idle(engine)


# --------------------------------------------------------------------------------
# Forks and beams


@each_value(name=quickly("gemma3"))
def test_several_answers_and_beams_of_a_prompt(name: str, tmp_path: Path) -> None:
    """A model that is loaded: its answers to a prompt are equal, and its beams are transformers'."""
    FAMILIES[name].model().save_pretrained(tmp_path)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "b": 1}, []))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    llm = LLM(
        EngineConfig(
            str(tmp_path),
            device="cpu",
            dtype="float32",
            kv_dtype="auto",
            max_total_tokens=600,
            prefill_chunk=16,
        )
    )
    prompts, width, most = [LONG, LONG[:50] + text(7, 11)], 3, 4
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW, n=3, ignore_eos=True)
    for output, own in zip(llm.generate(prompts, params), expected(name, prompts), strict=True):
        assert [answer.token_ids for answer in output.outputs] == [own] * 3
    beams = llm.beam_search([LONG], BeamParams(width=width, max_tokens=most, ignore_eos=True))[0]
    own = reference(name).generate(torch.tensor([LONG]), **beam_options(len(LONG), width, most))
    assert [beam.token_ids for beam in beams] == own[:, len(LONG) :].tolist()
    llm.check()
    assert llm.stats().held == 0


def beam_options(length: int, width: int, num_new: int) -> dict[str, Any]:
    """Returns arguments with which transformers returns all beams of a prompt."""
    return {
        "attention_mask": torch.ones(1, length, dtype=torch.int64),
        "max_new_tokens": num_new,
        "num_beams": width,
        "num_return_sequences": width,
        "do_sample": False,
        "eos_token_id": None,
        "pad_token_id": 0,
    }


@pytest.mark.parametrize("name", quickly("gpt-oss", "granite-swa", "ministral-windows"))
def test_generate_with_lightkvs_cache(name: str) -> None:
    """transformers' own `generate` forks the sequences of its beams; the second call hits what the first one
    left."""
    model = FAMILIES[name].model()
    past = LightKVCache(model, 1000)
    prompt, options = torch.tensor([LONG[:45]]), beam_options(45, 3, NUM_NEW)
    own = reference(name).generate(prompt, **options)
    for num_hit in (0, 44):
        assert torch.equal(model.generate(prompt, past_key_values=past, **options), own)
        assert past.num_hit >= num_hit
        past.reset()
        past.kv.check()
    assert past.kv.num_held == 0
