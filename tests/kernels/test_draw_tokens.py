"""Tests of the kernels that draw tokens, against their reference."""

import pytest
import torch

from lightkv.triton_kernels.compile_ahead import compile_ahead
from lightkv.triton_kernels.layers.draw import MAX_VOCAB_SIZE, Draws, draw_tokens, draw_tokens_reference

VOCAB_SIZES = [1, 97, 2048, 2049, 50_257]


def make_draws(num_rows: int, device: torch.device, seed: int = 0) -> Draws:
    """Makes draws in all combinations of a few settings, which lie in one table as the sampler's do."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.empty(num_rows, 6, dtype=torch.int64, device=device)
    reals, integers = table.view(torch.float32), table.view(torch.int32)
    row = torch.arange(num_rows, device=device)
    reals[:, 4] = torch.tensor([1.0, 0.0, 0.7, 2.0], device=device)[row % 4]
    reals[:, 5] = torch.tensor([0.0, 0.0, 0.05], device=device)[row % 3]
    reals[:, 6] = torch.tensor([1.0, 0.9, 0.4], device=device)[row // 3 % 3]
    integers[:, 7] = torch.tensor([0, 5, 200], device=device)[row // 9 % 3].int()
    table[:, 1] = torch.randint(-(2**62), 2**62, (num_rows,), generator=generator).to(device)
    positions = torch.randint(0, 2**20, (num_rows,), generator=generator).to(device)
    columns = reals[:, 4:5], reals[:, 5:6], integers[:, 7:8], reals[:, 6:7]
    return Draws(*columns, table[:, 1], positions)


def make_scores(num_rows: int, vocab_size: int, device: torch.device) -> torch.Tensor:
    """Makes scores on a coarse grid, so that many are equal."""
    generator = torch.Generator().manual_seed(vocab_size)
    return (8 * torch.randn(num_rows, vocab_size, generator=generator)).round().div(4).to(device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_the_likeliest_token_is_the_lowest_of_equals(
    vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    scores = make_scores(5, vocab_size, device).to(dtype)
    scores[1:3, vocab_size // 2 :: 3] = 100.0
    scores[3] = -torch.inf
    scores[4, :-1] = -torch.inf
    assert draw_tokens(scores).tolist() == draw_tokens_reference(scores).tolist()
    assert draw_tokens(scores)[1] == vocab_size // 2


@pytest.mark.parametrize("is_truncated", [False, True])
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_drawn_tokens_equal_the_reference(vocab_size: int, is_truncated: bool, device: torch.device) -> None:
    draws = make_draws(36, device)
    scores = make_scores(36, vocab_size, device)
    before = scores.clone()
    tokens = draw_tokens(scores, draws, is_truncated)
    # Exponentials differ in their last bits, which moves the ends of the tokens' shares by as little.
    differing = (tokens != draw_tokens_reference(scores, draws, is_truncated)).sum()
    assert differing <= (0 if vocab_size < 3000 else 1)
    assert torch.equal(scores, before)
    assert draw_tokens(scores[7:8], Draws(*(one[7:8] for one in draws)), is_truncated) == tokens[7]


@pytest.mark.gpu
def test_tokens_are_of_the_vocabulary_where_kernels_are_only_compiled(device: torch.device) -> None:
    scores, draws = make_scores(36, 97, device), make_draws(36, device)
    used = torch.full((4096,), -1, dtype=torch.int64, device=device)
    del used  # what is allocated next has these numbers
    with compile_ahead():
        tokens = draw_tokens(scores, draws), draw_tokens(scores, draws, True), draw_tokens(scores)
    assert all(one.min() >= 0 and one.max() < 97 for one in tokens)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_without_a_distribution_gets_some_token(device: torch.device) -> None:
    scores = torch.zeros(6, 4099, device=device)
    scores[0] = torch.nan
    scores[1] = torch.inf
    scores[2] = -torch.inf
    scores[3, 4098] = torch.nan
    scores[4, 7] = torch.inf
    draws = make_draws(6, device)
    for tokens in (draw_tokens(scores), draw_tokens(scores, draws), draw_tokens(scores, draws, True)):
        assert tokens.min() >= 0
        assert tokens.max() < 4099


@pytest.mark.slow
def test_the_largest_vocabulary(device: torch.device) -> None:
    scores = make_scores(2, MAX_VOCAB_SIZE, device)
    draws = make_draws(2, device)
    assert draw_tokens(scores).tolist() == draw_tokens_reference(scores).tolist()
    weights = torch.zeros_like(scores)
    weights[:, -1] = 100.0
    assert draw_tokens(weights, draws).tolist() == [MAX_VOCAB_SIZE - 1] * 2


def test_rows_that_are_not_contiguous_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="contiguous rows"):
        draw_tokens(torch.zeros(4, 8, device=device).t())
