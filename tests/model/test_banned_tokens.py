"""Tests of allowed tokens and banned words: the sampler beside transformers' processors, and whole answers."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.logits_process import NoBadWordsLogitsProcessor

from lightkv.router import LLM, EngineConfig, SamplingParams
from lightkv.router.engine.step import NewRow
from lightkv.router.model.sampler import Sampler
from lightkv.router.sampling_params import MAX_BAD_WORD_TOKENS, MAX_BAD_WORDS, InvalidParams
from tests.support.sampler_rows import EDITED, VOCAB_SIZE, draw, int32_bytes, make_logits
from tests.support.served import save_tiny_model

WORDS = [[5], [7, 8], [8, 8], [1, 2, 3], [9, 9, 9, 9]]
PROMPT = [3, 1, 2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    llm = LLM(EngineConfig(model=str(model), device="cpu", dtype="float32", max_total_tokens=2048))
    yield llm
    llm.check()
    assert llm.stats().held == 0


def test_words_are_banned_as_by_transformers(device: torch.device) -> None:
    """A few tokens are likely, so that words begin often. The prompt's end counts, too."""
    ours = SamplingParams(temperature=0, bad_words_ids=WORDS)
    sampler = Sampler(4, VOCAB_SIZE, device)
    sampler.set_rows([NewRow(2, ours, 1, last_ids=int32_bytes(PROMPT))])
    theirs = NoBadWordsLogitsProcessor(WORDS)
    tokens = list(PROMPT)
    banned = 0
    for position in range(300):
        logits = make_logits(1, position)
        logits[:, [1, 2, 3, 5, 7, 8, 9]] += 8
        expected = int(theirs(torch.tensor([tokens]), logits.clone()).argmax())
        banned += expected != int(logits.argmax())
        assert draw(sampler, logits, [2], [position + 3], EDITED) == [expected]
        tokens.append(expected)
    assert banned > 50
    sampler.check()


def test_a_row_that_is_set_again_bans_nothing(device: torch.device) -> None:
    sampler = Sampler(4, VOCAB_SIZE, device)
    restricted = SamplingParams(temperature=0, allowed_token_ids=[4, 9, 50], bad_words_ids=[[9], [4, 50]])
    sampler.set_rows([NewRow(1, restricted, 1, last_ids=int32_bytes([4]))])
    logits = make_logits(1, 3)
    logits[0, [9, 50]] = 90.0
    logits[0, 30] = 99.0
    assert draw(sampler, logits, [1], [0], EDITED) == [4]  # 9 is banned, and 50 after 4
    assert draw(sampler, logits, [1], [1], EDITED) == [4]
    sampler.set_rows([NewRow(1, SamplingParams(temperature=0, logprobs=1), 1)])
    assert draw(sampler, logits, [1], [2], EDITED) == [30]
    sampler.set_rows([NewRow(1, SamplingParams(temperature=0, allowed_token_ids=[50, 9]), 1)])
    assert draw(sampler, logits, [1], [3], EDITED) == [9]
    sampler.check()


def test_each_token_of_a_large_random_row_is_allowed(device: torch.device) -> None:
    rng = np.random.default_rng(2)
    allowed = rng.choice(5000, 700, replace=False).tolist()
    sampler = Sampler(3, 5000, device)
    sampler.set_rows([NewRow(1, SamplingParams(temperature=50.0, allowed_token_ids=allowed), 5)])
    drawn = draw(sampler, make_logits(1, 1, 5000).expand(400, -1), [1] * 400, list(range(400)), EDITED)
    assert set(drawn) <= set(allowed)
    assert len(set(drawn)) > 250


def test_penalties_and_log_probabilities_stay_as_they_are(device: torch.device) -> None:
    """The ban takes a bit of a token's count, which no penalty may read."""
    plain = {"temperature": 0, "frequency_penalty": 1.5, "presence_penalty": 0.5, "logprobs": 3}
    free, bans = Sampler(3, VOCAB_SIZE, device), Sampler(3, VOCAB_SIZE, device)
    free.set_rows([NewRow(1, SamplingParams(**plain, logit_bias={0: -100.0}), 1)])
    bans.set_rows([NewRow(1, SamplingParams(**plain, bad_words_ids=[[0]]), 1)])
    logits = make_logits(1, 8)
    logits[0, 0] = 20.0
    where = torch.tensor([1], device=device)
    for position in range(60):
        one, other = (s.sample(logits.to(device), where, where * position, EDITED) for s in (free, bans))
        assert one.tokens.tolist() == other.tokens.tolist()
        assert torch.equal(one.logprobs, other.logprobs)  # type: ignore[arg-type]
    bans.check()


def test_answers_with_bad_words_are_those_of_transformers(model: Path, llm: LLM) -> None:
    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    prompt = llm.tokenizer.encode("Once upon a time").tolist()
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    free = llm.generate([prompt], greedy)[0].outputs[0].token_ids
    words = [free[3:5], [free[8]], [free[10], free[11], free[12]], [prompt[-1], free[0]]]
    expected = reference.generate(
        torch.tensor([prompt]),
        max_new_tokens=24,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        bad_words_ids=words,
    )[0, len(prompt) :].tolist()
    banned = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, bad_words_ids=words)
    ours, other = llm.generate([prompt, prompt], [banned, greedy])  # side by side in one batch
    assert ours.outputs[0].token_ids == expected != free
    assert other.outputs[0].token_ids == free


def test_bad_words_are_texts_for_llm(llm: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    free = llm.generate("Hello", greedy)[0].outputs[0]
    word = llm.tokenizer.decode([free.token_ids[2]])
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, bad_words=[word])
    assert free.token_ids[2] not in llm.generate("Hello", params)[0].outputs[0].token_ids


def test_a_preempted_row_knows_its_last_tokens() -> None:
    from lightkv.router.engine.plan_writer import NewRows
    from lightkv.router.engine.request import Request

    params = SamplingParams(max_tokens=9, bad_words_ids=[[7, 8, 9]])
    request = Request("a", int32_bytes([1, 2, 3]), params, seed=1)
    rows = NewRows(100)
    rows.add(request, 1)
    request.prefill_ids += int32_bytes([4])
    rows.add(request, 2)
    assert [row.last_ids for row in rows.drain()[0]] == [int32_bytes([2, 3]), int32_bytes([3, 4])]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, "a"]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, 97]}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, 2], "bad_words_ids": [[1], [2]]}, "allowed_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["a" * 257]}, "bad_words"),
        ({"bad_words_ids": [[]]}, "bad_words_ids"),
        ({"bad_words_ids": [[1] * (MAX_BAD_WORD_TOKENS + 1)]}, "bad_words_ids"),
        ({"bad_words_ids": [[1, 2]] * (MAX_BAD_WORDS + 1)}, "bad_words_ids"),
        ({"bad_words_ids": [[97]]}, "bad_words_ids"),
        ({"bad_words_ids": [[token] for token in range(97)]}, "bad_words"),
    ],
    ids=str,
)
def test_wrong_values_are_refused(fields: dict, name: str) -> None:
    with pytest.raises(InvalidParams) as caught:
        SamplingParams(**fields).validate(97)
    assert caught.value.field == name
