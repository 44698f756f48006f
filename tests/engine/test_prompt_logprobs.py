"""Tests of the log-probabilities of prompts: their values beside transformers', in chunks, and exact counts."""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightkv.router import LLM, EngineConfig, SamplingParams
from lightkv.router.engine.request import InvalidParams, NeverFits, Request
from lightkv.router.engine.step import PromptLogprobs
from tests.support.combinations import slow
from tests.support.served import save_tiny_model

SCORED = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, prompt_logprobs=4)
PLAIN = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def reference(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    llm = LLM(
        EngineConfig(model=str(model), device="cpu", dtype="float32", max_total_tokens=600, prefill_chunk=40)
    )
    yield llm
    llm.check()
    assert llm.stats().held == 0


def prompt(length: int, seed: int) -> list[int]:
    return torch.randint(5, 40_000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def check(reference: PreTrainedModel, ids: list[int], found: PromptLogprobs | None, num_top: int = 4) -> None:
    with torch.no_grad():
        expected = reference(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    assert found is not None
    assert len(found) == len(ids) - 1
    for row, token, (scores, rank) in zip(expected, ids[1:], found.per_token(), strict=True):
        assert scores.logprob == pytest.approx(float(row[token]), abs=2e-4)
        values, top = row.topk(num_top)
        assert scores.top_logprobs == pytest.approx(values.tolist(), abs=2e-4)
        near = bool((values[:-1] - values[1:] < 1e-3).any()) if num_top > 1 else True
        assert near or scores.top_ids == top.tolist()
        assert abs(rank - 1 - int((row > row[token]).sum())) <= 3  # near ties


def test_scores_are_those_of_transformers(llm: LLM, reference: PreTrainedModel) -> None:
    """Prompts of many lengths around the chunk and the slice, beside plain ones that share steps with them."""
    scored = [prompt(length, length) for length in (1, 2, 39, 40, 41, 80, 81, 150)]
    plain = [prompt(length, length + 1) for length in (30, 90)]
    alone = llm.generate(plain, PLAIN)
    outputs = llm.generate([*scored, *plain], [SCORED] * len(scored) + [PLAIN] * 2)
    for ids, output in zip(scored, outputs, strict=False):
        check(reference, ids, output.prompt_logprobs)
        assert output.num_cached_tokens == 0
    for one, other in zip(outputs[len(scored) :], alone, strict=True):
        assert one.prompt_logprobs is None
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
    llm.check()


@pytest.mark.parametrize("length", [1, 120, 121, *slow(2, 39, 40, 41, 79, 80, 119)])
def test_a_prompt_without_an_answer_may_fill_the_context(
    model: Path, reference: PreTrainedModel, length: int
) -> None:
    """As harnesses score texts: the one token that is computed is for no client, and needs no room."""
    config = EngineConfig(
        model=str(model),
        device="cpu",
        dtype="float32",
        max_total_tokens=130,
        prefill_chunk=40,
        max_model_len=120,
    )
    llm = LLM(config)
    ids, info = prompt(length, length), llm.info
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=4)
    made = [
        Request(name, np.array(ids, np.int32).tobytes(), params, 0, shows_answer=shows)
        for name, shows in (("scored", False), ("answered", True))
    ]
    for request in made:
        if length + request.shows_answer > 120:
            with pytest.raises(
                NeverFits, match=f"{length} prompt tokens and up to {+request.shows_answer} new"
            ):
                request.validate(info.limits, info.capacity)
            continue
        request.validate(info.limits, info.capacity)
        llm.engine.add(request)
        events = []
        while not events:
            events = llm.engine.step()
        assert [event.finish_reason for event in events] == ["length"]
        check(reference, ids, events[0].prompt_logprobs)
    llm.engine.settle()
    llm.check()
    assert llm.stats().held == 0


def test_a_scored_prompt_takes_nothing_from_the_cache(llm: LLM, reference: PreTrainedModel) -> None:
    ids = prompt(120, 7)
    free = llm.generate([ids], PLAIN)[0]
    for _ in range(2):
        cached = llm.stats().cached
        again = llm.generate([ids], SCORED)[0]
        assert again.num_cached_tokens == 0
        assert again.outputs[0].token_ids == free.outputs[0].token_ids
        check(reference, ids, again.prompt_logprobs)
        llm.check()
        assert llm.stats().cached == cached
    assert llm.generate([ids], PLAIN)[0].num_cached_tokens == 119


def test_a_request_apart_takes_nothing_from_the_cache_and_leaves_nothing(llm: LLM) -> None:
    ids = prompt(90, 11)
    apart = msgspec.structs.replace(PLAIN, skip_reading_prefix_cache=True, n=2)
    before = llm.stats()
    first = llm.generate([ids], apart)[0]
    assert llm.stats().cached <= before.cached
    known = llm.generate([ids], PLAIN)[0]
    assert (first.num_cached_tokens, known.num_cached_tokens) == (0, 0)
    cached, hits = llm.stats().cached, llm.stats().hit_tokens
    again = llm.generate([ids], apart)[0]
    assert llm.stats().hit_tokens == hits
    assert llm.stats().cached == cached
    assert [one.token_ids for one in again.outputs] == [known.outputs[0].token_ids] * 2
    llm.check()


def test_only_the_first_of_n_answers_computes_them(llm: LLM, reference: PreTrainedModel) -> None:
    ids = prompt(60, 9)
    params = SamplingParams(temperature=0, max_tokens=2, n=3, ignore_eos=True, prompt_logprobs=0)
    (output,) = llm.generate([ids], params)
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs.top_ids) == 0
    check(reference, ids, output.prompt_logprobs, num_top=0)
    assert len({tuple(one.token_ids) for one in output.outputs}) == 1


def test_many_at_once_in_a_small_pool(llm: LLM, reference: PreTrainedModel) -> None:
    """They wait for room, and run together with answers that end at once."""
    prompts = [prompt(70 + i, 100 + i) for i in range(14)]
    params = [SCORED if i % 3 else PLAIN for i in range(14)]
    for ids, wanted, output in zip(prompts, params, llm.generate(prompts, params), strict=True):
        if wanted is SCORED:
            check(reference, ids, output.prompt_logprobs)
        else:
            assert output.prompt_logprobs is None
    llm.check()


def test_too_many_scores_are_refused(llm: LLM) -> None:
    for value in (-1, 21, True):
        with pytest.raises(InvalidParams):
            SamplingParams(prompt_logprobs=value)


def test_a_preempted_request_scores_each_token_once() -> None:
    ids = np.arange(10, dtype=np.int32)
    request = Request("a", ids.tobytes(), SCORED, seed=1)
    parts = [request.score(0, start, count) for start, count in ((0, 4), (4, 3), (0, 6), (6, 9), (2, 8))]
    targets = [[] if one is None else np.frombuffer(one.targets, np.int32).tolist() for one in parts]
    assert targets == [[1, 2, 3, 4], [5, 6, 7], [], [8, 9], []]
    assert [one.first for one in parts if one is not None] == [0, 0, 1]
    assert Request("b", ids.tobytes(), PLAIN, seed=1).score(0, 0, 10) is None


@pytest.mark.gpu
def test_scored_and_banned_requests_among_graphs_on_a_gpu(model: Path, reference: PreTrainedModel) -> None:
    """Steps with scored chunks run eagerly between those of CUDA graphs, with two in flight."""
    llm = LLM(
        EngineConfig(
            model=str(model), device="cuda", dtype="float32", max_total_tokens=4000, prefill_chunk=64
        )
    )
    prompts = [prompt(90 + i, 200 + i) for i in range(12)]
    plain = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    free = [one.outputs[0].token_ids for one in llm.generate(prompts, plain)]
    words = [[ids[4:6], [ids[9]]] for ids in free]
    banned = [
        SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, bad_words_ids=one) for one in words
    ]
    scored = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, prompt_logprobs=4)
    mixed = [(plain, banned[i], scored)[i % 3] for i in range(12)]
    for i, output in enumerate(llm.generate(prompts, mixed)):
        tokens = output.outputs[0].token_ids
        if i % 3 == 1:
            assert words[i][1][0] not in tokens
            assert words[i][0] not in [tokens[at : at + 2] for at in range(len(tokens))]
        elif i % 3 == 2:
            check(reference, prompts[i], output.prompt_logprobs)
    llm.check()
    assert llm.stats().held == 0
