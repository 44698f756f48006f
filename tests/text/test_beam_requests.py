"""Tests of beam search beside transformers' own, and that it leaves the engine's counts exact."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from lightkv.router import LLM, BeamParams, EngineConfig
from lightkv.router.sampling_params import InvalidParams
from tests.support.served import save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def reference(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def shared(model: Path) -> LLM:
    return LLM(EngineConfig(model=str(model), device="cpu", dtype="float32", max_total_tokens=700))


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    shared.check()
    assert shared.stats().held == 0


@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.5, -1.0])
def test_beams_are_those_of_transformers(llm: LLM, reference: PreTrainedModel, length_penalty: float) -> None:
    """The tokens that end a beam are likely ones of this random model, so that beams end at many lengths."""
    prompts = [[7, 8, 9, 10 + i] for i in range(2)]
    width, most = 4, 8
    with torch.no_grad():
        logits = reference(torch.tensor(prompts)).logits[:, -1]
    end = int(logits[0].topk(2).indices[1])
    llm.tokenizer.eos_ids = frozenset({end})
    found = llm.beam_search(
        prompts,
        BeamParams(width=width, max_tokens=most, length_penalty=length_penalty),
    )
    for prompt, beams in zip(prompts, found, strict=True):
        expected = reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=most,
            num_beams=width,
            num_return_sequences=width,
            do_sample=False,
            length_penalty=length_penalty,
            eos_token_id=end,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        assert [beam.score for beam in beams] == pytest.approx(expected.sequences_scores.tolist(), abs=1e-3)
        for beam, ids in zip(beams, expected.sequences[:, len(prompt) :].tolist(), strict=True):
            assert beam.token_ids == ids[: len(beam.token_ids)]
            assert beam.finish_reason == ("stop" if beam.token_ids[-1] == end else "length")


def test_beams_find_their_texts_in_the_cache(llm: LLM) -> None:
    prompt = list(range(40, 140))
    before = llm.stats()
    llm.beam_search([prompt], BeamParams(width=5, max_tokens=10, ignore_eos=True))
    after = llm.stats()
    computed = (after.prompt_tokens - before.prompt_tokens) - (after.hit_tokens - before.hit_tokens)
    assert computed <= 100 + 5 * 9  # each round computes one token a beam


def test_a_width_of_one_is_greedy(llm: LLM) -> None:
    from lightkv.router import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    (beam,) = llm.beam_search("Hello", BeamParams(width=1, max_tokens=9, ignore_eos=True))[0]
    assert beam.token_ids == llm.generate("Hello", greedy)[0].outputs[0].token_ids


@pytest.mark.parametrize(
    "fields",
    [
        {"width": 0},
        {"width": 21},
        {"width": True},
        {"max_tokens": 0},
        {"length_penalty": float("nan")},
        {"length_penalty": "1"},
    ],
    ids=str,
)
def test_wrong_values_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParams):
        BeamParams(**fields)


def test_more_beams_than_log_probabilities_are_refused() -> None:
    with pytest.raises(InvalidParams, match="at most 18 beams where 2 tokens"):
        BeamParams(width=19).round_params(2)
