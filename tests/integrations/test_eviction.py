"""Eviction by accumulated attention, compared with Hugging Face's attention weights under the same mask."""

import doctest
from pydoc_data.topics import topics

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel

from lightkv import OutOfTokens, WrongThread
from lightkv.attention import torch_backend
from lightkv.integrations import eviction
from lightkv.integrations.cached_model import CachedModel
from lightkv.integrations.eviction import HeavyHitters, highest
from lightkv.integrations.streaming import Ring, Stream
from lightkv.ledger.sequence import Sequence
from lightkv.router import EngineConfig
from lightkv.router.model.loader import load_model
from lightkv.router.model_files import resolve
from lightkv.router.text.tokenizer import Tokenizer
from tests.support.tiny_models import VOCABULARY, tiny_llama


def make_model(device: torch.device) -> PreTrainedModel:
    return tiny_llama(device, attention="eager", std=0.25)


def expected(
    model: PreTrainedModel, ids: torch.Tensor, seen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns Hugging Face's logits `[T, vocabulary]`, and its weights, summed over layers and heads, `[T, T]`.

    Token t attends to the tokens in `seen[t]`, bool `[T, T]`.
    """
    mask = torch.zeros(seen.shape, device=ids.device).masked_fill_(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        output = model(ids[None], attention_mask=mask[None, None], output_attentions=True)
    return output.logits[0], sum(weights[0].sum(0) for weights in output.attentions)


def test_keep_keeps_the_tokens_attended_to_most(device: torch.device) -> None:
    """Alternates chunks of tokens with evictions."""
    model = make_model(device)
    ids = torch.randint(0, VOCABULARY, (70,), device=device)
    reference = make_model(device)
    lm = CachedModel(model, capacity=64)
    hitters = HeavyHitters(lm)
    sequence = lm.cache.open([7])
    seen = torch.ones(70, 70, dtype=torch.bool, device=device).tril_()
    held: list[int] = []
    start = 0
    for counts, budget, recent in [((30, 10), 20, 5), ((1, 1, 13), 24, 6), ((15,), 0, 0)]:
        for count in counts:
            logits = hitters.forward(sequence, ids[start : start + count].tolist(), all_logits=True)
            wanted, weights = expected(reference, ids, seen)
            torch.testing.assert_close(logits, wanted[start : start + count], rtol=1e-4, atol=1e-4)
            held += range(start, start + count)
            start += count
        accumulated = weights[:start].sum(0)[held]
        torch.testing.assert_close(hitters.scores(sequence), accumulated, rtol=1e-4, atol=1e-4)
        assert lm.cache.positions(sequence).tolist() == held
        if budget:
            older = len(held) - recent
            best = accumulated[:older].argsort(descending=True)[: budget - recent].sort().values.tolist()
            stay = [held[place] for place in best] + held[older:]
            gone = [position for position in held if position not in stay]
            assert hitters.keep(sequence, budget, recent) == len(gone)
            seen[start:, gone] = False
            held = stay
        lm.cache.check()
    lm.cache.close(sequence, cache=False)
    assert lm.cache.num_free == 64


def test_evicted_slots_serve_another_sequence_in_the_same_step() -> None:
    lm = CachedModel(make_model(torch.device("cpu")), capacity=40, max_sequences=2)
    ids = torch.randint(0, VOCABULARY, (60,))
    hitters = HeavyHitters(lm)
    first = lm.cache.open(ids[:40].tolist())
    hitters.forward(first, ids[:40].tolist())
    before = set(lm.cache.slots(first).tolist())
    second = lm.cache.open([1])
    with pytest.raises(OutOfTokens):
        hitters.forward(second, ids[40:60].tolist())
    assert hitters.keep(first, budget=20, recent=10) == 20
    assert lm.cache.num_free == 20
    hitters.forward(second, ids[40:60].tolist())
    assert lm.cache.num_free == 0
    kept, taken = (set(lm.cache.slots(sequence).tolist()) for sequence in (first, second))
    assert kept | taken == before
    assert not kept & taken
    lm.cache.check()
    alone, _ = expected(
        make_model(torch.device("cpu")), ids[40:], torch.ones(20, 20, dtype=torch.bool).tril_()
    )
    lm.cache.truncate(second, 19)
    torch.testing.assert_close(hitters.forward(second, ids[59:].tolist())[0], alone[-1], rtol=1e-4, atol=1e-4)


def test_shared_tokens_stay() -> None:
    lm = CachedModel(make_model(torch.device("cpu")), capacity=100, max_sequences=2)
    hitters = HeavyHitters(lm)
    prompt = list(range(30))
    first = lm.cache.open(prompt)
    hitters.forward(first, prompt)
    lm.cache.publish(first)
    lm.cache.confirm()
    second = lm.cache.open([*prompt, *range(20)])
    assert second.shared == 30
    hitters.forward(second, range(20))
    assert hitters.keep(second, budget=36, recent=2) == 14
    assert lm.cache.positions(second)[:30].tolist() == prompt
    with pytest.raises(ValueError, match="cannot keep -2 of 6 tokens"):
        hitters.keep(second, budget=28, recent=0)
    assert hitters.keep(second, budget=36, recent=0) == 0


def test_a_reused_row_starts_at_zero() -> None:
    lm = CachedModel(make_model(torch.device("cpu")), capacity=30)
    hitters = HeavyHitters(lm)
    ids = torch.randint(0, VOCABULARY, (30,))
    for text in (ids, ids.flip(0)):
        sequence = lm.cache.open([1])
        hitters.forward(sequence, text.tolist())
        causal = torch.ones(30, 30, dtype=torch.bool).tril_()
        _, weights = expected(make_model(torch.device("cpu")), text, causal)
        torch.testing.assert_close(hitters.scores(sequence), weights.sum(0), rtol=1e-4, atol=1e-4)
        lm.cache.close(sequence, cache=False)


def watched(
    capacity: int = 60, backend: str | None = None, num_tokens: int = 30, device: str | torch.device = "cpu"
) -> tuple[CachedModel, HeavyHitters, Sequence]:
    """Returns a model and its heavy hitters, after `num_tokens` of a sequence."""
    lm = CachedModel(make_model(torch.device(device)), capacity, max_sequences=3, backend=backend)
    hitters = HeavyHitters(lm)
    sequence = lm.cache.open([1])
    hitters.forward(sequence, range(num_tokens))
    return lm, hitters, sequence


def test_a_truncated_sequence_keeps_the_scores_of_its_tokens() -> None:
    lm, hitters, sequence = watched()
    before = hitters.scores(sequence).clone()
    lm.cache.truncate(sequence, 20)
    assert torch.equal(hitters.scores(sequence), before[:20])
    hitters.forward(sequence, [3, 4])
    assert (hitters.scores(sequence)[:20] >= before[:20]).all()
    assert hitters.scores(sequence)[20:].max() <= 2 * 6 * 2  # two queries, six heads, two layers
    lm.cache.truncate(sequence, 0)
    hitters.forward(sequence, range(30))
    torch.testing.assert_close(hitters.scores(sequence), before)


def test_a_fork_starts_at_zero() -> None:
    lm, hitters, sequence = watched()
    before = hitters.scores(sequence).clone()
    former = lm.cache.open([1])  # the fork gets its row
    hitters.forward(former, range(30))
    lm.cache.close(former, cache=False)
    fork = lm.cache.fork(sequence)
    assert fork.length == 30
    assert not hitters.scores(fork).any()
    hitters.forward(fork, [3])
    assert hitters.scores(fork).sum() == pytest.approx(6 * 2, rel=1e-4)  # of one query
    assert torch.equal(hitters.scores(sequence), before)


@pytest.mark.parametrize("change", ["release", "keep", "forward", "truncate-forward"])
def test_changes_by_other_calls_are_noticed(change: str) -> None:
    lm, hitters, sequence = watched()
    if change == "release":
        lm.cache.release(sequence, 5)
    elif change == "keep":
        lm.cache.keep(sequence, torch.arange(10))
    else:
        if change == "truncate-forward":
            lm.cache.truncate(sequence, 20)
        lm.forward([sequence], [range(11)])
    length, num_free = sequence.length, lm.cache.num_free
    for call in (
        lambda: hitters.forward(sequence, [3]),
        lambda: hitters.scores(sequence),
        lambda: hitters.keep(sequence, 5, 2),
    ):
        with pytest.raises(ValueError, match=r"30 tokens and 0 dropped.*close this sequence"):
            call()
    assert (sequence.length, lm.cache.num_free) == (length, num_free)
    lm.cache.close(sequence, cache=False)
    sequence = lm.cache.open([1])
    hitters.forward(sequence, range(30))
    assert hitters.scores(sequence).sum() == pytest.approx(30 * 6 * 2, rel=1e-4)


def test_a_keep_that_is_refused_leaves_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, hitters, sequence = watched()
    before = hitters.scores(sequence).clone()

    def refuse(*_: object) -> int:
        raise WrongThread("owner", "stranger")

    with monkeypatch.context() as patch:
        patch.setattr(lm.cache, "keep", refuse)
        with pytest.raises(WrongThread):
            hitters.keep(sequence, 10, 2)
    assert torch.equal(hitters.scores(sequence), before)
    assert hitters.keep(sequence, 10, 2) == 20
    assert torch.equal(hitters.scores(sequence), before[highest(before, 10, 2)])


def test_a_step_that_fails_leaves_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, hitters, sequence = watched()
    before = hitters.scores(sequence).clone()

    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch:
        patch.setattr(lm.backends[1], "_write", fail)
        with pytest.raises(RuntimeError, match="gone"):
            hitters.forward(sequence, [3, 4])
    assert torch.equal(hitters.scores(sequence), before)


def test_published_tokens_are_never_evicted() -> None:
    lm, hitters, sequence = watched()
    lm.cache.publish(sequence)  # its prompt, one token
    lm.cache.confirm()
    assert hitters.keep(sequence, 10, 2) == 20
    published = lm.cache.open(range(2, 32))
    hitters.forward(published, range(2, 32))
    lm.cache.publish(published)
    lm.cache.confirm()
    assert published.num_private == 0
    with pytest.raises(ValueError, match="cannot keep -20 of 0 tokens"):
        hitters.keep(published, 10, 2)


def test_the_scores_are_those_of_the_chosen_backend(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, hitters, sequence = watched(backend="torch", num_tokens=12, device=device)
    expected = hitters.scores(sequence)

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the reference was called, where the kernel was chosen")

    monkeypatch.setattr(torch_backend, "attention_scores_reference", fail)
    _, hitters, sequence = watched(backend="triton", num_tokens=12, device=device)
    torch.testing.assert_close(hitters.scores(sequence), expected, rtol=1e-4, atol=1e-4)


def test_refuses_layers_with_windows() -> None:
    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=8,
    )
    with pytest.raises(ValueError, match=r"windows or chunks of their own \(\[8\]\)"):
        HeavyHitters(CachedModel(MistralForCausalLM(config).eval(), capacity=40))


def test_highest_selects_the_latest_and_the_highest() -> None:
    scores = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0, 0.0])
    assert highest(scores, 4, 2).tolist() == [0, 2, 4, 5]
    assert highest(scores, 3, 0).tolist() == [0, 2, 4]
    assert highest(scores, 2, 2).tolist() == [4, 5]
    assert highest(scores, 6, 1).tolist() == [0, 1, 2, 3, 4, 5]
    for num_kept, recent in [(7, 0), (2, 3), (2, -1)]:
        with pytest.raises(ValueError, match="cannot keep"):
            highest(scores, num_kept, recent)


def test_refuses_to_go_past_the_context() -> None:
    lm = CachedModel(make_model(torch.device("cpu")), capacity=40)
    hitters = HeavyHitters(lm)
    sequence = lm.cache.open([1])
    ids = torch.arange(40)
    lm.context = 64
    hitters.forward(sequence, ids.tolist())
    assert hitters.keep(sequence, 10, 5) == 30
    hitters.forward(sequence, ids[:24].tolist())
    with pytest.raises(ValueError, match="position 64 is past the model's context of 64"):
        hitters.forward(sequence, ids[:1].tolist())
    assert lm.cache.num_held == 34


def test_refuses_a_stream() -> None:
    window = Ring(sinks=2, size=10, stride=5)
    model = make_model(torch.device("cpu"))
    lm = CachedModel(model, capacity=window.capacity, exact_positions=True)
    flow = Stream(lm, window, [1])
    list(flow.feed(range(13)))
    with pytest.raises(ValueError, match="a stream evicts by its window alone"):
        HeavyHitters(lm).forward(flow.sequence, [1])


def test_the_docstring_runs() -> None:
    failed, attempted = doctest.testmod(eviction)
    assert attempted > 5
    assert not failed


@pytest.mark.gpu
def test_keeping_never_synchronises() -> None:
    device = torch.device("cuda")
    lm = CachedModel(make_model(device), capacity=64)
    hitters = HeavyHitters(lm)
    sequence = lm.cache.open([1])
    ids = torch.arange(60)
    hitters.forward(sequence, ids[:40].tolist())
    torch.cuda.set_sync_debug_mode("error")
    try:
        assert hitters.keep(sequence, 20, 10) == 20
        hitters.forward(sequence, ids[40:].tolist())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    lm.cache.check()


@pytest.mark.slow
def test_heavy_hitters_serve_a_real_model_better_than_the_latest() -> None:
    """SmolLM2 on Python's documentation: of 400 tokens 100 stay, and 60 are predicted from these."""
    directory = resolve(EngineConfig.model, print)
    lm = CachedModel(load_model(directory, torch.device("cpu"), torch.float32, print), capacity=500)
    hitters = HeavyHitters(lm)
    ids = torch.from_numpy(Tokenizer(directory).encode(topics["typesseq"])[:460]).long()
    losses = []
    for recent in (50, 100):
        sequence = lm.cache.open([1])
        hitters.forward(sequence, ids[:400].tolist())
        assert hitters.keep(sequence, 100, recent) == 300
        logits = hitters.forward(sequence, ids[400:-1].tolist(), all_logits=True)
        losses.append(torch.nn.functional.cross_entropy(logits, ids[401:]).item())
        lm.cache.close(sequence, cache=False)
    heavy, latest = losses
    assert heavy + 0.5 < latest
