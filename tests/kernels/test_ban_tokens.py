"""Compares the kernel that bans tokens with its reference."""

import pytest
import torch

from lightkv.triton_kernels.layers.ban_tokens import ban_tokens, ban_tokens_reference


def random_masks(num: int, num_tokens: int) -> torch.Tensor:
    """Returns masks on the CPU: all tokens, none, the last one of each word, and random ones."""
    words = (num_tokens + 31) // 32
    masks = torch.randint(-(2**31), 2**31, (num, words), dtype=torch.int64).to(torch.int32)
    masks[:3] = torch.tensor([-1, 0, -(2**31)], dtype=torch.int32)[:, None]
    return masks


@pytest.mark.parametrize("num_tokens", [1, 31, 64, 5_003, 8_192])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_tokens_are_banned_as_the_reference_says(
    device: torch.device, dtype: torch.dtype, num_tokens: int
) -> None:
    torch.manual_seed(num_tokens)
    masks = random_masks(6, num_tokens)
    wide = torch.randn(6, num_tokens + 8).to(dtype)  # rows have a stride, and their neighbours stay
    expected, found = wide.clone(), wide.to(device)
    ban_tokens_reference(expected[:, :num_tokens], masks)
    ban_tokens(found[:, :num_tokens], masks.to(device))
    assert torch.equal(found.cpu(), expected)
    allowed = torch.tensor(
        [[masks[row, token // 32] >> token % 32 & 1 for token in (0, -1 % num_tokens)] for row in range(6)]
    )
    first_and_last = expected[:, [0, num_tokens - 1]]
    assert torch.equal(first_and_last.isneginf(), allowed == 0)
    assert torch.equal(expected[:, num_tokens:], wide[:, num_tokens:])


def test_masks_of_another_shape_are_refused(device: torch.device) -> None:
    scores = torch.zeros(2, 40, device=device)
    for masks in (torch.zeros(2, 1), torch.zeros(1, 2), torch.zeros(2, 2)):
        wrong = masks.to(device, torch.int64 if masks.shape == (2, 2) else torch.int32)
        with pytest.raises(ValueError, match=r"give int32 \[2, 2\]"):
            ban_tokens(scores, wrong)
    assert not scores.any()
