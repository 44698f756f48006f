"""Tests of the sampler: kinds and batches, penalties, log-probabilities, extremes, misuse, and the GPU."""

import itertools
import math
from collections import Counter

import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from lightkv.errors import LightKVError
from lightkv.router.engine.step import NewRow
from lightkv.router.model.sampler import Sampler
from lightkv.router.sampling_params import MAX_END_IDS, InvalidParams, SamplerKind, SamplingParams
from lightkv.triton_kernels.layers.draw import Draws, draw_tokens_reference
from tests.support.combinations import slow
from tests.support.gpu_engine import no_waits
from tests.support.sampler_rows import (
    EDITED,
    GREEDY,
    RANDOM,
    VOCAB_SIZE,
    draw,
    int32_bytes,
    make_logits,
    make_sampler,
)

# ---- Kinds and batches

MIXED = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=0.6, min_p=0.03),
    SamplingParams(top_k=9),
    SamplingParams(top_p=0.8, temperature=1.4),
    SamplingParams(temperature=0, repetition_penalty=1.5),
    SamplingParams(frequency_penalty=0.5, logit_bias={3: 4.0}),
    SamplingParams(logprobs=3),
    SamplingParams(temperature=0, logprobs=2, presence_penalty=1.0, top_k=2, top_p=0.1),
    SamplingParams(logit_bias={5: 3.0}, repetition_penalty=1.3, top_k=30, top_p=0.9),
    SamplingParams(allowed_token_ids=list(range(5, 50)), bad_words_ids=[[7], [8, 9], [6, 6, 6]]),
]


@pytest.mark.parametrize("num_positions", [3, *slow(20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_a_token_does_not_depend_on_the_batch_or_the_kind(
    dtype: torch.dtype, num_positions: int, device: torch.device
) -> None:
    logits = make_logits(len(MIXED), 21, 5003).to(dtype)
    rows = list(range(1, len(MIXED) + 1))
    for position in range(num_positions):
        together = make_sampler(device, *MIXED, vocab_size=5003)
        batch = draw(together, logits, rows, [position] * len(rows), EDITED)
        for i, params in enumerate(MIXED):
            for kind in SamplerKind:
                if kind < params.kind:
                    continue
                alone = make_sampler(device, *MIXED, vocab_size=5003)
                alone.enable_logit_edits()
                assert draw(alone, logits[i : i + 1], [rows[i]], [position], kind) == [batch[i]]
        backwards = make_sampler(device, *MIXED, vocab_size=5003)
        assert draw(backwards, logits.flip(0), rows[::-1], [position] * len(rows), EDITED) == batch[::-1]


def test_positions_and_seeds_change_the_token(device: torch.device) -> None:
    params = SamplingParams()
    flat = torch.zeros(64, 4096)
    sampler = make_sampler(device, params, vocab_size=4096)
    by_position = draw(sampler, flat, [1] * 64, list(range(64)), RANDOM)
    assert len(set(by_position)) > 58
    sampler = make_sampler(device, *[params] * 64, vocab_size=4096)
    by_seed = draw(sampler, flat, list(range(1, 65)), [0] * 64, RANDOM)
    assert len(set(by_seed)) > 58


@pytest.mark.parametrize("kind", list(SamplerKind), ids=lambda kind: kind.name)
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 200, 4096])  # rows in one part, in 8 and in 128
def test_greedy_ties_go_to_the_lowest_id(kind: SamplerKind, vocab_size: int, device: torch.device) -> None:
    logits = torch.zeros(4, vocab_size)
    logits[0, [40, 7, 90]] = 5.0
    logits[2] = -math.inf
    logits[2, [96, 95]] = -3.0
    logits[3, [vocab_size - 1, vocab_size - 2]] = 1.0
    sampler = make_sampler(device, *[SamplingParams(temperature=0)] * 4, vocab_size=vocab_size)
    sampler.enable_logit_edits()
    assert draw(sampler, logits, [1, 2, 3, 4], [4] * 4, kind) == [7, 0, 95, vocab_size - 2]


@pytest.mark.parametrize("kind", list(SamplerKind), ids=lambda kind: kind.name)
def test_next_token_is_written_for_the_batch_alone(kind: SamplerKind, device: torch.device) -> None:
    sampler = make_sampler(device, *[SamplingParams(temperature=0)] * 5)
    sampler.enable_logit_edits()
    logits = make_logits(4, 2)
    kept = logits.clone()
    tokens = draw(sampler, logits, [4, 0, 2, 0], [9, 0, 9, 0], kind)  # two entries are padding
    assert torch.equal(logits, kept)
    assert tokens == logits.argmax(-1).tolist()
    assert sampler.next_token[[4, 2]].tolist() == [tokens[0], tokens[2]]
    assert sampler.next_token[[1, 3, 5, 6, 7]].tolist() == [0] * 5
    sampler.check()


# ---- Bias and penalties


def test_penalties_of_each_step_equal_a_recount(device: torch.device) -> None:
    """Compares each step with a recount in Python and with Hugging Face's repetition penalty.

    The row was used by another sequence before.
    """
    vocab_size, prompt = 13, [1, 2, 5]
    params = SamplingParams(
        temperature=0,
        repetition_penalty=1.2,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias={3: 0.5, 12: -0.25},
    )
    sampler = Sampler(4, vocab_size, device)
    before = SamplingParams(repetition_penalty=2.0, logit_bias=dict.fromkeys(range(9), 50.0))
    sampler.set_rows([NewRow(2, before, 0, 0, int32_bytes([4] * 9))], [int32_bytes(range(13))])
    sampler.set_rows([NewRow(2, params, 1, 0)], [int32_bytes(prompt)])
    output: list[int] = []
    for step in range(60):
        logits = make_logits(1, 100 + step, vocab_size)
        if step == 30:  # preempted and resumed in another row
            sampler.set_rows([NewRow(3, params, 1, 0, int32_bytes(output))], [int32_bytes(prompt)])
        row = 2 if step < 30 else 3
        expected = logits.clone()
        expected[0, 3] += 0.5
        expected[0, 12] -= 0.25
        expected = RepetitionPenaltyLogitsProcessor(1.2)(torch.tensor([prompt + output]), expected)
        for token, count in Counter(output).items():
            expected[0, token] -= 0.4 + 0.3 * count
        token = draw(sampler, logits, [row], [len(prompt) + step], EDITED)[0]
        assert token == expected.argmax().item()
        output.append(token)
    assert len(set(output)) > 5
    sampler.check()


def test_end_tokens_are_held_back_until_their_position(device: torch.device) -> None:
    """Checks greedy and drawn tokens at each row's own position. A reused row forgets its end tokens."""
    sampler = Sampler(4, VOCAB_SIZE, device)
    params = [SamplingParams(temperature=temperature, min_tokens=3) for temperature in (0.0, 1.0)]
    sampler.set_rows(
        [NewRow(row, params[row - 1], 5, may_stop_at=13, stop_ids=[7, 40]) for row in (1, 2)]
        + [NewRow(3, SamplingParams(temperature=0), 5)]
    )
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 40], logits[:, 7], logits[:, 11] = 60.0, 50.0, 40.0
    for position, expected in ((10, [11, 11, 40]), (12, [11, 11, 40]), (13, [40, 40, 40])):
        assert draw(sampler, logits, [1, 2, 3], [position] * 3, EDITED) == expected
    assert draw(sampler, logits, [1, 2, 3], [12, 13, 12], EDITED) == [11, 40, 40]
    sampler.check()
    sampler.set_rows([NewRow(1, SamplingParams(temperature=0, logprobs=1), 5)])
    assert draw(sampler, logits[:1], [1], [10], EDITED) == [40]


def test_a_neutral_row_keeps_nothing_of_its_predecessor(device: torch.device) -> None:
    sampler = Sampler(3, VOCAB_SIZE, device)
    heavy = SamplingParams(repetition_penalty=5.0, logit_bias={0: 100.0, 50: 100.0})
    sampler.set_rows([NewRow(1, heavy, 0, 0)], [int32_bytes(range(60))])
    sampler.set_rows([NewRow(1, SamplingParams(seed=5), 5)])
    fresh = make_sampler(device, SamplingParams(), seed=5)
    logits = make_logits(1, 1)
    for position in range(50):
        for kind in (RANDOM, EDITED):
            assert draw(sampler, logits, [1], [position], kind) == draw(
                fresh, logits, [1], [position], RANDOM
            )


@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "random"])
def test_a_bias_of_100_forces_a_token_and_minus_100_forbids_it(
    temperature: float, device: torch.device
) -> None:
    logits = make_logits(1, 4)
    best = int(logits.argmax())
    forced = (best + 1) % VOCAB_SIZE
    sampler = make_sampler(
        device,
        SamplingParams(temperature=temperature, logit_bias={forced: 100.0}),
        SamplingParams(temperature=temperature, logit_bias={best: -100.0}),
    )
    for position in range(50):
        tokens = draw(sampler, logits.expand(2, -1), [1, 2], [position] * 2, EDITED)
        assert tokens[0] == forced
        assert tokens[1] != best


def test_the_largest_number_of_biases_is_applied(device: torch.device) -> None:
    vocab_size = 700
    sampler = make_sampler(
        device,
        SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(512), -100.0)),
        SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(188, 700), -100.0)),
        vocab_size=vocab_size,
    )
    falling = -torch.arange(vocab_size, dtype=torch.float32)[None] / 100
    assert draw(sampler, falling, [1], [0], EDITED) == [512]
    assert draw(sampler, falling.flip(1), [2], [0], EDITED) == [187]


# ---- Log-probabilities


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
def test_logprobs_are_of_the_models_own_distribution(dtype: torch.dtype, device: torch.device) -> None:
    logits = make_logits(3, 8).to(dtype).to(device)
    sampler = make_sampler(
        device,
        SamplingParams(logprobs=20, temperature=0.2, logit_bias={5: 100.0}),
        SamplingParams(logprobs=0, temperature=2.0),
        SamplingParams(temperature=0, presence_penalty=2.0),
    )
    rows, positions = torch.tensor([1, 2, 3], device=device), torch.tensor([4, 5, 6], device=device)
    sampled = sampler.sample(logits, rows, positions, EDITED)
    expected = logits.float().log_softmax(-1)
    assert sampled.tokens[0] == 5
    assert sampled.logprobs is not None
    assert sampled.top_ids is not None
    assert sampled.top_logprobs is not None
    for ours, theirs in (
        (sampled.logprobs, expected.gather(1, sampled.tokens[:, None])[:, 0]),
        (sampled.top_logprobs, expected.topk(20).values),
        (sampled.top_logprobs, expected.gather(1, sampled.top_ids.long())),
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)
    assert sampled.top_ids.dtype == torch.int32
    assert all(len(set(ids)) == 20 for ids in sampled.top_ids.tolist())


@pytest.mark.parametrize("kind", [GREEDY, RANDOM], ids=lambda kind: kind.name)
def test_no_logprobs_below_edited(kind: SamplerKind, device: torch.device) -> None:
    sampler = make_sampler(device, SamplingParams(temperature=0))
    one = torch.tensor([1], device=device)
    sampled = sampler.sample(make_logits(1, 0).to(device), one, one, kind)
    assert sampled[1:] == (None, None, None)


def test_a_vocabulary_below_twenty_returns_all_its_tokens(device: torch.device) -> None:
    sampler = make_sampler(device, SamplingParams(logprobs=20), vocab_size=6)
    one = torch.tensor([1], device=device)
    sampled = sampler.sample(make_logits(1, 0, 6).to(device), one, one, EDITED)
    assert sampled.top_ids is not None
    assert sorted(sampled.top_ids[0].tolist()) == list(range(6))


# ---- Extremes


@pytest.mark.parametrize("kind", [RANDOM, EDITED], ids=lambda kind: kind.name)
def test_extreme_temperatures(kind: SamplerKind, device: torch.device) -> None:
    cold, hot, hottest = (SamplingParams(temperature=t) for t in (1e-4, 100.0, 3.4e38))
    sampler = make_sampler(device, cold, hot, hottest)
    sampler.enable_logit_edits()
    logits = make_logits(1, 6)
    logits[:, 10:] = -math.inf
    num_draws = 600
    positions = list(range(num_draws))
    best = int(logits.argmax())
    assert set(draw(sampler, logits.expand(num_draws, -1), [1] * num_draws, positions, kind)) == {best}
    for row in (2, 3):
        counts = Counter(draw(sampler, logits.expand(num_draws, -1), [row] * num_draws, positions, kind))
        assert sorted(counts) == list(range(10))
        assert max(counts.values()) < 100


@pytest.mark.parametrize("kind", list(SamplerKind), ids=lambda kind: kind.name)
@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0, 3.4e38], ids=str)
def test_the_only_finite_logit_is_taken(temperature: float, kind: SamplerKind, device: torch.device) -> None:
    params = SamplingParams(temperature=temperature)
    if kind < params.kind:
        kind = params.kind
    logits = torch.full((3, VOCAB_SIZE), -math.inf)
    for i, token in enumerate((0, 50, VOCAB_SIZE - 1)):
        logits[i, token] = -1e4
    sampler = make_sampler(device, params, params, params)
    sampler.enable_logit_edits()
    assert draw(sampler, logits, [1, 2, 3], [0, 1, 2], kind) == [0, 50, VOCAB_SIZE - 1]


@pytest.mark.parametrize("kind", list(SamplerKind), ids=lambda kind: kind.name)
@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf], ids=str)
def test_a_row_of_nan_or_inf_gets_some_token_and_changes_no_other(
    bad: float, kind: SamplerKind, device: torch.device
) -> None:
    params = SamplingParams(temperature=0 if kind == GREEDY else 1.0)
    logits = make_logits(4, 12)
    clean = make_sampler(device, *[params] * 4)
    expected = draw(clean, logits, [1, 2, 3, 4], [5] * 4, params.kind)
    logits[1] = bad
    logits[2, 3] = math.nan
    sampler = make_sampler(device, *[params] * 4)
    sampler.enable_logit_edits()
    tokens = draw(sampler, logits, [1, 2, 3, 4], [5] * 4, kind)
    assert [tokens[0], tokens[3]] == [expected[0], expected[3]]
    assert all(0 <= token < VOCAB_SIZE for token in tokens)
    sampler.check()


# ---- Misuse, memory, checks


def test_a_row_is_refused_before_anything_changes(device: torch.device) -> None:
    sampler = make_sampler(device, SamplingParams(temperature=0), SamplingParams())
    lines = sampler._lines.clone()
    prompts = [int32_bytes([1]), int32_bytes([VOCAB_SIZE])]
    good = NewRow(1, SamplingParams(repetition_penalty=1.1), 3, 0)
    for bad in (
        NewRow(0, SamplingParams(), 1),
        NewRow(1, SamplingParams(), 1),  # a row given twice
        NewRow(5, SamplingParams(), 1),
        NewRow(2, SamplingParams(), 2**63),
        NewRow(2, SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), 1),
        NewRow(2, SamplingParams(repetition_penalty=1.1), 1, 1),
        NewRow(2, SamplingParams(repetition_penalty=1.1), 1, 2),  # a prompt that is not given
        NewRow(2, SamplingParams(repetition_penalty=1.1), 1, None, int32_bytes([-1])),
        NewRow(2, SamplingParams(min_tokens=3), 1, may_stop_at=9, stop_ids=[VOCAB_SIZE]),
        NewRow(2, SamplingParams(min_tokens=3), 1, may_stop_at=9, stop_ids=[1] * (MAX_END_IDS + 1)),
    ):
        with pytest.raises(ValueError, match=r"give|vocabulary") as caught:
            sampler.set_rows([good, bad], prompts)
        assert isinstance(caught.value, InvalidParams) == bool(bad.params.logit_bias)
        assert torch.equal(sampler._lines, lines)
        assert sampler._logit_edits is None


def test_shapes_that_disagree_are_refused(device: torch.device) -> None:
    sampler = make_sampler(device, SamplingParams())
    with pytest.raises(ValueError, match=r"\[B, 97\]"):
        draw(sampler, make_logits(1, 0, 96), [1], [0], RANDOM)
    with pytest.raises(ValueError, match=r"\[B, 97\]"):
        draw(sampler, make_logits(2, 0), [1], [0], RANDOM)
    with pytest.raises(ValueError, match="at least 2 rows"):
        Sampler(1, VOCAB_SIZE, device)


def test_a_rehearsal_draws_of_every_kind_from_both_types_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edited logits are float32, whatever type the model's are."""
    sampler = make_sampler(torch.device("cpu"), SamplingParams())
    drawn: list[tuple[torch.dtype, bool]] = []

    def noted(scores: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        drawn.append((scores.dtype, draws is None))
        return draw_tokens_reference(scores, draws)

    monkeypatch.setattr("lightkv.router.model.sampler.draw_tokens_reference", noted)
    sampler.rehearse(torch.float16)
    assert sorted(drawn, key=str) == sorted(
        itertools.product((torch.float16, torch.float32), (True, False)), key=str
    )
    sampler.check()


def test_a_greedy_row_has_no_top_k_and_top_p_to_apply(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Draws] = []

    def noted(scores: torch.Tensor, draws: Draws) -> torch.Tensor:
        found.append(draws)
        return draw_tokens_reference(scores, draws)

    for name in ("draw_tokens", "draw_tokens_reference"):
        monkeypatch.setattr(f"lightkv.router.model.sampler.{name}", noted)
    sampler = make_sampler(device, SamplingParams(temperature=0, top_k=5, top_p=0.5), SamplingParams(top_k=5))
    draw(sampler, make_logits(2, 0), [1, 2], [0, 0], RANDOM)
    assert found[0].settings.top_k.flatten().tolist() == [0, 5]
    assert found[0].settings.top_p.flatten().tolist() == [1, 1]


def test_sampling_edited_without_its_buffers_is_refused(device: torch.device) -> None:
    sampler = make_sampler(device, SamplingParams())
    with pytest.raises(LightKVError, match="enable_logit_edits"):
        draw(sampler, make_logits(1, 0), [1], [0], EDITED)


def num_bytes(owner: object) -> int:
    return sum(one.nbytes for one in vars(owner).values() if isinstance(one, torch.Tensor))


def test_bytes_for_equals_the_size_of_the_buffers(device: torch.device) -> None:
    sampler = make_sampler(device, SamplingParams())
    announced, lean = Sampler.bytes_for(4, VOCAB_SIZE), num_bytes(sampler)
    assert lean == 4 * (8 + 48)
    sampler.enable_logit_edits()
    edits, words = 4 * VOCAB_SIZE + 512 * 8, 288 * (4 * 16 + 8) + 4 * 15
    assert num_bytes(sampler) + num_bytes(sampler._logit_edits) == announced == lean + 4 * (edits + words)


def test_check_finds_damaged_state(device: torch.device) -> None:
    for damage in ("next_token", "number", "padding", "bias", "count"):
        sampler = make_sampler(device, SamplingParams(logprobs=1))
        sampler.check()
        assert sampler._logit_edits is not None
        if damage == "next_token":
            sampler.next_token[1] = VOCAB_SIZE
        elif damage == "number":
            sampler._lines[2, 0] = 3
        elif damage == "padding":
            sampler._lines[0, 1] = 3
        elif damage == "bias":
            sampler._logit_edits._bias[0, 3] = 1.0
        else:
            sampler._logit_edits._counts[1, 3] = -1
        with pytest.raises(LightKVError):
            sampler.check()


def test_a_sampler_made_in_inference_mode_works_outside_it(device: torch.device) -> None:
    with torch.inference_mode():
        sampler = make_sampler(device, SamplingParams(logprobs=1))
        inside = draw(sampler, make_logits(1, 0), [1], [0], EDITED)
    sampler.next_token[1] = 0
    sampler.set_rows([NewRow(1, SamplingParams(), 11)])
    assert draw(sampler, make_logits(1, 0), [1], [0], EDITED) == inside


# ---- On the GPU


def mixed_settings(seed: int) -> tuple[list[NewRow], list[bytes]]:
    """Returns rows, and the prompt that they share."""
    output = int32_bytes(range(seed, seed + 10))
    rows = [NewRow(i + 1, params, seed + i, 0, output) for i, params in enumerate(MIXED)]
    return rows, [int32_bytes(range(seed, seed + 40))]


@pytest.mark.gpu
@pytest.mark.parametrize("vocab_size", [VOCAB_SIZE, 151_936], ids=["small", "large"])
@pytest.mark.parametrize("kind", list(SamplerKind), ids=lambda kind: kind.name)
def test_a_captured_sample_can_be_replayed_with_new_inputs(
    kind: SamplerKind, vocab_size: int, device: torch.device
) -> None:
    num_rows = len(MIXED) + 1
    sampler, eager = Sampler(num_rows, vocab_size, device), Sampler(num_rows, vocab_size, device)
    sampler.enable_logit_edits()
    eager.enable_logit_edits()
    logits = make_logits(num_rows, 0, vocab_size).to(device, torch.bfloat16)
    rows = torch.arange(num_rows, device=device)
    positions = torch.zeros_like(rows)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            sampler.sample(logits, rows, positions, kind)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sampler.sample(logits, rows, positions, kind)

    sampler.next_token.zero_()
    sampler.set_rows(*mixed_settings(3))
    eager.set_rows(*mixed_settings(3))
    for step in range(6):
        if step == 3:
            sampler.set_rows(*mixed_settings(17))
            eager.set_rows(*mixed_settings(17))
        logits.copy_(make_logits(num_rows, 50 + step, vocab_size))
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(step))
        order[order % 4 == step % 4] = 0  # a padded batch
        rows.copy_(order)
        positions.copy_(torch.arange(num_rows) + 10 * step)
        graph.replay()
        expected = eager.sample(logits, rows, positions, kind)
        for ours, theirs in zip(captured, expected, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert torch.equal(ours, theirs)
        assert torch.equal(sampler.next_token[1:], eager.next_token[1:])
    sampler.check()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", list(SamplerKind), ids=lambda kind: kind.name)
def test_nothing_synchronises(kind: SamplerKind, device: torch.device) -> None:
    sampler = Sampler(len(MIXED) + 1, 32_000, device)
    logits = make_logits(len(MIXED), 1, 32_000).to(device, torch.bfloat16)
    rows = torch.arange(1, len(MIXED) + 1, device=device)
    with no_waits():
        sampler.set_rows(*mixed_settings(3))
        sampler.sample(logits, rows, rows, kind)
    sampler.check()


@pytest.mark.gpu
def test_the_gpu_draws_what_the_cpu_draws(device: torch.device) -> None:
    """exp differs by one ulp between the two, which changes one draw in millions, but none of these."""
    vocab_size = 50_000
    logits = make_logits(len(MIXED), 2, vocab_size).to(torch.bfloat16)
    rows = list(range(1, len(MIXED) + 1))
    there, here = (Sampler(len(MIXED) + 1, vocab_size, d) for d in (device, torch.device("cpu")))
    for sampler in (there, here):
        sampler.set_rows(*mixed_settings(3))
    for position in range(10):
        positions = [position] * len(rows)
        assert draw(there, logits, rows, positions, EDITED) == draw(here, logits, rows, positions, EDITED)
