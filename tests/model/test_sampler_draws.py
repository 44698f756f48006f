"""Tests of the sampler's draws against independent references: Hugging Face's processors, numpy, and Python
integers."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from lightkv.router.engine.step import NewRow
from lightkv.router.model.sampler import Sampler
from lightkv.router.sampling_params import SamplerKind, SamplingParams
from lightkv.triton_kernels.layers.draw import pick, token_weights_, truncate_, uniforms
from tests.support.sampler_rows import EDITED, VOCAB_SIZE, draw, int32_bytes, make_logits, make_sampler

# ---- Random numbers


def uniform_of(seed: int, position: int) -> float:
    """SplitMix64 in Python integers."""

    def mix(z: int) -> int:
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        return z ^ (z >> 31)

    return (mix((mix(seed % 2**64) + position * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53


def test_uniforms_equal_the_hash_in_python_integers(device: torch.device) -> None:
    cases = [(s, p) for s in (0, 1, -1, 2**63 - 1, -(2**63), 12345) for p in (0, 1, 2, 999, 2**31, 2**40)]
    seeds, positions = (torch.tensor(column, device=device) for column in zip(*cases, strict=True))
    assert uniforms(seeds, positions).tolist() == [uniform_of(s, p) for s, p in cases]


@pytest.mark.parametrize("varied", ["positions", "seeds", "both"])
def test_uniforms_are_uniform_and_uncorrelated(varied: str, device: torch.device) -> None:
    num_draws = 1 << 16
    counting = torch.arange(num_draws, device=device)
    fixed = torch.full_like(counting, 7)
    u = uniforms(fixed if varied == "positions" else counting, fixed if varied == "seeds" else counting)
    shares = u.cpu().numpy()
    assert shares.min() >= 0
    assert shares.max() < 1
    expected = num_draws / 64
    chi_square = ((np.histogram(shares, 64, (0, 1))[0] - expected) ** 2 / expected).sum()
    assert chi_square < 103.4  # 63 degrees of freedom: exceeded once in a thousand times
    for lag in (1, 2, 16):
        assert abs(np.corrcoef(shares[:-lag], shares[lag:])[0, 1]) < 4 / math.sqrt(num_draws)


# ---- Drawing


def test_pick_takes_the_first_token_past_the_share(device: torch.device) -> None:
    weights = torch.tensor([[0.0, 0.5, 0.0, 1.0, 0.5, 0.0]], device=device)
    shares = [0.0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53]
    for share, token in zip(shares, [1, 1, 3, 3, 4, 4], strict=True):
        assert pick(weights, torch.tensor([share], dtype=torch.float64, device=device)).item() == token


def test_pick_is_exact_over_a_large_vocabulary(device: torch.device) -> None:
    """A float32 running sum would stop growing after 2^24 of these, and choose tokens of weight zero."""
    vocab_size = 200_000
    weights = torch.rand(3, vocab_size, generator=torch.Generator().manual_seed(0)) ** 4
    weights[:, ::3] = 0.0
    exact = [[int(w * 2**40) for w in row] for row in weights.double().tolist()]
    for share in (0.0, 0.123456789, 0.5, 0.999999999, 1 - 2**-53):
        uniform = torch.full((3,), share, dtype=torch.float64, device=device)
        tokens = pick(weights.to(device), uniform).squeeze(1).tolist()
        for row, token in zip(exact, tokens, strict=True):
            target = int(share * float(sum(row)))
            assert row[token] > 0
            assert sum(row[:token]) <= target < sum(row[: token + 1])


def test_neutral_top_k_and_top_p_change_no_weight(device: torch.device) -> None:
    """The weight of one token is 1 in a total that float64 cannot hold."""
    weights = torch.ones(1, 20_000, device=device)
    weights[0, 7] = 2.0**-40
    kept = weights.clone()
    truncate_(kept, torch.tensor([[0]], device=device), torch.tensor([[1.0]], device=device))
    assert torch.equal(kept, weights)


def test_rows_of_temperature_zero_have_finite_weights(device: torch.device) -> None:
    logits = make_logits(2, 3)
    cold, warm = (weights_of(logits, SamplingParams(temperature=t), device) for t in (0.0, 1.0))
    assert torch.equal(cold, warm)


def test_a_temperature_too_low_for_float32_is_greedy_at_every_kind(device: torch.device) -> None:
    logits = torch.zeros(50, VOCAB_SIZE)
    logits[:, 60] = 1e-7
    sampler = make_sampler(device, SamplingParams(temperature=1e-6))
    sampler.enable_logit_edits()
    for kind in SamplerKind:
        assert draw(sampler, logits, [1] * 50, list(range(50)), kind) == [60] * 50


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.5}, {"temperature": 1.7, "min_p": 0.1}, {"top_k": 4}, {"top_p": 0.95}],
    ids=str,
)
def test_frequencies_follow_the_distribution(fields: dict[str, Any], device: torch.device) -> None:
    num_draws, vocab_size = 12_000, 12
    logits = make_logits(1, 5, vocab_size) / 2
    params = SamplingParams(**fields)
    sampler = make_sampler(device, params, vocab_size=vocab_size)
    tokens = draw(
        sampler,
        logits.expand(num_draws, -1),
        [1] * num_draws,
        list(range(num_draws)),
        params.kind,
    )
    p = kept_by_hugging_face(logits, params).softmax(-1)[0].double().numpy()
    observed = np.bincount(tokens, minlength=vocab_size)
    assert (observed[p == 0] == 0).all()
    likely = p * num_draws > 5
    freedom = likely.sum() - 1
    assert freedom >= 2
    chi_square = ((observed - p * num_draws)[likely] ** 2 / (p * num_draws)[likely]).sum()
    assert chi_square < freedom + 4 * math.sqrt(2 * freedom)


def test_tokens_equal_a_brute_force_in_numpy(device: torch.device) -> None:
    """The reference applies every parameter and draws in float64, by sorting (probability, token) pairs."""
    rng = np.random.default_rng(3)
    num_rows = 24
    settings, prompts = [], []
    for row in range(1, num_rows + 1):
        params = SamplingParams(
            temperature=float(rng.choice([0.0, 0.4, 1.0, 2.0])),
            min_p=float(rng.choice([0.0, 0.02])),
            top_k=int(rng.choice([0, 3, 20])),
            top_p=float(rng.choice([1.0, 0.9, 0.4])),
            repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
            presence_penalty=float(rng.choice([0.0, 0.7])),
            frequency_penalty=float(rng.choice([0.0, -0.5, 1.1])),
            logit_bias={int(t): float(b) for t, b in zip(rng.integers(0, 97, 4), rng.normal(0, 3, 4))},  # noqa: B905
        )
        prompts.append(int32_bytes(np.unique(rng.integers(0, VOCAB_SIZE, 30))))
        output = rng.integers(0, VOCAB_SIZE, 20)
        seed = int(rng.integers(-(2**62), 2**62))
        settings.append(NewRow(row, params, seed, row - 1, int32_bytes(output)))
    sampler = Sampler(num_rows + 1, VOCAB_SIZE, device)
    sampler.set_rows(settings, prompts)
    logits = make_logits(num_rows, 9)
    rows, positions = list(range(1, num_rows + 1)), [50 + row for row in range(num_rows)]
    tokens = draw(sampler, logits, rows, positions, EDITED)
    expected = [
        brute_force(logits[i].double().numpy(), settings[i], prompts[i], positions[i])
        for i in range(num_rows)
    ]
    assert tokens == expected


def brute_force(scores: np.ndarray, setting: NewRow, prompt_ids: bytes, position: int) -> int:
    params, scores = setting.params, scores.copy()
    prompt, output = (np.frombuffer(ids, np.int32).tolist() for ids in (prompt_ids, setting.output_ids))
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    for token in {*prompt, *output}:
        scores[token] *= params.repetition_penalty if scores[token] < 0 else 1 / params.repetition_penalty
    for token, count in Counter(output).items():
        scores[token] -= params.presence_penalty + params.frequency_penalty * count
    if params.temperature == 0:
        return int(scores.argmax())
    p = np.exp((scores - scores.max()) / params.temperature)
    ranked = sorted(range(len(p)), key=lambda token: -p[token])
    ranked = [token for token in ranked if p[token] >= params.min_p][: params.top_k or None]
    total, mass, kept = sum(p[token] for token in ranked), 0.0, []
    for token in ranked:
        kept.append(token)
        mass += p[token]
        if mass >= params.top_p * total:
            break
    target, so_far = uniform_of(setting.seed, position) * sum(p[token] for token in kept), 0.0
    for token in sorted(kept):
        so_far += p[token]
        if so_far > target:
            return token
    return max(kept)


# ---- What is kept


def hugging_face(params: SamplingParams) -> list[LogitsProcessor]:
    chosen: list[LogitsProcessor] = [TemperatureLogitsWarper(float(params.temperature))]
    if params.min_p > 0:
        chosen.append(MinPLogitsWarper(params.min_p))
    if params.top_k > 0:
        chosen.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        chosen.append(TopPLogitsWarper(params.top_p))
    return chosen


def kept_by_hugging_face(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    scores = logits.clone()
    for processor in hugging_face(params):
        scores = processor(torch.zeros(len(logits), 0, dtype=torch.long), scores)
    return scores


def weights_of(logits: torch.Tensor, params: SamplingParams, device: torch.device) -> torch.Tensor:
    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((len(logits), 1), value, dtype=dtype, device=device)

    scores = logits.to(device, torch.float32, copy=True)
    best = scores.max(dim=-1, keepdim=True).values
    weights = token_weights_(scores, best, column(params.temperature), column(params.min_p))
    truncate_(weights, column(params.top_k, torch.int32), column(params.top_p))
    return weights.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"top_k": 5},
        {"top_k": VOCAB_SIZE},
        {"top_k": VOCAB_SIZE + 50},
        {"top_p": 1e-6},
        {"top_p": 0.3},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 7, "top_p": 0.8},
        {"min_p": 0.01, "top_k": 20, "top_p": 0.9, "temperature": 1.5},
        {"top_p": 0.9, "temperature": 0.3},
    ],
    ids=str,
)
def test_kept_tokens_and_weights_equal_hugging_face(
    fields: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    params = SamplingParams(**fields)
    # Distinct in float16 too, since implementations differ in which of equal tokens top-p keeps.
    logits = torch.stack(
        [
            torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(i)) / 8 - 6 + i / 16
            for i in range(16)
        ]
    ).to(dtype)
    expected = kept_by_hugging_face(logits.float(), params)
    weights = weights_of(logits, params, device)
    assert torch.equal(weights > 0, expected.isfinite())
    torch.testing.assert_close(
        weights / weights.sum(-1, keepdim=True), expected.softmax(-1), rtol=2e-5, atol=1e-7
    )


def test_ties_at_the_kth_token_all_stay_and_top_p_prefers_low_ids(device: torch.device) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]])
    assert (weights_of(logits, SamplingParams(top_k=3), device) > 0).tolist() == [
        [False, True, True, True, True, True]
    ]
    kept = weights_of(torch.zeros(1, 8), SamplingParams(top_p=0.5), device) > 0
    assert kept.tolist() == [[True] * 4 + [False] * 4]


def test_top_p_is_a_share_of_the_tokens_that_top_k_kept(device: torch.device) -> None:
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    kept = weights_of(logits, SamplingParams(top_k=2, top_p=0.55), device) > 0
    assert kept.tolist() == [[True, False, False, False]]  # 0.4 of 0.7 is 0.57
