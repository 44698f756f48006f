"""Beams and parallel samples equal Hugging Face's, token by token, and share K/V instead of copying it."""

import doctest
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from lightkv import OutOfRows, OutOfTokens
from lightkv.attention import AttentionBackend, Step
from lightkv.integrations import cached_model, sampling
from lightkv.integrations.cached_model import CachedModel, select
from lightkv.integrations.model.hf_model import PackedStep
from lightkv.integrations.sampling import Beam, beam_search, sample_parallel
from lightkv.router import EngineConfig
from lightkv.router.model_files import resolve
from tests.support.tiny_models import VOCABULARY, tiny_llama

PROMPTS = [[5], [5, 6, 7, 8], [11, 40, 3, 90, 22, 61, 17, 4, 33, 8, 70], list(range(20, 60))]


def reference_beams(
    model: PreTrainedModel, prompt: list[int], num_beams: int, **options: object
) -> list[Beam]:
    """Returns Hugging Face's beams, each cut after its end token."""
    ids = torch.tensor([prompt], device=model.device)
    eos = options.pop("eos_token_ids", None) or None
    out = model.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        do_sample=False,
        eos_token_id=eos,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    beams = []
    for sequence, indices, score in zip(out.sequences, out.beam_indices, out.sequences_scores, strict=True):
        length = int((indices >= 0).sum())
        beams.append(Beam(sequence[len(prompt) : len(prompt) + length].tolist(), float(score)))
    return beams


def assert_same(found: list[Beam], expected: list[Beam]) -> None:
    assert [beam.token_ids for beam in found] == [beam.token_ids for beam in expected]
    assert [beam.score for beam in found] == pytest.approx(
        [beam.score for beam in expected], rel=1e-4, abs=1e-5
    )


@pytest.mark.parametrize("module", [cached_model, sampling], ids=lambda module: module.__name__)
def test_the_example_in_the_docstring_runs(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 8
    assert not result.failed


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
def test_beams_equal_hugging_faces(
    early_stopping: bool | str, length_penalty: float, device: torch.device
) -> None:
    num_early = 0
    for seed, prompt in enumerate(PROMPTS):
        for eos in ([], [3], list(range(3, VOCABULARY, 5))):
            options = {
                "max_new_tokens": 14,
                "eos_token_ids": eos,
                "length_penalty": length_penalty,
                "early_stopping": early_stopping,
            }
            expected = reference_beams(tiny_llama(device, seed), prompt, 4, **options)
            lm = CachedModel(tiny_llama(device, seed), 400)
            found = beam_search(lm, prompt, 4, **options)  # type: ignore[arg-type]
            assert_same(found, expected)
            num_early += sum(len(beam.token_ids) < 14 for beam in found)
            lm.cache.check()
            assert lm.cache.num_held == 0
    if length_penalty < 2:  # which favours the longest
        assert num_early > 3, "no beam ended early, so the test does not show how beams end"


@pytest.mark.parametrize("num_beams", [1, 2, 7])
def test_any_number_of_beams(num_beams: int, device: torch.device) -> None:
    options = {"max_new_tokens": 10, "eos_token_ids": [3, 50]}
    lm = CachedModel(tiny_llama(device), 400)
    found = beam_search(lm, PROMPTS[1], num_beams, **options)  # type: ignore[arg-type]
    model = tiny_llama(device)
    if num_beams == 1:
        ids = torch.tensor([PROMPTS[1]], device=device)
        out = model.generate(  # type: ignore[operator]
            ids, do_sample=False, max_new_tokens=10, eos_token_id=[3, 50], pad_token_id=0
        )
        assert found[0].token_ids == out[0, 4:].tolist()
    else:
        assert_same(found, reference_beams(model, PROMPTS[1], num_beams, **options))


class Counted:
    """Counts what a `CachedModel` computes, allocates and writes from now on."""

    def __init__(self, lm: CachedModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_computed = self.num_allocated = self.num_bytes = 0
        self.most_held = 0
        self.pool = lm.cache.memory.pool
        self.before = self.snapshot()

        def counted(step: Step, backends: Sequence[AttentionBackend]) -> PackedStep:
            self.num_computed += step.num_tokens
            return PackedStep(step, backends)

        monkeypatch.setattr(cached_model, "PackedStep", counted)

        def count_edits(edits: list[Any], kept: list[torch.Tensor]) -> None:
            self.num_allocated += sum(sum(edit.counts) for edit in edits if hasattr(edit, "counts"))
            self.most_held = max(self.most_held, lm.cache.num_held)

        lm.cache.on_edits = count_edits
        for backend in lm.backends:
            write = backend._write

            def write_and_count(q, k, v, step, rotary, write=write):  # type: ignore[no-untyped-def]
                assert self.same(), "K/V was written between two steps"
                write(q, k, v, step, rotary)
                self.num_bytes += k.nbytes + v.nbytes
                self.before = self.snapshot()

            monkeypatch.setattr(backend, "_write", write_and_count)

    def snapshot(self) -> list[torch.Tensor]:
        return [self.pool.kv(idx).clone() for idx in range(self.pool.spec.num_layers)]

    def same(self) -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.before, self.snapshot(), strict=True))


def blank_model(device: torch.device, capacity: int = 400) -> CachedModel:
    """Returns a model with zeros in its pool, since uninitialised memory may hold NaN, which equals nothing."""
    lm = CachedModel(tiny_llama(device), capacity)
    for layer_idx in range(2):
        lm.cache.memory.pool.kv(layer_idx).zero_()
    return lm


def test_beams_copy_no_kv(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = blank_model(device)
    counted = Counted(lm, monkeypatch)
    prompt = PROMPTS[3]
    beam_search(lm, prompt, 4, 12)
    assert counted.num_computed == counted.num_allocated == len(prompt) + 4 * 11
    assert counted.num_bytes == counted.num_computed * lm.cache.memory.pool.spec.bytes_per_token
    assert counted.same()
    # Four beams hold the prompt once, and each its own tokens.
    assert counted.most_held <= len(prompt) + 4 * 11
    # A second search finds the cached prompt, all but its last token.
    again = counted.num_computed
    beam_search(lm, prompt, 4, 12)
    assert counted.num_computed == again + 1 + 4 * 11


def test_forks_share_their_slots_and_dropped_forks_free_theirs(device: torch.device) -> None:
    lm = CachedModel(tiny_llama(device), 60)
    sequence, _ = lm.prefill(PROMPTS[2])
    forks = select(lm.cache, [sequence], [0, 0, 0])
    assert forks[0] is sequence
    for fork in forks:
        assert torch.equal(lm.cache.slots(fork), lm.cache.slots(sequence))
    assert lm.cache.num_held == len(PROMPTS[2])
    lm.decode(forks, [1, 2, 3])
    assert lm.cache.num_held == len(PROMPTS[2]) + 3
    kept = select(lm.cache, forks, [2, 2])
    assert lm.cache.num_held == len(PROMPTS[2]) + 1
    assert torch.equal(lm.cache.slots(kept[0]), lm.cache.slots(kept[1]))
    lm.cache.check()


def test_select_changes_nothing_when_there_is_no_row(device: torch.device) -> None:
    lm = CachedModel(tiny_llama(device), 60, max_sequences=3)
    first, _ = lm.prefill([5, 6, 7])
    second, _ = lm.prefill([8, 9])
    with pytest.raises(OutOfRows):
        select(lm.cache, [first, second], [1, 1, 1, 1])
    assert (first.row, second.row, lm.cache.ledger.num_open) == (1, 2, 2)
    assert len(select(lm.cache, [first, second], [1, 1, 1])) == 3


def test_parallel_samples_equal_hugging_faces(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = PROMPTS[2]
    ids = torch.tensor([prompt], device=device)
    torch.manual_seed(3)
    expected = tiny_llama(device)
    torch.manual_seed(7)
    out = expected.generate(  # type: ignore[operator]
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        temperature=0.7,
        top_k=0,
        num_return_sequences=5,
        max_new_tokens=9,
        eos_token_id=None,
        pad_token_id=0,
    )
    lm = blank_model(device)
    counted = Counted(lm, monkeypatch)
    torch.manual_seed(7)
    found = sample_parallel(lm, prompt, 5, 9, temperature=0.7)
    assert found == out[:, len(prompt) :].tolist()
    assert len({tuple(answer) for answer in found}) > 1
    assert counted.num_computed == counted.num_allocated == len(prompt) + 5 * 8
    assert lm.cache.num_held == 0
    lm.cache.check()


def test_a_sample_ends_with_its_end_token(device: torch.device) -> None:
    lm = CachedModel(tiny_llama(device), 400)
    generator = torch.Generator(device).manual_seed(1)
    eos = set(range(0, VOCABULARY, 5))
    found = sample_parallel(lm, PROMPTS[1], 8, 30, eos_token_ids=eos, generator=generator)
    assert min(map(len, found)) < 30
    for answer in found:
        assert len(answer) == 30 or answer[-1] in eos
        assert not eos.intersection(answer[:-1])
    assert lm.cache.num_held == 0
    lm.cache.check()


@pytest.mark.parametrize("capacity", [50, 56, 70])
def test_a_pool_too_small_leaves_nothing_open(capacity: int, device: torch.device) -> None:
    lm = CachedModel(tiny_llama(device), capacity, max_entries=100)
    with pytest.raises(OutOfTokens):
        beam_search(lm, PROMPTS[3] + PROMPTS[2], 4, 40)
    assert (lm.cache.num_held, lm.cache.ledger.num_open) == (0, 0)
    lm.cache.check()
    with pytest.raises(OutOfTokens):
        sample_parallel(lm, PROMPTS[3] + PROMPTS[2], 4, 40)
    assert (lm.cache.num_held, lm.cache.ledger.num_open) == (0, 0)
    lm.cache.check()


def test_a_failed_pass_caches_only_what_was_written(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = CachedModel(tiny_llama(device), 200)
    expected = beam_search(CachedModel(tiny_llama(device), 200), PROMPTS[1], 3, 8)
    calls: Iterator[int] = iter(range(100))
    model_forward = lm.model.forward

    def failing(*arguments: object, **named: object) -> object:
        if next(calls) == 4:
            raise RuntimeError("the device is gone")
        return model_forward(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(lm.model, "forward", failing)
        with pytest.raises(RuntimeError, match="gone"):
            beam_search(lm, PROMPTS[1], 3, 8)
    assert lm.cache.num_held == 0
    lm.cache.check()
    assert_same(beam_search(lm, PROMPTS[1], 3, 8), expected)


def test_sequences_are_as_long_as_before_when_a_pass_fails(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = CachedModel(tiny_llama(device), 200)
    first, _ = lm.prefill(PROMPTS[1])
    second, _ = lm.prefill(PROMPTS[2])
    before = lm.decode([first, second], [1, 2])
    lengths, held = (first.length, second.length), lm.cache.num_held

    def failing(*_: object, **__: object) -> object:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(lm.model, "forward", failing)
        with pytest.raises(RuntimeError, match="gone"):
            lm.forward([second, first], [[3, 4], [5]])
        with pytest.raises(RuntimeError, match="gone"):
            lm.prefill(PROMPTS[3])
    assert (first.length, second.length, lm.cache.num_held) == (*lengths, held)
    assert lm.cache.num_cached == 0
    lm.cache.check()
    lm.cache.truncate(first, first.length - 1)
    lm.cache.truncate(second, second.length - 1)
    torch.testing.assert_close(lm.decode([first, second], [1, 2]), before)


@pytest.mark.parametrize(("num_beams", "max_new_tokens"), [(0, 5), (4, 0), (VOCABULARY, 5)])
def test_wrong_numbers_are_named(num_beams: int, max_new_tokens: int, device: torch.device) -> None:
    lm = CachedModel(tiny_llama(device), 100)
    with pytest.raises(ValueError, match=f"{num_beams} beams of {max_new_tokens} tokens"):
        beam_search(lm, [5, 6], num_beams, max_new_tokens)
    assert lm.cache.num_held == 0


def same_beams_on_smollm2(max_new_tokens: int, ends: str, capacity: int, device: torch.device) -> int:
    """Compares beams with Hugging Face's. Returns the length of the longest.

    `ends` is a text of one token that ends a beam, in addition to the model's own end token.
    """
    directory = resolve(EngineConfig.model, print)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).to(device).eval()
    texts = ["The capital of France is", "Water boils at"]
    prompts = [tokenizer(text).input_ids for text in texts]
    eos = [tokenizer.eos_token_id, *tokenizer(ends).input_ids]
    options = {"max_new_tokens": max_new_tokens, "eos_token_ids": eos}
    expected = [reference_beams(model, prompt, 4, **options) for prompt in prompts]
    lm = CachedModel(model, capacity)
    for prompt, beams in zip(prompts, expected, strict=True):
        assert_same(beam_search(lm, prompt, 4, **options), beams)  # type: ignore[arg-type]
    lm.cache.check()
    return max(len(beam.token_ids) for beams in expected for beam in beams)


@pytest.mark.slow
def test_smollm2(device: torch.device) -> None:
    assert same_beams_on_smollm2(8, ".", 200, device) > 1


@pytest.mark.slow
def test_smollm2_with_long_beams(device: torch.device) -> None:
    assert same_beams_on_smollm2(64, "", 600, device) == 64
