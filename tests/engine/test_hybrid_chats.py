"""Chats with a model whose layers keep states, through `LLM`: with the template of Qwen3.5, whose prompts leave
out the thinking of earlier turns, and searches for beams, which go on from the states of one another."""

import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from lightkv.router import LLM, EngineConfig, SamplingParams
from lightkv.router.text.beam_search import BeamParams
from tests.support.hybrid_models import greedy, save_hybrid

pytestmark = pytest.mark.usefixtures("one_thread")
TURNS = 10
# How many chats, and how many states there are.
CASES = [(3, 30), *[pytest.param(*case, marks=pytest.mark.slow) for case in ((4, 6), (100, 400), (100, 60))]]
MOST_BEFORE = 16  # tokens from the last added token up to where two prompts differ


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("models") / "hybrid")


def common(one: list[int], other: list[int]) -> int:
    """Returns how many tokens both begin with."""
    return next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(map(len, (one, other)))
    )


@pytest.mark.parametrize(("num", "num_states"), CASES)
def test_cached_turns_are_the_same_as_uncached_ones(saved: Path, num: int, num_states: int) -> None:
    """Uncached are transformers' own. With room for all states, each turn is found up to the answer before it.
    With fewer, some are computed again."""
    capacity = num * 1000
    config = EngineConfig(
        str(saved),
        device="cpu",
        max_total_tokens=capacity,
        max_num_seqs=16,
        prefill_chunk=256,
        mamba_full_memory_ratio=(num_states + 1.5) * 7488 / (128 * (capacity + 1)),
    )
    llm, own = LLM(config), AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    assert llm.info.num_states == num_states
    rng, chats = random.Random(0), [list[dict[str, str]]() for _ in range(num)]
    before = [list[int]() for _ in chats]
    num_cached = 0
    for _ in range(TURNS):
        for chat in chats:
            question = " ".join(rng.choice(("why", "how", "who", "so")) for _ in range(rng.randint(1, 6)))
            chat.append({"role": "user", "content": question})
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(2, 12), ignore_eos=True)
        for i, one in enumerate(llm.chat(chats, params)):
            answer = list(one.outputs[0].token_ids)
            assert answer == greedy(own, one.prompt_token_ids, answer)
            if num_states >= 4 * num:
                assert one.num_cached_tokens >= common(before[i], one.prompt_token_ids) - MOST_BEFORE
            num_cached += one.num_cached_tokens
            before[i] = one.prompt_token_ids
            words = " ".join(rng.choice(("yes", "no", "later")) for _ in range(rng.randint(1, 8)))
            chats[i].append({"role": "assistant", "content": words, "reasoning_content": "left out later"})
        llm.check()
    assert num_cached
    assert llm.stats().held_states == 0


def test_beams_go_on_from_the_states_of_one_another(saved: Path) -> None:
    """Each beam's score is transformers' own, and a search with hardly any states finds the same beams."""
    ids, params = list(b"Once upon a time"), BeamParams(width=4, max_tokens=6, ignore_eos=True)
    found = []
    for ratio in (3.0, 0.001):
        settings = {"max_total_tokens": 500, "mamba_full_memory_ratio": ratio}
        llm = LLM(EngineConfig(str(saved), device="cpu", **settings))  # type: ignore[arg-type]
        (beams,) = llm.beam_search([ids], params)
        found.append([beam.token_ids for beam in beams])
        hits = llm.stats().hit_tokens
        assert hits > 200 if ratio == 3.0 else hits < 200
        llm.check()
    assert found[0] == found[1]
    own = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()
    for beam in beams:
        with torch.no_grad():
            logprobs = (
                own(torch.tensor([[*ids, *beam.token_ids]])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
            )
        score = float(logprobs.gather(1, torch.tensor(beam.token_ids)[:, None]).sum())
        assert beam.logprob == pytest.approx(score, abs=1e-3)
