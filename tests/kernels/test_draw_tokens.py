"""Tests of the kernels that draw tokens, against their reference."""

import itertools

import pytest
import torch

from lightkv.triton_kernels.compile_ahead import compile_ahead
from lightkv.triton_kernels.layers import draw
from lightkv.triton_kernels.layers.draw import (
    MAX_VOCAB_SIZE,
    Draws,
    Settings,
    draw_tokens,
    draw_tokens_reference,
)
from tests.support.combinations import slow

VOCAB_SIZES = [1, 97, 2048, 5003, *slow(50_257)]
TEMPERATURES, MIN_PS = (1.0, 0.0, 0.7, 3.0), (0.0, 0.05)
TOP_KS, TOP_PS = (0, 1, 5, 200, 2**31 - 1), (1.0, 0.9, 0.4, 1e-6)


def make_draws(device: torch.device) -> Draws:
    """Makes a draw in each combination of settings, which lie in one table as the sampler's do; on a CPU in a
    few of them, with each value."""
    combinations = list(itertools.product(TEMPERATURES, MIN_PS, TOP_KS, TOP_PS))
    combinations = combinations[:: 1 if device.type == "cuda" else 7]
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(-(2**62), 2**62, (len(combinations), 6), generator=generator).to(device)
    reals, integers = table.view(torch.float32), table.view(torch.int32)
    for column, values in zip((4, 5, 7, 6), zip(*combinations, strict=True), strict=True):
        (integers if column == 7 else reals)[:, column] = torch.tensor(values, device=device)
    positions = torch.randint(0, 2**20, (len(combinations),), generator=generator).to(device)
    settings = Settings(reals[:, 4:5], reals[:, 5:6], integers[:, 7:8], reals[:, 6:7])
    return Draws(settings, table[:, 1], positions)


def some(draws: Draws, rows: slice) -> Draws:
    settings, seeds, positions = draws
    return Draws(Settings(*(one[rows] for one in settings)), seeds[rows], positions[rows])


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


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_drawn_tokens_equal_the_reference(vocab_size: int, device: torch.device) -> None:
    draws = make_draws(device)
    num_rows = len(draws.seeds)
    scores = make_scores(num_rows, vocab_size, device)
    before = scores.clone()
    tokens = draw_tokens(scores, draws)
    # Exponentials differ in their last bits, which moves the ends of the tokens' shares by as little.
    assert (tokens != draw_tokens_reference(scores, draws)).sum() <= (vocab_size > 3000)
    assert torch.equal(scores, before)
    row = num_rows // 2 + 7
    assert draw_tokens(scores[row : row + 1], some(draws, slice(row, row + 1))) == tokens[row]


@pytest.mark.parametrize("are_equal", [True, False], ids=["equal", "distinct"])
@pytest.mark.parametrize("few", [1, 1024])
def test_what_top_k_and_top_p_leave_does_not_depend_on_how_many_are_searched_alone(
    few: int, are_equal: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where more tokens than these have one weight, or few is 1, the whole row is searched to the last bit."""
    monkeypatch.setattr(draw, "_FEW", few)
    monkeypatch.setattr(draw, "_CUT_BLOCK", 2048)
    draws = make_draws(device)
    scores = make_scores(len(draws.seeds), 5003, device)
    if not are_equal:
        scores += torch.rand(scores.shape, generator=torch.Generator().manual_seed(1)).to(device)
    assert (draw_tokens(scores, draws) != draw_tokens_reference(scores, draws)).sum() <= 1


@pytest.mark.gpu
def test_tokens_are_of_the_vocabulary_where_kernels_are_only_compiled(device: torch.device) -> None:
    draws = make_draws(device)
    scores = make_scores(len(draws.seeds), 97, device)
    used = torch.full((4096,), -1, dtype=torch.int64, device=device)
    del used  # what is allocated next has these numbers
    with compile_ahead():
        tokens = draw_tokens(scores, draws), draw_tokens(scores)
    assert all(one.min() >= 0 and one.max() < 97 for one in tokens)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_row_without_a_distribution_gets_some_token(device: torch.device) -> None:
    draws = some(make_draws(device), slice(0, 20))
    for bad in range(5):
        scores = torch.zeros(20, 4099, device=device)
        scores[:, :: 4098 if bad > 2 else 1] = (torch.nan, torch.inf, -torch.inf, torch.nan, torch.inf)[bad]
        for tokens in (draw_tokens(scores), draw_tokens(scores, draws)):
            assert tokens.min() >= 0
            assert tokens.max() < 4099


@pytest.mark.slow
def test_the_largest_vocabulary(device: torch.device) -> None:
    scores = make_scores(2, MAX_VOCAB_SIZE, device)
    draws = some(make_draws(device), slice(0, 2))
    assert draw_tokens(scores).tolist() == draw_tokens_reference(scores).tolist()
    scores = torch.zeros_like(scores)
    scores[:, -1] = 100.0
    assert draw_tokens(scores, draws).tolist() == [MAX_VOCAB_SIZE - 1] * 2


def test_rows_that_are_not_contiguous_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="contiguous rows"):
        draw_tokens(torch.zeros(4, 8, device=device).t())
