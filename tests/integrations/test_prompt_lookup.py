"""Speculation by prompt look-up: the output of greedy decoding, in fewer passes, and no slots left held."""

import doctest
from collections.abc import Sequence
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lightkv import OutOfTokens
from lightkv.attention import AttentionBackend, Step
from lightkv.integrations import cached_model, prompt_lookup
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.model.hf_model import PackedStep
from lightkv.integrations.prompt_lookup import PromptLookup, generate
from lightkv.router import EngineConfig
from lightkv.router.model_files import resolve
from tests.support.combinations import slow
from tests.support.tiny_models import tiny_llama

VOCABULARY = 23  # so few that runs repeat by chance
PROMPTS = [[5], [5, 6, 5, 6, 5, 6], [11, 4, 3, 9, 2, 6, 1, 11, 4, 3], list(range(20)) * 2]


def tiny_model(device: torch.device, seed: int = 0) -> PreTrainedModel:
    return tiny_llama(device, seed, vocabulary=VOCABULARY)


@cache
def greedy(device: torch.device, place: int, eos: tuple[int, ...] | None) -> list[int]:
    """Returns the 24 tokens, or fewer up to one of `eos`, that the model of the seed `place` adds to the prompt
    at this place."""
    return reference(tiny_model(device, place), PROMPTS[place], 24, list(eos) if eos else None)


def reference(
    model: PreTrainedModel, prompt: list[int], max_new_tokens: int, eos: list[int] | None
) -> list[int]:
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=eos,
        pad_token_id=0,
    )
    return out[0, len(prompt) :].tolist()


def test_the_example_in_the_docstring_runs() -> None:
    result = doctest.testmod(prompt_lookup)
    assert result.attempted > 8
    assert not result.failed


def test_the_latest_match_of_the_longest_run_is_proposed() -> None:
    lookup = PromptLookup([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 1, 3)
    assert lookup.propose_lines(2, 1) == [[4, 9]]  # after 1 2 3, although 2 3 occurred later
    assert lookup.propose_lines(0, 1) == [[]]
    assert lookup.propose_lines(99, 1) == [[4, 9, 2, 3, 5, 1, 2, 3]]
    lookup.extend([7])
    assert lookup.propose_lines(3, 1) == []
    lookup.extend([2, 3])
    assert lookup.propose_lines(3, 1) == [[7, 2, 3]]  # after 2 3, the last of three matches
    shorter = PromptLookup([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3], 1, 2)
    assert shorter.propose_lines(2, 1) == [[5, 1]]
    shorter = PromptLookup([1, 2, 3, 4, 2], 2, 3)
    assert shorter.propose_lines(2, 1) == []  # only 2 occurred before, which is too short
    assert PromptLookup([7], 1, 3).propose_lines(2, 1) == []
    assert PromptLookup([7, 7], 1, 3).propose_lines(2, 1) == [[7]]


@pytest.mark.parametrize("num_proposed", [4, *slow(0, 1, 10, 100)])
def test_the_output_is_that_of_greedy_decoding(num_proposed: int, device: torch.device) -> None:
    num_right = num_wrong = 0
    for seed, prompt in enumerate(PROMPTS):
        for eos in (None, (seed + 7, 3)):
            expected = greedy(device, seed, eos)
            lm = CachedModel(tiny_model(device, seed), 200)
            found = generate(
                lm, prompt, 24, num_proposed=num_proposed, shortest_run=1, eos_token_ids=eos or ()
            )
            assert found.token_ids == expected
            assert found.num_forwards <= len(expected)
            num_right += found.num_accepted
            num_wrong += found.num_proposed - found.num_accepted
            lm.cache.check()
            # Neither wrong proposals nor tokens after the end stay cached.
            assert lm.cache.num_held == 0
            assert len(prompt) + len(expected) - 1 <= lm.cache.num_cached <= len(prompt) + len(expected)
    if num_proposed:
        assert num_right > 10
        assert num_wrong > 10
    else:
        assert num_right == num_wrong == 0


def test_a_tree_is_refused_where_layers_have_windows(device: torch.device) -> None:
    lm = CachedModel(tiny_model(device), 40)
    lm.windows = [4]
    with pytest.raises(ValueError, match="windows or chunks"):
        generate(lm, [1, 2], 4, num_lines=2)
    assert lm.cache.ledger.num_open == 0


def test_passes_and_tokens_are_counted(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = CachedModel(tiny_model(device), 200)
    computed: list[int] = []

    def counted(step: Step, backends: Sequence[AttentionBackend]) -> PackedStep:
        computed.append(step.num_tokens)
        return PackedStep(step, backends)

    monkeypatch.setattr(cached_model, "PackedStep", counted)
    found = generate(lm, PROMPTS[1], 30, num_proposed=5)
    assert len(found.token_ids) == 30
    assert found.num_forwards == len(computed)
    assert sum(computed) == len(PROMPTS[1]) + found.num_forwards - 1 + found.num_proposed
    assert len(found.token_ids) == found.num_forwards + found.num_accepted
    assert found.tokens_per_forward == 30 / found.num_forwards > 1.5
    # Prompt and output are cached now: only the last token has to be computed.
    computed.clear()
    again = generate(lm, PROMPTS[1] + found.token_ids[:20], 10, num_proposed=0)
    assert again.token_ids == found.token_ids[20:]
    assert computed[0] == 1


def test_wrong_proposals_make_the_next_ones_fewer(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    expected = reference(tiny_model(device), PROMPTS[2], 12, None)
    never = next(token for token in range(VOCABULARY) if token not in expected)

    def wrong(lookup: PromptLookup, count: int, _most_lines: int) -> list[list[int]]:
        asked.append(count)
        return [[never] * count]

    monkeypatch.setattr(PromptLookup, "propose_lines", wrong)
    lm = CachedModel(tiny_model(device), 200)
    found = generate(lm, PROMPTS[2], 12, num_proposed=8)
    assert found.token_ids == expected
    assert (found.num_forwards, found.num_accepted) == (12, 0)
    assert asked == [8, 2, 2, 2, 2, 2, 2, 2, 2, 1, 0]
    lm.cache.check()


def test_slots_of_wrong_proposals_are_free_at_once(device: torch.device) -> None:
    prompt = PROMPTS[3]
    # The capacity is exactly what plain greedy decoding needs.
    lm = CachedModel(tiny_model(device), len(prompt) + 9, max_entries=200)
    found = generate(lm, prompt, 10, num_proposed=4, shortest_run=1)
    assert found.num_proposed > found.num_accepted
    assert len(found.token_ids) == 10
    with pytest.raises(OutOfTokens):
        generate(lm, prompt, 60, num_proposed=4)
    assert lm.cache.num_held == 0
    lm.cache.check()


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"num_proposed": -1}, {"longest_run": 1}, {"shortest_run": 0}]
)
def test_wrong_numbers_are_refused(wrong: dict[str, int], device: torch.device) -> None:
    lm = CachedModel(tiny_model(device), 40)
    with pytest.raises(ValueError, match="new tokens with"):
        generate(lm, [1, 2], **{"max_new_tokens": 4, **wrong})  # type: ignore[arg-type]
    assert lm.cache.ledger.num_open == 0


@pytest.mark.slow
def test_smollm2(device: torch.device) -> None:
    directory = resolve(EngineConfig.model, print)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    prompt = tokenizer("one two three four one two three four one two three").input_ids
    expected = reference(model, prompt, 16, None)
    lm = CachedModel(model, 200)
    found = generate(lm, prompt, 16, num_proposed=6)
    assert found.token_ids == expected
    assert found.tokens_per_forward > 2
    lm.cache.check()
