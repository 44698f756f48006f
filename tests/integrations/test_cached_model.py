"""CachedModel: a failed call leaves nothing behind, and sequences that dropped tokens are computed right.

The reference is the model's own forward pass over the whole text, with a mask that hides the dropped tokens.
"""

import doctest

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM, PreTrainedModel

from lightkv.errors import OutOfRows, UnknownBackend, UnsupportedModel
from lightkv.integrations import cached_model
from lightkv.integrations.batch_call import select
from lightkv.integrations.cached_model import CachedModel
from lightkv.ledger.sequence import Sequence
from lightkv.triton_kernels.quantised.kv_format import KVFormat
from tests.support.tiny_models import VOCABULARY, tiny_llama

PROMPTS = [[5], [5, 6, 7, 8], [11, 40, 3, 90, 22, 61, 17, 4, 33, 8, 70], list(range(20, 60))]


def logits_of(model: PreTrainedModel, ids: list[int], seen: torch.Tensor | None = None) -> torch.Tensor:
    """Returns the model's own logits `[T, vocabulary]`. `seen`, bool `[T, T]`: what each token attends to."""
    if seen is None:
        seen = torch.ones(len(ids), len(ids), dtype=torch.bool, device=model.device).tril_()
    mask = torch.zeros(seen.shape, device=model.device).masked_fill_(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        return model(torch.tensor([ids], device=model.device), attention_mask=mask[None, None]).logits[0]


def random_ids(count: int, seed: int) -> list[int]:
    return torch.randint(0, VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("the device is gone")


def test_a_chunk_that_fails_and_is_computed_again_leaves_no_wrong_kv(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = CachedModel(tiny_llama(device), capacity=100)
    own = tiny_llama(device)
    prompt, out = [5, 6, 7, 8, 9, 10, 11, 12], [20, 21, 22, 23]
    sequence = lm.cache.open(prompt)
    lm.forward([sequence], [prompt[:4]])
    with monkeypatch.context() as patch:
        patch.setattr(lm.backends[1], "_write", fail)
        with pytest.raises(RuntimeError, match="gone"):
            lm.forward([sequence], [prompt[4:]])
    assert (sequence.length, lm.cache.num_held) == (4, 4)
    lm.forward([sequence], [prompt[4:]])
    for token in out[:-1]:
        lm.decode([sequence], [token])
    lm.cache.close(sequence, out)
    lm.cache.check()
    # The four tokens after the first chunk are the prompt's; the answer's tokens are not cached in their place.
    other, logits = lm.prefill([*prompt[:4], *out])
    assert other.num_hit == 4
    torch.testing.assert_close(logits, logits_of(own, [*prompt[:4], *out])[-1], rtol=1e-4, atol=1e-4)
    again, logits = lm.prefill([*prompt, *out])
    assert again.num_hit == len(prompt) + len(out) - 1
    torch.testing.assert_close(logits, logits_of(own, [*prompt, *out])[-1], rtol=1e-4, atol=1e-4)


def test_a_format_says_how_kv_is_stored(device: torch.device) -> None:
    plain = CachedModel(tiny_llama(device), capacity=100)
    lm = CachedModel(tiny_llama(device), capacity=100, kv_format=KVFormat.parse("int8"))
    ids = random_ids(30, seed=3)
    (expected,), (found,) = (model.forward([model.cache.open(ids)], [ids[:17]]) for model in (plain, lm))
    assert lm.cache.memory.pool.spec.bytes_per_token < plain.cache.memory.pool.spec.bytes_per_token
    assert not torch.equal(found, expected)
    assert torch.allclose(found, expected, atol=0.05)


def test_sequences_with_and_without_dropped_tokens_share_a_step(device: torch.device) -> None:
    lm = CachedModel(tiny_llama(device), capacity=200)
    own = tiny_llama(device, attention="eager")
    texts = [random_ids(40, seed) for seed in range(3)]
    seen = torch.ones(3, 40, 40, dtype=torch.bool, device=device).tril_()
    sequences = [lm.cache.open(text[:1]) for text in texts]
    lm.forward(sequences, [text[:20] for text in texts])

    lm.cache.release(sequences[0], 7)
    seen[0, 20:, :7] = False
    lm.cache.keep(sequences[1], torch.tensor([0, 1, 9, 13, 18, 19], device=device))
    seen[1, 20:, [2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 14, 15, 16, 17]] = False
    assert [one.length for one in sequences] == [13, 6, 20]
    assert [one.position for one in sequences] == [20, 20, 20]

    wanted = [logits_of(own, text, mask) for text, mask in zip(texts, seen, strict=True)]
    logits = lm.forward(sequences, [text[20:29] for text in texts], all_logits=True)
    expected = torch.cat([one[20:29] for one in wanted])
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    for at in range(29, 40):
        logits = lm.decode(sequences, [text[at] for text in texts])
        torch.testing.assert_close(logits, torch.stack([one[at] for one in wanted]), rtol=1e-4, atol=1e-4)
    lm.cache.check()


def gapped(lm: CachedModel, ids: list[int], num_sink_tokens: int) -> Sequence:
    """Computes the first 30 of `ids`, and drops 10 of them after the sinks."""
    sequence = lm.cache.open(ids[:1])
    lm.forward([sequence], [ids[:30]])
    lm.cache.release(sequence, 10, num_sink_tokens)
    return sequence


def test_a_step_that_would_not_be_computed_right_is_refused(device: torch.device) -> None:
    lm = CachedModel(tiny_llama(device), capacity=200)
    windowed = CachedModel(
        MistralForCausalLM(
            MistralConfig(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
                num_key_value_heads=1,
                sliding_window=8,
            )
        )
        .to(device)
        .eval(),
        capacity=200,
    )
    ids = random_ids(30, 0)
    cases = [
        (lm, [gapped(lm, ids, 4)], "after 4 sinks.*run its text as a Stream"),
        (windowed, [gapped(windowed, ids, 0)], "windows or chunks of their own"),
    ]
    for one, sequences, match in cases:
        lengths, held = [sequence.length for sequence in sequences], one.cache.num_held
        with pytest.raises(ValueError, match=match):
            one.decode(sequences, [1] * len(sequences))
        assert ([sequence.length for sequence in sequences], one.cache.num_held) == (lengths, held)
        one.cache.check()


def test_a_model_that_is_refused_stays_as_it_was(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4))
    learned = learned.to(device).eval()
    rotary = tiny_llama(device)
    before = [logits_of(model, [5, 6, 7]) for model in (learned, rotary)]
    with pytest.raises(UnsupportedModel, match="0 rotary embeddings"):
        CachedModel(learned, 40, exact_positions=True)
    with pytest.raises(UnknownBackend):
        CachedModel(rotary, 40, backend="none", exact_positions=True)
    with pytest.raises(ValueError, match="-1"):
        CachedModel(rotary, -1, exact_positions=True)
    for model, logits in zip((learned, rotary), before, strict=True):
        assert model.config._attn_implementation == "sdpa"
        assert torch.equal(logits_of(model, [5, 6, 7]), logits)
    assert not rotary.model.rotary_emb._forward_hooks


def test_a_model_without_the_attention_interface_keeps_its_attention(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_llama(device)
    asked: list[str] = []
    monkeypatch.setattr(model, "set_attn_implementation", asked.append)
    with pytest.raises(UnsupportedModel, match="AttentionInterface"):
        CachedModel(model, 40)
    assert asked == ["lightkv_probe", "sdpa"]


def test_the_example_in_the_docstring_runs() -> None:
    results = doctest.testmod(cached_model)
    assert results.attempted > 0
    assert results.failed == 0


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
