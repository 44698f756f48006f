"""Compares `merge_states` with attention over all keys at once. The outputs of empty parts are NaN."""

import pytest
import torch
from torch import Tensor

from lightkv.triton_kernels.attention.merge_states import merge_states


def make_parts(
    num_parts: int, num_tokens: int, heads: int, dim: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Makes partial outputs and log-sum-exps; each part is empty for some queries, and for one query all parts
    are."""
    out = torch.randn(num_parts, num_tokens, heads, dim)
    lse = torch.randn(num_parts, num_tokens, heads) * 8
    lse[torch.rand(lse.shape) < 0.3] = float("-inf")
    lse[:, 0, 0] = float("-inf")
    out[lse == float("-inf")] = torch.nan
    return out.to(device), lse.to(device)


def test_a_query_that_no_part_has_keys_for_gets_zeros(device: torch.device) -> None:
    torch.manual_seed(3)
    partial_out, partial_lse = make_parts(3, 3, 2, 64, device)
    out = torch.full(partial_out.shape[1:], torch.nan, device=device)
    lse = torch.full(partial_lse.shape[1:], torch.nan, device=device)
    assert merge_states(partial_out, partial_lse, out=out, lse=lse) == (out, lse)
    assert not out.isnan().any()
    assert not out[0, 0].any()
    assert lse[0, 0] == float("-inf")


def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attends from q `[T, H, D]` to k and v `[S, H, D]` in float64; returns output and log-sum-exp in base
    2."""
    scores = torch.einsum("thd,shd->ths", q, k)
    out = torch.einsum("ths,shd->thd", scores.softmax(-1), v)
    return out, scores.logsumexp(-1) / torch.log(torch.tensor(2.0, dtype=torch.float64))


def test_parts_of_the_keys_make_all_of_them(device: torch.device) -> None:
    torch.manual_seed(0)
    q = torch.randn(5, 3, 64, dtype=torch.float64)
    k, v = torch.randn(2, 200, 3, 64, dtype=torch.float64)
    states = [attend(q, k_part, v_part) for k_part, v_part in zip(k.split(63), v.split(63), strict=True)]
    partial_out = torch.stack([out for out, _ in states])
    partial_lse = torch.stack([lse for _, lse in states])
    whole_out, whole_lse = attend(q, k, v)
    for actual, wanted in zip(merge_states(partial_out, partial_lse), (whole_out, whole_lse), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)
    out, lse = merge_states(partial_out.float().to(device), partial_lse.float().to(device))
    torch.testing.assert_close(out.double().cpu(), whole_out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double().cpu(), whole_lse, rtol=1e-5, atol=1e-5)


def test_far_apart_parts_neither_overflow_nor_vanish(device: torch.device) -> None:
    partial_out = (
        torch.tensor([1.0, 2.0, 3.0], device=device).view(3, 1, 1, 1).expand(3, 1, 1, 64).contiguous()
    )
    partial_lse = torch.tensor([-5000.0, 4000.0, 4000.0], device=device).view(3, 1, 1)
    out, lse = merge_states(partial_out, partial_lse)
    torch.testing.assert_close(out, torch.full_like(out, 2.5))
    assert lse.item() == 4001.0


def test_strides_and_a_narrower_output(device: torch.device) -> None:
    torch.manual_seed(1)
    partial_out, partial_lse = make_parts(2, 4, 3, 64, device)
    by_head = partial_out.transpose(1, 2).contiguous().transpose(1, 2)
    lse_by_head = partial_lse.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    out = torch.full((4, 3, 2, 64), torch.nan, dtype=torch.float16, device=device)[:, :, 1]
    merge_states(by_head, lse_by_head, out=out)
    expected, _ = merge_states(partial_out, partial_lse)
    torch.testing.assert_close(out, expected.half(), rtol=1e-3, atol=1e-3)


def test_no_queries(device: torch.device) -> None:
    out, lse = merge_states(torch.empty(2, 0, 3, 64, device=device), torch.empty(2, 0, 3, device=device))
    assert out.shape == (0, 3, 64)
    assert lse.shape == (0, 3)


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    out, lse = torch.zeros(2, 4, 3, 64, device=device), torch.zeros(2, 4, 3, device=device)
    for match, bad_out, bad_lse, settings in [
        ("at least one", out[:0], lse[:0], {}),
        ("partial_lse", out, lse[:, :2], {}),
        ("partial_out must be float32", out.half(), lse, {}),
        ("partial_lse must be float32", out, lse.half(), {}),
        ("out must be", out, lse, {"out": out[0, :2]}),
        ("lse must be", out, lse, {"lse": lse[0, :2]}),
    ]:
        with pytest.raises(ValueError, match=match):
            merge_states(bad_out, bad_lse, **settings)
